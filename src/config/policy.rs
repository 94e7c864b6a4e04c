//! Whom an agent may pay at all. What is refused is not quoted: an address may hold credentials, a recipient be a seed.

use std::collections::BTreeSet;

use super::{ConfigError, file, refuse};
use crate::money::{ParseError, Unit};
use crate::policy::{NoOrigin, Origin, Pinning, Policy, is_address};

pub(super) fn policy(file: file::Policy) -> Result<Policy, ConfigError> {
    Ok(Policy {
        allow_origins: origins("policy.allow_origins", &file.allow_origins)?,
        deny_origins: origins("policy.deny_origins", &file.deny_origins)?,
        allow_recipients: recipients("policy.allow_recipients", file.allow_recipients)?,
        deny_recipients: recipients("policy.deny_recipients", file.deny_recipients)?,
        allow_assets: assets("policy.allow_assets", &file.allow_assets)?,
        deny_assets: assets("policy.deny_assets", &file.deny_assets)?,
        pin_recipients: match file.pin_recipients.as_deref() {
            None | Some("off") => Pinning::Off,
            Some("warn") => Pinning::Warn,
            Some("enforce") => Pinning::Enforce,
            Some(other) => {
                return refuse("policy.pin_recipients", format!("{other:?} is unknown: write off, warn or enforce"));
            }
        },
    })
}

fn origins(field: &str, list: &[String]) -> Result<BTreeSet<Origin>, ConfigError> {
    let origin = |(i, text): (usize, &String)| {
        text.parse().or_else(|e: NoOrigin| refuse(format!("{field}[{i}]"), e.to_string()))
    };
    list.iter().enumerate().map(origin).collect()
}

fn recipients(field: &str, list: Vec<String>) -> Result<BTreeSet<String>, ConfigError> {
    let recipient = |(i, text): (usize, String)| match is_address(None, &text) {
        true => Ok(text),
        false => refuse(
            format!("{field}[{i}]"),
            "is no address: write a Stellar account (G…) or contract (C…), or an EVM address (0x…)",
        ),
    };
    list.into_iter().enumerate().map(recipient).collect()
}

fn assets(field: &str, list: &[file::Asset]) -> Result<BTreeSet<Unit>, ConfigError> {
    let asset = |(i, entry): (usize, &file::Asset)| {
        let at = |member: &str| format!("{field}[{i}].{member}");
        Ok(Unit {
            network: entry.network.parse().or_else(|e: ParseError| refuse(at("network"), e.to_string()))?,
            asset: entry.asset.parse().or_else(|e: ParseError| refuse(at("asset"), e.to_string()))?,
        })
    };
    list.iter().enumerate().map(asset).collect()
}
