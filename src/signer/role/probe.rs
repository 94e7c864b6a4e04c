//! Health and metrics, on a listener of their own: plain HTTP, no key, no secret in any answer.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Role;
use crate::telemetry;

const PING_WITHIN: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Probe {
    role: Arc<Role>,
    /// Cancelled when the process is about to end.
    stopping: CancellationToken,
}

pub fn router(role: Arc<Role>, stopping: CancellationToken) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/healthz", get(health))
        .route("/metrics", get(metrics))
        .with_state(Probe { role, stopping })
}

impl Probe {
    /// Why nothing can be signed.
    async fn problem(&self) -> Option<&'static str> {
        if self.stopping.is_cancelled() {
            telemetry::READY.set([], 0.0);
            return Some("stopping");
        }
        let answers = tokio::time::timeout(PING_WITHIN, self.role.store.ping()).await.is_ok_and(|ping| ping.is_ok());
        let word = self.role.store.word();
        telemetry::SIGNER_STORE_UP.set([word], f64::from(u8::from(answers)));
        telemetry::READY.set([], f64::from(u8::from(answers)));
        (!answers).then_some("store_unavailable")
    }
}

async fn ready(State(probe): State<Probe>) -> Response {
    match probe.problem().await {
        None => "ok\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

/// A network whose ledger is unknown signs nothing, and takes the others nothing away.
async fn health(State(probe): State<Probe>) -> Json<serde_json::Value> {
    let problem = probe.problem().await;
    let mut networks = serde_json::Map::new();
    let mut some_unknown = false;
    for (name, network) in &probe.role.policy().networks {
        let known = probe.role.newest(name, network).await.is_ok();
        some_unknown |= !known;
        networks.insert(name.to_string(), json!(if known { "ready" } else { "ledger_unknown" }));
    }
    let reason = problem.or(some_unknown.then_some("ledger_unknown"));
    let signing = if reason.is_none() { "ready" } else { "degraded" };
    Json(json!({
        "status": "ok", "signing": signing, "reason": reason, "networks": networks, "address": probe.role.address(),
    }))
}

/// A scrape asks the database too: what it shows is now.
async fn metrics(State(probe): State<Probe>) -> Response {
    let _ = probe.problem().await;
    match telemetry::signer_text() {
        Ok(text) => ([(header::CONTENT_TYPE, telemetry::TEXT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
