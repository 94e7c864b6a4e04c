//! The MCP server for agents: five tools (two without a signer), and the one map from error to tool result.

mod args;
pub mod auth;
pub mod errors;
pub mod health;
mod next;
pub mod reload;
mod result;
mod schemas;
pub(crate) mod time;
mod tools;

pub mod probe;
pub mod server;

pub use tools::AgentTools;
