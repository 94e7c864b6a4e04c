//! The key ring: one secret (or several, the newest first), and what is derived from it: the AEAD that seals payloads
//! and outcomes in the ledger, and the MAC that signs session tokens and the relay's headers.
//!
//! Sealed form: `1 (version) | key id, 8 bytes | nonce, 12 bytes | ciphertext and tag`. The version, the key id and the
//! caller's context are authenticated. To rotate: put the new key first, keep the old one behind it until nothing that
//! it sealed or signed is alive. A ring file is read again when it changes. Replicas see the change at different times,
//! so a new first key opens and verifies at once, and seals and signs a while later ([`SIGN_AFTER`]).

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use aws_lc_rs::{aead, hkdf, hmac};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use futures_util::future::{Either, select};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use crate::ports::World;

const VERSION: u8 = 1;
const ID_LEN: usize = 8;
const HEAD_LEN: usize = 1 + ID_LEN + aead::NONCE_LEN;
/// More keys than this is a mistake, and every forged token costs one MAC per key.
const MAX_KEYS: usize = 16;
/// A ring file or variable is never longer.
const MAX_TEXT: usize = 16 * 1024;
/// Until every replica has read a changed file: a mounted Secret takes up to two minutes, and [`WATCH`] comes on top.
pub const SIGN_AFTER: Duration = Duration::from_secs(180);
/// Between two looks at the ring file.
const WATCH: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum SealError {
    #[error("a ring needs keys of at least 32 bytes (openssl rand -hex 32)")]
    KeyTooShort,
    #[error("a ring needs 1 to {MAX_KEYS} keys")]
    KeyCount,
    #[error("key {0} of the ring is neither hex nor base64")]
    KeyText(usize),
    #[error("sealed with a key that is no longer in the ring, or altered")]
    Open,
    #[error("the key file {0} can be read or written by others (mode {1:o}): run chmod 600 on it")]
    Mode(PathBuf, u32),
    #[error("the key file {0} is not a regular file")]
    NotAFile(PathBuf),
    #[error("the key file {0}: {1}")]
    File(PathBuf, io::Error),
}

/// Newest key first: it seals and signs; all of them open and verify. Clones share what a reload brings.
#[derive(Clone)]
pub struct KeyRing {
    keys: Arc<RwLock<Arc<Keys>>>,
    /// Where it was read, if it is read again.
    file: Option<Arc<Path>>,
    sign_after: Duration,
}

struct Keys {
    all: Vec<RingKey>,
    /// The key that seals and signs until that moment, when the first one takes over.
    before: Option<(usize, Instant)>,
}

impl Keys {
    fn signing(&self) -> Option<&RingKey> {
        let index = self.before.filter(|(_, until)| Instant::now() < *until).map_or(0, |(index, _)| index);
        self.all.get(index)
    }
}

#[derive(Clone)]
struct RingKey {
    id: [u8; ID_LEN],
    master: Zeroizing<[u8; 32]>,
}

impl RingKey {
    fn new(secret: &[u8]) -> RingKey {
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, b"tollway key ring v1").extract(secret);
        let master = expand(&prk, "master", "");
        let mut id = [0; ID_LEN];
        id.copy_from_slice(&expand(&prk, "id", "")[..ID_LEN]);
        RingKey { id, master }
    }

    fn derive(&self, kind: &str, purpose: &str) -> Zeroizing<[u8; 32]> {
        expand(&hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &*self.master), kind, purpose)
    }

    fn mac(&self, purpose: &str) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &*self.derive("mac", purpose))
    }

    fn aead(&self) -> aead::LessSafeKey {
        let key = self.derive("seal", "");
        aead::LessSafeKey::new(aead::UnboundKey::new(&aead::AES_256_GCM, &*key).expect("AES-256 takes 32 bytes"))
    }
}

/// HKDF-SHA256 to 32 bytes; `kind` is a word of this file, so kind and purpose cannot run into each other.
fn expand(prk: &hkdf::Prk, kind: &str, purpose: &str) -> Zeroizing<[u8; 32]> {
    let mut out = Zeroizing::new([0; 32]);
    prk.expand(&[kind.as_bytes(), b"\0", purpose.as_bytes()], hkdf::HKDF_SHA256)
        .and_then(|okm| okm.fill(&mut *out))
        .expect("HKDF-SHA256 gives 32 bytes");
    out
}

impl KeyRing {
    /// Keys of at least 32 bytes each, reduced by HKDF-SHA256 per purpose.
    pub fn new(keys: Vec<Vec<u8>>) -> Result<KeyRing, SealError> {
        let keys: Vec<_> = keys.into_iter().map(Zeroizing::new).collect();
        if keys.is_empty() || keys.len() > MAX_KEYS {
            return Err(SealError::KeyCount);
        }
        if keys.iter().any(|key| key.len() < 32) {
            return Err(SealError::KeyTooShort);
        }
        Ok(KeyRing::of(keys.iter().map(|key| RingKey::new(key)).collect()))
    }

    fn of(all: Vec<RingKey>) -> KeyRing {
        let keys = Arc::new(RwLock::new(Arc::new(Keys { all, before: None })));
        KeyRing { keys, file: None, sign_after: SIGN_AFTER }
    }

    /// How long a new first key of the file waits before it seals and signs.
    pub fn with_sign_after(self, sign_after: Duration) -> KeyRing {
        KeyRing { sign_after, ..self }
    }

    fn keys(&self) -> Arc<Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The text of an environment variable or file: keys separated by commas or line ends, the newest first, each hex
    /// (where every character is a hex digit) or base64 (either alphabet, padded or not), at least 32 bytes long.
    pub fn parse(text: &str) -> Result<KeyRing, SealError> {
        if text.len() > MAX_TEXT {
            return Err(SealError::KeyCount);
        }
        let words = text.split([',', '\n', '\r']).map(str::trim).filter(|word| !word.is_empty());
        let mut keys = Vec::new();
        for (i, word) in words.enumerate() {
            let key = if word.bytes().all(|b| b.is_ascii_hexdigit()) {
                hex::decode(word).ok()
            } else {
                let bare = word.trim_end_matches('=');
                STANDARD_NO_PAD.decode(bare).or_else(|_| URL_SAFE_NO_PAD.decode(bare)).ok()
            };
            keys.push(key.ok_or(SealError::KeyText(i + 1))?);
        }
        KeyRing::new(keys)
    }

    /// A ring of this process only.
    pub fn ephemeral(world: &World) -> KeyRing {
        KeyRing::of(vec![RingKey::new(&*Zeroizing::new(world.random::<32>()))])
    }

    /// A ring file that somebody else manages, such as a mounted secret. The group may read it, others nothing. It can
    /// be read again.
    pub fn load(path: &Path) -> Result<KeyRing, SealError> {
        Ok(KeyRing { file: Some(path.into()), ..read(path, 0o027)? })
    }

    /// Takes over what the file holds now, and says whether that is something else; a file that is no ring changes
    /// nothing. A ring that came from no file stays as it is.
    pub fn reload(&self) -> Result<bool, SealError> {
        let Some(path) = &self.file else { return Ok(false) };
        let all = read(path, 0o027)?.keys().all.clone();
        let mut held = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        let ids = |keys: &[RingKey]| keys.iter().map(|key| key.id).collect::<Vec<_>>();
        if ids(&all) == ids(&held.all) {
            return Ok(false);
        }
        let first = |keys: &[RingKey]| keys.first().map(|key| key.id);
        let signing = held.signing().map(|key| key.id);
        // A first key that waits already goes on waiting; one whose predecessor is gone cannot wait.
        let until = match held.before {
            Some((_, until)) if first(&held.all) == first(&all) => until,
            _ => Instant::now() + self.sign_after,
        };
        let before = all.iter().position(|key| Some(key.id) == signing).filter(|index| *index > 0);
        *held = Arc::new(Keys { all, before: before.map(|index| (index, until)) });
        Ok(true)
    }

    /// Reads the file again and again until `shutdown`. Returns at once for a ring that came from none.
    pub async fn watch(self, shutdown: CancellationToken) {
        let Some(path) = self.file.clone() else { return };
        let mut failed = None;
        loop {
            let (stop, pause) = (pin!(shutdown.cancelled()), pin!(sleep(WATCH)));
            if let Either::Left(_) = select(stop, pause).await {
                return;
            }
            match self.reload() {
                Ok(true) => {
                    let keys = self.keys().all.len();
                    tracing::info!(path = %path.display(), keys, "the key ring was read again");
                    failed = None;
                }
                Ok(false) => failed = None,
                Err(error) => {
                    let error = error.to_string();
                    if failed.as_ref() != Some(&error) {
                        tracing::error!(error, "the key ring stays as it was");
                    }
                    failed = Some(error);
                }
            }
        }
    }

    /// The own key of `stdio` and the sandbox, beside the ledger: made once with mode 0600, shared by every process that
    /// opens this ledger. Whoever makes it at the same moment gets the same key: a name is linked to a complete file,
    /// and the first link wins.
    pub fn load_or_create(world: &World, path: &Path) -> Result<KeyRing, SealError> {
        match read(path, 0o077) {
            Err(SealError::File(_, error)) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        create(world, path).map_err(|error| SealError::File(path.to_owned(), error))?;
        read(path, 0o077)
    }

    /// AES-256-GCM with a random nonce; `context` (kind and row) is authenticated, not stored.
    pub fn seal(&self, world: &World, context: &str, plain: &[u8]) -> Vec<u8> {
        let keys = self.keys();
        let key = keys.signing().expect("a ring has a key");
        let nonce: [u8; aead::NONCE_LEN] = world.random();
        let mut body = plain.to_vec();
        key.aead()
            .seal_in_place_append_tag(aead::Nonce::assume_unique_for_key(nonce), aad(&key.id, context), &mut body)
            .expect("AES-GCM seals anything below 64 GiB");
        let mut sealed = Vec::with_capacity(HEAD_LEN + body.len());
        sealed.push(VERSION);
        sealed.extend_from_slice(&key.id);
        sealed.extend_from_slice(&nonce);
        sealed.append(&mut body);
        sealed
    }

    pub fn open(&self, context: &str, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        let (head, body) = sealed.split_at_checked(HEAD_LEN).ok_or(SealError::Open)?;
        let (version, rest) = head.split_first().ok_or(SealError::Open)?;
        let (id, nonce) = rest.split_at_checked(ID_LEN).ok_or(SealError::Open)?;
        let nonce = aead::Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::Open)?;
        let keys = self.keys();
        let key = keys.all.iter().find(|key| *version == VERSION && key.id == *id).ok_or(SealError::Open)?;
        let mut body = body.to_vec();
        let plain = key.aead().open_in_place(nonce, aad(&key.id, context), &mut body).map_err(|_| SealError::Open)?;
        let length = plain.len();
        body.truncate(length);
        Ok(body)
    }

    /// HMAC-SHA256 under the newest key, for `purpose`.
    pub fn sign(&self, purpose: &str, message: &[u8]) -> [u8; 32] {
        let keys = self.keys();
        let key = keys.signing().expect("a ring has a key");
        let mut out = [0; 32];
        out.copy_from_slice(hmac::sign(&key.mac(purpose), message).as_ref());
        out
    }

    /// Constant time, against every key of the ring.
    pub fn verify(&self, purpose: &str, message: &[u8], tag: &[u8]) -> bool {
        self.keys().all.iter().any(|key| hmac::verify(&key.mac(purpose), message, tag).is_ok())
    }
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyRing({} keys)", self.keys().all.len())
    }
}

fn aad(id: &[u8; ID_LEN], context: &str) -> aead::Aad<Vec<u8>> {
    let mut bytes = vec![VERSION];
    bytes.extend_from_slice(id);
    bytes.extend_from_slice(context.as_bytes());
    aead::Aad::from(bytes)
}

/// `forbidden`: the permission bits that must not be set.
fn read(path: &Path, forbidden: u32) -> Result<KeyRing, SealError> {
    KeyRing::parse(&read_private(path, forbidden, MAX_TEXT)?)
}

/// A file of key material, at most `max` bytes and one more of it, so that a reader sees that there is more.
/// `forbidden`: the permission bits that must not be set.
pub(crate) fn read_private(path: &Path, forbidden: u32, max: usize) -> Result<Zeroizing<String>, SealError> {
    let failed = |error| SealError::File(path.to_owned(), error);
    let file = fs::File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(SealError::NotAFile(path.to_owned()));
    }
    let mode = meta.permissions().mode() & 0o777;
    if mode & forbidden != 0 {
        return Err(SealError::Mode(path.to_owned(), mode));
    }
    let mut text = Zeroizing::new(String::new());
    io::Read::read_to_string(&mut io::Read::take(file, max as u64 + 1), &mut text).map_err(failed)?;
    Ok(text)
}

fn create(world: &World, path: &Path) -> io::Result<()> {
    let key = Zeroizing::new(hex::encode(*Zeroizing::new(world.random::<32>())));
    match write_private(world, path, &Zeroizing::new(format!("{}\n", key.as_str()))) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// A new file of mode 0600, complete as soon as it has its name; one that exists is never touched
/// (`ErrorKind::AlreadyExists`). Its directory is made where there is none.
pub(crate) fn write_private(world: &World, path: &Path, text: &str) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", hex::encode(world.random::<8>())));
    let temporary = PathBuf::from(name);
    let written = (|| {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::hard_link(&temporary, path)
    })();
    // The second name of the same file, or a leftover: losing it takes nothing away.
    let _ = fs::remove_file(&temporary);
    written?;
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world() -> World {
        crate::ports::machine::world().0
    }

    fn ring(keys: &[u8]) -> KeyRing {
        KeyRing::new(keys.iter().map(|b| vec![*b; 32]).collect()).unwrap()
    }

    #[test]
    fn a_sealed_body_opens_only_whole_and_in_its_own_context() {
        let ring = ring(&[1]);
        let sealed = ring.seal(&world(), "outcome:a", b"paid output");
        assert_eq!(ring.open("outcome:a", &sealed).unwrap(), b"paid output");
        assert!(ring.open("outcome:b", &sealed).is_err(), "another row");
        for i in 0..sealed.len() {
            let mut altered = sealed.clone();
            altered[i] ^= 1;
            assert!(ring.open("outcome:a", &altered).is_err(), "byte {i}");
            assert!(ring.open("outcome:a", &sealed[..i]).is_err(), "cut at {i}");
        }
        assert_ne!(sealed, ring.seal(&world(), "outcome:a", b"paid output"), "nonces are not repeated");
    }

    #[test]
    fn a_new_key_in_front_keeps_the_old_bodies_and_tokens_alive_until_the_old_key_goes() {
        let (old, both, new) = (ring(&[1]), ring(&[2, 1]), ring(&[2]));
        let sealed = old.seal(&world(), "c", b"x");
        let tag = old.sign("session", b"m");
        assert!(both.open("c", &sealed).is_ok() && both.verify("session", b"m", &tag));
        assert!(new.open("c", &sealed).is_err() && !new.verify("session", b"m", &tag));
        assert!(new.open("c", &both.seal(&world(), "c", b"x")).is_ok(), "the newest key seals");
        assert!(new.verify("session", b"m", &both.sign("session", b"m")), "the newest key signs");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rotation_over_replicas_drops_nothing_that_one_of_them_signed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ring");
        let write = |keys: &[u8]| {
            let text: Vec<String> = keys.iter().map(|b| hex::encode([*b; 32])).collect();
            fs::write(&path, text.join("\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
        };
        write(&[1]);
        let (a, b) = (KeyRing::load(&path).unwrap(), KeyRing::load(&path).unwrap());
        let shared = a.clone();
        assert!(!a.reload().unwrap(), "nothing has changed");
        let old = a.sign("session", b"m");
        // A has read the new file, B not yet: what A signs and seals must be good at B.
        write(&[2, 1]);
        assert!(a.reload().unwrap());
        let between = a.sign("session", b"m");
        assert!(b.verify("session", b"m", &between) && b.open("c", &a.seal(&world(), "c", b"x")).is_ok());
        assert!(a.verify("session", b"m", &ring(&[2]).sign("session", b"m")), "the new key verifies at once");
        assert!(b.reload().unwrap());
        tokio::time::sleep(SIGN_AFTER).await;
        let new = shared.sign("session", b"m");
        assert!(new != old && ring(&[2]).verify("session", b"m", &new), "then it signs, in every clone");
        assert!(b.verify("session", b"m", &new) && b.verify("session", b"m", &old));
        // A file that is being written, or that others may read, changes nothing.
        fs::write(&path, "0badc0de").unwrap();
        assert!(a.reload().is_err() && a.verify("session", b"m", &new) && a.verify("session", b"m", &old));
        // A ring without the key that signed cannot wait.
        write(&[3]);
        assert!(a.reload().unwrap());
        assert!(ring(&[3]).verify("session", b"m", &a.sign("session", b"m")) && !a.verify("session", b"m", &old));
        assert!(!ring(&[1]).reload().unwrap(), "no file, no reload");
    }

    #[test]
    fn a_tag_holds_for_its_purpose_and_message_only() {
        let ring = ring(&[1]);
        let tag = ring.sign("session", b"m");
        assert!(ring.verify("session", b"m", &tag));
        assert!(!ring.verify("relay", b"m", &tag));
        assert!(!ring.verify("session", b"n", &tag));
        assert!(!ring.verify("session", b"m", &tag[..31]));
        assert!(!ring.verify("session", b"m", b""));
    }

    #[test]
    fn keys_are_read_from_hex_and_base64_and_refused_when_short_or_unreadable() {
        let hex = "ab".repeat(32);
        let base64 = STANDARD_NO_PAD.encode([0xfbu8; 32]);
        let url = URL_SAFE_NO_PAD.encode([0xfbu8; 32]);
        let ring = KeyRing::parse(&format!("{hex}, {base64}=\n")).unwrap();
        assert!(ring.verify("p", b"m", &KeyRing::parse(&url).unwrap().sign("p", b"m")));
        assert!(ring.verify("p", b"m", &KeyRing::new(vec![vec![0xab; 32]]).unwrap().sign("p", b"m")));
        assert!(matches!(KeyRing::parse(""), Err(SealError::KeyCount)));
        assert!(matches!(KeyRing::parse(&"ab".repeat(31)), Err(SealError::KeyTooShort)));
        assert!(matches!(KeyRing::parse(&format!("{hex},***")), Err(SealError::KeyText(2))));
        assert!(!format!("{:?}", KeyRing::parse(&hex)).contains("ab"), "no key in Debug");
    }

    #[test]
    fn the_key_file_is_made_once_private_and_refused_when_others_may_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state/ring");
        let first = KeyRing::load_or_create(&world(), &path).unwrap();
        let second = KeyRing::load_or_create(&world(), &path).unwrap();
        assert!(second.verify("p", b"m", &first.sign("p", b"m")), "the same key for every process");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");

        for mode in [0o640, 0o604, 0o620] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = KeyRing::load_or_create(&world(), &path).unwrap_err();
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
        assert!(KeyRing::load(&path).is_ok(), "a mounted secret is readable by its group");
        assert!(KeyRing::load(directory.path()).is_err(), "a directory is no key file");
    }
}
