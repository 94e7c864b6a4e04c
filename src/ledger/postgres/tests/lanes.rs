//! Many callers in one transaction: each is decided as if it were alone. On the runtime of one thread all callers of a
//! `join_all` are in the queue before the lane begins, so what they share is one batch.

use futures_util::future::join_all;

use super::failures::{Cut, proxied, request};
use super::*;
use crate::ledger::table::{CALL, LEASE_MS, agent, amount, id, key, limit, unit};

fn wide() -> Limit {
    Limit { subject: Subject::EachAgent, per_day: Some(amount("1000000")), ..limit() }
}

async fn decide_all(ledger: &PostgresLedger, calls: impl IntoIterator<Item = Call>) -> Vec<String> {
    let intents: Vec<Intent> = calls.into_iter().map(|call| call.intent()).collect();
    words(&join_all(intents.iter().map(|intent| ledger.decide(intent))).await)
}

fn words(decided: &[Result<Decision, LedgerError>]) -> Vec<String> {
    let word = |decision: &Result<Decision, LedgerError>| match decision {
        Ok(Decision::Fresh(_)) => "fresh".to_owned(),
        Ok(Decision::Existing(row)) => format!("existing {} {}", row.payment_id.short(), row.state.as_str()),
        Ok(Decision::Conflict(row)) => format!("conflict {}", row.payment_id.short()),
        Ok(Decision::DuplicateInDoubt(id)) => format!("in doubt {}", id.short()),
        Ok(Decision::Exceeded { ceiling, remaining, .. }) => format!("{ceiling:?} leaves {remaining}"),
        other => format!("{other:?}"),
    };
    decided.iter().map(word).collect()
}

/// (batches, entries, decided alone), since `before`.
fn since(ledger: &PostgresLedger, before: &LaneFigures) -> (u64, u64, u64) {
    let now = ledger.lanes();
    (now.batches - before.batches, now.entries - before.entries, now.alone - before.alone)
}

#[tokio::test]
async fn in_a_batch_each_call_sees_those_that_came_before_it() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(Call { n: 90, call: 90, amount: "1", ..CALL }).await.unwrap();
    let before = schema.ledger.lanes();
    let one = |n: u8| id(n).short();
    let said = decide_all(
        &schema.ledger,
        [
            Call { n: 1, call: 1, amount: "600", ..CALL },
            Call { n: 2, call: 2, amount: "500", ..CALL },
            Call { n: 3, call: 3, amount: "300", key: Some(1), ..CALL },
            Call { n: 4, call: 1, amount: "600", ..CALL },
            Call { n: 5, call: 3, amount: "300", key: Some(1), ..CALL },
            Call { n: 6, call: 4, amount: "1", key: Some(1), ..CALL },
            Call { n: 7, call: 3, amount: "1", ..CALL },
            Call { n: 8, call: 8, amount: "100", ..CALL },
            Call { n: 9, call: 9, amount: "99", ..CALL },
        ],
    )
    .await;
    let expected = [
        "fresh",
        "Day leaves 399",
        "fresh",
        &format!("existing {} reserved", one(1)),
        &format!("existing {} reserved", one(3)),
        &format!("conflict {}", one(3)),
        &format!("in doubt {}", one(3)),
        "Day leaves 99",
        "fresh",
    ];
    assert_eq!(said, expected);
    assert_eq!(since(&schema.ledger, &before), (1, 9, 0), "one transaction");
    let now = schema.ledger.lanes();
    assert_eq!(now.sizes[4] - before.sizes[4], 1, "it counts among those of 9 to 16");
    #[cfg(feature = "roles")]
    assert!(!crate::telemetry::text().unwrap().contains("\ntollway_ledger_batch_size_count 0\n"));
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_agent_spends_its_limit_and_not_a_unit_more() {
    let schema = Schema::new().await;
    let other = schema.open(None, options()).await.unwrap();
    let many = Limit { per_day: Some(amount("13700")), ..limit() };
    schema.ledger.replace_limits("file", &[many]).await.unwrap();
    let intents: Vec<Intent> = (0..=254u8).map(|n| Call { n, call: n, ..CALL }.intent()).collect();
    let call = |(i, intent): (usize, _)| if i % 3 == 0 { other.decide(intent) } else { schema.ledger.decide(intent) };
    let said = words(&join_all(intents.iter().enumerate().map(call)).await);
    assert_eq!(said.iter().filter(|said| *said == "fresh").count(), 137, "{said:?}");
    assert_eq!(said.iter().filter(|said| *said == "Day leaves 0").count(), 255 - 137, "{said:?}");
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
    let figures = schema.ledger.lanes();
    assert!(figures.batches < figures.entries && figures.waiting == 0 && figures.busy == 0, "{figures:?}");
    assert_eq!(figures.batches, figures.sizes.iter().sum::<u64>());
}

/// One is above its limit, one repeats a key that another process is writing, the values of one the database refuses.
#[tokio::test]
async fn whatever_becomes_of_one_call_its_neighbours_are_served() {
    let schema = Schema::new().await;
    let other = |asset: &str| Limit { unit: Unit { asset: asset.parse().unwrap(), ..unit() }, ..wide() };
    schema.ledger.replace_limits("file", &[wide(), other("COTHER")]).await.unwrap();
    let racing = schema.open(Some(ring(1)), options()).await.unwrap();
    racing.decide(&Call { n: 80, call: 80, asset: "COTHER", ..CALL }.intent()).await.unwrap();
    schema.reserve(Call { n: 81, call: 81, ..CALL }).await.unwrap();

    // The same key in another unit, whose windows nobody waits for: only the index sees both.
    let writing = racing.begin(tx::Gate::Shared).await.unwrap();
    let copy = format!(
        "INSERT INTO payments SELECT '{}', id_nonce, agent, session, day, '{}', call_hash, ref, version_hash, network, \
         scheme, 'COTHER', payer, pay_to, reserved, '82', dead_after, at_ledger, state, reason, settled, \
         transaction_id, answered, lease_token, lease_expires, sign_before, payload, payload_expires, attempts, due, \
         created, updated FROM payments WHERE payment_identifier = '{}'",
        id(82).to_hex(),
        key(5).as_str(),
        id(80).to_hex()
    );
    let columns = "payment_identifier, id_nonce, agent, session, day, idempotency_key, call_hash, ref, version_hash, \
        network, scheme, asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, state, reason, settled, \
        transaction_id, answered, lease_token, lease_expires, sign_before, payload, payload_expires, attempts, due, \
        created, updated";
    let copy = copy.replacen("INTO payments", &format!("INTO payments ({columns})"), 1);
    writing.run(&copy, &[]).await.unwrap();

    let mut refused = Call { n: 3, call: 3, ..CALL }.intent();
    refused.quote.resource_ref = "a ref with a zero \0 byte".to_owned();
    let intents = [
        Call { n: 1, call: 1, ..CALL }.intent(),
        Call { n: 2, call: 2, amount: "1000001", max: "9999999", ..CALL }.intent(),
        refused,
        Call { n: 4, call: 80, key: Some(5), ..CALL }.intent(),
        Call { n: 5, call: 5, ..CALL }.intent(),
    ];
    let before = schema.ledger.lanes();
    let calls = join_all(intents.iter().map(|intent| schema.ledger.decide(intent)));
    let commits = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        writing.commit().await.unwrap();
    };
    let (decided, ()) = futures_util::future::join(calls, commits).await;
    let said = words(&decided);
    assert_eq!(said[0], "fresh");
    assert!(said[1].starts_with("Day leaves 999"), "{said:?}");
    assert!(said[2].contains("Unavailable"), "{said:?}");
    assert_eq!(said[3], format!("existing {} reserved", id(82).short()));
    assert_eq!(said[4], "fresh");
    assert_eq!(since(&schema.ledger, &before), (1, 5, 5), "they began together, and ended each by itself");

    // Without the one that the database refuses, the others are written together.
    let again = [6, 7, 8].map(|n| Call { n, call: n, key: if n == 7 { Some(5) } else { None }, ..CALL });
    let before = schema.ledger.lanes();
    let said = decide_all(&schema.ledger, again).await;
    assert_eq!(said, ["fresh", &format!("conflict {}", id(82).short()), "fresh"]);
    assert_eq!(since(&schema.ledger, &before), (1, 3, 0));
}

/// A row that the index refuses is skipped, the others of its transaction are written.
#[tokio::test]
async fn a_nonce_that_comes_twice_is_refused_alone() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(Call { n: 1, call: 1, amount: "300", ..CALL }).await.unwrap();
    let before = schema.ledger.lanes();
    let mut twice = Call { n: 2, call: 2, amount: "600", ..CALL }.intent();
    twice.authorization.nonce = "1".to_owned();
    let intents = [twice, Call { n: 3, call: 3, amount: "700", ..CALL }.intent()];
    let decided = join_all(intents.iter().map(|intent| schema.ledger.decide(intent))).await;
    // Those that end by themselves do so in the order of their arrival: the cap is not used up yet.
    assert!(matches!(decided[0], Err(LedgerError::Inconsistent(_))), "{decided:?}");
    assert!(matches!(decided[1], Ok(Decision::Fresh(_))), "exceeded only by what was not written: {decided:?}");
    assert_eq!(since(&schema.ledger, &before), (1, 2, 2));
    assert_eq!(schema.ledger.lanes().again - before.again, 1, "the second run skips what the index refuses");
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn reservations_and_settlements_share_a_transaction() {
    let schema = Schema::new().await;
    let total = Limit { subject: Subject::Total, per_day: Some(amount("100000")), ..limit() };
    schema.ledger.replace_limits("file", &[wide(), total]).await.unwrap();
    decide_all(&schema.ledger, (1..=6).map(|n| Call { n, call: n, session: Some("s"), ..CALL })).await;
    let before = schema.ledger.lanes();
    let settles = [
        SettleRequest { transaction: Some("t1"), amount: amount("60"), ..request(1) },
        SettleRequest { transaction: Some("t2"), unfinished: true, ..request(2) },
        SettleRequest { outcome: None, evidence: Evidence::Chain, ..request(3) },
        // Not the plain end of an open payment: each says for itself what it is.
        SettleRequest { transaction: Some("t1"), ..request(4) },
        request(1),
        SettleRequest { amount: amount("101"), ..request(5) },
        request(99),
    ];
    let intents = [7, 8].map(|n| Call { n, call: n, session: Some("t"), ..CALL }.intent());
    let ends = join_all(settles.map(|settle| schema.ledger.settle(settle)));
    let (ended, decided) =
        futures_util::future::join(ends, join_all(intents.iter().map(|i| schema.ledger.decide(i)))).await;
    assert_eq!(words(&decided), ["fresh", "fresh"]);
    let said: Vec<String> = ended.iter().map(|e| format!("{e:?}").chars().take(30).collect()).collect();
    assert!(ended[..3].iter().all(|e| matches!(e, Ok(SettleOutcome::Settled))), "{said:?}");
    assert!(matches!(ended[3], Ok(SettleOutcome::TransactionTaken { by }) if by == id(1)), "{said:?}");
    assert!(matches!(ended[4], Ok(SettleOutcome::SettledAs { amount: a, .. }) if a == amount("60")), "{said:?}");
    assert!(ended[5..].iter().all(|e| matches!(e, Err(LedgerError::Inconsistent(_)))), "{said:?}");
    let (batches, entries, alone) = since(&schema.ledger, &before);
    assert!(batches <= 2, "one for the agent, and one for the payment that nobody knows");
    assert_eq!((entries, alone), (9, 4));

    for (n, outcome) in [(1, Some(&b"output"[..])), (2, Some(b"output")), (3, None), (4, None)] {
        assert_eq!(schema.ledger.outcome(id(n)).await.unwrap().as_deref(), outcome, "{n}");
    }
    let row = schema.ledger.lookup(&agent("a"), By::Id(id(2))).await.unwrap().unwrap();
    assert!(row.outcome_unfinished && row.transaction.as_deref() == Some("t2"));
    let line = &schema.ledger.budget(&agent("a"), Some("s")).await.unwrap()[0];
    let spent = amount("260");
    assert_eq!((line.day_held, line.day_spent), (amount("500"), spent));
    assert_eq!((line.session_held, line.session_spent), (amount("300"), spent));
    assert_eq!(line.total_used, amount("760"));
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn a_batch_whose_commit_was_not_answered_is_found_out() {
    let schema = Schema::new().await;
    let (proxy, ledger) = proxied(&schema).await;
    ledger.replace_limits("file", &[wide()]).await.unwrap();
    ledger.decide(&Call { n: 100, call: 100, ..CALL }.intent()).await.unwrap();
    for (round, cut) in [Cut::After, Cut::Before, Cut::After].into_iter().enumerate() {
        let numbers = (0..6u8).map(|i| 1 + i + 6 * u8::try_from(round).unwrap());
        proxy.cut(cut);
        let said = decide_all(&ledger, numbers.clone().map(|n| Call { n, call: n, ..CALL })).await;
        assert!(said.iter().all(|said| said == "fresh"), "{cut:?}: {said:?}");
        proxy.cut(cut);
        let ended = join_all(numbers.clone().map(|n| ledger.settle(request(n)))).await;
        assert!(ended.iter().all(|e| matches!(e, Ok(SettleOutcome::Settled))), "{cut:?}: {ended:?}");
        for n in numbers {
            let (_, events) = ledger.show(&id(n).to_hex()).await.unwrap().unwrap();
            let events: Vec<_> = events.iter().map(|event| event.event.as_str()).collect();
            assert_eq!(events, ["reserved", "settled"], "{cut:?} {n}");
            assert_eq!(ledger.outcome(id(n)).await.unwrap().as_deref(), Some(&b"output"[..]));
        }
    }
    assert_eq!(proxy.cuts.load(std::sync::atomic::Ordering::SeqCst), 6, "every one was cut");
    assert_eq!(ledger.audit().await.unwrap().differences, []);
}

/// A frozen or cut-off client: the database ends the session, and the second run waits for that behind its locks.
#[tokio::test]
async fn a_batch_whose_commit_never_arrived_is_made_again() {
    let schema = Schema::new().await;
    let (proxy, ledger) = proxied(&schema).await;
    ledger.replace_limits("file", &[wide()]).await.unwrap();
    ledger.decide(&Call { n: 100, call: 100, ..CALL }.intent()).await.unwrap();
    proxy.cut(Cut::Held);
    let said = decide_all(&ledger, (1..=5).map(|n| Call { n, call: n, ..CALL })).await;
    assert!(said.iter().all(|said| said == "fresh"), "{said:?}");
    assert_eq!(ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_whoever_went_away_reserves_nothing() {
    let schema = Schema::new().await;
    let one = Options { lanes: 1, ..options() };
    let ledger = schema.open(None, one).await.unwrap();
    ledger.replace_limits("file", &[wide()]).await.unwrap();
    let intent = CALL.intent();
    let mut waiting: Vec<_> = (0..4_096).map(|_| ledger.decide(&intent)).collect();
    for call in &mut waiting {
        assert!(futures_util::poll!(call.as_mut()).is_pending());
    }
    assert!(matches!(ledger.decide(&intent).await, Err(LedgerError::Busy)));
    let figures = ledger.lanes();
    assert_eq!((figures.waiting, figures.busy, figures.batches), (4_096, 1, 0));
    drop(waiting);
    assert!(matches!(ledger.decide(&Call { n: 2, call: 2, ..CALL }.intent()).await, Err(LedgerError::Busy)));
    // The lane has its turn now, and nobody is there any more.
    tokio::time::timeout(Duration::from_secs(10), async {
        while ledger.lanes().waiting > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("an empty queue");
    assert!(matches!(ledger.decide(&Call { n: 2, call: 2, ..CALL }.intent()).await, Ok(Decision::Fresh(_))));
    assert_eq!(ledger.lanes().entries, 1, "nothing else was in a transaction");
    assert_eq!(ledger.list(&Filter { limit: 10, ..Filter::default() }).await.unwrap().len(), 1);
}

#[tokio::test]
async fn all_agents_together_are_counted_when_a_limit_needs_it() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[wide()]).await.unwrap();
    for (n, agent) in [(1, "a"), (2, "b"), (3, "c")] {
        schema.reserve(Call { n, call: n, agent, ..CALL }).await.unwrap();
    }
    assert!(matches!(
        schema.ledger.settle(SettleRequest { amount: amount("40"), ..request(1) }).await.unwrap(),
        SettleOutcome::Settled
    ));
    let counted = "SELECT held || ' ' || spent FROM budget_windows WHERE agent = 'total'";
    assert!(schema.sql(counted).await.unwrap().is_empty(), "no reservation waits for a row that bounds nothing");

    let total =
        Limit { subject: Subject::Total, per_day: Some(amount("390")), source: "operator".to_owned(), ..limit() };
    schema.ledger.set_limit(&total).await.unwrap();
    assert_eq!(schema.ledger.budget(&agent("b"), None).await.unwrap()[0].total_used, amount("240"));
    let said =
        decide_all(&schema.ledger, [4, 5].map(|n| Call { n, call: n, agent: ["a", "d"][usize::from(n % 2)], ..CALL }))
            .await;
    assert_eq!(said.iter().filter(|said| *said == "fresh").count(), 1, "{said:?}");
    assert_eq!(said.iter().filter(|said| *said == "Total leaves 50").count(), 1, "{said:?}");
    assert_eq!(schema.sql(counted).await.unwrap(), ["300 40"]);

    // It goes on counting what was reserved before, whoever ends it.
    let Decision::Fresh(lease) = schema.reserve(Call { n: 6, call: 6, amount: "10", ..CALL }).await.unwrap() else {
        panic!("reserved")
    };
    assert!(schema.ledger.release(id(6), &lease, Reason::Cancelled).await.unwrap());
    assert!(matches!(schema.ledger.settle(request(2)).await.unwrap(), SettleOutcome::Settled));
    assert_eq!(schema.sql(counted).await.unwrap(), ["200 140"]);
    schema.ledger.replace_limits("operator", &[]).await.unwrap();
    schema.reserve(Call { n: 7, call: 7, ..CALL }).await.unwrap();
    assert_eq!(schema.sql(counted).await.unwrap(), ["300 140"], "a row that exists is right");
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
    schema.advance(24 * 3_600_000);
    schema.reserve(Call { n: 8, call: 8, ..CALL }).await.unwrap();
    assert_eq!(schema.sql(counted).await.unwrap(), ["300 140"], "and the next day none is made");
}

#[tokio::test]
async fn a_reservation_counts_in_the_day_of_the_database() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    let said = decide_all(&schema.ledger, [1, 2].map(|n| Call { n, call: n, amount: "500", ..CALL })).await;
    assert_eq!(said, ["fresh", "fresh"]);
    schema.advance(12 * 3_600_000);
    let said = decide_all(&schema.ledger, [3, 4].map(|n| Call { n, call: n, amount: "900", ..CALL })).await;
    assert_eq!(said, ["fresh", "Day leaves 100"], "after midnight");
    let days = "SELECT day || ' ' || reserved FROM payments ORDER BY nonce";
    assert_eq!(schema.sql(days).await.unwrap(), ["2026-12-02 500", "2026-12-02 500", "2026-12-03 900"]);
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}

/// A plan that is made while a table is empty must be one that is good when it is not: no statement reads a whole table.
#[tokio::test]
async fn no_reservation_or_settlement_reads_a_whole_table() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[wide()]).await.unwrap();
    let read = "SELECT string_agg(relname || ' ' || seq_scan || ' ' || n_tup_ins, ', ' ORDER BY relname) \
        FROM pg_stat_user_tables WHERE schemaname = current_schema() AND relname IN ('payments', 'payment_events')";
    let ledger = schema.open(Some(ring(1)), options()).await.unwrap();
    let before = schema.sql(read).await.unwrap()[0].clone();
    let keys = |n: u8| Call { n, call: n, key: n.is_multiple_of(2).then_some(n), session: Some("s"), ..CALL };
    for n in (1..=40).step_by(4) {
        decide_all(&ledger, (n..n + 4).map(keys)).await;
        let settle = |n: u8| SettleRequest { transaction: n.is_multiple_of(3).then_some("t"), ..request(n) };
        join_all((n..n + 4).map(|n| ledger.settle(settle(n)))).await;
        decide_all(&ledger, (n..n + 4).map(|n| Call { n: n + 100, ..keys(n) })).await;
    }
    assert!(ledger.lanes().batches >= 30);
    drop(ledger);
    let scans = |said: &str| said.split(", ").map(|t| t.split(' ').nth(1).unwrap().to_owned()).collect::<Vec<_>>();
    let written = |said: &str| said.split(", ").filter_map(|t| t.split(' ').nth(2).unwrap().parse::<u64>().ok()).min();
    // The server counts when a session ends, a moment later.
    for _ in 0..100 {
        let after = schema.sql(read).await.unwrap()[0].clone();
        if written(&after) >= Some(40) {
            assert_eq!(scans(&after), scans(&before), "{before} / {after}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the server's figures never came: {:?}", schema.sql(read).await);
}

/// As behind pgbouncer: no statement has a name, and the session keeps no setting.
#[tokio::test]
async fn a_batch_needs_no_prepared_statement() {
    let schema = Schema::new().await;
    let database = Database::parse(&server_url(), None).unwrap().behind(Pooler::Transaction).unwrap();
    let database = database.in_schema(&schema.name).unwrap();
    let ledger = PostgresLedger::connect(&database, world(), Some(ring(1)), options()).await.unwrap();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    let said = decide_all(&ledger, [1, 2, 3].map(|n| Call { n, call: n, amount: "400", ..CALL })).await;
    assert_eq!(said, ["fresh", "fresh", "Day leaves 200"]);
    let ends = join_all([1, 2].map(|n| ledger.settle(SettleRequest { amount: amount("400"), ..request(n) }))).await;
    assert!(ends.iter().all(|e| matches!(e, Ok(SettleOutcome::Settled))), "{ends:?}");
    schema.advance(LEASE_MS);
    let said = decide_all(&ledger, [4, 1].map(|n| Call { n: n + 10, call: n, amount: "100", ..CALL })).await;
    assert_eq!(said, ["fresh", &format!("existing {} settled", id(1).short())]);
    assert_eq!(ledger.audit().await.unwrap().differences, []);
    assert_eq!(ledger.lanes().alone, 0);
}
