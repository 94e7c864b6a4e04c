//! Parse to guard: nothing is reserved, nothing is signed, and the seller sees no payment.

use serde_json::json;
use tokio_util::sync::CancellationToken;
use tollway::catalog::{Kind, ResourceRef};
use tollway::ledger::{Ledger as _, SetPin};
use tollway::money::Unit;
use tollway::policy::{Origin, Pinning, Policy};

use super::bench::{self, ASSET, Bench, Change, NETWORK, PAY_TO, all, output, result, said, with_receipt};
use super::server::Reply;

/// No row, no payment.
async fn untouched(bench: &Bench) {
    assert_eq!(bench.calls().1, 0, "the seller saw a payment");
    let rows = bench.ledger.real.list(&all()).await.unwrap();
    assert!(rows.is_empty(), "{rows:?}");
}

#[tokio::test]
pub async fn wrong_arguments_are_refused_by_name() {
    let bench = Bench::new().await;
    let http = ResourceRef::new(Kind::Http, "https://s.example/x", None).unwrap().to_string();
    for (change, field) in [
        (json!({"ref": null}), "ref"),
        (json!({"ref": "v1.nonsense"}), "ref"),
        (json!({"ref": http}), "ref"),
        (json!({"network": "base"}), "network"),
        (json!({"maxAtomicAmount": 20000}), "maxAtomicAmount"),
        (json!({"maxAtomicAmount": "2e4"}), "maxAtomicAmount"),
        (json!({"idempotencyKey": "short"}), "idempotencyKey"),
        (json!({"arguments": []}), "arguments"),
        (json!({"requestState": {}}), "requestState"),
        (json!({"privateKey": "x"}), "privateKey"),
        (json!({"idempotency_key": "0123456789abcdef"}), "idempotency_key"),
    ] {
        assert_eq!(said(&bench.call(change).await), ("INVALID_ARGUMENT", field, "no"));
    }
    assert!(bench.catalog.requests().is_empty());
    untouched(&bench).await;
}

#[tokio::test]
pub async fn a_scheme_that_cannot_be_paid_is_refused_before_anybody_is_asked() {
    let bench = Bench::new().await;
    let answer = bench.call(json!({"scheme": "upto"})).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "scheme_unavailable", "no"));
    assert!(bench.catalog.requests().is_empty());
}

#[tokio::test]
pub async fn a_network_that_is_not_enabled_is_refused_before_anybody_is_asked() {
    let bench = Bench::new().await;
    for network in ["stellar:pubnet", "eip155:8453"] {
        let answer = bench.call(json!({"network": network})).await;
        assert_eq!(said(&answer), ("PAYMENT_REJECTED", "network_disabled", "no"));
    }
    assert!(bench.catalog.requests().is_empty());
}

#[tokio::test]
pub async fn what_the_catalog_does_not_list_is_not_called() {
    let bench = Bench::new().await;
    bench.says(|s| s.catalog = Some(Reply::status(404, r#"{"error":"not_found"}"#)));
    assert_eq!(said(&bench.call(json!({})).await), ("NO_RESULTS", "not_listed", "no"));
    assert!(bench.seller.requests().is_empty());
}

#[tokio::test]
pub async fn a_catalog_that_fails_is_the_catalogs_failure() {
    let bench = Bench::new().await;
    bench.says(|s| s.catalog = Some(Reply::status(500, "{}")));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", "catalog", "no"));
    bench.says(|s| s.catalog = Some(Reply::json("<html>")));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", "catalog", "no"));
    bench.says(|s| s.catalog = Some(Reply::Hang));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_TIMEOUT", "catalog", "no"));
    assert!(bench.seller.requests().is_empty());
}

#[tokio::test]
pub async fn another_version_than_the_expected_is_refused_before_the_seller_is_asked() {
    let bench = Bench::new().await;
    let answer = bench.call(json!({"expectedVersionHash": "0".repeat(64)})).await;
    assert_eq!(said(&answer), ("RESOURCE_STALE", "version", "no"));
    assert_eq!(answer["details"]["currentVersionHash"], bench.listing().version_hash);
    assert!(bench.seller.requests().is_empty());
}

#[tokio::test]
pub async fn an_address_against_the_rules_is_not_dialled() {
    let bench = Bench::with(Change { allow_local: false, ..Change::default() }).await;
    let answer = bench.call(json!({})).await;
    assert_eq!((said(&answer).0, said(&answer).2), ("UNTRUSTED_REDIRECT", "no"));
    assert!(bench.seller.requests().is_empty());

    let symbolic = "mcp://tool/weather";
    let bench = Bench::with(Change { seller_url: Some(symbolic.into()), ..Change::default() }).await;
    let reference = ResourceRef::new(Kind::Mcp, symbolic, Some("weather")).unwrap().to_string();
    let answer = bench.call(json!({"ref": reference})).await;
    assert_eq!((said(&answer).0, said(&answer).2), ("UNTRUSTED_REDIRECT", "no"));

    let bench = Bench::new().await;
    let elsewhere = "location: http://169.254.169.254/latest\r\n".to_owned();
    bench.says(|s| s.unpaid = Some(Reply::Http(307, elsewhere, String::new())));
    assert_eq!(said(&bench.call(json!({})).await).0, "UNTRUSTED_REDIRECT");
    untouched(&bench).await;
}

#[tokio::test]
pub async fn an_origin_that_the_operator_does_not_allow_is_not_dialled() {
    let bench = Bench::new().await;
    let here = bench.origin();
    let elsewhere: Origin = "https://seller.example".parse().unwrap();
    let deny = Policy { deny_origins: [here.clone()].into(), ..Policy::default() };
    let others_only = Policy { allow_origins: [elsewhere].into(), ..Policy::default() };
    for policy in [deny, others_only] {
        bench.policy(policy);
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("PAYMENT_REJECTED", "not_allowed", "no"));
        assert_eq!((&answer["details"]["phase"], &answer["details"]["rule"]), (&json!("connect"), &json!("origin")));
        let look = bench.tool("x402_get_resource", json!({"ref": bench.reference()}), CancellationToken::new()).await;
        assert!(look.is_ok(), "what is listed may still be read");
    }
    assert!(bench.seller.requests().is_empty(), "not even a look at its tools");
    untouched(&bench).await;

    bench.policy(Policy { allow_origins: [here].into(), ..Policy::default() });
    assert_eq!(bench.call(json!({})).await["receipt"]["status"], "settled");
}

#[tokio::test]
pub async fn an_asset_or_a_recipient_that_the_operator_does_not_allow_is_not_paid() {
    let bench = Bench::new().await;
    let (unit, other) = (bench::unit(), Unit { network: NETWORK.parse().unwrap(), asset: "COTHER".parse().unwrap() });
    let (me, somebody) = (PAY_TO.to_owned(), "GSOMEBODY".to_owned());
    for (policy, rule) in [
        (Policy { deny_assets: [unit.clone()].into(), ..Policy::default() }, "asset"),
        (Policy { allow_assets: [other].into(), ..Policy::default() }, "asset"),
        (Policy { deny_recipients: [me.clone()].into(), ..Policy::default() }, "recipient"),
        (Policy { allow_recipients: [somebody].into(), ..Policy::default() }, "recipient"),
    ] {
        bench.policy(policy);
        for maximum in ["20000", "0"] {
            let answer = bench.call(json!({"maxAtomicAmount": maximum})).await;
            assert_eq!(said(&answer), ("PAYMENT_REJECTED", "not_allowed", "no"));
            assert_eq!((&answer["details"]["phase"], &answer["details"]["rule"]), (&json!("guard"), &json!(rule)));
        }
    }
    assert_eq!(bench.signatures(), 0);
    untouched(&bench).await;

    bench.policy(Policy { allow_assets: [unit].into(), allow_recipients: [me].into(), ..Policy::default() });
    assert_eq!(bench.call(json!({})).await["receipt"]["status"], "settled");
}

#[tokio::test]
pub async fn a_seller_is_paid_where_its_first_settled_payment_went() {
    const OTHER: &str = "GA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJVSGZ";
    let pinning = |pin_recipients| Policy { pin_recipients, ..Policy::default() };
    let bench = Bench::new().await;
    let moved = || bench.says(|s| s.offer["payTo"] = json!(OTHER));
    let back = || bench.says(|s| s.offer["payTo"] = json!(PAY_TO));
    // Each call is another, and is settled by another transaction.
    let distinct = |n: u32| {
        let receipt = json!({"success": true, "transaction": format!("{n:064x}"), "network": NETWORK});
        bench.says(|s| s.paid = Some(result(&with_receipt(output(), &receipt))));
        json!({"arguments": {"n": n}})
    };
    let pin = async || bench.ledger.pin(&bench.origin(), &bench::unit()).await.unwrap().map(|pin| pin.pay_to);

    // Without pinning nothing is kept; and what does not settle pins nothing.
    assert_eq!(bench.call(distinct(1)).await["receipt"]["status"], "settled");
    assert_eq!(pin().await, None);
    bench.policy(pinning(Pinning::Enforce));
    let second = distinct(2);
    bench.says(|s| s.paid = Some(result(&output())));
    assert_eq!(said(&bench.call(second).await).1, "no_receipt");
    assert_eq!(pin().await, None);

    assert_eq!(bench.call(distinct(3)).await["receipt"]["status"], "settled");
    // A statement that nobody waits for.
    while pin().await.is_none() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(pin().await.as_deref(), Some(PAY_TO));

    moved();
    let (signatures, paid) = (bench.signatures(), bench.calls().1);
    let answer = bench.call(distinct(4)).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "recipient_changed", "no"));
    assert_eq!((&answer["details"]["payTo"], &answer["details"]["pinnedPayTo"]), (&json!(OTHER), &json!(PAY_TO)));
    assert_eq!((bench.signatures(), bench.calls().1), (signatures, paid));
    back();
    assert_eq!(bench.call(distinct(5)).await["receipt"]["status"], "settled");

    // The operator's word, and a policy that only warns.
    moved();
    assert!(bench.ledger.set_pin(&bench.origin(), &bench::unit(), SetPin::To(OTHER)).await.unwrap());
    assert_eq!(bench.call(distinct(6)).await["receipt"]["payTo"], OTHER);
    back();
    assert_eq!(said(&bench.call(distinct(7)).await).1, "recipient_changed");
    bench.policy(pinning(Pinning::Warn));
    assert_eq!(bench.call(distinct(7)).await["receipt"]["payTo"], PAY_TO);
    assert_eq!(pin().await.as_deref(), Some(OTHER), "only the first one is pinned");
}

#[tokio::test]
pub async fn a_seller_that_gives_no_usable_answer_is_not_paid() {
    let bench = Bench::new().await;
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for reply in [
        Reply::Cut,
        Reply::status(500, "{}"),
        Reply::json("nonsense"),
        Reply::json(r#"{"jsonrpc":"2.0","id":"$id","result":{"a":1,"a":2}}"#),
        Reply::json(format!(r#"{{"jsonrpc":"2.0","id":"$id","result":{{"content":{deep}}}}}"#)),
        Reply::json(format!(r#"{{"jsonrpc":"2.0","id":"$id","result":"{}"}}"#, "x".repeat(9 << 20))),
    ] {
        bench.says(|s| s.unpaid = Some(reply));
        assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", "seller", "no"));
    }
    bench.says(|s| s.unpaid = Some(Reply::Hang));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_TIMEOUT", "seller", "no"));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn a_free_tool_is_answered_without_a_payment() {
    let bench = Bench::new().await;
    bench.says(|s| s.unpaid = Some(result(&output())));
    let answer = bench.call(json!({})).await;
    assert_eq!(answer, json!({"content": output()["content"], "structuredContent": {"sky": "clear"}, "receipt": null}));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn the_tools_own_error_is_handed_on() {
    let bench = Bench::new().await;
    let failed = json!({"content": [{"type": "text", "text": "no such city"}], "isError": true});
    bench.says(|s| s.unpaid = Some(result(&failed)));
    let answer = bench.call(json!({})).await;
    assert_eq!(answer, json!({"content": failed["content"], "isError": true, "receipt": null}));
    bench.says(|s| s.unpaid = Some(bench::rpc_error(-32602, "city is unknown")));
    let answer = bench.call(json!({})).await;
    assert_eq!(answer["isError"], true);
    assert_eq!(answer["structuredContent"], json!({"code": -32602, "message": "city is unknown"}));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn a_question_before_the_payment_is_handed_on_and_its_answer_accepted() {
    let bench = Bench::new().await;
    let asks = json!({"resultType": "input_required", "inputRequests": {"q": {"method": "elicitation/create"}},
        "requestState": "s-1"});
    bench.says(|s| s.unpaid = Some(result(&asks)));
    let answer = bench.call(json!({})).await;
    assert_eq!(answer["receipt"], json!(null));
    assert_eq!(answer["inputRequired"], json!({"inputRequests": asks["inputRequests"], "requestState": "s-1"}));
    bench.says(|s| s.unpaid = Some(result(&output())));
    bench.call(json!({"inputResponses": {"q": {"action": "accept"}}, "requestState": "s-1"})).await;
    let sent = bench.seller.requests().pop().unwrap().json();
    assert_eq!(sent["params"]["requestState"], "s-1");
    assert_eq!(sent["params"]["inputResponses"], json!({"q": {"action": "accept"}}));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn a_broken_challenge_is_not_paid() {
    let bench = Bench::new().await;
    let url = bench.seller.url("/mcp");
    let right = bench::challenge(&url, &bench::offer());
    let mut cases = Vec::new();
    let mut change = |reason: &'static str, edit: &dyn Fn(&mut serde_json::Value)| {
        let mut challenge = right.clone();
        edit(&mut challenge);
        cases.push((reason, challenge));
    };
    change("copy_missing", &|c| c["content"] = json!([]));
    change("copy_missing", &|c| c["structuredContent"] = json!(null));
    change("copies_differ", &|c| c["structuredContent"]["error"] = json!("other"));
    change("not_marked", &|c| c["isError"] = json!(false));
    let both = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut required = right["structuredContent"].clone();
        edit(&mut required);
        json!({"isError": true, "structuredContent": required,
            "content": [{"type": "text", "text": required.to_string()}]})
    };
    cases.push(("accepts_empty", both(&|r| r["accepts"] = json!([]))));
    cases.push(("version", both(&|r| r["x402Version"] = json!(1))));
    cases.push(("resource", both(&|r| r["resource"] = json!({}))));
    cases.push(("too_large", both(&|r| r["padding"] = json!("x".repeat(300_000)))));
    for (reason, challenge) in cases {
        bench.says(|s| s.unpaid = Some(result(&challenge)));
        assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", reason, "no"));
    }
    bench.says(|s| s.unpaid = Some(bench::rpc_error(402, "pay me")));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", "error_form", "no"));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn terms_other_than_the_catalogs_are_refused_with_their_members() {
    let bench = Bench::new().await;
    for (member, value) in [
        ("amount", json!("10001")),
        ("payTo", json!(ASSET)),
        ("maxTimeoutSeconds", json!(61)),
        ("extra", json!({"areFeesSponsored": true, "memo": 1})),
    ] {
        let mut live = bench::offer();
        live[member] = value;
        bench.says(|s| s.live_offer = Some(live));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("RESOURCE_CHANGED", "changed", "no"));
        assert_eq!(answer["details"]["changed"], json!([member]));
    }
    untouched(&bench).await;
}

#[tokio::test]
pub async fn an_offer_that_nobody_makes_is_an_argument_error() {
    let bench = Bench::new().await;
    let xlm = "CDLZFC3SYJYDZT7K67VZ75HPJVIEUVNIXF47ZG2FB2RMQQVU2HHGCYSC";
    assert_eq!(said(&bench.call(json!({"asset": xlm})).await), ("INVALID_ARGUMENT", "offer", "no"));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn an_offer_that_this_build_cannot_pay_is_refused() {
    let bench = Bench::new().await;
    for (member, extra) in [
        ("areFeesSponsored", json!({"areFeesSponsored": false})),
        ("paymentFlow", json!({"areFeesSponsored": true, "paymentFlow": "escrow"})),
        ("paymentFlow", json!({"areFeesSponsored": true, "paymentFlow": "someday"})),
    ] {
        bench.says(|s| s.offer["extra"] = extra);
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("PAYMENT_REJECTED", "scheme_unavailable", "no"));
        assert_eq!(answer["details"]["member"], member);
    }
    untouched(&bench).await;
}

#[tokio::test]
pub async fn a_maximum_of_zero_asks_for_the_price() {
    let bench = Bench::new().await;
    let answer = bench.call(json!({"maxAtomicAmount": "0"})).await;
    assert_eq!(said(&answer), ("PAYMENT_REQUIRED", "quote", "no"));
    let offer = &answer["details"]["offers"][0];
    assert_eq!(
        (&offer["amount"], &offer["display"], &offer["payTo"]),
        (&json!("10000"), &json!("0.001 USDC"), &json!(PAY_TO))
    );
    assert_eq!(answer["retryable"], true);
    untouched(&bench).await;
}

#[tokio::test]
pub async fn a_balance_that_does_not_cover_it_is_read_again_before_the_refusal() {
    let bench = Bench::new().await;
    bench.says(|s| s.balance = 9_999);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "insufficient_funds", "no"));
    assert_eq!(answer["details"]["balance"]["atomic"], "9999");
    let reads = bench.rpc.requests().iter().filter(|r| r.json()["method"] == "simulateTransaction").count();
    assert_eq!(reads, 2, "a short balance is read again");

    let missing = json!({"latestLedger": 1000, "error": "HostError: Error(Contract, #13)"});
    bench.says(|s| drop(s.rpc.insert("balance", result(&missing))));
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "insufficient_funds", "no"));
    assert_eq!(answer["details"]["trustline"], false);

    bench.says(|s| {
        s.rpc.clear();
        s.balance = 10_000;
    });
    assert!(bench.call(json!({})).await["receipt"].is_object(), "money that arrived meanwhile is seen");
}

#[tokio::test]
pub async fn without_the_payers_address_nothing_is_reserved() {
    let nobody = Change { signer: Some("http://127.0.0.1:9/".into()), ..Change::default() };
    let bench = Bench::with(nobody).await;
    assert_eq!(said(&bench.call(json!({})).await), ("PAYMENT_REJECTED", "signer_unavailable", "no"));
    untouched(&bench).await;
}

#[tokio::test]
pub async fn without_a_believable_chain_nothing_is_reserved() {
    let bench = Bench::new().await;
    let old = json!({"sequence": 1000, "closeTime": "1000000000"});
    bench.says(|s| drop(s.rpc.insert("getLatestLedger", result(&old))));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", "chain_rpc", "no"));
    bench.says(|s| drop(s.rpc.insert("getNetwork", Reply::status(503, ""))));
    bench.says(|s| drop(s.rpc.insert("getLatestLedger", Reply::status(503, ""))));
    assert_eq!(said(&bench.call(json!({})).await), ("UPSTREAM_PROTOCOL_ERROR", "chain_rpc", "no"));
    untouched(&bench).await;
}
