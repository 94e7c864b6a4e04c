//! The keystore file of `signer.mode: encrypted-key`: one Ed25519 seed under AES-256-GCM, beside the address that it
//! pays from. The 32-byte key comes from the environment, so that neither the file nor the environment alone is money.
//!
//! ```json
//! {"version": 1, "algorithm": "AES-256-GCM", "address": "G…", "nonce": "<12 bytes, base64>", "ciphertext": "<48 bytes, base64>"}
//! ```
//!
//! The ciphertext is the 32-byte seed and its tag; authenticated beside it is
//! `tollway keystore\0` version `\0` algorithm `\0` address. No error says anything of seed or key.

use std::fmt;
use std::io;
use std::path::Path;

use aws_lc_rs::aead;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use ed25519_dalek::SigningKey;
use serde::{Deserialize, Serialize};
use stellar_strkey::Strkey;
use stellar_strkey::ed25519::{PrivateKey, PublicKey};
use zeroize::Zeroizing;

use crate::json;
use crate::ports::World;
use crate::seal::{self, SealError};

const VERSION: u64 = 1;
const ALGORITHM: &str = "AES-256-GCM";
/// A keystore is some 250 bytes.
const FILE: json::Limits = json::Limits { bytes: 4 * 1024, depth: 1 };

#[derive(Debug, thiserror::Error)]
pub enum KeystoreError {
    #[error(transparent)]
    File(#[from] SealError),
    #[error("the keystore {0}")]
    Json(#[from] json::JsonError),
    #[error("the keystore needs exactly the members version, algorithm, address, nonce and ciphertext")]
    Members,
    #[error("the keystore has version {0}; this program reads version {VERSION}")]
    Version(u64),
    #[error("the keystore's algorithm is not {ALGORITHM}")]
    Algorithm,
    #[error("the keystore's address is a smart account (C…), which has no key of its own: use signer.mode external")]
    SmartAccount,
    #[error("the keystore's address is not a Stellar account (G…)")]
    Address,
    #[error("the keystore's {0} is not base64 of {1} bytes")]
    Bytes(&'static str, usize),
    #[error("the key does not open the keystore, or the file was altered")]
    Open,
    #[error("the keystore's seed is not that of its address")]
    OtherSeed,
}

/// What went wrong with a key or a seed as text; never the text.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error("is not 32 bytes as 64 hex digits or as base64 (openssl rand -hex 32)")]
    Key,
    #[error("is not a Stellar secret seed (S…, 56 characters)")]
    Seed,
}

/// An Ed25519 seed. Wiped when dropped; Debug says nothing of it.
#[derive(Clone)]
pub struct Seed(Zeroizing<[u8; 32]>);

impl Seed {
    /// `S…`
    pub fn parse(text: &str) -> Result<Seed, SecretError> {
        let seed = PrivateKey::from_string(text.trim()).map_err(|_| SecretError::Seed)?;
        Ok(Seed(Zeroizing::new(seed.0)))
    }

    pub fn generate(world: &World) -> Seed {
        Seed(Zeroizing::new(world.random()))
    }

    /// `G…`
    pub fn address(&self) -> String {
        PublicKey(self.key().verifying_key().to_bytes()).to_string().as_str().to_owned()
    }

    pub(super) fn key(&self) -> SigningKey {
        SigningKey::from_bytes(&self.0)
    }
}

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(seed)")
    }
}

/// The key that opens a keystore.
pub struct KeystoreKey(Zeroizing<[u8; 32]>);

impl KeystoreKey {
    /// 64 hex digits, or base64 of 32 bytes in either alphabet, padded or not.
    pub fn parse(text: &str) -> Result<KeystoreKey, SecretError> {
        let text = text.trim();
        let bytes = if text.bytes().all(|b| b.is_ascii_hexdigit()) {
            hex::decode(text).ok()
        } else {
            let bare = text.trim_end_matches('=');
            STANDARD_NO_PAD.decode(bare).or_else(|_| URL_SAFE_NO_PAD.decode(bare)).ok()
        };
        let bytes = Zeroizing::new(bytes.ok_or(SecretError::Key)?);
        let key: [u8; 32] = bytes.as_slice().try_into().map_err(|_| SecretError::Key)?;
        Ok(KeystoreKey(Zeroizing::new(key)))
    }

    /// One byte over and over: nobody drew that at random.
    pub fn is_one_byte(&self) -> bool {
        self.0.iter().all(|byte| *byte == self.0[0])
    }

    fn aead(&self) -> aead::LessSafeKey {
        aead::LessSafeKey::new(aead::UnboundKey::new(&aead::AES_256_GCM, &*self.0).expect("AES-256 takes 32 bytes"))
    }
}

/// A keystore file, read but not opened: it shows its address and nothing else.
#[derive(Clone)]
pub struct Keystore {
    address: String,
    nonce: [u8; aead::NONCE_LEN],
    ciphertext: [u8; 48],
}

impl fmt::Debug for Keystore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keystore({})", self.address)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    version: u64,
    algorithm: String,
    address: String,
    nonce: String,
    ciphertext: String,
}

impl Keystore {
    pub fn seal(world: &World, seed: &Seed, key: &KeystoreKey) -> Keystore {
        let address = seed.address();
        let nonce: [u8; aead::NONCE_LEN] = world.random();
        let mut body = Zeroizing::new(seed.0.to_vec());
        let tag = key
            .aead()
            .seal_in_place_separate_tag(aead::Nonce::assume_unique_for_key(nonce), aad(&address), &mut body)
            .expect("AES-GCM seals 32 bytes");
        let mut ciphertext = [0; 48];
        ciphertext[..32].copy_from_slice(&body);
        ciphertext[32..].copy_from_slice(tag.as_ref());
        Keystore { address, nonce, ciphertext }
    }

    /// The group may read the file (a mounted secret), others nothing.
    pub fn read(path: &Path) -> Result<Keystore, KeystoreError> {
        Keystore::parse(&seal::read_private(path, 0o027, FILE.bytes)?)
    }

    /// A new file of mode 0600; one that exists stays as it is (`ErrorKind::AlreadyExists`).
    pub fn write(&self, world: &World, path: &Path) -> io::Result<()> {
        let written = Written {
            version: VERSION,
            algorithm: ALGORITHM.into(),
            address: self.address.clone(),
            nonce: STANDARD.encode(self.nonce),
            ciphertext: STANDARD.encode(self.ciphertext),
        };
        let mut text = serde_json::to_string_pretty(&written).map_err(io::Error::other)?;
        text.push('\n');
        seal::write_private(world, path, &text)
    }

    pub fn parse(text: &str) -> Result<Keystore, KeystoreError> {
        let raw = json::check(text.as_bytes(), FILE)?;
        // The version first: another one may have other members.
        if let Some(version) = json::member(raw, "version").and_then(|v| v.get().parse().ok())
            && version != VERSION
        {
            return Err(KeystoreError::Version(version));
        }
        let written: Written = serde_json::from_str(raw.get()).map_err(|_| KeystoreError::Members)?;
        if written.algorithm != ALGORITHM {
            return Err(KeystoreError::Algorithm);
        }
        match Strkey::from_string(&written.address) {
            Ok(Strkey::PublicKeyEd25519(_)) => {}
            Ok(Strkey::Contract(_)) => return Err(KeystoreError::SmartAccount),
            _ => return Err(KeystoreError::Address),
        }
        Ok(Keystore {
            nonce: bytes("nonce", &written.nonce)?,
            ciphertext: bytes("ciphertext", &written.ciphertext)?,
            address: written.address,
        })
    }

    /// `G…`; proven only by [`Keystore::open`].
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn open(&self, key: &KeystoreKey) -> Result<Seed, KeystoreError> {
        let nonce = aead::Nonce::assume_unique_for_key(self.nonce);
        let mut body = Zeroizing::new(self.ciphertext.to_vec());
        let plain = key.aead().open_in_place(nonce, aad(&self.address), &mut body).map_err(|_| KeystoreError::Open)?;
        let mut seed = Zeroizing::new([0; 32]);
        seed.copy_from_slice(plain);
        let seed = Seed(seed);
        if seed.address() == self.address { Ok(seed) } else { Err(KeystoreError::OtherSeed) }
    }
}

fn aad(address: &str) -> aead::Aad<String> {
    aead::Aad::from(format!("tollway keystore\0{VERSION}\0{ALGORITHM}\0{address}"))
}

fn bytes<const N: usize>(member: &'static str, text: &str) -> Result<[u8; N], KeystoreError> {
    let decoded = STANDARD.decode(text).ok().and_then(|bytes| bytes.try_into().ok());
    decoded.ok_or(KeystoreError::Bytes(member, N))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const SEED: &str = "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X";

    fn world() -> World {
        crate::ports::machine::world().0
    }

    fn key(byte: u8) -> KeystoreKey {
        KeystoreKey::parse(&hex::encode([byte; 32])).unwrap()
    }

    fn text(world: &World) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keystore.json");
        Keystore::seal(world, &Seed::parse(SEED).unwrap(), &key(1)).write(world, &path).unwrap();
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_keystore_opens_with_its_key_only_and_shows_its_address_without_one() {
        let world = world();
        let text = text(&world);
        let keystore = Keystore::parse(&text).unwrap();
        let seed = Seed::parse(SEED).unwrap();
        assert_eq!(keystore.address(), seed.address());
        assert_eq!(keystore.open(&key(1)).unwrap().key().to_bytes(), [7; 32]);
        let error = keystore.open(&key(2)).unwrap_err().to_string();
        assert!(error.contains("does not open"), "{error}");
        assert!(!text.contains(SEED) && !text.contains(&hex::encode([7; 32])));
        assert!(!text.contains(&STANDARD.encode([7; 32])));
        assert_ne!(text, self::text(&world), "nonces are not repeated");
        assert_eq!(format!("{seed:?} {keystore:?}"), format!("(seed) Keystore({})", seed.address()));
    }

    /// Made by another program after the description at the top of this file.
    #[test]
    fn the_format_is_the_one_that_is_written_down() {
        let text = r#"{"version": 1, "algorithm": "AES-256-GCM",
            "address": "GDVEU3DD4KOFECV66VIHWEZOYX4ZKR3WV27L464SIIPOU2IUI3JCZA57", "nonce": "CQkJCQkJCQkJCQkJ",
            "ciphertext": "wwggyck3AcZ4U01IqdqCEJ7Aef0zmDPhMF83TulQ+PrYLY4yjBfd3agWQB5CdA/i"}"#;
        assert_eq!(Keystore::parse(text).unwrap().open(&key(1)).unwrap().key().to_bytes(), [7; 32]);
    }

    #[test]
    fn whatever_is_altered_in_the_file_is_refused() {
        let text = text(&world());
        let other = Seed::generate(&world()).address();
        let good: serde_json::Value = serde_json::from_str(&text).unwrap();
        let with = |member: &str, value: serde_json::Value| {
            let mut altered = good.clone();
            altered[member] = value;
            altered.to_string()
        };
        let flipped = |member: &str| {
            let mut bytes = STANDARD.decode(good[member].as_str().unwrap()).unwrap();
            bytes[5] ^= 1;
            with(member, STANDARD.encode(bytes).into())
        };
        let contract = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
        let twice = text.replacen('{', &format!("{{\"address\": \"{other}\","), 1);
        for (what, altered, word) in [
            ("another address", with("address", other.clone().into()), "does not open"),
            ("nonce", flipped("nonce"), "does not open"),
            ("ciphertext", flipped("ciphertext"), "does not open"),
            ("a short ciphertext", with("ciphertext", STANDARD.encode([0; 47]).into()), "48 bytes"),
            ("a long nonce", with("nonce", STANDARD.encode([0; 13]).into()), "12 bytes"),
            ("no base64", with("nonce", "***".into()), "12 bytes"),
            ("version", with("version", 2.into()), "version 2"),
            ("version as text", with("version", "1".into()), "members"),
            ("algorithm", with("algorithm", "none".into()), "AES-256-GCM"),
            ("smart account", with("address", contract.into()), "smart account"),
            ("no address", with("address", "GABC".into()), "not a Stellar account"),
            ("a seed for an address", with("address", SEED.into()), "not a Stellar account"),
            ("unknown member", with("comment", "x".into()), "members"),
            ("twice", twice, "twice"),
            ("nothing", String::new(), "JSON"),
            ("no object", "[]".into(), "members"),
            ("too large", " ".repeat(5_000) + &text, "larger"),
            ("too deep", with("address", serde_json::json!([[1]])), "deeper"),
        ] {
            let error = Keystore::parse(&altered).and_then(|keystore| keystore.open(&key(1))).unwrap_err().to_string();
            assert!(error.contains(word), "{what}: {error}");
            assert!(!error.contains(SEED) && error.lines().count() == 1, "{what}: {error}");
        }
    }

    #[test]
    fn a_key_is_32_bytes_in_hex_or_base64_and_never_quoted() {
        let bytes = [0xfb; 32];
        let spellings = [hex::encode(bytes), hex::encode_upper(bytes), STANDARD.encode(bytes)];
        for text in spellings.into_iter().chain([URL_SAFE_NO_PAD.encode(bytes), format!(" {}\n", hex::encode(bytes))]) {
            assert_eq!(*KeystoreKey::parse(&text).unwrap().0, bytes);
        }
        for bad in ["", "0badc0de", &"0badc0de".repeat(9), &STANDARD.encode([1; 31]), "passw0rd!", &"é".repeat(32)] {
            let error = KeystoreKey::parse(bad).err().unwrap().to_string();
            assert!(error.contains("openssl rand -hex 32") && !error.contains("0badc0de"), "{error}");
        }
        assert!(!Seed::parse("SADQOBYHA4").unwrap_err().to_string().contains("SADQ"));
    }

    #[test]
    fn the_file_is_made_private_and_once_and_refused_when_others_may_read_it() {
        let world = world();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets/keystore.json");
        let keystore = Keystore::seal(&world, &Seed::parse(SEED).unwrap(), &key(1));
        keystore.write(&world, &path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let before = fs::read(&path).unwrap();
        let again = Keystore::seal(&world, &Seed::generate(&world), &key(1)).write(&world, &path);
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");

        for mode in [0o604, 0o620, 0o644, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = Keystore::read(&path).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
        assert!(Keystore::read(&path).is_ok(), "a mounted secret is readable by its group");
        assert!(Keystore::read(directory.path()).is_err(), "a directory is no keystore");
        let missing = Keystore::read(&directory.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("none"), "{missing}");
    }
}
