//! Prices in `tools/list`, `resources/list`, `resources/templates/list` and `prompts/list`. What is free leaves byte
//! for byte as the upstream wrote it; a priced entry gets two members in `_meta`, and a tool's output schema room for
//! the challenge.

use serde_json::json;
use serde_json::value::RawValue;

use super::Kind;
use super::prices::{Item, Prices};
use super::splice;
use super::target::Target;
use crate::json;

/// Human units: `{amount, asset, network, payTo}`, of the first offer.
pub const META_PRICE: &str = "x402/price";
/// Every offer, as a challenge would have it.
pub const META_ACCEPTS: &str = "x402/accepts";

/// Which list it is: the member that holds the entries, and the one that names an entry.
fn list(method: &str) -> Option<(Kind, &'static str, &'static str)> {
    match method {
        "tools/list" => Some((Kind::Tool, "tools", "name")),
        "prompts/list" => Some((Kind::Prompt, "prompts", "name")),
        "resources/list" => Some((Kind::Resource, "resources", "uri")),
        "resources/templates/list" => Some((Kind::Resource, "resourceTemplates", "uriTemplate")),
        _ => None,
    }
}

/// What was done to a list.
#[derive(Debug, Default)]
pub struct Listed {
    /// `None`: nothing in it is priced, or it is no such list; the upstream's bytes are the answer.
    pub result: Option<Box<RawValue>>,
    pub priced: usize,
    /// Output schemas that could not be widened and were left out.
    pub schemas_dropped: usize,
}

/// The raw `result` of a listing `method`, with prices.
pub fn with_prices(method: &str, result: &RawValue, prices: &Prices) -> Listed {
    let Some((kind, entries, key)) = list(method) else { return Listed::default() };
    let mut listed = Listed::default();
    let mut edits = Vec::new();
    for entry in json::member(result, entries).and_then(json::elements).unwrap_or_default() {
        let Some(name) = json::member(entry, key).and_then(json::string) else { continue };
        let item = match key {
            "uriTemplate" => prices.items().find(|item| item.kind == kind && item.key == name),
            _ => match prices.resolve(kind, &name) {
                Target::Priced(item) => Some(item),
                Target::Free | Target::NotFound => None,
            },
        };
        let Some(item) = item else { continue };
        let Some((changed, dropped)) = priced_entry(entry, item) else { continue };
        let Some(range) = splice::place(result.get(), entry) else { continue };
        edits.push((range, changed.get().to_owned()));
        listed.priced += 1;
        listed.schemas_dropped += usize::from(dropped);
    }
    if !edits.is_empty() {
        listed.result = splice::replaced(result.get(), edits);
    }
    listed
}

/// The entry, and whether its output schema had to be left out.
fn priced_entry(entry: &RawValue, item: &Item) -> Option<(Box<RawValue>, bool)> {
    let priced = item.offers.first()?;
    let price = json!({
        "amount": priced.shown_amount,
        "asset": priced.shown_asset,
        "network": priced.offer.network.as_str(),
        "payTo": priced.offer.pay_to,
    });
    let accepts = accepts(item);
    let with_price =
        splice::with_inner(entry, "_meta", &[(META_PRICE, &price.to_string()), (META_ACCEPTS, accepts.get())])?;
    let Some(schema) = json::member(entry, "outputSchema").filter(|schema| schema.get().starts_with('{')) else {
        return Some((with_price, false));
    };
    match widened(schema) {
        Some(wide) => Some((splice::with_members(&with_price, &[("outputSchema", &wide)])?, false)),
        None => Some((without(&with_price, "outputSchema")?, true)),
    }
}

/// All offers as one raw array, each offer's bytes as they are matched later.
pub(super) fn accepts(item: &Item) -> Box<RawValue> {
    json::raw(&item.offers.iter().map(|priced| &*priced.offer.raw).collect::<Vec<_>>())
}

/// What a strict client compares a payment-required result with.
const CHALLENGE: &str = r#"{"type":"object","properties":{"x402Version":{"const":2},"resource":{"type":"object"},"accepts":{"type":"array"}},"required":["x402Version","resource","accepts"]}"#;
/// They speak of the whole document, so they stay at its root.
const OF_THE_ROOT: [&str; 6] = ["$schema", "$id", "$defs", "definitions", "title", "description"];

/// A schema that admits what the given one admits, and a challenge. `None` where moving it under `anyOf` would change
/// what its references mean.
fn widened(schema: &RawValue) -> Option<String> {
    let members = json::members(schema).ok()?;
    if !references_survive(schema) {
        return None;
    }
    let (root, inner): (Vec<_>, Vec<_>) = members.iter().partition(|(name, _)| OF_THE_ROOT.contains(&name.as_ref()));
    let written = |members: &[&(std::borrow::Cow<'_, str>, &RawValue)]| {
        members.iter().map(|(name, value)| format!("{}:{}", json::raw(&**name), value.get())).collect::<Vec<_>>()
    };
    let mut out = written(&root);
    out.push(r#""type":"object""#.to_owned());
    out.push(format!(r#""anyOf":[{{{}}},{CHALLENGE}]"#, written(&inner).join(",")));
    Some(format!("{{{}}}", out.join(",")))
}

/// Whether every reference in it is to a definition at the root, or to another document.
fn references_survive(schema: &RawValue) -> bool {
    if let Ok(members) = json::members(schema) {
        return members.iter().all(|(name, value)| match name.as_ref() {
            "$ref" => json::string(value).is_none_or(|target| {
                !target.starts_with('#') || target.starts_with("#/$defs/") || target.starts_with("#/definitions/")
            }),
            "$dynamicRef" | "$recursiveRef" => false,
            _ => references_survive(value),
        });
    }
    json::elements(schema).is_none_or(|elements| elements.into_iter().all(references_survive))
}

fn without(object: &RawValue, name: &str) -> Option<Box<RawValue>> {
    let members = json::members(object).ok()?;
    let kept: Vec<String> = members
        .iter()
        .filter(|(key, _)| key != name)
        .map(|(key, value)| format!("{}:{}", json::raw(&**key), value.get()))
        .collect();
    RawValue::from_string(format!("{{{}}}", kept.join(","))).ok()
}

/// The answer of a priced item, as no cache between may share it: `cacheScope` becomes `private` where the upstream
/// says otherwise (MCP 2026-07-28; absent means private already).
pub fn unshared(result: &RawValue) -> Option<Box<RawValue>> {
    let scope = json::member(result, "cacheScope")?;
    if json::string(scope).as_deref() == Some("private") {
        return None;
    }
    splice::with_members(result, &[("cacheScope", "\"private\"")])
}

#[cfg(test)]
mod tests {
    use super::super::prices::Unlisted;
    use super::super::prices::tests::{PAY_TO, USDC, item, prices};
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn shop() -> Prices {
        let items = vec![
            item(Kind::Tool, "search", 100_000),
            item(Kind::Resource, "docs://{id}", 1),
            item(Kind::Resource, "file:///a", 1),
            item(Kind::Prompt, "brief", 1),
        ];
        prices(items, Unlisted::Free)
    }

    #[test]
    fn a_priced_tool_says_so_and_everything_else_stays_byte_for_byte() {
        let free = r#"{ "name":"ping", "x":1.0, "_meta":{"x402/price":"not ours"} }"#;
        let list = format!(
            r#"{{ "nextCursor" : "c", "tools":[ {free} ,{{"name":"se\u0061rch","big":100000000000000000000000001,"_meta":{{"k":1}}}}], "new":[] }}"#
        );
        let listed = with_prices("tools/list", &raw(&list), &shop());
        assert_eq!((listed.priced, listed.schemas_dropped), (1, 0));
        let accepts = format!(
            r#"[{{"amount":"100000","asset":"{USDC}","extra":{{"areFeesSponsored":true}},"maxTimeoutSeconds":60,"network":"stellar:testnet","payTo":"{PAY_TO}","scheme":"exact"}}]"#
        );
        let price = format!(r#"{{"amount":"0.01","asset":"USDC","network":"stellar:testnet","payTo":"{PAY_TO}"}}"#);
        let expected =
            list.replace(r#"{"k":1}"#, &format!(r#"{{"k":1,"x402/price":{price},"x402/accepts":{accepts}}}"#));
        assert_eq!(listed.result.unwrap().get(), expected);
    }

    #[test]
    fn a_list_without_a_priced_entry_is_the_upstreams_own() {
        let list = raw(r#"{"tools":[{"name":"ping"},{"name":7},null]}"#);
        assert!(with_prices("tools/list", &list, &shop()).result.is_none());
        assert!(with_prices("tools/call", &raw(r#"{"tools":[{"name":"search"}]}"#), &shop()).result.is_none());
        // Another spelling is no item of ours, so it gets no price either.
        assert!(with_prices("tools/list", &raw(r#"{"tools":[{"name":"Search"}]}"#), &shop()).result.is_none());
    }

    #[test]
    fn resources_templates_and_prompts_are_priced_too() {
        for (method, list, priced) in [
            ("resources/list", r#"{"resources":[{"uri":"docs://1"},{"uri":"file:///a"},{"uri":"file:///b"}]}"#, 2),
            (
                "resources/templates/list",
                r#"{"resourceTemplates":[{"uriTemplate":"docs://{id}"},{"uriTemplate":"x:{y}"}]}"#,
                1,
            ),
            ("prompts/list", r#"{"prompts":[{"name":"brief"},{"name":"search"}]}"#, 1),
        ] {
            assert_eq!(with_prices(method, &raw(list), &shop()).priced, priced, "{method}");
        }
    }

    #[test]
    fn a_widened_schema_admits_both_and_keeps_its_definitions() {
        let schema = r##"{"$schema":"s","type":"object","$defs":{"p":{"type":"string"}},"properties":{"a":{"$ref":"#/$defs/p"}},"required":["a"]}"##;
        let entry = raw(&format!(r#"{{"name":"search","outputSchema":{schema}}}"#));
        let list = raw(&format!(r#"{{"tools":[{}]}}"#, entry.get()));
        let listed = with_prices("tools/list", &list, &shop());
        let result = listed.result.unwrap();
        let tool = json::elements(json::member(&result, "tools").unwrap()).unwrap()[0].to_owned();
        let inner = r##"{"type":"object","properties":{"a":{"$ref":"#/$defs/p"}},"required":["a"]}"##;
        assert_eq!(
            json::member(&tool, "outputSchema").unwrap().get(),
            format!(
                r#"{{"$schema":"s","$defs":{{"p":{{"type":"string"}}}},"type":"object","anyOf":[{inner},{CHALLENGE}]}}"#
            )
        );
    }

    #[test]
    fn a_schema_whose_references_would_break_is_left_out_and_counted() {
        for reference in [r##""$ref":"#""##, r##""$ref":"#/properties/a""##, r##""$dynamicRef":"#x""##] {
            let list = format!(
                r#"{{"tools":[{{"name":"search","outputSchema":{{"type":"object","properties":{{"b":{{{reference}}}}}}},"z":1}}]}}"#
            );
            let listed = with_prices("tools/list", &raw(&list), &shop());
            assert_eq!(listed.schemas_dropped, 1, "{reference}");
            let result = listed.result.unwrap();
            assert!(!result.get().contains("outputSchema") && result.get().contains(r#""z":1"#));
        }
    }

    #[test]
    fn a_paid_answer_is_never_shared() {
        assert!(unshared(&raw(r#"{"contents":[]}"#)).is_none());
        assert!(unshared(&raw(r#"{"cacheScope":"private"}"#)).is_none());
        assert_eq!(
            unshared(&raw(r#"{"ttlMs":5, "cacheScope": "public"}"#)).unwrap().get(),
            r#"{"ttlMs":5, "cacheScope": "private"}"#
        );
    }
}
