//! A facilitator that failed again and again is left alone for a while, so that nobody waits for what will not come.
//! There is one of these for each network: a host that settles on one may be ill on another.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::time::Instant;

use crate::facilitator::{Facilitator, FacilitatorError, Question, SupportedKind, Verdict};
use crate::telemetry;
use crate::x402::Settlement;

/// So many failures in a row open it.
const FAILURES: u32 = 5;
const SHORTEST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(60);

pub struct Guarded {
    facilitator: Facilitator,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    in_a_row: u32,
    /// Nobody asks before this moment, and then one.
    rests_until: Option<Instant>,
}

impl Guarded {
    pub fn new(facilitator: Facilitator) -> Guarded {
        Guarded { facilitator, health: Mutex::default() }
    }

    /// Before something is begun that needs it. At the end of each rest one caller is told yes.
    pub fn is_well(&self) -> bool {
        let mut health = self.health();
        match health.rests_until {
            None => true,
            Some(until) if Instant::now() < until => false,
            Some(_) => {
                health.rests_until = Some(Instant::now() + SHORTEST);
                true
            }
        }
    }

    pub async fn verify(
        &self,
        payload: &RawValue,
        requirements: &RawValue,
        timeout: Duration,
    ) -> Result<Verdict, FacilitatorError> {
        if !self.is_well() {
            telemetry::GATE_FACILITATOR.one(["verify", "resting"]);
            return Err(FacilitatorError::Resting);
        }
        self.learn("verify", self.facilitator.verify(payload, requirements, timeout).await)
    }

    /// Asked in any case: what is to be settled was delivered or is unknown already.
    pub async fn settle_exactly(
        &self,
        question: &Question,
        timeout: Duration,
    ) -> Result<(Box<RawValue>, Settlement), FacilitatorError> {
        self.learn("settle", self.facilitator.settle_exactly(question, timeout).await)
    }

    pub async fn supported(&self, timeout: Duration) -> Result<Vec<SupportedKind>, FacilitatorError> {
        let said = self.facilitator.supported(timeout).await;
        telemetry::GATE_FACILITATOR.one(["supported", if said.is_ok() { "answered" } else { "failed" }]);
        said
    }

    fn learn<T>(&self, call: &'static str, said: Result<T, FacilitatorError>) -> Result<T, FacilitatorError> {
        let failed = match &said {
            Ok(_) => false,
            Err(FacilitatorError::Status(status)) => *status >= 500 || *status == 429,
            Err(_) => true,
        };
        telemetry::GATE_FACILITATOR.one([call, if failed { "failed" } else { "answered" }]);
        let mut health = self.health();
        if failed {
            health.in_a_row = health.in_a_row.saturating_add(1);
            if let Some(beyond) = health.in_a_row.checked_sub(FAILURES) {
                health.rests_until = Some(Instant::now() + (SHORTEST * 2u32.pow(beyond.min(8))).min(LONGEST));
            }
        } else {
            *health = Health::default();
        }
        drop(health);
        said
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Client, Destination, Limits, Tls};
    use crate::ports::machine;

    fn guarded() -> Guarded {
        let limits = Limits { timeout: Duration::from_secs(1), max_response_bytes: 1_000 };
        let http = Client::new(machine::world().0, Tls::Plain, Destination::Operator, limits);
        Guarded::new(Facilitator::new(http, &"http://127.0.0.1:1".parse().unwrap()))
    }

    #[tokio::test(start_paused = true)]
    async fn it_rests_after_five_failures_and_one_caller_tries_it_again() {
        let guarded = guarded();
        for _ in 0..4 {
            let _ = guarded.learn::<()>("settle", Err(FacilitatorError::Status(502)));
        }
        let _ = guarded.learn::<()>("settle", Err(FacilitatorError::Status(400)));
        for _ in 0..4 {
            let _ = guarded.learn::<()>("settle", Err(FacilitatorError::Malformed("HTML".into())));
        }
        assert!(guarded.is_well(), "a refusal is an answer");
        let _ = guarded.learn::<()>("settle", Err(FacilitatorError::Status(429)));
        assert!(!guarded.is_well());
        let null = RawValue::NULL;
        assert!(matches!(guarded.verify(null, null, SHORTEST).await, Err(FacilitatorError::Resting)));
        tokio::time::advance(SHORTEST).await;
        assert!(guarded.is_well());
        assert!(!guarded.is_well(), "the others wait for what the first one learns");
        let _ = guarded.learn::<()>("settle", Err(FacilitatorError::Status(500)));
        tokio::time::advance(SHORTEST).await;
        assert!(!guarded.is_well(), "each time for longer");
        tokio::time::advance(SHORTEST).await;
        assert!(guarded.is_well());
        let _ = guarded.learn("settle", Ok(()));
        assert!(guarded.is_well() && guarded.is_well());
    }
}
