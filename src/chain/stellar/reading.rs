//! Is this nonce used? What one look at the chain proves (`x402.md` section 8.3 of the design; the rule is the host's
//! `consume_nonce`): the nonce entry exists only where our signed transfer ran in a successful transaction, and it lives
//! at least until `max(E, S + M - 1)`, with E the expiration ledger, S the ledger known at reservation and M the
//! network's minimum temporary TTL.

use std::time::Duration;

use stellar_xdr::{
    ConfigSettingEntry, ConfigSettingId, FeeBumpTransactionInnerTx, LedgerEntryData, LedgerKey, LedgerKeyConfigSetting,
    OperationBody, ReadXdr, ScAddress, ScVal, SorobanCredentials, TransactionEnvelope, WriteXdr,
};

use tokio::time::Instant;

use super::entry;
use super::rpc::{Events, Health, LedgerEntries, Transaction};
use super::{ChainError, Stellar};
use crate::chain::NonceReading;

/// Pages of events that one look reads at most.
const MAX_EVENT_PAGES: usize = 50;
/// An RPC scans at most this many ledgers for one request, and an empty page does not say that it stopped short.
const MAX_EVENT_LEDGERS: u32 = 10_000;
/// The network can vote for another setting.
const SETTING_LIFE: Duration = Duration::from_secs(3600);

/// What is asked about: the payment's own facts, as the row keeps them.
#[derive(Debug, Clone, Copy)]
pub struct NonceQuestion<'a> {
    pub payer: &'a str,
    pub pay_to: &'a str,
    pub asset: &'a str,
    pub nonce: i64,
    /// E.
    pub expiration: u32,
    /// S.
    pub reserved_at: u32,
}

enum Look {
    Present { ledger: u32 },
    Absent { at: u32 },
}

impl Stellar {
    /// Positive evidence needs one RPC, negative evidence all of them.
    pub async fn nonce_reading(&self, question: NonceQuestion<'_>) -> NonceReading {
        let Ok(payer) = entry::address(question.payer, "payer") else {
            return NonceReading::Inconclusive("the payer's address cannot be read".into());
        };
        let key = entry::nonce_key(&payer, question.nonce);
        let (looks, failed) = self.ask_all(|index| self.look(index, &key)).await;
        let (mut latest, mut impossible) = (Vec::new(), None);
        for look in &looks {
            match look {
                Look::Present { ledger } if (question.reserved_at..=question.expiration).contains(ledger) => {
                    return NonceReading::Used { ledger: u64::from(*ledger) };
                }
                Look::Present { ledger } => {
                    impossible =
                        Some(format!("an RPC has the nonce used in ledger {ledger}, where it cannot have been"));
                }
                Look::Absent { at } => latest.push(*at),
            }
        }
        if let Some(why) = impossible.or_else(|| failed.first().map(ToString::to_string)) {
            return NonceReading::Inconclusive(why);
        }
        let (Some(first), Some(last)) = (latest.iter().min(), latest.iter().max()) else {
            return NonceReading::Inconclusive("no RPC answered".into());
        };
        if *first < question.expiration {
            return NonceReading::Open;
        }
        // The answer has no close time of its own: dead is dead by the chain's time, not by a number alone.
        match self.has_come(*last).await {
            Ok(true) => {}
            Ok(false) => {
                return NonceReading::Inconclusive(format!("an RPC is at ledger {last}, which cannot have come yet"));
            }
            Err(error) => return NonceReading::Inconclusive(error.to_string()),
        }
        let minimum = match self.min_temporary_ttl().await {
            Ok(minimum) => minimum,
            Err(error) => return NonceReading::Inconclusive(format!("the minimum temporary TTL: {error}")),
        };
        let conclusive_until = question.reserved_at.saturating_add(minimum).saturating_sub(1).max(question.expiration);
        if *last <= conclusive_until {
            return NonceReading::Dead;
        }
        // The entry may have expired: only the complete event history of the authorization's life decides now.
        let (histories, failed) = self.ask_all(|index| self.history(index, question)).await;
        if let Some(ledger) = histories.iter().flatten().next() {
            return NonceReading::Used { ledger: u64::from(*ledger) };
        }
        match failed.first() {
            Some(error) => NonceReading::Inconclusive(error.to_string()),
            None if histories.is_empty() => NonceReading::Inconclusive("no RPC answered".into()),
            None => NonceReading::Dead,
        }
    }

    async fn look(&self, index: usize, key: &LedgerKey) -> Result<Look, ChainError> {
        let text = encode(key)?;
        let params = serde_json::json!({"keys": [text]});
        let answer: LedgerEntries = self.checked(index).await?.call("getLedgerEntries", &params).await?;
        let found = answer.entries.unwrap_or_default().into_iter().find(|e| e.key == text);
        Ok(match found {
            Some(entry) => Look::Present { ledger: entry.last_modified_ledger_seq },
            None => Look::Absent { at: answer.latest_ledger },
        })
    }

    /// The network's own setting; never assumed.
    async fn min_temporary_ttl(&self) -> Result<u32, ChainError> {
        if let Some((at, known)) = self.cache().min_temporary_ttl
            && at.elapsed() <= SETTING_LIFE
        {
            return Ok(known);
        }
        let key =
            LedgerKey::ConfigSetting(LedgerKeyConfigSetting { config_setting_id: ConfigSettingId::StateArchival });
        let params = serde_json::json!({"keys": [encode(&key)?]});
        let (answers, failed) = self
            .ask_all(|index| {
                let params = &params;
                async move { self.checked(index).await?.call::<LedgerEntries>("getLedgerEntries", params).await }
            })
            .await;
        let read = |answer: &LedgerEntries| {
            let entry = answer.entries.as_ref()?.first()?;
            match LedgerEntryData::from_xdr_base64(&entry.xdr, entry::XDR).ok()? {
                LedgerEntryData::ConfigSetting(ConfigSettingEntry::StateArchival(settings)) => {
                    Some(settings.min_temporary_ttl)
                }
                _ => None,
            }
        };
        // The smallest, and all of them: one that says more than is true would make an expired entry look unused.
        let settings: Option<Vec<u32>> = answers.iter().map(read).collect();
        match settings.as_ref().and_then(|all| all.iter().min()) {
            Some(minimum) if failed.is_empty() => {
                self.cache().min_temporary_ttl = Some((Instant::now(), *minimum));
                Ok(*minimum)
            }
            _ => Err(failed
                .into_iter()
                .next()
                .unwrap_or_else(|| ChainError::Unreachable("the network's setting cannot be read".into()))),
        }
    }

    /// The ledger in which a transaction used the nonce, from the complete history of [S, E]; `Err` where it is not
    /// complete.
    async fn history(&self, index: usize, question: NonceQuestion<'_>) -> Result<Option<u32>, ChainError> {
        let rpc = self.checked(index).await?;
        let health: Health = rpc.call("getHealth", &serde_json::json!({})).await?;
        let gone = || ChainError::Unreachable(format!("{} no longer keeps the payment's ledgers", rpc.name()));
        if health.oldest_ledger > question.reserved_at
            || question.expiration.saturating_sub(question.reserved_at) >= MAX_EVENT_LEDGERS
        {
            return Err(gone());
        }
        let topic = |value: ScVal| encode(&value);
        let payer = entry::address(question.payer, "payer")?;
        let topics = [
            topic(ScVal::Symbol(entry::symbol("transfer")))?,
            topic(ScVal::Address(payer.clone()))?,
            topic(ScVal::Address(entry::address(question.pay_to, "payTo")?))?,
            "**".to_owned(),
        ];
        let filters = serde_json::json!([{"type": "contract", "contractIds": [question.asset], "topics": [topics]}]);
        let mut params = serde_json::json!({
            "startLedger": question.reserved_at, "endLedger": question.expiration.saturating_add(1),
            "filters": filters, "pagination": {"limit": 100},
        });
        for _ in 0..MAX_EVENT_PAGES {
            let page: Events = rpc.call("getEvents", &params).await?;
            if page.oldest_ledger.is_some_and(|oldest| oldest > question.reserved_at) {
                return Err(gone());
            }
            for event in &page.events {
                let found: Transaction =
                    rpc.call("getTransaction", &serde_json::json!({"hash": event.tx_hash})).await?;
                let envelope = found.envelope_xdr.ok_or_else(gone)?;
                let envelope = TransactionEnvelope::from_xdr_base64(&envelope, entry::XDR).map_err(|_| gone())?;
                if found.status == "SUCCESS" && uses_nonce(&envelope, &payer, question.nonce) {
                    return Ok(Some(event.ledger));
                }
            }
            match page.cursor {
                Some(cursor) if page.events.len() >= 100 => {
                    params = serde_json::json!({"filters": filters, "pagination": {"limit": 100, "cursor": cursor}});
                }
                _ => return Ok(None),
            }
        }
        Err(ChainError::Unreachable(format!("{} has more events than one look reads", rpc.name())))
    }
}

fn uses_nonce(envelope: &TransactionEnvelope, payer: &ScAddress, nonce: i64) -> bool {
    let tx = match envelope {
        TransactionEnvelope::Tx(envelope) => &envelope.tx,
        TransactionEnvelope::TxFeeBump(bump) => {
            let FeeBumpTransactionInnerTx::Tx(inner) = &bump.tx.inner_tx;
            &inner.tx
        }
        TransactionEnvelope::TxV0(_) => return false,
    };
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

fn encode(value: &impl WriteXdr) -> Result<String, ChainError> {
    value.to_xdr_base64(entry::XDR).map_err(|_| ChainError::Unsupported("a key that cannot be encoded".into()))
}
