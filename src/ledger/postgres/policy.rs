//! Rules for origins and pinned recipients.

use super::PostgresLedger;
use super::rows::{flag, get, int, parsed, signed, text, unsigned};
use super::tx::{Fault, Gate, attempts};
use crate::ledger::{LedgerError, SetPin};
use crate::money::Unit;
use crate::policy::{Origin, OriginRule, Pin};

impl PostgresLedger {
    pub(super) async fn do_origin_rules(&self) -> Result<Vec<OriginRule>, LedgerError> {
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let found = tx.rows("SELECT origin, rule, source FROM origin_rules ORDER BY origin", &[]).await?;
            tx.commit().await?;
            let rule = |row| {
                let allowed = get::<&str>(row, "rule")? == "allow";
                Ok(OriginRule { origin: parsed(row, "origin")?, allowed, source: get(row, "source")? })
            };
            Ok::<_, Fault>(found.iter().map(rule).collect::<Result<_, LedgerError>>()?)
        })
    }

    pub(super) async fn do_set_origin_rule(&self, origin: &Origin, allowed: Option<bool>) -> Result<bool, LedgerError> {
        let origin = origin.to_string();
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::Limits).await?;
            let done = match allowed {
                Some(allowed) => {
                    tx.run(
                        "INSERT INTO origin_rules (origin, rule, source, created) VALUES ($1, $2, 'operator', $3) \
                         ON CONFLICT (origin) DO UPDATE SET rule = excluded.rule, source = excluded.source, \
                         created = excluded.created WHERE (origin_rules.rule, origin_rules.source) \
                         IS DISTINCT FROM (excluded.rule, excluded.source)",
                        &[text(&origin), text(&rule_word(allowed)), int(&signed(tx.now))],
                    )
                    .await?
                }
                None => tx.run("DELETE FROM origin_rules WHERE origin = $1", &[text(&origin)]).await?,
            };
            tx.commit().await?;
            Ok::<_, Fault>(done == 1)
        })
    }

    pub(super) async fn do_pins(&self) -> Result<Vec<Pin>, LedgerError> {
        self.read_pins(None).await
    }

    pub(super) async fn do_pin(&self, origin: &Origin, unit: &Unit) -> Result<Option<Pin>, LedgerError> {
        Ok(self.read_pins(Some((origin, unit))).await?.pop())
    }

    async fn read_pins(&self, only: Option<(&Origin, &Unit)>) -> Result<Vec<Pin>, LedgerError> {
        let origin = only.map(|(origin, _)| origin.to_string());
        let network = only.map(|(_, unit)| unit.network.as_str());
        let asset = only.map(|(_, unit)| unit.asset.as_str());
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let found = tx
                .rows(
                    "SELECT origin, network, asset, pay_to, first_seen FROM recipient_pins \
                     WHERE $4 OR origin = $1 AND network = $2 AND asset = $3 ORDER BY origin, network, asset",
                    &[text(&origin), text(&network), text(&asset), flag(&only.is_none())],
                )
                .await?;
            tx.commit().await?;
            let pin = |row| {
                Ok(Pin {
                    origin: parsed(row, "origin")?,
                    unit: Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? },
                    pay_to: get(row, "pay_to")?,
                    first_seen_ms: unsigned(get(row, "first_seen")?)?,
                })
            };
            Ok::<_, Fault>(found.iter().map(pin).collect::<Result<_, LedgerError>>()?)
        })
    }

    pub(super) async fn do_set_pin(&self, origin: &Origin, unit: &Unit, set: SetPin<'_>) -> Result<bool, LedgerError> {
        let origin = origin.to_string();
        let (sql, pay_to) = match set {
            SetPin::First(pay_to) => (
                "INSERT INTO recipient_pins (origin, network, asset, pay_to, first_seen) VALUES ($1, $2, $3, $4, $5) \
                 ON CONFLICT (origin, network, asset) DO NOTHING",
                pay_to,
            ),
            SetPin::To(pay_to) => (
                "INSERT INTO recipient_pins (origin, network, asset, pay_to, first_seen) VALUES ($1, $2, $3, $4, $5) \
                 ON CONFLICT (origin, network, asset) DO UPDATE SET pay_to = excluded.pay_to, \
                 first_seen = excluded.first_seen WHERE recipient_pins.pay_to <> excluded.pay_to",
                pay_to,
            ),
            SetPin::Removed => (
                "DELETE FROM recipient_pins WHERE origin = $1 AND network = $2 AND asset = $3 \
                 AND $4 IS NOT NULL AND $5 IS NOT NULL",
                "",
            ),
        };
        attempts!(tries = repeatable, async {
            let tx = self.begin(Gate::None).await?;
            let done = tx
                .run(
                    sql,
                    &[
                        text(&origin),
                        text(&unit.network.as_str()),
                        text(&unit.asset.as_str()),
                        text(&pay_to),
                        int(&signed(tx.now)),
                    ],
                )
                .await?;
            tx.commit().await?;
            Ok::<_, Fault>(done == 1)
        })
    }
}

fn rule_word(allowed: bool) -> &'static str {
    if allowed { "allow" } else { "deny" }
}
