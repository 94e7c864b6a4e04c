//! What a paid call does when something goes wrong, step by step: the buyer's rows of `docs/outcomes.md`, each played
//! against real sockets and the real ledger. `tests/outcomes.rs` says which test plays which row.

pub mod after;
pub mod before;
pub mod bench;
pub mod faulty;
pub mod lookup;
pub mod recover;
mod replicas;
pub mod reserve;
pub mod server;
mod tools;

use std::path::Path;
use std::sync::Arc;

use tollway::ledger::postgres::Options;
use tollway::ledger::{Ledger, PostgresLedger, SqliteLedger};
use tollway::ports::World;
use tollway::seal::KeyRing;

use crate::postgres::Schema;

/// Where a bench keeps its ledger: a directory, and with `TOLLWAY_TEST_STORE=postgres` a schema of its own on the test
/// server. Every story here is played on both stores.
pub struct Place {
    dir: tempfile::TempDir,
    schema: Option<Schema>,
}

impl Place {
    pub async fn new() -> Place {
        let schema = if on_postgres() { Some(Schema::migrated().await) } else { None };
        Place { dir: tempfile::tempdir().unwrap(), schema }
    }

    /// The database's clock goes on as the bench's does; SQLite's is the process's.
    pub fn later(&self, by: std::time::Duration) {
        if let Some(schema) = &self.schema {
            schema.later(by);
        }
    }

    /// One process's view of it.
    pub async fn open(&self, world: &World) -> Arc<dyn Ledger> {
        let Some(schema) = &self.schema else { return sqlite(world, self.dir.path()).await };
        let options = Options { pool_size: 4, ..Options::default() };
        let ledger = PostgresLedger::connect(&schema.database(), world.clone(), Some(ring()), options).await;
        Arc::new(ledger.unwrap())
    }
}

pub fn on_postgres() -> bool {
    std::env::var("TOLLWAY_TEST_STORE").is_ok_and(|store| store == "postgres")
}

pub async fn sqlite(world: &World, dir: &Path) -> Arc<dyn Ledger> {
    Arc::new(SqliteLedger::open(&dir.join("ledger.sqlite"), world.clone(), Some(ring())).await.unwrap())
}

/// Every process over one ledger has one ring.
fn ring() -> KeyRing {
    KeyRing::new(vec![vec![7; 32]]).unwrap()
}
