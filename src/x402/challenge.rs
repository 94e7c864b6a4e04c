//! The challenge (`PaymentRequired`, core specification 5.1) and what an MCP answer is: a challenge, a broken one, a
//! request for input, or something else.
//!
//! A challenge that is to be paid must be right in every respect. What is *recognised* as one is far wider: after a
//! payment, taking a misshapen challenge for the tool's output would hide that the seller wants money again.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::{CHALLENGE_LIMITS, Offer, PAYMENT_IDENTIFIER, words};
use crate::json::{self, JsonError};

/// `PaymentRequired`, bounded and checked.
#[derive(Debug, Clone)]
pub struct Challenge {
    pub raw: Box<RawValue>,
    /// The seller's free text, at most 500 characters.
    pub error: Option<String>,
    pub resource_url: String,
    pub resource: Box<RawValue>,
    /// The entries of `accepts` that are well formed, in the seller's order; at least one.
    pub offers: Vec<Offer>,
    pub extensions: Option<Box<RawValue>>,
}

/// Why a challenge cannot be paid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the seller's payment challenge is broken: {}", self.word())]
pub enum Broken {
    /// One of the two copies of the MCP transport is not there, or is no JSON object.
    CopyMissing,
    CopiesDiffer,
    /// Over the bounds in bytes, depth or number of options.
    TooLarge,
    /// No option at all, or none that is well formed.
    AcceptsEmpty,
    /// `x402Version` is not the integer 2.
    Version,
    /// `resource` is no object with a `url`.
    Resource,
    /// `extensions` or `payment-identifier` has the wrong shape, or brings an identifier that is not the payer's.
    Extensions,
    /// A member twice, a wrong type, no JSON.
    Malformed,
    /// A challenge in a result that is not marked `isError: true`.
    NotMarked,
    /// A challenge inside a JSON-RPC error.
    ErrorForm,
}

impl Broken {
    /// The stable word for `details.reason`.
    pub fn word(self) -> &'static str {
        match self {
            Broken::CopyMissing => "copy_missing",
            Broken::CopiesDiffer => "copies_differ",
            Broken::TooLarge => "too_large",
            Broken::AcceptsEmpty => "accepts_empty",
            Broken::Version => "version",
            Broken::Resource => "resource",
            Broken::Extensions => "extensions",
            Broken::Malformed => "malformed",
            Broken::NotMarked => "not_marked",
            Broken::ErrorForm => "error_form",
        }
    }
}

/// What a seller's `tools/call` answered.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Right in every respect. After a payment: the seller asks again.
    Challenge(Box<Challenge>),
    /// It asks for money, and not as it should. After a payment this means the same as [`Answer::Challenge`].
    BrokenChallenge(Broken),
    /// MCP 2026-07-28 `resultType: "input_required"`, members as they arrived.
    InputRequired { input_requests: Option<Box<RawValue>>, request_state: Option<Box<RawValue>> },
    /// A tool result or a tool error that does not ask for money.
    Other,
}

impl Answer {
    pub fn asks_for_payment(&self) -> bool {
        matches!(self, Answer::Challenge(_) | Answer::BrokenChallenge(_))
    }
}

/// Options of one challenge; more are refused.
const MAX_OFFERS: usize = 100;
const MAX_URL_BYTES: usize = 2_048;

/// Classifies a raw `result` that has passed [`json::check`].
pub fn classify(result: &RawValue) -> Answer {
    let Ok(members) = json::members(result) else { return Answer::Other };
    let get = |name: &str| members.iter().find(|(key, value)| key == name && value.get() != "null").map(|(_, v)| *v);

    match get("resultType").and_then(json::string).as_deref() {
        Some("payment_required") => {
            return match get("paymentRequired") {
                Some(raw) => from(payment_required(raw)),
                None => Answer::BrokenChallenge(Broken::CopyMissing),
            };
        }
        Some("input_required") => {
            return Answer::InputRequired {
                input_requests: get("inputRequests").map(ToOwned::to_owned),
                request_state: get("requestState").map(ToOwned::to_owned),
            };
        }
        _ => {}
    }

    // The extension's member without its marker is still a demand for money.
    if get("paymentRequired").is_some_and(looks_like) {
        return Answer::BrokenChallenge(Broken::NotMarked);
    }
    let marked = get("isError").is_some_and(|flag| flag.get() != "false");
    let structured = get("structuredContent");
    let texts = texts(get("content"));
    let structured_asks = structured.is_some_and(looks_like);
    // In an answer that claims success only the place of the specification counts: a tool may talk about challenges.
    let considered = if marked { texts.len() } else { texts.len().min(1) };
    let text_asks = texts.iter().take(considered).any(|text| text.as_deref().is_some_and(text_looks_like));
    if !structured_asks && !text_asks {
        return Answer::Other;
    }
    if get("isError").map(RawValue::get) != Some("true") {
        return Answer::BrokenChallenge(Broken::NotMarked);
    }
    from(both_copies(structured, texts.first().and_then(Option::as_deref)))
}

/// Classifies a JSON-RPC error: 402 and -32042 carry a `PaymentRequired` with some sellers (`x402.md` 2.4). There is
/// only one copy and no binding, so it is recognised and never paid.
pub fn classify_error(code: i64, data: Option<&RawValue>) -> Answer {
    let asks = match data {
        Some(data) => {
            looks_like(data)
                || ["x402", "paymentRequired"].iter().any(|name| json::member(data, name).is_some_and(looks_like))
        }
        None => false,
    };
    if asks || matches!(code, 402 | -402) { Answer::BrokenChallenge(Broken::ErrorForm) } else { Answer::Other }
}

fn from(parsed: Result<Challenge, Broken>) -> Answer {
    match parsed {
        Ok(challenge) => Answer::Challenge(Box::new(challenge)),
        Err(broken) => Answer::BrokenChallenge(broken),
    }
}

/// The MCP transport's rule: `structuredContent` and `content[0].text`, equal as JSON values.
fn both_copies(structured: Option<&RawValue>, text: Option<&str>) -> Result<Challenge, Broken> {
    let (Some(structured), Some(text)) = (structured, text) else { return Err(Broken::CopyMissing) };
    let copy = json::check(text.as_bytes(), CHALLENGE_LIMITS).map_err(|e| match e {
        JsonError::TooLarge(_) | JsonError::TooDeep(_) => Broken::TooLarge,
        JsonError::Syntax(_) => Broken::CopyMissing,
        _ => Broken::Malformed,
    })?;
    if !json::equal(structured, copy) {
        return Err(Broken::CopiesDiffer);
    }
    payment_required(structured)
}

/// Parses one `PaymentRequired` object; also the body of the extension binding.
pub fn payment_required(raw: &RawValue) -> Result<Challenge, Broken> {
    json::check(raw.get().as_bytes(), CHALLENGE_LIMITS).map_err(|e| match e {
        JsonError::TooLarge(_) | JsonError::TooDeep(_) => Broken::TooLarge,
        _ => Broken::Malformed,
    })?;
    let members = json::members(raw).map_err(|_| Broken::Malformed)?;
    let get = |name: &str| members.iter().find(|(key, value)| key == name && value.get() != "null").map(|(_, v)| *v);

    if get("x402Version").map(RawValue::get) != Some("2") {
        return Err(Broken::Version);
    }
    let error = match get("error") {
        None => None,
        Some(text) => Some(words(&json::string(text).ok_or(Broken::Malformed)?, 500)),
    };
    let resource = get("resource").ok_or(Broken::Resource)?;
    let resource_url = json::member(resource, "url")
        .and_then(json::string)
        .filter(|url| (1..=MAX_URL_BYTES).contains(&url.len()))
        .ok_or(Broken::Resource)?
        .into_owned();
    let extensions = get("extensions");
    if let Some(extensions) = extensions {
        check_extensions(extensions)?;
    }
    let entries = match get("accepts") {
        None => return Err(Broken::AcceptsEmpty),
        Some(accepts) => json::elements(accepts).ok_or(Broken::Malformed)?,
    };
    if entries.len() > MAX_OFFERS {
        return Err(Broken::TooLarge);
    }
    let offers: Vec<Offer> = entries.into_iter().filter_map(|entry| Offer::parse(entry).ok()).collect();
    if offers.is_empty() {
        return Err(Broken::AcceptsEmpty);
    }
    Ok(Challenge {
        raw: raw.to_owned(),
        error,
        resource_url,
        resource: resource.to_owned(),
        offers,
        extensions: extensions.map(ToOwned::to_owned),
    })
}

/// The payload adds `info.id` to `payment-identifier` and may overwrite nothing, so whatever makes that impossible is
/// refused here, before anything is reserved. An `id` that the seller brings would be one that others know.
fn check_extensions(extensions: &RawValue) -> Result<(), Broken> {
    let members = json::members(extensions).map_err(|_| Broken::Extensions)?;
    let Some((_, identifier)) = members.iter().find(|(key, value)| key == PAYMENT_IDENTIFIER && value.get() != "null")
    else {
        return Ok(());
    };
    let inner = json::members(identifier).map_err(|_| Broken::Extensions)?;
    match inner.iter().find(|(key, _)| key == "info") {
        None => Ok(()),
        Some((_, info)) => match json::members(info) {
            Ok(info) if info.iter().all(|(key, _)| key != "id") => Ok(()),
            _ => Err(Broken::Extensions),
        },
    }
}

impl Challenge {
    /// Entries of `accepts` that were not well formed and are left out of `offers`.
    pub fn malformed_offers(&self) -> usize {
        let all = json::member(&self.raw, "accepts").and_then(json::elements).map_or(0, |entries| entries.len());
        all.saturating_sub(self.offers.len())
    }

    /// Whether the seller takes the payer's identifier (extension `payment-identifier`).
    pub fn takes_payment_identifier(&self) -> bool {
        self.extensions
            .as_deref()
            .and_then(|extensions| json::member(extensions, PAYMENT_IDENTIFIER))
            .is_some_and(|value| value.get() != "null")
    }
}

/// An object that has the version member in a spelling of the field, together with options or a v1 amount; or the
/// obsolete wrapper `{"x402/error": …}`.
fn looks_like(raw: &RawValue) -> bool {
    let Ok(members) = json::members(raw) else { return false };
    let has = |names: &[&str]| members.iter().any(|(key, _)| names.contains(&key.as_ref()));
    (has(&["x402Version", "x402_version"]) && has(&["accepts", "maxAmountRequired"])) || has(&["x402/error"])
}

/// The same for a text, which is not known to be JSON. One that is too large or has a key twice is judged by words.
fn text_looks_like(text: &str) -> bool {
    if !text.trim_start().starts_with('{') {
        return false;
    }
    match json::check(text.as_bytes(), CHALLENGE_LIMITS) {
        Ok(raw) => looks_like(raw),
        Err(JsonError::Syntax(_)) => false,
        Err(_) => {
            let has = |word: &str| text.contains(word);
            (has("\"x402Version\"") || has("\"x402_version\"")) && has("\"accepts\"") || has("\"x402/error\"")
        }
    }
}

/// The texts of `content`, by position; `None` for a block of another type.
fn texts(content: Option<&RawValue>) -> Vec<Option<Cow<'_, str>>> {
    let blocks = content.and_then(json::elements).unwrap_or_default();
    blocks
        .into_iter()
        .map(|block| {
            let members = json::members(block).ok()?;
            let get = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
            let is_text = get("type").and_then(json::string).as_deref() == Some("text");
            if is_text { get("text").and_then(json::string) } else { None }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Limits;

    const OFFER: &str = r#"{"scheme":"exact","network":"stellar:testnet","amount":"10000","asset":"CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA","payTo":"GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4","maxTimeoutSeconds":60,"extra":{"areFeesSponsored":true}}"#;

    fn check(text: &str) -> &RawValue {
        json::check(text.as_bytes(), Limits { bytes: 1 << 22, depth: 128 }).unwrap()
    }

    fn required() -> String {
        format!(
            r#"{{"x402Version":2,"error":"pay","resource":{{"url":"https://seller.example/mcp","tags":["a"]}},"accepts":[{OFFER}],"extensions":{{"payment-identifier":{{"info":{{"required":false}},"schema":{{}}}}}}}}"#
        )
    }

    fn result(structured: &str, text: &str) -> String {
        let text = serde_json::to_string(text).unwrap();
        format!(r#"{{"isError":true,"content":[{{"type":"text","text":{text}}}],"structuredContent":{structured}}}"#)
    }

    fn broken(result: &str) -> &'static str {
        match classify(check(result)) {
            Answer::BrokenChallenge(which) => which.word(),
            other => panic!("{other:?} for {result}"),
        }
    }

    #[test]
    fn both_copies_equal_as_values_are_a_challenge() {
        let spaced = required().replace("\"x402Version\":2", "\"x402Version\" : 2").replace("pay\"", "p\\u0061y\"");
        let result = result(&required(), &spaced);
        let Answer::Challenge(challenge) = classify(check(&result)) else { panic!("no challenge") };
        assert_eq!(challenge.raw.get(), required());
        assert_eq!(challenge.offers[0].raw.get(), OFFER);
        assert_eq!(challenge.resource_url, "https://seller.example/mcp");
        assert!(challenge.takes_payment_identifier());
        assert_eq!(challenge.malformed_offers(), 0);
    }

    #[test]
    fn the_extension_binding_needs_one_copy() {
        let result = format!(r#"{{"resultType":"payment_required","paymentRequired":{}}}"#, required());
        assert!(matches!(classify(check(&result)), Answer::Challenge(_)));
        assert_eq!(broken(r#"{"resultType":"payment_required"}"#), "copy_missing");
        let v1 = result.replace("\"x402Version\":2", "\"x402Version\":1");
        assert_eq!(broken(&v1), "version");
        assert_eq!(broken(&format!(r#"{{"resultType":"complete","paymentRequired":{}}}"#, required())), "not_marked");
    }

    #[test]
    fn every_broken_copy_has_its_word() {
        let good = required();
        let no_structured = result(&good, &good).replace("structuredContent", "other");
        assert_eq!(broken(&no_structured), "copy_missing");
        assert_eq!(broken(&format!(r#"{{"isError":true,"structuredContent":{good}}}"#)), "copy_missing");
        assert_eq!(broken(&format!(r#"{{"isError":true,"content":[],"structuredContent":{good}}}"#)), "copy_missing");
        assert_eq!(broken(&result(&good, "Payment required")), "copy_missing");
        let second = result(&good, &good)
            .replace("[{\"type\":\"text\"", "[{\"type\":\"text\",\"text\":\"x\"},{\"type\":\"text\"");
        assert_eq!(broken(&second), "copy_missing", "the copy must be content[0]");
        assert_eq!(broken(&result(&good, &good.replace("10000", "10001"))), "copies_differ");
        assert_eq!(broken(&result(r#"{"rows":[]}"#, &good)), "copies_differ");
        let twice = good.replacen("{\"x402Version\":2", "{\"x402Version\":2,\"x402Version\":2", 1);
        assert_eq!(broken(&result(&good, &twice)), "malformed");
    }

    #[test]
    fn a_challenge_over_the_bounds_is_too_large() {
        let big = required().replace("\"pay\"", &format!("\"{}\"", "x".repeat(262_144)));
        assert_eq!(broken(&result(&big, &big)), "too_large");
        assert_eq!(broken(&format!(r#"{{"resultType":"payment_required","paymentRequired":{big}}}"#)), "too_large");
        assert_eq!(broken(&result("{}", &big)), "too_large", "text only");
        let many = required().replace(OFFER, &vec![OFFER; 101].join(","));
        assert_eq!(broken(&result(&many, &many)), "too_large");
        let deep = required().replace("\"schema\":{}", &format!("\"schema\":{}1{}", "[".repeat(80), "]".repeat(80)));
        assert_eq!(broken(&result(&deep, &deep)), "too_large");
    }

    #[test]
    fn the_text_copy_may_be_exactly_at_the_bound() {
        let empty = required().replace("\"pay\"", "\"\"");
        let full = empty.replace("\"error\":\"\"", &format!("\"error\":\"{}\"", "x".repeat(262_144 - empty.len())));
        assert_eq!(full.len(), 262_144);
        assert!(matches!(classify(check(&result(&full, &full))), Answer::Challenge(_)));
    }

    #[test]
    fn malformed_contents_are_refused_with_a_word() {
        let both = |from: &str, to: &str| {
            let text = required().replace(from, to);
            assert_ne!(text, required(), "{from}");
            broken(&result(&text, &text))
        };
        for version in ["1", "3", "\"2\"", "2.0", "null"] {
            assert_eq!(both("\"x402Version\":2", &format!("\"x402Version\":{version}")), "version", "{version}");
        }
        assert_eq!(both(OFFER, ""), "accepts_empty");
        assert_eq!(both(&format!("[{OFFER}]"), "null"), "accepts_empty");
        assert_eq!(both(&format!("[{OFFER}]"), "{}"), "malformed");
        assert_eq!(both("\"10000\"", "\"1e4\""), "accepts_empty");
        assert_eq!(both("\"pay\"", "7"), "malformed");
        assert_eq!(both("\"url\"", "\"uri\""), "resource");
        assert_eq!(both(r#"{"url":"https://seller.example/mcp","tags":["a"]}"#, "\"https://a\""), "resource");
        assert_eq!(both("{\"required\":false}", "{\"id\":\"x\"}"), "extensions");
        assert_eq!(both("{\"required\":false}", "7"), "extensions");
        assert_eq!(both(r#"{"info":{"required":false},"schema":{}}"#, "true"), "extensions");
    }

    #[test]
    fn malformed_offers_beside_good_ones_are_counted_and_left_out() {
        let bad = OFFER.replace("\"10000\"", "10000");
        let text = required().replace(OFFER, &format!("{bad},7,{OFFER}"));
        let result = result(&text, &text);
        let Answer::Challenge(challenge) = classify(check(&result)) else { panic!("no challenge") };
        assert_eq!((challenge.offers.len(), challenge.malformed_offers()), (1, 2));
    }

    #[test]
    fn challenges_in_whatever_shape_are_recognised() {
        let good = required();
        let v1 = r#"{"x402Version":1,"error":"x","accepts":[{"maxAmountRequired":"5"}]}"#;
        for shape in [
            format!(r#"{{"content":[],"structuredContent":{good}}}"#),
            format!(r#"{{"isError":"true","content":[],"structuredContent":{good}}}"#),
            format!(r#"{{"isError":true,"content":[],"structuredContent":{v1}}}"#),
            result("{}", v1),
            result("null", v1),
            format!(
                r#"{{"isError":true,"content":[{{"type":"text","text":"sorry"}},{{"type":"text","text":{}}}]}}"#,
                serde_json::to_string(v1).unwrap()
            ),
            r#"{"isError":true,"content":[{"type":"text","text":"{\"x402/error\":{\"code\":402,\"data\":{}}}"}]}"#
                .into(),
            r#"{"isError":true,"structuredContent":{"x402_version":2,"accepts":[]},"content":[]}"#.into(),
            format!(r#"{{"paymentRequired":{good}}}"#),
        ] {
            assert!(classify(check(&shape)).asks_for_payment(), "{shape}");
        }
        assert!(classify_error(402, None).asks_for_payment());
        assert!(classify_error(-32042, Some(check(&good))).asks_for_payment());
        assert!(classify_error(-32042, Some(check(&format!(r#"{{"x402":{good}}}"#)))).asks_for_payment());
        assert!(!classify_error(-32042, Some(check(r#"{"elicitations":[]}"#))).asks_for_payment());
        assert!(!classify_error(-32603, None).asks_for_payment());
    }

    #[test]
    fn outputs_that_only_talk_about_challenges_are_outputs() {
        let good = required();
        for other in [
            r#"{"content":[{"type":"text","text":"x402Version and accepts"}]}"#.to_owned(),
            r#"{"content":[],"structuredContent":{"x402Version":2,"resources":[]}}"#.into(),
            format!(
                r#"{{"content":[{{"type":"text","text":"see"}},{{"type":"text","text":{}}}]}}"#,
                serde_json::to_string(&good).unwrap()
            ),
            format!(r#"{{"content":[],"structuredContent":{{"page":{good}}}}}"#),
            r#"{"isError":true,"content":[{"type":"text","text":"no such city"}]}"#.into(),
            "[]".into(),
        ] {
            assert!(matches!(classify(check(&other)), Answer::Other), "{other}");
        }
    }

    #[test]
    fn input_required_keeps_its_members() {
        let text = r#"{"resultType":"input_required","inputRequests":{"a":{"method":"m"}},"requestState":"s"}"#;
        let Answer::InputRequired { input_requests, request_state } = classify(check(text)) else { panic!("none") };
        assert_eq!(input_requests.unwrap().get(), r#"{"a":{"method":"m"}}"#);
        assert_eq!(request_state.unwrap().get(), "\"s\"");
    }
}
