//! Pure policy: (listing, live challenge, call, rules) -> [`Quote`] or a refusal. No I/O. Only this module makes a
//! `Quote`, and every later step uses the offer that is frozen in it.

use serde_json::value::RawValue;

use crate::money::{AgentId, Amount, IdempotencyKey, Unit};
use crate::upstream::Endpoint;
use crate::x402::Offer;

/// One offer, chosen and frozen. Consumed by the reservation, so nothing unguarded can be reserved or signed.
#[derive(Debug)]
#[must_use]
pub struct Quote {
    pub(crate) agent: AgentId,
    pub(crate) session: Option<String>,
    pub(crate) idempotency_key: Option<IdempotencyKey>,
    pub(crate) call_hash: [u8; 32],
    pub(crate) resource_ref: String,
    pub(crate) version_hash: String,
    pub(crate) endpoint: Endpoint,
    pub(crate) tool: String,
    pub(crate) offer: Offer,
    pub(crate) max_amount: Amount,
    /// The challenge's `resource` and `extensions`, to be echoed.
    pub(crate) resource: Box<RawValue>,
    pub(crate) extensions: Option<Box<RawValue>>,
}

impl Quote {
    pub fn unit(&self) -> Unit {
        Unit { network: self.offer.network.clone(), asset: self.offer.asset.clone() }
    }
    pub fn amount(&self) -> Amount {
        self.offer.amount
    }
}
