//! What becomes of a request whose payment is known: its claim alone decides, before prices, offers, extensions and
//! validity are looked at (`docs/outcomes.md`, table "Gate", rows of the phase "identity").

use super::challenge::{Reason, Withheld};
use super::claims::{Claim, Kept, Proof, State};
use super::payment::CallKey;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// As an unknown payment: every check, a new claim, the requirements frozen anew.
    Check,
    /// A settle went out once and failed: the chain is asked first. Not used there: as [`Next::Check`], but a facilitator
    /// that now says no is answered with `settlement_unknown`, which is no challenge.
    AskChain,
    /// The stored answer of this round, with the receipt.
    Stored,
    /// Another request works on it: wait for its outcome up to the limit, then `in_progress`.
    Wait,
    /// The handler runs free under the claim's lease; `counts`: it is one of the few that a payment has.
    Run { counts: bool },
    /// No output, no new demand; with the receipt where there is one.
    Withhold(Withheld),
    /// A challenge; a settled claim's receipt goes with it.
    Challenge(Reason),
}

/// `stored`: whether the answer of exactly this round is kept. `max_runs`: free runs of one payment.
pub fn next(claim: Option<&Claim>, call: &CallKey, proof: &Proof, stored: bool, max_runs: u32) -> Next {
    let Some(claim) = claim else { return Next::Check };
    let proven = claim.proven_by(proof);
    match claim.state {
        State::Released => return Next::Check,
        State::Failed if claim.settles == 0 => return Next::Check,
        State::Failed => return Next::AskChain,
        // Its holder is gone before anything was broadcast.
        State::Claimed if !claim.leased => return Next::Check,
        State::Claimed | State::Settling | State::Unknown | State::Settled => {}
    }
    if !claim.is_for(call) {
        return Next::Challenge(Reason::AlreadyUsed);
    }
    match claim.state {
        State::Settled => settled(claim, call, proven, stored, max_runs),
        _ if !proven && claim.identifier_differs(proof) => Next::Challenge(Reason::IdentifierConflict),
        State::Unknown => Next::Withhold(Withheld::SettlementUnknown),
        // A stranger holds no connection open.
        _ if proven => Next::Wait,
        _ => Next::Withhold(Withheld::InProgress),
    }
}

fn settled(claim: &Claim, call: &CallKey, proven: bool, stored: bool, max_runs: u32) -> Next {
    if !proven {
        return Next::Challenge(Reason::AlreadySettled);
    }
    if claim.leased {
        return Next::Wait;
    }
    if stored {
        return Next::Stored;
    }
    match claim.kept {
        Kept::Asks if call.continues => Next::Run { counts: false },
        Kept::TooLarge => Next::Withhold(Withheld::AnswerTooLarge),
        Kept::Answer | Kept::Asks => Next::Withhold(Withheld::AnswerExpired),
        Kept::None if claim.runs < max_runs => Next::Run { counts: true },
        Kept::None => Next::Withhold(Withheld::RunsExhausted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::claims::fake;

    const CALL: CallKey = CallKey { call: [1; 32], round: [2; 32], continues: false };
    const OTHER: CallKey = CallKey { call: [9; 32], round: [9; 32], continues: false };
    const ON: CallKey = CallKey { continues: true, ..CALL };
    const PAYER: Proof = Proof { identifier: Some([5; 32]), session: Some([6; 32]) };
    const SESSION: Proof = Proof { identifier: None, session: Some([6; 32]) };
    const NOBODY: Proof = Proof { identifier: None, session: None };
    const IMPOSTOR: Proof = Proof { identifier: Some([7; 32]), session: None };

    /// A claim of the payer for [`CALL`].
    fn claim(state: State, change: impl FnOnce(&mut Claim)) -> Claim {
        let mut claim = fake(state, CALL.call, PAYER);
        change(&mut claim);
        claim
    }

    fn of(claim: &Claim, call: &CallKey, proof: &Proof, stored: bool) -> Next {
        next(Some(claim), call, proof, stored, 3)
    }

    #[test]
    fn what_is_unknown_or_was_given_back_is_checked() {
        assert_eq!(next(None, &CALL, &PAYER, false, 3), Next::Check);
        for proof in [PAYER, NOBODY] {
            for call in [CALL, OTHER] {
                assert_eq!(of(&claim(State::Released, |_| {}), &call, &proof, false), Next::Check);
                assert_eq!(of(&claim(State::Failed, |_| {}), &call, &proof, false), Next::Check);
                assert_eq!(of(&claim(State::Claimed, |_| {}), &call, &proof, false), Next::Check, "its holder is gone");
                assert_eq!(of(&claim(State::Failed, |c| c.settles = 1), &call, &proof, false), Next::AskChain);
            }
        }
    }

    #[test]
    fn a_payment_in_use_serves_no_other_call() {
        for state in [State::Claimed, State::Settling, State::Unknown, State::Settled] {
            let claim = claim(state, |c| c.leased = true);
            assert_eq!(of(&claim, &OTHER, &PAYER, true), Next::Challenge(Reason::AlreadyUsed), "{state:?}");
        }
    }

    #[test]
    fn in_flight_the_payer_waits_and_nobody_else() {
        for state in [State::Claimed, State::Settling] {
            let claim = claim(state, |c| c.leased = true);
            assert_eq!(of(&claim, &CALL, &PAYER, false), Next::Wait);
            assert_eq!(of(&claim, &CALL, &SESSION, false), Next::Wait);
            assert_eq!(of(&claim, &CALL, &NOBODY, false), Next::Withhold(Withheld::InProgress));
            assert_eq!(of(&claim, &CALL, &IMPOSTOR, false), Next::Challenge(Reason::IdentifierConflict));
        }
        let unknown = claim(State::Unknown, |_| {});
        for proof in [PAYER, NOBODY] {
            assert_eq!(of(&unknown, &CALL, &proof, true), Next::Withhold(Withheld::SettlementUnknown));
        }
    }

    #[test]
    fn a_settled_payments_output_goes_to_its_payer_alone() {
        let kept = claim(State::Settled, |c| c.kept = Kept::Answer);
        assert_eq!(of(&kept, &CALL, &PAYER, true), Next::Stored);
        assert_eq!(of(&kept, &CALL, &SESSION, true), Next::Stored);
        assert_eq!(of(&kept, &CALL, &PAYER, false), Next::Withhold(Withheld::AnswerExpired));
        assert_eq!(
            of(&claim(State::Settled, |c| c.kept = Kept::TooLarge), &CALL, &PAYER, false),
            Next::Withhold(Withheld::AnswerTooLarge)
        );
        for kept in [Kept::None, Kept::Answer, Kept::Asks, Kept::TooLarge] {
            for leased in [true, false] {
                for proof in [NOBODY, IMPOSTOR] {
                    let claim = claim(State::Settled, |c| (c.kept, c.leased) = (kept, leased));
                    assert_eq!(of(&claim, &ON, &proof, true), Next::Challenge(Reason::AlreadySettled));
                }
            }
        }
    }

    #[test]
    fn what_failed_after_the_settlement_runs_again_a_few_times() {
        let failed = |runs| claim(State::Settled, |c| c.runs = runs);
        for runs in 0..3 {
            assert_eq!(of(&failed(runs), &CALL, &PAYER, false), Next::Run { counts: true });
        }
        assert_eq!(of(&failed(3), &CALL, &PAYER, false), Next::Withhold(Withheld::RunsExhausted));
        assert_eq!(of(&claim(State::Settled, |c| c.leased = true), &CALL, &PAYER, false), Next::Wait);
        let asks = claim(State::Settled, |c| (c.kept, c.runs) = (Kept::Asks, 3));
        assert_eq!(of(&asks, &ON, &PAYER, false), Next::Run { counts: false });
        assert_eq!(of(&asks, &CALL, &PAYER, true), Next::Stored, "the question again");
        assert_eq!(of(&asks, &CALL, &PAYER, false), Next::Withhold(Withheld::AnswerExpired));
    }
}
