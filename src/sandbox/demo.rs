//! `tollway sandbox --demo`: an agent over real HTTP. It searches, reads, pays, asks for the same again, goes over its
//! budget and holds on to an old version; what came of it is checked against the chain, against the gate's claims, and
//! against what the server behind it has counted.

use serde_json::json;
use serde_json::value::RawValue;
use stellar_xdr::{ReadXdr, ScSymbol, ScVal, WriteXdr};

use super::backends::{Backends, StartError};
use super::chain::{NETWORK, USDC};
use super::mcp_client::{McpClient, McpClientError};
use super::soroban::{Soroban, SorobanError, XDR};
use super::start::Running;
use crate::gate::claims::{ClaimError, State};
use crate::http::Client;
use crate::json::{self as strict, member, string};

#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error("{step}: {source}")]
    Agent { step: &'static str, source: McpClientError },
    #[error("{step}: the answer has no {what}")]
    Shape { step: &'static str, what: &'static str },
    #[error("the chain could not be read: {0}")]
    Chain(#[from] SorobanError),
    #[error("the gate's claims could not be read: {0}")]
    Claims(#[from] ClaimError),
    #[error(transparent)]
    Sandbox(#[from] StartError),
}

/// What the demo found.
pub struct Report {
    /// The one document for standard output.
    pub document: Box<RawValue>,
    /// What was not as it should be, a sentence each.
    pub problems: Vec<String>,
}

const TOOL: &str = "get_weather";
const EXPENSIVE: &str = "run_deep_research";
const CITY: &str = "San Francisco";

struct Step<'a> {
    agent: &'a McpClient,
    say: &'a dyn Fn(&str),
}

/// `say` gets the progress, one line at a time.
pub async fn run(sandbox: &Running, http: Client, say: &dyn Fn(&str)) -> Result<Report, DemoError> {
    let chain = Soroban::new(http.clone(), sandbox.backends.rpc_url.clone());
    let agent = McpClient::new(http, &sandbox.agent_url, Some(sandbox.agent_key()));
    let step = Step { agent: &agent, say };
    let start = chain.latest_ledger().await?;
    let before = balances(sandbox, &chain).await?;
    say(&format!(
        "seller: {}, a server that knows nothing of payments behind tollway gate",
        sandbox.backends.seller_url
    ));
    say(&format!("balances: payer {}, seller {}", usdc(before.0), usdc(before.1)));

    let search = step.ask("search", "x402_search_resources", &json!({"query": "weather city", "type": "mcp"})).await?;
    let reference = reference_of(&search, TOOL).ok_or(DemoError::Shape { step: "search", what: TOOL })?;
    say(&format!("search: found {TOOL}"));
    let get = step.ask("get", "x402_get_resource", &json!({"ref": reference})).await?;
    let version = text(&get, &["wrapper", "versionHash"]);
    let version = version.ok_or(DemoError::Shape { step: "get", what: "wrapper.versionHash" })?;
    let price = sandbox.backends.seller.price(TOOL).unwrap_or_default();
    say(&format!("get: version {}, price {}", &version.chars().take(12).collect::<String>(), usdc(price.into())));

    let purchase = |reference: &str, maximum: u64, version: Option<&str>, key: &str| {
        let mut call = json!({
            "ref": reference,
            "network": NETWORK,
            "scheme": "exact",
            "asset": USDC,
            "maxAtomicAmount": maximum.to_string(),
            "arguments": {"city": CITY},
            "idempotencyKey": key,
        });
        if let Some(version) = version {
            call["expectedVersionHash"] = json!(version);
        }
        call
    };
    let bought = purchase(&reference, price, Some(&version), "demo-first-purchase");
    let (counted, ran) = (sandbox.backends.seller.calls(), sandbox.backends.seller.server.runs());
    let call = step.ask("call", "x402_call_resource", &bought).await?;
    let paid_for = |answer: &RawValue| {
        let transaction = text(answer, &["receipt", "transaction"]).unwrap_or_else(|| "none".into());
        format!("{} ({})", content_text(answer), &transaction.chars().take(12).collect::<String>())
    };
    say(&format!("call: paid {}: {}", usdc(price.into()), paid_for(&call)));
    let replay = step.ask("replay", "x402_call_resource", &bought).await?;
    say(&format!("replay: the same key again: {}", paid_for(&replay)));
    let spent = sandbox.backends.seller.calls();

    let research = step.ask("over budget", "x402_search_resources", &json!({"query": "research paper"})).await?;
    let expensive =
        reference_of(&research, EXPENSIVE).ok_or(DemoError::Shape { step: "over budget", what: EXPENSIVE })?;
    let dear = sandbox.backends.seller.price(EXPENSIVE).unwrap_or_default();
    let mut over = purchase(&expensive, dear, None, "demo-over-the-budget");
    over["arguments"] = json!({"topic": "payment channels"});
    let over = step.ask("over budget", "x402_call_resource", &over).await?;
    let over = text(&over, &["code"]).unwrap_or_default();
    say(&format!("over budget: {} for {EXPENSIVE}: {over}", usdc(dear.into())));

    sandbox.backends.change_price(TOOL, price + 2_000)?;
    let stale = purchase(&reference, price + 2_000, Some(&version), "demo-an-old-version");
    let stale = step.ask("stale", "x402_call_resource", &stale).await?;
    let stale = text(&stale, &["code"]).unwrap_or_default();
    say(&format!("stale: the price rose to {}, the version is the old one: {stale}", usdc((price + 2_000).into())));

    let after = balances(sandbox, &chain).await?;
    say(&format!("balances: payer {}, seller {}", usdc(after.0), usdc(after.1)));
    let transfers = transfers(sandbox, &chain, start).await?;

    let mut problems = Vec::new();
    let mut check = |right: bool, problem: String| {
        if !right {
            problems.push(problem);
        }
    };
    let receipt = member(&call, "receipt");
    let code = text(&call, &["code"]).map_or_else(String::new, |code| format!(" ({code})"));
    let settled = text(&call, &["receipt", "status"]).as_deref() == Some("settled");
    check(settled, format!("the call has no settled receipt{code}"));
    let amount = text(&call, &["receipt", "settledAmount"]);
    check(amount.as_deref() == Some(&price.to_string()), format!("the receipt says {amount:?} for {price}"));
    check(content_text(&call).contains(CITY), "the call has no output of the tool".into());
    let same = |name: &str| match (member(&call, name), member(&replay, name)) {
        (Some(first), Some(second)) => strict::equal(first, second),
        _ => false,
    };
    check(same("receipt"), "the replay has another receipt than the call".into());
    check(same("content"), "the replay has another content than the call".into());
    check(over == "BUDGET_EXCEEDED", format!("the call over the budget ended with {over:?}"));
    check(stale == "RESOURCE_STALE", format!("the call with an old version ended with {stale:?}"));
    let price = i128::from(price);
    check(before.0 - after.0 == price, format!("the payer paid {} instead of {price}", before.0 - after.0));
    check(after.1 - before.1 == price, format!("the seller got {} instead of {price}", after.1 - before.1));
    let transaction = text(&call, &["receipt", "transaction"]).unwrap_or_default();
    check(
        transfers.len() == 1 && transfers[0].0 == transaction && transfers[0].1 == Some(price),
        format!("the chain has {} transfers, the receipt names {transaction:?}: {transfers:?}", transfers.len()),
    );
    let (unpaid, paid) = (spent.unpaid - counted.unpaid, spent.paid - counted.paid);
    check((unpaid, paid) == (1, 1), format!("the seller saw {unpaid} unpaid and {paid} paid calls instead of 1 and 1"));
    let paid = sandbox.backends.seller.calls().paid - counted.paid;
    check(paid == 1, format!("{paid} payments reached the seller in all"));
    let ran = sandbox.backends.seller.server.runs() - ran;
    check(ran == 1, format!("the server behind the gate ran {ran} times"));
    let claims = sandbox.backends.seller.gate.claims().list(&State::ALL, 100).await?;
    let settled = claims.len() == 1 && claims.iter().all(|claim| claim.state == State::Settled);
    check(settled, format!("the gate has {} claims instead of the one that is settled", claims.len()));
    check(receipt.is_some(), "the call has no receipt".into());

    let shown = |answer: &RawValue| {
        strict::raw(&std::collections::BTreeMap::from(
            ["content", "receipt"].map(|name| (name, member(answer, name).unwrap_or(RawValue::NULL).to_owned())),
        ))
    };
    let document = Document {
        search: &search,
        get: &get,
        call: shown(&call),
        replay: shown(&replay),
        over_budget: json!({"code": over}),
        stale: json!({"code": stale}),
        chain: json!({
            "payerBefore": before.0.to_string(),
            "payerAfter": after.0.to_string(),
            "sellerBefore": before.1.to_string(),
            "sellerAfter": after.1.to_string(),
        }),
    };
    Ok(Report { document: strict::raw(&document), problems })
}

#[derive(serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    search: &'a RawValue,
    get: &'a RawValue,
    call: Box<RawValue>,
    replay: Box<RawValue>,
    over_budget: serde_json::Value,
    stale: serde_json::Value,
    /// Atomic units.
    chain: serde_json::Value,
}

impl Step<'_> {
    /// The tool's `structuredContent`, output or error.
    async fn ask(
        &self,
        step: &'static str,
        tool: &str,
        arguments: &serde_json::Value,
    ) -> Result<Box<RawValue>, DemoError> {
        let result = self.agent.call_tool(tool, arguments, &json!({}), &[]).await;
        let result = result.map_err(|source| DemoError::Agent { step, source })?;
        let output = member(&result, "structuredContent");
        let output = output.ok_or(DemoError::Shape { step, what: "structuredContent" })?.to_owned();
        if let Some(code) = text(&output, &["code"]) {
            let message = text(&output, &["message"]).unwrap_or_default();
            (self.say)(&format!("{step}: {tool} answers {code}: {message}"));
        }
        Ok(output)
    }
}

/// The string at the end of a path of members.
fn text(value: &RawValue, path: &[&str]) -> Option<String> {
    let end = path.iter().try_fold(value, |value, name| member(value, name))?;
    string(end).map(|text| text.into_owned())
}

/// The `ref` of the first hit that is this tool.
fn reference_of(search: &RawValue, tool: &str) -> Option<String> {
    let hits = member(search, "resources").and_then(strict::elements)?;
    hits.into_iter().find_map(|hit| {
        let path = ["resource", "extensions", "bazaar", "info", "input", "toolName"];
        (text(hit, &path).as_deref() == Some(tool)).then(|| text(hit, &["wrapper", "ref"])).flatten()
    })
}

fn content_text(answer: &RawValue) -> String {
    let blocks = member(answer, "content").and_then(strict::elements).unwrap_or_default();
    blocks.first().and_then(|block| text(block, &["text"])).unwrap_or_default()
}

/// Of payer and seller, in atomic units, as the chain's RPC tells them.
async fn balances(sandbox: &Running, chain: &Soroban) -> Result<(i128, i128), SorobanError> {
    let Some(asset) = Backends::trustline() else { return Ok((0, 0)) };
    let payer = chain.trustline(&sandbox.backends.payer, &asset).await?;
    let seller = chain.trustline(&sandbox.backends.pay_to, &asset).await?;
    Ok((payer.unwrap_or_default().into(), seller.unwrap_or_default().into()))
}

/// Hash and amount of each transfer from the payer to the seller since `start`.
async fn transfers(
    sandbox: &Running,
    chain: &Soroban,
    start: u32,
) -> Result<Vec<(String, Option<i128>)>, SorobanError> {
    let address = |id: &stellar_xdr::AccountId| ScVal::Address(stellar_xdr::ScAddress::Account(id.clone()));
    let name = ScSymbol("transfer".try_into().unwrap_or_default());
    let topics = [ScVal::Symbol(name), address(&sandbox.backends.payer), address(&sandbox.backends.pay_to)];
    let mut topics: Vec<String> = topics.iter().filter_map(|topic| topic.to_xdr_base64(XDR).ok()).collect();
    topics.push("**".into());
    let events = chain.events(start, USDC, &topics).await?;
    let amount = |value: &str| match ScVal::from_xdr_base64(value, XDR) {
        Ok(ScVal::I128(amount)) => Some(i128::from(&amount)),
        _ => None,
    };
    Ok(events.into_iter().map(|event| (event.tx_hash, amount(&event.value))).collect())
}

fn usdc(atomic: i128) -> String {
    let whole = crate::money::Amount::from_i128(atomic).map(|amount| amount.to_decimal(7));
    format!("{} USDC", whole.unwrap_or_else(|| atomic.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::machine;
    use crate::sandbox::backends::{self, Options};
    use crate::sandbox::start::start;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_demo_ends_as_it_should() {
        let (world, _) = machine::world();
        let sandbox = start(Options::default(), &world).await.unwrap();
        let report = run(&sandbox, backends::client(&world).unwrap(), &|line| eprintln!("{line}")).await.unwrap();
        assert!(report.problems.is_empty(), "{:?}\n{}", report.problems, report.document.get());
        let names: Vec<_> = strict::members(&report.document).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["search", "get", "call", "replay", "overBudget", "stale", "chain"]);
    }
}
