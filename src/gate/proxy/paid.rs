//! A request for an item that may have a price: the gate decides, and the upstream is asked from inside of its decision.
//! Until the output may leave, the client gets progress numbers, and what the upstream asks the client; texts wait.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, select};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::events::Events;
use super::frames::{FrameBody, event};
use super::rewrite::{MAX_DEPTH, replacing};
use super::upstream::{Ask, Reply, UpstreamError};
use super::{Permit, Place, Proxy, headers, respond, source, unreachable};
use crate::gate::challenge::PAYMENT_HEADERS;
use crate::gate::desk::{Answer, Request};
use crate::gate::sell::Ran;
use crate::gate::{Kind, splice};
use crate::json::{self, Limits};
use crate::mcp::envelope::{self, Envelope, Outcome};
use crate::mcp::http::{Refused, not_found, refuse, status_of};
use crate::mcp::{RpcError, access, code, revision};
use crate::x402::{META_PAYMENT, META_PAYMENT_RESPONSE};

/// Frames that wait for the client to take them.
const WAITING: usize = 64;
/// Texts that wait for the settlement, at most: more are let go.
const MAX_HELD: usize = 256;
const MAX_HELD_BYTES: usize = 256 * 1_024;

pub(super) struct Sale {
    pub proxy: Arc<Proxy>,
    pub head: Parts,
    pub place: Place,
    pub id: Box<RawValue>,
    pub kind: Kind,
    pub name: String,
    pub params: Box<RawValue>,
}

/// What the run leaves beside its result.
#[derive(Default)]
struct Beside {
    /// Messages that may leave once the output may.
    held: Vec<String>,
    bytes: usize,
    /// The upstream does not know the session any more: the client must learn of it by the HTTP status.
    no_session: bool,
}

type Shared = Arc<Mutex<Beside>>;

impl Sale {
    pub(super) async fn answer(self, body: Bytes, permit: Permit) -> Result<Response, Refused> {
        let takes = access::accept(&self.head.headers);
        if !takes.json && !takes.stream {
            let error = RpcError::invalid_request("The answer is application/json or text/event-stream");
            return Err(Box::new(refuse(StatusCode::NOT_ACCEPTABLE, Some(&self.id), &error)));
        }
        let sale = Arc::new(self);
        let beside = Shared::default();
        let (out, mut frames) = mpsc::channel::<String>(WAITING);
        let left = CancellationToken::new();
        let guard = left.clone().drop_guard();
        let ours = json::raw(&format!("tollway-{}", hex::encode(sale.proxy.settings.front.world.random::<16>())));
        let run = Run {
            sale: sale.clone(),
            body: body.clone(),
            ours,
            cancel: CancellationToken::new(),
            out: takes.stream.then_some(out),
            beside: beside.clone(),
            // Up to 2025-11-25 a connection that is lost withdraws nothing.
            left: sale.place.revision.stateless().then_some(left),
        };
        let asking = sale.clone();
        let mut answering: BoxFuture<'static, Answer> = Box::pin(async move {
            let Sale { proxy, head, place, kind, params, .. } = &*asking;
            let source = source(head);
            let meta = json::member(params, "_meta");
            let request = Request {
                kind: *kind,
                params,
                revision: place.revision,
                client_capabilities: meta.and_then(|meta| json::member(meta, revision::META_CLIENT_CAPABILITIES)),
                session: place.session.as_ref().map(|session| session.name.as_str()),
                source: source.as_deref().unwrap_or("unknown"),
                payment_header: PAYMENT_HEADERS.iter().any(|name| head.headers.contains_key(*name)),
            };
            proxy.gate.answer(request, asking.described(), run.ran()).await
        });

        let front = &sale.proxy.settings.front;
        let patience = Instant::now() + front.stream_after;
        let first = {
            let slow = async {
                match takes.stream {
                    true => sleep_until(patience).await,
                    false => std::future::pending().await,
                }
            };
            let beside = async {
                match frames.recv().await {
                    Some(frame) => frame,
                    None => std::future::pending().await,
                }
            };
            match select(&mut answering, select(pin!(slow), pin!(beside))).await {
                Either::Left((answer, _)) => Ok(answer),
                Either::Right((Either::Left(_), _)) => Err(None),
                Either::Right((Either::Right((frame, _)), _)) => Err(Some(frame)),
            }
        };
        match first {
            Ok(Answer::Free) => {
                let _ = guard.disarm();
                let reply = sale.ask(body).await.map_err(|error| unreachable(Some(&sale.id), &error))?;
                Ok(sale.proxy.passed(reply, sale.place.session.as_ref(), permit))
            }
            Ok(answer) if takes.json => {
                let _ = guard.disarm();
                if lock(&beside).no_session && !has_receipt(&answer) {
                    return Err(not_found(Some(&sale.id)));
                }
                let status = sale.status(&answer);
                Ok(respond(status, typed("application/json"), Body::from(sale.text(answer, &beside).0)))
            }
            first => {
                let (pieces, body) = mpsc::channel::<Bytes>(WAITING);
                let task = sale.clone();
                front.world.spawn.spawn(Box::pin(async move {
                    let first = match first {
                        Ok(answer) => Either::Left(answer),
                        Err(frame) => Either::Right(frame),
                    };
                    task.stream(first, answering, frames, &beside, pieces).await;
                    drop(guard);
                }));
                let body = FrameBody::new(body, permit).keeping_alive(front.keep_alive);
                Ok(respond(StatusCode::OK, typed("text/event-stream"), Body::new(body)))
            }
        }
    }

    /// Frames as they come, then the answer.
    async fn stream(
        &self,
        first: Either<Answer, Option<String>>,
        mut answering: BoxFuture<'static, Answer>,
        mut frames: mpsc::Receiver<String>,
        beside: &Shared,
        pieces: mpsc::Sender<Bytes>,
    ) {
        let answer = match first {
            Either::Left(answer) => answer,
            Either::Right(frame) => {
                let mut next = frame;
                loop {
                    if let Some(frame) = next.take()
                        && pieces.send(event(frame)).await.is_err()
                    {
                        return;
                    }
                    let beside = async {
                        match frames.recv().await {
                            Some(frame) => frame,
                            None => std::future::pending().await,
                        }
                    };
                    let gone = pin!(pieces.closed());
                    match select(&mut answering, select(pin!(beside), gone)).await {
                        Either::Left((answer, _)) => break answer,
                        Either::Right((Either::Left((frame, _)), _)) => next = Some(frame),
                        Either::Right((Either::Right(_), _)) => return,
                    }
                }
            }
        };
        let answer = match answer {
            // Found free after a moment, so its answer follows on the stream that was begun.
            Answer::Free => Answer::Error(RpcError::internal("The price changed: repeat the request")),
            answer => answer,
        };
        while let Ok(frame) = frames.try_recv() {
            let _ = pieces.send(event(frame)).await;
        }
        let (text, held) = self.text(answer, beside);
        for text in held {
            let _ = pieces.send(event(text)).await;
        }
        let _ = pieces.send(event(text)).await;
    }

    /// The response, and the texts that may leave with it.
    fn text(&self, answer: Answer, beside: &Shared) -> (String, Vec<String>) {
        match answer {
            Answer::Result(result) => {
                let held = if is_sold(&result) { std::mem::take(&mut lock(beside).held) } else { Vec::new() };
                (envelope::result_response(&self.id, &self.whole(result)), held)
            }
            Answer::Error(mut error) => {
                if self.place.revision.stateless() && error.code == code::RESOURCE_NOT_FOUND {
                    error.code = code::INVALID_PARAMS;
                }
                (envelope::error_response(Some(&self.id), &error), Vec::new())
            }
            Answer::Free => {
                (envelope::error_response(Some(&self.id), &RpcError::internal("Internal error")), Vec::new())
            }
        }
    }

    /// With what 2026-07-28 demands of every result, and of one that could be kept, where it is not there.
    fn whole(&self, result: Box<RawValue>) -> Box<RawValue> {
        if !self.place.revision.stateless() {
            return result;
        }
        if json::member(&result, "resultType").is_some_and(|kind| kind.get() != r#""complete""#) {
            return result;
        }
        let mut demanded = vec![("resultType", r#""complete""#)];
        if self.kind == Kind::Resource {
            demanded.extend([("ttlMs", "0"), ("cacheScope", r#""private""#)]);
        }
        demanded.retain(|(name, _)| json::member(&result, name).is_none());
        if demanded.is_empty() { result } else { splice::with_members(&result, &demanded).unwrap_or(result) }
    }

    fn status(&self, answer: &Answer) -> StatusCode {
        match answer {
            Answer::Error(error) if self.place.revision.stateless() => status_of(error.code),
            _ => StatusCode::OK,
        }
    }

    pub(super) async fn ask(&self, body: Bytes) -> Result<Reply, UpstreamError> {
        self.proxy.ask(Method::POST, &self.head.headers, self.place.session.as_ref(), body).await
    }

    /// The request as the upstream gets it: with an id and a progress token that the client does not know, so that nothing
    /// it asks for beside can take the answer; and without the payment, which is none of the upstream's business.
    fn towards(&self, body: &Bytes, ours: &RawValue) -> Option<Bytes> {
        let bare = match json::member(&self.params, "_meta") {
            None => None,
            Some(meta) => {
                let bare = without_member(meta, META_PAYMENT)?;
                let has_token = json::member(&bare, "progressToken").is_some();
                Some(if has_token { splice::with_members(&bare, &[("progressToken", ours.get())])? } else { bare })
            }
        };
        let mut members: Vec<(&[&str], &str)> = vec![(&["id"], ours.get())];
        members.extend(bare.iter().map(|bare| (&["params", "_meta"][..], bare.get())));
        replacing(body, &members).map(Bytes::from)
    }

    fn progress_token(&self) -> Option<&RawValue> {
        json::member(&self.params, "_meta").and_then(|meta| json::member(meta, "progressToken"))
    }
}

/// Whether it says that money moved: then it is an answer, whatever else the client has to learn.
fn has_receipt(answer: &Answer) -> bool {
    let holder = match answer {
        Answer::Result(result) => json::member(result, "_meta"),
        Answer::Error(error) => error.data.as_deref(),
        Answer::Free => None,
    };
    holder.is_some_and(|holder| json::member(holder, META_PAYMENT_RESPONSE).is_some())
}

/// Whether the result is an output that was paid for: it has a receipt of success, and is no challenge.
fn is_sold(result: &RawValue) -> bool {
    let receipt = json::member(result, "_meta").and_then(|meta| json::member(meta, META_PAYMENT_RESPONSE));
    let success = receipt.and_then(|receipt| json::member(receipt, "success")).is_some_and(|yes| yes.get() == "true");
    let structured = json::member(result, "structuredContent");
    let challenge = json::member(result, "paymentRequired").is_some()
        || structured.is_some_and(|value| {
            json::member(value, "accepts").is_some() && json::member(value, "x402Version").is_some()
        });
    success && !challenge
}

fn lock(beside: &Shared) -> std::sync::MutexGuard<'_, Beside> {
    beside.lock().unwrap_or_else(PoisonError::into_inner)
}

fn typed(kind: &'static str) -> HeaderMap {
    let mut head = HeaderMap::new();
    head.insert(http::header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if kind == "text/event-stream" {
        head.insert("x-accel-buffering", HeaderValue::from_static("no"));
    }
    headers::unshared(&mut head);
    head
}

/// The upstream's part of a sale.
struct Run {
    sale: Arc<Sale>,
    body: Bytes,
    /// The request's id and progress token towards the upstream.
    ours: Box<RawValue>,
    /// The client withdraws it in so many words.
    cancel: CancellationToken,
    /// `None`: the client takes no stream.
    out: Option<mpsc::Sender<String>>,
    beside: Shared,
    /// The client is gone, which withdraws the request.
    left: Option<CancellationToken>,
}

impl Run {
    async fn ran(self) -> Ran {
        let (left, told) = (self.left.clone(), self.cancel.clone());
        let left = async move {
            match left {
                Some(left) => left.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let cancelled = async move {
            let (left, told) = (pin!(left), pin!(told.cancelled_owned()));
            select(left, told).await;
        };
        let _entry = {
            let Sale { proxy, place, id, .. } = &*self.sale;
            proxy.sales.begin(place.session.as_ref(), id, &self.ours, &self.cancel)
        };
        let over = sleep(self.sale.proxy.settings.run);
        match select(pin!(self.run()), select(pin!(cancelled), pin!(over))).await {
            Either::Left((ran, _)) => ran,
            Either::Right((Either::Left(_), _)) => Ran::Error(RpcError::internal("The request was cancelled")),
            Either::Right((Either::Right(_), _)) => Ran::Error(RpcError::internal("The request took too long")),
        }
    }

    async fn run(&self) -> Ran {
        let Settings { limit, idle } = self.settings();
        let Sale { proxy, head, place, .. } = &*self.sale;
        let Some(body) = self.sale.towards(&self.body, &self.ours) else {
            return Ran::Error(RpcError::internal("Internal error"));
        };
        let ask = proxy.asking(Method::POST, &head.headers, place.session.as_ref(), body);
        let mut reply = match proxy.upstream.ask(Ask { sold: true, ..ask }).await {
            Ok(reply) => reply,
            Err(UpstreamError::NoSession) => return self.no_session(),
            Err(error) => return gone(&error),
        };
        if reply.status == StatusCode::NOT_FOUND && self.sale.place.session.is_some() {
            return self.no_session();
        }
        if !headers::is_stream(&reply.headers) {
            let whole = match reply.body.whole(limit, self.sale.proxy.settings.run).await {
                Ok(whole) => whole,
                Err(error) => return gone(&error.into()),
            };
            return self.read(&whole).unwrap_or_else(|| {
                tracing::warn!(status = reply.status.as_u16(), "the upstream gave no answer to a priced request");
                Ran::Error(RpcError::internal("The MCP server behind this gate gave no usable answer"))
            });
        }
        let (mut events, mut found) = (Events::new(limit), Vec::new());
        loop {
            match reply.body.chunk(idle).await {
                Ok(Some(piece)) => {
                    let fits = events.push(&piece, &mut found);
                    for event in found.drain(..) {
                        let Some(data) = event.data else { continue };
                        if let Some(ran) = self.read(&data) {
                            return ran;
                        }
                    }
                    if fits.is_err() {
                        return gone(&crate::http::HttpError::TooLarge(limit).into());
                    }
                }
                Ok(None) => {
                    tracing::warn!("the upstream's stream ended without the answer to a priced request");
                    return Ran::Error(RpcError::internal("The MCP server behind this gate gave no answer"));
                }
                Err(error) => return gone(&error.into()),
            }
        }
    }

    fn no_session(&self) -> Ran {
        lock(&self.beside).no_session = true;
        Ran::Error(RpcError::invalid_request("Session not found: initialize again"))
    }

    fn settings(&self) -> Settings {
        let settings = &self.sale.proxy.settings;
        Settings { limit: settings.max_answer_bytes, idle: settings.idle }
    }

    /// One message of the upstream: its answer, or something beside it.
    fn read(&self, data: &[u8]) -> Option<Ran> {
        let limits = Limits { bytes: self.settings().limit, depth: MAX_DEPTH };
        let message = match Envelope::parse_one(data, limits) {
            Ok(message) => message,
            Err(fault) => {
                let answers = fault.id.as_ref().is_some_and(|id| json::equal(id, &self.ours));
                return answers.then(|| gone_with("an answer that cannot be read"));
            }
        };
        match message {
            Envelope::Response { id: Some(id), outcome } if json::equal(&id, &self.ours) => {
                Some(ran(outcome, self.sale.place.revision.stateless()))
            }
            Envelope::Response { .. } => None,
            Envelope::Request { .. } => {
                self.beside(String::from_utf8_lossy(data).into_owned());
                None
            }
            Envelope::Notification { method, params } if method == "notifications/progress" => {
                let (params, token) = (params?, self.sale.progress_token()?);
                if json::equal(json::member(&params, "progressToken")?, &self.ours) {
                    self.beside(envelope::notification(&method, Some(&numbers(&params, token)?)));
                }
                None
            }
            Envelope::Notification { .. } => {
                let mut beside = lock(&self.beside);
                if beside.held.len() < MAX_HELD && beside.bytes + data.len() <= MAX_HELD_BYTES {
                    beside.bytes += data.len();
                    beside.held.push(String::from_utf8_lossy(data).into_owned());
                }
                None
            }
        }
    }

    /// A client that is too slow to take it goes without.
    fn beside(&self, text: String) {
        if let Some(out) = &self.out {
            let _ = out.try_send(text);
        }
    }
}

struct Settings {
    limit: usize,
    idle: std::time::Duration,
}

fn gone(error: &UpstreamError) -> Ran {
    tracing::warn!(%error, "the upstream did not answer a priced request");
    Ran::Error(RpcError::internal("The MCP server behind this gate did not answer"))
}

fn gone_with(problem: &str) -> Ran {
    tracing::warn!(problem, "the upstream's answer to a priced request cannot be used");
    Ran::Error(RpcError::internal("The MCP server behind this gate gave no usable answer"))
}

/// `typed`: the revision says what a `resultType` is; in others a server may mean anything by it.
fn ran(outcome: Outcome, typed: bool) -> Ran {
    let result = match outcome {
        Outcome::Result(result) => result,
        Outcome::Error(error) => return Ran::Error(rpc_error(&error)),
    };
    let Ok(members) = json::members(&result) else { return gone_with("a result that is no object") };
    let text = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| value.get());
    match (text("resultType"), text("isError")) {
        (Some(r#""input_required""#), _) => Ran::Asks(result),
        (_, Some("true")) => Ran::Failed(result),
        // A task, a demand of its own, whatever comes later: not what was paid for.
        (Some(kind), _) if typed && kind != r#""complete""# => Ran::Failed(result),
        _ => Ran::Output(result),
    }
}

pub(super) fn rpc_error(error: &RawValue) -> RpcError {
    let code = json::member(error, "code").and_then(|code| code.get().parse().ok()).unwrap_or(code::INTERNAL);
    let message = json::member(error, "message").and_then(json::string).unwrap_or_default().into_owned();
    RpcError { code, message, data: json::member(error, "data").map(ToOwned::to_owned) }
}

/// A progress notification's params with the client's own token and without its text: what is not paid for yet could be
/// in it.
fn numbers(params: &RawValue, token: &RawValue) -> Option<Box<RawValue>> {
    let numbers = ["progress", "total"]
        .into_iter()
        .filter_map(|name| Some((name, json::member(params, name)?)))
        .filter(|(_, value)| !value.get().starts_with(['"', '{', '[']));
    let kept: Vec<(&str, &RawValue)> = std::iter::once(("progressToken", token)).chain(numbers).collect();
    let empty = json::raw(&serde_json::Map::new());
    let kept: Vec<(&str, &str)> = kept.into_iter().map(|(name, value)| (name, value.get())).collect();
    splice::with_members(&empty, &kept)
}

/// The object without this member, the others byte for byte.
fn without_member(object: &RawValue, name: &str) -> Option<Box<RawValue>> {
    let members = json::members(object).ok()?;
    let kept =
        members.iter().filter(|(key, _)| key != name).map(|(key, value)| format!("{}:{value}", json::raw(&**key)));
    RawValue::from_string(format!("{{{}}}", kept.collect::<Vec<_>>().join(","))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn progress_leaves_as_numbers_alone() {
        let params = r#"{"message":"secret","progressToken":"t","total":1e2,"progress":1.50,"x":"secret","_meta":{}}"#;
        let token = raw("7");
        assert_eq!(numbers(&raw(params), &token).unwrap().get(), r#"{"progressToken":7,"progress":1.50,"total":1e2}"#);
        let smuggled = r#"{"progressToken":1,"progress":"secret","total":["secret"]}"#;
        assert_eq!(numbers(&raw(smuggled), &token).unwrap().get(), r#"{"progressToken":7}"#);
    }

    #[test]
    fn a_member_goes_and_the_others_stay_as_they_are() {
        let object = raw(r#"{ "z": 1.50, "a\"b" : {"a":1e2 }, "x":"old" }"#);
        assert_eq!(without_member(&object, "x").unwrap().get(), r#"{"z":1.50,"a\"b":{"a":1e2 }}"#);
        assert_eq!(without_member(&raw(r#"{"x":1}"#), "x").unwrap().get(), "{}");
    }

    #[test]
    fn what_the_upstream_did_is_read_from_its_answer() {
        let of = |text: &str| ran(Outcome::Result(raw(text)), true);
        assert!(matches!(of(r#"{"content":[]}"#), Ran::Output(_)));
        assert!(matches!(of(r#"{"content":[],"isError":false,"resultType":"complete"}"#), Ran::Output(_)));
        assert!(matches!(of(r#"{"content":[],"isError":true}"#), Ran::Failed(_)));
        assert!(matches!(of(r#"{"resultType":"input_required"}"#), Ran::Asks(_)));
        for other in ["\"task\"", "\"payment_required\"", "\"later\"", "7", "null"] {
            let text = format!(r#"{{"content":[],"resultType":{other}}}"#);
            assert!(matches!(of(&text), Ran::Failed(_)), "{text}");
            assert!(matches!(ran(Outcome::Result(raw(&text)), false), Ran::Output(_)), "{text}");
        }
        assert!(matches!(of("[]"), Ran::Error(_)));
        let error = Outcome::Error(raw(r#"{"code":-7,"message":"no","data":{"n":1.0}}"#));
        let Ran::Error(error) = ran(error, true) else { panic!("no error") };
        assert_eq!((error.code, error.message.as_str(), error.data.unwrap().get()), (-7, "no", r#"{"n":1.0}"#));
    }

    #[test]
    fn what_was_charged_is_an_answer_and_no_bare_404() {
        let receipt = r#"{"x402/payment-response":{"success":true}}"#;
        let error = RpcError { data: Some(raw(receipt)), ..RpcError::invalid_request("Session not found") };
        assert!(has_receipt(&Answer::Error(error)));
        assert!(has_receipt(&Answer::Result(raw(&format!(r#"{{"content":[],"_meta":{receipt}}}"#)))));
        assert!(!has_receipt(&Answer::Error(RpcError::invalid_request("Session not found"))));
        assert!(!has_receipt(&Answer::Result(raw(r#"{"content":[],"_meta":{}}"#))));
    }

    #[test]
    fn texts_leave_with_an_output_and_not_with_a_challenge() {
        let receipt = r#""_meta":{"x402/payment-response":{"success":true}}"#;
        assert!(is_sold(&raw(&format!(r#"{{"content":[],{receipt}}}"#))));
        for other in [
            r#"{"content":[]}"#.to_owned(),
            r#"{"_meta":{"x402/payment-response":{"success":false}}}"#.to_owned(),
            format!(r#"{{"resultType":"payment_required","paymentRequired":{{}},{receipt}}}"#),
            format!(r#"{{"isError":true,"structuredContent":{{"x402Version":2,"accepts":[]}},{receipt}}}"#),
        ] {
            assert!(!is_sold(&raw(&other)), "{other}");
        }
    }
}
