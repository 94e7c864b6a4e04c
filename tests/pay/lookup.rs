//! A payment that is there already is answered from its row, and never paid again.

use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::bench::{Bench, Change, rpc_error, said};
use super::faulty::Fault;
use super::server::Reply;

pub const KEY: &str = "key-0123456789-abc";
/// Longer than any lease of the bench.
pub const LEASE: Duration = Duration::from_secs(120);

#[tokio::test]
pub async fn the_same_key_gets_the_same_bytes_and_pays_once() {
    let bench = Bench::new().await;
    let ask =
        || bench.tool("x402_call_resource", bench.arguments(json!({"idempotencyKey": KEY})), CancellationToken::new());
    let first = ask().await.unwrap();
    bench.says(|s| {
        s.catalog = Some(Reply::status(500, ""));
        s.paid = Some(Reply::status(500, ""));
    });
    let second = ask().await.unwrap();
    assert_eq!(first.get(), second.get());
    assert_eq!(bench.calls(), (1, 1));
}

#[tokio::test]
pub async fn an_output_that_never_came_is_answered_with_the_receipt() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::status(500, "")));
    bench.ledger.fail(Fault::SettledBeforeDoubt);
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!((&answer["outcome"], &answer["content"]), (&json!("undelivered"), &json!([])));
    assert_eq!(answer["receipt"]["status"], "settled");
    assert_eq!(bench.calls().1, 1, "a story that was overtaken sends nothing");
    assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await, answer, "the seller has still no answer");
    assert_eq!((bench.calls().1, bench.signatures()), (2, 1));
}

#[tokio::test]
pub async fn a_settled_payment_of_which_nothing_is_stored_is_answered_with_the_receipt() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::status(500, "")));
    bench.ledger.fail(Fault::PayloadNotStored);
    bench.ledger.fail(Fault::SettledBeforeDoubt);
    bench.call(json!({"idempotencyKey": KEY})).await;
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!((&answer["outcome"], &answer["content"]), (&json!("evicted"), &json!([])));
    assert_eq!(answer["receipt"]["settledAmount"], "10000");
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn a_call_that_is_in_flight_elsewhere_is_waited_for_and_then_reported() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::Hang));
    let key = || json!({"idempotencyKey": KEY});
    let first = bench.call(key());
    let second = async {
        while bench.calls().1 == 0 {
            tokio::task::yield_now().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bench.call(key()).await
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(said(&second), ("SETTLEMENT_UNKNOWN", "in_flight", "unknown"));
    assert_eq!(said(&first), ("SETTLEMENT_UNKNOWN", "no_answer", "unknown"));
    assert_eq!(first["details"]["paymentIdentifier"], second["details"]["paymentIdentifier"]);
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn a_row_whose_owner_is_gone_is_in_doubt() {
    let bench = Bench::new().await;
    bench.ledger.fail(Fault::SettleUnavailable);
    bench.ledger.fail(Fault::PayloadNotStored);
    let first = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!(first["recorded"], false);
    assert_eq!(bench.state(&first).await.0, "Reserved");
    bench.later(LEASE);
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "lease_expired".into()));
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn a_payment_in_doubt_is_not_paid_again() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::Cut));
    bench.ledger.fail(Fault::PayloadNotStored);
    bench.call(json!({"idempotencyKey": KEY})).await;
    bench.says(|s| s.paid = None);
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    assert_eq!((bench.calls().1, bench.signatures()), (1, 1));
}

#[tokio::test]
pub async fn a_released_payment_is_answered_with_its_reason() {
    let mut change = Change::default();
    change.settings.sign_within = Duration::ZERO;
    let bench = Bench::with(change).await;
    let key = || json!({"idempotencyKey": KEY});
    assert_eq!(said(&bench.call(key()).await), ("PAYMENT_REJECTED", "sign_window_missed", "no"));
    let answer = bench.call(key()).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "sign_window_missed", "no"));
    assert_eq!(answer["details"]["phase"], "lookup");
}

#[tokio::test]
pub async fn a_key_belongs_to_one_call() {
    let bench = Bench::new().await;
    bench.call(json!({"idempotencyKey": KEY})).await;
    let other = bench.call(json!({"idempotencyKey": KEY, "arguments": {"city": "Thun"}})).await;
    assert_eq!(said(&other), ("INVALID_ARGUMENT", "idempotency_conflict", "no"));
    bench.says(|s| s.unpaid = Some(rpc_error(-32603, "down")));
    let dearer = bench.call(json!({"idempotencyKey": KEY, "maxAtomicAmount": "30000"})).await;
    assert!(dearer["receipt"].is_object(), "the maximum is no part of the call's identity: {dearer}");
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn a_ledger_that_fails_after_the_row_was_seen_does_not_say_that_nothing_moved() {
    let bench = Bench::new().await;
    let paid = bench.call(json!({"idempotencyKey": KEY})).await;
    bench.ledger.fail(Fault::OutcomeUnavailable);
    let error = bench.try_call(json!({"idempotencyKey": KEY}), CancellationToken::new()).await.unwrap_err();
    assert_eq!(error.code, -32603);
    let data: serde_json::Value = serde_json::from_str(error.data.unwrap().get()).unwrap();
    assert_eq!(said(&data), ("INTERNAL", "ledger_unavailable", "unknown"));
    assert_eq!(data["details"]["paymentIdentifier"], paid["paymentIdentifier"]);
    assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await, paid);
    assert_eq!(bench.calls(), (1, 1));
}
