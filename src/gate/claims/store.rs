//! What the claims are kept in: a port, as the ledger is one. Each method is one transaction by the store's clock.
//! Whoever stands between a gate and its store (the simulation) sees what both stores are asked.

use futures_util::future::BoxFuture;

use super::operator::EventRow;
use super::{Arrow, Claim, ClaimError, Identity, Kept, Lease, NewClaim, State};

pub type Stored<'a, T> = BoxFuture<'a, Result<T, ClaimError>>;

/// [`super::Change`] as it is written. No Debug: what is in it is sealed, and still nobody's business.
#[derive(Clone)]
pub struct Written<'a> {
    pub arrow: Arrow,
    pub lease_ms: i64,
    pub reason: Option<String>,
    /// Sealed.
    pub settle_request: Option<Vec<u8>>,
    pub receipt: Option<&'a str>,
    pub kept: Option<Kept>,
    /// Round, sealed body, milliseconds.
    pub answer: Option<([u8; 32], Vec<u8>, i64)>,
    pub again_in_ms: i64,
    /// Answers that are there live this long from the moment on at which they became the payer's. One that was written
    /// just before, as most are, is not written again to live a hundredth longer.
    pub answers_ms: i64,
}

/// What became of the wish to have a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It is this lease's now. `settles`: how often `/settle` was begun under the claims of this payment before.
    Fresh { settles: u32 },
    /// It is known and cannot be had.
    Known,
    /// Its identifier is another payment's.
    IdentifierConflict,
}

pub trait Store: Send + Sync + 'static {
    fn look<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Option<Claim>>;
    fn claim<'a>(&'a self, new: &'a NewClaim<'a>, lease: &'a Lease, lease_ms: i64) -> Stored<'a, Taken>;
    /// Whether the lease still holds; so do the next two.
    fn renew<'a>(&'a self, lease: &'a Lease, lease_ms: i64) -> Stored<'a, bool>;
    fn advance<'a>(&'a self, lease: &'a Lease, written: &'a Written<'a>) -> Stored<'a, bool>;
    fn take<'a>(&'a self, lease: &'a Lease, state: State, max_runs: Option<i64>, lease_ms: i64) -> Stored<'a, bool>;
    /// Sealed, and only of a settled claim.
    fn answer<'a>(&'a self, identity: &'a Identity, round: &'a [u8; 32]) -> Stored<'a, Option<Vec<u8>>>;
    fn settle_request<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Option<Vec<u8>>>;
    /// What dead holders left becomes released or unknown.
    fn expire(&self) -> Stored<'_, ()>;
    /// Unknown claims that are due, each now under a lease of this token.
    fn due<'a>(&'a self, token: &'a [u8; 16], most: i64, lease_ms: i64) -> Stored<'a, Vec<Claim>>;
    fn list<'a>(&'a self, states: &'a [&'a str], most: i64) -> Stored<'a, Vec<Claim>>;
    fn between<'a>(&'a self, low: &'a [u8; 32], high: &'a [u8; 32]) -> Stored<'a, Vec<Claim>>;
    fn events<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Vec<EventRow>>;
    fn now_ms(&self) -> Stored<'_, i64>;
    fn forget_requests<'a>(&'a self, network: &'a str, dead: i64, most: i64) -> Stored<'a, u64>;
    fn forget_answers(&self, most: i64) -> Stored<'_, u64>;
}

/// Both databases have a method of its own for each of these.
macro_rules! is_a_store {
    ($store:ty) => {
        impl Store for $store {
            fn look<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Option<Claim>> {
                Box::pin(async move { self.look(identity).await.map_err(ClaimError::from) })
            }
            fn claim<'a>(&'a self, new: &'a NewClaim<'a>, lease: &'a Lease, lease_ms: i64) -> Stored<'a, Taken> {
                Box::pin(async move { self.claim(new, lease, lease_ms).await.map_err(ClaimError::from) })
            }
            fn renew<'a>(&'a self, lease: &'a Lease, lease_ms: i64) -> Stored<'a, bool> {
                Box::pin(async move { self.renew(lease, lease_ms).await.map_err(ClaimError::from) })
            }
            fn advance<'a>(&'a self, lease: &'a Lease, written: &'a Written<'a>) -> Stored<'a, bool> {
                Box::pin(self.advance(lease, written))
            }
            fn take<'a>(
                &'a self,
                lease: &'a Lease,
                state: State,
                max_runs: Option<i64>,
                lease_ms: i64,
            ) -> Stored<'a, bool> {
                Box::pin(async move { self.take(lease, state, max_runs, lease_ms).await.map_err(ClaimError::from) })
            }
            fn answer<'a>(&'a self, identity: &'a Identity, round: &'a [u8; 32]) -> Stored<'a, Option<Vec<u8>>> {
                Box::pin(async move { self.answer(identity, round).await.map_err(ClaimError::from) })
            }
            fn settle_request<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Option<Vec<u8>>> {
                Box::pin(async move { self.settle_request(identity).await.map_err(ClaimError::from) })
            }
            fn expire(&self) -> Stored<'_, ()> {
                Box::pin(async move { self.expire().await.map_err(ClaimError::from) })
            }
            fn due<'a>(&'a self, token: &'a [u8; 16], most: i64, lease_ms: i64) -> Stored<'a, Vec<Claim>> {
                Box::pin(async move { self.due(token, most, lease_ms).await.map_err(ClaimError::from) })
            }
            fn list<'a>(&'a self, states: &'a [&'a str], most: i64) -> Stored<'a, Vec<Claim>> {
                Box::pin(async move { self.list(states, most).await.map_err(ClaimError::from) })
            }
            fn between<'a>(&'a self, low: &'a [u8; 32], high: &'a [u8; 32]) -> Stored<'a, Vec<Claim>> {
                Box::pin(async move { self.between(low, high).await.map_err(ClaimError::from) })
            }
            fn events<'a>(&'a self, identity: &'a Identity) -> Stored<'a, Vec<EventRow>> {
                Box::pin(async move { self.events(identity).await.map_err(ClaimError::from) })
            }
            fn now_ms(&self) -> Stored<'_, i64> {
                Box::pin(async move { self.now_ms().await.map_err(ClaimError::from) })
            }
            fn forget_requests<'a>(&'a self, network: &'a str, dead: i64, most: i64) -> Stored<'a, u64> {
                Box::pin(async move { self.forget_requests(network, dead, most).await.map_err(ClaimError::from) })
            }
            fn forget_answers(&self, most: i64) -> Stored<'_, u64> {
                Box::pin(async move { self.forget_answers(most).await.map_err(ClaimError::from) })
            }
        }
    };
}

#[cfg(feature = "sqlite")]
is_a_store!(super::sqlite::Sqlite);
#[cfg(feature = "postgres")]
is_a_store!(super::postgres::Postgres);
