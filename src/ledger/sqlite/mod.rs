//! The ledger in one SQLite file: the embedded default of `stdio` and the sandbox.
//!
//! One connection behind a mutex; every write is one `BEGIN IMMEDIATE`, so several processes may share the file. Amounts
//! are summed here, in Rust, while the write lock is held. The clock is the process's, never behind the newest event.

mod close;
mod migrate;
mod operator;
mod policy;
#[cfg(test)]
mod processes;
mod recover;
mod reserve;
mod rows;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Sqlite, SqliteConnection, Transaction};
use tokio::sync::{Mutex, MutexGuard, Semaphore};

use super::*;
use crate::ports::World;
use crate::seal::KeyRing;

/// Callers that wait for the connection; one more is refused at once.
const QUEUE: usize = 4_096;
/// How long a caller waits for the connection.
const WAIT: Duration = Duration::from_secs(10);

pub struct SqliteLedger {
    connection: Mutex<SqliteConnection>,
    queue: Semaphore,
    world: World,
    ring: Option<KeyRing>,
    options: Options,
}

/// What may differ between deployments.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long another process may hold the write lock before a call is refused as busy.
    pub busy_timeout: Duration,
    /// How long a stored outcome can be replayed, milliseconds.
    pub outcome_ttl_ms: u64,
    /// A larger outcome is not stored, bytes.
    pub max_outcome: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            busy_timeout: Duration::from_secs(5),
            outcome_ttl_ms: 7 * 24 * 3_600_000,
            max_outcome: 16 * 1024 * 1024,
        }
    }
}

impl fmt::Debug for SqliteLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SqliteLedger(sealing: {})", self.ring.is_some())
    }
}

impl SqliteLedger {
    /// Opens the file, made with mode 0600 where it does not exist, and brings its schema up to this program's. Without
    /// a ring no payload and no outcome is stored.
    pub async fn open(path: &Path, world: World, ring: Option<KeyRing>) -> Result<SqliteLedger, LedgerError> {
        SqliteLedger::open_with(path, world, ring, Options::default()).await
    }

    pub async fn open_with(
        path: &Path,
        world: World,
        ring: Option<KeyRing>,
        options: Options,
    ) -> Result<SqliteLedger, LedgerError> {
        let mut connection = open_file(path, options.busy_timeout).await?;
        migrate::run(&mut connection).await?;
        Ok(SqliteLedger { connection: Mutex::new(connection), queue: Semaphore::new(QUEUE), world, ring, options })
    }

    /// The schema's version in the file and this program's, without changing the file. `None`: never written.
    pub async fn schema_version(path: &Path) -> Result<(Option<i64>, i64), LedgerError> {
        if !path.exists() {
            return Ok((None, migrate::newest()));
        }
        let settings = SqliteConnectOptions::new().filename(path).read_only(true).disable_statement_logging();
        let mut connection = settings.connect().await.map_err(unavailable)?;
        let found = migrate::version(&mut connection).await?;
        connection.close().await.map_err(unavailable)?;
        Ok((found, migrate::newest()))
    }

    async fn connection(&self) -> Result<MutexGuard<'_, SqliteConnection>, LedgerError> {
        let _queued = self.queue.try_acquire().map_err(|_| LedgerError::Busy)?;
        tokio::time::timeout(WAIT, self.connection.lock()).await.map_err(|_| LedgerError::Busy)
    }

    fn open_sealed(&self, context: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let opened = self.ring.as_ref()?.open(context, sealed);
        opened.inspect_err(|error| tracing::warn!(%error, "a stored body could not be opened")).ok()
    }
}

/// A file of mode 0600, made where there is none; its schema is its owner's business.
pub(crate) async fn open_file(path: &Path, busy_timeout: Duration) -> Result<SqliteConnection, LedgerError> {
    make_private(path).map_err(|e| LedgerError::Unavailable(format!("{}: {e}", path.display())))?;
    let settings = SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(busy_timeout)
        .disable_statement_logging();
    connect(&settings, busy_timeout).await
}

/// The same, brought up to this program's schema: for the gate's claims, which stand beside the ledger.
pub(crate) async fn open_migrated(path: &Path, busy_timeout: Duration) -> Result<SqliteConnection, LedgerError> {
    let mut connection = open_file(path, busy_timeout).await?;
    migrate::run(&mut connection).await?;
    Ok(connection)
}

/// The write transaction with the ledger's time in it. Dropped without [`Writing::commit`] it is rolled back.
struct Writing<'a> {
    tx: Transaction<'a, Sqlite>,
    now: u64,
}

impl Writing<'_> {
    async fn begin<'a>(connection: &'a mut SqliteConnection, world: &World) -> Result<Writing<'a>, LedgerError> {
        let mut tx = match connection.begin_with("BEGIN IMMEDIATE").await {
            Ok(tx) => tx,
            Err(error) if is_busy(&error) => return Err(LedgerError::Busy),
            Err(error) => return Err(unavailable(error)),
        };
        let now = now(&mut tx, world).await?;
        Ok(Writing { tx, now })
    }

    async fn commit(self) -> Result<(), LedgerError> {
        self.tx.commit().await.map_err(unavailable)
    }
}

/// The process's clock, never behind the newest event.
async fn now(db: &mut SqliteConnection, world: &World) -> Result<u64, LedgerError> {
    let newest: Option<i64> = sqlx::query_scalar("SELECT at FROM payment_events ORDER BY id DESC LIMIT 1")
        .fetch_optional(db)
        .await
        .map_err(unavailable)?;
    Ok(world.unix_ms().max(newest.map_or(Ok(0), rows::unsigned)?))
}

/// Another process that opens the file for the first time holds it exclusively for a moment, and SQLite does not always
/// wait for that by itself.
async fn connect(settings: &SqliteConnectOptions, patience: Duration) -> Result<SqliteConnection, LedgerError> {
    let until = tokio::time::Instant::now() + patience;
    loop {
        match settings.connect().await {
            Ok(connection) => return Ok(connection),
            Err(error) if is_busy(&error) && tokio::time::Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => return Err(unavailable(error)),
        }
    }
}

/// SQLite gives its `-wal` and `-shm` files the mode of the database file.
fn make_private(path: &Path) -> std::io::Result<()> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path).map(|_| ())
}

pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    // Primary code 5 (BUSY) or 6 (LOCKED); extended codes keep it in the low byte.
    let code = error.as_database_error().and_then(|e| e.code()).and_then(|code| code.parse::<i32>().ok());
    matches!(code.map(|code| code & 0xff), Some(5 | 6))
}

/// SQLite's messages name tables and columns, never values.
pub(crate) fn unavailable(error: sqlx::Error) -> LedgerError {
    LedgerError::Unavailable(error.to_string().chars().take(200).collect())
}

fn outcome_context(id: PaymentId) -> String {
    format!("outcome:{}", id.to_hex())
}

fn payload_context(id: PaymentId) -> String {
    format!("payload:{}", id.to_hex())
}

impl Ledger for SqliteLedger {
    fn lookup<'a>(&'a self, agent: &'a AgentId, by: By<'a>) -> LedgerResult<'a, Option<Payment>> {
        Box::pin(self.do_lookup(agent, by))
    }
    fn decide<'a>(&'a self, intent: &'a Intent) -> LedgerResult<'a, Decision> {
        Box::pin(self.do_decide(intent))
    }
    fn store_payload<'a>(&'a self, id: PaymentId, lease: &'a Lease, payload: &'a [u8]) -> LedgerResult<'a, bool> {
        Box::pin(self.do_store_payload(id, lease, payload))
    }
    fn payload(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        Box::pin(self.do_payload(id))
    }
    fn settle<'a>(&'a self, request: SettleRequest<'a>) -> LedgerResult<'a, SettleOutcome> {
        Box::pin(self.do_settle(request))
    }
    fn in_doubt<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        Box::pin(self.do_in_doubt(id, lease, reason))
    }
    fn release<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        Box::pin(self.do_release(id, lease, reason))
    }
    fn take_recovery(&self, id: PaymentId, lease_ms: u64) -> LedgerResult<'_, Recovery> {
        Box::pin(self.do_take_recovery(id, lease_ms))
    }
    fn end_recovery<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Option<Reason>) -> LedgerResult<'a, bool> {
        Box::pin(self.do_end_recovery(id, lease, reason))
    }
    fn take_due_on<'a>(&'a self, on: On<'a>, limit: u32, lease_ms: u64) -> LedgerResult<'a, Vec<(Payment, Lease)>> {
        Box::pin(self.do_take_due(on, limit, lease_ms))
    }
    fn look_again<'a>(&'a self, id: PaymentId, lease: &'a Lease, due_ms: u64) -> LedgerResult<'a, bool> {
        Box::pin(self.do_look_again(id, lease, due_ms))
    }
    fn expire<'a>(&'a self, id: PaymentId, lease: &'a Lease, reason: Reason) -> LedgerResult<'a, bool> {
        Box::pin(self.do_expire(id, lease, reason))
    }
    fn tidy(&self) -> LedgerResult<'_, Tidied> {
        Box::pin(self.do_tidy())
    }
    fn open_rows(&self) -> LedgerResult<'_, OpenRows> {
        Box::pin(self.do_open_rows())
    }
    fn now_ms(&self) -> LedgerResult<'_, u64> {
        Box::pin(async move { now(&mut *self.connection().await?, &self.world).await })
    }
    fn resolve<'a>(&'a self, resolution: Resolution<'a>) -> LedgerResult<'a, Resolved> {
        Box::pin(self.do_resolve(resolution))
    }
    fn answered(&self, id: PaymentId) -> LedgerResult<'_, ()> {
        Box::pin(self.do_answered(id))
    }
    fn outcome(&self, id: PaymentId) -> LedgerResult<'_, Option<Vec<u8>>> {
        Box::pin(self.do_outcome(id))
    }
    fn budget<'a>(&'a self, agent: &'a AgentId, session: Option<&'a str>) -> LedgerResult<'a, Vec<BudgetLine>> {
        Box::pin(self.do_budget(agent, session))
    }
    fn apply_limits<'a>(&'a self, list: LimitList<'a>) -> LedgerResult<'a, Applied> {
        Box::pin(self.do_apply_limits(list))
    }
    fn limits(&self) -> LedgerResult<'_, Vec<Limit>> {
        Box::pin(self.do_limits())
    }
    fn set_limit<'a>(&'a self, limit: &'a Limit) -> LedgerResult<'a, ()> {
        Box::pin(self.do_set_limit(limit))
    }
    fn suspend<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, u64> {
        Box::pin(self.do_suspend(subject, unit))
    }
    fn resume<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, bool> {
        Box::pin(self.do_resume(subject, unit))
    }
    fn stopped(&self) -> LedgerResult<'_, Vec<Subject>> {
        Box::pin(self.do_stopped())
    }
    fn signable<'a>(&'a self, subject: &'a Subject, unit: Option<&'a Unit>) -> LedgerResult<'a, Signable> {
        Box::pin(self.do_signable(subject, unit))
    }
    fn origin_rules(&self) -> LedgerResult<'_, Vec<OriginRule>> {
        Box::pin(self.do_origin_rules())
    }
    fn set_origin_rule<'a>(&'a self, origin: &'a Origin, allowed: Option<bool>) -> LedgerResult<'a, bool> {
        Box::pin(self.do_set_origin_rule(origin, allowed))
    }
    fn pins(&self) -> LedgerResult<'_, Vec<Pin>> {
        Box::pin(self.do_pins())
    }
    fn pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit) -> LedgerResult<'a, Option<Pin>> {
        Box::pin(self.do_pin(origin, unit))
    }
    fn set_pin<'a>(&'a self, origin: &'a Origin, unit: &'a Unit, set: SetPin<'a>) -> LedgerResult<'a, bool> {
        Box::pin(self.do_set_pin(origin, unit, set))
    }
    fn list<'a>(&'a self, filter: &'a Filter) -> LedgerResult<'a, Vec<Payment>> {
        Box::pin(self.do_list(filter))
    }
    fn show<'a>(&'a self, id: &'a str) -> LedgerResult<'a, Option<(Payment, Vec<Event>)>> {
        Box::pin(self.do_show(id))
    }
    fn audit(&self) -> LedgerResult<'_, Audit> {
        Box::pin(self.do_audit())
    }
    fn end_session<'a>(&'a self, session: &'a str, expires_ms: u64) -> LedgerResult<'a, ()> {
        Box::pin(self.do_end_session(session, expires_ms))
    }
    fn session_ended<'a>(&'a self, session: &'a str) -> LedgerResult<'a, bool> {
        Box::pin(self.do_session_ended(session))
    }
    fn ping(&self) -> LedgerResult<'_, ()> {
        Box::pin(async move {
            let mut connection = self.connection().await?;
            // The write lock proves that the file can be written; nothing is.
            let writing = Writing::begin(&mut connection, &self.world).await?;
            writing.tx.rollback().await.map_err(unavailable)
        })
    }
}
