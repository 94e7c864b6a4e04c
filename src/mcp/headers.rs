//! The request headers of Streamable HTTP (2026-07-28, basic/transports/streamable-http, "Request Metadata"): which
//! body fields they mirror, their Base64 form, and the check that header and body say the same.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use serde_json::value::RawValue;

use super::bounded;
use crate::json;

pub const PROTOCOL_VERSION: &str = "mcp-protocol-version";
pub const SESSION_ID: &str = "mcp-session-id";
pub const METHOD: &str = "mcp-method";
pub const NAME: &str = "mcp-name";
/// Followed by the value of `x-mcp-header`.
pub const PARAM_PREFIX: &str = "mcp-param-";
/// A schema that asks for more is not followed: it comes from a seller.
const MAX_PARAM_HEADERS: usize = 64;

const BASE64_PREFIX: &str = "=?base64?";
const BASE64_SUFFIX: &str = "?=";

/// The value as it travels: as it is where a header carries it unharmed, else `=?base64?…?=` over its UTF-8.
pub fn encode(value: &str) -> String {
    let printable = value.bytes().all(|b| b == b'\t' || (0x20..=0x7e).contains(&b));
    let padded = value.starts_with([' ', '\t']) || value.ends_with([' ', '\t']);
    let looks_encoded = value.starts_with(BASE64_PREFIX) && value.ends_with(BASE64_SUFFIX);
    let plain = printable && !padded && !looks_encoded;
    if plain { value.to_owned() } else { format!("{BASE64_PREFIX}{}{BASE64_SUFFIX}", STANDARD.encode(value)) }
}

/// `None` where the Base64 form holds no Base64 or no UTF-8.
pub fn decode(value: &str) -> Option<String> {
    match value.strip_prefix(BASE64_PREFIX).and_then(|rest| rest.strip_suffix(BASE64_SUFFIX)) {
        Some(inner) => String::from_utf8(STANDARD.decode(inner).ok()?).ok(),
        None => Some(value.to_owned()),
    }
}

/// The body field that `Mcp-Name` mirrors for this method.
pub fn name_member(method: &str) -> Option<&'static str> {
    match method {
        "tools/call" | "prompts/get" => Some("name"),
        "resources/read" => Some("uri"),
        "tasks/get" | "tasks/update" | "tasks/cancel" => Some("taskId"),
        _ => None,
    }
}

/// An argument that travels as a header too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamHeader {
    /// Property names from the root of the arguments.
    pub path: Vec<String>,
    /// Lower case, with its prefix.
    pub header: String,
}

/// The `x-mcp-header` annotations of a tool's input schema; `Err` says why the schema must not be used: an empty name
/// or one that is no token, a name twice, a type that no header carries, a place not reached by `properties` alone.
pub fn param_headers(schema: &RawValue) -> Result<Vec<ParamHeader>, String> {
    if !schema.get().contains("x-mcp-header") {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    walk(schema, Some(&mut Vec::new()), &mut found)?;
    Ok(found)
}

/// `path` is `None` once the chain of `properties` is broken: an annotation there is an error.
fn walk(schema: &RawValue, mut path: Option<&mut Vec<String>>, found: &mut Vec<ParamHeader>) -> Result<(), String> {
    if let Some(items) = json::elements(schema) {
        return items.into_iter().try_for_each(|item| walk(item, None, found));
    }
    let Ok(members) = json::members(schema) else { return Ok(()) };
    if let Some((_, name)) = members.iter().find(|(key, _)| key == "x-mcp-header") {
        let kind = members.iter().find(|(key, _)| key == "type").and_then(|(_, kind)| json::string(kind));
        let path = path.as_deref().filter(|path| !path.is_empty()).ok_or("x-mcp-header stands where it must not")?;
        found.push(param_header(path, name, kind.as_deref(), found)?);
    }
    for (key, value) in &members {
        match (key.as_ref(), path.as_deref_mut()) {
            // Instance data and property names, not schemas.
            ("default" | "const" | "enum" | "examples" | "dependentRequired" | "x-mcp-header", _) => {}
            ("properties", Some(path)) => {
                for (property, schema) in json::members(value).unwrap_or_default() {
                    path.push(property.into_owned());
                    walk(schema, Some(path), found)?;
                    path.pop();
                }
            }
            ("properties" | "$defs" | "definitions" | "dependentSchemas" | "patternProperties" | "dependencies", _) => {
                for (_, schema) in json::members(value).unwrap_or_default() {
                    walk(schema, None, found)?;
                }
            }
            _ => walk(value, None, found)?,
        }
    }
    Ok(())
}

fn param_header(
    path: &[String],
    name: &RawValue,
    kind: Option<&str>,
    found: &[ParamHeader],
) -> Result<ParamHeader, String> {
    let name = json::string(name).unwrap_or_default();
    if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
        return Err(format!("x-mcp-header {:?} is no header name", bounded(&name)));
    }
    if !matches!(kind, Some("string" | "integer" | "boolean")) {
        return Err("x-mcp-header is for strings, integers and booleans only".into());
    }
    if found.len() == MAX_PARAM_HEADERS {
        return Err(format!("more than {MAX_PARAM_HEADERS} arguments have an x-mcp-header"));
    }
    let header = format!("{PARAM_PREFIX}{}", name.to_ascii_lowercase());
    if found.iter().any(|other| other.header == header) {
        return Err(format!("x-mcp-header {:?} is there twice", bounded(&name)));
    }
    Ok(ParamHeader { path: path.to_vec(), header })
}

/// The argument's text as its header has it; `None` for absent, null and what no header carries.
pub fn param_value(arguments: Option<&RawValue>, path: &[String]) -> Option<String> {
    let value = path.iter().try_fold(arguments?, |value, name| json::member(value, name))?;
    match value.get() {
        "true" | "false" => Some(value.get().to_owned()),
        text if text.starts_with('"') => json::string(value).map(std::borrow::Cow::into_owned),
        text if text.starts_with(['-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']) => Some(text.to_owned()),
        _ => None,
    }
}

/// The headers of a request of 2026-07-28 against its body; `Err` is the reason for -32020. `schema` is the called
/// tool's input schema where it is known.
pub fn check(
    headers: &HeaderMap,
    method: &str,
    params: Option<&RawValue>,
    schema: Option<&RawValue>,
) -> Result<(), String> {
    match single(headers, METHOD)? {
        None => return Err("the Mcp-Method header is missing".into()),
        Some(value) if value != method => {
            return Err(format!("Mcp-Method is {:?} but the body's method is {:?}", bounded(value), bounded(method)));
        }
        Some(_) => {}
    }
    let name = name_member(method).and_then(|member| json::string(json::member(params?, member)?));
    match (single(headers, NAME)?, name) {
        (None, Some(_)) => return Err(format!("the Mcp-Name header is missing for {}", bounded(method))),
        (Some(value), Some(name)) => {
            let decoded = decode(value).ok_or("Mcp-Name is no Base64 of UTF-8")?;
            if decoded != name {
                return Err(format!("Mcp-Name is {:?} but the body has {:?}", bounded(&decoded), bounded(&name)));
            }
        }
        (Some(_), None) if name_member(method).is_some() => return Err("Mcp-Name names what the body does not".into()),
        (_, None) => {}
    }
    let Some(schema) = schema.filter(|_| method == "tools/call") else { return Ok(()) };
    let arguments = params.and_then(|params| json::member(params, "arguments"));
    for ParamHeader { path, header } in param_headers(schema)? {
        match (single(headers, &header)?, param_value(arguments, &path)) {
            (None, None) => {}
            (Some(_), None) => return Err(format!("{header} is there, but the body has no {}", path.join("."))),
            (None, Some(_)) => return Err(format!("{header} is missing for {}", path.join("."))),
            (Some(value), Some(expected)) => {
                let decoded = decode(value).ok_or_else(|| format!("{header} is no Base64 of UTF-8"))?;
                if !same_value(&decoded, &expected) {
                    return Err(format!(
                        "{header} is {:?} but the body has {:?}",
                        bounded(&decoded),
                        bounded(&expected)
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Numbers are compared as numbers (`42.0` and `42`), all else as text.
fn same_value(header: &str, body: &str) -> bool {
    let number = |text: &str| serde_json::from_str::<serde_json::Number>(text).is_ok();
    header == body
        || (number(header)
            && number(body)
            && match (serde_json::from_str::<&RawValue>(header), serde_json::from_str::<&RawValue>(body)) {
                (Ok(header), Ok(body)) => json::equal(header, body),
                _ => false,
            })
}

/// The only value of a header. Twice is an error: a proxy might route on the other one.
pub fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, String> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(_), Some(_)) => Err(format!("the header {name} is there twice")),
        (Some(value), None) => {
            value.to_str().map(Some).map_err(|_| format!("the header {name} has characters that are not allowed"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        headers
    }

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn encodes_as_the_specification_shows() {
        // 2026-07-28, basic/transports/streamable-http, "Value Encoding".
        for (value, header) in [
            ("us-west1", "us-west1"),
            ("", ""),
            ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
            (" padded ", "=?base64?IHBhZGRlZCA=?="),
            ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
            ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ] {
            assert_eq!(encode(value), header);
            assert_eq!(decode(header).as_deref(), Some(value));
        }
        assert_eq!(decode("=?base64?***?="), None);
        assert_eq!(decode("=?base64?/w==?="), None, "no UTF-8");
        assert_eq!(decode("=?BASE64?eA==?=").as_deref(), Some("=?BASE64?eA==?="), "the markers are case-sensitive");
    }

    #[test]
    fn header_and_body_must_say_the_same() {
        let call = raw(r#"{"name":"größe","arguments":{}}"#);
        let name = encode("größe");
        let ok = map(&[("Mcp-Method", "tools/call"), ("Mcp-Name", &name)]);
        assert_eq!(check(&ok, "tools/call", Some(call), None), Ok(()));
        let list = map(&[("Mcp-Method", "tools/list")]);
        assert_eq!(check(&list, "tools/list", None, None), Ok(()));
        for bad in [
            map(&[]),
            map(&[("Mcp-Method", "tools/call")]),
            map(&[("Mcp-Name", &name)]),
            map(&[("Mcp-Method", "tools/list"), ("Mcp-Name", &name)]),
            map(&[("Mcp-Method", "Tools/Call"), ("Mcp-Name", &name)]),
            map(&[("Mcp-Method", "tools/call"), ("Mcp-Name", "other")]),
            map(&[("Mcp-Method", "tools/call"), ("Mcp-Name", "=?base64?!?=")]),
            map(&[("Mcp-Method", "tools/call"), ("Mcp-Name", &name), ("Mcp-Name", "free")]),
            map(&[("Mcp-Method", "tools/call"), ("Mcp-Method", "tools/list"), ("Mcp-Name", &name)]),
        ] {
            assert!(check(&bad, "tools/call", Some(call), None).is_err(), "{bad:?}");
        }
        assert!(check(&ok, "tools/call", Some(raw("{}")), None).is_err(), "a name that the body lacks");
        let read = map(&[("Mcp-Method", "resources/read"), ("Mcp-Name", "file:///a")]);
        assert_eq!(check(&read, "resources/read", Some(raw(r#"{"uri":"file:///a"}"#)), None), Ok(()));
    }

    #[test]
    fn annotated_arguments_must_match_their_headers() {
        let schema = raw(r#"{"type":"object","properties":{
                "region":{"type":"string","x-mcp-header":"Region"},
                "size":{"type":"integer","x-mcp-header":"Size"},
                "at":{"type":"object","properties":{"dry":{"type":"boolean","x-mcp-header":"Dry"}}}}}"#);
        let verdict = |extra: &[(&str, &str)], arguments: &str| {
            let mut pairs = vec![("Mcp-Method", "tools/call"), ("Mcp-Name", "t")];
            pairs.extend_from_slice(extra);
            let params = format!(r#"{{"name":"t","arguments":{arguments}}}"#);
            check(&map(&pairs), "tools/call", Some(raw(&params)), Some(schema))
        };
        let all = r#"{"region":"é","size":42,"at":{"dry":true}}"#;
        let encoded = encode("é");
        let headers = [("Mcp-Param-Region", encoded.as_str()), ("mcp-param-size", "42.0"), ("MCP-PARAM-DRY", "true")];
        assert_eq!(verdict(&headers, all), Ok(()));
        assert_eq!(verdict(&[], r#"{"region":null}"#), Ok(()));
        assert_eq!(verdict(&[("Mcp-Param-Unknown", "x")], "{}"), Ok(()), "an unknown one is ignored");
        for (extra, arguments) in [
            (&headers[1..], all),
            (&headers[..], r#"{"region":"é","size":43,"at":{"dry":true}}"#),
            (&headers[..], r#"{"size":42,"at":{"dry":true}}"#),
            (&[("Mcp-Param-Size", "042")][..], r#"{"size":42}"#),
            (&[("Mcp-Param-Dry", "TRUE")][..], r#"{"at":{"dry":true}}"#),
            (&[("Mcp-Param-Dry", "true")][..], r#"{"dry":true}"#),
        ] {
            assert!(verdict(extra, arguments).is_err(), "{extra:?} {arguments}");
        }
    }

    #[test]
    fn refuses_annotations_that_the_specification_forbids() {
        for schema in [
            r#"{"x-mcp-header":"Root"}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":""}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":"a b"}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":"a\r\nb"}}}"#,
            r#"{"properties":{"a":{"type":"number","x-mcp-header":"A"}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":7}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":"A"},"b":{"type":"string","x-mcp-header":"a"}}}"#,
            r#"{"properties":{"a":{"type":"array","items":{"type":"string","x-mcp-header":"A"}}}}"#,
            r#"{"oneOf":[{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}]}"#,
            r##"{"$defs":{"a":{"type":"string","x-mcp-header":"A"}}}"##,
        ] {
            assert!(param_headers(raw(schema)).is_err(), "{schema}");
        }
        let fine = r#"{"properties":{"x-mcp-header":{"type":"string","default":{"x-mcp-header":"no"}}}}"#;
        assert_eq!(param_headers(raw(fine)), Ok(Vec::new()), "a property of that name is none");
    }

    #[test]
    fn a_schema_cannot_ask_for_any_number_of_headers() {
        let schema = |count: usize| {
            let one = |n| format!(r#""p{n}":{{"type":"string","x-mcp-header":"h{n}"}}"#);
            let properties: Vec<String> = (0..count).map(one).collect();
            RawValue::from_string(format!(r#"{{"type":"object","properties":{{{}}}}}"#, properties.join(","))).unwrap()
        };
        assert_eq!(param_headers(&schema(MAX_PARAM_HEADERS)).unwrap().len(), MAX_PARAM_HEADERS);
        assert!(param_headers(&schema(40_000)).is_err());
    }
}
