//! What scenarios are played on: real processes and what stands around them. One part a file.

pub mod postgres;
pub mod process;
