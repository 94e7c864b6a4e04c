//! The version hash: what an agent pins when it decides to pay.
