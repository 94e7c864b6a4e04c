//! Streamable HTTP, through `serve`, over TCP.
#![allow(clippy::disallowed_methods, reason = "the client here is the outside world")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tollway::mcp::serve::{Bounds, serve, serve_within};
use tollway::mcp::{Authenticator, Settings, StaticKeys, router};
use tollway::ports::machine::TcpListener;

use super::{Fixture, PATIENCE, fixture, request, settings, stateless};

const ALICE: &str = "alice-alice-alice-alice-alice-alice";
const BOB: &str = "bob-bob-bob-bob-bob-bob-bob-bob-bob";
const BOTH: &str = "application/json, text/event-stream";

struct Server {
    addr: SocketAddr,
    fixture: Arc<Fixture>,
    shutdown: CancellationToken,
}

async fn start(settings: Settings, authenticator: Authenticator) -> Server {
    start_before(fixture(), settings, authenticator).await
}

async fn start_before(fixture: Arc<Fixture>, settings: Settings, authenticator: Authenticator) -> Server {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let shutdown = settings.shutdown.clone();
    let world = settings.world.clone();
    let app = router(settings, fixture.clone(), authenticator);
    world.spawn.clone().spawn(Box::pin(serve(TcpListener(listener), world, app, shutdown.clone())));
    Server { addr, fixture, shutdown }
}

async fn public() -> Server {
    start(settings(), Authenticator::Public).await
}

/// One answer as it came.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let fits = |line: &&str| line.split(':').next().is_some_and(|n| n.eq_ignore_ascii_case(name));
        self.head.lines().find(fits).and_then(|line| line.split_once(':')).map(|(_, value)| value.trim())
    }
}

/// The chunks of a chunked body joined, the rest as it is.
fn unchunk(head: &str, body: &str) -> String {
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return body.to_owned();
    }
    let (mut rest, mut out) = (body, String::new());
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 || tail.len() < size {
            break;
        }
        out.push_str(&tail[..size]);
        rest = tail[size..].trim_start_matches("\r\n");
    }
    out
}

impl Server {
    /// A request with exactly these headers, `Connection: close` and a length added.
    async fn open(&self, method: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut text = format!("{method} /mcp HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("\r\n");
        text.push_str(body);
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    async fn raw(&self, method: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = self.open(method, headers, body).await;
        let mut text = Vec::new();
        timeout(PATIENCE, stream.read_to_end(&mut text)).await.unwrap().unwrap();
        let text = String::from_utf8(text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_owned(), body: unchunk(head, body) }
    }

    async fn post(&self, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut all = vec![("Host", "localhost"), ("Content-Type", "application/json"), ("Accept", BOTH)];
        all.retain(|(name, _)| !headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)));
        all.extend_from_slice(headers);
        self.raw("POST", &all, body).await
    }

    /// The session token of an `initialize` for this revision.
    async fn initialize(&self, revision: &str, headers: &[(&str, &str)]) -> (Answer, String) {
        let params = format!(
            r#"{{"protocolVersion":"{revision}","capabilities":{{}},"clientInfo":{{"name":"t","version":"1"}}}}"#
        );
        let answer = self.post(headers, &request("0", "initialize", &params)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let token = answer.header("mcp-session-id").unwrap().to_owned();
        (answer, token)
    }

    /// A `tools/call` of 2026-07-28.
    async fn call(&self, tool: &str, headers: &[(&str, &str)]) -> Answer {
        let params = stateless(&format!(r#""name":"{tool}","arguments":{{}},"#));
        let mut all = vec![("MCP-Protocol-Version", "2026-07-28"), ("Mcp-Method", "tools/call"), ("Mcp-Name", tool)];
        all.extend_from_slice(headers);
        self.post(&all, &request("7", "tools/call", &params)).await
    }
}

/// Reads until `what` has come, and gives all that came.
async fn until(stream: &mut TcpStream, what: &str) -> String {
    let mut got = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&got).contains(what) {
            let mut piece = [0; 4096];
            let n = stream.read(&mut piece).await.unwrap();
            assert!(n > 0, "the stream ended without {what:?}: {}", String::from_utf8_lossy(&got));
            got.extend_from_slice(&piece[..n]);
        }
    };
    let _ = timeout(PATIENCE, read).await;
    let got = String::from_utf8(got).unwrap();
    assert!(got.contains(what), "no {what:?} in {got}");
    got
}

#[tokio::test]
async fn revisions_with_a_handshake_work_from_initialize_to_delivery() {
    for revision in ["2025-03-26", "2025-06-18", "2025-11-25"] {
        let server = public().await;
        let (answer, token) = server.initialize(revision, &[]).await;
        assert_eq!(
            answer.body,
            format!(
                r#"{{"jsonrpc":"2.0","id":0,"result":{{"protocolVersion":"{revision}","capabilities":{{"tools":{{}}}},"serverInfo":{{"name":"fixture","version":"1.2.3"}},"instructions":"Ask nicely."}}}}"#
            )
        );
        let session = [("Mcp-Session-Id", token.as_str()), ("MCP-Protocol-Version", revision)];
        let told = server.post(&session, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).await;
        assert_eq!((told.status, told.body.as_str()), (202, ""));
        let answered = server.post(&session, r#"{"jsonrpc":"2.0","id":1,"result":{}}"#).await;
        assert_eq!(answered.status, 202);
        let pong = server.post(&session, r#"{"jsonrpc":"2.0","id":"p","method":"ping"}"#).await;
        assert_eq!((pong.status, pong.body.as_str()), (200, r#"{"jsonrpc":"2.0","id":"p","result":{}}"#));
        let list = server.post(&session, &request("1", "tools/list", "{}")).await;
        assert!(list.body.ends_with(r#""inputSchema":{"type":"object"}}],"x":1.0}}"#), "{}", list.body);
        assert!(!list.body.contains("resultType") && !list.body.contains("ttlMs"), "{}", list.body);
        let echo = r#"{"name":"echo","arguments":{ "n":1.0,"big":100000000000000000000000001 }}"#;
        let echo = server.post(&session, &request(r#""\u0061""#, "tools/call", echo)).await;
        assert_eq!(
            echo.body,
            r#"{"jsonrpc":"2.0","id":"\u0061","result":{"content":[],"structuredContent":{ "n":1.0,"big":100000000000000000000000001 }}}"#
        );
        assert_eq!(echo.header("content-type"), Some("application/json"));
        assert_eq!(echo.header("cache-control"), Some("no-store"));
        server.fixture.until("delivered tools/call").await;
        let unknown = server.post(&session, &request("2", "server/discover", "{}")).await;
        assert_eq!(unknown.status, 400, "a method of 2026-07-28 needs its _meta");
        let missing = server.post(&session, &request("3", "prompts/list", "{}")).await;
        assert!(missing.status == 200 && missing.body.contains("-32601"), "{missing:?}");
    }
}

#[tokio::test]
async fn the_stateless_revision_works_without_handshake_and_session() {
    let server = public().await;
    let headers = |method| [("MCP-Protocol-Version", "2026-07-28"), ("Mcp-Method", method)];
    let discovered = server.post(&headers("server/discover"), &request("1", "server/discover", &stateless(""))).await;
    assert_eq!(discovered.status, 200, "{discovered:?}");
    for part in [
        r#""resultType":"complete""#,
        r#""supportedVersions":["2026-07-28","2025-11-25","2025-06-18","2025-03-26"]"#,
        r#""capabilities":{"tools":{}}"#,
        r#""instructions":"Ask nicely.""#,
        r#""ttlMs":0"#,
        r#""cacheScope":"private""#,
        r#""io.modelcontextprotocol/serverInfo":{"name":"fixture","version":"1.2.3"}"#,
    ] {
        assert!(discovered.body.contains(part), "no {part} in {}", discovered.body);
    }
    assert_eq!(discovered.header("mcp-session-id"), None);
    let list = server.post(&headers("tools/list"), &request("1", "tools/list", &stateless(""))).await;
    assert!(list.body.contains(r#""resultType":"complete","ttlMs":0,"cacheScope":"private""#), "{}", list.body);
    let who = server.call("who", &[("Mcp-Session-Id", "ignored")]).await;
    assert!(who.status == 200 && who.body.contains("None 2026-07-28 -"), "{who:?}");
    server.fixture.until("delivered tools/call").await;
    for gone in ["ping", "logging/setLevel", "initialize", "resources/subscribe", "no/such"] {
        let answer = server.post(&headers(gone), &request("1", gone, &stateless(""))).await;
        assert!(answer.status == 404 && answer.body.contains("-32601"), "{gone}: {answer:?}");
    }
    let capability = server.call("input", &[]).await;
    assert_eq!(capability.status, 400);
    assert!(capability.body.contains(r#""code":-32021"#), "{capability:?}");
    assert!(capability.body.contains(r#""data":{"requiredCapabilities":{"elicitation":{}}}"#), "{capability:?}");
    let absent = server.call("absent", &[]).await;
    assert!(absent.status == 200 && absent.body.contains("-32602") && !absent.body.contains("-32002"), "{absent:?}");
    let told = server.post(&headers("notifications/x"), r#"{"jsonrpc":"2.0","method":"notifications/x"}"#).await;
    assert_eq!(told.status, 202);
    let batch = format!("[{}]", request("1", "tools/list", &stateless("")));
    let batch = server.post(&headers("tools/list"), &batch).await;
    assert!(batch.status == 400 && batch.body.contains("-32600"), "{batch:?}");
    for method in ["GET", "DELETE"] {
        let answer = server.raw(method, &[("Host", "localhost"), ("MCP-Protocol-Version", "2026-07-28")], "").await;
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.header("allow").is_some_and(|allow| allow.contains("POST")));
    }
}

#[tokio::test]
async fn headers_of_the_stateless_revision_must_match_the_body() {
    let server = public().await;
    let body = request("7", "tools/call", &stateless(r#""name":"region","arguments":{"region":"é"},"#));
    let good = [
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", "tools/call"),
        ("Mcp-Name", "=?base64?cmVnaW9u?="),
        ("Mcp-Param-Region", "=?base64?w6k=?="),
    ];
    let answer = server.post(&good, &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    for i in 0..good.len() {
        let without: Vec<_> = good.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, h)| *h).collect();
        let answer = server.post(&without, &body).await;
        assert!(answer.status == 400 && answer.body.contains("-32020"), "without {}: {answer:?}", good[i].0);
        assert!(answer.body.contains(r#""id":7"#));
        let mut other = good;
        other[i].1 = "2025-11-25";
        let answer = server.post(&other, &body).await;
        assert!(answer.status == 400 && answer.body.contains("-32020"), "other {}: {answer:?}", good[i].0);
    }
    // An unknown revision in both places, and _meta that is not complete.
    let body = request("7", "tools/list", &stateless("").replace("2026-07-28", "1900-01-01"));
    let answer = server.post(&[("MCP-Protocol-Version", "1900-01-01"), ("Mcp-Method", "tools/list")], &body).await;
    assert!(answer.status == 400 && answer.body.contains(r#""code":-32022"#), "{answer:?}");
    assert!(answer.body.contains(r#""requested":"1900-01-01""#), "{answer:?}");
    for params in ["{}", r#"{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}"#] {
        let headers = [("MCP-Protocol-Version", "2026-07-28"), ("Mcp-Method", "tools/list")];
        let answer = server.post(&headers, &request("7", "tools/list", params)).await;
        assert!(answer.status == 400 && answer.body.contains("-32602"), "{params}: {answer:?}");
    }
    assert_eq!(server.fixture.log().iter().filter(|line| line.starts_with("called")).count(), 1, "one good call");
}

#[tokio::test]
async fn malformed_messages_are_json_rpc_errors_and_reach_no_handler() {
    let server = start(Settings { max_body_bytes: 2048, ..settings() }, Authenticator::Public).await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let session = [("Mcp-Session-Id", token.as_str())];
    let call = r#""method":"tools/call","params":{"name":"echo"}"#;
    for (body, code, id) in [
        ("{".to_owned(), "-32700", None),
        (format!(r#"{{"jsonrpc":"2.0","id":null,{call}}}"#), "-32600", None),
        (format!(r#"{{"jsonrpc":"2.0","id":1.5,{call}}}"#), "-32600", None),
        (format!(r#"{{"jsonrpc":"2.0","id":9,"Method":"x",{call}}}"#), "-32600", Some(r#""id":9"#)),
        (
            r#"{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"echo","Name":"x"}}"#.into(),
            "-32602",
            Some(r#""id":9"#),
        ),
        (
            r#"{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"echo","name":"x"}}"#.into(),
            "-32600",
            Some(r#""id":9"#),
        ),
        (format!(r#"[{{"jsonrpc":"2.0","id":9,{call}}}]"#), "-32600", None),
        (r#"{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"x"}}"#.into(), "-32600", None),
    ] {
        let answer = server.post(&session, &body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.body.contains(&format!(r#""code":{code}"#)), "{body}: {answer:?}");
        match id {
            Some(id) => assert!(answer.body.contains(id), "{body}: {answer:?}"),
            None => assert!(!answer.body.contains(r#""id""#), "{body}: {answer:?}"),
        }
    }
    let large = request("1", "tools/call", &format!(r#"{{"name":"{}"}}"#, "x".repeat(4096)));
    let answer = server.post(&session, &large).await;
    assert!(answer.status == 413 && answer.body.contains("-32600"), "{answer:?}");
    // A tools/call as a notification is heard and not executed.
    let told = server.post(&session, &format!(r#"{{"jsonrpc":"2.0",{call}}}"#)).await;
    assert_eq!(told.status, 202);
    assert_eq!(server.fixture.log(), Vec::<String>::new());
    for (result, code) in [("panic", "-32603"), ("list", "-32603"), ("nothing", "-32602")] {
        let answer = server.post(&session, &request("5", "tools/call", &format!(r#"{{"name":"{result}"}}"#))).await;
        assert!(answer.status == 200 && answer.body.contains(code) && answer.body.contains(r#""id":5"#), "{answer:?}");
        assert!(!answer.body.contains("on purpose"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_chunked_body_over_the_limit_is_cut_off_and_a_slow_one_too() {
    let settings = Settings { max_body_bytes: 1024, body_timeout: Duration::from_millis(200), ..settings() };
    let server = start(settings, Authenticator::Public).await;
    let head =
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    let chunk = format!("800\r\n{}\r\n", "x".repeat(0x800));
    stream.write_all(format!("{head}{chunk}").as_bytes()).await.unwrap();
    until(&mut stream, "HTTP/1.1 413").await;
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    stream.write_all(format!("{head}1\r\n{{\r\n").as_bytes()).await.unwrap();
    until(&mut stream, "HTTP/1.1 408").await;
}

#[tokio::test]
async fn batches_exist_in_2025_03_26_alone() {
    let server = public().await;
    let (_, old) = server.initialize("2025-03-26", &[]).await;
    let batch = format!(
        r#"[{},{{"jsonrpc":"2.0","method":"notifications/x"}},{{"jsonrpc":"2.0","id":null,"method":"ping"}},{}]"#,
        request("1", "tools/call", r#"{"name":"echo"}"#),
        request(r#""b""#, "ping", "{}"),
    );
    let answer = server.post(&[("Mcp-Session-Id", &old)], &batch).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.starts_with('[') && answer.body.ends_with(']'), "{answer:?}");
    for part in [r#""id":1,"result""#, r#""id":"b","result":{}"#, r#""code":-32600"#] {
        assert!(answer.body.contains(part), "no {part} in {answer:?}");
    }
    server.fixture.until("delivered tools/call").await;
    let streamed = server.post(&[("Mcp-Session-Id", &old), ("Accept", "text/event-stream")], &batch).await;
    assert_eq!(streamed.body.matches("data: ").count(), 3, "{streamed:?}");
    let flood: Vec<String> = (0..9).map(|i| request(&i.to_string(), "ping", "{}")).collect();
    let flood = format!("[{}]", flood.join(","));
    let narrow = start(Settings { max_concurrent_requests: 8, ..settings() }, Authenticator::Public).await;
    let (_, token) = narrow.initialize("2025-03-26", &[]).await;
    assert_eq!(narrow.post(&[("Mcp-Session-Id", &token)], &flood).await.status, 503, "each call takes a place");
    let quiet = server.post(&[("Mcp-Session-Id", &old)], r#"[{"jsonrpc":"2.0","method":"notifications/x"}]"#).await;
    assert_eq!(quiet.status, 202);
    for revision in ["2025-06-18", "2025-11-25"] {
        let (_, token) = server.initialize(revision, &[]).await;
        let answer = server.post(&[("Mcp-Session-Id", &token)], &batch).await;
        assert!(answer.status == 400 && answer.body.contains("-32600"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_session_belongs_to_its_agent() {
    let keys = || Authenticator::keys(StaticKeys::parse(&format!("alice:{ALICE},bob:{BOB}")).unwrap());
    let mine = settings();
    let (first, second) = (start(mine.clone(), keys()).await, start(mine, keys()).await);
    let (alice, bob) = (format!("Bearer {ALICE}"), format!("Bearer {BOB}"));
    let (_, token) = first.initialize("2025-11-25", &[("Authorization", &alice)]).await;
    let who = request("1", "tools/call", r#"{"name":"who"}"#);
    let mut names = Vec::new();
    for replica in [&first, &second] {
        let answer = replica.post(&[("Authorization", &alice), ("Mcp-Session-Id", &token)], &who).await;
        assert!(answer.body.contains("alice") && answer.body.contains("2025-11-25 session-"), "{answer:?}");
        assert!(!answer.body.contains(&token));
        names.push(answer.body);
    }
    assert_eq!(names[0], names[1], "one name on every replica");
    let flipped = format!("{}{}", if token.starts_with('A') { "B" } else { "A" }, &token[1..]);
    for (authorization, session, status) in [
        (Some(&bob), Some(token.as_str()), 404),
        (Some(&alice), Some(flipped.as_str()), 404),
        (Some(&alice), Some("unknown"), 404),
        (Some(&alice), None, 400),
        (None, Some(token.as_str()), 401),
        (Some(&format!("Bearer {ALICE}x")), Some(token.as_str()), 401),
    ] {
        let mut headers = Vec::new();
        headers.extend(authorization.map(|value| ("Authorization", value.as_str())));
        headers.extend(session.map(|value| ("Mcp-Session-Id", value)));
        let answer = first.post(&headers, &who).await;
        assert_eq!(answer.status, status, "{headers:?}: {answer:?}");
        let challenge = answer.header("www-authenticate").unwrap_or_default();
        assert_eq!(challenge.starts_with("Bearer resource_metadata="), status == 401, "{answer:?}");
        assert_eq!(challenge.ends_with("error=\"invalid_token\""), status == 401 && authorization.is_some());
    }
    let expiring = start(Settings { session_lifetime: Duration::ZERO, ..settings() }, keys()).await;
    let (_, token) = expiring.initialize("2025-11-25", &[("Authorization", &alice)]).await;
    let answer = expiring.post(&[("Authorization", &alice), ("Mcp-Session-Id", &token)], &who).await;
    assert_eq!(answer.status, 404);
    let deleted =
        first.raw("DELETE", &[("Host", "localhost"), ("Authorization", &alice), ("Mcp-Session-Id", &token)], "").await;
    assert_eq!(deleted.status, 405, "there is no place to remember it");
}

#[tokio::test]
async fn an_ended_session_is_unknown_on_every_replica_its_streams_close_and_its_calls_finish() {
    let keys = || Authenticator::keys(StaticKeys::parse(&format!("alice:{ALICE},bob:{BOB}")).unwrap());
    let handler = Arc::new(Fixture { ended: Some(Default::default()), ..Fixture::default() });
    let mine = settings();
    let first = start_before(handler.clone(), mine.clone(), keys()).await;
    let second = start_before(handler.clone(), mine, keys()).await;
    let (alice, bob) = (format!("Bearer {ALICE}"), format!("Bearer {BOB}"));
    let (_, token) = first.initialize("2025-11-25", &[("Authorization", &alice)]).await;
    let of = |authorization| [("Host", "localhost"), ("Authorization", authorization), ("Mcp-Session-Id", &*token)];
    let who = request("1", "tools/call", r#"{"name":"who"}"#);
    assert_eq!(first.post(&of(&alice), &who).await.status, 200);
    assert!(!handler.log().contains(&"asked for a session".into()), "a living session asks nobody");

    let mut all = of(&alice).to_vec();
    all.push(("Accept", "text/event-stream"));
    let mut stream = first.open("GET", &all, "").await;
    until(&mut stream, "\r\n\r\n").await;
    let waiting = request("2", "tools/call", r#"{"name":"wait"}"#);
    let headers = of(&alice);
    let (waited, ()) = tokio::join!(first.post(&headers, &waiting), async {
        handler.until("called wait").await;
        assert_eq!(first.raw("DELETE", &of(&bob), "").await.status, 404, "another agent's");
        assert_eq!(first.raw("DELETE", &[("Host", "localhost"), ("Authorization", &alice)], "").await.status, 405);
        assert_eq!(first.raw("DELETE", &of(&alice), "").await.status, 204);
        handler.release.notify_one();
    });
    assert!(waited.status == 200 && waited.body.contains("waited"), "{waited:?}");
    let mut rest = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("the stream closes").unwrap();

    for replica in [&first, &second] {
        let answer = replica.post(&of(&alice), &who).await;
        assert_eq!(answer.status, 404, "{answer:?}");
        assert_eq!(replica.raw("GET", &all, "").await.status, 404);
    }
    assert_eq!(second.raw("DELETE", &of(&alice), "").await.status, 204, "ended twice is ended");
    let (_, token) = first.initialize("2025-11-25", &[("Authorization", &alice)]).await;
    let fresh = first.post(&[("Authorization", &alice), ("Mcp-Session-Id", &token)], &who).await;
    assert_eq!(fresh.status, 200, "the next session is another one");
}

#[tokio::test]
async fn hosts_origins_and_types_are_checked_before_anything_is_done() {
    let settings = Settings { allowed_hosts: vec!["mcp.example.com".into()], ..settings() };
    let server = start(settings, Authenticator::Public).await;
    let params = r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#;
    let body = request("0", "initialize", params);
    for (headers, status) in [
        (&[("Host", "mcp.example.com")][..], 200),
        (&[("Host", "127.0.0.1:4522"), ("Origin", "http://localhost:6274")], 200),
        (&[("Host", "evil.example")], 403),
        (&[("Host", "evil.example"), ("X-Forwarded-Host", "localhost")], 403),
        (&[("Origin", "https://evil.example")], 403),
        (&[("Origin", "null")], 403),
        (&[("Accept", "*/*")], 200),
        (&[("Accept", "application/json")], 200),
        (&[("Accept", "text/html")], 406),
        (&[("Content-Type", "text/plain")], 415),
        (&[("MCP-Protocol-Version", "2026-07-28")], 200),
    ] {
        let answer = server.post(headers, &body).await;
        assert_eq!(answer.status, status, "{headers:?}: {answer:?}");
        assert!(status != 403 || answer.body.contains("http.allowed_"), "{answer:?}");
    }
    let streamed = server.post(&[("Accept", "text/event-stream")], &body).await;
    assert!(streamed.body.starts_with("event: message\ndata: {"), "{streamed:?}");
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let unknown = [("Mcp-Session-Id", token.as_str()), ("MCP-Protocol-Version", "1.0")];
    let answer = server.post(&unknown, &request("1", "tools/list", "{}")).await;
    assert!(answer.status == 400 && answer.body.contains("-32022"), "{answer:?}");
}

#[tokio::test]
async fn progress_turns_the_answer_into_a_stream() {
    let server = public().await;
    let (_, token) = server.initialize("2025-06-18", &[]).await;
    let params = r#"{"name":"progress","_meta":{"progressToken":"p\u0031"}}"#;
    let body = request("1", "tools/call", params);
    let answer = server.post(&[("Mcp-Session-Id", &token)], &body).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let events: Vec<&str> = answer.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(events.len(), 3, "a report that does not grow is left out: {answer:?}");
    assert_eq!(
        events[0],
        r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p\u0031","progress":1.0,"total":2.0,"message":"half"}}"#
    );
    assert!(events[2].contains(r#""id":1,"result""#));
    server.fixture.until("delivered tools/call").await;
    let plain = server.post(&[("Mcp-Session-Id", &token), ("Accept", "application/json")], &body).await;
    assert_eq!(plain.header("content-type"), Some("application/json"));
    let untold =
        server.post(&[("Mcp-Session-Id", &token)], &request("1", "tools/call", r#"{"name":"progress"}"#)).await;
    assert_eq!(untold.header("content-type"), Some("application/json"), "no token, no notification");
}

#[tokio::test]
async fn a_slow_call_keeps_its_stream_alive_until_the_answer() {
    let settings =
        Settings { stream_after: Duration::from_millis(20), keep_alive: Duration::from_millis(50), ..settings() };
    let server = start(settings, Authenticator::Public).await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let headers = [("Host", "localhost"), ("Accept", BOTH), ("Mcp-Session-Id", token.as_str())];
    let body = request("1", "tools/call", r#"{"name":"wait"}"#);
    let mut stream = server.open("POST", &headers, &body).await;
    let got = until(&mut stream, ": keep-alive\n\n").await;
    assert!(got.to_ascii_lowercase().contains("content-type: text/event-stream"), "{got}");
    server.fixture.release.notify_one();
    until(&mut stream, "waited").await;
    server.fixture.until("delivered tools/call").await;
    // The stream of the session itself lives too.
    let mut stream = server.open("GET", &headers, "").await;
    let got = until(&mut stream, ": keep-alive\n\n").await;
    assert!(got.starts_with("HTTP/1.1 200") && got.to_ascii_lowercase().contains("x-accel-buffering: no"), "{got}");
    server.shutdown.cancel();
    until(&mut stream, "retry: ").await;
}

#[tokio::test]
async fn a_client_that_goes_cancels_and_the_call_still_finishes() {
    for stream_after in [Duration::from_millis(1), Duration::from_secs(600)] {
        let server = start(Settings { stream_after, ..settings() }, Authenticator::Public).await;
        let headers = [
            ("Host", "localhost"),
            ("Accept", BOTH),
            ("MCP-Protocol-Version", "2026-07-28"),
            ("Mcp-Method", "tools/call"),
            ("Mcp-Name", "stubborn"),
        ];
        let body = request("1", "tools/call", &stateless(r#""name":"stubborn","#));
        let mut stream = server.open("POST", &headers, &body).await;
        server.fixture.until("called stubborn").await;
        if stream_after < Duration::from_secs(1) {
            until(&mut stream, "text/event-stream").await;
        }
        drop(stream);
        server.fixture.until("cancelled stubborn").await;
        server.fixture.release.notify_one();
        server.fixture.until("ended stubborn").await;
        assert!(!server.fixture.log().contains(&"delivered tools/call".to_owned()), "{:?}", server.fixture.log());
    }
}

#[tokio::test]
async fn a_session_cancels_its_own_calls_by_id() {
    let server = public().await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let (_, other) = server.initialize("2025-11-25", &[]).await;
    let headers = [("Host", "localhost"), ("Mcp-Session-Id", token.as_str())];
    let body = request(r#""x""#, "tools/call", r#"{"name":"stubborn"}"#);
    let mut stream = server.open("POST", &headers, &body).await;
    server.fixture.until("called stubborn").await;
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"\u0078"}}"#;
    assert_eq!(server.post(&[("Mcp-Session-Id", &other)], cancel).await.status, 202);
    assert!(!server.fixture.log().contains(&"cancelled stubborn".to_owned()), "another session's id");
    assert_eq!(server.post(&[("Mcp-Session-Id", &token)], cancel).await.status, 202);
    server.fixture.until("cancelled stubborn").await;
    server.fixture.release.notify_one();
    until(&mut stream, "finished").await;
    assert!(!server.fixture.log().contains(&"delivered tools/call".to_owned()), "nobody waits for it any more");
}

#[tokio::test]
async fn a_subscription_is_acknowledged_and_ends_with_the_server() {
    let server = public().await;
    let headers = [
        ("Host", "localhost"),
        ("Accept", BOTH),
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", "subscriptions/listen"),
    ];
    let body = request("\"s\"", "subscriptions/listen", &stateless(r#""notifications":{"toolsListChanged":true},"#));
    let mut stream = server.open("POST", &headers, &body).await;
    let got = until(&mut stream, "acknowledged").await;
    assert!(
        got.contains(
            r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":"s"},"notifications":{}}}"#
        ),
        "{got}"
    );
    server.shutdown.cancel();
    let got = until(&mut stream, "complete").await;
    assert!(got.contains(r#""id":"s","result":{"resultType":"complete""#), "{got}");
}

#[tokio::test]
async fn drains_calls_in_flight_and_gives_up_at_the_end_of_the_drain() {
    let server = public().await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let headers = [("Host", "localhost"), ("Mcp-Session-Id", token.as_str())];
    let mut stream = server.open("POST", &headers, &request("1", "tools/call", r#"{"name":"wait"}"#)).await;
    server.fixture.until("called wait").await;
    server.shutdown.cancel();
    server.fixture.release.notify_one();
    until(&mut stream, "waited").await;
    server.fixture.until("delivered tools/call").await;

    let server = start(Settings { drain: Duration::from_millis(50), ..settings() }, Authenticator::Public).await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let headers = [("Host", "localhost"), ("Mcp-Session-Id", token.as_str())];
    let mut stream = server.open("POST", &headers, &request("1", "tools/call", r#"{"name":"stubborn"}"#)).await;
    server.fixture.until("called stubborn").await;
    server.shutdown.cancel();
    until(&mut stream, "HTTP/1.1 503").await;
    server.fixture.until("cancelled stubborn").await;
    server.fixture.release.notify_one();
    server.fixture.until("ended stubborn").await;
}

#[tokio::test]
async fn one_call_too_many_is_told_to_come_back() {
    let server = start(Settings { max_concurrent_requests: 1, ..settings() }, Authenticator::Public).await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let headers = [("Host", "localhost"), ("Mcp-Session-Id", token.as_str())];
    let mut stream = server.open("POST", &headers, &request("1", "tools/call", r#"{"name":"wait"}"#)).await;
    server.fixture.until("called wait").await;
    let answer = server.post(&[("Mcp-Session-Id", &token)], &request("2", "tools/list", "{}")).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    server.fixture.release.notify_one();
    until(&mut stream, "waited").await;
}

#[tokio::test]
async fn what_two_readers_could_read_differently_is_refused() {
    let server = public().await;
    let (_, token) = server.initialize("2025-06-18", &[]).await;
    let (session, list) = (("Mcp-Session-Id", token.as_str()), request("1", "tools/list", "{}"));
    let version = |value| ("MCP-Protocol-Version", value);
    let declares = request("1", "tools/list", &stateless("").replace("2026-07-28", "2025-11-25"));
    let agrees = request("1", "tools/list", &stateless("").replace("2026-07-28", "2025-06-18"));
    for (headers, body, status) in [
        (&[session][..], &list, 200),
        (&[session, version("2025-06-18")], &list, 200),
        (&[session, version("2025-06-18")], &agrees, 200),
        (&[session, version("2025-11-25")], &list, 400),
        (&[session, version("2025-03-26")], &list, 400),
        (&[session, version("1.0")], &list, 400),
        (&[session, version("2025-06-18"), version("2025-06-18")], &list, 400),
        (&[session, version("2025-06-18")], &declares, 400),
        (&[session, session], &list, 400),
        (&[session, ("Mcp-Session-Id", "other")], &list, 400),
        (&[session, ("Content-Encoding", "gzip")], &list, 415),
        (&[session, ("Content-Encoding", "identity")], &list, 200),
    ] {
        let answer = server.post(headers, body).await;
        assert_eq!(answer.status, status, "{headers:?} {body}: {answer:?}");
        assert_eq!(answer.header("accept-encoding"), (status == 415).then_some("identity"));
    }
    for headers in [&[session, version("2025-11-25")][..], &[session, session]] {
        let mut all = vec![("Host", "localhost"), ("Accept", "text/event-stream")];
        all.extend_from_slice(headers);
        assert_eq!(server.raw("GET", &all, "").await.status, 400, "{headers:?}");
    }
    let stateless = [version("2026-07-28"), ("Mcp-Session-Id", "a"), ("Mcp-Session-Id", "b")];
    assert_eq!(server.post(&stateless, &list).await.status, 400, "ignored there, but not twice");
}

/// A server whose connections are within `bounds`.
async fn bounded_server(bounds: Bounds, settings: Settings) -> Server {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (fixture, shutdown, world) = (fixture(), settings.shutdown.clone(), settings.world.clone());
    let app = router(settings, fixture.clone(), Authenticator::Public);
    let serving = serve_within(bounds, TcpListener(listener), world.clone(), app, shutdown.clone());
    world.spawn.spawn(Box::pin(serving));
    Server { addr, fixture, shutdown }
}

/// Until the other side has closed it; what it sent before does not matter.
async fn closed(stream: &mut TcpStream) -> bool {
    let mut piece = [0; 4096];
    let end = async { while !matches!(stream.read(&mut piece).await, Ok(0) | Err(_)) {} };
    timeout(PATIENCE, end).await.is_ok()
}

#[tokio::test]
async fn connections_are_counted_and_a_place_is_given_back() {
    let server = bounded_server(Bounds { per_source: 2, ..Bounds::default() }, settings()).await;
    let first = TcpStream::connect(server.addr).await.unwrap();
    let _second = TcpStream::connect(server.addr).await.unwrap();
    let mut third = TcpStream::connect(server.addr).await.unwrap();
    assert!(closed(&mut third).await, "one too many");
    drop(first);
    let answered = async {
        loop {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            let _ = stream.write_all(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
            let mut text = String::new();
            if stream.read_to_string(&mut text).await.is_ok() && text.starts_with("HTTP/1.1 404") {
                return;
            }
        }
    };
    timeout(PATIENCE, answered).await.expect("the place is free again");
}

#[tokio::test]
async fn a_slow_head_and_an_idle_connection_are_cut_and_a_call_in_flight_is_not() {
    let short = Duration::from_secs(1);
    let settings = Settings { stream_after: Duration::from_secs(600), ..settings() };
    let server = bounded_server(Bounds { idle: short, ..Bounds::default() }, settings).await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    let headers = [("Host", "localhost"), ("Mcp-Session-Id", token.as_str())];
    let body = request("1", "tools/call", r#"{"name":"wait"}"#);
    let mut waiting = server.open("POST", &headers, &body).await;
    server.fixture.until("called wait").await;
    let mut idle = TcpStream::connect(server.addr).await.unwrap();
    assert!(closed(&mut idle).await, "an idle one");
    let heads = bounded_server(Bounds { head: short, ..Bounds::default() }, super::settings()).await;
    let mut slow = TcpStream::connect(heads.addr).await.unwrap();
    slow.write_all(b"POST /mcp HTTP/1.1\r\nHost: ").await.unwrap();
    assert!(closed(&mut slow).await, "a head that does not end");
    server.fixture.release.notify_one();
    until(&mut waiting, "waited").await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let settings = Settings { keep_alive: Duration::from_millis(20), ..settings() };
    let server = bounded_server(Bounds { write: Duration::from_millis(200), ..Bounds::default() }, settings).await;
    let (_, token) = server.initialize("2025-11-25", &[]).await;
    // More than the sockets' buffers take, back to back, and never read.
    let padding = "x".repeat(900_000);
    let body = request("1", "tools/call", &format!(r#"{{"name":"echo","arguments":{{"p":"{padding}"}}}}"#));
    let head = format!(
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nAccept: {BOTH}\r\nMcp-Session-Id: {token}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(server.addr).await.unwrap();
    let cut = async {
        loop {
            let sent = async {
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(body.as_bytes()).await
            };
            if sent.await.is_err() {
                return;
            }
        }
    };
    timeout(PATIENCE, cut).await.expect("the connection is reset");
}
