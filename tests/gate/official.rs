//! The official clients pay through the gate: for a tool, a resource and a prompt, in both forms of a challenge, settled on
//! the local chain by the official facilitator.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tollway::sandbox::chain::USDC;

use super::{BOTH, GateProcess, JSON, Says, Seen, Upstream, client, config, initialize, post, request};
use crate::official::{Scene, scene};

/// What stands behind the gate, and knows nothing of payments.
fn server(seen: &Seen) -> Says {
    let Ok(message) = serde_json::from_slice::<Value>(&seen.body) else { return Says::empty(405) };
    let modern = seen.headers.get("mcp-protocol-version").is_some_and(|version| version == "2026-07-28");
    let complete = |mut result: Value| {
        if modern {
            result["resultType"] = json!("complete");
        }
        result
    };
    let cached = |mut result: Value| {
        if modern {
            (result["ttlMs"], result["cacheScope"]) = (json!(60_000), json!("public"));
        }
        complete(result)
    };
    let schema = json!({"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]});
    let info = json!({"name": "server", "version": "1"});
    let result = match message["method"].as_str().unwrap_or_default() {
        "initialize" => json!({
            "protocolVersion": message["params"]["protocolVersion"], "serverInfo": info,
            "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
        }),
        "server/discover" => cached(json!({
            "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
            "_meta": {"io.modelcontextprotocol/serverInfo": info},
        })),
        "tools/list" => cached(json!({"tools": [{
            "name": "research", "description": "A report", "inputSchema": schema,
            "outputSchema": {"type": "object", "properties": {"report": {"type": "string"}}, "required": ["report"]},
        }]})),
        "prompts/list" => {
            cached(json!({"prompts": [{"name": "brief", "arguments": [{"name": "topic", "required": true}]}]}))
        }
        "tools/call" => complete(json!({
            "content": [{"type": "text", "text": "{\"report\":\"buzz\"}"}], "structuredContent": {"report": "buzz"},
        })),
        "resources/read" => cached(json!({"contents": [{"uri": message["params"]["uri"], "text": "secret"}]})),
        "prompts/get" => {
            complete(json!({"messages": [{"role": "user", "content": {"type": "text", "text": "brief me"}}]}))
        }
        _ => return Says::empty(202),
    };
    Says::json(json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string())
}

async fn facilitator(scene: &Scene) -> (tokio::process::Child, String) {
    let mut command = scene.command("facilitator.mjs", &["0", &scene.rpc], ("FACILITATOR_SECRET", &scene.facilitator));
    let mut child = command.stderr(Stdio::inherit()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(super::PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
    let line: Value = serde_json::from_str(&line).unwrap();
    (child, line["url"].as_str().unwrap().to_owned())
}

/// The gate's file for a scene, in which `research` costs 0.01.
fn file(scene: &Scene, upstream: &Upstream, settles: &str) -> Value {
    let mut with = config(&json!({"url": upstream.url}));
    with["networks"] = json!({"stellar:testnet": {"rpc_urls": [scene.rpc], "min_ledger_seconds": 0.1}});
    with["gate"]["unknown"] = json!({});
    with["gate"]["facilitator"] = json!({"base_url": settles});
    with["gate"]["defaults"] = json!({
        "network": "stellar:testnet", "asset": USDC, "pay_to": scene.shop.address(), "max_timeout_seconds": 3600,
    });
    with["gate"]["tools"] = json!({"research": {"price": "0.01"}});
    with
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_settlement_numbers_pass_and_texts_wait_and_the_session_that_paid_collects_at_another_gate() {
    let scene = scene().await;
    let (_facilitator, settles) = facilitator(&scene).await;
    let upstream = Upstream::start().await;
    upstream.always(server);
    let with = file(&scene, &upstream, &settles);
    let dir = tempfile::tempdir().unwrap();
    let mut with = with;
    // Two gates on one file, as replicas are on one database.
    with["budget"] = json!({"path": dir.path().join("claims.sqlite")});
    let gates = [GateProcess::start(&with).await, GateProcess::start(&with).await];
    let client = client();
    let got = post(&client, &gates[0].url, &[], initialize("2025-11-25")).await;
    let token = got.header("mcp-session-id").to_owned();
    let headers = [("mcp-session-id", token.as_str()), ("mcp-protocol-version", "2025-11-25")];
    let call = |id: u64, meta: Value| {
        request(id, "tools/call", &json!({"name": "research", "arguments": {"topic": "bees"}, "_meta": meta}))
    };
    let unfit = request(2, "tools/call", &json!({"name": "research", "arguments": {"topic": 7}}));
    let unfit = post(&client, &gates[0].url, &headers, unfit).await.json();
    assert!(unfit["result"]["isError"] == true && unfit["result"]["structuredContent"].is_null(), "{unfit}");
    let challenge = post(&client, &gates[0].url, &headers, call(3, json!({}))).await.json();
    let offer = challenge["result"]["structuredContent"]["accepts"][0].clone();
    let output = scene.node("client.mjs", &[&scene.rpc_tls], ("PAYER_SECRET", &scene.payer), &offer).await;
    let payment: Value = serde_json::from_slice(&output.stdout).unwrap();
    let meta = json!({"x402/payment": payment, "progressToken": "p"});

    let (writer, stream) = tokio::sync::mpsc::channel::<Result<bytes::Bytes, std::convert::Infallible>>(8);
    let text = |message: Value| Ok(bytes::Bytes::from(format!("id: 9\nevent: message\ndata: {message}\n\n")));
    upstream.seen();
    upstream.says(Says::events(axum::body::Body::from_stream(super::pass::futures(stream))));
    let body = call(4, meta.clone());
    let mut asked = http::Request::post(&gates[0].url).header(BOTH.0, BOTH.1).header(JSON.0, JSON.1);
    for (name, value) in headers {
        asked = asked.header(name, value);
    }
    let limits = tollway::http::Limits { timeout: super::PATIENCE, max_response_bytes: 1 << 20 };
    let mut open = client.stream(asked.body(bytes::Bytes::from(body.clone())).unwrap(), limits).await.unwrap();
    // What the client has paid is not the upstream's business, nor by what id the client asks: whatever else it asks by
    // that id cannot take the answer.
    let seen = asked_of(&upstream).await;
    let ours = seen["id"].clone();
    assert!(ours.as_str().unwrap().starts_with("tollway-"), "{seen}");
    let bare = json!({"name": "research", "arguments": {"topic": "bees"}, "_meta": {"progressToken": ours}});
    assert_eq!(seen, json!({"jsonrpc": "2.0", "id": ours, "method": "tools/call", "params": bare}));
    for message in [
        json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "secret log"}}),
        json!({"jsonrpc": "2.0", "method": "notifications/progress",
            "params": {"progressToken": "p", "progress": 9, "total": 9, "message": "of another call"}}),
        json!({"jsonrpc": "2.0", "method": "notifications/progress",
            "params": {"progressToken": ours, "progress": 1, "total": 2, "message": "secret progress"}}),
        json!({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create", "params": {"message": "which bees?"}}),
    ] {
        writer.send(text(message)).await.unwrap();
    }
    let mut got = String::new();
    while !got.contains("which bees?") {
        got.push_str(std::str::from_utf8(&open.chunk().await.unwrap().unwrap()).unwrap());
    }
    assert!(got.contains(r#"{"progressToken":"p","progress":1,"total":2}"#) && !got.contains("9"), "{got}");
    assert!(!got.contains("secret") && !got.contains("id: 9"), "{got}");
    assert_eq!(scene.balances().1, 0);
    let result = json!({"content": [], "structuredContent": {"report": "buzz"}});
    let guessed = json!({"jsonrpc": "2.0", "id": 4, "result": {"content": [], "structuredContent": {"report": "no"}}});
    writer.send(text(guessed)).await.unwrap();
    writer.send(text(json!({"jsonrpc": "2.0", "id": ours, "result": result}))).await.unwrap();
    while let Some(piece) = open.chunk().await.unwrap() {
        got.push_str(std::str::from_utf8(&piece).unwrap());
    }
    let (log, output) = (got.find("secret log").unwrap(), got.find("buzz").unwrap());
    assert!(log < output && !got.contains("secret progress") && got.contains(r#""success":true"#), "{got}");
    assert_eq!(scene.balances().1, 100_000);

    // The payment has no identifier: the session is the proof, at every gate, and nobody else has it.
    let again = post(&client, &gates[1].url, &headers, call(5, meta.clone())).await;
    assert_eq!(again.json()["result"]["structuredContent"]["report"], "buzz", "{}", again.text());
    let other = post(&client, &gates[1].url, &[], initialize("2025-11-25")).await.header("mcp-session-id").to_owned();
    for stranger in [vec![("mcp-session-id", other.as_str())], vec![]] {
        let got = post(&client, &gates[1].url, &stranger, call(6, meta.clone())).await;
        assert!(!got.text().contains("buzz") && got.text().contains("already_settled"), "{}", got.text());
    }
    assert_eq!(scene.balances().1, 100_000);

    // A call that its client withdraws costs nothing, and the upstream hears of it by the id that it knows.
    let output = scene.node("client.mjs", &[&scene.rpc_tls], ("PAYER_SECRET", &scene.payer), &offer).await;
    let payment: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (_writer, stream) = tokio::sync::mpsc::channel::<Result<bytes::Bytes, std::convert::Infallible>>(8);
    upstream.seen();
    upstream.says(Says::events(axum::body::Body::from_stream(super::pass::futures(stream))));
    let paid = post(&client, &gates[0].url, &headers, call(7, json!({"x402/payment": payment})));
    let withdrawn = async {
        let ours = asked_of(&upstream).await["id"].clone();
        let cancel =
            |id: u64| json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}});
        let stranger = [("mcp-session-id", other.as_str())];
        assert_eq!(post(&client, &gates[0].url, &stranger, cancel(7).to_string()).await.status, 202);
        assert_eq!(asked_of(&upstream).await["params"]["requestId"], 7, "another session's request of that id");
        assert_eq!(post(&client, &gates[0].url, &headers, cancel(7).to_string()).await.status, 202);
        assert_eq!(asked_of(&upstream).await["params"]["requestId"], ours);
    };
    let (got, ()) = futures_util::future::join(paid, withdrawn).await;
    assert!(got.text().contains("cancelled") && !got.text().contains("success\":true"), "{}", got.text());
    assert_eq!(scene.balances().1, 100_000);
}

/// The next message that arrives there.
async fn asked_of(upstream: &Upstream) -> Value {
    for _ in 0..1_000 {
        if let Some(seen) = upstream.seen().pop() {
            return serde_json::from_slice(&seen.body).unwrap();
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("nothing arrived")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_child_writes_about_something_that_is_not_paid_yet_waits_for_the_settlement() {
    let scene = scene().await;
    let (_facilitator, settles) = facilitator(&scene).await;
    let upstream = Upstream::start().await;
    let mut with = file(&scene, &upstream, &settles);
    with["gate"]["upstream"] = json!({"command": ["node", super::script("child.mjs")]});
    let gate = GateProcess::start(&with).await;
    let client = client();
    let got = post(&client, &gate.url, &[], initialize("2025-11-25")).await;
    let token = got.header("mcp-session-id").to_owned();
    let headers = [("mcp-session-id", token.as_str()), ("mcp-protocol-version", "2025-11-25")];
    let mut listen = http::Request::get(&gate.url).header("accept", "text/event-stream");
    for (name, value) in headers {
        listen = listen.header(name, value);
    }
    let limits = tollway::http::Limits { timeout: super::PATIENCE, max_response_bytes: 1 << 20 };
    let mut general = client.stream(listen.body(bytes::Bytes::new()).unwrap(), limits).await.unwrap();
    let call = |id: u64, name: &str, meta: Value| request(id, "tools/call", &json!({"name": name, "_meta": meta}));
    let challenge = post(&client, &gate.url, &headers, call(3, "research", json!({}))).await.json();
    let offer = challenge["result"]["structuredContent"]["accepts"][0].clone();
    let output = scene.node("client.mjs", &[&scene.rpc_tls], ("PAYER_SECRET", &scene.payer), &offer).await;
    let payment: Value = serde_json::from_slice(&output.stdout).unwrap();
    let meta = json!({"x402/payment": payment, "progressToken": "p"});
    // A free call with the same id and the same token is open all the time.
    let paid = post(&client, &gate.url, &headers, call(4, "research", meta));
    let free = post(&client, &gate.url, &headers, call(4, "later", json!({"progressToken": "p"})));
    let (paid, free) = futures_util::future::join(paid, free).await;
    assert!(paid.text().contains("buzz") && paid.text().contains("secret log"), "{}", paid.text());
    assert!(!free.text().contains("buzz") && !free.text().contains("secret"), "{}", free.text());
    assert!(!paid.text().contains("signature"), "{}", paid.text());
    post(&client, &gate.url, &headers, call(5, "log", json!({}))).await;
    let mut heard = String::new();
    while !heard.contains("free log") {
        heard.push_str(std::str::from_utf8(&general.chunk().await.unwrap().unwrap()).unwrap());
    }
    assert!(!heard.contains("secret"), "{heard}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_clients_buy_a_tool_a_resource_and_a_prompt_in_both_bindings() {
    let scene = scene().await;
    let (_facilitator, settles) = facilitator(&scene).await;
    let upstream = Upstream::start().await;
    upstream.always(server);
    let gate = GateProcess::start(&file(&scene, &upstream, &settles)).await;
    let mut earned = 0;
    for era in ["legacy", "modern"] {
        let args = [gate.url.as_str(), &scene.rpc_tls, era];
        let output = scene.node("gate-client.mjs", &args, ("PAYER_SECRET", &scene.payer), &Value::Null).await;
        let text = String::from_utf8(output.stdout).unwrap();
        let log = gate.log.lock().unwrap().clone();
        assert!(output.status.success(), "{era}: {text}\n{}\n{log:#?}", String::from_utf8_lossy(&output.stderr));
        let bought: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(bought.len(), 3, "{text}");
        for ((bought, kind), price) in bought.iter().zip(["tool", "resource", "prompt"]).zip([100_000, 20_000, 50_000])
        {
            assert_eq!(bought["kind"], kind);
            earned += price;
            let challenge = &bought["challenge"];
            assert_eq!(challenge["accepts"][0]["amount"], price.to_string(), "{challenge}");
            let url = match kind {
                "tool" => "mcp://tool/research",
                "resource" => "docs://42",
                _ => "mcp://prompt/brief",
            };
            assert_eq!(challenge["resource"]["url"], url);
            assert_eq!(bought["listed"]["x402/price"]["amount"], "0.01");
            let result = &bought["result"];
            let receipt = &result["_meta"]["x402/payment-response"];
            assert_eq!(
                (&receipt["success"], &receipt["payer"]),
                (&json!(true), &json!(scene.payer.address())),
                "{result}"
            );
            let output = match kind {
                "tool" => &result["structuredContent"]["report"],
                "resource" => &result["contents"][0]["text"],
                _ => &result["messages"][0]["content"]["text"],
            };
            assert!(output.is_string(), "{result}");
            if era == "modern" && kind == "resource" {
                assert_eq!(result["cacheScope"], "private", "a paid answer is never shared");
            }
            assert_eq!(bought["again"], *result, "the same payment again is the same answer");
        }
        assert_eq!(scene.balances().1, earned, "one settlement for each");
    }
    let transfers = scene.network.transfers().len();
    assert_eq!(transfers, 6);
    let calls = upstream.seen();
    let paid = ["tools/call", "resources/read", "prompts/get"];
    let runs = calls.iter().filter(|seen| {
        let message: Value = serde_json::from_slice(&seen.body).unwrap_or_default();
        paid.contains(&message["method"].as_str().unwrap_or_default())
    });
    assert_eq!(runs.count(), 6, "nothing ran unpaid, and nothing twice");
}
