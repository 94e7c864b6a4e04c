//! Tool results: `structuredContent`, and the same JSON as text for clients that show only that, with binary data
//! replaced by a note; then the seller's blocks that are not text, unchanged.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde_json::value::RawValue;

use crate::json;
use crate::pay::object::{Object, array};

/// The `result` of `tools/call` for an output of ours that carries nothing of a seller's content.
pub fn plain(output: &RawValue, is_error: bool) -> Box<RawValue> {
    build(output, output, &[], is_error)
}

/// The same for the envelope of `x402_call_resource`.
pub fn paid(envelope: &RawValue) -> Box<RawValue> {
    let content = json::member(envelope, "content").and_then(json::elements).unwrap_or_default();
    let blocks: Vec<&RawValue> = content.iter().copied().filter(|block| is_block(block)).collect();
    let is_error = json::member(envelope, "isError").is_some_and(|flag| flag.get() == "true");
    if content.iter().all(|block| kind(block).as_deref() == Some("text")) {
        return build(envelope, envelope, &[], is_error);
    }
    let noted: Vec<Box<RawValue>> = content.iter().map(|block| note_binary(block)).collect();
    let noted = array(noted.iter().map(|block| &**block));
    let text = json::members(envelope)
        .unwrap_or_default()
        .into_iter()
        .fold(Object::new(), |object, (name, value)| object.raw(&name, if name == "content" { &noted } else { value }));
    build(&text.build(), envelope, &blocks, is_error)
}

fn build(text: &RawValue, output: &RawValue, blocks: &[&RawValue], is_error: bool) -> Box<RawValue> {
    let first = Object::new().with("type", "text").with("text", text.get()).build();
    let content = array(std::iter::once(&*first).chain(blocks.iter().copied()));
    let object = Object::new().raw("content", &content).raw("structuredContent", output);
    if is_error { object.with("isError", &true).build() } else { object.build() }
}

fn kind(block: &RawValue) -> Option<String> {
    json::member(block, "type").and_then(json::string).map(|kind| kind.into_owned())
}

/// A block other than text that every client can read. One that a strict client refuses would cost the agent the whole
/// answer, output and receipt; it stays in `structuredContent`.
fn is_block(block: &RawValue) -> bool {
    let text = |object: &RawValue, name: &str| json::member(object, name).and_then(json::string).is_some();
    let binary = |object: &RawValue, name: &str| {
        let text = json::member(object, name).and_then(json::string);
        text.is_some_and(|text| STANDARD_NO_PAD.decode(text.trim_end_matches('=')).is_ok())
    };
    let object_if_there = |name: &str| json::member(block, name).is_none_or(|value| value.get().starts_with('{'));
    let whole = match kind(block).as_deref() {
        Some("image" | "audio") => binary(block, "data") && text(block, "mimeType"),
        Some("resource") => json::member(block, "resource")
            .is_some_and(|resource| text(resource, "uri") && (text(resource, "text") || binary(resource, "blob"))),
        Some("resource_link") => text(block, "uri") && text(block, "name"),
        _ => false,
    };
    whole && object_if_there("annotations") && object_if_there("_meta")
}

/// `data` of images and audio and `blob` of embedded resources, wherever they stand in a block.
fn note_binary(block: &RawValue) -> Box<RawValue> {
    let Ok(members) = json::members(block) else { return block.to_owned() };
    let object = members.into_iter().fold(Object::new(), |object, (name, value)| match name.as_ref() {
        "data" | "blob" if value.get().starts_with('"') => {
            let mut note = String::new();
            let length = json::string(value).map_or(0, |text| text.len());
            let _ = write!(note, "({length} characters of base64: see structuredContent or the blocks below)");
            object.with(&name, &note)
        }
        "resource" => object.raw(&name, &note_binary(value)),
        _ => object.raw(&name, value),
    });
    object.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sellers_bytes_stay_and_the_text_has_no_binary() {
        let image = r#"{"type":"image","mimeType":"image/png","data":"QUJD","x-unknown":1.0}"#;
        let blob = r#"{"type":"resource","resource":{"uri":"a:b","blob":"REVG"}}"#;
        let text = format!(
            r#"{{"content":[{{"type":"text","text":"hi"}},{image},{blob}],"structuredContent":{{"n":1.0,"big":10000000000000000000000001}},"receipt":null}}"#
        );
        let envelope: &RawValue = serde_json::from_str(&text).unwrap();
        let result = paid(envelope);
        assert_eq!(json::member(&result, "structuredContent").unwrap().get(), text);
        let content = json::elements(json::member(&result, "content").unwrap()).unwrap();
        assert_eq!(content.len(), 3);
        assert_eq!((content[1].get(), content[2].get()), (image, blob));
        let shown = json::string(json::member(content[0], "text").unwrap()).unwrap();
        let shown: &RawValue = serde_json::from_str(&shown).unwrap();
        assert!(!shown.get().contains("QUJD") && !shown.get().contains("REVG"), "{}", shown.get());
        assert!(shown.get().contains("10000000000000000000000001") && shown.get().contains("\"x-unknown\":1.0"));
        assert!(json::member(&result, "isError").is_none());
    }

    #[test]
    fn the_sellers_error_flag_is_the_results() {
        let envelope: &RawValue = serde_json::from_str(r#"{"content":[],"isError":true,"receipt":null}"#).unwrap();
        assert_eq!(json::member(&paid(envelope), "isError").unwrap().get(), "true");
    }
}
