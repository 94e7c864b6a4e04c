//! The key in this process, from a variable of the environment or from a keystore file.

use ed25519_dalek::{Signer as _, SigningKey};

use super::keystore::Seed;

/// Wiped when dropped; no Debug.
pub(super) struct Local {
    key: SigningKey,
    address: String,
}

impl Local {
    pub fn new(seed: &Seed) -> Local {
        Local { key: seed.key(), address: seed.address() }
    }

    /// `G…`
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn sign(&self, digest: &[u8; 32]) -> [u8; 64] {
        self.key.sign(digest).to_bytes()
    }
}
