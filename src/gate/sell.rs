//! One paid request from its claim to its output: verify, run, settle (`authorization`), or settle, run (`upfront`).
//! Each step begins only where the claim's arrow was taken, and an output leaves only behind a yes that the claim took
//! too. A caller that goes away must not stop it: it runs in a task of its own.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::value::RawValue;
use tokio::time::sleep;

use super::challenge::{Reason, Withheld};
use super::claims::{Answer, Arrow, Change, Claim, ClaimError, Claimed, Claims, Lease, Lost, NewClaim, Proof};
use super::payment::{CallKey, Payment};
use super::settle::{Judged, judge};
use crate::facilitator::{Facilitator, Question, Verdict};
use crate::mcp::RpcError;
use crate::money::Network;
use crate::x402::{Flow, Offer};

pub struct Seller {
    pub claims: Claims,
    /// One per network that something is sold on.
    pub facilitators: BTreeMap<Network, Facilitator>,
    pub settings: Settings,
}

#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Of one call to a facilitator.
    pub facilitator: Duration,
    /// Between two renewals of a lease; well below [`super::claims::Terms::lease`].
    pub renew: Duration,
    /// A larger answer is delivered and not kept, bytes.
    pub max_answer: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { facilitator: Duration::from_secs(30), renew: Duration::from_secs(10), max_answer: 4 << 20 }
    }
}

/// A payment that passed the local checks.
pub struct Order<'a> {
    /// `prices::Item::scope`.
    pub scope: &'a str,
    pub call: &'a CallKey,
    pub payment: &'a Payment,
    pub proof: Proof,
    /// What the payment equals in every member.
    pub offer: &'a Offer,
    /// `claims::NewClaim::seen_at`.
    pub seen_at: u64,
}

/// What the handler did.
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
    /// Another request was first: its claim decides.
    Known(Box<Claim>),
    /// A fault of ours, or of somebody whom we asked: never a challenge.
    Internal(&'static str),
}

impl Seller {
    /// Claims the payment and goes through with it. `run` is called at most once.
    pub async fn sell(&self, order: &Order<'_>, run: impl AsyncFnOnce() -> Ran) -> Sold {
        let Some(facilitator) = self.facilitators.get(&order.offer.network) else {
            return Sold::Internal("nobody settles on this network");
        };
        let nonce = order.payment.nonce();
        let new = NewClaim {
            identity: order.payment.identity,
            scope: order.scope,
            call: order.call,
            proof: order.proof,
            network: order.offer.network.as_str(),
            payer: order.payment.payer(),
            nonce: &nonce,
            dies_at: order.payment.dies_at(),
            seen_at: order.seen_at,
            offer: &order.offer.raw,
        };
        let lease = match self.claims.claim(&new).await {
            Ok(Claimed::Fresh(lease)) => lease,
            Ok(Claimed::Known(claim)) => return Sold::Known(claim),
            Ok(Claimed::IdentifierConflict) => return Sold::Challenge(Reason::IdentifierConflict),
            Err(error) => return broken(&error),
        };
        // A settle of an earlier claim of this payment makes every later no worthless.
        let settles = match self.claims.look(&order.payment.identity).await {
            Ok(Some(claim)) => claim.settles,
            Ok(None) => return Sold::Internal("a claim is gone"),
            Err(error) => return broken(&error),
        };
        let sale = Sale { seller: self, order, facilitator, lease, first: settles == 0 };
        match order.offer.flow() {
            Flow::Upfront => sale.upfront(run).await,
            _ => sale.authorization(run).await,
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
    order: &'a Order<'a>,
    facilitator: &'a Facilitator,
    lease: Lease,
    first: bool,
}

impl Sale<'_> {
    async fn authorization(self, run: impl AsyncFnOnce() -> Ran) -> Sold {
        let (payload, offer) = (&*self.order.payment.raw, &*self.order.offer.raw);
        let verdict = self.holding(self.facilitator.verify(payload, offer, self.seller.settings.facilitator)).await;
        match verdict {
            Err(Lost) => return Sold::Withheld(Withheld::InProgress),
            Ok(Ok(Verdict::Valid)) => {}
            Ok(Ok(Verdict::Invalid(reason))) => {
                return match self.take(Arrow::REFUSED, Change { reason: Some(&reason), ..Change::default() }).await {
                    Err(sold) => sold,
                    Ok(()) if self.first => Sold::Challenge(Reason::Facilitator(reason)),
                    Ok(()) => Sold::Withheld(Withheld::SettlementUnknown),
                };
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "a payment could not be verified");
                let change = Change { reason: Some("verify_unavailable"), ..Change::default() };
                return match self.take(Arrow::RELEASE, change).await {
                    Err(sold) => sold,
                    Ok(()) => Sold::Internal("the payment could not be checked"),
                };
            }
        }
        let ran = match self.holding(run()).await {
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
        let keep = self.keep(result, false);
        match self.settle(Some(keep), Arrow::SETTLED).await {
            Ok(receipt) => Sold::Delivered { ran, receipt },
            Err(sold) => sold,
        }
    }

    async fn upfront(self, run: impl AsyncFnOnce() -> Ran) -> Sold {
        let receipt = match self.settle(None, Arrow::SETTLED_AND_RUNS).await {
            Ok(receipt) => receipt,
            Err(sold) => return sold,
        };
        let ran = match self.holding(run()).await {
            Ok(ran) => ran,
            Err(Lost) => return Sold::Withheld(Withheld::InProgress),
        };
        let answer = match &ran {
            Ran::Output(result) => self.keep(result, false),
            Ran::Asks(result) => self.keep(result, true),
            Ran::Failed(_) | Ran::Error(_) => Answer::Failed,
        };
        match self.take(Arrow::RAN, Change { answer: Some(answer), ..Change::default() }).await {
            Ok(()) => Sold::Delivered { ran, receipt },
            // It is paid, and the claim is another's now: that one delivers.
            Err(Sold::Withheld(_)) => Sold::Withheld(Withheld::InProgress),
            Err(_) => Sold::Delivered { ran, receipt },
        }
    }

    /// `/settle`, between the arrow before it and the arrow behind it. The receipt, once both were taken.
    async fn settle(&self, answer: Option<Answer<'_>>, yes: Arrow) -> Result<Box<RawValue>, Sold> {
        let question = Question::new(&self.order.payment.raw, &self.order.offer.raw);
        let change = Change { settle_request: Some(question.bytes()), answer, ..Change::default() };
        self.take(Arrow::SETTLE, change).await?;
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

    fn keep<'r>(&'r self, result: &'r RawValue, asks: bool) -> Answer<'r> {
        if result.get().len() > self.seller.settings.max_answer {
            return Answer::TooLarge;
        }
        Answer::Keep { round: &self.order.call.round, result, asks }
    }

    async fn holding<T>(&self, work: impl Future<Output = T>) -> Result<T, Lost> {
        self.seller.holding(&self.lease, work).await
    }

    async fn take(&self, arrow: Arrow, change: Change<'_>) -> Result<(), Sold> {
        match self.seller.claims.advance(&self.lease, arrow, change).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Lost)) => Err(Sold::Withheld(Withheld::InProgress)),
            Err(error) => Err(broken(&error)),
        }
    }
}

fn broken(error: &ClaimError) -> Sold {
    tracing::error!(%error, "a claim could not be made or changed");
    Sold::Internal("the payment could not be recorded")
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Mutex};

    use serde_json::json;

    use super::super::Kind;
    use super::super::claims::tests::{Hands, world};
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
        runs: AtomicU32,
        clock: Arc<Hands>,
        _dir: tempfile::TempDir,
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
        let facilitator = Facilitator::new(http, &format!("http://{address}").parse().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
        let claims = Claims::open_sqlite(&dir.path().join("c"), world, ring, Terms::default()).await.unwrap();
        let facilitators = BTreeMap::from([("stellar:testnet".parse().unwrap(), facilitator)]);
        let seller = Seller { claims, facilitators, settings: Settings::default() };
        Scene { seller, heard, runs: AtomicU32::new(0), clock, _dir: dir }
    }

    fn output() -> Ran {
        Ran::Output(json::raw(&json!({"content": [], "secret": 1})))
    }

    impl Scene {
        async fn sell(&self, upfront: bool, ran: Ran) -> Sold {
            let mut offer = offer(10_000);
            if upfront {
                let extra = json!({"areFeesSponsored": true, "paymentFlow": "upfront"});
                offer.extra = Some(json::raw(&extra));
            }
            let payment = good(1, 5);
            let params = json::raw(&json!({"name": "search"}));
            let call = CallKey::of(Kind::Tool, &params).unwrap();
            let proof = Proof { identifier: Some([5; 32]), session: None };
            let order =
                Order { scope: "tool:search", call: &call, payment: &payment, proof, offer: &offer, seen_at: 40 };
            let run = async || {
                self.runs.fetch_add(1, Ordering::SeqCst);
                ran
            };
            self.seller.sell(&order, run).await
        }

        async fn claim(&self) -> Claim {
            self.seller.claims.look(&good(1, 5).identity).await.unwrap().unwrap()
        }

        /// So much later a sweep looks at what is due.
        async fn sweep(&self, seconds: u64) -> Vec<Resolved> {
            let now = self.clock.0.fetch_add(seconds * 1_000, Ordering::SeqCst) + seconds * 1_000;
            self.seller.sweep(&Chains::new(), 10, now).await.unwrap()
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
        let Sold::Known(known) = scene.sell(false, output()).await else { panic!() };
        assert_eq!(known.state, State::Settled);
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
                let Sold::Known(_) = scene.sell(upfront, output()).await else { panic!("{lie}: a second charge") };
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
    async fn what_is_not_verified_does_not_run() {
        let scene = scene((200, r#"{"isValid":false,"invalidReason":"insufficient_funds"}"#), &[(200, &yes())]).await;
        let Sold::Challenge(reason) = scene.sell(false, output()).await else { panic!() };
        assert_eq!(reason, Reason::Facilitator("insufficient_funds".into()));
        assert_eq!(scene.claim().await.state, State::Failed);
        for (code, text) in [(500, "oops"), (200, "{}"), (200, r#"{"isValid":"true"}"#)] {
            let scene = self::scene((code, text), &[(200, &yes())]).await;
            assert!(
                matches!(scene.sell(false, output()).await, Sold::Internal(_)),
                "our fault is no challenge: {text}"
            );
            assert_eq!(scene.claim().await.state, State::Released, "{text}");
            assert_eq!(scene.runs.load(Ordering::SeqCst), 0);
        }
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
    async fn upfront_is_charged_whatever_the_handler_does_and_the_receipt_is_there() {
        let failed = Ran::Failed(json::raw(&json!({"isError": true})));
        for (ran, kept) in [(failed, Kept::None), (output(), Kept::Answer)] {
            let scene = scene((500, ""), &[(200, &yes())]).await;
            let Sold::Delivered { receipt, .. } = scene.sell(true, ran).await else { panic!() };
            assert_eq!(receipt.get(), yes());
            let claim = scene.claim().await;
            assert_eq!((claim.state, claim.leased, claim.kept), (State::Settled, false, kept));
        }
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
