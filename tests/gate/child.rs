//! An upstream that is a program on standard input and output.

use serde_json::{Value, json};

use super::{GateProcess, Got, client, config, initialize, post, request, script};

async fn before_child(more: Value) -> GateProcess {
    let mut upstream = json!({"command": ["node", script("child.mjs")]});
    for (name, value) in more.as_object().unwrap() {
        upstream[name] = value.clone();
    }
    GateProcess::start(&config(&upstream)).await
}

async fn session(gate: &GateProcess) -> String {
    let got = post(&client(), &gate.url, &[], initialize("2025-11-25")).await;
    assert_eq!(
        (got.status, got.json()["result"]["serverInfo"]["name"].as_str()),
        (200, Some("child")),
        "{}",
        got.text()
    );
    got.header("mcp-session-id").to_owned()
}

async fn call(gate: &GateProcess, session: &str, id: u64, params: Value) -> Got {
    let headers: &[(&str, &str)] = &[("mcp-session-id", session), ("mcp-protocol-version", "2025-11-25")];
    let headers = if session.is_empty() { &headers[1..] } else { headers };
    post(&client(), &gate.url, headers, request(id, "tools/call", &params)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_session_has_a_process_of_its_own() {
    let gate = before_child(json!({})).await;
    let (a, b) = (session(&gate).await, session(&gate).await);
    let count = async |session: &str| {
        let got = call(&gate, session, 2, json!({"name": "count"})).await.json();
        (got["result"]["calls"].as_u64().unwrap(), got["result"]["pid"].as_u64().unwrap())
    };
    let (first, pid) = count(&a).await;
    assert_eq!((first, count(&a).await, count(&b).await.0), (1, (2, pid), 1));

    // Bytes in, bytes out.
    let sent = r#"{"jsonrpc":"2.0", "id":"\u0061", "method":"tools/call","params":{"name":"echo","arguments":{"n":1.0,"b":100000000000000000000000001}},"x":[ ]}"#;
    let headers = [("mcp-session-id", a.as_str())];
    let got = post(&client(), &gate.url, &headers, sent).await;
    let line = serde_json::to_string(sent).unwrap();
    assert_eq!(
        got.text(),
        format!(
            r#"{{"id":"\u0061", "jsonrpc":"2.0","result":{{"content":[],"big":100000000000000000000000001,"line":{line}}}}}"#
        )
    );
    let got = call(&gate, &a, 3, json!({"name": "progress", "_meta": {"progressToken": "t"}})).await;
    assert!(got.text().contains("half") && got.header("content-type").contains("event-stream"), "{}", got.text());

    // It dies: its session is over, the other one is not, and a new one begins.
    assert!(call(&gate, &a, 4, json!({"name": "die"})).await.status >= 500);
    assert_eq!(call(&gate, &a, 5, json!({"name": "count"})).await.status, 404);
    assert_eq!(count(&b).await.0, 2);
    let again = session(&gate).await;
    assert_eq!(count(&again).await.0, 1);
    let headers = [("mcp-session-id", b.as_str())];
    assert_eq!(super::send(&client(), http::Method::DELETE, &gate.url, &headers, "").await.status, 204);
    assert_eq!(call(&gate, &b, 6, json!({"name": "count"})).await.status, 404);
    let lines = gate.log.lock().unwrap().clone();
    assert!(lines.iter().any(|line| line["fields"]["line"] == format!("started {pid}")), "standard error is logged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stateless_one_is_shared_and_comes_back() {
    let gate = before_child(json!({"stateless": true})).await;
    let (a, b) = (session(&gate).await, session(&gate).await);
    let got = call(&gate, &a, 7, json!({"name": "count"})).await.json();
    let pid = got["result"]["pid"].clone();
    // The same id and the same token of two clients at once are two calls.
    let params = json!({"name": "progress", "_meta": {"progressToken": 1}});
    let calls = (0..8).map(|n| call(&gate, if n % 2 == 0 { &a } else { &b }, 7, params.clone()));
    for got in futures_util::future::join_all(calls).await {
        let text = got.text();
        assert!(text.contains(r#""progressToken":1,"#) && text.contains(r#"{"id":7, "#), "{text}");
    }
    let got = call(&gate, &b, 8, json!({"name": "count"})).await.json();
    assert_eq!((got["result"]["calls"].as_u64(), &got["result"]["pid"]), (Some(2), &pid));
    // A client withdraws its own calls and nobody else's.
    let client = client();
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7}}"#;
    let waiting = call(&gate, &a, 7, json!({"name": "never"}));
    let withdrawn = async {
        for (session, count) in [(b.as_str(), 0), ("", 0), (a.as_str(), 1)] {
            // The call that nobody answers has been written before.
            while call(&gate, &b, 8, json!({"name": "pending"})).await.json()["result"]["pending"] != 1 {}
            let headers = [("mcp-session-id", session)];
            let headers = if session.is_empty() { &headers[1..] } else { &headers };
            assert_eq!(post(&client, &gate.url, headers, cancel).await.status, 202);
            let got = call(&gate, &b, 9, json!({"name": "cancelled"})).await.json();
            assert_eq!(got["result"]["cancelled"].as_array().unwrap().len(), count, "{got}");
        }
    };
    let (mut waiting, withdrawn) = (Box::pin(waiting), Box::pin(withdrawn));
    match futures_util::future::select(&mut waiting, withdrawn).await {
        futures_util::future::Either::Left((got, _)) => panic!("answered: {}", got.text()),
        futures_util::future::Either::Right(_) => drop(waiting),
    }
    assert!(call(&gate, &a, 9, json!({"name": "die"})).await.status >= 500);
    let got = call(&gate, &a, 10, json!({"name": "count"})).await.json();
    assert_eq!(got["result"]["calls"], 1);
    assert_ne!(got["result"]["pid"], pid);
}

#[tokio::test]
async fn a_child_that_dies_at_its_start_is_started_ever_later() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("starts");
    let dies = format!("date +%s%N >> '{}'; exit 3", file.display());
    let gate = before_child(json!({"command": ["sh", "-c", dies], "stateless": true})).await;
    let starts = || -> Vec<u64> {
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        written.lines().map(|line| line.parse::<u64>().unwrap() / 1_000_000).collect()
    };
    let asked_at = std::time::Instant::now();
    while starts().len() < 5 {
        assert!(asked_at.elapsed() < super::PATIENCE, "{:?}", starts());
        let got = call(&gate, "", 2, json!({"name": "count"})).await;
        assert!(got.status >= 500, "{}", got.text());
    }
    let starts = starts();
    // The second follows at once: one death is an accident.
    let pauses: Vec<u64> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses[1] >= 190 && pauses[2] >= 390 && pauses[3] >= 790, "{pauses:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_child_asks_its_client_reaches_it() {
    let gate = before_child(json!({})).await;
    let token = session(&gate).await;
    let asking = call(&gate, &token, 2, json!({"name": "ask"}));
    let answering = async {
        tokio::time::sleep(std::time::Duration::from_millis(400)).await;
        let headers = [("mcp-session-id", token.as_str())];
        let answer = r#"{"jsonrpc":"2.0","id":"q2","result":{"action":"accept"}}"#;
        assert_eq!(post(&client(), &gate.url, &headers, answer).await.status, 202);
    };
    let (got, ()) = futures_util::future::join(asking, answering).await;
    assert!(
        got.text().contains("elicitation/create") && got.text().contains(r#""answered":{"action":"accept"}"#),
        "{}",
        got.text()
    );
}

#[tokio::test]
async fn a_list_shows_prices_beside_what_the_server_has() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gate.yaml");
    let mut with = config(&json!({"command": ["node", script("child.mjs")]}));
    with["budget"] = json!({"path": dir.path().join("claims.sqlite")});
    std::fs::write(&file, with.to_string()).unwrap();
    let output = super::command(&["list", "--json", "--config", file.to_str().unwrap()]).output().await.unwrap();
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row =
        |name: &str| listed["items"].as_array().unwrap().iter().find(|item| item["name"] == name).unwrap().clone();
    assert_eq!(row("echo"), json!({"type": "tool", "name": "echo", "free": true}));
    let paid = json!({"type": "tool", "name": "paid", "free": false, "price": "0.01", "asset": "USDC",
        "network": "stellar:testnet", "payTo": "(default)", "flow": "authorization"});
    assert_eq!(row("paid"), paid);
    assert_eq!(row("brief")["note"], "matches nothing of the server's");

    let gate = GateProcess::start(&with).await;
    let output = super::command(&["list", "--url", &gate.url]).output().await.unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.lines().any(|line| line.starts_with("tool  echo ") && line.ends_with(" (free)")), "{table}");
    let line = table.lines().find(|line| line.starts_with("tool  paid")).unwrap();
    assert!(line.contains("0.01") && line.contains(super::PAY_TO) && line.ends_with("authorization"), "{table}");
}
