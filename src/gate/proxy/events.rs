//! Server-sent events as they pass: the bytes stay, but for an event's `id`, which is bound to the session on its way out;
//! and events one by one, where one has to be looked at.

use bytes::{BufMut as _, Bytes, BytesMut};

/// An event's id that is longer is left out, bytes.
const MAX_EVENT_ID: usize = 1_024;

/// Rewrites `id` lines and lets everything else through as it comes.
#[derive(Default)]
pub struct Ids {
    at: At,
}

#[derive(Default)]
enum At {
    /// The beginning of a line, of which this much was held back: it may become an `id` line.
    #[default]
    Start0,
    Held(Vec<u8>),
    /// Inside of any other line.
    Line,
}

impl Ids {
    /// `tag` makes the id that the client is given of the upstream's.
    pub fn pass(&mut self, bytes: Bytes, tag: impl Fn(&str) -> String) -> Bytes {
        // Most pieces begin at a line's beginning and have no id in them.
        if matches!(self.at, At::Start0 | At::Line) && !has_id(&bytes, matches!(self.at, At::Start0)) {
            self.at = match bytes.last() {
                None => return bytes,
                Some(b'\n' | b'\r') => At::Start0,
                Some(_) => At::Line,
            };
            return bytes;
        }
        let mut out = BytesMut::with_capacity(bytes.len() + 64);
        for &byte in &bytes {
            self.one(byte, &mut out, &tag);
        }
        out.freeze()
    }

    fn one(&mut self, byte: u8, out: &mut BytesMut, tag: &impl Fn(&str) -> String) {
        let end = matches!(byte, b'\n' | b'\r');
        match &mut self.at {
            At::Line => {
                out.put_u8(byte);
                if end {
                    self.at = At::Start0;
                }
            }
            At::Start0 if end => out.put_u8(byte),
            At::Start0 if byte == b'i' => self.at = At::Held(vec![byte]),
            At::Start0 => {
                out.put_u8(byte);
                self.at = At::Line;
            }
            At::Held(line) if end => {
                if let Some(id) = id_of(line) {
                    out.put_slice(b"id: ");
                    out.put_slice(tag(&id).as_bytes());
                } else if !line.starts_with(b"id:") && line != b"id" {
                    out.put_slice(line);
                }
                out.put_u8(byte);
                self.at = At::Start0;
            }
            At::Held(line) => {
                if line.len() <= MAX_EVENT_ID + 8 {
                    line.push(byte);
                }
                if !b"id:".starts_with(&line[..line.len().min(3)]) {
                    out.put_slice(line);
                    self.at = At::Line;
                }
            }
        }
    }
}

/// Whether some line in it may be an `id` line, or begins at its end.
fn has_id(bytes: &[u8], at_start: bool) -> bool {
    let begins = |rest: &[u8]| rest.first() == Some(&b'i') && rest.get(1).is_none_or(|b| *b == b'd');
    (at_start && begins(bytes))
        || bytes.iter().enumerate().any(|(i, b)| matches!(b, b'\n' | b'\r') && bytes.get(i + 1..).is_some_and(begins))
}

/// The id of an `id: …` line; `None` for one that cannot be given out.
fn id_of(line: &[u8]) -> Option<String> {
    let value = line.strip_prefix(b"id:")?;
    let value = value.strip_prefix(b" ").unwrap_or(value);
    let text = std::str::from_utf8(value).ok()?;
    // An empty id is how a server says that there is none to resume from.
    (!text.is_empty() && text.len() <= MAX_EVENT_ID && !text.contains('\0')).then(|| text.to_owned())
}

/// One event, as it was written.
#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// All its lines with the empty line at its end.
    pub raw: Bytes,
    /// Its data, lines joined by `\n`; `None` for comments and events without data.
    pub data: Option<Vec<u8>>,
}

impl Event {
    /// The same event with this text as its data; id and name stay.
    pub fn with_data(&self, text: &str) -> Bytes {
        let mut out = BytesMut::with_capacity(text.len() + 64);
        let other = |line: &&[u8]| !line.is_empty() && !line.starts_with(b"data:") && *line != b"data";
        for line in self.raw.split(|b| matches!(b, b'\n' | b'\r')).filter(other) {
            out.put_slice(line);
            out.put_u8(b'\n');
        }
        out.put_slice(b"data: ");
        out.put_slice(text.as_bytes());
        out.put_slice(b"\n\n");
        out.freeze()
    }
}

/// Cuts a stream into its events.
pub struct Events {
    buffer: BytesMut,
    /// Up to here nothing ends an event.
    seen: usize,
    limit: usize,
}

/// An event is larger than it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLarge;

impl Events {
    pub fn new(limit: usize) -> Events {
        Events { buffer: BytesMut::new(), seen: 0, limit }
    }

    pub fn push(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<(), TooLarge> {
        self.buffer.put_slice(bytes);
        while let Some(end) = self.end() {
            let raw = self.buffer.split_to(end).freeze();
            self.seen = 0;
            events.push(Event { data: data(&raw), raw });
        }
        if self.buffer.len() > self.limit { Err(TooLarge) } else { Ok(()) }
    }

    /// What is left when the stream ends without an empty line.
    pub fn rest(self) -> Bytes {
        self.buffer.freeze()
    }

    /// Behind the first empty line.
    fn end(&mut self) -> Option<usize> {
        let bytes = &self.buffer[..];
        let mut i = self.seen;
        while i < bytes.len() {
            let line_end = match bytes[i] {
                b'\n' => 1,
                // Whether a `\n` belongs to it is known once there is more.
                b'\r' if i + 1 == bytes.len() => break,
                b'\r' if bytes[i + 1] == b'\n' => 2,
                b'\r' => 1,
                _ => {
                    i += 1;
                    continue;
                }
            };
            let empty = i == 0 || matches!(bytes[i - 1], b'\n' | b'\r');
            i += line_end;
            if empty {
                return Some(i);
            }
        }
        self.seen = i;
        None
    }
}

fn data(raw: &[u8]) -> Option<Vec<u8>> {
    let mut data: Option<Vec<u8>> = None;
    // An empty line in the middle of `\r\n` is skipped like every line that is no data.
    for line in raw.split(|b| matches!(b, b'\n' | b'\r')) {
        let value = match line.strip_prefix(b"data") {
            Some(b"") => &b""[..],
            Some(rest) => match rest.strip_prefix(b":") {
                Some(value) => value.strip_prefix(b" ").unwrap_or(value),
                None => continue,
            },
            None => continue,
        };
        match &mut data {
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => data = Some(value.to_vec()),
        }
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "\u{feff}: hi\n\nid: 1\nevent: message\ndata: {\"id\":\ndata: 2}\n\nidle\nid\nid:\nid:x\ndata:a\n\n\
        : c\r\n\r\nid: \u{e9}\r\ndata: z\r\n\r\nretry: 5\rdata\r\rdata: no end\ni";

    #[test]
    fn only_ids_change_however_the_bytes_are_cut() {
        let expected = STREAM
            .replace("id: 1\n", "id: <1>\n")
            .replace("id\nid:\nid:x\n", "\n\nid: <x>\n")
            .replace("id: \u{e9}\r", "id: <\u{e9}>\r");
        // What is held back at the end of a stream may still become an id.
        let expected = expected.trim_end_matches('i');
        for size in 1..STREAM.len() {
            let mut ids = Ids::default();
            let mut out = Vec::new();
            for piece in STREAM.as_bytes().chunks(size) {
                out.extend_from_slice(&ids.pass(Bytes::copy_from_slice(piece), |id| format!("<{id}>")));
            }
            assert_eq!(String::from_utf8(out).unwrap(), expected, "in pieces of {size}");
        }
    }

    #[test]
    fn an_endless_id_takes_no_memory_and_goes_nowhere() {
        let mut ids = Ids::default();
        let mut out = Vec::new();
        out.extend_from_slice(&ids.pass(Bytes::from_static(b"id:"), str::to_owned));
        for _ in 0..100 {
            out.extend_from_slice(&ids.pass(Bytes::from(vec![b'x'; 1_000]), str::to_owned));
        }
        out.extend_from_slice(&ids.pass(Bytes::from_static(b"\ndata: a\n\n"), str::to_owned));
        assert_eq!(out, b"\ndata: a\n\n");
    }

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let text =
            b": c\n\nid: 7\ndata: {\"a\":\ndata:1}\n\nevent: e\r\ndata: x\r\n\r\nretry: 5\n\ndata\r\rdata: no end";
        for size in 1..text.len() {
            let (mut events, mut found) = (Events::new(1_000), Vec::new());
            text.chunks(size).for_each(|piece| events.push(piece, &mut found).unwrap());
            let data: Vec<Option<&str>> =
                found.iter().map(|e| e.data.as_deref().map(|d| std::str::from_utf8(d).unwrap())).collect();
            assert_eq!(data, [None, Some("{\"a\":\n1}"), Some("x"), None, Some("")], "in pieces of {size}");
            let mut whole: Vec<u8> = found.iter().flat_map(|e| e.raw.to_vec()).collect();
            whole.extend_from_slice(&events.rest());
            assert_eq!(whole, text);
            assert_eq!(&found[1].with_data("{}")[..], b"id: 7\ndata: {}\n\n");
            assert_eq!(&found[2].with_data("y")[..], b"event: e\ndata: y\n\n");
        }
        assert_eq!(Events::new(10).push(&[b'x'; 11], &mut Vec::new()), Err(TooLarge));
    }
}
