//! What breaks between the process and its database: a connection cut at COMMIT, a caller that goes away, a row that
//! somebody else holds, a session that was ended.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::ledger::table::{CALL, LEASE_MS, agent, amount, id, limit, unit};

/// What happens to the next COMMIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// It arrives, and its answer does not.
    After,
    /// It does not arrive, and the server sees the end of the connection.
    Before,
    /// It does not arrive, and the server waits for it with every lock held.
    Held,
}

/// Stands between the ledger and its server.
pub(super) struct Proxy {
    port: u16,
    next: Arc<Mutex<Option<Cut>>>,
    pub(super) cuts: Arc<AtomicUsize>,
}

impl Proxy {
    async fn start(server: String) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (next, cuts) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let (cut, counter) = (next.clone(), cuts.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.unwrap();
                tokio::spawn(relay(client, server, cut.clone(), counter.clone()));
            }
        });
        Proxy { port, next, cuts }
    }

    pub(super) fn cut(&self, cut: Cut) {
        *self.next.lock().unwrap() = Some(cut);
    }
}

async fn relay(client: TcpStream, server: TcpStream, next: Arc<Mutex<Option<Cut>>>, cuts: Arc<AtomicUsize>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let answers = tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = match from_client.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        // The ledger sends it alone, as one simple query.
        let cut = match buffer[..n].ends_with(b"COMMIT\0") {
            true => next.lock().unwrap().take(),
            false => None,
        };
        match cut {
            None => {
                if to_server.write_all(&buffer[..n]).await.is_err() {
                    break;
                }
            }
            Some(cut) => {
                answers.abort();
                let _ = answers.await;
                cuts.fetch_add(1, Ordering::SeqCst);
                if cut == Cut::After {
                    to_server.write_all(&buffer[..n]).await.unwrap();
                }
                if cut == Cut::Held {
                    drop(from_client);
                    tokio::time::sleep(Duration::from_secs(20)).await;
                }
                return;
            }
        }
    }
}

/// The ledger of a schema through a proxy.
pub(super) async fn proxied(schema: &Schema) -> (Proxy, PostgresLedger) {
    let url = schema.url();
    let address = url.split_once('@').unwrap().1.split_once('/').unwrap().0.to_owned();
    let proxy = Proxy::start(address.clone()).await;
    let url = url.replace(&address, &format!("127.0.0.1:{}", proxy.port));
    let database = Database::parse(&url, None).unwrap();
    let ledger = PostgresLedger::connect(&database, world(), Some(ring(1)), options()).await.unwrap();
    (proxy, ledger)
}

pub(super) fn request(n: u8) -> SettleRequest<'static> {
    SettleRequest {
        payment_id: id(n),
        amount: amount("100"),
        transaction: None,
        evidence: Evidence::Receipt,
        outcome: Some(b"output"),
        unfinished: false,
    }
}

/// Every method that writes, with the answer to its COMMIT lost: the caller is told what is true, and it is true once.
#[tokio::test]
async fn a_commit_without_an_answer_is_found_out() {
    let schema = Schema::new().await;
    let (proxy, ledger) = proxied(&schema).await;
    let ledger: &dyn Ledger = &ledger;
    let limits = [Limit { per_day: Some(amount("100000")), ..limit() }];
    let mut n = 0u8;
    let mut expected = 0;
    for cut in [Cut::After, Cut::Before] {
        let mut broken = || {
            expected += 1;
            proxy.cut(cut);
        };
        broken();
        ledger.replace_limits("file", &limits).await.unwrap();
        let mut reserve = async |broken: &mut dyn FnMut()| {
            n += 1;
            broken();
            match ledger.decide(&Call { n, call: n, ..CALL }.intent()).await.unwrap() {
                Decision::Fresh(lease) => (n, lease),
                other => panic!("{cut:?}: {other:?}"),
            }
        };

        let (settled, lease) = reserve(&mut broken).await;
        broken();
        assert!(ledger.store_payload(id(settled), &lease, b"payload").await.unwrap());
        broken();
        assert!(matches!(ledger.settle(request(settled)).await.unwrap(), SettleOutcome::Settled));
        broken();
        ledger.answered(id(settled)).await.unwrap();

        let (released, lease) = reserve(&mut broken).await;
        broken();
        assert!(ledger.release(id(released), &lease, Reason::Cancelled).await.unwrap(), "{cut:?}");

        let (recovered, lease) = reserve(&mut broken).await;
        assert!(ledger.store_payload(id(recovered), &lease, b"payload").await.unwrap());
        broken();
        assert!(ledger.in_doubt(id(recovered), &lease, Reason::NoAnswer).await.unwrap(), "{cut:?}");
        broken();
        let Recovery::Taken(taken) = ledger.take_recovery(id(recovered), LEASE_MS).await.unwrap() else {
            panic!("{cut:?}: the lease that was taken is ours")
        };
        broken();
        assert!(ledger.end_recovery(id(recovered), &taken.lease, Some(Reason::NoReceipt)).await.unwrap(), "{cut:?}");
        broken();
        let due = ledger.take_due(10, LEASE_MS).await.unwrap();
        let [(payment, lease)] = &due[..] else { panic!("{cut:?}: {due:?}") };
        assert_eq!(payment.payment_id, id(recovered));
        let now = ledger.now_ms().await.unwrap();
        broken();
        assert!(ledger.look_again(id(recovered), lease, now).await.unwrap(), "{cut:?}");
        let due = ledger.take_due(10, LEASE_MS).await.unwrap();
        broken();
        assert!(ledger.expire(id(recovered), &due[0].1, Reason::ExpiredUnspent).await.unwrap(), "{cut:?}");

        let me = Subject::Agent(agent("a"));
        broken();
        ledger.set_limit(&limits[0]).await.unwrap();
        broken();
        ledger.suspend(&me, Some(&unit())).await.unwrap();
        broken();
        let resumed = ledger.resume(&me, Some(&unit())).await;
        assert!(matches!(resumed, Err(LedgerError::Unavailable(_))), "not run again: {resumed:?}");
        ledger.resume(&me, Some(&unit())).await.unwrap();
        broken();
        ledger.end_session("session", now + 1_000).await.unwrap();
        broken();
        ledger.tidy().await.unwrap();

        for (n, words) in [
            (settled, &["reserved", "settled", "answered"][..]),
            (released, &["reserved", "released"]),
            (recovered, &["reserved", "in_doubt", "recovery", "in_doubt", "released"]),
        ] {
            let (_, events) = ledger.show(&id(n).to_hex()).await.unwrap().unwrap();
            let events: Vec<_> = events.iter().map(|event| event.event.as_str()).collect();
            assert_eq!(events, words, "{cut:?}");
        }
    }
    assert_eq!(proxy.cuts.load(Ordering::SeqCst), expected, "every one was cut");
    assert_eq!(ledger.audit().await.unwrap().differences, []);
    let line = &ledger.budget(&agent("a"), None).await.unwrap()[0];
    assert_eq!((line.day_held, line.day_spent), (Amount::ZERO, amount("200")));
}

/// The session that waits for a COMMIT keeps its locks until the database ends it; the second run waits that long.
#[tokio::test]
async fn a_commit_that_never_arrived_is_made_again_behind_the_locks_of_the_first() {
    let schema = Schema::new().await;
    let (proxy, ledger) = proxied(&schema).await;
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    assert!(matches!(ledger.decide(&CALL.intent()).await.unwrap(), Decision::Fresh(_)));
    proxy.cut(Cut::Held);
    assert!(matches!(ledger.decide(&Call { n: 2, call: 2, ..CALL }.intent()).await.unwrap(), Decision::Fresh(_)));
    proxy.cut(Cut::Held);
    assert!(matches!(ledger.settle(request(2)).await.unwrap(), SettleOutcome::Settled));
    assert_eq!(ledger.audit().await.unwrap().differences, []);
    assert_eq!(ledger.budget(&agent("a"), None).await.unwrap()[0].day_held, amount("100"));
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_no_transaction_open() {
    let schema = Schema::new().await;
    let one = Options { pool_size: 1, ..options() };
    let ledger = schema.open(Some(ring(1)), one).await.unwrap();
    ledger.replace_limits("file", &[limit()]).await.unwrap();
    // Dropped at every await point in turn, until one call gets through.
    for polls in 1.. {
        let intent = CALL.intent();
        let mut call = Box::pin(ledger.decide(&intent));
        let mut left = polls;
        let done = std::future::poll_fn(|cx| match call.as_mut().poll(cx) {
            std::task::Poll::Ready(decision) => std::task::Poll::Ready(Some(decision)),
            std::task::Poll::Pending if left == 1 => std::task::Poll::Ready(None),
            std::task::Poll::Pending => {
                left -= 1;
                std::task::Poll::Pending
            }
        })
        .await;
        drop(call);
        assert_eq!(ledger.audit().await.unwrap().differences, [], "after {polls} polls");
        match done {
            None => assert!(polls < 200, "never done"),
            // The cut may have come after the commit: then the twin is found.
            Some(decision) => {
                assert!(matches!(decision.unwrap(), Decision::Fresh(_) | Decision::Existing(_)));
                break;
            }
        }
    }
    assert_eq!(ledger.budget(&agent("a"), None).await.unwrap()[0].day_held, amount("100"));
}

#[tokio::test]
async fn a_row_that_somebody_else_holds_makes_a_call_busy() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    schema.reserve(CALL).await.unwrap();
    let ledger = schema.open(None, Options { lock_timeout: Duration::from_millis(50), ..options() }).await.unwrap();
    let holder = schema.ledger.begin(tx::Gate::None).await.unwrap();
    holder.run("UPDATE budget_windows SET held = held", &[]).await.unwrap();
    let call = Call { n: 2, call: 2, ..CALL };
    assert!(matches!(ledger.decide(&call.intent()).await, Err(LedgerError::Busy)));
    assert!(matches!(ledger.settle(request(1)).await, Err(LedgerError::Busy)));
    drop(holder);
    assert!(matches!(ledger.decide(&call.intent()).await, Ok(Decision::Fresh(_))));
}

/// A replica that froze after it had taken the gate, and before it decided.
#[tokio::test]
async fn a_stop_waits_for_a_frozen_replica_and_the_database_cuts_it_off() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    let frozen = schema.ledger.begin(tx::Gate::Shared).await.unwrap();
    let other = schema.open(None, options()).await.unwrap();
    let me = Subject::Agent(agent("a"));
    let stop = other.suspend(&me, None);
    let mut stop = std::pin::pin!(stop);
    let early = tokio::time::timeout(Duration::from_millis(300), stop.as_mut()).await;
    assert!(early.is_err(), "a decision is under way");
    stop.await.unwrap();
    assert!(frozen.rows("SELECT 1", &[]).await.is_err(), "it can write nothing any more");
    assert!(matches!(schema.reserve(CALL).await.unwrap(), Decision::Suspended));
}

/// As a failover, a restart of a pooler, or an operator does it: all of the ledger's sessions, those of the lanes too.
#[tokio::test]
async fn sessions_that_were_ended_cost_a_call_nothing() {
    let schema = Schema::new().await;
    schema.ledger.replace_limits("file", &[limit()]).await.unwrap();
    // By its role, so that no other test's sessions are ended.
    let role = format!("{}_role", schema.name);
    schema.sql(&format!("CREATE ROLE {role} SUPERUSER LOGIN")).await.unwrap();
    let url = format!("postgresql://{role}@{}", schema.url().split_once('@').unwrap().1);
    let database = Database::parse(&url, None).unwrap();
    let ledger = PostgresLedger::connect(&database, world(), Some(ring(1)), options()).await.unwrap();
    let end = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'");
    for n in 1..=5 {
        let decided = ledger.decide(&Call { n, call: n, ..CALL }.intent()).await.unwrap();
        assert!(matches!(decided, Decision::Fresh(_)));
        let ended = schema.sql(&end).await.unwrap();
        assert!(ended.len() >= 2, "the lane's session and one of the pool: {ended:?}");
        assert!(matches!(ledger.settle(request(n)).await.unwrap(), SettleOutcome::Settled));
        assert!(ledger.lookup(&agent("a"), By::Id(id(n))).await.unwrap().is_some());
    }
    drop(ledger);
    schema.sql(&format!("DROP ROLE {role}")).await.unwrap();
    assert_eq!(schema.ledger.audit().await.unwrap().differences, []);
}
