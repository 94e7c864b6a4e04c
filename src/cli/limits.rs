//! `tollway limits`: the limits that bound spending, and the kill switch.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use futures_util::future::{Either, select};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Failure;
use super::ledger::show;
use crate::ledger::{Filter, Ledger, LedgerError, Limit, Signable, Subject};
use crate::money::{AgentId, Amount, Asset, Network, Unit};

/// A ledger that does not answer is asked for so long; and more than the longest `signer.sign_within_ms`.
const STOP_WAIT: Duration = Duration::from_secs(120);
/// Between two words about what is waited for.
const WORD_EVERY: Duration = Duration::from_secs(2);
/// Between two questions to the ledger.
const ASK_EVERY: Duration = Duration::from_millis(100);

const STOP_HELP: &str = "  tollway limits suspend --agent shopper   one agent
  tollway limits suspend --all             everybody

When it returns with exit code 0, no replica reserves, signs or recovers a payment of the stopped agents any more: also
one that is frozen or cut off does not when it comes back. It waits for what was reserved before: at most
signer.sign_within_ms and some seconds. Payments that were signed before may still settle until their authorization ends
(reservations list). Interrupted or failed (exit code 1), the stop stands as soon as limits list shows it, but what was
under way was not waited for: run it again.";

#[derive(Debug, Subcommand)]
pub enum LimitsCommand {
    /// Set the operator's limit of an agent: the whole row, figures not given are none; of all that apply the smallest wins
    Set(SetArgs),
    /// Stop payments at once: when it returns, nothing more is signed
    #[command(after_help = STOP_HELP)]
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
#[command(group(ArgGroup::new("limited").required(true).args(["subject", "agent"])))]
struct Limited {
    /// An agent's name, '*' for each agent's default, or 'total' for all agents together (per day only)
    #[arg(value_parser = Subject::from_word, value_name = "AGENT")]
    subject: Option<Subject>,
    /// The agent, by an option
    #[arg(long, value_name = "NAME")]
    agent: Option<AgentId>,
}

impl Limited {
    fn subject(&self) -> Subject {
        let named = self.agent.clone().map(Subject::Agent);
        self.subject.clone().or(named).unwrap_or(Subject::EachAgent)
    }
}

#[derive(Debug, Args)]
pub struct SetArgs {
    #[command(flatten)]
    whom: Limited,
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
#[command(group(ArgGroup::new("stopped").required(true).args(["subject", "agent", "all"])))]
pub struct StopArgs {
    /// An agent's name; '*' and 'total' are everybody
    #[arg(value_parser = Subject::from_word, value_name = "AGENT")]
    subject: Option<Subject>,
    /// The agent, by an option
    #[arg(long, value_name = "NAME")]
    agent: Option<AgentId>,
    /// Everybody
    #[arg(long)]
    all: bool,
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

    fn subject(&self) -> Subject {
        let named = self.agent.clone().map(Subject::Agent);
        self.subject.clone().or(named).unwrap_or(Subject::EachAgent)
    }
}

/// In words.
fn shown(subject: &Subject, unit: Option<&Unit>) -> String {
    let who = match subject {
        Subject::Agent(agent) => format!("agent {agent}"),
        Subject::EachAgent | Subject::Total => "every agent".to_owned(),
    };
    unit.map_or(who.clone(), |unit| format!("{who} in {} on {}", unit.asset, unit.network))
}

pub async fn run(command: &LimitsCommand, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
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
    let subject = args.whom.subject();
    if subject == Subject::Total && (args.per_call.is_some() || args.per_session.is_some()) {
        return Err(Failure::Usage("the limit of all agents together is per day only".to_owned()));
    }
    let limit = Limit {
        subject,
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
    let (subject, unit) = (args.subject(), args.unit());
    let (name, unit) = (shown(&subject, unit.as_ref()), unit.as_ref());
    let began = Instant::now();
    eprintln!("tollway: stopping {name}");
    let stop = || ledger.suspend(&subject, unit);
    let since = insist(began, stop, "waiting for the decisions that are under way in the ledger").await?;
    // Nothing is reserved any more; what was reserved before is signed, or too old to be signed, within seconds.
    let mut next_word = Instant::now();
    let left = loop {
        let left = insist(began, || ledger.signable(&subject, unit), "asking what may still be signed").await?;
        if left.count == 0 || began.elapsed() > STOP_WAIT {
            break left;
        }
        tell(left, &mut next_word);
        tokio::time::sleep(ASK_EVERY).await;
    };
    let Signable { count, open, .. } = left;
    let known = known(&subject, ledger).await;
    if let Known::No(names) = &known {
        eprintln!("tollway: WARNING: the ledger knows no agent of this name; {names}");
    }
    if args.json {
        show(&json!({
            "subject": subject.as_str(), "network": unit.map(|unit| unit.network.as_str()),
            "asset": unit.map(|unit| unit.asset.as_str()), "suspended": true, "sinceMs": since, "signable": count,
            "open": open, "waitedMs": u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            "known": !matches!(known, Known::No(_)),
        }));
    } else if count == 0 {
        say!("{name} is suspended: nothing is reserved or signed any more");
    } else {
        say!("{name} is suspended, but {count} earlier reservations may still be signed: see reservations list");
    }
    if !args.json && open > 0 {
        say!("{open} payments are open; those that were signed before may still settle until their authorization ends");
    }
    Ok(if count == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Repeats what the ledger could not do, and says what is waited for.
async fn insist<T, F: Future<Output = Result<T, LedgerError>>>(
    began: Instant,
    ask: impl Fn() -> F,
    what: &str,
) -> Result<T, Failure> {
    loop {
        let mut asked = pin!(ask());
        let answer = loop {
            match select(asked.as_mut(), pin!(tokio::time::sleep(WORD_EVERY))).await {
                Either::Left((answer, _)) => break answer,
                Either::Right(_) => eprintln!("tollway: {what} ({} s)", began.elapsed().as_secs()),
            }
        };
        match answer {
            Ok(answer) => return Ok(answer),
            Err(LedgerError::Busy | LedgerError::Unavailable(_)) if began.elapsed() < STOP_WAIT => {
                eprintln!("tollway: {what}: not done yet, trying again");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Err(error) => {
                return Err(Failure::Failed(format!("THE STOP IS NOT PROVED: {error}; run the same command again")));
            }
        }
    }
}

/// The first word at once, the next ones from time to time.
fn tell(left: Signable, next: &mut Instant) {
    if Instant::now() < *next {
        return;
    }
    *next = Instant::now() + WORD_EVERY;
    let seconds = left.for_ms.div_ceil(1000);
    eprintln!("tollway: {} reservations made before may still be signed, for at most {seconds} s", left.count);
}

enum Known {
    Yes,
    /// Who is known instead, in words.
    No(String),
}

/// Whether a limit or a payment has this name: a stop of a name that was mistyped stops nobody.
async fn known(subject: &Subject, ledger: &dyn Ledger) -> Known {
    let Subject::Agent(agent) = subject else { return Known::Yes };
    let mine = Filter { agent: Some(agent.clone()), limit: 1, ..Filter::default() };
    let newest = Filter { limit: 500, ..Filter::default() };
    let (Ok(mine), Ok(limits), Ok(newest)) =
        (ledger.list(&mine).await, ledger.limits().await, ledger.list(&newest).await)
    else {
        return Known::Yes;
    };
    let limited = limits.iter().filter(|limit| !limit.suspended || limit.source != "operator").filter_map(|limit| {
        match &limit.subject {
            Subject::Agent(agent) => Some(agent.clone()),
            Subject::EachAgent | Subject::Total => None,
        }
    });
    let names: BTreeSet<AgentId> = limited.chain(newest.into_iter().map(|payment| payment.agent)).collect();
    if !mine.is_empty() || names.contains(agent) {
        return Known::Yes;
    }
    let names: Vec<&str> = names.iter().take(20).map(AgentId::as_str).collect();
    Known::No(match names.is_empty() {
        true => "no agent has paid yet".to_owned(),
        false => format!("it knows {}", names.join(", ")),
    })
}

async fn resume(args: &StopArgs, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let (subject, unit) = (args.subject(), args.unit());
    let mut resumed = ledger.resume(&subject, unit.as_ref()).await?;
    if args.all {
        resumed |= ledger.resume(&Subject::Total, unit.as_ref()).await?;
    }
    let left = stops(&subject, ledger).await?;
    let name = shown(&subject, unit.as_ref());
    if args.json {
        show(&json!({"subject": subject.as_str(), "resumed": resumed, "stillSuspendedBy": left}));
    } else if resumed {
        say!("{name}: the operator's stop is taken back");
    } else {
        say!("{name}: there was no such stop");
    }
    if !args.json {
        for stop in &left {
            say!("still suspended by: {stop}");
        }
    }
    Ok(if resumed { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The stops that bind this subject, or, of everybody, that anybody is bound by.
async fn stops(subject: &Subject, ledger: &dyn Ledger) -> Result<Vec<String>, Failure> {
    let binds = |other: &Subject| match (subject, other) {
        (Subject::Agent(agent), Subject::Agent(other)) => agent == other,
        _ => true,
    };
    let stopped = ledger.stopped().await?;
    let everywhere = stopped.iter().filter(|other| binds(other)).map(|other| format!("{} everywhere", other.as_str()));
    let limits = ledger.limits().await?;
    let somewhere = limits.iter().filter(|limit| limit.suspended && binds(&limit.subject)).map(|limit| {
        let Limit { subject, unit, source, .. } = limit;
        format!("{} in {} on {} ({source})", subject.as_str(), unit.asset, unit.network)
    });
    Ok(everywhere.chain(somewhere).collect())
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: LimitsCommand,
    }

    fn stop(words: &str) -> Result<(Subject, Option<Unit>), String> {
        let line = Line::try_parse_from(["limits", "suspend"].into_iter().chain(words.split_whitespace()));
        match line.map_err(|e| e.to_string())?.command {
            LimitsCommand::Suspend(args) => Ok((args.subject(), args.unit())),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn whom_a_stop_is_for_can_be_said_in_every_way_and_in_one_at_a_time() {
        let agent = Subject::Agent("a1".parse().unwrap());
        for words in ["a1", "--agent a1", "--agent=a1 --json"] {
            assert_eq!(stop(words), Ok((agent.clone(), None)), "{words}");
        }
        for words in ["--all", "*"] {
            assert_eq!(stop(words), Ok((Subject::EachAgent, None)), "{words}");
        }
        assert_eq!(stop("total"), Ok((Subject::Total, None)));
        let unit = Unit { network: "stellar:testnet".parse().unwrap(), asset: "CUSDC".parse().unwrap() };
        assert_eq!(stop("--all --network stellar:testnet --asset CUSDC"), Ok((Subject::EachAgent, Some(unit))));
        for words in
            ["", "a1 --all", "a1 --agent a1", "--agent a1 --all", "--all --asset C", "--agent *", "--agent total"]
        {
            assert!(stop(words).is_err(), "{words}");
        }
        let missing = stop("").unwrap_err();
        assert!(
            missing.contains("AGENT") && missing.contains("--agent <NAME>") && missing.contains("--all"),
            "{missing}"
        );
    }
}
