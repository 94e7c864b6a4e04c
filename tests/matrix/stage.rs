//! What stands around the agent server of one case: a chain of its own, facilitator with catalog, seller and signer,
//! each behind its proxy; and the agent server's process.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;
use tollway::catalog::{Kind, ResourceRef};
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ledger::{Filter, Ledger};
use tollway::mcp::{self, Authenticator};
use tollway::ports::World;
use tollway::ports::machine::{TcpListener, world};
use tollway::sandbox::catalog::Catalog;
use tollway::sandbox::chain::{self, LocalNetwork, NETWORK, Node, PASSPHRASE, USDC};
use tollway::sandbox::facilitator::{self, Facilitator};
use tollway::sandbox::seller::{self, Seller};
use tollway::sandbox::signer::{self, Signer};
use tollway::seal::KeyRing;
use url::Url;
use zeroize::Zeroizing;

use super::agent::{self, Config};
use super::answer::Answer;
use super::faults::{Fault, Observed};
use super::proxy::{self, Board, Counterpart};
use super::store::{Ahead, Place, Store};

pub const TOOL: &str = "get_weather";
pub const PRICE: u64 = 10_000;
/// Three purchases fit into a day.
pub const PER_DAY: u64 = 3 * PRICE;
const INTERVAL: Duration = Duration::from_millis(100);
/// 300 ledgers: half a minute on this chain, if nobody lets them pass.
const OFFER_SECONDS: u64 = 1_800;
const LIFE: u32 = 300;
/// Longer than every lease, the sweep's (90 s) too.
pub const LEASES_OVER: u64 = 110_000;
/// No call of a case takes longer, whatever hangs.
const PATIENCE: Duration = Duration::from_secs(30);
const FEE_ACCOUNTS: usize = 4;

pub struct Stage {
    pub board: Arc<Board>,
    pub network: LocalNetwork,
    pub signer: Arc<Signer>,
    pub ledger: Arc<dyn Ledger>,
    ahead: Arc<AtomicU64>,
    http: Client,
    config: Config,
    reference: String,
    process: Mutex<Option<Process>>,
    shutdown: CancellationToken,
    dir: tempfile::TempDir,
}

struct Process {
    child: Arc<Mutex<Child>>,
    agents: String,
    test: String,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.shutdown.cancel();
        self.board.clear();
        if let Some(process) = self.process.lock().unwrap().take() {
            let _ = process.child.lock().unwrap().start_kill();
        }
    }
}

async fn door() -> (tokio::net::TcpListener, String) {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}

impl Stage {
    /// The agent server does not run yet.
    pub async fn new(store: Store) -> Arc<Stage> {
        let (machine, _tasks) = world();
        let ahead = Arc::new(AtomicU64::new(0));
        let clock = Arc::new(Ahead { real: machine.clock.clone(), ms: ahead.clone() });
        let world = World { clock, ..machine };
        let shutdown = CancellationToken::new();
        let limits = Limits { timeout: PATIENCE, ..Limits::default() };
        let http = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
        let board = Arc::new(Board::default());

        let serve = |listener, router| {
            let server = mcp::serve::serve(TcpListener(listener), world.clone(), router, shutdown.clone());
            world.spawn.spawn(Box::pin(server));
        };
        let options = chain::Options { ledger_interval: Some(INTERVAL), ..chain::Options::default() };
        let network = LocalNetwork::start(options, world.clone()).expect("a chain");
        let (payer, pay_to) = (network.account("payer"), network.account("seller"));
        for (account, usdc) in [(&payer, 1_000_000_000), (&pay_to, 0)] {
            network.fund(&account.id(), 10_000_000_000);
            network.trust(&account.id(), usdc);
        }
        let fees: Vec<_> = (0..FEE_ACCOUNTS).map(|n| network.account(&format!("fees {n}"))).collect();
        fees.iter().for_each(|account| network.fund(&account.id(), 10_000_000_000));
        let (rpc, rpc_url) = door().await;
        serve(rpc, network.rpc_router(Node::default()));

        let catalog = Catalog::new(world.clone());
        let keys = fees.into_iter().map(|account| account.key).collect();
        let mut terms = facilitator::Options::new(NETWORK, PASSPHRASE, keys);
        terms.poll = Duration::from_millis(40);
        let settler = Facilitator::new(world.clone(), http.clone(), &rpc_url, terms);
        let (facilitation, facilitator_url) = door().await;
        serve(facilitation, settler.router().merge(catalog.router()));

        let (vault, signer_url) = door().await;
        let token = Zeroizing::new(hex::encode(world.random::<32>()));
        let signer_auth = format!("Bearer {}", token.as_str());
        let signer = Signer::new(
            world.clone(),
            signer::Options {
                network: NETWORK.into(),
                passphrase: PASSPHRASE.into(),
                assets: vec![USDC.into()],
                key: payer.key.clone(),
                token,
            },
        );
        serve(vault, signer.router());

        let (shop, shop_url) = door().await;
        let mut proxies = Vec::new();
        for (counterpart, target) in [
            (Counterpart::Rpc, &rpc_url),
            (Counterpart::Facilitator, &facilitator_url),
            (Counterpart::Signer, &signer_url),
            (Counterpart::Seller, &shop_url),
        ] {
            let (listener, url) = door().await;
            let (board, http, shutdown) = (board.clone(), http.clone(), shutdown.clone());
            proxy::start(counterpart, listener, target.clone(), board, http, shutdown).await;
            proxies.push(url);
        }
        let [rpc, facilitator, signer_at, shop_at] = proxies.try_into().expect("four proxies");
        let endpoint = format!("{shop_at}/mcp");
        let settles_with = Url::parse(&facilitator).expect("a URL");
        let seller = Seller::new(
            &world,
            tollway::facilitator::Facilitator::new(http.clone(), &settles_with),
            seller::Options {
                endpoint: endpoint.clone(),
                network: NETWORK.into(),
                asset: USDC.into(),
                pay_to: pay_to.address(),
                max_timeout_seconds: OFFER_SECONDS,
            },
        );
        let front = mcp::Settings::new(world.clone(), KeyRing::ephemeral(&world), shutdown.clone());
        serve(shop, mcp::router(front, seller.clone(), Authenticator::Public));
        catalog.put(&seller.catalog_item(TOOL, "2026-01-01T00:00:00Z").expect("a tool")).expect("an item");

        let dir = tempfile::tempdir().expect("a directory");
        let place = Place::make(store, dir.path()).await;
        let ledger = place.open(&world, dir.path()).await;
        let config = Config {
            dir: dir.path().to_owned(),
            place,
            rpc,
            facilitator,
            signer: signer_at,
            signer_auth,
            key: hex::encode(world.random::<32>()),
            ahead_ms: 0,
            per_call: PRICE,
            per_day: PER_DAY,
        };
        let reference = ResourceRef::new(Kind::Mcp, &endpoint, Some(TOOL)).expect("a reference").to_string();
        let stage = Arc::new(Stage {
            board,
            network,
            signer,
            ledger,
            ahead,
            http,
            config,
            reference,
            process: Mutex::default(),
            shutdown,
            dir,
        });
        stage.board.count_paid_calls(Arc::new(move || seller.calls().paid));
        let weak = Arc::downgrade(&stage);
        stage.board.on_kill(Arc::new(move || {
            let stage = weak.upgrade();
            Box::pin(async move {
                if let Some(stage) = stage {
                    stage.kill();
                }
            })
        }));
        let weak = Arc::downgrade(&stage);
        stage.board.on_stored(Arc::new(move || {
            let stage = weak.upgrade();
            Box::pin(async move {
                if let Some(stage) = stage {
                    stage.until_stored().await;
                }
            })
        }));
        stage
    }

    /// SIGKILL, at once.
    pub fn kill(&self) {
        if let Some(process) = &*self.process.lock().unwrap() {
            let _ = process.child.lock().unwrap().start_kill();
        }
    }

    /// Until some row has its sealed payload, or two seconds.
    async fn until_stored(&self) {
        for _ in 0..100 {
            let rows = self.ledger.list(&Filter { limit: 10, ..Filter::default() }).await.unwrap_or_default();
            if rows.iter().any(|row| row.has_payload) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn runs(&self) -> bool {
        match &*self.process.lock().unwrap() {
            None => false,
            Some(process) => matches!(process.child.lock().unwrap().try_wait(), Ok(None)),
        }
    }

    /// Waits up to two seconds for the process to be gone.
    pub async fn died(&self) -> bool {
        for _ in 0..200 {
            if !self.runs() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }

    /// Starts the agent server; the one before must be dead.
    pub async fn start(&self) -> Result<(), String> {
        let config = Config { ahead_ms: self.ahead.load(Ordering::SeqCst), ..self.config.clone() };
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log()).map_err(|e| e.to_string())?;
        let mut child = Command::new(std::env::current_exe().map_err(|e| e.to_string())?)
            .env(agent::VARIABLE, serde_json::to_string(&config).map_err(|e| e.to_string())?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| e.to_string())?;
        let out = child.stdout.take().ok_or("no standard output")?;
        let mut lines = BufReader::new(out).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.map_err(|_| "it does not start")?;
        let line = line.map_err(|e| e.to_string())?.ok_or_else(|| format!("it ended at once: {}", self.tail()))?;
        let mut words = line.split_whitespace().skip(1);
        let mut url = || words.next().map(|port| format!("http://127.0.0.1:{port}")).ok_or("no port");
        let process = Process { agents: format!("{}/mcp", url()?), test: url()?, child: Arc::new(Mutex::new(child)) };
        *self.process.lock().unwrap() = Some(process);
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("agent.log")
    }

    /// The last lines of what the process said.
    pub fn tail(&self) -> String {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    fn urls(&self) -> Option<(String, String)> {
        let process = self.process.lock().unwrap();
        process.as_ref().map(|process| (process.agents.clone(), process.test.clone()))
    }

    async fn control<T: DeserializeOwned>(&self, path: &str, body: Option<&impl Serialize>) -> Result<T, String> {
        let (_, test) = self.urls().ok_or("no process")?;
        let request = match body {
            None => Request::get(format!("{test}{path}")),
            Some(_) => Request::post(format!("{test}{path}")).header("content-type", "application/json"),
        };
        let body = body.map(serde_json::to_vec).transpose().map_err(|e| e.to_string())?.unwrap_or_default();
        let request = request.body(Bytes::from(body)).map_err(|e| e.to_string())?;
        let limits = Limits { timeout: Duration::from_secs(10), ..Limits::default() };
        let answer = self.http.send_within(request, limits).await.map_err(|e| e.to_string())?;
        serde_json::from_slice(answer.body()).map_err(|e| e.to_string())
    }

    pub async fn arm(&self, faults: &[Fault]) -> Result<(), String> {
        self.control("/arm", Some(&faults)).await
    }

    pub async fn observed(&self) -> Result<Observed, String> {
        self.control("/observed", None::<&()>).await
    }

    pub async fn sweep(&self) -> Result<String, String> {
        self.control("/sweep", Some(&())).await
    }

    /// Time passes for everybody: leases run out, rows fall due.
    pub async fn pass(&self, ms: u64) -> Result<(), String> {
        let ahead = self.ahead.fetch_add(ms, Ordering::SeqCst) + ms;
        self.config.place.set_ahead(ahead).await;
        // A newest ledger that closed two minutes ago would not be believed.
        self.network.close_now();
        if self.runs() { self.control("/ahead", Some(&ahead)).await } else { Ok(()) }
    }

    /// Lets so many ledgers close that every authorization signed so far is dead.
    pub async fn let_die(&self) {
        for _ in 0..=LIFE {
            self.network.close_now();
            tokio::task::yield_now().await;
        }
    }

    /// Ends the process and removes what outlives it.
    pub async fn remove(&self) {
        self.kill();
        self.died().await;
        self.config.place.remove().await;
    }

    pub fn call(&self, city: &str, key: Option<&str>) -> Value {
        let mut call = json!({"ref": self.reference, "network": NETWORK, "scheme": "exact", "asset": USDC,
            "maxAtomicAmount": PRICE.to_string(), "arguments": {"city": city}});
        if let Some(key) = key {
            call["idempotencyKey"] = json!(key);
        }
        call
    }

    /// As an agent over MCP 2026-07-28.
    pub async fn tool(&self, tool: &str, arguments: &Value) -> Answer {
        let Some((agents, _)) = self.urls() else { return Answer::Gone("no process".into()) };
        let version = "2026-07-28";
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool,
            "arguments": arguments, "_meta": {
                "io.modelcontextprotocol/protocolVersion": version,
                "io.modelcontextprotocol/clientInfo": {"name": "matrix", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {}}}});
        let request = Request::post(agents)
            .header("authorization", format!("Bearer {}", self.config.key))
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", version)
            .header("mcp-method", "tools/call")
            .header("mcp-name", tool)
            .body(Bytes::from(body.to_string()));
        let Ok(request) = request else { return Answer::Gone("no request".into()) };
        let limits = Limits { timeout: PATIENCE, ..Limits::default() };
        match self.http.send_within(request, limits).await {
            Ok(answer) => Answer::of(&String::from_utf8_lossy(answer.body())),
            Err(error) => Answer::Gone(error.to_string()),
        }
    }

    pub async fn buy(&self, city: &str, key: Option<&str>) -> Answer {
        self.tool("x402_call_resource", &self.call(city, key)).await
    }
}
