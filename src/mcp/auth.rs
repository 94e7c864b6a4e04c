//! Who calls: nobody in particular, or whom a bearer token names. Each [`Method`] knows its own kind of token: named
//! keys, JWTs, and, from outside this module, Kubernetes service accounts.
//!
//! A token never reaches a log, an error or `Debug`; the caller of a refused one learns that it was refused, and the
//! log why.

mod jwks;
mod jwt;
mod keys;
mod metadata;

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::HeaderMap;
use http::header::AUTHORIZATION;

pub use jwt::{Jwt, JwtSettings, algorithm, looks_like_a_jwt};
pub use keys::{AuthError, Keys, StaticKeys};
pub use metadata::{Resource, WELL_KNOWN};

use super::Claims;
use crate::money::AgentId;

/// A longer header holds no token of ours. A service account's token has about 1 KiB, a JWT with many groups a few.
const MAX_TOKEN_BYTES: usize = 12 << 10;

/// The caller of one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// `None` where everybody may ask.
    pub agent: Option<AgentId>,
    pub claims: Claims,
}

impl Identity {
    pub fn named(agent: AgentId) -> Identity {
        Identity { agent: Some(agent), claims: Claims::default() }
    }
}

/// One way to know a caller by a bearer token.
pub trait Method: Send + Sync + 'static {
    /// For logs.
    fn name(&self) -> &'static str;
    /// `may_ask`: whether somebody else may be asked for it, which costs more than looking at the token does.
    fn identify<'a>(&'a self, token: &'a str, may_ask: bool) -> BoxFuture<'a, Verdict>;
}

/// What a method says of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Another kind of token: the next method looks at it.
    NotMine,
    Known(Identity),
    /// The reason is for the log.
    Refused(&'static str),
    /// Whoever has to be asked did not answer: the token may be good.
    Unavailable,
    /// Somebody would have to be asked, which the caller said not to do.
    WouldAsk,
}

/// Why a request has no caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// No bearer token came with it.
    Missing,
    /// A token that nobody knows; the method and its reason are for the log.
    Invalid(&'static str, &'static str),
    Unavailable,
    WouldAsk,
}

pub enum Authenticator {
    /// Everybody may ask; for servers that spend nothing.
    Public,
    /// In the order in which they look at a token.
    Methods(Vec<Arc<dyn Method>>),
}

impl Authenticator {
    /// Named keys alone.
    pub fn keys(keys: StaticKeys) -> Authenticator {
        Authenticator::Methods(vec![Arc::new(Keys::new(keys))])
    }

    pub fn is_public(&self) -> bool {
        matches!(self, Authenticator::Public)
    }

    pub async fn authenticate(&self, headers: &HeaderMap, may_ask: bool) -> Result<Identity, Denied> {
        let methods = match self {
            Authenticator::Public => return Ok(Identity::default()),
            Authenticator::Methods(methods) => methods,
        };
        let token = bearer(headers)?;
        for method in methods {
            match method.identify(token, may_ask).await {
                Verdict::NotMine => {}
                Verdict::Known(identity) if identity.agent.is_none() => {
                    return Err(Denied::Invalid(method.name(), "it names nobody"));
                }
                Verdict::Known(identity) => return Ok(identity),
                Verdict::Refused(reason) => return Err(Denied::Invalid(method.name(), reason)),
                Verdict::Unavailable => return Err(Denied::Unavailable),
                Verdict::WouldAsk => return Err(Denied::WouldAsk),
            }
        }
        Err(Denied::Invalid("none", "it is no key and no token of a configured issuer"))
    }
}

impl fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Authenticator::Public => f.write_str("Public"),
            Authenticator::Methods(methods) => f.debug_list().entries(methods.iter().map(|m| m.name())).finish(),
        }
    }
}

/// RFC 6750 section 2.1; a second `Authorization` header would let a proxy and us see different callers.
fn bearer(headers: &HeaderMap) -> Result<&str, Denied> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(Denied::Missing)?;
    if values.next().is_some() {
        return Err(Denied::Invalid("none", "the Authorization header stands twice"));
    }
    let value = value.as_bytes();
    let (scheme, token) = value.split_at_checked(7).ok_or(Denied::Missing)?;
    if !scheme.eq_ignore_ascii_case(b"Bearer ") {
        return Err(Denied::Missing);
    }
    let token = token.trim_ascii();
    let fits = !token.is_empty() && token.len() <= MAX_TOKEN_BYTES && token.iter().all(u8::is_ascii_graphic);
    let token = std::str::from_utf8(token).ok().filter(|_| fits);
    token.ok_or(Denied::Invalid("none", "it is empty, too long, or has characters that no token has"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "0123456789abcdef0123456789abcdef";
    const B: &str = "fedcba9876543210fedcba9876543210";

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(AUTHORIZATION, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn knows_each_key_by_its_name_and_nothing_else() {
        let keys = Authenticator::keys(StaticKeys::parse(&format!("alice:{A}, bob:{B}")).unwrap());
        let name = |values: &[&str]| {
            let identity = pollster::block_on(keys.authenticate(&headers(values), true));
            identity.map(|identity| identity.agent.unwrap().as_str().to_owned())
        };
        assert_eq!(name(&[&format!("Bearer {A}")]).unwrap(), "alice");
        assert_eq!(name(&[&format!("bearer  {B}")]).unwrap(), "bob");
        for missing in [vec![], vec![format!("Basic {A}")], vec![A.to_owned()], vec!["Bearer".to_owned()]] {
            let missing: Vec<&str> = missing.iter().map(String::as_str).collect();
            assert_eq!(name(&missing), Err(Denied::Missing), "{missing:?}");
        }
        let almost = &A[..31];
        let long = "x".repeat(MAX_TOKEN_BYTES + 1);
        for bad in [
            vec![format!("Bearer {almost}")],
            vec![format!("Bearer {A}x")],
            vec![format!("Bearer {A} {B}")],
            vec![format!("Bearer {long}")],
            vec!["Bearer ".to_owned()],
            vec![format!("Bearer {A}"), format!("Bearer {B}")],
        ] {
            let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
            assert!(matches!(name(&bad), Err(Denied::Invalid(..))), "{bad:?}");
        }
        let anybody = pollster::block_on(Authenticator::Public.authenticate(&headers(&[]), true));
        assert_eq!(anybody, Ok(Identity::default()));
    }
}
