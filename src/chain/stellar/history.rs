//! Which transaction used a nonce? Events say which transactions moved the token from the payer to the recipient; only
//! the transaction's own envelope says whose authorization it carried: an equal amount proves nothing (`x402.md` 8.3).

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use stellar_xdr::{
    ContractDataDurability, ContractExecutable, FeeBumpTransactionInnerTx, LedgerEntryData, LedgerKey,
    LedgerKeyContractData, OperationBody, ReadXdr, ScAddress, ScVal, SorobanCredentials, TransactionEnvelope,
};

use super::entry;
use super::presented::PresentedTransfer;
use super::reading::NonceQuestion;
use super::rpc::{Entry, Events, Health, LedgerEntries, Rpc, Transaction, encode};
use super::{ChainError, Stellar};
use crate::money::Amount;

/// Pages of events that one look reads at most.
const MAX_EVENT_PAGES: usize = 50;
const PAGE: usize = 100;
/// An RPC scans at most this many ledgers for one request, and an empty page does not say that it stopped short.
const MAX_EVENT_LEDGERS: u32 = 10_000;

/// What the chain says of a transaction that is said to have used a nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsedBy {
    /// Successful, and it carries our authorization.
    This { ledger: u32 },
    /// Successful, without our authorization.
    Another { ledger: u32 },
    /// It failed: it moved nothing.
    Failed { ledger: u32 },
    /// No RPC knows it.
    NotFound,
}

impl Stellar {
    /// The hash of the transaction that used the nonce in `ledger`, from the first RPC that can show it. `None`: no RPC
    /// keeps that ledger any more, or has too many events in it.
    pub async fn transaction_of(&self, question: NonceQuestion<'_>, ledger: u32) -> Option<String> {
        for index in 0..self.rpcs.len() {
            let found = match self.checked(index).await {
                Ok(rpc) => self.in_events(rpc, question, ledger..=ledger).await,
                Err(error) => Err(error),
            };
            match found {
                Ok(Some((hash, found))) if found == ledger => return Some(hash),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "the transaction of a used nonce was not found"),
            }
        }
        None
    }

    /// Whether the transaction `hash` (64 hex digits) used the nonce. One RPC that shows it is enough; that nobody knows
    /// it needs all of them.
    pub async fn used_by(&self, question: NonceQuestion<'_>, hash: &str) -> Result<UsedBy, ChainError> {
        if hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(ChainError::Unsupported("a transaction hash has 64 hex digits".into()));
        }
        let hash = hash.to_ascii_lowercase();
        let (answers, failed) = self
            .ask_all(|index| {
                let hash = &hash;
                async move { self.used_by_one(self.checked(index).await?, question, hash).await }
            })
            .await;
        let ours = answers.iter().find(|answer| matches!(answer, UsedBy::This { .. }));
        match (ours.or_else(|| answers.iter().find(|answer| **answer != UsedBy::NotFound)), failed.into_iter().next()) {
            (Some(answer), _) => Ok(*answer),
            (None, Some(error)) => Err(error),
            (None, None) if answers.is_empty() => Err(super::nobody()),
            (None, None) => Ok(UsedBy::NotFound),
        }
    }

    async fn used_by_one(&self, rpc: &Rpc, question: NonceQuestion<'_>, hash: &str) -> Result<UsedBy, ChainError> {
        let payer = entry::address(question.payer, "payer")?;
        let found: Transaction = rpc.call("getTransaction", &serde_json::json!({"hash": hash})).await?;
        let (ledger, envelope) = match (found.status.as_str(), found.ledger, found.envelope_xdr) {
            ("FAILED", Some(ledger), _) => return Ok(UsedBy::Failed { ledger }),
            ("SUCCESS", Some(ledger), Some(envelope)) => (ledger, envelope),
            _ => return Ok(UsedBy::NotFound),
        };
        let lie = |what: &str| ChainError::Lying(format!("{}: {what}", rpc.name()));
        let envelope = TransactionEnvelope::from_xdr_base64(&envelope, entry::XDR)
            .map_err(|_| lie("a transaction that cannot be read"))?;
        if !self.is_hash_of(hash, &envelope) {
            return Err(lie("a transaction under another's hash"));
        }
        let carries = match question.amount {
            None => uses_nonce(&envelope, &payer, question.nonce),
            Some(amount) => is_payment(&envelope, question, amount),
        };
        if !carries {
            return Ok(UsedBy::Another { ledger });
        }
        if ledger > question.expiration {
            return Err(lie("the nonce used in a ledger where it cannot have been"));
        }
        Ok(UsedBy::This { ledger })
    }

    /// A fee bump is known by its own hash and by that of the transaction inside.
    fn is_hash_of(&self, hash: &str, envelope: &TransactionEnvelope) -> bool {
        let is = |made: Result<[u8; 32], stellar_xdr::Error>| made.is_ok_and(|made| hex::encode(made) == hash);
        match envelope {
            TransactionEnvelope::TxFeeBump(bump) => {
                is(bump.tx.hash(self.network_id)) || is(bump.tx.inner_tx.hash(self.network_id))
            }
            TransactionEnvelope::Tx(inner) => is(inner.tx.hash(self.network_id)),
            TransactionEnvelope::TxV0(_) => false,
        }
    }

    /// The ledger in which a transaction used the nonce, from the complete history of [S, E]; `Err` where it is not
    /// complete.
    pub(super) async fn history(&self, index: usize, question: NonceQuestion<'_>) -> Result<Option<u32>, ChainError> {
        let rpc = self.checked(index).await?;
        let health: Health = rpc.call("getHealth", &serde_json::json!({})).await?;
        let (from, to) = (question.reserved_at, question.expiration);
        if health.oldest_ledger > from || to.saturating_sub(from) >= MAX_EVENT_LEDGERS {
            return Err(gone(rpc));
        }
        let found = self.in_events(rpc, question, from..=to).await?.map(|(_, ledger)| ledger);
        if found.is_none() && !is_asset_contract(rpc, question.asset).await? {
            // It may move balances without a word.
            return Err(ChainError::Unsupported("events of a token that is no Stellar asset prove no absence".into()));
        }
        Ok(found)
    }

    /// The transaction (its hash and ledger) that used the nonce in these ledgers; `None` only where the RPC has shown
    /// all of them.
    async fn in_events(
        &self,
        rpc: &Rpc,
        question: NonceQuestion<'_>,
        ledgers: RangeInclusive<u32>,
    ) -> Result<Option<(String, u32)>, ChainError> {
        let event = |name: &str| encode(&ScVal::Symbol(entry::symbol(name)));
        let payer = encode(&ScVal::Address(entry::address(question.payer, "payer")?))?;
        let pay_to = encode(&ScVal::Address(entry::address(question.pay_to, "payTo")?))?;
        let (any, rest) = ("*".to_owned(), "**".to_owned());
        // A transfer to the asset's issuer is told as a burn, one from the issuer as a mint (CAP-46-6; with the
        // administrator before the recipient until CAP-67).
        let topics = [
            vec![event("transfer")?, payer.clone(), pay_to.clone(), rest.clone()],
            vec![event("burn")?, payer, rest.clone()],
            vec![event("mint")?, pay_to.clone(), rest.clone()],
            vec![event("mint")?, any, pay_to, rest],
        ];
        let filters = serde_json::json!([{"type": "contract", "contractIds": [question.asset], "topics": topics}]);
        let mut params = serde_json::json!({
            "startLedger": ledgers.start(), "endLedger": ledgers.end().saturating_add(1),
            "filters": filters, "pagination": {"limit": PAGE},
        });
        let mut seen = BTreeSet::new();
        for _ in 0..MAX_EVENT_PAGES {
            let page: Events = rpc.call("getEvents", &params).await?;
            // Behind one address there may be several nodes, and this one may lag or keep less.
            if page.latest_ledger < *ledgers.end() || page.oldest_ledger.is_some_and(|o| o > *ledgers.start()) {
                return Err(gone(rpc));
            }
            let full = page.events.len() >= PAGE;
            for event in page.events {
                let hash = event.tx_hash.to_ascii_lowercase();
                if !seen.insert(hash.clone()) {
                    continue;
                }
                match self.used_by_one(rpc, question, &hash).await? {
                    UsedBy::This { ledger } => return Ok(Some((hash, ledger))),
                    UsedBy::Another { .. } | UsedBy::Failed { .. } => {}
                    UsedBy::NotFound => return Err(gone(rpc)),
                }
            }
            match page.cursor {
                Some(cursor) if full => {
                    params = serde_json::json!({"filters": filters, "pagination": {"limit": PAGE, "cursor": cursor}});
                }
                None if full => break,
                _ => return Ok(None),
            }
        }
        Err(ChainError::Unreachable(format!("{} has more events than one look reads", rpc.name())))
    }
}

/// Whether the host's own asset contract serves this address: its transfers always leave an event (CAP-46-6).
async fn is_asset_contract(rpc: &Rpc, asset: &str) -> Result<bool, ChainError> {
    let key = LedgerKey::ContractData(LedgerKeyContractData {
        contract: entry::address(asset, "asset")?,
        key: ScVal::LedgerKeyContractInstance,
        durability: ContractDataDurability::Persistent,
    });
    let answer: LedgerEntries = rpc.call("getLedgerEntries", &serde_json::json!({"keys": [encode(&key)?]})).await?;
    let unread = || ChainError::Unreachable(format!("{}: the asset's contract cannot be read", rpc.name()));
    let entry = answer.entries.as_deref().and_then(<[Entry]>::first).ok_or_else(unread)?;
    match LedgerEntryData::from_xdr_base64(&entry.xdr, entry::XDR).map_err(|_| unread())? {
        LedgerEntryData::ContractData(data) => match data.val {
            ScVal::ContractInstance(instance) => Ok(instance.executable == ContractExecutable::StellarAsset),
            _ => Err(unread()),
        },
        _ => Err(unread()),
    }
}

fn gone(rpc: &Rpc) -> ChainError {
    ChainError::Unreachable(format!("{} no longer keeps the payment's ledgers", rpc.name()))
}

fn transaction(envelope: &TransactionEnvelope) -> Option<&stellar_xdr::Transaction> {
    match envelope {
        TransactionEnvelope::Tx(envelope) => Some(&envelope.tx),
        TransactionEnvelope::TxFeeBump(bump) => {
            let FeeBumpTransactionInnerTx::Tx(inner) = &bump.tx.inner_tx;
            Some(&inner.tx)
        }
        TransactionEnvelope::TxV0(_) => None,
    }
}

/// The transfer of this amount by the authorization with this nonce, and nothing else: an authorization that only lies
/// beside other calls may be unused, and its nonce spent elsewhere.
fn is_payment(envelope: &TransactionEnvelope, question: NonceQuestion<'_>, amount: Amount) -> bool {
    let read = transaction(envelope).map(PresentedTransfer::of);
    let Some(Ok(payment)) = read else { return false };
    let transfer = payment.transfer();
    payment.nonce() == question.nonce
        && (transfer.payer.as_str(), transfer.pay_to.as_str(), transfer.asset.as_str(), transfer.amount)
            == (question.payer, question.pay_to, question.asset, amount)
}

pub(super) fn uses_nonce(envelope: &TransactionEnvelope, payer: &ScAddress, nonce: i64) -> bool {
    let Some(tx) = transaction(envelope) else { return false };
    tx.operations.iter().any(|operation| match &operation.body {
        OperationBody::InvokeHostFunction(invoke) => invoke.auth.iter().any(|entry| match &entry.credentials {
            SorobanCredentials::Address(c) | SorobanCredentials::AddressV2(c) => {
                c.nonce == nonce && c.address == *payer
            }
            _ => false,
        }),
        _ => false,
    })
}
