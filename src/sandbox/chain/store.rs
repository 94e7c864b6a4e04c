//! The entries of the ledger. Temporary entries end with their life; changes of each closed ledger can be undone, so
//! that a node behind the others sees the past as it was.

use std::collections::BTreeMap;

use stellar_xdr::{LedgerEntry, LedgerKey};

use super::xdr::is_temporary;

#[derive(Debug, Clone)]
pub struct Stored {
    pub entry: LedgerEntry,
    /// The last ledger in which it lives; contract entries only.
    pub live_until: Option<u32>,
}

/// What the entries were before one ledger changed them.
pub type Undo = BTreeMap<LedgerKey, Option<Stored>>;

#[derive(Default)]
pub struct Store {
    entries: BTreeMap<LedgerKey, Stored>,
    /// Temporary entries by the last ledger of their life, as it was when they were written.
    ends: BTreeMap<u32, Vec<LedgerKey>>,
    undo: Undo,
}

impl Store {
    pub fn get(&self, key: &LedgerKey) -> Option<&Stored> {
        self.entries.get(key)
    }

    pub fn put(&mut self, key: LedgerKey, stored: Stored) {
        if let (true, Some(end)) = (is_temporary(&key), stored.live_until) {
            self.ends.entry(end).or_default().push(key.clone());
        }
        let old = self.entries.insert(key.clone(), stored);
        self.undo.entry(key).or_insert(old);
    }

    pub fn remove(&mut self, key: &LedgerKey) {
        let old = self.entries.remove(key);
        self.undo.entry(key.clone()).or_insert(old);
    }

    /// Puts an entry without a trace, as if it had always been so.
    pub fn put_ever(&mut self, key: LedgerKey, stored: Stored) {
        self.entries.insert(key, stored);
    }

    /// Removes the temporary entries that do not live in ledger `seq` any more.
    pub fn evict(&mut self, seq: u32) {
        let later = self.ends.split_off(&seq);
        for key in std::mem::replace(&mut self.ends, later).into_values().flatten() {
            if self.get(&key).is_some_and(|stored| stored.live_until < Some(seq)) {
                self.remove(&key);
            }
        }
    }

    /// What changed since the last call.
    pub fn take_undo(&mut self) -> Undo {
        std::mem::take(&mut self.undo)
    }
}
