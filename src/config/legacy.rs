//! The transport of 2024-11-05, and how the replicas reach each other for it.

use std::net::{IpAddr, SocketAddr};

use super::{ConfigError, Probe, Source, file, refuse};

/// Of the relay listener, where none is written.
const RELAY_PORT: u16 = 4523;

/// `GET /sse` and `POST /messages`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegacySse {
    /// Where this replica takes what others hand over, and what it signs into its streams' session ids; `None` where it
    /// is the only one, and then there is no relay listener.
    pub advertise: Option<SocketAddr>,
    /// The listener behind `advertise`, on `http.bind`.
    pub relay_port: u16,
}

/// What is signed into session ids must be this replica's own address: `http.advertise`, else the pod's.
pub(super) fn legacy_sse(http: &file::Http, port: u16, source: &dyn Source) -> Result<Option<LegacySse>, ConfigError> {
    if !http.legacy_sse.unwrap_or(false) {
        let alone = |field| refuse(field, "belongs to http.legacy_sse: true; write that, or remove it");
        return match (&http.advertise, http.relay_port) {
            (None, None) => Ok(None),
            (Some(_), _) => alone("http.advertise"),
            (None, Some(_)) => alone("http.relay_port"),
        };
    }
    let pod = source.env("POD_IP").filter(|ip| !ip.is_empty());
    let (field, written) = match (&http.advertise, &pod) {
        (Some(written), _) => ("http.advertise", Some(written)),
        (None, Some(ip)) => ("POD_IP", Some(ip)),
        (None, None) => ("http.advertise", None),
    };
    let relay_port = http.relay_port.unwrap_or(RELAY_PORT);
    let Some(written) = written else {
        return match http.relay_port {
            None => Ok(Some(LegacySse { advertise: None, relay_port })),
            Some(_) => refuse(
                "http.relay_port",
                "nobody would know of it: write http.advertise, or set POD_IP, to the address at which the other \
                 replicas reach this one",
            ),
        };
    };
    if relay_port == 0 || relay_port == port {
        return refuse("http.relay_port", format!("{relay_port} cannot be it: write a port that http.port is not"));
    }
    let whole = written.parse::<SocketAddr>().or_else(|_| written.parse().map(|ip: IpAddr| (ip, relay_port).into()));
    match whole {
        Ok(at) if !at.ip().is_unspecified() && !at.ip().is_multicast() && at.port() != 0 => {
            Ok(Some(LegacySse { advertise: Some(at), relay_port }))
        }
        _ => refuse(
            field,
            format!(
                "{written:?} is no address of a replica: write the one at which the others reach it, such as 10.0.0.7 \
                 or 10.0.0.7:4523"
            ),
        ),
    }
}

/// Two listeners cannot have one port.
pub(super) fn beside(legacy: Option<LegacySse>, probe: Option<Probe>) -> Result<(), ConfigError> {
    let relay = legacy.filter(|legacy| legacy.advertise.is_some()).map(|legacy| legacy.relay_port);
    match (relay, probe) {
        (Some(relay), Some(probe)) if relay == probe.port => {
            refuse("http.relay_port", format!("{relay} is probe.port: write another"))
        }
        _ => Ok(()),
    }
}
