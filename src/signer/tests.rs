//! Signers over real HTTP: what a remote signer may do, and what it does not get away with (hazards SIG-05, SIG-06).
#![allow(clippy::disallowed_methods, reason = "tests run on the machine's world")]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use serde_json::json;
use stellar_xdr::{
    Int128Parts, InvokeContractArgs, ReadXdr, ScBytes, ScMap, ScMapEntry, ScSymbol, ScVal, ScVec,
    SorobanAddressCredentials, SorobanAddressCredentialsWithDelegates, SorobanAuthorizationEntry,
    SorobanAuthorizedFunction, SorobanCredentials, WriteXdr,
};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::catalog::SellerTransport;
use crate::chain::stellar::{Credentials, LedgerPoint, Settings, Stellar};
use crate::guard::Quote;
use crate::http::{Destination, Limits, Tls};
use crate::ledger::{Authorization, Lease};
use crate::mcp::serve::serve;
use crate::money::{Amount, PaymentId};
use crate::ports::{Clock, machine};
use crate::upstream::Endpoint;
use crate::x402::Offer;

const PASSPHRASE: &str = "Test SDF Network ; September 2015";
const USDC: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
const SELLER: &str = "GD6ROJBYLKQMOW3E7N4M2YBPUHMZD7PL65VRHRMO24BOVSBV5H3BQRSL";
const XDR: stellar_xdr::Limits = stellar_xdr::Limits { depth: 100, len: 64 * 1024 };
const NOW: u64 = 1_800_000_000_000;

struct Hand(AtomicU64);
impl Clock for Hand {
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

fn key() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

fn address_of(key: &SigningKey) -> String {
    stellar_strkey::ed25519::PublicKey(key.verifying_key().to_bytes()).to_string().as_str().to_owned()
}

fn seed_of(key: &SigningKey) -> Zeroizing<String> {
    Zeroizing::new(format!("{}", stellar_strkey::ed25519::PrivateKey(key.to_bytes()).as_unredacted()))
}

fn world() -> (World, Arc<Hand>) {
    let (world, _) = machine::world();
    let hand = Arc::new(Hand(AtomicU64::new(NOW)));
    (World { clock: hand.clone(), ..world }, hand)
}

fn client(world: &World) -> Client {
    Client::new(world.clone(), Tls::Plain, Destination::Operator, Limits::default())
}

/// A smart account; nothing of it is deployed here.
fn smart() -> String {
    format!("{}", stellar_strkey::Contract([3; 32]))
}

/// A reservation whose lease and window are open, and its draft.
fn reserved(world: &World) -> (Reserved, Draft) {
    reserved_for(world, &address_of(&key()))
}

fn reserved_for(world: &World, payer: &str) -> (Reserved, Draft) {
    let text = json!({
        "scheme": "exact", "network": "stellar:testnet", "amount": "10000", "asset": USDC, "payTo": SELLER,
        "maxTimeoutSeconds": 60, "extra": {"areFeesSponsored": true},
    });
    let offer = Offer::parse(&crate::json::raw(&text)).unwrap();
    let settings = Settings {
        network: offer.network.clone(),
        passphrase: PASSPHRASE.into(),
        rpc_urls: Vec::new(),
        credentials: Credentials::Address,
        max_authorization_seconds: 300,
        min_ledger_ms: 4000,
    };
    let at = LedgerPoint { sequence: 1000, closed_at: NOW / 1000 };
    let draft = Stellar::new(settings, client(world), world.clone()).draft(&offer, payer, at).unwrap();
    let quote = Quote {
        agent: "local".parse().unwrap(),
        session: None,
        bounds: crate::money::Bounds::default(),
        idempotency_key: None,
        call_hash: [0; 32],
        resource_ref: "v1.x".into(),
        version_hash: String::new(),
        endpoint: Endpoint {
            url: "https://seller.example/mcp".parse().unwrap(),
            transport: SellerTransport::StreamableHttp,
        },
        tool: "t".into(),
        max_amount: offer.amount,
        offer,
        resource: crate::json::raw(&json!({})),
        extensions: None,
        _admitted: crate::guard::Admitted::for_a_test(),
    };
    let authorization = Authorization {
        payer: payer.to_owned(),
        nonce: draft.nonce().to_string(),
        dead_after: draft.expiration().into(),
        at: at.sequence.into(),
    };
    let lease = Lease { token: [0; 16], expires_ms: NOW + 60_000, sign_before_ms: NOW + 10_000 };
    let sign_until = Instant::now() + Duration::from_secs(10);
    let written = crate::ledger::Written::for_a_test();
    (
        Reserved {
            quote,
            payment_id: PaymentId::from_bytes([0xab; 32]),
            authorization,
            lease,
            sign_until,
            _written: written,
        },
        draft,
    )
}

type Answer = Arc<dyn Fn(&serde_json::Value) -> Response + Send + Sync>;

/// A signer server that answers as it is told.
struct Served {
    base: Url,
    asked: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<(HeaderMap, serde_json::Value)>>>,
    stop: CancellationToken,
}
impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn serving(answer: impl Fn(&serde_json::Value) -> Response + Send + Sync + 'static) -> Served {
    let asked = Arc::new(AtomicUsize::new(0));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let answer: Answer = Arc::new(answer);
    let (count, log) = (asked.clone(), seen.clone());
    let app =
        Router::new().route("/address", get(|| async { axum::Json(json!({"address": address_of(&key())})) })).route(
            "/sign-auth-entry",
            post(move |headers: HeaderMap, body: Bytes| {
                count.fetch_add(1, Ordering::SeqCst);
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                let response = answer(&body);
                log.lock().unwrap().push((headers, body));
                async move { response }
            }),
        );
    let (world, _) = machine::world();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
    let stop = CancellationToken::new();
    let task = serve(machine::TcpListener(listener), world.clone(), app, stop.clone());
    world.spawn.spawn(Box::pin(task));
    Served { base, asked, seen, stop }
}

fn external(served: &Served, world: &World) -> Signer {
    let token = Zeroizing::new("Bearer a-token".to_owned());
    Signer::external(served.base.clone(), Some(token), client(world)).unwrap()
}

fn signed(bytes: &[u8]) -> Response {
    axum::Json(json!({"signedAuthEntryXdr": STANDARD.encode(bytes)})).into_response()
}

fn honest(body: &serde_json::Value) -> Vec<u8> {
    use sha2::Digest as _;
    let preimage = STANDARD.decode(body["authEntryXdr"].as_str().unwrap()).unwrap();
    key().sign(&sha2::Sha256::digest(preimage)).to_bytes().to_vec()
}

fn word(result: &Result<Signed, NotSigned>) -> &'static str {
    match result {
        Ok(_) => "signed",
        Err(NotSigned::WindowMissed(_)) => "window",
        Err(NotSigned::LeaseLost(_)) => "lease",
        Err(NotSigned::Refused(..)) => "refused",
        Err(NotSigned::Unavailable(..)) => "unavailable",
        Err(NotSigned::Failed(..)) => "failed",
    }
}

#[tokio::test]
async fn a_clock_that_is_set_back_does_not_widen_the_window() {
    let (world, hand) = world();
    hand.0.store(NOW - 3_600_000, Ordering::SeqCst);
    let (mut late, draft) = reserved(&world);
    late.sign_until = Instant::now();
    let signer = Signer::env_secret(seed_of(&key())).unwrap();
    assert_eq!(word(&signer.sign(late, draft, PASSPHRASE, &world).await), "window");

    // A signer that never answers is waited for no longer than the window, not for the hour.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}/", silent.local_addr().unwrap()).parse().unwrap();
    let signer = Signer::external(base, None, client(&world)).unwrap();
    let (mut short, draft) = reserved(&world);
    short.sign_until = Instant::now() + Duration::from_millis(300);
    assert_eq!(word(&signer.sign(short, draft, PASSPHRASE, &world).await), "failed");
}

#[tokio::test]
async fn a_remote_signature_is_asked_for_once_with_what_a_policy_needs() {
    let served = serving(|body| signed(&honest(body))).await;
    let (world, _) = world();
    let signer = external(&served, &world);
    assert_eq!(signer.address(&"stellar:testnet".parse().unwrap()).await.unwrap(), address_of(&key()));
    let (reserved, draft) = reserved(&world);
    let asked = draft.clone();
    let result = signer.sign(reserved, draft, PASSPHRASE, &world).await;
    assert_eq!(word(&result), "signed");
    assert_eq!(result.ok().unwrap().entry.draft(), &asked);
    let seen = served.seen.lock().unwrap();
    let [(headers, body)] = seen.as_slice() else { panic!("one request, not {}", seen.len()) };
    assert_eq!(headers[header::AUTHORIZATION], "Bearer a-token");
    assert_eq!(body["network"], "stellar:testnet");
    assert_eq!(body["networkPassphrase"], PASSPHRASE);
    assert_eq!(body["authEntryXdr"], asked.preimage_base64());
    assert_eq!(body["address"], address_of(&key()));
    assert_eq!(body["payment"]["signBefore"], NOW + 10_000);
    assert_eq!(body["payment"]["paymentIdentifier"], "abababababababab", "never the whole identifier");
}

#[tokio::test]
async fn what_a_remote_signer_answers_wrongly_is_a_failure_and_is_asked_once() {
    let thief = SigningKey::from_bytes(&[9; 32]);
    let cases: Vec<(&str, &str, Answer)> = vec![
        ("503", "failed", Arc::new(|_| StatusCode::SERVICE_UNAVAILABLE.into_response())),
        ("500", "failed", Arc::new(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())),
        ("a redirect", "failed", Arc::new(|_| (StatusCode::FOUND, [(header::LOCATION, "/address")]).into_response())),
        ("not JSON", "failed", Arc::new(|_| "signed".into_response())),
        ("no member", "failed", Arc::new(|_| axum::Json(json!({})).into_response())),
        (
            "a member twice",
            "failed",
            Arc::new(|b| {
                let signature = STANDARD.encode(honest(b));
                format!(r#"{{"signedAuthEntryXdr":"AAAA","signedAuthEntryXdr":"{signature}"}}"#).into_response()
            }),
        ),
        ("too long an answer", "failed", Arc::new(|_| signed(&[0; 200_000]))),
        ("63 bytes", "failed", Arc::new(|b| signed(&honest(b)[..63]))),
        (
            "a flipped bit",
            "failed",
            Arc::new(|b| {
                let mut signature = honest(b);
                signature[0] ^= 1;
                signed(&signature)
            }),
        ),
        ("another digest", "failed", Arc::new(|_| signed(&key().sign(&[1; 32]).to_bytes()))),
        (
            "another key",
            "failed",
            Arc::new(move |b| {
                use sha2::Digest as _;
                let preimage = STANDARD.decode(b["authEntryXdr"].as_str().unwrap()).unwrap();
                signed(&thief.sign(&sha2::Sha256::digest(preimage)).to_bytes())
            }),
        ),
        (
            "403",
            "refused",
            Arc::new(|_| (StatusCode::FORBIDDEN, axum::Json(json!({"error": "asset_not_allowed"}))).into_response()),
        ),
        (
            "422",
            "refused",
            Arc::new(|_| {
                (StatusCode::UNPROCESSABLE_ENTITY, axum::Json(json!({"error": "cap", "reason": "daily"})))
                    .into_response()
            }),
        ),
    ];
    for (what, expected, answer) in cases {
        let served = serving(move |body| answer(body)).await;
        let (world, _) = world();
        let (reserved, draft) = reserved(&world);
        let result = external(&served, &world).sign(reserved, draft, PASSPHRASE, &world).await;
        assert_eq!(word(&result), expected, "{what}");
        assert_eq!(served.asked.load(Ordering::SeqCst), 1, "{what}: asked once");
    }
}

/// The form in which the host takes a G-account's signature.
fn of_account(signature: &[u8]) -> ScVal {
    let field = |name: &str, bytes: &[u8]| ScMapEntry {
        key: ScVal::Symbol(ScSymbol(name.try_into().unwrap())),
        val: ScVal::Bytes(ScBytes(bytes.to_vec().try_into().unwrap())),
    };
    let members = vec![field("public_key", key().verifying_key().as_bytes()), field("signature", signature)];
    let map = ScVal::Map(Some(ScMap(members.try_into().unwrap())));
    ScVal::Vec(Some(ScVec(vec![map].try_into().unwrap())))
}

/// A form that some smart account's contract takes.
fn of_contract(signature: &[u8]) -> ScVal {
    ScVal::Bytes(ScBytes(signature.to_vec().try_into().unwrap()))
}

/// The whole entry of `draft` with this signature.
fn whole(draft: &Draft, signature: ScVal) -> SorobanAuthorizationEntry {
    use stellar_xdr::HashIdPreimage;
    let preimage = STANDARD.decode(draft.preimage_base64()).unwrap();
    let HashIdPreimage::SorobanAuthorization(p) = HashIdPreimage::from_xdr(preimage, XDR).unwrap() else {
        panic!("the Address arm")
    };
    SorobanAuthorizationEntry {
        credentials: SorobanCredentials::Address(SorobanAddressCredentials {
            address: draft.transfer().payer.parse().unwrap(),
            nonce: p.nonce,
            signature_expiration_ledger: p.signature_expiration_ledger,
            signature,
        }),
        root_invocation: p.invocation,
    }
}

#[tokio::test]
async fn a_whole_entry_is_taken_only_if_it_is_ours_but_for_the_signature() {
    fn credentials(entry: &mut SorobanAuthorizationEntry) -> &mut SorobanAddressCredentials {
        let SorobanCredentials::Address(credentials) = &mut entry.credentials else { panic!("the Address arm") };
        credentials
    }
    fn call(entry: &mut SorobanAuthorizationEntry, change: impl FnOnce(&mut InvokeContractArgs)) {
        let SorobanAuthorizedFunction::ContractFn(call) = &mut entry.root_invocation.function else { panic!() };
        change(call);
    }
    fn argument(entry: &mut SorobanAuthorizationEntry, index: usize, value: ScVal) {
        call(entry, |call| {
            let mut args = call.args.to_vec();
            args[index] = value;
            call.args = args.try_into().unwrap();
        });
    }
    type Edit = fn(&mut SorobanAuthorizationEntry);
    let cases: [(&str, &str, Edit); 15] = [
        ("ours", "signed", |_| {}),
        ("expiration", "failed", |e| credentials(e).signature_expiration_ledger += 1000),
        ("nonce", "failed", |e| credentials(e).nonce ^= 1),
        ("address", "failed", |e| credentials(e).address = SELLER.parse().unwrap()),
        ("another smart account", "failed", |e| credentials(e).address = USDC.parse().unwrap()),
        ("no signature", "failed", |e| credentials(e).signature = ScVal::Void),
        ("the newer arm", "failed", |e| e.credentials = SorobanCredentials::AddressV2(credentials(e).clone())),
        ("no credentials", "failed", |e| e.credentials = SorobanCredentials::SourceAccount),
        ("delegates", "failed", |e| {
            let address_credentials = credentials(e).clone();
            let with = SorobanAddressCredentialsWithDelegates { address_credentials, delegates: Default::default() };
            e.credentials = SorobanCredentials::AddressWithDelegates(with);
        }),
        ("payer", "failed", |e| argument(e, 0, ScVal::Address(SELLER.parse().unwrap()))),
        ("recipient", "failed", |e| argument(e, 1, ScVal::Address(USDC.parse().unwrap()))),
        ("amount", "failed", |e| argument(e, 2, ScVal::I128(Int128Parts { hi: 0, lo: 10_001 }))),
        ("asset", "failed", |e| call(e, |c| c.contract_address = smart().parse().unwrap())),
        ("function", "failed", |e| call(e, |c| c.function_name = ScSymbol("approve".try_into().unwrap()))),
        ("a second call underneath", "failed", |e| {
            e.root_invocation.sub_invocations = vec![e.root_invocation.clone()].try_into().unwrap();
        }),
    ];
    type Form = fn(&[u8]) -> ScVal;
    for (payer, form) in [(address_of(&key()), of_account as Form), (smart(), of_contract as Form)] {
        for (what, expected, edit) in cases {
            let (world, _) = world();
            let (reserved, draft) = reserved_for(&world, &payer);
            let served = {
                let draft = draft.clone();
                serving(move |body| {
                    let mut entry = whole(&draft, form(&honest(body)));
                    edit(&mut entry);
                    signed(&entry.to_xdr(XDR).unwrap())
                })
                .await
            };
            let result = external(&served, &world).sign(reserved, draft, PASSPHRASE, &world).await;
            assert_eq!(word(&result), expected, "{what} of {payer}");
            assert_eq!(served.asked.load(Ordering::SeqCst), 1, "{what} of {payer}: asked once");
        }
    }
}

#[tokio::test]
async fn a_smart_accounts_signer_answers_with_the_whole_entry_or_not_at_all() {
    let (world, hand) = world();
    let cases: Vec<(&str, &str, Answer)> = vec![
        ("a bare signature", "smart account (C…)", Arc::new(|body| signed(&honest(body)))),
        ("nothing", "neither", Arc::new(|_| signed(&[]))),
        ("too long an answer", "larger", Arc::new(|_| signed(&[0; 200_000]))),
        ("a redirect", "302", Arc::new(|_| (StatusCode::FOUND, [(header::LOCATION, "/address")]).into_response())),
        ("500", "500", Arc::new(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())),
    ];
    for (what, why, answer) in cases {
        let served = serving(move |body| answer(body)).await;
        let (reserved, draft) = reserved_for(&world, &smart());
        let result = external(&served, &world).sign(reserved, draft, PASSPHRASE, &world).await;
        let Err(NotSigned::Failed(_, words)) = result else { panic!("{what}: {}", word(&result)) };
        assert!(words.contains(why), "{what}: {words}");
        assert_eq!(served.asked.load(Ordering::SeqCst), 1, "{what}: asked once");
    }

    // An entry behind which more bytes stand, and a right one that comes too late.
    for (late, more, expected) in [(0, 4, "failed"), (10_000, 0, "failed"), (0, 0, "signed")] {
        hand.0.store(NOW, Ordering::SeqCst);
        let (reserved, draft) = reserved_for(&world, &smart());
        let (entry, clock) = (draft.clone(), hand.clone());
        let served = serving(move |body| {
            clock.0.store(NOW + late, Ordering::SeqCst);
            let mut bytes = whole(&entry, of_contract(&honest(body))).to_xdr(XDR).unwrap();
            bytes.extend(vec![0; more]);
            signed(&bytes)
        })
        .await;
        let result = external(&served, &world).sign(reserved, draft, PASSPHRASE, &world).await;
        assert_eq!(word(&result), expected, "{more} bytes more, {late} ms later");
    }

    // A key of this process is no smart account's.
    hand.0.store(NOW, Ordering::SeqCst);
    let own = Signer::env_secret(seed_of(&key())).unwrap();
    let (reserved, draft) = reserved_for(&world, &smart());
    assert_eq!(word(&own.sign(reserved, draft, PASSPHRASE, &world).await), "failed");
}

#[tokio::test]
async fn a_signer_that_hangs_ends_with_the_window_and_its_answer_is_dropped_when_late() {
    // Accepts, reads, never answers.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base: Url = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
    let hanging = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            held.push(stream);
        }
    });
    let (world, hand) = world();
    let (mut r, draft) = reserved(&world);
    r.lease.sign_before_ms = NOW + 200;
    let signer = Signer::external(base, None, client(&world)).unwrap();
    assert_eq!(word(&signer.sign(r, draft, PASSPHRASE, &world).await), "failed");
    hanging.abort();

    let late = hand.clone();
    let served = serving(move |body| {
        late.0.store(NOW + 10_000, Ordering::SeqCst);
        signed(&honest(body))
    })
    .await;
    let (reserved, draft) = reserved(&world);
    assert_eq!(word(&external(&served, &world).sign(reserved, draft, PASSPHRASE, &world).await), "failed");
}

#[tokio::test]
async fn a_signer_that_cannot_be_reached_has_certainly_signed_nothing() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base: Url = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
    drop(listener);
    let (world, _) = world();
    let signer = Signer::external(base, None, client(&world)).unwrap();
    let (reserved, draft) = reserved(&world);
    assert_eq!(word(&signer.sign(reserved, draft, PASSPHRASE, &world).await), "unavailable");
}

#[tokio::test]
async fn nothing_is_asked_outside_the_window_or_the_lease_or_for_another_payment() {
    let served = serving(|body| signed(&honest(body))).await;
    let (world, hand) = world();
    let own = Signer::env_secret(seed_of(&key())).unwrap();
    for signer in [&external(&served, &world), &own] {
        for (now, expected) in [(NOW + 10_000, "window"), (NOW + 60_000, "lease"), (NOW + 90_000, "lease")] {
            hand.0.store(NOW, Ordering::SeqCst);
            let (r, draft) = reserved(&world);
            hand.0.store(now, Ordering::SeqCst);
            assert_eq!(word(&signer.sign(r, draft, PASSPHRASE, &world).await), expected, "{now}");
        }
        hand.0.store(NOW, Ordering::SeqCst);
        type Change = fn(&mut Reserved);
        let changes: [(&str, Change); 6] = [
            ("amount", |r| r.quote.offer.amount = Amount::from_u64(9_999)),
            ("recipient", |r| r.quote.offer.pay_to = USDC.into()),
            ("asset", |r| r.quote.offer.asset = SELLER.parse().unwrap()),
            ("payer", |r| r.authorization.payer = SELLER.into()),
            ("nonce", |r| r.authorization.nonce = "5".into()),
            ("expiration", |r| r.authorization.dead_after += 1),
        ];
        for (what, change) in changes {
            let (mut r, draft) = reserved(&world);
            change(&mut r);
            assert_eq!(word(&signer.sign(r, draft, PASSPHRASE, &world).await), "failed", "{what}");
        }
        let (r, draft) = reserved(&world);
        let pubnet = "Public Global Stellar Network ; September 2015";
        assert_eq!(word(&signer.sign(r, draft, pubnet, &world).await), "failed", "another network");
    }
    assert_eq!(served.asked.load(Ordering::SeqCst), 0);
    let (r, draft) = reserved(&world);
    assert_eq!(word(&own.sign(r, draft, PASSPHRASE, &world).await), "signed");
}

#[tokio::test]
async fn an_address_that_is_none_is_refused_and_a_seed_that_is_none_too() {
    let (ours, muxed) = (address_of(&key()), "MA7QYNF7SOWQ3GLR2BGMZEHXAVIRZA4KVWLTJJFC7MGXUA74P7UJUAAAAAAAAAAAACJUQ");
    for answer in [
        json!({"address": "GABC"}).to_string(),
        json!({"address": USDC.to_lowercase()}).to_string(),
        json!({"address": muxed}).to_string(),
        json!({"address": seed_of(&key()).as_str()}).to_string(),
        format!(r#"{{"address": "{ours}", "address": "{USDC}"}}"#),
        format!(r#"{{"address": "{ours}", "more": "{}"}}"#, "x".repeat(100_000)),
        "{}".into(),
        "[]".into(),
        ours.clone(),
    ] {
        let app = Router::new().route("/address", get(move || async move { answer }));
        let (world, _) = machine::world();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base: Url = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let stop = CancellationToken::new();
        world.spawn.spawn(Box::pin(serve(machine::TcpListener(listener), world.clone(), app, stop.clone())));
        let signer = Signer::external(base, None, client(&world)).unwrap();
        let error = signer.address(&"stellar:testnet".parse().unwrap()).await.unwrap_err().to_string();
        assert!(!error.contains(seed_of(&key()).as_str()), "{error}");
        stop.cancel();
    }
    let secret = seed_of(&key());
    for bad in ["", "S", &secret[1..], &secret.to_lowercase(), &address_of(&key())] {
        let error = Signer::env_secret(Zeroizing::new(bad.to_owned())).err().unwrap().to_string();
        assert!(bad.is_empty() || bad == "S" || !error.contains(bad), "the error shows the secret");
    }
}
