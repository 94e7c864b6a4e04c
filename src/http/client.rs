//! The client: one request, one answer, connections kept per origin.
//!
//! Whether a request can have been seen is decided in one place, `exchange`: hyper hands a request back when it was
//! never taken up by the connection. Only such a request may go out on another connection; any other failure from
//! there on is *unknown*, however early it looks.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderMap, StatusCode};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::connect::{Origin, Sender, connect, short};
use super::{Destination, HttpError, Limits, Tls};
use crate::ports::World;

/// A kept connection older than this is closed. Common servers close theirs after 5 s, and a request written into that
/// close would be *unknown* for no reason.
const IDLE: Duration = Duration::from_secs(4);
const MAX_IDLE_PER_ORIGIN: usize = 8;
const MAX_IDLE: usize = 64;
/// hyper takes a connection back a moment after the body has ended.
const READY: Duration = Duration::from_millis(50);

/// One client per class of destination; cheap to clone; keeps connections per origin.
#[derive(Clone)]
pub struct Client {
    inner: Arc<ClientInner>,
    /// Takes no place of its own under the bound on concurrency, see [`Client::beside`].
    beside: bool,
}
struct ClientInner {
    world: World,
    tls: Tls,
    destination: Destination,
    limits: Limits,
    concurrency: Option<Arc<Semaphore>>,
    idle: Mutex<BTreeMap<Origin, Vec<(Instant, Sender)>>>,
}

impl Client {
    pub fn new(world: World, tls: Tls, destination: Destination, limits: Limits) -> Client {
        Client::build(world, tls, destination, limits, None)
    }

    /// The same with at most `connections` requests under way at once, over all clones; more wait, within their time.
    pub fn with_concurrency(
        world: World,
        tls: Tls,
        destination: Destination,
        limits: Limits,
        connections: usize,
    ) -> Client {
        let bound = connections.clamp(1, Semaphore::MAX_PERMITS);
        Client::build(world, tls, destination, limits, Some(Arc::new(Semaphore::new(bound))))
    }

    fn build(
        world: World,
        tls: Tls,
        destination: Destination,
        limits: Limits,
        concurrency: Option<Arc<Semaphore>>,
    ) -> Client {
        let idle = Mutex::new(BTreeMap::new());
        Client { inner: Arc::new(ClientInner { world, tls, destination, limits, concurrency, idle }), beside: false }
    }

    /// For requests that belong to a stream which already holds a place: waiting for another place while holding one
    /// could stop all of them for good.
    pub fn beside(&self) -> Client {
        Client { inner: self.inner.clone(), beside: true }
    }

    pub fn destination(&self) -> Destination {
        self.inner.destination
    }

    pub fn limits(&self) -> Limits {
        self.inner.limits
    }

    /// Sends once and reads the whole answer. Redirects are answers like any other.
    pub async fn send(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        self.send_within(request, self.inner.limits).await
    }

    /// The same with limits of its own.
    pub async fn send_within(
        &self,
        request: http::Request<Bytes>,
        limits: Limits,
    ) -> Result<http::Response<Bytes>, HttpError> {
        let mut streaming = self.stream(request, limits).await?;
        let body = streaming.rest().await?;
        Ok(http::Response::from_parts(streaming.into_head(), body))
    }

    /// Sends once and returns after the head of the answer. The limits hold for the body too.
    pub async fn stream(&self, request: http::Request<Bytes>, limits: Limits) -> Result<Streaming, HttpError> {
        let deadline = Instant::now() + limits.timeout;
        let (origin, request) = self.prepare(request)?;
        let permit = match self.inner.concurrency.as_ref().filter(|_| !self.beside) {
            None => None,
            Some(bound) => match timeout_at(deadline, bound.clone().acquire_owned()).await {
                Ok(Ok(permit)) => Some(permit),
                _ => return Err(HttpError::NotSentTimeout),
            },
        };
        let (sender, response) = self.exchange(&origin, request, deadline).await?;
        let (head, body) = response.into_parts();
        refuse_codings(&head.headers)?;
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(HttpError::Unknown("the answer switches protocols, which was not asked for".into()));
        }
        if body.size_hint().lower() > limits.max_response_bytes as u64 {
            return Err(HttpError::TooLarge(limits.max_response_bytes));
        }
        let mut streaming = Streaming {
            head,
            body,
            left: limits.max_response_bytes,
            limit: limits.max_response_bytes,
            deadline,
            keep: Some((self.clone(), origin, sender)),
            _permit: permit,
        };
        if streaming.body.is_end_stream() {
            streaming.finished();
        }
        Ok(streaming)
    }

    fn prepare(&self, request: http::Request<Bytes>) -> Result<(Origin, http::Request<Full<Bytes>>), HttpError> {
        let (mut head, body) = request.into_parts();
        let origin = Origin::of(&head.uri, self.inner.destination)?;
        let target = head.uri.path_and_query().map_or("/", |p| p.as_str());
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        head.uri = target.parse().map_err(|_| HttpError::Refused("url"))?;
        head.version = http::Version::HTTP_11;
        let host = HeaderValue::from_str(&origin.host_header()).map_err(|_| HttpError::Refused("host_name"))?;
        head.headers.insert(HOST, host);
        head.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        head.headers
            .entry(USER_AGENT)
            .or_insert(HeaderValue::from_static(concat!("tollway/", env!("CARGO_PKG_VERSION"))));
        Ok((origin, http::Request::from_parts(head, Full::new(body))))
    }

    /// One request on one connection. A request that a kept connection hands back untouched goes on a new one.
    async fn exchange(
        &self,
        origin: &Origin,
        mut request: http::Request<Full<Bytes>>,
        deadline: Instant,
    ) -> Result<(Sender, http::Response<Incoming>), HttpError> {
        let mut kept = self.take(origin, deadline).await;
        loop {
            let reused = kept.is_some();
            let mut sender = match kept.take() {
                Some(sender) => sender,
                None => {
                    let ClientInner { world, tls, destination, .. } = &*self.inner;
                    connect(world, tls, *destination, origin, deadline).await?
                }
            };
            match timeout_at(deadline, sender.try_send_request(request)).await {
                Err(_) => return Err(HttpError::Timeout),
                Ok(Ok(response)) => return Ok((sender, response)),
                Ok(Err(mut error)) => match error.take_message() {
                    Some(unsent) if reused => request = unsent,
                    Some(_) => return Err(HttpError::NotSent(short(error.error()))),
                    None => return Err(HttpError::Unknown(short(error.error()))),
                },
            }
        }
    }

    async fn take(&self, origin: &Origin, deadline: Instant) -> Option<Sender> {
        loop {
            let mut sender = {
                let mut idle = self.inner.idle.lock().unwrap_or_else(PoisonError::into_inner);
                prune(&mut idle);
                idle.get_mut(origin)?.pop()?.1
            };
            let within = deadline.min(Instant::now() + READY);
            if let Ok(Ok(())) = timeout(within - Instant::now(), sender.ready()).await {
                return Some(sender);
            }
        }
    }

    fn keep(&self, origin: Origin, sender: Sender) {
        if sender.is_closed() {
            return;
        }
        let mut idle = self.inner.idle.lock().unwrap_or_else(PoisonError::into_inner);
        prune(&mut idle);
        if idle.values().map(Vec::len).sum::<usize>() < MAX_IDLE {
            let kept = idle.entry(origin).or_default();
            if kept.len() < MAX_IDLE_PER_ORIGIN {
                kept.push((Instant::now(), sender));
            }
        }
    }
}

/// Nothing but plain bytes was asked for, and a length that is said twice is a length that two readers take differently
/// (RFC 9112, section 6.3).
fn refuse_codings(headers: &HeaderMap) -> Result<(), HttpError> {
    let only = |name: &HeaderName, word: &[u8]| {
        headers.get_all(name).iter().all(|value| value.as_bytes().eq_ignore_ascii_case(word))
    };
    if !only(&CONTENT_ENCODING, b"identity") || !only(&TRANSFER_ENCODING, b"chunked") {
        return Err(HttpError::Unknown("the answer is encoded, which was not asked for".into()));
    }
    if headers.contains_key(TRANSFER_ENCODING) && headers.contains_key(CONTENT_LENGTH) {
        return Err(HttpError::Unknown("the answer says its length in two ways".into()));
    }
    Ok(())
}

/// Dropping a sender closes its connection.
fn prune(idle: &mut BTreeMap<Origin, Vec<(Instant, Sender)>>) {
    idle.retain(|_, kept| {
        kept.retain(|(since, sender)| since.elapsed() < IDLE && !sender.is_closed());
        !kept.is_empty()
    });
}

/// An answer whose body is still to come (server-sent events). Dropped early, it closes its connection.
pub struct Streaming {
    pub head: http::response::Parts,
    body: Incoming,
    left: usize,
    limit: usize,
    deadline: Instant,
    keep: Option<(Client, Origin, Sender)>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Streaming {
    /// The next piece of the body; `None` at its end. Bounded by the limits of the request.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpError> {
        loop {
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx));
            match timeout_at(self.deadline, frame).await {
                Err(_) => {
                    self.keep = None;
                    return Err(HttpError::Timeout);
                }
                Ok(None) => {
                    self.finished();
                    return Ok(None);
                }
                Ok(Some(Err(error))) => {
                    self.keep = None;
                    return Err(HttpError::Unknown(short(&error)));
                }
                Ok(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else { continue };
                    self.left = self.left.checked_sub(data.len()).ok_or(HttpError::TooLarge(self.limit))?;
                    if !data.is_empty() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// All that is left of the body.
    pub async fn rest(&mut self) -> Result<Bytes, HttpError> {
        let mut all = BytesMut::new();
        while let Some(piece) = self.chunk().await? {
            all.extend_from_slice(&piece);
        }
        Ok(all.freeze())
    }

    pub fn into_head(self) -> http::response::Parts {
        self.head
    }

    fn finished(&mut self) {
        if let Some((client, origin, sender)) = self.keep.take() {
            client.keep(origin, sender);
        }
    }
}
