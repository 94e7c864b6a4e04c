//! What an MCP server has, read from itself: for an operator who wants to see prices beside items.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use serde_json::value::RawValue;

use super::events::Events;
use super::headers;
use super::paid::rpc_error;
use super::rewrite::MAX_DEPTH;
use super::upstream::{Ask, Reply, Upstream};
use crate::gate::Kind;
use crate::json::{self, Limits};
use crate::mcp::envelope::{self, Envelope, Outcome};
use crate::mcp::{Revision, bounded, code, headers as mcp_headers};

const MAX_PAGES: usize = 200;
const MAX_BYTES: usize = 16 << 20;
const IDLE: Duration = Duration::from_secs(30);

/// One entry of a list.
pub struct Entry {
    pub kind: Kind,
    /// Its name, URI or URI template.
    pub key: String,
    /// It stands for a family of resources.
    pub template: bool,
    pub raw: Box<RawValue>,
}

const LISTS: [(Kind, &str, &str, &str); 4] = [
    (Kind::Tool, "tools/list", "tools", "name"),
    (Kind::Resource, "resources/list", "resources", "uri"),
    (Kind::Resource, "resources/templates/list", "resourceTemplates", "uriTemplate"),
    (Kind::Prompt, "prompts/list", "prompts", "name"),
];

/// All tools, resources, templates and prompts. `Err` is a sentence.
pub async fn inventory(upstream: &Upstream) -> Result<Vec<Entry>, String> {
    let mut client = Client { upstream, session: None, asked: 0 };
    let entries = client.inventory().await;
    client.end().await;
    entries
}

struct Client<'a> {
    upstream: &'a Upstream,
    session: Option<String>,
    asked: u64,
}

impl Client<'_> {
    async fn inventory(&mut self) -> Result<Vec<Entry>, String> {
        let version = Revision::V2025_11_25.as_str();
        let params = format!(
            r#"{{"protocolVersion":"{version}","capabilities":{{}},"clientInfo":{{"name":"tollway","version":"{}"}}}}"#,
            env!("CARGO_PKG_VERSION")
        );
        let stateless = match self.call("initialize", &params, None).await? {
            Ok(_) => {
                let told = envelope::notification("notifications/initialized", None);
                self.send(Method::POST, told, Some((version, ""))).await?;
                false
            }
            // A server of 2026-07-28 has no handshake.
            Err(error) if matches!(error.code, code::METHOD_NOT_FOUND | code::UNSUPPORTED_VERSION) => true,
            Err(error) => return Err(format!("initialize: {}", bounded(&error.message))),
        };
        let mut entries = Vec::new();
        for (kind, method, member, key) in LISTS {
            let mut cursor: Option<String> = None;
            for _ in 0..MAX_PAGES {
                let page = match self.list(method, cursor.as_deref(), stateless).await? {
                    Ok(page) => page,
                    // It has none of that kind.
                    Err(error) if error.code == code::METHOD_NOT_FOUND => break,
                    Err(error) => return Err(format!("{method}: {}", bounded(&error.message))),
                };
                for entry in json::member(&page, member).and_then(json::elements).unwrap_or_default() {
                    let Some(key) = json::member(entry, key).and_then(json::string) else { continue };
                    let template = method == "resources/templates/list";
                    entries.push(Entry { kind, key: key.into_owned(), template, raw: entry.to_owned() });
                }
                cursor =
                    json::member(&page, "nextCursor").filter(|c| c.get().starts_with('"')).map(|c| c.get().to_owned());
                if cursor.is_none() {
                    break;
                }
            }
        }
        Ok(entries)
    }

    async fn list(
        &mut self,
        method: &str,
        cursor: Option<&str>,
        stateless: bool,
    ) -> Result<Result<Box<RawValue>, crate::mcp::RpcError>, String> {
        let mut params: Vec<String> = cursor.map(|cursor| format!(r#""cursor":{cursor}"#)).into_iter().collect();
        let revision = if stateless { Revision::V2026_07_28 } else { Revision::V2025_11_25 };
        if stateless {
            params.push(format!(
                r#""_meta":{{"{}":"{}","{}":{{}},"{}":{{"name":"tollway","version":"{}"}}}}"#,
                crate::mcp::revision::META_PROTOCOL_VERSION,
                revision.as_str(),
                crate::mcp::revision::META_CLIENT_CAPABILITIES,
                crate::mcp::revision::META_CLIENT_INFO,
                env!("CARGO_PKG_VERSION")
            ));
        }
        self.call(method, &format!("{{{}}}", params.join(",")), Some((revision.as_str(), method))).await
    }

    async fn call(
        &mut self,
        method: &str,
        params: &str,
        head: Option<(&str, &str)>,
    ) -> Result<Result<Box<RawValue>, crate::mcp::RpcError>, String> {
        self.asked += 1;
        let id = self.asked;
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#);
        let reply = self.send(Method::POST, body, head).await?;
        if method == "initialize" {
            let session = mcp_headers::single(&reply.headers, mcp_headers::SESSION_ID).unwrap_or_default();
            self.session = session.map(ToOwned::to_owned);
        }
        match answer(reply, id).await? {
            Outcome::Result(result) => Ok(Ok(result)),
            Outcome::Error(error) => Ok(Err(rpc_error(&error))),
        }
    }

    async fn send(&self, method: Method, body: String, head: Option<(&str, &str)>) -> Result<Reply, String> {
        let mut headers = HeaderMap::new();
        headers.insert(http::header::ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some((version, method)) = head {
            for (name, value) in [(mcp_headers::PROTOCOL_VERSION, version), (mcp_headers::METHOD, method)] {
                if let Some(value) = HeaderValue::from_str(value).ok().filter(|value| !value.is_empty()) {
                    headers.insert(name, value);
                }
            }
        }
        let session = self.session.clone();
        let ask = Ask { method, headers, session, body: Bytes::from(body), ..Ask::default() };
        self.upstream.ask(ask).await.map_err(|error| error.to_string())
    }

    async fn end(&self) {
        if self.session.is_some() {
            let _ = self.send(Method::DELETE, String::new(), None).await;
        }
    }
}

async fn answer(mut reply: Reply, id: u64) -> Result<Outcome, String> {
    let limits = Limits { bytes: MAX_BYTES, depth: MAX_DEPTH };
    let read = |text: &[u8]| match Envelope::parse_one(text, limits) {
        Ok(Envelope::Response { id: Some(own), outcome }) if own.get() == id.to_string() => Some(outcome),
        _ => None,
    };
    let none = || format!("it answered HTTP {} without an MCP response", reply.status.as_u16());
    if !headers::is_stream(&reply.headers) {
        let none = none();
        let whole = reply.body.whole(MAX_BYTES, IDLE).await.map_err(|error| error.to_string())?;
        return read(&whole).ok_or(none);
    }
    let none = none();
    let (mut events, mut found) = (Events::new(MAX_BYTES), Vec::new());
    while let Some(piece) = reply.body.chunk(IDLE).await.map_err(|error| error.to_string())? {
        let fits = events.push(&piece, &mut found);
        if let Some(outcome) = found.drain(..).filter_map(|event| event.data).find_map(|data| read(&data)) {
            return Ok(outcome);
        }
        fits.map_err(|_| "its answer is too large".to_owned())?;
    }
    Err(none)
}
