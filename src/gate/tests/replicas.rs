//! Several gates on one store: one sale, whoever asks how often, and whichever of them dies or freezes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::sync::Notify;

use super::super::sell::Settings;
use super::scene::*;

async fn three() -> Scene {
    Scene::of(On::Postgres, 3, Settings::default()).await
}

#[tokio::test]
pub async fn two_hundred_at_once_are_one_sale() {
    for name in ["search", "deep"] {
        let scene = three().await;
        let own = params(name, Some(&payment(name, 1, Some(ID))));
        let stranger = params(name, Some(&payment(name, 1, None)));
        let calls = join_all((0..200).map(|n| scene.ask(n % 3, None, &own, slow(&scene))));
        // Some know no more than the chain will.
        let strangers = async {
            scene.until("the run", async || scene.runs() == 1).await;
            join_all((0..20).map(|n| scene.ask(n % 3, None, &stranger, slow(&scene)))).await
        };
        let (answers, strangers) = join(calls, strangers).await;
        assert_eq!((scene.runs(), scene.settles()), (1, 1), "{name}");
        for answer in &answers {
            assert!(is_output(answer), "{name}: everybody with proof has it: {}", text(answer));
            assert_eq!(text(answer), text(&answers[0]), "and the same one");
        }
        for answer in &strangers {
            let told = (challenge(answer), text(answer));
            assert!(!is_output(answer) && (told.0 == "already_settled" || told.1.contains("in_progress")), "{told:?}");
        }
    }
}

/// A handler that takes its time, so that the others come while it runs.
fn slow(scene: &Scene) -> impl Future<Output = super::super::sell::Ran> + Send + 'static + use<> {
    let run = scene.handler(output());
    async move {
        let ran = run.await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        ran
    }
}

#[tokio::test]
pub async fn a_gate_that_dies_while_it_runs_is_followed_by_another() {
    let scene = three().await;
    let own = params("search", Some(&payment("search", 1, Some(ID))));
    let never = Arc::new(Notify::new());
    let second = async {
        scene.until("the run", async || scene.runs() == 1).await;
        let waits = scene.ask(1, None, &own, scene.handler(output()));
        let dies = async {
            scene.kill(0);
            scene.later(31).await;
        };
        join(waits, dies).await.0
    };
    let (first, second) = join(scene.ask(0, None, &own, scene.held(&never)), second).await;
    assert!(!is_output(&first));
    assert!(is_output(&second), "{}", text(&second));
    assert_eq!((scene.runs(), scene.settles()), (2, 1), "the second start is because the first died");
    assert_eq!(text(&scene.ask(2, None, &own, scene.handler(output())).await), text(&second));
}

#[tokio::test]
pub async fn a_gate_that_dies_while_it_settles_is_swept() {
    for name in ["search", "deep"] {
        let scene = three().await;
        scene.facility.hangs.store(true, Ordering::SeqCst);
        let own = params(name, Some(&payment(name, 1, Some(ID))));
        let others = async {
            scene.until("the settle", async || scene.settles() == 1).await;
            scene.kill(0);
            scene.facility.hangs.store(false, Ordering::SeqCst);
            scene.later(31).await;
            // Found by whoever sweeps; nobody runs it in the meantime.
            let waits = scene.ask(1, None, &own, scene.handler(output()));
            let sweeps = async {
                tokio::time::sleep(Duration::from_millis(60)).await;
                scene.gates[2].sweep().await;
            };
            join(waits, sweeps).await.0
        };
        let (first, second) = join(scene.call(&own), others).await;
        assert_eq!(withheld(&first), "settlement_unknown", "{}", text(&first));
        // It may have looked in the moment between the expiry and the answer of the facilitator.
        let second = match withheld(&second).as_str() {
            "settlement_unknown" => scene.ask(1, None, &own, scene.handler(output())).await,
            _ => second,
        };
        assert!(is_output(&second), "{name}: {}", text(&second));
        assert_eq!((scene.runs(), scene.settles()), (1, 2), "{name}: the same question twice, one settlement");
    }
}

#[tokio::test]
pub async fn a_gate_that_dies_in_a_paid_run_is_followed_by_another() {
    let scene = three().await;
    let own = params("deep", Some(&payment("deep", 1, Some(ID))));
    let never = Arc::new(Notify::new());
    let second = async {
        scene.until("the run", async || scene.runs() == 1).await;
        scene.kill(0);
        scene.later(31).await;
        join_all((1..3).map(|gate| scene.ask(gate, None, &own, slow(&scene)))).await
    };
    let (first, second) = join(scene.ask(0, None, &own, scene.held(&never)), second).await;
    assert!(!is_output(&first));
    assert!(is_output(&second[0]) && text(&second[0]) == text(&second[1]), "{}", text(&second[0]));
    assert_eq!((scene.runs(), scene.settles()), (2, 1));
}

#[tokio::test]
pub async fn a_gate_that_dies_once_it_is_settled_or_unknown_leaves_it_to_the_others() {
    let scene = three().await;
    let own = params("search", Some(&payment("search", 1, Some(ID))));
    let first = scene.call(&own).await;
    scene.kill(0);
    assert_eq!(text(&scene.ask(1, None, &own, scene.handler(output())).await), text(&first));

    scene.facility.settles(&[(502, "lost"), (200, &yes())]);
    let own = params("search", Some(&payment("search", 2, Some("pay_of_the_second_one"))));
    assert_eq!(withheld(&scene.ask(1, None, &own, scene.handler(output())).await), "settlement_unknown");
    scene.kill(1);
    scene.later(6).await;
    scene.gates[2].sweep().await;
    assert!(is_output(&scene.ask(2, None, &own, scene.handler(output())).await));
    assert_eq!((scene.runs(), scene.settles()), (2, 3));
}

#[tokio::test]
pub async fn a_gate_that_was_frozen_past_its_lease_delivers_what_the_other_one_sold() {
    for name in ["search", "deep"] {
        let scene = three().await;
        let own = params(name, Some(&payment(name, 1, Some(ID))));
        let (go, there) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let others = async {
            scene.until("the run", async || scene.runs() == 1).await;
            // Frozen: its lease is over while it stands still.
            scene.later(31).await;
            let second = scene.ask(1, None, &own, scene.held(&there));
            let thaws = async {
                scene.until("the second run", async || scene.runs() == 2).await;
                go.notify_one();
                tokio::time::sleep(Duration::from_millis(100)).await;
                there.notify_one();
            };
            join(second, thaws).await.0
        };
        let (first, second) = join(scene.ask(0, None, &own, scene.held(&go)), others).await;
        assert!(is_output(&second), "{name}: {}", text(&second));
        assert_eq!(text(&first), text(&second), "{name}");
        assert_eq!((scene.runs(), scene.settles()), (2, 1), "{name}");
    }
}

#[tokio::test]
pub async fn a_caller_that_goes_away_stops_nothing() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        let go = Arc::new(Notify::new());
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        let gone = tokio::time::timeout(Duration::from_millis(300), scene.ask(0, None, &own, scene.held(&go)));
        assert!(gone.await.is_err());
        assert_eq!(scene.runs(), 1);
        go.notify_one();
        scene.gates[0].drained().await;
        assert!(is_output(&scene.call(&own).await));
        assert_eq!((scene.runs(), scene.settles()), (1, 1));
    }
}
