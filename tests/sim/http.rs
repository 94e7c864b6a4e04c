//! A small HTTP/1.1 server for the parties of the world; the client is the real one.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::net::Stream;
use super::world::Ctx;

pub struct Request {
    pub target: String,
    pub session: Option<String>,
    pub body: Vec<u8>,
}

pub enum Reply {
    Json(String),
    /// With an `Mcp-Session-Id`.
    Session(String, String),
    Status(u16, String),
    /// The connection stays open and nothing ever comes.
    Silence,
    Close,
}

pub async fn serve<F>(ctx: Ctx, handler: impl Fn(Request) -> F + Send + Sync + 'static)
where
    F: Future<Output = Reply> + Send + 'static,
{
    let (mut listener, handler) = (ctx.listen(), Arc::new(handler));
    while let Some(stream) = listener.0.recv().await {
        let handler = handler.clone();
        ctx.spawn(async move {
            let _ = connection(stream, &*handler).await;
        });
    }
}

async fn connection<F>(mut stream: Stream, handler: &(impl Fn(Request) -> F + Send + Sync)) -> std::io::Result<()>
where
    F: Future<Output = Reply> + Send + 'static,
{
    let mut buffer = Vec::new();
    loop {
        let end = loop {
            if let Some(at) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
        let header = |name: &str| {
            head.lines().find_map(|line| {
                let (found, value) = line.split_once(':')?;
                found.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
            })
        };
        let length = header("content-length").and_then(|n| n.parse().ok()).unwrap_or(0usize);
        while buffer.len() < end + length {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        let body = buffer[end..end + length].to_vec();
        buffer.drain(..end + length);
        let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let (status, session, body) = match handler(Request { target, session: header("mcp-session-id"), body }).await {
            Reply::Json(body) => (200, None, body),
            Reply::Session(session, body) => (200, Some(session), body),
            Reply::Status(status, body) => (status, None, body),
            Reply::Silence => std::future::pending().await,
            Reply::Close => return Ok(()),
        };
        let session = session.map(|id| format!("mcp-session-id: {id}\r\n")).unwrap_or_default();
        let answer = format!(
            "HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\n{session}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await?;
    }
}
