//! Two processes at once over what only an index can decide: one key, one twin, one nonce, one transaction, each in
//! budgets whose locks do not meet.

use futures_util::future::join_all;

use super::*;
use crate::ledger::table::{CALL, amount, id, limit, unit};

const ROUNDS: u8 = 12;
const CALLERS: u8 = 6;

async fn two_processes() -> (Schema, [Arc<PostgresLedger>; 2]) {
    let schema = Schema::new().await;
    let other = Arc::new(schema.open(Some(ring(1)), Options { pool_size: 8, ..options() }).await.unwrap());
    let limit = |asset: &str| Limit {
        subject: Subject::EachAgent,
        unit: Unit { asset: asset.parse().unwrap(), ..unit() },
        per_day: Some(amount("1000000")),
        ..limit()
    };
    schema.ledger.replace_limits("file", &[limit("CUSDC"), limit("COTHER")]).await.unwrap();
    let one = schema.ledger.clone();
    (schema, [one, other])
}

/// How many reserved, and how many were told of the one that did.
async fn race(processes: &[Arc<PostgresLedger>; 2], calls: Vec<Call>) -> (usize, usize, Vec<String>) {
    let decided = calls.iter().enumerate().map(|(i, call)| {
        let (ledger, intent) = (processes[i % 2].clone(), call.intent());
        async move { ledger.decide(&intent).await }
    });
    let decided = join_all(decided).await;
    let fresh = decided.iter().filter(|d| matches!(d, Ok(Decision::Fresh(_)))).count();
    let told = |d: &&Result<Decision, LedgerError>| matches!(d, Ok(Decision::Existing(_) | Decision::Conflict(_)));
    let others = decided.iter().filter(told).count();
    (fresh, others, decided.iter().map(|d| format!("{d:?}").chars().take(120).collect()).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_key_is_one_payment_whatever_it_is_paid_in() {
    let (schema, processes) = two_processes().await;
    for round in 0..ROUNDS {
        let calls = (0..CALLERS).map(|i| Call {
            n: round * CALLERS + i + 1,
            key: Some(round + 1),
            call: i / 2,
            asset: if i % 2 == 0 { "CUSDC" } else { "COTHER" },
            ..CALL
        });
        let (fresh, told, all) = race(&processes, calls.collect()).await;
        assert_eq!((fresh, told), (1, usize::from(CALLERS) - 1), "{all:#?}");
    }
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_keyless_call_is_one_payment_whatever_it_is_paid_in() {
    let (schema, processes) = two_processes().await;
    for round in 0..ROUNDS {
        let calls = (0..CALLERS).map(|i| Call {
            n: round * CALLERS + i + 1,
            call: round + 1,
            asset: if i % 2 == 0 { "CUSDC" } else { "COTHER" },
            ..CALL
        });
        let (fresh, told, all) = race(&processes, calls.collect()).await;
        assert_eq!((fresh, told), (1, usize::from(CALLERS) - 1), "{all:#?}");
    }
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

/// Nonces are random; one that comes twice would be one authorization for two payments.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_nonce_is_one_payment_whoever_asks() {
    let (schema, processes) = two_processes().await;
    for round in 1..=ROUNDS {
        let calls = ["a", "b"].map(|agent| {
            let mut intent = Call { n: round, agent, call: round, ..CALL }.intent();
            let mut bytes = [round; 32];
            bytes[0] = agent.as_bytes()[0];
            intent.payment_id = PaymentId::from_bytes(bytes);
            intent
        });
        let decided = join_all(calls.iter().zip(&processes).map(|(intent, ledger)| ledger.decide(intent))).await;
        let fresh = decided.iter().filter(|d| matches!(d, Ok(Decision::Fresh(_)))).count();
        let refused = decided.iter().filter(|d| matches!(d, Err(LedgerError::Inconsistent(_)))).count();
        assert_eq!((fresh, refused), (1, 1), "{decided:?}");
    }
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_transaction_pays_one_payment() {
    let (schema, processes) = two_processes().await;
    for round in 0..ROUNDS {
        let (a, b) = (round * 2 + 1, round * 2 + 2);
        for (n, asset) in [(a, "CUSDC"), (b, "COTHER")] {
            assert!(matches!(schema.reserve(Call { n, call: n, asset, ..CALL }).await.unwrap(), Decision::Fresh(_)));
        }
        let transaction = format!("transaction-{round}");
        let settle = |n: u8| SettleRequest {
            payment_id: id(n),
            amount: amount("100"),
            transaction: Some(&transaction),
            evidence: Evidence::Receipt,
            outcome: None,
            unfinished: false,
        };
        let ended = futures_util::join!(processes[0].settle(settle(a)), processes[1].settle(settle(b)));
        match (ended.0.unwrap(), ended.1.unwrap()) {
            (SettleOutcome::Settled, SettleOutcome::TransactionTaken { by }) => assert_eq!(by, id(a)),
            (SettleOutcome::TransactionTaken { by }, SettleOutcome::Settled) => assert_eq!(by, id(b)),
            both => panic!("{both:?}"),
        }
    }
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

/// Opposite orders over shared windows: sessions of one agent and agents of one total, settled while others reserve.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn crossing_budgets_do_not_lock_each_other_out() {
    let (schema, processes) = two_processes().await;
    let total =
        Limit { subject: Subject::Total, per_day: Some(amount("100000")), source: "file".to_owned(), ..limit() };
    schema.ledger.set_limit(&total).await.unwrap();
    let work = (0..32u8).map(|i| {
        let ledger = processes[usize::from(i % 2)].clone();
        let call = Call {
            n: i + 1,
            call: i + 1,
            agent: if i % 3 == 0 { "a" } else { "b" },
            session: [None, Some("s"), Some("t")][usize::from(i / 2 % 3)],
            ..CALL
        };
        async move {
            let Decision::Fresh(lease) = ledger.decide(&call.intent()).await.unwrap() else { panic!("not reserved") };
            if i % 4 == 0 {
                assert!(ledger.release(id(i + 1), &lease, Reason::Cancelled).await.unwrap());
            } else {
                let (transaction, outcome) = (None, Some(&b"output"[..]));
                let (amount, evidence, unfinished) = (amount("60"), Evidence::Receipt, false);
                let request =
                    SettleRequest { payment_id: id(i + 1), amount, transaction, evidence, outcome, unfinished };
                assert!(matches!(ledger.settle(request).await.unwrap(), SettleOutcome::Settled));
            }
        }
    });
    join_all(work).await;
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}
