//! The command line: one file per group of commands. `agent::server` builds the parts from the configuration.

/// A line for standard output. `println!` would panic where its reader has gone (`tollway limits list | head -1`).
macro_rules! say {
    ($($text:tt)*) => { $crate::cli::write_line(format_args!($($text)*)) };
}

pub mod archive;
pub mod check;
pub mod claims;
mod check_gate;
pub mod gate;
pub mod serve;
pub mod init;
pub mod keystore;
pub mod ledger;
pub mod limits;
pub mod list;
pub mod policy;
pub mod reservations;
pub mod resolve;
pub mod signer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};

use crate::agent::server::{self, Chains};
use crate::config::{self, Config, GateServer, Machine, Store, Transport};
use crate::gate_server;
use crate::ledger::Ledger;
use crate::pay::SweepSettings;
use crate::ports::{World, machine};

/// The production build has no sandbox, and does not speak of it.
#[cfg(feature = "sandbox")]
const DEMO: &str = "  tollway sandbox --demo          pay for a tool on a local ledger: no network, no funds\n";
#[cfg(not(feature = "sandbox"))]
const DEMO: &str = "";
const HELP: &str = "  tollway init paying-local       write a commented configuration
  tollway check --online          see what works before an agent does

Environment:
  FACILITATOR_URL, PORT, DATABASE_URL   override the file's catalog, port and ledger (its URL)
  TOLLWAY_LOG                           what is logged to standard error: warn,tollway=info
  TOLLWAY_LOG_FORMAT=json               one JSON object a line

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.";

/// x402 stablecoin payments for MCP: agents pay for tools within a budget that holds whatever fails.
#[derive(Debug, Parser)]
#[command(
    name = "tollway",
    version,
    about,
    max_term_width = 110,
    after_help = format!("Start here:\n{DEMO}{HELP}")
)]
struct Cli {
    /// Configuration file (YAML). Without one `serve` and `stdio` search a public catalog, and nothing can be paid.
    #[arg(long, short, global = true, env = "TOLLWAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve MCP over HTTP: /mcp for agents, /healthz; with a signer only to bearer keys
    Serve,
    /// Serve MCP on standard input and output
    Stdio,
    /// A payment gate in front of an MCP server: charge for its tools, resources and prompts
    Gate(gate::GateArgs),
    /// Every tool, resource and prompt of a server with its price
    List(list::ListArgs),
    /// A whole market on this machine: chain, facilitator, catalog, seller, signer, agent server
    #[cfg(feature = "sandbox")]
    Sandbox(crate::sandbox::command::SandboxArgs),
    /// Write a commented configuration for a profile
    Init(init::InitArgs),
    /// Validate the configuration; --online also asks catalog, chain, signer and ledger
    Check(check::CheckArgs),
    /// The encrypted key file of signer.mode encrypted-key
    #[command(subcommand)]
    Keystore(keystore::KeystoreCommand),
    /// The external signer: holds the key in a process of its own, with a policy of its own
    Signer(signer::SignerArgs),
    /// Bring the ledger's schema up to date
    Migrate(ledger::MigrateArgs),
    /// The limits that bound spending, and the kill switch
    #[command(subcommand)]
    Limits(limits::LimitsCommand),
    /// The rules for sellers' origins that every replica has, beside those of the configuration file
    #[command(subcommand)]
    Origins(policy::OriginsCommand),
    /// Whom each origin was paid to first (policy.pin_recipients)
    #[command(subcommand)]
    Pins(policy::PinsCommand),
    /// Payments, their events, whether counters equal rows, and the way out of one that is stuck
    #[command(subcommand)]
    Reservations(reservations::ReservationsCommand),
    /// What a gate was paid with: claims, their history, and the way out of one that is stuck
    #[command(subcommand)]
    Claims(claims::ClaimsCommand),
}

fn write_line(line: std::fmt::Arguments<'_>) {
    use std::io::{ErrorKind, Write as _};
    if let Err(error) = writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("tollway: standard output: {error}");
    }
}

/// What a command ends with: `Usage` is a wrong argument or configuration (exit code 2), `Failed` is all else (1).
#[derive(Debug)]
pub enum Failure {
    Usage(String),
    Failed(String),
}

impl From<config::ConfigError> for Failure {
    fn from(error: config::ConfigError) -> Self {
        Failure::Usage(error.to_string())
    }
}

impl From<gate_server::StartError> for Failure {
    fn from(error: gate_server::StartError) -> Self {
        Failure::Usage(error.to_string())
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Failure::Failed(format!("{error:#}"))
    }
}

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    crate::telemetry::init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("tollway: the runtime could not be started: {error}");
            return ExitCode::from(1);
        }
    };
    let ended = runtime.block_on(run(cli));
    // A read of standard input cannot be cancelled: its thread is left behind.
    runtime.shutdown_background();
    match ended {
        Ok(code) => code,
        Err(Failure::Usage(sentence)) => {
            eprintln!("tollway: {sentence}");
            ExitCode::from(2)
        }
        Err(Failure::Failed(sentence)) => {
            eprintln!("tollway: {sentence}");
            ExitCode::from(1)
        }
    }
}

async fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let load = |transport: Option<Transport>| -> Result<Config, Failure> {
        Ok(config::load(cli.config.as_deref(), transport, &Machine)?)
    };
    let load_gate =
        || -> Result<GateServer, Failure> { Ok(config::load_gate_server(cli.config.as_deref(), &Machine)?) };
    match cli.command {
        Command::Serve => serve::serve(load(Some(Transport::Remote))?, cli.config.clone()).await,
        Command::Stdio => serve::stdio(load(Some(Transport::Stdio))?, cli.config.clone()).await,
        Command::Gate(args) => gate::run(&args, load_gate()?, cli.config.clone()).await,
        Command::List(args) => match &args.url {
            Some(url) => list::of_url(&args, url).await,
            None => list::of_gate(&args, &load_gate()?).await,
        },
        #[cfg(feature = "sandbox")]
        Command::Sandbox(args) => Ok(crate::sandbox::command::run(args).await),
        Command::Init(args) => init::run(&args),
        Command::Check(args) if config::is_gate(cli.config.as_deref(), &Machine)? => {
            check::gate_file(&args, &load_gate()?).await
        }
        Command::Check(args) => check::run(&args, load(None)?).await,
        Command::Keystore(command) => keystore::run(&command, &machine::world().0),
        Command::Signer(args) => signer::run(&args, cli.config.as_deref()).await,
        Command::Migrate(args) => {
            let (world, _tasks) = machine::world();
            ledger::migrate(&args, &config::load_store(cli.config.as_deref(), &Machine)?, world).await
        }
        Command::Limits(command) => limits::run(&command, &*open_ledger(&cli.config).await?).await,
        Command::Origins(command) => policy::origins(&command, &*open_ledger(&cli.config).await?).await,
        Command::Pins(command) => policy::pins(&command, &*open_ledger(&cli.config).await?).await,
        Command::Reservations(reservations::ReservationsCommand::Archive(args)) => {
            let (world, _tasks) = machine::world();
            archive::run(&args, &config::load_store(cli.config.as_deref(), &Machine)?, world).await
        }
        Command::Reservations(command) => {
            let ledger = open_ledger(&cli.config).await?;
            let (world, _tasks) = machine::world();
            let chains = || chains(&cli.config, &world);
            let tools = reservations::Tools { ledger, chains: &chains, world: world.clone() };
            reservations::run(&command, tools).await
        }
        Command::Claims(command) => {
            let (world, _tasks) = machine::world();
            claims::run(&command, &config::load_gate(cli.config.as_deref(), &Machine)?, &world).await
        }
    }
}

/// Every network that the file names an RPC for, and how they are asked; no secret of the signer has to be there.
fn chains(config: &Option<PathBuf>, world: &World) -> Result<(Chains, SweepSettings), Failure> {
    let (networks, security, sweep) = config::load_networks(config.as_deref(), &Machine)?;
    let operator = server::operator_client(&security, world).map_err(|e| Failure::Usage(e.to_string()))?;
    Ok((server::chains(&networks, &operator, world), server::sweep_settings(&sweep, &security)))
}

/// Operators need the ledger alone: no secret of the signer has to be there to stop spending.
async fn open_ledger(config: &Option<PathBuf>) -> Result<Arc<dyn Ledger>, Failure> {
    let store = config::load_store(config.as_deref(), &Machine)?;
    if let Store::Sqlite(path) = &store
        && !path.exists()
    {
        let shown = path.display();
        return Err(Failure::Usage(format!(
            "budget.path: there is no ledger at {shown}; it is made by the first start with a signer, or by tollway migrate"
        )));
    }
    let (world, _tasks) = machine::world();
    Ok(server::open(&store, &world, None).await?)
}
