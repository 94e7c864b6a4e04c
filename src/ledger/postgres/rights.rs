//! A role with which replicas serve: it reads and writes what a payment needs, and can neither change the schema nor
//! remove a payment, rewrite history, lift an operator's rule, or archive. The owner of the tables migrates and archives.

use tokio_postgres::types::Type;

use super::connect::no_connection;
use super::migrate::alone;
use super::tx::{Fault, fault};
use super::wire::{COMMIT, Param, Session, Wire};
use super::{Database, Options, at_start, ended, pool};
use crate::ledger::LedgerError;

/// What a role that serves may do with one table.
pub(crate) struct Right {
    pub table: &'static str,
    pub may: &'static [&'static str],
}

const fn right(table: &'static str, may: &'static [&'static str]) -> Right {
    Right { table, may }
}

/// All of a book: what is not here, a role that serves may not.
pub(crate) struct Rights {
    pub tables: &'static [Right],
    pub functions: &'static [&'static str],
    /// The command that gives them.
    pub command: &'static str,
}

/// A lock on a row needs the right to change it, so tombstones are removed without one. Limits can be written: a file is
/// read again by every replica, and a stop has to be possible with whatever credentials are at hand.
pub(super) const LEDGER: Rights = Rights {
    tables: &[
        right("payments", &["SELECT", "INSERT", "UPDATE"]),
        right("payment_events", &["SELECT", "INSERT"]),
        right("budget_windows", &["SELECT", "INSERT", "UPDATE"]),
        right("spend_limits", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
        right("limit_lists", &["SELECT", "INSERT", "UPDATE"]),
        right("outcomes", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
        right("sessions_ended", &["SELECT", "INSERT", "DELETE"]),
        right("origin_rules", &["SELECT"]),
        right("recipient_pins", &["SELECT", "INSERT"]),
        right("spent_keys", &["SELECT"]),
        right("payments_archive", &["SELECT"]),
        right("claims", &["SELECT", "INSERT", "UPDATE"]),
        right("paid_answers", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
        right("claim_events", &["SELECT", "INSERT"]),
        right("_sqlx_migrations", &["SELECT"]),
    ],
    functions: &["tollway_now()"],
    command: "tollway migrate --runtime-role",
};

#[cfg(feature = "roles")]
pub(crate) const SIGNER: Rights = Rights {
    tables: &[
        right("signed_nonces", &["SELECT", "INSERT"]),
        right("signed_days", &["SELECT", "INSERT", "UPDATE"]),
        right("decisions", &["SELECT", "INSERT"]),
        right("signer_migrations", &["SELECT"]),
    ],
    functions: &[
        "signer_now()",
        "signer_time()",
        "signer_day(bigint)",
        "signer_reserve(text, text, text, text, text, text, text, text, bigint, bytea, text, boolean)",
    ],
    command: "tollway signer --migrate --runtime-role",
};

const WRITES: [&str; 4] = ["INSERT", "UPDATE", "DELETE", "TRUNCATE"];

/// What a role lacks, and what it has beyond its work.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Found {
    pub missing: Vec<String>,
    pub surplus: Vec<String>,
}

impl super::PostgresLedger {
    /// Gives `role` what a replica needs, and takes what it does not. Of the tables as they are: after `migrate`.
    pub async fn grant(database: &Database, role: &str) -> Result<(), LedgerError> {
        LEDGER.grant(database, role).await
    }

    /// Of the role with which this database is reached.
    pub async fn rights(database: &Database) -> Result<Found, LedgerError> {
        let (wire, session) = super::operators(database).await?;
        session.batch(&wire.begin()).await.map_err(|e| ended(fault(e)))?;
        LEDGER.found(&session, None).await.map_err(ended)
    }
}

impl Rights {
    /// One transaction: nobody sees the role between less and enough.
    pub async fn grant(&self, database: &Database, role: &str) -> Result<(), LedgerError> {
        let wire = Wire::new(database, &Options::default());
        let client = pool(database, &wire, 1)?.get().await.map_err(|e| at_start(database, no_connection(e)))?;
        let session = wire.session(client);
        session.batch(&alone(&wire)).await.map_err(|e| ended(fault(e)))?;
        let granted = self.write(&session, role).await.map_err(ended);
        let end = if granted.is_ok() { COMMIT } else { "ROLLBACK" };
        session.batch(end).await.map_err(|e| ended(fault(e)))?;
        granted
    }

    async fn write(&self, session: &Session, role: &str) -> Result<(), Fault> {
        let Some(schema) = here(session).await? else {
            return Err(LedgerError::Unavailable("its schema is not there yet: migrate it first".to_owned()).into());
        };
        let first = self.tables.first().map_or("", |right| right.table);
        let sql = "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_roles r \
            WHERE n.nspname = current_schema() AND c.relname = $2 AND r.rolname = $1 \
            AND pg_has_role(r.oid, c.relowner, 'MEMBER')";
        let owner = session.rows(sql, &[(&role, Type::TEXT), (&first, Type::TEXT)]).await.map_err(fault)?;
        if !owner.is_empty() {
            return refuse(format!("{} owns the tables, or is a superuser: serve with a role of its own", shown(role)));
        }
        let there = session.rows("SELECT 1 FROM pg_roles WHERE rolname = $1", &[(&role, Type::TEXT)]).await;
        if there.map_err(fault)?.is_empty() {
            return refuse(format!("there is no role {0}: CREATE ROLE {0} LOGIN PASSWORD '…' first", shown(role)));
        }
        session.batch(&self.statements(&schema, role)).await.map_err(fault)?;
        let missing = self.found(session, Some(role)).await?.missing;
        match missing.is_empty() {
            true => Ok(()),
            false => refuse(format!("{} still lacks {}: run this as the owner", shown(role), missing.join(", "))),
        }
    }

    fn statements(&self, schema: &str, role: &str) -> String {
        let (schema, role) = (quoted(schema), quoted(role));
        let mut sql = format!("GRANT USAGE ON SCHEMA {schema} TO {role};");
        for Right { table, may } in self.tables {
            let (table, may) = (quoted(table), may.join(", "));
            sql.push_str(&format!(" REVOKE ALL ON {schema}.{table} FROM {role};"));
            sql.push_str(&format!(" GRANT {may} ON {schema}.{table} TO {role};"));
        }
        for function in self.functions {
            sql.push_str(&format!(" GRANT EXECUTE ON FUNCTION {schema}.{function} TO {role};"));
        }
        sql
    }

    /// Whoever starts without a right would fail at the first payment.
    #[cfg(feature = "roles")]
    pub async fn check_at(&self, database: &Database) -> Result<(), LedgerError> {
        let (wire, session) = super::operators(database).await?;
        self.check(&session, &wire).await
    }

    pub(super) async fn check(&self, session: &Session, wire: &Wire) -> Result<(), LedgerError> {
        session.batch(&wire.begin()).await.map_err(|e| ended(fault(e)))?;
        let checked = self.checked(session, wire).await;
        session.batch("ROLLBACK").await.map_err(|e| ended(fault(e)))?;
        checked
    }

    async fn checked(&self, session: &Session, wire: &Wire) -> Result<(), LedgerError> {
        if here(session).await.map_err(ended)?.is_none() {
            let schema = wire.schema().unwrap_or("of its search_path");
            return Err(LedgerError::Unavailable(format!(
                "its schema is none: there is no schema {schema}, or its user may not use it: run {} as the owner",
                self.command
            )));
        }
        let missing = self.found(session, None).await.map_err(ended)?.missing;
        match missing.is_empty() {
            true => Ok(()),
            false => {
                let missing = missing.join(", ");
                let fix = format!("run {} with this user's name, as the owner", self.command);
                Err(LedgerError::Unavailable(format!("its user lacks {missing}: {fix}")))
            }
        }
    }

    /// Tables that are not there yet are the schema version's affair. `None`: of the session's own role.
    async fn found(&self, session: &Session, role: Option<&str>) -> Result<Found, Fault> {
        let tables: Vec<&str> = self.tables.iter().map(|right| right.table).collect();
        let params: [Param<'_>; 2] = [(&role, Type::TEXT), (&tables, Type::TEXT_ARRAY)];
        let sql = "SELECT t.name, p.priv, CASE WHEN p.priv IN ('DELETE', 'TRUNCATE') \
             THEN has_table_privilege(r.oid, c.oid, p.priv) ELSE has_any_column_privilege(r.oid, c.oid, p.priv) END AS has, \
             pg_has_role(r.oid, c.relowner, 'USAGE') AS owns, has_schema_privilege(r.oid, c.relnamespace, 'CREATE') AS makes \
             FROM unnest($2::text[]) t(name) JOIN pg_roles r ON r.rolname = COALESCE($1, current_user) \
             JOIN pg_class c ON c.oid = to_regclass(quote_ident(current_schema()) || '.' || quote_ident(t.name)), \
             (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE'), ('TRUNCATE')) p(priv) ORDER BY t.name, p.priv";
        let mut found = Found::default();
        for row in session.rows(sql, &params).await.map_err(fault)? {
            let name: String = row.try_get("name").map_err(fault)?;
            let privilege: String = row.try_get("priv").map_err(fault)?;
            let flag = |column| row.try_get::<_, bool>(column).map_err(fault);
            let allowed = self.tables.iter().any(|r| r.table == name && r.may.contains(&privilege.as_str()));
            if flag("owns")? {
                found.surplus = vec!["it owns the tables".to_owned()];
                return Ok(found);
            }
            match (allowed, flag("has")?) {
                (true, false) => found.missing.push(format!("{privilege} on {name}")),
                (false, true) if WRITES.contains(&privilege.as_str()) => {
                    found.surplus.push(format!("{privilege} on {name}"));
                }
                _ => {}
            }
            let makes = "CREATE in the schema".to_owned();
            if flag("makes")? && !found.surplus.contains(&makes) {
                found.surplus.push(makes);
            }
        }
        Ok(found)
    }
}

/// Where unqualified names lead; `None` where no schema of the search path is there for this role.
async fn here(session: &Session) -> Result<Option<String>, Fault> {
    let row = session.rows("SELECT current_schema()::text", &[]).await.map_err(fault)?;
    row.first().map_or(Ok(None), |row| row.try_get(0).map_err(fault))
}

fn refuse<T>(sentence: String) -> Result<T, Fault> {
    Err(LedgerError::Unavailable(sentence).into())
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn shown(name: &str) -> String {
    crate::x402::words(name, 63)
}
