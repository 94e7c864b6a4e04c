//! One gate: a process with the real desk, seller, sweep and clients on the ports of its host, and handlers that fail,
//! take their time, or never end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tollway::facilitator::Facilitator;
use tollway::gate::Kind;
use tollway::gate::claims::{Claims, Store, Terms as ClaimTerms};
use tollway::gate::desk::{Answer, Described, Gate, Parts, Request};
use tollway::gate::prices::{About, Item, Prices, Terms, Unlisted};
use tollway::gate::sell::{Ran, Settings};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::mcp::{Revision, RpcError};
use tollway::money::Amount;
use tollway::seal::KeyRing;
use tollway::x402::{self, Flow};

use super::book::{Asked, Book, End};
use super::{PRICE, TOOLS};
use crate::chain::{ASSET, NETWORK, PAY_TO};
use crate::node;
use crate::world::{Ctx, lock};

/// What no frame may have before it is paid.
pub const SECRET: &str = "secret";
/// A larger answer is not kept, bytes.
const MAX_ANSWER: usize = 2_000;

/// What differs between seeds.
#[derive(Clone, Copy)]
pub struct Shape {
    pub nodes: usize,
    /// Of an offer, seconds.
    pub life: u64,
    pub sweep_every_s: u64,
}

pub type Open = Arc<Mutex<BTreeMap<String, Shop>>>;

#[derive(Clone)]
pub struct Shop {
    ctx: Ctx,
    gate: Gate,
    book: Arc<Book>,
}

/// What a caller was told.
#[derive(Debug, Clone)]
pub enum Told {
    Output {
        text: String,
        receipt: Option<Value>,
    },
    Challenge {
        reason: String,
        accepts: Vec<Box<RawValue>>,
    },
    Withheld {
        reason: String,
        receipt: Option<Value>,
    },
    /// The handler's own failure, with a receipt where it is paid.
    Failed {
        receipt: Option<Value>,
    },
    Error(String),
    /// Nobody is there, or the answer did not come.
    Nothing,
}

impl Told {
    pub fn reason(&self) -> &str {
        match self {
            Told::Challenge { reason, .. } | Told::Withheld { reason, .. } => reason,
            _ => "",
        }
    }

    pub fn is_output(&self) -> bool {
        matches!(self, Told::Output { .. })
    }

    pub fn brief(&self) -> String {
        match self {
            Told::Output { text, .. } => format!("output {}", &text[..text.len().min(60)]),
            Told::Challenge { reason, .. } => format!("challenge {reason}"),
            Told::Withheld { reason, .. } => format!("withheld {reason}"),
            Told::Failed { receipt } => format!("failed, paid {}", receipt.is_some()),
            Told::Error(error) => format!("error {error}"),
            Told::Nothing => "nothing".into(),
        }
    }
}

pub fn prices(life: u64) -> Prices {
    let items = TOOLS.into_iter().map(|(tool, flow)| {
        let amount = Amount::from_u64(PRICE);
        let terms = Terms {
            scheme: "exact".into(),
            network: NETWORK.parse().expect("a network"),
            asset: ASSET.parse().expect("an asset"),
            amount,
            shown_amount: amount.to_decimal(7),
            shown_asset: "USDC".into(),
            pay_to: PAY_TO.into(),
            max_timeout_seconds: life,
            flow,
            extra: serde_json::Map::new(),
        };
        Item::new(Kind::Tool, tool, vec![terms], About::default(), false).expect("an item")
    });
    Prices::new(items.collect(), BTreeSet::new(), Unlisted::Deny, BTreeSet::new()).expect("prices")
}

pub async fn run(ctx: Ctx, store: Arc<dyn Store>, shape: Shape, book: Arc<Book>, open: Open) {
    let world = ctx.ports();
    let limits = Limits { timeout: Duration::from_secs(15), ..Limits::default() };
    let client = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
    let (network, chain) = node::stellar(shape.nodes, client.clone(), world.clone());
    let ring = KeyRing::new(vec![vec![3; 32]]).expect("a ring");
    let facilitator = Facilitator::new(client, &"https://facilitator.test".parse().expect("a URL"));
    let settings = Settings {
        facilitator: Duration::from_secs(15),
        handler: Duration::from_secs(50),
        max_answer: MAX_ANSWER,
        sweep: Duration::from_secs(shape.sweep_every_s),
        ..Settings::default()
    };
    let gate = Gate::new(Parts {
        claims: Claims::on(store, world.clone(), ring, ClaimTerms::default()),
        facilitators: BTreeMap::from([(network.clone(), facilitator)]),
        chains: BTreeMap::from([(network, Arc::new(chain))]),
        resolved_by_operator: std::collections::BTreeSet::new(),
        prices: prices(shape.life),
        settings,
        world,
    });
    let gate = gate.expect("a gate");
    gate.start(CancellationToken::new()).await;
    ctx.trace("open");
    lock(&open).insert(ctx.name().to_owned(), Shop { ctx, gate, book });
    std::future::pending::<()>().await;
}

impl Shop {
    /// One request as a front hands it to the gate. A caller that leaves drops it, where the front notices.
    pub async fn ask(&self, asked: Asked, session: Option<String>, patience: Duration, drops: bool) -> Told {
        if !self.ctx.alive() {
            return Told::Nothing;
        }
        let (send, mut answer) = oneshot::channel();
        let left = CancellationToken::new();
        let (gone, shop) = (left.clone(), self.clone());
        self.ctx.spawn(async move {
            let world = &shop.ctx.world;
            world.pause().await;
            let asking = shop.answer(&asked, session.as_deref());
            let told =
                match futures_util::future::select(std::pin::pin!(gone.cancelled()), std::pin::pin!(asking)).await {
                    futures_util::future::Either::Left((_, asking)) if !drops => asking.await,
                    futures_util::future::Either::Left(_) => return,
                    futures_util::future::Either::Right((told, _)) => told,
                };
            world.pause().await;
            let _ = send.send(told);
        });
        match tokio::time::timeout(patience, &mut answer).await {
            Ok(told) => told.unwrap_or(Told::Nothing),
            Err(_) => {
                left.cancel();
                Told::Nothing
            }
        }
    }

    async fn answer(&self, asked: &Asked, session: Option<&str>) -> Told {
        let mut params = json!({"name": asked.call.tool, "arguments": {"n": asked.call.n}}).to_string();
        if let Some(paid) = &asked.paid {
            let payment = paid.raw.get();
            params.insert_str(params.len() - 1, &format!(r#","_meta":{{"x402/payment":{payment}}}"#));
        }
        let params = RawValue::from_string(params).expect("JSON of ours");
        let request = Request {
            kind: Kind::Tool,
            params: &params,
            revision: Revision::V2025_11_25,
            client_capabilities: None,
            session,
            source: if asked.thief { "thief" } else { "payers" },
            payment_header: false,
        };
        let described = async { Described::Fits { tool: None } };
        let handler = work(self.ctx.clone(), self.book.clone(), asked.clone());
        let answer = self.gate.answer(request, described, handler).await;
        let (told, whole) = told(&answer);
        self.book.told(asked, &told, &whole);
        told
    }
}

async fn work(ctx: Ctx, book: Arc<Book>, asked: Asked) -> Ran {
    let running = book.begins(&ctx, &asked);
    let world = &ctx.world;
    ctx.trace(&format!("run {} for request {}", running.number(), asked.id));
    world.pause().await;
    if world.chance(|f| f.gate.handler_slow) {
        sleep(Duration::from_millis(world.range(0, 45_000))).await;
    }
    if world.chance(|f| f.gate.handler_hangs) {
        std::future::pending::<()>().await;
    }
    if world.chance(|f| f.gate.handler_fails) {
        running.end(End::Failed);
        ctx.trace(&format!("run {} failed", running.number()));
        return match world.range(0, 3) {
            0 => Ran::Error(RpcError::internal("it broke")),
            1 if asked.call.flow() == Flow::Authorization => {
                Ran::Asks(tollway::json::raw(&json!({"resultType": "input_required", "requestState": "x"})))
            }
            _ => Ran::Failed(tollway::json::raw(
                &json!({"isError": true, "content": [{"type": "text", "text": "it broke"}]}),
            )),
        };
    }
    let mut text = format!("{SECRET} {} of {} ", running.number(), asked.call.n);
    if world.chance(|f| f.gate.handler_large) {
        text.push_str(&"x".repeat(MAX_ANSWER));
    }
    running.end(End::Output);
    ctx.trace(&format!("run {} gave its output", running.number()));
    Ran::Output(tollway::json::raw(&json!({"content": [{"type": "text", "text": text}]})))
}

/// And all of it as text.
fn told(answer: &Answer) -> (Told, String) {
    let result = match answer {
        Answer::Free => return (Told::Error("free".into()), String::new()),
        Answer::Error(error) => {
            let data = error.data.as_ref().map_or("null", |data| data.get());
            let parsed: Value = serde_json::from_str(data).unwrap_or_default();
            let receipt = parsed.get("x402/payment-response").cloned();
            let whole = format!("{} {} {data}", error.code, error.message);
            let told = match &*error.message == "it broke" || receipt.is_some() {
                true => Told::Failed { receipt },
                false => Told::Error(whole.clone()),
            };
            return (told, whole);
        }
        Answer::Result(result) => result,
    };
    let whole = result.get().to_owned();
    if let x402::Answer::Challenge(challenge) = x402::classify(result) {
        let parsed: Value = serde_json::from_str(challenge.raw.get()).unwrap_or_default();
        let error = parsed["error"].as_str().unwrap_or_default();
        let reason = error.split(':').next().unwrap_or_default().to_owned();
        let accepts = challenge.offers.iter().map(|offer| offer.raw.clone()).collect();
        return (Told::Challenge { reason, accepts }, whole);
    }
    let parsed: Value = serde_json::from_str(&whole).unwrap_or_default();
    let receipt = parsed["_meta"].get("x402/payment-response").cloned();
    let text = parsed["content"][0]["text"].as_str().unwrap_or_default();
    let told = match parsed["_meta"]["tollway/reason"].as_str() {
        Some(reason) => Told::Withheld { reason: reason.to_owned(), receipt },
        None if text.starts_with(SECRET) => Told::Output { text: text.to_owned(), receipt },
        None => Told::Failed { receipt },
    };
    (told, whole)
}
