//! Limits, the kill switch, budgets, and what the operator sees: list, show, audit.

use std::collections::BTreeSet;

use futures_util::TryStreamExt;
use sha2::{Digest, Sha256};
use sqlx::Connection;

use super::reserve::effective;
use super::rows::{self, get, parsed, select_payments, signed, unsigned};
use super::{SqliteLedger, Writing, now, unavailable};
use crate::ledger::audit::Auditor;
use crate::ledger::limits::{Window, WindowKey, same_limits, settled_already};
use crate::ledger::{
    Applied, Audit, BudgetLine, Event, Filter, LedgerError, Limit, LimitList, ON_THE_WAY_MS, Payment, Signable, State,
    Subject, clock,
};
use crate::money::{AgentId, Amount, Asset, Network, PaymentId, Unit};

/// Most rows that one list shows.
const MAX_LIST: u32 = 10_000;
const OPERATOR: &str = "operator";

impl SqliteLedger {
    pub(super) async fn do_budget(
        &self,
        agent: &AgentId,
        session: Option<&str>,
    ) -> Result<Vec<BudgetLine>, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let today = clock::day(w.now);
        let mut lines = Vec::new();
        for unit in units(&mut w, agent).await? {
            let limits = effective(&mut w.tx, agent, &unit).await?;
            let day = rows::read_window(&mut w.tx, &WindowKey::day(agent.as_str(), &unit, &today)).await?;
            let in_session = match session {
                Some(session) => {
                    rows::read_window(&mut w.tx, &WindowKey::session(agent.as_str(), &unit, session)).await?
                }
                None => Window::default(),
            };
            // What others use is this agent's business only where it bounds what is left.
            let total_used = match limits.total_per_day {
                Some(_) => {
                    let key = WindowKey::day(Subject::Total.as_str(), &unit, &today);
                    rows::read_window(&mut w.tx, &key).await?.used()?
                }
                None => Amount::ZERO,
            };
            lines.push(BudgetLine {
                earlier_holds: earlier_holds(&mut w, agent, &unit, &today).await?,
                unit,
                per_call: limits.per_call,
                per_session: limits.per_session,
                per_day: limits.per_day,
                total_per_day: limits.total_per_day,
                unlimited: limits.unlimited,
                suspended: limits.suspended,
                day_spent: day.spent,
                day_held: day.held,
                session_spent: in_session.spent,
                session_held: in_session.held,
                total_used,
                resets_at_ms: clock::next_midnight(w.now),
            });
        }
        w.commit().await?;
        Ok(lines)
    }

    pub(super) async fn do_apply_limits(&self, list: LimitList<'_>) -> Result<Applied, LedgerError> {
        let source = list.source;
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let stored: Option<i64> = sqlx::query_scalar("SELECT version FROM limit_lists WHERE source = ?1")
            .bind(source)
            .fetch_optional(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        let found = sqlx::query("SELECT * FROM spend_limits WHERE source = ?1")
            .bind(source)
            .fetch_all(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        let (mut before, mut version) = (Vec::new(), 0);
        for row in &found {
            version = version.max(get::<i64>(row, "version")?);
            before.extend(rows::limit(row)?.1);
        }
        if let Some(already) = settled_already(&list, stored.map_or(Ok(0), unsigned)?, &before) {
            w.commit().await?;
            return Ok(already);
        }
        // A stop in all units is the operator's and no part of any list.
        sqlx::query("DELETE FROM spend_limits WHERE source = ?1 AND network <> '*'")
            .bind(source)
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        for limit in list.limits {
            insert_limit(&mut w, limit, source, limit.suspended, version.saturating_add(1)).await?;
        }
        sqlx::query(
            "INSERT INTO limit_lists (source, version, updated) VALUES (?1, ?2, ?3) ON CONFLICT (source) \
             DO UPDATE SET version = excluded.version, updated = excluded.updated",
        )
        .bind(source)
        .bind(signed(list.version))
        .bind(signed(w.now))
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        w.commit().await?;
        Ok(Applied::Written { replaced: !before.is_empty() && !same_limits(&before, list.limits) })
    }

    pub(super) async fn do_limits(&self) -> Result<Vec<Limit>, LedgerError> {
        Ok(self.limit_rows().await?.into_iter().filter_map(|(_, limit)| limit).collect())
    }

    pub(super) async fn do_stopped(&self) -> Result<Vec<Subject>, LedgerError> {
        let rows = self.limit_rows().await?;
        Ok(rows.into_iter().filter_map(|(subject, limit)| limit.is_none().then_some(subject)).collect())
    }

    async fn limit_rows(&self) -> Result<Vec<(Subject, Option<Limit>)>, LedgerError> {
        let mut connection = self.connection().await?;
        let found = sqlx::query("SELECT * FROM spend_limits ORDER BY subject, network, asset, source")
            .fetch_all(&mut *connection)
            .await
            .map_err(unavailable)?;
        found.iter().map(rows::limit).collect()
    }

    pub(super) async fn do_set_limit(&self, limit: &Limit) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let old: Option<(i64, bool)> = sqlx::query_as(
            "DELETE FROM spend_limits WHERE subject = ?1 AND network = ?2 AND asset = ?3 AND source = 'operator' \
             RETURNING version, suspended",
        )
        .bind(limit.subject.as_str())
        .bind(limit.unit.network.as_str())
        .bind(limit.unit.asset.as_str())
        .fetch_optional(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        let (version, suspended) = old.unwrap_or((0, false));
        insert_limit(&mut w, limit, OPERATOR, suspended || limit.suspended, version.saturating_add(1)).await?;
        w.commit().await
    }

    /// SQLite has one writer: when this has committed, no earlier decision is under way.
    pub(super) async fn do_suspend(&self, subject: &Subject, unit: Option<&Unit>) -> Result<u64, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let since = w.now;
        let stop = "INSERT INTO spend_limits (subject, network, asset, source, suspended, updated) \
             VALUES (?1, ?2, ?3, 'operator', 1, ?4) ON CONFLICT (subject, network, asset, source) \
             DO UPDATE SET suspended = 1, version = version + 1, updated = excluded.updated";
        operator_row(&mut w, stop, subject, unit).await?;
        w.commit().await?;
        Ok(since)
    }

    pub(super) async fn do_resume(&self, subject: &Subject, unit: Option<&Unit>) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let go_on = "UPDATE spend_limits SET suspended = 0, version = version + 1, updated = ?4 WHERE subject = ?1 \
             AND network = ?2 AND asset = ?3 AND source = 'operator' AND suspended = 1";
        let resumed = operator_row(&mut w, go_on, subject, unit).await?;
        // A row that was only the stop says nothing any more.
        sqlx::query(
            "DELETE FROM spend_limits WHERE source = 'operator' AND suspended = 0 AND unlimited = 0 \
             AND per_call IS NULL AND per_session IS NULL AND per_day IS NULL",
        )
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
        w.commit().await?;
        Ok(resumed == 1)
    }

    pub(super) async fn do_signable(&self, subject: &Subject, unit: Option<&Unit>) -> Result<Signable, LedgerError> {
        let (network, asset) = unit_words(unit);
        let agent = match subject {
            Subject::Agent(agent) => Some(agent.as_str()),
            Subject::EachAgent | Subject::Total => None,
        };
        let mut connection = self.connection().await?;
        let Writing { mut tx, now } = Writing::begin(&mut connection, &self.world).await?;
        let (count, until, open): (i64, i64, i64) = sqlx::query_as(
            "SELECT count(*) FILTER (WHERE state = 'reserved' AND sign_before >= ?1), \
             COALESCE(max(sign_before) FILTER (WHERE state = 'reserved' AND sign_before >= ?1), 0), count(*) \
             FROM payments WHERE state IN ('reserved', 'in_doubt') AND (?2 IS NULL OR agent = ?2) \
             AND (?3 = '*' OR network = ?3 AND asset = ?4)",
        )
        .bind(signed(now.saturating_sub(ON_THE_WAY_MS)))
        .bind(agent)
        .bind(network)
        .bind(asset)
        .fetch_one(&mut *tx)
        .await
        .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        let (count, until) = (unsigned(count)?, unsigned(until)?);
        let for_ms = if count == 0 { 0 } else { (until + ON_THE_WAY_MS).saturating_sub(now) };
        Ok(Signable { count, for_ms, open: unsigned(open)? })
    }

    pub(super) async fn do_list(&self, filter: &Filter) -> Result<Vec<Payment>, LedgerError> {
        let mut connection = self.connection().await?;
        let now = now(&mut connection, &self.world).await?;
        let found = sqlx::query(select_payments!(
            "WHERE (?2 IS NULL OR p.state = ?2) AND (?3 IS NULL OR p.agent = ?3) \
             ORDER BY p.created DESC, p.rowid DESC LIMIT ?4"
        ))
        .bind(signed(now))
        .bind(filter.state.map(State::as_str))
        .bind(filter.agent.as_ref().map(AgentId::as_str))
        .bind(filter.limit.min(MAX_LIST))
        .fetch_all(&mut *connection)
        .await
        .map_err(unavailable)?;
        found.iter().map(rows::payment).collect()
    }

    pub(super) async fn do_show(&self, id: &str) -> Result<Option<(Payment, Vec<Event>)>, LedgerError> {
        let lower_hex = id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if !lower_hex || !(8..=64).contains(&id.len()) {
            return Ok(None);
        }
        let mut connection = self.connection().await?;
        let mut tx = connection.begin().await.map_err(unavailable)?;
        let now = now(&mut tx, &self.world).await?;
        let found =
            sqlx::query(select_payments!("WHERE p.payment_identifier >= ?2 AND p.payment_identifier < ?3 LIMIT 2"))
                .bind(signed(now))
                .bind(id)
                .bind(format!("{id}g"))
                .fetch_all(&mut *tx)
                .await
                .map_err(unavailable)?;
        let [row] = &found[..] else { return Ok(None) };
        let payment = rows::payment(row)?;
        let events = sqlx::query("SELECT * FROM payment_events WHERE payment_identifier = ?1 ORDER BY id")
            .bind(payment.payment_id.to_hex())
            .fetch_all(&mut *tx)
            .await
            .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        let events = events.iter().map(rows::event).collect::<Result<_, _>>()?;
        Ok(Some((payment, events)))
    }

    pub(super) async fn do_audit(&self) -> Result<Audit, LedgerError> {
        let mut connection = self.connection().await?;
        let mut tx = connection.begin().await.map_err(unavailable)?;
        let mut audit = Auditor::new(now(&mut tx, &self.world).await?);
        let mut stream = sqlx::query(
            "SELECT p.*, (SELECT e.event FROM payment_events e WHERE e.payment_identifier = p.payment_identifier \
             AND e.event IN ('reserved', 'in_doubt', 'settled', 'released') ORDER BY e.id DESC LIMIT 1) AS last_event, \
             (SELECT count(*) FROM payment_events e WHERE e.payment_identifier = p.payment_identifier \
             AND e.event IN ('settled', 'released')) AS ends, \
             (SELECT e.amount FROM payment_events e WHERE e.payment_identifier = p.payment_identifier \
             AND e.event = 'settled' ORDER BY e.id DESC LIMIT 1) AS event_amount, \
             EXISTS (SELECT 1 FROM payment_events e WHERE e.payment_identifier = p.payment_identifier \
             AND e.event = 'late_success') AS late_success, \
             EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = p.payment_identifier) AS has_outcome \
             FROM payments p",
        )
        .fetch(&mut *tx);
        while let Some(row) = stream.try_next().await.map_err(unavailable)? {
            audit.payment(rows::audited(&row));
        }
        drop(stream);
        let mut stream = sqlx::query("SELECT * FROM budget_windows").fetch(&mut *tx);
        while let Some(row) = stream.try_next().await.map_err(unavailable)? {
            audit.window(rows::window(&row));
        }
        drop(stream);
        tx.commit().await.map_err(unavailable)?;
        Ok(audit.finish())
    }

    pub(super) async fn do_end_session(&self, session: &str, expires_ms: u64) -> Result<(), LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        sqlx::query("DELETE FROM sessions_ended WHERE expires <= ?1")
            .bind(signed(w.now))
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        sqlx::query("INSERT INTO sessions_ended (session, expires) VALUES (?1, ?2) ON CONFLICT (session) DO NOTHING")
            .bind(&Sha256::digest(session)[..])
            .bind(signed(expires_ms))
            .execute(&mut *w.tx)
            .await
            .map_err(unavailable)?;
        w.commit().await
    }

    pub(super) async fn do_session_ended(&self, session: &str) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sessions_ended WHERE session = ?1)")
            .bind(&Sha256::digest(session)[..])
            .fetch_one(&mut *connection)
            .await
            .map_err(unavailable)
    }
}

/// `*` in both: every unit.
fn unit_words(unit: Option<&Unit>) -> (&str, &str) {
    unit.map_or(("*", "*"), |unit| (unit.network.as_str(), unit.asset.as_str()))
}

/// One statement on the operator's row of a subject and unit (`?1` to `?3`), with the time as `?4`.
async fn operator_row(
    w: &mut Writing<'_>,
    sql: &'static str,
    subject: &Subject,
    unit: Option<&Unit>,
) -> Result<u64, LedgerError> {
    let (network, asset) = unit_words(unit);
    let done = sqlx::query(sql)
        .bind(subject.as_str())
        .bind(network)
        .bind(asset)
        .bind(signed(w.now))
        .execute(&mut *w.tx)
        .await
        .map_err(unavailable)?;
    Ok(done.rows_affected())
}

async fn insert_limit(
    w: &mut Writing<'_>,
    limit: &Limit,
    source: &str,
    suspended: bool,
    version: i64,
) -> Result<(), LedgerError> {
    if limit.subject == Subject::Total && (limit.per_call.is_some() || limit.per_session.is_some()) {
        return Err(LedgerError::Inconsistent("the limit of all agents together has a figure per day only".to_owned()));
    }
    let text = |figure: Option<Amount>| figure.map(|figure| figure.to_string());
    sqlx::query(
        "INSERT INTO spend_limits (subject, network, asset, source, per_call, per_session, per_day, unlimited, suspended, \
         version, updated) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )
    .bind(limit.subject.as_str())
    .bind(limit.unit.network.as_str())
    .bind(limit.unit.asset.as_str())
    .bind(source)
    .bind(text(limit.per_call))
    .bind(text(limit.per_session))
    .bind(text(limit.per_day))
    .bind(limit.unlimited)
    .bind(suspended)
    .bind(version)
    .bind(signed(w.now))
    .execute(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    Ok(())
}

/// Units in which this agent has a limit or has spent.
async fn units(w: &mut Writing<'_>, agent: &AgentId) -> Result<BTreeSet<Unit>, LedgerError> {
    let found = sqlx::query(
        "SELECT network, asset FROM spend_limits WHERE subject IN (?1, '*', 'total') AND network <> '*' \
         UNION SELECT network, asset FROM budget_windows WHERE agent = ?1",
    )
    .bind(agent.as_str())
    .fetch_all(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    found
        .iter()
        .map(|row| Ok(Unit { network: parsed::<Network>(row, "network")?, asset: parsed::<Asset>(row, "asset")? }))
        .collect()
}

async fn earlier_holds(
    w: &mut Writing<'_>,
    agent: &AgentId,
    unit: &Unit,
    today: &str,
) -> Result<Vec<(PaymentId, String, Amount)>, LedgerError> {
    let found = sqlx::query(
        "SELECT payment_identifier, day, reserved FROM payments WHERE agent = ?1 AND network = ?2 AND asset = ?3 \
         AND state IN ('reserved', 'in_doubt') AND day < ?4 ORDER BY created LIMIT 1000",
    )
    .bind(agent.as_str())
    .bind(unit.network.as_str())
    .bind(unit.asset.as_str())
    .bind(today)
    .fetch_all(&mut *w.tx)
    .await
    .map_err(unavailable)?;
    let hold = |row| Ok((parsed(row, "payment_identifier")?, get(row, "day")?, parsed(row, "reserved")?));
    found.iter().map(hold).collect()
}
