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

/// The first `max` characters of something that came from outside.
pub(crate) fn bounded(text: &str, max: usize) -> String {
    text.chars().take(max).collect()
}
