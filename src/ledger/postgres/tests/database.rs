//! The database itself: what it refuses, what an audit finds in it, what is private in it, how its schema changes.

use super::*;
use crate::ledger::table::{CALL, agent, amount, id, limit};

/// LED-05.
#[tokio::test]
async fn a_reservation_whose_event_cannot_be_written_is_none() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema
        .sql(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'full'; END $$; \
             CREATE TRIGGER full_disk BEFORE INSERT ON payment_events FOR EACH ROW EXECUTE FUNCTION full_disk()",
        )
        .await
        .unwrap();
    assert!(matches!(schema.reserve(CALL).await, Err(LedgerError::Unavailable(_))));
    assert!(schema.ledger.show(&id(1).to_hex()).await.unwrap().is_none());
    assert!(schema.ledger.budget(&agent("a"), None).await.unwrap()[0].day_held.is_zero());
    schema.sql("DROP TRIGGER full_disk ON payment_events").await.unwrap();
    assert!(matches!(schema.reserve(CALL).await, Ok(Decision::Fresh(_))), "the connection is as good as before");
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn the_database_itself_refuses_what_the_program_never_does() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(CALL).await.unwrap();
    schema.reserve(Call { n: 2, call: 2, ..CALL }).await.unwrap();
    let settle = "UPDATE payments SET state = 'settled', due = NULL, settled = ";
    for (sql, why) in [
        ("UPDATE payment_events SET event = 'settled'", "append-only"),
        ("DELETE FROM payment_events", "append-only"),
        ("TRUNCATE payment_events", "append-only"),
        ("DELETE FROM payments", "no payment is removed"),
        ("TRUNCATE payments CASCADE", "no payment is removed"),
        ("UPDATE payments SET reserved = 1", "does not change"),
        ("UPDATE payments SET nonce = '77'", "does not change"),
        ("UPDATE payments SET state = 'paid'", "check constraint"),
        ("UPDATE payments SET state = 'settled', due = NULL", "check constraint"),
        (&format!("{settle} 101"), "check constraint"),
        (&format!("{settle} 'NaN'"), "check constraint"),
        (&format!("{settle} 1, transaction_id = 't'"), "unique constraint"),
        ("UPDATE budget_windows SET held = -1", "check constraint"),
        ("UPDATE budget_windows SET held = 'NaN'", "check constraint"),
        ("UPDATE budget_windows SET held = 1e78", "overflow"),
        ("UPDATE spend_limits SET per_day = -1", "check constraint"),
        ("UPDATE spend_limits SET subject = 'total', per_call = 1", "check constraint"),
    ] {
        let error = schema.sql(sql).await.expect_err(sql);
        assert!(error.contains(why), "{sql}: {error}");
    }
    schema.sql(&format!("{settle} 1 WHERE nonce = '1'")).await.unwrap();
    for sql in [
        "UPDATE payments SET state = 'released' WHERE nonce = '1'",
        "UPDATE payments SET settled = 2 WHERE nonce = '1'",
        "UPDATE payments SET state = 'reserved', settled = NULL, due = 1 WHERE nonce = '1'",
    ] {
        assert!(schema.sql(sql).await.unwrap_err().contains("no such transition"), "{sql}");
    }
}

#[tokio::test]
async fn an_audit_names_every_difference() {
    let schema = Schema::new().await;
    // With a limit on all agents together their day is counted too.
    let total = Limit { subject: Subject::Total, ..limit() };
    schema.ledger.replace_limits("file", &[limit(), total]).await.unwrap();
    schema.reserve(CALL).await.unwrap();
    schema.reserve(Call { n: 2, call: 2, session: Some("s"), ..CALL }).await.unwrap();
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
    schema.sql("UPDATE budget_windows SET held = 150 WHERE agent = 'a' AND kind = 'day'").await.unwrap();
    schema.sql("UPDATE budget_windows SET held = 50 WHERE agent = 'total'").await.unwrap();
    schema
        .sql("INSERT INTO budget_windows VALUES ('z', 'stellar:testnet', 'CUSDC', 'day', '2026-12-02', 0, 5)")
        .await
        .unwrap();
    schema.sql("UPDATE payments SET state = 'in_doubt', reason = 'no_answer' WHERE nonce = '1'").await.unwrap();
    let stray = format!(
        "INSERT INTO payment_events (payment_identifier, at, event) VALUES ('{}', 1, 'reserved')",
        id(9).to_hex()
    );
    schema.sql(&stray).await.unwrap();
    let audit = schema.ledger.audit().await.unwrap();
    let mut found: Vec<_> = audit.differences.iter().map(|found| found.what).collect();
    found.sort_unstable();
    assert_eq!(found, ["history", "history", "window", "window", "window"], "{:?}", audit.differences);
    assert!(audit.differences.iter().any(|f| f.detail.contains("held 150") && f.detail.contains("held 200")));
    let stray = format!("{} has events and no payment", id(9).short());
    assert!(audit.differences.iter().any(|f| f.detail == stray), "{:?}", audit.differences);
    let request = SettleRequest {
        payment_id: id(2),
        amount: amount("100"),
        transaction: None,
        evidence: Evidence::Chain,
        outcome: None,
        unfinished: false,
    };
    assert!(
        matches!(schema.ledger.settle(request).await, Err(LedgerError::Inconsistent(_))),
        "a counter below its rows is never made to fit"
    );
}

#[tokio::test]
async fn sealed_bodies_that_were_altered_moved_or_lost_their_key_are_not_handed_out() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    for n in [1, 2] {
        schema.reserve(Call { n, call: n, ..CALL }).await.unwrap();
        let (payment_id, outcome, transaction) = (id(n), Some(&b"PAID-OUTPUT"[..]), None);
        let (amount, evidence, unfinished) = (amount("100"), Evidence::Receipt, false);
        let request = SettleRequest { payment_id, amount, transaction, evidence, outcome, unfinished };
        schema.ledger.settle(request).await.unwrap();
    }
    assert!(schema.ledger.outcome(id(1)).await.unwrap().is_some());
    let clear = "SELECT count(*) FROM outcomes WHERE position('PAID-OUTPUT'::bytea in body) > 0";
    assert_eq!(schema.sql(clear).await.unwrap(), ["0"]);
    let with = async |ring| schema.open(ring, options()).await.unwrap().outcome(id(1)).await.unwrap();
    assert_eq!(with(Some(ring(2))).await, None, "another ring");
    assert_eq!(with(None).await, None, "no ring");
    let other = format!("SELECT body FROM outcomes WHERE payment_identifier = '{}'", id(2).to_hex());
    schema.sql(&format!("UPDATE outcomes SET body = ({other})")).await.unwrap();
    assert_eq!(schema.ledger.outcome(id(1)).await.unwrap(), None, "another payment's body");
    assert!(schema.ledger.outcome(id(2)).await.unwrap().is_some());
    schema.sql("UPDATE outcomes SET body = body || '\\x00'::bytea").await.unwrap();
    assert_eq!(schema.ledger.outcome(id(2)).await.unwrap(), None, "altered");
}

#[tokio::test]
async fn the_clock_never_goes_behind_the_newest_event() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(CALL).await.unwrap();
    schema.sql("UPDATE test_clock SET at = at - 86400000").await.unwrap();
    schema.reserve(Call { n: 2, call: 2, ..CALL }).await.unwrap();
    let (payment, _) = schema.ledger.show(&id(2).to_hex()).await.unwrap().unwrap();
    assert_eq!(payment.created_ms, NOON);
    let held = schema.ledger.budget(&agent("a"), None).await.unwrap()[0].day_held;
    assert_eq!(held, amount("200"), "one window, not two");
}

#[tokio::test]
async fn without_a_test_the_databases_clock_is_the_time() {
    let schema = Schema::new().await;
    let sql = include_str!("../../../../migrations/postgres/0001_buyer_ledger.sql");
    let clock = sql.split_once("CREATE FUNCTION tollway_now()").unwrap().1.split_once(';').unwrap().0;
    schema.sql(&format!("CREATE OR REPLACE FUNCTION tollway_now(){clock}")).await.unwrap();
    let (before, now, after) = (world().unix_ms(), schema.ledger.now_ms().await.unwrap(), world().unix_ms());
    assert!(before.saturating_sub(1_000) <= now && now <= after + 1_000, "{before} {now} {after}");
}

#[tokio::test]
async fn a_database_of_another_version_is_refused_and_migrated_only_when_asked() {
    let server = server_url();
    let name = format!("t_{}", hex::encode(world().random::<8>()));
    sql_at(&server, &format!("CREATE SCHEMA {name}")).await.unwrap();
    let url = in_schema(&server, &name);
    let database = Database::parse(&url, None).unwrap();
    let connect = async || PostgresLedger::connect(&database, world(), None, options()).await.map(|_| ());
    assert_eq!(PostgresLedger::schema_version(&database).await.unwrap(), (None, migrate::newest()));
    let error = connect().await.unwrap_err().to_string();
    assert!(error.contains("schema is none") && error.contains("tollway migrate"), "{error}");
    assert_eq!(sql_at(&url, "SELECT to_regclass('payments')").await.unwrap(), ["NULL"], "nothing was made");

    let several = (0..4).map(|_| PostgresLedger::migrate(&database));
    for migrated in futures_util::future::join_all(several).await {
        migrated.expect("of several at once one migrates, the others find it done");
    }
    assert_eq!(PostgresLedger::schema_version(&database).await.unwrap(), (Some(migrate::newest()), migrate::newest()));
    connect().await.unwrap();

    sql_at(&url, "UPDATE _sqlx_migrations SET checksum = '\\x00'").await.unwrap();
    let error = PostgresLedger::migrate(&database).await.unwrap_err().to_string();
    assert!(error.contains("migration 1 was applied with another text"), "{error}");
    let later = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
        VALUES (99, 'later', true, '\\x00', 0)";
    sql_at(&url, later).await.unwrap();
    let error = PostgresLedger::migrate(&database).await.unwrap_err().to_string();
    assert!(error.contains("schema version 99") && error.contains("run a newer Tollway"), "{error}");
    assert!(connect().await.unwrap_err().to_string().contains("schema is 99"));
    sql_at(&server, &format!("DROP SCHEMA {name} CASCADE")).await.unwrap();
}

#[tokio::test]
async fn a_database_that_forgets_or_cannot_be_written_is_refused() {
    let schema = Schema::new().await;
    let url = format!("{}%20-csynchronous_commit%3Doff", schema.url());
    let database = Database::parse(&url, None).unwrap();
    let error = PostgresLedger::connect(&database, world(), None, options()).await.unwrap_err().to_string();
    assert!(error.contains("synchronous_commit is off"), "{error}");
    let url = format!("{}%20-cdefault_transaction_read_only%3Don", schema.url());
    let ledger = PostgresLedger::connect(&Database::parse(&url, None).unwrap(), world(), None, options()).await;
    assert!(ledger.unwrap().ping().await.unwrap_err().to_string().contains("read-only"));
}

#[tokio::test]
async fn no_error_or_debug_shows_the_password_or_a_row() {
    let schema = Schema::new().await;
    assert!(format!("{:?}", schema.ledger).starts_with("PostgresLedger(127.0.0.1:"), "{:?}", schema.ledger);
    let wrong = server_url().replace("tollway@", "nobody:hunter2@");
    let error = PostgresLedger::connect(&Database::parse(&wrong, None).unwrap(), world(), None, options()).await;
    let error = format!("{:?}", error.unwrap_err());
    assert!(error.contains("does not take this user and password") && !error.contains("hunter2"), "{error}");

    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.sql("ALTER TABLE payments ADD CHECK (pay_to = 'x')").await.unwrap();
    let error = schema.reserve(CALL).await.unwrap_err().to_string();
    assert!(error.contains("check constraint") && !error.contains("GSELLER"), "the row is in its detail: {error}");
}
