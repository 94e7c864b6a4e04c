//! Whom the operator lets an agent pay at all, whatever a catalog lists: allow and deny lists of origins, recipients and
//! assets, and whether the recipient of an origin is pinned. The configuration gives the lists; the ledger adds rules for
//! origins that every replica has. Both are replaced while the process runs ([`LivePolicy`]).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use url::Url;

use crate::money::{Network, Unit};
use crate::x402::Offer;

/// An empty allow list allows everybody; deny wins over allow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    pub allow_origins: BTreeSet<Origin>,
    pub deny_origins: BTreeSet<Origin>,
    /// Addresses, on whatever network.
    pub allow_recipients: BTreeSet<String>,
    pub deny_recipients: BTreeSet<String>,
    pub allow_assets: BTreeSet<Unit>,
    pub deny_assets: BTreeSet<Unit>,
    pub pin_recipients: Pinning,
}

/// What a recipient means that is not the one of this origin's first settled payment in the asset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pinning {
    /// Nothing: no pin is read or made.
    #[default]
    Off,
    /// A line in the log.
    Warn,
    /// The call is refused.
    Enforce,
}

/// Which list refuses: the word is `details.rule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Banned {
    Origin,
    Recipient,
    Asset,
}

impl Banned {
    pub fn as_str(self) -> &'static str {
        match self {
            Banned::Origin => "origin",
            Banned::Recipient => "recipient",
            Banned::Asset => "asset",
        }
    }
}

impl Policy {
    /// Of an address that would be dialled.
    pub fn origin(&self, url: &Url) -> Result<(), Banned> {
        let names = |list: &BTreeSet<Origin>| list.iter().any(|origin| origin.names(url));
        let allowed = self.allow_origins.is_empty() || names(&self.allow_origins);
        if allowed && !names(&self.deny_origins) { Ok(()) } else { Err(Banned::Origin) }
    }

    /// Of a payment that would be made, or made once more.
    pub fn payment(&self, unit: &Unit, pay_to: &str) -> Result<(), Banned> {
        let same_unit = |listed: &Unit| {
            listed.network == unit.network
                && Offer::same_address(&unit.network, listed.asset.as_str(), unit.asset.as_str())
        };
        let units = |list: &BTreeSet<Unit>| list.iter().any(same_unit);
        if !(self.allow_assets.is_empty() || units(&self.allow_assets)) || units(&self.deny_assets) {
            return Err(Banned::Asset);
        }
        let names =
            |list: &BTreeSet<String>| list.iter().any(|listed| Offer::same_address(&unit.network, listed, pay_to));
        if !(self.allow_recipients.is_empty() || names(&self.allow_recipients)) || names(&self.deny_recipients) {
            return Err(Banned::Recipient);
        }
        Ok(())
    }
}

/// `https://host`, `https://host:8443`, or `https://*.host`, which names every host below that one (not itself).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    scheme: String,
    /// Lower case, without a final dot.
    host: String,
    port: Option<u16>,
    below: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is no origin: write https://host, https://host:port or https://*.host, and nothing behind it")]
pub struct NoOrigin;

impl Origin {
    /// Of an address that was dialled.
    pub fn of(url: &Url) -> Option<Origin> {
        let host = url.host_str()?.trim_end_matches('.');
        let known = matches!(url.scheme(), "https" | "http") && !host.is_empty();
        known.then(|| Origin {
            scheme: url.scheme().to_owned(),
            host: host.to_ascii_lowercase(),
            port: url.port(),
            below: false,
        })
    }

    /// `https://*.host`.
    pub fn is_pattern(&self) -> bool {
        self.below
    }

    fn names(&self, url: &Url) -> bool {
        let Some(other) = Origin::of(url) else { return false };
        let host = match self.below {
            false => other.host == self.host,
            true => other.host.strip_suffix(&self.host).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
        };
        host && self.scheme == other.scheme && self.port == other.port
    }
}

impl FromStr for Origin {
    type Err = NoOrigin;

    fn from_str(text: &str) -> Result<Origin, NoOrigin> {
        let (scheme, rest) = text.split_once("://").ok_or(NoOrigin)?;
        let (below, rest) = match rest.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        // The parser would drop tabs and read `\` as `/`; an origin has none of these.
        if text.len() > 512 || rest.contains(|c: char| "/\\?#@*".contains(c) || c.is_whitespace() || c.is_control()) {
            return Err(NoOrigin);
        }
        let url = Url::parse(&format!("{scheme}://{rest}")).map_err(|_| NoOrigin)?;
        let origin = Origin::of(&url).ok_or(NoOrigin)?;
        if below && !matches!(url.host(), Some(url::Host::Domain(_))) {
            return Err(NoOrigin);
        }
        Ok(Origin { below, ..origin })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin { scheme, host, port, below } = self;
        write!(f, "{scheme}://{}{host}", if *below { "*." } else { "" })?;
        port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// A rule for an origin in the ledger: every replica has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginRule {
    pub origin: Origin,
    /// Else it is denied.
    pub allowed: bool,
    /// `file`, `resource` or `operator`.
    pub source: String,
}

/// Whom this origin was paid to first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    pub origin: Origin,
    pub unit: Unit,
    pub pay_to: String,
    pub first_seen_ms: u64,
}

impl Pin {
    pub fn is_for(&self, pay_to: &str) -> bool {
        Offer::same_address(&self.unit.network, &self.pay_to, pay_to)
    }
}

/// A network's name for an account, as far as a list can be held to it.
pub fn is_address(network: Option<&Network>, text: &str) -> bool {
    let stellar =
        text.parse::<stellar_strkey::ed25519::PublicKey>().is_ok() || text.parse::<stellar_strkey::Contract>().is_ok();
    let evm = text.strip_prefix("0x").is_some_and(|hex| hex.len() == 40 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    match network.map(Network::namespace) {
        Some("stellar") => stellar,
        Some("eip155") => evm,
        Some(_) => !text.is_empty(),
        None => stellar || evm,
    }
}

/// Today's policy: the file's lists and the ledger's rules. Cheap to clone; all clones see a replacement at once.
#[derive(Debug, Clone, Default)]
pub struct LivePolicy(Arc<RwLock<Live>>);

#[derive(Debug, Default)]
struct Live {
    file: Policy,
    rules: Vec<OriginRule>,
    merged: Arc<Policy>,
}

impl LivePolicy {
    pub fn new(file: Policy) -> LivePolicy {
        let live = LivePolicy::default();
        live.replace_file(file);
        live
    }

    pub fn now(&self) -> Arc<Policy> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).merged.clone()
    }

    /// `false`: it was so already.
    pub fn replace_file(&self, file: Policy) -> bool {
        self.change(|live| live.file = file)
    }

    /// The ledger's rules. `false`: they were so already.
    pub fn replace_rules(&self, rules: Vec<OriginRule>) -> bool {
        self.change(|live| live.rules = rules)
    }

    fn change(&self, change: impl FnOnce(&mut Live)) -> bool {
        let mut live = self.0.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut live);
        let mut merged = live.file.clone();
        for rule in &live.rules {
            let list = if rule.allowed { &mut merged.allow_origins } else { &mut merged.deny_origins };
            list.insert(rule.origin.clone());
        }
        let changed = *live.merged != merged;
        live.merged = Arc::new(merged);
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    fn origins(list: &[&str]) -> BTreeSet<Origin> {
        list.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn an_origin_is_read_strictly_and_written_in_one_way() {
        for (text, shown) in [
            ("https://Seller.Example", "https://seller.example"),
            ("https://seller.example/", "https://seller.example"),
            ("https://seller.example:443", "https://seller.example"),
            ("https://seller.example.:8443", "https://seller.example:8443"),
            ("https://*.seller.example", "https://*.seller.example"),
            ("http://127.0.0.1:80", "http://127.0.0.1"),
            ("https://[::1]:9", "https://[::1]:9"),
            ("https://bücher.example", "https://xn--bcher-kva.example"),
        ] {
            let origin: Origin = text.parse().unwrap();
            assert_eq!(origin.to_string(), shown);
            assert_eq!(shown.parse::<Origin>().unwrap(), origin);
        }
        for text in [
            "",
            "seller.example",
            "https://",
            "https://*.",
            "https://*",
            "https://a.*.example",
            "https://**.example",
            "https://seller.example/mcp",
            "https://seller.example?x",
            "https://seller.example#x",
            "https://u@seller.example",
            "https://seller.example\\x",
            "https:// seller.example",
            "mcp://seller.example",
            "file:///x",
            "https://*.10.0.0.1",
            "https://seller.example:99999",
        ] {
            assert_eq!(text.parse::<Origin>(), Err(NoOrigin), "{text:?}");
        }
    }

    #[test]
    fn deny_wins_and_an_allow_list_closes_everything_else() {
        let open = Policy::default();
        assert_eq!(open.origin(&url("https://any.example/mcp")), Ok(()));
        let policy = Policy {
            allow_origins: origins(&[
                "https://seller.example",
                "https://*.shop.example",
                "https://seller.example:8443",
            ]),
            deny_origins: origins(&["https://bad.shop.example"]),
            ..Policy::default()
        };
        for good in [
            "https://seller.example/mcp?a=1",
            "https://SELLER.example:443/",
            "https://seller.example./mcp",
            "https://a.shop.example/x",
            "https://a.b.shop.example/x",
            "https://seller.example:8443/x",
        ] {
            assert_eq!(policy.origin(&url(good)), Ok(()), "{good}");
        }
        for bad in [
            "https://bad.shop.example/x",
            "https://BAD.shop.example./x",
            "https://shop.example/",
            "https://xshop.example/",
            "https://seller.example.evil.example/",
            "http://seller.example/mcp",
            "https://seller.example:444/",
            "https://other.example/",
        ] {
            assert_eq!(policy.origin(&url(bad)), Err(Banned::Origin), "{bad}");
        }
    }

    #[test]
    fn recipients_and_assets_are_compared_as_the_network_compares_them() {
        let unit =
            |network: &str, asset: &str| Unit { network: network.parse().unwrap(), asset: asset.parse().unwrap() };
        let usdc = unit("eip155:8453", "0xAAAA");
        let policy = Policy {
            deny_recipients: ["0xBEEF".to_owned(), "GBAD".to_owned()].into(),
            allow_assets: [usdc.clone()].into(),
            ..Policy::default()
        };
        assert_eq!(policy.payment(&usdc, "0xf00d"), Ok(()));
        assert_eq!(policy.payment(&unit("eip155:8453", "0xaaaa"), "0xf00d"), Ok(()));
        assert_eq!(policy.payment(&usdc, "0xbeef"), Err(Banned::Recipient));
        assert_eq!(policy.payment(&unit("eip155:1", "0xAAAA"), "0xf00d"), Err(Banned::Asset));
        let policy = Policy { deny_assets: [usdc.clone()].into(), ..policy };
        assert_eq!(policy.payment(&usdc, "0xf00d"), Err(Banned::Asset), "deny wins");
        let only = Policy { allow_recipients: ["GGOOD".to_owned()].into(), ..Policy::default() };
        assert_eq!(only.payment(&unit("stellar:testnet", "C"), "GGOOD"), Ok(()));
        assert_eq!(only.payment(&unit("stellar:testnet", "C"), "ggood"), Err(Banned::Recipient));
    }

    #[test]
    fn file_and_ledger_are_replaced_apart_and_hold_together() {
        let live = LivePolicy::new(Policy { deny_origins: origins(&["https://a.example"]), ..Policy::default() });
        let other = live.clone();
        let rule =
            |text: &str, allowed| OriginRule { origin: text.parse().unwrap(), allowed, source: "operator".into() };
        other.replace_rules(vec![rule("https://b.example", false)]);
        for bad in ["https://a.example/", "https://b.example/"] {
            assert_eq!(live.now().origin(&url(bad)), Err(Banned::Origin), "{bad}");
        }
        live.replace_file(Policy::default());
        assert_eq!(other.now().origin(&url("https://a.example/")), Ok(()));
        assert_eq!(other.now().origin(&url("https://b.example/")), Err(Banned::Origin));
        live.replace_rules(Vec::new());
        assert_eq!(*other.now(), Policy::default());
    }
}
