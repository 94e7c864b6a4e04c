//! Scenarios that need more than a test: real processes, real sockets, a PostgreSQL with its own directory, and minutes.
//! `cargo run --release -p loadtest -- NAME`; what each shows stands in `README.md` beside this directory.

mod cap;
mod chaos;
mod front;
mod gate;
#[allow(dead_code, reason = "each scenario takes what it needs")]
mod parts;
#[allow(dead_code, reason = "each scenario takes what it needs")]
mod report;
mod reserve;
mod rolling;
mod sessions;
mod stop;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use report::{Report, Result, Stopped};

/// Plays one scenario against real parts on this machine and says whether its bar holds.
#[derive(Parser)]
#[command(
    name = "loadtest",
    max_term_width = 110,
    after_help = "Progress goes to standard error. The last line of standard output is one JSON object:\n  \
        {\"scenario\", \"pass\", \"figures\", \"baseline\", \"ratio\"}\n\
        Exit codes: 0 the bar holds, 1 it does not or the scenario could not be played, 2 wrong usage.\n\n\
        Needs PostgreSQL's server programs (Debian: postgresql) for every scenario but `front` and `gate`; as root they run as\n\
        the user postgres or nobody. Everything is started in a temporary directory and ended again."
)]
struct Cli {
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// What the strict MCP front costs beside a bare endpoint that does the same work without checks
    Front(front::Args),
    /// What a free call costs at `tollway gate` beside a bare hyper reverse proxy
    Gate(gate::Args),
    /// The cap holds over three replicas that are killed: exactly 33 of 300 calls of 0.30 fit into 10
    Cap(cap::Args),
    /// Replicas killed, frozen and cut off, a database that fails over, a hostile market: the money is right
    Chaos(chaos::Args),
    /// A rolling restart under paid load: no payment twice, no receipt lost, no search failed
    Rolling(rolling::Args),
    /// 100 clients, each request on a connection of its own to the next replica, every revision; 100,000 initialize
    Sessions(sessions::Args),
    /// The kill switch, while one replica is frozen and another cut off: nothing is reserved or signed after it
    Stop(stop::Args),
    /// Reservations and settlements a second on PostgreSQL, beside one row at a time and bare INSERTs
    Reserve(reserve::Args),
}

#[tokio::main]
async fn main() -> ExitCode {
    let scenario = Cli::parse().scenario;
    // Whatever ends the scenario, its processes end with it.
    let played = tokio::select! {
        played = play(scenario) => played,
        () = interrupted() => Err(Stopped("interrupted".into())),
    };
    match played {
        Ok(report) => report.print(),
        Err(stopped) => {
            eprintln!("loadtest: {stopped}");
            ExitCode::FAILURE
        }
    }
}

/// SIGTERM or SIGINT.
async fn interrupted() {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn play(scenario: Scenario) -> Result<Report> {
    match scenario {
        Scenario::Front(args) => front::run(args).await,
        Scenario::Gate(args) => gate::run(args).await,
        Scenario::Cap(args) => cap::run(args).await,
        Scenario::Chaos(args) => chaos::run(args).await,
        Scenario::Rolling(args) => rolling::run(args).await,
        Scenario::Sessions(args) => sessions::run(args).await,
        Scenario::Stop(args) => stop::run(args).await,
        Scenario::Reserve(args) => reserve::run(args).await,
    }
}
