//! `tollway signer` as an operator uses it.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use super::paid::{plain, process};
use super::*;

fn tollway(arguments: &[&str], config: Option<&Path>, input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollway"));
    command.arg("signer").args(arguments).env("SEED", SEED).env("KEYS", format!("serve:{SECRET}"));
    command.env_remove("TOLLWAY_CONFIG");
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    for said in [&output.stdout, &output.stderr] {
        let said = String::from_utf8_lossy(said);
        assert!(!said.contains(SEED) && !said.contains(SECRET), "{said}");
    }
    output
}

fn json_of(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn a_dry_run_says_what_would_be_decided_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("signer.yaml");
    std::fs::write(&config, file(dir.path()).to_string()).unwrap();
    let request = dir.path().join("request.json");
    std::fs::write(&request, Ask::good(5, 100).body()).unwrap();
    for _ in 0..2 {
        let output = tollway(&["--dry-run", request.to_str().unwrap(), "--json"], Some(&config), b"");
        let said = json_of(&output);
        assert!(output.status.success(), "{said}");
        assert_eq!((&said["decision"], &said["day"]["signedWithIt"]), (&json!("signed"), &json!("100")), "{said}");
        assert_eq!(said["transfer"]["payTo"], other(2));
    }
    let output = tollway(&["--dry-run", "-", "--json"], Some(&config), &Ask::good(5, 101).body());
    let said = json_of(&output);
    assert_eq!((output.status.code(), &said["reason"]), (Some(1), &json!("amount_too_large")), "{said}");
    let output = tollway(&["--dry-run", "-"], Some(&config), b"{}");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("refused (malformed_request)"));

    let output = tollway(&["--check", "--json"], Some(&config), b"");
    let said = json_of(&output);
    assert!(output.status.success() && said.to_string().contains(&own()), "{said}");
    assert!(said.to_string().contains("made at the first start") && !dir.path().join("signer.key.pem").exists());
    assert!(!said.to_string().contains("100 signed"), "a dry run counted: {said}");

    let output = tollway(&["--check"], None, b"");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("tollway init signer"));
}

#[tokio::test]
async fn it_tells_how_it_is_and_ends_when_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, _, probe) = process(dir.path(), file(dir.path()), SEED).await;
    let client = plain(&machine::world().0);
    let at = |path: &str| format!("http://127.0.0.1:{probe}{path}");
    let (status, live) = get(&client, &at("/livez"), None).await.unwrap();
    assert_eq!((status, live.as_str()), (200, "ok\n"));
    let (_, health) = get(&client, &at("/healthz"), None).await.unwrap();
    let health: Value = serde_json::from_str(&health).unwrap();
    assert_eq!((&health["status"], &health["signing"]), (&json!("ok"), &json!("ready")), "{health}");
    assert_eq!(health["networks"]["stellar:testnet"], "ready");
    // The private port signs nothing.
    assert_eq!(get(&client, &at("/address?network=stellar%3Atestnet"), Some(SECRET)).await.unwrap().0, 404);
    let ended = Command::new("kill").args(["-TERM", &child.0.id().to_string()]).status().unwrap();
    assert!(ended.success());
    until("the process ends", || {
        let done = child.0.try_wait().unwrap();
        async move { done.is_some_and(|status| status.success()) }
    })
    .await;
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    assert!(log.contains("fingerprint"), "{log}");
}
