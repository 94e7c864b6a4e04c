//! The official client of the HTTP+SSE transport, with each of its messages to the next replica.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use super::{ALICE, Replica, ring};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_works_over_one_replica_and_in_turns_over_three() {
    let ring = ring();
    let replicas = [Replica::of(&ring).await, Replica::of(&ring).await, Replica::of(&ring).await];
    let urls: Vec<String> = replicas.iter().map(|replica| format!("http://{}", replica.addr)).collect();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
    assert!(folder.join("node_modules").exists(), "run: npm ci --prefix tests/interop");
    for urls in [&urls[..1], &urls[..]] {
        let client = tokio::process::Command::new("node")
            .arg("sse-client.mjs")
            .arg(json!({"replicas": urls, "token": ALICE, "calls": 12}).to_string())
            .current_dir(&folder)
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(Duration::from_secs(60), client).await.unwrap().unwrap();
        assert!(output.status.success(), "{output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["protocol"], "2024-11-05", "{said}");
        assert_eq!((&said["tools"], &said["stray"]), (&json!(["echo"]), &json!([])), "{said}");
        let expected: Vec<Value> = (0..12).map(|n| json!({"n": n})).collect();
        assert_eq!(said["results"], json!(expected), "{said}");
        // initialize, initialized, tools/list and the calls
        assert_eq!(said["posted"], 15, "{said}");
    }
    assert_eq!(replicas[0].fixture.log().iter().filter(|line| *line == "called echo").count(), 24);
    assert!(replicas[1].fixture.log().is_empty() && replicas[2].fixture.log().is_empty());
}
