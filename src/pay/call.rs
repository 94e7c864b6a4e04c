//! One paid call from its arguments to the signature: every step takes what the step before produced, and ends the
//! story itself where the table of `docs/outcomes.md` says so. `send` has what follows.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, maybe_done, select};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::error::{Exceeded, PayError, Phase, Short};
use super::existing::ledger_error;
use super::output::{CallOutcome, Ending, Extra, SellerOutput};
use super::parcel::Parcel;
use super::terms::Held;
use super::{LEASE_MARGIN, Payer, millis, words};
use crate::catalog::{CatalogError, Kind, Listing};
use crate::chain::ChainError;
use crate::chain::stellar::{Balance, Draft, LedgerPoint, PrepareError, Stellar};
use crate::guard::{self, Call, Live, Quote, Refusal};
use crate::ledger::{self, Authorization, Decision, Intent, NotReserved, Reason, Reserved};
use crate::mcp::Progress;
use crate::money::{PaymentId, Unit};
use crate::policy::{Banned, Origin, Pin, Pinning};
use crate::signer::{NotSigned, Signed};
use crate::telemetry;
use crate::upstream::{Endpoint, NOT_ALLOWED, ToolAnswer, ToolCall, UpstreamError};
use crate::x402::{self, Answer, PaymentFor, bazaar};

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
impl From<Result<CallOutcome, PayError>> for Stop {
    fn from(end: Result<CallOutcome, PayError>) -> Stop {
        end.map_or_else(Stop::Error, Stop::Answer)
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
    held: Held,
    parcel: Parcel,
    timeout: Duration,
}

impl Payer {
    /// `cancelled`: the agent cancelled or is gone. It stops the story before the signature and never after it.
    pub async fn call(
        &self,
        call: Call,
        cancelled: CancellationToken,
        progress: Progress,
    ) -> Result<CallOutcome, PayError> {
        let span = telemetry::paid_call(call.agent.as_str(), call.network.as_str());
        self.story(call, cancelled, progress).instrument(span).await
    }

    async fn story(
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

        if let Some(outcome) = self.courier.by_key(&call, &hash, &progress).await? {
            return Ok(outcome);
        }
        // Answers to a seller's question belong to the payment that was asked, whatever the seller says without it.
        if call.brings_answers()
            && let Some(outcome) = self.courier.by_twin(&call, &hash, &progress).await?
        {
            return Ok(outcome);
        }
        let ready = match self.ready(&call, hash).await {
            Ok(ready) => ready,
            Err(Stop::Answer(outcome)) => return Ok(outcome),
            Err(Stop::Error(refusal)) => {
                return match self.courier.by_twin(&call, &hash, &progress).await? {
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
        telemetry::is_about(&id.short());
        // The story from here on belongs to a task of its own. The guard tells it when this future is dropped.
        let gone = cancelled.child_token();
        let _gone_when_dropped = gone.clone().drop_guard();
        let payer = self.clone();
        let story = self.courier.apart(async move {
            match payer.pay(&call, ready, id, id_nonce, &gone, &progress).await {
                Ok(outcome) | Err(Stop::Answer(outcome)) => Ok(outcome),
                Err(Stop::Error(error)) => Err(error),
            }
        });
        story.await.unwrap_or(Err(PayError::Interrupted { id }))
    }

    /// Resolve to guard: everything that needs no reservation.
    async fn ready(&self, call: &Call, hash: [u8; 32]) -> Result<Ready, Stop> {
        let listing = telemetry::phase("resolve", self.resolve(call)).await?;
        let endpoint = self.connect(&listing)?;
        let unit = Unit { network: call.network.clone(), asset: call.asset.clone() };
        let mut ahead = pin!(maybe_done(self.read_ahead(&unit, &endpoint)));
        let answer = {
            let probe = pin!(telemetry::phase("probe", self.probe(call, &listing, &endpoint)));
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
        let (rules, policy) = (&self.parts.settings.rules, self.parts.settings.policy.now());
        let quote =
            guard::admit(&listing, live, call, hash, rules, &policy).map_err(|refusal| refused(refusal, call))?;
        ahead.as_mut().await;
        let ahead = ahead.take_output().unwrap_or(Err(PayError::Chain("not asked".into())))?;
        held_to_its_pin(&quote, ahead.pin.as_ref(), policy.pin_recipients)?;
        Ok(telemetry::phase("guard", self.afford(quote, ahead)).await?)
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

    /// Payer, ledger number and balance, read while the seller is asked, all of them cached; and the recipient that this
    /// seller's origin is pinned to, where pins are kept.
    async fn read_ahead(&self, unit: &Unit, endpoint: &Endpoint) -> Result<Ahead, PayError> {
        let chain = self.chain(unit)?;
        let payer =
            self.parts.signer.address(&unit.network).await.map_err(|e| PayError::NoPayer(words(&e.to_string())))?;
        let balance = chain.balance(&payer, &unit.asset).await.map_err(chain_unusable)?;
        let at = chain.ledger().await.map_err(chain_unusable)?;
        let pin = match (self.parts.settings.policy.now().pin_recipients, Origin::of(&endpoint.url)) {
            (Pinning::Off, _) | (_, None) => None,
            (Pinning::Warn | Pinning::Enforce, Some(origin)) => {
                self.parts.ledger.pin(&origin, unit).await.map_err(ledger_error(Phase::Guard))?
            }
        };
        Ok(Ahead { payer, balance, at, pin })
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
        let (reserved, draft) = self.reserve(call, ready, id, id_nonce, progress).await?;
        let reserved = self.still_wanted(reserved, gone).await?;
        let signed = self.sign(reserved, draft).await?;
        let Sendable { held, parcel, timeout } = self.prepare(signed, call).await?;
        Ok(self.courier.send_first(&held, parcel, timeout, progress).await?)
    }

    async fn reserve(
        &self,
        call: &Call,
        ready: Ready,
        payment_id: PaymentId,
        id_nonce: [u8; 16],
        progress: &Progress,
    ) -> Result<(Reserved, Draft), Stop> {
        let Ready { quote, draft, authorization } = ready;
        let (unit, required) = (quote.unit(), quote.amount());
        let settings = &self.parts.settings;
        // Each term bounds a step that the owner may be in when it is met. Ending it sooner would take a row from an owner
        // that still waits for an output which is paid for; a dead one's row could not be released earlier for it, since its
        // authorization lives on: the 30 s beyond that life are the answer's.
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
        let decision = match telemetry::phase("reserve", ledger::reserve(&*self.parts.ledger, intent)).await {
            Ok(reserved) => return Ok((reserved, draft)),
            Err(NotReserved::Ledger(error)) => return Err(ledger_error(Phase::Reserve)(error).into()),
            Err(NotReserved::Refused(decision)) => decision,
        };
        Err(match decision {
            Decision::Existing(row) => self.courier.existing(*row, call, progress).await.into(),
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
        let chain = self.chain(&reserved.quote.unit())?;
        let asked = self.parts.signer.sign(reserved, draft, chain.passphrase(), &self.parts.world);
        let answer = telemetry::phase("sign", asked).await;
        telemetry::SIGNER_CALLS.one([answer.as_ref().map_or_else(NotSigned::word, |_| "signed")]);
        match answer {
            Ok(signed) => {
                let (quote, authorization) = (&signed.reserved.quote, &signed.reserved.authorization);
                chain.signed_away(&authorization.payer, &quote.offer.asset, quote.amount());
                Ok(signed)
            }
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
                Err(self.doubt(&Held::by_owner(&reserved), Reason::SignerFailed, error).await)
            }
        }
    }

    /// From here on somebody outside has seen a live signature.
    async fn prepare(&self, signed: Signed, call: &Call) -> Result<Sendable, Stop> {
        let held = Held::by_owner(&signed.reserved);
        let id = held.terms.id;
        let failed = |detail: String| PayError::SimulationFailed { id, detail: words(&detail) };
        let transaction = match telemetry::phase("prepare", self.chain(&held.terms.unit)?.prepare(&signed.entry)).await
        {
            Ok(transaction) => transaction,
            Err(PrepareError::Lying(_)) => {
                tracing::error!(payment = %id.short(), "ALERT a chain RPC answered with another payment than ours");
                return Err(self.doubt(&held, Reason::ChainRpc, PayError::ChainLied { id }).await);
            }
            Err(error @ (PrepareError::Failed(_) | PrepareError::Lost(_))) => {
                return Err(self.doubt(&held, Reason::SimulationFailed, failed(error.to_string())).await);
            }
        };
        match Parcel::signed(&signed, &transaction, call) {
            Ok(parcel) => Ok(Sendable { held, parcel, timeout: self.paid_timeout(&signed.reserved.quote) }),
            Err(error) => Err(self.doubt(&held, Reason::SimulationFailed, failed(error.to_string())).await),
        }
    }

    /// Nothing left this process: reserved -> released, and `error` is the answer.
    async fn release(&self, reserved: Reserved, reason: Reason, error: PayError) -> Stop {
        match self.parts.ledger.release(reserved.payment_id, &reserved.lease, reason).await {
            Ok(true) => error.into(),
            Ok(false) => self.courier.no_longer_ours(&reserved.quote.agent, reserved.payment_id).await.into(),
            Err(ledger) => {
                // The hold stays until the sweep finds the authorization dead; nothing was signed.
                tracing::error!(payment = %reserved.payment_id.short(), error = %ledger, "a release could not be written");
                error.into()
            }
        }
    }

    /// Somebody outside may have a signature: reserved -> in_doubt, and `error` is the answer.
    async fn doubt(&self, held: &Held, reason: Reason, error: PayError) -> Stop {
        self.courier.doubt(held, reason, Err(error)).await.into()
    }

    fn paid_timeout(&self, quote: &Quote) -> Duration {
        self.courier.paid_timeout(&quote.offer.network, Duration::from_secs(quote.offer.max_timeout_seconds))
    }
}

enum Unpaid {
    Asks(Box<x402::Challenge>),
    Answers(CallOutcome),
}

struct Ahead {
    payer: String,
    balance: Balance,
    at: LedgerPoint,
    pin: Option<Pin>,
}

/// What this origin was paid to before, it is paid to again.
fn held_to_its_pin(quote: &Quote, pin: Option<&Pin>, pinning: Pinning) -> Result<(), PayError> {
    let Some(pin) = pin.filter(|pin| !pin.is_for(&quote.offer.pay_to)) else { return Ok(()) };
    let (origin, pinned, asked) = (pin.origin.to_string(), words(&pin.pay_to), words(&quote.offer.pay_to));
    match pinning {
        Pinning::Off => Ok(()),
        Pinning::Warn => {
            tracing::warn!(origin, pinned, asked, "a seller names another recipient than it was paid to before");
            Ok(())
        }
        Pinning::Enforce => Err(PayError::RecipientChanged { origin, pinned, asked }),
    }
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
        Refusal::Banned(rule) => PayError::NotAllowed { phase: Phase::Guard, rule },
        Refusal::Quote(offers) => PayError::Quote(offers),
    }
}

fn probe_failed(error: UpstreamError) -> PayError {
    match error {
        UpstreamError::Refused(NOT_ALLOWED) => PayError::NotAllowed { phase: Phase::Connect, rule: Banned::Origin },
        UpstreamError::Refused(rule) => PayError::EndpointRefused(rule),
        UpstreamError::Timeout { .. } => PayError::ProbeTimeout,
        UpstreamError::Protocol { detail, .. } => PayError::ProbeProtocol(words(&detail)),
    }
}

fn chain_unusable(error: ChainError) -> PayError {
    PayError::Chain(words(&error.to_string()))
}
