//! Who may ask: named bearer keys, replaced while requests come, and how often each name may.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use http::HeaderMap;
use tokio::time::Instant;

use super::policy::No;
use crate::mcp::{Authenticator, StaticKeys};
use crate::money::AgentId;

pub struct Callers {
    keys: Mutex<Arc<Authenticator>>,
    /// Requests a second; twice as many at once.
    per_second: f64,
    left: Mutex<BTreeMap<AgentId, (f64, Instant)>>,
}

impl Callers {
    pub fn new(keys: StaticKeys, per_second: u32) -> Callers {
        Callers {
            keys: Mutex::new(Arc::new(Authenticator::keys(keys))),
            per_second: f64::from(per_second),
            left: Mutex::default(),
        }
    }

    pub fn replace(&self, keys: StaticKeys) {
        *self.keys.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(Authenticator::keys(keys));
    }

    pub async fn known(&self, headers: &HeaderMap) -> Result<AgentId, No> {
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = keys.authenticate(headers, false).await;
        known.ok().and_then(|identity| identity.agent).ok_or(No::Unauthorized)
    }

    /// A place in the caller's rate. Names come from the keys alone, so there are few of them.
    pub fn admit(&self, caller: &AgentId) -> Result<(), No> {
        let most = self.per_second * 2.0;
        let now = Instant::now();
        let mut all = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, at) = all.entry(caller.clone()).or_insert((most, now));
        *left = (*left + now.duration_since(*at).as_secs_f64() * self.per_second).min(most);
        *at = now;
        if *left < 1.0 {
            return Err(No::TooMany);
        }
        *left -= 1.0;
        Ok(())
    }
}
