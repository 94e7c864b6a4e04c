//! The MCP server behind the gate, which the operator named: reached over Streamable HTTP, or a child process. It is
//! never left for another place: a redirect is an answer that nobody can use.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use http_body::SizeHint;
use tokio::time::Instant;
use url::Url;

use super::stdio::Child;
use crate::http::{Client, HttpError, Limits, Streaming, Target};
use crate::mcp::headers;

/// Nobody waits longer for the end of a stream that is passed on; each of its pieces has a limit of its own.
const A_YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Clone)]
pub enum Upstream {
    Http(Arc<HttpUpstream>),
    Child(Arc<Child>),
}

pub struct HttpUpstream {
    name: String,
    client: Client,
    target: Target,
    /// The value of `Authorization`, where the operator gave one.
    auth_header: Option<HeaderValue>,
    /// From the request to the head of the answer.
    timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("the answer is a redirect")]
    Redirect,
    #[error("the child process is not running")]
    Gone,
    #[error("too many requests at once")]
    Busy,
    #[error("there is no such session")]
    NoSession,
}

impl UpstreamError {
    pub fn is_timeout(&self) -> bool {
        matches!(self, UpstreamError::Http(error) if error.is_timeout())
    }
}

/// One HTTP request towards it, with what the client may have passed on.
#[derive(Default)]
pub struct Ask {
    pub method: Method,
    pub headers: HeaderMap,
    /// Stands for the client's session here.
    pub client: Option<String>,
    /// Where the client is.
    pub source: Option<String>,
    /// Its answer waits for a settlement, and so do the texts beside it.
    pub sold: bool,
    /// The upstream's own session id.
    pub session: Option<String>,
    /// The upstream's own event id.
    pub last_event: Option<String>,
    pub body: Bytes,
}

/// An answer whose body is still to come.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: ReplyBody,
}

pub enum ReplyBody {
    Http(Box<Streaming>),
    /// Of a child: whole events, or one JSON text.
    Queue(tokio::sync::mpsc::Receiver<Bytes>),
}

impl Upstream {
    /// What it is, as every gate in front of it says it.
    pub fn name(&self) -> String {
        match self {
            Upstream::Http(http) => http.name.clone(),
            Upstream::Child(child) => child.name(),
        }
    }

    pub async fn ask(&self, ask: Ask) -> Result<Reply, UpstreamError> {
        match self {
            Upstream::Http(http) => http.ask(ask).await,
            Upstream::Child(child) => child.ask(ask).await,
        }
    }
}

impl HttpUpstream {
    pub fn new(
        client: Client,
        url: &Url,
        auth_header: Option<HeaderValue>,
        timeout: Duration,
    ) -> Result<HttpUpstream, HttpError> {
        let uri: http::Uri = url.as_str().parse().map_err(|_| HttpError::Refused("url"))?;
        Ok(HttpUpstream { name: url.to_string(), target: client.target(&uri)?, client, auth_header, timeout })
    }

    async fn ask(&self, ask: Ask) -> Result<Reply, UpstreamError> {
        let Ask { method, headers: head, session, last_event, body, .. } = ask;
        let mut request = http::Request::new(body);
        *request.method_mut() = method;
        *request.headers_mut() = head;
        let visible = |text: Option<String>| text.and_then(|text| HeaderValue::from_str(&text).ok());
        if let Some(session) = visible(session) {
            request.headers_mut().insert(headers::SESSION_ID, session);
        }
        if let Some(event) = visible(last_event) {
            request.headers_mut().insert("last-event-id", event);
        }
        if let Some(value) = &self.auth_header {
            request.headers_mut().insert(AUTHORIZATION, value.clone());
        }
        // What is passed on is kept nowhere, so its size is its reader's affair.
        let limits = Limits { timeout: self.timeout, max_response_bytes: usize::MAX };
        let mut streaming = self.client.stream_to(&self.target, request, limits).await?;
        streaming.until(Instant::now() + A_YEAR);
        if streaming.head.status.is_redirection() {
            return Err(UpstreamError::Redirect);
        }
        let headers = std::mem::take(&mut streaming.head.headers);
        Ok(Reply { status: streaming.head.status, headers, body: ReplyBody::Http(Box::new(streaming)) })
    }
}

impl ReplyBody {
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, HttpError>> {
        match self {
            ReplyBody::Http(streaming) => streaming.poll_chunk(cx),
            ReplyBody::Queue(queue) => queue.poll_recv(cx).map(Ok),
        }
    }

    pub fn is_end_stream(&self) -> bool {
        match self {
            ReplyBody::Http(streaming) => streaming.is_end_stream(),
            ReplyBody::Queue(_) => false,
        }
    }

    pub fn size_hint(&self) -> SizeHint {
        match self {
            ReplyBody::Http(streaming) => streaming.size_hint(),
            ReplyBody::Queue(_) => SizeHint::default(),
        }
    }

    /// The next piece; `idle` bounds how long it may take.
    pub async fn chunk(&mut self, idle: Duration) -> Result<Option<Bytes>, HttpError> {
        let next = std::future::poll_fn(|cx| self.poll_chunk(cx));
        tokio::time::timeout(idle, next).await.unwrap_or(Err(HttpError::Timeout))
    }

    /// All of it, which may not be more than `limit` bytes.
    pub async fn whole(&mut self, limit: usize, within: Duration) -> Result<Bytes, HttpError> {
        let read = async {
            let mut first: Option<Bytes> = None;
            let mut all = bytes::BytesMut::new();
            while let Some(piece) = std::future::poll_fn(|cx| self.poll_chunk(cx)).await? {
                if all.len() + first.as_ref().map_or(0, Bytes::len) + piece.len() > limit {
                    return Err(HttpError::TooLarge(limit));
                }
                match (&mut first, all.is_empty()) {
                    (first @ None, true) => *first = Some(piece),
                    (first, _) => {
                        if let Some(first) = first.take() {
                            all.extend_from_slice(&first);
                        }
                        all.extend_from_slice(&piece);
                    }
                }
            }
            Ok(first.unwrap_or_else(|| all.freeze()))
        };
        tokio::time::timeout(within, read).await.unwrap_or(Err(HttpError::Timeout))
    }
}
