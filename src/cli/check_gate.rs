//! `tollway check` of a file that says what a gate sells.

use tokio_util::sync::CancellationToken;

use super::check::{Finding, Verdict};
use crate::agent::server;
use crate::config::{GateServer, GateUpstream, Store};
use crate::gate::payment::Identity;
use crate::gate::prices::Item;
use crate::gate::proxy::inventory::inventory;
use crate::gate::target::Target;
use crate::gate_server;
use crate::ports::machine;

fn finding(what: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Finding {
    Finding { what: what.into(), verdict, detail: detail.into() }
}

/// What the file says, in words. It was parsed, so nothing here fails.
pub(super) fn read(config: &GateServer) -> Vec<Finding> {
    let mut findings =
        vec![finding("listener", Verdict::Ok, format!("HTTP on {}:{}", config.http.bind, config.http.port))];
    if !config.http.bind.is_loopback() && config.http.allowed_hosts.is_empty() {
        let detail = "http.allowed_hosts is empty: every request that does not name localhost is refused";
        findings.push(finding("hosts", Verdict::Warning, detail));
    }
    findings.push(finding(
        "upstream",
        Verdict::Ok,
        match &config.upstream {
            GateUpstream::Http { url, .. } => url.to_string(),
            GateUpstream::Child { command, shared, .. } => {
                let program = command.first().map_or("", String::as_str);
                format!("{program}, {}", if *shared { "one process for all" } else { "one process for each session" })
            }
        },
    ));
    for item in config.gate.prices.items() {
        findings.push(finding(item.scope(), Verdict::Ok, offers(item)));
    }
    for (network, facilitator) in &config.gate.facilitators {
        findings.push(finding(format!("facilitator of {network}"), Verdict::Ok, facilitator.base_url.to_string()));
        if config.gate.resolved_by_operator.contains(network) {
            let detail = "an unknown settlement is yours to resolve (gate.unknown: operator): its payer waits for you";
            findings.push(finding(format!("chain of {network}"), Verdict::Warning, detail));
        }
    }
    findings.push(finding(
        "claims",
        Verdict::Ok,
        match &config.gate.store {
            Store::Sqlite(path) => format!("SQLite, {}: for one gate", path.display()),
            Store::Postgres(database) => format!("PostgreSQL, {}", database.shown()),
            Store::None => "none".into(),
        },
    ));
    findings
}

fn offers(item: &Item) -> String {
    let offers = item.offers.iter().map(|priced| {
        format!("{} {} on {} to {}", priced.shown_amount, priced.shown_asset, priced.offer.network, priced.offer.pay_to)
    });
    offers.collect::<Vec<_>>().join(", or ")
}

/// Whether its parts answer; nothing is sold.
pub(super) async fn online(config: &GateServer, findings: &mut Vec<Finding>) {
    let (world, _tasks) = machine::world();
    let say = |what: String, result: Result<String, String>| match result {
        Ok(detail) => finding(what, Verdict::Ok, detail),
        Err(problem) => finding(what, Verdict::Failed, problem),
    };
    let claims = match gate_server::claims(&config.gate, &world).await {
        Ok(claims) => claims.look(&Identity([0; 32])).await.map(|_| "answer".into()).map_err(|e| e.to_string()),
        Err(error) => Err(error.to_string()),
    };
    findings.push(say("claims".into(), claims));
    let client = match server::operator_client(&config.gate.security, &world) {
        Ok(client) => client,
        Err(error) => return findings.push(say("network_security".into(), Err(error.to_string()))),
    };
    for (network, written) in &config.gate.facilitators {
        let supported = match gate_server::facilitator(&client, written) {
            Ok(facilitator) => facilitator.supported(written.timeout).await.map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let found = supported.and_then(|kinds| {
            let ours = kinds.iter().filter(|kind| kind.network == network.as_str() && kind.scheme == "exact").count();
            if ours > 0 {
                Ok("settles exact".to_owned())
            } else {
                Err("it does not settle exact on this network".into())
            }
        });
        findings.push(say(format!("facilitator of {network}"), found));
    }
    for (network, chain) in server::chains(&config.gate.networks, &client, &world) {
        let ledger = chain.ledger().await.map(|at| format!("ledger {}", at.sequence)).map_err(|e| e.to_string());
        findings.push(say(format!("chain of {network}"), ledger));
    }
    let upstream = match gate_server::upstream(config, &world, &CancellationToken::new()) {
        Ok(upstream) => inventory(&upstream).await,
        Err(error) => Err(error.to_string()),
    };
    match upstream {
        Err(problem) => findings.push(say("upstream".into(), Err(problem))),
        Ok(entries) => {
            findings.push(say("upstream".into(), Ok(format!("has {} items", entries.len()))));
            for item in config.gate.prices.items() {
                let there = entries.iter().any(|entry| match entry.template {
                    true => entry.kind == item.kind && entry.key == item.key,
                    false => matches!(config.gate.prices.resolve(entry.kind, &entry.key), Target::Priced(found)
                        if found.kind == item.kind && found.key == item.key),
                });
                if !there {
                    let detail = "the upstream lists nothing of this name: it is never sold, or its name is misspelt";
                    findings.push(finding(item.scope(), Verdict::Warning, detail));
                }
            }
        }
    }
}
