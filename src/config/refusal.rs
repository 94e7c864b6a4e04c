//! The YAML reader's errors as sentences for an operator: the dotted field, the value, what to write instead.

use serde_saphyr::Error;

use super::ConfigError;

/// A value longer than this is not repeated: it may be something that does not belong into the file.
const MAX_VALUE: usize = 24;

pub(super) fn sentence(text: &str, error: &Error) -> ConfigError {
    let error = error.without_snippet();
    let location = error.location();
    let place = location.map(|l| (l.line() as usize, l.column() as usize));
    let (field, value) = place.map_or((None, None), |(line, column)| at(text, line, column));
    let line = place.map_or_else(String::new, |(line, _)| format!(" (line {line})"));
    let named = field.clone().unwrap_or_else(|| "configuration".into());
    let shown = value.filter(|value| value.chars().count() <= MAX_VALUE && !value.is_empty());
    let shown = shown.map_or_else(String::new, |value| format!("{value} "));
    let refuse = |field: String, problem: String| ConfigError::new(&field, &problem);
    match error {
        Error::InvalidScalar { ty, .. } => refuse(named, format!("{shown}is not {}{line}", kind(ty))),
        Error::SerdeInvalidType { expected, .. } | Error::SerdeInvalidValue { expected, .. } => {
            refuse(named, format!("{shown}is not {}{line}", kind(expected)))
        }
        Error::SerdeUnknownField { field: unknown, expected, .. } => {
            let parent = field.as_deref().and_then(|path| path.rsplit_once('.')).map(|(parent, _)| parent);
            let path = parent.map_or_else(|| unknown.clone(), |parent| format!("{parent}.{unknown}"));
            refuse(path, format!("is not a field{line}: write one of {}", expected.join(", ")))
        }
        Error::SerdeMissingField { field: missing, .. } => refuse(named, format!("has no {missing}{line}: add it")),
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.clone().unwrap_or_else(|| "a field".into());
            refuse(named, format!("{key} stands twice{line}: put what both say under one"))
        }
        other => {
            let whole = other.to_string();
            let first = whole.lines().next().unwrap_or("is not valid YAML").trim().to_owned();
            refuse("configuration".into(), format!("{first}; it is a mapping of fields, see tollway init --output -"))
        }
    }
}

fn kind(ty: &str) -> &str {
    match ty {
        "u16" => "a whole number from 0 to 65535",
        "u32" | "u64" | "usize" => "a whole number of 0 or more",
        "bool" | "boolean" => "true or false",
        "f64" => "a number",
        other => other,
    }
}

/// The dotted field at a place, by indentation and the keys before it on its line, and the value there. Lines and
/// columns count from 1.
fn at(text: &str, line: usize, column: usize) -> (Option<String>, Option<String>) {
    let lines: Vec<&str> = text.lines().collect();
    let Some(current) = line.checked_sub(1).and_then(|i| lines.get(i)) else { return (None, None) };
    let indent = |line: &str| line.chars().take_while(|c| *c == ' ').count();
    let mut path: Vec<String> = Vec::new();
    let mut level = indent(current);
    for above in lines[..line - 1].iter().rev() {
        let content = above.trim_start();
        if level == 0 {
            break;
        }
        if content.is_empty() || content.starts_with('#') || indent(above) >= level {
            continue;
        }
        if let Some(key) =
            content.trim_start_matches("- ").split(": ").next().and_then(|k| k.trim_end().strip_suffix(':'))
        {
            path.insert(0, key.trim_matches(['"', '\'']).to_owned());
        }
        level = indent(above);
    }
    let before: String = current.chars().take(column.saturating_sub(1)).collect();
    let after: String = current.chars().skip(column.saturating_sub(1)).collect();
    // `a: {b: 1, c: x` gives a and c: a closed neighbour is no parent.
    for (depth, part) in before.trim_start().trim_start_matches("- ").split('{').enumerate() {
        let last = part.rsplit(',').next().unwrap_or_default().trim();
        if let Some(key) = last.strip_suffix(':') {
            path.push(key.trim_matches(['"', '\'']).to_owned());
        } else if depth == 0 && last.is_empty() {
            continue;
        }
    }
    if path.is_empty() || before.trim().is_empty() {
        // The place is a key itself.
        let key = after.split(':').next().unwrap_or_default().trim();
        if after.contains(':') && !key.is_empty() {
            path.push(key.trim_matches(['"', '\'']).to_owned());
            return (Some(path.join(".")), None);
        }
    }
    let value = after.split([',', '}', '#']).next().unwrap_or_default().trim();
    let field = (!path.is_empty()).then(|| path.join("."));
    (field, Some(value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::file::File;
    use super::*;

    #[test]
    fn a_type_error_names_the_field_the_value_and_what_to_write() {
        for (text, expected) in [
            ("http:\n  port: 99999\n", "http.port: 99999 is not a whole number from 0 to 65535 (line 2)"),
            ("http: {port: abc}\n", "http.port: abc is not a whole number from 0 to 65535 (line 1)"),
            (
                "networks:\n  stellar:testnet:\n    max_authorization_seconds: -1\n",
                "networks.stellar:testnet.max_authorization_seconds: -1 is not a whole number of 0 or more (line 3)",
            ),
            (
                "network_security:\n  # a comment\n  allow_insecure_local: maybe\n",
                "network_security.allow_insecure_local: maybe is not true or false (line 3)",
            ),
        ] {
            let error = serde_saphyr::from_str::<File>(text).err().unwrap();
            assert_eq!(sentence(text, &error).to_string(), expected);
        }
    }

    #[test]
    fn unknown_and_repeated_fields_are_named_with_their_path() {
        let say = |text: &str| sentence(text, &serde_saphyr::from_str::<File>(text).err().unwrap()).to_string();
        let unknown = say("http:\n  prot: 1\n");
        assert!(unknown.starts_with("http.prot: is not a field") && unknown.contains("port"), "{unknown}");
        let empty = say("\"\": 2\n");
        assert!(empty.starts_with("configuration: is not a field"), "{empty}");
        let seed = format!("S{}", "A2".repeat(27) + "B");
        let pasted = say(&format!("signer:\n  {seed}: x\n"));
        let value =
            super::super::refuse::<()>("signer.mode", format!("{seed:?} is unknown")).err().unwrap().to_string();
        assert_eq!(value, "signer.mode: \"(56 characters)\" is unknown");
        assert!(pasted.contains("is not a field") && !pasted.contains(&seed), "{pasted}");
        let twice = say("http: {port: 1}\nhttp: {port: 2}\n");
        assert!(twice.contains("http stands twice (line 2)") && !twice.contains("Policy"), "{twice}");
        let list = say("[]\n");
        assert!(list.contains("mapping of fields"), "{list}");
        let long = say(&format!("http: {{port: {}}}\n", "s".repeat(40)));
        assert!(!long.contains("sss"), "{long}");
    }
}
