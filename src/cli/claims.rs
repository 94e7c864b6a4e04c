//! `tollway claims`: the payments that a gate was shown, their history, and the way out of one whose settlement nobody
//! knows and the sweep cannot end (`resolve`). The chain is asked first, and what it proves is not overruled.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::Failure;
use super::ledger::show;
use super::resolve::said;
use crate::agent::server;
use crate::agent::time::rfc3339;
use crate::chain::NonceReading;
use crate::chain::stellar::{Stellar, UsedBy};
use crate::config::{GateConfig, Store};
use crate::gate::claims::{Arrow, Change, Claim, ClaimError, Claims, Lost, SHORTEST, State, Terms};
use crate::gate::sweep::{question, receipt};
use crate::money::Network;
use crate::ports::World;
use crate::x402::Offer;

const LONGEST_REASON: usize = 200;
/// No ledger takes longer on average; with it the end of an authorization is counted where no RPC is asked.
const SLOWEST_LEDGER_MS: u64 = 10_000;

const HELP: &str = "The gate's sweep ends every claim whose settlement the facilitator or the chain proves; this is for the rest. The
chain is asked first, where an RPC is configured, and what it proves is not overruled.

  --settled --transaction HASH   it was paid: the chain must show that this transaction carries the authorization
  --settled --reason TEXT        it was paid, on your word: the payer collects the output
  --failed --reason TEXT         it was not paid and cannot be any more: the payer may pay again. Refused while the
                                 authorization may be alive, and where the chain shows that it was used

The reason (10 to 200 characters) stays in the claim's history: claims show. Exit codes: 0 closed, 1 refused, 2 wrong usage.";

#[derive(Debug, Subcommand)]
pub enum ClaimsCommand {
    /// Claims whose end is open, newest first; with --state those in one state
    List(ListArgs),
    /// One claim with its history
    Show {
        /// The claim's identity, or at least 8 of its first digits
        id: String,
        /// Answer as JSON
        #[arg(long)]
        json: bool,
    },
    /// End a claim whose settlement is unknown, with the chain's evidence or a written reason
    Resolve(ResolveArgs),
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// claimed, settling, settled, unknown, released or failed
    #[arg(long, value_parser = state)]
    state: Option<State>,
    /// At most this many
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

fn state(word: &str) -> Result<State, String> {
    State::parse(word).ok_or_else(|| "write claimed, settling, settled, unknown, released or failed".to_owned())
}

#[derive(Debug, Args)]
#[command(after_help = HELP, group(clap::ArgGroup::new("end").required(true).args(["settled", "failed"])))]
pub struct ResolveArgs {
    /// The claim's identity, or at least 8 of its first digits
    id: String,
    /// It was paid
    #[arg(long)]
    settled: bool,
    /// It was not paid, and cannot be any more
    #[arg(long)]
    failed: bool,
    /// The transaction that paid, as the network names it
    #[arg(long, value_name = "HASH", requires = "settled", conflicts_with = "failed")]
    transaction: Option<String>,
    /// Why, in your words
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

impl From<ClaimError> for Failure {
    fn from(error: ClaimError) -> Self {
        Failure::Failed(error.to_string())
    }
}

/// By network; of those with an RPC in the configuration.
type Chains = BTreeMap<Network, Arc<Stellar>>;

pub async fn run(command: &ClaimsCommand, config: &GateConfig, world: &World) -> Result<ExitCode, Failure> {
    let terms = Terms { answers: config.answer_ttl, lease: config.lease, ..Terms::default() };
    let claims = match &config.store {
        Store::Sqlite(path) if !path.exists() => {
            let shown = path.display();
            return Err(Failure::Usage(format!("budget.path: no gate has kept its claims at {shown} yet")));
        }
        Store::Sqlite(path) => Claims::open_sqlite(path, world.clone(), config.ring.clone(), terms).await?,
        Store::Postgres(database) => Claims::connect(database, world.clone(), config.ring.clone(), terms).await?,
        Store::None => return Err(Failure::Usage("budget.store: nothing keeps claims".to_owned())),
    };
    let client = server::operator_client(&config.security, world).map_err(|e| Failure::Usage(e.to_string()))?;
    let (claims, chains) = (&claims, &server::chains(&config.networks, &client, world));
    match command {
        ClaimsCommand::List(args) => list(args, claims).await,
        ClaimsCommand::Show { id, json } => show_one(id, *json, claims).await,
        ClaimsCommand::Resolve(args) => resolve(args, claims, chains).await,
    }
}

async fn find(id: &str, claims: &Claims) -> Result<Claim, Failure> {
    if !(SHORTEST..=64).contains(&id.len()) || !id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        let words = "a claim's identity has 64 digits, 0-9 and a-f: give it whole, or at least 8 of its first digits";
        return Err(Failure::Usage(words.to_owned()));
    }
    let found = claims.find(id).await?;
    found.ok_or_else(|| Failure::Failed(format!("no claim, or more than one, has an identity that begins with {id}")))
}

async fn list(args: &ListArgs, claims: &Claims) -> Result<ExitCode, Failure> {
    let open = [State::Claimed, State::Settling, State::Unknown];
    let states = args.state.as_ref().map_or(&open[..], std::slice::from_ref);
    let found = claims.list(states, args.limit).await?;
    let now = claims.now_ms().await?;
    let age = |claim: &Claim| now.saturating_sub(claim.created_ms) / 1_000;
    if args.json {
        let shown = |claim: &Claim| {
            let mut shown = as_json(claim);
            shown["ageSeconds"] = json!(age(claim));
            shown
        };
        show(&json!({"claims": found.iter().map(shown).collect::<Vec<_>>()}));
        return Ok(ExitCode::SUCCESS);
    }
    say!("{:<16} {:<9} {:>8}  {:<24} {:<16} {:>18}  REASON", "CLAIM", "STATE", "AGE (s)", "ITEM", "NETWORK", "AMOUNT");
    for claim in &found {
        let amount = Offer::parse(&claim.offer).map(|offer| offer.amount.to_string()).unwrap_or_default();
        say!(
            "{:<16} {:<9} {:>8}  {:<24} {:<16} {:>18}  {}",
            claim.identity.short(),
            claim.state.as_str(),
            age(claim),
            claim.scope.chars().take(24).collect::<String>(),
            claim.network,
            amount,
            claim.reason.as_deref().unwrap_or("-"),
        );
    }
    Ok(ExitCode::SUCCESS)
}

async fn show_one(id: &str, json: bool, claims: &Claims) -> Result<ExitCode, Failure> {
    let claim = find(id, claims).await?;
    let events = claims.events(&claim.identity).await?;
    let mut shown = as_json(&claim);
    if json {
        let event = |event: &crate::gate::claims::ClaimEvent| {
            let from = event.from.map(State::as_str);
            json!({"atMs": event.at_ms, "from": from, "to": event.to.as_str(), "reason": event.reason})
        };
        shown["events"] = events.iter().map(event).collect();
        show(&shown);
        return Ok(ExitCode::SUCCESS);
    }
    if let Value::Object(members) = shown {
        for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
            say!("{name:<14} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
    }
    for event in &events {
        say!("  {} {} {}", rfc3339(event.at_ms), event.to.as_str(), event.reason.as_deref().unwrap_or_default());
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(claim: &Claim) -> Value {
    let offer = Offer::parse(&claim.offer).ok();
    json!({
        "claim": claim.identity.short(), "state": claim.state.as_str(), "item": claim.scope, "network": claim.network,
        "payer": claim.payer, "nonce": claim.nonce, "amount": offer.as_ref().map(|offer| offer.amount.to_string()),
        "asset": offer.as_ref().map(|offer| offer.asset.as_str()), "payTo": offer.as_ref().map(|offer| &offer.pay_to),
        "diesAt": claim.dies_at, "reason": claim.reason, "settles": claim.settles, "runs": claim.runs,
        "worked": claim.leased, "receipt": claim.receipt, "createdMs": claim.created_ms,
    })
}

async fn resolve(args: &ResolveArgs, claims: &Claims, chains: &Chains) -> Result<ExitCode, Failure> {
    check(args)?;
    let claim = find(&args.id, claims).await?;
    let short = claim.identity.short();
    let refused = |why: String| Failure::Failed(format!("refused: {why}"));
    if claim.state != State::Unknown {
        return Err(refused(format!("claim {short} is {}, and only an unknown one is resolved", claim.state.as_str())));
    }
    let ending = ending(args, &claim, chains, claims.now_ms().await?).await?;
    let words = match &args.reason {
        Some(reason) => format!("operator: {} ({})", reason.trim(), ending.chain),
        None => format!("operator: {}", ending.chain),
    };
    let Some(lease) = claims.take(&claim.identity, State::Unknown, false).await? else {
        return Err(refused(format!("somebody works on claim {short}, or it has ended: try again in a minute")));
    };
    let receipt = args.settled.then(|| receipt(&claim, ending.transaction.as_deref().unwrap_or_default()));
    let change = Change { receipt: receipt.as_deref(), reason: Some(&words), ..Change::default() };
    let arrow = if args.settled { Arrow::PROVED } else { Arrow::DISPROVED };
    if let Err(Lost) = claims.advance(&lease, arrow, change).await? {
        return Err(refused(format!("claim {short} has changed hands: try again")));
    }
    match args.json {
        true => show(&json!({"claim": short, "state": arrow.to.as_str(), "reason": words})),
        false => say!("{short} is {}: {}", arrow.to.as_str(), ending.chain),
    }
    Ok(ExitCode::SUCCESS)
}

/// What can be refused without a database.
fn check(args: &ResolveArgs) -> Result<(), Failure> {
    said(args.settled, args.transaction.is_some(), args.reason.as_deref(), LONGEST_REASON)
}

/// On what the end stands.
#[derive(Debug)]
struct Ending {
    transaction: Option<String>,
    /// What the chain shows, in words.
    chain: String,
}

async fn ending(args: &ResolveArgs, claim: &Claim, chains: &Chains, now_ms: u64) -> Result<Ending, Failure> {
    let refused = |why: String| Err(Failure::Failed(format!("refused: {why}")));
    let chain = claim.network.parse::<Network>().ok().and_then(|network| chains.get(&network));
    let offer = Offer::parse(&claim.offer).ok();
    let asked = chain.zip(offer.as_ref().and_then(|offer| question(claim, offer)));
    if let Some(transaction) = &args.transaction {
        let Some((chain, question)) = asked else {
            return refused(format!("no RPC is configured for {}, so nothing confirms the transaction", claim.network));
        };
        return match chain.used_by(question, transaction).await {
            Ok(UsedBy::This { ledger }) => Ok(Ending {
                transaction: Some(transaction.to_ascii_lowercase()),
                chain: format!("the transaction of ledger {ledger} carries the authorization"),
            }),
            Ok(_) => refused("the chain does not show that this transaction carries the authorization".to_owned()),
            Err(error) => refused(format!("the chain could not be asked about the transaction: {error}")),
        };
    }
    let reading = match asked {
        Some((chain, question)) => match chain.nonce_reading(question).await {
            NonceReading::Used { ledger } => {
                let at = u32::try_from(ledger).unwrap_or(u32::MAX);
                let transaction = chain.transaction_of(question, at).await;
                return judge(args, claim, NonceReading::Used { ledger }, now_ms)
                    .map(|ending| Ending { transaction, ..ending });
            }
            reading => reading,
        },
        None => NonceReading::Inconclusive("no RPC is configured for its network".to_owned()),
    };
    judge(args, claim, reading, now_ms)
}

fn judge(args: &ResolveArgs, claim: &Claim, reading: NonceReading, now_ms: u64) -> Result<Ending, Failure> {
    let refused = |why: String| Err(Failure::Failed(format!("refused: {why}")));
    let ending = |chain: String| Ok(Ending { transaction: None, chain });
    match (reading, args.settled) {
        (NonceReading::Used { ledger }, true) => ending(format!("the chain shows it used in ledger {ledger}")),
        (NonceReading::Used { ledger }, false) => {
            refused(format!("it was paid in ledger {ledger}: the next sweep settles it"))
        }
        (NonceReading::Dead | NonceReading::Cancelled, true) => {
            refused("the chain shows that it was never paid and cannot be any more".to_owned())
        }
        (NonceReading::Dead | NonceReading::Cancelled, false) => {
            ending("the chain shows that it was never paid and cannot be any more".to_owned())
        }
        (NonceReading::Open, false) => refused("the authorization is alive and may still be used".to_owned()),
        (NonceReading::Inconclusive(why), false) if now_ms <= ends_about_ms(claim) => refused(format!(
            "nothing is proved ({why}), and the authorization may be alive until {}",
            rfc3339(ends_about_ms(claim))
        )),
        (NonceReading::Inconclusive(why), false) if args.reason.is_none() => Err(Failure::Usage(format!(
            "nothing is proved ({why}): --failed needs --reason, which stays in the claim's history"
        ))),
        (NonceReading::Open, true) => ending("the chain shows it unused and alive".to_owned()),
        (NonceReading::Inconclusive(why), _) => ending(format!("nothing is proved: {why}")),
    }
}

/// When the authorization is dead for certain, unix milliseconds.
fn ends_about_ms(claim: &Claim) -> u64 {
    match claim.network.starts_with("stellar:") {
        true => {
            let ledgers = claim.dies_at.saturating_sub(claim.seen_at);
            claim.created_ms.saturating_add(ledgers.saturating_mul(SLOWEST_LEDGER_MS))
        }
        false => claim.dies_at.saturating_mul(1_000),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::gate::Kind;
    use crate::gate::claims::{Claimed, NewClaim, Proof};
    use crate::gate::payment::{CallKey, Identity};
    use crate::ports::machine;
    use crate::seal::KeyRing;

    fn args(text: &str) -> Result<ResolveArgs, clap::Error> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: ResolveArgs,
        }
        let words = std::iter::once("resolve").chain(text.split(' ').filter(|word| !word.is_empty()));
        <Line as clap::Parser>::try_parse_from(words.map(|word| word.replace('_', " "))).map(|line| line.args)
    }

    /// A claim whose settlement is unknown, and is dead or not at this moment.
    async fn scene(dies_at: u64) -> (Claims, Identity, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
        let path = dir.path().join("c");
        let claims = Claims::open_sqlite(&path, machine::world().0, ring, Terms::default()).await.unwrap();
        let params = RawValue::from_string(r#"{"name":"search"}"#.into()).unwrap();
        let offer = RawValue::from_string(
            r#"{"scheme":"exact","network":"eip155:8453","amount":"7","asset":"0x1","payTo":"0x2","maxTimeoutSeconds":60}"#
                .into(),
        );
        let new = NewClaim {
            identity: Identity([0xab; 32]),
            scope: "tool:search",
            call: &CallKey::of(Kind::Tool, &params).unwrap(),
            proof: Proof::default(),
            network: "eip155:8453",
            payer: "0x3",
            nonce: "0x4",
            dies_at,
            seen_at: 0,
            offer: &offer.unwrap(),
        };
        let Claimed::Fresh { lease, .. } = claims.claim(&new).await.unwrap() else { panic!() };
        let change = Change { settle_request: Some(b"r"), ..Change::default() };
        claims.advance(&lease, Arrow::SETTLE, change).await.unwrap().unwrap();
        claims.advance(&lease, Arrow::LOST, Change::default()).await.unwrap().unwrap();
        (claims, new.identity, dir)
    }

    #[tokio::test]
    async fn an_unknown_claim_is_ended_with_a_written_reason() {
        for (dies_at, line, end) in [
            (1, "abababab --failed --reason the_seller_has_nothing", Some(State::Failed)),
            (1, "abababab --settled --reason the_bank_says_it_came", Some(State::Settled)),
            (1, "abababab --failed", None),
            (u64::MAX / 2_000, "abababab --failed --reason the_seller_has_nothing", None),
            (1, "abababab --settled --transaction ab", None),
            (1, "abababab --settled --reason short", None),
            (1, "abababab --settled", None),
            (1, "cdcdcdcd --failed --reason the_seller_has_nothing", None),
            (1, "ABABABAB --failed --reason the_seller_has_nothing", None),
        ] {
            let (claims, identity, _dir) = scene(dies_at).await;
            let done = resolve(&args(line).unwrap(), &claims, &Chains::new()).await;
            assert_eq!(done.is_ok(), end.is_some(), "{line}: {done:?}");
            let claim = claims.look(&identity).await.unwrap().unwrap();
            assert_eq!(claim.state, end.unwrap_or(State::Unknown), "{line}");
            if end.is_some() {
                let events = claims.events(&identity).await.unwrap();
                let last = events.last().unwrap().reason.clone().unwrap();
                assert!(last.starts_with("operator: the ") && last.contains("nothing is proved"), "{last}");
                assert!(resolve(&args(line).unwrap(), &claims, &Chains::new()).await.is_err(), "once");
            }
        }
    }

    #[test]
    fn an_end_is_named_and_a_transaction_only_of_what_settled() {
        for line in ["abababab", "abababab --settled --failed", "abababab --failed --transaction ab"] {
            assert!(args(line).is_err(), "{line}");
        }
    }

    #[test]
    fn what_the_chain_proves_is_not_overruled() {
        let claim = |line: &str, reading| (args(line).unwrap(), reading);
        let cases = [
            (claim("abababab --failed --reason the_seller_has_nothing", NonceReading::Used { ledger: 7 }), false),
            (claim("abababab --settled --reason the_bank_says_it_came", NonceReading::Dead), false),
            (claim("abababab --failed --reason the_seller_has_nothing", NonceReading::Open), false),
            (claim("abababab --failed", NonceReading::Dead), true),
            (claim("abababab --settled --reason the_bank_says_it_came", NonceReading::Used { ledger: 7 }), true),
        ];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (claims, identity, _dir) = runtime.block_on(scene(1));
        let claim = runtime.block_on(claims.look(&identity)).unwrap().unwrap();
        for ((args, reading), good) in cases {
            assert_eq!(judge(&args, &claim, reading.clone(), 5_000).is_ok(), good, "{reading:?}");
        }
    }
}
