//! Accounts with their keys.

use std::fmt;

use ed25519_dalek::SigningKey;
use stellar_strkey::ed25519::PrivateKey;
use stellar_xdr::{AccountId, PublicKey, Uint256};
use zeroize::Zeroizing;

use crate::ports::World;

#[derive(Clone)]
pub struct Account {
    pub key: SigningKey,
}

impl Account {
    pub fn generate(world: &World) -> Account {
        Account::from_seed(&Zeroizing::new(world.random()))
    }

    pub fn from_seed(seed: &[u8; 32]) -> Account {
        Account { key: SigningKey::from_bytes(seed) }
    }

    pub fn id(&self) -> AccountId {
        AccountId(PublicKey::PublicKeyTypeEd25519(Uint256(self.key.verifying_key().to_bytes())))
    }

    /// `G…`
    pub fn address(&self) -> String {
        self.id().to_string()
    }

    /// `S…`
    pub fn secret(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("{}", PrivateKey(self.key.to_bytes()).as_unredacted()))
    }
}

/// Never the key.
impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Account({})", self.address())
    }
}
