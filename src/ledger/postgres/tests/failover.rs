//! A primary with a synchronous standby: the primary dies under load, the standby takes over, and nothing that was
//! answered is lost.

use tokio::time::Instant;

use super::server::Server;
use super::told::{call, what_was_told_holds};
use super::*;
use crate::ledger::table::{CALL, amount, limit};

async fn cluster() -> (Server, Server) {
    let settings = "synchronous_standby_names = '*'\nsynchronous_commit = on\nfsync = off";
    tokio::task::spawn_blocking(|| {
        let primary = Server::start(settings).up();
        let standby = Server::standby(&primary);
        (primary, standby)
    })
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_standby_takes_over_and_nothing_that_was_answered_is_lost() {
    let (primary, standby) = cluster().await;
    // The standby first: a server that takes no writes is passed over.
    let url = format!("postgresql://tollway@127.0.0.1:{},127.0.0.1:{}/postgres", standby.port, primary.port);
    let database = Database::parse(&url, None).unwrap();
    PostgresLedger::migrate(&database).await.unwrap();
    let ledger = PostgresLedger::connect(&database, world(), Some(ring(1)), options()).await.unwrap();
    ledger.replace_limits("file", &[Limit { per_day: Some(amount("1000000000")), ..limit() }]).await.unwrap();
    ledger.ping().await.unwrap();
    let alone = Database::parse(&standby.url(), None).unwrap();
    let reader = PostgresLedger::connect(&alone, world(), None, options()).await.unwrap();
    assert!(reader.ping().await.unwrap_err().to_string().contains("read-only"));

    let operator = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let promoted = tokio::task::spawn_blocking(move || {
            primary.control(&["-m", "immediate", "stop"]);
            standby.control(&["promote"]);
            (primary, standby)
        })
        .await
        .unwrap();
        // Every call is as good as before within seconds.
        let since = Instant::now();
        while !matches!(ledger.decide(&call(98, since.elapsed().as_millis() as u32)).await, Ok(Decision::Fresh(_))) {
            assert!(since.elapsed() < Duration::from_secs(10), "the new primary was not found");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        promoted
    };
    let _servers = what_was_told_holds(&ledger, operator).await;
}

/// A settlement whose money has moved is no alert because a standby needed a second to become the primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn while_a_standby_is_promoted_calls_wait_and_are_done_once() {
    let (primary, standby) = cluster().await;
    let both = format!("postgresql://tollway@127.0.0.1:{},127.0.0.1:{}/postgres", primary.port, standby.port);
    let both = Database::parse(&both, None).unwrap();
    PostgresLedger::migrate(&both).await.unwrap();
    let ledger = PostgresLedger::connect(&both, world(), Some(ring(1)), options()).await.unwrap();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    let paid = call(1, 0);
    assert!(matches!(ledger.decide(&paid).await.unwrap(), Decision::Fresh(_)));
    // One that knows only the standby, and has connections to it: they are dropped, not asked again.
    let alone = Database::parse(&standby.url(), None).unwrap();
    let alone = PostgresLedger::connect(&alone, world(), None, options()).await.unwrap();
    assert!(alone.ping().await.unwrap_err().to_string().contains("read-only"));

    let (primary, standby) = tokio::task::spawn_blocking(move || {
        primary.control(&["-m", "immediate", "stop"]);
        (primary, standby)
    })
    .await
    .unwrap();
    let error = ledger.ping().await.unwrap_err().to_string();
    assert!(error.contains("standby") || error.contains("read-only"), "a probe does not wait: {error}");
    let settled = ledger.settle(SettleRequest {
        payment_id: paid.payment_id,
        amount: amount("60"),
        transaction: Some("t1"),
        evidence: Evidence::Receipt,
        outcome: Some(b"output"),
        unfinished: false,
    });
    let (second, third) = (call(2, 0), call(3, 0));
    let promotion = async {
        // Both have met a server that takes no writes.
        while ledger.lanes().again == 0 || alone.lanes().again == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let promote = move || {
            standby.control(&["promote"]);
            (primary, standby)
        };
        tokio::task::spawn_blocking(promote).await.unwrap()
    };
    let seen = ledger.lookup(&paid.quote.agent, By::Id(paid.payment_id));
    let (settled, second, third, seen, _servers) =
        futures_util::join!(settled, ledger.decide(&second), alone.decide(&third), seen, promotion);
    assert!(matches!(settled, Ok(SettleOutcome::Settled)), "{settled:?}");
    assert!(matches!(second, Ok(Decision::Fresh(_))), "{second:?}");
    assert!(matches!(third, Ok(Decision::Fresh(_))), "{third:?}");
    assert!(seen.unwrap().is_some());
    let (_, events) = ledger.show(&paid.payment_id.to_hex()).await.unwrap().unwrap();
    let events: Vec<_> = events.iter().map(|event| event.event.as_str()).collect();
    assert_eq!(events, ["reserved", "settled"]);
    assert_eq!(ledger.audit().await.unwrap().differences, []);
}

/// A server that lost its standby ends the wait of a COMMIT that is cancelled with Ok, and only it has the row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_no_standby_has_is_never_told_as_done() {
    let (primary, standby) = cluster().await;
    let database = Database::parse(&primary.url(), None).unwrap();
    PostgresLedger::migrate(&database).await.unwrap();
    let impatient = Options { statement_timeout: Duration::from_millis(200), ..options() };
    let ledger = PostgresLedger::connect(&database, world(), None, impatient).await.unwrap();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    let standby = tokio::task::spawn_blocking(move || {
        standby.control(&["-m", "immediate", "stop"]);
        standby
    })
    .await
    .unwrap();
    let told = ledger.decide(&CALL.intent()).await;
    assert!(told.is_err(), "{told:?}");
    drop(standby);
}
