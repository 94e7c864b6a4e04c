//! What waits in a lane: a reservation or a settlement, and whom to tell.

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::ledger::limits::Ask;
use crate::ledger::{Decision, Evidence, Intent, LedgerError, SettleOutcome, SettleRequest};
use crate::money::{AgentId, Amount, IdempotencyKey, PaymentId, Unit};

/// What a lane says of an entry.
#[derive(Debug)]
pub(in crate::ledger::postgres) enum Answer<T> {
    Said(Result<T, LedgerError>),
    /// The entry is for a transaction of its own. An earlier run may have taken effect.
    Alone,
}

type Reply<T> = oneshot::Sender<Answer<T>>;

/// What a reservation writes, owned.
pub(in crate::ledger::postgres) struct Hold {
    pub payment_id: PaymentId,
    pub id: String,
    pub id_nonce: [u8; 16],
    pub agent: AgentId,
    pub session: Option<String>,
    pub key: Option<IdempotencyKey>,
    pub call_hash: [u8; 32],
    pub resource_ref: String,
    pub version_hash: String,
    pub unit: Unit,
    pub scheme: String,
    pub payer: String,
    pub pay_to: String,
    pub ask: Ask,
    pub nonce: String,
    pub dead_after: u64,
    pub at: u64,
    pub lease_ms: u64,
    pub sign_within_ms: u64,
    pub token: [u8; 16],
}

impl Hold {
    /// `token`: by it a run knows the row of an earlier one.
    pub fn of(intent: &Intent, token: [u8; 16]) -> Hold {
        let (quote, authorization) = (&intent.quote, &intent.authorization);
        Hold {
            payment_id: intent.payment_id,
            id: intent.payment_id.to_hex(),
            id_nonce: intent.id_nonce,
            agent: quote.agent.clone(),
            session: quote.session.clone(),
            key: quote.idempotency_key.clone(),
            call_hash: quote.call_hash,
            resource_ref: quote.resource_ref.clone(),
            version_hash: quote.version_hash.clone(),
            unit: quote.unit(),
            scheme: quote.offer.scheme.clone(),
            payer: authorization.payer.clone(),
            pay_to: quote.offer.pay_to.clone(),
            ask: Ask::of(intent),
            nonce: authorization.nonce.clone(),
            dead_after: authorization.dead_after,
            at: authorization.at,
            lease_ms: intent.lease_ms,
            sign_within_ms: intent.sign_within_ms,
            token,
        }
    }
}

/// The end of a payment, owned.
pub(in crate::ledger::postgres) struct End {
    pub payment_id: PaymentId,
    pub id: String,
    pub amount: Amount,
    pub transaction: Option<String>,
    pub evidence: Evidence,
    /// Sealed.
    pub body: Option<Vec<u8>>,
    pub unfinished: bool,
}

impl End {
    pub fn of(request: &SettleRequest<'_>, sealed: Option<&[u8]>) -> End {
        End {
            payment_id: request.payment_id,
            id: request.payment_id.to_hex(),
            amount: request.amount,
            transaction: request.transaction.map(str::to_owned),
            evidence: request.evidence,
            body: sealed.map(<[u8]>::to_vec),
            unfinished: request.unfinished,
        }
    }
}

pub(in crate::ledger::postgres) enum Entry {
    Hold(Box<Hold>, Reply<Decision>, Instant),
    End(Box<End>, Reply<SettleOutcome>, Instant),
}

impl Entry {
    pub fn hold(hold: Hold) -> (Entry, oneshot::Receiver<Answer<Decision>>) {
        let (reply, answer) = oneshot::channel();
        (Entry::Hold(Box::new(hold), reply, Instant::now()), answer)
    }

    pub fn end(end: End) -> (Entry, oneshot::Receiver<Answer<SettleOutcome>>) {
        let (reply, answer) = oneshot::channel();
        (Entry::End(Box::new(end), reply, Instant::now()), answer)
    }

    /// Nobody wants the reservation any more. A settlement is true whoever waits for it.
    pub(super) fn is_forgotten(&self) -> bool {
        matches!(self, Entry::Hold(_, reply, _) if reply.is_closed())
    }

    pub(super) fn since(&self) -> Instant {
        match self {
            Entry::Hold(_, _, since) | Entry::End(_, _, since) => *since,
        }
    }

    pub(super) fn body_len(&self) -> usize {
        match self {
            Entry::Hold(..) => 0,
            Entry::End(end, ..) => end.body.as_ref().map_or(0, Vec::len),
        }
    }

    pub(super) fn fail(self, error: &LedgerError) {
        match self {
            Entry::Hold(_, reply, _) => drop(reply.send(Answer::Said(Err(again(error))))),
            Entry::End(_, reply, _) => drop(reply.send(Answer::Said(Err(again(error))))),
        }
    }

    pub(super) fn alone(self) {
        match self {
            Entry::Hold(_, reply, _) => drop(reply.send(Answer::Alone)),
            Entry::End(_, reply, _) => drop(reply.send(Answer::Alone)),
        }
    }
}

/// For each of those whom one failure met.
fn again(error: &LedgerError) -> LedgerError {
    match error {
        LedgerError::Unavailable(what) => LedgerError::Unavailable(what.clone()),
        LedgerError::Busy => LedgerError::Busy,
        LedgerError::Inconsistent(what) => LedgerError::Inconsistent(what.clone()),
    }
}
