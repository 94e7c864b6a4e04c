//! What each finding makes of a row.

use std::time::Duration;

use tollway::ledger::{Evidence, Ledger as _, SettleOutcome, SettleRequest};
use tollway::money::Amount;
use tollway::sandbox::chain::Node;

use super::bench::{Bench, one, open_still, released, settled, unproved};
use crate::pay::bench::PRICE;

#[tokio::test]
async fn a_payment_that_was_made_is_settled_with_its_transaction() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("sweep-settled-000").await;
    let sweep = bench.honest().await;
    assert_eq!(bench.pass(&sweep).await, open_still());
    assert_eq!(bench.state(&doubt).await, ("in_doubt", "no_answer".to_owned()));
    let hash = bench.settle(&doubt).await;
    assert_eq!(bench.pass(&sweep).await, settled());
    let row = bench.row(doubt.id).await;
    assert_eq!((row.state.as_str(), row.transaction), ("settled", Some(hash)));
    assert_eq!(row.settled, Some(Amount::from_u64(PRICE)));
    assert_eq!(bench.events(&doubt, "settled").await[0].evidence.as_deref(), Some("chain"));
    assert_eq!(bench.pass(&sweep).await.taken, 0, "final");
    bench.audit().await;
}

#[tokio::test]
async fn an_unused_authorization_is_released_once_every_node_has_seen_its_last_ledger_and_not_before() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("sweep-released-00").await;
    let slow = Node::default();
    let sweep = bench.sweep(vec![bench.node().await, bench.local.node(slow.clone()).await]);
    let last = doubt.row.authorization.dead_after;
    for ledger in [doubt.row.authorization.at + 1, last - 1] {
        bench.close_to(ledger);
        assert_eq!(bench.pass(&sweep).await, open_still(), "ledger {ledger}, the last is {last}");
    }
    bench.close_to(last);
    slow.set_lag(1);
    assert_eq!(bench.pass(&sweep).await, open_still(), "one node has not seen it");
    // However late it is: the chain's time counts, not ours.
    bench.later(Duration::from_secs(86_400));
    assert_eq!(bench.pass(&sweep).await, open_still());
    assert_eq!(bench.state(&doubt).await.0, "in_doubt");
    slow.set_lag(0);
    assert_eq!(bench.pass(&sweep).await, released());
    assert_eq!(bench.state(&doubt).await, ("released", "expired_unspent".to_owned()));
    bench.refused(&doubt).await;
    bench.audit().await;
}

#[tokio::test]
async fn a_payment_in_the_last_ledger_is_settled() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("sweep-last-ledger").await;
    let sweep = bench.honest().await;
    // The facilitator checks, simulates and sends in the ledgers before the last.
    bench.close_to(doubt.row.authorization.dead_after - 4);
    assert_eq!(bench.pass(&sweep).await, open_still());
    let hash = bench.settle(&doubt).await;
    if u64::from(bench.local.here().sequence) < doubt.row.authorization.dead_after {
        bench.close_to(doubt.row.authorization.dead_after);
    }
    assert_eq!(bench.pass(&sweep).await, settled());
    assert_eq!(bench.row(doubt.id).await.transaction, Some(hash));
    bench.audit().await;
}

#[tokio::test]
async fn after_the_entrys_life_the_history_decides() {
    let bench = Bench::new().await;
    // The same call, price and recipient: only the nonce tells them apart.
    let paid = bench.doubt("sweep-history-000").await;
    let unpaid = bench.doubt("sweep-history-001").await;
    let hash = bench.settle(&paid).await;
    bench.close_to(unpaid.row.authorization.at + 60);
    let sweep = bench.honest().await;
    let report = bench.pass(&sweep).await;
    assert_eq!((report.taken, report.settled, report.released), (2, 1, 1), "{report:?}");
    assert_eq!(bench.row(paid.id).await.transaction, Some(hash));
    assert_eq!(bench.state(&unpaid).await, ("released", "expired_unspent".to_owned()));
    bench.audit().await;
}

#[tokio::test]
async fn beyond_retention_nothing_changes_and_a_human_is_called() {
    let bench = Bench::with(|options| options.retention = 5).await;
    let doubt = bench.doubt("sweep-retention-0").await;
    bench.close_to(doubt.row.authorization.at + 60);
    let sweep = bench.honest().await;
    assert_eq!(bench.pass(&sweep).await, unproved());
    bench.later(Duration::from_secs(3_700));
    let overdue = one(|r| (r.inconclusive, r.overdue) = (1, 1));
    assert_eq!(bench.pass(&sweep).await, overdue);
    assert_eq!(bench.state(&doubt).await, ("in_doubt", "no_answer".to_owned()));
    bench.audit().await;
}

#[tokio::test]
async fn a_row_is_looked_at_again_later_each_time_and_never_while_it_is_not_due() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("sweep-later-00000").await;
    let sweep = bench.honest().await;
    assert_eq!(sweep.pass().await, open_still(), "due at once");
    assert_eq!(sweep.pass().await.taken, 0);
    // After 25 s it has been read by its age at the latest, with a tenth more for the jitter.
    bench.later(Duration::from_secs(25));
    assert_eq!(sweep.pass().await, open_still());
    bench.later(Duration::from_secs(10));
    assert_eq!(sweep.pass().await.taken, 0, "its age is the pause");
    bench.settle(&doubt).await;
    bench.later(Duration::from_secs(60));
    assert_eq!(sweep.pass().await, settled());
    bench.audit().await;
}

#[tokio::test]
async fn a_transaction_that_is_booked_for_another_payment_does_not_hide_this_one() {
    let bench = Bench::new().await;
    let forged = bench.doubt("sweep-forged-0000").await;
    let paid = bench.doubt("sweep-forged-0001").await;
    let hash = bench.settle(&paid).await;
    // A seller's receipt named another payment's transaction, and was believed.
    let request = SettleRequest {
        payment_id: forged.id,
        amount: forged.row.reserved,
        transaction: Some(&hash),
        evidence: Evidence::Receipt,
        outcome: None,
        unfinished: false,
    };
    assert!(matches!(bench.ledger.settle(request).await, Ok(SettleOutcome::Settled)));
    let sweep = bench.honest().await;
    assert_eq!(bench.pass(&sweep).await, settled());
    let row = bench.row(paid.id).await;
    assert_eq!((row.state.as_str(), row.transaction), ("settled", None));
    assert_eq!(bench.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn the_loop_sweeps_until_the_shutdown_and_gives_back_what_it_holds() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("sweep-loop-000000").await;
    let hash = bench.settle(&doubt).await;
    let parts = tollway::pay::SweepParts {
        world: bench.local.world.clone(),
        ledger: bench.ledger.clone(),
        chains: [(doubt.row.network.clone(), std::sync::Arc::new(bench.local.honest().await))].into(),
        settings: tollway::pay::SweepSettings {
            interval: Duration::from_millis(20),
            rpc_per_second: 1,
            ..tollway::pay::SweepSettings::default()
        },
    };
    let stop = tokio_util::sync::CancellationToken::new();
    let running = tokio::spawn(tollway::pay::Sweep::new(parts).run(stop.clone()));
    while bench.row(doubt.id).await.state.is_open() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(bench.row(doubt.id).await.transaction, Some(hash));
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(10), running).await.unwrap().unwrap();
    bench.audit().await;
}
