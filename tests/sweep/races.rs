//! Several sweeps, recoveries and late owners on one row; a ledger that is down in the middle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::{ConnectOptions as _, Connection as _};
use tollway::ledger::{
    Evidence, Ledger as _, LedgerError, Reason, Recovery, SettleOutcome, SettleRequest, SqliteLedger,
};

use super::bench::{Bench, Doubt, one, released, settled};

fn receipt<'a>(doubt: &Doubt, transaction: &'a str) -> SettleRequest<'a> {
    SettleRequest {
        payment_id: doubt.id,
        amount: doubt.row.reserved,
        transaction: Some(transaction),
        evidence: Evidence::Receipt,
        outcome: Some(b"{\"sky\":\"clear\"}"),
        unfinished: false,
    }
}

/// Runs on a thread and a runtime of its own, as another process would.
fn elsewhere<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    })
    .join()
    .unwrap()
}

/// A sweep whose node does something else, once, before it answers about the nonce.
async fn interrupted(bench: &Bench, work: impl Fn() + Send + Sync + 'static) -> tollway::pay::Sweep {
    let done = AtomicBool::new(false);
    let url = bench
        .local
        .liar(move |method, _| {
            if method == "getLedgerEntries" && !done.swap(true, Ordering::SeqCst) {
                work();
            }
        })
        .await;
    bench.sweep(vec![url])
}

#[tokio::test]
async fn two_sweeps_at_once_end_each_row_once() {
    let bench = Bench::new().await;
    let mut doubts = Vec::new();
    for n in 0..8 {
        doubts.push(bench.doubt(&format!("races-two-{n:07}")).await);
    }
    for doubt in doubts.iter().take(2) {
        bench.settle(doubt).await;
    }
    bench.close_to(doubts[7].row.authorization.dead_after);
    let other = bench.another().await;
    let (node, theirs) = (bench.node().await, bench.node().await);
    let (first, second) = (bench.sweep(vec![node]), bench.sweep_with(other, bench.local.stellar(vec![theirs])));
    bench.later(Duration::from_secs(400));
    let (a, b) = futures_util::join!(first.pass(), second.pass());
    // A pass that met the other's write lock for too long leaves its rows to the next one.
    let mut total = (a.settled + b.settled, a.released + b.released);
    while total.0 + total.1 < 8 {
        let more = bench.pass(&first).await;
        total = (total.0 + more.settled, total.1 + more.released);
    }
    assert_eq!(total, (2, 6), "{a:?} {b:?}");
    for doubt in &doubts {
        let ends = bench.events(doubt, "settled").await.len() + bench.events(doubt, "released").await.len();
        assert_eq!(ends, 1);
    }
    bench.audit().await;
}

#[tokio::test]
async fn a_sweep_leaves_a_recovery_alone_and_a_recovery_a_sweep() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("races-recover-000").await;
    let sweep = bench.honest().await;
    let Recovery::Taken(taken) = bench.ledger.take_recovery(doubt.id, 3_600_000).await.unwrap() else {
        panic!("the payload is stored");
    };
    bench.close_to(doubt.row.authorization.dead_after);
    assert_eq!(bench.pass(&sweep).await.taken, 0, "the recovery has it");
    // While the sweep reads, a recovery comes: it finds the lease.
    assert!(bench.ledger.end_recovery(doubt.id, &taken.lease, None).await.unwrap());
    let (ledger, id) = (bench.another().await, doubt.id);
    let sweep = interrupted(&bench, move || {
        let ledger = ledger.clone();
        let met = elsewhere(async move { ledger.take_recovery(id, 60_000).await });
        assert!(matches!(met, Ok(Recovery::Leased)), "{met:?}");
    })
    .await;
    assert_eq!(bench.pass(&sweep).await, released());
    assert!(matches!(bench.ledger.take_recovery(doubt.id, 60_000).await, Ok(Recovery::Nothing)));
    bench.audit().await;
}

#[tokio::test]
async fn a_receipt_that_comes_while_the_sweep_reads_settles_the_row_once() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("races-receipt-000").await;
    let hash = bench.settle(&doubt).await;
    let (ledger, late, booked) = (bench.another().await, bench.another().await, hash.clone());
    let owner = Doubt { id: doubt.id, transaction: String::new(), row: doubt.row.clone() };
    let owner = Arc::new(owner);
    let sweep = interrupted(&bench, move || {
        let (ledger, owner, hash) = (ledger.clone(), owner.clone(), booked.clone());
        let ended = elsewhere(async move { ledger.settle(receipt(&owner, &hash)).await });
        assert!(matches!(ended, Ok(SettleOutcome::Settled)), "{ended:?}");
    })
    .await;
    assert_eq!(bench.pass(&sweep).await.taken, 1);
    assert_eq!(bench.events(&doubt, "settled").await.len(), 1);
    let row = bench.row(doubt.id).await;
    assert_eq!((row.state.as_str(), row.transaction.as_ref()), ("settled", Some(&hash)));
    assert_eq!(late.outcome(doubt.id).await.unwrap().as_deref(), Some(&b"{\"sky\":\"clear\"}"[..]));
    bench.audit().await;
}

#[tokio::test]
async fn a_receipt_that_comes_after_the_sweep_still_brings_its_output() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("races-after-00000").await;
    let hash = bench.settle(&doubt).await;
    assert_eq!(bench.pass(&bench.honest().await).await, settled());
    assert!(matches!(bench.ledger.settle(receipt(&doubt, &hash)).await, Ok(SettleOutcome::Settled)));
    assert!(bench.row(doubt.id).await.has_outcome);
    assert_eq!(bench.events(&doubt, "settled").await.len(), 1);
    bench.audit().await;
}

#[tokio::test]
async fn a_sweep_that_was_killed_between_reading_and_writing_is_finished_by_the_next() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("races-killed-0000").await;
    bench.close_to(doubt.row.authorization.dead_after);
    let sweep = bench.honest().await;
    // It had read the chain; then nothing more was heard of it.
    let taken = bench.ledger.take_due(10, 150_000).await.unwrap();
    let [(row, lease)] = &taken[..] else { panic!("{taken:?}") };
    assert_eq!((row.payment_id, sweep.pass().await.taken), (doubt.id, 0), "its lease is alive");
    assert_eq!(bench.pass(&sweep).await, released());
    assert!(!bench.ledger.look_again(doubt.id, lease, 0).await.unwrap(), "the lease is lost");
    bench.audit().await;
}

#[tokio::test]
async fn a_sweep_whose_lease_was_lost_writes_nothing_more() {
    let bench = Arc::new(Bench::new().await);
    let doubt = bench.doubt("races-lost-000000").await;
    bench.close_to(doubt.row.authorization.dead_after);
    let (ledger, shared) = (bench.another().await, bench.clone());
    // While it reads, its lease runs out, and another process takes the row and keeps it.
    let sweep = interrupted(&bench, move || {
        shared.later(Duration::from_secs(1_000));
        let ledger = ledger.clone();
        assert_eq!(elsewhere(async move { ledger.take_due(10, 600_000).await.unwrap().len() }), 1);
    })
    .await;
    assert_eq!(bench.pass(&sweep).await, one(|r| r.lost = 1));
    let row = bench.row(doubt.id).await;
    assert_eq!((row.state.as_str(), row.leased), ("in_doubt", true));
    assert_eq!(bench.ledger.audit().await.unwrap().differences, []);
}

/// Holds the file's write lock until it is dropped.
async fn lock(path: &std::path::Path) -> sqlx::SqliteConnection {
    let settings = sqlx::sqlite::SqliteConnectOptions::new().filename(path);
    let mut connection = settings.connect().await.unwrap();
    sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await.unwrap();
    connection
}

#[tokio::test]
async fn a_ledger_that_is_down_in_the_pass_leaves_the_row_to_a_later_one() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("races-down-000000").await;
    bench.close_to(doubt.row.authorization.dead_after);
    let sweep = bench.honest().await;
    let held = lock(&bench.path).await;
    let report = bench.pass(&sweep).await;
    assert_eq!((report.taken, report.failed), (0, 2), "neither of this network nor of others could anything be taken");
    held.close().await.unwrap();

    let (locked, path) = (Arc::new(std::sync::Mutex::new(None)), bench.path.clone());
    let holder = locked.clone();
    let interrupted = interrupted(&bench, move || {
        let path = path.clone();
        let (unlock, wait) = std::sync::mpsc::channel::<()>();
        let (is_locked, ready) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let connection = runtime.block_on(lock(&path));
            is_locked.send(()).unwrap();
            let _ = wait.recv();
            runtime.block_on(connection.close()).unwrap();
        });
        ready.recv().unwrap();
        *holder.lock().unwrap() = Some((unlock, thread));
    })
    .await;
    assert_eq!(bench.pass(&interrupted).await, one(|r| r.failed = 1), "the row was read, and not written");
    let (unlock, thread) = locked.lock().unwrap().take().unwrap();
    drop(unlock);
    thread.join().unwrap();
    assert_eq!(bench.state(&doubt).await.0, "in_doubt");
    assert_eq!(bench.pass(&sweep).await, released());
    bench.audit().await;
}

#[tokio::test]
async fn what_is_no_finding_of_the_chain_releases_nothing() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("races-reason-0000").await;
    bench.later(Duration::from_secs(400));
    let ledger: &SqliteLedger = &bench.ledger;
    let taken = ledger.take_due(10, 60_000).await.unwrap();
    let refused = ledger.expire(doubt.id, &taken[0].1, Reason::NoAnswer).await;
    assert!(matches!(refused, Err(LedgerError::Inconsistent(_))));
    bench.audit().await;
}
