//! The MCP front over real sockets and pipes, with a handler that does what a test tells it.

mod http;
mod oracle;
mod stdio;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tollway::json;
use tollway::mcp::{Handler, RequestContext, Revision, RpcError, Settings};
use tollway::ports::machine;
use tollway::seal::KeyRing;

/// Long enough for a loaded machine; nothing waits for it when all is well.
pub const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
pub struct Fixture {
    /// What happened, in order: `called x`, `cancelled x`, `ended x`, `delivered x`.
    log: Mutex<Vec<String>>,
    changed: Notify,
    /// Lets one waiting `wait` call go on.
    pub release: Notify,
    /// The place where ended sessions are remembered; `None`: there is no such place.
    pub ended: Option<Mutex<BTreeSet<String>>>,
}

impl Fixture {
    fn note(&self, what: String) {
        self.log.lock().unwrap().push(what);
        self.changed.notify_waiters();
    }

    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    /// Until `what` has happened.
    pub async fn until(&self, what: &str) {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                if self.log().iter().any(|line| line == what) {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("no {what:?} in {:?}", self.log()));
    }
}

fn raw(text: impl Into<String>) -> Box<RawValue> {
    RawValue::from_string(text.into()).unwrap()
}

impl Handler for Fixture {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        ("fixture", "1.2.3", Some("Ask nicely."))
    }

    fn capabilities(&self, _revision: Revision) -> Box<RawValue> {
        raw(r#"{"tools":{}}"#)
    }

    fn input_schema(&self, tool: &str) -> Option<Box<RawValue>> {
        (tool == "region")
            .then(|| raw(r#"{"type":"object","properties":{"region":{"type":"string","x-mcp-header":"Region"}}}"#))
    }

    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>> {
        Box::pin(async move {
            if method == "tools/list" {
                let schema = r#"{"type":"object"}"#;
                return Ok(raw(format!(
                    r#"{{"tools":[{{"name":"echo","description":"d","inputSchema":{schema}}}],"x":1.0}}"#
                )));
            }
            let (Some(params), "tools/call") = (params, method) else { return Err(RpcError::method_not_found(method)) };
            let name = json::member(params, "name").and_then(json::string).unwrap_or_default().into_owned();
            self.note(format!("called {name}"));
            let text = match name.as_str() {
                "echo" | "region" => {
                    let arguments = json::member(params, "arguments").map_or("{}", RawValue::get);
                    return Ok(raw(format!(r#"{{"content":[],"structuredContent":{arguments}}}"#)));
                }
                "who" => format!(
                    "{:?} {} {}",
                    context.agent.as_ref().map(|agent| agent.as_str()),
                    context.revision.as_str(),
                    context.session.as_deref().unwrap_or("-")
                ),
                "progress" => {
                    context.progress.report(1.0, Some(2.0), "half");
                    context.progress.report(1.0, Some(2.0), "again");
                    context.progress.report(2.0, Some(2.0), "done");
                    "progressed".into()
                }
                "wait" => {
                    self.release.notified().await;
                    "waited".into()
                }
                // Has something to finish after its caller has gone.
                "stubborn" => {
                    context.cancelled.cancelled().await;
                    self.note(format!("cancelled {name}"));
                    self.release.notified().await;
                    self.note(format!("ended {name}"));
                    "finished".into()
                }
                "panic" => panic!("on purpose"),
                "list" => return Ok(raw("[]")),
                "multiline" => return Ok(raw("{\n \"content\": [\r\n ]}")),
                "input" => return Err(RpcError::missing_capability(&raw(r#"{"elicitation":{}}"#))),
                "absent" => return Err(RpcError::new(-32002, "no such resource")),
                _ => return Err(RpcError::invalid_params("Unknown tool")),
            };
            Ok(raw(format!(r#"{{"content":[{{"type":"text","text":{}}}]}}"#, json::raw(&text))))
        })
    }

    fn ends_sessions(&self) -> bool {
        self.ended.is_some()
    }

    fn end_session<'a>(&'a self, session: &'a str, _: u64) -> BoxFuture<'a, Result<(), RpcError>> {
        self.note("ended a session".into());
        self.ended.as_ref().unwrap().lock().unwrap().insert(session.to_owned());
        Box::pin(async { Ok(()) })
    }

    fn session_ended<'a>(&'a self, session: &'a str) -> BoxFuture<'a, bool> {
        self.note("asked for a session".into());
        let ended = self.ended.as_ref().is_some_and(|ended| ended.lock().unwrap().contains(session));
        Box::pin(async move { ended })
    }

    fn delivered<'a>(&'a self, _: &'a RequestContext, method: &'a str, _: &'a RawValue) -> BoxFuture<'a, ()> {
        Box::pin(async move { self.note(format!("delivered {method}")) })
    }
}

pub fn settings() -> Settings {
    let (world, _) = machine::world();
    let ring = KeyRing::ephemeral(&world);
    Settings::new(world, ring, CancellationToken::new())
}

pub fn fixture() -> Arc<Fixture> {
    Arc::default()
}

/// The parameters of a request of 2026-07-28, with `more` members in front (each with its comma).
pub fn stateless(more: &str) -> String {
    format!(
        r#"{{{more}"_meta":{{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{{}}}}}}"#
    )
}

pub fn request(id: &str, method: &str, params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#)
}
