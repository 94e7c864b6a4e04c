//! Where a gate asks its hooks, and what it tells them.

use std::sync::Arc;

use serde_json::value::RawValue;

use super::ask::Ask;
use super::challenge::Reason;
use super::claims::Claim;
use super::desk::{Gate, Sheet};
use super::hooks::{Altered, Asked, Event, Happened, Protected};
use super::payment::Payment;
use super::prices::Item;
use super::sell::{Order, Ran, Sold};
use super::sweep::{Resolved, Swept};
use super::told::Told;
use crate::json;
use crate::telemetry;

const MAX_WORDS: usize = 300;
/// Events that are on their way to a hook at once, at most; refusals, which cost their sender nothing, get half of it.
pub(super) const MAX_TELLING: usize = 256;

impl Gate {
    /// Before anybody is asked to pay, and before a payment that is not known is looked at. `Err`: it ends here.
    pub(super) async fn hooked(&self, ask: &Ask<'_>, item: &Item) -> Result<Option<Altered>, Told> {
        let Some(hooking) = &self.inner().hooking else { return Ok(None) };
        let stock = self.inner().shelf.now();
        let (extensions, _) = self.extensions(&Sheet { stock: &stock, item, altered: None });
        let offers: Vec<&RawValue> = item.offers.iter().map(|priced| &*priced.offer.raw).collect();
        let scope = item.scope();
        let params = without_meta(ask.request.params);
        let request = Protected {
            transport: "mcp",
            kind: item.kind,
            target: &ask.key,
            params: &params,
            item: &scope,
            offers: &offers,
            extensions: &extensions,
        };
        match hooking.ask(request, item).await {
            Asked::AsItIs => Ok(None),
            Asked::Altered(altered) => {
                let offers = altered.item.iter().flat_map(|item| &item.offers);
                let foreign = offers.map(|priced| &priced.offer.network).find(|network| !self.settles_on(network));
                match foreign {
                    Some(network) => {
                        tracing::error!(item = scope, %network, "a hook offers a network that nobody settles on");
                        Err(Told::internal("hook_failed"))
                    }
                    None => Ok(Some(*altered)),
                }
            }
            Asked::Halt { status, body } => Err(Told::halted(item.kind, status, &body)),
            Asked::LetThrough => Err(Told { outcome: "hook_skipped", ..Told::free() }),
            Asked::Failed => Err(Told::internal("hook_failed")),
        }
    }

    fn settles_on(&self, network: &crate::money::Network) -> bool {
        self.inner().seller.facilitators.contains_key(network)
    }

    /// A challenge to somebody who had paid, or had tried to.
    pub(super) fn rejected(
        &self,
        ask: &Ask<'_>,
        sheet: &Sheet<'_>,
        payment: Option<&Arc<Payment>>,
        reason: &Reason,
        receipt: Option<&RawValue>,
    ) -> Told {
        self.tell(Event::Rejected, || Happened {
            item: sheet.item.scope(),
            claim: payment.map(|payment| payment.identity.short()),
            payer: payment.map(|payment| payment.payer().to_owned()),
            offer: None,
            receipt: receipt.map(ToOwned::to_owned),
            reason: Some(reason.word().to_owned()),
            error: match reason {
                Reason::Facilitator(said) | Reason::SettlementFailed(said) => Some(bounded(said)),
                _ => None,
            },
        });
        self.challenge(ask, sheet, reason, receipt)
    }

    /// What a sale came to, told by the sale's own task: also where its caller is gone.
    pub(super) fn tell_of(&self, order: &Order, sold: &Sold) {
        let happened = |reason: Option<&str>, error: Option<&str>, receipt: Option<&RawValue>| Happened {
            item: order.scope.clone(),
            claim: Some(order.payment.identity.short()),
            payer: Some(order.payment.payer().to_owned()),
            offer: Some(order.offer.raw.clone()),
            receipt: receipt.map(ToOwned::to_owned),
            reason: reason.map(ToOwned::to_owned),
            error: error.map(bounded),
        };
        match sold {
            Sold::Delivered { receipt, .. } => self.tell(Event::Settled, || happened(None, None, Some(receipt))),
            Sold::Uncharged(Ran::Error(error)) => {
                self.tell(Event::Canceled, || happened(Some("handler_raised"), Some(&error.message), None));
            }
            Sold::Uncharged(Ran::Failed(result)) => {
                self.tell(Event::Canceled, || happened(Some("handler_failed"), Some(&text_of(result)), None));
            }
            Sold::Challenge(Reason::SettlementFailed(said)) => {
                self.tell(Event::Canceled, || happened(Some("settlement_failed"), Some(said), None));
            }
            Sold::Uncharged(_) | Sold::Challenge(_) | Sold::Withheld(_) | Sold::Unverified | Sold::Internal(_) => {}
        }
    }

    /// What a settlement came to whose end was not known when its caller was answered.
    pub(super) fn tell_of_swept(&self, swept: &Swept) {
        match (swept.resolved, &swept.receipt) {
            (Resolved::Settled, Some(receipt)) => self.tell_of_found(&swept.claim, receipt),
            (Resolved::Failed, _) => {
                let (reason, error) = ("settlement_failed".to_owned(), "it was not paid, and cannot be any more");
                self.tell(Event::Canceled, || Happened {
                    reason: Some(reason),
                    error: Some(error.to_owned()),
                    ..of_claim(&swept.claim)
                });
            }
            (Resolved::Settled | Resolved::StillUnknown | Resolved::Lost, _) => {}
        }
    }

    pub(super) fn tell_of_found(&self, claim: &Claim, receipt: &RawValue) {
        self.tell(Event::Settled, || Happened { receipt: Some(receipt.to_owned()), ..of_claim(claim) });
    }

    fn tell(&self, event: Event, happened: impl FnOnce() -> Happened) {
        let Some(hooking) = &self.inner().hooking else { return };
        let telling = &self.inner().telling;
        let fits = event != Event::Rejected || telling.available_permits() > MAX_TELLING / 2;
        let Some(permit) = fits.then(|| telling.clone().try_acquire_owned().ok()).flatten() else {
            telemetry::GATE_EVENTS_DROPPED.one([match event {
                Event::Canceled => "on_verified_payment_canceled",
                Event::Settled => "on_settled",
                Event::Rejected => "on_rejected",
            }]);
            return;
        };
        let (hooking, happened) = (hooking.clone(), happened());
        self.inner().world.spawn.spawn(Box::pin(async move {
            hooking.tell(event, happened).await;
            drop(permit);
        }));
    }
}

fn of_claim(claim: &Claim) -> Happened {
    Happened {
        item: claim.scope.clone(),
        claim: Some(claim.identity.short()),
        payer: Some(claim.payer.clone()),
        offer: Some(claim.offer.clone()),
        receipt: None,
        reason: None,
        error: None,
    }
}

fn bounded(text: &str) -> String {
    text.chars().take(MAX_WORDS).collect()
}

/// The first text of a failed result.
fn text_of(result: &RawValue) -> String {
    let content = json::member(result, "content").and_then(json::elements).unwrap_or_default();
    let text = content.first().and_then(|first| json::member(first, "text")).and_then(json::string);
    bounded(&text.unwrap_or_default())
}

fn without_meta(params: &RawValue) -> Box<RawValue> {
    let members = json::members(params).unwrap_or_default();
    let kept: Vec<String> = members
        .iter()
        .filter(|(name, _)| name != "_meta")
        .map(|(name, value)| format!("{}:{}", json::raw(&**name), value.get()))
        .collect();
    RawValue::from_string(format!("{{{}}}", kept.join(","))).unwrap_or_else(|_| RawValue::NULL.to_owned())
}
