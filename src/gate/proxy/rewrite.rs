//! Results that the gate adds something to: lists get prices, and `server/discover` the payment extension. All else in
//! them stays byte for byte, and so does every message beside the one that answers the request.

use axum::body::Body;
use axum::response::Response;
use serde_json::value::RawValue;
use tokio::sync::mpsc;

use super::events::{Events, Ids};
use super::frames::FrameBody;
use super::upstream::Reply;
use super::{Permit, Place, Proxy, bad_gateway, headers, respond};
use crate::gate::splice;
use crate::json;
use crate::mcp::http::Refused;
use crate::x402::MCP_EXTENSION;

/// Of an upstream's message, arrays and objects inside each other.
pub const MAX_DEPTH: usize = 128;

/// Whether the gate adds something to this method's results.
pub fn is_edited(method: &str) -> bool {
    matches!(method, "tools/list" | "resources/list" | "resources/templates/list" | "prompts/list" | "server/discover")
}

/// `server/discover` says that payments are understood in the form of the extension.
pub fn with_extension(result: &RawValue) -> Option<Box<RawValue>> {
    let empty = json::raw(&serde_json::Map::new());
    let capabilities = json::member(result, "capabilities").unwrap_or(&empty);
    let capabilities = splice::with_inner(capabilities, "extensions", &[(MCP_EXTENSION, "{}")])?;
    splice::with_members(result, &[("capabilities", capabilities.get())])
}

/// The message with its result edited, where it is the answer to `id`; `None`: it stays.
pub fn message(
    text: &[u8],
    limit: usize,
    id: &RawValue,
    edit: impl Fn(&RawValue) -> Option<Box<RawValue>>,
) -> Option<String> {
    let raw = json::check(text, json::Limits { bytes: limit, depth: MAX_DEPTH }).ok()?;
    let members = json::members(raw).ok()?;
    let get = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
    if !json::equal(get("id")?, id) {
        return None;
    }
    let result = get("result")?;
    let edited = edit(result)?;
    let whole = splice::replaced(raw.get(), vec![(splice::place(raw.get(), result)?, edited.get().to_owned())])?;
    Some(whole.get().to_owned())
}

/// The message with the member at each path replaced, every other byte as it is. `None`: one of them is not there.
pub(super) fn replacing(message: &[u8], members: &[(&[&str], &str)]) -> Option<String> {
    let raw: &RawValue = serde_json::from_slice(message).ok()?;
    let edits = members.iter().map(|(path, with)| {
        let part = path.iter().try_fold(raw, |at, name| json::member(at, name))?;
        Some((splice::place(raw.get(), part)?, (*with).to_owned()))
    });
    Some(splice::replaced(raw.get(), edits.collect::<Option<_>>()?)?.get().to_owned())
}

impl Proxy {
    pub(super) async fn edited(
        &self,
        mut reply: Reply,
        place: &Place,
        (id, method): (Box<RawValue>, String),
        permit: Permit,
    ) -> Result<Response, Refused> {
        let session = place.session.as_ref();
        let limit = self.settings.max_answer_bytes;
        if !reply.status.is_success() {
            return Ok(self.passed(reply, session, permit));
        }
        let (status, mut head) = (reply.status, headers::to_client(&reply.headers));
        headers::unshared(&mut head);
        if headers::is_json(&reply.headers) {
            let whole = reply.body.whole(limit, self.settings.idle).await;
            let whole = whole.map_err(|error| bad_gateway(Some(&id), &error.to_string()))?;
            let edited = message(&whole, limit, &id, |result| self.edit(&method, result));
            return Ok(respond(status, head, edited.map_or(Body::from(whole), Body::from)));
        }
        if !headers::is_stream(&reply.headers) {
            return Ok(self.passed(reply, session, permit));
        }
        let (out, frames) = mpsc::channel(16);
        let (gate, sessions, idle) = (self.gate.clone(), self.sessions.clone(), self.settings.idle);
        let name = session.map_or_else(String::new, |session| session.name.clone());
        self.settings.front.world.spawn.spawn(Box::pin(async move {
            let (mut events, mut ids) = (Events::new(limit), Ids::default());
            let mut found = Vec::new();
            while let Ok(Some(piece)) = reply.body.chunk(idle).await {
                let fits = events.push(&piece, &mut found);
                for event in found.drain(..) {
                    let edited = event
                        .data
                        .as_deref()
                        .and_then(|data| message(data, limit, &id, |result| edit(&gate, &method, result)));
                    let raw =
                        edited.map_or(event.raw.clone(), |text| event.with_data(&crate::mcp::envelope::one_line(text)));
                    let raw = ids.pass(raw, |id| sessions.tag_event(&name, id));
                    if out.send(raw).await.is_err() {
                        return;
                    }
                }
                if fits.is_err() {
                    tracing::warn!("the upstream sent a list that is too large to be priced");
                    return;
                }
            }
            let _ = out.send(events.rest()).await;
        }));
        Ok(respond(status, head, Body::new(FrameBody::new(frames, permit))))
    }

    fn edit(&self, method: &str, result: &RawValue) -> Option<Box<RawValue>> {
        edit(&self.gate, method, result)
    }
}

fn edit(gate: &super::Gate, method: &str, result: &RawValue) -> Option<Box<RawValue>> {
    match method {
        "server/discover" => with_extension(result),
        _ => gate.list(method, result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn discover_says_that_payments_are_understood() {
        for (before, after) in [
            (r#"{ "a":1 }"#, r#"{ "a":1 ,"capabilities":{"extensions":{"org.x402/payment":{}}}}"#),
            (
                r#"{"capabilities":{"tools":{}, "extensions":{"x":{}}},"z":1.0}"#,
                r#"{"capabilities":{"tools":{}, "extensions":{"x":{},"org.x402/payment":{}}},"z":1.0}"#,
            ),
        ] {
            assert_eq!(with_extension(&raw(before)).unwrap().get(), after);
        }
    }

    #[test]
    fn only_the_answers_result_is_edited() {
        let edit = |_: &RawValue| Some(raw("{}"));
        let text = br#" {"result" : {"tools":[]}, "x":1.0, "jsonrpc":"2.0","id": "\u0061"} "#;
        assert_eq!(
            message(text, 999, &raw(r#""a""#), edit).unwrap(),
            r#"{"result" : {}, "x":1.0, "jsonrpc":"2.0","id": "\u0061"}"#
        );
        for other in [r#"{"id":"b","result":{}}"#, r#"{"id":"a","error":{}}"#, r#"{"method":"x"}"#, "[]", "{"] {
            assert!(message(other.as_bytes(), 999, &raw(r#""a""#), edit).is_none(), "{other}");
        }
    }
}
