//! How this deployment's database is spoken to: what a session is set up with, and how a statement reaches it.
//!
//! On a connection of our own the settings are the session's and statements are prepared once. Behind a pooler in
//! transaction mode a session is somebody else's the next moment: the settings are each transaction's own, and
//! statements are unnamed, with their types, in one round trip.

use std::time::Duration;

use deadpool_postgres::Object;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, Row, RowStream, SimpleQueryMessage, Statement};

use super::Options;
use super::database::{Database, Pooler};
use crate::ledger::LedgerError;

pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A transaction whose client stopped in the middle of it ends by itself: what it holds delays others no longer.
pub(super) const IDLE: Duration = Duration::from_secs(2);

/// Ends a transaction, and is safe to pipeline: after a failed statement it is an error and commits nothing, where a bare
/// COMMIT answers Ok and means ROLLBACK; roll back then. A timeout must not strike it: a server that waits for its
/// synchronous standby answers a cancelled COMMIT with Ok, and the standby never has it.
pub(super) const COMMIT: &str = "SET LOCAL statement_timeout = 0; COMMIT";

/// Of short statements over few rows. A plan made while a table was empty is used when it is not, so it must be one that
/// uses the indexes.
const PLANNER: &[(&str, &str, &str)] = &[
    // name, value, what it is for a look at a whole table
    ("plan_cache_mode", "force_generic_plan", "auto"),
    ("enable_seqscan", "off", "on"),
    ("enable_hashjoin", "off", "on"),
    ("enable_mergejoin", "off", "on"),
    ("jit", "off", "off"),
];

/// How sessions are set up; the same for every connection of a ledger.
#[derive(Debug, Clone)]
pub(super) struct Wire {
    pooled: bool,
    schema: Option<String>,
    lock: Duration,
    statement: Duration,
}

impl Wire {
    pub fn new(database: &Database, options: &Options) -> Wire {
        Wire {
            pooled: database.pooler() == Pooler::Transaction,
            schema: database.schema().map(str::to_owned),
            lock: options.lock_timeout,
            statement: options.statement_timeout,
        }
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = vec![
            ("lock_timeout", self.lock.as_millis().to_string()),
            ("statement_timeout", self.statement.as_millis().to_string()),
            ("idle_in_transaction_session_timeout", IDLE.as_millis().to_string()),
        ];
        settings.extend(self.schema.iter().map(|schema| ("search_path", schema.clone())));
        settings.extend(PLANNER.iter().map(|(name, value, _)| (*name, (*value).to_owned())));
        settings
    }

    /// The `options` of a connection's start; `None` behind a pooler, which takes none.
    pub fn startup(&self, given: Option<&str>) -> Option<String> {
        if self.pooled {
            return None;
        }
        let ours = self.settings().into_iter().map(|(name, value)| format!("-c{name}={value}"));
        Some(given.map(str::to_owned).into_iter().chain(ours).collect::<Vec<_>>().join(" "))
    }

    /// A setting by which a session shows that it has all that it was started with.
    pub fn proof(&self) -> Option<(&'static str, String)> {
        // As the server shows it: in its largest whole unit.
        (!self.pooled).then(|| ("idle_in_transaction_session_timeout", format!("{}s", IDLE.as_secs())))
    }

    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Statements for one simple query that begins a transaction with all settings in force.
    pub fn begin(&self) -> String {
        let mut sql = "BEGIN ISOLATION LEVEL READ COMMITTED;".to_owned();
        if self.pooled {
            sql.extend(self.settings().iter().map(|(name, value)| format!(" SET LOCAL {name} = {value};")));
        }
        sql
    }

    /// The same with other timeouts.
    pub fn begin_with(&self, lock: Duration, statement: Duration) -> String {
        let mut sql = self.begin();
        for (name, set, wanted) in [("lock_timeout", self.lock, lock), ("statement_timeout", self.statement, statement)]
        {
            if set != wanted {
                sql.push_str(&format!(" SET LOCAL {name} = {};", wanted.as_millis()));
            }
        }
        sql
    }

    /// Of a transaction that waits until it is the only one: longer than any that it waits for.
    pub fn alone(&self) -> Duration {
        self.statement * 3
    }

    pub fn begin_alone(&self) -> String {
        self.begin_with(self.alone(), self.alone())
    }

    /// The server gives up before we do, unless it is gone.
    pub fn patience(&self) -> Duration {
        self.statement + Duration::from_secs(3)
    }

    /// One snapshot to read a whole table in.
    pub fn begin_snapshot(&self, statement: Duration) -> String {
        let mut sql = self.begin_with(self.lock, statement).replacen(
            "BEGIN ISOLATION LEVEL READ COMMITTED",
            "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
            1,
        );
        sql.extend(PLANNER.iter().map(|(name, _, whole)| format!(" SET LOCAL {name} = {whole};")));
        sql
    }

    pub fn session(&self, client: Object) -> Session {
        Session { client, named: !self.pooled }
    }
}

/// A connection of the pool.
pub(super) struct Session {
    client: Object,
    named: bool,
}

/// A connection that ends with whoever drops it, as when a caller goes away in the middle of a transaction: another one
/// would go on in it.
pub(super) struct Guarded(Option<Session>);

impl Guarded {
    pub fn new(session: Session) -> Guarded {
        Guarded(Some(session))
    }

    pub fn session(&self) -> Result<&Session, LedgerError> {
        self.0.as_ref().ok_or_else(|| LedgerError::Unavailable("the connection is gone".to_owned()))
    }

    /// Between two transactions: back to the pool.
    pub fn give_back(mut self) {
        self.0 = None;
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(session) = self.0.take() {
            session.discard();
        }
    }
}

/// A statement that goes on the wire at the first poll of [`Session::send`].
#[derive(Clone)]
pub(super) enum Ready {
    Prepared(Statement),
    Unnamed(&'static str, &'static [Type]),
}

impl Session {
    /// For statements that are pipelined: get them ready first, then poll them in the order of the wire
    /// (`futures_util::join!` and `future::join` do, `tokio::join!` does not). On a connection of our own the first use
    /// costs a round trip. A ready statement belongs to this session.
    pub async fn ready(&self, sql: &'static str, types: &'static [Type]) -> Result<Ready, Error> {
        match self.named {
            true => Ok(Ready::Prepared(self.client.prepare_typed_cached(sql, types).await?)),
            false => Ok(Ready::Unnamed(sql, types)),
        }
    }

    pub async fn send(&self, ready: &Ready, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        match ready {
            Ready::Prepared(statement) => self.client.query(statement, params).await,
            Ready::Unnamed(sql, types) => self.client.query_typed(sql, &typed(params, types)).await,
        }
    }

    pub async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        match self.prepared(sql, params).await? {
            Some(statement) => self.client.query(&statement, &values(params)).await,
            None => self.client.query_typed(sql, params).await,
        }
    }

    /// How many rows it touched.
    pub async fn run(&self, sql: &str, params: &[Param<'_>]) -> Result<u64, Error> {
        match self.prepared(sql, params).await? {
            Some(statement) => self.client.execute(&statement, &values(params)).await,
            None => self.client.execute_typed(sql, params).await,
        }
    }

    /// Row by row; never prepared.
    pub async fn stream(&self, sql: &str) -> Result<RowStream, Error> {
        let none: [Param<'_>; 0] = [];
        self.client.query_typed_raw(sql, none).await
    }

    /// Text without parameters, several statements if need be.
    pub async fn simple(&self, sql: &str) -> Result<Vec<SimpleQueryMessage>, Error> {
        self.client.simple_query(sql).await
    }

    pub async fn batch(&self, sql: &str) -> Result<(), Error> {
        self.client.batch_execute(sql).await
    }

    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Ends the connection, and those that wait in the pool: what is wrong with this one (its host has vanished, it takes
    /// no writes any more) is wrong with them, and each would cost a caller as long to find out.
    pub fn discard(self) {
        if let Some(pool) = Object::pool(&self.client) {
            pool.retain(|_, _| false);
        }
        drop(Object::take(self.client));
    }

    async fn prepared(&self, sql: &str, params: &[Param<'_>]) -> Result<Option<Statement>, Error> {
        if !self.named {
            return Ok(None);
        }
        let types: Vec<Type> = params.iter().map(|(_, of)| of.clone()).collect();
        self.client.prepare_typed_cached(sql, &types).await.map(Some)
    }
}

fn values<'a>(params: &[Param<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    params.iter().map(|(value, _)| *value).collect()
}

fn typed<'a>(params: &[&'a (dyn ToSql + Sync)], types: &[Type]) -> Vec<Param<'a>> {
    params.iter().copied().zip(types.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(pooler: Pooler) -> Wire {
        let database = Database::parse("postgresql://u@127.0.0.1/x", None).unwrap();
        let database = database.behind(pooler).unwrap().in_schema("budget").unwrap();
        Wire::new(&database, &Options::default())
    }

    #[test]
    fn every_setting_is_in_force_in_every_transaction_whoever_keeps_it() {
        let (own, pooled) = (wire(Pooler::None), wire(Pooler::Transaction));
        let startup = own.startup(Some("-cgeqo=off")).unwrap();
        assert!(startup.starts_with("-cgeqo=off -clock_timeout=3000 "), "{startup}");
        assert_eq!(pooled.startup(None), None);
        for (name, value) in own.settings() {
            assert!(startup.contains(&format!("-c{name}={value}")), "{startup}");
            assert!(pooled.begin().contains(&format!(" SET LOCAL {name} = {value};")), "{}", pooled.begin());
        }
        assert!(pooled.begin().contains("search_path = budget;"));
        assert_eq!(own.begin(), "BEGIN ISOLATION LEVEL READ COMMITTED;", "bare where the session has it all");
        let (second, other) = (Duration::from_secs(1), Duration::from_secs(5));
        assert!(own.begin_with(second, other).ends_with("COMMITTED; SET LOCAL lock_timeout = 1000;"));
        for wire in [own, pooled] {
            let whole = wire.begin_snapshot(second);
            assert!(whole.starts_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;"), "{whole}");
            assert!(whole.contains("statement_timeout = 1000;") && whole.contains(" SET LOCAL enable_seqscan = on;"));
            assert!(whole.rfind("enable_seqscan = on") > whole.rfind("enable_seqscan = off"), "the last one counts");
        }
    }
}
