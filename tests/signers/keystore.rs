//! `tollway keystore` as an operator uses it, and what of it the configuration takes.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const KEY: &str = "a55a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a";
const SEED: &str = "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X";
const ADDRESS: &str = "GDVEU3DD4KOFECV66VIHWEZOYX4ZKR3WV27L464SIIPOU2IUI3JCZA57";

fn tollway(arguments: &[&str], key: Option<&str>, input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollway"));
    command.args(arguments).env_remove("TOLLWAY_KEYSTORE_KEY").env_remove("TOLLWAY_CONFIG");
    if let Some(key) = key {
        command.env("TOLLWAY_KEYSTORE_KEY", key);
    }
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    // It may end without reading.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    for said in [&output.stdout, &output.stderr] {
        let said = String::from_utf8_lossy(said);
        assert!(!said.contains(SEED) && !said.contains(KEY), "{arguments:?}: {said}");
    }
    output
}

fn out(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A refusal: exit code and words.
fn refused(output: &Output, code: i32, word: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(word) && output.stdout.is_empty(), "{said}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_seed_from_standard_input_becomes_a_private_file_that_pays_from_its_address() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keystore.json");
    let made = tollway(&["keystore", "create", "--out", text(&path)], Some(KEY), &format!("{SEED}\n"));
    assert_eq!(out(&made), format!("{ADDRESS}\n"));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let file = std::fs::read_to_string(&path).unwrap();
    assert!(!file.contains(SEED));

    // Shown without the key.
    assert_eq!(out(&tollway(&["keystore", "show", text(&path)], None, "")), format!("{ADDRESS}\n"));
    let shown: Value =
        serde_json::from_str(&out(&tollway(&["keystore", "show", "--json", text(&path)], None, ""))).unwrap();
    assert_eq!((shown["address"].as_str(), shown["keystore"].as_str()), (Some(ADDRESS), Some(text(&path))));

    // Never overwritten.
    refused(&tollway(&["keystore", "create", "--out", text(&path)], Some(KEY), SEED), 2, "never overwritten");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), file);

    // `tollway check` opens it with its key, and with no other.
    let config = dir.path().join("tollway.yaml");
    let ledger = dir.path().join("ledger.sqlite");
    let yaml = format!(
        "facilitator: {{base_url: 'https://c.example'}}\nsigner: {{mode: encrypted-key, keystore_path: {}}}\nbudget: {{path: {}}}\n",
        text(&path),
        text(&ledger)
    );
    std::fs::write(&config, yaml).unwrap();
    let check = ["check", "--json", "--config", text(&config)];
    let checked: Value = serde_json::from_str(&out(&tollway(&check, Some(KEY), ""))).unwrap();
    let signer = checked["findings"].as_array().unwrap().iter().find(|f| f["what"] == "signer").unwrap();
    assert!(signer["detail"].as_str().unwrap().contains(ADDRESS), "{checked}");
    refused(&tollway(&check, Some(&"1".repeat(64)), ""), 2, "does not open");
    refused(&tollway(&check, None, ""), 2, "TOLLWAY_KEYSTORE_KEY is not set");
    let lost = dir.path().join("lost.yaml");
    std::fs::write(&lost, std::fs::read_to_string(&config).unwrap().replace("keystore.json", "other.json")).unwrap();
    let check_lost = ["check", "--json", "--config", text(&lost)];
    refused(&tollway(&check_lost, Some(KEY), ""), 2, "make it with tollway keystore create --out");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    refused(&tollway(&check, Some(KEY), ""), 2, "chmod 600");
    refused(&tollway(&["keystore", "show", text(&path)], None, ""), 1, "chmod 600");
}

#[test]
fn a_generated_seed_is_shown_by_its_address_alone() {
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str| -> Value {
        let path = dir.path().join(name);
        let arguments = ["keystore", "create", "--out", text(&path), "--generate", "--json"];
        serde_json::from_str(&out(&tollway(&arguments, Some(KEY), ""))).unwrap()
    };
    let (one, two) = (made("one.json"), made("two.json"));
    assert_ne!(one["address"], two["address"]);
    for made in [one, two] {
        let address = made["address"].as_str().unwrap();
        assert!(address.starts_with('G') && address.len() == 56);
        assert_eq!(made.as_object().unwrap().len(), 2);
        let shown = out(&tollway(&["keystore", "show", made["keystore"].as_str().unwrap()], None, ""));
        assert_eq!(shown.trim(), address);
    }
}

#[test]
fn what_makes_no_keystore_is_said_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keystore.json");
    let create = ["keystore", "create", "--out", text(&path)];
    refused(&tollway(&create, None, SEED), 2, "openssl rand -hex 32");
    refused(&tollway(&create, Some("too short"), SEED), 2, "TOLLWAY_KEYSTORE_KEY is not 32 bytes");
    refused(&tollway(&create, Some(KEY), &SEED[1..]), 2, "not a Stellar secret seed");
    for nothing in ["", "\n"] {
        refused(&tollway(&create, Some(KEY), nothing), 2, "no seed was given");
    }
    for weak in ["0".repeat(64), "f".repeat(64)] {
        refused(&tollway(&create, Some(&weak), SEED), 2, "one byte 32 times");
    }
    let nowhere = dir.path().join("typo/keystore.json");
    refused(&tollway(&["keystore", "create", "--out", text(&nowhere)], Some(KEY), SEED), 2, "mkdir -m 700");
    refused(&tollway(&create, Some(KEY), ADDRESS), 2, "not a Stellar secret seed");
    let named = [&create[..], &["--key-env", "OTHER_KEY"]].concat();
    refused(&tollway(&named, Some(KEY), SEED), 2, "OTHER_KEY is not set");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a file was left");

    // A seed is no argument, and is not repeated where it was given as one.
    refused(&tollway(&[&create[..], &[SEED]].concat(), Some(KEY), ""), 2, "a seed is no argument");
    refused(&tollway(&[&create[..], &["--seed", SEED]].concat(), Some(KEY), ""), 2, "unexpected argument '--seed'");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a file was left");
    let help = out(&tollway(&["keystore", "create", "--help"], None, ""));
    assert!(help.contains("openssl rand -hex 32") && help.contains("standard input"), "{help}");
}
