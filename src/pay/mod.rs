//! The story of one paid call: `call` up to the signature, `send` from the signed bytes on (with `judge` and `check`),
//! `existing` and `recover` for the payments that are there already, `sweep` for what a call left open.

mod bounds;
mod call;
mod check;
mod error;
mod existing;
mod judge;
pub(crate) mod object;
mod output;
mod parcel;
mod recover;
mod send;
mod sweep;
mod terms;

pub use bounds::{Bounds, Deadlines};
pub use error::{Exceeded, PayError, Phase, Short};
pub use output::{CallOutcome, Ending};
pub use sweep::{Look, Sweep, SweepParts, SweepReport, SweepSettings, ends_about_ms, look, overdue_ms, question};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use crate::catalog::Catalog;
use crate::chain::stellar::{Balance, Stellar};
use crate::guard::Rules;
use crate::ledger::{BudgetLine, By, Ledger, LedgerError, Payment};
use crate::money::{AgentId, Amount, IdempotencyKey, Network, PaymentId, Unit};
use crate::policy::LivePolicy;
use crate::ports::World;
use crate::signer::Signer;
use crate::upstream::Upstream;
use crate::x402;
use send::Courier;
use terms::Terms;

/// What a lease has beyond the sum of the bounds on its steps.
const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// The longest words of a seller, signer or chain in an error.
const MAX_WORDS: usize = 300;

#[derive(Debug, Clone)]
pub struct Settings {
    pub rules: Rules,
    /// The operator's lists of assets and recipients, and pinning. Those of origins are the upstream's.
    pub policy: LivePolicy,
    /// No signature later than this after the reservation.
    pub sign_within: Duration,
    /// Bound on the unpaid call.
    pub probe_timeout: Duration,
    /// Bound on the simulation; part of the lease.
    pub rpc_timeout: Duration,
    /// `None`: the signed life and 30 s.
    pub paid_call_timeout: Option<Duration>,
    /// The signed life is never longer than this, whatever the offer says.
    pub max_authorization: BTreeMap<Network, Duration>,
    /// How long a call waits for a payment that is in flight elsewhere.
    pub wait_in_flight: Duration,
    pub account_ceiling: Option<Amount>,
}

impl Settings {
    pub fn new(rules: Rules) -> Settings {
        Settings {
            rules,
            policy: LivePolicy::default(),
            sign_within: Duration::from_secs(10),
            probe_timeout: Duration::from_secs(15),
            rpc_timeout: Duration::from_secs(15),
            paid_call_timeout: None,
            max_authorization: BTreeMap::new(),
            wait_in_flight: Duration::from_secs(10),
            account_ceiling: None,
        }
    }
}

/// Everything that a paid call needs; cheap to clone.
#[derive(Clone)]
pub struct Payer {
    parts: Arc<Parts>,
    courier: Arc<Courier>,
}

pub struct Parts {
    pub world: World,
    pub catalog: Catalog,
    pub upstream: Upstream,
    pub ledger: Arc<dyn Ledger>,
    pub chains: BTreeMap<Network, Arc<Stellar>>,
    pub signer: Arc<Signer>,
    pub settings: Settings,
}

/// What the payer has of one asset.
#[derive(Debug, Clone)]
pub enum Funds {
    Of {
        payer: String,
        balance: Amount,
    },
    NoTrustline {
        payer: String,
    },
    /// The chain or the signer could not be asked.
    Unknown,
}

impl Payer {
    pub fn new(parts: Parts) -> Payer {
        let courier = Courier {
            world: parts.world.clone(),
            upstream: parts.upstream.clone(),
            ledger: parts.ledger.clone(),
            chains: parts.chains.clone(),
            settings: parts.settings.clone(),
        };
        Payer { parts: Arc::new(parts), courier: Arc::new(courier) }
    }

    /// One payment of this agent, and its receipt where it is settled.
    pub async fn payment(
        &self,
        agent: &AgentId,
        by: Which<'_>,
    ) -> Result<Option<(Payment, Option<Box<RawValue>>)>, LedgerError> {
        let by = match by {
            Which::Id(id) => By::Id(id),
            Which::Key(key) => By::Key(key),
        };
        let found = self.parts.ledger.lookup(agent, by).await?;
        Ok(found.map(|row| {
            let receipt = Terms::of_row(&row).booked_receipt();
            (row, receipt)
        }))
    }

    pub async fn budget(&self, agent: &AgentId, session: Option<&str>) -> Result<Vec<BudgetLine>, LedgerError> {
        self.parts.ledger.budget(agent, session).await
    }

    /// Balance and trustline, from the cache where it is fresh.
    pub async fn funds(&self, unit: &Unit) -> Funds {
        let Some(chain) = self.parts.chains.get(&unit.network) else { return Funds::Unknown };
        let Ok(payer) = self.parts.signer.address(&unit.network).await else { return Funds::Unknown };
        match chain.balance(&payer, &unit.asset).await {
            Ok(Balance::Of(balance)) => Funds::Of { payer, balance },
            Ok(Balance::NoTrustline) => Funds::NoTrustline { payer },
            Err(_) => Funds::Unknown,
        }
    }

    /// Remembers in the ledger, for every replica, that this MCP session is over.
    pub async fn end_session(&self, session: &str, expires_ms: u64) -> Result<(), LedgerError> {
        self.parts.ledger.end_session(session, expires_ms).await
    }

    pub async fn session_ended(&self, session: &str) -> Result<bool, LedgerError> {
        self.parts.ledger.session_ended(session).await
    }

    /// The answer of this keyless payment reached its caller: written by a statement that nobody waits for.
    pub fn answered(&self, id: PaymentId) {
        let ledger = self.parts.ledger.clone();
        self.parts.world.spawn.spawn(Box::pin(async move {
            if let Err(error) = ledger.answered(id).await {
                tracing::warn!(payment = %id.short(), %error, "the answered mark could not be written");
            }
        }));
    }
}

/// How an agent names one of its payments.
#[derive(Debug, Clone, Copy)]
pub enum Which<'a> {
    Id(PaymentId),
    Key(&'a IdempotencyKey),
}

fn words(text: &str) -> String {
    x402::words(text, MAX_WORDS)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
