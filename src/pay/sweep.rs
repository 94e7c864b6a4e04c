//! The sweep: whatever became of the one that made a payment, its row comes to an end on the chain's evidence, and on
//! nothing else (the Sweep table of `docs/outcomes.md`).
//!
//! A pass leases rows that are due, asks the chain, and writes what it proves. No ledger transaction is open meanwhile,
//! and every process with a signer may sweep: a row has one lease, and a sweep whose lease is over writes nothing more.
//! Each network has passes of its own, so none waits for another's RPC, and of one network the agents take turns. Its
//! RPCs get at most so many requests a second from each process.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, Either, join, join_all, select};
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::bounds::{Bounds, Deadlines};
use crate::chain::stellar::{NonceQuestion, Stellar};
use crate::chain::{NonceReading, Question};
use crate::ledger::{
    Evidence, Lease, Ledger, LedgerError, LedgerResult, On, Payment, Reason, SettleOutcome, SettleRequest, State,
};
use crate::money::{Network, PaymentId};
use crate::ports::World;
use crate::telemetry;

/// Rows of one network that one pass takes; what is due beyond them waits for the next.
const MOST_PER_PASS: u64 = 1_000;
/// A row is looked at again after its own age, where nothing could be told a quarter of it, between the interval and these.
const LONGEST_OPEN: Duration = Duration::from_secs(60);
const LONGEST_INCONCLUSIVE: Duration = Duration::from_secs(300);
/// What a ledger is taken to last where nothing was measured, and the longest that is believed.
const LEDGER_MS: u64 = 6_000;
const LONGEST_LEDGER_MS: u64 = 15_000;
/// An authorization whose end nobody could prove for so long after it needs a human.
const ALERT_AFTER_MS: u64 = 3_600_000;
/// Every so many looks at the whole ledger what has expired is removed.
const TIDY_EVERY: u64 = 30;

#[derive(Debug, Clone)]
pub struct SweepSettings {
    /// Between two passes.
    pub interval: Duration,
    /// Of one request to an RPC, as its client has it: the lease follows from it (see [`Bounds`]).
    pub rpc_timeout: Duration,
    /// Requests to all RPCs of a network together, from this process. All processes of a cluster send at most so many
    /// times their number.
    pub rpc_per_second: u32,
}

impl Default for SweepSettings {
    fn default() -> Self {
        SweepSettings { interval: Duration::from_secs(10), rpc_timeout: Duration::from_secs(15), rpc_per_second: 20 }
    }
}

pub struct SweepParts {
    pub world: World,
    pub ledger: Arc<dyn Ledger>,
    /// Every network that can be asked, whether or not it may still be paid on.
    pub chains: BTreeMap<Network, Arc<Stellar>>,
    pub settings: SweepSettings,
}

/// What became of the rows of one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepReport {
    pub taken: u64,
    pub settled: u64,
    pub released: u64,
    /// Alive and unused: looked at again.
    pub open: u64,
    /// Nothing was proved: looked at again.
    pub inconclusive: u64,
    /// Of these: so long after the authorization's end that a human is called.
    pub overdue: u64,
    /// Somebody else closed or leased them meanwhile, or our lease had ended.
    pub lost: u64,
    /// The ledger failed: the next pass after their lease has them again.
    pub failed: u64,
}

pub struct Sweep {
    parts: SweepParts,
    lanes: Vec<Lane>,
    looks: AtomicU64,
}

/// One network, and what is asked of it.
struct Lane {
    /// `None`: of the networks that nobody here can ask. Their rows are looked at too, so that somebody is called.
    chain: Option<(Network, Stellar)>,
    bounds: Bounds,
}

/// What the chain showed about one payment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    pub reading: NonceReading,
    /// Of a used nonce, where it can be found.
    pub transaction: Option<String>,
    /// Stellar: the newest ledger; of an open authorization.
    pub newest: Option<u64>,
}

enum End {
    Settled,
    Released,
    Open,
    Inconclusive { overdue: bool },
    Lost,
    Failed,
}

enum Step {
    /// So many were asked for.
    Taken(u32, Result<Vec<Job>, LedgerError>),
    Ended(End),
}

/// A leased row, the ledger's clock as the lease tells it, and until when the holder may act.
struct Job {
    row: Payment,
    lease: Lease,
    granted_ms: u64,
    granted: Instant,
    until: Deadlines,
}

impl Job {
    fn now_ms(&self) -> u64 {
        self.granted_ms.saturating_add(ms(self.granted.elapsed()))
    }

    /// Another may have the row by now.
    fn is_over(&self) -> bool {
        Instant::now() >= self.until.end
    }
}

impl Sweep {
    pub fn new(mut parts: SweepParts) -> Sweep {
        let SweepSettings { rpc_timeout, rpc_per_second, .. } = parts.settings;
        let bounds = |rpcs| Bounds::new(rpc_timeout, rpcs, rpc_per_second);
        let mut lanes = Vec::new();
        for (network, chain) in std::mem::take(&mut parts.chains) {
            let chain = chain.paced(rpc_per_second);
            let bounds = bounds(chain.rpcs());
            lanes.push(Lane { chain: Some((network, chain)), bounds });
        }
        lanes.push(Lane { chain: None, bounds: bounds(1) });
        Sweep { parts, lanes, looks: AtomicU64::new(0) }
    }

    /// Passes until `shutdown`. A row that is being read then is given back.
    pub async fn run(self, shutdown: CancellationToken) {
        let lanes = join_all(self.lanes.iter().map(async |lane| {
            while self.pause(&shutdown).await {
                self.pass_of(lane, &shutdown).await;
            }
        }));
        let whole = async {
            while self.pause(&shutdown).await {
                self.look_at_all().await;
            }
        };
        join(lanes, whole).await;
    }

    /// `false`: it is over.
    async fn pause(&self, shutdown: &CancellationToken) -> bool {
        let interval = self.parts.settings.interval;
        // Processes that start together do not ask together.
        let pause = interval.mul_f64(0.9).saturating_add(Duration::from_millis(self.jitter_ms(ms(interval) / 5)));
        select(pin!(sleep(pause)), pin!(shutdown.cancelled())).await;
        !shutdown.is_cancelled()
    }

    /// One look at everything that is due.
    pub async fn pass(&self) -> SweepReport {
        let never = CancellationToken::new();
        let reports = join_all(self.lanes.iter().map(|lane| self.pass_of(lane, &never))).await;
        self.look_at_all().await;
        reports.into_iter().fold(SweepReport::default(), SweepReport::and)
    }

    async fn pass_of(&self, lane: &Lane, stop: &CancellationToken) -> SweepReport {
        let mut report = SweepReport::default();
        let (mut more, mut taking, mut reading) = (true, false, 0);
        // Taking is a step beside the others: who waits for it alone would leave a row's statement open half-way.
        let mut steps: FuturesUnordered<BoxFuture<'_, Step>> = FuturesUnordered::new();
        loop {
            let free = lane.bounds.rows.saturating_sub(reading);
            // A row that takes long keeps its own place alone.
            let room = free * 2 >= lane.bounds.rows && report.taken < MOST_PER_PASS;
            if more && room && !taking && !stop.is_cancelled() {
                taking = true;
                steps.push(Box::pin(async move { Step::Taken(free, self.take(lane, free).await) }));
            }
            match steps.next().await {
                Some(Step::Ended(end)) => {
                    reading -= 1;
                    report.count(end);
                }
                Some(Step::Taken(asked, Ok(jobs))) => {
                    let taken = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
                    (taking, more, reading) = (false, taken >= asked, reading + taken);
                    report.taken += u64::from(taken);
                    for job in jobs {
                        steps.push(Box::pin(async move { Step::Ended(self.one(lane, job, stop).await) }));
                    }
                }
                Some(Step::Taken(_, Err(error))) => {
                    tracing::warn!(%error, "the sweep could not take what is due");
                    (taking, more) = (false, false);
                    report.failed += 1;
                }
                None => break,
            }
        }
        report.tell(lane);
        report
    }

    async fn take(&self, lane: &Lane, limit: u32) -> Result<Vec<Job>, LedgerError> {
        let known: Vec<Network>;
        let on = match &lane.chain {
            Some((network, _)) => On::One(network),
            None => {
                known = self.lanes.iter().filter_map(|lane| Some(lane.chain.as_ref()?.0.clone())).collect();
                On::Other(&known)
            }
        };
        let (until, lease_ms) = (lane.bounds.from_now(), ms(lane.bounds.lease()));
        let rows = self.parts.ledger.take_due_on(on, limit, lease_ms).await?;
        let granted = Instant::now();
        let job = |(row, lease): (Payment, Lease)| {
            let granted_ms = lease.expires_ms.saturating_sub(lease_ms);
            Job { row, lease, granted_ms, granted, until }
        };
        Ok(rows.into_iter().map(job).collect())
    }

    async fn one(&self, lane: &Lane, job: Job, stop: &CancellationToken) -> End {
        let row = &job.row;
        let chain = lane.chain.as_ref().map(|(_, chain)| chain);
        let begun = Instant::now();
        let looked = match select(pin!(look(chain, row, job.until)), pin!(stop.cancelled())).await {
            Either::Left((looked, _)) => looked,
            Either::Right(_) => return self.again(&job, job.now_ms(), End::Open).await,
        };
        let id = row.payment_id;
        let (least, now) = (ms(self.parts.settings.interval), job.now_ms());
        match &looked.reading {
            NonceReading::Used { .. } => self.settle(lane, &job, looked.transaction.as_deref()).await,
            NonceReading::Dead => self.expire(&job, Reason::ExpiredUnspent).await,
            NonceReading::Cancelled => self.expire(&job, Reason::NonceCancelled).await,
            NonceReading::Open => {
                let left = remaining_ms(row, looked.newest, now);
                let wait = backoff_ms(row, now, least).min(left).max(least.min(2_000));
                self.again(&job, now.saturating_add(self.jittered(wait)), End::Open).await
            }
            // Nothing was learned, so nothing is waited for.
            NonceReading::Inconclusive(_) if !job.until.blame_the_chain(begun, Instant::now()) => {
                self.again(&job, now, End::Open).await
            }
            NonceReading::Inconclusive(why) => {
                let overdue = now > overdue_ms(row);
                if overdue {
                    tracing::error!(payment = %id.short(), network = %row.network, why,
                        "ALERT the end of a payment cannot be proved: see tollway reservations resolve");
                } else {
                    tracing::warn!(payment = %id.short(), network = %row.network, why, "the chain proves nothing yet");
                }
                // Shorter than while it is open: another replica, or an RPC that answers again, may prove it any time, and
                // what the network is asked is bounded elsewhere.
                let wait = (now.saturating_sub(row.created_ms) / 4).min(ms(LONGEST_INCONCLUSIVE)).max(least);
                self.again(&job, now.saturating_add(self.jittered(wait)), End::Inconclusive { overdue }).await
            }
        }
    }

    /// The nonce's entry exists only where our signed transfer ran, and `exact` moves its whole amount.
    async fn settle(&self, lane: &Lane, job: &Job, transaction: Option<&str>) -> End {
        if job.is_over() {
            return End::Lost;
        }
        let row = &job.row;
        let id = row.payment_id;
        let request = SettleRequest {
            payment_id: id,
            amount: row.reserved,
            transaction,
            evidence: Evidence::Chain,
            outcome: None,
            unfinished: false,
        };
        match self.parts.ledger.settle(request).await {
            Ok(SettleOutcome::Settled) => {
                tracing::info!(payment = %id.short(), transaction, "the chain shows that it was paid: settled");
                End::Settled
            }
            Ok(SettleOutcome::Released) => {
                tracing::error!(payment = %id.short(), transaction, "ALERT the chain shows a payment that was released");
                End::Lost
            }
            Ok(SettleOutcome::SettledAs { transaction: booked, .. }) => {
                tracing::error!(payment = %id.short(), transaction, booked,
                    "ALERT a payment was settled meanwhile, with another amount or transaction than the chain shows");
                End::Settled
            }
            Ok(SettleOutcome::TransactionTaken { by }) => {
                let settled = self.parts.ledger.settle(SettleRequest { transaction: None, ..request }).await;
                // Needs no lease: it is only told.
                let other = self.other(lane, by).await;
                tracing::error!(payment = %id.short(), transaction, other = %by.short(), other_on_chain = other,
                    "ALERT the transaction of this payment is booked for another one: settled without it");
                match settled {
                    Ok(SettleOutcome::Settled | SettleOutcome::SettledAs { .. }) => End::Settled,
                    Ok(SettleOutcome::Released | SettleOutcome::TransactionTaken { .. }) => End::Lost,
                    Err(error) => failed(row, &error),
                }
            }
            Err(error) => failed(row, &error),
        }
    }

    /// What the chain shows of the payment that has this one's transaction: if it is unused, a seller's forged receipt
    /// settled it.
    async fn other(&self, lane: &Lane, by: PaymentId) -> &'static str {
        let chain = lane.chain.as_ref().map(|(_, chain)| chain);
        match self.parts.ledger.show(&by.to_hex()).await {
            Ok(Some((other, _))) => match look(chain, &other, lane.bounds.from_now()).await.reading {
                NonceReading::Used { .. } => "used",
                NonceReading::Open => "unused, alive",
                NonceReading::Dead | NonceReading::Cancelled => "never used",
                NonceReading::Inconclusive(_) => "not proved",
            },
            Ok(None) | Err(_) => "not read",
        }
    }

    async fn expire(&self, job: &Job, reason: Reason) -> End {
        let written = self.parts.ledger.expire(job.row.payment_id, &job.lease, reason);
        let end = self.written(job, written, End::Released).await;
        if matches!(end, End::Released) {
            tracing::info!(payment = %job.row.payment_id.short(), reason = reason.as_str(),
                "the chain shows that it was not paid and cannot be any more: released");
        }
        end
    }

    async fn again(&self, job: &Job, due_ms: u64, end: End) -> End {
        self.written(job, self.parts.ledger.look_again(job.row.payment_id, &job.lease, due_ms), end).await
    }

    async fn written(&self, job: &Job, statement: LedgerResult<'_, bool>, end: End) -> End {
        if job.is_over() {
            return End::Lost;
        }
        match statement.await {
            Ok(true) => end,
            Ok(false) => End::Lost,
            Err(error) => failed(&job.row, &error),
        }
    }

    async fn tidy(&self) {
        match self.parts.ledger.tidy().await {
            Ok(tidied) => tracing::debug!(?tidied, "what had expired was removed"),
            Err(error) => tracing::warn!(%error, "what has expired could not be removed"),
        }
    }

    /// How many payments are open, and how old the oldest is; now and then that is told, and what has expired removed.
    async fn look_at_all(&self) {
        let tells = self.looks.fetch_add(1, Ordering::Relaxed).is_multiple_of(TIDY_EVERY);
        if tells {
            self.tidy().await;
        }
        let (open, now) = match (self.parts.ledger.open_rows().await, self.parts.ledger.now_ms().await) {
            (Ok(open), Ok(now)) => (open, now),
            (Err(error), _) | (_, Err(error)) => {
                tracing::warn!(%error, "open payments could not be counted");
                return;
            }
        };
        let seconds = |created: u64| now.saturating_sub(created) / 1000;
        for (state, holds) in [(State::Reserved, open.reserved), (State::InDoubt, open.in_doubt)] {
            let oldest = holds.oldest_created_ms.map_or(0, seconds);
            telemetry::HOLDS.set([state.as_str()], holds.count as f64);
            telemetry::OLDEST_HOLD.set([state.as_str()], oldest as f64);
        }
        let oldest = open.oldest_created_ms().map_or(0, seconds);
        if tells && open.count() > 0 {
            tracing::info!(open_payments = open.count(), oldest_open_seconds = oldest, "payments are open");
        }
    }

    /// A tenth more or less.
    fn jittered(&self, wait_ms: u64) -> u64 {
        (wait_ms - wait_ms / 10).saturating_add(self.jitter_ms(wait_ms / 5))
    }

    fn jitter_ms(&self, below: u64) -> u64 {
        u64::from_be_bytes(self.parts.world.random()) % below.max(1)
    }
}

impl SweepReport {
    fn count(&mut self, end: End) {
        self.overdue += u64::from(matches!(end, End::Inconclusive { overdue: true }));
        let counter = match end {
            End::Settled => &mut self.settled,
            End::Released => &mut self.released,
            End::Open => &mut self.open,
            End::Inconclusive { .. } => &mut self.inconclusive,
            End::Lost => &mut self.lost,
            End::Failed => &mut self.failed,
        };
        *counter += 1;
    }

    fn and(self, other: SweepReport) -> SweepReport {
        SweepReport {
            taken: self.taken + other.taken,
            settled: self.settled + other.settled,
            released: self.released + other.released,
            open: self.open + other.open,
            inconclusive: self.inconclusive + other.inconclusive,
            overdue: self.overdue + other.overdue,
            lost: self.lost + other.lost,
            failed: self.failed + other.failed,
        }
    }

    fn tell(&self, lane: &Lane) {
        let SweepReport { taken, settled, released, open, inconclusive, overdue, lost, failed } = *self;
        if settled + released + inconclusive + lost + failed > 0 {
            let network = lane.chain.as_ref().map_or("others", |(network, _)| network.as_str());
            tracing::info!(network, taken, settled, released, open, inconclusive, lost, failed, "swept");
        }
        telemetry::SWEEP_PASSES.one([]);
        for (result, rows) in [
            ("settled", settled),
            ("released", released),
            ("open", open),
            ("inconclusive", inconclusive),
            ("overdue", overdue),
            ("lost", lost),
            ("failed", failed),
        ] {
            telemetry::SWEPT.add([result], rows);
        }
    }
}

fn failed(row: &Payment, error: &LedgerError) -> End {
    tracing::warn!(payment = %row.payment_id.short(), %error, "what the chain shows could not be written");
    End::Failed
}

/// What the chain shows about a payment, within bounded time. `None`: it cannot be asked.
pub async fn look(chain: Option<&Stellar>, row: &Payment, until: Deadlines) -> Look {
    let proves_nothing =
        |why: String| Look { reading: NonceReading::Inconclusive(why), transaction: None, newest: None };
    let Some(chain) = chain else {
        return proves_nothing(format!("no RPC is configured for {}", row.network));
    };
    let Question::Stellar(question) = match question(row) {
        Ok(question) => question,
        Err(why) => return proves_nothing(why.to_owned()),
    };
    let reading = async {
        let reading = chain.nonce_reading(question).await;
        let newest = match reading {
            NonceReading::Open => chain.ledger().await.ok().map(|point| u64::from(point.sequence)),
            _ => None,
        };
        (reading, newest)
    };
    let begun = Instant::now();
    let Ok((reading, newest)) = timeout_at(until.read, reading).await else {
        return proves_nothing(format!("the chain was not read within {} s", begun.elapsed().as_secs()));
    };
    let transaction = match reading {
        NonceReading::Used { ledger } => {
            let ledger = u32::try_from(ledger).unwrap_or(u32::MAX);
            timeout_at(until.find, chain.transaction_of(question, ledger)).await.ok().flatten()
        }
        _ => None,
    };
    Look { reading, transaction, newest }
}

/// The row's question, in the terms of its chain.
pub fn question(row: &Payment) -> Result<Question<'_>, &'static str> {
    let authorization = &row.authorization;
    match row.network.namespace() {
        "stellar" => Ok(Question::Stellar(NonceQuestion {
            payer: &authorization.payer,
            pay_to: &row.pay_to,
            asset: row.asset.as_str(),
            nonce: authorization.nonce.parse().map_err(|_| "the row's nonce is not a number")?,
            amount: None,
            expiration: u32::try_from(authorization.dead_after).map_err(|_| "the row's expiration is no ledger")?,
            reserved_at: u32::try_from(authorization.at).map_err(|_| "the row's start is no ledger")?,
            reserved_ms: row.created_ms,
        })),
        _ => Err("this build cannot ask the payment's network"),
    }
}

/// When the authorization ends about, unix milliseconds: an estimate that decides nothing about money.
pub fn ends_about_ms(row: &Payment) -> u64 {
    let ledgers = row.authorization.dead_after.saturating_sub(row.authorization.at);
    row.created_ms.saturating_add(ledgers.saturating_mul(LEDGER_MS))
}

/// From then on a payment whose end nobody could prove needs a human: no network is so slow.
pub fn overdue_ms(row: &Payment) -> u64 {
    ends_about_ms(row).saturating_add(ALERT_AFTER_MS)
}

/// Until the authorization's end, at the pace that the chain has had since the reservation.
fn remaining_ms(row: &Payment, newest: Option<u64>, now_ms: u64) -> u64 {
    let authorization = &row.authorization;
    let newest = newest.unwrap_or(authorization.at);
    let passed = newest.saturating_sub(authorization.at);
    let pace = match now_ms.saturating_sub(row.created_ms).checked_div(passed) {
        Some(pace) => pace.clamp(1, LONGEST_LEDGER_MS),
        None => LEDGER_MS,
    };
    authorization.dead_after.saturating_sub(newest).max(1).saturating_mul(pace)
}

/// As long as the row is old.
fn backoff_ms(row: &Payment, now_ms: u64, least_ms: u64) -> u64 {
    now_ms.saturating_sub(row.created_ms).min(ms(LONGEST_OPEN)).max(least_ms)
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
