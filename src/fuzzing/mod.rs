//! What the fuzz targets of `fuzz/` do with their input, one function per target; `cargo test` runs the same over the
//! committed corpus. Each states what must hold of everything that is accepted, not only that nothing panics.
#![allow(clippy::panic, clippy::unwrap_used, clippy::disallowed_methods, reason = "a finding is a panic")]

pub mod canonical;
pub mod config;
pub mod payment;
pub mod rpc;
pub mod token;

/// Items of a catalog, its answers, resource references, cursors.
pub mod catalog {
    pub use crate::catalog::fuzzing::run;
}
/// Signed entries, simulation answers, transactions.
pub mod xdr {
    pub use crate::chain::stellar::fuzzing::run;
}

/// The longest text for an agent or a log that may come of any input.
pub(crate) const MAX_WORDS: usize = 4_096;

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
        let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 8, "only {} files in {}", files.len(), dir.display());
        files.into_iter().map(|file| (file.clone(), std::fs::read(file).unwrap())).collect()
    }

    /// The file as it is, cut short, with a byte lost, and with a byte flipped, each at some places.
    fn each(target: &str, run: fn(&[u8])) {
        for (file, data) in corpus(target) {
            let named = |data: &[u8]| {
                if std::panic::catch_unwind(|| run(data)).is_err() {
                    let shown = String::from_utf8_lossy(data);
                    panic!("{} fails, or in this variation: {shown:?}", file.display());
                }
            };
            named(&data);
            let step = (data.len() / 12).max(1);
            for at in (0..data.len()).step_by(step) {
                named(&data[..at]);
                named(&[&data[..at], &data[at + 1..]].concat());
                for bit in [0x01, 0x80] {
                    let mut flipped = data.clone();
                    flipped[at] ^= bit;
                    named(&flipped);
                }
            }
        }
    }

    #[test]
    fn the_corpus_of_canonical_json_holds() {
        each("canonical", super::canonical::run);
    }
    #[test]
    fn the_corpus_of_catalog_items_holds() {
        each("catalog", super::catalog::run);
    }
    #[test]
    fn the_corpus_of_configurations_holds() {
        each("config", super::config::run);
    }
    #[test]
    fn the_corpus_of_payment_objects_holds() {
        each("payment", super::payment::run);
    }
    #[test]
    fn the_corpus_of_the_json_rpc_front_holds() {
        each("rpc", super::rpc::run);
    }
    #[test]
    fn the_corpus_of_bearer_tokens_holds() {
        each("token", super::token::run);
    }
    #[test]
    fn the_corpus_of_foreign_xdr_holds() {
        each("xdr", super::xdr::run);
    }
}
