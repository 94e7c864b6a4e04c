//! Tollway: x402 stablecoin payments for MCP. Agents pay for tools within a budget that holds whatever fails. The
//! modules below stand in the order in which they may use each other; nothing points back, and
//! `tests/architecture.rs` proves it.
#![forbid(unsafe_code)]

pub mod json;
pub mod money;
pub mod telemetry;
pub mod ports;
pub mod seal;
pub mod http;
pub mod x402;
pub mod policy;
pub mod catalog;
pub mod mcp;
pub mod upstream;
pub mod facilitator;
pub mod chain;
pub mod guard;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod ledger;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod signer;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod pay;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub mod gate;
#[cfg(feature = "roles")]
pub mod config;
#[cfg(feature = "roles")]
pub mod agent;
#[cfg(feature = "roles")]
pub mod gate_server;
#[cfg(feature = "sandbox")]
pub mod sandbox;
#[cfg(feature = "roles")]
pub mod cli;
#[cfg(all(feature = "roles", any(test, feature = "fuzzing")))]
#[doc(hidden)]
pub mod fuzzing;
