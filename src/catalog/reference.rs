//! Resource references: `v1.` + base64url (no padding) of the canonical JSON of `{"n","t","u"}`: tool name (MCP only),
//! type, URL. One resource has exactly one reference, so two references are equal when their texts are.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use url::Url;

use crate::json::{self, Limits};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Http,
    Mcp,
}

impl Kind {
    /// As it stands on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Http => "http",
            Kind::Mcp => "mcp",
        }
    }
}

impl FromStr for Kind {
    type Err = RefError;
    fn from_str(s: &str) -> Result<Kind, RefError> {
        match s {
            "http" => Ok(Kind::Http),
            "mcp" => Ok(Kind::Mcp),
            _ => Err(RefError::Type),
        }
    }
}

/// Names one catalog resource. Its `Display` form is the `ref` of the tools.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResourceRef {
    pub kind: Kind,
    /// As the catalog writes it: never normalised, because it is compared with what the seller says.
    pub url: String,
    /// Required for `mcp`, absent for `http`.
    pub tool_name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RefError {
    #[error("the reference is not `v1.` and the base64url form of its canonical JSON")]
    Format,
    #[error("the resource type is neither http nor mcp")]
    Type,
    #[error(
        "the URL is not an absolute http, https or (for mcp) mcp URL of at most 2,048 bytes without credentials, \
         fragment, blanks, control characters or backslashes"
    )]
    Url,
    #[error("a tool name is needed for mcp (1-256 characters, no control characters), and none for http")]
    ToolName,
}

const MAX_REF_BYTES: usize = 8_192;
const MAX_URL_BYTES: usize = 2_048;
const MAX_TOOL_NAME_CHARS: usize = 256;

impl ResourceRef {
    pub fn new(kind: Kind, url: &str, tool_name: Option<&str>) -> Result<ResourceRef, RefError> {
        check_url(kind, url)?;
        match (kind, tool_name) {
            (Kind::Http, None) => {}
            (Kind::Mcp, Some(name))
                if !name.is_empty()
                    && name.chars().count() <= MAX_TOOL_NAME_CHARS
                    && !name.chars().any(char::is_control) => {}
            _ => return Err(RefError::ToolName),
        }
        Ok(ResourceRef { kind, url: url.to_owned(), tool_name: tool_name.map(str::to_owned) })
    }

    /// The JSON inside: members sorted, no white space (RFC 8785).
    fn canonical(&self) -> String {
        let text = |s: &str| json::raw(s).get().to_owned();
        let name = self.tool_name.as_deref().map(|name| format!("\"n\":{},", text(name))).unwrap_or_default();
        format!("{{{name}\"t\":\"{}\",\"u\":{}}}", self.kind.as_str(), text(&self.url))
    }
}

impl fmt::Display for ResourceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v1.{}", URL_SAFE_NO_PAD.encode(self.canonical()))
    }
}

impl FromStr for ResourceRef {
    type Err = RefError;

    /// Refuses every spelling but the canonical one.
    fn from_str(s: &str) -> Result<ResourceRef, RefError> {
        if s.len() > MAX_REF_BYTES {
            return Err(RefError::Format);
        }
        let body = s.strip_prefix("v1.").ok_or(RefError::Format)?;
        let bytes = URL_SAFE_NO_PAD.decode(body).map_err(|_| RefError::Format)?;
        let raw = json::check(&bytes, Limits { bytes: MAX_REF_BYTES, depth: 1 }).map_err(|_| RefError::Format)?;
        let members = json::members(raw).map_err(|_| RefError::Format)?;
        let (mut kind, mut url, mut name) = (None, None, None);
        for (key, value) in &members {
            let text = json::string(value).ok_or(RefError::Format)?;
            match key.as_ref() {
                "t" => kind = Some(text.parse()?),
                "u" => url = Some(text),
                "n" => name = Some(text),
                _ => return Err(RefError::Format),
            }
        }
        let (Some(kind), Some(url)) = (kind, url) else { return Err(RefError::Format) };
        let reference = ResourceRef::new(kind, &url, name.as_deref())?;
        if reference.to_string() != s { Err(RefError::Format) } else { Ok(reference) }
    }
}

/// Syntax only. Whether it may be dialled is the dialer's decision.
fn check_url(kind: Kind, url: &str) -> Result<(), RefError> {
    // The parser would drop tabs and line feeds and read `\` as `/`: two readers, two URLs.
    let forbidden = |c: char| c.is_control() || c.is_whitespace() || c == '\\' || is_hidden(c);
    if url.is_empty() || url.len() > MAX_URL_BYTES || url.chars().any(forbidden) {
        return Err(RefError::Url);
    }
    let parsed = Url::parse(url).map_err(|_| RefError::Url)?;
    let scheme_fits = match parsed.scheme() {
        "http" | "https" => true,
        "mcp" => kind == Kind::Mcp,
        _ => false,
    };
    let has_host = parsed.host_str().is_some_and(|host| !host.is_empty());
    // `https:/a` and `https:a` are repaired by the parser; only the plain form is taken.
    let plain = url.get(parsed.scheme().len()..).is_some_and(|rest| rest.starts_with("://"));
    let bare = parsed.username().is_empty() && parsed.password().is_none() && parsed.fragment().is_none();
    if scheme_fits && has_host && plain && bare { Ok(()) } else { Err(RefError::Url) }
}

/// Characters that a reader does not see or that turn the order of what he sees: zero width, direction marks and
/// overrides, isolates, tags, interlinear annotations, soft hyphen, byte order mark.
pub(super) fn is_hidden(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180e}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vectors() -> serde_json::Value {
        serde_json::from_str(include_str!("../../tests/vectors/refs.json")).unwrap()
    }

    #[test]
    fn the_published_references_round_trip() {
        for v in vectors()["valid"].as_array().unwrap() {
            let kind = v["type"].as_str().unwrap().parse().unwrap();
            let reference = ResourceRef::new(kind, v["url"].as_str().unwrap(), v["toolName"].as_str()).unwrap();
            assert_eq!(reference.canonical(), v["canonical"].as_str().unwrap());
            assert_eq!(reference.to_string(), v["ref"].as_str().unwrap());
            assert_eq!(v["ref"].as_str().unwrap().parse(), Ok(reference));
        }
    }

    #[test]
    fn the_published_malformed_references_are_refused() {
        for v in vectors()["malformed"].as_array().unwrap() {
            let text = v.as_str().unwrap();
            assert!(text.parse::<ResourceRef>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_the_canonical_spelling_is_taken() {
        for inner in [
            r#"{"u":"https://a.example/x","t":"http"}"#,
            r#"{"t":"http", "u":"https://a.example/x"}"#,
            r#"{"t":"http","u":"https://a.example/\u0078"}"#,
            r#"{"t":"http","u":"https://a.example/x","x":"1"}"#,
            r#"{"n":null,"t":"http","u":"https://a.example/x"}"#,
            r#"{"n":"tool","t":"http","u":"https://a.example/x"}"#,
            r#"{"n":"","t":"mcp","u":"https://a.example/x"}"#,
        ] {
            let text = format!("v1.{}", URL_SAFE_NO_PAD.encode(inner));
            assert!(text.parse::<ResourceRef>().is_err(), "{inner}");
        }
        // Trailing bits that are not zero spell the same bytes in another way.
        let good = ResourceRef::new(Kind::Http, "https://a.example/xy", None).unwrap().to_string();
        assert!(good.parse::<ResourceRef>().is_ok());
        let last = good.chars().last().unwrap();
        let other = format!("{}{}", &good[..good.len() - 1], char::from(last as u8 + 1));
        assert!(other.parse::<ResourceRef>().is_err());
        assert!("v1.".to_owned().repeat(4000).parse::<ResourceRef>().is_err());
    }

    #[test]
    fn urls_that_two_readers_could_understand_differently_are_refused() {
        let long = format!("https://a.example/{}", "x".repeat(2_048));
        for bad in [
            "",
            "a.example",
            "/x",
            "ftp://a.example/",
            "file:///etc/passwd",
            "javascript:alert(1)",
            "https://",
            "https:/a.example",
            "https:a.example",
            "https://u@a.example/",
            "https://u:p@a.example/",
            "https://a.example/#f",
            "https://a.example/ x",
            "https://a.exa\tmple/",
            "https://a.example\\@b.example/",
            "https://a.example/\u{202e}x",
            "https://a.example/\u{0}",
            "https://a.example:99999/",
            "mcp:tool",
            long.as_str(),
        ] {
            assert_eq!(ResourceRef::new(Kind::Mcp, bad, Some("t")).err(), Some(RefError::Url), "{bad:?}");
        }
        assert_eq!(ResourceRef::new(Kind::Http, "mcp://tool/x", None).err(), Some(RefError::Url));
        for bad in ["", "a\nb", &"x".repeat(257)] {
            assert_eq!(
                ResourceRef::new(Kind::Mcp, "https://a.example", Some(bad)).err(),
                Some(RefError::ToolName),
                "{bad:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn references_round_trip(path in "[a-zA-Z0-9/_{}äß?=&%.~-]{0,60}", name in "[^\\p{Cc}]{1,40}", mcp: bool) {
            let url = format!("https://seller.example/{path}");
            let reference = match mcp {
                true => ResourceRef::new(Kind::Mcp, &url, Some(&name)),
                false => ResourceRef::new(Kind::Http, &url, None),
            }.unwrap();
            prop_assert_eq!(reference.to_string().parse(), Ok(reference));
        }

        #[test]
        fn nothing_that_parses_has_a_second_spelling(text in "v1\\.[A-Za-z0-9_-]{0,80}") {
            if let Ok(reference) = text.parse::<ResourceRef>() {
                prop_assert_eq!(reference.to_string(), text);
            }
        }
    }
}
