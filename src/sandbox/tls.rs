//! HTTPS for the local nodes: the official Stellar client speaks to nothing else. The authority and its certificate
//! are made at start, live in memory, and are good for this machine's loopback names only.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::http::TlsListener;
use crate::ports::Listener;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("no certificate could be made: {0}")]
    Certificate(#[from] rcgen::Error),
    #[error("TLS cannot be set up: {0}")]
    Setup(#[from] rustls::Error),
}

/// An authority of one certificate, for `localhost`, `127.0.0.1` and `::1`.
pub struct Authority {
    config: Arc<ServerConfig>,
    ca_pem: String,
}

impl Authority {
    pub fn new() -> Result<Authority, TlsError> {
        let mut ca = CertificateParams::default();
        ca.distinguished_name.push(DnType::CommonName, "Tollway sandbox");
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca_key = KeyPair::generate()?;
        let ca_certificate = ca.self_signed(&ca_key)?;
        let mut leaf = CertificateParams::new(["localhost", "127.0.0.1", "::1"].map(String::from))?;
        leaf.distinguished_name.push(DnType::CommonName, "localhost");
        let key = KeyPair::generate()?;
        let certificate = leaf.signed_by(&key, &Issuer::new(ca, ca_key))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            )?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Authority { config: Arc::new(config), ca_pem: ca_certificate.pem() })
    }

    /// What a client must trust (`NODE_EXTRA_CA_CERTS`).
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    pub fn listener<L: Listener>(&self, inner: L) -> impl Listener + use<L> {
        let config = self.config.clone();
        TlsListener::new(inner, move || config.clone())
    }
}
