//! What a settle's answer is worth (`docs/outcomes.md`, table "Gate", phase "settle"). A yes is evidence if all of it is
//! right. A no is one only in answer to the first settle of a payment, without a transaction, and for a reason that the
//! payment's form alone decides; whatever else comes back, the money may have moved.

use crate::facilitator::FacilitatorError;
use crate::money::Network;
use crate::x402::{Offer, Settlement};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
    Settled,
    /// The facilitator's own word.
    Failed(String),
    /// The identical request is sent once more.
    Pending,
    /// A stable word, and the facilitator's own behind it where there is one.
    Unknown(String),
}

/// Reasons that a facilitator finds before it broadcasts anything, from the bytes of the payment and its requirements
/// (`x402.md` 1.9, 4.5, 5.2). None is about a nonce, a balance, a simulation or a transaction: those can be the echo of
/// a settle that went through. A signature that was settled is as good afterwards, so a no to it is no echo either.
const STRUCTURAL: [&str; 29] = [
    "invalid_exact_evm_authorization_value",
    "invalid_exact_evm_missing_eip712_domain",
    "invalid_exact_evm_network_mismatch",
    "invalid_exact_evm_payload_recipient_mismatch",
    "invalid_exact_evm_payload_signature",
    "invalid_exact_evm_recipient_mismatch",
    "invalid_exact_evm_scheme",
    "invalid_exact_evm_signature",
    "invalid_exact_stellar_payload_facilitator_in_auth",
    "invalid_exact_stellar_payload_facilitator_is_payer",
    "invalid_exact_stellar_payload_has_subinvocations",
    "invalid_exact_stellar_payload_malformed",
    "invalid_exact_stellar_payload_missing_payer_signature",
    "invalid_exact_stellar_payload_no_auth_entries",
    "invalid_exact_stellar_payload_unsafe_tx_or_op_source",
    "invalid_exact_stellar_payload_unsupported_credential_type",
    "invalid_exact_stellar_payload_wrong_amount",
    "invalid_exact_stellar_payload_wrong_asset",
    "invalid_exact_stellar_payload_wrong_function_name",
    "invalid_exact_stellar_payload_wrong_operation",
    "invalid_exact_stellar_payload_wrong_recipient",
    "invalid_exact_stellar_signature_expiration_too_far",
    "invalid_network",
    "invalid_payment_requirements",
    "invalid_scheme",
    "invalid_stellar_asset_not_allowed",
    "invalid_x402_version",
    "network_mismatch",
    "unsupported_scheme",
];

/// `first`: no settle of this payment was ever begun before. `repeated`: this answer is to the one identical repetition
/// that `settlement_pending` gets.
pub fn judge(
    answer: Result<&Settlement, &FacilitatorError>,
    network: &Network,
    payer: &str,
    first: bool,
    repeated: bool,
) -> Judged {
    let unknown = |what: &str, said: Option<&str>| {
        Judged::Unknown(match said {
            Some(said) => format!("{what}: {said}"),
            None => what.to_owned(),
        })
    };
    let settlement = match answer {
        Ok(settlement) => settlement,
        Err(error) => return unknown("no_usable_answer", Some(&error.to_string())),
    };
    let said = settlement.error_reason.as_deref();
    if settlement.network != network.as_str() {
        return unknown("wrong_network", said);
    }
    if settlement.payer.as_deref().is_some_and(|other| !Offer::same_address(network, other, payer)) {
        return unknown("wrong_payer", said);
    }
    if settlement.success {
        return match settlement.transaction.is_empty() {
            true => unknown("no_transaction", said),
            false => Judged::Settled,
        };
    }
    // Without a transaction there is nothing that the same question could find.
    if settlement.is_pending() && !settlement.transaction.is_empty() && !repeated {
        return Judged::Pending;
    }
    match said {
        Some(said) if first && !repeated && settlement.transaction.is_empty() && STRUCTURAL.contains(&said) => {
            Judged::Failed(said.to_owned())
        }
        said => unknown("facilitator_says_no", said),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    fn judged(text: &str, first: bool, repeated: bool) -> Judged {
        let raw = RawValue::from_string(text.to_owned()).unwrap();
        let parsed = Settlement::parse(&raw).map_err(|e| FacilitatorError::Malformed(e.to_string()));
        judge(parsed.as_ref(), &"stellar:testnet".parse().unwrap(), "GA", first, repeated)
    }

    fn unknown(text: &str) -> bool {
        matches!(judged(text, true, false), Judged::Unknown(_))
    }

    #[test]
    fn a_yes_counts_if_all_of_it_is_right() {
        let yes = r#"{"success":true,"transaction":"ab","network":"stellar:testnet","payer":"GA"}"#;
        assert_eq!(judged(yes, true, false), Judged::Settled);
        assert_eq!(judged(yes, false, true), Judged::Settled);
        assert_eq!(judged(&yes.replace(r#","payer":"GA""#, ""), true, false), Judged::Settled);
        for (from, to) in [
            ("testnet", "pubnet"),
            ("\"GA\"", "\"GB\""),
            ("\"GA\"", "\"ga\""),
            ("\"ab\"", "\"\""),
            ("true", "\"true\""),
            ("true", "1"),
            ("\"success\":true,", ""),
            ("\"transaction\":\"ab\",", ""),
        ] {
            assert!(unknown(&yes.replace(from, to)), "{from} {to}");
        }
        assert!(unknown("{}"));
    }

    #[test]
    fn a_no_counts_only_first_without_a_transaction_and_for_its_form() {
        let no = |reason: &str, transaction: &str| {
            format!(
                r#"{{"success":false,"errorReason":"{reason}","transaction":"{transaction}","network":"stellar:testnet"}}"#
            )
        };
        let structural = "invalid_exact_stellar_payload_wrong_amount";
        for reason in [structural, "invalid_exact_evm_signature"] {
            assert_eq!(judged(&no(reason, ""), true, false), Judged::Failed(reason.into()));
        }
        assert!(matches!(judged(&no(structural, ""), false, false), Judged::Unknown(_)), "not the first settle");
        assert!(unknown(&no(structural, "ab")), "it has a transaction");
        for lie in [
            "invalid_exact_stellar_payload_simulation_failed",
            "invalid_exact_evm_nonce_already_used",
            "insufficient_funds",
            "unexpected_settle_error",
            "settle_exact_stellar_transaction_failed",
            "settle_exact_stellar_transaction_submission_failed",
            "",
            "anything new",
        ] {
            assert!(unknown(&no(lie, "")), "{lie}");
        }
        assert!(
            !STRUCTURAL.iter().any(|r| ["nonce", "simulation", "transaction", "balance"].iter().any(|w| r.contains(w)))
        );
    }

    #[test]
    fn pending_is_asked_once_more_and_never_without_a_transaction() {
        let pending =
            r#"{"success":false,"errorReason":"settlement_pending","transaction":"ab","network":"stellar:testnet"}"#;
        assert_eq!(judged(pending, true, false), Judged::Pending);
        assert!(matches!(judged(pending, true, true), Judged::Unknown(_)));
        assert!(unknown(&pending.replace("\"ab\"", "\"\"")));
    }

    #[test]
    fn an_error_says_nothing_about_the_money() {
        for error in [FacilitatorError::Status(500), FacilitatorError::Malformed("HTML".into())] {
            let judged = judge(Err(&error), &"stellar:testnet".parse().unwrap(), "GA", true, false);
            assert!(matches!(judged, Judged::Unknown(_)));
        }
    }
}
