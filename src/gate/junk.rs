//! Payments that nobody knows cost a claim and a question to the facilitator each. A source has so many of them; one
//! that turns out to be good is given back as soon as it does, so only a source of bad ones is ever stopped.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::payment::Identity;

/// Sources that are remembered, at most. Of more, those with the most left are forgotten first.
const MAX_SOURCES: usize = 10_000;

/// `burst` at once, `per_second` in the long run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JunkLimit {
    pub per_second: u32,
    pub burst: u32,
}

impl Default for JunkLimit {
    fn default() -> JunkLimit {
        JunkLimit { per_second: 2, burst: 50 }
    }
}

pub(super) struct Junk {
    each: Duration,
    burst: u32,
    sources: Mutex<BTreeMap<String, Source>>,
}

struct Source {
    /// When it has its whole burst again.
    full_at: Instant,
    /// Payments that are being tried now: the same one by many requests at once is one.
    trying: BTreeMap<Identity, Trying>,
}

#[derive(Default)]
struct Trying {
    requests: u32,
    /// Whether it counts is known: it was given back, or will not be.
    is_decided: bool,
}

/// One payment that is being tried. It counts against its source unless somebody says otherwise.
pub(super) struct Trial {
    junk: Arc<Junk>,
    source: String,
    identity: Identity,
    ends: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Counts,
    GivenBack,
    /// Others may find out.
    Unknown,
}

impl Junk {
    pub fn new(limit: JunkLimit) -> Arc<Junk> {
        let each = Duration::from_secs(1) / limit.per_second.max(1);
        Arc::new(Junk { each, burst: limit.burst.max(1), sources: Mutex::default() })
    }

    /// `None`: this source has tried too many.
    pub fn admit(self: &Arc<Junk>, source: &str, identity: Identity) -> Option<Trial> {
        let now = Instant::now();
        let mut sources = self.sources();
        let of = of(&mut sources, source, now);
        if !of.trying.contains_key(&identity) && !self.take(of, now) {
            return None;
        }
        of.trying.entry(identity).or_default().requests += 1;
        drop(sources);
        Some(Trial { junk: self.clone(), source: source.to_owned(), identity, ends: End::Counts })
    }

    /// One that cannot be read, which has no identity. `false`: this source has tried too many.
    pub fn counts(&self, source: &str) -> bool {
        let now = Instant::now();
        let mut sources = self.sources();
        self.take(of(&mut sources, source, now), now)
    }

    fn take(&self, of: &mut Source, now: Instant) -> bool {
        let then = of.full_at.max(now) + self.each;
        let fits = then - now <= self.each * self.burst;
        if fits {
            of.full_at = then;
        }
        fits
    }

    fn sources(&self) -> MutexGuard<'_, BTreeMap<String, Source>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Trial {
    /// It was no junk: given back at once, however long the rest of its sale takes.
    pub fn was_good(mut self) {
        self.ends = End::GivenBack;
    }

    /// It was not looked at, or could not be.
    pub fn was_not_judged(mut self) {
        self.ends = End::Unknown;
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut sources = self.junk.sources();
        let Some(of) = sources.get_mut(&self.source) else { return };
        let Some(trying) = of.trying.get_mut(&self.identity) else { return };
        trying.requests = trying.requests.saturating_sub(1);
        let is_last = trying.requests == 0;
        let gives_back = !trying.is_decided && (self.ends == End::GivenBack || self.ends == End::Unknown && is_last);
        trying.is_decided |= gives_back || self.ends == End::Counts;
        if gives_back && let Some(earlier) = of.full_at.checked_sub(self.junk.each) {
            of.full_at = earlier;
        }
        if is_last {
            of.trying.remove(&self.identity);
        }
        if of.trying.is_empty() && of.full_at <= Instant::now() {
            sources.remove(&self.source);
        }
    }
}

fn of<'s>(sources: &'s mut BTreeMap<String, Source>, source: &str, now: Instant) -> &'s mut Source {
    if sources.len() >= MAX_SOURCES && !sources.contains_key(source) {
        forget(sources, now);
    }
    sources.entry(source.to_owned()).or_insert_with(|| Source { full_at: now, trying: BTreeMap::new() })
}

/// Those that have all of their burst; else the tenth that is nearest to it.
fn forget(sources: &mut BTreeMap<String, Source>, now: Instant) {
    sources.retain(|_, of| of.full_at > now || !of.trying.is_empty());
    if sources.len() >= MAX_SOURCES {
        let mut moments: Vec<Instant> = sources.values().map(|of| of.full_at).collect();
        let (_, tenth, _) = moments.select_nth_unstable(MAX_SOURCES / 10);
        let tenth = *tenth;
        sources.retain(|_, of| of.full_at > tenth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> Identity {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        Identity(bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn bad_ones_are_counted_per_source_and_good_ones_are_given_back() {
        let junk = Junk::new(JunkLimit { per_second: 1, burst: 3 });
        for n in 0..100 {
            junk.admit("good", id(n)).unwrap().was_good();
        }
        for n in 0..3 {
            assert!(junk.admit("bad", id(n)).is_some());
        }
        assert!(junk.admit("bad", id(9)).is_none());
        assert!(junk.admit("good", id(9)).is_some());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(junk.admit("bad", id(9)).is_some());
        assert!(junk.admit("bad", id(10)).is_none());
        assert!(!junk.counts("bad") && junk.counts("unreadable"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_payment_many_times_at_once_is_one() {
        let junk = Junk::new(JunkLimit { per_second: 1, burst: 2 });
        let trials: Vec<Trial> = (0..200).map(|_| junk.admit("a", id(1)).unwrap()).collect();
        assert!(junk.admit("a", id(2)).is_some());
        assert!(junk.admit("a", id(3)).is_none());
        trials.into_iter().for_each(Trial::was_good);
        assert!(junk.admit("a", id(3)).is_some());
        assert!(junk.admit("a", id(4)).is_none());
        tokio::time::advance(Duration::from_secs(60)).await;
        drop(junk.admit("a", id(5)));
        assert!(junk.sources().len() <= 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_payment_was_is_said_once() {
        let junk = Junk::new(JunkLimit { per_second: 1, burst: 2 });
        let left = |junk: &Arc<Junk>| {
            let taken: Vec<Trial> = (100..).map_while(|n| junk.admit("a", id(n))).collect();
            let left = taken.len();
            taken.into_iter().for_each(Trial::was_good);
            left
        };
        // Good, while another request still tries the same.
        let (first, second) = (junk.admit("a", id(1)).unwrap(), junk.admit("a", id(1)).unwrap());
        first.was_good();
        assert_eq!(left(&junk), 2);
        second.was_good();
        assert_eq!(left(&junk), 2, "not given back twice");
        // Bad, whatever its twin did not learn.
        let (first, second) = (junk.admit("a", id(1)).unwrap(), junk.admit("a", id(1)).unwrap());
        drop(first);
        second.was_not_judged();
        assert_eq!(left(&junk), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_who_is_stopped_is_remembered() {
        let junk = Junk::new(JunkLimit { per_second: 1, burst: 3 });
        for n in 0..3 {
            drop(junk.admit("bad", id(n)));
        }
        for n in 0..2 * MAX_SOURCES {
            drop(junk.admit(&n.to_string(), id(0)));
        }
        assert!(junk.sources().len() <= MAX_SOURCES);
        assert!(junk.admit("bad", id(9)).is_none());
    }
}
