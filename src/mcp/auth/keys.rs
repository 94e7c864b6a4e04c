//! Named bearer keys.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use futures_util::future::BoxFuture;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::{Identity, Method, Verdict};
use crate::money::AgentId;

/// A shorter secret could be guessed.
const MIN_SECRET_BYTES: usize = 32;
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

/// Named secrets. Several secrets may have one name, so that a key can be changed without a new budget.
#[derive(Clone, PartialEq, Eq)]
pub struct StaticKeys(Vec<(AgentId, [u8; 32])>);

impl StaticKeys {
    /// `name:secret`, separated by commas or line ends; a line that begins with `#` is a comment. An entry without a name is called `key-` and 8 hex digits of its SHA-256.
    pub fn parse(list: &str) -> Result<StaticKeys, AuthError> {
        let mut named = Vec::new();
        let lines = list.lines().filter(|line| !line.trim_start().starts_with('#'));
        let entries = lines.flat_map(|line| line.split(',')).map(str::trim).filter(|entry| !entry.is_empty());
        for (i, entry) in entries.enumerate() {
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

    /// How many secrets there are.
    #[allow(clippy::len_without_is_empty, reason = "a list without a key is refused")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn names(&self) -> impl Iterator<Item = &AgentId> {
        self.0.iter().map(|(agent, _)| agent)
    }

    /// Takes the same time wherever the key stands in the list, and whether it does.
    fn find(&self, secret: &[u8]) -> Option<AgentId> {
        let digest = Sha256::digest(secret);
        let mut found = None;
        for (agent, key) in &self.0 {
            if verify_slices_are_equal(key, &digest).is_ok() {
                found = Some(agent.clone());
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

/// The keys that are good now: a file of keys may be written anew while the server runs.
#[derive(Debug)]
pub struct Keys(RwLock<Arc<StaticKeys>>);

impl Keys {
    pub fn new(keys: StaticKeys) -> Keys {
        Keys(RwLock::new(Arc::new(keys)))
    }

    pub fn replace(&self, keys: StaticKeys) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
    }

    pub fn current(&self) -> Arc<StaticKeys> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Method for Keys {
    fn name(&self) -> &'static str {
        "key"
    }

    fn identify<'a>(&'a self, token: &'a str, _may_ask: bool) -> BoxFuture<'a, Verdict> {
        let found = self.current().find(token.as_bytes());
        let verdict = found.map_or(Verdict::NotMine, |agent| Verdict::Known(Identity::named(agent)));
        Box::pin(std::future::ready(verdict))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "0123456789abcdef0123456789abcdef";
    const B: &str = "fedcba9876543210fedcba9876543210";

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
        let keys = StaticKeys::parse(&format!("# both, for a while\nalice:{A},\r\nalice:{B}\n")).unwrap();
        assert_eq!(keys.find(A.as_bytes()), keys.find(B.as_bytes()));
        let bare = StaticKeys::parse(A).unwrap();
        let name = bare.names().next().unwrap().as_str();
        assert_eq!(name, format!("key-{}", &hex::encode(Sha256::digest(A))[..8]));
    }

    #[test]
    fn debug_shows_names_and_no_secret() {
        let keys = Keys::new(StaticKeys::parse(&format!("alice:{A}")).unwrap());
        let shown = format!("{keys:?}");
        assert!(shown.contains("alice") && !shown.contains(A) && !shown.contains(&hex::encode(Sha256::digest(A))));
    }
}
