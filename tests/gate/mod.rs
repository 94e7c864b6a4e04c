//! `tollway gate` as a process, between clients and servers of other makers.
#![allow(clippy::disallowed_methods, reason = "clients, an upstream and an operator of the outside world")]

mod child;
mod generate;
#[cfg(feature = "sandbox")]
mod official;
mod pass;
#[cfg(feature = "sandbox")]
mod replicas;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ports::machine;

pub const PATIENCE: Duration = Duration::from_secs(30);
pub const RING: &str = "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f";
pub const PAY_TO: &str = "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4";

/// A server that says what it is told to and remembers what it was asked.
#[derive(Clone)]
pub struct Upstream {
    pub url: String,
    told: Arc<Told>,
}

type Answers = fn(&Seen) -> Says;

#[derive(Default)]
struct Told {
    seen: Mutex<Vec<Seen>>,
    next: Mutex<VecDeque<Says>>,
    always: Mutex<Option<Answers>>,
}

#[derive(Debug, Clone)]
pub struct Seen {
    pub method: Method,
    pub headers: HeaderMap,
    pub body: Bytes,
}

pub struct Says {
    pub status: StatusCode,
    pub headers: Vec<(&'static str, String)>,
    pub body: Body,
}

impl Says {
    pub fn json(body: impl Into<Bytes>) -> Says {
        let headers = vec![("content-type", "application/json".to_owned())];
        Says { status: StatusCode::OK, headers, body: Body::from(body.into()) }
    }

    pub fn events(body: impl Into<Body>) -> Says {
        let headers = vec![("content-type", "text/event-stream".to_owned())];
        Says { status: StatusCode::OK, headers, body: body.into() }
    }

    pub fn empty(status: u16) -> Says {
        Says { status: StatusCode::from_u16(status).unwrap(), headers: Vec::new(), body: Body::empty() }
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Says {
        self.headers.push((name, value.to_owned()));
        self
    }
}

impl Upstream {
    pub async fn start() -> Upstream {
        let told = Arc::<Told>::default();
        let app = axum::Router::new().fallback(answer).with_state(told.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/some/mcp", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Upstream { url, told }
    }

    pub fn says(&self, says: Says) {
        self.told.next.lock().unwrap().push_back(says);
    }

    /// Where nothing else was said.
    pub fn always(&self, says: Answers) {
        *self.told.always.lock().unwrap() = Some(says);
    }

    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.told.seen.lock().unwrap())
    }

    pub fn last(&self) -> Seen {
        self.seen().pop().expect("nothing arrived")
    }
}

async fn answer(State(told): State<Arc<Told>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let seen = Seen { method: head.method, headers: head.headers, body };
    let next = told.next.lock().unwrap().pop_front();
    let always = *told.always.lock().unwrap();
    let says = next.unwrap_or_else(|| always.map_or_else(|| Says::empty(202), |says| says(&seen)));
    told.seen.lock().unwrap().push(seen);
    let mut response = Response::builder().status(says.status);
    for (name, value) in says.headers {
        response = response.header(name, value);
    }
    response.body(says.body).unwrap()
}

/// The gate's process.
pub struct GateProcess {
    pub child: Child,
    pub url: String,
    pub log: Arc<Mutex<Vec<Value>>>,
    config: Value,
    dir: tempfile::TempDir,
}

/// What stands in a gate's file unless a test says otherwise. Nothing of it is reached while nothing is paid.
pub fn config(upstream: &Value) -> Value {
    json!({
        "http": {"port": 0, "drain_ms": 5000},
        "probe": {"port": 0, "interval_ms": 100},
        "keys": {"ring_env": "TOLLWAY_KEY_RING"},
        "network_security": {"allow_insecure_local": true, "timeout_ms": 5000},
        "gate": {
            "upstream": upstream,
            "default": "free",
            "unknown": {"stellar:testnet": "operator"},
            "facilitator": {"base_url": "http://127.0.0.1:9"},
            "defaults": {"network": "stellar:testnet", "asset": "USDC", "pay_to": PAY_TO},
            "tools": {"paid": {"price": "0.01"}},
            "resources": {"docs://{id}": {"price": "0.002"}},
            "prompts": {"brief": {"price": "0.005"}},
        },
    })
}

impl GateProcess {
    /// With claims of its own, unless its file names others.
    pub async fn start(config: &Value) -> GateProcess {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config.clone();
        if config["budget"].is_null() {
            config["budget"] = json!({"path": dir.path().join("claims.sqlite")});
        }
        GateProcess::started(dir, config, None).await
    }

    /// One of several on a database.
    pub async fn replica(config: &Value, database: &str) -> GateProcess {
        let mut config = config.clone();
        config["budget"] = json!({"store": "postgres"});
        GateProcess::started(tempfile::tempdir().unwrap(), config, Some(database)).await
    }

    async fn started(dir: tempfile::TempDir, config: Value, database: Option<&str>) -> GateProcess {
        let file = dir.path().join("gate.yaml");
        std::fs::write(&file, config.to_string()).unwrap();
        let mut command = command(&["gate", "--config", file.to_str().unwrap()]);
        command.envs(database.map(|url| ("DATABASE_URL", url)));
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::<Mutex<Vec<Value>>>::default();
        let url = loop {
            let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
            let line = line.unwrap_or_else(|| panic!("the gate did not start: {:?}", log.lock().unwrap()));
            let line: Value = serde_json::from_str(&line).unwrap_or(Value::String(line));
            let address = line["fields"]["address"].as_str().map(ToOwned::to_owned);
            let open = line["fields"]["message"] == "a gate is open at /mcp";
            log.lock().unwrap().push(line);
            if let (true, Some(address)) = (open, address) {
                break format!("http://{address}/mcp");
            }
        };
        let more = log.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                more.lock().unwrap().push(serde_json::from_str(&line).unwrap_or(Value::String(line)));
            }
        });
        GateProcess { child, url, log, config, dir }
    }

    pub fn probe(&self) -> String {
        let log = self.log.lock().unwrap();
        let line = log.iter().find(|line| line["fields"]["message"] == "serving /livez, /readyz and /metrics");
        format!("http://{}", line.unwrap()["fields"]["address"].as_str().unwrap())
    }

    /// Another file from now on, made of the one that it began with.
    pub fn rewrite(&self, change: impl FnOnce(&mut Value)) {
        let mut config = self.config.clone();
        change(&mut config);
        std::fs::write(self.dir.path().join("gate.yaml"), config.to_string()).unwrap();
    }

    /// Whether some line of the log says so.
    pub fn logged(&self, words: &str) -> bool {
        let log = self.log.lock().unwrap();
        log.iter().any(|line| line["fields"]["message"].as_str().is_some_and(|message| message.contains(words)))
    }

    pub fn signal(&self, name: &str) {
        let id = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
    }
}

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollway"));
    command
        .args(args)
        .env_remove("DATABASE_URL")
        .env_remove("PORT")
        .env("TOLLWAY_KEY_RING", RING)
        .env("TOLLWAY_LOG", "tollway=info")
        .env("TOLLWAY_LOG_FORMAT", "json")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

pub fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/gate").join(name)
}

pub fn client() -> Client {
    let limits = Limits { timeout: PATIENCE, max_response_bytes: 64 << 20 };
    Client::new(machine::world().0, Tls::Plain, Destination::Operator, limits)
}

pub struct Got {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Got {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        let text = self.text();
        let text = if text.starts_with('{') { text } else { &text[text.find('{').unwrap()..=text.rfind('}').unwrap()] };
        serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

pub async fn send(client: &Client, method: Method, url: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Got {
    try_send(client, method, url, headers, body).await.unwrap()
}

/// `None`: whoever was asked is gone.
pub async fn try_send(
    client: &Client,
    method: Method,
    url: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Option<Got> {
    let mut request = http::Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (head, body) = client.send(request.body(body.into()).unwrap()).await.ok()?.into_parts();
    Some(Got { status: head.status.as_u16(), headers: head.headers, body })
}

pub const BOTH: (&str, &str) = ("accept", "application/json, text/event-stream");
pub const JSON: (&str, &str) = ("content-type", "application/json");

pub async fn post(client: &Client, url: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Got {
    let all: Vec<(&str, &str)> = [BOTH, JSON].iter().chain(headers).copied().collect();
    send(client, Method::POST, url, &all, body).await
}

pub fn request(id: u64, method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string()
}

pub fn initialize(version: &str) -> String {
    request(
        1,
        "initialize",
        &json!({
        "protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}),
    )
}
