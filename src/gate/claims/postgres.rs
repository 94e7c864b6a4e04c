//! Claims in PostgreSQL, shared by every replica. Each operation is one statement by the database's clock, so no
//! transaction waits for a process, and a pooler in transaction mode is as good as a connection. Everything is named by
//! its whole name: a session behind a pooler looks up nothing else.

use std::time::Duration;

use deadpool_postgres::Pool;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{Error, Row};

use super::operator::EventRow;
use super::{COLUMNS, Claim, ClaimError, Columns, Identity, Lease, NewClaim, State, Taken, Written};
use crate::ledger::postgres::{Pooler, PostgresLedger, connection_failed, connections, said};
use crate::ledger::{Database, LedgerError};

const CONNECTIONS: usize = 8;
/// A lock is waited for 3 s at most; whoever waits longer than this waits for a server that is gone.
const PATIENCE: Duration = Duration::from_secs(8);
/// The index that lets an identifier name one payment at a time.
const IDENTIFIER: &str = "claims_identifier";

type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub(super) struct Postgres {
    pool: Pool,
    /// Statements are prepared once on each connection; behind a pooler, which gives a session to somebody else the next
    /// moment, they are unnamed.
    named: bool,
    /// `schema.`, or nothing.
    within: String,
}

/// Why a statement did nothing.
enum Fault {
    Conflict,
    /// It was not begun, or the server itself took it back.
    NotWritten(LedgerError),
    /// It may have been committed.
    Store(LedgerError),
}

impl Postgres {
    pub(super) async fn connect(database: &Database) -> Result<Postgres, LedgerError> {
        let (found, newest) = PostgresLedger::schema_version(database).await?;
        if found != Some(newest) {
            let found = found.map_or_else(|| "none".to_owned(), |found| found.to_string());
            let problem = format!("its schema is {found}, this program's is {newest}: run tollway migrate");
            return Err(LedgerError::Unavailable(problem));
        }
        let within = database.schema().map(|schema| format!("{schema}.")).unwrap_or_default();
        let named = database.pooler() == Pooler::None;
        let store = Postgres { pool: connections(database, CONNECTIONS)?, named, within };
        let durable = store.rows("SELECT current_setting('synchronous_commit')", &[]).await?;
        if durable.first().map(|row| column::<String>(row, 0)).transpose()?.as_deref() == Some("off") {
            let fix = "set it to on for this role, or a crash forgets what was paid";
            return Err(LedgerError::Unavailable(format!("synchronous_commit is off in the database: {fix}")));
        }
        Ok(store)
    }

    pub(super) async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, LedgerError> {
        self.run(sql, params).await.map_err(|fault| match fault {
            Fault::Store(error) | Fault::NotWritten(error) => error,
            Fault::Conflict => LedgerError::Inconsistent("two open claims have one identifier".into()),
        })
    }

    /// One statement, never repeated by itself. A connection that did not answer is not used again.
    async fn run(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Fault> {
        let client = self.pool.get().await.map_err(|e| Fault::NotWritten(connection_failed(e)))?;
        let query = async {
            if !self.named {
                return client.query_typed(sql, params).await;
            }
            let types: Vec<Type> = params.iter().map(|(_, of)| of.clone()).collect();
            let statement = client.prepare_typed_cached(sql, &types).await?;
            let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(value, _)| *value).collect();
            client.query(&statement, &values).await
        };
        match tokio::time::timeout(PATIENCE, query).await {
            Ok(rows) => rows.map_err(|e| fault(&e)),
            Err(_) => {
                drop(deadpool_postgres::Object::take(client));
                Err(Fault::Store(LedgerError::Unavailable("the database does not answer".to_owned())))
            }
        }
    }

    pub(super) async fn look(&self, identity: &Identity) -> Result<Option<Claim>, LedgerError> {
        let sql = format!(
            "SELECT {COLUMNS}, COALESCE(lease_until > {0}tollway_now(), false) FROM {0}claims WHERE identity = $1",
            self.within
        );
        let rows = self.rows(&sql, &[(&&identity.0[..], Type::BYTEA)]).await?;
        rows.first().map(claim).transpose()
    }

    /// The one write that is not waited for until it is on the disk: everybody sees it at once, and all that a crash of the
    /// database forgets is a request that was begun and has sent nothing, as a claim that is released says too. Whoever
    /// held it loses it at its next arrow. What goes out does so behind [`Postgres::advance`], which waits, also for this.
    pub(super) async fn claim(&self, new: &NewClaim<'_>, lease: &Lease, lease_ms: i64) -> Result<Taken, LedgerError> {
        let sql = format!(
            "WITH made AS ( \
               INSERT INTO {0}claims AS c (identity, state, scope, call_hash, identifier_hash, session_hash, network, \
                 payer, nonce, dies_at, seen_at, offer, lease_token, lease_until, due, created, changed) \
               SELECT $1, 'claimed', $2, $3, $4, $5, $6, $7, $8, $9, $13, $10, $11, now + $12, now + $12, now, now \
               FROM (SELECT {0}tollway_now() AS now, set_config('synchronous_commit', 'off', true)) clock \
               ON CONFLICT (identity) DO UPDATE SET \
                 state = 'claimed', scope = excluded.scope, call_hash = excluded.call_hash, \
                 identifier_hash = excluded.identifier_hash, session_hash = excluded.session_hash, \
                 dies_at = greatest(c.dies_at, excluded.dies_at), offer = excluded.offer, lease_token = excluded.lease_token, \
                 lease_until = excluded.lease_until, due = excluded.due, changed = excluded.changed, \
                 settle_request = NULL, receipt = NULL, reason = NULL, answer = 'none' \
               WHERE c.state IN ('released', 'failed') AND (c.lease_until IS NULL OR c.lease_until <= excluded.changed) \
                 OR c.state = 'claimed' AND c.lease_until <= excluded.changed \
               RETURNING identity, changed, settles), \
             noted AS ( \
               INSERT INTO {0}claim_events (identity, at, to_state, reason) \
               SELECT identity, changed, 'claimed', NULL FROM made) \
             SELECT settles FROM made",
            self.within
        );
        let identifier = new.proof.identifier.as_ref().map(|hash| &hash[..]);
        let session = new.proof.session.as_ref().map(|hash| &hash[..]);
        let params: [Param<'_>; 13] = [
            (&&new.identity.0[..], Type::BYTEA),
            (&new.scope, Type::TEXT),
            (&&new.call.call[..], Type::BYTEA),
            (&identifier, Type::BYTEA),
            (&session, Type::BYTEA),
            (&new.network, Type::TEXT),
            (&new.payer, Type::TEXT),
            (&new.nonce, Type::TEXT),
            (&i64::try_from(new.dies_at).unwrap_or(i64::MAX), Type::INT8),
            (&new.offer.get(), Type::TEXT),
            (&&lease.token[..], Type::BYTEA),
            (&lease_ms, Type::INT8),
            (&i64::try_from(new.seen_at).unwrap_or(i64::MAX), Type::INT8),
        ];
        match self.run(&sql, &params).await {
            Ok(rows) => match rows.first() {
                None => Ok(Taken::Known),
                Some(row) => {
                    let settles = u32::try_from(column::<i32>(row, 0)?);
                    let broken = |_| LedgerError::Inconsistent("a claim's settles cannot be read".into());
                    Ok(Taken::Fresh { settles: settles.map_err(broken)? })
                }
            },
            Err(Fault::Conflict) => Ok(Taken::IdentifierConflict),
            Err(Fault::Store(error) | Fault::NotWritten(error)) => Err(error),
        }
    }

    pub(super) async fn renew(&self, lease: &Lease, lease_ms: i64) -> Result<bool, LedgerError> {
        let sql = format!(
            "UPDATE {0}claims SET lease_until = {0}tollway_now() + $3, due = {0}tollway_now() + $3 \
             WHERE identity = $1 AND lease_token = $2 RETURNING 1",
            self.within
        );
        let params: [Param<'_>; 3] =
            [(&&lease.identity.0[..], Type::BYTEA), (&&lease.token[..], Type::BYTEA), (&lease_ms, Type::INT8)];
        Ok(!self.rows(&sql, &params).await?.is_empty())
    }

    pub(super) async fn advance(&self, lease: &Lease, written: &Written<'_>) -> Result<bool, ClaimError> {
        let (arrow, w) = (written.arrow, &self.within);
        let kept = match written.answer {
            None => String::new(),
            Some(_) => format!(
                ", kept AS ( \
                   INSERT INTO {w}paid_answers (identity, round_hash, sealed, expires) \
                   SELECT identity, $11, $12, now + $13 FROM moved \
                   ON CONFLICT (identity, round_hash) DO UPDATE SET sealed = excluded.sealed, expires = excluded.expires)"
            ),
        };
        let longer = match arrow.to == State::Settled && arrow.from != State::Settled {
            false => String::new(),
            true => format!(
                ", longer AS ( \
                   UPDATE {w}paid_answers a SET expires = moved.now + $15 FROM moved \
                   WHERE a.identity = moved.identity AND a.expires < moved.now + $15 - $15 / 100)"
            ),
        };
        // The update waits for the row's lock and looks at it as it is then; what follows hits that row or none.
        let sql = format!(
            "WITH moved AS ( \
               UPDATE {w}claims c SET state = $4, \
                 lease_token = CASE WHEN $5 THEN c.lease_token END, \
                 lease_until = CASE WHEN $5 THEN clock.now + $6 END, \
                 settles = c.settles + CASE WHEN $4 = 'settling' THEN 1 ELSE 0 END, \
                 settle_request = CASE WHEN $4 IN ('settled', 'released') THEN NULL \
                   ELSE COALESCE($7, c.settle_request) END, \
                 receipt = COALESCE($8, c.receipt), reason = $9, answer = COALESCE($10, c.answer), \
                 late = c.late OR ($3 = 'failed' AND $4 = 'settled'), \
                 due = clock.now + CASE WHEN $5 THEN $6 ELSE $14 END, changed = clock.now \
               FROM (SELECT {w}tollway_now() AS now OFFSET 0) clock \
               WHERE c.identity = $1 AND c.lease_token = $2 AND c.state = $3 \
               RETURNING c.identity, clock.now){kept}{longer} \
             INSERT INTO {w}claim_events (identity, at, from_state, to_state, reason) \
             SELECT identity, now, $3, $4, $9 FROM moved RETURNING id"
        );
        let (round, sealed, ttl) = match &written.answer {
            Some((round, sealed, ttl)) => (Some(&round[..]), Some(&sealed[..]), *ttl),
            None => (None, None, 0),
        };
        let params: [Param<'_>; 15] = [
            (&&lease.identity.0[..], Type::BYTEA),
            (&&lease.token[..], Type::BYTEA),
            (&arrow.from.as_str(), Type::TEXT),
            (&arrow.to.as_str(), Type::TEXT),
            (&arrow.keeps_lease, Type::BOOL),
            (&written.lease_ms, Type::INT8),
            (&written.settle_request, Type::BYTEA),
            (&written.receipt, Type::TEXT),
            (&written.reason, Type::TEXT),
            (&written.kept.map(super::Kept::as_str), Type::TEXT),
            (&round, Type::BYTEA),
            (&sealed, Type::BYTEA),
            (&ttl, Type::INT8),
            (&written.again_in_ms, Type::INT8),
            (&written.answers_ms, Type::INT8),
        ];
        match self.run(&sql, &params).await {
            Ok(rows) => Ok(!rows.is_empty()),
            Err(Fault::NotWritten(error)) => Err(ClaimError::NotWritten(error)),
            Err(Fault::Store(error)) => Err(error.into()),
            Err(Fault::Conflict) => {
                Err(ClaimError::NotWritten(LedgerError::Inconsistent("two open claims have one identifier".into())))
            }
        }
    }

    pub(super) async fn take(
        &self,
        lease: &Lease,
        state: State,
        max_runs: Option<i64>,
        lease_ms: i64,
    ) -> Result<bool, LedgerError> {
        let sql = format!(
            "UPDATE {0}claims SET lease_token = $2, lease_until = {0}tollway_now() + $5, \
               runs = runs + CASE WHEN $4::BIGINT IS NULL THEN 0 ELSE 1 END \
             WHERE identity = $1 AND state = $3 AND (lease_until IS NULL OR lease_until <= {0}tollway_now()) \
               AND ($4::BIGINT IS NULL OR runs < $4 AND answer = 'none') RETURNING 1",
            self.within
        );
        let params: [Param<'_>; 5] = [
            (&&lease.identity.0[..], Type::BYTEA),
            (&&lease.token[..], Type::BYTEA),
            (&state.as_str(), Type::TEXT),
            (&max_runs, Type::INT8),
            (&lease_ms, Type::INT8),
        ];
        Ok(!self.rows(&sql, &params).await?.is_empty())
    }

    pub(super) async fn answer(&self, identity: &Identity, round: &[u8; 32]) -> Result<Option<Vec<u8>>, LedgerError> {
        // Stored before the settle, and nobody's before its yes.
        let sql = format!(
            "SELECT a.sealed FROM {0}paid_answers a JOIN {0}claims c ON c.identity = a.identity \
             WHERE a.identity = $1 AND a.round_hash = $2 AND c.state = 'settled' AND a.expires > {0}tollway_now()",
            self.within
        );
        let params: [Param<'_>; 2] = [(&&identity.0[..], Type::BYTEA), (&&round[..], Type::BYTEA)];
        self.rows(&sql, &params).await?.first().map(|row| column(row, 0)).transpose()
    }

    pub(super) async fn settle_request(&self, identity: &Identity) -> Result<Option<Vec<u8>>, LedgerError> {
        let sql = format!("SELECT settle_request FROM {}claims WHERE identity = $1", self.within);
        let rows = self.rows(&sql, &[(&&identity.0[..], Type::BYTEA)]).await?;
        rows.first().map_or(Ok(None), |row| column(row, 0))
    }

    pub(super) async fn expire(&self) -> Result<(), LedgerError> {
        let sql = format!(
            "WITH old AS ( \
               SELECT identity, state, {0}tollway_now() AS now FROM {0}claims \
               WHERE state IN ('claimed', 'settling') AND due <= {0}tollway_now() AND lease_until <= {0}tollway_now() \
               ORDER BY due LIMIT 1000 FOR UPDATE SKIP LOCKED), \
             moved AS ( \
               UPDATE {0}claims c SET state = CASE old.state WHEN 'claimed' THEN 'released' ELSE 'unknown' END, \
                 lease_token = NULL, lease_until = NULL, reason = 'holder_gone', due = old.now, changed = old.now \
               FROM old WHERE c.identity = old.identity \
               RETURNING c.identity, c.state AS is_now, old.state AS was, old.now) \
             INSERT INTO {0}claim_events (identity, at, from_state, to_state, reason) \
             SELECT identity, now, was, is_now, 'holder_gone' FROM moved",
            self.within
        );
        self.rows(&sql, &[]).await.map(|_| ())
    }

    pub(super) async fn due(&self, token: &[u8; 16], most: i64, lease_ms: i64) -> Result<Vec<Claim>, LedgerError> {
        let sql = format!(
            "WITH ranked AS ( \
               SELECT identity AS which, due AS since, least( \
                 row_number() OVER (PARTITION BY network ORDER BY due, identity), \
                 row_number() OVER (PARTITION BY network ORDER BY created DESC, identity)) AS turn \
               FROM {0}claims WHERE state = 'unknown' AND due <= {0}tollway_now() \
                 AND (lease_until IS NULL OR lease_until <= {0}tollway_now()) \
               ORDER BY turn, since LIMIT $2 * 8), \
             picked AS ( \
               SELECT c.identity AS which FROM {0}claims c JOIN ranked r ON r.which = c.identity \
               WHERE c.state = 'unknown' AND c.due <= {0}tollway_now() \
                 AND (c.lease_until IS NULL OR c.lease_until <= {0}tollway_now()) \
               ORDER BY r.turn, r.since LIMIT $2 FOR UPDATE OF c SKIP LOCKED) \
             UPDATE {0}claims SET lease_token = $1, lease_until = {0}tollway_now() + $3 \
             FROM picked WHERE identity = picked.which RETURNING {COLUMNS}, true",
            self.within
        );
        let params: [Param<'_>; 3] = [(&&token[..], Type::BYTEA), (&most, Type::INT8), (&lease_ms, Type::INT8)];
        self.rows(&sql, &params).await?.iter().map(claim).collect()
    }

    pub(super) async fn list(&self, states: &[&str], most: i64) -> Result<Vec<Claim>, LedgerError> {
        let sql = format!(
            "SELECT {COLUMNS}, COALESCE(lease_until > {0}tollway_now(), false) FROM {0}claims WHERE state = ANY($1) \
             ORDER BY created DESC, identity LIMIT $2",
            self.within
        );
        self.rows(&sql, &[(&states, Type::TEXT_ARRAY), (&most, Type::INT8)]).await?.iter().map(claim).collect()
    }

    pub(super) async fn between(&self, low: &[u8; 32], high: &[u8; 32]) -> Result<Vec<Claim>, LedgerError> {
        let sql = format!(
            "SELECT {COLUMNS}, COALESCE(lease_until > {0}tollway_now(), false) FROM {0}claims \
             WHERE identity BETWEEN $1 AND $2 LIMIT 2",
            self.within
        );
        let params: [Param<'_>; 2] = [(&&low[..], Type::BYTEA), (&&high[..], Type::BYTEA)];
        self.rows(&sql, &params).await?.iter().map(claim).collect()
    }

    pub(super) async fn events(&self, identity: &Identity) -> Result<Vec<EventRow>, LedgerError> {
        let sql = format!(
            "SELECT at, from_state, to_state, reason FROM {}claim_events WHERE identity = $1 ORDER BY id LIMIT 1000",
            self.within
        );
        let rows = self.rows(&sql, &[(&&identity.0[..], Type::BYTEA)]).await?;
        rows.iter().map(|row| Ok((column(row, 0)?, column(row, 1)?, column(row, 2)?, column(row, 3)?))).collect()
    }

    pub(super) async fn now_ms(&self) -> Result<i64, LedgerError> {
        let rows = self.rows(&format!("SELECT {}tollway_now()", self.within), &[]).await?;
        rows.first().map_or(Ok(0), |row| column(row, 0))
    }

    pub(super) async fn forget_requests(&self, network: &str, dead: i64, most: i64) -> Result<u64, LedgerError> {
        let sql = format!(
            "WITH old AS ( \
               SELECT identity FROM {0}claims WHERE state = 'failed' AND settle_request IS NOT NULL AND network = $1 \
                 AND dies_at < $2 ORDER BY dies_at LIMIT $3 FOR UPDATE SKIP LOCKED) \
             UPDATE {0}claims c SET settle_request = NULL FROM old WHERE c.identity = old.identity RETURNING 1",
            self.within
        );
        let params: [Param<'_>; 3] = [(&network, Type::TEXT), (&dead, Type::INT8), (&most, Type::INT8)];
        Ok(self.rows(&sql, &params).await?.len() as u64)
    }

    pub(super) async fn forget_answers(&self, most: i64) -> Result<u64, LedgerError> {
        // The row's lock, not its turn: an answer that is written anew at this moment stays.
        let sql = format!(
            "WITH old AS ( \
               SELECT a.identity, a.round_hash FROM {0}paid_answers a JOIN {0}claims c ON c.identity = a.identity \
               WHERE a.expires <= {0}tollway_now() AND c.state NOT IN ('settling', 'unknown') \
               ORDER BY a.expires LIMIT $1 FOR UPDATE OF a SKIP LOCKED) \
             DELETE FROM {0}paid_answers a USING old \
             WHERE a.identity = old.identity AND a.round_hash = old.round_hash RETURNING 1",
            self.within
        );
        Ok(self.rows(&sql, &[(&most, Type::INT8)]).await?.len() as u64)
    }
}

fn fault(error: &Error) -> Fault {
    let conflict = error
        .as_db_error()
        .is_some_and(|db| *db.code() == SqlState::UNIQUE_VIOLATION && db.constraint() == Some(IDENTIFIER));
    match error.as_db_error() {
        _ if conflict => Fault::Conflict,
        Some(db) if takes_back(db.code().code()) => Fault::NotWritten(said(error)),
        _ => Fault::Store(said(error)),
    }
}

/// Whether a statement that ended with this SQLSTATE was certainly rolled back. A server that is shut down, a connection
/// that ends, an I/O error or whatever is unknown here can come after the commit.
fn takes_back(code: &str) -> bool {
    const CLASSES: [&str; 8] = ["0A", "21", "22", "23", "25", "28", "42", "55"];
    let class = code.get(..2).unwrap_or_default();
    CLASSES.contains(&class) || matches!(code, "40001" | "40P01" | "57014")
}

fn claim(row: &Row) -> Result<Claim, LedgerError> {
    let count = |index| column::<i32>(row, index).map(i64::from);
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
        settles: count(11)?,
        runs: count(12)?,
        receipt: column(row, 13)?,
        reason: column(row, 14)?,
        answer: column(row, 15)?,
        seen_at: column(row, 16)?,
        created: column(row, 17)?,
        leased: column(row, 18)?,
    }
    .read()
}

fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, LedgerError> {
    row.try_get(index).map_err(|e| said(&e))
}
