//! `sendTransaction`.

use serde::Deserialize;
use serde_json::{Value, json};
use stellar_xdr::{TransactionResult, TransactionResultExt};

use super::methods::time;
use super::{RpcError, Server, base64, base64_only, envelope};
use crate::sandbox::chain::{Admission, lock, transaction_hash};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Send {
    transaction: String,
    xdr_format: Option<String>,
}

impl Server {
    /// Whatever a node has seen, it hands the transaction to the whole network.
    pub fn send(&self, asked: Send) -> Result<Value, RpcError> {
        base64_only(asked.xdr_format.as_deref())?;
        let envelope = envelope(&asked.transaction)?;
        let now = self.world.unix_ms() / 1_000;
        let mut chain = lock(&self.chain);
        let hash = transaction_hash(chain.network_id, &envelope)
            .ok_or_else(|| RpcError::InvalidParams("envelopes of the first version are not supported".into()))?;
        let latest = self.node.latest(&chain);
        let mut answer = json!({
            "hash": hex::encode(hash),
            "latestLedger": latest,
            "latestLedgerCloseTime": time(&chain, latest).to_string(),
        });
        let status = match chain.send(envelope, hash, now) {
            Admission::Pending => "PENDING",
            Admission::Duplicate => "DUPLICATE",
            Admission::TryAgainLater => "TRY_AGAIN_LATER",
            Admission::Refused(result) => {
                let result = TransactionResult { fee_charged: 0, result, ext: TransactionResultExt::V0 };
                answer["errorResultXdr"] = json!(base64(&result)?);
                "ERROR"
            }
        };
        answer["status"] = json!(status);
        Ok(answer)
    }
}
