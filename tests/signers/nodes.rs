//! `tollway sandbox` with its RPC over TLS and a second node.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tollway::http::{self, Client, Destination, Limits};
use tollway::ports::machine;

#[tokio::test]
async fn the_command_prints_where_its_nodes_are_and_whom_to_trust() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollway"))
        .args(["sandbox", "--json", "--ledger-ms", "100", "--rpc-tls", "--lagging-node", "30", "--dir"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await.unwrap().unwrap().unwrap();
    let printed: Value = serde_json::from_str(&line).unwrap();

    let (world, _) = machine::world();
    let pem = std::fs::read(printed["caFile"].as_str().unwrap()).unwrap();
    let client = Client::new(world, http::tls(Some(&pem)).unwrap(), Destination::Operator, Limits::default());
    let newest = async |name: &str| -> u64 {
        let url = printed["urls"][name].as_str().unwrap_or_else(|| panic!("{name}: {printed}"));
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "getLatestLedger"}).to_string();
        let request = ::http::Request::post(url).header("content-type", "application/json").body(body.into()).unwrap();
        let answer: Value = serde_json::from_slice(client.send(request).await.unwrap().body()).unwrap();
        answer["result"]["sequence"].as_u64().unwrap()
    };
    assert!(printed["urls"]["rpcTls"].as_str().unwrap().starts_with("https://"));
    // The one that lags was asked last, and is behind all the same.
    while newest("rpc").await < 1_005 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (plain, tls, behind) = (newest("rpc").await, newest("rpcTls").await, newest("laggingRpc").await);
    assert!(tls >= plain && behind < plain, "{plain}, {tls}, {behind}");
}
