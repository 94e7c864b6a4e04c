//! `tollway migrate` and `tollway limits`: the operator's commands on the ledger.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::Failure;
use crate::agent::server;
use crate::config::Store;
use crate::ledger::{Ledger, LedgerError, Limit, PostgresLedger, SqliteLedger, Subject};
use crate::money::{Amount, Asset, Network, Unit};
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

pub(super) fn show(value: &Value) {
    say!("{value:#}");
}
