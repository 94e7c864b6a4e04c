//! The file of `tollway signer`: a file of its own, because the process has nothing in common with the one that pays.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use stellar_strkey::Strkey;

use super::networks::{NetworkConfig, networks};
use super::security::security;
use super::store::{ca_file, pooler};
use super::value::{amount, bounded, millis, secret_env};
use super::{ConfigError, NetworkSecurity, Source, file, refusal, refuse, signer};
use crate::ledger::Database;
use crate::mcp::StaticKeys;
use crate::money::{Amount, Asset, Network, ParseError};
use crate::signer::keystore::Seed;
use crate::signer::role::policy::{AssetPolicy, LedgerSource, NetworkPolicy, Policy, Recipients};
use crate::signer::role::tls;

/// Two secrets under one name: the new one and the one that it replaces.
const KEYS_PER_NAME: usize = 2;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    bind: Option<String>,
    port: Option<u16>,
    probe_bind: Option<String>,
    probe_port: Option<u16>,
    drain_ms: Option<u64>,
    #[serde(default)]
    key: Key,
    #[serde(default)]
    tls: Tls,
    #[serde(default)]
    bearer_keys: BearerKeys,
    #[serde(default)]
    database: StoreFile,
    #[serde(default)]
    networks: BTreeMap<String, NetworkFile>,
    #[serde(default)]
    network_security: SecurityFile,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    keystore_path: Option<String>,
    encryption_key_env: Option<String>,
    secret_env: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tls {
    directory: Option<String>,
    #[serde(default)]
    names: Vec<String>,
    certificate_file: Option<String>,
    key_file: Option<String>,
    client_ca_file: Option<String>,
    reload_ms: Option<u64>,
    #[serde(default)]
    insecure_plain_loopback: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct BearerKeys {
    env: Option<String>,
    file: Option<String>,
    max_requests_per_second: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreFile {
    store: Option<String>,
    path: Option<String>,
    url_env: Option<String>,
    ca_file: Option<String>,
    schema: Option<String>,
    pooler: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SecurityFile {
    ca_file: Option<String>,
    #[serde(default)]
    allow_insecure_local: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkFile {
    passphrase: Option<String>,
    #[serde(default)]
    rpc_urls: Vec<String>,
    min_ledger_seconds: Option<f64>,
    ledger_anchor: Option<AnchorFile>,
    max_ledgers_ahead: Option<usize>,
    #[serde(default)]
    assets: Vec<AssetFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnchorFile {
    sequence: u32,
    /// Unix seconds.
    closed_at: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AssetFile {
    asset: String,
    recipients: Option<RecipientsFile>,
    per_signature_max_atomic: Option<String>,
    day_max_atomic: Option<String>,
    #[serde(default)]
    unlimited: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum RecipientsFile {
    Word(String),
    List(Vec<String>),
}

/// `tollway signer`, ready to be started.
#[derive(Debug, Clone)]
pub struct SignerRole {
    pub bind: SocketAddr,
    pub probe: SocketAddr,
    pub drain: Duration,
    pub seed: Seed,
    /// `None`: plain HTTP, on loopback.
    pub tls: Option<tls::Source>,
    /// Between two looks at the files of TLS and the bearer keys.
    pub reload: Duration,
    pub bearer: BearerSource,
    /// As they are now.
    pub keys: StaticKeys,
    /// SHA-256 of their text, by which a change is seen.
    pub keys_digest: [u8; 32],
    pub requests_per_second: u32,
    pub store: RoleStore,
    pub policy: Policy,
    /// Those with an RPC.
    pub networks: BTreeMap<Network, NetworkConfig>,
    pub security: NetworkSecurity,
}

/// Where the bearer keys are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BearerSource {
    Env(String),
    /// Looked at again and again.
    File(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoleStore {
    Sqlite(PathBuf),
    Postgres(Box<Database>),
}

pub fn load(path: Option<&Path>, source: &dyn Source) -> Result<SignerRole, ConfigError> {
    parse(&text(path, source)?, source)
}

/// Where its book is, and nothing else: to migrate it no key has to be there.
pub fn load_store(path: Option<&Path>, source: &dyn Source) -> Result<RoleStore, ConfigError> {
    let text = text(path, source)?;
    let file: File = serde_saphyr::from_str(&text).map_err(|e| refusal::sentence(&text, &e))?;
    store(&file.database, source)
}

fn text(path: Option<&Path>, source: &dyn Source) -> Result<String, ConfigError> {
    if path.is_none() {
        let way = "tollway signer needs a file of its own: tollway init signer --output signer.yaml, then --config";
        return refuse("--config", way);
    }
    super::text(path, source)
}

pub fn parse(text: &str, source: &dyn Source) -> Result<SignerRole, ConfigError> {
    let file: File = serde_saphyr::from_str(text).map_err(|e| refusal::sentence(text, &e))?;
    let address = |field: &str, bind: Option<&str>, port: Option<u16>, default: u16| {
        let bind = bind.unwrap_or("127.0.0.1");
        let ip: IpAddr = bind.parse().or_else(|_| refuse(field, format!("{bind:?} is not an IP address")))?;
        Ok::<_, ConfigError>(SocketAddr::new(ip, port.unwrap_or(default)))
    };
    let bind = address("bind", file.bind.as_deref(), file.port, 8443)?;
    let probe = address("probe_bind", file.probe_bind.as_deref(), file.probe_port, 9443)?;
    let reload = millis("tls.reload_ms", file.tls.reload_ms, 2_000, 50, 3_600_000)?;
    let store = store(&file.database, source)?;
    let tls = tls(file.tls, bind, &store)?;
    let (bearer, keys, keys_digest) = bearer(&file.bearer_keys, source)?;
    let rate =
        bounded("bearer_keys.max_requests_per_second", file.bearer_keys.max_requests_per_second, 100, 1, 100_000)?;
    let security = security(
        file::NetworkSecurity {
            ca_file: file.network_security.ca_file,
            allow_insecure_local: file.network_security.allow_insecure_local,
            ..file::NetworkSecurity::default()
        },
        source,
    )?;
    let (policy, networks) = policy(file.networks, security.allow_insecure_local)?;
    if let (RoleStore::Postgres(database), Some(network)) = (&store, policy.networks.keys().find(|n| n.is_mainnet()))
        && database.is_plain_remote()
    {
        let problem = format!("reaches the database in plain text (sslmode=disable), but {network} is a mainnet");
        return refuse("database.url_env", format!("{problem}: write sslmode=verify-full in the URL"));
    }
    Ok(SignerRole {
        bind,
        probe,
        drain: millis("drain_ms", file.drain_ms, 15_000, 0, 600_000)?,
        seed: key(&file.key, source)?,
        tls,
        reload,
        bearer,
        keys,
        keys_digest,
        requests_per_second: u32::try_from(rate).unwrap_or(u32::MAX),
        store,
        policy,
        networks,
        security,
    })
}

fn key(file: &Key, source: &dyn Source) -> Result<Seed, ConfigError> {
    match (&file.keystore_path, &file.secret_env) {
        (Some(_), Some(_)) => refuse("key", "has both keystore_path and secret_env: write one of them"),
        (None, None) => {
            let ways = "write keystore_path (tollway keystore create makes the file), or secret_env, the name of the \
                        environment variable with the secret seed";
            refuse("key", format!("is missing: {ways}"))
        }
        (Some(path), None) => {
            let mode = file::Signer {
                keystore_path: Some(path.clone()),
                encryption_key_env: file.encryption_key_env.clone(),
                ..file::Signer::default()
            };
            match signer::encrypted_key(&mode, source) {
                Ok(super::SignerMode::EncryptedKey { seed, .. }) => Ok(seed),
                Ok(_) => refuse("key.keystore_path", "holds no key"),
                Err(e) => refuse(e.field.replacen("signer.", "key.", 1), e.problem),
            }
        }
        (None, Some(name)) => {
            if file.encryption_key_env.is_some() {
                return refuse("key.encryption_key_env", "belongs to key.keystore_path: remove it or write that");
            }
            let Some(seed) = secret_env(name, source) else {
                return refuse("key.secret_env", format!("the environment variable {name} is not set"));
            };
            Seed::parse(seed.expose())
                .or_else(|e| refuse("key.secret_env", format!("the environment variable {name} {e}")))
        }
    }
}

fn absolute(field: &str, path: &str) -> Result<PathBuf, ConfigError> {
    if !Path::new(path).is_absolute() {
        return refuse(field, format!("{path:?} is relative: write an absolute path"));
    }
    Ok(PathBuf::from(path))
}

fn tls(file: Tls, bind: SocketAddr, store: &RoleStore) -> Result<Option<tls::Source>, ConfigError> {
    if file.insecure_plain_loopback {
        if !bind.ip().is_loopback() {
            let problem = format!("true, but bind is {}: plain HTTP is for development on loopback", bind.ip());
            return refuse("tls.insecure_plain_loopback", format!("{problem}; remove it"));
        }
        let other = [&file.directory, &file.certificate_file, &file.key_file, &file.client_ca_file];
        if other.iter().any(|field| field.is_some()) || !file.names.is_empty() {
            return refuse("tls.insecure_plain_loopback", "true, and TLS is configured beside it: remove one of them");
        }
        return Ok(None);
    }
    let client_ca = file.client_ca_file.as_deref().map(|path| absolute("tls.client_ca_file", path)).transpose()?;
    let certificate = match (&file.certificate_file, &file.key_file, &file.directory) {
        (Some(_), Some(_), Some(_)) => {
            return refuse("tls.directory", "is for a certificate of the signer's own: remove it, or both files");
        }
        (Some(certificate), Some(key), None) => {
            if !file.names.is_empty() {
                return refuse("tls.names", "are those of an own certificate: remove them, or the certificate's files");
            }
            tls::Certificate::Files {
                certificate: absolute("tls.certificate_file", certificate)?,
                key: absolute("tls.key_file", key)?,
            }
        }
        (Some(_), None, _) => return refuse("tls.key_file", "is missing beside tls.certificate_file: write both"),
        (None, Some(_), _) => return refuse("tls.certificate_file", "is missing beside tls.key_file: write both"),
        (None, None, directory) => {
            let directory = match (directory, store) {
                (Some(directory), _) => absolute("tls.directory", directory)?,
                (None, RoleStore::Sqlite(path)) => path.parent().unwrap_or(Path::new("/")).to_owned(),
                (None, RoleStore::Postgres(_)) => {
                    let ways = "write where the signer may keep a certificate of its own, or tls.certificate_file and \
                                tls.key_file";
                    return refuse("tls.directory", format!("is missing: {ways}"));
                }
            };
            let names = if file.names.is_empty() { tls::default_names(bind.ip()) } else { file.names };
            tls::Certificate::Own { directory, names }
        }
    };
    Ok(Some(tls::Source { certificate, client_ca }))
}

fn bearer(file: &BearerKeys, source: &dyn Source) -> Result<(BearerSource, StaticKeys, [u8; 32]), ConfigError> {
    let bearer = match (&file.env, &file.file) {
        (Some(_), Some(_)) => return refuse("bearer_keys", "has both env and file: write one of them"),
        (None, None) => {
            let ways =
                "write env or file: a list of name:secret, each secret of 32 bytes or more (openssl rand -hex 32)";
            return refuse("bearer_keys", format!("is missing: {ways}"));
        }
        (Some(name), None) => BearerSource::Env(name.clone()),
        (None, Some(path)) => BearerSource::File(absolute("bearer_keys.file", path)?),
    };
    let (keys, digest) = read_bearer(&bearer, source)?;
    Ok((bearer, keys, digest))
}

/// The keys as they are now (a line or a comma between two of them), and the SHA-256 of their text.
pub fn read_bearer(bearer: &BearerSource, source: &dyn Source) -> Result<(StaticKeys, [u8; 32]), ConfigError> {
    let (field, text) = match bearer {
        BearerSource::Env(name) => match secret_env(name, source) {
            Some(secret) => ("bearer_keys.env", zeroize::Zeroizing::new(secret.expose().to_owned())),
            None => return refuse("bearer_keys.env", format!("the environment variable {name} is not set")),
        },
        BearerSource::File(path) => match source.keys_file(path) {
            Ok(text) => ("bearer_keys.file", text),
            Err(error) => return refuse("bearer_keys.file", error.to_string()),
        },
    };
    let list = zeroize::Zeroizing::new(text.replace(['\n', '\r'], ","));
    let keys = StaticKeys::parse(&list).or_else(|e| refuse(field, e.to_string()))?;
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for name in keys.names() {
        let count = names.entry(name.as_str()).or_default();
        *count += 1;
        if *count > KEYS_PER_NAME {
            let problem = format!("{name} has more than {KEYS_PER_NAME} secrets: the new one and the one it replaces");
            return refuse(field, problem);
        }
    }
    Ok((keys, Sha256::digest(list.as_bytes()).into()))
}

fn store(file: &StoreFile, source: &dyn Source) -> Result<RoleStore, ConfigError> {
    let name = file.url_env.as_deref().unwrap_or("SIGNER_DATABASE_URL");
    match file.store.as_deref() {
        None | Some("sqlite") => {
            let beside = [&file.url_env, &file.ca_file, &file.schema, &file.pooler];
            if beside.iter().any(|field| field.is_some()) {
                return refuse("database", "url_env, ca_file, schema and pooler belong to store: postgres");
            }
            match &file.path {
                Some(path) => Ok(RoleStore::Sqlite(absolute("database.path", path)?)),
                None => {
                    let why = "what was signed is kept there, and caps are counted there";
                    refuse("database.path", format!("is missing: write an absolute path ({why})"))
                }
            }
        }
        Some("postgres") => {
            if file.path.is_some() {
                return refuse("database.path", "belongs to store: sqlite: remove it or change the store");
            }
            let Some(url) = secret_env(name, source) else {
                let form = "postgresql://user:password@host/database";
                return refuse("database.url_env", format!("the environment variable {name} is not set: {form}"));
            };
            let ca = file.ca_file.as_deref().map(|path| ca_file("database.ca_file", path, source)).transpose()?;
            let database = Database::parse(url.expose(), ca).or_else(|problem| refuse(name, problem))?;
            let pooler = pooler("database.pooler", file.pooler.as_deref())?;
            let database = database.named(name).behind(pooler).or_else(|problem| refuse(name, problem))?;
            let database = match &file.schema {
                Some(schema) => database
                    .in_schema(schema)
                    .or_else(|problem| refuse("database.schema", format!("{schema:?} {problem}")))?,
                None => database,
            };
            Ok(RoleStore::Postgres(Box::new(database)))
        }
        Some(other) => refuse("database.store", format!("{other:?} is unknown: write sqlite or postgres")),
    }
}

type Parsed = (Policy, BTreeMap<Network, NetworkConfig>);

fn policy(written: BTreeMap<String, NetworkFile>, allow_insecure_local: bool) -> Result<Parsed, ConfigError> {
    if written.is_empty() {
        return refuse("networks", "is empty: what no entry allows is refused, so nothing would ever be signed");
    }
    let plain = |n: &NetworkFile| file::Network {
        passphrase: n.passphrase.clone(),
        rpc_urls: n.rpc_urls.clone(),
        min_ledger_seconds: n.min_ledger_seconds,
        ..file::Network::default()
    };
    let plain = written.iter().map(|(name, n)| (name.clone(), plain(n))).collect();
    let mut read = networks(plain, allow_insecure_local)?;
    let mut policy = Policy::default();
    for (name, n) in written {
        let field = |member: &str| format!("networks.{name}.{member}");
        let network: Network = name.parse().or_else(|e: ParseError| refuse("networks", e.to_string()))?;
        let Some(config) = read.get(&network) else { return refuse(field("passphrase"), "is missing") };
        let (passphrase, ledger_ms) = (config.passphrase.clone(), config.min_ledger_ms);
        let twin = |(_, other): &(&Network, &NetworkPolicy)| other.passphrase == passphrase;
        if let Some((other, _)) = policy.networks.iter().find(twin) {
            return refuse(
                field("passphrase"),
                format!("is that of {other} too: one network has one entry and one cap"),
            );
        }
        let ledger = match (n.rpc_urls.is_empty(), n.ledger_anchor) {
            (false, None) => LedgerSource::Rpc,
            (false, Some(_)) => {
                return refuse(field("ledger_anchor"), "is for a signer without rpc_urls: remove one of them");
            }
            (true, _) if network.is_mainnet() => {
                return refuse(
                    field("rpc_urls"),
                    "is empty: on a mainnet the life of a signature is held to the chain",
                );
            }
            (true, Some(anchor)) => {
                let unix_ms = anchor.closed_at.saturating_mul(1000);
                LedgerSource::Anchor { sequence: anchor.sequence, unix_ms, ledger_ms }
            }
            (true, None) => {
                let ways = "write rpc_urls, or ledger_anchor: {sequence, closed_at} of a recent ledger where the signer \
                            reaches no RPC";
                return refuse(
                    field("rpc_urls"),
                    format!("is empty, so how long a signature lives is not known: {ways}"),
                );
            }
        };
        if ledger != LedgerSource::Rpc {
            // The reader of networks knows a public RPC for testnet; nobody wrote it here.
            read.remove(&network);
        }
        let ahead = bounded(&field("max_ledgers_ahead"), n.max_ledgers_ahead, 60, 1, 17_280)?;
        let mut assets = BTreeMap::new();
        for (i, entry) in n.assets.into_iter().enumerate() {
            let field = |member: &str| format!("networks.{name}.assets[{i}].{member}");
            let (contract, entry) = asset(entry, field)?;
            if assets.insert(contract.clone(), entry).is_some() {
                return refuse(field("asset"), format!("{contract} stands twice: one asset has one entry and one cap"));
            }
        }
        if assets.is_empty() {
            return refuse(
                field("assets"),
                "is empty: what no entry allows is refused; write one, or remove the network",
            );
        }
        let max_ledgers_ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
        policy.networks.insert(network, NetworkPolicy { passphrase, max_ledgers_ahead, ledger, assets });
    }
    Ok((policy, read))
}

fn asset(file: AssetFile, field: impl Fn(&str) -> String) -> Result<(String, AssetPolicy), ConfigError> {
    let parsed: Asset = file.asset.parse().or_else(|e: ParseError| refuse(field("asset"), e.to_string()))?;
    if !matches!(Strkey::from_string(parsed.as_str()), Ok(Strkey::Contract(_))) {
        return refuse(field("asset"), format!("{:?} is not a token contract (C…)", parsed.as_str()));
    }
    let recipients = match file.recipients {
        None => return refuse(field("recipients"), "is missing: write the addresses that may be paid, or any"),
        Some(RecipientsFile::Word(word)) if word == "any" => Recipients::Any,
        Some(RecipientsFile::Word(word)) => {
            return refuse(field("recipients"), format!("{word:?} is unknown: write any, or a list of addresses"));
        }
        Some(RecipientsFile::List(list)) => {
            let mut these = BTreeSet::new();
            for address in list {
                match Strkey::from_string(&address) {
                    Ok(Strkey::PublicKeyEd25519(_) | Strkey::Contract(_)) => these.insert(address),
                    _ => {
                        let problem = format!("{address:?} is neither a G nor a C address");
                        return refuse(field("recipients"), problem);
                    }
                };
            }
            if these.is_empty() {
                return refuse(field("recipients"), "is empty, so nobody could be paid: write addresses, or any");
            }
            Recipients::These(these)
        }
    };
    let figure = |member: &str, value: &Option<String>| -> Result<Option<Amount>, ConfigError> {
        match value {
            Some(value) => amount(&field(member), value).map(Some),
            None if file.unlimited => Ok(None),
            None => refuse(
                field(member),
                "is missing: write an amount in atomic units, or unlimited: true for every figure that is not written",
            ),
        }
    };
    let per_signature = figure("per_signature_max_atomic", &file.per_signature_max_atomic)?;
    let per_day = figure("day_max_atomic", &file.day_max_atomic)?;
    if file.unlimited && per_signature.is_some() && per_day.is_some() {
        return refuse(field("unlimited"), "true, but both figures are written: remove it, or what is unlimited");
    }
    Ok((parsed.as_str().to_owned(), AssetPolicy { recipients, per_signature, per_day }))
}
