//! Named keys, from the environment and from a file that changes.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use http::StatusCode;
use serde_json::json;

use super::{ALICE, BOB, Front, parse};
use crate::secrets;

const CAROL: &str = "carol-carol-carol-carol-carol-carol";

/// Atomically, with the mode that a mounted secret should have.
fn write(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o440)).unwrap();
    std::fs::rename(new, path).unwrap();
}

#[tokio::test]
async fn a_file_of_keys_is_read_again_when_it_changes_and_a_broken_one_keeps_the_old_keys() {
    let logs = secrets::logs();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    write(&path, &format!("# the keys\nalice:{ALICE}\n"));
    let front = Front::start(json!({"http": {"api_keys_file": path, "api_keys_reload_ms": 100}}), &[]).await;
    assert_eq!(front.ask(Some(ALICE)).await.status, StatusCode::OK);
    assert_eq!(front.ask(Some(BOB)).await.status, StatusCode::UNAUTHORIZED);
    let session = front.session(ALICE).await;

    // Rotation: both keys of one name are good, and a session goes on under the new one.
    write(&path, &format!("alice:{ALICE}\nalice:{BOB}\n"));
    front.until(BOB, StatusCode::OK).await;
    assert_eq!(front.ask(Some(ALICE)).await.status, StatusCode::OK);
    assert_eq!(front.within(&session, BOB, "tools/list", json!({})).await.status, StatusCode::OK);
    write(&path, &format!("alice:{BOB}\n"));
    front.until(ALICE, StatusCode::UNAUTHORIZED).await;

    for (n, broken) in ["alice:short-0123", "", "# nothing\n"].iter().enumerate() {
        let errors = || logs.text().matches("the bearer keys could not be read again").count();
        let before = errors();
        write(&path, broken);
        while errors() == before {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert_eq!(front.ask(Some(BOB)).await.status, StatusCode::OK, "{n}");
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(front.ask(Some(BOB)).await.status, StatusCode::OK);
    write(&path, &format!("carol:{CAROL}"));
    front.until(CAROL, StatusCode::OK).await;
    front.until(BOB, StatusCode::UNAUTHORIZED).await;
    let logs = logs.text();
    for secret in [ALICE, BOB, CAROL, "short-0123"] {
        assert!(!logs.contains(secret), "{secret} is in the log");
    }
}

/// The kubelet writes a new directory and swaps the link `..data` to it; the file's own link never changes.
#[tokio::test]
async fn a_mounted_secret_is_read_again_when_its_link_is_swapped() {
    let dir = tempfile::tempdir().unwrap();
    let version = |name: &str, key: &str| {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        write(&dir.path().join(name).join("keys"), &format!("alice:{key}"));
        std::os::unix::fs::symlink(name, dir.path().join("..new")).unwrap();
        std::fs::rename(dir.path().join("..new"), dir.path().join("..data")).unwrap();
    };
    version("..1", ALICE);
    let path = dir.path().join("keys");
    std::os::unix::fs::symlink("..data/keys", &path).unwrap();
    let front = Front::start(json!({"http": {"api_keys_file": path, "api_keys_reload_ms": 100}}), &[]).await;
    assert_eq!(front.ask(Some(ALICE)).await.status, StatusCode::OK);
    version("..2", BOB);
    front.until(BOB, StatusCode::OK).await;
    assert_eq!(front.ask(Some(ALICE)).await.status, StatusCode::UNAUTHORIZED);
}

#[test]
fn a_file_that_others_can_read_is_no_file_of_keys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    write(&path, &format!("alice:{ALICE}"));
    let read = |env: &[(&'static str, &str)]| parse(json!({"http": {"api_keys_file": path}}), env);
    assert!(read(&[]).unwrap().auth.is_on());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    let refused = read(&[]).unwrap_err();
    assert!(refused.field == "http.api_keys_file" && refused.problem.contains("444"), "{refused}");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read(&[]).unwrap_err().field, "http.api_keys_file");
    let key = format!("alice:{ALICE}");
    assert_eq!(read(&[("MCP_SERVER_API_KEYS", &key)]).unwrap_err().field, "http.api_keys_file");
}
