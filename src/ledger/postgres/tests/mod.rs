//! The shared table on PostgreSQL, and what only a server can suffer.
#![allow(clippy::disallowed_methods, reason = "tests look at the database with connections and threads of their own")]

mod archive;
mod database;
mod failover;
mod failures;
mod lanes;
mod plans;
mod pooled;
mod races;
mod rights;
mod server;
mod told;
#[cfg(feature = "roles")]
mod sweepers;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio_postgres::NoTls;

use super::*;
use crate::ledger::table::{self, Bench, Call, NOON};

/// A fresh schema on the test server, with a clock that only the test moves.
struct Schema {
    name: String,
    database: Database,
    ledger: Arc<PostgresLedger>,
}

/// Small pools: many tests share one server.
fn options() -> Options {
    Options { pool_size: 4, ..Options::default() }
}

fn ring(n: u8) -> KeyRing {
    KeyRing::new(vec![vec![n; 32]]).unwrap()
}

fn world() -> World {
    crate::ports::machine::world().0
}

fn server_url() -> String {
    std::env::var("TOLLWAY_TEST_POSTGRES").unwrap_or_else(|_| {
        panic!(
            "TOLLWAY_TEST_POSTGRES names no PostgreSQL server: run ./scripts/test, or start one for this shell with \
             `. scripts/lib/postgres.sh && postgres_start`"
        )
    })
}

/// The server's URL with a schema of its own in front of everything else.
fn in_schema(url: &str, schema: &str) -> String {
    format!("{url}{}options=-csearch_path%3D{schema}", if url.contains('?') { '&' } else { '?' })
}

/// Somebody with the database's password and a shell.
async fn sql_at(url: &str, sql: &str) -> Result<Vec<String>, String> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.map_err(|e| e.to_string())?;
    let driver = tokio::spawn(connection);
    let said = client.simple_query(sql).await;
    drop(client);
    let _ = driver.await;
    let said = said.map_err(|e| e.as_db_error().map_or_else(|| e.to_string(), |db| db.message().to_owned()))?;
    let rows = said.iter().filter_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or("NULL").to_owned()),
        _ => None,
    });
    Ok(rows.collect())
}

/// Runs a future to its end from code that cannot wait: a drop, a clock that is moved.
fn elsewhere<T: Send>(doing: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        scope.spawn(move || runtime().block_on(doing)).join().unwrap()
    })
}

/// With the rights of a replica.
const SERVES: &str = "tollway_test_serves";

const CLOCK: &str = "CREATE TABLE test_clock (at BIGINT NOT NULL); INSERT INTO test_clock VALUES (1796212800000); \
    GRANT SELECT ON test_clock TO PUBLIC; \
    CREATE OR REPLACE FUNCTION tollway_now() RETURNS BIGINT LANGUAGE sql VOLATILE AS 'SELECT at FROM test_clock'";

impl Schema {
    async fn new() -> Schema {
        Schema::on(&server_url()).await
    }

    /// Served by a role that owns nothing, as a deployment should be: all that is promised has to be had with its rights.
    async fn on(server: &str) -> Schema {
        let name = Schema::named(server).await;
        let url = in_schema(server, &name);
        let owner = Database::parse(&url, None).unwrap();
        Schema::make(&url, &owner).await;
        // Several tests make it at once.
        let role = sql_at(server, &format!("CREATE ROLE {SERVES} LOGIN")).await;
        assert!(role.as_ref().err().is_none_or(|e| e.contains("exist") || e.contains("unique")), "{role:?}");
        PostgresLedger::grant(&owner, SERVES).await.unwrap();
        let database = Database::parse(&url.replacen("tollway@", &format!("{SERVES}@"), 1), None).unwrap();
        Schema::of(name, database).await
    }

    /// Served by the owner of the tables: the operator.
    async fn owned() -> Schema {
        let name = Schema::named(&server_url()).await;
        let url = in_schema(&server_url(), &name);
        let owner = Database::parse(&url, None).unwrap();
        Schema::make(&url, &owner).await;
        Schema::of(name, owner).await
    }

    async fn named(server: &str) -> String {
        let name = format!("t_{}", hex::encode(world().random::<8>()));
        sql_at(server, &format!("CREATE SCHEMA {name}")).await.unwrap();
        name
    }

    async fn make(url: &str, owner: &Database) {
        PostgresLedger::migrate(owner).await.unwrap();
        sql_at(url, CLOCK).await.unwrap();
    }

    async fn of(name: String, database: Database) -> Schema {
        let ledger = PostgresLedger::connect(&database, world(), Some(ring(1)), options()).await.unwrap();
        let ledger = Arc::new(ledger);
        assert_eq!(ledger.now_ms().await.unwrap(), NOON);
        Schema { name, database, ledger }
    }

    fn url(&self) -> String {
        in_schema(&server_url(), &self.name)
    }

    async fn open(&self, ring: Option<KeyRing>, options: Options) -> Result<PostgresLedger, LedgerError> {
        PostgresLedger::connect(&self.database, world(), ring, options).await
    }

    async fn sql(&self, sql: &str) -> Result<Vec<String>, String> {
        sql_at(&self.url(), sql).await
    }

    async fn reserve(&self, call: Call) -> Result<Decision, LedgerError> {
        self.ledger.decide(&call.intent()).await
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        let (name, server) = (self.name.clone(), server_url());
        elsewhere(async move {
            let _ = sql_at(&server, &format!("SET lock_timeout = '5s'; DROP SCHEMA {name} CASCADE")).await;
        });
    }
}

impl Bench for Schema {
    fn ledger(&self) -> Arc<dyn Ledger> {
        self.ledger.clone()
    }
    fn another(&self) -> BoxFuture<'_, Arc<dyn Ledger>> {
        Box::pin(async { Arc::new(self.open(Some(ring(1)), options()).await.unwrap()) as Arc<dyn Ledger> })
    }
    fn advance(&self, ms: u64) {
        elsewhere(async { self.sql(&format!("UPDATE test_clock SET at = at + {ms}")).await.unwrap() });
    }
}

async fn bench() -> Box<dyn Bench> {
    Box::new(Schema::new().await)
}

/// One schema for many short stories, emptied before each.
struct Emptied(Arc<Schema>);

impl Emptied {
    async fn again(schema: &Arc<Schema>) -> Box<dyn Bench> {
        // A superuser's way past the triggers: the program has none. TRUNCATE would make every file of every index anew.
        let tables = ["outcomes", "payment_events", "payments", "payments_archive", "spent_keys", "budget_windows"];
        let tables = tables.into_iter().chain(["spend_limits", "limit_lists", "sessions_ended", "recipient_pins"]);
        let gone: String = tables.map(|table| format!("DELETE FROM {table};")).collect();
        let sql = format!("SET session_replication_role = replica; {gone} UPDATE test_clock SET at = {NOON}");
        schema.sql(&sql).await.unwrap();
        Box::new(Emptied(schema.clone()))
    }
}

impl Bench for Emptied {
    fn ledger(&self) -> Arc<dyn Ledger> {
        self.0.ledger()
    }
    fn another(&self) -> BoxFuture<'_, Arc<dyn Ledger>> {
        self.0.another()
    }
    fn advance(&self, ms: u64) {
        self.0.advance(ms);
    }
}

#[tokio::test]
async fn every_line_of_the_table_holds() {
    let schema = Arc::new(Schema::new().await);
    table::transitions(async || Emptied::again(&schema).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_fan_out_from_two_processes_never_beats_the_ceiling() {
    table::fan_out(bench().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_payment_ends_once() {
    table::one_end(bench().await).await;
}

#[tokio::test]
async fn bodies_are_kept_until_the_last_word_and_expire() {
    table::bodies(bench().await).await;
}

#[tokio::test]
async fn an_agent_sees_its_own_budget() {
    table::budgets(bench().await).await;
}

#[tokio::test]
async fn lists_of_limits_have_versions_and_origins_have_rules_and_pins() {
    table::policy(Box::new(Schema::owned().await)).await;
}

#[tokio::test]
async fn the_operator_sets_stops_and_sees() {
    table::operator(bench().await).await;
}

#[tokio::test]
async fn a_recovery_goes_on_until_the_last_word() {
    table::recovery(bench().await).await;
}

#[tokio::test]
async fn the_history_names_the_evidence_of_every_end() {
    table::evidence(bench().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_all_that_reach_for_a_payment_one_has_it() {
    table::races(bench().await).await;
}

#[tokio::test]
async fn agents_take_turns_in_what_is_due() {
    crate::ledger::turns::turns(bench().await).await;
}

#[tokio::test]
async fn what_has_expired_is_tidied_and_nothing_else() {
    table::tidies(bench().await).await;
}

#[tokio::test]
async fn the_key_of_an_archived_payment_is_spent() {
    let schema = Schema::new().await;
    let (key, id) = (table::key(1), table::id(9).to_hex());
    let zeros = "decode(repeat('00', 32), 'hex')";
    schema.sql(&format!("INSERT INTO spent_keys VALUES ('a', '{}', '{id}', {zeros}, 0)", key.as_str())).await.unwrap();
    table::spent_key(Box::new(schema)).await;
}

#[tokio::test]
async fn random_stories_keep_counters_rows_and_limits_together() {
    let schema = Arc::new(Schema::new().await);
    table::stories(async || Emptied::again(&schema).await).await;
}
