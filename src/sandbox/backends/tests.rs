//! Payments that the product itself builds, signed by the sandbox's signer, against facilitator and seller, all over
//! HTTP on a real ledger.

use serde_json::json;
use serde_json::value::RawValue;
use tokio_util::sync::DropGuard;
use url::Url;

use super::*;
use crate::chain::stellar::{self, Stellar};
use crate::facilitator::Verdict;
use crate::json::{self as strict};
use crate::money::PaymentId;
use crate::ports::machine;
use crate::sandbox::mcp_client::McpClient;
use crate::x402::{self, Answer, Challenge, META_PAYMENT, Offer, Settlement, classify};

const PAID: Duration = Duration::from_secs(30);

struct Scene {
    world: World,
    backends: Backends,
    http: Client,
    seller: McpClient,
    facilitator: crate::facilitator::Facilitator,
    payer: Stellar,
    _shutdown: DropGuard,
}

async fn scene() -> Scene {
    let (world, _) = machine::world();
    let shutdown = CancellationToken::new();
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(100)), ..chain::Options::default() };
    let options = Options { chain, ..Options::default() };
    let backends = Backends::start(&options, &world, &shutdown).await.unwrap();
    let http = client(&world).unwrap();
    let settings = stellar::Settings {
        network: NETWORK.parse().unwrap(),
        passphrase: PASSPHRASE.into(),
        rpc_urls: vec![Url::parse(&backends.rpc_url).unwrap()],
        credentials: stellar::Credentials::Address,
        max_authorization_seconds: 3_600,
        min_ledger_ms: 100,
    };
    Scene {
        payer: Stellar::new(settings, http.clone(), world.clone()),
        seller: McpClient::new(http.clone(), &backends.seller_url, None),
        facilitator: crate::facilitator::Facilitator::new(
            http.clone(),
            &Url::parse(&backends.facilitator_url).unwrap(),
        ),
        _shutdown: shutdown.drop_guard(),
        world,
        backends,
        http,
    }
}

impl Scene {
    async fn challenge(&self) -> Challenge {
        let answer = self.seller.call_tool("get_weather", &json!({"city": "Oslo"}), &json!({}), &[]).await.unwrap();
        match classify(&answer) {
            Answer::Challenge(challenge) => *challenge,
            other => panic!("no challenge but {other:?}"),
        }
    }

    /// The signer over its port, as the agent server would ask it.
    async fn signature(&self, draft: &stellar::Draft) -> String {
        let body = json!({
            "network": NETWORK,
            "networkPassphrase": PASSPHRASE,
            "authEntryXdr": draft.preimage_base64(),
            "address": self.backends.payer.to_string(),
            "payment": {},
        });
        let request = ::http::Request::post(format!("{}/sign-auth-entry", self.backends.signer_url))
            .header("authorization", self.backends.signer_auth.as_str())
            .body(body.to_string().into())
            .unwrap();
        let answer = self.http.send(request).await.unwrap();
        assert_eq!(answer.status(), 200, "{answer:?}");
        let answer: serde_json::Value = serde_json::from_slice(answer.body()).unwrap();
        answer["signedAuthEntryXdr"].as_str().unwrap().to_owned()
    }

    /// A whole payment for the offer, with a nonce of its own.
    async fn payment(&self, challenge: &Challenge) -> Box<RawValue> {
        let offer: &Offer = &challenge.offers[0];
        let at = self.payer.ledger().await.unwrap();
        let draft = self.payer.draft(offer, &self.backends.payer.to_string(), at).unwrap();
        let signature = self.signature(&draft).await;
        let transaction = self.payer.prepare(&draft.attach_base64(&signature).unwrap()).await.unwrap();
        let payload = strict::raw(&json!({"transaction": transaction}));
        let id = PaymentId::from_bytes(self.world.random());
        let (resource, extensions) = (Some(&*challenge.resource), challenge.extensions.as_deref());
        x402::payment_payload(offer, &payload, resource, extensions, id).unwrap()
    }

    async fn pay(&self, payment: &RawValue) -> Box<RawValue> {
        let meta = [(META_PAYMENT, payment)];
        self.seller.call_tool("get_weather", &json!({"city": "Oslo"}), &json!({}), &meta).await.unwrap()
    }

    fn moved(&self) -> usize {
        self.backends.network.transfers().len()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_of_ours_buys_the_output_once_and_an_identical_call_gets_it_again() {
    let scene = scene().await;
    let payment = scene.payment(&scene.challenge().await).await;
    let first = scene.pay(&payment).await;
    let receipt = Settlement::from_result(&first).unwrap().unwrap();
    assert!(receipt.success, "{}", first.get());
    let transfers = scene.backends.network.transfers();
    assert_eq!(transfers.len(), 1);
    assert_eq!((transfers[0].transaction.as_str(), transfers[0].amount), (receipt.transaction.as_str(), 10_000));
    assert_eq!(scene.backends.network.balance(&scene.backends.pay_to), Some(10_000));
    assert_eq!(scene.pay(&payment).await.get(), first.get());
    assert_eq!(scene.moved(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_payment_settles_once_however_often_and_however_concurrently_it_is_asked() {
    let scene = scene().await;
    let challenge = scene.challenge().await;
    let payment = scene.payment(&challenge).await;
    let offer = &challenge.offers[0].raw;
    assert_eq!(scene.facilitator.verify(&payment, offer, PAID).await.unwrap(), Verdict::Valid);
    let asked = (0..6).map(|_| scene.facilitator.settle(&payment, offer, PAID));
    let answers = futures_util::future::join_all(asked).await;
    let settled: Vec<_> = answers.iter().filter(|answer| answer.as_ref().unwrap().1.success).collect();
    assert_eq!(settled.len(), 1, "{answers:?}");
    assert_eq!(scene.moved(), 1);
    let (_, again) = scene.facilitator.settle(&payment, offer, PAID).await.unwrap();
    assert_eq!(again.error_reason.as_deref(), Some("invalid_exact_stellar_payload_simulation_failed"));
    assert_eq!(scene.moved(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_payments_settle_at_the_same_time_each_from_an_account_of_its_own() {
    let scene = scene().await;
    let challenge = scene.challenge().await;
    let mut payments = Vec::new();
    for _ in 0..24 {
        payments.push(scene.payment(&challenge).await);
    }
    let offer = &challenge.offers[0].raw;
    let asked = payments.iter().map(|payment| scene.facilitator.settle(payment, offer, PAID));
    for answer in futures_util::future::join_all(asked).await {
        let (raw, settlement) = answer.unwrap();
        assert!(settlement.success, "{}", raw.get());
    }
    assert_eq!(scene.moved(), 24);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forged_or_altered_payment_moves_nothing() {
    let scene = scene().await;
    let challenge = scene.challenge().await;
    let offer = &challenge.offers[0].raw;
    let payment = scene.payment(&challenge).await;
    let mut forged: serde_json::Value = serde_json::from_str(payment.get()).unwrap();
    let text = forged["payload"]["transaction"].as_str().unwrap().to_owned();
    // The signature is the last 64 bytes of the entry's map; any other place of the envelope would do as well.
    let mut bytes = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, &text).unwrap();
    let signature = "signature".as_bytes();
    let at = bytes.windows(signature.len()).rposition(|window| window == signature).unwrap() + 30;
    bytes[at] ^= 1;
    forged["payload"]["transaction"] = json!(base64::Engine::encode(&base64::engine::general_purpose::STANDARD, bytes));
    let forged = strict::raw(&forged);
    let Verdict::Invalid(reason) = scene.facilitator.verify(&forged, offer, PAID).await.unwrap() else {
        panic!("a forged signature was found valid");
    };
    assert_eq!(reason, "invalid_exact_stellar_payload_simulation_failed");
    let cheaper = RawValue::from_string(offer.get().replace(r#""10000""#, r#""9999""#)).unwrap();
    let (_, settlement) = scene.facilitator.settle(&payment, &cheaper, PAID).await.unwrap();
    assert_eq!(settlement.error_reason.as_deref(), Some("invalid_exact_stellar_payload_wrong_amount"));
    assert_eq!(scene.moved(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_facilitator_takes_strict_bodies_only() {
    let scene = scene().await;
    let post = |path: &str, body: &str| {
        let url = format!("{}/{path}", scene.backends.facilitator_url);
        let request = ::http::Request::post(url).body(bytes::Bytes::from(body.to_owned())).unwrap();
        scene.http.send(request)
    };
    for body in [
        "",
        "[]",
        "{}",
        r#"{"x402Version":2,"paymentPayload":{},"paymentRequirements":{}}"#,
        r#"{"x402Version":2,"x402Version":2,"paymentPayload":{},"paymentRequirements":{}}"#,
        r#"{"x402Version":2,"paymentPayload":{},"paymentRequirements":{},"more":1}"#,
    ] {
        for (path, said) in [("verify", r#""invalidReason":"invalid_request""#), ("settle", r#""success":false"#)] {
            let answer = post(path, body).await.unwrap();
            let text = String::from_utf8_lossy(answer.body()).into_owned();
            assert!(answer.status() == 400 && text.contains(said), "{path} {body}: {text}");
        }
    }
    let request = ::http::Request::get(format!("{}/supported", scene.backends.facilitator_url));
    let answer = scene.http.send(request.body(bytes::Bytes::new()).unwrap()).await.unwrap();
    let supported: serde_json::Value = serde_json::from_slice(answer.body()).unwrap();
    assert_eq!(supported["kinds"][0]["extra"]["areFeesSponsored"], true);
}
