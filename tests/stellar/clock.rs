//! What ledger it is: neither an RPC nor a seller decides how long a signature lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tollway::chain::ChainError;
use tollway::ports::{Clock, World};
use tollway::sandbox::chain::Node;

use super::{Asked, local};

#[tokio::test]
async fn the_smallest_number_counts_and_is_asked_once_for_many() {
    let local = local();
    for _ in 0..5 {
        local.network.close_now();
    }
    let asked = Asked::default();
    let noted = asked.clone();
    let counted = local.liar(move |method, _| noted.note(method)).await;
    let mut settings = local.settings(vec![counted, local.node(Node::lagging(3)).await]);
    settings.min_ledger_ms = 60_000;
    let stellar = local.with(settings);
    let points = futures_util::future::join_all((0..20).map(|_| stellar.ledger())).await;
    assert!(points.iter().all(|p| p.as_ref().unwrap().sequence == local.network.latest().sequence - 3));
    assert_eq!((asked.count("getNetwork"), asked.count("getLatestLedger")), (1, 1));
}

/// A node's ledger number and close time, moved.
#[derive(Clone, Default)]
struct Moved {
    ledgers: Arc<AtomicI64>,
    seconds: Arc<AtomicI64>,
}
impl Moved {
    fn set(&self, ledgers: i64, seconds: i64) {
        self.ledgers.store(ledgers, Ordering::SeqCst);
        self.seconds.store(seconds, Ordering::SeqCst);
    }
    fn lie(&self, method: &str, answer: &mut Value) {
        if method == "getLatestLedger" {
            let result = &mut answer["result"];
            let ledger = result["sequence"].as_i64().unwrap() + self.ledgers.load(Ordering::SeqCst);
            let time: i64 = result["closeTime"].as_str().unwrap().parse().unwrap();
            result["sequence"] = json!(ledger);
            result["closeTime"] = json!((time + self.seconds.load(Ordering::SeqCst)).to_string());
        }
    }
}

#[tokio::test]
async fn a_number_that_ran_ahead_fell_back_or_closed_at_another_time_is_refused() {
    let local = local();
    let moved = Moved::default();
    let lie = moved.clone();
    let url = local.liar(move |method, answer| lie.lie(method, answer)).await;
    let mut settings = local.settings(vec![url]);
    // Believed for 10 ms; what passes while the test runs explains some ledgers, never 100,000.
    settings.min_ledger_ms = 20;
    let stellar = local.with(settings);
    const BASE: i64 = 1_000_000;
    for (ledgers, seconds, believed) in [
        (0, 0, true),
        (40, 0, true),
        (100_000, 0, false),
        (20, 0, true),
        (-100_000, 0, false),
        (0, -3_600, false),
        (0, 3_600, false),
        (0, 0, true),
    ] {
        moved.set(BASE + ledgers, seconds);
        tokio::time::sleep(Duration::from_millis(15)).await;
        let point = stellar.ledger().await;
        match &point {
            Ok(point) => assert_eq!(i64::from(point.sequence), i64::from(local.here().sequence) + BASE + ledgers),
            Err(error) => assert!(matches!(error, ChainError::Lying(_)), "{error}"),
        }
        assert_eq!(point.is_ok(), believed, "{ledgers} ledgers, {seconds} s: {point:?}");
    }
}

#[tokio::test]
async fn one_lying_node_does_not_stop_the_honest_one() {
    let local = local();
    let moved = Moved::default();
    moved.set(0, -3_600);
    let lie = moved.clone();
    let liar = local.liar(move |method, answer| lie.lie(method, answer)).await;
    let stellar = local.stellar(vec![liar, local.node(Node::default()).await]);
    assert_eq!(stellar.ledger().await.unwrap(), local.here());
}

struct Ahead(Arc<dyn Clock>, AtomicI64);
impl Clock for Ahead {
    fn unix_ms(&self) -> u64 {
        self.0.unix_ms().saturating_add_signed(self.1.load(Ordering::SeqCst))
    }
}

/// Eight hours of sleep do not move the monotonic clock; the chain went on.
#[tokio::test]
async fn a_machine_that_slept_believes_the_ledgers_that_closed_meanwhile() {
    let local = local();
    let clock = Arc::new(Ahead(local.world.clock.clone(), AtomicI64::new(0)));
    let world = World { clock: clock.clone(), ..local.world.clone() };
    let moved = Moved::default();
    let lie = moved.clone();
    let url = local.liar(move |method, answer| lie.lie(method, answer)).await;
    let mut settings = local.settings(vec![url]);
    settings.min_ledger_ms = 4_000;
    let stellar = local.at(settings, world);
    stellar.ledger().await.unwrap();
    const HOURS: i64 = 8 * 3_600;
    clock.1.store(HOURS * 1_000, Ordering::SeqCst);
    moved.set(HOURS / 6, HOURS);
    assert_eq!(i64::from(stellar.ledger().await.unwrap().sequence), i64::from(local.here().sequence) + HOURS / 6);
}

/// Versions before 22 give the close time only beside a transaction.
#[tokio::test]
async fn an_older_node_is_asked_for_the_close_time_another_way() {
    let local = local();
    let url = local
        .liar(|method, answer| {
            if method == "getLatestLedger" {
                answer["result"].as_object_mut().unwrap().remove("closeTime");
            }
        })
        .await;
    assert_eq!(local.stellar(vec![url]).ledger().await.unwrap(), local.here());
}
