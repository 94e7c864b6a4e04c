//! Amounts, assets, networks and identities, each parsed once at the edge. Depends on nothing of ours.
//!
//! An amount is a checked integer of atomic units (uint256, the widest that any supported chain uses); it is
//! never a float, and it never meets an amount of another asset: whoever adds compares [`Unit`]s first.

use std::fmt;
use std::str::FromStr;

use ruint::aliases::U256;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error("amount {0:?} is not a decimal integer of atomic units (no sign, point, exponent or leading zero)")]
    Amount(String),
    #[error("amount {0} does not fit in 256 bits")]
    AmountTooLarge(String),
    #[error("{0:?} is not a decimal number such as 0.01 (digits, at most one point with digits on both sides)")]
    Decimal(String),
    #[error("{text} has more than the {decimals} decimals of its asset")]
    TooPrecise { text: String, decimals: u8 },
    #[error("network {0:?} is not a CAIP-2 identifier such as stellar:testnet")]
    Network(String),
    #[error("asset {0:?} is not a token identifier (1-128 letters, digits or one of -_.:/)")]
    Asset(String),
    #[error("agent {0:?} is not a name (1-128 printable ASCII characters without spaces)")]
    Agent(String),
    #[error("payment identifier {0:?} is not 64 lower-case hex digits")]
    PaymentId(String),
    #[error("idempotency key must be 16-128 of [A-Za-z0-9_-]")]
    IdempotencyKey,
}

/// Atomic units of one asset; 0 to 2^256-1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Amount(U256);

impl Amount {
    pub const ZERO: Amount = Amount(U256::ZERO);
    pub const MAX: Amount = Amount(U256::MAX);

    pub const fn from_u64(n: u64) -> Self {
        Amount(U256::from_limbs([n, 0, 0, 0]))
    }

    pub fn is_zero(self) -> bool {
        self.0.is_zero()
    }

    pub fn checked_add(self, other: Amount) -> Option<Amount> {
        self.0.checked_add(other.0).map(Amount)
    }

    pub fn checked_sub(self, other: Amount) -> Option<Amount> {
        self.0.checked_sub(other.0).map(Amount)
    }

    /// What is left of `self` after `used`; zero when more was used than there is (a limit lowered below today's use).
    pub fn remaining_after(self, used: Amount) -> Amount {
        Amount(self.0.saturating_sub(used.0))
    }

    /// Soroban token amounts are i128 (SEP-41); `None` when it does not fit.
    pub fn to_i128(self) -> Option<i128> {
        i128::try_from(self.0).ok()
    }

    pub fn from_i128(n: i128) -> Option<Amount> {
        U256::try_from(n).ok().map(Amount)
    }

    /// Digits in base 10,000, the least first, none of them a leading zero: how PostgreSQL writes a NUMERIC.
    #[cfg(feature = "postgres")]
    pub(crate) fn to_base_10000(self) -> Vec<u64> {
        self.0.to_base_le(10_000).collect()
    }

    /// Digits in base 10,000, the greatest first; `None` for one that is no such digit, or above 256 bits.
    #[cfg(feature = "postgres")]
    pub(crate) fn from_base_10000(digits: impl IntoIterator<Item = u64>) -> Option<Amount> {
        U256::from_base_be(10_000, digits).ok().map(Amount)
    }

    /// An exact decimal number of whole units: `0.01` at 7 decimals is 100,000. Nothing is rounded: a digit beyond
    /// `decimals` is refused, even a zero. No sign, exponent, comma, white space or leading zero.
    pub fn from_decimal(text: &str, decimals: u8) -> Result<Amount, ParseError> {
        let refused = || ParseError::Decimal(text.chars().take(100).collect());
        let (whole, fraction) = match text.split_once('.') {
            Some((_, "")) => return Err(refused()),
            Some(parts) => parts,
            None => (text, ""),
        };
        let digits = |part: &str| part.len() <= 100 && part.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || !digits(whole) || !digits(fraction) || (whole.len() > 1 && whole.starts_with('0')) {
            return Err(refused());
        }
        let places = usize::from(decimals);
        if fraction.len() > places {
            return Err(ParseError::TooPrecise { text: text.to_owned(), decimals });
        }
        let atomic = format!("{whole}{fraction:0<places$}");
        let atomic = match atomic.trim_start_matches('0') {
            "" => "0",
            atomic => atomic,
        };
        U256::from_str_radix(atomic, 10).map(Amount).map_err(|_| ParseError::AmountTooLarge(text.to_owned()))
    }

    /// The amount in whole units with `decimals` places, exact: `10000` at 7 is `0.001`.
    pub fn to_decimal(self, decimals: u8) -> String {
        let digits = self.0.to_string();
        let places = usize::from(decimals);
        if places == 0 {
            return digits;
        }
        let padded = format!("{digits:0>width$}", width = places + 1);
        let (whole, fraction) = padded.split_at(padded.len() - places);
        match fraction.trim_end_matches('0') {
            "" => whole.to_owned(),
            fraction => format!("{whole}.{fraction}"),
        }
    }
}

impl FromStr for Amount {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        let digits = !s.is_empty() && s.len() <= 100 && s.bytes().all(|b| b.is_ascii_digit());
        if !digits || (s.len() > 1 && s.starts_with('0')) {
            return Err(ParseError::Amount(s.chars().take(100).collect()));
        }
        U256::from_str_radix(s, 10).map(Amount).map_err(|_| ParseError::AmountTooLarge(s.to_owned()))
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// CAIP-2 chain identifier. Aliases (`base`) are not accepted here: configuration translates them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(String);

impl Network {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn namespace(&self) -> &str {
        self.0.split_once(':').map_or("", |(namespace, _)| namespace)
    }

    pub fn reference(&self) -> &str {
        self.0.split_once(':').map_or("", |(_, reference)| reference)
    }

    /// Real money moves here. An EVM chain is a mainnet unless it is a known test network.
    pub fn is_mainnet(&self) -> bool {
        match self.namespace() {
            "stellar" => self.reference() == "pubnet",
            "eip155" => {
                !matches!(self.reference(), "84532" | "421614" | "11155111" | "80002" | "43113" | "1328" | "31337")
            }
            _ => true,
        }
    }
}

impl FromStr for Network {
    type Err = ParseError;

    /// CAIP-2: `[-a-z0-9]{3,8}:[-_a-zA-Z0-9]{1,32}`.
    fn from_str(s: &str) -> Result<Self, ParseError> {
        let valid = s.split_once(':').is_some_and(|(namespace, reference)| {
            (3..=8).contains(&namespace.len())
                && namespace.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && (1..=32).contains(&reference.len())
                && reference.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        });
        if valid { Ok(Network(s.to_owned())) } else { Err(ParseError::Network(s.chars().take(64).collect())) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A token as the network names it: a contract strkey on Stellar, a hex address on EVM.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Asset(String);

impl Asset {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Asset {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        let valid = (1..=128).contains(&s.len())
            && s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/'));
        if valid { Ok(Asset(s.to_owned())) } else { Err(ParseError::Asset(s.chars().take(128).collect())) }
    }
}

impl fmt::Display for Asset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What an amount counts in. Two amounts may be added or compared only where their units are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    pub network: Network,
    pub asset: Asset,
}

/// Bounds that a credential carries for one [`Unit`]: beside the limits of the ledger, and only ever lower than they.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bounds {
    pub per_call: Option<Amount>,
    pub per_session: Option<Amount>,
    pub per_day: Option<Amount>,
}

impl Bounds {
    /// Of each figure the smaller one.
    pub fn and(self, other: Bounds) -> Bounds {
        let smaller = |a: Option<Amount>, b: Option<Amount>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Bounds {
            per_call: smaller(self.per_call, other.per_call),
            per_session: smaller(self.per_session, other.per_session),
            per_day: smaller(self.per_day, other.per_day),
        }
    }
}

/// Whose budget is used: the name of a key, a token's subject or a service account; never a hash of a secret.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(String);

impl AgentId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for AgentId {
    type Err = ParseError;

    /// `*` and `total` are names of limit rows, so no agent may have them.
    fn from_str(s: &str) -> Result<Self, ParseError> {
        let valid = (1..=128).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_graphic()) && s != "*" && s != "total";
        if valid { Ok(AgentId(s.to_owned())) } else { Err(ParseError::Agent(s.chars().take(128).collect())) }
    }
}

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Names one logical payment: 32 bytes, 64 lower-case hex digits on the wire and in the ledger.
///
/// It is also the key to a lost output, so it is a secret of its agent: `Debug` shows its first 16 characters, and
/// logs, traces and errors of other agents show no more than [`PaymentId::short`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PaymentId([u8; 32]);

impl PaymentId {
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        PaymentId(bytes)
    }

    pub fn to_hex(self) -> String {
        hex::encode(self.0)
    }

    pub fn short(self) -> String {
        hex::encode(&self.0[..8])
    }
}

impl FromStr for PaymentId {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        let mut bytes = [0; 32];
        let lower = s.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if !lower || hex::decode_to_slice(s, &mut bytes).is_err() {
            return Err(ParseError::PaymentId(s.chars().take(16).collect()));
        }
        Ok(PaymentId(bytes))
    }
}

impl fmt::Debug for PaymentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PaymentId({}…)", self.short())
    }
}

/// The agent's own name for one logical call: 16-128 of `[A-Za-z0-9_-]`.
/// With it an agent gets a paid output again, so `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdempotencyKey(String);

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(…)")
    }
}

impl IdempotencyKey {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for IdempotencyKey {
    type Err = ParseError;

    fn from_str(s: &str) -> Result<Self, ParseError> {
        let valid =
            (16..=128).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        if valid { Ok(IdempotencyKey(s.to_owned())) } else { Err(ParseError::IdempotencyKey) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn amounts_that_are_not_plain_decimal_integers_are_refused() {
        for bad in ["", "-1", "+1", "1e6", "0x10", "1.0", " 10", "10 ", "01", "00", "１", "1_000"] {
            assert_eq!(bad.parse::<Amount>(), Err(ParseError::Amount(bad.to_owned())), "{bad:?}");
        }
        let too_large = "115792089237316195423570985008687907853269984665640564039457584007913129639936";
        assert!(matches!(too_large.parse::<Amount>(), Err(ParseError::AmountTooLarge(_))));
        assert_eq!(Amount::MAX.to_string().parse::<Amount>(), Ok(Amount::MAX));
    }

    #[test]
    fn what_gives_an_output_again_is_not_shown_by_debug() {
        let key: IdempotencyKey = "a-key-of-an-agent-1".parse().unwrap();
        let id = PaymentId::from_bytes([0xab; 32]);
        let shown = format!("{key:?} {id:?}");
        assert!(!shown.contains("a-key") && !shown.contains(&id.to_hex()), "{shown}");
    }

    #[test]
    fn a_decimal_shows_every_unit_and_nothing_more() {
        let show = |n: u64, d| Amount::from_u64(n).to_decimal(d);
        assert_eq!(show(10_000, 7), "0.001");
        assert_eq!(show(1, 7), "0.0000001");
        assert_eq!(show(10_000_000, 7), "1");
        assert_eq!(show(0, 7), "0");
        assert_eq!(show(123_456_789, 6), "123.456789");
        assert_eq!(show(42, 0), "42");
    }

    #[test]
    fn a_decimal_is_read_exactly_or_refused() {
        let read = |text, d| Amount::from_decimal(text, d).map(|amount| amount.to_string());
        for (text, decimals, atomic) in [
            ("0.01", 7, "100000"),
            ("1", 6, "1000000"),
            ("0.000001", 6, "1"),
            ("0.10", 2, "10"),
            ("0", 7, "0"),
            ("7", 0, "7"),
        ] {
            assert_eq!(read(text, decimals).as_deref(), Ok(atomic), "{text}");
        }
        let finer = ParseError::TooPrecise { text: "0.0000001".into(), decimals: 6 };
        assert_eq!(read("0.0000001", 6), Err(finer));
        assert!(matches!(read("1.0", 0), Err(ParseError::TooPrecise { .. })), "a zero beyond is a digit too");
        for bad in
            ["1e-3", "0,01", "", ".5", "1.", "-1", "+1", " 1", "1 ", "01", "00.1", "1_0", "0x1", "１", "1.0.0", "$1"]
        {
            assert_eq!(read(bad, 7), Err(ParseError::Decimal(bad.into())), "{bad:?}");
        }
        assert!(matches!(read(&"9".repeat(80), 18), Err(ParseError::AmountTooLarge(_))));
    }

    #[test]
    fn i128_bounds_hold() {
        assert_eq!(Amount::from_i128(i128::MAX).and_then(Amount::to_i128), Some(i128::MAX));
        assert_eq!(Amount::from_i128(-1), None);
        assert_eq!(Amount::MAX.to_i128(), None);
    }

    #[test]
    fn networks_are_caip2() {
        assert!("stellar:testnet".parse::<Network>().is_ok());
        for bad in ["base", "stellar:", ":testnet", "st:x", "Stellar:testnet", "stellar:test net", "stellar:a:b"] {
            assert!(bad.parse::<Network>().is_err(), "{bad}");
        }
        assert!("stellar:pubnet".parse::<Network>().unwrap().is_mainnet());
        assert!(!"stellar:testnet".parse::<Network>().unwrap().is_mainnet());
    }

    #[test]
    fn a_payment_identifier_shows_only_its_head_in_debug() {
        let id = PaymentId::from_bytes([0xab; 32]);
        assert_eq!(format!("{id:?}"), "PaymentId(abababababababab…)");
        assert_eq!(id.to_hex().parse::<PaymentId>(), Ok(id));
        assert!("AB".repeat(32).parse::<PaymentId>().is_err());
    }

    proptest! {
        #[test]
        fn amounts_round_trip_as_text_and_as_i128(high: u128, low: u128, decimals in 0u8..30) {
            let n = U256::from(high) << 128 | U256::from(low);
            let amount = Amount(n);
            prop_assert_eq!(amount.to_string().parse(), Ok(amount));
            let small = Amount(U256::from(low >> 1));
            prop_assert_eq!(small.to_i128().and_then(Amount::from_i128), Some(small));
            // The decimal form loses nothing: its digits with the zeros put back are the amount.
            let shown = amount.to_decimal(decimals);
            let (whole, fraction) = shown.split_once('.').unwrap_or((&shown, ""));
            let back = format!("{whole}{fraction:0<width$}", width = usize::from(decimals));
            let back = match back.trim_start_matches('0') {
                "" => "0",
                digits => digits,
            };
            prop_assert_eq!(back.parse(), Ok(amount));
            prop_assert_eq!(Amount::from_decimal(&shown, decimals), Ok(amount));
        }

        #[test]
        fn sums_are_exact_or_refused(a: u128, b: u128) {
            let (x, y) = (Amount(U256::from(a)), Amount(U256::from(b)));
            let sum = x.checked_add(y).unwrap();
            prop_assert_eq!(sum.checked_sub(y), Some(x));
            prop_assert_eq!(Amount::MAX.checked_add(x).is_some(), x.is_zero());
        }

        #[test]
        fn only_plain_digits_are_an_amount(text in "[-+ 0-9a-fxe._]{0,12}") {
            let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
            prop_assert_eq!(text.parse::<Amount>().is_ok(), plain);
        }
    }
}
