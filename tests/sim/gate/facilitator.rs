//! The facilitator of the world: it verifies and settles on the chain, and when it lies it takes the money before it
//! speaks, later, or never. What it never does: say yes without a transfer, or settle what it refused for its form;
//! both a gate has to believe.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::time::sleep;

use super::book::Book;
use crate::chain::{self, Chain, NETWORK};
use crate::http::{Reply, Request};
use crate::world::{Ctx, lock};

/// What a facilitator keeps over its lives.
#[derive(Default)]
pub struct Disk {
    settled: BTreeMap<i64, String>,
    /// Refused for their form, whenever they come.
    malformed: BTreeSet<i64>,
}

pub struct Facilitator {
    pub ctx: Ctx,
    pub chain: Arc<Chain>,
    pub disk: Arc<Mutex<Disk>>,
    pub book: Arc<Book>,
    /// The same settle again is answered with the same yes; else it finds the nonce used.
    pub remembers: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    Empty,
    YesAsText,
    WrongNetwork,
    WrongPayer,
    NoTransaction,
    NonceUsed,
    NoFunds,
    Pending,
    Silence,
    Html,
    Broken,
    Closes,
    BadForm,
}

const LIES: [Lie; 13] = [
    Lie::Empty,
    Lie::YesAsText,
    Lie::WrongNetwork,
    Lie::WrongPayer,
    Lie::NoTransaction,
    Lie::NonceUsed,
    Lie::NoFunds,
    Lie::Pending,
    Lie::Silence,
    Lie::Html,
    Lie::Broken,
    Lie::Closes,
    Lie::BadForm,
];

const SIMULATION: &str = "invalid_exact_stellar_payload_simulation_failed";

fn no(reason: &str, transaction: &str) -> Reply {
    Reply::Json(
        json!({"success": false, "errorReason": reason, "transaction": transaction, "network": NETWORK}).to_string(),
    )
}

fn yes(hash: &str) -> Value {
    json!({"success": true, "transaction": hash, "network": NETWORK, "payer": chain::payer()})
}

impl Facilitator {
    pub async fn answer(self: Arc<Self>, request: Request) -> Reply {
        let world = &self.ctx.world;
        world.pause().await;
        if request.target.starts_with("/supported") {
            if world.chance(|f| f.gate.facilitator_fails) {
                return Reply::Status(503, String::new());
            }
            let kinds = json!([{"x402Version": 2, "scheme": "exact", "network": NETWORK}]);
            return Reply::Json(json!({"kinds": kinds, "extensions": [], "signers": {}}).to_string());
        }
        let Ok(body) = serde_json::from_slice::<Value>(&request.body) else { return Reply::Status(400, String::new()) };
        let transaction = body["paymentPayload"]["payload"]["transaction"].as_str().unwrap_or_default().to_owned();
        match request.target.starts_with("/verify") {
            true => self.verify(&transaction),
            false => self.settle(&transaction, &request.body).await,
        }
    }

    /// Why the chain would not take it.
    fn fault(&self, transaction: &str) -> Option<&'static str> {
        let Ok(signed) = chain::read(transaction) else { return Some("invalid_exact_stellar_payload_malformed") };
        let newest = self.chain.newest(&self.ctx.world);
        let used = self.chain.of_nonce(signed.credentials.nonce).is_some();
        let dead = newest >= signed.credentials.signature_expiration_ledger;
        (used || dead || self.chain.balance() < i128::from(super::PRICE)).then_some(SIMULATION)
    }

    fn verify(&self, transaction: &str) -> Reply {
        let world = &self.ctx.world;
        let nonce = chain::read(transaction).map_or(0, |signed| signed.credentials.nonce);
        let fault = self.fault(transaction);
        let said = if world.chance(|f| f.gate.facilitator_fails) {
            match world.range(0, 5) {
                0 => Reply::Status(500, "oops".into()),
                1 => Reply::Json("{}".into()),
                2 => Reply::Json(r#"{"isValid":"true"}"#.into()),
                3 => Reply::Silence,
                _ => Reply::Json(r#"{"isValid":false,"invalidReason":"not_today"}"#.into()),
            }
        } else {
            match fault {
                None => {
                    self.book.verified(nonce);
                    Reply::Json(json!({"isValid": true, "payer": chain::payer()}).to_string())
                }
                Some(why) => Reply::Json(json!({"isValid": false, "invalidReason": why}).to_string()),
            }
        };
        let valid = matches!(&said, Reply::Json(text) if text.contains(r#""isValid":true"#));
        self.ctx.trace(&format!("verify {nonce}: {valid}"));
        world.gate(|s| s.verifies_refused += u64::from(!valid));
        said
    }

    async fn settle(self: &Arc<Self>, transaction: &str, body: &[u8]) -> Reply {
        let world = &self.ctx.world;
        let Ok(signed) = chain::read(transaction) else { return no("invalid_exact_stellar_payload_malformed", "") };
        let nonce = signed.credentials.nonce;
        self.chain.show(world, nonce);
        self.book.settle_asked(nonce, body);
        if lock(&self.disk).malformed.contains(&nonce) {
            return no("invalid_exact_stellar_payload_wrong_amount", "");
        }
        let lie = world.chance(|f| f.gate.settle_lies).then(|| LIES[world.range(0, LIES.len() as u64) as usize]);
        let takes = if lie == Some(Lie::BadForm) { 2 } else { world.range(0, 3) };
        if let Some(lie) = lie {
            self.ctx.trace(&format!("lies {lie:?}, takes {takes}, about {nonce}"));
            world.gate(|s| *s.lies.entry(format!("{lie:?}")).or_default() += 1);
            if takes == 1 {
                let (this, transaction, after) = (self.clone(), transaction.to_owned(), world.range(0, 90_000));
                self.ctx.spawn(async move {
                    sleep(Duration::from_millis(after)).await;
                    let _ = this.chain.submit(&this.ctx.world, &transaction);
                });
            }
        }
        let known = lock(&self.disk).settled.get(&nonce).cloned();
        if lie == Some(Lie::BadForm) {
            let moved = self.chain.of_nonce(nonce).is_some();
            if !moved && self.book.settles(nonce) == 1 {
                lock(&self.disk).malformed.insert(nonce);
                return no("invalid_exact_stellar_payload_wrong_amount", "");
            }
        }
        let hash = match (lie, takes, known) {
            (Some(_), 1 | 2, _) => hex::encode(Sha256::digest(format!("forged {nonce}"))),
            (_, _, Some(hash)) if self.remembers => hash,
            (_, _, Some(_)) => return no(SIMULATION, ""),
            _ => match self.chain.submit(world, transaction) {
                Ok(transfer) => {
                    lock(&self.disk).settled.insert(nonce, transfer.hash.clone());
                    while self.chain.newest(world) < transfer.ledger {
                        sleep(Duration::from_millis(500)).await;
                    }
                    transfer.hash
                }
                Err(why) => {
                    self.ctx.trace(&format!("cannot settle {nonce}: {why}"));
                    return no(if why.contains("balance") { "insufficient_funds" } else { SIMULATION }, "");
                }
            },
        };
        let with = |member: &str, value: &str| {
            let mut said = yes(&hash);
            said[member] = json!(value);
            Reply::Json(said.to_string())
        };
        match lie {
            None => Reply::Json(yes(&hash).to_string()),
            Some(Lie::Empty) => Reply::Json("{}".into()),
            Some(Lie::YesAsText) => with("success", "true"),
            Some(Lie::WrongNetwork) => with("network", "stellar:pubnet"),
            Some(Lie::WrongPayer) => with("payer", chain::PAY_TO),
            Some(Lie::NoTransaction) => with("transaction", ""),
            Some(Lie::NonceUsed | Lie::BadForm) => no(SIMULATION, ""),
            Some(Lie::NoFunds) => no("insufficient_funds", ""),
            Some(Lie::Pending) => no("settlement_pending", &hash),
            Some(Lie::Silence) => Reply::Silence,
            Some(Lie::Html) => Reply::Json("<html>".into()),
            Some(Lie::Broken) => Reply::Status(502, "bad gateway".into()),
            Some(Lie::Closes) => Reply::Close,
        }
    }
}
