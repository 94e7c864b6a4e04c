//! JSON web tokens (RFC 7519) of one issuer, signed with a public-key algorithm (RFC 8725 says what goes wrong).
//!
//! Refused whatever the configuration says: no signature at all, a shared secret, a key that the token brings along, an
//! extension that must be understood, no end of validity. A claim that is there and cannot be read refuses the token:
//! it may have been meant to lower something.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::future::BoxFuture;
use jsonwebtoken::Algorithm;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use url::Url;

use super::jwks::{Found, Jwks};
use super::{Identity, Method, Verdict};
use crate::http::Client;
use crate::json;
use crate::mcp::Claims;
use crate::money::{AgentId, Amount, Bounds, Unit};
use crate::ports::World;

const PART: json::Limits = json::Limits { bytes: super::MAX_TOKEN_BYTES, depth: 16 };
/// Of the claim that names the session.
const MAX_SESSION_BYTES: usize = 256;
const MAX_LIMITS: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtSettings {
    /// `iss`, compared as text.
    pub issuer: String,
    /// One of them must be in `aud`.
    pub audiences: Vec<String>,
    pub jwks_url: Url,
    pub algorithms: Vec<String>,
    /// What the two clocks may differ by.
    pub leeway: Duration,
    /// The header's `typ`; `None`: absent, `JWT` or `at+jwt`.
    pub typ: Option<String>,
    pub identity_claim: String,
    /// Before the claim's value: so no token has the name of a key or of a service account.
    pub agent_prefix: String,
    pub session_claim: String,
    pub limits_claim: String,
}

/// Those that a public key verifies. There is no name here for a shared secret's, and none for `none`.
pub fn algorithm(name: &str) -> Option<Algorithm> {
    Some(match name {
        "RS256" => Algorithm::RS256,
        "RS384" => Algorithm::RS384,
        "RS512" => Algorithm::RS512,
        "PS256" => Algorithm::PS256,
        "PS384" => Algorithm::PS384,
        "PS512" => Algorithm::PS512,
        "ES256" => Algorithm::ES256,
        "ES384" => Algorithm::ES384,
        // RFC 9864 gives the one curve that is in use a name of its own.
        "EdDSA" | "Ed25519" => Algorithm::EdDSA,
        _ => return None,
    })
}

pub struct Jwt {
    settings: JwtSettings,
    algorithms: Vec<Algorithm>,
    keys: Arc<Jwks>,
    world: World,
}

impl Jwt {
    pub fn new(settings: JwtSettings, client: Client, world: World) -> Jwt {
        let algorithms = settings.algorithms.iter().filter_map(|name| algorithm(name)).collect();
        let keys = Arc::new(Jwks::new(settings.jwks_url.clone(), client, world.clone()));
        Jwt { settings, algorithms, keys, world }
    }

    /// Fetches the keys before the first token comes, so that the log says early what is wrong with them.
    pub fn prepare(&self) {
        self.keys.fetch();
    }

    /// How many usable keys the issuer has at this moment.
    pub async fn probe(&self) -> Result<usize, String> {
        self.keys.count().await
    }

    async fn verdict(&self, token: &str, may_ask: bool) -> Verdict {
        let Some(parts) = Parts::of(token) else { return Verdict::NotMine };
        let Ok(claims) = json::check(&parts.claims, PART) else { return Verdict::NotMine };
        let issuer = json::member(claims, "iss").and_then(json::string);
        if issuer.as_deref() != Some(&self.settings.issuer) {
            return Verdict::NotMine;
        }
        let read = self.header(&parts).and_then(|header| Ok((header, self.claims(claims)?)));
        let ((algorithm, id), identity) = match read {
            Ok(read) => read,
            Err(reason) => return Verdict::Refused(reason),
        };
        let keys = match self.keys.find(id.as_deref(), algorithm, may_ask).await {
            Found::Keys(keys) => keys,
            Found::Unknown => return Verdict::Refused("its issuer has no key of that kid and algorithm"),
            Found::Unavailable => return Verdict::Unavailable,
            Found::WouldAsk => return Verdict::WouldAsk,
        };
        let verifies = |key: &Arc<jsonwebtoken::DecodingKey>| {
            jsonwebtoken::crypto::verify(parts.signature, parts.signed.as_bytes(), key, algorithm).unwrap_or(false)
        };
        if keys.iter().any(verifies) {
            Verdict::Known(identity)
        } else {
            Verdict::Refused("its signature does not verify")
        }
    }

    /// The algorithm and the key's name.
    fn header(&self, parts: &Parts<'_>) -> Result<(Algorithm, Option<String>), &'static str> {
        let header = json::check(&parts.header, PART).map_err(|_| "its header is no JSON object")?;
        let text = |name: &str, problem| match json::member(header, name) {
            None => Ok(None),
            Some(value) => json::string(value).map(|text| Some(text.into_owned())).ok_or(problem),
        };
        // RFC 7515 section 4.1.11: what is listed there changes what the token means.
        if json::member(header, "crit").is_some() || json::member(header, "b64").is_some() {
            return Err("it has an extension that must be understood (crit)");
        }
        let typ = text("typ", "its typ is no string")?;
        // RFC 7515 section 4.1.9: "application/" may be left out.
        let typ = typ.as_deref().map(|typ| typ.to_ascii_lowercase());
        let typ = typ.as_deref().map(|typ| typ.strip_prefix("application/").unwrap_or(typ));
        let fits = match (&self.settings.typ, typ) {
            (None, typ) => matches!(typ, None | Some("jwt" | "at+jwt")),
            (Some(wanted), typ) => typ.is_some_and(|typ| typ.eq_ignore_ascii_case(wanted)),
        };
        if !fits {
            return Err("its typ is of another kind of token");
        }
        let algorithm = text("alg", "its alg is no string")?.as_deref().and_then(algorithm);
        let algorithm = algorithm.filter(|algorithm| self.algorithms.contains(algorithm));
        Ok((algorithm.ok_or("its algorithm is not allowed")?, text("kid", "its kid is no string")?))
    }

    /// All but the signature.
    fn claims(&self, claims: &RawValue) -> Result<Identity, &'static str> {
        let (now, leeway) = (self.world.unix_ms(), self.settings.leeway.as_millis());
        let leeway = u64::try_from(leeway).unwrap_or(u64::MAX);
        let time = |name: &str, problem| json::member(claims, name).map(|raw| date(raw).ok_or(problem)).transpose();
        let expires = time("exp", "its exp is no time")?.ok_or("it never expires (no exp)")?;
        if now >= expires.saturating_add(leeway) {
            return Err("it has expired");
        }
        if time("nbf", "its nbf is no time")?.is_some_and(|from| from > now.saturating_add(leeway)) {
            return Err("it is not valid yet");
        }
        if time("iat", "its iat is no time")?.is_some_and(|made| made > now.saturating_add(leeway)) {
            return Err("it was issued in the future");
        }
        let audience = json::member(claims, "aud").ok_or("it has no audience")?;
        let audiences = json::elements(audience).unwrap_or_else(|| vec![audience]);
        let audiences: Option<Vec<_>> = audiences.into_iter().map(json::string).collect();
        let audiences = audiences.ok_or("its aud is neither a string nor a list of them")?;
        if !audiences.iter().any(|one| self.settings.audiences.iter().any(|ours| ours == one)) {
            return Err("it is for another audience");
        }
        let name = json::member(claims, &self.settings.identity_claim).and_then(json::string);
        let name = name.ok_or("the claim that names its agent is absent, or no string")?;
        // The claim's own value must be a name too: `*` does not become one by what stands before it.
        let unfit = |_| "the claim that names its agent is no name (1-128 printable ASCII characters, not * or total)";
        name.parse::<AgentId>().map_err(unfit)?;
        let agent = format!("{}{name}", self.settings.agent_prefix).parse::<AgentId>().map_err(unfit)?;
        let session = json::member(claims, &self.settings.session_claim).map(|raw| self.session(raw)).transpose()?;
        let bounds = json::member(claims, &self.settings.limits_claim).map(bounds).transpose()?.unwrap_or_default();
        Ok(Identity { agent: Some(agent), claims: Claims { session, bounds } })
    }

    /// What stands for it in the ledger: of one length, and without what the issuer may have put in.
    fn session(&self, raw: &RawValue) -> Result<String, &'static str> {
        let text = json::string(raw).filter(|text| (1..=MAX_SESSION_BYTES).contains(&text.len()));
        let text = text.ok_or("its session claim is no string of 1-256 bytes")?;
        let name = Sha256::digest(json::raw(&("token-session", &self.settings.issuer, text)).get());
        Ok(format!("claim-{}", hex::encode(&name[..12])))
    }
}

impl Method for Jwt {
    fn name(&self) -> &'static str {
        "jwt"
    }

    fn identify<'a>(&'a self, token: &'a str, may_ask: bool) -> BoxFuture<'a, Verdict> {
        Box::pin(self.verdict(token, may_ask))
    }
}

/// A token in its compact form (RFC 7515 section 3.1), decoded and not yet believed.
struct Parts<'a> {
    header: Vec<u8>,
    claims: Vec<u8>,
    signed: &'a str,
    signature: &'a str,
}

impl Parts<'_> {
    fn of(token: &str) -> Option<Parts<'_>> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).ok().filter(|bytes| !bytes.is_empty());
        Some(Parts { header: decode(header)?, claims: decode(claims)?, signed, signature })
    }
}

/// Whether `token` has the form of one, whoever issued it.
pub fn looks_like_a_jwt(token: &str) -> bool {
    Parts::of(token)
        .is_some_and(|parts| [parts.header, parts.claims].iter().all(|part| part.trim_ascii_start().starts_with(b"{")))
}

/// A NumericDate (RFC 7519 section 2), which may have a fraction, as unix milliseconds.
fn date(raw: &RawValue) -> Option<u64> {
    let seconds: f64 = serde_json::from_str(raw.get()).ok()?;
    // To the year 9999: beyond it is another unit.
    (0.0..=253_402_300_799.0).contains(&seconds).then_some((seconds * 1000.0) as u64)
}

/// A list of what one `budget.limits` entry says: unit, and at least one figure in atomic units.
fn bounds(raw: &RawValue) -> Result<BTreeMap<Unit, Bounds>, &'static str> {
    let entries = json::elements(raw).filter(|entries| (1..=MAX_LIMITS).contains(&entries.len()));
    let entries = entries.ok_or("its claim of limits is no list of 1-64 entries")?;
    let mut all: BTreeMap<Unit, Bounds> = BTreeMap::new();
    for entry in entries {
        let (unit, bounds) = bound(entry).ok_or(
            "its claim of limits has an entry with other members than network, asset, per_call_max_atomic, \
             session_max_atomic and day_max_atomic, or without one of the figures",
        )?;
        let sum = all.entry(unit).or_default();
        *sum = sum.and(bounds);
    }
    Ok(all)
}

fn bound(entry: &RawValue) -> Option<(Unit, Bounds)> {
    let (mut network, mut asset, mut bounds) = (None, None, Bounds::default());
    for (name, value) in json::members(entry).ok()? {
        let text = json::string(value)?;
        let amount = || text.parse::<Amount>().ok();
        match name.as_ref() {
            "network" => network = Some(text.parse().ok()?),
            "asset" => asset = Some(text.parse().ok()?),
            "per_call_max_atomic" => bounds.per_call = Some(amount()?),
            "session_max_atomic" => bounds.per_session = Some(amount()?),
            "day_max_atomic" => bounds.per_day = Some(amount()?),
            _ => return None,
        }
    }
    let unit = Unit { network: network?, asset: asset? };
    (bounds != Bounds::default()).then_some((unit, bounds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn limits_are_read_whole_or_refused() {
        let entry = |more: &str| raw(&format!(r#"[{{"network":"stellar:testnet","asset":"CA",{more}}}]"#));
        let read = bounds(&entry(r#""per_call_max_atomic":"7","day_max_atomic":"0""#)).unwrap();
        let figures = Bounds { per_call: Some(Amount::from_u64(7)), per_session: None, per_day: Some(Amount::ZERO) };
        assert_eq!(read.into_values().collect::<Vec<_>>(), [figures]);
        let twice = r#"[{"network":"stellar:testnet","asset":"CA","day_max_atomic":"9"},
            {"network":"stellar:testnet","asset":"CA","day_max_atomic":"5","session_max_atomic":"8"}]"#;
        let smallest = bounds(&raw(twice)).unwrap().into_values().next().unwrap();
        assert_eq!((smallest.per_day, smallest.per_session), (Some(Amount::from_u64(5)), Some(Amount::from_u64(8))));
        for bad in [
            entry(r#""per_call_max_atomic":7"#),
            entry(r#""per_call_max_atomic":"-7""#),
            entry(r#""per_call_max_atomic":"7.0""#),
            entry(r#""per_call":"7""#),
            entry(r#""day_max_atomic":"7","suspended":true"#),
            entry(r#""day_max_atomic":null"#),
            raw(r#"[{"network":"stellar:testnet","asset":"CA"}]"#),
            raw(r#"[{"network":"*","asset":"CA","day_max_atomic":"7"}]"#),
            raw(r#"[{"asset":"CA","day_max_atomic":"7"}]"#),
            raw("[]"),
            raw("{}"),
            raw("null"),
        ] {
            assert!(bounds(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn dates_are_seconds() {
        assert_eq!(date(&raw("1700000000")), Some(1_700_000_000_000));
        assert_eq!(date(&raw("1700000000.5")), Some(1_700_000_000_500));
        for bad in ["-1", "1e300", "1700000000000", "\"1700000000\"", "null", "true"] {
            assert_eq!(date(&raw(bad)), None, "{bad}");
        }
    }
}
