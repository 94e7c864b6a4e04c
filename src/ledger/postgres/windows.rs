//! The counters. Their rows exist before they are locked, and are locked before anything else, in one order.

use std::collections::BTreeMap;

use super::PostgresLedger;
use super::rows::{self, text};
use super::tx::{Fault, Gate, Tx};
use crate::ledger::limits::{Window, WindowKey};
use crate::ledger::{LedgerError, Subject};
use crate::money::Amount;

/// The windows of one hold as they are, under their locks. One that does not exist is missing here.
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

impl PostgresLedger {
    /// In a transaction of its own: a row that others wait for is not made while other rows are locked.
    pub(super) async fn make_windows(&self, keys: &[WindowKey]) -> Result<(), Fault> {
        let tx = self.begin(Gate::None).await?;
        for WindowKey { agent, unit, kind, key } in keys {
            tx.run(
                "INSERT INTO budget_windows (agent, network, asset, kind, key, held, spent) \
                 VALUES ($1, $2, $3, $4, $5, 0, 0) ON CONFLICT DO NOTHING",
                &[text(agent), text(&unit.network.as_str()), text(&unit.asset.as_str()), text(kind), text(key)],
            )
            .await?;
        }
        tx.commit().await
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
        let window = locked.get(&key).copied().unwrap_or_default().close(row.reserved, settled)?;
        write(tx, &key, window).await?;
    }
    Ok(())
}
