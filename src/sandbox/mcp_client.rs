//! An agent's side of MCP 2026-07-28 over HTTP, as small as it can be: one stateless POST per call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::RawValue;
use zeroize::Zeroizing;

use crate::http::{Client, HttpError, Limits};
use crate::json::{self as strict, member, string};
use crate::mcp::Revision;
use crate::mcp::headers;
use crate::mcp::revision::{META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION};

const MAX_ANSWER: usize = 8 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum McpClientError {
    #[error("the server did not answer: {0}")]
    Http(#[from] HttpError),
    #[error("the server answered HTTP {0}")]
    Status(u16),
    #[error("the server's answer could not be read: {0}")]
    Malformed(String),
    #[error("JSON-RPC error {code}: {message}")]
    Rpc { code: String, message: String },
}

pub struct McpClient {
    http: Client,
    url: String,
    /// The bearer key, where the server wants one.
    key: Option<Zeroizing<String>>,
    /// What the client declares it can do.
    capabilities: serde_json::Value,
    timeout: Duration,
    id: AtomicU64,
}

impl McpClient {
    pub fn new(http: Client, url: &str, key: Option<&str>) -> McpClient {
        McpClient {
            http,
            url: url.to_owned(),
            key: key.map(|key| Zeroizing::new(key.to_owned())),
            capabilities: json!({}),
            timeout: Duration::from_secs(60),
            id: AtomicU64::new(1),
        }
    }

    /// With other client capabilities than none.
    pub fn capable_of(mut self, capabilities: serde_json::Value) -> McpClient {
        self.capabilities = capabilities;
        self
    }

    /// The raw result of `tools/call`. `extra` is added to `params` (`inputResponses`, `requestState`), `meta` to
    /// `params._meta`.
    pub async fn call_tool(
        &self,
        tool: &str,
        arguments: &serde_json::Value,
        extra: &serde_json::Value,
        meta: &[(&str, &RawValue)],
    ) -> Result<Box<RawValue>, McpClientError> {
        let malformed = |what: &str| McpClientError::Malformed(what.to_owned());
        let version = Revision::V2026_07_28.as_str();
        let mut all = vec![
            (META_PROTOCOL_VERSION, strict::raw(version)),
            (META_CLIENT_INFO, strict::raw(&json!({"name": "tollway-sandbox", "version": env!("CARGO_PKG_VERSION")}))),
            (META_CLIENT_CAPABILITIES, strict::raw(&self.capabilities)),
        ];
        all.extend(meta.iter().map(|(name, value)| (*name, (*value).to_owned())));
        let meta: std::collections::BTreeMap<_, _> = all.into_iter().collect();
        let mut params = std::collections::BTreeMap::from([
            ("name".to_owned(), strict::raw(tool)),
            ("arguments".to_owned(), strict::raw(arguments)),
            ("_meta".to_owned(), strict::raw(&meta)),
        ]);
        for (name, value) in extra.as_object().into_iter().flatten() {
            params.insert(name.clone(), strict::raw(value));
        }
        let id = self.id.fetch_add(1, Ordering::Relaxed);
        let body =
            format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{}}}"#, strict::raw(&params).get());
        let mut request = http::Request::post(&self.url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(http::header::ACCEPT, "application/json, text/event-stream")
            .header(headers::PROTOCOL_VERSION, version)
            .header(headers::METHOD, "tools/call")
            .header(headers::NAME, headers::encode(tool));
        if let Some(key) = &self.key {
            request = request.header(http::header::AUTHORIZATION, format!("Bearer {}", key.as_str()));
        }
        let request = request.body(Bytes::from(body)).map_err(|_| malformed("the URL is none"))?;
        let limits = Limits { timeout: self.timeout, max_response_bytes: MAX_ANSWER };
        let answer = self.http.send_within(request, limits).await?;
        let stream = answer
            .headers()
            .get(http::header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.starts_with("text/event-stream"));
        let text = std::str::from_utf8(answer.body()).map_err(|_| malformed("no UTF-8"))?;
        let texts = if stream { events(text) } else { vec![text.to_owned()] };
        for text in texts {
            let limits = strict::Limits { bytes: MAX_ANSWER, depth: 128 };
            let Ok(message) = strict::check(text.as_bytes(), limits) else { continue };
            if member(message, "id").map(RawValue::get) != Some(&id.to_string()) {
                continue;
            }
            if let Some(error) = member(message, "error") {
                let code = member(error, "code").map_or("", RawValue::get).to_owned();
                let message = member(error, "message").and_then(string).unwrap_or_default();
                return Err(McpClientError::Rpc { code, message: message.chars().take(300).collect() });
            }
            return member(message, "result").map(ToOwned::to_owned).ok_or_else(|| malformed("no result"));
        }
        if answer.status().is_success() {
            Err(malformed("no answer to this request"))
        } else {
            Err(McpClientError::Status(answer.status().as_u16()))
        }
    }
}

/// The `data` of each server-sent event.
fn events(stream: &str) -> Vec<String> {
    let stream = stream.replace("\r\n", "\n");
    let data = |event: &str| {
        let lines = event.lines().filter_map(|line| line.strip_prefix("data:"));
        lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>().join("\n")
    };
    stream.split("\n\n").map(data).filter(|data| !data.is_empty()).collect()
}
