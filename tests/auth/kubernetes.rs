//! Service accounts, against a small API server that speaks TokenReview over HTTPS.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::routing::post;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};
use tollway::mcp::serve::serve;
use tollway::ports::machine;
use tollway::sandbox::tls::Authority;

use super::issuer::{Issuer, Key, claims, now};
use super::{ALICE, Front, pass};
use crate::secrets;

const OWN_TOKEN: &str = "the-token-of-this-very-process";

/// What the API server says next: a status and a TokenReview's `status`.
type Says = (StatusCode, Value);

struct Cluster {
    url: String,
    says: Mutex<Says>,
    asked: AtomicUsize,
    seen: Mutex<Vec<Value>>,
}

struct Running {
    cluster: Arc<Cluster>,
    dir: tempfile::TempDir,
    _stop: DropGuard,
}

impl Running {
    async fn start() -> Running {
        let (world, _) = machine::world();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        let (says, asked, seen) = (Mutex::new(account("agents", "alice")), AtomicUsize::new(0), Mutex::default());
        let cluster = Arc::new(Cluster { url, says, asked, seen });
        let state = cluster.clone();
        let review = move |headers: HeaderMap, body: axum::Json<Value>| async move { state.review(&headers, body.0) };
        let app = axum::Router::new().route("/apis/authentication.k8s.io/v1/tokenreviews", post(review));
        let authority = Authority::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), authority.ca_pem()).unwrap();
        std::fs::write(dir.path().join("token"), OWN_TOKEN).unwrap();
        let stop = CancellationToken::new();
        let listener = authority.listener(machine::TcpListener(listener));
        world.spawn.clone().spawn(Box::pin(serve(listener, world, app, stop.clone())));
        Running { cluster, dir, _stop: stop.drop_guard() }
    }

    fn section(&self) -> Value {
        let path = |name: &str| self.dir.path().join(name);
        json!({"auth": {"kubernetes": {"audiences": ["tollway"], "api_server": self.cluster.url,
            "ca_file": path("ca.pem"), "token_file": path("token")}}})
    }

    fn says(&self, says: Says) {
        *self.cluster.says.lock().unwrap() = says;
    }

    fn asked(&self) -> usize {
        self.cluster.asked.load(Ordering::SeqCst)
    }
}

impl Cluster {
    fn review(&self, headers: &HeaderMap, review: Value) -> (StatusCode, axum::Json<Value>) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        assert_eq!(headers["authorization"], format!("Bearer {OWN_TOKEN}"));
        assert_eq!(
            (&review["kind"], &review["apiVersion"]),
            (&json!("TokenReview"), &json!("authentication.k8s.io/v1"))
        );
        let (status, said) = self.says.lock().unwrap().clone();
        self.seen.lock().unwrap().push(review["spec"].clone());
        let mut answer = review;
        if status.is_success() {
            answer["status"] = said;
        } else {
            // As the real one does it, the token included.
            answer = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": format!("no: {}", answer["spec"]["token"]), "reason": "x", "code": status.as_u16()});
        }
        (status, axum::Json(answer))
    }
}

fn user(name: &str) -> Says {
    let status = json!({"authenticated": true, "audiences": ["tollway"], "user": {"username": name, "uid": "u"}});
    (StatusCode::CREATED, status)
}

fn account(namespace: &str, name: &str) -> Says {
    user(&format!("system:serviceaccount:{namespace}:{name}"))
}

/// What a service account's token looks like; only the API server can tell whether it is one.
fn token(n: i64) -> String {
    let claims = claims(json!({"iss": "https://kubernetes.default.svc", "exp": now() + 1000 + n}));
    Key::ed().token(&json!({"alg": "RS256", "kid": "cluster"}), &claims)
}

#[tokio::test]
async fn a_service_account_is_known_by_its_name_and_the_api_server_is_asked_once_in_a_while() {
    let logs = secrets::logs();
    let cluster = Running::start().await;
    let front = Front::start(cluster.section(), &[]).await;
    let (one, renewed) = (token(1), token(2));
    let session = front.session(&one).await;
    for _ in 0..5 {
        assert_eq!(front.within(&session, &one, "tools/list", json!({})).await.status, StatusCode::OK);
    }
    assert_eq!(cluster.asked(), 1);
    let spec = json!({"token": one, "audiences": ["tollway"]});
    assert_eq!(*cluster.cluster.seen.lock().unwrap(), [spec]);
    assert_eq!(front.within(&session, &renewed, "tools/list", json!({})).await.status, StatusCode::OK);
    cluster.says(account("agents", "bob"));
    assert_eq!(front.within(&session, &token(3), "tools/list", json!({})).await.status, StatusCode::NOT_FOUND);
    assert_eq!(cluster.asked(), 3);

    // Taken back: good for a moment, refused after it.
    cluster.says((StatusCode::CREATED, json!({"authenticated": false, "user": {}, "error": "[expired]"})));
    assert_eq!(front.ask(Some(&one)).await.status, StatusCode::OK);
    pass(Duration::from_secs(21)).await;
    for _ in 0..3 {
        let answer = front.ask(Some(&one)).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
        assert!(answer.header("www-authenticate").contains("invalid_token"), "{answer:?}");
    }
    assert_eq!(cluster.asked(), 4);
    cluster.says(account("agents", "alice"));
    pass(Duration::from_secs(6)).await;
    assert_eq!(front.ask(Some(&one)).await.status, StatusCode::OK);
    let logs = logs.text();
    for secret in [one.as_str(), renewed.as_str(), OWN_TOKEN] {
        assert!(!logs.contains(secret), "{secret} is in the log");
    }
}

#[tokio::test]
async fn who_is_no_service_account_for_this_audience_is_refused() {
    let cluster = Running::start().await;
    let front = Front::start(cluster.section(), &[]).await;
    let audiences = |audiences: Value| {
        let (status, mut said) = account("agents", "alice");
        said["audiences"] = audiences;
        (status, said)
    };
    let created = StatusCode::CREATED;
    for (n, says) in [
        audiences(json!(["https://kubernetes.default.svc"])),
        audiences(json!([])),
        audiences(Value::Null),
        user("alice"),
        user("system:node:alice"),
        user("system:serviceaccount:agents"),
        user("system:serviceaccount::alice"),
        user("system:serviceaccount:agents:"),
        user("system:serviceaccount:agents:a:b"),
        user(""),
        account(&"n".repeat(60), &"a".repeat(60)),
        (created, json!({"authenticated": true, "audiences": ["tollway"]})),
        (
            created,
            json!({"authenticated": true, "audiences": ["tollway"], "error": "x",
            "user": {"username": "system:serviceaccount:agents:alice"}}),
        ),
        (created, json!({})),
    ]
    .into_iter()
    .enumerate()
    {
        let shown = format!("{says:?}");
        cluster.says(says);
        let n = i64::try_from(n).unwrap();
        assert_eq!(front.ask(Some(&token(n))).await.status, StatusCode::UNAUTHORIZED, "{shown}");
    }
    let before = cluster.asked();
    for other in ["not-a-jwt-but-long-enough-to-be-a-key", "a.b.c", ALICE] {
        assert_eq!(front.ask(Some(other)).await.status, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(cluster.asked(), before, "what is no such token is shown to nobody");
}

#[tokio::test]
async fn an_api_server_that_cannot_be_asked_is_503_and_is_not_remembered() {
    let logs = secrets::logs();
    let cluster = Running::start().await;
    let front = Front::start(cluster.section(), &[("MCP_SERVER_API_KEYS", &format!("alice:{ALICE}"))]).await;
    let token = token(1);
    for status in [StatusCode::SERVICE_UNAVAILABLE, StatusCode::FORBIDDEN, StatusCode::UNPROCESSABLE_ENTITY] {
        cluster.says((status, Value::Null));
        let answer = front.ask(Some(&token)).await;
        assert_eq!((answer.status, answer.header("retry-after")), (StatusCode::SERVICE_UNAVAILABLE, "1"), "{status}");
    }
    assert_eq!(front.ask(Some(ALICE)).await.status, StatusCode::OK, "keys need no API server");
    cluster.says(account("agents", "alice"));
    assert_eq!(front.ask(Some(&token)).await.status, StatusCode::OK);
    assert!(!logs.text().contains(&token), "the token is in the log");
    assert!(logs.text().contains("system:auth-delegator"));

    // Nobody there, and somebody else there.
    let mut gone = cluster.section();
    gone["auth"]["kubernetes"]["api_server"] = json!("https://localhost:1");
    assert_eq!(Front::start(gone, &[]).await.ask(Some(&token)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    let stranger = Running::start().await;
    let mut section = cluster.section();
    section["auth"]["kubernetes"]["api_server"] = json!(stranger.cluster.url);
    let front = Front::start(section, &[]).await;
    assert_eq!(front.ask(Some(&token)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(stranger.asked(), 0, "a server with another authority's certificate saw the token");
}

#[tokio::test]
async fn check_says_who_may_ask_and_whether_issuer_and_api_server_answer() {
    let cluster = Running::start().await;
    let key = Key::ed();
    let issuer = Issuer::start(&[("k", &key)]).await;
    let mut file = cluster.section();
    file["auth"]["jwt"] = issuer.section(json!({}))["auth"]["jwt"].clone();
    file["facilitator"] = json!({"base_url": "http://127.0.0.1:1"});
    file["transport"] = json!("streamable-http");
    let path = cluster.dir.path().join("tollway.yaml");
    std::fs::write(&path, file.to_string()).unwrap();
    let check = async || {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollway"));
        command.args(["check", "--online", "--json", "--config"]).arg(&path);
        let output = command.env("HOME", cluster.dir.path()).output().await.unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        let findings = said["findings"].as_array().unwrap().clone();
        move |what: &str| {
            let of: Vec<String> = findings
                .iter()
                .filter(|finding| finding["what"] == what)
                .map(|finding| {
                    format!("{} {}", finding["verdict"].as_str().unwrap(), finding["detail"].as_str().unwrap())
                })
                .collect();
            of.join("; ")
        }
    };
    let found = check().await;
    let callers = found("callers");
    assert!(callers.contains("as jwt:<sub>") && callers.contains("system:serviceaccount:"), "{callers}");
    assert_eq!((found("token issuer"), found("TokenReview")), ("ok 1 usable keys".into(), "ok answers".into()));
    issuer.answer(None);
    cluster.says((StatusCode::FORBIDDEN, Value::Null));
    let found = check().await;
    assert_eq!(found("token issuer"), "failed it answers 500");
    assert!(found("TokenReview").contains("system:auth-delegator"), "{}", found("TokenReview"));
}
