//! The HTTP listener.

use std::net::IpAddr;
use std::time::Duration;

use super::value::bounded;
use super::value::millis;
use super::value::secret_env;
use super::{ConfigError, Source, Transport, file, refuse};
use crate::mcp::{StaticKeys, access};

#[derive(Debug, Clone)]
pub struct Http {
    pub bind: IpAddr,
    pub port: u16,
    /// `None` when the variable that is to hold the bearer keys is not set.
    pub api_keys: Option<StaticKeys>,
    pub allowed_hosts: Vec<String>,
    pub allowed_origins: Vec<String>,
    pub max_body_bytes: usize,
    pub max_concurrent_requests: usize,
    pub drain: Duration,
    /// After SIGTERM requests are taken for this long, while `/readyz` says no: load balancers look away meanwhile.
    /// `None`: not written.
    pub unready_wait: Option<Duration>,
}

pub(super) fn http(file: file::Http, transport: Transport, source: &dyn Source) -> Result<Http, ConfigError> {
    let port = match source.env("PORT") {
        Some(text) => text.parse().or_else(|_| refuse("PORT", format!("{text:?} is not a port (0-65535)")))?,
        None => file.port.unwrap_or(4522),
    };
    let bind = file.bind.unwrap_or_else(|| "127.0.0.1".into());
    let asked_for = file.api_keys_env.is_some();
    let api_keys_env = file.api_keys_env.unwrap_or_else(|| "MCP_SERVER_API_KEYS".into());
    // On stdio the keys are another process's business, and are not read.
    let api_keys = secret_env(&api_keys_env, source).filter(|_| transport == Transport::Remote);
    if api_keys.is_none() && asked_for && transport == Transport::Remote {
        let fix = "set it (name:secret, 32 bytes or more), or remove the line where everybody may connect";
        return refuse("http.api_keys_env", format!("the environment variable {api_keys_env} is not set: {fix}"));
    }
    let api_keys = api_keys.map(|keys| {
        let parsed = StaticKeys::parse(keys.expose());
        parsed.or_else(|e| refuse("http.api_keys_env", format!("{api_keys_env}: {e}")))
    });
    if let Some(host) = file.allowed_hosts.iter().find(|host| !access::is_host(host)) {
        let problem = format!("{host:?} is no host: write the name that clients use, such as tollway.example.com");
        return refuse("http.allowed_hosts", problem);
    }
    if let Some(origin) = file.allowed_origins.iter().find(|origin| !access::is_origin(origin)) {
        let problem = format!("{origin:?} is no origin: write scheme and host, such as https://app.example.com");
        return refuse("http.allowed_origins", problem);
    }
    Ok(Http {
        bind: bind.parse().or_else(|_| refuse("http.bind", format!("{bind:?} is not an IP address")))?,
        port,
        api_keys: api_keys.transpose()?,
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
        drain: millis("http.drain_ms", file.drain_ms, 30_000, 0, 3_600_000)?,
        unready_wait: match file.unready_wait_ms {
            Some(_) => Some(millis("http.unready_wait_ms", file.unready_wait_ms, 0, 0, 600_000)?),
            None => None,
        },
    })
}
