//! The key ring: one secret (or several, the newest first), and what is derived from it: the AEAD that seals payloads
//! and outcomes in the ledger, and the MAC that signs session tokens and the relay's headers.

use crate::ports::World;

#[derive(Debug, thiserror::Error)]
pub enum SealError {
    #[error("a ring needs keys of at least 32 bytes")]
    KeyTooShort,
    #[error("sealed with a key that is no longer in the ring, or altered")]
    Open,
}

/// Newest key first: it seals and signs; all of them open and verify.
#[derive(Clone)]
pub struct KeyRing {
    keys: Vec<[u8; 32]>,
}

impl KeyRing {
    /// Keys of at least 32 bytes each, reduced by HKDF-SHA256 per purpose.
    pub fn new(keys: Vec<Vec<u8>>) -> Result<KeyRing, SealError> {
        let _ = keys;
        Err(SealError::KeyTooShort)
    }
    /// A ring of this process only.
    pub fn ephemeral(world: &World) -> KeyRing {
        KeyRing { keys: vec![world.random()] }
    }
    /// AES-256-GCM with a random nonce; `context` (kind and row) is authenticated, not stored.
    pub fn seal(&self, world: &World, context: &str, plain: &[u8]) -> Vec<u8> {
        let _ = (world, context, plain, &self.keys);
        Vec::new()
    }
    pub fn open(&self, context: &str, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        let _ = (context, sealed);
        Err(SealError::Open)
    }
    /// HMAC-SHA256 under the newest key, for `purpose`.
    pub fn sign(&self, purpose: &str, message: &[u8]) -> [u8; 32] {
        let _ = (purpose, message);
        [0; 32]
    }
    /// Constant time, against every key of the ring.
    pub fn verify(&self, purpose: &str, message: &[u8], tag: &[u8]) -> bool {
        let _ = (purpose, message, tag);
        false
    }
}
