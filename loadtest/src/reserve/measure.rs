//! Closed loops: each caller makes its next call when the last one is answered. A first second is not counted.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::report::{Result, Stopped};

const WARM: Duration = Duration::from_secs(1);

/// Of one run: answers a second, and milliseconds from call to answer.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub rate: f64,
    pub p50: f64,
    pub p99: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0}/s (p50 {:.2} ms, p99 {:.2} ms)", self.rate, self.p50, self.p99)
    }
}

/// When what is measured begins and ends.
#[derive(Clone, Copy)]
struct Span {
    from: Instant,
    until: Instant,
}

impl Span {
    fn of(seconds: Duration) -> Span {
        let from = Instant::now() + WARM;
        Span { from, until: from + seconds }
    }

    fn over(self) -> bool {
        Instant::now() >= self.until
    }

    /// Keeps the time of a call that ended within it.
    fn count(self, began: Instant, times: &mut Vec<Duration>) {
        let ended = Instant::now();
        if ended >= self.from && ended < self.until {
            times.push(ended - began);
        }
    }

    fn measured(self, times: Vec<Vec<Duration>>) -> Measured {
        let mut times: Vec<f64> = times.into_iter().flatten().map(|time| time.as_secs_f64() * 1e3).collect();
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
        Measured { rate: times.len() as f64 / (self.until - self.from).as_secs_f64(), p50: at(0.5), p99: at(0.99) }
    }
}

pub mod lanes {
    use tollway::ledger::postgres::PostgresLedger;
    use tollway::ledger::{Decision, Evidence, Ledger, SettleOutcome, SettleRequest};
    use tollway::money::{Amount, PaymentId};

    use super::super::rows::hex;
    use super::super::work::{AMOUNT, Work};
    use super::*;

    /// Through the trait, as the paid call does. Of pairs a pair is counted once, with its whole time.
    pub async fn run(
        ledger: &Arc<PostgresLedger>,
        work: &Work,
        callers: usize,
        pairs: bool,
        seconds: Duration,
    ) -> Result<Measured> {
        let span = Span::of(seconds);
        let work = Arc::new(work.again());
        let tasks = (0..callers).map(|_| tokio::spawn(caller(ledger.clone(), work.clone(), pairs, span)));
        let tasks: Vec<_> = tasks.collect();
        let mut times = Vec::with_capacity(callers);
        for task in join_all(tasks).await {
            times.push(task.map_err(|e| Stopped(format!("a caller: {e}")))??);
        }
        Ok(span.measured(times))
    }

    async fn caller(ledger: Arc<PostgresLedger>, work: Arc<Work>, pairs: bool, span: Span) -> Result<Vec<Duration>> {
        let ledger: &dyn Ledger = &*ledger;
        let mut times = Vec::new();
        while !span.over() {
            let draw = work.draw();
            let intent = work.intent(&draw);
            let began = Instant::now();
            match ledger.decide(&intent).await {
                Ok(Decision::Fresh(_)) => {}
                other => return Err(Stopped(format!("a reservation: {other:?}"))),
            }
            if pairs {
                let transaction = hex(&draw.call_hash);
                let request = SettleRequest {
                    payment_id: PaymentId::from_bytes(draw.id),
                    amount: Amount::from_u64(AMOUNT),
                    transaction: Some(&transaction),
                    evidence: Evidence::Receipt,
                    outcome: None,
                    unfinished: false,
                };
                match ledger.settle(request).await {
                    Ok(SettleOutcome::Settled) => {}
                    other => return Err(Stopped(format!("a settlement: {other:?}"))),
                }
            }
            span.count(began, &mut times);
        }
        Ok(times)
    }
}

pub mod plain {
    use super::super::rows::Rows;
    use super::super::work::Work;
    use super::*;

    #[derive(Debug, Clone, Copy)]
    pub enum Kind {
        Reserve,
        Pairs,
        Insert,
    }

    /// Each connection with a caller of its own.
    pub async fn run(connections: &[Rows], work: &Work, kind: Kind, seconds: Duration) -> Result<Measured> {
        let span = Span::of(seconds);
        let caller = async |rows: &Rows| -> std::result::Result<Vec<Duration>, tokio_postgres::Error> {
            let mut times = Vec::new();
            while !span.over() {
                let draw = work.draw();
                let began = Instant::now();
                match kind {
                    Kind::Reserve => rows.reserve(&draw).await?,
                    Kind::Insert => rows.insert(&draw).await?,
                    Kind::Pairs => {
                        rows.reserve(&draw).await?;
                        rows.settle(&draw).await?;
                    }
                }
                span.count(began, &mut times);
            }
            Ok(times)
        };
        let mut times = Vec::new();
        for done in join_all(connections.iter().map(caller)).await {
            times.push(done.map_err(|e| Stopped(format!("row at a time: {e:?}")))?);
        }
        Ok(span.measured(times))
    }
}
