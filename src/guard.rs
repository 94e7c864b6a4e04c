//! Pure policy: (listing, live challenge, call, rules) -> [`Quote`] or a refusal. No I/O. Only this module makes a
//! `Quote`, and every later step uses the offer that is frozen in it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use url::Url;

use crate::catalog::{Listing, ResourceRef, SellerTransport};
use crate::json::{self, JsonError, Numbers};
use crate::money::{AgentId, Amount, Asset, Bounds, IdempotencyKey, Network, Unit};
use crate::policy::{Banned, Policy};
use crate::upstream::Endpoint;
use crate::x402::{Challenge, Flow, Offer, bazaar};

/// One paid call as the agent asked for it, every member parsed.
#[derive(Debug, Clone)]
pub struct Call {
    pub agent: AgentId,
    pub session: Option<String>,
    /// What the agent's credential bounds, beside the ledger's limits.
    pub bounds: BTreeMap<Unit, Bounds>,
    pub reference: ResourceRef,
    pub network: Network,
    pub scheme: String,
    pub asset: Asset,
    /// Zero asks for a quote.
    pub max_amount: Amount,
    pub expected_version: Option<String>,
    /// An object; the seller gets exactly these bytes.
    pub arguments: Box<RawValue>,
    pub idempotency_key: Option<IdempotencyKey>,
    pub input_responses: Option<Box<RawValue>>,
    pub request_state: Option<Box<RawValue>>,
}

impl Call {
    /// What makes two calls the same: resource and arguments (key order of RFC 8785, number tokens as written, so `1`
    /// and `1.0` differ). Not the offer, the maximum, the version, `inputResponses` or `requestState`.
    pub fn hash(&self) -> Result<[u8; 32], JsonError> {
        let arguments = json::canonical(&self.arguments, Numbers::AsWritten)?;
        let reference = json::raw(&self.reference.to_string());
        Ok(Sha256::digest(format!("{{\"arguments\":{arguments},\"ref\":{}}}", reference.get())).into())
    }

    /// To a seller's `input_required`.
    pub fn brings_answers(&self) -> bool {
        self.input_responses.is_some() || self.request_state.is_some()
    }
}

/// What the operator allows.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// The networks that this process may pay on; the mainnet rule is decided when this set is made.
    pub payable: BTreeSet<Network>,
}

/// The seller's side at the moment of the call.
#[derive(Debug, Clone, Copy)]
pub struct Live<'a> {
    pub endpoint: &'a Endpoint,
    pub challenge: &'a Challenge,
    /// The tool's input schema from `tools/list`; used where the challenge declares none.
    pub listed_schema: Option<&'a RawValue>,
}

/// Why a call gets no [`Quote`].
#[derive(Debug)]
pub enum Refusal {
    /// A scheme that this build cannot pay on that network.
    Scheme,
    /// Not enabled, or the mainnet rule is not met.
    Network,
    /// The live challenge is not what the catalog version says; the members that differ, by their wire names.
    Changed(Vec<&'static str>),
    /// Neither the catalog nor the seller has the selected (network, scheme, asset).
    OfferNotThere,
    /// The selected offer asks for something that this build does not do; the member that asks.
    Unpayable(&'static str),
    /// The operator's lists do not allow its asset or its recipient.
    Banned(Banned),
    /// `maxAtomicAmount` is zero: what the seller asks for.
    Quote(Vec<Offer>),
}

/// One offer, chosen and frozen. Consumed by the reservation, so nothing unguarded can be reserved or signed.
#[derive(Debug)]
#[must_use]
#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    expect(dead_code, reason = "only the ledger and what stands on it read it")
)]
pub struct Quote {
    pub(crate) agent: AgentId,
    pub(crate) session: Option<String>,
    /// Of the credential, in the offer's unit.
    pub(crate) bounds: Bounds,
    pub(crate) idempotency_key: Option<IdempotencyKey>,
    pub(crate) call_hash: [u8; 32],
    pub(crate) resource_ref: String,
    pub(crate) version_hash: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) tool: String,
    pub(crate) offer: Offer,
    pub(crate) max_amount: Amount,
    /// The challenge's `resource` and `extensions`, to be echoed.
    pub(crate) resource: Box<RawValue>,
    pub(crate) extensions: Option<Box<RawValue>>,
    pub(crate) _admitted: Admitted,
}

/// Proof that [`admit`] made a [`Quote`]: nothing else can make this.
#[derive(Debug)]
pub(crate) struct Admitted(());

#[cfg(test)]
impl Admitted {
    pub(crate) fn for_a_test() -> Admitted {
        Admitted(())
    }
}

impl Quote {
    pub fn unit(&self) -> Unit {
        Unit { network: self.offer.network.clone(), asset: self.offer.asset.clone() }
    }
    pub fn amount(&self) -> Amount {
        self.offer.amount
    }
}

/// What can be refused before anybody is asked.
pub fn payable(call: &Call, rules: &Rules) -> Result<(), Refusal> {
    if call.scheme != "exact" {
        return Err(Refusal::Scheme);
    }
    if !rules.payable.contains(&call.network) {
        return Err(Refusal::Network);
    }
    if call.network.namespace() != "stellar" {
        return Err(Refusal::Scheme);
    }
    Ok(())
}

/// Select one offer, freeze it, and check every rule on the frozen entry.
pub fn admit(
    listing: &Listing,
    live: Live<'_>,
    call: &Call,
    call_hash: [u8; 32],
    rules: &Rules,
    policy: &Policy,
) -> Result<Quote, Refusal> {
    payable(call, rules)?;
    let mut changed = changed_declaration(listing, &live);
    let offer = match select(&live.challenge.offers, call) {
        Some(offer) => {
            changed.extend(changed_offer(&listing.offers, offer));
            offer
        }
        None if listing.offers.iter().any(|offer| is_selected(offer, call)) => {
            changed.push("accepts");
            return Err(Refusal::Changed(changed));
        }
        None if !changed.is_empty() => return Err(Refusal::Changed(changed)),
        None => return Err(Refusal::OfferNotThere),
    };
    if !changed.is_empty() {
        return Err(Refusal::Changed(changed));
    }
    if let Some(member) = unpayable(offer) {
        return Err(Refusal::Unpayable(member));
    }
    let unit = Unit { network: offer.network.clone(), asset: offer.asset.clone() };
    policy.payment(&unit, &offer.pay_to).map_err(Refusal::Banned)?;
    if call.max_amount.is_zero() {
        return Err(Refusal::Quote(live.challenge.offers.clone()));
    }
    Ok(Quote {
        agent: call.agent.clone(),
        session: call.session.clone(),
        bounds: bounds(&call.bounds, &offer.unit()),
        idempotency_key: call.idempotency_key.clone(),
        call_hash,
        resource_ref: call.reference.to_string(),
        version_hash: listing.version_hash.clone(),
        endpoint: live.endpoint.clone(),
        tool: listing.reference.tool_name.clone().unwrap_or_default(),
        offer: offer.clone(),
        max_amount: call.max_amount,
        resource: live.challenge.resource.clone(),
        extensions: live.challenge.extensions.clone(),
        _admitted: Admitted(()),
    })
}

/// Of all entries for the unit; two spellings of an EVM address are one unit.
pub(crate) fn bounds(all: &BTreeMap<Unit, Bounds>, unit: &Unit) -> Bounds {
    let same = |other: &Unit| {
        other.network == unit.network && Offer::same_address(&unit.network, other.asset.as_str(), unit.asset.as_str())
    };
    all.iter().filter(|(other, _)| same(other)).fold(Bounds::default(), |sum, (_, bounds)| sum.and(*bounds))
}

fn is_selected(offer: &Offer, call: &Call) -> bool {
    offer.network == call.network
        && offer.scheme == call.scheme
        && Offer::same_address(&call.network, offer.asset.as_str(), call.asset.as_str())
}

/// The seller's first offer of the selected (network, scheme, asset); one that can be paid before one that cannot, the
/// `authorization` flow before the others (core specification 6.1).
fn select<'a>(offers: &'a [Offer], call: &Call) -> Option<&'a Offer> {
    offers.iter().filter(|offer| is_selected(offer, call)).min_by_key(|offer| match (unpayable(offer), offer.flow()) {
        (None, Flow::Authorization) => 0,
        (None, _) => 1,
        (Some(_), _) => 2,
    })
}

/// Resource URL, tool name, transport, input schema.
fn changed_declaration(listing: &Listing, live: &Live<'_>) -> Vec<&'static str> {
    let mut changed = Vec::new();
    let declared = bazaar::declaration(live.challenge.extensions.as_deref());
    if !same_url(&listing.reference.url, &live.challenge.resource_url) {
        changed.push("resource.url");
    }
    if let Some(declared) = &declared {
        if declared.malformed.is_some() || declared.input_type.as_deref().is_some_and(|kind| kind != "mcp") {
            changed.push("bazaar");
        }
        if declared.tool_name.as_deref().is_some_and(|name| Some(name) != listing.reference.tool_name.as_deref()) {
            changed.push("toolName");
        }
        let transport = match declared.transport.as_deref() {
            None | Some("streamable-http") => Some(SellerTransport::StreamableHttp),
            Some("sse") => Some(SellerTransport::Sse),
            Some(_) => None,
        };
        if transport != Some(listing.transport) {
            changed.push("transport");
        }
    }
    let live_schema = declared.as_ref().and_then(|d| d.input_schema).or(live.listed_schema);
    let same_schema = match (listing.input_schema.as_deref(), live_schema) {
        (Some(listed), Some(live)) => json::equal(listed, live),
        (None, None) => true,
        _ => false,
    };
    if !same_schema {
        changed.push("inputSchema");
    }
    changed
}

/// Empty when the catalog version has an offer with the same terms; else the members that differ from the nearest.
fn changed_offer(listed: &[Offer], live: &Offer) -> Vec<&'static str> {
    listed
        .iter()
        .filter(|offer| {
            offer.network == live.network
                && offer.scheme == live.scheme
                && Offer::same_address(&live.network, offer.asset.as_str(), live.asset.as_str())
        })
        .map(|offer| offer.differing_members(live))
        .min_by_key(Vec::len)
        .unwrap_or_else(|| vec!["accepts"])
}

/// Equal as URLs (host case, default port); a trailing slash of the path does not matter, a query does.
fn same_url(listed: &str, live: &str) -> bool {
    let normal = |text: &str| -> Option<String> {
        let mut url = Url::parse(text).ok()?;
        let path = url.path().trim_end_matches('/').to_owned();
        if !url.cannot_be_a_base() {
            url.set_path(&path);
        }
        Some(url.to_string())
    };
    listed == live || normal(listed).is_some_and(|listed| normal(live) == Some(listed))
}

/// The member of an offer that asks for something which `exact` on Stellar cannot do, or that this build does not.
fn unpayable(offer: &Offer) -> Option<&'static str> {
    if !offer.flow_is_payable() {
        return Some("paymentFlow");
    }
    if offer.network.namespace() != "stellar" || offer.scheme != "exact" {
        return Some("scheme");
    }
    // Without a sponsor the buyer would have to submit and pay for the transaction itself.
    match offer.extra_member("areFeesSponsored").map(RawValue::get) {
        Some("true") => {}
        _ => return Some("areFeesSponsored"),
    }
    match offer.extra_member("assetTransferMethod").map(json::string) {
        None => {}
        Some(Some(method)) if method == "default" => {}
        Some(_) => return Some("assetTransferMethod"),
    }
    if offer.amount.is_zero() || offer.amount.to_i128().is_none() {
        return Some("amount");
    }
    if offer.asset.as_str().parse::<stellar_strkey::Contract>().is_err() {
        return Some("asset");
    }
    let account = offer.pay_to.parse::<stellar_strkey::ed25519::PublicKey>().is_ok();
    if !account && offer.pay_to.parse::<stellar_strkey::Contract>().is_err() {
        return Some("payTo");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x402;

    const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
    const PAY_TO: &str = "GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H";
    const OFFER: &str = r#"{"scheme":"exact","network":"stellar:testnet","amount":"10000","asset":"CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA","payTo":"GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H","maxTimeoutSeconds":60,"extra":{"areFeesSponsored":true}}"#;
    const BAZAAR: &str = r#""bazaar":{"info":{"input":{"type":"mcp","toolName":"weather","inputSchema":{"type":"object"}}},"schema":{}}"#;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn listing(offers: &str) -> Listing {
        let item = format!(
            r#"{{"resource":"https://s.example/mcp","type":"mcp","x402Version":2,"accepts":[{offers}],"extensions":{{{BAZAAR}}}}}"#
        );
        Listing::parse(&raw(&item)).unwrap()
    }

    fn challenge(url: &str, offers: &str, extensions: &str) -> Challenge {
        let text = format!(
            r#"{{"x402Version":2,"resource":{{"url":"{url}"}},"accepts":[{offers}],"extensions":{{{extensions}}}}}"#
        );
        x402::payment_required(&raw(&text)).unwrap()
    }

    fn call(max: u64) -> Call {
        Call {
            agent: "local".parse().unwrap(),
            session: None,
            bounds: BTreeMap::new(),
            reference: ResourceRef::new(crate::catalog::Kind::Mcp, "https://s.example/mcp", Some("weather")).unwrap(),
            network: "stellar:testnet".parse().unwrap(),
            scheme: "exact".into(),
            asset: ASSET.parse().unwrap(),
            max_amount: Amount::from_u64(max),
            expected_version: None,
            arguments: raw("{}"),
            idempotency_key: None,
            input_responses: None,
            request_state: None,
        }
    }

    fn rules() -> Rules {
        Rules { payable: BTreeSet::from(["stellar:testnet".parse().unwrap()]) }
    }

    fn admitted(listing: &Listing, challenge: &Challenge, call: &Call) -> Result<Quote, Refusal> {
        let endpoint =
            Endpoint { url: "https://s.example/mcp".parse().unwrap(), transport: SellerTransport::StreamableHttp };
        admit(
            listing,
            Live { endpoint: &endpoint, challenge, listed_schema: None },
            call,
            [0; 32],
            &rules(),
            &Policy::default(),
        )
    }

    fn changed(challenge: &Challenge) -> Vec<&'static str> {
        match admitted(&listing(OFFER), challenge, &call(20_000)) {
            Err(Refusal::Changed(members)) => members,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_member_that_differs_from_the_catalog_version_is_named() {
        let url = "https://s.example/mcp";
        for (from, to, member) in [
            ("\"10000\"", "\"10001\"", "amount"),
            (PAY_TO, ASSET, "payTo"),
            (":60", ":61", "maxTimeoutSeconds"),
            ("true}", "true,\"memo\":1}", "extra"),
        ] {
            assert_eq!(changed(&challenge(url, &OFFER.replace(from, to), BAZAAR)), [member]);
        }
        assert_eq!(changed(&challenge("https://s.example/other", OFFER, BAZAAR)), ["resource.url"]);
        assert_eq!(changed(&challenge("https://s.example/mcp?x=1", OFFER, BAZAAR)), ["resource.url"]);
        let other = |from, to| challenge(url, OFFER, &BAZAAR.replace(from, to));
        assert_eq!(changed(&other("weather", "storm")), ["toolName"]);
        assert_eq!(changed(&other("\"object\"", "\"object\",\"required\":[\"a\"]")), ["inputSchema"]);
        assert_eq!(changed(&other("\"type\":\"mcp\"", "\"type\":\"mcp\",\"transport\":\"sse\"")), ["transport"]);
        assert_eq!(changed(&other("\"type\":\"mcp\"", "\"type\":\"http\"")), ["bazaar"]);
        assert_eq!(changed(&challenge(url, OFFER, "")), ["inputSchema"], "neither challenge nor tools/list has one");
        assert_eq!(changed(&challenge(url, &OFFER.replace("exact", "upto"), BAZAAR)), ["accepts"]);
    }

    #[test]
    fn the_same_terms_make_a_quote_of_the_frozen_offer() {
        let trailing = challenge("https://S.example:443/mcp/", OFFER, BAZAAR);
        let quote = admitted(&listing(OFFER), &trailing, &call(1)).unwrap();
        assert_eq!(quote.amount(), Amount::from_u64(10_000), "a smaller maximum is the ledger's to refuse");
        assert_eq!(quote.offer.raw.get(), OFFER);
    }

    #[test]
    fn policy_is_checked_on_the_selected_offer_and_no_other() {
        let other = OFFER.replace("\"10000\"", "\"1\"").replace("stellar:testnet", "stellar:pubnet");
        let both = format!("{other},{OFFER}");
        let quote = admitted(&listing(&both), &challenge("https://s.example/mcp", &both, BAZAAR), &call(20_000));
        assert_eq!(quote.unwrap().amount(), Amount::from_u64(10_000));
        let mut pubnet = call(20_000);
        pubnet.network = "stellar:pubnet".parse().unwrap();
        let refused = admitted(&listing(&both), &challenge("https://s.example/mcp", &both, BAZAAR), &pubnet);
        assert!(matches!(refused, Err(Refusal::Network)), "{refused:?}");
        let mut upto = call(20_000);
        upto.scheme = "upto".into();
        assert!(matches!(payable(&upto, &rules()), Err(Refusal::Scheme)));
    }

    #[test]
    fn an_offer_that_asks_for_more_than_this_build_does_is_refused() {
        for (from, to, member) in [
            ("true}", "true,\"paymentFlow\":\"escrow\"}", "paymentFlow"),
            ("true}", "true,\"paymentFlow\":\"later\"}", "paymentFlow"),
            ("true}", "true,\"paymentFlow\":7}", "paymentFlow"),
            ("true}", "true,\"assetTransferMethod\":\"permit2\"}", "assetTransferMethod"),
            (":true", ":false", "areFeesSponsored"),
            (":true", ":\"true\"", "areFeesSponsored"),
            ("\"10000\"", "\"0\"", "amount"),
            ("\"10000\"", "\"170141183460469231731687303715884105728\"", "amount"),
            (PAY_TO, "MA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJUAAAAAAAAAAAACJUQ", "payTo"),
        ] {
            let offer = OFFER.replace(from, to);
            let refused =
                admitted(&listing(&offer), &challenge("https://s.example/mcp", &offer, BAZAAR), &call(20_000));
            assert!(matches!(refused, Err(Refusal::Unpayable(m)) if m == member), "{member}: {refused:?}");
        }
    }

    #[test]
    fn the_authorization_flow_is_preferred_over_upfront() {
        let upfront = OFFER.replace("true}", "true,\"paymentFlow\":\"upfront\"}");
        let both = format!("{upfront},{OFFER}");
        let quote = admitted(&listing(&both), &challenge("https://s.example/mcp", &both, BAZAAR), &call(20_000));
        assert_eq!(quote.unwrap().offer.flow(), Flow::Authorization);
    }

    #[test]
    fn zero_asks_for_the_price_and_a_foreign_offer_is_an_argument_error() {
        let live = challenge("https://s.example/mcp", OFFER, BAZAAR);
        assert!(matches!(admitted(&listing(OFFER), &live, &call(0)), Err(Refusal::Quote(offers)) if offers.len() == 1));
        let mut other = call(1);
        other.asset = "CDLZFC3SYJYDZT7K67VZ75HPJVIEUVNIXF47ZG2FB2RMQQVU2HHGCYSC".parse().unwrap();
        assert!(matches!(admitted(&listing(OFFER), &live, &other), Err(Refusal::OfferNotThere)));
    }

    #[test]
    fn a_call_is_the_same_whatever_the_order_of_its_arguments_and_other_for_another_number() {
        let hash = |arguments: &str| Call { arguments: raw(arguments), ..call(1) }.hash().unwrap();
        assert_eq!(hash(r#"{"a":1,"b":"x"}"#), hash(r#"{ "b":"\u0078", "a":1 }"#));
        assert_ne!(hash(r#"{"a":1}"#), hash(r#"{"a":1.0}"#));
        let keyed = Call { max_amount: Amount::from_u64(7), request_state: Some(raw("\"s\"")), ..call(1) };
        assert_eq!(keyed.hash().unwrap(), call(1).hash().unwrap());
    }
}
