//! A gate, or several on one store, before a facilitator and a chain that do what a test says.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stellar_xdr::{
    ContractDataEntry, ExtensionPoint, LedgerEntryData, LedgerKey, Limits as XdrLimits, ReadXdr, ScVal,
    StateArchivalSettings, TransactionEnvelope, WriteXdr,
};
use tokio::sync::Notify;

use super::super::claims::tests::{Hands, Shop, shop, world};
use super::super::desk::{Answer, Described, Gate, Parts, Request};
use super::super::hooks::Hooking;
use super::super::prices::tests::{PAY_TO, USDC, terms};
use super::super::prices::{About, Item, Prices, Unlisted};
use super::super::sell::{Ran, Settings};
use super::super::{Kind, claims};
use crate::chain::stellar::presented_tests::payment as transaction;
use crate::chain::stellar::{Credentials, Settings as ChainSettings, Stellar};
use crate::facilitator::Facilitator;
use crate::http::testing::{self, answer, serve, write};
use crate::http::{Client, Destination, Limits, Tls};
use crate::json;
use crate::mcp::{Revision, RpcError};
use crate::ports::Spawn;
use crate::x402::Flow;

pub const NETWORK: &str = "stellar:testnet";
pub const ID: &str = "pay_0123456789abcdef";
/// What no frame may have before it is paid.
pub const SECRET: &str = "the paid output";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    Sqlite,
    Postgres,
}
pub const BOTH: [On; 2] = [On::Sqlite, On::Postgres];

/// What the facilitator says, and what it heard.
pub struct Facility {
    verify: Mutex<(u16, String)>,
    /// In turn; the last one stays.
    settles: Mutex<Vec<(u16, String)>>,
    pub kinds: Mutex<Value>,
    heard: Mutex<Vec<(String, String)>>,
    /// It settles, and its answer does not come.
    pub hangs: AtomicBool,
}

impl Facility {
    pub fn verifies(&self, code: u16, text: &str) {
        *self.verify.lock().unwrap() = (code, text.to_owned());
    }

    pub fn settles(&self, answers: &[(u16, &str)]) {
        *self.settles.lock().unwrap() = answers.iter().map(|(code, text)| (*code, (*text).to_owned())).collect();
    }

    pub fn heard(&self, path: &str) -> usize {
        self.heard.lock().unwrap().iter().filter(|(heard, _)| heard == path).count()
    }

    fn say(&self, request: &testing::Request) -> (u16, String) {
        let line = request.line();
        let path = ["settle", "verify", "supported"].into_iter().find(|path| line.contains(path)).unwrap();
        self.heard.lock().unwrap().push((path.to_owned(), request.body.clone()));
        match path {
            "supported" => (200, json!({"kinds": *self.kinds.lock().unwrap()}).to_string()),
            "verify" => self.verify.lock().unwrap().clone(),
            _ => {
                let mut settles = self.settles.lock().unwrap();
                if settles.len() > 1 { settles.remove(0) } else { settles[0].clone() }
            }
        }
    }
}

/// One RPC.
pub struct Node {
    pub ledger: AtomicU32,
    /// The ledger in which every nonce is used that anybody asks about, 0: none is; and the transaction that used it.
    used: Mutex<(u32, String)>,
    clock: Arc<Hands>,
}

impl Node {
    /// As the payment `by` was presented, or another's that spent its nonce.
    pub fn uses(&self, ledger: u32, by: &str) {
        *self.used.lock().unwrap() = (ledger, by.to_owned());
    }

    fn say(&self, body: &str) -> String {
        let question: Value = serde_json::from_str(body).unwrap();
        let ledger = self.ledger.load(Ordering::SeqCst);
        let (used, by) = self.used.lock().unwrap().clone();
        let closed = self.clock.0.load(Ordering::SeqCst) / 1_000;
        let result = match question["method"].as_str().unwrap() {
            "getNetwork" => json!({"passphrase": "Test SDF Network ; September 2015"}),
            "getLatestLedger" => json!({"sequence": ledger, "closeTime": closed.to_string()}),
            "getLedgerEntries" => {
                let key = question["params"]["keys"][0].as_str().unwrap();
                let entries = match LedgerKey::from_xdr_base64(key, XdrLimits::none()).unwrap() {
                    LedgerKey::ContractData(data) if used > 0 => {
                        let entry = LedgerEntryData::ContractData(ContractDataEntry {
                            ext: ExtensionPoint::V0,
                            contract: data.contract,
                            key: data.key,
                            durability: data.durability,
                            val: ScVal::Void,
                        });
                        let xdr = entry.to_xdr_base64(XdrLimits::none()).unwrap();
                        json!([{"key": key, "xdr": xdr, "lastModifiedLedgerSeq": used}])
                    }
                    LedgerKey::ContractData(_) => json!([]),
                    _ => {
                        let settings = StateArchivalSettings { min_temporary_ttl: 17_280, ..Default::default() };
                        let entry =
                            LedgerEntryData::ConfigSetting(stellar_xdr::ConfigSettingEntry::StateArchival(settings));
                        json!([{"key": key, "xdr": entry.to_xdr_base64(XdrLimits::none()).unwrap(), "lastModifiedLedgerSeq": 1}])
                    }
                };
                json!({"entries": entries, "latestLedger": ledger})
            }
            "getEvents" => {
                let TransactionEnvelope::Tx(envelope) =
                    TransactionEnvelope::from_xdr_base64(&by, XdrLimits::none()).unwrap()
                else {
                    panic!("{by}")
                };
                let network = Sha256::digest("Test SDF Network ; September 2015").into();
                let hash = hex::encode(envelope.tx.hash(network).unwrap());
                json!({"events": [{"txHash": hash}], "latestLedger": ledger})
            }
            "getTransaction" => {
                json!({"status": "SUCCESS", "ledger": used, "envelopeXdr": by, "latestLedger": ledger})
            }
            _ => {
                return json!({"jsonrpc": "2.0", "id": question["id"], "error": {"code": -32601, "message": "no"}})
                    .to_string();
            }
        };
        json!({"jsonrpc": "2.0", "id": question["id"], "result": result}).to_string()
    }
}

/// Tasks that end all at once, as a process does.
#[derive(Default)]
struct Mortal(Mutex<Vec<tokio::task::AbortHandle>>);
impl Spawn for Mortal {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.0.lock().unwrap().push(tokio::spawn(task).abort_handle());
    }
}

pub struct Scene {
    pub gates: Vec<Gate>,
    mortals: Vec<Arc<Mortal>>,
    pub facility: Arc<Facility>,
    pub node: Arc<Node>,
    pub runs: Arc<AtomicU32>,
    shop: Shop,
}

pub fn yes() -> String {
    json!({"success": true, "transaction": "ab", "network": NETWORK}).to_string()
}

pub fn no(reason: &str) -> String {
    json!({"success": false, "errorReason": reason, "transaction": "", "network": NETWORK}).to_string()
}

fn item(kind: Kind, key: &str, atomic: u64, flow: Flow) -> Item {
    let mut terms = terms(atomic);
    terms.flow = flow;
    Item::new(kind, key, vec![terms], About::default(), false).unwrap()
}

/// `search` costs 10,000, and `deep` the same before it runs; `named` wants an identifier; `ping` is free.
pub fn prices() -> Prices {
    let mut named = item(Kind::Tool, "named", 10_000, Flow::Authorization);
    named.identifier_required = true;
    let items = vec![
        item(Kind::Tool, "search", 10_000, Flow::Authorization),
        item(Kind::Tool, "deep", 10_000, Flow::Upfront),
        named,
        item(Kind::Resource, "docs://{id}", 10_000, Flow::Authorization),
        item(Kind::Prompt, "brief", 10_000, Flow::Authorization),
    ];
    let free = BTreeSet::from([(Kind::Tool, "ping".to_owned())]);
    Prices::new(items, free, Unlisted::Deny, BTreeSet::new()).unwrap()
}

/// The arguments of a call of `search`, with this payment.
pub fn params(name: &str, payment: Option<&RawValue>) -> Box<RawValue> {
    with_arguments(name, json!({"q": 1}), payment)
}

pub fn with_arguments(name: &str, arguments: Value, payment: Option<&RawValue>) -> Box<RawValue> {
    let meta = payment.map_or_else(String::new, |payment| format!(r#","_meta":{{"x402/payment":{}}}"#, payment.get()));
    raw(&format!(r#"{{"name":"{name}","arguments":{arguments}{meta}}}"#))
}

pub fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// A good payment by an account of this seed for what `name` costs, with an identifier or without.
pub fn payment(name: &str, seed: u8, id: Option<&str>) -> Box<RawValue> {
    let all = prices();
    let item = all.items().find(|item| item.key == name).unwrap();
    let extensions = match id {
        Some(id) => json!({"payment-identifier": {"info": {"required": item.identifier_required, "id": id}}}),
        None => json!({}),
    };
    paid(&item.offers[0].offer.raw, &signed(seed, PAY_TO), &extensions)
}

/// No seller's.
pub const NO_SELLER: &str = "GBBD47IF6LWK7P7MDEVSCWR7DPUWV3NY3DTQEVFL4NAT4AQH3ZLLFLA5";

/// The transfer of such a payment; with another recipient, what the same payer may do with its nonce.
pub fn signed(seed: u8, to: &str) -> String {
    transaction(seed, to, USDC, 10_000, 5, 110, |_| {})
}

pub fn paid(accepted: &RawValue, transaction: &str, extensions: &Value) -> Box<RawValue> {
    raw(&format!(
        r#"{{"x402Version":2,"accepted":{},"payload":{{"transaction":"{transaction}"}},"extensions":{extensions}}}"#,
        accepted.get()
    ))
}

pub fn output() -> Ran {
    Ran::Output(json::raw(&json!({"content": [{"type": "text", "text": SECRET}]})))
}

/// What a caller was told, as text.
pub fn text(answer: &Answer) -> String {
    match answer {
        Answer::Free => "free".into(),
        Answer::Result(result) => result.get().to_owned(),
        Answer::Error(error) => {
            let data = error.data.as_ref().map_or("", |data| data.get());
            format!("error {} {} {data}", error.code, error.message)
        }
    }
}

/// The first word of a challenge's `error`; nothing where it is no challenge.
pub fn challenge(answer: &Answer) -> String {
    let Answer::Result(result) = answer else { return String::new() };
    match crate::x402::classify(result) {
        crate::x402::Answer::Challenge(challenge) => {
            let error = json::member(&challenge.raw, "error").and_then(json::string).unwrap_or_default();
            error.split(':').next().unwrap_or_default().to_owned()
        }
        _ => String::new(),
    }
}

/// The word of an answer that withholds the output without a new demand.
pub fn withheld(answer: &Answer) -> String {
    assert_eq!(challenge(answer), "", "a challenge: {}", text(answer));
    let Answer::Result(result) = answer else { return String::new() };
    let meta = json::member(result, "_meta").and_then(|meta| json::member(meta, "tollway/reason"));
    meta.and_then(json::string).unwrap_or_default().into_owned()
}

pub fn receipt(answer: &Answer) -> Option<String> {
    let holder = match answer {
        Answer::Result(result) => json::member(result, "_meta"),
        Answer::Error(error) => error.data.as_deref(),
        Answer::Free => None,
    };
    holder.and_then(|holder| json::member(holder, "x402/payment-response")).map(|receipt| receipt.get().to_owned())
}

pub fn is_output(answer: &Answer) -> bool {
    text(answer).contains(SECRET)
}

impl Scene {
    pub async fn new(on: On) -> Scene {
        Scene::of(on, 1, Settings::default()).await
    }

    pub async fn of(on: On, gates: usize, settings: Settings) -> Scene {
        Scene::made(on, gates, settings, None).await
    }

    pub async fn made(on: On, gates: usize, settings: Settings, hooking: Option<Hooking>) -> Scene {
        let facility = Arc::new(Facility {
            verify: Mutex::new((200, r#"{"isValid":true}"#.into())),
            settles: Mutex::new(vec![(200, yes())]),
            kinds: Mutex::new(json!([{"x402Version": 2, "scheme": "exact", "network": NETWORK}])),
            heard: Mutex::default(),
            hangs: AtomicBool::new(false),
        });
        let heard = facility.clone();
        let facilitator = serve(move |request, io| {
            let (code, text) = heard.say(&request);
            let hangs = request.line().contains("settle") && heard.hangs.load(Ordering::SeqCst);
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                write(&io, answer(code, &[], &text)).await
            }
        })
        .await;
        let shop = shop(on == On::Postgres, gates).await;
        let node = Arc::new(Node { ledger: AtomicU32::new(100), used: Mutex::default(), clock: shop.clock.clone() });
        let asked = node.clone();
        let rpc = serve(move |request: testing::Request, io| {
            let text = asked.say(&request.body);
            async move { write(&io, answer(200, &[], &text)).await }
        })
        .await;
        let mut scene = Scene { gates: Vec::new(), mortals: Vec::new(), facility, node, runs: Arc::default(), shop };
        let all: Vec<claims::Claims> = std::mem::take(&mut scene.shop.replicas);
        for claims in all {
            let mortal = Arc::new(Mortal::default());
            let mut world = world().0;
            (world.clock, world.spawn) = (scene.shop.clock.clone(), mortal.clone());
            let limits = Limits { timeout: Duration::from_secs(5), max_response_bytes: 1 << 20 };
            let http = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
            let url = format!("http://{facilitator}").parse().unwrap();
            let network: crate::money::Network = NETWORK.parse().unwrap();
            let chain = Stellar::new(
                ChainSettings {
                    network: network.clone(),
                    passphrase: "Test SDF Network ; September 2015".into(),
                    rpc_urls: vec![format!("http://{rpc}").parse().unwrap()],
                    credentials: Credentials::Address,
                    max_authorization_seconds: 300,
                    min_ledger_ms: 4_000,
                },
                http.clone(),
                world.clone(),
            );
            let parts = Parts {
                world,
                prices: prices(),
                claims,
                facilitators: BTreeMap::from([(network.clone(), Facilitator::new(http, &url))]),
                chains: BTreeMap::from([(network, Arc::new(chain))]),
                resolved_by_operator: BTreeSet::new(),
                settings,
            };
            let gate = match &hooking {
                Some(hooking) => Gate::with_hooks(parts, hooking.clone()),
                None => Gate::new(parts),
            };
            scene.gates.push(gate.unwrap());
            scene.mortals.push(mortal);
        }
        scene
    }

    /// So much later, for the claims and for the clock.
    pub async fn later(&self, seconds: u64) {
        self.shop.later(seconds * 1_000).await;
    }

    /// Sets what only a person with the database's key could.
    pub async fn sql(&self, statement: &str) {
        self.shop.sql(statement).await;
    }

    /// All tasks of this gate end where they are.
    pub fn kill(&self, gate: usize) {
        self.mortals[gate].0.lock().unwrap().iter().for_each(tokio::task::AbortHandle::abort);
    }

    /// A handler that counts its runs and gives this.
    pub fn handler(&self, ran: Ran) -> impl Future<Output = Ran> + Send + 'static + use<> {
        let runs = self.runs.clone();
        async move {
            runs.fetch_add(1, Ordering::SeqCst);
            ran
        }
    }

    /// One that waits for a sign before it gives its output.
    pub fn held(&self, go: &Arc<Notify>) -> impl Future<Output = Ran> + Send + 'static + use<> {
        let (runs, go) = (self.runs.clone(), go.clone());
        async move {
            runs.fetch_add(1, Ordering::SeqCst);
            go.notified().await;
            output()
        }
    }

    pub fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    pub fn settles(&self) -> usize {
        self.facility.heard("settle")
    }

    /// A tool's call at the first gate whose handler gives the output.
    pub async fn call(&self, params: &RawValue) -> Answer {
        self.ask(0, None, params, self.handler(output())).await
    }

    pub async fn ask(
        &self,
        gate: usize,
        session: Option<&str>,
        params: &RawValue,
        handler: impl Future<Output = Ran> + Send + 'static,
    ) -> Answer {
        let fits = async { Described::Fits { tool: None } };
        self.gates[gate].answer(request(Kind::Tool, params, session), fits, handler).await
    }

    pub async fn until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(20), async {
            while !is_so().await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        waited.await.unwrap_or_else(|_| panic!("{what} did not happen"));
    }
}

pub fn request<'a>(kind: Kind, params: &'a RawValue, session: Option<&'a str>) -> Request<'a> {
    Request {
        kind,
        params,
        revision: Revision::V2025_11_25,
        client_capabilities: None,
        session,
        source: "10.0.0.1",
        payment_header: false,
    }
}

pub fn failed() -> Ran {
    Ran::Failed(json::raw(&json!({"isError": true, "content": [{"type": "text", "text": "it broke"}]})))
}

pub fn error() -> Ran {
    Ran::Error(RpcError::internal("it broke"))
}
