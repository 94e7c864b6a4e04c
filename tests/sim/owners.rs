//! Who works on a payment, as the ledger grants it: one owner at a time, over all processes. Whoever was frozen past its
//! lease and thaws finds another's lease there, and none of its statements hits the row any more.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tollway::ledger::Lease;
use tollway::money::PaymentId;

use super::world::{World, lock};

#[derive(Clone, Copy)]
struct Grant {
    token: [u8; 16],
    expires_ms: u64,
}

#[derive(Default)]
pub struct Owners {
    grants: Mutex<BTreeMap<PaymentId, Grant>>,
    /// Recoveries that began: the payment, and when, unix milliseconds.
    recoveries: Mutex<Vec<(PaymentId, u64)>>,
}

impl Owners {
    pub fn granted(&self, world: &World, id: PaymentId, lease: &Lease) {
        let new = Grant { token: lease.token, expires_ms: lease.expires_ms };
        let now = world.unix_ms();
        match lock(&self.grants).insert(id, new) {
            // The same statement again, whose first answer was lost.
            Some(old) if old.token == new.token => {}
            Some(old) if old.expires_ms > now => {
                world.fail(format!(
                    "{} has two owners: a lease was granted while another has {} ms left",
                    id.short(),
                    old.expires_ms - now
                ));
            }
            Some(_) => world.count(|s| s.owners_replaced += 1),
            None => {}
        }
    }

    pub fn recovery(&self, world: &World, id: PaymentId, lease: &Lease) {
        self.granted(world, id, lease);
        lock(&self.recoveries).push((id, world.unix_ms()));
    }

    /// A statement under this lease hit its row; `ends`: the lease is over with it.
    pub fn acted(&self, world: &World, id: PaymentId, lease: &Lease, hit: bool, ends: bool) {
        let mut grants = lock(&self.grants);
        let ours = grants.get(&id).is_none_or(|grant| grant.token == lease.token);
        match (hit, ours) {
            (true, false) => world.fail(format!("{} was written under a lease that another has now", id.short())),
            (false, false) => world.count(|s| s.owners_too_late += 1),
            (true, true) if ends => drop(grants.remove(&id)),
            (_, true) => {}
        }
    }

    /// Whatever evidence settled it, nobody owns it any more.
    pub fn settled(&self, id: PaymentId) {
        lock(&self.grants).remove(&id);
    }

    pub fn recoveries(&self) -> Vec<(PaymentId, u64)> {
        lock(&self.recoveries).clone()
    }
}
