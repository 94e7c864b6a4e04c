//! The accept loop over the ports. `axum::serve` starts tasks past the Spawn port, so it is not used.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::connection::watched;
use super::proxies::Proxies;
use super::rate::Peer;
use crate::ports::{Listener, World};
use crate::telemetry::CONNECTIONS;

/// What is served.
pub type App = axum::Router;

/// The most that is kept of a connection's unread bytes, a request's head among them.
const MAX_BUFFER: usize = 64 * 1024;
/// Between two lines in the log about connections that were refused.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// What inbound connections may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once; one more is closed as soon as it is there.
    pub connections: usize,
    /// Connections at once of one address (of IPv6, of one /64). Behind a proxy all of them are the proxy's.
    pub per_source: usize,
    /// Whose word counts about who made a request.
    pub proxies: Proxies,
    /// A connection without a request is closed after this. A proxy in front reuses connections for 60 s: were ours
    /// shorter, its next request could meet a closing one.
    pub idle: Duration,
    /// A request's head that takes longer from its first byte on is cut off.
    pub head: Duration,
    /// A client that takes nothing for this long of what there is for it is cut off.
    pub write: Duration,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            connections: 4096,
            per_source: 4096,
            proxies: Proxies::default(),
            idle: Duration::from_secs(75),
            head: Duration::from_secs(10),
            write: Duration::from_secs(30),
        }
    }
}

/// Serves within the default [`Bounds`] until `shutdown`.
pub async fn serve(listener: impl Listener, world: World, app: axum::Router, shutdown: CancellationToken) {
    serve_within(Bounds::default(), listener, world, app, shutdown).await;
}

/// Serves until `shutdown`; connections then finish the request they are in and close. The tasks belong to the Spawn
/// port, so whoever owns it can wait for them.
pub async fn serve_within(
    bounds: Bounds,
    mut listener: impl Listener,
    world: World,
    app: axum::Router,
    shutdown: CancellationToken,
) {
    let open = Arc::<Open>::default();
    let mut said: Option<Instant> = None;
    loop {
        let accepted = {
            let accept = listener.accept_from();
            let stop = pin!(shutdown.cancelled());
            match select(stop, accept).await {
                Either::Left(_) => return,
                Either::Right((accepted, _)) => accepted,
            }
        };
        let (io, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors or a connection that was reset before it was taken: neither ends the server.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let place = match open.take(from, &bounds) {
            Ok(place) => place,
            Err(reason) => {
                if said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
                    said = Some(Instant::now());
                    tracing::warn!(?from, "connections are closed unheard: {reason}");
                }
                continue;
            }
        };
        let (io, answers) = watched(io, from, app.clone(), &bounds);
        let (shutdown, idle) = (shutdown.clone(), bounds.idle);
        world.spawn.spawn(Box::pin(async move {
            let _place = place;
            let _open = CONNECTIONS.hold();
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                // hyper counts the time without a request too; the head's own limit is the connection's.
                .header_read_timeout(idle)
                .max_buf_size(MAX_BUFFER)
                .auto_date_header(false)
                .serve_connection(TokioIo::new(io), answers);
            let mut connection = pin!(connection);
            let stop = pin!(shutdown.cancelled());
            if let Either::Left(((), unfinished)) = select(stop, connection.as_mut()).await {
                unfinished.graceful_shutdown();
                let _ = connection.await;
            }
        }));
    }
}

/// The connections that are open.
#[derive(Default)]
struct Open(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    all: usize,
    by_source: BTreeMap<String, usize>,
}

impl Open {
    /// `Err` is the reason for the log.
    fn take(self: &Arc<Self>, from: Option<IpAddr>, bounds: &Bounds) -> Result<Place, String> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.all >= bounds.connections {
            return Err(format!("http.max_connections ({}) are open", bounds.connections));
        }
        let source = from.map(|from| Peer(from).key());
        if let Some(source) = &source {
            let held = counts.by_source.get(source).copied().unwrap_or(0);
            if held >= bounds.per_source {
                return Err(format!("http.max_connections_per_source ({}) are open from there", bounds.per_source));
            }
            counts.by_source.insert(source.clone(), held + 1);
        }
        counts.all += 1;
        Ok(Place { open: self.clone(), source })
    }
}

struct Place {
    open: Arc<Open>,
    /// `None` where the listener cannot tell.
    source: Option<String>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.open.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.all = counts.all.saturating_sub(1);
        let Some(source) = self.source.take() else { return };
        match counts.by_source.get(&source).copied() {
            Some(held) if held > 1 => drop(counts.by_source.insert(source, held - 1)),
            _ => drop(counts.by_source.remove(&source)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_by_network_and_given_back() {
        let bounds = Bounds { connections: 3, per_source: 2, ..Bounds::default() };
        let open = Arc::<Open>::default();
        let from = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        let first = open.take(from("2001:db8::1"), &bounds).unwrap();
        let second = open.take(from("2001:db8::ffff:2"), &bounds).unwrap();
        assert!(open.take(from("2001:db8::3"), &bounds).err().unwrap().contains("per_source"), "one /64 is one source");
        let third = open.take(from("192.0.2.1"), &bounds).unwrap();
        assert!(open.take(from("192.0.2.2"), &bounds).err().unwrap().contains("max_connections (3)"));
        drop(first);
        let fourth = open.take(from("::ffff:192.0.2.1"), &bounds).unwrap();
        assert!(open.take(from("192.0.2.1"), &Bounds { connections: 9, ..bounds }).is_err(), "mapped is the same");
        drop((second, third, fourth));
        let counts = open.0.lock().unwrap();
        assert!(counts.all == 0 && counts.by_source.is_empty(), "nothing is kept of those who went");
    }
}
