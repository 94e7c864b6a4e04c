//! HTTP/1.1 by hand on one TCP connection: what a library would repair, hide or retry is seen as it is.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// No step (a connection, a head, a body) takes longer when all is well.
pub const PATIENCE: Duration = Duration::from_secs(20);
const MAX_LINE: u64 = 64 * 1024;
const MAX_BODY: usize = 4 << 20;

/// Says what was seen instead of an answer.
pub type Seen<T> = Result<T, String>;

pub struct Wire {
    stream: BufReader<TcpStream>,
    /// Of a chunk that was given back: a proxy may join what a server sent in two.
    back: String,
}

#[derive(Debug)]
pub struct Head {
    pub status: u16,
    headers: Vec<(String, String)>,
}

impl Head {
    #[cfg(test)]
    pub fn new(status: u16, headers: &[(&str, &str)]) -> Head {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Head { status, headers }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    fn is_chunked(&self) -> bool {
        self.header("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"))
    }
}

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    pub head: Head,
    pub body: String,
}

impl Reply {
    /// For a report.
    pub fn shown(&self) -> String {
        format!("HTTP {} {}", self.head.status, self.body.chars().take(300).collect::<String>())
    }
}

async fn in_time<T>(what: &str, step: impl Future<Output = std::io::Result<T>>) -> Seen<T> {
    match timeout(PATIENCE, step).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(format!("{what}: {error}")),
        Err(_) => Err(format!("{what}: nothing for {} s", PATIENCE.as_secs())),
    }
}

impl Wire {
    /// To a port of this machine.
    pub async fn to(port: u16) -> Seen<Wire> {
        let stream = in_time("connecting", TcpStream::connect(("127.0.0.1", port))).await?;
        let _ = stream.set_nodelay(true);
        Ok(Wire { stream: BufReader::new(stream), back: String::new() })
    }

    /// Sends the request with these headers, `Host` and a length added, and reads the answer's head.
    pub async fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Seen<Head> {
        match timeout(PATIENCE, self.asked(method, path, headers, body)).await {
            Ok(head) => head,
            Err(_) => Err(format!("the answer: nothing for {} s", PATIENCE.as_secs())),
        }
    }

    async fn asked(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Seen<Head> {
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("\r\n");
        text.push_str(body);
        in_time("sending", self.stream.write_all(text.as_bytes())).await?;
        let start = self.line("the answer").await?;
        let status = start.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| format!("the answer: no status in {start:?}"))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line("the answer's headers").await?;
            match line.split_once(':') {
                Some((name, value)) => headers.push((name.trim().to_owned(), value.trim().to_owned())),
                None if line.is_empty() => return Ok(Head { status, headers }),
                None => return Err(format!("the answer's headers: {line:?}")),
            }
        }
    }

    /// The rest of an answer that is no stream.
    pub async fn rest(&mut self, head: Head) -> Seen<Reply> {
        let mut body = Vec::new();
        if head.is_chunked() {
            while let Some(chunk) = self.chunk(PATIENCE).await? {
                body.extend_from_slice(chunk.as_bytes());
                if body.len() > MAX_BODY {
                    return Err("the body: it does not end".into());
                }
            }
        } else if head.status != 204 {
            let length = head.header("content-length").and_then(|value| value.parse().ok());
            let length: usize = length.ok_or_else(|| format!("the body: no length in {head:?}"))?;
            body.resize(length.min(MAX_BODY), 0);
            in_time("the body", self.stream.read_exact(&mut body)).await?;
        }
        let body = String::from_utf8(body).map_err(|_| "the body: no UTF-8".to_owned())?;
        Ok(Reply { head, body })
    }

    /// The next chunk of a stream up to its first blank line, which ends an event; the rest of it comes next.
    pub async fn first(&mut self) -> Seen<Option<String>> {
        let chunk = self.chunk(PATIENCE).await?;
        Ok(chunk.map(|mut chunk| {
            if let Some(end) = chunk.find("\n\n") {
                self.back = chunk.split_off(end + 2);
            }
            chunk
        }))
    }

    /// The next chunk of a stream; `None` at its proper end. A stream that breaks off is an error.
    pub async fn chunk(&mut self, within: Duration) -> Seen<Option<String>> {
        if !self.back.is_empty() {
            return Ok(Some(std::mem::take(&mut self.back)));
        }
        let read = async {
            let size = self.line("a chunk").await?;
            let size = usize::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16);
            let size = size.ok().filter(|size| *size <= MAX_BODY).ok_or("a chunk: no size")?;
            let mut chunk = vec![0; size + 2];
            in_time("a chunk", self.stream.read_exact(&mut chunk)).await?;
            chunk.truncate(size);
            String::from_utf8(chunk).map_err(|_| "a chunk: no UTF-8".to_owned())
        };
        match timeout(within, read).await {
            Ok(chunk) => chunk.map(|chunk| Some(chunk).filter(|chunk| !chunk.is_empty())),
            Err(_) => Err(format!("a chunk: nothing for {} s", within.as_secs())),
        }
    }

    async fn line(&mut self, what: &str) -> Seen<String> {
        let mut line = String::new();
        let mut limited = (&mut self.stream).take(MAX_LINE);
        // Between two events of a stream nothing may come for long: the caller has the clock.
        let read = limited.read_line(&mut line).await.map_err(|error| format!("{what}: {error}"))?;
        if read == 0 {
            return Err(format!("{what}: the connection was closed"));
        }
        match line.strip_suffix("\r\n") {
            Some(whole) => Ok(whole.to_owned()),
            None => Err(format!("{what}: it breaks off")),
        }
    }
}

/// One request on a connection of its own.
pub async fn once(port: u16, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Seen<Reply> {
    let mut all = headers.to_vec();
    all.push(("Connection", "close"));
    let asked = async {
        let mut wire = Wire::to(port).await?;
        let head = wire.ask(method, path, &all, body).await?;
        wire.rest(head).await
    };
    match timeout(PATIENCE, asked).await {
        Ok(reply) => reply,
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}
