//! A seller and a facilitator that fail: they answer with an error, never answer, lose the answer to what they have
//! done, or (settling) do it and let the caller wait until it gives up. Each happens to the same share of requests, by a
//! seeded generator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};

use super::rng::Rng;

/// Longer than any caller here waits.
const HANG: Duration = Duration::from_secs(20);
/// A facilitator that settles and is then late. The seller waits longer, its buyer does not.
const LATE: Duration = Duration::from_secs(7);

pub struct Hostile {
    rng: Rng,
    percent: u64,
    calm: AtomicBool,
    struck: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Clone)]
struct Faulty {
    hostile: Arc<Hostile>,
    seller: bool,
}

impl Hostile {
    /// `percent`: of all requests, for each kind of fault.
    pub fn new(seed: u64, percent: u64) -> Arc<Hostile> {
        let calm = AtomicBool::new(percent == 0);
        Arc::new(Hostile { rng: Rng::new(seed, "hostile"), percent, calm, struck: Mutex::default() })
    }

    pub fn seller(self: &Arc<Hostile>, router: Router) -> Router {
        let faulty = Faulty { hostile: self.clone(), seller: true };
        router.layer(from_fn_with_state(faulty, strike))
    }

    pub fn facilitator(self: &Arc<Hostile>, router: Router) -> Router {
        let faulty = Faulty { hostile: self.clone(), seller: false };
        router.layer(from_fn_with_state(faulty, strike))
    }

    /// From now on nothing fails.
    pub fn calm_down(&self) {
        self.calm.store(true, Ordering::SeqCst);
    }

    /// How often each fault struck.
    pub fn struck(&self) -> BTreeMap<&'static str, u64> {
        self.struck.lock().expect("nobody panics with it").clone()
    }

    fn note(&self, fault: &'static str) {
        *self.struck.lock().expect("nobody panics with it").entry(fault).or_default() += 1;
    }
}

async fn strike(State(faulty): State<Faulty>, request: Request, next: Next) -> Response {
    let Faulty { hostile, seller } = faulty;
    let path = request.uri().path().to_owned();
    let asked = request.method() == Method::POST && (seller || path == "/verify" || path == "/settle");
    if !asked || hostile.calm.load(Ordering::SeqCst) {
        return next.run(request).await;
    }
    let settles = path == "/settle";
    let name = |fault: [&'static str; 2]| if seller { fault[0] } else { fault[1] };
    let drawn = hostile.rng.below(100) / hostile.percent.max(1);
    match drawn {
        0 => {
            hostile.note(name(["seller: error", "facilitator: error"]));
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
        1 => {
            hostile.note(name(["seller: hang", "facilitator: hang"]));
            tokio::time::sleep(if seller { HANG } else { LATE }).await;
            StatusCode::GATEWAY_TIMEOUT.into_response()
        }
        2 => {
            hostile.note(name(["seller: answer lost", "facilitator: answer lost"]));
            to_the_end(request, next).await;
            // A body that breaks off cuts the connection.
            Body::from_stream(futures_util::stream::once(async { Err::<axum::body::Bytes, _>("lost") })).into_response()
        }
        3 if settles => {
            hostile.note("facilitator: settled, then a timeout");
            to_the_end(request, next).await;
            tokio::time::sleep(LATE).await;
            StatusCode::GATEWAY_TIMEOUT.into_response()
        }
        _ => next.run(request).await,
    }
}

/// Also when the caller has gone.
async fn to_the_end(request: Request, next: Next) {
    let _ = tokio::spawn(next.run(request)).await;
}
