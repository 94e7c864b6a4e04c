//! One open stream: what is sent on it, the calls that are under way for it, and its end.
//!
//! It ends when its client goes, when its token is over, at the shutdown (once its calls are answered), and when its
//! client does not take its answers. Calls that are under way when the client goes are withdrawn, which a paid call
//! survives as over the other transports: it is booked, and the same call again gives its outcome.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, select};
use futures_util::task::AtomicWaker;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, HeaderValue};
use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::Refusal;
use super::token::Ticket;
use crate::mcp::body::{KEEP_ALIVE, Permit, RETRY, sse_event};
use crate::mcp::dispatch::{Delivery, Event, Front};
use crate::money::AgentId;
use crate::telemetry::{Held, SSE_STREAMS};

/// Events that wait for their client; beyond them the calls wait, see [`CALLS`].
const QUEUE: usize = 16;
/// Calls under way for one stream.
const CALLS: usize = 32;

/// The open streams of this process, by name.
#[derive(Default)]
pub(super) struct Streams(Mutex<Table>);

#[derive(Default)]
struct Table {
    by_name: BTreeMap<String, Arc<Stream>>,
    by_agent: BTreeMap<String, usize>,
}

pub(super) struct Stream {
    name: String,
    agent: Option<AgentId>,
    out: mpsc::Sender<Event>,
    places: Arc<Semaphore>,
    life: Mutex<Life>,
    /// Of the body, which looks again when a call ends.
    body: AtomicWaker,
    /// The client is gone, or was given up.
    gone: CancellationToken,
}

#[derive(Default)]
struct Life {
    running: usize,
    /// Nothing more is taken; the stream closes when nothing runs.
    ending: bool,
}

impl Streams {
    /// `None` where the agent has `most` of them.
    pub fn open(
        self: &Arc<Self>,
        front: &Arc<Front>,
        ticket: &Ticket,
        agent: Option<AgentId>,
        most: usize,
        first: String,
        permit: Permit,
    ) -> Option<StreamBody> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(agent) = &agent {
            let count = table.by_agent.entry(agent.as_str().to_owned()).or_default();
            if *count >= most {
                return None;
            }
            *count += 1;
        }
        let (out, events) = mpsc::channel(QUEUE);
        let stream = Arc::new(Stream {
            name: ticket.name.clone(),
            agent,
            out,
            places: Arc::new(Semaphore::new(CALLS)),
            life: Mutex::default(),
            body: AtomicWaker::new(),
            gone: CancellationToken::new(),
        });
        table.by_name.insert(ticket.name.clone(), stream.clone());
        drop(table);
        let left = ticket.expires_ms.saturating_sub(front.settings.world.unix_ms());
        let expired = Instant::now() + Duration::from_millis(left);
        let (ended, owner, given_up) = (front.streams_end.clone(), front.clone(), stream.gone.clone());
        Some(StreamBody {
            front: front.clone(),
            streams: self.clone(),
            stream,
            queue: VecDeque::from([Bytes::from(first)]),
            events,
            written: Vec::new(),
            flushing: false,
            over: false,
            ending: Some(Box::pin(async move {
                select(pin!(ended.cancelled()), pin!(sleep_until(expired))).await;
            })),
            forced: Box::pin(async move {
                select(pin!(owner.deadline()), pin!(given_up.cancelled())).await;
            }),
            keep_alive: Box::pin(sleep(front.settings.keep_alive)),
            _permit: permit,
            _open: SSE_STREAMS.hold(),
        })
    }

    pub fn get(&self, name: &str) -> Option<Arc<Stream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by_name.get(name).cloned()
    }

    fn closed(&self, stream: &Stream) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.by_name.remove(&stream.name);
        let Some(agent) = stream.agent.as_ref().map(AgentId::as_str) else { return };
        match table.by_agent.get(agent).copied() {
            Some(count) if count > 1 => drop(table.by_agent.insert(agent.to_owned(), count - 1)),
            _ => drop(table.by_agent.remove(agent)),
        }
    }
}

impl Stream {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn agent(&self) -> Option<&AgentId> {
        self.agent.as_ref()
    }

    fn life(&self) -> std::sync::MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one call, which the stream waits for from here on.
    pub fn begin(self: &Arc<Self>) -> Result<Place, Refusal> {
        let permit = self.places.clone().try_acquire_owned().map_err(|_| Refusal::Busy)?;
        let mut life = self.life();
        if self.gone.is_cancelled() {
            return Err(Refusal::Gone);
        }
        if life.ending {
            return Err(Refusal::Ending);
        }
        life.running += 1;
        drop(life);
        Ok(Place { stream: self.clone(), _permit: permit })
    }

    /// No call is taken any more.
    fn end(&self) {
        self.life().ending = true;
    }

    fn is_done(&self) -> bool {
        let life = self.life();
        life.ending && life.running == 0
    }
}

/// A call under way.
pub(super) struct Place {
    stream: Arc<Stream>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut life = self.stream.life();
        life.running = life.running.saturating_sub(1);
        drop(life);
        self.stream.body.wake();
    }
}

impl Place {
    /// What a call says goes on to the stream. A client that takes no answer for `patience` loses the stream; a call
    /// whose client is gone is withdrawn, and heard to its end.
    pub async fn forward(
        self,
        mut events: mpsc::Receiver<Event>,
        withdraw: Option<CancellationToken>,
        patience: Duration,
    ) {
        let stream = &self.stream;
        loop {
            let next = match select(pin!(stream.gone.cancelled()), pin!(events.recv())).await {
                Either::Left(_) => break,
                Either::Right((next, _)) => next,
            };
            match next {
                None => return,
                Some(Event::Notification(text)) => drop(stream.out.try_send(Event::Notification(text))),
                Some(answer) => match timeout(patience, stream.out.send(answer)).await {
                    Ok(_) => {}
                    Err(_) => {
                        tracing::info!(stream = stream.name, "a client does not take its answers: its stream is cut");
                        stream.gone.cancel();
                    }
                },
            }
        }
        if let Some(withdraw) = withdraw {
            withdraw.cancel();
        }
        while events.recv().await.is_some() {}
    }
}

pub(super) struct StreamBody {
    front: Arc<Front>,
    streams: Arc<Streams>,
    stream: Arc<Stream>,
    queue: VecDeque<Bytes>,
    events: mpsc::Receiver<Event>,
    /// Answers that hyper has taken and not yet flushed.
    written: Vec<Delivery>,
    flushing: bool,
    over: bool,
    /// The shutdown, or the end of the token: calls under way finish. `None`: it has come.
    ending: Option<BoxFuture<'static, ()>>,
    /// The end of the drain, or of the patience with the client.
    forced: BoxFuture<'static, ()>,
    keep_alive: Pin<Box<Sleep>>,
    _permit: Permit,
    _open: Held,
}

impl StreamBody {
    /// Never cached, never buffered by a proxy.
    pub fn into_response(self) -> Response {
        let mut response = Response::new(Body::new(self));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        response
    }

    fn push(&mut self, event: Event) {
        let text = match event {
            Event::Notification(text) => text,
            Event::Answer(answer) => {
                self.written.extend(answer.deliveries);
                answer.text
            }
        };
        self.queue.push_back(Bytes::from(sse_event(text)));
    }

    fn finish(&mut self) {
        self.over = true;
        self.written.clear();
        self.queue.push_back(Bytes::from_static(RETRY.as_bytes()));
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        self.stream.gone.cancel();
        self.streams.closed(&self.stream);
    }
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            if let Some(chunk) = self.queue.pop_front() {
                self.flushing = false;
                return Poll::Ready(Some(Ok(Frame::data(chunk))));
            }
            if self.over {
                return Poll::Ready(None);
            }
            // hyper flushes to the socket when a body has nothing for it, so one pause stands between the last bytes
            // and the word that they were delivered.
            if !self.written.is_empty() {
                if !self.flushing {
                    self.flushing = true;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                for delivery in std::mem::take(&mut self.written) {
                    self.front.settings.world.spawn.spawn(Box::pin(delivery.confirm()));
                }
            }
            self.flushing = false;
            if self.forced.as_mut().poll(cx).is_ready() {
                self.finish();
                continue;
            }
            if self.ending.as_mut().is_some_and(|ending| ending.as_mut().poll(cx).is_ready()) {
                self.ending = None;
                self.stream.end();
            }
            // In this order: a call puts its answer into the queue before it counts as ended.
            self.stream.body.register(cx.waker());
            let done = self.stream.is_done();
            match self.events.poll_recv(cx) {
                Poll::Ready(Some(event)) => {
                    self.push(event);
                    continue;
                }
                Poll::Ready(None) => {
                    self.finish();
                    continue;
                }
                Poll::Pending => {}
            }
            if done {
                self.finish();
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
