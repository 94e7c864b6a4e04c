//! `decide` and `lookup`: duplicates before limits, so that a replay is answered also at an exhausted budget.

use sqlx::SqliteConnection;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments};

use super::rows::{self, Note, exactly_one, select_payments, signed};
use super::{SqliteLedger, Writing, unavailable};
use crate::ledger::limits::{Ask, Effective, WindowKey, Windows, refusal};
use crate::ledger::{By, Decision, Intent, Lease, LedgerError, Payment, Reason, State, Subject, clock};
use crate::money::{AgentId, Amount, IdempotencyKey, PaymentId, Unit};

impl SqliteLedger {
    pub(super) async fn do_lookup(&self, agent: &AgentId, by: By<'_>) -> Result<Option<Payment>, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let found = match by {
            By::Id(id) => by_id(&mut w.tx, w.now, id).await?.filter(|row| row.agent == *agent),
            By::Key(key) => by_key(&mut w.tx, w.now, agent, key).await?,
            By::Twin(hash) => twin(&mut w.tx, w.now, agent, hash).await?,
        };
        let found = match found {
            Some(row) => Some(unless_expired(&mut w, row).await?),
            None => None,
        };
        w.commit().await?;
        Ok(found)
    }

    pub(super) async fn do_decide(&self, intent: &Intent) -> Result<Decision, LedgerError> {
        if intent.quote.amount().is_zero() {
            return Err(LedgerError::Inconsistent("a payment of nothing cannot be reserved".to_owned()));
        }
        let token = self.world.random();
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let decision = decide(&mut w, intent, token).await?;
        w.commit().await?;
        Ok(decision)
    }
}

async fn decide(w: &mut Writing<'_>, intent: &Intent, token: [u8; 16]) -> Result<Decision, LedgerError> {
    let quote = &intent.quote;
    let (agent, hash) = (&quote.agent, &quote.call_hash);
    match &quote.idempotency_key {
        Some(key) => {
            if let Some(row) = by_key(&mut w.tx, w.now, agent, key).await? {
                let row = Box::new(unless_expired(w, row).await?);
                let same = row.call_hash == *hash;
                return Ok(if same { Decision::Existing(row) } else { Decision::Conflict(row) });
            }
            if let Some(archived) = spent_by(&mut w.tx, agent, key).await? {
                return Ok(Decision::KeySpent(archived));
            }
        }
        None => {
            if let Some(row) = twin(&mut w.tx, w.now, agent, hash).await? {
                return Ok(Decision::Existing(Box::new(unless_expired(w, row).await?)));
            }
            if let Some(row) = open_keyed(&mut w.tx, w.now, agent, hash).await? {
                return Ok(Decision::DuplicateInDoubt(unless_expired(w, row).await?.payment_id));
            }
        }
    }

    let (unit, amount, day) = (quote.unit(), quote.amount(), clock::day(w.now));
    let limits = effective(&mut w.tx, agent, &unit).await?;
    let mut used = Windows::default();
    let mut windows = Vec::new();
    for key in WindowKey::of(agent, &unit, &day, quote.session.as_deref()) {
        let window = rows::read_window(&mut w.tx, &key).await?;
        match key.kind {
            "session" => used.session = Some(window),
            _ if key.agent == Subject::Total.as_str() => used.total = window,
            _ => used.day = window,
        }
        windows.push((key, window));
    }
    let ask = Ask::of(intent);
    if let Some(refused) = refusal(&ask, &limits, &used, clock::next_midnight(w.now))? {
        return Ok(refused);
    }

    let lease = Lease {
        token,
        expires_ms: w.now.saturating_add(intent.lease_ms),
        sign_before_ms: w.now.saturating_add(intent.sign_within_ms.min(intent.lease_ms)),
    };
    insert(w, intent, &day, &lease).await?;
    let reserved = Note { event: "reserved", amount: Some(amount), ..Note::default() };
    rows::note(&mut w.tx, intent.payment_id, w.now, reserved).await?;
    for (key, window) in &windows {
        rows::write_window(&mut w.tx, key, window.reserve(amount)?).await?;
    }
    Ok(Decision::Fresh(lease))
}

async fn insert(w: &mut Writing<'_>, intent: &Intent, day: &str, lease: &Lease) -> Result<(), LedgerError> {
    let quote = &intent.quote;
    let authorization = &intent.authorization;
    let inserted = sqlx::query(
        "INSERT INTO payments (payment_identifier, id_nonce, agent, session, day, idempotency_key, call_hash, ref, \
         version_hash, network, scheme, asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, state, lease_token, \
         lease_expires, sign_before, due, created, updated) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, \
         ?13, ?14, ?15, ?16, ?17, ?18, 'reserved', ?19, ?20, ?21, ?20, ?22, ?22)",
    )
    .bind(intent.payment_id.to_hex())
    .bind(&intent.id_nonce[..])
    .bind(quote.agent.as_str())
    .bind(quote.session.as_deref())
    .bind(day)
    .bind(quote.idempotency_key.as_ref().map(IdempotencyKey::as_str))
    .bind(&quote.call_hash[..])
    .bind(&quote.resource_ref)
    .bind(&quote.version_hash)
    .bind(quote.offer.network.as_str())
    .bind(&quote.offer.scheme)
    .bind(quote.offer.asset.as_str())
    .bind(&authorization.payer)
    .bind(&quote.offer.pay_to)
    .bind(quote.amount().to_string())
    .bind(&authorization.nonce)
    .bind(signed(authorization.dead_after))
    .bind(signed(authorization.at))
    .bind(&lease.token[..])
    .bind(signed(lease.expires_ms))
    .bind(signed(lease.sign_before_ms))
    .bind(signed(w.now))
    .execute(&mut *w.tx)
    .await;
    match inserted {
        Ok(done) => exactly_one(done.rows_affected()),
        // Keys and twins were looked for under the write lock, so it is the identifier or the nonce.
        Err(error) if error.as_database_error().is_some_and(|e| e.is_unique_violation()) => {
            Err(LedgerError::Inconsistent("this payment identifier or nonce was used before".to_owned()))
        }
        Err(error) => Err(unavailable(error)),
    }
}

/// The limits that bind this agent in this unit.
pub(super) async fn effective(
    db: &mut SqliteConnection,
    agent: &AgentId,
    unit: &Unit,
) -> Result<Effective, LedgerError> {
    let found = sqlx::query(
        "SELECT * FROM spend_limits WHERE subject IN (?1, '*', 'total') AND network IN (?2, '*') AND asset IN (?3, '*')",
    )
    .bind(agent.as_str())
    .bind(unit.network.as_str())
    .bind(unit.asset.as_str())
    .fetch_all(db)
    .await
    .map_err(unavailable)?;
    let mut limits = Vec::with_capacity(found.len());
    let mut stopped = false;
    for row in &found {
        match rows::limit(row)? {
            (_, Some(limit)) => limits.push(limit),
            (_, None) => stopped = true,
        }
    }
    let mut effective = Effective::of(&limits, agent, unit);
    effective.suspended |= stopped;
    Ok(effective)
}

/// A reserved row whose lease has expired is treated as possibly signed from here on: its owner signs nothing any more,
/// but may still settle it.
pub(super) async fn unless_expired(w: &mut Writing<'_>, row: Payment) -> Result<Payment, LedgerError> {
    if row.state != State::Reserved || row.leased {
        return Ok(row);
    }
    doubt(w, row.payment_id, Reason::LeaseExpired).await?;
    let missing = || LedgerError::Inconsistent("a row vanished".to_owned());
    by_id(&mut w.tx, w.now, row.payment_id).await?.ok_or_else(missing)
}

/// reserved -> in_doubt. The hold stays in its windows.
pub(super) async fn doubt(w: &mut Writing<'_>, id: PaymentId, reason: Reason) -> Result<(), LedgerError> {
    let done = sqlx::query(
        "UPDATE payments SET state = 'in_doubt', reason = ?2, lease_expires = NULL, due = ?3, updated = ?3 \
         WHERE payment_identifier = ?1 AND state = 'reserved'",
    )
    .bind(id.to_hex())
    .bind(reason.as_str())
    .bind(signed(w.now))
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    exactly_one(done.rows_affected())?;
    let note = Note { event: "in_doubt", reason: Some(reason.as_str()), ..Note::default() };
    rows::note(&mut w.tx, id, w.now, note).await
}

async fn one(
    db: &mut SqliteConnection,
    query: Query<'_, Sqlite, SqliteArguments>,
) -> Result<Option<Payment>, LedgerError> {
    let row = query.fetch_optional(db).await.map_err(unavailable)?;
    row.as_ref().map(rows::payment).transpose()
}

pub(super) async fn by_id(db: &mut SqliteConnection, now: u64, id: PaymentId) -> Result<Option<Payment>, LedgerError> {
    let query = sqlx::query(select_payments!("WHERE p.payment_identifier = ?2"));
    one(db, query.bind(signed(now)).bind(id.to_hex())).await
}

async fn by_key(
    db: &mut SqliteConnection,
    now: u64,
    agent: &AgentId,
    key: &IdempotencyKey,
) -> Result<Option<Payment>, LedgerError> {
    let query = sqlx::query(select_payments!("WHERE p.agent = ?2 AND p.idempotency_key = ?3"));
    one(db, query.bind(signed(now)).bind(agent.as_str()).bind(key.as_str())).await
}

/// The archived payment that had this key.
async fn spent_by(
    db: &mut SqliteConnection,
    agent: &AgentId,
    key: &IdempotencyKey,
) -> Result<Option<PaymentId>, LedgerError> {
    let row = sqlx::query("SELECT payment_identifier FROM spent_keys WHERE agent = ?1 AND idempotency_key = ?2")
        .bind(agent.as_str())
        .bind(key.as_str())
        .fetch_optional(db)
        .await
        .map_err(unavailable)?;
    row.as_ref().map(|row| rows::parsed(row, "payment_identifier")).transpose()
}

async fn twin(
    db: &mut SqliteConnection,
    now: u64,
    agent: &AgentId,
    hash: &[u8; 32],
) -> Result<Option<Payment>, LedgerError> {
    let query = sqlx::query(select_payments!(
        "WHERE p.call_hash = ?3 AND p.agent = ?2 AND p.idempotency_key IS NULL \
         AND (p.state IN ('reserved', 'in_doubt') OR p.state = 'settled' AND p.answered IS NULL)"
    ));
    one(db, query.bind(signed(now)).bind(agent.as_str()).bind(&hash[..])).await
}

async fn open_keyed(
    db: &mut SqliteConnection,
    now: u64,
    agent: &AgentId,
    hash: &[u8; 32],
) -> Result<Option<Payment>, LedgerError> {
    let query = sqlx::query(select_payments!(
        "WHERE p.call_hash = ?3 AND p.agent = ?2 AND p.idempotency_key IS NOT NULL \
         AND p.state IN ('reserved', 'in_doubt') ORDER BY p.created LIMIT 1"
    ));
    one(db, query.bind(signed(now)).bind(agent.as_str()).bind(&hash[..])).await
}

/// Ends a hold in the windows in which it was made.
pub(super) async fn close_windows(w: &mut Writing<'_>, row: &rows::Held, settled: Amount) -> Result<(), LedgerError> {
    for key in WindowKey::of(&row.agent, &row.unit, &row.day, row.session.as_deref()) {
        let window = rows::read_window(&mut w.tx, &key).await?.close(row.reserved, settled)?;
        rows::write_window(&mut w.tx, &key, window).await?;
    }
    Ok(())
}
