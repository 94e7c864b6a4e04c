//! The schema's migrations, embedded; `migrations/README.md` says how they are written. The table is sqlx's, so that
//! both stores are looked at in the same way; the connection is ours, so that there is one way to reach the database.

use sha2::{Digest, Sha384};
use tokio_postgres::types::Type;

use super::tx::{Fault, fault};
use super::wire::{COMMIT, Session, Wire};
use crate::ledger::LedgerError;

const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "buyer ledger", include_str!("../../../migrations/postgres/0001_buyer_ledger.sql")),
    (2, "limit lists", include_str!("../../../migrations/postgres/0002_limit_lists.sql")),
    (3, "day windows", include_str!("../../../migrations/postgres/0003_day_windows.sql")),
    (4, "archive", include_str!("../../../migrations/postgres/0004_archive.sql")),
    (5, "lean reservations", include_str!("../../../migrations/postgres/0005_lean_reservations.sql")),
    (10, "gate claims", include_str!("../../../migrations/postgres/0010_gate_claims.sql")),
    (11, "dead settle requests", include_str!("../../../migrations/postgres/0011_dead_settle_requests.sql")),
    (12, "lean sales", include_str!("../../../migrations/postgres/0012_lean_sales.sql")),
    (13, "lean claims", include_str!("../../../migrations/postgres/0013_lean_claims.sql")),
];

/// As `sqlx migrate` makes it.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS _sqlx_migrations (version BIGINT PRIMARY KEY, description TEXT NOT NULL, \
    installed_on TIMESTAMPTZ NOT NULL DEFAULT now(), success BOOLEAN NOT NULL, checksum BYTEA NOT NULL, \
    execution_time BIGINT NOT NULL)";

/// One migration at a time in one schema: the second process waits, and finds it done. Making an index on a big table
/// takes what it takes.
pub(super) fn alone(wire: &Wire) -> String {
    // A schema that is configured may not be there yet.
    let schema = wire.schema().map_or_else(|| "current_schema()".to_owned(), |schema| format!("'{schema}'"));
    format!(
        "{} SET LOCAL lock_timeout = '30s'; SET LOCAL statement_timeout = 0; \
         SET LOCAL idle_in_transaction_session_timeout = '60s'; \
         SELECT pg_advisory_xact_lock(hashtext('tollway migrate'), hashtext({schema}))",
        wire.begin()
    )
}

/// The version that this program writes.
pub(super) fn newest() -> i64 {
    MIGRATIONS.iter().map(|(version, ..)| *version).max().unwrap_or(0)
}

/// The version that the database has; `None` where nothing was ever applied.
pub(super) async fn version(session: &Session, wire: &Wire) -> Result<Option<i64>, Fault> {
    session.batch(&wire.begin()).await.map_err(fault)?;
    let found = applied_version(session).await;
    session.batch("ROLLBACK").await.map_err(fault)?;
    found
}

async fn applied_version(session: &Session) -> Result<Option<i64>, Fault> {
    let one = async |sql| session.rows(sql, &[]).await.map_err(fault);
    let table = one("SELECT to_regclass('_sqlx_migrations') IS NOT NULL").await?;
    match table.first().map(|row| row.try_get(0)).transpose().map_err(fault)? {
        Some(true) => {}
        _ => return Ok(None),
    }
    let newest = one("SELECT max(version) FROM _sqlx_migrations").await?;
    newest.first().map_or(Ok(None), |row| row.try_get(0)).map_err(fault)
}

/// Each file is one transaction.
pub(super) async fn run(session: &Session, wire: &Wire) -> Result<(), Fault> {
    loop {
        session.batch(&alone(wire)).await.map_err(fault)?;
        make_schema(session, wire).await?;
        session.batch(TABLE).await.map_err(fault)?;
        let applied = session.rows("SELECT version, checksum FROM _sqlx_migrations ORDER BY version", &[]).await;
        let applied = applied.map_err(fault)?;
        let mut done = Vec::with_capacity(applied.len());
        for row in &applied {
            done.push((row.try_get(0).map_err(fault)?, row.try_get(1).map_err(fault)?));
        }
        let Some((version, name, sql)) = missing(&done)? else {
            return session.batch(COMMIT).await.map_err(fault);
        };
        session.batch(sql).await.map_err(fault)?;
        let checksum = Sha384::digest(sql).to_vec();
        let written = session
            .run(
                "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES ($1, $2, true, $3, 0)",
                &[(&version, Type::INT8), (&name, Type::TEXT), (&checksum, Type::BYTEA)],
            )
            .await;
        written.map_err(fault)?;
        session.batch(COMMIT).await.map_err(fault)?;
    }
}

/// A configured schema that is not there. `IF NOT EXISTS` would ask for the right to make one also where it is there.
async fn make_schema(session: &Session, wire: &Wire) -> Result<(), Fault> {
    let Some(schema) = wire.schema() else { return Ok(()) };
    let there = session.rows("SELECT 1 FROM pg_namespace WHERE nspname = $1", &[(&schema, Type::TEXT)]).await;
    match there.map_err(fault)?.is_empty() {
        true => session.batch(&format!("CREATE SCHEMA {schema}")).await.map_err(fault),
        false => Ok(()),
    }
}

/// The next one to apply. An altered one, and one that this program does not know, are refused.
fn missing(applied: &[(i64, Vec<u8>)]) -> Result<Option<(i64, &'static str, &'static str)>, LedgerError> {
    let refused = |sentence: String| Err(LedgerError::Inconsistent(sentence));
    if let Some((found, _)) = applied.last().filter(|(found, _)| *found > newest()) {
        return refused(format!(
            "the database has schema version {found} and this program knows {}: run a newer Tollway",
            newest()
        ));
    }
    for (version, checksum) in applied {
        match MIGRATIONS.iter().find(|(known, ..)| known == version) {
            Some((_, _, sql)) if Sha384::digest(sql)[..] == checksum[..] => {}
            Some(_) => {
                return refused(format!(
                    "migration {version} was applied with another text than this program's: run the Tollway that made \
                     this database, or restore it from a backup"
                ));
            }
            None => {
                return refused(format!("migration {version} of the database is unknown: run a newer Tollway"));
            }
        }
    }
    Ok(MIGRATIONS.iter().find(|(version, ..)| applied.iter().all(|(done, _)| done != version)).copied())
}
