//! What a cluster buys from and pays on, in this process: the sandbox's chain on fast ledgers, facilitator with catalog,
//! seller, and a signer behind TLS that counts. Seller and facilitator can be hostile.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tollway::catalog::{Kind, ResourceRef};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::{self, Authenticator};
use tollway::ports::World;
use tollway::ports::machine::TcpListener;
use tollway::sandbox::catalog::Catalog;
use tollway::sandbox::chain::{self, LocalNetwork, NETWORK, Node, PASSPHRASE, USDC};
use tollway::sandbox::facilitator::{self, Facilitator};
use tollway::sandbox::seller::{self, Seller};
use tollway::sandbox::signer::{self, Signer};
use tollway::sandbox::tls::Authority;
use tollway::seal::KeyRing;
use zeroize::Zeroizing;

use super::hostile::Hostile;
use crate::report::{Doing as _, Result};

/// What is bought.
pub const TOOL: &str = "get_weather";
/// Settlements that may be under way at once.
const FEE_ACCOUNTS: usize = 48;
const STROOPS: i64 = 1_000_000_000_000;
/// 1,000,000 USDC.
const FUNDS: i64 = 10_000_000_000_000;

pub struct Terms {
    /// Between two ledgers.
    pub ledger: Duration,
    /// How many ledgers a signature lives.
    pub life: u32,
    /// Atomic units.
    pub price: u64,
    /// Of each kind of fault, percent of requests.
    pub hostile: u64,
    pub seed: u64,
}

impl Terms {
    /// A payer counts 6 s of an offer's time for each ledger.
    pub fn offer_seconds(&self) -> u64 {
        u64::from(self.life) * 6
    }
}

pub struct Market {
    pub terms: Terms,
    pub network: LocalNetwork,
    pub seller: Arc<Seller>,
    pub signer: Arc<Signer>,
    pub hostile: Arc<Hostile>,
    pub rpc_port: u16,
    /// Facilitator and catalog.
    pub facilitator_port: u16,
    /// HTTPS, by a certificate of `ca_file`.
    pub signer_port: u16,
    pub ca_file: PathBuf,
    /// `Authorization` of the signer.
    pub signer_auth: String,
    /// Of [`TOOL`].
    pub reference: String,
    shutdown: CancellationToken,
    _dir: tempfile::TempDir,
}

impl Drop for Market {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

struct Door {
    listener: tokio::net::TcpListener,
    port: u16,
}

async fn door() -> Result<Door> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.doing("a port")?;
    let port = listener.local_addr().doing("a port")?.port();
    Ok(Door { listener, port })
}

impl Market {
    pub async fn open(terms: Terms, world: &World) -> Result<Market> {
        let shutdown = CancellationToken::new();
        let serve = |door: Door, router: axum::Router| {
            let server = mcp::serve::serve(TcpListener(door.listener), world.clone(), router, shutdown.clone());
            world.spawn.spawn(Box::pin(server));
        };
        let limits = Limits { timeout: Duration::from_secs(30), ..Limits::default() };
        let http = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
        let hostile = Hostile::new(terms.seed, terms.hostile);

        let options = chain::Options { ledger_interval: Some(terms.ledger), ..chain::Options::default() };
        let network = LocalNetwork::start(options, world.clone()).doing("the chain")?;
        let (payer, pay_to) = (network.account("payer"), network.account("seller"));
        for (account, usdc) in [(&payer, FUNDS), (&pay_to, 0)] {
            network.fund(&account.id(), STROOPS);
            network.trust(&account.id(), usdc);
        }
        let fees: Vec<_> = (0..FEE_ACCOUNTS).map(|n| network.account(&format!("fees {n}"))).collect();
        fees.iter().for_each(|account| network.fund(&account.id(), STROOPS));
        let rpc = door().await?;
        let rpc_port = rpc.port;
        serve(rpc, network.rpc_router(Node::default()));

        let catalog = Catalog::new(world.clone());
        let keys = fees.into_iter().map(|account| account.key).collect();
        let mut settling = facilitator::Options::new(NETWORK, PASSPHRASE, keys);
        settling.poll = (terms.ledger / 2).max(Duration::from_millis(50));
        let settler = Facilitator::new(world.clone(), http.clone(), &format!("http://127.0.0.1:{rpc_port}"), settling);
        let facilitation = door().await?;
        let facilitator_port = facilitation.port;
        serve(facilitation, hostile.facilitator(settler.router()).merge(catalog.router()));

        let vault = door().await?;
        let signer_port = vault.port;
        let token = Zeroizing::new(hex(&world.random::<32>()));
        let signer_auth = format!("Bearer {}", token.as_str());
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
        let authority = Authority::new().doing("a certificate")?;
        let dir = tempfile::tempdir().doing("a directory")?;
        let ca_file = dir.path().join("ca.pem");
        std::fs::write(&ca_file, authority.ca_pem()).doing("the certificate's file")?;
        let listener = authority.listener(TcpListener(vault.listener));
        let served = mcp::serve::serve(listener, world.clone(), signer.router(), shutdown.clone());
        world.spawn.spawn(Box::pin(served));

        let shop = door().await?;
        let endpoint = format!("http://127.0.0.1:{}/mcp", shop.port);
        let settles_with = format!("http://127.0.0.1:{facilitator_port}").parse().doing("a URL")?;
        let seller = Seller::new(
            world,
            tollway::facilitator::Facilitator::new(http, &settles_with),
            seller::Options {
                endpoint: endpoint.clone(),
                network: NETWORK.into(),
                asset: USDC.into(),
                pay_to: pay_to.address(),
                max_timeout_seconds: terms.offer_seconds(),
            },
        );
        seller.set_price(TOOL, terms.price);
        let front = mcp::Settings::new(world.clone(), KeyRing::ephemeral(world), shutdown.clone());
        serve(shop, hostile.seller(mcp::router(front, seller.clone(), Authenticator::Public)));
        for item in seller.catalog_items("2026-01-01T00:00:00Z") {
            catalog.put(&item).doing("the catalog")?;
        }
        let reference = ResourceRef::new(Kind::Mcp, &endpoint, Some(TOOL)).doing("a reference")?.to_string();
        Ok(Market {
            terms,
            network,
            seller,
            signer,
            hostile,
            rpc_port,
            facilitator_port,
            signer_port,
            ca_file,
            signer_auth,
            reference,
            shutdown,
            _dir: dir,
        })
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
