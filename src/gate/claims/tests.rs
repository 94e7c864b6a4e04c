//! One table of promises, held against both databases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;

use super::super::Kind;
use super::super::prices::tests::terms;
use super::*;
use crate::ledger::sqlite::open_migrated;
use crate::ports::{Clock, machine};

/// A clock that the test moves; the databases have their own, so leases there are let go by rewriting the row.
pub struct Hands(pub AtomicU64);
impl Clock for Hands {
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Replicas of one store.
pub(in crate::gate) struct Shop {
    pub replicas: Vec<Claims>,
    pub clock: Arc<Hands>,
    schema: Option<(String, String)>,
    dir: tempfile::TempDir,
}

impl Drop for Shop {
    fn drop(&mut self) {
        let Some((server, name)) = self.schema.take() else { return };
        let sql = format!("SET lock_timeout = '5s'; DROP SCHEMA {name} CASCADE");
        self.replicas.clear();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _ = runtime.block_on(execute(&server, &sql));
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }
}

impl Shop {
    /// So much later: leases, answers and moments are this much older.
    pub async fn later(&self, ms: u64) {
        self.clock.0.fetch_add(ms, Ordering::SeqCst);
        let Some((server, name)) = &self.schema else { return };
        let sql = format!(
            "UPDATE {name}.claims SET lease_until = lease_until - {ms}, due = due - {ms}; \
             UPDATE {name}.paid_answers SET expires = expires - {ms}"
        );
        execute(server, &sql).await.unwrap();
    }

    /// What nobody does but a test: a statement without a schema in it, on either store.
    pub async fn sql(&self, statement: &str) {
        match &self.schema {
            Some((server, name)) => execute(server, &format!("SET search_path = {name}; {statement}")).await.unwrap(),
            None => in_file(&self.dir.path().join("claims.sqlite"), statement).await,
        }
    }

    /// The first replica.
    fn one(&self) -> &Claims {
        &self.replicas[0]
    }
    fn two(&self) -> &Claims {
        &self.replicas[1]
    }
}

async fn in_file(path: &Path, statement: &str) {
    let mut file = open_migrated(path, Duration::from_secs(5)).await.unwrap();
    sqlx::query(sqlx::AssertSqlSafe(statement.to_owned())).execute(&mut file).await.unwrap();
}

/// From now on the store takes no claim to `settling`.
pub async fn refuse_to_settle(path: &Path) {
    let refuses =
        "CREATE TRIGGER t BEFORE UPDATE ON claims WHEN NEW.state = 'settling' BEGIN SELECT RAISE(ABORT, 'no'); END";
    in_file(path, refuses).await;
}

#[allow(clippy::disallowed_methods, reason = "a connection of the test's own")]
async fn execute(url: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let driver = tokio::spawn(connection);
    let said = client.batch_execute(sql).await;
    drop(client);
    let _ = driver.await;
    said
}

pub fn world() -> (World, Arc<Hands>) {
    let clock = Arc::new(Hands(AtomicU64::new(1_800_000_000_000)));
    let mut world = machine::world().0;
    world.clock = clock.clone();
    (world, clock)
}

fn ring() -> KeyRing {
    KeyRing::new(vec![vec![7; 32]]).unwrap()
}

/// On PostgreSQL, or in a file.
pub(in crate::gate) async fn shop(postgres: bool, replicas: usize) -> Shop {
    if postgres { postgres_of(replicas).await } else { sqlite_of(replicas).await }
}

async fn sqlite() -> Shop {
    sqlite_of(2).await
}

async fn postgres() -> Shop {
    postgres_of(2).await
}

async fn sqlite_of(count: usize) -> Shop {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("claims.sqlite");
    let (world, clock) = world();
    let mut replicas = Vec::new();
    for _ in 0..count {
        replicas.push(Claims::open_sqlite(&path, world.clone(), ring(), Terms::default()).await.unwrap());
    }
    Shop { replicas, clock, schema: None, dir }
}

async fn postgres_of(count: usize) -> Shop {
    let server = std::env::var("TOLLWAY_TEST_POSTGRES").expect("TOLLWAY_TEST_POSTGRES names no server: ./scripts/test");
    let (world, clock) = world();
    let name = format!("t_{}", hex::encode(world.random::<8>()));
    let database = Database::parse(&server, None).unwrap().in_schema(&name).unwrap();
    crate::ledger::postgres::PostgresLedger::migrate(&database).await.unwrap();
    let mut replicas = Vec::new();
    for _ in 0..count {
        replicas.push(Claims::connect(&database, world.clone(), ring(), Terms::default()).await.unwrap());
    }
    Shop { replicas, clock, schema: Some((server, name)), dir: tempfile::tempdir().unwrap() }
}

/// Each promise is a test for both stores.
macro_rules! promises {
    ($($promise:ident),* $(,)?) => {
        mod on_sqlite {
            $(#[tokio::test] async fn $promise() { super::$promise(&super::sqlite().await).await; })*
        }
        mod on_postgres {
            $(#[tokio::test] async fn $promise() { super::$promise(&super::postgres().await).await; })*
        }
    };
}

promises! {
    one_of_many_claims_and_the_others_learn_of_it,
    a_call_is_settled_and_its_answer_goes_to_the_payer_alone,
    what_was_never_broadcast_may_be_claimed_anew,
    a_holder_that_was_frozen_changes_nothing,
    a_dead_holder_in_settling_leaves_an_unknown_claim_for_one_sweep,
    a_failed_one_is_found_on_the_chain_or_claimed_anew,
    a_sweep_looks_at_every_network_and_at_the_newest,
    an_identifier_names_one_payment_at_a_time,
    free_runs_are_counted_one_at_a_time,
    an_operator_sees_what_is_open_and_the_history,
    arrows_are_taken_from_their_states_only,
    answers_are_forgotten_and_identities_are_not,
    what_is_stored_is_sealed_for_its_own_row,
}

#[tokio::test]
async fn after_a_claim_that_nobody_waits_for_the_next_write_waits_for_the_disk() {
    let shop = postgres().await;
    let (server, name) = shop.schema.clone().unwrap();
    let database = Database::parse(&server, None).unwrap().in_schema(&name).unwrap();
    let store = super::postgres::Postgres::connect(&database).await.unwrap();
    let lease = Lease::new(pay(1).identity, [1; 16]);
    let taken = store.claim(&pay(1).as_new(), &lease, 30_000).await.unwrap();
    assert_eq!(taken, Taken::Fresh { settles: 0 });
    // The pool has one connection, which made the claim.
    let rows = store.rows("SELECT current_setting('synchronous_commit')", &[]).await.unwrap();
    assert_eq!(rows[0].get::<_, String>(0), "on");
    assert_eq!(shop.two().look(&pay(1).identity).await.unwrap().unwrap().state, State::Claimed, "seen at once");
}

struct Pay {
    identity: Identity,
    call: CallKey,
    proof: Proof,
    offer: Box<RawValue>,
}

fn pay(n: u8) -> Pay {
    let params = RawValue::from_string(r#"{"name":"search","arguments":{"q":1}}"#.into()).unwrap();
    Pay {
        identity: Identity([n; 32]),
        call: CallKey::of(Kind::Tool, &params).unwrap(),
        proof: Proof { identifier: Some([n; 32]), session: None },
        offer: terms(5).price().unwrap().offer.raw,
    }
}

impl Pay {
    fn as_new(&self) -> NewClaim<'_> {
        NewClaim {
            identity: self.identity,
            scope: "tool:search",
            call: &self.call,
            proof: self.proof,
            network: "stellar:testnet",
            payer: "GA",
            nonce: "5",
            dies_at: 100,
            seen_at: 40,
            offer: &self.offer,
        }
    }

    async fn fresh(&self, claims: &Claims) -> Lease {
        match claims.claim(&self.as_new()).await.unwrap() {
            Claimed::Fresh { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    }

    async fn settling(&self, claims: &Claims) -> Lease {
        let lease = self.fresh(claims).await;
        let change = Change { settle_request: Some(b"the request"), ..Change::default() };
        assert_eq!(claims.advance(&lease, Arrow::SETTLE, change).await.unwrap(), Ok(()));
        lease
    }

    async fn state(&self, claims: &Claims) -> State {
        claims.look(&self.identity).await.unwrap().unwrap().state
    }
}

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

fn receipt() -> Box<RawValue> {
    raw(r#"{"success":true,"transaction":"ab","network":"stellar:testnet"}"#)
}

async fn one_of_many_claims_and_the_others_learn_of_it(shop: &Shop) {
    let pay = pay(1);
    let new = pay.as_new();
    let all = join_all((0..40).map(|n| shop.replicas[n % 2].claim(&new))).await;
    let fresh = all.iter().filter(|claimed| matches!(claimed, Ok(Claimed::Fresh { .. }))).count();
    let known =
        all.iter().filter(|c| matches!(c, Ok(Claimed::Known(claim)) if claim.leased && claim.is_for(&pay.call)));
    assert_eq!((fresh, known.count()), (1, 39));
}

async fn a_call_is_settled_and_its_answer_goes_to_the_payer_alone(shop: &Shop) {
    let pay = pay(1);
    let lease = pay.fresh(shop.one()).await;
    let result = raw(r#"{"content":[],"big":100000000000000000000000001}"#);
    let answer = Some(Answer::Keep { round: &pay.call.round, result: &result, asks: false });
    let change = Change { settle_request: Some(b"the request"), answer, ..Change::default() };
    shop.one().advance(&lease, Arrow::SETTLE, change).await.unwrap().unwrap();
    // Stored, and nobody's before the settle's yes.
    assert!(shop.two().answer(&pay.identity, &pay.call.round).await.unwrap().is_none());
    assert_eq!(shop.two().settle_request(&pay.identity).await.unwrap().as_deref(), Some(&b"the request"[..]));
    let receipt = receipt();
    let change = Change { receipt: Some(&receipt), ..Change::default() };
    shop.one().advance(&lease, Arrow::SETTLED, change).await.unwrap().unwrap();

    let claim = shop.two().look(&pay.identity).await.unwrap().unwrap();
    assert_eq!((claim.state, claim.settles, claim.kept, claim.leased), (State::Settled, 1, Kept::Answer, false));
    assert_eq!(claim.receipt.unwrap().get(), receipt.get());
    assert_eq!(claim.offer.get(), pay.offer.get());
    let kept = shop.two().answer(&pay.identity, &pay.call.round).await.unwrap().unwrap();
    assert_eq!(kept.get(), result.get());
    assert!(shop.two().settle_request(&pay.identity).await.unwrap().is_none(), "it is not needed any more");
    assert!(shop.two().answer(&pay.identity, &[0; 32]).await.unwrap().is_none(), "another round");

    let claim = shop.one().look(&pay.identity).await.unwrap().unwrap();
    assert!(claim.proven_by(&pay.proof) && !claim.identifier_differs(&pay.proof));
    // What anybody can have: nothing, another identifier, a session where none was.
    for stranger in [
        Proof::default(),
        Proof { identifier: Some([9; 32]), session: None },
        Proof { identifier: None, session: Some([1; 32]) },
    ] {
        assert!(!claim.proven_by(&stranger), "{stranger:?}");
    }
}

async fn what_was_never_broadcast_may_be_claimed_anew(shop: &Shop) {
    let pay = pay(1);
    let lease = pay.fresh(shop.one()).await;
    let change = Change { reason: Some("handler_failed"), ..Change::default() };
    shop.one().advance(&lease, Arrow::RELEASE, change).await.unwrap().unwrap();
    let claim = shop.two().look(&pay.identity).await.unwrap().unwrap();
    assert_eq!((claim.state, claim.reason.as_deref()), (State::Released, Some("handler_failed")));
    let first = (claim.seen_at, claim.created_ms);
    assert_eq!(first.0, 40);
    shop.later(5).await;
    // For another call, too: it bought nothing yet.
    let other = CallKey { call: [9; 32], round: [9; 32], continues: false };
    let Claimed::Fresh { .. } =
        shop.two().claim(&NewClaim { call: &other, seen_at: 90, ..pay.as_new() }).await.unwrap()
    else {
        panic!()
    };
    let claim = shop.one().look(&pay.identity).await.unwrap().unwrap();
    assert!(claim.is_for(&other) && !claim.is_for(&pay.call) && claim.reason.is_none());
    assert_eq!((claim.seen_at, claim.created_ms), first, "the chain's history of it begins where it was first seen");
}

async fn a_holder_that_was_frozen_changes_nothing(shop: &Shop) {
    let pay = pay(1);
    let frozen = pay.fresh(shop.one()).await;
    shop.one().renew(&frozen).await.unwrap().unwrap();
    shop.later(29_000).await;
    assert!(matches!(shop.two().claim(&pay.as_new()).await.unwrap(), Claimed::Known(_)), "its lease runs");
    shop.one().renew(&frozen).await.unwrap().unwrap();
    shop.later(31_000).await;
    let second = pay.fresh(shop.two()).await;
    assert_eq!(shop.one().renew(&frozen).await.unwrap(), Err(Lost));
    let receipt = receipt();
    for arrow in [Arrow::SETTLE, Arrow::RELEASE, Arrow::REFUSED, Arrow::SETTLED] {
        let change = Change { receipt: Some(&receipt), settle_request: Some(b"x"), ..Change::default() };
        assert_eq!(shop.one().advance(&frozen, arrow, change).await.unwrap(), Err(Lost), "{arrow:?}");
    }
    assert_eq!(pay.state(shop.one()).await, State::Claimed);
    shop.two().advance(&second, Arrow::RELEASE, Change::default()).await.unwrap().unwrap();
}

async fn a_dead_holder_in_settling_leaves_an_unknown_claim_for_one_sweep(shop: &Shop) {
    let (settling, claimed) = (pay(1), pay(2));
    let dead = settling.settling(shop.one()).await;
    claimed.fresh(shop.one()).await;
    assert!(shop.two().due(10).await.unwrap().is_empty(), "both are worked on");
    shop.later(31_000).await;
    let all = join_all([shop.one().due(10), shop.two().due(10)]).await;
    let mut due: Vec<Due> = all.into_iter().flat_map(Result::unwrap).collect();
    assert_eq!(due.len(), 1, "one sweep has it");
    let due = due.remove(0);
    assert_eq!((due.claim.identity, due.claim.state), (settling.identity, State::Unknown));
    assert_eq!(due.claim.reason.as_deref(), Some("holder_gone"));
    assert_eq!(claimed.state(shop.one()).await, State::Released);
    // A settle may have gone out: nobody claims it anew, and the dead holder's yes comes too late.
    assert!(matches!(shop.two().claim(&settling.as_new()).await.unwrap(), Claimed::Known(_)));
    let receipt = receipt();
    let change = Change { receipt: Some(&receipt), ..Change::default() };
    assert_eq!(shop.one().advance(&dead, Arrow::SETTLED, change).await.unwrap(), Err(Lost));
    // Asked again, still unknown, looked at again in its time; then found.
    let again = Change { again_in: Some(Duration::from_secs(60)), ..Change::default() };
    shop.two().advance(&due.lease, Arrow::STILL_UNKNOWN, again).await.unwrap().unwrap();
    assert!(shop.one().due(10).await.unwrap().is_empty());
    shop.later(60_001).await;
    let due = shop.one().due(10).await.unwrap().remove(0);
    assert_eq!(shop.one().settle_request(&settling.identity).await.unwrap().as_deref(), Some(&b"the request"[..]));
    shop.one().advance(&due.lease, Arrow::PROVED, change).await.unwrap().unwrap();
    assert_eq!(settling.state(shop.two()).await, State::Settled);
}

async fn a_sweep_looks_at_every_network_and_at_the_newest(shop: &Shop) {
    let all = [("stellar:testnet", "old", 1..9), ("stellar:testnet", "new", 9..10), ("eip155:8453", "other", 10..12)];
    for (network, nonce, numbers) in all {
        for number in numbers {
            let pay = pay(number);
            let new = NewClaim { network, nonce, ..pay.as_new() };
            let Claimed::Fresh { lease, .. } = shop.one().claim(&new).await.unwrap() else { panic!() };
            let change = Change { settle_request: Some(b"the request"), ..Change::default() };
            shop.one().advance(&lease, Arrow::SETTLE, change).await.unwrap().unwrap();
            shop.one().advance(&lease, Arrow::LOST, Change::default()).await.unwrap().unwrap();
        }
    }
    // Eight are due for longer than all others, and nothing ends them.
    shop.sql("UPDATE claims SET due = 1000, created = 1000 WHERE nonce = 'old'").await;
    shop.sql("UPDATE claims SET due = 2000, created = 2000 WHERE nonce = 'other'").await;
    shop.sql("UPDATE claims SET due = 3000, created = 3000 WHERE nonce = 'new'").await;
    let due = shop.one().due(4).await.unwrap();
    let mut nonces: Vec<&str> = due.iter().map(|due| due.claim.nonce.as_str()).collect();
    nonces.sort_unstable();
    assert_eq!(nonces, ["new", "old", "old", "other"]);
    assert_eq!(shop.two().due(100).await.unwrap().len(), 7, "the rest");
}

async fn a_failed_one_is_found_on_the_chain_or_claimed_anew(shop: &Shop) {
    let pay = pay(1);
    let lease = pay.settling(shop.one()).await;
    let change = Change { reason: Some("settlement_failed: wrong fee"), ..Change::default() };
    shop.one().advance(&lease, Arrow::FAILED, change).await.unwrap().unwrap();
    assert_eq!(shop.two().settle_request(&pay.identity).await.unwrap().as_deref(), Some(&b"the request"[..]));
    // One looks at the chain; meanwhile nobody claims it.
    let looks = shop.one().take(&pay.identity, State::Failed, false).await.unwrap().unwrap();
    assert!(shop.two().take(&pay.identity, State::Failed, false).await.unwrap().is_none());
    assert!(matches!(shop.two().claim(&pay.as_new()).await.unwrap(), Claimed::Known(_)));
    shop.one().advance(&looks, Arrow::STILL_FAILED, Change::default()).await.unwrap().unwrap();
    // Claimed anew: the count of settles stays, the old request goes.
    let lease = pay.fresh(shop.two()).await;
    let claim = shop.one().look(&pay.identity).await.unwrap().unwrap();
    assert_eq!((claim.settles, claim.reason), (1, None));
    assert!(shop.one().settle_request(&pay.identity).await.unwrap().is_none());
    shop.two().advance(&lease, Arrow::REFUSED, Change::default()).await.unwrap().unwrap();
    // Found after all.
    let looks = shop.one().take(&pay.identity, State::Failed, false).await.unwrap().unwrap();
    let receipt = receipt();
    shop.one()
        .advance(&looks, Arrow::FOUND, Change { receipt: Some(&receipt), ..Change::default() })
        .await
        .unwrap()
        .unwrap();
    assert_eq!(pay.state(shop.two()).await, State::Settled);
}

async fn an_identifier_names_one_payment_at_a_time(shop: &Shop) {
    let first = pay(1);
    let mut second = pay(2);
    second.proof = first.proof;
    let lease = first.fresh(shop.one()).await;
    assert!(matches!(shop.two().claim(&second.as_new()).await.unwrap(), Claimed::IdentifierConflict));
    // Another item's identifiers are its own.
    let mut third = pay(3);
    third.proof = first.proof;
    let other = NewClaim { scope: "tool:other", ..third.as_new() };
    assert!(matches!(shop.two().claim(&other).await.unwrap(), Claimed::Fresh { .. }));
    shop.one().advance(&lease, Arrow::RELEASE, Change::default()).await.unwrap().unwrap();
    let lease = second.fresh(shop.two()).await;
    assert!(matches!(shop.one().claim(&first.as_new()).await.unwrap(), Claimed::IdentifierConflict));
    shop.two().advance(&lease, Arrow::REFUSED, Change::default()).await.unwrap().unwrap();
    // The one that failed is found on the chain while its identifier is another's again.
    first.fresh(shop.one()).await;
    let looks = shop.one().take(&second.identity, State::Failed, false).await.unwrap().unwrap();
    let receipt = receipt();
    let found = Change { receipt: Some(&receipt), ..Change::default() };
    shop.one().advance(&looks, Arrow::FOUND, found).await.unwrap().unwrap();
    assert!(shop.two().look(&second.identity).await.unwrap().unwrap().proven_by(&second.proof));
}

async fn free_runs_are_counted_one_at_a_time(shop: &Shop) {
    let pay = pay(1);
    let lease = pay.settling(shop.one()).await;
    let receipt = receipt();
    let change = Change { receipt: Some(&receipt), ..Change::default() };
    // `upfront`: the handler runs under the same lease, and nobody else runs it.
    shop.one().advance(&lease, Arrow::SETTLED_AND_RUNS, change).await.unwrap().unwrap();
    assert!(shop.two().take(&pay.identity, State::Settled, true).await.unwrap().is_none());
    let said = raw(r#"{"result":{"isError":true}}"#);
    let answer = Some(Answer::Failed { round: &pay.call.round, said: &said });
    let failed = Change { answer, reason: Some("handler_failed"), ..Change::default() };
    shop.one().advance(&lease, Arrow::RAN, failed).await.unwrap().unwrap();
    for run in 1..=3 {
        if run == 2 {
            // Two saw that there is no answer, and one of them has made one.
            let lease = shop.one().take(&pay.identity, State::Settled, false).await.unwrap().unwrap();
            let result = raw("{}");
            let kept = Some(Answer::Keep { round: &[8; 32], result: &result, asks: false });
            let change = Change { answer: kept, ..Change::default() };
            shop.one().advance(&lease, Arrow::RAN, change).await.unwrap().unwrap();
            assert!(shop.two().take(&pay.identity, State::Settled, true).await.unwrap().is_none(), "it ran");
            let lease = shop.one().take(&pay.identity, State::Settled, false).await.unwrap().unwrap();
            shop.one().advance(&lease, Arrow::RAN, failed).await.unwrap().unwrap();
        }
        let both = join_all([0, 1].map(|n| shop.replicas[n].take(&pay.identity, State::Settled, true))).await;
        let mut leases: Vec<Lease> = both.into_iter().filter_map(Result::unwrap).collect();
        assert_eq!(leases.len(), 1, "run {run}");
        shop.one().advance(&leases.remove(0), Arrow::RAN, failed).await.unwrap().unwrap();
    }
    assert!(shop.two().take(&pay.identity, State::Settled, true).await.unwrap().is_none(), "no run is left");
    assert_eq!(shop.two().look(&pay.identity).await.unwrap().unwrap().runs, 3);
    assert_eq!(shop.two().failure(&pay.identity, &pay.call.round).await.unwrap().unwrap().get(), said.get());
    assert!(shop.two().answer(&pay.identity, &pay.call.round).await.unwrap().is_none(), "a failure is no answer");
    // A further round of input is none of them.
    let lease = shop.two().take(&pay.identity, State::Settled, false).await.unwrap().unwrap();
    let result = raw(r#"{"resultType":"input_required"}"#);
    let asks =
        Change { answer: Some(Answer::Keep { round: &[4; 32], result: &result, asks: true }), ..Change::default() };
    shop.two().advance(&lease, Arrow::RAN, asks).await.unwrap().unwrap();
    assert_eq!(shop.one().look(&pay.identity).await.unwrap().unwrap().kept, Kept::Asks);
}

async fn an_operator_sees_what_is_open_and_the_history(shop: &Shop) {
    let (open, over) = (pay(1), pay(2));
    open.fresh(shop.one()).await;
    shop.later(5).await;
    let lease = over.fresh(shop.one()).await;
    let change = Change { reason: Some("handler_failed"), ..Change::default() };
    shop.one().advance(&lease, Arrow::RELEASE, change).await.unwrap().unwrap();
    let listed = async |states: &[State], most| {
        shop.two().list(states, most).await.unwrap().into_iter().map(|claim| claim.identity).collect::<Vec<_>>()
    };
    assert_eq!(listed(&[State::Claimed, State::Unknown], 9).await, [open.identity]);
    assert_eq!(listed(&State::ALL, 9).await.len(), 2);
    assert_eq!(listed(&State::ALL, 1).await.len(), 1);
    let whole = hex::encode(over.identity.0);
    for digits in [&whole[..], &whole[..8], &whole[..9]] {
        assert_eq!(shop.two().find(digits).await.unwrap().unwrap().identity, over.identity, "{digits}");
    }
    for digits in [&whole[..7], "", "0909090", "zzzzzzzz", "0000000000"] {
        assert!(shop.two().find(digits).await.unwrap().is_none(), "{digits}");
    }
    let events = shop.two().events(&over.identity).await.unwrap();
    let seen: Vec<_> = events.iter().map(|event| (event.from, event.to, event.reason.as_deref())).collect();
    assert_eq!(seen, [(None, State::Claimed, None), (Some(State::Claimed), State::Released, Some("handler_failed"))]);
    assert!(shop.two().now_ms().await.unwrap() >= events[1].at_ms);
}

async fn arrows_are_taken_from_their_states_only(shop: &Shop) {
    let receipt = receipt();
    let with = |arrow: Arrow| Change {
        receipt: (arrow.to == State::Settled).then_some(&*receipt),
        settle_request: (arrow.to == State::Settling).then_some(&b"r"[..]),
        ..Change::default()
    };
    // From `claimed` and from `settling`, whose holder keeps its lease: every arrow that does not begin there is refused.
    for (n, arrow) in Arrow::ALL.into_iter().enumerate() {
        let pay = pay(n as u8);
        let lease = pay.fresh(shop.one()).await;
        let taken = shop.two().advance(&lease, arrow, with(arrow)).await.unwrap().is_ok();
        assert_eq!(taken, arrow.from == State::Claimed, "{arrow:?}");
        let pay = self::pay(100 + n as u8);
        let lease = pay.settling(shop.one()).await;
        let taken = shop.two().advance(&lease, arrow, with(arrow)).await.unwrap().is_ok();
        assert_eq!(taken, arrow.from == State::Settling, "{arrow:?}");
    }
    // A settled claim is nobody's to change without a lease, and never leaves its state.
    let pay = pay(200);
    let lease = pay.settling(shop.one()).await;
    shop.one().advance(&lease, Arrow::SETTLED, with(Arrow::SETTLED)).await.unwrap().unwrap();
    let lease = shop.one().take(&pay.identity, State::Settled, false).await.unwrap().unwrap();
    for arrow in Arrow::ALL.into_iter().filter(|arrow| *arrow != Arrow::RAN) {
        assert_eq!(shop.one().advance(&lease, arrow, with(arrow)).await.unwrap(), Err(Lost), "{arrow:?}");
    }
}

async fn answers_are_forgotten_and_identities_are_not(shop: &Shop) {
    let (kept, open) = (pay(1), pay(2));
    let result = raw("{}");
    for pay in [&kept, &open] {
        let lease = pay.fresh(shop.one()).await;
        let answer = Some(Answer::Keep { round: &pay.call.round, result: &result, asks: false });
        let change = Change { settle_request: Some(b"r"), answer, ..Change::default() };
        shop.one().advance(&lease, Arrow::SETTLE, change).await.unwrap().unwrap();
        let receipt = receipt();
        let change = Change { receipt: Some(&receipt), ..Change::default() };
        let arrow = if pay.identity == kept.identity { Arrow::SETTLED } else { Arrow::LOST };
        shop.one().advance(&lease, arrow, change).await.unwrap().unwrap();
    }
    assert_eq!(shop.two().forget_answers(100).await.unwrap(), 0);
    shop.later(3_600_001).await;
    assert!(shop.two().answer(&kept.identity, &kept.call.round).await.unwrap().is_none());
    // That of an open settlement is still to be handed over.
    assert_eq!(shop.two().forget_answers(100).await.unwrap(), 1);
    assert!(matches!(shop.two().claim(&kept.as_new()).await.unwrap(), Claimed::Known(_)), "used once, for ever");
}

async fn what_is_stored_is_sealed_for_its_own_row(shop: &Shop) {
    let (a, b) = (pay(1), pay(2));
    for pay in [&a, &b] {
        pay.settling(shop.one()).await;
    }
    let strange = KeyRing::new(vec![vec![8; 32]]).unwrap();
    let sealed = shop.one().sealed_request(&a.identity).await.unwrap();
    assert!(!sealed.windows(11).any(|part| part == b"the request"));
    assert!(ring().open(&request_context(&b.identity), &sealed).is_err(), "another row's");
    assert!(strange.open(&request_context(&a.identity), &sealed).is_err(), "another ring");
    assert_eq!(ring().open(&request_context(&a.identity), &sealed).unwrap(), b"the request");
}
