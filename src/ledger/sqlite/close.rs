//! The ends of a payment: settle, in doubt, release; and the sealed bodies beside it.

use sqlx::SqliteConnection;

use super::recover::{drop_expired_bodies, mark_answered};
use super::reserve::{close_windows, doubt};
use super::rows::{self, Held, Note, exactly_one, signed};
use super::{SqliteLedger, Writing, now, outcome_context, payload_context, unavailable};
use crate::ledger::{
    Evidence, Lease, LedgerError, PAYLOAD_AFTER_SETTLEMENT_MS, Reason, SettleOutcome, SettleRequest, State,
};
use crate::money::{Amount, PaymentId};

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
            return Err(above());
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
        drop_expired_bodies(w).await?;
        sqlx::query(
            "INSERT INTO outcomes (payment_identifier, body, unfinished, created, expires) VALUES (?1, ?2, ?3, ?4, ?5) \
             ON CONFLICT (payment_identifier) DO UPDATE SET body = excluded.body, unfinished = excluded.unfinished, \
             created = excluded.created, expires = excluded.expires \
             WHERE outcomes.unfinished = 1 OR outcomes.expires <= ?4",
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
                release_row(&mut w, &row, End { reason, evidence: None, words: None }).await?;
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
        mark_answered(&mut w, id).await?;
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
             AND (state IN ('reserved', 'in_doubt') OR state = 'settled' AND payload IS NOT NULL \
             AND lease_expires > ?4 AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = ?1 \
             AND o.unfinished = 0))",
        )
        .bind(id.to_hex())
        .bind(&lease.token[..])
        .bind(sealed)
        .bind(signed(w.now))
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        w.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn do_payload(&self, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = now(&mut connection, &self.world).await?;
        let sealed: Option<Option<Vec<u8>>> = sqlx::query_scalar(
            "SELECT payload FROM payments WHERE payment_identifier = ?1 \
             AND (payload_expires IS NULL OR payload_expires > ?2)",
        )
        .bind(id.to_hex())
        .bind(signed(now))
        .fetch_optional(&mut *connection)
        .await
        .map_err(unavailable)?;
        Ok(sealed.flatten().and_then(|sealed| self.open_sealed(&payload_context(id), &sealed)))
    }

    pub(super) async fn do_outcome(&self, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = now(&mut connection, &self.world).await?;
        let sealed: Option<Vec<u8>> =
            sqlx::query_scalar("SELECT body FROM outcomes WHERE payment_identifier = ?1 AND expires > ?2")
                .bind(id.to_hex())
                .bind(signed(now))
                .fetch_optional(&mut *connection)
                .await
                .map_err(unavailable)?;
        Ok(sealed.and_then(|sealed| self.open_sealed(&outcome_context(id), &sealed)))
    }
}

async fn settle(w: &mut Writing<'_>, row: &Held, request: &SettleRequest<'_>) -> Result<SettleOutcome, LedgerError> {
    let note = Note {
        amount: Some(request.amount),
        transaction: request.transaction,
        evidence: Some(request.evidence),
        ..Note::default()
    };
    match row.state {
        State::Released => {
            rows::note(&mut w.tx, row.id, w.now, Note { event: "late_success", ..note }).await?;
            Ok(SettleOutcome::Released)
        }
        State::Settled => settled_before(w, row, request, note).await,
        State::Reserved | State::InDoubt => match taken_by(&mut w.tx, row, request.transaction).await? {
            Some(by) => Ok(SettleOutcome::TransactionTaken { by }),
            None => {
                settle_row(w, row, request.amount, note).await?;
                Ok(SettleOutcome::Settled)
            }
        },
    }
}

/// What is booked stays. A receipt may add the transaction that other evidence could not name, and ends a recovery.
async fn settled_before(
    w: &mut Writing<'_>,
    row: &Held,
    request: &SettleRequest<'_>,
    note: Note<'_>,
) -> Result<SettleOutcome, LedgerError> {
    let adds = request.transaction.filter(|_| row.transaction.is_none());
    let other = request.transaction.is_some_and(|claimed| row.transaction.as_deref().is_some_and(|t| t != claimed));
    let booked = row.settled.ok_or_else(|| LedgerError::Inconsistent("a settled row without its amount".to_owned()))?;
    if other || booked != request.amount || taken_by(&mut w.tx, row, adds).await?.is_some() {
        return Ok(SettleOutcome::SettledAs { amount: booked, transaction: row.transaction.clone() });
    }
    if let Some(transaction) = adds {
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
        rows::note(&mut w.tx, row.id, w.now, Note { event: "transaction", ..note }).await?;
    }
    if request.evidence == Evidence::Receipt && row.lease_expires.is_some() {
        sqlx::query("UPDATE payments SET lease_expires = NULL WHERE payment_identifier = ?1")
            .bind(row.id.to_hex())
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
    }
    Ok(SettleOutcome::Settled)
}

/// An open row -> settled, with its event. Whoever had its lease has it no longer.
pub(super) async fn settle_row(
    w: &mut Writing<'_>,
    row: &Held,
    amount: Amount,
    note: Note<'_>,
) -> Result<(), LedgerError> {
    if amount > row.reserved {
        return Err(above());
    }
    let done = sqlx::query(
        "UPDATE payments SET state = 'settled', reason = NULL, settled = ?2, transaction_id = ?3, lease_expires = NULL, \
         due = NULL, payload_expires = ?4, updated = ?5 \
         WHERE payment_identifier = ?1 AND state IN ('reserved', 'in_doubt')",
    )
    .bind(row.id.to_hex())
    .bind(amount.to_string())
    .bind(note.transaction)
    .bind(signed(w.now.saturating_add(PAYLOAD_AFTER_SETTLEMENT_MS)))
    .bind(signed(w.now))
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    exactly_one(done.rows_affected())?;
    rows::note(&mut w.tx, row.id, w.now, Note { event: "settled", ..note }).await?;
    close_windows(w, row, amount).await
}

/// Why an open row is released, and on whose evidence.
pub(super) struct End<'a> {
    pub reason: Reason,
    pub evidence: Option<Evidence>,
    /// What an operator wrote.
    pub words: Option<&'a str>,
}

/// An open row, as it was read in this transaction -> released. Its hold is free and its payload gone.
pub(super) async fn release_row(w: &mut Writing<'_>, row: &Held, end: End<'_>) -> Result<(), LedgerError> {
    let done = sqlx::query(
        "UPDATE payments SET state = 'released', reason = ?2, lease_expires = NULL, due = NULL, payload = NULL, \
         payload_expires = NULL, updated = ?3 \
         WHERE payment_identifier = ?1 AND state = ?4 AND state IN ('reserved', 'in_doubt') AND lease_token = ?5",
    )
    .bind(row.id.to_hex())
    .bind(end.reason.as_str())
    .bind(signed(w.now))
    .bind(row.state.as_str())
    .bind(&row.lease_token[..])
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    exactly_one(done.rows_affected())?;
    let End { reason, evidence, words } = end;
    let note = Note { event: "released", reason: Some(reason.as_str()), evidence, words, ..Note::default() };
    rows::note(&mut w.tx, row.id, w.now, note).await?;
    close_windows(w, row, Amount::ZERO).await
}

/// Another payment that has this transaction of the row's network.
pub(super) async fn taken_by(
    db: &mut SqliteConnection,
    row: &Held,
    transaction: Option<&str>,
) -> Result<Option<PaymentId>, LedgerError> {
    let Some(transaction) = transaction else { return Ok(None) };
    if transaction.is_empty() {
        return Err(LedgerError::Inconsistent("an empty transaction".to_owned()));
    }
    let booked: Option<String> = sqlx::query_scalar(
        "SELECT payment_identifier FROM payments WHERE transaction_id = ?1 AND network = ?2 AND state = 'settled'",
    )
    .bind(transaction)
    .bind(row.unit.network.as_str())
    .fetch_optional(db)
    .await
    .map_err(unavailable)?;
    let booked = booked.map(|id| id.parse::<PaymentId>()).transpose();
    let booked = booked.map_err(|_| LedgerError::Inconsistent("a payment's identifier cannot be read".to_owned()))?;
    Ok(booked.filter(|other| *other != row.id))
}

/// The same statement of the same owner took effect before: its answer was lost.
pub(super) fn is_repeated(row: &Held, lease: &Lease, state: State, reason: Reason) -> bool {
    row.state == state && row.lease_token == lease.token && row.reason.as_deref() == Some(reason.as_str())
}

pub(super) fn known(row: Option<Held>) -> Result<Held, LedgerError> {
    row.ok_or_else(|| LedgerError::Inconsistent("no such payment".to_owned()))
}

fn above() -> LedgerError {
    LedgerError::Inconsistent("a settlement above the reserved amount".to_owned())
}
