//! The listener of the orchestrator and of Prometheus: no authentication and no Host check, so it is off until it is
//! asked for, and on loopback until another address is written.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::value::millis;
use super::{ConfigError, file, refuse};

const PORT: u16 = 9522;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    pub bind: IpAddr,
    pub port: u16,
    /// Between two looks at what this process depends on.
    pub interval: Duration,
}

/// `public`: the port of the agents, which has rules that this one has not.
pub(super) fn probe(file: Option<file::Probe>, public: u16) -> Result<Option<Probe>, ConfigError> {
    let Some(file) = file else { return Ok(None) };
    let bind = match file.bind {
        Some(text) => text.parse().or_else(|_| refuse("probe.bind", format!("{text:?} is not an IP address")))?,
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let port = file.port.unwrap_or(PORT);
    if port == public && port != 0 {
        return refuse("probe.port", format!("{port} is http.port: write another, such as {PORT}"));
    }
    let interval = millis("probe.interval_ms", file.interval_ms, 5_000, 100, 60_000)?;
    Ok(Some(Probe { bind, port, interval }))
}
