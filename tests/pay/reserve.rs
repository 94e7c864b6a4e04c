//! Twins, ceilings, and everything up to the signature.

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::ledger::Limit;
use tollway::mcp::Handler;
use tollway::money::Amount;

use super::bench::{self, Bench, Change, NETWORK, all, limit, said, structured};
use super::faulty::Fault;
use super::lookup::KEY;
use super::server::{Reply, Server};

#[tokio::test]
pub async fn a_keyless_call_about_to_be_refused_is_its_open_twin() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::Cut));
    let first = bench.call(json!({})).await;
    bench.says(|s| s.catalog = Some(Reply::status(500, "")));
    let second = bench.call(json!({})).await;
    assert_eq!(said(&second), ("SETTLEMENT_UNKNOWN", "no_answer", "unknown"));
    assert_eq!(first["details"]["paymentIdentifier"], second["details"]["paymentIdentifier"]);
    bench.says(|s| s.paid = None);
    assert_eq!(bench.call(json!({})).await["content"], bench::output()["content"]);
    assert_eq!(bench.signatures(), 1);
    assert_eq!(
        said(&bench.call(json!({"arguments": {"city": "Thun"}})).await).1,
        "catalog",
        "another call has no twin"
    );
}

#[tokio::test]
pub async fn a_keyless_twin_pays_once_until_it_is_answered() {
    let bench = Bench::new().await;
    let ask = || bench.tool("x402_call_resource", bench.arguments(json!({})), CancellationToken::new());
    let first = ask().await.unwrap();
    let second = ask().await.unwrap();
    assert_eq!(first.get(), second.get(), "the first answer never reached its caller");
    assert_eq!(bench.calls().1, 1);

    let context = bench.context(CancellationToken::new());
    bench.tools.delivered(&context, "tools/call", &second).await;
    let answer: Value = serde_json::from_str(structured(&second).get()).unwrap();
    until_answered(&bench, &answer).await;
    let transaction = "cd".repeat(32);
    let other = json!({"success": true, "transaction": transaction, "network": NETWORK});
    bench.says(|s| s.paid = Some(bench::result(&bench::with_receipt(bench::output(), &other))));
    let third: Value = serde_json::from_str(structured(&ask().await.unwrap()).get()).unwrap();
    assert_ne!(third["paymentIdentifier"], answer["paymentIdentifier"]);
    assert_eq!(bench.calls().1, 2, "meant again, paid again");
}

/// The mark is written by a statement that nobody waits for.
async fn until_answered(bench: &Bench, answer: &Value) {
    let written = async {
        while !bench.row(answer).await.answered {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), written).await.expect("never marked as answered");
}

#[tokio::test]
pub async fn a_first_answer_that_arrived_ends_the_twin_and_a_keyed_or_open_one_marks_nothing() {
    let bench = Bench::new().await;
    let context = bench.context(CancellationToken::new());
    let ask = |change| bench.tool("x402_call_resource", bench.arguments(change), CancellationToken::new());
    let value =
        |result: &serde_json::value::RawValue| -> Value { serde_json::from_str(structured(result).get()).unwrap() };
    let keyless = ask(json!({})).await.unwrap();
    bench.tools.delivered(&context, "tools/call", &keyless).await;
    until_answered(&bench, &value(&keyless)).await;

    bench.says(|s| s.paid = Some(bench::result(&json!({"resultType": "input_required", "requestState": "s"}))));
    let open = ask(json!({"arguments": {"city": "Thun"}})).await.unwrap();
    bench.tools.delivered(&context, "tools/call", &open).await;
    let looked_up = bench
        .tool(
            "x402_get_payment",
            json!({"paymentIdentifier": value(&open)["paymentIdentifier"]}),
            CancellationToken::new(),
        )
        .await
        .unwrap();
    bench.tools.delivered(&context, "tools/call", &looked_up).await;
    assert!(!bench.row(&value(&open)).await.answered, "a question is no answer");
    let again = bench.call(json!({"arguments": {"city": "Thun"}})).await;
    assert_eq!(again["paymentIdentifier"], value(&open)["paymentIdentifier"]);
}

#[tokio::test]
pub async fn a_keyless_call_beside_an_open_keyed_one_is_refused() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::Cut));
    let keyed = bench.call(json!({"idempotencyKey": KEY})).await;
    let keyless = bench.call(json!({})).await;
    assert_eq!(said(&keyless), ("SETTLEMENT_UNKNOWN", "duplicate_in_doubt", "unknown"));
    assert_eq!(keyless["details"]["paymentIdentifier"], keyed["details"]["paymentIdentifier"]);
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn the_smallest_ceiling_binds_and_is_named() {
    let amount = |n| Some(Amount::from_u64(n));
    for (change, limit, ceiling, remaining) in [
        (json!({"maxAtomicAmount": "9999"}), Some(limit()), "max_atomic_amount", "9999"),
        (json!({}), Some(Limit { per_call: amount(9_998), ..limit() }), "per_call", "9998"),
        (json!({}), Some(Limit { per_session: amount(9_997), ..limit() }), "session", "9997"),
        (json!({}), Some(Limit { per_day: amount(9_996), ..limit() }), "day", "9996"),
        (json!({}), Some(Limit { per_day: amount(0), ..limit() }), "day", "0"),
        (json!({}), None, "no_limit_configured", "0"),
    ] {
        let bench = Bench::with(Change { limit, ..Change::default() }).await;
        let answer = bench.call(change).await;
        assert_eq!(said(&answer), ("BUDGET_EXCEEDED", ceiling, "no"));
        assert_eq!(answer["details"]["remaining"]["atomic"], remaining);
        assert_eq!(answer["details"]["resetsAt"].is_string(), ceiling == "day", "{answer}");
        assert_eq!(bench.calls().1, 0);
        assert!(bench.ledger.real.list(&all()).await.unwrap().is_empty());
    }
    let mut change = Change::default();
    change.settings.account_ceiling = amount(9_995);
    let bench = Bench::with(change).await;
    assert_eq!(said(&bench.call(json!({})).await), ("BUDGET_EXCEEDED", "smart_account", "no"));
}

#[tokio::test]
pub async fn a_suspended_agent_pays_nothing() {
    let bench = Bench::with(Change { limit: Some(Limit { suspended: true, ..limit() }), ..Change::default() }).await;
    assert_eq!(said(&bench.call(json!({})).await), ("PAYMENT_REJECTED", "suspended", "no"));
    assert_eq!(bench.calls().1, 0);
}

#[tokio::test]
pub async fn a_ledger_that_fails_is_a_fault_of_ours() {
    let bench = Bench::new().await;
    for (fault, reason) in [
        (Fault::LookupUnavailable, "ledger_unavailable"),
        (Fault::ReserveUnavailable, "ledger_unavailable"),
        (Fault::ReserveBusy, "ledger_busy"),
    ] {
        bench.ledger.fail(fault);
        let error = bench.try_call(json!({"idempotencyKey": KEY}), CancellationToken::new()).await.unwrap_err();
        assert_eq!(error.code, -32603);
        let data: Value = serde_json::from_str(error.data.unwrap().get()).unwrap();
        assert_eq!(said(&data), ("INTERNAL", reason, "no"));
        assert_eq!(data["retryable"], true);
        assert!(!data.to_string().contains("line was cut"), "internals stay inside");
    }
    assert_eq!(bench.calls().1, 0);
}

#[tokio::test]
pub async fn a_signature_that_would_come_too_late_is_not_made() {
    let mut change = Change::default();
    change.settings.sign_within = std::time::Duration::ZERO;
    let bench = Bench::with(change).await;
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "sign_window_missed", "no"));
    assert_eq!(bench.state(&answer).await, ("Released".into(), "sign_window_missed".into()));
    assert_eq!(bench.calls().1, 0);
}

#[tokio::test]
pub async fn without_the_lease_nothing_is_signed() {
    let bench = Bench::new().await;
    bench.ledger.fail(Fault::LeaseGone);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    assert_eq!(bench.calls().1, 0);
}

/// An external signer that knows its address and answers a signature request with `reply`.
async fn signer(reply: Reply) -> Server {
    let address = "GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H";
    Server::start(std::sync::Arc::new(move |request: &super::server::Request| {
        match request.path.starts_with("/address") {
            true => Reply::Http(
                200,
                "content-type: application/json\r\nconnection: close\r\n".into(),
                json!({"address": address}).to_string(),
            ),
            false => reply.clone(),
        }
    }))
    .await
}

#[tokio::test]
pub async fn a_signers_no_releases_the_money() {
    let signer = signer(Reply::status(403, r#"{"error":"recipient_not_allowed"}"#)).await;
    let bench = Bench::with(Change { signer: Some(signer.url("/")), ..Change::default() }).await;
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "signer_refused", "no"));
    assert_eq!(bench.state(&answer).await, ("Released".into(), "signer_refused".into()));
    assert_eq!(bench.calls().1, 0);
}

#[tokio::test]
pub async fn a_signer_that_cannot_be_reached_releases_the_money() {
    let signer = signer(Reply::Cut).await;
    let url = signer.url("/");
    let bench = Bench::with(Change { signer: Some(url), ..Change::default() }).await;
    drop(signer);
    // The listener is gone when its task is.
    tokio::task::yield_now().await;
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "signer_unavailable", "no"));
    assert_eq!(bench.state(&answer).await, ("Released".into(), "signer_unavailable".into()));
}

#[tokio::test]
pub async fn a_signers_lost_or_wrong_answer_keeps_the_hold() {
    for reply in [
        Reply::Cut,
        Reply::json("nonsense"),
        Reply::json(json!({"signedAuthEntryXdr": "AAAA"}).to_string()),
        Reply::status(500, "{}"),
    ] {
        let signer = signer(reply).await;
        let bench = Bench::with(Change { signer: Some(signer.url("/")), ..Change::default() }).await;
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("PAYMENT_REJECTED", "signer_failed", "no"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "signer_failed".into()));
        assert_eq!(bench.calls().1, 0);
        let asked = signer.requests().iter().filter(|r| r.method == "POST").count();
        assert_eq!(asked, 1, "one request, never a second");
    }
}

#[tokio::test]
pub async fn a_cancelled_call_is_released_before_the_signature() {
    let bench = Bench::new().await;
    let cancelled = CancellationToken::new();
    let cancel = cancelled.clone();
    bench.ledger.after_reserve(move || cancel.cancel());
    let answer = bench.try_call(json!({}), cancelled).await.unwrap();
    assert_eq!(said(&answer), ("PAYMENT_REJECTED", "cancelled", "no"));
    assert_eq!(bench.state(&answer).await, ("Released".into(), "cancelled".into()));
    assert_eq!(bench.calls().1, 0);
}
