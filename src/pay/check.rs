//! Is the seller's receipt right? It is an unauthenticated claim: what it says is booked only where it names our
//! network, our payer, a transaction, and no more than was authorized. Everything else the chain decides.

use super::terms::Terms;
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

pub(super) fn receipt(claim: &Settlement, terms: &Terms) -> Verdict {
    if claim.is_pending() {
        return Verdict::Pending;
    }
    if !claim.success {
        return Verdict::Failed;
    }
    let network = &terms.unit.network;
    if claim.network != network.as_str() {
        return Verdict::Mismatch("network");
    }
    if claim.payer.as_deref().is_some_and(|claimed| claimed != terms.payer) {
        return Verdict::Mismatch("payer");
    }
    let Some(transaction) = transaction(network, &claim.transaction) else { return Verdict::Mismatch("transaction") };
    match claim.amount.as_deref().map(str::parse::<Amount>) {
        None => {}
        Some(Ok(amount)) if amount <= terms.authorized => {}
        Some(_) => return Verdict::Mismatch("amount"),
    }
    // The signed transfer of `exact` moves its whole amount or nothing, whatever smaller number the seller writes.
    Verdict::Right { settled: terms.authorized, transaction }
}

/// A Stellar transaction hash: 64 hex digits, lower case, so that one transaction has one spelling in the ledger.
fn transaction(network: &Network, claimed: &str) -> Option<String> {
    if network.namespace() != "stellar" {
        return (!claimed.is_empty()).then(|| claimed.to_owned());
    }
    let hash = claimed.len() == 64 && claimed.bytes().all(|b| b.is_ascii_hexdigit());
    hash.then(|| claimed.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::money::{PaymentId, Unit};

    const PAYER: &str = "GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H";

    fn terms() -> Terms {
        Terms {
            id: PaymentId::from_bytes([7; 32]),
            agent: "local".parse().unwrap(),
            keyless: true,
            resource_ref: String::new(),
            version_hash: String::new(),
            unit: Unit { network: "stellar:testnet".parse().unwrap(), asset: "A".parse().unwrap() },
            scheme: "exact".into(),
            pay_to: "B".into(),
            payer: PAYER.into(),
            authorized: Amount::from_u64(10_000),
            origin: None,
            booked: None,
        }
    }

    fn verdict(change: impl FnOnce(&mut Settlement)) -> Verdict {
        let mut claim = Settlement {
            success: true,
            error_reason: None,
            payer: Some(PAYER.into()),
            transaction: "AB".repeat(32),
            network: "stellar:testnet".into(),
            amount: None,
        };
        change(&mut claim);
        receipt(&claim, &terms())
    }

    #[test]
    fn a_right_receipt_books_what_was_signed_under_one_spelling_of_the_transaction() {
        let right = Verdict::Right { settled: Amount::from_u64(10_000), transaction: "ab".repeat(32) };
        assert_eq!(verdict(|_| ()), right);
        assert_eq!(verdict(|c| c.payer = None), right);
        assert_eq!(verdict(|c| c.amount = Some("10000".into())), right);
        assert_eq!(verdict(|c| c.amount = Some("1".into())), right, "exact moves its whole amount");
    }

    #[test]
    fn whatever_is_wrong_in_a_receipt_is_named() {
        assert_eq!(verdict(|c| c.network = "stellar:pubnet".into()), Verdict::Mismatch("network"));
        assert_eq!(verdict(|c| c.payer = Some("GX".into())), Verdict::Mismatch("payer"));
        for transaction in ["", "0x", &"g".repeat(64), &"a".repeat(63)] {
            assert_eq!(verdict(|c| c.transaction = transaction.to_owned()), Verdict::Mismatch("transaction"));
        }
        for amount in ["10001", "-1", "1e3", ""] {
            assert_eq!(verdict(|c| c.amount = Some(amount.into())), Verdict::Mismatch("amount"), "{amount}");
        }
    }

    #[test]
    fn a_sellers_no_is_never_more_than_a_no() {
        assert_eq!(verdict(|c| c.success = false), Verdict::Failed);
        let pending = |c: &mut Settlement| {
            c.success = false;
            c.error_reason = Some("settlement_pending".into());
        };
        assert_eq!(verdict(pending), Verdict::Pending);
    }
}
