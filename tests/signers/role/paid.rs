//! A payment through an agent server and a `tollway signer` process, over HTTPS, on the real Soroban host.

use std::process::{Child, Command, Stdio};

use serde_json::value::RawValue;
use tollway::agent::server::Server;
use tollway::config::{self, Transport};
use tollway::ledger::{Filter, State};
use tollway::mcp::{Handler as _, Progress, RequestContext, Revision};
use tollway::sandbox::backends::{Backends, Options};
use tollway::sandbox::chain::{self, NETWORK, USDC};

use super::tls::{authority, write};
use super::*;

/// Ended with the test.
pub struct Process(pub Child);
impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// `tollway signer` with this file, once its probe says that it is ready.
pub async fn process(directory: &Path, mut file: Value, seed: &str) -> (Process, u16, u16) {
    let (port, probe) = (free_port(), free_port());
    file["port"] = port.into();
    file["probe_port"] = probe.into();
    let path = directory.join("signer.yaml");
    std::fs::write(&path, file.to_string()).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_tollway"))
        .args(["signer", "--config"])
        .arg(&path)
        .env("SEED", seed)
        .env("KEYS", format!("serve:{SECRET}"))
        .env("TOLLWAY_LOG", "info")
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(directory.join("log")).unwrap())
        .spawn()
        .unwrap();
    let process = Process(child);
    let client = plain(&machine::world().0);
    let url = format!("http://127.0.0.1:{probe}/readyz");
    until("the signer is ready", || async { get(&client, &url, None).await.is_ok_and(|(status, _)| status == 200) })
        .await;
    (process, port, probe)
}

pub fn plain(world: &World) -> Client {
    Client::new(world.clone(), http::tls(None).unwrap(), Destination::Operator, http::Limits::default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_through_serve_and_a_signer_process_settles_on_the_chain() {
    let world = machine::world().0;
    let stop = CancellationToken::new();
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(100)), ..chain::Options::default() };
    let backends = Backends::start(&Options { chain, ..Options::default() }, &world, &stop).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let seed = backends.network.account("payer").secret();
    let mut signer = file(dir.path());
    // Who has no certificate of this authority gets no further than the handshake.
    let clients = authority();
    let (certificate, key) = clients.leaf();
    let path = |name: &str| dir.path().join(name);
    for (name, text) in [("clients.ca", &clients.pem), ("client.crt", &certificate), ("client.key", &key)] {
        write(&path(name), text);
    }
    signer["tls"]["client_ca_file"] = json!(path("clients.ca"));
    signer["networks"] = json!({NETWORK: {
        "rpc_urls": [backends.rpc_url], "min_ledger_seconds": 0.01, "max_ledgers_ahead": 150,
        "assets": [{
            "asset": USDC, "recipients": [backends.pay_to.to_string()],
            "per_signature_max_atomic": "10000", "day_max_atomic": "20000",
        }],
    }});
    let (_process, port, probe) = process(dir.path(), signer, &seed).await;

    let file = json!({
        "facilitator": {"base_url": backends.facilitator_url},
        "signer": {
            "mode": "external", "base_url": format!("https://localhost:{port}"), "auth_header_env": "AUTH",
            "client_certificate_file": path("client.crt"), "client_key_file": path("client.key"),
        },
        "networks": {NETWORK: {
            "rpc_urls": [backends.rpc_url], "max_authorization_seconds": 600, "min_ledger_seconds": 0.01,
        }},
        "budget": {"path": dir.path().join("ledger.sqlite"), "limits": [{
            "network": NETWORK, "asset": USDC, "unlimited": true,
        }]},
        "network_security": {"allow_insecure_local": true, "ca_file": dir.path().join("signer.crt.pem")},
    });
    let environment = Environment(BTreeMap::from([("AUTH", format!("Bearer {SECRET}"))]));
    let config = config::parse(&file.to_string(), Some(Transport::Stdio), &environment).unwrap();
    let server = Server::start(&config, &world).await.unwrap();
    let call = async |name: &str, arguments: Value| -> Value {
        let params = RawValue::from_string(json!({"name": name, "arguments": arguments}).to_string()).unwrap();
        let context = RequestContext {
            revision: Revision::V2025_11_25,
            agent: None,
            claims: Default::default(),
            session: Some("session".into()),
            cancelled: CancellationToken::new(),
            meta: None,
            progress: Progress::default(),
        };
        let result = server.tools.call(&context, "tools/call", Some(&params)).await.unwrap();
        serde_json::from_str::<Value>(result.get()).unwrap()["structuredContent"].clone()
    };
    let found = call("x402_search_resources", json!({"query": "weather city"})).await;
    let weather =
        found["resources"].as_array().unwrap().iter().find(|r| r.to_string().contains("get_weather")).unwrap();
    let buy = async |city: &str| {
        call(
            "x402_call_resource",
            json!({
                "ref": weather["wrapper"]["ref"], "network": NETWORK, "scheme": "exact", "asset": USDC,
                "maxAtomicAmount": "20000", "arguments": {"city": city},
                "idempotencyKey": format!("the-weather-of-{city}"),
            }),
        )
        .await
    };
    for city in ["Bern", "Oslo"] {
        let bought = buy(city).await;
        assert_eq!(bought["receipt"]["status"], "settled", "{bought}");
    }
    // The agent server's own limits allow more; the signer's day does not, and nothing of it is held for long.
    let refused = buy("Rome").await;
    assert_eq!(refused["code"], "PAYMENT_REJECTED", "{refused}");
    assert!(refused.to_string().contains("day_cap"), "{refused}");
    let rows = server.paying.as_ref().unwrap().ledger.list(&Filter { limit: 9, ..Filter::default() }).await.unwrap();
    assert_eq!(rows.iter().filter(|row| row.state == State::Settled).count(), 2, "{rows:?}");
    assert!(rows.iter().any(|row| row.state == State::Released), "{rows:?}");
    let transfers = backends.network.transfers();
    assert_eq!(transfers.len(), 2);
    assert!(transfers.iter().all(|t| t.payer == backends.payer.to_string() && t.amount == 10_000));

    let (_, metrics) = get(&plain(&world), &format!("http://127.0.0.1:{probe}/metrics"), None).await.unwrap();
    for line in [
        "tollway_signer_decisions_total{decision=\"signed\",reason=\"\"} 2",
        "tollway_signer_decisions_total{decision=\"refused\",reason=\"day_cap\"} 1",
        "tollway_ready 1",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}: {metrics}");
    }
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    assert!(log.contains("decision=\"signed\"") && log.contains("day_cap"), "{log}");
    assert!(!log.contains(seed.as_str()) && !log.contains(SECRET), "a secret is in the log");
    stop.cancel();
}
