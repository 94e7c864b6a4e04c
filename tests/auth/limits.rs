//! How often one caller may ask, and what a token's claims leave of its budget.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::auth::Jwt;
use tollway::mcp::{Authenticator, Settings, router};
use tollway::ports::machine;
use tollway::seal::KeyRing;

use super::issuer::{Issuer, Key};
use super::{ALICE, BOB, Front, parse, pass};
use crate::pay::bench::{ASSET, Bench, NETWORK, output, result, with_receipt};

const OK: StatusCode = StatusCode::OK;
const TOO_MANY: StatusCode = StatusCode::TOO_MANY_REQUESTS;

#[tokio::test]
async fn each_agent_has_its_own_rate() {
    let keys = format!("alice:{ALICE},alice:alice-alice-alice-alice-alice-second,bob:{BOB}");
    let rate = json!({"http": {"rate_limit": {"requests_per_second": 2, "burst": 3}}});
    let front = Front::start(rate.clone(), &[("MCP_SERVER_API_KEYS", &keys)]).await;
    for _ in 0..3 {
        assert_eq!(front.ask(Some(ALICE)).await.status, OK);
    }
    // The clock of the test is the machine's: only a stopped agent's answer is looked at, not how long it takes.
    let mut stopped = front.ask(Some(ALICE)).await;
    for _ in 0..50 {
        if stopped.status == TOO_MANY {
            break;
        }
        stopped = front.ask(Some(ALICE)).await;
    }
    assert_eq!((stopped.status, stopped.header("retry-after")), (TOO_MANY, "1"), "{stopped:?}");
    assert_eq!(front.ask(Some(BOB)).await.status, OK);
    pass(Duration::from_secs(2)).await;
    assert_eq!(front.ask(Some(ALICE)).await.status, OK);

    // Where everybody may ask, a source address is the caller.
    let public = Front::start(rate, &[]).await;
    let mut statuses = Vec::new();
    for _ in 0..50 {
        statuses.push(public.ask(None).await.status);
    }
    assert!(statuses.contains(&TOO_MANY) && statuses[..3].iter().all(|status| *status == OK), "{statuses:?}");
}

/// A batch of 2025-03-26 is as many requests as it has calls.
#[tokio::test]
async fn a_batch_is_no_way_around_the_rate() {
    let rate = json!({"http": {"rate_limit": {"requests_per_second": 1, "burst": 20}}});
    let front = Front::start(rate, &[("MCP_SERVER_API_KEYS", &format!("alice:{ALICE}"))]).await;
    let bearer = format!("Bearer {ALICE}");
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params":
        {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let answer = front.send(Method::POST, "/mcp", &[("authorization", &bearer)], body).await;
    let session = answer.header("mcp-session-id").to_owned();
    let headers = [("authorization", bearer.as_str()), ("mcp-session-id", session.as_str())];
    let batch = async |calls: usize| {
        let batch: Vec<Value> = (0..calls).map(|id| json!({"jsonrpc": "2.0", "id": id, "method": "ping"})).collect();
        front.send(Method::POST, "/mcp", &headers, json!(batch)).await.status
    };
    assert_eq!(batch(15).await, OK);
    assert_eq!(batch(15).await, TOO_MANY);
}

#[tokio::test]
async fn an_address_that_keeps_failing_is_told_to_wait_and_a_good_token_from_it_gets_in() {
    let key = Key::ed();
    let issuer = Issuer::start(&[("k", &key)]).await;
    let front = Front::start(issuer.section(json!({})), &[("MCP_SERVER_API_KEYS", &format!("alice:{ALICE}"))]).await;
    let good = key.good("k", json!({}));
    assert_eq!(front.ask(Some(&good)).await.status, OK);
    let mut statuses = Vec::new();
    for n in 0..400 {
        let answer = front.ask(Some(&format!("a-wrong-key-of-some-length-{n}"))).await;
        if answer.status == TOO_MANY {
            assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 1);
        }
        statuses.push(answer.status);
    }
    assert!(statuses[..50].iter().all(|status| *status == StatusCode::UNAUTHORIZED), "{statuses:?}");
    assert!(statuses.contains(&TOO_MANY), "{statuses:?}");
    assert_eq!(front.ask(Some(ALICE)).await.status, OK);
    assert_eq!(front.ask(Some(&good)).await.status, OK);
    assert_eq!(front.ask(None).await.status, StatusCode::UNAUTHORIZED, "who has no token has not failed");

    // Nobody is asked for its tokens meanwhile: a key that is made up has the issuer asked otherwise.
    pass(Duration::from_secs(11)).await;
    let made_up = key.good("made-up", json!({}));
    for n in 0.. {
        assert!(n < 20, "every refusal came after a pause");
        while front.ask(Some("a-wrong-key-of-some-length")).await.status != TOO_MANY {}
        let asked = issuer.asked();
        if front.ask(Some(&made_up)).await.status == TOO_MANY {
            assert_eq!(issuer.asked(), asked);
            break;
        }
    }
}

/// The bench's paying tools over HTTP, for tokens of `issuer`.
async fn paying(bench: &Bench, issuer: &Issuer) -> Front {
    let (world, _) = machine::world();
    let config = parse(issuer.section(json!({})), &[]).unwrap();
    let client = Client::new(world.clone(), Tls::Plain, Destination::Operator, Limits::default());
    let jwt = Jwt::new(config.auth.jwt.unwrap(), client, world.clone());
    let settings = Settings::new(world.clone(), KeyRing::ephemeral(&world), CancellationToken::new());
    Front::over(router(settings, bench.tools.clone(), Authenticator::Methods(vec![Arc::new(jwt)]))).await
}

#[tokio::test]
async fn claims_lower_the_budget_and_never_raise_it() {
    let key = Key::ed();
    let issuer = Issuer::start(&[("k", &key)]).await;
    let bench = Bench::new().await;
    // Each payment has a transaction of its own.
    bench.says(|says| {
        says.paid_next = ["aa", "bb", "cc"]
            .map(|byte| json!({"success": true, "transaction": byte.repeat(32), "network": NETWORK}))
            .map(|receipt| result(&with_receipt(output(), &receipt)))
            .into();
    });
    let front = paying(&bench, &issuer).await;
    let limits = |figures: Value| {
        let mut entry = json!({"network": NETWORK, "asset": ASSET});
        entry.as_object_mut().unwrap().extend(figures.as_object().unwrap().clone());
        json!([entry])
    };
    let token = |sub: &str, figures: Value, session: Value| {
        key.good("k", json!({"sub": sub, "tollway_limits": limits(figures), "session": session}))
    };
    let tool = async |token: &str, name: &str, arguments: Value| {
        let params = json!({"name": name, "arguments": arguments});
        let answer = front.tool(Some(token), "tools/call", params, &[("mcp-name", name)]).await;
        assert_eq!(answer.status, OK, "{answer:?}");
        answer.body["result"]["structuredContent"].clone()
    };
    let pay = async |token: &str, city: &str| {
        let answer = tool(token, "x402_call_resource", bench.arguments(json!({"arguments": {"city": city}}))).await;
        let said = |member: &str| answer["details"][member].as_str().map(str::to_owned);
        match answer["code"].as_str() {
            Some(code) => format!("{code} {} {}", said("reason").unwrap(), answer["details"]["limit"]["atomic"]),
            None => "paid".to_owned(),
        }
    };

    // The price is 10,000; the ledger's limits are 50,000 a call and 100,000 a day for each agent.
    let lower = token("a", json!({"per_call_max_atomic": "9999"}), Value::Null);
    assert!(pay(&lower, "Bern").await.starts_with("BUDGET_EXCEEDED per_call"));
    let enough = token("a", json!({"per_call_max_atomic": "10000"}), Value::Null);
    assert_eq!(pay(&enough, "Bern").await, "paid");
    let day = token("a", json!({"day_max_atomic": "19999"}), Value::Null);
    assert!(pay(&day, "Basel").await.starts_with("BUDGET_EXCEEDED day"), "10,000 are spent");
    // A token's word is no reason to spend more.
    let raised = token("b", json!({"per_call_max_atomic": "999999", "day_max_atomic": "999999"}), Value::Null);
    let budget = tool(&raised, "x402_get_budget", json!({})).await;
    assert_eq!(budget["budgets"][0]["perCall"]["atomic"], "50000", "{budget}");
    assert_eq!(budget["budgets"][0]["day"]["limit"]["atomic"], "100000", "{budget}");
    let budget = tool(&lower, "x402_get_budget", json!({})).await;
    assert_eq!(budget["budgets"][0]["perCall"]["atomic"], "9999", "{budget}");

    // The session of the claim has one budget, in whatever MCP session its tokens are used, and beside others.
    let figures = json!({"session_max_atomic": "15000"});
    let session = |name: &str| token("c", figures.clone(), json!(name));
    assert_eq!(pay(&session("s1"), "Chur").await, "paid");
    assert!(pay(&session("s1"), "Thun").await.starts_with("BUDGET_EXCEEDED session"));
    let mcp = front.session(&session("s1")).await;
    let params =
        json!({"name": "x402_call_resource", "arguments": bench.arguments(json!({"arguments": {"city": "Zug"}}))});
    let answer = front.within(&mcp, &session("s1"), "tools/call", params).await;
    assert_eq!(answer.body["result"]["structuredContent"]["details"]["reason"], "session", "{answer:?}");
    assert_eq!(pay(&session("s2"), "Thun").await, "paid");
    let budget = tool(&session("s1"), "x402_get_budget", json!({})).await;
    assert_eq!(budget["budgets"][0]["session"]["spent"]["atomic"], "10000", "{budget}");
}
