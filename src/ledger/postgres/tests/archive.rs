//! What leaves the hot tables, what never does, and what is known of it afterwards.

use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::{join, join_all};

use super::*;
use crate::ledger::table::{CALL, agent, amount, id, key, limit};

const DAY: u64 = 24 * 3_600_000;

async fn settle(ledger: &PostgresLedger, n: u8, transaction: Option<&str>) -> Result<SettleOutcome, LedgerError> {
    let (payment_id, evidence, outcome) = (id(n), Evidence::Receipt, None);
    let request = SettleRequest { payment_id, amount: amount("60"), transaction, evidence, outcome, unfinished: false };
    ledger.settle(request).await
}

async fn all(ledger: &PostgresLedger, batch: u32) -> u64 {
    let (mut from, mut sum) = (0, 0);
    loop {
        let some = ledger.archive(RETENTION_MS, from, batch).await.unwrap();
        sum += some.payments;
        from = some.from_ms;
        if !some.more {
            return sum;
        }
    }
}

async fn clean(ledger: &PostgresLedger, payments: u64) {
    let audit = ledger.audit().await.unwrap();
    assert_eq!(audit.differences, []);
    assert_eq!(audit.payments, payments);
}

async fn left(schema: &Schema) -> Vec<String> {
    schema.sql("SELECT left(payment_identifier, 2) FROM payments ORDER BY 1").await.unwrap()
}

#[tokio::test]
async fn what_is_over_and_old_is_archived_and_answers_as_before() {
    let schema = Schema::owned().await;
    let ledger = &*schema.ledger;
    ledger.replace_limits("file", &[Limit { subject: Subject::EachAgent, ..limit() }]).await.unwrap();
    let call = |n, key| Call { n, call: n, key, session: Some("s"), ..CALL };
    // 1 settled with a key, 2 released, 3 keyless and answered, 4 keyless and not answered, 5 in doubt, 6 reserved long,
    // 7 settled with a stored outcome, 8 of an authorization that lives for years, 9 of another network, alive.
    for (n, with) in [(1, Some(1)), (2, Some(2)), (3, None), (4, None), (5, Some(5)), (7, Some(7))] {
        let Decision::Fresh(lease) = schema.reserve(call(n, with)).await.unwrap() else { panic!("{n}") };
        if n == 2 {
            assert!(ledger.release(id(2), &lease, Reason::Cancelled).await.unwrap());
        }
    }
    for (n, network, dead_after) in [(8u8, "stellar:testnet", 60_000_000u64), (9, "eip155:84532", 4_000_000_000)] {
        let mut intent = call(n, Some(n)).intent();
        intent.quote.offer.network = network.parse().unwrap();
        intent.authorization.dead_after = dead_after;
        let more = Limit { unit: intent.quote.unit(), ..limit() };
        ledger.set_limit(&more).await.unwrap();
        assert!(matches!(ledger.decide(&intent).await.unwrap(), Decision::Fresh(_)), "{n}");
    }
    for n in [1, 3, 4, 8, 9] {
        let settled = settle(ledger, n, (n == 1).then_some("t1")).await.unwrap();
        assert!(matches!(settled, SettleOutcome::Settled), "{n}: {settled:?}");
    }
    ledger.answered(id(3)).await.unwrap();
    let outcome = SettleRequest {
        payment_id: id(7),
        amount: amount("60"),
        transaction: None,
        evidence: Evidence::Receipt,
        outcome: Some(b"output"),
        unfinished: false,
    };
    ledger.settle(outcome).await.unwrap();
    schema.sql(&format!("UPDATE outcomes SET expires = {NOON} * 2")).await.unwrap();
    let before = ledger.show(&id(1).to_hex()).await.unwrap().unwrap();
    clean(ledger, 8).await;

    schema.advance(RETENTION_MS - 1);
    assert_eq!(all(ledger, 100).await, 0, "not a moment before");
    assert!(ledger.archive(RETENTION_MS - 1, 0, 100).await.unwrap_err().to_string().contains("at least 397 days"));
    schema.advance(1);
    // 6 is new.
    assert!(matches!(schema.reserve(call(6, Some(6))).await.unwrap(), Decision::Fresh(_)));
    assert_eq!(all(ledger, 2).await, 3);
    assert_eq!(left(&schema).await, ["04", "05", "06", "07", "08", "09"]);
    assert_eq!(all(ledger, 100).await, 0);
    clean(ledger, 9).await;

    // The receipt is where it was for whoever asks by its identifier, with its whole history.
    let (payment, events) = ledger.show(&id(1).to_hex()[..16]).await.unwrap().unwrap();
    assert_eq!(format!("{payment:?}"), format!("{:?}", before.0));
    assert_eq!(events[..2], before.1[..]);
    assert_eq!((events.len(), events[2].event.as_str()), (3, "archived"));
    let seen = ledger.lookup(&agent("a"), By::Id(id(1))).await.unwrap();
    assert_eq!(format!("{seen:?}"), format!("{:?}", Some(before.0)));
    assert!(ledger.lookup(&agent("b"), By::Id(id(1))).await.unwrap().is_none(), "another agent's");
    // Keys stay spent, for the same call and for any other; a keyless call is a new one.
    for (n, with) in [(11, 1), (12, 2)] {
        let Decision::KeySpent(by) = schema.reserve(call(n, Some(with))).await.unwrap() else { panic!("{n}") };
        assert_eq!(by, id(with));
    }
    // A transaction that paid an archived payment pays no other one, in a batch and alone.
    for with_outcome in [false, true] {
        let n = if with_outcome { 14 } else { 13 };
        assert!(matches!(schema.reserve(call(n, None)).await.unwrap(), Decision::Fresh(_)));
        let long = vec![0; 100_000];
        let outcome = with_outcome.then_some(&long[..]);
        let (payment_id, evidence, transaction) = (id(n), Evidence::Receipt, Some("t1"));
        let request =
            SettleRequest { payment_id, amount: amount("60"), transaction, evidence, outcome, unfinished: false };
        let settled = ledger.settle(request).await.unwrap();
        assert!(matches!(settled, SettleOutcome::TransactionTaken { by } if by == id(1)), "{settled:?}");
    }
    clean(ledger, 11).await;
    // Whoever forgets a key, or alters what is archived, is found or refused.
    for sql in ["DELETE FROM payments_archive", "UPDATE payments_archive SET events = '[]'", "DELETE FROM spent_keys"] {
        assert!(schema.sql(sql).await.unwrap_err().contains("append-only"), "{sql}");
    }
    schema.sql("SET session_replication_role = replica; DELETE FROM spent_keys").await.unwrap();
    let found: Vec<_> = ledger.audit().await.unwrap().differences.iter().map(|found| found.what).collect();
    assert_eq!(found, ["key", "key"]);
}

#[tokio::test]
async fn nothing_is_removed_that_is_not_in_the_archive_word_for_word() {
    let schema = Schema::owned().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(CALL).await.unwrap();
    settle(&schema.ledger, 1, None).await.unwrap();
    let copy = |payment: &str, events: &str| {
        format!(
            "BEGIN; INSERT INTO payments_archive SELECT payment_identifier, network, transaction_id, 0, {payment}, {events} \
             FROM payments p"
        )
    };
    let events = "(SELECT jsonb_agg(to_jsonb(e)) FROM payment_events e)";
    let gone = "DELETE FROM payment_events; DELETE FROM payments; ROLLBACK";
    assert!(schema.sql(&format!("{}; {gone}", copy("to_jsonb(p)", events))).await.is_ok());
    for (payment, events, word) in [
        ("to_jsonb(p)", "'[]'", "append-only"),
        ("to_jsonb(p)", "(SELECT jsonb_agg(to_jsonb(e) || '{\"amount\": 1}') FROM payment_events e)", "append-only"),
        ("to_jsonb(p) || '{\"settled\": 1}'", events, "no payment is removed"),
        ("to_jsonb(p) - 'ref'", events, "no payment is removed"),
        ("to_jsonb(p) || '{\"state\": \"reserved\"}'", events, "check constraint"),
    ] {
        let error = schema.sql(&format!("{}; {gone}", copy(payment, events))).await.unwrap_err();
        assert!(error.contains(word), "{payment} {events}: {error}");
    }
    clean(&schema.ledger, 1).await;
    // A role that serves may not, and is told who may.
    let schema = Schema::new().await;
    let error = schema.ledger.archive(RETENTION_MS, 0, 1).await.unwrap_err().to_string();
    assert!(error.contains("owner"), "{error}");
}

/// Reservations go on, audits find nothing at any moment, two archive at once, and one of them is cut off again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn while_payments_are_archived_calls_go_on_and_every_audit_is_clean() {
    const OLD: u8 = 60;
    let schema = Schema::owned().await;
    let ledger = &*schema.ledger;
    ledger.replace_limits("file", &[Limit { per_day: Some(amount("1000000")), ..limit() }]).await.unwrap();
    for n in 1..=OLD {
        schema.reserve(Call { n, call: n, key: Some(n), ..CALL }).await.unwrap();
        if n % 3 != 0 {
            settle(ledger, n, Some(&format!("t{n}"))).await.unwrap();
        }
    }
    let open = u64::from(OLD / 3);
    schema.advance(RETENTION_MS + DAY);
    let other = schema.open(Some(ring(1)), options()).await.unwrap();
    let moved = AtomicU64::new(0);
    let archiving = async |ledger: &PostgresLedger| {
        loop {
            let some = ledger.archive(RETENTION_MS, 0, 3).await.unwrap();
            moved.fetch_add(some.payments, Ordering::SeqCst);
            if some.payments == 0 {
                break;
            }
        }
    };
    let cut = async {
        // Dropped in the middle: at any instruction.
        for _ in 0..10 {
            let mut one = Box::pin(other.archive(RETENTION_MS, 0, 5));
            for _ in 0..3 {
                tokio::task::yield_now().await;
                let _ = futures_util::poll!(&mut one);
            }
        }
    };
    let calls = join_all((OLD + 1..=OLD + 40).map(|n| schema.reserve(Call { n, call: n, key: Some(n), ..CALL })));
    let audits = async {
        for _ in 0..8 {
            assert_eq!(ledger.audit().await.unwrap().differences, []);
        }
    };
    let (_, (_, (calls, _))) = join(join(archiving(ledger), archiving(&other)), join(cut, join(calls, audits))).await;
    for decided in calls {
        assert!(matches!(decided.unwrap(), Decision::Fresh(_)));
    }
    while ledger.archive(RETENTION_MS, 0, 100).await.unwrap().payments > 0 {}
    let archived = schema.sql("SELECT count(*) FROM payments_archive").await.unwrap();
    assert_eq!(archived, [(u64::from(OLD) - open).to_string()]);
    assert!(moved.load(Ordering::SeqCst) > 0);
    clean(ledger, u64::from(OLD) + 40).await;
    let Decision::KeySpent(_) = schema.reserve(Call { n: 200, call: 1, key: Some(1), ..CALL }).await.unwrap() else {
        panic!("a key that was spent")
    };
    assert!(
        matches!(ledger.lookup(&agent("a"), By::Key(&key(3))).await.unwrap(), Some(row) if row.state == State::InDoubt)
    );
}
