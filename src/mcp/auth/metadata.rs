//! What a client without a token is told: where the metadata of this protected resource is (RFC 9728, as the MCP
//! authorization specification asks), and there, who issues tokens for it.

use http::header::HOST;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue};

use crate::json;
use crate::mcp::access;

pub const WELL_KNOWN: &str = "/.well-known/oauth-protected-resource";

/// What is configured; all of it may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resource {
    /// `https://tollway.example.com`: what clients reach this server at. `None`: the request's `Host` says, with https
    /// but for loopback.
    pub public_url: Option<String>,
    /// Issuers that a client may get its token from. Static keys and service accounts have none.
    pub authorization_servers: Vec<String>,
    pub scopes: Vec<String>,
}

impl Resource {
    /// `WWW-Authenticate` (RFC 6750 section 3, RFC 9728 section 5.1).
    pub fn challenge(&self, headers: &HeaderMap, token_given: bool) -> HeaderValue {
        let mut challenge = "Bearer".to_owned();
        let mut separator = " ";
        let mut add = |name: &str, value: &str| {
            challenge += &format!("{separator}{name}=\"{value}\"");
            separator = ", ";
        };
        if let Some(base) = self.base(headers) {
            add("resource_metadata", &format!("{base}{WELL_KNOWN}/mcp"));
        }
        if token_given {
            add("error", "invalid_token");
        }
        if !self.scopes.is_empty() {
            add("scope", &self.scopes.join(" "));
        }
        HeaderValue::from_str(&challenge).unwrap_or(HeaderValue::from_static("Bearer"))
    }

    /// The document, which is the same at both places: the one resource that is protected here is `/mcp`. `None` without
    /// a name that this server has.
    pub fn document(&self, headers: &HeaderMap) -> Option<String> {
        #[derive(serde::Serialize)]
        struct Document<'a> {
            resource: String,
            #[serde(skip_serializing_if = "<[String]>::is_empty")]
            authorization_servers: &'a [String],
            #[serde(skip_serializing_if = "<[String]>::is_empty")]
            scopes_supported: &'a [String],
            bearer_methods_supported: [&'static str; 1],
            resource_name: &'static str,
        }
        let document = Document {
            resource: format!("{}/mcp", self.base(headers)?),
            authorization_servers: &self.authorization_servers,
            scopes_supported: &self.scopes,
            bearer_methods_supported: ["header"],
            resource_name: "Tollway",
        };
        Some(json::raw(&document).get().to_owned())
    }

    fn base(&self, headers: &HeaderMap) -> Option<String> {
        if let Some(url) = &self.public_url {
            return Some(url.clone());
        }
        let host: Authority = headers.get(HOST)?.to_str().ok()?.parse().ok()?;
        let scheme = if access::loopback(host.host()) { "http" } else { "https" };
        Some(format!("{scheme}://{host}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(host: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))])
    }

    #[test]
    fn the_challenge_names_the_document_and_what_was_wrong() {
        let bare = Resource::default();
        let at = |headers: &HeaderMap, given| bare.challenge(headers, given).to_str().unwrap().to_owned();
        let local = "Bearer resource_metadata=\"http://localhost:4522/.well-known/oauth-protected-resource/mcp\"";
        assert_eq!(at(&host("localhost:4522"), false), local);
        assert_eq!(at(&host("localhost:4522"), true), format!("{local}, error=\"invalid_token\""));
        assert!(at(&host("t.example"), false).contains("\"https://t.example/.well-known/"));
        assert_eq!(at(&HeaderMap::new(), true), "Bearer error=\"invalid_token\"");
        let full = Resource {
            public_url: Some("https://t.example".into()),
            authorization_servers: vec!["https://issuer.example".into()],
            scopes: vec!["pay".into(), "search".into()],
        };
        let said = full.challenge(&host("localhost"), false);
        assert!(
            said.to_str()
                .unwrap()
                .ends_with("t.example/.well-known/oauth-protected-resource/mcp\", scope=\"pay search\"")
        );
        let document: serde_json::Value = serde_json::from_str(&full.document(&host("localhost")).unwrap()).unwrap();
        assert_eq!(document["resource"], "https://t.example/mcp");
        assert_eq!(document["authorization_servers"], serde_json::json!(["https://issuer.example"]));
        assert_eq!(document["scopes_supported"], serde_json::json!(["pay", "search"]));
        let document: serde_json::Value = serde_json::from_str(&bare.document(&host("localhost")).unwrap()).unwrap();
        let none = serde_json::json!({
            "resource": "http://localhost/mcp", "bearer_methods_supported": ["header"], "resource_name": "Tollway",
        });
        assert_eq!(document, none);
    }
}
