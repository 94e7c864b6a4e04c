//! The whole of it: PostgreSQL with a synchronous standby, three replicas of `tollway serve` on lines that can be cut, a
//! load balancer in front, a market behind, and agents with keys.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ports::machine;
use tollway::sandbox::chain::{NETWORK, USDC};

use super::balancer::Balancer;
use super::binary;
use super::client::Agent;
use super::line::Line;
use super::market::{Market, Terms, hex};
use super::postgres::Postgres;
use super::process::free_port;
use super::replica::{Lines, Ports, Replica};
use crate::report::{Doing as _, Result};

pub struct Plan {
    pub terms: Terms,
    pub replicas: usize,
    pub standby: bool,
    /// Name and cap of a day in atomic units.
    pub agents: Vec<(String, u64)>,
    /// How long an agent waits for an answer.
    pub patience: Duration,
}

pub struct Cluster {
    pub market: Market,
    pub primary: Postgres,
    pub standby: Option<Postgres>,
    pub replicas: Vec<Replica>,
    pub balancer: Balancer,
    pub agents: Vec<Agent>,
    /// Any of the databases that takes writes.
    pub database: String,
    dir: tempfile::TempDir,
}

/// No answer of a replica's counterparts is waited for longer.
const TIMEOUT: Duration = Duration::from_secs(2);
const SIGN_WITHIN: Duration = Duration::from_secs(3);
const PAID_CALL: Duration = Duration::from_secs(5);

impl Cluster {
    pub async fn start(plan: Plan) -> Result<Cluster> {
        let program = binary::tollway().await?;
        let (world, _tasks) = machine::world();
        eprintln!("starting PostgreSQL{}", if plan.standby { " and its synchronous standby" } else { "" });
        let primary = Postgres::start(&[]).await?;
        let standby = if plan.standby { Some(primary.standby().await?) } else { None };
        let ledger = plan.terms.ledger;
        let market = Market::open(plan.terms, &world).await?;
        let dir = tempfile::Builder::new().prefix("tollway-cluster-").tempdir().doing("a directory")?;

        let keys: Vec<_> = plan.agents.iter().map(|(name, _)| (name.clone(), hex(&world.random::<32>()))).collect();
        let ring = hex(&world.random::<32>());
        let mut replicas = Vec::new();
        for n in 0..plan.replicas {
            let mut databases = vec![Line::to(primary.port).await?];
            if let Some(standby) = &standby {
                databases.push(Line::to(standby.port).await?);
            }
            let lines = Lines {
                databases,
                rpc: Line::to(market.rpc_port).await?,
                facilitator: Line::to(market.facilitator_port).await?,
                signer: Line::to(market.signer_port).await?,
            };
            let at = Ports { agents: free_port()?, probe: free_port()?, relay: free_port()? };
            let configuration = configuration(at, &lines, &market, &plan.agents, ledger);
            let ports: Vec<u16> = lines.databases.iter().map(|line| line.port).collect();
            let listed: Vec<_> = keys.iter().map(|(name, key)| format!("{name}:{key}")).collect();
            let environment = [
                ("TOLLWAY_API_KEYS", listed.join(",")),
                ("TOLLWAY_KEY_RING", ring.clone()),
                ("TOLLWAY_SIGNER_AUTH", market.signer_auth.clone()),
                ("DATABASE_URL", url(&ports)),
                ("TOLLWAY_LOG", "warn,tollway=info".into()),
            ];
            let environment = environment.map(|(name, value)| (name.to_owned(), value)).into();
            let name = format!("replica-{n}");
            replicas.push(Replica::new(&name, at, &program, dir.path(), &configuration, environment, lines)?);
        }
        replicas[0].operate(&["migrate"]).await?;
        for replica in &mut replicas {
            replica.start().await?;
        }
        let ports: Vec<Ports> = replicas.iter().map(|replica| replica.ports).collect();
        let balancer = Balancer::start(&ports, dir.path()).await?;
        eprintln!("{} replicas behind {}", replicas.len(), balancer.kind);

        let http = Client::new(world, Tls::Plain, Destination::Operator, Limits::default());
        let agents = keys.into_iter().map(|(name, key)| Agent {
            name,
            key,
            url: balancer.url(),
            http: http.clone(),
            patience: plan.patience,
        });
        let agents = agents.collect();
        let ports: Vec<u16> = std::iter::once(&primary).chain(&standby).map(|server| server.port).collect();
        let database = url(&ports);
        Ok(Cluster { market, primary, standby, replicas, balancer, agents, database, dir })
    }

    /// `x402_call_resource` without a key.
    pub fn call(&self, city: &str) -> serde_json::Value {
        json!({"ref": self.market.reference, "network": NETWORK, "scheme": "exact", "asset": USDC,
            "maxAtomicAmount": self.market.terms.price.to_string(), "arguments": {"city": city}})
    }

    /// Keeps configuration and logs of the replicas; says where.
    pub fn keep(&mut self) -> PathBuf {
        self.dir.disable_cleanup(true);
        self.dir.path().to_owned()
    }
}

/// Of several servers the one that takes writes.
fn url(ports: &[u16]) -> String {
    let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("postgresql://tollway@{}/postgres?target_session_attrs=read-write&connect_timeout=3", hosts.join(","))
}

/// JSON is YAML, and quotes what needs quotes.
fn configuration(at: Ports, lines: &Lines, market: &Market, agents: &[(String, u64)], ledger: Duration) -> String {
    let limits: Vec<_> = agents
        .iter()
        .map(|(agent, cap)| {
            json!({"agent": agent, "network": NETWORK, "asset": USDC, "day_max_atomic": cap.to_string(),
                "per_call_max_atomic": market.terms.price.to_string()})
        })
        .collect();
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let file = json!({
        "facilitator": {
            "base_url": format!("http://127.0.0.1:{}", lines.facilitator.port),
            "request_timeout_ms": ms(TIMEOUT),
        },
        "http": {
            "port": at.agents,
            "api_keys_env": "TOLLWAY_API_KEYS",
            "max_concurrent_requests": 2_000,
            "drain_ms": 10_000,
            "unready_wait_ms": 1_000,
            "legacy_sse": true,
            "relay_port": at.relay,
            "advertise": format!("127.0.0.1:{}", at.relay),
        },
        "probe": {"port": at.probe, "interval_ms": 500},
        "signer": {
            "mode": "external",
            "base_url": format!("https://127.0.0.1:{}", lines.signer.port),
            "auth_header_env": "TOLLWAY_SIGNER_AUTH",
            "sign_within_ms": ms(SIGN_WITHIN),
        },
        "networks": {NETWORK: {
            "enabled": true,
            "rpc_urls": [format!("http://127.0.0.1:{}", lines.rpc.port)],
            "max_authorization_seconds": market.terms.offer_seconds(),
            "min_ledger_seconds": ledger.as_secs_f64(),
        }},
        "keys": {"ring_env": "TOLLWAY_KEY_RING"},
        "budget": {"store": "postgres", "limits": limits},
        // Ledgers close 25 times as fast as on a live network, so everything about them is due as much sooner.
        "sweep": {"interval_ms": 1_000, "rpc_per_second": 200},
        "network_security": {
            "allow_insecure_local": true,
            "ca_file": market.ca_file,
            "timeout_ms": ms(TIMEOUT),
            "paid_call_timeout_ms": ms(PAID_CALL),
            "max_concurrent_connections": 2_000,
        },
    });
    format!("{file:#}\n")
}

/// A day's cap begins anew at midnight (UTC): a run that would cross it waits until it has passed.
pub async fn clear_of_midnight(needed: Duration) {
    let (world, _) = machine::world();
    let day = 86_400_000;
    let left = Duration::from_millis(day - world.unix_ms() % day);
    if left < needed {
        eprintln!("midnight (UTC) is {} s away, and a day's cap begins anew then: waiting", left.as_secs());
        tokio::time::sleep(left + Duration::from_secs(2)).await;
    }
}
