//! `simulateTransaction`.

use serde::Deserialize;
use serde_json::{Value, json};
use soroban_simulation::simulation::{InvokeHostFunctionSimulationResult, LedgerEntryDiff};
use stellar_xdr::OperationBody;

use super::{RpcError, Server, base64, base64_all, base64_only, envelope};
use crate::sandbox::chain::{Auth, account_of, key_of, lock, simulate, unwrap_bump};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Simulate {
    transaction: String,
    auth_mode: Option<String>,
    xdr_format: Option<String>,
}

impl Server {
    pub fn simulate(&self, asked: Simulate) -> Result<Value, RpcError> {
        base64_only(asked.xdr_format.as_deref())?;
        let envelope = envelope(&asked.transaction)?;
        let latest = self.node.latest(&lock(&self.chain));
        let failed = |error: String| json!({"error": error, "events": [], "latestLedger": latest});
        let Some((inner, _)) = unwrap_bump(&envelope) else {
            return Ok(failed("Transaction envelope of an unsupported version".into()));
        };
        let [operation] = inner.tx.operations.as_slice() else {
            return Ok(failed("Transaction contains more than one operation".into()));
        };
        let OperationBody::InvokeHostFunction(invoke) = &operation.body else {
            return Ok(failed("Transaction contains unsupported operation type".into()));
        };
        let record = |root_only| Auth::Record { address_v2: self.node.records_address_v2(), root_only };
        let auth = match asked.auth_mode.as_deref() {
            None | Some("") if invoke.auth.is_empty() => record(true),
            None | Some("" | "enforce") => Auth::Enforce(invoke.auth.to_vec()),
            Some("record") if invoke.auth.is_empty() => record(true),
            Some("record_allow_nonroot") if invoke.auth.is_empty() => record(false),
            Some("record" | "record_allow_nonroot") => {
                return Err(RpcError::InvalidParams("authMode: nothing is recorded where entries are given".into()));
            }
            Some(_) => return Err(RpcError::InvalidParams("authMode is none of the three".into())),
        };
        let source = account_of(operation.source_account.as_ref().unwrap_or(&inner.tx.source_account));
        let seed = self.world.random();
        match simulate(&self.chain, latest, invoke.host_function.clone(), auth, &source, seed) {
            Ok(done) => shown(done, latest),
            Err(error) => Ok(failed(error.to_string())),
        }
    }
}

fn shown(done: InvokeHostFunctionSimulationResult, latest: u32) -> Result<Value, RpcError> {
    let events = base64_all(&done.diagnostic_events)?;
    let (value, data) = match (done.invoke_result, done.transaction_data) {
        (Ok(value), Some(data)) => (value, data),
        (result, _) => {
            let error = result.err().map_or_else(|| "no resources".to_owned(), |error| format!("{error:?}"));
            let error: String = error.chars().take(4_000).collect();
            return Ok(json!({"error": error, "events": events, "latestLedger": latest}));
        }
    };
    let changes = done.modified_entries.iter().map(change).collect::<Result<Vec<_>, _>>()?;
    Ok(json!({
        "latestLedger": latest,
        "minResourceFee": data.resource_fee.to_string(),
        "transactionData": base64(&data)?,
        "results": [{"auth": base64_all(&done.auth)?, "xdr": base64(&value)?}],
        "events": events,
        "stateChanges": changes,
        "cost": {
            "cpuInsns": done.simulated_instructions.to_string(),
            "memBytes": done.simulated_memory.to_string(),
        },
    }))
}

fn change(diff: &LedgerEntryDiff) -> Result<Value, RpcError> {
    let kind = match (&diff.state_before, &diff.state_after) {
        (None, _) => "created",
        (_, None) => "deleted",
        _ => "updated",
    };
    let key = diff.state_after.as_ref().or(diff.state_before.as_ref()).and_then(|entry| key_of(&entry.data));
    Ok(json!({
        "type": kind,
        "key": key.as_ref().map(base64).transpose()?,
        "before": diff.state_before.as_ref().map(base64).transpose()?,
        "after": diff.state_after.as_ref().map(base64).transpose()?,
    }))
}
