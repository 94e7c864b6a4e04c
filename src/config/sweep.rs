//! How often payments whose end is not known are looked at, and how fast the chains' RPCs are asked about them.

use std::time::Duration;

use super::value::millis;
use super::{ConfigError, file, refuse};

const RPC_PER_SECOND: u32 = 20;
const FASTEST: u32 = 1_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sweep {
    /// Between two looks at the payments that are due.
    pub interval: Duration,
    /// Requests of this process to all RPCs of one network together.
    pub rpc_per_second: u32,
}

pub(super) fn sweep(file: &file::Sweep) -> Result<Sweep, ConfigError> {
    let rpc_per_second = file.rpc_per_second.unwrap_or(RPC_PER_SECOND);
    if !(1..=FASTEST).contains(&rpc_per_second) {
        return refuse(
            "sweep.rpc_per_second",
            format!("{rpc_per_second} is not between 1 and {FASTEST} requests per second, network and replica"),
        );
    }
    let interval = millis("sweep.interval_ms", file.interval_ms, 10_000, 100, 600_000)?;
    Ok(Sweep { interval, rpc_per_second })
}
