//! Limits, the kill switch, budgets, and what the operator sees: list, show, audit.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::TryStreamExt;
use sha2::{Digest, Sha256};

use super::reserve::effective;
use super::rows::{self, EVENT, HELD, LIMIT, bytes, flag, get, int, parsed, select_payments, signed, text, unsigned};
use super::tx::{Fault, Gate, Tx, attempts};
use super::{PostgresLedger, archive, windows};
use crate::ledger::audit::Auditor;
use crate::ledger::limits::{WindowKey, same_limits, settled_already};
use crate::ledger::{
    Applied, Audit, BudgetLine, Event, Filter, LedgerError, Limit, LimitList, ON_THE_WAY_MS, Payment, Signable, State,
    Subject, clock,
};
use crate::money::{AgentId, Amount, Asset, Network, PaymentId, Unit};

/// Most rows that one list shows.
const MAX_LIST: u32 = 10_000;
const OPERATOR: &str = "operator";
/// What no foreign key looks after, which would lock each payment once more for each of its events.
const EVENTS_OF_NOTHING: &str = "SELECT DISTINCT left(e.payment_identifier, 16) AS id FROM payment_events e \
    WHERE NOT EXISTS (SELECT 1 FROM payments p WHERE p.payment_identifier = e.payment_identifier) LIMIT 100";
/// What counting every row may take.
const LONG: Duration = Duration::from_secs(600);

impl PostgresLedger {
    pub(super) async fn do_budget(
        &self,
        agent: &AgentId,
        session: Option<&str>,
    ) -> Result<Vec<BudgetLine>, LedgerError> {
        attempts!(tries = repeatable, self.try_budget(agent, session))
    }

    async fn try_budget(&self, agent: &AgentId, session: Option<&str>) -> Result<Vec<BudgetLine>, Fault> {
        let tx = self.snapshot(self.options.statement_timeout).await?;
        let today = clock::day(tx.now);
        let mut lines = Vec::new();
        for unit in units(&tx, agent).await? {
            let limits = effective(&tx, agent, &unit).await?;
            let found = windows::read(&tx, &WindowKey::of(agent, &unit, &today, session)).await?;
            let of = |key: WindowKey| found.get(&key).copied().unwrap_or_default();
            let day = of(WindowKey::day(agent.as_str(), &unit, &today));
            let in_session = session.map(|session| of(WindowKey::session(agent.as_str(), &unit, session)));
            let in_session = in_session.unwrap_or_default();
            // What others use is this agent's business only where it bounds what is left.
            let total_used = match limits.total_per_day {
                Some(_) => windows::total(&tx, &unit, &today).await?.used()?,
                None => Amount::ZERO,
            };
            lines.push(BudgetLine {
                earlier_holds: earlier_holds(&tx, agent, &unit, &today).await?,
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
                resets_at_ms: clock::next_midnight(tx.now),
            });
        }
        tx.commit().await?;
        Ok(lines)
    }

    pub(super) async fn do_apply_limits(&self, list: LimitList<'_>) -> Result<Applied, LedgerError> {
        attempts!(tries = repeatable, self.try_apply_limits(list))
    }

    async fn try_apply_limits(&self, list: LimitList<'_>) -> Result<Applied, Fault> {
        let source = list.source;
        let tx = self.begin(Gate::Limits).await?;
        let stored = tx.row("SELECT version FROM limit_lists WHERE source = $1", &[text(&source)]).await?;
        let stored = stored.as_ref().map_or(Ok(0), |row| unsigned(get(row, "version")?))?;
        let sql = format!("SELECT {LIMIT}, version FROM spend_limits WHERE source = $1");
        let (mut before, mut version) = (Vec::new(), 0);
        for row in &tx.rows(&sql, &[text(&source)]).await? {
            version = version.max(get::<i64>(row, "version")?);
            before.extend(rows::limit(row)?.1);
        }
        if let Some(already) = settled_already(&list, stored, &before) {
            tx.commit().await?;
            return Ok(already);
        }
        // A stop in all units is the operator's and no part of any list.
        tx.run("DELETE FROM spend_limits WHERE source = $1 AND network <> '*'", &[text(&source)]).await?;
        for limit in list.limits {
            insert_limit(&tx, limit, source, limit.suspended, version.saturating_add(1)).await?;
        }
        tx.run_one(
            "INSERT INTO limit_lists (source, version, updated) VALUES ($1, $2, $3) ON CONFLICT (source) \
             DO UPDATE SET version = excluded.version, updated = excluded.updated",
            &[text(&source), int(&signed(list.version)), int(&signed(tx.now))],
        )
        .await?;
        tx.commit().await?;
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
        let sql = format!("SELECT {LIMIT} FROM spend_limits ORDER BY subject, network, asset, source");
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let found = tx.rows(&sql, &[]).await?;
            tx.commit().await?;
            Ok::<_, Fault>(found.iter().map(rows::limit).collect::<Result<_, _>>()?)
        })
    }

    pub(super) async fn do_set_limit(&self, limit: &Limit) -> Result<(), LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::Limits).await?;
            let old = tx
                .row(
                    "DELETE FROM spend_limits WHERE subject = $1 AND network = $2 AND asset = $3 \
                     AND source = 'operator' RETURNING version, suspended",
                    &[
                        text(&limit.subject.as_str()),
                        text(&limit.unit.network.as_str()),
                        text(&limit.unit.asset.as_str()),
                    ],
                )
                .await?;
            let (version, suspended): (i64, bool) = match &old {
                Some(row) => (get(row, "version")?, get(row, "suspended")?),
                None => (0, false),
            };
            let suspended = suspended || limit.suspended;
            insert_limit(&tx, limit, OPERATOR, suspended, version.saturating_add(1)).await?;
            tx.commit().await
        })
    }

    /// The rows are committed first; then the gate is taken alone, so every decision that may not have seen them is over.
    /// A replica that stopped in the middle of one is cut off by the database.
    pub(super) async fn do_suspend(&self, subject: &Subject, unit: Option<&Unit>) -> Result<u64, LedgerError> {
        attempts!(tries = repeatable, self.write_stop(subject, unit))?;
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::Exclusive).await?;
            let since = tx.now;
            tx.commit().await?;
            Ok::<_, Fault>(since)
        })
    }

    async fn write_stop(&self, subject: &Subject, unit: Option<&Unit>) -> Result<(), Fault> {
        let (network, asset) = unit_words(unit);
        let tx = self.begin(Gate::Limits).await?;
        tx.run_one(
            "INSERT INTO spend_limits (subject, network, asset, source, suspended, updated) \
             VALUES ($1, $2, $3, 'operator', true, $4) ON CONFLICT (subject, network, asset, source) \
             DO UPDATE SET suspended = true, version = spend_limits.version + 1, updated = excluded.updated",
            &[text(&subject.as_str()), text(&network), text(&asset), int(&signed(tx.now))],
        )
        .await?;
        tx.commit().await
    }

    /// Run once: a second run would say that there was no stop.
    pub(super) async fn do_resume(&self, subject: &Subject, unit: Option<&Unit>) -> Result<bool, LedgerError> {
        let (network, asset) = unit_words(unit);
        attempts!(tries = once, async {
            let tx = self.begin(Gate::Limits).await?;
            let done = tx
                .run(
                    "UPDATE spend_limits SET suspended = false, version = version + 1, updated = $4 WHERE subject = $1 \
                     AND network = $2 AND asset = $3 AND source = 'operator' AND suspended",
                    &[text(&subject.as_str()), text(&network), text(&asset), int(&signed(tx.now))],
                )
                .await?;
            // A row that was only the stop says nothing any more.
            tx.run(
                "DELETE FROM spend_limits WHERE source = 'operator' AND NOT suspended AND NOT unlimited \
                 AND per_call IS NULL AND per_session IS NULL AND per_day IS NULL",
                &[],
            )
            .await?;
            tx.commit().await?;
            Ok(done == 1)
        })
    }

    pub(super) async fn do_signable(&self, subject: &Subject, unit: Option<&Unit>) -> Result<Signable, LedgerError> {
        let (network, asset) = unit_words(unit);
        let agent = match subject {
            Subject::Agent(agent) => Some(agent.as_str()),
            Subject::EachAgent | Subject::Total => None,
        };
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let row = tx
                .row(
                    "SELECT count(*) FILTER (WHERE state = 'reserved' AND sign_before >= $1) AS signable, \
                     COALESCE(max(sign_before) FILTER (WHERE state = 'reserved' AND sign_before >= $1), 0) AS until, \
                     count(*) AS open FROM payments WHERE state IN ('reserved', 'in_doubt') \
                     AND ($2 IS NULL OR agent = $2) AND ($3 = '*' OR network = $3 AND asset = $4)",
                    &[int(&signed(tx.now.saturating_sub(ON_THE_WAY_MS))), text(&agent), text(&network), text(&asset)],
                )
                .await?;
            let now = tx.now;
            tx.commit().await?;
            let Some(row) = row else { return Ok(Signable::default()) };
            let figure = |name| unsigned(get(&row, name)?);
            let (count, until) = (figure("signable")?, figure("until")?);
            let for_ms = if count == 0 { 0 } else { (until + ON_THE_WAY_MS).saturating_sub(now) };
            Ok::<_, Fault>(Signable { count, for_ms, open: figure("open")? })
        })
    }

    pub(super) async fn do_list(&self, filter: &Filter) -> Result<Vec<Payment>, LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.snapshot(LONG).await?;
            let found = tx
                .rows(
                    select_payments!(
                        "WHERE ($2 IS NULL OR p.state = $2) AND ($3 IS NULL OR p.agent = $3) \
                         ORDER BY p.created DESC, p.payment_identifier DESC LIMIT $4"
                    ),
                    &[
                        int(&signed(tx.now)),
                        text(&filter.state.map(State::as_str)),
                        text(&filter.agent.as_ref().map(AgentId::as_str)),
                        int(&i64::from(filter.limit.min(MAX_LIST))),
                    ],
                )
                .await?;
            tx.commit().await?;
            Ok::<_, Fault>(found.iter().map(rows::payment).collect::<Result<_, _>>()?)
        })
    }

    pub(super) async fn do_show(&self, id: &str) -> Result<Option<(Payment, Vec<Event>)>, LedgerError> {
        let lower_hex = id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if !lower_hex || !(8..=64).contains(&id.len()) {
            return Ok(None);
        }
        attempts!(tries = repeatable, self.try_show(id))
    }

    async fn try_show(&self, id: &str) -> Result<Option<(Payment, Vec<Event>)>, Fault> {
        let tx = self.snapshot(self.options.statement_timeout).await?;
        let sql = select_payments!("WHERE p.payment_identifier >= $2 AND p.payment_identifier < $3 LIMIT 2");
        let found = tx.rows(sql, &[int(&signed(tx.now)), text(&id), text(&format!("{id}g"))]).await?;
        let mut archived = archive::beginning_with(&tx, id).await?;
        let shown = match (&found[..], archived.pop()) {
            ([row], None) => {
                let payment = rows::payment(row)?;
                let sql = format!("SELECT {EVENT} FROM payment_events WHERE payment_identifier = $1 ORDER BY id");
                let events = tx.rows(&sql, &[text(&payment.payment_id.to_hex())]).await?;
                Some((payment, events.iter().map(rows::event).collect::<Result<_, _>>()?))
            }
            ([], Some(payment)) if archived.is_empty() => {
                let events = archive::events(&tx, payment.payment_id).await?;
                Some((payment, events))
            }
            _ => None,
        };
        tx.commit().await?;
        Ok(shown)
    }

    pub(super) async fn do_audit(&self) -> Result<Audit, LedgerError> {
        attempts!(tries = repeatable, self.try_audit())
    }

    /// Row by row in one snapshot: a big ledger does not have to fit into memory.
    async fn try_audit(&self) -> Result<Audit, Fault> {
        let tx = self.snapshot(LONG).await?;
        let mut audit = Auditor::new(tx.now).totals_on_demand();
        let sql = format!(
            "SELECT {HELD}, p.due, p.payload IS NOT NULL AS has_payload, p.payload_expires, \
             EXISTS (SELECT 1 FROM outcomes o WHERE o.payment_identifier = p.payment_identifier) AS has_outcome, \
             e.last_event, COALESCE(e.ends, 0) AS ends, e.event_amount, COALESCE(e.late_success, false) AS late_success \
             FROM payments p LEFT JOIN (SELECT payment_identifier, \
             (array_agg(event ORDER BY id DESC) FILTER (WHERE event IN ('reserved', 'in_doubt', 'settled', 'released')))[1] \
             AS last_event, count(*) FILTER (WHERE event IN ('settled', 'released')) AS ends, \
             (array_agg(amount::text ORDER BY id DESC) FILTER (WHERE event = 'settled'))[1] AS event_amount, \
             bool_or(event = 'late_success') AS late_success FROM payment_events GROUP BY payment_identifier) e \
             ON e.payment_identifier = p.payment_identifier"
        );
        let mut payments = std::pin::pin!(tx.stream(&sql).await?);
        while let Some(row) = payments.try_next().await.map_err(super::tx::fault)? {
            audit.payment(rows::audited(&row));
        }
        let mut payments = std::pin::pin!(tx.stream(&archive::audited()).await?);
        while let Some(row) = payments.try_next().await.map_err(super::tx::fault)? {
            audit.payment(rows::audited(&row));
        }
        for row in &tx.rows(archive::FORGOTTEN_KEYS, &[]).await? {
            let id: &str = get(row, "id")?;
            audit.differs("key", format!("{id} is archived, and its key could be spent again"));
        }
        for row in &tx.rows(EVENTS_OF_NOTHING, &[]).await? {
            let id: &str = get(row, "id")?;
            audit.differs("history", format!("{id} has events and no payment"));
        }
        let sql =
            "SELECT agent, network, asset, kind, key, held::text AS held, spent::text AS spent FROM budget_windows";
        let mut found = std::pin::pin!(tx.stream(sql).await?);
        while let Some(row) = found.try_next().await.map_err(super::tx::fault)? {
            audit.window(rows::window(&row));
        }
        tx.commit().await?;
        Ok(audit.finish())
    }

    pub(super) async fn do_end_session(&self, session: &str, expires_ms: u64) -> Result<(), LedgerError> {
        let digest = Sha256::digest(session).to_vec();
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let sql = "INSERT INTO sessions_ended (session, expires) VALUES ($1, $2) ON CONFLICT (session) DO NOTHING";
            tx.run(sql, &[bytes(&digest), int(&signed(expires_ms))]).await?;
            tx.commit().await
        })
    }

    pub(super) async fn do_session_ended(&self, session: &str) -> Result<bool, LedgerError> {
        let digest = Sha256::digest(session).to_vec();
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let row = tx.row("SELECT 1 AS ended FROM sessions_ended WHERE session = $1", &[bytes(&digest)]).await?;
            tx.commit().await?;
            Ok::<_, Fault>(row.is_some())
        })
    }

    pub(super) async fn do_now_ms(&self) -> Result<u64, LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let now = tx.now;
            tx.commit().await?;
            Ok::<_, Fault>(now)
        })
    }

    /// Of a standby, or a database that was made read-only, everything can be read and nothing written.
    pub(super) async fn do_ping(&self) -> Result<(), LedgerError> {
        attempts!(tries = at_once, async {
            let tx = self.begin(Gate::None).await?;
            let sql = "SELECT current_setting('transaction_read_only') = 'on' AS read_only, \
                has_table_privilege('payments', 'INSERT') AND has_table_privilege('payments', 'UPDATE') AS allowed";
            let row = tx.row(sql, &[]).await?;
            let said = |name| row.as_ref().map_or(Ok(false), |row| get::<bool>(row, name));
            if said("read_only")? {
                return Err(LedgerError::Unavailable("the database is read-only".to_owned()).into());
            }
            if !said("allowed")? {
                return Err(LedgerError::Unavailable("the database's user may not write payments".to_owned()).into());
            }
            // A newer schema is one that a rolling update runs beside; an older one is another database.
            let row = tx.row("SELECT max(version) AS version FROM _sqlx_migrations", &[]).await?;
            let version = row.as_ref().map_or(Ok(None), |row| get::<Option<i64>>(row, "version"))?;
            if version.is_none_or(|version| version < super::migrate::newest()) {
                return Err(LedgerError::Unavailable("the schema is older than this program's".to_owned()).into());
            }
            tx.commit().await
        })
    }
}

/// `*` in both: every unit.
fn unit_words(unit: Option<&Unit>) -> (&str, &str) {
    unit.map_or(("*", "*"), |unit| (unit.network.as_str(), unit.asset.as_str()))
}

async fn insert_limit(tx: &Tx, limit: &Limit, source: &str, suspended: bool, version: i64) -> Result<(), Fault> {
    if limit.subject == Subject::Total && (limit.per_call.is_some() || limit.per_session.is_some()) {
        let figure = "the limit of all agents together has a figure per day only";
        return Err(LedgerError::Inconsistent(figure.to_owned()).into());
    }
    let figure = |figure: Option<Amount>| figure.map(|figure| figure.to_string());
    tx.run_one(
        "INSERT INTO spend_limits (subject, network, asset, source, per_call, per_session, per_day, unlimited, \
         suspended, version, updated) \
         VALUES ($1, $2, $3, $4, $5::numeric, $6::numeric, $7::numeric, $8, $9, $10, $11)",
        &[
            text(&limit.subject.as_str()),
            text(&limit.unit.network.as_str()),
            text(&limit.unit.asset.as_str()),
            text(&source),
            text(&figure(limit.per_call)),
            text(&figure(limit.per_session)),
            text(&figure(limit.per_day)),
            flag(&limit.unlimited),
            flag(&suspended),
            int(&version),
            int(&signed(tx.now)),
        ],
    )
    .await
}

/// Units in which this agent has a limit or has spent.
async fn units(tx: &Tx, agent: &AgentId) -> Result<BTreeSet<Unit>, Fault> {
    let found = tx
        .rows(
            "SELECT network, asset FROM spend_limits WHERE subject IN ($1, '*', 'total') AND network <> '*' \
             UNION SELECT network, asset FROM budget_windows WHERE agent = $1",
            &[text(&agent.as_str())],
        )
        .await?;
    let unit = |row| Ok(Unit { network: parsed::<Network>(row, "network")?, asset: parsed::<Asset>(row, "asset")? });
    Ok(found.iter().map(unit).collect::<Result<_, LedgerError>>()?)
}

async fn earlier_holds(
    tx: &Tx,
    agent: &AgentId,
    unit: &Unit,
    today: &str,
) -> Result<Vec<(PaymentId, String, Amount)>, Fault> {
    let found = tx
        .rows(
            "SELECT payment_identifier, day, reserved::text AS reserved FROM payments WHERE agent = $1 \
             AND network = $2 AND asset = $3 AND state IN ('reserved', 'in_doubt') AND day < $4 \
             ORDER BY created, payment_identifier LIMIT 1000",
            &[text(&agent.as_str()), text(&unit.network.as_str()), text(&unit.asset.as_str()), text(&today)],
        )
        .await?;
    let hold = |row| Ok((parsed(row, "payment_identifier")?, get(row, "day")?, parsed(row, "reserved")?));
    Ok(found.iter().map(hold).collect::<Result<_, LedgerError>>()?)
}
