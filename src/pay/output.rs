//! What a call gives back: the seller's output unchanged, and the receipt. The bytes made here are what the ledger
//! stores, so that a replay is the same answer byte for byte.

use serde_json::value::RawValue;

use super::object::Object;
use crate::guard::Quote;
use crate::json;
use crate::ledger::Payment;
use crate::money::{Amount, PaymentId, Unit};
use crate::upstream::ToolAnswer;
use crate::x402::assets;

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

/// `{paymentIdentifier, ref, versionHash, network, scheme, asset, payTo, authorizedAmount, settledAmount, transaction,
/// status, display?}`
pub(super) struct Receipt<'a> {
    pub id: PaymentId,
    pub resource_ref: &'a str,
    pub version_hash: &'a str,
    pub unit: Unit,
    pub scheme: &'a str,
    pub pay_to: &'a str,
    pub authorized: Amount,
    pub settled: Amount,
    pub transaction: Option<&'a str>,
}

impl<'a> Receipt<'a> {
    pub fn of_quote(quote: &'a Quote, id: PaymentId, settled: Amount, transaction: Option<&'a str>) -> Receipt<'a> {
        Receipt {
            id,
            resource_ref: &quote.resource_ref,
            version_hash: &quote.version_hash,
            unit: quote.unit(),
            scheme: &quote.offer.scheme,
            pay_to: &quote.offer.pay_to,
            authorized: quote.amount(),
            settled,
            transaction,
        }
    }

    /// `None` until the row is settled.
    pub fn of_row(row: &'a Payment) -> Option<Receipt<'a>> {
        Some(Receipt {
            id: row.payment_id,
            resource_ref: &row.resource_ref,
            version_hash: &row.version_hash,
            unit: Unit { network: row.network.clone(), asset: row.asset.clone() },
            scheme: &row.scheme,
            pay_to: &row.pay_to,
            authorized: row.reserved,
            settled: row.settled?,
            transaction: row.transaction.as_deref(),
        })
    }

    pub fn json(&self) -> Box<RawValue> {
        Object::new()
            .with("paymentIdentifier", &self.id.to_hex())
            .with("ref", self.resource_ref)
            .with("versionHash", self.version_hash)
            .with("network", self.unit.network.as_str())
            .with("scheme", self.scheme)
            .with("asset", self.unit.asset.as_str())
            .with("payTo", self.pay_to)
            .with("authorizedAmount", &self.authorized.to_string())
            .with("settledAmount", &self.settled.to_string())
            .with("transaction", &self.transaction)
            .with("status", "settled")
            .maybe("display", assets::display(self.settled, &self.unit))
            .build()
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
