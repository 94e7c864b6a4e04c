//! What waits in a lane: a reservation or a settlement, and whom to tell.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::ledger::limits::Ask;
use crate::ledger::{Decision, Evidence, Intent, LedgerError, SettleOutcome, SettleRequest};
use crate::money::{AgentId, Amount, IdempotencyKey, PaymentId, Unit};

/// What a lane says of an entry.
#[derive(Debug)]
pub(in crate::ledger::postgres) enum Answer<T> {
    Said(Result<T, LedgerError>),
    /// The entry is for a transaction of its own, when its turn comes. An earlier run may have taken effect.
    Alone(Turn),
}

/// Entries of a batch that concern each other end by themselves in the order of their arrival: whoever comes second finds
/// what the first one left. The turn is over when this is dropped.
#[derive(Debug)]
pub(in crate::ledger::postgres) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _over: oneshot::Sender<()>,
}

impl Turn {
    /// No longer than `patience`: the order is a courtesy, and the one before may wait for a lock, or be polled no more.
    pub async fn comes(&mut self, patience: Duration) {
        if let Some(before) = self.before.take() {
            let _ = tokio::time::timeout(patience, before).await;
        }
    }
}

/// The last turn of each agent's reservations, and of each payment's settlements.
#[derive(Default)]
pub(super) struct Turns(BTreeMap<String, oneshot::Receiver<()>>);

impl Turns {
    fn next(&mut self, of: &str) -> Turn {
        let (over, after) = oneshot::channel();
        Turn { before: self.0.insert(of.to_owned(), after), _over: over }
    }
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

    /// In the order of arrival.
    pub(super) fn alone(self, turns: &mut Turns) {
        match self {
            Entry::Hold(hold, reply, _) => drop(reply.send(Answer::Alone(turns.next(hold.agent.as_str())))),
            Entry::End(end, reply, _) => drop(reply.send(Answer::Alone(turns.next(&end.id)))),
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
