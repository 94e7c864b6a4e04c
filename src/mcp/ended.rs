//! Sessions that their clients ended with DELETE. The handler remembers them for every replica; the front keeps what it
//! knew a moment ago, so that the calls of a living session ask nobody.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Handler;
use super::session::Session;

/// A session that another replica ended is refused here after at most this long.
const FRESH: Duration = Duration::from_secs(10);
/// Beyond so many sessions at once the handler is asked more often; nothing else changes.
const MAX_SEEN: usize = 10_000;

#[derive(Default)]
pub(super) struct Sessions {
    seen: Mutex<BTreeMap<String, Seen>>,
}

struct Seen {
    asked: Instant,
    /// Cancelled when the session has ended: its streams close.
    end: CancellationToken,
}

impl Sessions {
    fn seen(&self) -> MutexGuard<'_, BTreeMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session lives, as far as anybody knows at this moment. The token is cancelled when it ends here.
    pub(super) fn lives(&self, name: &str) -> CancellationToken {
        let mut seen = self.seen();
        if seen.len() >= MAX_SEEN && !seen.contains_key(name) {
            seen.retain(|_, seen| seen.end.is_cancelled() || seen.asked.elapsed() < FRESH);
        }
        if seen.len() >= MAX_SEEN && !seen.contains_key(name) {
            return CancellationToken::new();
        }
        let fresh = || Seen { asked: Instant::now(), end: CancellationToken::new() };
        let entry = seen.entry(name.to_owned()).or_insert_with(fresh);
        entry.asked = Instant::now();
        entry.end.clone()
    }

    /// `None`: the session has ended, here or on another replica.
    pub(super) async fn check(&self, handler: &dyn Handler, session: &Session) -> Option<CancellationToken> {
        if let Some(seen) = self.seen().get(&session.name) {
            if seen.end.is_cancelled() {
                return None;
            }
            if seen.asked.elapsed() < FRESH {
                return Some(seen.end.clone());
            }
        }
        if handler.session_ended(&session.name).await {
            self.ended(&session.name);
            return None;
        }
        let end = self.lives(&session.name);
        (!end.is_cancelled()).then_some(end)
    }

    pub(super) fn ended(&self, name: &str) {
        self.lives(name).cancel();
    }
}
