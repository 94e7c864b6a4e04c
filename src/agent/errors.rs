//! The one map from what happened to what the agent is told: code, reason, whether money may have moved, what to do
//! next. Its rows are those of `docs/outcomes.md`; the match is exhaustive, so a new ending needs a row.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::value::RawValue;

use super::schemas;
use super::time::rfc3339;
use crate::catalog::CatalogError;
use crate::ledger::{Ceiling, LedgerError, Reason};
use crate::mcp::RpcError;
use crate::money::{Amount, PaymentId, Unit};
use crate::pay::object::{Object, array};
use crate::pay::{Exceeded, PayError, Phase, Short};
use crate::x402::{Offer, assets};

/// The stable codes, and `INTERNAL` for faults of our own (a JSON-RPC error, never a tool result).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    NoResults,
    ResourceStale,
    ResourceChanged,
    UntrustedRedirect,
    PaymentRequired,
    BudgetExceeded,
    PaymentRejected,
    SettlementUnknown,
    UpstreamTimeout,
    UpstreamProtocolError,
    Internal,
}

impl Code {
    pub fn as_str(self) -> &'static str {
        match self {
            Code::InvalidArgument => "INVALID_ARGUMENT",
            Code::NoResults => "NO_RESULTS",
            Code::ResourceStale => "RESOURCE_STALE",
            Code::ResourceChanged => "RESOURCE_CHANGED",
            Code::UntrustedRedirect => "UNTRUSTED_REDIRECT",
            Code::PaymentRequired => "PAYMENT_REQUIRED",
            Code::BudgetExceeded => "BUDGET_EXCEEDED",
            Code::PaymentRejected => "PAYMENT_REJECTED",
            Code::SettlementUnknown => "SETTLEMENT_UNKNOWN",
            Code::UpstreamTimeout => "UPSTREAM_TIMEOUT",
            Code::UpstreamProtocolError => "UPSTREAM_PROTOCOL_ERROR",
            Code::Internal => "INTERNAL",
        }
    }

    /// `SETTLEMENT_UNKNOWN` by polling only.
    pub fn retryable(self) -> bool {
        match self {
            Code::ResourceStale
            | Code::PaymentRequired
            | Code::SettlementUnknown
            | Code::UpstreamTimeout
            | Code::Internal => true,
            Code::InvalidArgument
            | Code::NoResults
            | Code::ResourceChanged
            | Code::UntrustedRedirect
            | Code::BudgetExceeded
            | Code::PaymentRejected
            | Code::UpstreamProtocolError => false,
        }
    }
}

/// `details.moneyMayHaveMoved`. `yes` only while somebody else fetches the output of a settled payment: otherwise that
/// is answered with its receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    No,
    Unknown,
    Yes,
}

/// One failure as the agent sees it.
#[derive(Debug)]
pub struct Problem {
    pub code: Code,
    /// Borrowed: a word of ours. Owned: a name that came with the request, or a word of the ledger.
    pub reason: Cow<'static, str>,
    pub message: String,
    pub phase: Phase,
    pub moved: Moved,
    pub payment: Option<PaymentId>,
    /// What the agent does next, one sentence.
    pub next: &'static str,
    extra: Vec<(&'static str, Box<RawValue>)>,
}

impl Problem {
    fn new(
        code: Code,
        reason: impl Into<Cow<'static, str>>,
        phase: Phase,
        moved: Moved,
        next: &'static str,
    ) -> Problem {
        let reason = reason.into();
        Problem { code, reason, message: String::new(), phase, moved, payment: None, next, extra: Vec::new() }
    }

    fn with(mut self, name: &'static str, value: &(impl serde::Serialize + ?Sized)) -> Problem {
        self.extra.push((name, crate::json::raw(value)));
        self
    }

    fn raw(mut self, name: &'static str, value: Box<RawValue>) -> Problem {
        self.extra.push((name, value));
        self
    }

    fn amount(self, name: &'static str, amount: Amount, unit: &Unit) -> Problem {
        self.raw(name, amount_json(amount, unit))
    }

    fn of(mut self, id: PaymentId) -> Problem {
        self.payment = Some(id);
        self
    }

    /// An argument that is missing or wrong; the reason is its name.
    pub fn argument(field: &str, problem: &str) -> Problem {
        let mut out = Problem::new(Code::InvalidArgument, field.to_owned(), Phase::Parse, Moved::No, FIX);
        out.message = format!("{field} {problem}");
        out
    }

    pub fn no_results(reason: &'static str, message: &str, next: &'static str) -> Problem {
        let mut out = Problem::new(Code::NoResults, reason, Phase::Lookup, Moved::No, next);
        out.message = message.to_owned();
        out
    }

    /// The reason where it is one of a closed set, else `other`: what a counter may be labelled with.
    pub fn word(&self) -> &'static str {
        match &self.reason {
            Cow::Borrowed(word) => word,
            Cow::Owned(named) => {
                let argument = schemas::CALL_ARGUMENTS.into_iter().find(|argument| argument == named);
                argument.or_else(|| Reason::from_word(named).map(Reason::as_str)).unwrap_or("other")
            }
        }
    }

    pub fn more(mut self, name: &'static str, value: Box<RawValue>) -> Problem {
        self.extra.push((name, value));
        self
    }

    /// `{schemaVersion, code, message, retryable, details}`
    pub fn json(&self) -> Box<RawValue> {
        let details = Object::new()
            .with("reason", &self.reason)
            .with("phase", self.phase.as_str())
            .with(
                "moneyMayHaveMoved",
                match self.moved {
                    Moved::No => "no",
                    Moved::Unknown => "unknown",
                    Moved::Yes => "yes",
                },
            )
            .maybe("paymentIdentifier", self.payment.map(PaymentId::to_hex))
            .with("next", self.next);
        let details = self.extra.iter().fold(details, |object, (name, value)| object.raw(name, value));
        Object::new()
            .with("schemaVersion", &1)
            .with("code", self.code.as_str())
            .with("message", &self.message)
            .with("retryable", &self.code.retryable())
            .raw("details", &details.build())
            .build()
    }

    /// A fault of ours: the JSON-RPC error whose `data` has the same shape.
    pub fn rpc(&self) -> RpcError {
        RpcError { data: Some(self.json()), ..RpcError::internal(&self.message) }
    }
}

/// `{"atomic": "10000", "display": "0.001 USDC"}`; `display` for known assets only.
pub fn amount_json(amount: Amount, unit: &Unit) -> Box<RawValue> {
    Object::new().with("atomic", &amount.to_string()).maybe("display", assets::display(amount, unit)).build()
}

/// One payment option with its price in words.
pub fn offer_json(offer: &Offer) -> Box<RawValue> {
    Object::new()
        .with("network", offer.network.as_str())
        .with("scheme", &offer.scheme)
        .with("asset", offer.asset.as_str())
        .with("amount", &offer.amount.to_string())
        .maybe("display", assets::display(offer.amount, &offer.unit()))
        .with("payTo", &offer.pay_to)
        .with("maxTimeoutSeconds", &offer.max_timeout_seconds)
        .build()
}

/// The word of `details.reason` for a ceiling.
pub fn ceiling_word(ceiling: Ceiling) -> &'static str {
    match ceiling {
        Ceiling::MaxAtomicAmount => "max_atomic_amount",
        Ceiling::PerCall => "per_call",
        Ceiling::Session => "session",
        Ceiling::Day => "day",
        Ceiling::Total => "total",
        Ceiling::SmartAccount => "smart_account",
        Ceiling::NotConfigured => "no_limit_configured",
    }
}

const FIX: &str = "Correct the argument and call again.";
const OTHER_OFFER: &str = "Choose another payment option of the resource.";
const ASK_OPERATOR: &str = "Ask the operator.";
const POLL: &str = "Poll x402_get_payment with the paymentIdentifier; do not pay for the same call again meanwhile.";
const POLL_OR_CALL: &str = "Poll x402_get_payment, or send the same call again with the same idempotencyKey; it never \
     pays twice.";
const NEW_KEY: &str = "Use a new idempotencyKey.";
const SEARCH: &str = "Search again.";
const LATER: &str = "Try again later.";
const GET_AGAIN: &str = "Read the resource again with x402_get_resource and decide again.";
const GIVE_UP: &str = "Do not call this resource.";

/// Every row of the table in which a call ends without an output.
pub fn problem(error: &PayError) -> Problem {
    use Code::*;
    use Moved::{No, Unknown};
    fn new(
        code: Code,
        reason: impl Into<Cow<'static, str>>,
        phase: Phase,
        moved: Moved,
        next: &'static str,
    ) -> Problem {
        Problem::new(code, reason, phase, moved, next)
    }
    let mut out = match error {
        PayError::Argument { field, .. } => new(InvalidArgument, *field, Phase::Parse, No, FIX),
        PayError::SchemeUnavailable { .. } => new(PaymentRejected, "scheme_unavailable", Phase::Parse, No, OTHER_OFFER),
        PayError::NetworkDisabled(_) => new(PaymentRejected, "network_disabled", Phase::Parse, No, ASK_OPERATOR),

        PayError::InFlight { id, settled } => {
            let moved = if *settled { Moved::Yes } else { Unknown };
            new(SettlementUnknown, "in_flight", Phase::Lookup, moved, POLL).of(*id)
        }
        PayError::InDoubt { id } => new(SettlementUnknown, "in_doubt", Phase::Lookup, Unknown, POLL).of(*id),
        PayError::Released { id, reason } => new(PaymentRejected, reason.clone(), Phase::Lookup, No, NEW_KEY).of(*id),
        PayError::Conflict { id } => new(InvalidArgument, "idempotency_conflict", Phase::Lookup, No, NEW_KEY).of(*id),

        PayError::NotListed => new(NoResults, "not_listed", Phase::Resolve, No, SEARCH),
        PayError::CatalogProtocol(_) => new(UpstreamProtocolError, "catalog", Phase::Resolve, No, LATER),
        PayError::CatalogTimeout => new(UpstreamTimeout, "catalog", Phase::Resolve, No, LATER),
        PayError::StaleVersion { expected, current } => new(ResourceStale, "version", Phase::Resolve, No, GET_AGAIN)
            .with("expectedVersionHash", expected)
            .with("currentVersionHash", current),

        PayError::EndpointRefused(rule) => new(UntrustedRedirect, *rule, Phase::Connect, No, GIVE_UP),
        PayError::NotAllowed { phase, rule } => {
            new(PaymentRejected, "not_allowed", *phase, No, ASK_OPERATOR).with("rule", rule.as_str())
        }

        PayError::ProbeTimeout => new(UpstreamTimeout, "seller", Phase::Probe, No, LATER),
        PayError::ProbeProtocol(_) => new(UpstreamProtocolError, "seller", Phase::Probe, No, GIVE_UP),

        PayError::Challenge(broken) => new(UpstreamProtocolError, broken.word(), Phase::Challenge, No, GIVE_UP),

        PayError::Changed(members) => {
            new(ResourceChanged, "changed", Phase::Guard, No, GET_AGAIN).with("changed", members)
        }
        PayError::OfferNotThere => new(InvalidArgument, "offer", Phase::Guard, No, OTHER_OFFER),
        PayError::Unpayable(member) => {
            new(PaymentRejected, "scheme_unavailable", Phase::Guard, No, OTHER_OFFER).with("member", member)
        }
        PayError::RecipientChanged { origin, pinned, asked } => {
            new(PaymentRejected, "recipient_changed", Phase::Guard, No, ASK_OPERATOR)
                .with("origin", origin)
                .with("pinnedPayTo", pinned)
                .with("payTo", asked)
        }
        PayError::Quote(offers) => {
            let offers: Vec<_> = offers.iter().map(offer_json).collect();
            let next = "Call again with a maxAtomicAmount that covers one of the offers.";
            new(PaymentRequired, "quote", Phase::Guard, No, next)
                .raw("offers", array(offers.iter().map(|offer| &**offer)))
        }
        PayError::InsufficientFunds(short) => {
            let Short { unit, required, balance } = &**short;
            let out = new(PaymentRejected, "insufficient_funds", Phase::Guard, No, ASK_OPERATOR)
                .amount("required", *required, unit)
                .with("trustline", &balance.is_some());
            match balance {
                Some(balance) => out.amount("balance", *balance, unit),
                None => out,
            }
        }
        PayError::NoPayer(_) => new(PaymentRejected, "signer_unavailable", Phase::Guard, No, LATER),
        PayError::Chain(_) => new(UpstreamProtocolError, "chain_rpc", Phase::Guard, No, LATER),

        PayError::DuplicateInDoubt { id } => {
            let next = "Poll x402_get_payment; call again only after it is released, or with an idempotencyKey of its \
                        own if it is meant twice.";
            new(SettlementUnknown, "duplicate_in_doubt", Phase::Reserve, Unknown, next).of(*id)
        }
        PayError::Exceeded(exceeded) => {
            let Exceeded { ceiling, unit, required, limit, remaining, resets_at_ms } = &**exceeded;
            let next = "Choose a cheaper offer, wait for the reset, or ask the operator for a higher limit.";
            new(BudgetExceeded, ceiling_word(*ceiling), Phase::Reserve, No, next)
                .with("ceiling", ceiling_word(*ceiling))
                .with("network", unit.network.as_str())
                .with("asset", unit.asset.as_str())
                .amount("required", *required, unit)
                .amount("limit", *limit, unit)
                .amount("remaining", *remaining, unit)
                .with("resetsAt", &resets_at_ms.map(rfc3339))
        }
        PayError::Suspended => new(PaymentRejected, "suspended", Phase::Reserve, No, ASK_OPERATOR),
        PayError::Ledger { phase, error, id } => match id {
            None => internal(*phase, error),
            // The payment is not this call's doing, and may have moved money.
            Some(id) => Problem { moved: Unknown, next: POLL, ..internal(*phase, error) }.of(*id),
        },

        PayError::SignWindowMissed { id } => {
            let next = "Call again with a new idempotencyKey.";
            new(PaymentRejected, "sign_window_missed", Phase::Sign, No, next).of(*id)
        }
        PayError::LeaseLost { id } => new(SettlementUnknown, "in_doubt", Phase::Sign, Unknown, POLL).of(*id),
        PayError::SignerRefused { id, detail } => {
            new(PaymentRejected, "signer_refused", Phase::Sign, No, ASK_OPERATOR).of(*id).with("signer", detail)
        }
        PayError::SignerUnavailable { id, .. } => {
            new(PaymentRejected, "signer_unavailable", Phase::Sign, No, LATER).of(*id)
        }
        PayError::SignerFailed { id, .. } => {
            let next = "Try again later; the hold ends when the authorization is dead.";
            new(PaymentRejected, "signer_failed", Phase::Sign, No, next).of(*id)
        }

        PayError::ChainLied { id } => new(UpstreamProtocolError, "chain_rpc", Phase::Prepare, Unknown, POLL).of(*id),
        PayError::SimulationFailed { id, detail } => {
            new(PaymentRejected, "simulation_failed", Phase::Prepare, Unknown, POLL).of(*id).with("chain", detail)
        }

        PayError::NoAnswer { id, .. } => new(SettlementUnknown, "no_answer", Phase::Pay, Unknown, POLL_OR_CALL).of(*id),
        PayError::ChallengedAgain { id, words } => {
            new(SettlementUnknown, "challenged_again", Phase::Pay, Unknown, POLL).of(*id).with("seller", words)
        }
        PayError::NoReceipt { id, output } => {
            with_output(new(SettlementUnknown, "no_receipt", Phase::Pay, Unknown, POLL).of(*id), output.as_deref())
        }

        PayError::SellerSaysFailed { id, words } => {
            let out = new(SettlementUnknown, "seller_says_failed", Phase::Receipt, Unknown, POLL).of(*id);
            match words {
                Some(words) => out.with("seller", words),
                None => out,
            }
        }
        PayError::SettlementPending { id } => {
            new(SettlementUnknown, "settlement_pending", Phase::Receipt, Unknown, POLL).of(*id)
        }
        PayError::ReceiptMismatch { id, what, output } => {
            let out = new(SettlementUnknown, "receipt_mismatch", Phase::Receipt, Unknown, POLL).of(*id);
            with_output(out.with("member", what), output.as_deref())
        }

        PayError::Cancelled { id } => {
            Problem { payment: *id, ..new(PaymentRejected, "cancelled", Phase::Reserve, No, NEW_KEY) }
        }
        PayError::Interrupted { id } => new(SettlementUnknown, "in_doubt", Phase::Record, Unknown, POLL).of(*id),
    };
    out.message = match error {
        PayError::Ledger { .. } => out.message,
        other => other.to_string(),
    };
    out
}

fn with_output(problem: Problem, output: Option<&RawValue>) -> Problem {
    match output {
        Some(output) => problem.raw("output", output.to_owned()),
        None => problem,
    }
}

/// Counts the faults of this process: `details.fault` is how an operator finds the line of the log.
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Nothing internal in the text: the log has the error, and the reference to find it by.
pub fn internal(phase: Phase, error: &LedgerError) -> Problem {
    let (reason, message) = match error {
        LedgerError::Busy => ("ledger_busy", "The payment ledger is busy; nothing was paid by this call."),
        LedgerError::Unavailable(_) => {
            ("ledger_unavailable", "The payment ledger is not available; nothing was paid by this call.")
        }
        LedgerError::Inconsistent(_) => {
            ("ledger_inconsistent", "The payment ledger refused the operation; nothing was paid by this call.")
        }
    };
    let fault = FAULTS.fetch_add(1, Ordering::Relaxed) + 1;
    tracing::error!(fault, %error, phase = phase.as_str(), reason, "the ledger could not be used");
    let mut out = Problem::new(Code::Internal, reason, phase, Moved::No, LATER).with("fault", &fault);
    out.message = message.to_owned();
    out
}

/// Search and get: no payment is near.
pub fn catalog_problem(error: &CatalogError) -> Problem {
    let (code, reason, phase, next) = match error {
        CatalogError::NotListed => (Code::NoResults, "not_listed", Phase::Resolve, SEARCH),
        CatalogError::Timeout => (Code::UpstreamTimeout, "catalog", Phase::Resolve, LATER),
        CatalogError::Protocol(_) => (Code::UpstreamProtocolError, "catalog", Phase::Resolve, LATER),
        CatalogError::Invalid { field, .. } => (Code::InvalidArgument, *field, Phase::Parse, FIX),
    };
    let mut out = Problem::new(code, reason, phase, Moved::No, next);
    out.message = error.to_string().chars().take(300).collect();
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;

    #[test]
    fn an_internal_fault_shows_a_reference_to_the_log_and_nothing_of_what_is_in_it() {
        let fault = || {
            let error =
                internal(Phase::Reserve, &LedgerError::Unavailable("/secret/path: disk I/O error".into())).rpc();
            let data = error.data.unwrap();
            assert!(!data.get().contains("secret") && !error.message.contains("secret"), "{}", data.get());
            json::member(json::member(&data, "details").unwrap(), "fault").unwrap().get().parse::<u64>().unwrap()
        };
        assert!(fault() < fault());
    }
}
