//! The steps of the paid call, how each can be reached, and what the table (`docs/outcomes.md`) lets the agent hear.

use super::faults::When;
use super::proxy::{At, How};
use super::store::Store;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Error,
    Hang,
    Kill,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    Once,
    Twice,
    Raced,
}

/// What has happened before the step is struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    Fresh,
    /// The same call was paid and answered.
    Paid,
    /// The paid call was lost on its way: in doubt, with its payload, nothing on the chain.
    Doubt,
    /// The seller has settled, its answer was lost: in doubt, with its payload, paid on the chain.
    Spent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// While the call is made (the first, or the repeated one where something was set up).
    Call,
    /// While its payment is asked for.
    Poll,
    /// While the sweep looks at the dead authorization.
    Sweep,
    /// While the sweep looks at an authorization that lives.
    EarlySweep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Http(&'static str, At),
    Ledger(&'static str, When),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    With,
    Without,
    /// Both, in turn.
    Either,
}

pub struct Step {
    pub name: &'static str,
    pub setup: Setup,
    pub moment: Moment,
    pub target: Target,
    pub key: Key,
    /// Goes wrong as well, so that the story comes to this step.
    pub also: Option<(&'static str, At, How)>,
    /// The challenge does not declare the tool's input schema: the seller's list is asked for it.
    pub undeclared: bool,
    /// What the struck call may say, by kind; a kill says nothing.
    pub error: &'static [&'static str],
    pub hang: &'static [&'static str],
    /// What the same call says afterwards, with nothing at fault and every lease over; by kind.
    pub then: [&'static [&'static str]; 3],
}

const GONE: &[&str] = &["gone"];
const PAID: &[&str] = &["paid"];
const UNRECORDED: &[&str] = &["paid:unrecorded"];
const CATALOG: &[&str] = &["UPSTREAM_PROTOCOL_ERROR/catalog"];
const CATALOG_SLOW: &[&str] = &["UPSTREAM_TIMEOUT/catalog"];
const SELLER: &[&str] = &["UPSTREAM_PROTOCOL_ERROR/seller"];
const SELLER_SLOW: &[&str] = &["UPSTREAM_TIMEOUT/seller"];
const CHAIN: &[&str] = &["UPSTREAM_PROTOCOL_ERROR/chain_rpc"];
const NO_SIGNER: &[&str] = &["PAYMENT_REJECTED/signer_unavailable"];
const NOT_SIGNED: &[&str] = &["PAYMENT_REJECTED/signer_failed"];
const REFUSED: &[&str] = &["PAYMENT_REJECTED/signer_refused"];
/// With a key the released payment; without one a new payment.
const REFUSED_OR_NEW: &[&str] = &["PAYMENT_REJECTED/signer_refused", "paid"];
const NOT_PREPARED: &[&str] = &["PAYMENT_REJECTED/simulation_failed"];
const NO_ANSWER: &[&str] = &["SETTLEMENT_UNKNOWN/no_answer"];
const NO_RECEIPT: &[&str] = &["SETTLEMENT_UNKNOWN/no_receipt"];
const IN_DOUBT: &[&str] = &["SETTLEMENT_UNKNOWN/in_doubt"];
const INTERNAL: &[&str] = &["INTERNAL/ledger_unavailable"];
const INTERNAL_OR_DOUBT: &[&str] = &["INTERNAL/ledger_unavailable", "SETTLEMENT_UNKNOWN/in_doubt"];
const ANY_DOUBT: &[&str] =
    &["SETTLEMENT_UNKNOWN/in_doubt", "SETTLEMENT_UNKNOWN/no_answer", "SETTLEMENT_UNKNOWN/in_flight"];
const PAID_OR_DOUBT: &[&str] = &["paid", "SETTLEMENT_UNKNOWN/in_doubt"];
/// A seller that never learnt that it was paid asks again.
const CHALLENGED: &[&str] = &["SETTLEMENT_UNKNOWN/challenged_again"];
const SWEPT: &[&str] = &[];

const fn http(name: &'static str, step: &'static str, at: At) -> Step {
    Step {
        name,
        setup: Setup::Fresh,
        moment: Moment::Call,
        target: Target::Http(step, at),
        key: Key::Either,
        also: None,
        undeclared: false,
        error: NO_ANSWER,
        hang: NO_ANSWER,
        then: [PAID; 3],
    }
}

const fn ledger(name: &'static str, method: &'static str, when: When) -> Step {
    Step { target: Target::Ledger(method, when), error: INTERNAL, hang: GONE, ..http(name, "", At::Before) }
}

const fn sweep(step: Step, setup: Setup) -> Step {
    Step { setup, moment: Moment::Sweep, error: SWEPT, hang: SWEPT, then: [SWEPT; 3], ..step }
}

const SIGN_REFUSED: Option<(&str, At, How)> = Some(("sign", At::Before, How::Refusal));
/// A seller of an earlier revision.
const OLDER: Option<(&str, At, How)> = Some(("discover", At::Before, How::Error));
const PAY_FAILS: Option<(&str, At, How)> = Some(("pay", At::Before, How::Error));

/// In the order of the story.
pub const STEPS: &[Step] = &[
    // before the reservation
    Step { key: Key::With, ..ledger("lookup.before", "lookup_key", When::Before) },
    Step { key: Key::With, ..ledger("lookup.after", "lookup_key", When::After) },
    Step { error: CATALOG, hang: CATALOG_SLOW, ..http("resolve.before", "resolve", At::Before) },
    Step { error: CATALOG, hang: CATALOG_SLOW, ..http("resolve.after", "resolve", At::After) },
    Step { error: CATALOG, hang: CATALOG_SLOW, ..http("resolve.middle", "resolve", At::Middle) },
    // An older seller knows no server/discover: its failure is answered by `initialize`.
    Step { error: PAID, hang: SELLER_SLOW, ..http("discover", "discover", At::Before) },
    Step { also: OLDER, error: SELLER, hang: SELLER_SLOW, ..http("initialize.before", "initialize", At::Before) },
    Step { also: OLDER, error: SELLER, hang: SELLER_SLOW, ..http("initialize.after", "initialize", At::After) },
    Step { also: OLDER, error: SELLER, hang: SELLER_SLOW, ..http("initialized", "initialized", At::Before) },
    // A seller whose list cannot be had gets no parameter headers.
    Step { error: PAID, hang: SELLER_SLOW, ..http("list.headers", "list", At::Before) },
    Step {
        undeclared: true,
        also: Some(("list", At::Before, How::Error)),
        error: SELLER,
        hang: SELLER_SLOW,
        ..http("list.schema", "list", At::Before)
    },
    Step { error: SELLER, hang: SELLER_SLOW, ..http("probe.before", "probe", At::Before) },
    Step { error: SELLER, hang: SELLER_SLOW, ..http("probe.after", "probe", At::After) },
    Step { error: SELLER, hang: SELLER_SLOW, ..http("probe.middle", "probe", At::Middle) },
    Step { error: NO_SIGNER, hang: NO_SIGNER, ..http("address", "address", At::Before) },
    Step { error: CHAIN, hang: CHAIN, ..http("network", "network", At::Before) },
    Step { error: CHAIN, hang: CHAIN, ..http("balance", "balance", At::Before) },
    Step { error: CHAIN, hang: CHAIN, ..http("ledger-number", "ledger", At::Before) },
    // reserve
    ledger("reserve.before", "decide", When::Before),
    Step { then: [IN_DOUBT; 3], ..ledger("reserve.after", "decide", When::After) },
    // sign
    Step { error: NOT_SIGNED, hang: NOT_SIGNED, then: [IN_DOUBT; 3], ..http("sign.before", "sign", At::Before) },
    Step { error: NOT_SIGNED, hang: NOT_SIGNED, then: [IN_DOUBT; 3], ..http("sign.after", "sign", At::After) },
    Step {
        also: SIGN_REFUSED,
        error: REFUSED,
        then: [IN_DOUBT; 3],
        ..ledger("release.before", "release", When::Before)
    },
    Step {
        also: SIGN_REFUSED,
        error: REFUSED,
        then: [REFUSED_OR_NEW; 3],
        ..ledger("release.after", "release", When::After)
    },
    // prepare
    Step {
        error: NOT_PREPARED,
        hang: NOT_PREPARED,
        then: [IN_DOUBT; 3],
        ..http("simulate.before", "simulate", At::Before)
    },
    Step {
        error: NOT_PREPARED,
        hang: NOT_PREPARED,
        then: [IN_DOUBT; 3],
        ..http("simulate.after", "simulate", At::After)
    },
    // pay
    Step {
        error: PAID,
        hang: PAID,
        then: [PAID, PAID, IN_DOUBT],
        ..ledger("store-payload.before", "store_payload", When::Before)
    },
    Step { error: PAID, hang: PAID, ..ledger("store-payload.after", "store_payload", When::After) },
    http("pay.before", "pay", At::Before),
    http("pay.reached", "pay", At::Reached),
    http("pay.after", "pay", At::After),
    http("pay.middle", "pay", At::Middle),
    Step { error: NO_RECEIPT, ..http("verify.before", "verify", At::Before) },
    Step { error: NO_RECEIPT, ..http("verify.after", "verify", At::After) },
    Step { error: NO_RECEIPT, ..http("settlement.before", "settle", At::Before) },
    Step { error: NO_RECEIPT, then: [CHALLENGED; 3], ..http("settlement.reached", "settle", At::Reached) },
    Step { error: NO_RECEIPT, then: [CHALLENGED; 3], ..http("settlement.after", "settle", At::After) },
    Step { also: PAY_FAILS, error: NO_ANSWER, ..ledger("doubt.before", "in_doubt", When::Before) },
    Step { also: PAY_FAILS, error: NO_ANSWER, ..ledger("doubt.after", "in_doubt", When::After) },
    // record
    Step { error: UNRECORDED, ..ledger("record.before", "settle", When::Before) },
    Step { error: UNRECORDED, ..ledger("record.after", "settle", When::After) },
    Step { key: Key::Without, error: PAID, hang: PAID, ..ledger("answered.before", "answered", When::Before) },
    Step { key: Key::Without, error: PAID, hang: PAID, ..ledger("answered.after", "answered", When::After) },
    // the same call again
    Step { setup: Setup::Paid, key: Key::With, ..ledger("replay.lookup.before", "lookup_key", When::Before) },
    Step { setup: Setup::Paid, key: Key::With, ..ledger("replay.outcome.before", "outcome", When::Before) },
    Step { setup: Setup::Paid, key: Key::With, ..ledger("replay.outcome.after", "outcome", When::After) },
    Step {
        setup: Setup::Doubt,
        key: Key::Without,
        also: Some(("resolve", At::Before, How::Error)),
        error: INTERNAL_OR_DOUBT,
        ..ledger("twin.lookup.before", "lookup_twin", When::Before)
    },
    Step {
        setup: Setup::Doubt,
        error: INTERNAL_OR_DOUBT,
        ..ledger("recover.take.before", "take_recovery", When::Before)
    },
    Step {
        setup: Setup::Doubt,
        error: INTERNAL_OR_DOUBT,
        ..ledger("recover.take.after", "take_recovery", When::After)
    },
    // Any RPC's ledger number says that the authorization is alive.
    Step { setup: Setup::Doubt, error: PAID, hang: IN_DOUBT, ..http("recover.nonce", "nonce", At::Before) },
    Step { setup: Setup::Doubt, ..http("recover.pay.before", "pay", At::Before) },
    Step { setup: Setup::Doubt, ..http("recover.pay.reached", "pay", At::Reached) },
    Step { setup: Setup::Doubt, ..http("recover.pay.after", "pay", At::After) },
    Step { setup: Setup::Doubt, ..http("recover.pay.middle", "pay", At::Middle) },
    Step { setup: Setup::Spent, ..http("recover.spent.pay.before", "pay", At::Before) },
    Step { setup: Setup::Spent, ..http("recover.spent.pay.after", "pay", At::After) },
    Step {
        setup: Setup::Doubt,
        also: PAY_FAILS,
        error: ANY_DOUBT,
        ..ledger("recover.end.before", "end_recovery", When::Before)
    },
    Step {
        setup: Setup::Doubt,
        also: PAY_FAILS,
        error: ANY_DOUBT,
        ..ledger("recover.end.after", "end_recovery", When::After)
    },
    Step { setup: Setup::Doubt, error: UNRECORDED, ..ledger("recover.record.before", "settle", When::Before) },
    Step { setup: Setup::Doubt, error: UNRECORDED, ..ledger("recover.record.after", "settle", When::After) },
    // asking
    Step {
        setup: Setup::Paid,
        moment: Moment::Poll,
        key: Key::With,
        ..ledger("poll.lookup.before", "lookup_key", When::Before)
    },
    Step {
        setup: Setup::Doubt,
        moment: Moment::Poll,
        key: Key::With,
        ..ledger("poll.lookup.after", "lookup_key", When::After)
    },
    // sweep
    sweep(ledger("sweep.due.before", "take_due", When::Before), Setup::Doubt),
    sweep(ledger("sweep.due.after", "take_due", When::After), Setup::Doubt),
    sweep(ledger("sweep.clock", "now_ms", When::Before), Setup::Doubt),
    sweep(http("sweep.nonce", "nonce", At::Before), Setup::Doubt),
    sweep(http("sweep.spent.nonce", "nonce", At::Before), Setup::Spent),
    sweep(ledger("sweep.expire.before", "expire", When::Before), Setup::Doubt),
    sweep(ledger("sweep.expire.after", "expire", When::After), Setup::Doubt),
    sweep(ledger("sweep.settle.before", "settle", When::Before), Setup::Spent),
    sweep(ledger("sweep.settle.after", "settle", When::After), Setup::Spent),
    sweep(http("sweep.spent.events", "events", At::Before), Setup::Spent),
    sweep(ledger("sweep.tidy", "tidy", When::Before), Setup::Doubt),
    sweep(ledger("sweep.tell", "open_rows", When::Before), Setup::Doubt),
    Step {
        moment: Moment::EarlySweep,
        ..sweep(ledger("sweep.again.before", "look_again", When::Before), Setup::Doubt)
    },
    Step { moment: Moment::EarlySweep, ..sweep(ledger("sweep.again.after", "look_again", When::After), Setup::Doubt) },
];

impl Step {
    pub fn allowed(&self, kind: Kind) -> &'static [&'static str] {
        match kind {
            Kind::Error => self.error,
            Kind::Hang => self.hang,
            Kind::Kill => GONE,
        }
    }

    pub fn then(&self, kind: Kind, mode: Mode) -> &'static [&'static str] {
        // Killed while its twin is further on.
        if kind == Kind::Kill && mode == Mode::Raced && self.is_early() {
            return PAID_OR_DOUBT;
        }
        self.then[kind as usize]
    }

    /// Before the payload is stored.
    pub fn is_early(&self) -> bool {
        STEPS.iter().take_while(|step| step.name != "store-payload.before").any(|step| step.name == self.name)
    }
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Error, Kind::Hang, Kind::Kill];
    pub fn as_str(self) -> &'static str {
        ["error", "hang", "kill"][self as usize]
    }
}

impl Mode {
    pub const ALL: [Mode; 3] = [Mode::Once, Mode::Twice, Mode::Raced];
    pub fn as_str(self) -> &'static str {
        ["once", "twice", "raced"][self as usize]
    }
}

/// What issue and table promise by name, beyond the matrix's own demands.
pub struct Shown {
    pub name: &'static str,
    pub step: &'static str,
    /// Transfers on the chain in the end, at least and at most.
    pub transfers: [usize; 2],
    /// The repeated call has the tool's output.
    pub output: bool,
}

pub const SHOWN: &[Shown] = &[
    Shown {
        name: "a call killed once its payload is stored and the seller has the bytes is paid once, and repeated it has \
               its output",
        step: "pay.reached",
        transfers: [1, 1],
        output: true,
    },
    Shown {
        name: "a call killed after the seller has settled is paid once, and repeated it has its output",
        step: "pay.after",
        transfers: [1, 1],
        output: true,
    },
    Shown {
        name: "a call killed once the signer has signed never pays, and its row ends",
        step: "sign.after",
        transfers: [0, 0],
        output: false,
    },
    Shown {
        name: "a call killed while its signed payment is simulated never pays, and its row ends",
        step: "simulate.after",
        transfers: [0, 0],
        output: false,
    },
    Shown {
        name: "a call killed before its payload is stored pays at most once, and its row ends",
        step: "store-payload.before",
        transfers: [0, 1],
        output: false,
    },
];

/// The shown cases: killed and repeated, with and without a key.
pub fn shown(stores: &[Store]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (shown, store) in SHOWN.iter().flat_map(|shown| stores.iter().map(move |store| (shown, store))) {
        let Some(step) = STEPS.iter().find(|step| step.name == shown.step) else { continue };
        for keyed in [true, false] {
            let case = Case { store: *store, step, kind: Kind::Kill, mode: Mode::Twice, keyed, shows: Some(shown) };
            cases.push(case);
        }
    }
    cases
}

/// One cell of the table.
#[derive(Clone, Copy)]
pub struct Case {
    pub store: Store,
    pub step: &'static Step,
    pub kind: Kind,
    pub mode: Mode,
    pub keyed: bool,
    pub shows: Option<&'static Shown>,
}

impl Case {
    /// What `--case` takes.
    pub fn name(&self) -> String {
        let key = if self.keyed { "key" } else { "keyless" };
        let (store, step) = (self.store.as_str(), self.step.name);
        let shown = if self.shows.is_some() { "shown/" } else { "" };
        format!("{shown}{store}/{step}/{}/{}/{key}", self.kind.as_str(), self.mode.as_str())
    }
}

/// Every case; a step that is the same with and without a key takes turns.
pub fn all(stores: &[Store]) -> Vec<Case> {
    let mut cases = Vec::new();
    for store in stores {
        for (row, step) in STEPS.iter().enumerate() {
            for kind in Kind::ALL {
                for mode in Mode::ALL {
                    let turn = (row + kind as usize + mode as usize).is_multiple_of(2);
                    let keyed = match step.key {
                        Key::With => true,
                        Key::Without => false,
                        Key::Either => turn,
                    };
                    cases.push(Case { store: *store, step, kind, mode, keyed, shows: None });
                }
            }
        }
    }
    cases
}

/// Whether the default run has it: each step in each kind once, the modes in turn; on PostgreSQL the steps that leave or
/// find something in the ledger.
pub fn covering(case: &Case, row: usize) -> bool {
    let untouched = case.step.is_early() && matches!(case.step.target, Target::Http(..));
    if case.store == Store::Postgres && untouched {
        return false;
    }
    let turn = row + case.kind as usize + usize::from(case.store == Store::Postgres);
    turn % Mode::ALL.len() == case.mode as usize
}
