//! The whole paid call from a smart account: an agent server made from its configuration file, an external signer, and
//! the sandbox's chain, facilitator and seller.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::Signer as _;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::agent::server::Server;
use tollway::config::{self, Config, Source, Transport};
use tollway::ledger::{Filter, Payment, State};
use tollway::mcp::serve::serve;
use tollway::mcp::{Handler as _, Progress, RequestContext, Revision};
use tollway::ports::{World, machine};
use tollway::sandbox::backends::{Backends, Options};
use tollway::sandbox::chain::{self, NETWORK, USDC};
use tollway::signer::keystore::{Keystore, KeystoreKey, Seed};
use zeroize::Zeroizing;

use super::smart::SmartAccount;

const KEY: &str = "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a";

/// How the signer answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    Whole,
    /// 64 bytes, as for a G-account.
    Bare,
    /// A whole entry with a signature that the account's contract refuses.
    Flipped,
}

struct Scene {
    backends: Backends,
    account: SmartAccount,
    server: Server,
    config: Config,
    says: Arc<Mutex<Says>>,
    asked: Arc<Mutex<Vec<Value>>>,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Environment(BTreeMap<&'static str, &'static str>);
impl Source for Environment {
    fn env(&self, name: &str) -> Option<String> {
        self.0.get(name).map(|value| (*value).to_owned())
    }
    fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
        std::fs::read(path).map(Zeroizing::new)
    }
}

/// With an external signer, and `signer` over its configuration.
async fn scene(usdc: i64, signer: Value) -> Scene {
    scene_with(usdc, 600, |_, _, url| {
        let mut all = json!({"mode": "external", "base_url": url});
        for (name, value) in signer.as_object().unwrap() {
            all[name] = value.clone();
        }
        all
    })
    .await
}

/// `life`: the longest life of a signature, in seconds. `signer`: its configuration, from the backends, a directory and
/// the external signer's URL.
async fn scene_with(usdc: i64, life: u64, signer: impl FnOnce(&Backends, &Path, &str) -> Value) -> Scene {
    let (world, _) = machine::world();
    let stop = CancellationToken::new();
    // Offers are of an hour below a second; the operator's bound on a signature's life is what counts.
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(100)), ..chain::Options::default() };
    let backends = Backends::start(&Options { chain, ..Options::default() }, &world, &stop).await.unwrap();
    let account = SmartAccount::install(&backends.network, usdc);
    let (says, asked) = (Arc::new(Mutex::new(Says::Whole)), Arc::new(Mutex::new(Vec::new())));
    let signer_url = signer_of(&account, says.clone(), asked.clone(), &world, &stop).await;
    let dir = tempfile::tempdir().unwrap();
    let file = json!({
        "facilitator": {"base_url": backends.facilitator_url},
        "signer": signer(&backends, dir.path(), &signer_url),
        "networks": {NETWORK: {
            "rpc_urls": [backends.rpc_url], "max_authorization_seconds": life, "min_ledger_seconds": 0.01,
        }},
        "budget": {"path": dir.path().join("ledger.sqlite"), "limits": [{
            "network": NETWORK, "asset": USDC, "per_call_max_atomic": "1000000", "day_max_atomic": "2000000",
        }]},
        "network_security": {"allow_insecure_local": true},
    });
    let environment = Environment(BTreeMap::from([("TOLLWAY_KEYSTORE_KEY", KEY)]));
    let config = config::parse(&file.to_string(), Some(Transport::Stdio), &environment).unwrap();
    let server = Server::start(&config, &world).await.unwrap();
    Scene { backends, account, server, config, says, asked, stop, _dir: dir }
}

/// The external signer's contract as the README has it.
async fn signer_of(
    account: &SmartAccount,
    says: Arc<Mutex<Says>>,
    asked: Arc<Mutex<Vec<Value>>>,
    world: &World,
    stop: &CancellationToken,
) -> String {
    let address = account.address();
    let account = Arc::new(SmartAccount { id: account.id.clone(), key: account.key.clone() });
    let app = Router::new().route("/address", get(move || async move { Json(json!({"address": address})) })).route(
        "/sign-auth-entry",
        post(move |Json(body): Json<Value>| {
            let preimage = body["authEntryXdr"].as_str().unwrap();
            let answer = match *says.lock().unwrap() {
                Says::Whole => account.answer(preimage, |_| {}),
                Says::Flipped => account.answer(preimage, |signature| signature[3] ^= 1),
                Says::Bare => {
                    use sha2::Digest as _;
                    let digest = sha2::Sha256::digest(STANDARD.decode(preimage).unwrap());
                    STANDARD.encode(account.key.sign(&digest).to_bytes())
                }
            };
            asked.lock().unwrap().push(body);
            async move { Json(json!({"signedAuthEntryXdr": answer})) }
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    world.spawn.spawn(Box::pin(serve(machine::TcpListener(listener), world.clone(), app, stop.clone())));
    url
}

impl Scene {
    async fn tool(&self, name: &str, arguments: Value) -> Value {
        let params = RawValue::from_string(json!({"name": name, "arguments": arguments}).to_string()).unwrap();
        let context = RequestContext {
            claims: tollway::mcp::Claims::default(),
            revision: Revision::V2025_11_25,
            agent: None,
            session: Some("session".into()),
            cancelled: CancellationToken::new(),
            meta: None,
            progress: Progress::default(),
        };
        let result = self.server.tools.call(&context, "tools/call", Some(&params)).await.unwrap();
        let result: Value = serde_json::from_str(result.get()).unwrap();
        result["structuredContent"].clone()
    }

    /// Buys the weather of `city` once.
    async fn buy(&self, city: &str) -> Value {
        let found = self.tool("x402_search_resources", json!({"query": "weather city"})).await;
        let all = found["resources"].as_array().unwrap();
        let weather = all.iter().find(|r| r.to_string().contains("get_weather")).unwrap_or_else(|| panic!("{found}"));
        let call = json!({
            "ref": weather["wrapper"]["ref"], "network": NETWORK, "scheme": "exact", "asset": USDC,
            "maxAtomicAmount": "20000", "arguments": {"city": city}, "idempotencyKey": format!("the-weather-of-{city}"),
        });
        self.tool("x402_call_resource", call).await
    }

    async fn rows(&self) -> Vec<Payment> {
        let ledger = &self.server.paying.as_ref().unwrap().ledger;
        ledger.list(&Filter { limit: 100, ..Filter::default() }).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_buys_with_a_smart_accounts_money() {
    let scene = scene(25_000, json!({"smart_account_ceiling_atomic": "10000"})).await;
    let budget = scene.tool("x402_get_budget", json!({})).await;
    assert!(budget.to_string().contains("25000"), "the contract's balance: {budget}");
    let bought = scene.buy("Bern").await;
    assert_eq!(bought["receipt"]["status"], "settled", "{bought}");
    assert_eq!(scene.buy("Bern").await, bought, "the same key is the same payment");

    let rows = scene.rows().await;
    let [row] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((row.state, &row.payer), (State::Settled, &scene.account.address()));
    let transfers = scene.backends.network.transfers();
    let [transfer] = transfers.as_slice() else { panic!("{transfers:?}") };
    assert_eq!((&transfer.payer, transfer.amount), (&scene.account.address(), 10_000));
    assert_eq!(transfer.nonce.map(|nonce| nonce.to_string()), Some(row.authorization.nonce.clone()));
    assert_eq!(scene.asked.lock().unwrap().len(), 1);
    assert_eq!(scene.asked.lock().unwrap()[0]["address"], scene.account.address());

    let second = scene.buy("Oslo").await;
    assert_eq!(second["receipt"]["status"], "settled", "{second}");
    let poor = scene.buy("Rome").await;
    assert_eq!(poor["code"], "PAYMENT_REJECTED", "{poor}");
    assert_eq!(poor["details"]["reason"], "insufficient_funds", "{poor}");
    assert_eq!(scene.backends.network.transfers().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ceiling_below_the_price_is_refused_before_anything_is_signed() {
    let scene = scene(25_000, json!({"smart_account_ceiling_atomic": "9999"})).await;
    let refused = scene.buy("Bern").await;
    assert_eq!(refused["code"], "BUDGET_EXCEEDED", "{refused}");
    assert!(refused.to_string().contains("smart_account"), "{refused}");
    assert!(scene.asked.lock().unwrap().is_empty() && scene.rows().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_smart_account_signed_moves_nothing_and_its_hold_ends_by_the_chain() {
    // Without a ceiling the budget alone bounds it. A signature lives for 2 ledgers.
    let scene = scene_with(25_000, 12, |_, _, url| json!({"mode": "external", "base_url": url})).await;
    for (says, city, reason) in [(Says::Bare, "Bern", "signer_failed"), (Says::Flipped, "Oslo", "simulation_failed")] {
        *scene.says.lock().unwrap() = says;
        let refused = scene.buy(city).await;
        assert_eq!(refused["code"], "PAYMENT_REJECTED", "{says:?}: {refused}");
        assert_eq!(refused["details"]["reason"], reason, "{says:?}: {refused}");
        if says == Says::Bare {
            assert!(refused.to_string().contains("smart account (C…)"), "{refused}");
        }
    }
    let rows = scene.rows().await;
    assert!(rows.len() == 2 && rows.iter().all(|row| row.state == State::InDoubt), "{rows:?}");
    assert_eq!(scene.backends.seller.calls().paid, 0, "nothing reached the seller");

    let sweep = scene.server.sweep(&scene.config).unwrap();
    let looked = async {
        loop {
            scene.backends.network.close_now();
            sweep.pass().await;
            if scene.rows().await.iter().all(|row| row.state == State::Released) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), looked).await.unwrap();
    assert!(scene.rows().await.iter().all(|row| row.reason.as_deref() == Some("expired_unspent")));
    assert!(scene.backends.network.transfers().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_buys_with_a_key_from_a_keystore() {
    let scene = scene_with(0, 600, |backends, dir, _| {
        let seed = Seed::parse(&backends.network.account("payer").secret()).unwrap();
        let path = dir.join("keystore.json");
        let world = machine::world().0;
        Keystore::seal(&world, &seed, &KeystoreKey::parse(KEY).unwrap()).write(&world, &path).unwrap();
        json!({"mode": "encrypted-key", "keystore_path": path})
    })
    .await;
    let bought = scene.buy("Bern").await;
    assert_eq!(bought["receipt"]["status"], "settled", "{bought}");
    assert_eq!(scene.backends.network.transfers()[0].payer, scene.backends.payer.to_string());
    assert!(scene.asked.lock().unwrap().is_empty());
}
