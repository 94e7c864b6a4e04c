//! From the signature on: nothing but evidence frees money, and nothing pays twice.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::mcp::Handler;

use super::bench::{
    self, Bench, Change, NETWORK, PAY_TO, TRANSACTION, all, output, receipt, result, said, with_receipt,
};
use super::faulty::Fault;
use super::lookup::KEY;
use super::server::Reply;

#[tokio::test]
pub async fn a_simulation_that_answers_about_another_payment_is_a_lie() {
    let bench = Bench::new().await;
    let lie = json!({"latestLedger": 1000, "transactionData": "AAAA", "minResourceFee": "100",
        "results": [{"auth": ["AAAA"], "xdr": "AAAA"}]});
    bench.says(|s| drop(s.rpc.insert("transfer", result(&lie))));
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("UPSTREAM_PROTOCOL_ERROR", "chain_rpc", "unknown"));
    assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "chain_rpc".into()));
    assert_eq!(bench.calls().1, 0);
}

#[tokio::test]
pub async fn a_simulation_that_fails_or_is_lost_keeps_the_hold() {
    for reply in
        [result(&json!({"latestLedger": 1000, "error": "HostError: Error(Contract, #10)"})), Reply::Cut, Reply::Hang]
    {
        let bench = Bench::new().await;
        bench.says(|s| drop(s.rpc.insert("transfer", reply)));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("PAYMENT_REJECTED", "simulation_failed", "unknown"));
        assert!(answer["details"]["chain"].is_string());
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "simulation_failed".into()));
        assert_eq!(bench.calls().1, 0);
    }
}

/// A row in doubt can be recovered by whoever meets it, from its first moment on.
#[tokio::test]
pub async fn the_signed_payload_is_stored_before_the_row_is_in_doubt() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::status(500, "{}")));
    bench.ledger.fail(Fault::PayloadSlow);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_answer", "unknown"));
    assert_eq!(bench.ledger.calls(), ["reserve", "payload_stored", "in_doubt"]);
}

#[tokio::test]
pub async fn no_usable_answer_to_the_paid_call_keeps_the_hold() {
    for reply in [
        Reply::Hang,
        Reply::Cut,
        Reply::status(500, "{}"),
        Reply::status(502, "<html>"),
        Reply::json("nonsense"),
        Reply::json(format!(r#"{{"jsonrpc":"2.0","id":"$id","result":"{}"}}"#, "x".repeat(9 << 20))),
    ] {
        let bench = Bench::new().await;
        bench.says(|s| s.paid = Some(reply));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_answer", "unknown"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "no_answer".into()));
        assert_eq!(bench.calls(), (1, 1), "never sent again");
        assert!(bench.row(&answer).await.has_payload, "it can be recovered");
    }
}

#[tokio::test]
pub async fn a_forgotten_session_gets_the_identical_bytes_once_more() {
    let bench = Bench::new().await;
    bench.says(|s| s.forget_sessions = 1);
    let answer = bench.call(json!({})).await;
    assert!(answer["receipt"].is_object(), "{answer}");
    let paid: Vec<_> = bench.seller.requests().into_iter().filter(bench::is_paid).map(|r| r.json()).collect();
    assert_eq!(paid.len(), 2);
    assert_eq!(paid[0]["params"], paid[1]["params"]);

    let bench = Bench::new().await;
    bench.says(|s| s.forget_sessions = 9);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_answer", "unknown"));
    assert_eq!(bench.calls().1, 2);
}

#[tokio::test]
pub async fn another_challenge_after_the_payment_is_not_paid() {
    let challenge = |edit: &dyn Fn(&mut Value)| {
        let mut challenge = bench::challenge("https://s.example/mcp", &bench::offer());
        edit(&mut challenge);
        result(&challenge)
    };
    let bare = challenge(&|_| ());
    for reply in [
        bare.clone(),
        challenge(&|c| c["content"] = json!([])),
        challenge(&|c| c["isError"] = json!(false)),
        challenge(&|c| c["_meta"] = json!({"x402/payment-response": receipt()})),
        result(&json!({"resultType": "payment_required", "paymentRequired": {}})),
        bench::rpc_error(402, "again"),
    ] {
        let bench = Bench::new().await;
        bench.says(|s| s.paid = Some(reply));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "challenged_again", "unknown"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "challenged_again".into()));
        assert_eq!(bench.calls(), (1, 1));
    }
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(bare));
    assert_eq!(bench.call(json!({})).await["details"]["seller"], "Payment required");
}

#[tokio::test]
pub async fn an_output_that_talks_about_payments_is_an_output_where_its_receipt_is_right() {
    let about = |is_error: Value, receipt: Value| {
        let mut answer = bench::challenge("https://s.example/mcp", &bench::offer());
        answer["isError"] = is_error;
        result(&with_receipt(answer, &receipt))
    };
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(about(json!(false), receipt())));
    let answer = bench.call(json!({})).await;
    assert_eq!(
        (&answer["receipt"]["status"], &answer["structuredContent"]["x402Version"]),
        (&json!("settled"), &json!(2))
    );
    assert_eq!(bench.state(&answer).await.0, "Settled");

    let failed = json!({"success": false, "transaction": "", "network": NETWORK});
    let extension = json!({"content": [], "paymentRequired": {"x402Version": 2, "accepts": []}});
    for reply in [
        about(json!(false), failed),
        about(json!(true), receipt()),
        about(json!("true"), receipt()),
        result(&with_receipt(extension, &receipt())),
    ] {
        let bench = Bench::new().await;
        bench.says(|s| s.paid = Some(reply));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "challenged_again", "unknown"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "challenged_again".into()));
    }
}

fn asks() -> Value {
    json!({"resultType": "input_required", "inputRequests": {"q": {"method": "elicitation/create"}}, "requestState": "s"})
}

#[tokio::test]
pub async fn a_question_without_a_receipt_keeps_the_hold() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(result(&asks())));
    let answer = bench.call(json!({})).await;
    assert_eq!((&answer["receipt"], &answer["inputRequired"]["requestState"]), (&json!(null), &json!("s")));
    assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "input_required".into()));
    assert!(bench.row(&answer).await.has_payload, "the same bytes can go on");
    assert_eq!((bench.calls().1, bench.signatures()), (1, 1));
}

#[tokio::test]
pub async fn a_question_with_a_right_receipt_is_settled_and_unfinished() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(result(&with_receipt(asks(), &receipt()))));
    let answer = bench.call(json!({})).await;
    assert_eq!(
        (&answer["receipt"]["status"], &answer["inputRequired"]["requestState"]),
        (&json!("settled"), &json!("s"))
    );
    assert_eq!(bench.state(&answer).await.0, "Settled");
    assert!(bench.row(&answer).await.has_payload, "the same bytes can go on");
    assert_eq!(bench.call(json!({})).await, answer, "asked again, the same question");
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn an_answered_question_of_a_settled_payment_is_not_paid_again() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(result(&with_receipt(asks(), &receipt()))));
    bench.call(json!({})).await;
    bench.says(|s| s.paid = Some(Reply::Cut));
    let go_on = bench.arguments(json!({"requestState": "s", "inputResponses": {}}));
    let context = bench.context(CancellationToken::new());
    for _ in 0..2 {
        let said = bench.tool("x402_call_resource", go_on.clone(), CancellationToken::new()).await.unwrap();
        let answer: Value = serde_json::from_str(bench::structured(&said).get()).unwrap();
        assert_eq!((&answer["receipt"]["status"], &answer["outcome"]), (&json!("settled"), &json!("undelivered")));
        bench.tools.delivered(&context, "tools/call", &said).await;
        // The mark would be written by a task of its own.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert!(!bench.row(&answer).await.answered, "the seller has not had its last word");
    }
    assert_eq!((bench.calls().1, bench.signatures()), (3, 1), "the same bytes, once for each call");
}

#[tokio::test]
pub async fn an_output_without_a_receipt_keeps_the_hold_and_is_handed_on() {
    for (reply, has) in [(result(&output()), "sunny"), (bench::rpc_error(-32603, "broke"), "broke")] {
        let bench = Bench::new().await;
        bench.says(|s| s.paid = Some(reply));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_receipt", "unknown"));
        assert!(answer["details"]["output"].to_string().contains(has), "{answer}");
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "no_receipt".into()));
    }
}

async fn with_claim(claim: Value) -> (Bench, Value) {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(result(&with_receipt(output(), &claim))));
    let answer = bench.call(json!({})).await;
    (bench, answer)
}

#[tokio::test]
pub async fn a_sellers_no_frees_nothing() {
    for (claim, reason) in [
        (json!({"success": false, "transaction": "", "network": NETWORK, "errorReason": "x"}), "seller_says_failed"),
        (json!({"success": false, "transaction": TRANSACTION, "network": NETWORK}), "seller_says_failed"),
        (
            json!({"success": false, "transaction": TRANSACTION, "network": NETWORK, "errorReason": "settlement_pending"}),
            "settlement_pending",
        ),
    ] {
        let (bench, answer) = with_claim(claim).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", reason, "unknown"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), reason.into()));
    }
}

#[tokio::test]
pub async fn a_receipt_that_is_wrong_anywhere_settles_nothing() {
    let wrong = |member: &str, value: Value| {
        let mut claim = receipt();
        claim[member] = value;
        claim
    };
    for claim in [
        wrong("network", json!("stellar:pubnet")),
        wrong("payer", json!(PAY_TO)),
        wrong("transaction", json!("")),
        wrong("transaction", json!("yes")),
        wrong("amount", json!("10001")),
        wrong("amount", json!("-1")),
        wrong("success", json!("true")),
        json!({}),
    ] {
        let shown = claim.to_string();
        let (bench, answer) = with_claim(claim).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "receipt_mismatch", "unknown"), "{shown}");
        assert!(answer["details"]["output"].to_string().contains("sunny"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "receipt_mismatch".into()));
    }
    // One transaction pays for one payment, in whatever case it is written.
    let bench = Bench::new().await;
    bench.call(json!({})).await;
    let upper = wrong("transaction", json!(TRANSACTION.to_uppercase()));
    bench.says(|s| s.paid = Some(result(&with_receipt(output(), &upper))));
    let answer = bench.call(json!({"arguments": {"city": "Thun"}})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "receipt_mismatch", "unknown"));
    assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "receipt_mismatch".into()));
}

#[tokio::test]
pub async fn a_right_receipt_settles_with_two_calls_and_two_transactions() {
    let bench = Bench::new().await;
    let answer = bench.call(json!({})).await;
    assert_eq!(bench.ledger.calls(), ["reserve", "settle"]);
    assert_eq!(bench.calls(), (1, 1));
    let listing = bench.listing();
    assert_eq!(answer["content"], output()["content"]);
    assert_eq!(answer["structuredContent"], output()["structuredContent"]);
    let expected = json!({"paymentIdentifier": answer["paymentIdentifier"], "ref": bench.reference(),
        "versionHash": listing.version_hash, "network": NETWORK, "scheme": "exact", "asset": bench::ASSET,
        "payTo": PAY_TO, "authorizedAmount": "10000", "settledAmount": "10000", "transaction": TRANSACTION,
        "status": "settled", "display": "0.001 USDC"});
    assert_eq!(answer["receipt"], expected);
    assert_eq!(bench.state(&answer).await.0, "Settled");

    let sent = bench.seller.requests().into_iter().find(bench::is_paid).unwrap().json();
    assert_eq!(sent["params"]["name"], "weather");
    assert_eq!(sent["params"]["arguments"], json!({"city": "Bern"}));
    let payment = &sent["params"]["_meta"]["x402/payment"];
    assert_eq!(payment["accepted"], bench::offer());
    assert_eq!(payment["extensions"]["payment-identifier"]["info"]["id"], answer["paymentIdentifier"]);

    bench.ledger.calls();
    bench.call(json!({"idempotencyKey": KEY, "arguments": {"city": "Thun"}})).await;
    let waited = bench.ledger.calls();
    assert_eq!(waited[..3], ["lookup", "reserve", "settle"], "three with a key");
}

#[tokio::test]
pub async fn a_failing_tools_receipt_settles_wherever_the_error_carries_it() {
    for data in [json!({"_meta": {"x402/payment-response": receipt()}}), json!({"x402/payment-response": receipt()})] {
        let bench = Bench::new().await;
        let error = json!({"code": -32603, "message": "broke", "data": data});
        bench.says(|s| {
            s.paid = Some(Reply::json(json!({"jsonrpc": "2.0", "id": "$id", "error": error}).to_string()));
        });
        let answer = bench.call(json!({})).await;
        assert_eq!((&answer["receipt"]["status"], &answer["isError"]), (&json!("settled"), &json!(true)), "{answer}");
        assert_eq!(answer["structuredContent"]["data"], data);
        assert_eq!(bench.state(&answer).await.0, "Settled");
    }
}

#[tokio::test]
pub async fn paid_output_reaches_the_agent_when_the_ledger_fails() {
    let bench = Bench::new().await;
    bench.ledger.fail(Fault::SettleUnavailable);
    let answer = bench.call(json!({})).await;
    assert_eq!((&answer["recorded"], &answer["content"]), (&json!(false), &output()["content"]));
    assert_eq!(answer["receipt"]["transaction"], TRANSACTION);
    assert_eq!(bench.state(&answer).await.0, "Reserved");
}

#[tokio::test]
pub async fn a_ledger_that_is_busy_for_a_moment_loses_no_receipt() {
    let bench = Bench::new().await;
    bench.ledger.fail(Fault::SettleBusy);
    let answer = bench.call(json!({})).await;
    assert!(answer.get("recorded").is_none(), "{answer}");
    assert_eq!(bench.state(&answer).await.0, "Settled");

    let bench = Bench::new().await;
    bench.ledger.fail(Fault::SettleBusy);
    bench.ledger.fail(Fault::SettleBusy);
    let answer = bench.call(json!({})).await;
    assert_eq!((&answer["recorded"], &answer["content"]), (&json!(false), &output()["content"]));
}

#[tokio::test]
pub async fn a_row_that_somebody_settled_meanwhile_stays_settled() {
    let bench = Bench::new().await;
    bench.ledger.fail(Fault::SettledBeforeSettle);
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!(answer["receipt"]["status"], "settled");
    assert_eq!(bench.state(&answer).await.0, "Settled");
    assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await, answer, "the outcome is stored");
}

/// The receipt that the agent gets and the ledger never name two transactions.
#[tokio::test]
pub async fn a_receipt_with_another_transaction_than_the_booked_one_names_the_booked_one() {
    let bench = Bench::new().await;
    let mut other = receipt();
    other["transaction"] = json!("cd".repeat(32));
    bench.says(|s| s.paid = Some(result(&with_receipt(output(), &other))));
    bench.ledger.fail(Fault::SettledBeforeSettle);
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!(answer["receipt"]["transaction"], TRANSACTION, "{answer}");
    assert!(answer.to_string().contains("sunny"));
    assert_eq!(bench.row(&answer).await.transaction.as_deref(), Some(TRANSACTION));
    assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await, answer, "the outcome is stored");
}

#[tokio::test]
pub async fn a_settled_payment_does_not_take_anothers_transaction_and_its_output_is_kept() {
    let bench = Bench::new().await;
    bench.call(json!({"arguments": {"city": "Thun"}})).await;
    bench.ledger.fail(Fault::SettledWithoutTransaction);
    let answer = bench.call(json!({"idempotencyKey": KEY})).await;
    assert_eq!(answer["receipt"]["status"], "settled", "{answer}");
    assert_eq!(answer["receipt"]["transaction"], Value::Null);
    assert!(answer.to_string().contains("sunny"));
    assert_eq!(bench.state(&answer).await.0, "Settled");
    assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await, answer, "the outcome is stored");
}

#[tokio::test]
pub async fn a_receipt_for_a_released_row_is_a_mismatch() {
    let bench = Bench::new().await;
    bench.ledger.fail(Fault::ReleasedBeforeSettle);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "receipt_mismatch", "unknown"));
    assert!(answer["details"]["output"].to_string().contains("sunny"));
    assert_eq!(bench.state(&answer).await.0, "Released");
}

#[tokio::test]
pub async fn a_row_that_is_no_longer_ours_answers_for_itself() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(Reply::status(500, "{}")));
    bench.ledger.fail(Fault::SettledBeforeDoubt);
    let answer = bench.call(json!({})).await;
    assert_eq!((&answer["outcome"], &answer["receipt"]["status"]), (&json!("undelivered"), &json!("settled")));
    assert_eq!(bench.state(&answer).await.0, "Settled");
}

/// The chain settled it while the seller answered without a receipt.
#[tokio::test]
pub async fn an_output_without_a_receipt_is_that_of_a_row_that_was_settled_meanwhile() {
    for (paid, unfinished) in [(output(), false), (asks(), true)] {
        let bench = Bench::new().await;
        bench.says(|s| s.paid = Some(result(&paid)));
        bench.ledger.fail(Fault::SettledBeforeDoubt);
        let answer = bench.call(json!({"idempotencyKey": KEY})).await;
        assert_eq!(answer["receipt"]["transaction"], TRANSACTION, "{answer}");
        assert!(unfinished || answer.to_string().contains("sunny"), "{answer}");
        assert_eq!(answer["inputRequired"]["requestState"] == "s", unfinished);
        let row = bench.row(&answer).await;
        assert_eq!((row.has_outcome, row.outcome_unfinished, row.has_payload), (true, unfinished, unfinished));
        assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await, answer, "the outcome is stored");
        assert_eq!(bench.calls(), (1, 1), "nothing is sent again for it");
    }
}

#[tokio::test]
pub async fn a_late_owner_of_a_row_in_doubt_still_hands_over_what_came() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(result(&output())));
    bench.ledger.fail(Fault::DoubtedBeforeDoubt);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_receipt", "unknown"));
    assert!(answer["details"]["output"].to_string().contains("sunny"), "{answer}");
    assert_eq!(bench.state(&answer).await, ("InDoubt".into(), "lease_expired".into()));

    let bench = Bench::new().await;
    bench.says(|s| s.paid = Some(result(&asks())));
    bench.ledger.fail(Fault::DoubtedBeforeDoubt);
    assert_eq!(bench.call(json!({})).await["inputRequired"]["requestState"], "s");
}

#[tokio::test]
pub async fn a_caller_that_goes_away_after_the_signature_does_not_stop_the_bookkeeping() {
    let bench = Bench::new().await;
    let cancelled = CancellationToken::new();
    let cancel = cancelled.clone();
    bench.says(|s| s.on_paid = Some(Arc::new(move || cancel.cancel())));
    // The caller's future is dropped as soon as the paid request is on the wire.
    let call = bench.try_call(json!({}), cancelled.clone());
    let gone = cancelled.cancelled();
    futures_util::future::select(Box::pin(call), Box::pin(gone)).await;
    for look in 0.. {
        assert!(look < 2_000, "the story did not run to its end");
        let rows = bench.ledger.real.list(&all()).await.unwrap();
        if rows.first().is_some_and(|row| row.state == tollway::ledger::State::Settled) {
            assert!(!rows[0].answered && rows[0].has_outcome);
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let answer = bench.call(json!({})).await;
    assert_eq!(answer["content"], output()["content"], "called again, the output is there");
    assert_eq!(bench.calls().1, 1);
}

#[tokio::test]
pub async fn a_story_that_ends_without_an_answer_is_unknown() {
    let bench = Bench::with(Change { drop_tasks: true, ..Change::default() }).await;
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    assert!(answer["details"]["paymentIdentifier"].is_string());
}
