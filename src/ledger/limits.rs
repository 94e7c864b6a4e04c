//! What may be spent: pure decisions over the limit rows and the windows that the transaction has read. Both stores use
//! them, so that they cannot disagree.

use std::cmp::Ordering;

use super::{Applied, Ceiling, Decision, Intent, LedgerError, Limit, LimitList, Subject};
use crate::money::{AgentId, Amount, Bounds, Unit};

/// The limits of one agent and unit: of all rows that apply, the smallest figure of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Effective {
    pub per_call: Option<Amount>,
    pub per_session: Option<Amount>,
    pub per_day: Option<Amount>,
    pub total_per_day: Option<Amount>,
    pub unlimited: bool,
    pub suspended: bool,
}

impl Effective {
    pub fn of<'a>(limits: impl IntoIterator<Item = &'a Limit>, agent: &AgentId, unit: &Unit) -> Effective {
        let mut effective = Effective::default();
        for limit in limits.into_iter().filter(|limit| limit.unit == *unit) {
            match &limit.subject {
                Subject::Agent(name) if name != agent => continue,
                Subject::Agent(_) | Subject::EachAgent => {
                    smaller(&mut effective.per_call, limit.per_call);
                    smaller(&mut effective.per_session, limit.per_session);
                    smaller(&mut effective.per_day, limit.per_day);
                }
                Subject::Total => smaller(&mut effective.total_per_day, limit.per_day),
            }
            effective.unlimited |= limit.unlimited;
            effective.suspended |= limit.suspended;
        }
        effective
    }

    /// Whether anything bounds a call, or was said to be unbounded on purpose. A session limit bounds only a call that
    /// has a session.
    fn configured(&self, in_session: bool) -> bool {
        self.unlimited
            || self.per_call.is_some()
            || self.per_day.is_some()
            || self.total_per_day.is_some()
            || in_session && self.per_session.is_some()
    }
}

fn smaller(slot: &mut Option<Amount>, figure: Option<Amount>) {
    *slot = match (*slot, figure) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
}

/// One row of `budget_windows`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Window {
    pub held: Amount,
    pub spent: Amount,
}

impl Window {
    pub fn used(self) -> Result<Amount, LedgerError> {
        self.held.checked_add(self.spent).ok_or_else(|| broken("a window's use is above 2^256"))
    }

    pub fn reserve(self, amount: Amount) -> Result<Window, LedgerError> {
        let held = self.held.checked_add(amount).ok_or_else(|| broken("a window's holds are above 2^256"))?;
        Ok(Window { held, ..self })
    }

    /// A hold of `reserved` ends with `settled` spent; the difference is free again.
    pub fn close(self, reserved: Amount, settled: Amount) -> Result<Window, LedgerError> {
        let held = self.held.checked_sub(reserved).ok_or_else(|| broken("a window holds less than its open rows"))?;
        let spent = self.spent.checked_add(settled).ok_or_else(|| broken("a window's spending is above 2^256"))?;
        Ok(Window { held, spent })
    }
}

/// Names one row of `budget_windows`: an agent's (or all agents') day or session in a unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WindowKey {
    pub agent: String,
    pub unit: Unit,
    /// `day` or `session`.
    pub kind: &'static str,
    pub key: String,
}

impl WindowKey {
    pub fn day(agent: &str, unit: &Unit, day: &str) -> WindowKey {
        WindowKey { agent: agent.to_owned(), unit: unit.clone(), kind: "day", key: day.to_owned() }
    }

    pub fn session(agent: &str, unit: &Unit, session: &str) -> WindowKey {
        WindowKey { agent: agent.to_owned(), unit: unit.clone(), kind: "session", key: session.to_owned() }
    }

    /// The windows of a hold: the agent's day and session, then all agents' day.
    pub fn of(agent: &AgentId, unit: &Unit, day: &str, session: Option<&str>) -> Vec<WindowKey> {
        let mut keys = vec![WindowKey::day(agent.as_str(), unit, day)];
        keys.extend(session.map(|session| WindowKey::session(agent.as_str(), unit, session)));
        keys.push(WindowKey::day(Subject::Total.as_str(), unit, day));
        keys
    }
}

/// What is used already, in the windows that a reservation made now would count in.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Windows {
    pub day: Window,
    /// Of a call in a session.
    pub session: Option<Window>,
    /// All agents together, today.
    pub total: Window,
}

/// A call's own bounds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    pub amount: Amount,
    pub max: Amount,
    pub account_ceiling: Option<Amount>,
    /// What the agent's credential bounds. They lower the ledger's limits and stand for none of them.
    pub bounds: Bounds,
}

impl Ask {
    pub fn of(intent: &Intent) -> Ask {
        let Intent { quote, account_ceiling, .. } = intent;
        Ask { amount: quote.amount(), max: quote.max_amount, account_ceiling: *account_ceiling, bounds: quote.bounds }
    }
}

/// `None`: it may be reserved, and `held + spent <= limit` holds afterwards. Of several ceilings the one that leaves the
/// least is named.
pub(crate) fn refusal(
    ask: &Ask,
    limits: &Effective,
    windows: &Windows,
    midnight_ms: u64,
) -> Result<Option<Decision>, LedgerError> {
    if limits.suspended {
        return Ok(Some(Decision::Suspended));
    }
    if !limits.configured(windows.session.is_some()) {
        let (limit, remaining) = (Amount::ZERO, Amount::ZERO);
        return Ok(Some(Decision::Exceeded { ceiling: Ceiling::NotConfigured, limit, remaining, resets_at_ms: None }));
    }
    let configured = Bounds { per_call: limits.per_call, per_session: limits.per_session, per_day: limits.per_day };
    let agents = configured.and(ask.bounds);
    // A window without a limit is bounded by what a counter can hold.
    let window = |ceiling, limit: Option<Amount>, window: Window| -> Result<_, LedgerError> {
        let limit = limit.unwrap_or(Amount::MAX);
        Ok((ceiling, limit, limit.remaining_after(window.used()?)))
    };
    let mut ceilings = vec![(Ceiling::MaxAtomicAmount, ask.max, ask.max)];
    ceilings.extend(agents.per_call.map(|limit| (Ceiling::PerCall, limit, limit)));
    if let Some(session) = windows.session {
        ceilings.push(window(Ceiling::Session, agents.per_session, session)?);
    }
    ceilings.push(window(Ceiling::Day, agents.per_day, windows.day)?);
    ceilings.push(window(Ceiling::Total, limits.total_per_day, windows.total)?);
    ceilings.extend(ask.account_ceiling.map(|limit| (Ceiling::SmartAccount, limit, limit)));

    let tightest = ceilings.into_iter().min_by_key(|(_, _, remaining)| *remaining);
    Ok(tightest.filter(|(_, _, remaining)| ask.amount > *remaining).map(|(ceiling, limit, remaining)| {
        let resets_at_ms = matches!(ceiling, Ceiling::Day | Ceiling::Total).then_some(midnight_ms);
        Decision::Exceeded { ceiling, limit, remaining, resets_at_ms }
    }))
}

/// What a list becomes whose source has these rows, of this version. `None`: it replaces them.
pub(crate) fn settled_already(list: &LimitList<'_>, version: u64, rows: &[Limit]) -> Option<Applied> {
    match (list.version.cmp(&version), !same_limits(rows, list.limits)) {
        (Ordering::Less, _) => Some(Applied::Newer { version }),
        (Ordering::Equal, false) => Some(Applied::Same),
        (Ordering::Equal, true) if version > 0 => Some(Applied::Contradicts),
        (Ordering::Equal | Ordering::Greater, _) => None,
    }
}

/// Of one source. The order of the rows means nothing.
pub fn same_limits(before: &[Limit], after: &[Limit]) -> bool {
    let figures = |l: &Limit| (l.per_call, l.per_session, l.per_day, l.unlimited, l.suspended);
    let by_name = |limits: &[Limit]| -> std::collections::BTreeMap<_, _> {
        limits.iter().map(|limit| ((limit.subject.clone(), limit.unit.clone()), figures(limit))).collect()
    };
    before.len() == after.len() && by_name(before) == by_name(after)
}

fn broken(what: &str) -> LedgerError {
    LedgerError::Inconsistent(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::table::{amount, limit};
    use super::*;

    #[test]
    fn only_other_limits_are_worth_a_word() {
        let other = Limit { subject: Subject::EachAgent, ..limit() };
        assert!(same_limits(&[limit(), other.clone()], &[other.clone(), limit()]));
        assert!(!same_limits(&[limit()], &[limit(), other.clone()]) && !same_limits(&[limit()], &[other]));
        assert!(!same_limits(&[limit()], &[Limit { per_day: Some(amount("999")), ..limit() }]));
        assert!(!same_limits(&[limit()], &[Limit { suspended: true, ..limit() }]));
    }

    #[test]
    fn the_list_with_the_highest_version_holds_and_one_without_a_version_is_the_last_written() {
        let (rows, other) = ([limit()], [Limit { per_day: Some(amount("999")), ..limit() }]);
        let list = |version, limits| LimitList { source: "file", version, limits };
        for (version, limits, stored, expected) in [
            (0, &rows, 0, Some(Applied::Same)),
            (0, &other, 0, None),
            (0, &other, 3, Some(Applied::Newer { version: 3 })),
            (0, &rows, 3, Some(Applied::Newer { version: 3 })),
            (2, &other, 3, Some(Applied::Newer { version: 3 })),
            (3, &rows, 3, Some(Applied::Same)),
            (3, &other, 3, Some(Applied::Contradicts)),
            (4, &other, 3, None),
            (4, &rows, 3, None),
        ] {
            assert_eq!(settled_already(&list(version, limits), stored, &rows), expected, "{version} on {stored}");
        }
    }
}
