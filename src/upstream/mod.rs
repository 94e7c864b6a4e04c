//! The way to a seller: which endpoint may be dialled at all, and the MCP client that calls it.

mod client;
mod endpoint;
mod legacy;
mod session;
mod sse;
mod wire;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::value::RawValue;
use url::Url;

use crate::catalog::SellerTransport;
use crate::http::{Client, Destination, HttpError, Limits, Tls};
use crate::mcp::Revision;
use crate::policy::LivePolicy;
use crate::ports::World;

pub use client::Upstream;

/// `network_security` of the configuration, as far as sellers are concerned.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Bounds everything but the call itself, which brings its own.
    pub timeout: Duration,
    /// The most that one answer, or all events of one stream together, may have.
    pub max_response_bytes: usize,
    /// Arrays and objects inside each other in one message.
    pub max_depth: usize,
    /// Same-origin redirects followed for one request that carries no payment.
    pub max_redirects: usize,
    pub max_concurrent_connections: usize,
    pub allow_insecure_local: bool,
    /// `mcp://` identifiers that the operator gave an address.
    pub resolved_mcp_endpoints: BTreeMap<String, Url>,
    /// The operator's lists of origins.
    pub policy: LivePolicy,
}

/// The rule that refuses an endpoint which the operator's lists do not allow.
pub const NOT_ALLOWED: &str = "not_allowed";

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            timeout: Duration::from_secs(15),
            max_response_bytes: 8 << 20,
            max_depth: 64,
            max_redirects: 3,
            max_concurrent_connections: 10,
            allow_insecure_local: false,
            resolved_mcp_endpoints: BTreeMap::new(),
            policy: LivePolicy::default(),
        }
    }
}

impl Settings {
    /// The client for destinations that agents name.
    pub fn client(&self, world: World, tls: Tls) -> Client {
        let destination = if self.allow_insecure_local { Destination::AgentLocal } else { Destination::Agent };
        let limits = Limits { timeout: self.timeout, max_response_bytes: self.max_response_bytes };
        Client::with_concurrency(world, tls, destination, limits, self.max_concurrent_connections)
    }
}

/// An endpoint that passed the rules (HTTPS, mapped `mcp://`); its addresses are checked again at every dial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub url: Url,
    pub transport: SellerTransport,
}

/// One `tools/call`: exactly the arguments that the agent gave.
pub struct ToolCall<'a> {
    pub tool: &'a str,
    pub arguments: &'a RawValue,
    pub input_responses: Option<&'a RawValue>,
    pub request_state: Option<&'a RawValue>,
    /// The `PaymentPayload` for `_meta["x402/payment"]`; `None` is the unpaid call.
    pub payment: Option<&'a RawValue>,
    /// From here to the answer, setting a session up included.
    pub timeout: Duration,
}

/// What the seller said: the raw `result`, or a JSON-RPC error.
#[derive(Debug)]
pub enum ToolAnswer {
    Result(Box<RawValue>),
    Error { code: i64, message: String, data: Option<Box<RawValue>> },
}

/// Gets the raw `params` of each `notifications/progress` that belongs to the call.
pub type OnProgress<'a> = &'a mut (dyn FnMut(&RawValue) + Send);

/// One tool of a live `tools/list`.
#[derive(Debug, Clone)]
pub struct LiveTool {
    pub name: String,
    pub raw: Box<RawValue>,
}
impl LiveTool {
    pub fn input_schema(&self) -> Option<&RawValue> {
        crate::json::member(&self.raw, "inputSchema")
    }
}

/// What a probe found, without calling any tool.
#[derive(Debug, Clone)]
pub struct Liveness {
    pub revision: Revision,
    pub tools: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// Against the rules; the word names the rule. No payment was sent, and nothing at all to the place refused.
    #[error("endpoint refused: {0}")]
    Refused(&'static str),
    #[error("the seller did not answer in time")]
    Timeout { sent: bool },
    #[error("the seller could not be reached or its answer could not be used: {detail}")]
    Protocol { sent: bool, detail: String },
}

impl UpstreamError {
    /// Whether the seller can have seen the `tools/call`.
    pub fn may_have_been_seen(&self) -> bool {
        match self {
            UpstreamError::Refused(_) => false,
            UpstreamError::Timeout { sent } | UpstreamError::Protocol { sent, .. } => *sent,
        }
    }

    /// The error of a request that was not the `tools/call`: set-up before it, where `sent` is false, or after it.
    fn of_setup(error: HttpError, sent: bool) -> UpstreamError {
        UpstreamError::of(error, false).after(sent)
    }

    /// The error of a request; `counts` says whether it was the `tools/call`.
    fn of(error: HttpError, counts: bool) -> UpstreamError {
        let sent = counts && error.may_have_been_seen();
        match error {
            HttpError::Refused(word) => UpstreamError::Refused(word),
            error if error.is_timeout() => UpstreamError::Timeout { sent },
            error => UpstreamError::Protocol { sent, detail: error.to_string() },
        }
    }

    fn protocol(sent: bool, detail: impl Into<String>) -> UpstreamError {
        UpstreamError::Protocol { sent, detail: detail.into() }
    }

    /// The same error of a step behind one in which the `tools/call` was already seen (`seen`).
    fn after(self, seen: bool) -> UpstreamError {
        match self {
            error if !seen => error,
            UpstreamError::Refused(word) => UpstreamError::protocol(true, format!("refused: {word}")),
            UpstreamError::Timeout { .. } => UpstreamError::Timeout { sent: true },
            UpstreamError::Protocol { detail, .. } => UpstreamError::protocol(true, detail),
        }
    }
}
