//! The statements of a batch. Each is prepared once for each connection, so that on the wire nothing stands between a
//! batch's statements; a later one gets a snapshot that is taken after the locks of an earlier one.
//!
//! Every look-up is a LATERAL probe with a LIMIT of its own: one index probe for each entry, whatever the planner
//! believes about the size of a table.

use std::sync::LazyLock;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, Row};

use crate::ledger::postgres::rows::select_payments;
use crate::ledger::postgres::tx::NOW;
use crate::ledger::postgres::wire::{Ready, Session};

/// A text and the types of its parameters.
pub(super) struct Sql {
    text: String,
    types: Vec<Type>,
}

impl Sql {
    fn new(text: impl Into<String>, types: &[Type]) -> Sql {
        Sql { text: text.into(), types: types.to_vec() }
    }
}

/// What a batch asks, in the order of [`ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    Gate,
    /// The windows that reservations name; those of open payments to settle; both.
    HoldWindows,
    EndWindows,
    BothWindows,
    Limits,
    Now,
    Keyed,
    Keyless,
    Ends,
    /// Reservations alone; on a conflict none is made of that one.
    Hold,
    HoldCareful,
    End,
    Both,
    Payments,
    Mine,
    Expire,
}

static ALL: LazyLock<Vec<Sql>> = LazyLock::new(|| {
    use Type as T;
    let texts = T::TEXT_ARRAY;
    let keys = vec![texts.clone(); 5];
    let ids = vec![texts.clone()];
    let both = [keys.clone(), ids.clone()].concat();
    let now = [T::INT8];
    let holds = [
        T::TEXT_ARRAY,    // payment_identifier
        T::BYTEA_ARRAY,   // id_nonce
        T::TEXT_ARRAY,    // agent
        T::TEXT_ARRAY,    // session
        T::TEXT_ARRAY,    // idempotency_key
        T::BYTEA_ARRAY,   // call_hash
        T::TEXT_ARRAY,    // ref
        T::TEXT_ARRAY,    // version_hash
        T::TEXT_ARRAY,    // network
        T::TEXT_ARRAY,    // scheme
        T::TEXT_ARRAY,    // asset
        T::TEXT_ARRAY,    // payer
        T::TEXT_ARRAY,    // pay_to
        T::NUMERIC_ARRAY, // reserved
        T::TEXT_ARRAY,    // nonce
        T::INT8_ARRAY,    // dead_after
        T::INT8_ARRAY,    // at_ledger
        T::BYTEA_ARRAY,   // lease_token
        T::INT8_ARRAY,    // lease_expires
        T::INT8_ARRAY,    // sign_before
        T::TEXT,          // day
    ];
    let ends = [
        T::TEXT_ARRAY,    // payment_identifier
        T::NUMERIC_ARRAY, // settled
        T::TEXT_ARRAY,    // transaction_id
        T::TEXT_ARRAY,    // evidence
        T::BYTEA_ARRAY,   // outcome
        T::BOOL_ARRAY,    // unfinished
        T::INT8,          // payload_expires
        T::INT8,          // outcome expires
    ];
    let hold = [&now[..], &holds].concat();
    let end = [&now[..], &ends].concat();
    let all = [&now[..], &holds, &ends].concat();
    vec![
        Sql::new("SELECT pg_advisory_xact_lock_shared(hashtext('tollway gate'), hashtext(current_schema()))", &[]),
        Sql::new(lock(true, false), &keys),
        Sql::new(lock(false, true), &ids),
        Sql::new(lock(true, true), &both),
        Sql::new(
            format!(
                "SELECT n.now, l.subject, l.network, l.asset, l.source, l.per_call::text AS per_call, \
                 l.per_session::text AS per_session, l.per_day::text AS per_day, l.unlimited, l.suspended \
                 FROM ({NOW} AS now OFFSET 0) n LEFT JOIN spend_limits l \
                 ON l.subject = ANY($1) AND l.network = ANY($2) AND l.asset = ANY($3)"
            ),
            &[texts.clone(), texts.clone(), texts.clone()],
        ),
        Sql::new(format!("{NOW} AS now"), &[]),
        Sql::new(KEYED, &[texts.clone(), texts.clone()]),
        Sql::new(KEYLESS, &[texts.clone(), T::BYTEA_ARRAY]),
        Sql::new(ENDS, &[texts.clone(), texts.clone()]),
        Sql::new(apply(true, false, false), &hold),
        Sql::new(apply(true, false, true), &hold),
        Sql::new(apply(false, true, false), &end),
        Sql::new(apply(true, true, false), &all),
        Sql::new(select_payments!("WHERE p.payment_identifier = ANY($2)"), &[T::INT8, texts.clone()]),
        Sql::new(MINE, &[texts.clone(), T::BYTEA_ARRAY]),
        Sql::new(EXPIRE, &[T::INT8, texts.clone()]),
    ]
});

/// Sorted, `total` last; rows that do not exist are not there. The windows of a payment follow from columns that never
/// change, so they may be read before its lock.
fn lock(holds: bool, ends: bool) -> String {
    let named = "SELECT k.agent, k.network, k.asset, k.kind, k.key \
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[]) k(agent, network, asset, kind, key)";
    let derived = |n: u8| {
        format!(
            "SELECT w.agent, p.network, p.asset, w.kind, w.key FROM unnest(${n}::text[]) e(id) CROSS JOIN LATERAL \
             (SELECT * FROM payments p WHERE p.payment_identifier = e.id AND p.state IN ('reserved', 'in_doubt') \
             LIMIT 1) p CROSS JOIN LATERAL {WINDOWS_OF_P} WHERE w.key IS NOT NULL"
        )
    };
    let keys = match (holds, ends) {
        (true, true) => format!("{named} UNION {}", derived(6)),
        (true, false) => named.to_owned(),
        // One row for each window, as the reservations' keys are.
        _ => format!("SELECT DISTINCT * FROM ({}) d", derived(1)),
    };
    format!(
        "SELECT b.agent, b.network, b.asset, b.kind, b.key, b.held, b.spent FROM ({keys}) k JOIN budget_windows b \
         ON b.agent = k.agent AND b.key = k.key AND b.asset = k.asset AND b.network = k.network AND b.kind = k.kind \
         ORDER BY b.agent = 'total', b.agent, b.network, b.asset, b.kind, b.key FOR NO KEY UPDATE OF b"
    )
}

const WINDOWS_OF_P: &str =
    "(VALUES (p.agent, 'day', p.day), (p.agent, 'session', p.session), ('total', 'day', p.day)) w(agent, kind, key)";

/// Payments and archived payments that have these keys.
const KEYED: &str = "SELECT k.i, p.payment_identifier, p.call_hash, p.state, p.lease_expires, \
    s.payment_identifier AS spent_by FROM unnest($1::text[], $2::text[]) WITH ORDINALITY k(agent, key, i) \
    LEFT JOIN LATERAL (SELECT p.payment_identifier, p.call_hash, p.state, p.lease_expires FROM payments p \
    WHERE p.idempotency_key = k.key AND p.agent = k.agent LIMIT 1) p ON true \
    LEFT JOIN LATERAL (SELECT s.payment_identifier FROM spent_keys s \
    WHERE s.idempotency_key = k.key AND s.agent = k.agent LIMIT 1) s ON true \
    WHERE p.payment_identifier IS NOT NULL OR s.payment_identifier IS NOT NULL";

/// The keyless twin of each call, else the oldest open payment of the same call with a key.
const KEYLESS: &str = "SELECT k.i, d.payment_identifier, d.state, d.lease_expires, d.twin \
    FROM unnest($1::text[], $2::bytea[]) WITH ORDINALITY k(agent, hash, i) CROSS JOIN LATERAL (\
    (SELECT p.payment_identifier, p.state, p.lease_expires, true AS twin FROM payments p \
    WHERE p.call_hash = k.hash AND p.agent = k.agent AND p.idempotency_key IS NULL \
    AND (p.state IN ('reserved', 'in_doubt') OR p.state = 'settled' AND p.answered IS NULL) LIMIT 1) \
    UNION ALL \
    (SELECT p.payment_identifier, p.state, p.lease_expires, false AS twin FROM payments p \
    WHERE p.call_hash = k.hash AND p.agent = k.agent AND p.idempotency_key IS NOT NULL \
    AND p.state IN ('reserved', 'in_doubt') ORDER BY p.created, p.payment_identifier LIMIT 1) LIMIT 1) d";

/// Locks the payments to settle, in one order, and looks whether another one has the transaction.
const ENDS: &str = "SELECT p.payment_identifier, p.agent, p.session, p.day, p.network, p.asset, p.reserved, p.state, \
    t.payment_identifier AS taken_by FROM unnest($1::text[], $2::text[]) k(id, transaction) \
    JOIN payments p ON p.payment_identifier = k.id \
    LEFT JOIN LATERAL (SELECT o.payment_identifier FROM payments o \
    WHERE o.transaction_id = k.transaction AND o.network = p.network AND o.state = 'settled' \
    UNION ALL SELECT a.payment_identifier FROM payments_archive a \
    WHERE a.transaction_id = k.transaction AND a.network = p.network LIMIT 1) t ON true \
    ORDER BY p.payment_identifier FOR NO KEY UPDATE OF p";

/// All writes of a batch, in one statement: the counters move by what RETURNING says was written. `$1` is the ledger's
/// time. One text for each of the shapes, because an executor started for a part without rows is what a lonely
/// reservation would pay for.
fn apply(holds: bool, ends: bool, careful: bool) -> String {
    let conflict = if careful { " ON CONFLICT DO NOTHING" } else { "" };
    let ins = format!(
        "ins AS (INSERT INTO payments (payment_identifier, id_nonce, agent, session, day, idempotency_key, call_hash, \
         ref, version_hash, network, scheme, asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, state, \
         lease_token, lease_expires, sign_before, due, created, updated) \
         SELECT r.id, r.idn, r.agent, r.session, $22::text, r.ikey, r.hash, r.ref, r.version, r.network, r.scheme, \
         r.asset, r.payer, r.pay_to, r.amount, r.nonce, r.dead, r.at, 'reserved', r.token, r.lease, r.sign, r.lease, \
         $1::bigint, $1::bigint FROM unnest($2::text[], $3::bytea[], $4::text[], $5::text[], $6::text[], $7::bytea[], \
         $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::numeric[], \
         $16::text[], $17::bigint[], $18::bigint[], $19::bytea[], $20::bigint[], $21::bigint[]) r(id, idn, agent, \
         session, ikey, hash, ref, version, network, scheme, asset, payer, pay_to, amount, nonce, dead, at, token, \
         lease, sign){conflict} RETURNING payment_identifier, agent, network, asset, day, session, reserved)"
    );
    let o = if holds { 21 } else { 0 };
    let [id, amount, transaction, evidence, body, unfinished, payload, outcome] =
        std::array::from_fn(|i| format!("${}", o + 2 + i));
    // With the last word stored, nothing needs the signed payload any more.
    let upd = format!(
        "upd AS (UPDATE payments p SET state = 'settled', reason = NULL, settled = s.amount, \
         transaction_id = s.transaction, lease_expires = NULL, due = NULL, \
         payload = CASE WHEN s.body IS NOT NULL AND NOT s.unfinished THEN NULL ELSE p.payload END, \
         payload_expires = CASE WHEN s.body IS NOT NULL AND NOT s.unfinished THEN NULL ELSE {payload}::bigint END, \
         updated = $1::bigint FROM unnest({id}::text[], {amount}::numeric[], {transaction}::text[], {evidence}::text[], \
         {body}::bytea[], {unfinished}::boolean[]) s(id, amount, transaction, evidence, body, unfinished) \
         WHERE p.payment_identifier = s.id AND p.state IN ('reserved', 'in_doubt') \
         RETURNING p.payment_identifier, p.agent, p.network, p.asset, p.day, p.session, p.reserved, p.settled, \
         p.transaction_id, s.evidence, s.body, s.unfinished), \
         oc AS (INSERT INTO outcomes (payment_identifier, body, unfinished, created, expires) \
         SELECT payment_identifier, body, unfinished, $1::bigint, {outcome}::bigint FROM upd WHERE body IS NOT NULL)"
    );
    let union = |hold: &str, end: &str| match (holds, ends) {
        (true, true) => format!("{hold} UNION ALL {end}"),
        (true, false) => hold.to_owned(),
        _ => end.to_owned(),
    };
    let parts = match (holds, ends) {
        (true, true) => format!("{ins}, {upd}"),
        (true, false) => ins,
        _ => upd,
    };
    let events = union(
        "SELECT payment_identifier, $1::bigint, 'reserved', reserved, NULL, NULL FROM ins",
        "SELECT payment_identifier, $1::bigint, 'settled', settled, transaction_id, evidence FROM upd",
    );
    let moved = union(
        "SELECT agent, network, asset, day, session, reserved AS h, 0::numeric AS s FROM ins",
        "SELECT agent, network, asset, day, session, -reserved AS h, settled AS s FROM upd",
    );
    let done = union("SELECT payment_identifier FROM ins", "SELECT payment_identifier FROM upd");
    format!(
        "WITH {parts}, ev AS (INSERT INTO payment_events (payment_identifier, at, event, amount, transaction_id, \
         evidence) {events}), bw AS (UPDATE budget_windows b SET held = b.held + x.h, spent = b.spent + x.s \
         FROM (SELECT w.agent, p.network, p.asset, w.kind, w.key, sum(p.h) AS h, sum(p.s) AS s FROM ({moved}) p \
         CROSS JOIN LATERAL {WINDOWS_OF_P} WHERE w.key IS NOT NULL GROUP BY 1, 2, 3, 4, 5) x \
         WHERE b.agent = x.agent AND b.key = x.key AND b.asset = x.asset AND b.network = x.network \
         AND b.kind = x.kind) {done}"
    )
}

/// Of an earlier run of the same batch whose commit was not answered.
const MINE: &str = "SELECT p.payment_identifier, p.lease_expires, p.sign_before \
    FROM unnest($1::text[], $2::bytea[]) k(id, token) CROSS JOIN LATERAL (SELECT * FROM payments p \
    WHERE p.payment_identifier = k.id LIMIT 1) p WHERE p.lease_token = k.token AND p.state = 'reserved'";

/// Of payments that a reservation repeats, and whose owner is gone.
const EXPIRE: &str = "WITH expired AS (UPDATE payments SET state = 'in_doubt', reason = 'lease_expired', \
    lease_expires = NULL, due = $1, updated = $1 WHERE payment_identifier = ANY($2) AND state = 'reserved' \
    AND lease_expires <= $1 RETURNING payment_identifier) INSERT INTO payment_events (payment_identifier, at, event, \
    reason) SELECT payment_identifier, $1, 'in_doubt', 'lease_expired' FROM expired";

/// A connection's statements, in the order of [`ALL`].
pub(super) struct Statements(Vec<Ready>);

impl Statements {
    pub async fn ready(session: &Session) -> Result<Statements, Error> {
        let mut all = Vec::with_capacity(ALL.len());
        for sql in ALL.iter() {
            all.push(session.ready(&sql.text, &sql.types).await?);
        }
        Ok(Statements(all))
    }

    /// It is on the wire when this was polled once.
    pub async fn rows(&self, session: &Session, ask: Ask, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        match self.0.get(ask as usize) {
            Some(ready) => session.send(ready, values).await,
            None => Ok(Vec::new()),
        }
    }
}

/// The look-ups of a batch: name, text, types.
#[cfg(test)]
pub(in crate::ledger::postgres) fn look_ups() -> Vec<(&'static str, String, Vec<String>)> {
    let of = |name, ask: Ask| {
        let sql = &ALL[ask as usize];
        (name, sql.text.clone(), sql.types.iter().map(|of| of.name().to_owned()).collect())
    };
    vec![
        of("keyed", Ask::Keyed),
        of("keyless", Ask::Keyless),
        of("ends", Ask::Ends),
        of("end windows", Ask::EndWindows),
        of("payments", Ask::Payments),
        of("mine", Ask::Mine),
    ]
}
