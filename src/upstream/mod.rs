//! The way to a seller: which endpoint may be dialled at all, and the MCP client that calls it.

use std::time::Duration;

use serde_json::value::RawValue;
use url::Url;

use crate::catalog::SellerTransport;

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
    pub timeout: Duration,
}

/// What the seller said: the raw `result`, or a JSON-RPC error.
#[derive(Debug)]
pub enum ToolAnswer {
    Result(Box<RawValue>),
    Error { code: i64, message: String, data: Option<Box<RawValue>> },
}

#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// Against the rules; the word names the rule. Nothing was sent.
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
}
