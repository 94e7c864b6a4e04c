//! The file's spending limits.

use std::collections::BTreeMap;

use super::networks::NetworkConfig;
use super::value::amount;
use super::{ConfigError, file, refuse};
use crate::ledger::{Limit, Subject};
use crate::money::{Asset, Network, Unit};

pub(super) fn limits(
    file: &file::Budget,
    networks: &BTreeMap<Network, NetworkConfig>,
) -> Result<Vec<Limit>, ConfigError> {
    let mut limits: BTreeMap<(Subject, Unit), Limit> = BTreeMap::new();
    let per_call = file.default_per_call_max_atomic.as_deref();
    let per_call = per_call.map(|a| amount("budget.default_per_call_max_atomic", a)).transpose()?;
    let window = file.default_session_or_day_max_atomic.as_deref();
    let window = window.map(|a| amount("budget.default_session_or_day_max_atomic", a)).transpose()?;
    if per_call.is_some() != window.is_some() {
        let (set, missing) = if per_call.is_some() {
            ("budget.default_per_call_max_atomic", "budget.default_session_or_day_max_atomic")
        } else {
            ("budget.default_session_or_day_max_atomic", "budget.default_per_call_max_atomic")
        };
        return refuse(missing, format!("is missing while {set} is set: the two are one default, write both"));
    }
    if let (Some(per_call), Some(window)) = (per_call, window) {
        for network in networks.iter().filter(|(_, n)| n.enabled).map(|(name, _)| name) {
            let Some(asset) = default_asset(network) else {
                if file.limits.iter().any(|entry| entry.network == network.as_str()) {
                    continue;
                }
                let problem =
                    format!("is for USDC, and none is known on {network}: write a budget.limits entry for it");
                return refuse("budget.default_per_call_max_atomic", problem);
            };
            let unit = Unit { network: network.clone(), asset };
            let limit = Limit {
                subject: Subject::EachAgent,
                unit: unit.clone(),
                per_call: Some(per_call),
                per_session: Some(window),
                per_day: Some(window),
                unlimited: false,
                suspended: false,
                source: "file".into(),
            };
            limits.insert((Subject::EachAgent, unit), limit);
        }
    }
    let unit = |field: &str, network: &str, asset: &str| -> Result<Unit, ConfigError> {
        let network: Network = network.parse().or_else(|e: crate::money::ParseError| refuse(field, e.to_string()))?;
        let asset: Asset = asset.parse().or_else(|e: crate::money::ParseError| refuse(field, e.to_string()))?;
        Ok(Unit { network, asset })
    };
    for (i, entry) in file.limits.iter().enumerate() {
        let field = |member: &str| format!("budget.limits[{i}].{member}");
        let subject = match entry.agent.as_deref() {
            None | Some("*") => Subject::EachAgent,
            Some(name) => Subject::Agent(
                name.parse().or_else(|e: crate::money::ParseError| refuse(field("agent"), e.to_string()))?,
            ),
        };
        let parse =
            |member: &str, value: &Option<String>| value.as_deref().map(|v| amount(&field(member), v)).transpose();
        let limit = Limit {
            subject: subject.clone(),
            unit: unit(&field("asset"), &entry.network, &entry.asset)?,
            per_call: parse("per_call_max_atomic", &entry.per_call_max_atomic)?,
            per_session: parse("session_max_atomic", &entry.session_max_atomic)?,
            per_day: parse("day_max_atomic", &entry.day_max_atomic)?,
            unlimited: entry.unlimited,
            suspended: false,
            source: "file".into(),
        };
        if limit.per_call.is_none() && limit.per_session.is_none() && limit.per_day.is_none() && !limit.unlimited {
            return refuse(
                format!("budget.limits[{i}]"),
                "names no figure: write per_call_max_atomic, session_max_atomic or day_max_atomic, or unlimited: true",
            );
        }
        let key = (subject, limit.unit.clone());
        if limits.contains_key(&key) && file.limits[..i].iter().any(|e| same_row(e, entry)) {
            return refuse(format!("budget.limits[{i}]"), "repeats the agent, network and asset of an earlier entry");
        }
        limits.insert(key, limit);
    }
    for (i, entry) in file.total.iter().enumerate() {
        let unit = unit(&format!("budget.total[{i}].asset"), &entry.network, &entry.asset)?;
        let limit = Limit {
            subject: Subject::Total,
            unit: unit.clone(),
            per_call: None,
            per_session: None,
            per_day: Some(amount(&format!("budget.total[{i}].day_max_atomic"), &entry.day_max_atomic)?),
            unlimited: false,
            suspended: false,
            source: "file".into(),
        };
        if limits.insert((Subject::Total, unit), limit).is_some() {
            return refuse(format!("budget.total[{i}]"), "repeats the network and asset of an earlier entry");
        }
    }
    Ok(limits.into_values().collect())
}

/// What the operator counts up, so that an older file does not replace a newer one's limits.
pub(super) fn version(file: &file::Budget) -> Result<u64, ConfigError> {
    match file.limits_version {
        None => Ok(0),
        Some(version) if (1..=1 << 53).contains(&version) => Ok(version),
        Some(version) => refuse("budget.limits_version", format!("{version} is not between 1 and {}", 1u64 << 53)),
    }
}

/// The asset that the two `default_*` figures are for: the network's USDC.
pub(super) fn default_asset(network: &Network) -> Option<Asset> {
    let usdc = match network.as_str() {
        "stellar:testnet" => "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA",
        "stellar:pubnet" => "CCW67TSZV3SSS2HXMBQ5JFGCKJNXKZM7UQUWUZPUTHXSTZLEO7SJMI75",
        _ => return None,
    };
    usdc.parse().ok()
}

pub(super) fn same_row(a: &file::Limit, b: &file::Limit) -> bool {
    let agent = |entry: &file::Limit| entry.agent.clone().unwrap_or_else(|| "*".into());
    agent(a) == agent(b) && a.network == b.network && a.asset == b.asset
}
