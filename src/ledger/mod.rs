//! The buyer's ledger: one row per payment, one transition table, the only place that writes the buyer's money.
//!
//! ```text
//! reserved --> settled | released | in_doubt          in_doubt --> settled | released          settled, released: final
//! ```
//! Each arrow is one statement that must hit exactly one row. A method is one transaction; no handle lives across an
//! await of business code. `held = sum(reserved, in_doubt)`, `spent = sum(settled)`, `held + spent <= limit`, enforced
//! in the transaction that reserves.

mod audit;
pub(crate) mod clock;
mod limits;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
#[cfg(test)]
mod table;
#[cfg(test)]
mod turns;

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use crate::guard::Quote;
use crate::money::{AgentId, Amount, Asset, IdempotencyKey, Network, ParseError, PaymentId, Unit};
use crate::policy::{Origin, OriginRule, Pin};

pub use limits::same_limits;
#[cfg(feature = "postgres")]
pub use postgres::{Database, PostgresLedger};
#[cfg(feature = "sqlite")]
pub use sqlite::{Options, SqliteLedger};

/// A signed payload is kept this long after a settlement whose output is missing or unfinished, milliseconds.
pub(crate) const PAYLOAD_AFTER_SETTLEMENT_MS: u64 = 24 * 3_600_000;
/// A request that left before its time reaches the signer a moment later: a stop waits for it, milliseconds.
pub(crate) const ON_THE_WAY_MS: u64 = 1_000;
/// The longest note of an operator, characters.
pub const MAX_NOTE: usize = 500;

pub type LedgerResult<'a, T> = BoxFuture<'a, Result<T, LedgerError>>;

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The call may or may not have taken effect.
    #[error("the ledger is unavailable: {0}")]
    Unavailable(String),
    /// Refused before anything was done: a queue is full, a lock was not had in time.
    #[error("the ledger is busy")]
    Busy,
    /// A row or a counter contradicts an invariant: a bug or a tampered file; never ignored.
    #[error("the ledger is inconsistent: {0}")]
    Inconsistent(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Reserved,
    InDoubt,
    Settled,
    Released,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Reserved => "reserved",
            State::InDoubt => "in_doubt",
            State::Settled => "settled",
            State::Released => "released",
        }
    }

    /// `None` for any other word.
    pub fn from_word(word: &str) -> Option<State> {
        [State::Reserved, State::InDoubt, State::Settled, State::Released].into_iter().find(|s| s.as_str() == word)
    }

    /// Whether the row still holds money.
    pub fn is_open(self) -> bool {
        matches!(self, State::Reserved | State::InDoubt)
    }
}

/// Why a row is where it is: the stable words of `docs/outcomes.md`. Stored as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    SignWindowMissed,
    SignerRefused,
    SignerUnavailable,
    SignerFailed,
    ChainRpc,
    SimulationFailed,
    NoAnswer,
    ChallengedAgain,
    InputRequired,
    NoReceipt,
    SellerSaysFailed,
    SettlementPending,
    ReceiptMismatch,
    Cancelled,
    LeaseExpired,
    ExpiredUnspent,
    NonceCancelled,
    OperatorEvidence,
}

impl Reason {
    const ALL: [Reason; 18] = [
        Reason::SignWindowMissed,
        Reason::SignerRefused,
        Reason::SignerUnavailable,
        Reason::SignerFailed,
        Reason::ChainRpc,
        Reason::SimulationFailed,
        Reason::NoAnswer,
        Reason::ChallengedAgain,
        Reason::InputRequired,
        Reason::NoReceipt,
        Reason::SellerSaysFailed,
        Reason::SettlementPending,
        Reason::ReceiptMismatch,
        Reason::Cancelled,
        Reason::LeaseExpired,
        Reason::ExpiredUnspent,
        Reason::NonceCancelled,
        Reason::OperatorEvidence,
    ];

    /// `None` for any other word.
    pub fn from_word(word: &str) -> Option<Reason> {
        Reason::ALL.into_iter().find(|reason| reason.as_str() == word)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Reason::SignWindowMissed => "sign_window_missed",
            Reason::SignerRefused => "signer_refused",
            Reason::SignerUnavailable => "signer_unavailable",
            Reason::SignerFailed => "signer_failed",
            Reason::ChainRpc => "chain_rpc",
            Reason::SimulationFailed => "simulation_failed",
            Reason::NoAnswer => "no_answer",
            Reason::ChallengedAgain => "challenged_again",
            Reason::InputRequired => "input_required",
            Reason::NoReceipt => "no_receipt",
            Reason::SellerSaysFailed => "seller_says_failed",
            Reason::SettlementPending => "settlement_pending",
            Reason::ReceiptMismatch => "receipt_mismatch",
            Reason::Cancelled => "cancelled",
            Reason::LeaseExpired => "lease_expired",
            Reason::ExpiredUnspent => "expired_unspent",
            Reason::NonceCancelled => "nonce_cancelled",
            Reason::OperatorEvidence => "operator_evidence",
        }
    }
}

/// The authorization's identity and life on the chain, known before anything is signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorization {
    pub payer: String,
    /// Stellar: the decimal i64 of the nonce.
    pub nonce: String,
    /// Stellar: the signature expiration ledger; after it the authorization is dead.
    pub dead_after: u64,
    /// Stellar: the ledger known at reservation.
    pub at: u64,
}

/// What a reservation writes; made from a [`Quote`].
#[derive(Debug)]
#[must_use]
pub struct Intent {
    pub quote: Quote,
    pub payment_id: PaymentId,
    /// The random part of the payment identifier, kept in the row.
    pub id_nonce: [u8; 16],
    pub authorization: Authorization,
    /// How long the owner may work: until the paid call's deadline.
    pub lease_ms: u64,
    /// No signature later than this after the reservation.
    pub sign_within_ms: u64,
    /// The smart account's own ceiling (`signer.smart_account_ceiling_atomic`).
    pub account_ceiling: Option<Amount>,
}

impl Intent {
    pub fn payment_id(&self) -> PaymentId {
        self.payment_id
    }
}

/// The owner's hold on a reserved row. Times are the ledger's clock, unix milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub token: [u8; 16],
    pub expires_ms: u64,
    pub sign_before_ms: u64,
}

/// The networks whose payments are meant.
#[derive(Debug, Clone, Copy)]
pub enum On<'a> {
    Any,
    One(&'a Network),
    /// Every one but these.
    Other(&'a [Network]),
}

impl On<'_> {
    /// For a statement: names, each between spaces (no name has one), and whether a network must be among them.
    fn names(self) -> (String, bool) {
        let names = |networks: &[&Network]| networks.iter().map(|n| format!(" {} ", n.as_str())).collect();
        match self {
            On::Any => (String::new(), false),
            On::One(network) => (names(&[network]), true),
            On::Other(networks) => (names(&networks.iter().collect::<Vec<_>>()), false),
        }
    }
}

/// A written row with its frozen quote: what may be signed. Only [`reserve`] makes it.
#[derive(Debug)]
#[must_use]
pub struct Reserved {
    pub(crate) quote: Quote,
    pub(crate) payment_id: PaymentId,
    pub(crate) authorization: Authorization,
    pub(crate) lease: Lease,
    /// The end of `sign_within` by the clock that nobody sets: a wall clock that is set back does not widen the window.
    pub(crate) sign_until: Instant,
    pub(crate) _written: Written,
}

/// Proof that [`reserve`] made a [`Reserved`]: nothing else can make this.
#[derive(Debug)]
pub(crate) struct Written(());

#[cfg(test)]
impl Written {
    pub(crate) fn for_a_test() -> Written {
        Written(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ceiling {
    MaxAtomicAmount,
    PerCall,
    Session,
    Day,
    Total,
    SmartAccount,
    /// No limit applies to this agent and asset: the call is refused.
    NotConfigured,
}

/// What `reserve` decided.
#[derive(Debug)]
pub enum Decision {
    Fresh(Lease),
    /// The same idempotency key with the same call, or the keyless twin: that payment is this call's payment.
    Existing(Box<Payment>),
    /// The same key with another call.
    Conflict(Box<Payment>),
    /// The key belongs to a payment that has been archived: its row cannot be shown any more, and a key is spent for good.
    KeySpent(PaymentId),
    /// No key, and a keyed payment for the same ref and arguments is open.
    DuplicateInDoubt(PaymentId),
    /// `resets_at_ms`: unix milliseconds of the next UTC midnight where a day window bound.
    Exceeded {
        ceiling: Ceiling,
        limit: Amount,
        remaining: Amount,
        resets_at_ms: Option<u64>,
    },
    Suspended,
}

/// One payment row as its owner may see it.
#[derive(Debug, Clone)]
pub struct Payment {
    pub payment_id: PaymentId,
    pub agent: AgentId,
    pub idempotency_key: Option<IdempotencyKey>,
    pub call_hash: [u8; 32],
    pub resource_ref: String,
    pub version_hash: String,
    pub scheme: String,
    pub network: Network,
    pub asset: Asset,
    pub payer: String,
    pub pay_to: String,
    pub reserved: Amount,
    pub settled: Option<Amount>,
    pub authorization: Authorization,
    pub state: State,
    pub reason: Option<String>,
    pub transaction: Option<String>,
    pub answered: bool,
    /// A sealed signed payload is stored (recovery is possible).
    pub has_payload: bool,
    pub has_outcome: bool,
    /// The stored outcome is the seller's request for input: another answer follows.
    pub outcome_unfinished: bool,
    /// A lease is alive: of an open row its owner's, a recovery's or a sweep's; of a settled one a recovery's.
    pub leased: bool,
    pub created_ms: u64,
    pub updated_ms: u64,
}

impl Payment {
    pub fn unit(&self) -> Unit {
        Unit { network: self.network.clone(), asset: self.asset.clone() }
    }
}

/// Which payment is meant. Another agent's payment is never found.
#[derive(Debug, Clone, Copy)]
pub enum By<'a> {
    Id(PaymentId),
    Key(&'a IdempotencyKey),
    /// The keyless payment of the same ref and arguments that is open, or settled and not yet answered.
    Twin(&'a [u8; 32]),
}

/// The end of a payment, with its evidence.
#[derive(Debug, Clone, Copy)]
pub struct SettleRequest<'a> {
    pub payment_id: PaymentId,
    pub amount: Amount,
    pub transaction: Option<&'a str>,
    pub evidence: Evidence,
    /// The answer to store, sealed; `None` stores nothing.
    pub outcome: Option<&'a [u8]>,
    /// `input_required` with a right receipt: the outcome is not the last word.
    pub unfinished: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// The seller's receipt, right in every member.
    Receipt,
    Chain,
    Operator,
}

impl Evidence {
    pub fn as_str(self) -> &'static str {
        match self {
            Evidence::Receipt => "receipt",
            Evidence::Chain => "chain",
            Evidence::Operator => "operator",
        }
    }
}

#[derive(Debug)]
pub enum SettleOutcome {
    /// This call settled the row, or it was settled so already (the outcome is stored if none was).
    Settled,
    /// The row was settled already, with another amount or transaction than this claim names, or the claim's transaction
    /// is another payment's: unchanged, and no outcome is stored. A receipt names what is booked; an output with such a
    /// receipt is stored by settling again with exactly these two.
    SettledAs { amount: Amount, transaction: Option<String> },
    /// The row was released meanwhile: unchanged, an event written, the operator alerted.
    Released,
    /// The row is open, and the transaction is booked for another payment of this network: unchanged.
    TransactionTaken { by: PaymentId },
}

/// What an attempt to recover a payment found.
#[derive(Debug)]
#[must_use]
pub enum Recovery {
    /// The lease is ours: the opened payload may be sent again, once.
    Taken(Box<Recoverable>),
    /// Somebody alive works on the row: its owner, another recovery, a sweep.
    Leased,
    /// The agent or the unit is suspended: nothing is sent for it.
    Suspended,
    /// No payload is stored, or the row is released, or its last word is stored already.
    Nothing,
}

/// A stored payload under the lease of the one that recovers it.
pub struct Recoverable {
    pub payment: Payment,
    pub lease: Lease,
    /// As it was given to [`Ledger::store_payload`]. Never logged.
    pub payload: Vec<u8>,
}

impl std::fmt::Debug for Recoverable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Recoverable({}, payload withheld)", self.payment.payment_id.short())
    }
}

/// How an operator ends a payment by hand. `note` is the written reason; it lands in the payment's history.
#[derive(Debug, Clone, Copy)]
pub struct Resolution<'a> {
    pub payment_id: PaymentId,
    pub end: End<'a>,
    pub note: &'a str,
}

#[derive(Debug, Clone, Copy)]
pub enum End<'a> {
    /// `transaction`: named by the operator, or found on the chain.
    Settled {
        amount: Amount,
        transaction: Option<&'a str>,
        evidence: Evidence,
    },
    Released,
}

/// Both stores hold the operator to the same words.
pub(crate) fn check_note(note: &str) -> Result<(), LedgerError> {
    let fits = !note.trim().is_empty() && note.chars().count() <= MAX_NOTE && !note.chars().any(char::is_control);
    let why = || format!("a note has 1 to {MAX_NOTE} characters and no control characters");
    if fits { Ok(()) } else { Err(LedgerError::Inconsistent(why())) }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Resolved {
    Done,
    /// Only an open payment without a live lease can be resolved: unchanged.
    NotOpen(State),
    Leased,
    /// The transaction is booked for another payment: unchanged.
    TransactionTaken {
        by: PaymentId,
    },
}

/// What [`Ledger::tidy`] removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tidied {
    pub outcomes: u64,
    pub payloads: u64,
    /// Keyless settled payments of which nothing can be handed out any more: their twins pay anew.
    pub answered: u64,
    pub sessions: u64,
}

/// The open payments of all agents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenRows {
    pub reserved: Holds,
    pub in_doubt: Holds,
}

/// The open payments of one state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Holds {
    pub count: u64,
    pub oldest_created_ms: Option<u64>,
}

impl OpenRows {
    pub fn count(&self) -> u64 {
        self.reserved.count.saturating_add(self.in_doubt.count)
    }

    pub fn oldest_created_ms(&self) -> Option<u64> {
        [self.reserved, self.in_doubt].iter().filter_map(|holds| holds.oldest_created_ms).min()
    }
}

/// One line of `x402_get_budget`.
#[derive(Debug, Clone)]
pub struct BudgetLine {
    pub unit: Unit,
    pub per_call: Option<Amount>,
    pub per_session: Option<Amount>,
    pub per_day: Option<Amount>,
    pub total_per_day: Option<Amount>,
    pub unlimited: bool,
    pub suspended: bool,
    pub day_spent: Amount,
    pub day_held: Amount,
    pub session_spent: Amount,
    pub session_held: Amount,
    pub total_used: Amount,
    /// Open holds that count in an earlier day's window.
    pub earlier_holds: Vec<(PaymentId, String, Amount)>,
    pub resets_at_ms: u64,
}

/// Whom a limit row binds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Agent(AgentId),
    /// `*`: each agent's default.
    EachAgent,
    /// `total`: all agents together (`per_day` only).
    Total,
}

/// One row of `spend_limits`. Zero denies; an absent figure does not bind; no row at all refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    pub subject: Subject,
    pub unit: Unit,
    pub per_call: Option<Amount>,
    pub per_session: Option<Amount>,
    pub per_day: Option<Amount>,
    pub unlimited: bool,
    pub suspended: bool,
    /// `file`, `resource` or `operator`.
    pub source: String,
}

/// Every limit of one source.
#[derive(Debug, Clone, Copy)]
pub struct LimitList<'a> {
    pub source: &'a str,
    /// What the operator counts up with each change; 0 where he does not.
    pub version: u64,
    pub limits: &'a [Limit],
}

/// What became of a [`LimitList`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// The rows are these. `replaced`: others were there, of this or an older version.
    Written { replaced: bool },
    /// The rows were these already.
    Same,
    /// The rows are those of a list with this higher version: unchanged.
    Newer { version: u64 },
    /// The rows are those of another list with the same version: unchanged.
    Contradicts,
}

/// What a stop has to wait for, and what it does not stop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Signable {
    /// Reserved rows whose owner may sign, or whose signature may be on its way to the signer.
    pub count: u64,
    /// The last of these moments, milliseconds from now; 0 where there is none.
    pub for_ms: u64,
    /// Open rows, these and the signed ones, which may still settle until their authorization ends.
    pub open: u64,
}

/// What a pin becomes.
#[derive(Debug, Clone, Copy)]
pub enum SetPin<'a> {
    /// This recipient, where there is no pin.
    First(&'a str),
    /// This recipient, whatever is there.
    To(&'a str),
    Removed,
}

impl Subject {
    /// As it is stored and written on the command line.
    pub fn as_str(&self) -> &str {
        match self {
            Subject::Agent(agent) => agent.as_str(),
            Subject::EachAgent => "*",
            Subject::Total => "total",
        }
    }

    pub fn from_word(word: &str) -> Result<Subject, ParseError> {
        match word {
            "*" => Ok(Subject::EachAgent),
            "total" => Ok(Subject::Total),
            agent => agent.parse().map(Subject::Agent),
        }
    }
}

/// Which payments the operator wants to see.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub state: Option<State>,
    pub agent: Option<AgentId>,
    pub limit: u32,
}

/// One line of a payment's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub at_ms: u64,
    pub event: String,
    pub reason: Option<String>,
    pub amount: Option<Amount>,
    pub transaction: Option<String>,
    pub evidence: Option<String>,
    /// What an operator wrote.
    pub note: Option<String>,
}

/// What an audit read, and every difference that it found.
#[derive(Debug, Clone, Default)]
pub struct Audit {
    pub payments: u64,
    pub windows: u64,
    pub differences: Vec<Difference>,
}

/// `what` is a stable word: `window`, `settled_amount`, `transaction_twice`, `history`, `late_success`, `unreadable`, `due`
/// (open and never looked at, or the reverse), `lease` (reserved by nobody, or leased for ever), `body` (a payload or an
/// outcome where none is kept), `key` (of an archived payment, and not spent).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub what: &'static str,
    pub detail: String,
}

/// The ledger: SQLite or PostgreSQL; one test table serves both.
pub trait Ledger: Send + Sync + 'static {
    /// A reserved row whose lease has expired is moved to in_doubt in the same statement. The key of an archived payment
    /// finds nothing here: [`Decision::KeySpent`] refuses it when it would reserve.
    fn lookup<'a>(&'a self, agent: &'a AgentId, by: By<'a>) -> LedgerResult<'a, Option<Payment>>;
    /// Use [`reserve`].
    fn decide<'a>(&'a self, intent: &'a Intent) -> LedgerResult<'a, Decision>;
    /// Stores the sealed signed payload with where it goes (endpoint, transport, tool, rounds), while the paid request is
    /// under way. `false`: nothing is stored, because there is no sealing key, or the row is closed or not ours. Of a
    /// settled row only under a recovery's live lease, while the last word is missing: rounds are stored before they go.
    fn store_payload<'a>(&'a self, id: PaymentId, lease: &'a Lease, payload: &'a [u8]) -> LedgerResult<'a, bool>;
    /// The stored payload of an unfinished payment, opened.
    fn payload(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>>;
    /// The amount is at most the reserved one (else the row is left and the call is an error). It ends the lease of an
    /// open row, and by a receipt also a recovery's lease of a settled one.
    fn settle<'a>(&'a self, request: SettleRequest<'a>) -> LedgerResult<'a, SettleOutcome>;
    /// reserved -> in_doubt by its owner. `false`: the row is no longer ours.
    fn in_doubt<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool>;
    /// reserved -> released by its owner, before any byte left. `false`: the row is no longer ours.
    fn release<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool>;
    /// Takes the lease of a payment whose signed payload is stored and whose last word is not: in doubt (a reserved row
    /// whose lease has expired becomes so), or settled without an outcome, or with an unfinished one. It holds the shared
    /// lock of `suspend` and reads `suspended` after it, so no recovery begins after a stop. Whether the authorization
    /// of a row in doubt is alive, the caller asks the chain.
    fn take_recovery(&self, id: PaymentId, lease_ms: u64) -> LedgerResult<'_, Recovery>;
    /// Gives a recovery's lease back; a row in doubt is due at once, and `reason` becomes its reason (with an event). Written
    /// twice it is `true` twice. `false`: the lease is no longer ours, or the row is released.
    fn end_recovery<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Option<Reason>) -> LedgerResult<'a, bool>;
    /// Leases up to `limit` open payments that are due and that nobody works on; a reserved one whose owner's lease has
    /// expired becomes in doubt first. Agents take turns, and of one agent the oldest due comes first. Each call gives
    /// payments that no other call has. A payment whose lease runs out is due again by itself.
    fn take_due_on<'a>(&'a self, on: On<'a>, limit: u32, lease_ms: u64) -> LedgerResult<'a, Vec<(Payment, Lease)>>;
    /// The same of all networks.
    fn take_due(&self, limit: u32, lease_ms: u64) -> LedgerResult<'_, Vec<(Payment, Lease)>> {
        self.take_due_on(On::Any, limit, lease_ms)
    }
    /// The sweep proved nothing: back without a lease, due again at `due_ms`. `false`: the lease is no longer ours.
    fn look_again<'a>(&'a self, id: PaymentId, lease: &'a Lease, due_ms: u64) -> LedgerResult<'a, bool>;
    /// in_doubt -> released under the sweep's live lease, on the chain's evidence: `expired_unspent` or `nonce_cancelled`, any
    /// other reason is an error. Written twice it is `true` twice. `false`: the lease is no longer ours or has run out, or
    /// the row is closed.
    fn expire<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool>;
    /// Removes what has expired: outcomes, payloads (a day after the settlement), tombstones of sessions. Payments stay.
    /// Keyless ones of which nothing is left to hand out are marked as answered, not before a day after the settlement: a
    /// caller that was cut off gets its receipt until then, where nothing could be stored.
    fn tidy(&self) -> LedgerResult<'_, Tidied>;
    fn open_rows(&self) -> LedgerResult<'_, OpenRows>;
    /// The ledger's time, unix milliseconds.
    fn now_ms(&self) -> LedgerResult<'_, u64>;
    /// The operator's word about an open payment that nobody works on; a reserved one whose lease has expired is in doubt
    /// first. An event keeps the note (1 to [`MAX_NOTE`] characters, no control characters; else it is an error).
    fn resolve<'a>(&'a self, resolution: Resolution<'a>) -> LedgerResult<'a, Resolved>;
    /// The answer of this keyless payment reached its caller's transport.
    fn answered(&self, id: PaymentId) -> LedgerResult<'_, ()>;
    /// The stored outcome, opened; `None` when it was never stored or has expired.
    fn outcome(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>>;
    fn budget<'a>(&'a self, agent: &'a AgentId, session: Option<&'a str>) -> LedgerResult<'a, Vec<BudgetLine>>;
    /// Makes the rows of the list's source equal to it, at once (rows of other sources stay). All processes on a ledger
    /// have the rows of the list with the highest version; without versions, of the last that was written.
    fn apply_limits<'a>(&'a self, list: LimitList<'a>) -> LedgerResult<'a, Applied>;
    /// The same without a version. One that the ledger has a newer list than is an error.
    fn replace_limits<'a>(&'a self, source: &'a str, limits: &'a [Limit]) -> LedgerResult<'a, ()> {
        Box::pin(async move {
            match self.apply_limits(LimitList { source, version: 0, limits }).await? {
                Applied::Written { .. } | Applied::Same => Ok(()),
                Applied::Newer { .. } | Applied::Contradicts => {
                    Err(LedgerError::Inconsistent("the ledger has a newer list of limits".to_owned()))
                }
            }
        })
    }
    fn limits(&self) -> LedgerResult<'_, Vec<Limit>>;
    /// Sets the operator's row of this subject and unit; a suspension in it stays.
    fn set_limit<'a>(&'a self, limit: &'a Limit) -> LedgerResult<'a, ()>;
    /// From the return on no reservation is made for this subject (and unit, `None`: all of them), and no recovery begins.
    /// The time of the ledger's clock that none is later than, unix milliseconds.
    fn suspend<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, u64>;
    /// Takes the operator's suspension back. `false`: there was none.
    fn resume<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, bool>;
    /// Subjects that the operator stopped in all units.
    fn stopped(&self) -> LedgerResult<'_, Vec<Subject>>;
    /// What of this subject and unit is open, and which of it may still be signed by its owners.
    fn signable<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, Signable>;
    /// The rules for origins that every replica has.
    fn origin_rules(&self) -> LedgerResult<'_, Vec<OriginRule>>;
    /// Sets the operator's rule of this origin; `None` removes it. `false`: it was so already.
    fn set_origin_rule<'a>(&'a self, origin: &'a Origin, allowed: Option<bool>) -> LedgerResult<'a, bool>;
    fn pins(&self) -> LedgerResult<'_, Vec<Pin>>;
    fn pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit) -> LedgerResult<'a, Option<Pin>>;
    /// `false`: it was so already, or, of [`SetPin::First`], there is a pin.
    fn set_pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit, set: SetPin<'a>) -> LedgerResult<'a, bool>;
    /// The operator's view, newest first: every agent's payments.
    fn list<'a>(&'a self, filter: &'a Filter) -> LedgerResult<'a, Vec<Payment>>;
    /// By the whole identifier or at least 8 of its first digits; `None` when none or several begin so.
    fn show<'a>(&'a self, id: &'a str) -> LedgerResult<'a, Option<(Payment, Vec<Event>)>>;
    /// Everything again from the rows, in one snapshot.
    fn audit(&self) -> LedgerResult<'_, Audit>;
    /// A session was ended by its owner: remembered until it would have expired by itself.
    fn end_session<'a>(&'a self, session: &'a str, expires_ms: u64) -> LedgerResult<'a, ()>;
    fn session_ended<'a>(&'a self, session: &'a str) -> LedgerResult<'a, bool>;
    /// Whether the ledger can be read and written; the start and `check` ask.
    fn ping(&self) -> LedgerResult<'_, ()>;
}

#[derive(Debug)]
pub enum NotReserved {
    Refused(Decision),
    Ledger(LedgerError),
}

/// Writes the row: the only way from a [`Quote`] to something that may be signed.
pub async fn reserve(ledger: &dyn Ledger, intent: Intent) -> Result<Reserved, NotReserved> {
    // Counted from before the row is there: a process that is stopped right after the commit signs nothing later.
    let sign_until = Instant::now() + Duration::from_millis(intent.sign_within_ms.min(intent.lease_ms));
    match ledger.decide(&intent).await {
        Ok(Decision::Fresh(lease)) => Ok(Reserved {
            quote: intent.quote,
            payment_id: intent.payment_id,
            authorization: intent.authorization,
            lease,
            sign_until,
            _written: Written(()),
        }),
        Ok(other) => Err(NotReserved::Refused(other)),
        Err(error) => Err(NotReserved::Ledger(error)),
    }
}
