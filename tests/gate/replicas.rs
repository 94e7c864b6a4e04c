//! Three gates on one PostgreSQL, as processes: one sale, whoever asks how often, and whichever of them dies or stands
//! still, at whatever moment of the sale.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ports::machine;
use tollway::sandbox::chain::{NETWORK, PASSPHRASE, USDC};
use tollway::sandbox::facilitator::{Facilitator, Options};

use super::{BOTH, GateProcess, JSON, PATIENCE, client, config, post, request, try_send};
use crate::official::{Scene, scene};
use crate::postgres::Schema;

/// Of `run` and `early`, atomic units of [`USDC`].
const PRICE: i64 = 100_000;
const LEASE_MS: u64 = 2_000;
const VERSION: (&str, &str) = ("mcp-protocol-version", "2025-11-25");

/// Where a request with a given text is kept until it is let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Verify,
    /// The facilitator has not begun.
    Settle,
    /// It is on the chain, and nobody heard of it.
    Settled,
    Run,
}

#[derive(Default)]
struct Stop {
    there: Notify,
    go: Notify,
}

type Stopping = (Place, String, Arc<Stop>);

#[derive(Clone, Default)]
struct World {
    stops: Arc<Mutex<Vec<Stopping>>>,
    /// By topic.
    runs: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl World {
    /// The first request that comes there with this text stops.
    fn stop(&self, place: Place, text: &str) -> Arc<Stop> {
        let stop = Arc::<Stop>::default();
        self.stops.lock().unwrap().push((place, text.to_owned(), stop.clone()));
        stop
    }

    async fn pass(&self, place: Place, body: &str) {
        let stop = {
            let mut stops = self.stops.lock().unwrap();
            let found = stops.iter().position(|(at, text, _)| *at == place && body.contains(text));
            found.map(|at| stops.remove(at).2)
        };
        if let Some(stop) = stop {
            stop.there.notify_one();
            stop.go.notified().await;
        }
    }

    fn runs(&self, topic: &str) -> usize {
        self.runs.lock().unwrap().get(topic).copied().unwrap_or(0)
    }
}

/// What stands behind the gates: it counts, and says which run this is.
async fn upstream(State(world): State<World>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let result = match message["method"].as_str() {
        Some("tools/call") => {
            let topic = message["params"]["arguments"]["topic"].as_str().unwrap_or_default().to_owned();
            let run = {
                let mut runs = world.runs.lock().unwrap();
                let run = runs.entry(topic.clone()).or_default();
                *run += 1;
                *run
            };
            world.pass(Place::Run, &topic).await;
            json!({"content": [{"type": "text", "text": format!("secret of {topic}, run {run}")}]})
        }
        Some("tools/list") => {
            let tools = ["run", "early"].map(|name| json!({"name": name, "inputSchema": {"type": "object"}}));
            json!({"tools": tools})
        }
        _ => return http::StatusCode::ACCEPTED.into_response(),
    };
    axum::Json(json!({"jsonrpc": "2.0", "id": message["id"], "result": result})).into_response()
}

async fn at_the_facilitator(State(world): State<World>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    let place = match head.uri.path() {
        "/verify" => Some(Place::Verify),
        "/settle" => Some(Place::Settle),
        _ => None,
    };
    if let Some(place) = place {
        world.pass(place, &text).await;
    }
    let answer = next.run(Request::from_parts(head, Body::from(body))).await;
    if place == Some(Place::Settle) {
        world.pass(Place::Settled, &text).await;
    }
    answer
}

async fn serve(router: axum::Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

struct Fleet {
    scene: Scene,
    world: World,
    schema: Schema,
    config: Value,
    gates: Vec<GateProcess>,
    client: Client,
}

impl Fleet {
    async fn new(gates: usize) -> Fleet {
        let scene = scene().await;
        let world = World::default();
        let accounts: Vec<_> = (0..8).map(|n| scene.network.account(&format!("fees {n}"))).collect();
        accounts.iter().for_each(|account| scene.network.fund(&account.id(), 1_000_000_000));
        let mut options = Options::new(NETWORK, PASSPHRASE, accounts.into_iter().map(|account| account.key).collect());
        options.poll = Duration::from_millis(100);
        let machine = machine::world().0;
        let http = Client::new(machine.clone(), Tls::Plain, Destination::Operator, Limits::default());
        let facilitator = Facilitator::new(machine, http, &scene.rpc, options).router();
        let held = axum::middleware::from_fn_with_state(world.clone(), at_the_facilitator);
        let settles = serve(facilitator.layer(held)).await;
        let behind = serve(axum::Router::new().fallback(upstream).with_state(world.clone())).await;

        let mut config = config(&json!({"url": format!("{behind}/mcp")}));
        config["networks"] = json!({"stellar:testnet": {"rpc_urls": [scene.rpc], "min_ledger_seconds": 0.1}});
        config["gate"]["unknown"] = json!({});
        config["gate"]["facilitator"] = json!({"base_url": settles});
        config["gate"]["lease_ms"] = json!(LEASE_MS);
        config["gate"]["defaults"] = json!({
            "network": NETWORK, "asset": USDC, "pay_to": scene.shop.address(), "max_timeout_seconds": 3600,
        });
        config["gate"]["tools"] = json!({"run": {"price": "0.01"}, "early": {"price": "0.01", "flow": "upfront"}});
        let schema = Schema::migrated().await;
        let gates = join_all((0..gates).map(|_| GateProcess::replica(&config, &schema.url))).await;
        Fleet { scene, world, schema, config, gates, client: client() }
    }

    async fn ask(&self, gate: &GateProcess, tool: &str, topic: &str, payment: Option<&Value>) -> Value {
        post(&self.client, &gate.url, &[VERSION], call(tool, topic, payment)).await.json()
    }

    /// With an identifier of its topic's, and its nonce.
    async fn payment(&self, tool: &str, topic: &str) -> (Value, i64) {
        let challenge = self.ask(&self.gates[0], tool, topic, None).await;
        let offer = &challenge["result"]["structuredContent"]["accepts"][0];
        let (transaction, nonce) = self.scene.signed(offer).await;
        let mut payment = bare(offer, &transaction);
        payment["extensions"] =
            json!({"payment-identifier": {"info": {"required": false, "id": format!("pay_{topic:_<20}")}}});
        (payment, nonce)
    }

    /// Of a payer that asks again as long as it is told that the end is not known.
    async fn bought(&self, gate: &GateProcess, tool: &str, topic: &str, payment: &Value) -> String {
        let ask = async {
            loop {
                let answer = self.ask(gate, tool, topic, Some(payment)).await;
                match withheld(&answer) {
                    Some("settlement_unknown" | "in_progress") => tokio::time::sleep(Duration::from_millis(300)).await,
                    _ => return output(&answer).unwrap_or_else(|| panic!("{topic}: {answer}")),
                }
            }
        };
        tokio::time::timeout(PATIENCE * 2, ask).await.unwrap_or_else(|_| panic!("{topic}: nothing came"))
    }

    fn settlements(&self, nonce: i64) -> usize {
        self.scene.network.transfers().iter().filter(|transfer| transfer.nonce == Some(nonce)).count()
    }
}

fn call(tool: &str, topic: &str, payment: Option<&Value>) -> String {
    let mut params = json!({"name": tool, "arguments": {"topic": topic}});
    if let Some(payment) = payment {
        params["_meta"] = json!({"x402/payment": payment});
    }
    request(1, "tools/call", &params)
}

/// A payment that names nobody but its payer.
fn bare(offer: &Value, transaction: &str) -> Value {
    json!({"x402Version": 2, "accepted": offer, "payload": {"transaction": transaction}})
}

/// What was sold, with its receipt.
fn output(answer: &Value) -> Option<String> {
    let text = answer["result"]["content"][0]["text"].as_str().filter(|text| text.starts_with("secret"))?;
    let receipt = &answer["result"]["_meta"]["x402/payment-response"];
    assert!(receipt["success"] == true && receipt["transaction"].is_string(), "an output without a receipt: {answer}");
    Some(format!("{text}, {}", receipt["transaction"]))
}

fn withheld(answer: &Value) -> Option<&str> {
    answer["result"]["_meta"]["tollway/reason"].as_str()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_identical_calls_over_three_gates_are_one_sale() {
    let fleet = Fleet::new(3).await;
    for tool in ["run", "early"] {
        let (payment, nonce) = fleet.payment(tool, tool).await;
        let calls = (0..200).map(|n| fleet.bought(&fleet.gates[n % 3], tool, tool, &payment));
        let outputs = join_all(calls).await;
        assert!(outputs.iter().all(|output| *output == outputs[0]), "{tool}: one result for everybody");
        assert_eq!((fleet.world.runs(tool), fleet.settlements(nonce)), (1, 1), "{tool}");
    }
    assert_eq!(fleet.scene.balances().1, 2 * PRICE);
}

/// The moments of a sale at which its gate is struck, and how often the tool starts then.
const MOMENTS: [(&str, &str, Option<Place>, usize); 9] = [
    ("verified", "run", Some(Place::Verify), 1),
    ("running", "run", Some(Place::Run), 2),
    ("settling", "run", Some(Place::Settle), 1),
    ("settled-unheard", "run", Some(Place::Settled), 1),
    ("delivered", "run", None, 1),
    ("early-settling", "early", Some(Place::Settle), 1),
    ("early-settled-unheard", "early", Some(Place::Settled), 1),
    ("early-running", "early", Some(Place::Run), 2),
    ("early-delivered", "early", None, 1),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strikes {
    Kill,
    /// It stands still for longer than its lease, and goes on when others have its work.
    Freeze,
}

async fn struck(fleet: &Fleet, strikes: Strikes, moment: (&str, &str, Option<Place>, usize)) {
    let (name, tool, place, starts) = moment;
    // No topic is a part of another one.
    let topic = format!("{}-{name}", if strikes == Strikes::Kill { "kill" } else { "freeze" });
    let first = GateProcess::replica(&fleet.config, &fleet.schema.url).await;
    let (payment, nonce) = fleet.payment(tool, &topic).await;
    let transaction = payment["payload"]["transaction"].as_str().unwrap();
    let stop = place.map(|place| fleet.world.stop(place, if place == Place::Run { &topic } else { transaction }));
    let asked = async {
        let headers = [BOTH, JSON, VERSION];
        let body = call(tool, &topic, Some(&payment));
        try_send(&fleet.client, http::Method::POST, &first.url, &headers, body).await.map(|got| got.json())
    };
    let others = async {
        if let Some(stop) = &stop {
            tokio::time::timeout(PATIENCE, stop.there.notified())
                .await
                .unwrap_or_else(|_| panic!("{topic}: not there"));
        } else {
            while fleet.settlements(nonce) == 0 || fleet.world.runs(&topic) == 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            // It is stored and told at about this moment.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        first.signal(if strikes == Strikes::Kill { "-KILL" } else { "-STOP" });
        if strikes == Strikes::Freeze {
            tokio::time::sleep(Duration::from_millis(LEASE_MS + 200)).await;
        }
        let calls = (0..10).map(|n| fleet.bought(&fleet.gates[n % 2], tool, &topic, &payment));
        let outputs = join_all(calls).await;
        assert!(outputs.iter().all(|output| *output == outputs[0]), "{topic}: {outputs:?}");
        if strikes == Strikes::Freeze {
            first.signal("-CONT");
        }
        if let Some(stop) = &stop {
            stop.go.notify_one();
        }
        outputs[0].clone()
    };
    let (answer, sold) = futures_util::future::join(asked, others).await;
    match answer.as_ref().map(|answer| (output(answer), answer)) {
        Some((Some(output), _)) => assert_eq!(output, sold, "{topic}: the one that was struck had another result"),
        Some((None, answer)) => {
            assert!(!answer.to_string().contains("secret"), "{topic}: {answer}");
            assert!(withheld(answer).is_some(), "{topic}: the payer was not told to come back: {answer}");
        }
        None => assert_eq!(strikes, Strikes::Kill, "{topic}: no answer"),
    }
    assert_eq!(fleet.world.runs(&topic), starts, "{topic}: starts");
    assert_eq!(fleet.settlements(nonce), 1, "{topic}: settlements");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gate_that_is_killed_or_stands_still_at_any_moment_leaves_one_sale() {
    let fleet = Fleet::new(2).await;
    let all = [Strikes::Kill, Strikes::Freeze].into_iter().flat_map(|strikes| MOMENTS.map(|moment| (strikes, moment)));
    let struck: Vec<_> = all.map(|(strikes, moment)| struck(&fleet, strikes, moment)).collect();
    let sales = i64::try_from(struck.len()).unwrap();
    join_all(struck).await;
    // What stood still may have gone on with a settle of its own.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fleet.scene.balances().1, sales * PRICE);
}

/// Everything that the chain shows of a payment: its transaction as it was submitted, signature included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_only_what_the_chain_shows_gets_receipts_and_never_the_output() {
    let fleet = Fleet::new(3).await;
    for tool in ["run", "early"] {
        let (payment, nonce) = fleet.payment(tool, tool).await;
        let sold = fleet.bought(&fleet.gates[0], tool, tool, &payment).await;
        let transfers = fleet.scene.network.transfers();
        let hash = &transfers.iter().find(|transfer| transfer.nonce == Some(nonce)).unwrap().transaction;
        let ask = json!({"jsonrpc": "2.0", "id": 1, "method": "getTransaction", "params": {"hash": hash}});
        let on_chain = post(&fleet.client, &fleet.scene.rpc, &[], ask.to_string()).await.json();
        let envelope = on_chain["result"]["envelopeXdr"].as_str().unwrap_or_else(|| panic!("{on_chain}"));
        let offer = &payment["accepted"];
        let mut guesses = vec![bare(offer, envelope), bare(offer, payment["payload"]["transaction"].as_str().unwrap())];
        for id in [hash[..32].to_owned(), "pay_0123456789abcdef".to_owned()] {
            let mut guess = bare(offer, envelope);
            guess["extensions"] = json!({"payment-identifier": {"info": {"required": false, "id": id}}});
            guesses.push(guess);
        }
        for (n, guess) in guesses.iter().enumerate() {
            for gate in &fleet.gates {
                let answer = fleet.ask(gate, tool, tool, Some(guess)).await;
                assert!(!answer.to_string().contains("secret"), "{tool}, guess {n}: {answer}");
                let challenge = &answer["result"]["structuredContent"];
                let error = challenge["error"].as_str().unwrap_or_default();
                assert!(error.starts_with("already_settled"), "{tool}, guess {n}: {answer}");
                let receipt = &answer["result"]["_meta"]["x402/payment-response"];
                assert_eq!(&receipt["transaction"], hash, "{tool}, guess {n}: {answer}");
            }
        }
        assert_eq!((fleet.world.runs(tool), fleet.settlements(nonce)), (1, 1));
        assert_eq!(fleet.bought(&fleet.gates[2], tool, tool, &payment).await, sold, "the payer still has it");
    }
}
