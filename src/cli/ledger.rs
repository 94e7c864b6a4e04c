//! `tollway migrate`, and what the operator's commands on the ledger share.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::Failure;
use crate::agent::server;
use crate::config::Store;
use crate::ledger::{LedgerError, PostgresLedger, SqliteLedger};
use crate::ports::World;

impl From<LedgerError> for Failure {
    fn from(error: LedgerError) -> Self {
        Failure::Failed(error.to_string())
    }
}

#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// Say which version the database has and change nothing; exit code 1 where it is not this program's
    #[arg(long, conflicts_with = "runtime_role")]
    check: bool,
    /// Then give this PostgreSQL role what tollway serve needs, and take what it does not: it cannot change the schema,
    /// remove a payment or rewrite history. Run it as the owner of the tables, again after every upgrade
    #[arg(long, value_name = "NAME")]
    runtime_role: Option<String>,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

/// Brings the ledger's schema up to this program's; a second run does nothing.
pub async fn migrate(args: &MigrateArgs, store: &Store, world: World) -> Result<ExitCode, Failure> {
    let (before, newest) = match store {
        Store::Sqlite(path) => SqliteLedger::schema_version(path).await?,
        Store::Postgres(database) => PostgresLedger::schema_version(database).await?,
        Store::None => return Err(Failure::Usage("budget.store: no ledger is configured".to_owned())),
    };
    if args.runtime_role.is_some() && !matches!(store, Store::Postgres(_)) {
        return Err(Failure::Usage("--runtime-role: a SQLite ledger has no roles (budget.store: postgres)".to_owned()));
    }
    if !args.check {
        if let Store::Postgres(database) = store {
            PostgresLedger::migrate(database).await?;
            if let Some(role) = &args.runtime_role {
                PostgresLedger::grant(database, role).await?;
            }
        }
        server::open(store, &world, None).await?.ping().await?;
    }
    let now = if args.check { before } else { Some(newest) };
    let place = server::place(store);
    if args.json {
        show(&json!({
            "database": place, "before": before, "now": now, "program": newest, "runtimeRole": args.runtime_role,
        }));
    } else {
        let word = |version: Option<i64>| version.map_or_else(|| "none".to_owned(), |version| version.to_string());
        say!("{place}: schema {}, was {}, this program's is {newest}", word(now), word(before));
        if let Some(role) = &args.runtime_role {
            say!("{role} may serve, and nothing else");
        }
    }
    Ok(if now == Some(newest) { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

pub(super) fn show(value: &Value) {
    say!("{value:#}");
}
