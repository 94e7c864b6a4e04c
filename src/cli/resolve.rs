//! `tollway reservations resolve`: the operator closes a payment that the sweep could not close. The chain is asked
//! first, and what it proves is not overruled: a payment that was made is not released, one that may still be made is
//! not either, and a transaction counts only if it carries our authorization.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde_json::json;

use super::Failure;
use super::ledger::show;
use super::reservations::find;
use crate::agent::time::rfc3339;
use crate::chain::stellar::{Stellar, UsedBy};
use crate::chain::{NonceReading, Question};
use crate::ledger::{End, Evidence, Ledger, Payment, Resolution, Resolved, State};
use crate::money::Network;
use crate::pay::{self, Bounds, Look, SweepSettings};

/// A reason that says less is none.
const SHORTEST_REASON: usize = 10;
const LONGEST_REASON: usize = 300;

const HELP: &str = "The sweep closes every payment whose end the chain proves; this is for the rest: RPCs that disagree, or that no longer
keep the payment's ledgers. The chain is asked first, and what it proves is not overruled.

  --settled --transaction HASH   it was paid: the chain must show that this transaction carries our authorization
  --settled --reason TEXT        it was paid, on your word: the amount counts as spent
  --released --reason TEXT       it was not paid and cannot be any more: the amount is free again. Refused while the
                                 authorization may be alive, and where the chain shows that it was used

The reason (10 to 300 characters) stays in the payment's history: reservations show. Exit codes: 0 closed, 1 refused, 2 wrong usage.";

#[derive(Debug, Args)]
#[command(after_help = HELP, group(clap::ArgGroup::new("end").required(true).args(["settled", "released"])))]
pub struct ResolveArgs {
    /// The payment identifier, or at least 8 of its first digits
    id: String,
    /// It was paid
    #[arg(long)]
    settled: bool,
    /// It was not paid, and cannot be any more
    #[arg(long)]
    released: bool,
    /// The transaction that paid, as the network names it
    #[arg(long, value_name = "HASH", requires = "settled", conflicts_with = "released")]
    transaction: Option<String>,
    /// Why, in your words
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

impl ResolveArgs {
    /// What can be refused without a ledger.
    pub fn check(&self) -> Result<(), Failure> {
        said(self.settled, self.transaction.is_some(), self.reason.as_deref(), LONGEST_REASON)
    }
}

/// Whether the words of whoever ends something by hand are enough: a reason of at most `longest` characters on one line,
/// and for a payment that was made, the transaction or a reason.
pub(super) fn said(settled: bool, transaction: bool, reason: Option<&str>, longest: usize) -> Result<(), Failure> {
    if let Some(reason) = reason {
        let length = reason.trim().chars().count();
        if !(SHORTEST_REASON..=longest).contains(&length) || reason.chars().any(char::is_control) {
            let words = format!("--reason has {SHORTEST_REASON} to {longest} characters on one line");
            return Err(Failure::Usage(words));
        }
    }
    if settled && !transaction && reason.is_none() {
        let words = "--settled needs --transaction HASH, which the chain confirms, or --reason TEXT";
        return Err(Failure::Usage(words.to_owned()));
    }
    Ok(())
}

/// How the payment is closed, and on whose word.
#[derive(Debug, PartialEq, Eq)]
struct Closing {
    settled: bool,
    transaction: Option<String>,
    evidence: Evidence,
    /// What the chain shows, in words.
    chain: String,
}

pub async fn run(
    args: &ResolveArgs,
    ledger: &dyn Ledger,
    chains: &BTreeMap<Network, Arc<Stellar>>,
    settings: &SweepSettings,
) -> Result<ExitCode, Failure> {
    let (payment, _) = find(&args.id, ledger).await?;
    let id = payment.payment_id;
    if !payment.state.is_open() {
        return Err(match (args.released, &args.reason) {
            // Not even the words of a release: whoever typed it means something else.
            (true, None) => Failure::Usage(format!(
                "payment {} is {} already; --released is for an open one, and needs --reason where the chain proves nothing",
                payment.payment_id.short(),
                payment.state.as_str()
            )),
            _ => not_open(&payment, payment.state),
        });
    }
    if payment.leased {
        return Err(leased());
    }
    let closing = match &args.transaction {
        Some(transaction) => by_transaction(&payment, chains, transaction).await?,
        None => {
            let chain = chains.get(&payment.network).map(Arc::as_ref);
            let bounds = Bounds::new(settings.rpc_timeout, chain.map_or(1, Stellar::rpcs), settings.rpc_per_second);
            let looked = pay::look(chain, &payment, bounds.from_now()).await;
            by_look(args, &payment, looked, ledger.now_ms().await?)?
        }
    };
    let note = match &args.reason {
        Some(reason) => format!("{} ({})", reason.trim(), closing.chain),
        None => closing.chain.clone(),
    };
    let note: String = note.chars().filter(|c| !c.is_control()).take(crate::ledger::MAX_NOTE).collect();
    let end = match closing.settled {
        true => End::Settled {
            amount: payment.reserved,
            transaction: closing.transaction.as_deref(),
            evidence: closing.evidence,
        },
        false => End::Released,
    };
    match ledger.resolve(Resolution { payment_id: id, end, note: &note }).await? {
        Resolved::Done => {}
        Resolved::NotOpen(state) => return Err(not_open(&payment, state)),
        Resolved::Leased => return Err(leased()),
        Resolved::TransactionTaken { by } => {
            return Err(Failure::Failed(format!("refused: this transaction is booked for payment {}", by.short())));
        }
    }
    let state = if closing.settled { State::Settled } else { State::Released };
    if args.json {
        show(&json!({
            "paymentIdentifier": id.short(), "state": state.as_str(), "evidence": closing.evidence.as_str(),
            "transaction": closing.transaction, "amount": payment.reserved.to_string(), "chain": closing.chain,
            "note": note,
        }));
    } else {
        let counts = if closing.settled { "counts as spent" } else { "is free again" };
        say!("{} is {}: {} {counts}; {}", id.short(), state.as_str(), payment.reserved, closing.chain);
    }
    Ok(ExitCode::SUCCESS)
}

/// The transaction is evidence only if it is successful and carries this payment's authorization.
async fn by_transaction(
    payment: &Payment,
    chains: &BTreeMap<Network, Arc<Stellar>>,
    transaction: &str,
) -> Result<Closing, Failure> {
    let refused = |why: String| Err(Failure::Failed(format!("refused: {why}")));
    let Some(chain) = chains.get(&payment.network) else {
        return refused(format!("no RPC is configured for {}, so nothing confirms the transaction", payment.network));
    };
    let Question::Stellar(question) = pay::question(payment).map_err(|why| Failure::Failed(why.to_owned()))?;
    match chain.used_by(question, transaction).await {
        Ok(UsedBy::This { ledger }) => Ok(Closing {
            settled: true,
            transaction: Some(transaction.to_ascii_lowercase()),
            evidence: Evidence::Chain,
            chain: format!("the chain shows that the transaction of ledger {ledger} carries our authorization"),
        }),
        Ok(UsedBy::Another { ledger }) => refused(format!(
            "the transaction of ledger {ledger} is successful, but does not carry this payment's authorization"
        )),
        Ok(UsedBy::Failed { ledger }) => {
            refused(format!("the transaction failed in ledger {ledger}: it moved nothing"))
        }
        Ok(UsedBy::NotFound) => refused("no RPC knows this transaction (any more)".to_owned()),
        Err(error) => refused(format!("the chain could not be asked about the transaction: {error}")),
    }
}

fn by_look(args: &ResolveArgs, payment: &Payment, looked: Look, now_ms: u64) -> Result<Closing, Failure> {
    let refused = |why: String| Err(Failure::Failed(format!("refused: {why}")));
    let last = payment.authorization.dead_after;
    let closing = |evidence, chain| Ok(Closing { settled: args.settled, transaction: None, evidence, chain });
    match (looked.reading, args.settled) {
        (NonceReading::Used { ledger }, true) => Ok(Closing {
            settled: true,
            transaction: looked.transaction,
            evidence: Evidence::Chain,
            chain: format!("the chain shows that our authorization was used in ledger {ledger}"),
        }),
        (NonceReading::Used { ledger }, false) => {
            let named = looked.transaction.map_or_else(String::new, |hash| format!(", by transaction {hash}"));
            refused(format!("it was paid in ledger {ledger}{named}: the next sweep settles it"))
        }
        (NonceReading::Dead, true) => refused(format!(
            "the chain shows that it was never paid, and since ledger {last} it cannot be: the next sweep releases it"
        )),
        (NonceReading::Cancelled, true) => {
            refused("the chain shows that its nonce was cancelled: the next sweep releases it".to_owned())
        }
        (NonceReading::Dead, false) => closing(
            Evidence::Chain,
            format!("the chain shows that our authorization was never used, and since ledger {last} it cannot be"),
        ),
        (NonceReading::Cancelled, false) => {
            closing(Evidence::Chain, "the chain shows that its nonce was cancelled".to_owned())
        }
        (NonceReading::Open, false) => refused(format!(
            "the authorization is alive and may still be used, until ledger {last} (about {})",
            rfc3339(pay::ends_about_ms(payment))
        )),
        (NonceReading::Inconclusive(why), false) if now_ms <= pay::overdue_ms(payment) => refused(format!(
            "the chain proves nothing ({why}), and the authorization may be alive until {}: make an RPC reachable, or \
             wait until then",
            rfc3339(pay::overdue_ms(payment))
        )),
        (NonceReading::Inconclusive(why), false) if args.reason.is_none() => Err(Failure::Usage(format!(
            "the chain proves nothing ({why}): --released needs --reason, which stays in the payment's history"
        ))),
        (NonceReading::Open, true) => {
            closing(Evidence::Operator, format!("the chain shows it unused, and alive until ledger {last}"))
        }
        (NonceReading::Inconclusive(why), _) => closing(Evidence::Operator, format!("the chain proves nothing: {why}")),
    }
}

fn not_open(payment: &Payment, state: State) -> Failure {
    Failure::Failed(format!("refused: payment {} is {} already", payment.payment_id.short(), state.as_str()))
}

fn leased() -> Failure {
    Failure::Failed(
        "refused: somebody works on this payment (its call, a recovery or a sweep): try again in a minute or two"
            .to_owned(),
    )
}
