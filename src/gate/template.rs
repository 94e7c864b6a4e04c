//! URI templates (RFC 6570) as a set of URIs. Servers expand and match them by rules of their own; here a template
//! covers whatever any of them may take for it, since too much priced is seen at once, and too little is a free ride.

use super::Kind;
use super::target::Canonical;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    exact: Vec<Part>,
    /// The same for a URI in its most generous reading.
    generous: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    /// Any characters, none included; `slashes`: also `/`.
    Any {
        slashes: bool,
    },
    /// Nothing, or this character and then any characters.
    After {
        lead: char,
        slashes: bool,
    },
}

const MAX_PARTS: usize = 64;
/// The first of the private-use characters that stand for the variables while a template is folded.
const PLACE: u32 = 0xE000;

impl Template {
    /// The sentence says what is wrong.
    pub fn parse(text: &str) -> Result<Template, String> {
        let mut parts = Vec::new();
        let mut places = String::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (literal, after) = match rest.split_once('{') {
                Some((literal, after)) => (literal, Some(after)),
                None => (rest, None),
            };
            if literal.contains('}') {
                return Err("has a } without its {".into());
            }
            if literal.contains('#') || literal.chars().any(|c| ('\u{E000}'..='\u{F8FF}').contains(&c)) {
                return Err("has a fragment or a private-use character".into());
            }
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
                places.push_str(literal);
            }
            let Some(after) = after else { break };
            let Some((expression, behind)) = after.split_once('}') else {
                return Err("has a { without its }".into());
            };
            parts.push(Part::of(expression)?);
            places.push(place(parts.len())?);
            rest = behind;
        }
        match parts.first() {
            Some(Part::Literal(start)) if start.contains(':') => {}
            _ => return Err("must begin with a scheme and a colon".into()),
        }
        if text.split(['/', '\\']).any(|segment| matches!(segment, "." | "..")) {
            return Err("has a dot segment".into());
        }
        let folded = Canonical::of(Kind::Resource, &places).text();
        let mut generous: Vec<Part> = Vec::new();
        let mut literal = String::new();
        for c in folded.chars() {
            match (u32::from(c)).checked_sub(PLACE).and_then(|index| parts.get(index as usize)) {
                Some(part) => {
                    if !literal.is_empty() {
                        generous.push(Part::Literal(std::mem::take(&mut literal)));
                    }
                    generous.push(part.clone());
                }
                None => literal.push(c),
            }
        }
        if !literal.is_empty() {
            generous.push(Part::Literal(literal));
        }
        let variables = |parts: &[Part]| parts.iter().filter(|part| !matches!(part, Part::Literal(_))).count();
        if variables(&generous) != variables(&parts) {
            return Err("has a variable where a server may not see it".into());
        }
        Ok(Template { exact: parts, generous })
    }

    /// How much of it is fixed: the more, the more specific.
    pub fn literal_len(&self) -> usize {
        let len = |part: &Part| if let Part::Literal(text) = part { text.len() } else { 0 };
        self.exact.iter().map(len).sum()
    }

    /// Whether it covers `text`, which is a URI as written, or in its most generous reading.
    pub fn matches(&self, text: &str, generous: bool) -> bool {
        let parts = if generous { &self.generous } else { &self.exact };
        let bytes = text.as_bytes();
        // The places of `text` that the parts so far may have reached: linear in the text for each part.
        let mut reached = vec![false; bytes.len() + 1];
        reached[0] = true;
        for part in parts {
            let mut next = vec![false; bytes.len() + 1];
            match part {
                Part::Literal(literal) => {
                    for (at, _) in reached.iter().enumerate().filter(|(_, here)| **here) {
                        if bytes[at..].starts_with(literal.as_bytes()) {
                            next[at + literal.len()] = true;
                        }
                    }
                }
                Part::Any { slashes } => run(bytes, &reached, &mut next, *slashes),
                Part::After { lead, slashes } => {
                    let lead = *lead as u8;
                    let mut begun = vec![false; bytes.len() + 1];
                    for at in (0..bytes.len()).filter(|at| reached[*at] && bytes[*at] == lead) {
                        begun[at + 1] = true;
                    }
                    run(bytes, &begun, &mut next, *slashes);
                    for (next, here) in next.iter_mut().zip(&reached) {
                        *next |= *here;
                    }
                }
            }
            reached = next;
        }
        reached.last().copied().unwrap_or(false)
    }
}

fn run(bytes: &[u8], from: &[bool], to: &mut [bool], slashes: bool) {
    let mut running = false;
    for at in 0..=bytes.len() {
        running |= from[at];
        to[at] |= running;
        if bytes.get(at).is_some_and(|byte| *byte == b'/' && !slashes) {
            running = false;
        }
    }
}

fn place(parts: usize) -> Result<char, String> {
    if parts > MAX_PARTS {
        return Err(format!("has more than {MAX_PARTS} parts"));
    }
    let index = u32::try_from(parts - 1).unwrap_or(0);
    char::from_u32(PLACE + index).ok_or_else(|| "has too many parts".into())
}

impl Part {
    fn of(expression: &str) -> Result<Part, String> {
        let refused = || Err(format!("has the expression {{{}}}", expression.chars().take(40).collect::<String>()));
        let (operator, names) = match expression.chars().next() {
            Some(c @ ('+' | '#' | '.' | '/' | ';' | '?' | '&')) => (Some(c), &expression[1..]),
            Some(_) => (None, expression),
            None => return refused(),
        };
        let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '%' | ':' | '*');
        if names.split(',').any(|name| name.is_empty() || !name.chars().all(word)) {
            return refused();
        }
        let slashes = names.contains('*');
        Ok(match operator {
            None => Part::Any { slashes },
            Some('+') => Part::Any { slashes: true },
            Some('/') => Part::After { lead: '/', slashes: slashes || names.contains(',') },
            Some(lead @ ('.' | ';')) => Part::After { lead, slashes },
            Some(lead) => Part::After { lead, slashes: true },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_what_a_server_may_take_for_it() {
        for (template, yes, no) in [
            (
                "a://x/{n}",
                &["a://x/1", "a://x/", "a://x/a?b=c", "a://x/%2F"][..],
                &["a://x/1/2", "a://y/1", "a://x"][..],
            ),
            ("a://x/{+n}", &["a://x/1/2"], &["a://y/1"]),
            ("a://x/{n*}", &["a://x/1/2"], &["a://y/1"]),
            ("a://x{/n}", &["a://x", "a://x/1"], &["a://x/1/2", "a://xy"]),
            ("a://x{/n,m}", &["a://x/1/2"], &["a://xy"]),
            ("a://x{?q,r}", &["a://x", "a://x?q=1/2&r=3"], &["a://xq=1"]),
            ("a://x?f=1{&q}", &["a://x?f=1", "a://x?f=1&q=2"], &["a://x?f=2"]),
            ("a://{h}/b/{t}.txt", &["a://q/b/c.txt", "a://q/b/.txt.txt"], &["a://q/b/c.pdf", "a://q/c/d.txt"]),
            ("a://x{.f}", &["a://x.json", "a://x"], &["a://x.a/b"]),
        ] {
            let parsed = Template::parse(template).unwrap();
            for uri in yes {
                assert!(parsed.matches(uri, false), "{template} {uri}");
            }
            for uri in no {
                assert!(!parsed.matches(uri, false), "{template} {uri}");
            }
        }
    }

    #[test]
    fn what_is_no_template_is_refused() {
        for bad in [
            "{x}",
            "x/{y}",
            "a://{",
            "a://}",
            "a://{}",
            "a://{x y}",
            "a://{x,}",
            "a://x/../{y}",
            "a://x#{y}",
            "a://x/{=y}",
        ] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
        assert!(Template::parse(&format!("a://{}", "{x}".repeat(100))).is_err());
    }

    #[test]
    fn a_hostile_uri_costs_no_more_than_its_length() {
        let template = Template::parse(&format!("a://{}", "{+x}a".repeat(30))).unwrap();
        assert!(!template.matches(&format!("a://{}b", "a".repeat(8_000)), false));
    }
}
