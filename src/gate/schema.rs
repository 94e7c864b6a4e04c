//! Whether arguments fit a tool's input schema (JSON Schema 2020-12 and the drafts before it, as MCP servers write
//! them). A buyer is told before it pays. The schema is an upstream's and the arguments are anybody's, so the work is
//! bounded, nothing is fetched, and what cannot be decided here is left to the upstream: only a certain no is a no.
//!
//! Everything is read once for one comparison: a schema, a reference, a pattern, a value. What is read or matched is
//! paid for from one purse ([`MAX_WORK`]); once that is empty nothing is decided any more.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use regex::Regex;
use serde_json::value::RawValue;

use crate::json::{self, Numbers};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    Yes,
    /// The schema has something that is not decided here: a reference elsewhere, a pattern in another dialect, …
    Unknown,
    /// Where it does not fit, and why.
    No(String),
}

/// Schemas looked at for one value, at most.
const MAX_STEPS: u32 = 20_000;
/// Bytes that are read, compared and matched for one value, at most: some milliseconds.
const MAX_WORK: usize = 3 << 20;
/// What a look at one schema or one member costs besides what it reads.
const STEP: usize = 32;
/// Matching a byte costs more than reading it; compiling a pattern as much as matching so many bytes.
const MATCH: usize = 16;
const COMPILE: usize = 32 * 1_024;
const MAX_DEPTH: u32 = 96;
const MAX_PATTERN: usize = 1_024;
/// Of a compiled pattern, bytes.
const MAX_COMPILED: usize = 256 * 1_024;

/// Both have passed [`json::check`].
pub fn fits(schema: &RawValue, value: &RawValue) -> Fit {
    let mut check = Check {
        root: schema,
        steps: 0,
        left: MAX_WORK,
        schemas: BTreeMap::new(),
        targets: BTreeMap::new(),
        patterns: BTreeMap::new(),
    };
    check.schema(schema, &Seen::new(value), "arguments", 0)
}

impl Fit {
    fn and(self, other: impl FnOnce() -> Fit) -> Fit {
        match self {
            Fit::No(_) => self,
            Fit::Yes => other(),
            Fit::Unknown => match other() {
                no @ Fit::No(_) => no,
                _ => Fit::Unknown,
            },
        }
    }
}

fn no(path: &str, why: &str) -> Fit {
    Fit::No(format!("{path} {why}"))
}

fn yes_if(fits: bool, path: &str, why: impl FnOnce() -> String) -> Fit {
    if fits { Fit::Yes } else { no(path, &why()) }
}

type Members<'a> = Vec<(Cow<'a, str>, &'a RawValue)>;

fn get<'a>(members: &Members<'a>, name: &str) -> Option<&'a RawValue> {
    members.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
}

/// A value that is read at most once, whatever number of keywords and schemas speak of it.
struct Seen<'v> {
    raw: &'v RawValue,
    members: OnceCell<Option<Members<'v>>>,
    elements: OnceCell<Option<Vec<&'v RawValue>>>,
    text: OnceCell<Option<Cow<'v, str>>>,
}

impl<'v> Seen<'v> {
    fn new(raw: &'v RawValue) -> Seen<'v> {
        Seen { raw, members: OnceCell::new(), elements: OnceCell::new(), text: OnceCell::new() }
    }

    fn members(&self, check: &mut Check<'_>) -> Option<&Members<'v>> {
        once(&self.members, self.raw, check, |raw| json::members(raw).ok())
    }

    fn elements(&self, check: &mut Check<'_>) -> Option<&Vec<&'v RawValue>> {
        once(&self.elements, self.raw, check, json::elements)
    }

    fn text(&self, check: &mut Check<'_>) -> Option<&Cow<'v, str>> {
        once(&self.text, self.raw, check, json::string)
    }
}

fn once<'s, 'v, T>(
    cell: &'s OnceCell<Option<T>>,
    raw: &'v RawValue,
    check: &mut Check<'_>,
    read: impl FnOnce(&'v RawValue) -> Option<T>,
) -> Option<&'s T> {
    if cell.get().is_none() && !check.pays(raw.get().len()) {
        return None;
    }
    cell.get_or_init(|| read(raw)).as_ref()
}

struct Check<'a> {
    root: &'a RawValue,
    steps: u32,
    /// Of [`MAX_WORK`].
    left: usize,
    /// By where its text begins: no two values begin at one place.
    schemas: BTreeMap<usize, Option<Rc<Members<'a>>>>,
    targets: BTreeMap<String, Option<&'a RawValue>>,
    patterns: BTreeMap<String, Option<Regex>>,
}

impl<'a> Check<'a> {
    fn pays(&mut self, work: usize) -> bool {
        self.left = self.left.saturating_sub(work);
        self.left > 0
    }

    /// The members of a schema, or of an object in one.
    fn read(&mut self, schema: &'a RawValue) -> Option<Rc<Members<'a>>> {
        let place = schema.get().as_ptr().addr();
        if let Some(known) = self.schemas.get(&place) {
            return known.clone();
        }
        if !self.pays(schema.get().len()) {
            return None;
        }
        let members = json::members(schema).ok().map(Rc::new);
        self.schemas.insert(place, members.clone());
        members
    }

    fn schema(&mut self, schema: &'a RawValue, value: &Seen<'_>, path: &str, depth: u32) -> Fit {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            self.left = 0;
        }
        if depth > MAX_DEPTH || !self.pays(STEP) {
            return Fit::Unknown;
        }
        match schema.get() {
            "true" => return Fit::Yes,
            "false" => return no(path, "is not allowed"),
            _ => {}
        }
        let Some(members) = self.read(schema) else { return Fit::Unknown };
        let mut fit = Fit::Yes;
        for (keyword, operand) in members.iter() {
            fit = fit.and(|| self.keyword(keyword, operand, &members, value, path, depth));
            if matches!(fit, Fit::No(_)) {
                return fit;
            }
            if self.left == 0 {
                return Fit::Unknown;
            }
        }
        fit
    }

    fn keyword(
        &mut self,
        keyword: &str,
        operand: &'a RawValue,
        schema: &Members<'a>,
        value: &Seen<'_>,
        path: &str,
        depth: u32,
    ) -> Fit {
        let first = value.raw.get().as_bytes().first().copied().unwrap_or_default();
        match keyword {
            "$ref" => self.reference(operand, value, path, depth),
            "$dynamicRef" | "$recursiveRef" | "unevaluatedProperties" | "unevaluatedItems" => Fit::Unknown,
            "type" => type_fits(operand, value.raw, path),
            "enum" => {
                if !self.pays(operand.get().len()) {
                    return Fit::Unknown;
                }
                let Some(allowed) = json::elements(operand) else { return Fit::Unknown };
                for one in allowed {
                    match self.equal(one, value.raw) {
                        None => return Fit::Unknown,
                        Some(true) => return Fit::Yes,
                        Some(false) => {}
                    }
                }
                no(path, &format!("is none of {}", shown(operand)))
            }
            "const" => match self.equal(operand, value.raw) {
                None => Fit::Unknown,
                Some(equal) => yes_if(equal, path, || format!("is not {}", shown(operand))),
            },
            "allOf" => self.all(operand, value, path, depth),
            "anyOf" => self.some(operand, value, path, depth, false),
            "oneOf" => self.some(operand, value, path, depth, true),
            "not" => match self.schema(operand, value, path, depth + 1) {
                Fit::Yes => no(path, "is what it must not be"),
                Fit::Unknown => Fit::Unknown,
                Fit::No(_) => Fit::Yes,
            },
            "if" => {
                let then = match self.schema(operand, value, path, depth + 1) {
                    Fit::Yes => "then",
                    Fit::No(_) => "else",
                    Fit::Unknown => return Fit::Unknown,
                };
                get(schema, then).map_or(Fit::Yes, |schema| self.schema(schema, value, path, depth + 1))
            }
            _ if first == b'{' => self.of_object(keyword, operand, schema, value, path, depth),
            _ if first == b'[' => self.of_array(keyword, operand, schema, value, path, depth),
            _ if first == b'"' => self.of_string(keyword, operand, value, path),
            _ if matches!(first, b'-' | b'0'..=b'9') => of_number(keyword, operand, value.raw, path),
            _ => Fit::Yes,
        }
    }

    /// `None`: not decided.
    fn equal(&mut self, one: &RawValue, other: &RawValue) -> Option<bool> {
        if one.get().as_bytes().first() != other.get().as_bytes().first() && !is_number(one) {
            return self.pays(STEP).then_some(false);
        }
        self.pays(nested(one).saturating_add(nested(other))).then(|| json::equal(one, other))
    }

    fn all(&mut self, schemas: &'a RawValue, value: &Seen<'_>, path: &str, depth: u32) -> Fit {
        let Some(schemas) = self.list(schemas) else { return Fit::Unknown };
        schemas.into_iter().fold(Fit::Yes, |fit, schema| fit.and(|| self.schema(schema, value, path, depth + 1)))
    }

    fn some(&mut self, schemas: &'a RawValue, value: &Seen<'_>, path: &str, depth: u32, one: bool) -> Fit {
        let Some(schemas) = self.list(schemas) else { return Fit::Unknown };
        let (mut yes, mut unknown, mut last) = (0, 0, None);
        for schema in schemas {
            match self.schema(schema, value, path, depth + 1) {
                Fit::Yes => yes += 1,
                Fit::Unknown => unknown += 1,
                Fit::No(why) => last = Some(why),
            }
            if yes > 0 && !one {
                return Fit::Yes;
            }
        }
        match (yes, unknown) {
            (0, 0) => last.map_or_else(|| no(path, "fits none of the alternatives"), Fit::No),
            (1, 0) => Fit::Yes,
            (2.., _) => no(path, "fits more than one of the alternatives"),
            _ => Fit::Unknown,
        }
    }

    /// The elements of a list in a schema.
    fn list(&mut self, list: &'a RawValue) -> Option<Vec<&'a RawValue>> {
        if self.pays(list.get().len()) { json::elements(list) } else { None }
    }

    /// Inside of this document alone.
    fn reference(&mut self, target: &RawValue, value: &Seen<'_>, path: &str, depth: u32) -> Fit {
        let Some(target) = json::string(target) else { return Fit::Unknown };
        let schema = match self.targets.get(&*target) {
            Some(known) => *known,
            None => {
                let found = self.find(&target);
                self.targets.insert(target.into_owned(), found);
                found
            }
        };
        schema.map_or(Fit::Unknown, |schema| self.schema(schema, value, path, depth + 1))
    }

    fn find(&mut self, target: &str) -> Option<&'a RawValue> {
        let pointer = target.strip_prefix('#')?;
        let mut schema = self.root;
        if !pointer.is_empty() {
            for step in pointer.strip_prefix('/')?.split('/') {
                let step = step.replace("~1", "/").replace("~0", "~");
                schema = if schema.get().starts_with('[') {
                    self.list(schema)?.get(step.parse::<usize>().ok()?).copied()?
                } else {
                    get(&*self.read(schema)?, &step)?
                };
            }
        }
        Some(schema)
    }

    fn of_object(
        &mut self,
        keyword: &str,
        operand: &'a RawValue,
        schema: &Members<'a>,
        value: &Seen<'_>,
        path: &str,
        depth: u32,
    ) -> Fit {
        let Some(members) = value.members(self) else { return Fit::Unknown };
        let below = |name: &str| format!("{path}.{}", name.chars().take(60).collect::<String>());
        // To look for one name among them.
        let search = STEP + members.len();
        match keyword {
            "properties" => {
                let Some(properties) = self.read(operand) else { return Fit::Unknown };
                let mut fit = Fit::Yes;
                for (name, schema) in properties.iter() {
                    if !self.pays(search) {
                        return fit.and(|| Fit::Unknown);
                    }
                    if let Some(value) = get(members, name) {
                        fit = fit.and(|| self.schema(schema, &Seen::new(value), &below(name), depth + 1));
                    }
                }
                fit
            }
            "required" => {
                let Some(names) = self.list(operand) else { return Fit::Unknown };
                for name in names.into_iter().filter_map(json::string) {
                    if !self.pays(search) {
                        return Fit::Unknown;
                    }
                    if get(members, &name).is_none() {
                        return no(&below(&name), "is missing");
                    }
                }
                Fit::Yes
            }
            "additionalProperties" => {
                let (mut known, mut patterns) = (None, None);
                for (name, into) in [("properties", &mut known), ("patternProperties", &mut patterns)] {
                    if let Some(object) = get(schema, name) {
                        *into = self.read(object);
                        if into.is_none() {
                            return Fit::Unknown;
                        }
                    }
                }
                let mut fit = Fit::Yes;
                for (name, value) in members {
                    if !self.pays(STEP + known.as_ref().map_or(0, |known| known.len())) {
                        return fit.and(|| Fit::Unknown);
                    }
                    if known.as_ref().is_some_and(|known| get(known, name).is_some()) {
                        continue;
                    }
                    let mut matched = Some(false);
                    for (pattern, _) in patterns.iter().flat_map(|patterns| patterns.iter()) {
                        matched = match (matched, self.matches(pattern, name)) {
                            (Some(any), Some(fits)) => Some(any || fits),
                            _ => None,
                        };
                    }
                    match matched {
                        None => fit = fit.and(|| Fit::Unknown),
                        Some(true) => {}
                        Some(false) if operand.get() == "false" => return no(&below(name), "is unknown"),
                        Some(false) => {
                            fit = fit.and(|| self.schema(operand, &Seen::new(value), &below(name), depth + 1));
                        }
                    }
                }
                fit
            }
            "patternProperties" => {
                let Some(patterns) = self.read(operand) else { return Fit::Unknown };
                let mut fit = Fit::Yes;
                for (pattern, schema) in patterns.iter() {
                    for (name, value) in members {
                        if self.left == 0 {
                            return fit.and(|| Fit::Unknown);
                        }
                        fit = fit.and(|| match self.matches(pattern, name) {
                            None => Fit::Unknown,
                            Some(false) => Fit::Yes,
                            Some(true) => self.schema(schema, &Seen::new(value), &below(name), depth + 1),
                        });
                    }
                }
                fit
            }
            "propertyNames" => {
                let mut fit = Fit::Yes;
                for (name, _) in members {
                    if self.left == 0 {
                        return fit.and(|| Fit::Unknown);
                    }
                    let written = json::raw(&**name);
                    fit = fit.and(|| self.schema(operand, &Seen::new(&written), &below(name), depth + 1));
                }
                fit
            }
            "dependentRequired" => {
                let Some(needs) = self.read(operand) else { return Fit::Unknown };
                for (name, needed) in needs.iter() {
                    if !self.pays(search + needed.get().len()) {
                        return Fit::Unknown;
                    }
                    if get(members, name).is_none() {
                        continue;
                    }
                    for name in json::elements(needed).unwrap_or_default().into_iter().filter_map(json::string) {
                        if !self.pays(search) {
                            return Fit::Unknown;
                        }
                        if get(members, &name).is_none() {
                            return no(&below(&name), "is missing");
                        }
                    }
                }
                Fit::Yes
            }
            "minProperties" => count(operand, path, members.len(), |n, limit| n >= limit, "has too few members"),
            "maxProperties" => count(operand, path, members.len(), |n, limit| n <= limit, "has too many members"),
            "dependentSchemas" | "dependencies" => Fit::Unknown,
            _ => Fit::Yes,
        }
    }

    fn of_array(
        &mut self,
        keyword: &str,
        operand: &'a RawValue,
        schema: &Members<'a>,
        value: &Seen<'_>,
        path: &str,
        depth: u32,
    ) -> Fit {
        let Some(elements) = value.elements(self) else { return Fit::Unknown };
        let each = |check: &mut Self, schema: &'a RawValue, from: usize| {
            let mut fit = Fit::Yes;
            for (i, value) in elements.iter().enumerate().skip(from) {
                if check.left == 0 {
                    return fit.and(|| Fit::Unknown);
                }
                fit = fit.and(|| check.schema(schema, &Seen::new(value), &format!("{path}[{i}]"), depth + 1));
            }
            fit
        };
        let tuple = |check: &mut Self, schemas: Vec<&'a RawValue>| {
            elements.iter().zip(schemas).enumerate().fold(Fit::Yes, |fit, (i, (value, schema))| {
                fit.and(|| check.schema(schema, &Seen::new(value), &format!("{path}[{i}]"), depth + 1))
            })
        };
        match keyword {
            "items" if operand.get().starts_with('[') => {
                self.list(operand).map_or(Fit::Unknown, |schemas| tuple(self, schemas))
            }
            "items" => {
                let from = get(schema, "prefixItems").and_then(json::elements).map_or(0, |first| first.len());
                each(self, operand, from)
            }
            "prefixItems" => self.list(operand).map_or(Fit::Unknown, |schemas| tuple(self, schemas)),
            "additionalItems" => match get(schema, "items").and_then(json::elements) {
                Some(first) => each(self, operand, first.len()),
                None => Fit::Yes,
            },
            "minItems" => count(operand, path, elements.len(), |n, limit| n >= limit, "has too few elements"),
            "maxItems" => count(operand, path, elements.len(), |n, limit| n <= limit, "has too many elements"),
            "uniqueItems" if operand.get() == "true" => {
                if !self.pays(nested(value.raw).saturating_add(elements.len() * STEP)) {
                    return Fit::Unknown;
                }
                // Equal numbers in two spellings are the upstream's to find.
                let texts: std::collections::BTreeSet<String> =
                    elements.iter().filter_map(|one| json::canonical(one, Numbers::AsWritten).ok()).collect();
                yes_if(texts.len() == elements.len(), path, || "has an element twice".into())
            }
            "contains" => Fit::Unknown,
            _ => Fit::Yes,
        }
    }

    fn of_string(&mut self, keyword: &str, operand: &RawValue, value: &Seen<'_>, path: &str) -> Fit {
        if !matches!(keyword, "minLength" | "maxLength" | "pattern") {
            return Fit::Yes;
        }
        let Some(text) = value.text(self) else { return Fit::Unknown };
        match keyword {
            "minLength" => count(operand, path, text.chars().count(), |n, limit| n >= limit, "is too short"),
            "maxLength" => count(operand, path, text.chars().count(), |n, limit| n <= limit, "is too long"),
            _ => match json::string(operand).and_then(|pattern| self.matches(&pattern, text)) {
                None => Fit::Unknown,
                Some(fits) => yes_if(fits, path, || format!("does not match {}", shown(operand))),
            },
        }
    }

    /// `None`: the pattern is in a dialect that is not read here, or too large, or there is no work left for it.
    fn matches(&mut self, pattern: &str, text: &str) -> Option<bool> {
        if !self.patterns.contains_key(pattern) {
            if pattern.len() > MAX_PATTERN || !self.pays(COMPILE) {
                return None;
            }
            let made = regex::RegexBuilder::new(pattern).size_limit(MAX_COMPILED).dfa_size_limit(MAX_COMPILED).build();
            self.patterns.insert(pattern.to_owned(), made.ok());
        }
        if !self.pays(STEP + text.len().saturating_mul(MATCH)) {
            return None;
        }
        self.patterns.get(pattern)?.as_ref().map(|made| made.is_match(text))
    }
}

/// What reading a value to its last level costs: each level reads what is below it once more.
fn nested(raw: &RawValue) -> usize {
    let (mut depth, mut deepest) = (1usize, 1usize);
    for byte in raw.get().bytes() {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    raw.get().len().saturating_mul(deepest)
}

fn is_number(raw: &RawValue) -> bool {
    raw.get().starts_with(['-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'])
}

fn type_fits(operand: &RawValue, value: &RawValue, path: &str) -> Fit {
    let names: Vec<_> = match json::elements(operand) {
        Some(names) => names.into_iter().filter_map(json::string).collect(),
        None => json::string(operand).into_iter().collect(),
    };
    let text = value.get();
    let is = |name: &str| match name {
        "object" => text.starts_with('{'),
        "array" => text.starts_with('['),
        "string" => text.starts_with('"'),
        "boolean" => matches!(text, "true" | "false"),
        "null" => text == "null",
        "number" => text.starts_with(['-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']),
        "integer" => is_integer(text),
        _ => true,
    };
    let why = || format!("is no {}", names.iter().map(|name| &**name).collect::<Vec<_>>().join(" and no "));
    if names.is_empty() { Fit::Unknown } else { yes_if(names.iter().any(|name| is(name)), path, why) }
}

/// `1.0` and `1e2` are integers too.
fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
        return true;
    }
    text.starts_with(['-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'])
        && text.parse::<f64>().is_ok_and(|number| number.fract() == 0.0)
}

fn of_number(keyword: &str, operand: &RawValue, value: &RawValue, path: &str) -> Fit {
    let (Ok(limit), Ok(number)) = (operand.get().parse::<f64>(), value.get().parse::<f64>()) else { return Fit::Yes };
    // Two numbers that share a double cannot be told apart here.
    if limit == number && !json::equal(operand, value) {
        return Fit::Unknown;
    }
    match keyword {
        "minimum" => yes_if(number >= limit, path, || format!("is below {}", operand.get())),
        "maximum" => yes_if(number <= limit, path, || format!("is above {}", operand.get())),
        "exclusiveMinimum" => yes_if(number > limit, path, || format!("is not above {}", operand.get())),
        "exclusiveMaximum" => yes_if(number < limit, path, || format!("is not below {}", operand.get())),
        "multipleOf" => Fit::Unknown,
        _ => Fit::Yes,
    }
}

fn count(operand: &RawValue, path: &str, n: usize, fits: impl Fn(f64, f64) -> bool, why: &str) -> Fit {
    let Ok(limit) = operand.get().parse::<f64>() else { return Fit::Unknown };
    #[allow(clippy::cast_precision_loss, reason = "nothing here has 2^53 of anything")]
    let n = n as f64;
    yes_if(fits(n, limit), path, || why.to_owned())
}

fn shown(raw: &RawValue) -> String {
    raw.get().chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(schema: &str, value: &str) -> Fit {
        let limits = json::Limits { bytes: 1 << 20, depth: 512 };
        let checked = |text: &str| json::check(text.as_bytes(), limits).unwrap().to_owned();
        fits(&checked(schema), &checked(value))
    }

    #[test]
    fn says_what_does_not_fit() {
        let weather = r#"{"type":"object","properties":{"city":{"type":"string","minLength":1,"pattern":"^[A-Z]"},
            "days":{"type":"integer","minimum":1,"maximum":7},"units":{"enum":["c","f"]},
            "tags":{"type":"array","items":{"type":"string"},"maxItems":2,"uniqueItems":true}},
            "required":["city"],"additionalProperties":false}"#;
        for (value, why) in [
            (r#"{"city":"Oslo"}"#, ""),
            (r#"{"city":"Oslo","days":7.0,"units":"f","tags":["a","b"]}"#, ""),
            ("{}", "arguments.city is missing"),
            ("[]", "arguments is no object"),
            (r#"{"city":7}"#, "arguments.city is no string"),
            (r#"{"city":""}"#, "arguments.city is too short"),
            (r#"{"city":"oslo"}"#, r#"arguments.city does not match "^[A-Z]""#),
            (r#"{"city":"Oslo","days":1.5}"#, "arguments.days is no integer"),
            (r#"{"city":"Oslo","days":0}"#, "arguments.days is below 1"),
            (r#"{"city":"Oslo","days":100000000000000000000000001}"#, "arguments.days is above 7"),
            (r#"{"city":"Oslo","units":"k"}"#, r#"arguments.units is none of ["c","f"]"#),
            (r#"{"city":"Oslo","tags":["a",1]}"#, "arguments.tags[1] is no string"),
            (r#"{"city":"Oslo","tags":["a","a"]}"#, "arguments.tags has an element twice"),
            (r#"{"city":"Oslo","tags":["a","b","c"]}"#, "arguments.tags has too many elements"),
            (r#"{"city":"Oslo","City":1}"#, "arguments.City is unknown"),
        ] {
            let expected = if why.is_empty() { Fit::Yes } else { Fit::No(why.into()) };
            assert_eq!(of(weather, value), expected, "{value}");
        }
    }

    #[test]
    fn combinations_and_references_of_the_same_document() {
        let tree = r##"{"$defs":{"n":{"type":"object","properties":{"next":{"$ref":"#/$defs/n"}},"required":["v"]}},"$ref":"#/$defs/n"}"##;
        assert_eq!(of(tree, r#"{"v":1,"next":{"v":2}}"#), Fit::Yes);
        assert!(matches!(of(tree, r#"{"v":1,"next":{}}"#), Fit::No(why) if why == "arguments.next.v is missing"));
        let one = r#"{"oneOf":[{"required":["a"]},{"required":["b"]}]}"#;
        assert_eq!(of(one, r#"{"a":1}"#), Fit::Yes);
        assert!(matches!(of(one, r#"{"a":1,"b":1}"#), Fit::No(_)) && matches!(of(one, "{}"), Fit::No(_)));
        let any = r#"{"anyOf":[{"type":"string"},{"type":"null"}],"not":{"const":"x"}}"#;
        assert!(
            of(any, "null") == Fit::Yes
                && matches!(of(any, r#""x""#), Fit::No(_))
                && matches!(of(any, "1"), Fit::No(_))
        );
        let when = r#"{"if":{"required":["a"]},"then":{"required":["b"]},"else":{"maxProperties":0}}"#;
        assert!(of(when, "{}") == Fit::Yes && matches!(of(when, r#"{"a":1}"#), Fit::No(_)));
        assert!(matches!(of(when, r#"{"c":1}"#), Fit::No(_)));
    }

    #[test]
    fn what_cannot_be_decided_here_is_the_upstreams() {
        for schema in [
            r#"{"$ref":"https://example.com/s.json"}"#,
            r##"{"$ref":"#anchor"}"##,
            r##"{"$dynamicRef":"#x"}"##,
            r#"{"properties":{"a":{"pattern":"(?=x)"}}}"#,
            r#"{"properties":{"a":{"pattern":"(a{1000}){1000}"}}}"#,
            r#"{"unevaluatedProperties":false}"#,
            "7",
        ] {
            assert_eq!(of(schema, r#"{"a":"y"}"#), Fit::Unknown, "{schema}");
        }
        // A certain no beside it is a no all the same.
        assert!(matches!(of(r#"{"$ref":"x.json","required":["b"]}"#, "{}"), Fit::No(_)));
    }

    #[test]
    fn endless_work_is_bounded() {
        assert_eq!(of(r##"{"$ref":"#"}"##, "{}"), Fit::Unknown);
        let bomb = r##"{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}"##;
        assert_eq!(of(bomb, "{}"), Fit::Unknown);
        assert_eq!(
            of(r##"{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#"}]},"b":{}},"$ref":"#/$defs/a"}"##, "{}"),
            Fit::Unknown
        );
        let slow = r#"{"properties":{"a":{"pattern":"^(a+)+$"}}}"#;
        let value = format!(r#"{{"a":"{}b"}}"#, "a".repeat(10_000));
        assert!(matches!(of(slow, &value), Fit::No(_)));
    }

    /// What is left of the work after a comparison.
    fn left(schema: &str, value: &str) -> (usize, Fit) {
        let limits = json::Limits { bytes: 1 << 21, depth: 512 };
        let checked = |text: &str| json::check(text.as_bytes(), limits).unwrap().to_owned();
        let (schema, value) = (checked(schema), checked(value));
        let mut check = Check {
            root: &schema,
            steps: 0,
            left: MAX_WORK,
            schemas: BTreeMap::new(),
            targets: BTreeMap::new(),
            patterns: BTreeMap::new(),
        };
        let fit = check.schema(&schema, &Seen::new(&value), "arguments", 0);
        assert!(check.patterns.len() <= 2, "each pattern is compiled once");
        (check.left, fit)
    }

    #[test]
    fn a_megabyte_of_arguments_costs_no_more_than_is_bounded() {
        let names = format!(r#"{{"a":[{}]}}"#, vec![r#""name""#; 1_000].join(","));
        let strings = r#"{"properties":{"a":{"items":{"type":"string","pattern":"^[a-z-]{1,64}$"}}}}"#;
        let (rest, fit) = left(strings, &names);
        assert_eq!(fit, Fit::Yes);
        assert!(MAX_WORK - rest < 300_000, "{}", MAX_WORK - rest);
        // Bodies of a megabyte: read in time where little is asked, and else left to the upstream.
        let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(1 << 20));
        let text = r#"{"type":"object","properties":{"a":{"type":"string","maxLength":2000000}},"required":["a"],"additionalProperties":false}"#;
        assert_eq!(left(text, &long).1, Fit::Yes);
        let many = format!(r#"{{"a":[{}]}}"#, vec![r#""name""#; 140_000].join(","));
        let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(500), "]".repeat(500));
        let keys: Vec<String> = (0..60_000).map(|n| format!(r#""k{n}":{n}"#)).collect();
        let keys = format!("{{{}}}", keys.join(","));
        let all: Vec<String> = (0..2_000).map(|n| format!(r#""p{n}":{{}}"#)).collect();
        let all = format!(r#"{{"properties":{{{}}},"additionalProperties":{{"type":"number"}}}}"#, all.join(","));
        for (schema, value) in [
            (strings, &many),
            (r#"{"properties":{"a":{"pattern":"^(x?x?x?)+$"}}}"#, &long),
            (r#"{"propertyNames":{"pattern":"^k"}}"#, &keys),
            (&all, &keys),
            (r##"{"properties":{"a":{"$ref":"#/$defs/n"}},"$defs":{"n":{"items":{"$ref":"#/$defs/n"}}}}"##, &deep),
        ] {
            assert_eq!(left(schema, value).1, Fit::Unknown, "{schema:.80}");
        }
    }
}
