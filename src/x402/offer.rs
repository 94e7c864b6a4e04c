//! One payment option (`PaymentRequirements`, core specification 5.1.2).

use serde_json::value::RawValue;

use crate::json;
use crate::money::{Amount, Asset, Network, Unit};

/// One entry of `accepts`, parsed strictly, with the bytes as they arrived.
#[derive(Debug, Clone)]
pub struct Offer {
    pub raw: Box<RawValue>,
    pub scheme: String,
    pub network: Network,
    pub amount: Amount,
    pub asset: Asset,
    pub pay_to: String,
    pub max_timeout_seconds: u64,
    /// `None` where the seller sent none, or `null`.
    pub extra: Option<Box<RawValue>>,
}

/// Which member makes an offer unusable. The word is stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the payment option's {0} is missing or malformed")]
pub struct OfferError(pub &'static str);

/// When the seller settles (core specification 6.1, `extra.paymentFlow`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Verify, run, settle. What an offer without the member means.
    Authorization,
    /// Settle, run: a failing tool is charged all the same.
    Upfront,
    /// Settle, run, settle.
    Escrow,
    /// Any other value. No payment may be built for it.
    Unknown,
}

/// A year. No scheme needs more, and a number that overflows a ledger or a clock must not get further than this.
const MAX_TIMEOUT_SECONDS: u64 = 31_536_000;

impl Offer {
    /// Parses one entry of `accepts` that has passed [`json::check`]. Unknown members stay in `raw`.
    pub fn parse(raw: &RawValue) -> Result<Offer, OfferError> {
        let members = json::members(raw).map_err(|_| OfferError("object"))?;
        let get = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
        let text = |name: &'static str| get(name).and_then(json::string).ok_or(OfferError(name));

        let scheme = text("scheme")?;
        if !word(&scheme, 64) {
            return Err(OfferError("scheme"));
        }
        let pay_to = text("payTo")?;
        if !word(&pay_to, 128) {
            return Err(OfferError("payTo"));
        }
        let extra = match get("extra") {
            Some(value) if value.get() == "null" => None,
            Some(value) if value.get().starts_with('{') => Some(value.to_owned()),
            Some(_) => return Err(OfferError("extra")),
            None => None,
        };
        Ok(Offer {
            raw: raw.to_owned(),
            network: text("network")?.parse().map_err(|_| OfferError("network"))?,
            amount: text("amount")?.parse().map_err(|_| OfferError("amount"))?,
            asset: text("asset")?.parse().map_err(|_| OfferError("asset"))?,
            max_timeout_seconds: get("maxTimeoutSeconds").and_then(seconds).ok_or(OfferError("maxTimeoutSeconds"))?,
            scheme: scheme.into_owned(),
            pay_to: pay_to.into_owned(),
            extra,
        })
    }

    pub fn unit(&self) -> Unit {
        Unit { network: self.network.clone(), asset: self.asset.clone() }
    }

    pub fn flow(&self) -> Flow {
        match self.extra_member("paymentFlow") {
            None => Flow::Authorization,
            Some(value) => match json::string(value).as_deref() {
                Some("authorization") => Flow::Authorization,
                Some("upfront") => Flow::Upfront,
                Some("escrow") => Flow::Escrow,
                _ => Flow::Unknown,
            },
        }
    }

    /// Whether a payment may be built for this flow at all: `upfront` only for `exact` (core specification 6.1),
    /// `escrow` never (its schemes are not built), an unknown one never.
    pub fn flow_is_payable(&self) -> bool {
        match self.flow() {
            Flow::Authorization => true,
            Flow::Upfront => self.scheme == "exact",
            Flow::Escrow | Flow::Unknown => false,
        }
    }

    /// A member of `extra`, raw.
    pub fn extra_member(&self, name: &str) -> Option<&RawValue> {
        json::member(self.extra.as_deref()?, name)
    }

    /// Whether two spellings name one account or token on this offer's network: hex addresses of EVM chains in any
    /// case, everything else exactly (`x402.md` 9.5).
    pub fn same_address(network: &Network, a: &str, b: &str) -> bool {
        if network.namespace() == "eip155" { a.eq_ignore_ascii_case(b) } else { a == b }
    }

    /// The members in which `other` (the live offer) differs from `self` (the catalog's), by their wire names; empty
    /// when the terms are the same. Numbers are compared exactly, addresses as [`Offer::same_address`] says, and an
    /// absent `extra` equals an empty one.
    pub fn differing_members(&self, other: &Offer) -> Vec<&'static str> {
        let mut out = Vec::new();
        let mut differs = |name, different| {
            if different {
                out.push(name);
            }
        };
        differs("scheme", self.scheme != other.scheme);
        differs("network", self.network != other.network);
        differs("amount", self.amount != other.amount);
        differs("asset", !Offer::same_address(&self.network, self.asset.as_str(), other.asset.as_str()));
        differs("payTo", !Offer::same_address(&self.network, &self.pay_to, &other.pay_to));
        differs("maxTimeoutSeconds", self.max_timeout_seconds != other.max_timeout_seconds);
        let empty = |extra: &Option<Box<RawValue>>| match extra {
            None => true,
            Some(raw) => json::members(raw).is_ok_and(|members| members.is_empty()),
        };
        differs(
            "extra",
            match (&self.extra, &other.extra) {
                (Some(a), Some(b)) => !json::equal(a, b),
                (a, b) => !(empty(a) && empty(b)),
            },
        );
        out
    }
}

/// 1 to `max` printable ASCII characters without a space.
fn word(s: &str, max: usize) -> bool {
    (1..=max).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_graphic())
}

/// A JSON integer above zero; `60.0`, `6e1` and `"60"` are none (`x402.md` 9.4).
fn seconds(raw: &RawValue) -> Option<u64> {
    let n: u64 = raw.get().parse().ok()?;
    let token = raw.get().bytes().all(|b| b.is_ascii_digit());
    (token && (1..=MAX_TIMEOUT_SECONDS).contains(&n)).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Limits;

    const GOOD: &str = r#"{"scheme":"exact","network":"stellar:testnet","amount":"10000","asset":"CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA","payTo":"GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4","maxTimeoutSeconds":60,"extra":{"areFeesSponsored":true},"futureMember":[1.0]}"#;

    fn raw(text: &str) -> &RawValue {
        json::check(text.as_bytes(), Limits { bytes: 1 << 20, depth: 32 }).unwrap()
    }

    fn with(member: &str, value: &str) -> Result<Offer, OfferError> {
        let mut fields: Vec<String> = json::members(raw(GOOD))
            .unwrap()
            .iter()
            .filter(|(key, _)| key != member)
            .map(|(key, value)| format!("\"{key}\":{}", value.get()))
            .collect();
        if !value.is_empty() {
            fields.push(format!("\"{member}\":{value}"));
        }
        Offer::parse(raw(&format!("{{{}}}", fields.join(","))))
    }

    #[test]
    fn keeps_every_byte_and_reads_the_terms() {
        let offer = Offer::parse(raw(GOOD)).unwrap();
        assert_eq!(offer.raw.get(), GOOD);
        assert_eq!((offer.amount.to_string().as_str(), offer.max_timeout_seconds), ("10000", 60));
        assert_eq!(offer.unit().network.as_str(), "stellar:testnet");
        assert_eq!(offer.flow(), Flow::Authorization);
    }

    #[test]
    fn an_amount_is_a_decimal_string_and_nothing_else() {
        for bad in [
            "",
            "null",
            "10000",
            "1e4",
            "\"\"",
            "\"-1\"",
            "\"+1\"",
            "\"1e6\"",
            "\"0x10\"",
            "\"1.0\"",
            "\" 10\"",
            "\"010\"",
            "[\"1\"]",
            "\"115792089237316195423570985008687907853269984665640564039457584007913129639936\"",
        ] {
            assert_eq!(with("amount", bad).err(), Some(OfferError("amount")), "{bad}");
        }
    }

    #[test]
    fn a_timeout_is_an_integer_number_above_zero_and_bounded() {
        for bad in ["", "null", "0", "-1", "60.0", "6e1", "\"60\"", "31536001", "99999999999999999999999"] {
            assert_eq!(with("maxTimeoutSeconds", bad).err(), Some(OfferError("maxTimeoutSeconds")), "{bad}");
        }
        assert_eq!(with("maxTimeoutSeconds", "3600").unwrap().max_timeout_seconds, 3600);
    }

    #[test]
    fn network_aliases_and_wrong_types_are_refused() {
        for (member, bad) in [
            ("network", "\"base\""),
            ("network", "\"stellar\""),
            ("network", "1"),
            ("scheme", "\"\""),
            ("scheme", "\"exact \""),
            ("asset", "\"USDC token\""),
            ("payTo", "\"\""),
            ("payTo", "null"),
            ("payTo", "\"G\\u202eA\""),
            ("extra", "[]"),
            ("extra", "\"x\""),
        ] {
            assert_eq!(with(member, bad).err(), Some(OfferError(member)), "{bad}");
        }
        assert_eq!(Offer::parse(raw("[]")).err(), Some(OfferError("object")));
    }

    #[test]
    fn extra_may_be_absent_or_null() {
        assert!(with("extra", "").unwrap().extra.is_none());
        assert!(with("extra", "null").unwrap().extra.is_none());
        assert!(with("extra", "{}").unwrap().extra.is_some());
    }

    #[test]
    fn only_known_flows_may_be_paid() {
        for (value, flow, payable) in [
            ("\"authorization\"", Flow::Authorization, true),
            ("\"upfront\"", Flow::Upfront, true),
            ("\"escrow\"", Flow::Escrow, false),
            ("\"Upfront\"", Flow::Unknown, false),
            ("null", Flow::Unknown, false),
            ("{}", Flow::Unknown, false),
        ] {
            let offer = with("extra", &format!("{{\"paymentFlow\":{value}}}")).unwrap();
            assert_eq!((offer.flow(), offer.flow_is_payable()), (flow, payable), "{value}");
        }
        let mut upto = with("extra", r#"{"paymentFlow":"upfront"}"#).unwrap();
        upto.scheme = "upto".into();
        assert!(!upto.flow_is_payable());
    }

    #[test]
    fn every_changed_term_is_named() {
        let offer = Offer::parse(raw(GOOD)).unwrap();
        assert!(offer.differing_members(&offer).is_empty());
        for (member, value) in [
            ("scheme", "\"upto\""),
            ("network", "\"stellar:pubnet\""),
            ("amount", "\"10001\""),
            ("asset", "\"CCW67TSZV3SSS2HXMBQ5JFGCKJNXKZM7UQUWUZPUTHXSTZLEO7SJMI75\""),
            ("payTo", "\"gaoh2nr3a3r2vs6tue6l75a3omj4ukjwehhnl5giieqts5rvzek5lap4\""),
            ("maxTimeoutSeconds", "61"),
            ("extra", "{\"areFeesSponsored\":false}"),
            ("extra", ""),
        ] {
            assert_eq!(offer.differing_members(&with(member, value).unwrap()), [member], "{value}");
        }
    }

    #[test]
    fn evm_addresses_are_compared_without_case() {
        let network: Network = "eip155:8453".parse().unwrap();
        assert!(Offer::same_address(&network, "0xABCDEF", "0xabcdef"));
        assert!(!Offer::same_address(&"stellar:testnet".parse().unwrap(), "GA", "ga"));
    }
}
