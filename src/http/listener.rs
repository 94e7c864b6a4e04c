//! TLS on a listener of our own.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use crate::ports::{BoxIo, Listener};

const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at once; further connections wait in the operating system's queue.
const HANDSHAKES: usize = 64;

/// Gives connections whose handshake is done; a slow or broken one delays nobody.
pub struct TlsListener<L, C> {
    inner: L,
    /// What the next connection is accepted with.
    config: C,
    handshakes: FuturesUnordered<BoxFuture<'static, Option<BoxIo>>>,
}

impl<L: Listener, C: Fn() -> Arc<ServerConfig> + Send + 'static> TlsListener<L, C> {
    pub fn new(inner: L, config: C) -> Self {
        TlsListener { inner, config, handshakes: FuturesUnordered::new() }
    }
}

impl<L: Listener, C: Fn() -> Arc<ServerConfig> + Send + 'static> Listener for TlsListener<L, C> {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<BoxIo>> {
        Box::pin(async move {
            loop {
                if self.handshakes.len() >= HANDSHAKES {
                    if let Some(Some(io)) = self.handshakes.next().await {
                        return Ok(io);
                    }
                    continue;
                }
                let accepted = match self.handshakes.is_empty() {
                    true => self.inner.accept().await?,
                    false => match select(self.handshakes.next(), self.inner.accept()).await {
                        Either::Left((Some(Some(io)), _)) => return Ok(io),
                        Either::Left(_) => continue,
                        Either::Right((accepted, _)) => accepted?,
                    },
                };
                self.handshakes.push(handshake((self.config)(), accepted));
            }
        })
    }
}

fn handshake(config: Arc<ServerConfig>, io: BoxIo) -> BoxFuture<'static, Option<BoxIo>> {
    Box::pin(async move {
        let done = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(io)).await;
        done.ok()?.ok().map(|stream| Box::new(stream) as BoxIo)
    })
}
