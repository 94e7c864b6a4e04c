//! What the strict MCP front costs beside a bare endpoint that does the same work without checks: one JSON-RPC request,
//! one answer of the same bytes. Both run in this process over real sockets, in alternating rounds, and the result is a
//! ratio; absolute figures say more about the machine.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::json;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use tollway::http::{Client, Destination, Limits, tls};
use tollway::mcp::{self, Authenticator, Handler, RequestContext, Revision, RpcError, Settings};
use tollway::ports::{World, machine};
use tollway::seal::KeyRing;

use crate::parts::rate;
use crate::report::{Report, Result, median};

const REQUEST: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"loadtest","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}"#;

struct Echo(Box<RawValue>);
impl Handler for Echo {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        ("echo", "1", None)
    }
    fn capabilities(&self, _revision: Revision) -> Box<RawValue> {
        tollway::json::raw(&json!({"tools": {}}))
    }
    fn call<'a>(
        &'a self,
        _context: &'a RequestContext,
        _method: &'a str,
        _params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>> {
        Box::pin(async { Ok(self.0.clone()) })
    }
}

#[derive(clap::Args)]
pub struct Args {
    /// Alternating rounds; the median of their ratios counts
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// How long each half of a round takes
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Callers at once, each with a call after the other
    #[arg(long, default_value_t = 32)]
    clients: u64,
    /// The bar: the front answers at least this many times as often as the bare endpoint
    #[arg(long, default_value_t = 0.4)]
    bar: f64,
}

pub async fn run(args: Args) -> Result<Report> {
    let Args { rounds, seconds, clients, bar } = args;
    let (world, _tasks) = machine::world();
    let result = tollway::json::raw(&json!({"content": [{"type": "text", "text": "x".repeat(4096)}]}));

    let settings = Settings::new(world.clone(), KeyRing::ephemeral(&world), CancellationToken::new());
    let front = mcp::router(settings, Arc::new(Echo(result.clone())), Authenticator::Public);
    let front = serve(&world, front).await;
    let bare = axum::Router::new().route(
        "/mcp",
        axum::routing::post(move |axum::Json(request): axum::Json<serde_json::Value>| async move {
            axum::Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result}))
        }),
    );
    let bare = serve(&world, bare).await;

    let (mut bares, mut fronts, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        let a = rate(&world, &bare, seconds, clients).await;
        let b = rate(&world, &front, seconds, clients).await;
        eprintln!("round {round}: bare {a:.0}/s, front {b:.0}/s, ratio {:.2}", b / a);
        bares.push(a);
        fronts.push(b);
        ratios.push(b / a);
    }
    let ratio = median(ratios);
    Ok(Report {
        scenario: "front",
        pass: ratio >= bar,
        figures: json!({"answersPerSecond": median(fronts).round(), "clients": clients, "rounds": rounds, "bar": bar}),
        baseline: json!({"answersPerSecond": median(bares).round()}),
        ratio: Some(ratio),
    })
}

async fn serve(world: &World, app: axum::Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/mcp", listener.local_addr().expect("an address"));
    world.spawn.spawn(Box::pin(mcp::serve::serve(
        machine::TcpListener(listener),
        world.clone(),
        app,
        CancellationToken::new(),
    )));
    url
}

/// Answers a second.
async fn rate(world: &World, url: &str, seconds: u64, clients: u64) -> f64 {
    let limits = Limits { timeout: Duration::from_secs(10), max_response_bytes: 1 << 20 };
    let http = Client::new(world.clone(), tls(None).expect("trust roots"), Destination::Operator, limits);
    let request = || {
        let request = http::Request::post(url).header("mcp-protocol-version", "2026-07-28");
        request.header("mcp-method", "tools/call").header("mcp-name", "echo")
    };
    let (answers, seconds) = rate::answers(&http, seconds, clients, request, REQUEST).await;
    answers as f64 / seconds
}
