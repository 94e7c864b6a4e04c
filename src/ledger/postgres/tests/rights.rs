//! What the role that serves may not, on a real server; that it may what it needs, every other test here shows.

use super::*;
use crate::ledger::table::{CALL, limit};

async fn refused(url: &str, sql: &str) -> String {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let driver = tokio::spawn(connection);
    let error = client.batch_execute(sql).await.expect_err(sql);
    let code = error.code().map(|code| code.code().to_owned()).unwrap_or_default();
    drop(client);
    let _ = driver.await;
    code
}

#[tokio::test]
async fn a_role_that_serves_can_neither_forget_nor_rewrite_nor_remake() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(CALL).await.unwrap();
    let serves = schema.url().replacen("tollway@", &format!("{SERVES}@"), 1);
    for sql in [
        "DELETE FROM payments",
        "TRUNCATE payments CASCADE",
        "ALTER TABLE payments DISABLE TRIGGER ALL",
        "ALTER TABLE payments ADD COLUMN more TEXT",
        "DROP TABLE payments CASCADE",
        "UPDATE payment_events SET amount = 0",
        "DELETE FROM payment_events",
        "TRUNCATE payment_events",
        "ALTER TABLE payment_events DISABLE TRIGGER payment_events_append_only",
        "DELETE FROM budget_windows",
        "TRUNCATE budget_windows",
        "DELETE FROM spent_keys",
        "UPDATE spent_keys SET archived = 0",
        "DELETE FROM origin_rules",
        "INSERT INTO origin_rules (origin, rule, source, created) VALUES ('https://a', 'allow', 'operator', 0)",
        "UPDATE recipient_pins SET pay_to = 'mine'",
        "DELETE FROM recipient_pins",
        "UPDATE sessions_ended SET expires = 0",
        "UPDATE _sqlx_migrations SET version = 0",
        "CREATE TABLE mine (x INT)",
        "CREATE OR REPLACE FUNCTION tollway_now() RETURNS BIGINT LANGUAGE sql AS 'SELECT 0::bigint'",
        "DROP FUNCTION tollway_now() CASCADE",
        "DROP TRIGGER payments_guard ON payments",
        "SET session_replication_role = replica",
    ] {
        assert_eq!(refused(&serves, sql).await, "42501", "{sql}");
    }
    assert_eq!(PostgresLedger::rights(&schema.database).await.unwrap(), RightsFound::default());
    assert!(PostgresLedger::migrate(&schema.database).await.is_err());
    schema.ledger.ping().await.unwrap();
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn a_right_that_lacks_ends_the_start_and_one_too_many_is_found() {
    let schema = Schema::new().await;
    let open = async || schema.open(None, options()).await.map(|_| ()).map_err(|error| error.to_string());
    open().await.unwrap();
    schema.sql(&format!("REVOKE INSERT ON payment_events FROM {SERVES}")).await.unwrap();
    let error = open().await.unwrap_err();
    assert!(error.contains("INSERT on payment_events") && error.contains("migrate --runtime-role"), "{error}");
    schema.sql(&format!("REVOKE USAGE ON SCHEMA {} FROM {SERVES}", schema.name)).await.unwrap();
    let error = open().await.unwrap_err();
    assert!(error.contains("may not use it") && error.contains("migrate --runtime-role"), "{error}");

    let owner = Database::parse(&schema.url(), None).unwrap();
    let more = format!(
        "GRANT DELETE, TRUNCATE ON payments TO {SERVES}; GRANT CREATE ON SCHEMA {} TO {SERVES}; \
         GRANT USAGE ON SCHEMA {0} TO {SERVES}; GRANT UPDATE (amount) ON payment_events TO {SERVES}",
        schema.name
    );
    schema.sql(&more).await.unwrap();
    let found = PostgresLedger::rights(&schema.database).await.unwrap();
    assert_eq!(found.missing, ["INSERT on payment_events"]);
    let surplus = ["UPDATE on payment_events", "CREATE in the schema", "DELETE on payments", "TRUNCATE on payments"];
    for one in surplus {
        assert!(found.surplus.iter().any(|found| found == one), "{one}: {found:?}");
    }
    // A second time, and by more than one at once: exactly what is needed.
    schema.sql(&format!("REVOKE CREATE ON SCHEMA {} FROM {SERVES}", schema.name)).await.unwrap();
    for granted in futures_util::future::join_all((0..3).map(|_| PostgresLedger::grant(&owner, SERVES))).await {
        granted.unwrap();
    }
    assert_eq!(PostgresLedger::rights(&schema.database).await.unwrap(), RightsFound::default());
    open().await.unwrap();
    assert_eq!(PostgresLedger::rights(&owner).await.unwrap().surplus, ["it owns the tables"]);
}

#[tokio::test]
async fn rights_are_given_to_a_role_that_is_there_and_is_not_the_owner() {
    let schema = Schema::owned().await;
    let owner = Database::parse(&schema.url(), None).unwrap();
    let error = PostgresLedger::grant(&owner, "no\"body").await.unwrap_err().to_string();
    assert!(error.contains("there is no role"), "{error}");
    let error = PostgresLedger::grant(&owner, "tollway").await.unwrap_err().to_string();
    assert!(error.contains("owns the tables"), "{error}");
    let empty = Schema::named(&server_url()).await;
    let url = in_schema(&server_url(), &empty);
    let nothing = PostgresLedger::grant(&Database::parse(&url, None).unwrap(), SERVES).await;
    sql_at(&server_url(), &format!("DROP SCHEMA {empty}")).await.unwrap();
    assert!(nothing.is_err());
}
