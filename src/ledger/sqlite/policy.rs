//! Rules for origins and pinned recipients.

use sqlx::sqlite::SqliteRow;

use super::rows::{get, parsed, signed, unsigned};
use super::{SqliteLedger, Writing, unavailable};
use crate::ledger::{LedgerError, SetPin};
use crate::money::Unit;
use crate::policy::{Origin, OriginRule, Pin};

impl SqliteLedger {
    pub(super) async fn do_origin_rules(&self) -> Result<Vec<OriginRule>, LedgerError> {
        let mut connection = self.connection().await?;
        let found = sqlx::query("SELECT * FROM origin_rules ORDER BY origin")
            .fetch_all(&mut *connection)
            .await
            .map_err(unavailable)?;
        let rule = |row| {
            let allowed = get::<&str>(row, "rule")? == "allow";
            Ok(OriginRule { origin: parsed(row, "origin")?, allowed, source: get(row, "source")? })
        };
        found.iter().map(rule).collect()
    }

    pub(super) async fn do_set_origin_rule(&self, origin: &Origin, allowed: Option<bool>) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let statement = match allowed {
            Some(allowed) => sqlx::query(
                "INSERT INTO origin_rules (origin, rule, source, created) VALUES (?1, ?2, 'operator', ?3) \
                 ON CONFLICT (origin) DO UPDATE SET rule = excluded.rule, source = excluded.source, \
                 created = excluded.created WHERE rule <> excluded.rule OR source <> excluded.source",
            )
            .bind(origin.to_string())
            .bind(if allowed { "allow" } else { "deny" })
            .bind(signed(w.now)),
            None => sqlx::query("DELETE FROM origin_rules WHERE origin = ?1").bind(origin.to_string()),
        };
        let done = statement.execute(&mut *w.tx).await.map_err(unavailable)?;
        w.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn do_pins(&self) -> Result<Vec<Pin>, LedgerError> {
        let mut connection = self.connection().await?;
        let found = sqlx::query("SELECT * FROM recipient_pins ORDER BY origin, network, asset")
            .fetch_all(&mut *connection)
            .await
            .map_err(unavailable)?;
        found.iter().map(pin).collect()
    }

    pub(super) async fn do_pin(&self, origin: &Origin, unit: &Unit) -> Result<Option<Pin>, LedgerError> {
        let mut connection = self.connection().await?;
        let found = sqlx::query("SELECT * FROM recipient_pins WHERE origin = ?1 AND network = ?2 AND asset = ?3")
            .bind(origin.to_string())
            .bind(unit.network.as_str())
            .bind(unit.asset.as_str())
            .fetch_optional(&mut *connection)
            .await
            .map_err(unavailable)?;
        found.as_ref().map(pin).transpose()
    }

    pub(super) async fn do_set_pin(&self, origin: &Origin, unit: &Unit, set: SetPin<'_>) -> Result<bool, LedgerError> {
        let mut connection = self.connection().await?;
        let mut w = Writing::begin(&mut connection, &self.world).await?;
        let (sql, pay_to) = match set {
            SetPin::First(pay_to) => (
                "INSERT INTO recipient_pins (origin, network, asset, pay_to, first_seen) VALUES (?1, ?2, ?3, ?4, ?5) \
                 ON CONFLICT (origin, network, asset) DO NOTHING",
                Some(pay_to),
            ),
            SetPin::To(pay_to) => (
                "INSERT INTO recipient_pins (origin, network, asset, pay_to, first_seen) VALUES (?1, ?2, ?3, ?4, ?5) \
                 ON CONFLICT (origin, network, asset) DO UPDATE SET pay_to = excluded.pay_to, \
                 first_seen = excluded.first_seen WHERE pay_to <> excluded.pay_to",
                Some(pay_to),
            ),
            SetPin::Removed => ("DELETE FROM recipient_pins WHERE origin = ?1 AND network = ?2 AND asset = ?3", None),
        };
        let mut statement =
            sqlx::query(sql).bind(origin.to_string()).bind(unit.network.as_str()).bind(unit.asset.as_str());
        if let Some(pay_to) = pay_to {
            statement = statement.bind(pay_to).bind(signed(w.now));
        }
        let done = statement.execute(&mut *w.tx).await.map_err(unavailable)?;
        w.commit().await?;
        Ok(done.rows_affected() == 1)
    }
}

fn pin(row: &SqliteRow) -> Result<Pin, LedgerError> {
    Ok(Pin {
        origin: parsed(row, "origin")?,
        unit: Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? },
        pay_to: get(row, "pay_to")?,
        first_seen_ms: unsigned(get(row, "first_seen")?)?,
    })
}
