//! The body of an answer that a task of ours makes piece by piece.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep};

use super::Permit;
use crate::mcp::sse_event;

/// A message as an event of a stream.
pub fn event(message: String) -> Bytes {
    Bytes::from(sse_event(message))
}

/// Dropped early, it tells the task by its closed channel.
pub struct FrameBody {
    frames: mpsc::Receiver<Bytes>,
    keep_alive: Option<(Duration, Pin<Box<Sleep>>)>,
    _permit: Permit,
}

impl FrameBody {
    pub fn new(frames: mpsc::Receiver<Bytes>, permit: Permit) -> FrameBody {
        FrameBody { frames, keep_alive: None, _permit: permit }
    }

    /// With comment lines while there is nothing to send: only for pieces that are whole events.
    pub fn keeping_alive(self, every: Duration) -> FrameBody {
        FrameBody { keep_alive: Some((every, Box::pin(sleep(every)))), ..self }
    }
}

impl http_body::Body for FrameBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Poll::Ready(frame) = self.frames.poll_recv(cx) {
            if let Some((every, sign)) = &mut self.keep_alive {
                *sign = Box::pin(sleep(*every));
            }
            return Poll::Ready(frame.map(|bytes| Ok(Frame::data(bytes))));
        }
        if let Some((every, sign)) = &mut self.keep_alive
            && sign.as_mut().poll(cx).is_ready()
        {
            *sign = Box::pin(sleep(*every));
            cx.waker().wake_by_ref();
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b": keep-alive\n\n")))));
        }
        Poll::Pending
    }
}
