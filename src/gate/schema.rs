//! Whether arguments fit a tool's input schema (JSON Schema 2020-12 and the drafts before it, as MCP servers write
//! them). A buyer is told before it pays. The schema is an upstream's and the arguments are anybody's, so the work is
//! bounded, nothing is fetched, and what cannot be decided here is left to the upstream: only a certain no is a no.

use std::collections::BTreeSet;

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
const MAX_DEPTH: u32 = 96;
const MAX_PATTERN: usize = 1_024;
/// Of a compiled pattern, bytes.
const MAX_COMPILED: usize = 256 * 1_024;

/// Both have passed [`json::check`].
pub fn fits(schema: &RawValue, value: &RawValue) -> Fit {
    Check { root: schema, steps: 0 }.schema(schema, value, "arguments", 0)
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

struct Check<'a> {
    root: &'a RawValue,
    steps: u32,
}

type Members<'a> = Vec<(std::borrow::Cow<'a, str>, &'a RawValue)>;

fn get<'a>(members: &Members<'a>, name: &str) -> Option<&'a RawValue> {
    members.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
}

impl<'a> Check<'a> {
    fn schema(&mut self, schema: &'a RawValue, value: &RawValue, path: &str, depth: u32) -> Fit {
        self.steps += 1;
        if self.steps > MAX_STEPS || depth > MAX_DEPTH {
            return Fit::Unknown;
        }
        match schema.get() {
            "true" => return Fit::Yes,
            "false" => return no(path, "is not allowed"),
            _ => {}
        }
        let Ok(members) = json::members(schema) else { return Fit::Unknown };
        let mut fit = Fit::Yes;
        for (keyword, operand) in &members {
            fit = fit.and(|| self.keyword(keyword, operand, &members, value, path, depth));
            if matches!(fit, Fit::No(_)) {
                break;
            }
        }
        fit
    }

    fn keyword(
        &mut self,
        keyword: &str,
        operand: &'a RawValue,
        schema: &Members<'a>,
        value: &RawValue,
        path: &str,
        depth: u32,
    ) -> Fit {
        let first = value.get().as_bytes().first().copied().unwrap_or_default();
        match keyword {
            "$ref" => self.reference(operand, value, path, depth),
            "$dynamicRef" | "$recursiveRef" | "unevaluatedProperties" | "unevaluatedItems" => Fit::Unknown,
            "type" => type_fits(operand, value, path),
            "enum" => match json::elements(operand) {
                Some(allowed) => yes_if(allowed.iter().any(|one| json::equal(one, value)), path, || {
                    format!("is none of {}", shown(operand))
                }),
                None => Fit::Unknown,
            },
            "const" => yes_if(json::equal(operand, value), path, || format!("is not {}", shown(operand))),
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
            _ if first == b'"' => of_string(keyword, operand, value, path),
            _ if matches!(first, b'-' | b'0'..=b'9') => of_number(keyword, operand, value, path),
            _ => Fit::Yes,
        }
    }

    fn all(&mut self, schemas: &'a RawValue, value: &RawValue, path: &str, depth: u32) -> Fit {
        let Some(schemas) = json::elements(schemas) else { return Fit::Unknown };
        schemas.into_iter().fold(Fit::Yes, |fit, schema| fit.and(|| self.schema(schema, value, path, depth + 1)))
    }

    fn some(&mut self, schemas: &'a RawValue, value: &RawValue, path: &str, depth: u32, one: bool) -> Fit {
        let Some(schemas) = json::elements(schemas) else { return Fit::Unknown };
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

    /// Inside of this document alone.
    fn reference(&mut self, target: &RawValue, value: &RawValue, path: &str, depth: u32) -> Fit {
        let Some(target) = json::string(target) else { return Fit::Unknown };
        let Some(pointer) = target.strip_prefix('#') else { return Fit::Unknown };
        let mut schema = self.root;
        if !pointer.is_empty() {
            let Some(steps) = pointer.strip_prefix('/') else { return Fit::Unknown };
            for step in steps.split('/') {
                let step = step.replace("~1", "/").replace("~0", "~");
                let next = match json::elements(schema) {
                    Some(elements) => step.parse::<usize>().ok().and_then(|index| elements.get(index).copied()),
                    None => json::member(schema, &step),
                };
                let Some(next) = next else { return Fit::Unknown };
                schema = next;
            }
        }
        self.schema(schema, value, path, depth + 1)
    }

    fn of_object(
        &mut self,
        keyword: &str,
        operand: &'a RawValue,
        schema: &Members<'a>,
        value: &RawValue,
        path: &str,
        depth: u32,
    ) -> Fit {
        let Ok(members) = json::members(value) else { return Fit::Unknown };
        let below = |name: &str| format!("{path}.{}", name.chars().take(60).collect::<String>());
        match keyword {
            "properties" => {
                let Ok(properties) = json::members(operand) else { return Fit::Unknown };
                properties.into_iter().fold(Fit::Yes, |fit, (name, schema)| {
                    fit.and(|| match get(&members, &name) {
                        Some(value) => self.schema(schema, value, &below(&name), depth + 1),
                        None => Fit::Yes,
                    })
                })
            }
            "required" => {
                let Some(names) = json::elements(operand) else { return Fit::Unknown };
                let mut names = names.into_iter().filter_map(json::string);
                match names.find(|name| get(&members, name).is_none()) {
                    Some(missing) => no(&below(&missing), "is missing"),
                    None => Fit::Yes,
                }
            }
            "additionalProperties" => {
                let known: BTreeSet<String> = get(schema, "properties")
                    .and_then(|properties| json::members(properties).ok())
                    .map(|known| known.into_iter().map(|(name, _)| name.into_owned()).collect())
                    .unwrap_or_default();
                let patterns = match get(schema, "patternProperties").map(json::members) {
                    None => Vec::new(),
                    Some(Ok(patterns)) => patterns.into_iter().map(|(pattern, _)| pattern).collect(),
                    Some(Err(_)) => return Fit::Unknown,
                };
                let mut fit = Fit::Yes;
                for (name, value) in members.iter().filter(|(name, _)| !known.contains(&**name)) {
                    match patterns
                        .iter()
                        .map(|pattern| pattern_fits(pattern, name))
                        .try_fold(false, |any, fits| fits.map(|fits| any || fits))
                    {
                        None => fit = fit.and(|| Fit::Unknown),
                        Some(true) => {}
                        Some(false) if operand.get() == "false" => return no(&below(name), "is unknown"),
                        Some(false) => {
                            fit = fit.and(|| self.schema(operand, value, &below(name), depth + 1));
                        }
                    }
                }
                fit
            }
            "patternProperties" => {
                let Ok(patterns) = json::members(operand) else { return Fit::Unknown };
                let mut fit = Fit::Yes;
                for (pattern, schema) in patterns {
                    for (name, value) in &members {
                        fit = fit.and(|| match pattern_fits(&pattern, name) {
                            None => Fit::Unknown,
                            Some(false) => Fit::Yes,
                            Some(true) => self.schema(schema, value, &below(name), depth + 1),
                        });
                    }
                }
                fit
            }
            "propertyNames" => members.iter().fold(Fit::Yes, |fit, (name, _)| {
                fit.and(|| self.schema(operand, &json::raw(&**name), &below(name), depth + 1))
            }),
            "dependentRequired" => {
                let Ok(needs) = json::members(operand) else { return Fit::Unknown };
                for (_, needed) in needs.iter().filter(|(name, _)| get(&members, name).is_some()) {
                    for name in json::elements(needed).unwrap_or_default().into_iter().filter_map(json::string) {
                        if get(&members, &name).is_none() {
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
        value: &RawValue,
        path: &str,
        depth: u32,
    ) -> Fit {
        let Some(elements) = json::elements(value) else { return Fit::Unknown };
        let each = |check: &mut Self, schema: &'a RawValue, from: usize| {
            elements.iter().enumerate().skip(from).fold(Fit::Yes, |fit, (i, value)| {
                fit.and(|| check.schema(schema, value, &format!("{path}[{i}]"), depth + 1))
            })
        };
        let tuple = |check: &mut Self, schemas: Vec<&'a RawValue>| {
            elements.iter().zip(schemas).enumerate().fold(Fit::Yes, |fit, (i, (value, schema))| {
                fit.and(|| check.schema(schema, value, &format!("{path}[{i}]"), depth + 1))
            })
        };
        match keyword {
            "items" => match json::elements(operand) {
                Some(schemas) => tuple(self, schemas),
                None => {
                    let from = get(schema, "prefixItems").and_then(json::elements).map_or(0, |first| first.len());
                    each(self, operand, from)
                }
            },
            "prefixItems" => json::elements(operand).map_or(Fit::Unknown, |schemas| tuple(self, schemas)),
            "additionalItems" => match get(schema, "items").and_then(json::elements) {
                Some(first) => each(self, operand, first.len()),
                None => Fit::Yes,
            },
            "minItems" => count(operand, path, elements.len(), |n, limit| n >= limit, "has too few elements"),
            "maxItems" => count(operand, path, elements.len(), |n, limit| n <= limit, "has too many elements"),
            "uniqueItems" if operand.get() == "true" => {
                // Equal numbers in two spellings are the upstream's to find.
                let texts: BTreeSet<String> =
                    elements.iter().filter_map(|one| json::canonical(one, Numbers::AsWritten).ok()).collect();
                yes_if(texts.len() == elements.len(), path, || "has an element twice".into())
            }
            "contains" => Fit::Unknown,
            _ => Fit::Yes,
        }
    }
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

fn of_string(keyword: &str, operand: &RawValue, value: &RawValue, path: &str) -> Fit {
    let Some(text) = json::string(value) else { return Fit::Unknown };
    match keyword {
        "minLength" => count(operand, path, text.chars().count(), |n, limit| n >= limit, "is too short"),
        "maxLength" => count(operand, path, text.chars().count(), |n, limit| n <= limit, "is too long"),
        "pattern" => match json::string(operand).and_then(|pattern| pattern_fits(&pattern, &text)) {
            None => Fit::Unknown,
            Some(fits) => yes_if(fits, path, || format!("does not match {}", shown(operand))),
        },
        _ => Fit::Yes,
    }
}

/// `None`: the pattern is in a dialect that is not read here, or too large.
fn pattern_fits(pattern: &str, text: &str) -> Option<bool> {
    if pattern.len() > MAX_PATTERN {
        return None;
    }
    let compiled = regex::RegexBuilder::new(pattern).size_limit(MAX_COMPILED).dfa_size_limit(MAX_COMPILED).build();
    compiled.ok().map(|compiled| compiled.is_match(text))
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
        let slow = r#"{"properties":{"a":{"pattern":"^(a+)+$"}}}"#;
        let value = format!(r#"{{"a":"{}b"}}"#, "a".repeat(10_000));
        assert!(matches!(of(slow, &value), Fit::No(_)));
    }
}
