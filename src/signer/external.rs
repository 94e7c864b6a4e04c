//! The external signer's contract (HTTPS, JSON):
//!
//! - `GET /address?network=<caip2>` gives `{"address"}`.
//! - `POST /sign-auth-entry` takes `{"network", "networkPassphrase", "authEntryXdr", "address", "payment"}` and gives
//!   `{"signedAuthEntryXdr"}`. `authEntryXdr` is the base64 XDR of the `HashIdPreimage` (as SEP-43 wallets take it); the
//!   answer is a 64-byte signature or a whole signed entry, base64. `payment` is information, but for
//!   `payment.signBefore` (unix milliseconds), after which nothing should be signed.
//!
//! 401, 403 and 422 are refusals: they say that the request was not acted on (RFC 9110, sections 15.5.2, 15.5.4 and
//! 15.5.21), so a signer must never answer so after it has signed. Every other ending after the request left, a 400, 409,
//! 429 or 5xx included, is a lost answer: somebody may hold a signature.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::Serialize;
use stellar_strkey::Strkey;
use url::Url;
use zeroize::Zeroizing;

use super::SignerError;
use crate::chain::stellar::Draft;
use crate::http::{Client, HttpError, Limits};
use crate::json;
use crate::money::{Network, PaymentId};

const ANSWER: json::Limits = json::Limits { bytes: 64 * 1024, depth: 8 };
const MAX_WORDS: usize = 200;

pub(super) struct External {
    base_url: Url,
    auth_header: Option<HeaderValue>,
    http: Client,
    addresses: Mutex<BTreeMap<Network, String>>,
}

pub(super) struct Request<'a> {
    pub network: &'a str,
    pub passphrase: &'a str,
    pub draft: &'a Draft,
    pub payment_id: PaymentId,
    pub sign_before_ms: u64,
    pub timeout: Duration,
}

pub(super) enum Failure {
    Refused(String),
    Unavailable(String),
    Lost(String),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SignBody<'a> {
    network: &'a str,
    network_passphrase: &'a str,
    auth_entry_xdr: String,
    address: &'a str,
    payment: Payment<'a>,
}

/// Information for the signer's log; it decides on what it decodes.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Payment<'a> {
    payment_identifier: String,
    asset: &'a str,
    pay_to: &'a str,
    amount: String,
    sign_before: u64,
}

impl External {
    pub fn new(base_url: Url, auth_header: Option<Zeroizing<String>>, http: Client) -> Result<External, SignerError> {
        let auth_header = match auth_header {
            None => None,
            Some(text) => {
                let mut value = HeaderValue::from_str(text.trim()).map_err(|_| SignerError::Header)?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(External { base_url, auth_header, http, addresses: Mutex::default() })
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base_url.as_str().trim_end_matches('/'))
    }

    fn request(&self, method: http::Method, url: &str, body: Vec<u8>) -> Result<http::Request<Bytes>, String> {
        let mut request = http::Request::builder().method(method).uri(url);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(header) = &self.auth_header {
            request = request.header(AUTHORIZATION, header.clone());
        }
        request.body(Bytes::from(body)).map_err(|_| "the signer's URL cannot be used".into())
    }

    /// Asked once per network, then remembered: an address that changed would make every signature fail to verify.
    pub async fn address(&self, network: &Network) -> Result<String, SignerError> {
        let known = |addresses: &Mutex<BTreeMap<Network, String>>| {
            addresses.lock().unwrap_or_else(PoisonError::into_inner).get(network).cloned()
        };
        if let Some(address) = known(&self.addresses) {
            return Ok(address);
        }
        let failed = SignerError::Address;
        let url = self.url(&format!("/address?network={}", network.as_str().replace(':', "%3A")));
        let request = self.request(http::Method::GET, &url, Vec::new()).map_err(failed)?;
        let limits = Limits { max_response_bytes: ANSWER.bytes, ..self.http.limits() };
        let response = self.http.send_within(request, limits).await.map_err(|e| failed(e.to_string()))?;
        if response.status() != http::StatusCode::OK {
            return Err(failed(format!("HTTP {}", response.status().as_u16())));
        }
        let address = text_member(response.body(), "address").map_err(failed)?;
        if network.namespace() == "stellar" && !is_stellar_payer(&address) {
            return Err(failed("the answer is not a Stellar account".into()));
        }
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).insert(network.clone(), address.clone());
        Ok(address)
    }

    /// The signer's answer, base64, not yet verified. One request, never a second.
    pub async fn sign(&self, request: Request<'_>) -> Result<String, Failure> {
        let transfer = request.draft.transfer();
        let body = SignBody {
            network: request.network,
            network_passphrase: request.passphrase,
            auth_entry_xdr: request.draft.preimage_base64(),
            address: &transfer.payer,
            payment: Payment {
                payment_identifier: request.payment_id.short(),
                asset: &transfer.asset,
                pay_to: &transfer.pay_to,
                amount: transfer.amount.to_string(),
                sign_before: request.sign_before_ms,
            },
        };
        let body = serde_json::to_vec(&body).map_err(|_| Failure::Unavailable("the request cannot be built".into()))?;
        let http_request =
            self.request(http::Method::POST, &self.url("/sign-auth-entry"), body).map_err(Failure::Unavailable)?;
        let limits = Limits { timeout: request.timeout, max_response_bytes: ANSWER.bytes };
        let response = self.http.send_within(http_request, limits).await.map_err(|error: HttpError| {
            let words = error.to_string();
            if error.may_have_been_seen() { Failure::Lost(words) } else { Failure::Unavailable(words) }
        })?;
        match response.status().as_u16() {
            200 => text_member(response.body(), "signedAuthEntryXdr").map_err(Failure::Lost),
            status @ (401 | 403 | 422) => {
                let why =
                    ["reason", "error", "message"].iter().find_map(|name| text_member(response.body(), name).ok());
                Err(Failure::Refused(why.unwrap_or_else(|| format!("HTTP {status}")).chars().take(MAX_WORDS).collect()))
            }
            status => Err(Failure::Lost(format!("the signer answered HTTP {status}"))),
        }
    }
}

fn text_member(body: &[u8], name: &str) -> Result<String, String> {
    let raw = json::check(body, ANSWER).map_err(|e| format!("the signer's answer {e}"))?;
    json::member(raw, name)
        .and_then(json::string)
        .map(|text| text.into_owned())
        .ok_or_else(|| format!("the signer's answer has no {name}"))
}

fn is_stellar_payer(address: &str) -> bool {
    matches!(Strkey::from_string(address), Ok(Strkey::PublicKeyEd25519(_) | Strkey::Contract(_)))
}
