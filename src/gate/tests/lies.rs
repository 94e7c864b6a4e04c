//! Facilitators that lie, or whose answer is lost: the output is in no frame, nobody is charged twice, and what settled
//! after all is collected.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::claims::State;
use super::super::payment::Payment;
use super::super::prices::tests::PAY_TO;
use super::super::sell::Settings;
use super::scene::*;

async fn state(scene: &Scene, name: &str) -> State {
    let identity = Payment::read(&payment(name, 1, Some(ID))).map(|payment| payment.identity);
    scene.gates[0].claims().look(&identity.unwrap_or_else(|_| panic!())).await.unwrap().unwrap().state
}

#[tokio::test]
pub async fn no_lie_gets_an_output_out() {
    let wrong_payer = yes().replace('}', r#","payer":"GB"}"#);
    let no_transaction = yes().replace("\"ab\"", "\"\"");
    let pending = no("settlement_pending").replace(r#""transaction":"""#, r#""transaction":"ab""#);
    for on in BOTH {
        for (code, lie) in [
            (200, no("unexpected_settle_error")),
            (402, no("transaction_failed")),
            (200, "{}".to_owned()),
            (200, yes().replace("true", "\"true\"")),
            (200, yes().replace("testnet", "pubnet")),
            (200, wrong_payer.clone()),
            (200, no_transaction.clone()),
            (200, "<html>200 OK</html>".to_owned()),
            (200, String::new()),
            (500, yes().replace("success", "succes")),
            (200, pending.clone()),
        ] {
            // A schema each takes its time, and what is a lie is not the database's to say.
            let few = on == On::Postgres && !matches!(lie.as_str(), "{}" | "");
            for name in ["search", "deep"].into_iter().filter(|_| !few) {
                let scene = Scene::new(on).await;
                scene.facility.settles(&[(code, &lie)]);
                let own = params(name, Some(&payment(name, 1, Some(ID))));
                for turn in 0..2 {
                    let answer = scene.call(&own).await;
                    assert_eq!(withheld(&answer), "settlement_unknown", "{lie} {turn}: {}", text(&answer));
                    assert!(!is_output(&answer), "{lie}");
                }
                let asked = if lie == pending { 2 } else { 1 };
                assert_eq!(scene.settles(), asked, "{lie}: charged twice");
                assert_eq!(scene.runs(), u32::from(name == "search"), "{lie}");
                assert_eq!(state(&scene, name).await, State::Unknown, "{lie}");
            }
        }
    }
}

#[tokio::test]
pub async fn an_unknown_settlement_is_no_demand_and_is_collected_later() {
    for on in BOTH {
        for name in ["search", "deep"] {
            let settings = Settings { facilitator: Duration::from_millis(100), ..Settings::default() };
            let scene = Scene::of(on, 1, settings).await;
            // It settles, and says so to nobody.
            scene.facility.hangs.store(true, Ordering::SeqCst);
            let own = params(name, Some(&payment(name, 1, Some(ID))));
            let answer = scene.call(&own).await;
            assert_eq!(withheld(&answer), "settlement_unknown");
            assert!(!is_output(&answer));
            scene.facility.hangs.store(false, Ordering::SeqCst);
            // A no to the second question, and one that the nonce is used, prove nothing.
            for word in ["nonce_already_used", "invalid_exact_stellar_payload_wrong_amount"] {
                scene.facility.settles(&[(200, &no(word))]);
                scene.later(400).await;
                scene.gates[0].sweep().await;
                assert_eq!(state(&scene, name).await, State::Unknown, "{word}");
                assert_eq!(withheld(&scene.call(&own).await), "settlement_unknown");
            }
            // Nor does its nonce, that the payer spent on another call.
            scene.node.uses(104, &signed(1, NO_SELLER));
            scene.node.ledger.store(105, Ordering::SeqCst);
            scene.later(400).await;
            scene.gates[0].sweep().await;
            assert_eq!(state(&scene, name).await, State::Unknown);
            assert!(!is_output(&scene.call(&own).await));
            // Longer than answers are kept, it is found on the chain.
            scene.later(4_000).await;
            scene.node.uses(104, &signed(1, PAY_TO));
            scene.gates[0].sweep().await;
            assert_eq!(state(&scene, name).await, State::Settled);
            let stranger = scene.call(&params(name, Some(&payment(name, 1, None)))).await;
            assert_eq!(challenge(&stranger), "already_settled");
            let answer = scene.call(&own).await;
            assert!(is_output(&answer) && receipt(&answer).is_some(), "{on:?} {name}: {}", text(&answer));
            assert_eq!(text(&scene.call(&own).await), text(&answer));
            assert_eq!((scene.runs(), scene.settles()), (1, 5), "the first, and four of the sweep");
        }
    }
}

#[tokio::test]
pub async fn a_lost_yes_is_found_by_asking_again() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        scene.facility.settles(&[(502, "lost"), (200, &yes())]);
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        assert_eq!(withheld(&scene.call(&own).await), "settlement_unknown");
        scene.later(6).await;
        scene.gates[0].sweep().await;
        let answer = scene.call(&own).await;
        assert!(is_output(&answer) && receipt(&answer) == Some(yes()));
        assert_eq!((scene.runs(), scene.settles()), (1, 2));
    }
}

#[tokio::test]
pub async fn a_dead_authorization_ends_the_doubt() {
    for on in BOTH {
        let scene = Scene::new(on).await;
        scene.facility.settles(&[(502, "lost"), (200, &no("expired"))]);
        let own = params("search", Some(&payment("search", 1, Some(ID))));
        assert_eq!(withheld(&scene.call(&own).await), "settlement_unknown");
        scene.later(6).await;
        scene.gates[0].sweep().await;
        assert_eq!(state(&scene, "search").await, State::Unknown, "it lives");
        scene.node.ledger.store(130, Ordering::SeqCst);
        scene.later(400).await;
        scene.gates[0].sweep().await;
        assert_eq!(state(&scene, "search").await, State::Failed);
        // The payer may pay anew; this payment is dead.
        assert_eq!(challenge(&scene.call(&own).await), "invalid_payload");
        assert_eq!(scene.runs(), 1);
    }
}
