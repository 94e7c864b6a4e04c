//! Who holds the key. `none` reads no key even if one is there (then there is no `Signer`); `env-secret` is for stdio;
//! `encrypted-key` opens a keystore file at start; `external` asks a signer over HTTPS and believes nothing of its
//! answer that does not verify here.

mod external;
pub mod keystore;
mod local;
#[cfg(feature = "roles")]
pub mod role;
pub mod wire;
#[cfg(all(test, feature = "roles"))]
mod tests;

use std::time::Duration;

use tokio::time::Instant;
use url::Url;
use zeroize::Zeroizing;

use crate::chain::stellar::{Draft, SignedEntry};
use crate::http::Client;
use crate::ledger::Reserved;
use crate::money::Network;
use crate::ports::World;

#[derive(Debug, thiserror::Error)]
pub enum SignerError {
    #[error("the secret {0}")]
    Seed(#[from] keystore::SecretError),
    #[error("the Authorization header for the signer is not printable text")]
    Header,
    #[error("the signer could not be asked for its address: {0}")]
    Address(String),
}

/// A reserved payment with its verified signature: what may be sent. Only [`Signer::sign`] makes it.
#[must_use]
pub struct Signed {
    pub(crate) reserved: Reserved,
    pub(crate) entry: SignedEntry,
    /// Private: nobody else can make a `Signed`.
    _made_here: (),
}

/// Why nothing was signed; every variant gives the reservation back for its bookkeeping.
#[derive(Debug)]
pub enum NotSigned {
    /// More than `sign_within` since the reservation, lease still ours: nothing was asked.
    WindowMissed(Reserved),
    /// The lease has expired: nothing was asked, the row is no longer ours.
    LeaseLost(Reserved),
    /// The signer's policy says no.
    Refused(Reserved, String),
    /// Certain: the request never left.
    Unavailable(Reserved, String),
    /// The request left; the answer was lost, malformed, late, or a signature that does not verify.
    Failed(Reserved, String),
}

impl NotSigned {
    /// The stable word of it.
    pub fn word(&self) -> &'static str {
        match self {
            NotSigned::WindowMissed(_) => "window_missed",
            NotSigned::LeaseLost(_) => "lease_lost",
            NotSigned::Refused(..) => "refused",
            NotSigned::Unavailable(..) => "unavailable",
            NotSigned::Failed(..) => "failed",
        }
    }
}

pub struct Signer(Mode);

enum Mode {
    Local(Box<local::Local>),
    External(Box<external::External>),
}

impl Signer {
    /// `seed`: a Stellar secret seed (`S…`).
    pub fn env_secret(seed: Zeroizing<String>) -> Result<Signer, SignerError> {
        Ok(Signer::local(&keystore::Seed::parse(&seed)?))
    }

    /// The key in this process: an opened keystore's, say.
    pub fn local(seed: &keystore::Seed) -> Signer {
        Signer(Mode::Local(Box::new(local::Local::new(seed))))
    }

    /// `auth_header`: the whole value of the Authorization header.
    pub fn external(
        base_url: Url,
        auth_header: Option<Zeroizing<String>>,
        http: Client,
    ) -> Result<Signer, SignerError> {
        Ok(Signer(Mode::External(Box::new(external::External::new(base_url, auth_header, http)?))))
    }

    /// The payer's address on this network.
    pub async fn address(&self, network: &Network) -> Result<String, SignerError> {
        match &self.0 {
            Mode::Local(signer) => Ok(signer.address().to_owned()),
            Mode::External(signer) => signer.address(network).await,
        }
    }

    /// Whether whoever holds the key answers now. A key of this process is always there.
    pub async fn is_there(&self, network: &Network) -> bool {
        match &self.0 {
            Mode::Local(_) => true,
            Mode::External(signer) => signer.ask_address(network).await.is_ok(),
        }
    }

    /// One signature over the draft of this reservation. Right before the key: the reservation is younger than
    /// `sign_within` and its lease is still ours; after a remote answer the same again, so a late signature is never
    /// used. Exactly one request is made, and never a second.
    pub async fn sign(
        &self,
        reserved: Reserved,
        draft: Draft,
        passphrase: &str,
        world: &World,
    ) -> Result<Signed, NotSigned> {
        let transfer = draft.transfer();
        let quote = &reserved.quote;
        let same = draft.is_for(passphrase)
            && transfer.payer == reserved.authorization.payer
            && transfer.pay_to == quote.offer.pay_to
            && transfer.asset == quote.offer.asset.as_str()
            && transfer.amount == quote.amount()
            && draft.nonce().to_string() == reserved.authorization.nonce
            && u64::from(draft.expiration()) == reserved.authorization.dead_after;
        if !same {
            return Err(NotSigned::Failed(reserved, "the draft is not the one that was reserved".into()));
        }
        let now = world.unix_ms();
        if now >= reserved.lease.expires_ms {
            return Err(NotSigned::LeaseLost(reserved));
        }
        let left = reserved.sign_until.saturating_duration_since(Instant::now());
        if now >= reserved.lease.sign_before_ms || left.is_zero() {
            return Err(NotSigned::WindowMissed(reserved));
        }
        match &self.0 {
            Mode::Local(signer) => match draft.clone().attach(&signer.sign(&draft.digest())) {
                Ok(entry) => Ok(Signed { reserved, entry, _made_here: () }),
                Err(error) => Err(NotSigned::Failed(reserved, error.to_string())),
            },
            Mode::External(signer) => {
                let until = reserved.lease.sign_before_ms.min(reserved.lease.expires_ms);
                let request = external::Request {
                    network: quote.offer.network.as_str(),
                    passphrase,
                    draft: &draft,
                    payment_id: reserved.payment_id,
                    sign_before_ms: until,
                    timeout: Duration::from_millis(until - now).min(left),
                };
                let answer = match signer.sign(request).await {
                    Ok(answer) => answer,
                    Err(external::Failure::Refused(why)) => return Err(NotSigned::Refused(reserved, why)),
                    Err(external::Failure::Unavailable(why)) => return Err(NotSigned::Unavailable(reserved, why)),
                    Err(external::Failure::Lost(why)) => return Err(NotSigned::Failed(reserved, why)),
                };
                if world.unix_ms() >= until || Instant::now() >= reserved.sign_until {
                    return Err(NotSigned::Failed(reserved, "the signer's answer came too late".into()));
                }
                match draft.attach_base64(&answer) {
                    Ok(entry) => Ok(Signed { reserved, entry, _made_here: () }),
                    Err(error) => Err(NotSigned::Failed(reserved, error.to_string())),
                }
            }
        }
    }
}
