//! The two ledgers, each case with one of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tollway::ledger::postgres::Options as PostgresOptions;
use tollway::ledger::{Database, Ledger, PostgresLedger, SqliteLedger};
use tollway::ports::machine::world;
use tollway::ports::{Clock, World};
use tollway::seal::KeyRing;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Store {
    Sqlite,
    Postgres,
}

impl Store {
    pub fn as_str(self) -> &'static str {
        match self {
            Store::Sqlite => "sqlite",
            Store::Postgres => "postgres",
        }
    }
}

/// Where the ledger of one case is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Place {
    Sqlite(PathBuf),
    /// The URL, with a schema of its own.
    Postgres(String),
}

/// Names the tests' server: a libpq connection string.
const SERVER: &str = "TOLLWAY_TEST_POSTGRES";
/// Adds to the database's clock what the test wants.
const CLOCK: &str = "CREATE TABLE test_ahead (ms BIGINT NOT NULL); INSERT INTO test_ahead VALUES (0); \
    CREATE OR REPLACE FUNCTION tollway_now() RETURNS BIGINT LANGUAGE sql VOLATILE AS \
    'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint + (SELECT ms FROM test_ahead)'";

impl Place {
    /// An empty ledger's place.
    pub async fn make(store: Store, dir: &Path) -> Place {
        match store {
            Store::Sqlite => Place::Sqlite(dir.join("ledger.sqlite")),
            Store::Postgres => {
                let server = std::env::var(SERVER).expect("a server");
                let name = format!("matrix_{}", hex::encode(world().0.random::<8>()));
                sql(&server, &format!("CREATE SCHEMA {name}")).await;
                let sign = if server.contains('?') { '&' } else { '?' };
                let url = format!("{server}{sign}options=-csearch_path%3D{name}");
                let database = Database::parse(&url, None).expect("a URL");
                PostgresLedger::migrate(&database).await.expect("a schema");
                sql(&url, CLOCK).await;
                Place::Postgres(url)
            }
        }
    }

    pub async fn open(&self, world: &World, dir: &Path) -> Arc<dyn Ledger> {
        let ring = KeyRing::load_or_create(world, &dir.join("keyring")).expect("a key ring");
        match self {
            Place::Sqlite(path) => {
                let ledger = SqliteLedger::open(path, world.clone(), Some(ring)).await;
                Arc::new(ledger.expect("the ledger opens"))
            }
            Place::Postgres(url) => {
                let database = Database::parse(url, None).expect("a URL");
                let options = PostgresOptions { pool_size: 3, ..PostgresOptions::default() };
                let ledger = PostgresLedger::connect(&database, world.clone(), Some(ring), options).await;
                Arc::new(ledger.expect("the ledger opens"))
            }
        }
    }

    /// As far as it can be: the directory of the case goes by itself.
    pub async fn remove(&self) {
        let Place::Postgres(url) = self else { return };
        let Some((_, schema)) = url.rsplit_once("search_path%3D") else { return };
        let statements = format!("SET lock_timeout = '2s'; DROP SCHEMA {schema} CASCADE");
        if let Err(error) = execute(url, &statements).await {
            println!("the schema {schema} stays: {error}");
        }
    }

    /// The database has a clock of its own.
    pub async fn set_ahead(&self, ms: u64) {
        if let Place::Postgres(url) = self {
            sql(url, &format!("UPDATE test_ahead SET ms = {ms}")).await;
        }
    }
}

async fn sql(url: &str, statements: &str) {
    execute(url, statements).await.expect("the test's server takes the test's statements");
}

async fn execute(url: &str, statements: &str) -> Result<(), tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let driver = tokio::spawn(connection);
    let done = client.batch_execute(statements).await;
    drop(client);
    let _ = driver.await;
    done
}

/// The machine's clock, set ahead: leases run out and rows fall due when the test says so.
pub struct Ahead {
    pub real: Arc<dyn Clock>,
    pub ms: Arc<AtomicU64>,
}

impl Clock for Ahead {
    fn unix_ms(&self) -> u64 {
        self.real.unix_ms() + self.ms.load(Ordering::SeqCst)
    }
}

/// SQLite always; PostgreSQL where the tests have a server.
pub fn available() -> Vec<Store> {
    match std::env::var(SERVER) {
        Ok(_) => vec![Store::Sqlite, Store::Postgres],
        Err(_) => {
            println!("{SERVER} names no PostgreSQL server: SQLite alone (scripts/test starts one)");
            vec![Store::Sqlite]
        }
    }
}
