//! The shared table on SQLite, and what only a file can suffer.
#![allow(clippy::disallowed_methods, reason = "tests look at the file with a connection of their own")]

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::BoxFuture;
use sqlx::AssertSqlSafe;

use super::*;
use crate::ledger::table::{self, Bench, CALL, Call, NOON, agent, amount, id, limit};
use crate::ports::Clock;

struct TestClock(AtomicU64);
impl Clock for TestClock {
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

struct File {
    directory: tempfile::TempDir,
    clock: Arc<TestClock>,
    ledger: Arc<SqliteLedger>,
}

impl File {
    async fn new() -> File {
        let directory = tempfile::tempdir().unwrap();
        let clock = Arc::new(TestClock(AtomicU64::new(NOON)));
        let ledger = Arc::new(open(directory.path(), &clock, Some(ring(1))).await.unwrap());
        File { directory, clock, ledger }
    }

    async fn open(&self, ring: Option<KeyRing>) -> Result<SqliteLedger, LedgerError> {
        open(self.directory.path(), &self.clock, ring).await
    }

    /// Somebody with the file and a shell.
    async fn sql(&self, sql: &str) -> Result<u64, sqlx::Error> {
        let mut db = SqliteConnectOptions::new().filename(path(self.directory.path())).connect().await?;
        Ok(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut db).await?.rows_affected())
    }

    async fn reserve(&self, call: Call) -> Result<Decision, LedgerError> {
        self.ledger.decide(&call.intent()).await
    }
}

fn path(directory: &Path) -> std::path::PathBuf {
    directory.join("state/ledger.sqlite")
}

fn ring(n: u8) -> KeyRing {
    KeyRing::new(vec![vec![n; 32]]).unwrap()
}

async fn open(directory: &Path, clock: &Arc<TestClock>, ring: Option<KeyRing>) -> Result<SqliteLedger, LedgerError> {
    let mut world = crate::ports::machine::world().0;
    world.clock = clock.clone();
    SqliteLedger::open(&path(directory), world, ring).await
}

impl Bench for File {
    fn ledger(&self) -> Arc<dyn Ledger> {
        self.ledger.clone()
    }
    fn another(&self) -> BoxFuture<'_, Arc<dyn Ledger>> {
        Box::pin(async { Arc::new(self.open(Some(ring(1))).await.unwrap()) as Arc<dyn Ledger> })
    }
    fn advance(&self, ms: u64) {
        self.clock.0.fetch_add(ms, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_month_of_what_has_expired_is_tidied_in_bounded_parts() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    let most = u64::try_from(recover::MAX_TIDY).unwrap();
    let many = format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) \
         INSERT INTO sessions_ended (session, expires) SELECT unhex(printf('%064x', i)), {NOON} FROM n",
        2 * most + 7
    );
    file.sql(&many).await.unwrap();
    let (some, more) = file.ledger.tidy_some().await.unwrap();
    assert_eq!((some, more), (Tidied { sessions: most, ..Tidied::default() }, true));
    // A payment of another task gets its turn between two parts, and the rest goes by itself.
    assert!(matches!(file.reserve(CALL).await.unwrap(), Decision::Fresh(_)));
    assert_eq!(file.ledger.tidy().await.unwrap(), Tidied { sessions: most + 7, ..Tidied::default() });
    assert_eq!(file.ledger.tidy().await.unwrap(), Tidied::default());
}

#[tokio::test]
async fn every_line_of_the_table_holds() {
    table::transitions(async || Box::new(File::new().await) as Box<dyn Bench>).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_fan_out_from_two_processes_never_beats_the_ceiling() {
    table::fan_out(Box::new(File::new().await)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_payment_ends_once() {
    table::one_end(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn bodies_are_kept_until_the_last_word_and_expire() {
    table::bodies(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn an_agent_sees_its_own_budget() {
    table::budgets(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn lists_of_limits_have_versions_and_origins_have_rules_and_pins() {
    table::policy(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn the_operator_sets_stops_and_sees() {
    table::operator(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn a_recovery_goes_on_until_the_last_word() {
    table::recovery(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn the_history_names_the_evidence_of_every_end() {
    table::evidence(Box::new(File::new().await)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_all_that_reach_for_a_payment_one_has_it() {
    table::races(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn agents_take_turns_in_what_is_due() {
    crate::ledger::turns::turns(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn what_has_expired_is_tidied_and_nothing_else() {
    table::tidies(Box::new(File::new().await)).await;
}

#[tokio::test]
async fn the_key_of_an_archived_payment_is_spent() {
    let file = File::new().await;
    let archive = format!(
        "INSERT INTO spent_keys VALUES ('a', '{}', '{}', zeroblob(32), 0)",
        table::key(1).as_str(),
        id(9).to_hex()
    );
    file.sql(&archive).await.unwrap();
    table::spent_key(Box::new(file)).await;
}

#[tokio::test]
async fn random_stories_keep_counters_rows_and_limits_together() {
    table::stories(async || Box::new(File::new().await) as Box<dyn Bench>).await;
}

/// LED-05.
#[tokio::test]
async fn a_reservation_whose_event_cannot_be_written_is_none() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    file.sql("CREATE TRIGGER full BEFORE INSERT ON payment_events BEGIN SELECT RAISE(ABORT, 'full'); END")
        .await
        .unwrap();
    assert!(matches!(file.reserve(CALL).await, Err(LedgerError::Unavailable(_))));
    assert!(file.ledger.show(&id(1).to_hex()).await.unwrap().is_none());
    assert!(file.ledger.budget(&agent("a"), None).await.unwrap()[0].day_held.is_zero());
    file.sql("DROP TRIGGER full").await.unwrap();
    assert!(matches!(file.reserve(CALL).await, Ok(Decision::Fresh(_))), "the connection is as good as before");
    assert_eq!(file.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn the_file_itself_refuses_what_the_program_never_does() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    file.reserve(CALL).await.unwrap();
    file.reserve(Call { n: 2, call: 2, ..CALL }).await.unwrap();
    let settle = "UPDATE payments SET state = 'settled', due = NULL, settled = ";
    for (sql, why) in [
        ("UPDATE payment_events SET event = 'settled'", "append-only"),
        ("DELETE FROM payment_events", "append-only"),
        ("DELETE FROM payments", "FOREIGN KEY"),
        ("UPDATE payments SET reserved = '1'", "does not change"),
        ("UPDATE payments SET nonce = '77'", "does not change"),
        ("UPDATE payments SET state = 'paid'", "CHECK"),
        ("UPDATE payments SET state = 'settled', due = NULL", "CHECK"),
        (&format!("{settle} '101'"), "CHECK"),
        (&format!("{settle} '1e1'"), "CHECK"),
        (&format!("{settle} '1', transaction_id = 't'"), "UNIQUE"),
        ("UPDATE budget_windows SET held = '-1'", "CHECK"),
        ("UPDATE budget_windows SET held = '01'", "CHECK"),
        ("UPDATE budget_windows SET held = ''", "CHECK"),
        ("UPDATE spend_limits SET per_day = '1.5'", "CHECK"),
        ("UPDATE spend_limits SET subject = 'total', per_call = '1'", "CHECK"),
    ] {
        let error = file.sql(sql).await.expect_err(sql).to_string();
        assert!(error.contains(why), "{sql}: {error}");
    }
    file.sql(&format!("{settle} '1' WHERE nonce = '1'")).await.unwrap();
    for sql in ["UPDATE payments SET state = 'released' WHERE nonce = '1'", "UPDATE payments SET settled = '2'"] {
        assert!(file.sql(sql).await.unwrap_err().to_string().contains("no such transition"), "{sql}");
    }
}

#[tokio::test]
async fn an_audit_names_every_difference() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    file.reserve(CALL).await.unwrap();
    file.reserve(Call { n: 2, call: 2, session: Some("s"), ..CALL }).await.unwrap();
    assert_eq!(file.ledger.audit().await.unwrap().differences, []);
    file.sql("UPDATE budget_windows SET held = '150' WHERE agent = 'a' AND kind = 'day'").await.unwrap();
    file.sql("DELETE FROM budget_windows WHERE agent = 'total'").await.unwrap();
    file.sql("INSERT INTO budget_windows VALUES ('z', 'stellar:testnet', 'CUSDC', 'day', '2026-12-02', '0', '5')")
        .await
        .unwrap();
    file.sql("UPDATE payments SET state = 'in_doubt', reason = 'no_answer' WHERE nonce = '1'").await.unwrap();
    let audit = file.ledger.audit().await.unwrap();
    let mut found: Vec<_> = audit.differences.iter().map(|found| found.what).collect();
    found.sort_unstable();
    assert_eq!(found, ["history", "window", "window", "window"], "{:?}", audit.differences);
    assert!(audit.differences.iter().any(|f| f.detail.contains("held 150") && f.detail.contains("held 200")));
}

#[tokio::test]
async fn sealed_bodies_that_were_altered_moved_or_lost_their_key_are_not_handed_out() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    for n in [1, 2] {
        file.reserve(Call { n, call: n, ..CALL }).await.unwrap();
        let (payment_id, outcome, transaction) = (id(n), Some(&b"PAID-OUTPUT"[..]), None);
        let (amount, evidence, unfinished) = (amount("100"), Evidence::Receipt, false);
        let request = SettleRequest { payment_id, amount, transaction, evidence, outcome, unfinished };
        file.ledger.settle(request).await.unwrap();
    }
    assert!(file.ledger.outcome(id(1)).await.unwrap().is_some());
    assert_eq!(file.open(Some(ring(2))).await.unwrap().outcome(id(1)).await.unwrap(), None, "another ring");
    assert_eq!(file.open(None).await.unwrap().outcome(id(1)).await.unwrap(), None, "no ring");
    let swap = format!(
        "UPDATE outcomes SET body = (SELECT body FROM outcomes WHERE payment_identifier = '{}')",
        id(2).to_hex()
    );
    file.sql(&swap).await.unwrap();
    assert_eq!(file.ledger.outcome(id(1)).await.unwrap(), None, "another payment's body");
    assert!(file.ledger.outcome(id(2)).await.unwrap().is_some());
    file.sql("UPDATE outcomes SET body = CAST(body || x'00' AS BLOB)").await.unwrap();
    assert_eq!(file.ledger.outcome(id(2)).await.unwrap(), None, "altered");
}

#[tokio::test]
async fn nothing_private_is_in_the_file_in_clear_or_readable_by_others() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    let Decision::Fresh(lease) = file.reserve(CALL).await.unwrap() else { panic!("not reserved") };
    assert!(file.ledger.store_payload(id(1), &lease, b"SIGNED-PAYLOAD").await.unwrap());
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(path(file.directory.path()).parent().unwrap()).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o077, 0, "{:?}", entry.path());
        bytes.extend(std::fs::read(entry.path()).unwrap());
    }
    let holds = |needle: &[u8]| bytes.windows(needle.len()).any(|window| window == needle);
    assert!(holds(b"GSELLER"), "this reads the right files");
    assert!(!holds(b"SIGNED-PAYLOAD"));

    let blind = file.open(None).await.unwrap();
    blind.replace_limits("file", &[limit()]).await.unwrap();
    let Decision::Fresh(lease) = blind.decide(&Call { n: 2, call: 2, ..CALL }.intent()).await.unwrap() else {
        panic!()
    };
    assert!(!blind.store_payload(id(2), &lease, b"SIGNED-PAYLOAD").await.unwrap(), "no ring, nothing stored");
}

#[tokio::test]
async fn the_clock_never_goes_behind_the_newest_event() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    file.reserve(CALL).await.unwrap();
    file.clock.0.store(NOON - 86_400_000, Ordering::SeqCst);
    file.reserve(Call { n: 2, call: 2, ..CALL }).await.unwrap();
    let (payment, _) = file.ledger.show(&id(2).to_hex()).await.unwrap().unwrap();
    assert_eq!(payment.created_ms, NOON);
    assert_eq!(file.ledger.budget(&agent("a"), None).await.unwrap()[0].day_held, amount("200"), "one window, not two");
}

#[tokio::test]
async fn migrations_run_once_and_an_altered_or_newer_database_is_refused() {
    let file = File::new().await;
    let place = path(file.directory.path());
    assert_eq!(SqliteLedger::schema_version(&place).await.unwrap(), (Some(11), 11));
    assert_eq!(SqliteLedger::schema_version(&file.directory.path().join("no")).await.unwrap(), (None, 11));
    file.open(None).await.expect("a second run changes nothing");
    file.sql("UPDATE _sqlx_migrations SET checksum = x'00'").await.unwrap();
    let error = file.open(None).await.unwrap_err().to_string();
    assert!(error.contains("migration 1 was applied with another text"), "{error}");
    file.sql("INSERT INTO _sqlx_migrations VALUES (99, 'later', '', 1, x'00', 0)").await.unwrap();
    let error = file.open(None).await.unwrap_err().to_string();
    assert!(error.contains("schema version 99") && error.contains("run a newer Tollway"), "{error}");
}

/// A file of the first release, with payments in it.
#[tokio::test]
async fn an_older_file_keeps_its_payments_and_history() {
    let directory = tempfile::tempdir().unwrap();
    let place = path(directory.path());
    make_private(&place).unwrap();
    let mut db = SqliteConnectOptions::new().filename(&place).foreign_keys(true).connect().await.unwrap();
    migrate::run_to(&mut db, 1).await.unwrap();
    let row = |n: u8, state: &str, rest: &str| {
        format!(
            "INSERT INTO payments (payment_identifier, id_nonce, agent, day, call_hash, ref, version_hash, network, scheme, \
             asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, lease_token, sign_before, created, updated, \
             state, reason, settled, lease_expires, due) VALUES ('{}', zeroblob(16), 'a', '2026-12-02', x'{}', 'v1.ref', \
             'h', 'stellar:testnet', 'exact', 'CUSDC', 'GPAYER', 'GSELLER', '100', '{n}', 9, 1, zeroblob(16), 1, 1, 1, \
             '{state}', {rest});",
            id(n).to_hex(),
            id(n).to_hex(),
        )
    };
    let event = |n: u8, event: &str, amount: &str| {
        format!(
            "INSERT INTO payment_events (payment_identifier, at, event, amount) VALUES ('{}', {NOON}, '{event}', {amount});",
            id(n).to_hex()
        )
    };
    let sql = [
        row(1, "in_doubt", "'no_answer', NULL, NULL, 1"),
        row(2, "settled", "NULL, '60', NULL, NULL"),
        event(1, "reserved", "'100'"),
        event(2, "reserved", "'100'"),
        event(2, "settled", "'60'"),
        event(1, "in_doubt", "NULL"),
        "INSERT INTO budget_windows VALUES ('a', 'stellar:testnet', 'CUSDC', 'day', '2026-12-02', '100', '60');"
            .to_owned(),
        "INSERT INTO budget_windows VALUES ('total', 'stellar:testnet', 'CUSDC', 'day', '2026-12-02', '100', '60');"
            .to_owned(),
    ]
    .concat();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut db).await.unwrap();
    db.close().await.unwrap();
    assert_eq!(SqliteLedger::schema_version(&place).await.unwrap(), (Some(1), 11));

    let clock = Arc::new(TestClock(AtomicU64::new(NOON)));
    let ledger = Arc::new(open(directory.path(), &clock, Some(ring(1))).await.unwrap());
    assert_eq!(SqliteLedger::schema_version(&place).await.unwrap(), (Some(11), 11));
    assert_eq!(ledger.audit().await.unwrap().differences, []);
    let (_, events) = ledger.show(&id(1).to_hex()).await.unwrap().unwrap();
    assert_eq!(events.iter().map(|event| &*event.event).collect::<Vec<_>>(), ["reserved", "in_doubt"]);
    let due = ledger.take_due(10, 1_000).await.unwrap();
    assert!(ledger.expire(id(1), &due[0].1, Reason::ExpiredUnspent).await.unwrap());
    let file = File { directory, clock, ledger };
    let newest: i64 = {
        let mut db = SqliteConnectOptions::new().filename(path(file.directory.path())).connect().await.unwrap();
        sqlx::query_scalar("SELECT max(id) FROM payment_events").fetch_one(&mut db).await.unwrap()
    };
    assert_eq!(newest, 5, "the numbers go on where they were");
    for sql in ["UPDATE payment_events SET event = 'settled'", "DELETE FROM payment_events"] {
        assert!(file.sql(sql).await.unwrap_err().to_string().contains("append-only"), "{sql}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn several_processes_may_open_a_new_file_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(TestClock(AtomicU64::new(NOON)));
    let opened = (0..6).map(|_| {
        let (directory, clock) = (directory.path().to_owned(), clock.clone());
        tokio::spawn(async move { open(&directory, &clock, None).await.map(|_| ()) })
    });
    for opened in futures_util::future::join_all(opened).await {
        opened.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_no_transaction_open() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    // Dropped at every await point in turn, until one call gets through.
    for polls in 1.. {
        let intent = CALL.intent();
        let mut call = Box::pin(file.ledger.decide(&intent));
        let mut left = polls;
        let done = std::future::poll_fn(|cx| match call.as_mut().poll(cx) {
            std::task::Poll::Ready(decision) => std::task::Poll::Ready(Some(decision)),
            std::task::Poll::Pending if left == 1 => std::task::Poll::Ready(None),
            std::task::Poll::Pending => {
                left -= 1;
                std::task::Poll::Pending
            }
        })
        .await;
        drop(call);
        assert_eq!(file.ledger.audit().await.unwrap().differences, [], "after {polls} polls");
        match done {
            None => assert!(polls < 200, "never done"),
            // The cut may have come after the commit: then the twin is found.
            Some(decision) => {
                assert!(matches!(decision.unwrap(), Decision::Fresh(_) | Decision::Existing(_)));
                break;
            }
        }
    }
    assert_eq!(file.ledger.budget(&agent("a"), None).await.unwrap()[0].day_held, amount("100"));
}

#[tokio::test]
async fn a_ledger_that_another_process_holds_is_busy() {
    let file = File::new().await;
    let options = Options { busy_timeout: Duration::from_millis(50), ..Options::default() };
    let world = crate::ports::machine::world().0;
    let ledger = SqliteLedger::open_with(&path(file.directory.path()), world, None, options).await.unwrap();
    let mut holder = SqliteConnectOptions::new().filename(path(file.directory.path())).connect().await.unwrap();
    let held = holder.begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert!(matches!(ledger.ping().await, Err(LedgerError::Busy)));
    held.rollback().await.unwrap();
    ledger.ping().await.unwrap();
}

#[test]
fn debug_shows_no_key() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let shown = runtime.block_on(async { format!("{:?}", File::new().await.ledger) });
    assert_eq!(shown, "SqliteLedger(sealing: true)");
}

/// A wall clock that is behind the ledger's does not stop a signature, so the other bound may not begin late.
#[tokio::test]
async fn the_time_to_sign_is_counted_from_before_the_row_is_there() {
    let file = File::new().await;
    file.ledger.replace_limits("file", &[limit()]).await.unwrap();
    let intent = CALL.intent();
    let within = Duration::from_millis(intent.sign_within_ms.min(intent.lease_ms));
    let held = file.ledger.connection.lock().await;
    let release = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let released = tokio::time::Instant::now();
        drop(held);
        released
    };
    let (reserved, released) = futures_util::future::join(reserve(&*file.ledger, intent), release).await;
    assert!(reserved.unwrap().sign_until < released + within);
}
