//! The plan that a connection makes at its first batch is used for as long as it lives: each look-up goes by the index that
//! is for it, whatever the planner knew of the table at that moment.

use std::collections::BTreeSet;

use super::*;
use crate::ledger::postgres::Pooler;
use crate::ledger::postgres::lanes::look_ups;
use crate::ledger::postgres::wire::Wire;
use crate::ledger::table::{CALL, amount, limit};

/// Rows of a table that nobody has analysed: none, a few, a few pages, and what is more than the planner's guess for an
/// empty one.
const ROWS: [u32; 4] = [0, 5, 100, 2_000];

#[tokio::test]
async fn a_plan_made_on_a_young_table_goes_by_the_index_of_its_question() {
    let schema = Schema::owned().await;
    schema.ledger.replace_limits("file", &[Limit { per_day: Some(amount("1000000")), ..limit() }]).await.unwrap();
    schema.sql("ALTER TABLE payments SET (autovacuum_enabled = off)").await.unwrap();
    schema.reserve(Call { key: Some(1), ..CALL }).await.unwrap();
    schema.sql("CREATE TABLE one AS SELECT * FROM payments").await.unwrap();
    schema.sql("ALTER TABLE one SET (autovacuum_enabled = off)").await.unwrap();
    schema.sql("ALTER TABLE payments DISABLE TRIGGER ALL; DELETE FROM payments").await.unwrap();
    let pooled = Database::parse(&server_url(), None).unwrap().in_schema(&schema.name).unwrap();
    let session = Wire::new(&pooled.behind(Pooler::Transaction).unwrap(), &options()).begin();
    let mut rows = 0;
    for upto in ROWS {
        // Random identifiers, keys and nonces of one agent, as a first hour leaves them.
        schema
            .sql(&format!(
                "INSERT INTO payments SELECT (jsonb_populate_record(o, jsonb_build_object('payment_identifier', \
                 md5(i::text) || md5('x' || i), 'idempotency_key', md5('k' || i), 'nonce', i::text))).* \
                 FROM one o, generate_series({rows} + 1, {upto}) i"
            ))
            .await
            .unwrap();
        rows = upto;
        for (name, text, types) in look_ups() {
            let values = vec!["NULL"; types.len()].join(", ");
            let plan = schema
                .sql(&format!(
                    "{session} PREPARE asked ({}) AS {text}; EXPLAIN EXECUTE asked ({values})",
                    types.join(", ")
                ))
                .await
                .unwrap();
            let plan = plan.join("\n");
            let of = |line: &str| {
                let (_, name) = line.split_once(" using ").or_else(|| line.split_once("Bitmap Index Scan on "))?;
                Some(name.split(' ').next()?.to_owned())
            };
            let used: BTreeSet<String> = plan.lines().filter_map(of).collect();
            let wanted: &[&str] = match name {
                "keyed" => &["payments_key", "spent_keys_pkey"],
                "keyless" => &["payments_open_call", "payments_twin"],
                "ends" => &["payments_archive_transaction", "payments_pkey", "payments_transaction"],
                "end windows" => &["budget_windows_pkey", "payments_pkey"],
                "payments" => &["outcomes_pkey", "payments_pkey"],
                _ => &["payments_pkey"],
            };
            assert_eq!(used.iter().map(String::as_str).collect::<Vec<_>>(), wanted, "{name}, {rows} rows:\n{plan}");
            assert!(!plan.contains("Seq Scan"), "{name}, {rows} rows:\n{plan}");
        }
    }
}
