//! The ledger of an agent server under test: the real one, with one statement that fails, never ends, or ends the
//! process, before or after it was done.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use tollway::ledger::{
    Applied, Audit, BudgetLine, By, Decision, Event, Filter, Intent, Lease, Ledger, LedgerError, LedgerResult, Limit,
    LimitList, On, OpenRows, Payment, Reason, Recovery, Resolution, Resolved, SetPin, SettleOutcome, SettleRequest,
    Signable, Subject, Tidied,
};
use tollway::money::{AgentId, PaymentId, Unit};
use tollway::policy::{Origin, OriginRule, Pin};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    Before,
    /// The statement is done; its answer is lost.
    After,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    Error,
    Hang,
    Kill,
}

/// Strikes the first call of `method`, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub method: String,
    pub when: When,
    pub effect: Effect,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Observed {
    pub fired: usize,
    /// How often each method was called.
    pub calls: BTreeMap<String, u32>,
}

pub struct Struck {
    pub real: Arc<dyn Ledger>,
    faults: Mutex<Vec<Fault>>,
    observed: Mutex<Observed>,
}

impl Struck {
    pub fn new(real: Arc<dyn Ledger>) -> Struck {
        Struck { real, faults: Mutex::default(), observed: Mutex::default() }
    }

    pub fn arm(&self, faults: Vec<Fault>) {
        *self.faults.lock().unwrap() = faults;
        *self.observed.lock().unwrap() = Observed::default();
    }

    pub fn observed(&self) -> Observed {
        self.observed.lock().unwrap().clone()
    }

    fn take(&self, method: &str) -> Option<Fault> {
        *self.observed.lock().unwrap().calls.entry(method.to_owned()).or_default() += 1;
        let mut faults = self.faults.lock().unwrap();
        let at = faults.iter().position(|fault| fault.method == method)?;
        Some(faults.remove(at))
    }

    async fn strike(&self, fault: Option<&Fault>, when: When) -> Result<(), LedgerError> {
        let Some(fault) = fault.filter(|fault| fault.when == when) else { return Ok(()) };
        self.observed.lock().unwrap().fired += 1;
        match fault.effect {
            Effect::Error => Err(LedgerError::Unavailable("the line was cut by the test".into())),
            Effect::Hang => std::future::pending().await,
            // No destructor runs and no task goes on, as after SIGKILL.
            Effect::Kill => std::process::abort(),
        }
    }

    fn through<'a, T: Send + 'a>(&'a self, method: &'static str, real: LedgerResult<'a, T>) -> LedgerResult<'a, T> {
        let fault = self.take(method);
        Box::pin(async move {
            self.strike(fault.as_ref(), When::Before).await?;
            let answer = real.await?;
            self.strike(fault.as_ref(), When::After).await?;
            Ok(answer)
        })
    }
}

impl Ledger for Struck {
    fn lookup<'a>(&'a self, agent: &'a AgentId, by: By<'a>) -> LedgerResult<'a, Option<Payment>> {
        let method = match by {
            By::Key(_) => "lookup_key",
            By::Twin(_) => "lookup_twin",
            By::Id(_) => "lookup_id",
        };
        self.through(method, self.real.lookup(agent, by))
    }
    fn decide<'a>(&'a self, intent: &'a Intent) -> LedgerResult<'a, Decision> {
        self.through("decide", self.real.decide(intent))
    }
    fn store_payload<'a>(&'a self, id: PaymentId, lease: &'a Lease, payload: &'a [u8]) -> LedgerResult<'a, bool> {
        self.through("store_payload", self.real.store_payload(id, lease, payload))
    }
    fn payload(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        self.through("payload", self.real.payload(id))
    }
    fn settle<'a>(&'a self, request: SettleRequest<'a>) -> LedgerResult<'a, SettleOutcome> {
        self.through("settle", self.real.settle(request))
    }
    fn in_doubt<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        self.through("in_doubt", self.real.in_doubt(id, lease, reason))
    }
    fn release<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        self.through("release", self.real.release(id, lease, reason))
    }
    fn take_recovery(&self, id: PaymentId, lease_ms: u64) -> LedgerResult<'_, Recovery> {
        self.through("take_recovery", self.real.take_recovery(id, lease_ms))
    }
    fn end_recovery<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Option<Reason>) -> LedgerResult<'a, bool> {
        self.through("end_recovery", self.real.end_recovery(id, lease, reason))
    }
    fn take_due_on<'a>(&'a self, on: On<'a>, limit: u32, lease_ms: u64) -> LedgerResult<'a, Vec<(Payment, Lease)>> {
        self.through("take_due", self.real.take_due_on(on, limit, lease_ms))
    }
    fn look_again<'a>(&'a self, id: PaymentId, lease: &'a Lease, due_ms: u64) -> LedgerResult<'a, bool> {
        self.through("look_again", self.real.look_again(id, lease, due_ms))
    }
    fn expire<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        self.through("expire", self.real.expire(id, lease, reason))
    }
    fn tidy(&self) -> LedgerResult<'_, Tidied> {
        self.through("tidy", self.real.tidy())
    }
    fn open_rows(&self) -> LedgerResult<'_, OpenRows> {
        self.through("open_rows", self.real.open_rows())
    }
    fn now_ms(&self) -> LedgerResult<'_, u64> {
        self.through("now_ms", self.real.now_ms())
    }
    fn resolve<'a>(&'a self, resolution: Resolution<'a>) -> LedgerResult<'a, Resolved> {
        self.real.resolve(resolution)
    }
    fn answered(&self, id: PaymentId) -> LedgerResult<'_, ()> {
        self.through("answered", self.real.answered(id))
    }
    fn outcome(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        self.through("outcome", self.real.outcome(id))
    }
    fn budget<'a>(&'a self, agent: &'a AgentId, session: Option<&'a str>) -> LedgerResult<'a, Vec<BudgetLine>> {
        self.through("budget", self.real.budget(agent, session))
    }
    fn apply_limits<'a>(&'a self, list: LimitList<'a>) -> LedgerResult<'a, Applied> {
        self.real.apply_limits(list)
    }
    fn limits(&self) -> LedgerResult<'_, Vec<Limit>> {
        self.real.limits()
    }
    fn set_limit<'a>(&'a self, limit: &'a Limit) -> LedgerResult<'a, ()> {
        self.real.set_limit(limit)
    }
    fn suspend<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, u64> {
        self.real.suspend(subject, unit)
    }
    fn resume<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, bool> {
        self.real.resume(subject, unit)
    }
    fn stopped(&self) -> LedgerResult<'_, Vec<Subject>> {
        self.real.stopped()
    }
    fn signable<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, Signable> {
        self.real.signable(subject, unit)
    }
    fn origin_rules(&self) -> LedgerResult<'_, Vec<OriginRule>> {
        self.real.origin_rules()
    }
    fn set_origin_rule<'a>(&'a self, origin: &'a Origin, allowed: Option<bool>) -> LedgerResult<'a, bool> {
        self.real.set_origin_rule(origin, allowed)
    }
    fn pins(&self) -> LedgerResult<'_, Vec<Pin>> {
        self.real.pins()
    }
    fn pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit) -> LedgerResult<'a, Option<Pin>> {
        self.real.pin(origin, unit)
    }
    fn set_pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit, set: SetPin<'a>) -> LedgerResult<'a, bool> {
        self.real.set_pin(origin, unit, set)
    }
    fn list<'a>(&'a self, filter: &'a Filter) -> LedgerResult<'a, Vec<Payment>> {
        self.real.list(filter)
    }
    fn show<'a>(&'a self, id: &'a str) -> LedgerResult<'a, Option<(Payment, Vec<Event>)>> {
        self.real.show(id)
    }
    fn audit(&self) -> LedgerResult<'_, Audit> {
        self.real.audit()
    }
    fn end_session<'a>(&'a self, session: &'a str, expires_ms: u64) -> LedgerResult<'a, ()> {
        self.real.end_session(session, expires_ms)
    }
    fn session_ended<'a>(&'a self, session: &'a str) -> LedgerResult<'a, bool> {
        self.real.session_ended(session)
    }
    fn ping(&self) -> LedgerResult<'_, ()> {
        self.real.ping()
    }
}
