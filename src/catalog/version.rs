//! The version hash: what an agent looked at when it decided to pay.
//!
//! SHA-256, 64 lower-case hex digits, over the RFC 8785 canonical JSON of
//! ```json
//! { "accepts": [every payment option], "declaration": { every other member of the item but those below } }
//! ```
//! where the options are put in the order of their own canonical texts. So neither the order of options nor of members
//! counts, and every change of price, recipient, asset, network, timeout, extra data, schema, description or other
//! metadata does, also under a member that nobody knows today, and also in an option that is malformed.
//!
//! Numbers are doubles, as RFC 8785 has them; amounts are strings, so no price is rounded.
//!
//! Left out is what the catalog says about the entry rather than the seller about the resource: [`NOT_DECLARED`], and
//! inside the old `metadata` object [`STATISTICS`].

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::json::{self, JsonError, Numbers};

/// Members of an item that come from the catalog: freshness, ranking, usage, its own verdict.
pub const NOT_DECLARED: &[&str] = &[
    "active",
    "createdAt",
    "distance",
    "firstSeen",
    "isActive",
    "lastCalledAt",
    "lastChecked",
    "lastSeen",
    "lastUpdated",
    "lastVerified",
    "popularity",
    "quality",
    "rank",
    "relevance",
    "score",
    "similarity",
    "stale",
    "statistics",
    "stats",
    "status",
    "updatedAt",
    "usage",
    "verified",
];

/// The same inside `metadata`, where older catalogs keep measurements beside the seller's words.
pub const STATISTICS: &[&str] = &[
    "confidence",
    "lastUpdated",
    "paymentAnalytics",
    "performance",
    "quality",
    "reliability",
    "statistics",
    "stats",
    "usage",
];

/// The hash of a raw item that has passed [`json::check`]. Fails only for a number beyond all doubles.
pub fn version_hash(item: &RawValue) -> Result<String, JsonError> {
    Ok(hex::encode(Sha256::digest(canonical(item)?)))
}

/// The text that is hashed.
pub fn canonical(item: &RawValue) -> Result<String, JsonError> {
    let mut options = Vec::new();
    let mut declaration = Vec::new();
    for (key, value) in json::members(item)? {
        match key.as_ref() {
            "accepts" => match json::elements(value) {
                Some(elements) => {
                    for option in elements {
                        options.push(json::canonical(option, Numbers::Rfc8785)?);
                    }
                }
                None => options.push(json::canonical(value, Numbers::Rfc8785)?),
            },
            key if NOT_DECLARED.contains(&key) => {}
            "metadata" if value.get().starts_with('{') => {
                let kept = json::members(value)?.into_iter().filter(|(key, _)| !STATISTICS.contains(&key.as_ref()));
                let kept: Vec<_> = kept.map(|(key, value)| (key.into_owned(), value.get().to_owned())).collect();
                declaration.push((key.into_owned(), object(&kept)));
            }
            _ => declaration.push((key.into_owned(), value.get().to_owned())),
        }
    }
    options.sort_unstable();
    let text = format!("{{\"accepts\":[{}],\"declaration\":{}}}", options.join(","), object(&declaration));
    let raw = RawValue::from_string(text).map_err(|_| JsonError::NotAnObject)?;
    json::canonical(&raw, Numbers::Rfc8785)
}

fn object(members: &[(String, String)]) -> String {
    let members: Vec<String> = members.iter().map(|(key, value)| format!("{}:{value}", json::raw(key).get())).collect();
    format!("{{{}}}", members.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::{Limits, check};
    use proptest::prelude::*;

    fn raw(text: &str) -> &RawValue {
        check(text.as_bytes(), Limits { bytes: 1 << 20, depth: 64 }).unwrap()
    }

    #[test]
    fn the_committed_vectors_hold() {
        let text = include_str!("../../tests/vectors/version-hash.json");
        let vectors = json::elements(raw(text)).unwrap();
        assert!(vectors.len() >= 15);
        for vector in vectors {
            let get = |name| json::string(json::member(vector, name).unwrap()).unwrap();
            let item = json::member(vector, "item").unwrap();
            assert_eq!(canonical(item).unwrap(), get("canonical"), "{}", get("what"));
            assert_eq!(version_hash(item).unwrap(), get("versionHash"), "{}", get("what"));
        }
    }

    #[test]
    fn the_vectors_say_what_counts() {
        let vectors = json::elements(raw(include_str!("../../tests/vectors/version-hash.json"))).unwrap();
        let hash = |vector| json::string(json::member(vector, "versionHash").unwrap()).unwrap();
        let base = hash(vectors[0]);
        for vector in &vectors[1..] {
            let same = json::member(vector, "sameAsFirst").unwrap().get() == "true";
            assert_eq!(hash(vector) == base, same, "{}", json::member(vector, "what").unwrap());
        }
    }

    /// An item with `options` payment options out of numbers, and one leaf to change.
    fn item(options: &[(u32, u32, u16)], order: &[usize], leaf: u32, updated: u32) -> String {
        let accepts: Vec<String> = order
            .iter()
            .map(|&i| {
                let (amount, pay_to, timeout) = options[i];
                match (amount + pay_to) % 2 {
                    0 => format!(r#"{{"amount":"{amount}","payTo":"G{pay_to}","maxTimeoutSeconds":{timeout}}}"#),
                    _ => format!(r#"{{"maxTimeoutSeconds" : {timeout},"amount":"{amount}","payTo":"G{pay_to}"}}"#),
                }
            })
            .collect();
        format!(
            r#"{{"lastUpdated":{updated},"accepts":[{}],"extensions":{{"bazaar":{{"info":{{"leaf":{leaf}}}}}}},"quality":{{"calls":{updated}}}}}"#,
            accepts.join(",")
        )
    }

    proptest! {
        #[test]
        fn order_and_statistics_do_not_count(
            options in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u16>()), 1..6),
            seed in any::<u64>(), leaf: u32, updated: (u32, u32),
        ) {
            // Sums must not overflow in `item`.
            let options: Vec<_> = options.into_iter().map(|(a, b, c)| (a / 2, b / 2, c)).collect();
            let straight: Vec<usize> = (0..options.len()).collect();
            let mut mixed = straight.clone();
            mixed.sort_by_key(|i| (seed.rotate_left(*i as u32 * 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let first = item(&options, &straight, leaf, updated.0);
            let second = item(&options, &mixed, leaf, updated.1);
            prop_assert_eq!(version_hash(raw(&first)).unwrap(), version_hash(raw(&second)).unwrap());
        }

        #[test]
        fn every_changed_term_counts(
            option in (0u32..1 << 30, 0u32..1 << 30, any::<u16>()), leaf in 0u32..1 << 30, which in 0usize..4,
        ) {
            let mut other = option;
            let mut other_leaf = leaf;
            match which {
                0 => other.0 += 1,
                1 => other.1 += 1,
                2 => other.2 = other.2.wrapping_add(1),
                _ => other_leaf += 1,
            }
            let first = item(&[option], &[0], leaf, 1);
            let second = item(&[other], &[0], other_leaf, 1);
            prop_assert_ne!(version_hash(raw(&first)).unwrap(), version_hash(raw(&second)).unwrap());
        }
    }
}
