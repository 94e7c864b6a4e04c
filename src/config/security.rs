//! What outbound requests may reach.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use url::Url;

use super::store::ca_file;
use super::value::bounded;
use super::value::host;
use super::value::is_loopback;
use super::value::millis;
use super::value::operator_url;
use super::{ConfigError, Source, file, refuse};
use crate::http::{Destination, address_allowed};

#[derive(Debug, Clone)]
pub struct NetworkSecurity {
    pub allow_insecure_local: bool,
    pub max_response_bytes: usize,
    pub timeout: Duration,
    /// `None`: the signed life and 30 s.
    pub paid_call_timeout: Option<Duration>,
    pub max_redirects: usize,
    pub max_concurrent_connections: usize,
    pub ca_pem: Option<Vec<u8>>,
    pub resolved_mcp_endpoints: BTreeMap<String, Url>,
}

pub(super) fn security(file: file::NetworkSecurity, source: &dyn Source) -> Result<NetworkSecurity, ConfigError> {
    let mut resolved = BTreeMap::new();
    let destination = if file.allow_insecure_local { Destination::AgentLocal } else { Destination::Agent };
    for (name, url) in file.resolved_mcp_endpoints {
        let field = format!("network_security.resolved_mcp_endpoints.{name}");
        if !name.starts_with("mcp://") {
            return refuse(field, "is no mcp:// identifier: only symbolic identifiers are mapped");
        }
        let parsed = operator_url(&field, &url)?;
        if parsed.scheme() != "https" && !(file.allow_insecure_local && is_loopback(&parsed)) {
            return refuse(field, format!("{} is not HTTPS: sellers are called over HTTPS only", host(&parsed)));
        }
        let ip = match parsed.host() {
            Some(url::Host::Ipv4(ip)) => Some(IpAddr::V4(ip)),
            Some(url::Host::Ipv6(ip)) => Some(IpAddr::V6(ip)),
            _ => None,
        };
        if let Some(Err(word)) = ip.map(|ip| address_allowed(destination, ip)) {
            let problem =
                format!("{} is refused ({word}): sellers are reached at public addresses only", host(&parsed));
            return refuse(field, problem);
        }
        resolved.insert(name, parsed);
    }
    let field = |member: &str| format!("network_security.{member}");
    Ok(NetworkSecurity {
        allow_insecure_local: file.allow_insecure_local,
        max_response_bytes: bounded(
            &field("max_response_bytes"),
            file.max_response_bytes,
            8 << 20,
            1 << 10,
            256 << 20,
        )?,
        timeout: millis(&field("timeout_ms"), file.timeout_ms, 15_000, 100, 600_000)?,
        paid_call_timeout: match file.paid_call_timeout_ms {
            None => None,
            some => Some(millis(&field("paid_call_timeout_ms"), some, 0, 1_000, 3_600_000)?),
        },
        max_redirects: bounded(&field("max_redirects"), file.max_redirects, 3, 0, 10)?,
        max_concurrent_connections: bounded(
            &field("max_concurrent_connections"),
            file.max_concurrent_connections,
            10,
            1,
            10_000,
        )?,
        ca_pem: match file.ca_file {
            None => None,
            Some(path) => Some(ca_file(&field("ca_file"), &path, source)?),
        },
        resolved_mcp_endpoints: resolved,
    })
}
