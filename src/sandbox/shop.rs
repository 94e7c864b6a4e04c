//! The demo seller: a server that knows nothing of payments behind the gate that `tollway gate` runs, made from a
//! configuration file like any other.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::backends::{Door, Environment, StartError};
use super::chain::NETWORK;
use super::server::{PROMPT, RESOURCE, Server, TOOLS, Tool};
use super::state::StateDir;
use crate::config::{self, GateServer};
use crate::gate::desk::Gate;
use crate::gate::extensions;
use crate::gate::listing::META_ACCEPTS;
use crate::gate_server;
use crate::json::{self as strict, member, string};
use crate::mcp::{self, Authenticator};
use crate::money::Amount;
use crate::ports::World;
use crate::seal::KeyRing;
use crate::x402::{META_PAYMENT, VERSION};

const FILE: &str = "gate.yaml";
const SERVICE: &str = "Tollway demo seller";
/// Atomic units.
const RESOURCE_PRICE: u64 = 5_000;
const PROMPT_PRICE: u64 = 2_000;
/// Of USDC.
const DECIMALS: u8 = 7;
const MAX_BODY: usize = 1 << 20;

/// What the gate must know of the others.
pub struct Terms<'a> {
    pub facilitator: &'a str,
    pub rpc: &'a str,
    pub pay_to: String,
    /// A 60 s offer suits ledgers of a second; on faster ledgers its signatures would be dead too soon, since a payer
    /// counts 6 s for each.
    pub max_timeout_seconds: u64,
    pub ledger: Duration,
}

/// How many `tools/call` came to the gate's door, by whether they carried a payment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Calls {
    pub unpaid: u64,
    pub paid: u64,
}

#[derive(Default)]
struct Counted {
    unpaid: AtomicU64,
    paid: AtomicU64,
}

pub struct Shop {
    /// The gate's endpoint, where buyers come.
    pub url: String,
    /// The server's own, where everything is free.
    pub server_url: String,
    pub server: Arc<Server>,
    pub gate: Gate,
    state: Arc<StateDir>,
    file: serde_json::Value,
    prices: Mutex<BTreeMap<&'static str, u64>>,
    counted: Arc<Counted>,
}

impl Shop {
    /// `front` is the gate's door, `back` the server's. Everything ends with `shutdown`.
    pub(super) async fn open(
        (front, back): (Door, Door),
        terms: &Terms<'_>,
        state: &Arc<StateDir>,
        world: &World,
        shutdown: &CancellationToken,
    ) -> Result<Shop, StartError> {
        let server = Server::new(world);
        let (url, server_url) = (format!("{}/mcp", front.url), format!("{}/mcp", back.url));
        let settings = mcp::Settings::new(world.clone(), KeyRing::ephemeral(world), shutdown.clone());
        back.serve(world, mcp::router(settings, server.clone(), Authenticator::Public), shutdown);

        let ring = state.path().join("gate.ring");
        KeyRing::load_or_create(world, &ring).map_err(|e| StartError::Other(e.to_string()))?;
        let file = file(terms, &front, &server_url, state.path(), &ring);
        let prices = TOOLS.iter().filter_map(|tool| Some((tool.name, tool.price?))).collect();
        let config = written(state, &file, &prices)?;
        let (gate, app) = gate_server::open(&config, world, shutdown).await?;
        gate.start(shutdown.clone()).await;
        let counted = Arc::<Counted>::default();
        front.serve(world, app.layer(from_fn_with_state(counted.clone(), count)), shutdown);
        let (state, prices) = (state.clone(), Mutex::new(prices));
        Ok(Shop { url, server_url, server, gate, state, file, prices, counted })
    }

    pub fn calls(&self) -> Calls {
        let Counted { unpaid, paid } = &*self.counted;
        Calls { unpaid: unpaid.load(Ordering::SeqCst), paid: paid.load(Ordering::SeqCst) }
    }

    /// Atomic units; `None` for a free or unknown tool.
    pub fn price(&self, tool: &str) -> Option<u64> {
        self.prices.lock().unwrap_or_else(PoisonError::into_inner).get(tool).copied()
    }

    /// The tool costs this much from now on, in the gate's file too. The catalog is not told.
    pub fn set_price(&self, tool: &str, price: u64) -> Result<(), StartError> {
        let mut prices = self.prices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = prices.get_mut(tool) {
            *old = price;
        }
        let config = written(&self.state, &self.file, &prices)?;
        Ok(self.gate.reprice(config.gate.prices).map_err(gate_server::StartError::from)?)
    }

    /// What a catalog lists of it, one item per tool that costs something: what the gate's own list says.
    pub fn catalog_items(&self, updated: &str) -> Vec<String> {
        TOOLS.iter().filter_map(|tool| self.catalog_item(tool.name, updated)).collect()
    }

    pub fn catalog_item(&self, tool: &str, updated: &str) -> Option<String> {
        let tool = Tool::named(tool)?;
        let listed = self.gate.list("tools/list", &Server::tools())?;
        let entries = member(&listed, "tools").and_then(strict::elements)?;
        let entry =
            entries.into_iter().find(|entry| member(entry, "name").and_then(string).as_deref() == Some(tool.name))?;
        let accepts = member(member(entry, "_meta")?, META_ACCEPTS)?;
        let head = json!({
            "resource": self.url,
            "type": "mcp",
            "x402Version": VERSION,
            "lastUpdated": updated,
            "description": tool.description,
            "mimeType": "application/json",
            "serviceName": SERVICE,
            "tags": tool.tags,
        });
        let extensions = BTreeMap::from([("bazaar", extensions::declaration(entry)?)]);
        let mut item: BTreeMap<String, Box<serde_json::value::RawValue>> =
            head.as_object()?.iter().map(|(name, value)| (name.clone(), strict::raw(value))).collect();
        item.insert("accepts".into(), accepts.to_owned());
        item.insert("extensions".into(), strict::raw(&extensions));
        Some(strict::raw(&item).get().to_owned())
    }
}

/// The gate's file without its tools.
fn file(terms: &Terms<'_>, front: &Door, server_url: &str, dir: &Path, ring: &Path) -> serde_json::Value {
    json!({
        "http": {"port": front.port()},
        "keys": {"ring_file": ring},
        "budget": {"store": "sqlite", "path": dir.join("gate.sqlite")},
        "networks": {NETWORK: {"rpc_urls": [terms.rpc], "min_ledger_seconds": terms.ledger.as_secs_f64()}},
        "network_security": {"allow_insecure_local": true},
        "gate": {
            "upstream": {"url": server_url},
            "facilitator": {"base_url": terms.facilitator},
            "default": "free",
            "defaults": {
                "network": NETWORK,
                "asset": "USDC",
                "pay_to": terms.pay_to,
                "max_timeout_seconds": terms.max_timeout_seconds,
                "url": format!("{}/mcp", front.url),
                "service_name": SERVICE,
            },
            "resources": {RESOURCE: {"price": decimal(RESOURCE_PRICE)}},
            "prompts": {PROMPT: {"price": decimal(PROMPT_PRICE)}},
        },
    })
}

fn decimal(atomic: u64) -> String {
    Amount::from_u64(atomic).to_decimal(DECIMALS)
}

/// Writes the file with these prices, and reads it as `tollway gate` does. JSON is YAML.
fn written(
    state: &StateDir,
    file: &serde_json::Value,
    prices: &BTreeMap<&'static str, u64>,
) -> Result<GateServer, StartError> {
    let mut file = file.clone();
    for (name, price) in prices {
        let tool = Tool::named(name);
        file["gate"]["tools"][name] = json!({
            "price": decimal(*price),
            "description": tool.map(|tool| tool.description),
            "tags": tool.map(|tool| tool.tags),
        });
    }
    let path = state.write(FILE, &format!("# Written by tollway sandbox.\n{file:#}\n"))?;
    Ok(config::load_gate_server(Some(&path), &Environment::default())?)
}

/// Counts what comes to the gate; nothing of it is changed.
async fn count(State(counted): State<Arc<Counted>>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, MAX_BODY).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let limits = strict::Limits { bytes: MAX_BODY, depth: 64 };
    if let Ok(message) = strict::check(&body, limits)
        && member(message, "method").and_then(string).as_deref() == Some("tools/call")
    {
        let meta = member(message, "params").and_then(|params| member(params, "_meta"));
        match meta.and_then(|meta| member(meta, META_PAYMENT)) {
            Some(_) => counted.paid.fetch_add(1, Ordering::SeqCst),
            None => counted.unpaid.fetch_add(1, Ordering::SeqCst),
        };
    }
    next.run(Request::from_parts(head, Body::from(body))).await
}
