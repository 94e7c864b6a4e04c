//! The client of an external signer; what goes over the wire stands in `wire`.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use stellar_strkey::Strkey;
use url::Url;
use zeroize::Zeroizing;

use super::{SignerError, wire};
use crate::chain::stellar::Draft;
use crate::http::{Client, HttpError, Limits};
use crate::money::{Network, PaymentId};

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
        let address = self.ask_address(network).await?;
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).insert(network.clone(), address.clone());
        Ok(address)
    }

    pub async fn ask_address(&self, network: &Network) -> Result<String, SignerError> {
        let failed = SignerError::Address;
        let query = network.as_str().replace(':', "%3A");
        let url = self.url(&format!("{}?network={query}", wire::ADDRESS_PATH));
        let request = self.request(http::Method::GET, &url, Vec::new()).map_err(failed)?;
        let limits = Limits { max_response_bytes: wire::BODY.bytes, ..self.http.limits() };
        let response = self.http.send_within(request, limits).await.map_err(|e| failed(e.to_string()))?;
        if response.status() != http::StatusCode::OK {
            return Err(failed(format!("HTTP {}", response.status().as_u16())));
        }
        let answer: wire::Address<'_> = wire::read(response.body()).map_err(|e| failed(format!("the answer {e}")))?;
        let address = answer.address.into_owned();
        if network.namespace() == "stellar" && !is_stellar_payer(&address) {
            return Err(failed("the answer is not a Stellar account".into()));
        }
        Ok(address)
    }

    /// The signer's answer, base64, not yet verified. One request, never a second.
    pub async fn sign(&self, request: Request<'_>) -> Result<String, Failure> {
        let transfer = request.draft.transfer();
        let amount = transfer.amount.to_string();
        let body = wire::SignRequest {
            network: request.network.into(),
            network_passphrase: request.passphrase.into(),
            auth_entry_xdr: request.draft.preimage_base64().into(),
            address: transfer.payer.as_str().into(),
            payment: wire::Payment {
                payment_identifier: request.payment_id.short().into(),
                asset: transfer.asset.as_str().into(),
                pay_to: transfer.pay_to.as_str().into(),
                amount: amount.into(),
                sign_before: Some(request.sign_before_ms),
            },
        };
        let body = serde_json::to_vec(&body).map_err(|_| Failure::Unavailable("the request cannot be built".into()))?;
        let http_request =
            self.request(http::Method::POST, &self.url(wire::SIGN_PATH), body).map_err(Failure::Unavailable)?;
        let limits = Limits { timeout: request.timeout, max_response_bytes: wire::BODY.bytes };
        let response = self.http.send_within(http_request, limits).await.map_err(|error: HttpError| {
            let words = error.to_string();
            if error.may_have_been_seen() { Failure::Lost(words) } else { Failure::Unavailable(words) }
        })?;
        match response.status().as_u16() {
            200 => {
                let answer: Result<wire::SignAnswer<'_>, _> = wire::read(response.body());
                let answer = answer.map_err(|e| Failure::Lost(format!("the signer's answer {e}")))?;
                Ok(answer.signed_auth_entry_xdr.into_owned())
            }
            status if wire::REFUSALS.contains(&status) => {
                let said: wire::Refusal<'_> = wire::read(response.body()).unwrap_or_default();
                let why = said.reason.or(said.error).or(said.message);
                let why = why.unwrap_or_else(|| format!("HTTP {status}").into());
                Err(Failure::Refused(why.chars().take(MAX_WORDS).collect()))
            }
            status => Err(Failure::Lost(format!("the signer answered HTTP {status}"))),
        }
    }
}

fn is_stellar_payer(address: &str) -> bool {
    matches!(Strkey::from_string(address), Ok(Strkey::PublicKeyEd25519(_) | Strkey::Contract(_)))
}
