//! `tollway migrate`, `tollway limits`, `tollway reservations`: the operator's commands on the ledger.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::Failure;
use crate::agent::server;
use crate::agent::time::rfc3339;
use crate::config::Store;
use crate::ledger::{Event, Filter, Ledger, LedgerError, Limit, Payment, PostgresLedger, SqliteLedger, State, Subject};
use crate::money::{AgentId, Amount, Asset, Network, Unit};
use crate::ports::World;

/// A stop waits no longer than this for signatures under way: more than the longest `signer.sign_within_ms`.
const STOP_WAIT: Duration = Duration::from_secs(70);

impl From<LedgerError> for Failure {
    fn from(error: LedgerError) -> Self {
        Failure::Failed(error.to_string())
    }
}

#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// Say which version the database has and change nothing; exit code 1 where it is not this program's
    #[arg(long)]
    check: bool,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

/// Brings the ledger's schema up to this program's; a second run does nothing.
pub async fn migrate(args: &MigrateArgs, store: &Store, world: World) -> Result<ExitCode, Failure> {
    let (before, newest) = match store {
        Store::Sqlite(path) => SqliteLedger::schema_version(path).await?,
        Store::Postgres(database) => PostgresLedger::schema_version(database).await?,
        Store::None => return Err(Failure::Usage("budget.store: no ledger is configured".to_owned())),
    };
    if !args.check {
        if let Store::Postgres(database) = store {
            PostgresLedger::migrate(database).await?;
        }
        server::open(store, &world, None).await?.ping().await?;
    }
    let now = if args.check { before } else { Some(newest) };
    let place = server::place(store);
    if args.json {
        show(&json!({"database": place, "before": before, "now": now, "program": newest}));
    } else {
        let word = |version: Option<i64>| version.map_or_else(|| "none".to_owned(), |version| version.to_string());
        say!("{place}: schema {}, was {}, this program's is {newest}", word(now), word(before));
    }
    Ok(if now == Some(newest) { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

#[derive(Debug, Subcommand)]
pub enum LimitsCommand {
    /// Set the operator's limit of an agent: the whole row, figures not given are none; of all that apply the smallest wins
    Set(SetArgs),
    /// Stop payments at once: when it returns, nothing more is signed
    Suspend(StopArgs),
    /// Take the operator's stop back
    Resume(StopArgs),
    /// Show every limit and stop
    List {
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub struct SetArgs {
    /// An agent's name, '*' for each agent's default, or 'total' for all agents together (per day only)
    #[arg(value_parser = Subject::from_word)]
    subject: Subject,
    /// CAIP-2, such as stellar:testnet
    #[arg(long)]
    network: Network,
    /// The token as the network names it
    #[arg(long)]
    asset: Asset,
    /// Atomic units that one payment may cost; 0 denies
    #[arg(long, value_name = "AMOUNT")]
    per_call: Option<Amount>,
    /// Atomic units that one MCP session may spend
    #[arg(long, value_name = "AMOUNT")]
    per_session: Option<Amount>,
    /// Atomic units of one UTC day
    #[arg(long, value_name = "AMOUNT")]
    per_day: Option<Amount>,
    /// Allow payments without any limit
    #[arg(long)]
    unlimited: bool,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct StopArgs {
    /// An agent's name, '*' for each agent, or 'total'
    #[arg(value_parser = Subject::from_word)]
    subject: Subject,
    /// Only on this network, with --asset; without both: everywhere
    #[arg(long, requires = "asset")]
    network: Option<Network>,
    /// Only this token, with --network
    #[arg(long, requires = "network")]
    asset: Option<Asset>,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

impl StopArgs {
    fn unit(&self) -> Option<Unit> {
        Some(Unit { network: self.network.clone()?, asset: self.asset.clone()? })
    }
}

pub async fn limits(command: &LimitsCommand, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    match command {
        LimitsCommand::Set(args) => set(args, ledger).await,
        LimitsCommand::Suspend(args) => suspend(args, ledger).await,
        LimitsCommand::Resume(args) => resume(args, ledger).await,
        LimitsCommand::List { json } => list_limits(*json, ledger).await,
    }
}

async fn set(args: &SetArgs, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let figures = args.per_call.or(args.per_session).or(args.per_day);
    if figures.is_none() && !args.unlimited {
        return Err(Failure::Usage("give a figure (0 denies) or --unlimited".to_owned()));
    }
    if figures.is_some() && args.unlimited {
        return Err(Failure::Usage("--unlimited contradicts a figure: give one of them".to_owned()));
    }
    if args.subject == Subject::Total && (args.per_call.is_some() || args.per_session.is_some()) {
        return Err(Failure::Usage("the limit of all agents together is per day only".to_owned()));
    }
    let limit = Limit {
        subject: args.subject.clone(),
        unit: Unit { network: args.network.clone(), asset: args.asset.clone() },
        per_call: args.per_call,
        per_session: args.per_session,
        per_day: args.per_day,
        unlimited: args.unlimited,
        suspended: false,
        source: "operator".to_owned(),
    };
    ledger.set_limit(&limit).await?;
    if args.json {
        show(&limit_json(&limit));
    } else {
        say!("set: {}", limit_line(&limit));
    }
    Ok(ExitCode::SUCCESS)
}

async fn suspend(args: &StopArgs, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let unit = args.unit();
    ledger.suspend(&args.subject, unit.as_ref()).await?;
    // Nothing is reserved any more; what was reserved before is signed, or too old to be signed, within seconds.
    let until = tokio::time::Instant::now() + STOP_WAIT;
    let mut signable = ledger.signable(&args.subject, unit.as_ref()).await?;
    while signable > 0 && tokio::time::Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
        signable = ledger.signable(&args.subject, unit.as_ref()).await?;
    }
    let name = args.subject.as_str();
    if args.json {
        show(&json!({"subject": name, "suspended": true, "signable": signable}));
    } else if signable == 0 {
        say!("{name} is suspended: nothing more is signed");
    } else {
        say!("{name} is suspended, but {signable} earlier reservations may still be signed: see reservations list");
    }
    Ok(if signable == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

async fn resume(args: &StopArgs, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let resumed = ledger.resume(&args.subject, args.unit().as_ref()).await?;
    let name = args.subject.as_str();
    if args.json {
        show(&json!({"subject": name, "resumed": resumed}));
    } else if resumed {
        say!("{name}: the operator's stop is taken back");
    } else {
        say!("{name}: there was no such stop (a stop of the configuration file is taken back there)");
    }
    Ok(if resumed { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

async fn list_limits(as_json: bool, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let (limits, stopped) = (ledger.limits().await?, ledger.stopped().await?);
    if as_json {
        let stopped: Vec<_> = stopped.iter().map(Subject::as_str).collect();
        show(&json!({"limits": limits.iter().map(limit_json).collect::<Vec<_>>(), "stopped": stopped}));
        return Ok(ExitCode::SUCCESS);
    }
    if limits.is_empty() {
        say!("no limits: every paid call is refused");
    }
    for limit in &limits {
        say!("{}", limit_line(limit));
    }
    for subject in &stopped {
        say!("{}  SUSPENDED everywhere  (operator)", subject.as_str());
    }
    Ok(ExitCode::SUCCESS)
}

fn limit_json(limit: &Limit) -> Value {
    let text = |figure: Option<Amount>| figure.map(|figure| figure.to_string());
    json!({
        "subject": limit.subject.as_str(), "network": limit.unit.network.as_str(), "asset": limit.unit.asset.as_str(),
        "perCall": text(limit.per_call), "perSession": text(limit.per_session), "perDay": text(limit.per_day),
        "unlimited": limit.unlimited, "suspended": limit.suspended, "source": limit.source,
    })
}

fn limit_line(limit: &Limit) -> String {
    let figure = |figure: Option<Amount>| figure.map_or_else(|| "-".to_owned(), |figure| figure.to_string());
    format!(
        "{}  {} {}  per call {}, session {}, day {}{}{}  ({})",
        limit.subject.as_str(),
        limit.unit.network,
        limit.unit.asset,
        figure(limit.per_call),
        figure(limit.per_session),
        figure(limit.per_day),
        if limit.unlimited { ", unlimited" } else { "" },
        if limit.suspended { ", SUSPENDED" } else { "" },
        limit.source
    )
}

#[derive(Debug, Subcommand)]
pub enum ReservationsCommand {
    /// Payments of every agent, newest first
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

pub async fn reservations(command: &ReservationsCommand, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    match command {
        ReservationsCommand::List(args) => list(args, ledger).await,
        ReservationsCommand::Show { id, json } => show_one(id, *json, ledger).await,
        ReservationsCommand::Audit { json } => audit(*json, ledger).await,
    }
}

async fn list(args: &ListArgs, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let filter = Filter { state: args.state, agent: args.agent.clone(), limit: args.limit };
    let payments = ledger.list(&filter).await?;
    if args.json {
        show(&json!({"payments": payments.iter().map(payment_json).collect::<Vec<_>>()}));
        return Ok(ExitCode::SUCCESS);
    }
    say!("{:<18} {:<9} {:<16} {:>20} {:>20}  REASON", "PAYMENT", "STATE", "AGENT", "RESERVED", "SETTLED");
    for payment in &payments {
        say!(
            "{:<18} {:<9} {:<16} {:>20} {:>20}  {}",
            payment.payment_id.short(),
            payment.state.as_str(),
            payment.agent.as_str(),
            payment.reserved.to_string(),
            payment.settled.map_or_else(|| "-".to_owned(), |settled| settled.to_string()),
            payment.reason.as_deref().unwrap_or("-"),
        );
    }
    Ok(ExitCode::SUCCESS)
}

async fn show_one(id: &str, as_json: bool, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let Some((payment, events)) = ledger.show(id).await? else {
        return Err(Failure::Failed("no payment, or more than one, has an identifier that begins so".to_owned()));
    };
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
        let parts = [&event.reason, &amount, &event.transaction, &event.evidence];
        let parts: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
        say!("  {} {} {}", rfc3339(event.at_ms), event.event, parts.join(" "));
    }
    Ok(ExitCode::SUCCESS)
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
        "evidence": event.evidence,
    })
}

fn show(value: &Value) {
    say!("{value:#}");
}
