//! The way to each counterpart, and what goes wrong on it: a reverse proxy that knows which step of the paid call a
//! request is, and that answers with an error, never answers, or kills the agent server at exactly that step.

use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream;
use http::{Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use stellar_xdr::{Limits, OperationBody, ReadXdr as _, TransactionEnvelope};
use tokio_util::sync::CancellationToken;
use tollway::http::Client;

/// Where in the exchange the fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The counterpart never sees the request.
    Before,
    /// It has the request, and goes on with it; the answer reaches nobody.
    Reached,
    /// It has answered; the answer is lost.
    After,
    /// Half of its answer arrives.
    Middle,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// HTTP 500, or the connection is cut where an answer has begun.
    Error,
    /// HTTP 403: refused for good.
    Refusal,
    Hang,
    Kill,
}

/// Strikes the first request of this step, once.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub step: &'static str,
    pub at: At,
    pub how: How,
    /// A kill waits until the ledger holds the sealed payload.
    pub once_stored: bool,
}

type Count = Arc<dyn Fn() -> u64 + Send + Sync>;
type Action = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// What the proxies of one case share.
#[derive(Default)]
pub struct Board {
    rules: Mutex<Vec<Rule>>,
    fired: Mutex<Vec<Rule>>,
    /// Ends every hang that is under way.
    released: Mutex<CancellationToken>,
    kill: Mutex<Option<Action>>,
    stored: Mutex<Option<Action>>,
    paid_calls: Mutex<Option<Count>>,
    /// Challenges do not declare the tool's input schema.
    undeclared: AtomicBool,
}

impl Board {
    pub fn arm(&self, rule: Rule) {
        self.rules.lock().unwrap().push(rule);
    }

    /// From now on everything passes; what hung is cut.
    pub fn clear(&self) {
        self.rules.lock().unwrap().clear();
        std::mem::take(&mut *self.released.lock().unwrap()).cancel();
    }

    pub fn fired(&self) -> usize {
        self.fired.lock().unwrap().len()
    }

    pub fn undeclare(&self) {
        self.undeclared.store(true, Ordering::SeqCst);
    }

    /// How many paid calls have reached the seller.
    pub fn count_paid_calls(&self, count: Count) {
        *self.paid_calls.lock().unwrap() = Some(count);
    }

    pub fn on_kill(&self, action: Action) {
        *self.kill.lock().unwrap() = Some(action);
    }

    pub fn on_stored(&self, action: Action) {
        *self.stored.lock().unwrap() = Some(action);
    }

    fn strike(&self, step: &'static str) -> Option<Rule> {
        let mut rules = self.rules.lock().unwrap();
        let at = rules.iter().position(|rule| rule.step == step)?;
        Some(rules.remove(at))
    }

    fn note(&self, rule: Rule) {
        self.fired.lock().unwrap().push(rule);
    }

    async fn kill(&self, rule: Rule) {
        if rule.once_stored {
            let stored = self.stored.lock().unwrap().clone();
            if let Some(stored) = stored {
                stored().await;
            }
        }
        let kill = self.kill.lock().unwrap().clone();
        if let Some(kill) = kill {
            kill().await;
        }
    }

    fn paid_calls(&self) -> u64 {
        let count = self.paid_calls.lock().unwrap().clone();
        count.map_or(0, |count| count())
    }

    fn token(&self) -> CancellationToken {
        self.released.lock().unwrap().clone()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counterpart {
    Facilitator,
    Rpc,
    Seller,
    Signer,
}

/// Serves until `shutdown`; gives its base URL.
pub async fn start(
    counterpart: Counterpart,
    listener: tokio::net::TcpListener,
    target: String,
    board: Arc<Board>,
    http: Client,
    shutdown: CancellationToken,
) {
    let proxy = Arc::new(Proxy { counterpart, target, board, http });
    tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, _)) = accepted else { continue };
            let _ = stream.set_nodelay(true);
            let (proxy, shutdown) = (proxy.clone(), shutdown.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let proxy = proxy.clone();
                    async move { proxy.answer(request).await }
                });
                let connection = hyper::server::conn::http1::Builder::new();
                let connection = connection.serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    biased;
                    () = shutdown.cancelled() => {}
                    _ = connection => {}
                }
            });
        }
    });
}

struct Proxy {
    counterpart: Counterpart,
    target: String,
    board: Arc<Board>,
    http: Client,
}

type Body = UnsyncBoxBody<Bytes, io::Error>;

fn whole(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "cut by the test")
}

fn status(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(whole(Bytes::from_static(b"{\"error\":\"refused by the test\"}")));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

impl Proxy {
    /// An error closes the connection without an answer.
    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, io::Error> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map_err(|_| cut())?.to_bytes();
        let step = self.step(head.uri.path(), &body);
        let Some(rule) = self.board.strike(step) else { return self.forward(head, body).await };
        let token = self.board.token();
        let hang = async {
            token.cancelled().await;
            Err(cut())
        };
        match (rule.at, rule.how) {
            (At::Before, How::Error) => {
                self.board.note(rule);
                Ok(status(StatusCode::INTERNAL_SERVER_ERROR))
            }
            (_, How::Refusal) => {
                self.board.note(rule);
                Ok(status(StatusCode::FORBIDDEN))
            }
            (At::Before, How::Hang) => {
                self.board.note(rule);
                hang.await
            }
            (At::Before, How::Kill) => {
                self.board.kill(rule).await;
                self.board.note(rule);
                Err(cut())
            }
            (At::Reached, how) => {
                let (http, request) = (self.http.clone(), self.outgoing(&head, body));
                let before = self.board.paid_calls();
                tokio::spawn(async move { http.send(request).await });
                tokio::time::sleep(Duration::from_millis(30)).await;
                while step == "pay" && self.board.paid_calls() == before && !token.is_cancelled() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                if how == How::Kill {
                    self.board.kill(rule).await;
                }
                self.board.note(rule);
                if how == How::Hang { hang.await } else { Err(cut()) }
            }
            (At::After | At::Middle, how) => {
                let answered = self.forward(head, body).await?;
                let (head, body) = answered.into_parts();
                let body = body.collect().await.map_err(|_| cut())?.to_bytes();
                if rule.at == At::Middle {
                    return Ok(self.half(head, body, rule, token.clone()).await);
                }
                if how == How::Kill {
                    self.board.kill(rule).await;
                }
                self.board.note(rule);
                if how == How::Hang { hang.await } else { Err(cut()) }
            }
        }
    }

    /// Half of the body under the whole one's length; then the cut, the silence or the kill.
    async fn half(
        &self,
        mut head: http::response::Parts,
        body: Bytes,
        rule: Rule,
        token: CancellationToken,
    ) -> Response<Body> {
        head.headers.insert(header::CONTENT_LENGTH, body.len().into());
        let half = body.slice(..body.len() / 2);
        let board = self.board.clone();
        let after = async move {
            // The half is on the wire by then.
            tokio::time::sleep(Duration::from_millis(50)).await;
            if rule.how == How::Kill {
                board.kill(rule).await;
            }
            board.note(rule);
            if rule.how == How::Hang {
                token.cancelled().await;
            }
            Err(cut())
        };
        let frames = stream::unfold((Some(half), Some(Box::pin(after))), |(half, after)| async move {
            match (half, after) {
                (Some(half), after) => Some((Ok(Frame::data(half)), (None, after))),
                (None, Some(after)) => Some((after.await, (None, None))),
                (None, None) => None,
            }
        });
        Response::from_parts(head, StreamBody::new(frames).boxed_unsync())
    }

    fn outgoing(&self, head: &http::request::Parts, body: Bytes) -> Request<Bytes> {
        let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::builder().method(head.method.clone()).uri(format!("{}{path}", self.target));
        for (name, value) in &head.headers {
            if ![header::HOST, header::CONTENT_LENGTH, header::CONNECTION, header::TRANSFER_ENCODING].contains(name) {
                request = request.header(name, value);
            }
        }
        request.body(body).expect("the parts of a request make a request")
    }

    async fn forward(&self, head: http::request::Parts, body: Bytes) -> Result<Response<Body>, io::Error> {
        let answer = self.http.send(self.outgoing(&head, body)).await.map_err(|_| cut())?;
        let (mut head, body) = answer.into_parts();
        for name in [header::CONTENT_LENGTH, header::CONNECTION, header::TRANSFER_ENCODING] {
            head.headers.remove(name);
        }
        let strips = self.counterpart == Counterpart::Seller && self.board.undeclared.load(Ordering::SeqCst);
        let body = if strips { undeclare(&body) } else { body };
        Ok(Response::from_parts(head, whole(body)))
    }

    /// Which step of the story this request is.
    fn step(&self, path: &str, body: &[u8]) -> &'static str {
        let json: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
        let method = json["method"].as_str().unwrap_or_default();
        match self.counterpart {
            Counterpart::Facilitator => match path {
                "/discovery/resource" => "resolve",
                "/verify" => "verify",
                "/settle" => "settle",
                _ => "other",
            },
            Counterpart::Signer => match path {
                "/address" => "address",
                _ => "sign",
            },
            Counterpart::Seller => match method {
                "server/discover" => "discover",
                "initialize" => "initialize",
                "notifications/initialized" => "initialized",
                "tools/list" => "list",
                "tools/call" if json["params"]["_meta"]["x402/payment"].is_null() => "probe",
                "tools/call" => "pay",
                _ => "other",
            },
            Counterpart::Rpc => match method {
                "getNetwork" => "network",
                "getLatestLedger" => "ledger",
                "simulateTransaction" if has_authorization(json["params"]["transaction"].as_str()) => "simulate",
                "simulateTransaction" => "balance",
                "getLedgerEntries" => "nonce",
                "getEvents" => "events",
                "getTransaction" => "transaction",
                _ => "other",
            },
        }
    }
}

fn has_authorization(transaction: Option<&str>) -> bool {
    let envelope = TransactionEnvelope::from_xdr_base64(transaction.unwrap_or_default(), Limits::none());
    let Ok(TransactionEnvelope::Tx(envelope)) = envelope else { return false };
    let operations = envelope.tx.operations.iter();
    operations.into_iter().any(|operation| match &operation.body {
        OperationBody::InvokeHostFunction(invoke) => !invoke.auth.is_empty(),
        _ => false,
    })
}

/// The same answer without any `bazaar.info.input.inputSchema`, in texts that are JSON too.
fn undeclare(body: &Bytes) -> Bytes {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(members) => {
                if let Some(input) = members.get_mut("bazaar").and_then(|b| b.pointer_mut("/info/input")) {
                    input.as_object_mut().map(|input| input.remove("inputSchema"));
                }
                members.values_mut().for_each(strip);
            }
            Value::Array(elements) => elements.iter_mut().for_each(strip),
            Value::String(text) if text.starts_with('{') => {
                if let Ok(mut inner) = serde_json::from_str::<Value>(text) {
                    strip(&mut inner);
                    *text = inner.to_string();
                }
            }
            _ => {}
        }
    }
    match serde_json::from_slice::<Value>(body) {
        Ok(mut value) => {
            strip(&mut value);
            Bytes::from(value.to_string())
        }
        Err(_) => body.clone(),
    }
}
