//! Every row of table "Gate", on both databases.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use serde_json::json;
use tokio::sync::Notify;

use super::super::Kind;
use super::super::claims::{Kept, State};
use super::super::desk::{Answer, Described};
use super::super::junk::JunkLimit;
use super::super::prices::tests::{PAY_TO, USDC};
use super::super::sell::{Ran, Settings};
use super::hooked;
use super::lies;
use super::replicas;
use super::scene::*;
use crate::chain::stellar::presented_tests::payment as transaction;
use crate::json;
use crate::mcp::RpcError;
use crate::telemetry;

const TABLE: &str = include_str!("../../../docs/outcomes.md");

/// (row, the tests that play it).
type Case = (u32, &'static [fn()]);

const CASES: &[Case] = &[
    (1, &[what_cannot_be_read_is_an_error]),
    (2, &[the_payer_gets_the_stored_answer_for_as_long_as_it_is_kept]),
    (3, &[who_waits_for_a_run_that_is_paid_gets_its_answer]),
    (4, &[what_failed_after_the_settlement_runs_again_free_and_three_times]),
    (5, &[the_payer_gets_the_stored_answer_for_as_long_as_it_is_kept, an_output_too_large_to_keep_is_said_to_be]),
    (6, &[a_question_that_is_paid_goes_on_free]),
    (7, &[a_stranger_gets_the_receipt_alone]),
    (8, &[a_payment_buys_one_call]),
    (9, &[who_has_no_proof_does_not_wait, replicas::two_hundred_at_once_are_one_sale]),
    (10, &[lies::an_unknown_settlement_is_no_demand_and_is_collected_later]),
    (11, &[what_was_given_back_is_sold_as_if_it_were_new]),
    (12, &[what_failed_is_looked_for_on_the_chain_before_it_is_tried_again]),
    (13, &[what_is_not_for_sale_is_not_there]),
    (14, &[what_is_free_passes_whatever_it_brings]),
    (15, &[arguments_are_checked_before_anybody_is_asked_to_pay]),
    (16, &[hooked::a_hook_halts_or_lets_through_before_anybody_pays]),
    (17, &[hooked::a_hook_halts_or_lets_through_before_anybody_pays]),
    (18, &[hooked::a_hook_that_fails_sells_nothing_unasked]),
    (19, &[without_a_payment_there_is_a_challenge_with_a_hint]),
    (20, &[a_payment_that_does_not_fit_is_named_and_nobody_is_asked]),
    (21, &[an_identifier_belongs_to_one_payment]),
    (22, &[a_source_of_junk_is_stopped_before_the_facilitator]),
    (23, &[an_offer_that_nobody_settles_is_not_advertised]),
    (24, &[a_store_that_fails_is_no_demand]),
    (25, &[what_the_facilitator_refuses_is_a_challenge_with_its_words]),
    (26, &[a_facilitator_that_fails_is_no_demand_and_is_left_alone]),
    (27, &[whatever_gives_no_output_is_not_charged]),
    (
        28,
        &[
            lies::an_unknown_settlement_is_no_demand_and_is_collected_later,
            replicas::a_gate_that_dies_while_it_settles_is_swept,
        ],
    ),
    (29, &[an_output_leaves_with_its_receipt]),
    (30, &[a_structural_no_may_be_tried_again, lies::a_dead_authorization_ends_the_doubt]),
    (31, &[lies::no_lie_gets_an_output_out]),
    (32, &[a_structural_no_may_be_tried_again]),
    (33, &[upfront_is_paid_whatever_the_handler_does]),
    (
        35,
        &[
            replicas::a_gate_that_dies_while_it_runs_is_followed_by_another,
            replicas::a_gate_that_dies_while_it_settles_is_swept,
            replicas::a_gate_that_dies_in_a_paid_run_is_followed_by_another,
        ],
    ),
];

/// What is played elsewhere: frames before a settlement are the proxy's.
const ELSEWHERE: &[u32] = &[34];

/// Row number to its cells: phase, event, claim, answer, charged, counted as.
fn rows() -> BTreeMap<u32, Vec<&'static str>> {
    let part = TABLE.split("## Gate").nth(1).unwrap();
    part.lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim).collect();
            Some((cells.first()?.parse().ok()?, cells[1..].to_vec()))
        })
        .collect()
}

#[test]
fn every_row_has_a_case_and_every_outcome_a_row() {
    let rows = rows();
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), (1..=35).collect::<Vec<_>>());
    for (number, cells) in &rows {
        assert!(cells.len() == 6 && cells.iter().all(|cell| !cell.is_empty()), "row {number} has an empty cell");
        let played = CASES.iter().any(|(row, tests)| row == number && !tests.is_empty());
        assert!(played != ELSEWHERE.contains(number), "row {number}: {}", cells[1]);
    }
    let words: BTreeSet<String> = rows
        .values()
        .flat_map(|cells| cells[5].split(", "))
        .filter(|word| *word != "–")
        .map(|word| word.trim_matches('`').to_owned())
        .collect();
    let counted: BTreeSet<String> = telemetry::GATE_OUTCOMES
        .seeds()
        .iter()
        .map(|[word]| (*word).to_owned())
        .filter(|word| word != "internal")
        .collect();
    assert_eq!(words, counted);
}

#[tokio::test]
async fn what_cannot_be_read_is_an_error() {
    let scene = Scene::new(On::Sqlite).await;
    for text in [
        r#"{"arguments":{}}"#,
        r#"{"name":7}"#,
        "[]",
        r#"{"name":"ping","Name":"search"}"#,
        r#"{"name":"ping","NAME":"search"}"#,
        r#"{"name":"search","Arguments":{}}"#,
        r#"{"name":"search","_META":{}}"#,
        r#"{"name":"search","argument\u017f":{}}"#,
    ] {
        let Answer::Error(error) = scene.call(&raw(text)).await else { panic!("{text}") };
        assert_eq!(error.code, -32602, "{text}");
    }
    assert_eq!(scene.runs(), 0);
}

#[tokio::test]
async fn an_output_leaves_with_its_receipt() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let answer = scene.call(&params("search", Some(&payment("search", 1, Some(ID))))).await;
        assert!(is_output(&answer), "{}", text(&answer));
        assert_eq!(receipt(&answer), Some(yes()));
        assert_eq!((scene.runs(), scene.facility.heard("verify"), scene.settles()), (1, 1, 1));
        for (kind, text) in [
            (Kind::Resource, r#"{"uri":"docs://7","_meta":{"x402/payment":PAYMENT}}"#),
            (Kind::Prompt, r#"{"name":"brief","_meta":{"x402/payment":PAYMENT}}"#),
        ] {
            let item = if kind == Kind::Resource { "docs://{id}" } else { "brief" };
            let text =
                text.replace("PAYMENT", payment(item, 40 + kind as u8, Some(&format!("{ID}{}", kind as u8))).get());
            let (params, fits) = (raw(&text), async { Described::Fits { tool: None } });
            let answer = scene.gates[0].answer(request(kind, &params, None), fits, scene.handler(output())).await;
            assert!(is_output(&answer) && receipt(&answer).is_some(), "{}", super::scene::text(&answer));
        }
    }
}

#[tokio::test]
async fn the_payer_gets_the_stored_answer_for_as_long_as_it_is_kept() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let paid = params("search", Some(&payment("search", 1, Some(ID))));
        let first = scene.call(&paid).await;
        // After its price changed, after it was withdrawn, after the authorization expired.
        scene.node.ledger.store(115, Ordering::SeqCst);
        scene.later(3_000).await;
        for prices in [prices(), cheaper(), nothing()] {
            scene.gates[0].reprice(prices).unwrap();
            assert_eq!(text(&scene.call(&paid).await), text(&first));
        }
        // The same call, written otherwise.
        let other = raw(&paid.get().replacen(r#""arguments":{"q":1}"#, r#""arguments":{ "q" : 1 }"#, 1));
        assert_eq!(text(&scene.call(&other).await), text(&first));
        scene.later(700).await;
        let late = scene.call(&paid).await;
        assert_eq!((withheld(&late).as_str(), receipt(&late)), ("answer_expired", Some(yes())));
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
    }
}

fn cheaper() -> super::super::prices::Prices {
    let mut terms = super::super::prices::tests::terms(1);
    terms.max_timeout_seconds = 30;
    let item = super::super::prices::Item::new(Kind::Tool, "search", vec![terms], Default::default(), false).unwrap();
    super::super::prices::tests::prices(vec![item], super::super::prices::Unlisted::Deny)
}

fn nothing() -> super::super::prices::Prices {
    let item = super::super::prices::tests::item(Kind::Tool, "other", 1);
    super::super::prices::tests::prices(vec![item], super::super::prices::Unlisted::Deny)
}

#[tokio::test]
async fn the_session_that_paid_is_proof_too() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let paid = params("search", Some(&payment("search", 1, None)));
        let first = scene.ask(0, Some("session-a"), &paid, scene.handler(output())).await;
        assert!(is_output(&first));
        assert_eq!(text(&scene.ask(0, Some("session-a"), &paid, scene.handler(output())).await), text(&first));
        for other in [Some("session-b"), None] {
            let answer = scene.ask(0, other, &paid, scene.handler(output())).await;
            assert_eq!(challenge(&answer), "already_settled");
            assert!(!is_output(&answer));
        }
        assert_eq!(scene.runs(), 1);
    }
}

#[tokio::test]
async fn a_stranger_gets_the_receipt_alone() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let own = payment("search", 1, Some(ID));
        assert!(is_output(&scene.call(&params("search", Some(&own))).await));
        // What the chain shows: the transaction, so payer, nonce and signature; and everything that is public besides.
        for id in [None, Some("pay_guessed_by_somebody"), Some("short")] {
            let replay = payment("search", 1, id);
            for source in [None, Some("another-session")] {
                let answer = scene.ask(0, source, &params("search", Some(&replay)), scene.handler(output())).await;
                assert_eq!(challenge(&answer), "already_settled", "{id:?}");
                assert_eq!(receipt(&answer), Some(yes()));
                assert!(!is_output(&answer));
            }
        }
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
    }
}

#[tokio::test]
async fn a_payment_buys_one_call() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let own = payment("search", 1, Some(ID));
        assert!(is_output(&scene.call(&params("search", Some(&own))).await));
        for arguments in [json!({"q": 2}), json!({"q": 1.0}), json!({})] {
            let answer = scene.call(&with_arguments("search", arguments, Some(&own))).await;
            assert_eq!((challenge(&answer).as_str(), receipt(&answer)), ("payment_already_used", None));
        }
        assert_eq!(scene.runs(), 1);
        // In flight and unknown as well.
        scene.facility.settles(&[(502, "lost")]);
        let other = payment("search", 2, Some("pay_of_the_second_one"));
        assert_eq!(withheld(&scene.call(&params("search", Some(&other))).await), "settlement_unknown");
        let answer = scene.call(&with_arguments("search", json!({"q": 2}), Some(&other))).await;
        assert_eq!(challenge(&answer), "payment_already_used");
    }
}

#[tokio::test]
async fn who_has_no_proof_does_not_wait() {
    for on in BOTH {
        let scene = Scene::of(on, 1, Settings { wait: Duration::from_millis(300), ..Settings::default() }).await;
        let go = Arc::new(Notify::new());
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        let first = scene.ask(0, None, &own, scene.held(&go));
        let others = async {
            scene.until("the run", async || scene.runs() == 1).await;
            let stranger = params("search", Some(&payment("search", 1, None)));
            assert_eq!(withheld(&scene.call(&stranger).await), "in_progress");
            let wrong = params("search", Some(&payment("search", 1, Some("pay_guessed_by_somebody"))));
            assert_eq!(challenge(&scene.call(&wrong).await), "payment_identifier_conflict");
            assert_eq!(withheld(&scene.call(&own).await), "in_progress", "the payer waits, and not for ever");
            go.notify_one();
        };
        let (first, ()) = futures_util::future::join(first, others).await;
        assert!(is_output(&first));
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
    }
}

#[tokio::test]
async fn who_waits_for_a_run_that_is_paid_gets_its_answer() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let go = Arc::new(Notify::new());
        let own = params("deep", Some(&payment("deep", 1, Some(ID))));
        let first = scene.ask(0, None, &own, scene.held(&go));
        let others = async {
            scene.until("the run", async || scene.runs() == 1).await;
            assert_eq!(scene.settles(), 1, "settled before it runs");
            let (second, ()) = futures_util::future::join(scene.call(&own), async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                go.notify_one();
            })
            .await;
            second
        };
        let (first, second) = futures_util::future::join(first, others).await;
        assert!(is_output(&first));
        assert_eq!(text(&first), text(&second));
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
    }
}

#[tokio::test]
async fn upfront_is_paid_whatever_the_handler_does() {
    for on in BOTH {
        for (seed, ran) in [(1, failed()), (2, error()), (3, output()), (4, Ran::Output(raw("[]")))] {
            let scene = Scene::new(on).await;
            let own = params("deep", Some(&payment("deep", seed, Some(ID))));
            let answer = scene.ask(0, None, &own, scene.handler(ran.clone())).await;
            assert_eq!(receipt(&answer), Some(yes()), "{}", text(&answer));
            assert_eq!(is_output(&answer), seed == 3);
            assert_eq!((scene.facility.heard("verify"), scene.settles(), scene.runs()), (1, 1, 1));
        }
        let scene = Scene::new(on).await;
        let own = params("deep", Some(&payment("deep", 5, Some(ID))));
        let panics = async { panic!("a handler of somebody else's") };
        assert_eq!(receipt(&scene.ask(0, None, &own, panics).await), Some(yes()));
        assert!(is_output(&scene.call(&own).await));
    }
}

#[tokio::test]
async fn what_failed_after_the_settlement_runs_again_free_and_three_times() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let own = params("deep", Some(&payment("deep", 1, Some(ID))));
        for _ in 0..4 {
            let answer = scene.ask(0, None, &own, scene.handler(error())).await;
            assert!(matches!(&answer, Answer::Error(RpcError { code: -32603, .. })), "{}", text(&answer));
            assert_eq!(receipt(&answer), Some(yes()));
        }
        assert_eq!(scene.runs(), 4, "the paid one and three that were free");
        let last = scene.call(&own).await;
        assert!(text(&last).contains("it broke") && receipt(&last) == Some(yes()), "{}", text(&last));
        let stranger = scene.call(&params("deep", Some(&payment("deep", 1, None)))).await;
        assert_eq!(challenge(&stranger), "already_settled");
        assert_eq!((scene.runs(), scene.settles()), (4, 1));
        let scene = Scene::new(on).await;
        assert!(!is_output(&scene.ask(0, None, &own, scene.handler(failed())).await));
        let again = scene.call(&own).await;
        assert!(is_output(&again) && receipt(&again) == Some(yes()));
        assert_eq!(text(&scene.call(&own).await), text(&again), "and is kept");
        assert_eq!((scene.runs(), scene.settles()), (2, 1));
    }
}

#[tokio::test]
async fn an_output_too_large_to_keep_is_said_to_be() {
    for on in BOTH {
        let scene = Scene::of(on, 1, Settings { max_answer: 10, ..Settings::default() }).await;
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        assert!(is_output(&scene.call(&own).await), "it is delivered");
        let again = scene.call(&own).await;
        assert_eq!((withheld(&again).as_str(), receipt(&again)), ("answer_too_large", Some(yes())));
        assert_eq!(scene.runs(), 1);
    }
}

#[tokio::test]
async fn a_question_that_is_paid_goes_on_free() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let own = payment("deep", 1, Some(ID));
        let first = params("deep", Some(&own));
        let question = Ran::Asks(raw(r#"{"resultType":"input_required","requestState":"s"}"#));
        let asked = scene.ask(0, None, &first, scene.handler(question.clone())).await;
        assert_eq!(receipt(&asked), Some(yes()));
        let with = |state: &str| raw(&first.get().replacen('{', &format!(r#"{{"requestState":"{state}","#), 1));
        for round in 0..5 {
            let answer = scene.ask(0, None, &with(&format!("s{round}")), scene.handler(question.clone())).await;
            assert!(text(&answer).contains("input_required") && receipt(&answer).is_some(), "{}", text(&answer));
        }
        assert!(is_output(&scene.call(&with("last")).await));
        assert_eq!(text(&scene.call(&first).await), text(&asked), "each round has its answer");
        assert_eq!((scene.runs(), scene.settles()), (7, 1));
        let claim = scene.gates[0].claims().look(&identity(&own)).await.unwrap().unwrap();
        assert_eq!((claim.state, claim.runs, claim.kept), (State::Settled, 0, Kept::Answer));
    }
}

fn identity(payment: &serde_json::value::RawValue) -> super::super::payment::Identity {
    super::super::payment::Payment::read(payment).map(|payment| payment.identity).unwrap_or_else(|_| panic!())
}

#[tokio::test]
async fn what_was_given_back_is_sold_as_if_it_were_new() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let own = payment("search", 1, Some(ID));
        let first = params("search", Some(&own));
        assert!(!is_output(&scene.ask(0, None, &first, scene.handler(failed())).await));
        // For another call, too; and by the prices of now.
        let other = with_arguments("search", json!({"q": 2}), Some(&own));
        scene.gates[0].reprice(nothing()).unwrap();
        assert!(matches!(scene.call(&other).await, Answer::Error(RpcError { code: -32602, .. })));
        scene.gates[0].reprice(prices()).unwrap();
        assert!(is_output(&scene.call(&other).await));
        assert_eq!(challenge(&scene.call(&first).await), "payment_already_used");
        assert_eq!((scene.runs(), scene.settles()), (2, 1));
    }
}

#[tokio::test]
async fn what_failed_is_looked_for_on_the_chain_before_it_is_tried_again() {
    let structural = no("invalid_exact_stellar_payload_wrong_amount");
    for on in BOTH {
        // The chain has it after all.
        let scene = Scene::new(on).await;
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        scene.facility.settles(&[(200, &structural), (200, &yes())]);
        assert_eq!(challenge(&scene.call(&own).await), "settlement_failed");
        scene.node.uses(99, &signed(1, PAY_TO));
        let found = scene.call(&own).await;
        assert!(is_output(&found) && receipt(&found).is_some(), "{}", text(&found));
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
        // It has the nonce, spent on another call of the payer's.
        let scene = Scene::new(on).await;
        scene.facility.settles(&[(200, &structural), (200, &no("nonce_used"))]);
        assert_eq!(challenge(&scene.call(&own).await), "settlement_failed");
        scene.node.uses(99, &signed(1, NO_SELLER));
        let answer = scene.call(&own).await;
        assert!(!is_output(&answer) && receipt(&answer).is_none(), "{}", text(&answer));
        // It has not, and the payer tries again.
        let scene = Scene::new(on).await;
        scene.facility.settles(&[(200, &structural), (200, &yes())]);
        assert_eq!(challenge(&scene.call(&own).await), "settlement_failed");
        assert!(is_output(&scene.call(&own).await));
        assert_eq!((scene.runs(), scene.settles()), (2, 2));
        // It has not, and a facilitator that says no now may be the one that settled it: no demand.
        let scene = Scene::new(on).await;
        scene.facility.settles(&[(200, &structural)]);
        assert_eq!(challenge(&scene.call(&own).await), "settlement_failed");
        scene.facility.verifies(200, r#"{"isValid":false,"invalidReason":"nonce_used"}"#);
        assert_eq!(withheld(&scene.call(&own).await), "settlement_unknown");
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
    }
}

#[tokio::test]
async fn what_is_not_for_sale_is_not_there() {
    let scene = Scene::new(On::Sqlite).await;
    for name in ["nothing", "Search", "se\u{200b}arch"] {
        let own = params(name, Some(&payment("search", 1, Some(ID))));
        assert!(matches!(scene.call(&own).await, Answer::Error(RpcError { code: -32602, .. })), "{name}");
    }
    assert_eq!((scene.runs(), scene.facility.heard("verify")), (0, 0));
}

#[tokio::test]
async fn what_is_free_passes_whatever_it_brings() {
    let scene = Scene::new(On::Sqlite).await;
    let bad = raw(r#"{"x402Version":1}"#);
    for brought in [None, Some(&*bad), Some(&*payment("search", 1, Some(ID)))] {
        assert!(matches!(scene.call(&params("ping", brought)).await, Answer::Free));
    }
    assert_eq!(scene.runs(), 0, "whoever forwards it runs it");
}

#[tokio::test]
async fn arguments_are_checked_before_anybody_is_asked_to_pay() {
    let scene = Scene::new(On::Sqlite).await;
    for brought in [None, Some(&*payment("search", 1, Some(ID)))] {
        let params = params("search", brought);
        let refused = async { Described::Refused(Err(RpcError::invalid_params("q is no text"))) };
        let answer = scene.gates[0].answer(request(Kind::Tool, &params, None), refused, scene.handler(output())).await;
        assert!(matches!(answer, Answer::Error(RpcError { code: -32602, .. })));
    }
    assert_eq!((scene.runs(), scene.facility.heard("verify")), (0, 0));
}

#[tokio::test]
async fn without_a_payment_there_is_a_challenge_with_a_hint() {
    let scene = Scene::new(On::Sqlite).await;
    let own = payment("search", 1, Some(ID));
    for (params, hint) in [
        (params("search", None), "repeat the request"),
        (raw(&format!(r#"{{"name":"search","_meta":{{"x402.payment":{own}}}}}"#)), "another key"),
        (raw(&format!(r#"{{"name":"search","x402/payment":{own}}}"#)), "outside"),
        (raw(r#"{"name":"search","_meta":{"x402/payment":"e30="}}"#), "must be a JSON object"),
    ] {
        let answer = scene.call(&params).await;
        assert_eq!(challenge(&answer), "payment_required");
        assert!(text(&answer).contains(hint), "{hint}: {}", text(&answer));
    }
    let params = params("search", None);
    let fits = async { Described::Fits { tool: None } };
    let in_header = super::super::desk::Request { payment_header: true, ..request(Kind::Tool, &params, None) };
    let answer = scene.gates[0].answer(in_header, fits, scene.handler(output())).await;
    assert!(text(&answer).contains("HTTP header"));
    assert_eq!(scene.runs(), 0);
}

#[tokio::test]
async fn a_payment_that_does_not_fit_is_named_and_nobody_is_asked() {
    let scene = Scene::new(On::Sqlite).await;
    let good = payment("search", 1, Some(ID));
    let altered = |from: &str, to: &str| raw(&good.get().replacen(from, to, 1));
    let wrong = |amount, expiration| {
        let accepted = json::member(&good, "accepted").unwrap();
        paid(accepted, &transaction(9, PAY_TO, USDC, amount, 5, expiration, |_| {}), &json!({}))
    };
    for (params, word) in [
        (params("search", Some(&raw("[]"))), "invalid_payload"),
        (params("search", Some(&altered("\"x402Version\":2", "\"x402Version\":1"))), "invalid_x402_version"),
        (
            params("search", Some(&altered("\"maxTimeoutSeconds\":60", "\"maxTimeoutSeconds\":61"))),
            "no_matching_requirements",
        ),
        (params("search", Some(&altered("\"required\":false", "\"required\":true"))), "extension_echo_mismatch"),
        (params("search", Some(&altered(ID, "short"))), "invalid_payload"),
        (
            params("search", Some(&altered("\"extensions\":{", "\"extensions\":{\"builder-code\":{\"a\":\"B!\"},"))),
            "invalid_payload",
        ),
        (params("named", Some(&payment("named", 1, None))), "payment_identifier_required"),
        (params("search", Some(&wrong(9_999, 110))), "invalid_payload"),
        (params("search", Some(&wrong(10_000, 100))), "invalid_payload"),
        (params("search", Some(&wrong(10_000, 200))), "invalid_payload"),
    ] {
        let answer = scene.call(&params).await;
        assert_eq!(challenge(&answer), word, "{}", text(&answer));
    }
    assert_eq!((scene.runs(), scene.facility.heard("verify"), scene.settles()), (0, 0, 0));
    // A withdrawn offer is good for its own timeout.
    scene.gates[0].reprice(cheaper()).unwrap();
    scene.later(59).await;
    assert!(is_output(&scene.call(&params("search", Some(&good))).await));
    scene.later(2).await;
    let late = payment("search", 7, Some("pay_that_came_too_late"));
    assert_eq!(challenge(&scene.call(&params("search", Some(&late))).await), "no_matching_requirements");
}

#[tokio::test]
async fn an_identifier_belongs_to_one_payment() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        assert!(is_output(&scene.call(&params("search", Some(&payment("search", 1, Some(ID))))).await));
        let second = scene.call(&params("search", Some(&payment("search", 2, Some(ID))))).await;
        assert_eq!(challenge(&second), "payment_identifier_conflict");
        assert!(!is_output(&second));
        assert_eq!((scene.runs(), scene.settles(), scene.facility.heard("verify")), (1, 1, 1));
    }
}

#[tokio::test]
async fn a_source_of_junk_is_stopped_before_the_facilitator() {
    for on in BOTH {
        let junk = JunkLimit { per_second: 1, burst: 3 };
        let scene = Scene::of(on, 1, Settings { junk, ..Settings::default() }).await;
        for seed in 1..20 {
            let own = params("search", Some(&payment("search", seed, Some(&format!("{ID}{seed}")))));
            assert!(is_output(&scene.call(&own).await), "a good payer is never stopped");
        }
        scene.facility.verifies(200, r#"{"isValid":false,"invalidReason":"insufficient_funds"}"#);
        let before = scene.facility.heard("verify");
        let mut told = BTreeMap::<bool, u32>::new();
        for seed in 100..120 {
            let answer = scene.call(&params("search", Some(&payment("search", seed, None)))).await;
            *told.entry(text(&answer).contains("too_many_payments")).or_default() += 1;
        }
        let asked = scene.facility.heard("verify") - before;
        assert!((3..=6).contains(&asked), "{asked} {told:?}");
        // Known payments and unpaid calls are served as before.
        let known = params("search", Some(&payment("search", 1, Some(&format!("{ID}1")))));
        assert!(is_output(&scene.call(&known).await));
        assert_eq!(challenge(&scene.call(&params("search", None)).await), "payment_required");
    }
}

#[tokio::test]
async fn what_cannot_be_read_counts_too() {
    let junk = JunkLimit { per_second: 1, burst: 3 };
    let scene = Scene::of(On::Sqlite, 1, Settings { junk, ..Settings::default() }).await;
    let told: Vec<String> = {
        let mut told = Vec::new();
        for _ in 0..12 {
            told.push(challenge(&scene.call(&params("search", Some(&raw("[]")))).await));
        }
        told
    };
    let refused = told.iter().filter(|word| *word == "invalid_payload").count();
    assert!((3..=6).contains(&refused) && told.iter().any(String::is_empty), "{told:?}");
}

#[tokio::test]
async fn good_payments_do_not_count_however_long_they_run_or_whatever_became_of_them() {
    let junk = JunkLimit { per_second: 1, burst: 3 };
    let scene = Scene::of(On::Sqlite, 1, Settings { junk, ..Settings::default() }).await;
    let go = Arc::new(Notify::new());
    let all: Vec<_> =
        (1..=8).map(|n| params("search", Some(&payment("search", n, Some(&format!("{ID}{n}")))))).collect();
    let mut running = FuturesUnordered::new();
    for own in &all {
        running.push(scene.ask(0, None, own, scene.held(&go)));
        let runs = u32::try_from(running.len()).unwrap();
        let begun = scene.until("its run", async || scene.runs() == runs);
        if let Either::Right((answer, _)) = select(pin!(begun), running.next()).await {
            panic!("{}", text(&answer.unwrap()));
        }
    }
    go.notify_waiters();
    while let Some(answer) = running.next().await {
        assert!(is_output(&answer), "{}", text(&answer));
    }
    scene.facility.settles(&[(200, &no("unexpected_settle_error"))]);
    for name in ["search", "deep"] {
        for seed in 50..60 {
            let seed = seed + 10 * u8::from(name == "deep");
            let own = params(name, Some(&payment(name, seed, Some(&format!("{ID}{seed}")))));
            assert_eq!(withheld(&scene.call(&own).await), "settlement_unknown");
        }
    }
}

#[tokio::test]
async fn an_offer_that_nobody_settles_is_not_advertised() {
    let scene = Scene::new(On::Sqlite).await;
    let listing = raw(r#"{"tools":[{"name":"search"},{"name":"ping"}]}"#);
    assert!(scene.gates[0].list("tools/list", &listing).unwrap().get().contains("x402/price"));
    *scene.facility.kinds.lock().unwrap() = json!([{"x402Version": 2, "scheme": "exact", "network": "stellar:pubnet"}]);
    let stopped = tokio_util::sync::CancellationToken::new();
    scene.gates[0].start(stopped.clone()).await;
    stopped.cancel();
    assert!(scene.gates[0].list("tools/list", &listing).is_none());
    let Answer::Error(error) = scene.call(&params("search", None)).await else { panic!() };
    assert_eq!(error.code, -32603);
    // Whoever was asked before pays what it was asked.
    assert!(is_output(&scene.call(&params("search", Some(&payment("search", 1, Some(ID))))).await));
}

#[tokio::test]
async fn a_store_that_fails_is_no_demand() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        scene.sql("ALTER TABLE claims RENAME TO elsewhere").await;
        let answer = scene.call(&params("search", Some(&payment("search", 1, Some(ID))))).await;
        assert!(matches!(&answer, Answer::Error(RpcError { code: -32603, .. })), "{}", text(&answer));
        assert!(text(&answer).contains("Do not pay again"), "it may be a payment that is known: {}", text(&answer));
        assert_eq!((scene.runs(), scene.facility.heard("verify")), (0, 0));
        assert_eq!(challenge(&scene.call(&params("search", None)).await), "payment_required");
        // Of one that is known to be settled the receipt is there.
        let scene = Scene::new(on).await;
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        assert!(is_output(&scene.call(&own).await));
        scene.sql("ALTER TABLE paid_answers RENAME TO elsewhere").await;
        let answer = scene.call(&own).await;
        assert!(matches!(&answer, Answer::Error(RpcError { code: -32603, .. })), "{}", text(&answer));
        assert!(text(&answer).contains("Do not pay again") && receipt(&answer) == Some(yes()), "{}", text(&answer));
    }
}

#[tokio::test]
async fn what_the_facilitator_refuses_is_a_challenge_with_its_words() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        scene.facility.verifies(200, r#"{"isValid":false,"invalidReason":"insufficient_funds"}"#);
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        let answer = scene.call(&own).await;
        assert_eq!(challenge(&answer), "payment_invalid");
        assert!(text(&answer).contains("insufficient_funds"));
        assert_eq!((scene.runs(), scene.settles()), (0, 0));
        scene.facility.verifies(200, r#"{"isValid":true}"#);
        assert!(is_output(&scene.call(&own).await), "the same payment, once it is covered");
    }
}

#[tokio::test]
async fn a_facilitator_that_fails_is_no_demand_and_is_left_alone() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        scene.facility.verifies(503, "oops");
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        for _ in 0..8 {
            let answer = scene.call(&own).await;
            assert_eq!(challenge(&answer), "", "{}", text(&answer));
            assert!(text(&answer).contains("could not be verified"));
        }
        assert_eq!((scene.runs(), scene.facility.heard("verify"), scene.settles()), (0, 5, 0));
        // Nor is anything settled first while it is ill.
        let deep = scene.call(&params("deep", Some(&payment("deep", 2, Some("pay_of_the_second_one"))))).await;
        assert!(text(&deep).contains("could not be verified"));
        assert_eq!((scene.runs(), scene.settles()), (0, 0));
    }
}

#[tokio::test]
async fn whatever_gives_no_output_is_not_charged() {
    for on in BOTH {
        let asks = Ran::Asks(raw(r#"{"resultType":"input_required"}"#));
        for ran in [failed(), error(), asks, Ran::Output(raw("7"))] {
            let scene = Scene::new(on).await;
            let own = params("search", Some(&payment("search", 1, Some(ID))));
            let answer = scene.ask(0, None, &own, scene.handler(ran.clone())).await;
            match &ran {
                Ran::Failed(result) | Ran::Asks(result) => assert_eq!(text(&answer), result.get(), "unchanged"),
                _ => assert!(matches!(answer, Answer::Error(_))),
            }
            assert_eq!((receipt(&answer), scene.settles()), (None, 0));
            assert!(is_output(&scene.call(&own).await), "the same payment buys it when it works");
        }
        let scene = Scene::of(on, 1, Settings { handler: Duration::from_millis(50), ..Settings::default() }).await;
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        let late = scene.ask(0, None, &own, std::future::pending()).await;
        assert!(text(&late).contains("too long") && scene.settles() == 0);
        let panics = async { panic!("a handler of somebody else's") };
        assert!(text(&scene.ask(0, None, &own, panics).await).contains("could not be handled"));
        assert!(is_output(&scene.call(&own).await));
    }
}

#[tokio::test]
async fn a_structural_no_may_be_tried_again() {
    let structural = no("invalid_exact_stellar_payload_wrong_amount");
    for on in BOTH {
        for (name, runs) in [("search", 1), ("deep", 0)] {
            let scene = Scene::new(on).await;
            scene.facility.settles(&[(200, &structural), (200, &yes())]);
            let own = params(name, Some(&payment(name, 1, Some(ID))));
            let answer = scene.call(&own).await;
            assert_eq!(challenge(&answer), "settlement_failed");
            assert!(!is_output(&answer) && receipt(&answer).unwrap().contains("wrong_amount"));
            assert_eq!(scene.runs(), runs);
            assert!(is_output(&scene.call(&own).await));
            // What could still be settled is asked for no more once it cannot be.
            let requests = || async { scene.gates[0].claims().settle_request(&identity_of(name)).await.unwrap() };
            assert!(requests().await.is_none(), "settled");
        }
        let scene = Scene::new(on).await;
        scene.facility.settles(&[(200, &structural)]);
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        assert_eq!(challenge(&scene.call(&own).await), "settlement_failed");
        let kept = async || scene.gates[0].claims().settle_request(&identity_of("search")).await.unwrap().is_some();
        scene.gates[0].tidy().await;
        assert!(kept().await, "it lives");
        scene.node.ledger.store(111, Ordering::SeqCst);
        scene.later(60).await;
        scene.gates[0].tidy().await;
        assert!(!kept().await, "it is dead");
    }
}

fn identity_of(name: &str) -> super::super::payment::Identity {
    identity(&payment(name, 1, Some(ID)))
}

#[test]
fn the_table_of_metrics_is_the_program() {
    let rows: Vec<String> = telemetry::GATE_FAMILIES
        .iter()
        .map(|family| {
            let it = family.described();
            let labels: Vec<String> = it.labels.iter().map(|label| format!("`{label}`")).collect();
            format!("| `{}` | {} | {} | {} |", it.name, it.kind, labels.join(", "), it.help)
        })
        .collect();
    let written: Vec<&str> =
        include_str!("../../../docs/gate.md").lines().filter(|line| line.starts_with("| `tollway_gate_")).collect();
    assert_eq!(written, rows, "write:\n{}", rows.join("\n"));
}
