//! What a call gives back: the seller's output unchanged, and the receipt. The bytes made here are what the ledger
//! stores, so that a replay is the same answer byte for byte.

use serde_json::value::RawValue;

use super::object::Object;
use crate::json;
use crate::money::PaymentId;
use crate::upstream::ToolAnswer;

/// How a call ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The seller answered the unpaid call: the tool is free, or it failed by itself.
    Unpaid,
    /// The seller asks for input before any payment.
    UnpaidInput,
    /// Paid, settled, output delivered.
    Paid,
    /// Paid and settled; the seller asks for input.
    PaidInput,
    /// Signed bytes are out, no receipt yet; the seller asks for input.
    OpenInput,
    /// The stored outcome of an earlier call.
    Replayed,
    /// Settled, the output was never received.
    Undelivered,
    /// Settled; the seller's question was answered, and its next word was not received.
    Unfinished,
    /// Settled, nothing is stored any more.
    Evicted,
}

impl Ending {
    /// The stable word of it.
    pub fn as_str(self) -> &'static str {
        match self {
            Ending::Unpaid => "unpaid",
            Ending::UnpaidInput => "unpaid_input",
            Ending::Paid => "paid",
            Ending::PaidInput => "paid_input",
            Ending::OpenInput => "open_input",
            Ending::Replayed => "replayed",
            Ending::Undelivered => "undelivered",
            Ending::Unfinished => "unfinished",
            Ending::Evicted => "evicted",
        }
    }
}

/// The success envelope of `x402_call_resource`.
#[derive(Debug)]
pub struct CallOutcome {
    pub ending: Ending,
    /// `{content, structuredContent?, isError?, receipt, paymentIdentifier?, outcome?, recorded?, inputRequired?}`
    pub output: Box<RawValue>,
    /// The payment that this is the answer of.
    pub payment: Option<PaymentId>,
    /// That payment has no idempotency key.
    pub keyless: bool,
}

impl CallOutcome {
    /// Whether handing this over answers a settled payment, so that the next keyless call is a new one.
    pub fn answers(&self) -> Option<PaymentId> {
        match self.ending {
            Ending::Paid | Ending::Undelivered | Ending::Evicted => self.payment.filter(|_| self.keyless),
            Ending::Replayed => {
                let unfinished = json::member(&self.output, "inputRequired").is_some();
                self.payment.filter(|_| self.keyless && !unfinished)
            }
            Ending::Unpaid | Ending::UnpaidInput | Ending::PaidInput | Ending::OpenInput | Ending::Unfinished => None,
        }
    }
}

/// The members of the seller's answer that the envelope takes over.
pub(super) struct SellerOutput {
    content: Box<RawValue>,
    structured: Option<Box<RawValue>>,
    is_error: Option<Box<RawValue>>,
    input_required: Option<Box<RawValue>>,
}

impl SellerOutput {
    pub fn none() -> SellerOutput {
        SellerOutput { content: json::raw::<[u8; 0]>(&[]), structured: None, is_error: None, input_required: None }
    }

    /// A JSON-RPC error of the seller's becomes a tool error with the seller's error object.
    pub fn of(answer: &ToolAnswer) -> SellerOutput {
        match answer {
            ToolAnswer::Result(result) => {
                let member = |name: &str| json::member(result, name).map(ToOwned::to_owned);
                let content = member("content").filter(|content| json::elements(content).is_some());
                SellerOutput {
                    content: content.unwrap_or_else(|| SellerOutput::none().content),
                    structured: member("structuredContent"),
                    is_error: member("isError").and_then(|flag| match flag.get() {
                        "null" => None,
                        "true" | "false" => Some(flag),
                        // Not a boolean, and not a success either.
                        _ => Some(json::raw(&true)),
                    }),
                    input_required: None,
                }
            }
            ToolAnswer::Error { message, .. } => {
                let text = Object::new().with("type", "text").with("text", message).build();
                SellerOutput {
                    content: super::object::array([&*text]),
                    structured: Some(error_object(answer)),
                    is_error: Some(json::raw(&true)),
                    input_required: None,
                }
            }
        }
    }

    pub fn asking(input_requests: Option<&RawValue>, request_state: Option<&RawValue>) -> SellerOutput {
        let asked =
            Object::new().maybe_raw("inputRequests", input_requests).maybe_raw("requestState", request_state).build();
        SellerOutput { input_required: Some(asked), ..SellerOutput::none() }
    }

    pub fn asks(&self) -> bool {
        self.input_required.is_some()
    }

    /// The tool says that it failed.
    pub fn failed(&self) -> bool {
        self.is_error.as_deref().is_some_and(|flag| flag.get() == "true")
    }

    /// `receipt: None` is written as null.
    pub fn envelope(&self, receipt: Option<&RawValue>, id: Option<PaymentId>, extra: Extra) -> Box<RawValue> {
        let object = Object::new()
            .raw("content", &self.content)
            .maybe_raw("structuredContent", self.structured.as_deref())
            .maybe_raw("isError", self.is_error.as_deref());
        let object = match receipt {
            Some(receipt) => object.raw("receipt", receipt),
            None => object.raw("receipt", RawValue::NULL),
        };
        let object = object.maybe("paymentIdentifier", id.map(PaymentId::to_hex));
        let object = match extra {
            Extra::None => object,
            Extra::Outcome(word) => object.with("outcome", word),
            Extra::NotRecorded => object.with("recorded", &false),
        };
        object.maybe_raw("inputRequired", self.input_required.as_deref()).build()
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Extra {
    None,
    /// `undelivered` or `evicted`.
    Outcome(&'static str),
    NotRecorded,
}

/// The seller's answer as one object, for `details.output`.
pub(super) fn whole(answer: &ToolAnswer) -> Box<RawValue> {
    match answer {
        ToolAnswer::Result(result) => result.clone(),
        ToolAnswer::Error { .. } => error_object(answer),
    }
}

fn error_object(answer: &ToolAnswer) -> Box<RawValue> {
    match answer {
        ToolAnswer::Result(result) => result.clone(),
        ToolAnswer::Error { code, message, data } => {
            Object::new().with("code", code).with("message", message).maybe_raw("data", data.as_deref()).build()
        }
    }
}
