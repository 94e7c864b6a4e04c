//! A token issuer: real keys, a JWKS over HTTP that can be changed, and tokens of every kind, good and bad.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RsaKeyPair};
use axum::routing::get;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::StatusCode;
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};
use tollway::mcp::serve::serve;
use tollway::ports::machine;

pub const ISSUER: &str = "https://issuer.example";
pub const AUDIENCE: &str = "https://tollway.example/mcp";

pub enum Key {
    Rsa(Box<RsaKeyPair>, &'static str),
    P256(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl Key {
    pub fn rsa(algorithm: &'static str, size: aws_lc_rs::rsa::KeySize) -> Key {
        Key::Rsa(Box::new(RsaKeyPair::generate(size).unwrap()), algorithm)
    }
    pub fn p256() -> Key {
        Key::P256(EcdsaKeyPair::generate(&signature::ECDSA_P256_SHA256_FIXED_SIGNING).unwrap())
    }
    pub fn ed() -> Key {
        Key::Ed(Ed25519KeyPair::generate().unwrap())
    }

    pub fn algorithm(&self) -> &'static str {
        match self {
            Key::Rsa(_, algorithm) => algorithm,
            Key::P256(_) => "ES256",
            Key::Ed(_) => "EdDSA",
        }
    }

    /// As raw bytes: what somebody who mistakes it for a shared secret would use.
    pub fn public(&self) -> Vec<u8> {
        match self {
            Key::Rsa(pair, _) => pair.public_key().as_ref().to_vec(),
            Key::P256(pair) => pair.public_key().as_ref().to_vec(),
            Key::Ed(pair) => pair.public_key().as_ref().to_vec(),
        }
    }

    pub fn jwk(&self, id: &str) -> Value {
        let public = self.public();
        let mut jwk = match self {
            Key::Rsa(..) => {
                // RFC 8017 appendix A.1.1: the exponent is the last integer, 65537; the modulus stands before it.
                let (rest, exponent) = public.split_at(public.len() - 3);
                let modulus = &rest[rest.len() - 2 - rest.len() / 128 * 128..rest.len() - 2];
                json!({"kty": "RSA", "n": encode(modulus), "e": encode(exponent)})
            }
            Key::P256(_) => {
                json!({"kty": "EC", "crv": "P-256", "x": encode(&public[1..33]), "y": encode(&public[33..])})
            }
            Key::Ed(_) => json!({"kty": "OKP", "crv": "Ed25519", "x": encode(&public)}),
        };
        jwk["kid"] = json!(id);
        jwk
    }

    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match self {
            Key::Rsa(pair, algorithm) => {
                let padding: &'static dyn signature::RsaEncoding = match *algorithm {
                    "RS256" => &signature::RSA_PKCS1_SHA256,
                    "RS512" => &signature::RSA_PKCS1_SHA512,
                    "PS256" => &signature::RSA_PSS_SHA256,
                    other => panic!("{other}"),
                };
                let mut out = vec![0; pair.public_modulus_len()];
                pair.sign(padding, &random, message, &mut out).unwrap();
                out
            }
            Key::P256(pair) => pair.sign(&random, message).unwrap().as_ref().to_vec(),
            Key::Ed(pair) => pair.sign(message).as_ref().to_vec(),
        }
    }

    /// A token with these parts, signed by this key.
    pub fn token(&self, header: &Value, claims: &Value) -> String {
        let signed = format!("{}.{}", encode(header.to_string()), encode(claims.to_string()));
        let signature = encode(self.sign(signed.as_bytes()));
        format!("{signed}.{signature}")
    }

    /// A good token with `change` over its claims; null removes.
    pub fn good(&self, id: &str, change: Value) -> String {
        self.token(&json!({"alg": self.algorithm(), "typ": "JWT", "kid": id}), &claims(change))
    }
}

pub fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Unix seconds.
pub fn now() -> i64 {
    i64::try_from(machine::world().0.unix_ms() / 1000).unwrap()
}

pub fn claims(change: Value) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now() + 300, "iat": now()});
    for (name, value) in change.as_object().unwrap() {
        claims[name] = value.clone();
        if value.is_null() {
            claims.as_object_mut().unwrap().remove(name);
        }
    }
    claims
}

/// Serves `/jwks`.
pub struct Issuer {
    pub url: String,
    pub served: Arc<Served>,
    _stop: DropGuard,
}

#[derive(Default)]
pub struct Served {
    /// `None`: 500.
    body: Mutex<Option<String>>,
    pub asked: AtomicUsize,
}

impl Issuer {
    pub async fn start(keys: &[(&str, &Key)]) -> Issuer {
        let served = Arc::new(Served::default());
        let state = served.clone();
        let app = axum::Router::new().route(
            "/jwks",
            get(move || async move {
                state.asked.fetch_add(1, Ordering::SeqCst);
                match state.body.lock().unwrap().clone() {
                    Some(body) => (StatusCode::OK, body),
                    None => (StatusCode::INTERNAL_SERVER_ERROR, String::new()),
                }
            }),
        );
        let (url, stop) = start(app).await;
        let issuer = Issuer { url: format!("{url}/jwks"), served, _stop: stop };
        issuer.publish(keys);
        issuer
    }

    pub fn publish(&self, keys: &[(&str, &Key)]) {
        let keys: Vec<Value> = keys.iter().map(|(id, key)| key.jwk(id)).collect();
        self.answer(Some(&json!({"keys": keys}).to_string()));
    }

    pub fn answer(&self, body: Option<&str>) {
        *self.served.body.lock().unwrap() = body.map(str::to_owned);
    }

    pub fn asked(&self) -> usize {
        self.served.asked.load(Ordering::SeqCst)
    }

    /// The section `auth.jwt`, with `change` over it.
    pub fn section(&self, change: Value) -> Value {
        let mut jwt = json!({"issuer": ISSUER, "audiences": ["other", AUDIENCE], "jwks_url": self.url});
        jwt.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        json!({"auth": {"jwt": jwt}})
    }
}

/// Plain HTTP on a port of its own; its URL without a path.
pub async fn start(app: axum::Router) -> (String, DropGuard) {
    let (world, _) = machine::world();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    world.spawn.clone().spawn(Box::pin(serve(machine::TcpListener(listener), world, app, stop.clone())));
    (url, stop.drop_guard())
}
