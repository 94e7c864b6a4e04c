//! One inbound connection: what is being done on it, and how long it may stand still. A client that begins a request
//! and does not finish its head, or does not read what it asked for, is cut off; a call in flight never is.

use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tower_service::Service as _;

use super::proxies::Proxies;
use super::rate::Peer;
use super::serve::Bounds;
use crate::ports::BoxIo;

/// What goes on on a connection.
#[derive(Default)]
struct Activity {
    /// Requests taken whose answer is not yet whole.
    running: AtomicUsize,
    /// Requests taken so far.
    taken: AtomicU64,
}

struct Running(Arc<Activity>);

impl Running {
    fn begin(activity: &Arc<Activity>) -> Running {
        activity.taken.fetch_add(1, Ordering::Relaxed);
        activity.running.fetch_add(1, Ordering::Relaxed);
        Running(activity.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The connection with its limits, and the service that tells it when a request is under way.
pub(super) fn watched(io: BoxIo, from: Option<IpAddr>, app: axum::Router, bounds: &Bounds) -> (Watched, Answers) {
    let activity = Arc::<Activity>::default();
    let answers = Answers { app, from, proxies: bounds.proxies.clone(), activity: activity.clone() };
    let (head_limit, write_limit) = (bounds.head, bounds.write);
    (Watched { io, activity, head_limit, write_limit, head: None, stalled: None }, answers)
}

pub(super) struct Watched {
    io: BoxIo,
    activity: Arc<Activity>,
    head_limit: Duration,
    write_limit: Duration,
    /// Runs since the first byte of a request's head; with the number of requests taken before it.
    head: Option<(u64, Pin<Box<Sleep>>)>,
    /// Runs since the client takes nothing of what there is for it.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    fn idle(&self) -> bool {
        self.activity.running.load(Ordering::Relaxed) == 0
    }

    /// Whether a request's head is being read for too long.
    fn head_is_late(&mut self, cx: &mut Context<'_>) -> bool {
        let taken = self.activity.taken.load(Ordering::Relaxed);
        if self.head.as_ref().is_some_and(|(before, _)| *before != taken) {
            self.head = None;
        }
        self.idle() && self.head.as_mut().is_some_and(|(_, late)| late.as_mut().poll(cx).is_ready())
    }

    fn written<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.write_limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        match stalled.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        if read.is_pending() && self.head_is_late(cx) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the request's head came too slowly")));
        }
        if buf.filled().len() > before && self.idle() {
            let taken = self.activity.taken.load(Ordering::Relaxed);
            if self.head.as_ref().is_none_or(|(before, _)| *before != taken) {
                self.head = Some((taken, Box::pin(sleep(self.head_limit))));
            }
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.written(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        // A socket has nothing to flush: that says nothing about the client.
        if flushed.is_ready() { flushed } else { self.written(cx, flushed) }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.io).poll_shutdown(cx);
        self.written(cx, ended)
    }
}

/// The application, with each request counted from its head to the end of its answer.
#[derive(Clone)]
pub(super) struct Answers {
    app: axum::Router,
    /// Who made the connection.
    from: Option<IpAddr>,
    proxies: Proxies,
    activity: Arc<Activity>,
}

impl hyper::service::Service<http::Request<Incoming>> for Answers {
    type Response = http::Response<AnswerInFlight>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn call(&self, mut request: http::Request<Incoming>) -> Self::Future {
        if let Some(from) = self.from {
            let client = self.proxies.client(from, request.headers());
            request.extensions_mut().insert(Peer(client));
        }
        let running = Running::begin(&self.activity);
        // A router is always ready.
        let answer = self.app.clone().call(request);
        Box::pin(async move {
            let response: Response = answer.await?;
            Ok(response.map(|body| AnswerInFlight { body, _running: running }))
        })
    }
}

pub(super) struct AnswerInFlight {
    body: Body,
    _running: Running,
}

impl http_body::Body for AnswerInFlight {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
