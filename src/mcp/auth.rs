//! Who calls: nobody in particular, or the owner of one of the configured bearer keys.

use std::collections::BTreeSet;
use std::fmt;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::money::AgentId;

/// A shorter secret could be guessed.
const MIN_SECRET_BYTES: usize = 32;
/// A longer header is no key of ours.
const MAX_SECRET_BYTES: usize = 4096;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error(
        "entry {entry} of the bearer keys has a secret of {bytes} bytes; it needs at least 32 (openssl rand -hex 32)"
    )]
    Short { entry: usize, bytes: usize },
    #[error("entry {entry} of the bearer keys has a secret of more than 4096 bytes")]
    Long { entry: usize },
    #[error("entry {entry} of the bearer keys has characters that a header cannot carry (visible ASCII only)")]
    Characters { entry: usize },
    #[error(
        "entry {entry} of the bearer keys has no name that can be one (1-128 printable ASCII characters, not * or total)"
    )]
    Name { entry: usize },
    #[error("entry {entry} of the bearer keys has the same secret as another")]
    Duplicate { entry: usize },
    #[error("there is no bearer key in the list")]
    Empty,
}

/// The request proves nothing about its caller. Says no more on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unauthenticated;

#[derive(Debug)]
pub enum Authenticator {
    /// Everybody may ask; for servers that spend nothing.
    Public,
    StaticKeys(StaticKeys),
}

impl Authenticator {
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Option<AgentId>, Unauthenticated> {
        match self {
            Authenticator::Public => Ok(None),
            Authenticator::StaticKeys(keys) => keys.find(bearer(headers)?).map(Some),
        }
    }
}

/// Named secrets. Several secrets may have one name, so that a key can be changed without a new budget.
#[derive(Clone)]
pub struct StaticKeys(Vec<(AgentId, [u8; 32])>);

impl StaticKeys {
    /// `name:secret[,name:secret]`. An entry without a name is called `key-` and 8 hex digits of its SHA-256.
    pub fn parse(list: &str) -> Result<StaticKeys, AuthError> {
        let mut named = Vec::new();
        for (i, entry) in list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).enumerate() {
            let (name, secret) = match entry.split_once(':') {
                Some((name, secret)) => (name.trim().to_owned(), secret.trim()),
                None => {
                    let name = format!("key-{}", hex::encode(&Sha256::digest(entry.as_bytes())[..4]));
                    tracing::warn!(
                        agent = name,
                        "a bearer key has no name: write name:secret, so that changing the secret keeps the budget"
                    );
                    (name, entry)
                }
            };
            let agent = name.parse().map_err(|_| AuthError::Name { entry: i + 1 })?;
            named.push((agent, Zeroizing::new(secret.to_owned())));
        }
        StaticKeys::new(named)
    }

    /// Keeps the digests; the secrets are wiped.
    pub fn new(named: Vec<(AgentId, Zeroizing<String>)>) -> Result<StaticKeys, AuthError> {
        let mut keys = Vec::with_capacity(named.len());
        let mut seen = BTreeSet::new();
        for (i, (agent, secret)) in named.into_iter().enumerate() {
            let entry = i + 1;
            if secret.len() < MIN_SECRET_BYTES {
                return Err(AuthError::Short { entry, bytes: secret.len() });
            }
            if secret.len() > MAX_SECRET_BYTES {
                return Err(AuthError::Long { entry });
            }
            if !secret.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(AuthError::Characters { entry });
            }
            let digest: [u8; 32] = Sha256::digest(secret.as_bytes()).into();
            if !seen.insert(digest) {
                return Err(AuthError::Duplicate { entry });
            }
            keys.push((agent, digest));
        }
        if keys.is_empty() { Err(AuthError::Empty) } else { Ok(StaticKeys(keys)) }
    }

    pub fn names(&self) -> impl Iterator<Item = &AgentId> {
        self.0.iter().map(|(agent, _)| agent)
    }

    /// Takes the same time wherever the key stands in the list, and whether it does.
    fn find(&self, secret: &[u8]) -> Result<AgentId, Unauthenticated> {
        let digest = Sha256::digest(secret);
        let mut found = Err(Unauthenticated);
        for (agent, key) in &self.0 {
            if verify_slices_are_equal(key, &digest).is_ok() {
                found = Ok(agent.clone());
            }
        }
        found
    }
}

impl fmt::Debug for StaticKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names().map(AgentId::as_str)).finish()
    }
}

/// RFC 6750 section 2.1; a second `Authorization` header would let a proxy and us see different callers.
fn bearer(headers: &HeaderMap) -> Result<&[u8], Unauthenticated> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return Err(Unauthenticated) };
    let value = value.as_bytes();
    let (scheme, token) = value.split_at_checked(7).ok_or(Unauthenticated)?;
    if !scheme.eq_ignore_ascii_case(b"Bearer ") || token.len() > MAX_SECRET_BYTES {
        return Err(Unauthenticated);
    }
    Ok(token.trim_ascii())
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
        let keys = Authenticator::StaticKeys(StaticKeys::parse(&format!("alice:{A}, bob:{B}")).unwrap());
        let name = |values: &[&str]| keys.authenticate(&headers(values)).map(|a| a.unwrap().as_str().to_owned());
        assert_eq!(name(&[&format!("Bearer {A}")]).unwrap(), "alice");
        assert_eq!(name(&[&format!("bearer  {B}")]).unwrap(), "bob");
        let almost = &A[..31];
        for bad in [
            vec![],
            vec![format!("Bearer {almost}")],
            vec![format!("Bearer {A}x")],
            vec![format!("Basic {A}")],
            vec![A.to_owned()],
            vec!["Bearer ".to_owned()],
            vec![format!("Bearer {A}"), format!("Bearer {B}")],
        ] {
            let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
            assert_eq!(name(&bad), Err(Unauthenticated), "{bad:?}");
        }
        assert_eq!(Authenticator::Public.authenticate(&headers(&[])), Ok(None));
    }

    #[test]
    fn refuses_lists_that_would_be_weak_or_ambiguous() {
        for (list, error) in [
            (String::new(), AuthError::Empty),
            (" , ,".into(), AuthError::Empty),
            ("alice:short".into(), AuthError::Short { entry: 1, bytes: 5 }),
            (format!("alice:{A},bob:"), AuthError::Short { entry: 2, bytes: 0 }),
            (format!("alice:{A},bob:{A}"), AuthError::Duplicate { entry: 2 }),
            (format!(":{A}"), AuthError::Name { entry: 1 }),
            (format!("total:{A}"), AuthError::Name { entry: 1 }),
            (format!("alice:{A} {B}"), AuthError::Characters { entry: 1 }),
            (format!("alice:{}", "x".repeat(4097)), AuthError::Long { entry: 1 }),
        ] {
            assert_eq!(StaticKeys::parse(&list).err(), Some(error), "{list:?}");
        }
    }

    #[test]
    fn a_key_can_be_changed_under_its_name_and_a_bare_key_gets_one() {
        let keys = StaticKeys::parse(&format!("alice:{A},alice:{B}")).unwrap();
        assert_eq!(keys.find(A.as_bytes()), keys.find(B.as_bytes()));
        let bare = StaticKeys::parse(A).unwrap();
        let name = bare.names().next().unwrap().as_str();
        assert_eq!(name, format!("key-{}", &hex::encode(Sha256::digest(A))[..8]));
    }

    #[test]
    fn debug_shows_names_and_no_secret() {
        let keys = Authenticator::StaticKeys(StaticKeys::parse(&format!("alice:{A}")).unwrap());
        let shown = format!("{keys:?}");
        assert!(shown.contains("alice") && !shown.contains(A) && !shown.contains(&hex::encode(Sha256::digest(A))));
    }
}
