//! The states of a claim and every arrow between them (`docs/outcomes.md`, table "Gate"), as data: both stores make
//! their statements from it, and nothing else changes a state.

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Nothing was broadcast; the handler may be running.
    Claimed,
    /// A settle may be under way, or may have been.
    Settling,
    Settled,
    /// A settle went out and nobody knows what it did.
    Unknown,
    /// Given back before anything was broadcast; may be claimed anew.
    Released,
    /// The facilitator or the chain said no; may be claimed anew.
    Failed,
}

impl State {
    pub const ALL: [State; 6] =
        [State::Claimed, State::Settling, State::Settled, State::Unknown, State::Released, State::Failed];

    pub fn as_str(self) -> &'static str {
        match self {
            State::Claimed => "claimed",
            State::Settling => "settling",
            State::Settled => "settled",
            State::Unknown => "unknown",
            State::Released => "released",
            State::Failed => "failed",
        }
    }

    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }

    /// Whether a new request may claim the payment again.
    pub fn may_be_claimed(self) -> bool {
        matches!(self, State::Released | State::Failed)
    }
}

/// One arrow. Whoever takes it holds the lease, and gives it back unless `keeps_lease`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrow {
    pub from: State,
    pub to: State,
    pub keeps_lease: bool,
}

impl Arrow {
    /// The handler failed, asked for input, was cancelled; or verify could not be asked.
    pub const RELEASE: Arrow = Arrow { from: State::Claimed, to: State::Released, keeps_lease: false };
    /// Verify said no.
    pub const REFUSED: Arrow = Arrow { from: State::Claimed, to: State::Failed, keeps_lease: false };
    /// Before `/settle` is called, never after.
    pub const SETTLE: Arrow = Arrow { from: State::Claimed, to: State::Settling, keeps_lease: true };
    /// A settle said yes; in `authorization` its answer was stored before.
    pub const SETTLED: Arrow = Arrow { from: State::Settling, to: State::Settled, keeps_lease: false };
    /// A settle said yes in `upfront`: the handler runs now, under the same lease.
    pub const SETTLED_AND_RUNS: Arrow = Arrow { from: State::Settling, to: State::Settled, keeps_lease: true };
    /// The first settle said a structural no.
    pub const FAILED: Arrow = Arrow { from: State::Settling, to: State::Failed, keeps_lease: false };
    /// Any other end of a settle.
    pub const LOST: Arrow = Arrow { from: State::Settling, to: State::Unknown, keeps_lease: false };
    /// Asked again: the facilitator's yes, the chain's evidence, or a person's word.
    pub const PROVED: Arrow = Arrow { from: State::Unknown, to: State::Settled, keeps_lease: false };
    /// The chain says dead and unused, or a person that it was not paid.
    pub const DISPROVED: Arrow = Arrow { from: State::Unknown, to: State::Failed, keeps_lease: false };
    /// Asked again, and nothing new is known.
    pub const STILL_UNKNOWN: Arrow = Arrow { from: State::Unknown, to: State::Unknown, keeps_lease: false };
    /// The chain shows the nonce used although a settle had failed.
    pub const FOUND: Arrow = Arrow { from: State::Failed, to: State::Settled, keeps_lease: false };
    /// The chain's evidence about a failed one is what it was.
    pub const STILL_FAILED: Arrow = Arrow { from: State::Failed, to: State::Failed, keeps_lease: false };
    /// A run of a settled payment ended: in `upfront`, or again and free.
    pub const RAN: Arrow = Arrow { from: State::Settled, to: State::Settled, keeps_lease: false };

    pub const ALL: [Arrow; 13] = [
        Arrow::RELEASE,
        Arrow::REFUSED,
        Arrow::SETTLE,
        Arrow::SETTLED,
        Arrow::SETTLED_AND_RUNS,
        Arrow::FAILED,
        Arrow::LOST,
        Arrow::PROVED,
        Arrow::DISPROVED,
        Arrow::STILL_UNKNOWN,
        Arrow::FOUND,
        Arrow::STILL_FAILED,
        Arrow::RAN,
    ];
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_arrows_are_those_of_the_table() {
        let moves: BTreeSet<(&str, &str)> = Arrow::ALL
            .iter()
            .map(|arrow| (arrow.from.as_str(), arrow.to.as_str()))
            .filter(|(from, to)| from != to)
            .collect();
        let table = [
            ("claimed", "failed"),
            ("claimed", "released"),
            ("claimed", "settling"),
            ("failed", "settled"),
            ("settling", "failed"),
            ("settling", "settled"),
            ("settling", "unknown"),
            ("unknown", "failed"),
            ("unknown", "settled"),
        ];
        assert_eq!(moves, BTreeSet::from(table));
        // Only what was never broadcast is given back, and nothing leaves `settled`.
        assert!(moves.iter().all(|(from, to)| *to != "released" || *from == "claimed"));
        assert!(moves.iter().all(|(from, _)| *from != "settled"));
    }

    #[test]
    fn every_state_has_its_word() {
        for state in State::ALL {
            assert_eq!(State::parse(state.as_str()), Some(state));
        }
        assert_eq!(State::parse("Settled"), None);
    }
}
