//! The attacker has the process of `tollway serve` with its bearer key, and asks for whatever it likes, of two replicas
//! at once. What counts is what could move on a chain: distinct preimages with a signature that verifies.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use tollway::signer::role::store::Store;

use super::*;
use crate::postgres::Schema;

/// Every lie that one request can tell, and the word that answers it.
fn lies() -> Vec<(&'static str, Ask, &'static str)> {
    let good = Ask::good(1, 10);
    let mut all: Vec<(&'static str, Ask, &'static str)> = Vec::new();
    let mut lie = |what: &'static str, word: &'static str, change: &dyn Fn(&mut Ask)| {
        let mut ask = good.clone();
        change(&mut ask);
        all.push((what, ask, word));
    };
    lie("another network's money", "network_not_allowed", &|ask| {
        ask.passphrase = "Public Global Stellar Network ; September 2015"
    });
    lie("another network, and said so", "network_not_allowed", &|ask| {
        ask.passphrase = "Public Global Stellar Network ; September 2015";
        ask.says["network"] = "stellar:pubnet".into();
        ask.says["networkPassphrase"] = ask.passphrase.into();
    });
    lie("a network's wrong name", "network_mismatch", &|ask| ask.says["network"] = "stellar:pubnet".into());
    lie("a wrong passphrase", "network_mismatch", &|ask| ask.says["networkPassphrase"] = "x".into());
    lie("another contract", "asset_not_allowed", &|ask| ask.contract = contract(8));
    lie("an account as contract", "not_a_transfer", &|ask| ask.contract = account(&own()));
    for function in ["approve", "transfer_from", "burn", "mint", "set_admin", "transfer_", "Transfer", ""] {
        lie("another function", "not_a_transfer", &|ask| ask.function = function);
    }
    lie("something underneath", "sub_invocations", &|ask| ask.sub = 1);
    lie("much underneath", "sub_invocations", &|ask| ask.sub = 10);
    lie("deep", "unreadable_preimage", &|ask| ask.sub = 100);
    lie("a fourth argument", "not_a_transfer", &|ask| ask.args.push(ScVal::Void));
    lie("two arguments", "not_a_transfer", &|ask| drop(ask.args.pop()));
    lie("an unsigned amount", "not_a_transfer", &|ask| ask.args[2] = ScVal::U64(10));
    lie("nothing", "not_a_transfer", &|ask| ask.args[2] = i128(0));
    lie("a negative amount", "not_a_transfer", &|ask| ask.args[2] = i128(-10));
    lie("all there is", "amount_too_large", &|ask| ask.args[2] = i128(i128::MAX));
    lie("one above the cap", "amount_too_large", &|ask| ask.args[2] = i128(101));
    lie("another's money", "not_my_account", &|ask| ask.args[0] = ScVal::Address(account(&other(9))));
    lie("another address in words", "not_my_account", &|ask| ask.says["address"] = other(9).into());
    lie("another address in the arm", "not_my_account", &|ask| ask.with_address = Some(account(&other(9))));
    lie("another recipient", "recipient_not_allowed", &|ask| ask.args[1] = ScVal::Address(account(&other(9))));
    lie("a contract as recipient", "recipient_not_allowed", &|ask| ask.args[1] = ScVal::Address(contract(9)));
    lie("a muxed recipient", "recipient_not_allowed", &|ask| {
        let key = PublicKey::from_string(&other(2)).unwrap().0;
        let muxed = stellar_xdr::MuxedEd25519Account { id: 1, ed25519: stellar_xdr::Uint256(key) };
        ask.args[1] = ScVal::Address(ScAddress::MuxedAccount(muxed));
    });
    lie("for ever", "life_too_long", &|ask| ask.expiration = u32::MAX);
    lie("an hour", "life_too_long", &|ask| ask.expiration = NEWEST + 600);
    lie("dead", "expired", &|ask| ask.expiration = NEWEST - 1);
    lie("too late", "too_late", &|ask| ask.says["payment"] = json!({"signBefore": 1}));
    lie("a small payment in words", "amount_too_large", &|ask| {
        ask.args[2] = i128(5_000);
        ask.says["payment"] = json!({"amount": "1", "payTo": other(2), "asset": contract(7).to_string()});
    });
    lie("a good recipient in words", "recipient_not_allowed", &|ask| {
        ask.args[1] = ScVal::Address(account(&other(9)));
        ask.says["payment"] = json!({"amount": "10", "payTo": other(2), "asset": contract(7).to_string()});
    });
    lie("a member more", "malformed_request", &|ask| ask.says["policy"] = json!({"unlimited": true}));
    lie("no payment that can be read", "malformed_request", &|ask| ask.says["payment"] = json!([1]));
    all
}

/// Bodies that are none.
fn garbage() -> Vec<(&'static str, Vec<u8>)> {
    let good = Ask::good(1, 10);
    let twice = String::from_utf8(good.body()).unwrap().replacen('{', "{\"network\":\"stellar:pubnet\",", 1);
    let with = |xdr: String| {
        let mut body = good.says.clone();
        body["authEntryXdr"] = xdr.into();
        body.to_string().into_bytes()
    };
    let mut longer = good.preimage();
    longer.extend([0; 4]);
    vec![
        ("empty", Vec::new()),
        ("no JSON", b"\xff\xfe{".to_vec()),
        ("a member twice", twice.into_bytes()),
        ("deep", format!("{}{}", "[".repeat(5_000), "]".repeat(5_000)).into_bytes()),
        ("huge", vec![b' '; 1 << 20]),
        ("no base64", with("%%%".into())),
        ("no XDR", with(STANDARD.encode([0xff; 64]))),
        ("cut", with(STANDARD.encode(&good.preimage()[..40]))),
        ("bytes behind", with(STANDARD.encode(longer))),
        ("a long XDR", with(STANDARD.encode(vec![0; 40_000]))),
    ]
}

async fn attack(mut file: Value, environment: Environment) {
    file["tls"]["reload_ms"] = 60_000.into();
    let stand = Stand::start(&file, &environment, 2).await;
    let client = stand.client();
    // Preimages with a signature that verifies, and what each moves.
    let mut left: BTreeMap<Vec<u8>, i128> = BTreeMap::new();

    for (i, (what, ask, word)) in lies().into_iter().enumerate() {
        let (status, answer) = post(&client, &stand.urls[i % 2], Some(SECRET), ask.body()).await.unwrap();
        assert!(!verifies(&ask.preimage(), &answer), "{what}: signed");
        assert_eq!(answer["error"], word, "{what}: {status} {answer}");
        assert!([401, 403, 422].contains(&status), "{what}: {status}");
    }
    for (what, body) in garbage() {
        // A body that is cut off may end the connection.
        if let Ok((status, answer)) = post(&client, &stand.urls[0], Some(SECRET), body).await {
            assert!(
                (400..500).contains(&status) && answer["signedAuthEntryXdr"].is_null(),
                "{what}: {status} {answer}"
            );
        }
    }
    for secret in [None, Some(""), Some(&SECRET[1..]), Some("0123456789abcdef0123456789abcdeF")] {
        let (status, answer) = post(&client, &stand.urls[0], secret, Ask::good(1, 10).body()).await.unwrap();
        assert_eq!((status, answer["signedAuthEntryXdr"].is_null()), (401, true), "{secret:?}");
    }

    // Bursts against the day, over both replicas: 60 nonces, each for three amounts and one of them twice, in both arms.
    let mut asks = Vec::new();
    for nonce in 0..60 {
        for amount in [33, 100, 100, 7] {
            let mut ask = Ask::good(nonce, amount);
            ask.with_address = (nonce % 2 == 0).then(|| account(&own()));
            asks.push((amount, ask));
        }
    }
    let sent = asks
        .iter()
        .enumerate()
        .map(|(i, (_, ask))| post(&client, &stand.urls[(i / 2 + i) % 2], Some(SECRET), ask.body()));
    for ((amount, ask), answer) in asks.iter().zip(join_all(sent).await) {
        if verifies(&ask.preimage(), &answer.unwrap().1) {
            left.insert(ask.preimage(), *amount);
        }
    }
    // Replays of everything, and every nonce with another content.
    for (i, (amount, ask)) in asks.iter().enumerate() {
        let (_, answer) = post(&client, &stand.urls[i % 2], Some(SECRET), ask.body()).await.unwrap();
        if verifies(&ask.preimage(), &answer) {
            left.insert(ask.preimage(), *amount);
        }
    }
    let total: i128 = left.values().sum();
    assert!(total <= 1_000, "{total} left, and the day's cap is 1,000");
    assert!(total > 900, "{total}: the attack did not reach the cap");
    let mut nonces: Vec<i64> =
        asks.iter().filter(|(_, a)| left.contains_key(&a.preimage())).map(|(_, a)| a.nonce).collect();
    nonces.dedup();
    assert_eq!(nonces.len(), left.len(), "a nonce was signed with two contents");

    // What was signed is answered again, byte for byte; the day is full for the rest of it, on both.
    let (_, ask) = asks.iter().find(|(_, ask)| left.contains_key(&ask.preimage())).unwrap();
    let again = [&stand.urls[0], &stand.urls[1]].map(|url| post(&client, url, Some(SECRET), ask.body()));
    let again: Vec<_> = join_all(again).await.into_iter().map(|answer| answer.unwrap()).collect();
    assert!(again[0] == again[1] && verifies(&ask.preimage(), &again[0].1));
    for url in &stand.urls {
        let ask = Ask::good(9_999, 100);
        let (status, answer) = post(&client, url, Some(SECRET), ask.body()).await.unwrap();
        assert_eq!((status, answer["error"].as_str()), (403, Some("day_cap")));
    }

    // The book agrees with what left.
    for role in &stand.roles {
        let days = role.store.days(2).await.unwrap();
        assert!(days.iter().all(|day| day.signed == day.by_decisions));
        let counted: i128 = days.iter().map(|day| day.signed.to_i128().unwrap()).sum();
        assert!(counted >= total && counted <= 1_000, "{counted} counted, {total} left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_everything_that_serve_has_no_more_leaves_than_the_policy_allows() {
    let dir = tempfile::tempdir().unwrap();
    attack(file(dir.path()), environment()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_of_two_replicas_on_one_postgresql() {
    let schema = Schema::new().await;
    let dir = tempfile::tempdir().unwrap();
    let mut environment = environment();
    environment.0.insert("SIGNER_DATABASE_URL", schema.url.clone());
    let mut file = file(dir.path());
    file["database"] = json!({"store": "postgres"});
    Store::migrate(&schema.database()).await.unwrap();
    attack(file, environment).await;
}

#[tokio::test]
async fn a_caller_that_asks_too_often_is_refused_and_written_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = file(dir.path());
    file["bearer_keys"]["max_requests_per_second"] = 1.into();
    let stand = Stand::start(&file, &environment(), 1).await;
    let client = stand.client();
    let mut words = Vec::new();
    for nonce in 0..5 {
        let (status, answer) = post(&client, &stand.urls[0], Some(SECRET), Ask::good(nonce, 1).body()).await.unwrap();
        words.push((status, answer["error"].as_str().unwrap_or("signed").to_owned()));
    }
    assert_eq!(words[0].1, "signed");
    assert!(words.contains(&(403, "too_many_requests".to_owned())), "{words:?}");
}

#[tokio::test]
async fn a_database_that_is_gone_signs_nothing() {
    let schema = Schema::new().await;
    let dir = tempfile::tempdir().unwrap();
    let mut environment = environment();
    environment.0.insert("SIGNER_DATABASE_URL", schema.url.clone());
    let mut file = file(dir.path());
    file["database"] = json!({"store": "postgres"});
    Store::migrate(&schema.database()).await.unwrap();
    let stand = Stand::start(&file, &environment, 1).await;
    let client = stand.client();
    crate::postgres::sql(&schema.url, "DROP TABLE signed_days").await.unwrap();
    let (status, answer) = post(&client, &stand.urls[0], Some(SECRET), Ask::good(1, 1).body()).await.unwrap();
    assert_eq!((status, answer["error"].as_str()), (403, Some("store_unavailable")), "{answer}");
}
