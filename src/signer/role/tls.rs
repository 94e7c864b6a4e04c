//! The signer's side of TLS (1.2 and 1.3): a certificate of its own, made once and pinned by its clients, or files that
//! somebody else renews; client certificates where a file of authorities is named. Files are looked at again and again,
//! and what is broken never replaces what works.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};

use crate::http::TlsListener;
use crate::ports::{Listener, World};
use crate::seal::{SealError, read_private, write_private};

/// A chain with its intermediates is a few kilobytes; a file of authorities may be larger.
const MAX_FILE: usize = 1 << 20;
const CERTIFICATE: &str = "signer.crt.pem";
const KEY: &str = "signer.key.pem";

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error(transparent)]
    Key(#[from] SealError),
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    #[error("{0} holds no certificate (PEM)")]
    NoCertificate(PathBuf),
    #[error("{0} holds no private key (PEM: PKCS#8, PKCS#1 or SEC1)")]
    NoKey(PathBuf),
    #[error("no certificate could be made: {0}")]
    Made(#[from] rcgen::Error),
    /// Wrong key for the certificate, a certificate that cannot be read, and so on.
    #[error("TLS cannot be set up: {0}")]
    Setup(String),
}

/// Whose certificate is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Certificate {
    /// Made at the first start in this directory, for these names, and kept.
    Own { directory: PathBuf, names: Vec<String> },
    /// Looked at again and again.
    Files { certificate: PathBuf, key: PathBuf },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    pub certificate: Certificate,
    /// Authorities (PEM): a client without a certificate of one of them gets no further than the handshake.
    pub client_ca: Option<PathBuf>,
}

/// What the files held when they were last good.
#[derive(Clone)]
pub struct Loaded {
    config: Arc<ServerConfig>,
    /// SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` shows it.
    pub fingerprint: String,
    /// Of all files: whether there is anything new.
    digest: [u8; 32],
}

impl Source {
    /// Where the certificate is that clients trust.
    pub fn certificate_file(&self) -> PathBuf {
        match &self.certificate {
            Certificate::Own { directory, .. } => directory.join(CERTIFICATE),
            Certificate::Files { certificate, .. } => certificate.clone(),
        }
    }

    fn key_file(&self) -> PathBuf {
        match &self.certificate {
            Certificate::Own { directory, .. } => directory.join(KEY),
            Certificate::Files { key, .. } => key.clone(),
        }
    }

    /// Makes the own certificate where there is none: the key first, so that a stop in between leaves a key whose
    /// certificate is made at the next start. A certificate without its key is never replaced.
    pub fn make(&self, world: &World) -> Result<(), TlsError> {
        let Certificate::Own { names, .. } = &self.certificate else { return Ok(()) };
        let (certificate, key) = (self.certificate_file(), self.key_file());
        if certificate.exists() {
            return Ok(());
        }
        let there = |result: io::Result<()>, path: &Path| match result {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(TlsError::File(path.to_owned(), error)),
            _ => Ok(()),
        };
        there(write_private(world, &key, &KeyPair::generate()?.serialize_pem()), &key)?;
        let pair = KeyPair::from_pem(&read_private(&key, 0o027, MAX_FILE)?)?;
        let mut params = CertificateParams::new(names.clone())?;
        params.distinguished_name.push(DnType::CommonName, "Tollway signer");
        // It is its own trust root, and signs no other.
        params.is_ca = IsCa::ExplicitNoCa;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        there(write_private(world, &certificate, &params.self_signed(&pair)?.pem()), &certificate)
    }

    pub fn load(&self) -> Result<Loaded, TlsError> {
        let (certificate, key) = (self.certificate_file(), self.key_file());
        let chain_pem = read(&certificate)?;
        let key_pem = read_private(&key, 0o027, MAX_FILE)?;
        let client_pem = self.client_ca.as_deref().map(read).transpose()?;
        let mut digest = Sha256::new();
        for part in [&chain_pem[..], key_pem.as_bytes(), client_pem.as_deref().unwrap_or_default()] {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let chain = certificates(&chain_pem, &certificate)?;
        let fingerprint = chain.first().map(|leaf| fingerprint(leaf)).unwrap_or_default();
        let key_der = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(|_| TlsError::NoKey(key.clone()))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let setup = |error: rustls::Error| TlsError::Setup(error.to_string());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(setup)?;
        let builder = match (&self.client_ca, client_pem) {
            (Some(path), Some(pem)) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(&pem, path)? {
                    roots.add(authority).map_err(setup)?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|e| TlsError::Setup(e.to_string()))?)
            }
            _ => builder.with_no_client_auth(),
        };
        // Refuses a key that is not the certificate's.
        let mut config = builder.with_single_cert(chain, key_der).map_err(setup)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Loaded { config: Arc::new(config), fingerprint, digest: digest.finalize().into() })
    }
}

/// What connections are accepted with; replaced while they come.
#[derive(Clone)]
pub struct Current(Arc<Mutex<Loaded>>);

impl Current {
    pub fn new(loaded: Loaded) -> Current {
        Current(Arc::new(Mutex::new(loaded)))
    }

    fn get(&self) -> Loaded {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn fingerprint(&self) -> String {
        self.get().fingerprint
    }

    /// Whether there was something new. Connections that are open keep what they began with.
    pub fn reload(&self, source: &Source) -> Result<bool, TlsError> {
        let loaded = source.load()?;
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = current.digest != loaded.digest;
        if new {
            *current = loaded;
        }
        Ok(new)
    }

    pub fn listener<L: Listener>(&self, inner: L) -> impl Listener + use<L> {
        let current = self.clone();
        TlsListener::new(inner, move || current.get().config)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |error| TlsError::File(path.to_owned(), error);
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(failed)?;
    io::Read::read_to_end(&mut io::Read::take(file, MAX_FILE as u64), &mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn certificates(pem: &[u8], path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let none = || TlsError::NoCertificate(path.to_owned());
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.ok().filter(|all| !all.is_empty()).ok_or_else(none)
}

fn fingerprint(certificate: &[u8]) -> String {
    let pairs: Vec<String> = Sha256::digest(certificate).iter().map(|byte| format!("{byte:02X}")).collect();
    pairs.join(":")
}

/// The names of an own certificate where the configuration gives none.
pub fn default_names(bind: IpAddr) -> Vec<String> {
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    if !bind.is_unspecified() && !bind.is_loopback() {
        names.push(bind.to_string());
    }
    names
}
