//! One transaction, and what is done when it fails.
//!
//! Works behind a pooler in transaction mode (`wire`): the session holds no state of ours between two transactions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{Row, RowStream, SimpleQueryMessage};

use super::PostgresLedger;
use super::connect::no_connection;
pub(super) use super::wire::Param;
use super::wire::{COMMIT, Session};
use crate::ledger::LedgerError;

/// Repetitions of a transaction that certainly had no effect.
const AGAIN: u8 = 2;
/// An outcome that is unknown is asked for again for so long.
const UNKNOWN: Duration = Duration::from_secs(10);
/// While a standby is promoted no server takes writes: what has had no effect is tried again for so long.
const PROMOTION: Duration = Duration::from_secs(5);
/// Between two of such tries.
const PAUSE: Duration = Duration::from_millis(50);

/// The advisory lock that a transaction takes before anything else.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    None,
    /// Of a decision, which `suspend` waits for, and of whatever moves a counter.
    Shared,
    /// Of `suspend`: it returns when no earlier decision is under way.
    Exclusive,
    /// Of a change of limits: one at a time, so that none is made upon rows that another is replacing.
    Limits,
}

impl Gate {
    /// One lock per schema: two Tollways in one database do not wait for each other.
    pub(super) fn sql(self) -> &'static str {
        match self {
            Gate::None => "",
            Gate::Shared => {
                "SELECT pg_advisory_xact_lock_shared(hashtext('tollway gate'), hashtext(current_schema()));"
            }
            Gate::Exclusive => "SELECT pg_advisory_xact_lock(hashtext('tollway gate'), hashtext(current_schema()));",
            Gate::Limits => "SELECT pg_advisory_xact_lock(hashtext('tollway limits'), hashtext(current_schema()));",
        }
    }
}

/// An open transaction. Dropped without [`Tx::commit`] it is rolled back.
pub(super) struct Tx {
    session: Option<Session>,
    patience: Duration,
    /// The server did not answer in time: the connection is not used again.
    silent: AtomicBool,
    /// The ledger's time at the begin, or at the last [`Tx::look_at_the_clock`].
    pub now: u64,
}

/// Never behind the newest event: a standby that took over may have another clock.
pub(super) const NOW: &str =
    "SELECT GREATEST(tollway_now(), COALESCE((SELECT at FROM payment_events ORDER BY id DESC LIMIT 1), 0))";

impl PostgresLedger {
    pub(super) async fn begin(&self, gate: Gate) -> Result<Tx, Fault> {
        let (lock, statement) = (self.options.lock_timeout, self.options.statement_timeout);
        let (lock, statement) = match gate {
            // Longer than any transaction that it waits for.
            Gate::Exclusive => (self.wire.alone(), self.wire.alone()),
            Gate::None | Gate::Shared | Gate::Limits => (lock, statement),
        };
        let begin = format!("{} {} {NOW}", self.wire.begin_with(lock, statement), gate.sql());
        self.begin_with(&begin, statement).await
    }

    /// Reads one snapshot. `long`: what a whole table may take.
    pub(super) async fn snapshot(&self, long: Duration) -> Result<Tx, Fault> {
        let begin = format!("{} {NOW}", self.wire.begin_snapshot(long));
        self.begin_with(&begin, long).await
    }

    async fn begin_with(&self, begin: &str, statement: Duration) -> Result<Tx, Fault> {
        let _queued = self.queue.try_acquire().map_err(|_| LedgerError::Busy)?;
        let client = self.pool.get().await.map_err(no_connection)?;
        // The server gives up before we do, unless it is gone.
        let mut tx = Tx {
            session: Some(self.wire.session(client)),
            patience: statement + Duration::from_secs(3),
            silent: AtomicBool::new(false),
            now: 0,
        };
        let said = tx.within(tx.session()?.simple(begin)).await?;
        let now = said.iter().rev().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        tx.now = now.and_then(|now| now.parse().ok()).ok_or_else(no_time)?;
        Ok(tx)
    }
}

fn no_time() -> LedgerError {
    LedgerError::Inconsistent("the database's time cannot be read".to_owned())
}

impl Tx {
    fn session(&self) -> Result<&Session, LedgerError> {
        self.session.as_ref().ok_or_else(|| LedgerError::Unavailable("the transaction is over".to_owned()))
    }

    async fn within<T>(&self, doing: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, Fault> {
        match tokio::time::timeout(self.patience, doing).await {
            Ok(done) => done.map_err(|error| {
                // After a fail-over or a change of its settings: what waits in the pool takes no writes either.
                if error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION) {
                    self.silent.store(true, Ordering::Relaxed);
                }
                fault(error)
            }),
            Err(_) => {
                self.silent.store(true, Ordering::Relaxed);
                Err(LedgerError::Unavailable("the database does not answer".to_owned()).into())
            }
        }
    }

    pub async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Fault> {
        self.within(self.session()?.rows(sql, params)).await
    }

    pub async fn row(&self, sql: &str, params: &[Param<'_>]) -> Result<Option<Row>, Fault> {
        let mut rows = self.rows(sql, params).await?;
        match rows.len() {
            0 | 1 => Ok(rows.pop()),
            n => Err(LedgerError::Inconsistent(format!("{n} rows where one was asked for")).into()),
        }
    }

    /// Row by row.
    pub async fn stream(&self, sql: &str) -> Result<RowStream, Fault> {
        self.within(self.session()?.stream(sql)).await
    }

    /// How many rows it touched.
    pub async fn run(&self, sql: &str, params: &[Param<'_>]) -> Result<u64, Fault> {
        self.within(self.session()?.run(sql, params)).await
    }

    /// A transition hits one row: it was read under its lock, so anything else is a bug.
    pub async fn run_one(&self, sql: &str, params: &[Param<'_>]) -> Result<(), Fault> {
        match self.run(sql, params).await? {
            1 => Ok(()),
            n => Err(LedgerError::Inconsistent(format!("a transition hit {n} rows")).into()),
        }
    }

    /// After a lock was waited for, the time of the begin is old.
    pub async fn look_at_the_clock(&mut self) -> Result<(), Fault> {
        let row = self.row(NOW, &[]).await?.ok_or_else(no_time)?;
        let now: i64 = row.try_get(0).map_err(fault)?;
        self.now = u64::try_from(now).map_err(|_| no_time())?;
        Ok(())
    }

    /// Also the end of a transaction that only read. From the moment when COMMIT may have been sent, only its answer
    /// tells whether it took effect.
    pub async fn commit(mut self) -> Result<(), Fault> {
        let session = self.session.take().ok_or_else(no_time)?;
        let unknown =
            || LedgerError::Unavailable("the connection was lost while a transaction was committed".to_owned());
        match tokio::time::timeout(self.patience, session.batch(COMMIT)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if error.as_db_error().is_some_and(|e| e.parsed_severity() == Some(Severity::Error)) => {
                // It may be open still, for the drop to roll back.
                self.session = Some(session);
                Err(fault(error))
            }
            Ok(Err(_)) | Err(_) => {
                session.discard();
                Err(Fault::Unknown(unknown()))
            }
        }
    }
}

impl Drop for Tx {
    /// The rollback is put on the wire without waiting for its answer; whoever has the connection next stands behind it.
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        let queued = {
            let mut rollback = std::pin::pin!(session.batch("ROLLBACK"));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            !self.silent.load(Ordering::Relaxed)
                && !matches!(rollback.as_mut().poll(&mut context), std::task::Poll::Ready(Err(_)))
        };
        if !queued {
            // The end of the connection is a rollback too.
            session.discard();
        }
    }
}

/// Why a transaction did not end as it should.
#[derive(Debug)]
pub(super) enum Fault {
    Final(LedgerError),
    /// It certainly had no effect, and may have one the next time.
    Again(LedgerError),
    /// No connection was had.
    NoConnection(LedgerError),
    /// It certainly had no effect: the server is a standby, or starting. What the pool has to it was discarded, and the
    /// next connection looks for one that takes writes.
    NoWrites(LedgerError),
    /// COMMIT was sent and not answered.
    Unknown(LedgerError),
    /// The unique index of this name refused a row: somebody was faster, and the next look finds who.
    Unique(String),
}

impl From<LedgerError> for Fault {
    fn from(error: LedgerError) -> Fault {
        Fault::Final(error)
    }
}

/// Of what failed before COMMIT was sent. A server's message names tables and columns; its detail holds values, and is
/// not shown.
pub(super) fn fault(error: tokio_postgres::Error) -> Fault {
    let Some(db) = error.as_db_error() else {
        // The transaction's end with its connection is a rollback.
        return Fault::Again(unavailable(&error));
    };
    let code = db.code();
    if [SqlState::READ_ONLY_SQL_TRANSACTION, SqlState::CANNOT_CONNECT_NOW].contains(code) {
        return Fault::NoWrites(unavailable(&error));
    }
    if [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].contains(code) {
        return Fault::Again(LedgerError::Busy);
    }
    if [SqlState::LOCK_NOT_AVAILABLE, SqlState::QUERY_CANCELED].contains(code) {
        return Fault::Final(LedgerError::Busy);
    }
    if *code == SqlState::UNIQUE_VIOLATION {
        return Fault::Unique(db.constraint().unwrap_or_default().to_owned());
    }
    if matches!(db.parsed_severity(), Some(Severity::Fatal | Severity::Panic)) {
        return Fault::Again(unavailable(&error));
    }
    Fault::Final(unavailable(&error))
}

pub(super) fn unavailable(error: &tokio_postgres::Error) -> LedgerError {
    let said = match error.as_db_error() {
        Some(db) => format!("{} ({})", db.message(), db.code().code()),
        None => match std::error::Error::source(error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        },
    };
    LedgerError::Unavailable(crate::x402::words(&said, 200))
}

/// Decides whether a method's transaction is run again.
pub(super) struct Attempts {
    again: u8,
    unknown_until: Option<Instant>,
    writable_until: Option<Instant>,
    repeatable: bool,
}

impl Attempts {
    /// Of a method that finds its own earlier effect by its identifier.
    pub fn repeatable() -> Attempts {
        Attempts { again: 0, unknown_until: None, writable_until: None, repeatable: true }
    }

    /// Of a method whose answer a second run would change.
    pub fn once() -> Attempts {
        Attempts { again: 0, unknown_until: None, writable_until: None, repeatable: false }
    }

    /// Of a question about this moment: it waits for no promotion.
    pub fn at_once() -> Attempts {
        Attempts { writable_until: Some(Instant::now()), ..Attempts::repeatable() }
    }

    /// Whether an earlier run may have taken effect.
    pub fn may_be_done(&self) -> bool {
        self.unknown_until.is_some()
    }

    /// `Ok`: run it again.
    pub async fn judge(&mut self, fault: Fault) -> Result<(), LedgerError> {
        if let Fault::Unknown(error) = &fault {
            if !self.repeatable {
                return Err(LedgerError::Unavailable(error.to_string()));
            }
            self.unknown_until.get_or_insert_with(|| Instant::now() + UNKNOWN);
        }
        if let Some(until) = self.unknown_until {
            // The old session may still be at it: its locks, or their timeout, make this one wait.
            let error = match fault {
                Fault::Final(error @ LedgerError::Inconsistent(_)) => return Err(error),
                Fault::Final(error)
                | Fault::Again(error)
                | Fault::NoConnection(error)
                | Fault::NoWrites(error)
                | Fault::Unknown(error) => error,
                Fault::Unique(_) => LedgerError::Busy,
            };
            if Instant::now() >= until {
                let unknown = format!("whether the last transaction took effect is not known ({error})");
                return Err(LedgerError::Unavailable(unknown));
            }
            tokio::time::sleep(PAUSE).await;
            return Ok(());
        }
        // Between the old primary's end and the promotion's, one server is gone and the other one says no.
        if let Fault::NoWrites(_) = &fault {
            self.writable_until.get_or_insert_with(|| Instant::now() + PROMOTION);
        }
        if let (Some(until), Fault::NoWrites(_) | Fault::NoConnection(_)) = (self.writable_until, &fault)
            && Instant::now() < until
        {
            tokio::time::sleep(PAUSE).await;
            return Ok(());
        }
        self.again += 1;
        match fault {
            Fault::Final(error) | Fault::NoConnection(error) | Fault::NoWrites(error) | Fault::Unknown(error) => {
                Err(error)
            }
            Fault::Again(_) | Fault::Unique(_) if self.again <= AGAIN => Ok(()),
            Fault::Again(error) => Err(error),
            Fault::Unique(index) => {
                Err(LedgerError::Inconsistent(format!("the unique index {index} refuses a row that is not found")))
            }
        }
    }
}

/// Runs `$once` (a future's expression) until it ends or may not be run again.
macro_rules! attempts {
    ($attempts:ident = $kind:ident, $once:expr) => {{
        let mut $attempts = $crate::ledger::postgres::tx::Attempts::$kind();
        loop {
            match $once.await {
                Ok(done) => break Ok(done),
                Err(fault) => $attempts.judge(fault).await?,
            }
        }
    }};
}
pub(super) use attempts;

#[cfg(test)]
mod tests {
    use super::*;

    fn no_writes() -> Fault {
        Fault::NoWrites(LedgerError::Unavailable("a standby".to_owned()))
    }

    fn no_connection() -> Fault {
        Fault::NoConnection(LedgerError::Unavailable("nobody".to_owned()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_promotion_is_waited_for_and_a_server_that_stays_a_standby_ends_the_call() {
        let (since, mut attempts) = (Instant::now(), Attempts::once());
        assert!(attempts.judge(no_connection()).await.is_err(), "nobody said that it is a cluster");
        let mut runs = 0;
        // The old primary is gone, and the standby is not yet one, in any order.
        while attempts.judge(if runs % 2 == 0 { no_writes() } else { no_connection() }).await.is_ok() {
            runs += 1;
        }
        assert!(runs > 20 && since.elapsed() >= PROMOTION && since.elapsed() < PROMOTION * 2, "{runs}");
        assert!(!attempts.may_be_done());
        assert!(Attempts::at_once().judge(no_writes()).await.is_err());
        let mut attempts = Attempts::once();
        attempts.judge(no_writes()).await.unwrap();
        let lost = Fault::Unknown(LedgerError::Unavailable("a commit".to_owned()));
        assert!(attempts.judge(lost).await.is_err(), "what may be done already is not done twice");
    }
}
