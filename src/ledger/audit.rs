//! Counts everything again from the rows, and trusts no constraint of the store. Both stores feed it, so that they find
//! the same.

use std::collections::BTreeMap;

use super::limits::{Window, WindowKey};
use super::{Audit, Difference, LedgerError, State, Subject};
use crate::money::{AgentId, Amount, Network, PaymentId, Unit};

const DAY_MS: u64 = 24 * 3_600_000;
/// No owner, recovery or sweep works as long on one payment.
const LONGEST_LEASE_MS: u64 = DAY_MS;
/// A sweep looks at every open payment more often than this.
const LONGEST_PAUSE_MS: u64 = 31 * DAY_MS;

/// What an audit reads of one payment.
pub(crate) struct Audited {
    pub id: PaymentId,
    pub agent: AgentId,
    pub session: Option<String>,
    pub day: String,
    pub unit: Unit,
    pub reserved: Amount,
    pub settled: Option<Amount>,
    pub state: State,
    pub transaction: Option<String>,
    pub lease_expires: Option<u64>,
    pub due: Option<u64>,
    pub has_payload: bool,
    pub payload_expires: Option<u64>,
    /// Expired or not.
    pub has_outcome: bool,
    /// The newest event that names a state.
    pub last_event: Option<String>,
    /// How many events say `settled` or `released`.
    pub ends: u64,
    /// Of its event `settled`.
    pub event_amount: Option<Amount>,
    /// It has an event `late_success`.
    pub late_success: bool,
}

pub(crate) struct Auditor {
    now: u64,
    audit: Audit,
    windows: BTreeMap<WindowKey, Window>,
    transactions: BTreeMap<(Network, String), PaymentId>,
    /// All agents' day is counted only where its row is.
    totals_on_demand: bool,
}

impl Auditor {
    /// `now`: the ledger's time, unix milliseconds. All payments come first, then all windows.
    pub fn new(now: u64) -> Auditor {
        let (audit, windows, transactions) = (Audit::default(), BTreeMap::new(), BTreeMap::new());
        Auditor { now, audit, windows, transactions, totals_on_demand: false }
    }

    /// Of a store that makes the row of all agents' day, from the agents' days, when a limit needs it.
    #[cfg(feature = "postgres")]
    pub fn totals_on_demand(self) -> Auditor {
        Auditor { totals_on_demand: true, ..self }
    }

    pub fn payment(&mut self, row: Result<Audited, LedgerError>) {
        self.audit.payments += 1;
        if let Err(error) = row.and_then(|row| self.count(&row)) {
            self.differs("unreadable", format!("a payment: {error}"));
        }
    }

    pub fn window(&mut self, row: Result<(WindowKey, Window), LedgerError>) {
        self.audit.windows += 1;
        match row {
            Ok((key, written)) => {
                let counted = self.windows.remove(&key).unwrap_or_default();
                self.compare(&key, written, counted);
            }
            Err(error) => self.differs("unreadable", format!("a budget window: {error}")),
        }
    }

    pub fn finish(mut self) -> Audit {
        // What the rows need and no window holds.
        for (key, counted) in std::mem::take(&mut self.windows) {
            if self.totals_on_demand && key.agent == Subject::Total.as_str() {
                continue;
            }
            self.compare(&key, Window::default(), counted);
        }
        self.audit
    }

    pub fn differs(&mut self, what: &'static str, detail: String) {
        self.audit.differences.push(Difference { what, detail });
    }

    fn count(&mut self, row: &Audited) -> Result<(), LedgerError> {
        self.history(row);
        self.attended(row);
        self.bodies(row);
        let id = row.id.short();
        let counted = match (row.state, row.settled) {
            (State::Reserved | State::InDoubt, None) => Window { held: row.reserved, spent: Amount::ZERO },
            (State::Settled, Some(settled)) if settled <= row.reserved => Window { held: Amount::ZERO, spent: settled },
            (State::Released, None) => Window::default(),
            (state, _) => {
                self.differs("settled_amount", format!("{id} is {} with a wrong settled amount", state.as_str()));
                return Ok(());
            }
        };
        if let Some(transaction) = &row.transaction {
            let key = (row.unit.network.clone(), transaction.clone());
            if let Some(other) = self.transactions.insert(key, row.id) {
                self.differs("transaction_twice", format!("{id} and {} have one transaction", other.short()));
            }
        }
        for key in WindowKey::of(&row.agent, &row.unit, &row.day, row.session.as_deref()) {
            let sum = self.windows.entry(key).or_default();
            let add = |a: Amount, b: Amount| {
                a.checked_add(b).ok_or_else(|| LedgerError::Inconsistent("a sum above 2^256".to_owned()))
            };
            *sum = Window { held: add(sum.held, counted.held)?, spent: add(sum.spent, counted.spent)? };
        }
        Ok(())
    }

    /// What the events say is what the row says.
    fn history(&mut self, row: &Audited) {
        let (id, state) = (row.id.short(), row.state.as_str());
        if row.last_event.as_deref() != Some(state) {
            let last = row.last_event.as_deref().unwrap_or("none");
            self.differs("history", format!("{id} is {state}, its last event says {last}"));
        }
        if row.ends != u64::from(!row.state.is_open()) {
            self.differs("history", format!("{id} is {state}, and {} events end it", row.ends));
        }
        if row.settled != row.event_amount {
            let figure = |amount: Option<Amount>| amount.map_or_else(|| "nothing".to_owned(), |a| a.to_string());
            let (row, event) = (figure(row.settled), figure(row.event_amount));
            self.differs("history", format!("{id} has settled {row}, its event says {event}"));
        }
        if row.late_success {
            self.differs("late_success", format!("{id} was released, and a settlement was reported afterwards"));
        }
    }

    /// Every open payment has somebody, or a time at which it is looked at.
    fn attended(&mut self, row: &Audited) {
        let (id, state) = (row.id.short(), row.state.as_str());
        if row.state.is_open() != row.due.is_some() {
            let due = if row.due.is_some() { "due" } else { "never due" };
            self.differs("due", format!("{id} is {state} and {due}"));
        }
        if row.due.is_some_and(|due| due > self.now.saturating_add(LONGEST_PAUSE_MS)) {
            self.differs("due", format!("{id} is {state} and due in more than 31 days"));
        }
        if row.state == State::Reserved && row.lease_expires.is_none() {
            self.differs("lease", format!("{id} is reserved by nobody"));
        }
        if row.lease_expires.is_some_and(|end| end > self.now.saturating_add(LONGEST_LEASE_MS)) {
            self.differs("lease", format!("{id} is leased for more than a day"));
        }
    }

    /// What is spendable or private is kept only where and as long as it is needed.
    fn bodies(&mut self, row: &Audited) {
        let (id, state) = (row.id.short(), row.state.as_str());
        if row.has_outcome && row.state != State::Settled {
            self.differs("body", format!("{id} is {state} and has an outcome"));
        }
        let kept = match row.state {
            State::Reserved | State::InDoubt => true,
            State::Settled => row.payload_expires.is_some(),
            State::Released => false,
        };
        if row.has_payload && !kept {
            self.differs("body", format!("{id} is {state} and keeps its signed payload for ever"));
        }
    }

    fn compare(&mut self, key: &WindowKey, written: Window, counted: Window) {
        if written != counted {
            let WindowKey { agent, unit, kind, key } = key;
            // A session's name is the caller's: its head is enough to find it.
            let key: String = key.chars().take(10).collect();
            let detail = format!(
                "{agent} {} {} {kind} {key}: held {} spent {}, the rows say held {} spent {}",
                unit.network, unit.asset, written.held, written.spent, counted.held, counted.spent
            );
            self.differs("window", detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_796_212_800_000;

    fn row(state: State) -> Audited {
        let open = state.is_open();
        let settled = (state == State::Settled).then(|| Amount::from_u64(60));
        Audited {
            id: PaymentId::from_bytes([1; 32]),
            agent: "a".parse().unwrap(),
            session: None,
            day: "2026-12-02".to_owned(),
            unit: Unit { network: "stellar:testnet".parse().unwrap(), asset: "CUSDC".parse().unwrap() },
            reserved: Amount::from_u64(100),
            settled,
            state,
            transaction: None,
            lease_expires: open.then_some(NOW + 1),
            due: open.then_some(NOW + 1),
            has_payload: false,
            payload_expires: None,
            has_outcome: false,
            last_event: Some(state.as_str().to_owned()),
            ends: u64::from(!open),
            event_amount: settled,
            late_success: false,
        }
    }

    /// The words of what was found in one row, its windows being right.
    fn found(row: Audited) -> Vec<&'static str> {
        let mut auditor = Auditor::new(NOW);
        auditor.payment(Ok(row));
        let windows = auditor.windows.clone();
        for window in windows {
            auditor.window(Ok(window));
        }
        auditor.finish().differences.into_iter().map(|found| found.what).collect()
    }

    #[test]
    fn whatever_is_wrong_in_a_row_is_named_and_nothing_else() {
        use State::{InDoubt, Released, Reserved, Settled};
        for state in [Reserved, InDoubt, Settled, Released] {
            assert!(found(row(state)).is_empty(), "{state:?}");
        }
        type Change = fn(&mut Audited);
        let cases: [(State, Change, &str); 15] = [
            (InDoubt, |r| r.due = None, "due"),
            (Settled, |r| r.due = Some(1), "due"),
            (InDoubt, |r| r.due = Some(NOW + 32 * DAY_MS), "due"),
            (Reserved, |r| r.lease_expires = None, "lease"),
            (InDoubt, |r| r.lease_expires = Some(u64::MAX), "lease"),
            (Settled, |r| r.lease_expires = Some(NOW + 2 * DAY_MS), "lease"),
            (Released, |r| r.has_outcome = true, "body"),
            (InDoubt, |r| r.has_outcome = true, "body"),
            (Released, |r| r.has_payload = true, "body"),
            (Settled, |r| r.has_payload = true, "body"),
            (Settled, |r| r.ends = 2, "history"),
            (Settled, |r| r.event_amount = Some(Amount::from_u64(61)), "history"),
            (Released, |r| r.late_success = true, "late_success"),
            (Settled, |r| (r.settled, r.event_amount) = (Some(Amount::MAX), Some(Amount::MAX)), "settled_amount"),
            (Released, |r| (r.settled, r.event_amount) = (Some(Amount::ZERO), Some(Amount::ZERO)), "settled_amount"),
        ];
        for (n, (state, change, what)) in cases.into_iter().enumerate() {
            let mut row = row(state);
            change(&mut row);
            assert_eq!(found(row), [what], "case {n}");
        }
        let kept =
            Audited { has_payload: true, payload_expires: Some(NOW + DAY_MS), has_outcome: true, ..row(Settled) };
        assert!(found(kept).is_empty());
    }
}
