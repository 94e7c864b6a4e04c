//! Each HTTP request counted when its answer begins: method, revision and class of the status, all from closed sets.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, Method, StatusCode};

use super::envelope::{Envelope, Incoming};
use super::{Revision, headers};
use crate::telemetry;

/// The MCP methods that are told apart.
const METHODS: [&str; 6] =
    ["initialize", "ping", "tools/list", "tools/call", "server/discover", "subscriptions/listen"];

/// What a message asks for, in the words of the metric.
#[derive(Clone, Copy)]
pub(crate) struct Asked(pub &'static str);

pub(crate) fn asked(incoming: &Incoming) -> Asked {
    Asked(match incoming {
        Incoming::One(Envelope::Request { method, .. }) => word(method),
        Incoming::One(Envelope::Notification { .. }) => "notification",
        Incoming::One(Envelope::Response { .. }) => "response",
        Incoming::Batch(_) => "batch",
    })
}

/// A method as the metric names it.
pub(crate) fn word(method: &str) -> &'static str {
    METHODS.into_iter().find(|known| *known == method).unwrap_or("other")
}

/// Lets the counter know.
pub(crate) fn of(asked: Asked, mut response: Response) -> Response {
    response.extensions_mut().insert(asked);
    response
}

pub(crate) async fn counted(request: Request, next: Next) -> Response {
    let revision = revision(request.headers());
    let unread = match *request.method() {
        Method::GET => "stream",
        Method::DELETE => "end_session",
        _ => "unread",
    };
    let response = next.run(request).await;
    let method = response.extensions().get::<Asked>().map_or(unread, |asked| asked.0);
    count(method, revision, response.status());
    response
}

/// One more answer. `revision`: as [`revision`] reads it.
pub(crate) fn count(method: &str, revision: &'static str, status: StatusCode) {
    telemetry::REQUESTS.one([method, revision, class(status)]);
    match status {
        StatusCode::UNAUTHORIZED => telemetry::AUTH_FAILURES.one(["unauthorized"]),
        StatusCode::FORBIDDEN => telemetry::AUTH_FAILURES.one(["forbidden"]),
        StatusCode::TOO_MANY_REQUESTS => telemetry::AUTH_FAILURES.one(["too_many"]),
        _ => {}
    }
}

/// Of the header alone: `initialize` and the clients of 2025-03-26 send none.
pub(crate) fn revision(headers: &HeaderMap) -> &'static str {
    match headers::single(headers, headers::PROTOCOL_VERSION) {
        Ok(Some(text)) => Revision::parse(text).map_or("unknown", Revision::as_str),
        Ok(None) => "none",
        Err(_) => "unknown",
    }
}

fn class(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=299 => "2xx",
        400..=499 => "4xx",
        500..=599 => "5xx",
        _ => "other",
    }
}
