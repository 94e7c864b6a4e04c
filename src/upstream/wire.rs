//! One JSON-RPC request on the wire: its body, and the answer to it out of a JSON body or an event stream.

use bytes::Bytes;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde_json::value::RawValue;

use super::{OnProgress, Settings, ToolAnswer, UpstreamError};
use crate::json::{self, Limits};
use crate::mcp::Revision;
use crate::mcp::envelope::{self, Envelope, Incoming, Outcome};
use crate::mcp::revision::{META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION};

/// What this client says of itself and of the extension that it speaks.
pub(super) const CLIENT_INFO: &str = concat!(r#"{"name":"tollway","version":""#, env!("CARGO_PKG_VERSION"), r#""}"#);
/// `elicitation` because the agent is handed a seller's question (`input_required`) and may answer it.
const CLIENT_CAPABILITIES: &str = r#"{"elicitation":{"form":{},"url":{}},"extensions":{"org.x402/payment":{}}}"#;

/// A request's `params` but for `_meta`, and what `_meta` gets.
pub(super) struct Outgoing<'a> {
    pub method: &'static str,
    /// For the `Mcp-Name` header.
    pub name: Option<&'a str>,
    pub members: Vec<(&'static str, &'a RawValue)>,
    pub payment: Option<&'a RawValue>,
    pub progress: bool,
}

impl<'a> Outgoing<'a> {
    pub fn new(method: &'static str) -> Outgoing<'a> {
        Outgoing { method, name: None, members: Vec::new(), payment: None, progress: false }
    }

    /// The whole body. Raw values go in byte for byte.
    pub fn body(&self, id: u64, revision: Revision) -> Bytes {
        let mut meta: Vec<String> = Vec::new();
        if revision.stateless() {
            meta.push(format!(r#""{META_PROTOCOL_VERSION}":"{}""#, revision.as_str()));
            meta.push(format!(r#""{META_CLIENT_INFO}":{CLIENT_INFO}"#));
            meta.push(format!(r#""{META_CLIENT_CAPABILITIES}":{CLIENT_CAPABILITIES}"#));
        }
        if self.progress {
            meta.push(format!(r#""progressToken":{id}"#));
        }
        if let Some(payment) = self.payment {
            meta.push(format!(r#""x402/payment":{payment}"#));
        }
        let mut params: Vec<String> = self.members.iter().map(|(key, raw)| format!(r#""{key}":{raw}"#)).collect();
        if !meta.is_empty() {
            params.push(format!(r#""_meta":{{{}}}"#, meta.join(",")));
        }
        let (method, params) = (self.method, params.join(","));
        Bytes::from(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{{params}}}}}"#))
    }
}

/// What one message that arrived means for the request `id`.
pub(super) enum Met {
    Answer(ToolAnswer),
    /// A request of the server, and the answer that it gets.
    Asked(Bytes),
    Nothing,
}

/// Reads one JSON body or one event's data: one message, or a batch of them (2025-03-26).
pub(super) fn read(
    text: &[u8],
    id: u64,
    settings: &Settings,
    on_progress: &mut Option<OnProgress<'_>>,
) -> Result<Vec<Met>, String> {
    let limits = Limits { bytes: settings.max_response_bytes, depth: settings.max_depth };
    let messages = match Envelope::parse(text, limits).map_err(|fault| fault.error.message)? {
        Incoming::One(one) => vec![one],
        Incoming::Batch(batch) => batch.into_iter().collect::<Result<_, _>>().map_err(|fault| fault.error.message)?,
    };
    messages.into_iter().map(|message| meaning(message, id, on_progress)).collect()
}

fn meaning(message: Envelope, id: u64, on_progress: &mut Option<OnProgress<'_>>) -> Result<Met, String> {
    let own = id.to_string();
    Ok(match message {
        Envelope::Response { id: Some(id), outcome } if id.get() == own => Met::Answer(answer(outcome)?),
        // An error about a message whose id the server could not read: ours is the only one under way.
        Envelope::Response { id: None, outcome } => Met::Answer(answer(outcome)?),
        Envelope::Response { .. } => Met::Nothing,
        Envelope::Notification { method, params: Some(params) } if method == "notifications/progress" => {
            let ours = json::member(&params, "progressToken").is_some_and(|token| token.get() == own);
            if let (true, Some(report)) = (ours, on_progress.as_mut()) {
                report(&params);
            }
            Met::Nothing
        }
        Envelope::Notification { .. } => Met::Nothing,
        Envelope::Request { id, method, .. } if method == "ping" => {
            Met::Asked(envelope::result_response(&id, &json::raw(&serde_json::json!({}))).into())
        }
        Envelope::Request { id, method, .. } => {
            let error = crate::mcp::RpcError::method_not_found(&method);
            Met::Asked(envelope::error_response(Some(&id), &error).into())
        }
    })
}

fn answer(outcome: Outcome) -> Result<ToolAnswer, String> {
    match outcome {
        Outcome::Result(raw) if raw.get().starts_with('{') => Ok(ToolAnswer::Result(raw)),
        Outcome::Result(_) => Err("the result is no object".into()),
        Outcome::Error(raw) => {
            let code = json::member(&raw, "code").and_then(|code| code.get().parse().ok());
            let code = code.ok_or("the error has no integer code")?;
            let message = json::member(&raw, "message").and_then(json::string).unwrap_or_default();
            let message = message.chars().filter(|c| !c.is_control()).take(500).collect();
            Ok(ToolAnswer::Error { code, message, data: json::member(&raw, "data").map(ToOwned::to_owned) })
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Json,
    Events,
    Other,
}

pub(super) fn content(head: &http::response::Parts) -> Content {
    let value = head.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    match value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
        "application/json" => Content::Json,
        "text/event-stream" => Content::Events,
        _ => Content::Other,
    }
}

/// Where a redirect of a request without payment leads, within its origin and with its method kept.
pub(super) fn redirect(from: &url::Url, head: &http::response::Parts) -> Result<url::Url, UpstreamError> {
    if head.status == StatusCode::SEE_OTHER {
        return Err(UpstreamError::Refused("redirect"));
    }
    let location = head.headers.get(http::header::LOCATION).and_then(|v| v.to_str().ok());
    let target = location.and_then(|l| from.join(l).ok()).ok_or(UpstreamError::Refused("redirect"))?;
    let plain = target.username().is_empty() && target.password().is_none();
    if target.origin() != from.origin() || !plain {
        return Err(UpstreamError::Refused("redirect"));
    }
    Ok(target)
}
