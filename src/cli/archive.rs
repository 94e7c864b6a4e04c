//! `tollway reservations archive`: what is over and old leaves the tables that a reservation touches.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::Failure;
use super::ledger::show;
use crate::config::Store;
use crate::ledger::PostgresLedger;
use crate::ledger::postgres::{MAX_BATCH, Options, RETENTION_MS};
use crate::ports::World;

const DAY_MS: u64 = 24 * 3_600_000;

#[derive(Debug, Args)]
#[command(
    after_help = "Moved are settled and released payments that were made and over for longer than that, whose authorization \
is dead, and of which nothing is stored, leased or unanswered. Their keys stay spent, their transactions pay no other \
payment, and `reservations show` and `audit` read them as before. A transaction moves a batch or nothing: stop it when \
you like, and run it again. It is for the owner of the tables; a role that serves may not.\n\n\
Exit code 0 when nothing more is to be moved."
)]
pub struct ArchiveArgs {
    /// Days since the payment was made and over, as in 400d; 397d (13 months) at least
    #[arg(long, value_name = "DAYS", default_value = "397d", value_parser = days)]
    older_than: u64,
    /// Payments of one transaction
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_BATCH)))]
    batch: u32,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

/// In milliseconds.
fn days(word: &str) -> Result<u64, String> {
    let figure = word.strip_suffix('d').and_then(|days| days.parse::<u64>().ok());
    let ms = figure.and_then(|days| days.checked_mul(DAY_MS)).ok_or("write days, as in 400d")?;
    match ms >= RETENTION_MS {
        true => Ok(ms),
        false => Err(format!("payments are kept for at least {} days", RETENTION_MS / DAY_MS)),
    }
}

pub async fn run(args: &ArchiveArgs, store: &Store, world: World) -> Result<ExitCode, Failure> {
    let database = match store {
        Store::Postgres(database) => database,
        Store::Sqlite(_) => {
            let words = "reservations archive: a SQLite ledger keeps every payment where it is; where they become too many, \
                 the PostgreSQL ledger is meant (budget.store: postgres)";
            return Err(Failure::Usage(words.to_owned()));
        }
        Store::None => return Err(Failure::Usage("budget.store: no ledger is configured".to_owned())),
    };
    let ledger = PostgresLedger::connect(database, world, None, Options::default()).await?;
    let (mut moved, mut from) = (0, 0);
    loop {
        let some = ledger.archive(args.older_than, from, args.batch).await?;
        moved += some.payments;
        from = some.from_ms;
        if !some.more {
            break;
        }
        if !args.json {
            say!("{moved} payments moved");
        }
    }
    let days = args.older_than / DAY_MS;
    match args.json {
        true => show(&json!({"archived": moved, "olderThanDays": days})),
        false => say!("{moved} payments older than {days} days moved; nothing more is to be moved"),
    }
    Ok(ExitCode::SUCCESS)
}
