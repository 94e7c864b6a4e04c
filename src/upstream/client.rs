//! The MCP client for sellers: what a caller may ask, and the one request behind each of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::header::{ACCEPT, CONTENT_TYPE};
use serde_json::value::RawValue;
use tokio::time::Instant;
use url::Url;

use super::session::{Session, session_id};
use super::sse::Parser;
use super::wire::{self, Content, Met, Outgoing};
use super::{
    Endpoint, LiveTool, Liveness, NOT_ALLOWED, OnProgress, Settings, ToolAnswer, ToolCall, UpstreamError, endpoint,
};
use crate::catalog::SellerTransport;
use crate::http::{Client, Limits, Streaming};
use crate::json;
use crate::mcp::{Revision, headers};
use crate::ports::World;

const SESSION_LIFE: Duration = Duration::from_secs(3600);
const MAX_SESSIONS: usize = 1024;
const TOOLS_LIFE: Duration = Duration::from_secs(60);
const MAX_CACHED_LISTS: usize = 64;
const MAX_TOOL_PAGES: usize = 20;
/// All tools of one seller together.
const MAX_TOOLS_BYTES: usize = 2 << 20;
/// A seller's questions on one stream beyond this get no answer.
const MAX_ASKED: usize = 16;
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Cheap to clone; sessions and tool lists are shared by all clones.
#[derive(Clone)]
pub struct Upstream {
    inner: Arc<Inner>,
}
struct Inner {
    settings: Settings,
    http: Client,
    next_id: AtomicU64,
    sessions: Mutex<Cache<Session>>,
    tools: Mutex<Cache<Vec<LiveTool>>>,
}
/// By endpoint, with the moment at which it was learnt.
type Cache<T> = BTreeMap<Url, (Instant, Arc<T>)>;

/// What the answer to one POST was.
pub(super) enum Reply {
    Answer {
        answer: ToolAnswer,
        session: Option<String>,
    },
    /// 404 to a request that named a session.
    SessionLost,
}

/// The MCP headers of one request.
pub(super) struct Headers<'a> {
    /// `None` before a revision is agreed.
    pub revision: Option<Revision>,
    pub session: Option<&'a str>,
    /// `Mcp-Param-*`.
    pub params: Vec<(String, String)>,
}

impl Upstream {
    /// `http` is for destinations that agents name: [`Settings::client`].
    pub fn new(settings: Settings, _world: World, http: Client) -> Upstream {
        let (sessions, tools) = (Mutex::default(), Mutex::default());
        Upstream { inner: Arc::new(Inner { settings, http, next_id: AtomicU64::new(1), sessions, tools }) }
    }

    /// The endpoint that a catalog item or a challenge names, if today's rules let it be dialled. Every way to a seller
    /// begins here: the call, the look at a listing, a recovery.
    pub fn endpoint(&self, url: &str, transport: SellerTransport) -> Result<Endpoint, UpstreamError> {
        let mapped = &self.inner.settings.resolved_mcp_endpoints;
        let url = endpoint::resolve(url, mapped, self.inner.http.destination()).map_err(UpstreamError::Refused)?;
        self.inner.settings.policy.now().origin(&url).map_err(|_| UpstreamError::Refused(NOT_ALLOWED))?;
        Ok(Endpoint { url, transport })
    }

    /// One `tools/call`. It is on the wire exactly once, unless an older seller says that it no longer knows the
    /// session: then a new one is made and the identical bytes go once more.
    pub async fn call_tool(&self, endpoint: &Endpoint, call: ToolCall<'_>) -> Result<ToolAnswer, UpstreamError> {
        self.call(endpoint, call, None).await
    }

    /// The same, handing on the seller's progress.
    pub async fn call_tool_with_progress(
        &self,
        endpoint: &Endpoint,
        call: ToolCall<'_>,
        on_progress: OnProgress<'_>,
    ) -> Result<ToolAnswer, UpstreamError> {
        self.call(endpoint, call, Some(on_progress)).await
    }

    async fn call(
        &self,
        endpoint: &Endpoint,
        call: ToolCall<'_>,
        on_progress: Option<OnProgress<'_>>,
    ) -> Result<ToolAnswer, UpstreamError> {
        let deadline = Instant::now() + call.timeout;
        let name = json::raw(call.tool);
        let mut members = vec![("name", &*name), ("arguments", call.arguments)];
        members.extend(call.input_responses.map(|raw| ("inputResponses", raw)));
        members.extend(call.request_state.map(|raw| ("requestState", raw)));
        let outgoing = Outgoing {
            method: "tools/call",
            name: Some(call.tool),
            members,
            payment: call.payment,
            progress: on_progress.is_some(),
        };
        self.perform(endpoint, &outgoing, Some(call.arguments), deadline, on_progress).await
    }

    /// Every tool that the seller lists now, at most a minute old. Calls no tool.
    pub async fn list_tools(&self, endpoint: &Endpoint) -> Result<Arc<Vec<LiveTool>>, UpstreamError> {
        if let Some((since, tools)) = self.tools().get(&endpoint.url)
            && since.elapsed() < TOOLS_LIFE
        {
            return Ok(tools.clone());
        }
        self.fresh_tools(endpoint, self.setup_deadline()).await
    }

    /// The input schema that the seller lists for `tool` now; `None` where it lists no such tool or no schema.
    pub async fn input_schema(&self, endpoint: &Endpoint, tool: &str) -> Result<Option<Box<RawValue>>, UpstreamError> {
        let tools = self.list_tools(endpoint).await?;
        let found = tools.iter().find(|listed| listed.name == tool);
        Ok(found.and_then(LiveTool::input_schema).map(ToOwned::to_owned))
    }

    /// Whether the seller is there and what it lists: the handshake and `tools/list`, never `tools/call`.
    pub async fn liveness(&self, endpoint: &Endpoint) -> Result<Liveness, UpstreamError> {
        let deadline = self.setup_deadline();
        let tools = self.fresh_tools(endpoint, deadline).await?;
        let revision = match endpoint.transport {
            SellerTransport::Sse => Revision::V2024_11_05,
            SellerTransport::StreamableHttp => self.session(endpoint, deadline).await?.revision,
        };
        Ok(Liveness { revision, tools: tools.iter().map(|tool| tool.name.clone()).collect() })
    }

    async fn fresh_tools(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Arc<Vec<LiveTool>>, UpstreamError> {
        let mut tools = Vec::new();
        let mut bytes = 0_usize;
        let mut cursor: Option<Box<RawValue>> = None;
        for _ in 0..MAX_TOOL_PAGES {
            let members = cursor.iter().map(|raw| ("cursor", &**raw)).collect();
            let outgoing = Outgoing { members, ..Outgoing::new("tools/list") };
            let result = match Box::pin(self.perform(endpoint, &outgoing, None, deadline, None)).await? {
                ToolAnswer::Result(result) => result,
                ToolAnswer::Error { code, .. } => {
                    return Err(UpstreamError::protocol(false, format!("tools/list was answered with error {code}")));
                }
            };
            let page = json::member(&result, "tools").and_then(json::elements);
            for raw in page.ok_or_else(|| UpstreamError::protocol(false, "tools/list names no tools"))? {
                let Some(name) = json::member(raw, "name").and_then(json::string) else { continue };
                bytes = bytes.saturating_add(raw.get().len());
                if bytes > MAX_TOOLS_BYTES {
                    return Err(UpstreamError::protocol(false, "tools/list is too large"));
                }
                tools.push(LiveTool { name: name.into_owned(), raw: raw.to_owned() });
            }
            let next = json::member(&result, "nextCursor").filter(|c| c.get().starts_with('"'));
            cursor = match next {
                Some(next) => Some(next.to_owned()),
                None => {
                    let tools = Arc::new(tools);
                    let mut cached = self.tools();
                    cached.retain(|_, (since, _)| since.elapsed() < TOOLS_LIFE);
                    if cached.len() >= MAX_CACHED_LISTS {
                        cached.pop_first();
                    }
                    cached.insert(endpoint.url.clone(), (Instant::now(), tools.clone()));
                    return Ok(tools);
                }
            };
        }
        Err(UpstreamError::protocol(false, "tools/list has too many pages"))
    }

    /// One request, over whichever transport and revision.
    async fn perform(
        &self,
        endpoint: &Endpoint,
        outgoing: &Outgoing<'_>,
        arguments: Option<&RawValue>,
        deadline: Instant,
        mut on_progress: Option<OnProgress<'_>>,
    ) -> Result<ToolAnswer, UpstreamError> {
        if endpoint.transport == SellerTransport::Sse {
            return self.perform_legacy(endpoint, outgoing, deadline, on_progress).await;
        }
        let counts = outgoing.method == "tools/call";
        let mut session = self.session(endpoint, deadline).await?;
        let params = match (outgoing.name, session.revision.stateless()) {
            (Some(tool), true) if counts => self.param_headers(endpoint, tool, arguments, deadline).await,
            _ => Vec::new(),
        };
        let id = self.next_id();
        let body = outgoing.body(id, session.revision);
        let mut seen = false;
        loop {
            let headers =
                Headers { revision: Some(session.revision), session: session.id.as_deref(), params: params.clone() };
            let mut url = session.url.clone();
            let reply = self.exchange(&mut url, &headers, outgoing, body.clone(), id, deadline, &mut on_progress).await;
            match reply {
                Ok(Reply::Answer { answer, .. }) => {
                    if matches!(&answer, ToolAnswer::Error { code: crate::mcp::code::UNSUPPORTED_VERSION, .. }) {
                        self.forget(endpoint);
                    }
                    return Ok(answer);
                }
                Ok(Reply::SessionLost) if seen => {
                    self.forget(endpoint);
                    return Err(UpstreamError::protocol(counts, "the seller does not know the session it just gave"));
                }
                Ok(Reply::SessionLost) => {
                    self.forget(endpoint);
                    seen = true;
                    let renewed = self.session(endpoint, deadline).await.map_err(|e| e.after(counts))?;
                    if renewed.revision.stateless() {
                        return Err(UpstreamError::protocol(counts, "the seller changed its revision under way"));
                    }
                    session = renewed;
                }
                Err(error) => {
                    // Whatever it was, the next call starts afresh.
                    self.forget(endpoint);
                    return Err(error.after(seen && counts));
                }
            }
        }
    }

    /// `Mcp-Param-*` as the seller's own list asks for them. A seller whose list cannot be had gets none.
    async fn param_headers(
        &self,
        endpoint: &Endpoint,
        tool: &str,
        arguments: Option<&RawValue>,
        deadline: Instant,
    ) -> Vec<(String, String)> {
        let cached = self.tools().get(&endpoint.url).filter(|(since, _)| since.elapsed() < TOOLS_LIFE).cloned();
        let tools = match cached {
            Some((_, tools)) => tools,
            None => match self.fresh_tools(endpoint, deadline.min(self.setup_deadline())).await {
                Ok(tools) => tools,
                Err(_) => return Vec::new(),
            },
        };
        let schema = tools.iter().find(|listed| listed.name == tool).and_then(LiveTool::input_schema);
        let wanted = schema.and_then(|schema| headers::param_headers(schema).ok()).unwrap_or_default();
        let value = |path: &[String]| headers::param_value(arguments, path).map(|value| headers::encode(&value));
        wanted.into_iter().filter_map(|h| Some((h.header, value(&h.path)?))).collect()
    }

    /// The session with an endpoint, made where there is none. Nothing of it is the `tools/call`.
    async fn session(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Arc<Session>, UpstreamError> {
        if let Some((since, session)) = self.sessions().get(&endpoint.url)
            && since.elapsed() < SESSION_LIFE
        {
            return Ok(session.clone());
        }
        let session = Arc::new(self.negotiate(endpoint, deadline.min(self.setup_deadline())).await?);
        let mut sessions = self.sessions();
        sessions.retain(|_, (since, _)| since.elapsed() < SESSION_LIFE);
        if sessions.len() >= MAX_SESSIONS {
            sessions.pop_first();
        }
        sessions.insert(endpoint.url.clone(), (Instant::now(), session.clone()));
        Ok(session)
    }

    fn forget(&self, endpoint: &Endpoint) {
        self.sessions().remove(&endpoint.url);
    }

    /// One POST and the answer to it. `url` follows redirects within its origin, unless the request carries a payment.
    #[allow(clippy::too_many_arguments, reason = "one request, its place and its bounds")]
    pub(super) async fn exchange(
        &self,
        url: &mut Url,
        headers: &Headers<'_>,
        outgoing: &Outgoing<'_>,
        body: Bytes,
        id: u64,
        deadline: Instant,
        on_progress: &mut Option<OnProgress<'_>>,
    ) -> Result<Reply, UpstreamError> {
        let counts = outgoing.method == "tools/call";
        let mut hops = 0;
        let mut streaming = loop {
            let request = self.request(url, headers, Some(outgoing), body.clone())?;
            let sent = self.http().stream(request, self.limits(deadline)).await;
            let streaming = sent.map_err(|e| UpstreamError::of(e, counts).after(hops > 0 && counts))?;
            if !streaming.head.status.is_redirection() {
                break streaming;
            }
            if outgoing.payment.is_some() {
                return Err(UpstreamError::protocol(true, "a request with a payment was redirected"));
            }
            if hops == self.inner.settings.max_redirects {
                return Err(UpstreamError::Refused("redirect"));
            }
            *url = wire::redirect(url, &streaming.head)?;
            hops += 1;
        };
        let status = streaming.head.status;
        if status == StatusCode::NOT_FOUND && headers.session.is_some() {
            return Ok(Reply::SessionLost);
        }
        let session = session_id(&streaming.head);
        let fault = |detail: String| UpstreamError::protocol(counts, detail);
        let by_status = || fault(format!("HTTP status {}", status.as_u16()));
        let answer = match wire::content(&streaming.head) {
            // An older revision's errors come with 200, those of 2026-07-28 with a status of their own.
            Content::Json if status.is_success() || status.is_client_error() => {
                let text = streaming.rest().await.map_err(|e| UpstreamError::of(e, counts))?;
                let met = wire::read(&text, id, &self.inner.settings, on_progress);
                let met = met.map_err(|e| if status.is_success() { fault(e) } else { by_status() })?;
                let answer = met.into_iter().find_map(|met| match met {
                    Met::Answer(answer) => Some(answer),
                    _ => None,
                });
                match answer {
                    Some(ToolAnswer::Result(_)) if !status.is_success() => return Err(by_status()),
                    Some(answer) => answer,
                    None if status.is_success() => return Err(fault("the answer is for another request".into())),
                    None => return Err(by_status()),
                }
            }
            Content::Events if status.is_success() => {
                self.events(&mut streaming, url, headers, id, counts, deadline, on_progress).await?
            }
            _ => return Err(by_status()),
        };
        Ok(Reply::Answer { answer, session })
    }

    /// Reads the stream up to the answer. What the seller asks meanwhile is refused; its stream is never resumed.
    #[allow(clippy::too_many_arguments, reason = "one request, its place and its bounds")]
    async fn events(
        &self,
        streaming: &mut Streaming,
        url: &Url,
        headers: &Headers<'_>,
        id: u64,
        counts: bool,
        deadline: Instant,
        on_progress: &mut Option<OnProgress<'_>>,
    ) -> Result<ToolAnswer, UpstreamError> {
        let (mut parser, mut events, mut asked) = (Parser::default(), Vec::new(), 0);
        while let Some(piece) = streaming.chunk().await.map_err(|e| UpstreamError::of(e, counts))? {
            parser.push(&piece, &mut events);
            for event in events.drain(..).filter(|event| event.name == "message" && !event.data.is_empty()) {
                let met = wire::read(&event.data, id, &self.inner.settings, on_progress);
                for met in met.map_err(|e| UpstreamError::protocol(counts, e))? {
                    match met {
                        Met::Answer(answer) => return Ok(answer),
                        Met::Asked(reply) if asked < MAX_ASKED => {
                            asked += 1;
                            self.reply(url, headers, reply, deadline).await;
                        }
                        _ => {}
                    }
                }
            }
        }
        Err(UpstreamError::protocol(counts, "the stream ended without an answer"))
    }

    /// Answers a seller's own request. Whether it arrives is the seller's concern; it never prolongs the call.
    pub(super) async fn reply(&self, url: &Url, headers: &Headers<'_>, body: Bytes, deadline: Instant) {
        // 2026-07-28 has no such requests.
        if headers.revision.is_some_and(Revision::stateless) {
            return;
        }
        if let Ok(request) = self.request(url, headers, None, body) {
            let timeout = REPLY_TIMEOUT.min(self.limits(deadline).timeout);
            let limits = Limits { timeout, max_response_bytes: 64 << 10 };
            let _ = self.http().beside().send_within(request, limits).await;
        }
    }

    /// A POST. Nothing has been sent when it fails.
    pub(super) fn request(
        &self,
        url: &Url,
        headers: &Headers<'_>,
        outgoing: Option<&Outgoing<'_>>,
        body: Bytes,
    ) -> Result<http::Request<Bytes>, UpstreamError> {
        let mut request = http::Request::post(url.as_str())
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/json, text/event-stream");
        if let Some(revision) = headers.revision.filter(|revision| *revision >= Revision::V2025_06_18) {
            request = request.header(headers::PROTOCOL_VERSION, revision.as_str());
        }
        if let Some(session) = headers.session {
            request = request.header(headers::SESSION_ID, session);
        }
        if let Some(outgoing) = outgoing.filter(|_| headers.revision.is_some_and(Revision::stateless)) {
            request = request.header(headers::METHOD, outgoing.method);
            if let Some(name) = outgoing.name {
                request = request.header(headers::NAME, headers::encode(name));
            }
            for (name, value) in &headers.params {
                request = request.header(name, value);
            }
        }
        request.body(body).map_err(|_| UpstreamError::Refused("url"))
    }

    pub(super) fn http(&self) -> &Client {
        &self.inner.http
    }
    pub(super) fn settings(&self) -> &Settings {
        &self.inner.settings
    }
    pub(super) fn limits(&self, deadline: Instant) -> Limits {
        let timeout = deadline.saturating_duration_since(Instant::now());
        Limits { timeout, max_response_bytes: self.inner.settings.max_response_bytes }
    }
    pub(super) fn next_id(&self) -> u64 {
        self.inner.next_id.fetch_add(1, Ordering::Relaxed)
    }
    fn setup_deadline(&self) -> Instant {
        Instant::now() + self.inner.settings.timeout
    }
    fn sessions(&self) -> MutexGuard<'_, Cache<Session>> {
        self.inner.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn tools(&self) -> MutexGuard<'_, Cache<Vec<LiveTool>>> {
        self.inner.tools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
