//! What was signed, as judging an answer and writing a receipt need it: the same from a reservation and from its row.

use serde_json::value::RawValue;

use super::object::Object;
use crate::ledger::{Lease, Payment, Reserved};
use crate::money::{AgentId, Amount, PaymentId, Unit};
use crate::policy::Origin;
use crate::x402::assets;

#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub id: PaymentId,
    pub agent: AgentId,
    /// Without an idempotency key.
    pub keyless: bool,
    pub resource_ref: String,
    pub version_hash: String,
    pub unit: Unit,
    pub scheme: String,
    pub pay_to: String,
    pub payer: String,
    pub authorized: Amount,
    /// Where its bytes go; `None` where they are not at hand. The first settled payment pins its recipient to this.
    pub origin: Option<Origin>,
    /// The settlement that the ledger has already; a seller's receipt can then prove nothing more.
    pub booked: Option<Booked>,
}

#[derive(Debug, Clone)]
pub(super) struct Booked {
    pub amount: Amount,
    /// `None`: settled on the chain's evidence, which did not name it.
    pub transaction: Option<String>,
}

impl Terms {
    pub fn of_reserved(reserved: &Reserved) -> Terms {
        let quote = &reserved.quote;
        Terms {
            id: reserved.payment_id,
            agent: quote.agent.clone(),
            keyless: quote.idempotency_key.is_none(),
            resource_ref: quote.resource_ref.clone(),
            version_hash: quote.version_hash.clone(),
            unit: quote.unit(),
            scheme: quote.offer.scheme.clone(),
            pay_to: quote.offer.pay_to.clone(),
            payer: reserved.authorization.payer.clone(),
            authorized: quote.amount(),
            origin: Origin::of(&quote.endpoint.url),
            booked: None,
        }
    }

    pub fn of_row(row: &Payment) -> Terms {
        Terms {
            id: row.payment_id,
            agent: row.agent.clone(),
            keyless: row.idempotency_key.is_none(),
            resource_ref: row.resource_ref.clone(),
            version_hash: row.version_hash.clone(),
            unit: row.unit(),
            scheme: row.scheme.clone(),
            pay_to: row.pay_to.clone(),
            payer: row.authorization.payer.clone(),
            authorized: row.reserved,
            origin: None,
            booked: row.settled.map(|amount| Booked { amount, transaction: row.transaction.clone() }),
        }
    }

    /// `{paymentIdentifier, ref, versionHash, network, scheme, asset, payTo, authorizedAmount, settledAmount,
    /// transaction, status, display?}`
    pub fn receipt(&self, settled: Amount, transaction: Option<&str>) -> Box<RawValue> {
        Object::new()
            .with("paymentIdentifier", &self.id.to_hex())
            .with("ref", &self.resource_ref)
            .with("versionHash", &self.version_hash)
            .with("network", self.unit.network.as_str())
            .with("scheme", &self.scheme)
            .with("asset", self.unit.asset.as_str())
            .with("payTo", &self.pay_to)
            .with("authorizedAmount", &self.authorized.to_string())
            .with("settledAmount", &settled.to_string())
            .with("transaction", &transaction)
            .with("status", "settled")
            .maybe("display", assets::display(settled, &self.unit))
            .build()
    }

    /// The receipt of a row that is settled.
    pub fn booked_receipt(&self) -> Option<Box<RawValue>> {
        let booked = self.booked.as_ref()?;
        Some(self.receipt(booked.amount, booked.transaction.as_deref()))
    }
}

/// Who may move the row, and by which statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// Made the reservation.
    Owner,
    /// Sends stored bytes again.
    Recovery {
        /// The call brings answers to the seller's question.
        continues: bool,
    },
}

/// A row, and the lease under which it is worked on.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub terms: Terms,
    pub lease: Lease,
    pub holder: Holder,
}

impl Held {
    pub fn by_owner(reserved: &Reserved) -> Held {
        Held { terms: Terms::of_reserved(reserved), lease: reserved.lease.clone(), holder: Holder::Owner }
    }
}
