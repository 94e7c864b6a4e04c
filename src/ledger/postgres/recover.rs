//! Leases of recovery and sweep, and what ends by them. A lease is a token: whoever has not the row's newest one changes
//! nothing. `due` is when an open row is to be looked at if nothing else happens: at the end of its lease, or later.

use sha2::{Digest, Sha256};

use super::close::{End, is_repeated, mark_answered, release_row, settle_row, taken_by};
use super::reserve::{effective, existing, unless_expired};
use super::rows::{self, Note, bytes, flag, get, int, parsed, signed, text, unsigned};
use super::tx::{Fault, Gate, Tx, attempts};
use super::{PostgresLedger, payload_context};
use crate::ledger::{
    self, Evidence, Holds, Lease, LedgerError, On, OpenRows, PAYLOAD_AFTER_SETTLEMENT_MS, Payment, Reason, Recoverable,
    Recovery, Resolution, Resolved, State, Tidied,
};
use crate::money::PaymentId;

/// Most payments that one sweep leases at once.
const MAX_DUE: u32 = 1_000;
/// Most rows of a kind that one tidying takes: it never holds many locks for long.
const MAX_TIDY: i64 = 1_000;

impl PostgresLedger {
    pub(super) async fn do_take_recovery(&self, id: PaymentId, lease_ms: u64) -> Result<Recovery, LedgerError> {
        let token = self.world.random();
        attempts!(tries = repeatable, self.try_recovery(id, token, lease_ms))
    }

    /// The gate keeps `suspend` waiting until this is over; `suspended` is read behind it.
    async fn try_recovery(&self, id: PaymentId, token: [u8; 16], lease_ms: u64) -> Result<Recovery, Fault> {
        let mut tx = self.begin(Gate::Shared).await?;
        let held = rows::lock(&tx, id).await?;
        tx.look_at_the_clock().await?;
        let row = unless_expired(&tx, existing(&tx, id).await?).await?;
        let taken = self.recover(&tx, row, held.lease_token == token, token, lease_ms).await?;
        tx.commit().await?;
        Ok(taken)
    }

    async fn recover(
        &self,
        tx: &Tx,
        row: Payment,
        ours: bool,
        token: [u8; 16],
        lease_ms: u64,
    ) -> Result<Recovery, Fault> {
        let id = row.payment_id;
        if row.leased && !ours {
            return Ok(Recovery::Leased);
        }
        if effective(tx, &row.agent, &row.unit()).await?.suspended {
            return Ok(Recovery::Suspended);
        }
        let last_word = row.has_outcome && !row.outcome_unfinished;
        if row.state == State::Released || last_word || !row.has_payload {
            return Ok(Recovery::Nothing);
        }
        let sealed =
            tx.row("SELECT payload FROM payments WHERE payment_identifier = $1", &[text(&id.to_hex())]).await?;
        let sealed: Option<Vec<u8>> = match &sealed {
            Some(row) => get(row, "payload")?,
            None => None,
        };
        let Some(payload) = sealed.and_then(|sealed| self.open_sealed(&payload_context(id), &sealed)) else {
            return Ok(Recovery::Nothing);
        };
        let lease = take(tx, id, token, lease_ms).await?;
        if !ours {
            rows::note(tx, id, Note { event: "recovery", ..Note::default() }).await?;
        }
        let payment = existing(tx, id).await?;
        Ok(Recovery::Taken(Box::new(Recoverable { payment, lease, payload })))
    }

    pub(super) async fn do_end_recovery(
        &self,
        id: PaymentId,
        lease: &Lease,
        reason: Option<Reason>,
    ) -> Result<bool, LedgerError> {
        attempts!(tries = repeatable, self.try_end_recovery(id, lease, reason))
    }

    async fn try_end_recovery(&self, id: PaymentId, lease: &Lease, reason: Option<Reason>) -> Result<bool, Fault> {
        let mut tx = self.begin(Gate::None).await?;
        let row = rows::lock(&tx, id).await?;
        tx.look_at_the_clock().await?;
        let ours = row.lease_token == lease.token && matches!(row.state, State::InDoubt | State::Settled);
        // Without a lease its end was written before, and the answer was lost.
        if ours && row.lease_expires.is_some() {
            let reason = reason.filter(|_| row.state == State::InDoubt).map(Reason::as_str);
            tx.run_one(
                "UPDATE payments SET lease_expires = NULL, due = CASE WHEN due IS NOT NULL THEN $3 END, \
                 reason = COALESCE($4, reason), updated = CASE WHEN $4 IS NULL THEN updated ELSE $3 END \
                 WHERE payment_identifier = $1 AND lease_token = $2 AND state IN ('in_doubt', 'settled')",
                &[text(&id.to_hex()), bytes(&&lease.token[..]), int(&signed(tx.now)), text(&reason)],
            )
            .await?;
            if reason.is_some() {
                rows::note(&tx, id, Note { event: "in_doubt", reason, ..Note::default() }).await?;
            }
        }
        tx.commit().await?;
        Ok(ours)
    }

    pub(super) async fn do_take_due(
        &self,
        on: On<'_>,
        limit: u32,
        lease_ms: u64,
    ) -> Result<Vec<(Payment, Lease)>, LedgerError> {
        // Of it and a payment's identifier each lease is made, so a later run knows what an earlier one took.
        let seed = self.world.random();
        attempts!(tries = repeatable, self.try_take_due(on, limit, seed, lease_ms, tries.may_be_done()))
    }

    async fn try_take_due(
        &self,
        on: On<'_>,
        limit: u32,
        seed: [u8; 16],
        lease_ms: u64,
        may_be_done: bool,
    ) -> Result<Vec<(Payment, Lease)>, Fault> {
        let tx = self.begin(Gate::None).await?;
        let mut ids = Vec::new();
        if may_be_done {
            // Leased by an earlier run whose commit was not answered.
            let leased = tx
                .rows(
                    "SELECT payment_identifier, lease_token FROM payments WHERE state = 'in_doubt' \
                     AND lease_expires > $1 ORDER BY payment_identifier FOR NO KEY UPDATE SKIP LOCKED",
                    &[int(&signed(tx.now))],
                )
                .await?;
            for row in &leased {
                let id = parsed(row, "payment_identifier")?;
                if get::<&[u8]>(row, "lease_token")? == derived(&seed, id) {
                    ids.push(id);
                }
            }
        }
        if ids.is_empty() {
            let (names, listed) = on.names();
            let limit = i64::from(limit.min(MAX_DUE));
            // Others take rows at the same moment: more are looked at than are taken.
            let beside = limit * 4 + 32;
            let due = tx
                .rows(
                    "SELECT p.payment_identifier FROM (\
                       SELECT payment_identifier, due, \
                         row_number() OVER (PARTITION BY agent ORDER BY due, payment_identifier) AS turn \
                       FROM payments WHERE state IN ('reserved', 'in_doubt') AND due <= $1 \
                         AND COALESCE(lease_expires <= $1, true) AND (position(' ' || network || ' ' IN $2) > 0) = $3 \
                       ORDER BY turn, due, payment_identifier LIMIT $4) w \
                     JOIN payments p ON p.payment_identifier = w.payment_identifier \
                     WHERE p.state IN ('reserved', 'in_doubt') AND p.due <= $1 \
                       AND COALESCE(p.lease_expires <= $1, true) \
                     ORDER BY w.turn, w.due, p.payment_identifier LIMIT $5 FOR NO KEY UPDATE OF p SKIP LOCKED",
                    &[int(&signed(tx.now)), text(&names), flag(&listed), int(&beside), int(&limit)],
                )
                .await?;
            for row in &due {
                ids.push(parsed(row, "payment_identifier")?);
            }
        }
        let mut taken = Vec::with_capacity(ids.len());
        for id in ids {
            unless_expired(&tx, existing(&tx, id).await?).await?;
            let lease = take(&tx, id, derived(&seed, id), lease_ms).await?;
            taken.push((existing(&tx, id).await?, lease));
        }
        tx.commit().await?;
        Ok(taken)
    }

    pub(super) async fn do_look_again(&self, id: PaymentId, lease: &Lease, due_ms: u64) -> Result<bool, LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let done = tx
                .run(
                    "UPDATE payments SET lease_expires = NULL, due = $3 \
                     WHERE payment_identifier = $1 AND lease_token = $2 AND state = 'in_doubt'",
                    &[text(&id.to_hex()), bytes(&&lease.token[..]), int(&signed(due_ms))],
                )
                .await?;
            tx.commit().await?;
            Ok(done == 1)
        })
    }

    pub(super) async fn do_expire(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, LedgerError> {
        if !matches!(reason, Reason::ExpiredUnspent | Reason::NonceCancelled) {
            return Err(LedgerError::Inconsistent(format!("{} is no finding of the chain", reason.as_str())));
        }
        attempts!(tries = repeatable, self.try_expire(id, lease, reason))
    }

    async fn try_expire(&self, id: PaymentId, lease: &Lease, reason: Reason) -> Result<bool, Fault> {
        let (tx, locked, row) = self.locked(id).await?;
        let alive = row.lease_token == lease.token && row.lease_expires.is_some_and(|expires| expires > tx.now);
        let ours = match row.state {
            State::InDoubt if alive => {
                let end = End { reason, evidence: Some(Evidence::Chain), words: None };
                release_row(&tx, &locked, &row, end).await?;
                true
            }
            _ => is_repeated(&row, lease, State::Released, reason),
        };
        tx.commit().await?;
        Ok(ours)
    }

    /// Run once: a second run would say that the payment is not open, and not by whose hand.
    pub(super) async fn do_resolve(&self, resolution: Resolution<'_>) -> Result<Resolved, LedgerError> {
        ledger::check_note(resolution.note)?;
        attempts!(tries = once, self.try_resolve(&resolution))
    }

    async fn try_resolve(&self, resolution: &Resolution<'_>) -> Result<Resolved, Fault> {
        let (tx, locked, held) = self.locked(resolution.payment_id).await?;
        let row = unless_expired(&tx, existing(&tx, held.id).await?).await?;
        let resolved = if !row.state.is_open() {
            Resolved::NotOpen(row.state)
        } else if row.leased {
            Resolved::Leased
        } else {
            let row = rows::lock(&tx, held.id).await?;
            let words = Some(resolution.note);
            match resolution.end {
                ledger::End::Released => {
                    let end = End { reason: Reason::OperatorEvidence, evidence: Some(Evidence::Operator), words };
                    release_row(&tx, &locked, &row, end).await?;
                    Resolved::Done
                }
                ledger::End::Settled { amount, transaction, evidence } => {
                    match taken_by(&tx, &row, transaction).await? {
                        Some(by) => Resolved::TransactionTaken { by },
                        None => {
                            let evidence = Some(evidence);
                            let note = Note { amount: Some(amount), transaction, evidence, words, ..Note::default() };
                            settle_row(&tx, &locked, &row, amount, note).await?;
                            Resolved::Done
                        }
                    }
                }
            }
        };
        tx.commit().await?;
        Ok(resolved)
    }

    pub(super) async fn do_tidy(&self) -> Result<Tidied, LedgerError> {
        let mut tidied = Tidied::default();
        loop {
            let (some, more) = attempts!(tries = repeatable, self.try_tidy())?;
            tidied.outcomes += some.outcomes;
            tidied.payloads += some.payloads;
            tidied.answered += some.answered;
            tidied.sessions += some.sessions;
            if !more {
                return Ok(tidied);
            }
        }
    }

    /// A part of it, and whether there is more. Rows that somebody works on are left for the next time.
    async fn try_tidy(&self) -> Result<(Tidied, bool), Fault> {
        let tx = self.begin(Gate::None).await?;
        let (now, most) = (signed(tx.now), MAX_TIDY);
        let gone = async |sql: &'static str| tx.run(sql, &[int(&now), int(&most)]).await;
        let outcomes = gone(
            "DELETE FROM outcomes WHERE payment_identifier IN (SELECT payment_identifier FROM outcomes \
             WHERE expires <= $1 LIMIT $2 FOR UPDATE SKIP LOCKED)",
        )
        .await?;
        let payloads = gone(
            "UPDATE payments SET payload = NULL, payload_expires = NULL WHERE payment_identifier IN \
             (SELECT payment_identifier FROM payments WHERE payload IS NOT NULL AND payload_expires <= $1 LIMIT $2 \
             FOR NO KEY UPDATE SKIP LOCKED)",
        )
        .await?;
        let sessions = gone(
            // A lock would need the right to change them. Of two that tidy at once, the second waits and finds nothing.
            "DELETE FROM sessions_ended WHERE session IN (SELECT session FROM sessions_ended WHERE expires <= $1 \
             ORDER BY expires, session LIMIT $2)",
        )
        .await?;
        // The day's grace is for a caller that was cut off from a payment of which nothing could be stored.
        let unanswered = tx
            .rows(
                "SELECT payment_identifier FROM payments p WHERE state = 'settled' AND idempotency_key IS NULL \
                 AND answered IS NULL AND updated <= $3 AND payload IS NULL AND COALESCE(lease_expires <= $1, true) \
                 AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = p.payment_identifier) \
                 LIMIT $2 FOR NO KEY UPDATE OF p SKIP LOCKED",
                &[int(&now), int(&most), int(&signed(tx.now.saturating_sub(PAYLOAD_AFTER_SETTLEMENT_MS)))],
            )
            .await?;
        let mut answered = 0;
        for row in &unanswered {
            answered += u64::from(mark_answered(&tx, parsed(row, "payment_identifier")?).await?);
        }
        tx.commit().await?;
        let most = u64::try_from(MAX_TIDY).unwrap_or(u64::MAX);
        let more = [outcomes, payloads, sessions, answered].iter().any(|n| *n >= most);
        Ok((Tidied { outcomes, payloads, answered, sessions }, more))
    }

    pub(super) async fn do_open_rows(&self) -> Result<OpenRows, LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let mut open = OpenRows::default();
            for (state, holds) in [("reserved", &mut open.reserved), ("in_doubt", &mut open.in_doubt)] {
                let sql = "SELECT count(*) AS open, min(created) AS oldest FROM payments \
                    WHERE state IN ('reserved', 'in_doubt') AND state = $1";
                let Some(row) = tx.row(sql, &[text(&state)]).await? else { continue };
                let oldest: Option<i64> = get(&row, "oldest")?;
                *holds = Holds {
                    count: unsigned(get(&row, "open")?)?,
                    oldest_created_ms: oldest.map(unsigned).transpose()?,
                };
            }
            tx.commit().await?;
            Ok::<_, Fault>(open)
        })
    }
}

fn derived(seed: &[u8; 16], id: PaymentId) -> [u8; 16] {
    let digest = Sha256::new().chain_update(seed).chain_update(id.to_hex()).finalize();
    std::array::from_fn(|i| digest[i])
}

/// A new lease on a row that nobody has, or the same again.
async fn take(tx: &Tx, id: PaymentId, token: [u8; 16], lease_ms: u64) -> Result<Lease, Fault> {
    let expires_ms = tx.now.saturating_add(lease_ms);
    tx.run_one(
        "UPDATE payments SET lease_token = $2, lease_expires = $3, due = CASE WHEN due IS NOT NULL THEN $3 END, \
         attempts = attempts + 1 WHERE payment_identifier = $1 AND state IN ('in_doubt', 'settled') \
         AND (COALESCE(lease_expires <= $4, true) OR lease_token = $2)",
        &[text(&id.to_hex()), bytes(&&token[..]), int(&signed(expires_ms)), int(&signed(tx.now))],
    )
    .await?;
    // Nothing is signed under such a lease.
    Ok(Lease { token, expires_ms, sign_before_ms: 0 })
}
