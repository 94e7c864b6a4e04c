//! The promises of every ledger, as one table of (name, what happened before, event, outcome, balances, state), and the
//! hazards that do not fit a line. It runs against a [`Bench`], so each store is held to the same lines.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use serde_json::value::RawValue;

use super::*;
use crate::catalog::SellerTransport;
use crate::money::Bounds;
use crate::upstream::Endpoint;
use crate::x402::Offer;

/// 2026-12-02T12:00:00Z.
pub(crate) const NOON: u64 = 1_796_212_800_000;
pub(crate) const LEASE_MS: u64 = 60_000;
const SIGN_MS: u64 = 10_000;

/// A fresh ledger at [`NOON`], with a clock that only the test moves.
pub(crate) trait Bench: Send + Sync {
    fn ledger(&self) -> Arc<dyn Ledger>;
    /// Another process's view of the same ledger.
    fn another(&self) -> BoxFuture<'_, Arc<dyn Ledger>>;
    fn advance(&self, ms: u64);
}

pub(crate) fn unit() -> Unit {
    Unit { network: "stellar:testnet".parse().unwrap(), asset: "CUSDC".parse().unwrap() }
}

pub(crate) fn agent(name: &str) -> AgentId {
    name.parse().unwrap()
}

pub(crate) fn amount(text: &str) -> Amount {
    text.parse().unwrap()
}

pub(crate) fn id(n: u8) -> PaymentId {
    PaymentId::from_bytes([n; 32])
}

pub(crate) fn key(n: u8) -> IdempotencyKey {
    format!("idempotency-key-{n}").parse().unwrap()
}

/// One call that asks for a reservation. `n` gives its identifier and nonce.
#[derive(Clone)]
pub(crate) struct Call {
    pub n: u8,
    pub agent: &'static str,
    pub session: Option<&'static str>,
    pub key: Option<u8>,
    pub call: u8,
    pub amount: &'static str,
    pub max: &'static str,
    pub account: Option<&'static str>,
    /// Of the credential: a call, a session, a day.
    pub bounds: [Option<&'static str>; 3],
    pub asset: &'static str,
}

/// A keyless call of agent `a` over 100.
pub(crate) const CALL: Call = Call {
    n: 1,
    agent: "a",
    session: None,
    key: None,
    call: 1,
    amount: "100",
    max: "1000000",
    account: None,
    bounds: [None; 3],
    asset: "CUSDC",
};

impl Call {
    pub fn intent(&self) -> Intent {
        let raw = || RawValue::from_string("{}".to_owned()).unwrap();
        let offer = Offer {
            raw: raw(),
            scheme: "exact".to_owned(),
            network: unit().network,
            amount: amount(self.amount),
            asset: self.asset.parse().unwrap(),
            pay_to: "GSELLER".to_owned(),
            max_timeout_seconds: 60,
            extra: None,
        };
        let quote = Quote {
            agent: agent(self.agent),
            session: self.session.map(str::to_owned),
            bounds: {
                let [per_call, per_session, per_day] = self.bounds.map(|figure| figure.map(amount));
                Bounds { per_call, per_session, per_day }
            },
            idempotency_key: self.key.map(key),
            call_hash: [self.call; 32],
            resource_ref: "v1.ref".to_owned(),
            version_hash: "00".repeat(32),
            endpoint: Endpoint {
                url: "https://seller.test/mcp".parse().unwrap(),
                transport: SellerTransport::StreamableHttp,
            },
            tool: "tool".to_owned(),
            offer,
            max_amount: amount(self.max),
            resource: raw(),
            extensions: None,
            _admitted: crate::guard::Admitted::for_a_test(),
        };
        let authorization =
            Authorization { payer: "GPAYER".to_owned(), nonce: self.n.to_string(), dead_after: 1_012, at: 1_000 };
        Intent {
            quote,
            payment_id: id(self.n),
            id_nonce: [self.n; 16],
            authorization,
            lease_ms: LEASE_MS,
            sign_within_ms: SIGN_MS,
            account_ceiling: self.account.map(amount),
        }
    }
}

/// A limit row of agent `a`, per day 1,000.
pub(crate) fn limit() -> Limit {
    Limit {
        subject: Subject::Agent(agent("a")),
        unit: unit(),
        per_call: None,
        per_session: None,
        per_day: Some(amount("1000")),
        unlimited: false,
        suspended: false,
        source: "file".to_owned(),
    }
}

pub(crate) enum Do {
    Limits(Vec<Limit>),
    Reserve(Call),
    Settle {
        n: u8,
        amount: &'static str,
        transaction: Option<&'static str>,
    },
    InDoubt(u8),
    Release(u8),
    Answered(u8),
    Lookup(u8),
    /// By somebody else's name.
    LookupAs(&'static str, u8),
    LookupKey(u8),
    LookupTwin(u8),
    Suspend(Subject, bool),
    Resume(Subject, bool),
    Advance(u64),
    /// The owner stores the signed payload.
    Store(u8),
    /// The same under the lease of the last recovery or sweep.
    StoreAgain(u8),
    /// By the chain: all of it, no transaction named, nothing to store.
    ByChain(u8),
    /// A right receipt with the seller's request for input.
    Asks(u8),
    Recover(u8),
    EndRecovery(u8, Option<Reason>),
    TakeDue,
    /// In so many milliseconds.
    LookAgain(u8, u64),
    Expire(u8, Reason),
    /// The operator's word; `None` releases.
    Resolve(u8, Option<&'static str>, &'static str),
    Tidy,
}
use Do::*;

const fn settled(n: u8, amount: &'static str) -> Do {
    Settle { n, amount, transaction: None }
}

/// Carries out events and keeps the leases that they gave: the owners', and those of recovery and sweep.
struct Story<'a> {
    bench: &'a dyn Bench,
    ledger: Arc<dyn Ledger>,
    leases: BTreeMap<u8, Lease>,
    later: BTreeMap<u8, Lease>,
}

impl Story<'_> {
    async fn run(&mut self, event: &Do) -> String {
        let l = self.ledger.clone();
        let nobody = || Lease { token: [0; 16], expires_ms: 0, sign_before_ms: 0 };
        let lease = |n: &u8| self.leases.get(n).cloned().unwrap_or_else(nobody);
        let later = |n: &u8| self.later.get(n).cloned().unwrap_or_else(nobody);
        let asked = |all: bool| if all { None } else { Some(unit()) };
        match event {
            Limits(limits) => said(l.replace_limits("file", limits).await, |()| "ok".to_owned()),
            Reserve(call) => {
                let decision = l.decide(&call.intent()).await;
                if let Ok(Decision::Fresh(lease)) = &decision {
                    self.leases.insert(call.n, lease.clone());
                }
                said(decision, word)
            }
            Settle { n, amount: settled, transaction } => {
                let request = SettleRequest {
                    payment_id: id(*n),
                    amount: amount(settled),
                    transaction: *transaction,
                    evidence: Evidence::Receipt,
                    outcome: Some(b"{}"),
                    unfinished: false,
                };
                said(l.settle(request).await, ended)
            }
            ByChain(n) => {
                let request = SettleRequest { evidence: Evidence::Chain, ..whole(*n) };
                said(l.settle(request).await, ended)
            }
            Asks(n) => {
                let (outcome, transaction) = (Some(&b"what is your name?"[..]), Some("t"));
                let request = SettleRequest { outcome, transaction, unfinished: true, ..whole(*n) };
                said(l.settle(request).await, ended)
            }
            Store(n) => said(l.store_payload(id(*n), &lease(n), b"signed").await, |stored| stored.to_string()),
            StoreAgain(n) => said(l.store_payload(id(*n), &later(n), b"signed").await, |stored| stored.to_string()),
            Recover(n) => {
                let taken = l.take_recovery(id(*n), LEASE_MS).await;
                if let Ok(Recovery::Taken(taken)) = &taken {
                    assert_eq!((&taken.payload[..], taken.payment.leased), (&b"signed"[..], true));
                    self.later.insert(*n, taken.lease.clone());
                }
                said(taken, recovered)
            }
            EndRecovery(n, why) => said(l.end_recovery(id(*n), &later(n), *why).await, |ours| ours.to_string()),
            TakeDue => {
                let due = l.take_due(10, LEASE_MS).await;
                for (payment, lease) in due.iter().flatten() {
                    assert!(payment.leased && payment.state == State::InDoubt, "{payment:?}");
                    self.later.insert(number(payment.payment_id), lease.clone());
                }
                said(due, |due| {
                    let names: Vec<_> = due.iter().map(|(payment, _)| row(payment)).collect();
                    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
                })
            }
            LookAgain(n, after) => {
                let due = l.now_ms().await.unwrap() + after;
                said(l.look_again(id(*n), &later(n), due).await, |ours| ours.to_string())
            }
            Expire(n, why) => said(l.expire(id(*n), &later(n), *why).await, |ours| ours.to_string()),
            Resolve(n, transaction, note) => {
                let settled = |transaction| End::Settled {
                    amount: amount("100"),
                    transaction: Some(transaction),
                    evidence: Evidence::Operator,
                };
                let end = transaction.map_or(End::Released, settled);
                said(l.resolve(Resolution { payment_id: id(*n), end, note }).await, resolved)
            }
            Tidy => said(l.tidy().await, |t| {
                format!(
                    "outcomes {} payloads {} answered {} sessions {}",
                    t.outcomes, t.payloads, t.answered, t.sessions
                )
            }),
            InDoubt(n) => said(l.in_doubt(id(*n), &lease(n), Reason::NoAnswer).await, |ours| ours.to_string()),
            Release(n) => said(l.release(id(*n), &lease(n), Reason::Cancelled).await, |ours| ours.to_string()),
            Answered(n) => said(l.answered(id(*n)).await, |()| "ok".to_owned()),
            Lookup(n) => said(l.lookup(&agent("a"), By::Id(id(*n))).await, found),
            LookupAs(name, n) => said(l.lookup(&agent(name), By::Id(id(*n))).await, found),
            LookupKey(n) => said(l.lookup(&agent("a"), By::Key(&key(*n))).await, found),
            LookupTwin(call) => said(l.lookup(&agent("a"), By::Twin(&[*call; 32])).await, found),
            Suspend(subject, all) => said(l.suspend(subject, asked(*all).as_ref()).await, |_since| "ok".to_owned()),
            Resume(subject, all) => said(l.resume(subject, asked(*all).as_ref()).await, |was| was.to_string()),
            Advance(ms) => {
                self.bench.advance(*ms);
                "ok".to_owned()
            }
        }
    }
}

fn said<T>(result: Result<T, LedgerError>, word: impl FnOnce(T) -> String) -> String {
    match result {
        Ok(value) => word(value),
        Err(LedgerError::Unavailable(what)) => format!("unavailable {what}"),
        Err(LedgerError::Busy) => "busy".to_owned(),
        Err(LedgerError::Inconsistent(_)) => "inconsistent".to_owned(),
    }
}

/// The whole of a payment of 100, by its receipt.
fn whole(n: u8) -> SettleRequest<'static> {
    SettleRequest {
        payment_id: id(n),
        amount: amount("100"),
        transaction: None,
        evidence: Evidence::Receipt,
        outcome: None,
        unfinished: false,
    }
}

fn ended(ended: SettleOutcome) -> String {
    match ended {
        SettleOutcome::Settled => "Settled".to_owned(),
        SettleOutcome::SettledAs { amount, transaction } => {
            format!("SettledAs {amount} {}", transaction.as_deref().unwrap_or("-"))
        }
        SettleOutcome::Released => "Released".to_owned(),
        SettleOutcome::TransactionTaken { by } => format!("TransactionTaken {}", &by.to_hex()[..2]),
    }
}

fn recovered(recovery: Recovery) -> String {
    match recovery {
        Recovery::Taken(taken) => format!("taken {}", row(&taken.payment)),
        Recovery::Leased => "leased".to_owned(),
        Recovery::Suspended => "suspended".to_owned(),
        Recovery::Nothing => "nothing".to_owned(),
    }
}

fn resolved(resolved: Resolved) -> String {
    match resolved {
        Resolved::Done => "done".to_owned(),
        Resolved::NotOpen(state) => format!("not open {}", state.as_str()),
        Resolved::Leased => "leased".to_owned(),
        Resolved::TransactionTaken { by } => format!("TransactionTaken {}", &by.to_hex()[..2]),
    }
}

/// The `n` of [`id`].
fn number(id: PaymentId) -> u8 {
    u8::from_str_radix(&id.to_hex()[..2], 16).unwrap()
}

fn row(payment: &Payment) -> String {
    let n = number(payment.payment_id);
    let reason = payment.reason.as_deref().map(|reason| format!(" {reason}")).unwrap_or_default();
    format!("{n} {}{reason}", payment.state.as_str())
}

fn found(payment: Option<Payment>) -> String {
    payment.as_ref().map_or_else(|| "none".to_owned(), row)
}

fn word(decision: Decision) -> String {
    match decision {
        Decision::Fresh(_) => "fresh".to_owned(),
        Decision::Existing(payment) => format!("existing {}", row(&payment)),
        Decision::Conflict(payment) => format!("conflict {}", row(&payment)),
        Decision::KeySpent(payment) => format!("spent {}", &payment.to_hex()[..2]),
        Decision::DuplicateInDoubt(payment) => format!("duplicate {}", &payment.to_hex()[..2]),
        Decision::Exceeded { ceiling, limit, remaining, resets_at_ms } => {
            let resets = if resets_at_ms.is_some() { " until midnight" } else { "" };
            format!("{ceiling:?} limit {limit} remaining {remaining}{resets}")
        }
        Decision::Suspended => "suspended".to_owned(),
    }
}

/// `balances`: held and spent of agent `a` in today's window. `state`: of payment 1 (`-`: there is none).
struct Line {
    name: &'static str,
    before: Vec<Do>,
    event: Do,
    outcome: &'static str,
    balances: (&'static str, &'static str),
    state: &'static str,
}

#[rustfmt::skip]
fn lines() -> Vec<Line> {
    let line = |name, before, event, outcome, balances, state| Line { name, before, event, outcome, balances, state };
    let reserve = |n| Reserve(Call { n, ..CALL });
    let keyed = |n, key| Reserve(Call { n, key: Some(key), ..CALL });
    let other = |n, call| Reserve(Call { n, call, ..CALL });
    let cost = |n, amount| Reserve(Call { n, call: n, amount, ..CALL });
    let limits = |change: fn(&mut Limit)| { let mut l = limit(); change(&mut l); Limits(vec![l]) };
    let me = || Subject::Agent(agent("a"));
    let more = |extra: fn(&mut Limit)| { let mut l = limit(); extra(&mut l); Limits(vec![limit(), l]) };
    vec![
        // Reserve and the ends.
        line("a reservation holds", vec![], reserve(1), "fresh", ("100", "0"), "reserved"),
        line("a settlement turns the hold into spending", vec![reserve(1)], settled(1, "100"), "Settled", ("0", "100"), "settled"),
        line("less settled than reserved frees the rest", vec![reserve(1)], settled(1, "40"), "Settled", ("0", "40"), "settled"),
        line("nothing settled (upto of zero) frees all", vec![reserve(1)], settled(1, "0"), "Settled", ("0", "0"), "settled"),
        line("more than reserved is refused", vec![reserve(1)], settled(1, "101"), "inconsistent", ("100", "0"), "reserved"),
        line("settled twice is settled once", vec![reserve(1), settled(1, "100")], settled(1, "100"), "Settled", ("0", "100"), "settled"),
        line("the first settled amount stays", vec![reserve(1), settled(1, "40")], settled(1, "100"), "SettledAs 40 -", ("0", "40"), "settled"),
        line("a doubt keeps the hold", vec![reserve(1)], InDoubt(1), "true", ("100", "0"), "in_doubt no_answer"),
        line("a doubt repeated is the same doubt", vec![reserve(1), InDoubt(1)], InDoubt(1), "true", ("100", "0"), "in_doubt no_answer"),
        line("a doubt may settle", vec![reserve(1), InDoubt(1)], settled(1, "100"), "Settled", ("0", "100"), "settled"),
        line("a doubt is not released by its owner", vec![reserve(1), InDoubt(1)], Release(1), "false", ("100", "0"), "in_doubt no_answer"),
        line("a release frees the hold", vec![reserve(1)], Release(1), "true", ("0", "0"), "released cancelled"),
        line("released twice frees once", vec![reserve(1), other(2, 2), Release(1)], Release(1), "true", ("100", "0"), "released cancelled"),
        line("settled is final: no doubt", vec![reserve(1), settled(1, "100")], InDoubt(1), "false", ("0", "100"), "settled"),
        line("settled is final: no release", vec![reserve(1), settled(1, "100")], Release(1), "false", ("0", "100"), "settled"),
        line("released is final: a late success changes nothing", vec![reserve(1), Release(1)], settled(1, "100"), "Released", ("0", "0"), "released cancelled"),
        line("an unknown payment is no payment", vec![], settled(9, "1"), "inconsistent", ("0", "0"), "-"),
        line("a stranger's lease releases nothing", vec![reserve(1), other(2, 2)], Do::Release(9), "inconsistent", ("200", "0"), "reserved"),
        // Transactions.
        line("a transaction is booked once", vec![reserve(1), other(2, 2), Settle { n: 2, amount: "100", transaction: Some("t") }],
            Settle { n: 1, amount: "100", transaction: Some("t") }, "TransactionTaken 02", ("100", "100"), "reserved"),
        line("the same transaction again is the same settlement", vec![reserve(1), Settle { n: 1, amount: "100", transaction: Some("t") }],
            Settle { n: 1, amount: "100", transaction: Some("t") }, "Settled", ("0", "100"), "settled"),
        line("a settled row without transaction takes no other's", vec![reserve(1), other(2, 2), settled(1, "100"), Settle { n: 2, amount: "100", transaction: Some("t") }],
            Settle { n: 1, amount: "100", transaction: Some("t") }, "SettledAs 100 -", ("0", "200"), "settled"),
        line("a receipt with another transaction than the booked one changes nothing", vec![reserve(1), Settle { n: 1, amount: "100", transaction: Some("x") }],
            Settle { n: 1, amount: "100", transaction: Some("y") }, "SettledAs 100 x", ("0", "100"), "settled"),
        line("a receipt names the transaction that the chain did not", vec![reserve(1), ByChain(1), Settle { n: 1, amount: "100", transaction: Some("x") }],
            Settle { n: 1, amount: "100", transaction: Some("y") }, "SettledAs 100 x", ("0", "100"), "settled"),
        line("a claim without a transaction takes the booked one", vec![reserve(1), Settle { n: 1, amount: "100", transaction: Some("x") }],
            settled(1, "100"), "Settled", ("0", "100"), "settled"),
        line("an empty transaction is none", vec![reserve(1)], Settle { n: 1, amount: "100", transaction: Some("") }, "inconsistent", ("100", "0"), "reserved"),
        // Keys and twins.
        line("the same key is the same payment", vec![keyed(1, 1)], keyed(2, 1), "existing 1 reserved", ("100", "0"), "reserved"),
        line("the same key, settled", vec![keyed(1, 1), settled(1, "100")], keyed(2, 1), "existing 1 settled", ("0", "100"), "settled"),
        line("the same key, released: a new key is needed", vec![keyed(1, 1), Release(1)], keyed(2, 1), "existing 1 released cancelled", ("0", "0"), "released cancelled"),
        line("the same key with another call", vec![keyed(1, 1)], Reserve(Call { n: 2, key: Some(1), call: 2, ..CALL }), "conflict 1 reserved", ("100", "0"), "reserved"),
        line("another agent's key is another key", vec![keyed(1, 1), more(|l| l.subject = Subject::EachAgent)],
            Reserve(Call { n: 2, key: Some(1), agent: "b", ..CALL }), "fresh", ("100", "0"), "reserved"),
        line("two keys are two payments", vec![keyed(1, 1)], keyed(2, 2), "fresh", ("200", "0"), "reserved"),
        line("a replay is answered at an exhausted budget", vec![Reserve(Call { key: Some(1), amount: "1000", ..CALL })], keyed(2, 1), "existing 1 reserved", ("1000", "0"), "reserved"),
        line("a replay is answered under a stop", vec![keyed(1, 1), Suspend(me(), true)], keyed(2, 1), "existing 1 reserved", ("100", "0"), "reserved"),
        line("the keyless twin is this payment", vec![reserve(1)], reserve(2), "existing 1 reserved", ("100", "0"), "reserved"),
        line("the twin in doubt", vec![reserve(1), InDoubt(1)], reserve(2), "existing 1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("the twin settled and not answered", vec![reserve(1), settled(1, "100")], reserve(2), "existing 1 settled", ("0", "100"), "settled"),
        line("the twin answered: paid again", vec![reserve(1), settled(1, "100"), Answered(1)], reserve(2), "fresh", ("100", "100"), "settled"),
        line("the twin released: paid again", vec![reserve(1), Release(1)], reserve(2), "fresh", ("100", "0"), "released cancelled"),
        line("an open row cannot be answered", vec![reserve(1), Answered(1)], reserve(2), "existing 1 reserved", ("100", "0"), "reserved"),
        line("a keyless call meets an open keyed one", vec![keyed(1, 1)], reserve(2), "duplicate 01", ("100", "0"), "reserved"),
        line("a keyless call after a settled keyed one", vec![keyed(1, 1), settled(1, "100")], reserve(2), "fresh", ("100", "100"), "settled"),
        line("a keyed call beside an open keyless one is meant", vec![reserve(1)], keyed(2, 1), "fresh", ("200", "0"), "reserved"),
        line("a nonce is spent for good", vec![reserve(1), Release(1)], Reserve(Call { n: 1, call: 2, ..CALL }), "inconsistent", ("0", "0"), "released cancelled"),
        // Lookups.
        line("found by identifier", vec![reserve(1)], Lookup(1), "1 reserved", ("100", "0"), "reserved"),
        line("another agent's payment is not found", vec![reserve(1)], LookupAs("b", 1), "none", ("100", "0"), "reserved"),
        line("found by key", vec![keyed(1, 1)], LookupKey(1), "1 reserved", ("100", "0"), "reserved"),
        line("a keyed payment is nobody's twin", vec![keyed(1, 1)], LookupTwin(1), "none", ("100", "0"), "reserved"),
        line("found as twin until answered", vec![reserve(1), settled(1, "100")], LookupTwin(1), "1 settled", ("0", "100"), "settled"),
        line("answered is no twin", vec![reserve(1), settled(1, "100"), Answered(1)], LookupTwin(1), "none", ("0", "100"), "settled"),
        // Leases (LED-04: an unknown end frees nothing).
        line("an expired lease is a doubt for whoever looks", vec![reserve(1), Advance(LEASE_MS)], Lookup(1), "1 in_doubt lease_expired", ("100", "0"), "in_doubt lease_expired"),
        line("a lease alive is no doubt", vec![reserve(1), Advance(LEASE_MS - 1)], Lookup(1), "1 reserved", ("100", "0"), "reserved"),
        line("an expired lease is a doubt for a twin", vec![reserve(1), Advance(LEASE_MS)], reserve(2), "existing 1 in_doubt lease_expired", ("100", "0"), "in_doubt lease_expired"),
        line("an expired lease is a doubt for the key", vec![keyed(1, 1), Advance(LEASE_MS)], keyed(2, 1), "existing 1 in_doubt lease_expired", ("100", "0"), "in_doubt lease_expired"),
        line("an expired lease is a doubt for a duplicate", vec![keyed(1, 1), Advance(LEASE_MS)], reserve(2), "duplicate 01", ("100", "0"), "in_doubt lease_expired"),
        line("a late owner releases nothing", vec![reserve(1), Advance(LEASE_MS)], Release(1), "false", ("100", "0"), "in_doubt lease_expired"),
        line("a late owner's doubt is found made", vec![reserve(1), Advance(LEASE_MS), Lookup(1)], InDoubt(1), "false", ("100", "0"), "in_doubt lease_expired"),
        line("a late owner may settle", vec![reserve(1), Advance(LEASE_MS), Lookup(1)], settled(1, "100"), "Settled", ("0", "100"), "settled"),
        // Recovery.
        line("a payload without its answer may be sent again", vec![reserve(1), Store(1), InDoubt(1)], Recover(1), "taken 1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("not while the owner works", vec![reserve(1), Store(1), Advance(LEASE_MS - 1)], Recover(1), "leased", ("100", "0"), "reserved"),
        line("a dead owner's payment is in doubt first", vec![reserve(1), Store(1), Advance(LEASE_MS)], Recover(1), "taken 1 in_doubt lease_expired", ("100", "0"), "in_doubt lease_expired"),
        line("a dead owner's payment without a payload is in doubt", vec![reserve(1), Advance(LEASE_MS)], Recover(1), "nothing", ("100", "0"), "in_doubt lease_expired"),
        line("one recovery at a time", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], Recover(1), "leased", ("100", "0"), "in_doubt no_answer"),
        line("no recovery beside a sweep", vec![reserve(1), Store(1), InDoubt(1), TakeDue], Recover(1), "leased", ("100", "0"), "in_doubt no_answer"),
        line("a recovery that died gives way", vec![reserve(1), Store(1), InDoubt(1), Recover(1), Advance(LEASE_MS)], Recover(1), "taken 1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("a stopped agent's payment is not sent again", vec![reserve(1), Store(1), InDoubt(1), Suspend(me(), true)], Recover(1), "suspended", ("100", "0"), "in_doubt no_answer"),
        line("nor one in a stopped unit", vec![reserve(1), Store(1), InDoubt(1), Suspend(me(), false)], Recover(1), "suspended", ("100", "0"), "in_doubt no_answer"),
        line("nor any when each agent is stopped", vec![reserve(1), Store(1), InDoubt(1), Suspend(Subject::EachAgent, true)], Recover(1), "suspended", ("100", "0"), "in_doubt no_answer"),
        line("nor any when all are stopped together", vec![reserve(1), Store(1), InDoubt(1), Suspend(Subject::Total, false)], Recover(1), "suspended", ("100", "0"), "in_doubt no_answer"),
        line("nor one whose configuration stops it", vec![reserve(1), Store(1), InDoubt(1), limits(|l| l.suspended = true)], Recover(1), "suspended", ("100", "0"), "in_doubt no_answer"),
        line("another agent's stop does not bind", vec![reserve(1), Store(1), InDoubt(1), Suspend(Subject::Agent(agent("b")), true)], Recover(1), "taken 1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("a stopped dead owner's payment is in doubt all the same", vec![reserve(1), Store(1), Suspend(me(), true), Advance(LEASE_MS)], Recover(1), "suspended", ("100", "0"), "in_doubt lease_expired"),
        line("nothing is sent again for a released payment", vec![reserve(1), Store(1), Release(1)], Recover(1), "nothing", ("0", "0"), "released cancelled"),
        line("nothing is sent again once the last word is stored", vec![reserve(1), Store(1), settled(1, "100")], Recover(1), "nothing", ("0", "100"), "settled"),
        line("settled without its output: the bytes go again", vec![reserve(1), Store(1), ByChain(1)], Recover(1), "taken 1 settled", ("0", "100"), "settled"),
        line("the seller asked: the bytes go again with the answer", vec![reserve(1), Store(1), Asks(1)], Recover(1), "taken 1 settled", ("0", "100"), "settled"),
        line("a settled payment too is recovered once at a time", vec![reserve(1), Store(1), ByChain(1), Recover(1)], Recover(1), "leased", ("0", "100"), "settled"),
        line("a day after the settlement the bytes are gone", vec![reserve(1), Store(1), ByChain(1), Advance(24 * 3_600_000)], Recover(1), "nothing", ("0", "0"), "settled"),
        line("an unknown payment is not recovered", vec![], Recover(9), "inconsistent", ("0", "0"), "-"),
        line("the recovery's end frees the row for the next", vec![reserve(1), Store(1), InDoubt(1), Recover(1), EndRecovery(1, None)], Recover(1), "taken 1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("the recovery's end says why it is in doubt", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], EndRecovery(1, Some(Reason::ChallengedAgain)), "true", ("100", "0"), "in_doubt challenged_again"),
        line("the end, written twice", vec![reserve(1), Store(1), InDoubt(1), Recover(1), EndRecovery(1, Some(Reason::NoReceipt))], EndRecovery(1, Some(Reason::NoReceipt)), "true", ("100", "0"), "in_doubt no_receipt"),

        line("a settled payment has no reason", vec![reserve(1), Store(1), ByChain(1), Recover(1)], EndRecovery(1, Some(Reason::NoAnswer)), "true", ("0", "100"), "settled"),
        line("the receipt ends the recovery", vec![reserve(1), Store(1), Asks(1), Recover(1), Asks(1)], Recover(1), "taken 1 settled", ("0", "100"), "settled"),
        line("what the chain says ends no recovery of a settled payment", vec![reserve(1), Store(1), Asks(1), Recover(1), ByChain(1)], Recover(1), "leased", ("0", "100"), "settled"),
        line("the recovery's receipt settles", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], settled(1, "100"), "Settled", ("0", "100"), "settled"),
        line("new rounds are stored before they are sent", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], StoreAgain(1), "true", ("100", "0"), "in_doubt no_answer"),
        line("also of a settled payment", vec![reserve(1), Store(1), Asks(1), Recover(1)], StoreAgain(1), "true", ("0", "100"), "settled"),
        line("not when the lease has run out", vec![reserve(1), Store(1), Asks(1), Recover(1), Advance(LEASE_MS)], StoreAgain(1), "false", ("0", "100"), "settled"),
        line("not when the recovery has ended", vec![reserve(1), Store(1), Asks(1), Recover(1), EndRecovery(1, None)], StoreAgain(1), "false", ("0", "100"), "settled"),
        line("not when the last word is stored", vec![reserve(1), Store(1), Asks(1), Recover(1), Settle { n: 1, amount: "100", transaction: Some("t") }], StoreAgain(1), "false", ("0", "100"), "settled"),
        line("the owner stores nothing beside a recovery", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], Store(1), "false", ("100", "0"), "in_doubt no_answer"),
        line("the owner stores nothing once settled", vec![reserve(1), Store(1), Asks(1)], Store(1), "false", ("0", "100"), "settled"),
        line("the owner's doubt is not repeated beside a recovery", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], InDoubt(1), "false", ("100", "0"), "in_doubt no_answer"),
        // Sweep.
        line("a doubt is due at once", vec![reserve(1), InDoubt(1)], TakeDue, "1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("an owner at work is not due", vec![reserve(1), Advance(LEASE_MS - 1)], TakeDue, "none", ("100", "0"), "reserved"),
        line("a dead owner's payment is due", vec![reserve(1), Advance(LEASE_MS)], TakeDue, "1 in_doubt lease_expired", ("100", "0"), "in_doubt lease_expired"),
        line("the oldest due is first", vec![other(2, 2), InDoubt(2), Advance(1), reserve(1), InDoubt(1)], TakeDue, "2 in_doubt no_answer, 1 in_doubt no_answer", ("200", "0"), "in_doubt no_answer"),
        line("a leased payment is nobody else's", vec![reserve(1), InDoubt(1), TakeDue], TakeDue, "none", ("100", "0"), "in_doubt no_answer"),
        line("nor one that is recovered", vec![reserve(1), Store(1), InDoubt(1), Recover(1)], TakeDue, "none", ("100", "0"), "in_doubt no_answer"),
        line("a sweep that died gives way", vec![reserve(1), InDoubt(1), TakeDue, Advance(LEASE_MS)], TakeDue, "1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("a stop does not stop the sweep", vec![reserve(1), InDoubt(1), Suspend(me(), true)], TakeDue, "1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("closed payments are not due", vec![reserve(1), Store(1), other(2, 2), ByChain(1), Release(2), Advance(LEASE_MS)], TakeDue, "none", ("0", "100"), "settled"),
        line("a recovery's end makes it due at once", vec![reserve(1), Store(1), InDoubt(1), TakeDue, LookAgain(1, 500_000), Recover(1), EndRecovery(1, None)], TakeDue, "1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("not before it is due again", vec![reserve(1), InDoubt(1), TakeDue, LookAgain(1, 500), Advance(499)], TakeDue, "none", ("100", "0"), "in_doubt no_answer"),
        line("due again", vec![reserve(1), InDoubt(1), TakeDue, LookAgain(1, 500), Advance(500)], TakeDue, "1 in_doubt no_answer", ("100", "0"), "in_doubt no_answer"),
        line("a lease that another sweep has looks at nothing", vec![reserve(1), InDoubt(1), TakeDue, settled(1, "100")], LookAgain(1, 1), "false", ("0", "100"), "settled"),
        line("the chain's no frees the hold", vec![reserve(1), Store(1), InDoubt(1), TakeDue], Expire(1, Reason::ExpiredUnspent), "true", ("0", "0"), "released expired_unspent"),
        line("a cancelled nonce frees the hold", vec![reserve(1), InDoubt(1), TakeDue], Expire(1, Reason::NonceCancelled), "true", ("0", "0"), "released nonce_cancelled"),
        line("freed twice is freed once", vec![reserve(1), other(2, 2), InDoubt(1), TakeDue, Expire(1, Reason::ExpiredUnspent)], Expire(1, Reason::ExpiredUnspent), "true", ("100", "0"), "released expired_unspent"),
        line("only the chain's words free", vec![reserve(1), InDoubt(1), TakeDue], Expire(1, Reason::Cancelled), "inconsistent", ("100", "0"), "in_doubt no_answer"),
        line("without a lease nothing is freed", vec![reserve(1), InDoubt(1)], Expire(1, Reason::ExpiredUnspent), "false", ("100", "0"), "in_doubt no_answer"),
        line("with a lease that has run out nothing is freed", vec![reserve(1), InDoubt(1), TakeDue, Advance(LEASE_MS)], Expire(1, Reason::ExpiredUnspent), "false", ("100", "0"), "in_doubt no_answer"),
        line("a look that has ended frees nothing", vec![reserve(1), InDoubt(1), TakeDue, LookAgain(1, 1)], Expire(1, Reason::ExpiredUnspent), "false", ("100", "0"), "in_doubt no_answer"),
        line("settled meanwhile: nothing is freed", vec![reserve(1), InDoubt(1), TakeDue, settled(1, "100")], Expire(1, Reason::ExpiredUnspent), "false", ("0", "100"), "settled"),
        line("the owner's receipt after the chain's no", vec![reserve(1), InDoubt(1), TakeDue, Expire(1, Reason::ExpiredUnspent)], settled(1, "100"), "Released", ("0", "0"), "released expired_unspent"),
        line("a hold is freed in its own day", vec![reserve(1), Advance(12 * 3_600_000), TakeDue, cost(2, "1000")], Expire(1, Reason::ExpiredUnspent), "true", ("1000", "0"), "released expired_unspent"),
        line("what the chain freed may be paid anew", vec![reserve(1), InDoubt(1), TakeDue, Expire(1, Reason::ExpiredUnspent)], reserve(2), "fresh", ("100", "0"), "released expired_unspent"),
        line("the chain's yes settles under any lease", vec![reserve(1), Store(1), InDoubt(1), TakeDue], ByChain(1), "Settled", ("0", "100"), "settled"),
        // The operator's word.
        line("an operator releases", vec![reserve(1), InDoubt(1)], Resolve(1, None, "asked the seller"), "done", ("0", "0"), "released operator_evidence"),
        line("an operator settles", vec![reserve(1), InDoubt(1)], Resolve(1, Some("t"), "seen in the explorer"), "done", ("0", "100"), "settled"),
        line("not while the owner works", vec![reserve(1)], Resolve(1, None, "impatient"), "leased", ("100", "0"), "reserved"),
        line("not while a sweep works", vec![reserve(1), InDoubt(1), TakeDue], Resolve(1, None, "impatient"), "leased", ("100", "0"), "in_doubt no_answer"),
        line("a dead owner's payment may be resolved", vec![reserve(1), Advance(LEASE_MS)], Resolve(1, Some("t"), "seen"), "done", ("0", "100"), "settled"),
        line("a settled payment is settled", vec![reserve(1), settled(1, "100")], Resolve(1, None, "no"), "not open settled", ("0", "100"), "settled"),
        line("a released payment is released", vec![reserve(1), Release(1)], Resolve(1, Some("t"), "no"), "not open released", ("0", "0"), "released cancelled"),
        line("a transaction is booked once by hand too", vec![reserve(1), other(2, 2), Settle { n: 2, amount: "100", transaction: Some("t") }, InDoubt(1)],
            Resolve(1, Some("t"), "seen"), "TransactionTaken 02", ("100", "100"), "in_doubt no_answer"),
        line("the operator's word is written down", vec![reserve(1), InDoubt(1)], Resolve(1, None, ""), "inconsistent", ("100", "0"), "in_doubt no_answer"),
        line("in one line", vec![reserve(1), InDoubt(1)], Resolve(1, None, "a\u{1b}[2Jb"), "inconsistent", ("100", "0"), "in_doubt no_answer"),
        line("more than reserved is refused by hand too", vec![cost(1, "99"), InDoubt(1)], Resolve(1, Some("t"), "seen"), "inconsistent", ("99", "0"), "in_doubt no_answer"),
        line("the owner's receipt after the operator's no", vec![reserve(1), InDoubt(1), Resolve(1, None, "no")], settled(1, "100"), "Released", ("0", "0"), "released operator_evidence"),
        // Tidy.
        line("nothing is tidied before its time", vec![reserve(1), Store(1), Asks(1), Advance(24 * 3_600_000 - 1)], Tidy, "outcomes 0 payloads 0 answered 0 sessions 0", ("0", "0"), "settled"),
        line("payloads go after a day", vec![reserve(1), Store(1), ByChain(1), Advance(24 * 3_600_000)], Tidy, "outcomes 0 payloads 1 answered 1 sessions 0", ("0", "0"), "settled"),
        line("outcomes go after a week", vec![reserve(1), settled(1, "100"), Advance(7 * 24 * 3_600_000)], Tidy, "outcomes 1 payloads 0 answered 1 sessions 0", ("0", "0"), "settled"),
        line("a payload in doubt is kept", vec![reserve(1), Store(1), InDoubt(1), Advance(30 * 24 * 3_600_000), Tidy], Recover(1), "taken 1 in_doubt no_answer", ("0", "0"), "in_doubt no_answer"),
        line("a settled payment of which nothing is left frees its twin", vec![reserve(1), settled(1, "100"), Advance(7 * 24 * 3_600_000), Tidy], reserve(2), "fresh", ("100", "0"), "settled"),
        line("not on the day on which it settled", vec![reserve(1), ByChain(1), Tidy], reserve(2), "existing 1 settled", ("0", "100"), "settled"),
        line("a keyed payment needs no answer", vec![keyed(1, 1), settled(1, "100"), Advance(7 * 24 * 3_600_000)], Tidy, "outcomes 1 payloads 0 answered 0 sessions 0", ("0", "0"), "settled"),
        // Limits.
        line("no limit at all refuses", vec![Limits(vec![])], reserve(1), "NotConfigured limit 0 remaining 0", ("0", "0"), "-"),
        line("an empty limit is none", vec![limits(|l| l.per_day = None)], reserve(1), "NotConfigured limit 0 remaining 0", ("0", "0"), "-"),
        line("unlimited is said on purpose", vec![limits(|l| { l.per_day = None; l.unlimited = true })], reserve(1), "fresh", ("100", "0"), "reserved"),
        line("unlimited does not lift a figure", vec![more(|l| { l.subject = Subject::EachAgent; l.per_day = None; l.unlimited = true })], cost(1, "1001"), "Day limit 1000 remaining 1000 until midnight", ("0", "0"), "-"),
        line("another agent's limit is none of mine", vec![limits(|l| l.subject = Subject::Agent(agent("b")))], reserve(1), "NotConfigured limit 0 remaining 0", ("0", "0"), "-"),
        line("another asset's limit is none of this", vec![], Reserve(Call { asset: "CEURC", ..CALL }), "NotConfigured limit 0 remaining 0", ("0", "0"), "-"),
        line("zero denies", vec![limits(|l| l.per_day = Some(Amount::ZERO))], reserve(1), "Day limit 0 remaining 0 until midnight", ("0", "0"), "-"),
        line("the day's limit is reached exactly", vec![cost(2, "900")], reserve(1), "fresh", ("1000", "0"), "reserved"),
        line("one above the day's limit", vec![cost(2, "901")], reserve(1), "Day limit 1000 remaining 99 until midnight", ("901", "0"), "-"),
        line("spending counts like holding", vec![cost(2, "901"), settled(2, "901")], reserve(1), "Day limit 1000 remaining 99 until midnight", ("0", "901"), "-"),
        line("what was freed may be used", vec![cost(2, "901"), settled(2, "1")], cost(1, "999"), "fresh", ("999", "1"), "reserved"),
        line("a limit lowered below the use leaves nothing", vec![cost(2, "900"), limits(|l| l.per_day = Some(Amount::from_u64(500)))], reserve(1), "Day limit 500 remaining 0 until midnight", ("900", "0"), "-"),
        line("the call's own maximum", vec![], Reserve(Call { max: "99", ..CALL }), "MaxAtomicAmount limit 99 remaining 99", ("0", "0"), "-"),
        line("the limit per call", vec![limits(|l| l.per_call = Some(Amount::from_u64(99)))], reserve(1), "PerCall limit 99 remaining 99", ("0", "0"), "-"),
        line("the smart account's ceiling", vec![], Reserve(Call { account: Some("99"), ..CALL }), "SmartAccount limit 99 remaining 99", ("0", "0"), "-"),
        line("the smallest ceiling is named", vec![limits(|l| l.per_call = Some(Amount::from_u64(50)))], Reserve(Call { max: "99", account: Some("60"), ..CALL }), "PerCall limit 50 remaining 50", ("0", "0"), "-"),
        line("each agent's default binds too", vec![more(|l| { l.subject = Subject::EachAgent; l.per_day = Some(Amount::from_u64(99)) })], reserve(1), "Day limit 99 remaining 99 until midnight", ("0", "0"), "-"),
        line("a default may not raise an agent's own", vec![more(|l| { l.subject = Subject::EachAgent; l.per_day = Some(Amount::from_u64(5_000)) })], cost(1, "1001"), "Day limit 1000 remaining 1000 until midnight", ("0", "0"), "-"),
        line("the limit of all agents binds each", vec![Limits(vec![Limit { subject: Subject::EachAgent, ..limit() }, Limit { subject: Subject::Total, per_day: Some(Amount::from_u64(150)), ..limit() }]),
            Reserve(Call { n: 2, agent: "b", ..CALL })], reserve(1), "Total limit 150 remaining 50 until midnight", ("0", "0"), "-"),
        line("a credential lowers the call's limit", vec![limits(|l| l.per_call = Some(Amount::from_u64(500)))],
            Reserve(Call { bounds: [Some("99"), None, None], ..CALL }), "PerCall limit 99 remaining 99", ("0", "0"), "-"),
        line("a credential raises no call's limit", vec![limits(|l| l.per_call = Some(Amount::from_u64(50)))],
            Reserve(Call { bounds: [Some("5000"), None, None], ..CALL }), "PerCall limit 50 remaining 50", ("0", "0"), "-"),
        line("a credential lowers the session's limit", vec![Reserve(Call { n: 2, call: 2, session: Some("s"), ..CALL })],
            Reserve(Call { session: Some("s"), bounds: [None, Some("150"), None], ..CALL }), "Session limit 150 remaining 50", ("100", "0"), "-"),
        line("a credential lowers the day's limit", vec![Reserve(Call { n: 2, call: 2, ..CALL })],
            Reserve(Call { bounds: [None, None, Some("150")], ..CALL }), "Day limit 150 remaining 50 until midnight", ("100", "0"), "-"),
        line("a credential raises no day's limit", vec![],
            Reserve(Call { amount: "1001", bounds: [None, None, Some("5000")], ..CALL }), "Day limit 1000 remaining 1000 until midnight", ("0", "0"), "-"),
        line("a credential that lowers nothing", vec![], Reserve(Call { bounds: [Some("100"), Some("1"), Some("100")], ..CALL }), "fresh", ("100", "0"), "reserved"),
        line("a credential is no limit", vec![], Reserve(Call { asset: "CEURC", bounds: [Some("100"), None, Some("100")], ..CALL }), "NotConfigured limit 0 remaining 0", ("0", "0"), "-"),
        line("a session limit binds a session", vec![limits(|l| l.per_session = Some(Amount::from_u64(150))), Reserve(Call { n: 2, call: 2, session: Some("s"), ..CALL })],
            Reserve(Call { session: Some("s"), ..CALL }), "Session limit 150 remaining 50", ("100", "0"), "-"),
        line("another session has its own", vec![limits(|l| l.per_session = Some(Amount::from_u64(150))), Reserve(Call { n: 2, call: 2, session: Some("s"), ..CALL })],
            Reserve(Call { session: Some("t"), ..CALL }), "fresh", ("200", "0"), "reserved"),
        line("without a session its limit does not bind", vec![limits(|l| l.per_session = Some(Amount::from_u64(50)))], reserve(1), "fresh", ("100", "0"), "reserved"),
        line("without a session its limit is no limit", vec![limits(|l| { l.per_session = Some(Amount::from_u64(150)); l.per_day = None })], reserve(1), "NotConfigured limit 0 remaining 0", ("0", "0"), "-"),
        // Stops.
        line("a stopped agent", vec![Suspend(me(), true)], reserve(1), "suspended", ("0", "0"), "-"),
        line("a stop in this unit", vec![Suspend(me(), false)], reserve(1), "suspended", ("0", "0"), "-"),
        line("a stop of every agent", vec![Suspend(Subject::EachAgent, true)], reserve(1), "suspended", ("0", "0"), "-"),
        line("a stop of all together", vec![Suspend(Subject::Total, true)], reserve(1), "suspended", ("0", "0"), "-"),
        line("a stop outlives the configuration's rows", vec![Suspend(me(), true), Limits(vec![limit()])], reserve(1), "suspended", ("0", "0"), "-"),
        line("a configured stop", vec![limits(|l| l.suspended = true)], reserve(1), "suspended", ("0", "0"), "-"),
        line("a stop of another agent", vec![Suspend(Subject::Agent(agent("b")), true)], reserve(1), "fresh", ("100", "0"), "reserved"),
        line("a stop taken back", vec![Suspend(me(), true), Resume(me(), true)], reserve(1), "fresh", ("100", "0"), "reserved"),
        line("no stop to take back", vec![], Resume(me(), true), "false", ("0", "0"), "-"),
        line("a stop leaves open payments to their end", vec![reserve(1), Suspend(me(), true)], settled(1, "100"), "Settled", ("0", "100"), "settled"),
        // LED-08: the edge of the day.
        line("a new day has a new budget", vec![cost(2, "1000"), Advance(12 * 3_600_000)], reserve(1), "fresh", ("100", "0"), "reserved"),
        line("a hold settles in its own day", vec![reserve(1), Advance(12 * 3_600_000)], settled(1, "100"), "Settled", ("0", "0"), "settled"),
        line("the last second of the day is still today", vec![cost(2, "1000"), Advance(12 * 3_600_000 - 1_000)], reserve(1), "Day limit 1000 remaining 0 until midnight", ("1000", "0"), "-"),
        // Big figures.
        line("above 2^53 and i64", vec![limits(|l| l.per_day = Some(Amount::MAX)), Reserve(Call { n: 2, call: 2, max: MAX, amount: "100000000000000000001", ..CALL }), settled(2, "100000000000000000001")],
            Reserve(Call { max: "18446744073709551616", amount: "18446744073709551616", ..CALL }), "fresh", ("18446744073709551616", "100000000000000000001"), "reserved"),
        line("up to 2^256-1", vec![limits(|l| l.per_day = Some(Amount::MAX))], Reserve(Call { amount: MAX, max: MAX, ..CALL }), "fresh", (MAX, "0"), "reserved"),
        line("nothing beyond 2^256-1, unlimited or not", vec![limits(|l| { l.per_day = None; l.unlimited = true }), Reserve(Call { n: 2, call: 2, amount: MAX, max: MAX, ..CALL })],
            cost(1, "1"), "Day limit 115792089237316195423570985008687907853269984665640564039457584007913129639935 remaining 0 until midnight", (MAX, "0"), "-"),
        line("a payment of nothing is none", vec![], cost(1, "0"), "inconsistent", ("0", "0"), "-"),
    ]
}

const MAX: &str = "115792089237316195423570985008687907853269984665640564039457584007913129639935";

/// Every line on a ledger of its own; afterwards the counters equal the rows.
pub(crate) async fn transitions(open: impl AsyncFn() -> Box<dyn Bench>) {
    let mut failed = Vec::new();
    for line in lines() {
        let bench = open().await;
        let ledger = bench.ledger();
        let mut story =
            Story { bench: &*bench, ledger: ledger.clone(), leases: BTreeMap::new(), later: BTreeMap::new() };
        story.run(&Limits(vec![limit()])).await;
        for event in &line.before {
            let said = story.run(event).await;
            if said.starts_with("unavailable") || said == "busy" || said == "inconsistent" {
                failed.push(format!("{}: before: {said}", line.name));
            }
        }
        let outcome = story.run(&line.event).await;
        let state = ledger.show(&id(1).to_hex()).await.unwrap();
        let state = state.map_or_else(|| "-".to_owned(), |(payment, _)| row(&payment)[2..].to_owned());
        let lines = ledger.budget(&agent("a"), None).await.unwrap();
        let today = lines.iter().find(|line| line.unit == unit());
        let balances =
            today.map_or(("0".to_owned(), "0".to_owned()), |b| (b.day_held.to_string(), b.day_spent.to_string()));
        let balances = (balances.0.as_str(), balances.1.as_str());
        if outcome != line.outcome || balances != line.balances || state != line.state {
            failed.push(format!("{}: {outcome:?} {balances:?} {state:?}", line.name));
        }
        let audit = ledger.audit().await.unwrap();
        let late = line.outcome == "Released";
        if audit.differences.iter().any(|found| found.what != "late_success") || audit.differences.is_empty() == late {
            failed.push(format!("{}: {:?}", line.name, audit.differences));
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

/// LED-01: 100 calls of 0.30 on a cap of 10 from two processes at once: exactly 33 pass, and never one more.
pub(crate) async fn fan_out(bench: Box<dyn Bench>) {
    let (one, two) = (bench.ledger(), bench.another().await);
    one.replace_limits("file", &[Limit { per_day: Some(amount("100000000")), ..limit() }]).await.unwrap();
    let calls = (0..100u8).map(|n| {
        let ledger = if n % 2 == 0 { one.clone() } else { two.clone() };
        async move { ledger.decide(&Call { n, call: n, amount: "3000000", max: "3000000", ..CALL }.intent()).await }
    });
    let decided = join_all(calls).await;
    let fresh = decided.iter().filter(|decision| matches!(decision, Ok(Decision::Fresh(_)))).count();
    let refused = decided
        .iter()
        .filter(|d| matches!(d, Ok(Decision::Exceeded { ceiling: Ceiling::Day, remaining, .. }) if *remaining == amount("1000000")))
        .count();
    assert_eq!((fresh, refused), (33, 67));
    assert_eq!(two.audit().await.unwrap().differences, []);
    let line = &one.budget(&agent("a"), None).await.unwrap()[0];
    assert_eq!((line.day_held, line.day_spent), (amount("99000000"), Amount::ZERO));
}

/// LED-03: whoever ends a payment ends it once, however many try at once, from two processes.
pub(crate) async fn one_end(bench: Box<dyn Bench>) {
    let (one, two) = (bench.ledger(), bench.another().await);
    one.replace_limits("file", &[limit()]).await.unwrap();
    let Decision::Fresh(lease) = one.decide(&CALL.intent()).await.unwrap() else { panic!("not reserved") };
    let settle = |ledger: Arc<dyn Ledger>| async move {
        let request = SettleRequest {
            payment_id: id(1),
            amount: amount("60"),
            transaction: Some("t"),
            evidence: Evidence::Chain,
            outcome: None,
            unfinished: false,
        };
        ledger.settle(request).await.unwrap();
    };
    let doubt = |ledger: Arc<dyn Ledger>| {
        let lease = lease.clone();
        async move { ledger.in_doubt(id(1), &lease, Reason::NoAnswer).await.unwrap() }
    };
    let settles = (0..8).map(|i| settle(if i % 2 == 0 { one.clone() } else { two.clone() }));
    futures_util::join!(join_all(settles), doubt(two.clone()), doubt(one.clone()));
    let (payment, events) = two.show(&id(1).to_hex()).await.unwrap().unwrap();
    assert_eq!((payment.state, payment.settled), (State::Settled, Some(amount("60"))));
    assert_eq!(events.iter().filter(|event| event.event == "settled").count(), 1);
    let line = &one.budget(&agent("a"), None).await.unwrap()[0];
    assert_eq!((line.day_held, line.day_spent), (Amount::ZERO, amount("60")));
    assert_eq!(one.audit().await.unwrap().differences, []);
}

/// The bodies: sealed payload until the last word is stored, an unfinished answer replaced by the finished one.
pub(crate) async fn bodies(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    let Decision::Fresh(lease) = ledger.decide(&CALL.intent()).await.unwrap() else { panic!("not reserved") };
    let stranger = Lease { token: [0; 16], ..lease.clone() };
    assert!(!ledger.store_payload(id(1), &stranger, b"signed").await.unwrap(), "not the owner");
    assert!(ledger.store_payload(id(1), &lease, b"signed").await.unwrap());
    let look = async || ledger.lookup(&agent("a"), By::Id(id(1))).await.unwrap().unwrap();
    let request = |outcome, unfinished| SettleRequest {
        payment_id: id(1),
        amount: amount("100"),
        transaction: Some("t"),
        evidence: Evidence::Receipt,
        outcome,
        unfinished,
    };

    ledger.settle(request(None, false)).await.unwrap();
    assert_eq!(ledger.outcome(id(1)).await.unwrap(), None);
    assert!(look().await.has_payload && !look().await.has_outcome);
    ledger.settle(request(Some(b"what is your name?"), true)).await.unwrap();
    assert!(look().await.outcome_unfinished && look().await.has_payload);
    assert_eq!(ledger.payload(id(1)).await.unwrap().as_deref(), Some(&b"signed"[..]));
    ledger.settle(request(Some(b"the output"), false)).await.unwrap();
    ledger.settle(request(Some(b"another output"), false)).await.unwrap();
    assert_eq!(ledger.outcome(id(1)).await.unwrap().as_deref(), Some(&b"the output"[..]), "the first last word stays");
    assert!(!look().await.has_payload && look().await.has_outcome && !look().await.outcome_unfinished);
    assert_eq!(ledger.payload(id(1)).await.unwrap(), None);

    bench.advance(8 * 24 * 3_600_000);
    assert_eq!(ledger.outcome(id(1)).await.unwrap(), None, "expired");
    assert!(!look().await.has_outcome);
    let again = ledger.decide(&Call { n: 2, ..CALL }.intent()).await.unwrap();
    assert_eq!(word(again), "existing 1 settled", "the payment stays when its body goes");
}

/// What an agent sees of its budget, and of nobody else's.
pub(crate) async fn budgets(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    let rows = [
        Limit { per_session: Some(amount("500")), ..limit() },
        Limit { subject: Subject::EachAgent, per_call: Some(amount("300")), per_day: Some(amount("2000")), ..limit() },
    ];
    ledger.replace_limits("file", &rows).await.unwrap();
    let reserve = async |call: Call| assert!(matches!(ledger.decide(&call.intent()).await, Ok(Decision::Fresh(_))));
    reserve(Call { n: 1, call: 1, ..CALL }).await;
    bench.advance(12 * 3_600_000);
    reserve(Call { n: 2, call: 2, session: Some("s"), ..CALL }).await;
    reserve(Call { n: 3, agent: "b", amount: "7", ..CALL }).await;
    let lines = ledger.budget(&agent("a"), Some("s")).await.unwrap();
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(line.unit, unit());
    assert_eq!(
        (line.per_call, line.per_session, line.per_day),
        (Some(amount("300")), Some(amount("500")), Some(amount("1000")))
    );
    assert_eq!((line.day_held, line.day_spent, line.session_held), (amount("100"), Amount::ZERO, amount("100")));
    assert_eq!(line.earlier_holds, [(id(1), "2026-12-02".to_owned(), amount("100"))]);
    assert_eq!(line.resets_at_ms, NOON + 36 * 3_600_000);
    assert_eq!(line.total_used, Amount::ZERO, "no limit of all agents: what others use is not shown");
    assert!(ledger.budget(&agent("c"), None).await.unwrap()[0].day_held.is_zero());
}

/// Limits of several sources, the operator's view, and sessions that were ended.
pub(crate) async fn operator(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    let mine = Limit { per_day: Some(amount("150")), ..limit() };
    ledger.set_limit(&mine).await.unwrap();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    assert_eq!(ledger.limits().await.unwrap().len(), 2, "rows of another source stay");
    let first = ledger.decide(&CALL.intent()).await.unwrap();
    assert_eq!(word(first), "fresh");
    let second = ledger.decide(&Call { n: 2, call: 2, ..CALL }.intent()).await.unwrap();
    assert_eq!(word(second), "Day limit 150 remaining 50 until midnight");
    assert!(
        ledger.set_limit(&Limit { subject: Subject::Total, per_call: Some(amount("1")), ..limit() }).await.is_err()
    );

    let me = Subject::Agent(agent("a"));
    ledger.suspend(&me, Some(&unit())).await.unwrap();
    ledger.set_limit(&Limit { per_day: Some(amount("160")), ..limit() }).await.unwrap();
    assert!(
        ledger.limits().await.unwrap().iter().any(|l| l.source == "operator" && l.suspended),
        "a new figure lifts no stop"
    );
    let of = unit();
    let signable = async |unit| ledger.signable(&me, unit).await.unwrap();
    let expected = Signable { count: 1, for_ms: SIGN_MS + ON_THE_WAY_MS, open: 1 };
    assert_eq!(signable(Some(&of)).await, expected, "reserved just now");
    bench.advance(SIGN_MS + ON_THE_WAY_MS);
    assert_eq!(signable(None).await, Signable { for_ms: 0, ..expected }, "its signature may be on its way");
    bench.advance(1);
    assert_eq!(signable(None).await, Signable { count: 0, for_ms: 0, open: 1 }, "too old to be signed");
    ledger.suspend(&me, None).await.unwrap();
    assert_eq!(ledger.stopped().await.unwrap(), std::slice::from_ref(&me));
    assert!(ledger.resume(&me, None).await.unwrap() && ledger.resume(&me, Some(&unit())).await.unwrap());
    assert!(ledger.stopped().await.unwrap().is_empty());

    let filter = |state, name| Filter { state, agent: Some(agent(name)), limit: 10 };
    assert_eq!(ledger.list(&filter(Some(State::Reserved), "a")).await.unwrap().len(), 1);
    assert!(ledger.list(&filter(Some(State::Settled), "a")).await.unwrap().is_empty());
    assert!(ledger.list(&filter(None, "b")).await.unwrap().is_empty());
    let (shown, events) = ledger.show("01010101").await.unwrap().unwrap();
    assert_eq!((shown.payment_id, events.len()), (id(1), 1));
    assert!(ledger.show("0101").await.unwrap().is_none() && ledger.show("%").await.unwrap().is_none());

    assert!(!ledger.session_ended("s").await.unwrap());
    ledger.end_session("s", NOON + 3_600_000).await.unwrap();
    ledger.end_session("s", NOON + 3_600_000).await.unwrap();
    assert!(ledger.session_ended("s").await.unwrap() && !ledger.session_ended("t").await.unwrap());
    ledger.ping().await.unwrap();
}

/// Lists of limits with and without a version; rules for origins; pins.
pub(crate) async fn policy(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    let tighter = [Limit { per_day: Some(amount("5")), ..limit() }];
    let apply = async |version, limits: &[Limit]| {
        ledger.apply_limits(LimitList { source: "file", version, limits }).await.unwrap()
    };
    let now = async || ledger.limits().await.unwrap().pop().and_then(|limit| limit.per_day);
    assert_eq!(apply(0, &[limit()]).await, Applied::Written { replaced: false });
    assert_eq!(apply(0, &[limit()]).await, Applied::Same);
    assert_eq!(apply(0, &tighter).await, Applied::Written { replaced: true }, "the last one written");
    assert_eq!(apply(3, &tighter).await, Applied::Written { replaced: false });
    assert_eq!(apply(2, &[limit()]).await, Applied::Newer { version: 3 });
    assert_eq!(apply(3, &[limit()]).await, Applied::Contradicts);
    assert!(ledger.replace_limits("file", &[limit()]).await.is_err());
    assert_eq!(now().await, Some(amount("5")), "an older file takes nothing back");
    assert_eq!(apply(4, &[]).await, Applied::Written { replaced: true });
    assert_eq!(apply(3, &tighter).await, Applied::Newer { version: 4 });
    assert_eq!(now().await, None);
    ledger.set_limit(&limit()).await.unwrap();
    assert_eq!(apply(5, &tighter).await, Applied::Written { replaced: false }, "another source's rows stay");
    assert_eq!(ledger.limits().await.unwrap().len(), 2);

    let origin = |text: &str| text.parse::<Origin>().unwrap();
    let (a, b) = (origin("https://a.example"), origin("https://*.b.example:8443"));
    assert!(ledger.set_origin_rule(&b, Some(false)).await.unwrap());
    assert!(ledger.set_origin_rule(&a, Some(true)).await.unwrap());
    assert!(!ledger.set_origin_rule(&a, Some(true)).await.unwrap());
    assert!(ledger.set_origin_rule(&a, Some(false)).await.unwrap());
    let rule = |origin: &Origin| OriginRule { origin: origin.clone(), allowed: false, source: "operator".into() };
    assert_eq!(ledger.origin_rules().await.unwrap(), [rule(&b), rule(&a)]);
    assert!(ledger.set_origin_rule(&b, None).await.unwrap() && !ledger.set_origin_rule(&b, None).await.unwrap());
    assert_eq!(ledger.origin_rules().await.unwrap(), [rule(&a)]);

    let other = Unit { asset: "COTHER".parse().unwrap(), ..unit() };
    let pay_to = async |of: &Unit| ledger.pin(&a, of).await.unwrap().map(|pin| pin.pay_to);
    assert!(ledger.set_pin(&a, &unit(), SetPin::First("G1")).await.unwrap());
    assert!(!ledger.set_pin(&a, &unit(), SetPin::First("G2")).await.unwrap());
    assert_eq!((pay_to(&unit()).await.as_deref(), pay_to(&other).await), (Some("G1"), None));
    assert!(ledger.set_pin(&a, &other, SetPin::To("G3")).await.unwrap());
    assert!(ledger.set_pin(&a, &unit(), SetPin::To("G2")).await.unwrap());
    assert!(!ledger.set_pin(&a, &unit(), SetPin::To("G2")).await.unwrap());
    let pins = ledger.pins().await.unwrap();
    let told: Vec<_> = pins.iter().map(|pin| (pin.unit.asset.as_str(), pin.pay_to.as_str(), &pin.origin)).collect();
    assert_eq!(told, [("COTHER", "G3", &a), ("CUSDC", "G2", &a)]);
    let today = NOON - 43_200_000..NOON + 43_200_000;
    assert!(pins.iter().all(|pin| today.contains(&pin.first_seen_ms)));
    assert!(ledger.set_pin(&a, &unit(), SetPin::Removed).await.unwrap());
    assert!(!ledger.set_pin(&a, &unit(), SetPin::Removed).await.unwrap());
    assert_eq!(pay_to(&unit()).await, None);
}

/// A recovery from its lease to the last word, as the row and its history tell it.
pub(crate) async fn recovery(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    let Decision::Fresh(lease) = ledger.decide(&CALL.intent()).await.unwrap() else { panic!("not reserved") };
    assert!(ledger.store_payload(id(1), &lease, b"first round").await.unwrap());
    assert!(ledger.in_doubt(id(1), &lease, Reason::InputRequired).await.unwrap());
    let look = async || ledger.lookup(&agent("a"), By::Id(id(1))).await.unwrap().unwrap();
    assert!(!look().await.leased);
    let take = async || match ledger.take_recovery(id(1), LEASE_MS).await.unwrap() {
        Recovery::Taken(taken) => *taken,
        other => panic!("{other:?}"),
    };

    let first = take().await;
    assert_eq!(first.payload, b"first round");
    assert!(!format!("{first:?}").contains("first round") && !format!("{first:?}").contains("102"));
    assert_eq!((first.lease.expires_ms, first.payment.leased), (NOON + LEASE_MS, true));
    assert_ne!(first.lease.token, lease.token);
    assert!(look().await.leased);
    assert!(ledger.store_payload(id(1), &first.lease, b"second round").await.unwrap());
    ledger.settle(SettleRequest { outcome: Some(b"your name?"), unfinished: true, ..whole(1) }).await.unwrap();
    assert!(!look().await.leased, "the receipt ends the recovery");
    assert_eq!(ledger.payload(id(1)).await.unwrap().as_deref(), Some(&b"second round"[..]));

    let second = take().await;
    assert!(look().await.leased, "a settled payment under a recovery");
    assert_eq!(second.payment.state, State::Settled);
    assert!(!ledger.store_payload(id(1), &first.lease, b"stale").await.unwrap(), "the lease of an ended recovery");
    assert!(!ledger.end_recovery(id(1), &first.lease, None).await.unwrap());
    assert!(look().await.leased, "another's end ends nothing");
    assert!(ledger.store_payload(id(1), &second.lease, b"third round").await.unwrap());
    assert!(ledger.end_recovery(id(1), &second.lease, Some(Reason::NoAnswer)).await.unwrap());
    assert!(!look().await.leased);

    let third = take().await;
    assert_eq!(third.payload, b"third round");
    ledger.settle(SettleRequest { outcome: Some(b"the output"), ..whole(1) }).await.unwrap();
    assert!(matches!(ledger.take_recovery(id(1), LEASE_MS).await.unwrap(), Recovery::Nothing));
    assert_eq!(ledger.outcome(id(1)).await.unwrap().as_deref(), Some(&b"the output"[..]));
    let row = look().await;
    assert!(!row.leased && !row.has_payload && row.reason.is_none());
    let (_, events) = ledger.show(&id(1).to_hex()).await.unwrap().unwrap();
    let events: Vec<_> = events.iter().map(|event| &*event.event).collect();
    assert_eq!(events, ["reserved", "in_doubt", "recovery", "settled", "recovery", "recovery"]);
    assert_eq!(ledger.audit().await.unwrap().differences, []);
}

/// What a sweep and an operator leave in the history, and what is open meanwhile.
pub(crate) async fn evidence(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    assert_eq!(ledger.open_rows().await.unwrap(), OpenRows::default());
    for n in 1..=4 {
        let decided = ledger.decide(&Call { n, call: n, ..CALL }.intent()).await.unwrap();
        assert!(matches!(decided, Decision::Fresh(_)));
        bench.advance(10);
    }
    let reserved = Holds { count: 4, oldest_created_ms: Some(NOON) };
    assert_eq!(ledger.open_rows().await.unwrap(), OpenRows { reserved, ..OpenRows::default() });
    bench.advance(LEASE_MS);
    assert_eq!(ledger.now_ms().await.unwrap(), NOON + 40 + LEASE_MS);

    let due = ledger.take_due(2, 1_000).await.unwrap();
    let open = ledger.open_rows().await.unwrap();
    assert_eq!(open.in_doubt, Holds { count: 2, oldest_created_ms: Some(NOON) });
    assert_eq!(open.reserved, Holds { count: 2, oldest_created_ms: Some(NOON + 20) });
    assert_eq!((open.count(), open.oldest_created_ms()), (4, Some(NOON)));
    let names: Vec<_> = due.iter().map(|(payment, lease)| (payment.payment_id, lease.expires_ms)).collect();
    let ends = NOON + 40 + LEASE_MS + 1_000;
    assert_eq!(names, [(id(1), ends), (id(2), ends)], "at most so many, the oldest first");
    assert!(ledger.expire(id(1), &due[0].1, Reason::ExpiredUnspent).await.unwrap());
    assert!(!ledger.expire(id(2), &due[0].1, Reason::ExpiredUnspent).await.unwrap(), "another payment's lease");
    let chain = SettleRequest { evidence: Evidence::Chain, transaction: Some("t"), ..whole(2) };
    assert_eq!(ended(ledger.settle(chain).await.unwrap()), "Settled");
    let long = "é".repeat(MAX_NOTE);
    let end = End::Settled { amount: amount("70"), transaction: Some("u"), evidence: Evidence::Operator };
    let resolve = async |n, end, note: &str| ledger.resolve(Resolution { payment_id: id(n), end, note }).await;
    assert!(resolve(3, end, &format!("{long}x")).await.is_err(), "too long a note");
    assert!(resolve(3, end, " ").await.is_err() && resolve(3, end, "two\nlines").await.is_err());
    assert_eq!(resolve(3, end, &long).await.unwrap(), Resolved::Done);
    assert_eq!(resolve(4, End::Released, "the seller paid it back").await.unwrap(), Resolved::Done);
    assert!(resolve(9, End::Released, "who?").await.is_err());

    let last = async |n| {
        let (_, events) = ledger.show(&id(n).to_hex()).await.unwrap().unwrap();
        let e = events.last().unwrap().clone();
        (e.event, e.reason.unwrap_or_default(), e.amount.map(|a| a.to_string()), e.transaction, e.evidence, e.note)
    };
    let text = |text: &str| Some(text.to_owned());
    let expired = ("released".to_owned(), "expired_unspent".to_owned(), None, None, text("chain"), None);
    assert_eq!(last(1).await, expired);
    assert_eq!(last(2).await, ("settled".to_owned(), String::new(), text("100"), text("t"), text("chain"), None));
    let settled = ("settled".to_owned(), String::new(), text("70"), text("u"), text("operator"), Some(long));
    assert_eq!(last(3).await, settled);
    let note = text("the seller paid it back");
    assert_eq!(
        last(4).await,
        ("released".to_owned(), "operator_evidence".to_owned(), None, None, text("operator"), note)
    );
    assert_eq!(ledger.open_rows().await.unwrap(), OpenRows::default());
    assert_eq!(ledger.audit().await.unwrap().differences, []);
}

/// From two processes at once: one recovery, one sweep per payment, and nothing that begins after a stop.
pub(crate) async fn races(bench: Box<dyn Bench>) {
    let (one, two) = (bench.ledger(), bench.another().await);
    one.replace_limits("file", &[Limit { per_day: Some(amount("100000")), ..limit() }]).await.unwrap();
    let doubt = async |n: u8| {
        let Decision::Fresh(lease) = one.decide(&Call { n, call: n, ..CALL }.intent()).await.unwrap() else {
            panic!("not reserved")
        };
        assert!(one.store_payload(id(n), &lease, b"signed").await.unwrap());
        assert!(one.in_doubt(id(n), &lease, Reason::NoAnswer).await.unwrap());
    };

    for n in 1..=10 {
        doubt(n).await;
        let tries = (0..4).map(|i| if i % 2 == 0 { &one } else { &two }.take_recovery(id(n), LEASE_MS));
        let mut said: Vec<_> = join_all(tries).await.into_iter().map(|taken| recovered(taken.unwrap())).collect();
        said.sort_unstable();
        assert_eq!(said[..3], ["leased", "leased", "leased"]);
        assert!(said[3].starts_with("taken"));
    }

    // Recovery or sweep, never both.
    for n in 11..=20 {
        doubt(n).await;
        let (taken, due) = futures_util::join!(one.take_recovery(id(n), LEASE_MS), two.take_due(10, LEASE_MS));
        let (taken, due) = (recovered(taken.unwrap()), due.unwrap().len());
        assert!(taken.starts_with("taken") && due == 0 || taken == "leased" && due == 1, "{taken} {due}");
    }

    for n in 21..=80 {
        doubt(n).await;
    }
    let sweeps = (0..12).map(|i| if i % 2 == 0 { &one } else { &two }.take_due(7, LEASE_MS));
    let taken: Vec<_> = join_all(sweeps).await.into_iter().flat_map(|due| due.unwrap()).collect();
    let ids: std::collections::BTreeSet<_> = taken.iter().map(|(payment, _)| payment.payment_id).collect();
    let tokens: std::collections::BTreeSet<_> = taken.iter().map(|(_, lease)| lease.token).collect();
    assert_eq!((taken.len(), ids.len(), tokens.len()), (60, 60, 60), "each once, each with a lease of its own");

    // The sweep's no and the owner's late receipt: whichever is first stays, and nothing is counted twice.
    let ends = taken.iter().enumerate().map(|(i, (payment, lease))| {
        let (one, two) = if i % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let request = SettleRequest { payment_id: payment.payment_id, ..whole(0) };
        async move {
            let (no, yes) =
                futures_util::join!(one.expire(payment.payment_id, lease, Reason::ExpiredUnspent), two.settle(request));
            match (no.unwrap(), yes.unwrap()) {
                (true, SettleOutcome::Released) | (false, SettleOutcome::Settled) => (),
                both => panic!("{both:?}"),
            }
        }
    });
    join_all(ends).await;
    let audit = one.audit().await.unwrap();
    assert_eq!(audit.differences.iter().find(|found| found.what != "late_success"), None);

    // From the return of `suspend` on no recovery begins.
    for n in 81..=90 {
        doubt(n).await;
    }
    let me = Subject::Agent(agent("a"));
    let stop = async {
        two.suspend(&me, None).await.unwrap();
        let after = join_all((81..=90).map(|n| one.take_recovery(id(n), LEASE_MS))).await;
        after.into_iter().map(|taken| recovered(taken.unwrap())).collect::<Vec<_>>()
    };
    let (after, _before) = futures_util::join!(stop, join_all((81..=90).map(|n| two.take_recovery(id(n), LEASE_MS))));
    assert!(after.iter().all(|said| said == "suspended" || said == "leased"), "{after:?}");
}

/// Sessions' tombstones go with their time; what is not due stays.
pub(crate) async fn tidies(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    ledger.end_session("short", NOON + 1_000).await.unwrap();
    ledger.end_session("long", NOON + 2_000).await.unwrap();
    bench.advance(1_000);
    let tidied = ledger.tidy().await.unwrap();
    assert_eq!(tidied, Tidied { sessions: 1, ..Tidied::default() });
    assert!(!ledger.session_ended("short").await.unwrap() && ledger.session_ended("long").await.unwrap());

    let Decision::Fresh(lease) = ledger.decide(&CALL.intent()).await.unwrap() else { panic!("not reserved") };
    assert!(ledger.store_payload(id(1), &lease, b"signed").await.unwrap());
    ledger.settle(SettleRequest { outcome: Some(b"your name?"), unfinished: true, ..whole(1) }).await.unwrap();
    bench.advance(24 * 3_600_000);
    assert_eq!(ledger.tidy().await.unwrap(), Tidied { payloads: 1, sessions: 1, ..Tidied::default() });
    assert!(ledger.outcome(id(1)).await.unwrap().is_some(), "an answer that can be handed out is no end");
    bench.advance(6 * 24 * 3_600_000);
    assert_eq!(ledger.tidy().await.unwrap(), Tidied { outcomes: 1, answered: 1, ..Tidied::default() });
    assert_eq!(ledger.tidy().await.unwrap(), Tidied::default());
    let (payment, events) = ledger.show(&id(1).to_hex()).await.unwrap().unwrap();
    assert!(payment.answered && events.iter().filter(|event| event.event == "answered").count() == 1);
    assert_eq!(ledger.audit().await.unwrap().differences, []);
}

/// The bench has put key 1 of agent `a` into `spent_keys` as archived payment 9.
pub(crate) async fn spent_key(bench: Box<dyn Bench>) {
    let ledger = bench.ledger();
    ledger.replace_limits("file", &[Limit { subject: Subject::EachAgent, ..limit() }]).await.unwrap();
    let call = |n, agent, key| Call { n, agent, call: n, key, ..CALL }.intent();
    for n in [1, 2] {
        assert_eq!(word(ledger.decide(&call(n, "a", Some(1))).await.unwrap()), "spent 09", "with whatever call");
    }
    assert_eq!(word(ledger.decide(&call(3, "a", Some(2))).await.unwrap()), "fresh");
    assert_eq!(word(ledger.decide(&call(4, "a", None)).await.unwrap()), "fresh");
    assert_eq!(word(ledger.decide(&call(5, "b", Some(1))).await.unwrap()), "fresh", "another agent's key");
    assert!(ledger.lookup(&agent("a"), By::Key(&key(1))).await.unwrap().is_none(), "its row is in the archive");
}

/// Random stories against a small model: what is open and what was settled, per payment.
pub(crate) async fn stories(open: impl AsyncFn() -> Box<dyn Bench>) {
    // SplitMix64: what a seed means does not change with a crate.
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    let figures = ["1", "3", "40", "99", "100", "260"];
    for seed in 0..12u64 {
        let bench = open().await;
        let ledger = bench.ledger();
        ledger
            .replace_limits(
                "file",
                &[
                    Limit {
                        subject: Subject::EachAgent,
                        per_session: Some(amount("350")),
                        per_day: Some(amount("500")),
                        ..limit()
                    },
                    Limit { subject: Subject::Total, per_day: Some(amount("800")), ..limit() },
                ],
            )
            .await
            .unwrap();
        let mut story =
            Story { bench: &*bench, ledger: ledger.clone(), leases: BTreeMap::new(), later: BTreeMap::new() };
        let mut random = seed;
        let mut model: BTreeMap<u8, (&str, u64, Option<u64>)> = BTreeMap::new();
        for step in 0..60u8 {
            let r = next(&mut random);
            let n = (r >> 8) as u8 % step.max(1);
            let name = if r & 1 == 0 { "a" } else { "b" };
            let figure = figures[(r >> 16) as usize % figures.len()];
            let event = match (r >> 32) % 16 {
                0..=4 => {
                    let session = [None, Some("s"), Some("t")][(r >> 24) as usize % 3];
                    let key = (r >> 40 & 3 == 0).then_some(step % 7);
                    let call = (r >> 48) as u8 % 12;
                    Reserve(Call { n: step, agent: name, session, key, call, amount: figure, max: figure, ..CALL })
                }
                5 => InDoubt(n),
                6 => Release(n),
                7 => Settle { n, amount: figure, transaction: (r >> 50 & 1 == 0).then_some("t") },
                8 => Answered(n),
                9 => TakeDue,
                10 => Expire(n, Reason::ExpiredUnspent),
                11 => Resolve(n, None, "by the random operator"),
                12 => LookAgain(n, (r >> 44) % 20_000),
                13 => Store(n),
                14 => Recover(n),
                _ => Advance((r >> 44) % 20_000),
            };
            let said = story.run(&event).await;
            match (&event, said.as_str()) {
                (Reserve(call), "fresh") => {
                    model.insert(call.n, (call.agent, call.amount.parse().unwrap(), None));
                }
                (Release(n) | Expire(n, _), "true") | (Resolve(n, ..), "done") => {
                    model.remove(n);
                }
                (Settle { n, amount, .. }, "Settled") => {
                    let entry = model.get_mut(n).expect("only a reserved payment settles");
                    entry.2.get_or_insert(amount.parse().unwrap());
                }
                _ => assert!(!said.starts_with("unavailable") && said != "busy", "seed {seed} step {step}: {said}"),
            }
            let mut total = 0;
            for name in ["a", "b"] {
                let of = |f: fn(&(&str, u64, Option<u64>)) -> u64| {
                    model.values().filter(|p| p.0 == name).map(f).sum::<u64>()
                };
                let held = of(|p| if p.2.is_none() { p.1 } else { 0 });
                let spent = of(|p| p.2.unwrap_or(0));
                let line = &ledger.budget(&agent(name), Some("s")).await.unwrap()[0];
                assert_eq!(
                    (line.day_held, line.day_spent),
                    (Amount::from_u64(held), Amount::from_u64(spent)),
                    "seed {seed} step {step}"
                );
                assert!(held + spent <= 500, "seed {seed} step {step}");
                assert!(line.session_held.checked_add(line.session_spent).unwrap() <= amount("350"));
                total += held + spent;
            }
            assert!(total <= 800, "seed {seed} step {step}");
        }
        assert_eq!(ledger.audit().await.unwrap().differences.iter().find(|found| found.what != "late_success"), None);
    }
}
