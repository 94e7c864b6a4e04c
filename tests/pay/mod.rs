//! What a paid call does when something goes wrong, step by step: the buyer's rows of `docs/outcomes.md`, each played
//! against real sockets and the real ledger. `tests/outcomes.rs` says which test plays which row.

pub mod after;
pub mod before;
pub mod bench;
pub mod faulty;
pub mod lookup;
pub mod reserve;
pub mod server;
mod tools;

use std::path::Path;
use std::sync::Arc;

use tollway::ledger::{Ledger, SqliteLedger};
use tollway::ports::World;
use tollway::seal::KeyRing;

async fn open_ledger(world: &World, dir: &Path) -> Arc<dyn Ledger> {
    let ring = KeyRing::ephemeral(world);
    Arc::new(SqliteLedger::open(&dir.join("ledger.sqlite"), world.clone(), Some(ring)).await.unwrap())
}
