//! What one paid call costs: counted at the seller, at the signer, on the chain and at the ledger.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::catalog::Catalog;
use tollway::chain::stellar::{Credentials, Settings as ChainSettings, Stellar};
use tollway::guard::Rules;
use tollway::http::Tls;
use tollway::ledger::{Ledger as _, Limit, Subject};
use tollway::mcp::{Handler as _, Progress, RequestContext, Revision};
use tollway::money::{AgentId, Amount, Network, Unit};
use tollway::pay::{Parts, Payer, Settings};
use tollway::ports::World;
use tollway::ports::machine::world;
use tollway::sandbox::backends::client;
use tollway::sandbox::chain::{NETWORK, PASSPHRASE, USDC};
use tollway::sandbox::start::{Running, start};
use tollway::signer::Signer;
use tollway::upstream::{Settings as UpstreamSettings, Upstream};
use zeroize::Zeroizing;

use super::{every_transfer_has_its_row, fast};
use crate::pay::faulty::{Fault, Faulty};

/// An agent server against the sandbox's parts, with a ledger that counts.
pub struct Agent {
    pub tools: AgentTools,
    pub ledger: Arc<Faulty>,
    pub chain: Arc<Stellar>,
}

impl Agent {
    /// Its ledger is in `name`; `dialing` is the way to sellers.
    pub async fn start(sandbox: &Running, world: &World, dialing: &World, name: &str) -> Agent {
        let dir = sandbox.dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let ledger = Arc::new(Faulty::over(crate::pay::sqlite(world, &dir).await));
        let network: Network = NETWORK.parse().unwrap();
        let limit = Limit {
            subject: Subject::EachAgent,
            unit: Unit { network: network.clone(), asset: USDC.parse().unwrap() },
            per_call: Some(Amount::from_u64(10_000_000)),
            per_session: None,
            per_day: Some(Amount::from_u64(50_000_000)),
            unlimited: false,
            suspended: false,
            source: "file".into(),
        };
        ledger.replace_limits("file", &[limit]).await.unwrap();
        let operator = client(world).unwrap();
        let chain = ChainSettings {
            network: network.clone(),
            passphrase: PASSPHRASE.into(),
            rpc_urls: vec![sandbox.backends.rpc_url.parse().unwrap()],
            credentials: Credentials::Address,
            max_authorization_seconds: 3_600,
            min_ledger_ms: 200,
        };
        let chain = Arc::new(Stellar::new(chain, operator.clone(), world.clone()));
        let printed = sandbox.client_configuration("tollway");
        let variables = printed["stdio"]["mcpServers"]["tollway"]["env"].as_object().unwrap().clone();
        let authorization = variables.values().next().unwrap().as_str().unwrap().to_owned();
        let vault = sandbox.backends.signer_url.parse().unwrap();
        let signer = Signer::external(vault, Some(Zeroizing::new(authorization)), operator.clone()).unwrap();
        let upstream = UpstreamSettings { allow_insecure_local: true, ..UpstreamSettings::default() };
        let dialer = upstream.client(dialing.clone(), Tls::Plain);
        let catalog = Catalog::new(operator, &sandbox.backends.facilitator_url).unwrap();
        let parts = Parts {
            world: world.clone(),
            catalog: catalog.clone(),
            upstream: Upstream::new(upstream, world.clone(), dialer),
            ledger: ledger.clone(),
            chains: BTreeMap::from([(network.clone(), chain.clone())]),
            signer: Arc::new(signer),
            settings: Settings::new(Rules { payable: [network].into() }),
        };
        let local: AgentId = "local".parse().unwrap();
        Agent { tools: AgentTools::new(catalog, Some(Payer::new(parts)), Some(local)), ledger, chain }
    }

    pub async fn ask(&self, tool: &str, arguments: Value) -> Value {
        let context = RequestContext {
            claims: tollway::mcp::Claims::default(),
            revision: Revision::V2025_11_25,
            agent: None,
            session: Some("session".into()),
            cancelled: CancellationToken::new(),
            meta: None,
            progress: Progress::default(),
        };
        let params = tollway::json::raw(&json!({"name": tool, "arguments": arguments}));
        let call = self.tools.call(&context, "tools/call", Some(&params));
        let result = tokio::time::timeout(Duration::from_secs(60), call).await.expect("the call ends").unwrap();
        let result: Value = serde_json::from_str(result.get()).unwrap();
        result["structuredContent"].clone()
    }
}

/// (unpaid calls, paid calls, signatures, transfers) so far.
pub fn counted(sandbox: &Running) -> (u64, u64, u64, usize) {
    let (calls, parts) = (sandbox.backends.seller.calls(), &sandbox.backends);
    (calls.unpaid, calls.paid, parts.signer.signatures(), parts.network.transfers().len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paid_call_is_two_calls_one_signature_one_transfer_and_two_waits_for_the_ledger_or_three_with_a_key() {
    let (world, _) = world();
    let sandbox = start(fast(), &world).await.unwrap();
    let agent = Agent::start(&sandbox, &world, &world, "counted").await;
    let found = agent.ask("x402_search_resources", json!({"query": "weather city"})).await;
    let reference = &found["resources"][0]["wrapper"]["ref"];
    let mut call = json!({"ref": reference, "network": NETWORK, "scheme": "exact", "asset": USDC,
        "maxAtomicAmount": "10000", "arguments": {"city": "Bern"}});
    assert_eq!(counted(&sandbox), (0, 0, 0, 0));
    assert_eq!((agent.ledger.calls().len(), agent.ledger.others().len()), (0, 0));

    let answer = agent.ask("x402_call_resource", call.clone()).await;
    assert_eq!(answer["receipt"]["status"], "settled", "{answer}");
    assert_eq!(agent.ledger.calls(), ["reserve", "settle"]);
    assert_eq!(agent.ledger.others(), ["store_payload"]);
    assert_eq!(counted(&sandbox), (1, 1, 1, 1));

    // The sealed payload is written beside the call: were it waited for, the next call would not end.
    agent.ledger.fail(Fault::PayloadStalls);
    call["arguments"]["city"] = json!("Thun");
    call["idempotencyKey"] = json!("counted-with-a-key");
    let answer = agent.ask("x402_call_resource", call.clone()).await;
    assert_eq!(answer["receipt"]["status"], "settled", "{answer}");
    assert_eq!(agent.ledger.calls(), ["lookup", "reserve", "settle"]);
    assert_eq!(agent.ledger.others(), ["store_payload"]);
    assert_eq!(counted(&sandbox), (2, 2, 2, 2));

    assert_eq!(agent.ask("x402_call_resource", call).await["receipt"], answer["receipt"]);
    assert_eq!(agent.ledger.calls(), ["lookup"]);
    assert_eq!(counted(&sandbox), (2, 2, 2, 2));
    assert_eq!(every_transfer_has_its_row(&sandbox, &world, &["counted/ledger.sqlite"]).await, 2);
}
