//! Who holds the key. `none` reads no key even if one is there; `env-secret` is for stdio; `external` asks a signer over
//! HTTPS and believes nothing of its answer that does not verify here.

use crate::chain::stellar::SignedEntry;
use crate::ledger::Reserved;

/// A reserved payment with its verified signature: what may be sent. Only [`Signer::sign`] makes it.
#[must_use]
pub struct Signed {
    pub(crate) reserved: Reserved,
    pub(crate) entry: SignedEntry,
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
