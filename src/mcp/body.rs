//! The body of an answer: one JSON text, or server-sent events. It knows when its last byte was handed over, and what
//! it means when it is dropped before.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, StatusCode};
use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::dispatch::{Delivery, Event, Front};
use super::envelope;
use crate::telemetry::{Held, STREAMS};

/// A reconnecting client waits this long.
pub(super) const RETRY: &str = "retry: 3000\n\n";
pub(super) const KEEP_ALIVE: &str = ": keep-alive\n\n";

pub(super) type Permit = Arc<OwnedSemaphorePermit>;

/// Withdraws the calls when the client goes before it has its answers.
pub(super) struct Withdraw(Vec<CancellationToken>);

impl Withdraw {
    pub fn new(calls: Vec<CancellationToken>) -> Withdraw {
        Withdraw(calls)
    }
}

impl Drop for Withdraw {
    fn drop(&mut self) {
        self.0.iter().for_each(CancellationToken::cancel);
    }
}

pub(super) struct AnswerBody {
    front: Arc<Front>,
    queue: VecDeque<Bytes>,
    state: State,
    /// Where the rest comes from, and how many answers it brings; `None` for a stream that carries nothing.
    events: Option<(mpsc::Receiver<Event>, usize)>,
    deliveries: Vec<Delivery>,
    keep_alive: Pin<Box<Sleep>>,
    /// Ends the stream from our side.
    close: BoxFuture<'static, ()>,
    withdraw: Option<Withdraw>,
    _permit: Option<Permit>,
    _stream: Option<Held>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// All was taken. hyper flushes to the socket when a body has nothing for it, so one pause stands between the last
    /// bytes and the word that they were delivered.
    Taken,
    Flushed,
    Ended,
}

impl AnswerBody {
    /// One JSON text.
    pub fn json(
        front: &Arc<Front>,
        text: String,
        deliveries: Vec<Delivery>,
        withdraw: Withdraw,
        permit: Permit,
    ) -> Self {
        let mut body = AnswerBody::new(front, Box::pin(std::future::pending()));
        body.queue.push_back(Bytes::from(text));
        body.state = State::Taken;
        body.deliveries = deliveries;
        body.withdraw = Some(withdraw);
        body._permit = Some(permit);
        body
    }

    /// The events of calls that owe `answers` answers, after those in `first`.
    pub fn events(
        front: &Arc<Front>,
        first: Vec<Event>,
        events: mpsc::Receiver<Event>,
        answers: usize,
        withdraw: Withdraw,
        permit: Permit,
    ) -> Self {
        let owner = front.clone();
        let mut body = AnswerBody::new(front, Box::pin(async move { owner.deadline().await }));
        body.events = Some((events, answers));
        first.into_iter().for_each(|event| body.push(event));
        body.withdraw = Some(withdraw);
        body._permit = Some(permit);
        body
    }

    /// A stream on which nothing but signs of life is sent until `close`.
    pub fn idle(front: &Arc<Front>, close: BoxFuture<'static, ()>, permit: Permit) -> Self {
        let mut body = AnswerBody::new(front, close);
        body.queue.push_back(Bytes::from_static(KEEP_ALIVE.as_bytes()));
        body._permit = Some(permit);
        body._stream = Some(STREAMS.hold());
        body
    }

    fn new(front: &Arc<Front>, close: BoxFuture<'static, ()>) -> Self {
        AnswerBody {
            front: front.clone(),
            queue: VecDeque::new(),
            state: State::Open,
            events: None,
            deliveries: Vec::new(),
            keep_alive: Box::pin(sleep(front.settings.keep_alive)),
            close,
            withdraw: None,
            _permit: None,
            _stream: None,
        }
    }

    fn push(&mut self, event: Event) {
        let text = match event {
            Event::Notification(text) => text,
            Event::Answer(answer) => {
                self.deliveries.extend(answer.deliveries);
                if let Some((_, left)) = &mut self.events {
                    *left = left.saturating_sub(1);
                    if *left == 0 {
                        self.state = State::Taken;
                    }
                }
                answer.text
            }
        };
        self.queue.push_back(Bytes::from(sse_event(text)));
    }

    /// The head and this as its body. Never cached, never buffered by a proxy.
    pub fn into_response(self, status: StatusCode) -> Response {
        let stream = self.events.is_some() || self.withdraw.is_none();
        let mut response = Response::new(Body::new(self));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if stream {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        } else {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        response
    }
}

pub(crate) fn sse_event(text: String) -> String {
    format!("event: message\ndata: {}\n\n", envelope::one_line(text))
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            if let Some(chunk) = self.queue.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(chunk))));
            }
            match self.state {
                State::Open => {}
                State::Taken => {
                    self.state = State::Flushed;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                State::Flushed => {
                    self.state = State::Ended;
                    if let Some(withdraw) = &mut self.withdraw {
                        withdraw.0.clear();
                    }
                    for delivery in std::mem::take(&mut self.deliveries) {
                        self.front.settings.world.spawn.spawn(Box::pin(delivery.confirm()));
                    }
                }
                State::Ended => return Poll::Ready(None),
            }
            if self.state != State::Open {
                continue;
            }
            let next = match &mut self.events {
                Some((events, _)) => events.poll_recv(cx),
                None => Poll::Pending,
            };
            match next {
                Poll::Ready(Some(event)) => {
                    self.push(event);
                    continue;
                }
                // A call without an answer, because it was withdrawn.
                Poll::Ready(None) => {
                    self.state = State::Taken;
                    continue;
                }
                Poll::Pending => {}
            }
            if self.close.as_mut().poll(cx).is_ready() {
                self.queue.push_back(Bytes::from_static(RETRY.as_bytes()));
                self.deliveries.clear();
                self.state = State::Ended;
                continue;
            }
            if self.keep_alive.as_mut().poll(cx).is_ready() {
                let next = Instant::now() + self.front.settings.keep_alive;
                self.keep_alive.as_mut().reset(next);
                self.queue.push_back(Bytes::from_static(KEEP_ALIVE.as_bytes()));
                continue;
            }
            return Poll::Pending;
        }
    }
}
