//! Sellers of 2024-11-05: `GET` opens a stream of events, its first event names where to POST, every answer comes on
//! the stream. The stream is the session, so each call opens one of its own.

use std::collections::VecDeque;
use std::pin::pin;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::header::ACCEPT;
use tokio::time::Instant;
use url::Url;

use super::client::{Headers, Upstream};
use super::session::{Handshake, agreed};
use super::sse::{Event, Parser};
use super::wire::{self, Content, Met, Outgoing};
use super::{Endpoint, OnProgress, ToolAnswer, UpstreamError};
use crate::http::{HttpError, Streaming};
use crate::mcp::{Revision, envelope};

const MAX_ASKED: usize = 16;
const HEADERS: Headers<'static> = Headers { revision: None, session: None, params: Vec::new() };

impl Upstream {
    pub(super) async fn perform_legacy(
        &self,
        endpoint: &Endpoint,
        outgoing: &Outgoing<'_>,
        deadline: Instant,
        mut on_progress: Option<OnProgress<'_>>,
    ) -> Result<ToolAnswer, UpstreamError> {
        let setup = deadline.min(Instant::now() + self.settings().timeout);
        let mut events = self.open_events(&endpoint.url, deadline).await?;
        let post = events.post_url(setup).await?;
        let handshake = Handshake::new(Revision::V2024_11_05);
        let (hello, id) = (handshake.outgoing(), self.next_id());
        let body = hello.body(id, Revision::V2024_11_05);
        agreed(self.ask(&mut events, &post, body, id, false, setup, &mut None).await?)?;
        let note = envelope::notification("notifications/initialized", None).into();
        let request = self.request(&post, &HEADERS, None, note)?;
        let noted = self.http().beside().send_within(request, self.limits(setup)).await;
        let status = noted.map_err(|e| UpstreamError::of_setup(e, false))?.status();
        if !status.is_success() {
            return Err(UpstreamError::protocol(false, format!("notifications/initialized: HTTP {}", status.as_u16())));
        }
        let id = self.next_id();
        let counts = outgoing.method == "tools/call";
        let body = outgoing.body(id, Revision::V2024_11_05);
        self.ask(&mut events, &post, body, id, counts, deadline, &mut on_progress).await
    }

    async fn open_events(&self, url: &Url, deadline: Instant) -> Result<Events, UpstreamError> {
        let mut url = url.clone();
        for _ in 0..=self.settings().max_redirects {
            let request = http::Request::get(url.as_str()).header(ACCEPT, "text/event-stream").body(Bytes::new());
            let request = request.map_err(|_| UpstreamError::Refused("url"))?;
            let head_by = deadline.min(Instant::now() + self.settings().timeout);
            let opening = tokio::time::timeout_at(head_by, self.http().stream(request, self.limits(deadline)));
            let opened = opening.await.map_err(|_| UpstreamError::Timeout { sent: false })?;
            let streaming = opened.map_err(|e| UpstreamError::of_setup(e, false))?;
            let status = streaming.head.status;
            if status.is_redirection() {
                url = wire::redirect(&url, &streaming.head)?;
                continue;
            }
            if !status.is_success() || wire::content(&streaming.head) != Content::Events {
                let detail = format!("no event stream (HTTP {})", status.as_u16());
                return Err(UpstreamError::protocol(false, detail));
            }
            return Ok(Events { url, streaming, parser: Parser::default(), ready: VecDeque::new() });
        }
        Err(UpstreamError::Refused("redirect"))
    }

    /// Posts one request and reads the stream up to its answer. The two run side by side: a seller may answer on the
    /// stream before it answers the POST, and may not get further until that is read.
    #[allow(clippy::too_many_arguments, reason = "one request, its place and its bounds")]
    async fn ask(
        &self,
        events: &mut Events,
        post: &Url,
        body: Bytes,
        id: u64,
        counts: bool,
        deadline: Instant,
        on_progress: &mut Option<OnProgress<'_>>,
    ) -> Result<ToolAnswer, UpstreamError> {
        let request = self.request(post, &HEADERS, None, body)?;
        let client = self.http().beside();
        let mut posting = Some(Box::pin(client.send_within(request, self.limits(deadline))));
        let mut asked = 0;
        loop {
            let next = pin!(tokio::time::timeout_at(deadline, events.next()));
            let event = match posting.as_mut() {
                None => next.await,
                Some(running) => match select(running, next).await {
                    Either::Right((event, _)) => event,
                    Either::Left((posted, _)) => {
                        posting = None;
                        let status = posted.map_err(|e| UpstreamError::of(e, counts))?.status();
                        if !status.is_success() {
                            return Err(UpstreamError::protocol(counts, format!("HTTP status {}", status.as_u16())));
                        }
                        continue;
                    }
                },
            };
            let event = event.map_err(|_| UpstreamError::Timeout { sent: counts })?;
            let event = event.map_err(|e| UpstreamError::of(e, counts))?;
            let event = event.ok_or_else(|| UpstreamError::protocol(counts, "the stream ended without an answer"))?;
            if event.name != "message" || event.data.is_empty() {
                continue;
            }
            let met = wire::read(&event.data, id, self.settings(), on_progress);
            for met in met.map_err(|e| UpstreamError::protocol(counts, e))? {
                match met {
                    Met::Answer(answer) => return Ok(answer),
                    Met::Asked(reply) if asked < MAX_ASKED => {
                        asked += 1;
                        self.reply(post, &HEADERS, reply, deadline).await;
                    }
                    _ => {}
                }
            }
        }
    }
}

struct Events {
    url: Url,
    streaming: Streaming,
    parser: Parser,
    ready: VecDeque<Event>,
}

impl Events {
    /// Loses nothing when it is dropped half-way.
    async fn next(&mut self) -> Result<Option<Event>, HttpError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let Some(piece) = self.streaming.chunk().await? else { return Ok(None) };
            let mut events = Vec::new();
            self.parser.push(&piece, &mut events);
            self.ready.extend(events);
        }
    }

    /// The `endpoint` event, whose URL must be of the stream's own origin.
    async fn post_url(&mut self, deadline: Instant) -> Result<Url, UpstreamError> {
        loop {
            let next = tokio::time::timeout_at(deadline, self.next()).await;
            let next = next.map_err(|_| UpstreamError::Timeout { sent: false })?;
            let event = next.map_err(|e| UpstreamError::of_setup(e, false))?;
            let event = event.ok_or_else(|| UpstreamError::protocol(false, "the stream ended without an endpoint"))?;
            if event.name != "endpoint" {
                continue;
            }
            let text = String::from_utf8(event.data).ok();
            let url = text.and_then(|text| self.url.join(text.trim()).ok());
            let url = url.ok_or_else(|| UpstreamError::protocol(false, "the endpoint event holds no URL"))?;
            if url.origin() != self.url.origin() || !url.username().is_empty() || url.password().is_some() {
                return Err(UpstreamError::Refused("sse_endpoint_origin"));
            }
            return Ok(url);
        }
    }
}
