//! What may be signed: decided on the decoded transfer alone. What the caller says about it can only contradict it.
//! Whatever no entry allows is refused.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use super::transfer::Asked;
use crate::money::{Amount, Network};
use crate::signer::wire::SignRequest;

/// Why nothing was signed. Each is certain: no signature was made, and none will be for this request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum No {
    #[error("the bearer key is not one of mine")]
    Unauthorized,
    #[error("the caller asks more often than it may")]
    TooMany,
    #[error("the request has another form than the contract's")]
    Malformed,
    #[error("the preimage is not the base64 XDR of a HashIdPreimage")]
    Unreadable,
    #[error("the preimage is not that of a Soroban authorization")]
    NotAnAuthorization,
    #[error("the invocation is not transfer(from, to, amount) with an amount above zero")]
    NotATransfer,
    #[error("the invocation has another one underneath")]
    SubInvocations,
    #[error("the money is another account's")]
    NotMyAccount,
    #[error("the authorization is for a network that is not allowed")]
    NetworkNotAllowed,
    #[error("the caller names another network or passphrase than the authorization is for")]
    NetworkMismatch,
    #[error("the token contract is not allowed")]
    AssetNotAllowed,
    #[error("the recipient is not allowed")]
    RecipientNotAllowed,
    #[error("the amount is above what one signature may move")]
    AmountTooLarge,
    #[error("the amount is above what is left of the day")]
    DayCap,
    #[error("the authorization would live longer than allowed")]
    LifeTooLong,
    #[error("the authorization is dead already")]
    Expired,
    #[error("the ledger number is not known: no chain RPC can be believed")]
    LedgerUnknown,
    #[error("the nonce was signed with other contents")]
    NonceReused,
    #[error("the moment after which nothing may be signed has passed")]
    TooLate,
    #[error("the database did not answer: whether the amount was counted is not known, nothing was signed")]
    StoreUnavailable,
}

impl No {
    /// The stable word on the wire, in the log and in the metrics.
    pub fn word(self) -> &'static str {
        match self {
            No::Unauthorized => "unauthorized",
            No::TooMany => "too_many_requests",
            No::Malformed => "malformed_request",
            No::Unreadable => "unreadable_preimage",
            No::NotAnAuthorization => "not_an_authorization",
            No::NotATransfer => "not_a_transfer",
            No::SubInvocations => "sub_invocations",
            No::NotMyAccount => "not_my_account",
            No::NetworkNotAllowed => "network_not_allowed",
            No::NetworkMismatch => "network_mismatch",
            No::AssetNotAllowed => "asset_not_allowed",
            No::RecipientNotAllowed => "recipient_not_allowed",
            No::AmountTooLarge => "amount_too_large",
            No::DayCap => "day_cap",
            No::LifeTooLong => "life_too_long",
            No::Expired => "expired",
            No::LedgerUnknown => "ledger_unknown",
            No::NonceReused => "nonce_reused",
            No::TooLate => "too_late",
            No::StoreUnavailable => "store_unavailable",
        }
    }

    /// One of `wire::REFUSALS`: the client may believe that nothing was signed.
    pub fn status(self) -> u16 {
        match self {
            No::Unauthorized => 401,
            No::Malformed | No::Unreadable => 422,
            _ => 403,
        }
    }
}

/// Nothing but what is written here.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    pub networks: BTreeMap<Network, NetworkPolicy>,
}

#[derive(Debug, Clone)]
pub struct NetworkPolicy {
    pub passphrase: String,
    /// Ledgers between the newest one and the last in which an authorization can be used.
    pub max_ledgers_ahead: u32,
    /// Where the newest ledger is known from.
    pub ledger: LedgerSource,
    /// By token contract (`C…`).
    pub assets: BTreeMap<String, AssetPolicy>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerSource {
    /// The chain RPCs of this network.
    Rpc,
    /// Counted from a ledger that the operator wrote down. Ledgers are taken to close this fast; where they close
    /// slower, the bound on a life grows by the difference until the anchor is written anew.
    Anchor { sequence: u32, unix_ms: u64, ledger_ms: u64 },
}

#[derive(Debug, Clone)]
pub struct AssetPolicy {
    pub recipients: Recipients,
    /// Atomic units; `None` is `unlimited: true`.
    pub per_signature: Option<Amount>,
    /// Of one UTC day, over every caller and replica.
    pub per_day: Option<Amount>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recipients {
    Any,
    /// `G…` and `C…`.
    These(BTreeSet<String>),
}

impl NetworkPolicy {
    pub fn id(&self) -> [u8; 32] {
        Sha256::digest(&self.passphrase).into()
    }

    /// Whether the last ledger of an authorization lies within what is allowed at `newest`.
    pub fn life(&self, newest: u64, expiration: u32) -> Result<(), No> {
        let expiration = u64::from(expiration);
        if expiration < newest {
            return Err(No::Expired);
        }
        if expiration > newest.saturating_add(u64::from(self.max_ledgers_ahead)) {
            return Err(No::LifeTooLong);
        }
        Ok(())
    }
}

impl LedgerSource {
    /// The newest ledger by the anchor; `None` where the chain has to be asked.
    pub fn anchored(self, now_ms: u64) -> Option<u64> {
        match self {
            LedgerSource::Rpc => None,
            LedgerSource::Anchor { sequence, unix_ms, ledger_ms } => {
                Some(u64::from(sequence) + now_ms.saturating_sub(unix_ms) / ledger_ms.max(1))
            }
        }
    }
}

impl Policy {
    /// All that can be decided without a clock, the chain and what was signed before.
    pub fn judge<'a>(
        &'a self,
        asked: &Asked,
        said: &SignRequest<'_>,
        address: &str,
    ) -> Result<(&'a Network, &'a NetworkPolicy, &'a AssetPolicy), No> {
        let found = self.networks.iter().find(|(_, network)| network.id() == asked.network_id);
        let (name, network) = found.ok_or(No::NetworkNotAllowed)?;
        if said.network != name.as_str() || said.network_passphrase != network.passphrase.as_str() {
            return Err(No::NetworkMismatch);
        }
        if asked.payer != address || said.address != address {
            return Err(No::NotMyAccount);
        }
        let asset = network.assets.get(&asked.asset).ok_or(No::AssetNotAllowed)?;
        match &asset.recipients {
            Recipients::Any => {}
            Recipients::These(allowed) if allowed.contains(&asked.pay_to) => {}
            Recipients::These(_) => return Err(No::RecipientNotAllowed),
        }
        if asset.per_signature.is_some_and(|most| asked.amount > most) {
            return Err(No::AmountTooLarge);
        }
        Ok((name, network, asset))
    }
}
