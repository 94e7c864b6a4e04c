//! The Stellar JSON-RPC of one node of the local network: the methods and fields that the official packages use
//! (`chains.md` section 2). Answers are in base64 XDR only.
#![allow(clippy::disallowed_methods, reason = "the host is CPU work, and this network is outside the simulation")]

mod events;
mod methods;
mod send;
mod simulate;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use stellar_xdr::{ReadXdr, TransactionEnvelope, WriteXdr};

use super::chain::{LIMITS, Node, Shared};
use crate::json as strict;
use crate::ports::World;

const BODY: strict::Limits = strict::Limits { bytes: 512 * 1024, depth: 32 };

/// A JSON-RPC error with the code that the real server gives.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RpcError {
    #[error("parse error: the request {0}")]
    Parse(strict::JsonError),
    #[error("{0}")]
    InvalidRequest(String),
    #[error("method not found: {0}")]
    MethodNotFound(String),
    #[error("{0}")]
    InvalidParams(String),
    #[error("{0}")]
    Internal(String),
}

impl RpcError {
    fn code(&self) -> i32 {
        match self {
            RpcError::Parse(_) => -32_700,
            RpcError::InvalidRequest(_) => -32_600,
            RpcError::MethodNotFound(_) => -32_601,
            RpcError::InvalidParams(_) => -32_602,
            RpcError::Internal(_) => -32_603,
        }
    }
}

#[derive(Clone)]
pub(super) struct Server {
    chain: Shared,
    node: Node,
    world: World,
}

pub(super) fn router(chain: Shared, node: Node, world: World) -> Router {
    Router::new()
        .route("/", post(answer))
        .route("/{*path}", post(answer))
        .layer(DefaultBodyLimit::max(BODY.bytes))
        .with_state(Server { chain, node, world })
}

async fn answer(State(server): State<Server>, body: Bytes) -> Response {
    // On a thread of its own: a simulation is CPU work, and the chain's lock is held while a ledger closes.
    match tokio::task::spawn_blocking(move || server.answer(&body)).await {
        Ok(answer) => ([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// The members of a request; others are refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request<'a> {
    jsonrpc: String,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    method: String,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

impl Server {
    fn answer(&self, body: &[u8]) -> Value {
        let (id, result) = match request(body) {
            Ok((id, method, params)) => (id, self.call(&method, params)),
            Err(error) => (Value::Null, Err(error)),
        };
        match result {
            Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
            Err(error) => {
                json!({"jsonrpc": "2.0", "id": id, "error": {"code": error.code(), "message": error.to_string()}})
            }
        }
    }

    fn call(&self, method: &str, given: Option<&RawValue>) -> Result<Value, RpcError> {
        match method {
            "getHealth" => params::<Nothing>(given).map(|_| self.health()),
            "getNetwork" => params::<Nothing>(given).map(|_| self.network()),
            "getVersionInfo" => params::<Nothing>(given).map(|_| methods::version()),
            "getLatestLedger" => params::<Nothing>(given).and_then(|_| self.latest_ledger()),
            "getFeeStats" => params::<Nothing>(given).map(|_| self.fee_stats()),
            "getLedgerEntries" => self.ledger_entries(params(given)?),
            "getTransaction" => self.transaction(params(given)?),
            "sendTransaction" => self.send(params(given)?),
            "simulateTransaction" => self.simulate(params(given)?),
            "getEvents" => self.events(params(given)?),
            unknown => Err(RpcError::MethodNotFound(unknown.chars().take(64).collect())),
        }
    }
}

#[derive(Deserialize)]
struct Nothing {}

fn request(body: &[u8]) -> Result<(Value, String, Option<&RawValue>), RpcError> {
    let raw = strict::check(body, BODY).map_err(RpcError::Parse)?;
    if raw.get().starts_with('[') {
        return Err(RpcError::InvalidRequest("batches are not supported".into()));
    }
    let invalid = || RpcError::InvalidRequest("the request is no JSON-RPC 2.0 call".into());
    let request: Request<'_> = serde_json::from_str(raw.get()).map_err(|_| invalid())?;
    let id: Value = serde_json::from_str(request.id.ok_or_else(invalid)?.get()).map_err(|_| invalid())?;
    if request.jsonrpc != "2.0" || !(id.is_string() || id.is_number()) {
        return Err(invalid());
    }
    Ok((id, request.method, request.params))
}

/// Parameters come by name; absent ones are none.
fn params<T: DeserializeOwned>(given: Option<&RawValue>) -> Result<T, RpcError> {
    let text = match given.map(RawValue::get) {
        None | Some("null") => "{}",
        Some(object) if object.starts_with('{') => object,
        Some(_) => return Err(RpcError::InvalidParams("parameters must be given by name".into())),
    };
    serde_json::from_str(text).map_err(|error| RpcError::InvalidParams(format!("invalid parameters: {error}")))
}

/// `xdrFormat`: base64, or nothing.
fn base64_only(format: Option<&str>) -> Result<(), RpcError> {
    match format {
        None | Some("" | "base64") => Ok(()),
        Some(_) => Err(RpcError::InvalidParams("xdrFormat: only base64 is supported".into())),
    }
}

fn envelope(transaction: &str) -> Result<TransactionEnvelope, RpcError> {
    TransactionEnvelope::from_xdr_base64(transaction, LIMITS)
        .map_err(|_| RpcError::InvalidParams("invalid_xdr: the transaction is no TransactionEnvelope".into()))
}

fn base64(value: &impl WriteXdr) -> Result<String, RpcError> {
    value.to_xdr_base64(LIMITS).map_err(|error| RpcError::Internal(error.to_string()))
}

fn base64_all<T: WriteXdr>(values: &[T]) -> Result<Vec<String>, RpcError> {
    values.iter().map(base64).collect()
}

#[cfg(test)]
mod tests;
