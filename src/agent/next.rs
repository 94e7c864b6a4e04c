//! What an agent does next about a payment, in one table.

use crate::ledger::{Payment, State};

/// (action, sentence). The actions are stable words.
pub fn next(row: &Payment) -> (&'static str, &'static str) {
    match row.state {
        State::Reserved => ("wait", "The call is under way. Ask again in a few seconds."),
        State::InDoubt if row.leased => ("wait", "It is being looked after. Ask again in a few seconds."),
        State::InDoubt if row.has_payload => (
            "call_again",
            "Whether it settled is not known yet. Send the same call with the same idempotencyKey (without a key: the \
             same ref and arguments): the identical payment is sent again, never a second one. Or ask again later: the \
             chain will tell.",
        ),
        State::InDoubt => (
            "poll",
            "Whether it settled is not known yet; the chain will tell. Ask again later. The same call with the same \
             idempotencyKey (without a key: the same ref and arguments) never pays twice.",
        ),
        // Its stored output is out of reach of a keyless call: the next one is meant anew.
        State::Settled if row.idempotency_key.is_none() && row.answered => {
            ("done", "It is paid, and its output was handed over. The same call without a key would be a new payment.")
        }
        State::Settled if row.outcome_unfinished => (
            "call_again",
            "It is paid, and its tool asks for input. Send the same call with the same idempotencyKey (without a key: \
             the same ref and arguments) to read the question, and with inputResponses and requestState to answer it; \
             that does not pay again.",
        ),
        State::Settled if row.has_outcome || row.has_payload => (
            "call_again",
            "It is paid. Send the same call with the same idempotencyKey (without a key: the same ref and arguments) \
             to get the output; that does not pay again.",
        ),
        State::Settled => ("done", "It is paid, and nothing more is stored than the receipt."),
        State::Released => {
            ("pay_anew", "Nothing was paid. Call again with a new idempotencyKey if it is still wanted.")
        }
    }
}
