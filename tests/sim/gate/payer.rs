//! The payers of the world: each has some calls to make, repeats what it got no answer to with the same payment, and
//! pays again only where it is asked to. Some try more: twins without proof, a payment for two calls, a nonce that is
//! spent elsewhere. And there is a thief, who knows what the chain shows.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::sleep;
use tollway::gate::claims::Proof;
use tollway::gate::payment::{Identity, Payment};

use super::book::{Asked, Book};
use super::shop::{Open, Shape, Told};
use super::{Call, PRICE};
use crate::chain::{self, CLOSE_MS, PAY_TO};
use crate::world::{World, lock};

/// No seller's.
pub const ELSEWHERE: &str = "GBBD47IF6LWK7P7MDEVSCWR7DPUWV3NY3DTQEVFL4NAT4AQH3ZLLFLA5";

/// One payment as it is presented.
pub struct Paid {
    pub raw: Box<RawValue>,
    pub nonce: i64,
    pub identity: Identity,
}

/// A payment with what its payer knows of it.
#[derive(Clone)]
pub struct Own {
    pub call: Call,
    pub paid: Arc<Paid>,
    pub identifier: Option<String>,
    pub session: Option<String>,
    /// It was tried for another call too, or its nonce was meant to be spent elsewhere.
    pub bent: bool,
    /// Its payer does not come again when the world has calmed: nobody but the sweep ends its claim.
    pub gone: bool,
}

impl Own {
    pub fn proof(&self) -> Proof {
        let echoed = Payment::read(&self.paid.raw).ok().and_then(|payment| payment.identifier().ok());
        Proof::new(echoed.and_then(|echoed| echoed.identifier).as_ref(), self.session.as_deref())
    }

    pub fn has_proof(&self) -> bool {
        self.identifier.is_some() || self.session.is_some()
    }
}

/// Everybody outside of the gates.
pub struct Market {
    pub world: Arc<World>,
    pub book: Arc<Book>,
    pub open: Open,
    pub hosts: Vec<String>,
    pub shape: Shape,
    /// Every payment that was signed.
    pub payments: Mutex<Vec<Own>>,
}

/// Of one request.
#[derive(Default, Clone, Copy)]
pub struct How {
    pub without_proof: bool,
    pub thief: bool,
    pub calm: bool,
}

fn present(offer: &RawValue, transaction: &str, identifier: Option<&str>) -> Paid {
    let extensions = match identifier {
        Some(id) => json!({"payment-identifier": {"info": {"required": false, "id": id}}}),
        None => json!({}),
    };
    let raw = format!(
        r#"{{"x402Version":2,"accepted":{},"payload":{{"transaction":"{transaction}"}},"extensions":{extensions}}}"#,
        offer.get()
    );
    let raw = RawValue::from_string(raw).expect("JSON of ours");
    let read = Payment::read(&raw).unwrap_or_else(|_| panic!("a payment of ours"));
    Paid { nonce: read.nonce().parse().expect("a nonce"), identity: read.identity, raw }
}

impl Market {
    fn any_host(&self) -> String {
        self.hosts[self.world.range(0, self.hosts.len() as u64) as usize].clone()
    }

    fn offer(&self, call: Call) -> Box<RawValue> {
        let prices = super::shop::prices(self.shape.life);
        let item = prices.items().find(|item| item.key == call.tool).expect("it has a price");
        item.offers[0].offer.raw.clone()
    }

    /// One request at one gate.
    pub async fn ask(&self, call: Call, own: Option<&Own>, how: How) -> Told {
        let world = &self.world;
        let host = self.any_host();
        let shop = lock(&self.open).get(&host).cloned();
        let (paid, proof, session) = match own {
            Some(own) if how.without_proof => {
                let transaction = transaction_of(&own.paid);
                let bare = present(&self.offer(own.call), &transaction, None);
                (Some(Arc::new(bare)), Proof::default(), None)
            }
            Some(own) => (Some(own.paid.clone()), own.proof(), own.session.clone()),
            None => (None, Proof::default(), None),
        };
        let id = self.book.number();
        let nonce = paid.as_ref().map(|paid| paid.nonce);
        let after_the_transfer = nonce.is_some_and(|nonce| self.book.paid(nonce).is_some());
        let leaves = !how.calm && world.chance(|f| f.agent_leaves);
        let patience = Duration::from_millis(if leaves { world.range(0, 20_000) } else { 240_000 });
        let drops = world.permille(500);
        let proof_word = if how.without_proof { "no proof" } else { "" };
        world.trace(&format!("request {id} to {host}: {} {} with {nonce:?} {proof_word}", call.tool, call.n));
        let asked = Asked { id, call, paid, proof, thief: how.thief, after_the_transfer };
        let told = match shop {
            Some(shop) => shop.ask(asked, session, patience, drops).await,
            None => Told::Nothing,
        };
        world.trace(&format!("request {id} is told: {}", told.brief()));
        let runs = own.and_then(|own| self.book.claim(&own.paid.identity)).map_or(0, |claim| claim.runs);
        world.gate(|s| {
            s.exhausted += u64::from(matches!(told, Told::Failed { receipt: Some(_) }) && runs >= 3);
            s.requests += u64::from(own.is_some());
            s.left += u64::from(leaves && matches!(told, Told::Nothing));
            s.lost += u64::from(!leaves && matches!(told, Told::Nothing));
            s.outputs += u64::from(told.is_output());
            s.uncharged += u64::from(matches!(told, Told::Failed { receipt: None }));
            match told.reason() {
                "settlement_unknown" => s.unknown += 1,
                "in_progress" => s.in_progress += 1,
                "already_settled" => s.already_settled += 1,
                "payment_already_used" => s.already_used += 1,
                "payment_identifier_conflict" => s.conflicts += 1,
                "answer_too_large" => s.too_large += 1,
                _ => {}
            }
        });
        told
    }

    /// Signs one for this offer.
    fn pay(self: &Arc<Self>, call: Call, offer: &RawValue, identifier: Option<String>, session: Option<String>) -> Own {
        let world = &self.world;
        let nonce = (world.range(0, u64::MAX) >> 1) as i64;
        let expiration = self.book.chain.newest(world) + (self.shape.life * 1_000).div_ceil(CLOSE_MS) as u32;
        let max_time = world.unix_ms() / 1_000 + 86_400;
        let transaction = chain::payment(nonce, PAY_TO, i128::from(PRICE), expiration, max_time);
        let paid = Arc::new(present(offer, &transaction, identifier.as_deref()));
        let spends = world.chance(|f| f.gate.spent_elsewhere);
        let gone = world.permille(350);
        let own = Own { call, paid, identifier, session, bent: spends, gone };
        world.trace(&format!("{} {} is paid with {nonce}, dead after {expiration}", call.tool, call.n));
        if spends {
            let other = chain::payment(nonce, ELSEWHERE, 1, expiration, max_time);
            let (market, after) = (self.clone(), world.range(0, 30_000));
            world.outside(async move {
                sleep(Duration::from_millis(after)).await;
                let spent = market.book.chain.submit(&market.world, &other).is_ok();
                market.world.trace(&format!("{nonce} is spent elsewhere: {spent}"));
                market.world.gate(|s| s.spent_elsewhere += u64::from(spent));
            });
        }
        lock(&self.payments).push(own.clone());
        own
    }

    /// One logical call, as long as the world is rough.
    pub async fn live(self: Arc<Self>, call: Call) {
        let world = self.world.clone();
        sleep(Duration::from_millis(world.range(0, 40_000))).await;
        let identifier = |n: u64| format!("payment_of_call_{:04}_{n}", call.n);
        let has_identifier = world.permille(600);
        let session = world.permille(300).then(|| format!("session-of-{}", call.n));
        let mut own: Option<Own> = None;
        let mut paid = 0;
        for _ in 0..7 {
            let told = match &own {
                None => self.ask(call, None, How::default()).await,
                Some(own) if world.chance(|f| f.agent_races) => {
                    world.gate(|s| s.raced += 1);
                    let twins = (0..world.range(2, 4)).map(|_| {
                        let without_proof = world.chance(|f| f.gate.unproven);
                        self.ask(call, Some(own), How { without_proof, ..How::default() })
                    });
                    let mut all = join_all(twins).await;
                    let best = all.iter().position(Told::is_output).unwrap_or(0);
                    all.swap_remove(best)
                }
                Some(own) => {
                    let without_proof = !own.has_proof();
                    self.ask(call, Some(own), How { without_proof, ..How::default() }).await
                }
            };
            if let Some(own) = &mut own
                && world.chance(|f| f.gate.swapped)
            {
                own.bent = true;
                if let Some(noted) = lock(&self.payments).iter_mut().find(|noted| noted.paid.nonce == own.paid.nonce) {
                    noted.bent = true;
                }
                let other = Call { n: call.n + 1_000, ..call };
                self.ask(other, Some(own), How::default()).await;
            }
            let asked_to_pay = match &told {
                Told::Output { .. } => return,
                Told::Challenge { reason, accepts } => match reason.as_str() {
                    "already_settled" => return,
                    "payment_already_used" => None,
                    _ => accepts.first(),
                },
                _ => None,
            };
            if let Some(offer) = asked_to_pay
                && (own.is_none() || world.permille(600))
            {
                world.gate(|s| s.paid_again += u64::from(own.is_some()));
                paid += u64::from(world.permille(800));
                own = Some(self.pay(call, offer, has_identifier.then(|| identifier(paid)), session.clone()));
                continue;
            }
            let wait = if world.permille(200) { 45_000 } else { 10_000 };
            sleep(Duration::from_millis(world.range(100, wait))).await;
        }
    }

    /// Presents what the chain shows, under another's name or none.
    pub async fn steal(self: Arc<Self>) {
        while self.world.now_ms() < super::ROUGH_MS {
            sleep(Duration::from_millis(self.world.range(1_000, 10_000))).await;
            for own in self.shown() {
                if self.world.chance(|f| f.gate.thieves) {
                    self.steal_one(&own, false).await;
                }
            }
        }
    }

    /// Payments whose transfer everybody can see.
    pub fn shown(&self) -> Vec<Own> {
        let all = lock(&self.payments).clone();
        all.into_iter().filter(|own| self.book.paid(own.paid.nonce).is_some()).collect()
    }

    pub async fn steal_one(&self, own: &Own, calm: bool) -> Option<Told> {
        let transfer = self.book.paid(own.paid.nonce)?;
        let identifier = self.world.permille(300).then(|| format!("a_thief_has_none_{}", self.world.range(0, 9)));
        let session = self.world.permille(300).then(|| "a thief's own session".to_owned());
        let paid = present(&self.offer(own.call), &transfer.envelope, identifier.as_deref());
        if paid.identity != own.paid.identity {
            self.world.fail(format!("{} is another payment, read from the chain", own.paid.nonce));
        }
        self.world.gate(|s| s.thefts += 1);
        let stolen = Own { paid: Arc::new(paid), identifier, session, ..own.clone() };
        Some(self.ask(own.call, Some(&stolen), How { thief: true, calm, ..How::default() }).await)
    }
}

fn transaction_of(paid: &Paid) -> String {
    let raw: serde_json::Value = serde_json::from_str(paid.raw.get()).expect("JSON of ours");
    raw["payload"]["transaction"].as_str().expect("a transaction").to_owned()
}
