//! The schema's migrations, embedded; `migrations/README.md` says how they are written.

use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::{Connection, SqlSafeStr, SqliteConnection};

use super::{is_busy, unavailable};
use crate::ledger::LedgerError;

const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "buyer ledger", include_str!("../../../migrations/sqlite/0001_buyer_ledger.sql")),
    (2, "recovery and sweep", include_str!("../../../migrations/sqlite/0002_recovery_and_sweep.sql")),
    (3, "limit lists", include_str!("../../../migrations/sqlite/0003_limit_lists.sql")),
    (10, "gate claims", include_str!("../../../migrations/sqlite/0010_gate_claims.sql")),
    (11, "dead settle requests", include_str!("../../../migrations/sqlite/0011_dead_settle_requests.sql")),
];

/// The version that this program writes.
pub(super) fn newest() -> i64 {
    MIGRATIONS.iter().map(|(version, ..)| *version).max().unwrap_or(0)
}

/// The version that the file has; `None` where nothing was ever applied.
pub(super) async fn version(connection: &mut SqliteConnection) -> Result<Option<i64>, LedgerError> {
    let table: Option<i64> = sqlx::query_scalar("SELECT 1 FROM sqlite_master WHERE name = '_sqlx_migrations'")
        .fetch_optional(&mut *connection)
        .await
        .map_err(unavailable)?;
    if table.is_none() {
        return Ok(None);
    }
    sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(connection).await.map_err(unavailable)
}

/// All of it in one write transaction, so of several processes one migrates and the others find it done.
pub(super) async fn run(connection: &mut SqliteConnection) -> Result<(), LedgerError> {
    run_to(connection, newest()).await
}

/// Up to a version that a test wants.
pub(super) async fn run_to(connection: &mut SqliteConnection, last: i64) -> Result<(), LedgerError> {
    let mut tx = match connection.begin_with("BEGIN IMMEDIATE").await {
        Ok(tx) => tx,
        Err(error) if is_busy(&error) => return Err(LedgerError::Busy),
        Err(error) => return Err(unavailable(error)),
    };
    if let Some(found) = version(&mut tx).await?.filter(|found| *found > newest()) {
        return Err(LedgerError::Inconsistent(format!(
            "the database has schema version {found} and this program knows {}: run a newer Tollway",
            newest()
        )));
    }
    let migrations = MIGRATIONS.iter().filter(|(version, ..)| *version <= last).map(|(version, name, sql)| {
        Migration::new(*version, (*name).into(), MigrationType::Simple, sql.into_sql_str(), false)
    });
    Migrator::with_migrations(migrations.collect()).run_direct(None, &mut *tx, false).await.map_err(explain)?;
    tx.commit().await.map_err(unavailable)
}

fn explain(error: MigrateError) -> LedgerError {
    match error {
        MigrateError::VersionMismatch(version) => LedgerError::Inconsistent(format!(
            "migration {version} was applied with another text than this program's: run the Tollway that made this \
             database, or restore it from a backup"
        )),
        MigrateError::VersionMissing(version) => {
            LedgerError::Inconsistent(format!("migration {version} of the database is unknown: run a newer Tollway"))
        }
        other => LedgerError::Unavailable(other.to_string().chars().take(200).collect()),
    }
}
