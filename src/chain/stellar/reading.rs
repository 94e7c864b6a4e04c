//! Is this nonce used? What one look at the chain proves (`x402.md` section 8.3 of the design; the rule is the host's
//! `consume_nonce`): the nonce entry exists only where our signed transfer ran in a successful transaction, and it lives
//! at least until `max(E, S + M - 1)`, with E the expiration ledger, S the ledger known at reservation and M the
//! network's minimum temporary TTL.

use std::time::Duration;

use stellar_xdr::{
    ConfigSettingEntry, ConfigSettingId, LedgerEntryData, LedgerKey, LedgerKeyConfigSetting, LedgerKeyContractData,
    ReadXdr,
};
use tokio::time::Instant;

use super::entry;
use super::rpc::{Entry, LedgerEntries, encode};
use super::{ChainError, Stellar};
use crate::chain::NonceReading;
use crate::money::Amount;

/// Ledgers by which a row's own start may be behind the newest one at its reservation.
const START_SLACK: u64 = 2;
/// The network can vote for another setting, but an entry keeps the life that it was given: a setting above the one
/// that every network has had proves nothing about older entries.
const LONGEST_BELIEVED_TTL: u32 = 17_280;
const SETTING_LIFE: Duration = Duration::from_secs(3600);

/// What is asked about: the payment's own facts, as the row keeps them.
#[derive(Debug, Clone, Copy)]
pub struct NonceQuestion<'a> {
    pub payer: &'a str,
    pub pay_to: &'a str,
    pub asset: &'a str,
    pub nonce: i64,
    /// `None`: the payer's key is ours, and signs nothing else with this nonce. `Some`: it is somebody else's, who can sign
    /// another call with the same nonce and spend it there: only a transaction that is this transfer of this amount counts
    /// as a use.
    pub amount: Option<Amount>,
    /// E.
    pub expiration: u32,
    /// S.
    pub reserved_at: u32,
    /// When the row was written, unix milliseconds; 0 where it is not known.
    pub reserved_ms: u64,
}

enum Look {
    Present { ledger: u32, at: u32 },
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
                // Not before S is no condition: S is what an RPC said, and one that ran ahead would hide a use for ever.
                Look::Present { ledger, at } if *ledger <= question.expiration.min(*at) => {
                    if question.amount.is_some() && self.transaction_of(question, *ledger).await.is_none() {
                        return NonceReading::Inconclusive(format!(
                            "the nonce was used in ledger {ledger}, and no RPC shows that this paid"
                        ));
                    }
                    return NonceReading::Used { ledger: u64::from(*ledger) };
                }
                Look::Present { ledger, .. } => {
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
        // The answer has no close time of its own: dead is dead by the chain's time, not by a number alone. The row
        // remembers a time too, which a process that has just started does not.
        let earliest = question.reserved_ms.saturating_add(self.shortest_ms(question.reserved_at, question.expiration));
        if self.world.unix_ms() < earliest {
            return NonceReading::Inconclusive(format!(
                "an RPC is at ledger {last}, but {} cannot have come yet since the payment was reserved",
                question.expiration
            ));
        }
        match self.has_come(*last).await {
            Ok(true) => {}
            Ok(false) => {
                return NonceReading::Inconclusive(format!("an RPC is at ledger {last}, which cannot have come yet"));
            }
            Err(error) => return NonceReading::Inconclusive(error.to_string()),
        }
        let minimum = match self.min_temporary_ttl().await {
            Ok(minimum) => minimum.min(LONGEST_BELIEVED_TTL),
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

    /// The shortest time in which the network gets from one ledger to another, milliseconds.
    fn shortest_ms(&self, from: u32, to: u32) -> u64 {
        let ledgers = u64::from(to.saturating_sub(from)).saturating_sub(START_SLACK);
        ledgers.saturating_mul(self.settings.min_ledger_ms)
    }

    /// An answer about anything but this one entry is no answer: read as absence it would release money.
    async fn look(&self, index: usize, key: &LedgerKey) -> Result<Look, ChainError> {
        let params = serde_json::json!({"keys": [encode(key)?]});
        let rpc = self.checked(index).await?;
        let answer: LedgerEntries = rpc.call("getLedgerEntries", &params).await?;
        match answer.entries.as_deref().unwrap_or_default() {
            [] => Ok(Look::Absent { at: answer.latest_ledger }),
            [entry] if is_entry_of(key, entry) => {
                Ok(Look::Present { ledger: entry.last_modified_ledger_seq, at: answer.latest_ledger })
            }
            _ => Err(ChainError::Lying(format!("{} answers with another entry than the one asked for", rpc.name()))),
        }
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
}

fn is_entry_of(key: &LedgerKey, entry: &Entry) -> bool {
    let (Ok(named), Ok(LedgerEntryData::ContractData(data))) =
        (LedgerKey::from_xdr_base64(&entry.key, entry::XDR), LedgerEntryData::from_xdr_base64(&entry.xdr, entry::XDR))
    else {
        return false;
    };
    let held = LedgerKeyContractData { contract: data.contract, key: data.key, durability: data.durability };
    named == *key && LedgerKey::ContractData(held) == *key
}
