//! Tollway: x402 stablecoin payments for MCP. Agents pay for tools within a budget that holds whatever fails; servers
//! charge for them. The modules below stand in the order in which they may use each other; nothing points back, and
//! `tests/architecture.rs` proves it.
#![forbid(unsafe_code)]

#[cfg(feature = "roles")]
pub mod agent;
pub mod catalog;
pub mod chain;
#[cfg(feature = "roles")]
pub mod cli;
#[cfg(feature = "roles")]
pub mod config;
pub mod guard;
pub mod http;
pub mod json;
#[cfg(feature = "sqlite")]
pub mod ledger;
pub mod mcp;
pub mod money;
pub mod pay;
pub mod ports;
#[cfg(feature = "sandbox")]
pub mod sandbox;
pub mod seal;
pub mod signer;
#[cfg(feature = "roles")]
pub mod telemetry;
pub mod upstream;
pub mod x402;
