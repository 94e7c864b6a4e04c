//! The client against small sellers of each era on real sockets; every `tools/call` is counted where it arrives.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::*;
use crate::http::testing::{Request, answer, serve, write};
use crate::json;

type Log = Arc<Mutex<Vec<Request>>>;
const JSON: (&str, &str) = ("content-type", "application/json");
const EVENTS: (&str, &str) = ("content-type", "text/event-stream");
/// Arguments that any reader but a byte-preserving one changes.
const ARGUMENTS: &str = r#"{ "n":100000000000000000000000001, "f":0.1000,"s":"\u00e9" }"#;
const PAYMENT: &str = r#"{"x402Version":2,"payload":{"transaction":"AAAA"} }"#;

fn upstream() -> Upstream {
    with(Settings { timeout: Duration::from_secs(5), ..Settings::default() })
}
fn with(settings: Settings) -> Upstream {
    let settings = Settings { allow_insecure_local: true, ..settings };
    let (world, _) = crate::ports::machine::world();
    let client = settings.client(world.clone(), Tls::Plain);
    Upstream::new(settings, world, client)
}
fn endpoint(upstream: &Upstream, at: std::net::SocketAddr, path: &str) -> Endpoint {
    upstream.endpoint(&format!("http://{at}{path}"), SellerTransport::StreamableHttp).unwrap()
}
fn raw(text: &str) -> &RawValue {
    serde_json::from_str(text).unwrap()
}
fn call(payment: Option<&'static str>) -> ToolCall<'static> {
    ToolCall {
        tool: "weather",
        arguments: raw(ARGUMENTS),
        input_responses: None,
        request_state: None,
        payment: payment.map(raw),
        timeout: Duration::from_secs(5),
    }
}
fn method(request: &Request) -> String {
    let body = serde_json::from_str::<&RawValue>(&request.body).ok();
    body.and_then(|b| json::member(b, "method")).and_then(json::string).unwrap_or_default().into_owned()
}
fn id(request: &Request) -> String {
    json::member(raw(&request.body), "id").map(|id| id.get().to_owned()).unwrap_or_default()
}
fn result(request: &Request, result: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, id(request))
}
fn error(request: &Request, code: i64) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{},"error":{{"code":{code},"message":"no"}}}}"#, id(request))
}
fn calls(log: &Log) -> Vec<Request> {
    log.lock().unwrap().iter().filter(|r| method(r) == "tools/call").cloned().collect()
}
fn methods(log: &Log) -> Vec<String> {
    log.lock().unwrap().iter().map(method).collect()
}
fn text(answer: ToolAnswer) -> String {
    match answer {
        ToolAnswer::Result(raw) => raw.get().to_owned(),
        ToolAnswer::Error { code, .. } => format!("error {code}"),
    }
}

/// A seller whose answer to each request is a whole HTTP answer.
async fn seller(answers: impl Fn(&Request, usize) -> String + Send + Sync + 'static) -> (std::net::SocketAddr, Log) {
    let log = Log::default();
    let (seen, answers) = (log.clone(), Arc::new(answers));
    let at = serve(move |request, io| {
        let n = {
            let mut seen = seen.lock().unwrap();
            seen.push(request.clone());
            seen.iter().filter(|r| method(r) == method(&request)).count()
        };
        let text = answers(&request, n);
        async move { write(&io, &text).await && !text.is_empty() }
    })
    .await;
    (at, log)
}

const INITIALIZED: &str =
    r#"{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"1"}}"#;
const OUTPUT: &str = r#"{"content":[],"structuredContent":{"big":100000000000000000000000001,"f":1.0}}"#;

fn modern(request: &Request) -> String {
    match &*method(request) {
        "server/discover" => {
            answer(200, &[JSON], &result(request, r#"{"supportedVersions":["2026-07-28"],"capabilities":{}}"#))
        }
        "tools/list" => {
            let tool = r#"{"name":"weather","inputSchema":{"type":"object","properties":{"s":{"type":"string","x-mcp-header":"S"}}}}"#;
            answer(200, &[JSON], &result(request, &format!(r#"{{"tools":[{tool}]}}"#)))
        }
        "tools/call" => answer(200, &[JSON], &result(request, OUTPUT)),
        _ => answer(404, &[JSON], &error(request, -32601)),
    }
}
fn sessioned(request: &Request) -> String {
    match &*method(request) {
        "initialize" => answer(200, &[JSON, ("mcp-session-id", "s-1")], &result(request, INITIALIZED)),
        "notifications/initialized" => answer(202, &[], ""),
        "tools/list" => answer(200, &[JSON], &result(request, r#"{"tools":[{"name":"weather"}]}"#)),
        "tools/call" => answer(200, &[JSON], &result(request, OUTPUT)),
        _ => answer(400, &[JSON], &error(request, -32601)),
    }
}

#[tokio::test]
async fn a_stateless_seller_gets_each_call_once_byte_for_byte_with_its_metadata() {
    let (at, log) = seller(|request, _| modern(request)).await;
    let upstream = upstream();
    let endpoint = endpoint(&upstream, at, "/mcp");
    assert_eq!(text(upstream.call_tool(&endpoint, call(None)).await.unwrap()), OUTPUT);
    assert_eq!(text(upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap()), OUTPUT);
    assert_eq!(methods(&log), ["server/discover", "tools/list", "tools/call", "tools/call"]);
    let calls = calls(&log);
    for (request, paid) in calls.iter().zip([false, true]) {
        let params = json::member(raw(&request.body), "params").unwrap();
        assert_eq!(json::member(params, "arguments").unwrap().get(), ARGUMENTS);
        let meta = json::member(params, "_meta").unwrap();
        let capabilities = json::member(meta, "io.modelcontextprotocol/clientCapabilities").unwrap();
        let extensions = json::member(capabilities, "extensions").unwrap();
        assert_eq!(json::member(extensions, "org.x402/payment").unwrap().get(), "{}");
        assert_eq!(json::member(meta, "io.modelcontextprotocol/protocolVersion").unwrap().get(), "\"2026-07-28\"");
        assert_eq!(json::member(meta, "x402/payment").map(RawValue::get), paid.then_some(PAYMENT));
        // What the front of this very crate demands of a request.
        let mut headers = http::HeaderMap::new();
        for name in ["mcp-protocol-version", "mcp-method", "mcp-name", "mcp-param-s"] {
            let value = request.header(name).unwrap_or_else(|| panic!("{name} is missing"));
            headers.insert(http::HeaderName::from_static(name), value.parse().unwrap());
        }
        assert_eq!(headers["mcp-name"], "weather");
        assert_eq!(crate::mcp::headers::decode(headers["mcp-param-s"].to_str().unwrap()).unwrap(), "é");
    }
}

#[tokio::test]
async fn input_responses_and_request_state_go_with_the_call() {
    let (at, log) = seller(|request, _| modern(request)).await;
    let upstream = upstream();
    let endpoint = endpoint(&upstream, at, "/mcp");
    let again =
        ToolCall { input_responses: Some(raw(r#"{"a": 1.0}"#)), request_state: Some(raw("\"st\"")), ..call(None) };
    upstream.call_tool(&endpoint, again).await.unwrap();
    let params = calls(&log)[0].body.clone();
    assert!(params.contains(r#""inputResponses":{"a": 1.0},"requestState":"st""#), "{params}");
}

#[tokio::test]
async fn a_session_is_made_once_and_a_lost_one_renewed_with_the_identical_bytes() {
    let (at, log) = seller(|request, n| match (&*method(request), n) {
        ("initialize", n) => answer(200, &[JSON, ("mcp-session-id", &format!("s-{n}"))], &result(request, INITIALIZED)),
        ("tools/call", 2) => answer(404, &[JSON], &error(request, -32001)),
        _ => sessioned(request),
    })
    .await;
    let upstream = upstream();
    let endpoint = endpoint(&upstream, at, "/mcp");
    upstream.call_tool(&endpoint, call(None)).await.unwrap();
    assert_eq!(text(upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap()), OUTPUT);
    let hello = ["server/discover", "initialize", "notifications/initialized"];
    let expected: Vec<&str> = hello.into_iter().chain(["tools/call"; 2]).chain(hello).chain(["tools/call"]).collect();
    assert_eq!(methods(&log), expected);
    let calls = calls(&log);
    assert_eq!(calls[1].body, calls[2].body, "the identical bytes");
    let sessions: Vec<_> = calls.iter().map(|r| r.header("mcp-session-id").unwrap()).collect();
    assert_eq!(sessions, ["s-1", "s-1", "s-2"]);
    assert!(calls.iter().all(|r| r.header("mcp-protocol-version").as_deref() == Some("2025-11-25")));
    assert!(calls.iter().all(|r| r.header("mcp-method").is_none()));
}

#[tokio::test]
async fn a_seller_that_never_knows_its_session_gets_the_call_twice_and_no_more() {
    let (at, log) = seller(|request, _| match &*method(request) {
        "tools/call" => answer(404, &[], ""),
        _ => sessioned(request),
    })
    .await;
    let upstream = upstream();
    let endpoint = endpoint(&upstream, at, "/mcp");
    let error = upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap_err();
    assert!(error.may_have_been_seen(), "{error:?}");
    assert_eq!(calls(&log).len(), 2);
}

#[tokio::test]
async fn renewing_a_session_that_fails_leaves_the_first_request_seen() {
    let (at, log) = seller(|request, n| match (&*method(request), n) {
        ("tools/call", _) => answer(404, &[], ""),
        ("initialize", 2) => answer(500, &[], ""),
        _ => sessioned(request),
    })
    .await;
    let upstream = upstream();
    let endpoint = endpoint(&upstream, at, "/mcp");
    let error = upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap_err();
    assert!(error.may_have_been_seen(), "{error:?}");
    assert_eq!(calls(&log).len(), 1);
}

#[tokio::test]
async fn a_2025_03_26_seller_answers_on_a_stream_and_its_own_questions_are_refused() {
    let (at, log) = seller(|request, _| match &*method(request) {
        "initialize" => {
            let agreed = INITIALIZED.replace("2025-11-25", "2025-03-26");
            let body = format!("event: message\ndata: {}\n\n", result(request, &agreed));
            answer(200, &[EVENTS, ("mcp-session-id", "s-1")], &body)
        }
        "tools/call" => {
            let progress = |token: &str| {
                format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":1}}}}"#)
            };
            let events = [
                progress(&id(request)),
                progress("99999"),
                r#"{"jsonrpc":"2.0","id":"q","method":"sampling/createMessage","params":{}}"#.into(),
                r#"{"jsonrpc":"2.0","id":"p","method":"ping"}"#.into(),
                r#"{"jsonrpc":"2.0","id":99999,"result":{"another":"call"}}"#.into(),
                format!("[{}]", result(request, OUTPUT)),
            ];
            let body: String = events.iter().map(|data| format!("id: 1\ndata: {data}\n\n")).collect();
            answer(200, &[EVENTS], &body)
        }
        "" => answer(202, &[], ""),
        _ => sessioned(request),
    })
    .await;
    let upstream = upstream();
    let endpoint = endpoint(&upstream, at, "/mcp");
    let mut progress = 0;
    let mut on_progress = |_: &RawValue| progress += 1;
    let got = upstream.call_tool_with_progress(&endpoint, call(Some(PAYMENT)), &mut on_progress).await.unwrap();
    assert_eq!(text(got), OUTPUT);
    assert_eq!(progress, 1, "of this call alone");
    assert_eq!(calls(&log).len(), 1);
    assert!(calls(&log)[0].header("mcp-protocol-version").is_none(), "2025-03-26 has no such header");
    let log = log.lock().unwrap();
    let replies: Vec<&str> = log.iter().filter(|r| method(r).is_empty()).map(|r| r.body.as_str()).collect();
    assert!(replies[0].contains(r#""id":"q""#) && replies[0].contains("-32601"), "{replies:?}");
    assert!(replies[1].contains(r#""id":"p""#) && replies[1].contains(r#""result":{}"#), "{replies:?}");
}

/// A seller of 2024-11-05; `named` is what its `endpoint` event says. `early` answers on the stream before the POST.
async fn legacy(named: &'static str, early: bool) -> (std::net::SocketAddr, Log) {
    let log = Log::default();
    let seen = log.clone();
    let streams: Arc<Mutex<Vec<UnboundedSender<String>>>> = Arc::default();
    let at = serve(move |request, io| {
        seen.lock().unwrap().push(request.clone());
        let streams = streams.clone();
        async move {
            if request.line().starts_with("GET /sse ") {
                let (sender, mut events) = unbounded_channel();
                streams.lock().unwrap().push(sender);
                write(&io, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n").await;
                write(&io, format!("event: endpoint\ndata: {named}\n\n")).await;
                while let Some(event) = events.recv().await {
                    if !write(&io, format!("event: message\ndata: {event}\n\n")).await {
                        return false;
                    }
                }
                return false;
            }
            let reply = match &*method(&request) {
                "initialize" => Some(result(&request, &INITIALIZED.replace("2025-11-25", "2024-11-05"))),
                "tools/list" => Some(result(&request, r#"{"tools":[{"name":"weather"}]}"#)),
                "tools/call" => Some(result(&request, OUTPUT)),
                _ => None,
            };
            let send = |reply: Option<String>| {
                if let (Some(reply), Some(stream)) = (reply, streams.lock().unwrap().last()) {
                    let _ = stream.send(reply);
                }
            };
            if early {
                send(reply);
                tokio::time::sleep(Duration::from_millis(50)).await;
                return write(&io, answer(202, &[], "")).await;
            }
            let open = write(&io, answer(202, &[], "")).await;
            send(reply);
            open
        }
    })
    .await;
    (at, log)
}

#[tokio::test]
async fn a_legacy_seller_is_called_once_over_its_stream() {
    for early in [false, true] {
        let (at, log) = legacy("/messages?sessionId=1", early).await;
        let upstream = upstream();
        let endpoint = upstream.endpoint(&format!("http://{at}/sse"), SellerTransport::Sse).unwrap();
        assert_eq!(text(upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap()), OUTPUT);
        assert_eq!(calls(&log).len(), 1);
        let alive = upstream.liveness(&endpoint).await.unwrap();
        assert_eq!((alive.revision, alive.tools), (Revision::V2024_11_05, vec!["weather".to_owned()]));
        assert_eq!(calls(&log).len(), 1, "a probe calls no tool");
    }
}

#[tokio::test]
async fn a_legacy_seller_cannot_send_the_call_elsewhere() {
    for named in ["http://127.0.0.1:9/messages", "//other.example/m", "https://user@seller.example/"] {
        let (at, log) = legacy(named, false).await;
        let upstream = upstream();
        let endpoint = upstream.endpoint(&format!("http://{at}/sse"), SellerTransport::Sse).unwrap();
        let error = upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap_err();
        assert!(matches!(error, UpstreamError::Refused("sse_endpoint_origin")), "{named}: {error:?}");
        assert_eq!(log.lock().unwrap().len(), 1, "{named}");
    }
}

#[tokio::test]
async fn many_legacy_calls_at_once_do_not_wait_for_each_other_for_good() {
    let (at, _log) = legacy("/messages", false).await;
    let upstream = with(Settings { max_concurrent_connections: 1, ..Settings::default() });
    let endpoint = upstream.endpoint(&format!("http://{at}/sse"), SellerTransport::Sse).unwrap();
    let both = futures_util::future::join(
        upstream.call_tool(&endpoint, call(None)),
        upstream.call_tool(&endpoint, call(None)),
    );
    let (one, two) = both.await;
    assert_eq!((text(one.unwrap()), text(two.unwrap())), (OUTPUT.into(), OUTPUT.into()));
}

#[tokio::test]
async fn redirects_are_followed_within_the_origin_and_never_with_a_payment() {
    let (elsewhere, other) = seller(|request, _| modern(request)).await;
    let (at, log) = seller(move |request, _| {
        let to = |to: &str| answer(307, &[("location", to)], "");
        let path = request.line().split(' ').nth(1).unwrap_or_default().to_owned();
        match (path.as_str(), &*method(request)) {
            ("/mcp", _) => to("/mcp/"),
            ("/away", _) => to(&format!("http://{elsewhere}/mcp")),
            ("/loop", _) => to("/loop"),
            ("/see", _) => answer(303, &[("location", "/mcp/")], ""),
            ("/late", "tools/call") => to("/mcp/"),
            _ => modern(request),
        }
    })
    .await;
    let upstream = upstream();
    // Learnt by the handshake: the call itself goes straight to the place.
    let moved = endpoint(&upstream, at, "/mcp");
    upstream.call_tool(&moved, call(Some(PAYMENT))).await.unwrap();
    assert_eq!(calls(&log).len(), 1);
    for path in ["/away", "/loop", "/see"] {
        let error = upstream.call_tool(&endpoint(&upstream, at, path), call(Some(PAYMENT))).await.unwrap_err();
        assert!(matches!(error, UpstreamError::Refused("redirect")), "{path}: {error:?}");
    }
    assert_eq!(calls(&log).len(), 1);
    let late = endpoint(&upstream, at, "/late");
    upstream.call_tool(&late, call(None)).await.unwrap();
    let before = calls(&log).len();
    let error = upstream.call_tool(&late, call(Some(PAYMENT))).await.unwrap_err();
    assert!(error.may_have_been_seen(), "{error:?}");
    assert_eq!(calls(&log).len(), before + 1);
    assert!(other.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_fails_before_the_call_is_not_sent() {
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (broken, log) = seller(|request, _| match &*method(request) {
        "initialize" => answer(503, &[], ""),
        _ => answer(400, &[], ""),
    })
    .await;
    let (unknown, _) = seller(|request, _| match &*method(request) {
        "initialize" => answer(200, &[JSON], &result(request, &INITIALIZED.replace("2025-11-25", "1999-01-01"))),
        _ => answer(400, &[], ""),
    })
    .await;
    let silent = serve(|_, _| std::future::pending()).await;
    let upstream = with(Settings { timeout: Duration::from_millis(300), ..Settings::default() });
    for at in [free, broken, unknown, silent] {
        for transport in [SellerTransport::StreamableHttp, SellerTransport::Sse] {
            let endpoint = upstream.endpoint(&format!("http://{at}/mcp"), transport).unwrap();
            let error = upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap_err();
            assert!(!error.may_have_been_seen(), "{error:?}");
        }
    }
    assert!(calls(&log).is_empty());
}

#[tokio::test]
async fn every_unusable_answer_to_the_call_ends_and_counts_as_seen() {
    let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
    let hostile = move |request: &Request, path: &str| match path {
        "/cut" => String::new(),
        "/status" => answer(500, &[JSON], &error(request, -1)),
        "/type" => answer(200, &[("content-type", "text/html")], "<html>"),
        "/empty" => answer(202, &[], ""),
        "/deep" => answer(200, &[JSON], &result(request, &format!(r#"{{"a":{deep}}}"#))),
        "/twice" => answer(200, &[JSON], &result(request, r#"{"isError":true,"isError":false}"#)),
        "/array" => answer(200, &[JSON], &result(request, "[1]")),
        "/other" => answer(200, &[JSON], r#"{"jsonrpc":"2.0","id":99999,"result":{}}"#),
        "/large" => answer(200, &[JSON], &result(request, &format!(r#"{{"a":"{}"}}"#, "x".repeat(200_000)))),
        "/nothing" => answer(200, &[EVENTS], ": only a comment\n\n"),
        "/flood" => answer(200, &[EVENTS], &"data: {\"jsonrpc\":\"2.0\",\"method\":\"x\"}\n\n".repeat(9_000)),
        "/line" => answer(200, &[EVENTS], &format!("data: {}", "x".repeat(200_000))),
        "/gzip" => answer(200, &[JSON, ("content-encoding", "gzip")], "bomb"),
        other => panic!("{other}"),
    };
    let (at, log) = seller(move |request, _| {
        let path = request.line().split(' ').nth(1).unwrap_or_default().to_owned();
        if method(request) == "tools/call" { hostile(request, &path) } else { modern(request) }
    })
    .await;
    let upstream = with(Settings { max_response_bytes: 100_000, ..Settings::default() });
    for (n, path) in [
        "cut", "status", "type", "empty", "deep", "twice", "array", "other", "large", "nothing", "flood", "line",
        "gzip",
    ]
    .into_iter()
    .enumerate()
    {
        let endpoint = endpoint(&upstream, at, &format!("/{path}"));
        let error = upstream.call_tool(&endpoint, call(Some(PAYMENT))).await.unwrap_err();
        assert!(matches!(error, UpstreamError::Protocol { sent: true, .. }), "{path}: {error:?}");
        assert!(!error.to_string().contains("AAAA"), "{path}: no payload in errors");
        assert_eq!(calls(&log).len(), n + 1, "{path}: sent once");
    }
}

#[tokio::test]
async fn a_call_without_an_answer_in_time_counts_as_seen() {
    let at = serve(|request, io| async move {
        if method(&request) != "tools/call" {
            return write(&io, modern(&request)).await;
        }
        write(&io, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n").await;
        while write(&io, ":").await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    })
    .await;
    let upstream = upstream();
    let slow = ToolCall { timeout: Duration::from_millis(500), ..call(Some(PAYMENT)) };
    let error = upstream.call_tool(&endpoint(&upstream, at, "/mcp"), slow).await.unwrap_err();
    assert!(matches!(error, UpstreamError::Timeout { sent: true }), "{error:?}");
}

#[tokio::test]
async fn a_sellers_own_error_is_an_answer() {
    let (at, _) = seller(|request, _| match &*method(request) {
        "tools/call" => answer(400, &[JSON], &error(request, -32602)),
        _ => modern(request),
    })
    .await;
    let upstream = upstream();
    let got = upstream.call_tool(&endpoint(&upstream, at, "/mcp"), call(None)).await.unwrap();
    assert_eq!(text(got), "error -32602");
}

#[tokio::test]
async fn tools_are_listed_page_by_page_kept_for_a_while_and_bounded() {
    let (at, log) = seller(|request, n| match &*method(request) {
        "tools/list" if request.line().contains("/endless") => {
            answer(200, &[JSON], &result(request, r#"{"tools":[],"nextCursor":"again"}"#))
        }
        "tools/list" if n == 1 => answer(
            200,
            &[JSON],
            &result(request, r#"{"tools":[{"name":"a","inputSchema":{ "x":1.0 }}],"nextCursor":"2"}"#),
        ),
        "tools/list" => {
            assert!(request.body.contains(r#""cursor":"2""#));
            answer(200, &[JSON], &result(request, r#"{"tools":[{"name":"b"},{"no":"name"}]}"#))
        }
        _ => sessioned(request),
    })
    .await;
    let upstream = upstream();
    let listing = endpoint(&upstream, at, "/mcp");
    for _ in 0..2 {
        let names: Vec<_> = upstream.list_tools(&listing).await.unwrap().iter().map(|t| t.name.clone()).collect();
        assert_eq!(names, ["a", "b"]);
    }
    assert_eq!(upstream.input_schema(&listing, "a").await.unwrap().unwrap().get(), r#"{ "x":1.0 }"#);
    assert!(upstream.input_schema(&listing, "b").await.unwrap().is_none());
    assert_eq!(methods(&log).iter().filter(|m| *m == "tools/list").count(), 2);
    let endless = upstream.list_tools(&endpoint(&upstream, at, "/endless")).await.unwrap_err();
    assert!(!endless.may_have_been_seen(), "{endless:?}");
    assert!(calls(&log).is_empty());
}
