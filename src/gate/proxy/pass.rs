//! The body of an answer that passes as it comes. It ends with the upstream's, with a client that goes, when the upstream
//! is silent for too long, and, a stream, with the process.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};

use super::events::Ids;
use super::session::Sessions;
use super::upstream::ReplyBody;
use crate::http::HttpError;
use crate::telemetry::Held;

pub struct PassBody {
    body: ReplyBody,
    /// Binds the ids of a stream's events to the session of this name.
    ids: Option<(Ids, Sessions, String)>,
    /// The longest silence.
    idle: Option<Duration>,
    silent: Option<Pin<Box<Sleep>>>,
    /// Ends a stream from our side.
    close: Option<BoxFuture<'static, ()>>,
    ended: bool,
    _permit: Arc<OwnedSemaphorePermit>,
    _held: Option<Held>,
}

impl PassBody {
    pub fn new(body: ReplyBody, permit: Arc<OwnedSemaphorePermit>) -> PassBody {
        PassBody { body, ids: None, idle: None, silent: None, close: None, ended: false, _permit: permit, _held: None }
    }

    pub fn binding(self, sessions: &Sessions, session: &str) -> PassBody {
        PassBody { ids: Some((Ids::default(), sessions.clone(), session.to_owned())), ..self }
    }

    pub fn silent_for(self, idle: Duration) -> PassBody {
        PassBody { idle: Some(idle), ..self }
    }

    pub fn until(self, close: BoxFuture<'static, ()>) -> PassBody {
        PassBody { close: Some(close), ..self }
    }

    pub fn counted(self, held: Held) -> PassBody {
        PassBody { _held: Some(held), ..self }
    }
}

impl http_body::Body for PassBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            match self.body.poll_chunk(cx) {
                Poll::Ready(Ok(Some(piece))) => {
                    self.silent = None;
                    let piece = match &mut self.ids {
                        Some((ids, sessions, session)) => ids.pass(piece, |id| sessions.tag_event(session, id)),
                        None => piece,
                    };
                    if !piece.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(piece))));
                    }
                }
                Poll::Ready(Ok(None)) => {
                    self.ended = true;
                    return Poll::Ready(None);
                }
                Poll::Ready(Err(error)) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Pending => break,
            }
        }
        if self.close.as_mut().is_some_and(|close| close.as_mut().poll(cx).is_ready()) {
            self.ended = true;
            return Poll::Ready(None);
        }
        if let Some(idle) = self.idle {
            let silent = self.silent.get_or_insert_with(|| Box::pin(sleep(idle)));
            if silent.as_mut().poll(cx).is_ready() {
                self.ended = true;
                return Poll::Ready(Some(Err(HttpError::Timeout)));
            }
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.body.is_end_stream()
    }

    /// A stream's ids change its length.
    fn size_hint(&self) -> SizeHint {
        if self.ids.is_some() { SizeHint::default() } else { self.body.size_hint() }
    }
}
