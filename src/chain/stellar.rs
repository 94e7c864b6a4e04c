//! Stellar `exact`: we build the transfer and its one authorization entry ourselves and sign that; the RPC gives ledger
//! number, fee and footprint, and is believed in nothing that decides where money goes.

use super::ChainError;
use crate::money::Amount;

/// The newest ledger, as far as the RPCs can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerPoint {
    pub sequence: u32,
    /// Unix seconds.
    pub closed_at: u64,
}

/// A transfer and its authorization entry, unsigned: nonce, expiration and credential arm are fixed.
#[derive(Debug)]
pub struct Draft {}

impl Draft {
    pub fn nonce(&self) -> i64 {
        0
    }
    pub fn expiration(&self) -> u32 {
        0
    }
}

/// The entry with its signature, verified against the payer's key.
pub struct SignedEntry {}

/// A payer's balance of one asset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    Of(Amount),
    /// A G-account without a trustline for the asset.
    NoTrustline,
}

#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The simulation answered with an invocation or authorization that is not ours.
    #[error("a chain RPC answered with another payment than ours")]
    Lying,
    #[error("the simulation failed: {0}")]
    Failed(String),
    #[error("the simulation's answer was lost: {0}")]
    Lost(#[from] ChainError),
}
