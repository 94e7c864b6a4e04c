//! Recovery: the identical bytes once more, under the row's lease, one at a time, and never while the agent is
//! suspended. What comes back is judged and booked as the first answer would have been.

use std::sync::Arc;
use std::time::Duration;

use super::error::PayError;
use super::existing::unreadable;
use super::output::CallOutcome;
use super::parcel::{NotResent, Resend, Rounds};
use super::send::Courier;
use super::sweep::question;
use super::{LEASE_MARGIN, millis};
use crate::chain::{NonceReading, Question};
use crate::ledger::{By, Payment, Recoverable, Recovery, State};
use crate::mcp::Progress;

/// What became of one attempt.
pub(super) enum Attempt {
    Answered(Result<CallOutcome, PayError>),
    /// Somebody alive works on the row.
    Leased,
    /// Nothing was sent and nothing will be: the row as it was read is the answer.
    NotNow,
    /// The row is no longer as it was read.
    Changed,
}

impl Courier {
    /// `row` is open or settled, not leased, and its last word is not stored.
    pub(super) async fn recover(self: &Arc<Self>, row: &Payment, rounds: &Rounds, progress: &Progress) -> Attempt {
        let allowed = self.settings.rules.payable.contains(&row.network)
            && self.settings.policy.now().payment(&row.unit(), &row.pay_to).is_ok();
        if !row.has_payload || !allowed {
            return Attempt::NotNow;
        }
        match row.state {
            State::Settled => {}
            State::InDoubt if self.is_alive_or_used(row).await => {}
            State::InDoubt | State::Reserved | State::Released => return Attempt::NotNow,
        }
        let id = row.payment_id;
        let timeout = self.paid_timeout(&row.network, self.signed_life(row));
        let (courier, rounds, progress) = (self.clone(), rounds.clone(), progress.clone());
        // The lease is taken in the task too: a caller who goes away meanwhile leaves no lease without its work.
        let attempt = self.apart(async move {
            match courier.ledger.take_recovery(id, millis(timeout + LEASE_MARGIN)).await {
                Ok(Recovery::Taken(found)) => {
                    Attempt::Answered(courier.resend(*found, &rounds, timeout, &progress).await)
                }
                Ok(Recovery::Leased) => Attempt::Leased,
                Ok(Recovery::Suspended) => Attempt::NotNow,
                Ok(Recovery::Nothing) => Attempt::Changed,
                Err(error) => Attempt::Answered(Err(unreadable(id)(error))),
            }
        });
        attempt.await.unwrap_or(Attempt::Answered(Err(PayError::Interrupted { id })))
    }

    async fn resend(
        &self,
        found: Recoverable,
        rounds: &Rounds,
        timeout: Duration,
        progress: &Progress,
    ) -> Result<CallOutcome, PayError> {
        match Resend::open(&found, rounds, &self.upstream, &*self.ledger).await {
            Ok(resend) => {
                let (held, parcel) = resend.into_parts();
                let answer = self.send(parcel, timeout, progress).await;
                self.conclude(&held, answer, std::future::ready(())).await
            }
            Err(reason) => self.not_sent(&found, rounds, reason).await,
        }
    }

    /// The lease goes back, and the row is the answer.
    async fn not_sent(&self, found: &Recoverable, rounds: &Rounds, reason: NotResent) -> Result<CallOutcome, PayError> {
        let id = found.payment.payment_id;
        tracing::warn!(payment = %id.short(), %reason, "a stored payment is not sent again");
        if let Err(error) = self.ledger.end_recovery(id, &found.lease, None).await {
            tracing::warn!(payment = %id.short(), %error, "a recovery's lease stays until it expires");
        }
        match reason {
            NotResent::Ledger(error) => Err(unreadable(id)(error)),
            NotResent::Unreadable(_) | NotResent::Refused(_) | NotResent::NotStored => {
                let row = self.ledger.lookup(&found.payment.agent, By::Id(id)).await;
                let row = row.map_err(unreadable(id))?.ok_or(PayError::InDoubt { id })?;
                self.by_row(row, !rounds.is_empty()).await
            }
        }
    }

    /// By the chain, never by a clock of ours. `Used`: it has settled, and its output is still owed. A dead one moves
    /// nothing any more, so sending it brings only the seller's word; the sweep closes its row.
    async fn is_alive_or_used(&self, row: &Payment) -> bool {
        let Some(chain) = self.chains.get(&row.network) else { return false };
        let Ok(Question::Stellar(question)) = question(row) else { return false };
        let reading = async {
            match chain.nonce_reading(question).await {
                NonceReading::Open | NonceReading::Used { .. } => true,
                NonceReading::Dead | NonceReading::Cancelled => false,
                // One RPC of several does not answer: the ledger number of any decides, and a wrong one costs a message.
                NonceReading::Inconclusive(_) => {
                    chain.ledger().await.is_ok_and(|point| point.sequence < question.expiration)
                }
            }
        };
        tokio::time::timeout(self.settings.rpc_timeout, reading).await.unwrap_or(false)
    }

    fn signed_life(&self, row: &Payment) -> Duration {
        let chain = self.chains.get(&row.network);
        chain.map_or(Duration::MAX, |chain| chain.signed_life(row.authorization.at, row.authorization.dead_after))
    }
}
