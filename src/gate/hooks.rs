//! What a seller's own code decides or hears of: whether a request is sold, at what price, and what became of it. It is
//! asked within bounded time, and a failure of it is never a free output.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::Kind;
use super::prices::{Item, Terms};
use crate::money::{Amount, Unit};
use crate::x402::Offer;

/// A request for a priced item, before its payment is looked at. A payment that is known is decided by its claim, and
/// nobody is asked.
#[derive(Debug, Clone, Copy)]
pub struct Protected<'a> {
    /// `mcp`.
    pub transport: &'static str,
    pub kind: Kind,
    /// The name or URI, as it was asked for.
    pub target: &'a str,
    /// The raw `params` without `_meta`: no hook has a payment's bytes.
    pub params: &'a RawValue,
    /// `tool:search`.
    pub item: &'a str,
    /// The raw offers that would be made.
    pub offers: &'a [&'a RawValue],
    /// The raw object of extensions that would be advertised.
    pub extensions: &'a RawValue,
}

/// What a hook says of it.
#[derive(Debug)]
pub enum Verdict {
    Continue,
    /// Other offers (within the ceilings), or members of `extensions` besides ours. A hook that is asked again with the
    /// same arguments should say the same; what it said is good for the offer's own timeout, in this process.
    Replace {
        offers: Option<Vec<Terms>>,
        extensions: Option<Box<RawValue>>,
    },
    /// Not now, not this: an error result with this body.
    Halt {
        status: u16,
        body: Box<RawValue>,
    },
    /// It costs nothing this time.
    LetThrough,
}

/// Something that happened to a payment. Nothing of it can be spent or shown as proof.
#[derive(Debug, Clone)]
pub struct Happened {
    /// `tool:search`.
    pub item: String,
    /// The first 16 digits of the claim's identity; `None` where the payment could not be read.
    pub claim: Option<String>,
    pub payer: Option<String>,
    /// The offer that was paid, raw.
    pub offer: Option<Box<RawValue>>,
    /// The `SettlementResponse`.
    pub receipt: Option<Box<RawValue>>,
    /// A stable word: of `docs/outcomes.md`, or `handler_failed`, `handler_raised`, `settlement_failed`.
    pub reason: Option<String>,
    /// The facilitator's or the handler's own words, at most 300 characters.
    pub error: Option<String>,
}

/// A seller's own code. What is not written does nothing.
pub trait Hooks: Send + Sync + 'static {
    fn on_protected_request<'a>(&'a self, _request: Protected<'a>) -> BoxFuture<'a, Result<Verdict, String>> {
        Box::pin(async { Ok(Verdict::Continue) })
    }
    /// A payment was verified and is not charged.
    fn on_verified_payment_canceled<'a>(&'a self, _event: &'a Happened) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }
    fn on_settled<'a>(&'a self, _event: &'a Happened) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }
    /// A payment was refused.
    fn on_rejected<'a>(&'a self, _event: &'a Happened) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }
}

/// What a gate does where a hook does not answer in time, or not as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// An internal error: nothing is sold unasked.
    Refuse,
    /// It is sold at the price that is written.
    Continue,
}

/// Hooks with their bounds.
#[derive(Clone)]
pub struct Hooking {
    pub hooks: Arc<dyn Hooks>,
    pub timeout: Duration,
    pub on_failure: OnFailure,
    /// No hook asks for more. A unit that is not here cannot be asked for by one.
    pub ceilings: BTreeMap<Unit, Amount>,
}

/// Which of the events it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Canceled,
    Settled,
    Rejected,
}

/// An item as a hook changed it for one request.
pub(super) struct Altered {
    /// With the hook's offers; `None`: as it is.
    pub item: Option<Item>,
    /// Members beside the gate's own.
    pub extensions: Option<Box<RawValue>>,
}

pub(super) enum Asked {
    AsItIs,
    Altered(Box<Altered>),
    Halt { status: u16, body: Box<RawValue> },
    LetThrough,
    Failed,
}

impl Hooking {
    pub(super) async fn ask(&self, request: Protected<'_>, item: &Item) -> Asked {
        let asked = std::panic::AssertUnwindSafe(self.hooks.on_protected_request(request)).catch_unwind();
        let said = match timeout(self.timeout, asked).await {
            Ok(Ok(Ok(verdict))) => self.read(verdict, item),
            Ok(Ok(Err(why))) => Err(why.chars().take(300).collect()),
            Ok(Err(_)) => Err("it panicked".to_owned()),
            Err(_) => Err("it did not answer in time".to_owned()),
        };
        said.unwrap_or_else(|why| {
            tracing::warn!(item = request.item, why, "a hook failed");
            match self.on_failure {
                OnFailure::Continue => Asked::AsItIs,
                OnFailure::Refuse => Asked::Failed,
            }
        })
    }

    fn read(&self, verdict: Verdict, item: &Item) -> Result<Asked, String> {
        match verdict {
            Verdict::Continue => Ok(Asked::AsItIs),
            Verdict::LetThrough => Ok(Asked::LetThrough),
            Verdict::Halt { status, body } => Ok(Asked::Halt { status, body }),
            Verdict::Replace { offers, extensions } => {
                if extensions.as_deref().is_some_and(|object| crate::json::members(object).is_err()) {
                    return Err("its extensions are no object".to_owned());
                }
                let item = match offers {
                    None => None,
                    Some(terms) => {
                        let made = Item::new(item.kind, &item.key, terms, item.about.clone(), item.identifier_required);
                        let made = made.map_err(|e| e.to_string())?;
                        match made.offers.iter().find(|priced| !self.is_within(&priced.offer)) {
                            Some(priced) => {
                                return Err(format!("its offer on {} is above the ceiling", priced.offer.network));
                            }
                            None => Some(made),
                        }
                    }
                };
                Ok(Asked::Altered(Box::new(Altered { item, extensions })))
            }
        }
    }

    fn is_within(&self, offer: &Offer) -> bool {
        self.ceilings.get(&offer.unit()).is_some_and(|most| offer.amount <= *most)
    }

    /// Nobody waits for it.
    pub(super) async fn tell(&self, event: Event, happened: Happened) {
        let told = match event {
            Event::Canceled => self.hooks.on_verified_payment_canceled(&happened),
            Event::Settled => self.hooks.on_settled(&happened),
            Event::Rejected => self.hooks.on_rejected(&happened),
        };
        if timeout(self.timeout, std::panic::AssertUnwindSafe(told).catch_unwind()).await.is_err() {
            tracing::warn!(item = happened.item, ?event, "a hook did not take its event in time");
        }
    }
}
