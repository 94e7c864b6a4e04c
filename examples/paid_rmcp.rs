//! An MCP server on rmcp that sells a tool, a resource and a prompt, and gives one tool away.
//!
//! Two terminals, no network and no funds; the second takes what the first prints (Facilitator, Chain RPC, Seller):
//!
//! ```console
//! $ cargo run -- sandbox
//! $ cargo run --example paid_rmcp -- http://127.0.0.1:FACILITATOR http://127.0.0.1:RPC GSELLER
//! ```
//!
//! The rmcp server knows nothing of payments. The gate stands between its HTTP service and the clients, because rmcp's
//! own result types have no room for what a challenge of a resource or a prompt holds. A tool that streams belongs
//! behind `tollway gate`.
#![allow(clippy::disallowed_methods, reason = "a program of its own")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts as Head;
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use axum::{Json, Router};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use rmcp::handler::server::wrapper::Parameters;
use rmcp::model::{
    GetPromptRequestParams, GetPromptResponse, GetPromptResult, ListPromptsResult, ListResourceTemplatesResult,
    PaginatedRequestParams, Prompt, PromptMessage, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult,
    ResourceContents, ResourceTemplate, Role, ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler, schemars, tool, tool_handler, tool_router};
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
use tollway::mcp::{Revision, RpcError, code};
use tollway::money::Network;
use tollway::ports::machine;
use tollway::seal::KeyRing;
use tower_service::Service as _;

/// The server's own work.
#[derive(Clone)]
struct Weather;

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct City {
    city: String,
}

#[tool_router]
impl Weather {
    #[tool(description = "The weather in a city.")]
    fn weather(&self, Parameters(City { city }): Parameters<City>) -> String {
        format!("It is sunny in {city}.")
    }

    #[tool(description = "The cities that the weather is known of.")]
    fn cities(&self) -> String {
        "Oslo, Bern, Rome".to_owned()
    }
}

#[tool_handler]
impl ServerHandler for Weather {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().enable_resources().enable_prompts().build())
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let almanac = ResourceTemplate::new("almanac://{month}", "almanac");
        Ok(ListResourceTemplatesResult::with_all_items(vec![almanac]))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        if !request.uri.starts_with("almanac://") {
            return Err(ErrorData::resource_not_found("there is no such resource", None));
        }
        Ok(ReadResourceResult::new(vec![ResourceContents::text("Wear a coat.", request.uri)]).into())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(vec![Prompt::new("report", Some("A cheerful report."), None)]))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        if request.name != "report" {
            return Err(ErrorData::invalid_params("there is no such prompt", None));
        }
        let words = PromptMessage::new_text(Role::User, "Write a cheerful report about the weather.");
        Ok(GetPromptResult::new(vec![words]).into())
    }
}

type Rmcp = StreamableHttpService<Weather, NeverSessionManager>;

const NETWORK: &str = "stellar:testnet";
const MAX_BYTES: usize = 4 << 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [facilitator, rpc, pay_to] = arguments.as_slice() else {
        return Err("usage: paid_rmcp FACILITATOR RPC PAY_TO, as tollway sandbox prints them".into());
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

    // One JSON answer for each request, and no sessions: a payment's identifier is the proof of who paid.
    let config = StreamableHttpServerConfig::default().with_legacy_session_mode(false).with_json_response(true);
    let config = config.enforce_origin_validation();
    let rmcp = StreamableHttpService::new(|| Ok(Weather), Arc::new(NeverSessionManager::default()), config);
    println!("selling at {url}");
    let app = Router::new().route("/mcp", any(mcp)).with_state((gate.clone(), rmcp));
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
    let state = std::env::temp_dir().join("tollway-paid-rmcp");
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

/// What can have a price goes through the gate, lists get their prices, and the rest is rmcp's.
async fn mcp(
    State((gate, rmcp)): State<(Gate, Rmcp)>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
) -> Response {
    let (head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, MAX_BYTES).await else { return StatusCode::PAYLOAD_TOO_LARGE.into_response() };
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (method, params) = (message["method"].as_str().unwrap_or_default().to_owned(), &message["params"]);
    let source = peer.ip().to_string();
    let outcome = match method.as_str() {
        "tools/call" | "resources/read" | "prompts/get" if message.get("id").is_some() => {
            let version = head.headers.get("mcp-protocol-version").and_then(|version| version.to_str().ok());
            let tool = Weather::tool_router().get(params["name"].as_str().unwrap_or_default()).map(|tool| json!(tool));
            let caller = Caller {
                revision: version.and_then(Revision::parse).unwrap_or(Revision::V2025_03_26),
                client_capabilities: params["_meta"].get("io.modelcontextprotocol/clientCapabilities"),
                tool: tool.as_ref(),
                ..Caller::new(&source)
            };
            gate.call(&method, params, caller, ask(rmcp, head, body)).await
        }
        "tools/list" | "resources/list" | "resources/templates/list" | "prompts/list" => {
            ask(rmcp, head, body).await.map(|result| gate.list_value(&method, result))
        }
        _ => {
            let Ok(response) = { rmcp }.call(Request::from_parts(head, Body::from(body))).await;
            return response.map(Body::new);
        }
    };
    let id = &message["id"];
    Json(match outcome {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(error) => {
            let mut said = json!({"code": error.code, "message": error.message});
            if let Some(data) = error.data {
                said["data"] = serde_json::from_str(data.get()).unwrap_or_default();
            }
            json!({"jsonrpc": "2.0", "id": id, "error": said})
        }
    })
    .into_response()
}

/// One request to the rmcp server, and the result in its answer.
async fn ask(mut rmcp: Rmcp, head: Head, body: Bytes) -> Result<Value, RpcError> {
    let unread = || RpcError::internal("The server's answer could not be read");
    let Ok(answer) = rmcp.call(Request::from_parts(head, Body::from(body))).await;
    let bytes = answer.into_body().collect().await.map_err(|_| unread())?.to_bytes();
    let mut message: Value = serde_json::from_slice(&bytes).map_err(|_| unread())?;
    if let Some(result) = message.get_mut("result") {
        return Ok(result.take());
    }
    let text = message["error"]["message"].as_str().unwrap_or("The server refused");
    Err(RpcError::new(message["error"]["code"].as_i64().unwrap_or(code::INTERNAL), text))
}
