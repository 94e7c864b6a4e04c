//! The tokens that Tollway knows by symbol and decimals: `x402.md` 4.1 (Stellar) and 5.5 (EVM). An unknown token can
//! be paid with like any other; its amounts are shown in atomic units only, and its listings bear a warning.

use std::sync::LazyLock;

use sha2::{Digest, Sha256};

use crate::money::{Amount, Network, Unit};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownAsset {
    /// CAIP-2.
    pub network: &'static str,
    /// As the network names the token.
    pub asset: String,
    pub symbol: &'static str,
    pub decimals: u8,
}

const TESTNET_PASSPHRASE: &str = "Test SDF Network ; September 2015";
const PUBNET_PASSPHRASE: &str = "Public Global Stellar Network ; September 2015";

const TABLE: &[(&str, &str, &str, u8)] = &[
    ("stellar:pubnet", "CCW67TSZV3SSS2HXMBQ5JFGCKJNXKZM7UQUWUZPUTHXSTZLEO7SJMI75", "USDC", 7),
    ("stellar:testnet", "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA", "USDC", 7),
    ("eip155:8453", "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913", "USDC", 6),
    ("eip155:84532", "0x036CbD53842c5426634e7929541eC2318f3dCF7e", "USDC", 6),
    ("eip155:137", "0x3c499c542cEF5E3811e1192ce70d8cC03d5c3359", "USDC", 6),
    ("eip155:42161", "0xaf88d065e77c8cC2239327C5EDb3A432268e5831", "USDC", 6),
    ("eip155:421614", "0x75faf114eafb1BDbe2F0316DF893fd58CE46AA4d", "USDC", 6),
    ("eip155:143", "0x754704Bc059F8C67012fEd69BC8A327a5aafb603", "USDC", 6),
    ("eip155:988", "0x779Ded0c9e1022225f8E0630b35a9b54bE713736", "USDT0", 6),
    ("eip155:2201", "0x78Cf24370174180738C5B8E352B6D14c83a6c9A9", "USDT0", 6),
    ("eip155:4326", "0xFAfDdbb3FC7688494971a79cc65DCa3EF82079E7", "MegaUSD", 18),
    ("eip155:31611", "0x118917a40FAF1CD7a13dB0Ef56C86De7973Ac503", "Mezo USD", 18),
];

static KNOWN: LazyLock<Vec<KnownAsset>> = LazyLock::new(|| {
    let listed = TABLE.iter().map(|&(network, asset, symbol, decimals)| KnownAsset {
        network,
        asset: asset.to_owned(),
        symbol,
        decimals,
    });
    let native = [("stellar:testnet", TESTNET_PASSPHRASE), ("stellar:pubnet", PUBNET_PASSPHRASE)].map(
        |(network, passphrase)| KnownAsset { network, asset: native_contract(passphrase), symbol: "XLM", decimals: 7 },
    );
    listed.chain(native).collect()
});

/// The token's entry, or `None`. Hex addresses are compared without case, Stellar addresses exactly.
pub fn known(unit: &Unit) -> Option<&'static KnownAsset> {
    KNOWN.iter().find(|entry| {
        entry.network == unit.network.as_str()
            && super::Offer::same_address(&unit.network, &entry.asset, unit.asset.as_str())
    })
}

/// The token of this symbol on a network; symbols are compared without case.
pub fn by_symbol(network: &Network, symbol: &str) -> Option<&'static KnownAsset> {
    KNOWN.iter().find(|entry| entry.network == network.as_str() && entry.symbol.eq_ignore_ascii_case(symbol))
}

/// The amount for a reader, exact: `0.01 USDC`; `None` for an unknown token.
pub fn display(amount: Amount, unit: &Unit) -> Option<String> {
    known(unit).map(|entry| format!("{} {}", amount.to_decimal(entry.decimals), entry.symbol))
}

/// The contract of a Stellar network's native token: SHA-256 over the XDR of
/// `HashIdPreimage::ContractId { network_id, ContractIdPreimage::Asset(Asset::Native) }`.
fn native_contract(passphrase: &str) -> String {
    let mut preimage = Sha256::new();
    preimage.update(8u32.to_be_bytes()); // ENVELOPE_TYPE_CONTRACT_ID
    preimage.update(Sha256::digest(passphrase.as_bytes()));
    preimage.update(1u32.to_be_bytes()); // CONTRACT_ID_PREIMAGE_FROM_ASSET
    preimage.update(0u32.to_be_bytes()); // ASSET_TYPE_NATIVE
    format!("{}", stellar_strkey::Contract(preimage.finalize().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(network: &str, asset: &str) -> Unit {
        Unit { network: network.parse().unwrap(), asset: asset.parse().unwrap() }
    }

    #[test]
    fn shows_known_assets_and_only_those() {
        let usdc = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
        let show = |network: &str, asset: &str, n| display(Amount::from_u64(n), &unit(network, asset));
        assert_eq!(show("stellar:testnet", usdc, 100_000).as_deref(), Some("0.01 USDC"));
        assert_eq!(show("stellar:pubnet", usdc, 100_000), None, "the testnet contract means nothing on pubnet");
        assert_eq!(show("stellar:testnet", &usdc.to_lowercase(), 100_000), None);
        let base = "0X833589FCD6EDB6E08F4C7C32D4F71B54BDA02913";
        assert_eq!(show("eip155:8453", base, 10_000).as_deref(), Some("0.01 USDC"));
        assert_eq!(
            show("eip155:4326", "0xFAfDdbb3FC7688494971a79cc65DCa3EF82079E7", 1).as_deref(),
            Some("0.000000000000000001 MegaUSD")
        );
    }

    #[test]
    fn the_native_contract_is_derived_from_the_passphrase() {
        // The address that x402.md 4.1 gives for the test network.
        assert_eq!(native_contract(TESTNET_PASSPHRASE), "CDLZFC3SYJYDZT7K67VZ75HPJVIEUVNIXF47ZG2FB2RMQQVU2HHGCYSC");
        let pubnet = native_contract(PUBNET_PASSPHRASE);
        assert_eq!(display(Amount::from_u64(10_000_000), &unit("stellar:pubnet", &pubnet)).as_deref(), Some("1 XLM"));
    }

    #[test]
    fn every_entry_of_the_table_is_well_formed_and_unique() {
        for (i, entry) in KNOWN.iter().enumerate() {
            let found = known(&unit(entry.network, &entry.asset)).unwrap();
            assert!(std::ptr::eq(found, &KNOWN[i]), "{entry:?} stands twice");
            let named = by_symbol(&entry.network.parse().unwrap(), &entry.symbol.to_lowercase()).unwrap();
            assert!(std::ptr::eq(named, &KNOWN[i]), "{} stands twice on {}", entry.symbol, entry.network);
        }
    }
}
