//! `tollway sandbox`: the sandbox until it is stopped, or its demo.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::backends::{self, Options};
use super::chain::{self, NETWORK, USDC};
use super::demo;
use super::start::{Running, start};
use crate::ports::World;
use crate::ports::machine;

#[derive(Debug, clap::Args)]
pub struct SandboxArgs {
    /// Act as an agent: search, pay, go over the budget; one JSON document on standard output
    #[arg(long)]
    pub demo: bool,
    /// Keep the state here; without it, it is temporary. The chain starts anew at each start, so the ledger of an
    /// earlier run is set aside in earlier-<time>/
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Milliseconds between two ledgers
    #[arg(long, value_name = "MS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub ledger_ms: u64,
    /// Port of the agent server; 0 takes any free one
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// Serve the chain's RPC over TLS too, write the authority's certificate to rpc-ca.pem in the state directory, and
    /// let the agent server ask it that way
    #[arg(long)]
    pub rpc_tls: bool,
    /// Start a second RPC node, so many ledgers behind the first; the agent server asks both
    #[arg(long, value_name = "LEDGERS", value_parser = clap::value_parser!(u32).range(1..=i64::from(chain::MAX_LAG)))]
    pub lagging_node: Option<u32>,
    /// Print addresses, keys and balances as one JSON document
    #[arg(long)]
    pub json: bool,
}

/// The command's exit code; what went wrong stands on standard error.
pub async fn run(args: SandboxArgs) -> ExitCode {
    let (world, tasks) = machine::world();
    let options = Options {
        dir: args.dir.clone(),
        port: args.port,
        rpc_tls: args.rpc_tls,
        lagging_node: args.lagging_node,
        settles_with: None,
        chain: chain::Options {
            ledger_interval: Some(Duration::from_millis(args.ledger_ms)),
            ..chain::Options::default()
        },
    };
    let sandbox = match start(options, &world).await {
        Ok(sandbox) => sandbox,
        Err(error) => return failed(&error.to_string()),
    };
    let code = if args.demo { run_demo(&sandbox, &world).await } else { serve(&sandbox, args.json).await };
    let state = sandbox.stop();
    tasks.close();
    // What still runs then is cut off: nothing of the sandbox outlives it.
    let _ = tokio::time::timeout(Duration::from_secs(5), tasks.wait()).await;
    drop(state);
    code
}

fn failed(problem: &str) -> ExitCode {
    eprintln!("tollway sandbox: {problem}");
    ExitCode::FAILURE
}

async fn run_demo(sandbox: &Running, world: &World) -> ExitCode {
    let client = match backends::client(world) {
        Ok(client) => client,
        Err(error) => return failed(&error.to_string()),
    };
    let report = match demo::run(sandbox, client, &|line| eprintln!("{line}")).await {
        Ok(report) => report,
        Err(error) => return failed(&error.to_string()),
    };
    if writeln!(std::io::stdout(), "{}", report.document.get()).is_err() {
        return failed("standard output is closed");
    }
    if report.problems.is_empty() {
        eprintln!("all is as it should be");
        return ExitCode::SUCCESS;
    }
    for problem in &report.problems {
        eprintln!("WRONG: {problem}");
    }
    ExitCode::FAILURE
}

async fn serve(sandbox: &Running, as_json: bool) -> ExitCode {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return failed("signals cannot be caught");
    };
    let program = std::env::current_exe().map_or_else(|_| "tollway".into(), |path| path.display().to_string());
    let clients = sandbox.client_configuration(&program);
    let balance = |account| {
        let balance = sandbox.backends.network.balance(account);
        balance.map_or_else(|| "no trustline".to_owned(), |atomic| atomic.to_string())
    };
    let (payer, seller) = (balance(&sandbox.backends.payer), balance(&sandbox.backends.pay_to));
    let nodes = &sandbox.nodes;
    let text = if as_json {
        let mut document = json!({
            "network": NETWORK,
            "asset": USDC,
            "urls": {
                "agent": sandbox.agent_url,
                "rpc": sandbox.backends.rpc_url,
                "facilitator": sandbox.backends.facilitator_url,
                "seller": sandbox.backends.seller_url,
                "server": sandbox.backends.seller.server_url,
                "signer": sandbox.backends.signer_url,
            },
            "accounts": {
                "payer": {"address": sandbox.backends.payer.to_string(), "balance": payer},
                "seller": {"address": sandbox.backends.pay_to.to_string(), "balance": seller},
            },
            "state": sandbox.dir(),
            "clients": clients,
        });
        for (name, url) in [("rpcTls", &nodes.tls_url), ("laggingRpc", &nodes.lagging_url)] {
            if let Some(url) = url {
                document["urls"][name] = json!(url);
            }
        }
        if let Some(path) = &nodes.ca_file {
            document["caFile"] = json!(path);
        }
        document.to_string()
    } else {
        let mut more = String::new();
        if let (Some(url), Some(path)) = (&nodes.tls_url, &nodes.ca_file) {
            more += &format!("The same over TLS {url}   (trust {})\n", path.display());
        }
        if let Some(url) = &nodes.lagging_url {
            more += &format!("A node behind it  {url}\n");
        }
        format!(
            "Agent server      {}\nChain RPC         {}   ({NETWORK}, a ledger of its own)\n{more}Facilitator       {}   \
             (its catalog too)\nDemo seller       {}   (tollway gate in front of {}, \
             which knows nothing of payments)\nSigner            {}\nState             {}\n\nPayer   {} has {} \
             atomic units of {}\nSeller  {} has {}\n\nPaste into an MCP client, over HTTP:\n\n{:#}\n\nor over \
             stdio:\n\n{:#}\n\nStop with Ctrl-C.",
            sandbox.agent_url,
            sandbox.backends.rpc_url,
            sandbox.backends.facilitator_url,
            sandbox.backends.seller_url,
            sandbox.backends.seller.server_url,
            sandbox.backends.signer_url,
            sandbox.dir().display(),
            sandbox.backends.payer,
            payer,
            USDC,
            sandbox.backends.pay_to,
            seller,
            clients["http"],
            clients["stdio"],
        )
    };
    if writeln!(std::io::stdout(), "{text}").is_err() {
        return failed("standard output is closed");
    }
    futures_util::future::select(Box::pin(interrupt.recv()), Box::pin(terminate.recv())).await;
    eprintln!("stopping");
    ExitCode::SUCCESS
}
