//! One binary, a module per promise.

mod architecture;
#[cfg(feature = "sandbox")]
mod auth;
#[cfg(feature = "sandbox")]
mod catalog;
#[cfg(feature = "sandbox")]
mod examples;
#[cfg(feature = "roles")]
mod gate;
#[cfg(feature = "roles")]
mod mcp;
#[cfg(feature = "sandbox")]
mod official;
#[cfg(feature = "sandbox")]
mod sandbox;
#[cfg(feature = "sandbox")]
mod stellar;
#[cfg(feature = "sandbox")]
mod outcomes;
#[cfg(feature = "sandbox")]
mod pay;
#[cfg(feature = "roles")]
mod postgres;
#[cfg(feature = "roles")]
mod replicas;
#[cfg(feature = "sandbox")]
mod signers;
#[cfg(feature = "sandbox")]
mod witness;
#[cfg(feature = "sandbox")]
mod secrets;
#[cfg(feature = "sandbox")]
mod sweep;
#[cfg(feature = "sandbox")]
mod hostile;
#[cfg(feature = "sandbox")]
mod telemetry;
