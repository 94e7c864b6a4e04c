//! The book in one SQLite file, for one replica. The clock is the process's, never behind the newest decision; sums are
//! made here, while the write lock is held.

use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha384};
use sqlx::{Connection as _, Row as _, Sqlite as Driver, SqliteConnection, Transaction};
use tokio::sync::Mutex;

use super::{Day, Line, Verdict, Want};
use crate::ledger::LedgerError;
use crate::ledger::clock::day;
use crate::ledger::sqlite::{is_busy, open_file, unavailable};
use crate::money::Amount;
use crate::ports::World;

const MIGRATIONS: &[(i64, &str)] = &[(1, include_str!("../../../../migrations/signer/sqlite/0001_signer.sql"))];
const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS signer_migrations (version INTEGER PRIMARY KEY, checksum BLOB NOT NULL) STRICT";
/// Another process that holds the file longer is not waited for.
const BUSY: Duration = Duration::from_secs(3);
const WAIT: Duration = Duration::from_secs(5);

pub struct Sqlite {
    connection: Mutex<SqliteConnection>,
    world: World,
}

impl Sqlite {
    pub async fn open(path: &Path, world: World) -> Result<Sqlite, LedgerError> {
        let mut connection = open_file(path, BUSY).await?;
        migrate(&mut connection).await?;
        Ok(Sqlite { connection: Mutex::new(connection), world })
    }

    pub async fn reserve(&self, want: &Want<'_>, trial: bool) -> Result<Verdict, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        let asked = want.asked;
        let (network, nonce) = (want.network.as_str(), asked.nonce.to_string());
        let seen: Option<Vec<u8>> =
            sqlx::query_scalar("SELECT digest FROM signed_nonces WHERE network = ? AND payer = ? AND nonce = ?")
                .bind(network)
                .bind(&asked.payer)
                .bind(&nonce)
                .fetch_optional(&mut *tx)
                .await
                .map_err(unavailable)?;
        let today = day(now);
        let signed: Option<String> =
            sqlx::query_scalar("SELECT signed FROM signed_days WHERE network = ? AND asset = ? AND day = ?")
                .bind(network)
                .bind(&asked.asset)
                .bind(&today)
                .fetch_optional(&mut *tx)
                .await
                .map_err(unavailable)?;
        let signed = signed.map_or(Ok(Amount::ZERO), |text| text.parse().map_err(|_| broken()))?;
        let with = signed.checked_add(asked.amount);
        let verdict = match (seen, with) {
            (Some(digest), _) if digest == asked.digest => Verdict::Again,
            (Some(_), _) => Verdict::NonceReused,
            (None, Some(with)) if want.per_day.is_none_or(|most| with <= most) => {
                Verdict::Fresh { day: today.clone(), signed: with }
            }
            (None, _) => Verdict::DayCap { day: today.clone(), signed },
        };
        if trial {
            tx.rollback().await.map_err(unavailable)?;
            return Ok(verdict);
        }
        if let Verdict::Fresh { signed, .. } = &verdict {
            sqlx::query("INSERT INTO signed_nonces (network, payer, nonce, digest, at) VALUES (?, ?, ?, ?, ?)")
                .bind(network)
                .bind(&asked.payer)
                .bind(&nonce)
                .bind(&asked.digest[..])
                .bind(time(now))
                .execute(&mut *tx)
                .await
                .map_err(unavailable)?;
            sqlx::query(
                "INSERT INTO signed_days (network, asset, day, signed) VALUES (?, ?, ?, ?) \
                 ON CONFLICT (network, asset, day) DO UPDATE SET signed = excluded.signed",
            )
            .bind(network)
            .bind(&asked.asset)
            .bind(&today)
            .bind(signed.to_string())
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        }
        let line =
            Line { caller: want.caller, payment: want.payment, network: Some(want.network), asked: Some(want.asked) };
        let (decision, reason) = match (&verdict, verdict.refusal()) {
            (_, Some(no)) => ("refused", Some(no.word())),
            (Verdict::Again, None) => ("repeated", None),
            (_, None) => ("signed", None),
        };
        write(&mut tx, now, &line, decision, reason).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(verdict)
    }

    pub async fn record(&self, line: &Line<'_>, decision: &str, reason: &str) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        write(&mut tx, now, line, decision, Some(reason)).await?;
        tx.commit().await.map_err(unavailable)
    }

    pub async fn days(&self, days: u32) -> Result<Vec<Day>, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let after = day(self.now(&mut tx).await?.saturating_sub(u64::from(days) * 86_400_000));
        let rows = sqlx::query(
            "SELECT network, asset, day, signed FROM signed_days WHERE day > ? ORDER BY network, asset, day",
        )
        .bind(&after)
        .fetch_all(&mut *tx)
        .await
        .map_err(unavailable)?;
        let mut all = Vec::with_capacity(rows.len());
        for row in rows {
            let text = |index: usize| row.try_get::<String, _>(index).map_err(unavailable);
            let signed = text(3)?.parse().map_err(|_| broken())?;
            all.push(Day { network: text(0)?, asset: text(1)?, day: text(2)?, signed, by_decisions: Amount::ZERO });
        }
        let rows = sqlx::query("SELECT network, asset, at, amount FROM decisions WHERE decision = 'signed'")
            .fetch_all(&mut *tx);
        for row in rows.await.map_err(unavailable)? {
            let text = |index: usize| row.try_get::<String, _>(index).map_err(unavailable);
            let at = row.try_get::<i64, _>(2).map_err(unavailable)?;
            let (network, asset, day) = (text(0)?, text(1)?, day(u64::try_from(at).map_err(|_| broken())?));
            let amount = text(3)?.parse().map_err(|_| broken())?;
            if let Some(sum) = all.iter_mut().find(|d| d.network == network && d.asset == asset && d.day == day) {
                sum.by_decisions = sum.by_decisions.checked_add(amount).ok_or_else(broken)?;
            }
        }
        tx.rollback().await.map_err(unavailable)?;
        Ok(all)
    }

    pub async fn ping(&self) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        // The write lock proves that the file can be written; nothing is.
        begin(&mut connection).await?.rollback().await.map_err(unavailable)
    }

    #[cfg(test)]
    pub async fn alter(&self, sql: &str) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&mut *connection).await.map_err(unavailable)?;
        Ok(())
    }

    async fn connection(&self) -> Result<tokio::sync::MutexGuard<'_, SqliteConnection>, LedgerError> {
        tokio::time::timeout(WAIT, self.connection.lock()).await.map_err(|_| LedgerError::Busy)
    }

    async fn now(&self, db: &mut SqliteConnection) -> Result<u64, LedgerError> {
        let newest: Option<i64> = sqlx::query_scalar("SELECT at FROM decisions ORDER BY id DESC LIMIT 1")
            .fetch_optional(db)
            .await
            .map_err(unavailable)?;
        Ok(self.world.unix_ms().max(u64::try_from(newest.unwrap_or(0)).map_err(|_| broken())?))
    }
}

async fn begin(connection: &mut SqliteConnection) -> Result<Transaction<'_, Driver>, LedgerError> {
    match connection.begin_with("BEGIN IMMEDIATE").await {
        Ok(tx) => Ok(tx),
        Err(error) if is_busy(&error) => Err(LedgerError::Busy),
        Err(error) => Err(unavailable(error)),
    }
}

async fn write(
    db: &mut SqliteConnection,
    now: u64,
    line: &Line<'_>,
    decision: &str,
    reason: Option<&str>,
) -> Result<(), LedgerError> {
    let asked = line.asked;
    sqlx::query(
        "INSERT INTO decisions \
         (at, decision, reason, caller, payment, network, asset, payer, pay_to, amount, nonce, expiration) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(time(now))
    .bind(decision)
    .bind(reason)
    .bind(line.caller)
    .bind(line.payment)
    .bind(line.network.map(|n| n.as_str()))
    .bind(asked.map(|a| a.asset.as_str()))
    .bind(asked.map(|a| a.payer.as_str()))
    .bind(asked.map(|a| a.pay_to.as_str()))
    .bind(asked.map(|a| a.amount.to_string()))
    .bind(asked.map(|a| a.nonce.to_string()))
    .bind(asked.map(|a| i64::from(a.expiration)))
    .execute(db)
    .await
    .map(|_| ())
    .map_err(unavailable)
}

/// In one write transaction, so of several processes one migrates and the others find it done.
async fn migrate(connection: &mut SqliteConnection) -> Result<(), LedgerError> {
    let mut tx = begin(connection).await?;
    sqlx::raw_sql(TABLE).execute(&mut *tx).await.map_err(unavailable)?;
    let applied: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT version, checksum FROM signer_migrations ORDER BY version")
            .fetch_all(&mut *tx)
            .await
            .map_err(unavailable)?;
    for (version, checksum) in &applied {
        match MIGRATIONS.iter().find(|(known, _)| known == version) {
            Some((_, sql)) if Sha384::digest(sql)[..] == checksum[..] => {}
            Some(_) => {
                let problem = format!("migration {version} was applied with another text than this program's");
                return Err(LedgerError::Inconsistent(problem));
            }
            None => {
                let problem = format!("the file has schema version {version}: run a newer Tollway");
                return Err(LedgerError::Inconsistent(problem));
            }
        }
    }
    for (version, sql) in &MIGRATIONS[applied.len().min(MIGRATIONS.len())..] {
        sqlx::raw_sql(*sql).execute(&mut *tx).await.map_err(unavailable)?;
        sqlx::query("INSERT INTO signer_migrations (version, checksum) VALUES (?, ?)")
            .bind(version)
            .bind(&Sha384::digest(sql)[..])
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
    }
    tx.commit().await.map_err(unavailable)
}

fn time(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

fn broken() -> LedgerError {
    LedgerError::Inconsistent("a row of the signer's book cannot be read".to_owned())
}
