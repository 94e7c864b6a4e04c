//! Leases of recovery and sweep, and what ends by them. A lease is a token: whoever has not the row's newest one changes
//! nothing. `due` is when an open row is to be looked at if nothing else happens: at the end of its lease, or later.

use sqlx::SqliteConnection;

use super::close::{End, is_repeated, known, release_row, settle_row, taken_by};
use super::reserve::{by_id, effective, unless_expired};
use super::rows::{self, Note, exactly_one, signed, unsigned};
use super::{SqliteLedger, Writing, payload_context, unavailable};
use crate::ledger::{
    self, Evidence, Holds, Lease, LedgerError, On, OpenRows, PAYLOAD_AFTER_SETTLEMENT_MS, Payment, Reason, Recoverable,
    Recovery, Resolution, Resolved, State, Tidied,
};
use crate::money::PaymentId;

/// Most payments that one sweep leases at once.
const MAX_DUE: u32 = 1_000;
/// Most rows of a kind that one transaction tidies.
pub(super) const MAX_TIDY: i64 = 500;

impl SqliteLedger {
    pub(super) async fn do_take_recovery(&self, id: PaymentId, lease_ms: u64) -> Result<Recovery, LedgerError> {
        let token = self.world.random();
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let row = existing(&mut w, id).await?;
        let row = unless_expired(&mut w, row).await?;
        let taken = self.recover(&mut w, row, token, lease_ms).await?;
        w.commit().await?;
        Ok(taken)
    }

    async fn recover(
        &self,
        w: &mut Writing<'_>,
        row: Payment,
        token: [u8; 16],
        lease_ms: u64,
    ) -> Result<Recovery, LedgerError> {
        let id = row.payment_id;
        if row.leased {
            return Ok(Recovery::Leased);
        }
        // The write lock keeps `suspend` out, so no recovery begins after a stop.
        if effective(&mut w.tx, &row.agent, &row.unit()).await?.suspended {
            return Ok(Recovery::Suspended);
        }
        let last_word = row.has_outcome && !row.outcome_unfinished;
        if row.state == State::Released || last_word || !row.has_payload {
            return Ok(Recovery::Nothing);
        }
        let sealed: Option<Vec<u8>> = sqlx::query_scalar("SELECT payload FROM payments WHERE payment_identifier = ?1")
            .bind(id.to_hex())
            .fetch_one(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        let Some(payload) = sealed.and_then(|sealed| self.open_sealed(&payload_context(id), &sealed)) else {
            return Ok(Recovery::Nothing);
        };
        let lease = take(w, id, token, lease_ms).await?;
        rows::note(&mut w.tx, id, w.now, Note { event: "recovery", ..Note::default() }).await?;
        let payment = existing(w, id).await?;
        Ok(Recovery::Taken(Box::new(Recoverable { payment, lease, payload })))
    }

    pub(super) async fn do_end_recovery(
        &self,
        id: PaymentId,
        lease: &Lease,
        reason: Option<Reason>,
    ) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let row = known(rows::find(&mut w.tx, id).await?)?;
        let ours = row.lease_token == lease.token && matches!(row.state, State::InDoubt | State::Settled);
        // Without a lease its end was written before, and the answer was lost.
        if ours && row.lease_expires.is_some() {
            let reason = reason.filter(|_| row.state == State::InDoubt).map(Reason::as_str);
            let done = sqlx::query(
                "UPDATE payments SET lease_expires = NULL, due = CASE WHEN due IS NOT NULL THEN ?3 END, \
                 reason = COALESCE(?4, reason), updated = CASE WHEN ?4 IS NULL THEN updated ELSE ?3 END \
                 WHERE payment_identifier = ?1 AND lease_token = ?2 AND state IN ('in_doubt', 'settled')",
            )
            .bind(id.to_hex())
            .bind(&lease.token[..])
            .bind(signed(w.now))
            .bind(reason)
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
            exactly_one(done.rows_affected())?;
            if reason.is_some() {
                rows::note(&mut w.tx, id, w.now, Note { event: "in_doubt", reason, ..Note::default() }).await?;
            }
        }
        w.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_take_due(
        &self,
        on: On<'_>,
        limit: u32,
        lease_ms: u64,
    ) -> Result<Vec<(Payment, Lease)>, LedgerError> {
        let (names, listed) = on.names();
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let due: Vec<String> = sqlx::query_scalar(
            "SELECT payment_identifier FROM payments WHERE state IN ('reserved', 'in_doubt') AND due <= ?1 \
             AND COALESCE(lease_expires <= ?1, 1) AND (instr(?3, ' ' || network || ' ') > 0) = ?4 \
             ORDER BY row_number() OVER (PARTITION BY agent ORDER BY due, payment_identifier), due, \
             payment_identifier LIMIT ?2",
        )
        .bind(signed(w.now))
        .bind(limit.min(MAX_DUE))
        .bind(names)
        .bind(listed)
        .fetch_all(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        let mut taken = Vec::with_capacity(due.len());
        for id in due {
            let id: PaymentId = id.parse().map_err(|_| vanished())?;
            let row = existing(&mut w, id).await?;
            unless_expired(&mut w, row).await?;
            let lease = take(&mut w, id, self.world.random(), lease_ms).await?;
            taken.push((existing(&mut w, id).await?, lease));
        }
        w.commit().await?;
        Ok(taken)
    }

    pub(super) async fn do_look_again(&self, id: PaymentId, lease: &Lease, due_ms: u64) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let done = sqlx::query(
            "UPDATE payments SET lease_expires = NULL, due = ?3 \
             WHERE payment_identifier = ?1 AND lease_token = ?2 AND state = 'in_doubt'",
        )
        .bind(id.to_hex())
        .bind(&lease.token[..])
        .bind(signed(due_ms))
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        w.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn do_expire(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, LedgerError> {
        if !matches!(reason, Reason::ExpiredUnspent | Reason::NonceCancelled) {
            return Err(LedgerError::Inconsistent(format!("{} is no finding of the chain", reason.as_str())));
        }
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let row = known(rows::find(&mut w.tx, id).await?)?;
        let alive = row.lease_token == lease.token && row.lease_expires.is_some_and(|expires| expires > w.now);
        let ours = match row.state {
            State::InDoubt if alive => {
                release_row(&mut w, &row, End { reason, evidence: Some(Evidence::Chain), words: None }).await?;
                true
            }
            _ => is_repeated(&row, lease, State::Released, reason),
        };
        w.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_resolve(&self, resolution: Resolution<'_>) -> Result<Resolved, LedgerError> {
        ledger::check_note(resolution.note)?;
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let resolved = resolve(&mut w, &resolution).await?;
        w.commit().await?;
        Ok(resolved)
    }

    /// In bounded parts: the one writer of the file is not kept from its next payment by a month of what has expired.
    pub(super) async fn do_tidy(&self) -> Result<Tidied, LedgerError> {
        let mut tidied = Tidied::default();
        loop {
            let (some, more) = self.tidy_some().await?;
            tidied.outcomes += some.outcomes;
            tidied.payloads += some.payloads;
            tidied.answered += some.answered;
            tidied.sessions += some.sessions;
            if !more {
                return Ok(tidied);
            }
        }
    }

    /// One transaction, and whether there is more.
    pub(super) async fn tidy_some(&self) -> Result<(Tidied, bool), LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let (outcomes, payloads) = drop_expired_bodies(&mut w).await?;
        let sessions = sqlx::query(
            "DELETE FROM sessions_ended WHERE session IN \
             (SELECT session FROM sessions_ended WHERE expires <= ?1 LIMIT ?2)",
        )
        .bind(signed(w.now))
        .bind(MAX_TIDY)
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?
        .rows_affected();
        // The day's grace is for a caller that was cut off from a payment of which nothing could be stored.
        let unanswered: Vec<String> = sqlx::query_scalar(
            "SELECT payment_identifier FROM payments p WHERE state = 'settled' AND idempotency_key IS NULL \
             AND answered IS NULL AND updated <= ?2 AND payload IS NULL AND COALESCE(lease_expires <= ?1, 1) \
             AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = p.payment_identifier) LIMIT ?3",
        )
        .bind(signed(w.now))
        .bind(signed(w.now.saturating_sub(PAYLOAD_AFTER_SETTLEMENT_MS)))
        .bind(MAX_TIDY)
        .fetch_all(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        let mut answered = 0;
        for id in unanswered {
            answered += u64::from(mark_answered(&mut w, id.parse().map_err(|_| vanished())?).await?);
        }
        w.commit().await?;
        let most = u64::try_from(MAX_TIDY).unwrap_or(u64::MAX);
        let more = [outcomes, payloads, sessions, answered].iter().any(|n| *n >= most);
        Ok((Tidied { outcomes, payloads, answered, sessions }, more))
    }

    pub(super) async fn do_open_rows(&self) -> Result<OpenRows, LedgerError> {
        let mut connection = self.connection().await?;
        let rows: Vec<(String, i64, Option<i64>)> = sqlx::query_as(
            "SELECT state, count(*), min(created) FROM payments WHERE state IN ('reserved', 'in_doubt') GROUP BY state",
        )
        .fetch_all(&mut *connection)
        .await
        .map_err(unavailable)?;
        let mut open = OpenRows::default();
        for (state, count, oldest) in rows {
            let holds = if state == "reserved" { &mut open.reserved } else { &mut open.in_doubt };
            *holds = Holds { count: unsigned(count)?, oldest_created_ms: oldest.map(unsigned).transpose()? };
        }
        Ok(open)
    }
}

/// What has no further use by its age, at most [`MAX_TIDY`] of each.
pub(super) async fn drop_expired_bodies(w: &mut Writing<'_>) -> Result<(u64, u64), LedgerError> {
    let outcomes = sqlx::query(
        "DELETE FROM outcomes WHERE payment_identifier IN \
         (SELECT payment_identifier FROM outcomes WHERE expires <= ?1 LIMIT ?2)",
    )
    .bind(signed(w.now))
    .bind(MAX_TIDY)
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    let payloads = sqlx::query(
        "UPDATE payments SET payload = NULL, payload_expires = NULL WHERE payment_identifier IN \
         (SELECT payment_identifier FROM payments WHERE payload IS NOT NULL AND payload_expires <= ?1 LIMIT ?2)",
    )
    .bind(signed(w.now))
    .bind(MAX_TIDY)
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    Ok((outcomes.rows_affected(), payloads.rows_affected()))
}

/// `false`: keyed, not settled, or answered before.
pub(super) async fn mark_answered(w: &mut Writing<'_>, id: PaymentId) -> Result<bool, LedgerError> {
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
    Ok(done.rows_affected() == 1)
}

/// A new lease on a row that nobody has.
async fn take(w: &mut Writing<'_>, id: PaymentId, token: [u8; 16], lease_ms: u64) -> Result<Lease, LedgerError> {
    let expires_ms = w.now.saturating_add(lease_ms);
    let done = sqlx::query(
        "UPDATE payments SET lease_token = ?2, lease_expires = ?3, due = CASE WHEN due IS NOT NULL THEN ?3 END, \
         attempts = attempts + 1 WHERE payment_identifier = ?1 AND state IN ('in_doubt', 'settled') \
         AND COALESCE(lease_expires <= ?4, 1)",
    )
    .bind(id.to_hex())
    .bind(&token[..])
    .bind(signed(expires_ms))
    .bind(signed(w.now))
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    exactly_one(done.rows_affected())?;
    // Nothing is signed under such a lease.
    Ok(Lease { token, expires_ms, sign_before_ms: 0 })
}

async fn resolve(w: &mut Writing<'_>, resolution: &Resolution<'_>) -> Result<Resolved, LedgerError> {
    let row = existing(w, resolution.payment_id).await?;
    let row = unless_expired(w, row).await?;
    if !row.state.is_open() {
        return Ok(Resolved::NotOpen(row.state));
    }
    if row.leased {
        return Ok(Resolved::Leased);
    }
    let row = known(rows::find(&mut w.tx, row.payment_id).await?)?;
    let words = Some(resolution.note);
    match resolution.end {
        ledger::End::Released => {
            let end = End { reason: Reason::OperatorEvidence, evidence: Some(Evidence::Operator), words };
            release_row(w, &row, end).await?;
        }
        ledger::End::Settled { amount, transaction, evidence } => {
            if let Some(by) = taken_by(&mut w.tx, &row, transaction).await? {
                return Ok(Resolved::TransactionTaken { by });
            }
            let note = Note { amount: Some(amount), transaction, evidence: Some(evidence), words, ..Note::default() };
            settle_row(w, &row, amount, note).await?;
        }
    }
    Ok(Resolved::Done)
}

async fn existing(w: &mut Writing<'_>, id: PaymentId) -> Result<Payment, LedgerError> {
    let db: &mut SqliteConnection = &mut w.tx;
    by_id(db, w.now, id).await?.ok_or_else(|| LedgerError::Inconsistent("no such payment".to_owned()))
}

fn vanished() -> LedgerError {
    LedgerError::Inconsistent("a row vanished".to_owned())
}
