//! What a paid call does when something goes wrong, step by step: the buyer's rows of `docs/outcomes.md`, each played
//! against real sockets and the real ledger. `tests/outcomes.rs` says which test plays which row.

pub mod after;
pub mod before;
pub mod bench;
pub mod faulty;
pub mod lookup;
pub mod recover;
pub mod reserve;
pub mod server;
mod tools;

use std::path::Path;
use std::sync::Arc;

use tollway::ledger::{Ledger, SqliteLedger};
use tollway::ports::World;
use tollway::seal::KeyRing;

async fn open_ledger(world: &World, dir: &Path) -> Arc<dyn Ledger> {
    // Every process over one file has one ring.
    let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
    Arc::new(SqliteLedger::open(&dir.join("ledger.sqlite"), world.clone(), Some(ring)).await.unwrap())
}
