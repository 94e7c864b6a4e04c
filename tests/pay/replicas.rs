//! Any replica serves any call: what one has begun or ended, another answers for, over nothing but the ledger.

use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;

use super::bench::{self, Bench, Change, all, output};
use super::lookup::{KEY, LEASE};
use super::recover::both;
use super::server::Reply;

async fn ask(bench: &Bench, at: &AgentTools, call: &Value) -> Box<RawValue> {
    let arguments = bench.arguments(call.clone());
    bench.at(at, "x402_call_resource", arguments, CancellationToken::new()).await.unwrap()
}

fn value(result: &RawValue) -> Value {
    serde_json::from_str(bench::structured(result).get()).unwrap()
}

/// A slow machine is only slow.
fn patient() -> Change {
    let mut change = Change::default();
    change.settings.wait_in_flight = Duration::from_secs(20);
    change.settings.paid_call_timeout = Some(Duration::from_secs(20));
    change
}

async fn paid_calls(bench: &Bench, calls: usize) {
    while bench.calls().1 < calls {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_call_that_is_in_flight_on_one_replica_is_waited_for_on_another() {
    for call in both() {
        let bench = Bench::with(patient()).await;
        let other = bench.another().await;
        let word = Arc::new(Notify::new());
        let output = bench::result(&bench::with_receipt(output(), &bench::receipt()));
        bench.says(|s| s.paid_next.push_back(Reply::When(word.clone(), Box::new(output))));
        let second = async {
            paid_calls(&bench, 1).await;
            let asked = ask(&bench, &other, &call);
            let told = async {
                // The other replica has met the row by now, or meets the settled one: both give the same answer.
                tokio::time::sleep(Duration::from_millis(50)).await;
                word.notify_one();
            };
            tokio::join!(asked, told).0
        };
        let (first, second) = tokio::join!(ask(&bench, &bench.tools, &call), second);
        assert_eq!(first.get(), second.get(), "byte for byte");
        assert_eq!((bench.calls().1, bench.signatures()), (1, 1));
    }
}

#[tokio::test]
async fn who_waits_on_another_replica_for_too_long_hears_that_it_is_in_flight() {
    let bench = Bench::new().await;
    let other = bench.another().await;
    let word = Arc::new(Notify::new());
    bench.says(|s| s.paid_next.push_back(Reply::When(word.clone(), Box::new(Reply::Cut))));
    let call = json!({"idempotencyKey": KEY});
    let second = async {
        paid_calls(&bench, 1).await;
        let told = value(&ask(&bench, &other, &call).await);
        word.notify_one();
        told
    };
    let (_, told) = tokio::join!(ask(&bench, &bench.tools, &call), second);
    assert_eq!(
        (&told["code"], &told["details"]["reason"], &told["details"]["moneyMayHaveMoved"]),
        (&json!("SETTLEMENT_UNKNOWN"), &json!("in_flight"), &json!("unknown")),
        "{told}"
    );
    assert_eq!(bench.signatures(), 1);
}

#[tokio::test]
async fn a_settled_call_is_answered_by_another_replica_byte_for_byte() {
    for call in both() {
        let bench = Bench::new().await;
        let first = ask(&bench, &bench.tools, &call).await;
        let other = bench.another().await;
        assert_eq!(ask(&bench, &other, &call).await.get(), first.get());
        assert_eq!((bench.calls().1, bench.signatures()), (1, 1));
    }
}

#[tokio::test]
async fn the_same_key_for_another_call_is_a_conflict_on_every_replica() {
    let bench = Bench::new().await;
    ask(&bench, &bench.tools, &json!({"idempotencyKey": KEY})).await;
    let other = bench.another().await;
    let told = value(&ask(&bench, &other, &json!({"idempotencyKey": KEY, "arguments": {"city": "Thun"}})).await);
    assert_eq!(told["details"]["reason"], "idempotency_conflict", "{told}");
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
async fn what_a_dead_replica_had_sent_another_sends_again_with_the_identical_bytes() {
    for call in both() {
        let bench = Bench::with(patient()).await;
        let other = bench.another().await;
        let never = Arc::new(Notify::new());
        bench.says(|s| s.paid_next.push_back(Reply::When(never.clone(), Box::new(Reply::Cut))));
        let death = async {
            paid_calls(&bench, 1).await;
            while !bench.ledger.real.list(&all()).await.unwrap().first().is_some_and(|row| row.has_payload) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            bench.kill();
        };
        let (_, ()) = tokio::join!(ask(&bench, &bench.tools, &call), death);
        bench.later(LEASE);
        let told = value(&ask(&bench, &other, &call).await);
        assert_eq!(told["content"], output()["content"], "{told}");
        let sent = bench.paid_params();
        assert_eq!((sent.len(), bench.signatures()), (2, 1));
        assert_eq!(sent[0], sent[1], "every byte of the params");
        assert_eq!(
            value(&ask(&bench, &*bench.another().await, &call).await),
            told,
            "and a third has it from the ledger"
        );
    }
}
