//! A server on a real socket that does exactly what a test says, and a network with names of its own.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine")]

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::ports::{BoxIo, Net, World};

/// One request as it came over the wire.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Request line and headers.
    pub head: String,
    pub body: String,
}
impl Request {
    pub fn line(&self) -> &str {
        self.head.lines().next().unwrap_or_default()
    }
    pub fn header(&self, name: &str) -> Option<String> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    }
}

/// Serves each request of each connection by `handler`, which says whether the connection stays open.
pub(crate) async fn serve<F, Fut>(handler: F) -> SocketAddr
where
    F: Fn(Request, Arc<tokio::sync::Mutex<BoxIo>>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = bool> + Send,
{
    serve_over(|io| Box::pin(async move { Some(Box::new(io) as BoxIo) }), handler).await
}

pub(crate) async fn serve_over<A, F, Fut>(accept: A, handler: F) -> SocketAddr
where
    A: Fn(tokio::net::TcpStream) -> BoxFuture<'static, Option<BoxIo>> + Send + Sync + 'static,
    F: Fn(Request, Arc<tokio::sync::Mutex<BoxIo>>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = bool> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (accept, handler) = (Arc::new(accept), Arc::new(handler));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (accept, handler) = (accept.clone(), handler.clone());
            tokio::spawn(async move {
                let Some(io) = accept(stream).await else { return };
                let io = Arc::new(tokio::sync::Mutex::new(io));
                loop {
                    let request = read(&mut *io.lock().await).await;
                    let Some(request) = request else { return };
                    if !handler(request, io.clone()).await {
                        return;
                    }
                }
            });
        }
    });
    address
}

async fn read(io: &mut BoxIo) -> Option<Request> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
        if io.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut request = Request { head, body: String::new() };
    let length = request.header("content-length").and_then(|v| v.parse().ok()).unwrap_or(0);
    while bytes.len() < end + length {
        if io.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    request.body = String::from_utf8_lossy(&bytes[end..]).into_owned();
    Some(request)
}

pub(crate) async fn write(io: &tokio::sync::Mutex<BoxIo>, bytes: impl AsRef<[u8]>) -> bool {
    let mut io = io.lock().await;
    io.write_all(bytes.as_ref()).await.is_ok() && io.flush().await.is_ok()
}

/// A whole answer.
pub(crate) fn answer(status: u16, headers: &[(&str, &str)], body: &str) -> String {
    let headers: String = headers.iter().map(|(k, v)| format!("{k}: {v}\r\n")).collect();
    format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

/// The machine's network with names of its own. Each lookup takes the next list of the name; the last one stays.
/// A public address is dialled at `public`.
pub(crate) struct TestNet {
    real: World,
    names: Mutex<BTreeMap<String, Vec<Vec<IpAddr>>>>,
    public: Option<SocketAddr>,
    pub lookups: Mutex<Vec<String>>,
    pub dialled: Mutex<Vec<SocketAddr>>,
}
impl TestNet {
    pub fn world(names: &[(&str, &[&[&str]])], public: Option<SocketAddr>) -> (World, Arc<TestNet>) {
        let parse = |list: &&[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect();
        let names = names.iter().map(|(n, lists)| ((*n).to_owned(), lists.iter().map(parse).collect())).collect();
        let (real, _) = crate::ports::machine::world();
        let (names, lookups, dialled) = (Mutex::new(names), Mutex::default(), Mutex::default());
        let net = Arc::new(TestNet { real: real.clone(), names, public, lookups, dialled });
        (World { net: net.clone(), ..real }, net)
    }
}
impl Net for TestNet {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.lookups.lock().unwrap().push(host.to_owned());
        let mut names = self.names.lock().unwrap();
        let found = names.get_mut(host).map(|lists| if lists.len() > 1 { lists.remove(0) } else { lists[0].clone() });
        Box::pin(async move { found.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<BoxIo>> {
        self.dialled.lock().unwrap().push(address);
        let loopback = address.ip().is_loopback();
        self.real.net.connect(if loopback { address } else { self.public.unwrap_or(address) })
    }
}
