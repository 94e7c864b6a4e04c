//! The transport of 2024-11-05 on one replica.

use std::time::Duration;

use http::StatusCode;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tollway::mcp::serve::Bounds;

use super::{ALICE, BOB, Plan, Replica, call, request, ring, soon};

const INITIALIZE: &str =
    r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#;

#[tokio::test]
async fn a_client_of_2024_11_05_works_from_the_endpoint_event_to_delivery() {
    let replica = Replica::of(&ring()).await;
    let mut sse = replica.stream(ALICE).await;
    assert!(sse.endpoint.starts_with("/messages?sessionId="), "{}", sse.endpoint);
    let endpoint = sse.endpoint.clone();
    let post = async |body: &str| {
        let answer = replica.post(ALICE, &endpoint, body).await;
        assert_eq!((answer.status, answer.body.as_str()), (StatusCode::ACCEPTED, ""), "{body}");
    };
    post(&request("0", "initialize", INITIALIZE)).await;
    let initialized = sse.until("\n\n").await;
    assert!(initialized.contains("event: message\ndata: {"), "{initialized}");
    assert!(initialized.contains(r#""protocolVersion":"2024-11-05""#), "{initialized}");
    post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).await;
    post(r#"{"jsonrpc":"2.0","id":9,"result":{}}"#).await;
    post(&request("\"x\"", "ping", "{}")).await;
    assert!(sse.until(r#""id":"x","result":{}}"#).await.contains("data: "));
    post(&call(1, "who")).await;
    let who = sse.until("}]}}").await;
    assert!(who.contains("alice") && who.contains("2024-11-05 sse-"), "{who}");
    replica.fixture.until("delivered tools/call").await;
    post(&request("2", "tools/call", r#"{"name":"progress","_meta":{"progressToken":7}}"#)).await;
    let progress = sse.until("progressed").await;
    assert_eq!(progress.matches("notifications/progress").count(), 2, "{progress}");
    assert!(!progress.contains("half"), "2024-11-05 has no message: {progress}");
    post(&call(3, "multiline")).await;
    assert!(sse.until(r#""id":3"#).await.contains("data: "));
    post(&request("4", "server/discover", "{}")).await;
    assert!(sse.until(r#""id":4"#).await.contains("-32601"));
    post(&call(5, "panic")).await;
    assert!(sse.until(r#""id":5"#).await.contains("Internal error (fault"));
    // A call that was cancelled is not answered; the next answer is another's.
    post(&call(6, "stubborn")).await;
    replica.fixture.until("called stubborn").await;
    post(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":6}}"#).await;
    replica.fixture.until("cancelled stubborn").await;
    replica.fixture.release.notify_one();
    replica.fixture.until("ended stubborn").await;
    post(&call(7, "echo")).await;
    assert!(!sse.until(r#""id":7"#).await.contains(r#""id":6"#));
}

#[tokio::test]
async fn what_is_wrong_is_answered_at_once_and_in_the_words_of_the_other_transport() {
    let replica = Replica::of(&ring()).await;
    let sse = replica.stream(ALICE).await;
    let endpoint = sse.endpoint.as_str();
    let ping = request("1", "ping", "{}");
    let auth = ("authorization", format!("Bearer {ALICE}"));
    let json = ("content-type", "application/json".to_owned());
    let version = |version: &str| ("mcp-protocol-version", version.to_owned());
    let both = format!("{endpoint}&{}", endpoint.split('?').nth(1).unwrap());
    let declared = request("1", "tools/list", r#"{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}"#);
    let large = format!(r#"{{"jsonrpc":"2.0","method":"{}"}}"#, "x".repeat(2 << 20));
    let here = [auth.clone(), json.clone()];
    for (method, path, headers, body, status, word) in [
        ("POST", endpoint, &here[..], "{", 400, "-32700"),
        ("POST", endpoint, &here, "[]", 400, "-32600"),
        ("POST", endpoint, &here, &format!("[{ping}]"), 400, "batches"),
        ("POST", endpoint, &here, r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, 400, "-32600"),
        ("POST", endpoint, &here, &declared, 400, "2024-11-05"),
        ("POST", endpoint, &here, &large, 413, "larger"),
        ("POST", endpoint, &here[1..], &ping, 401, "bearer"),
        ("POST", endpoint, &[auth.clone(), ("content-type", "text/plain".into())], &ping, 415, "application/json"),
        ("POST", endpoint, &[auth.clone(), ("content-encoding", "gzip".into())], &ping, 415, "Content-Encoding"),
        ("POST", endpoint, &[auth.clone(), ("origin", "https://evil.example".into())], &ping, 403, "allowed_origins"),
        ("POST", endpoint, &[auth.clone(), version("2025-06-18")], &ping, 400, "2024-11-05"),
        ("POST", endpoint, &[auth.clone(), version("2024-11-05"), version("2024-11-05")], &ping, 400, "twice"),
        ("POST", "/messages", &here, &ping, 400, "sessionId"),
        ("POST", "/messages?session=x", &here, &ping, 400, "sessionId"),
        ("POST", &both, &here, &ping, 400, "twice"),
        ("POST", "/messages?sessionId=", &here, &ping, 404, "not found"),
        ("POST", "/messages?sessionId=forged", &here, &ping, 404, "not found"),
        ("GET", endpoint, &here, "", 405, "POST"),
        ("POST", "/sse", &here, &ping, 405, "GET"),
        ("DELETE", "/sse", &here, "", 405, "GET"),
        ("GET", "/sse", &[], "", 401, "bearer"),
        ("GET", "/sse", &[auth.clone(), ("origin", "https://evil.example".into())], "", 403, "allowed_origins"),
        ("GET", "/sse", &[auth.clone(), ("accept", "text/html".into())], "", 406, "event-stream"),
        ("POST", "/relay", &here, &ping, 404, ""),
    ] {
        let answer = replica.send(method, path, headers, body).await;
        assert_eq!(answer.status, status, "{method} {path} {body:.80} {answer:?}");
        assert!(answer.body.contains(word), "{method} {path} {body:.80} {answer:?}");
    }
    let fine = [auth, json, version("2024-11-05")];
    assert_eq!(replica.send("POST", endpoint, &fine, &ping).await.status, 202);
}

#[tokio::test]
async fn a_session_belongs_to_one_agent_and_one_transport() {
    let replica = Replica::of(&ring()).await;
    let sse = replica.stream(ALICE).await;
    let ping = request("1", "ping", "{}");
    assert_eq!(replica.post(BOB, &sse.endpoint, &ping).await.status, 404);
    let token = sse.endpoint.split('=').nth(1).unwrap();
    let streamable = [
        ("authorization", format!("Bearer {ALICE}")),
        ("content-type", "application/json".into()),
        ("mcp-session-id", token.to_owned()),
    ];
    assert_eq!(replica.send("POST", "/mcp", &streamable, &ping).await.status, 404);
    let initialized = replica.send("POST", "/mcp", &streamable[..2], &request("0", "initialize", INITIALIZE)).await;
    let session = initialized.headers["mcp-session-id"].to_str().unwrap();
    assert_eq!(replica.post(ALICE, &format!("/messages?sessionId={session}"), &ping).await.status, 404);
    let changed = format!("{}{}", &sse.endpoint[..sse.endpoint.len() - 2], "AA");
    assert_eq!(replica.post(ALICE, &changed, &ping).await.status, 404);
    let other = Replica::of(&ring()).await;
    assert_eq!(other.post(ALICE, &sse.endpoint, &ping).await.status, 404, "another service's key ring");
}

#[tokio::test]
async fn a_call_outlives_every_idle_limit() {
    let mut plan = Plan::new(&ring());
    plan.bounds = Bounds { idle: Duration::from_millis(100), head: Duration::from_millis(100), ..Bounds::default() };
    plan.settings = |settings| settings.keep_alive = Duration::from_millis(50);
    let replica = Replica::start(plan).await;
    let mut sse = replica.stream(ALICE).await;
    assert_eq!(replica.post(ALICE, &sse.endpoint.clone(), &call(1, "wait")).await.status, 202);
    replica.fixture.until("called wait").await;
    for _ in 0..10 {
        sse.until(": keep-alive\n\n").await;
    }
    replica.fixture.release.notify_one();
    sse.until("waited").await;
    replica.fixture.until("delivered tools/call").await;
}

#[tokio::test]
async fn a_client_that_goes_withdraws_its_calls_and_leaves_nothing_behind() {
    let mut plan = Plan::new(&ring());
    plan.legacy = |legacy| legacy.streams_per_agent = 2;
    let replica = Replica::start(plan).await;
    let (sse, _other) = (replica.stream(ALICE).await, replica.stream(ALICE).await);
    let auth = [("authorization", format!("Bearer {ALICE}"))];
    let third = replica.send("GET", "/sse", &auth, "").await;
    assert!(third.status == 503 && third.headers.contains_key("retry-after"), "{third:?}");
    let _bobs = replica.stream(BOB).await;
    assert_eq!(replica.post(ALICE, &sse.endpoint, &call(1, "stubborn")).await.status, 202);
    replica.fixture.until("called stubborn").await;
    let endpoint = sse.endpoint.clone();
    drop(sse);
    replica.fixture.until("cancelled stubborn").await;
    let late = replica.post(ALICE, &endpoint, &request("2", "ping", "{}")).await;
    assert!(late.status == 404 && late.body.contains("Session not found"), "{late:?}");
    let mut again = replica.stream(ALICE).await;
    replica.fixture.release.notify_one();
    replica.fixture.until("ended stubborn").await;
    assert_eq!(replica.post(ALICE, &again.endpoint.clone(), &call(3, "echo")).await.status, 202);
    again.until(r#""id":3"#).await;
    replica.fixture.until("delivered tools/call").await;
    let delivered = replica.fixture.log().iter().filter(|line| *line == "delivered tools/call").count();
    assert_eq!(delivered, 1, "nobody got the answer of the call that was withdrawn");
}

#[tokio::test]
async fn at_the_shutdown_calls_are_answered_before_the_stream_ends_with_a_hint() {
    let replica = Replica::of(&ring()).await;
    let (mut busy, mut idle) = (replica.stream(ALICE).await, replica.stream(BOB).await);
    assert_eq!(replica.post(ALICE, &busy.endpoint.clone(), &call(1, "wait")).await.status, 202);
    replica.fixture.until("called wait").await;
    replica.shutdown.cancel();
    assert!(idle.rest().await.contains("retry: 3000\n\n"));
    replica.fixture.release.notify_one();
    let rest = busy.rest().await;
    let (answer, hint) = (rest.find("waited").expect(&rest), rest.find("retry: 3000").expect(&rest));
    assert!(answer < hint, "{rest}");
    replica.fixture.until("delivered tools/call").await;
}

#[tokio::test]
async fn a_call_that_outlasts_the_drain_does_not_keep_the_stream() {
    let mut plan = Plan::new(&ring());
    plan.settings = |settings| settings.drain = Duration::from_millis(50);
    let replica = Replica::start(plan).await;
    let mut sse = replica.stream(ALICE).await;
    assert_eq!(replica.post(ALICE, &sse.endpoint.clone(), &call(1, "stubborn")).await.status, 202);
    replica.fixture.until("called stubborn").await;
    replica.shutdown.cancel();
    assert!(sse.rest().await.contains("retry: 3000"));
    replica.fixture.until("cancelled stubborn").await;
    replica.fixture.release.notify_one();
    replica.fixture.until("ended stubborn").await;
}

#[tokio::test]
async fn a_stream_ends_with_its_token() {
    let mut plan = Plan::new(&ring());
    plan.settings = |settings| settings.session_lifetime = Duration::from_millis(300);
    let replica = Replica::start(plan).await;
    let mut sse = replica.stream(ALICE).await;
    let endpoint = sse.endpoint.clone();
    assert!(sse.rest().await.contains("retry: 3000"));
    assert_eq!(replica.post(ALICE, &endpoint, &request("1", "ping", "{}")).await.status, 404);
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_its_stream_and_never_has_many_calls() {
    let mut plan = Plan::new(&ring());
    plan.legacy = |legacy| legacy.patience = Duration::from_millis(100);
    let replica = Replica::start(plan).await;
    let sse = replica.stream(ALICE).await;
    let filler = "x".repeat(500_000);
    let echo = request("1", "tools/call", &format!(r#"{{"name":"echo","arguments":{{"x":"{filler}"}}}}"#));
    soon(|| async { replica.post(ALICE, &sse.endpoint, &echo).await.status == 404 }).await;

    let mut plan = Plan::new(&ring());
    plan.settings = |settings| settings.max_concurrent_requests = 500;
    let replica = Replica::start(plan).await;
    let sse = replica.stream(ALICE).await;
    let mut taken = 0;
    let refused = loop {
        let answer = replica.post(ALICE, &sse.endpoint, &call(taken, "wait")).await;
        if answer.status != 202 {
            break answer;
        }
        taken += 1;
        assert!(taken < 100, "one stream has any number of calls");
    };
    assert!(refused.status == 503 && refused.headers.contains_key("retry-after"), "{refused:?}");
}

#[tokio::test]
async fn everybody_may_open_streams_where_everybody_may_ask_but_not_any_number() {
    let mut plan = Plan::new(&ring());
    plan.public = true;
    plan.settings = |settings| settings.max_streams = 3;
    let replica = Replica::start(plan).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut connection = TcpStream::connect(replica.addr).await.unwrap();
        connection.write_all(b"GET /sse HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut sse = super::Sse { connection, got: String::new(), endpoint: String::new() };
        assert!(sse.until("event: endpoint").await.contains("200 OK"));
        open.push(sse);
    }
    assert_eq!(replica.send("GET", "/sse", &[], "").await.status, 503);
    open.pop();
    soon(|| async {
        let mut connection = TcpStream::connect(replica.addr).await.unwrap();
        connection.write_all(b"GET /sse HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut sse = super::Sse { connection, got: String::new(), endpoint: String::new() };
        sse.until("\r\n\r\n").await.contains("200 OK")
    })
    .await;
}
