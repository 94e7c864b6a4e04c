//! The same promises through a pgbouncer in transaction mode, which has fewer connections to the server than the tests
//! have to it: no statement may count on the session of the one before.

use super::*;
use crate::ledger::table::{CALL, limit};

fn pooler_url() -> String {
    std::env::var("TOLLWAY_TEST_PGBOUNCER").unwrap_or_else(|_| {
        panic!(
            "TOLLWAY_TEST_PGBOUNCER names no pgbouncer: run ./scripts/test, or start one for this shell with \
             `. scripts/lib/postgres.sh && postgres_start`"
        )
    })
}

/// Also its schema is made and migrated through the pooler.
async fn pooled() -> Schema {
    pooled_at(&pooler_url()).await
}

async fn pooled_at(url: &str) -> Schema {
    let name = format!("t_{}", hex::encode(world().random::<8>()));
    let database = Database::parse(url, None).unwrap();
    let database = database.behind(Pooler::Transaction).unwrap().in_schema(&name).unwrap();
    Schema::make(&in_schema(&server_url(), &name), &database).await;
    Schema::of(name, database).await
}

#[tokio::test]
async fn every_line_of_the_table_holds_behind_a_pooler() {
    let schema = Arc::new(pooled().await);
    table::transitions(async || Emptied::again(&schema).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_ceiling_is_beaten_and_every_payment_ends_once_behind_a_pooler() {
    table::fan_out(Box::new(pooled().await)).await;
    table::one_end(Box::new(pooled().await)).await;
    table::races(Box::new(pooled().await)).await;
}

#[tokio::test]
async fn operators_recovery_and_tidying_work_behind_a_pooler() {
    table::operator(Box::new(pooled().await)).await;
    table::recovery(Box::new(pooled().await)).await;
    table::tidies(Box::new(pooled().await)).await;
    table::bodies(Box::new(pooled().await)).await;
}

/// What a transaction is set up with is there in each, and gone after it.
#[tokio::test]
async fn no_setting_leaks_into_the_next_clients_transaction() {
    let schema = pooled().await;
    let shown = "SELECT current_setting('search_path')";
    for _ in 0..8 {
        let tx = schema.ledger.begin(tx::Gate::None).await.unwrap();
        let row = tx.row("SELECT current_schema()::text AS here", &[]).await.unwrap().unwrap();
        assert_eq!(row.get::<_, &str>("here"), schema.name);
        tx.commit().await.unwrap();
        assert!(!sql_at(&pooler_url(), shown).await.unwrap().contains(&schema.name));
    }
}

/// A pooler that nobody told us of is found out at the start, not by a wrong statement later.
#[tokio::test]
async fn a_pooler_that_is_not_in_the_configuration_is_refused_with_the_way_out() {
    let schema = pooled().await;
    let database = Database::parse(&pooler_url(), None).unwrap().named("DB").in_schema(&schema.name).unwrap();
    let error = PostgresLedger::connect(&database, world(), None, options()).await.unwrap_err().to_string();
    assert!(error.contains("DB (127.0.0.1:") && error.contains("budget.pooler: transaction"), "{error}");
}

/// As a restart of the server does it: the pooler tells its clients, and goes on.
#[tokio::test]
async fn sessions_that_were_ended_behind_a_pooler_cost_a_call_nothing() {
    // Whose transaction is on a session by the time it is ended: no other test's.
    let schema = pooled_at(&pooler_url().replace("/postgres", "/apart")).await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    for n in 1..=3 {
        let backend = schema.ledger.begin(tx::Gate::None).await.unwrap();
        let pid: i32 = backend.row("SELECT pg_backend_pid() AS pid", &[]).await.unwrap().unwrap().get("pid");
        drop(backend);
        schema.sql(&format!("SELECT pg_terminate_backend({pid})")).await.unwrap();
        assert!(matches!(schema.reserve(Call { n, call: n, ..CALL }).await.unwrap(), Decision::Fresh(_)));
    }
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}
