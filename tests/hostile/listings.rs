//! Listings that ask for more than is given.

use serde_json::json;

use super::scene::{Behaviour, Change, Scene};
use crate::pay::server::Reply;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn a_listing_that_asks_for_a_year_gets_the_operators_time() {
    let silent: Behaviour = |_, _, _| Reply::Cut;
    for seconds in [3_600_u64, 86_400, 31_536_000] {
        let change = Change {
            behaviours: [("year", silent)].into(),
            offer: json!({"maxTimeoutSeconds": seconds}),
            ..Change::default()
        };
        let scene = Scene::new(change).await;
        let answer = scene.call("year").await;
        assert_eq!(answer["details"]["reason"], "no_answer", "{answer}");
        // 300 s of max_authorization_seconds, 6 s a ledger.
        scene.signed_nothing_but_our_transfers(50).await;
        assert_eq!(scene.signed().len(), 1);
        let row = scene.rows().await.remove(0);
        assert_eq!(row.authorization.dead_after, row.authorization.at + 50);
        scene.finish().await;
        assert_eq!(scene.ends().await["year"].0, "released");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
pub async fn a_time_beyond_a_year_is_no_option_at_all() {
    let item = |seconds: u64| {
        let local = crate::stellar::local();
        let mut offer = local.requirements();
        offer["maxTimeoutSeconds"] = json!(seconds);
        let text = json!({"resource": "https://s.example/mcp", "type": "mcp", "x402Version": 2, "accepts": [offer],
            "extensions": {"bazaar": {"info": {"input": {"type": "mcp", "toolName": "t"}}}}});
        tollway::catalog::Listing::parse(&tollway::json::raw(&text)).map(|_| ())
    };
    assert!(item(31_536_000).is_ok());
    for seconds in [0, 31_536_001, u64::MAX] {
        assert!(item(seconds).is_err(), "{seconds}");
    }
}
