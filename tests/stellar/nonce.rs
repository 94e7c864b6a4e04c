//! "Was this authorization used?", answered by a real host's own entries: what releases money, and what must not.

use std::sync::Arc;

use serde_json::json;
use stellar_xdr::{ContractExecutable, Hash, LedgerEntryData, Limits, ReadXdr, ScVal, WriteXdr};
use tollway::chain::NonceReading;
use tollway::chain::stellar::{Draft, NonceQuestion, Stellar, TransactionStatus, Transfer, UsedBy};
use tollway::json;
use tollway::money::Amount;
use tollway::ports::World;
use tollway::sandbox::chain::{Node, USDC_ISSUER};
use tollway::x402::Offer;
use url::Url;

use super::{Local, local, local_with, signed_by};

async fn read(stellar: &Stellar, draft: &Draft, reserved_at: u32) -> NonceReading {
    let transfer = draft.transfer();
    let question = NonceQuestion {
        payer: &transfer.payer,
        pay_to: &transfer.pay_to,
        asset: &transfer.asset,
        nonce: draft.nonce(),
        amount: None,
        expiration: draft.expiration(),
        reserved_at,
        reserved_ms: 0,
    };
    stellar.nonce_reading(question).await
}

fn unsure(reading: NonceReading, word: &str) {
    match reading {
        NonceReading::Inconclusive(why) => assert!(why.contains(word), "{why}"),
        other => panic!("{word}: {other:?}"),
    }
}

/// Closes ledgers until `sequence` is the newest.
fn close_to(local: &Local, sequence: u32) {
    assert!(local.here().sequence <= sequence);
    while local.here().sequence < sequence {
        local.network.close_now();
    }
}

async fn nowhere() -> Url {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap()
}

#[tokio::test]
async fn unused_is_open_until_the_expiration_ledger_has_closed_and_dead_from_then_on() {
    let local = local();
    let stellar = local.honest().await;
    let start = local.here().sequence;
    let draft = local.draft(&stellar);
    // A nonce that was never used, in a transaction that failed, or in none: the same.
    for (ledger, expected) in [
        (start, NonceReading::Open),
        (draft.expiration() - 1, NonceReading::Open),
        (draft.expiration(), NonceReading::Dead),
        (start + 19, NonceReading::Dead),
        // The entry's minimum life of 20 ledgers is over: the complete history decides.
        (start + 30, NonceReading::Dead),
    ] {
        close_to(&local, ledger);
        assert_eq!(read(&stellar, &draft, start).await, expected, "ledger {ledger} of {start}");
    }
}

#[tokio::test]
async fn a_used_nonce_is_found_while_its_entry_lives_and_in_the_history_after_it() {
    let local = local();
    let stellar = local.honest().await;
    let start = local.here().sequence;
    // The same transfer twice: amounts prove nothing, the nonce does.
    let (ours, other) = (local.draft(&stellar), local.draft(&stellar));
    let transaction = stellar.prepare(&signed_by(&local.payer, ours.clone())).await.unwrap();
    let settled = local.settle(&transaction).await;
    assert_eq!(settled["success"], true, "{settled}");
    let hash = settled["transaction"].as_str().unwrap();
    let TransactionStatus::Success { ledger } = stellar.transaction(hash).await.unwrap() else { panic!("success") };
    let used = NonceReading::Used { ledger: ledger.into() };
    assert_eq!(read(&stellar, &ours, start).await, used);
    close_to(&local, ledger + 45);
    assert_eq!(read(&stellar, &ours, start).await, used, "from the history");
    assert_eq!(read(&stellar, &other, start).await, NonceReading::Dead, "another payment of the same amount");
    let unknown = stellar.transaction(&"0".repeat(64)).await.unwrap();
    assert!(matches!(unknown, TransactionStatus::NotFound { latest, .. } if latest == local.here().sequence));
    for bad in ["", "xyz", &"0".repeat(63), &"g".repeat(64)] {
        assert!(stellar.transaction(bad).await.is_err(), "{bad:?}");
    }
}

/// A node that ran ahead when the payment was reserved: the row's own ledger number is too high, and the use is one.
#[tokio::test]
async fn a_use_before_the_ledger_that_a_node_named_at_the_reservation_is_a_use() {
    let local = local();
    let stellar = local.honest().await;
    let draft = local.draft(&stellar);
    let transaction = stellar.prepare(&signed_by(&local.payer, draft.clone())).await.unwrap();
    let hash = local.submit(&transaction).await;
    let ledger = local.here().sequence;
    assert_eq!(read(&stellar, &draft, ledger + 5).await, NonceReading::Used { ledger: ledger.into() });
    let transfer = draft.transfer();
    let question = NonceQuestion {
        payer: &transfer.payer,
        pay_to: &transfer.pay_to,
        asset: &transfer.asset,
        nonce: draft.nonce(),
        amount: None,
        expiration: draft.expiration(),
        reserved_at: ledger + 5,
        reserved_ms: 0,
    };
    assert_eq!(stellar.transaction_of(question, ledger).await, Some(hash));
}

/// What goes to the asset's issuer is burnt: no transfer event tells of it, and yet it was paid.
#[tokio::test]
async fn a_payment_to_the_assets_issuer_is_in_the_history_too() {
    let local = local();
    let stellar = local.honest().await;
    let start = local.here().sequence;
    let requirements = local.requirements_to(USDC_ISSUER);
    let offer = Offer::parse(&json::raw(&requirements)).unwrap();
    let draft = stellar.draft(&offer, &local.payer.address(), local.here()).unwrap();
    let transaction = stellar.prepare(&signed_by(&local.payer, draft.clone())).await.unwrap();
    let hash = local.submit(&transaction).await;
    let TransactionStatus::Success { ledger } = stellar.transaction(&hash).await.unwrap() else { panic!("success") };
    close_to(&local, ledger + 45);
    assert_eq!(read(&stellar, &draft, start).await, NonceReading::Used { ledger: ledger.into() });
}

/// Another token may move balances without an event: its silence frees nothing.
#[tokio::test]
async fn the_history_of_a_token_that_is_no_stellar_asset_proves_no_absence() {
    let local = local();
    let start = local.here().sequence;
    let liar = local
        .liar(|method, answer| {
            let entries = answer["result"]["entries"].as_array_mut();
            for entry in entries.into_iter().flatten().filter(|_| method == "getLedgerEntries") {
                let read = LedgerEntryData::from_xdr_base64(entry["xdr"].as_str().unwrap(), Limits::none()).unwrap();
                let LedgerEntryData::ContractData(mut data) = read else { continue };
                let ScVal::ContractInstance(instance) = &mut data.val else { continue };
                instance.executable = ContractExecutable::Wasm(Hash([1; 32]));
                entry["xdr"] = LedgerEntryData::ContractData(data).to_xdr_base64(Limits::none()).unwrap().into();
            }
        })
        .await;
    let stellar = local.stellar(vec![liar]);
    let draft = local.draft(&stellar);
    close_to(&local, start + 19);
    assert_eq!(read(&stellar, &draft, start).await, NonceReading::Dead, "by the entry alone");
    close_to(&local, start + 30);
    unsure(read(&stellar, &draft, start).await, "no Stellar asset");
}

#[tokio::test]
async fn beyond_retention_nothing_is_concluded() {
    let local = local_with(|options| options.retention = 5);
    let stellar = local.honest().await;
    let start = local.here().sequence;
    let draft = local.draft(&stellar);
    close_to(&local, start + 19);
    assert_eq!(read(&stellar, &draft, start).await, NonceReading::Dead, "by the entry alone");
    close_to(&local, start + 30);
    unsure(read(&stellar, &draft, start).await, "no longer keeps");
}

#[tokio::test]
async fn absence_needs_every_node_and_presence_one() {
    let local = local();
    let honest = local.node(Node::default()).await;
    let lagging = Node::default();
    let behind = local.node(lagging.clone()).await;
    let start = local.here().sequence;
    let both = local.stellar(vec![behind, honest.clone()]);
    let draft = local.draft(&both);
    close_to(&local, draft.expiration() + 2);
    lagging.set_lag(5);
    assert_eq!(read(&both, &draft, start).await, NonceReading::Open, "one has not seen the end yet");
    lagging.set_lag(0);
    assert_eq!(read(&both, &draft, start).await, NonceReading::Dead);
    let one_down = local.stellar(vec![honest.clone(), nowhere().await]);
    assert!(matches!(read(&one_down, &draft, start).await, NonceReading::Inconclusive(_)));

    // Two nodes that hide the entry do not outvote the one that shows it.
    let start = local.here().sequence;
    let draft = local.draft(&both);
    let transaction = both.prepare(&signed_by(&local.payer, draft.clone())).await.unwrap();
    assert_eq!(local.settle(&transaction).await["success"], true);
    let hide = |method: &str, answer: &mut serde_json::Value| {
        if method == "getLedgerEntries" {
            answer["result"]["entries"] = json!([]);
        }
    };
    let hiding = [local.liar(hide).await, local.liar(hide).await];
    let three = local.stellar(vec![hiding[0].clone(), hiding[1].clone(), honest]);
    assert!(matches!(read(&three, &draft, start).await, NonceReading::Used { .. }));
}

#[tokio::test]
async fn a_node_that_is_ahead_of_time_hides_the_settings_or_invents_a_use_proves_nothing() {
    let local = local();
    let start = local.here().sequence;
    let ahead = local
        .liar(|method, answer| {
            if method == "getLedgerEntries" {
                let latest = answer["result"]["latestLedger"].as_u64().unwrap();
                answer["result"]["latestLedger"] = json!(latest + 60);
            }
        })
        .await;
    let mut settings = local.settings(vec![ahead]);
    settings.min_ledger_ms = 60_000;
    let stellar = local.with(settings);
    let draft = local.draft(&stellar);
    unsure(read(&stellar, &draft, start).await, "cannot have come yet");

    let hidden = local
        .liar(|method, answer| {
            let entries = &mut answer["result"]["entries"];
            let found = |e: &serde_json::Value| e.as_array().is_some_and(|all| !all.is_empty());
            if method == "getLedgerEntries" && found(entries) {
                *entries = json!([]);
            }
        })
        .await;
    close_to(&local, draft.expiration() + 1);
    unsure(read(&local.stellar(vec![hidden]), &draft, start).await, "minimum temporary TTL");

    let honest = local.honest().await;
    let start = local.here().sequence;
    let draft = local.draft(&honest);
    let transaction = honest.prepare(&signed_by(&local.payer, draft.clone())).await.unwrap();
    assert_eq!(local.settle(&transaction).await["success"], true);
    let late = draft.expiration() + 1;
    let inventing = local
        .liar(move |method, answer| {
            if method == "getLedgerEntries" {
                answer["result"]["entries"][0]["lastModifiedLedgerSeq"] = json!(late);
            }
        })
        .await;
    unsure(read(&local.stellar(vec![inventing]), &draft, start).await, "cannot have been");
}

/// A seller asks about a payer who signs what he likes: the nonce of a payment, spent on another call.
#[tokio::test]
async fn to_a_seller_a_nonce_that_was_spent_on_another_call_is_no_payment() {
    let local = local();
    let start = local.here().sequence;
    let node = local.node(Node::default()).await;
    // Each of them draws the same nonce.
    let same =
        || local.at(local.settings(vec![node.clone()]), World { entropy: Arc::new(Same), ..local.world.clone() });
    let (paying, stealing) = (same(), same());
    let ours = local.draft(&paying);
    let elsewhere = Offer::parse(&json::raw(&local.requirements_to(&local.thief.address()))).unwrap();
    let theirs = stealing.draft(&elsewhere, &local.payer.address(), local.here()).unwrap();
    assert_eq!(ours.nonce(), theirs.nonce());
    let transaction = stealing.prepare(&signed_by(&local.payer, theirs.clone())).await.unwrap();
    let hash = local.submit(&transaction).await;
    let ledger = local.here().sequence;

    let of = |draft: &Draft| (draft.transfer().clone(), draft.nonce(), draft.expiration());
    let ask = async |of: &(Transfer, i64, u32), amount: Amount| {
        let (transfer, nonce, expiration) = of;
        let question = NonceQuestion {
            payer: &transfer.payer,
            pay_to: &transfer.pay_to,
            asset: &transfer.asset,
            nonce: *nonce,
            amount: Some(amount),
            expiration: *expiration,
            reserved_at: start,
            reserved_ms: 0,
        };
        (paying.nonce_reading(question).await, paying.used_by(question, &hash).await.unwrap())
    };
    let (ours, theirs) = (of(&ours), of(&theirs));
    let (reading, by) = ask(&ours, ours.0.amount).await;
    unsure(reading, "no RPC shows that this paid");
    assert_eq!(by, UsedBy::Another { ledger });
    let used = (NonceReading::Used { ledger: ledger.into() }, UsedBy::This { ledger });
    assert_eq!(ask(&theirs, theirs.0.amount).await, used, "who was paid sees it");
    let (reading, by) = ask(&theirs, Amount::from_u64(9_999)).await;
    unsure(reading, "no RPC shows that this paid");
    assert_eq!(by, UsedBy::Another { ledger }, "another amount");
    // When the entry is gone, the history says that nothing was paid and cannot be any more.
    close_to(&local, ledger + 45);
    assert_eq!(ask(&ours, ours.0.amount).await.0, NonceReading::Dead);
    assert_eq!(ask(&theirs, theirs.0.amount).await.0, used.0);
}

struct Same;
impl tollway::ports::Entropy for Same {
    fn fill(&self, bytes: &mut [u8]) {
        bytes.fill(0x5a);
    }
}
