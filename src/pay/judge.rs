//! What a seller's answer to the paid call means: the same for the first sending and for every later one. No I/O.

use super::check::{self, Verdict};
use super::error::PayError;
use super::output::{self, SellerOutput};
use super::terms::Terms;
use super::words;
use crate::json;
use crate::ledger::Reason;
use crate::money::{Amount, PaymentId};
use crate::upstream::{ToolAnswer, UpstreamError};
use crate::x402::{self, Answer, Broken, Settlement};

pub(super) enum Judged {
    Paid(Paid),
    /// `input_required` without a receipt.
    Asks(SellerOutput),
    Unsettled(Reason, PayError),
}

/// The money has moved, and what came for it.
pub(super) struct Paid {
    pub seller: SellerOutput,
    pub whole: Box<serde_json::value::RawValue>,
    pub settled: Amount,
    /// `None`: neither the ledger nor the receipt names it.
    pub transaction: Option<String>,
    /// The seller asks for input: another answer follows.
    pub unfinished: bool,
}

pub(super) fn judge(terms: &Terms, answer: &Result<ToolAnswer, UpstreamError>) -> Judged {
    let id = terms.id;
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let detail = words(&error.to_string());
            return Judged::Unsettled(Reason::NoAnswer, PayError::NoAnswer { id, detail });
        }
    };
    let (classified, claim) = match answer {
        ToolAnswer::Result(result) => (x402::classify(result), Settlement::from_result(result)),
        ToolAnswer::Error { code, data, .. } => {
            let claim = data.as_deref().map_or(Ok(None), Settlement::from_error_data);
            (x402::classify_error(*code, data.as_deref()), claim)
        }
    };
    let right = claim.as_ref().ok().and_then(Option::as_ref).map(|claim| check::receipt(claim, terms));
    let is_right = matches!(right, Some(Verdict::Right { .. }));
    let again = |words: String| Judged::Unsettled(Reason::ChallengedAgain, PayError::ChallengedAgain { id, words });
    let seller = match classified {
        // A tool may talk about payments: no flag says that this is a challenge, and it was paid for.
        Answer::BrokenChallenge(Broken::NotMarked) if is_right && is_unmarked(answer) => SellerOutput::of(answer),
        Answer::Challenge(challenge) => return again(words(challenge.error.as_deref().unwrap_or_default())),
        Answer::BrokenChallenge(broken) => return again(broken.word().to_owned()),
        Answer::InputRequired { input_requests, request_state } => {
            SellerOutput::asking(input_requests.as_deref(), request_state.as_deref())
        }
        Answer::Other => SellerOutput::of(answer),
    };
    let unfinished = seller.asks();
    let whole = output::whole(answer);
    if let Some(booked) = &terms.booked {
        // It is paid, whatever receipt is beside the output or none: only a failure may be another answer next time.
        if is_right || unfinished || !seller.failed() {
            let named = match right {
                Some(Verdict::Right { transaction, .. }) => Some(transaction),
                _ => None,
            };
            let transaction = named.or_else(|| booked.transaction.clone());
            return Judged::Paid(Paid { seller, whole, settled: booked.amount, transaction, unfinished });
        }
    }
    let unsettled = |reason, error| Judged::Unsettled(reason, error);
    match (claim, right) {
        (Err(malformed), _) => {
            alert_mismatch(id, malformed.0);
            let error = PayError::ReceiptMismatch { id, what: malformed.0, output: Some(whole) };
            unsettled(Reason::ReceiptMismatch, error)
        }
        (_, Some(Verdict::Right { settled, transaction })) => {
            Judged::Paid(Paid { seller, whole, settled, transaction: Some(transaction), unfinished })
        }
        (_, Some(Verdict::Pending)) => unsettled(Reason::SettlementPending, PayError::SettlementPending { id }),
        (Ok(claim), Some(Verdict::Failed)) => {
            let words = claim.and_then(|claim| claim.error_reason).as_deref().map(words);
            unsettled(Reason::SellerSaysFailed, PayError::SellerSaysFailed { id, words })
        }
        (_, Some(Verdict::Mismatch(what))) => {
            alert_mismatch(id, what);
            unsettled(Reason::ReceiptMismatch, PayError::ReceiptMismatch { id, what, output: Some(whole) })
        }
        (_, None) if unfinished => Judged::Asks(seller),
        (_, None) => unsettled(Reason::NoReceipt, PayError::NoReceipt { id, output: Some(whole) }),
    }
}

/// No flag of the result says that it is a challenge.
fn is_unmarked(answer: &ToolAnswer) -> bool {
    let ToolAnswer::Result(result) = answer else { return false };
    let unset = |name: &str, off: &[&str]| json::member(result, name).is_none_or(|flag| off.contains(&flag.get()));
    unset("isError", &["false", "null"]) && unset("paymentRequired", &["null"])
}

pub(super) fn alert_mismatch(id: PaymentId, what: &str) {
    tracing::error!(payment = %id.short(), what, "ALERT a seller's receipt does not match the payment");
}
