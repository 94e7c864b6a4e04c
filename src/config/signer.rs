//! Which signer, and where its key comes from.

use std::path::{Path, PathBuf};

use stellar_strkey::ed25519::PrivateKey;
use url::Url;

use super::value::{host, is_loopback, operator_url, secret_env};
use super::{ConfigError, Secret, Source, Transport, auth, file, refuse};
use crate::seal::SealError;
use crate::signer::keystore::{KeystoreError, KeystoreKey, Seed};

/// The variable with a keystore's key, where the file names no other.
pub const KEYSTORE_KEY_ENV: &str = "TOLLWAY_KEYSTORE_KEY";

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
        /// Shown to the signer, and to nobody else.
        certificate: Option<ClientCertificate>,
    },
}

/// PEM. Read at the start: a renewed one is taken by the next process.
#[derive(Debug, Clone)]
pub struct ClientCertificate {
    /// Leaf first.
    pub chain: Vec<u8>,
    pub key: Secret,
}

impl SignerMode {
    pub fn can_pay(&self) -> bool {
        !matches!(self, SignerMode::None)
    }
}

pub(super) fn signer(
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
    only("client_certificate_file", &file.client_certificate_file, "external")?;
    only("client_key_file", &file.client_key_file, "external")?;
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
            let certificate = client_certificate(file, &base_url, source)?;
            SignerMode::External { base_url, auth_header, certificate }
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
            format!(
                "is missing, and the environment variable MCP_SERVER_API_KEYS is not set, but a signer is configured: a \
                 remote transport never runs a paying tool for strangers; use one of {} (keys: name:secret, 32 bytes or \
                 more)",
                auth::FIXES
            ),
        );
    }
    Ok(mode)
}

fn client_certificate(
    file: &file::Signer,
    base_url: &Url,
    source: &dyn Source,
) -> Result<Option<ClientCertificate>, ConfigError> {
    let (chain, key) = match (&file.client_certificate_file, &file.client_key_file) {
        (None, None) => return Ok(None),
        (Some(chain), Some(key)) => (Path::new(chain), Path::new(key)),
        (Some(_), None) => {
            return refuse("signer.client_key_file", "is missing: it holds the client certificate's key");
        }
        (None, Some(_)) => return refuse("signer.client_certificate_file", "is missing: the key alone shows nothing"),
    };
    if base_url.scheme() != "https" {
        let problem = "cannot be shown: signer.base_url is not HTTPS; correct that, or remove both client_ fields";
        return refuse("signer.client_certificate_file", problem);
    }
    let read = source.read(chain);
    let read = read.or_else(|e| {
        refuse("signer.client_certificate_file", format!("{} cannot be read ({e}): correct the path", chain.display()))
    })?;
    let key = source.keys_file(key).or_else(|e| refuse("signer.client_key_file", e.to_string()))?;
    crate::http::tls_as(None, &read, key.as_bytes()).or_else(|e| refuse("signer.client_certificate_file", e))?;
    Ok(Some(ClientCertificate { chain: read.to_vec(), key: Secret::new(key.to_string()) }))
}

/// The keystore is opened here, so that a wrong key is one sentence at the start.
pub(super) fn encrypted_key(file: &file::Signer, source: &dyn Source) -> Result<SignerMode, ConfigError> {
    let Some(path) = &file.keystore_path else {
        let problem = "is missing: make the file with tollway keystore create --out FILE, and write its path here";
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
            KeystoreError::File(SealError::File(_, error)) if error.kind() == std::io::ErrorKind::NotFound => {
                let path = path.display();
                format!(
                    "there is no file {path}: make it with tollway keystore create --out {path}, or correct the path"
                )
            }
            KeystoreError::File(error) => error.to_string(),
            error => format!("{}: {error}", path.display()),
        };
        refuse("signer.keystore_path", problem)
    })?;
    Ok(SignerMode::EncryptedKey { path, seed })
}
