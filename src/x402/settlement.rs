//! What the seller says about the settlement (`SettlementResponse`, core specification 5.3).

use serde_json::value::RawValue;

use super::{META_PAYMENT_RESPONSE, words};
use crate::json;

/// The seller's claim, unauthenticated: well formed, and nothing more is known about it.
#[derive(Debug, Clone)]
pub struct Settlement {
    pub success: bool,
    /// The facilitator's word, at most 200 characters.
    pub error_reason: Option<String>,
    pub payer: Option<String>,
    /// Empty where nothing was broadcast.
    pub transaction: String,
    pub network: String,
    /// Atomic units as the seller wrote them; not parsed here, because a wrong one is a mismatch and not a syntax error.
    pub amount: Option<String>,
}

/// Which member is wrong. The word is stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the settlement response's {0} is missing or malformed")]
pub struct SettlementError(pub &'static str);

impl Settlement {
    /// From `result._meta["x402/payment-response"]` of a raw result that has passed [`json::check`]. `None` where the
    /// result carries none; a value of the wrong type anywhere is an error, never read as success or failure.
    pub fn from_result(result: &RawValue) -> Result<Option<Settlement>, SettlementError> {
        let Some(meta) = json::member(result, "_meta") else { return Ok(None) };
        if meta.get() == "null" {
            return Ok(None);
        }
        let members = json::members(meta).map_err(|_| SettlementError("_meta"))?;
        match members.iter().find(|(key, _)| key == META_PAYMENT_RESPONSE) {
            Some((_, raw)) => Settlement::parse(raw).map(Some),
            None => Ok(None),
        }
    }

    /// From the `data` of a JSON-RPC error: in its `_meta` as in a result, or beside it (a tool that failed after an
    /// upfront settlement).
    pub fn from_error_data(data: &RawValue) -> Result<Option<Settlement>, SettlementError> {
        match Settlement::from_result(data)? {
            None => json::member(data, META_PAYMENT_RESPONSE).map(Settlement::parse).transpose(),
            found => Ok(found),
        }
    }

    pub fn parse(raw: &RawValue) -> Result<Settlement, SettlementError> {
        let members = json::members(raw).map_err(|_| SettlementError("object"))?;
        let get = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
        let required = |name: &'static str, max: usize| {
            get(name)
                .and_then(json::string)
                .filter(|s| s.len() <= max)
                .map(|s| s.into_owned())
                .ok_or(SettlementError(name))
        };
        let optional = |name: &'static str, max: usize| match get(name) {
            None => Ok(None),
            Some(value) if value.get() == "null" => Ok(None),
            Some(_) => required(name, max).map(Some),
        };
        let success = match get("success").map(RawValue::get) {
            Some("true") => true,
            Some("false") => false,
            _ => return Err(SettlementError("success")),
        };
        Ok(Settlement {
            success,
            error_reason: optional("errorReason", 4_096)?.map(|reason| words(&reason, 200)),
            payer: optional("payer", 128)?,
            transaction: required("transaction", 256)?,
            network: required("network", 64)?,
            amount: optional("amount", 100)?,
        })
    }

    /// A claim that may still become true: `settlement_pending`, which must name its transaction (`x402.md` 1.4).
    pub fn is_pending(&self) -> bool {
        !self.success && self.error_reason.as_deref() == Some("settlement_pending")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Limits;

    fn raw(text: &str) -> &RawValue {
        json::check(text.as_bytes(), Limits { bytes: 1 << 20, depth: 32 }).unwrap()
    }

    #[test]
    fn reads_a_receipt_and_tolerates_null_optionals() {
        let result = r#"{"content":[],"_meta":{"progress":1,"x402/payment-response":{"success":true,"errorReason":null,
            "payer":null,"transaction":"ab","network":"stellar:testnet","amount":"5","status":"new"}}}"#;
        let settlement = Settlement::from_result(raw(result)).unwrap().unwrap();
        assert!(settlement.success);
        assert_eq!((settlement.transaction.as_str(), settlement.amount.as_deref()), ("ab", Some("5")));
        assert!(settlement.payer.is_none());
    }

    #[test]
    fn no_receipt_is_none() {
        for none in [r#"{"content":[]}"#, r#"{"_meta":{}}"#, r#"{"_meta":null}"#, "[]"] {
            assert!(Settlement::from_result(raw(none)).unwrap().is_none(), "{none}");
        }
    }

    #[test]
    fn a_mistyped_receipt_is_neither_success_nor_failure() {
        for (bad, member) in [
            ("{}", "success"),
            ("null", "object"),
            ("\"eyJ9\"", "object"),
            (r#"{"success":"true","transaction":"a","network":"n"}"#, "success"),
            (r#"{"success":1,"transaction":"a","network":"n"}"#, "success"),
            (r#"{"success":null,"transaction":"a","network":"n"}"#, "success"),
            (r#"{"Success":true,"transaction":"a","network":"n"}"#, "success"),
            (r#"{"success":true,"network":"n"}"#, "transaction"),
            (r#"{"success":true,"transaction":null,"network":"n"}"#, "transaction"),
            (r#"{"success":true,"transaction":"a"}"#, "network"),
            (r#"{"success":true,"transaction":"a","network":"n","payer":7}"#, "payer"),
            (r#"{"success":true,"transaction":"a","network":"n","amount":5}"#, "amount"),
            (r#"{"success":false,"transaction":"","network":"n","errorReason":{}}"#, "errorReason"),
        ] {
            let result = format!(r#"{{"_meta":{{"x402/payment-response":{bad}}}}}"#);
            assert_eq!(Settlement::from_result(raw(&result)).err(), Some(SettlementError(member)), "{bad}");
        }
        assert_eq!(Settlement::from_result(raw(r#"{"_meta":[]}"#)).err(), Some(SettlementError("_meta")));
    }

    #[test]
    fn pending_is_recognised() {
        let text = r#"{"success":false,"transaction":"ab","network":"n","errorReason":"settlement_pending"}"#;
        assert!(Settlement::parse(raw(text)).unwrap().is_pending());
    }
}
