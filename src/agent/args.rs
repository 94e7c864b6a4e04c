//! Tool arguments, parsed strictly: an unknown member is refused by name, a type is never guessed, a range never
//! clipped.

use std::str::FromStr;

use serde_json::value::RawValue;
use stellar_strkey::ed25519::PrivateKey;

use super::errors::Problem;
use crate::json;

pub struct Args<'a>(Vec<(std::borrow::Cow<'a, str>, &'a RawValue)>);

type Parsed<T> = Result<T, Box<Problem>>;

fn refuse<T>(field: &str, problem: &str) -> Parsed<T> {
    Err(Box::new(Problem::argument(field, problem)))
}

impl<'a> Args<'a> {
    /// `arguments` is the raw member of `tools/call`, which has passed `json::check`.
    pub fn new(arguments: Option<&'a RawValue>, known: &[&str]) -> Parsed<Args<'a>> {
        if arguments.is_some_and(|raw| holds_secret_seed(raw.get())) {
            return refuse(
                "arguments",
                "hold a Stellar secret seed (S…): no tool takes a key, and nothing was sent anywhere",
            );
        }
        let members = match arguments {
            None => Vec::new(),
            Some(raw) => match json::members(raw) {
                Ok(members) => members,
                Err(_) => return refuse("arguments", "must be an object"),
            },
        };
        if let Some((name, _)) = members.iter().find(|(name, _)| !known.contains(&name.as_ref())) {
            let shown: String = name.chars().take(64).collect();
            let plain = |s: &str| s.chars().filter(|c| c.is_alphanumeric()).collect::<String>().to_lowercase();
            return match known.iter().find(|known| plain(known) == plain(name)) {
                Some(meant) => refuse(&shown, &format!("is not an argument of this tool; write {meant}")),
                None => refuse(&shown, &format!("is not an argument of this tool; it takes {}", known.join(", "))),
            };
        }
        Ok(Args(members))
    }

    pub fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
    }

    /// A text of 1 to `max` characters.
    pub fn text(&self, name: &str, max: usize) -> Parsed<Option<String>> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let Some(text) = json::string(raw) else { return refuse(name, "must be a string") };
        if !(1..=max).contains(&text.chars().count()) {
            return refuse(name, &format!("must have 1 to {max} characters"));
        }
        Ok(Some(text.into_owned()))
    }

    /// A text that a type of ours parses.
    pub fn parsed<T: FromStr>(&self, name: &str, max: usize) -> Parsed<Option<T>>
    where
        T::Err: std::fmt::Display,
    {
        let Some(text) = self.text(name, max)? else { return Ok(None) };
        match text.parse() {
            Ok(value) => Ok(Some(value)),
            Err(error) => refuse(name, &format!("is wrong: {error}")),
        }
    }

    pub fn required<T>(&self, name: &str, value: Option<T>) -> Parsed<T> {
        match value {
            Some(value) => Ok(value),
            None => refuse(name, "is missing"),
        }
    }

    /// A JSON integer; `20.0` and `"20"` are none.
    pub fn integer(&self, name: &str, min: u32, max: u32) -> Parsed<Option<u32>> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let digits = raw.get().bytes().all(|b| b.is_ascii_digit());
        match raw.get().parse::<u32>() {
            Ok(n) if digits && (min..=max).contains(&n) => Ok(Some(n)),
            _ => refuse(name, &format!("must be an integer from {min} to {max}")),
        }
    }

    pub fn texts(&self, name: &str, max_items: usize, max: usize) -> Parsed<Vec<String>> {
        let Some(raw) = self.raw(name) else { return Ok(Vec::new()) };
        let wrong = || Problem::argument(name, &format!("must be an array of at most {max_items} strings"));
        let items = json::elements(raw).filter(|items| items.len() <= max_items).ok_or_else(|| Box::new(wrong()))?;
        items
            .into_iter()
            .map(|item| match json::string(item) {
                Some(text) if (1..=max).contains(&text.chars().count()) => Ok(text.into_owned()),
                _ => Err(Box::new(wrong())),
            })
            .collect()
    }

    pub fn object(&self, name: &str) -> Parsed<Option<&'a RawValue>> {
        match self.raw(name) {
            Some(raw) if !raw.get().starts_with('{') => refuse(name, "must be an object"),
            other => Ok(other),
        }
    }

    /// 64 lower-case hex digits.
    pub fn hash(&self, name: &str) -> Parsed<Option<String>> {
        let text = self.text(name, 64)?;
        let hex = |text: &String| text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match text {
            Some(text) if !hex(&text) => refuse(name, "must be 64 lower-case hex digits"),
            other => Ok(other),
        }
    }
}

/// A text of 56 characters with the checksum of a secret seed (SEP-23) is one, wherever it stands.
fn holds_secret_seed(text: &str) -> bool {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .any(|word| word.len() == 56 && word.starts_with('S') && PrivateKey::from_string(word).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).unwrap()
    }
    fn said(problem: impl AsRef<Problem>) -> (String, String) {
        let problem = problem.as_ref();
        (problem.reason.to_string(), problem.message.clone())
    }

    #[test]
    fn an_unknown_member_is_refused_by_name_with_the_right_spelling() {
        let (field, message) = said(Args::new(Some(raw(r#"{"Pay_To":"x"}"#)), &["payTo", "limit"]).err().unwrap());
        assert_eq!(field, "Pay_To");
        assert!(message.contains("write payTo"), "{message}");
        let (field, message) = said(Args::new(Some(raw(r#"{"privateKey":"x"}"#)), &["payTo"]).err().unwrap());
        assert_eq!(field, "privateKey");
        assert!(message.contains("it takes payTo"), "{message}");
        assert!(Args::new(Some(raw("[]")), &[]).is_err());
        assert!(Args::new(None, &[]).is_ok());
    }

    #[test]
    fn types_are_not_guessed_and_ranges_not_clipped() {
        let text = r#"{"a":1,"b":"20","c":20.0,"d":201,"e":null,"f":"","g":"ab","h":["x",1],"i":"AB"}"#;
        let args = Args::new(Some(raw(text)), &["a", "b", "c", "d", "e", "f", "g", "h", "i"]).unwrap();
        assert!(args.text("a", 10).is_err());
        for name in ["b", "c", "d", "e"] {
            assert!(args.integer(name, 1, 200).is_err(), "{name}");
        }
        assert!(args.text("e", 10).is_err());
        assert!(args.text("f", 10).is_err());
        assert!(args.text("g", 1).is_err());
        assert_eq!(args.text("g", 2).unwrap().as_deref(), Some("ab"));
        assert!(args.texts("h", 5, 5).is_err());
        assert!(args.hash("i").is_err());
        assert!(args.object("g").is_err());
        assert_eq!(args.integer("z", 1, 2).unwrap(), None);
    }

    #[test]
    fn a_secret_seed_is_refused_in_any_argument_and_not_repeated() {
        let seed = "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X";
        let call = |text: &str| {
            let raw = RawValue::from_string(text.to_owned()).unwrap();
            Args::new(Some(&raw), &["arguments"]).err().map(|problem| problem.json().get().to_owned())
        };
        let refused = call(&format!(r#"{{"arguments":{{"deep":["my key is {seed}!"]}}}}"#)).unwrap();
        assert!(refused.contains("INVALID_ARGUMENT") && !refused.contains(&seed[..10]), "{refused}");
        let other = seed.replace("P54X", "P54Y");
        assert_eq!(call(&format!(r#"{{"arguments":{{"word":"{other}"}}}}"#)), None, "no checksum, no seed");
    }
}
