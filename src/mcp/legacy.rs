//! The transport of revision 2024-11-05: `GET /sse` opens a stream whose first event says where to `POST`; the answers
//! come on the stream. The stream lives on one replica; a message that reaches another one is handed over ([`relay`]).
//!
//! Who may ask, from where, how much and how often is decided as for Streamable HTTP, by the same [`Door`].

mod relay;
mod stream;
mod token;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::any;
use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::value::RawValue;
use tokio::sync::mpsc;

pub use relay::Relay;

use self::relay::Nonces;
use self::stream::{Place, Stream, Streams};
use self::token::Ticket;
use super::body::Permit;
use super::counted;
use super::dispatch::{Answer, Call, Event, Front};
use super::envelope::{self, Envelope, Fault, Incoming};
use super::http::{Door, Refused, accepted, method_not_allowed, permit, refuse};
use super::{Claims, Handler, Identity, Revision, RpcError, Settings, access, bounded, headers, revision};
use crate::json;
use crate::money::AgentId;

/// What the transport is given besides [`Settings`].
#[derive(Clone)]
pub struct LegacySse {
    /// `None`: this replica is the only one.
    pub relay: Option<Relay>,
    /// Streams of one agent at once; one more is refused with 503. Where everybody may ask, connections are bounded.
    pub streams_per_agent: usize,
    /// A client that does not take an answer for this long loses its stream.
    pub patience: Duration,
}

impl LegacySse {
    pub fn new(relay: Option<Relay>) -> LegacySse {
        LegacySse { relay, streams_per_agent: 256, patience: Duration::from_secs(30) }
    }
}

/// What a message that could not be taken is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// There is no such stream any more.
    Gone,
    Busy,
    Ending,
    /// The message was not heard.
    Unreachable,
    /// Nobody knows whether it was.
    Unanswered,
}

impl Refusal {
    fn word(self) -> &'static str {
        match self {
            Refusal::Gone => "gone",
            Refusal::Busy => "busy",
            Refusal::Ending => "ending",
            Refusal::Unreachable => "unreachable",
            Refusal::Unanswered => "unanswered",
        }
    }

    fn response(self, id: Option<&RawValue>) -> Response {
        let again = |mut response: Response| {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            response
        };
        match self {
            Refusal::Gone => {
                let error = RpcError::invalid_request("Session not found: open GET /sse again");
                refuse(StatusCode::NOT_FOUND, id, &error)
            }
            Refusal::Busy => {
                let error = RpcError::internal("Too many requests at once");
                again(refuse(StatusCode::SERVICE_UNAVAILABLE, id, &error))
            }
            Refusal::Ending => {
                let error = RpcError::internal("The stream is closing: open GET /sse again");
                again(refuse(StatusCode::SERVICE_UNAVAILABLE, id, &error))
            }
            Refusal::Unreachable => {
                let error = RpcError::internal(
                    "The replica that holds this session cannot be reached; the message was not taken: open GET /sse \
                     again",
                );
                refuse(StatusCode::GATEWAY_TIMEOUT, id, &error)
            }
            Refusal::Unanswered => {
                let error = RpcError::internal(
                    "The replica that holds this session did not answer; the message may have been taken, its answer \
                     then comes on the stream",
                );
                refuse(StatusCode::GATEWAY_TIMEOUT, id, &error)
            }
        }
    }
}

struct Legacy {
    door: Arc<Door>,
    front: Arc<Front>,
    streams: Arc<Streams>,
    settings: LegacySse,
    nonces: Nonces,
}

/// `/sse` and `/messages` behind `door`, and what the other replicas talk to.
pub(super) fn routers(
    door: &Arc<Door>,
    settings: &Settings,
    handler: Arc<dyn Handler>,
    legacy: LegacySse,
) -> (Router, Option<Router>) {
    let mut front = Front::new(settings.clone(), handler, &Revision::SSE);
    front.silent_when_cancelled = true;
    let legacy = Arc::new(Legacy {
        door: door.clone(),
        front: Arc::new(front),
        streams: Arc::default(),
        settings: legacy,
        nonces: Nonces::default(),
    });
    let public = Router::new().route("/sse", any(sse)).route("/messages", any(messages)).with_state(legacy.clone());
    let relays = legacy.settings.relay.is_some();
    (public, relays.then(|| Router::new().route(relay::PATH, any(relayed)).with_state(legacy)))
}

async fn sse(State(legacy): State<Arc<Legacy>>, request: Request) -> Response {
    let (head, _) = request.into_parts();
    let identity = match legacy.door.admit(&head).await {
        Ok(identity) => identity,
        Err(refused) => return *refused,
    };
    if head.method != Method::GET {
        return method_not_allowed("GET");
    }
    legacy.open(&head.headers, identity.agent).unwrap_or_else(|refused| *refused)
}

async fn messages(State(legacy): State<Arc<Legacy>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let identity = match legacy.door.admit(&head).await {
        Ok(identity) => identity,
        Err(refused) => return *refused,
    };
    if head.method != Method::POST {
        return method_not_allowed("POST");
    }
    legacy.post(&head, body, identity).await.unwrap_or_else(|refused| *refused)
}

async fn relayed(State(legacy): State<Arc<Legacy>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    legacy.received(head, body).await.unwrap_or_else(|()| relay::refused())
}

impl Legacy {
    fn open(&self, headers: &HeaderMap, agent: Option<AgentId>) -> Result<Response, Refused> {
        let takes = access::accept(headers);
        if !takes.stream && !takes.json {
            let error = RpcError::invalid_request("GET /sse is answered with text/event-stream only");
            return Err(Box::new(refuse(StatusCode::NOT_ACCEPTABLE, None, &error)));
        }
        if self.front.streams_end.is_cancelled() {
            return Err(Box::new(Refusal::Ending.response(None)));
        }
        let permit = permit(&self.door.streams, 1)?;
        let at = self.settings.relay.as_ref().map(|relay| relay.at);
        let (token, ticket) = token::issue(&self.front.settings, at, agent.as_ref());
        let first = format!("event: endpoint\ndata: /messages?sessionId={token}\n\n");
        let most = self.settings.streams_per_agent;
        let body = self.streams.open(&self.front, &ticket, agent, most, first, permit);
        Ok(body.ok_or_else(|| Box::new(Refusal::Busy.response(None)))?.into_response())
    }

    async fn post(&self, head: &Parts, body: Body, identity: Identity) -> Result<Response, Refused> {
        let permit = permit(&self.door.calls, 1)?;
        let bad = |reason: &str| Box::new(refuse(StatusCode::BAD_REQUEST, None, &RpcError::invalid_request(reason)));
        super::http::sent_as_json(&head.headers)?;
        match headers::single(&head.headers, headers::PROTOCOL_VERSION) {
            Ok(None) => {}
            Ok(Some(version)) if Revision::parse(version) == Some(Revision::V2024_11_05) => {}
            Ok(Some(version)) => {
                let error = revision::unsupported(version, self.front.supported);
                return Err(Box::new(refuse(StatusCode::BAD_REQUEST, None, &error)));
            }
            Err(reason) => return Err(bad(&reason)),
        }
        let token = session_id(head.uri.query()).map_err(bad)?;
        let ticket = token::verify(&self.front.settings, token, identity.agent.as_ref())
            .ok_or_else(|| Box::new(Refusal::Gone.response(None)))?;
        let body = self.door.read(&head.headers, body).await?;
        let incoming = Envelope::parse(&body, self.front.settings.limits()).map_err(|fault| {
            let status = if fault.too_large { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
            Box::new(refuse(status, fault.id.as_deref(), &fault.error))
        })?;
        let asked = counted::asked(&incoming);
        let envelope = one(incoming).map_err(|fault| {
            let response = refuse(StatusCode::BAD_REQUEST, fault.id.as_deref(), &fault.error);
            Box::new(counted::of(asked, response))
        })?;
        let id = match &envelope {
            Envelope::Request { id, .. } => Some(id.clone()),
            _ => None,
        };
        let taken = self.hand_over(&ticket, identity, envelope, &body, permit).await;
        Ok(counted::of(asked, taken.map_or_else(|refusal| refusal.response(id.as_deref()), |()| accepted())))
    }

    /// To the stream, wherever it is. Where to is the token's word alone, and nobody but a replica could sign it.
    async fn hand_over(
        &self,
        ticket: &Ticket,
        identity: Identity,
        envelope: Envelope,
        body: &[u8],
        permit: Permit,
    ) -> Result<(), Refusal> {
        if let Some(stream) = self.streams.get(&ticket.name) {
            return self.take(&stream, identity, envelope, permit);
        }
        match (&self.settings.relay, ticket.at) {
            (Some(relay), Some(at)) if at != relay.at => {
                relay.send(&self.front.settings, at, &ticket.name, &identity, body).await
            }
            _ => Err(Refusal::Gone),
        }
    }

    /// The message of a stream that is here.
    fn take(
        &self,
        stream: &Arc<Stream>,
        identity: Identity,
        envelope: Envelope,
        permit: Permit,
    ) -> Result<(), Refusal> {
        let Identity { agent, claims } = identity;
        if stream.agent() != agent.as_ref() {
            return Err(Refusal::Gone);
        }
        match envelope {
            Envelope::Request { id, method, params } => {
                let place = stream.begin()?;
                self.start(stream, place, claims, (id, method, params), permit);
            }
            Envelope::Notification { method, params } => {
                self.front.notified(Some(stream.name()), &method, params.as_deref());
            }
            // To something that we never ask.
            Envelope::Response { .. } => {}
        }
        Ok(())
    }

    fn start(
        &self,
        stream: &Arc<Stream>,
        place: Place,
        claims: Claims,
        (id, method, params): (Box<RawValue>, String, Option<Box<RawValue>>),
        permit: Permit,
    ) {
        let (out, events) = mpsc::channel(8);
        let withdraw = if method == "initialize" {
            let answer = match self.front.initialize(params.as_deref()) {
                Ok((_, result)) => {
                    let text = envelope::result_response(&id, &result);
                    Answer { text, error: None, deliveries: Vec::new() }
                }
                Err(error) => Answer::error(Some(&id), &error),
            };
            // There is room for it.
            let _ = out.try_send(Event::Answer(answer));
            None
        } else {
            let (agent, session) = (stream.agent().cloned(), Some(stream.name().to_owned()));
            let call = Call { revision: Revision::V2024_11_05, agent, session, claims, id, method, params };
            Some(self.front.start(call, out, permit))
        };
        let patience = self.settings.patience;
        self.front.settings.world.spawn.spawn(Box::pin(place.forward(events, withdraw, patience)));
    }

    /// `None` for whatever no replica has signed.
    async fn received(&self, head: Parts, body: Body) -> Result<Response, ()> {
        let settings = &self.front.settings;
        let relay = self.settings.relay.as_ref().filter(|_| head.method == Method::POST).ok_or(())?;
        let signed = relay::head(settings, relay, &head).ok_or(())?;
        let body = self.door.read_at_most(relay::max_body(settings), &head.headers, body).await.map_err(drop)?;
        let received = relay::open(settings, relay, &self.nonces, signed, &body).ok_or(())?;
        let taken = self.take_received(&received);
        Ok(relay::answer(settings, &received.nonce, &taken))
    }

    fn take_received(&self, received: &relay::Received) -> Result<(), Refusal> {
        let stream = self.streams.get(&received.stream).ok_or(Refusal::Gone)?;
        let permit = permit(&self.door.calls, 1).map_err(|_| Refusal::Busy)?;
        // The replica that it reached has read it already.
        let incoming = Envelope::parse(&received.message, self.front.settings.limits()).map_err(|_| Refusal::Gone)?;
        let envelope = one(incoming).map_err(|_| Refusal::Gone)?;
        self.take(&stream, received.identity.clone(), envelope, permit)
    }
}

/// The message, if 2024-11-05 has it.
fn one(incoming: Incoming) -> Result<Envelope, Fault> {
    let Incoming::One(envelope) = incoming else { return Err(envelope::no_batches()) };
    let fault = |id: Option<Box<RawValue>>, reason: String| Fault {
        id,
        error: RpcError::invalid_request(format!("Invalid request: {reason}")),
        too_large: false,
    };
    match &envelope {
        Envelope::Request { id, params, .. } => {
            let declared = revision::declared(params.as_deref()).and_then(json::string);
            match declared.filter(|version| version != Revision::V2024_11_05.as_str()) {
                Some(other) => {
                    let other = bounded(&other);
                    Err(fault(Some(id.clone()), format!("_meta has {other:?} but this is the transport of 2024-11-05")))
                }
                None => Ok(envelope),
            }
        }
        Envelope::Response { id: None, .. } => {
            Err(fault(None, "the id of a response must be a string or an integer".into()))
        }
        _ => Ok(envelope),
    }
}

/// The one `sessionId` of the query. A token has no character that would be escaped.
fn session_id(query: Option<&str>) -> Result<&str, &'static str> {
    let mut all = query.unwrap_or_default().split('&').filter_map(|pair| pair.strip_prefix("sessionId="));
    match (all.next(), all.next()) {
        (Some(token), None) => Ok(token),
        (None, _) => Err("The sessionId is missing: open GET /sse, and post where its first event says"),
        (Some(_), Some(_)) => Err("The sessionId is there twice"),
    }
}
