//! `gate.hooks`: a URL of the operator's that decides what is sold, or hears what became of it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use url::Url;

use super::gate::{asset, network};
use super::value::{Secret, amount, is_loopback, millis, operator_url, secret_env};
use super::{ConfigError, Source, file, refuse};
use crate::gate::hooks::OnFailure;
use crate::gate::webhooks::EVENTS;
use crate::money::{Amount, Unit};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    url: String,
    auth_header_env: Option<String>,
    timeout_ms: Option<u64>,
    /// `refuse` or `continue`.
    on_failure: Option<String>,
    events: Option<Vec<String>>,
    #[serde(default)]
    ceilings: Vec<Ceiling>,
}

/// What no hook asks more than, in one token.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ceiling {
    network: Option<String>,
    asset: Option<String>,
    price: Option<String>,
    amount_atomic: Option<String>,
}

#[derive(Debug, Clone)]
pub struct GateHooks {
    pub url: Url,
    /// The value of `Authorization`.
    pub auth_header: Option<Secret>,
    pub timeout: Duration,
    pub on_failure: OnFailure,
    pub events: Vec<&'static str>,
    pub ceilings: BTreeMap<Unit, Amount>,
}

pub(super) fn hooks(
    gate: &file::Gate,
    allow_insecure: bool,
    source: &dyn Source,
) -> Result<Option<GateHooks>, ConfigError> {
    let Some(written) = &gate.hooks else { return Ok(None) };
    let url = operator_url("gate.hooks.url", &written.url)?;
    if url.scheme() != "https" && !(allow_insecure || is_loopback(&url)) {
        return refuse("gate.hooks.url", "is not HTTPS: only a hook on loopback may be plain");
    }
    let auth_header = match &written.auth_header_env {
        None => None,
        Some(name) => match secret_env(name, source) {
            Some(secret) => Some(secret),
            None => {
                return refuse("gate.hooks.auth_header_env", format!("the environment variable {name} is not set"));
            }
        },
    };
    let on_failure = match written.on_failure.as_deref() {
        Some("refuse") => OnFailure::Refuse,
        Some("continue") => OnFailure::Continue,
        None => {
            let problem = "is missing: write refuse (nothing is sold unasked) or continue (at the written price)";
            return refuse("gate.hooks.on_failure", problem);
        }
        Some(other) => {
            return refuse("gate.hooks.on_failure", format!("{other:?} is unknown: write refuse or continue"));
        }
    };
    let events = match &written.events {
        None => EVENTS.to_vec(),
        Some(names) => {
            let mut events = Vec::new();
            for (i, name) in names.iter().enumerate() {
                match EVENTS.into_iter().find(|event| event == name) {
                    Some(event) => events.push(event),
                    None => {
                        let problem = format!("{name:?} is unknown: write any of {}", EVENTS.join(", "));
                        return refuse(format!("gate.hooks.events[{i}]"), problem);
                    }
                }
            }
            events
        }
    };
    Ok(Some(GateHooks {
        url,
        auth_header,
        timeout: millis("gate.hooks.timeout_ms", written.timeout_ms, 2_000, 50, 30_000)?,
        on_failure,
        events,
        ceilings: ceilings(written, gate)?,
    }))
}

fn ceilings(written: &File, gate: &file::Gate) -> Result<BTreeMap<Unit, Amount>, ConfigError> {
    let mut ceilings = BTreeMap::new();
    for (i, ceiling) in written.ceilings.iter().enumerate() {
        let field = |member: &str| format!("gate.hooks.ceilings[{i}].{member}");
        let needed =
            |member: &str, own: &Option<String>, common: &Option<String>| match own.as_ref().or(common.as_ref()) {
                Some(value) => Ok(value.clone()),
                None => refuse(field(member), format!("is missing: write it here or under gate.defaults.{member}")),
            };
        let network = network(&field("network"), &needed("network", &ceiling.network, &gate.defaults.network)?)?;
        let name = needed("asset", &ceiling.asset, &gate.defaults.asset)?;
        let (asset, decimals) = asset(&field("asset"), &network, &name, gate)?;
        let most = match (&ceiling.price, &ceiling.amount_atomic, decimals) {
            (Some(price), None, Some(decimals)) => {
                Amount::from_decimal(price, decimals).or_else(|e| refuse(field("price"), e.to_string()))?
            }
            (Some(_), None, None) => {
                let problem = "is a decimal number, but the decimals of this asset are not known: write amount_atomic";
                return refuse(field("price"), problem);
            }
            (None, Some(atomic), _) => amount(&field("amount_atomic"), atomic)?,
            _ => return refuse(field("price"), "write either price or amount_atomic"),
        };
        if ceilings.insert(Unit { network, asset }, most).is_some() {
            return refuse(field("asset"), "has a ceiling twice");
        }
    }
    Ok(ceilings)
}
