//! A primary with a synchronous standby: the primary dies under load, the standby takes over, and nothing that was
//! answered is lost.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::server::Server;
use super::*;
use crate::ledger::table::{CALL, amount, limit};

fn call(lane: u8, round: u32) -> Intent {
    let mut intent = CALL.intent();
    let mut bytes = [lane; 32];
    bytes[..4].copy_from_slice(&round.to_be_bytes());
    intent.payment_id = PaymentId::from_bytes(bytes);
    intent.quote.call_hash = bytes;
    intent.authorization.nonce = format!("{lane}-{round}");
    intent
}

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

    let stopped = AtomicBool::new(false);
    let caller = async |lane: u8| {
        let mut told = Vec::new();
        for round in 0u32.. {
            if stopped.load(Ordering::SeqCst) {
                break;
            }
            let intent = call(lane, round);
            let reserved = matches!(ledger.decide(&intent).await, Ok(Decision::Fresh(_)));
            let request = SettleRequest {
                payment_id: intent.payment_id,
                amount: amount("60"),
                transaction: None,
                evidence: Evidence::Receipt,
                outcome: Some(b"output"),
                unfinished: false,
            };
            let settled = reserved && matches!(ledger.settle(request).await, Ok(SettleOutcome::Settled));
            told.push((intent.payment_id, reserved, settled));
            if !reserved {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        told
    };
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
        stopped.store(true, Ordering::SeqCst);
        promoted
    };
    let (told, _servers) = futures_util::join!(join_all((0..4).map(caller)), operator);
    let told = told.concat();
    assert!(told.iter().filter(|(_, _, settled)| *settled).count() > 20, "{} calls", told.len());
    for (id, reserved, settled) in told {
        let row = ledger.show(&id.to_hex()).await.unwrap();
        let state = row.as_ref().map(|(payment, _)| payment.state);
        match (reserved, settled) {
            (true, true) => assert_eq!(state, Some(State::Settled)),
            (true, false) => assert!(state.is_some()),
            (false, _) => {}
        }
        if let Some((_, events)) = row {
            let twice = |event: &str| events.iter().filter(|e| e.event == event).count() > 1;
            assert!(!twice("reserved") && !twice("settled"), "{events:?}");
        }
    }
    assert_eq!(ledger.audit().await.unwrap().differences, []);
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
