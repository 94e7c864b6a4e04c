//! One paid request from its claim to its output: verify, run, settle (`authorization`), or verify, settle, run
//! (`upfront`: what is no payment must not leave a settlement behind of which nobody knows the end).
//! Each step begins only where the claim's arrow was taken, and an output leaves only behind a yes that the claim took
//! too. A caller that goes away must not stop it: it runs in a task of its own.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Either, select};
use serde_json::value::RawValue;
use tokio::time::{sleep, timeout};

use super::breaker::Guarded;

use super::challenge::{Reason, Withheld};
use super::claims::{Answer, Arrow, Change, Claim, ClaimError, Claimed, Claims, Lease, Lost, NewClaim, Proof};
use super::junk::{JunkLimit, Trial};
use super::payment::{CallKey, Payment};
use super::settle::{Judged, judge};
use crate::facilitator::{Question, Verdict};
use crate::json;
use crate::mcp::RpcError;
use crate::money::Network;
use crate::x402::{Flow, Offer};

pub struct Seller {
    pub claims: Claims,
    /// One per network that something is sold on.
    pub facilitators: BTreeMap<Network, Guarded>,
    pub settings: Settings,
}

#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Of one call to a facilitator.
    pub facilitator: Duration,
    /// Of one run of a handler; before a settlement the life of the offer bounds it too.
    pub handler: Duration,
    /// Between two renewals of a lease; well below [`super::claims::Terms::lease`].
    pub renew: Duration,
    /// A larger answer is delivered and not kept, bytes.
    pub max_answer: usize,
    /// A caller with proof waits so long for what another request with its payment does.
    pub wait: Duration,
    /// Payments that nobody knows, of one source.
    pub junk: JunkLimit,
    /// Between two looks at settlements whose end is open.
    pub sweep: Duration,
    /// Between two comparisons of the offers with what their facilitators support.
    pub compare: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            facilitator: Duration::from_secs(30),
            handler: Duration::from_secs(120),
            renew: Duration::from_secs(10),
            max_answer: 4 << 20,
            wait: Duration::from_secs(30),
            junk: JunkLimit::default(),
            sweep: Duration::from_secs(5),
            compare: Duration::from_secs(300),
        }
    }
}

/// A payment that passed the local checks.
pub struct Order {
    /// `prices::Item::scope`.
    pub scope: String,
    pub call: CallKey,
    pub payment: Arc<Payment>,
    pub proof: Proof,
    /// What the payment equals in every member.
    pub offer: Offer,
    /// `claims::NewClaim::seen_at`.
    pub seen_at: u64,
}

/// What the handler did. A result that is no object counts as a failure.
#[derive(Debug, Clone)]
pub enum Ran {
    Output(Box<RawValue>),
    /// `resultType: "input_required"`.
    Asks(Box<RawValue>),
    /// A result with `isError: true`.
    Failed(Box<RawValue>),
    /// A JSON-RPC error, a time-out, a cancellation.
    Error(RpcError),
}

impl Ran {
    /// What it failed with, as it is kept: `{"result": …}` or `{"error": {code, message, data}}`.
    fn failure(&self) -> Option<Box<RawValue>> {
        match self {
            Ran::Output(_) | Ran::Asks(_) => None,
            Ran::Failed(result) => Some(json::raw(&BTreeMap::from([("result", &**result)]))),
            Ran::Error(error) => {
                let error = KeptError { code: error.code, message: &error.message, data: error.data.as_deref() };
                Some(json::raw(&BTreeMap::from([("error", error)])))
            }
        }
    }

    /// What [`Ran::failure`] kept.
    pub(super) fn failed(kept: &RawValue) -> Option<Ran> {
        if let Some(result) = json::member(kept, "result") {
            return Some(Ran::Failed(result.to_owned()));
        }
        let error = json::member(kept, "error")?;
        Some(Ran::Error(RpcError {
            code: json::member(error, "code")?.get().parse().ok()?,
            message: json::member(error, "message").and_then(json::string)?.into_owned(),
            data: json::member(error, "data").filter(|data| data.get() != "null").map(ToOwned::to_owned),
        }))
    }
}

#[derive(serde::Serialize)]
struct KeptError<'a> {
    code: i64,
    message: &'a str,
    data: Option<&'a RawValue>,
}

/// What runs where it may: the request forwarded, or the program's own function. It is not polled before.
pub type Handler = BoxFuture<'static, Ran>;

/// Another request with this payment was first: its claim decides, and the handler did not run.
pub struct Known {
    pub claim: Box<Claim>,
    pub handler: Handler,
}

#[derive(Debug)]
pub enum Sold {
    /// The receipt goes with it.
    Delivered {
        ran: Ran,
        receipt: Box<RawValue>,
    },
    /// The handler gave no output, and nothing was charged: its result goes back unchanged.
    Uncharged(Ran),
    Challenge(Reason),
    Withheld(Withheld),
    /// The facilitator could not be asked, and nothing was broadcast: never a challenge.
    Unverified,
    /// A fault of ours: never a challenge.
    Internal(&'static str),
}

impl Seller {
    /// Claims the payment and goes through with it.
    pub async fn sell(&self, order: &Order, handler: Handler) -> Result<Sold, Known> {
        self.try_to_sell(order, handler, &mut None).await
    }

    /// `trial`: it is over as soon as the payment is known to be good or bad.
    pub(super) async fn try_to_sell(
        &self,
        order: &Order,
        handler: Handler,
        trial: &mut Option<Trial>,
    ) -> Result<Sold, Known> {
        let Some(facilitator) = self.facilitators.get(&order.offer.network) else {
            return Ok(Sold::Internal("nobody settles on this network"));
        };
        let nonce = order.payment.nonce();
        let new = NewClaim {
            identity: order.payment.identity,
            scope: &order.scope,
            call: &order.call,
            proof: order.proof,
            network: order.offer.network.as_str(),
            payer: order.payment.payer(),
            nonce: &nonce,
            dies_at: order.payment.dies_at(),
            seen_at: order.seen_at,
            offer: &order.offer.raw,
        };
        let (lease, settles) = match self.claims.claim(&new).await {
            Ok(Claimed::Fresh { lease, settles }) => (lease, settles),
            Ok(Claimed::Known(claim)) => return Err(Known { claim, handler }),
            Ok(Claimed::IdentifierConflict) => {
                drop(trial.take());
                return Ok(Sold::Challenge(Reason::IdentifierConflict));
            }
            Err(error) => return Ok(broken(&error)),
        };
        // A settle of an earlier claim of this payment makes every later no worthless.
        let sale = Sale { seller: self, order, facilitator, lease, first: settles == 0 };
        if let Err(sold) = sale.verify(trial).await {
            return Ok(sold);
        }
        Ok(match order.offer.flow() {
            Flow::Upfront => sale.upfront(handler).await,
            _ => sale.authorization(handler).await,
        })
    }

    /// Runs the handler of a payment that is settled: at once in `upfront`, or again and free. `lease`: of the claim.
    pub async fn run_paid(&self, lease: &Lease, receipt: Box<RawValue>, call: &CallKey, handler: Handler) -> Sold {
        let ran = match self.run(lease, handler, self.settings.handler).await {
            Ok(ran) => ran,
            Err(Lost) => return Sold::Withheld(Withheld::InProgress),
        };
        let said = ran.failure();
        let answer = match (&ran, &said) {
            (Ran::Output(result), _) => self.keep(call, result, false),
            (Ran::Asks(result), _) => self.keep(call, result, true),
            (_, Some(said)) if said.get().len() <= self.settings.max_answer => {
                Answer::Failed { round: &call.round, said }
            }
            _ => Answer::Failed { round: &call.round, said: RawValue::NULL },
        };
        let reason = said.as_ref().map(|_| "handler_failed");
        let change = Change { answer: Some(answer), reason, ..Change::default() };
        match self.claims.advance(lease, Arrow::RAN, change).await {
            // It is paid, and the claim is another's now: that one delivers.
            Ok(Err(Lost)) => Sold::Withheld(Withheld::InProgress),
            Ok(Ok(())) => Sold::Delivered { ran, receipt },
            Err(error) => {
                tracing::error!(%error, "a paid answer could not be stored");
                Sold::Delivered { ran, receipt }
            }
        }
    }

    /// A holder that stood still past its lease begins nothing: another may have begun the same. Where the store cannot be
    /// asked, nothing begins either; the claim is had again when the lease is over.
    async fn run(&self, lease: &Lease, handler: Handler, limit: Duration) -> Result<Ran, Lost> {
        // It may stand still while it asks, too.
        for _ in 0..3 {
            if self.claims.surely_holds(lease) {
                return self.holding(lease, self.bounded(handler, limit)).await;
            }
            match self.claims.renew(lease).await {
                Ok(Err(Lost)) => return Err(Lost),
                Ok(Ok(())) => {}
                Err(error) => tracing::warn!(%error, "a claim's lease could not be renewed"),
            }
        }
        Err(Lost)
    }

    /// A handler that hangs, panics, or gives what is no result, failed.
    async fn bounded(&self, handler: Handler, limit: Duration) -> Ran {
        let failed = |what: &str| Ran::Error(RpcError::internal(what));
        match timeout(limit, AssertUnwindSafe(handler).catch_unwind()).await {
            Ok(Ok(Ran::Output(result) | Ran::Asks(result) | Ran::Failed(result)))
                if json::members(&result).is_err() =>
            {
                failed("The result is no object")
            }
            Ok(Ok(ran)) => ran,
            Ok(Err(_)) => failed("The request could not be handled"),
            Err(_) => failed("The request took too long"),
        }
    }

    fn keep<'r>(&self, call: &'r CallKey, result: &'r RawValue, asks: bool) -> Answer<'r> {
        match result.get().len() > self.settings.max_answer {
            true => Answer::TooLarge,
            false => Answer::Keep { round: &call.round, result, asks },
        }
    }

    /// The lease is renewed while `work` goes on. A store that cannot be asked is no loss: the next arrow decides.
    pub(super) async fn holding<T>(&self, lease: &Lease, work: impl Future<Output = T>) -> Result<T, Lost> {
        let mut work = pin!(work);
        loop {
            let pause = pin!(sleep(self.settings.renew));
            match select(work.as_mut(), pause).await {
                Either::Left((done, _)) => return Ok(done),
                Either::Right(_) => match self.claims.renew(lease).await {
                    Ok(Err(Lost)) => return Err(Lost),
                    Ok(Ok(())) => {}
                    Err(error) => tracing::warn!(%error, "a claim's lease could not be renewed"),
                },
            }
        }
    }
}

/// A claim that is held.
struct Sale<'a> {
    seller: &'a Seller,
    order: &'a Order,
    facilitator: &'a Guarded,
    lease: Lease,
    first: bool,
}

impl Sale<'_> {
    /// A no here ends a payment that nobody could settle; the same no to a settle would prove nothing.
    async fn verify(&self, trial: &mut Option<Trial>) -> Result<(), Sold> {
        let (payload, offer) = (&*self.order.payment.raw, &*self.order.offer.raw);
        let verdict = self.holding(self.facilitator.verify(payload, offer, self.seller.settings.facilitator)).await;
        match verdict {
            Err(Lost) => Err(Sold::Withheld(Withheld::InProgress)),
            Ok(Ok(Verdict::Valid)) => {
                trial.take().into_iter().for_each(Trial::was_good);
                Ok(())
            }
            Ok(Ok(Verdict::Invalid(reason))) => {
                drop(trial.take());
                self.take(Arrow::REFUSED, Change { reason: Some(&reason), ..Change::default() }).await?;
                Err(self.unless_settled(Sold::Challenge(Reason::Facilitator(reason))))
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "a payment could not be verified");
                let change = Change { reason: Some("verify_unavailable"), ..Change::default() };
                self.take(Arrow::RELEASE, change).await?;
                Err(self.unless_settled(Sold::Unverified))
            }
        }
    }

    async fn authorization(self, handler: Handler) -> Sold {
        // An output that is later than its authorization could not be sold.
        let limit = self.seller.settings.handler.min(Duration::from_secs(self.order.offer.max_timeout_seconds));
        let ran = match self.seller.run(&self.lease, handler, limit).await {
            Ok(ran) => ran,
            Err(Lost) => return Sold::Withheld(Withheld::InProgress),
        };
        let Ran::Output(result) = &ran else {
            let reason = if matches!(ran, Ran::Asks(_)) { "input_required" } else { "handler_failed" };
            let change = Change { reason: Some(reason), ..Change::default() };
            return match self.take(Arrow::RELEASE, change).await {
                Err(sold) => sold,
                Ok(()) => Sold::Uncharged(ran),
            };
        };
        let keep = self.seller.keep(&self.order.call, result, false);
        match self.settle(Some(keep), Arrow::SETTLED).await {
            Ok(receipt) => Sold::Delivered { ran, receipt },
            Err(sold) => sold,
        }
    }

    async fn upfront(self, handler: Handler) -> Sold {
        match self.settle(None, Arrow::SETTLED_AND_RUNS).await {
            Ok(receipt) => self.seller.run_paid(&self.lease, receipt, &self.order.call, handler).await,
            Err(sold) => sold,
        }
    }

    /// `/settle`, between the arrow before it and the arrow behind it. The receipt, once both were taken.
    async fn settle(&self, answer: Option<Answer<'_>>, yes: Arrow) -> Result<Box<RawValue>, Sold> {
        let question = Question::new(&self.order.payment.raw, &self.order.offer.raw);
        let change = Change { settle_request: Some(question.bytes()), answer, ..Change::default() };
        match self.seller.claims.advance(&self.lease, Arrow::SETTLE, change).await {
            Ok(Ok(())) => {}
            Ok(Err(Lost)) => return Err(Sold::Withheld(Withheld::InProgress)),
            Err(error) => return Err(self.not_begun(&error).await),
        }
        let (network, payer) = (&self.order.offer.network, self.order.payment.payer());
        let mut repeated = false;
        loop {
            let asked = self.facilitator.settle_exactly(&question, self.seller.settings.facilitator);
            let Ok(said) = self.holding(asked).await else { return Err(Sold::Withheld(Withheld::SettlementUnknown)) };
            let judged = judge(said.as_ref().map(|(_, settlement)| settlement), network, payer, self.first, repeated);
            match (judged, said) {
                (Judged::Settled, Ok((receipt, _))) => {
                    return match self.take(yes, Change { receipt: Some(&receipt), ..Change::default() }).await {
                        Ok(()) => Ok(receipt),
                        // The money moved and the row does not say so yet: the sweep finds it, the payer collects it.
                        Err(_) => Err(Sold::Withheld(Withheld::SettlementUnknown)),
                    };
                }
                (Judged::Pending, _) => repeated = true,
                (Judged::Failed(reason), _) => {
                    let change = Change { reason: Some(&reason), ..Change::default() };
                    return match self.take(Arrow::FAILED, change).await {
                        Ok(()) => Err(Sold::Challenge(Reason::SettlementFailed(reason))),
                        Err(_) => Err(Sold::Withheld(Withheld::SettlementUnknown)),
                    };
                }
                (judged, _) => {
                    let reason = if let Judged::Unknown(reason) = judged { reason } else { "no_usable_answer".into() };
                    tracing::warn!(
                        claim = self.lease.identity.short(),
                        reason,
                        "it is not known whether a payment settled"
                    );
                    let _ = self.take(Arrow::LOST, Change { reason: Some(&reason), ..Change::default() }).await;
                    return Err(Sold::Withheld(Withheld::SettlementUnknown));
                }
            }
        }
    }

    /// The arrow before `/settle` failed. This holder does not call it; but where the arrow may be in the store, the
    /// sweep does, once the lease is over. Nothing is promised that giving the claim back did not prove: it waits for
    /// the row's lock, so also for a statement that is still under way.
    async fn not_begun(&self, error: &ClaimError) -> Sold {
        let change = Change { reason: Some("settle_not_begun"), ..Change::default() };
        let given_back = self.seller.claims.advance(&self.lease, Arrow::RELEASE, change).await;
        match given_back {
            Ok(Ok(())) => return self.unless_settled(broken(error)),
            Err(_) if error.wrote_nothing() => return self.unless_settled(broken(error)),
            Ok(Err(Lost)) | Err(_) => {}
        }
        tracing::error!(%error, claim = self.lease.identity.short(), "it is not known whether a settle was begun");
        let _ = self.take(Arrow::LOST, Change { reason: Some("settle_not_sent"), ..Change::default() }).await;
        Sold::Withheld(Withheld::SettlementUnknown)
    }

    /// What says that nothing was charged, or asks for more, is said only of a payment of which no settle ever went out.
    fn unless_settled(&self, sold: Sold) -> Sold {
        if self.first { sold } else { Sold::Withheld(Withheld::SettlementUnknown) }
    }

    async fn holding<T>(&self, work: impl Future<Output = T>) -> Result<T, Lost> {
        self.seller.holding(&self.lease, work).await
    }

    async fn take(&self, arrow: Arrow, change: Change<'_>) -> Result<(), Sold> {
        match self.seller.claims.advance(&self.lease, arrow, change).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Lost)) => Err(Sold::Withheld(Withheld::InProgress)),
            Err(error) => Err(self.unless_settled(broken(&error))),
        }
    }
}

fn broken(error: &ClaimError) -> Sold {
    tracing::error!(%error, "a claim could not be made or changed");
    Sold::Internal("the payment could not be recorded")
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    use serde_json::json;

    use super::super::Kind;
    use super::super::claims::tests::{Hands, refuse_to_settle, world};
    use super::super::claims::{Kept, State, Terms};
    use super::super::payment::tests::{good, offer};
    use super::super::sweep::{Chains, Resolved};
    use super::*;
    use crate::http::testing::{Request, answer, serve, write};
    use crate::http::{Client, Destination, Limits, Tls};
    use crate::json;
    use crate::seal::KeyRing;

    const VALID: &str = r#"{"isValid":true}"#;
    const PENDING: &str =
        r#"{"success":false,"errorReason":"settlement_pending","transaction":"ab","network":"stellar:testnet"}"#;

    fn yes() -> String {
        json!({"success": true, "transaction": "ab", "network": "stellar:testnet"}).to_string()
    }

    struct Scene {
        seller: Seller,
        /// Requests as they came: path and body.
        heard: Arc<Mutex<Vec<(String, String)>>>,
        runs: Arc<AtomicU32>,
        clock: Arc<Hands>,
        dir: tempfile::TempDir,
    }

    /// A facilitator that answers `/verify` so, and `/settle` with these in turn (the last one stays).
    async fn scene(verify: (u16, &str), settles: &[(u16, &str)]) -> Scene {
        let heard: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let verify = (verify.0, verify.1.to_owned());
        let settles: Vec<(u16, String)> = settles.iter().map(|(code, text)| (*code, (*text).to_owned())).collect();
        let (log, left) = (heard.clone(), Arc::new(Mutex::new(settles)));
        let address = serve(move |request: Request, io| {
            let settle = request.line().contains("/settle");
            let path = if settle { "settle" } else { "verify" };
            log.lock().unwrap().push((path.to_owned(), request.body.clone()));
            let mut left = left.lock().unwrap();
            let (code, text) = match settle {
                false => verify.clone(),
                true if left.len() > 1 => left.remove(0),
                true => left[0].clone(),
            };
            drop(left);
            async move { write(&io, answer(code, &[], &text)).await }
        })
        .await;
        let (world, clock) = world();
        let limits = Limits { timeout: Duration::from_secs(5), max_response_bytes: 1 << 20 };
        let http = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
        let facilitator = crate::facilitator::Facilitator::new(http, &format!("http://{address}").parse().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
        let claims = Claims::open_sqlite(&dir.path().join("c"), world, ring, Terms::default()).await.unwrap();
        let facilitators = BTreeMap::from([("stellar:testnet".parse().unwrap(), Guarded::new(facilitator))]);
        let seller = Seller { claims, facilitators, settings: Settings::default() };
        Scene { seller, heard, runs: Arc::default(), clock, dir }
    }

    fn output() -> Ran {
        Ran::Output(json::raw(&json!({"content": [], "secret": 1})))
    }

    impl Scene {
        async fn sell(&self, upfront: bool, ran: Ran) -> Sold {
            self.try_to_sell(upfront, ran).await.unwrap_or_else(|_| panic!("it is known"))
        }

        async fn try_to_sell(&self, upfront: bool, ran: Ran) -> Result<Sold, Known> {
            let mut offer = offer(10_000);
            if upfront {
                let extra = json!({"areFeesSponsored": true, "paymentFlow": "upfront"});
                offer.extra = Some(json::raw(&extra));
            }
            let call = CallKey::of(Kind::Tool, &json::raw(&json!({"name": "search"}))).unwrap();
            let proof = Proof { identifier: Some([5; 32]), session: None };
            let payment = Arc::new(good(1, 5));
            let order = Order { scope: "tool:search".into(), call, payment, proof, offer, seen_at: 40 };
            let runs = self.runs.clone();
            let handler = async move {
                runs.fetch_add(1, Ordering::SeqCst);
                ran
            };
            self.seller.sell(&order, handler.boxed()).await
        }

        async fn claim(&self) -> Claim {
            self.seller.claims.look(&good(1, 5).identity).await.unwrap().unwrap()
        }

        /// So much later a sweep looks at what is due.
        async fn sweep(&self, seconds: u64) -> Vec<Resolved> {
            let now = self.clock.0.fetch_add(seconds * 1_000, Ordering::SeqCst) + seconds * 1_000;
            let swept = self.seller.sweep(&Chains::new(), 10, now).await.unwrap();
            swept.iter().map(|swept| swept.resolved).collect()
        }

        fn settles(&self) -> Vec<String> {
            let heard = self.heard.lock().unwrap();
            heard.iter().filter(|(path, _)| path == "settle").map(|(_, body)| body.clone()).collect()
        }
    }

    #[tokio::test]
    async fn it_is_verified_run_and_settled_and_a_twin_learns_of_the_claim() {
        let scene = scene((200, VALID), &[(200, &yes())]).await;
        let Sold::Delivered { receipt, .. } = scene.sell(false, output()).await else { panic!() };
        assert_eq!(receipt.get(), yes());
        let claim = scene.claim().await;
        assert_eq!((claim.state, claim.settles), (State::Settled, 1));
        let Err(known) = scene.try_to_sell(false, output()).await else { panic!() };
        assert_eq!(known.claim.state, State::Settled);
        assert_eq!((scene.runs.load(Ordering::SeqCst), scene.settles().len()), (1, 1));
    }

    #[tokio::test]
    async fn a_settle_that_lies_gets_no_output_out_and_leaves_the_claim_unknown() {
        let wrong_network = yes().replace("testnet", "pubnet");
        let wrong_payer = yes().replace('}', r#","payer":"GB"}"#);
        let empty = yes().replace("\"ab\"", "\"\"");
        let text = yes().replace("true", "\"true\"");
        let no =
            r#"{"success":false,"errorReason":"unexpected_settle_error","transaction":"","network":"stellar:testnet"}"#;
        for (code, lie) in [
            (200, wrong_network.as_str()),
            (200, &wrong_payer),
            (200, &empty),
            (200, &text),
            (200, no),
            (200, "{}"),
            (200, "<html>"),
            (502, "bad gateway"),
        ] {
            for upfront in [false, true] {
                let scene = scene((200, VALID), &[(code, lie)]).await;
                let sold = scene.sell(upfront, output()).await;
                assert!(matches!(sold, Sold::Withheld(Withheld::SettlementUnknown)), "{lie}: {sold:?}");
                assert_eq!(scene.claim().await.state, State::Unknown, "{lie}");
                assert_eq!(scene.runs.load(Ordering::SeqCst), u32::from(!upfront), "{lie}");
                assert!(scene.try_to_sell(upfront, output()).await.is_err(), "{lie}: a second charge");
                assert_eq!(scene.settles().len(), 1, "{lie}");
            }
        }
    }

    #[tokio::test]
    async fn a_pending_settlement_is_asked_once_more_with_the_same_bytes() {
        let scene = scene((200, VALID), &[(200, PENDING), (200, &yes())]).await;
        assert!(matches!(scene.sell(false, output()).await, Sold::Delivered { .. }));
        let settles = scene.settles();
        assert_eq!(settles.len(), 2);
        assert_eq!(settles[0], settles[1]);
        let scene = self::scene((200, VALID), &[(200, PENDING)]).await;
        assert!(matches!(scene.sell(false, output()).await, Sold::Withheld(Withheld::SettlementUnknown)));
        assert_eq!(scene.settles().len(), 2);
    }

    #[tokio::test]
    async fn whatever_the_handler_does_but_an_output_is_never_charged() {
        let result = || json::raw(&json!({"isError": true, "content": []}));
        for ran in [Ran::Failed(result()), Ran::Asks(result()), Ran::Error(RpcError::internal("x"))] {
            let scene = scene((200, VALID), &[(200, &yes())]).await;
            assert!(matches!(scene.sell(false, ran).await, Sold::Uncharged(_)));
            assert_eq!(scene.claim().await.state, State::Released);
            assert!(scene.settles().is_empty());
            // The same payment buys the output when the handler works.
            assert!(matches!(scene.sell(false, output()).await, Sold::Delivered { .. }));
        }
    }

    #[tokio::test]
    async fn what_is_not_verified_neither_runs_nor_is_settled() {
        for upfront in [false, true] {
            let no = r#"{"isValid":false,"invalidReason":"insufficient_funds"}"#;
            let scene = scene((200, no), &[(200, &yes())]).await;
            let Sold::Challenge(reason) = scene.sell(upfront, output()).await else { panic!() };
            assert_eq!(reason, Reason::Facilitator("insufficient_funds".into()));
            assert_eq!((scene.claim().await.state, scene.settles().len()), (State::Failed, 0));
            for (code, text) in [(500, "oops"), (200, "{}"), (200, r#"{"isValid":"true"}"#)] {
                let scene = self::scene((code, text), &[(200, &yes())]).await;
                let sold = scene.sell(upfront, output()).await;
                assert!(matches!(sold, Sold::Unverified), "our fault is no challenge: {text}");
                assert_eq!(scene.claim().await.state, State::Released, "{text}");
                assert_eq!((scene.runs.load(Ordering::SeqCst), scene.settles().len()), (0, 0));
            }
        }
    }

    #[tokio::test]
    async fn what_no_chain_can_end_is_asked_for_ever_more_rarely() {
        let scene = scene((200, VALID), &[(502, "lost")]).await;
        assert!(matches!(scene.sell(false, output()).await, Sold::Withheld(Withheld::SettlementUnknown)));
        assert_eq!(scene.sweep(20_000).await, [Resolved::StillUnknown]);
        assert!(scene.sweep(3_590).await.is_empty());
        assert_eq!(scene.sweep(11).await, [Resolved::StillUnknown]);
    }

    #[tokio::test]
    async fn a_structural_no_fails_once_and_means_nothing_the_second_time() {
        let no = r#"{"success":false,"errorReason":"invalid_exact_stellar_payload_wrong_amount","transaction":"","network":"stellar:testnet"}"#;
        let scene = scene((200, VALID), &[(200, no)]).await;
        let Sold::Challenge(reason) = scene.sell(false, output()).await else { panic!() };
        assert_eq!(reason.word(), "settlement_failed");
        assert_eq!(scene.claim().await.state, State::Failed);
        assert!(matches!(scene.sell(false, output()).await, Sold::Withheld(Withheld::SettlementUnknown)));
        assert_eq!(scene.claim().await.state, State::Unknown);
    }

    #[tokio::test]
    async fn a_settle_that_may_have_been_begun_promises_nothing() {
        let unknown = |sold: &Sold| matches!(sold, Sold::Withheld(Withheld::SettlementUnknown));
        for upfront in [false, true] {
            // It is in the store, and its answer was lost: the sweep settles it.
            let scene = scene((200, VALID), &[(200, &yes())]).await;
            scene.seller.claims.lose(State::Settling, true);
            let sold = scene.sell(upfront, output()).await;
            assert!(unknown(&sold), "{sold:?}");
            assert!(scene.settles().is_empty());
            assert_eq!(scene.claim().await.state, State::Unknown);
            assert_eq!(scene.sweep(6).await, [Resolved::Settled]);
            assert_eq!(scene.settles().len(), 1);
            // It is not there, and never will be.
            let scene = self::scene((200, VALID), &[(200, &yes())]).await;
            scene.seller.claims.lose(State::Settling, false);
            assert!(matches!(scene.sell(upfront, output()).await, Sold::Internal(_)));
            assert_eq!(scene.claim().await.state, State::Released);
            // It is not there, which nobody can know.
            let scene = self::scene((200, VALID), &[(200, &yes())]).await;
            scene.seller.claims.lose(State::Settling, false);
            scene.seller.claims.lose(State::Released, false);
            assert!(unknown(&scene.sell(upfront, output()).await));
            // The store itself took it back.
            let scene = self::scene((200, VALID), &[(200, &yes())]).await;
            refuse_to_settle(&scene.dir.path().join("c")).await;
            scene.seller.claims.lose(State::Released, false);
            assert!(matches!(scene.sell(upfront, output()).await, Sold::Internal(_)));
            assert_eq!(scene.settles().len(), 0);
        }
    }

    #[tokio::test]
    async fn of_a_payment_that_was_settled_once_nothing_is_promised() {
        let no = r#"{"success":false,"errorReason":"invalid_exact_stellar_payload_wrong_amount","transaction":"","network":"stellar:testnet"}"#;
        let scene = scene((200, VALID), &[(200, no)]).await;
        assert!(matches!(scene.sell(false, output()).await, Sold::Challenge(_)));
        scene.seller.claims.lose(State::Settling, false);
        let sold = scene.sell(false, output()).await;
        assert!(matches!(sold, Sold::Withheld(Withheld::SettlementUnknown)), "{sold:?}");
    }

    #[tokio::test]
    async fn upfront_is_charged_whatever_the_handler_does_and_the_receipt_is_there() {
        let failed = Ran::Failed(json::raw(&json!({"isError": true})));
        for (ran, kept) in [(failed, Kept::None), (output(), Kept::Answer)] {
            let scene = scene((200, VALID), &[(200, &yes())]).await;
            let Sold::Delivered { receipt, .. } = scene.sell(true, ran).await else { panic!() };
            assert_eq!(receipt.get(), yes());
            let claim = scene.claim().await;
            assert_eq!((claim.state, claim.leased, claim.kept), (State::Settled, false, kept));
        }
    }

    #[tokio::test]
    async fn who_stood_still_past_its_lease_begins_nothing() {
        let scene = scene((200, VALID), &[(200, &yes())]).await;
        let Sold::Delivered { .. } = scene.sell(true, Ran::Error(RpcError::internal("x"))).await else { panic!() };
        let (claims, identity) = (&scene.seller.claims, good(1, 5).identity);
        let first = claims.take(&identity, State::Settled, true).await.unwrap().unwrap();
        let call = CallKey::of(Kind::Tool, &json::raw(&json!({"name": "search"}))).unwrap();
        let run = async |lease: &Lease| {
            let runs = scene.runs.clone();
            let handler = async move {
                runs.fetch_add(1, Ordering::SeqCst);
                output()
            };
            scene.seller.run_paid(lease, json::raw(&json!({})), &call, handler.boxed()).await
        };
        scene.clock.0.fetch_add(30_001, Ordering::SeqCst);
        first.stand_still(Duration::from_secs(30));
        let second = claims.take(&identity, State::Settled, true).await.unwrap().unwrap();
        assert!(matches!(run(&first).await, Sold::Withheld(Withheld::InProgress)));
        assert_eq!(scene.runs.load(Ordering::SeqCst), 1, "what the other one may do now");
        // Late, and nobody has it: it is had again first.
        second.stand_still(Duration::from_secs(20));
        assert!(matches!(run(&second).await, Sold::Delivered { .. }));
        assert_eq!(scene.runs.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_lost_settlement_is_asked_for_again_and_the_payer_collects_the_output() {
        let no = r#"{"success":false,"errorReason":"nonce_already_used","transaction":"","network":"stellar:testnet"}"#;
        let scene = scene((200, VALID), &[(502, "lost"), (200, no), (200, &yes())]).await;
        assert!(matches!(scene.sell(false, output()).await, Sold::Withheld(Withheld::SettlementUnknown)));
        assert!(scene.sweep(0).await.is_empty(), "not yet");
        // A no to a repeated settle proves nothing, least of all that the nonce is used.
        assert_eq!(scene.sweep(6).await, [Resolved::StillUnknown]);
        assert_eq!(scene.claim().await.reason.as_deref(), Some("operator_resolves"));
        assert!(scene.sweep(1).await.is_empty());
        assert_eq!(scene.sweep(300).await, [Resolved::Settled]);
        let settles = scene.settles();
        assert_eq!((settles.len(), &settles[0], &settles[0]), (3, &settles[1], &settles[2]), "the same bytes");
        let claim = scene.claim().await;
        assert_eq!((claim.state, claim.receipt.unwrap().get()), (State::Settled, yes().as_str()));
        let call = CallKey::of(Kind::Tool, &json::raw(&json!({"name": "search"}))).unwrap();
        let kept = scene.seller.claims.answer(&claim.identity, &call.round).await.unwrap().unwrap();
        assert!(kept.get().contains("secret"));
        assert_eq!(scene.runs.load(Ordering::SeqCst), 1);
    }
}
