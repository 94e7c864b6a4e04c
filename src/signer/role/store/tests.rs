//! One table of promises, held against both databases.

use futures_util::future::join_all;

use super::*;
use crate::ports::machine;

const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";

/// Two replicas of one book.
struct Books {
    stores: Vec<Store>,
    network: Network,
    schema: Option<(String, String)>,
    _dir: tempfile::TempDir,
}

impl Drop for Books {
    fn drop(&mut self) {
        let Some((server, name)) = self.schema.take() else { return };
        let sql = format!("SET lock_timeout = '5s'; DROP SCHEMA {name} CASCADE; DROP ROLE {name}_serves");
        self.stores.clear();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _ = runtime.block_on(execute(&server, &sql));
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }
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

async fn sqlite() -> Books {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("signer.sqlite");
    let mut stores = Vec::new();
    for _ in 0..2 {
        stores.push(Store::open_sqlite(&path, machine::world().0).await.unwrap());
    }
    Books { stores, network: "stellar:testnet".parse().unwrap(), schema: None, _dir: dir }
}

async fn postgres() -> Books {
    let server = std::env::var("TOLLWAY_TEST_POSTGRES").expect("TOLLWAY_TEST_POSTGRES names no server: ./scripts/test");
    let name = format!("t_{}", hex::encode(machine::world().0.random::<8>()));
    execute(&server, &format!("CREATE SCHEMA {name}")).await.unwrap();
    let database = Database::parse(&server, None).unwrap().in_schema(&name).unwrap();
    let refused = Store::connect(&database).await.err().unwrap().to_string();
    assert!(refused.contains("--migrate"), "{refused}");
    Store::migrate(&database).await.unwrap();
    Store::migrate(&database).await.unwrap();
    // It serves as a role that owns nothing.
    let role = format!("{name}_serves");
    execute(&server, &format!("CREATE ROLE {role} LOGIN")).await.unwrap();
    let url = server.replacen("tollway@", &format!("{role}@"), 1);
    let serves = Database::parse(&url, None).unwrap().in_schema(&name).unwrap();
    let refused = Store::connect(&serves).await.err().unwrap().to_string();
    assert!(refused.contains("--runtime-role"), "{refused}");
    for _ in 0..2 {
        Store::grant(&database, &role).await.unwrap();
    }
    let url = format!("{url}?options=-csearch_path%3D{name}");
    for sql in [
        "DELETE FROM decisions",
        "UPDATE decisions SET caller = 'x'",
        "DELETE FROM signed_nonces",
        "UPDATE signed_nonces SET at = 1",
        "DELETE FROM signed_days",
        "TRUNCATE signed_days",
        "ALTER TABLE signed_days DISABLE TRIGGER ALL",
        "CREATE OR REPLACE FUNCTION signer_now() RETURNS BIGINT LANGUAGE sql AS 'SELECT 0::bigint'",
    ] {
        let error = execute(&url, sql).await.unwrap_err();
        assert_eq!(error.code(), Some(&tokio_postgres::error::SqlState::INSUFFICIENT_PRIVILEGE), "{sql}");
    }
    let stores = vec![Store::connect(&serves).await.unwrap(), Store::connect(&serves).await.unwrap()];
    let network = "stellar:testnet".parse().unwrap();
    Books { stores, network, schema: Some((server, name)), _dir: tempfile::tempdir().unwrap() }
}

fn asked(nonce: i64, amount: u64) -> Asked {
    Asked {
        network_id: [1; 32],
        payer: "GPAYER".into(),
        pay_to: "GSELLER".into(),
        asset: ASSET.into(),
        amount: Amount::from_u64(amount),
        nonce,
        expiration: 100,
        digest: [u8::try_from(nonce.rem_euclid(251)).unwrap(); 32],
    }
}

impl Books {
    fn want<'a>(&'a self, asked: &'a Asked, per_day: Option<u64>) -> Want<'a> {
        let per_day = per_day.map(Amount::from_u64);
        Want { caller: "serve", payment: Some("0123456789abcdef"), network: &self.network, asked, per_day }
    }

    /// What is wrong with changing what was written.
    async fn alter(&self, sql: &str) -> String {
        match (&self.schema, &self.stores[0]) {
            (Some((server, name)), _) => {
                let said = execute(&format!("{server}?options=-csearch_path%3D{name}"), sql).await;
                said.unwrap_err().as_db_error().unwrap().message().to_owned()
            }
            (None, Store::Sqlite(store)) => store.alter(sql).await.unwrap_err().to_string(),
            _ => unreachable!(),
        }
    }
}

async fn promises(books: Books) {
    let [first, second] = &books.stores[..] else { panic!() };
    let (one, two, three) = (asked(1, 60), asked(2, 41), asked(3, 40));
    let fresh = first.reserve(&books.want(&one, Some(100))).await.unwrap();
    let Verdict::Fresh { signed, day } = &fresh else { panic!("{fresh:?}") };
    assert_eq!(*signed, Amount::from_u64(60));

    // The other replica knows it. The same preimage is the same answer; another one with its nonce is refused.
    assert_eq!(second.reserve(&books.want(&one, Some(100))).await.unwrap(), Verdict::Again);
    let other = Asked { digest: [9; 32], amount: Amount::from_u64(1), ..one.clone() };
    assert_eq!(second.reserve(&books.want(&other, Some(100))).await.unwrap(), Verdict::NonceReused);
    assert_eq!(second.look(&books.want(&other, Some(100))).await.unwrap(), Verdict::NonceReused);

    // A trial changes nothing; a refusal burns no nonce; the last unit can be had.
    let full = Verdict::DayCap { day: day.clone(), signed: Amount::from_u64(60) };
    assert_eq!(second.look(&books.want(&two, Some(100))).await.unwrap(), full);
    assert_eq!(second.reserve(&books.want(&two, Some(100))).await.unwrap(), full);
    let last = Verdict::Fresh { day: day.clone(), signed: Amount::from_u64(100) };
    for _ in 0..2 {
        assert_eq!(first.look(&books.want(&three, Some(100))).await.unwrap(), last);
    }
    assert_eq!(first.reserve(&books.want(&three, Some(100))).await.unwrap(), last);
    assert_eq!(
        first.reserve(&books.want(&three, Some(100))).await.unwrap(),
        Verdict::Again,
        "also when the day is full"
    );
    let raised = first.reserve(&books.want(&two, Some(141))).await.unwrap();
    assert_eq!(raised, Verdict::Fresh { day: day.clone(), signed: Amount::from_u64(141) });
    let unlimited = asked(-4, u64::MAX);
    assert!(matches!(first.reserve(&books.want(&unlimited, None)).await.unwrap(), Verdict::Fresh { .. }));
    let most = asked(5, 1);
    let lowered = first.reserve(&books.want(&most, Some(100))).await.unwrap();
    assert!(matches!(lowered, Verdict::DayCap { .. }), "a cap below what was signed: {lowered:?}");

    let line = Line { caller: "serve", payment: None, network: None, asked: None };
    first.refused(&line, No::Malformed).await.unwrap();
    let line = Line { network: Some(&books.network), asked: Some(&one), ..line };
    second.withheld(&line, No::TooLate).await.unwrap();

    let days = first.days(2).await.unwrap();
    let [today] = &days[..] else { panic!("{days:?}") };
    assert_eq!(today.signed, today.by_decisions);
    assert_eq!(today.signed, Amount::from_u64(141).checked_add(Amount::from_u64(u64::MAX)).unwrap());
    first.ping().await.unwrap();

    for sql in ["UPDATE decisions SET caller = 'x'", "DELETE FROM decisions"] {
        assert!(books.alter(sql).await.contains("append-only"), "{sql}");
    }
    for sql in [
        "UPDATE signed_nonces SET at = 1",
        "DELETE FROM signed_nonces",
        "UPDATE signed_days SET signed = '1'",
        "DELETE FROM signed_days",
    ] {
        let said = books.alter(sql).await;
        let words = ["append-only", "only grows", "signed once"];
        assert!(words.iter().any(|word| said.contains(word)), "{sql}: {said}");
    }
}

/// Bursts over both replicas: of 60 different payments of 7, exactly 14 fit below 100; of 20 twins of one, one is fresh.
async fn bursts(books: Books) {
    let all: Vec<Asked> = (0..60).map(|nonce| asked(nonce, 7)).collect();
    let twin = Asked { asset: "CTWIN".into(), ..asked(777, 7) };
    let mut tries: Vec<(usize, &Asked)> = all.iter().enumerate().collect();
    tries.extend((0..20).map(|i| (i, &twin)));
    let wants: Vec<_> = tries.iter().map(|(i, asked)| (*i, books.want(asked, Some(100)))).collect();
    let verdicts = join_all(wants.iter().map(|(i, want)| books.stores[i % 2].reserve(want))).await;
    let fresh = |asset: &str| {
        let of = |(want, verdict): &(&(usize, Want<'_>), &Result<Verdict, LedgerError>)| {
            want.1.asked.asset == asset && matches!(verdict, Ok(Verdict::Fresh { .. }))
        };
        wants.iter().zip(&verdicts).filter(of).count()
    };
    assert_eq!(fresh(ASSET), 14, "{verdicts:?}");
    assert_eq!(fresh("CTWIN"), 1, "{verdicts:?}");
    let again = verdicts.iter().filter(|verdict| matches!(verdict, Ok(Verdict::Again))).count();
    assert_eq!(again, 19);
    for day in books.stores[0].days(2).await.unwrap() {
        assert_eq!(day.signed, day.by_decisions);
    }
}

#[tokio::test]
async fn the_book_keeps_its_promises_in_sqlite() {
    promises(sqlite().await).await;
}

#[tokio::test]
async fn the_book_keeps_its_promises_in_postgresql() {
    promises(postgres().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_replicas_never_pass_the_day_in_sqlite() {
    bursts(sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_replicas_never_pass_the_day_in_postgresql() {
    bursts(postgres().await).await;
}
