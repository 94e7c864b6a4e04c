//! What an agent server needs around it, in one process on loopback: chain, facilitator with catalog, the demo's
//! server behind its gate, and signer, each behind a port of its own.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stellar_xdr::{AccountId, AlphaNum4, AssetCode4, TrustLineAsset};
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use super::catalog::{Catalog, CatalogError};
use super::chain::{self, LocalNetwork, NETWORK, Node, PASSPHRASE, USDC, USDC_ISSUER};
use super::facilitator::{self, Facilitator};
use super::shop::{self, Shop};
use super::signer::{self, Signer};
use super::state::StateDir;
use super::tls::Authority;
use crate::config::{self, Source};
use crate::http::{self, Client, Destination};
use crate::mcp;
use crate::ports::World;
use crate::ports::machine::TcpListener;

/// Settlements that may be under way at once.
const FEE_ACCOUNTS: usize = 16;
/// 100 USDC.
const PAYER_FUNDS: i64 = 1_000_000_000;
/// 1,000 XLM.
const STROOPS: i64 = 10_000_000_000;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("port {0} cannot be opened: {1}")]
    Port(u16, io::Error),
    #[error("the state directory {}: {}", .0.display(), .1)]
    State(PathBuf, io::Error),
    #[error("the local network: {0}")]
    Chain(#[from] chain::NetworkError),
    #[error("the catalog: {0}")]
    Catalog(#[from] CatalogError),
    #[error("a configuration file of its own: {0}")]
    Config(#[from] config::ConfigError),
    #[error("the gate: {0}")]
    Gate(#[from] crate::gate_server::StartError),
    #[error("{0}")]
    Other(String),
}

#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Kept where it is given; else a temporary one, removed at the end.
    pub dir: Option<PathBuf>,
    /// Of the agent server; 0 is any free one.
    pub port: u16,
    pub chain: chain::Options,
    /// The RPC also over TLS, by which the agent server then asks it.
    pub rpc_tls: bool,
    /// A second RPC node, so many ledgers behind, which the agent server asks too.
    pub lagging_node: Option<u32>,
    /// Who settles for the demo's gate; `None`: the sandbox's own facilitator.
    pub settles_with: Option<String>,
}

impl Options {
    /// A payer counts 6 s for each ledger of an offer's time, so an offer of 60 s has 10 ledgers: on ledgers of a
    /// second that is time enough, on faster ones it is not.
    pub(super) fn slow(&self) -> bool {
        self.ledger_interval() >= Duration::from_secs(1)
    }

    pub(super) fn ledger_interval(&self) -> Duration {
        self.chain.ledger_interval.unwrap_or(Duration::from_secs(1))
    }
}

pub struct Backends {
    pub rpc_url: String,
    pub facilitator_url: String,
    pub seller_url: String,
    pub signer_url: String,
    pub payer: AccountId,
    pub pay_to: AccountId,
    pub network: LocalNetwork,
    /// The first RPC node: how far it lags, and what it records.
    pub node: Node,
    pub catalog: Arc<Catalog>,
    pub seller: Shop,
    pub signer: Arc<Signer>,
    pub facilitator: Arc<Facilitator>,
    /// `Authorization` of the signer.
    pub(super) signer_auth: Zeroizing<String>,
    pub(super) state: Arc<StateDir>,
    updated: String,
}

/// The sandbox's own environment: a variable of the user's must not point it elsewhere.
#[derive(Default)]
pub(super) struct Environment(pub BTreeMap<&'static str, Zeroizing<String>>);

impl Source for Environment {
    fn env(&self, name: &str) -> Option<String> {
        self.0.get(name).map(|value| value.to_string())
    }
    fn read(&self, path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
        std::fs::read(path).map(Zeroizing::new)
    }
}

/// A listener that is bound before anything is made, so that every part knows every address.
pub(super) struct Door {
    listener: tokio::net::TcpListener,
    pub url: String,
}

impl Door {
    pub async fn open(port: u16) -> Result<Door, StartError> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let failed = |error| StartError::Port(port, error);
        let listener = tokio::net::TcpListener::bind(address).await.map_err(failed)?;
        let url = format!("http://{}", listener.local_addr().map_err(failed)?);
        Ok(Door { listener, url })
    }

    pub fn port(&self) -> u16 {
        self.listener.local_addr().map_or(0, |address| address.port())
    }

    pub fn serve(self, world: &World, router: axum::Router, shutdown: &CancellationToken) {
        let server = mcp::serve::serve(TcpListener(self.listener), world.clone(), router, shutdown.clone());
        world.spawn.spawn(Box::pin(server));
    }

    /// Over TLS, with a certificate of `authority`; its URL.
    pub fn serve_tls(
        self,
        authority: &Authority,
        world: &World,
        router: axum::Router,
        shutdown: &CancellationToken,
    ) -> String {
        let listener = authority.listener(TcpListener(self.listener));
        world.spawn.spawn(Box::pin(mcp::serve::serve(listener, world.clone(), router, shutdown.clone())));
        self.url.replacen("http:", "https:", 1)
    }
}

/// A client for addresses of our own, with bounds that suit them.
pub fn client(world: &World) -> Result<Client, StartError> {
    let tls = http::tls(None).map_err(StartError::Other)?;
    let limits = http::Limits { timeout: Duration::from_secs(15), max_response_bytes: 8 << 20 };
    Ok(Client::new(world.clone(), tls, Destination::Operator, limits))
}

impl Backends {
    /// Everything ends with `shutdown`.
    pub async fn start(options: &Options, world: &World, shutdown: &CancellationToken) -> Result<Backends, StartError> {
        let (rpc, facilitation) = (Door::open(0).await?, Door::open(0).await?);
        let (shop, behind, vault) = (Door::open(0).await?, Door::open(0).await?, Door::open(0).await?);
        let (rpc_url, facilitator_url, signer_url) = (rpc.url.clone(), facilitation.url.clone(), vault.url.clone());
        let operator = client(world)?;
        let state = Arc::new(StateDir::open(options.dir.clone(), world)?);

        let network = LocalNetwork::start(options.chain.clone(), world.clone())?;
        let (payer, pay_to) = (network.account("payer"), network.account("seller"));
        for (account, usdc) in [(&payer, PAYER_FUNDS), (&pay_to, 0)] {
            network.fund(&account.id(), STROOPS);
            network.trust(&account.id(), usdc);
        }
        let fee_accounts: Vec<_> = (0..FEE_ACCOUNTS).map(|n| network.account(&format!("facilitator {n}"))).collect();
        for account in &fee_accounts {
            network.fund(&account.id(), STROOPS);
        }
        let node = Node::default();
        rpc.serve(world, network.rpc_router(node.clone()), shutdown);

        let catalog = Catalog::new(world.clone());
        let keys = fee_accounts.into_iter().map(|account| account.key).collect();
        let mut terms = facilitator::Options::new(NETWORK, PASSPHRASE, keys);
        terms.poll = (options.ledger_interval() / 4).clamp(Duration::from_millis(20), Duration::from_secs(1));
        let facilitator = Facilitator::new(world.clone(), operator, &rpc_url, terms);
        facilitation.serve(world, facilitator.router().merge(catalog.router()), shutdown);

        let terms = shop::Terms {
            facilitator: options.settles_with.as_deref().unwrap_or(&facilitator_url),
            rpc: &rpc_url,
            pay_to: pay_to.address(),
            max_timeout_seconds: if options.slow() { 60 } else { 3_600 },
            ledger: options.ledger_interval(),
        };
        let seller = Shop::open((shop, behind), &terms, &state, world, shutdown).await?;
        let updated = crate::agent::time::rfc3339(world.unix_ms());
        for item in seller.catalog_items(&updated) {
            catalog.put(&item)?;
        }

        let token = Zeroizing::new(hex::encode(world.random::<32>()));
        let signer_auth = Zeroizing::new(format!("Bearer {}", token.as_str()));
        let signer = Signer::new(
            world.clone(),
            signer::Options {
                network: NETWORK.into(),
                passphrase: PASSPHRASE.into(),
                assets: vec![USDC.into()],
                key: payer.key.clone(),
                token,
            },
        );
        vault.serve(world, signer.router(), shutdown);

        Ok(Backends {
            rpc_url,
            facilitator_url,
            seller_url: seller.url.clone(),
            signer_url,
            payer: payer.id(),
            pay_to: pay_to.id(),
            network,
            node,
            catalog,
            seller,
            signer,
            facilitator,
            signer_auth,
            state,
            updated,
        })
    }

    /// The tool costs this much from now on, at the seller and in the catalog.
    pub fn change_price(&self, tool: &str, price: u64) -> Result<(), StartError> {
        self.seller.set_price(tool, price)?;
        if let Some(item) = self.seller.catalog_item(tool, &self.updated) {
            self.catalog.put(&item)?;
        }
        Ok(())
    }

    /// How the chain names the balance of the sandbox's asset.
    pub fn trustline() -> Option<TrustLineAsset> {
        let issuer = USDC_ISSUER.parse().ok()?;
        Some(TrustLineAsset::CreditAlphanum4(AlphaNum4 { asset_code: AssetCode4(*b"USDC"), issuer }))
    }
}

#[cfg(test)]
mod tests;
