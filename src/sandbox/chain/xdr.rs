//! Small tools over XDR values.

use sha2::{Digest, Sha256};
use stellar_xdr::{
    AccountId, Asset, ContractDataDurability, LedgerEntry, LedgerEntryData, LedgerEntryExt, LedgerKey,
    LedgerKeyAccount, LedgerKeyConfigSetting, LedgerKeyContractCode, LedgerKeyContractData, LedgerKeyTrustLine, Limits,
    MuxedAccount, PublicKey, TrustLineAsset, Uint256, WriteXdr,
};

/// For everything that is encoded or decoded here; no transaction or entry of this network comes near it.
pub const LIMITS: Limits = Limits { depth: 200, len: 1024 * 1024 };

pub fn sha256(bytes: impl AsRef<[u8]>) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

pub fn encode(value: &impl WriteXdr) -> Result<Vec<u8>, stellar_xdr::Error> {
    value.to_xdr(LIMITS)
}

pub fn account_key(id: &AccountId) -> LedgerKey {
    LedgerKey::Account(LedgerKeyAccount { account_id: id.clone() })
}

pub fn trustline_key(id: &AccountId, asset: &Asset) -> LedgerKey {
    LedgerKey::Trustline(LedgerKeyTrustLine { account_id: id.clone(), asset: trustline_asset(asset) })
}

pub fn trustline_asset(asset: &Asset) -> TrustLineAsset {
    match asset {
        Asset::Native => TrustLineAsset::Native,
        Asset::CreditAlphanum4(code) => TrustLineAsset::CreditAlphanum4(code.clone()),
        Asset::CreditAlphanum12(code) => TrustLineAsset::CreditAlphanum12(code.clone()),
    }
}

/// The account behind a plain or multiplexed address.
pub fn account_of(address: &MuxedAccount) -> AccountId {
    let key = match address {
        MuxedAccount::Ed25519(key) => key,
        MuxedAccount::MuxedEd25519(muxed) => &muxed.ed25519,
    };
    AccountId(PublicKey::PublicKeyTypeEd25519(Uint256(key.0)))
}

pub fn entry(seq: u32, data: LedgerEntryData) -> LedgerEntry {
    LedgerEntry { last_modified_ledger_seq: seq, data, ext: LedgerEntryExt::V0 }
}

/// The key of an entry; `None` for kinds that this network does not keep.
pub fn key_of(data: &LedgerEntryData) -> Option<LedgerKey> {
    Some(match data {
        LedgerEntryData::Account(account) => account_key(&account.account_id),
        LedgerEntryData::Trustline(line) => {
            LedgerKey::Trustline(LedgerKeyTrustLine { account_id: line.account_id.clone(), asset: line.asset.clone() })
        }
        LedgerEntryData::ContractData(data) => LedgerKey::ContractData(LedgerKeyContractData {
            contract: data.contract.clone(),
            key: data.key.clone(),
            durability: data.durability,
        }),
        LedgerEntryData::ContractCode(code) => {
            LedgerKey::ContractCode(LedgerKeyContractCode { hash: code.hash.clone() })
        }
        LedgerEntryData::ConfigSetting(setting) => {
            LedgerKey::ConfigSetting(LedgerKeyConfigSetting { config_setting_id: setting.discriminant() })
        }
        _ => return None,
    })
}

pub fn is_temporary(key: &LedgerKey) -> bool {
    matches!(key, LedgerKey::ContractData(data) if data.durability == ContractDataDurability::Temporary)
}
