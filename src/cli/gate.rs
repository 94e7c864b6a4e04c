//! `tollway gate`: a payment gate in front of an MCP server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio_util::sync::CancellationToken;

use super::serve::{LOOK_AWAY, Signals, drain, end_in_order, listen, probe_listener};
use super::{Failure, check};
use crate::config::{GateServer, Look, Machine, Store, Watched};
use crate::gate::desk::Gate;
use crate::gate::proxy::health::Health;
use crate::gate_server;
use crate::mcp;
use crate::ports::machine;

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
    let (gate, app) = gate_server::open(&config, &world, &shutdown).await?;
    let health = Health::new();
    let app = app.merge(health.public());
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
        drop(gate);
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
