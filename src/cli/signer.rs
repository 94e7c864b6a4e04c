//! `tollway signer`: the role, and what an operator asks it.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;

use futures_util::future::{Either, select};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Failure;
use super::serve::{Signals, drain};
use crate::agent::server::{chains, operator_client};
use crate::config::Machine;
use crate::config::signer_role::{self, BearerSource, RoleStore, SignerRole};
use crate::ledger::LedgerError;
use crate::mcp::serve::serve;
use crate::ports::{Listener, World, machine};
use crate::signer::role::callers::Callers;
use crate::signer::role::policy::Recipients;
use crate::signer::role::store::{Store, Verdict};
use crate::signer::role::tls::{self, Current};
use crate::signer::role::{Decision, Parts, Role, probe, server};
use crate::signer::wire;
use crate::telemetry;

const HELP: &str = "The signer holds the key of the paying account in a process of its own. tollway serve asks it \
(signer.mode external), and it signs what its own file allows, whatever it is told:

  tollway init signer --output signer.yaml      a commented file to start from
  tollway signer --config signer.yaml --check   what works, before anything is signed
  tollway signer --config signer.yaml           serve GET /address and POST /sign-auth-entry
  tollway signer --config signer.yaml --dry-run request.json
                                                what a request would be decided as, and why; nothing is changed
  tollway signer --config signer.yaml --migrate make or update the tables of a PostgreSQL database

In the configuration of tollway serve:

  signer:
    mode: external
    base_url: https://signer.example:8443
    auth_header_env: TOLLWAY_SIGNER_AUTH        Bearer <secret>
  network_security:
    ca_file: /etc/tollway/signer.crt.pem        the certificate that the signer shows, where it made its own

--dry-run answers 0 where the request would be signed, 1 where not.";

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct SignerArgs {
    /// Say what the request in FILE (- is standard input) would be decided as now
    #[arg(long, value_name = "FILE", conflicts_with_all = ["check", "migrate"])]
    dry_run: Option<PathBuf>,
    /// Say what works: key, certificate, bearer keys, database, chain, and what is left of today
    #[arg(long, conflicts_with = "migrate")]
    check: bool,
    /// Bring the tables of a PostgreSQL database up to this program's
    #[arg(long)]
    migrate: bool,
    /// With --migrate: give this PostgreSQL role what the signer needs to serve, and take what it does not
    #[arg(long, value_name = "NAME", requires = "migrate")]
    runtime_role: Option<String>,
    /// Answer as JSON (with --dry-run or --check)
    #[arg(long)]
    json: bool,
}

pub async fn run(args: &SignerArgs, path: Option<&Path>) -> Result<ExitCode, Failure> {
    let (world, tasks) = machine::world();
    if args.migrate {
        return migrate(&signer_role::load_store(path, &Machine)?, args.runtime_role.as_deref()).await;
    }
    let config = signer_role::load(path, &Machine)?;
    if args.check {
        return check(&config, &world, args.json).await;
    }
    if let Some(file) = &args.dry_run {
        let role = role(&config, &world).await?;
        return dry_run(&role, &request(file)?, args.json).await;
    }
    let role = Arc::new(role(&config, &world).await?);
    let shutdown = CancellationToken::new();
    let mut signals = Signals::listen()?;
    let listen = async |field: &str, at| {
        let listener = tokio::net::TcpListener::bind(at).await;
        listener.map_err(|e| Failure::Usage(format!("{field}: {at} cannot be listened on ({e})")))
    };
    // Before anything says that it is ready: the certificate is there and fits its key.
    config.tls.as_ref().map(|source| secured(source, &world)).transpose()?;
    let listener = listen("port", config.bind).await?;
    let probe_listener = listen("probe_port", config.probe).await?;
    let probes = probe::router(role.clone(), shutdown.clone());
    let probing = CancellationToken::new();
    let probe_listener = machine::TcpListener(probe_listener);
    world.spawn.spawn(Box::pin(serve(probe_listener, world.clone(), probes, probing.clone())));
    tracing::info!(address = role.address(), at = %config.bind, probe = %config.probe, "signing");
    let serving = serve_role(&config, role, machine::TcpListener(listener), &world, shutdown.clone());
    // The first signal lets what is under way finish; a second one ends the process at once.
    let order = async {
        signals.next().await;
        tracing::info!("stopping: requests under way may finish");
        shutdown.cancel();
        signals.next().await;
    };
    match select(pin!(serving), pin!(order)).await {
        Either::Left((served, _)) => served?,
        Either::Right(_) => return Ok(ExitCode::FAILURE),
    }
    shutdown.cancel();
    probing.cancel();
    drain(tasks, config.drain).await;
    Ok(ExitCode::SUCCESS)
}

/// The contract on this listener until `shutdown`, with files that are looked at again beside it.
pub async fn serve_role(
    config: &SignerRole,
    role: Arc<Role>,
    listener: impl Listener,
    world: &World,
    shutdown: CancellationToken,
) -> Result<(), Failure> {
    let app = server::router(role.clone());
    let current = config.tls.as_ref().map(|source| secured(source, world)).transpose()?;
    if let (Some(current), Some(source)) = (&current, &config.tls) {
        let fingerprint = current.fingerprint();
        let trust = source.certificate_file();
        tracing::info!(%fingerprint, certificate = %trust.display(), client_certificates = source.client_ca.is_some(),
            "TLS; a client that trusts no public authority for it names the certificate in network_security.ca_file");
    } else {
        tracing::warn!("plain HTTP on loopback: for development only");
    }
    world.spawn.spawn(Box::pin(watch(config.clone(), role, current.clone(), shutdown.clone())));
    match current {
        Some(current) => serve(current.listener(listener), world.clone(), app, shutdown).await,
        None => serve(listener, world.clone(), app, shutdown).await,
    }
    Ok(())
}

fn secured(source: &tls::Source, world: &World) -> Result<Current, Failure> {
    let made = source.make(world).and_then(|()| source.load());
    made.map(Current::new).map_err(|e| Failure::Usage(format!("tls: {e}")))
}

/// The files of TLS and of the bearer keys. What is broken is said once, and the old one stays.
async fn watch(config: SignerRole, role: Arc<Role>, current: Option<Current>, shutdown: CancellationToken) {
    let mut broken: BTreeMap<&'static str, String> = BTreeMap::new();
    let mut keys = config.keys_digest;
    loop {
        let pause = pin!(tokio::time::sleep(config.reload));
        if let Either::Left(_) = select(pin!(shutdown.cancelled()), pause).await {
            return;
        }
        let mut said = |what: &'static str, result: Result<bool, String>| {
            let word = match result {
                Ok(changed) => {
                    let mended = broken.remove(what).is_some();
                    if changed {
                        tracing::info!(what, "changed on disk: the new one is in use");
                    }
                    if !(changed || mended) {
                        return;
                    }
                    "changed"
                }
                Err(error) => {
                    if broken.get(what) == Some(&error) {
                        return;
                    }
                    tracing::error!(what, error, "changed on disk, and cannot be used: the old one stays in use");
                    broken.insert(what, error);
                    "failed"
                }
            };
            telemetry::SIGNER_RELOADS.one([what, word]);
            telemetry::SIGNER_STALE.set([what], if word == "failed" { 1.0 } else { 0.0 });
        };
        if let (Some(current), Some(source)) = (&current, &config.tls) {
            said("tls", current.reload(source).map_err(|e| e.to_string()));
        }
        if let BearerSource::File(_) = &config.bearer {
            let read = signer_role::read_bearer(&config.bearer, &Machine);
            said(
                "bearer_keys",
                read.map_err(|e| e.to_string()).map(|(new, digest)| {
                    let changed = keys != digest;
                    if changed {
                        keys = digest;
                        role.callers.replace(new);
                    }
                    changed
                }),
            );
        }
    }
}

/// Ready to decide; the database is open.
pub async fn role(config: &SignerRole, world: &World) -> Result<Role, Failure> {
    let store = open(&config.store, world).await.map_err(|e| Failure::Failed(format!("database: {e}")))?;
    let operator = operator_client(&config.security, world).map_err(|e| Failure::Usage(e.to_string()))?;
    Ok(Role::new(Parts {
        world: world.clone(),
        seed: config.seed.clone(),
        policy: config.policy.clone(),
        chains: chains(&config.networks, &operator, world),
        store,
        callers: Callers::new(config.keys.clone(), config.requests_per_second),
    }))
}

async fn open(store: &RoleStore, world: &World) -> Result<Store, LedgerError> {
    match store {
        RoleStore::Sqlite(path) => Store::open_sqlite(path, world.clone()).await,
        RoleStore::Postgres(database) => Store::connect(database).await,
    }
}

async fn migrate(store: &RoleStore, runtime_role: Option<&str>) -> Result<ExitCode, Failure> {
    match store {
        RoleStore::Sqlite(_) if runtime_role.is_some() => {
            return Err(Failure::Usage(
                "--runtime-role: a SQLite book has no roles (database.store: postgres)".to_owned(),
            ));
        }
        RoleStore::Sqlite(path) => say!("nothing to do: {} is brought up to date when it is opened", path.display()),
        RoleStore::Postgres(database) => {
            let failed = |e| Failure::Failed(format!("database: {e}"));
            Store::migrate(database).await.map_err(failed)?;
            if let Some(role) = runtime_role {
                Store::grant(database, role).await.map_err(failed)?;
            }
            say!("the signer's tables in {} are this program's", database.shown());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn request(file: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |e: std::io::Error| Failure::Failed(format!("{}: {e}", file.display()));
    let most = wire::BODY.bytes as u64 + 1;
    let mut bytes = Vec::new();
    if file.as_os_str() == "-" {
        std::io::stdin().take(most).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        std::fs::File::open(file).and_then(|f| f.take(most).read_to_end(&mut bytes)).map_err(failed)?;
    }
    Ok(bytes)
}

async fn dry_run(role: &Role, body: &[u8], as_json: bool) -> Result<ExitCode, Failure> {
    let Decision { network, asked, payment, outcome } = role.would("dry-run", body).await;
    let (decision, reason, why) = match &outcome {
        Ok(Verdict::Again) => ("repeated", None, "this preimage was signed before: the same answer again".to_owned()),
        Ok(_) => ("signed", None, "the policy allows it".to_owned()),
        Err(no) => ("refused", Some(no.word()), no.to_string()),
    };
    let day = match &outcome {
        Ok(Verdict::Fresh { day, signed }) => Some((day.clone(), *signed)),
        _ => None,
    };
    if as_json {
        let transfer = asked.as_ref().map(|asked| {
            json!({
                "payer": asked.payer, "payTo": asked.pay_to, "asset": asked.asset, "amount": asked.amount.to_string(),
                "nonce": asked.nonce.to_string(), "expirationLedger": asked.expiration,
                "digest": hex::encode(asked.digest),
            })
        });
        let day = day.map(|(day, signed)| json!({"day": day, "signedWithIt": signed.to_string()}));
        say!(
            "{}",
            json!({
                "decision": decision, "reason": reason, "why": why, "network": network.map(|n| n.to_string()),
                "transfer": transfer, "payment": payment, "day": day,
            })
        );
    } else {
        say!("{decision}{}: {why}", reason.map(|word| format!(" ({word})")).unwrap_or_default());
        if let Some(asked) = &asked {
            let network = network.map_or_else(|| "a network that is not allowed".to_owned(), |n| n.to_string());
            say!("  {} of {} to {}", asked.amount, asked.asset, asked.pay_to);
            say!("  from {} on {network}, until ledger {}, nonce {}", asked.payer, asked.expiration, asked.nonce);
        }
        if let Some((day, signed)) = day {
            say!("  {day} would then stand at {signed}");
        }
    }
    Ok(ExitCode::from(u8::from(outcome.is_err())))
}

async fn check(config: &SignerRole, world: &World, as_json: bool) -> Result<ExitCode, Failure> {
    let mut findings: Vec<(String, &'static str, String)> = Vec::new();
    let mut say = |what: &str, verdict: &'static str, detail: String| findings.push((what.into(), verdict, detail));
    say("account", "ok", config.seed.address());
    say("callers", "ok", callers(config));
    match &config.tls {
        None => say("tls", "warning", format!("plain HTTP on {}: for development only", config.bind)),
        Some(source) => match source.load() {
            Ok(loaded) => {
                say("tls", "ok", format!("{}, SHA-256 {}", source.certificate_file().display(), loaded.fingerprint))
            }
            Err(_)
                if matches!(source.certificate, tls::Certificate::Own { .. })
                    && !source.certificate_file().exists() =>
            {
                say("tls", "ok", format!("{} is made at the first start", source.certificate_file().display()));
            }
            Err(error) => say("tls", "failed", error.to_string()),
        },
    }
    for (name, network) in &config.policy.networks {
        for (asset, of) in &network.assets {
            let figure = |amount: Option<crate::money::Amount>| amount.map_or("unlimited".into(), |a| a.to_string());
            let whom = match &of.recipients {
                Recipients::Any => "any recipient".to_owned(),
                Recipients::These(these) => format!("{} recipients", these.len()),
            };
            let unlimited = of.per_signature.is_none() || of.per_day.is_none();
            let verdict = if unlimited { "warning" } else { "ok" };
            let (once, daily) = (figure(of.per_signature), figure(of.per_day));
            say(&format!("{name} {asset}"), verdict, format!("{whom}, at once {once}, a day {daily}"));
        }
    }
    match role(config, world).await {
        Err(Failure::Usage(problem) | Failure::Failed(problem)) => say("database", "failed", problem),
        Ok(role) => {
            match role.store.ping().await {
                Ok(()) => say("database", "ok", "readable and writable".into()),
                Err(error) => say("database", "failed", error.to_string()),
            }
            match role.store.days(2).await {
                Ok(days) => {
                    for day in days {
                        let same = day.signed == day.by_decisions;
                        let what = format!("{} {} {}", day.network, day.asset, day.day);
                        let detail = match same {
                            true => format!("{} signed", day.signed),
                            false => format!("{} counted, but {} by the decisions", day.signed, day.by_decisions),
                        };
                        say(&what, if same { "ok" } else { "failed" }, detail);
                    }
                }
                Err(error) => say("database", "failed", error.to_string()),
            }
            for (name, network) in &config.policy.networks {
                match role.newest(name, network).await {
                    Ok(sequence) => say(&format!("{name} ledger"), "ok", sequence.to_string()),
                    Err(no) => say(&format!("{name} ledger"), "failed", no.to_string()),
                }
            }
        }
    }
    let failed = findings.iter().any(|(_, verdict, _)| *verdict == "failed");
    if as_json {
        let all: Vec<_> = findings
            .iter()
            .map(|(what, verdict, detail)| json!({"what": what, "verdict": verdict, "detail": detail}))
            .collect();
        say!("{}", json!({"ok": !failed, "findings": all}));
    } else {
        for (what, verdict, detail) in &findings {
            let mark = if *verdict == "failed" { "FAILED" } else { verdict };
            say!("{mark:7}  {what}: {detail}");
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

fn callers(config: &SignerRole) -> String {
    let names: std::collections::BTreeSet<&str> = config.keys.names().map(|name| name.as_str()).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}
