//! Who signs: the keystore of `encrypted-key`, external signers that answer with whole entries, smart accounts.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine's world")]

mod keystore;
mod nodes;
mod paid;
mod role;
mod smart;
