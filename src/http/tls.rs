//! Whom a connection trusts, and with which certificate it names itself.

use std::sync::Arc;

use rustls::client::WantsClientCert;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsConnector;

use super::Tls;

/// The system's trust roots, plus the operator's CA file (PEM) where one is configured. Certificates are always
/// verified, against the host's name.
///
/// A CA file without a certificate is refused. A machine without any roots is not: every TLS connection then fails.
pub fn tls(extra_ca_pem: Option<&[u8]>) -> Result<Tls, String> {
    http(client_config(roots_with(extra_ca_pem)?)?.with_no_client_auth())
}

/// As [`tls`], and the server that asks for it is shown this certificate (PEM: the chain, leaf first; the key as PKCS#8,
/// PKCS#1 or SEC1). Refused: a file without what it should hold, and a key that is not the certificate's.
pub fn tls_as(extra_ca_pem: Option<&[u8]>, chain_pem: &[u8], key_pem: &[u8]) -> Result<Tls, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain_pem).collect();
    let chain = chain.map_err(|_| "the certificate's file is no valid PEM")?;
    if chain.is_empty() {
        return Err("the certificate's file holds no certificate (PEM)".into());
    }
    let key = PrivateKeyDer::from_pem_slice(key_pem)
        .map_err(|_| "the key's file holds no private key (PEM: PKCS#8, PKCS#1 or SEC1)")?;
    let builder = client_config(roots_with(extra_ca_pem)?)?;
    http(builder.with_client_auth_cert(chain, key).map_err(|e| format!("certificate and key: {e}"))?)
}

fn http(mut config: ClientConfig) -> Result<Tls, String> {
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
    let mut config = client_config(roots)?.with_no_client_auth();
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(config)
}

fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn roots_with(extra_ca_pem: Option<&[u8]>) -> Result<RootCertStore, String> {
    let mut roots = system_roots();
    if let Some(pem) = extra_ca_pem {
        add(&mut roots, pem)?;
    }
    Ok(roots)
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

fn client_config(roots: RootCertStore) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, String> {
    if roots.is_empty() {
        tracing::warn!("this machine has no trust roots: every TLS connection will be refused");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("TLS cannot be set up: {e}"))?
        .with_root_certificates(roots))
}
