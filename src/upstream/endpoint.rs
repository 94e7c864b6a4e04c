//! Which URL of a catalog item or a challenge can be an endpoint.

use std::collections::BTreeMap;
use std::net::IpAddr;

use url::{Host, Url};

use crate::catalog::is_template;
use crate::http::{Destination, address_allowed};

const MAX_URL_BYTES: usize = 2048;

/// The address to dial for `text`; the error's word names the rule that refuses it.
pub(super) fn resolve(
    text: &str,
    mapped: &BTreeMap<String, Url>,
    destination: Destination,
) -> Result<Url, &'static str> {
    if text.len() > MAX_URL_BYTES || text.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\') {
        return Err("url");
    }
    if text.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("mcp://")) {
        return check(mapped.get(text).ok_or("mcp_symbolic")?.clone(), destination);
    }
    // Nobody pays on a placeholder: what would be called is not what is listed.
    if is_template(text) {
        return Err("url_template");
    }
    check(Url::parse(text).map_err(|_| "url")?, destination)
}

fn check(url: Url, destination: Destination) -> Result<Url, &'static str> {
    match url.scheme() {
        "https" => {}
        "http" if destination != Destination::Agent => {}
        "http" => return Err("not_https"),
        _ => return Err("scheme"),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("url_credentials");
    }
    if url.fragment().is_some() {
        return Err("url_fragment");
    }
    let ip = match url.host().ok_or("url")? {
        Host::Ipv4(ip) => Some(IpAddr::V4(ip)),
        Host::Ipv6(ip) => Some(IpAddr::V6(ip)),
        Host::Domain(name) => {
            let name = name.trim_end_matches('.');
            if destination == Destination::Agent && (name == "localhost" || name.ends_with(".localhost")) {
                return Err("address_loopback");
            }
            None
        }
    };
    ip.map_or(Ok(()), |ip| address_allowed(destination, ip))?;
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unusable_endpoint_is_refused_with_its_rule() {
        let mapped = BTreeMap::from([
            ("mcp://tool/x".to_owned(), Url::parse("https://seller.example/mcp").unwrap()),
            ("mcp://tool/bad".to_owned(), Url::parse("https://10.0.0.1/mcp").unwrap()),
        ]);
        for (text, rule) in [
            ("http://seller.example/mcp", "not_https"),
            ("ftp://seller.example/mcp", "scheme"),
            ("file:///etc/passwd", "scheme"),
            ("seller.example/mcp", "url"),
            ("https://user@seller.example/mcp", "url_credentials"),
            ("https://:secret@seller.example/mcp", "url_credentials"),
            ("https://seller.example/mcp#part", "url_fragment"),
            ("https://seller.example/mcp#", "url_fragment"),
            ("https://seller.example/{city}/mcp", "url_template"),
            ("https://seller.example/%7Bcity%7D", "url_template"),
            ("https://seller.example/v1/item/:id", "url_template"),
            ("https://seller.example/%3Cid%3E/mcp", "url_template"),
            ("https://seller.example/[id]/mcp", "url_template"),
            ("https://seller.example/*", "url_template"),
            ("mcp://tool/y", "mcp_symbolic"),
            ("MCP://tool/x", "mcp_symbolic"),
            ("mcp://tool/bad", "address_private"),
            ("https://localhost/mcp", "address_loopback"),
            ("https://LOCALHOST./mcp", "address_loopback"),
            ("https://a.localhost/mcp", "address_loopback"),
            ("https://seller.example\\@10.0.0.1/", "url"),
            ("https://seller.example /mcp", "url"),
            ("https://seller.exa\nmple/mcp", "url"),
            ("https://2130706433/", "address_loopback"),
            ("https://[fe80::1%25eth0]/", "url"),
        ] {
            assert_eq!(resolve(text, &mapped, Destination::Agent), Err(rule), "{text}");
        }
        assert_eq!(
            resolve("mcp://tool/x", &mapped, Destination::Agent).unwrap().as_str(),
            "https://seller.example/mcp"
        );
        let long = format!("https://seller.example/{}", "x".repeat(2048));
        assert_eq!(resolve(&long, &mapped, Destination::Agent), Err("url"));
        assert!(resolve("http://127.0.0.1:9/mcp", &mapped, Destination::AgentLocal).is_ok());
        assert_eq!(resolve("http://169.254.169.254/", &mapped, Destination::AgentLocal), Err("address_link_local"));
    }
}
