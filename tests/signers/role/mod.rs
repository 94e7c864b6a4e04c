//! `tollway signer`: the contract over HTTPS, its policy, its book, and an attacker who has everything that
//! `tollway serve` has.

mod cli;
mod paid;
mod redteam;
mod tls;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use ed25519_dalek::{Signature, VerifyingKey};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stellar_strkey::ed25519::PublicKey;
use stellar_xdr::{
    ContractId, Hash, HashIdPreimage, HashIdPreimageSorobanAuthorization,
    HashIdPreimageSorobanAuthorizationWithAddress, Int128Parts, InvokeContractArgs, Limits, ScAddress, ScSymbol, ScVal,
    SorobanAuthorizedFunction, SorobanAuthorizedInvocation, WriteXdr as _,
};
use tokio_util::sync::CancellationToken;
use tollway::cli::signer::{role, serve_role};
use tollway::config::Source;
use tollway::config::signer_role::{self, SignerRole};
use tollway::http::{self, Client, Destination};
use tollway::ports::{World, machine};
use tollway::signer::keystore::Seed;
use tollway::signer::role::Role;
use zeroize::Zeroizing;

pub const SEED: &str = "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X";
pub const SECRET: &str = "0123456789abcdef0123456789abcdef";
pub const PASSPHRASE: &str = "Test SDF Network ; September 2015";
/// The ledger that the anchor says is the newest, a moment ago.
pub const NEWEST: u32 = 1_000_000;
pub const XDR: Limits = Limits { depth: 500, len: 1 << 20 };

pub struct Environment(pub BTreeMap<&'static str, String>);
impl Source for Environment {
    fn env(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }
    fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
        std::fs::read(path).map(Zeroizing::new)
    }
}

pub fn environment() -> Environment {
    Environment(BTreeMap::from([("SEED", SEED.to_owned()), ("KEYS", format!("serve:{SECRET}"))]))
}

pub fn contract(n: u8) -> ScAddress {
    ScAddress::Contract(ContractId(Hash([n; 32])))
}

pub fn account(strkey: &str) -> ScAddress {
    strkey.parse().unwrap()
}

pub fn own() -> String {
    Seed::parse(SEED).unwrap().address()
}

/// Somebody's account.
pub fn other(n: u8) -> String {
    PublicKey(ed25519_dalek::SigningKey::from_bytes(&[n; 32]).verifying_key().to_bytes())
        .to_string()
        .as_str()
        .to_owned()
}

/// One token with two recipients, 100 at once, 1,000 a day.
pub fn file(directory: &Path) -> Value {
    let now = machine::world().0.unix_ms() / 1000;
    json!({
        "key": {"secret_env": "SEED"},
        "tls": {"directory": directory, "reload_ms": 50},
        "bearer_keys": {"env": "KEYS", "max_requests_per_second": 10_000},
        "database": {"path": directory.join("signer.sqlite")},
        "networks": {"stellar:testnet": {
            "ledger_anchor": {"sequence": NEWEST, "closed_at": now}, "max_ledgers_ahead": 60, "assets": [{
                "asset": contract(7).to_string(), "recipients": [other(2), other(3)],
                "per_signature_max_atomic": "100", "day_max_atomic": "1000",
            }],
        }},
    })
}

pub struct Stand {
    pub config: SignerRole,
    pub roles: Vec<Arc<Role>>,
    pub urls: Vec<String>,
    pub stop: CancellationToken,
    pub world: World,
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Stand {
    /// Replicas that share the book and the certificate.
    pub async fn start(file: &Value, environment: &Environment, replicas: usize) -> Stand {
        let config = signer_role::parse(&file.to_string(), environment).unwrap();
        let world = machine::world().0;
        let stop = CancellationToken::new();
        let (mut roles, mut urls) = (Vec::new(), Vec::new());
        if let Some(source) = &config.tls {
            source.make(&world).unwrap();
        }
        for _ in 0..replicas {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let scheme = if config.tls.is_some() { "https" } else { "http" };
            urls.push(format!("{scheme}://localhost:{}", listener.local_addr().unwrap().port()));
            let role = Arc::new(role(&config, &world).await.unwrap());
            roles.push(role.clone());
            let (config, within, stop) = (config.clone(), world.clone(), stop.clone());
            world.spawn.spawn(Box::pin(async move {
                serve_role(&config, role, machine::TcpListener(listener), &within, stop).await.unwrap();
            }));
        }
        Stand { config, roles, urls, stop, world }
    }

    /// Who trusts the signer's certificate.
    pub fn client(&self) -> Client {
        let pem = self.config.tls.as_ref().map(|tls| std::fs::read(tls.certificate_file()).unwrap());
        let tls = http::tls(pem.as_deref()).unwrap();
        Client::new(self.world.clone(), tls, Destination::Operator, http::Limits::default())
    }
}

/// Status and body; `Err`: no answer.
pub async fn post(client: &Client, url: &str, secret: Option<&str>, body: Vec<u8>) -> Result<(u16, Value), String> {
    let mut request = ::http::Request::post(format!("{url}/sign-auth-entry"));
    if let Some(secret) = secret {
        request = request.header("authorization", format!("Bearer {secret}"));
    }
    let answer = client.send(request.body(Bytes::from(body)).unwrap()).await.map_err(|e| e.to_string())?;
    Ok((answer.status().as_u16(), serde_json::from_slice(answer.body()).unwrap_or(Value::Null)))
}

pub async fn get(client: &Client, url: &str, secret: Option<&str>) -> Result<(u16, String), String> {
    let mut request = ::http::Request::get(url);
    if let Some(secret) = secret {
        request = request.header("authorization", format!("Bearer {secret}"));
    }
    let answer = client.send(request.body(Bytes::new()).unwrap()).await.map_err(|e| e.to_string())?;
    Ok((answer.status().as_u16(), String::from_utf8_lossy(answer.body()).into_owned()))
}

/// What is asked for; every part may be a lie of the attacker's.
#[derive(Clone)]
pub struct Ask {
    pub passphrase: &'static str,
    pub contract: ScAddress,
    pub function: &'static str,
    pub args: Vec<ScVal>,
    pub sub: usize,
    pub nonce: i64,
    pub expiration: u32,
    /// Whose address the second credential arm signs.
    pub with_address: Option<ScAddress>,
    pub says: Value,
}

pub fn i128(amount: i128) -> ScVal {
    ScVal::I128(Int128Parts { hi: (amount >> 64) as i64, lo: amount as u64 })
}

impl Ask {
    /// What the policy allows.
    pub fn good(nonce: i64, amount: i128) -> Ask {
        Ask {
            passphrase: PASSPHRASE,
            contract: contract(7),
            function: "transfer",
            args: vec![ScVal::Address(account(&own())), ScVal::Address(account(&other(2))), i128(amount)],
            sub: 0,
            nonce,
            expiration: NEWEST + 50,
            with_address: None,
            says: json!({"network": "stellar:testnet", "networkPassphrase": PASSPHRASE, "address": own(), "payment": {}}),
        }
    }

    pub fn preimage(&self) -> Vec<u8> {
        let call = |contract: &ScAddress, name: &str, args: &[ScVal]| InvokeContractArgs {
            contract_address: contract.clone(),
            function_name: ScSymbol(name.try_into().unwrap()),
            args: args.to_vec().try_into().unwrap(),
        };
        let invocation = |sub: Vec<SorobanAuthorizedInvocation>| SorobanAuthorizedInvocation {
            function: SorobanAuthorizedFunction::ContractFn(call(&self.contract, self.function, &self.args)),
            sub_invocations: sub.try_into().unwrap(),
        };
        let mut root = invocation(vec![]);
        for _ in 0..self.sub {
            root = invocation(vec![root]);
        }
        let network_id = Hash(Sha256::digest(self.passphrase).into());
        let preimage = match &self.with_address {
            None => HashIdPreimage::SorobanAuthorization(HashIdPreimageSorobanAuthorization {
                network_id,
                nonce: self.nonce,
                signature_expiration_ledger: self.expiration,
                invocation: root,
            }),
            Some(address) => {
                HashIdPreimage::SorobanAuthorizationWithAddress(HashIdPreimageSorobanAuthorizationWithAddress {
                    network_id,
                    nonce: self.nonce,
                    signature_expiration_ledger: self.expiration,
                    address: address.clone(),
                    invocation: root,
                })
            }
        };
        preimage.to_xdr(XDR).unwrap()
    }

    pub fn body(&self) -> Vec<u8> {
        let mut body = self.says.clone();
        body["authEntryXdr"] = STANDARD.encode(self.preimage()).into();
        body.to_string().into_bytes()
    }
}

/// Whether `answer` is the account's signature over this preimage: the money could move.
pub fn verifies(preimage: &[u8], answer: &Value) -> bool {
    let Some(signature) = answer["signedAuthEntryXdr"].as_str() else { return false };
    let signature = Signature::from_slice(&STANDARD.decode(signature).unwrap()).unwrap();
    let key = VerifyingKey::from_bytes(&PublicKey::from_string(&own()).unwrap().0).unwrap();
    key.verify_strict(&Sha256::digest(preimage), &signature).is_ok()
}

/// Until `done` says so, for a minute at most.
pub async fn until<F: Future<Output = bool>>(what: &str, mut done: impl FnMut() -> F) {
    let looked = async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), looked).await.unwrap_or_else(|_| panic!("{what}: never"));
}
