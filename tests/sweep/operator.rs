//! `tollway reservations`, as an operator types it.

use std::time::Duration;

use serde_json::{Value, json};
use tollway::ledger::Ledger as _;
use tollway::sandbox::chain::USDC;

use super::bench::{Bench, Doubt};
use crate::pay::bench::{NETWORK, PRICE};

const REASON: &str = "the archive shows no such transfer";

struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Said {
    fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{}", self.err);
        serde_json::from_str(&self.out).unwrap()
    }

    #[track_caller]
    fn refused(&self, code: i32, word: &str) {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{}", self.err);
        assert!(self.err.contains(word), "{word:?} is not in {:?}", self.err);
    }
}

/// The command of an operator whose configuration names these RPCs.
struct Operator<'a> {
    bench: &'a Bench,
    config: std::path::PathBuf,
}

impl Operator<'_> {
    fn new<'a>(bench: &'a Bench, name: &str, rpc_urls: &[String]) -> Operator<'a> {
        let config = bench.path.with_file_name(name);
        let file = json!({
            "facilitator": {"base_url": "http://127.0.0.1:9"},
            "networks": {NETWORK: {"enabled": true, "rpc_urls": rpc_urls, "min_ledger_seconds": 0.01}},
            "budget": {"store": "sqlite", "path": bench.path},
            "network_security": {"allow_insecure_local": true},
        });
        std::fs::write(&config, file.to_string()).unwrap();
        Operator { bench, config }
    }

    async fn honest(bench: &Bench) -> Operator<'_> {
        Operator::new(bench, "honest.yaml", &[bench.node().await.to_string()])
    }

    async fn says(&self, arguments: &[&str]) -> Said {
        let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollway"))
            .arg("--config")
            .arg(&self.config)
            .arg("reservations")
            .args(arguments)
            .env_remove("DATABASE_URL")
            .env_remove("FACILITATOR_URL")
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(Duration::from_secs(60), output).await.unwrap().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }

    async fn resolve(&self, doubt: &Doubt, arguments: &[&str]) -> Said {
        let id = doubt.id.to_hex();
        self.says(&[&["resolve", &id[..12]], arguments].concat()).await
    }

    /// The words that the payment's history keeps of this event.
    async fn note(&self, doubt: &Doubt, event: &str) -> (String, String) {
        let shown = self.says(&["show", &doubt.id.to_hex(), "--json"]).await.json();
        let found = shown["events"].as_array().unwrap().iter().find(|e| e["event"] == event).unwrap();
        (found["evidence"].as_str().unwrap().to_owned(), found["note"].as_str().unwrap_or_default().to_owned())
    }

    async fn finish(&self) {
        self.bench.audit().await;
        assert_eq!(self.says(&["audit", "--json"]).await.json()["clean"], true);
    }
}

#[tokio::test]
async fn a_transaction_settles_only_the_payment_whose_authorization_it_carries() {
    let bench = Bench::new().await;
    let operator = Operator::honest(&bench).await;
    let (paid, other) = (bench.doubt("operator-tx-00000").await, bench.doubt("operator-tx-00001").await);
    let (hash, foreign) = (bench.settle(&paid).await, bench.settle(&other).await);
    let with = |hash: &str| ["--settled".to_owned(), "--transaction".to_owned(), hash.to_owned(), "--json".to_owned()];
    for (transaction, word) in [
        (foreign.clone(), "does not carry this payment's authorization"),
        ("0".repeat(64), "no RPC knows this transaction"),
        ("abc".to_owned(), "64 hex digits"),
    ] {
        let arguments = with(&transaction);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        operator.resolve(&paid, &arguments).await.refused(1, word);
    }
    assert_eq!(bench.state(&paid).await.0, "in_doubt");
    // However it is spelled.
    let arguments = with(&hash.to_ascii_uppercase());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let said = operator.resolve(&paid, &arguments).await.json();
    assert_eq!((&said["state"], &said["evidence"]), (&json!("settled"), &json!("chain")), "{said}");
    assert_eq!((&said["transaction"], &said["amount"]), (&json!(hash), &json!(PRICE.to_string())));
    assert_eq!(bench.row(paid.id).await.transaction, Some(hash.clone()));
    let (evidence, note) = operator.note(&paid, "settled").await;
    assert!(evidence == "chain" && note.contains("carries our authorization"), "{note}");
    operator.resolve(&paid, &["--settled", "--transaction", &hash]).await.refused(1, "is settled already");
    // The chain is asked also where only a reason is given, and names the transaction by itself.
    let said = operator.resolve(&other, &["--settled", "--reason", "the explorer shows it", "--json"]).await.json();
    assert_eq!((&said["evidence"], &said["transaction"]), (&json!("chain"), &json!(foreign)));
    operator.finish().await;
}

#[tokio::test]
async fn what_may_still_be_paid_or_was_paid_is_not_released() {
    let bench = Bench::new().await;
    let operator = Operator::honest(&bench).await;
    let (unpaid, paid) = (bench.doubt("operator-free-000").await, bench.doubt("operator-free-001").await);
    let release = ["--released", "--reason", REASON];
    let said = operator.resolve(&unpaid, &release).await;
    said.refused(1, &format!("until ledger {}", unpaid.row.authorization.dead_after));
    let hash = bench.settle(&paid).await;
    operator.resolve(&paid, &release).await.refused(1, &format!("by transaction {hash}"));
    // With the only RPC gone nobody knows whether it is alive.
    let blind = Operator::new(&bench, "blind.yaml", &["http://127.0.0.1:9".to_owned()]);
    blind.resolve(&unpaid, &release).await.refused(1, "may be alive until");
    blind.resolve(&unpaid, &["--settled", "--transaction", &hash]).await.refused(1, "could not be asked");
    assert_eq!((bench.state(&unpaid).await.0, bench.state(&paid).await.0), ("in_doubt", "in_doubt"));
    // The chain's word needs no other.
    bench.close_to(unpaid.row.authorization.dead_after);
    operator.resolve(&unpaid, &["--settled", "--reason", REASON]).await.refused(1, "was never paid");
    let said = operator.resolve(&unpaid, &["--released"]).await;
    assert!(said.code == 0 && said.out.contains("is free again"), "{}{}", said.out, said.err);
    assert_eq!(bench.state(&unpaid).await, ("released", "operator_evidence".to_owned()));
    assert!(operator.note(&unpaid, "released").await.1.contains("never used"));
    operator.resolve(&unpaid, &["--released"]).await.refused(2, "is released already");
    operator.resolve(&unpaid, &release).await.refused(1, "is released already");
    operator.finish().await;
}

#[tokio::test]
async fn without_the_chain_a_written_reason_closes_it_an_hour_after_its_end() {
    let bench = Bench::new().await;
    let (freed, spent) = (bench.doubt("operator-blind-00").await, bench.doubt("operator-blind-01").await);
    let blind = Operator::new(&bench, "blind.yaml", &["http://127.0.0.1:9".to_owned()]);
    // Counting it as spent frees nothing, so it need not wait.
    let said = blind.resolve(&spent, &["--settled", "--reason", "the seller sent an invoice", "--json"]).await.json();
    assert_eq!((&said["evidence"], &said["transaction"]), (&json!("operator"), &Value::Null));
    bench.later(Duration::from_secs(3_700));
    // The ledger's clock is never behind its newest event.
    let third = bench.doubt("operator-blind-02").await;
    blind.resolve(&freed, &["--released"]).await.refused(2, "needs --reason");
    let said = blind.resolve(&freed, &["--released", "--reason", REASON]).await;
    assert_eq!(said.code, 0, "{}", said.err);
    let (evidence, note) = blind.note(&freed, "released").await;
    assert!(evidence == "operator" && note.contains(REASON) && note.contains("proves nothing"), "{note}");
    let shown = blind.says(&["show", &freed.id.to_hex()[..8]]).await;
    assert!(shown.out.contains(REASON), "{}", shown.out);
    blind.resolve(&third, &["--released", "--reason", REASON]).await.refused(1, "may be alive until");
    blind.finish().await;
}

#[tokio::test]
async fn a_payment_that_somebody_works_on_is_left_to_them() {
    let bench = Bench::new().await;
    let operator = Operator::honest(&bench).await;
    let doubt = bench.doubt("operator-lease-00").await;
    assert_eq!(bench.ledger.take_due(10, 600_000).await.unwrap().len(), 1);
    operator.resolve(&doubt, &["--settled", "--reason", REASON]).await.refused(1, "somebody works on this payment");
    assert_eq!(operator.says(&["sweep", "--json"]).await.json()["taken"], 0);
    operator.finish().await;
}

#[tokio::test]
async fn wrong_usage_is_said_before_anything_is_opened_or_changed() {
    let bench = Bench::new().await;
    let operator = Operator::honest(&bench).await;
    let doubt = bench.doubt("operator-usage-00").await;
    for (arguments, word) in [
        (&[][..], "--settled|--released"),
        (&["--settled", "--released", "--reason", REASON], "cannot be used with"),
        (&["--released", "--transaction", "ab"], "cannot be used with"),
        (&["--settled"], "--transaction HASH"),
        (&["--released", "--reason", "short"], "10 to 300 characters"),
        (&["--released", "--reason", "two lines\nof words"], "10 to 300 characters"),
    ] {
        operator.resolve(&doubt, arguments).await.refused(2, word);
    }
    for id in ["abc1234", "", "ABCDEF012345", "../../etc", &"a".repeat(65)] {
        let said = operator.says(&["show", id]).await;
        said.refused(2, "8 of ");
    }
    operator.says(&["show", "abcdef012345"]).await.refused(1, "no payment, or more than one");
    assert_eq!(bench.state(&doubt).await.0, "in_doubt");
    let help = operator.says(&["resolve", "--help"]).await;
    assert!(
        help.code == 0 && help.out.contains("Refused while the") && help.out.contains("Exit codes"),
        "{}",
        help.out
    );
    operator.finish().await;
}

#[tokio::test]
async fn the_list_says_what_where_and_how_old_and_sweep_asks_now() {
    let bench = Bench::new().await;
    let operator = Operator::honest(&bench).await;
    let doubt = bench.doubt("operator-list-000").await;
    let list = operator.says(&["list"]).await;
    let lines: Vec<&str> = list.out.lines().collect();
    assert!(lines[0].contains("AGE") && lines[0].contains("NETWORK") && lines[0].contains("ASSET"), "{}", list.out);
    assert!(lines[1].contains("USDC") && lines[1].contains(NETWORK) && lines[1].contains("no_answer"), "{}", list.out);
    let list = operator.says(&["list", "--state", "in_doubt", "--json"]).await.json();
    assert_eq!((&list["payments"][0]["asset"], list["payments"].as_array().unwrap().len()), (&json!(USDC), 1));
    assert!(list["payments"][0]["ageSeconds"].as_u64().unwrap() < 600);
    bench.close_to(doubt.row.authorization.dead_after);
    let swept = operator.says(&["sweep", "--json"]).await.json();
    assert_eq!((&swept["taken"], &swept["released"], &swept["failed"]), (&json!(1), &json!(1), &json!(0)), "{swept}");
    let swept = operator.says(&["sweep"]).await;
    assert!(swept.code == 0 && swept.out.starts_with("0 payments were due"), "{}", swept.out);
    operator.finish().await;
}
