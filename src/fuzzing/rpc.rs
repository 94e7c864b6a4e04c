//! The JSON-RPC front: envelope, dispatch in every revision, both doors.

use std::cell::OnceCell;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use http_body_util::{BodyExt as _, Full};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use tower_service::Service as _;

use crate::json::{self, Limits};
use crate::mcp::envelope::{self, Envelope, Incoming, Outcome};
use crate::mcp::revision::{META_CLIENT_CAPABILITIES, META_PROTOCOL_VERSION};
use crate::mcp::{Authenticator, Handler, RequestContext, Revision, RpcError, Settings, headers};
use crate::ports::machine;
use crate::seal::KeyRing;

const LIMITS: Limits = Limits { bytes: 1 << 14, depth: 32 };
/// What is written may be a little larger and deeper than what was read.
const OWN: Limits = Limits { bytes: 1 << 20, depth: 40 };

/// The first byte: bits 0-2 the revision, bit 3 HTTP instead of stdio, bit 4 an event stream, bit 5 the headers that
/// belong to the body. The rest is the body, or the lines.
pub fn run(data: &[u8]) {
    let Some((&mode, body)) = data.split_first() else { return };
    read(body);
    let revision = Revision::ALL[usize::from(mode & 7) % Revision::ALL.len()];
    thread_local!(static RUNTIME: OnceCell<tokio::runtime::Runtime> = const { OnceCell::new() });
    RUNTIME.with(|runtime| {
        let runtime =
            runtime.get_or_init(|| tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
        if mode & 8 == 0 {
            runtime.block_on(stdio(body, revision));
        } else {
            runtime.block_on(http(body, revision, mode & 16 != 0, mode & 32 != 0));
        }
    });
}

/// Every message keeps its raw parts and is read the same from what we would write of it.
fn read(text: &[u8]) {
    match Envelope::parse(text, LIMITS) {
        Ok(Incoming::One(one)) => message(&one, text),
        Ok(Incoming::Batch(batch)) => {
            assert!((1..=64).contains(&batch.len()));
            for one in batch {
                match one {
                    Ok(one) => message(&one, text),
                    Err(fault) => answer(&fault.response(), fault.id.as_deref()),
                }
            }
        }
        Err(fault) => answer(&fault.response(), fault.id.as_deref()),
    }
}

fn message(read: &Envelope, text: &[u8]) {
    let kept = |raw: &RawValue| {
        let part = raw.get().as_bytes();
        assert!(text.windows(part.len()).any(|window| window == part), "a byte was changed");
    };
    let same = |a: &Option<Box<RawValue>>, b: &Option<Box<RawValue>>| {
        assert_eq!(a.as_deref().map(RawValue::get), b.as_deref().map(RawValue::get));
    };
    let parse = |text: &str| Envelope::parse_one(text.as_bytes(), OWN).unwrap_or_else(|f| panic!("{text}: {f:?}"));
    match read {
        Envelope::Request { id, method, params } => {
            kept(id);
            params.iter().for_each(|params| kept(params));
            assert!((1..=256).contains(&method.len()));
            let Envelope::Request { id: i, method: m, params: p } =
                parse(&envelope::request(id, method, params.as_deref()))
            else {
                panic!("a request was read as something else")
            };
            assert_eq!((i.get(), &m), (id.get(), method));
            same(&p, params);
        }
        Envelope::Notification { method, params } => {
            params.iter().for_each(|params| kept(params));
            let Envelope::Notification { method: m, params: p } =
                parse(&envelope::notification(method, params.as_deref()))
            else {
                panic!("a notification was read as something else")
            };
            assert_eq!(&m, method);
            same(&p, params);
        }
        Envelope::Response { id, outcome } => {
            let raw = match outcome {
                Outcome::Result(raw) | Outcome::Error(raw) => raw,
            };
            kept(raw);
            let Some(id) = id else { return };
            kept(id);
            let text = match outcome {
                Outcome::Result(raw) => envelope::result_response(id, raw),
                Outcome::Error(raw) => envelope::raw_error_response(id, raw),
            };
            let line = envelope::one_line(text);
            assert!(!line.contains(['\n', '\r']));
            answer(&line, Some(id));
        }
    }
}

/// One whole response to `id`.
fn answer(text: &str, id: Option<&RawValue>) {
    match Envelope::parse_one(text.as_bytes(), OWN) {
        Ok(Envelope::Response { id: found, .. }) => {
            assert_eq!(found.as_deref().map(RawValue::get), id.map(RawValue::get), "an answer to another request");
        }
        other => panic!("{text} was read as {other:?}"),
    }
}

/// Everything that is written is one strict message a line, and every answer has an id that was asked, byte for byte.
async fn stdio(lines: &[u8], revision: Revision) {
    let (settings, _) = settings();
    let mut input = Vec::new();
    if !revision.stateless() {
        let version = revision.as_str();
        input.extend_from_slice(
            format!(
                r#"{{"jsonrpc":"2.0","id":"init","method":"initialize","params":{{"protocolVersion":"{version}"}}}}"#
            )
            .as_bytes(),
        );
        input.push(b'\n');
    }
    input.extend_from_slice(lines);
    input.push(b'\n');
    let mut output = Vec::new();
    let agent = "fuzz".parse().unwrap();
    crate::mcp::stdio(settings, Arc::new(Echo), agent, &input[..], &mut output).await.unwrap();
    let output = String::from_utf8(output).unwrap_or_else(|_| panic!("what is written is not UTF-8"));
    for line in output.lines() {
        match Envelope::parse(line.as_bytes(), OWN) {
            Ok(Incoming::One(one)) => said(&one, &input),
            Ok(Incoming::Batch(batch)) => batch.iter().for_each(|one| said(one.as_ref().unwrap(), &input)),
            Err(fault) => panic!("{line}: {fault:?}"),
        }
    }
}

fn said(message: &Envelope, asked: &[u8]) {
    match message {
        Envelope::Response { id, outcome } => {
            if let Some(id) = id {
                let id = id.get().as_bytes();
                assert!(asked.windows(id.len()).any(|window| window == id), "an id that nobody sent");
            }
            echoed(outcome, asked);
        }
        Envelope::Notification { method, .. } => assert!(method.starts_with("notifications/")),
        Envelope::Request { .. } => panic!("the front asks something"),
    }
}

/// The handler gives back its params: they were handed to it byte for byte.
fn echoed(outcome: &Outcome, asked: &[u8]) {
    match outcome {
        Outcome::Result(result) => {
            if let Some(params) = json::member(result, "echo") {
                let params = params.get().as_bytes();
                let line = |b: &u8| if matches!(b, b'\n' | b'\r') { b' ' } else { *b };
                let asked: Vec<u8> = asked.iter().map(line).collect();
                let params: Vec<u8> = params.iter().map(line).collect();
                assert!(asked.windows(params.len()).any(|window| window == params), "params were changed");
            }
        }
        Outcome::Error(error) => {
            let message = json::member(error, "message").and_then(json::string).unwrap_or_default();
            assert!(message.chars().count() <= super::MAX_WORDS, "{} characters", message.len());
            assert!(json::member(error, "code").is_some_and(|code| code.get().parse::<i64>().is_ok()));
            assert_ne!(message, "a handler's panic", "the inner words of a fault");
        }
    }
}

async fn http(body: &[u8], revision: Revision, stream: bool, matching: bool) {
    let (settings, shutdown) = settings();
    let mut router = crate::mcp::http::router(settings, Arc::new(Echo), Authenticator::Public);
    let mut ask = async |body: Vec<u8>, session: Option<String>| {
        let mut request = http::Request::post("/mcp")
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("accept", if stream { "text/event-stream" } else { "application/json, text/event-stream" })
            .header(headers::PROTOCOL_VERSION, revision.as_str());
        if let Some(session) = session {
            request = request.header(headers::SESSION_ID, session);
        }
        if matching && let Ok(Incoming::One(Envelope::Request { method, params, .. })) = Envelope::parse(&body, LIMITS)
        {
            request = request.header(headers::METHOD, headers::encode(&method));
            let member = headers::name_member(&method);
            let name = member.and_then(|member| json::string(json::member(params.as_deref()?, member)?));
            if let Some(name) = name {
                request = request.header(headers::NAME, headers::encode(&name));
            }
        }
        let request = request.body(Full::new(bytes::Bytes::from(body))).unwrap();
        router.call(request).await.unwrap()
    };
    let session = if revision.stateless() {
        None
    } else {
        let version = revision.as_str();
        let hello = format!(
            r#"{{"jsonrpc":"2.0","id":"init","method":"initialize","params":{{"protocolVersion":"{version}"}}}}"#
        );
        let response = ask(hello.into_bytes(), None).await;
        let id = response.headers().get(headers::SESSION_ID);
        // 2024-11-05 is not spoken over HTTP.
        id.and_then(|id| id.to_str().ok()).map(str::to_owned)
    };
    let response = ask(body.to_vec(), session).await;
    shutdown.cancel();
    let (head, answer) = response.into_parts();
    let kind = head.headers.get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
    let answer = answer.collect().await.unwrap().to_bytes();
    let answer = std::str::from_utf8(&answer).unwrap_or_else(|_| panic!("what is written is not UTF-8"));
    let messages: Vec<&str> = match kind.as_str() {
        "text/event-stream" => answer
            .lines()
            .filter_map(|line| line.strip_prefix("data:"))
            .map(str::trim)
            .filter(|l| !l.is_empty())
            .collect(),
        "application/json" => vec![answer],
        _ => {
            assert!(answer.is_empty(), "{kind}: {answer}");
            Vec::new()
        }
    };
    for text in messages {
        match Envelope::parse(text.as_bytes(), OWN) {
            Ok(Incoming::One(one)) => said(&one, body),
            Ok(Incoming::Batch(batch)) => batch.iter().for_each(|one| said(one.as_ref().unwrap(), body)),
            Err(fault) => panic!("{text}: {fault:?}"),
        }
    }
    assert!(head.status.as_u16() < 500 || head.status == 503, "{}", head.status);
}

fn settings() -> (Settings, CancellationToken) {
    let (world, _) = machine::world();
    let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
    let shutdown = CancellationToken::new();
    let mut settings = Settings::new(world, ring, shutdown.clone());
    settings.max_body_bytes = LIMITS.bytes;
    settings.max_depth = LIMITS.depth;
    (settings, shutdown)
}

/// Gives back what it was handed, with a word of progress.
struct Echo;

impl Handler for Echo {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        ("fuzz", "0", Some("say \"anything\"\n"))
    }
    fn capabilities(&self, _revision: Revision) -> Box<RawValue> {
        RawValue::from_string(r#"{"tools":{}}"#.into()).unwrap()
    }
    fn input_schema(&self, tool: &str) -> Option<Box<RawValue>> {
        // The schema is a seller's: a tool's name of JSON is taken for one.
        RawValue::from_string(tool.to_owned()).ok()
    }
    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>> {
        Box::pin(async move {
            context.progress.report(1.0, Some(2.0), "half\nway");
            if let Some(meta) = &context.meta {
                let declared = json::member(meta, META_PROTOCOL_VERSION).and_then(json::string);
                if context.revision.stateless() {
                    assert_eq!(declared.as_deref(), Some(context.revision.as_str()));
                    assert!(json::member(meta, META_CLIENT_CAPABILITIES).is_some());
                    assert!(context.client_capabilities().is_some());
                }
            } else {
                assert!(!context.revision.stateless(), "a stateless request without _meta reached the handler");
            }
            if method == "error" {
                return Err(RpcError::method_not_found(method));
            }
            let echo = params.map(|params| format!(r#""echo":{params}"#)).unwrap_or_default();
            Ok(RawValue::from_string(format!("{{{echo}}}")).unwrap())
        })
    }
}
