//! The YAML file as it is written. Nothing is decided here: `config` turns it into parsed types.
//! Unknown fields and repeated keys are refused by the reader.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub facilitator: Option<Facilitator>,
    /// `stdio` or `streamable-http`: what `tollway check` checks for. `serve` and `stdio` know their own.
    pub transport: Option<String>,
    #[serde(default)]
    pub http: Http,
    pub probe: Option<Probe>,
    #[serde(default)]
    pub auth: Auth,
    #[serde(default)]
    pub signer: Signer,
    #[serde(default)]
    pub networks: BTreeMap<String, Network>,
    #[serde(default)]
    pub keys: Keys,
    #[serde(default)]
    pub stdio: Stdio,
    #[serde(default)]
    pub budget: Budget,
    #[serde(default)]
    pub network_security: NetworkSecurity,
    #[serde(default)]
    pub sweep: Sweep,
    #[serde(default)]
    pub policy: Policy,
    #[serde(default)]
    pub reload: Reload,
    pub gate: Option<Gate>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facilitator {
    pub base_url: String,
    pub request_timeout_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    pub bind: Option<String>,
    pub port: Option<u16>,
    pub api_keys_env: Option<String>,
    pub api_keys_file: Option<String>,
    pub api_keys_reload_ms: Option<u64>,
    pub public_url: Option<String>,
    pub rate_limit: Option<RateLimit>,
    #[serde(default)]
    pub allowed_hosts: Vec<String>,
    #[serde(default)]
    pub allowed_origins: Vec<String>,
    pub max_body_bytes: Option<usize>,
    pub max_concurrent_requests: Option<usize>,
    pub max_connections: Option<usize>,
    pub max_connections_per_source: Option<usize>,
    #[serde(default)]
    pub trusted_proxies: Vec<String>,
    pub idle_timeout_ms: Option<u64>,
    pub write_timeout_ms: Option<u64>,
    pub drain_ms: Option<u64>,
    pub unready_wait_ms: Option<u64>,
    pub legacy_sse: Option<bool>,
    pub relay_port: Option<u16>,
    pub advertise: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    pub requests_per_second: u32,
    pub burst: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Auth {
    pub jwt: Option<Jwt>,
    pub kubernetes: Option<Kubernetes>,
    pub authorization_servers: Option<Vec<String>>,
    #[serde(default)]
    pub scopes: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Jwt {
    pub issuer: String,
    pub audiences: Vec<String>,
    pub jwks_url: String,
    pub algorithms: Option<Vec<String>>,
    pub leeway_seconds: Option<u64>,
    pub typ: Option<String>,
    pub identity_claim: Option<String>,
    pub agent_prefix: Option<String>,
    pub session_claim: Option<String>,
    pub limits_claim: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kubernetes {
    pub audiences: Vec<String>,
    pub api_server: Option<String>,
    pub ca_file: Option<String>,
    pub token_file: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    pub bind: Option<String>,
    pub port: Option<u16>,
    pub interval_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signer {
    pub mode: Option<String>,
    pub secret_env: Option<String>,
    pub base_url: Option<String>,
    pub auth_header_env: Option<String>,
    pub client_certificate_file: Option<String>,
    pub client_key_file: Option<String>,
    pub keystore_path: Option<String>,
    pub encryption_key_env: Option<String>,
    pub sign_within_ms: Option<u64>,
    pub smart_account_ceiling_atomic: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    pub enabled: Option<bool>,
    #[serde(default)]
    pub rpc_urls: Vec<String>,
    pub passphrase: Option<String>,
    pub credentials: Option<String>,
    pub max_authorization_seconds: Option<u64>,
    pub min_ledger_seconds: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    pub ring_env: Option<String>,
    pub ring_file: Option<String>,
    pub sign_after_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stdio {
    pub agent: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    pub store: Option<String>,
    pub path: Option<String>,
    pub database_url_env: Option<String>,
    pub ca_file: Option<String>,
    pub pooler: Option<String>,
    pub schema: Option<String>,
    pub default_per_call_max_atomic: Option<String>,
    pub default_session_or_day_max_atomic: Option<String>,
    /// Of the list of limits.
    pub limits_version: Option<u64>,
    #[serde(default)]
    pub limits: Vec<Limit>,
    #[serde(default)]
    pub total: Vec<Total>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    pub agent: Option<String>,
    pub network: String,
    pub asset: String,
    pub per_call_max_atomic: Option<String>,
    pub session_max_atomic: Option<String>,
    pub day_max_atomic: Option<String>,
    #[serde(default)]
    pub unlimited: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Total {
    pub network: String,
    pub asset: String,
    pub day_max_atomic: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    #[serde(default)]
    pub allow_origins: Vec<String>,
    #[serde(default)]
    pub deny_origins: Vec<String>,
    #[serde(default)]
    pub allow_recipients: Vec<String>,
    #[serde(default)]
    pub deny_recipients: Vec<String>,
    #[serde(default)]
    pub allow_assets: Vec<Asset>,
    #[serde(default)]
    pub deny_assets: Vec<Asset>,
    pub pin_recipients: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asset {
    pub network: String,
    pub asset: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reload {
    pub interval_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    pub interval_ms: Option<u64>,
    pub rpc_per_second: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSecurity {
    #[serde(default)]
    pub allow_insecure_local: bool,
    pub max_response_bytes: Option<usize>,
    pub timeout_ms: Option<u64>,
    pub paid_call_timeout_ms: Option<u64>,
    pub max_redirects: Option<usize>,
    pub max_concurrent_connections: Option<usize>,
    pub ca_file: Option<String>,
    #[serde(default)]
    pub resolved_mcp_endpoints: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    pub upstream: Option<GateUpstream>,
    pub facilitator: Option<GateFacilitator>,
    /// By network, where one is settled by another than the rest.
    #[serde(default)]
    pub facilitators: BTreeMap<String, GateFacilitator>,
    /// What an item costs that is listed nowhere: `free` or `deny`.
    pub default: Option<String>,
    #[serde(default)]
    pub exempt_methods: Vec<String>,
    /// By network: `operator`, where an unknown settlement is a person's to resolve.
    #[serde(default)]
    pub unknown: BTreeMap<String, String>,
    #[serde(default)]
    pub assets: Vec<GateAsset>,
    #[serde(default)]
    pub defaults: GateItem,
    #[serde(default)]
    pub free: GateFree,
    #[serde(default)]
    pub tools: BTreeMap<String, GateItem>,
    #[serde(default)]
    pub resources: BTreeMap<String, GateItem>,
    #[serde(default)]
    pub prompts: BTreeMap<String, GateItem>,
    #[serde(default)]
    pub response_cache: GateResponseCache,
    pub lease_ms: Option<u64>,
    #[serde(default)]
    pub junk: GateJunk,
    pub hooks: Option<super::gate_hooks::File>,
}

/// `url` or `command`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateUpstream {
    pub url: Option<String>,
    pub auth_header_env: Option<String>,
    #[serde(default)]
    pub forward_headers: Vec<String>,
    pub timeout_ms: Option<u64>,
    pub command: Option<Vec<String>>,
    #[serde(default)]
    pub pass_env: Vec<String>,
    pub stateless: Option<bool>,
    pub max_processes: Option<usize>,
    pub idle_timeout_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateFacilitator {
    pub base_url: String,
    pub auth_header_env: Option<String>,
    pub timeout_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateAsset {
    pub network: String,
    pub asset: String,
    pub symbol: String,
    pub decimals: u8,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateFree {
    #[serde(default)]
    pub tools: Vec<String>,
    #[serde(default)]
    pub resources: Vec<String>,
    #[serde(default)]
    pub prompts: Vec<String>,
}

/// An item, or what all items have unless they say otherwise.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateItem {
    pub price: Option<String>,
    pub amount_atomic: Option<String>,
    pub scheme: Option<String>,
    pub network: Option<String>,
    pub asset: Option<String>,
    pub pay_to: Option<String>,
    pub max_timeout_seconds: Option<u64>,
    pub extra: Option<serde_json::Map<String, serde_json::Value>>,
    pub offers: Option<Vec<GateOffer>>,
    pub flow: Option<String>,
    pub url: Option<String>,
    pub description: Option<String>,
    pub mime_type: Option<String>,
    pub service_name: Option<String>,
    pub tags: Option<Vec<String>>,
    pub icon_url: Option<String>,
    pub payment_identifier: Option<String>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateOffer {
    pub price: Option<String>,
    pub amount_atomic: Option<String>,
    pub scheme: Option<String>,
    pub network: Option<String>,
    pub asset: Option<String>,
    pub pay_to: Option<String>,
    pub max_timeout_seconds: Option<u64>,
    pub extra: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateJunk {
    pub per_second: Option<u32>,
    pub burst: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateResponseCache {
    pub ttl_seconds: Option<u64>,
    pub max_bytes: Option<usize>,
}
