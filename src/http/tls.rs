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
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if let Some(pem) = extra_ca_pem {
        let mut found = false;
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|_| "the CA file is no valid PEM".to_owned())?;
            roots.add(certificate).map_err(|_| "the CA file holds a certificate that cannot be read".to_owned())?;
            found = true;
        }
        if !found {
            return Err("the CA file holds no certificate".into());
        }
    }
    if roots.is_empty() {
        tracing::warn!("this machine has no trust roots: every TLS connection will be refused");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("TLS cannot be set up: {e}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Tls::Rustls(TlsConnector::from(Arc::new(config))))
}
