//! The networks, and which of them may be paid on.

use std::collections::{BTreeMap, BTreeSet};

use url::Url;

use super::value::{host, is_loopback, operator_url};
use super::{ConfigError, SignerMode, Store, Transport, auth, file, refuse};
use crate::chain::stellar::{Credentials, known_passphrase};
use crate::money::Network;

#[derive(Debug, Clone)]
pub struct NetworkConfig {
    pub enabled: bool,
    pub rpc_urls: Vec<Url>,
    pub passphrase: String,
    pub credentials: Credentials,
    pub max_authorization_seconds: u64,
    pub min_ledger_ms: u64,
}

/// The networks that this process may pay on. The mainnet rule is decided here, once: a mainnet is in this set only if
/// it is enabled, a signer is configured and, on a remote transport, bearer keys and the PostgreSQL ledger are too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayableNetworks(BTreeSet<Network>);

impl PayableNetworks {
    pub fn contains(&self, network: &Network) -> bool {
        self.0.contains(network)
    }
    pub fn iter(&self) -> impl Iterator<Item = &Network> {
        self.0.iter()
    }

    pub(super) fn parse(
        networks: &BTreeMap<Network, NetworkConfig>,
        signer: &SignerMode,
        transport: Transport,
        has_keys: bool,
        store: &Store,
    ) -> Result<Self, ConfigError> {
        let mut payable = BTreeSet::new();
        for (network, _) in networks.iter().filter(|(_, n)| n.enabled) {
            let field = format!("networks.{network}.enabled");
            if network.is_mainnet() {
                if !signer.can_pay() {
                    return refuse(field, "true, but signer.mode is none: configure a signer, or set this to false");
                }
                if transport == Transport::Remote && !has_keys {
                    let problem =
                        format!("true, but the remote transport has no authentication: use one of {}", auth::FIXES);
                    return refuse(field, problem);
                }
                match store {
                    Store::Sqlite(_) if transport == Transport::Remote => {
                        return refuse(
                            field,
                            "true, but a mainnet on a remote transport needs the PostgreSQL ledger: write budget.store: \
                             postgres, pay on a mainnet over stdio, or use a test network",
                        );
                    }
                    Store::Postgres(database) if database.is_plain_remote() => {
                        return refuse(
                            field,
                            "true, but the ledger's database is reached in plain text (sslmode=disable): write \
                             sslmode=verify-full in its URL",
                        );
                    }
                    Store::Sqlite(_) | Store::Postgres(_) | Store::None => {}
                }
            }
            if signer.can_pay() {
                payable.insert(network.clone());
            }
        }
        Ok(PayableNetworks(payable))
    }
}

pub(super) fn networks(
    file: BTreeMap<String, file::Network>,
    allow_insecure_local: bool,
) -> Result<BTreeMap<Network, NetworkConfig>, ConfigError> {
    let mut networks = BTreeMap::new();
    for (name, n) in file {
        let field = |member: &str| format!("networks.{name}.{member}");
        let network: Network = name
            .parse()
            .or_else(|e: crate::money::ParseError| refuse("networks", format!("{e}; aliases are not accepted")))?;
        if network.namespace() != "stellar" {
            return refuse(format!("networks.{name}"), "only stellar networks can be paid on in this version");
        }
        let passphrase = match (known_passphrase(&network), n.passphrase) {
            (Some(passphrase), None) => passphrase.to_owned(),
            (Some(_), Some(_)) => {
                return refuse(field("passphrase"), "is fixed for stellar:pubnet and stellar:testnet: remove it");
            }
            (_, Some(passphrase)) => passphrase,
            (_, None) => return refuse(field("passphrase"), "is missing: only pubnet and testnet have a known one"),
        };
        let min_ledger_seconds = n.min_ledger_seconds.unwrap_or(4.0);
        if !(0.01..=60.0).contains(&min_ledger_seconds) {
            return refuse(field("min_ledger_seconds"), format!("{min_ledger_seconds} is not between 0.01 and 60"));
        }
        if network.is_mainnet() && min_ledger_seconds < 4.0 {
            return refuse(
                field("min_ledger_seconds"),
                format!("{min_ledger_seconds} is below 4 on a mainnet: a lying RPC could prolong a signature with it"),
            );
        }
        let mut rpc_urls = Vec::new();
        for url in &n.rpc_urls {
            let url = operator_url(&field("rpc_urls"), url)?;
            if url.scheme() != "https" && network.is_mainnet() {
                return refuse(
                    field("rpc_urls"),
                    format!("{} is not HTTPS: a mainnet is never asked in plain text", host(&url)),
                );
            }
            if url.scheme() != "https" && !(allow_insecure_local || is_loopback(&url)) {
                return refuse(
                    field("rpc_urls"),
                    format!("{} is not HTTPS: only a loopback RPC may be plain", host(&url)),
                );
            }
            rpc_urls.push(url);
        }
        if rpc_urls.is_empty() && network.reference() == "testnet" {
            rpc_urls.push(operator_url(&field("rpc_urls"), "https://soroban-testnet.stellar.org")?);
        }
        let max_authorization_seconds = n.max_authorization_seconds.unwrap_or(300);
        if !(6..=86_400).contains(&max_authorization_seconds) {
            let value = format!("{max_authorization_seconds} is not between 6 and 86400 seconds");
            return refuse(field("max_authorization_seconds"), value);
        }
        let config = NetworkConfig {
            enabled: n.enabled.unwrap_or(!network.is_mainnet()),
            rpc_urls,
            passphrase,
            credentials: match n.credentials.as_deref() {
                None | Some("address") => Credentials::Address,
                Some("address_v2") => Credentials::AddressV2,
                Some(other) => {
                    return refuse(field("credentials"), format!("{other:?} is unknown: write address or address_v2"));
                }
            },
            max_authorization_seconds,
            min_ledger_ms: (min_ledger_seconds * 1000.0) as u64,
        };
        networks.insert(network, config);
    }
    Ok(networks)
}
