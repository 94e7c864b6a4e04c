//! Rows of the file as types: whatever does not parse is an inconsistency, never a default.

use std::str::FromStr;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::unavailable;
use crate::ledger::audit::Audited;
use crate::ledger::limits::{Window, WindowKey};
use crate::ledger::{Authorization, Event, Evidence, LedgerError, Limit, Payment, State, Subject};
use crate::money::{AgentId, Amount, PaymentId, Unit};

/// A SELECT over `payments p`, with the ledger's time as `?1`, and `$tail` behind it.
macro_rules! select_payments {
    ($tail:literal) => {
        concat!(
            "SELECT p.*, o.payment_identifier IS NOT NULL AS has_outcome, COALESCE(o.unfinished, 0) AS unfinished, ",
            "p.payload IS NOT NULL AND COALESCE(p.payload_expires > ?1, 1) AS has_payload, ",
            "COALESCE(p.lease_expires > ?1, 0) AS leased FROM payments p ",
            "LEFT JOIN outcomes o ON o.payment_identifier = p.payment_identifier AND o.expires > ?1 ",
            $tail
        )
    };
}
pub(super) use select_payments;

fn broken(column: &str) -> LedgerError {
    LedgerError::Inconsistent(format!("column {column} of a row cannot be read"))
}

pub(super) fn unsigned(value: i64) -> Result<u64, LedgerError> {
    u64::try_from(value).map_err(|_| broken("time or sequence"))
}

/// Times and sequences as SQLite stores them.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn get<'r, T: sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>>(
    row: &'r SqliteRow,
    column: &str,
) -> Result<T, LedgerError> {
    row.try_get(column).map_err(|_| broken(column))
}

pub(super) fn parsed<T: FromStr>(row: &SqliteRow, column: &str) -> Result<T, LedgerError> {
    get::<&str>(row, column)?.parse().map_err(|_| broken(column))
}

fn maybe<T: FromStr>(row: &SqliteRow, column: &str) -> Result<Option<T>, LedgerError> {
    get::<Option<&str>>(row, column)?.map(|text| text.parse().map_err(|_| broken(column))).transpose()
}

pub(super) fn payment(row: &SqliteRow) -> Result<Payment, LedgerError> {
    let state = State::from_word(get(row, "state")?).ok_or_else(|| broken("state"))?;
    Ok(Payment {
        payment_id: parsed(row, "payment_identifier")?,
        agent: parsed(row, "agent")?,
        idempotency_key: maybe(row, "idempotency_key")?,
        call_hash: get::<&[u8]>(row, "call_hash")?.try_into().map_err(|_| broken("call_hash"))?,
        resource_ref: get(row, "ref")?,
        version_hash: get(row, "version_hash")?,
        scheme: get(row, "scheme")?,
        network: parsed(row, "network")?,
        asset: parsed(row, "asset")?,
        payer: get(row, "payer")?,
        pay_to: get(row, "pay_to")?,
        reserved: parsed(row, "reserved")?,
        settled: maybe(row, "settled")?,
        authorization: Authorization {
            payer: get(row, "payer")?,
            nonce: get(row, "nonce")?,
            dead_after: unsigned(get(row, "dead_after")?)?,
            at: unsigned(get(row, "at_ledger")?)?,
        },
        state,
        reason: get(row, "reason")?,
        transaction: get(row, "transaction_id")?,
        answered: get::<Option<i64>>(row, "answered")?.is_some(),
        has_payload: get(row, "has_payload")?,
        has_outcome: get(row, "has_outcome")?,
        outcome_unfinished: get(row, "unfinished")?,
        leased: get(row, "leased")?,
        created_ms: unsigned(get(row, "created")?)?,
        updated_ms: unsigned(get(row, "updated")?)?,
    })
}

/// What a transition needs to know of a row, and where its hold counts.
pub(super) struct Held {
    pub id: PaymentId,
    pub agent: AgentId,
    pub session: Option<String>,
    pub day: String,
    pub unit: Unit,
    pub reserved: Amount,
    pub settled: Option<Amount>,
    pub state: State,
    pub reason: Option<String>,
    pub transaction: Option<String>,
    pub lease_token: [u8; 16],
    pub lease_expires: Option<u64>,
}

pub(super) fn held(row: &SqliteRow) -> Result<Held, LedgerError> {
    Ok(Held {
        id: parsed(row, "payment_identifier")?,
        agent: parsed(row, "agent")?,
        session: get(row, "session")?,
        day: get(row, "day")?,
        unit: Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? },
        reserved: parsed(row, "reserved")?,
        settled: maybe(row, "settled")?,
        state: State::from_word(get(row, "state")?).ok_or_else(|| broken("state"))?,
        reason: get(row, "reason")?,
        transaction: get(row, "transaction_id")?,
        lease_token: get::<&[u8]>(row, "lease_token")?.try_into().map_err(|_| broken("lease_token"))?,
        lease_expires: get::<Option<i64>>(row, "lease_expires")?.map(unsigned).transpose()?,
    })
}

pub(super) fn audited(row: &SqliteRow) -> Result<Audited, LedgerError> {
    let held = held(row)?;
    let time = |column| get::<Option<i64>>(row, column)?.map(unsigned).transpose();
    Ok(Audited {
        id: held.id,
        agent: held.agent,
        session: held.session,
        day: held.day,
        unit: held.unit,
        reserved: held.reserved,
        settled: held.settled,
        state: held.state,
        transaction: held.transaction,
        lease_expires: held.lease_expires,
        due: time("due")?,
        has_payload: get::<Option<&[u8]>>(row, "payload")?.is_some(),
        payload_expires: time("payload_expires")?,
        has_outcome: get(row, "has_outcome")?,
        last_event: get(row, "last_event")?,
        ends: unsigned(get(row, "ends")?)?,
        event_amount: maybe(row, "event_amount")?,
        late_success: get(row, "late_success")?,
    })
}

pub(super) async fn find(db: &mut SqliteConnection, id: PaymentId) -> Result<Option<Held>, LedgerError> {
    let row = sqlx::query("SELECT * FROM payments WHERE payment_identifier = ?1")
        .bind(id.to_hex())
        .fetch_optional(db)
        .await
        .map_err(unavailable)?;
    row.as_ref().map(held).transpose()
}

/// `None` for a row that stops a subject in all units.
pub(super) fn limit(row: &SqliteRow) -> Result<(Subject, Option<Limit>), LedgerError> {
    let subject = Subject::from_word(get(row, "subject")?).map_err(|_| broken("subject"))?;
    if get::<&str>(row, "network")? == "*" {
        return Ok((subject, None));
    }
    let limit = Limit {
        subject: subject.clone(),
        unit: Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? },
        per_call: maybe(row, "per_call")?,
        per_session: maybe(row, "per_session")?,
        per_day: maybe(row, "per_day")?,
        unlimited: get(row, "unlimited")?,
        suspended: get(row, "suspended")?,
        source: get(row, "source")?,
    };
    Ok((subject, Some(limit)))
}

pub(super) fn event(row: &SqliteRow) -> Result<Event, LedgerError> {
    Ok(Event {
        at_ms: unsigned(get(row, "at")?)?,
        event: get(row, "event")?,
        reason: get(row, "reason")?,
        amount: maybe(row, "amount")?,
        transaction: get(row, "transaction_id")?,
        evidence: get(row, "evidence")?,
        note: get(row, "note")?,
    })
}

pub(super) fn window(row: &SqliteRow) -> Result<(WindowKey, Window), LedgerError> {
    let kind = match get(row, "kind")? {
        "day" => "day",
        "session" => "session",
        _ => return Err(broken("kind")),
    };
    let unit = Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? };
    Ok((WindowKey { agent: get(row, "agent")?, unit, kind, key: get(row, "key")? }, window_of(row)?))
}

fn window_of(row: &SqliteRow) -> Result<Window, LedgerError> {
    Ok(Window { held: parsed(row, "held")?, spent: parsed(row, "spent")? })
}

/// A window that was never written is empty.
pub(super) async fn read_window(db: &mut SqliteConnection, key: &WindowKey) -> Result<Window, LedgerError> {
    let row = sqlx::query(
        "SELECT held, spent FROM budget_windows \
         WHERE agent = ?1 AND network = ?2 AND asset = ?3 AND kind = ?4 AND key = ?5",
    )
    .bind(&key.agent)
    .bind(key.unit.network.as_str())
    .bind(key.unit.asset.as_str())
    .bind(key.kind)
    .bind(&key.key)
    .fetch_optional(db)
    .await
    .map_err(unavailable)?;
    row.as_ref().map_or(Ok(Window::default()), window_of)
}

pub(super) async fn write_window(db: &mut SqliteConnection, key: &WindowKey, w: Window) -> Result<(), LedgerError> {
    sqlx::query(
        "INSERT INTO budget_windows (agent, network, asset, kind, key, held, spent) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) \
         ON CONFLICT (agent, network, asset, kind, key) DO UPDATE SET held = excluded.held, spent = excluded.spent",
    )
    .bind(&key.agent)
    .bind(key.unit.network.as_str())
    .bind(key.unit.asset.as_str())
    .bind(key.kind)
    .bind(&key.key)
    .bind(w.held.to_string())
    .bind(w.spent.to_string())
    .execute(db)
    .await
    .map_err(unavailable)?;
    Ok(())
}

/// One line of `payment_events`.
#[derive(Default)]
pub(super) struct Note<'a> {
    pub event: &'a str,
    pub reason: Option<&'a str>,
    pub amount: Option<Amount>,
    pub transaction: Option<&'a str>,
    pub evidence: Option<Evidence>,
    /// What an operator wrote.
    pub words: Option<&'a str>,
}

pub(super) async fn note(db: &mut SqliteConnection, id: PaymentId, at: u64, note: Note<'_>) -> Result<(), LedgerError> {
    sqlx::query(
        "INSERT INTO payment_events (payment_identifier, at, event, reason, amount, transaction_id, evidence, note) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )
    .bind(id.to_hex())
    .bind(signed(at))
    .bind(note.event)
    .bind(note.reason)
    .bind(note.amount.map(|amount| amount.to_string()))
    .bind(note.transaction)
    .bind(note.evidence.map(Evidence::as_str))
    .bind(note.words)
    .execute(db)
    .await
    .map_err(unavailable)?;
    Ok(())
}

/// A transition hits one row: the transaction has read it under the write lock, so anything else is a bug.
pub(super) fn exactly_one(affected: u64) -> Result<(), LedgerError> {
    match affected {
        1 => Ok(()),
        n => Err(LedgerError::Inconsistent(format!("a transition hit {n} rows"))),
    }
}
