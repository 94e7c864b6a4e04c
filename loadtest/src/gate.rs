//! What a free call costs at the gate beside a bare hyper reverse proxy, which reads nothing and decides nothing: the same
//! client, the same upstream, a 4 KB tool result, alternating rounds. What counts is the CPU time that each of the two
//! processes takes for a request, as the kernel says; requests a second say more about the machine, on which client and
//! upstream run too.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ports::machine;

use crate::parts::{binary, rate};
use crate::report::{Doing as _, Report, Result, Stopped, median};

const REQUEST: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"}}}"#;
/// Linux says CPU time in these a second.
const TICKS: f64 = 100.0;

#[derive(clap::Args)]
pub struct Args {
    /// Alternating rounds; the median of their ratios counts
    #[arg(long, default_value_t = 5)]
    rounds: u64,
    /// How long each part of a round takes
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Callers at once, each with a call after the other
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// The bar: the gate takes at most this many times the CPU of the bare proxy
    #[arg(long, default_value_t = 2.0)]
    bar: f64,
    /// Of a process that another one started: be the bare proxy in front of this URL
    #[arg(long, hide = true)]
    bare: Option<String>,
    /// Of a process that another one started: be the upstream
    #[arg(long, hide = true)]
    upstream: bool,
}

pub async fn run(args: Args) -> Result<Report> {
    if let Some(url) = &args.bare {
        return bare(url).await;
    }
    if args.upstream {
        return upstream().await;
    }
    let Args { rounds, seconds, clients, bar, .. } = args;
    let ours = std::env::current_exe().doing("this program's path")?;
    let (_upstream, direct) = started(Command::new(&ours).args(["gate", "--upstream"])).await?;
    let (bare, bare_url) = started(Command::new(&ours).args(["gate", "--bare", &direct])).await?;
    let directory = tempfile::tempdir().doing("a temporary directory")?;
    let (gate, gate_url) = gate(directory.path(), &direct).await?;

    let (mut ratios, mut figures) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
    let (mut bares, mut gates) = (Vec::new(), Vec::new());
    for url in [&direct, &bare_url, &gate_url] {
        rate(url, 1, clients).await;
    }
    for round in 1..=rounds {
        let (asked, took) = rate(&direct, seconds, clients).await;
        figures[0].push(asked as f64 / took);
        let mut costs = Vec::new();
        for (i, (child, url)) in [(&bare, &bare_url), (&gate, &gate_url)].into_iter().enumerate() {
            let before = cpu(child)?;
            let (asked, took) = rate(url, seconds, clients).await;
            costs.push((cpu(child)? - before) / asked as f64);
            figures[i + 1].push(asked as f64 / took);
        }
        eprintln!(
            "round {round}: bare {:.1} µs, gate {:.1} µs, ratio {:.2}",
            costs[0] * 1e6,
            costs[1] * 1e6,
            costs[1] / costs[0]
        );
        ratios.push(costs[1] / costs[0]);
        bares.push(costs[0] * 1e6);
        gates.push(costs[1] * 1e6);
    }
    let ratio = median(ratios);
    let tenths = |values: Vec<f64>| (median(values) * 10.0).round() / 10.0;
    let [direct, bare, gate] = figures.map(|values| median(values).round());
    Ok(Report {
        scenario: "gate",
        pass: ratio <= bar,
        figures: json!({
            "cpuMicrosPerRequest": tenths(gates), "requestsPerSecond": gate, "clients": clients, "rounds": rounds, "bar": bar,
        }),
        baseline: json!({
            "cpuMicrosPerRequest": tenths(bares), "requestsPerSecond": bare, "directRequestsPerSecond": direct,
        }),
        ratio: Some((ratio * 100.0).round() / 100.0),
    })
}

/// A process that says its URL on the first line of standard output.
async fn started(command: &mut Command) -> Result<(Child, String)> {
    let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().doing("a process")?;
    let out = child.stdout.take().ok_or(Stopped("no standard output".into()))?;
    let line = BufReader::new(out).lines().next_line().await.doing("its URL")?;
    Ok((child, line.ok_or(Stopped("a process ended at its start".into()))?))
}

async fn gate(directory: &Path, upstream: &str) -> Result<(Child, String)> {
    let config = json!({
        "http": {"port": 0},
        "keys": {"ring_env": "TOLLWAY_KEY_RING"},
        "budget": {"path": directory.join("claims.sqlite")},
        "network_security": {"allow_insecure_local": true},
        "gate": {
            "upstream": {"url": upstream},
            "default": "free",
            "unknown": {"stellar:testnet": "operator"},
            "facilitator": {"base_url": "http://127.0.0.1:9"},
            "defaults": {
                "network": "stellar:testnet", "asset": "USDC",
                "pay_to": "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4",
            },
            "tools": {"paid": {"price": "0.01"}},
        },
    });
    let file = directory.join("gate.yaml");
    std::fs::write(&file, config.to_string()).doing("the gate's file")?;
    let mut command = Command::new(binary::tollway().await?);
    command.args(["gate", "--config"]).arg(&file).env("TOLLWAY_KEY_RING", "00".repeat(32));
    command.env_remove("DATABASE_URL").env_remove("PORT");
    command.env("TOLLWAY_LOG", "tollway=info").env("TOLLWAY_LOG_FORMAT", "json").stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().doing("the gate")?;
    let err = child.stderr.take().ok_or(Stopped("no standard error".into()))?;
    let mut lines = BufReader::new(err).lines();
    while let Some(line) = lines.next_line().await.doing("the gate's log")? {
        let line: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        if line["fields"]["message"] == "a gate is open at /mcp"
            && let Some(address) = line["fields"]["address"].as_str()
        {
            let url = format!("http://{address}/mcp");
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok((child, url));
        }
    }
    Err(Stopped("the gate did not start".into()))
}

/// Seconds of CPU that the process took so far: user and system, of all its threads (proc(5), fields 14 and 15).
fn cpu(child: &Child) -> Result<f64> {
    let id = child.id().ok_or(Stopped("a process has ended".into()))?;
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).doing("a process's CPU time")?;
    let behind_name = stat.rsplit(") ").next().unwrap_or_default();
    let field = |n: usize| behind_name.split(' ').nth(n - 3).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    Ok((field(14) + field(15)) / TICKS)
}

/// Answers, and the seconds that they took.
async fn rate(url: &str, seconds: u64, clients: u64) -> (u64, f64) {
    let limits = Limits { timeout: Duration::from_secs(10), max_response_bytes: 1 << 20 };
    let http = Client::to_one(machine::world().0, Tls::Plain, Destination::Operator, limits, 1_024);
    let request = || http::Request::post(url).header("mcp-protocol-version", "2025-11-25");
    rate::answers(&http, seconds, clients, request, REQUEST).await
}

async fn upstream() -> Result<Report> {
    let body = json!({"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "x".repeat(4096)}]}});
    let body = Bytes::from(body.to_string());
    serve(move |request: http::Request<Incoming>| {
        let body = body.clone();
        async move {
            request.into_body().collect().await?;
            let response = http::Response::builder().header("content-type", "application/json");
            Ok::<_, hyper::Error>(response.body(http_body_util::Full::new(body)).expect("a response"))
        }
    })
    .await
}

/// What hyper's own pieces make with the fewest lines.
async fn bare(to: &str) -> Result<Report> {
    let to: http::Uri = to.parse().doing("the upstream's URL")?;
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let pool: Pool<HttpConnector, Incoming> = Pool::builder(TokioExecutor::new()).build(connector);
    serve(move |mut request: http::Request<Incoming>| {
        let pool = pool.clone();
        *request.uri_mut() = to.clone();
        request.headers_mut().remove("host");
        async move { pool.request(request).await }
    })
    .await
}

async fn serve<B, F, E>(answer: impl Fn(http::Request<Incoming>) -> F + Clone + Send + 'static) -> Result<Report>
where
    F: Future<Output = Result<http::Response<B>, E>> + Send + 'static,
    B: hyper::body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
{
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.doing("a free port")?;
    println!("http://{}/mcp", listener.local_addr().doing("an address")?);
    loop {
        let (stream, _) = listener.accept().await.doing("accept")?;
        let _ = stream.set_nodelay(true);
        let answer = answer.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(answer);
            let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}
