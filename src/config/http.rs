//! The HTTP listener.

use std::net::IpAddr;
use std::time::Duration;

use super::legacy::{LegacySse, legacy_sse};
use super::value::bounded;
use super::value::millis;
use super::{ConfigError, Source, file, refuse};
use crate::mcp::proxies::Proxies;
use crate::mcp::serve::Bounds;
use crate::mcp::{RateLimit, access};

#[derive(Debug, Clone)]
pub struct Http {
    pub bind: IpAddr,
    pub port: u16,
    pub rate_limit: Option<RateLimit>,
    pub allowed_hosts: Vec<String>,
    pub allowed_origins: Vec<String>,
    pub max_body_bytes: usize,
    pub max_concurrent_requests: usize,
    pub bounds: Bounds,
    pub drain: Duration,
    /// After SIGTERM requests are taken for this long, while `/readyz` says no: load balancers look away meanwhile.
    /// `None`: not written.
    pub unready_wait: Option<Duration>,
    /// `None`: the transport of 2024-11-05 is not served.
    pub legacy_sse: Option<LegacySse>,
}

pub(super) fn http(file: file::Http, source: &dyn Source) -> Result<Http, ConfigError> {
    let port = match source.env("PORT") {
        Some(text) => text.parse().or_else(|_| refuse("PORT", format!("{text:?} is not a port (0-65535)")))?,
        None => file.port.unwrap_or(4522),
    };
    let legacy_sse = legacy_sse(&file, port, source)?;
    let bind = file.bind.unwrap_or_else(|| "127.0.0.1".into());
    if let Some(host) = file.allowed_hosts.iter().find(|host| !access::is_host(host)) {
        let problem = format!("{host:?} is no host: write the name that clients use, such as tollway.example.com");
        return refuse("http.allowed_hosts", problem);
    }
    if let Some(origin) = file.allowed_origins.iter().find(|origin| !access::is_origin(origin)) {
        let problem = format!("{origin:?} is no origin: write scheme and host, such as https://app.example.com");
        return refuse("http.allowed_origins", problem);
    }
    let per_source = file.max_connections_per_source;
    let connections = bounded("http.max_connections", file.max_connections, 4096, 1, 1_000_000)?;
    let bounds = Bounds {
        connections,
        per_source: bounded("http.max_connections_per_source", per_source, connections, 1, 1_000_000)?,
        proxies: Proxies::parse(&file.trusted_proxies)
            .or_else(|(at, why)| refuse(format!("http.trusted_proxies[{at}]"), why))?,
        idle: millis("http.idle_timeout_ms", file.idle_timeout_ms, 75_000, 1_000, 3_600_000)?,
        write: millis("http.write_timeout_ms", file.write_timeout_ms, 30_000, 1_000, 600_000)?,
        ..Bounds::default()
    };
    Ok(Http {
        bind: bind.parse().or_else(|_| refuse("http.bind", format!("{bind:?} is not an IP address")))?,
        port,
        rate_limit: file.rate_limit.map(rate_limit).transpose()?,
        allowed_hosts: file.allowed_hosts,
        allowed_origins: file.allowed_origins,
        max_body_bytes: bounded("http.max_body_bytes", file.max_body_bytes, 1 << 20, 1 << 10, 64 << 20)?,
        max_concurrent_requests: bounded(
            "http.max_concurrent_requests",
            file.max_concurrent_requests,
            512,
            1,
            100_000,
        )?,
        bounds,
        drain: millis("http.drain_ms", file.drain_ms, 30_000, 0, 3_600_000)?,
        unready_wait: match file.unready_wait_ms {
            Some(_) => Some(millis("http.unready_wait_ms", file.unready_wait_ms, 0, 0, 600_000)?),
            None => None,
        },
        legacy_sse,
    })
}

fn rate_limit(file: file::RateLimit) -> Result<RateLimit, ConfigError> {
    let count = |member: &str, value: u32, max: u32| match value {
        value if (1..=max).contains(&value) => Ok(value),
        value => refuse(format!("http.rate_limit.{member}"), format!("{value} is not between 1 and {max}")),
    };
    let per_second = count("requests_per_second", file.requests_per_second, 100_000)?;
    let burst = count("burst", file.burst.unwrap_or(per_second.saturating_mul(2)), 1_000_000)?;
    Ok(RateLimit { per_second, burst })
}
