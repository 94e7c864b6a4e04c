//! The sandbox's directory: ledgers, claims, keys, and the configuration files that it runs on.

use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::backends::StartError;
use crate::ports::World;

/// A temporary one goes with its last owner.
pub struct StateDir {
    dir: PathBuf,
    temporary: bool,
}

impl Drop for StateDir {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

/// What an earlier run on another chain left behind.
const LEDGERS: [&str; 3] = ["ledger.sqlite", "stdio/ledger.sqlite", "gate.sqlite"];

impl StateDir {
    /// The given one, or a temporary one. The chain is a new one, with other accounts and other sellers' addresses:
    /// payments and claims of an earlier run can neither be found nor resolved on it. Their files stay as they are, in a
    /// directory beside.
    pub fn open(dir: Option<PathBuf>, world: &World) -> Result<StateDir, StartError> {
        let temporary = dir.is_none();
        let name = || format!("tollway-sandbox-{}", hex::encode(world.random::<8>()));
        let dir = dir.unwrap_or_else(|| std::env::temp_dir().join(name()));
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        let dir = made.and_then(|()| dir.canonicalize()).map_err(|error| StartError::State(dir, error))?;
        let state = StateDir { dir, temporary };
        let aside = state.dir.join(format!("earlier-{}", world.unix_ms()));
        for name in LEDGERS {
            for suffix in ["", "-wal", "-shm"] {
                let from = state.dir.join(format!("{name}{suffix}"));
                if !from.exists() {
                    continue;
                }
                let to = aside.join(format!("{}{suffix}", name.replace('/', "-")));
                let moved = std::fs::create_dir_all(&aside).and_then(|()| std::fs::rename(&from, &to));
                moved.map_err(|error| StartError::State(from, error))?;
            }
        }
        Ok(state)
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// For the owner alone.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf, StartError> {
        let path = self.dir.join(name);
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path);
        match file.and_then(|mut file| file.write_all(text.as_bytes())) {
            Ok(()) => Ok(path),
            Err(error) => Err(StartError::State(path, error)),
        }
    }

    /// A key that stays as it is from run to run; made where there is none.
    pub fn key(&self, name: &str, world: &World) -> Result<Zeroizing<String>, StartError> {
        let path = self.dir.join(name);
        match std::fs::read_to_string(&path) {
            Ok(key) if key.trim().len() >= 32 => return Ok(Zeroizing::new(key.trim().to_owned())),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(StartError::State(path, error)),
        }
        let key = Zeroizing::new(hex::encode(world.random::<32>()));
        self.write(name, &key)?;
        Ok(key)
    }
}
