//! A facilitator as a seller calls it (core specification 7): verify and settle. Its yes is evidence, its no is a word.

use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use url::Url;

use crate::http::{Client, HttpError, Limits};
use crate::json;
use crate::x402::{Settlement, VERSION};

const MAX_ANSWER: usize = 256 * 1024;
const MAX_DEPTH: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum FacilitatorError {
    #[error("the facilitator did not answer: {0}")]
    Http(#[from] HttpError),
    #[error("the facilitator answered HTTP {0}")]
    Status(u16),
    #[error("the facilitator's answer could not be used: {0}")]
    Malformed(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Valid,
    /// The facilitator's code, at most 200 characters.
    Invalid(String),
}

#[derive(Clone)]
pub struct Facilitator {
    http: Client,
    /// Without a `/` at its end.
    base: String,
}

impl Facilitator {
    pub fn new(http: Client, base: &Url) -> Facilitator {
        Facilitator { http, base: base.as_str().trim_end_matches('/').to_owned() }
    }

    pub async fn verify(
        &self,
        payload: &RawValue,
        requirements: &RawValue,
        timeout: Duration,
    ) -> Result<Verdict, FacilitatorError> {
        let answer = self.post("/verify", "isValid", payload, requirements, timeout).await?;
        match json::member(&answer, "isValid").map(RawValue::get) {
            Some("true") => Ok(Verdict::Valid),
            Some("false") => {
                let reason = json::member(&answer, "invalidReason").and_then(json::string).unwrap_or_default();
                Ok(Verdict::Invalid(reason.chars().take(200).collect()))
            }
            _ => Err(FacilitatorError::Malformed("isValid is no boolean".into())),
        }
    }

    /// The `SettlementResponse`, as it arrived and understood. An error after the request left says nothing about the
    /// money ([`HttpError::may_have_been_seen`]).
    pub async fn settle(
        &self,
        payload: &RawValue,
        requirements: &RawValue,
        timeout: Duration,
    ) -> Result<(Box<RawValue>, Settlement), FacilitatorError> {
        let answer = self.post("/settle", "success", payload, requirements, timeout).await?;
        let settlement = Settlement::parse(&answer).map_err(|e| FacilitatorError::Malformed(e.to_string()))?;
        Ok((answer, settlement))
    }

    /// An answer that is not 2xx counts where it is JSON with the member that decides; any other is an error.
    async fn post(
        &self,
        path: &str,
        deciding: &str,
        payload: &RawValue,
        requirements: &RawValue,
        timeout: Duration,
    ) -> Result<Box<RawValue>, FacilitatorError> {
        let body = format!(
            r#"{{"x402Version":{VERSION},"paymentPayload":{},"paymentRequirements":{}}}"#,
            payload.get(),
            requirements.get()
        );
        let request = http::Request::post(format!("{}{path}", self.base))
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(http::header::ACCEPT, "application/json")
            .body(Bytes::from(body))
            .map_err(|_| FacilitatorError::Malformed("its URL is none".into()))?;
        let answer = self.http.send_within(request, Limits { timeout, max_response_bytes: MAX_ANSWER }).await?;
        let checked = json::check(answer.body(), json::Limits { bytes: MAX_ANSWER, depth: MAX_DEPTH });
        match checked {
            Ok(body) if json::member(body, deciding).is_some() => Ok(body.to_owned()),
            _ if !answer.status().is_success() => Err(FacilitatorError::Status(answer.status().as_u16())),
            Ok(_) => Err(FacilitatorError::Malformed(format!("it has no {deciding}"))),
            Err(e) => Err(FacilitatorError::Malformed(format!("it {e}"))),
        }
    }
}
