//! What one request is told, and the word of `docs/outcomes.md` (table "Gate", last column) under which it is counted.

use serde_json::value::RawValue;

use super::challenge::{self, Binding, Reason, Withheld, with_receipt};
use super::desk::Answer;
use super::prices::Item;
use super::sell::{Ran, Sold};
use super::{Kind, listing, splice};
use crate::json;
use crate::mcp::{Revision, RpcError, code};
use crate::x402::META_PAYMENT_RESPONSE;

pub(super) struct Told {
    pub outcome: &'static str,
    pub answer: Answer,
}

impl Told {
    pub fn error(outcome: &'static str, error: RpcError) -> Told {
        Told { outcome, answer: Answer::Error(error) }
    }

    pub fn free() -> Told {
        Told { outcome: "free", answer: Answer::Free }
    }

    /// A fault of ours, which nobody may read as a demand.
    pub fn internal(outcome: &'static str) -> Told {
        Told::error(
            outcome,
            RpcError::internal(
                "The payment could not be handled, and nothing was charged by this request: repeat it later with the \
                 same payment",
            ),
        )
    }

    /// A fault of ours about a payment that may have settled, or has: nothing is promised, and the receipt is there.
    pub fn unreadable(outcome: &'static str, receipt: Option<&RawValue>) -> Told {
        let text = "What became of this payment cannot be told now. Do not pay again: repeat the request later with the \
                    same payment";
        let error = RpcError::internal(text);
        Told::error(
            outcome,
            match receipt {
                Some(receipt) => with_data(error, receipt),
                None => error,
            },
        )
    }

    /// As a server answers that never heard of it.
    pub fn not_found(kind: Kind, revision: Revision) -> Told {
        let (number, what) = match kind {
            Kind::Tool => (code::INVALID_PARAMS, "Unknown tool"),
            Kind::Prompt => (code::INVALID_PARAMS, "Unknown prompt"),
            Kind::Resource if revision.stateless() => (code::INVALID_PARAMS, "Resource not found"),
            Kind::Resource => (code::RESOURCE_NOT_FOUND, "Resource not found"),
        };
        Told::error("not_found", RpcError::new(number, what))
    }

    pub fn refused(refusal: Result<Box<RawValue>, RpcError>) -> Told {
        let answer = match refusal {
            Ok(result) => Answer::Result(result),
            Err(error) => Answer::Error(error),
        };
        Told { outcome: "invalid_arguments", answer }
    }

    /// A hook's own answer, whatever it says: an error result that is no demand.
    pub fn halted(kind: Kind, status: u16, body: &RawValue) -> Told {
        let structured = match body.get().starts_with('{') {
            true => body.to_owned(),
            false => json::raw(&std::collections::BTreeMap::from([("body", body)])),
        };
        let strict = match kind {
            Kind::Tool => "",
            Kind::Resource => r#","contents":[]"#,
            Kind::Prompt => r#","messages":[]"#,
        };
        let text = format!(
            r#"{{"content":[{{"type":"text","text":{}}}],"structuredContent":{structured},"isError":true{strict},"_meta":{{"tollway/status":{status}}}}}"#,
            json::raw(structured.get())
        );
        match RawValue::from_string(text) {
            Ok(result) => Told { outcome: "hook_halted", answer: Answer::Result(result) },
            Err(_) => Told::internal("hook_failed"),
        }
    }

    /// A client that sends junk is not asked for more.
    pub fn too_many() -> Told {
        let mut error = RpcError::internal("Too many payments that could not be used: try again later");
        error.data = Some(json::raw(&serde_json::json!({"reason": "too_many_payments", "retryable": true})));
        Told::error("too_many_payments", error)
    }

    pub fn challenge(
        binding: Binding,
        item: &Item,
        key: &str,
        reason: &Reason,
        extensions: &RawValue,
        receipt: Option<&RawValue>,
    ) -> Told {
        let required = challenge::required(item, key, reason, extensions);
        Told { outcome: reason.word(), answer: Answer::Result(challenge::result(binding, &required, receipt)) }
    }

    pub fn withheld(kind: Kind, withheld: Withheld, receipt: Option<&RawValue>) -> Told {
        Told { outcome: withheld.word(), answer: Answer::Result(withheld.result(kind, receipt)) }
    }

    pub fn with_receipt(outcome: &'static str, result: &RawValue, receipt: &RawValue) -> Told {
        let shared = listing::unshared(result);
        let result = shared.as_deref().unwrap_or(result);
        match with_receipt(result, receipt) {
            Some(result) => Told { outcome, answer: Answer::Result(result) },
            None => Told::unreadable("internal", Some(receipt)),
        }
    }

    /// What a handler did whose payment is settled.
    pub fn ran(outcome: &'static str, ran: Ran, receipt: &RawValue) -> Told {
        match ran {
            Ran::Output(result) | Ran::Asks(result) | Ran::Failed(result) => {
                Told::with_receipt(outcome, &result, receipt)
            }
            Ran::Error(error) => Told::error(outcome, with_data(error, receipt)),
        }
    }

    /// The ends of a sale that are no challenge and are not left to the claim.
    pub fn sold(kind: Kind, sold: Sold) -> Told {
        match sold {
            Sold::Delivered { ran, receipt } => {
                let outcome = match ran {
                    Ran::Output(_) | Ran::Asks(_) => "sold",
                    Ran::Failed(_) | Ran::Error(_) => "sold_and_failed",
                };
                Told::ran(outcome, ran, &receipt)
            }
            Sold::Uncharged(Ran::Error(error)) => Told::error("uncharged", error),
            Sold::Uncharged(Ran::Output(result) | Ran::Asks(result) | Ran::Failed(result)) => {
                Told { outcome: "uncharged", answer: Answer::Result(result) }
            }
            Sold::Unverified if kind == Kind::Tool => {
                let text = "The payment could not be verified and was not used. Try again later with the same payment.";
                let result = serde_json::json!({"content": [{"type": "text", "text": text}], "isError": true});
                Told { outcome: "verify_unavailable", answer: Answer::Result(json::raw(&result)) }
            }
            Sold::Unverified => Told::internal("verify_unavailable"),
            Sold::Internal(what) => {
                tracing::error!(what, "a sale failed through a fault of ours");
                Told::internal("store_unavailable")
            }
            // Handled where the item is known.
            Sold::Challenge(_) => Told::internal("internal"),
            Sold::Withheld(withheld) => Told::withheld(kind, withheld, None),
        }
    }
}

/// The error with the receipt in its `data`, beside what the handler wrote there.
fn with_data(error: RpcError, receipt: &RawValue) -> RpcError {
    let data = match &error.data {
        Some(data) if data.get().starts_with('{') => data.clone(),
        Some(data) => json::raw(&std::collections::BTreeMap::from([("data", data)])),
        None => json::raw(&serde_json::json!({})),
    };
    RpcError { data: splice::with_members(&data, &[(META_PAYMENT_RESPONSE, receipt.get())]).or(error.data), ..error }
}
