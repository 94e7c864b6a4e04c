//! The key ring that seals and signs.

use std::path::Path;

use super::value::{millis, secret_env};
use super::{ConfigError, Source, file, refuse};
use crate::seal::{KeyRing, SIGN_AFTER};

#[derive(Debug, Clone)]
pub enum KeyRingSource {
    /// A file of mode 0600 beside the SQLite ledger, made on first use.
    BesideLedger,
    Keys(KeyRing),
}

pub(super) fn key_ring(file: &file::Keys, source: &dyn Source) -> Result<KeyRingSource, ConfigError> {
    let default_ms = u64::try_from(SIGN_AFTER.as_millis()).unwrap_or(u64::MAX);
    let sign_after = millis("keys.sign_after_ms", file.sign_after_ms, default_ms, 0, 3_600_000)?;
    match (&file.ring_env, &file.ring_file) {
        (Some(_), Some(_)) => refuse("keys", "has both ring_env and ring_file: write one of them"),
        (Some(name), None) => match secret_env(name, source).map(|keys| KeyRing::parse(keys.expose())) {
            Some(Ok(ring)) => Ok(KeyRingSource::Keys(ring)),
            Some(Err(e)) => refuse("keys.ring_env", format!("{name}: {e}")),
            None => refuse("keys.ring_env", format!("the environment variable {name} is not set")),
        },
        (None, Some(path)) => match source.key_ring(Path::new(path)) {
            Ok(ring) => Ok(KeyRingSource::Keys(ring.with_sign_after(sign_after))),
            Err(e) => refuse("keys.ring_file", e.to_string()),
        },
        (None, None) => Ok(KeyRingSource::BesideLedger),
    }
}
