//! Canonical JSON: one value, one text.

use serde_json::value::RawValue;

use crate::json::{self, Limits, Numbers};

const LIMITS: Limits = Limits { bytes: 1 << 16, depth: 64 };
/// ECMAScript writes `1e20` with 21 digits, so a canonical text can be longer than what it was made of.
const OWN: Limits = Limits { bytes: usize::MAX, depth: 64 };

/// The input is one text, or two with a line of `---` between them.
pub fn run(data: &[u8]) {
    const BETWEEN: &[u8] = b"\n---\n";
    let at = data.windows(BETWEEN.len()).position(|window| window == BETWEEN);
    let (first, second) = match at {
        Some(at) => (&data[..at], Some(&data[at + BETWEEN.len()..])),
        None => (data, None),
    };
    let first = one(first);
    if let (Some(a), Some(b)) = (first, second.and_then(one)) {
        two(a, b);
    }
}

fn one(text: &[u8]) -> Option<&RawValue> {
    let raw = json::check(text, LIMITS).ok()?;
    assert_eq!(raw.get().as_bytes(), text.trim_ascii(), "a byte was changed");
    assert!(json::equal(raw, raw), "not equal to itself");
    for numbers in [Numbers::Rfc8785, Numbers::AsWritten] {
        let Ok(once) = json::canonical(raw, numbers) else {
            assert_eq!(numbers, Numbers::Rfc8785, "only a number beyond all doubles has no canonical form");
            continue;
        };
        let again = json::check(once.as_bytes(), OWN).unwrap_or_else(|e| panic!("the canonical text {e}: {once}"));
        assert_eq!(json::canonical(again, numbers).unwrap(), once, "not idempotent");
        if numbers == Numbers::AsWritten {
            assert!(json::equal(raw, again) && json::equal(again, raw), "the canonical text is another value");
        }
        if let Ok(members) = json::members(raw) {
            assert_eq!(members.len(), json::members(again).unwrap().len());
            for (key, value) in &members {
                let found = json::member(again, key).unwrap_or_else(|| panic!("{key:?} was lost"));
                assert_eq!(json::canonical(value, numbers).unwrap(), found.get());
                assert!(std::ptr::eq(json::member(raw, key).unwrap().get(), value.get()), "another member");
            }
        }
    }
    // An independent reader of the same text sees the same values.
    let theirs: serde_json::Value = serde_json::from_str(raw.get()).ok()?;
    if let Ok(ours) = json::canonical(raw, Numbers::Rfc8785) {
        let again: serde_json::Value = serde_json::from_str(&ours).unwrap();
        assert!(same(&theirs, &again), "{theirs} is not {again}");
    }
    Some(raw)
}

fn two(a: &RawValue, b: &RawValue) {
    let equal = json::equal(a, b);
    assert_eq!(equal, json::equal(b, a), "equality depends on the side");
    let written = |raw| json::canonical(raw, Numbers::AsWritten).unwrap();
    if written(a) == written(b) {
        assert!(equal, "one canonical text, and not equal");
    }
    if equal && let (Ok(a), Ok(b)) = (json::canonical(a, Numbers::Rfc8785), json::canonical(b, Numbers::Rfc8785)) {
        assert_eq!(a, b, "equal, and two canonical texts");
    }
}

/// Numbers as doubles, which is all that RFC 8785 keeps of them; serde_json's may be off by the last bits.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    use serde_json::Value::{Array, Number, Object};
    match (a, b) {
        (Number(a), Number(b)) => match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => {
                a == b || (a - b).abs() <= a.abs() * 4.0 * f64::EPSILON || a.abs() < f64::MIN_POSITIVE
            }
            _ => false,
        },
        (Array(a), Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Object(a), Object(b)) => a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b))),
        _ => a == b,
    }
}
