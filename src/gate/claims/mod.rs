//! Claims: one row per payment, its state, who works on it, and what it bought. The row is made after the local checks
//! and before the facilitator is asked, so over all replicas one request goes on and every other one learns of it.
//!
//! Every change names the lease's token: a holder that was frozen past its lease changes nothing, and must deliver
//! nothing ([`Lost`]). PostgreSQL for several replicas, SQLite for one gate; both are held to one table of promises
//! (`tests`). The clock is the store's.
//!
//! Settle requests and answers are sealed under the key ring, each for its own row; identifiers and sessions are hashed.

mod operator;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;
mod states;
mod store;
#[cfg(test)]
pub(super) mod tests;

use std::fmt;
#[cfg(feature = "sqlite")]
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

pub use operator::{ClaimEvent, SHORTEST};
pub use states::{Arrow, State};
pub use store::{Store, Stored, Taken, Written};

use super::extensions::Identifier;
use super::payment::{CallKey, Identity};
#[cfg(feature = "postgres")]
use crate::ledger::Database;
use crate::ledger::LedgerError;
use crate::ports::World;
use crate::seal::KeyRing;

#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// A change may have been written all the same.
    #[error(transparent)]
    Store(#[from] LedgerError),
    /// Nothing was written, and nothing will be.
    #[error("{0} (nothing was written)")]
    NotWritten(LedgerError),
    /// A sealed body of this row cannot be opened: its key left the ring, or the row was altered.
    #[error("a sealed body of claim {0} cannot be opened")]
    Sealed(String),
}

impl ClaimError {
    /// Whether a change is certainly not in the store.
    pub fn wrote_nothing(&self) -> bool {
        matches!(self, ClaimError::NotWritten(_) | ClaimError::Store(LedgerError::Busy) | ClaimError::Sealed(_))
    }
}

/// Whoever holds it is the one that works on the claim. Its token is no secret of anybody's, but is shown nowhere.
#[derive(Clone)]
pub struct Lease {
    pub identity: Identity,
    token: [u8; 16],
    /// The last moment before which the store was not yet asked, and then said that it holds.
    held_at: Arc<Mutex<Instant>>,
}

impl Lease {
    pub fn new(identity: Identity, token: [u8; 16]) -> Lease {
        Lease { identity, token, held_at: Arc::new(Mutex::new(Instant::now())) }
    }

    fn held_since(&self, asked: Instant) {
        *self.held_at.lock().unwrap_or_else(PoisonError::into_inner) = asked;
    }

    /// As if its holder had stood still for so long.
    #[cfg(test)]
    pub(super) fn stand_still(&self, long: Duration) {
        self.held_since(Instant::now() - long);
    }
}

impl PartialEq for Lease {
    fn eq(&self, other: &Lease) -> bool {
        (self.identity, self.token) == (other.identity, other.token)
    }
}

impl Eq for Lease {}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({}…)", self.identity.short())
    }
}

/// The claim is somebody else's by now, or in another state: stop, and deliver nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost;

/// What says that a caller is the payer; nothing of it is on the chain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Proof {
    pub identifier: Option<[u8; 32]>,
    /// Of the MCP session, whose signed name is its client's secret.
    pub session: Option<[u8; 32]>,
}

impl Proof {
    pub fn new(identifier: Option<&Identifier>, session: Option<&str>) -> Proof {
        let session = session.map(|session| {
            Sha256::new().chain_update("tollway gate session\0").chain_update(session).finalize().into()
        });
        Proof { identifier: identifier.map(Identifier::hash), session }
    }
}

/// A payment that passed the local checks.
#[derive(Debug, Clone, Copy)]
pub struct NewClaim<'a> {
    pub identity: Identity,
    /// `prices::Item::scope`.
    pub scope: &'a str,
    pub call: &'a CallKey,
    pub proof: Proof,
    /// CAIP-2.
    pub network: &'a str,
    pub payer: &'a str,
    pub nonce: &'a str,
    /// `payment::Payment::dies_at`.
    pub dies_at: u64,
    /// `payment::Payment::earliest`. The first claim's stays: from there on the chain's history of this payment is
    /// looked for.
    pub seen_at: u64,
    /// The requirements, raw.
    pub offer: &'a RawValue,
}

#[derive(Debug)]
pub enum Claimed {
    /// This request goes on. `settles`: how often `/settle` was begun under the claims of this payment before.
    Fresh { lease: Lease, settles: u32 },
    /// Another one was first: its claim decides.
    Known(Box<Claim>),
    /// The identifier names another payment for this item.
    IdentifierConflict,
}

/// What is kept of a settled payment's last run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Nothing yet: it runs, or it failed.
    None,
    Answer,
    /// The last answer was `input_required`.
    Asks,
    TooLarge,
}

impl Kept {
    const ALL: [Kept; 4] = [Kept::None, Kept::Answer, Kept::Asks, Kept::TooLarge];

    fn as_str(self) -> &'static str {
        match self {
            Kept::None => "none",
            Kept::Answer => "kept",
            Kept::Asks => "asks",
            Kept::TooLarge => "too_large",
        }
    }

    fn parse(text: &str) -> Option<Kept> {
        Kept::ALL.into_iter().find(|kept| kept.as_str() == text)
    }
}

/// A claim as it stands. What is sealed is read apart.
#[derive(Debug, Clone)]
pub struct Claim {
    pub identity: Identity,
    pub state: State,
    pub scope: String,
    pub call_hash: [u8; 32],
    proof: Proof,
    pub network: String,
    pub payer: String,
    pub nonce: String,
    pub dies_at: u64,
    pub seen_at: u64,
    /// When it was first claimed, unix milliseconds of the store.
    pub created_ms: u64,
    pub offer: Box<RawValue>,
    /// Somebody works on it now.
    pub leased: bool,
    /// How often `/settle` was begun; it survives a new claim.
    pub settles: u32,
    /// Free runs after the settlement.
    pub runs: u32,
    pub receipt: Option<Box<RawValue>>,
    pub reason: Option<String>,
    pub kept: Kept,
}

impl Claim {
    /// Whether whoever brings this is the payer.
    pub fn proven_by(&self, proof: &Proof) -> bool {
        let same = |mine: Option<[u8; 32]>, theirs: Option<[u8; 32]>| {
            mine.zip(theirs)
                .is_some_and(|(mine, theirs)| aws_lc_rs::constant_time::verify_slices_are_equal(&mine, &theirs).is_ok())
        };
        same(self.proof.identifier, proof.identifier) || same(self.proof.session, proof.session)
    }

    /// The payment was made with an identifier, and this is another one.
    pub fn identifier_differs(&self, proof: &Proof) -> bool {
        matches!((self.proof.identifier, proof.identifier), (Some(mine), Some(theirs)) if mine != theirs)
    }

    pub fn is_for(&self, call: &CallKey) -> bool {
        self.call_hash == call.call
    }
}

/// A claim for tests of what is decided by one.
#[cfg(test)]
pub(super) fn fake(state: State, call_hash: [u8; 32], proof: Proof) -> Claim {
    Claim {
        identity: Identity([0; 32]),
        state,
        scope: "tool:search".into(),
        call_hash,
        proof,
        network: "stellar:testnet".into(),
        payer: "GA".into(),
        nonce: "1".into(),
        dies_at: 0,
        seen_at: 0,
        created_ms: 0,
        offer: RawValue::NULL.to_owned(),
        leased: false,
        settles: 0,
        runs: 0,
        receipt: None,
        reason: None,
        kept: Kept::None,
    }
}

/// An answer to keep with the arrow that is taken.
#[derive(Clone, Copy)]
pub enum Answer<'a> {
    /// The handler's raw result of this round, without the receipt.
    Keep {
        round: &'a [u8; 32],
        result: &'a RawValue,
        asks: bool,
    },
    TooLarge,
    /// It failed, and may be run again. What it said is kept for whoever has no run left.
    Failed {
        round: &'a [u8; 32],
        said: &'a RawValue,
    },
}

/// What is written together with an arrow.
#[derive(Clone, Copy, Default)]
pub struct Change<'a> {
    /// A stable word, with the facilitator's own words behind it where there are any; at most 300 characters are kept.
    pub reason: Option<&'a str>,
    /// The exact settle request. Only with [`Arrow::SETTLE`].
    pub settle_request: Option<&'a [u8]>,
    /// The `SettlementResponse`. Required by every arrow to `settled` that the claim did not have one before.
    pub receipt: Option<&'a RawValue>,
    pub answer: Option<Answer<'a>>,
    /// When the sweep looks at it again.
    pub again_in: Option<Duration>,
}

/// How long things last.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// A lease that is not renewed is over after this long.
    pub lease: Duration,
    /// `response_cache.ttl`.
    pub answers: Duration,
    /// Free runs of one payment after its settlement.
    pub max_runs: u32,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { lease: Duration::from_secs(30), answers: Duration::from_secs(3_600), max_runs: 3 }
    }
}

/// One overdue claim that the sweep holds now.
#[derive(Debug)]
pub struct Due {
    pub lease: Lease,
    pub claim: Claim,
}

pub struct Claims {
    store: Arc<dyn Store>,
    world: World,
    ring: KeyRing,
    terms: Terms,
    #[cfg(test)]
    lost: Mutex<Vec<(State, bool)>>,
}

/// Without a moment of its own an unknown claim is looked at again after this long, milliseconds.
const AGAIN_MS: i64 = 5_000;
const MAX_REASON: usize = 300;

impl Claims {
    /// One gate alone. The file is made with mode 0600 where there is none, and brought up to this program's schema.
    #[cfg(feature = "sqlite")]
    pub async fn open_sqlite(path: &Path, world: World, ring: KeyRing, terms: Terms) -> Result<Claims, ClaimError> {
        let store = Claims::file(path, world.clone()).await?;
        Ok(Claims::on(store, world, ring, terms))
    }

    /// What [`Claims::open_sqlite`] keeps them in.
    #[cfg(feature = "sqlite")]
    pub async fn file(path: &Path, world: World) -> Result<Arc<dyn Store>, ClaimError> {
        Ok(Arc::new(sqlite::Sqlite::open(path, world).await?))
    }

    /// Any number of replicas. A schema that is not this program's is refused (`tollway migrate`).
    #[cfg(feature = "postgres")]
    pub async fn connect(database: &Database, world: World, ring: KeyRing, terms: Terms) -> Result<Claims, ClaimError> {
        let store = Claims::database(database).await?;
        Ok(Claims::on(store, world, ring, terms))
    }

    /// What [`Claims::connect`] keeps them in.
    #[cfg(feature = "postgres")]
    pub async fn database(database: &Database) -> Result<Arc<dyn Store>, ClaimError> {
        Ok(Arc::new(postgres::Postgres::connect(database).await?))
    }

    pub fn on(store: Arc<dyn Store>, world: World, ring: KeyRing, terms: Terms) -> Claims {
        Claims {
            store,
            world,
            ring,
            terms,
            #[cfg(test)]
            lost: Mutex::default(),
        }
    }

    /// From now on the store's answer to an arrow to this state is lost, whether or not it was `written`.
    #[cfg(test)]
    pub(super) fn lose(&self, to: State, written: bool) {
        self.lost.lock().unwrap().push((to, written));
    }

    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    pub async fn look(&self, identity: &Identity) -> Result<Option<Claim>, ClaimError> {
        self.store.look(identity).await
    }

    /// Makes the claim, or takes over one that was given back, that failed, or whose holder is gone before anything was
    /// broadcast.
    pub async fn claim(&self, new: &NewClaim<'_>) -> Result<Claimed, ClaimError> {
        let lease = Lease::new(new.identity, self.world.random());
        // Whoever took it over may be gone again by the time it is looked at.
        for _ in 0..3 {
            match self.store.claim(new, &lease, millis(self.terms.lease)).await? {
                Taken::Fresh { settles } => return Ok(Claimed::Fresh { lease, settles }),
                Taken::Known => {
                    if let Some(claim) = self.look(&new.identity).await? {
                        return Ok(Claimed::Known(Box::new(claim)));
                    }
                }
                // Of two requests with this payment at one moment the later may be told of its own twin's identifier.
                Taken::IdentifierConflict => {
                    return Ok(match self.look(&new.identity).await? {
                        Some(claim)
                            if !claim.state.may_be_claimed() && claim.proof.identifier == new.proof.identifier =>
                        {
                            Claimed::Known(Box::new(claim))
                        }
                        _ => Claimed::IdentifierConflict,
                    });
                }
            }
        }
        Err(LedgerError::Busy.into())
    }

    /// While the handler runs. `Lost`: stop it if that can be done, and deliver nothing.
    pub async fn renew(&self, lease: &Lease) -> Result<Result<(), Lost>, ClaimError> {
        let asked = Instant::now();
        let held = self.store.renew(lease, millis(self.terms.lease)).await?;
        if !held {
            return Ok(Err(Lost));
        }
        lease.held_since(asked);
        Ok(Ok(()))
    }

    /// Whether it cannot be over, nor be soon, by how long ago it was had. A holder that stood still asks the store
    /// before it begins what another may have begun meanwhile.
    pub fn surely_holds(&self, lease: &Lease) -> bool {
        lease.held_at.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < self.terms.lease / 2
    }

    /// Takes an arrow. An error leaves open whether it was taken, unless it says so ([`ClaimError::wrote_nothing`]); the
    /// same call again is safe only after [`Claims::look`].
    pub async fn advance(
        &self,
        lease: &Lease,
        arrow: Arrow,
        change: Change<'_>,
    ) -> Result<Result<(), Lost>, ClaimError> {
        let (kept, answer) = match change.answer {
            None => (None, None),
            Some(Answer::Failed { round, said }) => {
                (Some(Kept::None), Some(self.sealed(&lease.identity, &failure_of(round), said)))
            }
            Some(Answer::TooLarge) => (Some(Kept::TooLarge), None),
            Some(Answer::Keep { round, result, asks }) => {
                let kept = if asks { Kept::Asks } else { Kept::Answer };
                (Some(kept), Some(self.sealed(&lease.identity, round, result)))
            }
        };
        let request = change.settle_request;
        let written = Written {
            arrow,
            lease_ms: millis(self.terms.lease),
            reason: change.reason.map(|reason| reason.chars().take(MAX_REASON).collect()),
            settle_request: request.map(|plain| self.ring.seal(&self.world, &request_context(&lease.identity), plain)),
            receipt: change.receipt.map(RawValue::get),
            kept,
            answer,
            again_in_ms: change.again_in.map_or(AGAIN_MS, millis),
            answers_ms: millis(self.terms.answers),
        };
        #[cfg(test)]
        {
            let lost = self.lost.lock().unwrap().iter().find(|(to, _)| *to == arrow.to).map(|(_, written)| *written);
            if let Some(is_written) = lost {
                if is_written {
                    self.store.advance(lease, &written).await?;
                }
                return Err(LedgerError::Unavailable("its answer was lost".into()).into());
            }
        }
        let asked = Instant::now();
        if !self.store.advance(lease, &written).await? {
            return Ok(Err(Lost));
        }
        if arrow.keeps_lease {
            lease.held_since(asked);
        }
        Ok(Ok(()))
    }

    /// Takes the lease of a claim in `state` on which nobody works. `counts`: it is one of the free runs of a settled
    /// payment, of which there are [`Terms::max_runs`]. `None`: somebody works on it, it is in another state, no run is
    /// left, or there is an answer by now.
    pub async fn take(&self, identity: &Identity, state: State, counts: bool) -> Result<Option<Lease>, ClaimError> {
        let lease = Lease::new(*identity, self.world.random());
        let max_runs = if counts { Some(i64::from(self.terms.max_runs)) } else { None };
        let taken = self.store.take(&lease, state, max_runs, millis(self.terms.lease)).await?;
        Ok(taken.then_some(lease))
    }

    /// The stored result of a round, for a caller with proof; `None` where none is kept any more.
    pub async fn answer(&self, identity: &Identity, round: &[u8; 32]) -> Result<Option<Box<RawValue>>, ClaimError> {
        let Some(sealed) = self.store.answer(identity, round).await? else { return Ok(None) };
        let broken = || ClaimError::Sealed(identity.short());
        let plain = self.ring.open(&answer_context(identity, round), &sealed).map_err(|_| broken())?;
        let text = String::from_utf8(plain).map_err(|_| broken())?;
        RawValue::from_string(text).map(Some).map_err(|_| broken())
    }

    /// What the last run that failed said, as it was given to [`Answer::Failed`].
    pub async fn failure(&self, identity: &Identity, round: &[u8; 32]) -> Result<Option<Box<RawValue>>, ClaimError> {
        self.answer(identity, &failure_of(round)).await
    }

    fn sealed(&self, identity: &Identity, round: &[u8; 32], body: &RawValue) -> ([u8; 32], Vec<u8>, i64) {
        let sealed = self.ring.seal(&self.world, &answer_context(identity, round), body.get().as_bytes());
        (*round, sealed, millis(self.terms.answers))
    }

    /// The exact settle request of a claim whose end is open.
    pub async fn settle_request(&self, identity: &Identity) -> Result<Option<Vec<u8>>, ClaimError> {
        let Some(sealed) = self.store.settle_request(identity).await? else { return Ok(None) };
        let opened = self.ring.open(&request_context(identity), &sealed);
        opened.map(Some).map_err(|_| ClaimError::Sealed(identity.short()))
    }

    #[cfg(test)]
    async fn sealed_request(&self, identity: &Identity) -> Option<Vec<u8>> {
        self.store.settle_request(identity).await.ok().flatten()
    }

    /// What a dead holder left behind: `claimed` becomes released, `settling` becomes unknown. Then at most `most`
    /// unknown claims that are due, each under a lease of the caller's. Of several sweeps at once each gets others.
    /// Every network has its share, in which the one that is longest due and the newest take turns: what nobody can end
    /// keeps nothing else waiting.
    pub async fn due(&self, most: u32) -> Result<Vec<Due>, ClaimError> {
        self.store.expire().await?;
        let token = self.world.random();
        let claims = self.store.due(&token, i64::from(most), millis(self.terms.lease)).await?;
        let due = |claim: Claim| Due { lease: Lease::new(claim.identity, token), claim };
        Ok(claims.into_iter().map(due).collect())
    }

    /// Removes the settle requests of failed claims whose authorization ended before `dead` (as
    /// [`NewClaim::dies_at`]), at most `most`.
    pub async fn forget_requests(&self, network: &str, dead: u64, most: u32) -> Result<u64, ClaimError> {
        let dead = i64::try_from(dead).unwrap_or(i64::MAX);
        self.store.forget_requests(network, dead, i64::from(most)).await
    }

    /// Removes answers that are too old, at most `most`. Identities stay for ever.
    pub async fn forget_answers(&self, most: u32) -> Result<u64, ClaimError> {
        self.store.forget_answers(i64::from(most)).await
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4)
}

fn request_context(identity: &Identity) -> String {
    format!("gate settle request {}", hex::encode(identity.0))
}

/// Where a failure of a round is kept: beside its answer, which it is not.
fn failure_of(round: &[u8; 32]) -> [u8; 32] {
    Sha256::new().chain_update("tollway gate failure\0").chain_update(round).finalize().into()
}

fn answer_context(identity: &Identity, round: &[u8; 32]) -> String {
    format!("gate answer {} {}", hex::encode(identity.0), hex::encode(round))
}

/// The columns of [`Claim`] as both stores read them.
struct Columns {
    identity: Vec<u8>,
    state: String,
    scope: String,
    call_hash: Vec<u8>,
    identifier_hash: Option<Vec<u8>>,
    session_hash: Option<Vec<u8>>,
    network: String,
    payer: String,
    nonce: String,
    dies_at: i64,
    seen_at: i64,
    created: i64,
    offer: String,
    leased: bool,
    settles: i64,
    runs: i64,
    receipt: Option<String>,
    reason: Option<String>,
    answer: String,
}

/// In the order of [`Columns`]; behind them the question whether somebody works on it differs.
const COLUMNS: &str = "identity, state, scope, call_hash, identifier_hash, session_hash, network, payer, nonce, dies_at, \
    offer, settles, runs, receipt, reason, answer, seen_at, created";

impl Columns {
    fn read(self) -> Result<Claim, LedgerError> {
        let broken = |what: &str| LedgerError::Inconsistent(format!("a claim's {what} cannot be read"));
        let hash = |bytes: Vec<u8>, what| <[u8; 32]>::try_from(bytes).map_err(|_| broken(what));
        let raw = |text: String, what| RawValue::from_string(text).map_err(|_| broken(what));
        let moment = |n: i64, what| u64::try_from(n).map_err(|_| broken(what));
        let count = |n: i64, what| u32::try_from(n).map_err(|_| broken(what));
        Ok(Claim {
            identity: Identity(hash(self.identity, "identity")?),
            state: State::parse(&self.state).ok_or_else(|| broken("state"))?,
            scope: self.scope,
            call_hash: hash(self.call_hash, "call_hash")?,
            proof: Proof {
                identifier: self.identifier_hash.map(|bytes| hash(bytes, "identifier_hash")).transpose()?,
                session: self.session_hash.map(|bytes| hash(bytes, "session_hash")).transpose()?,
            },
            network: self.network,
            payer: self.payer,
            nonce: self.nonce,
            dies_at: moment(self.dies_at, "dies_at")?,
            seen_at: moment(self.seen_at, "seen_at")?,
            created_ms: moment(self.created, "created")?,
            offer: raw(self.offer, "offer")?,
            leased: self.leased,
            settles: count(self.settles, "settles")?,
            runs: count(self.runs, "runs")?,
            receipt: self.receipt.map(|text| raw(text, "receipt")).transpose()?,
            reason: self.reason,
            kept: Kept::parse(&self.answer).ok_or_else(|| broken("answer"))?,
        })
    }
}
