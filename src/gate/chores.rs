//! What goes on beside the requests: settlements whose end is open, what has grown too old, and whether every offer can
//! be settled at all. Several gates on one store share this work; none of it needs to be done by a certain one.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::desk::Gate;
use super::shelf::Support;
use super::sweep::Resolved;
use crate::money::Network;
use crate::telemetry;

/// Of one look at what a facilitator supports.
const SUPPORTED: Duration = Duration::from_secs(10);
/// Between two removals of what is old.
const TIDY: Duration = Duration::from_secs(60);
/// Claims of one sweep, and rows that are removed at once.
const AT_ONCE: u32 = 32;
const TIDIED: u32 = 1_000;

impl Gate {
    /// Compares every offer with what its facilitator supports, and begins the work that goes on beside the requests:
    /// that comparison again and again, lost settlements, what has grown too old. Until `stopped` is cancelled.
    pub async fn start(&self, stopped: CancellationToken) {
        self.compare().await;
        let (sweeps, tidies, compares) = (self.clone(), self.clone(), self.clone());
        let settings = self.inner().seller.settings;
        let (stop, halt) = (stopped.clone(), stopped.clone());
        self.inner().world.spawn.spawn(Box::pin(async move {
            again_and_again(stop, settings.sweep, async || sweeps.sweep().await).await;
        }));
        self.inner().world.spawn.spawn(Box::pin(async move {
            again_and_again(halt, TIDY, async || tidies.tidy().await).await;
        }));
        self.inner().world.spawn.spawn(Box::pin(async move {
            again_and_again(stopped, settings.compare, async || compares.compare().await).await;
        }));
    }

    /// One sweep. It is begun by [`Gate::start`]; a program that has a clock of its own may call it.
    pub async fn sweep(&self) {
        let inner = self.inner();
        match inner.seller.sweep(&inner.chains, AT_ONCE, inner.world.unix_ms()).await {
            Ok(all) => {
                for swept in &all {
                    self.tell_of_swept(swept);
                    telemetry::GATE_SWEPT.one([match swept.resolved {
                        Resolved::Settled => "settled",
                        Resolved::Failed => "failed",
                        Resolved::StillUnknown => "unknown",
                        Resolved::Lost => "lost",
                    }]);
                }
            }
            Err(error) => tracing::warn!(%error, "claims could not be swept"),
        }
    }

    /// Removes what has grown too old. It is begun by [`Gate::start`] too.
    pub async fn tidy(&self) {
        let inner = self.inner();
        if let Err(error) = inner.seller.claims.forget_answers(TIDIED).await {
            tracing::warn!(%error, "old answers could not be removed");
        }
        for (network, dead) in self.dead_before().await {
            if let Err(error) = inner.seller.claims.forget_requests(network.as_str(), dead, TIDIED).await {
                tracing::warn!(%error, "settle requests of dead authorizations could not be removed");
            }
        }
    }

    /// By network, the ledger or second of now. Where no chain is asked, nothing is known to be dead.
    async fn dead_before(&self) -> Vec<(Network, u64)> {
        let inner = self.inner();
        let mut all = Vec::new();
        for network in inner.seller.facilitators.keys() {
            let now = match network.namespace() {
                "stellar" => match inner.chains.get(network) {
                    Some(chain) => chain.ledger().await.ok().map(|point| u64::from(point.sequence)),
                    None => None,
                },
                _ => Some(inner.world.unix_ms() / 1_000),
            };
            all.extend(now.map(|now| (network.clone(), now)));
        }
        all
    }

    /// Asks every facilitator what it supports. One that does not answer leaves things as they are.
    pub(super) async fn compare(&self) {
        let inner = self.inner();
        let asked = inner.seller.facilitators.iter().map(|(network, facilitator)| async move {
            match facilitator.supported(SUPPORTED).await {
                Ok(kinds) => {
                    let ours = kinds.into_iter().filter(|kind| kind.network == network.as_str());
                    Some((network.clone(), ours.map(|kind| kind.scheme).collect::<BTreeSet<_>>()))
                }
                Err(error) => {
                    tracing::warn!(%network, %error, "a facilitator does not say what it supports");
                    None
                }
            }
        });
        let heard: Support = join_all(asked).await.into_iter().flatten().collect::<BTreeMap<_, _>>();
        let gone = inner.shelf.supported(heard);
        telemetry::GATE_UNSETTLED.set([], gone.len() as f64);
        if !gone.is_empty() {
            let first = gone.iter().take(20).map(String::as_str).collect::<Vec<_>>().join(", ");
            tracing::error!(
                offers = gone.len(),
                first,
                "offers are not advertised: their facilitator does not settle them"
            );
        }
    }
}

async fn again_and_again<F: Future<Output = ()>>(
    stopped: CancellationToken,
    pause: Duration,
    mut work: impl FnMut() -> F,
) {
    loop {
        let wait = std::pin::pin!(sleep(pause));
        if let Either::Left(_) = select(std::pin::pin!(stopped.cancelled()), wait).await {
            return;
        }
        work().await;
    }
}
