//! The probes, the health of payments, and every metric.

use std::collections::BTreeSet;

use serde_json::json;
use tollway::ledger::{Ledger as _, Limit};
use tollway::telemetry::FAMILIES;

use super::{KEY, Serve, exchange, until};
use crate::pay::bench::NETWORK;
use crate::pay::server::Reply;

const TABLE: &str = include_str!("../../docs/metrics.md");

/// Name, type, labels, meaning of each row.
fn table() -> Vec<[String; 4]> {
    let rows = TABLE.lines().filter_map(|line| {
        let cells: Vec<String> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(plain).collect();
        cells.first()?.starts_with("tollway_").then(|| cells.try_into().unwrap())
    });
    rows.collect()
}

fn plain(cell: &str) -> String {
    cell.trim().replace('`', "")
}

#[test]
fn the_table_of_metrics_is_the_program() {
    let program: Vec<[String; 4]> = FAMILIES
        .iter()
        .map(|family| {
            let it = family.described();
            [it.name.to_owned(), it.kind.to_owned(), it.labels.join(", "), it.help.to_owned()]
        })
        .collect();
    let rows: Vec<String> = program
        .iter()
        .map(|[name, kind, labels, help]| {
            let labels = if labels.is_empty() { String::new() } else { format!("`{}`", labels.replace(", ", "`, `")) };
            format!("| `{name}` | {kind} | {labels} | {help} |")
        })
        .collect();
    assert_eq!(table(), program, "write:\n{}", rows.join("\n"));
    let names: BTreeSet<&str> = program.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(names.len(), program.len(), "a name is there twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paid_call_is_seen_in_every_metric_and_no_label_names_who_or_what() {
    let serve = Serve::start(json!({})).await;
    for path in ["/livez", "/readyz"] {
        assert_eq!(serve.probe(path).await.status, 200, "{path}");
    }
    let session = serve.session().await.unwrap();
    let paid = serve.post(Some(&session), &serve.paid_call(json!({}))).await.unwrap();
    let receipt = &paid.json()["result"]["structuredContent"]["receipt"];
    assert_eq!(receipt["status"], "settled", "{}", paid.body);
    for (change, reason) in [(json!({"bogus": 1}), "other"), (json!({"network": 1}), "network")] {
        let refused = serve.post(Some(&session), &serve.paid_call(change)).await.unwrap();
        assert!(refused.body.contains("INVALID_ARGUMENT"), "{reason}: {}", refused.body);
    }
    let dear = serve.paid_call(json!({"maxAtomicAmount": "1", "arguments": {"city": "Basel"}}));
    assert!(serve.post(Some(&session), &dear).await.unwrap().body.contains("BUDGET_EXCEEDED"));
    let stranger = "POST /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(exchange(&serve.public, stranger).await.unwrap().status, 401);

    let wanted = [
        "tollway_outcomes_total{code=\"OK\",reason=\"paid\"} 1".to_owned(),
        "tollway_outcomes_total{code=\"INVALID_ARGUMENT\",reason=\"other\"} 1".to_owned(),
        "tollway_outcomes_total{code=\"INVALID_ARGUMENT\",reason=\"network\"} 1".to_owned(),
        "tollway_outcomes_total{code=\"BUDGET_EXCEEDED\",reason=\"max_atomic_amount\"} 1".to_owned(),
        "tollway_requests_total{method=\"initialize\",revision=\"none\",status=\"2xx\"} 1".to_owned(),
        "tollway_requests_total{method=\"tools/call\",revision=\"2025-11-25\",status=\"2xx\"} 4".to_owned(),
        "tollway_requests_total{method=\"unread\",revision=\"none\",status=\"4xx\"} 1".to_owned(),
        "tollway_auth_failures_total{reason=\"unauthorized\"} 1".to_owned(),
        "tollway_signer_calls_total{result=\"signed\"} 1".to_owned(),
        "tollway_catalog_calls_total{result=\"ok\"} 2".to_owned(),
        "tollway_calls_running 0".to_owned(),
        "tollway_ready 1".to_owned(),
        "tollway_ledger_up 1".to_owned(),
        "tollway_holds{state=\"reserved\"} 0".to_owned(),
        "tollway_payments_degraded{reason=\"rpc_unreachable\"} 0".to_owned(),
        format!("tollway_rpc_calls_total{{network=\"{NETWORK}\",result=\"refused\"}} 0"),
        format!("tollway_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")),
    ];
    let text = until("every counter", async || {
        let text = serve.probe("/metrics").await.body;
        wanted.iter().all(|line| text.lines().any(|there| there == line)).then_some(text)
    });
    let text = match tokio::time::timeout(std::time::Duration::from_secs(15), text).await {
        Ok(text) => text,
        Err(_) => {
            let text = serve.probe("/metrics").await.body;
            let missing: Vec<_> = wanted.iter().filter(|line| !text.lines().any(|there| there == *line)).collect();
            panic!("{missing:#?} are not in\n{text}");
        }
    };
    for phase in ["resolve", "probe", "guard", "reserve", "sign", "prepare", "pay", "record"] {
        let count = format!("tollway_phase_seconds_count{{phase=\"{phase}\"}} ");
        assert!(text.lines().any(|line| line.starts_with(&count) && line != format!("{count}0")), "{phase}\n{text}");
    }
    let given: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let table = table();
    let described: BTreeSet<&str> = table.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(given, described, "what /metrics gives is what docs/metrics.md has");
    let id = paid.json()["result"]["structuredContent"]["paymentIdentifier"].as_str().unwrap()[..16].to_owned();
    for word in ["research", "weather", "127.0.0.1", "http:", "bogus", KEY, &session, &id, &serve.bench.payer] {
        assert!(!text.contains(word), "{word:?} is in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_payments_depend_on_degrades_them_and_does_not_unready_discovery() {
    let serve = Serve::start(json!({})).await;
    let expected = json!({"status": "ok", "discovery": "ready", "payments": "ready", "networks": [NETWORK]});
    assert_eq!(serve.health().await, expected);
    serve.bench.says(|says| {
        says.rpc.insert("getLatestLedger", Reply::status(503, "an internal word"));
    });
    let health = until("the chain's absence", async || {
        let health = serve.health().await;
        (health["payments"] == "degraded").then_some(health)
    })
    .await;
    assert_eq!(health["reason"], "rpc_unreachable", "{health}");
    assert_eq!(serve.probe("/readyz").await.status, 200);
    assert!(serve.probe("/metrics").await.body.contains("tollway_payments_degraded{reason=\"rpc_unreachable\"} 1"));
    serve.bench.says(|says| {
        says.rpc.clear();
    });
    until("its return", async || (serve.health().await["payments"] == "ready").then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_go_and_come_while_it_serves_are_seen() {
    let serve = Serve::start(json!({})).await;
    let operator = serve.elsewhere().await;
    let given = operator.limits().await.unwrap();
    assert_eq!((given.len(), &serve.health().await["payments"]), (1, &json!("ready")));
    operator.replace_limits("file", &[]).await.unwrap();
    let health = until("the absence of limits", async || {
        let health = serve.health().await;
        (health["payments"] == "degraded").then_some(health)
    })
    .await;
    assert_eq!(health["reason"], "no_limit", "{health}");
    assert_eq!(serve.probe("/readyz").await.status, 200);
    operator.set_limit(&Limit { source: "operator".to_owned(), ..given[0].clone() }).await.unwrap();
    until("their return", async || (serve.health().await["payments"] == "ready").then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ledger_that_does_not_answer_unreadies_and_its_process_stays_alive() {
    let serve = Serve::start(json!({})).await;
    // Another program has the file for itself: what is written waits, what is read is not there.
    let away = serve.ledger.with_extension("away");
    let database = std::fs::read(&serve.ledger).unwrap();
    std::fs::write(&away, database).unwrap();
    for file in ["ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"] {
        let file = serve.ledger.with_file_name(file);
        if file.exists() {
            std::fs::write(&file, vec![0xa5; 8192]).unwrap();
        }
    }
    let unready = until("an unready server", async || {
        let answer = serve.probe("/readyz").await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(unready.json(), json!({"status": "unready", "reason": "ledger_unreachable"}));
    assert_eq!(serve.probe("/livez").await.status, 200);
    assert_eq!(serve.health().await["reason"], "ledger_unreachable");
    assert!(serve.probe("/metrics").await.body.contains("tollway_ledger_up 0"));
}
