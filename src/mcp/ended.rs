//! Sessions that their clients ended with DELETE. The handler remembers them for every replica; the front keeps what it
//! knew a moment ago, so that the calls of a living session ask nobody.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

#[derive(Default, Clone)]
pub(super) struct Sessions(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    by_name: BTreeMap<String, Seen>,
    tidied: Option<Instant>,
}

struct Seen {
    /// `None`: nobody was asked yet, there is only a stream that is about to be opened.
    asked: Option<Instant>,
    /// Cancelled when the session has ended: its streams close.
    end: CancellationToken,
    /// Open ones. While there is one the session is not forgotten, however many others there are.
    streams: usize,
}

/// An open stream of a session.
pub(super) struct Open {
    sessions: Sessions,
    name: String,
    end: CancellationToken,
}

impl Open {
    /// The session has ended here.
    pub async fn over(&self) {
        self.end.cancelled().await;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(seen) = self.sessions.seen().by_name.get_mut(&self.name) {
            seen.streams = seen.streams.saturating_sub(1);
        }
    }
}

impl Seen {
    fn asked_within(&self, span: Duration) -> bool {
        self.asked.is_some_and(|asked| asked.elapsed() < span)
    }
}

impl Table {
    fn tidy(&mut self) {
        if self.tidied.is_some_and(|tidied| tidied.elapsed() < TIDY) {
            return;
        }
        self.tidied = Some(Instant::now());
        self.by_name.retain(|_, seen| {
            let keep = if seen.end.is_cancelled() { REMEMBERED } else { FRESH };
            seen.streams > 0 || seen.asked_within(keep)
        });
    }

    /// `None`: there is no room for a newcomer.
    fn entry(&mut self, name: &str) -> Option<&mut Seen> {
        if self.by_name.len() >= MAX_SEEN && !self.by_name.contains_key(name) {
            self.tidy();
            if self.by_name.len() >= MAX_SEEN {
                return None;
            }
        }
        Some(self.always(name))
    }

    fn always(&mut self, name: &str) -> &mut Seen {
        let fresh = || Seen { asked: None, end: CancellationToken::new(), streams: 0 };
        self.by_name.entry(name.to_owned()).or_insert_with(fresh)
    }
}

impl Sessions {
    fn seen(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session lives, as far as anybody knows at this moment. `false`: it has ended here.
    pub(super) fn lives(&self, name: &str) -> bool {
        self.seen().entry(name).is_none_or(|seen| {
            seen.asked = Some(Instant::now());
            !seen.end.is_cancelled()
        })
    }

    /// `false`: the session has ended, here or on another replica.
    pub(super) async fn check(&self, handler: &dyn Handler, session: &Session) -> bool {
        if let Some(seen) = self.seen().by_name.get(&session.name) {
            if seen.end.is_cancelled() {
                return false;
            }
            if seen.asked_within(FRESH) {
                return true;
            }
        }
        if handler.session_ended(&session.name).await {
            self.ended(&session.name);
            return false;
        }
        self.lives(&session.name)
    }

    /// Before the session is checked: an end that comes in between ends the stream. Whoever opens streams bounds them.
    pub(super) fn open(&self, name: &str) -> Open {
        let mut seen = self.seen();
        let known = seen.always(name);
        known.streams += 1;
        let end = known.end.clone();
        drop(seen);
        Open { sessions: self.clone(), name: name.to_owned(), end }
    }

    pub(super) fn ended(&self, name: &str) {
        if let Some(seen) = self.seen().entry(name) {
            seen.asked = Some(Instant::now());
            seen.end.cancel();
        }
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
        assert!(!sessions.lives("ended-1"), "an end is not forgotten for a newcomer");
        tokio::time::sleep(REMEMBERED).await;
        sessions.lives("new");
        assert!(sessions.seen().by_name.len() <= 2, "what is in the handler's memory need not be in ours");
    }

    /// A stream that outlived its session would be open for as long as the client waits for its end.
    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_with_its_session_however_many_others_there_are() {
        let sessions = Sessions::default();
        let early = sessions.open("early");
        sessions.lives("early");
        for n in 0..MAX_SEEN {
            sessions.lives(&format!("crowd-{n}"));
        }
        let (late, twin) = (sessions.open("late"), sessions.open("late"));
        tokio::time::sleep(FRESH * 2).await;
        for n in 0..MAX_SEEN {
            sessions.lives(&format!("second crowd-{n}"));
        }
        drop(twin);
        for (name, open) in [("early", early), ("late", late)] {
            let waits = tokio::time::timeout(FRESH, open.over()).await;
            assert!(waits.is_err(), "{name} lives");
            sessions.ended(name);
            let over = tokio::time::timeout(FRESH, open.over()).await;
            assert!(over.is_ok(), "{name} has ended");
        }
        tokio::time::sleep(REMEMBERED).await;
        sessions.lives("new");
        assert_eq!(sessions.seen().by_name.len(), 1, "streams that are gone keep nothing");
    }
}
