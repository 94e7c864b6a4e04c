//! What a replica hands over to the one that holds the stream: `POST /relay` on a listener that only replicas talk to.
//!
//! Every request carries a MAC under a key that is derived from the ring for this alone, over method, path, receiver,
//! stream, time, nonce and the body's digest; the body (whose call it is, and the message) is sealed. Whatever is not
//! signed so, is older than [`WINDOW_MS`], or comes twice gets one constant 404. The answer is signed too: whoever has
//! the address of a replica that is gone cannot take a message over. Nothing that was relayed is relayed on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, StatusCode};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Refusal;
use crate::http::{Client, Limits};
use crate::mcp::{Claims, Identity, Settings, headers};
use crate::money::{Bounds, Unit};
use crate::telemetry::RELAYED;

pub(super) const PATH: &str = "/relay";
/// How far apart the clocks of two replicas may be, and how long a nonce is remembered.
const WINDOW_MS: u64 = 30_000;
/// Nonces of one window: beyond them nothing is taken for a while.
const MAX_NONCES: usize = 200_000;
/// What the receiver may take until it answers; it answers before the call is done.
const WITHIN: Duration = Duration::from_secs(5);
/// What sealing and the caller's claims add to a message.
const MAX_ADDED: usize = 64 << 10;

const ASK: &str = "mcp-relay";
const ANSWER: &str = "mcp-relay-answer";

const STREAM: HeaderName = HeaderName::from_static("tollway-relay-stream");
const TIME: HeaderName = HeaderName::from_static("tollway-relay-time");
const NONCE: HeaderName = HeaderName::from_static("tollway-relay-nonce");
const DIGEST: HeaderName = HeaderName::from_static("tollway-relay-digest");
const MAC: HeaderName = HeaderName::from_static("tollway-relay-mac");

/// The other side of [`PATH`], as one replica has it.
#[derive(Clone)]
pub struct Relay {
    /// Where the other replicas reach this one's relay listener: signed into each token.
    pub at: SocketAddr,
    /// For addresses that a token names.
    pub client: Client,
}

/// What both sides sign.
struct Signed<'a> {
    to: SocketAddr,
    stream: &'a str,
    time: &'a str,
    nonce: &'a str,
    digest: &'a str,
}

impl Signed<'_> {
    fn message(&self) -> Vec<u8> {
        let Signed { to, stream, time, nonce, digest } = self;
        format!("1\nPOST\n{PATH}\n{to}\n{stream}\n{time}\n{nonce}\n{digest}").into_bytes()
    }

    /// What the sealed body belongs to.
    fn context(&self) -> String {
        format!("mcp-relay:{}:{}", self.stream, self.nonce)
    }
}

fn answer_message(nonce: &str, word: &str) -> Vec<u8> {
    format!("1\n{nonce}\n{word}").into_bytes()
}

/// The caller as the first replica has verified it; amounts in decimal atomic units.
#[derive(Serialize, Deserialize)]
struct Caller {
    agent: Option<String>,
    session: Option<String>,
    bounds: Vec<Bound>,
}

#[derive(Serialize, Deserialize)]
struct Bound {
    network: String,
    asset: String,
    per_call: Option<String>,
    per_session: Option<String>,
    per_day: Option<String>,
}

impl Caller {
    fn of(identity: &Identity) -> Caller {
        let bound = |(unit, bounds): (&Unit, &Bounds)| Bound {
            network: unit.network.to_string(),
            asset: unit.asset.to_string(),
            per_call: bounds.per_call.map(|amount| amount.to_string()),
            per_session: bounds.per_session.map(|amount| amount.to_string()),
            per_day: bounds.per_day.map(|amount| amount.to_string()),
        };
        Caller {
            agent: identity.agent.as_ref().map(|agent| agent.as_str().to_owned()),
            session: identity.claims.session.clone(),
            bounds: identity.claims.bounds.iter().map(bound).collect(),
        }
    }

    /// `None` where another version wrote what this one cannot read: a bound that is not understood is not dropped.
    fn identity(self) -> Option<Identity> {
        let amount = |text: Option<String>| text.map(|text| text.parse()).transpose().ok();
        let mut bounds = BTreeMap::new();
        for Bound { network, asset, per_call, per_session, per_day } in self.bounds {
            let unit = Unit { network: network.parse().ok()?, asset: asset.parse().ok()? };
            let all =
                Bounds { per_call: amount(per_call)?, per_session: amount(per_session)?, per_day: amount(per_day)? };
            bounds.insert(unit, all);
        }
        let agent = self.agent.map(|agent| agent.parse()).transpose().ok()?;
        Some(Identity { agent, claims: Claims { session: self.session, bounds } })
    }
}

/// The caller, its length in front, then the message.
fn pack(identity: &Identity, message: &[u8]) -> Option<Vec<u8>> {
    let caller = serde_json::to_vec(&Caller::of(identity)).ok()?;
    let mut plain = u32::try_from(caller.len()).ok()?.to_be_bytes().to_vec();
    plain.extend_from_slice(&caller);
    plain.extend_from_slice(message);
    Some(plain)
}

fn unpack(plain: &[u8]) -> Option<(Identity, &[u8])> {
    let (length, rest) = plain.split_first_chunk::<4>()?;
    let (caller, message) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    Some((serde_json::from_slice::<Caller>(caller).ok()?.identity()?, message))
}

impl Relay {
    /// Hands `message` over to the replica at `to`, which only a verified token may have named. Once, and never again
    /// elsewhere: what may have been heard must not be heard twice.
    pub(super) async fn send(
        &self,
        settings: &Settings,
        to: SocketAddr,
        stream: &str,
        identity: &Identity,
        message: &[u8],
    ) -> Result<(), Refusal> {
        let nonce = hex::encode(settings.world.random::<16>());
        let time = settings.world.unix_ms().to_string();
        let unsealed = pack(identity, message).ok_or(Refusal::Gone)?;
        let mut signed = Signed { to, stream, time: &time, nonce: &nonce, digest: "" };
        let body = settings.ring.seal(&settings.world, &signed.context(), &unsealed);
        drop(unsealed);
        let digest = hex::encode(Sha256::digest(&body));
        signed.digest = &digest;
        let mac = hex::encode(settings.ring.sign(ASK, &signed.message()));
        let request = http::Request::builder()
            .method(Method::POST)
            .uri(format!("http://{to}{PATH}"))
            .header(STREAM, stream)
            .header(TIME, &time)
            .header(NONCE, &nonce)
            .header(DIGEST, &digest)
            .header(MAC, mac)
            .body(Bytes::from(body))
            .map_err(|_| Refusal::Gone)?;
        let limits = Limits { timeout: WITHIN, max_response_bytes: 1024 };
        let outcome = match self.client.send_within(request, limits).await {
            Ok(answer) => understood(settings, &nonce, &answer),
            Err(error) => {
                tracing::warn!(replica = %to, %error, "the replica that holds a stream does not answer");
                Err(if error.may_have_been_seen() { Refusal::Unanswered } else { Refusal::Unreachable })
            }
        };
        RELAYED.one([
            "sent",
            match &outcome {
                Ok(()) => "taken",
                Err(refusal) => refusal.word(),
            },
        ]);
        outcome
    }
}

/// An answer without the signature of this ring is none: somebody else may have that address by now.
fn understood(settings: &Settings, nonce: &str, answer: &http::Response<Bytes>) -> Result<(), Refusal> {
    let word = std::str::from_utf8(answer.body()).unwrap_or_default();
    let mac = headers::single(answer.headers(), MAC.as_str()).ok().flatten().and_then(|mac| hex::decode(mac).ok());
    if !settings.ring.verify(ANSWER, &answer_message(nonce, word), &mac.unwrap_or_default()) {
        tracing::warn!(
            status = answer.status().as_u16(),
            "a replica refuses what is handed over: the key rings or the clocks of the replicas differ, or another \
             program has its address"
        );
        return Err(Refusal::Unreachable);
    }
    match word {
        "taken" => Ok(()),
        "busy" => Err(Refusal::Busy),
        "ending" => Err(Refusal::Ending),
        _ => Err(Refusal::Gone),
    }
}

/// What came from another replica, all of it verified.
pub(super) struct Received {
    pub stream: String,
    pub identity: Identity,
    pub message: Vec<u8>,
    pub nonce: String,
}

/// The nonces of the last two windows, by time.
#[derive(Default)]
pub(super) struct Nonces(Mutex<BTreeSet<(u64, String)>>);

impl Nonces {
    /// Once for each nonce; never where there are too many.
    fn is_new(&self, time: u64, nonce: &str, now: u64) -> bool {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = (now.saturating_sub(WINDOW_MS), String::new());
        *seen = seen.split_off(&oldest);
        seen.len() < MAX_NONCES && seen.insert((time, nonce.to_owned()))
    }
}

/// The head of a request of [`PATH`] that another replica has signed.
pub(super) struct Head {
    stream: String,
    time: u64,
    time_text: String,
    nonce: String,
    digest: String,
}

/// Before the body is read: `None` for whatever no replica has sent, for another replica, and for what is too old.
pub(super) fn head(settings: &Settings, relay: &Relay, head: &Parts) -> Option<Head> {
    let get = |name: HeaderName| text(&head.headers, &name);
    let (stream, time_text, nonce) = (get(STREAM)?, get(TIME)?, get(NONCE)?);
    let (digest, mac) = (get(DIGEST)?, hex::decode(get(MAC)?).ok()?);
    let signed = Signed { to: relay.at, stream, time: time_text, nonce, digest };
    if !settings.ring.verify(ASK, &signed.message(), &mac) {
        return None;
    }
    let time: u64 = time_text.parse().ok()?;
    if time.abs_diff(settings.world.unix_ms()) > WINDOW_MS {
        return None;
    }
    let [stream, time_text, nonce, digest] = [stream, time_text, nonce, digest].map(str::to_owned);
    Some(Head { stream, time, time_text, nonce, digest })
}

/// The longest body of [`PATH`].
pub(super) fn max_body(settings: &Settings) -> usize {
    settings.max_body_bytes.saturating_add(MAX_ADDED)
}

/// With the body: `None` where it is not the one that was signed, or came before.
pub(super) fn open(settings: &Settings, relay: &Relay, nonces: &Nonces, head: Head, body: &[u8]) -> Option<Received> {
    let Head { stream, time, time_text, nonce, digest } = head;
    if hex::encode(Sha256::digest(body)) != digest || !nonces.is_new(time, &nonce, settings.world.unix_ms()) {
        return None;
    }
    let signed = Signed { to: relay.at, stream: &stream, time: &time_text, nonce: &nonce, digest: &digest };
    let plain = settings.ring.open(&signed.context(), body).ok()?;
    let (identity, message) = unpack(&plain)?;
    Some(Received { identity, message: message.to_vec(), stream, nonce })
}

/// Signed, for the one who asked.
pub(super) fn answer(settings: &Settings, nonce: &str, outcome: &Result<(), Refusal>) -> Response {
    let (status, word) = match outcome {
        Ok(()) => (StatusCode::ACCEPTED, "taken"),
        Err(refusal @ (Refusal::Busy | Refusal::Ending)) => (StatusCode::SERVICE_UNAVAILABLE, refusal.word()),
        Err(_) => (StatusCode::NOT_FOUND, "gone"),
    };
    RELAYED.one(["received", word]);
    let mac = hex::encode(settings.ring.sign(ANSWER, &answer_message(nonce, word)));
    let mut response = Response::new(Body::from(word));
    *response.status_mut() = status;
    if let Ok(mac) = mac.parse() {
        response.headers_mut().insert(MAC, mac);
    }
    response
}

/// The same for whatever is wrong.
pub(super) fn refused() -> Response {
    RELAYED.one(["received", "refused"]);
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_FOUND;
    response
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers::single(headers, name.as_str()).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_arrives_with_every_bound_or_not_at_all() {
        let unit = Unit {
            network: "stellar:testnet".parse().unwrap(),
            asset: "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA".parse().unwrap(),
        };
        let bounds = Bounds { per_call: Some("3".parse().unwrap()), per_session: None, per_day: "12".parse().ok() };
        let claims = Claims { session: Some("s".into()), bounds: BTreeMap::from([(unit, bounds)]) };
        let identity = Identity { agent: "alice".parse().ok(), claims };
        for message in [&b""[..], b"{}", &[0; 5000]] {
            let plain = pack(&identity, message).unwrap();
            assert_eq!(unpack(&plain), Some((identity.clone(), message)));
        }
        let plain = pack(&identity, b"").unwrap();
        for end in 0..plain.len() {
            assert!(unpack(&plain[..end]).is_none(), "cut at {end}");
        }
        let mut odd = plain;
        let bound = odd.windows(4).position(|four| four == br#""12""#).unwrap();
        odd[bound + 2] = b'x';
        assert!(unpack(&odd).is_none(), "a bound that is none");
    }

    #[test]
    fn a_nonce_counts_once_and_is_forgotten_when_its_time_is_over() {
        let nonces = Nonces::default();
        assert!(nonces.is_new(50_000, "a", 50_000) && !nonces.is_new(50_000, "a", 50_001));
        assert!(nonces.is_new(50_000, "b", 50_000) && nonces.is_new(50_001, "a", 50_002));
        assert!(!nonces.is_new(50_000, "a", 80_000), "as long as it could come again");
        assert!(nonces.is_new(120_000, "c", 120_000));
        assert_eq!(nonces.0.lock().unwrap().len(), 1);
        for n in 0..MAX_NONCES + 5 {
            nonces.is_new(120_000, &n.to_string(), 120_000);
        }
        assert_eq!(nonces.0.lock().unwrap().len(), MAX_NONCES);
    }
}
