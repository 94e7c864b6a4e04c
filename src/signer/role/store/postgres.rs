//! The book in PostgreSQL, shared by every replica. A reservation is one statement: the database's function takes the
//! locks, decides by its own clock and writes, so no transaction waits for a process, and a pooler in transaction mode is
//! as good as a connection.

use std::time::Duration;

use deadpool_postgres::Pool;
use sha2::{Digest, Sha384};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql, Type};

use super::{Day, Line, Verdict, Want};
use crate::ledger::postgres::{SIGNER, connection_failed, connections, said};
use crate::ledger::{Database, LedgerError};
use crate::money::Amount;

const MIGRATIONS: &[(i64, &str)] = &[(1, include_str!("../../../../migrations/signer/postgres/0001_signer.sql"))];
const TABLE: &str = "CREATE TABLE IF NOT EXISTS signer_migrations (version BIGINT PRIMARY KEY, checksum BYTEA NOT NULL, \
    installed_on TIMESTAMPTZ NOT NULL DEFAULT now())";
const CONNECTIONS: usize = 8;
/// A lock is waited for 3 s at most; whoever waits longer than this waits for a server that is gone.
const PATIENCE: Duration = Duration::from_secs(8);
/// Of what an operator asks for.
const LONG: Duration = Duration::from_secs(60);

type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub struct Postgres {
    pool: Pool,
    /// `schema.`, or nothing: what a session behind a pooler looks up, it finds by its whole name.
    within: String,
}

impl Postgres {
    pub async fn connect(database: &Database) -> Result<Postgres, LedgerError> {
        SIGNER.check_at(database).await?;
        let store = Postgres::new(database, CONNECTIONS)?;
        let within = &store.within;
        let table = format!("SELECT to_regclass('{within}signer_migrations') IS NOT NULL");
        let there: bool = column(&one(store.rows(&table, &[]).await?)?, 0)?;
        let found: Option<i64> = match there {
            true => {
                let newest = format!("SELECT max(version) FROM {within}signer_migrations");
                column(&one(store.rows(&newest, &[]).await?)?, 0)?
            }
            false => None,
        };
        if found != Some(newest()) {
            let found = found.map_or_else(|| "none".to_owned(), |found| found.to_string());
            let fix = "run tollway signer --migrate, or the Tollway that fits";
            return Err(LedgerError::Unavailable(format!(
                "its schema is {found}, this program's is {}: {fix}",
                newest()
            )));
        }
        let durable = one(store.rows("SELECT current_setting('synchronous_commit')", &[]).await?)?;
        if column::<String>(&durable, 0)? == "off" {
            let fix = "set it to on for this role, or a crash forgets what was signed";
            return Err(LedgerError::Unavailable(format!("synchronous_commit is off in the database: {fix}")));
        }
        Ok(store)
    }

    fn new(database: &Database, size: usize) -> Result<Postgres, LedgerError> {
        let within = database.schema().map(|schema| format!("{schema}.")).unwrap_or_default();
        Ok(Postgres { pool: connections(database, size)?, within })
    }

    /// All in one transaction; of several processes one migrates, and the others find it done.
    pub async fn migrate(database: &Database) -> Result<(), LedgerError> {
        let store = Postgres::new(database, 1)?;
        let client = store.pool.get().await.map_err(connection_failed)?;
        let path = database.schema().map(|schema| format!("SET LOCAL search_path = {schema};")).unwrap_or_default();
        let begin = format!(
            "BEGIN; SET LOCAL lock_timeout = '30s'; {path} \
             SELECT pg_advisory_xact_lock(hashtext('tollway signer'), hashtext(current_schema())); {TABLE}"
        );
        client.batch_execute(&begin).await.map_err(|e| said(&e))?;
        let applied = client.query_typed("SELECT version, checksum FROM signer_migrations ORDER BY version", &[]).await;
        let applied = applied.map_err(|e| said(&e))?;
        for row in &applied {
            let (version, checksum): (i64, Vec<u8>) = (column(row, 0)?, column(row, 1)?);
            match MIGRATIONS.iter().find(|(known, _)| *known == version) {
                Some((_, sql)) if Sha384::digest(sql)[..] == checksum[..] => {}
                Some(_) => {
                    let problem = format!("migration {version} was applied with another text than this program's");
                    return Err(LedgerError::Inconsistent(problem));
                }
                None => {
                    let problem = format!("the database has schema version {version}: run a newer Tollway");
                    return Err(LedgerError::Inconsistent(problem));
                }
            }
        }
        for (version, sql) in &MIGRATIONS[applied.len().min(MIGRATIONS.len())..] {
            client.batch_execute(sql).await.map_err(|e| said(&e))?;
            let checksum = Sha384::digest(sql).to_vec();
            let insert = "INSERT INTO signer_migrations (version, checksum) VALUES ($1, $2)";
            let params: [Param<'_>; 2] = [(version, Type::INT8), (&checksum, Type::BYTEA)];
            client.execute_typed(insert, &params).await.map_err(|e| said(&e))?;
        }
        client.batch_execute("COMMIT").await.map_err(|e| said(&e))
    }

    /// One statement, never repeated by itself. A connection that did not answer is not used again.
    async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, LedgerError> {
        self.rows_within(PATIENCE, sql, params).await
    }

    async fn rows_within(&self, patience: Duration, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, LedgerError> {
        let client = self.pool.get().await.map_err(connection_failed)?;
        match tokio::time::timeout(patience, client.query_typed(sql, params)).await {
            Ok(rows) => rows.map_err(|e| said(&e)),
            Err(_) => {
                drop(deadpool_postgres::Object::take(client));
                Err(LedgerError::Unavailable("the database does not answer".to_owned()))
            }
        }
    }

    pub async fn reserve(&self, want: &Want<'_>, trial: bool) -> Result<Verdict, LedgerError> {
        let asked = want.asked;
        let sql = format!(
            "SELECT verdict, in_day, day_signed \
             FROM {}signer_reserve($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
            self.within
        );
        let per_day = want.per_day.map(|most| most.to_string());
        let params: [Param<'_>; 12] = [
            (&want.caller, Type::TEXT),
            (&want.payment, Type::TEXT),
            (&want.network.as_str(), Type::TEXT),
            (&asked.asset, Type::TEXT),
            (&asked.payer, Type::TEXT),
            (&asked.pay_to, Type::TEXT),
            (&asked.amount.to_string(), Type::TEXT),
            (&asked.nonce.to_string(), Type::TEXT),
            (&i64::from(asked.expiration), Type::INT8),
            (&&asked.digest[..], Type::BYTEA),
            (&per_day, Type::TEXT),
            (&trial, Type::BOOL),
        ];
        let row = one(self.rows(&sql, &params).await?)?;
        let (verdict, day): (String, String) = (column(&row, 0)?, column(&row, 1)?);
        let signed = amount(&column::<String>(&row, 2)?)?;
        match verdict.as_str() {
            "signed" => Ok(Verdict::Fresh { day, signed }),
            "repeated" => Ok(Verdict::Again),
            "nonce_reused" => Ok(Verdict::NonceReused),
            "day_cap" => Ok(Verdict::DayCap { day, signed }),
            _ => Err(broken()),
        }
    }

    pub async fn record(&self, line: &Line<'_>, decision: &str, reason: &str) -> Result<(), LedgerError> {
        let sql = format!(
            "INSERT INTO {0}decisions \
             (at, decision, reason, caller, payment, network, asset, payer, pay_to, amount, nonce, expiration) \
             VALUES (GREATEST({0}signer_now(), COALESCE((SELECT at FROM {0}decisions ORDER BY id DESC LIMIT 1), 0)), \
             $1, $2, $3, $4, $5, $6, $7, $8, $9::NUMERIC, $10, $11)",
            self.within
        );
        let asked = line.asked;
        let params: [Param<'_>; 11] = [
            (&decision, Type::TEXT),
            (&reason, Type::TEXT),
            (&line.caller, Type::TEXT),
            (&line.payment, Type::TEXT),
            (&line.network.map(|n| n.as_str()), Type::TEXT),
            (&asked.map(|a| a.asset.as_str()), Type::TEXT),
            (&asked.map(|a| a.payer.as_str()), Type::TEXT),
            (&asked.map(|a| a.pay_to.as_str()), Type::TEXT),
            (&asked.map(|a| a.amount.to_string()), Type::TEXT),
            (&asked.map(|a| a.nonce.to_string()), Type::TEXT),
            (&asked.map(|a| i64::from(a.expiration)), Type::INT8),
        ];
        self.rows(&sql, &params).await.map(|_| ())
    }

    pub async fn days(&self, days: u32) -> Result<Vec<Day>, LedgerError> {
        // One snapshot: the sums are those of one moment.
        let sql = format!(
            "SELECT d.network, d.asset, d.day, d.signed::TEXT, \
             (SELECT COALESCE(sum(e.amount), 0)::NUMERIC(78, 0)::TEXT FROM {0}decisions e \
              WHERE e.decision = 'signed' AND e.network = d.network AND e.asset = d.asset \
              AND {0}signer_day(e.at) = d.day) \
             FROM {0}signed_days d WHERE d.day > {0}signer_day({0}signer_now() - $1) ORDER BY 1, 2, 3",
            self.within
        );
        let back = i64::from(days).saturating_mul(86_400_000);
        let rows = self.rows_within(LONG, &sql, &[(&back, Type::INT8)]).await?;
        let day = |row: &Row| {
            Ok(Day {
                network: column(row, 0)?,
                asset: column(row, 1)?,
                day: column(row, 2)?,
                signed: amount(&column::<String>(row, 3)?)?,
                by_decisions: amount(&column::<String>(row, 4)?)?,
            })
        };
        rows.iter().map(day).collect()
    }

    pub async fn ping(&self) -> Result<(), LedgerError> {
        self.rows(&format!("SELECT {}signer_now()", self.within), &[]).await.map(|_| ())
    }
}

fn newest() -> i64 {
    MIGRATIONS.iter().map(|(version, _)| *version).max().unwrap_or(0)
}

fn broken() -> LedgerError {
    LedgerError::Inconsistent("a row of the signer's book cannot be read".to_owned())
}

fn one(rows: Vec<Row>) -> Result<Row, LedgerError> {
    rows.into_iter().next().ok_or_else(broken)
}

fn column<'r, T: FromSql<'r>>(row: &'r Row, index: usize) -> Result<T, LedgerError> {
    row.try_get(index).map_err(|_| broken())
}

fn amount(text: &str) -> Result<Amount, LedgerError> {
    text.parse().map_err(|_| broken())
}
