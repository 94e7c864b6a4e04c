//! From signed bytes to a booked answer: send once, judge, record. The first sending and a recovery differ only in who
//! holds the row. Nothing here can sign: a [`Courier`] has no signer.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::Settings;
use super::error::PayError;
use super::judge::{Judged, Paid, alert_mismatch, judge};
use super::output::{CallOutcome, Ending, Extra, SellerOutput};
use super::parcel::Parcel;
use super::terms::{Held, Holder, Terms};
use crate::chain::stellar::Stellar;
use crate::ledger::{By, Evidence, Ledger, LedgerError, Reason, SetPin, SettleOutcome, SettleRequest};
use crate::mcp::Progress;
use crate::money::{Amount, Network, PaymentId};
use crate::policy::Pinning;
use crate::ports::World;
use crate::telemetry;
use crate::upstream::{ToolAnswer, Upstream, UpstreamError};

/// Between two progress notifications of the paid request.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);
/// A signed life where the operator bounds none.
const LONGEST_LIFE: Duration = Duration::from_secs(300);
/// What a paid request may take beyond the signed life.
const BEYOND_LIFE: Duration = Duration::from_secs(30);
/// How long an answer that settles nothing waits for the write of the payload.
const STORE_WAIT: Duration = Duration::from_secs(10);

/// Sends what is signed, and answers for the payments that are there already.
pub(super) struct Courier {
    pub(super) world: World,
    pub(super) upstream: Upstream,
    pub(super) ledger: Arc<dyn Ledger>,
    pub(super) chains: BTreeMap<Network, Arc<Stellar>>,
    pub(super) settings: Settings,
}

impl Courier {
    /// The paid call for the first time; the sealed payload is written meanwhile.
    pub async fn send_first(
        &self,
        held: &Held,
        parcel: Parcel,
        timeout: Duration,
        progress: &Progress,
    ) -> Result<CallOutcome, PayError> {
        let storing = self.store_beside(held, &parcel);
        let answer = self.send(parcel, timeout, progress).await;
        // A row in doubt is worth recovering: its payload is in the ledger before the state changes.
        let stored = async { drop(tokio::time::timeout(STORE_WAIT, storing).await) };
        self.conclude(held, answer, stored).await
    }

    fn store_beside(&self, held: &Held, parcel: &Parcel) -> oneshot::Receiver<()> {
        let (done, storing) = oneshot::channel();
        let stored = parcel.stored();
        let (ledger, id, lease) = (self.ledger.clone(), held.terms.id, held.lease.clone());
        self.world.spawn.spawn(Box::pin(async move {
            if let Err(error) = ledger.store_payload(id, &lease, stored.get().as_bytes()).await {
                tracing::warn!(payment = %id.short(), %error, "the sealed payload could not be stored");
            }
            let _ = done.send(());
        }));
        storing
    }

    /// One sending of these bytes: whoever wants another needs the ledger's parcel and its lease.
    pub(super) async fn send(
        &self,
        parcel: Parcel,
        timeout: Duration,
        progress: &Progress,
    ) -> Result<ToolAnswer, UpstreamError> {
        let mut request =
            pin!(telemetry::phase("pay", self.upstream.call_tool(parcel.endpoint(), parcel.tool_call(timeout))));
        let mut ticks = 0.0;
        loop {
            let tick = pin!(tokio::time::sleep(PROGRESS_EVERY));
            match select(request.as_mut(), tick).await {
                Either::Left((answer, _)) => return answer,
                Either::Right(_) => {
                    ticks += 1.0;
                    progress.report(ticks, None, "waiting for the seller's answer to the paid call");
                }
            }
        }
    }

    /// What the seller's answer means, booked. `ready` is waited for before the row says that it is in doubt.
    pub(super) async fn conclude(
        &self,
        held: &Held,
        answer: Result<ToolAnswer, UpstreamError>,
        ready: impl Future<Output = ()>,
    ) -> Result<CallOutcome, PayError> {
        let end = match judge(&held.terms, &answer) {
            Judged::Paid(paid) => {
                // A settled row takes no payload any more, and the answer to the seller's question is sent with it.
                if paid.unfinished {
                    ready.await;
                }
                return self.record(held, paid).await;
            }
            Judged::Asks(seller) => {
                ready.await;
                self.doubt(held, Reason::InputRequired, Ok(open_input(held, &seller))).await
            }
            Judged::Unsettled(reason, error) => {
                ready.await;
                self.doubt(held, reason, Err(error)).await
            }
        };
        match end {
            Ok(CallOutcome { ending: Ending::Undelivered | Ending::Evicted, .. }) if held.terms.booked.is_none() => {
                self.found_settled(held, &answer).await.unwrap_or(end.map(still_owed))
            }
            end => end,
        }
    }

    /// Somebody else settled the row, on other evidence and without an output: what came here is that output, as a
    /// recovery would judge it.
    async fn found_settled(
        &self,
        held: &Held,
        answer: &Result<ToolAnswer, UpstreamError>,
    ) -> Option<Result<CallOutcome, PayError>> {
        let row = self.ledger.lookup(&held.terms.agent, By::Id(held.terms.id)).await.ok()??;
        let terms = Terms { origin: held.terms.origin.clone(), ..Terms::of_row(&row) };
        let held = Held { terms, ..held.clone() };
        match judge(&held.terms, answer) {
            Judged::Paid(paid) if held.terms.booked.is_some() => Some(self.record(&held, paid).await),
            _ => None,
        }
    }

    async fn record(&self, held: &Held, paid: Paid) -> Result<CallOutcome, PayError> {
        let terms = &held.terms;
        let envelope = |amount, transaction: Option<&str>, extra| {
            paid.seller.envelope(Some(&terms.receipt(amount, transaction)), Some(terms.id), extra)
        };
        let outcome = |output| CallOutcome {
            ending: if paid.unfinished { Ending::PaidInput } else { Ending::Paid },
            output,
            payment: Some(terms.id),
            keyless: terms.keyless,
        };
        let mismatch = |what| PayError::ReceiptMismatch { id: terms.id, what, output: Some(paid.whole.clone()) };
        let transaction = paid.transaction.as_deref();
        let output = envelope(paid.settled, transaction, Extra::None);
        match self.settle(&paid, terms.id, (paid.settled, transaction), &output).await {
            Ok(SettleOutcome::Settled) => {
                self.pin_recipient(terms);
                Ok(outcome(output))
            }
            // Other evidence booked something else before: what is booked is what the agent is told.
            Ok(SettleOutcome::SettledAs { amount, transaction }) => {
                alert_mismatch(terms.id, "booked");
                let booked = (amount, transaction.as_deref());
                let output = envelope(booked.0, booked.1, Extra::None);
                if !matches!(self.settle(&paid, terms.id, booked, &output).await, Ok(SettleOutcome::Settled)) {
                    tracing::error!(payment = %terms.id.short(), "the output of a settled payment could not be stored");
                }
                Ok(outcome(output))
            }
            Ok(SettleOutcome::TransactionTaken { .. }) => {
                alert_mismatch(terms.id, "transaction");
                self.doubt(held, Reason::ReceiptMismatch, Err(mismatch("transaction"))).await
            }
            Ok(SettleOutcome::Released) => {
                tracing::error!(payment = %terms.id.short(), "ALERT a receipt came for a payment that was released");
                Err(mismatch("state"))
            }
            // The money has moved and the output is here: the agent gets both, and the sweep closes the row.
            Err(error) => {
                tracing::error!(payment = %terms.id.short(), transaction, %error, "ALERT a settled payment could not be recorded");
                Ok(outcome(envelope(paid.settled, transaction, Extra::NotRecorded)))
            }
        }
    }

    /// The first settled payment of an origin in a unit pins its recipient: a statement that nobody waits for.
    fn pin_recipient(&self, terms: &Terms) {
        let Some(origin) = terms.origin.clone() else { return };
        if self.settings.policy.now().pin_recipients == Pinning::Off {
            return;
        }
        let (ledger, unit, pay_to) = (self.ledger.clone(), terms.unit.clone(), terms.pay_to.clone());
        self.world.spawn.spawn(Box::pin(async move {
            if let Err(error) = ledger.set_pin(&origin, &unit, SetPin::First(&pay_to)).await {
                tracing::warn!(%origin, %error, "the recipient of a first payment could not be pinned");
            }
        }));
    }

    /// Busy: nothing was done. The money has moved, so this is asked once more before the receipt goes unrecorded.
    async fn settle(
        &self,
        paid: &Paid,
        payment_id: PaymentId,
        (amount, transaction): (Amount, Option<&str>),
        output: &RawValue,
    ) -> Result<SettleOutcome, LedgerError> {
        let request = SettleRequest {
            payment_id,
            amount,
            transaction,
            evidence: Evidence::Receipt,
            outcome: Some(output.get().as_bytes()),
            unfinished: paid.unfinished,
        };
        match telemetry::phase("record", self.ledger.settle(request)).await {
            Err(LedgerError::Busy) => self.ledger.settle(request).await,
            other => other,
        }
    }

    /// Bytes may be out and nothing proves a settlement: the row is in doubt, and `answer` is what this story says. A
    /// row that is settled stays so, and one that somebody else has closed answers for itself.
    pub(super) async fn doubt(
        &self,
        held: &Held,
        reason: Reason,
        answer: Result<CallOutcome, PayError>,
    ) -> Result<CallOutcome, PayError> {
        let (id, lease) = (held.terms.id, &held.lease);
        let written = match held.holder {
            Holder::Owner => self.ledger.in_doubt(id, lease, reason).await,
            Holder::Recovery { .. } => self.ledger.end_recovery(id, lease, Some(reason)).await,
        };
        if let Err(error) = &written {
            // The row keeps its state and its lease runs out: whoever meets it takes it as possibly signed.
            tracing::error!(payment = %id.short(), %error, "in_doubt could not be written");
        }
        match (held.holder, written) {
            (Holder::Recovery { continues }, _) if held.terms.booked.is_some() => {
                self.still_settled(&held.terms, continues).await
            }
            (Holder::Owner, Ok(true)) | (_, Err(_)) => answer,
            // In doubt already, or still: what this story knows, and the output that it may hold, says more than the row.
            _ => match self.no_longer_ours(&held.terms.agent, id).await {
                Err(PayError::InDoubt { .. }) => answer,
                by_the_row => by_the_row,
            },
        }
    }

    /// How long a paid request may take: configured, but never longer than the signed life and 30 s.
    pub(super) fn paid_timeout(&self, network: &Network, life: Duration) -> Duration {
        let most = self.settings.max_authorization.get(network).copied().unwrap_or(LONGEST_LIFE);
        let bound = life.min(most) + BEYOND_LIFE;
        self.settings.paid_call_timeout.map_or(bound, |configured| configured.min(bound))
    }

    /// Runs a story in a task of its own, which goes on when nobody waits for it any more. `None`: the task ended
    /// without a word (a bug, or the process is going down).
    pub(super) async fn apart<T: Send + 'static>(&self, story: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let story = async move {
            // Nobody may be listening any more: the row says all.
            let _ = answer.send(story.await);
        };
        self.world.spawn.spawn(Box::pin(story.in_current_span()));
        answered.await.ok()
    }
}

/// The row was settled while its seller was silent, and nobody has asked for the output since: while the payload is
/// kept, the receipt alone is no answer, and a keyless twin recovers instead of paying.
fn still_owed(outcome: CallOutcome) -> CallOutcome {
    match outcome.ending {
        Ending::Undelivered => CallOutcome { ending: Ending::Unfinished, ..outcome },
        _ => outcome,
    }
}

fn open_input(held: &Held, seller: &SellerOutput) -> CallOutcome {
    CallOutcome {
        ending: Ending::OpenInput,
        output: seller.envelope(None, Some(held.terms.id), Extra::None),
        payment: Some(held.terms.id),
        keyless: held.terms.keyless,
    }
}
