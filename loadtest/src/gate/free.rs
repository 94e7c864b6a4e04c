//! What a free call costs at the gate beside a bare hyper reverse proxy, which reads nothing and decides nothing: the same
//! client, the same upstream, a 4 KB tool result, alternating rounds. What counts is the CPU time that each of the two
//! processes takes for a request, as the kernel says; requests a second say more about the machine, on which client and
//! upstream run too.

use std::time::Duration;

use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use tokio::process::Child;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ports::machine;

use super::{Args, Figures, gate, serve, started};
use crate::parts::rate;
use crate::report::{Doing as _, Report, Result, Stopped, median};

const REQUEST: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"}}}"#;
/// Linux says CPU time in these a second.
const TICKS: f64 = 100.0;

pub async fn run(args: &Args) -> Result<Figures> {
    let Args { rounds, seconds, clients, bar, .. } = *args;
    let (_upstream, direct) = started(&["--upstream"]).await?;
    let (bare, bare_url) = started(&["--bare", &direct]).await?;
    let directory = tempfile::tempdir().doing("a temporary directory")?;
    let config = json!({
        "http": {"port": 0},
        "keys": {"ring_env": "TOLLWAY_KEY_RING"},
        "budget": {"path": directory.path().join("claims.sqlite")},
        "network_security": {"allow_insecure_local": true},
        "gate": {
            "upstream": {"url": direct},
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
    let (gate, gate_url) = gate(directory.path(), &config, None).await?;

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
    Ok(Figures {
        holds: ratio <= bar,
        measured: json!({
            "cpuMicrosPerRequest": tenths(gates), "requestsPerSecond": gate, "clients": clients, "rounds": rounds, "bar": bar,
        }),
        baseline: json!({
            "cpuMicrosPerRequest": tenths(bares), "requestsPerSecond": bare, "directRequestsPerSecond": direct,
        }),
        ratio: Some((ratio * 100.0).round() / 100.0),
    })
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

/// What hyper's own pieces make with the fewest lines.
pub async fn bare(to: &str) -> Result<Report> {
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
