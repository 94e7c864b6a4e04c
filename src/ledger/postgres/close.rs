//! The ends of a payment: settle, in doubt, release; and the sealed bodies beside it.

use super::lanes::{self, Answer};
use super::reserve::{doubt, expire_lease};
use super::rows::{self, Held, Note, bytes, flag, int, signed, text};
use super::tx::{Fault, Gate, Tx, attempts};
use super::windows::{self, Locked};
use super::{PostgresLedger, outcome_context, payload_context};
use crate::ledger::{
    Evidence, Lease, LedgerError, PAYLOAD_AFTER_SETTLEMENT_MS, Reason, SettleOutcome, SettleRequest, State,
};
use crate::money::{Amount, PaymentId};

/// A longer outcome is stored by a transaction of its own, bytes: many of them would be held in memory together, here and in
/// the database.
const LONGEST_IN_A_BATCH: usize = 64 * 1024;

impl PostgresLedger {
    pub(super) async fn do_settle(&self, request: SettleRequest<'_>) -> Result<SettleOutcome, LedgerError> {
        let sealed = match (&self.ring, request.outcome) {
            (Some(ring), Some(body)) if body.len() <= self.options.max_outcome => {
                Some(ring.seal(&self.world, &outcome_context(request.payment_id), body))
            }
            _ => None,
        };
        if sealed.as_ref().is_none_or(|body| body.len() <= LONGEST_IN_A_BATCH) {
            match self.lanes.settle(lanes::End::of(&request, sealed.as_deref()))?.await {
                Ok(Answer::Said(ended)) => return ended,
                Ok(Answer::Alone(mut turn)) => {
                    turn.comes(self.options.lock_timeout).await;
                    return attempts!(tries = repeatable, self.try_settle(&request, sealed.as_deref()));
                }
                Err(_) => {}
            }
        }
        attempts!(tries = repeatable, self.try_settle(&request, sealed.as_deref()))
    }

    async fn try_settle(&self, request: &SettleRequest<'_>, sealed: Option<&[u8]>) -> Result<SettleOutcome, Fault> {
        let (tx, locked, row) = self.locked(request.payment_id).await?;
        if request.amount > row.reserved {
            return Err(above().into());
        }
        let ended = settle(&tx, &locked, &row, request).await?;
        if let (SettleOutcome::Settled, Some(body)) = (&ended, sealed) {
            self.store_outcome(&tx, row.id, body, request.unfinished).await?;
        }
        tx.commit().await?;
        Ok(ended)
    }

    /// A transaction that holds a payment's row and, of an open one, its windows, which come first.
    pub(super) async fn locked(&self, id: PaymentId) -> Result<(Tx, Locked, Held), Fault> {
        let mut tx = self.begin(Gate::Shared).await?;
        let row = rows::find(&tx, id).await?;
        // What is closed stays closed, and touches no window.
        let locked = match row.state.is_open() {
            true => windows::lock(&tx, &row.windows()).await?,
            false => Locked::new(),
        };
        let row = rows::lock(&tx, id).await?;
        tx.look_at_the_clock().await?;
        Ok((tx, locked, row))
    }

    /// Stored where none is, or where the one that is was the seller's request for input.
    async fn store_outcome(&self, tx: &Tx, id: PaymentId, body: &[u8], unfinished: bool) -> Result<(), Fault> {
        let (hex, now) = (id.to_hex(), signed(tx.now));
        tx.run(
            "INSERT INTO outcomes (payment_identifier, body, unfinished, created, expires) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (payment_identifier) DO UPDATE SET body = excluded.body, unfinished = excluded.unfinished, \
             created = excluded.created, expires = excluded.expires WHERE outcomes.unfinished OR outcomes.expires <= $4",
            &[
                text(&hex),
                bytes(&body),
                flag(&unfinished),
                int(&now),
                int(&signed(tx.now.saturating_add(self.options.outcome_ttl_ms))),
            ],
        )
        .await?;
        // With the last word stored, nothing needs the signed payload any more.
        tx.run(
            "UPDATE payments SET payload = NULL, payload_expires = NULL WHERE payment_identifier = $1 AND EXISTS \
             (SELECT 1 FROM outcomes o WHERE o.payment_identifier = $1 AND NOT o.unfinished)",
            &[text(&hex)],
        )
        .await?;
        Ok(())
    }

    /// Also of a row whose lease has expired meanwhile: in doubt it becomes either way, and the owner knows why.
    pub(super) async fn do_in_doubt(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, LedgerError> {
        attempts!(tries = repeatable, self.try_in_doubt(id, lease, reason))
    }

    async fn try_in_doubt(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, Fault> {
        let mut tx = self.begin(Gate::None).await?;
        let row = rows::lock(&tx, id).await?;
        tx.look_at_the_clock().await?;
        let ours = match row.state {
            State::Reserved if row.lease_token == lease.token => doubt(&tx, id, reason).await?,
            _ => is_repeated(&row, lease, State::InDoubt, reason),
        };
        tx.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_release(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, LedgerError> {
        attempts!(tries = repeatable, self.try_release(id, lease, reason))
    }

    async fn try_release(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, Fault> {
        let (tx, locked, row) = self.locked(id).await?;
        let alive = row.lease_expires.is_some_and(|expires| expires > tx.now);
        let ours = match row.state {
            State::Reserved if row.lease_token == lease.token && alive => {
                release_row(&tx, &locked, &row, End { reason, evidence: None, words: None }).await?;
                true
            }
            State::Reserved if !alive => {
                expire_lease(&tx, id).await?;
                false
            }
            _ => is_repeated(&row, lease, State::Released, reason),
        };
        tx.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_answered(&self, id: PaymentId) -> Result<(), LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            mark_answered(&tx, id).await?;
            tx.commit().await
        })
    }

    pub(super) async fn do_store_payload(
        &self,
        id: PaymentId,
        lease: &Lease,
        payload: &[u8],
    ) -> Result<bool, LedgerError> {
        let Some(ring) = &self.ring else { return Ok(false) };
        let sealed = ring.seal(&self.world, &payload_context(id), payload);
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let done = tx
                .run(
                    "UPDATE payments SET payload = $3 WHERE payment_identifier = $1 AND lease_token = $2 \
                     AND (state IN ('reserved', 'in_doubt') OR state = 'settled' AND payload IS NOT NULL \
                     AND lease_expires > $4 AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = $1 \
                     AND NOT o.unfinished))",
                    &[text(&id.to_hex()), bytes(&&lease.token[..]), bytes(&sealed), int(&signed(tx.now))],
                )
                .await?;
            tx.commit().await?;
            Ok(done == 1)
        })
    }

    pub(super) async fn do_payload(&self, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        let sql = "SELECT payload AS body FROM payments WHERE payment_identifier = $1 AND payload IS NOT NULL \
             AND (payload_expires IS NULL OR payload_expires > $2)";
        let sealed = self.body(sql, id).await?;
        Ok(sealed.and_then(|sealed| self.open_sealed(&payload_context(id), &sealed)))
    }

    pub(super) async fn do_outcome(&self, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        let sql = "SELECT body FROM outcomes WHERE payment_identifier = $1 AND expires > $2";
        let sealed = self.body(sql, id).await?;
        Ok(sealed.and_then(|sealed| self.open_sealed(&outcome_context(id), &sealed)))
    }

    async fn body(&self, sql: &str, id: PaymentId) -> Result<Option<Vec<u8>>, LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let row = tx.row(sql, &[text(&id.to_hex()), int(&signed(tx.now))]).await?;
            tx.commit().await?;
            Ok::<_, Fault>(row.as_ref().map(|row| rows::get(row, "body")).transpose()?)
        })
    }
}

async fn settle(tx: &Tx, locked: &Locked, row: &Held, request: &SettleRequest<'_>) -> Result<SettleOutcome, Fault> {
    let note = Note {
        amount: Some(request.amount),
        transaction: request.transaction,
        evidence: Some(request.evidence),
        ..Note::default()
    };
    match row.state {
        State::Released => {
            rows::note(tx, row.id, Note { event: "late_success", ..note }).await?;
            Ok(SettleOutcome::Released)
        }
        State::Settled => settled_before(tx, row, request, note).await,
        State::Reserved | State::InDoubt => match taken_by(tx, row, request.transaction).await? {
            Some(by) => Ok(SettleOutcome::TransactionTaken { by }),
            None => {
                settle_row(tx, locked, row, request.amount, note).await?;
                Ok(SettleOutcome::Settled)
            }
        },
    }
}

/// What is booked stays. A receipt may add the transaction that other evidence could not name, and ends a recovery.
async fn settled_before(
    tx: &Tx,
    row: &Held,
    request: &SettleRequest<'_>,
    note: Note<'_>,
) -> Result<SettleOutcome, Fault> {
    let adds = request.transaction.filter(|_| row.transaction.is_none());
    let other = request.transaction.is_some_and(|claimed| row.transaction.as_deref().is_some_and(|t| t != claimed));
    let booked = row.settled.ok_or_else(|| LedgerError::Inconsistent("a settled row without its amount".to_owned()))?;
    if other || booked != request.amount || taken_by(tx, row, adds).await?.is_some() {
        return Ok(SettleOutcome::SettledAs { amount: booked, transaction: row.transaction.clone() });
    }
    if let Some(transaction) = adds {
        tx.run_one(
            "UPDATE payments SET transaction_id = $2, updated = $3 \
             WHERE payment_identifier = $1 AND state = 'settled' AND transaction_id IS NULL",
            &[text(&row.id.to_hex()), text(&transaction), int(&signed(tx.now))],
        )
        .await?;
        rows::note(tx, row.id, Note { event: "transaction", ..note }).await?;
    }
    if request.evidence == Evidence::Receipt && row.lease_expires.is_some() {
        let sql = "UPDATE payments SET lease_expires = NULL WHERE payment_identifier = $1";
        tx.run_one(sql, &[text(&row.id.to_hex())]).await?;
    }
    Ok(SettleOutcome::Settled)
}

/// An open row -> settled, with its event. Whoever had its lease has it no longer.
pub(super) async fn settle_row(
    tx: &Tx,
    locked: &Locked,
    row: &Held,
    amount: Amount,
    note: Note<'_>,
) -> Result<(), Fault> {
    if amount > row.reserved {
        return Err(above().into());
    }
    tx.run_one(
        "UPDATE payments SET state = 'settled', reason = NULL, settled = $2::numeric, transaction_id = $3, \
         lease_expires = NULL, due = NULL, payload_expires = $4, updated = $5 \
         WHERE payment_identifier = $1 AND state IN ('reserved', 'in_doubt')",
        &[
            text(&row.id.to_hex()),
            text(&amount.to_string()),
            text(&note.transaction),
            int(&signed(tx.now.saturating_add(PAYLOAD_AFTER_SETTLEMENT_MS))),
            int(&signed(tx.now)),
        ],
    )
    .await?;
    rows::note(tx, row.id, Note { event: "settled", ..note }).await?;
    windows::close(tx, locked, row, amount).await
}

/// Why an open row is released, and on whose evidence.
pub(super) struct End<'a> {
    pub reason: Reason,
    pub evidence: Option<Evidence>,
    /// What an operator wrote.
    pub words: Option<&'a str>,
}

/// An open row, as it was read under its lock -> released. Its hold is free and its payload gone.
pub(super) async fn release_row(tx: &Tx, locked: &Locked, row: &Held, end: End<'_>) -> Result<(), Fault> {
    tx.run_one(
        "UPDATE payments SET state = 'released', reason = $2, lease_expires = NULL, due = NULL, payload = NULL, \
         payload_expires = NULL, updated = $3 \
         WHERE payment_identifier = $1 AND state = $4 AND state IN ('reserved', 'in_doubt') AND lease_token = $5",
        &[
            text(&row.id.to_hex()),
            text(&end.reason.as_str()),
            int(&signed(tx.now)),
            text(&row.state.as_str()),
            bytes(&&row.lease_token[..]),
        ],
    )
    .await?;
    let End { reason, evidence, words } = end;
    let note = Note { event: "released", reason: Some(reason.as_str()), evidence, words, ..Note::default() };
    rows::note(tx, row.id, note).await?;
    windows::close(tx, locked, row, Amount::ZERO).await
}

/// Another payment that has this transaction of the row's network. One that commits it at this moment is found by the
/// unique index, and by the next run.
pub(super) async fn taken_by(tx: &Tx, row: &Held, transaction: Option<&str>) -> Result<Option<PaymentId>, Fault> {
    let Some(transaction) = transaction else { return Ok(None) };
    if transaction.is_empty() {
        return Err(LedgerError::Inconsistent("an empty transaction".to_owned()).into());
    }
    let sql = "SELECT payment_identifier FROM payments WHERE transaction_id = $1 AND network = $2 \
        AND state = 'settled' UNION ALL SELECT payment_identifier FROM payments_archive WHERE transaction_id = $1 \
        AND network = $2 LIMIT 1";
    let found = tx.row(sql, &[text(&transaction), text(&row.unit.network.as_str())]).await?;
    let booked: Option<PaymentId> = found.as_ref().map(|row| rows::parsed(row, "payment_identifier")).transpose()?;
    Ok(booked.filter(|other| *other != row.id))
}

/// `false`: keyed, not settled, or answered before.
pub(super) async fn mark_answered(tx: &Tx, id: PaymentId) -> Result<bool, Fault> {
    let done = tx
        .run(
            "UPDATE payments SET answered = $2 WHERE payment_identifier = $1 AND state = 'settled' \
             AND idempotency_key IS NULL AND answered IS NULL",
            &[text(&id.to_hex()), int(&signed(tx.now))],
        )
        .await?;
    if done == 1 {
        rows::note(tx, id, Note { event: "answered", ..Note::default() }).await?;
    }
    Ok(done == 1)
}

/// The same statement of the same owner took effect before: its answer was lost.
pub(super) fn is_repeated(row: &Held, lease: &Lease, state: State, reason: Reason) -> bool {
    row.state == state && row.lease_token == lease.token && row.reason.as_deref() == Some(reason.as_str())
}

fn above() -> LedgerError {
    LedgerError::Inconsistent("a settlement above the reserved amount".to_owned())
}
