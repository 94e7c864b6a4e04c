//! The agent server from its configuration: the parts are made once, then served over HTTP or stdio.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::routing::get;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use super::AgentTools;
use super::auth::{self, TokenReviews};
use super::health::{Health, Watch};
use super::reload::{self, Reload};
use crate::catalog::Catalog;
use crate::chain::stellar::{self, Stellar};
use crate::config::{
    self, ClientCertificate, Config, KeyRingSource, Machine, NetworkConfig, NetworkSecurity, SignerMode, Store,
    Transport,
};
use crate::guard::Rules;
use crate::http::{self, Client, Destination};
use crate::ledger::{Ledger, LedgerError, PostgresLedger, SqliteLedger, postgres};
use crate::mcp;
use crate::mcp::auth::Jwt;
use crate::mcp::{LegacySse, Relay};
use crate::money::Network;
use crate::pay::{Parts, Payer, Settings, Sweep, SweepParts, SweepSettings};
use crate::policy::LivePolicy;
use crate::ports::World;
use crate::seal::KeyRing;
use crate::signer::Signer;
use crate::telemetry;
use crate::upstream::{self, Upstream};

/// Between two looks at what payments depend on, where no probe listener says another time.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A start that failed: one sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{0}")]
    Config(String),
    #[error("the ledger {place}: {problem}")]
    Ledger { place: String, problem: String },
    #[error("the key ring: {0}")]
    KeyRing(String),
}

/// The running parts.
pub struct Server {
    pub tools: Arc<AgentTools>,
    pub catalog: Catalog,
    /// `None` without a signer: discovery needs no ledger.
    pub paying: Option<Paying>,
    /// Whom agents may pay, as the file and the ledger say now.
    pub policy: LivePolicy,
    ring: KeyRing,
    world: World,
    /// For destinations that the operator wrote.
    operator: Client,
    reviews: Option<Arc<TokenReviews>>,
}

#[derive(Clone)]
pub struct Paying {
    pub payer: Payer,
    pub ledger: Arc<dyn Ledger>,
    pub signer: Arc<Signer>,
    pub chains: BTreeMap<Network, Arc<Stellar>>,
    /// The configured networks that can be asked: one that is no longer paid on may have payments that are open.
    pub swept: BTreeMap<Network, Arc<Stellar>>,
    /// Some limit exists: without one every paid call is refused.
    pub limited: bool,
}

pub(crate) type Chains = BTreeMap<Network, Arc<Stellar>>;

impl Server {
    /// Ready to serve, with the file's limits in the ledger.
    pub async fn start(config: &Config, world: &World) -> Result<Server, StartError> {
        let server = Server::probe(config, world).await?;
        if let Some(paying) = &server.paying {
            reload::at_start(config, paying, &server.policy).await.map_err(|e| ledger_failed(config, &e))?;
        }
        Ok(server)
    }

    /// The same parts for a look at them: a file that is only being checked changes no limit of a running server.
    pub async fn probe(config: &Config, world: &World) -> Result<Server, StartError> {
        let tls = http::tls(config.security.ca_pem.as_deref()).map_err(StartError::Config)?;
        let limits =
            http::Limits { timeout: config.security.timeout, max_response_bytes: config.security.max_response_bytes };
        let operator = Client::new(world.clone(), tls.clone(), Destination::Operator, limits);
        let catalog_limits = http::Limits { timeout: config.catalog_timeout, ..limits };
        let catalog_client = Client::new(world.clone(), tls.clone(), Destination::Operator, catalog_limits);
        let catalog = Catalog::new(catalog_client, config.catalog_url.as_str())
            .map_err(|e| StartError::Config(format!("facilitator.base_url: {e}")))?;
        let ring = ring(config, world)?;
        let policy = LivePolicy::new(config.policy.clone());
        let agent_driven = upstream::Settings {
            timeout: config.security.timeout,
            max_response_bytes: config.security.max_response_bytes,
            max_redirects: config.security.max_redirects,
            max_concurrent_connections: config.security.max_concurrent_connections,
            allow_insecure_local: config.security.allow_insecure_local,
            resolved_mcp_endpoints: config.security.resolved_mcp_endpoints.clone(),
            policy: policy.clone(),
            ..upstream::Settings::default()
        };
        let client = agent_driven.client(world.clone(), tls);
        let upstream = Upstream::new(agent_driven, world.clone(), client);
        let paying = match &config.signer {
            SignerMode::None => None,
            mode => Some(paying(config, mode, world, operator.clone(), &catalog, &upstream, (&ring, &policy)).await?),
        };
        let local = match config.transport {
            Transport::Stdio => Some(config.stdio_agent.clone()),
            Transport::Remote => None,
        };
        let payer = paying.as_ref().map(|p| p.payer.clone());
        let tools = Arc::new(AgentTools::new(catalog.clone(), payer, local).probing(upstream));
        let reviews = config.auth.kubernetes.as_ref().map(TokenReviews::new).transpose();
        let reviews =
            reviews.map_err(|problem| StartError::Config(format!("auth.kubernetes: {problem}")))?.map(Arc::new);
        Ok(Server { tools, catalog, paying, policy, ring, world: world.clone(), operator, reviews })
    }

    /// Ends what calls left open: every process that can pay runs one.
    pub fn sweep(&self, config: &Config) -> Option<Sweep> {
        let paying = self.paying.as_ref()?;
        Some(Sweep::new(SweepParts {
            world: self.world.clone(),
            ledger: paying.ledger.clone(),
            chains: paying.swept.clone(),
            settings: sweep_settings(&config.sweep, &config.security),
        }))
    }

    /// Takes over what changes in the file at `path` and in the ledger: every process that can pay runs one.
    pub fn reload(&self, config: &Config, path: Option<PathBuf>) -> Option<Reload> {
        let paying = self.paying.as_ref()?;
        Some(Reload::new(config, path, Arc::new(Machine), paying.ledger.clone(), self.policy.clone()))
    }

    /// What the issuer of tokens and the API server answer, for an operator.
    pub async fn probe_callers(&self, config: &Config) -> Vec<(&'static str, Result<String, String>)> {
        let mut found = Vec::new();
        if let Some(jwt) = &config.auth.jwt {
            let jwt = Jwt::new(jwt.clone(), self.operator.clone(), self.world.clone());
            found.push(("token issuer", jwt.probe().await.map(|keys| format!("{keys} usable keys"))));
        }
        if let Some(reviews) = &self.reviews {
            found.push(("TokenReview", reviews.probe().await.map(|()| "answers".to_owned())));
        }
        found
    }

    /// Reads a ring file again when it changes: every process that signs or seals runs it.
    pub fn watch_keys(&self, shutdown: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        self.ring.clone().watch(shutdown)
    }

    /// How it is: told in `/healthz`, and on the probe listener. Its counters exist from here on.
    pub fn health(&self, config: &Config) -> Arc<Health> {
        for network in self.paying.iter().flat_map(|paying| paying.swept.keys()) {
            for result in ["ok", "refused", "unreachable"] {
                telemetry::RPC_CALLS.add([network.as_str(), result], 0);
            }
        }
        let payable = config.payable.iter().cloned().collect();
        Arc::new(Health::new(self.paying.as_ref(), payable))
    }

    /// Keeps `health` at what it finds; `None` where there is nothing to look at.
    pub fn watch(&self, config: &Config, health: &Arc<Health>) -> Option<Watch> {
        let (world, health) = (self.world.clone(), health.clone());
        let interval = config.probe.map_or(LOOK_EVERY, |probe| probe.interval);
        Some(Watch { world, paying: self.paying.clone()?, health, interval })
    }

    /// What agents reach, see [`Server::fronts`].
    pub fn router(&self, config: &Config, health: Arc<Health>, shutdown: CancellationToken) -> axum::Router {
        self.fronts(config, health, shutdown).public
    }

    /// `/mcp`, `/healthz`, where configured `/sse` and `/messages`; and what the other replicas reach.
    pub fn fronts(&self, config: &Config, health: Arc<Health>, shutdown: CancellationToken) -> mcp::Fronts {
        let authenticator =
            auth::authenticator(&config.auth, self.reviews.clone(), &self.operator, &self.world, &shutdown);
        let health = axum::Router::new().route("/healthz", get(move || async move { axum::Json(health.json()) }));
        let settings = self.settings(config, shutdown);
        let mcp::Fronts { public, relay } = mcp::fronts(settings, self.tools.clone(), authenticator);
        mcp::Fronts { public: public.merge(health), relay }
    }

    pub fn settings(&self, config: &Config, shutdown: CancellationToken) -> mcp::Settings {
        let mut settings = mcp::Settings::new(self.world.clone(), self.ring.clone(), shutdown);
        settings.allowed_hosts = config.http.allowed_hosts.clone();
        settings.allowed_origins = config.http.allowed_origins.clone();
        settings.rate_limit = config.http.rate_limit;
        settings.resource = config.auth.resource.clone();
        settings.max_body_bytes = config.http.max_body_bytes;
        settings.max_concurrent_requests = config.http.max_concurrent_requests;
        settings.drain = config.http.drain;
        let relay = |at| Relay { at, client: self.operator.clone() };
        settings.legacy_sse = config.http.legacy_sse.map(|legacy| LegacySse::new(legacy.advertise.map(relay)));
        settings
    }
}

async fn paying(
    config: &Config,
    mode: &SignerMode,
    world: &World,
    operator: Client,
    catalog: &Catalog,
    upstream: &Upstream,
    (ring, policy): (&KeyRing, &LivePolicy),
) -> Result<Paying, StartError> {
    let sealing = match (&config.key_ring, &config.store) {
        (KeyRingSource::BesideLedger, Store::Postgres(_) | Store::None) => {
            tracing::warn!(
                "keys.ring_env is not set: payloads and outputs are not stored, so a paid call whose answer was lost is \
                 not sent again, and no output is handed out twice"
            );
            None
        }
        _ => Some(ring.clone()),
    };
    let ledger = open(&config.store, world, sealing).await.map_err(|e| ledger_failed(config, &e))?;
    let limits = ledger.limits().await.map_err(|e| ledger_failed(config, &e))?;
    let limited = !config.limits.is_empty() || limits.iter().any(|limit| limit.source != "file");

    let swept = chains(&config.networks, &operator, world);
    let mut chains = swept.clone();
    chains.retain(|network, _| config.payable.contains(network));
    let life = |n: &NetworkConfig| Duration::from_secs(n.max_authorization_seconds);
    let max_authorization = config.networks.iter().map(|(network, n)| (network.clone(), life(n))).collect();
    let signer = Arc::new(signer(mode, &config.security, operator, world)?);

    let mut settings = Settings::new(Rules { payable: config.payable.iter().cloned().collect() });
    settings.policy = policy.clone();
    settings.sign_within = config.sign_within;
    settings.probe_timeout = config.security.timeout;
    // The RPCs of a network are asked one after another.
    let rpcs = config.networks.values().map(|n| n.rpc_urls.len()).max().unwrap_or(1).max(1);
    settings.rpc_timeout = config.security.timeout.saturating_mul(u32::try_from(rpcs).unwrap_or(u32::MAX));
    settings.paid_call_timeout = config.security.paid_call_timeout;
    settings.max_authorization = max_authorization;
    settings.account_ceiling = config.smart_account_ceiling;
    let payer = Payer::new(Parts {
        world: world.clone(),
        catalog: catalog.clone(),
        upstream: upstream.clone(),
        ledger: ledger.clone(),
        chains: chains.clone(),
        signer: signer.clone(),
        settings,
    });
    Ok(Paying { payer, ledger, signer, chains, swept, limited })
}

pub(crate) fn sweep_settings(sweep: &config::Sweep, security: &NetworkSecurity) -> SweepSettings {
    SweepSettings { interval: sweep.interval, rpc_timeout: security.timeout, rpc_per_second: sweep.rpc_per_second }
}

/// For an operator's command, which starts no server.
pub(crate) fn operator_client(security: &NetworkSecurity, world: &World) -> Result<Client, StartError> {
    let tls = http::tls(security.ca_pem.as_deref()).map_err(StartError::Config)?;
    let limits = http::Limits { timeout: security.timeout, max_response_bytes: security.max_response_bytes };
    Ok(Client::new(world.clone(), tls, Destination::Operator, limits))
}

/// Every network that the file gives an RPC for.
pub(crate) fn chains(networks: &BTreeMap<Network, NetworkConfig>, operator: &Client, world: &World) -> Chains {
    let asked = networks.iter().filter(|(_, n)| !n.rpc_urls.is_empty());
    let chain = |(network, n): (&Network, &NetworkConfig)| {
        let settings = stellar::Settings {
            network: network.clone(),
            passphrase: n.passphrase.clone(),
            rpc_urls: n.rpc_urls.clone(),
            credentials: n.credentials,
            max_authorization_seconds: n.max_authorization_seconds,
            min_ledger_ms: n.min_ledger_ms,
        };
        (network.clone(), Arc::new(Stellar::new(settings, operator.clone(), world.clone())))
    };
    asked.map(chain).collect()
}

fn signer(
    mode: &SignerMode,
    security: &NetworkSecurity,
    operator: Client,
    world: &World,
) -> Result<Signer, StartError> {
    match mode {
        SignerMode::None => Err(StartError::Config("signer.mode is none".into())),
        SignerMode::EnvSecret { seed } => Signer::env_secret(Zeroizing::new(seed.expose().to_owned()))
            .map_err(|e| StartError::Config(format!("signer.secret_env: {e}"))),
        SignerMode::EncryptedKey { seed, .. } => Ok(Signer::local(seed)),
        SignerMode::External { base_url, auth_header, certificate } => {
            let client = match certificate {
                None => operator,
                Some(ClientCertificate { chain, key }) => {
                    let tls = http::tls_as(security.ca_pem.as_deref(), chain, key.expose().as_bytes());
                    let tls = tls.map_err(|e| StartError::Config(format!("signer.client_certificate_file: {e}")))?;
                    Client::new(world.clone(), tls, Destination::Operator, operator.limits())
                }
            };
            let header = auth_header.as_ref().map(|h| Zeroizing::new(h.expose().to_owned()));
            Signer::external(base_url.clone(), header, client)
                .map_err(|e| StartError::Config(format!("signer.base_url: {e}")))
        }
    }
}

/// The configured ledger. A SQLite file is made and brought up to this program's schema; a database is not, because
/// other replicas run on it (`tollway migrate` does it).
pub(crate) async fn open(store: &Store, world: &World, ring: Option<KeyRing>) -> Result<Arc<dyn Ledger>, LedgerError> {
    Ok(match store {
        Store::Sqlite(path) => Arc::new(SqliteLedger::open(path, world.clone(), ring).await?),
        Store::Postgres(database) => {
            let options = postgres::Options::default();
            Arc::new(PostgresLedger::connect(database, world.clone(), ring, options).await?)
        }
        Store::None => return Err(LedgerError::Unavailable("none is configured".to_owned())),
    })
}

/// Where it is, without a secret.
pub(crate) fn place(store: &Store) -> String {
    match store {
        Store::Sqlite(path) => path.display().to_string(),
        Store::Postgres(database) => database.shown(),
        Store::None => String::new(),
    }
}

fn ledger_failed(config: &Config, error: &LedgerError) -> StartError {
    let (place, problem) = (place(&config.store), error.to_string());
    // The error of a database that is not reached says already where it is.
    match problem.contains(&place) {
        true => StartError::Config(problem),
        false => StartError::Ledger { place, problem },
    }
}

/// Configured keys; else, where money is kept, a file beside the ledger; else keys of this process alone.
fn ring(config: &Config, world: &World) -> Result<KeyRing, StartError> {
    match (&config.key_ring, &config.store) {
        (KeyRingSource::Keys(ring), _) => Ok(ring.clone()),
        (KeyRingSource::BesideLedger, Store::Sqlite(path)) if config.signer.can_pay() => {
            KeyRing::load_or_create(world, &path.with_file_name("keyring"))
                .map_err(|e| StartError::KeyRing(e.to_string()))
        }
        _ => {
            if config.transport == Transport::Remote {
                tracing::warn!(
                    "keys.ring_env is not set: sessions are signed with a key of this process, for one replica"
                );
            }
            Ok(KeyRing::ephemeral(world))
        }
    }
}
