//! What `tollway gate` serves and what stands behind it: the listener, the probes and the upstream. What is sold is
//! `config::gate`'s.

use std::path::Path;
use std::time::Duration;

use ::http::HeaderName;
use url::Url;

use super::gate::{self, GateConfig};
use super::value::{Secret, bounded, is_loopback, millis, operator_url, secret_env};
use super::{ConfigError, Http, Probe, Source, file, http, probe, refusal, refuse};
use crate::gate::proxy::headers::may_be_forwarded;

#[derive(Debug, Clone)]
pub struct GateServer {
    pub gate: GateConfig,
    pub http: Http,
    pub probe: Option<Probe>,
    pub upstream: GateUpstream,
    /// Of a client's head, beyond what MCP needs.
    pub forward: Vec<HeaderName>,
    /// Between two looks at the file, while the process runs: its prices count without a restart.
    pub reload_interval: Duration,
    /// `gate.defaults.pay_to`.
    pub default_pay_to: Option<String>,
    /// From a request to the head of the upstream's answer, and the longest silence in the middle of one.
    pub timeout: Duration,
}

#[derive(Debug, Clone)]
pub enum GateUpstream {
    Http {
        url: Url,
        /// The value of `Authorization`.
        auth_header: Option<Secret>,
    },
    Child {
        command: Vec<String>,
        env: Vec<(String, Secret)>,
        shared: bool,
        max_processes: usize,
        idle: Duration,
    },
}

/// Reads all that `tollway gate` needs.
pub fn load_gate_server(path: Option<&Path>, source: &dyn Source) -> Result<GateServer, ConfigError> {
    let text = super::text(path, source)?;
    parse(&text, source)
}

/// Whether the file says what a gate sells.
pub fn is_gate(path: Option<&Path>, source: &dyn Source) -> Result<bool, ConfigError> {
    let text = super::text(path, source)?;
    let file: file::File = serde_saphyr::from_str(&text).map_err(|e| refusal::sentence(&text, &e))?;
    Ok(file.gate.is_some())
}

pub(super) fn parse(text: &str, source: &dyn Source) -> Result<GateServer, ConfigError> {
    let gate = gate::parse(text, source)?;
    let file: file::File = serde_saphyr::from_str(text).map_err(|e| refusal::sentence(text, &e))?;
    let allow_insecure = file.network_security.allow_insecure_local;
    for (member, set) in [
        ("api_keys_env", file.http.api_keys_env.is_some()),
        ("api_keys_file", file.http.api_keys_file.is_some()),
        ("legacy_sse", file.http.legacy_sse == Some(true)),
    ] {
        if set {
            return refuse(
                format!("http.{member}"),
                "belongs to tollway serve: a gate asks for payments, and speaks Streamable HTTP",
            );
        }
    }
    let reload_interval = millis("reload.interval_ms", file.reload.interval_ms, 2_000, 100, 600_000)?;
    let http = http::http(file.http, source)?;
    let probe = probe::probe(file.probe, http.port)?;
    let default_pay_to = file.gate.as_ref().and_then(|gate| gate.defaults.pay_to.clone());
    let upstream = file.gate.and_then(|gate| gate.upstream);
    let Some(upstream) = upstream else {
        return refuse("gate.upstream", "is missing: name the MCP server to stand in front of (url, or command)");
    };
    let mut forward = Vec::new();
    for (i, name) in upstream.forward_headers.iter().enumerate() {
        let lower = name.to_ascii_lowercase();
        match lower.parse::<HeaderName>() {
            Ok(header) if may_be_forwarded(&lower) => forward.push(header),
            _ => {
                let problem = format!("{name:?} is no header, or one that the gate writes itself: remove it");
                return refuse(format!("gate.upstream.forward_headers[{i}]"), problem);
            }
        }
    }
    let timeout = millis("gate.upstream.timeout_ms", upstream.timeout_ms, 300_000, 100, 3_600_000)?;
    let upstream = target(upstream, allow_insecure, source)?;
    Ok(GateServer { gate, http, probe, upstream, forward, reload_interval, default_pay_to, timeout })
}

fn target(file: file::GateUpstream, allow_insecure: bool, source: &dyn Source) -> Result<GateUpstream, ConfigError> {
    let only = |member: &str, set: bool, of: &str| match set {
        true => refuse(format!("gate.upstream.{member}"), format!("belongs to an upstream with a {of}: remove it")),
        false => Ok(()),
    };
    match (file.url, file.command) {
        (Some(_), Some(_)) => refuse("gate.upstream", "has both a url and a command: write one of them"),
        (None, None) => refuse("gate.upstream", "has neither a url nor a command: write one of them"),
        (Some(url), None) => {
            only("pass_env", !file.pass_env.is_empty(), "command")?;
            only("stateless", file.stateless.is_some(), "command")?;
            only("max_processes", file.max_processes.is_some(), "command")?;
            only("idle_timeout_ms", file.idle_timeout_ms.is_some(), "command")?;
            let url = operator_url("gate.upstream.url", &url)?;
            let auth_header = match file.auth_header_env {
                None => None,
                Some(name) => match secret_env(&name, source) {
                    Some(secret) => Some(secret),
                    None => {
                        let problem = format!("the environment variable {name} is not set");
                        return refuse("gate.upstream.auth_header_env", problem);
                    }
                },
            };
            let plain = url.scheme() != "https" && !(allow_insecure || is_loopback(&url));
            if plain
                && (auth_header.is_some()
                    || file.forward_headers.iter().any(|h| h.eq_ignore_ascii_case("authorization")))
            {
                return refuse(
                    "gate.upstream.url",
                    "is not HTTPS, and credentials would go there in plain text: write https, or a loopback address",
                );
            }
            Ok(GateUpstream::Http { url, auth_header })
        }
        (None, Some(command)) => {
            only("auth_header_env", file.auth_header_env.is_some(), "url")?;
            only("forward_headers", !file.forward_headers.is_empty(), "url")?;
            if command.first().is_none_or(|program| program.is_empty()) {
                return refuse("gate.upstream.command", "is empty: write the program and its arguments");
            }
            let mut env = Vec::new();
            for name in file.pass_env {
                match secret_env(&name, source) {
                    Some(value) => env.push((name, value)),
                    None => {
                        let problem = format!("the environment variable {name} is not set");
                        return refuse("gate.upstream.pass_env", problem);
                    }
                }
            }
            Ok(GateUpstream::Child {
                command,
                env,
                shared: file.stateless.unwrap_or(false),
                max_processes: bounded("gate.upstream.max_processes", file.max_processes, 64, 1, 10_000)?,
                idle: millis("gate.upstream.idle_timeout_ms", file.idle_timeout_ms, 1_800_000, 1_000, 86_400_000)?,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fake, source};
    use super::*;

    const RING: (&str, &str) = ("TOLLWAY_KEY_RING", "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f");

    fn text(upstream: &str) -> String {
        format!(
            "
keys: {{ring_env: TOLLWAY_KEY_RING}}
gate:
  default: free
  unknown: {{stellar-testnet: operator}}
  facilitator: {{base_url: 'https://f.example'}}
  defaults: {{network: stellar-testnet, asset: USDC, pay_to: GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4}}
  tools: {{search: {{price: '0.01'}}}}
{upstream}"
        )
    }

    fn env() -> Fake {
        source(&[RING, ("TOKEN", "Bearer x"), ("STATE_DIRECTORY", "/var/lib/t"), ("HOME", "/root")])
    }

    #[test]
    fn an_upstream_is_a_url_or_a_command() {
        let read = |upstream: &str| parse(&text(upstream), &env()).unwrap();
        let http = read(
            "  upstream: {url: 'https://mcp.example/mcp', auth_header_env: TOKEN, forward_headers: [X-Tenant], timeout_ms: 1000}",
        );
        assert!(matches!(&http.upstream, GateUpstream::Http { url, auth_header: Some(_) } if url.path() == "/mcp"));
        assert_eq!((http.forward[0].as_str(), http.timeout), ("x-tenant", Duration::from_secs(1)));
        let child = read("  upstream: {command: [node, server.js], pass_env: [TOKEN], stateless: true}");
        let GateUpstream::Child { command, env, shared: true, max_processes: 64, .. } = child.upstream else {
            panic!()
        };
        assert_eq!((command.len(), env[0].1.expose()), (2, "Bearer x"));
    }

    #[test]
    fn what_cannot_be_meant_refuses_to_start_by_name() {
        for (upstream, field) in [
            ("", "gate.upstream"),
            ("  upstream: {}", "gate.upstream"),
            ("  upstream: {url: 'http://a/mcp', command: [x]}", "gate.upstream"),
            ("  upstream: {url: 'ftp://a/mcp'}", "gate.upstream.url"),
            ("  upstream: {url: 'http://a.example/mcp', auth_header_env: TOKEN}", "gate.upstream.url"),
            ("  upstream: {url: 'http://a.example/mcp', forward_headers: [Authorization]}", "gate.upstream.url"),
            ("  upstream: {url: 'https://a.example/mcp', auth_header_env: NONE}", "gate.upstream.auth_header_env"),
            ("  upstream: {url: 'https://a.example/mcp', forward_headers: [Host]}", "gate.upstream.forward_headers[0]"),
            ("  upstream: {url: 'https://a.example/mcp', stateless: true}", "gate.upstream.stateless"),
            ("  upstream: {command: []}", "gate.upstream.command"),
            ("  upstream: {command: [x], pass_env: [NONE]}", "gate.upstream.pass_env"),
            ("  upstream: {command: [x], auth_header_env: TOKEN}", "gate.upstream.auth_header_env"),
            ("  upstream: {command: [x]}\nhttp: {api_keys_env: KEYS}", "http.api_keys_env"),
            ("  upstream: {command: [x]}\nhttp: {legacy_sse: true}", "http.legacy_sse"),
        ] {
            assert_eq!(parse(&text(upstream), &env()).unwrap_err().field, field, "{upstream}");
        }
    }
}
