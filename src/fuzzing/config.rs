//! The configuration file: what is accepted keeps the rules of paying, what is refused says so in one bounded sentence,
//! and neither shows a secret of the environment.

use std::path::Path;

use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::MAX_WORDS;
use crate::config::{self, Config, Source, Transport};
use crate::mcp::StaticKeys;
use crate::seal::{KeyRing, SealError};
use crate::signer::keystore::{Keystore, KeystoreError, KeystoreKey, Seed};

/// The first byte chooses the environment, the rest is the file; or `k` a keystore, `l` a list of keys.
pub fn run(data: &[u8]) {
    let Some((&mode, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    match mode {
        b'k' => return keystore(text),
        b'l' => return keys(text),
        _ => {}
    }
    let environment = Environment::new(mode, data);
    for transport in [None, Some(Transport::Stdio), Some(Transport::Remote)] {
        match config::parse(text, transport, &environment) {
            Ok(config) => accepted(&config, &environment),
            Err(error) => {
                environment.is_not_in(&format!("{error} {error:?}"));
                assert!(!error.field.is_empty() && !error.problem.is_empty());
                let sentence = error.to_string();
                assert!(sentence.chars().count() <= MAX_WORDS && !sentence.contains(char::is_control), "{sentence}");
            }
        }
    }
}

fn keystore(text: &str) {
    match Keystore::parse(text) {
        Ok(keystore) => {
            assert!(keystore.address().len() == 56 && keystore.address().starts_with('G'));
            let key = KeystoreKey::parse(&"ab".repeat(32)).unwrap();
            let opened = keystore.open(&key);
            assert!(opened.is_err() || opened.is_ok_and(|seed| seed.address() == keystore.address()));
        }
        Err(error) => assert!(error.to_string().chars().count() <= 300, "{error}"),
    }
}

/// Lists of keys in the environment: what is wrong with one is said without it.
fn keys(text: &str) {
    let shown = |error: String| {
        // No key has a blank in it; the words of an error have.
        let key = |part: &&str| part.len() >= 16 && !part.contains(char::is_whitespace);
        let long = text.split([',', ':']).map(str::trim).filter(key);
        assert!(long.into_iter().all(|part| !error.contains(part)), "a key is shown");
    };
    if let Err(error) = StaticKeys::parse(text) {
        assert!(error.to_string().chars().count() <= 300);
    }
    if let Err(error) = KeyRing::parse(text) {
        shown(error.to_string());
    }
    if let Err(error) = KeystoreKey::parse(text) {
        shown(error.to_string());
    }
}

fn accepted(config: &Config, environment: &Environment) {
    environment.is_not_in(&format!("{config:?}"));
    for network in config.payable.iter() {
        let network_config = &config.networks[network];
        assert!(network_config.enabled && !network_config.rpc_urls.is_empty() && config.signer.can_pay());
        assert!((6..=86_400).contains(&network_config.max_authorization_seconds));
        assert!(network_config.min_ledger_ms >= 10);
        let https = network_config.rpc_urls.iter().all(|url| url.scheme() == "https");
        if network.is_mainnet() {
            assert!(https && network_config.min_ledger_ms >= 4000, "{network}: a mainnet in plain text or too fast");
        }
    }
    if config.transport == Transport::Remote && config.signer.can_pay() {
        assert!(config.auth.is_on(), "paying for anybody");
    }
    for (network, of) in &config.networks {
        assert_eq!(network.namespace(), "stellar");
        assert!(!of.passphrase.is_empty() || network.reference() != "pubnet");
    }
    for limit in &config.limits {
        assert!(config.networks.contains_key(&limit.unit.network), "a limit that would hold for nothing");
    }
}

/// Its secrets are made of the whole input, so that no input has them in its file: a fuzzer finds out what it is
/// compared with.
struct Environment {
    secrets: bool,
    database: bool,
    /// 64 hex digits.
    token: String,
    seed: String,
}

impl Environment {
    fn new(mode: u8, data: &[u8]) -> Environment {
        let token: [u8; 32] = Sha256::digest(data).into();
        let seed = stellar_strkey::ed25519::PrivateKey(Sha256::digest(token).into());
        let seed = format!("{}", seed.as_unredacted());
        Environment { secrets: mode & 1 == 0, database: mode & 2 == 0, token: hex::encode(token), seed }
    }

    fn is_not_in(&self, shown: &str) {
        for secret in [&self.token[..24], &self.token[40..], &self.seed[..24]] {
            assert!(!shown.contains(secret), "a secret of the environment is shown");
        }
    }

    fn ring(&self) -> Result<KeyRing, SealError> {
        KeyRing::parse(&self.token)
    }
}

impl Source for Environment {
    fn env(&self, name: &str) -> Option<String> {
        let token = &self.token;
        match name {
            "HOME" => Some("/home/tollway".into()),
            "STELLAR_SECRET_KEY" if self.secrets => Some(self.seed.clone()),
            "MCP_SERVER_API_KEYS" if self.secrets => Some(format!("one:{token},two:{token}2")),
            "MCP_SIGNER_AUTH_HEADER" if self.secrets => Some(format!("Bearer {token}")),
            config::KEYSTORE_KEY_ENV | "TOLLWAY_KEY_RING" if self.secrets => Some(token.clone()),
            "DATABASE_URL" if self.database => Some(format!("postgres://tollway:{token}@db.internal/tollway")),
            "LEDGER_URL" if self.database => Some("sqlite:///var/lib/tollway/ledger.sqlite".into()),
            // Anything else that a file may name, so that a list that is none is refused without it.
            _ if self.secrets && name.ends_with("_ODD") => Some(format!("{token} {token}:{token},")),
            _ => None,
        }
    }
    fn read(&self, _path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
        Err(std::io::ErrorKind::NotFound.into())
    }
    fn key_ring(&self, _path: &Path) -> Result<KeyRing, SealError> {
        self.ring()
    }
    fn keys_file(&self, _path: &Path) -> Result<Zeroizing<String>, SealError> {
        Ok(Zeroizing::new(format!("one:{}\n", self.token)))
    }
    fn keystore(&self, _path: &Path) -> Result<Keystore, KeystoreError> {
        let key = KeystoreKey::parse(&self.token).unwrap();
        let seed = Seed::parse(&self.seed).unwrap();
        Ok(Keystore::seal(&crate::ports::machine::world().0, &seed, &key))
    }
}
