//! Outbound HTTP over the network port: bounded in time and bytes, no proxy, no decompression, no redirect followed
//! behind the caller's back, nothing ever sent twice, and every error says whether the request can have been seen.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio_rustls::TlsConnector;

use crate::ports::World;

/// How `https` is spoken. `Plain` exists for the simulated network only.
#[derive(Clone)]
pub enum Tls {
    Rustls(TlsConnector),
    Plain,
}

/// Who named the destination; decides which addresses may be dialled (section 5 of the design).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Named in configuration: may be private, may be plain HTTP where its owner's rules allow it.
    Operator,
    /// Named by a catalog item or a challenge: HTTPS and globally routable addresses only.
    Agent,
    /// The same with `allow_insecure_local`: plain HTTP and loopback too; link-local and metadata stay refused.
    AgentLocal,
}

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The destination is against the rules; nothing was sent. The word names the rule, not what was found there.
    #[error("destination refused: {0}")]
    Refused(&'static str),
    /// Certain: not one byte of the request has left.
    #[error("not sent: {0}")]
    NotSent(String),
    /// Certain not to have been sent, because the time was over before.
    #[error("not sent within the time limit")]
    NotSentTimeout,
    /// The request may have been acted on; no answer came in time.
    #[error("no answer within the time limit")]
    Timeout,
    /// The request may have been acted on; the connection broke or the answer was no HTTP.
    #[error("no usable answer: {0}")]
    Unknown(String),
    /// An answer came and was larger than allowed.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
}

impl HttpError {
    /// Whether the other side can have seen the request.
    pub fn may_have_been_seen(&self) -> bool {
        !matches!(self, HttpError::Refused(_) | HttpError::NotSent(_) | HttpError::NotSentTimeout)
    }
    pub fn is_timeout(&self) -> bool {
        matches!(self, HttpError::NotSentTimeout | HttpError::Timeout)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub timeout: Duration,
    pub max_response_bytes: usize,
}

/// One client per class of destination; cheap to clone; keeps connections per origin.
#[derive(Clone)]
pub struct Client {
    inner: Arc<ClientInner>,
}
struct ClientInner {
    _world: World,
    _tls: Tls,
    _destination: Destination,
    _limits: Limits,
}

/// An answer whose body is still to come (server-sent events).
pub struct Streaming {
    pub head: http::response::Parts,
}
impl Streaming {
    /// The next piece of the body; `None` at its end. Bounded by the limits of the request.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpError> {
        Err(HttpError::NotSent("not built".into()))
    }
}

impl Client {
    pub fn new(world: World, tls: Tls, destination: Destination, limits: Limits) -> Client {
        Client { inner: Arc::new(ClientInner { _world: world, _tls: tls, _destination: destination, _limits: limits }) }
    }
    /// Sends once and reads the whole answer. Redirects are answers like any other.
    pub async fn send(&self, _request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let _ = &self.inner;
        Err(HttpError::NotSent("not built".into()))
    }
    /// The same with limits of its own.
    pub async fn send_within(
        &self,
        _request: http::Request<Bytes>,
        _limits: Limits,
    ) -> Result<http::Response<Bytes>, HttpError> {
        Err(HttpError::NotSent("not built".into()))
    }
    /// Sends once and returns after the head of the answer.
    pub async fn stream(&self, _request: http::Request<Bytes>, _limits: Limits) -> Result<Streaming, HttpError> {
        Err(HttpError::NotSent("not built".into()))
    }
}

/// Whether an address may be dialled for `destination`.
pub fn address_allowed(_destination: Destination, _ip: IpAddr) -> Result<(), &'static str> {
    Err("not built")
}

/// The system's trust roots, plus the operator's CA file (PEM) where one is configured.
pub fn tls(_extra_ca_pem: Option<&[u8]>) -> Result<Tls, String> {
    Err("not built".into())
}
