//! The counters. Their rows exist before they are locked, and are locked before anything else, in one order.

use std::collections::BTreeMap;

use tokio_postgres::types::{ToSql, Type};

use super::PostgresLedger;
use super::connect::no_connection;
use super::rows::{self, text};
use super::tx::{Fault, Gate, Param, Tx, fault};
use super::wire::{COMMIT, Guarded, Session, Wire};
use crate::ledger::limits::{Window, WindowKey};
use crate::ledger::{LedgerError, Subject};
use crate::money::{Amount, Unit};

/// The windows of one hold as they are, under their locks. One that does not exist is missing here; of all agents' day
/// that means that nobody counts it (see [`make`]).
pub(super) type Locked = BTreeMap<WindowKey, Window>;

/// Locks the windows of one hold: the agent's day and session, then all agents' day. The rows are sorted before they
/// are locked, so of two transactions that share several none waits for the other.
pub(super) async fn lock(tx: &Tx, keys: &[WindowKey]) -> Result<Locked, Fault> {
    select(tx, keys, "ORDER BY agent = 'total', kind FOR NO KEY UPDATE").await
}

/// For a look that decides nothing.
pub(super) async fn read(tx: &Tx, keys: &[WindowKey]) -> Result<Locked, Fault> {
    select(tx, keys, "").await
}

async fn select(tx: &Tx, keys: &[WindowKey], tail: &str) -> Result<Locked, Fault> {
    let find =
        |kind, total: bool| keys.iter().find(move |k| k.kind == kind && (k.agent == Subject::Total.as_str()) == total);
    let Some(day) = find("day", false) else {
        return Err(LedgerError::Inconsistent("a hold without its day".to_owned()).into());
    };
    let session = find("session", false).map(|window| window.key.as_str());
    let sql = format!(
        "SELECT agent, network, asset, kind, key, held::text AS held, spent::text AS spent FROM budget_windows \
         WHERE network = $2 AND asset = $3 AND (agent = $1 AND kind = 'day' AND key = $4 \
         OR agent = $1 AND kind = 'session' AND key = $5 OR agent = 'total' AND kind = 'day' AND key = $4) {tail}"
    );
    let (network, asset) = (day.unit.network.as_str(), day.unit.asset.as_str());
    let found =
        tx.rows(&sql, &[text(&day.agent), text(&network), text(&asset), text(&day.key), text(&session)]).await?;
    Ok(found.iter().map(rows::window).collect::<Result<_, _>>()?)
}

const MAKE: &str = "INSERT INTO budget_windows (agent, network, asset, kind, key, held, spent) \
    SELECT *, 0, 0 FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[]) k(a, n, s, kind, key) \
    ORDER BY 1, 2, 3, 4, 5 ON CONFLICT DO NOTHING";

/// All agents' day in one unit, from the days of the agents.
const MAKE_TOTAL: &str = "INSERT INTO budget_windows (agent, network, asset, kind, key, held, spent) \
    SELECT 'total', $1, $2, 'day', $3, COALESCE(sum(held), 0), COALESCE(sum(spent), 0) FROM budget_windows \
    WHERE kind = 'day' AND key = $3 AND asset = $2 AND network = $1 AND agent <> 'total' ON CONFLICT DO NOTHING";

const SUM: &str = "SELECT COALESCE(sum(held), 0)::text AS held, COALESCE(sum(spent), 0)::text AS spent \
    FROM budget_windows WHERE kind = 'day' AND key = $3 AND asset = $2 AND network = $1 AND agent <> 'total'";

/// What all agents use in a day, also where nobody counts it.
pub(super) async fn total(tx: &Tx, unit: &Unit, day: &str) -> Result<Window, Fault> {
    let key = WindowKey::day(Subject::Total.as_str(), unit, day);
    let (network, asset) = (unit.network.as_str(), unit.asset.as_str());
    let unit = [text(&network), text(&asset), text(&day)];
    if let Some(row) = tx.row(&format!("{FIND} AND agent = 'total'"), &unit).await? {
        return Ok(rows::window(&row)?.1);
    }
    let row = tx.row(SUM, &unit).await?;
    let missing = || LedgerError::Inconsistent(format!("the window {} {} cannot be counted", key.agent, key.key));
    let row = row.ok_or_else(missing)?;
    Ok(Window { held: rows::parsed(&row, "held")?, spent: rows::parsed(&row, "spent")? })
}

const FIND: &str = "SELECT agent, network, asset, kind, key, held::text AS held, spent::text AS spent \
    FROM budget_windows WHERE network = $1 AND asset = $2 AND kind = 'day' AND key = $3";

/// Makes windows, in transactions of their own: a row that others wait for is not made while other rows are locked.
///
/// An empty window is no promise, so its commit waits for no disk. All agents' day is a row that every reservation would
/// wait for, so it is made when a limit needs it, and counted from then on: with what the agents' days hold, behind the
/// gate that every transaction holds which moves a counter.
pub(super) async fn make(session: &Session, wire: &Wire, keys: &[WindowKey]) -> Result<(), Fault> {
    let (totals, own): (Vec<&WindowKey>, Vec<&WindowKey>) =
        keys.iter().partition(|key| key.agent == Subject::Total.as_str());
    if !own.is_empty() {
        let column = |of: fn(&WindowKey) -> &str| own.iter().map(|key| of(key)).collect::<Vec<_>>();
        let columns = [
            column(|key| &key.agent),
            column(|key| key.unit.network.as_str()),
            column(|key| key.unit.asset.as_str()),
            column(|key| key.kind),
            column(|key| &key.key),
        ];
        let values: Vec<Param<'_>> = columns.iter().map(|c| (c as &(dyn ToSql + Sync), Type::TEXT_ARRAY)).collect();
        let begin = format!("{} SET LOCAL synchronous_commit = off", wire.begin());
        session.batch(&begin).await.map_err(fault)?;
        session.run(MAKE, &values).await.map_err(fault)?;
        session.batch(COMMIT).await.map_err(fault)?;
    }
    for WindowKey { unit, key, .. } in totals {
        let begin = format!("{} {}", wire.begin_alone(), Gate::Exclusive.sql());
        let (network, asset) = (unit.network.as_str(), unit.asset.as_str());
        session.batch(&begin).await.map_err(fault)?;
        session.run(MAKE_TOTAL, &[text(&network), text(&asset), text(key)]).await.map_err(fault)?;
        session.batch(COMMIT).await.map_err(fault)?;
    }
    Ok(())
}

impl PostgresLedger {
    pub(super) async fn make_windows(&self, keys: &[WindowKey]) -> Result<(), Fault> {
        let guarded = Guarded::new(self.wire.session(self.pool.get().await.map_err(no_connection)?));
        let made = make(guarded.session()?, &self.wire, keys);
        let made = tokio::time::timeout(self.wire.alone() * 2, made).await;
        made.map_err(|_| LedgerError::Unavailable("the database does not answer".to_owned()))??;
        guarded.give_back();
        Ok(())
    }
}

/// Of a locked window.
pub(super) async fn write(tx: &Tx, at: &WindowKey, window: Window) -> Result<(), Fault> {
    let WindowKey { agent, unit, kind, key } = at;
    tx.run_one(
        "UPDATE budget_windows SET held = $6::numeric, spent = $7::numeric \
         WHERE agent = $1 AND network = $2 AND asset = $3 AND kind = $4 AND key = $5",
        &[
            text(agent),
            text(&unit.network.as_str()),
            text(&unit.asset.as_str()),
            text(kind),
            text(key),
            text(&window.held.to_string()),
            text(&window.spent.to_string()),
        ],
    )
    .await
}

/// Ends a hold in the windows in which it was made.
pub(super) async fn close(tx: &Tx, locked: &Locked, row: &rows::Held, settled: Amount) -> Result<(), Fault> {
    for key in row.windows() {
        let window = match locked.get(&key) {
            None if key.agent == Subject::Total.as_str() => continue,
            window => window.copied().unwrap_or_default().close(row.reserved, settled)?,
        };
        write(tx, &key, window).await?;
    }
    Ok(())
}
