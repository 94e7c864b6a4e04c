//! Who is let in, and that broken files never replace what works.

use std::os::unix::fs::PermissionsExt as _;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use super::*;

pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

pub fn authority() -> Authority {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let pem = params.self_signed(&key).unwrap().pem();
    Authority { pem, issuer: Issuer::new(params, key) }
}

impl Authority {
    /// Certificate and key, PEM.
    pub fn leaf(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (leaf.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

pub fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// A client that trusts `ca`, with a certificate of its own where one is given.
fn client(world: &World, ca: &str, identity: Option<&(String, String)>) -> Client {
    let tls = match identity {
        None => http::tls(Some(ca.as_bytes())),
        Some((certificate, key)) => http::tls_as(Some(ca.as_bytes()), certificate.as_bytes(), key.as_bytes()),
    };
    let tls = tls.unwrap();
    Client::new(world.clone(), tls, Destination::Operator, http::Limits::default())
}

#[tokio::test]
async fn its_own_certificate_is_made_once_and_is_all_that_a_client_has_to_trust() {
    let dir = tempfile::tempdir().unwrap();
    let first = Stand::start(&file(dir.path()), &environment(), 1).await;
    let made = std::fs::read_to_string(dir.path().join("signer.crt.pem")).unwrap();
    let key = std::fs::metadata(dir.path().join("signer.key.pem")).unwrap().permissions().mode() & 0o777;
    assert_eq!(key, 0o600);
    let address = |url: &str| format!("{url}/address?network=stellar%3Atestnet");
    let (status, answer) = get(&first.client(), &address(&first.urls[0]), Some(SECRET)).await.unwrap();
    assert_eq!((status, answer), (200, json!({"address": own()}).to_string()));
    for (query, secret, status) in
        [("stellar%3Atestnet", None, 401), ("stellar%3Apubnet", Some(SECRET), 403), ("", Some(SECRET), 403)]
    {
        let url = format!("{}/address?network={query}", first.urls[0]);
        assert_eq!(get(&first.client(), &url, secret).await.unwrap().0, status, "{query}");
    }
    // Nobody who does not trust it, and nobody in plain text.
    let stranger = client(&first.world, &authority().pem, None);
    assert!(get(&stranger, &address(&first.urls[0]), Some(SECRET)).await.is_err());
    let plain = first.urls[0].replace("https:", "http:");
    assert!(get(&first.client(), &address(&plain), Some(SECRET)).await.is_err());
    drop(first);

    let second = Stand::start(&file(dir.path()), &environment(), 1).await;
    assert_eq!(std::fs::read_to_string(dir.path().join("signer.crt.pem")).unwrap(), made, "kept");
    assert_eq!(get(&second.client(), &address(&second.urls[0]), Some(SECRET)).await.unwrap().0, 200);
}

#[tokio::test]
async fn renewed_files_are_taken_and_broken_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (authority(), authority());
    let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let put = |(c, k): &(String, String)| {
        write(&certificate, c);
        write(&key, k);
    };
    put(&old.leaf());
    let bearer = dir.path().join("bearer-keys");
    write(&bearer, &format!("serve:{SECRET}\n"));
    let mut file = file(dir.path());
    file["tls"] = json!({"certificate_file": certificate, "key_file": key, "reload_ms": 50});
    file["bearer_keys"] = json!({"file": bearer, "max_requests_per_second": 10_000});
    let stand = Stand::start(&file, &environment(), 1).await;
    let url = format!("{}/address?network=stellar%3Atestnet", stand.urls[0]);
    // Each look is a connection of its own.
    let seen = async |authority: &Authority, secret: &str| {
        let answer = get(&client(&stand.world, &authority.pem, None), &url, Some(secret)).await;
        answer.map(|(status, _)| status)
    };
    assert_eq!(seen(&old, SECRET).await, Ok(200));

    // A certificate without its key, then nothing that could be one.
    for broken in [(new.leaf().0, old.leaf().1), ("x".to_owned(), "x".to_owned())] {
        put(&broken);
        write(&bearer, "serve:short");
        let failed = || async { reloads("tls", "failed") > 0 && reloads("bearer_keys", "failed") > 0 };
        until("the broken files are seen", failed).await;
        assert_eq!(seen(&old, SECRET).await, Ok(200), "the old ones stay in use");
    }
    put(&new.leaf());
    until("the new certificate", || async { seen(&new, SECRET).await == Ok(200) }).await;
    assert!(seen(&old, SECRET).await.is_err());

    // Rotation: both secrets are good, then the new one alone.
    let fresh = "fedcba9876543210fedcba9876543210";
    write(&bearer, &format!("serve:{fresh}\nserve:{SECRET}\n"));
    until("the second secret", || async { seen(&new, fresh).await == Ok(200) }).await;
    assert_eq!(seen(&new, SECRET).await, Ok(200));
    write(&bearer, &format!("serve:{fresh}\n"));
    until("the first secret is gone", || async { seen(&new, SECRET).await == Ok(401) }).await;
    assert_eq!(seen(&new, fresh).await, Ok(200));
}

/// Of this whole process: other tests may add to it, and only a zero proves something.
fn reloads(what: &str, result: &str) -> u64 {
    let text = tollway::telemetry::signer_text().unwrap();
    let name = format!("tollway_signer_reloads_total{{result=\"{result}\",what=\"{what}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn where_client_certificates_are_asked_for_a_bearer_key_alone_opens_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (server, clients, strangers) = (authority(), authority(), authority());
    let (certificate, key, ca) = (dir.path().join("c"), dir.path().join("k"), dir.path().join("ca"));
    let leaf = server.leaf();
    write(&certificate, &leaf.0);
    write(&key, &leaf.1);
    write(&ca, &clients.pem);
    let mut file = file(dir.path());
    file["tls"] = json!({"certificate_file": certificate, "key_file": key, "client_ca_file": ca});
    let stand = Stand::start(&file, &environment(), 1).await;
    let url = format!("{}/address?network=stellar%3Atestnet", stand.urls[0]);
    for (identity, secret, expected) in [
        (None, Some(SECRET), None),
        (Some(strangers.leaf()), Some(SECRET), None),
        (Some(clients.leaf()), Some(SECRET), Some(200)),
        (Some(clients.leaf()), None, Some(401)),
    ] {
        let client = client(&stand.world, &server.pem, identity.as_ref());
        let answer = get(&client, &url, secret).await;
        assert_eq!(answer.as_ref().ok().map(|(status, _)| *status), expected, "{answer:?}");
    }
}
