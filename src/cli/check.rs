//! `tollway check`: what the configuration means, and with `--online` whether its parts answer.

use std::process::ExitCode;

use super::Failure;
use crate::config::Config;

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Ask the catalog, every chain RPC, the signer and the ledger; nothing is paid or signed
    #[arg(long)]
    online: bool,
    /// One JSON document on standard output
    #[arg(long)]
    json: bool,
}

pub async fn run(_args: &CheckArgs, _config: Config) -> Result<ExitCode, Failure> {
    Ok(ExitCode::SUCCESS)
}
