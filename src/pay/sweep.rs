//! The sweep: whatever became of the one that made a payment, its row comes to an end on the chain's evidence, and on
//! nothing else (the Sweep table of `docs/outcomes.md`).
//!
//! A pass leases rows that are due, asks the chain, and writes what it proves. No ledger transaction is open meanwhile,
//! and every process with a signer may sweep: a row has one lease, and a sweep that lost it writes nothing more.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::chain::stellar::{NonceQuestion, Stellar};
use crate::chain::{NonceReading, Question};
use crate::ledger::{
    Evidence, Lease, Ledger, LedgerError, LedgerResult, Payment, Reason, SettleOutcome, SettleRequest, State,
};
use crate::money::{Network, PaymentId};
use crate::ports::World;
use crate::telemetry;

/// Rows of one pass that are read at the same time.
const SIDE_BY_SIDE: u32 = 8;
/// The chain is read within this, or proves nothing.
const READ_WITHIN: Duration = Duration::from_secs(45);
/// The transaction of a used nonce is found within this, or left unnamed.
const FIND_WITHIN: Duration = Duration::from_secs(15);
/// Both, twice (another payment's nonce may have to be read too), and the ledger's statements around them.
const LEASE: Duration = Duration::from_secs(150);
/// A row is looked at again after its own age, between the interval and these.
const LONGEST_OPEN: Duration = Duration::from_secs(60);
const LONGEST_INCONCLUSIVE: Duration = Duration::from_secs(300);
/// What a ledger is taken to last where nothing was measured, and the longest that is believed.
const LEDGER_MS: u64 = 6_000;
const LONGEST_LEDGER_MS: u64 = 15_000;
/// An authorization whose end nobody could prove for so long after it needs a human.
const ALERT_AFTER_MS: u64 = 3_600_000;
/// Every so many passes what has expired is removed.
const TIDY_EVERY: u64 = 30;

#[derive(Debug, Clone)]
pub struct SweepSettings {
    /// Between two passes.
    pub interval: Duration,
    /// Rows of one pass.
    pub batch: u32,
}

impl Default for SweepSettings {
    fn default() -> Self {
        SweepSettings { interval: Duration::from_secs(10), batch: 32 }
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
    /// Somebody else closed or leased them meanwhile.
    pub lost: u64,
    /// The ledger failed: the next pass after their lease has them again.
    pub failed: u64,
}

pub struct Sweep {
    parts: SweepParts,
    passes: AtomicU64,
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

/// The ledger's clock, read once and carried on.
#[derive(Clone, Copy)]
struct Now {
    ledger_ms: u64,
    at: Instant,
}

impl Now {
    fn ms(self) -> u64 {
        self.ledger_ms.saturating_add(ms(self.at.elapsed()))
    }
}

impl Sweep {
    pub fn new(parts: SweepParts) -> Sweep {
        Sweep { parts, passes: AtomicU64::new(0) }
    }

    /// Passes until `shutdown`. A row that is being read then is given back.
    pub async fn run(self, shutdown: CancellationToken) {
        let interval = self.parts.settings.interval;
        loop {
            // Processes that start together do not ask together.
            let pause = interval.mul_f64(0.9).saturating_add(Duration::from_millis(self.jitter_ms(ms(interval) / 5)));
            if let Either::Right(_) = select(pin!(sleep(pause)), pin!(shutdown.cancelled())).await {
                return;
            }
            self.pass_until(&shutdown).await;
            if shutdown.is_cancelled() {
                return;
            }
        }
    }

    /// One look at everything that is due.
    pub async fn pass(&self) -> SweepReport {
        self.pass_until(&CancellationToken::new()).await
    }

    async fn pass_until(&self, stop: &CancellationToken) -> SweepReport {
        let mut report = SweepReport::default();
        let batch = u64::from(self.parts.settings.batch);
        while report.taken < batch && !stop.is_cancelled() {
            let asked = SIDE_BY_SIDE.min(u32::try_from(batch - report.taken).unwrap_or(SIDE_BY_SIDE));
            let rows = match self.take(asked).await {
                Ok(rows) => rows,
                Err(error) => {
                    tracing::warn!(%error, "the sweep could not take what is due");
                    report.failed += 1;
                    break;
                }
            };
            let (Some(now), rows) = rows else { break };
            let taken = u64::try_from(rows.len()).unwrap_or(u64::MAX);
            report.taken = report.taken.saturating_add(taken);
            for end in join_all(rows.iter().map(|(row, lease)| self.one(row, lease, now, stop))).await {
                report.count(end);
            }
            if taken < u64::from(asked) {
                break;
            }
        }
        if self.passes.fetch_add(1, Ordering::Relaxed).is_multiple_of(TIDY_EVERY) {
            self.tidy().await;
        }
        self.tell(report).await;
        report
    }

    async fn take(&self, limit: u32) -> Result<(Option<Now>, Vec<(Payment, Lease)>), LedgerError> {
        let rows = self.parts.ledger.take_due(limit, ms(LEASE)).await?;
        if rows.is_empty() {
            return Ok((None, rows));
        }
        let ledger_ms = self.parts.ledger.now_ms().await?;
        Ok((Some(Now { ledger_ms, at: Instant::now() }), rows))
    }

    async fn one(&self, row: &Payment, lease: &Lease, now: Now, stop: &CancellationToken) -> End {
        let looked = match select(pin!(look(&self.parts.chains, row)), pin!(stop.cancelled())).await {
            Either::Left((looked, _)) => looked,
            Either::Right(_) => return self.again(row, lease, now.ms(), End::Open).await,
        };
        let id = row.payment_id;
        match &looked.reading {
            NonceReading::Used { .. } => self.settle(row, looked.transaction.as_deref()).await,
            NonceReading::Dead => self.expire(row, lease, Reason::ExpiredUnspent).await,
            NonceReading::Cancelled => self.expire(row, lease, Reason::NonceCancelled).await,
            NonceReading::Open => {
                let least = ms(self.parts.settings.interval);
                let left = remaining_ms(row, looked.newest, now.ms());
                let wait = backoff_ms(row, now.ms(), least, LONGEST_OPEN).min(left).max(least.min(2_000));
                self.again(row, lease, now.ms().saturating_add(self.jittered(wait)), End::Open).await
            }
            NonceReading::Inconclusive(why) => {
                let overdue = now.ms() > overdue_ms(row);
                if overdue {
                    tracing::error!(payment = %id.short(), network = %row.network, why,
                        "ALERT the end of a payment cannot be proved: see tollway reservations resolve");
                } else {
                    tracing::warn!(payment = %id.short(), network = %row.network, why, "the chain proves nothing yet");
                }
                let least = ms(self.parts.settings.interval);
                let wait = backoff_ms(row, now.ms(), least, LONGEST_INCONCLUSIVE);
                self.again(row, lease, now.ms().saturating_add(self.jittered(wait)), End::Inconclusive { overdue })
                    .await
            }
        }
    }

    /// The nonce's entry exists only where our signed transfer ran, and `exact` moves its whole amount.
    async fn settle(&self, row: &Payment, transaction: Option<&str>) -> End {
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
                let other = self.other(by).await;
                tracing::error!(payment = %id.short(), transaction, other = %by.short(), other_on_chain = other,
                    "ALERT the transaction of this payment is booked for another one: settled without it");
                match self.parts.ledger.settle(SettleRequest { transaction: None, ..request }).await {
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
    async fn other(&self, by: PaymentId) -> &'static str {
        match self.parts.ledger.show(&by.to_hex()).await {
            Ok(Some((other, _))) => match look(&self.parts.chains, &other).await.reading {
                NonceReading::Used { .. } => "used",
                NonceReading::Open => "unused, alive",
                NonceReading::Dead | NonceReading::Cancelled => "never used",
                NonceReading::Inconclusive(_) => "not proved",
            },
            Ok(None) | Err(_) => "not read",
        }
    }

    async fn expire(&self, row: &Payment, lease: &Lease, reason: Reason) -> End {
        let written = self.parts.ledger.expire(row.payment_id, lease, reason);
        let end = self.written(row, written, End::Released).await;
        if matches!(end, End::Released) {
            tracing::info!(payment = %row.payment_id.short(), reason = reason.as_str(),
                "the chain shows that it was not paid and cannot be any more: released");
        }
        end
    }

    async fn again(&self, row: &Payment, lease: &Lease, due_ms: u64, end: End) -> End {
        self.written(row, self.parts.ledger.look_again(row.payment_id, lease, due_ms), end).await
    }

    async fn written(&self, row: &Payment, statement: LedgerResult<'_, bool>, end: End) -> End {
        match statement.await {
            Ok(true) => end,
            Ok(false) => End::Lost,
            Err(error) => failed(row, &error),
        }
    }

    async fn tidy(&self) {
        match self.parts.ledger.tidy().await {
            Ok(tidied) => tracing::debug!(?tidied, "what had expired was removed"),
            Err(error) => tracing::warn!(%error, "what has expired could not be removed"),
        }
    }

    /// How many payments are open, and how old the oldest is.
    async fn tell(&self, report: SweepReport) {
        report.counted();
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
        let SweepReport { taken, settled, released, inconclusive, lost, failed, .. } = report;
        if settled + released + inconclusive + lost + failed > 0 {
            tracing::info!(
                open_payments = open.count(),
                oldest_open_seconds = oldest,
                taken,
                settled,
                released,
                inconclusive,
                lost,
                failed,
                "swept"
            );
        } else {
            tracing::debug!(open_payments = open.count(), oldest_open_seconds = oldest, taken, "swept");
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

    fn counted(&self) {
        let SweepReport { taken: _, settled, released, open, inconclusive, overdue, lost, failed } = *self;
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

/// What the chain shows about a payment, within bounded time.
pub async fn look(chains: &BTreeMap<Network, Arc<Stellar>>, row: &Payment) -> Look {
    let proves_nothing =
        |why: String| Look { reading: NonceReading::Inconclusive(why), transaction: None, newest: None };
    let Some(chain) = chains.get(&row.network) else {
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
    let Ok((reading, newest)) = timeout(READ_WITHIN, reading).await else {
        return proves_nothing(format!("the chain was not read within {} s", READ_WITHIN.as_secs()));
    };
    let transaction = match reading {
        NonceReading::Used { ledger } => {
            let ledger = u32::try_from(ledger).unwrap_or(u32::MAX);
            timeout(FIND_WITHIN, chain.transaction_of(question, ledger)).await.ok().flatten()
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
fn backoff_ms(row: &Payment, now_ms: u64, least_ms: u64, most: Duration) -> u64 {
    now_ms.saturating_sub(row.created_ms).min(ms(most)).max(least_ms)
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
