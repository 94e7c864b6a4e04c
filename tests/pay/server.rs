//! A small HTTP server whose every answer is a script's: it can be slow, cut the line, or send bytes that are no HTTP.
#![allow(clippy::disallowed_methods, reason = "a server of the outside world, not business code")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub head: String,
    pub body: String,
}

impl Request {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or(serde_json::Value::Null)
    }
}

#[derive(Debug, Clone)]
pub enum Reply {
    /// Status, extra header lines (each with its line end), body.
    Http(u16, String, String),
    /// The connection is closed without a byte.
    Cut,
    /// No answer; the connection stays open.
    Hang,
    /// These bytes and nothing else; then the connection is closed.
    Raw(String),
    /// The answer after a while.
    Later(std::time::Duration, Box<Reply>),
    /// The answer once somebody gives the word.
    When(Arc<tokio::sync::Notify>, Box<Reply>),
}

impl Reply {
    pub fn json(body: impl Into<String>) -> Reply {
        Reply::Http(200, "content-type: application/json\r\n".into(), body.into())
    }
    pub fn status(status: u16, body: &str) -> Reply {
        Reply::Http(status, "content-type: application/json\r\n".into(), body.into())
    }
}

pub type Script = Arc<dyn Fn(&Request) -> Reply + Send + Sync>;

pub struct Server {
    pub address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub async fn start(script: Script) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(connection(stream, script.clone(), seen.clone()));
            }
        });
        Server { address, requests, task }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connection(mut stream: TcpStream, script: Script, seen: Arc<Mutex<Vec<Request>>>) {
    let mut buffer = Vec::new();
    loop {
        let Some(request) = read(&mut stream, &mut buffer).await else { return };
        seen.lock().unwrap().push(request.clone());
        let mut reply = script(&request);
        loop {
            reply = match reply {
                Reply::Later(wait, answer) => {
                    tokio::time::sleep(wait).await;
                    *answer
                }
                Reply::When(word, answer) => {
                    word.notified().await;
                    *answer
                }
                _ => break,
            }
        }
        match reply {
            Reply::Later(..) | Reply::When(..) | Reply::Cut => return,
            Reply::Hang => {
                // Until the client gives up and closes.
                let mut byte = [0];
                let _ = stream.read(&mut byte).await;
                return;
            }
            Reply::Raw(text) => {
                let _ = stream.write_all(text.as_bytes()).await;
                return;
            }
            Reply::Http(status, headers, body) => {
                let text =
                    format!("HTTP/1.1 {status} Scripted\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
                if stream.write_all(text.as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn read(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Request> {
    loop {
        if let Some(end) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:").map(|n| n.trim().to_owned()))
                .map_or(0, |n| n.parse::<usize>().unwrap());
            if buffer.len() >= end + 4 + length {
                let body = String::from_utf8_lossy(&buffer[end + 4..end + 4 + length]).into_owned();
                buffer.drain(..end + 4 + length);
                let mut first = head.lines().next().unwrap_or_default().split(' ');
                let method = first.next().unwrap_or_default().to_owned();
                let path = first.next().unwrap_or_default().to_owned();
                return Some(Request { method, path, head, body });
            }
        }
        let mut chunk = [0; 8192];
        let n = stream.read(&mut chunk).await.ok()?;
        if n == 0 {
            return None;
        }
        buffer.extend_from_slice(&chunk[..n]);
    }
}
