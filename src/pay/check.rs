//! Is the seller's receipt right? It is an unauthenticated claim: what it says is booked only where it names our
//! network, our payer, a transaction, and no more than was authorized. Everything else the chain decides.

use crate::guard::Quote;
use crate::money::{Amount, Network};
use crate::x402::Settlement;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// What is booked, and the transaction's name in its one spelling.
    Right { settled: Amount, transaction: String },
    /// `success: false`.
    Failed,
    /// `settlement_pending`.
    Pending,
    /// The member that is wrong.
    Mismatch(&'static str),
}

pub(super) fn receipt(claim: &Settlement, quote: &Quote, payer: &str) -> Verdict {
    if claim.is_pending() {
        return Verdict::Pending;
    }
    if !claim.success {
        return Verdict::Failed;
    }
    let network = &quote.offer.network;
    if claim.network != network.as_str() {
        return Verdict::Mismatch("network");
    }
    if claim.payer.as_deref().is_some_and(|claimed| claimed != payer) {
        return Verdict::Mismatch("payer");
    }
    let Some(transaction) = transaction(network, &claim.transaction) else { return Verdict::Mismatch("transaction") };
    match claim.amount.as_deref().map(str::parse::<Amount>) {
        None => {}
        Some(Ok(amount)) if amount <= quote.amount() => {}
        Some(_) => return Verdict::Mismatch("amount"),
    }
    // The signed transfer of `exact` moves its whole amount or nothing, whatever smaller number the seller writes.
    Verdict::Right { settled: quote.amount(), transaction }
}

/// A Stellar transaction hash: 64 hex digits, lower case, so that one transaction has one spelling in the ledger.
fn transaction(network: &Network, claimed: &str) -> Option<String> {
    if network.namespace() != "stellar" {
        return (!claimed.is_empty()).then(|| claimed.to_owned());
    }
    let hash = claimed.len() == 64 && claimed.bytes().all(|b| b.is_ascii_hexdigit());
    hash.then(|| claimed.to_ascii_lowercase())
}
