//! Paying on a real Soroban host through RPCs that are honest, late, broken or lying.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine's world")]

mod clock;
mod nonce;
pub mod prepare;

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::routing::post;
use axum::{Json, Router};
use ed25519_dalek::Signer as _;
use futures_util::future::{Either, select};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stellar_xdr::{
    DecoratedSignature, LedgerEntryData, LedgerKey, LedgerKeyAccount, Limits, MuxedAccount, ReadXdr, SequenceNumber,
    Signature, SignatureHint, TransactionEnvelope, Uint256, WriteXdr,
};
use tokio_util::sync::CancellationToken;
use tollway::chain::stellar::{Credentials, Draft, LedgerPoint, Settings, SignedEntry, Stellar};
use tollway::http::{self as outbound, Client, Destination, Tls};
use tollway::json;
use tollway::mcp::serve::serve;
use tollway::ports::{World, machine};
use tollway::sandbox::chain::{Account, LocalNetwork, Node, Options, PASSPHRASE, USDC};
use tollway::sandbox::facilitator::{self, Facilitator};
use tollway::x402::Offer;
use url::Url;

/// Changes the answer to one method: what a lying node would say.
type Lie = Box<dyn Fn(&str, &mut Value) + Send + Sync>;

pub struct Local {
    pub network: LocalNetwork,
    pub payer: Account,
    pub seller: Account,
    pub thief: Account,
    fees: Account,
    pub world: World,
    stop: CancellationToken,
}
impl Drop for Local {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Ledgers close by hand; a used nonce is kept for 20 of them.
pub fn local() -> Local {
    local_with(|_| {})
}

pub fn local_with(change: impl FnOnce(&mut Options)) -> Local {
    let (world, _) = machine::world();
    let mut options =
        Options { ledger_interval: None, min_temporary_ttl: 20, seed: Some([5; 32]), ..Options::default() };
    change(&mut options);
    let network = LocalNetwork::start(options, world.clone()).unwrap();
    let [payer, seller, thief, fees] = ["payer", "seller", "thief", "fees"].map(|name| network.account(name));
    for account in [&payer, &seller, &thief, &fees] {
        network.fund(&account.id(), 100_000_000);
    }
    network.trust(&payer.id(), 50_000_000);
    network.trust(&seller.id(), 0);
    network.trust(&thief.id(), 0);
    network.close_now();
    Local { network, payer, seller, thief, fees, world, stop: CancellationToken::new() }
}

pub fn client(world: &World) -> Client {
    Client::new(
        world.clone(),
        Tls::Plain,
        Destination::Operator,
        outbound::Limits { timeout: Duration::from_secs(5), ..outbound::Limits::default() },
    )
}

pub fn signed_by(account: &Account, draft: Draft) -> SignedEntry {
    let signature = account.key.sign(&draft.digest()).to_bytes();
    draft.attach(&signature).unwrap()
}

impl Local {
    async fn serve(&self, app: Router) -> Url {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}/", listener.local_addr().unwrap());
        let task = serve(machine::TcpListener(listener), self.world.clone(), app, self.stop.clone());
        self.world.spawn.spawn(Box::pin(task));
        base.parse().unwrap()
    }

    pub async fn node(&self, node: Node) -> Url {
        self.serve(self.network.rpc_router(node)).await
    }

    /// A node in front of an honest one that changes its answers.
    pub async fn liar(&self, lie: impl Fn(&str, &mut Value) + Send + Sync + 'static) -> Url {
        let behind = self.node(Node::default()).await;
        let http = client(&self.world);
        let lie: Arc<Lie> = Arc::new(Box::new(lie));
        self.serve(Router::new().route(
            "/",
            post(move |body: Bytes| {
                let (http, behind, lie) = (http.clone(), behind.clone(), lie.clone());
                async move {
                    let asked: Value = serde_json::from_slice(&body).unwrap();
                    let request = http::Request::post(behind.as_str())
                        .header("content-type", "application/json")
                        .body(body)
                        .unwrap();
                    let answer = http.send(request).await.unwrap();
                    let mut answer: Value = serde_json::from_slice(answer.body()).unwrap();
                    lie(asked["method"].as_str().unwrap(), &mut answer);
                    Json(answer)
                }
            }),
        ))
        .await
    }

    pub async fn honest(&self) -> Stellar {
        self.stellar(vec![self.node(Node::default()).await])
    }

    pub fn settings(&self, rpc_urls: Vec<Url>) -> Settings {
        Settings {
            network: "stellar:testnet".parse().unwrap(),
            passphrase: PASSPHRASE.into(),
            rpc_urls,
            credentials: Credentials::Address,
            max_authorization_seconds: 300,
            min_ledger_ms: 1,
        }
    }

    pub fn stellar(&self, rpc_urls: Vec<Url>) -> Stellar {
        self.with(self.settings(rpc_urls))
    }

    pub fn with(&self, settings: Settings) -> Stellar {
        self.at(settings, self.world.clone())
    }

    /// With another clock, say.
    pub fn at(&self, settings: Settings, world: World) -> Stellar {
        Stellar::new(settings, client(&self.world), world)
    }

    pub fn requirements(&self) -> Value {
        self.requirements_to(&self.seller.address())
    }

    pub fn requirements_to(&self, pay_to: &str) -> Value {
        json!({
            "scheme": "exact", "network": "stellar:testnet", "amount": "10000", "asset": USDC,
            "payTo": pay_to, "maxTimeoutSeconds": 60, "extra": {"areFeesSponsored": true},
        })
    }

    pub fn offer(&self) -> Offer {
        Offer::parse(&json::raw(&self.requirements())).unwrap()
    }

    pub fn here(&self) -> LedgerPoint {
        let latest = self.network.latest();
        LedgerPoint { sequence: latest.sequence, closed_at: latest.closed_at }
    }

    pub fn draft(&self, stellar: &Stellar) -> Draft {
        stellar.draft(&self.offer(), &self.payer.address(), self.here()).unwrap()
    }

    /// What the facilitator makes of a prepared transaction; ledgers close meanwhile.
    pub async fn settle(&self, transaction: &str) -> Value {
        let rpc = self.node(Node::default()).await;
        let mut options = facilitator::Options::new("stellar:testnet", PASSPHRASE, vec![self.fees.key.clone()]);
        options.poll = Duration::from_millis(10);
        let facilitator = Facilitator::new(self.world.clone(), client(&self.world), rpc.as_str(), options);
        let url = self.serve(facilitator.router()).await.join("settle").unwrap();
        let body = json!({
            "x402Version": 2,
            "paymentPayload": {
                "x402Version": 2, "accepted": self.requirements(), "payload": {"transaction": transaction},
            },
            "paymentRequirements": self.requirements(),
        });
        let request = http::Request::post(url.as_str())
            .header("content-type", "application/json")
            .body(Bytes::from(body.to_string()))
            .unwrap();
        let http = client(&self.world);
        let settling = http.send(request);
        let closing = async {
            loop {
                tokio::time::sleep(Duration::from_millis(20)).await;
                self.network.close_now();
            }
        };
        let answer = match select(pin!(settling), pin!(closing)).await {
            Either::Left((answer, _)) => answer.unwrap(),
            Either::Right(((), _)) => unreachable!("ledgers close for ever"),
        };
        serde_json::from_slice(answer.body()).unwrap()
    }

    /// The prepared transaction as its submitter sends it: with a source, a sequence and a signature. Gives its hash.
    pub async fn submit(&self, transaction: &str) -> String {
        let TransactionEnvelope::Tx(mut envelope) =
            TransactionEnvelope::from_xdr_base64(transaction, Limits::none()).unwrap()
        else {
            panic!("a transaction")
        };
        let source = self.fees.id();
        let rpc = self.node(Node::default()).await;
        let key = LedgerKey::Account(LedgerKeyAccount { account_id: source.clone() });
        let keys = json!({"keys": [key.to_xdr_base64(Limits::none()).unwrap()]});
        let found = self.ask(&rpc, "getLedgerEntries", keys).await;
        let entry = found["entries"][0]["xdr"].as_str().unwrap();
        let LedgerEntryData::Account(account) = LedgerEntryData::from_xdr_base64(entry, Limits::none()).unwrap() else {
            panic!("an account")
        };
        let public = self.fees.key.verifying_key().to_bytes();
        envelope.tx.source_account = MuxedAccount::Ed25519(Uint256(public));
        envelope.tx.seq_num = SequenceNumber(account.seq_num.0 + 1);
        let hash = envelope.tx.hash(Sha256::digest(PASSPHRASE).into()).unwrap();
        let signature = DecoratedSignature {
            hint: SignatureHint(public[28..].try_into().unwrap()),
            signature: Signature(self.fees.key.sign(&hash).to_bytes().to_vec().try_into().unwrap()),
        };
        envelope.signatures = vec![signature].try_into().unwrap();
        let signed = TransactionEnvelope::Tx(envelope).to_xdr_base64(Limits::none()).unwrap();
        let sent = self.ask(&rpc, "sendTransaction", json!({"transaction": signed})).await;
        assert_eq!(sent["status"], "PENDING", "{sent}");
        self.network.close_now();
        hex::encode(hash)
    }

    async fn ask(&self, rpc: &Url, method: &str, params: Value) -> Value {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
        let request = http::Request::post(rpc.as_str()).header("content-type", "application/json");
        let answer = client(&self.world).send(request.body(Bytes::from(body)).unwrap()).await.unwrap();
        serde_json::from_slice::<Value>(answer.body()).unwrap()["result"].take()
    }
}

/// What a node was asked, in order.
#[derive(Clone, Default)]
pub struct Asked(Arc<Mutex<Vec<String>>>);
impl Asked {
    pub fn note(&self, method: &str) {
        self.0.lock().unwrap().push(method.to_owned());
    }
    pub fn count(&self, method: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|m| *m == method).count()
    }
}
