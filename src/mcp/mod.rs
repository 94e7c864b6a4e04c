//! The strict MCP front: one byte-preserving JSON-RPC envelope over raw values, every revision from 2024-11-05 to
//! 2026-07-28, Streamable HTTP and stdio. Shared by the agent server, the sandbox's seller and the gate.

#[cfg(feature = "roles")]
pub mod serve;

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::money::AgentId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Revision {
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
}

/// A JSON-RPC error as it goes on the wire.
#[derive(Debug, Clone)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
    pub data: Option<Box<RawValue>>,
}

/// What a handler may know of the request it answers.
pub struct RequestContext {
    pub revision: Revision,
    /// The authenticated caller; `None` on a public, discovery-only server.
    pub agent: Option<AgentId>,
    /// A name for the MCP session (never the token itself); `None` in 2026-07-28 without a session claim.
    pub session: Option<String>,
    /// Cancelled by `notifications/cancelled` and by a closed connection.
    pub cancelled: CancellationToken,
    /// The raw `params._meta` of the request.
    pub meta: Option<Box<RawValue>>,
    /// Sends `notifications/progress` where the request carries a progress token; otherwise does nothing.
    pub progress: Progress,
}

#[derive(Clone, Default)]
pub struct Progress {}
impl Progress {
    pub fn report(&self, _progress: f64, _total: Option<f64>, _message: &str) {}
}

/// What stands behind the front: the agent's tools, the sandbox's seller, later the gate.
pub trait Handler: Send + Sync + 'static {
    /// `serverInfo`: name, version; and the `instructions` text.
    fn server_info(&self) -> (&str, &str, Option<&str>);
    /// The raw `capabilities` object for this revision.
    fn capabilities(&self, revision: Revision) -> Box<RawValue>;
    /// Answers `tools/list`, `tools/call` and whatever else the capabilities promise, with the raw `result` object. The
    /// front adds what a revision demands (`resultType`, `ttlMs`, `cacheScope`) where it is absent. An unknown method is
    /// `RpcError { code: -32601, .. }`.
    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>>;
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
