//! The extensions of a challenge: what the gate offers, and what a payer must have echoed (core specification 5.1,
//! `payment-identifier`, `builder-code`, `bazaar`).

use std::fmt;

use serde_json::json;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use super::challenge::Reason;
use super::prices::Item;
use crate::json;
use crate::x402::PAYMENT_IDENTIFIER;

const BUILDER_CODE: &str = "builder-code";
const BAZAAR: &str = "bazaar";
/// The identifier's key in an earlier implementation.
const LEGACY_IDENTIFIER: &str = "paymentIdentifier";
const MAX_SERVICE_CODES: usize = 10;

/// The raw `extensions` object of an item's challenge. `bazaar`: see [`declaration`].
pub fn advertised(item: &Item, bazaar: Option<&RawValue>) -> Box<RawValue> {
    let identifier = json!({
        "info": {"required": item.identifier_required},
        "schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "required": {"type": "boolean"},
                "id": {"type": "string", "minLength": 16, "maxLength": 128, "pattern": "^[a-zA-Z0-9_-]+$"},
            },
            "required": ["required"],
        },
    });
    let bazaar = bazaar.map_or_else(String::new, |bazaar| format!(r#""{BAZAAR}":{},"#, bazaar.get()));
    let text = format!(r#"{{{bazaar}"{PAYMENT_IDENTIFIER}":{identifier}}}"#);
    RawValue::from_string(text).unwrap_or_else(|_| json::raw(&json!({PAYMENT_IDENTIFIER: identifier})))
}

/// The bazaar's declaration of a tool, from the upstream's own entry in `tools/list`. `None` for an entry without a
/// usable input schema, or one with a reference to another document, which a catalog would have to fetch.
pub fn declaration(tool: &RawValue) -> Option<Box<RawValue>> {
    let name = json::member(tool, "name").and_then(json::string)?;
    let schema = json::member(tool, "inputSchema").filter(|schema| schema.get().starts_with('{'))?;
    if foreign_reference(schema) {
        return None;
    }
    let description = match json::member(tool, "description").and_then(json::string) {
        Some(text) => {
            let bounded: String = text.chars().take(2_000).collect();
            format!(r#","description":{}"#, json::raw(&bounded).get())
        }
        None => String::new(),
    };
    let shape = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"input": {
            "type": "object",
            "properties": {
                "type": {"const": "mcp"}, "toolName": {"type": "string"}, "inputSchema": {"type": "object"},
                "description": {"type": "string"},
            },
            "required": ["type", "toolName", "inputSchema"],
        }},
        "required": ["input"],
    });
    let text = format!(
        r#"{{"info":{{"input":{{"type":"mcp","toolName":{},"inputSchema":{}{description}}}}},"schema":{shape}}}"#,
        json::raw(&*name).get(),
        schema.get()
    );
    RawValue::from_string(text).ok()
}

fn foreign_reference(schema: &RawValue) -> bool {
    if let Ok(members) = json::members(schema) {
        return members.iter().any(|(name, value)| match name.as_ref() {
            "$ref" | "$dynamicRef" => json::string(value).is_some_and(|target| !target.starts_with('#')),
            _ => foreign_reference(value),
        });
    }
    json::elements(schema).is_some_and(|elements| elements.into_iter().any(foreign_reference))
}

/// The payer's own name for one logical payment: 16 to 128 of `[A-Za-z0-9_-]`. With it an output is handed over, so it
/// is kept hashed, and Debug does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Identifier(String);

impl fmt::Debug for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identifier(…)")
    }
}

impl Identifier {
    fn parse(text: &str) -> Option<Identifier> {
        let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
        ((16..=128).contains(&text.len()) && text.bytes().all(good)).then(|| Identifier(text.to_owned()))
    }

    /// What is stored and compared.
    pub fn hash(&self) -> [u8; 32] {
        Sha256::new().chain_update("tollway payment identifier\0").chain_update(&self.0).finalize().into()
    }
}

/// What a payment brings in its `extensions`.
#[derive(Debug, Default)]
pub struct Echoed {
    pub identifier: Option<Identifier>,
    /// The identifier stood under its old key.
    pub legacy_identifier: bool,
}

/// Reads the payment's extensions and compares them with what was offered; the bazaar's with each of the declarations
/// that may have been (`declared`), because the upstream's list can change between challenge and payment. An extension
/// that is left out altogether is no alteration: only the identifier can be obligatory.
pub fn check(
    offered: &RawValue,
    declared: &[Box<RawValue>],
    payment: Option<&RawValue>,
    item: &Item,
) -> Result<Echoed, Reason> {
    let echoed = identifier(payment)?;
    let payment = payment.filter(|value| value.get() != "null");
    if let Some(payment) = payment {
        let brought = json::members(payment).map_err(|_| Reason::InvalidPayload("extensions is no object"))?;
        let get =
            |name: &str| brought.iter().find(|(key, value)| key == name && value.get() != "null").map(|(_, v)| *v);
        for (name, offer) in json::members(offered).unwrap_or_default() {
            let (Some(info), Some(brought)) = (json::member(offer, "info"), get(&name)) else { continue };
            let brought = json::member(brought, "info");
            let echoes = |info: &RawValue| {
                json::members(info).unwrap_or_default().iter().all(|(member, value)| {
                    brought.and_then(|info| json::member(info, member)).is_some_and(|echo| json::equal(echo, value))
                })
            };
            let earlier = || declared.iter().filter_map(|declaration| json::member(declaration, "info")).any(echoes);
            let intact = echoes(info) || name == BAZAAR && earlier();
            if !intact {
                return Err(Reason::ExtensionEcho(name.into_owned()));
            }
        }
        if let Some(codes) = get(BUILDER_CODE) {
            builder_code(json::member(offered, BUILDER_CODE), codes)?;
        }
    }
    match echoed.identifier {
        None if item.identifier_required => Err(Reason::IdentifierRequired),
        _ => Ok(echoed),
    }
}

/// The identifier alone: it is proof, and is looked at before anything else of a known payment.
pub fn identifier(payment: Option<&RawValue>) -> Result<Echoed, Reason> {
    let malformed = Reason::InvalidPayload("the payment identifier is not 16 to 128 of [A-Za-z0-9_-]");
    let member = |name| payment.and_then(|payment| json::member(payment, name)).filter(|value| value.get() != "null");
    let info = member(PAYMENT_IDENTIFIER).and_then(|extension| json::member(extension, "info"));
    if let Some(id) = info.and_then(|info| json::member(info, "id")) {
        let identifier = json::string(id).and_then(|id| Identifier::parse(&id)).ok_or(malformed)?;
        return Ok(Echoed { identifier: Some(identifier), legacy_identifier: false });
    }
    let Some(legacy) = member(LEGACY_IDENTIFIER) else { return Ok(Echoed::default()) };
    let id = match json::member(legacy, "info") {
        Some(info) => json::member(info, "id"),
        None => json::member(legacy, "id").or(Some(legacy)),
    };
    let identifier = id.and_then(json::string).and_then(|id| Identifier::parse(&id)).ok_or(malformed)?;
    Ok(Echoed { identifier: Some(identifier), legacy_identifier: true })
}

/// `{a, s}` at the top of the extension (`x402.md` 7.2): an app code, which is ours or absent, and service codes.
fn builder_code(offered: Option<&RawValue>, brought: &RawValue) -> Result<(), Reason> {
    let malformed = || Reason::InvalidPayload("extensions.builder-code is malformed");
    let code = |raw: &RawValue| {
        let text = json::string(raw)?;
        let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        ((1..=32).contains(&text.len()) && text.bytes().all(good)).then(|| text.into_owned())
    };
    let members = json::members(brought).map_err(|_| malformed())?;
    let get = |name: &str| members.iter().find(|(key, value)| key == name && value.get() != "null").map(|(_, v)| *v);
    if let Some(services) = get("s") {
        match json::elements(services) {
            Some(all) if all.len() > MAX_SERVICE_CODES => {
                return Err(Reason::InvalidPayload("extensions.builder-code has more than 10 service codes"));
            }
            Some(all) if all.iter().all(|one| code(one).is_some()) => {}
            None if code(services).is_some() => {}
            _ => return Err(malformed()),
        }
    }
    let Some(app) = get("a") else { return Ok(()) };
    let app = code(app).ok_or_else(malformed)?;
    let ours = offered
        .and_then(|offered| json::member(offered, "info"))
        .and_then(|info| json::member(info, "a"))
        .and_then(json::string);
    match ours.as_deref() == Some(app.as_str()) {
        true => Ok(()),
        false => Err(Reason::ExtensionEcho(BUILDER_CODE.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::super::prices::tests::item;
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn outcome(payment: &str) -> String {
        let item = item(Kind::Tool, "search", 1);
        let bazaar =
            raw(r#"{"info":{"input":{"type":"mcp","toolName":"search","inputSchema":{"a":1.0}}},"schema":{}}"#);
        let earlier = raw(r#"{"info":{"input":{"type":"mcp","toolName":"search","inputSchema":{"old":1}}}}"#);
        match check(&advertised(&item, Some(&bazaar)), &[earlier], Some(&raw(payment)), &item) {
            Ok(Echoed { identifier: None, .. }) => "ok".into(),
            Ok(Echoed { legacy_identifier: false, .. }) => "identified".into(),
            Ok(_) => "legacy".into(),
            Err(reason) => reason.word().into(),
        }
    }

    #[test]
    fn an_echo_may_add_and_must_not_alter() {
        let id = "pay_0123456789abcdef";
        for (payment, expected) in [
            ("{}", "ok".to_owned()),
            ("null", "ok".into()),
            ("[]", "invalid_payload".into()),
            (r#"{"payment-identifier":{"info":{"required":false},"schema":{}}}"#, "ok".into()),
            (r#"{"payment-identifier":{"info":{"required":true}}}"#, "extension_echo_mismatch".into()),
            (r#"{"payment-identifier":{}}"#, "extension_echo_mismatch".into()),
            (
                r#"{"bazaar":{"info":{"input":{"type":"mcp","toolName":"search","inputSchema":{"a":1}}},"more":1}}"#,
                "ok".into(),
            ),
            (
                r#"{"bazaar":{"info":{"input":{"type":"mcp","toolName":"other","inputSchema":{"a":1}}}}}"#,
                "extension_echo_mismatch".into(),
            ),
            (
                r#"{"bazaar":{"info":{"input":{"type":"mcp","toolName":"search","inputSchema":{"old":1}}}}}"#,
                "ok".into(),
            ),
            (r#"{"unknown":{"info":{}}}"#, "ok".into()),
        ] {
            assert_eq!(outcome(payment), expected, "{payment}");
        }
        let with =
            |id: &str| outcome(&format!(r#"{{"payment-identifier":{{"info":{{"required":false,"id":{id}}}}}}}"#));
        assert_eq!(with(&format!("\"{id}\"")), "identified");
        for bad in ["\"short\"", "7", "\"sixteen chars! no\"", &format!("\"{}\"", "a".repeat(129))] {
            assert_eq!(with(bad), "invalid_payload", "{bad}");
        }
        for legacy in [
            format!(r#"{{"paymentIdentifier":"{id}"}}"#),
            format!(r#"{{"paymentIdentifier":{{"id":"{id}"}}}}"#),
            format!(r#"{{"paymentIdentifier":{{"info":{{"id":"{id}"}}}}}}"#),
        ] {
            assert_eq!(outcome(&legacy), "legacy", "{legacy}");
        }
    }

    #[test]
    fn an_obligatory_identifier_is_asked_for() {
        let mut item = item(Kind::Tool, "search", 1);
        item.identifier_required = true;
        let offered = advertised(&item, None);
        assert!(offered.get().contains(r#""required":true"#));
        assert_eq!(check(&offered, &[], None, &item).err(), Some(Reason::IdentifierRequired));
        assert_eq!(check(&offered, &[], Some(&raw("{}")), &item).err(), Some(Reason::IdentifierRequired));
    }

    #[test]
    fn builder_codes_are_checked_though_none_is_offered() {
        let many = ["\"svc\""; 11].join(",");
        for (codes, expected) in [
            (r#"{"s":"svc_1"}"#.to_owned(), "ok"),
            (r#"{"s":["a","b"]}"#.into(), "ok"),
            (r#"{"s":"Svc"}"#.into(), "invalid_payload"),
            (r#"{"s":[1]}"#.into(), "invalid_payload"),
            (r#"{"s":{}}"#.into(), "invalid_payload"),
            (format!(r#"{{"s":[{many}]}}"#), "invalid_payload"),
            (r#"{"a":"someone"}"#.into(), "extension_echo_mismatch"),
            (r#"{"a":"Some one"}"#.into(), "invalid_payload"),
            ("[]".into(), "invalid_payload"),
        ] {
            assert_eq!(outcome(&format!(r#"{{"builder-code":{codes}}}"#)), expected, "{codes}");
        }
        let offered = raw(r#"{"info":{"a":"ours"}}"#);
        assert_eq!(builder_code(Some(&offered), &raw(r#"{"a":"ours"}"#)), Ok(()));
        assert!(builder_code(Some(&offered), &raw(r#"{"a":"theirs"}"#)).is_err());
    }

    #[test]
    fn a_declaration_is_the_upstreams_own_word() {
        let tool = raw(r#"{"name":"search","description":"Finds","inputSchema":{"type":"object","x":1.0}}"#);
        let made = declaration(&tool).unwrap();
        let start = r#"{"info":{"input":{"type":"mcp","toolName":"search","inputSchema":{"type":"object","x":1.0},"description":"Finds"}},"schema":{"#;
        assert!(made.get().starts_with(start), "{made}");
        assert!(declaration(&raw(r#"{"name":"x"}"#)).is_none());
        assert!(declaration(&raw(r#"{"name":"x","inputSchema":{"$ref":"http://a/b"}}"#)).is_none());
    }

    #[test]
    fn an_identifier_is_kept_hashed_and_not_shown() {
        let id = Identifier::parse("pay_0123456789abcdef").unwrap();
        assert!(
            !format!("{id:?}").contains("0123")
                && id.hash() != Identifier::parse("pay_0123456789abcdeg").unwrap().hash()
        );
    }
}
