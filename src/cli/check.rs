//! `tollway check`: what the configuration means, and with `--online` whether its parts answer.

use std::collections::BTreeSet;
use std::process::ExitCode;

use serde::Serialize;

use super::Failure;
use crate::agent::server::Server;
use crate::catalog::SearchQuery;
use crate::config::{Config, GateServer, KeyRingSource, SignerMode, Store, Transport};
use crate::ledger::{PostgresLedger, Subject};
use crate::ports::machine;

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Ask the catalog, the token issuer, every chain RPC, the signer and the ledger; nothing is paid or signed
    #[arg(long)]
    online: bool,
    /// One JSON document on standard output
    #[arg(long)]
    json: bool,
}

/// `ok`, `warning` (works, but probably not as meant) or `failed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    Warning,
    Failed,
}

#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub what: String,
    pub verdict: Verdict,
    pub detail: String,
}

pub async fn run(args: &CheckArgs, config: Config) -> Result<ExitCode, Failure> {
    let mut findings = read(&config);
    if args.online {
        online(&config, &mut findings).await;
    }
    tell(&findings, args.json)
}

/// A file that says what a gate sells.
pub async fn gate_file(args: &CheckArgs, config: &GateServer) -> Result<ExitCode, Failure> {
    gate(config, args.online, args.json).await
}

pub(super) async fn gate(config: &GateServer, online: bool, json: bool) -> Result<ExitCode, Failure> {
    let mut findings = super::check_gate::read(config);
    if online {
        super::check_gate::online(config, &mut findings).await;
    }
    tell(&findings, json)
}

fn tell(findings: &[Finding], json: bool) -> Result<ExitCode, Failure> {
    let failed = findings.iter().any(|f| f.verdict == Verdict::Failed);
    if json {
        let document = serde_json::json!({"ok": !failed, "findings": findings});
        say!("{document}");
    } else {
        for Finding { what, verdict, detail } in findings {
            let mark = match verdict {
                Verdict::Ok => "ok     ",
                Verdict::Warning => "warning",
                Verdict::Failed => "FAILED ",
            };
            say!("{mark}  {what}: {detail}");
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

/// What the file says, in words. It was parsed, so nothing here fails.
fn read(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut say = |what: &str, verdict, detail: String| {
        findings.push(Finding { what: what.into(), verdict, detail });
    };
    let transport = match config.transport {
        Transport::Stdio => format!("stdio, as agent {}", config.stdio_agent),
        Transport::Remote => format!("HTTP on {}:{}", config.http.bind, config.http.port),
    };
    say("transport", Verdict::Ok, transport);
    say("catalog", Verdict::Ok, config.catalog_url.to_string());
    if config.transport == Transport::Remote {
        callers(config, &mut say);
        if !config.http.bind.is_loopback() && config.http.allowed_hosts.is_empty() {
            let detail = "http.allowed_hosts is empty: every request that does not name localhost is refused";
            say("hosts", Verdict::Warning, detail.into());
        }
    }
    if let (Transport::Remote, Some(legacy)) = (config.transport, config.http.legacy_sse) {
        match (legacy.advertise, &config.key_ring) {
            (None, _) => say("legacy_sse", Verdict::Ok, "/sse and /messages, for one replica".into()),
            (Some(at), KeyRingSource::Keys(_)) => {
                let detail =
                    format!("/sse and /messages; other replicas hand over to {at}, here port {}", legacy.relay_port);
                say("legacy_sse", Verdict::Ok, detail);
            }
            (Some(_), KeyRingSource::BesideLedger) => {
                let detail =
                    "neither keys.ring_env nor keys.ring_file is written: replicas refuse what others hand over";
                say("legacy_sse", Verdict::Warning, detail.into());
            }
        }
    }
    if config.security.allow_insecure_local {
        let detail = "allow_insecure_local: sellers on loopback and plain HTTP are dialled; for development only";
        say("network_security", Verdict::Warning, detail.into());
    }
    if !config.signer.can_pay() {
        say("payments", Verdict::Ok, "off: signer.mode is none".into());
        return findings;
    }
    match &config.signer {
        SignerMode::None => {}
        SignerMode::EnvSecret { .. } => say("signer", Verdict::Ok, "env-secret: the key is in this process".into()),
        SignerMode::EncryptedKey { path, seed } => {
            let detail = format!("encrypted-key: {} opens, and pays from {}", path.display(), seed.address());
            say("signer", Verdict::Ok, detail);
        }
        SignerMode::External { base_url, certificate, .. } => {
            let shown = if certificate.is_some() { ", with a client certificate" } else { "" };
            say("signer", Verdict::Ok, format!("external: {base_url}{shown}"));
        }
    }
    let networks: Vec<&str> = config.payable.iter().map(|network| network.as_str()).collect();
    if networks.is_empty() {
        say("networks", Verdict::Warning, "none is enabled, so every paid call is refused".into());
    } else {
        say("networks", Verdict::Ok, networks.join(", "));
    }
    match &config.store {
        Store::Sqlite(path) => say("ledger", Verdict::Ok, format!("SQLite, {}", path.display())),
        Store::Postgres(database) => {
            say("ledger", Verdict::Ok, format!("PostgreSQL, {}", database.shown()));
            if database.is_plain_remote() {
                let detail =
                    "the database is reached in plain text (sslmode=disable): anybody in between can change limits";
                say("ledger", Verdict::Warning, detail.into());
            }
            if matches!(config.key_ring, KeyRingSource::BesideLedger) {
                let detail =
                    "keys.ring_env is not set: nothing is stored sealed, so a lost answer cannot be asked for again";
                say("keys", Verdict::Warning, detail.into());
            }
        }
        Store::None => {}
    }
    if config.limits.is_empty() {
        let detail = "no limit in the file (budget.*): unless the ledger has one, every paid call is refused";
        say("limits", Verdict::Warning, detail.into());
    }
    for limit in &config.limits {
        let whom = match &limit.subject {
            Subject::Agent(agent) => agent.to_string(),
            Subject::EachAgent => "each agent".into(),
            Subject::Total => "all agents together".into(),
        };
        let figure = |name: &str, amount: &Option<crate::money::Amount>| {
            amount.map(|a| {
                let shown = crate::x402::assets::display(a, &limit.unit).unwrap_or_else(|| a.to_string());
                format!("{name} {shown}")
            })
        };
        let figures: Vec<String> = [
            figure("a call", &limit.per_call),
            figure("a session", &limit.per_session),
            figure("a day", &limit.per_day),
            limit.unlimited.then(|| "unlimited".to_owned()),
        ]
        .into_iter()
        .flatten()
        .collect();
        say(&format!("limit on {}", limit.unit.network), Verdict::Ok, format!("{whom}: {}", figures.join(", ")));
    }
    findings
}

fn callers(config: &Config, say: &mut dyn FnMut(&str, Verdict, String)) {
    let auth = &config.auth;
    if !auth.is_on() {
        say("callers", Verdict::Ok, "everybody: neither keys nor tokens are configured".into());
    }
    if let Some(keys) = &auth.keys {
        let names: BTreeSet<&str> = keys.names().map(|name| name.as_str()).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        let from = auth.keys_file.as_ref().map(|file| format!(" ({}, read again on change)", file.path.display()));
        say("callers", Verdict::Ok, format!("keys: {names}{}", from.unwrap_or_default()));
    }
    if let Some(jwt) = &auth.jwt {
        let name = format!("{}<{}>", jwt.agent_prefix, jwt.identity_claim);
        say("callers", Verdict::Ok, format!("tokens of {}, as {name}", jwt.issuer));
        if !jwt.agent_prefix.ends_with(':') && (auth.keys.is_some() || auth.kubernetes.is_some()) {
            let detail = "auth.jwt.agent_prefix does not end in a colon: a token can have the name, and the budget, of a \
                          key or a service account";
            say("callers", Verdict::Warning, detail.into());
        }
    }
    if let Some(kubernetes) = &auth.kubernetes {
        let server = kubernetes.api_server.as_ref().map_or("this cluster".to_owned(), |server| server.url.to_string());
        say(
            "callers",
            Verdict::Ok,
            format!("service accounts of {server}, as system:serviceaccount:<namespace>:<name>"),
        );
    }
    let total = config.limits.iter().any(|limit| limit.subject == Subject::Total);
    if config.signer.can_pay() && (auth.jwt.is_some() || auth.kubernetes.is_some()) && !total {
        let detail = "whoever gets a token is an agent with a budget of its own, and budget.total is not set: nothing \
                      bounds what all of them spend together";
        say("callers", Verdict::Warning, detail.into());
    }
}

async fn online(config: &Config, findings: &mut Vec<Finding>) {
    if let Store::Postgres(database) = &config.store
        && config.signer.can_pay()
        && let Ok(found) = PostgresLedger::rights(database).await
    {
        let (verdict, detail) = match found.surplus.is_empty() {
            true => (Verdict::Ok, "may serve, and nothing else".into()),
            false => (Verdict::Warning, too_much(&found.surplus)),
        };
        findings.push(Finding { what: "ledger's user".into(), verdict, detail });
    }
    let mut say = |what: String, result: Result<String, String>| {
        let (verdict, detail) = match result {
            Ok(detail) => (Verdict::Ok, detail),
            Err(detail) => (Verdict::Failed, detail),
        };
        findings.push(Finding { what, verdict, detail });
    };
    let (world, _tasks) = machine::world();
    let server = match Server::probe(config, &world).await {
        Ok(server) => server,
        Err(error) => return say("start".into(), Err(error.to_string())),
    };
    let query = SearchQuery { limit: Some(1), ..SearchQuery::default() };
    let page = server.catalog.search(&query).await;
    say("catalog answers".into(), page.map(|_| "yes".into()).map_err(|e| e.to_string()));
    for (what, result) in server.probe_callers(config).await {
        say(what.into(), result);
    }
    let Some(paying) = &server.paying else { return };
    let ledger = paying.ledger.ping().await.map(|()| "readable and writable".into());
    say("ledger".into(), ledger.map_err(|e| e.to_string()));
    for (network, chain) in &paying.chains {
        let point = chain.ledger().await;
        say(format!("{network} RPC"), point.map(|p| format!("ledger {}", p.sequence)).map_err(|e| e.to_string()));
        let payer = match paying.signer.address(network).await {
            Ok(payer) => payer,
            Err(error) => {
                say(format!("{network} signer"), Err(error.to_string()));
                continue;
            }
        };
        say(format!("{network} signer"), Ok(pays_from(&payer, config)));
        for limit in config.limits.iter().filter(|limit| limit.unit.network == *network) {
            let balance = chain.balance_fresh(&payer, &limit.unit.asset).await;
            let told = match balance {
                Ok(crate::chain::stellar::Balance::Of(amount)) => {
                    Ok(crate::x402::assets::display(amount, &limit.unit).unwrap_or_else(|| amount.to_string()))
                }
                Ok(crate::chain::stellar::Balance::NoTrustline) => {
                    Err("the payer has no trustline for the asset: it can neither receive nor pay it".into())
                }
                Err(error) => Err(error.to_string()),
            };
            say(format!("{network} balance"), told);
        }
    }
}

fn too_much(surplus: &[String]) -> String {
    format!(
        "{}: whoever has its password can rewrite the ledger; serve as a role of its own (tollway migrate --runtime-role)",
        surplus.join(", ")
    )
}

fn pays_from(payer: &str, config: &Config) -> String {
    if !payer.starts_with('C') {
        return format!("pays from {payer}");
    }
    match config.smart_account_ceiling {
        Some(ceiling) => format!("pays from the smart account {payer}, at most {ceiling} atomic units at once"),
        None => format!(
            "pays from the smart account {payer}; signer.smart_account_ceiling_atomic is not set, so a payment beyond \
             what its contract allows is refused only by the chain, after it was signed"
        ),
    }
}
