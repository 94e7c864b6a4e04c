//! Nodes that are gone, late or lying. None of them frees money.

use serde_json::{Value, json};
use tollway::sandbox::chain::Node;
use url::Url;

use super::bench::{Bench, open_still, released, settled, unproved};

async fn nowhere() -> Url {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap()
}

fn hides(method: &str, answer: &mut Value) {
    let asked_for_an_entry = |entry: &Value| entry["liveUntilLedgerSeq"].is_number();
    if method == "getLedgerEntries"
        && let Some(entries) = answer["result"]["entries"].as_array_mut()
    {
        entries.retain(|entry| !asked_for_an_entry(entry));
    }
}

#[tokio::test]
async fn a_node_that_is_down_delays_a_release_and_no_settlement() {
    let bench = Bench::new().await;
    let (unpaid, paid) = (bench.doubt("liars-down-000000").await, bench.doubt("liars-down-000001").await);
    let hash = bench.settle(&paid).await;
    bench.close_to(unpaid.row.authorization.dead_after + 1);
    let sweep = bench.sweep(vec![nowhere().await, bench.node().await]);
    let report = bench.pass(&sweep).await;
    assert_eq!((report.taken, report.settled, report.inconclusive), (2, 1, 1), "{report:?}");
    assert_eq!(bench.state(&unpaid).await.0, "in_doubt");
    assert_eq!(bench.row(paid.id).await.transaction, Some(hash), "found by the node that is there");
    assert_eq!(bench.pass(&bench.sweep(vec![nowhere().await])).await, unproved());
    assert_eq!(bench.pass(&bench.honest().await).await, released());
    bench.audit().await;
}

#[tokio::test]
async fn one_node_that_shows_the_payment_outvotes_all_that_hide_it() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("liars-hide-000000").await;
    let hash = bench.settle(&doubt).await;
    bench.close_to(doubt.row.authorization.dead_after + 1);
    let (first, second) = (bench.local.liar(hides).await, bench.local.liar(hides).await);
    let sweep = bench.sweep(vec![first, second, bench.node().await]);
    assert_eq!(bench.pass(&sweep).await, settled());
    assert_eq!(bench.row(doubt.id).await.transaction, Some(hash));
    bench.audit().await;
}

#[tokio::test]
async fn a_node_that_lags_never_makes_a_live_authorization_look_dead_nor_a_made_payment_unmade() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("liars-late-000000").await;
    bench.settle(&doubt).await;
    // It has not seen the payment, and not the end either.
    let late = bench.local.node(Node::lagging(500)).await;
    bench.close_to(doubt.row.authorization.dead_after + 3);
    assert_eq!(bench.pass(&bench.sweep(vec![late.clone()])).await, open_still());
    assert_eq!(bench.pass(&bench.sweep(vec![late, bench.node().await])).await, settled());
    bench.audit().await;
}

/// Says that the chain is `ledgers` further than it is, everywhere and with a fresh close time.
fn ahead(ledgers: u64) -> impl Fn(&str, &mut Value) + Send + Sync + 'static {
    move |method, answer| {
        let name = if method == "getLatestLedger" { "sequence" } else { "latestLedger" };
        if let Some(sequence) = answer["result"][name].as_u64() {
            answer["result"][name] = json!(sequence + ledgers);
        }
    }
}

#[tokio::test]
async fn a_node_that_says_the_end_has_come_is_not_believed_before_it_can_have_come() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("liars-ahead-00000").await;
    // Beside an honest node, and alone to a process that has just started and knows no earlier ledger.
    let liar = bench.local.liar(ahead(20)).await;
    assert_eq!(bench.pass(&bench.sweep(vec![liar.clone(), bench.node().await])).await, open_still());
    let mut settings = bench.local.settings(vec![liar]);
    settings.min_ledger_ms = 4_000;
    let alone = bench.sweep_with(bench.ledger.clone(), bench.local.with(settings));
    assert_eq!(bench.pass(&alone).await, unproved());
    // It stays alive, and pays.
    let hash = bench.settle(&doubt).await;
    assert_eq!(bench.pass(&bench.honest().await).await, settled());
    assert_eq!(bench.row(doubt.id).await.transaction, Some(hash));
    bench.audit().await;
}

#[tokio::test]
async fn an_answer_about_another_entry_is_no_absence() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("liars-key-0000000").await;
    bench.settle(&doubt).await;
    bench.close_to(doubt.row.authorization.dead_after + 1);
    let is_nonce = |answer: &Value| answer["result"]["entries"][0]["liveUntilLedgerSeq"].is_number();
    let renamed = bench
        .local
        .liar(move |_, answer| {
            if is_nonce(answer) {
                answer["result"]["entries"][0]["key"] = json!("AAAA");
            }
        })
        .await;
    let twice = bench
        .local
        .liar(move |_, answer| {
            if is_nonce(answer) {
                let entry = answer["result"]["entries"][0].clone();
                answer["result"]["entries"] = json!([entry, entry]);
            }
        })
        .await;
    let other = bench
        .local
        .liar(move |_, answer| {
            if is_nonce(answer) {
                answer["result"]["entries"][0]["xdr"] = json!("AAAAAA==");
            }
        })
        .await;
    for url in [renamed, twice, other] {
        assert_eq!(bench.pass(&bench.sweep(vec![url])).await, unproved());
        assert_eq!(bench.state(&doubt).await.0, "in_doubt");
    }
    assert_eq!(bench.pass(&bench.honest().await).await, settled());
    bench.audit().await;
}

#[tokio::test]
async fn a_transaction_that_has_not_our_nonce_is_not_taken_for_ours() {
    let bench = Bench::new().await;
    let (ours, other) = (bench.doubt("liars-other-00000").await, bench.doubt("liars-other-00001").await);
    let (hash, foreign) = (bench.settle(&ours).await, bench.settle(&other).await);
    let shown = foreign.clone();
    // Its events name the other payment's transaction alone: the nonce is used, but nobody shows by what.
    let swaps = bench
        .local
        .liar(move |method, answer| {
            if method == "getEvents" {
                for event in answer["result"]["events"].as_array_mut().unwrap() {
                    event["txHash"] = json!(shown);
                }
            }
        })
        .await;
    // It gives the other payment's transaction under our hash.
    let (ours_hash, other_hash) = (hash.clone(), foreign.clone());
    let honest = bench.node().await;
    let report = bench.pass(&bench.sweep(vec![swaps])).await;
    assert_eq!((report.taken, report.settled), (2, 2));
    assert_eq!(bench.row(ours.id).await.transaction, None, "settled by its nonce, without a transaction");
    assert_eq!(bench.row(other.id).await.transaction, Some(other_hash));
    let chain = bench.local.stellar(vec![honest]);
    let tollway::chain::Question::Stellar(question) = tollway::pay::question(&ours.row).unwrap();
    use tollway::chain::stellar::UsedBy;
    assert!(matches!(chain.used_by(question, &ours_hash).await, Ok(UsedBy::This { .. })));
    assert!(matches!(chain.used_by(question, &foreign).await, Ok(UsedBy::Another { .. })));
    assert!(matches!(chain.used_by(question, &"0".repeat(64)).await, Ok(UsedBy::NotFound)));
    assert!(chain.used_by(question, "no hash").await.is_err());
    bench.audit().await;
}

#[tokio::test]
async fn a_transaction_under_anothers_hash_is_a_lie() {
    let bench = Bench::new().await;
    let (ours, other) = (bench.doubt("liars-under-00000").await, bench.doubt("liars-under-00001").await);
    let (hash, foreign) = (bench.settle(&ours).await, bench.settle(&other).await);
    let honest = bench.node().await;
    let asked = json!({"jsonrpc": "2.0", "id": 1, "method": "getTransaction", "params": {"hash": hash}});
    let request = http::Request::post(honest.as_str())
        .header("content-type", "application/json")
        .body(axum::body::Bytes::from(asked.to_string()))
        .unwrap();
    let shown = crate::stellar::client(&bench.local.world).send(request).await.unwrap();
    let shown: Value = serde_json::from_slice(shown.body()).unwrap();
    let lies = bench
        .local
        .liar(move |method, answer| {
            if method == "getTransaction" {
                answer["result"] = shown["result"].clone();
            }
        })
        .await;
    let chain = bench.local.stellar(vec![lies]);
    let tollway::chain::Question::Stellar(question) = tollway::pay::question(&ours.row).unwrap();
    assert!(matches!(chain.used_by(question, &foreign).await, Err(tollway::chain::ChainError::Lying(_))));
    assert_eq!(bench.pass(&bench.honest().await).await.settled, 2);
    bench.audit().await;
}

#[tokio::test]
async fn a_history_that_is_cut_short_releases_nothing() {
    let bench = Bench::new().await;
    let doubt = bench.doubt("liars-short-00000").await;
    bench.settle(&doubt).await;
    bench.close_to(doubt.row.authorization.at + 60);
    // The node behind the same address that answers for events is behind the payment's end.
    let last = doubt.row.authorization.dead_after;
    let behind = bench
        .local
        .liar(move |method, answer| {
            if method == "getEvents" {
                answer["result"]["events"] = json!([]);
                answer["result"]["latestLedger"] = json!(last - 1);
            }
        })
        .await;
    assert_eq!(bench.pass(&bench.sweep(vec![behind])).await, unproved());
    let newer = bench
        .local
        .liar(|method, answer| {
            if method == "getEvents" {
                answer["result"]["events"] = json!([]);
                answer["result"]["oldestLedger"] = answer["result"]["latestLedger"].clone();
            }
        })
        .await;
    assert_eq!(bench.pass(&bench.sweep(vec![newer])).await, unproved());
    assert_eq!(bench.pass(&bench.honest().await).await, settled());
    bench.audit().await;
}
