//! x402 version 2 on the wire: the objects of the core specification and of its MCP transport. No I/O.
//! Whatever arrived stays raw, so that it is echoed byte for byte; what decides something is parsed once beside it.

pub mod assets;
pub mod bazaar;
mod challenge;
mod offer;
mod payload;
mod settlement;

pub use challenge::{Answer, Broken, Challenge, classify, classify_error, payment_required};
pub use offer::{Flow, Offer, OfferError};
pub use payload::{PayloadError, PaymentFor, payment_id, payment_payload};
pub use settlement::{Settlement, SettlementError};

use crate::json::Limits;

/// The protocol version on the wire; nothing else is spoken.
pub const VERSION: u8 = 2;
/// Where a `PaymentPayload` travels in `params._meta` (MCP transport).
pub const META_PAYMENT: &str = "x402/payment";
/// Where a `SettlementResponse` travels in `result._meta` (MCP transport).
pub const META_PAYMENT_RESPONSE: &str = "x402/payment-response";
/// The extension that carries the payer's identifier of one logical payment.
pub const PAYMENT_IDENTIFIER: &str = "payment-identifier";
/// The name of the MCP extension binding (`resultType: "payment_required"`) among the capabilities.
pub const MCP_EXTENSION: &str = "org.x402/payment";

/// Either copy of a challenge: 262,144 bytes; 64 levels leave room for the JSON schema in the bazaar extension.
pub const CHALLENGE_LIMITS: Limits = Limits { bytes: 262_144, depth: 64 };

/// As long as the shortest thing that must not be echoed: a payment identifier in hex. A signature, a transaction and
/// a token are longer; an account, a contract and a plain word are shorter.
const ECHO_CHARS: usize = 64;
/// `S` and 55 characters: a Stellar seed.
const SEED_CHARS: usize = 56;
/// More of a foreign text is not looked at.
const MAX_READ: usize = 8_192;

/// The words of somebody outside, fit for an error or a log: one line of at most `max` characters, in which whatever
/// looks like a signature, a payload, an identifier or a seed is replaced by its length. A chain RPC, a signer or a
/// facilitator may quote in its complaint what it was sent.
pub(crate) fn words(text: &str, max: usize) -> String {
    let mut out = String::new();
    let mut run = String::new();
    let end = |out: &mut String, run: &mut String| {
        let seed = run.len() == SEED_CHARS && run.starts_with('S') && run.bytes().all(|b| b.is_ascii_alphanumeric());
        if run.len() >= ECHO_CHARS || seed {
            out.push_str(&format!("({} characters)", run.len()));
        } else {
            out.push_str(run);
        }
        run.clear();
    };
    for c in text.chars().take(MAX_READ).map(|c| if c.is_control() { ' ' } else { c }) {
        if c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=' | '_' | '-') {
            run.push(c);
        } else {
            end(&mut out, &mut run);
            out.push(c);
        }
    }
    end(&mut out, &mut run);
    out.chars().take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn words_from_outside_are_one_bounded_line_without_what_they_could_echo() {
        let (id, signature, seed) = ("ab".repeat(32), "Ab+/".repeat(22), format!("S{}", "A2".repeat(27) + "B"));
        let account = format!("G{}", "A".repeat(55));
        let text = format!("tx {signature}== of\n{id} by {seed}, not {account}");
        let shown = words(&text, 300);
        assert_eq!(shown, format!("tx (90 characters) of (64 characters) by (56 characters), not {account}"));
        assert_eq!(words("insufficient_funds: 5 < 10", 300), "insufficient_funds: 5 < 10");
        assert_eq!(words(&"a b ".repeat(500), 10), "a b a b a ");
        assert_eq!(words(&"x".repeat(100_000), 300), "(8192 characters)");
    }
}
