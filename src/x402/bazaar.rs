//! What a seller declares about its input (`extensions.bazaar.info.input`), in a catalog item and in a challenge.

use std::borrow::Cow;

use serde_json::value::RawValue;

use crate::json;

/// The parts that decide something; all of it is the seller's word.
#[derive(Debug, Clone)]
pub struct Declaration<'a> {
    /// `http` or `mcp`.
    pub input_type: Option<Cow<'a, str>>,
    /// `toolName`; `tool`, as the specification of April 2026 has it, only where `toolName` is absent.
    pub tool_name: Option<Cow<'a, str>>,
    /// The name came from `tool`.
    pub legacy_tool_name: bool,
    /// `streamable-http` (what absence means) or `sse`.
    pub transport: Option<Cow<'a, str>>,
    pub input_schema: Option<&'a RawValue>,
    /// A member that decides something has the wrong type; its name.
    pub malformed: Option<&'static str>,
}

/// Reads `bazaar` out of a raw `extensions` object; `None` where there is no such declaration.
pub fn declaration(extensions: Option<&RawValue>) -> Option<Declaration<'_>> {
    let info = json::member(json::member(extensions?, "bazaar")?, "info")?;
    let input = json::members(json::member(info, "input")?).ok()?;
    let get = |name: &str| input.iter().find(|(key, value)| key == name && value.get() != "null").map(|(_, v)| *v);
    let mut malformed = None;
    let mut text = |name: &'static str| {
        let value = get(name)?;
        let text = json::string(value);
        if text.is_none() {
            malformed = Some(name);
        }
        text
    };
    let input_type = text("type");
    let transport = text("transport");
    let (tool_name, legacy_tool_name) = match get("toolName") {
        Some(_) => (text("toolName"), false),
        None => {
            let tool = text("tool");
            let legacy = tool.is_some();
            (tool, legacy)
        }
    };
    let input_schema = get("inputSchema");
    if input_schema.is_some_and(|schema| !schema.get().starts_with('{')) {
        malformed = Some("inputSchema");
    }
    Some(Declaration { input_type, tool_name, legacy_tool_name, transport, input_schema, malformed })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<R>(input: &str, then: impl FnOnce(Declaration<'_>) -> R) -> R {
        let raw = RawValue::from_string(format!(r#"{{"bazaar":{{"info":{{"input":{input}}}}}}}"#)).unwrap();
        then(declaration(Some(&raw)).unwrap())
    }

    #[test]
    fn tool_is_read_only_where_tool_name_is_absent() {
        with(r#"{"type":"mcp","tool":"old","toolName":"new","inputSchema":{}}"#, |d| {
            assert_eq!((d.tool_name.as_deref(), d.legacy_tool_name), (Some("new"), false));
        });
        with(r#"{"type":"mcp","tool":"old"}"#, |d| {
            assert_eq!((d.tool_name.as_deref(), d.legacy_tool_name), (Some("old"), true));
        });
        with(r#"{"type":"mcp","tool":"old","toolName":7}"#, |d| {
            assert_eq!((d.tool_name, d.malformed), (None, Some("toolName")));
        });
    }

    #[test]
    fn wrong_types_are_reported_and_absence_is_not() {
        with(r#"{"type":"mcp","toolName":"t","inputSchema":[]}"#, |d| assert_eq!(d.malformed, Some("inputSchema")));
        with(r#"{"type":"mcp","toolName":"t","transport":null}"#, |d| {
            assert!(d.malformed.is_none() && d.transport.is_none());
        });
        assert!(declaration(None).is_none());
    }
}
