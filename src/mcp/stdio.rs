//! MCP over standard input and output: one JSON-RPC message a line, and nothing else.
//!
//! Revisions with a handshake are chosen by `initialize`, once for the process; a request that declares 2026-07-28 in
//! its `_meta` is served on its own, beside them.

use std::io;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, join, select};
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::dispatch::{Answer, Call, Event, Front};
use super::envelope::{self, Envelope, Fault, Incoming};
use super::{Claims, Handler, Revision, RpcError, Settings, revision};
use crate::json;
use crate::money::AgentId;

/// Serves `handler` until `input` ends or the settings' shutdown, and returns when the calls in flight have finished.
/// `output` must have no other owner. `agent` is the caller of everything.
pub async fn stdio(
    settings: Settings,
    handler: Arc<dyn Handler>,
    agent: AgentId,
    input: impl AsyncRead + Unpin + Send,
    output: impl AsyncWrite + Unpin + Send,
) -> io::Result<()> {
    let mut front = Front::new(settings, handler, &Revision::ALL);
    front.silent_when_cancelled = true;
    let front = Arc::new(front);
    let (out, events) = mpsc::channel(256);
    let gone = CancellationToken::new();
    let door = Door {
        slots: Arc::new(Semaphore::new(front.settings.max_concurrent_requests)),
        session: format!("stdio-{}", hex::encode(front.settings.world.random::<12>())),
        negotiated: None,
        agent,
        front: front.clone(),
        out,
    };
    let (read, written) = join(read_all(door, input, gone.clone()), write_all(&front, events, output, gone)).await;
    written.and(read)
}

/// The reading side. All senders of `out` are the door's or a running call's, so the writer knows when all is done.
struct Door {
    front: Arc<Front>,
    agent: AgentId,
    /// A name for this process.
    session: String,
    /// What `initialize` came to.
    negotiated: Option<Revision>,
    slots: Arc<Semaphore>,
    out: mpsc::Sender<Event>,
}

async fn read_all(mut door: Door, input: impl AsyncRead + Unpin, gone: CancellationToken) -> io::Result<()> {
    let limits = door.front.settings.limits();
    let mut lines = Lines { input: BufReader::new(input), limit: limits.bytes };
    let shutdown = door.front.settings.shutdown.clone();
    let ended = loop {
        let line = {
            let (shutdown, gone) = (pin!(shutdown.cancelled()), pin!(gone.cancelled()));
            match select(select(shutdown, gone), pin!(lines.next())).await {
                Either::Left(_) => break Ok(()),
                Either::Right((line, _)) => line,
            }
        };
        match line {
            Ok(Line::Text(text)) if text.trim_ascii().is_empty() => {}
            Ok(Line::Text(text)) => match Envelope::parse(&text, limits) {
                Ok(Incoming::One(envelope)) => {
                    let out = door.out.clone();
                    door.take(envelope, &out).await;
                }
                Ok(Incoming::Batch(batch)) => door.batch(batch).await,
                Err(fault) => door.refuse(&fault).await,
            },
            Ok(Line::TooLong) => {
                let error = format!("Invalid request: the message is larger than {} bytes", limits.bytes);
                let answer = Answer::error(None, &RpcError::invalid_request(error));
                let _ = door.out.send(Event::Answer(answer)).await;
            }
            Ok(Line::End) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    // Calls in flight go on; what waits for changes ends.
    door.front.streams_end.cancel();
    ended
}

impl Door {
    async fn refuse(&self, fault: &Fault) {
        let _ = self.out.send(Event::Answer(Answer::error(fault.id.as_deref(), &fault.error))).await;
    }

    /// One message; what comes of it goes to `out`.
    async fn take(&mut self, envelope: Envelope, out: &mpsc::Sender<Event>) {
        match envelope {
            Envelope::Request { id, method, params } => {
                let answer = match self.request(&id, &method, params.as_deref()) {
                    Ok(Step::Answered(text)) => Answer { text, error: None, deliveries: Vec::new() },
                    Ok(Step::Call(revision)) => match self.slots.clone().try_acquire_owned() {
                        Ok(slot) => {
                            let (agent, session) = (Some(self.agent.clone()), Some(self.session.clone()));
                            let claims = Claims::default();
                            let call = Call { revision, agent, session, claims, id, method, params };
                            self.front.start(call, out.clone(), slot);
                            return;
                        }
                        Err(_) => Answer::error(Some(&id), &RpcError::internal("Too many calls at once")),
                    },
                    Err(error) => Answer::error(Some(&id), &error),
                };
                let _ = out.send(Event::Answer(answer)).await;
            }
            Envelope::Notification { method, params } => {
                self.front.notified(Some(&self.session), &method, params.as_deref());
            }
            // Nothing is ever asked of the client.
            Envelope::Response { .. } => {}
        }
    }

    fn request(&mut self, id: &RawValue, method: &str, params: Option<&RawValue>) -> Result<Step, RpcError> {
        let declared = revision::declared(params);
        let known = declared.and_then(json::string).and_then(|text| Revision::parse(&text));
        // A client that fell back to a handshake may go on to say so in each request.
        let falls_back = known.is_some_and(|revision| !revision.stateless()) && self.negotiated.is_some();
        if method == "server/discover" || (declared.is_some() && !falls_back) {
            revision::check_meta(params, self.front.supported)?;
            return Ok(Step::Call(Revision::V2026_07_28));
        }
        if method == "initialize" {
            let (revision, result) = self.front.initialize(params)?;
            self.negotiated = Some(revision);
            return Ok(Step::Answered(envelope::result_response(id, &result)));
        }
        match self.negotiated {
            Some(revision) => Ok(Step::Call(revision)),
            None if method == "ping" => Ok(Step::Call(Revision::V2025_11_25)),
            None => Err(RpcError::invalid_request(format!(
                "Invalid request: initialize first, or declare {} in _meta",
                Revision::V2026_07_28.as_str()
            ))),
        }
    }

    /// 2025-03-26 alone: the answers go out together, in one array, when all are there.
    async fn batch(&mut self, batch: Vec<Result<Envelope, Fault>>) {
        if !self.negotiated.is_some_and(Revision::has_batches) {
            return self.refuse(&envelope::no_batches()).await;
        }
        // Room for the answers that are given while nobody reads yet.
        let (gather, mut gathered) = mpsc::channel(batch.len() + 16);
        for message in batch {
            match message {
                Ok(Envelope::Request { id, method, .. }) if method == "initialize" => {
                    let error = RpcError::invalid_request("Invalid request: initialize must not be in a batch");
                    let _ = gather.send(Event::Answer(Answer::error(Some(&id), &error))).await;
                }
                Ok(envelope) => self.take(envelope, &gather).await,
                Err(fault) => {
                    let answer = Answer::error(fault.id.as_deref(), &fault.error);
                    let _ = gather.send(Event::Answer(answer)).await;
                }
            }
        }
        drop(gather);
        let out = self.out.clone();
        self.front.settings.world.spawn.spawn(Box::pin(async move {
            let (mut texts, mut deliveries) = (Vec::new(), Vec::new());
            while let Some(event) = gathered.recv().await {
                match event {
                    Event::Notification(_) => drop(out.send(event).await),
                    Event::Answer(answer) => {
                        texts.push(answer.text);
                        deliveries.extend(answer.deliveries);
                    }
                }
            }
            if !texts.is_empty() {
                let text = format!("[{}]", texts.join(","));
                let _ = out.send(Event::Answer(Answer { text, error: None, deliveries })).await;
            }
        }));
    }
}

enum Step {
    Answered(String),
    Call(Revision),
}

/// The only owner of the output. Ends when every sender is gone, so after the last call's answer.
async fn write_all(
    front: &Front,
    mut events: mpsc::Receiver<Event>,
    mut output: impl AsyncWrite + Unpin,
    gone: CancellationToken,
) -> io::Result<()> {
    // Held by the tasks that tell a handler of its delivery.
    let (telling, mut told) = mpsc::channel::<std::convert::Infallible>(1);
    let mut failed = Ok(());
    let mut deadline = pin!(front.deadline());
    loop {
        let event = match select(pin!(events.recv()), deadline.as_mut()).await {
            Either::Left((Some(event), _)) => event,
            Either::Left((None, _)) => break,
            Either::Right(_) => return failed,
        };
        if failed.is_err() {
            continue;
        }
        let (text, deliveries) = match event {
            Event::Notification(text) => (text, Vec::new()),
            Event::Answer(answer) => (answer.text, answer.deliveries),
        };
        let mut line = envelope::one_line(text).into_bytes();
        line.push(b'\n');
        let write = pin!(async {
            output.write_all(&line).await?;
            output.flush().await
        });
        let written = match select(write, deadline.as_mut()).await {
            Either::Left((written, _)) => written,
            Either::Right(_) => return failed,
        };
        match written {
            Ok(()) => {
                for delivery in deliveries {
                    let telling = telling.clone();
                    front.settings.world.spawn.spawn(Box::pin(async move {
                        delivery.confirm().await;
                        drop(telling);
                    }));
                }
            }
            Err(error) => {
                // The client is gone: nobody will read the answers, but the calls finish what they are at.
                failed = Err(error);
                gone.cancel();
                front.withdraw_all();
            }
        }
    }
    drop(telling);
    select(pin!(told.recv()), deadline).await;
    failed
}

pub(crate) enum Line {
    Text(Vec<u8>),
    /// Over the limit; its bytes were let go as they came.
    TooLong,
    End,
}

pub(crate) struct Lines<R> {
    pub input: BufReader<R>,
    pub limit: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) async fn next(&mut self) -> io::Result<Line> {
        let (mut line, mut too_long) = (Vec::new(), false);
        loop {
            let chunk = self.input.fill_buf().await?;
            if chunk.is_empty() {
                return Ok(match (too_long, line.is_empty()) {
                    (true, _) => Line::TooLong,
                    (false, true) => Line::End,
                    (false, false) => Line::Text(line),
                });
            }
            let end = chunk.iter().position(|b| *b == b'\n');
            let piece = chunk.get(..end.unwrap_or(chunk.len())).unwrap_or_default();
            if line.len() + piece.len() > self.limit {
                too_long = true;
                line = Vec::new();
            }
            if !too_long {
                line.extend_from_slice(piece);
            }
            let used = piece.len() + usize::from(end.is_some());
            self.input.consume(used);
            if end.is_some() {
                return Ok(if too_long { Line::TooLong } else { Line::Text(line) });
            }
        }
    }
}
