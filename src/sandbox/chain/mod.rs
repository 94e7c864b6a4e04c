//! A local Stellar network on the real Soroban host, as its nodes show it (`sandbox::rpc`): ledgers close on a timer
//! and carry what was sent meanwhile. The network is Stellar's testnet by name, and its one asset is Circle's testnet
//! USDC by issuer, so that the asset's contract has the address that everybody knows.
//!
//! Real: the host with its authorization, nonces, expirations, balances and metering; the checks of an envelope; fees
//! by the network's formulas; the life of temporary entries. Not real: there is no consensus and no state on disk (a
//! network lives as long as its process), accounts, trustlines and contracts come to be by [`LocalNetwork::fund`],
//! [`LocalNetwork::trust`] and [`LocalNetwork::install_contract`] only, nothing is archived, and prices are the public ones as remembered.

mod account;
mod admission;
mod apply;
mod costs;
mod host;
mod ledger;
mod settings;
mod store;
mod xdr;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use soroban_simulation::NetworkConfig;
use stellar_xdr::{
    AccountId, AlphaNum4, Asset, AssetCode4, ContractExecutable, ContractId, ContractIdPreimage,
    ContractIdPreimageFromAddress, CreateContractArgs, Hash, HashIdPreimage, HashIdPreimageContractId, HostFunction,
    Int128Parts, InvokeContractArgs, LedgerEntryData, ScAddress, ScSymbol, ScVal, Uint256,
};
use zeroize::Zeroizing;

use crate::ports::World;

pub use account::Account;
pub(super) use admission::hash as transaction_hash;
pub(super) use admission::unwrap_bump;
pub(super) use host::{Auth, simulate};
pub use ledger::Transfer;
pub(super) use ledger::{Admission, BASE_RESERVE, Chain, Closed, Included, PROTOCOL, Shared, lock};
pub(super) use xdr::{LIMITS, account_of, key_of, sha256};

/// CAIP-2.
pub const NETWORK: &str = "stellar:testnet";
pub const PASSPHRASE: &str = "Test SDF Network ; September 2015";
/// Circle's testnet issuer.
pub const USDC_ISSUER: &str = "GBBD47IF6LWK7P7MDEVSCWR7DPUWV3NY3DTQEVFL4NAT4AQH3ZLLFLA5";
/// The contract of [`USDC_ISSUER`]'s USDC on [`NETWORK`].
pub const USDC: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";

/// The shortest time between two ledgers.
pub const SHORTEST_INTERVAL: Duration = Duration::from_millis(50);
/// The furthest that a node can be behind, in ledgers.
pub const MAX_LAG: u32 = 512;

#[derive(Debug, Clone)]
pub struct Options {
    /// Between two ledgers; at least [`SHORTEST_INTERVAL`]. `None`: ledgers close by [`LocalNetwork::close_now`] only.
    pub ledger_interval: Option<Duration>,
    /// How many ledgers back a node answers for transactions and events; at least 1.
    pub retention: u32,
    /// How many ledgers a used nonce is kept at least. Stellar's is 17,280, about a day.
    pub min_temporary_ttl: u32,
    /// How many transactions wait for a ledger at most; more are told to try again later.
    pub queue: usize,
    pub transactions_per_ledger: usize,
    /// What [`LocalNetwork::account`] derives its accounts from; random without it.
    pub seed: Option<[u8; 32]>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            ledger_interval: Some(Duration::from_secs(1)),
            retention: 120_960,
            min_temporary_ttl: settings::MIN_TEMPORARY_TTL,
            queue: 2_000,
            transactions_per_ledger: 1_000,
            seed: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("{0}")]
    Options(&'static str),
    #[error("the network cannot be furnished: {0}")]
    Genesis(String),
}

impl From<stellar_xdr::Error> for NetworkError {
    fn from(error: stellar_xdr::Error) -> NetworkError {
        NetworkError::Genesis(error.to_string())
    }
}

/// Cheap to clone; ledgers stop closing when the last clone is gone.
#[derive(Clone)]
pub struct LocalNetwork {
    inner: Arc<Inner>,
}

struct Inner {
    world: World,
    chain: Shared,
    seed: Zeroizing<[u8; 32]>,
}

/// One RPC node's view of the network: it sees the ledgers that closed at least `lag` ledgers ago. Clones are the same
/// node.
#[derive(Debug, Clone, Default)]
pub struct Node {
    lag: Arc<AtomicU32>,
    address_v2: Arc<AtomicBool>,
}

impl Node {
    pub fn lagging(ledgers: u32) -> Node {
        let node = Node::default();
        node.set_lag(ledgers);
        node
    }

    /// At most [`MAX_LAG`] counts.
    pub fn set_lag(&self, ledgers: u32) {
        self.lag.store(ledgers.min(MAX_LAG), Ordering::Relaxed);
    }

    /// Whether it records authorizations in the newer credential arm (CAP-71), as newer nodes do.
    pub fn set_records_address_v2(&self, on: bool) {
        self.address_v2.store(on, Ordering::Relaxed);
    }

    pub(super) fn records_address_v2(&self) -> bool {
        self.address_v2.load(Ordering::Relaxed)
    }

    /// The newest ledger that it has seen.
    pub(super) fn latest(&self, chain: &Chain) -> u32 {
        chain.seq.saturating_sub(self.lag.load(Ordering::Relaxed)).max(ledger::FIRST)
    }
}

/// A closed ledger, seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latest {
    pub sequence: u32,
    /// Unix seconds.
    pub closed_at: u64,
}

impl LocalNetwork {
    /// Makes the first ledger and starts the timer.
    pub fn start(options: Options, world: World) -> Result<LocalNetwork, NetworkError> {
        if options.ledger_interval.is_some_and(|interval| interval < SHORTEST_INTERVAL) {
            return Err(NetworkError::Options("ledgers are at least 50 ms apart"));
        }
        if options.retention == 0 || options.min_temporary_ttl == 0 {
            return Err(NetworkError::Options("retention and minimum life are at least one ledger"));
        }
        let chain = genesis(&options, &world)?;
        let seed = Zeroizing::new(options.seed.unwrap_or_else(|| world.random()));
        let inner = Arc::new(Inner { world, chain, seed });
        if let Some(interval) = options.ledger_interval {
            inner.world.spawn.spawn(Box::pin(close_every(interval, Arc::downgrade(&inner))));
        }
        Ok(LocalNetwork { inner })
    }

    /// An account of that name; not funded yet. With [`Options::seed`] the same one each time.
    pub fn account(&self, name: &str) -> Account {
        Account::from_seed(&sha256([&self.inner.seed[..], name.as_bytes()].concat()))
    }

    /// Creates the account, or sets its balance.
    pub fn fund(&self, account: &AccountId, stroops: i64) {
        lock(&self.inner.chain).fund(account, stroops);
    }

    /// Creates the trustline for USDC, or sets its balance in atomic units.
    pub fn trust(&self, account: &AccountId, balance: i64) {
        lock(&self.inner.chain).trust(account, balance);
    }

    /// Puts a contract on the network: a smart account, say.
    pub fn install_contract(&self, wasm: &[u8]) -> Result<ContractId, NetworkError> {
        let upload = HostFunction::UploadContractWasm(wasm.to_vec().try_into()?);
        arrange(&self.inner.chain, upload)?;
        let issuer = USDC_ISSUER.parse().map_err(|_| NetworkError::Genesis("issuer".into()))?;
        let create = HostFunction::CreateContract(CreateContractArgs {
            contract_id_preimage: ContractIdPreimage::Address(ContractIdPreimageFromAddress {
                address: ScAddress::Account(issuer),
                salt: Uint256(self.inner.world.random()),
            }),
            executable: ContractExecutable::Wasm(Hash(sha256(wasm))),
        });
        match arrange(&self.inner.chain, create)? {
            ScVal::Address(ScAddress::Contract(contract)) => Ok(contract),
            other => Err(NetworkError::Genesis(format!("no contract was made, but {other:?}"))),
        }
    }

    /// Mints USDC, in atomic units, to a contract.
    pub fn endow(&self, contract: &ContractId, amount: i64) -> Result<(), NetworkError> {
        let usdc = lock(&self.inner.chain).contract.clone();
        let to = ScAddress::Contract(contract.clone());
        let amount = Int128Parts { hi: amount >> 63, lo: amount as u64 };
        let mint = HostFunction::InvokeContract(InvokeContractArgs {
            contract_address: ScAddress::Contract(usdc),
            function_name: ScSymbol("mint".try_into()?),
            args: vec![ScVal::Address(to), ScVal::I128(amount)].try_into()?,
        });
        arrange(&self.inner.chain, mint).map(|_| ())
    }

    /// USDC in atomic units; `None` without a trustline.
    pub fn balance(&self, account: &AccountId) -> Option<i64> {
        lock(&self.inner.chain).balance(account)
    }

    /// Stroops; `None` where there is no such account.
    pub fn native_balance(&self, account: &AccountId) -> Option<i64> {
        lock(&self.inner.chain).account(account).map(|account| account.balance)
    }

    pub fn latest(&self) -> Latest {
        let chain = lock(&self.inner.chain);
        Latest { sequence: chain.seq, closed_at: chain.ledger(chain.seq).map_or(0, |ledger| ledger.time) }
    }

    /// Closes a ledger at once, timer or not.
    pub fn close_now(&self) -> Latest {
        lock(&self.inner.chain).close(self.inner.world.unix_ms() / 1_000);
        self.latest()
    }

    /// Every transfer of USDC since the beginning, oldest first, whatever the retention.
    pub fn transfers(&self) -> Vec<Transfer> {
        lock(&self.inner.chain).transfers.clone()
    }

    /// The JSON-RPC of one node, on every path.
    pub fn rpc_router(&self, node: Node) -> axum::Router {
        super::rpc::router(self.inner.chain.clone(), node, self.inner.world.clone())
    }
}

async fn close_every(interval: Duration, network: Weak<Inner>) {
    let mut timer = tokio::time::interval(interval);
    timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    timer.tick().await;
    loop {
        timer.tick().await;
        let Some(inner) = network.upgrade() else { return };
        #[allow(
            clippy::disallowed_methods,
            reason = "the host is CPU work, and this network is outside the simulation"
        )]
        let closed = tokio::task::spawn_blocking(move || lock(&inner.chain).close(inner.world.unix_ms() / 1_000));
        if closed.await.is_err() {
            tracing::error!("closing a ledger failed");
        }
    }
}

/// The settings, the issuer, and the asset's contract, which the host itself creates.
fn genesis(options: &Options, world: &World) -> Result<Shared, NetworkError> {
    let issuer: AccountId = USDC_ISSUER.parse().map_err(|_| NetworkError::Genesis("issuer".into()))?;
    let asset = Asset::CreditAlphanum4(AlphaNum4 { asset_code: AssetCode4(*b"USDC"), issuer: issuer.clone() });
    let preimage = ContractIdPreimage::Asset(asset.clone());
    let contract = ContractId(Hash(sha256(xdr::encode(&HashIdPreimage::ContractId(HashIdPreimageContractId {
        network_id: Hash(sha256(PASSPHRASE)),
        contract_id_preimage: preimage.clone(),
    }))?)));
    let limits = ledger::Limits {
        retention: options.retention,
        queue: options.queue,
        transactions_per_ledger: options.transactions_per_ledger,
    };
    let time = world.unix_ms() / 1_000;
    let mut chain = Chain::new(NetworkConfig::default(), PASSPHRASE, asset, contract, limits, time);
    for setting in settings::settings(options.min_temporary_ttl)? {
        let data = LedgerEntryData::ConfigSetting(setting);
        if let Some(key) = key_of(&data) {
            chain.store.put_ever(key, store::Stored { entry: xdr::entry(ledger::FIRST, data), live_until: None });
        }
    }
    chain.fund(&issuer, 10_000_000_000);
    let chain = Arc::new(Mutex::new(chain));
    let config = NetworkConfig::load_from_snapshot(&host::Snapshot::new(chain.clone(), ledger::FIRST))
        .map_err(|error| NetworkError::Genesis(format!("{error:#}")))?;
    lock(&chain).config = Arc::new(config);

    let create = HostFunction::CreateContract(CreateContractArgs {
        contract_id_preimage: preimage,
        executable: ContractExecutable::StellarAsset,
    });
    arrange(&chain, create)?;
    Ok(chain)
}

/// Runs `function` as the asset's issuer, outside any transaction: its effect is as if it had always been there, so
/// every node sees it at once, also one that lags.
fn arrange(chain: &Shared, function: HostFunction) -> Result<ScVal, NetworkError> {
    let issuer: AccountId = USDC_ISSUER.parse().map_err(|_| NetworkError::Genesis("issuer".into()))?;
    let at = lock(chain).seq;
    let auth = Auth::Record { address_v2: false, root_only: true };
    let simulated = simulate(chain, at, function.clone(), auth, &issuer, [0; 32])
        .map_err(|error| NetworkError::Genesis(error.to_string()))?;
    let data = simulated
        .transaction_data
        .ok_or_else(|| NetworkError::Genesis(format!("{:?}", simulated.invoke_result.err())))?;
    let mut guard = lock(chain);
    let info = guard.info(at).ok_or_else(|| NetworkError::Genesis("the ledger is not kept".into()))?;
    let invocation = host::Invocation {
        function: &function,
        auth: &simulated.auth,
        resources: &data.resources,
        source: &issuer,
        seed: [0; 32],
    };
    let made = host::execute(&guard, info, &invocation, &mut Vec::new()).map_err(NetworkError::Genesis)?;
    apply::commit(&mut guard, made.writes);
    guard.store.take_undo();
    Ok(made.value)
}

#[cfg(test)]
pub(super) mod tests;
