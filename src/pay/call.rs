//! One paid call, top to bottom: every step takes what the step before produced, and ends the story itself where the
//! table of `docs/outcomes.md` says so.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, maybe_done, select};
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::Payer;
use super::check::{self, Verdict};
use super::error::{Exceeded, PayError, Phase, Short};
use super::existing::ledger_error;
use super::object::Object;
use super::output::{self, CallOutcome, Ending, Extra, Receipt, SellerOutput};
use crate::catalog::{CatalogError, Kind, Listing};
use crate::chain::ChainError;
use crate::chain::stellar::{Balance, Draft, LedgerPoint, PrepareError, Stellar};
use crate::guard::{self, Call, Live, Quote, Refusal};
use crate::json;
use crate::ledger::{
    self, Authorization, Decision, Evidence, Intent, LedgerError, NotReserved, Reason, Reserved, SettleOutcome,
    SettleRequest,
};
use crate::mcp::Progress;
use crate::money::{Amount, PaymentId, Unit};
use crate::signer::{NotSigned, Signed};
use crate::upstream::{Endpoint, ToolAnswer, ToolCall, UpstreamError};
use crate::x402::{self, Answer, Broken, PaymentFor, Settlement, bazaar};

/// Between two progress notifications of the paid request.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);
/// What the lease has beyond the sum of the bounds on its steps.
const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// The longest words of a seller, signer or chain in an error.
const MAX_WORDS: usize = 300;

/// The end of the story before its last step.
enum Stop {
    Answer(CallOutcome),
    Error(PayError),
}
impl From<PayError> for Stop {
    fn from(error: PayError) -> Stop {
        Stop::Error(error)
    }
}

/// Guarded and drafted, not yet reserved: nonce and expiration are fixed.
struct Ready {
    quote: Quote,
    draft: Draft,
    authorization: Authorization,
}

/// Everything for the paid request, signed.
struct Sendable {
    reserved: Reserved,
    payload: Box<RawValue>,
}

/// The write of the sealed payload, under way beside the paid request.
type Storing = oneshot::Receiver<()>;

impl Payer {
    /// `cancelled`: the agent cancelled or is gone. It stops the story before the signature and never after it.
    pub async fn call(
        &self,
        call: Call,
        cancelled: CancellationToken,
        progress: Progress,
    ) -> Result<CallOutcome, PayError> {
        if call.reference.kind != Kind::Mcp {
            return Err(PayError::Argument {
                field: "ref",
                problem: "names an HTTP resource; only MCP tools can be paid for".into(),
            });
        }
        guard::payable(&call, &self.parts.settings.rules).map_err(|refusal| refused(refusal, &call))?;
        let hash = call.hash().map_err(|e| PayError::Argument { field: "arguments", problem: e.to_string() })?;

        if let Some(outcome) = self.by_key(&call, &hash).await? {
            return Ok(outcome);
        }
        let ready = match self.ready(&call, hash).await {
            Ok(ready) => ready,
            Err(Stop::Answer(outcome)) => return Ok(outcome),
            Err(Stop::Error(refusal)) => {
                return match self.by_twin(&call, &hash).await? {
                    Some(outcome) => Ok(outcome),
                    None => Err(refusal),
                };
            }
        };

        if cancelled.is_cancelled() {
            return Err(PayError::Cancelled { id: None });
        }

        let id_nonce = self.parts.world.random::<16>();
        let what = PaymentFor {
            resource_ref: &ready.quote.resource_ref,
            version_hash: &ready.quote.version_hash,
            call_hash: &hash,
            offer: &ready.quote.offer,
        };
        let id = x402::payment_id(&what, &id_nonce);
        // The story from here on belongs to a task of its own. The guard tells it when this future is dropped.
        let gone = cancelled.child_token();
        let _gone_when_dropped = gone.clone().drop_guard();
        let (answer, answered) = oneshot::channel();
        let payer = self.clone();
        self.parts.world.spawn.spawn(Box::pin(async move {
            let result = match payer.pay(&call, ready, id, id_nonce, &gone, &progress).await {
                Ok(outcome) | Err(Stop::Answer(outcome)) => Ok(outcome),
                Err(Stop::Error(error)) => Err(error),
            };
            // Nobody may be listening any more: the row says all.
            let _ = answer.send(result);
        }));
        answered.await.unwrap_or(Err(PayError::Interrupted { id }))
    }

    /// Resolve to guard: everything that needs no reservation.
    async fn ready(&self, call: &Call, hash: [u8; 32]) -> Result<Ready, Stop> {
        let listing = self.resolve(call).await?;
        let endpoint = self.connect(&listing)?;
        let unit = Unit { network: call.network.clone(), asset: call.asset.clone() };
        let mut ahead = pin!(maybe_done(self.read_ahead(&unit)));
        let answer = {
            let probe = pin!(self.probe(call, &listing, &endpoint));
            match select(probe, ahead.as_mut()).await {
                Either::Left((answer, _)) => answer?,
                Either::Right(((), probe)) => probe.await?,
            }
        };
        let challenge = match self.unpaid(&answer)? {
            Unpaid::Asks(challenge) => challenge,
            Unpaid::Answers(outcome) => return Err(Stop::Answer(outcome)),
        };
        let declared = bazaar::declaration(challenge.extensions.as_deref()).and_then(|d| d.input_schema).is_some();
        let listed_schema = match &listing.reference.tool_name {
            Some(tool) if !declared => self.parts.upstream.input_schema(&endpoint, tool).await.map_err(probe_failed)?,
            _ => None,
        };
        let live = Live { endpoint: &endpoint, challenge: &challenge, listed_schema: listed_schema.as_deref() };
        let quote = guard::admit(&listing, live, call, hash, &self.parts.settings.rules)
            .map_err(|refusal| refused(refusal, call))?;
        ahead.as_mut().await;
        let ahead = ahead.take_output().unwrap_or(Err(PayError::Chain("not asked".into())))?;
        Ok(self.afford(quote, ahead).await?)
    }

    async fn resolve(&self, call: &Call) -> Result<Listing, PayError> {
        let listing = self.parts.catalog.resolve(&call.reference).await.map_err(|error| match error {
            CatalogError::NotListed => PayError::NotListed,
            CatalogError::Timeout => PayError::CatalogTimeout,
            CatalogError::Protocol(detail) => PayError::CatalogProtocol(words(&detail)),
            CatalogError::Invalid { field, detail } => PayError::Argument { field, problem: words(&detail) },
        })?;
        match &call.expected_version {
            Some(expected) if *expected != listing.version_hash => {
                Err(PayError::StaleVersion { expected: expected.clone(), current: listing.version_hash })
            }
            _ => Ok(listing),
        }
    }

    fn connect(&self, listing: &Listing) -> Result<Endpoint, PayError> {
        self.parts.upstream.endpoint(&listing.reference.url, listing.transport).map_err(probe_failed)
    }

    /// The declared tool, unpaid, with exactly the agent's arguments.
    async fn probe(&self, call: &Call, listing: &Listing, endpoint: &Endpoint) -> Result<ToolAnswer, PayError> {
        let request = ToolCall {
            tool: listing.reference.tool_name.as_deref().unwrap_or_default(),
            arguments: &call.arguments,
            input_responses: call.input_responses.as_deref(),
            request_state: call.request_state.as_deref(),
            payment: None,
            timeout: self.parts.settings.probe_timeout,
        };
        self.parts.upstream.call_tool(endpoint, request).await.map_err(probe_failed)
    }

    fn unpaid(&self, answer: &ToolAnswer) -> Result<Unpaid, PayError> {
        let classified = match answer {
            ToolAnswer::Result(result) => x402::classify(result),
            ToolAnswer::Error { code, data, .. } => x402::classify_error(*code, data.as_deref()),
        };
        let ended = |ending, seller: SellerOutput| CallOutcome {
            ending,
            output: seller.envelope(None, None, Extra::None),
            payment: None,
            keyless: false,
        };
        Ok(match classified {
            Answer::Challenge(challenge) => Unpaid::Asks(challenge),
            Answer::BrokenChallenge(broken) => return Err(PayError::Challenge(broken)),
            Answer::InputRequired { input_requests, request_state } => {
                let asking = SellerOutput::asking(input_requests.as_deref(), request_state.as_deref());
                Unpaid::Answers(ended(Ending::UnpaidInput, asking))
            }
            Answer::Other => Unpaid::Answers(ended(Ending::Unpaid, SellerOutput::of(answer))),
        })
    }

    /// Payer, ledger number and balance, read while the seller is asked; all of them cached.
    async fn read_ahead(&self, unit: &Unit) -> Result<Ahead, PayError> {
        let chain = self.chain(unit)?;
        let payer =
            self.parts.signer.address(&unit.network).await.map_err(|e| PayError::NoPayer(words(&e.to_string())))?;
        let balance = chain.balance(&payer, &unit.asset).await.map_err(chain_unusable)?;
        let at = chain.ledger().await.map_err(chain_unusable)?;
        Ok(Ahead { payer, balance, at })
    }

    /// The balance covers it, and the entry to sign is drafted: its nonce and expiration go into the row.
    async fn afford(&self, quote: Quote, ahead: Ahead) -> Result<Ready, PayError> {
        let unit = quote.unit();
        let chain = self.chain(&unit)?;
        let covers = |balance: &Balance| matches!(balance, Balance::Of(amount) if *amount >= quote.amount());
        let mut balance = ahead.balance;
        if !covers(&balance) {
            balance = chain.balance_fresh(&ahead.payer, &unit.asset).await.map_err(chain_unusable)?;
        }
        if !covers(&balance) {
            let balance = match balance {
                Balance::Of(amount) => Some(amount),
                Balance::NoTrustline => None,
            };
            let short = Short { unit, required: quote.amount(), balance };
            return Err(PayError::InsufficientFunds(Box::new(short)));
        }
        let draft = chain.draft(&quote.offer, &ahead.payer, ahead.at).map_err(chain_unusable)?;
        let authorization = Authorization {
            payer: ahead.payer,
            nonce: draft.nonce().to_string(),
            dead_after: draft.expiration().into(),
            at: ahead.at.sequence.into(),
        };
        Ok(Ready { quote, draft, authorization })
    }

    fn chain(&self, unit: &Unit) -> Result<&Stellar, PayError> {
        let chain = self.parts.chains.get(&unit.network);
        chain.map(|chain| chain.as_ref()).ok_or_else(|| PayError::NetworkDisabled(unit.network.to_string()))
    }

    /// Reserve to record: one `?` per step.
    async fn pay(
        &self,
        call: &Call,
        ready: Ready,
        id: PaymentId,
        id_nonce: [u8; 16],
        gone: &CancellationToken,
        progress: &Progress,
    ) -> Result<CallOutcome, Stop> {
        let (reserved, draft) = self.reserve(call, ready, id, id_nonce).await?;
        let reserved = self.still_wanted(reserved, gone).await?;
        let signed = self.sign(reserved, draft).await?;
        let sendable = self.prepare(signed).await?;
        let (answer, storing) = self.send(call, &sendable, progress).await;
        let paid = self.receive(&sendable.reserved, answer, storing).await?;
        self.record(sendable.reserved, paid).await
    }

    async fn reserve(
        &self,
        call: &Call,
        ready: Ready,
        payment_id: PaymentId,
        id_nonce: [u8; 16],
    ) -> Result<(Reserved, Draft), Stop> {
        let Ready { quote, draft, authorization } = ready;
        let (unit, required) = (quote.unit(), quote.amount());
        let settings = &self.parts.settings;
        let lease = settings.sign_within + settings.rpc_timeout + self.paid_timeout(&quote) + LEASE_MARGIN;
        let intent = Intent {
            quote,
            payment_id,
            id_nonce,
            authorization,
            lease_ms: millis(lease),
            sign_within_ms: millis(settings.sign_within),
            account_ceiling: settings.account_ceiling,
        };
        let decision = match ledger::reserve(&*self.parts.ledger, intent).await {
            Ok(reserved) => return Ok((reserved, draft)),
            Err(NotReserved::Ledger(error)) => return Err(ledger_error(Phase::Reserve)(error).into()),
            Err(NotReserved::Refused(decision)) => decision,
        };
        Err(match decision {
            Decision::Existing(row) => Stop::Answer(self.existing(*row, call).await?),
            Decision::Conflict(row) => PayError::Conflict { id: row.payment_id }.into(),
            Decision::KeySpent(id) => PayError::Conflict { id }.into(),
            Decision::DuplicateInDoubt(id) => PayError::DuplicateInDoubt { id }.into(),
            Decision::Exceeded { ceiling, limit, remaining, resets_at_ms } => {
                let exceeded = Exceeded { ceiling, unit, required, limit, remaining, resets_at_ms };
                PayError::Exceeded(Box::new(exceeded)).into()
            }
            Decision::Suspended => PayError::Suspended.into(),
            // `ledger::reserve` makes a `Reserved` of it; nothing was signed, so the row ends by its lease.
            Decision::Fresh(_) => PayError::Interrupted { id: payment_id }.into(),
        })
    }

    async fn still_wanted(&self, reserved: Reserved, gone: &CancellationToken) -> Result<Reserved, Stop> {
        if gone.is_cancelled() {
            let error = PayError::Cancelled { id: Some(reserved.payment_id) };
            return Err(self.release(reserved, Reason::Cancelled, error).await);
        }
        Ok(reserved)
    }

    async fn sign(&self, reserved: Reserved, draft: Draft) -> Result<Signed, Stop> {
        let id = reserved.payment_id;
        let passphrase = self.chain(&reserved.quote.unit())?.passphrase();
        match self.parts.signer.sign(reserved, draft, passphrase, &self.parts.world).await {
            Ok(signed) => Ok(signed),
            Err(NotSigned::WindowMissed(reserved)) => {
                Err(self.release(reserved, Reason::SignWindowMissed, PayError::SignWindowMissed { id }).await)
            }
            Err(NotSigned::LeaseLost(_)) => Err(PayError::LeaseLost { id }.into()),
            Err(NotSigned::Refused(reserved, detail)) => {
                let error = PayError::SignerRefused { id, detail: words(&detail) };
                Err(self.release(reserved, Reason::SignerRefused, error).await)
            }
            Err(NotSigned::Unavailable(reserved, detail)) => {
                let error = PayError::SignerUnavailable { id, detail: words(&detail) };
                Err(self.release(reserved, Reason::SignerUnavailable, error).await)
            }
            Err(NotSigned::Failed(reserved, detail)) => {
                let error = PayError::SignerFailed { id, detail: words(&detail) };
                Err(self.doubt(&reserved, Reason::SignerFailed, error).await)
            }
        }
    }

    /// From here on somebody outside has seen a live signature.
    async fn prepare(&self, signed: Signed) -> Result<Sendable, Stop> {
        let id = signed.reserved.payment_id;
        let chain = self.chain(&signed.reserved.quote.unit())?;
        let transaction = match chain.prepare(&signed.entry).await {
            Ok(transaction) => transaction,
            Err(PrepareError::Lying(_)) => {
                tracing::error!(payment = %id.short(), "ALERT a chain RPC answered with another payment than ours");
                return Err(self.doubt(&signed.reserved, Reason::ChainRpc, PayError::ChainLied { id }).await);
            }
            Err(error @ (PrepareError::Failed(_) | PrepareError::Lost(_))) => {
                let error = PayError::SimulationFailed { id, detail: words(&error.to_string()) };
                return Err(self.doubt(&signed.reserved, Reason::SimulationFailed, error).await);
            }
        };
        let quote = &signed.reserved.quote;
        let scheme = Object::new().with("transaction", &transaction).build();
        let payload =
            x402::payment_payload(&quote.offer, &scheme, Some(&quote.resource), quote.extensions.as_deref(), id);
        match payload {
            Ok(payload) => Ok(Sendable { reserved: signed.reserved, payload }),
            Err(error) => {
                let error = PayError::SimulationFailed { id, detail: words(&error.to_string()) };
                Err(self.doubt(&signed.reserved, Reason::SimulationFailed, error).await)
            }
        }
    }

    /// The same call again, once, with the payment; the sealed payload is written meanwhile.
    async fn send(
        &self,
        call: &Call,
        sendable: &Sendable,
        progress: &Progress,
    ) -> (Result<ToolAnswer, UpstreamError>, Storing) {
        let Reserved { quote, payment_id, lease, .. } = &sendable.reserved;
        let storing = {
            let (done, storing) = oneshot::channel();
            let stored = Object::new()
                .with("endpoint", quote.endpoint.url.as_str())
                .with("transport", transport_word(&quote.endpoint))
                .with("tool", &quote.tool)
                .raw("arguments", &call.arguments)
                .maybe_raw("inputResponses", call.input_responses.as_deref())
                .maybe_raw("requestState", call.request_state.as_deref())
                .raw("payload", &sendable.payload)
                .build();
            let (ledger, id, lease) = (self.parts.ledger.clone(), *payment_id, lease.clone());
            self.parts.world.spawn.spawn(Box::pin(async move {
                if let Err(error) = ledger.store_payload(id, &lease, stored.get().as_bytes()).await {
                    tracing::warn!(payment = %id.short(), %error, "the sealed payload could not be stored");
                }
                let _ = done.send(());
            }));
            storing
        };
        let request = ToolCall {
            tool: &quote.tool,
            arguments: &call.arguments,
            input_responses: call.input_responses.as_deref(),
            request_state: call.request_state.as_deref(),
            payment: Some(&sendable.payload),
            timeout: self.paid_timeout(quote),
        };
        let mut request = pin!(self.parts.upstream.call_tool(&quote.endpoint, request));
        let mut ticks = 0.0;
        let answer = loop {
            let tick = pin!(tokio::time::sleep(PROGRESS_EVERY));
            match select(request.as_mut(), tick).await {
                Either::Left((answer, _)) => break answer,
                Either::Right(_) => {
                    ticks += 1.0;
                    progress.report(ticks, None, "waiting for the seller's answer to the paid call");
                }
            }
        };
        (answer, storing)
    }

    /// What the seller's answer to the paid call means.
    async fn receive(
        &self,
        reserved: &Reserved,
        answer: Result<ToolAnswer, UpstreamError>,
        storing: Storing,
    ) -> Result<Paid, Stop> {
        let id = reserved.payment_id;
        let (reason, error) = match self.judge(reserved, answer) {
            Ok(paid) => return Ok(paid),
            Err(unsettled) => unsettled,
        };
        // A row in doubt is worth recovering: its payload is in the ledger before the state changes.
        let _ = storing.await;
        match error {
            Unsettled::Error(error) => Err(self.doubt(reserved, reason, error).await),
            Unsettled::Asks(seller) => {
                let outcome = CallOutcome {
                    ending: Ending::OpenInput,
                    output: seller.envelope(None, Some(id), Extra::None),
                    payment: Some(id),
                    keyless: reserved.quote.idempotency_key.is_none(),
                };
                match self.move_to_doubt(reserved, reason).await {
                    Some(stop) => Err(stop),
                    None => Err(Stop::Answer(outcome)),
                }
            }
        }
    }

    fn judge(
        &self,
        reserved: &Reserved,
        answer: Result<ToolAnswer, UpstreamError>,
    ) -> Result<Paid, (Reason, Unsettled)> {
        let id = reserved.payment_id;
        let fail = |reason, error: PayError| Err((reason, Unsettled::Error(error)));
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return fail(Reason::NoAnswer, PayError::NoAnswer { id, detail: words(&error.to_string()) }),
        };
        let (classified, claim) = match &answer {
            ToolAnswer::Result(result) => (x402::classify(result), Settlement::from_result(result)),
            ToolAnswer::Error { code, data, .. } => {
                let claim = data.as_deref().map_or(Ok(None), Settlement::from_error_data);
                (x402::classify_error(*code, data.as_deref()), claim)
            }
        };
        let seller = match classified {
            // A tool may talk about payments: no flag says that this is a challenge, and it was paid for.
            Answer::BrokenChallenge(Broken::NotMarked)
                if is_paid_output(reserved, &answer, claim.as_ref().ok().and_then(Option::as_ref)) =>
            {
                SellerOutput::of(&answer)
            }
            Answer::Challenge(challenge) => {
                let words = words(challenge.error.as_deref().unwrap_or_default());
                return fail(Reason::ChallengedAgain, PayError::ChallengedAgain { id, words });
            }
            Answer::BrokenChallenge(broken) => {
                let words = broken.word().to_owned();
                return fail(Reason::ChallengedAgain, PayError::ChallengedAgain { id, words });
            }
            Answer::InputRequired { input_requests, request_state } => {
                SellerOutput::asking(input_requests.as_deref(), request_state.as_deref())
            }
            Answer::Other => SellerOutput::of(&answer),
        };
        let unfinished = seller.asks();
        let output = || Some(output::whole(&answer));
        let claim = match claim {
            Ok(Some(claim)) => claim,
            Ok(None) if unfinished => return Err((Reason::InputRequired, Unsettled::Asks(seller))),
            Ok(None) => return fail(Reason::NoReceipt, PayError::NoReceipt { id, output: output() }),
            Err(malformed) => {
                alert_mismatch(id, malformed.0);
                let error = PayError::ReceiptMismatch { id, what: malformed.0, output: output() };
                return fail(Reason::ReceiptMismatch, error);
            }
        };
        match check::receipt(&claim, &reserved.quote, &reserved.authorization.payer) {
            Verdict::Right { settled, transaction } => {
                Ok(Paid { seller, whole: output::whole(&answer), settled, transaction, unfinished })
            }
            Verdict::Pending => fail(Reason::SettlementPending, PayError::SettlementPending { id }),
            Verdict::Failed => {
                let words = claim.error_reason.as_deref().map(words);
                fail(Reason::SellerSaysFailed, PayError::SellerSaysFailed { id, words })
            }
            Verdict::Mismatch(what) => {
                alert_mismatch(id, what);
                fail(Reason::ReceiptMismatch, PayError::ReceiptMismatch { id, what, output: output() })
            }
        }
    }

    async fn record(&self, reserved: Reserved, paid: Paid) -> Result<CallOutcome, Stop> {
        let id = reserved.payment_id;
        let receipt = Receipt::of_quote(&reserved.quote, id, paid.settled, Some(&paid.transaction)).json();
        let output = paid.seller.envelope(Some(&receipt), Some(id), Extra::None);
        let outcome = |output| CallOutcome {
            ending: if paid.unfinished { Ending::PaidInput } else { Ending::Paid },
            output,
            payment: Some(id),
            keyless: reserved.quote.idempotency_key.is_none(),
        };
        let request = SettleRequest {
            payment_id: id,
            amount: paid.settled,
            transaction: Some(&paid.transaction),
            evidence: Evidence::Receipt,
            outcome: Some(output.get().as_bytes()),
            unfinished: paid.unfinished,
        };
        let mismatch = |what| PayError::ReceiptMismatch { id, what, output: Some(paid.whole.clone()) };
        let ledger = &self.parts.ledger;
        // Busy: nothing was done. The money has moved, so this is asked once more before the receipt goes unrecorded.
        let settled = match ledger.settle(request).await {
            Err(LedgerError::Busy) => ledger.settle(request).await,
            other => other,
        };
        match settled {
            Ok(SettleOutcome::Settled) => Ok(outcome(output)),
            // Sweep or an operator booked something else meanwhile: what is booked is what the agent is told.
            Ok(SettleOutcome::SettledAs { amount, transaction }) => {
                alert_mismatch(id, "booked");
                let receipt = Receipt::of_quote(&reserved.quote, id, amount, transaction.as_deref()).json();
                let output = paid.seller.envelope(Some(&receipt), Some(id), Extra::None);
                let transaction = transaction.as_deref();
                let again = SettleRequest { amount, transaction, outcome: Some(output.get().as_bytes()), ..request };
                if !matches!(ledger.settle(again).await, Ok(SettleOutcome::Settled)) {
                    tracing::error!(payment = %id.short(), "the output of a settled payment could not be stored");
                }
                Ok(outcome(output))
            }
            Ok(SettleOutcome::TransactionTaken { .. }) => {
                alert_mismatch(id, "transaction");
                Err(self.doubt(&reserved, Reason::ReceiptMismatch, mismatch("transaction")).await)
            }
            Ok(SettleOutcome::Released) => {
                tracing::error!(payment = %id.short(), "ALERT a receipt came for a payment that was released");
                Err(mismatch("state").into())
            }
            // The money has moved and the output is here: the agent gets both, and the sweep closes the row.
            Err(error) => {
                let transaction = &*paid.transaction;
                tracing::error!(payment = %id.short(), transaction, %error, "ALERT a settled payment could not be recorded");
                Ok(outcome(paid.seller.envelope(Some(&receipt), Some(id), Extra::NotRecorded)))
            }
        }
    }

    /// Nothing left this process: reserved -> released, and `error` is the answer.
    async fn release(&self, reserved: Reserved, reason: Reason, error: PayError) -> Stop {
        match self.parts.ledger.release(reserved.payment_id, &reserved.lease, reason).await {
            Ok(true) => error.into(),
            Ok(false) => self.lost(&reserved).await,
            Err(ledger) => {
                // The hold stays until the sweep finds the authorization dead; nothing was signed.
                tracing::error!(payment = %reserved.payment_id.short(), error = %ledger, "a release could not be written");
                error.into()
            }
        }
    }

    /// Bytes may be out: reserved -> in_doubt, and `error` is the answer.
    async fn doubt(&self, reserved: &Reserved, reason: Reason, error: PayError) -> Stop {
        self.move_to_doubt(reserved, reason).await.unwrap_or(Stop::Error(error))
    }

    /// `Some` where somebody else has closed the row: what its state says is the answer.
    async fn move_to_doubt(&self, reserved: &Reserved, reason: Reason) -> Option<Stop> {
        match self.parts.ledger.in_doubt(reserved.payment_id, &reserved.lease, reason).await {
            Ok(true) => None,
            Ok(false) => match self.lost(reserved).await {
                // In doubt already: what this story knows, and the output that it may hold, says more than the row.
                Stop::Error(PayError::InDoubt { .. }) => None,
                stop => Some(stop),
            },
            Err(error) => {
                // The row stays reserved and its lease runs out: whoever meets it then takes it as possibly signed.
                tracing::error!(payment = %reserved.payment_id.short(), %error, "in_doubt could not be written");
                None
            }
        }
    }

    async fn lost(&self, reserved: &Reserved) -> Stop {
        match self.no_longer_ours(&reserved.quote.agent, reserved.payment_id).await {
            Ok(outcome) => Stop::Answer(outcome),
            Err(error) => Stop::Error(error),
        }
    }

    /// How long the paid request may take: configured, but never longer than the signed life and 30 s.
    fn paid_timeout(&self, quote: &Quote) -> Duration {
        let most = self.parts.settings.max_authorization.get(&quote.offer.network).copied();
        let life = Duration::from_secs(quote.offer.max_timeout_seconds).min(most.unwrap_or(Duration::from_secs(300)));
        let bound = life + Duration::from_secs(30);
        self.parts.settings.paid_call_timeout.map_or(bound, |configured| configured.min(bound))
    }
}

/// No flag of the result says that it is a challenge, and its receipt is right.
fn is_paid_output(reserved: &Reserved, answer: &ToolAnswer, claim: Option<&Settlement>) -> bool {
    let (ToolAnswer::Result(result), Some(claim)) = (answer, claim) else { return false };
    let unset = |name: &str, off: &[&str]| json::member(result, name).is_none_or(|flag| off.contains(&flag.get()));
    unset("isError", &["false", "null"])
        && unset("paymentRequired", &["null"])
        && matches!(check::receipt(claim, &reserved.quote, &reserved.authorization.payer), Verdict::Right { .. })
}

enum Unpaid {
    Asks(Box<x402::Challenge>),
    Answers(CallOutcome),
}

struct Ahead {
    payer: String,
    balance: Balance,
    at: LedgerPoint,
}

/// A right receipt, and what came with it.
struct Paid {
    seller: SellerOutput,
    whole: Box<RawValue>,
    settled: Amount,
    transaction: String,
    unfinished: bool,
}

enum Unsettled {
    Error(PayError),
    /// `input_required` without a receipt.
    Asks(SellerOutput),
}

fn refused(refusal: Refusal, call: &Call) -> PayError {
    match refusal {
        Refusal::Scheme => {
            PayError::SchemeUnavailable { scheme: words(&call.scheme), network: call.network.to_string() }
        }
        Refusal::Network => PayError::NetworkDisabled(call.network.to_string()),
        Refusal::Changed(members) => PayError::Changed(members),
        Refusal::OfferNotThere => PayError::OfferNotThere,
        Refusal::Unpayable(member) => PayError::Unpayable(member),
        Refusal::Quote(offers) => PayError::Quote(offers),
    }
}

fn probe_failed(error: UpstreamError) -> PayError {
    match error {
        UpstreamError::Refused(rule) => PayError::EndpointRefused(rule),
        UpstreamError::Timeout { .. } => PayError::ProbeTimeout,
        UpstreamError::Protocol { detail, .. } => PayError::ProbeProtocol(words(&detail)),
    }
}

fn chain_unusable(error: ChainError) -> PayError {
    PayError::Chain(words(&error.to_string()))
}

fn alert_mismatch(id: PaymentId, what: &str) {
    tracing::error!(payment = %id.short(), what, "ALERT a seller's receipt does not match the payment");
}

fn transport_word(endpoint: &Endpoint) -> &'static str {
    match endpoint.transport {
        crate::catalog::SellerTransport::StreamableHttp => "streamable-http",
        crate::catalog::SellerTransport::Sse => "sse",
    }
}

fn words(text: &str) -> String {
    x402::words(text, MAX_WORDS)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
