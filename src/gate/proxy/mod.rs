//! `tollway gate`: a payment gate in front of one MCP server, which is not changed and not told.
//!
//! One strict parse of each message serves the decision and the forwarding: what is free goes on byte for byte and comes
//! back as it comes, without being read; lists come back with prices; a priced request is sold, and reaches the upstream
//! only from there. What two readers could read in two ways goes nowhere.

mod describe;
mod events;
mod frames;
pub mod headers;
pub mod health;
pub mod inventory;
mod paid;
mod pass;
mod rewrite;
mod running;
mod session;
mod stdio;
mod upstream;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::any;
use bytes::Bytes;
use futures_util::future::FutureExt as _;
use http::header::HeaderName;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::value::RawValue;
use tokio::sync::Semaphore;

pub use self::session::Sessions;
pub use self::stdio::{Child, ChildSettings};
pub use self::upstream::{HttpUpstream, Upstream};

use self::describe::Lists;
use self::pass::PassBody;
use self::running::Running;
use self::session::Session;
use self::upstream::{Ask, Reply, UpstreamError};
use super::Kind;
use super::desk::Gate;
use super::target;
use crate::json;
use crate::mcp::envelope::{Envelope, Incoming};
use crate::mcp::http::{Refused, method_not_allowed, permit, read_body, refuse, sent_as_json, too_often};
use crate::mcp::rate::{Buckets, Peer};
use crate::mcp::{Revision, RpcError, access, bounded, code, counted, headers as mcp_headers, revision};
use crate::telemetry;
use crate::x402::META_PAYMENT;

/// What a proxy is given besides its gate and its upstream.
#[derive(Clone)]
pub struct Settings {
    /// Hosts, origins, rates, sizes and times as every front has them.
    pub front: crate::mcp::Settings,
    /// What of a client's head is passed on beyond what MCP needs.
    pub forward: Vec<HeaderName>,
    /// The longest silence of an upstream in the middle of an answer.
    pub idle: Duration,
    /// The longest run of a priced request.
    pub run: Duration,
    /// An answer that has to be read (a list, a paid one) and is larger is a failure, bytes.
    pub max_answer_bytes: usize,
}

/// The gate's endpoint at `/mcp`.
pub fn router(settings: Settings, upstream: Upstream, gate: Gate) -> axum::Router {
    let sessions = Sessions {
        world: settings.front.world.clone(),
        ring: settings.front.ring.clone(),
        context: session::context(&upstream.name()),
        lifetime_ms: u64::try_from(settings.front.session_lifetime.as_millis()).unwrap_or(u64::MAX),
    };
    let proxy = Arc::new(Proxy {
        rates: settings.front.rate_limit.map(Buckets::new),
        calls: Arc::new(Semaphore::new(settings.front.max_concurrent_requests)),
        streams: Arc::new(Semaphore::new(settings.front.max_streams)),
        sessions,
        settings,
        upstream,
        gate,
        lists: Lists::default(),
        sales: Running::default(),
    });
    axum::Router::new().route("/mcp", any(mcp)).with_state(proxy)
}

struct Proxy {
    settings: Settings,
    sessions: Sessions,
    upstream: Upstream,
    gate: Gate,
    lists: Lists,
    sales: Running,
    /// Requests, by source address.
    rates: Option<Buckets>,
    calls: Arc<Semaphore>,
    streams: Arc<Semaphore>,
}

type Permit = Arc<tokio::sync::OwnedSemaphorePermit>;

async fn mcp(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let revision = counted::revision(&head.headers);
    let mut asked = match head.method {
        Method::GET => "stream",
        Method::DELETE => "end_session",
        _ => "unread",
    };
    let answered = match proxy.admit(&head) {
        Err(refused) => Err(refused),
        Ok(()) => match head.method {
            Method::POST => proxy.post(head, body, &mut asked).await,
            Method::GET => proxy.get(&head.headers).await,
            Method::DELETE => proxy.delete(&head.headers).await,
            _ => Ok(method_not_allowed("GET, POST, DELETE")),
        },
    };
    let response = answered.unwrap_or_else(|refused| *refused);
    counted::count(asked, revision, response.status());
    response
}

/// What becomes of a request.
enum Step {
    /// Goes on, and its answer comes back, byte for byte.
    Pass,
    /// The same, but its result is edited.
    Edit,
    /// Some item of this kind and name has a price.
    Sell(Kind, String),
}

/// Where a message belongs.
struct Place {
    revision: Revision,
    session: Option<Session>,
}

impl Proxy {
    /// What a method asks for. One that is another spelling of a method that can cost something is none.
    fn step(&self, method: &str, params: Option<&RawValue>) -> Result<Step, RpcError> {
        if let Some(kind) = Kind::of_method(method) {
            let name = params.and_then(|params| json::member(params, kind.member())).and_then(json::string);
            let name = name.ok_or_else(|| {
                RpcError::invalid_params(format!("Invalid params: {} must be a string", kind.member()))
            })?;
            // A payment that is known is decided by its claim, whatever the item costs now.
            let free = self.gate.is_free(kind, &name) && !brings_payment(params);
            return Ok(if free { Step::Pass } else { Step::Sell(kind, name.into_owned()) });
        }
        if rewrite::is_edited(method) {
            return Ok(Step::Edit);
        }
        let generous = target::fold(method.trim());
        match Kind::ALL.into_iter().any(|kind| kind.method() == generous) {
            true => Err(RpcError::method_not_found(method)),
            false => Ok(Step::Pass),
        }
    }

    /// Where the request comes from (Host, Origin), and whether it comes too often.
    fn admit(&self, head: &Parts) -> Result<(), Refused> {
        let front = &self.settings.front;
        access::host(&head.headers, &head.uri, &front.allowed_hosts)
            .and_then(|()| access::origin(&head.headers, &front.allowed_origins))
            .map_err(|reason| Box::new(refuse(StatusCode::FORBIDDEN, None, &RpcError::invalid_request(reason))))?;
        if let (Some(rates), Some(source)) = (&self.rates, source(head)) {
            rates.take(&source, 1).map_err(too_often)?;
        }
        for name in [mcp_headers::SESSION_ID, mcp_headers::PROTOCOL_VERSION, mcp_headers::METHOD, mcp_headers::NAME] {
            mcp_headers::single(&head.headers, name).map_err(|reason| bad(None, &mismatch(&reason)))?;
        }
        Ok(())
    }

    async fn post(self: &Arc<Self>, head: Parts, body: Body, asked: &mut &'static str) -> Result<Response, Refused> {
        let front = &self.settings.front;
        let permit = permit(&self.calls, 1)?;
        sent_as_json(&head.headers)?;
        let body = read_body(front.max_body_bytes, front.body_timeout, &head.headers, body).await?;
        let incoming = Envelope::parse(&body, front.limits()).map_err(|fault| {
            let status = if fault.too_large { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
            Box::new(refuse(status, fault.id.as_deref(), &fault.error))
        })?;
        *asked = counted::asked(&incoming).0;
        match incoming {
            Incoming::One(Envelope::Request { id, method, params }) => {
                self.request(head, body, (id, method, params), permit).await
            }
            Incoming::One(Envelope::Notification { method, params }) => {
                self.notification(head, body, &method, params.as_deref(), permit).await
            }
            Incoming::One(Envelope::Response { .. }) => self.response(head, body, permit).await,
            Incoming::Batch(batch) => {
                let messages = batch.into_iter().collect::<Result<Vec<_>, _>>();
                match messages {
                    Ok(messages) => self.batch(head, body, messages, permit).await,
                    Err(fault) => Err(bad(fault.id.as_deref(), &fault.error)),
                }
            }
        }
    }

    async fn request(
        self: &Arc<Self>,
        head: Parts,
        body: Bytes,
        (id, method, params): (Box<RawValue>, String, Option<Box<RawValue>>),
        permit: Permit,
    ) -> Result<Response, Refused> {
        let place = self.place(&head.headers, Some(&id), &method, params.as_deref())?;
        if place.revision.stateless() {
            mcp_headers::check(&head.headers, &method, params.as_deref(), None)
                .map_err(|reason| bad(Some(&id), &mismatch(&reason)))?;
        } else {
            mirrored(&head.headers, &method, params.as_deref()).map_err(|reason| bad(Some(&id), &mismatch(&reason)))?;
        }
        match self.step(&method, params.as_deref()).map_err(|error| answered(&place, &id, &error))? {
            Step::Pass if method == "subscriptions/listen" => {
                drop(permit);
                let permit = crate::mcp::http::permit(&self.streams, 1)?;
                let reply = self.ask(Method::POST, &head.headers, place.session.as_ref(), body).await;
                let reply = reply.map_err(|error| unreachable(Some(&id), &error))?;
                Ok(self.stream(reply, place.session.as_ref(), permit))
            }
            Step::Pass => {
                let begins = method == "initialize" && !place.revision.stateless();
                let asking = self.asking(Method::POST, &head.headers, place.session.as_ref(), body);
                let reply = self.upstream.ask(Ask { source: source(&head), ..asking }).await;
                let reply = reply.map_err(|error| unreachable(Some(&id), &error))?;
                let session = if begins { self.begun(&reply).map_err(|e| bad_gateway(Some(&id), e))? } else { None };
                let mut response = self.passed(reply, place.session.as_ref(), permit);
                if let Some(session) = session {
                    response.headers_mut().insert(mcp_headers::SESSION_ID, session);
                }
                Ok(response)
            }
            Step::Edit => {
                let reply = self.ask(Method::POST, &head.headers, place.session.as_ref(), body).await;
                let reply = reply.map_err(|error| unreachable(Some(&id), &error))?;
                self.edited(reply, &place, (id, method), permit).await
            }
            Step::Sell(kind, name) => {
                let params = params.unwrap_or_else(|| RawValue::NULL.to_owned());
                paid::Sale { proxy: self.clone(), head, place, id, kind, name, params }.answer(body, permit).await
            }
        }
    }

    /// A priced request without an id has nobody to answer to: it does not go on, and nothing is charged.
    async fn notification(
        &self,
        head: Parts,
        body: Bytes,
        method: &str,
        params: Option<&RawValue>,
        permit: Permit,
    ) -> Result<Response, Refused> {
        let place = self.place(&head.headers, None, method, params)?;
        mirrored(&head.headers, method, params).map_err(|reason| bad(None, &mismatch(&reason)))?;
        match self.step(method, params).map_err(|error| bad(None, &error))? {
            Step::Pass => {
                // What is sold is known to the upstream by another id.
                if let Some(ended) = self.sales.end(place.session.as_ref(), method, params, &body) {
                    for told in ended {
                        let _ = self.ask(Method::POST, &head.headers, place.session.as_ref(), told).await;
                    }
                    return Ok(respond(StatusCode::ACCEPTED, HeaderMap::new(), Body::empty()));
                }
                let reply = self.ask(Method::POST, &head.headers, place.session.as_ref(), body).await;
                let reply = reply.map_err(|error| unreachable(None, &error))?;
                Ok(self.passed(reply, place.session.as_ref(), permit))
            }
            Step::Edit | Step::Sell(..) => {
                let error = RpcError::invalid_request(format!("Invalid request: {} needs an id", bounded(method)));
                Err(bad(None, &error))
            }
        }
    }

    /// A client's answer to a request of the upstream.
    async fn response(&self, head: Parts, body: Bytes, permit: Permit) -> Result<Response, Refused> {
        let place = self.place(&head.headers, None, "", None)?;
        let reply = self.ask(Method::POST, &head.headers, place.session.as_ref(), body).await;
        let reply = reply.map_err(|error| unreachable(None, &error))?;
        Ok(self.passed(reply, place.session.as_ref(), permit))
    }

    /// 2025-03-26 alone has batches. One goes on as it is; what has a price is asked for alone.
    async fn batch(
        &self,
        head: Parts,
        body: Bytes,
        messages: Vec<Envelope>,
        permit: Permit,
    ) -> Result<Response, Refused> {
        let place = self.place(&head.headers, None, "", None)?;
        let header = mcp_headers::single(&head.headers, mcp_headers::PROTOCOL_VERSION).unwrap_or_default();
        if header.is_some() && !place.revision.has_batches() {
            return Err(bad(None, &crate::mcp::envelope::no_batches().error));
        }
        for message in &messages {
            let (method, params) = match message {
                Envelope::Request { method, params, .. } | Envelope::Notification { method, params } => {
                    (method, params)
                }
                Envelope::Response { .. } => continue,
            };
            let alone = match self.step(method, params.as_deref()).map_err(|error| bad(None, &error))? {
                Step::Pass => method == "initialize",
                Step::Edit => false,
                Step::Sell(..) => true,
            };
            if alone {
                let error = RpcError::invalid_request("Invalid request: what has a price must not be in a batch");
                return Err(bad(None, &error));
            }
        }
        let reply = self.ask(Method::POST, &head.headers, place.session.as_ref(), body).await;
        let reply = reply.map_err(|error| unreachable(None, &error))?;
        Ok(self.passed(reply, place.session.as_ref(), permit))
    }

    async fn get(&self, headers: &HeaderMap) -> Result<Response, Refused> {
        let place = self.place(headers, None, "", None)?;
        let permit = permit(&self.streams, 1)?;
        let reply = self.ask(Method::GET, headers, place.session.as_ref(), Bytes::new()).await;
        let reply = reply.map_err(|error| unreachable(None, &error))?;
        Ok(self.stream(reply, place.session.as_ref(), permit))
    }

    async fn delete(&self, headers: &HeaderMap) -> Result<Response, Refused> {
        let place = self.place(headers, None, "", None)?;
        let permit = permit(&self.calls, 1)?;
        let reply = self.ask(Method::DELETE, headers, place.session.as_ref(), Bytes::new()).await;
        let reply = reply.map_err(|error| unreachable(None, &error))?;
        Ok(self.passed(reply, place.session.as_ref(), permit))
    }

    /// The revision of a message, and its session: 404 for one that is unknown or over.
    fn place(
        &self,
        headers: &HeaderMap,
        id: Option<&RawValue>,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<Place, Refused> {
        let header = mcp_headers::single(headers, mcp_headers::PROTOCOL_VERSION).unwrap_or_default();
        let declared = revision::declared(params).and_then(json::string);
        let read =
            |text: &str| Revision::parse(text).ok_or_else(|| bad(id, &revision::unsupported(text, &Revision::ALL)));
        let revision = match (header, declared.as_deref()) {
            // What is agreed on is in the answer to it.
            _ if method == "initialize" => Revision::V2025_03_26,
            (Some(header), Some(declared)) if header != declared => {
                let (header, declared) = (bounded(header), bounded(declared));
                let reason = format!("MCP-Protocol-Version is {header:?} but _meta has {declared:?}");
                return Err(bad(id, &mismatch(&reason)));
            }
            (None, Some(declared)) if read(declared)?.stateless() => {
                return Err(bad(id, &mismatch("the MCP-Protocol-Version header is missing")));
            }
            (Some(text), _) | (None, Some(text)) => read(text)?,
            (None, None) => Revision::V2025_03_26,
        };
        let token = mcp_headers::single(headers, mcp_headers::SESSION_ID).unwrap_or_default();
        let session = match token.filter(|_| !revision.stateless() && method != "initialize") {
            None => None,
            Some(token) => Some(self.sessions.open(token).ok_or_else(|| crate::mcp::http::not_found(id))?),
        };
        Ok(Place { revision, session })
    }

    /// A session of ours before the upstream's, where `initialize` succeeded.
    fn begun(&self, reply: &Reply) -> Result<Option<HeaderValue>, &'static str> {
        if !reply.status.is_success() {
            return Ok(None);
        }
        let id =
            mcp_headers::single(&reply.headers, mcp_headers::SESSION_ID).map_err(|_| "its session id is unusable")?;
        let token = self.sessions.issue(id).ok_or("its session id is unusable")?;
        Ok(HeaderValue::from_str(&token).ok())
    }

    async fn ask(
        &self,
        method: Method,
        from: &HeaderMap,
        session: Option<&Session>,
        body: Bytes,
    ) -> Result<Reply, UpstreamError> {
        self.upstream.ask(self.asking(method, from, session, body)).await
    }

    fn asking(&self, method: Method, from: &HeaderMap, session: Option<&Session>, body: Bytes) -> Ask {
        let mut headers = headers::to_upstream(from, &self.settings.forward);
        if method == Method::POST {
            // Not the client's own: by its charset an upstream would read another message than was read here.
            headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let last_event = mcp_headers::single(from, "last-event-id").unwrap_or_default();
        let name = session.map_or("", |session| session.name.as_str());
        let last_event = last_event.filter(|_| method == Method::GET).and_then(|id| self.sessions.event(name, id));
        Ask {
            method,
            headers,
            last_event: last_event.map(ToOwned::to_owned),
            session: session.and_then(|session| session.upstream.clone()),
            client: session.map(|session| session.name.clone()),
            body,
            ..Ask::default()
        }
    }

    /// An answer as it comes.
    fn passed(&self, reply: Reply, session: Option<&Session>, permit: Permit) -> Response {
        let stream = headers::is_stream(&reply.headers);
        let mut body = PassBody::new(reply.body, permit).silent_for(self.settings.idle);
        if stream {
            let (shutdown, drain) = (self.settings.front.shutdown.clone(), self.settings.front.drain);
            let close = async move {
                shutdown.cancelled().await;
                tokio::time::sleep(drain).await;
            };
            body = body.binding(&self.sessions, session.map_or("", |session| &session.name)).until(close.boxed());
        }
        respond(reply.status, headers::to_client(&reply.headers), Body::new(body))
    }

    /// A stream that belongs to no call, which ends as soon as the process is to end.
    fn stream(&self, reply: Reply, session: Option<&Session>, permit: Permit) -> Response {
        if !headers::is_stream(&reply.headers) {
            return self.passed(reply, session, permit);
        }
        let close = self.settings.front.shutdown.clone().cancelled_owned().boxed();
        let body = PassBody::new(reply.body, permit)
            .binding(&self.sessions, session.map_or("", |session| &session.name))
            .until(close)
            .counted(telemetry::STREAMS.hold());
        respond(reply.status, headers::to_client(&reply.headers), Body::new(body))
    }
}

/// Whether something in `_meta` may be a payment: most requests have nothing there that could be.
fn brings_payment(params: Option<&RawValue>) -> bool {
    let meta = params.and_then(|params| json::member(params, "_meta"));
    meta.is_some_and(|meta| json::member(meta, META_PAYMENT).is_some())
}

fn respond(status: StatusCode, headers: HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn source(head: &Parts) -> Option<String> {
    head.extensions.get::<Peer>().map(|peer| peer.key())
}

fn bad(id: Option<&RawValue>, error: &RpcError) -> Refused {
    Box::new(refuse(StatusCode::BAD_REQUEST, id, error))
}

/// An error that is the answer to a request: its HTTP status is the revision's.
fn answered(place: &Place, id: &RawValue, error: &RpcError) -> Refused {
    let status = if place.revision.stateless() { crate::mcp::http::status_of(error.code) } else { StatusCode::OK };
    Box::new(refuse(status, Some(id), error))
}

fn mismatch(reason: &str) -> RpcError {
    RpcError::new(code::HEADER_MISMATCH, format!("Header mismatch: {reason}"))
}

/// Outside of 2026-07-28 the headers that mirror the body are not asked for; where they are there they are right.
fn mirrored(headers: &HeaderMap, method: &str, params: Option<&RawValue>) -> Result<(), String> {
    if headers.contains_key(mcp_headers::METHOD) || headers.contains_key(mcp_headers::NAME) {
        return mcp_headers::check(headers, method, params, None);
    }
    Ok(())
}

/// The upstream did not answer, or not usably. What is wrong with it is the operator's to know.
fn unreachable(id: Option<&RawValue>, error: &UpstreamError) -> Refused {
    let status = match error {
        UpstreamError::NoSession => return crate::mcp::http::not_found(id),
        UpstreamError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        error if error.is_timeout() => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::BAD_GATEWAY,
    };
    tracing::warn!(%error, "the upstream did not answer");
    Box::new(refuse(status, id, &RpcError::internal("The MCP server behind this gate did not answer")))
}

fn bad_gateway(id: Option<&RawValue>, problem: &str) -> Refused {
    tracing::warn!(problem, "the upstream's answer cannot be used");
    let error = RpcError::internal("The MCP server behind this gate gave no usable answer");
    Box::new(refuse(StatusCode::BAD_GATEWAY, id, &error))
}
