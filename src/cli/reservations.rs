//! `tollway reservations`: payments, their history, whether counters equal rows, and the way out of a payment that the
//! sweep cannot end (`resolve`).

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::Failure;
use super::archive::ArchiveArgs;
use super::ledger::show;
use super::resolve::{self, ResolveArgs};
use crate::agent::server::Chains;
use crate::agent::time::rfc3339;
use crate::ledger::{Event, Filter, Ledger, Payment, State};
use crate::money::AgentId;
use crate::pay::{Sweep, SweepParts, SweepSettings};
use crate::ports::World;
use crate::x402::assets;

/// Fewer digits of an identifier name nobody.
const SHORTEST_ID: usize = 8;

#[derive(Debug, Subcommand)]
pub enum ReservationsCommand {
    /// Payments of every agent, newest first; archived ones are not among them
    List(ListArgs),
    /// One payment with its history
    Show {
        /// The payment identifier, or at least 8 of its first digits
        id: String,
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Count everything again from the rows; exit code 1 on any difference
    Audit {
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Move what is over and older than 13 months out of the tables that a reservation touches
    Archive(ArchiveArgs),
    /// Close an open payment that the sweep cannot close, with the chain's evidence or a written reason
    Resolve(ResolveArgs),
    /// Ask the chain about what is due, once and now; a running server does it by itself
    Sweep {
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
}

/// What the commands work with. The chains are asked by `resolve` and `sweep` alone.
pub struct Tools<'a> {
    pub ledger: Arc<dyn Ledger>,
    pub chains: &'a dyn Fn() -> Result<(Chains, SweepSettings), Failure>,
    pub world: World,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// reserved, in_doubt, settled or released
    #[arg(long, value_parser = state)]
    state: Option<State>,
    /// Only this agent's
    #[arg(long)]
    agent: Option<AgentId>,
    /// At most this many
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

fn state(word: &str) -> Result<State, String> {
    State::from_word(word).ok_or_else(|| "write reserved, in_doubt, settled or released".to_owned())
}

pub async fn run(command: &ReservationsCommand, tools: Tools<'_>) -> Result<ExitCode, Failure> {
    let ledger = &*tools.ledger;
    match command {
        ReservationsCommand::List(args) => list(args, ledger).await,
        ReservationsCommand::Show { id, json } => show_one(id, *json, ledger).await,
        ReservationsCommand::Audit { json } => audit(*json, ledger).await,
        // Of one store: `cli::run` has done it.
        ReservationsCommand::Archive(_) => Err(Failure::Usage("reservations archive: not here".to_owned())),
        ReservationsCommand::Resolve(args) => {
            args.check()?;
            let (chains, settings) = (tools.chains)()?;
            resolve::run(args, ledger, &chains, &settings).await
        }
        ReservationsCommand::Sweep { json } => {
            let (chains, settings) = (tools.chains)()?;
            sweep(*json, SweepParts { world: tools.world, ledger: tools.ledger, chains, settings }).await
        }
    }
}

/// The payment that `id` names, and its history.
pub(super) async fn find(id: &str, ledger: &dyn Ledger) -> Result<(Payment, Vec<Event>), Failure> {
    if id.len() > 64 || !id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        let words = "a payment identifier has 64 digits, 0-9 and a-f: give it whole, or at least 8 of its first digits";
        return Err(Failure::Usage(words.to_owned()));
    }
    if id.len() < SHORTEST_ID {
        return Err(Failure::Usage(format!(
            "{id} is too short: give at least {SHORTEST_ID} of the identifier's first digits"
        )));
    }
    let found = ledger.show(id).await?;
    found.ok_or_else(|| {
        Failure::Failed(format!("no payment, or more than one, has an identifier that begins with {id}"))
    })
}

async fn list(args: &ListArgs, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let filter = Filter { state: args.state, agent: args.agent.clone(), limit: args.limit };
    let payments = ledger.list(&filter).await?;
    let now = ledger.now_ms().await?;
    if args.json {
        let shown = |payment: &Payment| {
            let mut shown = payment_json(payment);
            shown["ageSeconds"] = json!(now.saturating_sub(payment.created_ms) / 1000);
            shown
        };
        show(&json!({"payments": payments.iter().map(shown).collect::<Vec<_>>()}));
        return Ok(ExitCode::SUCCESS);
    }
    say!(
        "{:<16} {:<9} {:>4}  {:<16} {:<16} {:<9} {:>16} {:>16}  REASON",
        "PAYMENT",
        "STATE",
        "AGE",
        "AGENT",
        "NETWORK",
        "ASSET",
        "RESERVED",
        "SETTLED"
    );
    for payment in &payments {
        say!(
            "{:<16} {:<9} {:>4}  {:<16} {:<16} {:<9} {:>16} {:>16}  {}",
            payment.payment_id.short(),
            payment.state.as_str(),
            age(now.saturating_sub(payment.created_ms)),
            payment.agent.as_str(),
            payment.network.as_str(),
            asset(payment),
            payment.reserved.to_string(),
            payment.settled.map_or_else(|| "-".to_owned(), |settled| settled.to_string()),
            payment.reason.as_deref().unwrap_or("-"),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The token's symbol where it is known, else its head and tail.
fn asset(payment: &Payment) -> String {
    let id: Vec<char> = payment.asset.as_str().chars().collect();
    match assets::known(&payment.unit()) {
        Some(known) => known.symbol.to_owned(),
        None if id.len() <= 9 => id.iter().collect(),
        None => id[..4].iter().chain(&['~']).chain(&id[id.len() - 4..]).collect(),
    }
}

/// In its largest unit.
fn age(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7_200 => format!("{}m", seconds / 60),
        seconds @ 7_200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

async fn show_one(id: &str, as_json: bool, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let (payment, events) = find(id, ledger).await?;
    if as_json {
        let mut shown = payment_json(&payment);
        shown["events"] = events.iter().map(event_json).collect();
        show(&shown);
        return Ok(ExitCode::SUCCESS);
    }
    if let Value::Object(members) = payment_json(&payment) {
        for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
            say!("{name:<18} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
    }
    for event in &events {
        let amount = event.amount.map(|amount| amount.to_string());
        let note = event.note.as_ref().map(|note| format!("\"{note}\""));
        let parts = [&event.reason, &amount, &event.transaction, &event.evidence, &note];
        let parts: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
        say!("  {} {} {}", rfc3339(event.at_ms), event.event, parts.join(" "));
    }
    Ok(ExitCode::SUCCESS)
}

async fn sweep(as_json: bool, parts: SweepParts) -> Result<ExitCode, Failure> {
    let report = Sweep::new(parts).pass().await;
    if as_json {
        show(&json!({
            "taken": report.taken, "settled": report.settled, "released": report.released, "open": report.open,
            "inconclusive": report.inconclusive, "overdue": report.overdue, "lost": report.lost, "failed": report.failed,
        }));
    } else {
        say!(
            "{} payments were due: {} settled, {} released, {} still alive, {} not proved, {} others', {} ledger failures",
            report.taken,
            report.settled,
            report.released,
            report.open,
            report.inconclusive,
            report.lost,
            report.failed
        );
    }
    Ok(if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

async fn audit(as_json: bool, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let audit = ledger.audit().await?;
    let clean = audit.differences.is_empty();
    if as_json {
        let differences: Vec<_> =
            audit.differences.iter().map(|found| json!({"what": found.what, "detail": found.detail})).collect();
        show(&json!({
            "payments": audit.payments, "windows": audit.windows, "clean": clean, "differences": differences,
        }));
    } else {
        say!("{} payments, {} windows, {} differences", audit.payments, audit.windows, audit.differences.len());
        for found in &audit.differences {
            say!("{}: {}", found.what, found.detail);
        }
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn payment_json(payment: &Payment) -> Value {
    json!({
        "paymentIdentifier": payment.payment_id.short(), "agent": payment.agent.as_str(),
        "idempotencyKey": payment.idempotency_key.as_ref().map(|key| key.as_str()), "ref": payment.resource_ref,
        "versionHash": payment.version_hash, "network": payment.network.as_str(), "scheme": payment.scheme,
        "asset": payment.asset.as_str(), "payer": payment.payer, "payTo": payment.pay_to,
        "reserved": payment.reserved.to_string(), "settled": payment.settled.map(|settled| settled.to_string()),
        "nonce": payment.authorization.nonce, "deadAfter": payment.authorization.dead_after,
        "atLedger": payment.authorization.at, "state": payment.state.as_str(), "reason": payment.reason,
        "transaction": payment.transaction, "answered": payment.answered, "leased": payment.leased,
        "payloadStored": payment.has_payload, "outcomeStored": payment.has_outcome,
        "createdMs": payment.created_ms, "updatedMs": payment.updated_ms,
    })
}

fn event_json(event: &Event) -> Value {
    json!({
        "atMs": event.at_ms, "event": event.event, "reason": event.reason,
        "amount": event.amount.map(|amount| amount.to_string()), "transaction": event.transaction,
        "evidence": event.evidence, "note": event.note,
    })
}
