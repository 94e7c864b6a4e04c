//! The key in an environment variable of this process: for stdio, where the process is the agent's own.

use ed25519_dalek::{Signer as _, SigningKey};
use stellar_strkey::ed25519::{PrivateKey, PublicKey};

use super::SignerError;

/// Wiped when dropped; no Debug.
pub(super) struct EnvSecret(SigningKey);

impl EnvSecret {
    pub fn new(seed: &str) -> Result<EnvSecret, SignerError> {
        let seed = PrivateKey::from_string(seed.trim()).map_err(|_| SignerError::Seed)?;
        Ok(EnvSecret(SigningKey::from_bytes(&seed.0)))
    }

    pub fn address(&self) -> String {
        PublicKey(self.0.verifying_key().to_bytes()).to_string().as_str().to_owned()
    }

    pub fn sign(&self, digest: &[u8; 32]) -> [u8; 64] {
        self.0.sign(digest).to_bytes()
    }
}
