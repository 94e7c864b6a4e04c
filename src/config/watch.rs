//! The file while the process runs: what a change of it says.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::{Config, ConfigError, GateServer, Source, Transport, gate_server, parse, text};

/// A configuration file that is looked at again and again. Its content is compared, not its time: a mounted volume that
/// swaps a link, and an editor that keeps the time, are seen too.
pub struct Watched<T = Config> {
    path: PathBuf,
    parse: Parse<T>,
    /// Parsed, and given out.
    known: Option<[u8; 32]>,
    /// Seen once: a file that is being written is not read half.
    seen: Option<[u8; 32]>,
    refused: Option<[u8; 32]>,
}

type Parse<T> = Box<dyn Fn(&str, &dyn Source) -> Result<T, ConfigError> + Send + Sync>;

#[derive(Debug)]
pub enum Look<T = Config> {
    Same,
    Changed(Box<T>),
    /// Said once for each content.
    Refused(ConfigError),
}

impl Watched {
    pub fn new(path: PathBuf, transport: Transport) -> Watched {
        Watched::of(path, Box::new(move |text, source| parse(text, Some(transport), source)))
    }
}

impl Watched<GateServer> {
    pub fn gate(path: PathBuf) -> Watched<GateServer> {
        Watched::of(path, Box::new(gate_server::parse))
    }
}

impl<T> Watched<T> {
    fn of(path: PathBuf, parse: Parse<T>) -> Watched<T> {
        Watched { path, parse, known: None, seen: None, refused: None }
    }

    /// The first two looks give out the file as it is: it may have changed since the start read it.
    pub fn look(&mut self, source: &dyn Source) -> Look<T> {
        let text = match text(Some(&self.path), source) {
            Ok(text) => text,
            Err(error) => return self.refuse(Sha256::digest(error.to_string()).into(), error),
        };
        let content: [u8; 32] = Sha256::digest(&text).into();
        if self.seen.replace(content) != Some(content) || self.known == Some(content) {
            if self.known == Some(content) {
                self.refused = None;
            }
            return Look::Same;
        }
        match (self.parse)(&text, source) {
            Ok(config) => {
                (self.known, self.refused) = (Some(content), None);
                Look::Changed(Box::new(config))
            }
            Err(error) => self.refuse(content, error),
        }
    }

    fn refuse(&mut self, content: [u8; 32], error: ConfigError) -> Look<T> {
        match self.refused.replace(content) == Some(content) {
            true => Look::Same,
            false => Look::Refused(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io;
    use std::path::Path;

    use zeroize::Zeroizing;

    use super::*;

    struct File(RefCell<Option<String>>);
    impl Source for File {
        fn env(&self, name: &str) -> Option<String> {
            (name == "HOME").then(|| "/home/x".to_owned())
        }
        fn read(&self, _path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
            let text = self.0.borrow().clone();
            text.map(|text| Zeroizing::new(text.into_bytes())).ok_or_else(|| io::ErrorKind::NotFound.into())
        }
    }

    const GOOD: &str = "facilitator: {base_url: \"https://catalog.example\"}\nbudget: {limits_version: 1}\n";

    fn version(look: &Look) -> Option<u64> {
        match look {
            Look::Changed(config) => Some(config.limits_version),
            _ => None,
        }
    }

    #[test]
    fn a_change_is_given_out_once_when_it_stands_still_and_a_broken_file_is_refused_once() {
        let file = File(RefCell::new(Some(GOOD.to_owned())));
        let mut watched = Watched::new("/etc/tollway.yaml".into(), Transport::Remote);
        let mut next = |text: Option<&str>| {
            *file.0.borrow_mut() = text.map(str::to_owned);
            watched.look(&file)
        };
        let second = GOOD.replace("limits_version: 1", "limits_version: 2");
        assert!(matches!(next(Some(GOOD)), Look::Same));
        assert_eq!(version(&next(Some(GOOD))), Some(1));
        assert!(matches!(next(Some(GOOD)), Look::Same));
        // Half of it is there, and then all of it.
        assert!(matches!(next(Some(&second[..60])), Look::Same));
        assert!(matches!(next(Some(&second)), Look::Same));
        assert_eq!(version(&next(Some(&second))), Some(2));
        // Broken, mended to what is known, broken again.
        for _ in 0..2 {
            assert!(matches!(next(Some("nonsense: 1")), Look::Same));
            assert!(matches!(next(Some("nonsense: 1")), Look::Refused(_)));
            assert!(matches!(next(Some("nonsense: 1")), Look::Same));
            assert!(matches!(next(Some(&second)), Look::Same));
            assert!(matches!(next(Some(&second)), Look::Same));
        }
        assert!(matches!(next(None), Look::Refused(_)));
        assert!(matches!(next(None), Look::Same));
        assert!(matches!(next(Some(GOOD)), Look::Same));
        assert_eq!(version(&next(Some(GOOD))), Some(1), "what was there before is a change again");
    }
}
