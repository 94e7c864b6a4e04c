//! The protocol revisions: their names, what was negotiated, and what a result must carry in each.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::{RpcError, bounded, code};
use crate::json;

pub const META_PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";
pub const META_CLIENT_INFO: &str = "io.modelcontextprotocol/clientInfo";
pub const META_CLIENT_CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
pub const META_SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";
pub const META_SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Revision {
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
}

impl Revision {
    /// Newest first, as a server lists what it supports.
    pub const ALL: [Revision; 5] = [
        Revision::V2026_07_28,
        Revision::V2025_11_25,
        Revision::V2025_06_18,
        Revision::V2025_03_26,
        Revision::V2024_11_05,
    ];
    /// Over Streamable HTTP; 2024-11-05 has a transport of its own.
    pub const HTTP: [Revision; 4] =
        [Revision::V2026_07_28, Revision::V2025_11_25, Revision::V2025_06_18, Revision::V2025_03_26];
    /// Over `GET /sse` and `POST /messages`.
    pub const SSE: [Revision; 1] = [Revision::V2024_11_05];

    pub const fn as_str(self) -> &'static str {
        match self {
            Revision::V2024_11_05 => "2024-11-05",
            Revision::V2025_03_26 => "2025-03-26",
            Revision::V2025_06_18 => "2025-06-18",
            Revision::V2025_11_25 => "2025-11-25",
            Revision::V2026_07_28 => "2026-07-28",
        }
    }

    pub fn parse(text: &str) -> Option<Revision> {
        Revision::ALL.into_iter().find(|revision| revision.as_str() == text)
    }

    /// Served without handshake and session: each request says who asks and in which revision.
    pub fn stateless(self) -> bool {
        self >= Revision::V2026_07_28
    }

    /// JSON-RPC batches came with 2025-03-26 and went with 2025-06-18.
    pub fn has_batches(self) -> bool {
        self == Revision::V2025_03_26
    }

    /// The answer to `initialize`: what was asked for if it is served with a handshake in `supported`, else the newest
    /// that is (2025-11-25, basic/lifecycle, "Version Negotiation").
    pub fn negotiate(requested: &str, supported: &[Revision]) -> Revision {
        let legacy = || supported.iter().copied().filter(|revision| !revision.stateless());
        legacy()
            .find(|revision| revision.as_str() == requested)
            .or_else(|| legacy().max())
            .unwrap_or(Revision::V2025_11_25)
    }
}

/// The revision that a request declares in its `_meta`, as 2026-07-28 has it.
pub fn declared(params: Option<&RawValue>) -> Option<&RawValue> {
    json::member(json::member(params?, "_meta")?, META_PROTOCOL_VERSION)
}

/// A request of 2026-07-28 says its revision and what the client can do (basic/index, "Per-request protocol fields").
pub(crate) fn check_meta(params: Option<&RawValue>, supported: &[Revision]) -> Result<(), RpcError> {
    let missing =
        |key: &str| RpcError::invalid_params(format!("Invalid params: _meta lacks {key}, or it is malformed"));
    let version = declared(params).and_then(json::string).ok_or_else(|| missing(META_PROTOCOL_VERSION))?;
    if version != Revision::V2026_07_28.as_str() {
        return Err(unsupported(&version, supported));
    }
    let capabilities =
        params.and_then(|p| json::member(p, "_meta")).and_then(|m| json::member(m, META_CLIENT_CAPABILITIES));
    match capabilities {
        Some(capabilities) if json::members(capabilities).is_ok() => Ok(()),
        _ => Err(missing(META_CLIENT_CAPABILITIES)),
    }
}

/// -32022, with what could be asked for instead.
pub(crate) fn unsupported(requested: &str, supported: &[Revision]) -> RpcError {
    #[derive(serde::Serialize)]
    struct Data<'a> {
        supported: Vec<&'static str>,
        requested: &'a str,
    }
    let supported = supported.iter().map(|revision| revision.as_str()).collect();
    RpcError {
        code: code::UNSUPPORTED_VERSION,
        message: "Unsupported protocol version".into(),
        data: Some(json::raw(&Data { supported, requested: &bounded(requested) })),
    }
}

/// The result with what the revision demands and the handler left out; all that is there stays byte for byte. `None`
/// when the result is no object, which no revision allows.
pub(super) fn shape(
    revision: Revision,
    method: &str,
    result: &RawValue,
    server_info: &RawValue,
) -> Option<Box<RawValue>> {
    let members = json::members(result).ok()?;
    if !revision.stateless() {
        return Some(result.to_owned());
    }
    let has = |name: &str| members.iter().any(|(key, _)| key == name);
    let mut added = Vec::new();
    if !has("resultType") {
        added.push(r#""resultType":"complete""#.to_owned());
    }
    if cacheable(method) {
        if !has("ttlMs") {
            added.push(r#""ttlMs":0"#.to_owned());
        }
        if !has("cacheScope") {
            added.push(r#""cacheScope":"private""#.to_owned());
        }
    }
    let mut text = Cow::Borrowed(result.get());
    match members.iter().find(|(key, _)| key == "_meta") {
        None => added.push(format!(r#""_meta":{{"{META_SERVER_INFO}":{server_info}}}"#)),
        Some((_, meta)) if json::members(meta).is_ok() && json::member(meta, META_SERVER_INFO).is_none() => {
            // The value is a slice of the result's text.
            let start = meta.get().as_ptr().addr() - text.as_ptr().addr();
            let inside = with_members(meta.get(), &[format!(r#""{META_SERVER_INFO}":{server_info}"#)]);
            text = Cow::Owned(format!("{}{inside}{}", &text[..start], &text[start + meta.get().len()..]));
        }
        Some(_) => {}
    }
    RawValue::from_string(with_members(&text, &added)).ok()
}

/// 2026-07-28, server/utilities/caching: the results that say how long they are good for.
fn cacheable(method: &str) -> bool {
    matches!(method, "tools/list" | "prompts/list" | "resources/list" | "resources/templates/list" | "resources/read")
}

/// `object`, which is the text of one, with `added` members in front of its own.
fn with_members(object: &str, added: &[String]) -> String {
    let rest = &object[1..];
    let comma = if added.is_empty() || rest.trim_start().starts_with('}') { "" } else { "," };
    format!("{{{}{comma}{rest}", added.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn initialize_gets_what_it_asked_for_or_the_newest_with_a_handshake() {
        for (asked, all, http) in [
            ("2024-11-05", "2024-11-05", "2025-11-25"),
            ("2025-03-26", "2025-03-26", "2025-03-26"),
            ("2025-06-18", "2025-06-18", "2025-06-18"),
            ("2025-11-25", "2025-11-25", "2025-11-25"),
            ("2026-07-28", "2025-11-25", "2025-11-25"),
            ("1.0", "2025-11-25", "2025-11-25"),
        ] {
            assert_eq!(Revision::negotiate(asked, &Revision::ALL).as_str(), all, "{asked}");
            assert_eq!(Revision::negotiate(asked, &Revision::HTTP).as_str(), http, "{asked}");
        }
    }

    #[test]
    fn a_result_gets_what_its_revision_demands_and_keeps_its_bytes() {
        let info = raw(r#"{"name":"t","version":"1"}"#);
        let shaped = |revision, method: &str, result: &str| {
            shape(revision, method, raw(result), info).map(|shaped| shaped.get().to_owned())
        };
        let new = Revision::V2026_07_28;
        assert_eq!(
            shaped(new, "tools/call", r#"{ "n":1.0 }"#).unwrap(),
            r#"{"resultType":"complete","_meta":{"io.modelcontextprotocol/serverInfo":{"name":"t","version":"1"}}, "n":1.0 }"#
        );
        assert_eq!(
            shaped(new, "tools/list", r#"{"tools":[],"ttlMs":5,"_meta":{ "a":1}}"#).unwrap(),
            r#"{"resultType":"complete","cacheScope":"private","tools":[],"ttlMs":5,"_meta":{"io.modelcontextprotocol/serverInfo":{"name":"t","version":"1"}, "a":1}}"#
        );
        let own = r#"{"resultType":"input_required","_meta":{"io.modelcontextprotocol/serverInfo":{"name":"me"}}}"#;
        assert_eq!(shaped(new, "tools/call", own).unwrap(), own);
        let empty = shaped(new, "tools/call", "{ }").unwrap();
        assert_eq!(
            crate::json::check(empty.as_bytes(), crate::json::Limits { bytes: 999, depth: 9 }).unwrap().get(),
            empty
        );
        let old = r#"{ "tools":[] }"#;
        assert_eq!(shaped(Revision::V2025_11_25, "tools/list", old).unwrap(), old);
        assert_eq!(shaped(new, "tools/call", "[]"), None);
    }

    #[test]
    fn a_stateless_request_declares_revision_and_capabilities() {
        let code = |text: &str| check_meta(Some(raw(text)), &Revision::HTTP).map_err(|e| e.code);
        let meta = |meta: &str| code(&format!(r#"{{"_meta":{meta}}}"#));
        let (v, c) = (META_PROTOCOL_VERSION, META_CLIENT_CAPABILITIES);
        assert_eq!(meta(&format!(r#"{{"{v}":"2026-07-28","{c}":{{}}}}"#)), Ok(()));
        assert_eq!(meta(&format!(r#"{{"{v}":"2026-07-28"}}"#)), Err(code::INVALID_PARAMS));
        assert_eq!(meta(&format!(r#"{{"{v}":"2026-07-28","{c}":7}}"#)), Err(code::INVALID_PARAMS));
        assert_eq!(meta(&format!(r#"{{"{v}":20260728,"{c}":{{}}}}"#)), Err(code::INVALID_PARAMS));
        assert_eq!(meta(&format!(r#"{{"{v}":"1900-01-01","{c}":{{}}}}"#)), Err(code::UNSUPPORTED_VERSION));
        assert_eq!(code("{}"), Err(code::INVALID_PARAMS));
        let data = unsupported("1900-01-01", &Revision::HTTP).data.unwrap();
        assert_eq!(
            data.get(),
            r#"{"supported":["2026-07-28","2025-11-25","2025-06-18","2025-03-26"],"requested":"1900-01-01"}"#
        );
    }
}
