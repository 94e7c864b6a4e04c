//! Scenarios that need more than a test: real processes, real sockets, a PostgreSQL with its own directory, and minutes.
//! `cargo run --release -p loadtest -- NAME`; what each shows stands in `README.md` beside this directory.

mod front;
#[allow(dead_code, reason = "each scenario takes what it needs")]
mod parts;
#[allow(dead_code, reason = "each scenario takes what it needs")]
mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use report::{Report, Result};

/// Plays one scenario against real parts on this machine and says whether its bar holds.
#[derive(Parser)]
#[command(
    name = "loadtest",
    max_term_width = 110,
    after_help = "Progress goes to standard error. The last line of standard output is one JSON object:\n  \
        {\"scenario\", \"pass\", \"figures\", \"baseline\", \"ratio\"}\n\
        Exit codes: 0 the bar holds, 1 it does not or the scenario could not be played, 2 wrong usage.\n\n\
        Needs PostgreSQL's server programs (Debian: postgresql) for every scenario but `front`; as root they run as\n\
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
}

#[tokio::main]
async fn main() -> ExitCode {
    match play(Cli::parse().scenario).await {
        Ok(report) => report.print(),
        Err(stopped) => {
            eprintln!("loadtest: {stopped}");
            ExitCode::FAILURE
        }
    }
}

async fn play(scenario: Scenario) -> Result<Report> {
    match scenario {
        Scenario::Front(args) => front::run(args).await,
    }
}
