//! What a request is aimed at. The name or URI goes to the upstream as it came, and an upstream may read it more
//! generously than it was written (case, percent-encoding, dot segments, Unicode forms). So two readings are made here,
//! the exact one and the most generous one: where they do not lead to the same item, the request goes nowhere.

use std::collections::BTreeMap;

use icu_normalizer::ComposingNormalizerBorrowed;

use super::Kind;
use super::prices::{Item, Prices};

/// A longer name or URI is refused, bytes.
pub const MAX_TARGET: usize = 8_192;

#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    Priced(&'a Item),
    /// Passed through.
    Free,
    /// Not for sale and not free, or another spelling of something that is: for the caller it does not exist.
    NotFound,
}

pub(super) fn resolve<'a>(prices: &'a Prices, kind: Kind, key: &str) -> Target<'a> {
    if key.len() > MAX_TARGET {
        return Target::NotFound;
    }
    if let Some(item) = prices.exact(kind, key) {
        return Target::Priced(item);
    }
    if prices.is_free(kind, key) {
        return Target::Free;
    }
    let readings = Canonical::readings(kind, key);
    if readings.iter().any(|reading| prices.aliases().has(kind, reading)) {
        return Target::NotFound;
    }
    let by_template = |text: &str, generous: bool| {
        let fits = |item: &&Item| item.template.as_ref().is_some_and(|template| template.matches(text, generous));
        if kind == Kind::Resource { prices.templates().iter().find(fits) } else { None }
    };
    let exact = by_template(key, false);
    let mut generous = readings.iter().map(|reading| by_template(&reading.text(), true));
    // The first reading is this gate's own; the others, of servers that parse before they look.
    let first = generous.next().flatten();
    match (exact, first) {
        (Some(exact), Some(first)) if exact.key == first.key => {
            let elsewhere = generous.flatten().any(|item| item.key != exact.key);
            if elsewhere { Target::NotFound } else { Target::Priced(exact) }
        }
        (None, None) if prices.denies_unlisted(kind) || generous.any(|item| item.is_some()) => Target::NotFound,
        (None, None) => Target::Free,
        _ => Target::NotFound,
    }
}

/// The most generous reading of a name or URI: what no server tells apart from it is equal to it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Canonical {
    base: String,
    /// Behind the `?` of a URI; a fragment is dropped.
    query: Option<String>,
}

impl Canonical {
    pub(super) fn of(kind: Kind, key: &str) -> Canonical {
        let folded = fold(&decoded(key));
        match kind {
            Kind::Tool | Kind::Prompt => Canonical { base: folded.trim().to_owned(), query: None },
            Kind::Resource => uri(folded.trim()),
        }
    }

    /// All generous readings, each once. A server that makes a URL of a URI (WHATWG URL; `new URL(uri)` of the official
    /// TypeScript server, pydantic's `AnyUrl` of the Python one) takes `https:/host`, `https:host` and `https:///host` for
    /// `https://host`, a host in any width, script or number for one host, and does so before or after it decodes.
    pub(super) fn readings(kind: Kind, key: &str) -> Vec<Canonical> {
        let mut readings = vec![Canonical::of(kind, key)];
        if kind == Kind::Resource {
            let decoded = fold(&decoded(key));
            for text in [key, &decoded] {
                let Ok(url) = url::Url::parse(text) else { continue };
                let reading = Canonical::of(kind, url.as_str());
                if !readings.contains(&reading) {
                    readings.push(reading);
                }
            }
        }
        readings
    }

    pub(super) fn text(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.base),
            None => self.base.clone(),
        }
    }
}

/// The exact keys by their most generous reading.
#[derive(Debug, Clone, Default)]
pub(super) struct Aliases {
    known: BTreeMap<(Kind, String), Vec<Option<String>>>,
    collision: Option<(Kind, String)>,
}

impl Aliases {
    pub(super) fn new<'a>(keys: impl Iterator<Item = &'a (Kind, String)>) -> Aliases {
        let mut aliases = Aliases::default();
        for (kind, key) in keys {
            let readings = Canonical::readings(*kind, key);
            for Canonical { base, query } in &readings {
                let queries = aliases.known.entry((*kind, base.clone())).or_default();
                if queries.contains(query) {
                    aliases.collision = Some((*kind, key.clone()));
                }
            }
            for Canonical { base, query } in readings {
                aliases.known.entry((*kind, base)).or_default().push(query);
            }
        }
        aliases
    }

    /// Two priced keys that are one to a generous reader.
    pub(super) fn collision(&self) -> Option<(Kind, &str)> {
        self.collision.as_ref().map(|(kind, key)| (*kind, key.as_str()))
    }

    /// Whether it is another spelling of a priced key. A server may ignore a query, so a key without one covers every
    /// query.
    fn has(&self, kind: Kind, generous: &Canonical) -> bool {
        let queries = self.known.get(&(kind, generous.base.clone()));
        queries.is_some_and(|known| known.iter().any(|query| query.is_none() || *query == generous.query))
    }
}

/// Percent-decoded until nothing changes any more: some servers decode twice.
fn decoded(text: &str) -> String {
    let mut text = text.to_owned();
    for _ in 0..4 {
        let next = decode_once(&text);
        if next == text {
            break;
        }
        text = next;
    }
    text
}

fn decode_once(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = (bytes[i] == b'%').then(|| bytes.get(i + 1..i + 3)).flatten();
        match hex.and_then(|hex| std::str::from_utf8(hex).ok()).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 3;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// NFKC, no case, nothing that is not seen.
pub(super) fn fold(text: &str) -> String {
    if text.bytes().all(|b| b.is_ascii_graphic() || b == b' ') {
        return text.to_ascii_lowercase();
    }
    let nfkc = ComposingNormalizerBorrowed::new_nfkc();
    let folded = nfkc.normalize(&nfkc.normalize(text).to_lowercase()).into_owned();
    folded.chars().filter(|c| !unseen(*c)).collect()
}

/// Controls, soft hyphen, joiners, marks of direction, variation selectors, byte order mark, tags.
fn unseen(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}')
}

/// Scheme, authority without user and default port, path without empty and dot segments.
fn uri(folded: &str) -> Canonical {
    let text = folded.replace('\\', "/");
    let text = text.split('#').next().unwrap_or_default();
    let (text, query) = match text.split_once('?') {
        Some((text, query)) => (text, Some(query.to_owned())),
        None => (text, None),
    };
    let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
    let (authority, path) = match rest.strip_prefix("//") {
        Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
        None => ("", rest),
    };
    let host = authority.rsplit('@').next().unwrap_or_default();
    let host = match scheme {
        "https" => host.strip_suffix(":443").unwrap_or(host),
        "http" => host.strip_suffix(":80").unwrap_or(host),
        _ => host,
    };
    let host = host.trim_end_matches(['.', ':']);
    let host = if scheme == "file" && host == "localhost" { "" } else { host };
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        // `a.` and `a ` are `a` to a Windows file system; only dots are no name at all.
        match segment.trim_matches(' ') {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment.trim_end_matches(['.', ' '])),
        }
    }
    let path: String =
        segments.iter().filter(|segment| !segment.is_empty()).fold(String::new(), |path, s| path + "/" + s);
    Canonical { base: format!("{}://{host}{path}", scheme.trim()), query }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::prices::Unlisted;
    use super::super::prices::tests::{item, prices};
    use super::*;

    fn shop(unlisted: Unlisted) -> Prices {
        let items = vec![
            item(Kind::Tool, "search", 1),
            item(Kind::Prompt, "Brief", 1),
            item(Kind::Resource, "file:///data/secret.txt", 1),
            item(Kind::Resource, "https://x.example/doc?id=1", 1),
            item(Kind::Resource, "ws://feed.example/live", 1),
            item(Kind::Resource, "https://bücher.example/", 1),
            item(Kind::Resource, "http://127.0.0.1/admin", 1),
            item(Kind::Resource, "https://reports.example/{name}", 1),
            item(Kind::Resource, "docs://{id}", 1),
            item(Kind::Resource, "db:{table}", 1),
            item(Kind::Resource, "file:///reports/{name}", 1),
        ];
        prices(items, unlisted)
    }

    fn key<'a>(target: &Target<'a>) -> Option<&'a str> {
        match target {
            Target::Priced(item) => Some(&item.key),
            Target::Free => Some("free"),
            Target::NotFound => None,
        }
    }

    #[test]
    fn what_is_priced_is_found_by_its_exact_key() {
        let shop = shop(Unlisted::Free);
        for (kind, text, expected) in [
            (Kind::Tool, "search", Some("search")),
            (Kind::Tool, "ping", Some("free")),
            (Kind::Prompt, "search", Some("free")),
            (Kind::Prompt, "Brief", Some("Brief")),
            (Kind::Resource, "file:///data/secret.txt", Some("file:///data/secret.txt")),
            (Kind::Resource, "file:///data/open.txt", Some("free")),
            (Kind::Resource, "https://x.example/doc?id=1", Some("https://x.example/doc?id=1")),
            (Kind::Resource, "https://x.example/doc?id=2", Some("free")),
            (Kind::Resource, "https://bücher.example/", Some("https://bücher.example/")),
            (Kind::Resource, "https://bücher.example/other", Some("free")),
            (Kind::Resource, "https://reports.example/2026", Some("https://reports.example/{name}")),
            (Kind::Resource, "https://reports.example/a%20b.txt", Some("https://reports.example/{name}")),
            (Kind::Resource, "docs://readme", Some("docs://{id}")),
            (Kind::Resource, "db:users", Some("db:{table}")),
            (Kind::Resource, "file:///reports/2026.txt", Some("file:///reports/{name}")),
            (Kind::Resource, "file:///reports/%C3%A9%20x.txt", Some("file:///reports/{name}")),
        ] {
            assert_eq!(key(&shop.resolve(kind, text)), expected, "{text}");
        }
    }

    #[test]
    fn another_spelling_of_a_priced_key_goes_nowhere() {
        let shop = shop(Unlisted::Free);
        for name in
            ["Search", "SEARCH", " search", "search\t", "ｓearch", "se\u{200b}arch", "%73earch", "%2573earch", "ſearch"]
        {
            assert_eq!(key(&shop.resolve(Kind::Tool, name)), None, "{name:?}");
        }
        assert_eq!(key(&shop.resolve(Kind::Prompt, "brief")), None);
        for uri in [
            "file:///data/%73ecret.txt",
            "file:///data/%2573ecret.txt",
            "FILE:///data/secret.txt",
            "file:///data/SECRET.TXT",
            "file:///data/./secret.txt",
            "file:///data/x/../secret.txt",
            "file:///data/x/%2e%2e/secret.txt",
            "file:///data//secret.txt",
            "file:/data/secret.txt",
            "file://localhost/data/secret.txt",
            "file:///data\\secret.txt",
            "file:///data/secret.txt/",
            "file:///data/secret.txt.",
            "file:///data/secret.txt#part",
            "file:///data/secret.txt?x=1",
            "file:///data/secret.txt%3Fx",
            "file:///data/ſecret.txt",
            "file:///reports/../data/secret.txt",
            "https://x.example:443/doc?id=1",
            "https://u@x.example/doc?id=1",
            "https://X.example./doc?id=1",
            "https:/x.example/doc?id=1",
            "https:x.example/doc?id=1",
            "https:///x.example/doc?id=1",
            "https:\\\\x.example\\doc?id=1",
            "https://x.example:0443/doc?id=1",
            "https://x。example/doc?id=1",
            "https%3A/x.example/doc?id=1",
            "ht\ntps://x.example/do\tc?id=1",
            " https:/x.example/doc?id=1",
            "ws:/feed.example/live",
            "ws://feed.example:80/live",
            "https://xn--bcher-kva.example/",
            "http://2130706433/admin",
            "http://0x7f.1/admin",
            "http:127.1/admin",
        ] {
            assert_eq!(key(&shop.resolve(Kind::Resource, uri)), None, "{uri}");
        }
    }

    #[test]
    fn a_uri_that_leaves_or_enters_a_template_by_a_side_door_goes_nowhere() {
        let shop = shop(Unlisted::Free);
        for uri in [
            // Under the template as written, elsewhere as read.
            "file:///reports/..",
            "file:///reports/..%2Fdata%2Fopen.txt",
            // Elsewhere as written, under the template as read.
            "file:///REPORTS/2026.txt",
            "file:///open/../reports/2026.txt",
            "file:///report%73/2026.txt",
            "DB:users",
            "https:/reports.example/2026",
            "https:reports.example/2026",
            "https:///reports.example/2026",
            "https://reports.example:0443/2026",
            "https://reports。example/2026",
        ] {
            assert_eq!(key(&shop.resolve(Kind::Resource, uri)), None, "{uri}");
        }
    }

    #[test]
    fn what_is_listed_nowhere_is_free_or_does_not_exist() {
        let denied = shop(Unlisted::Deny);
        assert_eq!(key(&denied.resolve(Kind::Tool, "ping")), None);
        assert_eq!(key(&denied.resolve(Kind::Resource, "file:///open.txt")), None);
        let exempt = BTreeSet::from([Kind::Prompt]);
        let free = BTreeSet::from([(Kind::Tool, "ping".to_owned()), (Kind::Tool, "Search".to_owned())]);
        let shop = Prices::new(vec![item(Kind::Tool, "search", 1)], free, Unlisted::Deny, exempt).unwrap();
        assert_eq!(key(&shop.resolve(Kind::Tool, "ping")), Some("free"));
        assert_eq!(key(&shop.resolve(Kind::Tool, "Search")), Some("free"), "the operator says that it is another tool");
        assert_eq!(key(&shop.resolve(Kind::Tool, "other")), None);
        assert_eq!(key(&shop.resolve(Kind::Prompt, "any")), Some("free"));
        assert_eq!(key(&shop.resolve(Kind::Tool, &"x".repeat(MAX_TARGET + 1))), None);
    }

    proptest! {
        /// However a priced URI is written, what a generous server would read as it is never free.
        #[test]
        fn no_spelling_of_a_priced_uri_is_free(spell in prop::collection::vec(0u8..5, 23)) {
            let shop = shop(Unlisted::Free);
            let text: String = "file:///data/secret.txt".chars().zip(&spell).map(|(c, how)| match (how, c) {
                (1, c) => c.to_ascii_uppercase().to_string(),
                (2, c) if c.is_ascii_alphanumeric() => format!("%{:02x}", u32::from(c)),
                (3, '/') => "/./".to_owned(),
                (4, c) if c.is_ascii_alphabetic() => format!("{c}\u{200d}"),
                _ => c.to_string(),
            }).collect();
            // The first slashes are syntax: `file:/.///.//data` is another authority.
            let target = shop.resolve(Kind::Resource, &text);
            prop_assert!(!matches!(target, Target::Free) || spell[5..8].contains(&3), "{text}");
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in ".{0,80}") {
            for kind in Kind::ALL {
                let _ = shop(Unlisted::Free).resolve(kind, &text);
            }
        }
    }
}
