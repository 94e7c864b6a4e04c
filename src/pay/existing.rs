//! The lookup rows: a payment that is there already is answered from its row, and recovered where its output is owed.

use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use super::error::{PayError, Phase};
use super::output::{CallOutcome, Ending, Extra, SellerOutput};
use super::parcel::Rounds;
use super::recover::Attempt;
use super::send::Courier;
use super::terms::Terms;
use crate::guard::Call;
use crate::ledger::{By, LedgerError, Payment, State};
use crate::mcp::Progress;
use crate::money::{AgentId, PaymentId};
use crate::telemetry;

/// Between two looks at a row that is in flight elsewhere; doubled up to half a second.
const FIRST_LOOK: Duration = Duration::from_millis(25);
const LAST_LOOK: Duration = Duration::from_millis(500);

/// No payment of this call has been seen.
pub(super) fn ledger_error(phase: Phase) -> impl Fn(LedgerError) -> PayError {
    move |error| PayError::Ledger { phase, error, id: None }
}

/// This payment is there, and money may have moved.
pub(super) fn unreadable(id: PaymentId) -> impl Fn(LedgerError) -> PayError {
    move |error| PayError::Ledger { phase: Phase::Lookup, error, id: Some(id) }
}

impl Courier {
    /// The payment that the call's idempotency key names, if there is one.
    pub async fn by_key(
        self: &Arc<Self>,
        call: &Call,
        hash: &[u8; 32],
        progress: &Progress,
    ) -> Result<Option<CallOutcome>, PayError> {
        let Some(key) = &call.idempotency_key else { return Ok(None) };
        let found = telemetry::phase("lookup", self.ledger.lookup(&call.agent, By::Key(key))).await;
        match found.map_err(ledger_error(Phase::Lookup))? {
            None => Ok(None),
            Some(row) if row.call_hash != *hash => Err(PayError::Conflict { id: row.payment_id }),
            Some(row) => self.existing(row, call, progress).await.map(Some),
        }
    }

    /// A keyless call is about to be refused: the open payment of its twin is its payment.
    pub async fn by_twin(
        self: &Arc<Self>,
        call: &Call,
        hash: &[u8; 32],
        progress: &Progress,
    ) -> Result<Option<CallOutcome>, PayError> {
        if call.idempotency_key.is_some() {
            return Ok(None);
        }
        let found = telemetry::phase("lookup", self.ledger.lookup(&call.agent, By::Twin(hash))).await;
        match found.map_err(ledger_error(Phase::Lookup))? {
            None => Ok(None),
            Some(row) => self.existing(row, call, progress).await.map(Some),
        }
    }

    /// The row of a payment that this process no longer holds.
    pub async fn no_longer_ours(&self, agent: &AgentId, id: PaymentId) -> Result<CallOutcome, PayError> {
        match self.ledger.lookup(agent, By::Id(id)).await {
            Ok(Some(row)) if row.state == State::Reserved => Err(PayError::InDoubt { id }),
            Ok(Some(row)) => self.by_row(row, false).await,
            // Signed bytes may be out, so an unreadable ledger is no internal error here.
            Ok(None) | Err(_) => Err(PayError::InDoubt { id }),
        }
    }

    /// Waits for up to `wait_in_flight` while somebody alive works on the row; then answers from it, or recovers it.
    pub async fn existing(
        self: &Arc<Self>,
        mut row: Payment,
        call: &Call,
        progress: &Progress,
    ) -> Result<CallOutcome, PayError> {
        let (id, rounds) = (row.payment_id, Rounds::of(call));
        telemetry::is_about(&id.short());
        let continues = !rounds.is_empty();
        let deadline = tokio::time::Instant::now() + self.settings.wait_in_flight;
        let (mut pause, mut may_try) = (FIRST_LOOK, true);
        loop {
            if is_last_word(&row, continues) {
                return self.by_row(row, continues).await;
            }
            if !row.leased {
                let attempt = match may_try {
                    true => self.recover(&row, &rounds, progress).await,
                    false => Attempt::NotNow,
                };
                match attempt {
                    Attempt::Answered(answer) => return answer,
                    Attempt::NotNow => return self.by_row(row, continues).await,
                    Attempt::Changed => {
                        // Once: a ledger that has nothing to recover may still say that a payload is there.
                        may_try = false;
                        row = self.again(&row).await?;
                        continue;
                    }
                    Attempt::Leased => {}
                }
            }
            if tokio::time::Instant::now() + pause > deadline {
                return Err(PayError::InFlight { id, settled: row.state == State::Settled });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LAST_LOOK);
            row = self.again(&row).await?;
        }
    }

    async fn again(&self, row: &Payment) -> Result<Payment, PayError> {
        let id = row.payment_id;
        let found = self.ledger.lookup(&row.agent, By::Id(id)).await.map_err(unreadable(id))?;
        found.ok_or(PayError::InDoubt { id })
    }

    /// What the row says, with nothing sent.
    pub(super) async fn by_row(&self, row: Payment, continues: bool) -> Result<CallOutcome, PayError> {
        let id = row.payment_id;
        match row.state {
            State::Reserved | State::InDoubt => Err(PayError::InDoubt { id }),
            State::Released => Err(PayError::Released { id, reason: row.reason.unwrap_or_else(|| "released".into()) }),
            State::Settled => self.settled(row, continues).await,
        }
    }

    async fn settled(&self, row: Payment, continues: bool) -> Result<CallOutcome, PayError> {
        let terms = Terms::of_row(&row);
        let unfinished = continues && row.outcome_unfinished;
        if row.has_outcome && !unfinished {
            let stored = self.ledger.outcome(terms.id).await.map_err(unreadable(terms.id))?;
            let stored = stored.and_then(|bytes| RawValue::from_string(String::from_utf8(bytes).ok()?).ok());
            if let Some(output) = stored {
                let (payment, keyless) = (Some(terms.id), terms.keyless);
                return Ok(CallOutcome { ending: Ending::Replayed, output, payment, keyless });
            }
        }
        Ok(match row.has_payload {
            _ if unfinished => receipt_alone(&terms, Ending::Unfinished, "undelivered"),
            true => receipt_alone(&terms, Ending::Undelivered, "undelivered"),
            false => receipt_alone(&terms, Ending::Evicted, "evicted"),
        })
    }

    /// A recovery of a settled payment brought nothing: the row, or, where it cannot be read, the receipt.
    pub(super) async fn still_settled(&self, terms: &Terms, continues: bool) -> Result<CallOutcome, PayError> {
        match self.ledger.lookup(&terms.agent, By::Id(terms.id)).await {
            Ok(Some(row)) => self.by_row(row, continues).await,
            Ok(None) | Err(_) => Ok(receipt_alone(terms, Ending::Unfinished, "undelivered")),
        }
    }
}

/// Nothing further can be had by waiting or sending. The seller's stored question is one, unless the call answers it.
fn is_last_word(row: &Payment, continues: bool) -> bool {
    match row.state {
        State::Released => true,
        State::Settled => row.has_outcome && !(continues && row.outcome_unfinished),
        State::Reserved | State::InDoubt => false,
    }
}

fn receipt_alone(terms: &Terms, ending: Ending, word: &'static str) -> CallOutcome {
    let receipt = terms.booked_receipt();
    let output = SellerOutput::none().envelope(receipt.as_deref(), Some(terms.id), Extra::Outcome(word));
    CallOutcome { ending, output, payment: Some(terms.id), keyless: terms.keyless }
}
