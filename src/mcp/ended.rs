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
/// A session that ended is refused here without a question for this long; then the handler says so again.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Between two looks for what can be forgotten, which take time in proportion to [`MAX_SEEN`].
const TIDY: Duration = Duration::from_secs(1);
/// Beyond so many sessions at once the handler is asked more often; nothing else changes.
const MAX_SEEN: usize = 10_000;

#[derive(Default)]
pub(super) struct Sessions {
    seen: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_name: BTreeMap<String, Seen>,
    tidied: Option<Instant>,
}

struct Seen {
    asked: Instant,
    /// Cancelled when the session has ended: its streams close.
    end: CancellationToken,
}

impl Table {
    fn tidy(&mut self) {
        if self.tidied.is_some_and(|tidied| tidied.elapsed() < TIDY) {
            return;
        }
        self.tidied = Some(Instant::now());
        self.by_name.retain(|_, seen| {
            let keep = if seen.end.is_cancelled() { REMEMBERED } else { FRESH };
            seen.asked.elapsed() < keep
        });
    }
}

impl Sessions {
    fn seen(&self) -> MutexGuard<'_, Table> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session lives, as far as anybody knows at this moment. The token is cancelled when it ends here.
    pub(super) fn lives(&self, name: &str) -> CancellationToken {
        let mut seen = self.seen();
        if seen.by_name.len() >= MAX_SEEN && !seen.by_name.contains_key(name) {
            seen.tidy();
            if seen.by_name.len() >= MAX_SEEN {
                return CancellationToken::new();
            }
        }
        let fresh = || Seen { asked: Instant::now(), end: CancellationToken::new() };
        let entry = seen.by_name.entry(name.to_owned()).or_insert_with(fresh);
        entry.asked = Instant::now();
        entry.end.clone()
    }

    /// `None`: the session has ended, here or on another replica.
    pub(super) async fn check(&self, handler: &dyn Handler, session: &Session) -> Option<CancellationToken> {
        if let Some(seen) = self.seen().by_name.get(&session.name) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn clients_that_never_say_goodbye_and_clients_that_always_do_take_bounded_room() {
        let sessions = Sessions::default();
        for n in 0..MAX_SEEN + 5_000 {
            sessions.lives(&format!("living-{n}"));
        }
        assert_eq!(sessions.seen().by_name.len(), MAX_SEEN);
        tokio::time::sleep(FRESH).await;
        for n in 0..MAX_SEEN + 5_000 {
            sessions.ended(&format!("ended-{n}"));
        }
        assert_eq!(sessions.seen().by_name.len(), MAX_SEEN);
        tokio::time::sleep(TIDY).await;
        assert!(sessions.lives("ended-1").is_cancelled(), "an end is not forgotten for a newcomer");
        tokio::time::sleep(REMEMBERED).await;
        sessions.lives("new");
        assert!(sessions.seen().by_name.len() <= 2, "what is in the handler's memory need not be in ours");
    }
}
