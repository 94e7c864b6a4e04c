//! Chain RPCs that lie to get a signature over something else, or a longer one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::{Value, json};

use super::scene::{Behaviour, Change, Scene};
use crate::pay::server::Reply;
use crate::stellar::{local, prepare};

fn silent() -> std::collections::BTreeMap<&'static str, Behaviour> {
    let silent: Behaviour = |_, _, _| Reply::Cut;
    ["lied-to", "before", "after"].map(|name| (name, silent)).into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn a_node_that_rewrites_the_payment_gets_no_signature_over_it_and_the_row_is_in_doubt() {
    for (what, lie) in prepare::lies() {
        let local = Arc::new(local());
        let thief = local.thief.clone();
        let url = local
            .liar(move |method, answer| {
                // The balance is simulated too, and has no authorization.
                if method == "simulateTransaction" && !answer["result"]["results"][0]["auth"][0].is_null() {
                    lie(&thief, answer);
                }
            })
            .await;
        let scene = Scene::new(Change { behaviours: silent(), rpc: Some((local, url)), ..Change::default() }).await;
        let answer = scene.call("lied-to").await;
        assert_eq!(
            (&answer["code"], &answer["details"]["reason"]),
            (&json!("UPSTREAM_PROTOCOL_ERROR"), &json!("chain_rpc")),
            "{what}: {answer}"
        );
        assert_eq!(answer["details"]["moneyMayHaveMoved"], "unknown", "{what}");
        let row = scene.rows().await.remove(0);
        assert_eq!((row.state.as_str(), row.reason.as_deref()), ("in_doubt", Some("chain_rpc")), "{what}");
        assert_eq!(scene.signed().len(), 1, "{what}");
        scene.signed_nothing_but_our_transfers(10).await;
        assert!(scene.shop.paid.lock().unwrap().is_empty(), "{what}: the seller was paid");
        scene.call("lied-to").await;
        assert_eq!(scene.signed().len(), 1, "{what}: signed again");
        scene.finish().await;
        assert_eq!(scene.ends().await["lied-to"], ("released".into(), "expired_unspent".into(), 0), "{what}");
        assert_eq!(scene.local.network.balance(&scene.local.thief.id()), Some(0), "{what}");
    }
}

/// What a node says of the newest ledger, in every method that has it.
fn shift(method: &str, answer: &mut Value, ledgers: i64) {
    let name = if method == "getLatestLedger" { "sequence" } else { "latestLedger" };
    if let Some(sequence) = answer["result"][name].as_i64() {
        answer["result"][name] = json!((sequence + ledgers).max(1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn a_node_that_moves_the_ledger_number_prolongs_no_signature() {
    for ledgers in [1_000, 3_000_000, 2_000_000_000] {
        let local = Arc::new(local());
        let lies = Arc::new(AtomicBool::new(false));
        let now = lies.clone();
        let url = local
            .liar(move |method, answer| {
                if now.load(Ordering::SeqCst) {
                    shift(method, answer, ledgers);
                }
            })
            .await;
        let scene = Scene::new(Change { behaviours: silent(), rpc: Some((local, url)), ..Change::default() }).await;
        scene.call("before").await;
        lies.store(true, Ordering::SeqCst);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let answer = scene.call("lied-to").await;
        assert_eq!(answer["details"]["moneyMayHaveMoved"], "no", "{ledgers}: {answer}");
        lies.store(false, Ordering::SeqCst);
        scene.call("after").await;
        assert_eq!(scene.signed().len(), 2, "{ledgers}");
        scene.signed_nothing_but_our_transfers(10).await;
        scene.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn a_node_that_keeps_the_signature_and_loses_its_answer_is_asked_once() {
    // It holds a live signature now, whatever it says.
    let local = Arc::new(local());
    let simulated = Arc::new(AtomicU64::new(0));
    let count = simulated.clone();
    let url = local
        .liar(move |method, answer| {
            if method == "simulateTransaction" && !answer["result"]["results"][0]["auth"][0].is_null() {
                count.fetch_add(1, Ordering::SeqCst);
                *answer = json!({"jsonrpc": "2.0", "id": answer["id"], "error": {"code": -1, "message": "lost"}});
            }
        })
        .await;
    let scene = Scene::new(Change { behaviours: silent(), rpc: Some((local, url)), ..Change::default() }).await;
    let answer = scene.call("lied-to").await;
    assert_eq!(answer["details"]["reason"], "simulation_failed", "{answer}");
    scene.call("lied-to").await;
    assert_eq!((scene.signed().len(), simulated.load(Ordering::SeqCst)), (1, 1), "asked once, signed once");
    scene.signed_nothing_but_our_transfers(10).await;
    scene.finish().await;
    assert_eq!(scene.ends().await["lied-to"].0, "released");
}
