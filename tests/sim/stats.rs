//! What a run met: a simulation that never kills, loses or lies proves nothing, so every line must have happened.

use std::collections::BTreeMap;

/// Counts of one seed; of several, their sum.
macro_rules! stats {
    ($all:ident $liar:literal $($(#[doc = $doc:literal])* $name:ident: $label:literal,)*) => {
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct $all {
            $($(#[doc = $doc])* pub $name: u64,)*
            /// By the name of the lie.
            pub lies: BTreeMap<String, u64>,
        }

        impl $all {
            /// (line, count), in their order.
            pub fn lines(&self) -> Vec<(String, u64)> {
                let mut lines = vec![$(($label.to_owned(), self.$name),)*];
                lines.extend(self.lies.iter().map(|(lie, n)| (format!("{} lied: {lie}", $liar), *n)));
                lines
            }

            pub fn add(&mut self, other: &$all) {
                $(self.$name += other.$name;)*
                for (lie, n) in &other.lies {
                    *self.lies.entry(lie.clone()).or_default() += n;
                }
            }
        }
    };
}

/// What a gate's world counts of these.
const SHARED: [&str; 11] = [
    "hosts killed",
    "hosts frozen",
    "connections refused",
    "connections lost",
    "connections cut",
    "connections made mute",
    "requests delivered twice",
    "ledger calls not done",
    "ledger answers lost",
    "a node hid a used nonce",
    "event histories read",
];

impl Stats {
    /// The lines of a world with gates.
    pub fn gate_lines(&self, gate: &GateStats) -> Vec<(String, u64)> {
        let shared = self.lines().into_iter().filter(|(line, _)| SHARED.contains(&line.as_str()));
        shared.chain(gate.lines()).collect()
    }
}

stats! {
    GateStats "facilitator"
    claims: "payments claimed",
    orphaned: "leases of a gate that had been killed, taken by another",
    fenced: "leases of a gate that stood still, taken by another",
    too_late: "statements of a holder that came too late",
    runs: "handlers begun",
    runs_again: "… of a payment that is settled",
    runs_cut: "… and cut off, or out of time",
    runs_failed: "… and failed",
    verifies_refused: "verifications refused or failed",
    settles: "settlements asked for",
    settles_again: "… that had been asked for before",
    requests: "requests with a payment",
    raced: "… at two gates at once",
    left: "… of a payer that left",
    lost: "… of a gate that died",
    outputs: "answered with the output",
    stored: "… from the store, or by another run",
    unknown: "answered with settlement_unknown",
    in_progress: "answered with in_progress",
    already_settled: "answered with already_settled",
    already_used: "answered with payment_already_used",
    conflicts: "answered with payment_identifier_conflict",
    too_large: "answered with answer_too_large",
    exhausted: "answered with the last failure of a payment without a run left",
    uncharged: "handler failures that were not charged",
    paid_again: "payments made because the one before was refused",
    spent_elsewhere: "nonces spent on another call",
    thefts: "payments presented from what the chain shows",
    claims_settled: "claims settled",
    claims_failed: "claims failed",
    claims_released: "claims released",
    swept: "settlements found by the sweep",
    expired: "claims that the sweep found dead and unused",
    asked_chain: "failed payments of which the chain was asked again",
    owed: "outputs that were owed when the world had calmed",
}

stats! {
    Stats "seller"
    kills: "hosts killed",
    kills_after_reserve: "… with a payment reserved and not yet sent",
    kills_after_sign: "… with a signed payment on its way",
    freezes: "hosts frozen",
    refused: "connections refused",
    connections_lost: "connections lost",
    cut: "connections cut",
    muted: "connections made mute",
    delivered_twice: "requests delivered twice",
    ledger_not_done: "ledger calls not done",
    ledger_answer_lost: "ledger answers lost",
    signer_refused: "signer refused",
    signer_failed: "signer silent or wrong",
    signer_too_late: "signer was asked too late",
    catalog_failed: "catalog failed",
    node_hid: "a node hid a used nonce",
    node_ahead: "a node was ahead of the chain",
    node_altered: "a node altered a simulation",
    node_submitted: "a node submitted what it simulated",
    histories_read: "event histories read",
    seller_replayed: "seller replayed a paid call",
    attempts: "calls by agents",
    agent_left: "agents that left before the answer",
    agent_raced: "calls at two processes at once",
    successes: "calls answered with output and receipt",
    replayed: "outcomes read again from the ledger",
    existing: "reservations that met an earlier payment",
    empty: "… with the receipt alone",
    unknown: "calls answered with moneyMayHaveMoved unknown",
    nothing_moved: "calls answered with moneyMayHaveMoved no",
    over_budget: "calls over a budget",
    suspended: "calls while suspended",
    owed: "outputs that were owed when the world had calmed",
    lost: "calls whose process died",
    rows_settled: "rows settled",
    rows_released: "rows released",
    transfers: "transfers on the chain",
    recoveries: "recoveries taken",
    recovered: "… that brought the output",
    sweep_settled: "rows settled on the chain's evidence",
    sweep_released: "rows released by the sweep",
    looked_again: "rows left by the sweep to be looked at again",
    owners_replaced: "leases taken from an owner whose time was over",
    owners_too_late: "statements of an owner that came too late",
    rotations: "key rings rotated",
    opened_rotated: "processes that began with the rotated ring",
    sign_window_missed: "signatures that came too late to be asked for",
    two_days: "seeds over midnight",
}
