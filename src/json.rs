//! Strict JSON over raw values: what arrived is checked once and then kept byte for byte.
//!
//! serde_json keeps the last of two equal keys in a map and drops what a type does not name, so two readers of one
//! message can see different things, and a number written `1.0` leaves as `1`. Here a text is checked first (syntax,
//! size, depth, no key twice anywhere, no broken string), and the value stays a [`RawValue`] from then on.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub bytes: usize,
    /// Arrays and objects inside each other; a plain string has depth 0.
    pub depth: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    #[error("is larger than {0} bytes")]
    TooLarge(usize),
    #[error("is nested deeper than {0} levels")]
    TooDeep(usize),
    #[error("has the member {0:?} twice")]
    DuplicateKey(String),
    #[error("is not valid JSON: {0}")]
    Syntax(String),
    #[error("is not an object")]
    NotAnObject,
    #[error("has a number that no JSON number format can carry")]
    Number,
}

/// Checks `text` against `limits` and gives it back as one raw value, bytes unchanged (outer white space removed).
pub fn check(text: &[u8], limits: Limits) -> Result<&RawValue, JsonError> {
    if text.len() > limits.bytes {
        return Err(JsonError::TooLarge(limits.bytes));
    }
    let raw: &RawValue = serde_json::from_slice(text).map_err(|e| JsonError::Syntax(without_content(&e)))?;
    scan(raw.get(), limits.depth)?;
    Ok(raw)
}

/// serde_json's messages can quote the text, which may hold a secret: only class and place are kept.
fn without_content(e: &serde_json::Error) -> String {
    format!("line {} column {}", e.line(), e.column())
}

/// The members of an object in the order in which they were written; `Err` when `raw` is no object.
///
/// `raw` must have passed [`check`]: keys are not compared again.
pub fn members(raw: &RawValue) -> Result<Vec<(Cow<'_, str>, &RawValue)>, JsonError> {
    struct Members;
    impl<'de> serde::de::Visitor<'de> for Members {
        type Value = Vec<(Cow<'de, str>, &'de RawValue)>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut out = Vec::new();
            while let Some((key, value)) = map.next_entry::<Key<'de>, &'de RawValue>()? {
                out.push((key.0, value));
            }
            Ok(out)
        }
    }
    if !raw.get().starts_with('{') {
        return Err(JsonError::NotAnObject);
    }
    let mut de = serde_json::Deserializer::from_str(raw.get());
    serde::Deserializer::deserialize_map(&mut de, Members).map_err(|e| JsonError::Syntax(without_content(&e)))
}

/// The value of one member, or `None`; also `None` when `raw` is no object.
pub fn member<'a>(raw: &'a RawValue, name: &str) -> Option<&'a RawValue> {
    members(raw).ok()?.into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

/// The elements of an array, or `None` when `raw` is none.
pub fn elements(raw: &RawValue) -> Option<Vec<&RawValue>> {
    if raw.get().starts_with('[') { serde_json::from_str(raw.get()).ok() } else { None }
}

/// The text of a string, or `None` when `raw` is none.
pub fn string(raw: &RawValue) -> Option<Cow<'_, str>> {
    if raw.get().starts_with('"') { serde_json::from_str::<Key<'_>>(raw.get()).ok().map(|k| k.0) } else { None }
}

/// A raw value from anything that serializes. Fails for nothing that we build ourselves.
pub fn raw<T: serde::Serialize + ?Sized>(value: &T) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// How numbers appear in a canonical text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    /// As ECMAScript writes the nearest double (RFC 8785 section 3.2.2.3); a number beyond all doubles is an error.
    Rfc8785,
    /// The token as it was written: `1` and `1.0` differ, nothing is rounded.
    AsWritten,
}

/// Canonical JSON (RFC 8785): no white space, members sorted by UTF-16 code units, minimal escapes.
pub fn canonical(raw: &RawValue, numbers: Numbers) -> Result<String, JsonError> {
    let mut out = String::with_capacity(raw.get().len());
    write_canonical(&mut out, raw, numbers)?;
    Ok(out)
}

pub fn canonical_sha256(raw: &RawValue, numbers: Numbers) -> Result<[u8; 32], JsonError> {
    Ok(Sha256::digest(canonical(raw, numbers)?).into())
}

/// Equal as JSON values: the order of members and the spelling of strings do not matter; numbers are compared exactly
/// (`1` and `1.0` and `10e-1` are one value, two integers that share a double are two).
pub fn equal(a: &RawValue, b: &RawValue) -> bool {
    if a.get() == b.get() {
        return true;
    }
    match (first_byte(a), first_byte(b)) {
        (b'{', b'{') => {
            let (Ok(mut left), Ok(mut right)) = (members(a), members(b)) else { return false };
            left.sort_by(|x, y| x.0.cmp(&y.0));
            right.sort_by(|x, y| x.0.cmp(&y.0));
            left.len() == right.len() && left.iter().zip(&right).all(|(x, y)| x.0 == y.0 && equal(x.1, y.1))
        }
        (b'[', b'[') => match (elements(a), elements(b)) {
            (Some(x), Some(y)) => x.len() == y.len() && x.iter().zip(&y).all(|(x, y)| equal(x, y)),
            _ => false,
        },
        (b'"', b'"') => string(a).is_some() && string(a) == string(b),
        (b'-' | b'0'..=b'9', b'-' | b'0'..=b'9') => match (exact_number(a.get()), exact_number(b.get())) {
            (Some(x), Some(y)) => x == y,
            _ => false,
        },
        _ => false,
    }
}

fn first_byte(raw: &RawValue) -> u8 {
    raw.get().as_bytes().first().copied().unwrap_or(0)
}

/// (negative, significant digits without zeros at either end, power of ten of the last digit); zero is `(false, "", 0)`.
fn exact_number(token: &str) -> Option<(bool, String, i64)> {
    let (negative, rest) = token.strip_prefix('-').map_or((false, token), |rest| (true, rest));
    let (mantissa, exponent) = match rest.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().ok()?),
        None => (rest, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return Some((false, String::new(), 0));
    }
    let dropped = i64::try_from(digits.len() - significant.len()).ok()?;
    let power = exponent.checked_sub(i64::try_from(fraction.len()).ok()?)?.checked_add(dropped)?;
    Some((negative, significant.to_owned(), power))
}

fn write_canonical(out: &mut String, raw: &RawValue, numbers: Numbers) -> Result<(), JsonError> {
    match first_byte(raw) {
        b'{' => {
            let mut sorted = members(raw)?;
            sorted.sort_by(|x, y| x.0.encode_utf16().cmp(y.0.encode_utf16()));
            out.push('{');
            for (i, (key, value)) in sorted.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_string(out, key);
                out.push(':');
                write_canonical(out, value, numbers)?;
            }
            out.push('}');
        }
        b'[' => {
            out.push('[');
            for (i, value) in elements(raw).unwrap_or_default().into_iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_canonical(out, value, numbers)?;
            }
            out.push(']');
        }
        b'"' => write_string(out, &string(raw).ok_or_else(|| JsonError::Syntax("a broken string".into()))?),
        b'-' | b'0'..=b'9' if numbers == Numbers::Rfc8785 => {
            let number: f64 = raw.get().parse().map_err(|_| JsonError::Number)?;
            if !number.is_finite() {
                return Err(JsonError::Number);
            }
            out.push_str(ryu_js::Buffer::new().format_finite(number));
        }
        _ => out.push_str(raw.get()),
    }
    Ok(())
}

/// RFC 8785 section 3.2.2.2: two-character escapes where JSON has them, `\u00xx` for other controls, all else as it is.
fn write_string(out: &mut String, s: &str) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\t' => out.push_str("\\t"),
            '\n' => out.push_str("\\n"),
            '\u{c}' => out.push_str("\\f"),
            '\r' => out.push_str("\\r"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A string that borrows where it has no escapes.
struct Key<'a>(Cow<'a, str>);
impl<'de> serde::Deserialize<'de> for Key<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(de: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> serde::de::Visitor<'de> for V {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, s: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(s)))
            }
            fn visit_str<E>(self, s: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(s.to_owned())))
            }
        }
        de.deserialize_str(V)
    }
}

/// Depth and duplicate keys of a text whose syntax is known to be right. Iterative, so that depth costs no stack.
fn scan(text: &str, max_depth: usize) -> Result<(), JsonError> {
    enum Open<'a> {
        Array,
        Object { seen: BTreeSet<Cow<'a, str>>, key_next: bool },
    }
    let bytes = text.as_bytes();
    let mut open: Vec<Open<'_>> = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        match bytes[i] {
            b'{' | b'[' => {
                if open.len() >= max_depth {
                    return Err(JsonError::TooDeep(max_depth));
                }
                open.push(match bytes[i] {
                    b'{' => Open::Object { seen: BTreeSet::new(), key_next: true },
                    _ => Open::Array,
                });
            }
            b'}' | b']' => {
                open.pop();
            }
            b',' => {
                if let Some(Open::Object { key_next, .. }) = open.last_mut() {
                    *key_next = true;
                }
            }
            b'"' => {
                let end = string_end(bytes, i);
                let token = &text[i..end];
                // Only an escape can be broken: all else of a string the parser has seen to.
                let plain = token.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
                let decoded = match plain.filter(|plain| !plain.contains('\\')) {
                    Some(plain) => Key(Cow::Borrowed(plain)),
                    None => serde_json::from_str::<Key<'_>>(token)
                        .map_err(|_| JsonError::Syntax("a broken string".into()))?,
                };
                if let Some(Open::Object { seen, key_next }) = open.last_mut()
                    && *key_next
                {
                    *key_next = false;
                    let shown: String = decoded.0.chars().take(64).collect();
                    if !seen.insert(decoded.0) {
                        return Err(JsonError::DuplicateKey(shown));
                    }
                }
                i = end;
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    Ok(())
}

/// The index behind the closing quote of the string that opens at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { bytes: 1 << 20, depth: 16 };

    fn ok(text: &str) -> &RawValue {
        check(text.as_bytes(), LIMITS).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn refuses_a_key_twice_at_any_depth_and_in_any_spelling() {
        for (text, key) in [
            (r#"{"a":1,"a":2}"#, "a"),
            (r#"[{"x":{"b":1,"c":{},"b":1}}]"#, "b"),
            (r#"{"name":1,"n\u0061me":2}"#, "name"),
            (r#"{"a":{"a":1},"a":1}"#, "a"),
        ] {
            assert_eq!(check(text.as_bytes(), LIMITS).err(), Some(JsonError::DuplicateKey(key.into())), "{text}");
        }
        ok(r#"{"a":{"a":["a","a",{"a":"a"}]},"b":"a"}"#);
    }

    #[test]
    fn refuses_what_is_too_deep_too_large_or_no_json() {
        let deep = format!("{}{}", "[".repeat(17), "]".repeat(17));
        assert_eq!(check(deep.as_bytes(), LIMITS).err(), Some(JsonError::TooDeep(16)));
        let bomb = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(check(bomb.as_bytes(), LIMITS).err(), Some(JsonError::TooDeep(16)));
        assert_eq!(check(b"123456", Limits { bytes: 5, depth: 1 }).err(), Some(JsonError::TooLarge(5)));
        for bad in [&b"{"[..], b"", b"{\"a\":1}x", b"\xff", b"{'a':1}", b"01", b"\"\\ud800\"", b"nul"] {
            assert!(matches!(check(bad, LIMITS), Err(JsonError::Syntax(_))), "{bad:?}");
        }
    }

    #[test]
    fn keeps_every_byte() {
        let text = r#"{ "z":0.1000, "a":100000000000000000000000001 ,"s":"\u00e9" }"#;
        assert_eq!(ok(text).get(), text);
        assert_eq!(member(ok(text), "a").unwrap().get(), "100000000000000000000000001");
    }

    #[test]
    fn canonical_form_follows_rfc8785() {
        // RFC 8785 section 3.2.2, and the sorting example of section 3.2.3.
        let input = r#"{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001],
            "string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/","literals":[null,true,false]}"#;
        let expected = "{\"literals\":[null,true,false],\"numbers\":[333333333.3333333,1e+30,4.5,0.002,1e-27],\
            \"string\":\"€$\\u000f\\nA'B\\\"\\\\\\\\\\\"/\"}";
        assert_eq!(canonical(ok(input), Numbers::Rfc8785).unwrap(), expected);
        let sorting = r#"{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}"#;
        let order: Vec<char> =
            canonical(ok(sorting), Numbers::Rfc8785).unwrap().chars().filter(char::is_ascii_digit).collect();
        assert_eq!(order, ['2', '1', '4', '6', '7', '1', '5', '3'], "\\r, \"1\", U+0080, ö, €, 😀, U+FB33");
    }

    #[test]
    fn numbers_as_written_are_not_rounded() {
        let text = r#"{"b":1.0,"a":100000000000000000000000001}"#;
        assert_eq!(canonical(ok(text), Numbers::AsWritten).unwrap(), r#"{"a":100000000000000000000000001,"b":1.0}"#);
        assert_eq!(canonical(ok("1e999"), Numbers::Rfc8785), Err(JsonError::Number));
    }

    #[test]
    fn equality_is_of_values() {
        let eq = |a, b| equal(ok(a), ok(b));
        assert!(eq(r#"{"a":1,"b":["x"]}"#, r#"{ "b":["\u0078"], "a":1.0 }"#));
        assert!(eq("10e-1", "1"));
        assert!(eq("-0", "0"));
        assert!(!eq("9007199254740993", "9007199254740992"));
        assert!(!eq("1", "\"1\""));
        assert!(!eq(r#"{"a":1}"#, r#"{"a":1,"b":null}"#));
        assert!(!eq("[1,2]", "[2,1]"));
    }

    /// Any JSON value, as it might be written: members in two orders, with and without white space.
    fn value() -> impl Strategy<Value = (String, String)> {
        let same = |text: String| (text.clone(), text);
        let leaf = prop_oneof![
            Just("null".to_owned()).prop_map(same),
            any::<bool>().prop_map(|b| b.to_string()).prop_map(same),
            any::<i64>().prop_map(|n| n.to_string()).prop_map(same),
            any::<f64>().prop_filter("finite", |n| n.is_finite()).prop_map(|n| format!("{n:?}")).prop_map(same),
            any::<String>().prop_map(|s| raw(&s).get().to_owned()).prop_map(same),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(|items| {
                    let (a, b): (Vec<_>, Vec<_>) = items.into_iter().unzip();
                    (format!("[{}]", a.join(",")), format!("[ {} ]", b.join(" ,\n")))
                }),
                prop::collection::btree_map(any::<String>(), inner, 0..6).prop_map(|members| {
                    let text = |spelled: Vec<String>, comma: &str| format!("{{{}}}", spelled.join(comma));
                    let one = members.iter().map(|(k, v)| format!("{}:{}", raw(k).get(), v.0)).collect();
                    let other = members.iter().rev().map(|(k, v)| format!("{} : {}", raw(k).get(), v.1)).collect();
                    (text(one, ","), text(other, " , "))
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn canonical_text_is_one_per_value((one, other) in value()) {
            for numbers in [Numbers::Rfc8785, Numbers::AsWritten] {
                let text = canonical(ok(&one), numbers).unwrap();
                prop_assert_eq!(&canonical(ok(&other), numbers).unwrap(), &text, "order and white space");
                prop_assert_eq!(&canonical(ok(&text), numbers).unwrap(), &text, "canonical already");
            }
            prop_assert!(equal(ok(&one), ok(&other)));
            prop_assert!(equal(ok(&one), ok(&canonical(ok(&other), Numbers::AsWritten).unwrap())));
        }

        #[test]
        fn no_text_makes_the_checker_panic(text in ".{0,60}") {
            let _ = check(text.as_bytes(), LIMITS);
        }
    }
}
