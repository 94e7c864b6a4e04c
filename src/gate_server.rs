//! A gate from its configuration: the parts are made once, then served. `tollway gate` and the sandbox run the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderValue;
use tokio_util::sync::CancellationToken;

use crate::agent::server;
use crate::config::{GateConfig, GateFacilitator, GateServer, GateUpstream, Store};
use crate::facilitator::Facilitator;
use crate::gate::claims::{ClaimError, Claims, Terms};
use crate::gate::desk::{Gate, GateError, Parts};
use crate::gate::hooks::Hooking;
use crate::gate::proxy::{Child, ChildSettings, HttpUpstream, Settings, Upstream, router};
use crate::gate::sell;
use crate::gate::webhooks::Webhooks;
use crate::http::{self, Client, Destination};
use crate::mcp;
use crate::ports::World;

/// Connections to the upstream that are kept between requests.
const KEPT: usize = 1_024;
/// A webhook says itself that it is late.
const LATER: Duration = Duration::from_millis(500);

/// A start that failed: one sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Parts(#[from] server::StartError),
    #[error(transparent)]
    Gate(#[from] GateError),
    #[error("the claims in {place}: {source}")]
    Claims { place: String, source: ClaimError },
    #[error("{field}: {problem}")]
    Config { field: &'static str, problem: String },
}

fn refuse<T>(field: &'static str, problem: impl Into<String>) -> Result<T, StartError> {
    Err(StartError::Config { field, problem: problem.into() })
}

/// The gate and its endpoint at `/mcp`. [`Gate::start`] is the caller's.
pub async fn open(
    config: &GateServer,
    world: &World,
    shutdown: &CancellationToken,
) -> Result<(Gate, axum::Router), StartError> {
    let client = server::operator_client(&config.gate.security, world)?;
    let upstream = upstream(config, world, shutdown)?;
    let parts = parts(&config.gate, world, &client, config.timeout).await?;
    let gate = match hooking(&config.gate, &client)? {
        Some(hooking) => Gate::with_hooks(parts, hooking),
        None => Gate::new(parts),
    }?;
    let app = router(settings(config, world, shutdown), upstream, gate.clone());
    Ok((gate, app))
}

/// The server behind the gate.
pub fn upstream(config: &GateServer, world: &World, shutdown: &CancellationToken) -> Result<Upstream, StartError> {
    Ok(match &config.upstream {
        GateUpstream::Http { url, auth_header } => {
            let auth = match auth_header.as_ref().map(|secret| HeaderValue::from_str(secret.expose())) {
                None => None,
                Some(Ok(mut value)) => {
                    value.set_sensitive(true);
                    Some(value)
                }
                Some(Err(_)) => return refuse("gate.upstream.auth_header_env", "its value is no header"),
            };
            let security = &config.gate.security;
            let tls = http::tls(security.ca_pem.as_deref()).map_err(server::StartError::Config)?;
            let limits = http::Limits { timeout: config.timeout, max_response_bytes: usize::MAX };
            let client = Client::to_one(world.clone(), tls, Destination::Operator, limits, KEPT);
            match HttpUpstream::new(client, url, auth, config.timeout) {
                Ok(upstream) => Upstream::Http(Arc::new(upstream)),
                Err(error) => return refuse("gate.upstream.url", error.to_string()),
            }
        }
        GateUpstream::Child { command, env, shared, max_processes, idle } => {
            Upstream::Child(Child::new(ChildSettings {
                world: world.clone(),
                command: command.clone(),
                env: env.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect(),
                shared: *shared,
                max_processes: *max_processes,
                idle: *idle,
                timeout: config.timeout,
                max_line: config.gate.max_answer_bytes.max(1 << 20),
                shutdown: shutdown.clone(),
            }))
        }
    })
}

fn settings(config: &GateServer, world: &World, shutdown: &CancellationToken) -> Settings {
    let mut front = mcp::Settings::new(world.clone(), config.gate.ring.clone(), shutdown.clone());
    front.allowed_hosts = config.http.allowed_hosts.clone();
    front.allowed_origins = config.http.allowed_origins.clone();
    front.rate_limit = config.http.rate_limit;
    front.max_body_bytes = config.http.max_body_bytes;
    front.max_concurrent_requests = config.http.max_concurrent_requests;
    front.drain = config.http.drain;
    Settings {
        front,
        forward: config.forward.clone(),
        idle: config.timeout,
        run: config.timeout,
        max_answer_bytes: (16 << 20).max(config.gate.max_answer_bytes),
    }
}

pub async fn claims(config: &GateConfig, world: &World) -> Result<Claims, StartError> {
    let terms = Terms { answers: config.answer_ttl, lease: config.lease, ..Terms::default() };
    let opened = match &config.store {
        Store::Sqlite(path) => Claims::open_sqlite(path, world.clone(), config.ring.clone(), terms).await,
        Store::Postgres(database) => Claims::connect(database, world.clone(), config.ring.clone(), terms).await,
        Store::None => return refuse("budget.store", "nothing is configured to keep claims in"),
    };
    opened.map_err(|source| StartError::Claims { place: server::place(&config.store), source })
}

async fn parts(config: &GateConfig, world: &World, client: &Client, run: Duration) -> Result<Parts, StartError> {
    let mut facilitators = BTreeMap::new();
    for (network, written) in &config.facilitators {
        facilitators.insert(network.clone(), facilitator(client, written)?);
    }
    Ok(Parts {
        world: world.clone(),
        prices: config.prices.clone(),
        claims: claims(config, world).await?,
        facilitators,
        chains: server::chains(&config.networks, client, world),
        resolved_by_operator: config.resolved_by_operator.clone(),
        settings: sell::Settings {
            max_answer: config.max_answer_bytes,
            handler: run,
            junk: config.junk,
            renew: config.lease / 3,
            ..sell::Settings::default()
        },
    })
}

pub fn facilitator(client: &Client, written: &GateFacilitator) -> Result<Facilitator, StartError> {
    let facilitator = Facilitator::new(client.clone(), &written.base_url).with_timeout(written.timeout);
    let Some(secret) = &written.auth_header else { return Ok(facilitator) };
    match facilitator.with_authorization(secret.expose()) {
        Some(facilitator) => Ok(facilitator),
        None => refuse("gate.facilitator.auth_header_env", "its value is no header"),
    }
}

/// What `gate.hooks` asks for, as the gate takes it.
fn hooking(config: &GateConfig, client: &Client) -> Result<Option<Hooking>, StartError> {
    let Some(written) = &config.hooks else { return Ok(None) };
    let mut hooks = Webhooks::new(client.clone(), &written.url, written.timeout).only(&written.events);
    if let Some(secret) = &written.auth_header {
        hooks = match hooks.with_authorization(secret.expose()) {
            Some(hooks) => hooks,
            None => return refuse("gate.hooks.auth_header_env", "its value cannot stand in an HTTP header"),
        };
    }
    Ok(Some(Hooking {
        hooks: Arc::new(hooks),
        timeout: written.timeout + LATER,
        on_failure: written.on_failure,
        ceilings: written.ceilings.clone(),
    }))
}
