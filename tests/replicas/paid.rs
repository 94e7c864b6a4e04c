//! A paid call whose stream dies is paid once, and its outcome is there for whoever asks again, at any replica.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tollway::ledger::State;

use super::{ALICE, PATIENCE, Plan, Replica, request, ring, soon};
use crate::pay::bench::{Bench, all, output, receipt, result, with_receipt};
use crate::pay::server::Reply;

fn pays(bench: &Bench, id: u32, change: Value) -> String {
    let params = json!({"name": "x402_call_resource", "arguments": bench.arguments(change)});
    request(&id.to_string(), "tools/call", &params.to_string())
}

#[tokio::test]
async fn a_paid_call_outlives_its_stream() {
    for change in [json!({}), json!({"idempotencyKey": "key-0123456789-abc"})] {
        let bench = Bench::new().await;
        let ring = ring();
        let replicas = [
            Replica::before(bench.tools.clone(), Plan::new(&ring)).await,
            Replica::before(bench.tools.clone(), Plan::new(&ring)).await,
        ];
        let (paid, word) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let signal = paid.clone();
        bench.says(|s| {
            s.on_paid = Some(Arc::new(move || signal.notify_one()));
            let right = result(&with_receipt(output(), &receipt()));
            s.paid_next.push_back(Reply::When(word.clone(), Box::new(right)));
        });
        let sse = replicas[0].stream(ALICE).await;
        let endpoint = sse.endpoint.clone();
        assert_eq!(replicas[1].post(ALICE, &endpoint, &pays(&bench, 1, change.clone())).await.status, 202);
        tokio::time::timeout(PATIENCE, paid.notified()).await.expect("nothing was paid");
        drop(sse);
        let ping = request("2", "ping", "{}");
        soon(|| async { replicas[1].post(ALICE, &endpoint, &ping).await.status == 404 }).await;
        word.notify_one();
        soon(|| async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let rows = bench.ledger.real.list(&all()).await.unwrap();
            rows.first().is_some_and(|row| row.state == State::Settled && row.has_outcome && !row.answered)
        })
        .await;
        let mut again = replicas[1].stream(ALICE).await;
        let endpoint = again.endpoint.clone();
        assert_eq!(replicas[0].post(ALICE, &endpoint, &pays(&bench, 3, change)).await.status, 202);
        let answer = again.until("\n\n").await;
        assert!(answer.contains("sunny") && answer.contains(r#""id":3"#), "{answer}");
        assert_eq!((bench.calls().1, bench.signatures()), (1, 1));
        assert_eq!(bench.ledger.real.list(&all()).await.unwrap().len(), 1);
    }
}
