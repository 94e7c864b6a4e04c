//! From a request's URL to an open connection: the one place where a name becomes an address, and where that address
//! is checked and dialled. Nothing looks the name up again in between.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::time::{Instant, timeout, timeout_at};

use super::{Destination, HttpError, Tls, address_allowed};
use crate::ports::{BoxIo, World};

/// One address may take this long while others are left to try.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(4);
/// The whole way to an open connection, within the request's own limit.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Names with more addresses than this have the rest ignored (all are checked).
const MAX_DIALLED: usize = 4;
const MAX_HEADERS: usize = 128;
const MAX_HEAD_BYTES: usize = 64 << 10;

pub(super) type Sender = SendRequest<Full<Bytes>>;

/// Scheme, host and port: what a kept connection may be used for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin {
    pub https: bool,
    /// As the URL standard spells it: lower case, IDNA applied, any spelling of an IPv4 address in dotted form, IPv6
    /// without brackets.
    pub host: String,
    pub ip: Option<IpAddr>,
    pub port: u16,
}

impl Origin {
    /// Reads the origin from a request's absolute URL and applies the rules that need no address.
    pub fn of(uri: &http::Uri, destination: Destination) -> Result<Origin, HttpError> {
        let url = url::Url::parse(&uri.to_string()).map_err(|_| HttpError::Refused("url"))?;
        let https = match url.scheme() {
            "https" => true,
            "http" => false,
            _ => return Err(HttpError::Refused("scheme")),
        };
        if !https && destination == Destination::Agent {
            return Err(HttpError::Refused("not_https"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(HttpError::Refused("url_credentials"));
        }
        let (host, ip) = match url.host() {
            Some(url::Host::Domain(name)) => (name.to_owned(), None),
            Some(url::Host::Ipv4(ip)) => (ip.to_string(), Some(IpAddr::V4(ip))),
            Some(url::Host::Ipv6(ip)) => (ip.to_string(), Some(IpAddr::V6(ip))),
            None => return Err(HttpError::Refused("url")),
        };
        if let Some(ip) = ip {
            address_allowed(destination, ip).map_err(HttpError::Refused)?;
        }
        let port = url.port_or_known_default().filter(|port| *port != 0).ok_or(HttpError::Refused("url"))?;
        Ok(Origin { https, host, ip, port })
    }

    /// The `Host` header: always the name, whatever address is dialled.
    pub fn host_header(&self) -> String {
        let host = match self.ip {
            Some(IpAddr::V6(_)) => format!("[{}]", self.host),
            _ => self.host.clone(),
        };
        if self.port == if self.https { 443 } else { 80 } { host } else { format!("{host}:{}", self.port) }
    }
}

/// Opens a connection. Every error is before the first byte of a request.
pub(super) async fn connect(
    world: &World,
    tls: &Tls,
    destination: Destination,
    origin: &Origin,
    deadline: Instant,
) -> Result<Sender, HttpError> {
    let deadline = deadline.min(Instant::now() + CONNECT_TIMEOUT);
    timeout_at(deadline, open(world, tls, destination, origin)).await.map_err(|_| HttpError::NotSentTimeout)?
}

async fn open(world: &World, tls: &Tls, destination: Destination, origin: &Origin) -> Result<Sender, HttpError> {
    let addresses = match origin.ip {
        Some(ip) => vec![ip],
        None => world.net.resolve(&origin.host).await.map_err(|_| not_sent("the host name was not found"))?,
    };
    // One bad address refuses the name: who mixes public and private answers is looking for the gap between them.
    for ip in &addresses {
        address_allowed(destination, *ip).map_err(HttpError::Refused)?;
    }
    let io = dial(world, &addresses, origin.port).await?;
    let io: BoxIo = match (origin.https, tls) {
        (false, _) | (true, Tls::Plain) => io,
        (true, Tls::Rustls(connector)) => {
            let name = match origin.ip {
                Some(ip) => ServerName::IpAddress(ip.into()),
                None => ServerName::try_from(origin.host.trim_end_matches('.').to_owned())
                    .map_err(|_| HttpError::Refused("host_name"))?,
            };
            let stream = connector.connect(name, io).await.map_err(|e| not_sent(format!("TLS: {}", short(&e))))?;
            Box::new(stream)
        }
    };
    let (sender, connection) = Builder::new()
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .handshake(TokioIo::new(io))
        .await
        .map_err(|e| not_sent(short(&e)))?;
    world.spawn.spawn(Box::pin(async move {
        // What went wrong reaches whoever waits on the sender.
        let _ = connection.await;
    }));
    Ok(sender)
}

async fn dial(world: &World, addresses: &[IpAddr], port: u16) -> Result<BoxIo, HttpError> {
    let mut last = "the host name has no address".to_owned();
    let tried = addresses.len().min(MAX_DIALLED);
    for (n, ip) in addresses.iter().take(tried).enumerate() {
        let attempt = world.net.connect(SocketAddr::new(*ip, port));
        let result = if n + 1 == tried { Ok(attempt.await) } else { timeout(ADDRESS_TIMEOUT, attempt).await };
        match result {
            Ok(Ok(io)) => return Ok(io),
            Ok(Err(error)) => last = format!("connect: {}", error.kind()),
            Err(_) => last = "connect: timed out".into(),
        }
    }
    Err(HttpError::NotSent(last))
}

fn not_sent(detail: impl Into<String>) -> HttpError {
    HttpError::NotSent(detail.into())
}

/// An error's text with a bound on its length; the other side can have written part of it.
pub(super) fn short(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    if let Some(source) = error.source() {
        text = format!("{text}: {source}");
    }
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
