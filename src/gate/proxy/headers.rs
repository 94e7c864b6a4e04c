//! What of a message's head goes on. Towards the upstream only what MCP and tracing use, and what the operator names;
//! towards the client everything but what belongs to one connection.

use http::HeaderMap;
use http::header::{
    ACCEPT, ACCEPT_LANGUAGE, CACHE_CONTROL, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue,
    SET_COOKIE, TRANSFER_ENCODING, USER_AGENT,
};

use crate::mcp::headers;

const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Of one connection (RFC 9110, section 7.6.1), beside those that `Connection` names.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
const TRACE: [&str; 3] = ["traceparent", "tracestate", "baggage"];
/// Made by the gate for each connection; an operator who names them would break the protocol.
const NEVER: [&str; 7] =
    ["host", "content-length", "content-type", "mcp-session-id", "last-event-id", "x-payment", "payment-signature"];

/// Whether an operator may have a header passed on by this name (lower case).
pub fn may_be_forwarded(name: &str) -> bool {
    HeaderName::from_bytes(name.as_bytes()).is_ok() && !HOP_BY_HOP.contains(&name) && !NEVER.contains(&name)
}

/// The head of a request to the upstream. A client's credentials, cookies, origin and what proxies say of themselves stay
/// here unless `forward` names them: an upstream may trust such a header from whoever stands before it.
pub fn to_upstream(from: &HeaderMap, forward: &[HeaderName]) -> HeaderMap {
    let named = connection_names(from);
    let mut to = HeaderMap::with_capacity(from.len() + 2);
    for (name, value) in from {
        let known = [&ACCEPT, &CONTENT_TYPE, &ACCEPT_LANGUAGE, &USER_AGENT].contains(&name)
            || [headers::PROTOCOL_VERSION, headers::METHOD, headers::NAME].contains(&name.as_str())
            || name.as_str().starts_with(headers::PARAM_PREFIX)
            || TRACE.contains(&name.as_str())
            || forward.contains(name);
        if known && !named.contains(&name.as_str()) {
            to.append(name, value.clone());
        }
    }
    to
}

/// The head of an answer to the client. The session's id is set by whoever knows it.
pub fn to_client(from: &HeaderMap) -> HeaderMap {
    let named = connection_names(from);
    let mut to = HeaderMap::with_capacity(from.len() + 1);
    for (name, value) in from {
        let dropped = HOP_BY_HOP.contains(&name.as_str())
            || [CONTENT_LENGTH, TRANSFER_ENCODING, SET_COOKIE].contains(name)
            || name.as_str() == headers::SESSION_ID
            || named.contains(&name.as_str());
        if !dropped {
            to.append(name, value.clone());
        }
    }
    if is_stream(from) {
        to.insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
    }
    to
}

/// An answer with prices, challenges or paid content: no cache in between may keep it.
pub fn unshared(headers: &mut HeaderMap) {
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
}

pub fn is_stream(headers: &HeaderMap) -> bool {
    media_type(headers).is_some_and(|kind| kind.eq_ignore_ascii_case("text/event-stream"))
}

pub fn is_json(headers: &HeaderMap) -> bool {
    media_type(headers).is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"))
}

fn media_type(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(text.split(';').next().unwrap_or_default().trim())
}

fn connection_names(headers: &HeaderMap) -> Vec<&str> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        headers
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn an_upstream_gets_what_the_protocol_needs_and_no_credentials() {
        let from = map(&[
            ("accept", "application/json"),
            ("accept", "text/event-stream"),
            ("content-type", "application/json"),
            ("mcp-protocol-version", "2026-07-28"),
            ("mcp-method", "tools/call"),
            ("mcp-name", "x"),
            ("mcp-param-region", "eu"),
            ("traceparent", "00-…-…-01".trim_matches('…')),
            ("host", "gate.example"),
            ("origin", "https://app.example"),
            ("authorization", "Bearer secret"),
            ("cookie", "a=b"),
            ("x-forwarded-for", "192.0.2.1"),
            ("x-real-ip", "192.0.2.1"),
            ("x-tenant", "7"),
            ("mcp-session-id", "ours"),
            ("last-event-id", "ours"),
            ("payment-signature", "x"),
            ("accept-encoding", "gzip"),
            ("connection", "keep-alive, mcp-param-hidden"),
            ("mcp-param-hidden", "1"),
            ("upgrade", "h2c"),
        ]);
        let bare = to_upstream(&from, &[]);
        assert_eq!(
            names(&bare),
            [
                "accept",
                "content-type",
                "mcp-method",
                "mcp-name",
                "mcp-param-region",
                "mcp-protocol-version",
                "traceparent"
            ]
        );
        assert_eq!(bare.get_all("accept").iter().count(), 2);
        let more = to_upstream(&from, &["authorization".parse().unwrap(), "x-tenant".parse().unwrap()]);
        assert!(more.contains_key("authorization") && more.contains_key("x-tenant") && !more.contains_key("cookie"));
    }

    #[test]
    fn a_client_gets_all_that_is_not_of_the_connection() {
        let from = map(&[
            ("content-type", "Text/Event-Stream; charset=utf-8"),
            ("content-length", "3"),
            ("transfer-encoding", "chunked"),
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("mcp-session-id", "theirs"),
            ("set-cookie", "a=b"),
            ("x-rate", "9"),
            ("cache-control", "max-age=9"),
            ("www-authenticate", "Bearer"),
        ]);
        let mut to = to_client(&from);
        assert_eq!(names(&to), ["cache-control", "content-type", "www-authenticate", "x-accel-buffering", "x-rate"]);
        unshared(&mut to);
        assert_eq!(to["cache-control"], "no-store");
        assert!(is_stream(&from) && !is_json(&from) && is_json(&map(&[("content-type", "application/json")])));
    }

    #[test]
    fn an_operator_cannot_name_what_the_gate_writes() {
        assert!(may_be_forwarded("authorization") && may_be_forwarded("x-tenant") && may_be_forwarded("cookie"));
        for name in ["host", "mcp-session-id", "transfer-encoding", "connection", "content-length", "a b", ""] {
            assert!(!may_be_forwarded(name), "{name}");
        }
    }
}
