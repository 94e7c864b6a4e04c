//! The Sweep table of `docs/outcomes.md`: payments that were left in doubt by real paid calls, on a real Soroban host,
//! read through nodes that are honest, late, gone or lying. Each test ends with an audit.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine's world")]

mod bench;
mod liars;
mod operator;
mod races;
mod table;
