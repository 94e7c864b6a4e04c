//! How a gate is: ready while it takes requests and its claims can be reached. What it depends on is looked at in the
//! background, and whoever asks gets the last look.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures_util::future::{Either, select};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde_json::json;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::gate::desk::Gate;
use crate::gate::payment::Identity;
use crate::telemetry;

/// A look that takes longer found nobody.
const WITHIN: Duration = Duration::from_secs(4);

pub struct Health {
    draining: AtomicBool,
    claims: AtomicBool,
}

impl Health {
    /// As it is at the end of a start: the claims have answered.
    pub fn new() -> Arc<Health> {
        let health = Arc::new(Health { draining: AtomicBool::new(false), claims: AtomicBool::new(true) });
        health.tell();
        health
    }

    /// From now on `/readyz` says no: load balancers look away, and nothing else changes yet.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.tell();
    }

    /// `Err` is the reason. Without its claims a gate can sell nothing; a facilitator or an upstream that is away is no
    /// reason to send its clients to another replica, which has the same ones.
    pub fn ready(&self) -> Result<(), &'static str> {
        match (self.draining.load(Ordering::Relaxed), self.claims.load(Ordering::Relaxed)) {
            (true, _) => Err("draining"),
            (false, false) => Err("claims_unreachable"),
            (false, true) => Ok(()),
        }
    }

    fn tell(&self) {
        telemetry::READY.set([], if self.ready().is_ok() { 1.0 } else { 0.0 });
    }

    /// Keeps it at what it finds, until `shutdown`.
    pub async fn watch(self: Arc<Self>, gate: Gate, interval: Duration, shutdown: CancellationToken) {
        loop {
            let pause = pin!(sleep(interval));
            if let Either::Left(_) = select(pin!(shutdown.cancelled()), pause).await {
                return;
            }
            let looked = timeout(WITHIN, gate.claims().look(&Identity([0; 32]))).await;
            let up = matches!(looked, Ok(Ok(_)));
            if self.claims.swap(up, Ordering::Relaxed) != up {
                match up {
                    true => tracing::info!("the claims can be reached again"),
                    false => tracing::error!("the claims cannot be reached: nothing is sold"),
                }
            }
            self.tell();
        }
    }

    /// `/healthz`, for everybody.
    pub fn public(self: &Arc<Self>) -> axum::Router {
        let health = self.clone();
        axum::Router::new().route("/healthz", get(move || async move { health.status() }))
    }

    /// For the orchestrator and Prometheus: `/livez`, the process answers, whatever it depends on; `/readyz`, it may be
    /// sent requests; `/metrics`.
    pub fn probes(self: &Arc<Self>) -> axum::Router {
        let health = self.clone();
        axum::Router::new()
            .route("/livez", get(async || Json(json!({"status": "alive"}))))
            .route("/readyz", get(move || async move { health.status() }))
            .route("/metrics", get(async || metrics()))
    }

    fn status(&self) -> Response {
        match self.ready() {
            Ok(()) => Json(json!({"status": "ready"})).into_response(),
            Err(reason) => {
                (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "unready", "reason": reason}))).into_response()
            }
        }
    }
}

fn metrics() -> Response {
    match telemetry::gate_text() {
        Ok(text) => ([(CONTENT_TYPE, telemetry::TEXT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
