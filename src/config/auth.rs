//! Who may ask over HTTP: `http.api_keys_*` and the section `auth`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use url::Url;

use super::value::{is_loopback, millis, secret_env};
use super::{ConfigError, Source, Transport, file, refuse};
use crate::mcp::StaticKeys;
use crate::mcp::auth::{JwtSettings, Resource, algorithm};

/// About ten thousand keys.
pub const MAX_KEYS_BYTES: usize = 1 << 20;
const DEFAULT_ALGORITHMS: [&str; 5] = ["RS256", "PS256", "ES256", "ES384", "EdDSA"];

/// Everybody may ask where there is no method.
#[derive(Debug, Clone, Default)]
pub struct Auth {
    pub keys: Option<StaticKeys>,
    /// Where the keys came from, when it was a file.
    pub keys_file: Option<KeysFile>,
    pub jwt: Option<JwtSettings>,
    pub kubernetes: Option<KubernetesSettings>,
    pub resource: Resource,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeysFile {
    pub path: PathBuf,
    /// Between two looks at it.
    pub every: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesSettings {
    /// One of them must be among the token's.
    pub audiences: Vec<String>,
    /// `None`: the cluster that this process runs in, with its own service account.
    pub api_server: Option<ApiServer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiServer {
    pub url: Url,
    /// PEM, read again about once a minute.
    pub ca_file: Option<PathBuf>,
    /// With the token that this process shows, read again once a minute.
    pub token_file: Option<PathBuf>,
}

impl Auth {
    pub fn is_on(&self) -> bool {
        self.keys.is_some() || self.jwt.is_some() || self.kubernetes.is_some()
    }
}

/// The way out where a caller has to be known.
pub(super) const FIXES: &str = "MCP_SERVER_API_KEYS, http.api_keys_file, auth.jwt or auth.kubernetes";

pub(super) fn auth(
    http: &file::Http,
    auth: file::Auth,
    transport: Transport,
    allow_insecure_local: bool,
    source: &dyn Source,
) -> Result<Auth, ConfigError> {
    let jwt = auth.jwt.map(|file| jwt(file, allow_insecure_local)).transpose()?;
    let kubernetes = auth.kubernetes.map(kubernetes).transpose()?;
    let authorization_servers = match (auth.authorization_servers, &jwt) {
        (Some(servers), _) => servers,
        (None, Some(jwt)) if Url::parse(&jwt.issuer).is_ok_and(|url| url.has_host()) => vec![jwt.issuer.clone()],
        (None, _) => Vec::new(),
    };
    for server in &authorization_servers {
        https("auth.authorization_servers", server, true)?;
    }
    // RFC 6749 section 3.3.
    let plain = |scope: &String| {
        !scope.is_empty()
            && scope.len() <= 128
            && scope.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\')
    };
    if let Some(scope) = auth.scopes.iter().find(|scope| !plain(scope)) {
        return refuse("auth.scopes", format!("{scope:?} is no scope: write words without spaces or quotes"));
    }
    let public_url = http.public_url.as_deref().map(public_url).transpose()?;
    let every = millis("http.api_keys_reload_ms", http.api_keys_reload_ms, 5_000, 100, 600_000)?;
    // On stdio who may ask is another process's business, and no key is read.
    if transport == Transport::Stdio {
        return Ok(Auth::default());
    }
    let (keys, keys_file) = keys(http, every, source)?;
    let resource = Resource { public_url, authorization_servers, scopes: auth.scopes };
    Ok(Auth { keys, keys_file, jwt, kubernetes, resource })
}

fn keys(
    http: &file::Http,
    every: Duration,
    source: &dyn Source,
) -> Result<(Option<StaticKeys>, Option<KeysFile>), ConfigError> {
    let name = http.api_keys_env.as_deref().unwrap_or("MCP_SERVER_API_KEYS");
    let from_env = secret_env(name, source);
    let Some(path) = &http.api_keys_file else {
        if from_env.is_none() && http.api_keys_env.is_some() {
            let fix = "set it (name:secret, 32 bytes or more), or remove the line where everybody may connect";
            return refuse("http.api_keys_env", format!("the environment variable {name} is not set: {fix}"));
        }
        let parse = |keys: super::Secret| {
            StaticKeys::parse(keys.expose()).or_else(|e| refuse("http.api_keys_env", format!("{name}: {e}")))
        };
        return Ok((from_env.map(parse).transpose()?, None));
    };
    if http.api_keys_env.is_some() {
        return refuse("http", "has both api_keys_env and api_keys_file: write one of them");
    }
    if from_env.is_some() {
        return refuse("http.api_keys_file", format!("is written, and {name} is set too: use one of them"));
    }
    let path = PathBuf::from(path);
    let keys = read_keys(&path, source).or_else(|problem| refuse("http.api_keys_file", problem))?;
    Ok((Some(keys), Some(KeysFile { path, every })))
}

/// `Err` is a sentence without a secret.
fn read_keys(path: &Path, source: &dyn Source) -> Result<StaticKeys, String> {
    let text = source.keys_file(path).map_err(|error| error.to_string())?;
    parse_keys(&text).map_err(|problem| format!("{}: {problem}", path.display()))
}

pub fn parse_keys(text: &str) -> Result<StaticKeys, String> {
    if text.len() > MAX_KEYS_BYTES {
        return Err(format!("it is larger than {MAX_KEYS_BYTES} bytes"));
    }
    StaticKeys::parse(text).map_err(|error| error.to_string())
}

fn jwt(file: file::Jwt, allow_insecure_local: bool) -> Result<JwtSettings, ConfigError> {
    let field = |member: &str| format!("auth.jwt.{member}");
    let word = |member: &str, value: Option<String>, default: &str| {
        let value = value.unwrap_or_else(|| default.to_owned());
        let fits = (1..=512).contains(&value.len()) && !value.chars().any(char::is_control);
        if fits { Ok(value) } else { refuse(field(member), "is empty, too long or has control characters") }
    };
    let audiences = audiences(&field("audiences"), file.audiences)?;
    let algorithms = match file.algorithms {
        None => DEFAULT_ALGORITHMS.map(str::to_owned).to_vec(),
        Some(named) => named,
    };
    if let Some(unknown) = algorithms.iter().find(|name| algorithm(name).is_none()) {
        let problem = format!(
            "{unknown:?} is not accepted: write public-key algorithms (RS256, RS384, RS512, PS256, PS384, PS512, ES256, \
             ES384, EdDSA); a token is never believed without a signature, or by a shared secret"
        );
        return refuse(field("algorithms"), problem);
    }
    if algorithms.is_empty() {
        return refuse(field("algorithms"), "is empty, so no token would be accepted: remove the line, or name some");
    }
    let leeway = match file.leeway_seconds.unwrap_or(30) {
        seconds if seconds <= 300 => Duration::from_secs(seconds),
        seconds => return refuse(field("leeway_seconds"), format!("{seconds} is not between 0 and 300")),
    };
    let agent_prefix = file.agent_prefix.unwrap_or_else(|| "jwt:".into());
    if agent_prefix.len() > 64 || !agent_prefix.bytes().all(|b| b.is_ascii_graphic()) {
        let problem = "is longer than 64 characters, or has others than printable ASCII without spaces";
        return refuse(field("agent_prefix"), problem);
    }
    Ok(JwtSettings {
        issuer: word("issuer", Some(file.issuer), "")?,
        audiences,
        jwks_url: https(&field("jwks_url"), &file.jwks_url, allow_insecure_local)?,
        algorithms,
        leeway,
        typ: file.typ.map(|typ| word("typ", Some(typ), "")).transpose()?,
        identity_claim: word("identity_claim", file.identity_claim, "sub")?,
        agent_prefix,
        session_claim: word("session_claim", file.session_claim, "session")?,
        limits_claim: word("limits_claim", file.limits_claim, "tollway_limits")?,
    })
}

fn kubernetes(file: file::Kubernetes) -> Result<KubernetesSettings, ConfigError> {
    let audiences = audiences("auth.kubernetes.audiences", file.audiences)?;
    let api_server = match file.api_server {
        None if file.ca_file.is_some() || file.token_file.is_some() => {
            let problem = "is missing, but ca_file or token_file is written: write it, or remove them to use the cluster \
                           that this process runs in";
            return refuse("auth.kubernetes.api_server", problem);
        }
        None => None,
        Some(url) => Some(ApiServer {
            url: https("auth.kubernetes.api_server", &url, false)?,
            ca_file: file.ca_file.map(PathBuf::from),
            token_file: file.token_file.map(PathBuf::from),
        }),
    };
    Ok(KubernetesSettings { audiences, api_server })
}

/// Without one, a token that was made for any other service would be good here.
fn audiences(field: &str, audiences: Vec<String>) -> Result<Vec<String>, ConfigError> {
    let fits = |one: &String| (1..=512).contains(&one.len()) && !one.chars().any(char::is_control);
    if audiences.is_empty() || !audiences.iter().all(fits) {
        let problem =
            "is empty: name what tokens for this server are made for, such as https://tollway.example.com/mcp";
        return refuse(field, problem);
    }
    Ok(audiences)
}

/// Over plain HTTP anybody in between could make tokens. A query is part of some issuers' URLs.
fn https(field: &str, text: &str, plain: bool) -> Result<Url, ConfigError> {
    let url = Url::parse(text).or_else(|e| refuse(field, format!("is not a URL ({e}): write https://host/path")))?;
    let scheme = match url.scheme() {
        "https" => true,
        "http" => plain || is_loopback(&url),
        _ => false,
    };
    if !scheme || !url.has_host() {
        return refuse(
            field,
            format!("{} is not HTTPS: only a server on loopback may be plain", super::value::host(&url)),
        );
    }
    if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() {
        return refuse(field, "has credentials or a fragment: write https://host/path");
    }
    Ok(url)
}

/// Scheme and host, as an origin is written.
fn public_url(text: &str) -> Result<String, ConfigError> {
    let url = https("http.public_url", text, true)?;
    if url.path() != "/" || url.query().is_some() {
        return refuse(
            "http.public_url",
            "has a path: write scheme and host alone, such as https://tollway.example.com",
        );
    }
    Ok(url.origin().ascii_serialization())
}
