//! Leases of recovery and sweep, and what ends by them.

use super::SqliteLedger;
use crate::ledger::{Lease, LedgerError, OpenRows, Payment, Reason, Recovery, Resolution, Resolved, Tidied};
use crate::money::PaymentId;

fn not_yet<T>() -> Result<T, LedgerError> {
    Err(LedgerError::Unavailable("not in this version".to_owned()))
}

impl SqliteLedger {
    pub(super) async fn do_take_recovery(&self, _: PaymentId, _: u64) -> Result<Recovery, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_end_recovery(
        &self,
        _: PaymentId,
        _: &Lease,
        _: Option<Reason>,
    ) -> Result<bool, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_take_due(&self, _: u32, _: u64) -> Result<Vec<(Payment, Lease)>, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_look_again(&self, _: PaymentId, _: &Lease, _: u64) -> Result<bool, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_expire(&self, _: PaymentId, _: &Lease, _: Reason) -> Result<bool, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_tidy(&self) -> Result<Tidied, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_open_rows(&self) -> Result<OpenRows, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_now_ms(&self) -> Result<u64, LedgerError> {
        not_yet()
    }
    pub(super) async fn do_resolve(&self, _: Resolution<'_>) -> Result<Resolved, LedgerError> {
        not_yet()
    }
}
