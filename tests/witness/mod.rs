//! The whole paid path as outside witnesses see it: the official MCP client (`tests/interop`, Node 20) buys over HTTP
//! and stdio, the seller counts what reaches it, and the chain and the ledger agree on every payment.

mod audit;
mod client;
mod counts;
mod recovered;

pub use audit::every_transfer_has_its_row;

use std::time::Duration;

use tollway::sandbox::backends::Options;
use tollway::sandbox::chain;

/// Ledgers of 200 ms, offers of an hour: a signature lives for two minutes, so that a slow machine is only slow.
fn fast() -> Options {
    let chain = chain::Options { ledger_interval: Some(Duration::from_millis(200)), ..chain::Options::default() };
    Options { chain, ..Options::default() }
}
