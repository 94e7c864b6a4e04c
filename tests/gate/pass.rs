//! What has no price passes: every message byte for byte in both directions and in every revision, streams as they
//! come, sessions over several gates, and no header that is none of the upstream's business.

use axum::body::Body;
use bytes::Bytes;
use http::Method;
use serde_json::json;
use tollway::mcp::Revision;
use tollway::mcp::headers::encode;

use super::generate::Rng;
use super::{
    BOTH, GateProcess, Got, JSON, PATIENCE, Says, Upstream, client, command, config, initialize, post, request, send,
};

async fn before(upstream: &Upstream) -> GateProcess {
    GateProcess::start(&config(&json!({"url": upstream.url}))).await
}

async fn session(gate: &GateProcess, upstream: &Upstream, id: Option<&str>) -> String {
    let mut says = Says::json(r#"{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25"}}"#);
    if let Some(id) = id {
        says = says.with("mcp-session-id", id);
    }
    upstream.says(says);
    let got = post(&client(), &gate.url, &[], initialize("2025-11-25")).await;
    assert_eq!(got.status, 200, "{}", got.text());
    upstream.seen();
    got.header("mcp-session-id").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_messages_pass_byte_for_byte_both_ways_in_every_revision() {
    let upstream = Upstream::start().await;
    let gate = before(&upstream).await;
    let client = client();
    let mut streams = 0;
    for n in 0..1_000u64 {
        let mut rng = Rng::new(n);
        let revision = Revision::ALL[usize::try_from(n % 5).unwrap()];
        let version = revision.as_str().to_owned();
        let id = if rng.below(2) == 0 { rng.string() } else { format!("{}", rng.below(1 << 60)) };
        let (method, name) = match rng.below(4) {
            0 => ("tools/call".to_owned(), Some(("name", format!("free{n}\u{e9}")))),
            1 => ("resources/read".to_owned(), Some(("uri", format!("file:///free/{n}")))),
            2 => ("completion/complete".to_owned(), None),
            _ => (format!("vendor.example/{n}"), None),
        };
        let mut params = vec![("\"arguments\"".to_owned(), format!("{{\"a\":{}}}", rng.value(4)))];
        if let Some((member, name)) = &name {
            params.push((format!("\"{member}\""), serde_json::to_string(name).unwrap()));
        }
        if revision.stateless() {
            let meta = format!(
                r#"{{"x":{},"io.modelcontextprotocol/protocolVersion" : "{version}","io.modelcontextprotocol/clientCapabilities":{{}}}}"#,
                rng.value(2)
            );
            params.push(("\"_meta\"".into(), meta));
        }
        let params = rng.object(params);
        let method_text = serde_json::to_string(&method).unwrap();
        let kind = rng.below(4);
        let sent = match kind {
            0 if name.is_none() => rng.message(&[("method", method_text), ("params", params)]),
            1 => {
                let result = rng.value(4);
                rng.message(&[("id", id.clone()), ("result", format!("{{\"r\":{result}}}"))])
            }
            _ => rng.message(&[("id", id.clone()), ("method", method_text), ("params", params)]),
        };
        let is_request = kind > 1 || (kind == 0 && name.is_some());
        let (encoded, method_header) = (name.as_ref().map(|(_, name)| encode(name)), method.clone());
        let mut headers = vec![("mcp-protocol-version", version.as_str())];
        if revision.stateless() && kind != 1 {
            headers.push(("mcp-method", &method_header));
            if let Some(encoded) = &encoded {
                headers.push(("mcp-name", encoded));
            }
        }
        let value = rng.value(5);
        let answer = rng.message(&[("id", id), ("result", format!("{{\"content\":{value}}}"))]);
        let (says, expected) = match rng.below(3) {
            _ if !is_request => (Says::empty(202), String::new()),
            0 => {
                streams += 1;
                let beside = rng.message(&[("method", "\"notifications/message\"".into()), ("params", "{}".into())]);
                let line = |text: &str| text.replace(['\r', '\n'], " ");
                let text = format!(
                    ": hello\r\n\r\nevent: message\r\ndata: {}\r\n\r\nretry: 7\ndata:{}\n\n",
                    line(&beside),
                    line(&answer)
                );
                (Says::events(Bytes::from(text.clone())), text)
            }
            _ => (Says::json(answer.clone()), answer),
        };
        upstream.says(says);
        let got = post(&client, &gate.url, &headers, sent.clone()).await;
        assert_eq!(got.text(), expected, "what came back of message {n} ({version}): {sent}");
        let seen = upstream.last();
        assert_eq!(seen.body, sent.as_bytes(), "what arrived of message {n} ({version})");
        assert_eq!(seen.headers.get("mcp-protocol-version").unwrap(), version.as_str());
    }
    assert!(streams > 100, "{streams}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_ours_and_works_at_every_gate_with_the_same_keys() {
    let upstream = Upstream::start().await;
    let gates = [before(&upstream).await, before(&upstream).await];
    let client = client();
    for theirs in [Some("7"), None] {
        let token = session(&gates[0], &upstream, theirs).await;
        assert!(token.len() > 40 && Some(token.as_str()) != theirs);
        for gate in &gates {
            let headers = [("mcp-session-id", token.as_str()), ("mcp-protocol-version", "2025-11-25")];
            upstream.says(Says::json(r#"{"jsonrpc":"2.0","id":2,"result":{}}"#).with("mcp-session-id", "7"));
            let got = post(&client, &gate.url, &headers, request(2, "ping", &json!({}))).await;
            assert_eq!((got.status, got.header("mcp-session-id")), (200, ""));
            let seen = upstream.last();
            assert_eq!(seen.headers.get("mcp-session-id").map(|v| v.to_str().unwrap()), theirs);
            upstream.says(Says::empty(204));
            assert_eq!(send(&client, Method::DELETE, &gate.url, &headers, "").await.status, 204);
            let seen = upstream.last();
            assert_eq!(
                (seen.method, seen.headers.get("mcp-session-id").map(|v| v.to_str().unwrap())),
                (Method::DELETE, theirs)
            );
        }
        // The upstream's own id is nobody's here.
        for wrong in ["7", &token[1..]] {
            let headers = [("mcp-session-id", wrong)];
            let got = post(&client, &gates[0].url, &headers, request(3, "ping", &json!({}))).await;
            assert_eq!((got.status, got.json()["id"].as_u64()), (404, Some(3)), "{wrong}");
        }
        assert!(upstream.seen().is_empty());
    }
    // An `initialize` that fails begins none.
    upstream.says(Says::empty(404));
    let got = post(&client, &gates[0].url, &[], initialize("2025-11-25")).await;
    assert_eq!((got.status, got.header("mcp-session-id")), (404, ""));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_come_as_they_are_written_and_are_resumed_by_what_was_shown() {
    let upstream = Upstream::start().await;
    let gate = before(&upstream).await;
    let token = session(&gate, &upstream, Some("s1")).await;
    let client = client();
    let (mut writer, stream) = tokio::sync::mpsc::channel::<Result<Bytes, std::convert::Infallible>>(8);
    upstream.says(Says::events(Body::from_stream(futures(stream))));
    let request = http::Request::get(&gate.url)
        .header("accept", "text/event-stream")
        .header("mcp-session-id", &token)
        .header("last-event-id", "never-shown")
        .body(Bytes::new())
        .unwrap();
    let limits = tollway::http::Limits { timeout: PATIENCE, max_response_bytes: 1 << 20 };
    let mut open = client.stream(request, limits).await.unwrap();
    assert_eq!(open.head.headers["x-accel-buffering"], "no");
    assert!(!upstream.last().headers.contains_key("last-event-id"), "an id that nobody was shown resumes nothing");
    for piece in [": one\n\n", "id: 41\n", "data: {\"a\":1}\n\n", "data: two"] {
        writer = push(writer, piece).await;
    }
    let mut got = String::new();
    while !got.ends_with("two") {
        got.push_str(std::str::from_utf8(&open.chunk().await.unwrap().unwrap()).unwrap());
    }
    let id = got.split("id: ").nth(1).unwrap().split('\n').next().unwrap().to_owned();
    assert_eq!(got, format!(": one\n\nid: {id}\ndata: {{\"a\":1}}\n\ndata: two"));
    assert!(id.starts_with("41.") && id.len() > 10, "{id}");
    drop((writer, open));

    upstream.says(Says::events("data: again\n\n"));
    let headers = [("accept", "text/event-stream"), ("mcp-session-id", &token), ("last-event-id", &id)];
    let got = send(&client, Method::GET, &gate.url, &headers, "").await;
    assert_eq!(got.text(), "data: again\n\n");
    let seen = upstream.last();
    assert_eq!(
        (seen.headers["last-event-id"].to_str().unwrap(), seen.headers["mcp-session-id"].to_str().unwrap()),
        ("41", "s1")
    );
    upstream.says(Says::empty(405));
    assert_eq!(send(&client, Method::GET, &gate.url, &headers[..1], "").await.status, 405);
}

async fn push(
    writer: tokio::sync::mpsc::Sender<Result<Bytes, std::convert::Infallible>>,
    piece: &'static str,
) -> tokio::sync::mpsc::Sender<Result<Bytes, std::convert::Infallible>> {
    writer.send(Ok(Bytes::from_static(piece.as_bytes()))).await.unwrap();
    writer
}

pub fn futures<T>(mut from: tokio::sync::mpsc::Receiver<T>) -> impl futures_util::Stream<Item = T> {
    futures_util::stream::poll_fn(move |cx| from.poll_recv(cx))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_sees_nothing_that_is_not_its_business() {
    let upstream = Upstream::start().await;
    let mut with = config(&json!({"url": upstream.url, "forward_headers": ["X-Tenant"]}));
    with["http"]["allowed_hosts"] = json!(["gate.example"]);
    let gate = GateProcess::start(&with).await;
    let client = client();
    upstream.says(
        Says::json("{}").with("set-cookie", "a=b").with("x-rate", "9").with("connection", "x-hop").with("x-hop", "1"),
    );
    let got = post(
        &client,
        &gate.url,
        &[
            ("authorization", "Bearer secret"),
            ("cookie", "a=b"),
            ("x-forwarded-for", "192.0.2.1"),
            ("x-tenant", "7"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("mcp-session-id", ""),
            ("payment-signature", "x"),
            ("origin", "http://localhost:1"),
        ],
        initialize("2025-11-25"),
    )
    .await;
    assert_eq!((got.status, got.header("x-rate"), got.header("set-cookie"), got.header("x-hop")), (200, "9", "", ""));
    let seen = upstream.last();
    let mut names: Vec<&str> = seen.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "accept",
            "accept-encoding",
            "content-length",
            "content-type",
            "host",
            "traceparent",
            "user-agent",
            "x-tenant"
        ]
    );
    assert_eq!(seen.headers["host"], upstream.url["http://".len()..].split('/').next().unwrap());

    for (headers, status) in [
        (vec![("host", "evil.example")], 403),
        (vec![("host", "gate.example")], 200),
        (vec![("origin", "https://evil.example")], 403),
        (vec![("mcp-protocol-version", "1999-01-01")], 400),
        (vec![("content-encoding", "gzip")], 415),
    ] {
        if status == 200 {
            upstream.says(Says::json("{}"));
        }
        let raw = exchange(&gate.url, &headers, &request(2, "ping", &json!({}))).await;
        assert_eq!(raw, status, "{headers:?}");
    }
    // Express and others decode a body by the charset that its head names: the bytes are what was read here.
    upstream.says(Says::json("{}"));
    let utf7 = [("content-type", "application/json; charset=utf-7"), BOTH];
    let ping = request(3, "ping", &json!({"x": "+ACI-},+ACI-method+ACI-:+ACI-tools/call+ACI-"}));
    let got = super::send(&client, Method::POST, &gate.url, &utf7, ping).await;
    assert_eq!((got.status, upstream.last().headers["content-type"].to_str().unwrap()), (200, "application/json"));
    // It is never left for another place.
    upstream.says(Says::empty(307).with("location", "http://127.0.0.1:1/"));
    let got = post(&client, &gate.url, &[], request(9, "ping", &json!({}))).await;
    assert_eq!((got.status, got.json()["error"]["code"].as_i64()), (502, Some(-32603)));
}

/// With a `Host` of its own.
async fn exchange(url: &str, headers: &[(&str, &str)], body: &str) -> u16 {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let at = url["http://".len()..].split('/').next().unwrap();
    let host = headers.iter().find(|(name, _)| *name == "host").map_or(at, |(_, host)| host);
    let mut head = format!(
        "POST /mcp HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAccept: {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n",
        BOTH.1,
        JSON.1,
        body.len()
    );
    for (name, value) in headers.iter().filter(|(name, _)| *name != "host") {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).await.unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    String::from_utf8_lossy(&all).split(' ').nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_two_readers_could_read_in_two_ways_goes_nowhere() {
    let upstream = Upstream::start().await;
    let gate = before(&upstream).await;
    let client = client();
    let v = "2026-07-28";
    let meta = json!({"io.modelcontextprotocol/protocolVersion": v, "io.modelcontextprotocol/clientCapabilities": {}});
    let call = |name: &str| request(1, "tools/call", &json!({"name": name, "_meta": meta}));
    for (headers, body, status) in [
        (vec![], r#"{"jsonrpc":"2.0","id":null,"method":"tools/call"}"#.to_owned(), 400),
        (
            vec![],
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"free","name":"paid"}}"#.into(),
            400,
        ),
        (vec![], r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":["paid"]}}"#.into(), 200),
        (vec![], r#"{"jsonrpc":"2.0","id":1,"method":"Tools/Call","params":{"name":"paid"}}"#.into(), 200),
        (vec![], r#"{"jsonrpc":"2.0","id":1,"method":"tools/call ","params":{"name":"paid"}}"#.into(), 200),
        (vec![], r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"paid"}}"#.into(), 400),
        (vec![], r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"paid"}}]"#.into(), 400),
        (vec![("mcp-protocol-version", "2025-06-18")], r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#.into(), 400),
        (vec![("mcp-method", "tools/call"), ("mcp-name", "free")], call("paid"), 400),
        (vec![("mcp-protocol-version", v), ("mcp-method", "tools/call"), ("mcp-name", "free")], call("paid"), 400),
        (vec![("mcp-protocol-version", v), ("mcp-method", "tools/list"), ("mcp-name", "free")], call("free"), 400),
        (vec![("mcp-protocol-version", "2025-11-25")], call("free"), 400),
        (vec![("mcp-method", "tools/call"), ("mcp-name", "free")], call("free"), 400),
    ] {
        let got = post(&client, &gate.url, &headers, body.clone()).await;
        assert_eq!(got.status, status, "{headers:?} {body}: {}", got.text());
        assert!(got.json()["error"]["code"].is_i64(), "{body}: {}", got.text());
    }
    assert!(upstream.seen().is_empty());
    upstream.says(Says::json("[]"));
    let batch = r#"[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","method":"notifications/x"}]"#;
    assert_eq!(post(&client, &gate.url, &[], batch).await.text(), "[]");
    assert_eq!(upstream.last().body, batch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_come_back_with_prices_and_all_else_in_them_as_it_was() {
    let upstream = Upstream::start().await;
    let gate = before(&upstream).await;
    let client = client();
    let free = r#"{ "name":"free", "big":100000000000000000000000001 ,"z":1.0 }"#;
    let list =
        |paid: &str| format!(r#" {{"result": {{"tools":[{free},{paid}],"x":[ ]}},"jsonrpc":"2.0", "id":"\u0061"}}"#);
    let asked = r#"{"jsonrpc":"2.0","id":"a","method":"tools/list"}"#;
    for stream in [false, true] {
        let text = list(r#"{"name":"paid","inputSchema":{}}"#);
        upstream.says(match stream {
            false => Says::json(text.clone()),
            true => Says::events(format!("event: message\nid: 3\ndata: {}\n\n", text.trim_start())),
        });
        let got = post(&client, &gate.url, &[], asked).await;
        assert!(got.text().contains(free), "{}", got.text());
        let tools = got.json()["result"]["tools"].clone();
        let price = json!({"amount": "0.01", "asset": "USDC", "network": "stellar:testnet", "payTo": super::PAY_TO});
        assert_eq!(tools[1]["_meta"]["x402/price"], price);
        assert_eq!(tools[1]["_meta"]["x402/accepts"][0]["amount"], "100000");
        assert_eq!(
            (got.header("cache-control"), got.text().starts_with("event: message\nid: 3.")),
            ("no-store", stream)
        );
    }
    let plain = list(r#"{"name":"other"}"#);
    upstream.says(Says::json(plain.clone()));
    assert_eq!(post(&client, &gate.url, &[], asked).await.text(), plain, "nothing in it has a price");
    let discover = r#"{"jsonrpc":"2.0","id":1,"result":{"capabilities":{"tools":{}},"n":1.0}}"#;
    upstream.says(Says::json(discover));
    let headers = [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "server/discover")];
    let got = post(&client, &gate.url, &headers, request(1, "server/discover", &json!({}))).await;
    assert_eq!(got.text(), discover.replace(r#""tools":{}"#, r#""tools":{},"extensions":{"org.x402/payment":{}}"#));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_price_counts_without_a_restart() {
    let upstream = Upstream::start().await;
    upstream.always(|_| Says::json(r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"paid"}]}}"#));
    let mut with = config(&json!({"url": upstream.url}));
    with["reload"] = json!({"interval_ms": 100});
    let gate = GateProcess::start(&with).await;
    let price = async || {
        let got = post(&client(), &gate.url, &[], request(1, "tools/list", &json!({}))).await;
        got.json()["result"]["tools"][0]["_meta"]["x402/price"]["amount"].as_str().map(ToOwned::to_owned)
    };
    assert_eq!(price().await.as_deref(), Some("0.01"));
    let until = async |wanted: &str| {
        let found = async { while price().await.as_deref() != Some(wanted) {} };
        tokio::time::timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("the price is not {wanted}"));
    };
    gate.rewrite(|with| with["gate"]["tools"]["paid"]["price"] = json!("0.02"));
    until("0.02").await;
    gate.rewrite(|with| with["gate"]["tools"]["paid"]["price"] = json!("-1"));
    let refused = async {
        while !gate.logged("the prices stay") {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("a broken file is not said");
    assert_eq!(price().await.as_deref(), Some("0.02"));
}

async fn get(url: String) -> Got {
    send(&client(), Method::GET, &url, &[], "").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gate_says_how_it_is_and_ends_in_order() {
    let upstream = Upstream::start().await;
    let mut with = config(&json!({"url": upstream.url}));
    with["http"]["unready_wait_ms"] = json!(300);
    let mut gate = GateProcess::start(&with).await;
    let probe = gate.probe();
    for path in ["/livez", "/readyz"] {
        assert_eq!(get(format!("{probe}{path}")).await.status, 200, "{path}");
    }
    assert_eq!(get(gate.url.replace("/mcp", "/healthz")).await.json(), json!({"status": "ready"}));
    assert!(get(format!("{probe}/metrics")).await.text().contains("tollway_ready 1"));
    // A call that is under way is answered although the process is to end.
    let (writer, stream) = tokio::sync::mpsc::channel::<Result<Bytes, std::convert::Infallible>>(1);
    upstream.says(Says::json("").with("x", "y"));
    upstream.seen();
    let url = gate.url.clone();
    upstream.told.next.lock().unwrap().clear();
    upstream.says(Says { body: Body::from_stream(futures(stream)), ..Says::json("") });
    let call = tokio::spawn(async move { post(&client(), &url, &[], request(1, "ping", &json!({}))).await });
    while upstream.told.seen.lock().unwrap().is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    gate.signal("-TERM");
    loop {
        let ready = get(format!("{probe}/readyz")).await;
        if ready.status == 503 {
            assert_eq!(ready.json()["reason"], "draining");
            break;
        }
    }
    push(writer, "{\"late\":1}").await;
    assert_eq!(call.await.unwrap().text(), "{\"late\":1}");
    assert_eq!(tokio::time::timeout(PATIENCE, gate.child.wait()).await.unwrap().unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_file_that_cannot_be_meant_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gate.yaml");
    let refused = async |change: &dyn Fn(&mut serde_json::Value), env: bool| {
        let mut with = config(&json!({"url": "http://127.0.0.1:9/mcp"}));
        with["budget"] = json!({"path": dir.path().join("claims.sqlite")});
        change(&mut with);
        std::fs::write(&file, with.to_string()).unwrap();
        let mut command = command(&["gate", "--config", file.to_str().unwrap(), "--check"]);
        if !env {
            command.env_remove("TOLLWAY_KEY_RING");
        }
        let output = command.output().await.unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = refused(&|_| {}, true).await;
    assert!(code == Some(0) && text.contains("tool:paid") && text.contains("0.01 USDC"), "{text}");
    for (change, env, field) in [
        (&(|_: &mut serde_json::Value| {}) as &dyn Fn(&mut serde_json::Value), false, "TOLLWAY_KEY_RING"),
        (&|with| with["keys"] = json!({}), true, "keys.ring_env"),
        (&|with| with["gate"]["unknown"] = json!({}), true, "networks.stellar:testnet.rpc_urls"),
        (&|with| with["gate"]["upstream"] = json!(null), true, "gate.upstream"),
        (&|with| with["gate"]["default"] = json!(null), true, "gate.default"),
        (&|with| with["gate"]["tools"]["paid"]["flow"] = json!("escrow"), true, "gate.tools.paid.flow"),
        (&|with| with["gate"]["tools"]["paid"]["price"] = json!("0,01"), true, "gate.tools.paid.price"),
    ] {
        let (code, text) = refused(change, env).await;
        assert!(code == Some(2) && text.contains(field), "{field}: {text}");
    }
}

#[tokio::test]
async fn requests_are_counted_for_whom_a_trusted_proxy_names_and_nobody_else_names_anybody() {
    let upstream = Upstream::start().await;
    upstream.always(|_| Says::json(r#"{"jsonrpc":"2.0","id":2,"result":{}}"#));
    for (proxies, other) in [(json!(["127.0.0.0/8"]), 200), (json!([]), 429)] {
        let mut with = config(&json!({"url": upstream.url}));
        with["http"]["rate_limit"] = json!({"requests_per_second": 1, "burst": 3});
        with["http"]["trusted_proxies"] = proxies.clone();
        let gate = GateProcess::start(&with).await;
        let client = client();
        let ask = async |from: &str| {
            let headers = [("x-forwarded-for", from), ("mcp-protocol-version", "2025-11-25")];
            post(&client, &gate.url, &headers, request(2, "tools/call", &json!({"name": "free"}))).await.status
        };
        let mut asked = 0;
        while ask(if asked % 2 == 0 { "203.0.113.1" } else { "198.51.100.9, 203.0.113.1" }).await == 200 {
            asked += 1;
            assert!(asked < 100, "{proxies}: no limit");
        }
        assert!(asked >= 3);
        assert_eq!(ask("203.0.113.2").await, other, "{proxies}");
    }
}
