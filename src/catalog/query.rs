//! What an agent looks for: the parameters of the catalog, the check of its answer, and the cursor between two pages.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use super::{CatalogError, Kind, Listing};
use crate::json;
use crate::money::{Asset, Network};
use crate::x402::Offer;

/// All filters are sent to the catalog and checked again on this side: catalogs ignore filters that they do not know.
#[derive(Debug, Clone, Default)]
pub struct SearchQuery {
    /// At most 512 characters; with it `/discovery/search` is asked, without it (or blank) `/discovery/resources`.
    pub query: Option<String>,
    pub kind: Option<Kind>,
    pub network: Option<Network>,
    pub scheme: Option<String>,
    pub pay_to: Option<String>,
    pub asset: Option<Asset>,
    /// Names of extensions; an item must have all of them.
    pub extensions: Vec<String>,
    /// `None` is 20; more than 200 is 200.
    pub limit: Option<u32>,
    /// From [`super::Page::cursor`] of the same query.
    pub cursor: Option<String>,
}

/// Where a page begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Position {
    Offset(u64),
    /// The catalog's own cursor.
    Cursor(String),
}

/// How an item stands to the filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Matches,
    /// Every filter is met by some option, and no option meets all of them: a catalog may see it either way.
    NotTogether,
    /// A filter is met by nothing in the item: the catalog ignored it.
    FilterIgnored,
}

pub(super) const DEFAULT_LIMIT: u32 = 20;
pub(super) const MAX_LIMIT: u32 = 200;
const MAX_QUERY_CHARS: usize = 512;
const MAX_EXTENSIONS: usize = 10;

impl SearchQuery {
    /// The search text; blank is none.
    pub(super) fn text(&self) -> Option<&str> {
        self.query.as_deref().map(str::trim).filter(|text| !text.is_empty())
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit.unwrap_or(DEFAULT_LIMIT).clamp(1, MAX_LIMIT)
    }

    /// Bounds what is sent to the catalog, and reads the cursor.
    pub(super) fn position(&self) -> Result<Position, CatalogError> {
        let invalid = |field, detail: &str| Err(CatalogError::Invalid { field, detail: detail.to_owned() });
        if self.query.as_deref().is_some_and(|text| text.chars().count() > MAX_QUERY_CHARS) {
            return invalid("query", "is longer than 512 characters");
        }
        let word =
            |text: &str, max: usize| (1..=max).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        if self.scheme.as_deref().is_some_and(|text| !word(text, 64)) {
            return invalid("scheme", "is not a scheme's name");
        }
        if self.pay_to.as_deref().is_some_and(|text| !word(text, 128)) {
            return invalid("payTo", "is not an address");
        }
        if self.extensions.len() > MAX_EXTENSIONS || self.extensions.iter().any(|name| !word(name, 64)) {
            return invalid("extensions", "are at most 10 names of extensions");
        }
        let Some(cursor) = self.cursor.as_deref() else { return Ok(Position::Offset(0)) };
        let bad = || CatalogError::Invalid { field: "cursor", detail: "is not one that this query gave".to_owned() };
        let (head, fingerprint) = cursor.split_once('.').ok_or_else(bad)?;
        if fingerprint != self.fingerprint() {
            return Err(bad());
        }
        match head.split_at_checked(1) {
            Some(("o", digits)) if digits.bytes().all(|b| b.is_ascii_digit()) => {
                digits.parse().map(Position::Offset).map_err(|_| bad())
            }
            Some(("c", body)) => {
                let bytes = URL_SAFE_NO_PAD.decode(body).map_err(|_| bad())?;
                String::from_utf8(bytes).map(Position::Cursor).map_err(|_| bad())
            }
            _ => Err(bad()),
        }
    }

    /// `o<offset>.<query>` or `c<base64url of the catalog's cursor>.<query>`: a cursor of another query is refused
    /// instead of giving a page of something else.
    pub(super) fn cursor(&self, next: &Position) -> String {
        match next {
            Position::Offset(offset) => format!("o{offset}.{}", self.fingerprint()),
            Position::Cursor(cursor) => format!("c{}.{}", URL_SAFE_NO_PAD.encode(cursor), self.fingerprint()),
        }
    }

    fn fingerprint(&self) -> String {
        let fields = (
            self.text(),
            self.kind.map(Kind::as_str),
            self.network.as_ref().map(Network::as_str),
            self.scheme.as_deref(),
            self.pay_to.as_deref(),
            self.asset.as_ref().map(Asset::as_str),
            &self.extensions,
        );
        hex::encode(&Sha256::digest(json::raw(&fields).get())[..4])
    }

    /// The parameters as the catalogs know them (`x402.md` 3.2); `extensions` is repeated.
    pub(super) fn parameters(&self, at: &Position, limit: u32) -> Vec<(&'static str, String)> {
        let mut out = Vec::new();
        let mut add = |name, value: Option<&str>| out.extend(value.map(|value| (name, value.to_owned())));
        add("query", self.text());
        add("type", self.kind.map(Kind::as_str));
        add("network", self.network.as_ref().map(Network::as_str));
        add("scheme", self.scheme.as_deref());
        add("payTo", self.pay_to.as_deref());
        add("asset", self.asset.as_ref().map(Asset::as_str));
        for name in &self.extensions {
            add("extensions", Some(name));
        }
        out.push(("limit", limit.to_string()));
        match at {
            Position::Offset(0) => {}
            Position::Offset(offset) => out.push(("offset", offset.to_string())),
            Position::Cursor(cursor) => out.push(("cursor", cursor.clone())),
        }
        out
    }

    pub(super) fn judge(&self, listing: &Listing) -> Verdict {
        let network = |offer: &Offer| self.network.as_ref().is_none_or(|wanted| *wanted == offer.network);
        let scheme = |offer: &Offer| self.scheme.as_ref().is_none_or(|wanted| *wanted == offer.scheme);
        let pay_to = |offer: &Offer| {
            self.pay_to.as_ref().is_none_or(|wanted| Offer::same_address(&offer.network, wanted, &offer.pay_to))
        };
        let asset = |offer: &Offer| {
            self.asset
                .as_ref()
                .is_none_or(|wanted| Offer::same_address(&offer.network, wanted.as_str(), offer.asset.as_str()))
        };
        let kind = self.kind.is_none_or(|wanted| wanted == listing.reference.kind);
        let extensions = json::member(&listing.raw, "extensions").and_then(|raw| json::members(raw).ok());
        let extended = self.extensions.iter().all(|wanted| {
            extensions.as_ref().is_some_and(|names| names.iter().any(|(name, _)| name.as_ref() == wanted.as_str()))
        });
        let offers = &listing.offers;
        let each = offers.iter().any(network)
            && offers.iter().any(scheme)
            && offers.iter().any(pay_to)
            && offers.iter().any(asset);
        if !(kind && extended && each) {
            Verdict::FilterIgnored
        } else if offers.iter().any(|o| network(o) && scheme(o) && pay_to(o) && asset(o)) {
            Verdict::Matches
        } else {
            Verdict::NotTogether
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing() -> Listing {
        let text = r#"{"resource":"https://a.example/mcp","type":"mcp","accepts":[
            {"scheme":"exact","network":"stellar:testnet","amount":"1","asset":"CA","payTo":"GA","maxTimeoutSeconds":60},
            {"scheme":"upto","network":"eip155:8453","amount":"1","asset":"0xAb","payTo":"0xCd","maxTimeoutSeconds":60}],
            "extensions":{"bazaar":{"info":{"input":{"type":"mcp","toolName":"t","inputSchema":{}}}},"payment-identifier":{}}}"#;
        Listing::parse(serde_json::from_str(text).unwrap()).unwrap()
    }

    #[test]
    fn one_option_must_meet_all_filters() {
        let judge = |change: &dyn Fn(&mut SearchQuery)| {
            let mut query = SearchQuery::default();
            change(&mut query);
            query.judge(&listing())
        };
        let network = |name: &str| Some(name.parse().unwrap());
        assert_eq!(judge(&|_| {}), Verdict::Matches);
        assert_eq!(judge(&|q| q.network = network("stellar:testnet")), Verdict::Matches);
        assert_eq!(judge(&|q| q.network = network("stellar:pubnet")), Verdict::FilterIgnored);
        assert_eq!(judge(&|q| q.kind = Some(Kind::Http)), Verdict::FilterIgnored);
        assert_eq!(judge(&|q| q.asset = Some("0xaB".parse().unwrap())), Verdict::Matches);
        assert_eq!(judge(&|q| q.asset = Some("ca".parse().unwrap())), Verdict::FilterIgnored);
        assert_eq!(judge(&|q| q.pay_to = Some("0xCD".into())), Verdict::Matches);
        assert_eq!(judge(&|q| q.scheme = Some("deferred".into())), Verdict::FilterIgnored);
        assert_eq!(judge(&|q| q.extensions = vec!["bazaar".into(), "payment-identifier".into()]), Verdict::Matches);
        assert_eq!(judge(&|q| q.extensions = vec!["bazaar".into(), "x".into()]), Verdict::FilterIgnored);
        let crossed = judge(&|q| {
            q.network = network("stellar:testnet");
            q.scheme = Some("upto".into());
        });
        assert_eq!(crossed, Verdict::NotTogether);
    }

    #[test]
    fn a_cursor_serves_its_own_query_only() {
        let query = SearchQuery { query: Some(" weather ".into()), ..Default::default() };
        for at in [Position::Offset(40), Position::Cursor("c1.\u{1f600}/=+".into())] {
            let next = SearchQuery { cursor: Some(query.cursor(&at)), limit: Some(7), ..query.clone() };
            assert_eq!(next.position().unwrap(), at);
            let other = SearchQuery { query: Some("news".into()), ..next };
            assert!(matches!(other.position(), Err(CatalogError::Invalid { field: "cursor", .. })));
        }
        for bad in ["", "o", "o1", "x1.00000000", "o-1.00000000", "c!.00000000", "o1.00000000.x"] {
            let query = SearchQuery { cursor: Some(bad.into()), ..query.clone() };
            assert!(matches!(query.position(), Err(CatalogError::Invalid { field: "cursor", .. })), "{bad:?}");
        }
    }

    #[test]
    fn arguments_over_their_bounds_are_refused_by_name() {
        let base = SearchQuery::default();
        for (query, name) in [
            (SearchQuery { query: Some("ä".repeat(513)), ..base.clone() }, "query"),
            (SearchQuery { scheme: Some("a b".into()), ..base.clone() }, "scheme"),
            (SearchQuery { pay_to: Some(String::new()), ..base.clone() }, "payTo"),
            (SearchQuery { extensions: vec!["x".into(); 11], ..base.clone() }, "extensions"),
        ] {
            assert!(matches!(query.position(), Err(CatalogError::Invalid { field, .. }) if field == name), "{name}");
        }
        let full = SearchQuery { query: Some("ä".repeat(512)), ..base.clone() };
        assert_eq!(full.position().unwrap(), Position::Offset(0));
        assert_eq!(
            [None, Some(0), Some(7), Some(10_000)].map(|limit| SearchQuery { limit, ..base.clone() }.limit()),
            [20, 1, 7, 200]
        );
    }

    #[test]
    fn blank_text_is_no_query() {
        let query = SearchQuery { query: Some("  ".into()), ..Default::default() };
        assert!(query.parameters(&Position::Offset(0), 20).iter().all(|(name, _)| *name == "limit"));
    }
}
