//! The accept loop over the ports. `axum::serve` starts tasks past the Spawn port, so it is not used.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio_util::sync::CancellationToken;

use super::rate::Peer;
use crate::ports::{Listener, World};

/// A client that sends its request head slower than this is cut off. hyper counts an idle connection's time too, and
/// a proxy in front reuses connections for 60 s: were ours shorter, its next request could meet a closing one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// Serves until `shutdown`; connections then finish the request they are in and close. The tasks belong to the Spawn
/// port, so whoever owns it can wait for them.
pub async fn serve(mut listener: impl Listener, world: World, app: axum::Router, shutdown: CancellationToken) {
    loop {
        let accepted = {
            let accept = listener.accept_from();
            let stop = pin!(shutdown.cancelled());
            match select(stop, accept).await {
                Either::Left(_) => return,
                Either::Right((accepted, _)) => accepted,
            }
        };
        let (io, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors or a connection that was reset before it was taken: neither ends the server.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let app = match peer {
            Some(peer) => app.clone().layer(axum::Extension(Peer(peer))),
            None => app.clone(),
        };
        let service = TowerToHyperService::new(app);
        let shutdown = shutdown.clone();
        world.spawn.spawn(Box::pin(async move {
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .auto_date_header(false)
                .serve_connection(TokioIo::new(io), service);
            let mut connection = pin!(connection);
            let stop = pin!(shutdown.cancelled());
            if let Either::Left(((), unfinished)) = select(stop, connection.as_mut()).await {
                unfinished.graceful_shutdown();
                let _ = connection.await;
            }
        }));
    }
}
