//! The claims of a simulated gate: the real store, with time, faults and kills around each call, as `super::super::ledger`
//! has them around the buyer's. Who holds a claim is written down as the store grants it. The planted bugs are here too.

use std::sync::Arc;

use tollway::gate::claims::{Arrow, Claim, ClaimError, Lease, NewClaim, State, Store, Stored, Taken, Written};
use tollway::gate::payment::Identity;
use tollway::ledger::LedgerError;

use super::book::Book;
use crate::world::Ctx;

/// A mistake that the gate does not make, put between it and its claims. The simulation has to find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// A lost settlement is given back, though it may have gone through.
    ReleaseAfterSettle,
    /// Whatever no a facilitator says is believed.
    BelieveEveryNo,
    /// The sweep fails what the chain shows as unused and alive.
    FailTooEarly,
    /// A settle goes out of which no row tells.
    SettleUnwritten,
    /// An output leaves though the claim could not be settled: its holder was fenced.
    DeliverFenced,
    /// A claim is had by whoever asks, whoever works on it.
    TwoHolders,
    /// What was never begun is called settled.
    SettledUnpaid,
    /// A settled payment's answer is not kept, and its handler never runs again.
    NothingKept,
}

pub const BUGS: [(&str, Bug); 8] = [
    ("release-after-settle", Bug::ReleaseAfterSettle),
    ("believe-every-no", Bug::BelieveEveryNo),
    ("fail-too-early", Bug::FailTooEarly),
    ("settle-unwritten", Bug::SettleUnwritten),
    ("deliver-fenced", Bug::DeliverFenced),
    ("two-holders", Bug::TwoHolders),
    ("settled-unpaid", Bug::SettledUnpaid),
    ("nothing-kept", Bug::NothingKept),
];

pub struct SimStore {
    pub inner: Arc<dyn Store>,
    pub ctx: Ctx,
    pub bug: Option<Bug>,
    pub book: Arc<Book>,
}

fn lost<T>() -> Result<T, ClaimError> {
    Err(LedgerError::Unavailable("the line was cut by the world".into()).into())
}

impl SimStore {
    /// `note` sees what was done, also where the answer is lost. Whether it was done and answered goes to the book.
    async fn run<T>(&self, what: &str, call: Stored<'_, T>, note: impl FnOnce(&T) -> String) -> Result<T, ClaimError> {
        let world = &self.ctx.world;
        world.pause().await;
        if world.chance(|f| f.ledger_not_done) {
            self.ctx.trace(&format!("claims {what}: not done"));
            world.count(|s| s.ledger_not_done += 1);
            return if world.permille(500) { Err(LedgerError::Busy.into()) } else { lost() };
        }
        let result = self.book.still(call);
        match &result {
            Ok(done) => {
                let noted = note(done);
                self.ctx.trace(&format!("claims {what}: {noted}"));
            }
            Err(error) => world.fail(format!("the store refused {what}: {error}")),
        }
        world.pause().await;
        if world.chance(|f| f.ledger_answer_lost) {
            self.ctx.trace(&format!("claims {what}: answer lost"));
            world.count(|s| s.ledger_answer_lost += 1);
            return lost();
        }
        result
    }

    fn row(&self, identity: &Identity) -> Option<Claim> {
        self.book.claim(identity)
    }

    /// What the planted bugs make of an arrow.
    fn bent<'a>(&self, lease: &Lease, written: &Written<'a>) -> Written<'a> {
        let mut written = written.clone();
        let is = |arrow: Arrow| written.arrow == arrow;
        let was = self.row(&lease.identity);
        match self.bug {
            Some(Bug::ReleaseAfterSettle) if is(Arrow::LOST) => written.arrow.to = State::Released,
            Some(Bug::BelieveEveryNo)
                if is(Arrow::LOST)
                    && written.reason.as_deref().is_some_and(|r| r.starts_with("facilitator_says_no")) =>
            {
                written.arrow.to = State::Failed;
            }
            Some(Bug::FailTooEarly) if is(Arrow::STILL_UNKNOWN) && written.reason.as_deref() == Some("still_alive") => {
                written.arrow.to = State::Failed;
            }
            Some(Bug::SettledUnpaid) if is(Arrow::RELEASE) && was.is_some() => {
                written.arrow.to = State::Settled;
                written.receipt = Some(r#"{"success":true,"transaction":"00","network":"stellar:testnet"}"#);
            }
            Some(Bug::NothingKept) if written.answer.is_some() => {
                written.answer = None;
                written.kept = Some(tollway::gate::claims::Kept::Answer);
            }
            _ => {}
        }
        written
    }
}

fn short(identity: &Identity) -> String {
    identity.short()
}

fn of_claim(claim: &Option<Claim>) -> String {
    claim.as_ref().map_or("none".into(), |c| {
        format!("{} leased {} settles {} runs {} {:?}", c.state.as_str(), c.leased, c.settles, c.runs, c.kept)
    })
}

impl Store for SimStore {
    fn look<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Option<Claim>> {
        Box::pin(async move {
            let what = format!("look {}", short(identity));
            self.run(&what, self.inner.look(identity), of_claim).await
        })
    }

    fn claim<'a>(&'a self, new: &'a NewClaim<'a>, lease: &'a Lease, lease_ms: i64) -> Stored<'a, Taken> {
        Box::pin(async move {
            let note = |done: &Taken| {
                if matches!(done, Taken::Fresh { .. }) {
                    self.book.claimed(&self.ctx, new, lease, lease_ms);
                }
                format!("{done:?}")
            };
            let what = format!("claim {}", short(&new.identity));
            let done = self.run(&what, self.inner.claim(new, lease, lease_ms), note).await?;
            if matches!(done, Taken::Fresh { .. }) {
                self.ctx.tempt();
            }
            match self.bug {
                Some(Bug::TwoHolders) if done == Taken::Known => Ok(Taken::Fresh { settles: 0 }),
                _ => Ok(done),
            }
        })
    }

    fn renew<'a>(&'a self, lease: &'a Lease, lease_ms: i64) -> Stored<'a, bool> {
        Box::pin(async move {
            let note = |held: &bool| {
                self.book.acted(lease, *held, Some(lease_ms));
                held.to_string()
            };
            let what = format!("renew {}", short(&lease.identity));
            self.run(&what, self.inner.renew(lease, lease_ms), note).await
        })
    }

    fn advance<'a>(&'a self, lease: &'a Lease, written: &'a Written<'a>) -> Stored<'a, bool> {
        Box::pin(async move {
            let arrow = written.arrow;
            if self.bug == Some(Bug::SettleUnwritten) && arrow == Arrow::SETTLE {
                return Ok(true);
            }
            let bent = self.bent(lease, written);
            let note = |held: &bool| {
                if *held {
                    self.book.moved(&lease.identity, arrow);
                }
                self.book.acted(lease, *held, arrow.keeps_lease.then_some(written.lease_ms));
                format!("{held} {}", written.reason.as_deref().unwrap_or_default())
            };
            let what = format!("{} -> {}", short(&lease.identity), bent.arrow.to.as_str());
            let done = self.run(&what, self.inner.advance(lease, &bent), note).await;
            if done.is_err() && arrow == Arrow::RAN {
                self.book.unsure(&lease.identity);
            }
            let done = done?;
            if done && (arrow == Arrow::SETTLE || arrow == Arrow::SETTLED_AND_RUNS) {
                self.ctx.tempt();
            }
            match self.bug {
                Some(Bug::DeliverFenced) if arrow.to == State::Settled || arrow == Arrow::SETTLE => Ok(true),
                _ => Ok(done),
            }
        })
    }

    fn take<'a>(&'a self, lease: &'a Lease, state: State, max_runs: Option<i64>, lease_ms: i64) -> Stored<'a, bool> {
        Box::pin(async move {
            let note = |taken: &bool| {
                if *taken {
                    self.book.granted(&self.ctx, lease, lease_ms, false);
                    self.ctx.world.gate(|s| s.asked_chain += u64::from(state == State::Failed));
                }
                taken.to_string()
            };
            let what = format!("take {} {} {max_runs:?}", short(&lease.identity), state.as_str());
            let taken = self.run(&what, self.inner.take(lease, state, max_runs, lease_ms), note).await?;
            if taken {
                self.ctx.tempt();
            }
            Ok(taken)
        })
    }

    fn answer<'a>(&'a self, identity: &'a Identity, round: &'a [u8; 32]) -> Stored<'a, Option<Vec<u8>>> {
        Box::pin(async move {
            let what = format!("answer {}", short(identity));
            self.run(&what, self.inner.answer(identity, round), |found| found.is_some().to_string()).await
        })
    }

    fn settle_request<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Option<Vec<u8>>> {
        Box::pin(async move {
            let what = format!("settle_request {}", short(identity));
            self.run(&what, self.inner.settle_request(identity), |found| found.is_some().to_string()).await
        })
    }

    fn expire(&self) -> Stored<'_, ()> {
        Box::pin(self.run("expire", self.inner.expire(), |()| String::new()))
    }

    fn due<'a>(&'a self, token: &'a [u8; 16], most: i64, lease_ms: i64) -> Stored<'a, Vec<Claim>> {
        Box::pin(async move {
            let note = |due: &Vec<Claim>| {
                for claim in due {
                    let lease = Lease::new(claim.identity, *token);
                    self.book.granted(&self.ctx, &lease, lease_ms, true);
                }
                due.iter().map(|claim| short(&claim.identity)).collect::<Vec<_>>().join(" ")
            };
            self.run("due", self.inner.due(token, most, lease_ms), note).await
        })
    }

    fn list<'a>(&'a self, states: &'a [&'a str], most: i64) -> Stored<'a, Vec<Claim>> {
        Box::pin(self.run("list", self.inner.list(states, most), |all| all.len().to_string()))
    }

    fn between<'a>(&'a self, low: &'a [u8; 32], high: &'a [u8; 32]) -> Stored<'a, Vec<Claim>> {
        Box::pin(self.run("between", self.inner.between(low, high), |all| all.len().to_string()))
    }

    fn events<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Vec<(i64, Option<String>, String, Option<String>)>> {
        Box::pin(self.run("events", self.inner.events(identity), |all| all.len().to_string()))
    }

    fn now_ms(&self) -> Stored<'_, i64> {
        Box::pin(self.run("now_ms", self.inner.now_ms(), |now| now.to_string()))
    }

    fn forget_requests<'a>(&'a self, network: &'a str, dead: i64, most: i64) -> Stored<'a, u64> {
        Box::pin(self.run("forget_requests", self.inner.forget_requests(network, dead, most), u64::to_string))
    }

    fn forget_answers(&self, most: i64) -> Stored<'_, u64> {
        Box::pin(self.run("forget_answers", self.inner.forget_answers(most), u64::to_string))
    }
}
