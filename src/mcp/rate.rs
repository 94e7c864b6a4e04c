//! How often one caller may ask: a token bucket for each, in bounded memory.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Callers with a bucket that is not full, at most. Of more, those whose bucket is nearly full are forgotten first.
const MAX_CALLERS: usize = 10_000;

/// `burst` at once, `per_second` in the long run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    pub per_second: u32,
    pub burst: u32,
}

/// Who made a connection or a request: as the socket says, or a proxy that is trusted (`super::proxies`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub IpAddr);

impl Peer {
    /// A host has a whole /64 of IPv6 to itself.
    pub fn key(self) -> String {
        match self.0.to_canonical() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).to_string(),
        }
    }
}

/// For each caller the moment at which its bucket is full again: it holds fewer the farther that is ahead.
pub(crate) struct Buckets {
    limit: RateLimit,
    full_at: Mutex<BTreeMap<String, Instant>>,
}

impl Buckets {
    pub fn new(limit: RateLimit) -> Buckets {
        let limit = RateLimit { per_second: limit.per_second.max(1), burst: limit.burst.max(1) };
        Buckets { limit, full_at: Mutex::default() }
    }

    /// Takes `count` (no more than the bucket holds when it is full), or says how long it takes until they are there.
    pub fn take(&self, caller: &str, count: u32) -> Result<(), Duration> {
        let now = Instant::now();
        let each = Duration::from_secs(1) / self.limit.per_second;
        let cost = each * count.min(self.limit.burst);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let then = full_at.get(caller).copied().unwrap_or(now).max(now) + cost;
        let wait = (then - now).saturating_sub(each * self.limit.burst);
        if !wait.is_zero() {
            return Err(wait);
        }
        if full_at.len() >= MAX_CALLERS && !full_at.contains_key(caller) {
            forget(&mut full_at, now);
        }
        full_at.insert(caller.to_owned(), then);
        Ok(())
    }

    /// Whether one more would be given.
    pub fn has_one(&self, caller: &str) -> bool {
        let now = Instant::now();
        let each = Duration::from_secs(1) / self.limit.per_second;
        let full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let ahead = full_at.get(caller).map_or(Duration::ZERO, |full| full.saturating_duration_since(now));
        ahead + each <= each * self.limit.burst
    }
}

/// The full ones, which nothing is lost with; else the tenth that is nearest to it.
fn forget(full_at: &mut BTreeMap<String, Instant>, now: Instant) {
    full_at.retain(|_, full| *full > now);
    if full_at.len() >= MAX_CALLERS {
        let mut moments: Vec<Instant> = full_at.values().copied().collect();
        let (_, tenth, _) = moments.select_nth_unstable(MAX_CALLERS / 10);
        let tenth = *tenth;
        full_at.retain(|_, full| *full > tenth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets(per_second: u32, burst: u32) -> Buckets {
        Buckets::new(RateLimit { per_second, burst })
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_then_the_rate_for_each_caller_alone() {
        let buckets = buckets(2, 3);
        let given = |caller: &str| (0..10).take_while(|_| buckets.take(caller, 1).is_ok()).count();
        assert_eq!((given("a"), given("a"), given("b")), (3, 0, 3));
        assert!(!buckets.has_one("a") && buckets.has_one("c"));
        assert_eq!(buckets.take("a", 1), Err(Duration::from_millis(500)));
        tokio::time::advance(Duration::from_millis(1000)).await;
        assert_eq!((given("a"), buckets.has_one("b")), (2, true));
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(given("a"), 3, "no more than the burst is saved up");
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(buckets.take("a", 1000), Ok(()), "as many as a full bucket has");
        assert_eq!(buckets.take("a", 1000), Err(Duration::from_millis(1500)));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_a_caller_that_is_stopped_is_remembered() {
        let buckets = buckets(1, 5);
        while buckets.take("busy", 1).is_ok() {}
        for n in 0..3 * MAX_CALLERS {
            assert_eq!(buckets.take(&n.to_string(), 1), Ok(()));
        }
        assert!(buckets.full_at.lock().unwrap().len() <= MAX_CALLERS);
        assert!(!buckets.has_one("busy"));
    }

    #[test]
    fn addresses_of_one_host_are_one_caller() {
        let key = |ip: &str| Peer(ip.parse().unwrap()).key();
        assert_eq!(key("2001:db8:1:2:3:4:5:6"), key("2001:db8:1:2::1"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
        assert_ne!(key("192.0.2.1"), key("192.0.2.2"));
    }
}
