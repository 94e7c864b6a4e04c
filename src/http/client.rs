//! The client: one request, one answer, connections kept per origin.
//!
//! Whether a request can have been seen is decided in one place, `exchange`: hyper hands a request back when it was
//! never taken up by the connection. Only such a request may go out on another connection; any other failure from
//! there on is *unknown*, however early it looks.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderMap, StatusCode};
use http_body::{Body as _, SizeHint};
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
    /// Kept connections at most: of one origin, of all.
    keep: (usize, usize),
    idle: Mutex<BTreeMap<Origin, Vec<(Instant, Sender)>>>,
}

/// Where requests go, read from their URL.
#[derive(Clone)]
pub struct Target {
    origin: Origin,
    path: http::Uri,
    host: HeaderValue,
}

impl Client {
    pub fn new(world: World, tls: Tls, destination: Destination, limits: Limits) -> Client {
        Client::build(world, tls, destination, limits, None, (MAX_IDLE_PER_ORIGIN, MAX_IDLE))
    }

    /// For one destination that everything goes to: as many connections are kept as are used at once, up to `kept`.
    pub fn to_one(world: World, tls: Tls, destination: Destination, limits: Limits, kept: usize) -> Client {
        Client::build(world, tls, destination, limits, None, (kept, kept))
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
        let bound = Some(Arc::new(Semaphore::new(bound)));
        Client::build(world, tls, destination, limits, bound, (MAX_IDLE_PER_ORIGIN, MAX_IDLE))
    }

    fn build(
        world: World,
        tls: Tls,
        destination: Destination,
        limits: Limits,
        concurrency: Option<Arc<Semaphore>>,
        keep: (usize, usize),
    ) -> Client {
        let idle = Mutex::new(BTreeMap::new());
        let inner = ClientInner { world, tls, destination, limits, concurrency, keep, idle };
        Client { inner: Arc::new(inner), beside: false }
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
        let target = self.target(request.uri())?;
        self.stream_to(&target, request, limits).await
    }

    /// The same to a place that was read before; the request's own URL counts for nothing.
    pub async fn stream_to(
        &self,
        target: &Target,
        request: http::Request<Bytes>,
        limits: Limits,
    ) -> Result<Streaming, HttpError> {
        let deadline = Instant::now() + limits.timeout;
        let origin = target.origin.clone();
        let request = prepare(target, request);
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

    /// Where a request to this URL goes, by the rules that need no address.
    pub fn target(&self, uri: &http::Uri) -> Result<Target, HttpError> {
        let origin = Origin::of(uri, self.inner.destination)?;
        let path = uri.path_and_query().map_or("/", |p| p.as_str());
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let path = path.parse().map_err(|_| HttpError::Refused("url"))?;
        let host = HeaderValue::from_str(&origin.host_header()).map_err(|_| HttpError::Refused("host_name"))?;
        Ok(Target { origin, path, host })
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
        let (of_one, of_all) = self.inner.keep;
        let mut idle = self.inner.idle.lock().unwrap_or_else(PoisonError::into_inner);
        prune(&mut idle);
        if idle.values().map(Vec::len).sum::<usize>() < of_all {
            let kept = idle.entry(origin).or_default();
            if kept.len() < of_one {
                kept.push((Instant::now(), sender));
            }
        }
    }
}

fn prepare(target: &Target, request: http::Request<Bytes>) -> http::Request<Full<Bytes>> {
    let (mut head, body) = request.into_parts();
    head.uri = target.path.clone();
    head.version = http::Version::HTTP_11;
    head.headers.insert(HOST, target.host.clone());
    head.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    head.headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(concat!("tollway/", env!("CARGO_PKG_VERSION"))));
    http::Request::from_parts(head, Full::new(body))
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
    let now = Instant::now();
    idle.retain(|_, kept| {
        kept.retain(|(since, sender)| now.saturating_duration_since(*since) < IDLE && !sender.is_closed());
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
        let deadline = self.deadline;
        match timeout_at(deadline, poll_fn(|cx| self.poll_chunk(cx))).await {
            Ok(read) => read,
            Err(_) => {
                self.keep = None;
                Err(HttpError::Timeout)
            }
        }
    }

    /// The same for a body that is passed on: whoever polls it keeps the time.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, HttpError>> {
        loop {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None => {
                    self.finished();
                    return Poll::Ready(Ok(None));
                }
                Some(Err(error)) => {
                    self.keep = None;
                    return Poll::Ready(Err(HttpError::Unknown(short(&error))));
                }
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    self.left = self.left.checked_sub(data.len()).ok_or(HttpError::TooLarge(self.limit))?;
                    if self.body.is_end_stream() {
                        self.finished();
                    }
                    if !data.is_empty() {
                        return Poll::Ready(Ok(Some(data)));
                    }
                }
            }
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    pub fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    /// Another time limit from here on.
    pub fn until(&mut self, deadline: Instant) {
        self.deadline = deadline;
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
