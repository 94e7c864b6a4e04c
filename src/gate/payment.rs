//! A payment as it was presented: what it is (its identity, which no re-encoding changes), and the checks that need
//! neither the facilitator nor the network.

use std::sync::OnceLock;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use super::challenge::Reason;
use super::{Kind, extensions};
use crate::chain::stellar::{LedgerPoint, PresentedTransfer};
use crate::json::{self, JsonError, Numbers};
use crate::money::{Amount, Network};
use crate::x402::{Offer, VERSION};

/// A payer's clock, and the facilitator's, may differ from ours by this much, seconds.
const SKEW: u64 = 30;
/// An EVM authorization must outlive the settlement by this much (`x402.md` 5.2), seconds.
const EVM_MARGIN: u64 = 6;
/// Ledgers that facilitators tolerate beyond the offer's timeout (`x402.md` 4.5).
const LEDGER_TOLERANCE: u64 = 2;

/// The payment's own identity: SHA-256 over network, asset, payer and nonce. Envelope, fee, signature and everything
/// else that somebody could rewrite is no part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity(pub [u8; 32]);

impl Identity {
    /// What logs show.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..8])
    }
}

/// A `PaymentPayload` that could be read. No Debug: what is in it can be spent.
pub struct Payment {
    pub raw: Box<RawValue>,
    pub accepted: Box<RawValue>,
    pub extensions: Option<Box<RawValue>>,
    pub network: Network,
    pub identity: Identity,
    authorization: Authorization,
    /// What [`Payment::signed`] found.
    signed: OnceLock<Result<(), &'static str>>,
}

enum Authorization {
    Stellar(Box<PresentedTransfer>),
    Evm(Evm),
}

/// EIP-3009 `TransferWithAuthorization`; the signature's form alone is checked.
struct Evm {
    from: String,
    to: String,
    value: Amount,
    valid_after: u64,
    valid_before: u64,
    nonce: String,
}

/// What the checks are made against.
pub struct Now<'a> {
    pub unix_ms: u64,
    /// Stellar: the newest ledger, where it is known; without it only the facilitator judges the expiration.
    pub ledger: Option<LedgerPoint>,
    /// Stellar: no ledger closes faster, milliseconds.
    pub min_ledger_ms: u64,
    /// Stellar: the passphrase of the offer's network.
    pub passphrase: Option<&'a str>,
}

impl Payment {
    /// Reads the raw value of `_meta["x402/payment"]`, which has passed [`json::check`].
    pub fn read(raw: &RawValue) -> Result<Payment, Reason> {
        let invalid = |what| Reason::InvalidPayload(what);
        let members = json::members(raw).map_err(|_| invalid("the payment is no object"))?;
        let get = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
        if get("x402Version").map(RawValue::get) != Some(VERSION.to_string().as_str()) {
            return Err(Reason::InvalidVersion);
        }
        let accepted = get("accepted").ok_or(invalid("accepted is missing"))?;
        let offer = Offer::parse(accepted).map_err(|_| invalid("accepted is no payment option"))?;
        let payload = get("payload").ok_or(invalid("payload is missing"))?;
        let payload_members = json::members(payload).map_err(|_| invalid("payload is no object"))?;
        let part = |name: &str| payload_members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
        let authorization = match offer.network.namespace() {
            "stellar" => {
                let text = part("transaction").and_then(json::string);
                let text = text.ok_or(invalid("payload.transaction is missing"))?;
                Authorization::Stellar(Box::new(PresentedTransfer::read(&text).map_err(|e| invalid(e.0))?))
            }
            "eip155" => {
                let signature = part("signature").and_then(json::string);
                Authorization::Evm(Evm::read(part("authorization"), signature.as_deref()).map_err(invalid)?)
            }
            _ => return Err(Reason::NoMatchingRequirements),
        };
        let (asset, payer, nonce) = match &authorization {
            Authorization::Stellar(transfer) => {
                (transfer.transfer().asset.clone(), transfer.transfer().payer.clone(), transfer.nonce().to_string())
            }
            Authorization::Evm(evm) => (
                offer.asset.as_str().to_ascii_lowercase(),
                evm.from.to_ascii_lowercase(),
                evm.nonce.to_ascii_lowercase(),
            ),
        };
        let identity = [offer.network.as_str(), &asset, &payer, &nonce].join("\0");
        Ok(Payment {
            raw: raw.to_owned(),
            accepted: accepted.to_owned(),
            extensions: get("extensions").filter(|value| value.get() != "null").map(ToOwned::to_owned),
            network: offer.network,
            identity: Identity(Sha256::new().chain_update("tollway claim\0").chain_update(identity).finalize().into()),
            authorization,
            signed: OnceLock::new(),
        })
    }

    /// Whether the signatures are the payer's over this transfer on the network of this passphrase, which is its own;
    /// found out once. An EVM signature's form was checked when it was read.
    pub fn signed(&self, passphrase: &str) -> Result<(), Reason> {
        let Authorization::Stellar(presented) = &self.authorization else { return Ok(()) };
        let found = self.signed.get_or_init(|| presented.verify(passphrase).map(|_| ()).map_err(|e| e.0));
        found.map_err(Reason::InvalidPayload)
    }

    pub fn payer(&self) -> &str {
        match &self.authorization {
            Authorization::Stellar(transfer) => &transfer.transfer().payer,
            Authorization::Evm(evm) => &evm.from,
        }
    }

    /// As the chain names it: decimal on Stellar, 32 bytes of lower-case hex on EVM.
    pub fn nonce(&self) -> String {
        match &self.authorization {
            Authorization::Stellar(transfer) => transfer.nonce().to_string(),
            Authorization::Evm(evm) => evm.nonce.to_ascii_lowercase(),
        }
    }

    /// After which the authorization cannot settle any more: the last ledger on Stellar, unix seconds on EVM.
    pub fn dies_at(&self) -> u64 {
        match &self.authorization {
            Authorization::Stellar(transfer) => u64::from(transfer.expiration()),
            Authorization::Evm(evm) => evm.valid_before,
        }
    }

    /// Whether it pays this offer and can do so in time. `offer` equals `accepted` in every member
    /// (`prices::Book::matching`). Asked before the facilitator is.
    pub fn check(&self, offer: &Offer, now: &Now<'_>) -> Result<(), Reason> {
        let invalid = |what| Err(Reason::InvalidPayload(what));
        match &self.authorization {
            Authorization::Stellar(presented) => {
                let transfer = presented.transfer();
                if transfer.asset != offer.asset.as_str() {
                    return invalid("the transfer is of another asset than the offer's");
                }
                if transfer.pay_to != offer.pay_to {
                    return invalid("the transfer is to another recipient than the offer's");
                }
                if transfer.amount != offer.amount {
                    return invalid("the transfer is of another amount than the offer's");
                }
                if let Some(ledger) = now.ledger {
                    let left = u64::from(presented.expiration()).checked_sub(u64::from(ledger.sequence));
                    let most = most_ledgers(offer, now.min_ledger_ms);
                    match left {
                        None | Some(0) => return invalid("the authorization has expired"),
                        Some(left) if left > most => return invalid("the authorization lives longer than the offer"),
                        Some(_) => {}
                    }
                }
                now.passphrase.map_or(Ok(()), |passphrase| self.signed(passphrase))
            }
            Authorization::Evm(evm) => {
                let seconds = now.unix_ms / 1_000;
                if !Offer::same_address(&offer.network, &evm.to, &offer.pay_to) {
                    return invalid("the transfer is to another recipient than the offer's");
                }
                if evm.value != offer.amount {
                    return invalid("the transfer is of another amount than the offer's");
                }
                if evm.valid_after > seconds + SKEW {
                    return invalid("the authorization is not valid yet");
                }
                if evm.valid_before < seconds + EVM_MARGIN {
                    return invalid("the authorization has expired");
                }
                if evm.valid_before > seconds + offer.max_timeout_seconds + SKEW {
                    return invalid("the authorization lives longer than the offer");
                }
                Ok(())
            }
        }
    }

    /// Before this ledger (Stellar) or second (EVM) nobody settles it who keeps to the offer: its end, less the longest
    /// life that is accepted. What was known when it was first seen would be later, and may not be known at all.
    pub fn earliest(&self, offer: &Offer, min_ledger_ms: u64) -> u64 {
        let life = match &self.authorization {
            Authorization::Stellar(_) => most_ledgers(offer, min_ledger_ms),
            Authorization::Evm(_) => offer.max_timeout_seconds + SKEW,
        };
        self.dies_at().saturating_sub(life)
    }

    /// The payer's identifier, which is proof of a payment's ownership.
    pub fn identifier(&self) -> Result<extensions::Echoed, Reason> {
        extensions::identifier(self.extensions.as_deref())
    }
}

/// Ledgers that an authorization of this offer may live.
fn most_ledgers(offer: &Offer, min_ledger_ms: u64) -> u64 {
    offer.max_timeout_seconds.saturating_mul(1_000).div_ceil(min_ledger_ms.max(1)) + LEDGER_TOLERANCE
}

impl Evm {
    fn read(authorization: Option<&RawValue>, signature: Option<&str>) -> Result<Evm, &'static str> {
        let members =
            authorization.and_then(|raw| json::members(raw).ok()).ok_or("payload.authorization is missing")?;
        let text = |name: &str| {
            let value = members.iter().find(|(key, _)| key == name).map(|(_, value)| *value)?;
            json::string(value).map(std::borrow::Cow::into_owned)
        };
        let hex = |text: &str, bytes: std::ops::RangeInclusive<usize>| {
            text.strip_prefix("0x").is_some_and(|digits| {
                digits.len() % 2 == 0
                    && bytes.contains(&(digits.len() / 2))
                    && digits.bytes().all(|b| b.is_ascii_hexdigit())
            })
        };
        // A smart wallet's signature is longer than an account's 65 bytes.
        if !signature.is_some_and(|signature| hex(signature, 65..=8_192)) {
            return Err("payload.signature is malformed");
        }
        let address = |name| text(name).filter(|text| hex(text, 20..=20));
        let seconds =
            |name| text(name).and_then(|text| text.parse::<Amount>().ok()).and_then(|n| n.to_string().parse().ok());
        Ok(Evm {
            from: address("from").ok_or("authorization.from is no address")?,
            to: address("to").ok_or("authorization.to is no address")?,
            value: text("value").and_then(|text| text.parse().ok()).ok_or("authorization.value is no amount")?,
            valid_after: seconds("validAfter").ok_or("authorization.validAfter is no time")?,
            valid_before: seconds("validBefore").ok_or("authorization.validBefore is no time")?,
            nonce: text("nonce").filter(|text| hex(text, 32..=32)).ok_or("authorization.nonce is not 32 bytes")?,
        })
    }
}

/// What is bought: one request, and one round of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallKey {
    /// Method, target and arguments.
    pub call: [u8; 32],
    /// That with `inputResponses` and `requestState`.
    pub round: [u8; 32],
    /// It has one of these: it goes on with an earlier round.
    pub continues: bool,
}

impl CallKey {
    /// SHA-256 over canonical JSON with numbers as they were written (`1` and `1.0` are two calls); `_meta` is no part.
    pub fn of(kind: Kind, params: &RawValue) -> Result<CallKey, JsonError> {
        let mut rest = json::members(params)?;
        rest.retain(|(name, _)| name != "_meta");
        let (rounds, call): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|(name, _)| matches!(name.as_ref(), "inputResponses" | "requestState"));
        let continues = !rounds.is_empty();
        let hash = |members: Vec<(std::borrow::Cow<'_, str>, &RawValue)>| {
            let object = json::raw(&members.into_iter().collect::<std::collections::BTreeMap<_, _>>());
            json::canonical(&object, Numbers::AsWritten)
        };
        let call: [u8; 32] =
            Sha256::new().chain_update(kind.method()).chain_update("\0").chain_update(hash(call)?).finalize().into();
        let round = Sha256::new().chain_update(call).chain_update(hash(rounds)?).finalize().into();
        Ok(CallKey { call, round, continues })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::prices::tests::{PAY_TO, USDC, terms};
    use super::*;
    use crate::chain::stellar::presented_tests::{PASSPHRASE, payment as transaction};

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    pub fn offer(amount: u64) -> Offer {
        terms(amount).price().unwrap().offer
    }

    fn stellar(transaction: &str) -> Box<RawValue> {
        let offer = offer(10_000);
        raw(&format!(
            r#"{{"x402Version":2,"accepted":{},"payload":{{"transaction":"{transaction}"}}}}"#,
            offer.raw.get()
        ))
    }

    fn now(sequence: u32) -> Now<'static> {
        Now {
            unix_ms: 0,
            ledger: Some(LedgerPoint { sequence, closed_at: 0 }),
            min_ledger_ms: 4_000,
            passphrase: Some(PASSPHRASE),
        }
    }

    /// A good payment of 10,000 by the account of this seed.
    pub fn good(seed: u8, nonce: i64) -> Payment {
        Payment::read(&stellar(&transaction(seed, PAY_TO, USDC, 10_000, nonce, 110, |_| {}))).unwrap()
    }

    #[test]
    fn a_good_payment_passes() {
        let payment = good(1, 5);
        assert_eq!(payment.check(&offer(10_000), &now(100)), Ok(()));
        assert_eq!((payment.nonce().as_str(), payment.dies_at()), ("5", 110));
        assert!(payment.payer().starts_with('G'));
    }

    #[test]
    fn the_identity_is_the_authorizations_and_survives_every_re_encoding() {
        let one = good(1, 5).identity;
        let text = transaction(1, PAY_TO, USDC, 10_000, 5, 110, |envelope| envelope.tx.fee = 999);
        assert_eq!(Payment::read(&stellar(&text)).unwrap().identity, one, "the envelope's fee is nobody's word");
        let longer = transaction(1, PAY_TO, USDC, 10_000, 5, 999, |_| {});
        assert_eq!(Payment::read(&stellar(&longer)).unwrap().identity, one, "signed anew with the same nonce");
        assert_ne!(good(1, 6).identity, one);
        assert_ne!(good(2, 5).identity, one);
    }

    #[test]
    fn what_does_not_pay_the_offer_is_refused_before_the_facilitator_is_asked() {
        let other = "GBZXN7PIRZGNMHGA7MUUUF4GWPY5AYPV6LY4UV2GL6VJGIQRXFDNMADI";
        let xlm = "CDLZFC3SYJYDZT7K67VZ75HPJVIEUVNIXF47ZG2FB2RMQQVU2HHGCYSC";
        for (text, sequence, word) in [
            (transaction(1, PAY_TO, USDC, 10_001, 5, 110, |_| {}), 100, "amount"),
            (transaction(1, PAY_TO, USDC, 9_999, 5, 110, |_| {}), 100, "amount"),
            (transaction(1, other, USDC, 10_000, 5, 110, |_| {}), 100, "recipient"),
            (transaction(1, PAY_TO, xlm, 10_000, 5, 110, |_| {}), 100, "asset"),
            (transaction(1, PAY_TO, USDC, 10_000, 5, 110, |_| {}), 110, "expired"),
            (transaction(1, PAY_TO, USDC, 10_000, 5, 110, |_| {}), 111, "expired"),
            (transaction(1, PAY_TO, USDC, 10_000, 5, 118, |_| {}), 100, "longer"),
        ] {
            let payment = Payment::read(&stellar(&text)).unwrap();
            match payment.check(&offer(10_000), &now(sequence)) {
                Err(Reason::InvalidPayload(what)) => assert!(what.contains(word), "{word}: {what}"),
                outcome => panic!("{word}: {outcome:?}"),
            }
        }
        let mut elsewhere = now(100);
        elsewhere.passphrase = Some("Public Global Stellar Network ; September 2015");
        assert!(good(1, 5).check(&offer(10_000), &elsewhere).is_err(), "signed for another network");
    }

    #[test]
    fn what_is_no_payment_has_a_stable_reason() {
        let good = stellar(&transaction(1, PAY_TO, USDC, 10_000, 5, 110, |_| {}));
        let reason = |text: &str| Payment::read(&raw(text)).err().map(|reason| reason.word().to_owned());
        for (text, word) in [
            ("[]".to_owned(), "invalid_payload"),
            ("{}".into(), "invalid_x402_version"),
            (good.get().replace(r#""x402Version":2"#, r#""x402Version":1"#), "invalid_x402_version"),
            (good.get().replace(r#""x402Version":2"#, r#""x402Version":"2""#), "invalid_x402_version"),
            (good.get().replace(r#""x402Version":2"#, r#""x402Version":2.0"#), "invalid_x402_version"),
            (good.get().replace("accepted", "accept"), "invalid_payload"),
            (good.get().replace("\"transaction\"", "\"tx\""), "invalid_payload"),
            (good.get().replace("stellar:testnet", "solana:testnet"), "no_matching_requirements"),
        ] {
            assert_eq!(reason(&text).as_deref(), Some(word), "{text}");
        }
    }

    const EVM: &str = r#"{"x402Version":2,"accepted":{"scheme":"exact","network":"eip155:8453","amount":"10000","asset":"0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913","payTo":"0x036CbD53842c5426634e7929541eC2318f3dCF7e","maxTimeoutSeconds":60,"extra":{"name":"USD Coin","version":"2"}},"payload":{"signature":"0xSIG","authorization":{"from":"0xAf88d065e77c8cC2239327C5EDb3A432268e5831","to":"0x036cbd53842c5426634e7929541ec2318f3dcf7e","value":"10000","validAfter":"400","validBefore":"1060","nonce":"0xNONCE"}}}"#;

    #[test]
    fn an_evm_payment_is_checked_in_form_amount_recipient_and_time() {
        let text = EVM.replace("SIG", &"ab".repeat(65)).replace("NONCE", &"Cd".repeat(32));
        let check = |text: &str, seconds: u64| {
            let payment = Payment::read(&raw(text)).map_err(|reason| reason.word().to_owned())?;
            let offer = Offer::parse(&payment.accepted).unwrap();
            let now = Now { unix_ms: seconds * 1_000, ledger: None, min_ledger_ms: 4_000, passphrase: None };
            payment.check(&offer, &now).map_err(|reason| match reason {
                Reason::InvalidPayload(what) => what.to_owned(),
                other => other.word().to_owned(),
            })
        };
        assert_eq!(check(&text, 1_000), Ok(()));
        assert!(check(&text, 1_055).unwrap_err().contains("expired"));
        assert!(check(&text, 900).unwrap_err().contains("longer"));
        assert!(check(&text.replace("\"400\"", "\"2000\""), 1_000).unwrap_err().contains("not valid yet"));
        assert!(
            check(&text.replacen(r#""value":"10000""#, r#""value":"10001""#, 1), 1_000).unwrap_err().contains("amount")
        );
        for (from, to) in
            [("0xAf88", "0xZf88"), ("\"400\"", "400"), ("\"1060\"", "\"1e3\""), ("0xab", "ab"), ("0xCd", "0x")]
        {
            assert_eq!(check(&text.replacen(from, to, 1), 1_000).unwrap_err(), "invalid_payload", "{from}");
        }
        let identity = |text: &str| Payment::read(&raw(text)).unwrap().identity;
        let lower =
            text.replace("0xAf88d065e77c8cC2239327C5EDb3A432268e5831", "0xaf88d065e77c8cc2239327c5edb3a432268e5831");
        assert_eq!(identity(&text), identity(&lower.replace(&"Cd".repeat(32), &"cd".repeat(32))));
    }

    #[test]
    fn a_call_is_its_method_target_and_arguments_as_written() {
        let key = |kind, params: &str| CallKey::of(kind, &raw(params)).unwrap();
        let one = key(Kind::Tool, r#"{"name":"t","arguments":{"a":1,"b":2}}"#);
        assert_eq!(key(Kind::Tool, r#"{ "arguments" : {"b":2,"a":1}, "name":"\u0074", "_meta":{"x":1}}"#), one);
        for other in [
            r#"{"name":"t","arguments":{"a":1.0,"b":2}}"#,
            r#"{"name":"t","arguments":{"a":1}}"#,
            r#"{"name":"u","arguments":{"a":1,"b":2}}"#,
            r#"{"name":"t"}"#,
        ] {
            assert_ne!(key(Kind::Tool, other).call, one.call, "{other}");
        }
        assert_ne!(key(Kind::Prompt, r#"{"name":"t","arguments":{"a":1,"b":2}}"#).call, one.call);
        let next =
            key(Kind::Tool, r#"{"name":"t","arguments":{"a":1,"b":2},"inputResponses":{"q":1},"requestState":"s"}"#);
        assert_eq!((next.call, next.continues, one.continues), (one.call, true, false));
        assert_ne!(next.round, one.round);
    }
}
