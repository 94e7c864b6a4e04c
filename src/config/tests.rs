//! What is refused, and in which words.

use super::*;
use crate::ledger::Database;
use crate::ledger::postgres::Pooler;

pub(super) struct Fake(BTreeMap<&'static str, &'static str>);
impl Source for Fake {
    fn env(&self, name: &str) -> Option<String> {
        self.0.get(name).map(|v| (*v).to_owned())
    }
    fn read(&self, path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
        match self.0.get(path.to_str().unwrap()) {
            Some(text) => Ok(Zeroizing::new(text.as_bytes().to_vec())),
            None => Err(std::io::ErrorKind::NotFound.into()),
        }
    }
    fn keys_file(&self, path: &Path) -> Result<Zeroizing<String>, SealError> {
        let found = self.0.get(path.to_str().unwrap());
        let missing = || SealError::File(path.to_owned(), std::io::ErrorKind::NotFound.into());
        found.map(|text| Zeroizing::new((*text).to_owned())).ok_or_else(missing)
    }
    fn keystore(&self, path: &Path) -> Result<Keystore, KeystoreError> {
        Keystore::parse(self.0.get(path.to_str().unwrap()).copied().unwrap_or_default())
    }
}
pub(super) fn source(pairs: &[(&'static str, &'static str)]) -> Fake {
    let mut all: BTreeMap<_, _> = pairs.iter().copied().collect();
    all.entry("HOME").or_insert("/home/a");
    Fake(all)
}
const KEYS: (&str, &str) = ("MCP_SERVER_API_KEYS", "a:0123456789abcdef0123456789abcdef");
const CATALOG: &str = "facilitator: {base_url: 'https://c.example'}\n";

#[test]
fn the_default_is_local_discovery_and_reads_no_key() {
    let config = load(None, None, &source(&[("STELLAR_SECRET_KEY", "S-should-not-be-read")])).unwrap();
    assert!(!config.signer.can_pay());
    assert_eq!(config.transport, Transport::Stdio);
    assert_eq!(config.store, Store::Sqlite("/home/a/.local/state/tollway/ledger.sqlite".into()));
    assert!(config.limits.is_empty());
    assert_eq!(config.stdio_agent.as_str(), "local");
}

#[test]
fn the_sweep_asks_as_often_and_as_fast_as_is_written() {
    let read = |text: String| parse(&text, None, &source(&[])).unwrap().sweep;
    let sweep = read(CATALOG.to_owned());
    assert_eq!((sweep.interval, sweep.rpc_per_second), (Duration::from_secs(10), 20));
    let sweep = read(format!("{CATALOG}sweep: {{interval_ms: 1000, rpc_per_second: 3}}\n"));
    assert_eq!((sweep.interval, sweep.rpc_per_second), (Duration::from_secs(1), 3));
}

#[test]
fn every_profile_is_valid_as_written() {
    let env = [
        ("STELLAR_SECRET_KEY", "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X"),
        ("MCP_SIGNER_AUTH_HEADER", "Bearer x"),
        ("TOLLWAY_KEY_RING", "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f"),
        KEYS,
    ];
    let database = ("DATABASE_URL", "postgresql://tollway@db.example/tollway");
    for (name, text) in profiles::ALL {
        let pairs: Vec<_> = env.iter().copied().chain((name == "paying-cluster").then_some(database)).collect();
        let env = source(&pairs);
        let config = parse(text, None, &env).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(config.signer.can_pay(), name.starts_with("paying"), "{name}");
        assert_eq!(config.limits.len(), usize::from(name.starts_with("paying")), "{name}");
    }
}

#[test]
fn each_refusal_names_the_field_and_the_way_out() {
    let paying = "signer: {mode: external, base_url: 'https://s.example'}\n";
    let certificate = "client_certificate_file: /c, client_key_file: /k";
    let pubnet = "networks: {'stellar:pubnet': {enabled: true, rpc_urls: ['https://r.example']}}\n";
    let remote = Some(Transport::Remote);
    let legacy = |more: &str| format!("{CATALOG}http: {{legacy_sse: true, {more}}}\n");
    let cases: Vec<(String, Option<Transport>, &str, &str)> = vec![
        ("{}".into(), None, "facilitator.base_url", "is missing"),
        (format!("{CATALOG}budgte: {{}}\n"), None, "budgte", "not a field"),
        (format!("{CATALOG}{CATALOG}"), None, "facilitator", "stands twice"),
        (format!("{CATALOG}transport: carrier-pigeon\n"), None, "transport", "carrier-pigeon"),
        (format!("{CATALOG}signer: {{mode: env-secret}}\n"), remote, "signer.mode", "stdio only"),
        (format!("{CATALOG}signer: {{mode: env-secret}}\n"), None, "signer.secret_env", "STELLAR_SECRET_KEY"),
        (format!("{CATALOG}signer: {{mode: encrypted-key}}\n"), None, "signer.keystore_path", "keystore create"),
        (
            format!("{CATALOG}signer: {{mode: encrypted-key, keystore_path: /k}}\n"),
            None,
            "signer.encryption_key_env",
            "TOLLWAY_KEYSTORE_KEY is not set",
        ),
        (format!("{CATALOG}signer: {{mode: hardware}}\n"), None, "signer.mode", "encrypted-key"),
        (format!("{CATALOG}signer: {{mode: none, base_url: 'https://s'}}\n"), None, "signer.base_url", "belongs"),
        (
            format!("{CATALOG}signer: {{mode: external, base_url: 'http://s.example'}}\n"),
            None,
            "signer.base_url",
            "HTTPS",
        ),
        (
            format!("{CATALOG}signer: {{mode: external, base_url: 'https://s.example', client_key_file: /k}}\n"),
            None,
            "signer.client_certificate_file",
            "is missing",
        ),
        (
            format!("{CATALOG}signer: {{mode: external, base_url: 'http://127.0.0.1:1', {certificate}}}\n"),
            None,
            "signer.client_certificate_file",
            "not HTTPS",
        ),
        (
            format!("{CATALOG}signer: {{mode: external, base_url: 'https://s.example', {certificate}}}\n"),
            None,
            "signer.client_certificate_file",
            "/c cannot be read",
        ),
        (format!("{CATALOG}signer: {{mode: none, client_key_file: /k}}\n"), None, "signer.client_key_file", "belongs"),
        (
            format!("{CATALOG}http: {{trusted_proxies: ['10.0.0.1', lb]}}\n"),
            None,
            "http.trusted_proxies[1]",
            "10.0.0.0/8",
        ),
        (format!("{CATALOG}{paying}"), remote, "http.api_keys_env", "MCP_SERVER_API_KEYS"),
        (format!("{CATALOG}{pubnet}"), None, "networks.stellar:pubnet.enabled", "signer.mode is none"),
        (format!("{CATALOG}networks: {{base: {{}}}}\n"), None, "networks", "CAIP-2"),
        (
            format!("{CATALOG}networks: {{'stellar:pubnet': {{min_ledger_seconds: 1}}}}\n"),
            None,
            "networks.stellar:pubnet.min_ledger_seconds",
            "below 4",
        ),
        (
            format!("{CATALOG}networks: {{'stellar:local': {{}}}}\n"),
            None,
            "networks.stellar:local.passphrase",
            "missing",
        ),
        (format!("{CATALOG}probe: {{bind: everywhere}}\n"), None, "probe.bind", "not an IP address"),
        (format!("{CATALOG}probe: {{port: 4522}}\n"), None, "probe.port", "is http.port"),
        (format!("{CATALOG}probe: {{interval_ms: 10}}\n"), None, "probe.interval_ms", "between"),
        (format!("{CATALOG}http: {{unready_wait_ms: 700000}}\n"), None, "http.unready_wait_ms", "between"),
        (format!("{CATALOG}sweep: {{rpc_per_second: 0}}\n"), None, "sweep.rpc_per_second", "between 1 and 1000"),
        (format!("{CATALOG}sweep: {{rpc_per_second: 1001}}\n"), None, "sweep.rpc_per_second", "between 1 and 1000"),
        (format!("{CATALOG}sweep: {{interval_ms: 10}}\n"), None, "sweep.interval_ms", "between"),
        (format!("{CATALOG}budget: {{store: memory}}\n"), None, "budget.store", "sqlite"),
        (
            format!("{CATALOG}{paying}budget: {{store: postgres}}\n"),
            None,
            "budget.database_url_env",
            "DATABASE_URL is not set",
        ),
        (format!("{CATALOG}budget: {{store: postgres, path: /l}}\n"), None, "budget.path", "belongs"),
        (format!("{CATALOG}budget: {{ca_file: /ca.pem}}\n"), None, "budget.ca_file", "belongs"),
        (format!("{CATALOG}budget: {{path: ledger.db}}\n"), None, "budget.path", "relative"),
        (
            format!(
                "{CATALOG}budget: {{default_per_call_max_atomic: '1e6', default_session_or_day_max_atomic: '1'}}\n"
            ),
            None,
            "budget.default_per_call_max_atomic",
            "1e6",
        ),
        (
            format!("{CATALOG}budget: {{default_per_call_max_atomic: '1'}}\n"),
            None,
            "budget.default_session_or_day_max_atomic",
            "is missing",
        ),
        (
            format!(
                "{CATALOG}networks: {{'stellar:local': {{passphrase: x}}}}\n\
                 budget: {{default_per_call_max_atomic: '1', default_session_or_day_max_atomic: '1'}}\n"
            ),
            None,
            "budget.default_per_call_max_atomic",
            "budget.limits entry",
        ),
        (
            format!("{CATALOG}budget: {{limits: [{{network: 'stellar:testnet', asset: C1}}]}}\n"),
            None,
            "budget.limits[0]",
            "no figure",
        ),
        (
            format!("{CATALOG}network_security: {{resolved_mcp_endpoints: {{'mcp://tool/x': 'http://x.example'}}}}\n"),
            None,
            "network_security.resolved_mcp_endpoints.mcp://tool/x",
            "HTTPS",
        ),
        (
            format!(
                "{CATALOG}network_security: {{resolved_mcp_endpoints: {{'mcp://tool/x': 'https://10.0.0.1/mcp'}}}}\n"
            ),
            None,
            "network_security.resolved_mcp_endpoints.mcp://tool/x",
            "address_private",
        ),
        (format!("{CATALOG}network_security: {{max_redirects: 11}}\n"), None, "network_security.max_redirects", "11"),
        ("facilitator: {base_url: 'https://u:p@c.example'}\n".into(), None, "facilitator.base_url", "credentials"),
        (format!("{CATALOG}transport: sse\n"), None, "transport", "http.legacy_sse: true"),
        (format!("{CATALOG}http: {{advertise: 10.0.0.7}}\n"), None, "http.advertise", "belongs"),
        (format!("{CATALOG}http: {{legacy_sse: false, relay_port: 4523}}\n"), None, "http.relay_port", "belongs"),
        (format!("{CATALOG}http: {{legacy_sse: true, relay_port: 5}}\n"), None, "http.relay_port", "POD_IP"),
        (legacy("advertise: 10.0.0.7, relay_port: 4522"), None, "http.relay_port", "4522"),
        (legacy("advertise: 10.0.0.7, relay_port: 0"), None, "http.relay_port", "0"),
        (format!("{}probe: {{port: 4523}}\n", legacy("advertise: 10.0.0.7")), None, "http.relay_port", "probe.port"),
        (legacy("advertise: replica.example"), None, "http.advertise", "10.0.0.7:4523"),
        (legacy("advertise: 0.0.0.0"), None, "http.advertise", "10.0.0.7"),
        (legacy("advertise: '10.0.0.7:0'"), None, "http.advertise", "10.0.0.7"),
        (format!("{CATALOG}signer: {{keystore_path: /k}}\n"), None, "signer.keystore_path", "belongs"),
        (format!("{CATALOG}signer: {{encryption_key_env: K}}\n"), None, "signer.encryption_key_env", "belongs"),
        (format!("{CATALOG}http: {{api_keys_env: KEYS}}\n"), remote, "http.api_keys_env", "KEYS is not set"),
        (
            format!("{CATALOG}http: {{allowed_hosts: ['https://c.example']}}\n"),
            None,
            "http.allowed_hosts",
            "name that clients use",
        ),
        (
            format!("{CATALOG}http: {{allowed_origins: [app.example]}}\n"),
            None,
            "http.allowed_origins",
            "scheme and host",
        ),
        (format!("{CATALOG}keys: {{ring_env: RING}}\n"), None, "keys.ring_env", "RING is not set"),
        (format!("{CATALOG}keys: {{ring_file: /no/ring}}\n"), None, "keys.ring_file", "/no/ring"),
        (
            format!("{CATALOG}{paying}budget: {{database_url_env: DB}}\n"),
            None,
            "budget.database_url_env",
            "DB is not set",
        ),
    ];
    for (text, transport, field, word) in cases {
        let error = match parse(&text, transport, &source(&[])) {
            Err(error) => error,
            Ok(_) => panic!("accepted: {text}"),
        };
        assert_eq!(error.field, field, "{text}\n{error}");
        assert!(error.to_string().contains(word), "{text}\n{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    }
}

/// The key is 32 times 0x01, the seed 32 times 0x07.
const KEYSTORE: &str = r#"{"version": 1, "algorithm": "AES-256-GCM",
    "address": "GDVEU3DD4KOFECV66VIHWEZOYX4ZKR3WV27L464SIIPOU2IUI3JCZA57", "nonce": "CQkJCQkJCQkJCQkJ",
    "ciphertext": "wwggyck3AcZ4U01IqdqCEJ7Aef0zmDPhMF83TulQ+PrYLY4yjBfd3agWQB5CdA/i"}"#;

#[test]
fn a_keystore_is_opened_at_the_start_on_both_transports_and_its_secrets_never_show() {
    let key = "0101010101010101010101010101010101010101010101010101010101010101";
    let text = format!("{CATALOG}signer: {{mode: encrypted-key, keystore_path: /k.json, encryption_key_env: K}}\n");
    for transport in [Transport::Stdio, Transport::Remote] {
        let config = parse(&text, Some(transport), &source(&[("/k.json", KEYSTORE), ("K", key), KEYS])).unwrap();
        let SignerMode::EncryptedKey { path, seed } = &config.signer else { panic!("{:?}", config.signer) };
        assert_eq!(path, Path::new("/k.json"));
        assert!(KEYSTORE.contains(&seed.address()));
        assert!(!format!("{config:?}").contains(key));
    }
    let without_keys = parse(&text, Some(Transport::Remote), &source(&[("/k.json", KEYSTORE), ("K", key)]));
    assert_eq!(without_keys.unwrap_err().field, "http.api_keys_env");
    let other = "02".repeat(32);
    let other: &'static str = other.leak();
    for (file, key, field, word) in [
        (KEYSTORE, other, "signer.keystore_path", "/k.json: the key does not open"),
        (KEYSTORE, "0badc0de", "signer.encryption_key_env", "openssl rand -hex 32"),
        ("{}", key, "signer.keystore_path", "members"),
    ] {
        let error = parse(&text, None, &source(&[("/k.json", file), ("K", key)])).unwrap_err();
        assert_eq!(error.field, field, "{error}");
        assert!(error.problem.contains(word) && !error.problem.contains(key), "{error}");
    }
}

#[test]
fn only_an_external_signer_has_a_smart_accounts_ceiling() {
    let ceiling = "smart_account_ceiling_atomic: '5'";
    let external = format!("{CATALOG}signer: {{mode: external, base_url: 'https://s.example', {ceiling}}}\n");
    let config = parse(&external, None, &source(&[])).unwrap();
    assert_eq!(config.smart_account_ceiling, Some(Amount::from_u64(5)));
    let own = format!("{CATALOG}signer: {{mode: env-secret, {ceiling}}}\n");
    let seed = ("STELLAR_SECRET_KEY", "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X");
    let error = parse(&own, None, &source(&[seed])).unwrap_err();
    assert_eq!(error.field, "signer.smart_account_ceiling_atomic");
    assert!(error.problem.contains("external"), "{error}");
}

#[test]
fn a_mainnet_on_a_remote_transport_needs_postgres_and_never_in_plain_text() {
    let text = format!(
        "{CATALOG}signer: {{mode: external, base_url: 'https://s.example'}}\n\
         networks: {{'stellar:pubnet': {{enabled: true, rpc_urls: ['https://r.example']}}}}\n"
    );
    let error = parse(&text, Some(Transport::Remote), &source(&[KEYS])).unwrap_err();
    assert_eq!(error.field, "networks.stellar:pubnet.enabled");
    let cluster = format!("{text}budget: {{store: postgres}}\n");
    for (url, transport, accepted) in [
        ("postgres://u:hunter2@db.example/x", Transport::Remote, true),
        ("postgres://u:hunter2@127.0.0.1/x?sslmode=disable", Transport::Remote, true),
        ("postgres://u:hunter2@db.example/x?sslmode=disable", Transport::Remote, false),
        ("postgres://u:hunter2@db.example/x?sslmode=disable", Transport::Stdio, false),
    ] {
        let parsed = parse(&cluster, Some(transport), &source(&[KEYS, ("DATABASE_URL", url)]));
        match parsed {
            Ok(config) => {
                assert!(accepted, "{url}");
                assert!(!format!("{config:?}").contains("hunter2"));
            }
            Err(error) => {
                assert!(!accepted && error.field == "networks.stellar:pubnet.enabled", "{url}: {error}");
                assert!(error.problem.contains("verify-full") && !error.problem.contains("hunter2"), "{error}");
            }
        }
    }
    let config = parse(&text, Some(Transport::Stdio), &source(&[])).unwrap();
    assert!(config.payable.contains(&"stellar:pubnet".parse().unwrap()));
}

#[test]
fn a_weak_key_or_ring_is_refused_before_anything_starts_and_never_quoted() {
    let text = format!("{CATALOG}keys: {{ring_env: RING}}\n");
    let good = "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f";
    let ring = |ring| parse(&text, None, &source(&[("RING", ring)]));
    assert!(matches!(ring(good).unwrap().key_ring, KeyRingSource::Keys(_)));
    let error = ring("0badc0de0badc0de").unwrap_err();
    assert!(error.field == "keys.ring_env" && error.problem.contains("32 bytes"), "{error}");
    assert!(!error.to_string().contains("0badc0de"), "{error}");

    let keys = |keys, transport| parse(CATALOG, Some(transport), &source(&[("MCP_SERVER_API_KEYS", keys)]));
    let error = keys("a:0badc0de", Transport::Remote).unwrap_err();
    assert!(error.field == "http.api_keys_env" && error.problem.contains("openssl"), "{error}");
    assert!(!error.to_string().contains("0badc0de"), "{error}");
    assert!(keys("a:0badc0de", Transport::Stdio).unwrap().auth.keys.is_none(), "not read on stdio");
}

#[test]
fn database_url_names_the_ledger_or_is_refused_without_its_password() {
    let paying = format!("{CATALOG}signer: {{mode: external, base_url: 'https://s.example'}}\n");
    let stored = |text: &str, pairs: &[_]| parse(text, None, &source(pairs)).map(|config| config.store);
    let sqlite = Ok(Store::Sqlite("/var/lib/l.sqlite".into()));
    assert_eq!(stored(&paying, &[("DATABASE_URL", "sqlite:///var/lib/l.sqlite")]), sqlite);
    let named = format!("{paying}budget: {{path: /elsewhere, database_url_env: DB}}\n");
    assert_eq!(stored(&named, &[("DB", "sqlite:/var/lib/l.sqlite"), ("DATABASE_URL", "mysql://x")]), sqlite);
    for url in ["postgres://u:hunter2@db/x", "sqlite::memory:", "sqlite://l.sqlite", "hunter2"] {
        let error = stored(&paying, &[("DATABASE_URL", url)]).unwrap_err();
        assert_eq!(error.field, "DATABASE_URL", "{url}");
        assert!(error.problem.contains("sqlite:///absolute/path") && !error.problem.contains("hunter2"), "{error}");
    }
    // Discovery has no ledger: another program's variable is no reason to refuse.
    assert!(stored(CATALOG, &[("DATABASE_URL", "postgres://u:hunter2@db/x")]).is_ok());
    let operator = load_store(None, &source(&[("DATABASE_URL", "postgres://u:hunter2@db/x")]));
    assert_eq!(operator.unwrap_err().field, "DATABASE_URL");

    let cluster = format!("{paying}budget: {{store: postgres}}\n");
    let database = Database::parse("postgres://u:hunter2@db/x", None).unwrap();
    let url = [("DATABASE_URL", "postgres://u:hunter2@db/x")];
    assert_eq!(stored(&cluster, &url), Ok(Store::Postgres(Box::new(database))));
    for url in ["sqlite:///var/lib/l.sqlite", "postgres://u:hunter2@db/x?sslmode=prefer", "hunter2"] {
        let error = stored(&cluster, &[("DATABASE_URL", url)]).unwrap_err();
        assert!(error.field == "DATABASE_URL" && !error.problem.contains("hunter2"), "{error}");
    }
    let named = format!("{paying}budget: {{store: postgres, database_url_env: DB}}\n");
    for (text, name, field) in
        [(&cluster, "DATABASE_URL", "budget.database_url_env"), (&named, "DB", "budget.database_url_env")]
    {
        let error = stored(text, &[(name, " ")]).unwrap_err();
        assert!(error.field == field && error.problem.contains(&format!("{name} is set, but empty")), "{error}");
    }
    let no_file = format!("{paying}budget: {{store: postgres, ca_file: /no/ca.pem}}\n");
    let error = stored(&no_file, &url).unwrap_err();
    assert!(error.field == "budget.ca_file" && error.problem.contains("PEM file"), "{error}");
    let pooled = format!("{paying}budget: {{store: postgres, pooler: transaction, schema: budget}}\n");
    let Ok(Store::Postgres(database)) = stored(&pooled, &url) else { panic!("{:?}", stored(&pooled, &url)) };
    assert_eq!((database.pooler(), database.schema()), (Pooler::Transaction, Some("budget")));
    for (member, field) in [
        ("store: postgres, pooler: session", "budget.pooler"),
        ("store: postgres, schema: Budget", "budget.schema"),
        ("pooler: transaction", "budget.pooler"),
        ("schema: budget", "budget.schema"),
    ] {
        let error = stored(&format!("{paying}budget: {{{member}}}\n"), &url).unwrap_err();
        assert_eq!(error.field, field, "{error}");
    }
    let discovery = format!("{CATALOG}budget: {{store: postgres}}\n");
    assert_eq!(stored(&discovery, &[]), Ok(Store::None), "discovery needs no database");
}

#[test]
fn a_refused_url_does_not_show_the_access_key_in_it() {
    for url in ["https://r.example/v1?key=hunter2", "https://u:hunter2@r.example", "https://r.example:x/hunter2"] {
        let text = format!("{CATALOG}networks: {{'stellar:testnet': {{rpc_urls: ['{url}']}}}}\n");
        let error = parse(&text, None, &source(&[])).unwrap_err();
        assert_eq!(error.field, "networks.stellar:testnet.rpc_urls");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }
}

#[test]
fn the_environment_overrides_url_and_port_and_no_secret_shows() {
    let env = source(&[("FACILITATOR_URL", "http://127.0.0.1:9"), ("PORT", "81"), KEYS]);
    let config = parse(CATALOG, Some(Transport::Remote), &env).unwrap();
    assert_eq!((config.catalog_url.as_str(), config.http.port), ("http://127.0.0.1:9/", 81));
    assert!(!format!("{config:?}").contains("0123456789abcdef"));
}

#[test]
fn replicas_reach_each_other_at_what_is_written_else_at_the_pods_address() {
    let read = |http: &str, env: &[(&'static str, &'static str)]| {
        let text = format!("{CATALOG}http: {{{http}}}\n");
        parse(&text, Some(Transport::Remote), &source(env)).unwrap().http.legacy_sse
    };
    let at = |at: &str, relay_port| Some(LegacySse { advertise: Some(at.parse().unwrap()), relay_port });
    let pod = ("POD_IP", "fd00::7");
    assert_eq!(read("", &[pod]), None);
    assert_eq!(read("legacy_sse: true", &[]), Some(LegacySse { advertise: None, relay_port: 4523 }));
    assert_eq!(read("legacy_sse: true", &[("POD_IP", "")]), Some(LegacySse { advertise: None, relay_port: 4523 }));
    assert_eq!(read("legacy_sse: true", &[pod]), at("[fd00::7]:4523", 4523));
    assert_eq!(read("legacy_sse: true, relay_port: 81", &[pod]), at("[fd00::7]:81", 81));
    assert_eq!(read("legacy_sse: true, advertise: 10.0.0.7", &[pod]), at("10.0.0.7:4523", 4523));
    assert_eq!(read("legacy_sse: true, advertise: '10.0.0.7:9'", &[]), at("10.0.0.7:9", 4523));
}

#[test]
fn probes_are_off_until_they_are_asked_for_and_on_loopback_until_another_address_is_written() {
    let probe = |text: &str| parse(&format!("{CATALOG}{text}"), None, &source(&[])).unwrap().probe;
    assert_eq!(probe(""), None);
    let loopback = probe("probe: {}\n").unwrap();
    assert_eq!((loopback.bind.to_string().as_str(), loopback.port), ("127.0.0.1", 9522));
    assert_eq!(probe("probe: {bind: 0.0.0.0, port: 1}\n").unwrap().port, 1);
}

#[test]
fn lists_of_whom_may_be_paid_are_read_strictly_and_what_is_refused_is_not_quoted() {
    let parsed = |policy: &str| parse(&format!("{CATALOG}policy: {policy}\n"), None, &source(&[]));
    let policy = parsed(
        "{allow_origins: ['https://*.Good.example'], deny_origins: ['https://bad.good.example:8443'], \
         allow_recipients: [GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H], \
         deny_assets: [{network: 'stellar:testnet', asset: CUSDC}], pin_recipients: enforce}",
    );
    let policy = policy.unwrap().policy;
    assert_eq!(policy.allow_origins.first().unwrap().to_string(), "https://*.good.example");
    assert_eq!((policy.deny_origins.len(), policy.allow_recipients.len(), policy.deny_assets.len()), (1, 1, 1));
    assert_eq!(policy.pin_recipients, crate::policy::Pinning::Enforce);
    assert_eq!(parsed("{}").unwrap().policy, Policy::default());
    for (text, field, word) in [
        (
            "{allow_origins: ['https://a.example', 'https://user:hunter2@b.example']}",
            "policy.allow_origins[1]",
            "https://host",
        ),
        ("{deny_origins: ['bad.example']}", "policy.deny_origins[0]", "is no origin"),
        ("{deny_origins: ['https://bad.example/mcp']}", "policy.deny_origins[0]", "nothing behind it"),
        ("{deny_recipients: [hunter2]}", "policy.deny_recipients[0]", "is no address"),
        (
            "{allow_recipients: [SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X]}",
            "policy.allow_recipients[0]",
            "G",
        ),
        ("{allow_assets: [{network: testnet, asset: C}]}", "policy.allow_assets[0].network", "CAIP-2"),
        ("{pin_recipients: 'on'}", "policy.pin_recipients", "off, warn or enforce"),
    ] {
        let error = parsed(text).unwrap_err();
        assert_eq!(error.field, field, "{error}");
        assert!(error.problem.contains(word), "{error}");
        assert!(!error.to_string().contains("hunter2") && !error.to_string().contains("SADQ"), "{error}");
    }
    let version = |text: &str| parse(&format!("{CATALOG}budget: {{limits_version: {text}}}\n"), None, &source(&[]));
    assert_eq!(version("7").unwrap().limits_version, 7);
    assert_eq!(version("0").unwrap_err().field, "budget.limits_version");
}

mod signer_role {
    use super::super::signer_role::{BearerSource, RoleStore, SignerRole, parse};
    use super::*;
    use crate::signer::keystore::{KeystoreKey, Seed};
    use crate::signer::role::policy::{LedgerSource, Recipients};
    use crate::signer::role::tls::Certificate;

    const SEED: &str = "SADQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQOBYHA4DQP54X";
    const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
    const GOOD: &str = "key: {secret_env: SEED}\n\
        tls: {directory: /tls}\n\
        bearer_keys: {env: KEYS}\n\
        database: {path: /book.sqlite}\n\
        networks: {'stellar:testnet': {rpc_urls: ['https://r.example'], assets: [{asset: ASSET, recipients: any, \
        per_signature_max_atomic: '5', day_max_atomic: '50'}]}}\n";

    fn environment() -> Fake {
        source(&[("SEED", SEED), ("KEYS", "serve:0123456789abcdef0123456789abcdef")])
    }

    fn read(text: &str) -> Result<SignerRole, ConfigError> {
        parse(&text.replace("ASSET", ASSET), &environment())
    }

    /// `GOOD` with one part of it written otherwise.
    fn with(part: &str, other: &str) -> Result<SignerRole, ConfigError> {
        assert!(GOOD.contains(part), "{part}");
        read(&GOOD.replace(part, other))
    }

    #[test]
    fn the_example_is_valid_as_written() {
        let key = "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a";
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keystore.json");
        let world = crate::ports::machine::world().0;
        let sealed = Keystore::seal(&world, &Seed::parse(SEED).unwrap(), &KeystoreKey::parse(key).unwrap());
        sealed.write(&world, &path).unwrap();
        let keystore: &'static str = std::fs::read_to_string(path).unwrap().leak();
        let env = source(&[
            ("TOLLWAY_KEYSTORE_KEY", key),
            ("/etc/tollway-signer/keystore.json", keystore),
            ("/etc/tollway-signer/bearer-keys", "serve:0123456789abcdef0123456789abcdef\n"),
        ]);
        let role = parse(profiles::SIGNER.1, &env).unwrap();
        assert_eq!(role.seed.address(), Seed::parse(SEED).unwrap().address());
        assert_eq!(role.bearer, BearerSource::File("/etc/tollway-signer/bearer-keys".into()));
        assert_eq!(role.store, RoleStore::Sqlite("/var/lib/tollway-signer/signer.sqlite".into()));
        let network = &role.policy.networks[&"stellar:testnet".parse().unwrap()];
        assert_eq!((network.ledger, network.max_ledgers_ahead), (LedgerSource::Rpc, 60));
        assert_eq!(network.assets[ASSET].recipients, Recipients::Any);
        assert!(matches!(role.tls.unwrap().certificate, Certificate::Own { .. }));
    }

    #[test]
    fn a_ledger_anchor_stands_in_for_an_rpc_and_asks_none() {
        let anchored = with("rpc_urls: ['https://r.example']", "ledger_anchor: {sequence: 7, closed_at: 9}").unwrap();
        let network = anchored.policy.networks.values().next().unwrap();
        assert_eq!(network.ledger, LedgerSource::Anchor { sequence: 7, unix_ms: 9000, ledger_ms: 4000 });
        assert!(anchored.networks.is_empty());
    }

    #[test]
    fn nothing_is_allowed_by_leaving_something_out() {
        assert!(read(GOOD).is_ok());
        let keys = "bearer_keys: {env: KEYS}";
        for (part, other, field, word) in [
            ("recipients: any, ", "", "assets[0].recipients", "missing"),
            ("recipients: any", "recipients: all", "assets[0].recipients", "unknown"),
            ("recipients: any", "recipients: []", "assets[0].recipients", "empty"),
            ("recipients: any", "recipients: [GABC]", "assets[0].recipients", "neither"),
            ("per_signature_max_atomic: '5', ", "", "per_signature_max_atomic", "unlimited: true"),
            (", day_max_atomic: '50'", "", "day_max_atomic", "unlimited: true"),
            ("day_max_atomic: '50'", "day_max_atomic: '50', unlimited: true", "unlimited", "both figures"),
            ("asset: ASSET", "asset: USDC", "assets[0].asset", "token contract"),
            ("rpc_urls: ['https://r.example'], ", "", "rpc_urls", "ledger_anchor"),
            (
                "stellar:testnet': {rpc_urls: ['https://r.example']",
                "stellar:pubnet': {ledger_anchor: {sequence: 1, closed_at: 1}",
                "rpc_urls",
                "mainnet",
            ),
            (
                "rpc_urls: ['https://r.example']",
                "max_ledgers_ahead: 0, rpc_urls: ['https://r.example']",
                "max_ledgers_ahead",
                "between",
            ),
            ("networks: {", "networks: {}\nx: {", "x", "not a field"),
            ("key: {secret_env: SEED}", "key: {}", "key", "keystore create"),
            ("key: {secret_env: SEED}", "key: {secret_env: OTHER}", "key.secret_env", "not set"),
            ("key: {secret_env: SEED}", "key: {secret_env: KEYS}", "key.secret_env", "not a Stellar secret seed"),
            (keys, "bearer_keys: {}", "bearer_keys", "name:secret"),
            (keys, "bearer_keys: {env: NONE}", "bearer_keys.env", "not set"),
            ("tls: {directory: /tls}", "tls: {directory: tls}", "tls.directory", "absolute"),
            ("tls: {directory: /tls}", "tls: {certificate_file: /c}", "tls.key_file", "missing"),
            (
                "tls: {directory: /tls}",
                "bind: 0.0.0.0\ntls: {insecure_plain_loopback: true}",
                "insecure_plain",
                "loopback",
            ),
            ("database: {path: /book.sqlite}", "database: {}", "database.path", "missing"),
            (
                "database: {path: /book.sqlite}",
                "database: {store: postgres}",
                "database.url_env",
                "SIGNER_DATABASE_URL",
            ),
        ] {
            let error = with(part, other).expect_err(other);
            assert!(error.field.contains(field), "{other}: {error}");
            assert!(error.problem.contains(word), "{other}: {error}");
        }
    }

    #[test]
    fn a_name_has_two_secrets_at_most_and_none_is_short() {
        let many = |keys: &'static str| {
            parse(&GOOD.replace("ASSET", ASSET), &source(&[("SEED", SEED), ("KEYS", keys)])).map(|_| ())
        };
        let (a, b, c) = (
            "a:0123456789abcdef0123456789abcdef",
            "a:1123456789abcdef0123456789abcdef",
            "a:2123456789abcdef0123456789abcdef",
        );
        assert!(many(format!("{a},{b}").leak()).is_ok());
        assert!(many(format!("{a},{b},{c}").leak()).unwrap_err().problem.contains("more than 2"));
        assert!(many("a:short").unwrap_err().problem.contains("32"));
    }
}
