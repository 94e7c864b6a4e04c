//! From the signed entry to the seller: an honest node's fee and footprint are taken, a lying one's payment never.

use ed25519_dalek::Signer as _;
use serde_json::{Value, json};
use stellar_xdr::{
    ContractEventBody, DiagnosticEvent, Int128Parts, LedgerKey, Limits, Preconditions, ReadXdr, ScVal,
    SorobanAuthorizationEntry, SorobanAuthorizedFunction, SorobanCredentials, SorobanTransactionData,
    TransactionEnvelope, WriteXdr,
};
use tollway::chain::ChainError;
use tollway::chain::stellar::{Balance, Credentials, PrepareError};
use tollway::money::Amount;
use tollway::sandbox::chain::{Account, Node, USDC};

use super::{Asked, Local, local, signed_by};

const XDR: Limits = Limits { depth: 200, len: 512 * 1024 };

#[tokio::test]
async fn a_prepared_payment_settles_once_in_either_credential_arm() {
    for credentials in [Credentials::Address, Credentials::AddressV2] {
        let local = local();
        let mut settings = local.settings(vec![local.node(Node::default()).await]);
        settings.credentials = credentials;
        let stellar = local.with(settings);
        let at = stellar.ledger().await.unwrap();
        let draft = stellar.draft(&local.offer(), &local.payer.address(), at).unwrap();
        assert_eq!(draft.expiration(), at.sequence + 10, "60 s in ledgers of 6 s");
        let transaction = stellar.prepare(&signed_by(&local.payer, draft)).await.unwrap();

        let TransactionEnvelope::Tx(envelope) = TransactionEnvelope::from_xdr_base64(&transaction, XDR).unwrap() else {
            panic!("a version 1 envelope")
        };
        assert!(envelope.signatures.is_empty());
        assert!(matches!(envelope.tx.cond, Preconditions::Time(bounds) if bounds.max_time.0 > 0));
        assert!(envelope.tx.fee > 100 && envelope.tx.fee <= 50_000, "{}", envelope.tx.fee);

        let settled = local.settle(&transaction).await;
        assert_eq!(settled["success"], true, "{credentials:?}: {settled}");
        assert_eq!(local.network.balance(&local.payer.id()), Some(49_990_000));
        assert_eq!(local.network.balance(&local.seller.id()), Some(10_000));
        let again = local.settle(&transaction).await;
        assert_eq!(again["success"], false, "the nonce is used");
        assert_eq!(local.network.balance(&local.seller.id()), Some(10_000));
    }
}

#[tokio::test]
async fn a_payment_that_the_chain_would_refuse_fails_with_the_chains_reason() {
    // Expired: the ledgers went on.
    let local = local();
    let stellar = local.honest().await;
    let signed = signed_by(&local.payer, local.draft(&stellar));
    for _ in 0..12 {
        local.network.close_now();
    }
    failed(stellar.prepare(&signed).await, "expired");

    // Signed for another network: good there, worth nothing here.
    let mut settings = local.settings(vec![local.node(Node::default()).await]);
    settings.passphrase = "Public Global Stellar Network ; September 2015".into();
    let pubnet = local.with(settings);
    let elsewhere = local.draft(&pubnet);
    assert!(!elsewhere.is_for(tollway::sandbox::chain::PASSPHRASE));
    let signature = local.payer.key.sign(&elsewhere.digest()).to_bytes();
    assert!(local.draft(&stellar).attach(&signature).is_err());
    failed(stellar.prepare(&elsewhere.attach(&signature).unwrap()).await, "another network");

    // More than there is; nobody without a trustline can be paid.
    let mut offer = local.offer();
    offer.amount = Amount::from_u64(50_000_001);
    let draft = stellar.draft(&offer, &local.payer.address(), local.here()).unwrap();
    failed(stellar.prepare(&signed_by(&local.payer, draft)).await, "too much");
    let mut offer = local.offer();
    offer.pay_to = local.network.account("nobody").address();
    let draft = stellar.draft(&offer, &local.payer.address(), local.here()).unwrap();
    failed(stellar.prepare(&signed_by(&local.payer, draft)).await, "no trustline");
}

fn failed(result: Result<String, PrepareError>, what: &str) {
    match result {
        Err(PrepareError::Failed(reason)) => assert!(!reason.is_empty() && reason.len() <= 400, "{what}: {reason}"),
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn what_cannot_be_paid_is_not_drafted() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    let local = local();
    let stellar = local.stellar(Vec::new());
    let refused = |change: fn(&Local, &mut Value), word: &str| {
        let mut text = local.requirements();
        change(&local, &mut text);
        let offer = tollway::x402::Offer::parse(&tollway::json::raw(&text)).unwrap();
        match stellar.draft(&offer, &local.payer.address(), local.here()) {
            Err(ChainError::Unsupported(why)) => assert!(why.contains(word), "{why}"),
            other => panic!("{word}: {other:?}"),
        }
    };
    refused(|_, o| o["extra"] = json!({}), "fees_not_sponsored");
    refused(|_, o| o["extra"]["areFeesSponsored"] = json!(false), "fees_not_sponsored");
    refused(|_, o| o["extra"]["areFeesSponsored"] = json!("true"), "fees_not_sponsored");
    refused(|_, o| o["network"] = json!("stellar:pubnet"), "network");
    refused(|l, o| o["asset"] = json!(l.seller.address()), "token contract");
    let muxed = "MA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJUAAAAAAAAAAAACJUQ";
    refused(
        |_, o| o["payTo"] = json!("MA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJUAAAAAAAAAAAACJUQ"),
        "payTo",
    );
    let offer = local.offer();
    for payer in [muxed, "", "GABC", &USDC.to_lowercase()] {
        assert!(stellar.draft(&offer, payer, local.here()).is_err(), "{payer}");
    }
    let drafts: std::collections::BTreeSet<i64> = (0..50).map(|_| local.draft(&stellar).nonce()).collect();
    assert_eq!(drafts.len(), 50);
    assert!(drafts.iter().all(|nonce| *nonce >= 0));
    let mut long = local.offer();
    long.max_timeout_seconds = 31_536_000;
    let draft = stellar.draft(&long, &local.payer.address(), local.here()).unwrap();
    assert_eq!(draft.expiration(), local.here().sequence + 50, "the operator's 300 s, not the seller's year");
}

/// The entry that the node was given, sent back changed.
fn entry_of(answer: &Value) -> SorobanAuthorizationEntry {
    let text = answer["result"]["results"][0]["auth"][0].as_str().unwrap();
    SorobanAuthorizationEntry::from_xdr_base64(text, XDR).unwrap()
}

fn with_entry(answer: &mut Value, entry: &SorobanAuthorizationEntry) {
    answer["result"]["results"][0]["auth"] = json!([entry.to_xdr_base64(XDR).unwrap()]);
}

fn args(entry: &mut SorobanAuthorizationEntry, change: impl FnOnce(&mut Vec<ScVal>)) {
    let SorobanAuthorizedFunction::ContractFn(call) = &mut entry.root_invocation.function else { panic!("a call") };
    let mut list = call.args.to_vec();
    change(&mut list);
    call.args = list.try_into().unwrap();
}

fn data(answer: &Value) -> SorobanTransactionData {
    let text = answer["result"]["transactionData"].as_str().unwrap();
    SorobanTransactionData::from_xdr_base64(text, XDR).unwrap()
}

/// Every event of the answer, through `change`.
fn events(answer: &mut Value, change: impl Fn(&mut stellar_xdr::ContractEventV0)) {
    let list = answer["result"]["events"].as_array_mut().unwrap();
    assert!(!list.is_empty(), "the node tells its events");
    for text in list {
        let mut event = DiagnosticEvent::from_xdr_base64(text.as_str().unwrap(), XDR).unwrap();
        let ContractEventBody::V0(body) = &mut event.event.body;
        change(body);
        *text = json!(event.to_xdr_base64(XDR).unwrap());
    }
}

fn is(topic: Option<&ScVal>, word: &str) -> bool {
    matches!(topic, Some(ScVal::Symbol(name)) if name.0.as_slice() == word.as_bytes())
}

pub type Lie = fn(&Account, &mut Value);

/// What a lying node makes of its honest answer.
pub fn lies() -> [(&'static str, Lie); 10] {
    [
        ("recipient", |thief, a| {
            let mut entry = entry_of(a);
            args(&mut entry, |list| list[1] = ScVal::Address(thief.address().parse().unwrap()));
            with_entry(a, &entry);
        }),
        ("amount", |_, a| {
            let mut entry = entry_of(a);
            args(&mut entry, |list| list[2] = ScVal::I128(Int128Parts { hi: 0, lo: 40_000_000 }));
            with_entry(a, &entry);
        }),
        ("expiration", |_, a| {
            let mut entry = entry_of(a);
            let SorobanCredentials::Address(credentials) = &mut entry.credentials else { panic!("the Address arm") };
            credentials.signature_expiration_ledger += 100_000;
            with_entry(a, &entry);
        }),
        ("one authorization more", |thief, a| {
            let mut entry = entry_of(a);
            args(&mut entry, |list| list[1] = ScVal::Address(thief.address().parse().unwrap()));
            let more = json!(entry.to_xdr_base64(XDR).unwrap());
            a["result"]["results"][0]["auth"].as_array_mut().unwrap().push(more);
        }),
        ("the event's recipient", |thief, a| {
            events(a, |body| {
                if is(body.topics.first(), "transfer") {
                    let mut topics = body.topics.to_vec();
                    topics[2] = ScVal::Address(thief.address().parse().unwrap());
                    body.topics = topics.try_into().unwrap();
                }
            });
        }),
        ("the event's amount", |_, a| {
            events(a, |body| {
                if is(body.topics.first(), "transfer") {
                    body.data = ScVal::I128(Int128Parts { hi: 0, lo: 40_000_000 });
                }
            });
        }),
        ("the call that the host records", |thief, a| {
            events(a, |body| {
                if is(body.topics.first(), "fn_call") {
                    let ScVal::Vec(Some(list)) = &body.data else { panic!("three arguments") };
                    let mut list = list.to_vec();
                    list[1] = ScVal::Address(thief.address().parse().unwrap());
                    body.data = ScVal::Vec(Some(stellar_xdr::ScVec(list.try_into().unwrap())));
                }
            });
        }),
        ("another nonce in the footprint", |_, a| {
            let mut data = data(a);
            let keys = data.resources.footprint.read_write.to_vec().into_iter().map(|key| match key {
                LedgerKey::ContractData(mut d) => {
                    if let ScVal::LedgerKeyNonce(nonce) = &mut d.key {
                        nonce.nonce ^= 1;
                    }
                    LedgerKey::ContractData(d)
                }
                other => other,
            });
            data.resources.footprint.read_write = keys.collect::<Vec<_>>().try_into().unwrap();
            a["result"]["transactionData"] = json!(data.to_xdr_base64(XDR).unwrap());
        }),
        ("no footprint", |_, a| {
            let mut data = data(a);
            data.resources.footprint = Default::default();
            a["result"]["transactionData"] = json!(data.to_xdr_base64(XDR).unwrap());
        }),
        ("another payment, and then an error", |thief, a| {
            let mut entry = entry_of(a);
            args(&mut entry, |list| list[1] = ScVal::Address(thief.address().parse().unwrap()));
            with_entry(a, &entry);
            a["result"]["error"] = json!("HostError: Error(Auth, InvalidAction)");
        }),
    ]
}

/// The field's own client signs what a simulation returns, and lost money to a node that rewrote it (`chains.md`
/// pitfall 7). Here there is nothing of the node's to sign, and a node that tries is told from an honest one.
#[tokio::test]
async fn a_node_that_answers_with_another_payment_is_lying_and_nothing_leaves() {
    for (what, lie) in lies() {
        let local = local();
        let thief = local.thief.clone();
        let asked = Asked::default();
        let noted = asked.clone();
        let url = local
            .liar(move |method, answer| {
                noted.note(method);
                if method == "simulateTransaction" {
                    lie(&thief, answer);
                }
            })
            .await;
        // An honest second node is no way around the lie: the first one holds the signature.
        let stellar = local.stellar(vec![url, local.node(Node::default()).await]);
        let result = stellar.prepare(&signed_by(&local.payer, local.draft(&stellar))).await;
        assert!(matches!(result, Err(PrepareError::Lying(_))), "{what}: {result:?}");
        assert_eq!(asked.count("simulateTransaction"), 1, "{what}");
        assert_eq!(local.network.balance(&local.thief.id()), Some(0), "{what}");
    }
}

#[tokio::test]
async fn a_fee_above_the_cap_an_archived_entry_and_a_broken_answer_are_told_apart() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change); 8] = [
        ("three times the fee and more", "fee_cap_exceeded", |a| a["result"]["minResourceFee"] = json!("98709")),
        ("a fee beyond 32 bits", "fee_cap_exceeded", |a| a["result"]["minResourceFee"] = json!("10000000000")),
        ("restore", "restored", |a| a["result"]["restorePreamble"] = json!({"minResourceFee": "1"})),
        ("a refusal", "lost", |a| {
            *a = json!({"jsonrpc": "2.0", "id": a["id"], "error": {"code": -1, "message": "no"}})
        }),
        ("no data", "lost", |a| {
            a["result"].as_object_mut().unwrap().remove("transactionData");
        }),
        ("a negative fee", "lost", |a| a["result"]["minResourceFee"] = json!("-1")),
        ("another request's answer", "lost", |a| a["id"] = json!(4711)),
        ("nothing", "lost", |a| {
            a.as_object_mut().unwrap().remove("result");
        }),
    ];
    for (what, expected, change) in cases {
        let local = local();
        let url = local
            .liar(move |method, answer| {
                if method == "simulateTransaction" {
                    change(answer);
                }
            })
            .await;
        let stellar = local.stellar(vec![url]);
        match stellar.prepare(&signed_by(&local.payer, local.draft(&stellar))).await {
            Err(PrepareError::Failed(why)) => assert!(why.contains(expected), "{what}: {why}"),
            Err(PrepareError::Lost(_)) => assert_eq!(expected, "lost", "{what}"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_node_of_another_network_never_sees_the_signature() {
    let local = local();
    let asked = Asked::default();
    let noted = asked.clone();
    let url = local
        .liar(move |method, answer| {
            noted.note(method);
            if method == "getNetwork" {
                answer["result"]["passphrase"] = json!("Public Global Stellar Network ; September 2015");
            }
        })
        .await;
    let stellar = local.stellar(vec![url]);
    assert!(stellar.prepare(&signed_by(&local.payer, local.draft(&stellar))).await.is_err());
    assert!(matches!(stellar.ledger().await, Err(ChainError::Lying(_))));
    assert_eq!((asked.count("simulateTransaction"), asked.count("getLatestLedger")), (0, 0));
}

#[tokio::test]
async fn balances_are_the_tokens_own_words() {
    let local = local();
    let stellar = local.honest().await;
    let asset = USDC.parse().unwrap();
    let of = |n| Balance::Of(Amount::from_u64(n));
    assert_eq!(stellar.balance(&local.payer.address(), &asset).await.unwrap(), of(50_000_000));
    local.network.fund(&local.network.account("bare").id(), 100_000_000);
    let bare = local.network.account("bare").address();
    assert_eq!(stellar.balance(&bare, &asset).await.unwrap(), Balance::NoTrustline);
    local.network.trust(&local.network.account("bare").id(), 7);
    local.network.close_now();
    assert_eq!(stellar.balance(&bare, &asset).await.unwrap(), Balance::NoTrustline, "cached");
    assert_eq!(stellar.balance_fresh(&bare, &asset).await.unwrap(), of(7), "read now");
    assert_eq!(stellar.balance(&bare, &asset).await.unwrap(), of(7));
    let empty = stellar.balance(&local.payer.address(), &local.payer.address().parse().unwrap()).await;
    assert!(empty.is_err(), "an account is no token");
}
