//! An agent's side of MCP 2026-07-28 over Streamable HTTP: a bearer key, a new connection for each request, and an
//! answer that may never come.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tollway::http::{Client, Limits};

const VERSION: &str = "2026-07-28";

#[derive(Clone)]
pub struct Agent {
    pub name: String,
    pub key: String,
    pub url: String,
    pub http: Client,
    /// How long an answer is waited for.
    pub patience: Duration,
}

#[derive(Debug, Clone)]
pub enum Answer {
    /// `structuredContent` of a result, or the `data` of a JSON-RPC error.
    Said(Value),
    /// No answer that could be read: what was seen instead.
    Gone(String),
}

impl Agent {
    pub async fn tool(&self, tool: &str, arguments: &Value) -> Answer {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool,
            "arguments": arguments, "_meta": {
                "io.modelcontextprotocol/protocolVersion": VERSION,
                "io.modelcontextprotocol/clientInfo": {"name": "loadtest", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {}}}});
        let request = http::Request::post(&self.url)
            .header("authorization", format!("Bearer {}", self.key))
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("connection", "close")
            .header("mcp-protocol-version", VERSION)
            .header("mcp-method", "tools/call")
            .header("mcp-name", tool)
            .body(Bytes::from(body.to_string()))
            .expect("a request");
        let limits = Limits { timeout: self.patience, ..Limits::default() };
        match self.http.send_within(request, limits).await {
            Ok(answer) => Answer::of(answer.status().as_u16(), &String::from_utf8_lossy(answer.body())),
            Err(error) => Answer::Gone(error.to_string()),
        }
    }
}

impl Answer {
    /// The body: one JSON-RPC message, or a stream that ends with it.
    fn of(status: u16, body: &str) -> Answer {
        let events = body.lines().filter_map(|line| line.strip_prefix("data:"));
        let mut messages = std::iter::once(body).chain(events).filter_map(|text| serde_json::from_str(text).ok());
        match messages.rfind(|message: &Value| message["id"] == 1) {
            Some(message) if message["error"]["data"].is_object() => Answer::Said(message["error"]["data"].clone()),
            Some(message) if message["result"]["structuredContent"].is_object() => {
                Answer::Said(message["result"]["structuredContent"].clone())
            }
            _ => Answer::Gone(format!("HTTP {status}: {}", body.chars().take(200).collect::<String>())),
        }
    }

    pub fn value(&self) -> &Value {
        match self {
            Answer::Said(value) => value,
            Answer::Gone(_) => &Value::Null,
        }
    }

    fn word(&self, pointer: &str) -> &str {
        self.value().pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// `paid`, `paid:undelivered`, `SETTLEMENT_UNKNOWN/no_answer`, `gone`.
    pub fn label(&self) -> String {
        if let Answer::Gone(_) = self {
            return "gone".into();
        }
        if !self.word("/code").is_empty() {
            return format!("{}/{}", self.word("/code"), self.word("/details/reason"));
        }
        match (self.is_paid(), self.word("/outcome")) {
            (false, _) => "unpaid".into(),
            (true, "") => "paid".into(),
            (true, outcome) => format!("paid:{outcome}"),
        }
    }

    pub fn is_paid(&self) -> bool {
        self.value()["receipt"].is_object()
    }

    /// The tool's own output.
    pub fn has_output(&self) -> bool {
        self.word("/content/0/text").starts_with("It is ")
    }

    pub fn transaction(&self) -> Option<&str> {
        Some(self.word("/receipt/transaction")).filter(|word| !word.is_empty())
    }

    pub fn code(&self) -> &str {
        self.word("/code")
    }

    pub fn reason(&self) -> &str {
        self.word("/details/reason")
    }

    /// `no`, `yes` or `unknown`, of a failure.
    pub fn moved(&self) -> &str {
        self.word("/details/moneyMayHaveMoved")
    }
}
