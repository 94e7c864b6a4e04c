//! A buyer whose paid calls end in doubt: the seller takes the signed payment and hangs up. Whether it reaches the chain
//! the test decides. The ledger's clock is moved, so that nobody waits for what is due later.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::catalog::{Catalog, Listing};
use tollway::chain::stellar::Stellar;
use tollway::guard::Rules;
use tollway::http::Tls;
use tollway::ledger::{By, Event, Ledger, Options, Payment, SqliteLedger};
use tollway::mcp::{Handler as _, Progress, RequestContext, Revision};
use tollway::money::{AgentId, PaymentId};
use tollway::pay::{Parts, Payer, Settings, Sweep, SweepParts, SweepReport, SweepSettings};
use tollway::ports::{Clock, World};
use tollway::sandbox::chain::{self, Node};
use tollway::seal::KeyRing;
use tollway::signer::Signer;
use tollway::upstream::{Settings as UpstreamSettings, Upstream};
use url::Url;

use crate::pay::bench::{NETWORK, challenge, is_paid, limit, result, structured, transaction};
use crate::pay::server::{Reply, Server};
use crate::stellar::{Local, client, local_with};

pub struct Bench {
    pub local: Local,
    pub ledger: Arc<SqliteLedger>,
    pub path: PathBuf,
    pub agent: AgentId,
    tools: AgentTools,
    listing: Listing,
    later: Later,
    ring: KeyRing,
    payments: Arc<Mutex<Vec<String>>>,
    _servers: [Server; 2],
    _dir: tempfile::TempDir,
}

/// The machine's clock, moved forward.
#[derive(Clone, Default)]
struct Later(Arc<AtomicU64>);
impl Clock for Later {
    fn unix_ms(&self) -> u64 {
        tollway::ports::machine::world().0.unix_ms() + self.0.load(Ordering::SeqCst)
    }
}

/// A payment in doubt: its row, and the signed transaction that the seller was given.
pub struct Doubt {
    pub id: PaymentId,
    pub transaction: String,
    pub row: Payment,
}

impl Bench {
    pub async fn new() -> Bench {
        Bench::with(|_| {}).await
    }

    /// Authorizations live for 10 ledgers, which close by hand; a used nonce's entry for at least 20.
    pub async fn with(change: impl FnOnce(&mut chain::Options)) -> Bench {
        let local = local_with(change);
        let world = local.world.clone();
        let offer = local.requirements();
        let payments = Arc::new(Mutex::new(Vec::new()));
        let seller = {
            let (offer, payments) = (offer.clone(), payments.clone());
            Server::start(Arc::new(move |request| {
                let method = request.json()["method"].as_str().unwrap_or_default().to_owned();
                let host =
                    request.head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("host: ").map(str::to_owned));
                let reply = match method.as_str() {
                    _ if request.method != "POST" => Reply::status(405, ""),
                    "initialize" => result(&json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                        "serverInfo": {"name": "silent", "version": "1"}})),
                    "tools/call" if is_paid(request) => {
                        payments.lock().unwrap().push(transaction(request));
                        Reply::Cut
                    }
                    "tools/call" => result(&challenge(&format!("http://{}/mcp", host.unwrap_or_default()), &offer)),
                    _ => Reply::status(202, ""),
                };
                match reply {
                    Reply::Http(status, headers, body) => {
                        Reply::Http(status, headers, body.replace("\"$id\"", &request.json()["id"].to_string()))
                    }
                    other => other,
                }
            }))
            .await
        };
        let item = json!({"resource": seller.url("/mcp"), "type": "mcp", "x402Version": 2, "accepts": [offer],
            "extensions": {"bazaar": {"info": {"input": {"type": "mcp", "toolName": "weather",
                "inputSchema": {"type": "object"}}}, "schema": {}}}});
        let listing = Listing::parse(&RawValue::from_string(item.to_string()).unwrap()).unwrap();
        let found = json!({"x402Version": 2, "resource": item}).to_string();
        let catalog = Server::start(Arc::new(move |_| Reply::json(found.clone()))).await;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.sqlite");
        let (later, ring) = (Later::default(), KeyRing::ephemeral(&world));
        let ledger = open(&path, &world, &later, &ring).await;
        ledger.replace_limits("file", &[limit()]).await.unwrap();
        let mut settings = Settings::new(Rules { payable: [NETWORK.parse().unwrap()].into() });
        settings.paid_call_timeout = Some(Duration::from_secs(5));
        let upstream = UpstreamSettings { allow_insecure_local: true, ..UpstreamSettings::default() };
        let http = upstream.client(world.clone(), Tls::Plain);
        let catalog_client = Catalog::new(client(&world), &catalog.url("")).unwrap();
        let node = local.node(Node::default()).await;
        let parts = Parts {
            world: world.clone(),
            catalog: catalog_client.clone(),
            upstream: Upstream::new(upstream, world.clone(), http),
            ledger: ledger.clone(),
            chains: BTreeMap::from([(NETWORK.parse().unwrap(), Arc::new(local.stellar(vec![node])))]),
            signer: Arc::new(Signer::env_secret(local.payer.secret()).unwrap()),
            settings,
        };
        let agent: AgentId = "local".parse().unwrap();
        let tools = AgentTools::new(catalog_client, Some(Payer::new(parts)), Some(agent.clone()));
        let servers = [seller, catalog];
        Bench { local, ledger, path, agent, tools, listing, later, ring, payments, _servers: servers, _dir: dir }
    }

    /// A paid call whose answer never came.
    pub async fn doubt(&self, key: &str) -> Doubt {
        let arguments = json!({"ref": self.listing.reference.to_string(), "network": NETWORK, "scheme": "exact",
            "asset": chain::USDC, "maxAtomicAmount": "20000", "arguments": {"city": "Bern"}, "idempotencyKey": key});
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
        let answer: Value = serde_json::from_str(structured(&answer).get()).unwrap();
        assert_eq!(
            (&answer["code"], &answer["details"]["reason"]),
            (&json!("SETTLEMENT_UNKNOWN"), &json!("no_answer")),
            "{answer}"
        );
        let id: PaymentId = answer["details"]["paymentIdentifier"].as_str().unwrap().parse().unwrap();
        let row = self.row(id).await;
        Doubt { id, transaction: self.payments.lock().unwrap().last().unwrap().clone(), row }
    }

    /// The payment reaches the chain; gives its transaction's hash.
    pub async fn settle(&self, doubt: &Doubt) -> String {
        let settled = self.local.settle(&doubt.transaction).await;
        assert_eq!(settled["success"], true, "{settled}");
        settled["transaction"].as_str().unwrap().to_ascii_lowercase()
    }

    /// The chain refuses it from now on, whatever the ledger says.
    pub async fn refused(&self, doubt: &Doubt) {
        let settled = self.local.settle(&doubt.transaction).await;
        assert_eq!(settled["success"], false, "{settled}");
    }

    pub async fn row(&self, id: PaymentId) -> Payment {
        self.ledger.lookup(&self.agent, By::Id(id)).await.unwrap().unwrap()
    }

    /// (state, reason) as words.
    pub async fn state(&self, doubt: &Doubt) -> (&'static str, String) {
        let row = self.row(doubt.id).await;
        (row.state.as_str(), row.reason.unwrap_or_default())
    }

    pub async fn events(&self, doubt: &Doubt, event: &str) -> Vec<Event> {
        let (_, events) = self.ledger.show(&doubt.id.to_hex()).await.unwrap().unwrap();
        events.into_iter().filter(|e| e.event == event).collect()
    }

    /// Ledgers close until `sequence` is the newest.
    pub fn close_to(&self, sequence: u64) {
        assert!(u64::from(self.local.here().sequence) <= sequence, "{sequence} is over");
        while u64::from(self.local.here().sequence) < sequence {
            self.local.network.close_now();
        }
    }

    /// The ledger's clock goes on.
    pub fn later(&self, time: Duration) {
        self.later.0.fetch_add(u64::try_from(time.as_millis()).unwrap(), Ordering::SeqCst);
    }

    /// Another process on the same ledger.
    pub async fn another(&self) -> Arc<SqliteLedger> {
        open(&self.path, &self.local.world, &self.later, &self.ring).await
    }

    pub async fn node(&self) -> Url {
        self.local.node(Node::default()).await
    }

    pub async fn honest(&self) -> Sweep {
        self.sweep(vec![self.node().await])
    }

    pub fn sweep(&self, rpc_urls: Vec<Url>) -> Sweep {
        self.sweep_with(self.ledger.clone(), self.local.stellar(rpc_urls))
    }

    pub fn sweep_with(&self, ledger: Arc<dyn Ledger>, chain: Stellar) -> Sweep {
        Sweep::new(SweepParts {
            world: self.local.world.clone(),
            ledger,
            chains: BTreeMap::from([(NETWORK.parse().unwrap(), Arc::new(chain))]),
            settings: SweepSettings::default(),
        })
    }

    /// A pass in which everything that is open is due.
    pub async fn pass(&self, sweep: &Sweep) -> SweepReport {
        self.later(Duration::from_secs(400));
        sweep.pass().await
    }

    /// No difference between counters and rows, and each transfer of the chain is one payment that is not released.
    pub async fn audit(&self) {
        assert_eq!(self.ledger.audit().await.unwrap().differences, []);
        let rows = self.ledger.list(&crate::pay::bench::all()).await.unwrap();
        for transfer in self.local.network.transfers() {
            let Some(nonce) = transfer.nonce else { continue };
            let row = rows.iter().find(|row| row.authorization.nonce == nonce.to_string()).unwrap();
            assert_ne!(row.state.as_str(), "released", "paid and released: {row:?}");
            if let Some(booked) = &row.transaction {
                assert_eq!(*booked, transfer.transaction.to_ascii_lowercase());
            }
        }
    }
}

async fn open(path: &std::path::Path, world: &World, later: &Later, ring: &KeyRing) -> Arc<SqliteLedger> {
    let world = World { clock: Arc::new(later.clone()), ..world.clone() };
    let options = Options { busy_timeout: Duration::from_millis(100), ..Options::default() };
    Arc::new(SqliteLedger::open_with(path, world, Some(ring.clone()), options).await.unwrap())
}

/// What one row came to.
pub fn one(change: impl FnOnce(&mut SweepReport)) -> SweepReport {
    let mut report = SweepReport { taken: 1, ..SweepReport::default() };
    change(&mut report);
    report
}

pub fn settled() -> SweepReport {
    one(|r| r.settled = 1)
}

pub fn released() -> SweepReport {
    one(|r| r.released = 1)
}

pub fn open_still() -> SweepReport {
    one(|r| r.open = 1)
}

pub fn unproved() -> SweepReport {
    one(|r| r.inconclusive = 1)
}
