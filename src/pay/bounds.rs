//! How long one look of the sweep may take, and so how long its lease is: long enough for a holder to be done or to have
//! stopped before it ends, short enough that what a killed or frozen holder leaves is taken up again within some tens of
//! seconds.
//!
//! ```text
//! rows  = clamp(rpc_per_second, 1, 8)                                       rows of one network read side by side
//! read  = clamp(2 x timeout + rows x 4 x rpcs / rpc_per_second, 5 s, 45 s)  what the chain shows
//! find  = clamp(timeout x rpcs, 2 s, 10 s)                                  the transaction of a used nonce
//! lease = read + find + 5 s                                                 from 12 s to 60 s
//! ```
//! `timeout` is that of one request. With 15 s, one RPC and 20 requests a second the lease is 47 s.

use std::time::Duration;

use tokio::time::Instant;

/// Rows of one network that are read at the same time.
const SIDE_BY_SIDE: u32 = 8;
/// Requests to each RPC that a usual reading needs (entry, newest ledger, setting, identity); it asks them all at once.
const REQUESTS: u32 = 4;
/// Timeouts that a reading survives: an RPC that keeps it waiting more often proves nothing now.
const WAITS: u32 = 2;
/// What is found is written within this; the ledger refuses a release after the lease anyway.
const WRITE: Duration = Duration::from_secs(5);
/// A process that runs notices within this that a time is over.
const NOTICE: Duration = Duration::from_secs(1);
const READ: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(45)];
const FIND: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    pub rows: u32,
    read: Duration,
    find: Duration,
}

impl Bounds {
    /// `timeout`: of one request; `rpcs`: how many are asked; `per_second`: requests to all of them together.
    pub fn new(timeout: Duration, rpcs: usize, per_second: u32) -> Bounds {
        let (rpcs, per_second) = (u32::try_from(rpcs.max(1)).unwrap_or(u32::MAX), per_second.max(1));
        let rows = per_second.min(SIDE_BY_SIDE);
        let waiting = Duration::from_secs(u64::from(rows * REQUESTS) * u64::from(rpcs)) / per_second;
        let within = |[least, most]: [Duration; 2], wanted: Duration| wanted.clamp(least, most);
        Bounds {
            rows,
            read: within(READ, timeout.saturating_mul(WAITS).saturating_add(waiting)),
            find: within(FIND, timeout.saturating_mul(rpcs)),
        }
    }

    pub fn lease(&self) -> Duration {
        self.read + self.find + WRITE
    }

    /// Of a lease that is asked for now: counted from before the ledger grants it, so that all of them lie before its
    /// end.
    pub fn from_now(&self) -> Deadlines {
        let now = Instant::now();
        Deadlines {
            ask: now + self.read / 2,
            read: now + self.read,
            find: now + self.read + self.find,
            end: now + self.lease(),
        }
    }
}

/// Until when the holder of a lease does what. A process that was frozen finds them passed when it wakes up.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// Who asks later gives the chain too little time.
    ask: Instant,
    /// The chain is read by then, or proves nothing.
    pub read: Instant,
    /// The transaction of a used nonce is found by then, or left unnamed.
    pub find: Instant,
    /// From then on the holder writes nothing: the lease is over.
    pub end: Instant,
}

impl Deadlines {
    /// Whether it is the chain's doing that a reading from `begun` to `ended` proved nothing. It is ours where the lease was
    /// long in coming, or this process was frozen meanwhile.
    pub fn blame_the_chain(&self, begun: Instant, ended: Instant) -> bool {
        begun <= self.ask && ended <= self.read + NOTICE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(timeout_ms: u64, rpcs: usize, per_second: u32) -> u128 {
        Bounds::new(Duration::from_millis(timeout_ms), rpcs, per_second).lease().as_millis()
    }

    #[test]
    fn the_lease_follows_the_timeouts_between_its_floor_and_its_ceiling() {
        assert_eq!(lease(15_000, 1, 20), 46_600, "as configured by default");
        assert_eq!(lease(2_000, 1, 100), 12_000);
        assert_eq!(lease(5_000, 2, 20), 28_200);
        assert_eq!(lease(100, 1, 1_000), 12_000, "the floor");
        assert_eq!(lease(600_000, 9, 1), 60_000, "the ceiling");
        assert_eq!([1, 3, 8, 500].map(|rate| Bounds::new(Duration::ZERO, 1, rate).rows), [1, 3, 8, 8]);
        // Slower requests or more RPCs never make it shorter.
        for rate in [1, 7, 20, 1_000] {
            for timeout in [100, 1_000, 15_000, 600_000] {
                assert!((1..9).all(|n| lease(timeout, n, rate) <= lease(timeout, n + 1, rate)));
                assert!(lease(timeout, 1, rate) <= lease(timeout * 2, 1, rate));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_is_done_before_the_lease_that_it_asked_for_ends() {
        for (timeout, rpcs, rate) in [(15_000, 1, 20), (100, 1, 1), (600_000, 20, 1), (2_000, 3, 1_000)] {
            let bounds = Bounds::new(Duration::from_millis(timeout), rpcs, rate);
            let deadlines = bounds.from_now();
            // However long the ledger took to grant it.
            tokio::time::sleep(Duration::from_secs(3)).await;
            let granted_until = Instant::now() + bounds.lease();
            assert!(deadlines.read < deadlines.find && deadlines.find < deadlines.end && deadlines.end < granted_until);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reading_that_had_no_time_says_nothing_about_the_chain() {
        let bounds = Bounds::new(Duration::from_secs(2), 1, 20);
        let (now, until) = (Instant::now(), bounds.from_now());
        assert!(until.blame_the_chain(now, until.read), "it was asked at once, and did not answer");
        assert!(until.blame_the_chain(now + bounds.read / 2, now + bounds.read / 2), "it said no");
        assert!(!until.blame_the_chain(until.read, until.read), "a lease that was long in coming");
        assert!(!until.blame_the_chain(now, until.end), "frozen meanwhile");
    }
}
