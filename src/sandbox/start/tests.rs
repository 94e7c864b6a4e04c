use serde_json::Value;

use super::*;
use crate::ledger::{Filter, Ledger as _, SqliteLedger};
use crate::ports::machine;
use crate::sandbox::backends;
use crate::sandbox::chain;
use crate::sandbox::mcp_client::{McpClient, McpClientError};

fn fast() -> Options {
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(50)), ..chain::Options::default() };
    Options { chain, ..Options::default() }
}

fn agent(sandbox: &Running, world: &World) -> McpClient {
    McpClient::new(backends::client(world).unwrap(), &sandbox.agent_url, Some(sandbox.agent_key()))
}

async fn ask(agent: &McpClient, tool: &str, arguments: Value) -> Value {
    let result = agent.call_tool(tool, &arguments, &json!({}), &[]).await.unwrap();
    let result: Value = serde_json::from_str(result.get()).unwrap();
    result["structuredContent"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_answers_a_sellers_question_and_pays_once_on_fast_ledgers() {
    let (world, _) = machine::world();
    let sandbox = start(fast(), &world).await.unwrap();
    let agent = agent(&sandbox, &world);
    let found = ask(&agent, "x402_search_resources", json!({"query": "restaurant"})).await;
    let mut call = json!({
        "ref": found["resources"][0]["wrapper"]["ref"],
        "network": NETWORK,
        "scheme": "exact",
        "asset": USDC,
        "maxAtomicAmount": "20000",
        "arguments": {"restaurant": "Maaemo"},
        "idempotencyKey": "a-table-for-four",
    });
    let asked = ask(&agent, "x402_call_resource", call.clone()).await;
    assert_eq!(asked["receipt"], Value::Null, "{asked}");
    assert_eq!(sandbox.backends.network.transfers().len(), 0);
    call["requestState"] = asked["inputRequired"]["requestState"].clone();
    call["inputResponses"] = json!({"party": {"action": "accept", "content": {"size": 4}}});
    let booked = ask(&agent, "x402_call_resource", call).await;
    assert_eq!(booked["receipt"]["settledAmount"], "20000", "{booked}");
    assert!(booked["content"][0]["text"].as_str().unwrap().contains("for 4 at Maaemo"), "{booked}");
    assert_eq!(sandbox.backends.network.transfers().len(), 1);
    assert_eq!(sandbox.backends.signer.signatures(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_key_nobody_reaches_the_tools() {
    let (world, _) = machine::world();
    let sandbox = start(fast(), &world).await.unwrap();
    for key in [None, Some("0123456789abcdef0123456789abcdef")] {
        let stranger = McpClient::new(backends::client(&world).unwrap(), &sandbox.agent_url, key);
        let answer = stranger.call_tool("x402_get_budget", &json!({}), &json!({}), &[]).await;
        assert!(matches!(answer, Err(McpClientError::Status(401) | McpClientError::Rpc { .. })), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_directory_is_kept_with_its_key_and_a_temporary_one_goes() {
    let (world, _) = machine::world();
    let dir = tempfile::tempdir().unwrap();
    let given = || Options { dir: Some(dir.path().to_owned()), ..fast() };
    let first = start(given(), &world).await.unwrap();
    let key = first.agent_key().to_owned();
    drop(first);
    let second = start(given(), &world).await.unwrap();
    assert_eq!(second.agent_key(), key);
    drop(second);
    assert!(dir.path().join("tollway.yaml").exists());

    let temporary = start(fast(), &world).await.unwrap();
    let path = temporary.dir().to_owned();
    assert!(path.join("stdio.yaml").exists());
    drop(temporary);
    assert!(!path.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_prints_for_clients_is_a_configuration_that_the_program_takes() {
    let (world, _) = machine::world();
    let sandbox = start(fast(), &world).await.unwrap();
    let printed = sandbox.client_configuration("/usr/bin/tollway");
    assert_eq!(printed["http"]["mcpServers"]["tollway"]["url"], sandbox.agent_url);
    let stdio = &printed["stdio"]["mcpServers"]["tollway"];
    let variables = stdio["env"].as_object().unwrap();
    let environment = Environment(
        [SIGNER_AUTH_ENV].map(|name| (name, Zeroizing::new(variables[name].as_str().unwrap().to_owned()))).into(),
    );
    let text = std::fs::read_to_string(stdio["args"][1].as_str().unwrap()).unwrap();
    let config = config::parse(&text, Some(Transport::Stdio), &environment).unwrap();
    assert!(config.signer.can_pay());
    assert_eq!(config.stdio_agent.as_str(), "local");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_server_pays_through_an_rpc_over_tls_and_counts_from_a_node_that_lags() {
    let (world, _) = machine::world();
    let sandbox = start(Options { rpc_tls: true, lagging_node: Some(200), ..fast() }, &world).await.unwrap();
    for _ in 0..100 {
        sandbox.backends.network.close_now();
    }
    let text = std::fs::read_to_string(sandbox.dir().join("tollway.yaml")).unwrap();
    let (tls, lagging) = (sandbox.nodes.tls_url.as_deref().unwrap(), sandbox.nodes.lagging_url.as_deref().unwrap());
    assert!(tls.starts_with("https://") && text.contains(tls) && text.contains(lagging));
    assert!(!text.contains(&format!("{}\"", sandbox.backends.rpc_url)), "the first node is asked over TLS alone");

    // Only who trusts the authority gets an answer.
    let newest = http::Request::post(tls).header("content-type", "application/json");
    let newest = newest.body(r#"{"jsonrpc":"2.0","id":1,"method":"getLatestLedger"}"#.into()).unwrap();
    assert!(backends::client(&world).unwrap().send(newest.clone()).await.is_err());
    let pem = std::fs::read(sandbox.nodes.ca_file.as_ref().unwrap()).unwrap();
    let trusting = crate::http::tls(Some(&pem)).unwrap();
    let limits = crate::http::Limits::default();
    let trusting = crate::http::Client::new(world.clone(), trusting, crate::http::Destination::Operator, limits);
    assert_eq!(trusting.send(newest).await.unwrap().status(), 200);

    let agent = agent(&sandbox, &world);
    let found = ask(&agent, "x402_search_resources", json!({"query": "weather city"})).await;
    let call = json!({
        "ref": found["resources"][0]["wrapper"]["ref"], "network": NETWORK, "scheme": "exact", "asset": USDC,
        "maxAtomicAmount": "20000", "arguments": {"city": "Oslo"},
    });
    let paid = ask(&agent, "x402_call_resource", call).await;
    assert_eq!(paid["receipt"]["status"], "settled", "{paid}");
    assert_eq!(sandbox.backends.network.transfers().len(), 1);
    let ledger = SqliteLedger::open(&sandbox.dir().join("ledger.sqlite"), world.clone(), None).await.unwrap();
    let rows = ledger.list(&Filter { limit: 10, ..Filter::default() }).await.unwrap();
    let [row] = rows.as_slice() else { panic!("{rows:?}") };
    let settled = u64::from(sandbox.backends.network.transfers()[0].ledger);
    assert!(
        row.authorization.at + 100 <= settled,
        "{} is no ledger of the node that lags: {settled}",
        row.authorization.at
    );
}

#[tokio::test]
async fn a_node_too_far_behind_for_an_offer_is_refused() {
    let (world, _) = machine::world();
    let refused = start(Options { lagging_node: Some(6), ..Options::default() }, &world).await.err().unwrap();
    assert!(refused.to_string().contains("at most 5"), "{refused}");
}
