//! Prices as data: what an item costs, how an offer looks on the wire, and how long an offer that was withdrawn is
//! still good. Whoever makes them (`config`, or a program that uses the library) has checked nothing: it is done here.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use stellar_strkey::Strkey;

use super::Kind;
use super::target::{self, Target};
use super::template::Template;
use crate::json;
use crate::money::{Amount, Asset, Network, Unit};
use crate::x402::{Flow, Offer};

/// Which member is wrong, what stands there, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{member}: {problem}")]
pub struct PriceError {
    pub member: &'static str,
    pub problem: String,
}

fn refuse<T>(member: &'static str, problem: impl Into<String>) -> Result<T, PriceError> {
    Err(PriceError { member, problem: problem.into() })
}

/// What a payment option is made of.
#[derive(Debug, Clone)]
pub struct Terms {
    pub scheme: String,
    pub network: Network,
    pub asset: Asset,
    pub amount: Amount,
    /// The amount and the asset as the operator wrote them: `0.01` and `USDC`.
    pub shown_amount: String,
    pub shown_asset: String,
    pub pay_to: String,
    pub max_timeout_seconds: u64,
    pub flow: Flow,
    /// Members of `extra` beyond those that the gate writes itself.
    pub extra: serde_json::Map<String, Value>,
}

/// One payment option of one item, as it is advertised and matched.
#[derive(Debug, Clone)]
pub struct Priced {
    pub offer: Offer,
    pub shown_amount: String,
    pub shown_asset: String,
}

impl Terms {
    /// Checked, and written as it goes on the wire.
    pub fn price(self) -> Result<Priced, PriceError> {
        match self.scheme.as_str() {
            "exact" => {}
            "upto" => return refuse("scheme", "upto cannot be sold yet: write exact"),
            "auth-capture" => return refuse("scheme", "auth-capture is not served: write exact"),
            other => return refuse("scheme", format!("{:?} is unknown: write exact", shown(other))),
        }
        if self.amount.is_zero() {
            return refuse("price", "is zero: list the item under free instead");
        }
        address("pay_to", &self.network, &self.pay_to)?;
        token(&self.network, &self.asset)?;
        let mut extra = self.extra;
        for ours in ["paymentFlow", "areFeesSponsored"] {
            if extra.contains_key(ours) {
                return refuse("extra", format!("{ours} is written by the gate: remove it (flow sets the flow)"));
            }
        }
        match self.flow {
            Flow::Authorization => {}
            Flow::Upfront => {
                extra.insert("paymentFlow".into(), "upfront".into());
            }
            Flow::Escrow => return refuse("flow", "escrow is not served: write authorization or upfront"),
            Flow::Unknown => return refuse("flow", "is unknown: write authorization or upfront"),
        }
        match self.network.namespace() {
            "stellar" => {
                if self.amount.to_i128().is_none() {
                    return refuse("price", "is beyond the 127 bits of a Stellar token amount");
                }
                // A payer that is not told so builds no payment (`x402.md` 4.2).
                extra.insert("areFeesSponsored".into(), true.into());
            }
            _ => {
                for needed in ["name", "version"] {
                    if extra.get(needed).and_then(Value::as_str).unwrap_or_default().is_empty() {
                        let problem =
                            format!("{needed} is missing: a payer signs over the token's EIP-712 name and version");
                        return refuse("extra", problem);
                    }
                }
                match extra.get("assetTransferMethod").map(Value::as_str) {
                    None | Some(Some("eip3009")) => {}
                    Some(_) => return refuse("extra", "assetTransferMethod can only be eip3009: remove it"),
                }
            }
        }
        let raw = json::raw(&json!({
            "scheme": self.scheme,
            "network": self.network.as_str(),
            "amount": self.amount.to_string(),
            "asset": self.asset.as_str(),
            "payTo": self.pay_to,
            "maxTimeoutSeconds": self.max_timeout_seconds,
            "extra": extra,
        }));
        let offer = Offer::parse(&raw).or_else(|e| refuse(e.0, "is out of its bounds (a timeout: 1 to 31536000 s)"))?;
        Ok(Priced { offer, shown_amount: self.shown_amount, shown_asset: self.shown_asset })
    }
}

/// A recipient that the network can pay. A muxed address (M…) is refused: the transfer's event names the account under
/// it, and facilitators compare the two as texts.
fn address(member: &'static str, network: &Network, text: &str) -> Result<(), PriceError> {
    match network.namespace() {
        "stellar" => match Strkey::from_string(text) {
            Ok(Strkey::PublicKeyEd25519(_) | Strkey::Contract(_)) => Ok(()),
            Ok(Strkey::MuxedAccountEd25519(_)) => {
                refuse(member, "is a muxed address (M…): write the account's G… address")
            }
            // It may be a seed that was pasted here: nothing of it is repeated.
            _ => refuse(member, format!("is not an address of {network}: write a G… or C… address")),
        },
        "eip155" => match hex_address(text) {
            true => Ok(()),
            false => refuse(member, format!("is not an address of {network}: write 0x and 40 hex digits")),
        },
        other => refuse("network", format!("{other} networks cannot be sold on: write a stellar or eip155 network")),
    }
}

fn token(network: &Network, asset: &Asset) -> Result<(), PriceError> {
    match network.namespace() {
        "stellar" => match Strkey::from_string(asset.as_str()) {
            Ok(Strkey::Contract(_)) => Ok(()),
            _ => refuse("asset", format!("is not a token of {network}: write its contract (C…) or a known symbol")),
        },
        _ if hex_address(asset.as_str()) => Ok(()),
        _ => refuse("asset", format!("is not a token of {network}: write its contract (0x…) or a known symbol")),
    }
}

fn hex_address(text: &str) -> bool {
    text.len() == 42 && text.starts_with("0x") && text.bytes().skip(2).all(|b| b.is_ascii_hexdigit())
}

fn shown(text: &str) -> String {
    text.chars().take(40).collect()
}

/// What the challenge says of the item (`ResourceInfo`, core specification 5.1).
#[derive(Debug, Clone, Default)]
pub struct About {
    /// Instead of `mcp://tool/{name}` and its likes: what a catalog can dial.
    pub url: Option<String>,
    pub description: Option<String>,
    pub mime_type: Option<String>,
    pub service_name: Option<String>,
    pub tags: Vec<String>,
    pub icon_url: Option<String>,
}

impl About {
    fn check(&self) -> Result<(), PriceError> {
        let word = |text: &str| (1..=32).contains(&text.len()) && text.bytes().all(|b| (0x20..0x7f).contains(&b));
        if let Some(url) = &self.url {
            absolute("url", url)?;
        }
        if self.description.as_ref().is_some_and(|text| text.len() > 2_048) {
            return refuse("description", "is longer than 2048 bytes");
        }
        if self.mime_type.as_ref().is_some_and(|text| text.is_empty() || text.len() > 127 || !text.contains('/')) {
            return refuse("mime_type", "is no media type: write one such as application/json");
        }
        if self.service_name.as_ref().is_some_and(|name| !word(name)) {
            return refuse("service_name", "must be 1 to 32 printable ASCII characters");
        }
        if self.tags.len() > 5 {
            return refuse("tags", format!("are {}: write at most 5", self.tags.len()));
        }
        if let Some(bad) = self.tags.iter().find(|tag| !word(tag)) {
            return refuse("tags", format!("{:?} must be 1 to 32 printable ASCII characters", shown(bad)));
        }
        let unique: BTreeSet<String> = self.tags.iter().map(|tag| tag.to_ascii_lowercase()).collect();
        if unique.len() != self.tags.len() {
            return refuse("tags", "has one tag twice (case does not count)");
        }
        self.icon_url.as_ref().map_or(Ok(()), |url| absolute("icon_url", url))
    }
}

fn absolute(member: &'static str, text: &str) -> Result<(), PriceError> {
    let url = url::Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    match url {
        Some(url) if !url.username().is_empty() || url.password().is_some() => refuse(member, "has credentials in it"),
        Some(_) if text.len() <= 2_048 => Ok(()),
        _ => refuse(member, "is not an absolute http or https URL of at most 2048 bytes"),
    }
}

/// One priced tool, prompt, resource or family of resources.
#[derive(Debug, Clone)]
pub struct Item {
    pub kind: Kind,
    /// The tool's or prompt's name, the resource's URI, or a URI template.
    pub key: String,
    /// In the order in which they are advertised; never empty.
    pub offers: Vec<Priced>,
    pub flow: Flow,
    pub about: About,
    /// A payment without an identifier is refused.
    pub identifier_required: bool,
    pub(super) template: Option<Template>,
}

impl Item {
    /// A resource whose `key` has braces is a family under a URI template (RFC 6570).
    pub fn new(
        kind: Kind,
        key: &str,
        terms: Vec<Terms>,
        about: About,
        identifier_required: bool,
    ) -> Result<Item, PriceError> {
        if key.is_empty() || key.len() > target::MAX_TARGET || key.chars().any(char::is_control) {
            return refuse("name", "is empty, too long, or has control characters");
        }
        let template = match kind {
            Kind::Resource if key.contains(['{', '}']) => {
                Some(Template::parse(key).or_else(|problem| refuse("uri", problem))?)
            }
            Kind::Resource if !key.contains(':') => return refuse("uri", "is no URI: it has no scheme"),
            _ => None,
        };
        about.check()?;
        let Some(flow) = terms.first().map(|terms| terms.flow) else {
            return refuse("offers", "has none: write a price, or list the item under free");
        };
        let mut offers: Vec<Priced> = Vec::with_capacity(terms.len());
        for terms in terms {
            if terms.flow != flow {
                return refuse("flow", "differs between the offers of one item: write it for the item");
            }
            let priced = terms.price()?;
            // Two options that differ in nothing that a payment shows could not be told apart when it is checked.
            if offers.iter().any(|other| same_payment(&other.offer, &priced.offer)) {
                return refuse("offers", "has two offers of the same amount, asset, network and recipient");
            }
            offers.push(priced);
        }
        Ok(Item { kind, key: key.to_owned(), offers, flow, about, identifier_required, template })
    }

    /// A name of the item that is the same in every replica: `tool:search`.
    pub fn scope(&self) -> String {
        format!("{}:{}", self.kind.word(), self.key)
    }
}

fn same_payment(a: &Offer, b: &Offer) -> bool {
    a.scheme == b.scheme
        && a.amount == b.amount
        && a.unit() == b.unit()
        && Offer::same_address(&a.network, &a.pay_to, &b.pay_to)
}

/// What becomes of an item that is listed nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unlisted {
    Free,
    Deny,
}

/// All items of one gate.
#[derive(Debug, Clone)]
pub struct Prices {
    /// Exact keys; the templates stand in their own list, the most specific first.
    exact: BTreeMap<(Kind, String), Item>,
    templates: Vec<Item>,
    free: BTreeSet<(Kind, String)>,
    unlisted: Unlisted,
    /// Kinds whose unlisted items are free whatever `unlisted` says.
    exempt: BTreeSet<Kind>,
    aliases: target::Aliases,
}

impl Prices {
    pub fn new(
        items: Vec<Item>,
        free: BTreeSet<(Kind, String)>,
        unlisted: Unlisted,
        exempt: BTreeSet<Kind>,
    ) -> Result<Prices, PriceError> {
        let mut exact = BTreeMap::new();
        let mut templates: Vec<Item> = Vec::new();
        for item in items {
            if free.contains(&(item.kind, item.key.clone())) {
                return refuse("free", format!("{} {:?} has a price too", item.kind.word(), shown(&item.key)));
            }
            let twice = match item.template {
                Some(_) => {
                    let twice = templates.iter().any(|other| other.key == item.key);
                    templates.push(item.clone());
                    twice
                }
                None => exact.insert((item.kind, item.key.clone()), item.clone()).is_some(),
            };
            if twice {
                return refuse("name", format!("{} {:?} is priced twice", item.kind.word(), shown(&item.key)));
            }
        }
        let literal = |item: &Item| item.template.as_ref().map_or(0, Template::literal_len);
        templates.sort_by(|a, b| literal(b).cmp(&literal(a)).then_with(|| a.key.cmp(&b.key)));
        let aliases = target::Aliases::new(exact.keys());
        if let Some((kind, key)) = aliases.collision() {
            let problem = format!("{} {:?} and another key differ only in their spelling", kind.word(), shown(key));
            return refuse("name", problem);
        }
        Ok(Prices { exact, templates, free, unlisted, exempt, aliases })
    }

    /// What a request is aimed at. `key` is the decoded name or URI of the request.
    pub fn resolve(&self, kind: Kind, key: &str) -> Target<'_> {
        target::resolve(self, kind, key)
    }

    pub(super) fn exact(&self, kind: Kind, key: &str) -> Option<&Item> {
        self.exact.get(&(kind, key.to_owned()))
    }

    pub(super) fn is_free(&self, kind: Kind, key: &str) -> bool {
        self.free.contains(&(kind, key.to_owned()))
    }

    pub(super) fn aliases(&self) -> &target::Aliases {
        &self.aliases
    }

    pub(super) fn templates(&self) -> &[Item] {
        &self.templates
    }

    pub(super) fn denies_unlisted(&self, kind: Kind) -> bool {
        self.unlisted == Unlisted::Deny && !self.exempt.contains(&kind)
    }

    pub fn items(&self) -> impl Iterator<Item = &Item> {
        self.exact.values().chain(&self.templates)
    }

    /// The same with those offers alone that `keep` says yes to. An item may be left without any.
    pub(super) fn showing(&self, keep: impl Fn(&Offer) -> bool) -> Prices {
        let mut shown = self.clone();
        for item in shown.exact.values_mut().chain(&mut shown.templates) {
            item.offers.retain(|priced| keep(&priced.offer));
        }
        shown
    }

    /// This item as it stands here.
    pub(super) fn same(&self, item: &Item) -> Option<&Item> {
        match item.template {
            Some(_) => self.templates.iter().find(|other| other.key == item.key),
            None => self.exact(item.kind, &item.key),
        }
    }

    /// Every unit that something is sold for.
    pub fn units(&self) -> BTreeSet<Unit> {
        self.items().flat_map(|item| &item.offers).map(|priced| priced.offer.unit()).collect()
    }
}

/// The prices of now, and the offers that were withdrawn and may still be paid: whoever was shown one has as long as
/// that offer says.
#[derive(Debug, Clone)]
pub struct Book {
    prices: Prices,
    withdrawn: Vec<Withdrawn>,
}

#[derive(Debug, Clone)]
struct Withdrawn {
    scope: String,
    offer: Offer,
    /// Unix milliseconds.
    until_ms: u64,
}

/// More offers are not remembered; the first to go is the one that would end soonest.
const MAX_WITHDRAWN: usize = 10_000;

impl Book {
    pub fn new(prices: Prices) -> Book {
        Book { prices, withdrawn: Vec::new() }
    }

    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// Takes over new prices.
    pub fn replace(&mut self, prices: Prices, now_ms: u64) {
        let mut kept: Vec<Withdrawn> = self.withdrawn.drain(..).filter(|old| old.until_ms > now_ms).collect();
        let current: Vec<(String, &Offer)> =
            prices.items().flat_map(|item| item.offers.iter().map(|priced| (item.scope(), &priced.offer))).collect();
        for item in self.prices.items() {
            let scope = item.scope();
            for priced in &item.offers {
                let offer = &priced.offer;
                if !current.iter().any(|(other, now)| *other == scope && json::equal(&now.raw, &offer.raw)) {
                    let until_ms = now_ms.saturating_add(offer.max_timeout_seconds.saturating_mul(1_000));
                    kept.push(Withdrawn { scope: scope.clone(), offer: offer.clone(), until_ms });
                }
            }
        }
        if kept.len() > MAX_WITHDRAWN {
            kept.sort_by_key(|old| old.until_ms);
            kept.drain(..kept.len() - MAX_WITHDRAWN);
        }
        self.withdrawn = kept;
        self.prices = prices;
    }

    /// The offer of this item that equals `accepted` in every member (as JSON values), of now or withdrawn within its
    /// own timeout.
    pub fn matching(&self, item: &Item, accepted: &serde_json::value::RawValue, now_ms: u64) -> Option<&Offer> {
        let scope = item.scope();
        let now = self.prices.items().filter(|other| other.scope() == scope).flat_map(|item| &item.offers);
        let old = self.withdrawn.iter().filter(|old| old.scope == scope && old.until_ms > now_ms);
        now.map(|priced| &priced.offer).chain(old.map(|old| &old.offer)).find(|offer| json::equal(&offer.raw, accepted))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub const PAY_TO: &str = "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4";
    pub const USDC: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";

    pub fn terms(atomic: u64) -> Terms {
        let amount = Amount::from_u64(atomic);
        Terms {
            scheme: "exact".into(),
            network: "stellar:testnet".parse().unwrap(),
            asset: USDC.parse().unwrap(),
            amount,
            shown_amount: amount.to_decimal(7),
            shown_asset: "USDC".into(),
            pay_to: PAY_TO.into(),
            max_timeout_seconds: 60,
            flow: Flow::Authorization,
            extra: serde_json::Map::new(),
        }
    }

    pub fn item(kind: Kind, key: &str, atomic: u64) -> Item {
        Item::new(kind, key, vec![terms(atomic)], About::default(), false).unwrap()
    }

    pub fn prices(items: Vec<Item>, unlisted: Unlisted) -> Prices {
        Prices::new(items, BTreeSet::new(), unlisted, BTreeSet::new()).unwrap()
    }

    fn evm() -> Terms {
        let mut terms = terms(10_000);
        terms.network = "eip155:8453".parse().unwrap();
        terms.asset = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913".parse().unwrap();
        terms.pay_to = "0x036CbD53842c5426634e7929541eC2318f3dCF7e".into();
        terms.extra = json!({"name": "USD Coin", "version": "2"}).as_object().unwrap().clone();
        terms
    }

    #[test]
    fn an_offer_is_written_as_payers_read_it() {
        let offer = terms(100_000).price().unwrap().offer;
        assert_eq!(
            offer.raw.get(),
            format!(
                r#"{{"amount":"100000","asset":"{USDC}","extra":{{"areFeesSponsored":true}},"maxTimeoutSeconds":60,"network":"stellar:testnet","payTo":"{PAY_TO}","scheme":"exact"}}"#
            )
        );
        let mut upfront = terms(1);
        upfront.flow = Flow::Upfront;
        assert_eq!(upfront.price().unwrap().offer.flow(), Flow::Upfront);
        let offer = evm().price().unwrap().offer;
        assert!(offer.extra_member("areFeesSponsored").is_none() && offer.extra_member("name").is_some());
    }

    #[test]
    fn terms_that_cannot_be_sold_are_refused_by_member() {
        type Change = fn(&mut Terms);
        let cases: [(&str, &str, Change); 13] = [
            ("scheme", "upto", |t| t.scheme = "upto".into()),
            ("scheme", "auth-capture", |t| t.scheme = "auth-capture".into()),
            ("scheme", "batch", |t| t.scheme = "batch".into()),
            ("price", "zero", |t| t.amount = Amount::ZERO),
            ("price", "127", |t| t.amount = Amount::MAX),
            ("flow", "escrow", |t| t.flow = Flow::Escrow),
            ("flow", "unknown", |t| t.flow = Flow::Unknown),
            ("pay_to", "G… or C…", |t| t.pay_to = "merchant".into()),
            ("pay_to", "muxed", |t| {
                t.pay_to = "MA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJVAAAAAAAAAAAAAJLK".into();
            }),
            ("asset", "C…", |t| t.asset = "USDC".parse().unwrap()),
            ("extra", "paymentFlow", |t| {
                t.extra.insert("paymentFlow".into(), "upfront".into());
            }),
            ("maxTimeoutSeconds", "timeout", |t| t.max_timeout_seconds = 0),
            ("network", "solana", |t| t.network = "solana:mainnet".parse().unwrap()),
        ];
        for (member, word, change) in cases {
            let mut terms = terms(1);
            change(&mut terms);
            let error = terms.price().unwrap_err();
            assert_eq!(error.member, member, "{error}");
            assert!(error.problem.contains(word), "{error}");
        }
        let mut nameless = evm();
        nameless.extra.remove("version");
        assert!(nameless.price().unwrap_err().problem.contains("version"));
        let mut permit = evm();
        permit.extra.insert("assetTransferMethod".into(), "permit2".into());
        assert!(permit.price().unwrap_err().problem.contains("eip3009"));
    }

    #[test]
    fn a_seed_in_the_wrong_place_is_not_repeated() {
        let mut wrong = terms(1);
        wrong.pay_to = format!("S{}", "A".repeat(55));
        assert!(!wrong.price().unwrap_err().to_string().contains("SAAA"));
    }

    #[test]
    fn an_item_has_offers_that_can_be_told_apart_and_bounded_words() {
        let new = |terms, about| Item::new(Kind::Tool, "t", terms, about, false).err().map(|e| e.member);
        assert_eq!(new(Vec::new(), About::default()), Some("offers"));
        assert_eq!(new(vec![terms(1), terms(1)], About::default()), Some("offers"));
        assert_eq!(new(vec![terms(1), evm()], About::default()), None);
        let about = |change: fn(&mut About)| {
            let mut about = About::default();
            change(&mut about);
            about
        };
        for (member, about) in [
            ("service_name", about(|a| a.service_name = Some("é".into()))),
            ("service_name", about(|a| a.service_name = Some("x".repeat(33)))),
            ("tags", about(|a| a.tags = vec!["x".into(); 6])),
            ("tags", about(|a| a.tags = vec!["X".into(), "x".into()])),
            ("tags", about(|a| a.tags = vec![String::new()])),
            ("icon_url", about(|a| a.icon_url = Some("/icon.png".into()))),
            ("icon_url", about(|a| a.icon_url = Some("data:image/png;base64,AA".into()))),
            ("url", about(|a| a.url = Some("https://user:pw@host/mcp".into()))),
            ("mime_type", about(|a| a.mime_type = Some("json".into()))),
        ] {
            assert_eq!(new(vec![terms(1)], about), Some(member));
        }
    }

    #[test]
    fn keys_that_contradict_each_other_are_refused() {
        let free = BTreeSet::from([(Kind::Tool, "search".to_owned())]);
        let new = |items, free| Prices::new(items, free, Unlisted::Free, BTreeSet::new()).err().map(|e| e.member);
        assert_eq!(new(vec![item(Kind::Tool, "search", 1)], free.clone()), Some("free"));
        assert_eq!(new(vec![item(Kind::Prompt, "search", 1)], free), None);
        let twice = vec![item(Kind::Tool, "search", 1), item(Kind::Tool, "search", 2)];
        assert_eq!(new(twice, BTreeSet::new()), Some("name"));
        let spelled = vec![item(Kind::Tool, "search", 1), item(Kind::Tool, "Search", 2)];
        assert_eq!(new(spelled, BTreeSet::new()), Some("name"));
    }

    #[test]
    fn a_withdrawn_offer_is_good_for_its_own_timeout() {
        let old = item(Kind::Tool, "search", 1);
        let mut book = Book::new(prices(vec![old.clone()], Unlisted::Free));
        let accepted = old.offers[0].offer.raw.clone();
        book.replace(prices(vec![item(Kind::Tool, "search", 2)], Unlisted::Free), 1_000);
        let now = book.prices().items().next().unwrap().clone();
        assert!(book.matching(&now, &accepted, 60_999).is_some());
        assert!(book.matching(&now, &accepted, 61_000).is_none());
        assert!(book.matching(&now, &now.offers[0].offer.raw, u64::MAX).is_some());
        // Reloaded once more, with the same prices: the moment of its end stays.
        book.replace(book.prices().clone(), 30_000);
        assert!(book.matching(&now, &accepted, 60_999).is_some() && book.matching(&now, &accepted, 61_000).is_none());
        // Not another item's offer.
        let mut other = now.clone();
        other.key = "other".into();
        assert!(book.matching(&other, &accepted, 2_000).is_none());
    }

    #[test]
    fn an_offer_is_matched_in_every_member() {
        let item = item(Kind::Tool, "search", 1);
        let book = Book::new(prices(vec![item.clone()], Unlisted::Free));
        let good = item.offers[0].offer.raw.get().to_owned();
        let matches = |text: &str| {
            let raw = serde_json::value::RawValue::from_string(text.to_owned()).unwrap();
            book.matching(&item, &raw, 0).is_some()
        };
        assert!(matches(&good));
        for (from, to) in [
            (r#""amount":"1""#, r#""amount":"0""#),
            (r#""amount":"1""#, r#""amount":1"#),
            ("true", "false"),
            (r#"{"areFeesSponsored":true}"#, "{}"),
            ("60", "61"),
            ("testnet", "pubnet"),
            ("exact", "upto"),
            (r#"{"amount""#, r#"{"more":1,"amount""#),
            (PAY_TO, USDC),
        ] {
            let changed = good.replacen(from, to, 1);
            assert_ne!(changed, good, "{from}");
            assert!(!matches(&changed), "{from} to {to}");
        }
    }
}
