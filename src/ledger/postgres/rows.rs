//! Rows of the database as types: whatever does not parse is an inconsistency, never a default.

use std::str::FromStr;

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql, Type};

use super::numeric::Numeric;
use super::tx::{Fault, Param, Tx};
use crate::ledger::audit::Audited;
use crate::ledger::limits::{Window, WindowKey};
use crate::ledger::{Authorization, Event, Evidence, LedgerError, Limit, Payment, State, Subject};
use crate::money::{AgentId, Amount, PaymentId, Unit};

/// A SELECT over `payments p`, or other rows `p` like them, with the ledger's time as `$1`, and `$tail` behind it.
macro_rules! select_payments {
    ($tail:literal) => {
        select_payments!(from "payments p", $tail)
    };
    (from $rows:literal, $tail:literal) => {
        concat!(
            "SELECT p.payment_identifier, p.agent, p.idempotency_key, p.call_hash, p.ref, p.version_hash, p.scheme, ",
            "p.network, p.asset, p.payer, p.pay_to, p.reserved::text AS reserved, p.settled::text AS settled, p.nonce, ",
            "p.dead_after, p.at_ledger, p.state, p.reason, p.transaction_id, p.answered, p.created, p.updated, ",
            "o.payment_identifier IS NOT NULL AS has_outcome, COALESCE(o.unfinished, false) AS unfinished, ",
            "p.payload IS NOT NULL AND COALESCE(p.payload_expires > $1, true) AS has_payload, ",
            "COALESCE(p.lease_expires > $1, false) AS leased FROM ",
            $rows,
            " LEFT JOIN outcomes o ON o.payment_identifier = p.payment_identifier AND o.expires > $1 ",
            $tail
        )
    };
}
pub(super) use select_payments;

pub(super) fn text<'a>(value: &'a (dyn ToSql + Sync)) -> Param<'a> {
    (value, Type::TEXT)
}

pub(super) fn int<'a>(value: &'a (dyn ToSql + Sync)) -> Param<'a> {
    (value, Type::INT8)
}

pub(super) fn bytes<'a>(value: &'a (dyn ToSql + Sync)) -> Param<'a> {
    (value, Type::BYTEA)
}

pub(super) fn flag<'a>(value: &'a (dyn ToSql + Sync)) -> Param<'a> {
    (value, Type::BOOL)
}

fn broken(column: &str) -> LedgerError {
    LedgerError::Inconsistent(format!("column {column} of a row cannot be read"))
}

pub(super) fn unsigned(value: i64) -> Result<u64, LedgerError> {
    u64::try_from(value).map_err(|_| broken("time or sequence"))
}

/// Times and sequences as the database stores them.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn get<'r, T: FromSql<'r>>(row: &'r Row, column: &str) -> Result<T, LedgerError> {
    row.try_get(column).map_err(|_| broken(column))
}

pub(super) fn parsed<T: FromStr>(row: &Row, column: &str) -> Result<T, LedgerError> {
    get::<&str>(row, column)?.parse().map_err(|_| broken(column))
}

fn maybe<T: FromStr>(row: &Row, column: &str) -> Result<Option<T>, LedgerError> {
    get::<Option<&str>>(row, column)?.map(|text| text.parse().map_err(|_| broken(column))).transpose()
}

pub(super) fn payment(row: &Row) -> Result<Payment, LedgerError> {
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

impl Held {
    pub fn windows(&self) -> Vec<WindowKey> {
        WindowKey::of(&self.agent, &self.unit, &self.day, self.session.as_deref())
    }
}

pub(super) const HELD: &str = "p.payment_identifier, p.agent, p.session, p.day, p.network, p.asset, \
    p.reserved::text AS reserved, p.settled::text AS settled, p.state, p.reason, p.transaction_id, p.lease_token, \
    p.lease_expires";

pub(super) fn held(row: &Row) -> Result<Held, LedgerError> {
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

pub(super) fn audited(row: &Row) -> Result<Audited, LedgerError> {
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
        has_payload: get(row, "has_payload")?,
        payload_expires: time("payload_expires")?,
        has_outcome: get(row, "has_outcome")?,
        last_event: get(row, "last_event")?,
        ends: unsigned(get(row, "ends")?)?,
        event_amount: maybe(row, "event_amount")?,
        late_success: get(row, "late_success")?,
    })
}

/// What never changes of a row may be read without its lock; the rest is read under it.
pub(super) async fn find(tx: &Tx, id: PaymentId) -> Result<Held, Fault> {
    read(tx, id, "").await
}

/// Waits for the row's lock, and holds it until the transaction ends.
pub(super) async fn lock(tx: &Tx, id: PaymentId) -> Result<Held, Fault> {
    read(tx, id, " FOR NO KEY UPDATE").await
}

async fn read(tx: &Tx, id: PaymentId, locking: &str) -> Result<Held, Fault> {
    let sql = format!("SELECT {HELD} FROM payments p WHERE p.payment_identifier = $1{locking}");
    match tx.row(&sql, &[text(&id.to_hex())]).await? {
        Some(row) => Ok(held(&row)?),
        None => Err(LedgerError::Inconsistent("no such payment".to_owned()).into()),
    }
}

pub(super) const LIMIT: &str = "subject, network, asset, source, per_call::text AS per_call, \
    per_session::text AS per_session, per_day::text AS per_day, unlimited, suspended";

/// `None` for a row that stops a subject in all units.
pub(super) fn limit(row: &Row) -> Result<(Subject, Option<Limit>), LedgerError> {
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

pub(super) const EVENT: &str = "at, event, reason, amount::text AS amount, transaction_id, evidence, note";

pub(super) fn event(row: &Row) -> Result<Event, LedgerError> {
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

pub(super) fn window(row: &Row) -> Result<(WindowKey, Window), LedgerError> {
    let kind = match get(row, "kind")? {
        "day" => "day",
        "session" => "session",
        _ => return Err(broken("kind")),
    };
    let unit = Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? };
    let key = WindowKey { agent: get(row, "agent")?, unit, kind, key: get(row, "key")? };
    Ok((key, Window { held: parsed(row, "held")?, spent: parsed(row, "spent")? }))
}

/// The same with its figures in binary.
pub(super) fn numeric_window(row: &Row) -> Result<(WindowKey, Window), LedgerError> {
    let kind = match get(row, "kind")? {
        "day" => "day",
        "session" => "session",
        _ => return Err(broken("kind")),
    };
    let unit = Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? };
    let key = WindowKey { agent: get(row, "agent")?, unit, kind, key: get(row, "key")? };
    Ok((key, Window { held: get::<Numeric>(row, "held")?.0, spent: get::<Numeric>(row, "spent")?.0 }))
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

pub(super) async fn note(tx: &Tx, id: PaymentId, note: Note<'_>) -> Result<(), Fault> {
    tx.run_one(
        "INSERT INTO payment_events (payment_identifier, at, event, reason, amount, transaction_id, evidence, note) \
         VALUES ($1, $2, $3, $4, $5::numeric, $6, $7, $8)",
        &[
            text(&id.to_hex()),
            int(&signed(tx.now)),
            text(&note.event),
            text(&note.reason),
            text(&note.amount.map(|amount| amount.to_string())),
            text(&note.transaction),
            text(&note.evidence.map(Evidence::as_str)),
            text(&note.words),
        ],
    )
    .await
}
