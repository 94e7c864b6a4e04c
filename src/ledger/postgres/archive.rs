//! What is over and old leaves the tables that a reservation touches: final payments and their history become rows of
//! `payments_archive`, their keys stay spent. A transaction moves a batch, or nothing; whoever is stopped between two goes
//! on with the next. The database's triggers let nothing go that is not in the archive word for word.

use super::PostgresLedger;
use super::rows::{self, EVENT, HELD, get, int, select_payments, signed, text, unsigned};
use super::tx::{Fault, Gate, Param, Tx, attempts};
use crate::ledger::{Event, LedgerError, Payment};
use crate::money::PaymentId;

use tokio_postgres::types::Type;

/// Thirteen months: what an audit of a year, and a dispute after it, may ask for.
pub const RETENTION_MS: u64 = 397 * 24 * 3_600_000;
/// Most payments of one transaction.
pub const MAX_BATCH: u32 = 5_000;

/// What one transaction moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Archived {
    pub payments: u64,
    /// Where the next one begins: payments that were made before are archived, or not to be archived now.
    pub from_ms: u64,
    pub more: bool,
}

/// `$1` made at or after, `$2` over since, `$3` now, `$4` at most. A Stellar ledger takes seconds, never a minute; of every
/// other network `dead_after` is a unix second. A keyless payment that was not answered, a stored body and a recovery's
/// lease are somebody's work. Of two that archive, each takes what the other has not.
const PICK: &str = "SELECT p.payment_identifier, p.created FROM payments p \
    WHERE p.created >= $1 AND p.created <= $2 AND p.updated <= $2 AND p.state IN ('settled', 'released') \
    AND p.payload IS NULL AND COALESCE(p.lease_expires <= $3, true) \
    AND (p.state = 'released' OR p.idempotency_key IS NOT NULL OR p.answered IS NOT NULL) \
    AND CASE WHEN p.network LIKE 'stellar:%' THEN p.dead_after - p.at_ledger <= ($3 - p.created) / 60000 \
        ELSE p.dead_after <= $3 / 1000 END \
    AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = p.payment_identifier) \
    ORDER BY p.created LIMIT $4 FOR UPDATE OF p SKIP LOCKED";

const COPY: &str = "INSERT INTO payments_archive (payment_identifier, network, transaction_id, archived, payment, events) \
    SELECT p.payment_identifier, p.network, p.transaction_id, $2, to_jsonb(p), COALESCE((SELECT \
    jsonb_agg(to_jsonb(e) ORDER BY e.id) FROM payment_events e WHERE e.payment_identifier = p.payment_identifier), '[]') \
    FROM payments p WHERE p.payment_identifier = ANY($1::text[])";

const SPEND_KEYS: &str = "INSERT INTO spent_keys (agent, idempotency_key, payment_identifier, call_hash, archived) \
    SELECT p.agent, p.idempotency_key, p.payment_identifier, p.call_hash, $2 FROM payments p \
    WHERE p.payment_identifier = ANY($1::text[]) AND p.idempotency_key IS NOT NULL";

/// Archived payments as rows `p` of `payments`, with the ledger's time as `$1`.
pub(super) const AUDITED: &str = "CROSS JOIN LATERAL (SELECT \
    (array_agg(event ORDER BY id DESC) FILTER (WHERE event IN ('reserved', 'in_doubt', 'settled', 'released')))[1] \
    AS last_event, count(*) FILTER (WHERE event IN ('settled', 'released')) AS ends, \
    (array_agg(amount::text ORDER BY id DESC) FILTER (WHERE event = 'settled'))[1] AS event_amount, \
    COALESCE(bool_or(event = 'late_success'), false) AS late_success \
    FROM jsonb_populate_recordset(NULL::payment_events, a.events)) e";

/// For an audit: every archived payment, with what its events say.
pub(super) fn audited() -> String {
    format!(
        "SELECT {HELD}, p.due, p.payload IS NOT NULL AS has_payload, p.payload_expires, \
         EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = p.payment_identifier) AS has_outcome, \
         e.last_event, e.ends, e.event_amount, e.late_success FROM payments_archive a \
         CROSS JOIN LATERAL jsonb_populate_record(NULL::payments, a.payment) p {AUDITED}"
    )
}

/// Archived payments whose key could be spent again.
pub(super) const FORGOTTEN_KEYS: &str = "SELECT left(a.payment_identifier, 16) AS id FROM payments_archive a \
    WHERE a.payment ->> 'idempotency_key' IS NOT NULL AND NOT EXISTS (SELECT 1 FROM spent_keys s \
    WHERE s.idempotency_key = a.payment ->> 'idempotency_key' AND s.agent = a.payment ->> 'agent' \
    AND s.payment_identifier = a.payment_identifier) LIMIT 100";

impl PostgresLedger {
    /// Moves at most `batch` payments that were made and over for `older_than_ms`, beginning with those made at `from_ms`
    /// (0 at first). The owner's of the tables.
    pub async fn archive(&self, older_than_ms: u64, from_ms: u64, batch: u32) -> Result<Archived, LedgerError> {
        if older_than_ms < RETENTION_MS {
            let days = RETENTION_MS / 86_400_000;
            return Err(LedgerError::Inconsistent(format!("payments are kept for at least {days} days")));
        }
        attempts!(tries = repeatable, self.try_archive(older_than_ms, from_ms, batch.clamp(1, MAX_BATCH)))
    }

    async fn try_archive(&self, older_than_ms: u64, from_ms: u64, batch: u32) -> Result<Archived, Fault> {
        let tx = self.begin(Gate::None).await?;
        let sql = "SELECT has_table_privilege('payments', 'DELETE') AND has_table_privilege('payments_archive', 'INSERT') \
            AS may";
        let may = tx.row(sql, &[]).await?;
        if !may.as_ref().map_or(Ok(false), |row| get::<bool>(row, "may"))? {
            let fix = "run it with the database URL of the tables' owner";
            return Err(LedgerError::Unavailable(format!("a role that serves may not archive: {fix}")).into());
        }
        let bound = tx.now.saturating_sub(older_than_ms);
        let (from, until, now, most) = (signed(from_ms), signed(bound), signed(tx.now), i64::from(batch));
        let picked = tx.rows(PICK, &[int(&from), int(&until), int(&now), int(&most)]).await?;
        let mut ids: Vec<&str> = Vec::with_capacity(picked.len());
        let mut next = from_ms;
        for row in &picked {
            ids.push(get(row, "payment_identifier")?);
            next = next.max(unsigned(get(row, "created")?)?);
        }
        let moved = u64::try_from(ids.len()).unwrap_or(u64::MAX);
        if !ids.is_empty() {
            // Statements that begin after the locks are held: an event that was written meanwhile is copied too.
            let ids: Param<'_> = (&ids, Type::TEXT_ARRAY);
            let archived = signed(tx.now);
            exactly(tx.run(COPY, &[ids.clone(), int(&archived)]).await?, moved)?;
            tx.run(SPEND_KEYS, &[ids.clone(), int(&archived)]).await?;
            tx.run("DELETE FROM payment_events WHERE payment_identifier = ANY($1::text[])", std::slice::from_ref(&ids))
                .await?;
            exactly(tx.run("DELETE FROM payments WHERE payment_identifier = ANY($1::text[])", &[ids]).await?, moved)?;
        }
        tx.commit().await?;
        Ok(Archived { payments: moved, from_ms: next, more: moved == u64::from(batch) })
    }
}

fn exactly(done: u64, wanted: u64) -> Result<(), LedgerError> {
    match done == wanted {
        true => Ok(()),
        false => Err(LedgerError::Inconsistent(format!("{done} of {wanted} locked payments were moved"))),
    }
}

pub(super) async fn by_id(tx: &Tx, id: PaymentId) -> Result<Option<Payment>, Fault> {
    let sql = select_payments!(
        from "payments_archive a CROSS JOIN LATERAL jsonb_populate_record(NULL::payments, a.payment) p",
        "WHERE a.payment_identifier = $2"
    );
    let row = tx.row(sql, &[int(&signed(tx.now)), text(&id.to_hex())]).await?;
    Ok(row.as_ref().map(rows::payment).transpose()?)
}

/// Those whose identifiers begin with `head`, two at most.
pub(super) async fn beginning_with(tx: &Tx, head: &str) -> Result<Vec<Payment>, Fault> {
    let sql = select_payments!(
        from "payments_archive a CROSS JOIN LATERAL jsonb_populate_record(NULL::payments, a.payment) p",
        "WHERE a.payment_identifier >= $2 AND a.payment_identifier < $3 LIMIT 2"
    );
    let found = tx.rows(sql, &[int(&signed(tx.now)), text(&head), text(&format!("{head}g"))]).await?;
    Ok(found.iter().map(rows::payment).collect::<Result<_, _>>()?)
}

/// The history of an archived payment, which ends with the day on which it came here.
pub(super) async fn events(tx: &Tx, id: PaymentId) -> Result<Vec<Event>, Fault> {
    let sql = format!(
        "SELECT {EVENT} FROM (SELECT e.*, 0 AS last FROM payments_archive a \
         CROSS JOIN LATERAL jsonb_populate_recordset(NULL::payment_events, a.events) e WHERE a.payment_identifier = $1 \
         UNION ALL SELECT 0, $1, a.archived, 'archived', NULL, NULL, NULL, NULL, NULL, 1 FROM payments_archive a \
         WHERE a.payment_identifier = $1) e ORDER BY last, id"
    );
    let found = tx.rows(&sql, &[text(&id.to_hex())]).await?;
    Ok(found.iter().map(rows::event).collect::<Result<_, _>>()?)
}
