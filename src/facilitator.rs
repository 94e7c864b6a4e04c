//! A facilitator as a seller calls it (core specification 7): verify and settle. Its yes is evidence, its no is a word.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderValue;
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
    #[error("the facilitator is not asked for a while: it failed again and again")]
    Resting,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Valid,
    /// The facilitator's code, at most 200 characters.
    Invalid(String),
}

#[derive(Clone)]
pub struct Facilitator {
    way: Way,
    /// Without a `/` at its end.
    base: String,
    /// Marked as sensitive, so that no Debug shows it.
    authorization: Option<HeaderValue>,
    /// Instead of whatever the caller would wait.
    timeout: Option<Duration>,
}

#[derive(Clone)]
enum Way {
    Http(Client),
    Recorded(Recording),
}

/// What a facilitator without a network was asked, for tests of a program that sells. It finds every payment valid and
/// settles it, unless it was told to refuse.
#[derive(Clone, Default)]
pub struct Recording(Arc<Mutex<Recorded>>);

#[derive(Default)]
struct Recorded {
    verified: usize,
    settled: usize,
    refusal: Option<String>,
}

impl Recording {
    /// From now on every payment is invalid for this reason; `None`: valid again.
    pub fn refuse(&self, reason: Option<&str>) {
        self.recorded().refusal = reason.map(ToOwned::to_owned);
    }

    /// # Panics
    /// If another number of payments was verified.
    pub fn assert_verified(&self, times: usize) {
        assert_eq!(self.recorded().verified, times, "so many payments were verified");
    }

    /// # Panics
    /// If another number of payments was settled.
    pub fn assert_settled(&self, times: usize) {
        assert_eq!(self.recorded().settled, times, "so many payments were settled");
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, path: &str, body: &[u8]) -> Box<RawValue> {
        let asked: Option<&RawValue> = serde_json::from_slice(body).ok();
        let requirements = asked.and_then(|asked| json::member(asked, "paymentRequirements"));
        let network = requirements.and_then(|offer| json::member(offer, "network")).and_then(json::string);
        let mut recorded = self.recorded();
        let refusal = recorded.refusal.clone();
        json::raw(&match (path, refusal) {
            ("/verify", refusal) => {
                recorded.verified += 1;
                serde_json::json!({"isValid": refusal.is_none(), "invalidReason": refusal})
            }
            ("/settle", None) => {
                recorded.settled += 1;
                let transaction = format!("recorded-{}", recorded.settled);
                serde_json::json!({"success": true, "transaction": transaction, "network": network})
            }
            (_, refusal) => {
                serde_json::json!({"success": false, "errorReason": refusal, "transaction": "", "network": network})
            }
        })
    }
}

/// The body of `/verify` and `/settle`. Kept as it is, the same settle can be asked again, byte for byte.
#[derive(Clone, PartialEq, Eq)]
pub struct Question(Bytes);

impl Question {
    pub fn new(payload: &RawValue, requirements: &RawValue) -> Question {
        Question(Bytes::from(format!(
            r#"{{"x402Version":{VERSION},"paymentPayload":{},"paymentRequirements":{}}}"#,
            payload.get(),
            requirements.get()
        )))
    }

    /// One that was kept.
    pub fn kept(bytes: Vec<u8>) -> Question {
        Question(Bytes::from(bytes))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// One entry of `/supported` that this version can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SupportedKind {
    pub scheme: String,
    pub network: String,
}

impl Facilitator {
    pub fn new(http: Client, base: &Url) -> Facilitator {
        Facilitator {
            way: Way::Http(http),
            base: base.as_str().trim_end_matches('/').to_owned(),
            authorization: None,
            timeout: None,
        }
    }

    /// One that asks nobody, and what it will have been asked.
    pub fn recording() -> (Facilitator, Recording) {
        let recording = Recording::default();
        let way = Way::Recorded(recording.clone());
        (
            Facilitator { way, base: "http://recording.invalid".to_owned(), authorization: None, timeout: None },
            recording,
        )
    }

    /// The value of the header `Authorization`; `None` where the text can be no header.
    pub fn with_authorization(self, value: &str) -> Option<Facilitator> {
        let mut value = HeaderValue::from_str(value).ok()?;
        value.set_sensitive(true);
        Some(Facilitator { authorization: Some(value), ..self })
    }

    /// One that is slower, or has to be quicker, than the others.
    pub fn with_timeout(self, timeout: Duration) -> Facilitator {
        Facilitator { timeout: Some(timeout), ..self }
    }

    /// What it verifies and settles in this version of the protocol (core specification 7.3), at most 1,000 kinds.
    pub async fn supported(&self, timeout: Duration) -> Result<Vec<SupportedKind>, FacilitatorError> {
        if let Way::Recorded(_) = self.way {
            return Err(FacilitatorError::Malformed("a recording does not say what it supports".into()));
        }
        let request = self.request(http::Request::get(format!("{}/supported", self.base)), Bytes::new())?;
        let answer = self.send("kinds", request, timeout).await?;
        let kinds = json::member(&answer, "kinds").and_then(json::elements);
        let kinds = kinds.ok_or_else(|| FacilitatorError::Malformed("kinds is no list".into()))?;
        let kind = |raw: &RawValue| {
            let text = |name| json::member(raw, name).and_then(json::string).map(|text| text.into_owned());
            let ours = json::member(raw, "x402Version").map(RawValue::get) == Some(VERSION.to_string().as_str());
            if !ours {
                return None;
            }
            Some(SupportedKind { scheme: text("scheme")?, network: text("network")? })
        };
        Ok(kinds.into_iter().filter_map(kind).take(1_000).collect())
    }

    pub async fn verify(
        &self,
        payload: &RawValue,
        requirements: &RawValue,
        timeout: Duration,
    ) -> Result<Verdict, FacilitatorError> {
        let answer = self.post("/verify", "isValid", &Question::new(payload, requirements), timeout).await?;
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
        self.settle_exactly(&Question::new(payload, requirements), timeout).await
    }

    /// The same with a question that is kept, so that it can be asked again.
    pub async fn settle_exactly(
        &self,
        question: &Question,
        timeout: Duration,
    ) -> Result<(Box<RawValue>, Settlement), FacilitatorError> {
        let answer = self.post("/settle", "success", question, timeout).await?;
        let settlement = Settlement::parse(&answer).map_err(|e| FacilitatorError::Malformed(e.to_string()))?;
        Ok((answer, settlement))
    }

    async fn post(
        &self,
        path: &str,
        deciding: &str,
        question: &Question,
        timeout: Duration,
    ) -> Result<Box<RawValue>, FacilitatorError> {
        let request =
            http::Request::post(format!("{}{path}", self.base)).header(http::header::CONTENT_TYPE, "application/json");
        self.send(deciding, self.request(request, question.0.clone())?, timeout).await
    }

    fn request(
        &self,
        mut request: http::request::Builder,
        body: Bytes,
    ) -> Result<http::Request<Bytes>, FacilitatorError> {
        request = request.header(http::header::ACCEPT, "application/json");
        if let Some(value) = &self.authorization {
            request = request.header(http::header::AUTHORIZATION, value);
        }
        request.body(body).map_err(|_| FacilitatorError::Malformed("its URL is none".into()))
    }

    /// An answer that is not 2xx counts where it is JSON with the member that decides; any other is an error.
    async fn send(
        &self,
        deciding: &str,
        request: http::Request<Bytes>,
        timeout: Duration,
    ) -> Result<Box<RawValue>, FacilitatorError> {
        let http = match &self.way {
            Way::Http(http) => http,
            Way::Recorded(recording) => return Ok(recording.say(request.uri().path(), request.body())),
        };
        let timeout = self.timeout.unwrap_or(timeout);
        let answer = http.send_within(request, Limits { timeout, max_response_bytes: MAX_ANSWER }).await?;
        let checked = json::check(answer.body(), json::Limits { bytes: MAX_ANSWER, depth: MAX_DEPTH });
        match checked {
            Ok(body) if json::member(body, deciding).is_some() => Ok(body.to_owned()),
            _ if !answer.status().is_success() => Err(FacilitatorError::Status(answer.status().as_u16())),
            Ok(_) => Err(FacilitatorError::Malformed(format!("it has no {deciding}"))),
            Err(e) => Err(FacilitatorError::Malformed(format!("it {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_that_was_kept_is_the_same_byte_for_byte() {
        let payload = RawValue::from_string(r#"{ "x":1.0 }"#.into()).unwrap();
        let question = Question::new(&payload, &RawValue::from_string("{}".into()).unwrap());
        let body = r#"{"x402Version":2,"paymentPayload":{ "x":1.0 },"paymentRequirements":{}}"#;
        assert_eq!(question.bytes(), body.as_bytes());
        assert!(Question::kept(question.bytes().to_vec()) == question);
    }
}
