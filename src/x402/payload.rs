//! What the payer sends: the payment's identifier, and the `PaymentPayload` (core specification 5.2).

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use super::{Offer, PAYMENT_IDENTIFIER};
use crate::json;
use crate::money::PaymentId;

/// What a payment is for. With a random nonce it makes the [`PaymentId`].
#[derive(Debug, Clone, Copy)]
pub struct PaymentFor<'a> {
    /// `catalog::ResourceRef` as text.
    pub resource_ref: &'a str,
    pub version_hash: &'a str,
    /// SHA-256 of the logical call (resource, arguments), as the ledger keeps it.
    pub call_hash: &'a [u8; 32],
    pub offer: &'a Offer,
}

/// SHA-256 over the canonical JSON of
/// `{"amount","asset","callHash","network","nonce","payTo","ref","scheme","versionHash"}`: amount in atomic units as a
/// decimal string, hashes and nonce in lower-case hex, the rest as on the wire. The nonce (128 random bits, one per
/// logical call, kept in the payment's row) makes it impossible to guess: it is the key to a lost output.
pub fn payment_id(what: &PaymentFor<'_>, nonce: &[u8; 16]) -> PaymentId {
    let text = |s: &str| json::raw(s).get().to_owned();
    // Members in canonical order, no white space; every value is a string, so this is RFC 8785 as it stands.
    let canonical = format!(
        r#"{{"amount":{},"asset":{},"callHash":{},"network":{},"nonce":{},"payTo":{},"ref":{},"scheme":{},"versionHash":{}}}"#,
        text(&what.offer.amount.to_string()),
        text(what.offer.asset.as_str()),
        text(&hex::encode(what.call_hash)),
        text(what.offer.network.as_str()),
        text(&hex::encode(nonce)),
        text(&what.offer.pay_to),
        text(what.resource_ref),
        text(&what.offer.scheme),
        text(what.version_hash),
    );
    PaymentId::from_bytes(Sha256::digest(canonical.as_bytes()).into())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// The challenge's parser refuses such extensions, so this is met only by values that did not come from it.
    #[error("the challenge's payment-identifier extension cannot carry an identifier")]
    Extensions,
}

/// The raw `PaymentPayload`: `accepted` is the offer's bytes unchanged, `resource` and `extensions` are the
/// challenge's bytes, with `info.id` added under `payment-identifier` wherever the challenge advertises it.
/// `payload` is the scheme's object (Stellar `exact`: `{"transaction": "<base64 XDR>"}`).
pub fn payment_payload(
    offer: &Offer,
    payload: &RawValue,
    resource: Option<&RawValue>,
    extensions: Option<&RawValue>,
    id: PaymentId,
) -> Result<Box<RawValue>, PayloadError> {
    let mut out = String::with_capacity(256 + offer.raw.get().len() + payload.get().len());
    out.push_str("{\"x402Version\":2,\"accepted\":");
    out.push_str(offer.raw.get());
    out.push_str(",\"payload\":");
    out.push_str(payload.get());
    if let Some(resource) = resource {
        out.push_str(",\"resource\":");
        out.push_str(resource.get());
    }
    if let Some(extensions) = extensions {
        out.push_str(",\"extensions\":");
        out.push_str(&with_identifier(extensions, id)?);
    }
    out.push('}');
    RawValue::from_string(out).map_err(|_| PayloadError::Extensions)
}

/// `extensions` with `"id"` as the first member of `payment-identifier.info`, every other byte unchanged.
fn with_identifier(extensions: &RawValue, id: PaymentId) -> Result<String, PayloadError> {
    let text = extensions.get();
    let members = json::members(extensions).map_err(|_| PayloadError::Extensions)?;
    let Some((_, extension)) = members.iter().find(|(key, value)| key == PAYMENT_IDENTIFIER && value.get() != "null")
    else {
        return Ok(text.to_owned());
    };
    let inner = json::members(extension).map_err(|_| PayloadError::Extensions)?;
    let member = format!("\"id\":\"{}\"", id.to_hex());
    let (object, insert, empty) = match inner.iter().find(|(key, _)| key == "info") {
        None => (*extension, format!("\"info\":{{{member}}}"), inner.is_empty()),
        Some((_, info)) => {
            let members = json::members(info).map_err(|_| PayloadError::Extensions)?;
            if members.iter().any(|(key, _)| key == "id") {
                return Err(PayloadError::Extensions);
            }
            (*info, member, members.is_empty())
        }
    };
    // A borrowed raw value is a slice of the text that it was read from, so its distance is its place.
    let start = (object.get().as_ptr() as usize).checked_sub(text.as_ptr() as usize).ok_or(PayloadError::Extensions)?;
    let (head, tail) = text.split_at_checked(start + 1).ok_or(PayloadError::Extensions)?;
    Ok(format!("{head}{insert}{}{tail}", if empty { "" } else { "," }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::{Limits, check, member};
    use proptest::prelude::*;

    const OFFER: &str = r#"{ "scheme":"exact","network":"stellar:testnet", "amount":"10000","asset":"CA","payTo":"GA","maxTimeoutSeconds":60,"extra":{"n":1.0} }"#;

    fn raw(text: &str) -> &RawValue {
        check(text.as_bytes(), Limits { bytes: 1 << 20, depth: 32 }).unwrap()
    }

    fn built(extensions: Option<&str>) -> String {
        let offer = Offer::parse(raw(OFFER)).unwrap();
        let id = PaymentId::from_bytes([0xab; 32]);
        let payload = raw(r#"{"transaction":"AAAA"}"#);
        let resource = raw(r#"{"url":"u", "x":1.50}"#);
        payment_payload(&offer, payload, Some(resource), extensions.map(raw), id).unwrap().get().to_owned()
    }

    #[test]
    fn echoes_every_byte_and_adds_the_identifier() {
        let extensions =
            r#"{ "bazaar": {"info":{"v":1.0}}, "payment-identifier": { "schema":{}, "info": { "required" : true } } }"#;
        let text = built(Some(extensions));
        let id = "ab".repeat(32);
        let expected = extensions.replace("{ \"required\"", &format!("{{\"id\":\"{id}\", \"required\""));
        assert_eq!(
            text,
            format!(
                r#"{{"x402Version":2,"accepted":{OFFER},"payload":{{"transaction":"AAAA"}},"resource":{{"url":"u", "x":1.50}},"extensions":{expected}}}"#
            )
        );
    }

    #[test]
    fn the_identifier_goes_wherever_it_is_advertised_and_nowhere_else() {
        let id = format!("\"{}\"", "ab".repeat(32));
        for advertised in [
            r#"{"payment-identifier":{"info":{}}}"#,
            r#"{"payment-identifier":{}}"#,
            r#"{"payment-identifier":{"schema":{}}}"#,
            r#"{"a":{"info":{}},"payment\u002didentifier":{"info":{"required":false}}}"#,
        ] {
            let text = built(Some(advertised));
            let extensions = member(raw(&text), "extensions").unwrap();
            let info = member(member(extensions, PAYMENT_IDENTIFIER).unwrap(), "info").unwrap();
            assert_eq!(member(info, "id").unwrap().get(), id, "{advertised}");
        }
        for silent in [r#"{}"#, r#"{"bazaar":{"info":{}}}"#, r#"{"payment-identifier":null}"#] {
            assert!(built(Some(silent)).ends_with(&format!("\"extensions\":{silent}}}")), "{silent}");
        }
        assert!(!built(None).contains("extensions"));
    }

    #[test]
    fn an_identifier_of_the_sellers_is_never_overwritten() {
        let offer = Offer::parse(raw(OFFER)).unwrap();
        let extensions = raw(r#"{"payment-identifier":{"info":{"id":"theirs_0123456789"}}}"#);
        let id = PaymentId::from_bytes([1; 32]);
        assert_eq!(
            payment_payload(&offer, raw("{}"), None, Some(extensions), id).err(),
            Some(PayloadError::Extensions)
        );
    }

    #[test]
    fn the_identifier_depends_on_everything_that_is_paid_for() {
        let offer = Offer::parse(raw(OFFER)).unwrap();
        let what = PaymentFor { resource_ref: "v1.x", version_hash: "00", call_hash: &[1; 32], offer: &offer };
        let id = payment_id(&what, &[7; 16]);
        // Computed apart with Python's hashlib over the canonical text of the documentation.
        assert_eq!(id.to_hex(), "beb8fd7e0c17cb299e5f04da69f2dc3b474ab0e38ee5e01f8c54800df7dbe632");
        assert_ne!(payment_id(&what, &[8; 16]), id);
        assert_ne!(payment_id(&PaymentFor { resource_ref: "v1.y", ..what }, &[7; 16]), id);
        assert_ne!(payment_id(&PaymentFor { version_hash: "01", ..what }, &[7; 16]), id);
        assert_ne!(payment_id(&PaymentFor { call_hash: &[2; 32], ..what }, &[7; 16]), id);
        for (from, to) in [("\"10000\"", "\"10001\""), ("\"CA\"", "\"CB\""), ("\"GA\"", "\"GB\""), ("exact", "upto")] {
            let other = OFFER.replace(from, to);
            let other = Offer::parse(raw(&other)).unwrap();
            assert_ne!(payment_id(&PaymentFor { offer: &other, ..what }, &[7; 16]), id, "{from}");
        }
    }

    proptest! {
        /// Whatever else a seller declares leaves as it came, white space and number spelling included.
        #[test]
        fn extensions_are_echoed_byte_for_byte(
            before in "[ ]{0,2}\"[a-z]{1,8}\"[ ]?:[ ]?(1\\.0|\\{[ ]*\\}|\"\\\\u00e9\"|\\[1e3, 2\\])",
            info in prop_oneof!["", "[ ]*\"required\"[ ]?:[ ]?(true|false)", "\"a\":\\{\"info\":\\{\\}\\}"],
            spaces in "[ ]{0,3}",
        ) {
            let head = format!("{{{before},{spaces}\"payment-identifier\"{spaces}:{{\"schema\":{{}},\"info\":{{");
            let tail = format!("{info}}}{spaces}}} }}");
            let text = built(Some(&format!("{head}{tail}")));
            let comma = if info.is_empty() { "" } else { "," };
            let id = "ab".repeat(32);
            prop_assert!(text.ends_with(&format!("\"extensions\":{head}\"id\":\"{id}\"{comma}{tail}}}")), "{}", text);
        }
    }
}
