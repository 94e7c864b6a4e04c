//! Claims in one SQLite file, for a gate of one process. The clock is the process's, never behind the newest event.

use std::path::Path;
use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection as _, Row as _, Sqlite as Driver, SqliteConnection, Transaction};
use tokio::sync::{Mutex, MutexGuard};

use super::operator::EventRow;
use super::{COLUMNS, Claim, ClaimError, Columns, Identity, Lease, NewClaim, State, Taken, Written};
use crate::ledger::LedgerError;
use crate::ledger::sqlite::{is_busy, open_migrated, unavailable};
use crate::ports::World;

/// Another process that holds the file longer is not waited for.
const BUSY: Duration = Duration::from_secs(3);
const WAIT: Duration = Duration::from_secs(5);

pub(super) struct Sqlite {
    connection: Mutex<SqliteConnection>,
    world: World,
}

impl Sqlite {
    pub(super) async fn open(path: &Path, world: World) -> Result<Sqlite, LedgerError> {
        Ok(Sqlite { connection: Mutex::new(open_migrated(path, BUSY).await?), world })
    }

    async fn connection(&self) -> Result<MutexGuard<'_, SqliteConnection>, LedgerError> {
        tokio::time::timeout(WAIT, self.connection.lock()).await.map_err(|_| LedgerError::Busy)
    }

    async fn now(&self, db: &mut SqliteConnection) -> Result<i64, LedgerError> {
        let newest: Option<i64> = sqlx::query_scalar("SELECT at FROM claim_events ORDER BY id DESC LIMIT 1")
            .fetch_optional(db)
            .await
            .map_err(unavailable)?;
        Ok(i64::try_from(self.world.unix_ms()).unwrap_or(i64::MAX / 4).max(newest.unwrap_or(0)))
    }

    pub(super) async fn look(&self, identity: &Identity) -> Result<Option<Claim>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = self.now(&mut connection).await?;
        row(&mut connection, identity, now).await
    }

    pub(super) async fn claim(&self, new: &NewClaim<'_>, lease: &Lease, lease_ms: i64) -> Result<Taken, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        let known = row(&mut tx, &new.identity, now).await?;
        let is_free = |known: &Claim| !known.leased && (known.state.may_be_claimed() || known.state == State::Claimed);
        if known.as_ref().is_some_and(|known| !is_free(known)) {
            return Ok(Taken::Known);
        }
        if let Some(identifier) = &new.proof.identifier {
            let other: Option<i64> = sqlx::query_scalar(
                "SELECT 1 FROM claims WHERE identifier_hash = ? AND scope = ? AND late = 0 AND identity <> ? \
                 AND state IN ('claimed', 'settling', 'unknown', 'settled')",
            )
            .bind(&identifier[..])
            .bind(new.scope)
            .bind(&new.identity.0[..])
            .fetch_optional(&mut *tx)
            .await
            .map_err(unavailable)?;
            if other.is_some() {
                return Ok(Taken::IdentifierConflict);
            }
        }
        sqlx::query(
            "INSERT INTO claims (identity, state, scope, call_hash, identifier_hash, session_hash, network, payer, nonce, \
             dies_at, offer, lease_token, lease_until, due, created, changed, seen_at) \
             VALUES (?1, 'claimed', ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?12, ?13, ?13, ?14) \
             ON CONFLICT (identity) DO UPDATE SET state = 'claimed', scope = excluded.scope, \
             call_hash = excluded.call_hash, identifier_hash = excluded.identifier_hash, \
             session_hash = excluded.session_hash, dies_at = max(dies_at, excluded.dies_at), offer = excluded.offer, \
             lease_token = excluded.lease_token, lease_until = excluded.lease_until, due = excluded.due, \
             changed = excluded.changed, settle_request = NULL, receipt = NULL, reason = NULL, answer = 'none'",
        )
        .bind(&new.identity.0[..])
        .bind(new.scope)
        .bind(&new.call.call[..])
        .bind(new.proof.identifier.as_ref().map(|hash| &hash[..]))
        .bind(new.proof.session.as_ref().map(|hash| &hash[..]))
        .bind(new.network)
        .bind(new.payer)
        .bind(new.nonce)
        .bind(i64::try_from(new.dies_at).unwrap_or(i64::MAX))
        .bind(new.offer.get())
        .bind(&lease.token[..])
        .bind(now.saturating_add(lease_ms))
        .bind(now)
        .bind(i64::try_from(new.seen_at).unwrap_or(i64::MAX))
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        event(&mut tx, &new.identity, now, None, State::Claimed, None).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(Taken::Fresh { settles: known.map_or(0, |known| known.settles) })
    }

    pub(super) async fn renew(&self, lease: &Lease, lease_ms: i64) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let until = self.now(&mut tx).await?.saturating_add(lease_ms);
        let done = sqlx::query("UPDATE claims SET lease_until = ?1, due = ?1 WHERE identity = ?2 AND lease_token = ?3")
            .bind(until)
            .bind(&lease.identity.0[..])
            .bind(&lease.token[..])
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn advance(&self, lease: &Lease, written: &Written<'_>) -> Result<bool, ClaimError> {
        let mut connection = self.connection().await.map_err(ClaimError::NotWritten)?;
        let mut tx = begin(&mut connection).await.map_err(ClaimError::NotWritten)?;
        let moved = self.moved(&mut tx, lease, written).await.map_err(ClaimError::NotWritten)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(moved)
    }

    async fn moved(
        &self,
        tx: &mut SqliteConnection,
        lease: &Lease,
        written: &Written<'_>,
    ) -> Result<bool, LedgerError> {
        let now = self.now(tx).await?;
        let arrow = written.arrow;
        let until = now.saturating_add(written.lease_ms);
        let moved = sqlx::query(
            "UPDATE claims SET state = ?1, lease_token = CASE WHEN ?2 THEN lease_token END, \
             lease_until = CASE WHEN ?2 THEN ?3 END, settles = settles + ?4, \
             settle_request = CASE WHEN ?1 IN ('settled', 'released') THEN NULL \
             ELSE COALESCE(?5, settle_request) END, receipt = COALESCE(?6, receipt), reason = ?7, \
             answer = COALESCE(?8, answer), late = late OR ?9, due = ?10, changed = ?11 WHERE identity = ?12 AND lease_token = ?13 AND state = ?14",
        )
        .bind(arrow.to.as_str())
        .bind(arrow.keeps_lease)
        .bind(until)
        .bind(i64::from(arrow.to == State::Settling))
        .bind(&written.settle_request)
        .bind(written.receipt)
        .bind(&written.reason)
        .bind(written.kept.map(super::Kept::as_str))
        .bind(arrow.from == State::Failed && arrow.to == State::Settled)
        .bind(if arrow.keeps_lease { until } else { now.saturating_add(written.again_in_ms) })
        .bind(now)
        .bind(&lease.identity.0[..])
        .bind(&lease.token[..])
        .bind(arrow.from.as_str())
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        if moved.rows_affected() == 0 {
            return Ok(false);
        }
        if let Some((round, sealed, ttl)) = &written.answer {
            sqlx::query(
                "INSERT INTO paid_answers (identity, round_hash, sealed, expires) VALUES (?, ?, ?, ?) \
                 ON CONFLICT (identity, round_hash) DO UPDATE SET sealed = excluded.sealed, expires = excluded.expires",
            )
            .bind(&lease.identity.0[..])
            .bind(&round[..])
            .bind(sealed)
            .bind(now.saturating_add(*ttl))
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        }
        if arrow.to == State::Settled && arrow.from != State::Settled {
            sqlx::query("UPDATE paid_answers SET expires = ?1 WHERE identity = ?2 AND expires < ?1 - ?3 / 100")
                .bind(now.saturating_add(written.answers_ms))
                .bind(&lease.identity.0[..])
                .bind(written.answers_ms)
                .execute(&mut *tx)
                .await
                .map_err(unavailable)?;
        }
        event(tx, &lease.identity, now, Some(arrow.from), arrow.to, written.reason.as_deref()).await?;
        Ok(true)
    }

    pub(super) async fn take(
        &self,
        lease: &Lease,
        state: State,
        max_runs: Option<i64>,
        lease_ms: i64,
    ) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        let done = sqlx::query(
            "UPDATE claims SET lease_token = ?1, lease_until = ?2, runs = runs + CASE WHEN ?3 IS NULL THEN 0 ELSE 1 END \
             WHERE identity = ?4 AND state = ?5 AND (lease_until IS NULL OR lease_until <= ?6) \
             AND (?3 IS NULL OR runs < ?3 AND answer = 'none')",
        )
        .bind(&lease.token[..])
        .bind(now.saturating_add(lease_ms))
        .bind(max_runs)
        .bind(&lease.identity.0[..])
        .bind(state.as_str())
        .bind(now)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn answer(&self, identity: &Identity, round: &[u8; 32]) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = self.now(&mut connection).await?;
        // Stored before the settle, and nobody's before its yes.
        sqlx::query_scalar(
            "SELECT a.sealed FROM paid_answers a JOIN claims c ON c.identity = a.identity \
             WHERE a.identity = ? AND a.round_hash = ? AND c.state = 'settled' AND a.expires > ?",
        )
        .bind(&identity.0[..])
        .bind(&round[..])
        .bind(now)
        .fetch_optional(&mut *connection)
        .await
        .map_err(unavailable)
    }

    pub(super) async fn settle_request(&self, identity: &Identity) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut connection = self.connection().await?;
        let found: Option<Option<Vec<u8>>> = sqlx::query_scalar("SELECT settle_request FROM claims WHERE identity = ?")
            .bind(&identity.0[..])
            .fetch_optional(&mut *connection)
            .await
            .map_err(unavailable)?;
        Ok(found.flatten())
    }

    pub(super) async fn expire(&self) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        let gone: Vec<(Vec<u8>, String)> = sqlx::query_as(
            "SELECT identity, state FROM claims WHERE state IN ('claimed', 'settling') AND due <= ?1 \
             AND lease_until <= ?1 ORDER BY due LIMIT 1000",
        )
        .bind(now)
        .fetch_all(&mut *tx)
        .await
        .map_err(unavailable)?;
        for (identity, state) in gone {
            let broken = || LedgerError::Inconsistent("a claim's identity or state cannot be read".into());
            let identity = Identity(identity.try_into().map_err(|_| broken())?);
            let was = State::parse(&state).ok_or_else(broken)?;
            let to = if was == State::Claimed { State::Released } else { State::Unknown };
            sqlx::query(
                "UPDATE claims SET state = ?, lease_token = NULL, lease_until = NULL, reason = 'holder_gone', due = ?, \
                 changed = ? WHERE identity = ?",
            )
            .bind(to.as_str())
            .bind(now)
            .bind(now)
            .bind(&identity.0[..])
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
            event(&mut tx, &identity, now, Some(was), to, Some("holder_gone")).await?;
        }
        tx.commit().await.map_err(unavailable)
    }

    pub(super) async fn due(&self, token: &[u8; 16], most: i64, lease_ms: i64) -> Result<Vec<Claim>, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        let sql = format!(
            "UPDATE claims SET lease_token = ?1, lease_until = ?2 WHERE identity IN ( \
             SELECT identity FROM (SELECT identity, due, min( \
             row_number() OVER (PARTITION BY network ORDER BY due, identity), \
             row_number() OVER (PARTITION BY network ORDER BY created DESC, identity)) AS turn \
             FROM claims WHERE state = 'unknown' AND due <= ?3 AND (lease_until IS NULL OR lease_until <= ?3)) \
             ORDER BY turn, due LIMIT ?4) RETURNING {COLUMNS}, 1"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(&token[..])
            .bind(now.saturating_add(lease_ms))
            .bind(now)
            .bind(most)
            .fetch_all(&mut *tx)
            .await
            .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        rows.iter().map(claim).collect()
    }

    pub(super) async fn list(&self, states: &[&str], most: i64) -> Result<Vec<Claim>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = self.now(&mut connection).await?;
        let sql = format!(
            "SELECT {COLUMNS}, COALESCE(lease_until > ?1, 0) FROM claims \
             WHERE state IN (SELECT value FROM json_each(?2)) ORDER BY created DESC, identity LIMIT ?3"
        );
        let words = serde_json::json!(states).to_string();
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(now).bind(words).bind(most);
        rows.fetch_all(&mut *connection).await.map_err(unavailable)?.iter().map(claim).collect()
    }

    pub(super) async fn between(&self, low: &[u8; 32], high: &[u8; 32]) -> Result<Vec<Claim>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = self.now(&mut connection).await?;
        let sql = format!(
            "SELECT {COLUMNS}, COALESCE(lease_until > ?1, 0) FROM claims WHERE identity BETWEEN ?2 AND ?3 LIMIT 2"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(now).bind(&low[..]).bind(&high[..]);
        rows.fetch_all(&mut *connection).await.map_err(unavailable)?.iter().map(claim).collect()
    }

    pub(super) async fn events(&self, identity: &Identity) -> Result<Vec<EventRow>, LedgerError> {
        let mut connection = self.connection().await?;
        sqlx::query_as(
            "SELECT at, from_state, to_state, reason FROM claim_events WHERE identity = ? ORDER BY id LIMIT 1000",
        )
        .bind(&identity.0[..])
        .fetch_all(&mut *connection)
        .await
        .map_err(unavailable)
    }

    pub(super) async fn now_ms(&self) -> Result<i64, LedgerError> {
        let mut connection = self.connection().await?;
        self.now(&mut connection).await
    }

    pub(super) async fn forget_requests(&self, network: &str, dead: i64, most: i64) -> Result<u64, LedgerError> {
        let mut connection = self.connection().await?;
        let done = sqlx::query(
            "UPDATE claims SET settle_request = NULL WHERE identity IN ( \
             SELECT identity FROM claims WHERE state = 'failed' AND settle_request IS NOT NULL AND network = ?1 \
             AND dies_at < ?2 ORDER BY dies_at LIMIT ?3)",
        )
        .bind(network)
        .bind(dead)
        .bind(most)
        .execute(&mut *connection)
        .await;
        match done {
            Ok(done) => Ok(done.rows_affected()),
            Err(error) if is_busy(&error) => Err(LedgerError::Busy),
            Err(error) => Err(unavailable(error)),
        }
    }

    pub(super) async fn forget_answers(&self, most: i64) -> Result<u64, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = begin(&mut connection).await?;
        let now = self.now(&mut tx).await?;
        let done = sqlx::query(
            "DELETE FROM paid_answers WHERE rowid IN ( \
             SELECT a.rowid FROM paid_answers a JOIN claims c ON c.identity = a.identity \
             WHERE a.expires <= ? AND c.state NOT IN ('settling', 'unknown') ORDER BY a.expires LIMIT ?)",
        )
        .bind(now)
        .bind(most)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(done.rows_affected())
    }
}

async fn begin(connection: &mut SqliteConnection) -> Result<Transaction<'_, Driver>, LedgerError> {
    match connection.begin_with("BEGIN IMMEDIATE").await {
        Ok(tx) => Ok(tx),
        Err(error) if is_busy(&error) => Err(LedgerError::Busy),
        Err(error) => Err(unavailable(error)),
    }
}

async fn row(db: &mut SqliteConnection, identity: &Identity, now: i64) -> Result<Option<Claim>, LedgerError> {
    let sql = format!("SELECT {COLUMNS}, COALESCE(lease_until > ?, 0) FROM claims WHERE identity = ?");
    let found = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(now).bind(&identity.0[..]).fetch_optional(db).await;
    found.map_err(unavailable)?.as_ref().map(claim).transpose()
}

async fn event(
    db: &mut SqliteConnection,
    identity: &Identity,
    now: i64,
    from: Option<State>,
    to: State,
    reason: Option<&str>,
) -> Result<(), LedgerError> {
    sqlx::query("INSERT INTO claim_events (identity, at, from_state, to_state, reason) VALUES (?, ?, ?, ?, ?)")
        .bind(&identity.0[..])
        .bind(now)
        .bind(from.map(State::as_str))
        .bind(to.as_str())
        .bind(reason)
        .execute(db)
        .await
        .map(|_| ())
        .map_err(unavailable)
}

fn claim(row: &SqliteRow) -> Result<Claim, LedgerError> {
    fn column<'r, T: sqlx::Decode<'r, Driver> + sqlx::Type<Driver>>(
        row: &'r SqliteRow,
        index: usize,
    ) -> Result<T, LedgerError> {
        row.try_get(index).map_err(unavailable)
    }
    Columns {
        identity: column(row, 0)?,
        state: column(row, 1)?,
        scope: column(row, 2)?,
        call_hash: column(row, 3)?,
        identifier_hash: column(row, 4)?,
        session_hash: column(row, 5)?,
        network: column(row, 6)?,
        payer: column(row, 7)?,
        nonce: column(row, 8)?,
        dies_at: column(row, 9)?,
        offer: column(row, 10)?,
        settles: column(row, 11)?,
        runs: column(row, 12)?,
        receipt: column(row, 13)?,
        reason: column(row, 14)?,
        answer: column(row, 15)?,
        seen_at: column(row, 16)?,
        created: column(row, 17)?,
        leased: column(row, 18)?,
    }
    .read()
}
