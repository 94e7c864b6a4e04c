//! What the strict MCP front costs beside a bare endpoint that does the same work without checks: one JSON-RPC request,
//! one answer of the same bytes. Both run in this process over real sockets, in alternating rounds, and the result is a
//! ratio; absolute figures say more about the machine.
//!
//! `cargo run --release -p loadtest [-- rounds seconds clients]`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use tollway::http::{Client, Destination, Limits, tls};
use tollway::json;
use tollway::mcp::{self, Authenticator, Handler, RequestContext, Revision, RpcError, Settings};
use tollway::ports::{World, machine};
use tollway::seal::KeyRing;

const REQUEST: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"loadtest","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}"#;

struct Echo(Box<RawValue>);
impl Handler for Echo {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        ("echo", "1", None)
    }
    fn capabilities(&self, _revision: Revision) -> Box<RawValue> {
        json::raw(&serde_json::json!({"tools": {}}))
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

#[tokio::main]
async fn main() {
    let mut numbers =
        std::env::args().skip(1).map(|a| a.parse::<u64>().expect("rounds seconds clients: whole numbers"));
    let (rounds, seconds, clients) =
        (numbers.next().unwrap_or(3), numbers.next().unwrap_or(4), numbers.next().unwrap_or(32));
    let (world, _tasks) = machine::world();
    let result = json::raw(&serde_json::json!({"content": [{"type": "text", "text": "x".repeat(4096)}]}));

    let settings = Settings::new(world.clone(), KeyRing::ephemeral(&world), CancellationToken::new());
    let front = mcp::router(settings, Arc::new(Echo(result.clone())), Authenticator::Public);
    let front = serve(&world, front).await;
    let bare = axum::Router::new().route(
        "/mcp",
        axum::routing::post(move |axum::Json(request): axum::Json<serde_json::Value>| async move {
            axum::Json(serde_json::json!({"jsonrpc": "2.0", "id": request["id"], "result": result}))
        }),
    );
    let bare = serve(&world, bare).await;

    let mut ratios = Vec::new();
    for round in 1..=rounds {
        let a = rate(&world, &bare, seconds, clients).await;
        let b = rate(&world, &front, seconds, clients).await;
        println!("round {round}: bare {a:.0}/s, front {b:.0}/s, ratio {:.2}", b / a);
        ratios.push(b / a);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio front/bare: {:.2} ({clients} clients, {seconds} s a round)", ratios[ratios.len() / 2]);
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

/// Answers a second. Every answer is checked: an error that is fast is no throughput.
async fn rate(world: &World, url: &str, seconds: u64, clients: u64) -> f64 {
    let limits = Limits { timeout: Duration::from_secs(10), max_response_bytes: 1 << 20 };
    let http = Client::new(world.clone(), tls(None).expect("trust roots"), Destination::Operator, limits);
    let answers = AtomicU64::new(0);
    let started = Instant::now();
    let until = started + Duration::from_secs(seconds);
    let client = || async {
        while Instant::now() < until {
            let request = http::Request::post(url)
                .header("content-type", "application/json")
                .header("accept", "application/json, text/event-stream")
                .header("mcp-protocol-version", "2026-07-28")
                .header("mcp-method", "tools/call")
                .header("mcp-name", "echo")
                .body(Bytes::from_static(REQUEST.as_bytes()))
                .expect("a request");
            let response = http.send(request).await.expect("an answer");
            let body = response.body();
            assert!(body.len() > 4096 && response.status() == 200, "{}", String::from_utf8_lossy(body));
            answers.fetch_add(1, Ordering::Relaxed);
        }
    };
    join_all((0..clients).map(|_| client())).await;
    answers.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64()
}
