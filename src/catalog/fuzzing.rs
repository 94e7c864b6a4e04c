//! A catalog's items and answers, resource references and cursors.

use serde_json::value::RawValue;

use super::client::{Path, Take, read_page};
use super::{Kind, Listing, ResourceRef, SearchQuery, version};
use crate::json;

/// The input is one item, an answer, a reference, or a cursor; each is tried as what it may be.
pub fn run(data: &[u8]) {
    if let Ok(raw) = serde_json::from_slice::<&RawValue>(data)
        && let Ok(found) = Listing::parse(raw)
    {
        assert_eq!(found.raw.get(), raw.get(), "a byte was changed");
        listing(&found);
    }
    page(data);
    if let Ok(text) = std::str::from_utf8(data) {
        reference(text);
        cursor(text);
    }
}

fn listing(listing: &Listing) {
    let again = Listing::parse(&listing.raw).unwrap_or_else(|e| panic!("read once, then refused: {e}"));
    assert_eq!((&again.version_hash, &again.reference), (&listing.version_hash, &listing.reference));
    // A page adds words about its neighbours and its query.
    assert!(again.warnings.iter().all(|word| listing.warnings.contains(word)));
    assert_eq!(again.status, listing.status);
    assert!(listing.version_hash.len() == 64 && listing.version_hash.bytes().all(|b| b.is_ascii_hexdigit()));
    assert!((1..=100).contains(&listing.offers.len()));
    let name = listing.reference.to_string();
    assert_eq!(name.parse::<ResourceRef>(), Ok(listing.reference.clone()), "a reference that cannot be read again");
    let url = json::member(&listing.raw, "resource").and_then(json::string).unwrap();
    assert_eq!(url, listing.reference.url, "the URL was normalised");
    for offer in &listing.offers {
        let amount = json::member(&offer.raw, "amount").and_then(json::string).unwrap();
        assert_eq!(amount, offer.amount.to_string());
        assert!(listing.raw.get().contains(offer.raw.get()), "a byte was changed");
    }
    if let Some(schema) = &listing.input_schema {
        assert!(listing.raw.get().contains(schema.get()), "a byte was changed");
    }
    let mut words = listing.warnings.clone();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), listing.warnings.len(), "a warning stands twice");
    // White space outside of strings and the order of members are not the seller's word.
    let canonical = json::canonical(&listing.raw, json::Numbers::AsWritten).unwrap();
    let canonical = RawValue::from_string(canonical).unwrap();
    assert_eq!(version::version_hash(&canonical).unwrap(), listing.version_hash);
}

fn page(body: &[u8]) {
    let queries = [
        SearchQuery::default(),
        SearchQuery {
            query: Some("weather".into()),
            kind: Some(Kind::Mcp),
            network: "stellar:testnet".parse().ok(),
            scheme: Some("exact".into()),
            limit: Some(3),
            ..SearchQuery::default()
        },
    ];
    for query in &queries {
        let Ok(at) = query.position() else { panic!("a query of ours is refused") };
        for (path, take) in [(Path::List, Take::AsAsked), (Path::Search, Take::AsAsked), (Path::Lookup, Take::All)] {
            let limit = query.limit();
            let fetched = match read_page(query, &at, path, limit, take, body) {
                Ok(fetched) => fetched,
                Err(error) => {
                    assert!(error.to_string().chars().count() <= 300);
                    continue;
                }
            };
            if take == Take::AsAsked {
                assert!(fetched.page.items.len() + fetched.page.skipped.len() + fetched.page.dropped <= limit as usize);
            }
            assert!(fetched.page.limit <= limit && fetched.page.limit > 0);
            fetched.page.items.iter().for_each(listing);
            if let Some(next) = fetched.next {
                assert_ne!(next, at, "the same page for ever");
                let cursor = query.cursor(&next);
                let again = SearchQuery { cursor: Some(cursor), ..query.clone() };
                assert_eq!(again.position().ok(), Some(next), "a cursor of ours is not read");
            }
        }
    }
}

fn reference(text: &str) {
    if let Ok(found) = text.parse::<ResourceRef>() {
        assert_eq!(found.to_string(), text, "two spellings of one reference");
    }
    for (kind, tool) in [(Kind::Http, None), (Kind::Mcp, Some("get_weather")), (Kind::Mcp, Some(text))] {
        if let Ok(found) = ResourceRef::new(kind, text, tool) {
            assert_eq!(found.to_string().parse(), Ok(found.clone()), "a reference that cannot be read again");
            assert_eq!(found.url, text);
        }
    }
    if let Ok(found) = ResourceRef::new(Kind::Mcp, "https://seller.example/mcp", Some(text)) {
        assert_eq!(found.to_string().parse(), Ok(found));
    }
}

fn cursor(text: &str) {
    let query = SearchQuery { cursor: Some(text.to_owned()), ..SearchQuery::default() };
    if let Ok(position) = query.position() {
        let again = SearchQuery { cursor: Some(query.cursor(&position)), ..query };
        assert_eq!(again.position().ok(), Some(position));
    }
}
