//! What an operator sees of a running process: the log, and every metric and field name. They stand here and nowhere
//! else; `docs/metrics.md` is held to this file by a test.
//!
//! Business code says what happened by a call on one of the families below, or by running a step in [`phase`]. That
//! touches nothing but this process's counters: without the feature `roles` they are no code at all, and no result ever
//! comes back from them, so a simulation stays what its seed says. Label values come from closed sets or from the
//! configuration; never from a caller, a seller or an address.

mod family;
#[cfg(feature = "roles")]
mod log;

use std::future::Future;

use tokio::time::Instant;
use tracing::{Instrument as _, Span};

pub use family::{Counter, Described, Family, Gauge, Held, Histogram};
#[cfg(feature = "roles")]
pub use log::{filter, init};

/// Seconds: from a ledger transaction to a settlement on a chain.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 330.0];
const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

macro_rules! families {
    ($(#[$about:meta])* $all:ident; $($name:ident: $kind:ident<$n:literal> = ($($of:expr),+ $(,)?);)+) => {
        $(pub static $name: $kind<$n> = $kind::new($($of),+);)+
        $(#[$about])*
        pub static $all: &[&dyn Family] = &[$(&$name),+];
    };
}

families! {
    /// Every family of a process that serves agents, in the order of the documentation.
    FAMILIES;
    BUILD_INFO: Gauge<1> = (
        "tollway_build_info", ["version"], &[[env!("CARGO_PKG_VERSION")]],
        "1, with the version of this program",
    );
    READY: Gauge<0> = (
        "tollway_ready", [], &[],
        "1 while /readyz answers 200",
    );
    PAYMENTS_DEGRADED: Gauge<1> = (
        "tollway_payments_degraded", ["reason"],
        &[["no_limit"], ["ledger_unreachable"], ["signer_unreachable"], ["rpc_unreachable"]],
        "1 while paid calls are refused for this reason",
    );
    REQUESTS: Counter<3> = (
        "tollway_requests_total", ["method", "revision", "status"], &[],
        "HTTP requests to the MCP endpoints, by MCP method, protocol revision and class of the HTTP status",
    );
    AUTH_FAILURES: Counter<1> = (
        "tollway_auth_failures_total", ["reason"], &[["unauthorized"], ["forbidden"], ["too_many"]],
        "requests that were not let in (401, 403, 429)",
    );
    CALLS: Gauge<0> = (
        "tollway_calls_running", [], &[],
        "MCP calls under way",
    );
    STREAMS: Gauge<0> = (
        "tollway_streams_open", [], &[],
        "streams of sessions on which the server has nothing but signs of life to send",
    );
    SSE_STREAMS: Gauge<0> = (
        "tollway_sse_streams_open", [], &[],
        "streams of GET /sse",
    );
    RELAYED: Counter<2> = (
        "tollway_relayed_total", ["way", "result"],
        &[
            ["sent", "taken"], ["sent", "gone"], ["sent", "busy"], ["sent", "ending"], ["sent", "unreachable"],
            ["sent", "unanswered"], ["received", "taken"], ["received", "gone"], ["received", "busy"],
            ["received", "ending"], ["received", "refused"],
        ],
        "messages of streams on another replica, handed over (sent) or taken over (received)",
    );
    CONNECTIONS: Gauge<0> = (
        "tollway_connections_open", [], &[],
        "inbound connections",
    );
    OUTCOMES: Counter<2> = (
        "tollway_outcomes_total", ["code", "reason"], &[],
        "ended x402_call_resource calls, by the code and reason of docs/outcomes.md (OK: how they ended well)",
    );
    PHASES: Histogram<1> = (
        "tollway_phase_seconds", ["phase"],
        &[["lookup"], ["resolve"], ["probe"], ["guard"], ["reserve"], ["sign"], ["prepare"], ["pay"], ["record"]],
        "how long the steps of a paid call take",
        SECONDS,
    );
    HOLDS: Gauge<1> = (
        "tollway_holds", ["state"], &[["reserved"], ["in_doubt"]],
        "open payments in the ledger",
    );
    OLDEST_HOLD: Gauge<1> = (
        "tollway_oldest_hold_seconds", ["state"], &[["reserved"], ["in_doubt"]],
        "age of the oldest open payment; 0 without one",
    );
    SWEPT: Counter<1> = (
        "tollway_swept_total", ["result"],
        &[["settled"], ["released"], ["open"], ["inconclusive"], ["overdue"], ["lost"], ["failed"]],
        "open payments that the sweep looked at, by what came of it (overdue: also counted as inconclusive)",
    );
    SWEEP_PASSES: Counter<0> = (
        "tollway_sweep_passes_total", [], &[],
        "passes of the sweep, each network's by itself",
    );
    LEDGER_UP: Gauge<0> = (
        "tollway_ledger_up", [], &[],
        "1 while the ledger answers, with this program's schema",
    );
    LEDGER_CLOCK: Gauge<0> = (
        "tollway_ledger_clock_ahead_seconds", [], &[],
        "the ledger's clock minus this process's",
    );
    LEDGER_QUEUE: Gauge<0> = (
        "tollway_ledger_queue_length", [], &[],
        "reservations and settlements that wait for their batch",
    );
    LEDGER_BATCH: Histogram<0> = (
        "tollway_ledger_batch_size", [], &[],
        "reservations and settlements of one transaction",
        BATCH,
    );
    LEDGER_BUSY: Counter<0> = (
        "tollway_ledger_busy_total", [], &[],
        "reservations and settlements that were refused because the queue was full or too slow",
    );
    RPC_CALLS: Counter<2> = (
        "tollway_rpc_calls_total", ["network", "result"], &[],
        "requests to chain RPCs",
    );
    SIGNER_CALLS: Counter<1> = (
        "tollway_signer_calls_total", ["result"],
        &[["signed"], ["refused"], ["unavailable"], ["failed"], ["window_missed"], ["lease_lost"]],
        "signatures asked for",
    );
    CATALOG_CALLS: Counter<1> = (
        "tollway_catalog_calls_total", ["result"], &[["ok"], ["not_listed"], ["timeout"], ["unusable"]],
        "searches and look-ups in the catalog",
    );
}

families! {
    /// Those of `tollway signer`, whose process has `tollway_ready` and `tollway_build_info` besides.
    SIGNER_FAMILIES;
    SIGNER_DECISIONS: Counter<2> = (
        "tollway_signer_decisions_total", ["decision", "reason"],
        &[["signed", ""], ["repeated", ""], ["withheld", "too_late"], ["refused", "unauthorized"], ["refused", "day_cap"]],
        "requests to sign, by what was decided (signed, repeated, refused, withheld) and why not",
    );
    SIGNER_SECONDS: Histogram<1> = (
        "tollway_signer_decision_seconds", ["decision"], &[["signed"], ["refused"]],
        "from a request's body to its decision",
        SECONDS,
    );
    SIGNER_DAY: Gauge<2> = (
        "tollway_signer_day_signed_atomic", ["network", "asset"], &[],
        "what the signatures of this UTC day may move, atomic units (rounded above 2^53)",
    );
    SIGNER_DAY_CAP: Gauge<2> = (
        "tollway_signer_day_cap_atomic", ["network", "asset"], &[],
        "the cap of a UTC day, atomic units; absent where it is unlimited",
    );
    SIGNER_RELOADS: Counter<2> = (
        "tollway_signer_reloads_total", ["what", "result"],
        &[["tls", "changed"], ["tls", "failed"], ["bearer_keys", "changed"], ["bearer_keys", "failed"]],
        "files that changed on disk and were read again",
    );
    SIGNER_STALE: Gauge<1> = (
        "tollway_signer_stale", ["what"], &[["tls"], ["bearer_keys"]],
        "1 while the file on disk cannot be used and the one before it is in use",
    );
    SIGNER_STORE_ERRORS: Counter<1> = (
        "tollway_signer_store_errors_total", ["what"], &[["reserve"], ["refused"], ["withheld"]],
        "writes to the signer's database that failed",
    );
    SIGNER_STORE_UP: Gauge<1> = (
        "tollway_signer_store_up", ["store"], &[],
        "1 while the signer's database answers",
    );
}

families! {
    /// Those of a gate, whose process has `tollway_ready` and `tollway_build_info` besides.
    GATE_FAMILIES;
    GATE_OUTCOMES: Counter<1> = (
        "tollway_gate_outcomes_total", ["outcome"],
        &[
            ["malformed"], ["stored_answer"], ["in_progress"], ["ran_again"], ["runs_exhausted"], ["answer_expired"],
            ["answer_too_large"], ["already_settled"], ["payment_already_used"], ["settlement_unknown"], ["not_found"],
            ["free"], ["invalid_arguments"], ["payment_required"], ["invalid_payload"], ["invalid_x402_version"],
            ["no_matching_requirements"], ["extension_echo_mismatch"], ["payment_identifier_required"],
            ["payment_identifier_conflict"], ["too_many_payments"], ["store_unavailable"], ["payment_invalid"],
            ["verify_unavailable"], ["uncharged"], ["sold"], ["settlement_failed"], ["sold_and_failed"],
            ["not_on_offer"], ["hook_halted"], ["hook_skipped"], ["hook_failed"], ["internal"],
        ],
        "ended requests for tools, resources and prompts, by the outcome of docs/outcomes.md, table Gate",
    );
    GATE_SALES: Gauge<0> = (
        "tollway_gate_sales_running", [], &[],
        "payments that are being claimed, verified, run or settled now",
    );
    GATE_FACILITATOR: Counter<2> = (
        "tollway_gate_facilitator_calls_total", ["call", "result"],
        &[
            ["verify", "answered"], ["verify", "failed"], ["verify", "resting"], ["settle", "answered"],
            ["settle", "failed"], ["supported", "answered"], ["supported", "failed"],
        ],
        "requests to facilitators (resting: not sent, after several that failed)",
    );
    GATE_UNSETTLED: Gauge<0> = (
        "tollway_gate_offers_unsettled", [], &[],
        "offers that are not advertised because their facilitator does not settle them",
    );
    GATE_SWEPT: Counter<1> = (
        "tollway_gate_swept_total", ["result"], &[["settled"], ["failed"], ["unknown"], ["lost"]],
        "settlements with an open end that were looked at, by what came of it",
    );
    GATE_EVENTS_DROPPED: Counter<1> = (
        "tollway_gate_events_dropped_total", ["event"],
        &[["on_verified_payment_canceled"], ["on_settled"], ["on_rejected"]],
        "events that no hook was told of, because too many were on their way",
    );
    GATE_LEGACY_IDENTIFIERS: Counter<0> = (
        "tollway_gate_legacy_identifiers_total", [], &[],
        "payments whose identifier stood under its old key",
    );
    GATE_SCHEMAS_SKIPPED: Counter<0> = (
        "tollway_gate_schemas_skipped_total", [], &[],
        "priced calls whose arguments could not be compared with the tool's input schema",
    );
    GATE_SCHEMAS_DROPPED: Counter<0> = (
        "tollway_gate_schemas_dropped_total", [], &[],
        "output schemas of priced tools that had no room for a challenge and were left out of a listing",
    );
}

/// The text of a gate.
#[cfg(feature = "roles")]
pub fn gate_text() -> Result<String, prometheus::Error> {
    GATE_FAMILIES.iter().for_each(|family| family.begin());
    BUILD_INFO.set([env!("CARGO_PKG_VERSION")], 1.0);
    family::text()
}

/// The text of `tollway signer`.
#[cfg(feature = "roles")]
pub fn signer_text() -> Result<String, prometheus::Error> {
    SIGNER_FAMILIES.iter().for_each(|family| family.begin());
    BUILD_INFO.set([env!("CARGO_PKG_VERSION")], 1.0);
    family::text()
}

/// The text of a process that serves agents, each family there from the first look on where its labels are known beforehand.
#[cfg(feature = "roles")]
pub fn text() -> Result<String, prometheus::Error> {
    FAMILIES.iter().for_each(|family| family.begin());
    BUILD_INFO.set([env!("CARGO_PKG_VERSION")], 1.0);
    family::text()
}

/// The media type of [`text`].
#[cfg(feature = "roles")]
pub const TEXT_TYPE: &str = family::TEXT;

/// The span of one paid call. `payment` is written into it once there is one, in its short form.
pub fn paid_call(agent: &str, network: &str) -> Span {
    tracing::info_span!("paid_call", agent, network, payment = tracing::field::Empty)
}

/// The paid call that is running is about this payment. `short`: the first 16 characters of its identifier.
pub fn is_about(short: &str) {
    Span::current().record("payment", short);
}

/// Runs a step of a paid call in a span of its own, and measures it. One that is dropped was not measured.
pub async fn phase<T>(name: &'static str, step: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let ended = step.instrument(tracing::debug_span!("phase", name)).await;
    PHASES.observe([name], began.elapsed().as_secs_f64());
    ended
}
