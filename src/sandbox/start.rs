//! The whole sandbox: the agent server on top of what it needs. It is made from a configuration file like any other;
//! only the addresses in it are the sandbox's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use super::backends::{Backends, Door, Environment, Options, StartError};
use super::chain::{NETWORK, Node, USDC};
use super::state::StateDir;
use super::tls::Authority;
use crate::agent;
use crate::config::{self, Transport};
use crate::ports::World;

/// Whose budget the printed key uses.
pub const AGENT: &str = "demo";

const API_KEYS_ENV: &str = "TOLLWAY_SANDBOX_API_KEYS";
const SIGNER_AUTH_ENV: &str = "TOLLWAY_SANDBOX_SIGNER_AUTH";
/// 1 USDC a call, 5 USDC a day.
const PER_CALL_MAX: &str = "10000000";
const DAY_MAX: &str = "50000000";
/// The furthest that a second node may lag where ledgers take a second or more, in ledgers.
const SLOW_LAG: u32 = 5;

/// The running sandbox. Dropping it stops it and removes a temporary state directory.
pub struct Running {
    pub agent_url: String,
    pub backends: Backends,
    pub nodes: Nodes,
    agent_key: Zeroizing<String>,
    shutdown: CancellationToken,
}

/// The RPC beyond the one plain node; what was not asked for is not there.
#[derive(Default)]
pub struct Nodes {
    /// The first node over TLS.
    pub tls_url: Option<String>,
    /// Whose certificate that is, for clients (`network_security.ca_file`, `NODE_EXTRA_CA_CERTS`).
    pub ca_file: Option<PathBuf>,
    pub lagging_url: Option<String>,
    pub lagging: Option<Node>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

pub async fn start(options: Options, world: &World) -> Result<Running, StartError> {
    let shutdown = CancellationToken::new();
    // Whatever fails below takes the parts that already run with it.
    let guard = shutdown.clone().drop_guard();
    let front = Door::open(options.port).await?;
    let backends = Backends::start(&options, world, &shutdown).await?;

    let state = &backends.state;
    let nodes = nodes(&options, &backends, world, &shutdown).await?;
    let agent_key = state.key("agent.key", world)?;
    let addresses = Addresses {
        facilitator: &backends.facilitator_url,
        signer: &backends.signer_url,
        rpcs: nodes.asked(&backends.rpc_url),
        ca_file: nodes.ca_file.as_deref(),
        max_authorization_seconds: if options.slow() { 300 } else { 3_600 },
        ledger: options.ledger_interval(),
    };
    let environment = Environment(BTreeMap::from([
        (API_KEYS_ENV, Zeroizing::new(format!("{AGENT}:{}", agent_key.as_str()))),
        (SIGNER_AUTH_ENV, backends.signer_auth.clone()),
    ]));
    let text = addresses.yaml(&front.url, &state.path().join("ledger.sqlite"), None);
    state.write("tollway.yaml", &text)?;
    // Another process, so another ledger file and another budget.
    let stdio = addresses.yaml(&front.url, &state.path().join("stdio/ledger.sqlite"), Some("local"));
    state.write("stdio.yaml", &stdio)?;
    let config = config::parse(&text, Some(Transport::Remote), &environment)?;
    let server = agent::server::Server::start(&config, world).await.map_err(|e| StartError::Other(e.to_string()))?;
    let router = server.router(&config, server.health(&config), shutdown.clone());
    if let Some(sweep) = server.sweep(&config) {
        world.spawn.spawn(Box::pin(sweep.run(shutdown.clone())));
    }
    let agent_url = format!("{}/mcp", front.url);
    front.serve(world, router, &shutdown);
    Ok(Running { agent_url, backends, nodes, agent_key, shutdown: guard.disarm() })
}

impl Nodes {
    /// What the agent server asks, the first node before the one that lags.
    fn asked<'a>(&'a self, plain: &'a str) -> Vec<&'a str> {
        let first = self.tls_url.as_deref().unwrap_or(plain);
        [Some(first), self.lagging_url.as_deref()].into_iter().flatten().collect()
    }
}

async fn nodes(
    options: &Options,
    backends: &Backends,
    world: &World,
    shutdown: &CancellationToken,
) -> Result<Nodes, StartError> {
    let mut nodes = Nodes::default();
    if options.rpc_tls {
        let authority = Authority::new().map_err(|e| StartError::Other(e.to_string()))?;
        let path = backends.state.write("rpc-ca.pem", authority.ca_pem())?;
        let router = backends.network.rpc_router(backends.node.clone());
        nodes.tls_url = Some(Door::open(0).await?.serve_tls(&authority, world, router, shutdown));
        nodes.ca_file = Some(path);
    }
    if let Some(ledgers) = options.lagging_node {
        if options.slow() && ledgers > SLOW_LAG {
            return Err(StartError::Other(format!(
                "a node that lags {ledgers} ledgers of {} ms: an offer of 60 s is good for 10 ledgers, counted from the \
                 node that is behind, so at most {SLOW_LAG} leave time to pay (or take --ledger-ms below 1000)",
                options.ledger_interval().as_millis()
            )));
        }
        let (door, node) = (Door::open(0).await?, Node::lagging(ledgers));
        nodes.lagging_url = Some(door.url.clone());
        door.serve(world, backends.network.rpc_router(node.clone()), shutdown);
        nodes.lagging = Some(node);
    }
    Ok(nodes)
}

impl Running {
    /// The bearer key of the agent server.
    pub fn agent_key(&self) -> &str {
        &self.agent_key
    }

    pub fn dir(&self) -> &Path {
        self.backends.state.path()
    }

    /// The parts finish what they are in and close; the caller waits for their tasks, and keeps the directory so long.
    #[must_use]
    pub fn stop(self) -> Arc<StateDir> {
        self.backends.state.clone()
    }

    /// What a user pastes into an MCP client: over HTTP, and over stdio with `program`.
    pub fn client_configuration(&self, program: &str) -> serde_json::Value {
        json!({
            "http": {"mcpServers": {"tollway": {
                "type": "http",
                "url": self.agent_url,
                "headers": {"Authorization": format!("Bearer {}", self.agent_key.as_str())},
            }}},
            "stdio": {"mcpServers": {"tollway": {
                "command": program,
                "args": ["--config", self.dir().join("stdio.yaml"), "stdio"],
                "env": {SIGNER_AUTH_ENV: self.backends.signer_auth.as_str()},
            }}},
        })
    }
}

/// What the agent server must know of the others.
struct Addresses<'a> {
    facilitator: &'a str,
    signer: &'a str,
    rpcs: Vec<&'a str>,
    ca_file: Option<&'a Path>,
    max_authorization_seconds: u64,
    ledger: Duration,
}

impl Addresses<'_> {
    /// JSON is YAML, and quotes what needs quotes.
    fn yaml(&self, front: &str, ledger: &Path, stdio: Option<&str>) -> String {
        let port = front.rsplit(':').next().and_then(|port| port.parse::<u16>().ok()).unwrap_or(0);
        let mut file = json!({
            "facilitator": {"base_url": self.facilitator},
            "http": {"port": port, "api_keys_env": API_KEYS_ENV},
            "signer": {"mode": "external", "base_url": self.signer, "auth_header_env": SIGNER_AUTH_ENV},
            "networks": {NETWORK: {
                "enabled": true,
                "rpc_urls": self.rpcs,
                "max_authorization_seconds": self.max_authorization_seconds,
                "min_ledger_seconds": self.ledger.as_secs_f64(),
            }},
            "budget": {
                "store": "sqlite",
                "path": ledger,
                "limits": [{
                    "network": NETWORK,
                    "asset": USDC,
                    "per_call_max_atomic": PER_CALL_MAX,
                    "day_max_atomic": DAY_MAX,
                }],
            },
            "network_security": {"allow_insecure_local": true, "paid_call_timeout_ms": 30_000},
        });
        if let Some(path) = self.ca_file {
            file["network_security"]["ca_file"] = json!(path);
        }
        if let Some(agent) = stdio {
            file["stdio"] = json!({"agent": agent});
        }
        format!("# Written by tollway sandbox at every start.\n{file:#}\n")
    }
}

#[cfg(test)]
mod tests;
