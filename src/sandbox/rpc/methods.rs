//! What a node tells about itself, about entries and about transactions.

use serde::Deserialize;
use serde_json::{Value, json};
use stellar_xdr::{
    Hash, LedgerCloseMeta, LedgerCloseMetaV0, LedgerHeader, LedgerHeaderHistoryEntry, LedgerKey, ReadXdr, TimePoint,
    TransactionEnvelope,
};

use super::{RpcError, Server, base64, base64_all, base64_only};
use crate::sandbox::chain::{BASE_RESERVE, Chain, Closed, LIMITS, PROTOCOL, lock, sha256};

/// As many as the real server takes.
const MAX_KEYS: usize = 200;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LedgerEntries {
    keys: Vec<String>,
    xdr_format: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GetTransaction {
    hash: String,
    xdr_format: Option<String>,
}

pub fn version() -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commitHash": "",
        "buildTimestamp": "",
        "captiveCoreVersion": "none",
        "protocolVersion": PROTOCOL,
    })
}

impl Server {
    pub fn health(&self) -> Value {
        let chain = lock(&self.chain);
        let latest = self.node.latest(&chain);
        let oldest = chain.oldest(latest);
        json!({
            "status": "healthy",
            "latestLedger": latest,
            "latestLedgerCloseTime": time(&chain, latest).to_string(),
            "oldestLedger": oldest,
            "oldestLedgerCloseTime": time(&chain, oldest).to_string(),
            "ledgerRetentionWindow": chain.limits.retention,
        })
    }

    pub fn network(&self) -> Value {
        json!({"passphrase": lock(&self.chain).passphrase, "protocolVersion": PROTOCOL})
    }

    /// With the header, which newer SDKs demand.
    pub fn latest_ledger(&self) -> Result<Value, RpcError> {
        let chain = lock(&self.chain);
        let latest = self.node.latest(&chain);
        let ledger = chain.ledger(latest).ok_or_else(|| RpcError::Internal("no ledger".into()))?;
        let header = header(ledger);
        let metadata = LedgerCloseMeta::V0(LedgerCloseMetaV0 {
            ledger_header: LedgerHeaderHistoryEntry {
                hash: Hash(ledger_hash(latest)),
                header: header.clone(),
                ..Default::default()
            },
            ..Default::default()
        });
        Ok(json!({
            "id": hex::encode(ledger_hash(latest)),
            "protocolVersion": PROTOCOL,
            "sequence": latest,
            "closeTime": ledger.time.to_string(),
            "headerXdr": base64(&header)?,
            "metadataXdr": base64(&metadata)?,
        }))
    }

    /// Ledgers have room here, so everybody pays the minimum.
    pub fn fee_stats(&self) -> Value {
        let mut fees = json!({"transactionCount": "0", "ledgerCount": 50});
        for name in ["max", "min", "mode", "p10", "p20", "p30", "p40", "p50", "p60", "p70", "p80", "p90", "p95", "p99"]
        {
            fees[name] = json!("100");
        }
        let chain = lock(&self.chain);
        json!({"sorobanInclusionFee": fees, "inclusionFee": fees, "latestLedger": self.node.latest(&chain)})
    }

    pub fn ledger_entries(&self, asked: LedgerEntries) -> Result<Value, RpcError> {
        base64_only(asked.xdr_format.as_deref())?;
        if asked.keys.len() > MAX_KEYS {
            return Err(RpcError::InvalidParams(format!(
                "key count ({}) exceeds maximum supported ({MAX_KEYS})",
                asked.keys.len()
            )));
        }
        let mut keys = Vec::new();
        for (at, key) in asked.keys.iter().enumerate() {
            let key = LedgerKey::from_xdr_base64(key, LIMITS)
                .map_err(|_| RpcError::InvalidParams(format!("cannot unmarshal key value at index {at}")))?;
            if matches!(key, LedgerKey::Ttl(_)) {
                return Err(RpcError::InvalidParams(format!(
                    "ledger ttl entries cannot be queried directly, index {at}"
                )));
            }
            keys.push(key);
        }
        let chain = lock(&self.chain);
        let latest = self.node.latest(&chain);
        let mut entries = Vec::new();
        for key in &keys {
            let Some(stored) = chain.stored(key, latest) else { continue };
            let mut entry = json!({
                "key": base64(key)?,
                "xdr": base64(&stored.entry.data)?,
                "extXdr": base64(&stored.entry.ext)?,
                "lastModifiedLedgerSeq": stored.entry.last_modified_ledger_seq,
            });
            if let Some(live_until) = stored.live_until {
                entry["liveUntilLedgerSeq"] = json!(live_until);
            }
            entries.push(entry);
        }
        Ok(json!({"entries": entries, "latestLedger": latest}))
    }

    pub fn transaction(&self, asked: GetTransaction) -> Result<Value, RpcError> {
        base64_only(asked.xdr_format.as_deref())?;
        let mut hash = [0; 32];
        hex::decode_to_slice(&asked.hash, &mut hash)
            .map_err(|_| RpcError::InvalidParams("the hash is not 64 hex digits".into()))?;
        let chain = lock(&self.chain);
        let latest = self.node.latest(&chain);
        let oldest = chain.oldest(latest);
        let mut answer = json!({
            "status": "NOT_FOUND",
            "txHash": hex::encode(hash),
            "latestLedger": latest,
            "latestLedgerCloseTime": time(&chain, latest).to_string(),
            "oldestLedger": oldest,
            "oldestLedgerCloseTime": time(&chain, oldest).to_string(),
        });
        if let Some((ledger, place, found)) = chain.transaction(&hash, latest) {
            answer["status"] = json!(if found.success { "SUCCESS" } else { "FAILED" });
            answer["applicationOrder"] = json!(place + 1);
            answer["feeBump"] = json!(matches!(found.envelope, TransactionEnvelope::TxFeeBump(_)));
            answer["envelopeXdr"] = json!(base64(&found.envelope)?);
            answer["resultXdr"] = json!(base64(&found.result)?);
            answer["resultMetaXdr"] = json!(base64(&found.meta)?);
            answer["diagnosticEventsXdr"] = json!(base64_all(&found.diagnostics)?);
            answer["events"] = json!({"transactionEventsXdr": [], "contractEventsXdr": [base64_all(&found.events)?]});
            answer["ledger"] = json!(ledger.seq);
            answer["createdAt"] = json!(ledger.time.to_string());
        }
        Ok(answer)
    }
}

/// Unix seconds.
pub fn time(chain: &Chain, seq: u32) -> u64 {
    chain.ledger(seq).map_or(0, |ledger| ledger.time)
}

/// Ledgers have no content hash here; this one is unique, and the same at every node.
fn ledger_hash(seq: u32) -> [u8; 32] {
    sha256(seq.to_be_bytes())
}

fn header(ledger: &Closed) -> LedgerHeader {
    let mut header = LedgerHeader {
        ledger_version: PROTOCOL,
        previous_ledger_hash: Hash(ledger_hash(ledger.seq.saturating_sub(1))),
        ledger_seq: ledger.seq,
        base_fee: 100,
        base_reserve: BASE_RESERVE,
        max_tx_set_size: 1_000,
        ..Default::default()
    };
    header.scp_value.close_time = TimePoint(ledger.time);
    header
}
