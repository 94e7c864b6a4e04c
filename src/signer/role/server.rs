//! The contract of `wire` over HTTP: bearer keys, one bounded body, one answer.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::sync::Semaphore;
use url::form_urlencoded;

use super::Role;
use super::policy::No;
use crate::signer::wire;
use crate::telemetry;

/// A caller that sends its body slower than this is cut off.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// Requests that are decided at once; further ones wait.
const AT_ONCE: usize = 64;

struct Serving {
    role: Arc<Role>,
    places: Semaphore,
}

pub fn router(role: Arc<Role>) -> Router {
    let serving = Arc::new(Serving { role, places: Semaphore::new(AT_ONCE) });
    Router::new().route(wire::ADDRESS_PATH, get(address)).route(wire::SIGN_PATH, post(sign)).with_state(serving)
}

impl IntoResponse for No {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status()).unwrap_or(StatusCode::FORBIDDEN);
        let said = wire::Refusal {
            error: Some(self.word().into()),
            message: Some(self.to_string().into()),
            ..wire::Refusal::default()
        };
        let mut response = (status, axum::Json(said)).into_response();
        if self == No::Unauthorized {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

async fn address(State(serving): State<Arc<Serving>>, RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    let role = &serving.role;
    if let Err(no) = role.callers.known(&headers).await.and_then(|caller| role.callers.admit(&caller)) {
        return no.into_response();
    }
    let query = query.unwrap_or_default();
    let network = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "network");
    let allowed = |name: &str| role.policy().networks.keys().any(|network| network.as_str() == name);
    if !network.is_some_and(|(_, name)| allowed(&name)) {
        return No::NetworkNotAllowed.into_response();
    }
    axum::Json(wire::Address { address: role.address().into() }).into_response()
}

async fn sign(State(serving): State<Arc<Serving>>, headers: HeaderMap, body: Body) -> Response {
    let role = &serving.role;
    // Before the body is read: a stranger's costs nothing.
    let admitted = role.callers.known(&headers).await.and_then(|caller| role.callers.admit(&caller).map(|()| caller));
    let caller = match admitted {
        Ok(caller) => caller,
        Err(no) => {
            telemetry::SIGNER_DECISIONS.one(["refused", no.word()]);
            if no == No::Unauthorized {
                tracing::warn!("a request without a known bearer key");
            }
            return no.into_response();
        }
    };
    let body = tokio::time::timeout(BODY_WITHIN, axum::body::to_bytes(body, wire::BODY.bytes)).await;
    let body = match body {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => return StatusCode::PAYLOAD_TOO_LARGE.into_response(),
        Err(_) => return StatusCode::REQUEST_TIMEOUT.into_response(),
    };
    let Ok(_place) = serving.places.acquire().await else { return No::TooMany.into_response() };
    match role.sign(caller.as_str(), &body).await {
        Ok(signature) => axum::Json(wire::SignAnswer { signed_auth_entry_xdr: signature.into() }).into_response(),
        Err(no) => no.into_response(),
    }
}
