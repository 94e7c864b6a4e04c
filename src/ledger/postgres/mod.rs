//! The ledger in a PostgreSQL database, shared by every replica.
//!
//! A method is one transaction at READ COMMITTED: the budget windows are locked first (sorted, `total` last), then the
//! payment's row; reservations and settlements share transactions (`lanes`). Whatever is read to decide is read by statements that begin after the locks are held. Unique indexes
//! are the last word on keys, twins, nonces and transactions. `tollway_now()` in the database is the only clock.

mod archive;
mod close;
mod connect;
mod database;
mod lanes;
mod migrate;
mod numeric;
mod operator;
mod policy;
mod recover;
mod reserve;
mod rights;
mod rows;
#[cfg(test)]
mod tests;
mod tx;
mod windows;
mod wire;

use std::fmt;
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio::sync::Semaphore;

use super::*;
use crate::ports::World;
use crate::seal::KeyRing;

pub use archive::{Archived, MAX_BATCH, RETENTION_MS};
use connect::{no_connection, pool};
pub use database::{Database, Pooler};
pub use lanes::LaneFigures;
use lanes::Lanes;
pub use rights::Found as RightsFound;
#[cfg(feature = "roles")]
pub(crate) use rights::SIGNER;
use tx::{Fault, unavailable};
use wire::{Session, Wire};

/// Callers that wait for a connection; one more is refused at once.
const QUEUE: usize = 4_096;

pub struct PostgresLedger {
    pool: Pool,
    wire: Wire,
    lanes: Lanes,
    queue: Semaphore,
    world: World,
    ring: Option<KeyRing>,
    options: Options,
    place: String,
}

/// What may differ between deployments.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections of this process.
    pub pool_size: usize,
    /// Beside them: connections over which reservations and settlements go, many in one transaction.
    pub lanes: usize,
    /// How long another transaction may hold a row before a call is refused as busy.
    pub lock_timeout: Duration,
    pub statement_timeout: Duration,
    /// How long a stored outcome can be replayed, milliseconds.
    pub outcome_ttl_ms: u64,
    /// A larger outcome is not stored, bytes.
    pub max_outcome: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            pool_size: 16,
            lanes: 2,
            lock_timeout: Duration::from_secs(3),
            statement_timeout: Duration::from_secs(5),
            outcome_ttl_ms: 7 * 24 * 3_600_000,
            max_outcome: 16 * 1024 * 1024,
        }
    }
}

impl fmt::Debug for PostgresLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgresLedger({}, sealing: {})", self.place, self.ring.is_some())
    }
}

impl PostgresLedger {
    /// Connects to a database whose schema is this program's; another one is refused, never changed. Without a ring no
    /// payload and no outcome is stored.
    pub async fn connect(
        database: &Database,
        world: World,
        ring: Option<KeyRing>,
        options: Options,
    ) -> Result<PostgresLedger, LedgerError> {
        let wire = Wire::new(database, &options);
        let pool = pool(database, &wire, options.pool_size)?;
        let place = database.shown();
        let lanes = Lanes::new(&self::pool(database, &wire, options.lanes)?, &wire, &world, &options);
        let ledger = PostgresLedger { pool, wire, lanes, queue: Semaphore::new(QUEUE), world, ring, options, place };
        let session = ledger.wire.session(ledger.pool.get().await.map_err(|e| at_start(database, no_connection(e)))?);
        rights::LEDGER.check(&session, &ledger.wire).await?;
        match migrate::version(&session, &ledger.wire).await.map_err(ended)? {
            Some(found) if found == migrate::newest() => {}
            found => {
                let newest = migrate::newest();
                let found = found.map_or_else(|| "none".to_owned(), |found| found.to_string());
                let fix = format!("this program's is {newest}: run tollway migrate, or the Tollway that fits");
                return Err(LedgerError::Unavailable(format!("its schema is {found} and {fix}")));
            }
        }
        check_session(&session).await?;
        Ok(ledger)
    }

    /// Brings the schema up to this program's; a second run does nothing.
    pub async fn migrate(database: &Database) -> Result<(), LedgerError> {
        let (wire, session) = operators(database).await?;
        migrate::run(&session, &wire).await.map_err(ended)
    }

    /// The schema's version in the database and this program's. `None`: nothing was ever applied.
    pub async fn schema_version(database: &Database) -> Result<(Option<i64>, i64), LedgerError> {
        let (wire, session) = operators(database).await?;
        Ok((migrate::version(&session, &wire).await.map_err(ended)?, migrate::newest()))
    }

    /// How busy the hot path is: batches, queues, refusals.
    pub fn lanes(&self) -> LaneFigures {
        self.lanes.figures()
    }

    fn open_sealed(&self, context: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let opened = self.ring.as_ref()?.open(context, sealed);
        opened.inspect_err(|error| tracing::warn!(%error, "a stored body could not be opened")).ok()
    }
}

/// One connection, for what an operator does.
async fn operators(database: &Database) -> Result<(Wire, Session), LedgerError> {
    let wire = Wire::new(database, &Options::default());
    let client = pool(database, &wire, 1)?.get().await.map_err(|e| at_start(database, no_connection(e)))?;
    let session = wire.session(client);
    Ok((wire, session))
}

/// Connections for a book of another kind: the signer's, and the gate's claims.
pub(crate) fn connections(database: &Database, size: usize) -> Result<Pool, LedgerError> {
    pool(database, &Wire::new(database, &Options::default()), size)
}

/// Why there is no connection, for whoever uses [`connections`].
pub(crate) fn connection_failed(error: deadpool_postgres::PoolError) -> LedgerError {
    ended(no_connection(error))
}

/// What went wrong with a statement: the server's words and code, never its detail, which holds values.
pub(crate) fn said(error: &tokio_postgres::Error) -> LedgerError {
    unavailable(error)
}

/// What the server has to be set to for a commit to be one.
async fn check_session(session: &Session) -> Result<(), LedgerError> {
    let found = session.rows("SELECT current_setting('synchronous_commit')", &[]).await;
    let durable: String = match &found.map_err(|e| unavailable(&e))?[..] {
        [row] => row.try_get(0).map_err(|e| unavailable(&e))?,
        _ => String::new(),
    };
    if durable == "off" {
        let fix = "set it to on for this role, or a crash forgets what was reserved";
        return Err(LedgerError::Unavailable(format!("synchronous_commit is off in the database: {fix}")));
    }
    Ok(())
}

/// Whoever starts something is told where the address came from.
fn at_start(database: &Database, fault: Fault) -> LedgerError {
    match ended(fault) {
        LedgerError::Unavailable(said) => {
            LedgerError::Unavailable(format!("{} ({}): {said}", database.variable(), database.shown()))
        }
        other => other,
    }
}

/// Of something that is not run again.
fn ended(fault: Fault) -> LedgerError {
    match fault {
        Fault::Final(e) | Fault::Again(e) | Fault::NoConnection(e) | Fault::NoWrites(e) | Fault::Unknown(e) => e,
        Fault::Unique(index) => LedgerError::Unavailable(format!("the unique index {index} refuses a row")),
    }
}

fn outcome_context(id: PaymentId) -> String {
    format!("outcome:{}", id.to_hex())
}

fn payload_context(id: PaymentId) -> String {
    format!("payload:{}", id.to_hex())
}

impl Ledger for PostgresLedger {
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
        Box::pin(self.do_now_ms())
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
        Box::pin(self.do_ping())
    }
}
