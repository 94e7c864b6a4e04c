//! Every way in which a paid call ends without an output: the rows of the buyer's part of `docs/outcomes.md`. What each
//! is called towards the agent is decided in one place, `agent::errors`.

use serde_json::value::RawValue;

use crate::ledger::{Ceiling, LedgerError};
use crate::money::{Amount, PaymentId, Unit};
use crate::policy::Banned;
use crate::x402::{Broken, Offer};

/// Where in the story a call ended: `details.phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Parse,
    Lookup,
    Resolve,
    Connect,
    Probe,
    Challenge,
    Guard,
    Reserve,
    Sign,
    Prepare,
    Pay,
    Receipt,
    Record,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Parse => "parse",
            Phase::Lookup => "lookup",
            Phase::Resolve => "resolve",
            Phase::Connect => "connect",
            Phase::Probe => "probe",
            Phase::Challenge => "challenge",
            Phase::Guard => "guard",
            Phase::Reserve => "reserve",
            Phase::Sign => "sign",
            Phase::Prepare => "prepare",
            Phase::Pay => "pay",
            Phase::Receipt => "receipt",
            Phase::Record => "record",
        }
    }
}

/// Texts from outside are bounded where they are put in.
#[derive(Debug, thiserror::Error)]
pub enum PayError {
    // parse
    #[error("{field} {problem}")]
    Argument { field: &'static str, problem: String },
    #[error("this build cannot pay with the scheme {scheme:?} on {network}")]
    SchemeUnavailable { scheme: String, network: String },
    #[error("payments on {0} are not enabled here")]
    NetworkDisabled(String),

    // lookup
    /// `settled`: it is paid, and somebody is fetching its output.
    #[error("this payment is in flight elsewhere")]
    InFlight { id: PaymentId, settled: bool },
    #[error("whether this payment settled is not known yet")]
    InDoubt { id: PaymentId },
    #[error("this payment was released ({reason}): nothing was paid under this key")]
    Released { id: PaymentId, reason: String },
    #[error("this idempotency key was used for another call")]
    Conflict { id: PaymentId },

    // resolve
    #[error("the catalog has no active entry for this ref")]
    NotListed,
    #[error("the catalog's answer could not be used: {0}")]
    CatalogProtocol(String),
    #[error("the catalog did not answer in time")]
    CatalogTimeout,
    #[error("the catalog's version is not the expected one")]
    StaleVersion { expected: String, current: String },

    // connect
    #[error("the seller's address is refused by the rule {0}")]
    EndpointRefused(&'static str),
    /// `phase`: connect for an origin, guard for an asset or a recipient.
    #[error("the operator's lists do not allow this {}", .rule.as_str())]
    NotAllowed { phase: Phase, rule: Banned },

    // probe
    #[error("the seller did not answer in time")]
    ProbeTimeout,
    #[error("the seller's answer could not be used: {0}")]
    ProbeProtocol(String),

    // challenge
    #[error("{0}")]
    Challenge(Broken),

    // guard
    #[error("the seller's terms are not those of the catalog version: {}", .0.join(", "))]
    Changed(Vec<&'static str>),
    #[error("the seller does not offer this (network, scheme, asset)")]
    OfferNotThere,
    #[error("this build cannot pay an offer with this {0}")]
    Unpayable(&'static str),
    #[error("the recipient is not the one that this seller was paid to before")]
    RecipientChanged { origin: String, pinned: String, asked: String },
    #[error("this is what the tool costs; nothing was paid")]
    Quote(Vec<Offer>),
    #[error("the payer's balance does not cover the payment")]
    InsufficientFunds(Box<Short>),
    #[error("the signer does not tell the payer's address: {0}")]
    NoPayer(String),
    #[error("the chain cannot be asked before the payment: {0}")]
    Chain(String),

    // reserve
    #[error("a payment with a key for the same call is still open")]
    DuplicateInDoubt { id: PaymentId },
    #[error("the amount is above what may be spent")]
    Exceeded(Box<Exceeded>),
    #[error("payments of this agent are suspended")]
    Suspended,
    /// Ours, never the seller's: a JSON-RPC internal error. `id`: the payment that was seen before the ledger failed.
    #[error("{error}")]
    Ledger { phase: Phase, error: LedgerError, id: Option<PaymentId> },

    // sign
    #[error("the payment was not signed in time; nothing was paid")]
    SignWindowMissed { id: PaymentId },
    #[error("the lease ran out before the signature")]
    LeaseLost { id: PaymentId },
    #[error("the signer refuses: {detail}")]
    SignerRefused { id: PaymentId, detail: String },
    #[error("the signer could not be reached: {detail}")]
    SignerUnavailable { id: PaymentId, detail: String },
    #[error("the signer's answer was lost or is not a valid signature: {detail}")]
    SignerFailed { id: PaymentId, detail: String },

    // prepare
    #[error("a chain RPC answered with another payment than ours")]
    ChainLied { id: PaymentId },
    #[error("the chain's simulation of the payment failed: {detail}")]
    SimulationFailed { id: PaymentId, detail: String },

    // pay
    #[error("the seller gave no usable answer to the paid call: {detail}")]
    NoAnswer { id: PaymentId, detail: String },
    #[error("the seller asks for payment again; Tollway does not pay twice")]
    ChallengedAgain { id: PaymentId, words: String },
    #[error("the seller answered the paid call without a receipt")]
    NoReceipt { id: PaymentId, output: Option<Box<RawValue>> },

    // receipt
    #[error("the seller says that the settlement failed")]
    SellerSaysFailed { id: PaymentId, words: Option<String> },
    #[error("the seller says that the settlement is pending")]
    SettlementPending { id: PaymentId },
    #[error("the seller's receipt is not right: {what}")]
    ReceiptMismatch { id: PaymentId, what: &'static str, output: Option<Box<RawValue>> },

    // any
    #[error("the call was cancelled before anything was signed")]
    Cancelled { id: Option<PaymentId> },
    /// The task of the story ended without an answer (a bug, or the process is going down).
    #[error("the call was interrupted; whether it paid is not known yet")]
    Interrupted { id: PaymentId },
}

/// The payer has less than it costs; `balance: None` is a missing trustline.
#[derive(Debug)]
pub struct Short {
    pub unit: Unit,
    pub required: Amount,
    pub balance: Option<Amount>,
}

/// The ceiling that bound.
#[derive(Debug)]
pub struct Exceeded {
    pub ceiling: Ceiling,
    pub unit: Unit,
    pub required: Amount,
    pub limit: Amount,
    pub remaining: Amount,
    /// Unix milliseconds, where a day window bound.
    pub resets_at_ms: Option<u64>,
}
