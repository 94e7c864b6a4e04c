//! What an operator sees of a real `tollway serve`, and how it ends.
#![allow(clippy::disallowed_methods, reason = "a client and an operator of the outside world")]

mod metrics;
mod stop;

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tollway::ledger::{Ledger as _, Payment, SqliteLedger};

use crate::pay::bench::{ASSET, Bench, NETWORK, all};

const KEY: &str = "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a";
const PATIENCE: Duration = Duration::from_secs(30);

/// A server process between the bench's scripted catalog, seller, chain RPC and signer.
struct Serve {
    bench: Bench,
    child: Child,
    public: String,
    probe: String,
    ledger: PathBuf,
    _dir: tempfile::TempDir,
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    /// The JSON object in the body, whatever it is wrapped in (chunks, an event).
    fn json(&self) -> Value {
        let (from, to) = (self.body.find('{').unwrap(), self.body.rfind('}').unwrap());
        serde_json::from_str(&self.body[from..=to]).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

impl Serve {
    /// `http`: more of that section.
    async fn start(http: Value) -> Serve {
        let bench = Bench::new().await;
        let dir = tempfile::tempdir().unwrap();
        let ledger = dir.path().join("ledger.sqlite");
        let mut file = json!({
            "facilitator": {"base_url": bench.catalog.url("")},
            "http": {"port": 0},
            "probe": {"port": 0, "interval_ms": 100},
            "signer": {"mode": "external", "base_url": bench.signer_url()},
            "networks": {NETWORK: {"enabled": true, "rpc_urls": [bench.rpc.url("/")]}},
            "budget": {"path": ledger, "limits": [{
                "network": NETWORK, "asset": ASSET, "per_call_max_atomic": "50000", "day_max_atomic": "100000",
            }]},
            "sweep": {"interval_ms": 100},
            "network_security": {"allow_insecure_local": true, "timeout_ms": 5000},
        });
        for (name, value) in http.as_object().unwrap() {
            file["http"][name] = value.clone();
        }
        let config = dir.path().join("tollway.yaml");
        std::fs::write(&config, file.to_string()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollway"))
            .args(["serve", "--config"])
            .arg(&config)
            .env_remove("DATABASE_URL")
            .env_remove("FACILITATOR_URL")
            .env_remove("PORT")
            .env("MCP_SERVER_API_KEYS", format!("research:{KEY}"))
            .env("TOLLWAY_LOG", "tollway=info")
            .env("TOLLWAY_LOG_FORMAT", "json")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (mut public, mut probe) = (None, None);
        while public.is_none() || probe.is_none() {
            let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
            let line: Value = serde_json::from_str(&line).unwrap();
            let address = line["fields"]["address"].as_str().map(ToOwned::to_owned);
            match line["fields"]["message"].as_str().unwrap_or_default() {
                "serving MCP at /mcp" => public = address,
                "serving /livez, /readyz and /metrics" => probe = address,
                _ => {}
            }
        }
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Serve { bench, child, public: public.unwrap(), probe: probe.unwrap(), ledger, _dir: dir }
    }

    /// The stable words of `/metrics`, `/readyz`, `/livez`.
    async fn probe(&self, path: &str) -> Answer {
        exchange(&self.probe, &format!("GET {path} HTTP/1.1\r\nHost: a-pod\r\nConnection: close\r\n\r\n"))
            .await
            .unwrap()
    }

    async fn health(&self) -> Value {
        let request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        exchange(&self.public, request).await.unwrap().json()
    }

    async fn post(&self, session: Option<&str>, body: &Value) -> std::io::Result<Answer> {
        post(&self.public, session, body).await
    }

    /// A session of 2025-11-25.
    async fn session(&self) -> std::io::Result<String> {
        let initialize = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
        let answer = self.post(None, &initialize).await?;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let session = answer.head.lines().find_map(|l| {
            l.to_ascii_lowercase()
                .strip_prefix("mcp-session-id: ")
                .map(|_| l.split_once(": ").unwrap().1.trim().to_owned())
        });
        Ok(session.unwrap())
    }

    /// The paid tool with the usual arguments and `change` over them.
    fn paid_call(&self, change: Value) -> Value {
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {
            "name": "x402_call_resource", "arguments": self.bench.arguments(change)}})
    }

    /// As another process over the same file has it.
    async fn elsewhere(&self) -> SqliteLedger {
        SqliteLedger::open(&self.ledger, tollway::ports::machine::world().0, None).await.unwrap()
    }

    async fn rows(&self) -> Vec<Payment> {
        self.elsewhere().await.list(&all()).await.unwrap()
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
    }

    async fn ended(&mut self) -> Option<i32> {
        tokio::time::timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap().code()
    }
}

async fn post(at: &str, session: Option<&str>, body: &Value) -> std::io::Result<Answer> {
    let body = body.to_string();
    let session = session.map_or_else(String::new, |session| {
        format!("Mcp-Session-Id: {session}\r\nMCP-Protocol-Version: 2025-11-25\r\n")
    });
    let request = format!(
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n{session}\
         Accept: application/json\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    exchange(at, &request).await
}

async fn exchange(at: &str, request: &str) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(at).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut all = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut all)).await.unwrap()?;
    let text = String::from_utf8_lossy(&all).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    Ok(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

/// Until `found` says so.
async fn until<T>(what: &str, mut found: impl AsyncFnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = found().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("waited in vain: {what}"))
}
