//! The ends of a payment: settle, in doubt, release; and the sealed bodies beside it.

use sqlx::SqliteConnection;

use super::reserve::{close_windows, doubt};
use super::rows::{self, Held, Note, exactly_one, signed};
use super::{SqliteLedger, Writing, outcome_context, payload_context, unavailable};
use crate::ledger::{Lease, LedgerError, Reason, SettleOutcome, SettleRequest, State};
use crate::money::{Amount, PaymentId, Unit};

/// A signed payload is kept this long after a settlement whose output is missing or unfinished.
const PAYLOAD_AFTER_SETTLEMENT_MS: u64 = 24 * 3_600_000;

impl SqliteLedger {
    pub(super) async fn do_settle(&self, request: SettleRequest<'_>) -> Result<SettleOutcome, LedgerError> {
        let sealed = match (&self.ring, request.outcome) {
            (Some(ring), Some(body)) if body.len() <= self.options.max_outcome => {
                Some(ring.seal(&self.world, &outcome_context(request.payment_id), body))
            }
            _ => None,
        };
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let row = known(rows::find(&mut w.tx, request.payment_id).await?)?;
        if request.amount > row.reserved {
            return Err(LedgerError::Inconsistent("a settlement above the reserved amount".to_owned()));
        }
        let ended = settle(&mut w, &row, &request).await?;
        if let (SettleOutcome::Settled, Some(body)) = (&ended, sealed) {
            self.store_outcome(&mut w, row.id, &body, request.unfinished).await?;
        }
        w.commit().await?;
        Ok(ended)
    }

    /// Stored where none is, or where the one that is was the seller's request for input.
    async fn store_outcome(
        &self,
        w: &mut Writing<'_>,
        id: PaymentId,
        body: &[u8],
        unfinished: bool,
    ) -> Result<(), LedgerError> {
        sqlx::query("DELETE FROM outcomes WHERE expires <= ?1")
            .bind(signed(w.now))
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        sqlx::query("UPDATE payments SET payload = NULL, payload_expires = NULL WHERE payload IS NOT NULL AND payload_expires <= ?1")
            .bind(signed(w.now))
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        sqlx::query(
            "INSERT INTO outcomes (payment_identifier, body, unfinished, created, expires) VALUES (?1, ?2, ?3, ?4, ?5) \
             ON CONFLICT (payment_identifier) DO UPDATE SET body = excluded.body, unfinished = excluded.unfinished, \
             created = excluded.created, expires = excluded.expires WHERE outcomes.unfinished = 1",
        )
        .bind(id.to_hex())
        .bind(body)
        .bind(unfinished)
        .bind(signed(w.now))
        .bind(signed(w.now.saturating_add(self.options.outcome_ttl_ms)))
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        // With the last word stored, nothing needs the signed payload any more.
        sqlx::query(
            "UPDATE payments SET payload = NULL, payload_expires = NULL WHERE payment_identifier = ?1 AND EXISTS \
             (SELECT 1 FROM outcomes o WHERE o.payment_identifier = ?1 AND o.unfinished = 0)",
        )
        .bind(id.to_hex())
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        Ok(())
    }

    /// Also of a row whose lease has expired meanwhile: in doubt it becomes either way, and the owner knows why.
    pub(super) async fn do_in_doubt(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let row = known(rows::find(&mut w.tx, id).await?)?;
        let ours = match row.state {
            State::Reserved if row.lease_token == lease.token => {
                doubt(&mut w, id, reason).await?;
                true
            }
            _ => is_repeated(&row, lease, State::InDoubt, reason),
        };
        w.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_release(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let row = known(rows::find(&mut w.tx, id).await?)?;
        let alive = row.lease_expires.is_some_and(|expires| expires > w.now);
        let ours = match row.state {
            State::Reserved if row.lease_token == lease.token && alive => {
                release(&mut w, &row, reason).await?;
                true
            }
            State::Reserved if !alive => {
                doubt(&mut w, id, Reason::LeaseExpired).await?;
                false
            }
            _ => is_repeated(&row, lease, State::Released, reason),
        };
        w.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_answered(&self, id: PaymentId) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let done = sqlx::query(
            "UPDATE payments SET answered = ?2 WHERE payment_identifier = ?1 AND state = 'settled' \
             AND idempotency_key IS NULL AND answered IS NULL",
        )
        .bind(id.to_hex())
        .bind(signed(w.now))
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        if done.rows_affected() == 1 {
            rows::note(&mut w.tx, id, w.now, Note { event: "answered", ..Note::default() }).await?;
        }
        w.commit().await
    }

    pub(super) async fn do_store_payload(
        &self,
        id: PaymentId,
        lease: &Lease,
        payload: &[u8],
    ) -> Result<bool, LedgerError> {
        let Some(ring) = &self.ring else { return Ok(false) };
        let sealed = ring.seal(&self.world, &payload_context(id), payload);
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let done = sqlx::query(
            "UPDATE payments SET payload = ?3 WHERE payment_identifier = ?1 AND lease_token = ?2 \
             AND state IN ('reserved', 'in_doubt')",
        )
        .bind(id.to_hex())
        .bind(&lease.token[..])
        .bind(sealed)
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        w.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn do_payload(&self, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut connection = self.connection().await?;
        let sealed: Option<Option<Vec<u8>>> = sqlx::query_scalar(
            "SELECT payload FROM payments WHERE payment_identifier = ?1 \
             AND (payload_expires IS NULL OR payload_expires > ?2)",
        )
        .bind(id.to_hex())
        .bind(signed(self.world.unix_ms()))
        .fetch_optional(&mut *connection)
        .await
        .map_err(unavailable)?;
        Ok(sealed.flatten().and_then(|sealed| self.open_sealed(&payload_context(id), &sealed)))
    }

    pub(super) async fn do_outcome(&self, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut connection = self.connection().await?;
        let sealed: Option<Vec<u8>> =
            sqlx::query_scalar("SELECT body FROM outcomes WHERE payment_identifier = ?1 AND expires > ?2")
                .bind(id.to_hex())
                .bind(signed(self.world.unix_ms()))
                .fetch_optional(&mut *connection)
                .await
                .map_err(unavailable)?;
        Ok(sealed.and_then(|sealed| self.open_sealed(&outcome_context(id), &sealed)))
    }
}

async fn settle(w: &mut Writing<'_>, row: &Held, request: &SettleRequest<'_>) -> Result<SettleOutcome, LedgerError> {
    let evidence = Note {
        amount: Some(request.amount),
        transaction: request.transaction,
        evidence: Some(request.evidence),
        ..Note::default()
    };
    if row.state == State::Released {
        rows::note(&mut w.tx, row.id, w.now, Note { event: "late_success", ..evidence }).await?;
        return Ok(SettleOutcome::Released);
    }
    if let Some(transaction) = request.transaction
        && booked(&mut w.tx, &row.unit, transaction).await?.is_some_and(|other| other != row.id.to_hex())
    {
        return Ok(SettleOutcome::TransactionTaken);
    }
    if row.state == State::Settled {
        // Settled by other evidence, which did not name the transaction: the receipt does.
        if let (Some(transaction), None) = (request.transaction, &row.transaction) {
            let done = sqlx::query(
                "UPDATE payments SET transaction_id = ?2, updated = ?3 \
                 WHERE payment_identifier = ?1 AND state = 'settled' AND transaction_id IS NULL",
            )
            .bind(row.id.to_hex())
            .bind(transaction)
            .bind(signed(w.now))
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
            exactly_one(done.rows_affected())?;
            rows::note(&mut w.tx, row.id, w.now, Note { event: "transaction", ..evidence }).await?;
        }
        return Ok(SettleOutcome::Settled);
    }
    let done = sqlx::query(
        "UPDATE payments SET state = 'settled', reason = NULL, settled = ?2, transaction_id = ?3, lease_expires = NULL, \
         due = NULL, payload_expires = ?4, updated = ?5 \
         WHERE payment_identifier = ?1 AND state IN ('reserved', 'in_doubt')",
    )
    .bind(row.id.to_hex())
    .bind(request.amount.to_string())
    .bind(request.transaction)
    .bind(signed(w.now.saturating_add(PAYLOAD_AFTER_SETTLEMENT_MS)))
    .bind(signed(w.now))
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    exactly_one(done.rows_affected())?;
    rows::note(&mut w.tx, row.id, w.now, Note { event: "settled", ..evidence }).await?;
    close_windows(w, row, request.amount).await?;
    Ok(SettleOutcome::Settled)
}

async fn release(w: &mut Writing<'_>, row: &Held, reason: Reason) -> Result<(), LedgerError> {
    let done = sqlx::query(
        "UPDATE payments SET state = 'released', reason = ?2, lease_expires = NULL, due = NULL, payload = NULL, \
         payload_expires = NULL, updated = ?3 \
         WHERE payment_identifier = ?1 AND state = 'reserved' AND lease_token = ?4",
    )
    .bind(row.id.to_hex())
    .bind(reason.as_str())
    .bind(signed(w.now))
    .bind(&row.lease_token[..])
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    exactly_one(done.rows_affected())?;
    let note = Note { event: "released", reason: Some(reason.as_str()), ..Note::default() };
    rows::note(&mut w.tx, row.id, w.now, note).await?;
    close_windows(w, row, Amount::ZERO).await
}

/// The payment that has this transaction of the network.
async fn booked(db: &mut SqliteConnection, unit: &Unit, transaction: &str) -> Result<Option<String>, LedgerError> {
    sqlx::query_scalar(
        "SELECT payment_identifier FROM payments WHERE transaction_id = ?1 AND network = ?2 AND state = 'settled'",
    )
    .bind(transaction)
    .bind(unit.network.as_str())
    .fetch_optional(db)
    .await
    .map_err(unavailable)
}

/// The same statement of the same owner took effect before: its answer was lost.
fn is_repeated(row: &Held, lease: &Lease, state: State, reason: Reason) -> bool {
    row.state == state && row.lease_token == lease.token && row.reason.as_deref() == Some(reason.as_str())
}

fn known(row: Option<Held>) -> Result<Held, LedgerError> {
    row.ok_or_else(|| LedgerError::Inconsistent("no such payment".to_owned()))
}
