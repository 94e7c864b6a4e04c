//! What a caller gets instead of the output: the demand for a payment in the form that its revision and its
//! capabilities take, and the reason, which is stable. A fault of ours is never a challenge: nobody may read it as "pay
//! again".

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Kind;
use super::listing;
use super::prices::Item;
use crate::json;
use crate::mcp::{RequestContext, Revision};
use crate::x402::{MCP_EXTENSION, META_PAYMENT, META_PAYMENT_RESPONSE, VERSION, words};

/// The form of a challenge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// `isError: true` with the challenge in `structuredContent` and as text (MCP transport of x402). For resources and
    /// prompts, of which no merged text speaks, the same with the member that a strict client asks for.
    Envelope(Kind),
    /// `resultType: "payment_required"` (extension `org.x402/payment`), for a request that declares it.
    Extension,
}

impl Binding {
    pub fn of(kind: Kind, revision: Revision, client_capabilities: Option<&RawValue>) -> Binding {
        let extensions = client_capabilities.and_then(|capabilities| json::member(capabilities, "extensions"));
        let declared = extensions.and_then(|extensions| json::member(extensions, MCP_EXTENSION));
        match declared {
            Some(value) if revision.stateless() && value.get().starts_with('{') => Binding::Extension,
            _ => Binding::Envelope(kind),
        }
    }

    pub fn of_request(kind: Kind, context: &RequestContext) -> Binding {
        Binding::of(kind, context.revision, context.client_capabilities())
    }
}

/// Why there is no output. The word is stable, and begins the challenge's `error`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    PaymentRequired(Option<Misplaced>),
    InvalidPayload(&'static str),
    InvalidVersion,
    NoMatchingRequirements,
    ExtensionEcho(String),
    IdentifierRequired,
    IdentifierConflict,
    AlreadyUsed,
    AlreadySettled,
    SettlementFailed(String),
    /// The facilitator's own words about a payment that it does not take.
    Facilitator(String),
}

impl Reason {
    pub fn word(&self) -> &'static str {
        match self {
            Reason::PaymentRequired(_) => "payment_required",
            Reason::InvalidPayload(_) => "invalid_payload",
            Reason::InvalidVersion => "invalid_x402_version",
            Reason::NoMatchingRequirements => "no_matching_requirements",
            Reason::ExtensionEcho(_) => "extension_echo_mismatch",
            Reason::IdentifierRequired => "payment_identifier_required",
            Reason::IdentifierConflict => "payment_identifier_conflict",
            Reason::AlreadyUsed => "payment_already_used",
            Reason::AlreadySettled => "already_settled",
            Reason::SettlementFailed(_) => "settlement_failed",
            Reason::Facilitator(_) => "payment_invalid",
        }
    }

    /// The challenge's `error`.
    fn text(&self) -> String {
        let detail = match self {
            Reason::PaymentRequired(None) => "Payment required: repeat the request with a payment in _meta".to_owned(),
            Reason::PaymentRequired(Some(place)) => place.hint().to_owned(),
            Reason::InvalidPayload(what) => (*what).to_owned(),
            Reason::InvalidVersion => format!("x402Version must be the number {VERSION}"),
            Reason::NoMatchingRequirements => "accepted equals none of the offers in every member".to_owned(),
            Reason::ExtensionEcho(name) => format!("extensions.{} is not as it was offered", words(name, 64)),
            Reason::IdentifierRequired => "extensions.payment-identifier.info.id is missing".to_owned(),
            Reason::IdentifierConflict => "the payment identifier belongs to another payment or request".to_owned(),
            Reason::AlreadyUsed => "this payment was used for another request".to_owned(),
            Reason::AlreadySettled => {
                "this payment bought its output, which goes only to whoever proves to be its payer".to_owned()
            }
            Reason::SettlementFailed(said) | Reason::Facilitator(said) => words(said, 200),
        };
        format!("{}: {detail}", self.word())
    }
}

/// A payment that stands where this protocol does not look for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misplaced {
    HttpHeader,
    /// `x402.payment` and other keys of earlier implementations.
    LegacyKey,
    /// In `params` or `arguments`.
    OutsideMeta,
    /// Base64, as in the HTTP transport.
    Encoded,
}

impl Misplaced {
    fn hint(self) -> &'static str {
        match self {
            Misplaced::HttpHeader => {
                "a payment in an HTTP header is not read on MCP: put the object into params._meta[\"x402/payment\"]"
            }
            Misplaced::LegacyKey => "the payment stands under another key: it must be params._meta[\"x402/payment\"]",
            Misplaced::OutsideMeta => "the payment stands outside of _meta: it must be params._meta[\"x402/payment\"]",
            Misplaced::Encoded => "_meta[\"x402/payment\"] must be a JSON object, not text",
        }
    }
}

/// Keys that were or are in use for a payment, none of them this protocol's.
const LEGACY_KEYS: [&str; 6] =
    ["x402.payment", "x402.org/payment", "org.x402/payment", "x402Payment", "x-payment", "payment"];
/// Headers of the HTTP transport, versions 1 and 2 (lower case).
pub const PAYMENT_HEADERS: [&str; 2] = ["x-payment", "payment-signature"];

/// What a request brings as its payment.
#[derive(Debug, Clone, Copy)]
pub enum Presented<'a> {
    Payment(&'a RawValue),
    Nothing,
    Elsewhere(Misplaced),
}

impl<'a> Presented<'a> {
    /// `header`: one of [`PAYMENT_HEADERS`] is there.
    pub fn read(params: &'a RawValue, header: bool) -> Presented<'a> {
        let meta = json::member(params, "_meta");
        if let Some(payment) = meta.and_then(|meta| json::member(meta, META_PAYMENT)) {
            return match payment.get().as_bytes().first() {
                Some(b'"') => Presented::Elsewhere(Misplaced::Encoded),
                _ => Presented::Payment(payment),
            };
        }
        let has = |object: Option<&RawValue>, keys: &[&str]| {
            object.and_then(|object| json::members(object).ok()).is_some_and(|members| {
                members.iter().any(|(key, _)| keys.iter().any(|known| key.eq_ignore_ascii_case(known)))
            })
        };
        if has(meta, &LEGACY_KEYS) {
            return Presented::Elsewhere(Misplaced::LegacyKey);
        }
        // A tool may have an argument `payment` of its own.
        if has(Some(params), &[META_PAYMENT]) || has(json::member(params, "arguments"), &[META_PAYMENT]) {
            return Presented::Elsewhere(Misplaced::OutsideMeta);
        }
        match header {
            true => Presented::Elsewhere(Misplaced::HttpHeader),
            false => Presented::Nothing,
        }
    }
}

/// `PaymentRequired` (core specification 5.1) for one request of one item. `key`: the request's name or URI verbatim.
pub fn required(item: &Item, key: &str, reason: &Reason, extensions: &RawValue) -> Box<RawValue> {
    let about = &item.about;
    let mut resource = serde_json::Map::new();
    let url = about.url.clone().unwrap_or_else(|| match item.kind {
        Kind::Tool => format!("mcp://tool/{key}"),
        Kind::Resource => key.to_owned(),
        Kind::Prompt => format!("mcp://prompt/{key}"),
    });
    resource.insert("url".into(), url.into());
    let description = about.description.clone().unwrap_or_else(|| match item.kind {
        Kind::Tool => format!("Tool: {key}"),
        Kind::Resource => format!("Resource: {key}"),
        Kind::Prompt => format!("Prompt: {key}"),
    });
    resource.insert("description".into(), description.into());
    resource.insert("mimeType".into(), about.mime_type.as_deref().unwrap_or("application/json").into());
    if let Some(name) = &about.service_name {
        resource.insert("serviceName".into(), name.as_str().into());
    }
    if !about.tags.is_empty() {
        resource.insert("tags".into(), about.tags.clone().into());
    }
    if let Some(url) = &about.icon_url {
        resource.insert("iconUrl".into(), url.as_str().into());
    }
    #[derive(serde::Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Required<'a> {
        #[serde(rename = "x402Version")]
        version: u8,
        error: String,
        resource: Value,
        accepts: &'a RawValue,
        extensions: &'a RawValue,
    }
    let accepts = listing::accepts(item);
    let resource = Value::Object(resource);
    json::raw(&Required { version: VERSION, error: reason.text(), resource, accepts: &accepts, extensions })
}

/// The raw `result` that carries it. `receipt`: of a settlement that has happened, or of one that failed.
pub fn result(binding: Binding, required: &RawValue, receipt: Option<&RawValue>) -> Box<RawValue> {
    let meta = match receipt {
        Some(receipt) => format!(r#","_meta":{{"{META_PAYMENT_RESPONSE}":{}}}"#, receipt.get()),
        None => String::new(),
    };
    let text = match binding {
        Binding::Extension => {
            format!(r#"{{"resultType":"payment_required","paymentRequired":{}{meta}}}"#, required.get())
        }
        Binding::Envelope(kind) => {
            let strict = match kind {
                Kind::Tool => "",
                Kind::Resource => r#","contents":[]"#,
                Kind::Prompt => r#","messages":[]"#,
            };
            let copy = json::raw(required.get());
            format!(
                r#"{{"content":[{{"type":"text","text":{}}}],"structuredContent":{},"isError":true{strict}{meta}}}"#,
                copy.get(),
                required.get()
            )
        }
    };
    RawValue::from_string(text).unwrap_or_else(|_| json::raw(&json!({"isError": true, "content": []})))
}

/// An answer to a payment that is no demand for another one: it must not look like a challenge to anybody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withheld {
    /// The first request with this payment is not over.
    InProgress,
    /// What became of the settlement is not known yet; repeat the identical request later.
    SettlementUnknown,
    /// Paid; the output is no longer kept.
    AnswerExpired,
    /// Paid; the output was too large to keep.
    AnswerTooLarge,
    /// Paid; the handler failed as often as it may be run for one payment.
    RunsExhausted,
}

impl Withheld {
    pub fn word(self) -> &'static str {
        match self {
            Withheld::InProgress => "in_progress",
            Withheld::SettlementUnknown => "settlement_unknown",
            Withheld::AnswerExpired => "answer_expired",
            Withheld::AnswerTooLarge => "answer_too_large",
            Withheld::RunsExhausted => "runs_exhausted",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Withheld::InProgress => "This payment's request is still running. Repeat it later with the same payment.",
            Withheld::SettlementUnknown => {
                "It is not known yet whether this payment was settled. Do not pay again: repeat the request later with \
                 the same payment."
            }
            Withheld::AnswerExpired => "This payment was settled and its output is no longer kept.",
            Withheld::AnswerTooLarge => "This payment was settled and its output was too large to be kept.",
            Withheld::RunsExhausted => "This payment was settled and the request failed too often to be run again.",
        }
    }

    /// The raw `result`, with the receipt where there is one.
    pub fn result(self, kind: Kind, receipt: Option<&RawValue>) -> Box<RawValue> {
        let mut result = json!({
            "content": [{"type": "text", "text": format!("{}: {}", self.word(), self.text())}],
            "isError": true,
            "_meta": {"tollway/reason": self.word()},
        });
        match kind {
            Kind::Tool => {}
            Kind::Resource => result["contents"] = json!([]),
            Kind::Prompt => result["messages"] = json!([]),
        }
        let result = json::raw(&result);
        receipt.map_or_else(|| result.clone(), |receipt| with_receipt(&result, receipt).unwrap_or(result.clone()))
    }
}

/// The result with `_meta["x402/payment-response"]`, the receipt's bytes and all other bytes unchanged. `None` where the
/// result is no object.
pub fn with_receipt(result: &RawValue, receipt: &RawValue) -> Option<Box<RawValue>> {
    super::splice::with_inner(result, "_meta", &[(META_PAYMENT_RESPONSE, receipt.get())])
}

#[cfg(test)]
mod tests {
    use super::super::prices::tests::item;
    use super::*;
    use crate::x402::{Answer, classify};

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn asked(kind: Kind, key: &str) -> Box<RawValue> {
        required(&item(kind, key, 7), key, &Reason::PaymentRequired(None), &raw("{}"))
    }

    #[test]
    fn every_form_is_a_challenge_to_a_strict_buyer() {
        for kind in Kind::ALL {
            let required = asked(kind, "x:y");
            for binding in [Binding::Envelope(kind), Binding::Extension] {
                for receipt in [None, Some(raw(r#"{"success":false}"#))] {
                    let result = result(binding, &required, receipt.as_deref());
                    let Answer::Challenge(challenge) = classify(&result) else { panic!("{binding:?} {result}") };
                    assert_eq!(challenge.raw.get(), required.get());
                    let meta = json::member(&result, "_meta").and_then(|m| json::member(m, META_PAYMENT_RESPONSE));
                    assert_eq!(meta.map(RawValue::get), receipt.as_deref().map(RawValue::get));
                }
            }
        }
        let members = |kind| json::raw(&result(Binding::Envelope(kind), &asked(kind, "x:y"), None)).get().to_owned();
        assert!(
            members(Kind::Resource).contains(r#""contents":[]"#) && members(Kind::Prompt).contains(r#""messages":[]"#)
        );
        assert!(!members(Kind::Tool).contains("contents") && !members(Kind::Tool).contains("messages"));
    }

    #[test]
    fn the_resource_is_named_verbatim_or_as_configured() {
        let url = |required: &RawValue| {
            json::string(json::member(json::member(required, "resource").unwrap(), "url").unwrap())
                .unwrap()
                .into_owned()
        };
        assert_eq!(url(&asked(Kind::Tool, "search")), "mcp://tool/search");
        assert_eq!(url(&asked(Kind::Prompt, "a b")), "mcp://prompt/a b");
        assert_eq!(url(&asked(Kind::Resource, "file:///%61")), "file:///%61");
        let mut public = item(Kind::Tool, "search", 7);
        public.about.url = Some("https://seller.example/mcp".into());
        let required = required(&public, "search", &Reason::InvalidVersion, &raw("{}"));
        assert_eq!(url(&required), "https://seller.example/mcp");
        assert!(required.get().contains(r#""description":"Tool: search""#), "{required}");
        assert!(required.get().contains(r#""error":"invalid_x402_version: "#), "{required}");
    }

    #[test]
    fn the_extension_is_used_exactly_where_a_request_declares_it() {
        let caps = raw(r#"{"extensions":{"org.x402/payment":{}}}"#);
        let binding = |revision, caps| Binding::of(Kind::Tool, revision, caps);
        assert_eq!(binding(Revision::V2026_07_28, Some(&*caps)), Binding::Extension);
        assert_eq!(binding(Revision::V2025_11_25, Some(&*caps)), Binding::Envelope(Kind::Tool));
        assert_eq!(binding(Revision::V2026_07_28, None), Binding::Envelope(Kind::Tool));
        for other in [r#"{"extensions":{}}"#, r#"{"extensions":{"org.x402/payment":null}}"#, "{}"] {
            let caps = raw(other);
            let found = Binding::of(Kind::Tool, Revision::V2026_07_28, Some(&caps));
            assert_eq!(found, Binding::Envelope(Kind::Tool), "{other}");
        }
    }

    #[test]
    fn a_payment_in_the_wrong_place_gets_a_hint() {
        let read = |params: &str, header| match Presented::read(&raw(params), header) {
            Presented::Payment(_) => "payment",
            Presented::Nothing => "nothing",
            Presented::Elsewhere(place) => match place {
                Misplaced::HttpHeader => "header",
                Misplaced::LegacyKey => "legacy",
                Misplaced::OutsideMeta => "outside",
                Misplaced::Encoded => "encoded",
            },
        };
        for (params, header, expected) in [
            (r#"{"_meta":{"x402/payment":{}}}"#, true, "payment"),
            (r#"{"_meta":{"x402/payment":"eyJ9"}}"#, false, "encoded"),
            (r#"{"_meta":{"x402.payment":{}}}"#, false, "legacy"),
            (r#"{"_meta":{"X402/Payment":{}}}"#, false, "nothing"),
            (r#"{"x402/payment":{}}"#, false, "outside"),
            (r#"{"arguments":{"x402/payment":{}}}"#, false, "outside"),
            (r#"{"arguments":{"payment":"visa"}}"#, false, "nothing"),
            (r#"{"name":"x"}"#, true, "header"),
            (r#"{"name":"x"}"#, false, "nothing"),
        ] {
            assert_eq!(read(params, header), expected, "{params}");
        }
        for place in [Misplaced::HttpHeader, Misplaced::LegacyKey, Misplaced::OutsideMeta, Misplaced::Encoded] {
            let text = Reason::PaymentRequired(Some(place)).text();
            assert!(text.starts_with("payment_required: ") && text.contains("x402/payment"), "{text}");
        }
    }

    #[test]
    fn what_is_withheld_after_a_payment_never_asks_for_another() {
        let receipt = raw(r#"{"success":true,"transaction":"ab","network":"stellar:testnet"}"#);
        for kind in Kind::ALL {
            for withheld in [
                Withheld::InProgress,
                Withheld::SettlementUnknown,
                Withheld::AnswerExpired,
                Withheld::AnswerTooLarge,
                Withheld::RunsExhausted,
            ] {
                let result = withheld.result(kind, Some(&receipt));
                assert!(matches!(classify(&result), Answer::Other), "{result}");
                assert!(result.get().contains(receipt.get()) && result.get().contains(withheld.word()), "{result}");
            }
        }
    }

    #[test]
    fn the_facilitators_words_are_kept_and_bounded() {
        let said = format!("invalid_exact_stellar_payload_wrong_amount {}", "x".repeat(900));
        let text = Reason::Facilitator(said).text();
        assert!(text.starts_with("payment_invalid: invalid_exact_stellar_payload_wrong_amount "), "{text}");
        assert!(text.len() < 300);
    }
}
