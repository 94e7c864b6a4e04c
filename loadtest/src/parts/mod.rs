//! What scenarios are played on: real processes and what stands around them. One part a file.

pub mod audit;
pub mod balancer;
pub mod binary;
pub mod buyer;
pub mod client;
pub mod cluster;
pub mod hostile;
pub mod line;
pub mod market;
pub mod postgres;
pub mod process;
pub mod rate;
pub mod replica;
pub mod rng;
pub mod watch;
pub mod wire;
