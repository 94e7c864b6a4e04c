//! Payment objects: what a seller's answer is, its challenge, its options, its receipt, and what we build of them.

use serde_json::value::RawValue;

use super::MAX_WORDS;
use crate::json::{self, Limits};
use crate::money::{Amount, PaymentId};
use crate::x402::{self, Answer, Challenge, Offer, Settlement};

const LIMITS: Limits = Limits { bytes: 1 << 16, depth: 64 };

pub fn run(data: &[u8]) {
    let Ok(raw) = json::check(data, LIMITS) else {
        words(&String::from_utf8_lossy(data));
        return;
    };
    match x402::classify(raw) {
        Answer::Challenge(found) => {
            assert!(x402::classify(raw).asks_for_payment());
            challenge(&found);
        }
        Answer::InputRequired { input_requests, request_state } => {
            for part in [input_requests, request_state].into_iter().flatten() {
                assert!(raw.get().contains(part.get()), "a byte was changed");
            }
        }
        Answer::BrokenChallenge(broken) => assert!(!broken.word().is_empty()),
        Answer::Other => {}
    }
    if let Ok(found) = x402::payment_required(raw) {
        assert_eq!(found.raw.get(), raw.get(), "a byte was changed");
        // The specification's own form of this challenge is one, marked or not.
        let text = json::raw(raw.get());
        let result = |mark: &str| {
            let text = format!(r#"{{"content":[{{"type":"text","text":{text}}}],"structuredContent":{raw}{mark}}}"#);
            RawValue::from_string(text).unwrap()
        };
        assert!(matches!(x402::classify(&result(r#","isError":true"#)), Answer::Challenge(_)));
        assert!(matches!(x402::classify(&result("")), Answer::BrokenChallenge(_)), "an unmarked challenge passed");
        challenge(&found);
    }
    if let Ok(found) = Offer::parse(raw) {
        assert_eq!(found.raw.get(), raw.get(), "a byte was changed");
        offer(&found);
    }
    for found in [Settlement::parse(raw).ok(), Settlement::from_result(raw).ok().flatten()].into_iter().flatten() {
        settlement(&found);
    }
    if let Ok(Some(found)) = Settlement::from_error_data(raw) {
        settlement(&found);
    }
    for code in [402, -32042, -32603] {
        let _ = x402::classify_error(code, Some(raw));
    }
    x402::bazaar::declaration(Some(raw));
}

fn challenge(challenge: &Challenge) {
    let again = x402::payment_required(&challenge.raw).unwrap_or_else(|e| panic!("read once, then refused: {e}"));
    assert_eq!(again.offers.len(), challenge.offers.len());
    assert!((1..=100).contains(&challenge.offers.len()));
    assert!((1..=2048).contains(&challenge.resource_url.len()));
    if let Some(error) = &challenge.error {
        assert!(error.chars().count() <= 500 && !error.contains(char::is_control));
    }
    let all = json::member(&challenge.raw, "accepts").and_then(json::elements).unwrap();
    assert_eq!(all.len(), challenge.offers.len() + challenge.malformed_offers());
    challenge.offers.iter().for_each(offer);
    for found in &challenge.offers {
        payload(challenge, found);
    }
}

fn offer(offer: &Offer) {
    let written = |name: &str| json::member(&offer.raw, name).and_then(json::string).unwrap().into_owned();
    assert_eq!(written("amount"), offer.amount.to_string(), "an amount is printed otherwise than it was written");
    assert_eq!(written("network"), offer.network.as_str());
    assert_eq!(written("asset"), offer.asset.as_str());
    assert_eq!(written("payTo"), offer.pay_to);
    assert_eq!(written("scheme"), offer.scheme);
    assert!((1..=31_536_000).contains(&offer.max_timeout_seconds));
    assert_eq!(offer.amount.to_string().parse::<Amount>().unwrap(), offer.amount);
    if let Some(amount) = offer.amount.to_i128() {
        assert_eq!(Amount::from_i128(amount), Some(offer.amount));
    }
    let again = Offer::parse(&offer.raw).unwrap();
    assert!(offer.differing_members(&again).is_empty(), "an offer differs from itself");
    assert_eq!((offer.flow(), offer.unit()), (again.flow(), again.unit()));
}

/// Whatever a challenge that was accepted brings, the payload echoes it and adds the identifier where it is taken.
fn payload(challenge: &Challenge, offer: &Offer) {
    let id = PaymentId::from_bytes([0x5a; 32]);
    let scheme = RawValue::from_string(r#"{"transaction":"AAAA"}"#.into()).unwrap();
    let extensions = challenge.extensions.as_deref();
    let built = x402::payment_payload(offer, &scheme, Some(&challenge.resource), extensions, id)
        .unwrap_or_else(|e| panic!("a challenge was accepted that cannot be answered: {e}"));
    let own = Limits { bytes: 1 << 20, depth: 70 };
    let built = json::check(built.get().as_bytes(), own).unwrap_or_else(|e| panic!("the payload {e}"));
    let member = |name: &str| json::member(built, name);
    assert_eq!(member("accepted").unwrap().get(), offer.raw.get());
    assert_eq!(member("resource").unwrap().get(), challenge.resource.get());
    assert_eq!(member("extensions").is_some(), extensions.is_some());
    let (Some(sent), Some(came)) = (member("extensions"), extensions) else { return };
    let marker = format!("\"id\":\"{}\"", id.to_hex());
    if challenge.takes_payment_identifier() {
        let identifier = json::member(sent, x402::PAYMENT_IDENTIFIER).unwrap();
        let info = json::member(identifier, "info").unwrap();
        assert_eq!(json::string(json::member(info, "id").unwrap()).unwrap(), id.to_hex());
        for (key, value) in json::members(came).unwrap() {
            if key != x402::PAYMENT_IDENTIFIER {
                assert_eq!(json::member(sent, &key).unwrap().get(), value.get(), "a byte was changed");
            }
        }
    } else {
        assert_eq!(sent.get(), came.get(), "a byte was changed");
        assert!(!sent.get().contains(&marker));
    }
}

fn settlement(settlement: &Settlement) {
    if let Some(reason) = &settlement.error_reason {
        assert!(reason.chars().count() <= 200 && !reason.contains(char::is_control));
    }
    assert!(settlement.transaction.len() <= 256 && settlement.network.len() <= 64);
    assert!(!(settlement.success && settlement.is_pending()));
}

/// What is shown of a foreign text: one bounded line without anything as long as an identifier.
fn words(text: &str) {
    let shown = x402::words(text, MAX_WORDS);
    assert!(shown.chars().count() <= MAX_WORDS && !shown.contains(char::is_control));
    let token = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=' | '_' | '-');
    for run in shown.split(|c| !token(c)) {
        assert!(run.len() < 64, "{run} could be a secret");
        assert!(!(run.len() == 56 && run.starts_with('S') && run.bytes().all(|b| b.is_ascii_alphanumeric())), "{run}");
    }
}
