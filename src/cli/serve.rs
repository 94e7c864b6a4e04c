//! `tollway serve` and `tollway stdio`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Failure;
use crate::agent::server::Server;
use crate::config::Config;
use crate::mcp;
use crate::ports::{World, machine};

/// What a client that never reads its answer may hold up the end of the process by, beyond `http.drain_ms`.
const LAST_WAIT: Duration = Duration::from_secs(5);

pub async fn serve(config: Config, path: Option<PathBuf>) -> Result<ExitCode, Failure> {
    let (world, tasks) = machine::world();
    let server = Server::start(&config, &world).await.map_err(|e| Failure::Usage(e.to_string()))?;
    say_what_is_off(&server);
    let shutdown = CancellationToken::new();
    let app = server.router(&config, shutdown.clone());
    let at = SocketAddr::new(config.http.bind, config.http.port);
    let listener = tokio::net::TcpListener::bind(at)
        .await
        .map_err(|e| Failure::Usage(format!("http.port: {at} cannot be listened on ({e})")))?;
    let at = listener.local_addr().unwrap_or(at);
    tracing::info!(address = %at, paying = server.paying.is_some(), "serving MCP at /mcp");
    let ended = end_on_signal(&world, shutdown.clone());
    beside(&server, &config, path, &world, &shutdown);
    let listener = machine::TcpListener(listener);
    mcp::serve::serve_within(config.http.bounds, listener, world.clone(), app, shutdown.clone()).await;
    shutdown.cancel();
    drop(ended);
    drop(server);
    drain(tasks, config.http.drain).await;
    Ok(ExitCode::SUCCESS)
}

/// Standard output belongs to the protocol from here on.
pub async fn stdio(config: Config, path: Option<PathBuf>) -> Result<ExitCode, Failure> {
    let (world, tasks) = machine::world();
    let server = Server::start(&config, &world).await.map_err(|e| Failure::Usage(e.to_string()))?;
    say_what_is_off(&server);
    let shutdown = CancellationToken::new();
    let ended = end_on_signal(&world, shutdown.clone());
    beside(&server, &config, path, &world, &shutdown);
    let settings = server.settings(&config, shutdown.clone());
    let handler = Arc::clone(&server.tools);
    let served =
        mcp::stdio(settings, handler, config.stdio_agent.clone(), tokio::io::stdin(), tokio::io::stdout()).await;
    shutdown.cancel();
    drop(ended);
    drop(server);
    drain(tasks, config.http.drain).await;
    match served {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(Failure::Failed(format!("standard input or output failed: {error}"))),
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

/// Cancels `shutdown` at SIGTERM or SIGINT. Dropping the guard ends the waiting.
fn end_on_signal(world: &World, shutdown: CancellationToken) -> tokio_util::sync::DropGuard {
    let done = CancellationToken::new();
    let stop = done.clone();
    world.spawn.spawn(Box::pin(async move {
        let signal = std::pin::pin!(termination());
        let stop = std::pin::pin!(stop.cancelled());
        if let futures_util::future::Either::Left(_) = futures_util::future::select(signal, stop).await {
            tracing::info!("stopping: calls in flight may finish");
            shutdown.cancel();
        }
    }));
    done.drop_guard()
}

/// SIGTERM or SIGINT.
pub(super) async fn termination() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    let terminate = std::pin::pin!(terminate.recv());
    let interrupt = std::pin::pin!(interrupt.recv());
    let _ = futures_util::future::select(terminate, interrupt).await;
}

/// Call it after the server is dropped: its clients keep idle connections, and each is a task.
///
/// Payments in flight finish their bookkeeping; what is left after that stays in the ledger, and is found there.
async fn drain(tasks: TaskTracker, grace: Duration) {
    tasks.close();
    if tokio::time::timeout(grace + LAST_WAIT, tasks.wait()).await.is_err() {
        tracing::warn!(left = tasks.len(), "the time to finish is over; payments in flight stay held in the ledger");
    }
}
