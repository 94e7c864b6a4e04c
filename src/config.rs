//! The only reader of the configuration file and the environment: typed, parsed once, and refused at start in one
//! sentence that names the field, the value and the way out. Secrets come from the environment or from files that the
//! YAML names, never from the YAML itself.

pub mod file;
mod auth;
mod gate;
mod gate_hooks;
mod gate_server;
mod http;
mod keys;
mod legacy;
mod limits;
mod networks;
mod policy;
mod probe;
pub mod profiles;
mod refusal;
mod security;
mod signer;
pub mod signer_role;
mod store;
mod sweep;
mod value;
mod watch;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use url::Url;
use zeroize::Zeroizing;

pub use auth::{ApiServer, Auth, KeysFile, KubernetesSettings, parse_keys};
pub use gate::{GateConfig, GateFacilitator, load_gate};
pub use gate_hooks::GateHooks;
pub use gate_server::{GateServer, GateUpstream, is_gate, load_gate_server};
pub use http::Http;
pub use keys::KeyRingSource;
pub use legacy::LegacySse;
pub use networks::{NetworkConfig, PayableNetworks};
pub use probe::Probe;
pub use security::NetworkSecurity;
pub use signer::{ClientCertificate, KEYSTORE_KEY_ENV, SignerMode};
pub use store::Store;
pub use sweep::Sweep;
pub use value::Secret;
use value::{amount, millis, operator_url};
pub use watch::{Look, Watched};

use crate::ledger::Limit;
use crate::money::{AgentId, Amount, Network};
use crate::policy::Policy;
use crate::seal::{self, KeyRing, SealError};
use crate::signer::keystore::{Keystore, KeystoreError};

/// One sentence: the field, what was found there, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConfigError {
    pub field: String,
    pub problem: String,
}

fn refuse<T>(field: impl Into<String>, problem: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError::new(&field.into(), &problem.into()))
}

impl ConfigError {
    /// What stands in the file may be something that was pasted into the wrong place, as a value or as a name.
    fn new(field: &str, problem: &str) -> ConfigError {
        let field = if field.trim_matches('.').is_empty() { "configuration" } else { field };
        ConfigError { field: shown(field, 200), problem: shown(problem, 1_000) }
    }
}

/// One line of at most `max` characters, in which a Stellar seed is replaced by its length.
fn shown(text: &str, max: usize) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(8_192).collect();
    let seed = |word: &str| word.len() == 56 && word.starts_with('S');
    let mut out = line.clone();
    for word in line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| seed(word)) {
        out = out.replace(word, "(56 characters)");
    }
    out.chars().take(max).collect()
}

/// Which transport the process speaks: the rules for keys and mainnets differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Stdio,
    Remote,
}

/// Where values outside the file come from; a parameter, so that tests need no process environment.
pub trait Source {
    fn env(&self, name: &str) -> Option<String>;
    fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>>;
    /// A file of keys, refused where others than its owner and group can read it.
    fn key_ring(&self, path: &Path) -> Result<KeyRing, SealError> {
        KeyRing::load(path)
    }
    /// A file of bearer keys, refused likewise.
    fn keys_file(&self, path: &Path) -> Result<Zeroizing<String>, SealError> {
        seal::read_private(path, 0o027, auth::MAX_KEYS_BYTES)
    }
    /// A keystore file, refused likewise.
    fn keystore(&self, path: &Path) -> Result<Keystore, KeystoreError> {
        Keystore::read(path)
    }
}

/// The process environment and the file system.
pub struct Machine;
impl Source for Machine {
    fn env(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
    fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
        std::fs::read(path).map(Zeroizing::new)
    }
}

#[derive(Debug, Clone)]
pub struct Config {
    pub transport: Transport,
    pub catalog_url: Url,
    pub catalog_timeout: Duration,
    pub http: Http,
    pub auth: Auth,
    /// `None`: no probe listener.
    pub probe: Option<Probe>,
    pub signer: SignerMode,
    pub sign_within: Duration,
    pub smart_account_ceiling: Option<Amount>,
    pub networks: BTreeMap<Network, NetworkConfig>,
    pub payable: PayableNetworks,
    pub key_ring: KeyRingSource,
    pub stdio_agent: AgentId,
    pub store: Store,
    /// The rows of source `file`.
    pub limits: Vec<Limit>,
    /// Of that list; 0 where the file gives it none.
    pub limits_version: u64,
    pub policy: Policy,
    /// Between two looks at the file, while the process runs.
    pub reload_interval: Duration,
    pub security: NetworkSecurity,
    pub sweep: Sweep,
}

/// Reads `path`, or the built-in default (local stdio discovery) when it is `None`.
pub fn load(path: Option<&Path>, transport: Option<Transport>, source: &dyn Source) -> Result<Config, ConfigError> {
    parse(&text(path, source)?, transport, source)
}

/// Where the ledger is, and nothing else: an operator's command needs no secret to be there.
pub fn load_store(path: Option<&Path>, source: &dyn Source) -> Result<Store, ConfigError> {
    let text = text(path, source)?;
    let file: file::File = serde_saphyr::from_str(&text).map_err(|e| refusal::sentence(&text, &e))?;
    store::store(&file.budget, true, source)
}

/// The networks and how they are reached, and nothing else: an operator's command needs no secret to be there.
pub fn load_networks(
    path: Option<&Path>,
    source: &dyn Source,
) -> Result<(BTreeMap<Network, NetworkConfig>, NetworkSecurity, Sweep), ConfigError> {
    let text = text(path, source)?;
    let file: file::File = serde_saphyr::from_str(&text).map_err(|e| refusal::sentence(&text, &e))?;
    let networks = networks::networks(file.networks, file.network_security.allow_insecure_local)?;
    Ok((networks, security::security(file.network_security, source)?, sweep::sweep(&file.sweep)?))
}

fn text(path: Option<&Path>, source: &dyn Source) -> Result<String, ConfigError> {
    let Some(path) = path else { return Ok(profiles::LOCAL_DISCOVERY.to_owned()) };
    let shown = path.display().to_string();
    let bytes = source.read(path).or_else(|e| refuse(shown.clone(), format!("cannot be read ({e})")))?;
    String::from_utf8(bytes.to_vec()).or_else(|_| refuse(shown, "is not UTF-8"))
}

/// The file's text and the environment to parsed types.
pub fn parse(text: &str, transport: Option<Transport>, source: &dyn Source) -> Result<Config, ConfigError> {
    let file: file::File = serde_saphyr::from_str(text).map_err(|e| refusal::sentence(text, &e))?;
    let transport = match (transport, file.transport.as_deref()) {
        (Some(transport), _) => transport,
        (None, None | Some("stdio")) => Transport::Stdio,
        (None, Some("streamable-http")) => Transport::Remote,
        (None, Some("sse")) => {
            return refuse(
                "transport",
                "sse, the transport of 2024-11-05, is served beside another: write streamable-http, and http.legacy_sse: true",
            );
        }
        (None, Some(other)) => {
            return refuse("transport", format!("{other:?} is unknown: write stdio or streamable-http"));
        }
    };
    let auth = auth::auth(&file.http, file.auth, transport, file.network_security.allow_insecure_local, source)?;
    let http = http::http(file.http, source)?;
    let signer = signer::signer(&file.signer, transport, auth.is_on(), source)?;
    let networks = networks::networks(file.networks, file.network_security.allow_insecure_local)?;
    let store = store::store(&file.budget, signer.can_pay(), source)?;
    let payable = PayableNetworks::parse(&networks, &signer, transport, auth.is_on(), &store)?;
    for network in payable.iter() {
        if networks.get(network).is_none_or(|n| n.rpc_urls.is_empty()) {
            return refuse(
                format!("networks.{network}.rpc_urls"),
                "is empty, but this network is enabled and a signer is configured: name at least one RPC URL",
            );
        }
    }
    let limits = limits::limits(&file.budget, &networks)?;
    let base_url = source.env("FACILITATOR_URL").or(file.facilitator.as_ref().map(|f| f.base_url.clone()));
    let Some(base_url) = base_url else {
        return refuse("facilitator.base_url", "is missing: name the catalog to search, or set FACILITATOR_URL");
    };
    let probe = probe::probe(file.probe, http.port)?;
    legacy::beside(http.legacy_sse, probe)?;
    let request_timeout_ms = file.facilitator.and_then(|f| f.request_timeout_ms);
    let sign_within_ms = file.signer.sign_within_ms;
    let ceiling = file.signer.smart_account_ceiling_atomic;
    Ok(Config {
        transport,
        catalog_url: operator_url("facilitator.base_url", &base_url)?,
        catalog_timeout: millis("facilitator.request_timeout_ms", request_timeout_ms, 10_000, 100, 120_000)?,
        http,
        auth,
        probe,
        signer,
        sign_within: millis("signer.sign_within_ms", sign_within_ms, 10_000, 100, 60_000)?,
        smart_account_ceiling: ceiling.map(|c| amount("signer.smart_account_ceiling_atomic", &c)).transpose()?,
        networks,
        payable,
        key_ring: keys::key_ring(&file.keys, source)?,
        stdio_agent: match file.stdio.agent {
            Some(name) => name.parse().or_else(|e: crate::money::ParseError| refuse("stdio.agent", e.to_string()))?,
            None => "local".parse().or_else(|_| refuse("stdio.agent", "is not a name"))?,
        },
        store,
        limits,
        limits_version: limits::version(&file.budget)?,
        policy: policy::policy(file.policy)?,
        reload_interval: millis("reload.interval_ms", file.reload.interval_ms, 2_000, 100, 600_000)?,
        security: security::security(file.network_security, source)?,
        sweep: sweep::sweep(&file.sweep)?,
    })
}

#[cfg(test)]
mod tests;
