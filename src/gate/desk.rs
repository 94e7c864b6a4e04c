//! The gate as its callers see it: one request for an item from parse to answer, in the order of `docs/outcomes.md`
//! (table "Gate"). The proxy and the library share it; neither decides anything about money itself.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::join;
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::Instant;

pub use super::described::Described;

use super::ask::Ask;
use super::breaker::Guarded;
use super::challenge::{Presented, Reason, Withheld};
use super::claims::{Arrow, Change, Claim, ClaimError, Claims, Proof, State};
use super::hooked::MAX_TELLING;
use super::hooks::{Altered, Hooking};
use super::junk::{Junk, Trial};
use super::known::{Next, next};
use super::payment::{Now, Payment};
use super::prices::{Item, PriceError, Prices};
use super::sell::{Handler, Known, Order, Ran, Seller, Settings, Sold};
use super::shelf::{Declared, Quotes, Shelf, Stock};
use super::sweep::{Again, Chains};
use super::target::Target;
use super::told::Told;
use super::wait::Waits;
use super::{Kind, extensions, listing, splice};
use crate::facilitator::Facilitator;
use crate::json;
use crate::mcp::{Revision, RpcError};
use crate::money::Network;
use crate::ports::World;
use crate::telemetry;
use crate::x402::PAYMENT_IDENTIFIER;

/// One gate. A clone is the same gate.
#[derive(Clone)]
pub struct Gate(Arc<Inner>);

pub(super) struct Inner {
    pub world: World,
    pub seller: Arc<Seller>,
    pub chains: Chains,
    resolved_by_operator: BTreeSet<Network>,
    pub shelf: Shelf,
    pub declared: Declared,
    pub quotes: Quotes,
    pub hooking: Option<Hooking>,
    /// Events that a hook is being told of.
    pub telling: Arc<Semaphore>,
    junk: Arc<Junk>,
    waits: Waits,
    running: watch::Sender<usize>,
}

/// What a gate is made of.
pub struct Parts {
    pub world: World,
    pub prices: Prices,
    pub claims: Claims,
    /// One per network that something is sold on.
    pub facilitators: BTreeMap<Network, Facilitator>,
    /// One per network whose chain is asked what became of a settlement.
    pub chains: Chains,
    /// Networks without one, on which a person resolves it (`tollway claims resolve`).
    pub resolved_by_operator: BTreeSet<Network>,
    pub settings: Settings,
}

#[derive(Debug, thiserror::Error)]
pub enum GateError {
    #[error(transparent)]
    Price(#[from] PriceError),
    #[error("something is sold on {0}, where nobody settles payments: name a facilitator for it")]
    NoFacilitator(Network),
    #[error(
        "something is sold on {0}, where nobody can say what became of a settlement: give its chain, or name it in \
         resolved_by_operator"
    )]
    NoChain(Network),
    #[error("answers are kept for {kept} s, and an offer lives {life} s: an output would be gone before its payment")]
    AnswersTooShort { kept: u64, life: u64 },
}

/// One `tools/call`, `resources/read` or `prompts/get`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub kind: Kind,
    /// The raw `params`, which have passed [`crate::json::check`].
    pub params: &'a RawValue,
    pub revision: Revision,
    /// What the request of a stateless revision declares.
    pub client_capabilities: Option<&'a RawValue>,
    /// The name of its MCP session, which nobody else can have; `None` where there is none.
    pub session: Option<&'a str>,
    /// Whom junk is counted against: an agent, or a network address.
    pub source: &'a str,
    /// One of `challenge::PAYMENT_HEADERS` came with it.
    pub payment_header: bool,
}

#[derive(Debug)]
pub enum Answer {
    /// It costs nothing: forward the request as it came, and hand the answer on as it comes.
    Free,
    /// The raw `result`.
    Result(Box<RawValue>),
    Error(RpcError),
}

/// What a request is offered.
pub(super) struct Sheet<'a> {
    pub stock: &'a Stock,
    pub item: &'a Item,
    /// By a hook, for this request.
    pub altered: Option<&'a Altered>,
}

/// A payment's claim can change hands so often while one request looks at it.
const TURNS: usize = 16;
/// Of a network whose RPCs are not asked.
const MIN_LEDGER_MS: u64 = 4_000;
/// For the newest ledger, which the facilitator judges too.
const LEDGER_PATIENCE: std::time::Duration = std::time::Duration::from_secs(3);

impl Gate {
    pub fn new(parts: Parts) -> Result<Gate, GateError> {
        Gate::made(parts, None)
    }

    /// One that asks a seller's own code, and tells it what happened.
    pub fn with_hooks(parts: Parts, hooking: Hooking) -> Result<Gate, GateError> {
        Gate::made(parts, Some(hooking))
    }

    fn made(parts: Parts, hooking: Option<Hooking>) -> Result<Gate, GateError> {
        let Parts { world, prices, claims, facilitators, chains, resolved_by_operator, settings } = parts;
        let resolves = |network: &Network| chains.contains_key(network) || resolved_by_operator.contains(network);
        check(&prices, &claims, |network| facilitators.contains_key(network), resolves)?;
        let facilitators = facilitators.into_iter().map(|(network, one)| (network, Guarded::new(one))).collect();
        Ok(Gate(Arc::new(Inner {
            world,
            seller: Arc::new(Seller { claims, facilitators, settings }),
            chains,
            resolved_by_operator,
            shelf: Shelf::new(prices),
            declared: Declared::default(),
            quotes: Quotes::default(),
            hooking,
            telling: Arc::new(Semaphore::new(MAX_TELLING)),
            junk: Junk::new(settings.junk),
            waits: Waits::default(),
            running: watch::Sender::new(0),
        })))
    }

    /// `described` and `handler` are polled only where it is their turn, `handler` at most once and in a task of its own:
    /// a caller that goes away stops nothing that was claimed.
    pub async fn answer(
        &self,
        request: Request<'_>,
        described: impl Future<Output = Described> + Send,
        handler: impl Future<Output = Ran> + Send + 'static,
    ) -> Answer {
        let told = match Ask::read(request) {
            Ok(ask) => self.told(&ask, described, Box::pin(handler)).await,
            Err(error) => Told::error("malformed", error),
        };
        telemetry::GATE_OUTCOMES.one([told.outcome]);
        told.answer
    }

    /// Whether nothing is asked for this item. A request for it that brings no payment needs no answer of the gate's.
    pub fn is_free(&self, kind: Kind, key: &str) -> bool {
        matches!(self.0.shelf.now().book.prices().resolve(kind, key), Target::Free)
    }

    /// The raw result of `tools/list`, `resources/list`, `resources/templates/list` or `prompts/list` with prices.
    /// `None`: the upstream's own bytes are the answer.
    pub fn list(&self, method: &str, result: &RawValue) -> Option<Box<RawValue>> {
        let listed = listing::with_prices(method, result, &self.0.shelf.now().shown);
        telemetry::GATE_SCHEMAS_DROPPED.add([], listed.schemas_dropped as u64);
        let priced = listed.result?;
        Some(listing::unshared(&priced).unwrap_or(priced))
    }

    /// Takes over new prices; an offer that goes stays good for its own timeout.
    pub fn reprice(&self, prices: Prices) -> Result<(), GateError> {
        let (seller, inner) = (&self.0.seller, &self.0);
        let settles = |network: &Network| seller.facilitators.contains_key(network);
        check(&prices, &seller.claims, settles, |network| {
            inner.chains.contains_key(network) || inner.resolved_by_operator.contains(network)
        })?;
        self.0.shelf.reprice(prices, self.0.world.unix_ms());
        Ok(())
    }

    /// Returns when every sale that runs in this process is over.
    pub async fn drained(&self) {
        let _ = self.0.running.subscribe().wait_for(|running| *running == 0).await;
    }

    pub fn claims(&self) -> &Claims {
        &self.0.seller.claims
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.0
    }
}

/// What a gate refuses to begin with, whoever made its parts.
fn check(
    prices: &Prices,
    claims: &Claims,
    settles: impl Fn(&Network) -> bool,
    resolves: impl Fn(&Network) -> bool,
) -> Result<(), GateError> {
    for unit in prices.units() {
        if !settles(&unit.network) {
            return Err(GateError::NoFacilitator(unit.network));
        }
        if !resolves(&unit.network) {
            return Err(GateError::NoChain(unit.network));
        }
    }
    let kept = claims.terms().answers.as_secs();
    let lives = prices.items().flat_map(|item| &item.offers).map(|priced| priced.offer.max_timeout_seconds);
    match lives.max() {
        Some(life) if life > kept => Err(GateError::AnswersTooShort { kept, life }),
        _ => Ok(()),
    }
}

/// Where a known payment's claim leads.
enum Step {
    Told(Told),
    /// The store does not say what became of the payment, but for this receipt.
    Unreadable(Option<Box<RawValue>>),
    /// It changed hands: look again.
    Again,
    /// As an unknown one.
    Check,
}

impl Gate {
    async fn told(&self, ask: &Ask<'_>, described: impl Future<Output = Described> + Send, handler: Handler) -> Told {
        let payment = match ask.presented {
            Presented::Payment(raw) => Some(Payment::read(raw).map(Arc::new)),
            Presented::Elsewhere(_) | Presented::Nothing => None,
        };
        let deadline = Instant::now() + self.0.seller.settings.wait;
        let (mut described, mut is_described) = (pin!(described), false);
        let mut handler = Some(handler);
        // What became of this request's own sale, where that was left to the claim.
        let mut own = None;
        let mut trial = None;
        for _ in 0..TURNS {
            if let Some(Ok(payment)) = &payment {
                match self.known(ask, payment, &mut handler, &mut trial, deadline).await {
                    Step::Told(told) => return told,
                    Step::Unreadable(receipt) => {
                        let receipt = receipt.as_deref();
                        return match own {
                            Some(withheld) => Told::withheld(ask.request.kind, withheld, receipt),
                            None => Told::unreadable("store_unavailable", receipt),
                        };
                    }
                    Step::Again => continue,
                    Step::Check => {}
                }
            }
            if handler.is_none() {
                break;
            }
            let stock = self.0.shelf.now();
            let item = match stock.book.prices().resolve(ask.request.kind, &ask.key) {
                Target::Free => return Told::free(),
                Target::NotFound => return Told::not_found(ask.request.kind, ask.request.revision),
                Target::Priced(item) => item,
            };
            if !is_described {
                match described.as_mut().await {
                    Described::Refused(refusal) => return Told::refused(refusal),
                    Described::Fits { tool } => {
                        is_described = true;
                        let declaration = tool.as_deref().and_then(extensions::declaration);
                        declaration.into_iter().for_each(|one| self.0.declared.remember(&item.key, one));
                    }
                }
            }
            let altered = match self.hooked(ask, item).await {
                Ok(altered) => altered,
                Err(told) => return told,
            };
            let sheet = Sheet { stock: &stock, item, altered: altered.as_ref() };
            let payment = match &payment {
                Some(Ok(payment)) => payment,
                Some(Err(_)) if !self.0.junk.counts(ask.request.source) => return Told::too_many(),
                Some(Err(reason)) => return self.rejected(ask, &sheet, None, reason, None),
                None => return self.challenge(ask, &sheet, &Reason::PaymentRequired(ask.misplaced()), None),
            };
            if !self.admitted(ask, payment, &mut trial) {
                return Told::too_many();
            }
            let order = match self.order(ask, &sheet, payment).await {
                Ok(order) => order,
                Err(reason) => return self.rejected(ask, &sheet, Some(payment), &reason, None),
            };
            let Some(run) = handler.take() else { break };
            let Some(sold) = self.sell(order, run, trial.take()).await else {
                return Told::withheld(ask.request.kind, Withheld::SettlementUnknown, None);
            };
            match sold {
                Err(known) => handler = Some(known.handler),
                Ok(Sold::Withheld(withheld)) => own = Some(withheld),
                Ok(Sold::Challenge(reason)) => {
                    let receipt = match &reason {
                        Reason::SettlementFailed(said) => Some(failed_receipt(payment, said)),
                        _ => None,
                    };
                    return self.rejected(ask, &sheet, Some(payment), &reason, receipt.as_deref());
                }
                Ok(sold) => return Told::sold(ask.request.kind, sold),
            }
        }
        Told::withheld(ask.request.kind, own.unwrap_or(Withheld::InProgress), None)
    }

    /// The rows of the phase "identity".
    async fn known(
        &self,
        ask: &Ask<'_>,
        payment: &Arc<Payment>,
        handler: &mut Option<Handler>,
        trial: &mut Option<Trial>,
        deadline: Instant,
    ) -> Step {
        let (claims, kind) = (&self.0.seller.claims, ask.request.kind);
        let identifier = payment.identifier().ok().and_then(|echoed| echoed.identifier);
        let proof = Proof::new(identifier.as_ref(), ask.request.session);
        // What one that nobody knows is judged by next, while the database looks.
        let meanwhile = async {
            tokio::task::yield_now().await;
            let _ = self.passphrase(&payment.network).map(|passphrase| payment.signed(passphrase));
        };
        let claim = match join(claims.look(&payment.identity), meanwhile).await.0 {
            Ok(Some(claim)) => claim,
            Ok(None) => return Step::Check,
            Err(error) => return unreadable(&error, None),
        };
        let receipt = claim.receipt.as_deref();
        let theirs = claim.state == State::Settled && claim.proven_by(&proof) && claim.is_for(&ask.call);
        let stored = match theirs && !claim.leased {
            true => match claims.answer(&claim.identity, &ask.call.round).await {
                Ok(stored) => stored,
                Err(error) => return unreadable(&error, receipt),
            },
            false => None,
        };
        match next(Some(&claim), &ask.call, &proof, stored.is_some(), claims.terms().max_runs) {
            Next::Check => Step::Check,
            Next::AskChain if !self.admitted(ask, payment, trial) => Step::Told(Told::too_many()),
            Next::AskChain => match self.0.seller.look_again(&claim, &self.0.chains).await {
                Ok(Again::NotUsed) => Step::Check,
                Ok(Again::Settled(receipt)) => {
                    self.tell_of_found(&claim, &receipt);
                    Step::Again
                }
                Ok(Again::Busy) => self.wait(&claim, kind, deadline).await,
                Err(error) => unreadable(&error, receipt),
            },
            Next::Stored => match (stored, receipt) {
                (Some(answer), Some(receipt)) => Step::Told(Told::with_receipt("stored_answer", &answer, receipt)),
                _ => Step::Told(Told::unreadable("internal", receipt)),
            },
            Next::Wait => self.wait(&claim, kind, deadline).await,
            Next::Run { counts } => self.run_again(ask, &claim, counts, handler).await,
            Next::Withhold(Withheld::RunsExhausted) => {
                let failure = claims.failure(&claim.identity, &ask.call.round).await.ok().flatten();
                let last = failure.and_then(|kept| Ran::failed(&kept)).zip(receipt);
                Step::Told(match last {
                    Some((ran, receipt)) => Told::ran("runs_exhausted", ran, receipt),
                    None => Told::withheld(kind, Withheld::RunsExhausted, receipt),
                })
            }
            Next::Withhold(withheld) => Step::Told(Told::withheld(kind, withheld, receipt)),
            Next::Challenge(reason) => Step::Told(self.refuse(ask, &claim, &reason)),
        }
    }

    async fn wait(&self, claim: &Claim, kind: Kind, deadline: Instant) -> Step {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Step::Told(Told::withheld(kind, Withheld::InProgress, claim.receipt.as_deref()));
        }
        self.0.waits.over(&self.0.seller, claim.identity, left).await;
        Step::Again
    }

    /// A settled payment's handler runs again, and nothing is charged.
    async fn run_again(&self, ask: &Ask<'_>, claim: &Claim, counts: bool, handler: &mut Option<Handler>) -> Step {
        let kind = ask.request.kind;
        let (Some(run), Some(receipt)) = (handler.take(), claim.receipt.clone()) else {
            return Step::Told(Told::withheld(kind, Withheld::InProgress, claim.receipt.as_deref()));
        };
        let (seller, identity, call, paid) = (self.0.seller.clone(), claim.identity, ask.call, receipt.clone());
        let done = self.in_a_task(async move {
            match seller.claims.take(&identity, State::Settled, counts).await {
                // A twin may have run this round since the claim was looked at.
                Ok(Some(lease)) if !counts && seller.claims.answer(&identity, &call.round).await?.is_some() => {
                    let _ = seller.claims.advance(&lease, Arrow::RAN, Change::default()).await?;
                    Ok(Err(run))
                }
                Ok(Some(lease)) => Ok(Ok(seller.run_paid(&lease, receipt, &call, run).await)),
                Ok(None) => Ok(Err(run)),
                Err(error) => Err(error),
            }
        });
        match done.await {
            Some(Ok(Ok(Sold::Delivered { ran, receipt }))) => Step::Told(Told::ran("ran_again", ran, &receipt)),
            Some(Ok(Ok(_))) => Step::Again,
            Some(Ok(Err(run))) => {
                *handler = Some(run);
                Step::Again
            }
            Some(Err(error)) => unreadable(&error, Some(&paid)),
            None => Step::Told(Told::unreadable("internal", Some(&paid))),
        }
    }

    /// A demand with a reason, of a payment that is known: for the item as it is sold now, or as it was.
    fn refuse(&self, ask: &Ask<'_>, claim: &Claim, reason: &Reason) -> Told {
        let stock = self.0.shelf.now();
        let receipt = claim.receipt.as_deref().filter(|_| *reason == Reason::AlreadySettled);
        match stock.book.prices().resolve(ask.request.kind, &ask.key) {
            Target::Priced(item) => {
                let sheet = Sheet { stock: &stock, item, altered: None };
                self.challenge(ask, &sheet, reason, receipt)
            }
            Target::Free => Told::free(),
            Target::NotFound => Told::not_found(ask.request.kind, ask.request.revision),
        }
    }

    pub(super) fn challenge(
        &self,
        ask: &Ask<'_>,
        sheet: &Sheet<'_>,
        reason: &Reason,
        receipt: Option<&RawValue>,
    ) -> Told {
        let changed = sheet.altered.and_then(|altered| altered.item.as_ref());
        let shown = changed.or_else(|| sheet.stock.shown.same(sheet.item)).filter(|item| !item.offers.is_empty());
        let Some(shown) = shown else {
            return match reason {
                Reason::AlreadySettled => Told::unreadable("not_on_offer", receipt),
                _ => Told::internal("not_on_offer"),
            };
        };
        if let Some(changed) = changed {
            self.0.quotes.remember(&ask.call, changed, self.0.world.unix_ms());
        }
        let (extensions, _) = self.extensions(sheet);
        Told::challenge(ask.binding, shown, &ask.key, reason, &extensions, receipt)
    }

    /// What is advertised with an item, and the bazaar's declarations that may have been.
    pub(super) fn extensions(&self, sheet: &Sheet<'_>) -> (Box<RawValue>, Vec<Box<RawValue>>) {
        let declared = self.0.declared.of(&sheet.item.key);
        let ours = extensions::advertised(sheet.item, declared.first().map(|newest| &**newest));
        let more = sheet.altered.and_then(|altered| altered.extensions.as_deref());
        let Some(members) = more.and_then(|more| json::members(more).ok()) else { return (ours, declared) };
        // What says who the payer is stays ours.
        let set: Vec<_> = members.iter().map(|(name, value)| (name.as_ref(), value.get())).collect();
        let set: Vec<_> = set.into_iter().filter(|(name, _)| *name != PAYMENT_IDENTIFIER).collect();
        (splice::with_members(&ours, &set).unwrap_or(ours), declared)
    }

    /// Whether this source may try a payment that nobody knows. `trial` is kept over all turns of the request.
    fn admitted(&self, ask: &Ask<'_>, payment: &Payment, trial: &mut Option<Trial>) -> bool {
        if trial.is_none() {
            *trial = self.0.junk.admit(ask.request.source, payment.identity);
        }
        trial.is_some()
    }

    /// The local checks: rows of the phase "payment".
    async fn order(&self, ask: &Ask<'_>, sheet: &Sheet<'_>, payment: &Arc<Payment>) -> Result<Order, Reason> {
        let (unix_ms, item) = (self.0.world.unix_ms(), sheet.item);
        let offer = match sheet.altered.and_then(|altered| altered.item.as_ref()) {
            Some(changed) => self.0.quotes.matching(&ask.call, changed, &payment.accepted, unix_ms),
            None => sheet.stock.book.matching(item, &payment.accepted, unix_ms).cloned(),
        };
        let offer = offer.ok_or(Reason::NoMatchingRequirements)?;
        let (offered, declared) = self.extensions(sheet);
        let echoed = extensions::check(&offered, &declared, payment.extensions.as_deref(), item)?;
        if echoed.legacy_identifier {
            telemetry::GATE_LEGACY_IDENTIFIERS.one([]);
        }
        let chain = self.0.chains.get(&offer.network);
        let ledger = match chain {
            Some(chain) => tokio::time::timeout(LEDGER_PATIENCE, chain.ledger()).await.ok().and_then(Result::ok),
            None => None,
        };
        let min_ledger_ms = chain.map_or(MIN_LEDGER_MS, |chain| chain.min_ledger_ms());
        let passphrase = self.passphrase(&offer.network);
        payment.check(&offer, &Now { unix_ms, ledger, min_ledger_ms, passphrase })?;
        Ok(Order {
            scope: item.scope(),
            call: ask.call,
            payment: payment.clone(),
            proof: Proof::new(echoed.identifier.as_ref(), ask.request.session),
            seen_at: payment.earliest(&offer, min_ledger_ms),
            offer,
        })
    }

    /// What payments of a Stellar network are signed for.
    fn passphrase(&self, network: &Network) -> Option<&str> {
        let chain = self.0.chains.get(network);
        chain.map(|chain| chain.passphrase()).or_else(|| known_passphrase(network))
    }

    /// `None`: it was cut off with the process, perhaps in the middle of a settlement.
    async fn sell(&self, order: Order, handler: Handler, mut trial: Option<Trial>) -> Option<Result<Sold, Known>> {
        let (seller, gate) = (self.0.seller.clone(), self.clone());
        let done = self.in_a_task(async move {
            let sold = seller.try_to_sell(&order, handler, &mut trial).await;
            // Another request's payment, or a fault of ours.
            trial.into_iter().for_each(Trial::was_not_judged);
            if let Ok(sold) = &sold {
                gate.tell_of(&order, sold);
            }
            sold
        });
        done.await
    }

    /// `None`: the task was ended with the process.
    async fn in_a_task<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (tell, told) = oneshot::channel();
        let running = Running::new(&self.0.running);
        self.0.world.spawn.spawn(Box::pin(async move {
            let done = work.await;
            drop(running);
            let _ = tell.send(done);
        }));
        told.await.ok()
    }
}

/// One sale that goes on.
struct Running(watch::Sender<usize>);

impl Running {
    fn new(count: &watch::Sender<usize>) -> Running {
        count.send_modify(|running| *running += 1);
        telemetry::GATE_SALES.add([], 1.0);
        Running(count.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running = running.saturating_sub(1));
        telemetry::GATE_SALES.add([], -1.0);
    }
}

fn unreadable(error: &ClaimError, receipt: Option<&RawValue>) -> Step {
    tracing::error!(%error, "a payment's claim could not be read");
    Step::Unreadable(receipt.map(ToOwned::to_owned))
}

/// What a facilitator says of a settlement that failed.
fn failed_receipt(payment: &Payment, said: &str) -> Box<RawValue> {
    json::raw(&serde_json::json!({
        "success": false,
        "errorReason": said,
        "transaction": "",
        "network": payment.network.as_str(),
        "payer": payment.payer(),
    }))
}

/// Of a network whose RPCs are not asked, so that a signature can be checked there too.
fn known_passphrase(network: &Network) -> Option<&'static str> {
    match network.as_str() {
        "stellar:pubnet" => Some("Public Global Stellar Network ; September 2015"),
        "stellar:testnet" => Some("Test SDF Network ; September 2015"),
        _ => None,
    }
}
