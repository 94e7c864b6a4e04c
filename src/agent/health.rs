//! How this process is, as of a moment ago: what it depends on is looked at in the background, and whoever asks gets the
//! last look. No request waits for a database, a chain or a signer because somebody wants to know how they are.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{join, join_all, select};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::server::Paying;
use crate::ledger::LedgerError;
use crate::money::Network;
use crate::ports::World;
use crate::telemetry;

/// A look that takes longer found nobody.
const WITHIN: Duration = Duration::from_secs(4);
/// Chain RPCs and the signer are looked at in every so manieth pass: their answers cost somebody else's service.
const OUTSIDE_EVERY: u64 = 3;

/// Why paid calls are refused at the moment. The words are public: nothing internal is in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Degraded {
    LedgerUnreachable,
    SignerUnreachable,
    RpcUnreachable,
    NoLimit,
}

impl Degraded {
    const ALL: [Degraded; 4] =
        [Degraded::LedgerUnreachable, Degraded::SignerUnreachable, Degraded::RpcUnreachable, Degraded::NoLimit];

    pub fn as_str(self) -> &'static str {
        match self {
            Degraded::LedgerUnreachable => "ledger_unreachable",
            Degraded::SignerUnreachable => "signer_unreachable",
            Degraded::RpcUnreachable => "rpc_unreachable",
            Degraded::NoLimit => "no_limit",
        }
    }
}

/// What the last look found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    ledger: bool,
    signer: bool,
    chains: bool,
    limited: bool,
}

/// The last look, and whether the process is going. It holds nothing that could be looked at.
pub struct Health {
    /// `false`: discovery only, which depends on nothing here.
    paying: bool,
    payable: Vec<Network>,
    seen: Mutex<Seen>,
    draining: AtomicBool,
}

impl Health {
    /// As it is at the end of a start: the ledger has answered, the others are taken to be there until the first look.
    pub(super) fn new(paying: Option<&Paying>, payable: Vec<Network>) -> Health {
        let limited = paying.is_none_or(|paying| paying.limited);
        let seen = Seen { ledger: true, signer: true, chains: true, limited };
        let paying = paying.is_some();
        let health = Health { paying, payable, seen: Mutex::new(seen), draining: AtomicBool::new(false) };
        health.tell();
        health
    }

    fn seen(&self) -> Seen {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_true(seen: Seen, reason: Degraded) -> bool {
        match reason {
            Degraded::LedgerUnreachable => !seen.ledger,
            Degraded::SignerUnreachable => !seen.signer,
            Degraded::RpcUnreachable => !seen.chains,
            Degraded::NoLimit => !seen.limited,
        }
    }

    /// The first reason, the heaviest first.
    fn degraded_by(&self, seen: Seen) -> Option<Degraded> {
        Degraded::ALL.into_iter().find(|reason| self.paying && Health::is_true(seen, *reason))
    }

    /// From now on `/readyz` says no: load balancers look away, and nothing else changes yet.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.tell();
    }

    /// `Err` is the reason. Without the ledger this process can answer nobody's paid call; a signer or a chain that is
    /// away costs the paid calls alone, and searching goes on.
    pub fn ready(&self) -> Result<(), &'static str> {
        if self.draining.load(Ordering::Relaxed) {
            return Err("draining");
        }
        match !self.paying || self.seen().ledger {
            true => Ok(()),
            false => Err(Degraded::LedgerUnreachable.as_str()),
        }
    }

    /// The body of `/healthz`.
    pub fn json(&self) -> Value {
        let status = if self.draining.load(Ordering::Relaxed) { "draining" } else { "ok" };
        let networks: Vec<&str> = self.payable.iter().map(Network::as_str).collect();
        let mut health = json!({"status": status, "discovery": "ready", "networks": networks});
        let reason = self.degraded_by(self.seen());
        health["payments"] = json!(match (self.paying, reason) {
            (false, _) => "disabled",
            (true, None) => "ready",
            (true, Some(_)) => "degraded",
        });
        if let Some(reason) = reason {
            health["reason"] = json!(reason.as_str());
        }
        health
    }

    fn tell(&self) {
        let seen = self.seen();
        let one = |is: bool| if is { 1.0 } else { 0.0 };
        telemetry::READY.set([], one(self.ready().is_ok()));
        if self.paying {
            telemetry::LEDGER_UP.set([], one(seen.ledger));
            for reason in Degraded::ALL {
                telemetry::PAYMENTS_DEGRADED.set([reason.as_str()], one(Health::is_true(seen, reason)));
            }
        }
    }
}

/// Looks, and writes what it found into a [`Health`].
pub struct Watch {
    pub(super) world: World,
    pub(super) paying: Paying,
    pub(super) health: Arc<Health>,
    pub(super) interval: Duration,
}

impl Watch {
    pub async fn run(self, shutdown: CancellationToken) {
        let mut pass = 0_u64;
        let looks = async {
            loop {
                self.look(pass.is_multiple_of(OUTSIDE_EVERY)).await;
                pass = pass.wrapping_add(1);
                sleep(self.interval).await;
            }
        };
        select(pin!(looks), pin!(shutdown.cancelled())).await;
    }

    async fn look(&self, outside: bool) {
        let before = self.health.seen();
        let others = async {
            match outside {
                true => join(self.signer(), self.chains()).await,
                false => (before.signer, before.chains),
            }
        };
        let (ledger, (signer, chains)) = join(self.ledger(), others).await;
        let limited = ledger.unwrap_or(before.limited);
        let now = Seen { ledger: ledger.is_some(), signer, chains, limited };
        if now != before {
            let reason = self.health.degraded_by(now).map_or("none", Degraded::as_str);
            tracing::warn!(reason, "what payments depend on has changed");
        }
        *self.health.seen.lock().unwrap_or_else(PoisonError::into_inner) = now;
        self.health.tell();
    }

    /// Whether some limit is there; `None` where the ledger does not answer, or has an older schema.
    async fn ledger(&self) -> Option<bool> {
        let looked = timeout(WITHIN, async {
            let ledger = &self.paying.ledger;
            ledger.ping().await?;
            let asked = self.world.unix_ms();
            let there = ledger.now_ms().await?;
            // Its answer was made on the way: half of the time is taken off.
            let here = asked.saturating_add(self.world.unix_ms().saturating_sub(asked) / 2);
            telemetry::LEDGER_CLOCK.set([], (there as f64 - here as f64) / 1000.0);
            Ok::<_, LedgerError>(!ledger.limits().await?.is_empty())
        });
        match looked.await {
            Ok(Ok(limited)) => Some(limited),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the ledger cannot be used");
                None
            }
            Err(_) => {
                tracing::warn!("the ledger does not answer");
                None
            }
        }
    }

    async fn signer(&self) -> bool {
        let Some(network) = self.health.payable.first() else { return true };
        timeout(WITHIN, self.paying.signer.is_there(network)).await.unwrap_or(false)
    }

    /// Every network that is paid on has RPCs that give a ledger number which can be believed.
    async fn chains(&self) -> bool {
        let asked = self.paying.chains.values().map(|chain| timeout(WITHIN, chain.ledger()));
        join_all(asked).await.into_iter().all(|answer| matches!(answer, Ok(Ok(_))))
    }
}
