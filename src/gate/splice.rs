//! Changes inside a raw JSON object that leave every other byte as it is.

use serde_json::value::RawValue;

use crate::json;

/// Where `part`, which was read out of `whole`, stands in it.
pub(super) fn place(whole: &str, part: &RawValue) -> Option<std::ops::Range<usize>> {
    let start = (part.get().as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    let end = start.checked_add(part.get().len())?;
    (whole.get(start..end)? == part.get()).then_some(start..end)
}

/// `whole` with each range replaced. The ranges must not overlap.
pub(super) fn replaced(whole: &str, mut edits: Vec<(std::ops::Range<usize>, String)>) -> Option<Box<RawValue>> {
    edits.sort_by_key(|(range, _)| range.start);
    let mut out = String::with_capacity(whole.len() + edits.iter().map(|(_, text)| text.len()).sum::<usize>());
    let mut at = 0;
    for (range, text) in edits {
        out.push_str(whole.get(at..range.start)?);
        out.push_str(&text);
        at = range.end;
    }
    out.push_str(whole.get(at..)?);
    RawValue::from_string(out).ok()
}

/// The object with these members set: in place where they stand already, at the end where they do not.
pub(super) fn with_members(object: &RawValue, set: &[(&str, &str)]) -> Option<Box<RawValue>> {
    let members = json::members(object).ok()?;
    let whole = object.get();
    let mut edits = Vec::new();
    let mut appended = String::new();
    for (name, value) in set {
        match members.iter().find(|(key, _)| key == name) {
            Some((_, old)) => edits.push((place(whole, old)?, (*value).to_owned())),
            None => {
                let comma = if members.is_empty() && appended.is_empty() { "" } else { "," };
                appended.push_str(&format!("{comma}{}:{value}", json::raw(*name)));
            }
        }
    }
    if !appended.is_empty() {
        let end = whole.rfind('}')?;
        edits.push((end..end, appended));
    }
    replaced(whole, edits)
}

/// The same inside the object's member `outer`, which is made where it is not there or is no object.
pub(super) fn with_inner(object: &RawValue, outer: &str, set: &[(&str, &str)]) -> Option<Box<RawValue>> {
    let inner = match json::member(object, outer).filter(|value| value.get().starts_with('{')) {
        Some(inner) => with_members(inner, set)?,
        None => with_members(&json::raw(&serde_json::json!({})), set)?,
    };
    with_members(object, &[(outer, inner.get())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn every_other_byte_stays() {
        let object = raw(r#"{ "z": 1.50, "_meta" : {"a":1e2 , "x":"old"}, "b":[ ] }"#);
        let changed = with_inner(&object, "_meta", &[("x", "2"), ("y", "3")]).unwrap();
        assert_eq!(changed.get(), r#"{ "z": 1.50, "_meta" : {"a":1e2 , "x":2,"y":3}, "b":[ ] }"#);
        assert_eq!(with_members(&raw("{ }"), &[("a", "1"), ("b", "2")]).unwrap().get(), r#"{ "a":1,"b":2}"#);
        assert_eq!(
            with_inner(&raw(r#"{"_meta":null}"#), "_meta", &[("k", "1")]).unwrap().get(),
            r#"{"_meta":{"k":1}}"#
        );
        assert!(with_members(&raw("[]"), &[("a", "1")]).is_none());
    }
}
