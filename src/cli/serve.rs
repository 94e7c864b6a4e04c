//! `tollway serve` and `tollway stdio`.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::Failure;
use crate::agent::health::Health;
use crate::agent::probe;
use crate::agent::server::Server;
use crate::config::{self, Config};
use crate::mcp;
use crate::ports::{World, machine};

/// What a client that never reads its answer may hold up the end of the process by, beyond `http.drain_ms`.
const LAST_WAIT: Duration = Duration::from_secs(5);
/// How long load balancers are given to look away, where there are probes and no other time is written.
pub(super) const LOOK_AWAY: Duration = Duration::from_secs(5);

pub async fn serve(config: Config, path: Option<PathBuf>) -> Result<ExitCode, Failure> {
    let mut signals = Signals::listen()?;
    let (world, tasks) = machine::world();
    let server = Server::start(&config, &world).await.map_err(|e| Failure::Usage(e.to_string()))?;
    say_what_is_off(&server);
    let health = server.health(&config);
    let shutdown = CancellationToken::new();
    let mut fronts = server.fronts(&config, health.clone(), shutdown.clone());
    let listener = listen("http.port", SocketAddr::new(config.http.bind, config.http.port)).await?;
    relays(&config, &world, &mut fronts, &shutdown).await?;
    let probes = probes(&config, &health).await?;
    let at = listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string());
    tracing::info!(address = at, paying = server.paying.is_some(), "serving MCP at /mcp");
    watch(&server, &config, &health, &world, &shutdown);
    beside(&server, &config, path, &world, &shutdown);
    let grace = config.http.drain;
    let unready_wait =
        config.http.unready_wait.unwrap_or(if config.probe.is_some() { LOOK_AWAY } else { Duration::ZERO });
    let serving = async {
        let listener = machine::TcpListener(listener);
        mcp::serve::serve_within(config.http.bounds, listener, world.clone(), fronts.public, shutdown.clone()).await;
        shutdown.cancel();
        drop(server);
        drain(tasks, grace).await;
    };
    let ended = end_in_order(serving, &mut signals, || health.drain(), unready_wait, &shutdown).await;
    drop(probes);
    Ok(ended)
}

/// Standard output belongs to the protocol from here on.
pub async fn stdio(config: Config, path: Option<PathBuf>) -> Result<ExitCode, Failure> {
    let mut signals = Signals::listen()?;
    let (world, tasks) = machine::world();
    let server = Server::start(&config, &world).await.map_err(|e| Failure::Usage(e.to_string()))?;
    say_what_is_off(&server);
    let health = server.health(&config);
    let shutdown = CancellationToken::new();
    beside(&server, &config, path, &world, &shutdown);
    let settings = server.settings(&config, shutdown.clone());
    let handler = Arc::clone(&server.tools);
    let mut served = Ok(());
    let serving = async {
        served =
            mcp::stdio(settings, handler, config.stdio_agent.clone(), tokio::io::stdin(), tokio::io::stdout()).await;
        shutdown.cancel();
        drop(server);
        drain(tasks, config.http.drain).await;
    };
    let ended = end_in_order(serving, &mut signals, || health.drain(), Duration::ZERO, &shutdown).await;
    match served {
        Ok(()) => Ok(ended),
        Err(error) => Err(Failure::Failed(format!("standard input or output failed: {error}"))),
    }
}

pub(super) async fn listen(field: &str, at: SocketAddr) -> Result<tokio::net::TcpListener, Failure> {
    let listener = tokio::net::TcpListener::bind(at).await;
    listener.map_err(|e| Failure::Usage(format!("{field}: {at} cannot be listened on ({e})")))
}

/// What other replicas hand over, until `shutdown`.
async fn relays(
    config: &Config,
    world: &World,
    fronts: &mut mcp::Fronts,
    shutdown: &CancellationToken,
) -> Result<(), Failure> {
    let (Some(legacy), Some(app)) = (config.http.legacy_sse, fronts.relay.take()) else { return Ok(()) };
    let listener = listen("http.relay_port", SocketAddr::new(config.http.bind, legacy.relay_port)).await?;
    let shown = listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string());
    tracing::info!(address = shown, "taking over what reaches other replicas for streams of this one");
    let listener = machine::TcpListener(listener);
    world.spawn.spawn(Box::pin(mcp::serve::serve(listener, world.clone(), app, shutdown.clone())));
    Ok(())
}

async fn probes(config: &Config, health: &Arc<Health>) -> Result<Option<DropGuard>, Failure> {
    match config.probe {
        None => Ok(None),
        Some(at) => probe_listener(at, probe::router(health.clone())).await.map(Some),
    }
}

/// The probe listener, in tasks that no drain waits for: it answers until the process ends, which is when the guard is
/// dropped.
pub(super) async fn probe_listener(at: config::Probe, app: mcp::serve::App) -> Result<DropGuard, Failure> {
    let listener = listen("probe.port", SocketAddr::new(at.bind, at.port)).await?;
    let shown = listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string());
    tracing::info!(address = shown, "serving /livez, /readyz and /metrics");
    let (world, _) = machine::world();
    let end = CancellationToken::new();
    let serving = mcp::serve::serve(machine::TcpListener(listener), world.clone(), app, end.clone());
    world.spawn.spawn(Box::pin(serving));
    Ok(end.drop_guard())
}

fn watch(server: &Server, config: &Config, health: &Arc<Health>, world: &World, shutdown: &CancellationToken) {
    if let Some(watch) = server.watch(config, health) {
        world.spawn.spawn(Box::pin(watch.run(shutdown.clone())));
    }
}

/// The sweep, and the looks at what changes: until `shutdown`, each in a task of its own.
fn beside(server: &Server, config: &Config, path: Option<PathBuf>, world: &World, shutdown: &CancellationToken) {
    if let Some(sweep) = server.sweep(config) {
        world.spawn.spawn(Box::pin(sweep.run(shutdown.clone())));
    }
    world.spawn.spawn(Box::pin(server.watch_keys(shutdown.clone())));
    if let Some(reload) = server.reload(config, path) {
        world.spawn.spawn(Box::pin(reload.run(shutdown.clone())));
    }
}

fn say_what_is_off(server: &Server) {
    match &server.paying {
        None => tracing::info!("no signer is configured: discovery only"),
        Some(paying) if !paying.limited => {
            tracing::warn!("no limit is configured (budget.*), so every paid call is refused");
        }
        Some(_) => {}
    }
}

/// `serving` to its end, which `shutdown` brings about; a signal does it in order: not ready, a wait in which requests
/// still pass, then the end of accepting, and what is under way finishes. A second signal ends the process at once: the
/// ledger has all that it takes to go on elsewhere.
pub(super) async fn end_in_order(
    serving: impl Future<Output = ()>,
    signals: &mut Signals,
    unready: impl FnOnce(),
    unready_wait: Duration,
    shutdown: &CancellationToken,
) -> ExitCode {
    let order = async {
        let signal = signals.next().await;
        unready();
        if signal == Signal::Terminate && !unready_wait.is_zero() {
            tracing::info!(wait_ms = unready_wait.as_millis(), "stopping: not ready any more, still serving");
            let wait = pin!(tokio::time::sleep(unready_wait));
            if let Either::Right(_) = select(wait, pin!(signals.next())).await {
                return;
            }
        }
        tracing::info!("stopping: calls in flight may finish");
        shutdown.cancel();
        signals.next().await;
    };
    match select(pin!(serving), pin!(order)).await {
        Either::Left(((), _)) => ExitCode::SUCCESS,
        Either::Right(((), _)) => {
            tracing::warn!("ended at once; payments in flight stay held in the ledger");
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signal {
    Terminate,
    Interrupt,
}

/// SIGTERM and SIGINT, which end nothing by themselves once this is made.
pub(super) struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    pub(super) fn listen() -> Result<Signals, Failure> {
        let failed = |e| Failure::Failed(format!("signals cannot be waited for ({e})"));
        let terminate = signal(SignalKind::terminate()).map_err(failed)?;
        Ok(Signals { terminate, interrupt: signal(SignalKind::interrupt()).map_err(failed)? })
    }

    pub(super) async fn next(&mut self) -> Signal {
        match select(pin!(self.terminate.recv()), pin!(self.interrupt.recv())).await {
            Either::Left(_) => Signal::Terminate,
            Either::Right(_) => Signal::Interrupt,
        }
    }
}

/// Call it after the server is dropped: its clients keep idle connections, and each is a task.
///
/// Payments in flight finish their bookkeeping; what is left after that stays in the ledger, and is found there.
pub(super) async fn drain(tasks: TaskTracker, grace: Duration) {
    tasks.close();
    if tokio::time::timeout(grace + LAST_WAIT, tasks.wait()).await.is_err() {
        tracing::warn!(left = tasks.len(), "the time to finish is over; payments in flight stay held in the ledger");
    }
}
