//! Seeds, keys, signatures, payloads and whole payment identifiers reach neither a log nor an error, whatever the log
//! filter says and whatever the other side quotes of what it was sent (hazard SIG-01).
#![allow(clippy::disallowed_methods, reason = "a server of the outside world, not business code")]

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures_util::future::BoxFuture;
use serde_json::json;
use stellar_xdr::{Limits, OperationBody, ReadXdr, ScVal, SorobanCredentials, TransactionEnvelope};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;
use tollway::ports::{BoxIo, Net, World, machine};
use tollway::sandbox::backends::{self, Options};
use tollway::sandbox::{chain, demo, start};
use tollway::telemetry;
use tracing_subscriber::Layer as _;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::pay::bench::{self, Bench, Change, challenge, output, result, rpc_error, transaction, with_receipt};
use crate::pay::faulty::Fault;
use crate::pay::server::{Reply, Request, Server};

/// What an operator who hunts a fault may write.
const LOUDEST: &str = "trace,hyper::proto=trace,hyper_util::client=trace,sqlx::query=trace,rustls=trace,tollway=trace";

/// Everything that is logged in this process from the first call on, by every test and on every thread.
pub fn logs() -> &'static Lines {
    static LOGS: OnceLock<Lines> = OnceLock::new();
    LOGS.get_or_init(|| {
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer()
            .json()
            .with_span_events(FmtSpan::FULL)
            .with_writer(move || writer.clone())
            .with_filter(telemetry::filter(LOUDEST).unwrap());
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer)).unwrap();
        // What a panic says is a log as well.
        let (writer, before) = (lines.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |panic| {
            let _ = io::Write::write(&mut writer.clone(), format!("{panic}\n").as_bytes());
            before(panic);
        }));
        lines
    })
}

#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What must not be shown, each in the spellings that it could be shown in.
#[derive(Default)]
pub struct Secrets(BTreeSet<(&'static str, String)>);

impl Secrets {
    /// As it is, as a JSON or URL writer escapes it, and as somebody would encode it to get it through.
    pub fn text(&mut self, what: &'static str, secret: &str) {
        assert!(secret.len() >= 16, "{what} is no secret: {secret:?}");
        self.spelling(what, secret.to_owned());
        self.spelling(what, secret.replace('/', "\\/"));
        let percent = secret.replace('%', "%25").replace('/', "%2F").replace('+', "%2B").replace('=', "%3D");
        self.spelling(what, percent.replace(' ', "%20"));
        self.spelling(what, hex::encode(secret));
        self.encoded(what, secret.as_bytes());
    }

    pub fn bytes(&mut self, what: &'static str, secret: &[u8]) {
        self.spelling(what, hex::encode(secret));
        self.spelling(what, hex::encode_upper(secret));
        self.spelling(what, format!("{secret:?}"));
        self.spelling(what, format!("{secret:?}").replace(", ", ","));
        self.encoded(what, secret);
    }

    fn encoded(&mut self, what: &'static str, secret: &[u8]) {
        let base64 = BASE64.encode(secret);
        let base64 = base64.trim_end_matches('=');
        self.spelling(what, base64.to_owned());
        self.spelling(what, base64.replace('/', "\\/"));
        self.spelling(what, base64.replace('+', "-").replace('/', "_"));
    }

    fn spelling(&mut self, what: &'static str, spelling: String) {
        self.0.insert((what, spelling));
    }

    /// The transaction and the signature in it.
    pub fn transaction(&mut self, base64: &str) {
        // A quotation may be cut short.
        self.text("transaction", &base64[..64]);
        let Ok(TransactionEnvelope::Tx(envelope)) = TransactionEnvelope::from_xdr_base64(base64, Limits::none()) else {
            panic!("{base64}")
        };
        let OperationBody::InvokeHostFunction(operation) = &envelope.tx.operations[0].body else { panic!("{base64}") };
        for entry in operation.auth.iter() {
            let SorobanCredentials::Address(credentials) = &entry.credentials else { continue };
            let ScVal::Vec(Some(signatures)) = &credentials.signature else { continue };
            let ScVal::Map(Some(signature)) = &signatures[0] else { panic!("{signatures:?}") };
            let bytes = signature.iter().filter_map(|member| match &member.val {
                ScVal::Bytes(bytes) if bytes.len() == 64 => Some(bytes.as_slice()),
                _ => None,
            });
            bytes.for_each(|signature| self.bytes("signature", signature));
        }
    }

    pub fn absent(&self, place: &str, text: &str) {
        for (what, secret) in &self.0 {
            if let Some(at) = text.find(secret.as_str()) {
                let start = text[..at].rfind('\n').map_or(0, |line| line + 1);
                panic!("{place} shows the {what}: {}", text[start..].lines().next().unwrap());
            }
        }
    }

    pub fn has(&self, what: &str) -> bool {
        self.0.iter().any(|(known, _)| *known == what)
    }
}

/// The machine's network, with a copy of every byte that goes over a client's connection.
struct Tapped {
    net: Arc<dyn Net>,
    wire: Lines,
}

impl Net for Tapped {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.net.resolve(host)
    }
    fn connect(&self, addr: SocketAddr) -> BoxFuture<'_, io::Result<BoxIo>> {
        Box::pin(async move {
            let io = self.net.connect(addr).await?;
            Ok(Box::new(Tap { io, wire: self.wire.clone() }) as BoxIo)
        })
    }
}

struct Tap {
    io: BoxIo,
    wire: Lines,
}

impl AsyncRead for Tap {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        self.wire.0.lock().unwrap().extend_from_slice(&buf.filled()[before..]);
        polled
    }
}

impl AsyncWrite for Tap {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = polled {
            self.wire.0.lock().unwrap().extend_from_slice(&bytes[..written]);
        }
        polled
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Every string that stands behind `"name":"` in `text`.
fn strings<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let before = format!("\"{name}\":\"");
    text.split(&before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_secret_of_a_paid_call_is_in_the_loudest_log() {
    let logs = logs();
    tracing::trace!(target: "tollway::secrets", "the log is on");
    let wire = Lines::default();
    let (world, _) = machine::world();
    let world = World { net: Arc::new(Tapped { net: world.net.clone(), wire: wire.clone() }), ..world };
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(200)), ..chain::Options::default() };
    let sandbox = start::start(Options { chain, ..Options::default() }, &world).await.unwrap();
    let report = demo::run(&sandbox, backends::client(&world).unwrap(), &|_| {}).await.unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);

    let mut secrets = Secrets::default();
    let payer = sandbox.backends.network.account("payer");
    secrets.text("seed", &payer.secret());
    secrets.bytes("seed", &payer.key.to_bytes());
    secrets.text("bearer key", sandbox.agent_key());
    let clients = sandbox.client_configuration("tollway");
    let signer = clients["stdio"]["mcpServers"]["tollway"]["env"].as_object().unwrap().values().next().unwrap();
    secrets.text("signer's token", signer.as_str().unwrap().trim_start_matches("Bearer "));
    let wire = wire.text();
    for signature in strings(&wire, "signedAuthEntryXdr") {
        secrets.bytes("signature", &BASE64.decode(signature).unwrap());
    }
    for transaction in strings(&wire, "transaction").into_iter().filter(|text| text.starts_with("AAAA")) {
        secrets.transaction(transaction);
    }
    for id in strings(&wire, "paymentIdentifier").into_iter().filter(|id| id.len() == 64) {
        secrets.text("payment identifier", id);
    }
    for what in ["signature", "transaction", "payment identifier"] {
        assert!(secrets.has(what), "no {what} was seen on the wire");
    }
    let logs = logs.text();
    assert!(logs.contains("the log is on"));
    secrets.absent("the log", &logs);
}

/// Whoever was sent the payment quotes it in a complaint; `Says` changes who, and how.
type Complaint = (&'static str, fn(&mut bench::Says));

#[tokio::test]
async fn a_complaint_that_quotes_the_payment_shows_it_to_nobody() {
    let logs = logs();
    let complaints: [Complaint; 6] = [
        ("the RPC's error", |says| {
            says.rpc.insert("transfer", rpc_error(-32602, "cannot read $transaction"));
        }),
        ("the simulation's error", |says| {
            let error = json!({"latestLedger": 1000, "error": "HostError: in\n$transaction"});
            says.rpc.insert("transfer", result(&error));
        }),
        ("the seller's status", |says| says.paid = Some(Reply::status(500, "$transaction"))),
        ("the seller's answer", |says| says.paid = Some(Reply::json("no JSON: $transaction"))),
        ("the seller's settlement", |says| {
            let claim = json!({"success": false, "errorReason": "invalid: $transaction", "transaction": "",
                "network": bench::NETWORK});
            says.paid = Some(result(&with_receipt(output(), &claim)));
        }),
        ("the seller's next challenge", |says| {
            let mut again = challenge("https://seller.example/mcp", &says.offer);
            again["structuredContent"]["error"] = json!("not paid by $transaction");
            again["content"][0]["text"] = json!(again["structuredContent"].to_string());
            says.paid = Some(result(&again));
        }),
    ];
    for (who, change) in complaints {
        let bench = Bench::new().await;
        bench.says(change);
        let arguments = bench.arguments(json!({"idempotencyKey": "0123456789abcdef"}));
        let first = bench.tool("x402_call_resource", arguments.clone(), CancellationToken::new()).await.unwrap();
        let again = bench.tool("x402_call_resource", arguments, CancellationToken::new()).await.unwrap();
        let key = json!({"idempotencyKey": "0123456789abcdef"});
        let row = bench.tool("x402_get_payment", key, CancellationToken::new()).await.unwrap();

        let mut secrets = Secrets::default();
        for request in bench.rpc.requests().iter().chain(&bench.seller.requests()) {
            let transaction = transaction(request);
            if bench::is_paid(request) || transaction.len() > 500 {
                secrets.transaction(&transaction);
            }
        }
        assert!(secrets.has("signature"), "{who}: nothing signed was sent");
        for answer in [&first, &again, &row] {
            secrets.absent(&format!("{who}: the agent's answer"), answer.get());
        }
        // The agent may know its own identifier; the log shows the beginning.
        let ids = strings(first.get(), "paymentIdentifier");
        secrets.text("payment identifier", ids.first().unwrap_or_else(|| panic!("{who}: {}", first.get())));
        secrets.absent(&format!("{who}: the log"), &logs.text());
    }
}

#[tokio::test]
async fn a_signer_that_quotes_what_it_was_asked_shows_it_to_nobody() {
    let logs = logs();
    let asked = Arc::new(Mutex::new(String::new()));
    let seen = asked.clone();
    let signer = Server::start(Arc::new(move |request: &Request| {
        if request.path.starts_with("/address") {
            return Reply::json(json!({"address": bench::PAY_TO}).to_string());
        }
        let entry = request.json()["authEntryXdr"].as_str().unwrap_or_default().to_owned();
        *seen.lock().unwrap() = entry.clone();
        Reply::status(403, &json!({"error": format!("will not sign {entry}")}).to_string())
    }))
    .await;
    let bench = Bench::with(Change { signer: Some(signer.url("/")), ..Change::default() }).await;
    let answer = bench.tool("x402_call_resource", bench.arguments(json!({})), CancellationToken::new()).await.unwrap();
    assert!(answer.get().contains("signer_refused"), "{}", answer.get());
    let mut secrets = Secrets::default();
    secrets.text("request to sign", &asked.lock().unwrap()[..64]);
    secrets.absent("the agent's answer", answer.get());
    secrets.absent("the log", &logs.text());
}

/// Bytes that are no HTTP answer, or a strange one, with the payment in them wherever a reader might quote it.
const WIRE: [(&str, &str); 9] = [
    ("junk", "$transaction\r\n\r\n"),
    ("the reason phrase", "HTTP/1.1 500 $transaction\r\ncontent-length: 0\r\n\r\n"),
    ("a header's name", "HTTP/1.1 200 OK\r\n$transaction: x\r\ncontent-length: 0\r\n\r\n"),
    ("a split header", "HTTP/1.1 200 OK\r\nx: a\r$transaction\r\ncontent-length: 0\r\n\r\n"),
    ("the length", "HTTP/1.1 200 OK\r\ncontent-length: $transaction\r\n\r\n"),
    ("a chunk's size", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n$transaction\r\n"),
    ("the coding", "HTTP/1.1 200 OK\r\ncontent-encoding: $transaction\r\ncontent-length: 0\r\n\r\n"),
    ("a redirect", "HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:9/$transaction\r\ncontent-length: 0\r\n\r\n"),
    (
        "a stream",
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {\"$transaction\"\n\nevent: $transaction\n\n",
    ),
];

#[tokio::test]
async fn an_answer_that_is_no_http_quotes_the_payment_to_nobody() {
    let logs = logs();
    for (what, bytes) in WIRE {
        for seller in [true, false] {
            let bench = Bench::new().await;
            bench.says(|says| match seller {
                true => says.paid = Some(Reply::Raw(bytes.to_owned())),
                false => drop(says.rpc.insert("transfer", Reply::Raw(bytes.to_owned()))),
            });
            let who = format!("{what} of the {}", if seller { "seller" } else { "node" });
            nothing_is_shown(&bench, &who, logs).await;
        }
    }
}

#[tokio::test]
async fn no_fault_of_the_ledger_shows_the_payment() {
    let logs = logs();
    for fault in Fault::ALL {
        let bench = Bench::new().await;
        bench.ledger.fail(fault);
        nothing_is_shown(&bench, &format!("{fault:?}"), logs).await;
    }
}

/// Calls, calls again and asks what became of it; no answer shows the payment, and no log its identifier either.
async fn nothing_is_shown(bench: &Bench, who: &str, logs: &Lines) {
    let key = json!({"idempotencyKey": "0123456789abcdef"});
    let mut answers = Vec::new();
    for _ in 0..2 {
        let arguments = bench.arguments(key.clone());
        answers.push(bench.tool("x402_call_resource", arguments, CancellationToken::new()).await);
    }
    answers.push(bench.tool("x402_get_payment", key, CancellationToken::new()).await);
    let mut secrets = Secrets::default();
    for request in bench.rpc.requests().iter().chain(&bench.seller.requests()) {
        let transaction = transaction(request);
        if bench::is_paid(request) || transaction.len() > 500 {
            secrets.transaction(&transaction);
        }
    }
    let shown = answers.iter().map(|answer| match answer {
        Ok(answer) => answer.get().to_owned(),
        Err(error) => format!("{error:?}"),
    });
    let shown: Vec<String> = shown.collect();
    for answer in &shown {
        secrets.absent(&format!("{who}: the agent's answer"), answer);
    }
    // The agent may know its own identifier.
    for id in shown.iter().flat_map(|answer| strings(answer, "paymentIdentifier")) {
        secrets.text("payment identifier", id);
    }
    secrets.absent(&format!("{who}: the log"), &logs.text());
}

#[tokio::test]
async fn keys_that_are_wrong_are_not_shown_with_the_reason() {
    let logs = logs();
    let mut secrets = Secrets::default();
    let (seed, ring) = (format!("S{}", "A2".repeat(27) + "B"), "5e".repeat(32));
    let password = "correct-horse-battery-staple";
    secrets.text("seed", &seed);
    secrets.text("keystore key", &ring);
    secrets.text("password", password);
    let (world, _) = machine::world();
    let mut said = Vec::new();
    said.push(tollway::signer::keystore::Seed::parse(&seed).err().map(|e| format!("{e} {e:?}")));
    let key = tollway::signer::keystore::KeystoreKey::parse(&ring).unwrap();
    let other = tollway::signer::keystore::KeystoreKey::parse(&"cd".repeat(32)).unwrap();
    let own = tollway::signer::keystore::Seed::generate(&world);
    let keystore = tollway::signer::keystore::Keystore::seal(&world, &own, &other);
    said.push(keystore.open(&key).err().map(|e| format!("{e} {e:?}")));
    said.push(tollway::signer::keystore::KeystoreKey::parse(&format!("{ring}0")).err().map(|e| format!("{e} {e:?}")));
    said.push(tollway::seal::KeyRing::parse(&format!("{ring},{ring}x")).err().map(|e| format!("{e} {e:?}")));
    said.push(tollway::mcp::StaticKeys::parse(&format!("one two:{ring}")).err().map(|e| format!("{e} {e:?}")));
    said.push(tollway::mcp::StaticKeys::parse(&ring).err().map(|e| format!("{e} {e:?}")));
    // A database that takes the password in the clear and quotes it in its refusal.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = [0; 1024];
            let _ = stream.read(&mut bytes).await;
            let _ = stream.write_all(b"R\0\0\0\x08\0\0\0\x03").await;
            let length = stream.read(&mut bytes).await.unwrap_or(0);
            let shown =
                String::from_utf8_lossy(bytes.get(5..length.saturating_sub(1)).unwrap_or_default()).into_owned();
            let fields = format!("SFATAL\0VFATAL\0C28P01\0Mno entry for {shown}\0\0");
            let length = u32::try_from(fields.len() + 4).unwrap().to_be_bytes();
            let _ = stream.write_all(&[b"E", &length[..], fields.as_bytes()].concat()).await;
        }
    });
    for url in [
        format!("postgres://tollway:{password}@{at}/tollway"),
        format!("postgres://tollway:{password}@127.0.0.1:9/tollway"),
        format!("postgres://tollway:{password}@/tollway"),
        format!("postgres://tollway:{password}@db.example/tollway?sslmode={password}"),
        format!("postgres://tollway:{password}@db.example:port/tollway"),
        format!("mysql://tollway:{password}@db.example/tollway"),
    ] {
        match tollway::ledger::Database::parse(&url, None) {
            Err(error) => said.push(Some(error)),
            Ok(database) => {
                said.push(Some(format!("{database:?} {}", database.shown())));
                let options = tollway::ledger::postgres::Options::default();
                let ledger = tollway::ledger::PostgresLedger::connect(&database, world.clone(), None, options).await;
                said.push(ledger.err().map(|e| format!("{e} {e:?}")));
            }
        }
    }
    let said: Vec<String> = said.into_iter().flatten().collect();
    assert!(said.len() >= 12, "{said:?}");
    for text in &said {
        secrets.absent("an error", text);
    }
    secrets.absent("the log", &logs.text());
}

#[tokio::test]
async fn a_panic_in_the_loudest_log_is_seen_by_this_test() {
    let logs = logs();
    let mark = "a-panic-that-says-this-0123456789";
    assert!(std::panic::catch_unwind(|| panic!("{mark}")).is_err());
    let mut secrets = Secrets::default();
    secrets.text("mark", mark);
    let shown = logs.text();
    assert!(std::panic::catch_unwind(|| secrets.absent("the log", &shown)).is_err(), "a panic was not recorded");
}
