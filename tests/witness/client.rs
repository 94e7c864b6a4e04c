//! The official MCP client with the configurations that the sandbox prints: it validates every structured result
//! against the output schema that we publish.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tollway::ports::machine::world;
use tollway::sandbox::chain::{NETWORK, USDC};
use tollway::sandbox::start::start;

use super::{every_transfer_has_its_row, fast};

const KEY: &str = "the-official-client-1";
const TOOLS: [&str; 5] =
    ["x402_search_resources", "x402_get_resource", "x402_call_resource", "x402_get_payment", "x402_get_budget"];

/// The client in a process of its own.
struct Official {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Official {
    /// `entry` is one of `mcpServers`.
    async fn connect(entry: &Value) -> Official {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
        assert!(folder.join("node_modules").exists(), "run: npm ci --prefix tests/interop");
        let mut child = Command::new("node")
            .arg("mcp-client.mjs")
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut client = Official { child, stdin, lines: BufReader::new(stdout).lines() };
        let started = client.ask(entry).await;
        assert_eq!(started["protocol"], "2025-11-25");
        assert_eq!(started["server"]["name"], "tollway");
        let tools = started["tools"].as_array().unwrap();
        let names: Vec<_> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
        assert_eq!(names, TOOLS);
        for tool in tools {
            let name = tool["name"].as_str().unwrap();
            assert_eq!(started["refuses"][name], true, "the schema of {name} takes anything");
            let spends = name == "x402_call_resource";
            assert_eq!(tool["annotations"]["readOnlyHint"], !spends, "{tool}");
            assert_eq!(tool["description"].as_str().unwrap().starts_with("SPENDS MONEY"), spends, "{tool}");
        }
        client
    }

    async fn ask(&mut self, line: &Value) -> Value {
        self.stdin.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        self.read().await
    }

    async fn read(&mut self) -> Value {
        let line = tokio::time::timeout(Duration::from_secs(120), self.lines.next_line()).await.unwrap().unwrap();
        serde_json::from_str(&line.expect("the client has ended")).unwrap()
    }

    /// The structured result, which the client has found to be as its schema says.
    async fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let answer = self.ask(&json!({"tool": tool, "arguments": arguments})).await;
        assert!(answer["thrown"].is_null(), "{tool}: {answer}");
        let result = &answer["result"];
        let output = result["structuredContent"].clone();
        assert_eq!(answer["validated"], json!([{"valid": true, "code": output["code"]}]), "{tool}: {answer}");
        let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(text, output, "{tool}: the text says something else");
        assert_eq!(result["isError"] == true, output["code"].is_string(), "{tool}: {result}");
        output
    }

    async fn refused(&mut self, tool: &str, arguments: Value) -> (String, Value) {
        let output = self.call(tool, arguments).await;
        assert_eq!(output["schemaVersion"], 1, "{tool}: {output}");
        (output["code"].as_str().unwrap().to_owned(), output["details"].clone())
    }

    /// The `ref` of one of the demo seller's tools, found by words.
    async fn find(&mut self, words: &str, tool: &str) -> String {
        let found = self.call("x402_search_resources", json!({"query": words, "type": "mcp"})).await;
        let hits = found["resources"].as_array().unwrap();
        let hit = hits.iter().find(|hit| hit["resource"]["extensions"]["bazaar"]["info"]["input"]["toolName"] == tool);
        hit.unwrap_or_else(|| panic!("{found}"))["wrapper"]["ref"].as_str().unwrap().to_owned()
    }

    async fn close(mut self) {
        drop(self.stdin);
        let line = tokio::time::timeout(Duration::from_secs(60), self.lines.next_line()).await.unwrap().unwrap();
        assert_eq!(line.as_deref(), Some(r#"{"stray":[]}"#));
        let status = tokio::time::timeout(Duration::from_secs(60), self.child.wait()).await.unwrap().unwrap();
        assert!(status.success(), "{status}");
    }
}

fn purchase(reference: &str, arguments: Value) -> Value {
    json!({
        "ref": reference,
        "network": NETWORK,
        "scheme": "exact",
        "asset": USDC,
        "maxAtomicAmount": "10000",
        "arguments": arguments,
        "idempotencyKey": KEY,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_drives_every_tool_over_http_and_buys_over_stdio() {
    let (world, _) = world();
    let sandbox = start(fast(), &world).await.unwrap();
    let printed = sandbox.client_configuration(env!("CARGO_BIN_EXE_tollway"));

    let mut http = Official::connect(&printed["http"]["mcpServers"]["tollway"]).await;
    let weather = http.find("weather city", "get_weather").await;
    let nothing = json!({"query": "submarine", "payTo": "nobody"});
    assert_eq!(http.refused("x402_search_resources", nothing).await.0, "NO_RESULTS");
    let got = http.call("x402_get_resource", json!({"ref": weather})).await;
    assert_eq!((&got["wrapper"]["status"], &got["wrapper"]["ref"]), (&json!("active"), &json!(weather)));
    assert_eq!(http.refused("x402_get_resource", json!({"ref": "v1.x"})).await.0, "INVALID_ARGUMENT");

    let buy = purchase(&weather, json!({"city": "Bern"}));
    let first = http.call("x402_call_resource", buy.clone()).await;
    assert_eq!((&first["receipt"]["status"], &first["receipt"]["settledAmount"]), (&json!("settled"), &json!("10000")));
    assert!(first["content"][0]["text"].as_str().unwrap().contains("Bern"), "{first}");
    let again = http.call("x402_call_resource", buy.clone()).await;
    assert_eq!(again, first, "the same key is the same payment");

    let mut surprising = buy.clone();
    surprising["surprise"] = json!(true);
    let (code, details) = http.refused("x402_call_resource", surprising).await;
    assert_eq!((code.as_str(), &details["moneyMayHaveMoved"]), ("INVALID_ARGUMENT", &json!("no")));
    let mut dear = purchase(&http.find("research paper", "run_deep_research").await, json!({"topic": "tolls"}));
    dear["maxAtomicAmount"] = json!("50000000");
    dear["idempotencyKey"] = json!("the-official-client-2");
    assert_eq!(http.refused("x402_call_resource", dear).await.0, "BUDGET_EXCEEDED");

    let budget = http.call("x402_get_budget", json!({})).await;
    let line = &budget["budgets"][0];
    assert_eq!((&line["network"], &line["asset"]), (&json!(NETWORK), &json!(USDC)), "{budget}");
    assert_eq!(line["day"]["spent"]["atomic"], "10000", "{budget}");
    let payment = http.call("x402_get_payment", json!({"idempotencyKey": KEY})).await;
    assert_eq!((&payment["state"], &payment["receipt"]), (&json!("settled"), &first["receipt"]));
    let stranger = json!({"idempotencyKey": "the-official-client-9"});
    assert_eq!(http.refused("x402_get_payment", stranger).await.0, "NO_RESULTS");
    assert_eq!(sandbox.backends.network.transfers().len(), 1);

    // Another process with its own ledger: the same key there is another payment.
    let mut stdio = Official::connect(&printed["stdio"]["mcpServers"]["tollway"]).await;
    assert_eq!(stdio.find("weather city", "get_weather").await, weather);
    let second = stdio.call("x402_call_resource", buy.clone()).await;
    assert_eq!((&second["receipt"]["status"], &second["content"]), (&json!("settled"), &first["content"]));
    assert_ne!(second["receipt"]["transaction"], first["receipt"]["transaction"]);
    assert_eq!(stdio.call("x402_call_resource", buy).await, second);
    let payment = stdio.call("x402_get_payment", json!({"idempotencyKey": KEY})).await;
    assert_eq!(payment["receipt"], second["receipt"]);
    assert_eq!(stdio.refused("x402_get_resource", json!({})).await.0, "INVALID_ARGUMENT");
    stdio.close().await;
    http.close().await;

    let ledgers = ["ledger.sqlite", "stdio/ledger.sqlite"];
    assert_eq!(every_transfer_has_its_row(&sandbox, &world, &ledgers).await, 2);
    assert_eq!(sandbox.backends.signer.signatures(), 2);
    // The operator's command on the running server's file comes to the same.
    for configuration in ["tollway.yaml", "stdio.yaml"] {
        let audit = Command::new(env!("CARGO_BIN_EXE_tollway"))
            .arg("--config")
            .arg(sandbox.dir().join(configuration))
            .args(["reservations", "audit", "--json"])
            .output();
        let audit = audit.await.unwrap();
        assert!(audit.status.success(), "{}", String::from_utf8_lossy(&audit.stderr));
        let audit: Value = serde_json::from_slice(&audit.stdout).unwrap();
        assert_eq!((&audit["payments"], &audit["differences"]), (&json!(1), &json!([])), "{audit}");
    }
}
