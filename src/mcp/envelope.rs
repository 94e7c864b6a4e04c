//! The JSON-RPC envelope, byte for byte: what is read keeps its `id`, `params`, `result` and `error` as they were
//! written, and what is answered carries the `id` back unchanged.
//!
//! Refused, because two readers could see two different messages: a key twice anywhere, a member that equals a known
//! one but for case (Go's decoder takes `Method` for `method`, CVE-2026-27896), `id: null` (a request that some servers
//! take for a notification), ids that are neither string nor integer, a request that is a response too.

use serde_json::value::RawValue;

use super::{RpcError, bounded, code};
use crate::json::{self, JsonError, Limits};

/// Members of the envelope, and of `params`, whose other spellings are refused.
const ENVELOPE_MEMBERS: [&str; 6] = ["jsonrpc", "id", "method", "params", "result", "error"];
const PARAMS_MEMBERS: [&str; 9] =
    ["name", "arguments", "_meta", "uri", "taskId", "requestId", "inputResponses", "requestState", "protocolVersion"];
const META_MEMBERS: [&str; 6] = [
    "progressToken",
    super::revision::META_PROTOCOL_VERSION,
    super::revision::META_CLIENT_INFO,
    super::revision::META_CLIENT_CAPABILITIES,
    "x402/payment",
    "x402/payment-response",
];
/// The longest id, in bytes as written, that is kept and sent back.
const MAX_ID_BYTES: usize = 1024;
const MAX_METHOD_BYTES: usize = 256;
/// More messages in one batch are refused.
const MAX_BATCH: usize = 64;

/// One message.
#[derive(Debug, Clone)]
pub enum Envelope {
    Request {
        id: Box<RawValue>,
        method: String,
        params: Option<Box<RawValue>>,
    },
    Notification {
        method: String,
        params: Option<Box<RawValue>>,
    },
    /// `id` is `None` for an error about a message whose id could not be read.
    Response {
        id: Option<Box<RawValue>>,
        outcome: Outcome,
    },
}

/// The raw `result`, or the raw `error` object.
#[derive(Debug, Clone)]
pub enum Outcome {
    Result(Box<RawValue>),
    Error(Box<RawValue>),
}

#[derive(Debug)]
pub enum Incoming {
    One(Envelope),
    /// Only 2025-03-26 has batches: whoever serves another revision refuses this whole. Never empty.
    Batch(Vec<Result<Envelope, Fault>>),
}

/// Why a message was refused, and its id where that could be read without doubt.
#[derive(Debug, Clone)]
pub struct Fault {
    pub id: Option<Box<RawValue>>,
    pub error: RpcError,
    /// Beyond the byte limit: HTTP 413.
    pub too_large: bool,
}

impl Fault {
    fn new(id: Option<Box<RawValue>>, error: RpcError) -> Fault {
        Fault { id, error, too_large: false }
    }
    pub fn response(&self) -> String {
        error_response(self.id.as_deref(), &self.error)
    }
}

impl Envelope {
    /// Reads one message or one batch.
    pub fn parse(text: &[u8], limits: Limits) -> Result<Incoming, Fault> {
        let raw = json::check(text, limits).map_err(|error| refused(text, limits, &error))?;
        let Some(elements) = json::elements(raw) else { return read(raw).map(Incoming::One) };
        match elements.len() {
            0 => Err(Fault::new(None, RpcError::invalid_request("Invalid request: the batch is empty"))),
            1..=MAX_BATCH => Ok(Incoming::Batch(elements.into_iter().map(read).collect())),
            _ => Err(Fault::new(
                None,
                RpcError::invalid_request(format!("Invalid request: a batch has at most {MAX_BATCH} messages")),
            )),
        }
    }

    /// The same where a batch is no message.
    pub fn parse_one(text: &[u8], limits: Limits) -> Result<Envelope, Fault> {
        match Envelope::parse(text, limits)? {
            Incoming::One(envelope) => Ok(envelope),
            Incoming::Batch(_) => Err(no_batches()),
        }
    }
}

pub(crate) fn no_batches() -> Fault {
    Fault::new(None, RpcError::invalid_request("Invalid request: batches exist in revision 2025-03-26 alone"))
}

/// A whole request.
pub fn request(id: &RawValue, method: &str, params: Option<&RawValue>) -> String {
    match params {
        Some(params) => {
            format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{},"params":{params}}}"#, json::raw(method))
        }
        None => format!(r#"{{"jsonrpc":"2.0","id":{id},"method":{}}}"#, json::raw(method)),
    }
}

pub fn notification(method: &str, params: Option<&RawValue>) -> String {
    match params {
        Some(params) => format!(r#"{{"jsonrpc":"2.0","method":{},"params":{params}}}"#, json::raw(method)),
        None => format!(r#"{{"jsonrpc":"2.0","method":{}}}"#, json::raw(method)),
    }
}

/// The answer to `id`, with the raw result as it is.
pub fn result_response(id: &RawValue, result: &RawValue) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
}

/// The answer to `id` with a raw `error` object as it is.
pub fn raw_error_response(id: &RawValue, error: &RawValue) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)
}

/// An error about `id`. Where no id could be read the member is absent, as MCP has it: `null` is no id there.
pub fn error_response(id: Option<&RawValue>, error: &RpcError) -> String {
    let message = json::raw(&error.message);
    let data = error.data.as_deref().map(|data| format!(r#","data":{data}"#)).unwrap_or_default();
    let id = id.map(|id| format!(r#""id":{id},"#)).unwrap_or_default();
    format!(r#"{{"jsonrpc":"2.0",{id}"error":{{"code":{},"message":{message}{data}}}}}"#, error.code)
}

/// On one line, as stdio and an SSE event need it: in JSON a line break can only stand between tokens.
pub fn one_line(message: String) -> String {
    if message.contains(['\n', '\r']) { message.replace(['\n', '\r'], " ") } else { message }
}

/// A message whose text as a whole is refused.
fn refused(text: &[u8], limits: Limits, error: &JsonError) -> Fault {
    match error {
        JsonError::TooLarge(bytes) => Fault {
            id: None,
            error: RpcError::invalid_request(format!("Invalid request: the message is larger than {bytes} bytes")),
            too_large: true,
        },
        JsonError::Syntax(_) => Fault::new(None, RpcError::new(code::PARSE_ERROR, format!("Parse error: {error}"))),
        _ => {
            // The syntax is right, so the id can be read if it stands there once and in one spelling.
            let id = text.get(..limits.bytes.min(text.len())).and_then(|text| serde_json::from_slice(text).ok());
            let id = id.and_then(|raw: &RawValue| json::members(raw).ok()).and_then(|members| safe_id(&members));
            Fault::new(id, RpcError::invalid_request(format!("Invalid request: the message {error}")))
        }
    }
}

type Members<'a> = [(std::borrow::Cow<'a, str>, &'a RawValue)];

/// The id, if there is exactly one, in the right spelling and of a legal kind.
fn safe_id(members: &Members<'_>) -> Option<Box<RawValue>> {
    let mut ids = members.iter().filter(|(key, _)| same_but_for_case(key, "id"));
    match (ids.next(), ids.next()) {
        (Some((key, value)), None) if key == "id" && legal_id(value) => Some((*value).to_owned()),
        _ => None,
    }
}

/// A string or an integer. `1.0` and `1e0` are integers to some readers and not to others, and `-0` is another number than
/// `0` to some of them: so they are none.
pub(super) fn legal_id(id: &RawValue) -> bool {
    let text = id.get();
    if text.len() > MAX_ID_BYTES {
        return false;
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    text.starts_with('"') || (text != "-0" && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// `raw` has passed [`json::check`].
fn read(raw: &RawValue) -> Result<Envelope, Fault> {
    let Ok(members) = json::members(raw) else {
        return Err(Fault::new(None, RpcError::invalid_request("Invalid request: the message is no object")));
    };
    let id = safe_id(&members);
    let refuse =
        |what: String| Err(Fault::new(id.clone(), RpcError::invalid_request(format!("Invalid request: {what}"))));
    if let Some((wrong, right)) = misspelt(&members, &ENVELOPE_MEMBERS) {
        return refuse(format!("the member {wrong:?} is not {right:?}"));
    }
    let get = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
    if get("jsonrpc").and_then(json::string).as_deref() != Some("2.0") {
        return refuse("jsonrpc must be \"2.0\"".into());
    }
    let written_id = get("id");
    let outcome = match (get("result"), get("error")) {
        (Some(_), Some(_)) => return refuse("a response has result or error, not both".into()),
        (Some(result), None) => Some(Outcome::Result(result.to_owned())),
        (None, Some(error)) => Some(Outcome::Error(error.to_owned())),
        (None, None) => None,
    };
    let Some(method) = get("method") else {
        return match outcome {
            None => refuse("there is no method".into()),
            Some(Outcome::Error(error)) if written_id.is_none_or(|id| id.get() == "null") => {
                Ok(Envelope::Response { id: None, outcome: Outcome::Error(error) })
            }
            Some(_) if id.is_none() => refuse("the id of a response must be a string or an integer".into()),
            Some(outcome) => Ok(Envelope::Response { id, outcome }),
        };
    };
    if outcome.is_some() {
        return refuse("a request has no result and no error".into());
    }
    if written_id.is_some() && id.is_none() {
        return refuse("the id of a request must be a string or an integer".into());
    }
    let Some(method) = json::string(method).filter(|method| (1..=MAX_METHOD_BYTES).contains(&method.len())) else {
        return refuse("the method must be a string of 1 to 256 bytes".into());
    };
    let params = get("params");
    if let Some(params) = params {
        check_params(params).map_err(|error| Fault::new(id.clone(), error))?;
    }
    let (method, params) = (method.into_owned(), params.map(ToOwned::to_owned));
    Ok(match id {
        Some(id) => Envelope::Request { id, method, params },
        None => Envelope::Notification { method, params },
    })
}

/// MCP's params are an object, and so is `_meta` in it.
fn check_params(params: &RawValue) -> Result<(), RpcError> {
    let members = json::members(params).map_err(|_| RpcError::invalid_params("Invalid params: params is no object"))?;
    if let Some((wrong, right)) = misspelt(&members, &PARAMS_MEMBERS) {
        return Err(RpcError::invalid_params(format!("Invalid params: the member {wrong:?} is not {right:?}")));
    }
    if let Some((_, meta)) = members.iter().find(|(key, _)| key == "_meta") {
        let meta = json::members(meta).map_err(|_| RpcError::invalid_params("Invalid params: _meta is no object"))?;
        if let Some((wrong, right)) = misspelt(&meta, &META_MEMBERS) {
            return Err(RpcError::invalid_params(format!("Invalid params: _meta member {wrong:?} is not {right:?}")));
        }
    }
    Ok(())
}

/// The first member that some reader would take for a known one.
fn misspelt(members: &Members<'_>, known: &[&'static str]) -> Option<(String, &'static str)> {
    members.iter().find_map(|(key, _)| {
        let right = known.iter().find(|right| key != **right && same_but_for_case(key, right))?;
        Some((bounded(key), *right))
    })
}

/// Equal under Unicode's simple case folding, which takes `ſ` for `s` and the Kelvin sign for `k`.
fn same_but_for_case(a: &str, b: &str) -> bool {
    let fold = |c: char| c.to_uppercase().flat_map(char::to_lowercase);
    a.chars().flat_map(fold).eq(b.chars().flat_map(fold))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { bytes: 4096, depth: 16 };

    fn fault(text: &str) -> Fault {
        match Envelope::parse(text.as_bytes(), LIMITS) {
            Err(fault) => fault,
            Ok(read) => panic!("{text} was read as {read:?}"),
        }
    }

    #[test]
    fn refuses_malformed_envelopes_and_keeps_an_id_that_is_beyond_doubt() {
        let long = format!(r#""{}""#, "x".repeat(MAX_ID_BYTES));
        // (text, code, id of the answer)
        let table: Vec<(String, i64, Option<&str>)> = [
            // no JSON
            ("", -32700, None),
            ("{", -32700, None),
            (r#"{"jsonrpc":"2.0","id":1,"method":"ping"}x"#, -32700, None),
            // RPC-01: an id that is there but is none
            (r#"{"jsonrpc":"2.0","id":null,"method":"tools/call"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":{},"method":"tools/call"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":[],"method":"tools/call"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":true,"method":"tools/call"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":1.5,"method":"tools/call"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":1.0,"method":"tools/call"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":1e2,"method":"tools/call"}"#, -32600, None),
            // RPC-03: keys twice, and in another case
            (r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"a"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":1,"ID":2,"method":"a"}"#, -32600, None),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","method":"b"}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","Method":"b"}"#, -32600, Some("1")),
            (r#"{"jsonRpc":"2.0","id":"x","method":"a"}"#, -32600, Some(r#""x""#)),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","param\u017f":{}}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"name":"free","name":"paid"}}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"name":"free","Name":"paid"}}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"URI":"x"}}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"argument\u017f":{}}}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"_META":{}}}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"_meta":{"X402/payment":1}}}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"arguments":{"a":1,"a":2}}}"#, -32600, Some("1")),
            // the rest of the envelope
            (r#"{"id":1,"method":"a"}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"1.0","id":1,"method":"a"}"#, -32600, Some("1")),
            (r#"{"jsonrpc":2.0,"id":1,"method":"a"}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":7}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":""}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":[1]}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":null}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"_meta":3}}"#, -32602, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","result":{}}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":1,"result":{},"error":{}}"#, -32600, Some("1")),
            (r#"{"jsonrpc":"2.0","id":null,"result":{}}"#, -32600, None),
            (r#""ping""#, -32600, None),
            ("[]", -32600, None),
        ]
        .into_iter()
        .map(|(text, code, id)| (text.to_owned(), code, id))
        .chain([
            (format!(r#"{{"jsonrpc":"2.0","id":{long},"method":"a"}}"#), -32600, None),
            (format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{}"}}"#, "a".repeat(257)), -32600, Some("1")),
            (
                format!(r#"{{"jsonrpc":"2.0","id":1,"method":"a","params":{}}}"#, "[".repeat(40) + &"]".repeat(40)),
                -32600,
                Some("1"),
            ),
            (format!("[{}1]", "1,".repeat(MAX_BATCH)), -32600, None),
        ])
        .collect();
        for (text, code, id) in &table {
            let fault = fault(text);
            assert_eq!(fault.error.code, *code, "{text}: {}", fault.error.message);
            assert_eq!(fault.id.as_deref().map(RawValue::get), *id, "{text}");
            assert!(!fault.too_large && fault.error.message.len() < 300, "{text}");
        }
        let large = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{}"}}"#, "a".repeat(5000));
        assert!(fault(&large).too_large);
    }

    #[test]
    fn keeps_ids_and_params_byte_for_byte() {
        for id in ["1", "-7", "0", r#""a\u0062c""#, r#""""#, "123456789012345678901234567890"] {
            let params = r#"{ "name":"x", "arguments":{"n":1.0, "m":1e400} }"#;
            let text =
                format!(r#" {{"method":"tools/call","id": {id} ,"params":{params},"jsonrpc":"2.0","extra":1}} "#);
            let Ok(Incoming::One(Envelope::Request { id: got, method, params: Some(got_params) })) =
                Envelope::parse(text.as_bytes(), LIMITS)
            else {
                panic!("{text}")
            };
            assert_eq!((got.get(), method.as_str(), got_params.get()), (id, "tools/call", params));
            let result: &RawValue = serde_json::from_str(r#"{"z":0.10,"a":"é"}"#).unwrap();
            assert_eq!(
                result_response(&got, result),
                format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"z":0.10,"a":"é"}}}}"#)
            );
        }
    }

    #[test]
    fn tells_requests_notifications_responses_and_batches_apart() {
        let read = |text: &str| Envelope::parse(text.as_bytes(), LIMITS).unwrap_or_else(|f| panic!("{text}: {f:?}"));
        assert!(matches!(
            read(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#),
            Incoming::One(Envelope::Notification { params: None, .. })
        ));
        assert!(matches!(
            read(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#),
            Incoming::One(Envelope::Response { id: Some(_), outcome: Outcome::Result(_) })
        ));
        for text in [r#"{"jsonrpc":"2.0","error":{"code":1}}"#, r#"{"jsonrpc":"2.0","id":null,"error":{"code":1}}"#] {
            assert!(matches!(read(text), Incoming::One(Envelope::Response { id: None, outcome: Outcome::Error(_) })));
        }
        let Incoming::Batch(batch) =
            read(r#"[{"jsonrpc":"2.0","id":1,"method":"a"},{"jsonrpc":"2.0","id":null,"method":"b"}]"#)
        else {
            panic!("no batch")
        };
        assert!(matches!(batch[..], [Ok(Envelope::Request { .. }), Err(Fault { id: None, .. })]));
        assert!(Envelope::parse_one(br#"[{"jsonrpc":"2.0","id":1,"method":"a"}]"#, LIMITS).is_err());
    }

    #[test]
    fn what_is_written_is_one_strict_message_itself() {
        let id: &RawValue = serde_json::from_str(r#""q\"1""#).unwrap();
        let params: &RawValue = serde_json::from_str("{\n \"name\": \"x\"\r\n}").unwrap();
        let error = RpcError { code: -32021, message: "say \"please\"\n".into(), data: Some(params.to_owned()) };
        for text in [
            request(id, "a\"b", Some(params)),
            request(id, "a", None),
            notification("n", Some(params)),
            notification("n", None),
            result_response(id, params),
            raw_error_response(id, params),
            error_response(Some(id), &error),
            error_response(None, &error),
        ] {
            let line = one_line(text);
            assert!(!line.contains(['\n', '\r']), "{line}");
            assert!(Envelope::parse_one(line.as_bytes(), LIMITS).is_ok(), "{line}");
        }
    }
}
