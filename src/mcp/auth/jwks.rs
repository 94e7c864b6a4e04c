//! The public keys of a token issuer (RFC 7517), fetched from the URL that the operator wrote. A key that is not there
//! is looked for again, at most once in ten seconds; when the issuer cannot be reached, the last good set stays.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::header::ACCEPT;
use jsonwebtoken::{Algorithm, DecodingKey};
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use url::Url;

use super::jwt::algorithm;
use crate::http::{Client, Limits};
use crate::json;
use crate::ports::World;

const FETCH: Limits = Limits { timeout: Duration::from_secs(5), max_response_bytes: 256 << 10 };
const MAX_KEYS: usize = 100;
const MAX_DEPTH: usize = 8;
/// That one signature is tried with, of those that a token's header fits.
const MAX_TRIES: usize = 8;
/// A set older than this is fetched again while it is still in use: a key that was taken out is refused from then on.
const MAX_AGE: Duration = Duration::from_secs(300);
/// Between two fetches that unknown keys ask for: everybody can make up a key's name.
const PAUSE: Duration = Duration::from_secs(10);
/// After the first failure; twice as long after each further one.
const BACK_OFF: Duration = Duration::from_secs(1);
const MAX_BACK_OFF: Duration = Duration::from_secs(60);

/// What a look for a key gave.
pub(super) enum Found {
    /// All that can have signed it: several may have one name, and a token without one may be of any.
    Keys(Vec<Arc<DecodingKey>>),
    /// The issuer has no such key.
    Unknown,
    /// The issuer did not answer when it was asked last.
    Unavailable,
    /// It would have to be asked.
    WouldAsk,
}

pub(super) struct Jwks {
    url: Url,
    client: Client,
    world: World,
    state: Mutex<State>,
    /// Told of the end of every fetch.
    fetches: watch::Sender<()>,
}

struct State {
    keys: Arc<KeySet>,
    /// Of the last good set.
    since: Option<Instant>,
    /// In a row, up to now.
    failures: u32,
    /// No fetch before.
    next: Instant,
    fetching: bool,
}

impl Jwks {
    pub fn new(url: Url, client: Client, world: World) -> Jwks {
        let keys = Arc::default();
        let state = State { keys, since: None, failures: 0, next: Instant::now(), fetching: false };
        Jwks { url, client, world, state: Mutex::new(state), fetches: watch::Sender::new(()) }
    }

    pub async fn find(self: &Arc<Self>, id: Option<&str>, algorithm: Algorithm, may_ask: bool) -> Found {
        let (found, stale) = self.look(id, algorithm);
        if let Found::Keys(_) = found {
            if stale {
                self.fetch();
            }
            return found;
        }
        if !may_ask {
            return Found::WouldAsk;
        }
        let Some(mut end) = self.fetch() else { return self.look(id, algorithm).0 };
        let _ = timeout(FETCH.timeout, end.changed()).await;
        self.look(id, algorithm).0
    }

    fn look(&self, id: Option<&str>, algorithm: Algorithm) -> (Found, bool) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let keys = state.keys.fitting(id, algorithm);
        let found = match state.since {
            _ if !keys.is_empty() => Found::Keys(keys),
            Some(_) if state.failures == 0 => Found::Unknown,
            _ => Found::Unavailable,
        };
        (found, state.since.is_some_and(|since| since.elapsed() > MAX_AGE))
    }

    /// Starts one, unless one is under way. `None`: it is too soon. The receiver hears of its end.
    pub fn fetch(self: &Arc<Self>) -> Option<watch::Receiver<()>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let end = self.fetches.subscribe();
        if state.fetching {
            return Some(end);
        }
        if Instant::now() < state.next {
            return None;
        }
        state.fetching = true;
        drop(state);
        let this = self.clone();
        self.world.spawn.spawn(Box::pin(async move {
            let fetched = this.get().await;
            this.done(fetched);
        }));
        Some(end)
    }

    /// How many usable keys the issuer has at this moment.
    pub async fn count(&self) -> Result<usize, String> {
        Ok(self.get().await?.0.len())
    }

    async fn get(&self) -> Result<KeySet, String> {
        let request = http::Request::get(self.url.as_str()).header(ACCEPT, "application/json").body(Bytes::new());
        let request = request.map_err(|_| "its URL cannot be asked".to_owned())?;
        let answer = self.client.send_within(request, FETCH).await.map_err(|error| error.to_string())?;
        if answer.status() != http::StatusCode::OK {
            return Err(format!("it answers {}", answer.status().as_u16()));
        }
        KeySet::parse(answer.body()).map_err(str::to_owned)
    }

    fn done(&self, fetched: Result<KeySet, String>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        state.fetching = false;
        match fetched {
            Ok(keys) => {
                if state.failures > 0 {
                    tracing::info!(url = %self.url, keys = keys.0.len(), "the token issuer's keys can be fetched again");
                }
                state.keys = Arc::new(keys);
                state.since = Some(now);
                state.failures = 0;
                state.next = now + PAUSE;
            }
            Err(problem) => {
                let pause = BACK_OFF.saturating_mul(1 << state.failures.min(6)).min(MAX_BACK_OFF);
                state.failures = state.failures.saturating_add(1);
                state.next = now + pause;
                let (failures, kept) = (state.failures, state.keys.0.len());
                tracing::warn!(url = %self.url, problem, failures, kept, "the token issuer's keys could not be fetched");
            }
        }
        drop(state);
        self.fetches.send_replace(());
    }
}

/// The keys of a set that can verify a signature. Others (for encryption, of an unknown type, too short, symmetric) are
/// left out, as RFC 7517 section 5 asks.
#[derive(Default)]
struct KeySet(Vec<Key>);

struct Key {
    id: Option<String>,
    algorithms: Vec<Algorithm>,
    key: Arc<DecodingKey>,
}

impl KeySet {
    fn parse(body: &[u8]) -> Result<KeySet, &'static str> {
        let limits = json::Limits { bytes: FETCH.max_response_bytes, depth: MAX_DEPTH };
        let set = json::check(body, limits).map_err(|_| "its answer is no JSON, or too deep")?;
        let keys = json::member(set, "keys").and_then(json::elements).ok_or("its answer has no list of keys")?;
        if keys.len() > MAX_KEYS {
            return Err("it has more than 100 keys");
        }
        let keys: Vec<Key> = keys.into_iter().filter_map(Key::parse).collect();
        // A set in which nothing can be used is a broken one: that all keys were taken back is said by none at all.
        if keys.is_empty() { Err("it has no key that can verify a signature") } else { Ok(KeySet(keys)) }
    }

    fn fitting(&self, id: Option<&str>, algorithm: Algorithm) -> Vec<Arc<DecodingKey>> {
        let fits = |key: &&Key| key.algorithms.contains(&algorithm) && (id.is_none() || key.id.as_deref() == id);
        self.0.iter().filter(fits).take(MAX_TRIES).map(|key| key.key.clone()).collect()
    }
}

impl Key {
    fn parse(jwk: &RawValue) -> Option<Key> {
        let text = |name: &str| json::member(jwk, name).and_then(json::string);
        let bytes = |name: &str| URL_SAFE_NO_PAD.decode(text(name)?.as_bytes()).ok();
        // A private key that everybody can read proves nothing.
        if json::member(jwk, "d").is_some() || text("use").is_some_and(|used| used != "sig") {
            return None;
        }
        let operations = json::member(jwk, "key_ops").map(|ops| json::elements(ops).unwrap_or_default());
        if operations.is_some_and(|ops| !ops.iter().any(|op| json::string(op).is_some_and(|op| op == "verify"))) {
            return None;
        }
        let curve = text("crv");
        let (mut algorithms, key) = match (text("kty")?.as_ref(), curve.as_deref()) {
            ("RSA", _) => {
                let (modulus, exponent) = (bytes("n")?, bytes("e")?);
                if !(256..=1024).contains(&modulus.len()) || !(1..=8).contains(&exponent.len()) {
                    return None;
                }
                let all = jsonwebtoken::AlgorithmFamily::Rsa.algorithms().to_vec();
                (all, DecodingKey::from_rsa_raw_components(&modulus, &exponent))
            }
            ("EC", Some("P-256")) => (vec![Algorithm::ES256], point(&bytes("x")?, &bytes("y")?, 32)?),
            ("EC", Some("P-384")) => (vec![Algorithm::ES384], point(&bytes("x")?, &bytes("y")?, 48)?),
            ("OKP", Some("Ed25519")) => {
                let x = bytes("x").filter(|x| x.len() == 32)?;
                (vec![Algorithm::EdDSA], DecodingKey::from_ed_der(&x))
            }
            _ => return None,
        };
        if let Some(named) = text("alg") {
            let named = algorithm(&named)?;
            algorithms.retain(|known| *known == named);
        }
        let id = text("kid").map(|id| id.into_owned());
        (!algorithms.is_empty()).then(|| Key { id, algorithms, key: Arc::new(key) })
    }
}

/// Uncompressed, as SEC 1 section 2.3.3 writes it.
fn point(x: &[u8], y: &[u8], length: usize) -> Option<DecodingKey> {
    (x.len() == length && y.len() == length).then(|| DecodingKey::from_ec_der(&[&[4], x, y].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<KeySet, &'static str> {
        KeySet::parse(format!(r#"{{"keys":[{keys}]}}"#).as_bytes())
    }

    #[test]
    fn only_public_keys_for_signatures_are_taken_each_for_its_own_algorithms() {
        let x = URL_SAFE_NO_PAD.encode([7; 32]);
        let ed = format!(r#""kty":"OKP","crv":"Ed25519","x":"{x}""#);
        let n = URL_SAFE_NO_PAD.encode([0xff; 256]);
        let rsa = format!(r#""kty":"RSA","n":"{n}","e":"AQAB""#);
        let usable = |members: String| parse(&format!("{{{members}}}")).is_ok();
        assert!(usable(ed.clone()) && usable(format!(r#"{ed},"use":"sig","alg":"EdDSA","key_ops":["verify"]"#)));
        assert!(usable(rsa.clone()) && usable(format!(r#"{rsa},"alg":"PS256""#)));
        for unusable in [
            format!(r#"{ed},"use":"enc""#),
            format!(r#"{ed},"key_ops":["encrypt"]"#),
            format!(r#"{ed},"alg":"RS256""#),
            format!(r#"{ed},"d":"{x}""#),
            format!(r#"{rsa},"alg":"HS256""#),
            format!(r#"{rsa},"alg":"none""#),
            format!(r#""kty":"oct","k":"{n}","alg":"HS256""#),
            format!(r#""kty":"RSA","n":"{}","e":"AQAB""#, URL_SAFE_NO_PAD.encode([0xff; 128])),
            format!(r#""kty":"OKP","crv":"Ed25519","x":"{}""#, URL_SAFE_NO_PAD.encode([7; 31])),
            format!(r#""kty":"EC","crv":"P-384","x":"{x}","y":"{x}""#),
            format!(r#""kty":"EC","crv":"secp256k1","x":"{x}","y":"{x}""#),
            r#""kty":"EC","crv":"P-256""#.to_owned(),
        ] {
            assert!(!usable(unusable.clone()), "{unusable}");
        }
        let set = parse(&format!(r#"{{"kty":"X"}},{{{rsa},"kid":"a"}},{{{ed},"kid":"a"}},{{{ed}}}"#)).ok().unwrap();
        let count = |id, algorithm| set.fitting(id, algorithm).len();
        assert_eq!((set.0.len(), count(Some("a"), Algorithm::EdDSA), count(None, Algorithm::EdDSA)), (3, 1, 2));
        assert_eq!((count(Some("a"), Algorithm::RS512), count(Some("b"), Algorithm::RS512)), (1, 0));
    }

    #[test]
    fn a_set_is_bounded_and_never_empty() {
        let key = format!(r#"{{"kty":"OKP","crv":"Ed25519","x":"{}"}}"#, URL_SAFE_NO_PAD.encode([7; 32]));
        assert!(parse(&vec![key.as_str(); 100].join(",")).is_ok());
        for bad in
            [vec![key.as_str(); 101].join(","), String::new(), r#"{"kty":"oct"}"#.into(), "[[[[[[[[]]]]]]]]".into()]
        {
            assert!(parse(&bad).is_err(), "{}", bad.len());
        }
        let set = parse(&vec![key.as_str(); 100].join(",")).ok().unwrap();
        assert_eq!(set.fitting(None, Algorithm::EdDSA).len(), MAX_TRIES);
        for bad in ["", "[]", "{}", r#"{"keys":{}}"#, r#"{"keys":[],"keys":[]}"#] {
            assert!(KeySet::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
