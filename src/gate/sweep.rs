//! The end of a settlement that nobody knows: the facilitator is asked the same question again, of which only the yes
//! counts, and then the chain. Until one of them proves something, the claim stays unknown, and nobody is asked to pay
//! again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use serde_json::value::RawValue;

use super::claims::{Arrow, Change, Claim, ClaimError, Due, Lost, State};
use super::sell::Seller;
use super::settle::{Judged, judge};
use crate::chain::NonceReading;
use crate::chain::stellar::{NonceQuestion, Stellar};
use crate::facilitator::Question;
use crate::json;
use crate::money::Network;
use crate::x402::Offer;

/// By network; one that is missing is the operator's to resolve.
pub type Chains = BTreeMap<Network, Arc<Stellar>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolved {
    Settled,
    /// Dead and unused: the payer may pay again.
    Failed,
    StillUnknown,
    /// Another one has the claim, or it ended meanwhile.
    Lost,
}

/// What came of one look at a claim.
pub struct Swept {
    pub claim: Claim,
    pub resolved: Resolved,
    /// Of a settled one.
    pub receipt: Option<Box<RawValue>>,
}

const SHORTEST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(300);
/// Where no chain ends it: only the facilitator's yes or a person can, perhaps never.
const LONGEST_ALONE: Duration = Duration::from_secs(3_600);

impl Seller {
    /// At most `most` claims that are due, all at once: their leases began together.
    /// A claim whose end could not be written is left out: it is due again.
    pub async fn sweep(&self, chains: &Chains, most: u32, now_ms: u64) -> Result<Vec<Swept>, ClaimError> {
        let due = self.claims.due(most).await?;
        let swept = join_all(due.into_iter().map(|due| self.resolve(due, chains, now_ms))).await;
        let written = |swept: Result<Swept, ClaimError>| {
            swept.inspect_err(|error| tracing::warn!(%error, "what became of a settlement could not be written")).ok()
        };
        Ok(swept.into_iter().filter_map(written).collect())
    }

    /// `now_ms`: by the store's clock, as near as it is known; it decides only when the claim is looked at again.
    async fn resolve(&self, due: Due, chains: &Chains, now_ms: u64) -> Result<Swept, ClaimError> {
        let Due { lease, claim } = due;
        let lost = |claim| Ok(Swept { claim, resolved: Resolved::Lost, receipt: None });
        let Ok(found) = self.holding(&lease, self.evidence(&claim, chains)).await else { return lost(claim) };
        let (arrow, resolved, receipt, reason) = match &found {
            Evidence::Receipt(receipt) => (Arrow::PROVED, Resolved::Settled, Some(&**receipt), None),
            Evidence::Unused => (Arrow::DISPROVED, Resolved::Failed, None, Some("expired_unspent")),
            Evidence::Nothing(why) => (Arrow::STILL_UNKNOWN, Resolved::StillUnknown, None, Some(why.as_str())),
        };
        // The longer it is open, the rarer it is looked at.
        let age = Duration::from_millis(now_ms.saturating_sub(claim.created_ms));
        let has_chain = claim.network.parse::<Network>().is_ok_and(|network| chains.contains_key(&network));
        let again_in = Some((age / 4).clamp(SHORTEST, if has_chain { LONGEST } else { LONGEST_ALONE }));
        let change = Change { receipt, reason, again_in, ..Change::default() };
        if self.claims.advance(&lease, arrow, change).await? == Err(Lost) {
            return lost(claim);
        }
        let receipt = if let Evidence::Receipt(receipt) = found { Some(receipt) } else { None };
        Ok(Swept { claim, resolved, receipt })
    }

    /// A payment that failed after a settle went out is presented again: has it settled after all?
    pub(super) async fn look_again(&self, claim: &Claim, chains: &Chains) -> Result<Again, ClaimError> {
        let chain = claim.network.parse::<Network>().ok().and_then(|network| chains.get(&network));
        let Some(chain) = chain else { return Ok(Again::NotUsed) };
        let Some(lease) = self.claims.take(&claim.identity, State::Failed, false).await? else {
            return Ok(Again::Busy);
        };
        let Ok(found) = self.holding(&lease, on_stellar(chain, claim)).await else { return Ok(Again::Busy) };
        let (arrow, receipt) = match &found {
            Evidence::Receipt(receipt) => (Arrow::FOUND, Some(&**receipt)),
            Evidence::Unused | Evidence::Nothing(_) => (Arrow::STILL_FAILED, None),
        };
        let change = Change { receipt, reason: claim.reason.as_deref(), ..Change::default() };
        Ok(match (self.claims.advance(&lease, arrow, change).await?, found) {
            (Err(Lost), _) => Again::Busy,
            (Ok(()), Evidence::Receipt(receipt)) => Again::Settled(receipt),
            (Ok(()), Evidence::Unused | Evidence::Nothing(_)) => Again::NotUsed,
        })
    }

    async fn evidence(&self, claim: &Claim, chains: &Chains) -> Evidence {
        let Ok(network) = claim.network.parse::<Network>() else { return Evidence::nothing("unreadable_network") };
        match (self.claims.settle_request(&claim.identity).await, self.facilitators.get(&network)) {
            (Ok(Some(kept)), Some(facilitator)) => {
                let said = facilitator.settle_exactly(&Question::kept(kept), self.settings.facilitator).await;
                let settlement = said.as_ref().map(|(_, settlement)| settlement);
                if judge(settlement, &network, &claim.payer, false, true) == Judged::Settled
                    && let Ok((receipt, _)) = said
                {
                    return Evidence::Receipt(receipt);
                }
            }
            (Ok(_), _) => {}
            // The chain can still tell.
            (Err(error), _) => tracing::error!(%error, "a settle request cannot be asked again"),
        }
        match chains.get(&network) {
            Some(chain) => on_stellar(chain, claim).await,
            None => Evidence::nothing("operator_resolves"),
        }
    }
}

pub(super) enum Again {
    /// The receipt.
    Settled(Box<RawValue>),
    /// Or nobody can tell.
    NotUsed,
    /// Another one looks.
    Busy,
}

enum Evidence {
    Receipt(Box<RawValue>),
    Unused,
    Nothing(String),
}

impl Evidence {
    fn nothing(why: &str) -> Evidence {
        Evidence::Nothing(why.to_owned())
    }
}

/// What a Stellar chain is asked about a claim, whose `offer` is its frozen one.
pub fn question<'a>(claim: &'a Claim, offer: &'a Offer) -> Option<NonceQuestion<'a>> {
    let ledger = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    Some(NonceQuestion {
        payer: &claim.payer,
        pay_to: &offer.pay_to,
        asset: offer.asset.as_str(),
        nonce: claim.nonce.parse().ok()?,
        amount: Some(offer.amount),
        expiration: ledger(claim.dies_at),
        reserved_at: ledger(claim.seen_at),
        reserved_ms: claim.created_ms,
    })
}

/// What a facilitator would have said of a settlement that was proved otherwise. `transaction` may be empty.
pub fn receipt(claim: &Claim, transaction: &str) -> Box<RawValue> {
    json::raw(&json!({
        "success": true,
        "transaction": transaction,
        "network": claim.network,
        "payer": claim.payer,
    }))
}

async fn on_stellar(chain: &Stellar, claim: &Claim) -> Evidence {
    let offer = Offer::parse(&claim.offer).ok();
    let Some(question) = offer.as_ref().and_then(|offer| question(claim, offer)) else {
        return Evidence::nothing("unreadable_claim");
    };
    match chain.nonce_reading(question).await {
        NonceReading::Used { ledger } => {
            let used = u32::try_from(ledger).unwrap_or(u32::MAX);
            match chain.transaction_of(question, used).await {
                Some(transaction) => Evidence::Receipt(receipt(claim, &transaction)),
                None => Evidence::nothing("no_rpc_shows_the_payment"),
            }
        }
        NonceReading::Dead | NonceReading::Cancelled => Evidence::Unused,
        NonceReading::Open => Evidence::nothing("still_alive"),
        NonceReading::Inconclusive(why) => Evidence::Nothing(format!("inconclusive: {why}")),
    }
}
