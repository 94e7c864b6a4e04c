//! How many answers so many clients get, each of which asks again as soon as it has one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use tollway::http::Client;

/// Answers, and the seconds that they took. Every answer is checked: an error that is fast is no throughput.
pub async fn answers(
    http: &Client,
    seconds: u64,
    clients: u64,
    request: impl Fn() -> http::request::Builder,
    body: &'static str,
) -> (u64, f64) {
    let answers = AtomicU64::new(0);
    let started = Instant::now();
    let until = started + Duration::from_secs(seconds);
    let client = || async {
        while Instant::now() < until {
            let request = request()
                .header("content-type", "application/json")
                .header("accept", "application/json, text/event-stream")
                .body(Bytes::from_static(body.as_bytes()))
                .expect("a request");
            let response = http.send(request).await.expect("an answer");
            let body = response.body();
            assert!(body.len() > 4096 && response.status() == 200, "{}", String::from_utf8_lossy(body));
            answers.fetch_add(1, Ordering::Relaxed);
        }
    };
    join_all((0..clients).map(|_| client())).await;
    (answers.load(Ordering::Relaxed), started.elapsed().as_secs_f64())
}
