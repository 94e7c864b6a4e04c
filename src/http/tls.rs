//! The trust roots.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio_rustls::TlsConnector;

use super::Tls;

/// The system's trust roots, plus the operator's CA file (PEM) where one is configured. Certificates are always
/// verified, against the host's name.
///
/// A CA file without a certificate is refused. A machine without any roots is not: every TLS connection then fails.
pub fn tls(extra_ca_pem: Option<&[u8]>) -> Result<Tls, String> {
    let mut roots = system_roots();
    if let Some(pem) = extra_ca_pem {
        add(&mut roots, pem)?;
    }
    let mut config = client_config(roots)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Tls::Rustls(TlsConnector::from(Arc::new(config))))
}

/// For the database's server: the operator's CA alone where one is configured, else the system's trust roots.
#[cfg(feature = "postgres")]
pub(crate) fn database_tls(ca_pem: Option<&[u8]>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match ca_pem {
        Some(pem) => add(&mut roots, pem)?,
        None => roots = system_roots(),
    }
    let mut config = client_config(roots)?;
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(config)
}

fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn add(roots: &mut RootCertStore, pem: &[u8]) -> Result<(), String> {
    let mut found = false;
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|_| "the CA file is no valid PEM".to_owned())?;
        roots.add(certificate).map_err(|_| "the CA file holds a certificate that cannot be read".to_owned())?;
        found = true;
    }
    if found { Ok(()) } else { Err("the CA file holds no certificate".into()) }
}

fn client_config(roots: RootCertStore) -> Result<ClientConfig, String> {
    if roots.is_empty() {
        tracing::warn!("this machine has no trust roots: every TLS connection will be refused");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("TLS cannot be set up: {e}"))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}
