//! A buyer among liars: the seller behaves as the case says that the call names, the nodes as the test says, and the
//! signer notes what it signs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::Signer as _;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stellar_xdr::{HashIdPreimage, Int128Parts, Limits, ReadXdr, ScVal, SorobanAuthorizedFunction, WriteXdr};
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::catalog::{Catalog, Listing};
use tollway::chain::stellar::Stellar;
use tollway::guard::Rules;
use tollway::http::Tls;
use tollway::ledger::{Ledger, Options, Payment, SqliteLedger};
use tollway::mcp::{Handler as _, Progress, RequestContext, Revision};
use tollway::money::AgentId;
use tollway::pay::{Parts, Payer, Settings, Sweep, SweepParts, SweepSettings};
use tollway::ports::{Clock, World};
use tollway::sandbox::chain::{self, PASSPHRASE};
use tollway::seal::KeyRing;
use tollway::signer::Signer;
use tollway::upstream::{Settings as UpstreamSettings, Upstream};
use url::Url;

use crate::pay::bench::{NETWORK, all, challenge, is_paid, limit, result, structured, transaction};
use crate::pay::server::{Reply, Request, Server};
use crate::secrets::Secrets;
use crate::stellar::{Local, client, local};

/// What the seller does with a paid call of its case; the number counts the calls of that case from 0.
pub type Behaviour = fn(&Shop, &Request, usize) -> Reply;

/// What a hostile seller has at hand.
pub struct Shop {
    pub local: Arc<Local>,
    behaviours: BTreeMap<&'static str, Behaviour>,
    /// By case: the raw `params` of the paid calls.
    pub paid: Mutex<BTreeMap<String, Vec<String>>>,
    /// Transactions that a settlement of this seller made.
    pub settled: Mutex<Vec<String>>,
    /// A real transfer of somebody else.
    pub anothers: Mutex<String>,
}

impl Shop {
    /// Hands the signed transfer to the facilitator; gives the hash, or what it says against it.
    pub fn settle(&self, request: &Request) -> Result<String, Value> {
        let transaction = transaction(request);
        let settling = self.local.settle(&transaction);
        let done = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(settling));
        match done["transaction"].as_str() {
            Some(hash) if done["success"] == true => {
                self.settled.lock().unwrap().push(hash.to_owned());
                Ok(hash.to_owned())
            }
            _ => Err(done),
        }
    }
}

pub struct Scene {
    pub local: Arc<Local>,
    pub shop: Arc<Shop>,
    _seller: Server,
    pub ledger: Arc<SqliteLedger>,
    pub tools: AgentTools,
    pub listing: Listing,
    signer: Server,
    later: Later,
    /// Known from the start.
    secrets: Mutex<Secrets>,
    _catalog: Server,
    _dir: tempfile::TempDir,
}

#[derive(Clone, Default)]
struct Later(Arc<AtomicU64>);
impl Clock for Later {
    fn unix_ms(&self) -> u64 {
        tollway::ports::machine::world().0.unix_ms() + self.0.load(Ordering::SeqCst)
    }
}

/// What differs from an honest scene.
#[derive(Default)]
pub struct Change {
    pub behaviours: BTreeMap<&'static str, Behaviour>,
    /// Over the usual offer, in the listing and in the challenge.
    pub offer: Value,
    /// The buyer's node; absent: an honest one.
    pub rpc: Option<(Arc<Local>, Url)>,
}

impl Scene {
    pub async fn new(change: Change) -> Scene {
        let (local, url) = match change.rpc {
            Some((local, url)) => (local, url),
            None => {
                let local = Arc::new(local());
                let url = local.node(chain::Node::default()).await;
                (local, url)
            }
        };
        crate::secrets::logs();
        let world = local.world.clone();
        let mut secrets = Secrets::default();
        secrets.text("seed", &local.payer.secret());
        secrets.bytes("seed", &local.payer.key.to_bytes());
        let token = hex::encode(world.random::<32>());
        secrets.text("signer's token", &token);
        let mut offer = local.requirements();
        for (name, value) in change.offer.as_object().into_iter().flatten() {
            offer[name] = value.clone();
        }
        let shop = Arc::new(Shop {
            local: local.clone(),
            behaviours: change.behaviours,
            paid: Mutex::default(),
            settled: Mutex::default(),
            anothers: Mutex::default(),
        });
        let seller = {
            let (shop, offer) = (shop.clone(), offer.clone());
            Server::start(Arc::new(move |request| answers(&shop, &offer, request))).await
        };
        let item = json!({"resource": seller.url("/mcp"), "type": "mcp", "x402Version": 2, "accepts": [offer],
            "extensions": {"bazaar": {"info": {"input": {"type": "mcp", "toolName": "weather",
                "inputSchema": {"type": "object"}}}, "schema": {}}}});
        let listing = Listing::parse(&RawValue::from_string(item.to_string()).unwrap()).unwrap();
        let found = json!({"x402Version": 2, "resource": item}).to_string();
        let catalog = Server::start(Arc::new(move |_| Reply::json(found.clone()))).await;
        let signer = {
            let payer = local.payer.clone();
            Server::start(Arc::new(move |request: &Request| match request.method.as_str() {
                "GET" => Reply::json(json!({"address": payer.address()}).to_string()),
                _ => {
                    let preimage = BASE64.decode(request.json()["authEntryXdr"].as_str().unwrap()).unwrap();
                    let signature = payer.key.sign(&Sha256::digest(preimage)).to_bytes();
                    Reply::json(json!({"signedAuthEntryXdr": BASE64.encode(signature)}).to_string())
                }
            }))
            .await
        };

        let dir = tempfile::tempdir().unwrap();
        let later = Later::default();
        let ring = KeyRing::ephemeral(&world);
        let shifted = World { clock: Arc::new(later.clone()), ..world.clone() };
        let path = dir.path().join("ledger.sqlite");
        let ledger = SqliteLedger::open_with(&path, shifted, Some(ring), Options::default()).await.unwrap();
        let ledger = Arc::new(ledger);
        let roomy = tollway::ledger::Limit { per_day: Some(tollway::money::Amount::from_u64(10_000_000)), ..limit() };
        ledger.replace_limits("file", &[roomy]).await.unwrap();
        let mut settings = Settings::new(Rules { payable: [NETWORK.parse().unwrap()].into() });
        settings.paid_call_timeout = Some(Duration::from_secs(6));
        settings.wait_in_flight = Duration::from_millis(500);
        let upstream = UpstreamSettings { allow_insecure_local: true, ..UpstreamSettings::default() };
        let http = upstream.client(world.clone(), Tls::Plain);
        let catalog_client = Catalog::new(client(&world), &catalog.url("")).unwrap();
        let token = Some(zeroize::Zeroizing::new(format!("Bearer {token}")));
        let signs = Signer::external(signer.url("/").parse().unwrap(), token, client(&world)).unwrap();
        let parts = Parts {
            world: world.clone(),
            catalog: catalog_client.clone(),
            upstream: Upstream::new(upstream, world.clone(), http),
            ledger: ledger.clone(),
            chains: BTreeMap::from([(NETWORK.parse().unwrap(), Arc::new(local.stellar(vec![url])))]),
            signer: Arc::new(signs),
            settings,
        };
        let agent: AgentId = "local".parse().unwrap();
        let tools = AgentTools::new(catalog_client, Some(Payer::new(parts)), Some(agent));
        Scene {
            local,
            shop,
            ledger,
            tools,
            listing,
            signer,
            later,
            secrets: Mutex::new(secrets),
            _seller: seller,
            _catalog: catalog,
            _dir: dir,
        }
    }

    /// `structuredContent` of the paid tool for the case, under its own key.
    pub async fn call(&self, case: &str) -> Value {
        let key = format!("case-{case:-<16}").replace(' ', "-");
        let arguments = json!({"ref": self.listing.reference.to_string(), "network": NETWORK, "scheme": "exact",
            "asset": chain::USDC, "maxAtomicAmount": "20000", "arguments": {"city": case}, "idempotencyKey": key});
        let params = json!({"name": "x402_call_resource", "arguments": arguments});
        let context = RequestContext {
            claims: tollway::mcp::Claims::default(),
            revision: Revision::V2025_11_25,
            agent: None,
            session: Some("session".into()),
            cancelled: CancellationToken::new(),
            meta: None,
            progress: Progress::default(),
        };
        let params = RawValue::from_string(params.to_string()).unwrap();
        let answer = self.tools.call(&context, "tools/call", Some(&params)).await.unwrap();
        self.secrets().absent(&format!("{case}: the agent's answer"), answer.get());
        serde_json::from_str(structured(&answer).get()).unwrap()
    }

    /// What was secret from the start, and every signature and signed transaction so far.
    fn secrets(&self) -> std::sync::MutexGuard<'_, Secrets> {
        let mut secrets = self.secrets.lock().unwrap();
        for preimage in self.signed() {
            let digest = Sha256::digest(preimage.to_xdr(Limits::none()).unwrap());
            secrets.bytes("signature", &self.local.payer.key.sign(&digest).to_bytes());
        }
        for sent in self.shop.paid.lock().unwrap().values().flatten() {
            let params: Value = serde_json::from_str(sent).unwrap();
            let payload = &params["_meta"]["x402/payment"]["payload"]["transaction"];
            secrets.transaction(payload.as_str().unwrap());
        }
        secrets
    }

    pub async fn rows(&self) -> Vec<Payment> {
        self.ledger.list(&all()).await.unwrap()
    }

    /// What the signer was asked to sign, decoded.
    pub fn signed(&self) -> Vec<HashIdPreimage> {
        let asked = self.signer.requests().into_iter().filter(|request| request.method == "POST");
        asked
            .map(|request| {
                let entry = request.json()["authEntryXdr"].as_str().unwrap().to_owned();
                HashIdPreimage::from_xdr_base64(entry, Limits::none()).unwrap()
            })
            .collect()
    }

    /// Every signature is over our own transfer: this network, the payer's own account and money, the listed recipient
    /// and amount, and no longer than `ledgers` from the one that the row was made in.
    pub async fn signed_nothing_but_our_transfers(&self, ledgers: u32) {
        let rows = self.rows().await;
        for preimage in self.signed() {
            let HashIdPreimage::SorobanAuthorization(signed) = preimage else { panic!("{preimage:?}") };
            assert_eq!(signed.network_id.0[..], Sha256::digest(PASSPHRASE)[..]);
            let row = rows.iter().find(|row| row.authorization.nonce == signed.nonce.to_string());
            let row = row.unwrap_or_else(|| panic!("a signature without a row: {signed:?}"));
            assert_eq!(u64::from(signed.signature_expiration_ledger), row.authorization.dead_after);
            assert!(row.authorization.dead_after <= row.authorization.at + u64::from(ledgers), "{row:?}");
            assert!(row.authorization.at <= u64::from(self.local.here().sequence) + 50, "{row:?}");
            assert!(signed.invocation.sub_invocations.is_empty());
            let SorobanAuthorizedFunction::ContractFn(call) = &signed.invocation.function else { panic!("{signed:?}") };
            assert_eq!(call.contract_address.to_string(), chain::USDC);
            assert_eq!(call.function_name.to_string(), "transfer");
            let [ScVal::Address(from), ScVal::Address(to), ScVal::I128(Int128Parts { hi: 0, lo: 10_000 })] =
                call.args.as_slice()
            else {
                panic!("{call:?}")
            };
            assert_eq!(from.to_string(), self.local.payer.address());
            assert_eq!(to.to_string(), self.local.seller.address());
        }
    }

    /// Everything that was signed is dead, and an honest sweep has looked at it. The chain and the ledger then agree:
    /// no transfer but those of rows, one at most for each, no row open, nobody else has money.
    pub async fn finish(&self) {
        let rows = self.rows().await;
        let end = rows.iter().map(|row| row.authorization.dead_after).max().unwrap_or(0);
        assert!(end < u64::from(self.local.here().sequence) + 1000, "a signature lives until ledger {end}");
        while u64::from(self.local.here().sequence) <= end {
            self.local.network.close_now();
        }
        // Its ledgers were closed at once.
        let mut settings = self.local.settings(vec![self.local.node(chain::Node::default()).await]);
        settings.min_ledger_ms = 0;
        let honest: Stellar = self.local.with(settings);
        let sweep = Sweep::new(SweepParts {
            world: self.local.world.clone(),
            ledger: self.ledger.clone(),
            chains: BTreeMap::from([(NETWORK.parse().unwrap(), Arc::new(honest))]),
            settings: SweepSettings::default(),
        });
        for _ in 0..3 {
            self.later.0.fetch_add(400_000, Ordering::SeqCst);
            sweep.pass().await;
        }
        let rows = self.rows().await;
        let open: Vec<_> = rows.iter().filter(|row| row.state.is_open()).collect();
        assert!(open.is_empty(), "open after the sweep: {open:?}");
        assert_eq!(self.ledger.audit().await.unwrap().differences, []);
        let transfers: Vec<_> =
            self.local.network.transfers().into_iter().filter(|t| t.payer == self.local.payer.address()).collect();
        let mut nonces: Vec<_> = transfers.iter().map(|transfer| transfer.nonce.unwrap()).collect();
        nonces.sort_unstable();
        nonces.dedup();
        assert_eq!(nonces.len(), transfers.len(), "an authorization moved money twice");
        for transfer in &transfers {
            let row =
                rows.iter().find(|row| Some(row.authorization.nonce.clone()) == transfer.nonce.map(|n| n.to_string()));
            let row = row.unwrap_or_else(|| panic!("a transfer without a row: {transfer:?}"));
            assert_eq!(row.state.as_str(), "settled", "{row:?}");
            assert_eq!((transfer.amount, &transfer.pay_to), (10_000, &self.local.seller.address()));
        }
        let mut secrets = self.secrets();
        for row in &rows {
            secrets.text("payment identifier", &row.payment_id.to_hex());
        }
        secrets.absent("the log", &crate::secrets::logs().text());
        drop(secrets);
        let left = 50_000_000 - 10_000 * i64::try_from(transfers.len()).unwrap();
        assert_eq!(self.local.network.balance(&self.local.payer.id()), Some(left), "money is missing");
    }

    /// (state, reason, transfers of its nonce) by case, in the order in which they were called.
    pub async fn ends(&self) -> BTreeMap<String, (String, String, usize)> {
        let transfers = self.local.network.transfers();
        let rows = self.rows().await;
        let of = |row: Payment| {
            let moved =
                transfers.iter().filter(|t| t.nonce.map(|n| n.to_string()).as_ref() == Some(&row.authorization.nonce));
            let key =
                row.idempotency_key.unwrap().as_str().trim_start_matches("case-").trim_end_matches('-').to_owned();
            (key, (row.state.as_str().to_owned(), row.reason.unwrap_or_default(), moved.count()))
        };
        rows.into_iter().map(of).collect()
    }
}

fn answers(shop: &Shop, offer: &Value, request: &Request) -> Reply {
    let body = request.json();
    let method = body["method"].as_str().unwrap_or_default();
    let host = request.head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("host: ").map(str::to_owned));
    let url = format!("http://{}/mcp", host.unwrap_or_default());
    let reply = match method {
        _ if request.method != "POST" => Reply::status(405, ""),
        "initialize" => result(&json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
            "serverInfo": {"name": "liar", "version": "1"}})),
        "tools/call" if is_paid(request) => {
            let case = body["params"]["arguments"]["city"].as_str().unwrap_or_default().to_owned();
            let raw: &RawValue = serde_json::from_str(&request.body).unwrap();
            let params = tollway::json::member(raw, "params").unwrap().get().to_owned();
            let nth = {
                let mut paid = shop.paid.lock().unwrap();
                let calls = paid.entry(case.clone()).or_default();
                calls.push(params);
                calls.len() - 1
            };
            shop.behaviours.get(case.as_str()).unwrap_or_else(|| panic!("no case {case}"))(shop, request, nth)
        }
        "tools/call" => result(&challenge(&url, offer)),
        _ => Reply::status(202, ""),
    };
    match reply {
        Reply::Http(status, headers, text) => {
            Reply::Http(status, headers, text.replace("\"$id\"", &body["id"].to_string()))
        }
        other => other,
    }
}
