//! The real ledger, with faults between it and the story: an answer that is lost, a row that somebody else closes, a
//! moment to act in.

use std::sync::{Arc, Mutex};

use tollway::ledger::{
    Applied, Audit, BudgetLine, By, Decision, Event, Evidence, Filter, Intent, Lease, Ledger, LedgerError,
    LedgerResult, Limit, LimitList, On, OpenRows, Payment, Reason, Recovery, Resolution, Resolved, SetPin,
    SettleOutcome, SettleRequest, Signable, Subject, Tidied,
};
use tollway::money::{AgentId, Amount, PaymentId, Unit};
use tollway::policy::{Origin, OriginRule, Pin};
use tollway::ports::World;

use super::Place;

/// What goes wrong; each happens once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    LookupUnavailable,
    OutcomeUnavailable,
    ReserveUnavailable,
    ReserveBusy,
    SettleUnavailable,
    SettleBusy,
    /// Another process closes the row before the story's own last word.
    ReleasedBeforeSettle,
    SettledBeforeSettle,
    /// By evidence that names no transaction.
    SettledWithoutTransaction,
    SettledBeforeDoubt,
    /// Somebody met the row after its lease had run out.
    DoubtedBeforeDoubt,
    /// There is no sealing key.
    PayloadNotStored,
    /// Its writing never ends.
    PayloadStalls,
    /// It takes its time, and its end is counted.
    PayloadSlow,
    /// The lease that the story is given has run out already.
    LeaseGone,
}

impl Fault {
    pub const ALL: [Fault; 14] = [
        Fault::LookupUnavailable,
        Fault::OutcomeUnavailable,
        Fault::ReserveUnavailable,
        Fault::ReserveBusy,
        Fault::SettleUnavailable,
        Fault::SettleBusy,
        Fault::ReleasedBeforeSettle,
        Fault::SettledBeforeSettle,
        Fault::SettledBeforeDoubt,
        Fault::DoubtedBeforeDoubt,
        Fault::PayloadNotStored,
        Fault::PayloadStalls,
        Fault::PayloadSlow,
        Fault::LeaseGone,
    ];
}

type Hook = Box<dyn FnOnce() + Send>;

pub struct Faulty {
    pub real: Arc<dyn Ledger>,
    faults: Mutex<Vec<Fault>>,
    after_reserve: Mutex<Option<Hook>>,
    lease: Mutex<Option<Lease>>,
    /// Methods that the story waited for, in their order.
    calls: Mutex<Vec<&'static str>>,
    /// What the agent's tools call besides.
    others: Mutex<Vec<&'static str>>,
}

impl Faulty {
    pub async fn open(world: &World, place: &Place) -> Faulty {
        Faulty::over(place.open(world).await)
    }

    pub fn over(real: Arc<dyn Ledger>) -> Faulty {
        Faulty {
            real,
            faults: Mutex::default(),
            after_reserve: Mutex::default(),
            lease: Mutex::default(),
            calls: Mutex::default(),
            others: Mutex::default(),
        }
    }

    pub fn fail(&self, fault: Fault) {
        self.faults.lock().unwrap().push(fault);
    }

    /// Runs between the reservation and the signature.
    pub fn after_reserve(&self, hook: impl FnOnce() + Send + 'static) {
        *self.after_reserve.lock().unwrap() = Some(Box::new(hook));
    }

    pub fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    /// The other methods that were called, whether or not anybody waited.
    pub fn others(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.others.lock().unwrap())
    }

    fn happens(&self, fault: Fault) -> bool {
        let mut faults = self.faults.lock().unwrap();
        let at = faults.iter().position(|f| *f == fault);
        at.map(|at| faults.remove(at)).is_some()
    }

    fn count(&self, method: &'static str) {
        self.calls.lock().unwrap().push(method);
    }

    fn note(&self, method: &'static str) {
        self.others.lock().unwrap().push(method);
    }

    async fn settled_by_another(&self, id: PaymentId, transaction: Option<&str>) {
        let request = SettleRequest {
            payment_id: id,
            amount: Amount::from_u64(super::bench::PRICE),
            transaction,
            evidence: Evidence::Chain,
            outcome: None,
            unfinished: false,
        };
        assert!(matches!(self.real.settle(request).await, Ok(SettleOutcome::Settled)));
    }
}

fn lost<T>() -> Result<T, LedgerError> {
    Err(LedgerError::Unavailable("the line was cut by the test".into()))
}

impl Ledger for Faulty {
    fn lookup<'a>(&'a self, agent: &'a AgentId, by: By<'a>) -> LedgerResult<'a, Option<Payment>> {
        self.count("lookup");
        if self.happens(Fault::LookupUnavailable) {
            return Box::pin(async { lost() });
        }
        self.real.lookup(agent, by)
    }

    fn decide<'a>(&'a self, intent: &'a Intent) -> LedgerResult<'a, Decision> {
        self.count("reserve");
        if self.happens(Fault::ReserveUnavailable) {
            return Box::pin(async { lost() });
        }
        if self.happens(Fault::ReserveBusy) {
            return Box::pin(async { Err(LedgerError::Busy) });
        }
        Box::pin(async move {
            let mut decision = self.real.decide(intent).await?;
            if let Decision::Fresh(lease) = &mut decision
                && self.happens(Fault::LeaseGone)
            {
                lease.expires_ms = 1;
            }
            if let Decision::Fresh(lease) = &decision {
                *self.lease.lock().unwrap() = Some(lease.clone());
                let hook = self.after_reserve.lock().unwrap().take();
                if let Some(hook) = hook {
                    hook();
                }
            }
            Ok(decision)
        })
    }

    fn store_payload<'a>(&'a self, id: PaymentId, lease: &'a Lease, payload: &'a [u8]) -> LedgerResult<'a, bool> {
        self.note("store_payload");
        if self.happens(Fault::PayloadNotStored) {
            return Box::pin(async { Ok(false) });
        }
        if self.happens(Fault::PayloadStalls) {
            return Box::pin(std::future::pending());
        }
        if self.happens(Fault::PayloadSlow) {
            return Box::pin(async move {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                let stored = self.real.store_payload(id, lease, payload).await;
                self.count("payload_stored");
                stored
            });
        }
        self.real.store_payload(id, lease, payload)
    }

    fn payload(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        self.note("payload");
        self.real.payload(id)
    }

    fn settle<'a>(&'a self, request: SettleRequest<'a>) -> LedgerResult<'a, SettleOutcome> {
        self.count("settle");
        if self.happens(Fault::SettleUnavailable) {
            return Box::pin(async { lost() });
        }
        if self.happens(Fault::SettleBusy) {
            return Box::pin(async { Err(LedgerError::Busy) });
        }
        Box::pin(async move {
            if self.happens(Fault::ReleasedBeforeSettle) {
                let lease = self.lease.lock().unwrap().clone().unwrap();
                assert!(self.real.release(request.payment_id, &lease, Reason::ExpiredUnspent).await?);
            }
            if self.happens(Fault::SettledBeforeSettle) {
                self.settled_by_another(request.payment_id, Some(super::bench::TRANSACTION)).await;
            }
            if self.happens(Fault::SettledWithoutTransaction) {
                self.settled_by_another(request.payment_id, None).await;
            }
            self.real.settle(request).await
        })
    }

    fn in_doubt<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        self.count("in_doubt");
        Box::pin(async move {
            if self.happens(Fault::SettledBeforeDoubt) {
                self.settled_by_another(id, Some(super::bench::TRANSACTION)).await;
            }
            if self.happens(Fault::DoubtedBeforeDoubt) {
                assert!(self.real.in_doubt(id, lease, Reason::LeaseExpired).await?);
            }
            self.real.in_doubt(id, lease, reason).await
        })
    }

    fn release<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        self.count("release");
        self.real.release(id, lease, reason)
    }

    fn take_recovery(&self, id: PaymentId, lease_ms: u64) -> LedgerResult<'_, Recovery> {
        self.note("take_recovery");
        self.real.take_recovery(id, lease_ms)
    }
    fn end_recovery<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Option<Reason>) -> LedgerResult<'a, bool> {
        self.note("end_recovery");
        self.real.end_recovery(id, lease, reason)
    }
    fn take_due_on<'a>(&'a self, on: On<'a>, limit: u32, lease_ms: u64) -> LedgerResult<'a, Vec<(Payment, Lease)>> {
        self.note("take_due");
        self.real.take_due_on(on, limit, lease_ms)
    }
    fn look_again<'a>(&'a self, id: PaymentId, lease: &'a Lease, due_ms: u64) -> LedgerResult<'a, bool> {
        self.note("look_again");
        self.real.look_again(id, lease, due_ms)
    }
    fn expire<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        self.note("expire");
        self.real.expire(id, lease, reason)
    }
    fn tidy(&self) -> LedgerResult<'_, Tidied> {
        self.note("tidy");
        self.real.tidy()
    }
    fn open_rows(&self) -> LedgerResult<'_, OpenRows> {
        self.note("open_rows");
        self.real.open_rows()
    }
    fn now_ms(&self) -> LedgerResult<'_, u64> {
        self.note("now_ms");
        self.real.now_ms()
    }
    fn resolve<'a>(&'a self, resolution: Resolution<'a>) -> LedgerResult<'a, Resolved> {
        self.note("resolve");
        self.real.resolve(resolution)
    }

    fn answered(&self, id: PaymentId) -> LedgerResult<'_, ()> {
        self.note("answered");
        self.real.answered(id)
    }
    fn outcome(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        self.note("outcome");
        if self.happens(Fault::OutcomeUnavailable) {
            return Box::pin(async { lost() });
        }
        self.real.outcome(id)
    }
    fn budget<'a>(&'a self, agent: &'a AgentId, session: Option<&'a str>) -> LedgerResult<'a, Vec<BudgetLine>> {
        self.note("budget");
        self.real.budget(agent, session)
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
