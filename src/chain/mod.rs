//! The chains: what to sign, whether a nonce is used, what time it is there. `stellar` now; `evm` comes later.

pub mod stellar;

#[derive(Debug, Clone, thiserror::Error)]
pub enum ChainError {
    #[error("no chain RPC could be asked: {0}")]
    Unreachable(String),
    /// An answer contradicts what we know: wrong network, a ledger that ran ahead or stands still, another invocation.
    #[error("a chain RPC gives answers that cannot be right: {0}")]
    Lying(String),
    #[error("the chain refuses: {0}")]
    Refused(String),
    #[error("{0}")]
    Unsupported(String),
}

/// What is asked about one authorization, in the terms of its chain.
#[derive(Debug, Clone, Copy)]
pub enum Question<'a> {
    Stellar(stellar::NonceQuestion<'a>),
}

/// What one look at the chain proves about an authorization (`x402.md` section 8).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NonceReading {
    /// Consumed by a successful transaction, in this ledger.
    Used { ledger: u64 },
    /// EVM: spoiled for good without a payment (`AuthorizationCanceled`, an invalidated Permit2 nonce), finally.
    Cancelled,
    /// Not consumed, and still can be.
    Open,
    /// Conclusive: never consumed, and cannot be any more.
    Dead,
    /// Nothing can be concluded; the words say why (RPCs disagree, unreachable, beyond the entry's life).
    Inconclusive(String),
}
