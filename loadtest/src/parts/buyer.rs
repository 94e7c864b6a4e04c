//! One purchase as a careful client makes it: with a key, again and again with the same key until it has its output or
//! knows that nothing was paid; only then with a new one. What it was told on the way is kept, to be held against the
//! chain.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::client::{Agent, Answer};
use super::rng::Rng;

const CALL: &str = "x402_call_resource";
const PAYMENT: &str = "x402_get_payment";
/// Between two calls with the same key, milliseconds.
const SHORTEST: u64 = 100;
const LONGEST: u64 = 2_000;
/// Until a call is made again for which the budget had no room, milliseconds.
const REFUSED: u64 = 4_000;
/// Calls with a key whose payment is settled, until a seller that hands nothing over is believed.
const ASKED_FOR_OUTPUT: u32 = 4;

pub struct Purchase {
    pub agent: Agent,
    /// Without a key.
    pub call: Value,
    /// At least 16 characters; further keys are made of it.
    pub key: String,
}

/// How a purchase ended, as far as the client knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    Output,
    /// Settled, and its output was never handed over: the client has the receipt.
    Undelivered,
    /// The last word was that the budget does not allow it.
    Refused,
    /// Time ran out: what was heard last.
    Open(String),
}

#[derive(Debug)]
pub struct Story {
    pub agent: String,
    /// The key that was used last.
    pub key: String,
    pub end: End,
    pub requests: u32,
    /// Keys given up because their payment was released.
    pub keys_released: u32,
    /// The first answer about money that was SETTLEMENT_UNKNOWN.
    pub unknown: bool,
    /// (payment, transaction) of every receipt.
    pub receipts: Vec<(String, String)>,
    /// Payments of which the client was told that no money moved.
    pub unmoved: Vec<String>,
    /// What no client should ever hear.
    pub wrong: Vec<String>,
}

impl Purchase {
    /// Until it has its output, or its receipt without one, or `give_up` says so: it is asked after each answer, with
    /// the time since the beginning.
    pub async fn make(&self, rng: &Rng, mut give_up: impl FnMut(&Story, Duration) -> bool) -> Story {
        let mut story = Story {
            agent: self.agent.name.clone(),
            key: self.key.clone(),
            end: End::Open("nothing".into()),
            requests: 0,
            keys_released: 0,
            unknown: false,
            receipts: Vec::new(),
            unmoved: Vec::new(),
            wrong: Vec::new(),
        };
        let started = Instant::now();
        let (mut pause, mut undelivered) = (SHORTEST, 0);
        loop {
            let mut call = self.call.clone();
            call["idempotencyKey"] = json!(story.key);
            let answer = self.agent.tool(CALL, &call).await;
            story.requests += 1;
            story.hear(&answer);
            if answer.is_paid() {
                if answer.has_output() {
                    story.end = End::Output;
                    return story;
                }
                undelivered += 1;
                story.end = End::Undelivered;
                if undelivered >= ASKED_FOR_OUTPUT {
                    return story;
                }
            } else {
                story.end = match answer.code() {
                    "BUDGET_EXCEEDED" => End::Refused,
                    _ => End::Open(answer.label()),
                };
            }
            // A row that is released says so to its own key for ever.
            if answer.code() == "PAYMENT_REJECTED" && answer.value()["details"]["phase"] == "lookup" {
                story.keys_released += 1;
                story.key = format!("{}-{}", self.key, story.keys_released);
                pause = SHORTEST;
            }
            if answer.code() == "SETTLEMENT_UNKNOWN" && story.requests.is_multiple_of(2) {
                self.poll(&mut story).await;
            }
            if give_up(&story, started.elapsed()) {
                return story;
            }
            if story.end == End::Refused {
                pause = REFUSED;
            }
            tokio::time::sleep(Duration::from_millis(rng.between(pause / 2, pause))).await;
            pause = (pause * 2).min(LONGEST);
        }
    }

    /// The other way to learn what became of a payment.
    async fn poll(&self, story: &mut Story) {
        let answer = self.agent.tool(PAYMENT, &json!({"idempotencyKey": story.key})).await;
        if let (Some("released"), Some(id)) =
            (answer.value()["state"].as_str(), answer.value()["paymentIdentifier"].as_str())
        {
            story.unmoved.push(id.to_owned());
        }
    }
}

impl Story {
    fn hear(&mut self, answer: &Answer) {
        let value = answer.value();
        let id = value["paymentIdentifier"].as_str().or(value["details"]["paymentIdentifier"].as_str());
        if answer.is_paid() {
            match (id, answer.transaction()) {
                (Some(id), Some(transaction)) => self.receipts.push((id.to_owned(), transaction.to_owned())),
                // Settled on the chain's evidence, where its transaction was not found.
                (Some(_), None) => {}
                (None, _) => self.wrong.push("a receipt without its payment".into()),
            }
            return;
        }
        match (answer.code(), answer.moved()) {
            ("SETTLEMENT_UNKNOWN", "unknown" | "yes") if id.is_some() => self.unknown = true,
            ("SETTLEMENT_UNKNOWN", moved) => {
                self.wrong.push(format!("{} with moneyMayHaveMoved {moved:?} or no payment", answer.label()));
            }
            ("INVALID_ARGUMENT", _) => self.wrong.push(answer.value().to_string()),
            (_, "no") => self.unmoved.extend(id.map(str::to_owned)),
            _ => {}
        }
    }
}
