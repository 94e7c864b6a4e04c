//! An MCP server on bare axum that sells a tool, a resource and a prompt, and gives one tool away.
//!
//! Two terminals, no network and no funds; the second takes what the first prints (Facilitator, Chain RPC, Seller):
//!
//! ```console
//! $ cargo run -- sandbox
//! $ cargo run --example paid_axum -- http://127.0.0.1:FACILITATOR http://127.0.0.1:RPC GSELLER
//! ```
//!
//! Then `curl -H 'content-type: application/json' -d '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"weather",
//! "arguments":{"city":"Oslo"}}}' http://127.0.0.1:4600/mcp` is answered with what it costs. A program of one's own has
//! `tollway = { features = ["sqlite"], default-features = false }`.
#![allow(clippy::disallowed_methods, reason = "a program of its own")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::chain::stellar::{Settings as ChainSettings, Stellar};
use tollway::facilitator::Facilitator;
use tollway::gate::claims::{Claims, Terms};
use tollway::gate::desk::{Gate, Parts};
use tollway::gate::library::{Caller, PriceList};
use tollway::gate::prices::{Prices, Unlisted};
use tollway::gate::sell::Settings;
use tollway::http::{Client, Destination, Limits, tls};
use tollway::mcp::{Revision, RpcError};
use tollway::money::Network;
use tollway::ports::machine;
use tollway::seal::KeyRing;

const NETWORK: &str = "stellar:testnet";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [facilitator, rpc, pay_to] = arguments.as_slice() else {
        return Err("usage: paid_axum FACILITATOR RPC PAY_TO, as tollway sandbox prints them".into());
    };
    let port = std::env::var("PORT").ok().map_or(Ok(4600), |port| port.parse())?;
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    let url = format!("http://{}/mcp", listener.local_addr()?);
    // What costs something. Everything else is free.
    let prices = PriceList::new(NETWORK, "USDC", pay_to)?
        .at(&url)
        .tool("weather", "0.01")?
        .resource("almanac://{month}", "0.002")?
        .prompt("report", "0.005")?
        .build(Unlisted::Free)?;
    let gate = gate(prices, facilitator, rpc).await?;
    let stopped = CancellationToken::new();
    gate.start(stopped.clone()).await;

    println!("selling at {url}");
    let app = Router::new().route("/mcp", post(mcp)).with_state(gate.clone());
    let served = axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>());
    served.with_graceful_shutdown(async { tokio::signal::ctrl_c().await.unwrap_or_default() }).await?;
    // What is paid for is run to its end.
    let _ = tokio::time::timeout(Duration::from_secs(30), gate.drained()).await;
    stopped.cancel();
    Ok(())
}

/// Who settles, whom to ask about a settlement whose answer was lost, and where claims are kept.
async fn gate(prices: Prices, facilitator: &str, rpc: &str) -> Result<Gate, Box<dyn Error>> {
    let (world, _tasks) = machine::world();
    let limits = Limits { timeout: Duration::from_secs(30), max_response_bytes: 1 << 20 };
    let client = Client::new(world.clone(), tls(None)?, Destination::Operator, limits);
    let network: Network = NETWORK.parse()?;
    let mut chain = ChainSettings::known(&network, vec![rpc.parse()?]).ok_or("an unknown network")?;
    // The sandbox's ledgers are faster than Stellar's.
    chain.min_ledger_ms = 50;
    let chain = Stellar::new(chain, client.clone(), world.clone());
    let state = std::env::temp_dir().join("tollway-paid-axum");
    std::fs::create_dir_all(&state)?;
    // Seals what is stored. Several processes on one database (`Claims::connect`) have the same one.
    let ring = KeyRing::load_or_create(&world, &state.join("ring"))?;
    Ok(Gate::new(Parts {
        claims: Claims::open_sqlite(&state.join("claims.sqlite"), world.clone(), ring, Terms::default()).await?,
        facilitators: BTreeMap::from([(network.clone(), Facilitator::new(client, &facilitator.parse()?))]),
        chains: BTreeMap::from([(network, Arc::new(chain))]),
        resolved_by_operator: BTreeSet::new(),
        settings: Settings::default(),
        prices,
        world,
    })?)
}

/// MCP 2025-11-25 over Streamable HTTP, without sessions.
async fn mcp(
    State(gate): State<Gate>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    Json(message): Json<Value>,
) -> Response {
    // A web page may not use its visitor's browser to come here.
    if headers.contains_key("origin") {
        return StatusCode::FORBIDDEN.into_response();
    }
    let (Some(id), Some(method)) = (message.get("id"), message["method"].as_str()) else {
        return StatusCode::ACCEPTED.into_response();
    };
    let outcome = answer(&gate, method, &message["params"], &peer.ip().to_string()).await;
    let answer = match outcome {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(error) => {
            let mut said = json!({"code": error.code, "message": error.message});
            if let Some(data) = error.data {
                said["data"] = serde_json::from_str(data.get()).unwrap_or_default();
            }
            json!({"jsonrpc": "2.0", "id": id, "error": said})
        }
    };
    Json(answer).into_response()
}

async fn answer(gate: &Gate, method: &str, params: &Value, peer: &str) -> Result<Value, RpcError> {
    match method {
        "initialize" => Ok(json!({
            "protocolVersion": "2025-11-25",
            "serverInfo": {"name": "paid-axum", "version": "1"},
            "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
        })),
        "ping" => Ok(json!({})),
        // The lists show the prices.
        "tools/list" => Ok(gate.list_value(method, json!({"tools": tools()}))),
        "resources/list" => Ok(json!({"resources": []})),
        "resources/templates/list" => Ok(gate.list_value(
            method,
            json!({"resourceTemplates": [{"uriTemplate": "almanac://{month}", "name": "almanac"}]}),
        )),
        "prompts/list" => Ok(gate.list_value(method, json!({"prompts": [{"name": "report"}]}))),
        // What has a price is challenged, sold, or handed over again; what has none runs at once.
        "tools/call" | "resources/read" | "prompts/get" => {
            let tools = tools();
            let tool = tools.as_array().into_iter().flatten().find(|tool| tool["name"] == params["name"]);
            let caller = Caller { tool, revision: Revision::V2025_11_25, ..Caller::new(peer) };
            gate.call(method, params, caller, handle(method.to_owned(), params.clone())).await
        }
        _ => Err(RpcError::method_not_found(method)),
    }
}

fn tools() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([
        {"name": "weather", "description": "The weather in a city.", "inputSchema": city},
        {"name": "cities", "description": "The cities that the weather is known of.", "inputSchema": {"type": "object"}},
    ])
}

/// The server's own work. Nothing here knows of payments.
async fn handle(method: String, params: Value) -> Result<Value, RpcError> {
    let text = |text: String| json!({"type": "text", "text": text});
    match (method.as_str(), params["name"].as_str(), params["uri"].as_str()) {
        ("tools/call", Some("weather"), _) => {
            let city = params["arguments"]["city"].as_str().unwrap_or("nowhere");
            Ok(json!({"content": [text(format!("It is sunny in {city}."))]}))
        }
        ("tools/call", Some("cities"), _) => Ok(json!({"content": [text("Oslo, Bern, Rome".to_owned())]})),
        ("resources/read", _, Some(uri)) if uri.starts_with("almanac://") => {
            Ok(json!({"contents": [{"uri": uri, "mimeType": "text/plain", "text": "Wear a coat."}]}))
        }
        ("prompts/get", Some("report"), _) => {
            let words = text("Write a cheerful report about the weather.".to_owned());
            Ok(json!({"messages": [{"role": "user", "content": words}]}))
        }
        _ => Err(RpcError::invalid_params("there is nothing of this name")),
    }
}
