//! Streamable HTTP: `POST`, `GET` and `DELETE /mcp`. A session is a signed token without a row; DELETE leaves a tombstone
//! where the handler has a place for it, and is answered 405 elsewhere, as the specification allows.
//!
//! In the order of the checks: where the request comes from (Host, Origin), who asks, how much is going on, what is
//! sent, then the envelope, then the revision. A request of 2026-07-28 declares itself in `_meta`; all else belongs to
//! a session that `initialize` began.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::from_fn;
use axum::response::Response;
use axum::routing::{any, get};
use bytes::{Bytes, BytesMut};
use futures_util::future::{Either, select};
use http::header::{
    ACCEPT_ENCODING, ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep_until, timeout};

use super::auth::{Denied, WELL_KNOWN};
use super::body::{AnswerBody, Permit, Withdraw, sse_event};
use super::counted;
use super::dispatch::{Answer, Call, Event, Front};
use super::ended::{Open, Sessions};
use super::envelope::{self, Envelope, Fault, Incoming};
use super::rate::{Buckets, Peer, RateLimit};
use super::session::{self, Session};
use super::{
    Authenticator, Claims, Handler, Identity, Revision, RpcError, Settings, access, bounded, code, headers, revision,
};
use crate::json;
use crate::money::AgentId;

/// The front of `handler` over HTTP, at `/mcp`, and the metadata of it as a protected resource.
pub fn router(settings: Settings, handler: Arc<dyn Handler>, authenticator: Authenticator) -> axum::Router {
    fronts(settings, handler, authenticator).public
}

/// What a replica serves.
pub struct Fronts {
    /// For everybody: `/mcp`, and the transport of 2024-11-05 where [`Settings::legacy_sse`] has it.
    pub public: axum::Router,
    /// For the other replicas, on a listener of its own ([`Relay::at`](super::Relay)).
    pub relay: Option<axum::Router>,
}

/// The same with what other replicas hand over.
pub fn fronts(settings: Settings, handler: Arc<dyn Handler>, authenticator: Authenticator) -> Fronts {
    let door = Arc::new(Door {
        rates: settings.rate_limit.map(Buckets::new),
        failures: Buckets::new(FAILURES),
        calls: Arc::new(Semaphore::new(settings.max_concurrent_requests)),
        streams: Arc::new(Semaphore::new(settings.max_streams)),
        front: Arc::new(Front::new(settings.clone(), handler.clone(), &Revision::HTTP)),
        authenticator,
        sessions: Sessions::default(),
    });
    let mut public = axum::Router::new()
        .route("/mcp", any(mcp))
        .route(WELL_KNOWN, get(metadata))
        .route(&format!("{WELL_KNOWN}/mcp"), get(metadata))
        .with_state(door.clone());
    let mut relay = None;
    if let Some(legacy) = settings.legacy_sse.clone() {
        let (routes, beside) = super::legacy::routers(&door, &settings, handler, legacy);
        public = public.merge(routes);
        relay = beside;
    }
    Fronts { public: public.layer(from_fn(counted::counted)), relay }
}

pub(super) struct Door {
    front: Arc<Front>,
    authenticator: Authenticator,
    /// Requests, by agent; by source address where there is none.
    rates: Option<Buckets>,
    /// Tokens that were refused, by source address.
    failures: Buckets,
    pub(super) calls: Arc<Semaphore>,
    pub(super) streams: Arc<Semaphore>,
    sessions: Sessions,
}

/// The request is answered with this, before or instead of a call.
pub(crate) type Refused = Box<Response>;

/// Refused tokens of one source address. One that sends more still gets in with a good key or token; nobody else is
/// asked about its tokens any more.
const FAILURES: RateLimit = RateLimit { per_second: 5, burst: 50 };

async fn mcp(State(door): State<Arc<Door>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let identity = match door.admit(&head).await {
        Ok(identity) => identity,
        Err(refused) => return *refused,
    };
    // Whatever the request is: a proxy might have routed on the other one.
    for name in [headers::SESSION_ID, headers::PROTOCOL_VERSION] {
        if let Err(reason) = headers::single(&head.headers, name) {
            let error = RpcError::new(code::HEADER_MISMATCH, format!("Header mismatch: {reason}"));
            return refuse(StatusCode::BAD_REQUEST, None, &error);
        }
    }
    match head.method {
        Method::POST => door.post(&head.headers, body, identity).await.unwrap_or_else(|refused| *refused),
        Method::GET => door.get(&head.headers, identity.agent).await.unwrap_or_else(|refused| *refused),
        Method::DELETE if door.front.handler.ends_sessions() => {
            door.delete(&head.headers, identity.agent).await.unwrap_or_else(|refused| *refused)
        }
        _ if door.front.handler.ends_sessions() => method_not_allowed("GET, POST, DELETE"),
        _ => method_not_allowed("GET, POST"),
    }
}

/// RFC 9728 section 3: for everybody, and not there where everybody may ask.
async fn metadata(State(door): State<Arc<Door>>, request: Request) -> Response {
    let settings = &door.front.settings;
    if let Err(reason) = access::host(request.headers(), request.uri(), &settings.allowed_hosts) {
        return refuse(StatusCode::FORBIDDEN, None, &RpcError::invalid_request(reason));
    }
    match settings.resource.document(request.headers()) {
        Some(document) if !door.authenticator.is_public() => fixed(StatusCode::OK, "application/json", document),
        _ => refuse(StatusCode::NOT_FOUND, None, &RpcError::invalid_request("There is nothing here")),
    }
}

impl Door {
    /// Where the request comes from (Host, Origin), who asks, and whether that caller asks too often.
    pub(super) async fn admit(&self, head: &Parts) -> Result<Identity, Refused> {
        let settings = &self.front.settings;
        access::host(&head.headers, &head.uri, &settings.allowed_hosts)
            .and_then(|()| access::origin(&head.headers, &settings.allowed_origins))
            .map_err(|reason| Box::new(refuse(StatusCode::FORBIDDEN, None, &RpcError::invalid_request(reason))))?;
        let source = head.extensions.get::<Peer>().map(|peer| peer.key());
        let may_ask = source.as_deref().is_none_or(|source| self.failures.has_one(source));
        let identity = match self.authenticator.authenticate(&head.headers, may_ask).await {
            Ok(identity) => identity,
            Err(denied) => return Err(self.denied(denied, &head.headers, source.as_deref())),
        };
        let caller = identity.agent.as_ref().map(AgentId::as_str).or(source.as_deref());
        if let (Some(rates), Some(caller)) = (&self.rates, caller) {
            rates.take(caller, 1).map_err(too_often)?;
        }
        Ok(identity)
    }

    fn denied(&self, denied: Denied, headers: &HeaderMap, source: Option<&str>) -> Refused {
        let unauthorized = |token_given| {
            let error = RpcError::invalid_request("A bearer token is needed: Authorization: Bearer <token>");
            let mut response = refuse(StatusCode::UNAUTHORIZED, None, &error);
            let challenge = self.front.settings.resource.challenge(headers, token_given);
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
            Box::new(response)
        };
        match denied {
            Denied::Missing => unauthorized(false),
            Denied::Invalid(method, reason) => {
                let counted = source.map_or(Ok(()), |source| self.failures.take(source, 1));
                if let Err(wait) = counted {
                    return too_often(wait);
                }
                tracing::info!(method, reason, "a bearer token was refused");
                unauthorized(true)
            }
            Denied::WouldAsk => too_often(Duration::from_secs(1)),
            Denied::Unavailable => {
                let error = RpcError::internal("Tokens cannot be verified at the moment: try again");
                let mut response = refuse(StatusCode::SERVICE_UNAVAILABLE, None, &error);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                Box::new(response)
            }
        }
    }

    /// The stream of an old session for what the server has to say by itself, which is nothing but that it lives.
    async fn get(&self, headers: &HeaderMap, agent: Option<AgentId>) -> Result<Response, Refused> {
        if !headers.contains_key(headers::SESSION_ID) {
            return Err(Box::new(method_not_allowed("POST")));
        }
        let (session, open) = self.stream(headers, agent.as_ref()).await?;
        if !access::accept(headers).stream {
            let error = RpcError::invalid_request("GET is answered with text/event-stream only");
            return Err(Box::new(refuse(StatusCode::NOT_ACCEPTABLE, None, &error)));
        }
        let permit = permit(&self.streams, 1)?;
        let ended = self.front.streams_end.clone();
        let left = session.expires_ms.saturating_sub(self.front.settings.world.unix_ms());
        let expired = Instant::now() + Duration::from_millis(left);
        let close = Box::pin(async move {
            let (over, expired) = (pin!(open.over()), pin!(sleep_until(expired)));
            select(pin!(ended.cancelled()), select(over, expired)).await;
        });
        Ok(AnswerBody::idle(&self.front, close, permit).into_response(StatusCode::OK))
    }

    /// Calls in flight finish, streams close, and the session is unknown from here on. Ended twice is ended.
    async fn delete(&self, headers: &HeaderMap, agent: Option<AgentId>) -> Result<Response, Refused> {
        if !headers.contains_key(headers::SESSION_ID) {
            return Err(Box::new(method_not_allowed("POST")));
        }
        let session = self.verified(headers, agent.as_ref(), None)?;
        if let Err(error) = self.front.handler.end_session(&session.name, session.expires_ms).await {
            return Err(Box::new(refuse(StatusCode::SERVICE_UNAVAILABLE, None, &error)));
        }
        self.sessions.ended(&session.name);
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Ok(response)
    }

    async fn post(&self, headers: &HeaderMap, body: Body, identity: Identity) -> Result<Response, Refused> {
        let permit = permit(&self.calls, 1)?;
        sent_as_json(headers)?;
        let takes = access::accept(headers);
        let stream = match takes {
            access::Takes { json: true, stream: false } => Stream::Never,
            access::Takes { json: true, stream: true } => Stream::WhenSlow,
            access::Takes { json: false, stream: true } => Stream::Always,
            access::Takes { json: false, stream: false } => {
                let error = RpcError::invalid_request("The answer is application/json or text/event-stream");
                return Err(Box::new(refuse(StatusCode::NOT_ACCEPTABLE, None, &error)));
            }
        };
        let body = self.read(headers, body).await?;
        let incoming = Envelope::parse(&body, self.front.settings.limits()).map_err(|fault| {
            let status = if fault.too_large { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
            Box::new(refuse(status, fault.id.as_deref(), &fault.error))
        })?;
        drop(body);
        let Identity { agent, claims } = identity;
        let caller = Caller { headers, agent, claims, stream, permit };
        let asked = counted::asked(&incoming);
        let answered = match incoming {
            Incoming::One(Envelope::Request { id, method, params }) => self.request(caller, id, method, params).await,
            Incoming::One(envelope) => self.told(&caller, envelope).await,
            Incoming::Batch(batch) => self.batch(caller, batch).await,
        };
        Ok(counted::of(asked, answered.unwrap_or_else(|refused| *refused)))
    }

    /// The whole body, within its limits of bytes and time.
    pub(super) async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, Refused> {
        self.read_at_most(self.front.settings.max_body_bytes, headers, body).await
    }

    pub(super) async fn read_at_most(&self, limit: usize, headers: &HeaderMap, body: Body) -> Result<Bytes, Refused> {
        read_body(limit, self.front.settings.body_timeout, headers, body).await
    }

    async fn request(
        &self,
        caller: Caller<'_>,
        id: Box<RawValue>,
        method: String,
        params: Option<Box<RawValue>>,
    ) -> Result<Response, Refused> {
        let bad = |error: RpcError| Box::new(refuse(StatusCode::BAD_REQUEST, Some(&id), &error));
        let mismatch = |reason: String| bad(RpcError::new(code::HEADER_MISMATCH, format!("Header mismatch: {reason}")));
        let header = headers::single(caller.headers, headers::PROTOCOL_VERSION).map_err(mismatch)?;
        let declared = revision::declared(params.as_deref());
        let (revision, session) = match era(header, declared, &method, caller.headers) {
            Era::Stateless => {
                let version = declared.and_then(json::string);
                match (&version, header) {
                    (Some(_), None) => return Err(mismatch("the MCP-Protocol-Version header is missing".into())),
                    (Some(version), Some(header)) if *version != header => {
                        let (header, version) = (bounded(header), bounded(version));
                        return Err(mismatch(format!("MCP-Protocol-Version is {header:?} but _meta has {version:?}")));
                    }
                    _ => {}
                }
                revision::check_meta(params.as_deref(), self.front.supported).map_err(bad)?;
                let schema = match method.as_str() {
                    "tools/call" => params.as_deref().and_then(|p| json::member(p, "name")).and_then(json::string),
                    _ => None,
                };
                let schema = schema.and_then(|tool| self.front.handler.input_schema(&tool));
                headers::check(caller.headers, &method, params.as_deref(), schema.as_deref()).map_err(mismatch)?;
                (Revision::V2026_07_28, None)
            }
            Era::Unknown(version) => return Err(bad(revision::unsupported(version, self.front.supported))),
            Era::Session if method == "initialize" => return self.initialize(&caller, &id, params.as_deref()),
            Era::Session => {
                let session = self.session(caller.headers, caller.agent.as_ref(), Some(&id)).await?;
                let agreed = session.revision.as_str();
                if let Some(other) = declared.and_then(json::string).filter(|version| *version != agreed) {
                    let other = bounded(&other);
                    let reason = format!("Invalid request: _meta has {other:?} but the session's is {agreed:?}");
                    return Err(bad(RpcError::invalid_request(reason)));
                }
                (session.revision, Some(session.name))
            }
        };
        let (agent, claims) = (caller.agent.clone(), caller.claims.clone());
        let call = Call { revision, agent, session, claims, id, method, params };
        if revision.stateless() && call.method == "subscriptions/listen" {
            return self.listen(caller, call);
        }
        Ok(self.run(caller, vec![call], Vec::new(), false).await)
    }

    fn initialize(&self, caller: &Caller<'_>, id: &RawValue, params: Option<&RawValue>) -> Result<Response, Refused> {
        let (revision, result) = match self.front.initialize(params) {
            Ok(initialized) => initialized,
            Err(error) => return Ok(refuse(StatusCode::OK, Some(id), &error)),
        };
        let text = envelope::result_response(id, &result);
        let mut response = match caller.stream {
            Stream::Always => fixed(StatusCode::OK, "text/event-stream", sse_event(text)),
            _ => fixed(StatusCode::OK, "application/json", text),
        };
        let token = session::issue(&self.front.settings, revision, caller.agent.as_ref());
        if let Some(session) = session::verify(&self.front.settings, &token, caller.agent.as_ref()) {
            self.sessions.lives(&session.name);
        }
        if let Ok(token) = HeaderValue::from_str(&token) {
            response.headers_mut().insert(headers::SESSION_ID, token);
        }
        Ok(response)
    }

    /// A notification, or an answer to something that we never ask.
    async fn told(&self, caller: &Caller<'_>, envelope: Envelope) -> Result<Response, Refused> {
        let bad = |reason: String| Box::new(refuse(StatusCode::BAD_REQUEST, None, &RpcError::invalid_request(reason)));
        if matches!(&envelope, Envelope::Response { id: None, .. }) {
            return Err(bad("Invalid request: the id of a response must be a string or an integer".into()));
        }
        let header = headers::single(caller.headers, headers::PROTOCOL_VERSION).map_err(bad)?;
        let session = match era(header, None, "", caller.headers) {
            // 2026-07-28 over HTTP: closing the stream cancels, and no notification means anything.
            Era::Stateless => None,
            Era::Unknown(version) => {
                let error = revision::unsupported(version, self.front.supported);
                return Err(Box::new(refuse(StatusCode::BAD_REQUEST, None, &error)));
            }
            Era::Session => Some(self.session(caller.headers, caller.agent.as_ref(), None).await?),
        };
        self.heard(session.as_ref(), &envelope);
        Ok(accepted())
    }

    fn heard(&self, session: Option<&Session>, envelope: &Envelope) {
        if let Envelope::Notification { method, params } = envelope {
            self.front.notified(session.map(|session| session.name.as_str()), method, params.as_deref());
        }
    }

    /// 2025-03-26 alone has batches, so a batch needs a session of that revision.
    async fn batch(&self, mut caller: Caller<'_>, batch: Vec<Result<Envelope, Fault>>) -> Result<Response, Refused> {
        let no_batches = || Box::new(refuse(StatusCode::BAD_REQUEST, None, &envelope::no_batches().error));
        let header = headers::single(caller.headers, headers::PROTOCOL_VERSION).map_err(|_| no_batches())?;
        if header.is_some_and(|header| !Revision::parse(header).is_some_and(Revision::has_batches)) {
            return Err(no_batches());
        }
        let session = self.session(caller.headers, caller.agent.as_ref(), None).await?;
        if !session.revision.has_batches() {
            return Err(no_batches());
        }
        let (mut calls, mut refused) = (Vec::new(), Vec::new());
        for message in batch {
            match message {
                Ok(Envelope::Request { id, method, .. }) if method == "initialize" => {
                    let error = RpcError::invalid_request("Invalid request: initialize must not be in a batch");
                    refused.push(Answer::error(Some(&id), &error));
                }
                Ok(Envelope::Request { id, method, params }) => {
                    let (agent, claims) = (caller.agent.clone(), caller.claims.clone());
                    let (revision, session) = (session.revision, Some(session.name.clone()));
                    calls.push(Call { revision, agent, session, claims, id, method, params });
                }
                Ok(envelope) => self.heard(Some(&session), &envelope),
                Err(fault) => refused.push(Answer::error(fault.id.as_deref(), &fault.error)),
            }
        }
        if calls.is_empty() && refused.is_empty() {
            return Ok(accepted());
        }
        // Each call of a batch counts, and takes a place of its own; the first has the request's.
        if let Some(more) = u32::try_from(calls.len()).ok().filter(|calls| *calls > 1) {
            if let (Some(rates), Some(agent)) = (&self.rates, &caller.agent) {
                rates.take(agent.as_str(), more - 1).map_err(too_often)?;
            }
            drop(caller.permit);
            caller.permit = permit(&self.calls, more)?;
        }
        Ok(self.run(caller, calls, refused, true).await)
    }

    /// Starts the calls, and answers as JSON or, once it takes long or there is progress to show, as a stream.
    async fn run(&self, caller: Caller<'_>, calls: Vec<Call>, refused: Vec<Answer>, batch: bool) -> Response {
        let front = &self.front;
        let stateless = calls.first().is_some_and(|call| call.revision.stateless());
        let expected = calls.len() + refused.len();
        let id = calls.first().map(|call| call.id.clone());
        let (out, mut events) = mpsc::channel(32.max(expected));
        let tokens = calls.into_iter().map(|call| front.start(call, out.clone(), caller.permit.clone())).collect();
        drop(out);
        let withdraw = Withdraw::new(tokens);
        let mut answers = refused;
        let patience = match caller.stream {
            Stream::WhenSlow => Some(Instant::now() + front.settings.stream_after),
            Stream::Never | Stream::Always => None,
        };
        let mut deadline = pin!(front.deadline());
        let streams = loop {
            if caller.stream == Stream::Always {
                break Some(None);
            }
            if answers.len() >= expected {
                break None;
            }
            let slow = async {
                match patience {
                    Some(patience) => sleep_until(patience).await,
                    None => std::future::pending().await,
                }
            };
            let mut slow = pin!(slow);
            let give_up = select(deadline.as_mut(), slow.as_mut());
            match select(pin!(events.recv()), give_up).await {
                Either::Left((Some(Event::Answer(answer)), _)) => answers.push(answer),
                Either::Left((Some(progress @ Event::Notification(_)), _)) => {
                    if patience.is_some() {
                        break Some(Some(progress));
                    }
                }
                Either::Left((None, _)) => break None,
                Either::Right((Either::Left(_), _)) => {
                    let error = RpcError::internal("The server is shutting down");
                    return closing(refuse(StatusCode::SERVICE_UNAVAILABLE, id.as_deref(), &error));
                }
                Either::Right((Either::Right(_), _)) => break Some(None),
            }
        };
        if let Some(progress) = streams {
            let first = answers.into_iter().map(Event::Answer).chain(progress).collect();
            return AnswerBody::events(front, first, events, expected, withdraw, caller.permit)
                .into_response(StatusCode::OK);
        }
        if answers.is_empty() {
            return refuse(StatusCode::INTERNAL_SERVER_ERROR, id.as_deref(), &RpcError::internal("Internal error"));
        }
        let status = match answers.first() {
            Some(Answer { error: Some(code), .. }) if stateless => status_of(*code),
            _ => StatusCode::OK,
        };
        let (mut texts, mut deliveries) = (Vec::new(), Vec::new());
        for answer in answers {
            texts.push(answer.text);
            deliveries.extend(answer.deliveries);
        }
        let text = if batch { format!("[{}]", texts.join(",")) } else { texts.swap_remove(0) };
        AnswerBody::json(front, text, deliveries, withdraw, caller.permit).into_response(status)
    }

    /// A subscription is a stream of its own and takes no place among the calls.
    fn listen(&self, caller: Caller<'_>, call: Call) -> Result<Response, Refused> {
        if caller.stream == Stream::Never {
            let error = RpcError::invalid_request("subscriptions/listen is answered with text/event-stream only");
            return Err(Box::new(refuse(StatusCode::NOT_ACCEPTABLE, Some(&call.id), &error)));
        }
        let permit = permit(&self.streams, 1)?;
        let (out, events) = mpsc::channel(32);
        let withdraw = Withdraw::new(vec![self.front.start(call, out, permit.clone())]);
        Ok(AnswerBody::events(&self.front, Vec::new(), events, 1, withdraw, permit).into_response(StatusCode::OK))
    }

    /// The session of the request: 400 without one, 404 for one that is unknown, over, ended, or another agent's.
    async fn session(
        &self,
        headers: &HeaderMap,
        agent: Option<&AgentId>,
        id: Option<&RawValue>,
    ) -> Result<Session, Refused> {
        let session = self.verified(headers, agent, id)?;
        match self.sessions.check(&*self.front.handler, &session).await {
            true => Ok(session),
            false => Err(not_found(id)),
        }
    }

    /// The same for a stream, which ends with its session.
    async fn stream(&self, headers: &HeaderMap, agent: Option<&AgentId>) -> Result<(Session, Open), Refused> {
        let open = self.sessions.open(&self.verified(headers, agent, None)?.name);
        Ok((self.session(headers, agent, None).await?, open))
    }

    /// What a good token says; whether the session was ended is another question.
    fn verified(
        &self,
        headers: &HeaderMap,
        agent: Option<&AgentId>,
        id: Option<&RawValue>,
    ) -> Result<Session, Refused> {
        let respond = refuse;
        let refuse = |status, reason: &str| Box::new(respond(status, id, &RpcError::invalid_request(reason)));
        match headers::single(headers, headers::SESSION_ID) {
            Ok(Some(token)) => {
                let session = session::verify(&self.front.settings, token, agent).ok_or_else(|| not_found(id))?;
                // 2025-03-26 has no such header: absent, the session knows.
                match headers::single(headers, headers::PROTOCOL_VERSION) {
                    Ok(None) => Ok(session),
                    Ok(Some(header)) if header == session.revision.as_str() => Ok(session),
                    Ok(Some(header)) if Revision::parse(header).is_none() => {
                        let error = revision::unsupported(header, self.front.supported);
                        Err(Box::new(respond(StatusCode::BAD_REQUEST, id, &error)))
                    }
                    Ok(Some(header)) => {
                        let (header, agreed) = (bounded(header), session.revision.as_str());
                        let reason = format!("MCP-Protocol-Version is {header:?} but the session's is {agreed:?}");
                        Err(refuse(StatusCode::BAD_REQUEST, &reason))
                    }
                    Err(reason) => Err(refuse(StatusCode::BAD_REQUEST, &reason)),
                }
            }
            Ok(None) => {
                let reason = "The Mcp-Session-Id header is missing: initialize first, or declare 2026-07-28 in _meta";
                Err(refuse(StatusCode::BAD_REQUEST, reason))
            }
            Err(reason) => Err(refuse(StatusCode::BAD_REQUEST, &reason)),
        }
    }
}

/// What all of a POST's paths need.
struct Caller<'a> {
    headers: &'a HeaderMap,
    agent: Option<AgentId>,
    claims: Claims,
    stream: Stream,
    permit: Permit,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stream {
    Never,
    WhenSlow,
    Always,
}

enum Era<'a> {
    Stateless,
    Session,
    /// A revision that is not ours.
    Unknown(&'a str),
}

/// Which rules a message is under (basic/versioning, "Backward Compatibility with Initialization-Based Versions").
fn era<'a>(header: Option<&'a str>, declared: Option<&RawValue>, method: &str, headers: &HeaderMap) -> Era<'a> {
    let known = declared.and_then(json::string).and_then(|text| Revision::parse(&text));
    // A client that fell back to a handshake may go on to say so in each request.
    let falls_back = known.is_some_and(|known| !known.stateless()) && headers.contains_key(headers::SESSION_ID);
    if method == "server/discover" || (declared.is_some() && !falls_back) {
        return Era::Stateless;
    }
    match header.map(|header| (header, Revision::parse(header))) {
        _ if method == "initialize" => Era::Session,
        Some((_, Some(revision))) if revision.stateless() => Era::Stateless,
        Some((header, None)) => Era::Unknown(header),
        Some((_, Some(_))) | None => Era::Session,
    }
}

/// 2026-07-28 puts some errors into the HTTP status too.
pub(crate) fn status_of(error: i64) -> StatusCode {
    match error {
        code::METHOD_NOT_FOUND => StatusCode::NOT_FOUND,
        code::HEADER_MISMATCH | code::MISSING_CAPABILITY | code::UNSUPPORTED_VERSION => StatusCode::BAD_REQUEST,
        _ => StatusCode::OK,
    }
}

/// The whole body, of at most `limit` bytes, within that time.
pub(crate) async fn read_body(
    limit: usize,
    within: Duration,
    headers: &HeaderMap,
    mut body: Body,
) -> Result<Bytes, Refused> {
    let too_large = || {
        let error = RpcError::invalid_request(format!("The body is larger than {limit} bytes"));
        Box::new(closing(refuse(StatusCode::PAYLOAD_TOO_LARGE, None, &error)))
    };
    let announced = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<u64>().ok());
    if announced.is_some_and(|announced| announced > limit as u64) {
        return Err(too_large());
    }
    let read = timeout(within, async {
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| {
                let error = RpcError::invalid_request("The body broke off");
                Box::new(closing(refuse(StatusCode::BAD_REQUEST, None, &error)))
            })?;
            if let Ok(data) = frame.into_data() {
                if bytes.len() + data.len() > limit {
                    return Err(too_large());
                }
                bytes.extend_from_slice(&data);
            }
        }
        Ok(bytes.freeze())
    });
    read.await.unwrap_or_else(|_| {
        let error = RpcError::invalid_request("The body came too slowly");
        Err(Box::new(closing(refuse(StatusCode::REQUEST_TIMEOUT, None, &error))))
    })
}

/// A body that is JSON, as it is.
pub(crate) fn sent_as_json(headers: &HeaderMap) -> Result<(), Refused> {
    if !access::is_json(headers) {
        let error = RpcError::invalid_request("The Content-Type must be application/json");
        return Err(Box::new(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, &error)));
    }
    if !access::is_plain(headers) {
        let error = RpcError::invalid_request("The body must be sent as it is, without Content-Encoding");
        let mut response = refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, &error);
        // RFC 9110 section 12.5.3: what the request could have been sent in.
        response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        return Err(Box::new(response));
    }
    Ok(())
}

pub(crate) fn permit(places: &Arc<Semaphore>, count: u32) -> Result<Permit, Refused> {
    places.clone().try_acquire_many_owned(count).map(Arc::new).map_err(|_| {
        let error = RpcError::internal("Too many requests at once");
        let mut response = refuse(StatusCode::SERVICE_UNAVAILABLE, None, &error);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        Box::new(response)
    })
}

pub(crate) fn too_often(wait: Duration) -> Refused {
    let mut response = refuse(StatusCode::TOO_MANY_REQUESTS, None, &RpcError::internal("Too many requests"));
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
    Box::new(response)
}

pub(crate) fn refuse(status: StatusCode, id: Option<&RawValue>, error: &RpcError) -> Response {
    fixed(status, "application/json", envelope::error_response(id, error))
}

pub(crate) fn fixed(status: StatusCode, content_type: &'static str, text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

pub(crate) fn not_found(id: Option<&RawValue>) -> Refused {
    let error = RpcError::invalid_request("Session not found: initialize again");
    Box::new(refuse(StatusCode::NOT_FOUND, id, &error))
}

pub(crate) fn accepted() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::ACCEPTED;
    response
}

pub(crate) fn method_not_allowed(allow: &'static str) -> Response {
    let error = RpcError::invalid_request(format!("Allowed here: {allow}"));
    let mut response = refuse(StatusCode::METHOD_NOT_ALLOWED, None, &error);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
    response
}

/// What is left of the request is not read.
pub(crate) fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(http::header::CONNECTION, HeaderValue::from_static("close"));
    response
}
