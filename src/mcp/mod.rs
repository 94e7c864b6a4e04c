//! The strict MCP front: one byte-preserving JSON-RPC envelope over raw values, every revision from 2024-11-05 to
//! 2026-07-28, Streamable HTTP, the HTTP+SSE of 2024-11-05, and stdio. Shared by the agent server, the sandbox's seller and the gate.
//!
//! [`Handler`] is what stands behind it. [`http::router`] and [`stdio::stdio`] are the two doors; [`envelope`],
//! [`headers`] and [`revision`] serve the upstream client too.

#[cfg(feature = "roles")]
pub(crate) mod access;
#[cfg(feature = "roles")]
pub mod auth;
#[cfg(feature = "roles")]
mod body;
#[cfg(feature = "roles")]
mod connection;
#[cfg(feature = "roles")]
pub(crate) mod counted;
mod dispatch;
#[cfg(feature = "roles")]
mod ended;
pub mod envelope;
pub mod headers;
#[cfg(feature = "roles")]
pub mod http;
#[cfg(feature = "roles")]
mod legacy;
mod progress;
#[cfg(feature = "roles")]
pub mod proxies;
#[cfg(feature = "roles")]
pub mod rate;
pub mod revision;
#[cfg(feature = "roles")]
pub mod serve;
#[cfg(feature = "roles")]
mod session;
#[cfg(feature = "roles")]
mod signed;
pub mod stdio;

#[cfg(feature = "roles")]
pub(crate) use body::sse_event;

#[cfg(feature = "roles")]
pub use auth::{Authenticator, Identity, StaticKeys};
pub use envelope::Envelope;
#[cfg(feature = "roles")]
pub use http::{Fronts, fronts, router};
#[cfg(feature = "roles")]
pub use legacy::{LegacySse, Relay};
pub use progress::Progress;
#[cfg(feature = "roles")]
pub use rate::RateLimit;
pub use revision::Revision;
pub use stdio::stdio;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::json;
use crate::money::{AgentId, Bounds, Unit};
use crate::ports::World;
use crate::seal::KeyRing;

/// What a front is given besides its handler. [`Settings::new`] has values for a server on loopback.
#[derive(Clone)]
pub struct Settings {
    pub world: World,
    /// Signs session tokens: all replicas of one service share it.
    pub ring: KeyRing,
    /// Cancelled at SIGTERM: calls in flight then have `drain` to finish, streams end with a hint to come back.
    pub shutdown: CancellationToken,
    /// `http.allowed_hosts`: `host` (any port), `host:port` or `*`; loopback is always allowed.
    pub allowed_hosts: Vec<String>,
    /// `http.allowed_origins`: `scheme://host[:port]` or `*`; loopback is always allowed.
    pub allowed_origins: Vec<String>,
    /// Requests of one agent, or of one source address where everybody may ask; `None`: as many as it likes.
    #[cfg(feature = "roles")]
    pub rate_limit: Option<RateLimit>,
    /// What a client without a token is told.
    #[cfg(feature = "roles")]
    pub resource: auth::Resource,
    /// `GET /sse` and `POST /messages`, the transport of 2024-11-05; `None`: it is not served.
    #[cfg(feature = "roles")]
    pub legacy_sse: Option<LegacySse>,
    /// The largest request body, or line on stdio.
    pub max_body_bytes: usize,
    /// Arrays and objects inside each other in a request.
    pub max_depth: usize,
    /// Calls at once; one more is refused with 503.
    pub max_concurrent_requests: usize,
    /// Streams at once (GET, and `subscriptions/listen`), which do not count as calls.
    pub max_streams: usize,
    /// A client that sends its body slower than this is cut off.
    pub body_timeout: Duration,
    /// A call that takes longer than this is answered as a stream, where the client takes one.
    pub stream_after: Duration,
    /// Comment lines on an idle stream; proxies cut at 30 s and more.
    pub keep_alive: Duration,
    pub drain: Duration,
    /// How long a session token is good for.
    pub session_lifetime: Duration,
}

impl Settings {
    pub fn new(world: World, ring: KeyRing, shutdown: CancellationToken) -> Settings {
        Settings {
            world,
            ring,
            shutdown,
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            #[cfg(feature = "roles")]
            rate_limit: None,
            #[cfg(feature = "roles")]
            resource: auth::Resource::default(),
            #[cfg(feature = "roles")]
            legacy_sse: None,
            max_body_bytes: 1 << 20,
            max_depth: 64,
            max_concurrent_requests: 512,
            max_streams: 1024,
            body_timeout: Duration::from_secs(10),
            stream_after: Duration::from_millis(250),
            keep_alive: Duration::from_secs(15),
            drain: Duration::from_secs(30),
            session_lifetime: Duration::from_secs(24 * 3600),
        }
    }

    pub(crate) fn limits(&self) -> json::Limits {
        json::Limits { bytes: self.max_body_bytes, depth: self.max_depth }
    }
}

/// A JSON-RPC error as it goes on the wire.
#[derive(Debug, Clone)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
    pub data: Option<Box<RawValue>>,
}

/// Codes of JSON-RPC 2.0 section 5.1, and those of MCP 2026-07-28 (basic/index, "Error Codes").
pub mod code {
    pub const PARSE_ERROR: i64 = -32700;
    pub const INVALID_REQUEST: i64 = -32600;
    pub const METHOD_NOT_FOUND: i64 = -32601;
    pub const INVALID_PARAMS: i64 = -32602;
    pub const INTERNAL: i64 = -32603;
    pub const HEADER_MISMATCH: i64 = -32020;
    pub const MISSING_CAPABILITY: i64 = -32021;
    pub const UNSUPPORTED_VERSION: i64 = -32022;
    /// Until 2025-11-25; 2026-07-28 forbids it and uses [`INVALID_PARAMS`].
    pub const RESOURCE_NOT_FOUND: i64 = -32002;
}

impl RpcError {
    pub fn new(code: i64, message: impl Into<String>) -> RpcError {
        RpcError { code, message: message.into(), data: None }
    }
    pub fn invalid_request(message: impl Into<String>) -> RpcError {
        RpcError::new(code::INVALID_REQUEST, message)
    }
    pub fn method_not_found(method: &str) -> RpcError {
        RpcError::new(code::METHOD_NOT_FOUND, format!("Method not found: {}", bounded(method)))
    }
    pub fn invalid_params(message: impl Into<String>) -> RpcError {
        RpcError::new(code::INVALID_PARAMS, message)
    }
    pub fn internal(message: impl Into<String>) -> RpcError {
        RpcError::new(code::INTERNAL, message)
    }
    /// `required` is the raw object of the capabilities that the client would have to declare, such as
    /// `{"elicitation":{}}`.
    pub fn missing_capability(required: &RawValue) -> RpcError {
        let data = json::raw(&BTreeMap::from([("requiredCapabilities", required)]));
        RpcError {
            code: code::MISSING_CAPABILITY,
            message: "The request needs a capability that the client did not declare".into(),
            data: Some(data),
        }
    }
}

/// What came from outside, short enough for an error or a log.
pub(crate) fn bounded(text: &str) -> String {
    const MAX: usize = 120;
    match text.char_indices().nth(MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// What a credential says of its caller beyond the name; nothing, for a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims {
    /// A name for the session that the credential was made for. Its budget is used instead of the MCP session's, which
    /// an agent can begin anew as often as it likes.
    pub session: Option<String>,
    /// They only lower what the agent may spend.
    pub bounds: BTreeMap<Unit, Bounds>,
}

/// What a handler may know of the request it answers.
pub struct RequestContext {
    pub revision: Revision,
    /// The authenticated caller; `None` on a public, discovery-only server.
    pub agent: Option<AgentId>,
    /// A name for the MCP session or the stdio process (never the token itself); `None` in 2026-07-28 over HTTP.
    pub session: Option<String>,
    pub claims: Claims,
    /// Cancelled by `notifications/cancelled`, by a closed connection and by the end of the drain. The call itself is
    /// never dropped: a handler that has something to finish finishes it.
    pub cancelled: CancellationToken,
    /// The raw `params._meta` of the request.
    pub meta: Option<Box<RawValue>>,
    /// Sends `notifications/progress` where the request carries a progress token; otherwise does nothing.
    pub progress: Progress,
}

impl RequestContext {
    /// The raw client capabilities that a request of 2026-07-28 declares.
    pub fn client_capabilities(&self) -> Option<&RawValue> {
        json::member(self.meta.as_deref()?, revision::META_CLIENT_CAPABILITIES)
    }
}

/// What stands behind the front: the agent's tools, the sandbox's seller, later the gate.
pub trait Handler: Send + Sync + 'static {
    /// `serverInfo`: name, version; and the `instructions` text.
    fn server_info(&self) -> (&str, &str, Option<&str>);
    /// The raw `capabilities` object for this revision.
    fn capabilities(&self, revision: Revision) -> Box<RawValue>;
    /// The raw `inputSchema` of a tool whose schema has `x-mcp-header` annotations: the front checks its `Mcp-Param-*`
    /// headers against the body. `None` means that there is nothing to check.
    fn input_schema(&self, _tool: &str) -> Option<Box<RawValue>> {
        None
    }
    /// Answers `tools/list`, `tools/call` and whatever else the capabilities promise, with the raw `result` object. The
    /// front adds what a revision demands (`resultType`, `ttlMs`, `cacheScope`) where it is absent. An unknown method is
    /// `RpcError { code: -32601, .. }`.
    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>>;
    /// Whether [`Handler::end_session`] has a place to remember a session's end; without one DELETE is answered 405.
    fn ends_sessions(&self) -> bool {
        false
    }
    /// Remembers, for every replica, that this session is over; its token would be good until `expires_ms` (unix
    /// milliseconds).
    fn end_session<'a>(&'a self, _session: &'a str, _expires_ms: u64) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async { Err(RpcError::internal("Sessions cannot be ended here")) })
    }
    /// Whether somebody ended it. A place that cannot be asked says no: a session is no authorization.
    fn session_ended<'a>(&'a self, _session: &'a str) -> BoxFuture<'a, bool> {
        Box::pin(async { false })
    }
    /// Called after the answer to a request was handed to the transport (written to the socket or stdout without an
    /// error); `result` is what `call` gave. The agent server marks a keyless payment as answered here.
    fn delivered<'a>(
        &'a self,
        _context: &'a RequestContext,
        _method: &'a str,
        _result: &'a RawValue,
    ) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }
}
