//! One agent server, built of the real parts, between scripted servers: catalog, seller, chain RPC. What a script does
//! not change is as it should be, and the scripts are changed while the bench runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::Signer as _;
use futures_util::future::BoxFuture;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stellar_xdr::{
    ConfigSettingEntry, ContractDataEntry, ExtensionPoint, HostFunction, Int128Parts, LedgerEntryData, LedgerFootprint,
    LedgerKey, LedgerKeyContractData, Limits as XdrLimits, OperationBody, ReadXdr, ScNonceKey, ScVal,
    SorobanCredentials, SorobanResources, SorobanTransactionData, SorobanTransactionDataExt, StateArchivalSettings,
    TransactionEnvelope, WriteXdr,
};
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::catalog::{Catalog, Listing};
use tollway::chain::stellar::{Credentials, Settings as ChainSettings, Stellar};
use tollway::guard::Rules;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ledger::{By, Filter, Ledger, Limit, Payment, Subject};
use tollway::mcp::{Handler, Progress, RequestContext, Revision, RpcError};
use tollway::money::{AgentId, Amount, Network, PaymentId, Unit};
use tollway::pay::{Parts, Payer, Settings};
use tollway::policy::{Origin, Policy};
use tollway::ports::{Clock, Spawn, World, machine};
use tollway::sandbox::chain::Account;
use tollway::signer::Signer;
use tollway::upstream::{Settings as UpstreamSettings, Upstream};

use super::faulty::Faulty;
use super::server::{Reply, Request, Server};
use super::{Place, on_postgres};

pub const NETWORK: &str = "stellar:testnet";
pub const PASSPHRASE: &str = "Test SDF Network ; September 2015";
pub const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
pub const PAY_TO: &str = "GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H";
pub const TRANSACTION: &str = "abababababababababababababababababababababababababababababababab";
pub const PRICE: u64 = 10_000;
const FIRST_LEDGER: u32 = 1000;

/// What the scripts say now.
#[derive(Default)]
pub struct Says {
    /// The seller's answer to the unpaid call; absent: the challenge.
    pub unpaid: Option<Reply>,
    /// To the paid calls, one each; then `paid`.
    pub paid_next: VecDeque<Reply>,
    /// To the paid call; absent: output with a right receipt.
    pub paid: Option<Reply>,
    /// Instead of the listed item.
    pub catalog: Option<Reply>,
    /// By RPC method; `balance` and `transfer` are the two simulations.
    pub rpc: BTreeMap<&'static str, Reply>,
    pub offer: Value,
    /// Of the challenge, where it differs from the listing's.
    pub live_offer: Option<Value>,
    pub balance: u64,
    /// Called when the paid call arrives.
    pub on_paid: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Sessions that the seller no longer knows: so many paid calls are answered 404.
    pub forget_sessions: u32,
    /// The chain's newest ledger is so many after the first.
    pub ledgers: u32,
    /// Every nonce is used on the chain.
    pub nonce_used: bool,
}

pub struct Bench {
    pub says: Arc<Mutex<Says>>,
    pub seller: Server,
    pub catalog: Server,
    pub rpc: Server,
    pub ledger: Arc<Faulty>,
    pub tools: Arc<AgentTools>,
    pub agent: AgentId,
    pub payer: String,
    signer: Server,
    /// How far the bench's clock is ahead, milliseconds.
    ahead: Arc<AtomicU64>,
    tasks: Arc<Tasks>,
    settings: Settings,
    place: Place,
}

/// What differs from the usual bench.
pub struct Change {
    pub settings: Settings,
    pub limit: Option<Limit>,
    /// Base URL of an external signer; absent: a key of this process.
    pub signer: Option<String>,
    pub seller_url: Option<String>,
    pub allow_local: bool,
    /// Tasks of the story are dropped as soon as they are started.
    pub drop_tasks: bool,
}

impl Default for Change {
    fn default() -> Change {
        let mut settings = Settings::new(Rules { payable: [NETWORK.parse().unwrap()].into() });
        settings.wait_in_flight = if on_postgres() { Duration::from_secs(1) } else { Duration::from_millis(300) };
        settings.paid_call_timeout = Some(Duration::from_millis(1500));
        settings.probe_timeout = Duration::from_millis(1500);
        settings.rpc_timeout = Duration::from_millis(1500);
        Change { settings, limit: Some(limit()), signer: None, seller_url: None, allow_local: true, drop_tasks: false }
    }
}

pub fn unit() -> Unit {
    Unit { network: NETWORK.parse().unwrap(), asset: ASSET.parse().unwrap() }
}

/// Every row of the ledger.
pub fn all() -> Filter {
    Filter { limit: 100, ..Filter::default() }
}

pub fn limit() -> Limit {
    Limit {
        subject: Subject::EachAgent,
        unit: unit(),
        per_call: Some(Amount::from_u64(50_000)),
        per_session: None,
        per_day: Some(Amount::from_u64(100_000)),
        unlimited: false,
        suspended: false,
        source: "file".into(),
    }
}

pub fn offer() -> Value {
    json!({"scheme": "exact", "network": NETWORK, "amount": PRICE.to_string(), "asset": ASSET, "payTo": PAY_TO,
        "maxTimeoutSeconds": 60, "extra": {"areFeesSponsored": true}})
}

fn bazaar() -> Value {
    json!({"info": {"input": {"type": "mcp", "toolName": "weather", "inputSchema": {"type": "object"}}}, "schema": {}})
}

/// The challenge in both copies.
pub fn challenge(url: &str, offer: &Value) -> Value {
    let required = json!({"x402Version": 2, "error": "Payment required", "resource": {"url": url}, "accepts": [offer],
        "extensions": {"bazaar": bazaar(), "payment-identifier": {"info": {"required": false}, "schema": {}}}});
    json!({"isError": true, "structuredContent": required,
        "content": [{"type": "text", "text": required.to_string()}]})
}

pub fn output() -> Value {
    json!({"content": [{"type": "text", "text": "sunny"}], "structuredContent": {"sky": "clear"}})
}

pub fn receipt() -> Value {
    json!({"success": true, "transaction": TRANSACTION, "network": NETWORK})
}

pub fn with_receipt(mut result: Value, receipt: &Value) -> Value {
    result["_meta"] = json!({"x402/payment-response": receipt});
    result
}

/// A JSON-RPC result whose id the server fills in.
pub fn result(result: &Value) -> Reply {
    Reply::json(json!({"jsonrpc": "2.0", "id": "$id", "result": result}).to_string())
}

pub fn rpc_error(code: i64, message: &str) -> Reply {
    Reply::json(json!({"jsonrpc": "2.0", "id": "$id", "error": {"code": code, "message": message}}).to_string())
}

fn with_id(reply: Reply, request: &Request) -> Reply {
    match reply {
        Reply::Later(wait, reply) => Reply::Later(wait, Box::new(with_id(*reply, request))),
        Reply::When(word, reply) => Reply::When(word, Box::new(with_id(*reply, request))),
        Reply::Raw(text) => Reply::Raw(text.replace("$transaction", &transaction(request))),
        Reply::Http(status, headers, body) => {
            let body = body.replace("\"$id\"", &request.json()["id"].to_string());
            Reply::Http(status, headers, body.replace("$transaction", &transaction(request)))
        }
        other => other,
    }
}

/// The signed transaction that a request carries, to a seller or to an RPC; empty where it has none.
pub fn transaction(request: &Request) -> String {
    let params = &request.json()["params"];
    let payload = &params["_meta"]["x402/payment"]["payload"]["transaction"];
    payload.as_str().or(params["transaction"].as_str()).unwrap_or_default().to_owned()
}

pub fn is_paid(request: &Request) -> bool {
    !request.json()["params"]["_meta"]["x402/payment"].is_null()
}

fn seller_says(says: &Mutex<Says>, request: &Request) -> Reply {
    let method = request.json()["method"].as_str().unwrap_or_default().to_owned();
    let host = request.head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("host: ").map(str::to_owned));
    let url = format!("http://{}/mcp", host.unwrap_or_default());
    if request.method != "POST" {
        return Reply::status(405, "");
    }
    let mut says = says.lock().unwrap();
    let reply = match method.as_str() {
        "initialize" => Reply::Http(
            200,
            "content-type: application/json\r\nmcp-session-id: s1\r\n".into(),
            json!({"jsonrpc": "2.0", "id": "$id", "result": {"protocolVersion": "2025-06-18", "capabilities":
                {"tools": {}}, "serverInfo": {"name": "scripted", "version": "1"}}})
            .to_string(),
        ),
        "tools/list" => result(&json!({"tools": [{"name": "weather", "inputSchema": {"type": "object"}}]})),
        "tools/call" if is_paid(request) => {
            if let Some(hook) = says.on_paid.clone() {
                hook();
            }
            if says.forget_sessions > 0 {
                says.forget_sessions -= 1;
                return Reply::status(404, "");
            }
            let next = says.paid_next.pop_front().or(says.paid.clone());
            next.unwrap_or_else(|| result(&with_receipt(output(), &receipt())))
        }
        "tools/call" => {
            let offer = says.live_offer.clone().unwrap_or_else(|| says.offer.clone());
            says.unpaid.clone().unwrap_or_else(|| result(&challenge(&url, &offer)))
        }
        method if method.starts_with("notifications/") => Reply::status(202, ""),
        _ => rpc_error(-32601, "Method not found"),
    };
    with_id(reply, request)
}

fn rpc_says(says: &Mutex<Says>, request: &Request, now: u64) -> Reply {
    let body = request.json();
    let says = says.lock().unwrap();
    let method = body["method"].as_str().unwrap_or_default();
    let transaction = body["params"]["transaction"].as_str().unwrap_or_default();
    let transfer = (method == "simulateTransaction").then(|| auth_nonce(transaction)).flatten();
    let name = match (method, &transfer) {
        ("simulateTransaction", Some(_)) => "transfer",
        ("simulateTransaction", None) => "balance",
        (other, _) => other,
    };
    if let Some(reply) = says.rpc.get(name) {
        return with_id(reply.clone(), request);
    }
    let newest = FIRST_LEDGER + says.ledgers;
    let reply = match (name, transfer) {
        ("getNetwork", _) => result(&json!({"passphrase": PASSPHRASE, "protocolVersion": 25})),
        ("getLatestLedger", _) => {
            result(&json!({"id": "x", "sequence": newest, "protocolVersion": 25, "closeTime": now.to_string()}))
        }
        ("getLedgerEntries", _) => {
            let key = body["params"]["keys"][0].as_str().unwrap_or_default();
            let entry = |xdr: String, seq: u32| json!({"key": key, "xdr": xdr, "lastModifiedLedgerSeq": seq});
            let entries = match LedgerKey::from_xdr_base64(key, XdrLimits::none()).unwrap() {
                LedgerKey::ConfigSetting(_) => {
                    let settings = StateArchivalSettings { min_temporary_ttl: 17_280, ..Default::default() };
                    let data = LedgerEntryData::ConfigSetting(ConfigSettingEntry::StateArchival(settings));
                    vec![entry(data.to_xdr_base64(XdrLimits::none()).unwrap(), 1)]
                }
                LedgerKey::ContractData(LedgerKeyContractData { contract, key, durability }) if says.nonce_used => {
                    let ext = ExtensionPoint::V0;
                    let data = ContractDataEntry { ext, contract, key, durability, val: ScVal::Void };
                    let data = LedgerEntryData::ContractData(data);
                    vec![entry(data.to_xdr_base64(XdrLimits::none()).unwrap(), FIRST_LEDGER + 1)]
                }
                _ => Vec::new(),
            };
            result(&json!({"entries": entries, "latestLedger": newest}))
        }
        ("balance", _) => {
            let balance = ScVal::I128(Int128Parts { hi: 0, lo: says.balance });
            let xdr = BASE64.encode(balance.to_xdr(XdrLimits::none()).unwrap());
            result(&json!({"latestLedger": 1000, "results": [{"xdr": xdr, "auth": []}], "minResourceFee": "1"}))
        }
        ("transfer", Some(key)) => {
            let data = SorobanTransactionData {
                ext: SorobanTransactionDataExt::V0,
                resources: SorobanResources {
                    footprint: LedgerFootprint {
                        read_only: Default::default(),
                        read_write: vec![key].try_into().unwrap(),
                    },
                    instructions: 1,
                    disk_read_bytes: 1,
                    write_bytes: 1,
                },
                resource_fee: 100,
            };
            let data = BASE64.encode(data.to_xdr(XdrLimits::none()).unwrap());
            result(&json!({"latestLedger": 1000, "transactionData": data, "minResourceFee": "100", "results": [],
                "events": []}))
        }
        _ => rpc_error(-32601, "no such method"),
    };
    with_id(reply, request)
}

/// The nonce key of the one authorization entry; `None` where the transaction carries none.
fn auth_nonce(transaction: &str) -> Option<LedgerKey> {
    let envelope = TransactionEnvelope::from_xdr_base64(transaction, XdrLimits::none()).ok()?;
    let TransactionEnvelope::Tx(envelope) = envelope else { return None };
    let OperationBody::InvokeHostFunction(operation) = &envelope.tx.operations.first()?.body else { return None };
    assert!(matches!(operation.host_function, HostFunction::InvokeContract(_)));
    let SorobanCredentials::Address(credentials) = &operation.auth.first()?.credentials else { return None };
    Some(LedgerKey::ContractData(LedgerKeyContractData {
        contract: credentials.address.clone(),
        key: ScVal::LedgerKeyNonce(ScNonceKey { nonce: credentials.nonce }),
        durability: stellar_xdr::ContractDataDurability::Temporary,
    }))
}

fn client(world: &World) -> Client {
    let limits = Limits { timeout: Duration::from_millis(1500), ..Limits::default() };
    Client::new(world.clone(), Tls::Plain, Destination::Operator, limits)
}

/// Signs whatever it is asked to, so that its requests can be counted.
async fn signer(world: &World) -> Server {
    let account = Account::generate(world);
    Server::start(Arc::new(move |request: &Request| match request.method.as_str() {
        "GET" => Reply::json(json!({"address": account.address()}).to_string()),
        _ => {
            let preimage = BASE64.decode(request.json()["authEntryXdr"].as_str().unwrap()).unwrap();
            let signature = account.key.sign(&Sha256::digest(preimage)).to_bytes();
            Reply::json(json!({"signedAuthEntryXdr": BASE64.encode(signature)}).to_string())
        }
    }))
    .await
}

impl Bench {
    pub async fn new() -> Bench {
        Bench::with(Change::default()).await
    }

    pub async fn with(change: Change) -> Bench {
        let ahead = Arc::new(AtomicU64::new(0));
        let world = shifted(&ahead);
        let says = Arc::new(Mutex::new(Says { offer: offer(), balance: 1_000_000, ..Says::default() }));
        let seller = {
            let says = says.clone();
            Server::start(Arc::new(move |request| seller_says(&says, request))).await
        };
        let rpc = {
            let (says, world) = (says.clone(), world.clone());
            Server::start(Arc::new(move |request| rpc_says(&says, request, world.unix_ms() / 1000))).await
        };
        let url = change.seller_url.clone().unwrap_or_else(|| seller.url("/mcp"));
        let catalog = {
            let says = says.clone();
            Server::start(Arc::new(move |_| {
                let says = says.lock().unwrap();
                let item = item(&url, &says.offer);
                says.catalog
                    .clone()
                    .unwrap_or_else(|| Reply::json(json!({"x402Version": 2, "resource": item}).to_string()))
            }))
            .await
        };
        let signer = signer(&world).await;
        let tasks = Arc::new(Tasks { drop_all: change.drop_tasks, handles: Mutex::default() });
        let place = Place::new().await;
        let ledger = Arc::new(Faulty::open(&world, &place).await);
        if let Some(limit) = &change.limit {
            ledger.replace_limits("file", std::slice::from_ref(limit)).await.unwrap();
        }
        let paying = change.signer.clone().unwrap_or_else(|| signer.url(""));
        let paying = Signer::external(paying.parse().unwrap(), None, client(&world)).unwrap();
        let agent: AgentId = "local".parse().unwrap();
        let mut bench = Bench {
            says,
            seller,
            catalog,
            rpc,
            ledger,
            tools: Arc::new(AgentTools::new(Catalog::new(client(&world), "http://127.0.0.1:9").unwrap(), None, None)),
            payer: paying.address(&NETWORK.parse().unwrap()).await.unwrap_or_default(),
            agent,
            signer,
            ahead,
            tasks,
            settings: change.settings,
            place,
        };
        bench.build(paying, change.allow_local);
        bench
    }

    /// The agent server over the bench's ledger.
    fn build(&mut self, signer: Signer, allow_local: bool) {
        self.tools = self.replica(self.ledger.clone(), signer, allow_local);
    }

    /// Another replica beside the first: its own clients and caches, its own connection to the same ledger.
    pub async fn another(&self) -> Arc<AgentTools> {
        let world = shifted(&self.ahead);
        let ledger = Arc::new(Faulty::open(&world, &self.place).await);
        let signer = Signer::external(self.signer.url("").parse().unwrap(), None, client(&world)).unwrap();
        self.replica(ledger, signer, true)
    }

    fn replica(&self, ledger: Arc<Faulty>, signer: Signer, allow_local: bool) -> Arc<AgentTools> {
        let world = shifted(&self.ahead);
        let network: Network = NETWORK.parse().unwrap();
        let chain = Stellar::new(
            ChainSettings {
                network: network.clone(),
                passphrase: PASSPHRASE.into(),
                rpc_urls: vec![self.rpc.url("/").parse().unwrap()],
                credentials: Credentials::Address,
                max_authorization_seconds: 300,
                min_ledger_ms: 4000,
            },
            client(&world),
            world.clone(),
        );
        let upstream = UpstreamSettings {
            timeout: Duration::from_millis(1500),
            allow_insecure_local: allow_local,
            policy: self.settings.policy.clone(),
            ..UpstreamSettings::default()
        };
        let http = upstream.client(world.clone(), Tls::Plain);
        let parts = Parts {
            world: World { spawn: self.tasks.clone(), ..world.clone() },
            catalog: self.catalog_client(),
            upstream: Upstream::new(upstream, world, http),
            ledger,
            chains: BTreeMap::from([(network, Arc::new(chain))]),
            signer: Arc::new(signer),
            settings: self.settings.clone(),
        };
        let payer = Payer::new(parts);
        Arc::new(AgentTools::new(self.catalog_client(), Some(payer), Some(self.agent.clone())))
    }

    /// The process dies: every task of its stories ends where it is, and nothing is left but the ledger's file.
    pub fn kill(&self) {
        self.tasks.handles.lock().unwrap().drain(..).for_each(|task| task.abort());
    }

    /// Another process over the same file.
    pub async fn restart(&mut self, change: Change) {
        self.kill();
        let world = shifted(&self.ahead);
        self.ledger = Arc::new(Faulty::open(&world, &self.place).await);
        self.settings = change.settings;
        let signer = Signer::external(self.signer.url("").parse().unwrap(), None, client(&world)).unwrap();
        self.build(signer, change.allow_local);
    }

    /// The clock moves on, the chain stays where it is: leases run out.
    pub fn later(&self, by: Duration) {
        self.place.later(by);
        self.ahead.fetch_add(u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }

    /// What the operator's lists say from now on.
    pub fn policy(&self, policy: Policy) {
        self.settings.policy.replace_file(policy);
    }

    /// The seller's origin, as lists and pins name it.
    pub fn origin(&self) -> Origin {
        self.seller.url("").trim_end_matches('/').parse().unwrap()
    }

    /// Where an agent server of its own process finds the signer.
    pub fn signer_url(&self) -> String {
        self.signer.url("")
    }

    /// How often the signer was asked for a signature.
    pub fn signatures(&self) -> usize {
        self.signer.requests().iter().filter(|request| request.method == "POST").count()
    }

    /// The raw `params` of the paid calls, as they were on the wire.
    pub fn paid_params(&self) -> Vec<String> {
        let paid = self.seller.requests().into_iter().filter(is_paid);
        paid.map(|request| {
            let body: &RawValue = serde_json::from_str(&request.body).unwrap();
            tollway::json::member(body, "params").unwrap().get().to_owned()
        })
        .collect()
    }

    pub fn catalog_client(&self) -> Catalog {
        Catalog::new(client(&machine::world().0), &self.catalog.url("")).unwrap()
    }

    pub fn says(&self, change: impl FnOnce(&mut Says)) {
        change(&mut self.says.lock().unwrap());
    }

    pub fn reference(&self) -> String {
        self.listing().reference.to_string()
    }

    pub fn listing(&self) -> Listing {
        let item = item(&self.seller.url("/mcp"), &self.says.lock().unwrap().offer).to_string();
        Listing::parse(&RawValue::from_string(item).unwrap()).unwrap()
    }

    /// The usual arguments, with `change` over them; null removes.
    pub fn arguments(&self, change: Value) -> Value {
        let mut arguments = json!({"ref": self.reference(), "network": NETWORK, "scheme": "exact", "asset": ASSET,
            "maxAtomicAmount": "20000", "arguments": {"city": "Bern"}});
        for (name, value) in change.as_object().unwrap() {
            arguments[name] = value.clone();
            if value.is_null() {
                arguments.as_object_mut().unwrap().remove(name);
            }
        }
        arguments
    }

    /// `structuredContent` of the paid tool.
    pub async fn call(&self, change: Value) -> Value {
        self.try_call(change, CancellationToken::new()).await.unwrap()
    }

    pub async fn try_call(&self, change: Value, cancelled: CancellationToken) -> Result<Value, RpcError> {
        let result = self.tool("x402_call_resource", self.arguments(change), cancelled).await?;
        Ok(serde_json::from_str(structured(&result).get()).unwrap())
    }

    /// The raw result, as it goes to the transport.
    pub async fn tool(
        &self,
        name: &str,
        arguments: Value,
        cancelled: CancellationToken,
    ) -> Result<Box<RawValue>, RpcError> {
        self.at(&self.tools, name, arguments, cancelled).await
    }

    /// The same, asked of this replica.
    pub async fn at(
        &self,
        tools: &AgentTools,
        name: &str,
        arguments: Value,
        cancelled: CancellationToken,
    ) -> Result<Box<RawValue>, RpcError> {
        let params = RawValue::from_string(json!({"name": name, "arguments": arguments}).to_string()).unwrap();
        tools.call(&self.context(cancelled), "tools/call", Some(&params)).await
    }

    pub fn context(&self, cancelled: CancellationToken) -> RequestContext {
        RequestContext {
            claims: tollway::mcp::Claims::default(),
            revision: Revision::V2025_11_25,
            agent: None,
            session: Some("session".into()),
            cancelled,
            meta: None,
            progress: Progress::default(),
        }
    }

    /// The row of the payment that an answer names.
    pub async fn row(&self, answer: &Value) -> Payment {
        let id = answer["paymentIdentifier"].as_str().or(answer["details"]["paymentIdentifier"].as_str());
        let id: PaymentId = id.unwrap_or_else(|| panic!("{answer}")).parse().unwrap();
        self.ledger.lookup(&self.agent, By::Id(id)).await.unwrap().unwrap()
    }

    /// (state, reason) as words.
    pub async fn state(&self, answer: &Value) -> (String, String) {
        let row = self.row(answer).await;
        (format!("{:?}", row.state), row.reason.unwrap_or_default())
    }

    /// (unpaid, paid) `tools/call` that the seller saw.
    pub fn calls(&self) -> (usize, usize) {
        let calls: Vec<_> = self.seller.requests().into_iter().filter(|r| r.json()["method"] == "tools/call").collect();
        let paid = calls.iter().filter(|r| is_paid(r)).count();
        (calls.len() - paid, paid)
    }
}

/// The tasks of one process.
struct Tasks {
    drop_all: bool,
    handles: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

impl Spawn for Tasks {
    #[allow(clippy::disallowed_methods, reason = "a port's implementation")]
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        if !self.drop_all {
            self.handles.lock().unwrap().push(tokio::spawn(task));
        }
    }
}

fn shifted(ahead: &Arc<AtomicU64>) -> World {
    let (world, _) = machine::world();
    World { clock: Arc::new(Ahead(world.clone(), ahead.clone())), ..world }
}

struct Ahead(World, Arc<AtomicU64>);
impl Clock for Ahead {
    fn unix_ms(&self) -> u64 {
        self.0.unix_ms() + self.1.load(Ordering::SeqCst)
    }
}

pub fn structured(result: &RawValue) -> Box<RawValue> {
    tollway::json::member(result, "structuredContent").unwrap_or_else(|| panic!("{}", result.get())).to_owned()
}

fn item(url: &str, offer: &Value) -> Value {
    json!({"resource": url, "type": "mcp", "x402Version": 2, "accepts": [offer], "extensions": {"bazaar": bazaar()}})
}

/// The row of the table as an error says it: (code, reason, moneyMayHaveMoved).
#[track_caller]
pub fn said(answer: &Value) -> (&str, &str, &str) {
    let details = &answer["details"];
    assert_eq!(answer["schemaVersion"], 1, "{answer}");
    assert!(details["phase"].is_string() && answer["message"].is_string(), "{answer}");
    (
        answer["code"].as_str().unwrap(),
        details["reason"].as_str().unwrap(),
        details["moneyMayHaveMoved"].as_str().unwrap(),
    )
}
