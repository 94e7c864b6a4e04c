//! A seller's own code: it is asked before anybody pays, prices within its ceiling, and hears what happened.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::json;

use super::super::desk::Answer;
use super::super::hooked::MAX_TELLING;
use super::super::hooks::{Happened, Hooking, Hooks, OnFailure, Protected, Verdict};
use super::super::junk::JunkLimit;
use super::super::prices::tests::{PAY_TO, USDC, terms};
use super::super::sell::Settings;
use super::scene::*;
use crate::chain::stellar::presented_tests::payment as transaction;
use crate::json;
use crate::money::Amount;

type Say = dyn Fn() -> BoxFuture<'static, Result<Verdict, String>> + Send + Sync;

struct Code {
    say: Box<Say>,
    heard: Mutex<Vec<(&'static str, Happened)>>,
    asked: Mutex<Vec<String>>,
}

impl Hooks for Code {
    fn on_protected_request<'a>(&'a self, request: Protected<'a>) -> BoxFuture<'a, Result<Verdict, String>> {
        let text = format!("{} {} {} {}", request.transport, request.item, request.params, request.extensions);
        self.asked.lock().unwrap().push(text);
        (self.say)()
    }
    fn on_verified_payment_canceled<'a>(&'a self, event: &'a Happened) -> BoxFuture<'a, ()> {
        self.hear("canceled", event)
    }
    fn on_settled<'a>(&'a self, event: &'a Happened) -> BoxFuture<'a, ()> {
        self.hear("settled", event)
    }
    fn on_rejected<'a>(&'a self, event: &'a Happened) -> BoxFuture<'a, ()> {
        self.hear("rejected", event)
    }
}

impl Code {
    fn hear(&self, what: &'static str, event: &Happened) -> BoxFuture<'_, ()> {
        self.heard.lock().unwrap().push((what, event.clone()));
        Box::pin(async {})
    }

    fn words(&self) -> Vec<String> {
        let heard = self.heard.lock().unwrap();
        heard.iter().map(|(what, event)| format!("{what} {}", event.reason.as_deref().unwrap_or("-"))).collect()
    }
}

async fn scene(
    on_failure: OnFailure,
    say: impl Fn() -> Result<Verdict, String> + Send + Sync + 'static,
) -> (Scene, Arc<Code>) {
    slow_scene(on_failure, move || {
        let said = say();
        Box::pin(async move { said })
    })
    .await
}

async fn slow_scene(
    on_failure: OnFailure,
    say: impl Fn() -> BoxFuture<'static, Result<Verdict, String>> + Send + Sync + 'static,
) -> (Scene, Arc<Code>) {
    let code = Arc::new(Code { say: Box::new(say), heard: Mutex::default(), asked: Mutex::default() });
    let unit = terms(1).price().unwrap().offer.unit();
    let hooking = Hooking {
        hooks: code.clone(),
        timeout: Duration::from_millis(100),
        on_failure,
        ceilings: BTreeMap::from([(unit, Amount::from_u64(50_000))]),
    };
    (Scene::made(On::Sqlite, 1, Settings::default(), Some(hooking)).await, code)
}

#[tokio::test]
pub async fn a_hook_halts_or_lets_through_before_anybody_pays() {
    let own = params("search", Some(&payment("search", 1, Some(ID))));
    let halt = || Ok(Verdict::Halt { status: 451, body: raw(r#"{"why":"not here"}"#) });
    let (scene, code) = scene(OnFailure::Refuse, halt).await;
    for params in [&own, &params("search", None)] {
        let answer = scene.call(params).await;
        let Answer::Result(result) = &answer else { panic!("{}", text(&answer)) };
        assert_eq!(json::member(result, "structuredContent").unwrap().get(), r#"{"why":"not here"}"#);
        assert!(text(&answer).contains(r#""isError":true"#) && text(&answer).contains("451"));
        assert_eq!(challenge(&answer), "");
    }
    let asked = code.asked.lock().unwrap().join("\n");
    assert!(asked.contains("mcp tool:search") && asked.contains(r#""arguments":{"q":1}"#), "{asked}");
    assert!(!asked.contains("transaction") && !asked.contains(ID), "no hook has a payment's bytes");
    let (scene, _) = self::scene(OnFailure::Refuse, || Ok(Verdict::LetThrough)).await;
    assert!(matches!(scene.call(&own).await, Answer::Free));
    assert_eq!((scene.facility.heard("verify"), scene.settles()), (0, 0));
    assert!(matches!(scene.call(&params("ping", None)).await, Answer::Free));
}

#[tokio::test]
pub async fn a_hook_that_fails_sells_nothing_unasked() {
    let above = || Verdict::Replace { offers: Some(vec![terms(50_001)]), extensions: None };
    let own = params("search", Some(&payment("search", 1, Some(ID))));
    for on_failure in [OnFailure::Refuse, OnFailure::Continue] {
        for failure in 0..5 {
            let (scene, _) = slow_scene(on_failure, move || {
                Box::pin(async move {
                    match failure {
                        0 => Err("no".to_owned()),
                        1 => std::future::pending().await,
                        2 => panic!("a hook of somebody else's"),
                        3 => Ok(above()),
                        _ => Ok(Verdict::Replace { offers: Some(Vec::new()), extensions: None }),
                    }
                })
            })
            .await;
            let answer = scene.call(&own).await;
            assert_eq!(is_output(&answer), on_failure == OnFailure::Continue, "{failure}: {}", text(&answer));
            assert_eq!(challenge(&answer), "");
        }
    }
}

#[derive(Default)]
struct Stuck(AtomicU64);
impl Hooks for Stuck {
    fn on_settled<'a>(&'a self, _: &'a Happened) -> BoxFuture<'a, ()> {
        self.hang()
    }
    fn on_rejected<'a>(&'a self, _: &'a Happened) -> BoxFuture<'a, ()> {
        self.hang()
    }
}
impl Stuck {
    fn hang(&self) -> BoxFuture<'_, ()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Box::pin(std::future::pending())
    }
}

#[tokio::test]
async fn so_many_events_are_on_their_way_and_refusals_keep_none_of_the_others_back() {
    let stuck = Arc::new(Stuck::default());
    let (hooks, timeout) = (stuck.clone(), Duration::from_secs(600));
    let hooking = Hooking { hooks, timeout, on_failure: OnFailure::Refuse, ceilings: BTreeMap::new() };
    let junk = JunkLimit { per_second: 1, burst: 100_000 };
    let scene = Scene::made(On::Sqlite, 1, Settings { junk, ..Settings::default() }, Some(hooking)).await;
    let (half, told) = (MAX_TELLING as u64 / 2, || stuck.0.load(Ordering::SeqCst));
    for _ in 0..MAX_TELLING {
        assert_eq!(challenge(&scene.call(&params("search", Some(&raw("[]")))).await), "invalid_payload");
    }
    scene.until("the refusals", async || told() == half).await;
    assert!(is_output(&scene.call(&params("search", Some(&payment("search", 1, Some(ID))))).await));
    scene.until("the settlement", async || told() == half + 1).await;
}

#[tokio::test]
async fn a_price_follows_the_hook_and_what_was_quoted_is_good_for_its_time() {
    let price = Arc::new(AtomicU64::new(20_000));
    let of = price.clone();
    let (scene, _) = scene(OnFailure::Refuse, move || {
        let extensions = Some(raw(r#"{"example":{"info":{"v":1}},"payment-identifier":{"info":{}}}"#));
        Ok(Verdict::Replace { offers: Some(vec![terms(of.load(Ordering::SeqCst))]), extensions })
    })
    .await;
    let asked = scene.call(&params("search", None)).await;
    assert!(text(&asked).contains("20000") && text(&asked).contains("example") && text(&asked).contains("minLength"));
    let pay = |seed: u8, amount: u64, example: u32| {
        let accepted = terms(amount).price().unwrap().offer.raw;
        let extensions = json!({"example": {"info": {"v": example}}});
        paid(&accepted, &transaction(seed, PAY_TO, USDC, amount, 5, 110, |_| {}), &extensions)
    };
    let no_more = scene.call(&params("search", Some(&payment("search", 1, None)))).await;
    assert_eq!(challenge(&no_more), "no_matching_requirements", "the written price is not the price");
    price.store(30_000, Ordering::SeqCst);
    assert_eq!(challenge(&scene.call(&params("search", Some(&pay(2, 20_000, 2)))).await), "extension_echo_mismatch");
    assert!(is_output(&scene.call(&params("search", Some(&pay(2, 20_000, 1)))).await));
    let other = with_arguments("search", json!({"q": 2}), Some(&pay(3, 20_000, 1)));
    assert_eq!(challenge(&scene.call(&other).await), "no_matching_requirements", "quoted for another call");
    scene.later(61).await;
    assert_eq!(challenge(&scene.call(&params("search", Some(&pay(4, 20_000, 1)))).await), "no_matching_requirements");
    assert!(is_output(&scene.call(&params("search", Some(&pay(4, 30_000, 1)))).await));
}

#[tokio::test]
async fn a_hook_hears_what_became_of_a_payment() {
    let (scene, code) = scene(OnFailure::Refuse, || Ok(Verdict::Continue)).await;
    let own = params("search", Some(&payment("search", 1, Some(ID))));
    scene.ask(0, None, &own, scene.handler(failed())).await;
    scene.ask(0, None, &own, scene.handler(error())).await;
    scene.facility.settles(&[(200, &no("invalid_exact_stellar_payload_wrong_amount")), (200, &yes())]);
    scene.call(&own).await;
    assert!(is_output(&scene.call(&own).await));
    let asked = code.asked.lock().unwrap().len();
    assert!(is_output(&scene.call(&own).await));
    assert_eq!(code.asked.lock().unwrap().len(), asked, "a known payment is decided by its claim");
    scene.call(&params("search", Some(&raw("[]")))).await;
    scene.until("the events", async || code.heard.lock().unwrap().len() >= 6).await;
    let expected = [
        "canceled handler_failed",
        "canceled handler_raised",
        "canceled settlement_failed",
        "rejected settlement_failed",
        "settled -",
        "rejected invalid_payload",
    ];
    assert_eq!(code.words(), expected);
    let heard = code.heard.lock().unwrap();
    let shown = format!("{heard:?}");
    assert!(!shown.contains(ID) && !shown.contains("AAAA"), "nothing that can be spent or shown as proof: {shown}");
    assert_eq!(heard[4].1.receipt.as_ref().unwrap().get(), yes());
    assert_eq!(heard[0].1.error.as_deref(), Some("it broke"));
}

#[tokio::test]
async fn a_hook_hears_once_of_a_settlement_that_was_found_later() {
    let (scene, code) = scene(OnFailure::Refuse, || Ok(Verdict::Continue)).await;
    let own = params("search", Some(&payment("search", 1, Some(ID))));
    scene.facility.settles(&[(502, "lost"), (200, &yes())]);
    assert_eq!(withheld(&scene.call(&own).await), "settlement_unknown");
    scene.later(6).await;
    scene.gates[0].sweep().await;
    scene.later(400).await;
    scene.gates[0].sweep().await;
    assert!(is_output(&scene.call(&own).await));
    scene.until("the event", async || !code.heard.lock().unwrap().is_empty()).await;
    assert_eq!(code.words(), ["settled -"]);
    let heard = code.heard.lock().unwrap();
    let (item, receipt) = (heard[0].1.item.as_str(), heard[0].1.receipt.as_ref().map(|receipt| receipt.get()));
    assert_eq!((item, receipt), ("tool:search", Some(yes().as_str())));
}
