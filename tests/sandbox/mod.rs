//! The whole sandbox from outside: the command that a newcomer runs, and the same purchase with the official
//! facilitator (`tests/interop`, Node 20) behind the seller.
#![allow(clippy::disallowed_methods, reason = "a server of the outside world")]

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::response::IntoResponse as _;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::json;
use tollway::ports::machine::world;
use tollway::sandbox::backends::{Options, client};
use tollway::sandbox::chain;
use tollway::sandbox::demo;
use tollway::sandbox::start::start;

use crate::witness::every_transfer_has_its_row;

#[tokio::test]
async fn the_demo_command_exits_with_0_and_prints_one_document_and_leaves_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let demo = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollway"))
            .args(["sandbox", "--demo"])
            .env("TMPDIR", temporary.path())
            .env("FACILITATOR_URL", "http://elsewhere.example")
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(Duration::from_secs(60), demo).await.unwrap().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["call"]["receipt"]["status"], "settled", "{said}");
        assert_eq!(document["call"], document["replay"]);
        assert_eq!(document["overBudget"]["code"], "BUDGET_EXCEEDED");
        assert_eq!(document["stale"]["code"], "RESOURCE_STALE");
        assert_eq!(document["chain"]["payerAfter"], "999990000");
        assert_eq!(document["chain"]["sellerAfter"], "10000");
        assert!(document["search"]["resources"].is_array() && document["get"]["wrapper"].is_object());
    }
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0, "a state directory was left");
}

#[tokio::test]
async fn the_sandbox_says_where_it_is_and_stops_at_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollway"))
        .args(["sandbox", "--json", "--ledger-ms", "100", "--dir"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await.unwrap().unwrap().unwrap();
    let printed: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(printed["accounts"]["payer"]["balance"], "1000000000");
    assert_eq!(printed["clients"]["http"]["mcpServers"]["tollway"]["url"], printed["urls"]["agent"]);
    let (world, _) = world();
    let health = printed["urls"]["agent"].as_str().unwrap().replace("/mcp", "/healthz");
    let request = http::Request::get(health).body(bytes::Bytes::new()).unwrap();
    assert_eq!(client(&world).unwrap().send(request).await.unwrap().status(), 200);
    // The demo seller is a gate like any other: its file serves the operator's commands while it runs.
    let list = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollway"))
        .args(["list", "--json", "--config"])
        .arg(dir.path().join("gate.yaml"))
        .output();
    let list = list.await.unwrap();
    let said = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(list.status.success(), "{said} {}", String::from_utf8_lossy(&list.stderr));
    for (item, price) in [("get_weather", "0.001"), ("demo://almanac", "0.0005"), ("weather_report", "0.0002")] {
        assert!(said.contains(item) && said.contains(&format!("\"{price}\"")), "{said}");
    }
    let id = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let status = tokio::time::timeout(Duration::from_secs(30), child.wait()).await.unwrap().unwrap();
    assert!(status.success(), "{status}");
}

/// A URL to begin with, and what stands behind it once it is known: the facilitator needs the chain's, which the sandbox
/// makes, and the sandbox's gate needs the facilitator's.
async fn forwarded() -> (String, Arc<OnceLock<String>>) {
    let target = Arc::<OnceLock<String>>::default();
    let limits = Limits { timeout: Duration::from_secs(90), max_response_bytes: 1 << 20 };
    let client = Client::new(world().0, Tls::Plain, Destination::Operator, limits);
    let to = target.clone();
    let forward = async move |request: axum::extract::Request| {
        let Some(target) = to.get() else { return http::StatusCode::SERVICE_UNAVAILABLE.into_response() };
        let (mut head, body) = request.into_parts();
        let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
        head.uri = format!("{target}{}", head.uri.path()).parse().unwrap();
        head.headers.remove("host");
        let answer = client.send(http::Request::from_parts(head, body)).await.unwrap();
        (answer.status(), [("content-type", "application/json")], answer.into_body()).into_response()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(forward)).await });
    (url, target)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_facilitator_settles_what_an_agent_buys() {
    let (world, _) = world();
    // Below a second the offers are of an hour: a signature then lives for five minutes, while the official facilitator
    // looks once a second.
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(500)), ..chain::Options::default() };
    let (settles_with, official_url) = forwarded().await;
    let options = Options { chain, settles_with: Some(settles_with), ..Options::default() };
    let sandbox = start(options, &world).await.unwrap();
    let account = sandbox.backends.network.account("the official facilitator");
    sandbox.backends.network.fund(&account.id(), 1_000_000_000);
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
    assert!(folder.join("node_modules").exists(), "run: npm ci --prefix tests/interop");
    let mut official = tokio::process::Command::new("node")
        .args(["facilitator.mjs", "0", &sandbox.backends.rpc_url])
        .current_dir(folder)
        .env("FACILITATOR_SECRET", account.secret().as_str())
        // It asks Horizon on the Internet how long a ledger takes; unreachable, it takes 5 s.
        .env("HTTPS_PROXY", "http://127.0.0.1:9")
        .env("NO_PROXY", "127.0.0.1")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(official.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await.unwrap().unwrap().unwrap();
    let printed: Value = serde_json::from_str(&line).unwrap();
    let http = client(&world).unwrap();
    official_url.set(printed["url"].as_str().unwrap().to_owned()).unwrap();

    let report = demo::run(&sandbox, http, &|line| eprintln!("{line}")).await.unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let receipt = json::member(json::member(&report.document, "call").unwrap(), "receipt").unwrap();
    let transaction = json::member(receipt, "transaction").and_then(json::string).unwrap();
    let transfers = sandbox.backends.network.transfers();
    assert_eq!(transfers.len(), 1);
    assert_eq!(transfers[0].transaction, transaction);
    assert_eq!(every_transfer_has_its_row(&sandbox, &world, &["ledger.sqlite"]).await, 1);
    // The transaction was paid for by the official facilitator's account, so it was the one that settled.
    assert!(sandbox.backends.network.native_balance(&account.id()).unwrap() < 1_000_000_000);
}
