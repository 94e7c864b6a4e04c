//! Outbound HTTP over the network port: bounded in time and bytes, no proxy, no decompression, no redirect followed
//! behind the caller's back, nothing ever sent twice, and every error says whether the request can have been seen.

mod address;
mod client;
mod connect;
#[cfg(feature = "roles")]
mod listener;
mod tls;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio_rustls::TlsConnector;

pub use address::address_allowed;
pub use client::{Client, Streaming, Target};
#[cfg(feature = "roles")]
pub use listener::TlsListener;
#[cfg(feature = "postgres")]
pub(crate) use tls::database_tls;
pub use tls::{tls, tls_as};

/// How `https` is spoken. `Plain` exists for the simulated network only.
#[derive(Clone)]
pub enum Tls {
    Rustls(TlsConnector),
    Plain,
}

/// Who named the destination; decides which addresses may be dialled (section 5 of the design).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Named in configuration: may be private, may be plain HTTP where its owner's rules allow it.
    Operator,
    /// Named by a catalog item or a challenge: HTTPS and globally routable addresses only.
    Agent,
    /// The same with `allow_insecure_local`: plain HTTP and loopback too; link-local and metadata stay refused.
    AgentLocal,
}

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The destination is against the rules; nothing was sent. The word names the rule, not what was found there.
    #[error("destination refused: {0}")]
    Refused(&'static str),
    /// Certain: not one byte of the request has left.
    #[error("not sent: {0}")]
    NotSent(String),
    /// Certain not to have been sent, because the time was over before.
    #[error("not sent within the time limit")]
    NotSentTimeout,
    /// The request may have been acted on; no answer came in time.
    #[error("no answer within the time limit")]
    Timeout,
    /// The request may have been acted on; the connection broke or the answer was no HTTP.
    #[error("no usable answer: {0}")]
    Unknown(String),
    /// An answer came and was larger than allowed.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
}

impl HttpError {
    /// Whether the other side can have seen the request.
    pub fn may_have_been_seen(&self) -> bool {
        !matches!(self, HttpError::Refused(_) | HttpError::NotSent(_) | HttpError::NotSentTimeout)
    }
    pub fn is_timeout(&self) -> bool {
        matches!(self, HttpError::NotSentTimeout | HttpError::Timeout)
    }
}

/// What one request may cost: `timeout` from the call to the last byte of the body, and the size of that body.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub timeout: Duration,
    pub max_response_bytes: usize,
}
impl Default for Limits {
    fn default() -> Limits {
        Limits { timeout: Duration::from_secs(15), max_response_bytes: 8 << 20 }
    }
}
