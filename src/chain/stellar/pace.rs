//! A bound on how fast one asker sends requests, whatever it has to ask: they go one by one, a fixed time apart.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

pub(super) struct Pace {
    every: Duration,
    /// No request goes earlier.
    next: Mutex<Instant>,
}

impl Pace {
    pub fn new(per_second: u32) -> Pace {
        Pace { every: Duration::from_secs(1) / per_second.max(1), next: Mutex::new(Instant::now()) }
    }

    /// Returns when it is the caller's turn. A caller that goes away while it waits leaves its turn unused.
    pub async fn turn(&self) {
        let at = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let at = Instant::now().max(*next);
            *next = at + self.every;
            at
        };
        sleep_until(at).await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn turns_come_one_by_one_and_a_pause_saves_none_up() {
        let pace = Pace::new(4);
        tokio::time::sleep(Duration::from_secs(60)).await;
        let begun = Instant::now();
        let took = join_all((0..5).map(|_| async {
            pace.turn().await;
            begun.elapsed().as_millis()
        }));
        assert_eq!(took.await, [0, 250, 500, 750, 1_000]);
    }
}
