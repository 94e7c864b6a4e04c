//! Who may ask over HTTP, through the configuration, over real sockets and with real keys.
#![allow(clippy::disallowed_methods, reason = "the clients, the issuer and the API server are the outside world")]

mod issuer;
mod jwt;
mod keys;
mod kubernetes;
mod limits;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::agent::server::Server;
use tollway::config::{self, Config, ConfigError, Source, Transport};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::serve::serve;
use tollway::ports::machine;
use zeroize::Zeroizing;

pub const ALICE: &str = "alice-alice-alice-alice-alice-alice";
pub const BOB: &str = "bob-bob-bob-bob-bob-bob-bob-bob-bob";

/// The environment of a test; files are real.
pub struct Env(pub BTreeMap<&'static str, String>);

impl Source for Env {
    fn env(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }
    fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
        std::fs::read(path).map(Zeroizing::new)
    }
}

/// Remote, discovery only, with `more` (JSON, which YAML is a superset of).
pub fn parse(more: Value, env: &[(&'static str, &str)]) -> Result<Config, ConfigError> {
    let mut file = json!({"facilitator": {"base_url": "https://catalog.example"}, "transport": "streamable-http"});
    file.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut env: BTreeMap<_, _> = env.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    env.entry("HOME").or_insert("/nonexistent".into());
    config::parse(&file.to_string(), Some(Transport::Remote), &Env(env))
}

pub struct Front {
    pub addr: SocketAddr,
    client: Client,
    shutdown: CancellationToken,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Answer {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

impl Front {
    pub async fn start(more: Value, env: &[(&'static str, &str)]) -> Front {
        Front::of(&parse(more, env).unwrap()).await
    }

    pub async fn of(config: &Config) -> Front {
        let (world, _) = machine::world();
        let server = Server::start(config, &world).await.unwrap();
        Front::over(server.router(config, server.health(config), CancellationToken::new())).await
    }

    pub async fn over(app: axum::Router) -> Front {
        let (world, _) = machine::world();
        let shutdown = CancellationToken::new();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = serve(machine::TcpListener(listener), world.clone(), app, shutdown.clone());
        world.spawn.spawn(Box::pin(serving));
        let client = Client::new(world.clone(), Tls::Plain, Destination::Operator, Limits::default());
        Front { addr, client, shutdown }
    }

    pub async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Value) -> Answer {
        let mut request = http::Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let request = request.header("accept", "application/json").body(body).unwrap();
        let (head, body) = self.client.send(request).await.unwrap().into_parts();
        Answer { status: head.status, headers: head.headers, body: serde_json::from_slice(&body).unwrap_or_default() }
    }

    /// `tools/list` of 2026-07-28, which needs no session.
    pub async fn ask(&self, token: Option<&str>) -> Answer {
        self.tool(token, "tools/list", json!({}), &[]).await
    }

    pub async fn tool(&self, token: Option<&str>, method: &str, params: Value, more: &[(&str, &str)]) -> Answer {
        let bearer = token.map(|token| format!("Bearer {token}"));
        let mut headers = vec![("mcp-protocol-version", "2026-07-28"), ("mcp-method", method)];
        headers.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
        headers.extend(more);
        let mut params = params;
        params["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {}});
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.send(Method::POST, "/mcp", &headers, body).await
    }

    /// `initialize`, and the session's token.
    pub async fn session(&self, token: &str) -> String {
        let bearer = format!("Bearer {token}");
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"}});
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params});
        let answer = self.send(Method::POST, "/mcp", &[("authorization", &bearer)], body).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        answer.header("mcp-session-id").to_owned()
    }

    /// A request within a session.
    pub async fn within(&self, session: &str, token: &str, method: &str, params: Value) -> Answer {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str()), ("mcp-session-id", session)];
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.send(Method::POST, "/mcp", &headers, body).await
    }

    /// Asks until `status` comes.
    pub async fn until(&self, token: &str, status: StatusCode) {
        let asking = async {
            while self.ask(Some(token)).await.status != status {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), asking).await.unwrap_or_else(|_| panic!("never {status}"));
    }
}

/// What waits for time to pass sees it pass at once.
pub async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}
