//! `tollway origins` and `tollway pins`: whom agents may pay, in the ledger, for every replica at once.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use super::Failure;
use super::ledger::show;
use crate::agent::time::rfc3339;
use crate::ledger::{Ledger, SetPin};
use crate::money::{Asset, Network, Unit};
use crate::policy::{Origin, is_address};

const ORIGINS_HELP: &str = "An origin is https://host, https://host:port, or https://*.host for every host below that one. Deny wins over allow.
The first allow rule closes every origin that no allow rule names, also those of the configuration file's lists are one
list with these. Running servers have a change within reload.interval_ms (2 s); what was reserved before is still paid.
A stop that nothing escapes is tollway limits suspend.";

#[derive(Debug, Subcommand)]
#[command(after_help = ORIGINS_HELP)]
pub enum OriginsCommand {
    /// Show the rules
    List {
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Pay nobody there
    Deny(OriginArgs),
    /// Pay only there (and where other allow rules say)
    Allow(OriginArgs),
    /// Take a rule back
    Remove(OriginArgs),
}

#[derive(Debug, Args)]
pub struct OriginArgs {
    /// https://host, https://host:port or https://*.host
    origin: Origin,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

pub async fn origins(command: &OriginsCommand, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let (args, allowed) = match command {
        OriginsCommand::List { json } => return list_origins(*json, ledger).await,
        OriginsCommand::Deny(args) => (args, Some(false)),
        OriginsCommand::Allow(args) => (args, Some(true)),
        OriginsCommand::Remove(args) => (args, None),
    };
    let changed = ledger.set_origin_rule(&args.origin, allowed).await?;
    let rule = allowed.map(rule_word);
    if args.json {
        show(&json!({"origin": args.origin.to_string(), "rule": rule, "changed": changed}));
    } else {
        match (rule, changed) {
            (Some(rule), true) => say!("{}: {rule}", args.origin),
            (Some(rule), false) => say!("{}: {rule} already", args.origin),
            (None, true) => say!("{}: the rule is taken back", args.origin),
            (None, false) => say!("{}: there was no such rule", args.origin),
        }
    }
    Ok(if changed || allowed.is_some() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

async fn list_origins(as_json: bool, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let rules = ledger.origin_rules().await?;
    if as_json {
        let shown = rules.iter().map(
            |rule| json!({"origin": rule.origin.to_string(), "rule": rule_word(rule.allowed), "source": rule.source}),
        );
        show(&json!({"rules": shown.collect::<Vec<_>>()}));
        return Ok(ExitCode::SUCCESS);
    }
    if rules.is_empty() {
        say!("no rules in the ledger");
    }
    for rule in &rules {
        say!("{:<5}  {}  ({})", rule_word(rule.allowed), rule.origin, rule.source);
    }
    Ok(ExitCode::SUCCESS)
}

fn rule_word(allowed: bool) -> &'static str {
    if allowed { "allow" } else { "deny" }
}

#[derive(Debug, Subcommand)]
pub enum PinsCommand {
    /// Show the pins
    List {
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// Pin an origin's recipient, instead of the one that is pinned
    Set {
        #[command(flatten)]
        of: PinArgs,
        /// The recipient as the network names it
        #[arg(long, value_name = "ADDRESS")]
        pay_to: String,
    },
    /// Forget a pin: the next settled payment makes a new one
    Remove {
        #[command(flatten)]
        of: PinArgs,
    },
}

#[derive(Debug, Args)]
pub struct PinArgs {
    /// https://host or https://host:port
    origin: Origin,
    /// CAIP-2, such as stellar:testnet
    #[arg(long)]
    network: Network,
    /// The token as the network names it
    #[arg(long)]
    asset: Asset,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

pub async fn pins(command: &PinsCommand, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let (of, set) = match command {
        PinsCommand::List { json } => return list_pins(*json, ledger).await,
        PinsCommand::Set { of, pay_to } if is_address(Some(&of.network), pay_to) => (of, SetPin::To(pay_to)),
        PinsCommand::Set { of, .. } => {
            return Err(Failure::Usage(format!("--pay-to is no address of {}", of.network)));
        }
        PinsCommand::Remove { of } => (of, SetPin::Removed),
    };
    if of.origin.is_pattern() {
        return Err(Failure::Usage(format!("{} names many origins: a pin is of one", of.origin)));
    }
    let unit = Unit { network: of.network.clone(), asset: of.asset.clone() };
    let changed = ledger.set_pin(&of.origin, &unit, set).await?;
    let removed = matches!(set, SetPin::Removed);
    if of.json {
        show(&json!({"origin": of.origin.to_string(), "removed": removed, "changed": changed}));
    } else {
        match (removed, changed) {
            (false, true) => say!("{}: pinned", of.origin),
            (false, false) => say!("{}: pinned so already", of.origin),
            (true, true) => say!("{}: the pin is removed", of.origin),
            (true, false) => say!("{}: there was no such pin", of.origin),
        }
    }
    Ok(if changed || !removed { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

async fn list_pins(as_json: bool, ledger: &dyn Ledger) -> Result<ExitCode, Failure> {
    let pins = ledger.pins().await?;
    if as_json {
        let shown = pins.iter().map(|pin| {
            json!({
                "origin": pin.origin.to_string(), "network": pin.unit.network.as_str(),
                "asset": pin.unit.asset.as_str(), "payTo": pin.pay_to, "firstSeen": rfc3339(pin.first_seen_ms),
            })
        });
        show(&json!({"pins": shown.collect::<Vec<_>>()}));
        return Ok(ExitCode::SUCCESS);
    }
    if pins.is_empty() {
        say!("no pins");
    }
    for pin in &pins {
        say!(
            "{}  {} {}  {}  since {}",
            pin.origin,
            pin.unit.network,
            pin.unit.asset,
            pin.pay_to,
            rfc3339(pin.first_seen_ms)
        );
    }
    Ok(ExitCode::SUCCESS)
}
