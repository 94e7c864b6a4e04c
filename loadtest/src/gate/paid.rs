//! What the gate takes for itself in a paid call: the time of a call at the gate, less the time that the three exchanges
//! of a sale take without it (the upstream's answer, `/verify`, `/settle`), measured in turn by the same client. The
//! claims are in a durable PostgreSQL, as several gates have them; payments are signed and prepared on the sandbox's
//! chain. The facilitator says yes at once: how long a settlement takes is not what is measured.

use std::time::{Duration, Instant};

use bytes::Bytes;
use ed25519_dalek::Signer as _;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::chain::stellar::{Settings, Stellar};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ledger::{Database, PostgresLedger};
use tollway::mcp;
use tollway::ports::machine;
use tollway::sandbox::chain::{self, LocalNetwork, NETWORK, Node, USDC};
use tollway::x402::Offer;

use super::{Args, Figures, gate, serve, started};
use crate::parts::market::hex;
use crate::parts::postgres::Postgres;
use crate::report::{Doing as _, Report, Result, Stopped, median};

/// Before anything is counted.
const WARM_UP: usize = 40;
/// Calls of one kind in a row.
const TURN: usize = 20;
/// More than a run writes.
const WAL_FILES: u32 = 8;

pub async fn run(args: &Args) -> Result<Figures> {
    let calls = args.paid_calls as usize;
    let (_upstream, upstream) = started(&["--upstream"]).await?;
    let (_facilitator, settles) = started(&["--facilitator"]).await?;
    let settles = settles.trim_end_matches("/mcp");
    let database = Postgres::start(&["shared_buffers=256MB", "wal_buffers=16MB", "min_wal_size=256MB"]).await?;
    database.used_wal(WAL_FILES).await?;
    PostgresLedger::migrate(&Database::parse(&database.url(), None).map_err(Stopped)?).await.doing("migrate")?;

    let (world, _tasks) = machine::world();
    let options = chain::Options { ledger_interval: Some(Duration::from_secs(5)), ..chain::Options::default() };
    let network = LocalNetwork::start(options, world.clone()).doing("the chain")?;
    let (payer, shop) = (network.account("payer"), network.account("shop"));
    for (account, usdc) in [(&payer, 1_000_000_000_000), (&shop, 0)] {
        network.fund(&account.id(), 1_000_000_000_000);
        network.trust(&account.id(), usdc);
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.doing("a free port")?;
    let rpc = format!("http://{}", listener.local_addr().doing("an address")?);
    let nodes = network.rpc_router(Node::default());
    let served = mcp::serve::serve(machine::TcpListener(listener), world.clone(), nodes, CancellationToken::new());
    world.spawn.spawn(Box::pin(served));

    let directory = tempfile::tempdir().doing("a temporary directory")?;
    let config = json!({
        "http": {"port": 0},
        "keys": {"ring_env": "TOLLWAY_KEY_RING"},
        "budget": {"store": "postgres"},
        "network_security": {"allow_insecure_local": true},
        "networks": {NETWORK: {"rpc_urls": [&rpc]}},
        "gate": {
            "upstream": {"url": &upstream},
            "default": "free",
            "facilitator": {"base_url": settles},
            "defaults": {
                "network": NETWORK, "asset": USDC, "pay_to": shop.address(), "max_timeout_seconds": 3600,
            },
            "tools": {"echo": {"price": "0.01"}},
        },
    });
    let (_gate, gate_url) = gate(directory.path(), &config, Some(&database.url())).await?;

    let limits = Limits { timeout: Duration::from_secs(10), max_response_bytes: 1 << 20 };
    let http = Client::to_one(world.clone(), Tls::Plain, Destination::Operator, limits, 16);
    let unpaid: Value = serde_json::from_slice(&ask(&http, &gate_url, &call(None)).await?).doing("a challenge")?;
    let offer = &unpaid["result"]["structuredContent"]["accepts"][0];
    let parsed = Offer::parse(&tollway::json::raw(offer)).map_err(|e| Stopped(format!("no offer: {e}: {unpaid}")))?;
    let urls = vec![rpc.parse().doing("a URL")?];
    let settings = Settings::known(&parsed.network, urls).ok_or(Stopped("an unknown network".into()))?;
    let settings = Settings { max_authorization_seconds: 3_600, ..settings };
    let stellar = Stellar::new(settings, http.clone(), world.clone());

    let mut payments = Vec::new();
    for n in 1..=WARM_UP + calls {
        let at = stellar.ledger().await.doing("the newest ledger")?;
        let draft = stellar.draft(&parsed, &payer.address(), at).doing("a payment")?;
        let signature = payer.key.sign(&draft.digest()).to_bytes();
        let signed = draft.attach(&signature).doing("a payment")?;
        let transaction = stellar.prepare(&signed).await.doing("a payment")?;
        payments.push(json!({
            "x402Version": 2, "accepted": offer, "payload": {"transaction": transaction},
            "extensions": {"payment-identifier": {"info": {"required": false, "id": hex(&world.random::<16>())}}},
        }));
        if n % 100 == 0 {
            eprintln!("{n} payments are signed");
        }
    }
    // The gate and what stands around it, in turns of so many calls each.
    let mut times = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
    let (verify, settle) = (format!("{settles}/verify"), format!("{settles}/settle"));
    for (turn, some) in payments.chunks(TURN).enumerate() {
        let counts = (turn + 1) * TURN > WARM_UP;
        for payment in some {
            let (took, answer) = timed(&http, &gate_url, &call(Some(payment))).await?;
            if !(answer.len() > 4096 && String::from_utf8_lossy(&answer).contains("x402/payment-response")) {
                return Err(Stopped(format!("a paid call was not sold: {}", String::from_utf8_lossy(&answer))));
            }
            times[0].extend(counts.then_some(took));
        }
        for payment in some {
            let question =
                json!({"x402Version": 2, "paymentPayload": payment, "paymentRequirements": offer}).to_string();
            let exchanges = [(&upstream, call(None)), (&verify, question.clone()), (&settle, question)];
            for ((url, body), times) in exchanges.iter().zip(&mut times[1..]) {
                let (took, _) = timed(&http, url, body).await?;
                times.extend(counts.then_some(took));
            }
        }
    }
    let hundredths = |ms: f64| (ms * 100.0).round() / 100.0;
    let slow = {
        let mut all = times[0].clone();
        all.sort_by(f64::total_cmp);
        all[all.len() * 99 / 100]
    };
    let [whole, upstream, verify, settle] = times.map(median);
    let own = whole - upstream - verify - settle;
    eprintln!("paid: {whole:.2} ms, of which the gate's own {own:.2} ms");
    Ok(Figures {
        holds: own < args.paid_bar,
        measured: json!({
            "ownMillisP50": hundredths(own), "callMillisP50": hundredths(whole), "callMillisP99": hundredths(slow),
            "calls": calls, "bar": args.paid_bar,
        }),
        baseline: json!({
            "upstreamMillisP50": hundredths(upstream), "verifyMillisP50": hundredths(verify),
            "settleMillisP50": hundredths(settle),
        }),
        ratio: None,
    })
}

fn call(payment: Option<&Value>) -> String {
    let mut params = json!({"name": "echo", "arguments": {"text": "hello"}});
    if let Some(payment) = payment {
        params["_meta"] = json!({"x402/payment": payment});
    }
    json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string()
}

/// Milliseconds, and the answer.
async fn timed(http: &Client, url: &str, body: &str) -> Result<(f64, Bytes)> {
    let started = Instant::now();
    let answer = ask(http, url, body).await?;
    Ok((started.elapsed().as_secs_f64() * 1e3, answer))
}

async fn ask(http: &Client, url: &str, body: &str) -> Result<Bytes> {
    let request = http::Request::post(url)
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .header("mcp-protocol-version", "2025-11-25")
        .body(Bytes::from(body.to_owned()))
        .doing("a request")?;
    let response = http.send(request).await.doing(url)?;
    match response.status().as_u16() {
        200 => Ok(response.into_body()),
        status => Err(Stopped(format!("{url} answered {status}: {}", String::from_utf8_lossy(response.body())))),
    }
}

pub async fn facilitator() -> Result<Report> {
    let supported =
        json!({"kinds": [{"x402Version": 2, "scheme": "exact", "network": NETWORK}], "extensions": [], "signers": {}});
    serve(move |request: http::Request<Incoming>| {
        let path = request.uri().path().to_owned();
        let supported = supported.clone();
        async move {
            let body = request.into_body().collect().await?.to_bytes();
            let answer = match path.as_str() {
                "/verify" => json!({"isValid": true}),
                "/settle" => {
                    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
                    let id = asked["paymentPayload"]["extensions"]["payment-identifier"]["info"]["id"].clone();
                    json!({"success": true, "transaction": id, "network": NETWORK})
                }
                _ => supported,
            };
            let response = http::Response::builder().header("content-type", "application/json");
            Ok::<_, hyper::Error>(response.body(Full::new(Bytes::from(answer.to_string()))).expect("a response"))
        }
    })
    .await
}
