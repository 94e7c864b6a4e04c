//! What becomes of each entry of a batch: pure decisions over what was read under its locks. Duplicates before limits,
//! so that a replay is answered also at an exhausted budget; each entry sees what those before it will write.

use std::collections::{BTreeMap, BTreeSet};

use super::entry::{End, Hold};
use crate::ledger::limits::{Effective, Window, WindowKey, Windows, refusal};
use crate::ledger::{Decision, Lease, Limit, State, Subject, clock};
use crate::money::{AgentId, Amount, Network, PaymentId, Unit};

pub(super) type Counters = BTreeMap<WindowKey, Window>;

/// A payment that a reservation would repeat.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    pub id: PaymentId,
    /// Its call; of a keyless one that of whoever asks.
    pub call_hash: [u8; 32],
    /// It is reserved, and its owner's lease is over.
    pub expired: bool,
}

/// What was read under the locks, at one time.
#[derive(Default)]
pub(super) struct Read<'a> {
    pub now: u64,
    pub windows: Counters,
    pub limits: Limits,
    pub keyed: BTreeMap<(&'a str, &'a str), Known>,
    pub spent: BTreeMap<(&'a str, &'a str), PaymentId>,
    pub twins: BTreeMap<(&'a str, [u8; 32]), Known>,
    pub open: BTreeMap<(&'a str, [u8; 32]), Known>,
    /// What an earlier run of this batch reserved.
    pub mine: BTreeMap<PaymentId, Lease>,
    pub rows: BTreeMap<PaymentId, Row>,
}

/// A payment to settle, locked.
#[derive(Debug)]
pub(super) struct Row {
    pub agent: AgentId,
    pub session: Option<String>,
    pub day: String,
    pub unit: Unit,
    pub reserved: Amount,
    pub state: State,
    /// Another payment has the transaction.
    pub taken: bool,
}

/// The limit rows of a batch, by their subjects.
#[derive(Default)]
pub(super) struct Limits {
    pub rows: BTreeMap<String, Vec<Limit>>,
    /// Stopped in all units.
    pub stopped: BTreeSet<String>,
}

impl Limits {
    fn effective(&self, agent: &AgentId, unit: &Unit) -> Effective {
        let subjects = [agent.as_str(), Subject::EachAgent.as_str(), Subject::Total.as_str()];
        let rows = subjects.iter().filter_map(|subject| self.rows.get(*subject)).flatten();
        let mut effective = Effective::of(rows, agent, unit);
        effective.suspended |= subjects.iter().any(|subject| self.stopped.contains(*subject));
        effective
    }
}

#[derive(Debug)]
pub(super) enum HoldVerdict {
    /// To be written.
    Fresh(Lease),
    /// Written by an earlier run.
    Mine(Lease),
    /// That payment is this call's payment, as it is at the end of the batch.
    Existing(PaymentId),
    Conflict(PaymentId),
    Said(Decision),
    Alone,
}

/// The plan of a batch.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub holds: Vec<HoldVerdict>,
    /// Whether the payment is settled here; the others are for a transaction of their own.
    pub ends: Vec<bool>,
    /// Windows that have to be made first.
    pub missing: BTreeSet<WindowKey>,
    /// Payments whose owners are gone.
    pub expired: BTreeSet<PaymentId>,
}

/// Reservations before settlements, each in the order of arrival. `ends_alone`: none is settled here.
pub(super) fn plan<'a>(read: &mut Read<'a>, holds: &'a [&'a Hold], ends: &[&End], ends_alone: bool) -> Plan {
    let mut plan = Plan::default();
    let day = clock::day(read.now);
    let mut effective: BTreeMap<(&AgentId, &Unit), Effective> = BTreeMap::new();
    for hold in holds {
        let limits = effective
            .entry((&hold.agent, &hold.unit))
            .or_insert_with(|| read.limits.effective(&hold.agent, &hold.unit))
            .clone();
        let verdict = decide(read, hold, &day, &limits, &mut plan);
        plan.holds.push(verdict);
    }
    let (mut seen, mut transactions) = (BTreeSet::new(), BTreeSet::new());
    for end in ends {
        let settled = !ends_alone && seen.insert(end.payment_id) && settle(read, end, &mut transactions).is_some();
        plan.ends.push(settled);
    }
    plan
}

fn decide<'a>(read: &mut Read<'a>, hold: &'a Hold, day: &str, limits: &Effective, plan: &mut Plan) -> HoldVerdict {
    if let Some(lease) = read.mine.get(&hold.payment_id) {
        return HoldVerdict::Mine(lease.clone());
    }
    if let Some(duplicate) = duplicate(read, hold, plan) {
        return duplicate;
    }
    let keys = WindowKey::of(&hold.agent, &hold.unit, day, hold.session.as_deref());
    let mut used = Windows::default();
    for key in &keys {
        let window = read.windows.get(key).copied();
        match key.kind {
            "session" => used.session = Some(window.unwrap_or_default()),
            _ if key.agent == Subject::Total.as_str() => used.total = window.unwrap_or_default(),
            _ => used.day = window.unwrap_or_default(),
        }
    }
    match refusal(&hold.ask, limits, &used, clock::next_midnight(read.now)) {
        Ok(None) => {}
        Ok(Some(refused)) => return HoldVerdict::Said(refused),
        Err(_) => return HoldVerdict::Alone,
    }
    let mut after = Vec::with_capacity(keys.len());
    for key in keys {
        match read.windows.get(&key) {
            Some(window) => match window.reserve(hold.ask.amount) {
                Ok(window) => after.push((key, window)),
                Err(_) => return HoldVerdict::Alone,
            },
            // All agents' day is counted from the moment when something needs it.
            None if key.agent == Subject::Total.as_str() && limits.total_per_day.is_none() => {}
            None => {
                plan.missing.insert(key);
            }
        }
    }
    read.windows.extend(after);
    let known = Known { id: hold.payment_id, call_hash: hold.call_hash, expired: false };
    let call = (hold.agent.as_str(), hold.call_hash);
    match &hold.key {
        Some(key) => {
            read.keyed.insert((hold.agent.as_str(), key.as_str()), known);
            read.open.entry(call).or_insert(known);
        }
        None => {
            read.twins.insert(call, known);
        }
    }
    HoldVerdict::Fresh(Lease {
        token: hold.token,
        expires_ms: read.now.saturating_add(hold.lease_ms),
        sign_before_ms: read.now.saturating_add(hold.sign_within_ms.min(hold.lease_ms)),
    })
}

/// The payment that this call repeats.
fn duplicate(read: &Read<'_>, hold: &Hold, plan: &mut Plan) -> Option<HoldVerdict> {
    let mut found = |known: &Known| {
        if known.expired {
            plan.expired.insert(known.id);
        }
    };
    let Some(key) = &hold.key else {
        let call = (hold.agent.as_str(), hold.call_hash);
        if let Some(twin) = read.twins.get(&call) {
            found(twin);
            return Some(HoldVerdict::Existing(twin.id));
        }
        let open = read.open.get(&call)?;
        found(open);
        return Some(HoldVerdict::Said(Decision::DuplicateInDoubt(open.id)));
    };
    let key = (hold.agent.as_str(), key.as_str());
    if let Some(known) = read.keyed.get(&key) {
        found(known);
        let same = known.call_hash == hold.call_hash;
        return Some(if same { HoldVerdict::Existing(known.id) } else { HoldVerdict::Conflict(known.id) });
    }
    read.spent.get(&key).map(|id| HoldVerdict::Said(Decision::KeySpent(*id)))
}

/// `None`: this is not the plain end of an open payment, so a transaction of its own says what it is.
fn settle(read: &mut Read<'_>, end: &End, transactions: &mut BTreeSet<(Network, String)>) -> Option<()> {
    let row = read.rows.get(&end.payment_id)?;
    let empty = end.transaction.as_deref().is_some_and(str::is_empty);
    if !row.state.is_open() || end.amount > row.reserved || row.taken || empty {
        return None;
    }
    if let Some(transaction) = &end.transaction
        && !transactions.insert((row.unit.network.clone(), transaction.clone()))
    {
        return None;
    }
    let mut after = Vec::new();
    for key in WindowKey::of(&row.agent, &row.unit, &row.day, row.session.as_deref()) {
        match read.windows.get(&key) {
            Some(window) => after.push((key, window.close(row.reserved, end.amount).ok()?)),
            None if key.agent == Subject::Total.as_str() => {}
            None => return None,
        }
    }
    read.windows.extend(after);
    Some(())
}
