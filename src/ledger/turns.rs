//! In which order payments that are due are given out: agents take turns, of one agent the oldest first, and each network
//! by itself. Held against every store.

use super::table::{Bench, CALL, LEASE_MS, limit, unit};
use super::*;

/// A payment of its own, by agent and network.
pub(crate) fn intent(n: u32, agent: &str, network: &str) -> Intent {
    let mut intent = CALL.intent();
    let mut id = [0; 32];
    id[..4].copy_from_slice(&n.to_be_bytes());
    intent.payment_id = PaymentId::from_bytes(id);
    intent.id_nonce = std::array::from_fn(|i| id[i]);
    intent.authorization.nonce = n.to_string();
    intent.quote.agent = agent.parse().unwrap();
    intent.quote.idempotency_key = Some(format!("idempotency-key-{n}").parse().unwrap());
    intent.quote.offer.network = network.parse().unwrap();
    intent
}

/// Room for everybody on these networks.
pub(crate) async fn room(ledger: &dyn Ledger, networks: &[&str]) {
    let limit = |network: &&str| Limit {
        subject: Subject::EachAgent,
        unit: Unit { network: network.parse().unwrap(), ..unit() },
        per_day: Some("1000000".parse().unwrap()),
        ..limit()
    };
    let limits: Vec<_> = networks.iter().map(limit).collect();
    ledger.replace_limits("file", &limits).await.unwrap();
}

pub(crate) async fn turns(bench: Box<dyn Bench>) {
    const OURS: &str = "stellar:testnet";
    const OTHER: &str = "stellar:other";
    let ledger = bench.ledger();
    room(&*ledger, &[OURS, OTHER]).await;
    let reserve = async |n: u32, agent: &str, network: &str| {
        let decided = ledger.decide(&intent(n, agent, network)).await.unwrap();
        assert!(matches!(decided, Decision::Fresh(_)));
        bench.advance(10);
    };
    // One agent has left twenty before two others left theirs.
    for n in 0..20 {
        reserve(n, "many", OURS).await;
    }
    reserve(20, "few", OURS).await;
    reserve(21, "few", OURS).await;
    reserve(22, "one", OURS).await;
    reserve(23, "one", OTHER).await;
    bench.advance(LEASE_MS);

    let (ours, other): (Network, Network) = (OURS.parse().unwrap(), OTHER.parse().unwrap());
    let numbers = async |on: On<'_>, limit: u32| {
        let due = ledger.take_due_on(on, limit, 1_000).await.unwrap();
        let number = |(payment, _): &(Payment, Lease)| payment.authorization.nonce.parse().unwrap();
        due.iter().map(number).collect::<Vec<u32>>()
    };
    assert_eq!(numbers(On::One(&ours), 4).await, [0, 20, 22, 1]);
    assert_eq!(numbers(On::One(&ours), 3).await, [2, 21, 3]);
    assert_eq!(numbers(On::Other(&[ours.clone(), other.clone()]), 9).await, [] as [u32; 0]);
    assert_eq!(numbers(On::Other(std::slice::from_ref(&ours)), 9).await, [23]);
    assert_eq!(numbers(On::One(&other), 9).await, [] as [u32; 0], "it is leased");
    assert_eq!(numbers(On::Other(&[]), 2).await, [4, 5]);
    // What was left for too long is due again, behind nobody: the others of that agent are not older.
    bench.advance(1_000);
    assert_eq!(numbers(On::One(&other), 9).await, [23]);
    assert_eq!(numbers(On::Any, 3).await, [6, 20, 22]);
    let all = numbers(On::Any, 99).await;
    assert_eq!(all.len(), 20, "{all:?}");
}
