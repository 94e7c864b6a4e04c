//! Values that many sections have.

use std::fmt;
use std::time::Duration;

use url::Url;
use zeroize::Zeroizing;

use super::{ConfigError, Source, refuse};
use crate::money::Amount;

/// Text that no log, error or Debug shows.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);
impl Secret {
    pub fn new(text: String) -> Self {
        Secret(Zeroizing::new(text))
    }
    pub fn expose(&self) -> &str {
        &self.0
    }
}
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

pub(super) fn secret_env(name: &str, source: &dyn Source) -> Option<Secret> {
    source.env(name).filter(|value| !value.trim().is_empty()).map(Secret::new)
}

pub(super) fn amount(field: &str, value: &str) -> Result<Amount, ConfigError> {
    value.parse().or_else(|e: crate::money::ParseError| refuse(field, e.to_string()))
}

pub(super) fn millis(
    field: &str,
    value: Option<u64>,
    default: u64,
    min: u64,
    max: u64,
) -> Result<Duration, ConfigError> {
    match value.unwrap_or(default) {
        ms if value.is_some() && !(min..=max).contains(&ms) => {
            refuse(field, format!("{ms} is not between {min} and {max} milliseconds"))
        }
        ms => Ok(Duration::from_millis(ms)),
    }
}

pub(super) fn bounded(
    field: &str,
    value: Option<usize>,
    default: usize,
    min: usize,
    max: usize,
) -> Result<usize, ConfigError> {
    match value.unwrap_or(default) {
        n if (min..=max).contains(&n) => Ok(n),
        n => refuse(field, format!("{n} is not between {min} and {max}")),
    }
}

/// A URL that the operator wrote: http or https, with a host, without credentials, query or fragment. What is refused
/// is not quoted: it may hold an access key.
pub(super) fn operator_url(field: &str, text: &str) -> Result<Url, ConfigError> {
    let url = Url::parse(text).or_else(|e| refuse(field, format!("is not a URL ({e}): write https://host/path")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return refuse(field, format!("has the scheme {:?}: write an http or https URL", url.scheme()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refuse(field, "has credentials in the URL: put them into an environment variable");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return refuse(field, format!("{} has a query or fragment: write the base URL alone", host(&url)));
    }
    Ok(url)
}

pub(super) fn host(url: &Url) -> &str {
    url.host_str().unwrap_or_default()
}

pub(super) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => false,
    }
}
