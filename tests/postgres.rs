//! A schema of a test's own on the PostgreSQL server that `TOLLWAY_TEST_POSTGRES` names, and what the program's commands
//! do with a database: real processes, real exit codes.
#![allow(clippy::disallowed_methods, reason = "it looks at the database with connections of its own")]

use std::process::{Command, Output};
use std::time::Duration;

use tollway::ledger::{Database, PostgresLedger};
use tollway::ports::machine;

/// Dropped with everything in it.
pub struct Schema {
    pub url: String,
    server: String,
    name: String,
}

impl Schema {
    /// Empty: nothing is migrated.
    pub async fn new() -> Schema {
        let server = std::env::var("TOLLWAY_TEST_POSTGRES").unwrap_or_else(|_| {
            panic!(
                "TOLLWAY_TEST_POSTGRES names no PostgreSQL server: run ./scripts/test, or start one for this shell with \
                 `. scripts/lib/postgres.sh && postgres_start`"
            )
        });
        let name = format!("t_{}", hex::encode(machine::world().0.random::<8>()));
        sql(&server, &format!("CREATE SCHEMA {name}")).await.unwrap();
        let url = format!("{server}?options=-csearch_path%3D{name}");
        Schema { url, server, name }
    }

    pub async fn migrated() -> Schema {
        let schema = Schema::new().await;
        PostgresLedger::migrate(&schema.database()).await.unwrap();
        let clock = "CREATE TABLE test_ahead (ms BIGINT NOT NULL); INSERT INTO test_ahead VALUES (0); \
            CREATE OR REPLACE FUNCTION tollway_now() RETURNS BIGINT LANGUAGE sql VOLATILE AS \
            'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint + ms FROM test_ahead'";
        sql(&schema.url, clock).await.unwrap();
        schema
    }

    /// Of a migrated schema: its clock goes on.
    pub fn later(&self, by: Duration) {
        let sql = format!("UPDATE test_ahead SET ms = ms + {}", by.as_millis());
        elsewhere(&self.url, &sql).unwrap();
    }

    pub fn database(&self) -> Database {
        Database::parse(&self.url, None).unwrap()
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        let gone = format!("SET lock_timeout = '5s'; DROP SCHEMA {} CASCADE", self.name);
        let _ = elsewhere(&self.server, &gone);
    }
}

/// From code that cannot wait.
fn elsewhere(url: &str, text: &str) -> Result<(), tokio_postgres::Error> {
    let run = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(sql(url, text));
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

pub async fn sql(url: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let driver = tokio::spawn(connection);
    let said = client.batch_execute(sql).await;
    drop(client);
    let _ = driver.await;
    said
}

const CONFIG: &str = "facilitator: {base_url: 'http://127.0.0.1:1'}\n\
    signer: {mode: external, base_url: 'http://127.0.0.1:1'}\n\
    networks: {'stellar:testnet': {enabled: true, rpc_urls: ['http://127.0.0.1:1']}}\n\
    budget: {store: postgres, default_per_call_max_atomic: '10', default_session_or_day_max_atomic: '100'}\n";

fn tollway(file: &std::path::Path, url: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tollway"))
        .arg("--config")
        .arg(file)
        .args(arguments)
        .env("DATABASE_URL", url)
        .env("TOLLWAY_LOG", "trace")
        .env("MCP_SERVER_API_KEYS", "agent:0123456789abcdef0123456789abcdef")
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test]
async fn the_commands_work_on_a_database_that_migrate_prepared_and_on_no_other() {
    let schema = Schema::new().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollway.yaml");
    std::fs::write(&file, CONFIG).unwrap();
    // The test server believes everybody: the password is there to be looked for.
    let url = schema.url.replace("tollway@", "tollway:hunter2-hunter2@");
    let run = |arguments: &[&str]| {
        let output = tollway(&file, &url, arguments);
        assert!(!said(&output).contains("hunter2"), "{arguments:?}");
        output
    };

    // Before: nothing is made by looking, and nothing starts.
    let output = run(&["migrate", "--check"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    for arguments in
        [&["serve"][..], &["stdio"], &["limits", "list"], &["reservations", "audit"], &["check", "--online"]]
    {
        let output = run(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(said(&output).contains("run tollway migrate"), "{arguments:?}: {}", said(&output));
    }

    let output = run(&["migrate"]);
    assert!(output.status.success() && said(&output).contains("was none"), "{}", said(&output));
    assert!(run(&["migrate"]).status.success(), "a second run does nothing");
    assert!(run(&["migrate", "--check"]).status.success());

    let set = ["limits", "set", "agent", "--network", "stellar:testnet", "--asset", "CUSDC", "--per-day", "5"];
    assert!(run(&set).status.success());
    let output = run(&["limits", "list"]);
    assert!(said(&output).contains("day 5"), "{}", said(&output));
    let output = run(&["limits", "suspend", "agent"]);
    assert!(output.status.success() && !said(&output).contains("WARNING"), "{}", said(&output));
    assert!(said(&run(&["limits", "list"])).contains("SUSPENDED everywhere"));
    let output = run(&["limits", "suspend", "--agent", "agnet", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["known"], &told["signable"], &told["suspended"]), (&false.into(), &0.into(), &true.into()));
    assert!(told["sinceMs"].is_u64() && said(&output).contains("knows agent"), "{}", said(&output));
    assert!(run(&["limits", "suspend", "--all"]).status.success());
    let output = run(&["limits", "resume", "--agent", "agent"]);
    assert!(output.status.success() && said(&output).contains("still suspended by: * everywhere"), "{}", said(&output));
    assert!(run(&["limits", "resume", "--all"]).status.success());
    let output = run(&["limits", "suspend"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("--agent <NAME>") && said(&output).contains("--all"), "{}", said(&output));

    assert!(run(&["origins", "deny", "https://*.bad.example"]).status.success());
    assert!(said(&run(&["origins", "list"])).contains("deny   https://*.bad.example  (operator)"));
    assert_eq!(run(&["origins", "deny", "bad.example"]).status.code(), Some(2));
    assert!(run(&["origins", "remove", "https://*.bad.example"]).status.success());
    assert_eq!(run(&["origins", "remove", "https://*.bad.example"]).status.code(), Some(1));
    let payee = "GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H";
    let pin = ["pins", "set", "https://a.example", "--network", "stellar:testnet", "--asset", "CUSDC", "--pay-to"];
    assert!(run(&[&pin[..], &[payee]].concat()).status.success());
    assert_eq!(run(&[&pin[..], &["somebody"]].concat()).status.code(), Some(2));
    assert!(said(&run(&["pins", "list", "--json"])).contains(payee));
    let output = run(&["reservations", "audit"]);
    assert!(output.status.success() && said(&output).contains("0 differences"), "{}", said(&output));
    assert!(run(&["reservations", "list"]).status.success());

    let output = run(&["check", "--online"]);
    let told = said(&output);
    assert!(told.contains("ok       ledger: readable and writable"), "{told}");
    assert!(told.contains("PostgreSQL, 127.0.0.1:"), "{told}");
    assert!(told.contains("warning  ledger's user: it owns the tables"), "{told}");

    // A role of its own: named in the answer, and enough to serve with.
    let role = format!("{}_serves", schema.name);
    let output = run(&["migrate", "--runtime-role", &role]);
    assert!(!output.status.success() && said(&output).contains("there is no role"), "{}", said(&output));
    sql(&schema.url, &format!("CREATE ROLE {role} LOGIN")).await.unwrap();
    let served = url.replace("tollway:", &format!("{role}:"));
    let output = tollway(&file, &served, &["limits", "list"]);
    assert!(!output.status.success() && said(&output).contains("migrate --runtime-role"), "{}", said(&output));
    assert!(run(&["migrate", "--runtime-role", &role]).status.success());
    let told = said(&tollway(&file, &served, &["check", "--online"]));
    assert!(told.contains("ok       ledger: readable and writable"), "{told}");
    assert!(told.contains("ok       ledger's user: may serve"), "{told}");
    assert!(tollway(&file, &served, &["limits", "suspend", "agent"]).status.success(), "a stop is everybody's");
    assert!(tollway(&file, &served, &["reservations", "audit"]).status.success());
    let output = tollway(&file, &served, &["reservations", "archive"]);
    assert!(!output.status.success() && said(&output).contains("owner"), "{}", said(&output));
    assert_eq!(run(&["reservations", "archive", "--older-than", "90d"]).status.code(), Some(2), "13 months at least");
    let output = run(&["reservations", "archive", "--older-than", "400d", "--batch", "10", "--json"]);
    assert!(output.status.success() && said(&output).contains("\"archived\": 0"), "{}", said(&output));
    let output = tollway(&file, &served, &["origins", "deny", "https://bad.example"]);
    assert!(!output.status.success() && said(&output).contains("42501"), "{}", said(&output));
    sql(&schema.url, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
    assert!(told.contains("keys.ring_env is not set"), "nothing is stored sealed, and check says so: {told}");

    // A database of a later program.
    let later = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
        VALUES (99, 'later', true, '\\x00', 0)";
    sql(&schema.url, later).await.unwrap();
    for arguments in [&["serve"][..], &["limits", "list"], &["migrate"]] {
        let output = run(arguments);
        assert!(!output.status.success() && said(&output).contains("99"), "{arguments:?}: {}", said(&output));
    }
}
