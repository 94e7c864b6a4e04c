//! Who may ask from where: the Host and Origin checks against DNS rebinding, and what the client sends and takes.
//!
//! Loopback is always allowed: a rebinding attack has the attacker's name in `Host`, never `localhost`. What a proxy
//! says of itself (`X-Forwarded-Host`) is ignored, because anybody can say it.

use http::HeaderMap;
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, HOST, ORIGIN};
use http::uri::Authority;

use super::bounded;

/// `Err` is a sentence for the client, which names the setting.
pub fn host(headers: &HeaderMap, uri: &http::Uri, allowed: &[String]) -> Result<(), String> {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err("exactly one Host header is needed".into());
    };
    let host = host.to_str().map_err(|_| "the Host header has characters that are not allowed")?;
    // An absolute request target names a host too.
    for host in [Some(host), uri.authority().map(Authority::as_str)].into_iter().flatten() {
        let authority: Option<Authority> = host.parse().ok().filter(|_| !host.contains('@'));
        let fits = |authority: &Authority| {
            loopback(authority.host()) || allowed.iter().any(|entry| host_fits(entry, authority))
        };
        if !authority.as_ref().is_some_and(fits) {
            return Err(format!("Host {:?} is not allowed; http.allowed_hosts lists those that are", bounded(host)));
        }
    }
    Ok(())
}

fn host_fits(entry: &str, authority: &Authority) -> bool {
    if entry == "*" {
        return true;
    }
    let Ok(entry) = entry.parse::<Authority>() else { return false };
    entry.host().eq_ignore_ascii_case(authority.host())
        && (entry.port().is_none() || entry.port_u16() == authority.port_u16())
}

/// Whether an entry of `http.allowed_hosts` can fit any request.
pub fn is_host(entry: &str) -> bool {
    let host = |authority: &Authority| !authority.host().is_empty() && !entry.contains('@');
    entry == "*" || entry.parse().is_ok_and(|authority| host(&authority))
}

/// Whether an entry of `http.allowed_origins` can fit any request.
pub fn is_origin(entry: &str) -> bool {
    matches!(entry, "*" | "null") || split_origin(entry).is_some()
}

/// No `Origin` is no browser.
pub fn origin(headers: &HeaderMap, allowed: &[String]) -> Result<(), String> {
    let mut origins = headers.get_all(ORIGIN).iter();
    let Some(origin) = origins.next() else { return Ok(()) };
    let origin = origin.to_str().ok().filter(|_| origins.next().is_none()).unwrap_or_default();
    let parsed = split_origin(origin);
    let local = parsed.as_ref().is_some_and(|(_, authority)| loopback(authority.host()));
    let listed = allowed.iter().any(|entry| {
        entry == "*"
            || (entry == "null" && origin == "null")
            || parsed.is_some() && split_origin(entry).as_ref().map(key) == parsed.as_ref().map(key)
    });
    if local || listed {
        return Ok(());
    }
    Err(format!("Origin {:?} is not allowed; http.allowed_origins lists those that are", bounded(origin)))
}

/// `http` or `https`, and an authority without credentials or path.
fn split_origin(origin: &str) -> Option<(&str, Authority)> {
    let (scheme, authority) = origin.split_once("://")?;
    let authority: Authority = authority.trim_end_matches('/').parse().ok().filter(|_| !authority.contains('@'))?;
    matches!(scheme, "http" | "https").then_some((scheme, authority))
}

/// What two origins are compared by: a default port is the same as none.
fn key<'a>((scheme, authority): &'a (&'a str, Authority)) -> (&'a str, String, u16) {
    let default = if *scheme == "https" { 443 } else { 80 };
    (scheme, authority.host().to_ascii_lowercase(), authority.port_u16().unwrap_or(default))
}

pub(super) fn loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::Ipv4Addr>().is_ok_and(|ip| ip.is_loopback())
        || host.parse::<std::net::Ipv6Addr>().is_ok_and(|ip| ip.is_loopback())
}

/// What the client takes for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Takes {
    pub json: bool,
    /// Named as such: `*/*` of a simple client does not mean that it reads streams.
    pub stream: bool,
}

/// The specification asks for both types; real clients send one, `*/*` or nothing.
pub fn accept(headers: &HeaderMap) -> Takes {
    if !headers.contains_key(ACCEPT) {
        return Takes { json: true, stream: false };
    }
    let mut takes = Takes { json: false, stream: false };
    for value in headers.get_all(ACCEPT) {
        for range in value.to_str().unwrap_or_default().split(',') {
            match range.split(';').next().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
                "application/json" | "application/*" | "*/*" => takes.json = true,
                "text/event-stream" | "text/*" => takes.stream = true,
                _ => {}
            }
        }
    }
    takes
}

/// JSON, or nothing said.
pub fn is_json(headers: &HeaderMap) -> bool {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let Some(value) = types.next() else { return true };
    let value = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    types.next().is_none()
        && (value == "application/json" || (value.starts_with("application/") && value.ends_with("+json")))
}

/// A body that is as it says: nothing is unpacked here, because a small body could become a large one.
pub fn is_plain(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(name: http::HeaderName, values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(&name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn hosts_are_loopback_or_listed() {
        let allowed = ["mcp.example.com".to_owned(), "pinned.example.com:8443".to_owned()];
        let verdict = |hosts: &[&str], uri: &str| host(&map(HOST, hosts), &uri.parse().unwrap(), &allowed);
        for fine in [
            "localhost",
            "localhost:4522",
            "LOCALHOST:1",
            "127.0.0.1:8080",
            "127.8.9.10",
            "[::1]:4522",
            "mcp.example.com",
            "MCP.example.com:9",
            "pinned.example.com:8443",
        ] {
            assert_eq!(verdict(&[fine], "/mcp"), Ok(()), "{fine}");
        }
        for bad in [
            &["evil.example"][..],
            &["mcp.example.com.evil.example"],
            &["localhost.evil.example"],
            &["127.0.0.1.evil.example"],
            &["pinned.example.com"],
            &["pinned.example.com:443"],
            &["localhost@evil.example"],
            &["evil.example@localhost"],
            &["0.0.0.0"],
            &["10.0.0.1"],
            &[""],
            &[],
            &["localhost", "evil.example"],
        ] {
            assert!(verdict(bad, "/mcp").is_err(), "{bad:?}");
        }
        assert!(verdict(&["evil.example"], "/mcp").unwrap_err().contains("http.allowed_hosts"));
        assert!(verdict(&["localhost"], "http://evil.example/mcp").is_err(), "an absolute target");
        assert_eq!(host(&map(HOST, &["evil.example"]), &"/".parse().unwrap(), &["*".into()]), Ok(()));
        let mut forwarded = map(HOST, &["evil.example"]);
        forwarded.insert("x-forwarded-host", "localhost".parse().unwrap());
        assert!(host(&forwarded, &"/".parse().unwrap(), &allowed).is_err());
    }

    #[test]
    fn origins_are_absent_loopback_or_listed() {
        let allowed = ["https://app.example.com".to_owned(), "http://dev.example.com:3000".to_owned()];
        let verdict = |origins: &[&str]| origin(&map(ORIGIN, origins), &allowed);
        for fine in [
            &[][..],
            &["http://localhost:6274"],
            &["https://127.0.0.1"],
            &["http://[::1]:1"],
            &["https://app.example.com"],
            &["https://APP.example.com:443"],
            &["http://dev.example.com:3000"],
        ] {
            assert_eq!(verdict(fine), Ok(()), "{fine:?}");
        }
        for bad in [
            &["null"][..],
            &["https://evil.example"],
            &["http://app.example.com"],
            &["https://app.example.com:8443"],
            &["https://app.example.com.evil.example"],
            &["http://dev.example.com"],
            &["http://localhost.evil.example"],
            &["chrome-extension://localhost"],
            &["localhost"],
            &[""],
            &["http://localhost", "https://evil.example"],
        ] {
            assert!(verdict(bad).is_err(), "{bad:?}");
        }
        assert!(verdict(&["https://evil.example"]).unwrap_err().contains("http.allowed_origins"));
    }

    #[test]
    fn takes_what_real_clients_send() {
        let takes = |values: &[&str]| {
            let takes = accept(&map(ACCEPT, values));
            (takes.json, takes.stream)
        };
        assert_eq!(takes(&[]), (true, false));
        assert_eq!(takes(&["*/*"]), (true, false));
        assert_eq!(takes(&["application/json, text/event-stream"]), (true, true));
        assert_eq!(takes(&["application/json", "text/event-stream;q=0.5"]), (true, true));
        assert_eq!(takes(&["text/event-stream"]), (false, true));
        assert_eq!(takes(&["text/html"]), (false, false));
        let json = |values: &[&str]| is_json(&map(CONTENT_TYPE, values));
        assert!(json(&[]) && json(&["application/json"]) && json(&["Application/JSON; charset=utf-8"]));
        assert!(!json(&["text/plain"]) && !json(&["application/x-www-form-urlencoded"]));
        assert!(!json(&["application/json", "text/plain"]));
        let plain = |values: &[&str]| is_plain(&map(CONTENT_ENCODING, values));
        assert!(plain(&[]) && plain(&["identity"]) && plain(&["Identity"]));
        assert!(!plain(&["gzip"]) && !plain(&["identity", "gzip"]) && !plain(&["identity, br"]) && !plain(&[""]));
    }
}
