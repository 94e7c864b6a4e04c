//! The gate's section: prices as data, who settles, and what keeps a payment's output recoverable.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use url::Url;

use super::gate_hooks::{self, GateHooks};
use super::value::{Secret, bounded, is_loopback, millis, operator_url, secret_env};
use super::{
    ConfigError, KeyRingSource, NetworkConfig, NetworkSecurity, Source, Store, file, keys, networks, refusal, refuse,
    security, store,
};
use crate::gate::Kind;
use crate::gate::junk::JunkLimit;
use crate::gate::prices::{About, Item, PriceError, Prices, Terms, Unlisted};
use crate::money::{Amount, Asset, Network, ParseError};
use crate::seal::KeyRing;
use crate::x402::{Flow, Offer, assets};

#[derive(Debug, Clone)]
pub struct GateConfig {
    pub prices: Prices,
    /// Every network that something is sold on has its entry.
    pub facilitators: BTreeMap<Network, GateFacilitator>,
    /// Those whose chain is asked what became of a settlement.
    pub networks: BTreeMap<Network, NetworkConfig>,
    /// Those on which a person resolves it (`gate.unknown`).
    pub resolved_by_operator: BTreeSet<Network>,
    pub store: Store,
    pub ring: KeyRing,
    /// Never below the life of an authorization.
    pub answer_ttl: Duration,
    /// What a gate works on is another one's after this long without a sign of it.
    pub lease: Duration,
    /// A larger answer is not stored; its receipt is, bytes.
    pub max_answer_bytes: usize,
    pub security: NetworkSecurity,
    /// Payments of one source that nobody knows and that turn out to be none.
    pub junk: JunkLimit,
    pub hooks: Option<GateHooks>,
}

#[derive(Debug, Clone)]
pub struct GateFacilitator {
    pub base_url: Url,
    /// The value of `Authorization`.
    pub auth_header: Option<Secret>,
    pub timeout: Duration,
}

/// Short names of networks, which stand in configuration alone.
const ALIASES: [(&str, &str); 9] = [
    ("base", "eip155:8453"),
    ("base-sepolia", "eip155:84532"),
    ("polygon", "eip155:137"),
    ("arbitrum", "eip155:42161"),
    ("arbitrum-sepolia", "eip155:421614"),
    ("monad", "eip155:143"),
    ("stellar", "stellar:pubnet"),
    ("stellar-pubnet", "stellar:pubnet"),
    ("stellar-testnet", "stellar:testnet"),
];

/// A network by its CAIP-2 name or its short one.
pub(super) fn network(field: &str, text: &str) -> Result<Network, ConfigError> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == text).map_or(text, |(_, name)| *name);
    name.parse()
        .or_else(|e: ParseError| refuse(field, format!("{e}, or one of base, base-sepolia, stellar-testnet, …")))
}

/// Reads the gate's part of a configuration file. What only `serve` needs may be missing.
pub fn load_gate(path: Option<&Path>, source: &dyn Source) -> Result<GateConfig, ConfigError> {
    parse(&super::text(path, source)?, source)
}

pub(super) fn parse(text: &str, source: &dyn Source) -> Result<GateConfig, ConfigError> {
    let file: file::File = serde_saphyr::from_str(text).map_err(|e| refusal::sentence(text, &e))?;
    let Some(gate) = file.gate else {
        return refuse("gate", "is missing: write what is sold there");
    };
    let allow_insecure = file.network_security.allow_insecure_local;
    let networks = networks::networks(file.networks, allow_insecure)?;
    let prices = prices(&gate)?;
    let sold: BTreeSet<Network> = prices.units().into_iter().map(|unit| unit.network).collect();
    let mut resolved_by_operator = BTreeSet::new();
    for (name, who) in &gate.unknown {
        let field = format!("gate.unknown.{name}");
        match who.as_str() {
            "operator" => resolved_by_operator.insert(network(&field, name)?),
            other => {
                return refuse(field, format!("{other:?} is unknown: write operator, or configure the network's RPC"));
            }
        };
    }
    for name in &sold {
        let asked = networks.get(name).is_some_and(|network| !network.rpc_urls.is_empty());
        if !asked && !resolved_by_operator.contains(name) {
            return refuse(
                format!("networks.{name}.rpc_urls"),
                format!(
                    "is empty, but something is sold on {name}: name an RPC that can say what became of a settlement, \
                     or write gate.unknown: {{'{name}': operator}}"
                ),
            );
        }
    }
    let KeyRingSource::Keys(ring) = keys::key_ring(&file.keys, source)? else {
        return refuse(
            "keys.ring_env",
            "is missing: a gate keeps settle requests and paid answers sealed, so it needs a key (openssl rand -hex 32)",
        );
    };
    let longest = prices.items().flat_map(|item| &item.offers).map(|priced| priced.offer.max_timeout_seconds).max();
    let ttl = gate.response_cache.ttl_seconds.unwrap_or(3_600);
    if let Some(longest) = longest.filter(|longest| ttl < *longest) {
        return refuse(
            "gate.response_cache.ttl_seconds",
            format!(
                "{ttl} is below the longest max_timeout_seconds ({longest}): an output would be gone before its payment"
            ),
        );
    }
    Ok(GateConfig {
        facilitators: facilitators(&gate, &sold, allow_insecure, source)?,
        junk: junk(&gate.junk)?,
        hooks: gate_hooks::hooks(&gate, allow_insecure, source)?,
        prices,
        networks,
        resolved_by_operator,
        store: store::store(&file.budget, true, source)?,
        ring,
        answer_ttl: Duration::from_secs(ttl),
        lease: millis("gate.lease_ms", gate.lease_ms, 30_000, 2_000, 300_000)?,
        max_answer_bytes: bounded(
            "gate.response_cache.max_bytes",
            gate.response_cache.max_bytes,
            4 << 20,
            1_024,
            64 << 20,
        )?,
        security: security::security(file.network_security, source)?,
    })
}

fn junk(file: &file::GateJunk) -> Result<JunkLimit, ConfigError> {
    let count = |member: &str, value: Option<u32>, default: u32, max: u32| match value.unwrap_or(default) {
        value if (1..=max).contains(&value) => Ok(value),
        value => refuse(format!("gate.junk.{member}"), format!("{value} is not between 1 and {max}")),
    };
    let usual = JunkLimit::default();
    Ok(JunkLimit {
        per_second: count("per_second", file.per_second, usual.per_second, 100_000)?,
        burst: count("burst", file.burst, usual.burst, 1_000_000)?,
    })
}

fn facilitators(
    gate: &file::Gate,
    sold: &BTreeSet<Network>,
    allow_insecure: bool,
    source: &dyn Source,
) -> Result<BTreeMap<Network, GateFacilitator>, ConfigError> {
    let read = |field: &str, file: &file::GateFacilitator| {
        let base_url = operator_url(&format!("{field}.base_url"), &file.base_url)?;
        if base_url.scheme() != "https" && !(allow_insecure || is_loopback(&base_url)) {
            return refuse(format!("{field}.base_url"), "is not HTTPS: only a facilitator on loopback may be plain");
        }
        let auth_header = match &file.auth_header_env {
            None => None,
            Some(name) => match secret_env(name, source) {
                Some(secret) => Some(secret),
                None => {
                    let problem = format!("the environment variable {name} is not set");
                    return refuse(format!("{field}.auth_header_env"), problem);
                }
            },
        };
        let timeout = millis(&format!("{field}.timeout_ms"), file.timeout_ms, 30_000, 100, 300_000)?;
        Ok(GateFacilitator { base_url, auth_header, timeout })
    };
    let mut own = BTreeMap::new();
    for (name, file) in &gate.facilitators {
        let field = format!("gate.facilitators.{name}");
        let named = network(&field, name)?;
        if !sold.contains(&named) {
            return refuse(field, "nothing is sold on this network: remove it");
        }
        if own.insert(named, read(&field, file)?).is_some() {
            return refuse(field, "names a network that stands there under another name too");
        }
    }
    let common = gate.facilitator.as_ref().map(|file| read("gate.facilitator", file)).transpose()?;
    for name in sold {
        if own.contains_key(name) {
            continue;
        }
        let Some(common) = &common else {
            let problem = format!("is missing: name who verifies and settles payments on {name}");
            return refuse("gate.facilitator.base_url", problem);
        };
        own.insert(name.clone(), common.clone());
    }
    Ok(own)
}

fn prices(gate: &file::Gate) -> Result<Prices, ConfigError> {
    let unlisted = match gate.default.as_deref() {
        Some("free") => Unlisted::Free,
        Some("deny") => Unlisted::Deny,
        None => return refuse("gate.default", "is missing: write free or deny, for what is listed nowhere"),
        Some(other) => return refuse("gate.default", format!("{other:?} is unknown: write free or deny")),
    };
    let mut exempt = BTreeSet::new();
    for (i, method) in gate.exempt_methods.iter().enumerate() {
        let Some(kind) = Kind::of_method(method) else {
            let problem = format!("{method:?} is unknown: write tools/call, resources/read or prompts/get");
            return refuse(format!("gate.exempt_methods[{i}]"), problem);
        };
        exempt.insert(kind);
    }
    for (member, set) in [
        ("offers", gate.defaults.offers.is_some()),
        ("description", gate.defaults.description.is_some()),
        ("price", gate.defaults.price.is_some() && gate.defaults.amount_atomic.is_some()),
    ] {
        if set {
            return refuse(
                format!("gate.defaults.{member}"),
                "cannot be a default of all items: write it for the item",
            );
        }
    }
    let mut items = Vec::new();
    for (kind, section, list) in [
        (Kind::Tool, "tools", &gate.tools),
        (Kind::Resource, "resources", &gate.resources),
        (Kind::Prompt, "prompts", &gate.prompts),
    ] {
        for (key, entry) in list {
            items.push(item(kind, &format!("gate.{section}.{key}"), key, entry, gate)?);
        }
    }
    if items.is_empty() {
        return refuse("gate", "sells nothing: write a price under tools, resources or prompts");
    }
    let mut free = BTreeSet::new();
    for (kind, names) in
        [(Kind::Tool, &gate.free.tools), (Kind::Resource, &gate.free.resources), (Kind::Prompt, &gate.free.prompts)]
    {
        free.extend(names.iter().map(|name| (kind, name.clone())));
    }
    Prices::new(items, free, unlisted, exempt).or_else(|e| refuse(format!("gate.{}", e.member), e.problem))
}

fn item(kind: Kind, field: &str, key: &str, entry: &file::GateItem, gate: &file::Gate) -> Result<Item, ConfigError> {
    let defaults = &gate.defaults;
    let or = |own: &Option<String>, common: &Option<String>| own.clone().or_else(|| common.clone());
    let flow = match or(&entry.flow, &defaults.flow).as_deref() {
        None | Some("authorization") => Flow::Authorization,
        Some("upfront") => Flow::Upfront,
        Some(other) => {
            let problem = format!("{other:?} is not served: write authorization or upfront");
            return refuse(format!("{field}.flow"), problem);
        }
    };
    let own = file::GateOffer {
        price: entry.price.clone(),
        amount_atomic: entry.amount_atomic.clone(),
        scheme: entry.scheme.clone(),
        network: entry.network.clone(),
        asset: entry.asset.clone(),
        pay_to: entry.pay_to.clone(),
        max_timeout_seconds: entry.max_timeout_seconds,
        extra: entry.extra.clone(),
    };
    let mut terms = Vec::new();
    match &entry.offers {
        Some(_) if entry.price.is_some() || entry.amount_atomic.is_some() => {
            return refuse(
                format!("{field}.offers"),
                "stands beside a price of the item: write the price into an offer",
            );
        }
        Some(offers) => {
            for (i, offer) in offers.iter().enumerate() {
                terms.push(offered(&format!("{field}.offers[{i}]"), offer, &own, flow, gate)?);
            }
        }
        None => terms.push(offered(field, &own, &file::GateOffer::default(), flow, gate)?),
    }
    let about = About {
        url: or(&entry.url, &defaults.url),
        description: entry.description.clone(),
        mime_type: or(&entry.mime_type, &defaults.mime_type),
        service_name: or(&entry.service_name, &defaults.service_name),
        tags: entry.tags.clone().or_else(|| defaults.tags.clone()).unwrap_or_default(),
        icon_url: or(&entry.icon_url, &defaults.icon_url),
    };
    let identifier_required = match or(&entry.payment_identifier, &defaults.payment_identifier).as_deref() {
        None | Some("optional") => false,
        Some("required") => true,
        Some(other) => {
            let problem = format!("{other:?} is unknown: write optional or required");
            return refuse(format!("{field}.payment_identifier"), problem);
        }
    };
    Item::new(kind, key, terms, about, identifier_required)
        .or_else(|e: PriceError| refuse(format!("{field}.{}", e.member), e.problem))
}

/// One payment option: its own members, then the item's, then the gate's defaults.
fn offered(
    field: &str,
    offer: &file::GateOffer,
    item: &file::GateOffer,
    flow: Flow,
    gate: &file::Gate,
) -> Result<Terms, ConfigError> {
    let defaults = &gate.defaults;
    let pick = |own: &Option<String>, item: &Option<String>, common: &Option<String>| {
        own.clone().or_else(|| item.clone()).or_else(|| common.clone())
    };
    let needed = |member: &str, value: Option<String>| match value {
        Some(value) => Ok(value),
        None => {
            refuse(format!("{field}.{member}"), format!("is missing: write it here or under gate.defaults.{member}"))
        }
    };
    let name = needed("network", pick(&offer.network, &item.network, &defaults.network))?;
    let network = network(&format!("{field}.network"), &name)?;
    let shown_asset = needed("asset", pick(&offer.asset, &item.asset, &defaults.asset))?;
    let (asset, decimals) = asset(&format!("{field}.asset"), &network, &shown_asset, gate)?;
    let (price, atomic) = match (&offer.price, &offer.amount_atomic) {
        (None, None) => (defaults.price.as_ref(), defaults.amount_atomic.as_ref()),
        own => (own.0.as_ref(), own.1.as_ref()),
    };
    let (amount, shown_amount) = match (price, atomic) {
        (Some(_), Some(_)) => return refuse(field, "has both price and amount_atomic: write one of them"),
        (None, None) => {
            return refuse(
                format!("{field}.price"),
                "is missing: write a decimal number, or amount_atomic, or list the item under gate.free",
            );
        }
        (Some(price), None) => {
            let field = format!("{field}.price");
            let Some(decimals) = decimals else {
                let problem = "is a decimal number, but the decimals of this asset are not known: write amount_atomic, \
                               or the asset under gate.assets";
                return refuse(field, problem);
            };
            let amount = Amount::from_decimal(price, decimals).or_else(|e| refuse(field, e.to_string()))?;
            (amount, price.clone())
        }
        (None, Some(atomic)) => {
            let amount = super::value::amount(&format!("{field}.amount_atomic"), atomic)?;
            (amount, decimals.map_or_else(|| atomic.clone(), |decimals| amount.to_decimal(decimals)))
        }
    };
    let timeout = offer.max_timeout_seconds.or(item.max_timeout_seconds).or(defaults.max_timeout_seconds);
    let max_timeout_seconds = timeout.unwrap_or(60);
    if !(1..=86_400).contains(&max_timeout_seconds) {
        let problem = format!("{max_timeout_seconds} is not between 1 and 86400 seconds");
        return refuse(format!("{field}.max_timeout_seconds"), problem);
    }
    Ok(Terms {
        scheme: pick(&offer.scheme, &item.scheme, &defaults.scheme).unwrap_or_else(|| "exact".into()),
        pay_to: needed("pay_to", pick(&offer.pay_to, &item.pay_to, &defaults.pay_to))?,
        extra: offer
            .extra
            .clone()
            .or_else(|| item.extra.clone())
            .or_else(|| defaults.extra.clone())
            .unwrap_or_default(),
        network,
        asset,
        amount,
        shown_amount,
        shown_asset,
        max_timeout_seconds,
        flow,
    })
}

/// A token by its contract or its symbol, and its decimals where they are known. The operator's own list comes first.
pub(super) fn asset(
    field: &str,
    network: &Network,
    text: &str,
    gate: &file::Gate,
) -> Result<(Asset, Option<u8>), ConfigError> {
    for (i, own) in gate.assets.iter().enumerate() {
        let place = format!("gate.assets[{i}]");
        if own.decimals > 36 {
            return refuse(format!("{place}.decimals"), format!("{} is above 36", own.decimals));
        }
        let same = self::network(&format!("{place}.network"), &own.network)? == *network;
        let named = own.symbol.eq_ignore_ascii_case(text) || Offer::same_address(network, &own.asset, text);
        if same && named {
            let asset = own.asset.parse().or_else(|e: ParseError| refuse(format!("{place}.asset"), e.to_string()))?;
            return Ok((asset, Some(own.decimals)));
        }
    }
    if let Some(known) = assets::by_symbol(network, text) {
        let asset = known.asset.parse().or_else(|e: ParseError| refuse(field, e.to_string()))?;
        return Ok((asset, Some(known.decimals)));
    }
    let asset: Asset = text.parse().or_else(|e: ParseError| refuse(field, e.to_string()))?;
    let unit = crate::money::Unit { network: network.clone(), asset };
    let decimals = assets::known(&unit).map(|known| known.decimals);
    Ok((unit.asset, decimals))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fake, source};
    use super::*;

    const RING: (&str, &str) = ("TOLLWAY_KEY_RING", "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f");
    const GATE: &str = "
keys: {ring_env: TOLLWAY_KEY_RING}
networks: {'stellar:testnet': {}}
gate:
  default: deny
  facilitator: {base_url: 'https://f.example'}
  defaults:
    network: stellar-testnet
    asset: USDC
    pay_to: GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4
    service_name: Example
  free: {tools: [ping]}
  tools:
    search: {price: '0.01'}
    deep: {price: 1.5, flow: upfront, max_timeout_seconds: 120, payment_identifier: required}
  resources:
    'docs://{id}': {amount_atomic: '5'}
  prompts:
    brief:
      offers:
        - {price: '0.02'}
        - {price: '0.03', pay_to: GBZXN7PIRZGNMHGA7MUUUF4GWPY5AYPV6LY4UV2GL6VJGIQRXFDNMADI}
";

    fn env() -> Fake {
        source(&[RING])
    }

    fn read(text: &str) -> GateConfig {
        parse(text, &env()).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The sentence with which a changed file is refused.
    fn refused(from: &str, to: &str) -> String {
        let changed = GATE.replacen(from, to, 1);
        assert_ne!(changed, GATE, "{from}");
        match parse(&changed, &env()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("accepted: {from} -> {to}"),
        }
    }

    #[test]
    fn a_price_list_is_read_with_its_defaults() {
        let config = read(GATE);
        let of = |key: &str| config.prices.items().find(|item| item.key == key).unwrap();
        let search = of("search");
        assert_eq!(search.offers[0].offer.amount, Amount::from_u64(100_000));
        assert_eq!((search.offers[0].shown_amount.as_str(), search.offers[0].shown_asset.as_str()), ("0.01", "USDC"));
        assert_eq!(search.offers[0].offer.network.as_str(), "stellar:testnet");
        assert_eq!(search.offers[0].offer.max_timeout_seconds, 60);
        assert_eq!(search.about.service_name.as_deref(), Some("Example"));
        assert!(!search.identifier_required);
        let deep = of("deep");
        assert_eq!((deep.flow, deep.offers[0].offer.max_timeout_seconds), (Flow::Upfront, 120));
        assert!(deep.identifier_required);
        assert_eq!(deep.offers[0].offer.amount, Amount::from_u64(15_000_000), "a number without quotes is the same");
        assert_eq!(of("docs://{id}").offers[0].shown_amount, "0.0000005");
        assert_eq!(of("brief").offers.len(), 2);
        assert_eq!((config.answer_ttl.as_secs(), config.facilitators.len()), (3_600, 1));
    }

    #[test]
    fn what_cannot_be_sold_is_refused_by_name() {
        for (from, to, field, word) in [
            ("price: '0.01'", "price: '0.00000001'", "gate.tools.search.price", "decimals"),
            ("price: '0.01'", "price: 1e-3", "gate.tools.search.price", "decimal"),
            ("price: '0.01'", "price: '0,01'", "gate.tools.search.price", "decimal"),
            ("price: '0.01'", "price: '0'", "gate.tools.search.price", "zero"),
            ("price: '0.01'", "price: '-1'", "gate.tools.search.price", "decimal"),
            ("{price: '0.01'}", "{}", "gate.tools.search.price", "missing"),
            ("{price: '0.01'}", "{price: '1', amount_atomic: '1'}", "gate.tools.search", "both"),
            ("{price: '0.01'}", "{price: '1', offers: []}", "gate.tools.search.offers", "beside"),
            ("{price: '0.01'}", "{offers: []}", "gate.tools.search.offers", "none"),
            ("{price: '0.01'}", "{price: '1', scheme: upto}", "gate.tools.search.scheme", "upto"),
            ("{price: '0.01'}", "{price: '1', asset: EURC}", "gate.tools.search.price", "not known"),
            ("{price: '0.01'}", "{price: '1', network: nowhere}", "gate.tools.search.network", "nowhere"),
            ("{price: '0.01'}", "{price: '1', pay_to: me}", "gate.tools.search.pay_to", "G…"),
            ("{price: '0.01'}", "{price: '1', max_timeout_seconds: 0}", "gate.tools.search.max_timeout_seconds", "0"),
            ("{price: '0.01'}", "{price: '1', prize: '2'}", "gate.tools", "not a field"),
            ("flow: upfront", "flow: escrow", "gate.tools.deep.flow", "escrow"),
            ("flow: upfront", "flow: auth-capture", "gate.tools.deep.flow", "auth-capture"),
            (
                "payment_identifier: required",
                "payment_identifier: yes",
                "gate.tools.deep.payment_identifier",
                "optional",
            ),
            ("  default: deny\n", "", "gate.default", "free or deny"),
            ("default: deny", "default: maybe", "gate.default", "maybe"),
            ("default: deny", "default: deny\n  exempt_methods: [tools/list]", "gate.exempt_methods[0]", "tools/call"),
            ("tools: [ping]", "tools: [search]", "gate.free", "search"),
            ("service_name: Example", "service_name: Exämple", "service_name", "ASCII"),
            ("docs://{id}", "docs://{", "gate.resources.docs://{.uri", "{"),
            ("  facilitator: {base_url: 'https://f.example'}\n", "", "gate.facilitator.base_url", "stellar:testnet"),
            ("https://f.example", "http://f.example", "gate.facilitator.base_url", "HTTPS"),
            (
                "base_url: 'https://f.example'",
                "base_url: 'https://f.example', auth_header_env: NONE",
                "gate.facilitator.auth_header_env",
                "NONE",
            ),
            ("keys: {ring_env: TOLLWAY_KEY_RING}\n", "", "keys.ring_env", "sealed"),
            ("networks: {'stellar:testnet': {}}\n", "", "networks.stellar:testnet.rpc_urls", "operator"),
            ("free: {tools: [ping]}", "response_cache: {ttl_seconds: 119}", "gate.response_cache.ttl_seconds", "120"),
            ("free: {tools: [ping]}", "lease_ms: 1999", "gate.lease_ms", "2000"),
            ("free: {tools: [ping]}", "unknown: {base: someone}", "gate.unknown.base", "operator"),
            (
                "free: {tools: [ping]}",
                "facilitators: {base: {base_url: 'https://g.example'}}",
                "gate.facilitators.base",
                "nothing",
            ),
        ] {
            let sentence = refused(from, to);
            assert!(sentence.contains(field) && sentence.contains(word), "{to}: {sentence}");
        }
        let none = parse("facilitator: {base_url: 'https://c.example'}\n", &env()).unwrap_err().to_string();
        assert!(none.starts_with("gate: is missing"), "{none}");
    }

    #[test]
    fn junk_is_limited_as_it_is_written() {
        let with = |junk: &str| GATE.replace("  free: {tools: [ping]}", &format!("  junk: {junk}"));
        assert_eq!(read(GATE).junk, JunkLimit { per_second: 2, burst: 50 });
        assert_eq!(read(&with("{burst: 500, per_second: 20}")).junk, JunkLimit { per_second: 20, burst: 500 });
        assert_eq!(read(&with("{burst: 1}")).junk, JunkLimit { per_second: 2, burst: 1 });
        for (junk, field) in [
            ("{burst: 0}", "gate.junk.burst"),
            ("{per_second: 0}", "gate.junk.per_second"),
            ("{per_second: 100001}", "gate.junk.per_second"),
        ] {
            assert_eq!(parse(&with(junk), &env()).unwrap_err().field, field, "{junk}");
        }
    }

    #[test]
    fn hooks_have_a_policy_and_ceilings() {
        let with = |hooks: &str| GATE.replace("  free: {tools: [ping]}", &format!("  hooks: {hooks}"));
        let hooks = read(&with(
            "{url: 'https://h.example/x', on_failure: refuse, events: [on_settled], ceilings: [{price: '0.5'}, {network: base, asset: USDC, amount_atomic: '7'}]}",
        ));
        let hooks = hooks.hooks.unwrap();
        assert_eq!((hooks.timeout.as_secs(), hooks.events, hooks.ceilings.len()), (2, vec!["on_settled"], 2));
        assert!(hooks.ceilings.values().any(|most| *most == Amount::from_u64(5_000_000)));
        assert!(read(GATE).hooks.is_none());
        for (hooks, field, word) in [
            ("{url: 'https://h.example'}", "gate.hooks.on_failure", "refuse"),
            ("{url: 'https://h.example', on_failure: ignore}", "gate.hooks.on_failure", "continue"),
            ("{url: 'http://h.example', on_failure: refuse}", "gate.hooks.url", "HTTPS"),
            ("{url: 'https://h.example', on_failure: refuse, events: [on_paid]}", "gate.hooks.events[0]", "on_settled"),
            ("{url: 'https://h.example', on_failure: refuse, timeout_ms: 1}", "gate.hooks.timeout_ms", "50"),
            (
                "{url: 'https://h.example', on_failure: refuse, ceilings: [{}]}",
                "gate.hooks.ceilings[0].price",
                "either",
            ),
            ("{url: 'https://h.example', on_failure: refuse, auth_header_env: NO}", "gate.hooks.auth_header_env", "NO"),
        ] {
            let sentence = parse(&with(hooks), &env()).unwrap_err().to_string();
            assert!(sentence.contains(field) && sentence.contains(word), "{hooks}: {sentence}");
        }
    }

    #[test]
    fn an_operators_own_token_has_decimals_and_an_unknown_chain_an_operator() {
        let text = GATE
            .replace("networks: {'stellar:testnet': {}}\n", "")
            .replace("free: {tools: [ping]}", "unknown: {stellar-testnet: operator}\n  assets: [{network: stellar-testnet, asset: CDLZFC3SYJYDZT7K67VZ75HPJVIEUVNIXF47ZG2FB2RMQQVU2HHGCYSC, symbol: POINT, decimals: 2}]")
            .replace("{price: '0.01'}", "{price: '0.01', asset: point}");
        let config = read(&text);
        assert_eq!(config.resolved_by_operator.len(), 1);
        let search = config.prices.items().find(|item| item.key == "search").unwrap();
        assert_eq!(search.offers[0].offer.amount, Amount::from_u64(1));
    }

    #[test]
    fn no_secret_is_shown() {
        let with =
            GATE.replace("base_url: 'https://f.example'", "base_url: 'https://f.example', auth_header_env: AUTH");
        let config = parse(&with, &source(&[RING, ("AUTH", "Bearer very-secret")])).unwrap();
        assert!(!format!("{config:?}").contains("very-secret"));
    }
}
