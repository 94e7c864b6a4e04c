//! What is seen of the gates while they sell: who holds a claim as the store granted it, each run of a handler, each
//! settle, each answer. The promises that must hold at every step are judged here, on the chain and the claims.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use tollway::gate::claims::{Arrow, Claim, ClaimError, Kept, Lease, NewClaim, Proof, State, Store, Stored};
use tollway::gate::payment::{Identity, Payment};
use tollway::x402::Flow;

use super::payer::Paid;
use super::shop::Told;
use super::{Call, PRICE};
use crate::chain::{Chain, PAY_TO, Transfer};
use crate::world::{Ctx, World, lock};

/// Free runs of one payment, as a gate has them where nothing else is said.
const FREE_RUNS: u32 = 3;

#[derive(Clone)]
struct Grant {
    lease: Lease,
    expires_ms: u64,
    host: String,
    epoch: u64,
    /// By the sweep.
    swept: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Output,
    Failed,
    /// Killed, out of time, or its holder was told to stop.
    Cut,
}

#[derive(Debug, Clone)]
pub struct Run {
    pub identity: Identity,
    pub request: u64,
    pub paid_already: bool,
    pub end: Option<End>,
}

/// One request as somebody sends it.
#[derive(Clone)]
pub struct Asked {
    pub id: u64,
    pub call: Call,
    pub paid: Option<Arc<Paid>>,
    pub proof: Proof,
    /// It presents what the chain shows.
    pub thief: bool,
    /// The payment had moved its money before this was sent.
    pub after_the_transfer: bool,
}

#[derive(Default)]
struct Seen {
    grants: BTreeMap<Identity, Grant>,
    /// What the newest claim was made with.
    proofs: BTreeMap<Identity, Proof>,
    runs: Vec<Run>,
    outputs: BTreeMap<Identity, BTreeSet<String>>,
    /// The answer to the arrow that ends a paid run was lost, so that nobody knows what is kept.
    unsure: BTreeSet<Identity>,
    verified: BTreeSet<i64>,
    /// Bodies of `/settle`, and how many came.
    settles: BTreeMap<i64, (BTreeSet<Vec<u8>>, u64)>,
    requests: u64,
}

pub struct Book {
    pub world: Arc<World>,
    pub chain: Arc<Chain>,
    /// The judge's own, which no fault touches.
    pub store: Arc<dyn Store>,
    /// Of a store whose clock is not the world's by itself.
    clock: Option<Arc<tokio_postgres::Client>>,
    seen: Mutex<Seen>,
}

impl Book {
    pub fn new(
        world: Arc<World>,
        chain: Arc<Chain>,
        store: Arc<dyn Store>,
        clock: Option<Arc<tokio_postgres::Client>>,
    ) -> Book {
        Book { world, chain, store, clock, seen: Mutex::default() }
    }

    /// One call of the store, by the world's clock.
    pub fn still<T>(&self, call: Stored<'_, T>) -> Result<T, ClaimError> {
        if let Some(client) = &self.clock {
            let now = i64::try_from(self.world.unix_ms()).expect("a moment");
            self.world.still(client.execute("UPDATE sim_clock SET now = $1", &[&now])).expect("its clock is set");
        }
        self.world.still(call)
    }

    pub fn claim(&self, identity: &Identity) -> Option<Claim> {
        self.still(self.store.look(identity)).expect("the claims can be read")
    }

    pub fn claims(&self, states: &[&str]) -> Vec<Claim> {
        self.still(self.store.list(states, 10_000)).expect("the claims can be read")
    }

    /// The transfer that this nonce paid to the seller.
    pub fn paid(&self, nonce: i64) -> Option<Transfer> {
        self.chain.of_nonce(nonce).filter(|transfer| transfer.pay_to == PAY_TO)
    }

    pub fn runs(&self) -> Vec<Run> {
        lock(&self.seen).runs.clone()
    }

    fn fail(&self, identity: &Identity, why: &str) {
        self.world.fail(format!("{}: {why}", identity.short()));
    }
}

/// Who works on a claim.
impl Book {
    pub fn claimed(&self, ctx: &Ctx, new: &NewClaim<'_>, lease: &Lease, lease_ms: i64) {
        self.world.gate(|s| s.claims += 1);
        self.granted(ctx, lease, lease_ms, false);
        lock(&self.seen).proofs.insert(new.identity, new.proof);
    }

    pub fn granted(&self, ctx: &Ctx, lease: &Lease, lease_ms: i64, swept: bool) {
        let now = self.world.unix_ms();
        let new = Grant {
            lease: lease.clone(),
            expires_ms: now + u64::try_from(lease_ms).unwrap_or(0),
            host: ctx.name().to_owned(),
            epoch: ctx.epoch,
            swept,
        };
        let Some(old) = lock(&self.seen).grants.insert(lease.identity, new) else { return };
        if old.lease == *lease {
            return;
        }
        if old.expires_ms > now {
            let left = old.expires_ms - now;
            return self.fail(&lease.identity, &format!("two hold it: the other's lease has {left} ms left"));
        }
        let alive = self.world.host(|host| host.name == old.host).is_some_and(|host| host.epoch() == old.epoch);
        self.world.gate(|s| *(if alive { &mut s.fenced } else { &mut s.orphaned }) += 1);
    }

    /// A statement under this lease; `until`: it keeps the lease for so long.
    pub fn acted(&self, lease: &Lease, hit: bool, until: Option<i64>) {
        let mut seen = lock(&self.seen);
        let grant = seen.grants.get_mut(&lease.identity).filter(|grant| grant.lease == *lease);
        match (hit, grant, until) {
            (true, None, _) => {
                drop(seen);
                self.fail(&lease.identity, "it was written under a lease that another has now");
            }
            (false, _, _) => self.world.gate(|s| s.too_late += 1),
            (true, Some(grant), Some(ms)) => grant.expires_ms = self.world.unix_ms() + u64::try_from(ms).unwrap_or(0),
            (true, Some(_), None) => drop(seen.grants.remove(&lease.identity)),
        }
    }

    /// An arrow is taken by whoever holds the claim.
    pub fn moved(&self, identity: &Identity, arrow: Arrow) {
        let swept = lock(&self.seen).grants.get(identity).is_some_and(|grant| grant.swept);
        if arrow.to == State::Settled && arrow != Arrow::RAN {
            let Some(claim) = self.claim(identity) else { return self.fail(identity, "it was settled and is gone") };
            let nonce = claim.nonce.parse().unwrap_or(0);
            match self.paid(nonce) {
                Some(transfer) if transfer.amount == i128::from(PRICE) => {}
                _ => self.fail(identity, "it was called settled, and nothing was paid"),
            }
            self.world.gate(|s| s.swept += u64::from(swept));
        }
        self.world.gate(|s| s.expired += u64::from(swept && arrow == Arrow::DISPROVED));
    }

    /// Whoever brings proof now is not the one that the claim knows.
    pub fn claimed_without_proof(&self, identity: &Identity) -> bool {
        lock(&self.seen).proofs.get(identity).is_some_and(|proof| *proof == Proof::default())
    }

    pub fn unsure(&self, identity: &Identity) {
        lock(&self.seen).unsure.insert(*identity);
    }
}

/// A run that began.
pub struct Running {
    book: Arc<Book>,
    at: usize,
}

impl Running {
    pub fn end(&self, end: End) {
        lock(&self.book.seen).runs[self.at].end = Some(end);
        self.book.world.gate(|s| s.runs_failed += u64::from(end == End::Failed));
    }

    pub fn number(&self) -> usize {
        self.at
    }
}

impl Drop for Running {
    /// Bookkeeping of the test alone: nothing of the world is touched.
    fn drop(&mut self) {
        let mut seen = lock(&self.book.seen);
        let end = &mut seen.runs[self.at].end;
        if end.is_none() {
            *end = Some(End::Cut);
            drop(seen);
            self.book.world.gate(|s| s.runs_cut += 1);
        }
    }
}

/// Handlers.
impl Book {
    pub fn begins(self: &Arc<Self>, ctx: &Ctx, asked: &Asked) -> Running {
        let identity = asked.paid.as_ref().map(|paid| paid.identity);
        let Some(identity) = identity else {
            self.world.fail("a handler began for nothing".into());
            return self.note(Identity([0; 32]), asked, false);
        };
        let claim = self.claim(&identity);
        let settled = claim.as_ref().is_some_and(|claim| claim.state == State::Settled);
        if let Err(why) = self.may_begin(ctx, asked, &identity, claim.as_ref()) {
            self.fail(&identity, &format!("a handler began on {}: {why}", ctx.name()));
        }
        self.world.gate(|s| {
            s.runs += 1;
            s.runs_again += u64::from(settled && claim.as_ref().is_some_and(|claim| claim.runs > 0));
        });
        self.note(identity, asked, settled)
    }

    fn note(self: &Arc<Self>, identity: Identity, asked: &Asked, paid_already: bool) -> Running {
        let mut seen = lock(&self.seen);
        seen.runs.push(Run { identity, request: asked.id, paid_already, end: None });
        Running { book: self.clone(), at: seen.runs.len() - 1 }
    }

    /// A second start is for a run that failed, or whose holder died or was fenced: so only under a lease that lives and
    /// that the store granted to this process last.
    fn may_begin(&self, ctx: &Ctx, asked: &Asked, identity: &Identity, claim: Option<&Claim>) -> Result<(), String> {
        let seen = lock(&self.seen);
        let claim = claim.ok_or("nothing is claimed")?;
        let grant = seen.grants.get(identity).ok_or("nobody holds the claim")?;
        if (grant.host.as_str(), grant.epoch) != (ctx.name(), ctx.epoch) {
            return Err(format!("{} holds the claim", grant.host));
        }
        if !claim.leased {
            return Err("its lease is over".into());
        }
        if asked.thief {
            return Err("for somebody who has what the chain shows".into());
        }
        let nonce = claim.nonce.parse().unwrap_or(0);
        let earlier: Vec<&Run> = seen.runs.iter().filter(|run| run.identity == *identity).collect();
        match (claim.state, asked.call.flow()) {
            (State::Settled, _) => {
                if self.paid(nonce).is_none() {
                    return Err("it is called settled, and nothing was paid".into());
                }
                if !matches!(claim.kept, Kept::None) {
                    return Err(format!("there is an answer: {:?}", claim.kept));
                }
                let free = earlier.iter().filter(|run| run.paid_already).count();
                if claim.runs > FREE_RUNS || free > FREE_RUNS as usize {
                    return Err(format!("{free} runs went before it"));
                }
                Ok(())
            }
            (State::Claimed, Flow::Authorization) if !seen.verified.contains(&nonce) => {
                Err("nobody found the payment valid".into())
            }
            (State::Claimed, Flow::Authorization) => Ok(()),
            (state, flow) => Err(format!("{flow:?} and {}", state.as_str())),
        }
    }
}

/// The facilitator.
impl Book {
    pub fn verified(&self, nonce: i64) {
        lock(&self.seen).verified.insert(nonce);
    }

    pub fn settles(&self, nonce: i64) -> u64 {
        lock(&self.seen).settles.get(&nonce).map_or(0, |(_, count)| *count)
    }

    pub fn settle_asked(&self, nonce: i64, body: &[u8]) {
        let raw = |name: &str| -> Option<Box<serde_json::value::RawValue>> {
            let body: BTreeMap<String, Box<serde_json::value::RawValue>> = serde_json::from_slice(body).ok()?;
            body.get(name).cloned()
        };
        let Some(Ok(payment)) = raw("paymentPayload").map(|raw| Payment::read(&raw)) else {
            return self.world.fail("a settle was asked for what is no payment".into());
        };
        let identity = payment.identity;
        let claim = self.claim(&identity);
        let mut seen = lock(&self.seen);
        let (bodies, count) = seen.settles.entry(nonce).or_default();
        *count += 1;
        bodies.insert(body.to_vec());
        let (different, again) = (bodies.len(), *count > 1);
        let upfront = raw("paymentRequirements").is_some_and(|offer| offer.get().contains("upfront"));
        let has_output =
            seen.runs.iter().any(|run| run.identity == identity && run.end == Some(End::Output) && !run.paid_already);
        drop(seen);
        self.world.gate(|s| {
            s.settles += 1;
            s.settles_again += u64::from(again);
        });
        match claim {
            None => self.fail(&identity, "a settle went out, and nothing is claimed"),
            Some(claim) if claim.settles == 0 => self.fail(&identity, "a settle went out, and no row says so"),
            Some(claim) if different > claim.settles as usize => {
                self.fail(&identity, &format!("{different} different settles were begun {} times", claim.settles));
            }
            Some(_) if !upfront && !has_output => self.fail(&identity, "a settle went out before there was an output"),
            Some(_) => {}
        }
    }
}

/// What callers are told.
impl Book {
    pub fn number(&self) -> u64 {
        let mut seen = lock(&self.seen);
        seen.requests += 1;
        seen.requests
    }

    /// Before it leaves the process, whether or not anybody is there to read it.
    pub fn told(&self, asked: &Asked, told: &Told, whole: &str) {
        let Some(paid) = &asked.paid else {
            if whole.contains(super::shop::SECRET) {
                self.world.fail(format!("an output left for nothing: {whole}"));
            }
            return;
        };
        if let Err(why) = self.may_be_told(asked, paid, told, whole) {
            self.fail(&paid.identity, &format!("request {} was told {told:?}: {why}", asked.id));
        }
    }

    fn may_be_told(&self, asked: &Asked, paid: &Paid, told: &Told, whole: &str) -> Result<(), String> {
        let transfer = self.paid(paid.nonce);
        if let Told::Challenge { reason, .. } = told {
            let known = ["already_settled", "payment_already_used", "payment_identifier_conflict"];
            return match asked.after_the_transfer && !known.contains(&reason.as_str()) {
                true => Err("it is paid, and the payer is asked to pay".into()),
                false => Ok(()),
            };
        }
        if !whole.contains(super::shop::SECRET) {
            return Ok(());
        }
        let Told::Output { text, receipt } = told else { return Err("an output hides in it".into()) };
        let transfer = transfer.ok_or("nothing was paid")?;
        if transfer.amount != i128::from(PRICE) {
            return Err(format!("{} was paid", transfer.amount));
        }
        let claim = self.claim(&paid.identity).ok_or("nothing is claimed")?;
        if claim.state != State::Settled {
            return Err(format!("the claim is {}", claim.state.as_str()));
        }
        let receipt = receipt.as_ref().ok_or("there is no receipt")?;
        if receipt["success"] != true || receipt["transaction"] != transfer.hash.as_str() {
            return Err(format!("the receipt {receipt} is not the chain's"));
        }
        let mut seen = lock(&self.seen);
        let run: usize = text.split(' ').nth(1).and_then(|n| n.parse().ok()).ok_or("whose output is it?")?;
        let run = seen.runs.get(run).ok_or("no run gave it")?.clone();
        if run.identity != paid.identity || !text.contains(&format!(" of {} ", asked.call.n)) {
            return Err("it is another call's".into());
        }
        let proof = seen.proofs.get(&paid.identity).copied().unwrap_or_default();
        let same = |mine: Option<[u8; 32]>, theirs: Option<[u8; 32]>| mine.is_some() && mine == theirs;
        let proven = same(proof.identifier, asked.proof.identifier) || same(proof.session, asked.proof.session);
        if !proven && run.request != asked.id {
            return Err("to somebody without proof".into());
        }
        let unsure = seen.unsure.contains(&paid.identity);
        let outputs = seen.outputs.entry(paid.identity).or_default();
        outputs.insert(text.clone());
        if outputs.len() > 1 && !unsure {
            return Err(format!("one payment, {} outputs", outputs.len()));
        }
        drop(seen);
        self.world.gate(|s| s.stored += u64::from(run.request != asked.id));
        Ok(())
    }
}
