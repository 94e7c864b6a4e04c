//! Stellar `exact`: we build the transfer and its one authorization entry ourselves and sign that; the RPC gives ledger
//! number, fee and footprint, and is believed in nothing that decides where money goes.

mod entry;
#[cfg(all(feature = "roles", any(test, feature = "fuzzing")))]
pub(crate) mod fuzzing;
mod history;
mod pace;
mod prepare;
mod presented;
mod reading;
mod rpc;

pub use entry::{Draft, SignedEntry, Transfer};
pub use history::UsedBy;
#[cfg(test)]
pub(crate) use presented::tests as presented_tests;
pub use presented::{PresentedError, PresentedTransfer, Signed};
pub use reading::NonceQuestion;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use sha2::{Digest, Sha256};
use stellar_xdr::{HostFunction, InvokeContractArgs, Limits, OperationBody, ReadXdr, ScAddress, ScVal};
use tokio::time::Instant;
use url::Url;

use super::ChainError;
use crate::http::Client;
use crate::money::{Amount, Asset, Network};
use crate::ports::World;
use crate::x402::Offer;
use pace::Pace;
use rpc::{LatestLedger, NetworkAnswer, Rpc, Simulation, Transaction};

/// A live network closes a ledger in 5 to 6 s; a signature that counts 6 lives no longer than asked, and facilitators
/// that count 5 or 6 both accept it (`ceil(t/6) <= ceil(t/5)`).
const SECONDS_PER_LEDGER: u64 = 6;
/// A ledger that closed longer ago than this on the local clock, or so far ahead of it, is not believed.
const MAX_CLOCK_DISTANCE: u64 = 120;
/// Ledgers that an RPC may be ahead of what elapsed time explains.
const LEDGER_SLACK: u64 = 50;
const BALANCE_LIFE: Duration = Duration::from_secs(10);
const MAX_BALANCES: usize = 256;

/// Which credential arm the authorization entry uses (CAP-71).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credentials {
    Address,
    AddressV2,
}

#[derive(Debug, Clone)]
pub struct Settings {
    pub network: Network,
    pub passphrase: String,
    pub rpc_urls: Vec<Url>,
    pub credentials: Credentials,
    /// No signature lives longer, whatever a seller asks.
    pub max_authorization_seconds: u64,
    /// Ledgers are not believed to close faster than this.
    pub min_ledger_ms: u64,
}

impl Settings {
    /// For Stellar's public and test network; `None` for another one, whose passphrase nobody knows.
    pub fn known(network: &Network, rpc_urls: Vec<Url>) -> Option<Settings> {
        Some(Settings {
            network: network.clone(),
            passphrase: known_passphrase(network)?.to_owned(),
            rpc_urls,
            credentials: Credentials::Address,
            max_authorization_seconds: 300,
            min_ledger_ms: 4_000,
        })
    }
}

pub fn known_passphrase(network: &Network) -> Option<&'static str> {
    match network.as_str() {
        "stellar:pubnet" => Some("Public Global Stellar Network ; September 2015"),
        "stellar:testnet" => Some("Test SDF Network ; September 2015"),
        _ => None,
    }
}

/// The newest ledger, as far as the RPCs can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerPoint {
    pub sequence: u32,
    /// Unix seconds.
    pub closed_at: u64,
}

/// A payer's balance of one asset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    Of(Amount),
    /// A G-account without a trustline for the asset, or no account at all.
    NoTrustline,
}

/// What the chain says of a transaction's hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransactionStatus {
    Success {
        ledger: u32,
    },
    Failed {
        ledger: u32,
    },
    /// No RPC knows it; means something only while its ledger lies within what they keep.
    NotFound {
        oldest: Option<u32>,
        latest: u32,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The simulation answered with an invocation or authorization that is not ours.
    #[error("a chain RPC answered with another payment than ours: {0}")]
    Lying(&'static str),
    #[error("the simulation failed: {0}")]
    Failed(String),
    #[error("the simulation's answer was lost: {0}")]
    Lost(#[from] ChainError),
}

/// One Stellar network through one or several RPCs.
pub struct Stellar {
    settings: Settings,
    network_id: [u8; 32],
    rpcs: Vec<Rpc>,
    world: World,
    cache: Arc<Mutex<Cache>>,
    /// Held while the ledger number is asked for: many payments at once ask once, and share a failure too.
    asking: tokio::sync::Mutex<Option<(Instant, ChainError)>>,
}

#[derive(Default)]
struct Cache {
    /// RPCs (by index) that named our network.
    checked: BTreeSet<usize>,
    accepted: Option<Accepted>,
    balances: BTreeMap<(String, Asset), (Instant, Balance)>,
    min_temporary_ttl: Option<(Instant, u32)>,
}

/// The last ledger number that was believed, and when, by both clocks.
#[derive(Clone, Copy)]
struct Accepted {
    point: LedgerPoint,
    at: Instant,
    unix_ms: u64,
}

impl Stellar {
    pub fn new(settings: Settings, http: Client, world: World) -> Stellar {
        let network_id = Sha256::digest(&settings.passphrase).into();
        let rpcs =
            settings.rpc_urls.iter().map(|url| Rpc::new(http.clone(), url.clone(), settings.network.clone())).collect();
        Stellar { settings, network_id, rpcs, world, cache: Arc::default(), asking: tokio::sync::Mutex::default() }
    }

    /// The same for an asker that has time: it sends at most so many requests a second to all RPCs together. What it
    /// learns of the network, both know; nobody waits for the other.
    pub fn paced(&self, per_second: u32) -> Stellar {
        let pace = Arc::new(Pace::new(per_second));
        Stellar {
            settings: self.settings.clone(),
            network_id: self.network_id,
            rpcs: self.rpcs.iter().map(|rpc| rpc.paced(pace.clone())).collect(),
            world: self.world.clone(),
            cache: self.cache.clone(),
            asking: tokio::sync::Mutex::default(),
        }
    }

    /// How many RPCs are asked.
    pub fn rpcs(&self) -> usize {
        self.rpcs.len()
    }

    pub fn network(&self) -> &Network {
        &self.settings.network
    }

    pub fn passphrase(&self) -> &str {
        &self.settings.passphrase
    }

    pub fn min_ledger_ms(&self) -> u64 {
        self.settings.min_ledger_ms
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The smallest newest ledger that the RPCs give, at most half a ledger old. Neither a seller nor an RPC decides with
    /// it how long a signature lives: an answer whose close time is far from the local clock, or which is further from
    /// the last one than elapsed time explains, is refused.
    pub async fn ledger(&self) -> Result<LedgerPoint, ChainError> {
        let called = Instant::now();
        let mut asking = self.asking.lock().await;
        if let Some((failed, error)) = &*asking
            && *failed >= called
        {
            return Err(error.clone());
        }
        let last = self.cache().accepted;
        if let Some(last) = last
            && self.age_ms(last) <= self.settings.min_ledger_ms / 2
        {
            return Ok(last.point);
        }
        let (answers, mut refusals) = self.ask_all(|index| self.latest(index)).await;
        let mut believed = Vec::new();
        for point in answers {
            match self.believe(point, last) {
                Ok(()) => believed.push(point),
                Err(error) => {
                    tracing::error!(network = %self.settings.network, %error, "a ledger number is refused");
                    refusals.insert(0, error);
                }
            }
        }
        let Some(point) = believed.into_iter().min_by_key(|point| point.sequence) else {
            let error = refusals.into_iter().next().unwrap_or_else(nobody);
            *asking = Some((Instant::now(), error.clone()));
            return Err(error);
        };
        self.cache().accepted = Some(Accepted { point, at: Instant::now(), unix_ms: self.world.unix_ms() });
        Ok(point)
    }

    fn believe(&self, point: LedgerPoint, last: Option<Accepted>) -> Result<(), ChainError> {
        let now = self.world.unix_ms() / 1000;
        if point.closed_at.abs_diff(now) > MAX_CLOCK_DISTANCE {
            return Err(ChainError::Lying(format!(
                "the newest ledger closed {} s from the local clock",
                point.closed_at.abs_diff(now)
            )));
        }
        let Some(last) = last else { return Ok(()) };
        if u64::from(point.sequence) > self.ceiling(last) {
            return Err(ChainError::Lying(format!(
                "ledger {} is ahead of what the time since ledger {} allows",
                point.sequence, last.point.sequence
            )));
        }
        // A node may lag as far as its close time may. One that is further back would give the payment's row a start
        // from which absence proves nothing, and the next honest answer would seem to have run ahead.
        let lag = MAX_CLOCK_DISTANCE * 1000 / self.settings.min_ledger_ms.max(1) + LEDGER_SLACK;
        if u64::from(point.sequence) + lag < u64::from(last.point.sequence) {
            return Err(ChainError::Lying(format!(
                "ledger {} is behind what the close time after ledger {} allows",
                point.sequence, last.point.sequence
            )));
        }
        Ok(())
    }

    /// A machine that slept has a wall clock ahead of its monotonic one; one whose clock was set back has the reverse.
    fn age_ms(&self, last: Accepted) -> u64 {
        let monotonic = u64::try_from(last.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        monotonic.max(self.world.unix_ms().saturating_sub(last.unix_ms))
    }

    /// The highest ledger number that can be true now.
    fn ceiling(&self, last: Accepted) -> u64 {
        u64::from(last.point.sequence) + self.age_ms(last) / self.settings.min_ledger_ms.max(1) + LEDGER_SLACK
    }

    /// Whether a ledger number that came without a close time can have been reached.
    pub(super) async fn has_come(&self, sequence: u32) -> Result<bool, ChainError> {
        self.ledger().await?;
        let last = self.cache().accepted;
        Ok(last.is_some_and(|last| u64::from(sequence) <= self.ceiling(last)))
    }

    async fn latest(&self, index: usize) -> Result<LedgerPoint, ChainError> {
        let rpc = self.checked(index).await?;
        let latest: LatestLedger = rpc.call("getLatestLedger", &serde_json::json!({})).await?;
        let closed_at = match latest.close_time {
            Some(time) => time,
            // Older RPCs tell the close time only beside a transaction; a hash that cannot exist is as good as any.
            None => {
                let found: Transaction =
                    rpc.call("getTransaction", &serde_json::json!({"hash": "0".repeat(64)})).await?;
                found.latest_ledger_close_time.unwrap_or_default()
            }
        };
        let closed_at = closed_at
            .parse()
            .map_err(|_| ChainError::Unreachable(format!("{}: no close time of the newest ledger", rpc.name())))?;
        Ok(LedgerPoint { sequence: latest.sequence, closed_at })
    }

    /// The RPC at `index`, after it named our network once.
    async fn checked(&self, index: usize) -> Result<&Rpc, ChainError> {
        let rpc = self.rpcs.get(index).ok_or_else(nobody)?;
        if !self.cache().checked.contains(&index) {
            let answer: NetworkAnswer = rpc.call("getNetwork", &serde_json::json!({})).await?;
            if answer.passphrase != self.settings.passphrase {
                return Err(ChainError::Lying(format!("{} serves another network", rpc.name())));
            }
            self.cache().checked.insert(index);
        }
        Ok(rpc)
    }

    /// The answers and the failures of all RPCs, each in their order.
    async fn ask_all<'a, T, F>(&'a self, ask: impl Fn(usize) -> F) -> (Vec<T>, Vec<ChainError>)
    where
        F: Future<Output = Result<T, ChainError>> + 'a,
    {
        let mut given = Vec::new();
        let mut failed = Vec::new();
        for answer in join_all((0..self.rpcs.len()).map(ask)).await {
            match answer {
                Ok(answer) => given.push(answer),
                Err(error) => failed.push(error),
            }
        }
        (given, failed)
    }

    /// The first RPC that answers at all; a refusal is an answer.
    async fn ask_one<T: serde::de::DeserializeOwned>(
        &self,
        method: &str,
        params: &serde_json::Value,
    ) -> Result<T, ChainError> {
        let mut last = nobody();
        for index in 0..self.rpcs.len() {
            let asked = match self.checked(index).await {
                Ok(rpc) => rpc.call(method, params).await,
                Err(error) => Err(error),
            };
            match asked {
                Err(ChainError::Unreachable(what)) => last = ChainError::Unreachable(what),
                answer => return answer,
            }
        }
        Err(last)
    }

    /// How long an authorization lives that was drafted at one ledger and is dead after another, at the pace that
    /// [`Stellar::draft`] counts with.
    pub fn signed_life(&self, at: u64, dead_after: u64) -> Duration {
        Duration::from_secs(dead_after.saturating_sub(at).saturating_mul(SECONDS_PER_LEDGER))
    }

    /// Our transfer for this offer with a fresh nonce, unsigned. Its life is the smaller of the offer's and the
    /// operator's, counted in ledgers from `at`.
    pub fn draft(&self, offer: &Offer, payer: &str, at: LedgerPoint) -> Result<Draft, ChainError> {
        if offer.network != self.settings.network {
            return Err(ChainError::Unsupported("the offer is for another network".into()));
        }
        let sponsored = offer.extra.as_deref().and_then(|extra| crate::json::member(extra, "areFeesSponsored"));
        if sponsored.map(|value| value.get()) != Some("true") {
            // Our transaction has no source of its own that could pay the fee.
            return Err(ChainError::Unsupported("fees_not_sponsored: extra.areFeesSponsored is not true".into()));
        }
        let life = offer.max_timeout_seconds.min(self.settings.max_authorization_seconds);
        if life == 0 {
            return Err(ChainError::Unsupported("the authorization would have no life".into()));
        }
        let ledgers = u32::try_from(life.div_ceil(SECONDS_PER_LEDGER)).unwrap_or(u32::MAX);
        let transfer = Transfer {
            payer: payer.to_owned(),
            pay_to: offer.pay_to.clone(),
            asset: offer.asset.as_str().to_owned(),
            amount: offer.amount,
        };
        // Positive, as the host's own recording mode makes them.
        let nonce = i64::from_be_bytes(self.world.random()) & i64::MAX;
        Draft::new(
            transfer,
            self.network_id,
            self.settings.credentials,
            nonce,
            at.sequence.saturating_add(ledgers),
            at.closed_at.saturating_add(life),
        )
    }

    /// The payer's balance, at most some seconds old.
    pub async fn balance(&self, payer: &str, asset: &Asset) -> Result<Balance, ChainError> {
        let cached = self.cache().balances.get(&(payer.to_owned(), asset.clone())).copied();
        match cached {
            Some((at, balance)) if at.elapsed() <= BALANCE_LIFE => Ok(balance),
            _ => self.balance_fresh(payer, asset).await,
        }
    }

    /// A transfer of so much was signed: the remembered balance shrinks by it, and a call that it no longer covers asks.
    pub fn signed_away(&self, payer: &str, asset: &Asset, amount: Amount) {
        if let Some((_, Balance::Of(balance))) = self.cache().balances.get_mut(&(payer.to_owned(), asset.clone())) {
            *balance = balance.checked_sub(amount).unwrap_or(Amount::ZERO);
        }
    }

    /// SEP-41 `balance(id)`, simulated: nothing is signed or sent.
    pub async fn balance_fresh(&self, payer: &str, asset: &Asset) -> Result<Balance, ChainError> {
        let ScAddress::Contract(contract) = entry::address(asset.as_str(), "asset")? else {
            return Err(ChainError::Unsupported("the asset is not a token contract (C…)".into()));
        };
        let id = ScVal::Address(entry::address(payer, "payer")?);
        let call = InvokeContractArgs {
            contract_address: ScAddress::Contract(contract),
            function_name: entry::symbol("balance"),
            args: vec![id].try_into().unwrap_or_default(),
        };
        let operation = OperationBody::InvokeHostFunction(stellar_xdr::InvokeHostFunctionOp {
            host_function: HostFunction::InvokeContract(call),
            auth: Default::default(),
        });
        let transaction = prepare::envelope(operation, u32::MAX, 0, None);
        let params = serde_json::json!({"transaction": prepare::base64(&transaction)});
        let simulation: Simulation = self.ask_one("simulateTransaction", &params).await?;
        let balance = match (simulation.error, simulation.results.first()) {
            // The asset contract's own errors (CAP-46-6): 6 no account, 13 no trustline.
            (Some(error), _) if error.contains("Error(Contract, #13)") || error.contains("Error(Contract, #6)") => {
                Balance::NoTrustline
            }
            (Some(error), _) => return Err(ChainError::Refused(rpc::words(&error))),
            (None, Some(result)) => match ScVal::from_xdr_base64(&result.xdr, LIMITS) {
                Ok(ScVal::I128(parts)) => {
                    let amount = (i128::from(parts.hi) << 64) | i128::from(parts.lo);
                    Balance::Of(Amount::from_i128(amount).unwrap_or_default())
                }
                _ => return Err(ChainError::Unreachable("the balance is not a number".into())),
            },
            (None, None) => return Err(ChainError::Unreachable("the balance has no result".into())),
        };
        let mut cache = self.cache();
        // Assets are named by sellers, so their number is not ours to trust.
        if cache.balances.len() >= MAX_BALANCES {
            cache.balances.clear();
        }
        cache.balances.insert((payer.to_owned(), asset.clone()), (Instant::now(), balance));
        Ok(balance)
    }

    /// `hash`: 64 hex digits. Positive evidence needs one RPC: the first that knows the transaction decides. `NotFound`
    /// needs all of them, and names the ledgers that all of them keep.
    pub async fn transaction(&self, hash: &str) -> Result<TransactionStatus, ChainError> {
        if hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(ChainError::Unsupported("a transaction hash has 64 hex digits".into()));
        }
        let hash = hash.to_ascii_lowercase();
        let params = serde_json::json!({"hash": hash});
        let (answers, failed) = self
            .ask_all(|index| {
                let params = &params;
                async move { self.checked(index).await?.call::<Transaction>("getTransaction", params).await }
            })
            .await;
        for answer in &answers {
            match (answer.status.as_str(), answer.ledger) {
                ("SUCCESS", Some(ledger)) => return Ok(TransactionStatus::Success { ledger }),
                ("FAILED", Some(ledger)) => return Ok(TransactionStatus::Failed { ledger }),
                _ => {}
            }
        }
        match answers.iter().map(|answer| answer.latest_ledger).min() {
            Some(latest) if failed.is_empty() => {
                // One RPC that does not say what it keeps leaves the range open.
                let kept: Option<Vec<u32>> = answers.iter().map(|answer| answer.oldest_ledger).collect();
                Ok(TransactionStatus::NotFound { oldest: kept.and_then(|all| all.into_iter().max()), latest })
            }
            _ => Err(failed.into_iter().next().unwrap_or_else(nobody)),
        }
    }
}

const LIMITS: Limits = entry::XDR;

fn nobody() -> ChainError {
    ChainError::Unreachable("no RPC is configured".into())
}
