//! Sellers, nodes and listings that lie to get more than the one authorized payment (`docs/outcomes.md`). The chain is
//! a real Soroban host, every signature is looked into, and each scene ends with a sweep and an audit.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine's world")]

mod listings;
mod nodes;
pub mod scene;
mod sellers;
