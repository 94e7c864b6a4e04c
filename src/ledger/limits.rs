//! What may be spent: pure decisions over the limit rows and the windows that the transaction has read. Both stores use
//! them, so that they cannot disagree.

use super::{Ceiling, Decision, LedgerError, Limit, Subject};
use crate::money::{AgentId, Amount, Unit};

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
    // A window without a limit is bounded by what a counter can hold.
    let window = |ceiling, limit: Option<Amount>, window: Window| -> Result<_, LedgerError> {
        let limit = limit.unwrap_or(Amount::MAX);
        Ok((ceiling, limit, limit.remaining_after(window.used()?)))
    };
    let mut ceilings = vec![(Ceiling::MaxAtomicAmount, ask.max, ask.max)];
    ceilings.extend(limits.per_call.map(|limit| (Ceiling::PerCall, limit, limit)));
    if let Some(session) = windows.session {
        ceilings.push(window(Ceiling::Session, limits.per_session, session)?);
    }
    ceilings.push(window(Ceiling::Day, limits.per_day, windows.day)?);
    ceilings.push(window(Ceiling::Total, limits.total_per_day, windows.total)?);
    ceilings.extend(ask.account_ceiling.map(|limit| (Ceiling::SmartAccount, limit, limit)));

    let tightest = ceilings.into_iter().min_by_key(|(_, _, remaining)| *remaining);
    Ok(tightest.filter(|(_, _, remaining)| ask.amount > *remaining).map(|(ceiling, limit, remaining)| {
        let resets_at_ms = matches!(ceiling, Ceiling::Day | Ceiling::Total).then_some(midnight_ms);
        Decision::Exceeded { ceiling, limit, remaining, resets_at_ms }
    }))
}

fn broken(what: &str) -> LedgerError {
    LedgerError::Inconsistent(what.to_owned())
}
