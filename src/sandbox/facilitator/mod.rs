//! A facilitator by the official one's rules (`@x402/stellar` 2.9.0): `/verify`, `/settle`, `/supported`. It sees the
//! chain over its JSON-RPC only, pays the fees from accounts of its own, and keeps nothing: what was settled before,
//! the chain itself refuses.

mod rules;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use ed25519_dalek::{Signer, SigningKey};
use serde_json::json;
use sha2::{Digest, Sha256};
use stellar_xdr::{
    AccountId, DecoratedSignature, Hash, LedgerBounds, MuxedAccount, Preconditions, PreconditionsV2, PublicKey,
    SequenceNumber, SignatureHint, TimeBounds, TimePoint, Transaction, TransactionEnvelope,
    TransactionSignaturePayload, TransactionSignaturePayloadTaggedTransaction, TransactionV1Envelope, Uint256, VecM,
    WriteXdr,
};
use tokio::sync::{Semaphore, oneshot};

use self::rules::{Payload, Refusal, Requirements, Terms, Transfer};
use crate::http::Client;
use crate::json as strict;
use crate::ports::World;
use crate::sandbox::soroban::{Soroban, XDR};

/// A request holds one transaction; the largest that a ledger takes is far below this.
const BODY: strict::Limits = strict::Limits { bytes: 256 * 1024, depth: 64 };

pub struct Options {
    /// CAIP-2.
    pub network: String,
    pub passphrase: String,
    /// The accounts that pay the fees, each in use by one settlement at a time: a network takes one transaction of an
    /// account per ledger.
    pub accounts: Vec<SigningKey>,
    /// Stroops; the official default is 50,000.
    pub max_fee: u32,
    /// What a ledger is taken to last; the official one measures it, and takes 5 where it cannot.
    pub ledger_seconds: u64,
    /// Between two looks for the transaction; the official one waits a second.
    pub poll: Duration,
}

impl Options {
    pub fn new(network: &str, passphrase: &str, accounts: Vec<SigningKey>) -> Options {
        Options {
            network: network.to_owned(),
            passphrase: passphrase.to_owned(),
            accounts,
            max_fee: 50_000,
            ledger_seconds: 5,
            poll: Duration::from_secs(1),
        }
    }
}

pub struct Facilitator {
    world: World,
    chain: Soroban,
    terms: Terms,
    network_id: [u8; 32],
    poll: Duration,
    free: Mutex<Vec<SigningKey>>,
    permits: Semaphore,
}

impl Facilitator {
    pub fn new(world: World, http: Client, rpc_url: &str, options: Options) -> Arc<Facilitator> {
        let accounts = options.accounts.iter().map(account_strkey).collect();
        Arc::new(Facilitator {
            world,
            chain: Soroban::new(http, rpc_url.to_owned()),
            terms: Terms {
                network: options.network,
                accounts,
                max_fee: options.max_fee,
                ledger_seconds: options.ledger_seconds,
            },
            network_id: Sha256::digest(options.passphrase).into(),
            poll: options.poll,
            permits: Semaphore::new(options.accounts.len()),
            free: Mutex::new(options.accounts),
        })
    }

    pub fn router(self: &Arc<Facilitator>) -> Router {
        Router::new()
            .route("/verify", post(verify))
            .route("/settle", post(settle))
            .route("/supported", get(supported))
            .layer(DefaultBodyLimit::max(BODY.bytes))
            .with_state(self.clone())
    }

    async fn verify(&self, payload: &Payload, requirements: &Requirements) -> Result<Transfer, Refusal> {
        let transfer = rules::structure(payload, requirements, &self.terms)?;
        let failed = |_| Refusal { reason: "unexpected_verify_error", payer: Some(transfer.payer()) };
        let envelope = TransactionEnvelope::Tx(TransactionV1Envelope {
            tx: transfer.transaction.clone(),
            signatures: VecM::default(),
        });
        let simulation = self.chain.simulate(&envelope).await.map_err(failed)?;
        let latest = self.chain.latest_ledger().await.map_err(failed)?;
        rules::simulated(&transfer, &simulation, latest, &self.terms)?;
        Ok(transfer)
    }

    /// The `SettlementResponse`.
    async fn settle(&self, payload: &Payload, requirements: &Requirements) -> serde_json::Value {
        let network = requirements.network.as_str();
        let transfer = match self.verify(payload, requirements).await {
            Ok(transfer) => transfer,
            Err(refusal) => return unsettled(network, refusal.reason, refusal.payer.as_deref(), ""),
        };
        let payer = transfer.payer();
        match self.submit(&transfer).await {
            Ok(hash) => json!({"success": true, "transaction": hash, "network": network, "payer": payer}),
            Err(NotSettled { reason, hash }) => unsettled(network, reason, Some(&payer), &hash),
        }
    }

    async fn submit(&self, transfer: &Transfer) -> Result<String, NotSettled> {
        let before = |reason| NotSettled { reason, hash: String::new() };
        let unselected = "settle_exact_stellar_signer_selection_failed";
        let _permit = self.permits.acquire().await.map_err(|_| before(unselected))?;
        let account = self.borrow().ok_or_else(|| before(unselected))?;
        let source = self.chain.account(&account_id(account.key())).await;
        let sequence = source.ok().flatten().ok_or_else(|| before("unexpected_settle_error"))?.seq_num.0;
        let timeout = transfer.requirements.max_timeout_seconds;
        let until = (self.world.unix_ms() / 1_000).saturating_add(timeout);
        let transaction = ours(transfer, account.key(), sequence.saturating_add(1), self.terms.max_fee, until);
        let (envelope, hash) = sign(transaction, self.network_id, account.key())
            .ok_or_else(|| before("settle_exact_stellar_transaction_signing_failed"))?;
        match self.chain.send(&envelope).await {
            Ok(sent) if sent.status == "PENDING" && sent.hash == hash => {}
            // Also DUPLICATE and TRY_AGAIN_LATER, and a lost answer: the official one says the same to all of them.
            Ok(_) => return Err(before("settle_exact_stellar_transaction_submission_failed")),
            Err(_) => return Err(before("unexpected_settle_error")),
        }
        let deadline = tokio::time::Instant::now() + Duration::from_secs(timeout);
        loop {
            match self.chain.transaction(&hash).await {
                Ok(found) if found.status == "SUCCESS" => return Ok(hash),
                Ok(found) if found.status == "FAILED" => {
                    return Err(NotSettled { reason: "settle_exact_stellar_transaction_failed", hash });
                }
                _ => {}
            }
            if tokio::time::Instant::now() + self.poll > deadline {
                return Err(NotSettled { reason: "settle_exact_stellar_transaction_failed", hash });
            }
            tokio::time::sleep(self.poll).await;
        }
    }

    fn borrow(&self) -> Option<Borrowed<'_>> {
        let key = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Borrowed { key: Some(key), to: &self.free })
    }
}

struct NotSettled {
    reason: &'static str,
    /// Empty unless the transaction was taken by the network.
    hash: String,
}

/// A fee account, given back when the settlement is over, however it ends.
struct Borrowed<'a> {
    key: Option<SigningKey>,
    to: &'a Mutex<Vec<SigningKey>>,
}

impl Borrowed<'_> {
    #[allow(clippy::expect_used, reason = "only drop takes the key")]
    fn key(&self) -> &SigningKey {
        self.key.as_ref().expect("the key is here until drop")
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            // At the far end: the account that rested longest is next, so its last transaction is well behind it.
            self.to.lock().unwrap_or_else(PoisonError::into_inner).insert(0, key);
        }
    }
}

fn unsettled(network: &str, reason: &str, payer: Option<&str>, transaction: &str) -> serde_json::Value {
    let mut answer = json!({"success": false, "errorReason": reason, "transaction": transaction, "network": network});
    if let Some(payer) = payer {
        answer["payer"] = json!(payer);
    }
    answer
}

/// The payer's operation and Soroban data in a transaction of our own: our source and sequence, a fee of at most our
/// cap, our time bounds; the payer's memo, ledger bounds and least sequence stay.
fn ours(transfer: &Transfer, key: &SigningKey, sequence: i64, max_fee: u32, until: u64) -> Transaction {
    let time = TimeBounds { min_time: TimePoint(0), max_time: TimePoint(until) };
    let cond = match &transfer.transaction.cond {
        Preconditions::V2(theirs) => Preconditions::V2(PreconditionsV2 {
            time_bounds: Some(time),
            ledger_bounds: theirs
                .ledger_bounds
                .as_ref()
                .map(|b| LedgerBounds { min_ledger: b.min_ledger, max_ledger: b.max_ledger }),
            min_seq_num: theirs.min_seq_num.clone(),
            min_seq_age: theirs.min_seq_age.clone(),
            min_seq_ledger_gap: theirs.min_seq_ledger_gap,
            extra_signers: VecM::default(),
        }),
        _ => Preconditions::Time(time),
    };
    Transaction {
        source_account: MuxedAccount::Ed25519(Uint256(key.verifying_key().to_bytes())),
        fee: transfer.transaction.fee.min(max_fee),
        seq_num: SequenceNumber(sequence),
        cond,
        memo: transfer.transaction.memo.clone(),
        operations: transfer.transaction.operations.clone(),
        ext: stellar_xdr::TransactionExt::V1(transfer.data.clone()),
    }
}

/// The signed envelope and its hash in hex.
fn sign(tx: Transaction, network_id: [u8; 32], key: &SigningKey) -> Option<(TransactionEnvelope, String)> {
    let payload = TransactionSignaturePayload {
        network_id: Hash(network_id),
        tagged_transaction: TransactionSignaturePayloadTaggedTransaction::Tx(tx),
    };
    let hash: [u8; 32] = Sha256::digest(payload.to_xdr(XDR).ok()?).into();
    let TransactionSignaturePayloadTaggedTransaction::Tx(tx) = payload.tagged_transaction else { return None };
    let public = key.verifying_key().to_bytes();
    let signature = DecoratedSignature {
        hint: SignatureHint([public[28], public[29], public[30], public[31]]),
        signature: stellar_xdr::Signature(key.sign(&hash).to_bytes().to_vec().try_into().ok()?),
    };
    let signatures = vec![signature].try_into().ok()?;
    Some((TransactionEnvelope::Tx(TransactionV1Envelope { tx, signatures }), hex::encode(hash)))
}

pub(crate) fn account_id(key: &SigningKey) -> AccountId {
    AccountId(PublicKey::PublicKeyTypeEd25519(Uint256(key.verifying_key().to_bytes())))
}

/// `G…`
pub(crate) fn account_strkey(key: &SigningKey) -> String {
    account_id(key).to_string()
}

/// The body of `/verify` and `/settle`: exactly these three members, nothing twice, nothing unknown.
fn request(body: &[u8]) -> Option<(Payload, Requirements)> {
    let body = strict::check(body, BODY).ok()?;
    let (mut version, mut payload, mut requirements) = (None, None, None);
    for (name, value) in strict::members(body).ok()? {
        match name.as_ref() {
            "x402Version" => version = Some(value),
            "paymentPayload" => payload = Some(value),
            "paymentRequirements" => requirements = Some(value),
            _ => return None,
        }
    }
    if version?.get() != "2" {
        return None;
    }
    Some((serde_json::from_str(payload?.get()).ok()?, serde_json::from_str(requirements?.get()).ok()?))
}

async fn verify(State(facilitator): State<Arc<Facilitator>>, body: Bytes) -> Response {
    let Some((payload, requirements)) = request(&body) else {
        let answer = json!({"isValid": false, "invalidReason": "invalid_request"});
        return (StatusCode::BAD_REQUEST, axum::Json(answer)).into_response();
    };
    let answer = match facilitator.verify(&payload, &requirements).await {
        Ok(transfer) => json!({"isValid": true, "payer": transfer.payer()}),
        Err(Refusal { reason, payer: Some(payer) }) => {
            json!({"isValid": false, "invalidReason": reason, "payer": payer})
        }
        Err(Refusal { reason, payer: None }) => json!({"isValid": false, "invalidReason": reason}),
    };
    axum::Json(answer).into_response()
}

async fn settle(State(facilitator): State<Arc<Facilitator>>, body: Bytes) -> Response {
    let Some((payload, requirements)) = request(&body) else {
        let answer = unsettled(&facilitator.terms.network, "invalid_request", None, "");
        return (StatusCode::BAD_REQUEST, axum::Json(answer)).into_response();
    };
    // In a task of its own: a caller that goes away must not take back an account whose transaction is under way.
    let (done, answer) = oneshot::channel();
    let world = facilitator.world.clone();
    world.spawn.spawn(Box::pin(async move {
        let _ = done.send(facilitator.settle(&payload, &requirements).await);
    }));
    match answer.await {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn supported(State(facilitator): State<Arc<Facilitator>>) -> Response {
    axum::Json(json!({
        "kinds": [{
            "x402Version": 2,
            "scheme": "exact",
            "network": facilitator.terms.network,
            "extra": {"areFeesSponsored": true},
        }],
        "extensions": ["bazaar", "payment-identifier"],
        "signers": {"stellar:*": facilitator.terms.accounts},
    }))
    .into_response()
}
