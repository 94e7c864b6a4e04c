//! The seller of the world, its facilitator folded in: it challenges, settles on the chain, answers with the output and
//! a receipt, and replays an identical paid call. When it lies, it notes of which payment it did.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::time::sleep;

use super::chain::{self, ASSET, Chain, NETWORK, PAY_TO, Transfer};
use super::http::{Reply, Request};
use super::world::{Ctx, lock};

pub const URL: &str = "https://seller.test/mcp";
pub const TOOL: &str = "weather";

/// What differs between seeds.
#[derive(Clone, Copy)]
pub struct Terms {
    pub price: u64,
    pub life_seconds: u64,
    /// Speaks 2026-07-28; else an older revision with sessions.
    pub stateless: bool,
}

/// What a seller keeps over its lives.
#[derive(Default)]
pub struct Disk {
    /// By payment identifier: the first payload that came under it.
    payloads: BTreeMap<String, String>,
    answered: BTreeMap<String, Transfer>,
    /// Payments of which it said something untrue.
    pub lied: BTreeSet<String>,
    /// Another payload came under the same identifier.
    pub other_bytes: Vec<String>,
    pub replays: u64,
}

/// One life.
pub struct Seller {
    ctx: Ctx,
    chain: Arc<Chain>,
    disk: Arc<Mutex<Disk>>,
    terms: Terms,
    sessions: Mutex<BTreeSet<String>>,
    working: Mutex<BTreeSet<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    SaysFailed,
    Pending,
    Forged,
    OtherTransaction,
    ChallengesAgain,
    NoReceipt,
    Silence,
    Broken,
}

const LIES: [Lie; 8] = [
    Lie::SaysFailed,
    Lie::Pending,
    Lie::Forged,
    Lie::OtherTransaction,
    Lie::ChallengesAgain,
    Lie::NoReceipt,
    Lie::Silence,
    Lie::Broken,
];

pub fn offer(terms: Terms) -> Value {
    json!({"scheme": "exact", "network": NETWORK, "amount": terms.price.to_string(), "asset": ASSET, "payTo": PAY_TO,
        "maxTimeoutSeconds": terms.life_seconds, "extra": {"areFeesSponsored": true}})
}

fn bazaar() -> Value {
    json!({"info": {"input": {"type": "mcp", "toolName": TOOL, "inputSchema": {"type": "object"}}}, "schema": {}})
}

/// The catalog's entry.
pub fn item(terms: Terms) -> Value {
    json!({"resource": URL, "type": "mcp", "x402Version": 2, "accepts": [offer(terms)],
        "extensions": {"bazaar": bazaar()}})
}

/// The text of the output that was paid for.
pub fn output(arguments: &Value, payment: &str) -> String {
    format!("{} for {payment}", arguments["n"])
}

impl Seller {
    pub fn new(ctx: Ctx, chain: Arc<Chain>, disk: Arc<Mutex<Disk>>, terms: Terms) -> Seller {
        Seller { ctx, chain, disk, terms, sessions: Mutex::default(), working: Mutex::default() }
    }

    pub async fn answer(self: Arc<Self>, request: Request) -> Reply {
        let Ok(body) = serde_json::from_slice::<Value>(&request.body) else { return Reply::Status(400, String::new()) };
        let id = &body["id"];
        let result = |result: Value| Reply::Json(json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string());
        let method = body["method"].as_str().unwrap_or_default();
        let is_set_up = matches!(method, "server/discover" | "initialize");
        let known = request.session.as_ref().is_some_and(|session| lock(&self.sessions).contains(session));
        if !self.terms.stateless && !is_set_up && !known {
            return Reply::Status(404, String::new());
        }
        match method {
            "server/discover" if self.terms.stateless => result(json!({"resultType": "complete",
                "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "simulated", "version": "1"}})),
            "initialize" => {
                let session = hex::encode(self.ctx.world.range(0, u64::MAX).to_be_bytes());
                lock(&self.sessions).insert(session.clone());
                let answer = json!({"jsonrpc": "2.0", "id": id, "result": {"protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}}, "serverInfo": {"name": "simulated", "version": "1"}}});
                Reply::Session(session, answer.to_string())
            }
            "tools/list" => result(json!({"resultType": "complete", "ttlMs": 0, "cacheScope": "private",
                "tools": [{"name": TOOL, "inputSchema": {"type": "object"}}]})),
            "tools/call" => {
                let payment = &body["params"]["_meta"]["x402/payment"];
                if payment.is_null() {
                    self.ctx.world.pause().await;
                    return result(self.challenge("Payment required"));
                }
                match self.paid(&body["params"]["arguments"], payment).await {
                    Ok(answer) => result(answer),
                    Err(other) => other,
                }
            }
            method if method.starts_with("notifications/") => Reply::Status(202, String::new()),
            _ => {
                let error = json!({"code": -32601, "message": "Method not found"});
                Reply::Json(json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string())
            }
        }
    }

    /// In both copies.
    fn challenge(&self, error: &str) -> Value {
        let required = json!({"x402Version": 2, "error": error, "resource": {"url": URL},
            "accepts": [offer(self.terms)],
            "extensions": {"bazaar": bazaar(), "payment-identifier": {"info": {"required": false}, "schema": {}}}});
        json!({"resultType": "complete", "isError": true, "structuredContent": required,
            "content": [{"type": "text", "text": required.to_string()}]})
    }

    async fn paid(self: &Arc<Self>, arguments: &Value, payment: &Value) -> Result<Value, Reply> {
        let world = &self.ctx.world;
        let id = payment["extensions"]["payment-identifier"]["info"]["id"].as_str().unwrap_or_default().to_owned();
        let transaction = payment["payload"]["transaction"].as_str().unwrap_or_default().to_owned();
        let short = id.get(..8).unwrap_or_default().to_owned();
        self.ctx.trace(&format!("paid call {arguments} {short}"));
        if let Ok(signed) = chain::read(&transaction) {
            self.chain.show(world, signed.credentials.nonce);
        }
        {
            let mut disk = lock(&self.disk);
            let bytes = payment.to_string();
            let first = disk.payloads.entry(id.clone()).or_insert_with(|| bytes.clone());
            if *first != bytes {
                disk.other_bytes.push(id.clone());
            }
        }
        let answered = |disk: &Disk| disk.answered.get(&id).cloned();
        // The same payment twice at once: the second waits for the first.
        while !lock(&self.working).insert(id.clone()) {
            sleep(Duration::from_millis(200)).await;
        }
        let known = answered(&lock(&self.disk));
        let outcome = match known {
            Some(transfer) => {
                lock(&self.disk).replays += 1;
                world.count(|s| s.seller_replayed += 1);
                Ok(self.output(arguments, &id, &transfer.hash))
            }
            None => self.settle(arguments, &id, &transaction).await,
        };
        lock(&self.working).remove(&id);
        outcome
    }

    async fn settle(self: &Arc<Self>, arguments: &Value, id: &str, transaction: &str) -> Result<Value, Reply> {
        let world = &self.ctx.world;
        if world.permille(200) {
            sleep(Duration::from_millis(world.range(0, 20_000))).await;
        }
        let lie = world.chance(|f| f.seller_lies).then(|| LIES[world.range(0, LIES.len() as u64) as usize]);
        // What a liar does with the money: takes it before it speaks, later, or not at all.
        let takes = world.range(0, 3);
        if let Some(lie) = lie {
            self.ctx.trace(&format!("lies {lie:?}, takes {takes}, about {}", id.get(..8).unwrap_or_default()));
            world.count(|s| *s.lies.entry(format!("{lie:?}")).or_default() += 1);
            lock(&self.disk).lied.insert(id.to_owned());
            if takes == 1 {
                let (this, transaction, after) = (self.clone(), transaction.to_owned(), world.range(0, 90_000));
                self.ctx.spawn(async move {
                    sleep(Duration::from_millis(after)).await;
                    let _ = this.chain.submit(&this.ctx.world, &transaction);
                });
            }
        }
        let moved = match lie {
            Some(_) if takes != 0 => None,
            _ => match self.chain.submit(world, transaction) {
                Ok(transfer) => {
                    // The facilitator waits for the ledger.
                    while self.chain.newest(world) < transfer.ledger {
                        sleep(Duration::from_millis(500)).await;
                    }
                    Some(transfer)
                }
                Err(why) => {
                    self.ctx.trace(&format!("cannot settle: {why}"));
                    return Ok(self.challenge(why));
                }
            },
        };
        let made_up = || hex::encode(Sha256::digest(format!("forged {id}")));
        let hash = moved.as_ref().map_or_else(made_up, |transfer| transfer.hash.clone());
        let receipt = |success: bool, reason: Option<&str>, hash: &str| json!({"success": success, "transaction": hash, "network": NETWORK, "errorReason": reason});
        let text = output(arguments, id);
        let with = |receipt: Option<Value>| {
            let mut answer = json!({"resultType": "complete", "content": [{"type": "text", "text": text}]});
            if let Some(receipt) = receipt {
                answer["_meta"] = json!({"x402/payment-response": receipt});
            }
            answer
        };
        match lie {
            None => {
                let transfer = moved.ok_or(Reply::Close)?;
                let answer = self.output(arguments, id, &transfer.hash);
                lock(&self.disk).answered.insert(id.to_owned(), transfer);
                Ok(answer)
            }
            Some(Lie::SaysFailed) => Ok(with(Some(receipt(false, Some("insufficient_funds"), "")))),
            Some(Lie::Pending) => Ok(with(Some(receipt(false, Some("settlement_pending"), &hash)))),
            Some(Lie::Forged) => Ok(with(Some(receipt(true, None, &made_up())))),
            Some(Lie::OtherTransaction) => {
                let of_another =
                    self.chain.transfers().into_iter().find(|t| Some(&t.hash) != moved.as_ref().map(|m| &m.hash));
                Ok(with(Some(receipt(true, None, &of_another.map_or_else(made_up, |t| t.hash)))))
            }
            Some(Lie::ChallengesAgain) => Ok(self.challenge("that was not enough")),
            Some(Lie::NoReceipt) => Ok(with(None)),
            Some(Lie::Silence) => Err(Reply::Silence),
            Some(Lie::Broken) => Err(Reply::Status(502, "no".into())),
        }
    }

    fn output(&self, arguments: &Value, id: &str, hash: &str) -> Value {
        json!({"resultType": "complete", "content": [{"type": "text", "text": output(arguments, id)}],
            "_meta": {"x402/payment-response": {"success": true, "transaction": hash, "network": NETWORK,
                "payer": chain::payer(), "amount": self.terms.price.to_string()}}})
    }
}
