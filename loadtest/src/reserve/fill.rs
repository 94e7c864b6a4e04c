//! Old payments, settled in earlier months: rows and events as the ledger writes them, without the time it would take.

use crate::parts::postgres::connect;
use crate::report::{Doing as _, Result};

const AT_ONCE: u64 = 500_000;

pub async fn fill(url: &str, rows: u64, agents: u64) -> Result<()> {
    let client = connect(url).await?;
    // A superuser's shortcuts: no foreign keys are looked up, and indexes are made when all rows are there.
    client.batch_execute("SET session_replication_role = replica; SET synchronous_commit = off").await.doing("fill")?;
    client.batch_execute("SET maintenance_work_mem = '512MB'").await.doing("fill")?;
    let found = client
        .query(
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() \
             AND tablename IN ('payments', 'payment_events') AND indexname NOT LIKE '%_pkey'",
            &[],
        )
        .await
        .doing("fill")?;
    let indexes: Vec<(String, String)> = found.iter().map(|row| (row.get(0), row.get(1))).collect();
    for (name, _) in &indexes {
        client.batch_execute(&format!("DROP INDEX {name}")).await.doing(name)?;
    }
    let step = (1u64 << 60) / rows.max(1);
    let mut from = 0;
    while from < rows {
        let to = (from + AT_ONCE).min(rows) - 1;
        // Identifiers rise, so that the loading is quick, and are spread as hashes are, so that new ones fall among them.
        let payments = format!(
            "INSERT INTO payments (payment_identifier, id_nonce, agent, session, day, idempotency_key, call_hash, ref, \
             version_hash, network, scheme, asset, payer, pay_to, reserved, settled, nonce, dead_after, at_ledger, state, \
             transaction_id, lease_token, sign_before, created, updated) \
             SELECT lpad(to_hex(g * {step}), 16, '0') || md5(g::text) || substr(md5('x' || g), 1, 16), \
             decode(md5(g::text), 'hex'), 'agent-' || lpad((g % {agents})::text, 5, '0'), 's' || g % 4, '2026-09-01', \
             md5('k' || g), decode(md5('c' || g) || md5('d' || g), 'hex'), 'v1.ref', repeat('ab', 32), '{network}', \
             'exact', '{asset}', '{payer}', '{payer}', {amount}, {amount}, \
             ((g * 922337203685) % 9223372036854775807)::text, 1000 + g, 1000, 'settled', md5('t' || g) || md5('u' || g), \
             decode(md5(g::text), 'hex'), 0, 1780000000000 + g, 1780000000000 + g FROM generate_series({from}::bigint, {to}) g",
            network = super::work::NETWORK,
            asset = super::work::ASSET,
            payer = super::work::PAYER,
            amount = super::work::AMOUNT,
        );
        client.batch_execute(&payments).await.doing("old payments")?;
        let events = format!(
            "INSERT INTO payment_events (payment_identifier, at, event, amount, evidence) \
             SELECT lpad(to_hex(g * {step}), 16, '0') || md5(g::text) || substr(md5('x' || g), 1, 16), 1780000000000 + g, \
             e.event, {amount}, CASE e.event WHEN 'settled' THEN 'receipt' END \
             FROM generate_series({from}::bigint, {to}) g CROSS JOIN (VALUES ('reserved'), ('settled')) e(event)",
            amount = super::work::AMOUNT,
        );
        client.batch_execute(&events).await.doing("old events")?;
        from = to + 1;
        eprintln!("{from} old payments");
    }
    for (name, definition) in &indexes {
        client.batch_execute(definition).await.doing(name)?;
        eprintln!("{name} is there");
    }
    client.batch_execute("VACUUM ANALYZE payments").await.doing("VACUUM")?;
    client.batch_execute("VACUUM ANALYZE payment_events").await.doing("VACUUM")
}
