//! A Soroban JSON-RPC over HTTP as anybody sees it from outside: what the facilitator and the demo ask the chain.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use stellar_xdr::{
    AccountEntry, AccountId, LedgerEntryData, LedgerKey, LedgerKeyAccount, LedgerKeyTrustLine, Limits, ReadXdr,
    TransactionEnvelope, TrustLineAsset, WriteXdr,
};

use crate::http::{Client, HttpError};
use crate::json;

/// For decoding what came from outside.
pub(crate) const XDR: Limits = Limits { depth: 200, len: 512 * 1024 };
const ANSWER: json::Limits = json::Limits { bytes: 8 * 1024 * 1024, depth: 64 };

#[derive(Debug, thiserror::Error)]
pub enum SorobanError {
    #[error("the chain RPC could not be asked: {0}")]
    Http(#[from] HttpError),
    #[error("the chain RPC answered HTTP {0}")]
    Status(u16),
    #[error("the chain RPC's answer could not be read: {0}")]
    Malformed(String),
    #[error("the chain RPC refuses ({code}): {message}")]
    Refused { code: i64, message: String },
}

pub struct Soroban {
    http: Client,
    url: String,
    id: AtomicU64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Simulation {
    pub error: Option<String>,
    /// Present where the simulation succeeded.
    pub transaction_data: Option<String>,
    pub min_resource_fee: Option<String>,
    /// `DiagnosticEvent`s, base64 XDR.
    #[serde(default)]
    pub events: Vec<String>,
}

#[derive(Deserialize)]
pub struct Sent {
    /// `PENDING`, `DUPLICATE`, `TRY_AGAIN_LATER` or `ERROR`.
    pub status: String,
    pub hash: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Found {
    /// `SUCCESS`, `FAILED` or `NOT_FOUND`.
    pub status: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Events {
    pub events: Vec<Event>,
    pub cursor: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    pub tx_hash: String,
    /// `ScVal`, base64 XDR.
    pub value: String,
}

impl Soroban {
    pub fn new(http: Client, url: String) -> Soroban {
        Soroban { http, url, id: AtomicU64::new(1) }
    }

    /// The sequence of the newest closed ledger.
    pub async fn latest_ledger(&self) -> Result<u32, SorobanError> {
        #[derive(Deserialize)]
        struct Latest {
            sequence: u32,
        }
        Ok(self.call::<Latest>("getLatestLedger", &serde_json::json!({})).await?.sequence)
    }

    pub async fn simulate(&self, envelope: &TransactionEnvelope) -> Result<Simulation, SorobanError> {
        self.call("simulateTransaction", &serde_json::json!({"transaction": encode(envelope)?})).await
    }

    pub async fn send(&self, envelope: &TransactionEnvelope) -> Result<Sent, SorobanError> {
        self.call("sendTransaction", &serde_json::json!({"transaction": encode(envelope)?})).await
    }

    /// `hash` in hex.
    pub async fn transaction(&self, hash: &str) -> Result<Found, SorobanError> {
        self.call("getTransaction", &serde_json::json!({"hash": hash})).await
    }

    /// `None` where the ledger has no such account.
    pub async fn account(&self, id: &AccountId) -> Result<Option<AccountEntry>, SorobanError> {
        match self.entry(&LedgerKey::Account(LedgerKeyAccount { account_id: id.clone() })).await? {
            Some(LedgerEntryData::Account(account)) => Ok(Some(account)),
            _ => Ok(None),
        }
    }

    /// The balance of a classic asset in atomic units; `None` without a trustline.
    pub async fn trustline(&self, id: &AccountId, asset: &TrustLineAsset) -> Result<Option<i64>, SorobanError> {
        let key = LedgerKeyTrustLine { account_id: id.clone(), asset: asset.clone() };
        match self.entry(&LedgerKey::Trustline(key)).await? {
            Some(LedgerEntryData::Trustline(line)) => Ok(Some(line.balance)),
            _ => Ok(None),
        }
    }

    /// The contract's events from `start` on; each topic is base64 XDR or `*`, the last may be `**`.
    pub async fn events(&self, start: u32, contract: &str, topics: &[String]) -> Result<Vec<Event>, SorobanError> {
        let filters = serde_json::json!([{"type": "contract", "contractIds": [contract], "topics": [topics]}]);
        let mut params = serde_json::json!({"startLedger": start, "filters": filters, "pagination": {"limit": 100}});
        let mut all = Vec::new();
        // A page that is not full is the last one; the bound keeps a cursor that never ends from holding us here.
        for _ in 0..1_000 {
            let page: Events = self.call("getEvents", &params).await?;
            let full = page.events.len() >= 100;
            all.extend(page.events);
            match page.cursor {
                Some(cursor) if full => {
                    params = serde_json::json!({"filters": filters, "pagination": {"limit": 100, "cursor": cursor}});
                }
                _ => break,
            }
        }
        Ok(all)
    }

    async fn entry(&self, key: &LedgerKey) -> Result<Option<LedgerEntryData>, SorobanError> {
        #[derive(Deserialize)]
        struct Entries {
            entries: Option<Vec<Entry>>,
        }
        #[derive(Deserialize)]
        struct Entry {
            xdr: String,
        }
        let found: Entries = self.call("getLedgerEntries", &serde_json::json!({"keys": [encode(key)?]})).await?;
        let Some(entry) = found.entries.unwrap_or_default().into_iter().next() else { return Ok(None) };
        LedgerEntryData::from_xdr_base64(entry.xdr, XDR)
            .map(Some)
            .map_err(|_| SorobanError::Malformed("a ledger entry is no XDR".into()))
    }

    async fn call<T: DeserializeOwned>(&self, method: &str, params: &serde_json::Value) -> Result<T, SorobanError> {
        #[derive(Deserialize)]
        struct Answer<'a> {
            #[serde(borrow)]
            result: Option<&'a RawValue>,
            error: Option<Refusal>,
        }
        #[derive(Deserialize)]
        struct Refusal {
            code: i64,
            message: String,
        }
        let malformed = |what: &str| SorobanError::Malformed(format!("{method}: {what}"));
        let id = self.id.fetch_add(1, Ordering::Relaxed);
        let body = serde_json::json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string();
        let request = http::Request::post(&self.url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Bytes::from(body))
            .map_err(|_| malformed("the URL is none"))?;
        let answer = self.http.send(request).await?;
        if !answer.status().is_success() {
            return Err(SorobanError::Status(answer.status().as_u16()));
        }
        let text = json::check(answer.body(), ANSWER).map_err(|e| malformed(&e.to_string()))?;
        let answer: Answer<'_> = serde_json::from_str(text.get()).map_err(|_| malformed("no JSON-RPC answer"))?;
        match (answer.result, answer.error) {
            (Some(result), None) => serde_json::from_str(result.get()).map_err(|_| malformed("another shape")),
            (_, Some(e)) => Err(SorobanError::Refused { code: e.code, message: e.message.chars().take(300).collect() }),
            (None, None) => Err(malformed("neither result nor error")),
        }
    }
}

fn encode(value: &impl WriteXdr) -> Result<String, SorobanError> {
    value.to_xdr_base64(XDR).map_err(|_| SorobanError::Malformed("the request is no XDR".into()))
}
