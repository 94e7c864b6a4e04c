//! The only reader of the configuration file and the environment: typed, parsed once, and refused at start in one
//! sentence that names the field, the value and the way out. Secrets come from the environment or from files that the
//! YAML names, never from the YAML itself.

pub mod file;
pub mod profiles;
mod refusal;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stellar_strkey::ed25519::PrivateKey;
use url::Url;
use zeroize::Zeroizing;

use crate::chain::stellar::Credentials;
use crate::http::{Destination, address_allowed};
use crate::ledger::{Database, Limit, Subject};
use crate::mcp::{StaticKeys, access};
use crate::money::{AgentId, Amount, Asset, Network, Unit};
use crate::seal::{KeyRing, SealError};
use crate::signer::keystore::{Keystore, KeystoreError, KeystoreKey, Seed};

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

/// The variable with a keystore's key, where the file names no other.
pub const KEYSTORE_KEY_ENV: &str = "TOLLWAY_KEYSTORE_KEY";

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
    pub security: NetworkSecurity,
    /// Between two looks at the payments that are due.
    pub sweep_interval: Duration,
}

#[derive(Debug, Clone)]
pub struct Http {
    pub bind: IpAddr,
    pub port: u16,
    /// `None` when the variable that is to hold the bearer keys is not set.
    pub api_keys: Option<StaticKeys>,
    pub allowed_hosts: Vec<String>,
    pub allowed_origins: Vec<String>,
    pub max_body_bytes: usize,
    pub max_concurrent_requests: usize,
    pub drain: Duration,
}

#[derive(Debug, Clone)]
pub enum SignerMode {
    /// Discovery only. Reads no key, even if one is there.
    None,
    EnvSecret {
        seed: Secret,
    },
    /// A keystore that was opened.
    EncryptedKey {
        path: PathBuf,
        seed: Seed,
    },
    External {
        base_url: Url,
        auth_header: Option<Secret>,
    },
}

impl SignerMode {
    pub fn can_pay(&self) -> bool {
        !matches!(self, SignerMode::None)
    }
}

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

    fn parse(
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
                    return refuse(field, "true, but the remote transport has no bearer keys: set http.api_keys_env");
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

#[derive(Debug, Clone)]
pub enum KeyRingSource {
    /// A file of mode 0600 beside the SQLite ledger, made on first use.
    BesideLedger,
    Keys(KeyRing),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    Sqlite(PathBuf),
    Postgres(Box<Database>),
    /// Discovery with `store: postgres` and no database named: nothing is opened.
    None,
}

#[derive(Debug, Clone)]
pub struct NetworkSecurity {
    pub allow_insecure_local: bool,
    pub max_response_bytes: usize,
    pub timeout: Duration,
    /// `None`: the signed life and 30 s.
    pub paid_call_timeout: Option<Duration>,
    pub max_redirects: usize,
    pub max_concurrent_connections: usize,
    pub ca_pem: Option<Vec<u8>>,
    pub resolved_mcp_endpoints: BTreeMap<String, Url>,
}

/// Text that no log, error or Debug shows.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);
impl Secret {
    pub fn new(text: String) -> Self {
        Secret(Zeroizing::new(text))
    }
    pub fn expose(&self) -> &str {
        &self.0
    }
}
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Reads `path`, or the built-in default (local stdio discovery) when it is `None`.
pub fn load(path: Option<&Path>, transport: Option<Transport>, source: &dyn Source) -> Result<Config, ConfigError> {
    parse(&text(path, source)?, transport, source)
}

/// Where the ledger is, and nothing else: an operator's command needs no secret to be there.
pub fn load_store(path: Option<&Path>, source: &dyn Source) -> Result<Store, ConfigError> {
    let text = text(path, source)?;
    let file: file::File = serde_saphyr::from_str(&text).map_err(|e| refusal::sentence(&text, &e))?;
    store(&file.budget, true, source)
}

/// The networks and how they are reached, and nothing else: an operator's command needs no secret to be there.
pub fn load_networks(
    path: Option<&Path>,
    source: &dyn Source,
) -> Result<(BTreeMap<Network, NetworkConfig>, NetworkSecurity), ConfigError> {
    let text = text(path, source)?;
    let file: file::File = serde_saphyr::from_str(&text).map_err(|e| refusal::sentence(&text, &e))?;
    let networks = networks(file.networks, file.network_security.allow_insecure_local)?;
    Ok((networks, security(file.network_security, source)?))
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
            return refuse("transport", "sse, the transport of 2024-11-05, is not served here: write streamable-http");
        }
        (None, Some(other)) => {
            return refuse("transport", format!("{other:?} is unknown: write stdio or streamable-http"));
        }
    };
    let http = http(file.http, transport, source)?;
    let signer = signer(&file.signer, transport, http.api_keys.is_some(), source)?;
    let networks = networks(file.networks, file.network_security.allow_insecure_local)?;
    let store = store(&file.budget, signer.can_pay(), source)?;
    let payable = PayableNetworks::parse(&networks, &signer, transport, http.api_keys.is_some(), &store)?;
    for network in payable.iter() {
        if networks.get(network).is_none_or(|n| n.rpc_urls.is_empty()) {
            return refuse(
                format!("networks.{network}.rpc_urls"),
                "is empty, but this network is enabled and a signer is configured: name at least one RPC URL",
            );
        }
    }
    let limits = limits(&file.budget, &networks)?;
    let base_url = source.env("FACILITATOR_URL").or(file.facilitator.as_ref().map(|f| f.base_url.clone()));
    let Some(base_url) = base_url else {
        return refuse("facilitator.base_url", "is missing: name the catalog to search, or set FACILITATOR_URL");
    };
    let request_timeout_ms = file.facilitator.and_then(|f| f.request_timeout_ms);
    let sign_within_ms = file.signer.sign_within_ms;
    let ceiling = file.signer.smart_account_ceiling_atomic;
    Ok(Config {
        transport,
        catalog_url: operator_url("facilitator.base_url", &base_url)?,
        catalog_timeout: millis("facilitator.request_timeout_ms", request_timeout_ms, 10_000, 100, 120_000)?,
        http,
        signer,
        sign_within: millis("signer.sign_within_ms", sign_within_ms, 10_000, 100, 60_000)?,
        smart_account_ceiling: ceiling.map(|c| amount("signer.smart_account_ceiling_atomic", &c)).transpose()?,
        networks,
        payable,
        key_ring: key_ring(&file.keys, source)?,
        stdio_agent: match file.stdio.agent {
            Some(name) => name.parse().or_else(|e: crate::money::ParseError| refuse("stdio.agent", e.to_string()))?,
            None => "local".parse().or_else(|_| refuse("stdio.agent", "is not a name"))?,
        },
        store,
        limits,
        security: security(file.network_security, source)?,
        sweep_interval: millis("sweep.interval_ms", file.sweep.interval_ms, 10_000, 100, 600_000)?,
    })
}

fn http(file: file::Http, transport: Transport, source: &dyn Source) -> Result<Http, ConfigError> {
    let port = match source.env("PORT") {
        Some(text) => text.parse().or_else(|_| refuse("PORT", format!("{text:?} is not a port (0-65535)")))?,
        None => file.port.unwrap_or(4522),
    };
    let bind = file.bind.unwrap_or_else(|| "127.0.0.1".into());
    let asked_for = file.api_keys_env.is_some();
    let api_keys_env = file.api_keys_env.unwrap_or_else(|| "MCP_SERVER_API_KEYS".into());
    // On stdio the keys are another process's business, and are not read.
    let api_keys = secret_env(&api_keys_env, source).filter(|_| transport == Transport::Remote);
    if api_keys.is_none() && asked_for && transport == Transport::Remote {
        let fix = "set it (name:secret, 32 bytes or more), or remove the line where everybody may connect";
        return refuse("http.api_keys_env", format!("the environment variable {api_keys_env} is not set: {fix}"));
    }
    let api_keys = api_keys.map(|keys| {
        let parsed = StaticKeys::parse(keys.expose());
        parsed.or_else(|e| refuse("http.api_keys_env", format!("{api_keys_env}: {e}")))
    });
    if let Some(host) = file.allowed_hosts.iter().find(|host| !access::is_host(host)) {
        let problem = format!("{host:?} is no host: write the name that clients use, such as tollway.example.com");
        return refuse("http.allowed_hosts", problem);
    }
    if let Some(origin) = file.allowed_origins.iter().find(|origin| !access::is_origin(origin)) {
        let problem = format!("{origin:?} is no origin: write scheme and host, such as https://app.example.com");
        return refuse("http.allowed_origins", problem);
    }
    Ok(Http {
        bind: bind.parse().or_else(|_| refuse("http.bind", format!("{bind:?} is not an IP address")))?,
        port,
        api_keys: api_keys.transpose()?,
        allowed_hosts: file.allowed_hosts,
        allowed_origins: file.allowed_origins,
        max_body_bytes: bounded("http.max_body_bytes", file.max_body_bytes, 1 << 20, 1 << 10, 64 << 20)?,
        max_concurrent_requests: bounded(
            "http.max_concurrent_requests",
            file.max_concurrent_requests,
            512,
            1,
            100_000,
        )?,
        drain: millis("http.drain_ms", file.drain_ms, 30_000, 0, 3_600_000)?,
    })
}

fn signer(
    file: &file::Signer,
    transport: Transport,
    has_keys: bool,
    source: &dyn Source,
) -> Result<SignerMode, ConfigError> {
    let mode = file.mode.as_deref().unwrap_or("none");
    let only = |field: &str, value: &Option<String>, of: &str| match value {
        Some(_) if mode != of => refuse(
            format!("signer.{field}"),
            format!("belongs to signer.mode {of}, but the mode is {mode}: remove it or change the mode"),
        ),
        _ => Ok(()),
    };
    only("secret_env", &file.secret_env, "env-secret")?;
    only("base_url", &file.base_url, "external")?;
    only("auth_header_env", &file.auth_header_env, "external")?;
    only("keystore_path", &file.keystore_path, "encrypted-key")?;
    only("encryption_key_env", &file.encryption_key_env, "encrypted-key")?;
    let mode = match mode {
        "none" => SignerMode::None,
        "env-secret" if transport == Transport::Remote => {
            return refuse(
                "signer.mode",
                "env-secret is for stdio only: a remote transport uses external, with the key in another process, or \
                 encrypted-key",
            );
        }
        "env-secret" => {
            let name = file.secret_env.as_deref().unwrap_or("STELLAR_SECRET_KEY");
            match secret_env(name, source) {
                Some(seed) if PrivateKey::from_string(seed.expose().trim()).is_ok() => SignerMode::EnvSecret { seed },
                Some(_) => {
                    return refuse(
                        "signer.secret_env",
                        format!(
                            "the environment variable {name} holds no Stellar secret seed (S…): check for a typing error"
                        ),
                    );
                }
                None => return refuse("signer.secret_env", format!("the environment variable {name} is not set")),
            }
        }
        "external" => {
            let Some(base_url) = &file.base_url else {
                return refuse("signer.base_url", "is missing: signer.mode external needs the signer's HTTPS URL");
            };
            let auth_header = match &file.auth_header_env {
                None => None,
                Some(name) => match secret_env(name, source) {
                    Some(header) => Some(header),
                    None => {
                        return refuse("signer.auth_header_env", format!("the environment variable {name} is not set"));
                    }
                },
            };
            let base_url = operator_url("signer.base_url", base_url)?;
            if base_url.scheme() != "https" && !is_loopback(&base_url) {
                return refuse(
                    "signer.base_url",
                    format!("{} is not HTTPS: only a loopback signer may be plain", host(&base_url)),
                );
            }
            SignerMode::External { base_url, auth_header }
        }
        "encrypted-key" => encrypted_key(file, source)?,
        other => {
            let known = "none, env-secret (stdio), encrypted-key or external";
            return refuse("signer.mode", format!("{other:?} is unknown: write {known}"));
        }
    };
    if file.smart_account_ceiling_atomic.is_some() && mode.can_pay() && !matches!(mode, SignerMode::External { .. }) {
        return refuse(
            "signer.smart_account_ceiling_atomic",
            "is for a smart account (C…), which only signer.mode external can pay from: remove it, or bound a G-account \
             with budget.*",
        );
    }
    if mode.can_pay() && transport == Transport::Remote && !has_keys {
        return refuse(
            "http.api_keys_env",
            "is missing, and the environment variable MCP_SERVER_API_KEYS is not set, but a signer is \
             configured: a remote transport never runs a paying tool without bearer keys (name:secret, 32 bytes or more)",
        );
    }
    Ok(mode)
}

/// The keystore is opened here, so that a wrong key is one sentence at the start.
fn encrypted_key(file: &file::Signer, source: &dyn Source) -> Result<SignerMode, ConfigError> {
    let Some(path) = &file.keystore_path else {
        let problem = "is missing: signer.mode encrypted-key needs the file that tollway keystore create writes";
        return refuse("signer.keystore_path", problem);
    };
    let name = file.encryption_key_env.as_deref().unwrap_or(KEYSTORE_KEY_ENV);
    let Some(key) = secret_env(name, source) else {
        let problem = format!("the environment variable {name} is not set: it holds the key that opens the keystore");
        return refuse("signer.encryption_key_env", problem);
    };
    let key = KeystoreKey::parse(key.expose())
        .or_else(|e| refuse("signer.encryption_key_env", format!("the environment variable {name} {e}")))?;
    let path = PathBuf::from(path);
    let seed = source.keystore(&path).and_then(|keystore| keystore.open(&key));
    let seed = seed.or_else(|error| {
        let problem = match error {
            KeystoreError::File(error) => error.to_string(),
            error => format!("{}: {error}", path.display()),
        };
        refuse("signer.keystore_path", problem)
    })?;
    Ok(SignerMode::EncryptedKey { path, seed })
}

fn networks(
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
        let passphrase = match (network.reference(), n.passphrase) {
            ("pubnet", None) => "Public Global Stellar Network ; September 2015".to_owned(),
            ("testnet", None) => "Test SDF Network ; September 2015".to_owned(),
            ("pubnet" | "testnet", Some(_)) => {
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

/// `needed`: some command or a signer uses the ledger. A `DATABASE_URL` that is there for another program does not keep
/// a server from searching a catalog.
fn store(file: &file::Budget, needed: bool, source: &dyn Source) -> Result<Store, ConfigError> {
    let variable = file.database_url_env.as_deref();
    let name = variable.unwrap_or("DATABASE_URL");
    let url = secret_env(name, source).filter(|_| needed);
    if url.is_none() && variable.is_some() && needed {
        return refuse("budget.database_url_env", format!("the environment variable {name} is not set"));
    }
    let only = |member: &str, set: bool, of: &str| match set {
        true => {
            refuse(format!("budget.{member}"), format!("belongs to budget.store {of}: remove it or change the store"))
        }
        false => Ok(()),
    };
    match file.store.as_deref() {
        None | Some("sqlite") => {
            only("ca_file", file.ca_file.is_some(), "postgres")?;
            let path = match (url, &file.path) {
                (Some(url), _) => database_path(name, url.expose())?,
                (None, Some(path)) if Path::new(path).is_absolute() => PathBuf::from(path),
                (None, Some(path)) => {
                    return refuse("budget.path", format!("{path:?} is relative: write an absolute path"));
                }
                (None, None) => state_dir(source)?.join("ledger.sqlite"),
            };
            Ok(Store::Sqlite(path))
        }
        Some("postgres") => {
            only("path", file.path.is_some(), "sqlite")?;
            let url = match (url, needed) {
                (Some(url), _) => url,
                (None, true) => {
                    return refuse(
                        "budget.database_url_env",
                        format!(
                            "the environment variable {name} is not set: budget.store postgres needs the database's \
                             URL there (postgresql://user:password@host/database)"
                        ),
                    );
                }
                (None, false) => return Ok(Store::None),
            };
            let ca = file.ca_file.as_deref().map(|path| ca_file("budget.ca_file", path, source)).transpose()?;
            let database = Database::parse(url.expose(), ca).or_else(|problem| refuse(name, problem))?;
            Ok(Store::Postgres(Box::new(database)))
        }
        Some("memory") => refuse(
            "budget.store",
            "memory does not exist here (a restart would forget what was spent): write sqlite or postgres",
        ),
        Some(other) => refuse("budget.store", format!("{other:?} is unknown: write sqlite or postgres")),
    }
}

fn ca_file(field: &str, path: &str, source: &dyn Source) -> Result<Vec<u8>, ConfigError> {
    let read = source.read(Path::new(path));
    Ok(read.or_else(|e| refuse(field, format!("{path:?} cannot be read ({e})")))?.to_vec())
}

/// `sqlite:///absolute/path`. What is refused is not quoted: the URL of a database server holds a password.
fn database_path(name: &str, url: &str) -> Result<PathBuf, ConfigError> {
    let path = url.strip_prefix("sqlite:").map(|rest| rest.strip_prefix("//").unwrap_or(rest));
    match path {
        Some(path) if path.starts_with('/') && !path.contains(['?', '#', '%']) => Ok(PathBuf::from(path)),
        Some(_) => refuse(name, "is no sqlite URL of a file: write sqlite:///absolute/path"),
        None => refuse(
            name,
            "names another database than SQLite, but budget.store is sqlite: write budget.store: postgres, or unset the \
             variable (the ledger is then at budget.path), or write sqlite:///absolute/path",
        ),
    }
}

/// `$XDG_STATE_HOME/tollway`, else `$HOME/.local/state/tollway`; never the working directory.
fn state_dir(source: &dyn Source) -> Result<PathBuf, ConfigError> {
    let absolute = |name: &str| source.env(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match (absolute("XDG_STATE_HOME"), absolute("HOME")) {
        (Some(state), _) => Ok(state.join("tollway")),
        (None, Some(home)) => Ok(home.join(".local/state/tollway")),
        (None, None) => refuse("budget.path", "is missing, and neither XDG_STATE_HOME nor HOME is set: write a path"),
    }
}

fn limits(file: &file::Budget, networks: &BTreeMap<Network, NetworkConfig>) -> Result<Vec<Limit>, ConfigError> {
    let mut limits: BTreeMap<(Subject, Unit), Limit> = BTreeMap::new();
    let per_call = file.default_per_call_max_atomic.as_deref();
    let per_call = per_call.map(|a| amount("budget.default_per_call_max_atomic", a)).transpose()?;
    let window = file.default_session_or_day_max_atomic.as_deref();
    let window = window.map(|a| amount("budget.default_session_or_day_max_atomic", a)).transpose()?;
    if per_call.is_some() != window.is_some() {
        let (set, missing) = if per_call.is_some() {
            ("budget.default_per_call_max_atomic", "budget.default_session_or_day_max_atomic")
        } else {
            ("budget.default_session_or_day_max_atomic", "budget.default_per_call_max_atomic")
        };
        return refuse(missing, format!("is missing while {set} is set: the two are one default, write both"));
    }
    if let (Some(per_call), Some(window)) = (per_call, window) {
        for network in networks.iter().filter(|(_, n)| n.enabled).map(|(name, _)| name) {
            let Some(asset) = default_asset(network) else {
                if file.limits.iter().any(|entry| entry.network == network.as_str()) {
                    continue;
                }
                let problem =
                    format!("is for USDC, and none is known on {network}: write a budget.limits entry for it");
                return refuse("budget.default_per_call_max_atomic", problem);
            };
            let unit = Unit { network: network.clone(), asset };
            let limit = Limit {
                subject: Subject::EachAgent,
                unit: unit.clone(),
                per_call: Some(per_call),
                per_session: Some(window),
                per_day: Some(window),
                unlimited: false,
                suspended: false,
                source: "file".into(),
            };
            limits.insert((Subject::EachAgent, unit), limit);
        }
    }
    let unit = |field: &str, network: &str, asset: &str| -> Result<Unit, ConfigError> {
        let network: Network = network.parse().or_else(|e: crate::money::ParseError| refuse(field, e.to_string()))?;
        let asset: Asset = asset.parse().or_else(|e: crate::money::ParseError| refuse(field, e.to_string()))?;
        Ok(Unit { network, asset })
    };
    for (i, entry) in file.limits.iter().enumerate() {
        let field = |member: &str| format!("budget.limits[{i}].{member}");
        let subject = match entry.agent.as_deref() {
            None | Some("*") => Subject::EachAgent,
            Some(name) => Subject::Agent(
                name.parse().or_else(|e: crate::money::ParseError| refuse(field("agent"), e.to_string()))?,
            ),
        };
        let parse =
            |member: &str, value: &Option<String>| value.as_deref().map(|v| amount(&field(member), v)).transpose();
        let limit = Limit {
            subject: subject.clone(),
            unit: unit(&field("asset"), &entry.network, &entry.asset)?,
            per_call: parse("per_call_max_atomic", &entry.per_call_max_atomic)?,
            per_session: parse("session_max_atomic", &entry.session_max_atomic)?,
            per_day: parse("day_max_atomic", &entry.day_max_atomic)?,
            unlimited: entry.unlimited,
            suspended: false,
            source: "file".into(),
        };
        if limit.per_call.is_none() && limit.per_session.is_none() && limit.per_day.is_none() && !limit.unlimited {
            return refuse(
                format!("budget.limits[{i}]"),
                "names no figure: write per_call_max_atomic, session_max_atomic or day_max_atomic, or unlimited: true",
            );
        }
        let key = (subject, limit.unit.clone());
        if limits.contains_key(&key) && file.limits[..i].iter().any(|e| same_row(e, entry)) {
            return refuse(format!("budget.limits[{i}]"), "repeats the agent, network and asset of an earlier entry");
        }
        limits.insert(key, limit);
    }
    for (i, entry) in file.total.iter().enumerate() {
        let unit = unit(&format!("budget.total[{i}].asset"), &entry.network, &entry.asset)?;
        let limit = Limit {
            subject: Subject::Total,
            unit: unit.clone(),
            per_call: None,
            per_session: None,
            per_day: Some(amount(&format!("budget.total[{i}].day_max_atomic"), &entry.day_max_atomic)?),
            unlimited: false,
            suspended: false,
            source: "file".into(),
        };
        if limits.insert((Subject::Total, unit), limit).is_some() {
            return refuse(format!("budget.total[{i}]"), "repeats the network and asset of an earlier entry");
        }
    }
    Ok(limits.into_values().collect())
}

/// The asset that the two `default_*` figures are for: the network's USDC.
fn default_asset(network: &Network) -> Option<Asset> {
    let usdc = match network.as_str() {
        "stellar:testnet" => "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA",
        "stellar:pubnet" => "CCW67TSZV3SSS2HXMBQ5JFGCKJNXKZM7UQUWUZPUTHXSTZLEO7SJMI75",
        _ => return None,
    };
    usdc.parse().ok()
}

fn same_row(a: &file::Limit, b: &file::Limit) -> bool {
    let agent = |entry: &file::Limit| entry.agent.clone().unwrap_or_else(|| "*".into());
    agent(a) == agent(b) && a.network == b.network && a.asset == b.asset
}

fn key_ring(file: &file::Keys, source: &dyn Source) -> Result<KeyRingSource, ConfigError> {
    match (&file.ring_env, &file.ring_file) {
        (Some(_), Some(_)) => refuse("keys", "has both ring_env and ring_file: write one of them"),
        (Some(name), None) => match secret_env(name, source).map(|keys| KeyRing::parse(keys.expose())) {
            Some(Ok(ring)) => Ok(KeyRingSource::Keys(ring)),
            Some(Err(e)) => refuse("keys.ring_env", format!("{name}: {e}")),
            None => refuse("keys.ring_env", format!("the environment variable {name} is not set")),
        },
        (None, Some(path)) => match source.key_ring(Path::new(path)) {
            Ok(ring) => Ok(KeyRingSource::Keys(ring)),
            Err(e) => refuse("keys.ring_file", e.to_string()),
        },
        (None, None) => Ok(KeyRingSource::BesideLedger),
    }
}

fn security(file: file::NetworkSecurity, source: &dyn Source) -> Result<NetworkSecurity, ConfigError> {
    let mut resolved = BTreeMap::new();
    let destination = if file.allow_insecure_local { Destination::AgentLocal } else { Destination::Agent };
    for (name, url) in file.resolved_mcp_endpoints {
        let field = format!("network_security.resolved_mcp_endpoints.{name}");
        if !name.starts_with("mcp://") {
            return refuse(field, "is no mcp:// identifier: only symbolic identifiers are mapped");
        }
        let parsed = operator_url(&field, &url)?;
        if parsed.scheme() != "https" && !(file.allow_insecure_local && is_loopback(&parsed)) {
            return refuse(field, format!("{} is not HTTPS: sellers are called over HTTPS only", host(&parsed)));
        }
        let ip = match parsed.host() {
            Some(url::Host::Ipv4(ip)) => Some(IpAddr::V4(ip)),
            Some(url::Host::Ipv6(ip)) => Some(IpAddr::V6(ip)),
            _ => None,
        };
        if let Some(Err(word)) = ip.map(|ip| address_allowed(destination, ip)) {
            let problem =
                format!("{} is refused ({word}): sellers are reached at public addresses only", host(&parsed));
            return refuse(field, problem);
        }
        resolved.insert(name, parsed);
    }
    let field = |member: &str| format!("network_security.{member}");
    Ok(NetworkSecurity {
        allow_insecure_local: file.allow_insecure_local,
        max_response_bytes: bounded(
            &field("max_response_bytes"),
            file.max_response_bytes,
            8 << 20,
            1 << 10,
            256 << 20,
        )?,
        timeout: millis(&field("timeout_ms"), file.timeout_ms, 15_000, 100, 600_000)?,
        paid_call_timeout: match file.paid_call_timeout_ms {
            None => None,
            some => Some(millis(&field("paid_call_timeout_ms"), some, 0, 1_000, 3_600_000)?),
        },
        max_redirects: bounded(&field("max_redirects"), file.max_redirects, 3, 0, 10)?,
        max_concurrent_connections: bounded(
            &field("max_concurrent_connections"),
            file.max_concurrent_connections,
            10,
            1,
            10_000,
        )?,
        ca_pem: match file.ca_file {
            None => None,
            Some(path) => Some(ca_file(&field("ca_file"), &path, source)?),
        },
        resolved_mcp_endpoints: resolved,
    })
}

fn secret_env(name: &str, source: &dyn Source) -> Option<Secret> {
    source.env(name).filter(|value| !value.trim().is_empty()).map(Secret::new)
}

fn amount(field: &str, value: &str) -> Result<Amount, ConfigError> {
    value.parse().or_else(|e: crate::money::ParseError| refuse(field, e.to_string()))
}

fn millis(field: &str, value: Option<u64>, default: u64, min: u64, max: u64) -> Result<Duration, ConfigError> {
    match value.unwrap_or(default) {
        ms if value.is_some() && !(min..=max).contains(&ms) => {
            refuse(field, format!("{ms} is not between {min} and {max} milliseconds"))
        }
        ms => Ok(Duration::from_millis(ms)),
    }
}

fn bounded(field: &str, value: Option<usize>, default: usize, min: usize, max: usize) -> Result<usize, ConfigError> {
    match value.unwrap_or(default) {
        n if (min..=max).contains(&n) => Ok(n),
        n => refuse(field, format!("{n} is not between {min} and {max}")),
    }
}

/// A URL that the operator wrote: http or https, with a host, without credentials, query or fragment. What is refused
/// is not quoted: it may hold an access key.
fn operator_url(field: &str, text: &str) -> Result<Url, ConfigError> {
    let url = Url::parse(text).or_else(|e| refuse(field, format!("is not a URL ({e}): write https://host/path")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return refuse(field, format!("has the scheme {:?}: write an http or https URL", url.scheme()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refuse(field, "has credentials in the URL: put them into an environment variable");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return refuse(field, format!("{} has a query or fragment: write the base URL alone", host(&url)));
    }
    Ok(url)
}

fn host(url: &Url) -> &str {
    url.host_str().unwrap_or_default()
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(BTreeMap<&'static str, &'static str>);
    impl Source for Fake {
        fn env(&self, name: &str) -> Option<String> {
            self.0.get(name).map(|v| (*v).to_owned())
        }
        fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
            match self.0.get(path.to_str().unwrap()) {
                Some(text) => Ok(Zeroizing::new(text.as_bytes().to_vec())),
                None => Err(std::io::ErrorKind::NotFound.into()),
            }
        }
        fn keystore(&self, path: &Path) -> Result<Keystore, KeystoreError> {
            Keystore::parse(self.0.get(path.to_str().unwrap()).copied().unwrap_or_default())
        }
    }
    fn source(pairs: &[(&'static str, &'static str)]) -> Fake {
        let mut all: BTreeMap<_, _> = pairs.iter().copied().collect();
        all.entry("HOME").or_insert("/home/a");
        Fake(all)
    }
    const KEYS: (&str, &str) = ("MCP_SERVER_API_KEYS", "a:0123456789abcdef0123456789abcdef");
    const CATALOG: &str = "facilitator: {base_url: 'https://c.example'}\n";

    #[test]
    fn the_default_is_local_discovery_and_reads_no_key() {
        let config = load(None, None, &source(&[("STELLAR_SECRET_KEY", "S-should-not-be-read")])).unwrap();
        assert!(!config.signer.can_pay());
        assert_eq!(config.transport, Transport::Stdio);
        assert_eq!(config.store, Store::Sqlite("/home/a/.local/state/tollway/ledger.sqlite".into()));
        assert!(config.limits.is_empty());
        assert_eq!(config.stdio_agent.as_str(), "local");
    }

    #[test]
    fn every_profile_is_valid_as_written() {
        let env = [
            ("STELLAR_SECRET_KEY", "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X"),
            ("MCP_SIGNER_AUTH_HEADER", "Bearer x"),
            ("TOLLWAY_KEY_RING", "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f"),
            KEYS,
        ];
        let database = ("DATABASE_URL", "postgresql://tollway@db.example/tollway");
        for (name, text) in profiles::ALL {
            let pairs: Vec<_> = env.iter().copied().chain((name == "paying-cluster").then_some(database)).collect();
            let env = source(&pairs);
            let config = parse(text, None, &env).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(config.signer.can_pay(), name.starts_with("paying"), "{name}");
            assert_eq!(config.limits.len(), usize::from(name.starts_with("paying")), "{name}");
        }
    }

    #[test]
    fn each_refusal_names_the_field_and_the_way_out() {
        let paying = "signer: {mode: external, base_url: 'https://s.example'}\n";
        let pubnet = "networks: {'stellar:pubnet': {enabled: true, rpc_urls: ['https://r.example']}}\n";
        let remote = Some(Transport::Remote);
        let cases: Vec<(String, Option<Transport>, &str, &str)> = vec![
            ("{}".into(), None, "facilitator.base_url", "is missing"),
            (format!("{CATALOG}budgte: {{}}\n"), None, "budgte", "not a field"),
            (format!("{CATALOG}{CATALOG}"), None, "facilitator", "stands twice"),
            (format!("{CATALOG}transport: carrier-pigeon\n"), None, "transport", "carrier-pigeon"),
            (format!("{CATALOG}signer: {{mode: env-secret}}\n"), remote, "signer.mode", "stdio only"),
            (format!("{CATALOG}signer: {{mode: env-secret}}\n"), None, "signer.secret_env", "STELLAR_SECRET_KEY"),
            (format!("{CATALOG}signer: {{mode: encrypted-key}}\n"), None, "signer.keystore_path", "keystore create"),
            (
                format!("{CATALOG}signer: {{mode: encrypted-key, keystore_path: /k}}\n"),
                None,
                "signer.encryption_key_env",
                "TOLLWAY_KEYSTORE_KEY is not set",
            ),
            (format!("{CATALOG}signer: {{mode: hardware}}\n"), None, "signer.mode", "encrypted-key"),
            (format!("{CATALOG}signer: {{mode: none, base_url: 'https://s'}}\n"), None, "signer.base_url", "belongs"),
            (
                format!("{CATALOG}signer: {{mode: external, base_url: 'http://s.example'}}\n"),
                None,
                "signer.base_url",
                "HTTPS",
            ),
            (format!("{CATALOG}{paying}"), remote, "http.api_keys_env", "MCP_SERVER_API_KEYS"),
            (format!("{CATALOG}{pubnet}"), None, "networks.stellar:pubnet.enabled", "signer.mode is none"),
            (format!("{CATALOG}networks: {{base: {{}}}}\n"), None, "networks", "CAIP-2"),
            (
                format!("{CATALOG}networks: {{'stellar:pubnet': {{min_ledger_seconds: 1}}}}\n"),
                None,
                "networks.stellar:pubnet.min_ledger_seconds",
                "below 4",
            ),
            (
                format!("{CATALOG}networks: {{'stellar:local': {{}}}}\n"),
                None,
                "networks.stellar:local.passphrase",
                "missing",
            ),
            (format!("{CATALOG}budget: {{store: memory}}\n"), None, "budget.store", "sqlite"),
            (
                format!("{CATALOG}{paying}budget: {{store: postgres}}\n"),
                None,
                "budget.database_url_env",
                "DATABASE_URL is not set",
            ),
            (format!("{CATALOG}budget: {{store: postgres, path: /l}}\n"), None, "budget.path", "belongs"),
            (format!("{CATALOG}budget: {{ca_file: /ca.pem}}\n"), None, "budget.ca_file", "belongs"),
            (format!("{CATALOG}budget: {{path: ledger.db}}\n"), None, "budget.path", "relative"),
            (
                format!(
                    "{CATALOG}budget: {{default_per_call_max_atomic: '1e6', default_session_or_day_max_atomic: '1'}}\n"
                ),
                None,
                "budget.default_per_call_max_atomic",
                "1e6",
            ),
            (
                format!("{CATALOG}budget: {{default_per_call_max_atomic: '1'}}\n"),
                None,
                "budget.default_session_or_day_max_atomic",
                "is missing",
            ),
            (
                format!(
                    "{CATALOG}networks: {{'stellar:local': {{passphrase: x}}}}\n\
                     budget: {{default_per_call_max_atomic: '1', default_session_or_day_max_atomic: '1'}}\n"
                ),
                None,
                "budget.default_per_call_max_atomic",
                "budget.limits entry",
            ),
            (
                format!("{CATALOG}budget: {{limits: [{{network: 'stellar:testnet', asset: C1}}]}}\n"),
                None,
                "budget.limits[0]",
                "no figure",
            ),
            (
                format!(
                    "{CATALOG}network_security: {{resolved_mcp_endpoints: {{'mcp://tool/x': 'http://x.example'}}}}\n"
                ),
                None,
                "network_security.resolved_mcp_endpoints.mcp://tool/x",
                "HTTPS",
            ),
            (
                format!(
                    "{CATALOG}network_security: {{resolved_mcp_endpoints: {{'mcp://tool/x': 'https://10.0.0.1/mcp'}}}}\n"
                ),
                None,
                "network_security.resolved_mcp_endpoints.mcp://tool/x",
                "address_private",
            ),
            (
                format!("{CATALOG}network_security: {{max_redirects: 11}}\n"),
                None,
                "network_security.max_redirects",
                "11",
            ),
            ("facilitator: {base_url: 'https://u:p@c.example'}\n".into(), None, "facilitator.base_url", "credentials"),
            (format!("{CATALOG}transport: sse\n"), None, "transport", "streamable-http"),
            (format!("{CATALOG}signer: {{keystore_path: /k}}\n"), None, "signer.keystore_path", "belongs"),
            (format!("{CATALOG}signer: {{encryption_key_env: K}}\n"), None, "signer.encryption_key_env", "belongs"),
            (format!("{CATALOG}http: {{api_keys_env: KEYS}}\n"), remote, "http.api_keys_env", "KEYS is not set"),
            (
                format!("{CATALOG}http: {{allowed_hosts: ['https://c.example']}}\n"),
                None,
                "http.allowed_hosts",
                "name that clients use",
            ),
            (
                format!("{CATALOG}http: {{allowed_origins: [app.example]}}\n"),
                None,
                "http.allowed_origins",
                "scheme and host",
            ),
            (format!("{CATALOG}keys: {{ring_env: RING}}\n"), None, "keys.ring_env", "RING is not set"),
            (format!("{CATALOG}keys: {{ring_file: /no/ring}}\n"), None, "keys.ring_file", "/no/ring"),
            (
                format!("{CATALOG}{paying}budget: {{database_url_env: DB}}\n"),
                None,
                "budget.database_url_env",
                "DB is not set",
            ),
        ];
        for (text, transport, field, word) in cases {
            let error = match parse(&text, transport, &source(&[])) {
                Err(error) => error,
                Ok(_) => panic!("accepted: {text}"),
            };
            assert_eq!(error.field, field, "{text}\n{error}");
            assert!(error.to_string().contains(word), "{text}\n{error}");
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    }

    /// The key is 32 times 0x01, the seed 32 times 0x07.
    const KEYSTORE: &str = r#"{"version": 1, "algorithm": "AES-256-GCM",
        "address": "GDVEU3DD4KOFECV66VIHWEZOYX4ZKR3WV27L464SIIPOU2IUI3JCZA57", "nonce": "CQkJCQkJCQkJCQkJ",
        "ciphertext": "wwggyck3AcZ4U01IqdqCEJ7Aef0zmDPhMF83TulQ+PrYLY4yjBfd3agWQB5CdA/i"}"#;

    #[test]
    fn a_keystore_is_opened_at_the_start_on_both_transports_and_its_secrets_never_show() {
        let key = "0101010101010101010101010101010101010101010101010101010101010101";
        let text = format!("{CATALOG}signer: {{mode: encrypted-key, keystore_path: /k.json, encryption_key_env: K}}\n");
        for transport in [Transport::Stdio, Transport::Remote] {
            let config = parse(&text, Some(transport), &source(&[("/k.json", KEYSTORE), ("K", key), KEYS])).unwrap();
            let SignerMode::EncryptedKey { path, seed } = &config.signer else { panic!("{:?}", config.signer) };
            assert_eq!(path, Path::new("/k.json"));
            assert!(KEYSTORE.contains(&seed.address()));
            assert!(!format!("{config:?}").contains(key));
        }
        let without_keys = parse(&text, Some(Transport::Remote), &source(&[("/k.json", KEYSTORE), ("K", key)]));
        assert_eq!(without_keys.unwrap_err().field, "http.api_keys_env");
        let other = "02".repeat(32);
        let other: &'static str = other.leak();
        for (file, key, field, word) in [
            (KEYSTORE, other, "signer.keystore_path", "/k.json: the key does not open"),
            (KEYSTORE, "0badc0de", "signer.encryption_key_env", "openssl rand -hex 32"),
            ("{}", key, "signer.keystore_path", "members"),
        ] {
            let error = parse(&text, None, &source(&[("/k.json", file), ("K", key)])).unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.problem.contains(word) && !error.problem.contains(key), "{error}");
        }
    }

    #[test]
    fn only_an_external_signer_has_a_smart_accounts_ceiling() {
        let ceiling = "smart_account_ceiling_atomic: '5'";
        let external = format!("{CATALOG}signer: {{mode: external, base_url: 'https://s.example', {ceiling}}}\n");
        let config = parse(&external, None, &source(&[])).unwrap();
        assert_eq!(config.smart_account_ceiling, Some(Amount::from_u64(5)));
        let own = format!("{CATALOG}signer: {{mode: env-secret, {ceiling}}}\n");
        let seed = ("STELLAR_SECRET_KEY", "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X");
        let error = parse(&own, None, &source(&[seed])).unwrap_err();
        assert_eq!(error.field, "signer.smart_account_ceiling_atomic");
        assert!(error.problem.contains("external"), "{error}");
    }

    #[test]
    fn a_mainnet_on_a_remote_transport_needs_postgres_and_never_in_plain_text() {
        let text = format!(
            "{CATALOG}signer: {{mode: external, base_url: 'https://s.example'}}\n\
             networks: {{'stellar:pubnet': {{enabled: true, rpc_urls: ['https://r.example']}}}}\n"
        );
        let error = parse(&text, Some(Transport::Remote), &source(&[KEYS])).unwrap_err();
        assert_eq!(error.field, "networks.stellar:pubnet.enabled");
        let cluster = format!("{text}budget: {{store: postgres}}\n");
        for (url, transport, accepted) in [
            ("postgres://u:hunter2@db.example/x", Transport::Remote, true),
            ("postgres://u:hunter2@127.0.0.1/x?sslmode=disable", Transport::Remote, true),
            ("postgres://u:hunter2@db.example/x?sslmode=disable", Transport::Remote, false),
            ("postgres://u:hunter2@db.example/x?sslmode=disable", Transport::Stdio, false),
        ] {
            let parsed = parse(&cluster, Some(transport), &source(&[KEYS, ("DATABASE_URL", url)]));
            match parsed {
                Ok(config) => {
                    assert!(accepted, "{url}");
                    assert!(!format!("{config:?}").contains("hunter2"));
                }
                Err(error) => {
                    assert!(!accepted && error.field == "networks.stellar:pubnet.enabled", "{url}: {error}");
                    assert!(error.problem.contains("verify-full") && !error.problem.contains("hunter2"), "{error}");
                }
            }
        }
        let config = parse(&text, Some(Transport::Stdio), &source(&[])).unwrap();
        assert!(config.payable.contains(&"stellar:pubnet".parse().unwrap()));
    }

    #[test]
    fn a_weak_key_or_ring_is_refused_before_anything_starts_and_never_quoted() {
        let text = format!("{CATALOG}keys: {{ring_env: RING}}\n");
        let good = "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f";
        let ring = |ring| parse(&text, None, &source(&[("RING", ring)]));
        assert!(matches!(ring(good).unwrap().key_ring, KeyRingSource::Keys(_)));
        let error = ring("0badc0de0badc0de").unwrap_err();
        assert!(error.field == "keys.ring_env" && error.problem.contains("32 bytes"), "{error}");
        assert!(!error.to_string().contains("0badc0de"), "{error}");

        let keys = |keys, transport| parse(CATALOG, Some(transport), &source(&[("MCP_SERVER_API_KEYS", keys)]));
        let error = keys("a:0badc0de", Transport::Remote).unwrap_err();
        assert!(error.field == "http.api_keys_env" && error.problem.contains("openssl"), "{error}");
        assert!(!error.to_string().contains("0badc0de"), "{error}");
        assert!(keys("a:0badc0de", Transport::Stdio).unwrap().http.api_keys.is_none(), "not read on stdio");
    }

    #[test]
    fn database_url_names_the_ledger_or_is_refused_without_its_password() {
        let paying = format!("{CATALOG}signer: {{mode: external, base_url: 'https://s.example'}}\n");
        let stored = |text: &str, pairs: &[_]| parse(text, None, &source(pairs)).map(|config| config.store);
        let sqlite = Ok(Store::Sqlite("/var/lib/l.sqlite".into()));
        assert_eq!(stored(&paying, &[("DATABASE_URL", "sqlite:///var/lib/l.sqlite")]), sqlite);
        let named = format!("{paying}budget: {{path: /elsewhere, database_url_env: DB}}\n");
        assert_eq!(stored(&named, &[("DB", "sqlite:/var/lib/l.sqlite"), ("DATABASE_URL", "mysql://x")]), sqlite);
        for url in ["postgres://u:hunter2@db/x", "sqlite::memory:", "sqlite://l.sqlite", "hunter2"] {
            let error = stored(&paying, &[("DATABASE_URL", url)]).unwrap_err();
            assert_eq!(error.field, "DATABASE_URL", "{url}");
            assert!(error.problem.contains("sqlite:///absolute/path") && !error.problem.contains("hunter2"), "{error}");
        }
        // Discovery has no ledger: another program's variable is no reason to refuse.
        assert!(stored(CATALOG, &[("DATABASE_URL", "postgres://u:hunter2@db/x")]).is_ok());
        let operator = load_store(None, &source(&[("DATABASE_URL", "postgres://u:hunter2@db/x")]));
        assert_eq!(operator.unwrap_err().field, "DATABASE_URL");

        let cluster = format!("{paying}budget: {{store: postgres}}\n");
        let database = Database::parse("postgres://u:hunter2@db/x", None).unwrap();
        let url = [("DATABASE_URL", "postgres://u:hunter2@db/x")];
        assert_eq!(stored(&cluster, &url), Ok(Store::Postgres(Box::new(database))));
        for url in ["sqlite:///var/lib/l.sqlite", "postgres://u:hunter2@db/x?sslmode=prefer", "hunter2"] {
            let error = stored(&cluster, &[("DATABASE_URL", url)]).unwrap_err();
            assert!(error.field == "DATABASE_URL" && !error.problem.contains("hunter2"), "{error}");
        }
        let discovery = format!("{CATALOG}budget: {{store: postgres}}\n");
        assert_eq!(stored(&discovery, &[]), Ok(Store::None), "discovery needs no database");
    }

    #[test]
    fn a_refused_url_does_not_show_the_access_key_in_it() {
        for url in ["https://r.example/v1?key=hunter2", "https://u:hunter2@r.example", "https://r.example:x/hunter2"] {
            let text = format!("{CATALOG}networks: {{'stellar:testnet': {{rpc_urls: ['{url}']}}}}\n");
            let error = parse(&text, None, &source(&[])).unwrap_err();
            assert_eq!(error.field, "networks.stellar:testnet.rpc_urls");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn the_environment_overrides_url_and_port_and_no_secret_shows() {
        let env = source(&[("FACILITATOR_URL", "http://127.0.0.1:9"), ("PORT", "81"), KEYS]);
        let config = parse(CATALOG, Some(Transport::Remote), &env).unwrap();
        assert_eq!((config.catalog_url.as_str(), config.http.port), ("http://127.0.0.1:9/", 81));
        assert!(!format!("{config:?}").contains("0123456789abcdef"));
    }
}
