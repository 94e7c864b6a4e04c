//! Replicas side by side behind nothing: each request goes to the one that the test says.
#![allow(clippy::disallowed_methods, reason = "the clients here are the outside world")]

mod handed_over;
#[cfg(feature = "sandbox")]
mod official;
mod one;
#[cfg(feature = "sandbox")]
mod paid;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::serve::{Bounds, serve, serve_within};
use tollway::mcp::{Authenticator, Handler, LegacySse, Relay, Settings, StaticKeys, fronts};
use tollway::ports::machine;
use tollway::seal::KeyRing;

pub use super::mcp::{Fixture, PATIENCE, request};

pub const ALICE: &str = "alice-alice-alice-alice-alice-alice";
pub const BOB: &str = "bob-bob-bob-bob-bob-bob-bob-bob-bob";

pub fn ring() -> KeyRing {
    KeyRing::ephemeral(&machine::world().0)
}

pub fn client() -> Client {
    Client::new(machine::world().0, Tls::Plain, Destination::Operator, Limits::default())
}

/// What a test changes of a replica.
pub struct Plan {
    pub ring: KeyRing,
    pub public: bool,
    /// What it says to be reached at, if that is not its relay listener.
    pub advertise: Option<SocketAddr>,
    pub bounds: Bounds,
    pub legacy: fn(&mut LegacySse),
    pub settings: fn(&mut Settings),
}

impl Plan {
    pub fn new(ring: &KeyRing) -> Plan {
        let (bounds, ring) = (Bounds::default(), ring.clone());
        Plan { ring, public: false, advertise: None, bounds, legacy: |_| {}, settings: |_| {} }
    }
}

pub struct Replica {
    pub addr: SocketAddr,
    pub relay: SocketAddr,
    pub fixture: Arc<Fixture>,
    pub shutdown: CancellationToken,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Replica {
    pub async fn start(plan: Plan) -> Replica {
        let fixture = Arc::<Fixture>::default();
        let mut replica = Replica::before(fixture.clone(), plan).await;
        replica.fixture = fixture;
        replica
    }

    /// Of another handler than the fixture.
    pub async fn before(handler: Arc<dyn Handler>, plan: Plan) -> Replica {
        let (world, _) = machine::world();
        let shutdown = CancellationToken::new();
        let (listener, relays) =
            (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await);
        let relays = relays.unwrap();
        let (addr, relay) = (listener.local_addr().unwrap(), relays.local_addr().unwrap());
        let mut settings = Settings::new(world.clone(), plan.ring, shutdown.clone());
        let mut legacy = LegacySse::new(Some(Relay { at: plan.advertise.unwrap_or(relay), client: client() }));
        (plan.legacy)(&mut legacy);
        settings.legacy_sse = Some(legacy);
        (plan.settings)(&mut settings);
        let keys = StaticKeys::parse(&format!("alice:{ALICE},bob:{BOB}")).unwrap();
        let authenticator = if plan.public { Authenticator::Public } else { Authenticator::keys(keys) };
        let all = fronts(settings, handler, authenticator);
        let (listener, end) = (machine::TcpListener(listener), shutdown.clone());
        let spawn = world.spawn.clone();
        spawn.spawn(Box::pin(serve_within(plan.bounds, listener, world.clone(), all.public, end.clone())));
        if let Some(app) = all.relay {
            spawn.spawn(Box::pin(serve(machine::TcpListener(relays), world, app, end)));
        }
        Replica { addr, relay, fixture: Arc::default(), shutdown }
    }

    pub async fn of(ring: &KeyRing) -> Replica {
        Replica::start(Plan::new(ring)).await
    }

    /// A message of `token`'s agent to the endpoint that a stream named.
    pub async fn post(&self, token: &str, endpoint: &str, body: &str) -> Answer {
        let headers = [("authorization", format!("Bearer {token}")), ("content-type", "application/json".into())];
        self.send("POST", endpoint, &headers, body).await
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, String)], body: &str) -> Answer {
        let mut request = http::Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(Bytes::from(body.to_owned())).unwrap();
        let (head, body) = client().send(request).await.unwrap().into_parts();
        Answer { status: head.status, headers: head.headers, body: String::from_utf8(body.to_vec()).unwrap() }
    }

    pub async fn stream(&self, token: &str) -> Sse {
        let mut connection = TcpStream::connect(self.addr).await.unwrap();
        let head = format!(
            "GET /sse HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept: text/event-stream\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        let mut sse = Sse { connection, got: String::new(), endpoint: String::new() };
        let first = sse.until("\n\n").await;
        assert!(first.starts_with("HTTP/1.1 200") && first.contains("text/event-stream"), "{first}");
        let data = first.split("event: endpoint\ndata: ").nth(1).unwrap_or_else(|| panic!("{first}"));
        sse.endpoint = data.split('\n').next().unwrap().to_owned();
        sse
    }
}

/// An open stream.
pub struct Sse {
    pub connection: TcpStream,
    got: String,
    /// Where to post.
    pub endpoint: String,
}

impl Sse {
    /// Reads until `what` has come, and gives all that came since the last time.
    pub async fn until(&mut self, what: &str) -> String {
        let read = async {
            while !self.got.contains(what) {
                let mut piece = [0; 4096];
                let n = self.connection.read(&mut piece).await.unwrap();
                assert!(n > 0, "the stream ended without {what:?}: {}", self.got);
                self.got.push_str(&String::from_utf8_lossy(&piece[..n]));
            }
        };
        let read = timeout(PATIENCE, read).await;
        assert!(read.is_ok(), "no {what:?} in {}", self.got);
        std::mem::take(&mut self.got)
    }

    /// Reads to the end of the stream.
    pub async fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        timeout(PATIENCE, self.connection.read_to_end(&mut rest)).await.expect("the stream does not end").unwrap();
        std::mem::take(&mut self.got) + &String::from_utf8_lossy(&rest)
    }
}

pub fn call(id: u32, tool: &str) -> String {
    request(&id.to_string(), "tools/call", &format!(r#"{{"name":"{tool}","arguments":{{}}}}"#))
}

/// Tries again until `done`; nothing waits when all is well.
pub async fn soon<F: Future<Output = bool>>(mut done: impl FnMut() -> F) {
    let tries = async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, tries).await.expect("it does not come to that");
}
