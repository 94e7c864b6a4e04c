//! Callers that wait for the outcome of a claim that somebody else works on, perhaps in another process. Whoever is the
//! first to wait for a payment looks at its claim again and again; the others of this process wait for that one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use tokio::time::{sleep, timeout};

use super::claims::{Claim, State};
use super::payment::Identity;
use super::sell::Seller;

const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

type Looking = BoxFuture<'static, ()>;

#[derive(Default)]
pub(super) struct Waits(Mutex<BTreeMap<Identity, WeakShared<Looking>>>);

impl Waits {
    /// Returns when nobody works on the claim any more, or after `limit`.
    pub async fn over(&self, seller: &Arc<Seller>, identity: Identity, limit: Duration) {
        let looking = self.join(seller, identity);
        let _ = timeout(limit, looking).await;
    }

    fn join(&self, seller: &Arc<Seller>, identity: Identity) -> Shared<Looking> {
        let mut waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let running = waits.get(&identity).and_then(WeakShared::upgrade).filter(|looking| looking.peek().is_none());
        if let Some(looking) = running {
            return looking;
        }
        waits.retain(|_, looking| looking.upgrade().is_some_and(|looking| looking.peek().is_none()));
        let looking = look(seller.clone(), identity).boxed().shared();
        if let Some(weak) = looking.downgrade() {
            waits.insert(identity, weak);
        }
        looking
    }
}

async fn look(seller: Arc<Seller>, identity: Identity) {
    let mut pause = FIRST;
    loop {
        sleep(pause).await;
        pause = (pause * 3 / 2).min(LONGEST);
        match seller.claims.look(&identity).await {
            Ok(Some(claim)) if is_busy(&claim) => {}
            Ok(_) => return,
            // The same question is asked by whoever waits; it has an answer for this.
            Err(_) => return,
        }
    }
}

/// Somebody works on it. A `settling` one without a lease is the sweep's, and has no outcome yet either.
fn is_busy(claim: &Claim) -> bool {
    match claim.state {
        State::Settling => true,
        State::Claimed | State::Settled | State::Failed => claim.leased,
        State::Unknown | State::Released => false,
    }
}
