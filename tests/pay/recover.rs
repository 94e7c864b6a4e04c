//! Recovery: what was paid for reaches the agent by the identical bytes, and nothing is ever signed for it again.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tollway::ledger::{By, Ledger as _, Payment, State, Subject};
use tollway::mcp::Handler as _;
use tollway::policy::Policy;

use super::bench::{self, Bench, Change, PAY_TO, TRANSACTION, all, output, receipt, result, said, with_receipt};
use super::faulty::Fault;
use super::lookup::{KEY, LEASE};
use super::server::Reply;

/// With the usual key, and as a keyless twin.
pub fn both() -> [Value; 2] {
    [json!({"idempotencyKey": KEY}), json!({})]
}

/// A slow machine is only slow: callers wait, and are waited for, as long as it takes.
fn patient() -> Change {
    let mut change = Change::default();
    change.settings.wait_in_flight = Duration::from_secs(20);
    change.settings.paid_call_timeout = Some(Duration::from_secs(20));
    change
}

/// A payment in doubt whose payload is stored: the seller gave no answer.
async fn in_doubt(call: &Value) -> Bench {
    in_doubt_with(call, Change::default()).await
}

async fn in_doubt_with(call: &Value, change: Change) -> Bench {
    let bench = Bench::with(change).await;
    bench.says(|s| s.paid_next.push_back(Reply::Cut));
    let answer = bench.call(call.clone()).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_answer", "unknown"));
    bench
}

/// A payment that somebody settled on the chain's evidence; its output never came.
async fn settled_without_output(call: &Value) -> Bench {
    settled_with(call, Change::default()).await
}

async fn settled_with(call: &Value, change: Change) -> Bench {
    let bench = Bench::with(change).await;
    bench.says(|s| s.paid_next.push_back(Reply::Cut));
    bench.ledger.fail(Fault::SettledBeforeDoubt);
    let answer = bench.call(call.clone()).await;
    assert_eq!(answer["outcome"], "undelivered");
    bench
}

async fn only_row(bench: &Bench) -> Payment {
    let rows = bench.ledger.real.list(&all()).await.unwrap();
    assert_eq!(rows.len(), 1, "a second payment");
    rows.into_iter().next().unwrap()
}

/// Every paid call had the same payload, and one signature was made.
#[track_caller]
fn same_bytes(bench: &Bench, sent: usize) {
    let params = bench.paid_params();
    assert_eq!(params.len(), sent);
    let payload = |params: &String| {
        let params: &serde_json::value::RawValue = serde_json::from_str(params).unwrap();
        let meta = tollway::json::member(params, "_meta").unwrap();
        tollway::json::member(meta, "x402/payment").unwrap().get().to_owned()
    };
    assert!(params.iter().all(|p| payload(p) == payload(&params[0])));
    assert_eq!(bench.signatures(), 1, "a second signature");
}

#[tokio::test]
pub async fn a_payment_in_doubt_is_ended_by_the_identical_bytes() {
    for call in both() {
        let bench = in_doubt(&call).await;
        let answer = bench.call(call.clone()).await;
        assert_eq!(
            (&answer["content"], &answer["receipt"]["transaction"]),
            (&output()["content"], &json!(TRANSACTION))
        );
        assert_eq!(bench.state(&answer).await.0, "Settled");
        let sent = bench.paid_params();
        assert_eq!(sent[0], sent[1], "every byte of the params");
        assert_eq!(bench.call(call).await, answer, "from the ledger now");
        same_bytes(&bench, 2);
        assert!(!only_row(&bench).await.has_payload, "its last word is stored");
    }
}

#[tokio::test]
pub async fn an_output_that_never_came_is_fetched_with_the_identical_bytes() {
    for call in both() {
        let bench = settled_without_output(&call).await;
        let answer = bench.call(call.clone()).await;
        assert_eq!(
            (&answer["content"], &answer["receipt"]["transaction"]),
            (&output()["content"], &json!(TRANSACTION))
        );
        assert_eq!(bench.call(call).await, answer);
        same_bytes(&bench, 2);
    }
}

#[tokio::test]
pub async fn what_a_settled_payments_seller_gives_is_its_output_and_the_receipt_is_the_ledgers() {
    let other = json!({"success": true, "transaction": "cd".repeat(32), "network": bench::NETWORK});
    let failed = json!({"success": false, "transaction": "", "network": bench::NETWORK});
    for reply in [output(), with_receipt(output(), &other), with_receipt(output(), &failed)] {
        let bench = settled_without_output(&json!({})).await;
        bench.says(|s| s.paid = Some(result(&reply)));
        let answer = bench.call(json!({})).await;
        assert_eq!(answer["content"], output()["content"], "{answer}");
        assert_eq!(answer["receipt"]["transaction"], TRANSACTION, "what is booked");
        assert_eq!(bench.call(json!({})).await, answer, "stored so");
        same_bytes(&bench, 2);
    }
}

fn unusable() -> Vec<(Reply, &'static str)> {
    let mut wrong = receipt();
    wrong["network"] = json!("stellar:pubnet");
    let failed = json!({"success": false, "transaction": "", "network": bench::NETWORK});
    vec![
        (Reply::Cut, "no_answer"),
        (Reply::json("nonsense"), "no_answer"),
        (Reply::status(500, "{}"), "no_answer"),
        (result(&bench::challenge("https://s.example/mcp", &bench::offer())), "challenged_again"),
        (bench::rpc_error(402, "again"), "challenged_again"),
        (bench::rpc_error(-32603, "broke"), "no_receipt"),
        (result(&json!({"isError": true, "content": []})), "no_receipt"),
        (result(&with_receipt(json!({"isError": true, "content": []}), &wrong)), "receipt_mismatch"),
        (result(&with_receipt(json!({"isError": true, "content": []}), &failed)), "seller_says_failed"),
    ]
}

#[tokio::test]
pub async fn a_recovery_without_a_usable_answer_is_judged_as_the_first_sending() {
    for (reply, reason) in unusable() {
        let bench = in_doubt(&json!({})).await;
        bench.says(|s| s.paid_next.push_back(reply));
        let answer = bench.call(json!({})).await;
        assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", reason, "unknown"));
        assert_eq!(bench.state(&answer).await, ("InDoubt".into(), reason.into()));
        let row = only_row(&bench).await;
        assert!(row.has_payload && !row.leased, "{reason}: the next call may try again");
        assert_eq!(bench.call(json!({})).await["receipt"]["status"], "settled");
        same_bytes(&bench, 3);
    }
    let bench = in_doubt(&json!({})).await;
    bench.says(|s| s.paid_next.push_back(result(&output())));
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "no_receipt", "unknown"));
    assert!(answer["details"]["output"].to_string().contains("sunny"));
}

#[tokio::test]
pub async fn a_settled_payment_without_a_usable_answer_is_its_receipt() {
    for (reply, reason) in unusable() {
        let bench = settled_without_output(&json!({"idempotencyKey": KEY})).await;
        bench.says(|s| s.paid_next.push_back(reply));
        let answer = bench.call(json!({"idempotencyKey": KEY})).await;
        assert_eq!((&answer["outcome"], &answer["content"]), (&json!("undelivered"), &json!([])), "{reason}");
        assert_eq!(answer["receipt"]["transaction"], TRANSACTION);
        let row = only_row(&bench).await;
        assert!(row.state == State::Settled && row.has_payload && !row.leased && !row.has_outcome, "{reason}");
        assert_eq!(bench.call(json!({"idempotencyKey": KEY})).await["content"], output()["content"]);
        same_bytes(&bench, 3);
    }
}

#[tokio::test]
pub async fn callers_at_once_are_one_sending_and_all_get_the_output() {
    let slow = Reply::Later(Duration::from_millis(150), Box::new(result(&with_receipt(output(), &receipt()))));
    for call in both() {
        for bench in [in_doubt_with(&call, patient()).await, settled_with(&call, patient()).await] {
            bench.says(|s| s.paid = Some(slow.clone()));
            let again = || bench.call(call.clone());
            let answers = tokio::join!(again(), again(), again());
            assert_eq!(answers.0["content"], output()["content"]);
            assert_eq!((&answers.0, &answers.0), (&answers.1, &answers.2));
            same_bytes(&bench, 2);
        }
    }
}

#[tokio::test]
pub async fn a_recovery_that_lasts_is_reported_as_in_flight() {
    let key = || json!({"idempotencyKey": KEY});
    let slow = || {
        let mut change = patient();
        change.settings.wait_in_flight = Duration::from_millis(300);
        change
    };
    let benches = [(in_doubt_with(&key(), slow()).await, "unknown"), (settled_with(&key(), slow()).await, "yes")];
    for (bench, moved) in benches {
        let (word, right) = (Arc::new(Notify::new()), with_receipt(output(), &receipt()));
        bench.says(|s| s.paid = Some(Reply::When(word.clone(), Box::new(result(&right)))));
        let second = async {
            sent(&bench, 2).await;
            let second = bench.call(key()).await;
            word.notify_one();
            second
        };
        let (first, second) = tokio::join!(bench.call(key()), second);
        assert_eq!(said(&second), ("SETTLEMENT_UNKNOWN", "in_flight", moved));
        assert_eq!(first["content"], output()["content"]);
        same_bytes(&bench, 2);
    }
}

/// Until the seller has had so many paid calls.
async fn sent(bench: &Bench, calls: usize) {
    while bench.calls().1 < calls {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
pub async fn nothing_is_sent_for_a_suspended_agent() {
    let bench = in_doubt(&json!({})).await;
    let agent = Subject::Agent(bench.agent.clone());
    bench.ledger.suspend(&agent, None).await.unwrap();
    assert_eq!(said(&bench.call(json!({})).await), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    same_bytes(&bench, 1);
    bench.ledger.resume(&agent, None).await.unwrap();
    assert_eq!(bench.call(json!({})).await["receipt"]["status"], "settled");

    let bench = settled_without_output(&json!({})).await;
    bench.ledger.suspend(&agent, None).await.unwrap();
    assert_eq!(bench.call(json!({})).await["outcome"], "undelivered");
    same_bytes(&bench, 1);
}

#[tokio::test]
pub async fn a_dead_authorization_is_not_sent_and_a_used_one_is() {
    let bench = in_doubt(&json!({})).await;
    bench.says(|s| s.ledgers = 30);
    bench.later(LEASE);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    assert!(bench.row(&answer).await.has_payload);
    same_bytes(&bench, 1);
    // The seller settled it before its end: the output is owed however late it is.
    bench.says(|s| s.nonce_used = true);
    assert_eq!(bench.call(json!({})).await["content"], output()["content"]);
    same_bytes(&bench, 2);

    // By the chain: a clock of ours that has run on says nothing.
    let bench = in_doubt(&json!({})).await;
    bench.later(LEASE);
    assert_eq!(bench.call(json!({})).await["content"], output()["content"]);
    // Without any chain nobody knows, and nothing is sent.
    let bench = in_doubt(&json!({})).await;
    bench.says(|s| drop(s.rpc.insert("getLedgerEntries", Reply::status(500, ""))));
    bench.says(|s| drop(s.rpc.insert("getLatestLedger", Reply::status(500, ""))));
    bench.later(LEASE);
    let answer = bench.call(json!({})).await;
    assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    same_bytes(&bench, 1);
}

#[tokio::test]
pub async fn an_address_that_todays_rules_refuse_is_not_dialled_again() {
    for settled in [false, true] {
        let key = json!({"idempotencyKey": KEY});
        let mut bench = if settled { settled_without_output(&key).await } else { in_doubt(&key).await };
        bench.restart(Change { allow_local: false, ..Change::default() }).await;
        let answer = bench.call(key.clone()).await;
        match settled {
            false => assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown")),
            true => assert_eq!(answer["outcome"], "undelivered"),
        }
        same_bytes(&bench, 1);
        bench.restart(Change::default()).await;
        assert_eq!(bench.call(key).await["content"], output()["content"], "the lease was given back");
        same_bytes(&bench, 2);
    }
}

#[tokio::test]
pub async fn what_todays_lists_do_not_allow_is_not_sent_again() {
    let key = json!({"idempotencyKey": KEY});
    let bench = in_doubt(&key).await;
    for policy in [
        Policy { deny_origins: [bench.origin()].into(), ..Policy::default() },
        Policy { deny_recipients: [PAY_TO.to_owned()].into(), ..Policy::default() },
        Policy { deny_assets: [bench::unit()].into(), ..Policy::default() },
    ] {
        bench.policy(policy);
        assert_eq!(said(&bench.call(key.clone()).await), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
        same_bytes(&bench, 1);
    }
    bench.policy(Policy::default());
    assert_eq!(bench.call(key).await["receipt"]["status"], "settled");
    same_bytes(&bench, 2);
}

#[tokio::test]
pub async fn a_network_that_is_no_longer_paid_on_is_not_sent_to() {
    let key = json!({"idempotencyKey": KEY});
    let mut bench = in_doubt(&key).await;
    let mut change = Change::default();
    change.settings.rules.payable = ["stellar:pubnet".parse().unwrap()].into();
    bench.restart(change).await;
    let other = json!({"idempotencyKey": KEY, "network": "stellar:pubnet"});
    assert_eq!(said(&bench.call(other).await), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown"));
    same_bytes(&bench, 1);
}

fn asks(state: &str) -> Value {
    json!({"resultType": "input_required", "inputRequests": {"q": {"method": "elicitation/create"}},
        "requestState": state})
}

fn rounds(call: &Value, state: &str) -> Value {
    let mut call = call.clone();
    call["requestState"] = json!(state);
    call["inputResponses"] = json!({"q": {"action": "accept", "n": 1.5}});
    call
}

#[tokio::test]
pub async fn a_question_without_a_receipt_goes_on_with_the_same_bytes() {
    for call in both() {
        let bench = Bench::new().await;
        bench.says(|s| s.paid_next = [result(&asks("one")), result(&asks("two")), Reply::Cut].into());
        let first = bench.call(call.clone()).await;
        assert_eq!(first["inputRequired"]["requestState"], "one");
        // Asked without the payment it knows nothing of the question.
        bench.says(|s| s.unpaid = Some(bench::rpc_error(-32602, "unknown requestState")));
        let second = bench.call(rounds(&call, "one")).await;
        assert_eq!((&second["inputRequired"]["requestState"], &second["receipt"]), (&json!("two"), &json!(null)));
        assert_eq!(second["paymentIdentifier"], first["paymentIdentifier"]);
        assert_eq!(bench.state(&second).await, ("InDoubt".into(), "input_required".into()));
        assert_eq!(said(&bench.call(rounds(&call, "two")).await).1, "no_answer");
        // A call that brings none of its own goes on with those that were sent last.
        bench.says(|s| s.unpaid = None);
        let last = bench.call(call.clone()).await;
        assert_eq!((&last["content"], &last["receipt"]["status"]), (&output()["content"], &json!("settled")));
        assert_eq!(bench.call(rounds(&call, "two")).await, last);

        let sent: Vec<Value> = bench.paid_params().iter().map(|p| serde_json::from_str(p).unwrap()).collect();
        let states: Vec<_> = sent.iter().map(|params| params["requestState"].as_str()).collect();
        assert_eq!(states, [None, Some("one"), Some("two"), Some("two")]);
        assert_eq!(sent[1]["inputResponses"], json!({"q": {"action": "accept", "n": 1.5}}));
        same_bytes(&bench, 4);
    }
}

#[tokio::test]
pub async fn a_question_of_a_settled_payment_goes_on_with_the_same_bytes() {
    for call in both() {
        let bench = Bench::new().await;
        // The seller need not send its receipt again.
        let questions = [result(&with_receipt(asks("one"), &receipt())), result(&asks("two"))];
        bench.says(|s| s.paid_next = questions.into());
        let first = bench.call(call.clone()).await;
        assert_eq!(
            (&first["receipt"]["status"], &first["inputRequired"]["requestState"]),
            (&json!("settled"), &json!("one"))
        );
        assert_eq!(bench.call(call.clone()).await, first, "asked again, the same question");
        same_bytes(&bench, 1);
        let second = bench.call(rounds(&call, "one")).await;
        assert_eq!((&second["receipt"], &second["inputRequired"]["requestState"]), (&first["receipt"], &json!("two")));
        bench.says(|s| s.paid = Some(result(&output())));
        let last = bench.call(rounds(&call, "two")).await;
        assert_eq!((&last["content"], &last["receipt"]), (&output()["content"], &first["receipt"]));
        assert!(last.get("inputRequired").is_none());
        assert_eq!(bench.call(call.clone()).await, last, "the last word is stored over the question");
        same_bytes(&bench, 3);
    }
}

#[tokio::test]
pub async fn new_answers_to_a_question_are_stored_before_they_are_sent() {
    for receipt in [None, Some(receipt())] {
        let bench = Bench::new().await;
        let question = receipt.as_ref().map_or(asks("one"), |receipt| with_receipt(asks("one"), receipt));
        bench.says(|s| s.paid_next.push_back(result(&question)));
        let first = bench.call(json!({})).await;
        bench.ledger.fail(Fault::PayloadNotStored);
        let answer = bench.call(rounds(&json!({}), "one")).await;
        match receipt {
            None => assert_eq!(said(&answer), ("SETTLEMENT_UNKNOWN", "in_doubt", "unknown")),
            Some(_) => assert_eq!(answer["outcome"], "undelivered"),
        }
        same_bytes(&bench, 1);
        assert!(!bench.row(&first).await.leased);
        bench.ledger.others();
        bench.says(|s| s.paid_next.push_back(Reply::Cut));
        bench.call(rounds(&json!({}), "one")).await;
        assert_eq!(bench.ledger.others()[..2], ["take_recovery", "store_payload"]);
        let stored = bench.ledger.payload(bench.row(&first).await.payment_id).await.unwrap().unwrap();
        let stored: Value = serde_json::from_slice(&stored).unwrap();
        assert_eq!(stored["requestState"], "one");
        same_bytes(&bench, 2);
    }
}

/// The seller has the bytes and says nothing; the process dies.
async fn killed(call: &Value) -> Bench {
    let mut bench = Bench::new().await;
    bench.says(|s| s.paid_next.push_back(Reply::Hang));
    let call = Box::pin(bench.call(call.clone()));
    let ready = Box::pin(async {
        loop {
            let rows = bench.ledger.real.list(&all()).await.unwrap();
            if bench.calls().1 == 1 && rows.first().is_some_and(|row| row.has_payload) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let first = futures_util::future::select(call, ready).await;
    assert!(matches!(first, futures_util::future::Either::Right(_)), "the call ended by itself");
    drop(first);
    bench.restart(Change::default()).await;
    bench
}

#[tokio::test]
pub async fn a_killed_process_leaves_a_payment_that_the_next_one_recovers() {
    for call in both() {
        let bench = killed(&call).await;
        let waiting = bench.call(call.clone()).await;
        assert_eq!(said(&waiting), ("SETTLEMENT_UNKNOWN", "in_flight", "unknown"), "its lease is alive");
        same_bytes(&bench, 1);
        bench.later(LEASE);
        let answer = bench.call(call.clone()).await;
        assert_eq!((&answer["content"], &answer["receipt"]["status"]), (&output()["content"], &json!("settled")));
        assert_eq!(bench.call(call).await, answer);
        same_bytes(&bench, 2);
        assert_eq!(bench.ledger.real.audit().await.unwrap().differences, []);
    }
}

#[tokio::test]
pub async fn a_recovery_that_is_killed_is_taken_up_by_the_next_one() {
    let mut bench = in_doubt(&json!({})).await;
    bench.says(|s| s.paid_next.push_back(Reply::Hang));
    {
        let call = Box::pin(bench.call(json!({})));
        let sent = Box::pin(sent(&bench, 2));
        futures_util::future::select(call, sent).await;
    }
    bench.restart(Change::default()).await;
    assert_eq!(said(&bench.call(json!({})).await).1, "in_flight");
    bench.later(LEASE);
    assert_eq!(bench.call(json!({})).await["content"], output()["content"]);
    same_bytes(&bench, 3);
}

#[tokio::test]
pub async fn a_caller_that_goes_away_does_not_stop_a_recovery() {
    let bench = in_doubt(&json!({})).await;
    let cancelled = CancellationToken::new();
    let cancel = cancelled.clone();
    bench.says(|s| s.on_paid = Some(Arc::new(move || cancel.cancel())));
    let call = bench.try_call(json!({}), cancelled.clone());
    futures_util::future::select(Box::pin(call), Box::pin(cancelled.cancelled())).await;
    for look in 0.. {
        assert!(look < 2_000, "the recovery did not run to its end");
        let row = only_row(&bench).await;
        if row.state == State::Settled {
            assert!(row.has_outcome && !row.answered);
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(bench.call(json!({})).await["content"], output()["content"]);
    same_bytes(&bench, 2);
}

#[tokio::test]
pub async fn an_owner_that_is_late_changes_nothing_and_says_what_the_row_says() {
    let right = || result(&with_receipt(output(), &receipt()));
    for reply in [right(), Reply::Cut, result(&output())] {
        let bench = Bench::with(patient()).await;
        let word = Arc::new(Notify::new());
        bench.says(|s| s.paid_next.push_back(Reply::When(word.clone(), Box::new(reply))));
        let next = async {
            while !bench.ledger.real.list(&all()).await.unwrap().first().is_some_and(|row| row.has_payload) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            sent(&bench, 1).await;
            bench.later(LEASE);
            let next = bench.call(json!({})).await;
            word.notify_one();
            next
        };
        let (owner, next) = tokio::join!(bench.call(json!({})), next);
        assert_eq!(next["content"], output()["content"], "{next}");
        assert!(owner["content"].to_string().contains("sunny"), "{owner}");
        assert_eq!(owner["receipt"], next["receipt"]);
        same_bytes(&bench, 2);
        assert_eq!(bench.ledger.real.audit().await.unwrap().differences, []);
    }
}

#[tokio::test]
pub async fn a_recovered_answer_that_arrived_ends_the_twin() {
    let bench = in_doubt(&json!({})).await;
    let context = bench.context(CancellationToken::new());
    let result = bench.tool("x402_call_resource", bench.arguments(json!({})), CancellationToken::new()).await.unwrap();
    assert!(!only_row(&bench).await.answered, "nobody has it yet");
    bench.tools.delivered(&context, "tools/call", &result).await;
    let written = async {
        while !only_row(&bench).await.answered {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), written).await.expect("never marked as answered");
    same_bytes(&bench, 2);
}

/// The sweep settled it while the seller was silent: the receipt alone reached its caller, the output is still owed.
#[tokio::test]
pub async fn a_receipt_without_the_output_ends_no_twin_before_anybody_asked_for_the_output() {
    let bench = Bench::new().await;
    bench.says(|s| s.paid_next.push_back(Reply::Cut));
    bench.ledger.fail(Fault::SettledBeforeDoubt);
    let context = bench.context(CancellationToken::new());
    let ask = || bench.tool("x402_call_resource", bench.arguments(json!({})), CancellationToken::new());
    let first = ask().await.unwrap();
    bench.tools.delivered(&context, "tools/call", &first).await;
    // A mark would be written by a task of its own: give it every chance.
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!only_row(&bench).await.answered, "the output is owed");
    }
    let answer = bench.call(json!({})).await;
    assert_eq!(answer["content"], output()["content"], "{answer}");
    same_bytes(&bench, 2);
}

#[tokio::test]
pub async fn a_recovered_settlement_that_cannot_be_recorded_reaches_the_agent() {
    let bench = in_doubt(&json!({})).await;
    bench.ledger.fail(Fault::SettleUnavailable);
    let answer = bench.call(json!({})).await;
    assert_eq!((&answer["recorded"], &answer["content"]), (&json!(false), &output()["content"]));
    bench.later(LEASE);
    assert!(bench.call(json!({})).await.get("recorded").is_none());
    same_bytes(&bench, 3);
}

#[tokio::test]
async fn what_to_do_next_is_to_call_again_where_that_brings_the_output() {
    let bench = in_doubt_with(&json!({"idempotencyKey": KEY}), patient()).await;
    let id = only_row(&bench).await.payment_id;
    let next = async || {
        let arguments = json!({"paymentIdentifier": id.to_hex()});
        let said = bench.tool("x402_get_payment", arguments, CancellationToken::new()).await.unwrap();
        let said: Value = serde_json::from_str(bench::structured(&said).get()).unwrap();
        said["next"]["action"].clone()
    };
    assert_eq!(next().await, "call_again");
    let word = Arc::new(Notify::new());
    bench.says(|s| s.paid_next.push_back(Reply::When(word.clone(), Box::new(Reply::Cut))));
    let looked = async {
        sent(&bench, 2).await;
        let next = next().await;
        word.notify_one();
        next
    };
    let (_, meanwhile) = tokio::join!(bench.call(json!({"idempotencyKey": KEY})), looked);
    assert_eq!(meanwhile, "wait");
    let row = bench.ledger.lookup(&bench.agent, By::Id(id)).await.unwrap().unwrap();
    assert!(!row.leased);

    let bench = Bench::new().await;
    bench.ledger.fail(Fault::PayloadNotStored);
    bench.says(|s| s.paid_next.push_back(Reply::Cut));
    let answer = bench.call(json!({})).await;
    let arguments = json!({"paymentIdentifier": answer["details"]["paymentIdentifier"]});
    let said = bench.tool("x402_get_payment", arguments, CancellationToken::new()).await.unwrap();
    let said: Value = serde_json::from_str(bench::structured(&said).get()).unwrap();
    assert_eq!(said["next"]["action"], "poll");
}
