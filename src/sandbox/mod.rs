//! Everything on one machine: a local Stellar network, a facilitator with its catalog, a demo server behind the gate, a
//! signer.

pub mod backends;
pub mod catalog;
pub mod chain;
pub mod command;
pub mod demo;
pub mod facilitator;
pub mod mcp_client;
pub mod seller;
pub mod server;
pub mod shop;
pub mod signer;
mod rpc;
mod soroban;
pub mod start;
pub mod state;
pub mod tls;
