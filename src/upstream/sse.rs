//! Server-sent events (WHATWG HTML, section 9.2.6), read as the bytes arrive.

/// One event with data. `id` and `retry` mean nothing here: no stream is resumed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// `message` where the stream names none.
    pub name: String,
    pub data: Vec<u8>,
}

/// The whole of a stream is bounded by whoever reads it, and so is one event.
#[derive(Default)]
pub(super) struct Parser {
    line: Vec<u8>,
    name: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    /// The last byte was `\r`: a `\n` behind it belongs to the same line end.
    after_cr: bool,
    begun: bool,
}

impl Parser {
    pub fn push(&mut self, bytes: &[u8], events: &mut Vec<Event>) {
        for &byte in bytes {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => events.extend(self.end_of_line()),
                _ => self.line.push(byte),
            }
        }
    }

    fn end_of_line(&mut self) -> Option<Event> {
        let line = std::mem::take(&mut self.line);
        let line = match line.strip_prefix(b"\xef\xbb\xbf") {
            Some(rest) if !self.begun => rest,
            _ => &line[..],
        };
        self.begun = true;
        if line.is_empty() {
            let name = std::mem::take(&mut self.name);
            let data = std::mem::take(&mut self.data);
            let name = if name.is_empty() { "message".into() } else { String::from_utf8_lossy(&name).into_owned() };
            return std::mem::take(&mut self.has_data).then_some(Event { name, data });
        }
        let (field, value) = match line.iter().position(|b| *b == b':') {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &line[line.len()..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"event" => self.name = value.to_vec(),
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.has_data = true;
                self.data.extend_from_slice(value);
            }
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let text = b"\xef\xbb\xbf: comment\r\nevent: endpoint\ndata: /m?x=1\n\nid: 7\rdata: {\"a\":\rdata:1}\r\r\n\
            event: empty\n\nretry: 5\ndata\n\ndata: no end";
        let whole = |size: usize| {
            let mut parser = Parser::default();
            let mut events = Vec::new();
            text.chunks(size).for_each(|piece| parser.push(piece, &mut events));
            events
        };
        let expected = [("endpoint", "/m?x=1"), ("message", "{\"a\":\n1}"), ("message", "")];
        for size in 1..text.len() {
            let found = whole(size);
            let found: Vec<_> =
                found.iter().map(|e| (e.name.as_str(), std::str::from_utf8(&e.data).unwrap())).collect();
            assert_eq!(found, expected, "in pieces of {size}");
        }
    }
}
