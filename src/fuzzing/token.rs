//! Bearer tokens: whatever a stranger sends is judged before anybody looks for a key, and without a signature nobody is
//! known. The first line is a token's header, what follows its claims; the whole is a token too.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::FutureExt as _;
use serde_json::Value;

use crate::http::{Client, Destination, Limits, Tls};
use crate::mcp::auth::{Jwt, JwtSettings, Method as _, Verdict, looks_like_a_jwt};
use crate::money::AgentId;
use crate::ports::{Clock, machine};

const NOW: u64 = 1_700_000_000;
const LEEWAY: u64 = 30;

struct Still;
impl Clock for Still {
    fn unix_ms(&self) -> u64 {
        NOW * 1000
    }
}

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    judge(text);
    let Some((header, claims)) = text.split_once('\n') else { return };
    let token = format!("{}.{}.AAAA", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
    if judge(&token) {
        good(header, claims);
        assert!(looks_like_a_jwt(&token));
    }
}

/// Whether all of it is right but for the signature, of which there is no key here.
fn judge(token: &str) -> bool {
    let settings = JwtSettings {
        issuer: "i".into(),
        audiences: vec!["a".into(), "b".into()],
        jwks_url: "http://127.0.0.1:1/".parse().unwrap(),
        algorithms: vec!["RS256".into(), "EdDSA".into()],
        leeway: Duration::from_secs(LEEWAY),
        typ: None,
        identity_claim: "sub".into(),
        agent_prefix: "jwt:".into(),
        session_claim: "session".into(),
        limits_claim: "limits".into(),
    };
    let mut world = machine::world().0;
    world.clock = Arc::new(Still);
    let client = Client::new(world.clone(), Tls::Plain, Destination::Operator, Limits::default());
    let jwt = Jwt::new(settings, client, world);
    match jwt.identify(token, false).now_or_never() {
        Some(Verdict::WouldAsk) => true,
        Some(Verdict::NotMine | Verdict::Refused(_)) => false,
        other => panic!("a token without a key is {other:?}"),
    }
}

/// What another reader sees in a token that would be believed with a signature.
fn good(header: &str, claims: &str) {
    let header: Value = serde_json::from_str(header).unwrap();
    let claims: Value = serde_json::from_str(claims).unwrap();
    assert!(matches!(header["alg"].as_str(), Some("RS256" | "EdDSA" | "Ed25519")), "{header}");
    assert!(header.get("crit").is_none(), "{header}");
    assert_eq!(claims["iss"], "i");
    let audience = |one: &Value| one == "a" || one == "b";
    let audiences = claims["aud"].as_array();
    assert!(audiences.map_or(audience(&claims["aud"]), |all| all.iter().any(audience)), "{claims}");
    let expires = claims["exp"].as_f64().unwrap();
    assert!(expires + LEEWAY as f64 > NOW as f64 && expires < 1e12, "{claims}");
    for name in ["nbf", "iat"] {
        let from = claims.get(name).map_or(0.0, |from| from.as_f64().unwrap());
        assert!(from <= (NOW + LEEWAY) as f64 + 0.001, "{claims}");
    }
    let name = claims["sub"].as_str().unwrap();
    assert!(name.parse::<AgentId>().is_ok() && name != "*" && name != "total", "{claims}");
    assert!(claims.get("session").is_none_or(|session| session.as_str().is_some_and(|s| !s.is_empty())), "{claims}");
    for limit in claims.get("limits").map(|limits| limits.as_array().unwrap().as_slice()).unwrap_or_default() {
        for figure in ["per_call_max_atomic", "session_max_atomic", "day_max_atomic"] {
            let digits =
                limit.get(figure).is_none_or(|figure| figure.as_str().unwrap().bytes().all(|b| b.is_ascii_digit()));
            assert!(digits, "{claims}");
        }
    }
}
