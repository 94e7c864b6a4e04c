//! Outside witnesses of the local network and of our payments: the official x402 facilitator and client and the
//! official Stellar SDK (`tests/interop`, Node 20).

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use bytes::Bytes;
use ed25519_dalek::Signer as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;
use tollway::chain::NonceReading;
use tollway::chain::stellar::{Credentials, NonceQuestion, Settings, Stellar};
use tollway::http::{Client, Destination, Limits, tls};
use tollway::json;
use tollway::mcp::serve::serve;
use tollway::money::Network;
use tollway::ports::machine::{TcpListener, world};
use tollway::ports::{Listener, World};
use tollway::sandbox::chain::{Account, LocalNetwork, NETWORK, Node, Options, PASSPHRASE, USDC};
use tollway::sandbox::tls::Authority;
use tollway::x402::Offer;

const START: i64 = 50_000_000;
const AMOUNT: i64 = 10_000;

pub struct Scene {
    world: World,
    pub network: LocalNetwork,
    pub payer: Account,
    pub shop: Account,
    pub facilitator: Account,
    pub rpc: String,
    pub rpc_tls: String,
    ca: tempfile::NamedTempFile,
    stop: CancellationToken,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A network with ledgers of 200 ms and one node, over HTTP and HTTPS.
pub async fn scene() -> Scene {
    let (world, _) = world();
    let options = Options { ledger_interval: Some(Duration::from_millis(200)), ..Options::default() };
    let network = LocalNetwork::start(options, world.clone()).unwrap();
    let [payer, shop, facilitator] = ["payer", "shop", "facilitator"].map(|name| network.account(name));
    for account in [&payer, &shop, &facilitator] {
        network.fund(&account.id(), 1_000_000_000);
    }
    network.trust(&payer.id(), START);
    network.trust(&shop.id(), 0);
    let stop = CancellationToken::new();
    let authority = Authority::new().unwrap();
    let (plain, rpc) = listen("http").await;
    start(&world, &network, plain, &stop);
    let (secure, rpc_tls) = listen("https").await;
    start(&world, &network, authority.listener(secure), &stop);
    let ca = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(ca.path(), authority.ca_pem()).unwrap();
    Scene { world, network, payer, shop, facilitator, rpc, rpc_tls, ca, stop }
}

async fn listen(scheme: &str) -> (TcpListener, String) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("{scheme}://127.0.0.1:{}", listener.local_addr().unwrap().port());
    (TcpListener(listener), url)
}

fn start(world: &World, network: &LocalNetwork, listener: impl Listener, stop: &CancellationToken) {
    let router = network.rpc_router(Node::default());
    world.spawn.spawn(Box::pin(serve(listener, world.clone(), router, stop.clone())));
}

impl Scene {
    /// An hour at 5 s a ledger: 720 ledgers, which is more than two minutes here. A minute would be dead in 2.4 s, while
    /// a slow machine still starts Node.
    fn requirements(&self) -> Value {
        json!({
            "scheme": "exact",
            "network": NETWORK,
            "asset": USDC,
            "amount": AMOUNT.to_string(),
            "payTo": self.shop.address(),
            "maxTimeoutSeconds": 3600,
            "extra": {"areFeesSponsored": true},
        })
    }

    /// A payment's transaction, signed by the payer and prepared, as it stands in a payload; and its nonce.
    pub async fn signed(&self, offer: &Value) -> (String, i64) {
        let offer = Offer::parse(&json::raw(offer)).unwrap();
        let stellar = self.stellar(&self.rpc, Credentials::Address);
        let at = stellar.ledger().await.unwrap();
        let draft = stellar.draft(&offer, &self.payer.address(), at).unwrap();
        let nonce = draft.nonce();
        let signature = self.payer.key.sign(&draft.digest()).to_bytes();
        let transaction = stellar.prepare(&draft.attach(&signature).unwrap()).await.unwrap();
        (transaction, nonce)
    }

    pub fn balances(&self) -> (i64, i64) {
        (self.network.balance(&self.payer.id()).unwrap(), self.network.balance(&self.shop.id()).unwrap())
    }

    fn http(&self) -> Client {
        let pem = std::fs::read(self.ca.path()).unwrap();
        Client::new(self.world.clone(), tls(Some(&pem)).unwrap(), Destination::Operator, Limits::default())
    }

    fn stellar(&self, url: &str, credentials: Credentials) -> Stellar {
        let pem = std::fs::read(self.ca.path()).unwrap();
        let http = Client::new(self.world.clone(), tls(Some(&pem)).unwrap(), Destination::Operator, Limits::default());
        let settings = Settings {
            network: NETWORK.parse::<Network>().unwrap(),
            passphrase: PASSPHRASE.into(),
            rpc_urls: vec![url.parse().unwrap()],
            credentials,
            max_authorization_seconds: 3600,
            min_ledger_ms: 50,
        };
        Stellar::new(settings, http, self.world.clone())
    }

    pub fn command(&self, script: &str, args: &[&str], secret: (&str, &Account)) -> Command {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
        assert!(folder.join("node_modules").exists(), "run: npm ci --prefix tests/interop");
        let mut command = Command::new("node");
        command
            .arg(script)
            .args(args)
            .current_dir(folder)
            .env(secret.0, secret.1.secret().as_str())
            .env("NODE_EXTRA_CA_CERTS", self.ca.path())
            // The official packages ask Horizon on the Internet how long a ledger takes; unreachable, they take 5 s.
            .env("HTTPS_PROXY", "http://127.0.0.1:9")
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    pub async fn node(&self, script: &str, args: &[&str], secret: (&str, &Account), input: &Value) -> Output {
        let mut child = self.command(script, args, secret).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.to_string().as_bytes()).await.unwrap();
        tokio::time::timeout(Duration::from_secs(120), child.wait_with_output()).await.unwrap().unwrap()
    }

    async fn settle(&self, payload: &Value) -> Value {
        let both = json!({"paymentPayload": payload, "paymentRequirements": self.requirements()});
        let output = self.node("settle.mjs", &[&self.rpc], ("FACILITATOR_SECRET", &self.facilitator), &both).await;
        parse(&output)
    }
}

fn parse(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_facilitator_settles_our_payment_once() {
    let scene = scene().await;
    let requirements = scene.requirements();
    let offer = Offer::parse(&json::raw(&requirements)).unwrap();
    // Once over each of the two listeners.
    for (round, url) in [&scene.rpc, &scene.rpc_tls].into_iter().enumerate() {
        let stellar = scene.stellar(url, Credentials::Address);
        let at = stellar.ledger().await.unwrap();
        let draft = stellar.draft(&offer, &scene.payer.address(), at).unwrap();
        let (nonce, expiration) = (draft.nonce(), draft.expiration());
        let (payer, pay_to) = (scene.payer.address(), scene.shop.address());
        let question = NonceQuestion {
            payer: &payer,
            pay_to: &pay_to,
            asset: USDC,
            nonce,
            amount: None,
            expiration,
            reserved_at: at.sequence,
            reserved_ms: 0,
        };
        let signature = scene.payer.key.sign(&draft.digest()).to_bytes();
        let signed = draft.attach(&signature).unwrap();
        let transaction = stellar.prepare(&signed).await.unwrap();
        assert_eq!(stellar.nonce_reading(question).await, NonceReading::Open);

        let payload = json!({
            "x402Version": 2,
            "payload": {"transaction": transaction},
            "accepted": requirements,
            "resource": {"url": "mcp://tool/interop"},
        });
        let answer = scene.settle(&payload).await;
        assert_eq!(answer["settle"]["success"], json!(true), "{answer}");
        assert_eq!(answer["settle"]["payer"], json!(payer));
        let moved = AMOUNT * (i64::try_from(round).unwrap() + 1);
        assert_eq!(scene.balances(), (START - moved, moved));
        let transfer = scene.network.transfers().pop().unwrap();
        assert_eq!(
            (transfer.nonce, json!(transfer.transaction)),
            (Some(nonce), answer["settle"]["transaction"].clone())
        );
        let used = NonceReading::Used { ledger: u64::from(transfer.ledger) };
        assert_eq!(stellar.nonce_reading(question).await, used);

        let again = scene.settle(&payload).await;
        assert_eq!(again["verify"]["isValid"], json!(false), "{again}");
        assert_eq!(scene.balances(), (START - moved, moved));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_pays_over_https_and_the_official_sdk_reads_it() {
    let scene = scene().await;
    let output =
        scene.node("client.mjs", &[&scene.rpc_tls], ("PAYER_SECRET", &scene.payer), &scene.requirements()).await;
    let answer = scene.settle(&parse(&output)).await;
    assert_eq!(answer["settle"]["success"], json!(true), "{answer}");
    assert_eq!(scene.balances(), (START - AMOUNT, AMOUNT));

    let args = [scene.rpc.as_str(), &scene.shop.address(), USDC];
    let seen = parse(&scene.node("sdk.mjs", &args, ("UNUSED", &scene.payer), &Value::Null).await);
    let expected = json!({
        "status": "healthy",
        "passphrase": PASSPHRASE,
        "contract": USDC,
        "sequence": seen["sequence"],
        "account": scene.shop.address(),
        "balance": AMOUNT.to_string(),
        "transactions": ["SUCCESS"],
        "inclusionFee": "100",
    });
    assert_eq!(seen, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_facilitator_serves_http_against_the_local_network() {
    let scene = scene().await;
    let mut child = scene
        .command("facilitator.mjs", &["0", &scene.rpc], ("FACILITATOR_SECRET", &scene.facilitator))
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let started = tokio::time::timeout(Duration::from_secs(60), lines.next_line()).await.unwrap().unwrap().unwrap();
    let started: Value = serde_json::from_str(&started).unwrap();
    assert_eq!(started["address"], json!(scene.facilitator.address()));

    let payload =
        scene.node("client.mjs", &[&scene.rpc_tls], ("PAYER_SECRET", &scene.payer), &scene.requirements()).await;
    let both = json!({
        "x402Version": 2,
        "paymentPayload": parse(&payload),
        "paymentRequirements": scene.requirements(),
    });
    let http = scene.http();
    let post = |path: &str| {
        http::Request::post(format!("{}{path}", started["url"].as_str().unwrap()))
            .header("content-type", "application/json")
            .body(Bytes::from(both.to_string()))
            .unwrap()
    };
    let verified = http.send(post("/verify")).await.unwrap();
    let verified: Value = serde_json::from_slice(verified.body()).unwrap();
    assert_eq!(verified["isValid"], json!(true), "{verified}");
    let settled = http.send(post("/settle")).await.unwrap();
    let settled: Value = serde_json::from_slice(settled.body()).unwrap();
    assert_eq!(settled["success"], json!(true), "{settled}");
    assert_eq!(scene.balances(), (START - AMOUNT, AMOUNT));
}
