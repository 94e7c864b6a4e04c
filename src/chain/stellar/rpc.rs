//! One Soroban RPC: JSON-RPC over HTTP, bounded, ids matched, answers strict.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use stellar_xdr::WriteXdr;
use url::Url;

use super::super::ChainError;
use super::entry;
use super::pace::Pace;
use crate::http::{Client, HttpError};
use crate::json;
use crate::money::Network;
use crate::telemetry;
use crate::x402;

const ANSWER: json::Limits = json::Limits { bytes: 8 << 20, depth: 64 };
const MAX_WORDS: usize = 300;

pub(super) struct Rpc {
    http: Client,
    url: Url,
    /// As the configuration names it: a label of what is counted.
    network: Network,
    id: AtomicU64,
    /// Of an asker that has time.
    pace: Option<Arc<Pace>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LatestLedger {
    pub sequence: u32,
    /// Unix seconds as text; newer RPCs only.
    pub close_time: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct NetworkAnswer {
    pub passphrase: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Health {
    pub oldest_ledger: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LedgerEntries {
    pub entries: Option<Vec<Entry>>,
    pub latest_ledger: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    pub key: String,
    /// `LedgerEntryData`.
    pub xdr: String,
    pub last_modified_ledger_seq: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Simulation {
    pub error: Option<String>,
    pub transaction_data: Option<String>,
    pub min_resource_fee: Option<String>,
    #[serde(default)]
    pub events: Vec<String>,
    #[serde(default)]
    pub results: Vec<SimulationResult>,
    pub restore_preamble: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
pub(super) struct SimulationResult {
    #[serde(default)]
    pub auth: Option<Vec<String>>,
    pub xdr: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Transaction {
    pub status: String,
    pub latest_ledger: u32,
    pub latest_ledger_close_time: Option<String>,
    pub oldest_ledger: Option<u32>,
    pub ledger: Option<u32>,
    pub envelope_xdr: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Events {
    pub events: Vec<Event>,
    pub cursor: Option<String>,
    pub latest_ledger: u32,
    pub oldest_ledger: Option<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Event {
    pub tx_hash: String,
}

impl Rpc {
    pub fn new(http: Client, url: Url, network: Network) -> Rpc {
        Rpc { http, url, network, id: AtomicU64::new(1), pace: None }
    }

    pub fn paced(&self, pace: Arc<Pace>) -> Rpc {
        Rpc { pace: Some(pace), ..Rpc::new(self.http.clone(), self.url.clone(), self.network.clone()) }
    }

    /// The host alone: a path may hold an access key.
    pub fn name(&self) -> &str {
        self.url.host_str().unwrap_or("rpc")
    }

    pub async fn call<T: DeserializeOwned>(&self, method: &str, params: &serde_json::Value) -> Result<T, ChainError> {
        if let Some(pace) = &self.pace {
            pace.turn().await;
        }
        let answer = self.ask(method, params).await;
        let result = match &answer {
            Ok(_) => "ok",
            Err(ChainError::Refused(_)) => "refused",
            Err(_) => "unreachable",
        };
        telemetry::RPC_CALLS.one([self.network.as_str(), result]);
        answer
    }

    async fn ask<T: DeserializeOwned>(&self, method: &str, params: &serde_json::Value) -> Result<T, ChainError> {
        let id = self.id.fetch_add(1, Ordering::Relaxed);
        let body = serde_json::json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string();
        let unreachable = |what: String| ChainError::Unreachable(format!("{} ({method}): {what}", self.name()));
        let request = http::Request::post(self.url.as_str())
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Bytes::from(body))
            .map_err(|_| unreachable("its URL cannot be used".into()))?;
        let response = self.http.send(request).await.map_err(|e: HttpError| unreachable(e.to_string()))?;
        if !response.status().is_success() {
            return Err(unreachable(format!("HTTP {}", response.status().as_u16())));
        }
        let raw = json::check(response.body(), ANSWER).map_err(|e| unreachable(format!("the answer {e}")))?;
        #[derive(Deserialize)]
        struct Envelope<'a> {
            id: u64,
            #[serde(borrow)]
            result: Option<&'a RawValue>,
            error: Option<RpcProblem>,
        }
        #[derive(Deserialize)]
        struct RpcProblem {
            code: i64,
            message: String,
        }
        let envelope: Envelope<'_> =
            serde_json::from_str(raw.get()).map_err(|_| unreachable("the answer is not JSON-RPC".into()))?;
        if envelope.id != id {
            return Err(unreachable("the answer is to another request".into()));
        }
        match (envelope.result, envelope.error) {
            (Some(result), None) => {
                serde_json::from_str(result.get()).map_err(|_| unreachable("the result has another form".into()))
            }
            (_, Some(problem)) => Err(ChainError::Refused(format!(
                "{} ({method}): {} {}",
                self.name(),
                problem.code,
                words(&problem.message)
            ))),
            (None, None) => Err(unreachable("neither a result nor an error".into())),
        }
    }
}

pub(super) fn encode(value: &impl WriteXdr) -> Result<String, ChainError> {
    value.to_xdr_base64(entry::XDR).map_err(|_| ChainError::Unsupported("a value that cannot be encoded".into()))
}

pub(super) fn words(text: &str) -> String {
    x402::words(text, MAX_WORDS)
}
