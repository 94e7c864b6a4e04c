//! SIGTERM, in the order that a cluster needs.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tollway::ledger::State;

use super::{KEY, Serve, post, until};
use crate::pay::bench::{output, receipt, result, with_receipt};
use crate::pay::server::Reply;

/// A paid call whose seller answers once `word` is given.
async fn in_flight(serve: &Serve, word: &Arc<Notify>) -> tokio::task::JoinHandle<Value> {
    let session = serve.session().await.unwrap();
    let answer = Reply::When(word.clone(), Box::new(result(&with_receipt(output(), &receipt()))));
    serve.bench.says(|says| says.paid = Some(answer));
    let before = serve.bench.calls().1;
    let (at, call) = (serve.public.clone(), serve.paid_call(json!({"idempotencyKey": "in-flight-0123456789"})));
    let running = tokio::spawn(async move { post(&at, Some(&session), &call).await.unwrap().json() });
    until("the paid request at the seller", async || (serve.bench.calls().1 > before).then_some(())).await;
    running
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_unreadies_first_and_a_paid_call_in_flight_gets_its_receipt() {
    let mut serve = Serve::start(json!({"unready_wait_ms": 2_000, "drain_ms": 60_000})).await;
    // A payment in doubt, which the sweep reads at an RPC that does not answer.
    let session = serve.session().await.unwrap();
    serve.bench.says(|says| {
        says.paid_next.push_back(Reply::Cut);
        says.rpc.insert("getLedgerEntries", Reply::Hang);
    });
    let doubt = serve.paid_call(json!({"idempotencyKey": "in-doubt-0123456789", "arguments": {"city": "Basel"}}));
    let unknown = serve.post(Some(&session), &doubt).await.unwrap();
    assert!(unknown.body.contains("SETTLEMENT_UNKNOWN"), "{}", unknown.body);
    let word = Arc::new(Notify::new());
    let running = in_flight(&serve, &word).await;
    let mut stream = TcpStream::connect(&serve.public).await.unwrap();
    let get = format!(
        "GET /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nMcp-Session-Id: {session}\r\n\
         MCP-Protocol-Version: 2025-11-25\r\nAccept: text/event-stream\r\n\r\n"
    );
    stream.write_all(get.as_bytes()).await.unwrap();
    until("the stream", async || serve.probe("/metrics").await.body.contains("tollway_streams_open 1").then_some(()))
        .await;
    until("the sweep's lease", async || {
        let rows = serve.rows().await;
        rows.iter().any(|row| row.state == State::InDoubt && row.leased).then_some(())
    })
    .await;

    serve.signal("-TERM");
    let unready = until("an unready server", async || {
        let answer = serve.probe("/readyz").await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(unready.json()["reason"], "draining");
    serve.session().await.expect("what is not ready still serves");
    assert_eq!(serve.health().await["status"], "draining");

    until("the end of accepting", async || TcpStream::connect(&serve.public).await.is_err().then_some(())).await;
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    assert!(String::from_utf8_lossy(&all).contains("retry: 3000"), "the stream ends with a hint");
    assert_eq!(serve.probe("/readyz").await.status, 503, "probes answer to the end");
    word.notify_one();
    let answer = running.await.unwrap();
    assert_eq!(answer["result"]["structuredContent"]["receipt"]["status"], "settled", "{answer}");
    assert_eq!(serve.ended().await, Some(0));
    let rows = serve.rows().await;
    let states: Vec<_> = rows.iter().map(|row| (row.state, row.leased)).collect();
    assert_eq!(states, [(State::Settled, false), (State::InDoubt, false)], "nothing is left leased");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_at_once_and_leaves_the_payment_to_the_ledger() {
    let mut serve = Serve::start(json!({"unready_wait_ms": 0, "drain_ms": 600_000})).await;
    let word = Arc::new(Notify::new());
    let running = in_flight(&serve, &word).await;
    serve.signal("-TERM");
    until("the end of accepting", async || TcpStream::connect(&serve.public).await.is_err().then_some(())).await;
    serve.signal("-TERM");
    assert_eq!(serve.ended().await, Some(1));
    running.abort();
    let rows = serve.rows().await;
    assert_eq!((rows.len(), rows[0].state), (1, State::Reserved));
}
