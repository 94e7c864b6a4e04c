//! The listener of the orchestrator and of Prometheus. No authentication, no Host check: it is for the pod's network.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde_json::json;

use super::health::Health;
use crate::telemetry;

/// `/livez`: the process answers, whatever it depends on. `/readyz`: it may be sent requests. `/metrics`.
pub fn router(health: Arc<Health>) -> axum::Router {
    axum::Router::new()
        .route("/livez", get(async || Json(json!({"status": "alive"}))))
        .route("/readyz", get(move || async move { ready(&health) }))
        .route("/metrics", get(async || metrics()))
}

fn ready(health: &Health) -> Response {
    match health.ready() {
        Ok(()) => Json(json!({"status": "ready"})).into_response(),
        Err(reason) => {
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "unready", "reason": reason}))).into_response()
        }
    }
}

fn metrics() -> Response {
    match telemetry::text() {
        Ok(text) => ([(CONTENT_TYPE, telemetry::TEXT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
