//! The seller over real HTTP, its facilitator a server that answers as the test says.

use std::net::SocketAddr;
use std::sync::Mutex;

use axum::Router;
use axum::routing::post;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::*;
use crate::http::{self, Client, Destination};
use crate::mcp::{self, Authenticator};
use crate::ports::machine;
use crate::sandbox::mcp_client::{McpClient, McpClientError};
use crate::sandbox::server::{ASKS, QUESTION};
use crate::seal::KeyRing;
use crate::x402::{Answer, Settlement, classify};

const ID: &str = "payment-number-one";

/// What it was asked, in order, and what it answers to a settle.
struct Script {
    asked: Mutex<Vec<&'static str>>,
    verify: Mutex<serde_json::Value>,
    settle: Mutex<serde_json::Value>,
}

struct Scene {
    seller: Arc<Seller>,
    script: Arc<Script>,
    client: McpClient,
    modern: McpClient,
    _shutdown: tokio_util::sync::DropGuard,
}

async fn listen(world: &World, router: Router, shutdown: &CancellationToken) -> String {
    let listener = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = mcp::serve::serve(machine::TcpListener(listener), world.clone(), router, shutdown.clone());
    world.spawn.spawn(Box::pin(server));
    url
}

async fn scene() -> Scene {
    let (world, _) = machine::world();
    let shutdown = CancellationToken::new();
    let script = Arc::new(Script {
        asked: Mutex::default(),
        verify: Mutex::new(json!({"isValid": true, "payer": "GPAYER"})),
        settle: Mutex::new(
            json!({"success": true, "transaction": "ab".repeat(32), "network": "stellar:testnet", "payer": "GPAYER"}),
        ),
    });
    let answer = |what: &'static str, script: &Arc<Script>| {
        let script = script.clone();
        post(move |axum::Json(body): axum::Json<serde_json::Value>| async move {
            assert_eq!(body["x402Version"], 2);
            assert_eq!(body["paymentPayload"]["accepted"], body["paymentRequirements"]);
            script.asked.lock().unwrap().push(what);
            let answer = if what == "verify" { &script.verify } else { &script.settle };
            axum::Json(answer.lock().unwrap().clone())
        })
    };
    let router = Router::new().route("/verify", answer("verify", &script)).route("/settle", answer("settle", &script));
    let facilitator = listen(&world, router, &shutdown).await;
    let limits = http::Limits { timeout: Duration::from_secs(30), max_response_bytes: 1 << 20 };
    let http = Client::new(world.clone(), http::tls(None).unwrap(), Destination::Operator, limits);
    let seller = Seller::new(
        &world,
        Facilitator::new(http.clone(), &Url::parse(&facilitator).unwrap()),
        Options {
            endpoint: "http://seller.example/mcp".into(),
            network: "stellar:testnet".into(),
            asset: "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA".into(),
            pay_to: "GSELLER".into(),
            max_timeout_seconds: 60,
        },
    );
    let settings = mcp::Settings::new(world.clone(), KeyRing::ephemeral(&world), shutdown.clone());
    let router = mcp::router(settings, seller.clone(), Authenticator::Public);
    let url = format!("{}/mcp", listen(&world, router, &shutdown).await);
    let client = McpClient::new(http.clone(), &url, None).capable_of(json!({"elicitation": {"form": {}}}));
    let modern = McpClient::new(http, &url, None).capable_of(json!({"extensions": {MCP_EXTENSION: {}}}));
    Scene { seller, script, client, modern, _shutdown: shutdown.drop_guard() }
}

impl Scene {
    async fn call(&self, tool: &str, arguments: &serde_json::Value) -> Box<RawValue> {
        self.client.call_tool(tool, arguments, &json!({}), &[]).await.unwrap()
    }

    async fn weather(&self, payment: &serde_json::Value) -> Box<RawValue> {
        self.pay("get_weather", &json!({"city": "Oslo"}), payment).await.unwrap()
    }

    async fn pay(
        &self,
        tool: &str,
        arguments: &serde_json::Value,
        payment: &serde_json::Value,
    ) -> Result<Box<RawValue>, McpClientError> {
        self.client.call_tool(tool, arguments, &json!({}), &[(META_PAYMENT, &strict::raw(payment))]).await
    }

    /// A payment for the tool's offer as it stands.
    fn payment(&self, tool: &str, id: Option<&str>) -> serde_json::Value {
        let mut extensions = json!({"bazaar": {}});
        if let Some(id) = id {
            extensions[PAYMENT_IDENTIFIER] = json!({"info": {"required": false, "id": id}});
        }
        json!({
            "x402Version": 2,
            "accepted": self.seller.offers(Tool::named(tool).unwrap()).unwrap()[0],
            "payload": {"transaction": "AAAA"},
            "extensions": extensions,
        })
    }

    fn asked(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.script.asked.lock().unwrap())
    }
}

fn receipt(result: &RawValue) -> Option<Settlement> {
    Settlement::from_result(result).unwrap()
}

/// What a challenge says, after both copies were found right.
fn challenged(result: &RawValue) -> String {
    match classify(result) {
        Answer::Challenge(challenge) => challenge.error.unwrap_or_default(),
        other => panic!("no challenge but {other:?}: {}", result.get()),
    }
}

fn delivered(result: &RawValue) -> bool {
    result.get().contains("Oslo, ")
}

#[tokio::test]
async fn a_free_tool_answers_and_a_paid_one_asks_for_its_price_in_both_bindings() {
    let scene = scene().await;
    assert!(scene.call("ping", &json!({})).await.get().contains("pong"));
    for client in [&scene.client, &scene.modern] {
        let answer = client.call_tool("get_weather", &json!({"city": "Oslo"}), &json!({}), &[]).await.unwrap();
        let Answer::Challenge(challenge) = classify(&answer) else { panic!("{}", answer.get()) };
        assert_eq!(challenge.resource_url, "http://seller.example/mcp");
        assert_eq!(challenge.offers[0].amount.to_string(), "10000");
        assert!(challenge.takes_payment_identifier());
        assert!(!delivered(&answer));
    }
    let listed = RawValue::from_string(scene.seller.catalog_item("get_weather", "2026-08-07T19:00:00Z").unwrap());
    let listed = listed.unwrap();
    let answer = scene.call("get_weather", &json!({"city": "Oslo"})).await;
    let Answer::Challenge(challenge) = classify(&answer) else { panic!("{}", answer.get()) };
    assert!(strict::equal(member(&listed, "accepts").unwrap(), member(&challenge.raw, "accepts").unwrap()));
    let bazaar = |raw: &RawValue| member(member(raw, "extensions").unwrap(), "bazaar").unwrap().to_owned();
    assert!(strict::equal(&bazaar(&listed), &bazaar(&challenge.raw)));
    assert!(
        scene
            .modern
            .call_tool("get_weather", &json!({"city": "Oslo"}), &json!({}), &[])
            .await
            .unwrap()
            .get()
            .contains(r#""resultType":"payment_required""#)
    );
    assert_eq!(scene.asked(), [] as [&str; 0]);
    assert_eq!(scene.seller.calls(), Calls { unpaid: 5, paid: 0 });
}

#[tokio::test]
async fn nobody_is_asked_to_pay_for_arguments_that_cannot_work() {
    let scene = scene().await;
    for arguments in [json!({}), json!({"city": 5}), json!({"city": ""}), json!({"city": "a", "more": 1})] {
        let answer = scene.call("get_weather", &arguments).await;
        assert!(matches!(classify(&answer), Answer::Other), "{}", answer.get());
        assert!(answer.get().contains(r#""isError":true"#));
    }
    let unknown = scene.client.call_tool("no_such_tool", &json!({}), &json!({}), &[]).await;
    assert!(matches!(unknown, Err(McpClientError::Rpc { code, .. }) if code == "-32602"));
}

#[tokio::test]
async fn a_paid_call_is_verified_run_and_settled_and_carries_the_facilitators_receipt() {
    let scene = scene().await;
    let answer = scene.weather(&scene.payment("get_weather", Some(ID))).await;
    assert!(delivered(&answer), "{}", answer.get());
    assert_eq!(receipt(&answer).unwrap().transaction, "ab".repeat(32));
    assert_eq!(scene.asked(), ["verify", "settle"]);
    assert_eq!(scene.seller.calls(), Calls { unpaid: 0, paid: 1 });
}

#[tokio::test]
async fn an_identical_paid_call_gets_the_stored_answer_and_settles_nothing() {
    let scene = scene().await;
    for id in [Some(ID), None] {
        let payment = scene.payment("get_weather", id);
        let first = scene.weather(&payment).await;
        scene.asked();
        // The offers may have moved on: a known payment is not judged by them.
        scene.seller.set_price("get_weather", 999_999);
        assert_eq!(scene.weather(&payment).await.get(), first.get());
        assert_eq!(scene.asked(), [] as [&str; 0]);
        scene.seller.set_price("get_weather", 10_000);
    }
}

#[tokio::test]
async fn twins_at_the_same_time_settle_once_and_get_the_same_answer() {
    let scene = scene().await;
    let payment = scene.payment("get_weather", Some(ID));
    let twins = futures_util::future::join_all((0..8).map(|_| scene.weather(&payment))).await;
    assert!(twins.iter().all(|answer| answer.get() == twins[0].get() && delivered(answer)));
    assert_eq!(scene.asked(), ["verify", "settle"]);
}

#[tokio::test]
async fn a_known_payment_serves_no_other_call_and_its_identifier_no_other_payment() {
    let scene = scene().await;
    let payment = scene.payment("get_weather", Some(ID));
    scene.weather(&payment).await;
    scene.asked();
    let other = scene.pay("get_weather", &json!({"city": "Rome"}), &payment).await.unwrap();
    assert_eq!(challenged(&other), "payment_already_used");
    let mut changed = payment.clone();
    changed["payload"] = json!({"transaction": "BBBB"});
    assert_eq!(challenged(&scene.weather(&changed).await), "payment_identifier_conflict");
    assert_eq!(scene.asked(), [] as [&str; 0]);
}

#[tokio::test]
async fn a_payment_that_is_not_in_order_is_challenged_before_the_facilitator_is_asked() {
    let scene = scene().await;
    let good = scene.payment("get_weather", Some(ID));
    let with = |name: &str, value: serde_json::Value| {
        let mut payment = good.clone();
        payment[name] = value;
        payment
    };
    let mut cheaper = good.clone();
    cheaper["accepted"]["amount"] = json!("1");
    let mut more = good.clone();
    more["accepted"]["more"] = json!(1);
    let bad_id = |id: serde_json::Value| with("extensions", json!({PAYMENT_IDENTIFIER: {"info": {"id": id}}}));
    for (what, payment, error) in [
        ("version", with("x402Version", json!(1)), "invalid_x402_version"),
        ("no payload", json!({"x402Version": 2, "accepted": good["accepted"]}), "invalid_payload"),
        ("cheaper", cheaper, "No matching payment requirements found"),
        ("a member more", more, "No matching payment requirements found"),
        ("short identifier", bad_id(json!("short")), "invalid_payload"),
        ("identifier of another type", bad_id(json!(5)), "invalid_payload"),
        ("identifier with a space", bad_id(json!("sixteen characters ")), "invalid_payload"),
    ] {
        assert_eq!(challenged(&scene.weather(&payment).await), error, "{what}");
    }
    assert_eq!(scene.asked(), [] as [&str; 0]);
}

#[tokio::test]
async fn output_is_withheld_unless_the_settlement_succeeded() {
    let scene = scene().await;
    let payment = scene.payment("get_weather", Some(ID));
    *scene.script.verify.lock().unwrap() = json!({"isValid": false, "invalidReason": "some_reason"});
    assert_eq!(challenged(&scene.weather(&payment).await), "some_reason");
    assert_eq!(scene.asked(), ["verify"]);

    *scene.script.verify.lock().unwrap() = json!({"isValid": true});
    let good = scene.script.settle.lock().unwrap().clone();
    *scene.script.settle.lock().unwrap() =
        json!({"success": false, "errorReason": "no_luck", "transaction": "cd", "network": "stellar:testnet"});
    let answer = scene.weather(&payment).await;
    assert_eq!(challenged(&answer), "Payment settlement failed: no_luck");
    assert!(!delivered(&answer));
    assert_eq!(receipt(&answer).unwrap().transaction, "cd");

    *scene.script.settle.lock().unwrap() = json!({"success": true, "transaction": "cd", "network": "stellar:pubnet"});
    assert!(!delivered(&scene.weather(&payment).await), "settled on another network");

    *scene.script.settle.lock().unwrap() = json!({"success": "yes"});
    assert!(matches!(
        scene.pay("get_weather", &json!({"city": "Oslo"}), &payment).await,
        Err(McpClientError::Rpc { .. })
    ));
    scene.asked();

    *scene.script.settle.lock().unwrap() = good;
    assert!(delivered(&scene.weather(&payment).await));
    assert_eq!(scene.asked(), ["settle"], "the tool does not run again, and verify said yes before");
}

#[tokio::test]
async fn a_tool_that_asks_for_input_asks_before_it_charges() {
    let scene = scene().await;
    let arguments = json!({"restaurant": "Maaemo"});
    let mute = scene.modern.call_tool(ASKS, &arguments, &json!({}), &[]).await;
    assert!(matches!(mute, Err(McpClientError::Rpc { code, .. }) if code == "-32021"), "a client that cannot ask");
    let asked = scene.call(ASKS, &arguments).await;
    let Answer::InputRequired { input_requests, request_state } = classify(&asked) else { panic!("{}", asked.get()) };
    assert!(input_requests.unwrap().get().contains("elicitation/create"));
    let answered = |action: &str, size: u64, state: &RawValue| {
        json!({
            "inputResponses": {QUESTION: {"action": action, "content": {"size": size}}},
            "requestState": serde_json::from_str::<serde_json::Value>(state.get()).unwrap(),
        })
    };
    let state = request_state.unwrap();
    let extra = answered("accept", 4, &state);
    let unpaid = scene.client.call_tool(ASKS, &arguments, &extra, &[]).await.unwrap();
    challenged(&unpaid);
    assert_eq!(scene.asked(), [] as [&str; 0]);
    let payment = strict::raw(&scene.payment(ASKS, Some(ID)));
    let paid = scene.client.call_tool(ASKS, &arguments, &extra, &[(META_PAYMENT, &payment)]).await.unwrap();
    assert!(paid.get().contains("A table for 4 at Maaemo"), "{}", paid.get());
    assert!(receipt(&paid).unwrap().success);

    let declined = scene.client.call_tool(ASKS, &arguments, &answered("decline", 4, &state), &[]).await.unwrap();
    assert!(matches!(classify(&declined), Answer::Other));
    let other = scene.client.call_tool(ASKS, &json!({"restaurant": "Noma"}), &extra, &[]).await;
    assert!(matches!(other, Err(McpClientError::Rpc { code, .. }) if code == "-32602"), "the state is of another call");
    let crowd = scene.client.call_tool(ASKS, &arguments, &answered("accept", 99, &state), &[]).await;
    assert!(matches!(crowd, Err(McpClientError::Rpc { code, .. }) if code == "-32602"));
}
