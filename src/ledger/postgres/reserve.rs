//! `decide` and `lookup`: duplicates before limits, so that a replay is answered also at an exhausted budget.

use super::lanes::{Answer, Hold};
use super::rows::{self, LIMIT, Note, bytes, get, int, select_payments, signed, text, unsigned};
use super::tx::{Fault, Gate, Tx, attempts};
use super::windows::{self, Locked};
use super::{PostgresLedger, archive};
use crate::ledger::limits::{Ask, Effective, WindowKey, Windows, refusal};
use crate::ledger::{By, Decision, Intent, Lease, LedgerError, Payment, Reason, State, Subject, clock};
use crate::money::{AgentId, IdempotencyKey, PaymentId, Unit};

/// A budget's first call of the day makes its windows, and midnight may pass while a lock is waited for: each costs one
/// more look.
const LOOKS: usize = 4;

enum Decided {
    Done(Decision),
    /// It would be reserved, but in windows that do not exist yet.
    Windows(Vec<WindowKey>),
    /// It is another day than the one whose windows are locked.
    Midnight,
}

impl PostgresLedger {
    pub(super) async fn do_lookup(&self, agent: &AgentId, by: By<'_>) -> Result<Option<Payment>, LedgerError> {
        attempts!(tries = repeatable, self.look_up(agent, by))
    }

    async fn look_up(&self, agent: &AgentId, by: By<'_>) -> Result<Option<Payment>, Fault> {
        let tx = self.begin(Gate::None).await?;
        let found = match by {
            By::Id(id) => match by_id(&tx, id).await? {
                None => archive::by_id(&tx, id).await?,
                found => found,
            }
            .filter(|row| row.agent == *agent),
            By::Key(key) => by_key(&tx, agent, key).await?,
            By::Twin(hash) => twin(&tx, agent, hash).await?,
        };
        let found = match found {
            Some(row) => Some(unless_expired(&tx, row).await?),
            None => None,
        };
        tx.commit().await?;
        Ok(found)
    }

    pub(super) async fn do_decide(&self, intent: &Intent) -> Result<Decision, LedgerError> {
        if intent.quote.amount().is_zero() {
            return Err(LedgerError::Inconsistent("a payment of nothing cannot be reserved".to_owned()));
        }
        // The same in every run: by it a run knows the row of an earlier one.
        let token = self.world.random();
        let answer = self.lanes.reserve(Hold::of(intent, token))?.await;
        let _turn = match answer {
            Ok(Answer::Said(decided)) => return decided,
            Ok(Answer::Alone(mut turn)) => {
                turn.comes(self.options.lock_timeout).await;
                Some(turn)
            }
            Err(_) => None,
        };
        attempts!(tries = repeatable, self.try_decide(intent, token))
    }

    /// One reservation, one transaction: what a batch left to it, which may have taken effect nevertheless.
    async fn try_decide(&self, intent: &Intent, token: [u8; 16]) -> Result<Decision, Fault> {
        for _ in 0..LOOKS {
            match self.decide_once(intent, token).await? {
                Decided::Done(decision) => return Ok(decision),
                Decided::Windows(keys) => self.make_windows(&keys).await?,
                Decided::Midnight => {}
            }
        }
        Err(LedgerError::Inconsistent("a budget window that was made is not there".to_owned()).into())
    }

    async fn decide_once(&self, intent: &Intent, token: [u8; 16]) -> Result<Decided, Fault> {
        let quote = &intent.quote;
        let (agent, unit) = (&quote.agent, quote.unit());
        let mut tx = self.begin(Gate::Shared).await?;
        let day = clock::day(tx.now);
        let keys = WindowKey::of(agent, &unit, &day, quote.session.as_deref());
        // The session of an earlier run may still be at its commit: it holds these locks until it is over.
        let locked = windows::lock(&tx, &keys).await?;
        tx.look_at_the_clock().await?;
        if clock::day(tx.now) != day {
            tx.commit().await?;
            return Ok(Decided::Midnight);
        }
        if let Some(lease) = mine(&tx, intent.payment_id, token).await? {
            tx.commit().await?;
            return Ok(Decided::Done(Decision::Fresh(lease)));
        }
        if let Some(duplicate) = duplicate(&tx, intent).await? {
            tx.commit().await?;
            return Ok(Decided::Done(duplicate));
        }
        let limits = effective(&tx, agent, &unit).await?;
        let ask = Ask::of(intent);
        let used = used(&keys, &locked);
        if let Some(refused) = refusal(&ask, &limits, &used, clock::next_midnight(tx.now))? {
            tx.commit().await?;
            return Ok(Decided::Done(refused));
        }
        let counted = |key: &WindowKey| limits.total_per_day.is_some() || key.agent != Subject::Total.as_str();
        let missing: Vec<_> = keys.iter().filter(|key| !locked.contains_key(key) && counted(key)).cloned().collect();
        if !missing.is_empty() {
            tx.commit().await?;
            return Ok(Decided::Windows(missing));
        }
        let lease = Lease {
            token,
            expires_ms: tx.now.saturating_add(intent.lease_ms),
            sign_before_ms: tx.now.saturating_add(intent.sign_within_ms.min(intent.lease_ms)),
        };
        insert(&tx, intent, &day, &lease).await?;
        let reserved = Note { event: "reserved", amount: Some(ask.amount), ..Note::default() };
        rows::note(&tx, intent.payment_id, reserved).await?;
        for (key, window) in &locked {
            windows::write(&tx, key, window.reserve(ask.amount)?).await?;
        }
        tx.commit().await?;
        Ok(Decided::Done(Decision::Fresh(lease)))
    }
}

/// The payment that this call repeats.
async fn duplicate(tx: &Tx, intent: &Intent) -> Result<Option<Decision>, Fault> {
    let (agent, hash) = (&intent.quote.agent, &intent.quote.call_hash);
    match &intent.quote.idempotency_key {
        Some(key) => {
            if let Some(row) = by_key(tx, agent, key).await? {
                let row = Box::new(unless_expired(tx, row).await?);
                let same = row.call_hash == *hash;
                return Ok(Some(if same { Decision::Existing(row) } else { Decision::Conflict(row) }));
            }
            Ok(spent_by(tx, agent, key).await?.map(Decision::KeySpent))
        }
        None => {
            if let Some(row) = twin(tx, agent, hash).await? {
                return Ok(Some(Decision::Existing(Box::new(unless_expired(tx, row).await?))));
            }
            match open_keyed(tx, agent, hash).await? {
                Some(row) => Ok(Some(Decision::DuplicateInDoubt(unless_expired(tx, row).await?.payment_id))),
                None => Ok(None),
            }
        }
    }
}

fn used(keys: &[WindowKey], locked: &Locked) -> Windows {
    let mut used = Windows::default();
    for key in keys {
        let window = locked.get(key).copied().unwrap_or_default();
        match key.kind {
            "session" => used.session = Some(window),
            _ if key.agent == Subject::Total.as_str() => used.total = window,
            _ => used.day = window,
        }
    }
    used
}

/// The reservation of an earlier run of this very call, whose commit was not answered.
async fn mine(tx: &Tx, id: PaymentId, token: [u8; 16]) -> Result<Option<Lease>, Fault> {
    let row = tx
        .row(
            "SELECT lease_expires, sign_before FROM payments \
             WHERE payment_identifier = $1 AND lease_token = $2 AND state = 'reserved'",
            &[text(&id.to_hex()), bytes(&&token[..])],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    let (expires_ms, sign_before_ms) = (unsigned(get(&row, "lease_expires")?)?, unsigned(get(&row, "sign_before")?)?);
    Ok(Some(Lease { token, expires_ms, sign_before_ms }))
}

async fn insert(tx: &Tx, intent: &Intent, day: &str, lease: &Lease) -> Result<(), Fault> {
    let quote = &intent.quote;
    let authorization = &intent.authorization;
    let inserted = tx
        .run_one(
            "INSERT INTO payments (payment_identifier, id_nonce, agent, session, day, idempotency_key, call_hash, ref, \
             version_hash, network, scheme, asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, state, \
             lease_token, lease_expires, sign_before, due, created, updated) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, \
             $10, $11, $12, $13, $14, $15::numeric, $16, $17, $18, 'reserved', $19, $20, $21, $20, $22, $22)",
            &[
                text(&intent.payment_id.to_hex()),
                bytes(&&intent.id_nonce[..]),
                text(&quote.agent.as_str()),
                text(&quote.session),
                text(&day),
                text(&quote.idempotency_key.as_ref().map(IdempotencyKey::as_str)),
                bytes(&&quote.call_hash[..]),
                text(&quote.resource_ref),
                text(&quote.version_hash),
                text(&quote.offer.network.as_str()),
                text(&quote.offer.scheme),
                text(&quote.offer.asset.as_str()),
                text(&authorization.payer),
                text(&quote.offer.pay_to),
                text(&quote.amount().to_string()),
                text(&authorization.nonce),
                int(&signed(authorization.dead_after)),
                int(&signed(authorization.at)),
                bytes(&&lease.token[..]),
                int(&signed(lease.expires_ms)),
                int(&signed(lease.sign_before_ms)),
                int(&signed(tx.now)),
            ],
        )
        .await;
    match inserted {
        // A key or a twin that committed meanwhile in another budget is found by the next run; a payment's identifier
        // and nonce are random.
        Err(Fault::Unique(index)) if index == "payments_nonce" || index == "payments_pkey" => {
            Err(LedgerError::Inconsistent("this payment identifier or nonce was used before".to_owned()).into())
        }
        other => other,
    }
}

/// The limits that bind this agent in this unit. Read after the locks are held.
pub(super) async fn effective(tx: &Tx, agent: &AgentId, unit: &Unit) -> Result<Effective, Fault> {
    let sql = format!(
        "SELECT {LIMIT} FROM spend_limits WHERE subject IN ($1, '*', 'total') AND network IN ($2, '*') \
         AND asset IN ($3, '*')"
    );
    let found =
        tx.rows(&sql, &[text(&agent.as_str()), text(&unit.network.as_str()), text(&unit.asset.as_str())]).await?;
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
pub(super) async fn unless_expired(tx: &Tx, row: Payment) -> Result<Payment, Fault> {
    if row.state != State::Reserved || row.leased {
        return Ok(row);
    }
    // Without the row's lock somebody may have ended it meanwhile: then this changes nothing.
    expire_lease(tx, row.payment_id).await?;
    existing(tx, row.payment_id).await
}

/// Of a reserved row whose lease is over. `false`: it is reserved no more.
pub(super) async fn expire_lease(tx: &Tx, id: PaymentId) -> Result<bool, Fault> {
    doubt_where(tx, id, Reason::LeaseExpired, "lease_expires <= $3").await
}

/// reserved -> in_doubt by its owner, whose lock it is under. The hold stays in its windows.
pub(super) async fn doubt(tx: &Tx, id: PaymentId, reason: Reason) -> Result<bool, Fault> {
    doubt_where(tx, id, reason, "true").await
}

async fn doubt_where(tx: &Tx, id: PaymentId, reason: Reason, condition: &str) -> Result<bool, Fault> {
    let sql = format!(
        "UPDATE payments SET state = 'in_doubt', reason = $2, lease_expires = NULL, due = $3, updated = $3 \
         WHERE payment_identifier = $1 AND state = 'reserved' AND {condition}"
    );
    let done = tx.run(&sql, &[text(&id.to_hex()), text(&reason.as_str()), int(&signed(tx.now))]).await?;
    if done == 1 {
        rows::note(tx, id, Note { event: "in_doubt", reason: Some(reason.as_str()), ..Note::default() }).await?;
    }
    Ok(done == 1)
}

async fn one(tx: &Tx, sql: &str, params: &[super::tx::Param<'_>]) -> Result<Option<Payment>, Fault> {
    let row = tx.row(sql, params).await?;
    Ok(row.as_ref().map(rows::payment).transpose()?)
}

pub(super) async fn by_id(tx: &Tx, id: PaymentId) -> Result<Option<Payment>, Fault> {
    let sql = select_payments!("WHERE p.payment_identifier = $2");
    one(tx, sql, &[int(&signed(tx.now)), text(&id.to_hex())]).await
}

pub(super) async fn existing(tx: &Tx, id: PaymentId) -> Result<Payment, Fault> {
    by_id(tx, id).await?.ok_or_else(|| LedgerError::Inconsistent("no such payment".to_owned()).into())
}

async fn by_key(tx: &Tx, agent: &AgentId, key: &IdempotencyKey) -> Result<Option<Payment>, Fault> {
    let sql = select_payments!("WHERE p.agent = $2 AND p.idempotency_key = $3");
    one(tx, sql, &[int(&signed(tx.now)), text(&agent.as_str()), text(&key.as_str())]).await
}

/// The archived payment that had this key.
async fn spent_by(tx: &Tx, agent: &AgentId, key: &IdempotencyKey) -> Result<Option<PaymentId>, Fault> {
    let sql = "SELECT payment_identifier FROM spent_keys WHERE agent = $1 AND idempotency_key = $2";
    let row = tx.row(sql, &[text(&agent.as_str()), text(&key.as_str())]).await?;
    Ok(row.as_ref().map(|row| rows::parsed(row, "payment_identifier")).transpose()?)
}

async fn twin(tx: &Tx, agent: &AgentId, hash: &[u8; 32]) -> Result<Option<Payment>, Fault> {
    let sql = select_payments!(
        "WHERE p.call_hash = $3 AND p.agent = $2 AND p.idempotency_key IS NULL \
         AND (p.state IN ('reserved', 'in_doubt') OR p.state = 'settled' AND p.answered IS NULL)"
    );
    one(tx, sql, &[int(&signed(tx.now)), text(&agent.as_str()), bytes(&&hash[..])]).await
}

async fn open_keyed(tx: &Tx, agent: &AgentId, hash: &[u8; 32]) -> Result<Option<Payment>, Fault> {
    let sql = select_payments!(
        "WHERE p.call_hash = $3 AND p.agent = $2 AND p.idempotency_key IS NOT NULL \
         AND p.state IN ('reserved', 'in_doubt') ORDER BY p.created, p.payment_identifier LIMIT 1"
    );
    one(tx, sql, &[int(&signed(tx.now)), text(&agent.as_str()), bytes(&&hash[..])]).await
}
