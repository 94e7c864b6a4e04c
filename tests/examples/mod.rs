//! The programs of `examples/` as a newcomer runs them: against the sandbox, without a network. Our own agent pays.
#![allow(clippy::disallowed_methods, reason = "the outside world")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tollway::ports::machine::world;
use tollway::sandbox::backends::{Options, client as operator};
use tollway::sandbox::chain::{NETWORK, USDC};
use tollway::sandbox::mcp_client::McpClient;
use tollway::sandbox::start::{Running, start};

use crate::gate::{BOTH, JSON, PATIENCE, client, request, send};

/// The built example. `cargo test` has built it; `cargo test --test main` has not, and one from an earlier time is not
/// what stands in the source.
fn built(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_tests = std::env::current_exe().unwrap();
    let profile = of_tests.parent().unwrap().parent().unwrap();
    let example = profile.join("examples").join(name);
    let newest = ["src", "examples", "Cargo.toml", "Cargo.lock"].iter().map(|part| changed(&root.join(part))).max();
    if example.metadata().and_then(|file| file.modified()).is_ok_and(|built| Some(built) > newest) {
        return example;
    }
    let mut cargo = std::process::Command::new(std::env::var("CARGO").unwrap_or("cargo".into()));
    cargo.args(["build", "--quiet", "--locked", "--example", name]).current_dir(root);
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().unwrap().success());
    example
}

/// When this file was last written, or the last one under this directory.
fn changed(path: &Path) -> SystemTime {
    match std::fs::read_dir(path) {
        Ok(entries) => entries.map(|entry| changed(&entry.unwrap().path())).max().unwrap_or(SystemTime::UNIX_EPOCH),
        Err(_) => path.metadata().and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH),
    }
}

/// The process, and where it sells.
async fn run(name: &str, sandbox: &Running, state: &tempfile::TempDir) -> (Child, String) {
    let backends = &sandbox.backends;
    let mut child = Command::new(built(name))
        .args([&backends.facilitator_url, &backends.rpc_url, &backends.pay_to.to_string()])
        .env("PORT", "0")
        .env("TMPDIR", state.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
    (child, line.strip_prefix("selling at ").unwrap().to_owned())
}

async fn ask(url: &str, method: &str, params: Value) -> Value {
    let headers = [BOTH, JSON, ("mcp-protocol-version", "2025-11-25")];
    let answer = send(&client(), Method::POST, url, &headers, request(1, method, &params)).await.json();
    assert!(answer["result"].is_object(), "{method}: {answer}");
    answer["result"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_example_asks_for_money_and_sells_its_tool_to_our_agent() {
    let (world, _) = world();
    let sandbox = start(Options::default(), &world).await.unwrap();
    let agent = McpClient::new(operator(&world).unwrap(), &sandbox.agent_url, Some(sandbox.agent_key()));
    let buys = async |tool: &str, arguments: Value| -> Value {
        let result = agent.call_tool(tool, &arguments, &json!({}), &[]).await.unwrap();
        serde_json::from_str::<Value>(result.get()).unwrap()["structuredContent"].clone()
    };
    let state = tempfile::tempdir().unwrap();
    for (sold, name) in [(1, "paid_axum"), (2, "paid_rmcp")] {
        let (mut child, url) = run(name, &sandbox, &state).await;
        let weather = json!({"name": "weather", "arguments": {"city": "Oslo"}});
        let free = ask(&url, "tools/call", json!({"name": "cities", "arguments": {}})).await;
        assert_eq!(free["content"][0]["text"], "Oslo, Bern, Rome", "{name}: {free}");
        let unfit = ask(&url, "tools/call", json!({"name": "weather", "arguments": {"city": 5}})).await;
        assert!(unfit["isError"] == true && unfit["structuredContent"].is_null(), "{name}: {unfit}");

        let listed = ask(&url, "tools/list", json!({})).await;
        let listed = listed["tools"].as_array().unwrap().iter().find(|tool| tool["name"] == "weather").unwrap().clone();
        assert_eq!(listed["_meta"]["x402/price"]["amount"], "0.01", "{name}: {listed}");
        let challenge = ask(&url, "tools/call", weather).await;
        let required = &challenge["structuredContent"];
        assert_eq!(required["accepts"], listed["_meta"]["x402/accepts"], "{name}: {challenge}");
        assert_eq!(required["accepts"][0]["amount"], "100000", "{name}: {challenge}");
        let almanac = ask(&url, "resources/read", json!({"uri": "almanac://may"})).await;
        assert_eq!(
            (&almanac["contents"], &almanac["structuredContent"]["accepts"][0]["amount"]),
            (&json!([]), &json!("20000"))
        );
        let report = ask(&url, "prompts/get", json!({"name": "report"})).await;
        assert_eq!(
            (&report["messages"], &report["structuredContent"]["accepts"][0]["amount"]),
            (&json!([]), &json!("50000"))
        );
        assert_eq!(sandbox.backends.network.transfers().len(), sold - 1, "{name}: nothing was paid so far");

        let item = json!({
            "resource": url, "type": "mcp", "x402Version": 2, "accepts": required["accepts"], "serviceName": name,
            "lastUpdated": "2026-01-01T00:00:00Z", "description": "The weather in a city.",
            "mimeType": "application/json", "extensions": {"bazaar": required["extensions"]["bazaar"]},
        });
        sandbox.backends.catalog.put(&item.to_string()).unwrap();
        let found = buys("x402_search_resources", json!({"query": name})).await;
        let mut call = json!({
            "ref": found["resources"][0]["wrapper"]["ref"], "network": NETWORK, "scheme": "exact", "asset": USDC,
            "maxAtomicAmount": "100000", "arguments": {"city": "Oslo"}, "idempotencyKey": format!("example-{name}"),
        });
        let bought = buys("x402_call_resource", call.clone()).await;
        assert_eq!(bought["receipt"]["settledAmount"], "100000", "{name}: {bought}");
        assert_eq!(bought["content"][0]["text"], "It is sunny in Oslo.", "{name}: {bought}");
        assert_eq!(buys("x402_call_resource", call.clone()).await, bought, "{name}");
        call["idempotencyKey"] = json!(format!("example-{name}-unfit"));
        call["arguments"] = json!({"city": 5});
        assert_eq!(buys("x402_call_resource", call).await["receipt"], Value::Null);
        let transfers = sandbox.backends.network.transfers();
        assert_eq!(transfers.len(), sold, "{name}");
        assert_eq!(bought["receipt"]["transaction"], json!(transfers[sold - 1].transaction));
        let id = child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        let status = tokio::time::timeout(Duration::from_secs(30), child.wait()).await.unwrap().unwrap();
        assert!(status.success(), "{name}: {status}");
    }
}
