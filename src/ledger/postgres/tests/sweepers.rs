//! Several processes sweep one ledger at once: each payment is looked at by one of them, and the chain is asked no more
//! often than by one alone. A chain that does not answer holds up nobody but itself.

use std::collections::BTreeMap;
use std::sync::Mutex as StdMutex;

use axum::body::Bytes;
use axum::routing::post;
use futures_util::future::{Either, join_all, select};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tower_service::Service as _;
use url::Url;

use super::*;
use crate::chain::stellar::{Credentials, Settings, Stellar};
use crate::http::{Client, Destination, Limits, Tls};
use crate::ledger::turns::{intent, room};
use crate::pay::{Sweep, SweepParts, SweepSettings};
use crate::sandbox::chain::{LocalNetwork, Node, Options as ChainOptions, PASSPHRASE};

const OURS: &str = "stellar:testnet";
const SLOW: &str = "stellar:slow";
/// Authorizations live so many ledgers.
const LIFE: u64 = 8;

/// What was asked of a node: each request's method and parameters.
type Asked = Arc<StdMutex<Vec<String>>>;

struct Stage {
    schema: Schema,
    chain: LocalNetwork,
    payer: String,
    stop: CancellationToken,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Stage {
    async fn new() -> Stage {
        let schema = Schema::new().await;
        // Rows are not older than the machine's clock says.
        schema.sql(&format!("UPDATE test_clock SET at = {}", world().unix_ms())).await.unwrap();
        let options = ChainOptions { ledger_interval: None, ..ChainOptions::default() };
        let chain = LocalNetwork::start(options, world()).unwrap();
        chain.close_now();
        let payer = chain.account("payer").id().to_string();
        room(&*schema.ledger, &[OURS, SLOW]).await;
        Stage { schema, chain, payer, stop: CancellationToken::new() }
    }

    /// Payments whose owner is gone, of several agents, with a signature that nobody used.
    async fn leave(&self, numbers: std::ops::Range<u32>, network: &str) {
        let at = u64::from(self.chain.latest().sequence);
        for n in numbers {
            let mut intent = intent(n, ["a", "b", "c"][n as usize % 3], network);
            intent.authorization.payer = self.payer.clone();
            (intent.authorization.at, intent.authorization.dead_after) = (at, at + LIFE);
            assert!(matches!(self.schema.ledger.decide(&intent).await, Ok(Decision::Fresh(_))));
        }
    }

    /// Everything that was left is dead and due.
    async fn die(&self) {
        for _ in 0..LIFE {
            self.chain.close_now();
        }
        self.schema.advance(table::LEASE_MS);
        // As fast as the chain may be believed to close ledgers.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    async fn node(&self, asked: &Asked) -> Url {
        let (behind, asked) = (self.chain.rpc_router(Node::default()), asked.clone());
        let app = axum::Router::new().route(
            "/",
            post(move |body: Bytes| {
                let (mut behind, asked) = (behind.clone(), asked.clone());
                async move {
                    let question: Value = serde_json::from_slice(&body).unwrap();
                    asked.lock().unwrap().push(format!("{} {}", question["method"], question["params"]));
                    let request = http::Request::post("/").header("content-type", "application/json");
                    behind.call(request.body(axum::body::Body::from(body)).unwrap()).await.unwrap()
                }
            }),
        );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let listener = crate::ports::machine::TcpListener(listener);
        tokio::spawn(crate::mcp::serve::serve(listener, world(), app, self.stop.clone()));
        url
    }

    /// A process with its own connections to everything.
    async fn sweep(&self, nodes: &[(&str, &Url)], rpc_per_second: u32) -> Sweep {
        let http = Client::new(world(), Tls::Plain, Destination::Operator, Limits::default());
        let chain = |(network, node): &(&str, &Url)| {
            let network: Network = network.parse().unwrap();
            let settings = Settings {
                network: network.clone(),
                passphrase: PASSPHRASE.to_owned(),
                rpc_urls: vec![(*node).clone()],
                credentials: Credentials::Address,
                max_authorization_seconds: 300,
                min_ledger_ms: 10,
            };
            (network, Arc::new(Stellar::new(settings, http.clone(), world())))
        };
        Sweep::new(SweepParts {
            world: world(),
            ledger: Arc::new(self.schema.open(Some(ring(1)), options()).await.unwrap()),
            chains: nodes.iter().map(chain).collect::<BTreeMap<_, _>>(),
            settings: SweepSettings { rpc_per_second, ..SweepSettings::default() },
        })
    }

    async fn count(&self, of: &str) -> u64 {
        self.schema.sql(&format!("SELECT count(*) FROM {of}")).await.unwrap()[0].parse().unwrap()
    }
}

#[tokio::test]
async fn three_sweepers_at_once_ask_the_chain_once_about_each_payment() {
    const ROWS: u32 = 90;
    let (stage, asked) = (Stage::new().await, Asked::default());
    stage.leave(0..ROWS, OURS).await;
    stage.die().await;
    let node = stage.node(&asked).await;
    let mut sweeps = Vec::new();
    for _ in 0..3 {
        sweeps.push(stage.sweep(&[(OURS, &node)], 200).await);
    }
    let reports = join_all(sweeps.iter().map(Sweep::pass)).await;
    // Who found the rest locked by the others is done early; another pass finds nothing that was done.
    let mut reports: Vec<_> = reports.into_iter().collect();
    reports.push(sweeps[0].pass().await);
    let sum = |of: fn(&crate::pay::SweepReport) -> u64| reports.iter().map(of).sum::<u64>();
    assert_eq!((sum(|r| r.taken), sum(|r| r.released)), (u64::from(ROWS), u64::from(ROWS)), "{reports:?}");
    assert_eq!(sum(|r| r.lost + r.failed + r.open + r.inconclusive + r.settled), 0, "{reports:?}");
    assert_eq!(stage.count("payments WHERE state = 'released' AND attempts = 1").await, u64::from(ROWS));
    assert_eq!(stage.count("payment_events WHERE event = 'released'").await, u64::from(ROWS));

    let asked = asked.lock().unwrap().clone();
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for question in asked.iter().filter(|question| question.contains("getLedgerEntries")) {
        *times.entry(question).or_default() += 1;
    }
    // Beside the payments' own entries there is one question about the network's setting.
    assert_eq!(times.len(), ROWS as usize + 1, "{times:#?}");
    let once = times.values().filter(|times| **times == 1).count();
    assert!(once >= ROWS as usize, "{times:#?}");
    // A process asks for identity, setting and newest ledger a few times, however many payments there are.
    assert!(asked.len() < ROWS as usize * 2, "{} requests for {ROWS} payments", asked.len());
    assert_eq!(stage.schema.ledger.audit().await.unwrap().differences, []);
}

#[tokio::test]
async fn a_chain_that_does_not_answer_holds_up_no_other() {
    const ROWS: u32 = 30;
    let (stage, asked) = (Stage::new().await, Asked::default());
    // It takes connections and says nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let slow = format!("http://{}/", silent.local_addr().unwrap()).parse().unwrap();
    stage.leave(0..ROWS, SLOW).await;
    stage.leave(ROWS..ROWS * 2, OURS).await;
    stage.die().await;
    let node = stage.node(&asked).await;
    let sweep = stage.sweep(&[(SLOW, &slow), (OURS, &node)], 200).await;
    let released = async {
        while stage.count("payments WHERE state = 'released'").await < u64::from(ROWS) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match select(Box::pin(released), Box::pin(sweep.pass())).await {
        Either::Left(_) => {}
        Either::Right((report, _)) => panic!("the silent chain was waited for: {report:?}"),
    }
    let still_read = format!("payments WHERE network = '{SLOW}' AND state = 'in_doubt' AND lease_expires IS NOT NULL");
    assert_eq!(stage.count(&still_read).await, 8, "so many are read at a time");
}

#[tokio::test]
async fn a_process_asks_no_faster_than_it_may_and_a_slow_pace_still_ends_rows() {
    let (stage, asked) = (Stage::new().await, Asked::default());
    stage.leave(0..6, OURS).await;
    stage.die().await;
    let node = stage.node(&asked).await;
    let sweep = stage.sweep(&[(OURS, &node)], 10).await;
    let begun = tokio::time::Instant::now();
    let report = sweep.pass().await;
    assert_eq!((report.taken, report.released), (6, 6), "{report:?}");
    let (requests, took) = (asked.lock().unwrap().len(), begun.elapsed());
    let allowed = took.as_millis() / 100 + 1;
    assert!(requests as u128 <= allowed, "{requests} requests in {took:?}");
}
