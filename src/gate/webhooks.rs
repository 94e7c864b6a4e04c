//! Hooks over HTTP: each event is a `POST` of a JSON object to one URL of the operator's. Only the answer to
//! `on_protected_request` decides anything:
//!
//! | answer | meaning |
//! |---|---|
//! | 204, or `{"action": "continue"}` | as it is |
//! | `{"action": "replace", "offers": [offer, …], "extensions": {…}}` | other offers, written as in a challenge, or further extensions |
//! | `{"action": "halt", "status": 403, "body": {…}}` | an error result with this body |
//! | `{"action": "let_through"}` | it costs nothing this time |
//!
//! Anything else is a failure, and the policy for failures decides ([`super::hooks::OnFailure`]).

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::HeaderValue;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use url::Url;

use super::hooks::{Happened, Hooks, Protected, Verdict};
use super::prices::Terms;
use crate::http::{Client, Limits};
use crate::json;
use crate::x402::{Offer, assets};

const MAX_ANSWER: usize = 256 * 1024;
const MAX_DEPTH: usize = 32;

/// The events, as configuration and bodies name them.
pub const EVENTS: [&str; 4] = ["on_protected_request", "on_verified_payment_canceled", "on_settled", "on_rejected"];

pub struct Webhooks {
    http: Client,
    url: String,
    /// Marked as sensitive, so that no Debug shows it.
    authorization: Option<HeaderValue>,
    timeout: Duration,
    events: BTreeSet<&'static str>,
}

impl Webhooks {
    /// All events. `timeout`: of one call; the gate's own bound on a hook should be a little longer.
    pub fn new(http: Client, url: &Url, timeout: Duration) -> Webhooks {
        Webhooks { http, url: url.as_str().to_owned(), authorization: None, timeout, events: EVENTS.into() }
    }

    /// The value of the header `Authorization`; `None` where the text can be no header.
    pub fn with_authorization(self, value: &str) -> Option<Webhooks> {
        let mut value = HeaderValue::from_str(value).ok()?;
        value.set_sensitive(true);
        Some(Webhooks { authorization: Some(value), ..self })
    }

    /// These events alone, of [`EVENTS`].
    pub fn only(self, events: &[&str]) -> Webhooks {
        let events = EVENTS.into_iter().filter(|event| events.contains(event)).collect();
        Webhooks { events, ..self }
    }

    async fn post(&self, body: &impl Serialize) -> Result<http::Response<Bytes>, String> {
        let mut request =
            http::Request::post(&self.url).header(CONTENT_TYPE, "application/json").header(ACCEPT, "application/json");
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let body = Bytes::from(json::raw(body).get().to_owned());
        let request = request.body(body).map_err(|_| "the webhook's URL is none".to_owned())?;
        let limits = Limits { timeout: self.timeout, max_response_bytes: MAX_ANSWER };
        let answer = self.http.send_within(request, limits).await;
        let answer = answer.map_err(|error| format!("the webhook did not answer: {error}"))?;
        match answer.status().is_success() {
            true => Ok(answer),
            false => Err(format!("the webhook answered HTTP {}", answer.status().as_u16())),
        }
    }

    fn tell<'a>(&'a self, event: &'static str, happened: &'a Happened) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            if !self.events.contains(event) {
                return;
            }
            let body = Told {
                event,
                item: &happened.item,
                claim: happened.claim.as_deref(),
                payer: happened.payer.as_deref(),
                offer: happened.offer.as_deref(),
                receipt: happened.receipt.as_deref(),
                reason: happened.reason.as_deref(),
                error: happened.error.as_deref(),
            };
            if let Err(why) = self.post(&body).await {
                tracing::warn!(event, why, "an event was not delivered");
            }
        })
    }
}

#[derive(Serialize)]
struct Asked<'a> {
    event: &'static str,
    transport: &'a str,
    method: &'a str,
    target: &'a str,
    params: &'a RawValue,
    item: &'a str,
    offers: &'a [&'a RawValue],
    extensions: &'a RawValue,
}

#[derive(Serialize)]
struct Told<'a> {
    event: &'a str,
    item: &'a str,
    claim: Option<&'a str>,
    payer: Option<&'a str>,
    offer: Option<&'a RawValue>,
    receipt: Option<&'a RawValue>,
    reason: Option<&'a str>,
    error: Option<&'a str>,
}

impl Hooks for Webhooks {
    fn on_protected_request<'a>(&'a self, request: Protected<'a>) -> BoxFuture<'a, Result<Verdict, String>> {
        Box::pin(async move {
            if !self.events.contains("on_protected_request") {
                return Ok(Verdict::Continue);
            }
            let asked = Asked {
                event: "on_protected_request",
                transport: request.transport,
                method: request.kind.method(),
                target: request.target,
                params: request.params,
                item: request.item,
                offers: request.offers,
                extensions: request.extensions,
            };
            let answer = self.post(&asked).await?;
            match answer.body().is_empty() {
                true => Ok(Verdict::Continue),
                false => verdict(answer.body()).map_err(|what| format!("the webhook's {what}")),
            }
        })
    }

    fn on_verified_payment_canceled<'a>(&'a self, event: &'a Happened) -> BoxFuture<'a, ()> {
        self.tell("on_verified_payment_canceled", event)
    }

    fn on_settled<'a>(&'a self, event: &'a Happened) -> BoxFuture<'a, ()> {
        self.tell("on_settled", event)
    }

    fn on_rejected<'a>(&'a self, event: &'a Happened) -> BoxFuture<'a, ()> {
        self.tell("on_rejected", event)
    }
}

fn verdict(body: &[u8]) -> Result<Verdict, String> {
    let limits = json::Limits { bytes: MAX_ANSWER, depth: MAX_DEPTH };
    let answer = json::check(body, limits).map_err(|error| format!("answer {error}"))?;
    let action = json::member(answer, "action").and_then(json::string);
    match action.as_deref() {
        Some("continue") => Ok(Verdict::Continue),
        Some("let_through") => Ok(Verdict::LetThrough),
        Some("halt") => {
            let status = json::member(answer, "status").and_then(|status| status.get().parse().ok());
            let status = status.filter(|status| (100..=599).contains(status)).ok_or("status is none (100 to 599)")?;
            let body = json::member(answer, "body").unwrap_or(RawValue::NULL).to_owned();
            Ok(Verdict::Halt { status, body })
        }
        Some("replace") => {
            let offers = match json::member(answer, "offers") {
                None => None,
                Some(list) => {
                    let offers = json::elements(list).ok_or("offers is no list")?;
                    Some(offers.into_iter().map(terms).collect::<Result<Vec<_>, _>>()?)
                }
            };
            let extensions = json::member(answer, "extensions").map(ToOwned::to_owned);
            if offers.is_none() && extensions.is_none() {
                return Err("replace has neither offers nor extensions".into());
            }
            Ok(Verdict::Replace { offers, extensions })
        }
        _ => Err("action is none of continue, replace, halt, let_through".into()),
    }
}

/// An offer as a challenge has it.
fn terms(raw: &RawValue) -> Result<Terms, String> {
    let offer =
        Offer::parse(raw).map_err(|error| format!("offer cannot be used: {} is missing or malformed", error.0))?;
    let mut extra = match offer.extra.as_deref().map(|extra| serde_json::from_str(extra.get())) {
        None => serde_json::Map::new(),
        Some(Ok(Value::Object(extra))) => extra,
        Some(_) => return Err("offer's extra cannot be read".into()),
    };
    let flow = offer.flow();
    // The gate writes them itself.
    extra.remove("paymentFlow");
    extra.remove("areFeesSponsored");
    let known = assets::known(&offer.unit());
    Ok(Terms {
        shown_amount: known.map_or_else(|| offer.amount.to_string(), |known| offer.amount.to_decimal(known.decimals)),
        shown_asset: known.map_or_else(|| offer.asset.as_str().to_owned(), |known| known.symbol.to_owned()),
        scheme: offer.scheme,
        network: offer.network,
        asset: offer.asset,
        amount: offer.amount,
        pay_to: offer.pay_to,
        max_timeout_seconds: offer.max_timeout_seconds,
        flow,
        extra,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::json;

    use super::super::Kind;
    use super::super::prices::tests::terms as priced;
    use super::*;
    use crate::http::testing::{Request, answer, serve, write};
    use crate::http::{Destination, Tls};
    use crate::ports::machine;

    type Heard = Arc<Mutex<Vec<(Option<String>, Value)>>>;

    async fn hooks(code: u16, body: &str) -> (Webhooks, Heard) {
        let (heard, body) = (Heard::default(), body.to_owned());
        let log = heard.clone();
        let address = serve(move |request: Request, io| {
            let said = serde_json::from_str(&request.body).unwrap();
            log.lock().unwrap().push((request.header("authorization"), said));
            let text = answer(code, &[], &body);
            async move { write(&io, text).await }
        })
        .await;
        let limits = Limits { timeout: Duration::from_secs(5), max_response_bytes: 1 << 20 };
        let http = Client::new(machine::world().0, Tls::Plain, Destination::Operator, limits);
        let url = format!("http://{address}/hook").parse().unwrap();
        let hooks = Webhooks::new(http, &url, Duration::from_secs(2)).with_authorization("Bearer very-secret").unwrap();
        (hooks, heard)
    }

    async fn asked(hooks: &Webhooks) -> Result<Verdict, String> {
        let offer = priced(10_000).price().unwrap().offer.raw;
        let params =
            RawValue::from_string(r#"{"name":"search","arguments":{"big":100000000000000000000000001}}"#.into());
        let (params, extensions) = (params.unwrap(), RawValue::from_string("{}".into()).unwrap());
        let request = Protected {
            transport: "mcp",
            kind: Kind::Tool,
            target: "search",
            params: &params,
            item: "tool:search",
            offers: &[&offer],
            extensions: &extensions,
        };
        hooks.on_protected_request(request).await
    }

    #[tokio::test]
    async fn a_webhook_is_asked_and_its_answer_read() {
        let offer = priced(10_000).price().unwrap().offer.raw;
        let dearer = offer.get().replace("10000", "20000");
        for (code, body, said) in [
            (204, String::new(), "Continue"),
            (200, r#"{"action":"continue"}"#.into(), "Continue"),
            (200, r#"{"action":"let_through"}"#.into(), "LetThrough"),
            (200, r#"{"action":"halt","status":403,"body":{"why":"no"}}"#.into(), "403"),
            (200, format!(r#"{{"action":"replace","offers":[{dearer}]}}"#), "20000"),
            (200, r#"{"action":"replace","extensions":{"a":{"info":{}}}}"#.into(), "info"),
        ] {
            let (hooks, heard) = hooks(code, &body).await;
            let verdict = asked(&hooks).await.unwrap();
            assert!(format!("{verdict:?}").contains(said), "{body}: {verdict:?}");
            if let Verdict::Replace { offers: Some(mut offers), .. } = verdict {
                let offer = offers.remove(0).price().unwrap().offer.raw;
                assert_eq!(offer.get(), dearer, "as it goes on the wire");
            }
            let (authorization, body) = heard.lock().unwrap().remove(0);
            assert_eq!(authorization.as_deref(), Some("Bearer very-secret"));
            assert_eq!((&body["event"], &body["method"]), (&json!("on_protected_request"), &json!("tools/call")));
            assert_eq!(body["offers"][0]["amount"], "10000");
        }
    }

    #[tokio::test]
    async fn what_is_no_answer_is_a_failure() {
        for (code, body) in [
            (500, r#"{"action":"continue"}"#),
            (302, ""),
            (200, "<html>"),
            (200, "{}"),
            (200, r#"{"action":"Continue"}"#),
            (200, r#"{"action":"halt"}"#),
            (200, r#"{"action":"halt","status":99,"body":1}"#),
            (200, r#"{"action":"replace"}"#),
            (200, r#"{"action":"replace","offers":{}}"#),
            (200, r#"{"action":"replace","offers":[{"amount":"1"}]}"#),
            (200, r#"{"action":"continue","action":"let_through"}"#),
        ] {
            let (hooks, _) = hooks(code, body).await;
            let said = asked(&hooks).await;
            assert!(said.as_ref().is_err_and(|why| !why.contains("very-secret")), "{body}: {said:?}");
        }
    }

    #[tokio::test]
    async fn events_are_told_where_they_are_wanted() {
        let (hooks, heard) = hooks(200, "").await;
        let hooks = hooks.only(&["on_settled", "on_rejected"]);
        assert!(matches!(asked(&hooks).await, Ok(Verdict::Continue)));
        let receipt = RawValue::from_string(r#"{"success":true}"#.into()).unwrap();
        let event = Happened {
            item: "tool:search".into(),
            claim: Some("ab".into()),
            payer: None,
            offer: None,
            receipt: Some(receipt),
            reason: Some("word".into()),
            error: None,
        };
        hooks.on_settled(&event).await;
        hooks.on_rejected(&event).await;
        hooks.on_verified_payment_canceled(&event).await;
        let heard = heard.lock().unwrap();
        let events: Vec<&str> = heard.iter().map(|(_, body)| body["event"].as_str().unwrap()).collect();
        assert_eq!(events, ["on_settled", "on_rejected"]);
        assert_eq!(heard[0].1["receipt"]["success"], true);
    }
}
