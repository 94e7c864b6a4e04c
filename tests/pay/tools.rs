//! The tools as an agent sees them, beside the paid call.

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::mcp::{Handler, RequestContext};

use super::bench::{self, ASSET, Bench, NETWORK, PRICE, said, structured};
use super::lookup::KEY;
use super::server::Reply;

async fn ask(bench: &Bench, tool: &str, arguments: Value) -> Value {
    let result = bench.tool(tool, arguments, CancellationToken::new()).await.unwrap();
    serde_json::from_str(structured(&result).get()).unwrap()
}

async fn tools_of(tools: &AgentTools, context: &RequestContext) -> Value {
    let listed: Box<RawValue> = tools.call(context, "tools/list", None).await.unwrap();
    serde_json::from_str(listed.get()).unwrap()
}

#[tokio::test]
async fn five_tools_with_a_signer_and_two_without() {
    let bench = Bench::new().await;
    let context = bench.context(CancellationToken::new());
    let listed = tools_of(&bench.tools, &context).await;
    let names: Vec<_> = listed["tools"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["x402_search_resources", "x402_get_resource", "x402_call_resource", "x402_get_payment", "x402_get_budget"]
    );
    for tool in listed["tools"].as_array().unwrap() {
        let spends = tool["name"] == "x402_call_resource";
        assert_eq!(tool["annotations"]["readOnlyHint"], !spends);
        assert_eq!(tool["description"].as_str().unwrap().contains("SPENDS MONEY"), spends);
        assert_eq!(tool["inputSchema"]["additionalProperties"], false);
        assert_eq!(tool["outputSchema"]["anyOf"].as_array().unwrap().len(), 2);
    }

    let alone = AgentTools::new(bench.catalog_client(), None, None);
    let listed = tools_of(&alone, &context).await;
    assert_eq!(listed["tools"].as_array().unwrap().len(), 2);
    let params = RawValue::from_string(json!({"name": "x402_call_resource", "arguments": {}}).to_string()).unwrap();
    let refused = alone.call(&context, "tools/call", Some(&params)).await.unwrap_err();
    assert_eq!(refused.code, -32602, "a tool that does not exist is no tool result");
}

#[tokio::test]
async fn an_ended_session_is_remembered_in_the_ledger_for_every_process() {
    let bench = Bench::new().await;
    let later = tollway::ports::machine::world().0.unix_ms() + 60_000;
    assert!(bench.tools.ends_sessions() && !bench.tools.session_ended("session-a").await);
    bench.tools.end_session("session-a", later).await.unwrap();
    assert!(bench.tools.session_ended("session-a").await && !bench.tools.session_ended("session-b").await);
    assert!(bench.ledger.real.session_ended("session-a").await.unwrap());
    let alone = AgentTools::new(bench.catalog_client(), None, None);
    assert!(!alone.ends_sessions(), "without a ledger there is no place for it");
}

#[tokio::test]
async fn every_answer_fits_the_schema_that_its_tool_publishes() {
    let bench = Bench::new().await;
    let listed = tools_of(&bench.tools, &bench.context(CancellationToken::new())).await;
    let paid = bench.call(json!({"idempotencyKey": KEY})).await;
    let quote = bench.call(json!({"maxAtomicAmount": "0", "arguments": {}})).await;
    let payment = ask(&bench, "x402_get_payment", json!({"idempotencyKey": KEY})).await;
    let budget = ask(&bench, "x402_get_budget", json!({})).await;
    let wrong = ask(&bench, "x402_search_resources", json!({"limit": 0})).await;
    let got = ask(&bench, "x402_get_resource", json!({"ref": bench.reference()})).await;
    for (tool, answer) in [(2, paid), (2, quote), (3, payment), (4, budget), (0, wrong), (1, got)] {
        let schemas = listed["tools"][tool]["outputSchema"]["anyOf"].as_array().unwrap();
        let fits = |schema: &Value| {
            schema["required"].as_array().unwrap().iter().all(|name| answer.get(name.as_str().unwrap()).is_some())
        };
        assert_eq!(schemas.iter().filter(|schema| fits(schema)).count(), 1, "{answer}");
    }
}

#[tokio::test]
async fn search_hands_on_the_catalogs_bytes_and_counts_what_it_skips() {
    let bench = Bench::new().await;
    let item = bench.listing().raw.get().replacen('{', "{ \"x-odd\" : 1.0,", 1);
    let page = format!(
        r#"{{"x402Version":2,"items":[{item},{{"resource":7}}],"pagination":{{"limit":20,"offset":0,"total":2}}}}"#
    );
    bench.says(|s| s.catalog = Some(Reply::json(page)));
    let result = bench.tool("x402_search_resources", json!({}), CancellationToken::new()).await.unwrap();
    assert!(structured(&result).get().contains(&item), "{}", result.get());
    let answer: Value = serde_json::from_str(structured(&result).get()).unwrap();
    let wrapper = &answer["resources"][0]["wrapper"];
    assert_eq!((&wrapper["provenance"], &wrapper["status"]), (&json!("seller_declared"), &json!("active")));
    assert_eq!(wrapper["offers"][0]["display"], "0.001 USDC");
    assert_eq!(answer["skipped"][0]["count"], 1);

    let empty = r#"{"x402Version":2,"items":[],"pagination":{"limit":20,"offset":0,"total":0}}"#;
    bench.says(|s| s.catalog = Some(Reply::json(empty)));
    assert_eq!(said(&ask(&bench, "x402_search_resources", json!({})).await), ("NO_RESULTS", "empty", "no"));
    for (argument, value) in [("query", json!("x".repeat(513))), ("limit", json!(201)), ("type", json!("ftp"))] {
        let answer = ask(&bench, "x402_search_resources", json!({argument: value})).await;
        assert_eq!(said(&answer), ("INVALID_ARGUMENT", argument, "no"));
    }
}

#[tokio::test]
async fn get_marks_another_version_as_stale() {
    let bench = Bench::new().await;
    let get = |expected: String| {
        let arguments = json!({"ref": bench.reference(), "expectedVersionHash": expected});
        ask(&bench, "x402_get_resource", arguments)
    };
    let same = get(bench.listing().version_hash).await;
    assert_eq!(same["wrapper"]["status"], "active");
    let other = get("0".repeat(64)).await;
    assert_eq!(other["wrapper"]["status"], "stale");
    assert!(other["wrapper"]["warnings"].as_array().unwrap().contains(&json!("version_changed")));
    assert!(bench.seller.requests().is_empty(), "no upstream was given, so nobody is asked");
}

#[tokio::test]
async fn a_payment_is_found_by_its_owner_only() {
    let bench = Bench::new().await;
    let paid = bench.call(json!({"idempotencyKey": KEY})).await;
    let id = paid["paymentIdentifier"].clone();
    for arguments in [json!({"paymentIdentifier": id}), json!({"idempotencyKey": KEY})] {
        let payment = ask(&bench, "x402_get_payment", arguments).await;
        assert_eq!((&payment["state"], &payment["receipt"]), (&json!("settled"), &paid["receipt"]));
        assert_eq!(payment["next"]["action"], "call_again");
    }
    let mut context = bench.context(CancellationToken::new());
    context.agent = Some("another".parse().unwrap());
    let arguments = json!({"name": "x402_get_payment", "arguments": {"paymentIdentifier": id}});
    let params = RawValue::from_string(arguments.to_string()).unwrap();
    let result = bench.tools.call(&context, "tools/call", Some(&params)).await.unwrap();
    let answer: Value = serde_json::from_str(structured(&result).get()).unwrap();
    assert_eq!(said(&answer), ("NO_RESULTS", "payment_not_found", "no"));
    let both = ask(&bench, "x402_get_payment", json!({"paymentIdentifier": id, "idempotencyKey": KEY})).await;
    assert_eq!(said(&both).0, "INVALID_ARGUMENT");
}

#[tokio::test]
async fn after_an_answered_keyless_payment_the_same_call_is_not_recommended() {
    let bench = Bench::new().await;
    let result = bench.tool("x402_call_resource", bench.arguments(json!({})), CancellationToken::new()).await.unwrap();
    let paid: Value = serde_json::from_str(structured(&result).get()).unwrap();
    let next = async || {
        let payment = ask(&bench, "x402_get_payment", json!({"paymentIdentifier": paid["paymentIdentifier"]})).await;
        (payment["next"]["action"].clone(), payment["next"]["text"].as_str().unwrap().to_owned())
    };
    assert_eq!(next().await.0, "call_again");
    bench.tools.delivered(&bench.context(CancellationToken::new()), "tools/call", &result).await;
    while !bench.row(&paid).await.answered {
        tokio::task::yield_now().await;
    }
    let (action, text) = next().await;
    assert_eq!(action, "done", "the same call would pay again: {text}");
    assert!(text.contains("new payment"), "{text}");
}

#[tokio::test]
async fn blocks_that_a_client_would_choke_on_stay_in_the_structured_content() {
    let bench = Bench::new().await;
    let image = json!({"type": "image", "mimeType": "image/png", "data": "QUJD"});
    let link = json!({"type": "resource_link", "uri": "a:b", "name": "n"});
    let blocks = json!([7, "x", {"type": "image"}, {"type": "hologram", "data": "x"}, {"type": "resource"}, image, link,
        {"type": "image", "mimeType": "image/png", "data": "QUJD", "annotations": 1},
        {"type": "audio", "mimeType": "audio/wav", "data": "no base64!"}]);
    let paid = json!({"content": blocks, "isError": null});
    bench.says(|s| s.paid = Some(bench::result(&bench::with_receipt(paid, &bench::receipt()))));
    let arguments = bench.arguments(json!({}));
    let result = bench.tool("x402_call_resource", arguments, CancellationToken::new()).await.unwrap();
    let result: Value = serde_json::from_str(result.get()).unwrap();
    assert_eq!(result["content"].as_array().unwrap()[1..], [image, link], "{result}");
    assert_eq!(result["structuredContent"]["content"], blocks);
    assert!(result["structuredContent"].get("isError").is_none(), "the published schema has a boolean there");
}

#[tokio::test]
async fn the_budget_shows_limits_use_and_funds() {
    let bench = Bench::new().await;
    bench.call(json!({})).await;
    bench.says(|s| s.paid = Some(Reply::Cut));
    bench.call(json!({"arguments": {"city": "Thun"}})).await;
    let budget = ask(&bench, "x402_get_budget", json!({})).await;
    let line = &budget["budgets"][0];
    assert_eq!((&line["network"], &line["asset"]), (&json!(NETWORK), &json!(ASSET)));
    assert_eq!(line["perCall"], json!({"atomic": "50000", "display": "0.005 USDC"}));
    let day = &line["day"];
    assert_eq!((&day["spent"]["atomic"], &day["held"]["atomic"]), (&json!("10000"), &json!("10000")));
    assert_eq!(day["remaining"]["atomic"], (100_000 - 2 * PRICE).to_string());
    assert_eq!(line["payer"]["address"], bench.payer);
    assert_eq!(line["payer"]["balance"]["atomic"], "980000", "the remembered balance, less what was signed since");
    assert!(line["resetsAt"].as_str().unwrap().ends_with("T00:00:00Z"));
}

#[tokio::test]
async fn the_text_says_the_same_as_the_structured_content() {
    let bench = Bench::new().await;
    let image = json!({"type": "image", "mimeType": "image/png", "data": "QUJD"});
    let paid = json!({"content": [{"type": "text", "text": "sunny"}, image]});
    bench.says(|s| s.paid = Some(bench::result(&bench::with_receipt(paid, &bench::receipt()))));
    let arguments = bench.arguments(json!({}));
    let result = bench.tool("x402_call_resource", arguments, CancellationToken::new()).await.unwrap();
    let result: Value = serde_json::from_str(result.get()).unwrap();
    assert_eq!(result["content"][1], image);
    let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(text["receipt"], result["structuredContent"]["receipt"]);
    assert!(!text.to_string().contains("QUJD"));
    assert_eq!(result["structuredContent"]["content"][1], image);
}
