//! Group commit: reservations and settlements of many callers and budgets share a transaction.
//!
//! A lane is one connection, one transaction at a time and one bounded queue; agents are hashed to lanes. A batch takes
//! what waits, after a few turns of the scheduler; no clock is waited for. Each entry is decided on its own, in
//! the order of arrival, and what a batch cannot say of an entry the row-at-a-time transaction says (`reserve.rs`,
//! `close.rs`), with the entry's caller as its own.

mod batch;
mod decide;
mod entry;
mod statements;

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deadpool_postgres::Pool;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;

use super::Options;
use super::connect::WAIT;
use super::wire::Wire;
use crate::ledger::{Decision, LedgerError, SettleOutcome};
use crate::money::PaymentId;
use crate::ports::World;
use crate::telemetry;

use batch::Connection;
use entry::Entry;
pub(super) use entry::{Answer, End, Hold};
#[cfg(test)]
pub(super) use statements::look_ups;

/// Entries that wait in one lane; one more is refused at once.
const QUEUE: usize = 4_096;
/// Entries of one transaction.
const BATCH: usize = 256;
/// Bodies of one transaction, bytes.
const BODIES: usize = 4 << 20;
/// Batches are counted by size: up to 1, 2, 4 ... 256.
const SIZES: usize = 9;

/// Turns of the scheduler before a batch is taken: at most so many, and no more once so many brought nobody. Callers whom
/// the last batch answered come back in them: taken without them, batches are full and nearly empty in turns, and half
/// of the callers wait for two.
const TURNS: usize = 32;
const QUIET_TURNS: usize = 3;

/// Payments of which the lane is remembered: many more than are under way at once.
const HOMES: usize = 16_384;

pub(super) struct Lanes {
    lanes: Vec<Arc<Lane>>,
    homes: Mutex<Homes>,
}

/// In which lane a payment was reserved: settled in the same, two lanes do not wait for each other's windows.
#[derive(Default)]
struct Homes {
    lanes: BTreeMap<PaymentId, usize>,
    oldest: VecDeque<PaymentId>,
}

/// What the lanes of this process did since its start, and what waits now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaneFigures {
    pub lanes: u64,
    /// Entries that wait in all lanes.
    pub waiting: u64,
    pub batches: u64,
    /// Reservations and settlements that were in a batch.
    pub entries: u64,
    /// Batches of at most 1, 2, 4 ... 256 entries, each counted once.
    pub sizes: [u64; SIZES],
    /// Refused because a queue was full, or after too long a wait.
    pub busy: u64,
    /// Runs of a batch after one that had no effect, or an unknown one.
    pub again: u64,
    /// Entries that a transaction of their own decided.
    pub alone: u64,
}

impl LaneFigures {
    /// The bound of each of [`LaneFigures::sizes`].
    pub const BOUNDS: [u64; SIZES] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
}

pub(super) struct Lane {
    pool: Pool,
    world: World,
    wire: Wire,
    outcome_ttl_ms: u64,
    state: Mutex<State>,
    figures: Figures,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Entry>,
    /// A task works on them.
    working: bool,
    /// Kept between two bursts of work.
    connection: Option<Connection>,
}

#[derive(Default)]
struct Figures {
    batches: AtomicU64,
    entries: AtomicU64,
    sizes: [AtomicU64; SIZES],
    busy: AtomicU64,
    again: AtomicU64,
    alone: AtomicU64,
}

fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(u64::try_from(n).unwrap_or(u64::MAX), Ordering::Relaxed);
}

impl Lanes {
    /// `pool` has a connection for each lane. They are made when they are needed.
    pub fn new(pool: &Pool, wire: &Wire, world: &World, options: &Options) -> Lanes {
        let lane = |_| {
            Arc::new(Lane {
                pool: pool.clone(),
                world: world.clone(),
                wire: wire.clone(),
                outcome_ttl_ms: options.outcome_ttl_ms,
                state: Mutex::default(),
                figures: Figures::default(),
            })
        };
        Lanes { lanes: (0..options.lanes.max(1)).map(lane).collect(), homes: Mutex::default() }
    }

    /// All of an agent come into one lane: their order is that of arrival.
    pub fn reserve(&self, hold: Hold) -> Result<oneshot::Receiver<Answer<Decision>>, LedgerError> {
        let at = self.at(&hold.agent);
        {
            let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
            homes.lanes.insert(hold.payment_id, at);
            homes.oldest.push_back(hold.payment_id);
            while homes.oldest.len() > HOMES {
                let Some(oldest) = homes.oldest.pop_front() else { break };
                homes.lanes.remove(&oldest);
            }
        }
        let (entry, answer) = Entry::hold(hold);
        self.submit(at, entry)?;
        Ok(answer)
    }

    /// Of a payment that another process reserved, any lane will do.
    pub fn settle(&self, end: End) -> Result<oneshot::Receiver<Answer<SettleOutcome>>, LedgerError> {
        let home = self.homes.lock().unwrap_or_else(PoisonError::into_inner).lanes.get(&end.payment_id).copied();
        let at = home.unwrap_or_else(|| self.at(&end.payment_id));
        let (entry, answer) = Entry::end(end);
        self.submit(at, entry)?;
        Ok(answer)
    }

    fn at(&self, of: &impl Hash) -> usize {
        let mut hasher = DefaultHasher::new();
        of.hash(&mut hasher);
        let lanes = u64::try_from(self.lanes.len()).unwrap_or(1);
        usize::try_from(hasher.finish() % lanes).unwrap_or(0)
    }

    fn submit(&self, at: usize, entry: Entry) -> Result<(), LedgerError> {
        self.lanes.get(at).ok_or(LedgerError::Busy)?.submit(entry)
    }

    pub fn figures(&self) -> LaneFigures {
        let mut sum =
            LaneFigures { lanes: u64::try_from(self.lanes.len()).unwrap_or(u64::MAX), ..LaneFigures::default() };
        for lane in &self.lanes {
            let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            sum.waiting += u64::try_from(lane.waiting()).unwrap_or(u64::MAX);
            sum.batches += read(&lane.figures.batches);
            sum.entries += read(&lane.figures.entries);
            sum.busy += read(&lane.figures.busy);
            sum.again += read(&lane.figures.again);
            sum.alone += read(&lane.figures.alone);
            for (sum, size) in sum.sizes.iter_mut().zip(&lane.figures.sizes) {
                *sum += read(size);
            }
        }
        sum
    }
}

impl Lane {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(self: &Arc<Self>, entry: Entry) -> Result<(), LedgerError> {
        let starts = {
            let mut state = self.state();
            if state.waiting.len() >= QUEUE {
                self.busy();
                return Err(LedgerError::Busy);
            }
            state.waiting.push_back(entry);
            telemetry::LEDGER_QUEUE.add([], 1.0);
            !std::mem::replace(&mut state.working, true)
        };
        if starts {
            let work: BoxFuture<'static, ()> = Box::pin(work(Working { lane: self.clone(), finished: false }));
            self.world.spawn.spawn(work);
        }
        Ok(())
    }

    async fn gather(&self) {
        let (mut seen, mut quiet) = (self.waiting(), 0);
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
            let waiting = self.waiting();
            quiet = if waiting > seen { 0 } else { quiet + 1 };
            if waiting >= BATCH || quiet == QUIET_TURNS {
                return;
            }
            seen = waiting;
        }
    }

    fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// The next batch, in the order of arrival; `None` ends the work. Whoever went away reserves nothing, and whoever
    /// waited too long is told to come back.
    fn take(&self, connection: &mut Option<Connection>) -> Option<Vec<Entry>> {
        let mut state = self.state();
        let (mut batch, mut bodies) = (Vec::new(), 0);
        while batch.len() < BATCH && bodies < BODIES {
            let Some(entry) = state.waiting.pop_front() else { break };
            telemetry::LEDGER_QUEUE.add([], -1.0);
            if entry.is_forgotten() {
                continue;
            }
            if entry.since().elapsed() > WAIT {
                self.busy();
                entry.fail(&LedgerError::Busy);
                continue;
            }
            bodies += entry.body_len();
            batch.push(entry);
        }
        if batch.is_empty() {
            state.connection = connection.take();
            state.working = false;
            return None;
        }
        Some(batch)
    }

    fn busy(&self) {
        add(&self.figures.busy, 1);
        telemetry::LEDGER_BUSY.one([]);
    }

    fn count(&self, batch: usize) {
        telemetry::LEDGER_BATCH.observe([], batch as f64);
        add(&self.figures.batches, 1);
        add(&self.figures.entries, batch);
        let size = LaneFigures::BOUNDS.iter().position(|bound| u64::try_from(batch).is_ok_and(|n| n <= *bound));
        if let Some(size) = size.and_then(|at| self.figures.sizes.get(at)) {
            add(size, 1);
        }
    }
}

/// The one task of a lane. When it is dropped in the middle, its callers ask for themselves.
struct Working {
    lane: Arc<Lane>,
    finished: bool,
}

impl Drop for Working {
    fn drop(&mut self) {
        if !self.finished {
            let mut state = self.lane.state();
            telemetry::LEDGER_QUEUE.add([], -(state.waiting.len() as f64));
            state.waiting.clear();
            state.working = false;
        }
    }
}

async fn work(mut working: Working) {
    let lane = working.lane.clone();
    let mut connection = lane.state().connection.take();
    loop {
        // No timer: a wait makes rate and latency worse.
        lane.gather().await;
        let Some(batch) = lane.take(&mut connection) else {
            working.finished = true;
            return;
        };
        lane.count(batch.len());
        batch::run(&lane, &mut connection, batch).await;
    }
}
