//! `tollway gate`: a payment gate in front of an MCP server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderValue;
use futures_util::future::{Either, select};
use tokio_util::sync::CancellationToken;

use super::serve::{LOOK_AWAY, Signals, drain, end_in_order, listen, probe_listener};
use super::{Failure, check, gate_hooks};
use crate::agent::server;
use crate::config::{GateConfig, GateServer, GateUpstream, Look, Machine, Store, Watched};
use crate::facilitator::Facilitator;
use crate::gate::claims::{Claims, Terms};
use crate::gate::desk::{Gate, Parts};
use crate::gate::proxy::health::Health;
use crate::gate::proxy::{Child, ChildSettings, HttpUpstream, Settings, Upstream, router};
use crate::gate::sell;
use crate::http::{self, Client, Destination};
use crate::mcp;
use crate::ports::{World, machine};

/// Connections to the upstream that are kept between requests.
const KEPT: usize = 1_024;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The file says what is sold (gate.tools, gate.resources, gate.prompts), who settles payments (gate.facilitator), and
which server stands behind it: gate.upstream.url for Streamable HTTP, or gate.upstream.command for a program that speaks
MCP on its standard input and output. What has no price passes through unchanged.

  tollway init gate            write a commented configuration
  tollway gate --check         say what it means, and start nothing
  tollway list                 every tool, resource and prompt with its price

One gate keeps its claims in SQLite; several need budget.store: postgres and the same keys.ring_env.
SIGTERM: not ready any more, then no new requests, and paid requests under way finish within http.drain_ms.")]
pub struct GateArgs {
    /// Say what the configuration means, and start nothing
    #[arg(long)]
    check: bool,
}

pub async fn run(args: &GateArgs, config: GateServer, path: Option<PathBuf>) -> Result<ExitCode, Failure> {
    if args.check {
        return check::gate(&config, false, false).await;
    }
    let mut signals = Signals::listen()?;
    let (world, tasks) = machine::world();
    let shutdown = CancellationToken::new();
    // Ends what goes on beside the requests, which outlives them by the drain.
    let stopped = CancellationToken::new();
    let client = server::operator_client(&config.gate.security, &world).map_err(usage)?;
    let upstream = upstream(&config, &world, &shutdown)?;
    let parts = parts(&config.gate, &world, &client, config.timeout).await?;
    let gate = match gate_hooks::hooking(&config.gate, &client)? {
        Some(hooking) => Gate::with_hooks(parts, hooking),
        None => Gate::new(parts),
    };
    let gate = gate.map_err(|e| Failure::Usage(e.to_string()))?;
    let health = Health::new();
    let app = router(settings(&config, &world, &shutdown), upstream, gate.clone()).merge(health.public());
    let listener = listen("http.port", SocketAddr::new(config.http.bind, config.http.port)).await?;
    let probes = match config.probe {
        Some(at) => Some(probe_listener(at, health.probes()).await?),
        None => None,
    };
    gate.start(stopped.clone()).await;
    let interval = config.probe.map_or(Duration::from_secs(5), |probe| probe.interval);
    world.spawn.spawn(Box::pin(health.clone().watch(gate.clone(), interval, stopped.clone())));
    world.spawn.spawn(Box::pin(config.gate.ring.clone().watch(stopped.clone())));
    if let Some(path) = path {
        let watched = Watched::gate(path);
        world.spawn.spawn(Box::pin(reprice(gate.clone(), watched, config.reload_interval, stopped.clone())));
    }
    let at = listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string());
    tracing::info!(address = at, items = config.gate.prices.items().count(), "a gate is open at /mcp");
    if let Store::Sqlite(path) = &config.gate.store {
        tracing::info!(path = %path.display(), "claims are in SQLite: for one gate; more than one needs budget.store: postgres");
    }
    let grace = config.http.drain;
    let unready_wait =
        config.http.unready_wait.unwrap_or(if config.probe.is_some() { LOOK_AWAY } else { Duration::ZERO });
    let serving = async {
        let listener = machine::TcpListener(listener);
        mcp::serve::serve_within(config.http.bounds, listener, world.clone(), app, shutdown.clone()).await;
        shutdown.cancel();
        if tokio::time::timeout(grace, gate.drained()).await.is_err() {
            tracing::warn!("the time to finish is over; payments under way are found in their claims");
        }
        stopped.cancel();
        drop((gate, client));
        drain(tasks, grace).await;
    };
    let ended = end_in_order(serving, &mut signals, || health.drain(), unready_wait, &shutdown).await;
    drop(probes);
    Ok(ended)
}

/// A changed file's prices count without a restart; what else changes in it waits for one.
async fn reprice(gate: Gate, mut watched: Watched<GateServer>, interval: Duration, stopped: CancellationToken) {
    loop {
        match watched.look(&Machine) {
            Look::Same => {}
            Look::Refused(error) => tracing::error!(%error, "the configuration file is not used: the prices stay"),
            Look::Changed(config) => match gate.reprice(config.gate.prices.clone()) {
                Ok(()) => {
                    tracing::info!(items = config.gate.prices.items().count(), "the prices are those of the file")
                }
                Err(error) => tracing::error!(%error, "the configuration file is not used: the prices stay"),
            },
        }
        let pause = pin!(tokio::time::sleep(interval));
        if let Either::Left(_) = select(pin!(stopped.cancelled()), pause).await {
            return;
        }
    }
}

fn usage(error: impl std::fmt::Display) -> Failure {
    Failure::Usage(error.to_string())
}

/// The server behind the gate.
pub(super) fn upstream(config: &GateServer, world: &World, shutdown: &CancellationToken) -> Result<Upstream, Failure> {
    Ok(match &config.upstream {
        GateUpstream::Http { url, auth_header } => {
            let auth = auth_header.as_ref().map(|secret| {
                let mut value = HeaderValue::from_str(secret.expose())
                    .map_err(|_| Failure::Usage("gate.upstream.auth_header_env: its value is no header".into()))?;
                value.set_sensitive(true);
                Ok::<_, Failure>(value)
            });
            let security = &config.gate.security;
            let tls = http::tls(security.ca_pem.as_deref()).map_err(Failure::Usage)?;
            let limits = http::Limits { timeout: config.timeout, max_response_bytes: usize::MAX };
            let client = Client::to_one(world.clone(), tls, Destination::Operator, limits, KEPT);
            let upstream = HttpUpstream::new(client, url, auth.transpose()?, config.timeout);
            Upstream::Http(Arc::new(upstream.map_err(|e| Failure::Usage(format!("gate.upstream.url: {e}")))?))
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

pub(super) async fn claims(config: &GateConfig, world: &World) -> Result<Claims, Failure> {
    let terms = Terms { answers: config.answer_ttl, ..Terms::default() };
    let opened = match &config.store {
        Store::Sqlite(path) => Claims::open_sqlite(path, world.clone(), config.ring.clone(), terms).await,
        Store::Postgres(database) => Claims::connect(database, world.clone(), config.ring.clone(), terms).await,
        Store::None => return Err(Failure::Usage("budget.store: nothing is configured to keep claims in".into())),
    };
    opened.map_err(|e| Failure::Usage(format!("the claims in {}: {e}", server::place(&config.store))))
}

async fn parts(config: &GateConfig, world: &World, client: &Client, run: Duration) -> Result<Parts, Failure> {
    let mut facilitators = std::collections::BTreeMap::new();
    for (network, written) in &config.facilitators {
        facilitators.insert(network.clone(), facilitator(client, written)?);
    }
    Ok(Parts {
        world: world.clone(),
        prices: config.prices.clone(),
        claims: claims(config, world).await?,
        facilitators,
        chains: server::chains(&config.networks, client, world),
        settings: sell::Settings {
            max_answer: config.max_answer_bytes,
            handler: run,
            junk: config.junk,
            ..sell::Settings::default()
        },
    })
}

pub(super) fn facilitator(client: &Client, written: &crate::config::GateFacilitator) -> Result<Facilitator, Failure> {
    let facilitator = Facilitator::new(client.clone(), &written.base_url).with_timeout(written.timeout);
    match &written.auth_header {
        None => Ok(facilitator),
        Some(secret) => facilitator
            .with_authorization(secret.expose())
            .ok_or_else(|| Failure::Usage("gate.facilitator.auth_header_env: its value is no header".into())),
    }
}
