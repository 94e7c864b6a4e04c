//! The ledger of a simulated process: the real one over SQLite. sqlx works on threads that a paused clock does not see,
//! so a call runs to its end while the world stands still; before and after it lie time, faults and kills. The planted
//! bugs that live between the business code and its ledger are here too.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tollway::ledger::*;
use tollway::money::{AgentId, PaymentId, Unit};
use tollway::policy::{Origin, OriginRule, Pin};

use super::owners::Owners;
use super::world::{Ctx, lock};

/// A mistake that the business code does not make, put between it and its ledger. The simulation has to find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// No answer from the seller: released, though the seller may still settle.
    ReleaseOnTimeout,
    /// The sweep releases what the chain shows as unused and alive.
    SweepTooEarly,
    /// Signed and sent without a row.
    PayBeforeReserve,
    /// The owner believes in its lease longer than the ledger does.
    SignAfterLease,
    /// A stopped agent's payment is sent again.
    RecoverAfterStop,
    /// A recovery does not see that somebody has the lease.
    TwoOwners,
}

pub const BUGS: [(&str, Bug); 6] = [
    ("release-on-timeout", Bug::ReleaseOnTimeout),
    ("sweep-too-early", Bug::SweepTooEarly),
    ("pay-before-reserve", Bug::PayBeforeReserve),
    ("sign-after-lease", Bug::SignAfterLease),
    ("recover-after-stop", Bug::RecoverAfterStop),
    ("two-owners", Bug::TwoOwners),
];

pub struct SimLedger {
    pub inner: Arc<dyn Ledger>,
    pub ctx: Ctx,
    pub bug: Option<Bug>,
    /// Of all processes.
    pub owners: Arc<Owners>,
    /// Payments that this process recovers.
    pub recovering: Mutex<BTreeSet<PaymentId>>,
    /// Looks at the ledger from outside whenever money was written.
    pub watch: Arc<dyn Fn() + Send + Sync>,
}

fn lost<T>() -> Result<T, LedgerError> {
    Err(LedgerError::Unavailable("the line was cut by the world".into()))
}

impl SimLedger {
    async fn run<T: Debug>(&self, what: &'static str, call: LedgerResult<'_, T>) -> Result<T, LedgerError> {
        self.noting(what, call, |_| {}).await
    }

    /// `note` sees what was done, also where the answer is lost.
    async fn noting<T: Debug>(
        &self,
        what: &'static str,
        call: LedgerResult<'_, T>,
        note: impl FnOnce(&T),
    ) -> Result<T, LedgerError> {
        let world = &self.ctx.world;
        world.pause().await;
        if world.chance(|f| f.ledger_not_done) {
            self.ctx.trace(&format!("ledger {what}: not done"));
            world.count(|s| s.ledger_not_done += 1);
            return if world.permille(500) { Err(LedgerError::Busy) } else { lost() };
        }
        let result = world.still(call);
        self.ctx.trace(&format!("ledger {what}: {}", brief(&result)));
        if let Ok(done) = &result {
            note(done);
        }
        match &result {
            // Its owner shares the file with others that hold it only for moments, all of them on this thread.
            Err(error) if self.bug != Some(Bug::PayBeforeReserve) => {
                world.fail(format!("the ledger refused {what}: {error}"));
            }
            Err(_) => {}
            Ok(_) if matches!(what, "decide" | "settle" | "release" | "expire") => (self.watch)(),
            Ok(_) => {}
        }
        world.pause().await;
        if world.chance(|f| f.ledger_answer_lost) {
            self.ctx.trace(&format!("ledger {what}: answer lost"));
            world.count(|s| s.ledger_answer_lost += 1);
            return lost();
        }
        result
    }
}

impl SimLedger {
    /// A statement under a lease; `ends`: the lease is over where it hit.
    fn acts<'a>(&'a self, id: PaymentId, lease: &'a Lease, ends: bool) -> impl FnOnce(&bool) + use<'a> {
        move |hit| self.owners.acted(&self.ctx.world, id, lease, *hit, ends)
    }
}

/// What the planted bugs do.
impl SimLedger {
    fn row(&self, id: PaymentId) -> Option<Payment> {
        let found = self.ctx.world.still(self.inner.show(&id.to_hex()));
        found.expect("the ledger can be read").map(|(row, _)| row)
    }

    fn stopped_and_taken(&self, id: PaymentId, lease_ms: u64) -> Recovery {
        let world = &self.ctx.world;
        let Some(row) = self.row(id) else { return Recovery::Nothing };
        let subject = Subject::Agent(row.agent);
        world.still(self.inner.resume(&subject, None)).expect("resumes");
        let taken = world.still(self.inner.take_recovery(id, lease_ms)).expect("takes");
        world.still(self.inner.suspend(&subject, None)).expect("suspends");
        if let Recovery::Taken(taken) = &taken {
            self.owners.recovery(world, id, &taken.lease);
        }
        taken
    }

    fn taken_twice(&self, id: PaymentId, lease_ms: u64) -> Recovery {
        let world = &self.ctx.world;
        let payload = world.still(self.inner.payload(id)).expect("the ledger can be read");
        let (Some(payment), Some(payload)) = (self.row(id), payload) else { return Recovery::Leased };
        let now = world.unix_ms();
        let lease = Lease { token: [2; 16], expires_ms: now + lease_ms, sign_before_ms: now };
        self.owners.recovery(world, id, &lease);
        Recovery::Taken(Box::new(Recoverable { payment, lease, payload }))
    }
}

/// Enough of an answer to tell two runs apart.
fn brief(result: &impl Debug) -> String {
    format!("{result:?}").chars().take(160).collect()
}

impl Ledger for SimLedger {
    fn lookup<'a>(&'a self, agent: &'a AgentId, by: By<'a>) -> LedgerResult<'a, Option<Payment>> {
        Box::pin(self.run("lookup", self.inner.lookup(agent, by)))
    }

    fn decide<'a>(&'a self, intent: &'a Intent) -> LedgerResult<'a, Decision> {
        Box::pin(async move {
            if self.bug == Some(Bug::PayBeforeReserve) {
                let now = self.ctx.world.unix_ms();
                return Ok(Decision::Fresh(Lease {
                    token: [1; 16],
                    expires_ms: now + 120_000,
                    sign_before_ms: now + 10_000,
                }));
            }
            let note = |decision: &Decision| {
                if let Decision::Fresh(lease) = decision {
                    self.owners.granted(&self.ctx.world, intent.payment_id(), lease);
                }
            };
            let mut decision = self.noting("decide", self.inner.decide(intent), note).await?;
            match &mut decision {
                Decision::Fresh(lease) => {
                    self.ctx.reserved(lease.token);
                    if self.bug == Some(Bug::SignAfterLease) {
                        lease.expires_ms += 3_600_000;
                        lease.sign_before_ms += 3_600_000;
                    }
                }
                Decision::Exceeded { .. } => self.ctx.world.count(|s| s.over_budget += 1),
                Decision::Existing(_) => self.ctx.world.count(|s| s.existing += 1),
                Decision::Suspended => self.ctx.world.count(|s| s.suspended += 1),
                _ => {}
            }
            Ok(decision)
        })
    }

    fn store_payload<'a>(&'a self, id: PaymentId, lease: &'a Lease, payload: &'a [u8]) -> LedgerResult<'a, bool> {
        self.ctx.sent(lease.token, id.to_hex());
        let call = self.inner.store_payload(id, lease, payload);
        Box::pin(self.noting("store_payload", call, self.acts(id, lease, false)))
    }

    fn payload(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        Box::pin(self.run("payload", self.inner.payload(id)))
    }

    fn settle<'a>(&'a self, request: SettleRequest<'a>) -> LedgerResult<'a, SettleOutcome> {
        Box::pin(async move {
            let note = |_: &SettleOutcome| self.owners.settled(request.payment_id);
            let ended = self.noting("settle", self.inner.settle(request), note).await?;
            self.ctx.closed(None, &request.payment_id.to_hex());
            if request.outcome.is_some() && lock(&self.recovering).remove(&request.payment_id) {
                self.ctx.world.count(|s| s.recovered += 1);
            }
            if request.evidence == Evidence::Chain && matches!(ended, SettleOutcome::Settled) {
                self.ctx.world.count(|s| s.sweep_settled += 1);
            }
            Ok(ended)
        })
    }

    fn in_doubt<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        if self.bug == Some(Bug::ReleaseOnTimeout) && reason == Reason::NoAnswer {
            return self.release(id, lease, Reason::Cancelled);
        }
        Box::pin(async move {
            let call = self.inner.in_doubt(id, lease, reason);
            let ours = self.noting("in_doubt", call, self.acts(id, lease, true)).await?;
            self.ctx.closed(Some(lease.token), &id.to_hex());
            Ok(ours)
        })
    }

    fn release<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        Box::pin(async move {
            let call = self.inner.release(id, lease, reason);
            let ours = self.noting("release", call, self.acts(id, lease, true)).await?;
            self.ctx.closed(Some(lease.token), &id.to_hex());
            self.ctx.world.count(|s| s.sign_window_missed += u64::from(reason == Reason::SignWindowMissed));
            Ok(ours)
        })
    }

    fn take_recovery(&self, id: PaymentId, lease_ms: u64) -> LedgerResult<'_, Recovery> {
        Box::pin(async move {
            let note = |taken: &Recovery| {
                if let Recovery::Taken(taken) = taken {
                    self.owners.recovery(&self.ctx.world, id, &taken.lease);
                }
            };
            let mut taken = self.noting("take_recovery", self.inner.take_recovery(id, lease_ms), note).await?;
            match (&taken, self.bug) {
                (Recovery::Suspended, Some(Bug::RecoverAfterStop)) => taken = self.stopped_and_taken(id, lease_ms),
                (Recovery::Leased, Some(Bug::TwoOwners)) => taken = self.taken_twice(id, lease_ms),
                _ => {}
            }
            if matches!(taken, Recovery::Taken(_)) {
                lock(&self.recovering).insert(id);
                self.ctx.world.count(|s| s.recoveries += 1);
            }
            Ok(taken)
        })
    }

    fn end_recovery<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Option<Reason>) -> LedgerResult<'a, bool> {
        let call = self.inner.end_recovery(id, lease, reason);
        Box::pin(self.noting("end_recovery", call, self.acts(id, lease, true)))
    }

    fn take_due_on<'a>(&'a self, on: On<'a>, limit: u32, lease_ms: u64) -> LedgerResult<'a, Vec<(Payment, Lease)>> {
        let note = |taken: &Vec<(Payment, Lease)>| {
            for (row, lease) in taken {
                self.owners.granted(&self.ctx.world, row.payment_id, lease);
            }
        };
        Box::pin(self.noting("take_due", self.inner.take_due_on(on, limit, lease_ms), note))
    }

    fn look_again<'a>(&'a self, id: PaymentId, lease: &'a Lease, due_ms: u64) -> LedgerResult<'a, bool> {
        if self.bug == Some(Bug::SweepTooEarly) {
            return self.expire(id, lease, Reason::ExpiredUnspent);
        }
        self.ctx.world.count(|s| s.looked_again += 1);
        let call = self.inner.look_again(id, lease, due_ms);
        Box::pin(self.noting("look_again", call, self.acts(id, lease, true)))
    }

    fn expire<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        Box::pin(async move {
            let call = self.inner.expire(id, lease, reason);
            let ended = self.noting("expire", call, self.acts(id, lease, true)).await?;
            self.ctx.world.count(|s| s.sweep_released += u64::from(ended));
            Ok(ended)
        })
    }

    fn tidy(&self) -> LedgerResult<'_, Tidied> {
        Box::pin(self.run("tidy", self.inner.tidy()))
    }
    fn open_rows(&self) -> LedgerResult<'_, OpenRows> {
        Box::pin(self.run("open_rows", self.inner.open_rows()))
    }
    fn now_ms(&self) -> LedgerResult<'_, u64> {
        Box::pin(self.run("now_ms", self.inner.now_ms()))
    }
    fn resolve<'a>(&'a self, resolution: Resolution<'a>) -> LedgerResult<'a, Resolved> {
        Box::pin(self.run("resolve", self.inner.resolve(resolution)))
    }
    fn answered(&self, id: PaymentId) -> LedgerResult<'_, ()> {
        Box::pin(self.run("answered", self.inner.answered(id)))
    }
    fn outcome(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        Box::pin(async move {
            let stored = self.run("outcome", self.inner.outcome(id)).await?;
            self.ctx.world.count(|s| s.replayed += u64::from(stored.is_some()));
            Ok(stored)
        })
    }
    fn budget<'a>(&'a self, agent: &'a AgentId, session: Option<&'a str>) -> LedgerResult<'a, Vec<BudgetLine>> {
        Box::pin(self.run("budget", self.inner.budget(agent, session)))
    }
    fn apply_limits<'a>(&'a self, list: LimitList<'a>) -> LedgerResult<'a, Applied> {
        Box::pin(self.run("apply_limits", self.inner.apply_limits(list)))
    }
    fn limits(&self) -> LedgerResult<'_, Vec<Limit>> {
        Box::pin(self.run("limits", self.inner.limits()))
    }
    fn set_limit<'a>(&'a self, limit: &'a Limit) -> LedgerResult<'a, ()> {
        Box::pin(self.run("set_limit", self.inner.set_limit(limit)))
    }
    fn suspend<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, u64> {
        Box::pin(self.run("suspend", self.inner.suspend(subject, unit)))
    }
    fn resume<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, bool> {
        Box::pin(self.run("resume", self.inner.resume(subject, unit)))
    }
    fn stopped(&self) -> LedgerResult<'_, Vec<Subject>> {
        Box::pin(self.run("stopped", self.inner.stopped()))
    }
    fn signable<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, Signable> {
        Box::pin(self.run("signable", self.inner.signable(subject, unit)))
    }
    fn origin_rules(&self) -> LedgerResult<'_, Vec<OriginRule>> {
        Box::pin(self.run("origin_rules", self.inner.origin_rules()))
    }
    fn set_origin_rule<'a>(&'a self, origin: &'a Origin, allowed: Option<bool>) -> LedgerResult<'a, bool> {
        Box::pin(self.run("set_origin_rule", self.inner.set_origin_rule(origin, allowed)))
    }
    fn pins(&self) -> LedgerResult<'_, Vec<Pin>> {
        Box::pin(self.run("pins", self.inner.pins()))
    }
    fn pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit) -> LedgerResult<'a, Option<Pin>> {
        Box::pin(self.run("pin", self.inner.pin(origin, unit)))
    }
    fn set_pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit, set: SetPin<'a>) -> LedgerResult<'a, bool> {
        Box::pin(self.run("set_pin", self.inner.set_pin(origin, unit, set)))
    }
    fn list<'a>(&'a self, filter: &'a Filter) -> LedgerResult<'a, Vec<Payment>> {
        Box::pin(self.run("list", self.inner.list(filter)))
    }
    fn show<'a>(&'a self, id: &'a str) -> LedgerResult<'a, Option<(Payment, Vec<Event>)>> {
        Box::pin(self.run("show", self.inner.show(id)))
    }
    fn audit(&self) -> LedgerResult<'_, Audit> {
        Box::pin(self.run("audit", self.inner.audit()))
    }
    fn end_session<'a>(&'a self, session: &'a str, expires_ms: u64) -> LedgerResult<'a, ()> {
        Box::pin(self.run("end_session", self.inner.end_session(session, expires_ms)))
    }
    fn session_ended<'a>(&'a self, session: &'a str) -> LedgerResult<'a, bool> {
        Box::pin(self.run("session_ended", self.inner.session_ended(session)))
    }
    fn ping(&self) -> LedgerResult<'_, ()> {
        Box::pin(self.run("ping", self.inner.ping()))
    }
}
