//! The ports on the real machine.
#![allow(clippy::disallowed_methods, reason = "this is the adapter to the real world")]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio_util::task::TaskTracker;

use super::{BoxIo, Clock, Entropy, Listener, Net, Spawn, World};

/// The machine's ports, and the tracker of the tasks started through them, which a shutdown waits for.
pub fn world() -> (World, TaskTracker) {
    let tracker = TaskTracker::new();
    let world = World {
        clock: Arc::new(MachineClock),
        entropy: Arc::new(MachineEntropy),
        net: Arc::new(MachineNet),
        spawn: Arc::new(MachineSpawn(tracker.clone())),
    };
    (world, tracker)
}

struct MachineClock;
impl Clock for MachineClock {
    fn unix_ms(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}

struct MachineEntropy;
impl Entropy for MachineEntropy {
    /// Ends the process where the system has no randomness: a guessable nonce or key is worse than no service.
    fn fill(&self, buf: &mut [u8]) {
        if aws_lc_rs::rand::fill(buf).is_err() {
            eprintln!("tollway: the system's random number generator failed");
            std::process::abort();
        }
    }
}

struct MachineNet;
impl Net for MachineNet {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move { Ok(tokio::net::lookup_host((host, 0)).await?.map(|addr| addr.ip()).collect()) })
    }

    fn connect(&self, addr: SocketAddr) -> BoxFuture<'_, io::Result<BoxIo>> {
        Box::pin(async move {
            let stream = tokio::net::TcpStream::connect(addr).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as BoxIo)
        })
    }
}

struct MachineSpawn(TaskTracker);
impl Spawn for MachineSpawn {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.0.spawn(task);
    }
}

/// A plain TCP listener.
pub struct TcpListener(pub tokio::net::TcpListener);
impl Listener for TcpListener {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<BoxIo>> {
        Box::pin(async move { Ok(self.accept_from().await?.0) })
    }

    fn accept_from(&mut self) -> BoxFuture<'_, io::Result<(BoxIo, Option<IpAddr>)>> {
        Box::pin(async move {
            let (stream, peer) = self.0.accept().await?;
            stream.set_nodelay(true)?;
            Ok((Box::new(stream) as BoxIo, Some(peer.ip())))
        })
    }
}
