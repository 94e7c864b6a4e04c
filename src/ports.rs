//! All that business code may touch of the outside world: clock, randomness, network, tasks. The ledger is a port
//! too, and lives in `ledger`.
//!
//! Each port has two implementations: the machine ([`machine`]), and the seeded world of the simulation in `tests/`.
//! `tokio::time::{sleep, timeout, Instant}` may be used directly: tokio's clock can be paused. What business code may
//! not call stands in `clippy.toml`.

pub mod machine;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}
pub type BoxIo = Box<dyn Io>;

/// Wall clock, unix milliseconds.
pub trait Clock: Send + Sync + 'static {
    fn unix_ms(&self) -> u64;
}

/// Nonces, identifiers and seals.
pub trait Entropy: Send + Sync + 'static {
    fn fill(&self, buf: &mut [u8]);
}

/// DNS and TCP. TLS is put on top of it by `http`.
pub trait Net: Send + Sync + 'static {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
    fn connect(&self, addr: SocketAddr) -> BoxFuture<'_, io::Result<BoxIo>>;
}

pub trait Listener: Send + 'static {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<BoxIo>>;
    /// The same with the address of the other side; `None` where it cannot be told.
    fn accept_from(&mut self) -> BoxFuture<'_, io::Result<(BoxIo, Option<IpAddr>)>> {
        Box::pin(async move { Ok((self.accept().await?, None)) })
    }
}

/// The only way to start a task: whoever implements it owns the task, so that a shutdown or a crash reaches it.
pub trait Spawn: Send + Sync + 'static {
    fn spawn(&self, task: BoxFuture<'static, ()>);
}

/// The ports together, as they are handed around.
#[derive(Clone)]
pub struct World {
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
    pub net: Arc<dyn Net>,
    pub spawn: Arc<dyn Spawn>,
}

impl World {
    pub fn unix_ms(&self) -> u64 {
        self.clock.unix_ms()
    }

    pub fn random<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.entropy.fill(&mut bytes);
        bytes
    }
}
