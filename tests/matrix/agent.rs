//! The agent server under test: this program again, as a process of its own, with `tollway serve`'s parts over HTTP on
//! a loopback port, a ledger that can be struck, and a second port on which the test speaks to it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::catalog::Catalog;
use tollway::chain::stellar::{Credentials, Settings as ChainSettings, Stellar};
use tollway::guard::Rules;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ledger::{Ledger as _, Limit, Subject};
use tollway::mcp::{self, Authenticator, StaticKeys};
use tollway::money::{Amount, Network, Unit};
use tollway::pay::{Parts, Payer, Settings, Sweep, SweepParts, SweepSettings};
use tollway::ports::World;
use tollway::ports::machine::{TcpListener, world};
use tollway::sandbox::chain::{NETWORK, PASSPHRASE, USDC};
use tollway::seal::KeyRing;
use tollway::signer::Signer;
use tollway::upstream::{Settings as UpstreamSettings, Upstream};
use zeroize::Zeroizing;

use super::faults::{Fault, Observed, Struck};
use super::store::{Ahead, Place};

/// Holds the configuration of the process under test.
pub const VARIABLE: &str = "TOLLWAY_MATRIX_AGENT";
/// Bound on each request that leads to the payment.
pub const STEP: Duration = Duration::from_secs(4);
pub const SIGN_WITHIN: Duration = Duration::from_secs(6);
pub const PAID: Duration = Duration::from_secs(6);
pub const WAIT_IN_FLIGHT: Duration = Duration::from_millis(600);
pub const AGENT: &str = "buyer";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Config {
    pub dir: PathBuf,
    pub place: Place,
    pub rpc: String,
    pub facilitator: String,
    pub signer: String,
    pub signer_auth: String,
    pub key: String,
    pub ahead_ms: u64,
    pub per_call: u64,
    pub per_day: u64,
}

struct Process {
    ledger: Arc<Struck>,
    ahead: Arc<AtomicU64>,
    sweep: Sweep,
}

/// Never returns by itself.
pub fn run(config: &str) {
    let config: Config = serde_json::from_str(config).expect("the configuration of the process under test");
    let filter = tracing_subscriber::EnvFilter::new("warn,tollway=info");
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    // A test that is gone leaves no process behind.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    runtime.expect("a runtime").block_on(serve(config));
}

async fn serve(config: Config) {
    let (machine, _tasks) = world();
    let ahead = Arc::new(AtomicU64::new(config.ahead_ms));
    let clock = Arc::new(Ahead { real: machine.clock.clone(), ms: ahead.clone() });
    let world = World { clock, ..machine };
    let ledger = Arc::new(Struck::new(config.place.open(&world, &config.dir).await));
    let network: Network = NETWORK.parse().expect("a network");
    let limit = Limit {
        subject: Subject::EachAgent,
        unit: Unit { network: network.clone(), asset: USDC.parse().expect("an asset") },
        per_call: Some(Amount::from_u64(config.per_call)),
        per_session: None,
        per_day: Some(Amount::from_u64(config.per_day)),
        unlimited: false,
        suspended: false,
        source: "file".into(),
    };
    ledger.replace_limits("file", &[limit]).await.expect("limits");

    let limits = Limits { timeout: STEP, ..Limits::default() };
    let operator = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
    let chain = ChainSettings {
        network: network.clone(),
        passphrase: PASSPHRASE.into(),
        rpc_urls: vec![config.rpc.parse().expect("a URL")],
        credentials: Credentials::Address,
        max_authorization_seconds: 3_600,
        // The test lets hundreds of ledgers pass in a moment.
        min_ledger_ms: 1,
    };
    let chain = Arc::new(Stellar::new(chain, operator.clone(), world.clone()));
    let authorization = Some(Zeroizing::new(config.signer_auth.clone()));
    let signer = Signer::external(config.signer.parse().expect("a URL"), authorization, operator.clone());
    let upstream = UpstreamSettings { timeout: STEP, allow_insecure_local: true, ..UpstreamSettings::default() };
    let dialer = upstream.client(world.clone(), Tls::Plain);
    let upstream = Upstream::new(upstream, world.clone(), dialer);
    let catalog = Catalog::new(operator, &config.facilitator).expect("a catalog");
    let mut settings = Settings::new(Rules { payable: [network.clone()].into() });
    settings.sign_within = SIGN_WITHIN;
    settings.probe_timeout = STEP;
    settings.rpc_timeout = STEP;
    settings.paid_call_timeout = Some(PAID);
    settings.wait_in_flight = WAIT_IN_FLIGHT;
    let chains = BTreeMap::from([(network, chain)]);
    let sweep = Sweep::new(SweepParts {
        world: world.clone(),
        ledger: ledger.clone(),
        chains: chains.clone(),
        settings: SweepSettings { interval: Duration::from_secs(1), ..SweepSettings::default() },
    });
    let payer = Payer::new(Parts {
        world: world.clone(),
        catalog: catalog.clone(),
        upstream,
        ledger: ledger.clone(),
        chains,
        signer: Arc::new(signer.expect("a signer")),
        settings,
    });
    let tools = Arc::new(AgentTools::new(catalog, Some(payer), None));
    let keys = StaticKeys::parse(&format!("{AGENT}:{}", config.key)).expect("a key");
    let ring = KeyRing::load_or_create(&world, &config.dir.join("keyring")).expect("a key ring");
    let shutdown = CancellationToken::new();
    let front = mcp::Settings::new(world.clone(), ring, shutdown.clone());
    let front = mcp::router(front, tools, Authenticator::keys(keys));
    let process = Arc::new(Process { ledger, ahead, sweep });
    let control = axum::Router::new()
        .route("/arm", post(arm))
        .route("/observed", get(observed))
        .route("/ahead", post(set_ahead))
        .route("/sweep", post(sweep_once))
        .with_state(process);

    let door = async || tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let (agents, test) = (door().await, door().await);
    let port = |listener: &tokio::net::TcpListener| listener.local_addr().expect("an address").port();
    println!("ready {} {}", port(&agents), port(&test));
    let _ = std::io::stdout().flush();
    let world_too = world.clone();
    tokio::spawn(mcp::serve::serve(TcpListener(test), world_too, control, shutdown.clone()));
    mcp::serve::serve(TcpListener(agents), world, front, shutdown).await;
}

async fn arm(State(process): State<Arc<Process>>, Json(faults): Json<Vec<Fault>>) -> Json<()> {
    process.ledger.arm(faults);
    Json(())
}

async fn observed(State(process): State<Arc<Process>>) -> Json<Observed> {
    Json(process.ledger.observed())
}

async fn set_ahead(State(process): State<Arc<Process>>, Json(ms): Json<u64>) -> Json<()> {
    process.ahead.store(ms, Ordering::SeqCst);
    Json(())
}

/// One pass over what is due.
async fn sweep_once(State(process): State<Arc<Process>>) -> Json<String> {
    Json(format!("{:?}", process.sweep.pass().await))
}
