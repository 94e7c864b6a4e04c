//! The lookup rows: a payment that is there already is answered from its row. Sending identical bytes again (recovery)
//! comes with the sweep; until then a row that would be recovered is answered as the table says for the case in which
//! recovery gives nothing.

use std::time::Duration;

use serde_json::value::RawValue;

use super::Payer;
use super::error::{PayError, Phase};
use super::output::{CallOutcome, Ending, Extra, Receipt, SellerOutput};
use crate::guard::Call;
use crate::ledger::{By, LedgerError, Payment, State};
use crate::money::{AgentId, PaymentId};

/// Between two looks at a row that is in flight elsewhere; doubled up to half a second.
const FIRST_LOOK: Duration = Duration::from_millis(25);
const LAST_LOOK: Duration = Duration::from_millis(500);

/// No payment of this call has been seen.
pub(super) fn ledger_error(phase: Phase) -> impl Fn(LedgerError) -> PayError {
    move |error| PayError::Ledger { phase, error, id: None }
}

/// This payment is there, and money may have moved.
fn unreadable(id: PaymentId) -> impl Fn(LedgerError) -> PayError {
    move |error| PayError::Ledger { phase: Phase::Lookup, error, id: Some(id) }
}

impl Payer {
    /// The payment that the call's idempotency key names, if there is one.
    pub(super) async fn by_key(&self, call: &Call, hash: &[u8; 32]) -> Result<Option<CallOutcome>, PayError> {
        let Some(key) = &call.idempotency_key else { return Ok(None) };
        let found = self.parts.ledger.lookup(&call.agent, By::Key(key)).await.map_err(ledger_error(Phase::Lookup))?;
        match found {
            None => Ok(None),
            Some(row) if row.call_hash != *hash => Err(PayError::Conflict { id: row.payment_id }),
            Some(row) => self.existing(row, call).await.map(Some),
        }
    }

    /// A keyless call is about to be refused: the open payment of its twin is its payment.
    pub(super) async fn by_twin(&self, call: &Call, hash: &[u8; 32]) -> Result<Option<CallOutcome>, PayError> {
        if call.idempotency_key.is_some() {
            return Ok(None);
        }
        let found = self.parts.ledger.lookup(&call.agent, By::Twin(hash)).await.map_err(ledger_error(Phase::Lookup))?;
        match found {
            None => Ok(None),
            Some(row) => self.existing(row, call).await.map(Some),
        }
    }

    /// The row of a payment that this process no longer holds.
    pub(super) async fn no_longer_ours(&self, agent: &AgentId, id: PaymentId) -> Result<CallOutcome, PayError> {
        match self.parts.ledger.lookup(agent, By::Id(id)).await {
            Ok(Some(row)) if row.state == State::Reserved => Err(PayError::InDoubt { id }),
            Ok(Some(row)) => self.final_or_doubt(row, false).await,
            // Signed bytes may be out, so an unreadable ledger is no internal error here.
            Ok(None) | Err(_) => Err(PayError::InDoubt { id }),
        }
    }

    pub(super) async fn existing(&self, row: Payment, call: &Call) -> Result<CallOutcome, PayError> {
        let continues = call.input_responses.is_some() || call.request_state.is_some();
        let row = self.wait_while_leased(row).await?;
        self.final_or_doubt(row, continues).await
    }

    /// Looks again for up to `wait_in_flight` while somebody alive works on the row.
    async fn wait_while_leased(&self, mut row: Payment) -> Result<Payment, PayError> {
        let id = row.payment_id;
        let deadline = tokio::time::Instant::now() + self.parts.settings.wait_in_flight;
        let mut pause = FIRST_LOOK;
        while matches!(row.state, State::Reserved | State::InDoubt) && row.leased {
            if tokio::time::Instant::now() + pause > deadline {
                return Err(PayError::InFlight { id });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LAST_LOOK);
            let again = self.parts.ledger.lookup(&row.agent, By::Id(id)).await.map_err(unreadable(id))?;
            row = again.ok_or(PayError::InDoubt { id })?;
        }
        Ok(row)
    }

    async fn final_or_doubt(&self, row: Payment, continues: bool) -> Result<CallOutcome, PayError> {
        let id = row.payment_id;
        match row.state {
            State::Reserved | State::InDoubt => Err(PayError::InDoubt { id }),
            State::Released => Err(PayError::Released { id, reason: row.reason.unwrap_or_else(|| "released".into()) }),
            State::Settled => self.settled(row, continues).await,
        }
    }

    async fn settled(&self, row: Payment, continues: bool) -> Result<CallOutcome, PayError> {
        let (id, keyless) = (row.payment_id, row.idempotency_key.is_none());
        // The stored answer asks for input and this call brings it: only the same bytes sent again can go on.
        let unfinished = continues && row.outcome_unfinished;
        if row.has_outcome && !unfinished {
            let stored = self.parts.ledger.outcome(id).await.map_err(unreadable(id))?;
            let stored = stored.and_then(|bytes| RawValue::from_string(String::from_utf8(bytes).ok()?).ok());
            if let Some(output) = stored {
                return Ok(CallOutcome { ending: Ending::Replayed, output, payment: Some(id), keyless });
            }
        }
        let (ending, word) = match row.has_payload {
            _ if unfinished => (Ending::Unfinished, "undelivered"),
            true => (Ending::Undelivered, "undelivered"),
            false => (Ending::Evicted, "evicted"),
        };
        let receipt = Receipt::of_row(&row).map(|receipt| receipt.json());
        let output = SellerOutput::none().envelope(receipt.as_deref(), Some(id), Extra::Outcome(word));
        Ok(CallOutcome { ending, output, payment: Some(id), keyless })
    }
}
