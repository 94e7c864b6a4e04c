//! The protocol revisions: their names, what was negotiated, and what a result must carry in each.

use std::borrow::Cow;

use serde_json::value::RawValue;

use crate::json;

pub const META_PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";
pub const META_CLIENT_INFO: &str = "io.modelcontextprotocol/clientInfo";
pub const META_CLIENT_CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
pub const META_SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";
pub const META_SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Revision {
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
}

impl Revision {
    /// Newest first, as a server lists what it supports.
    pub const ALL: [Revision; 5] = [
        Revision::V2026_07_28,
        Revision::V2025_11_25,
        Revision::V2025_06_18,
        Revision::V2025_03_26,
        Revision::V2024_11_05,
    ];
    /// Over Streamable HTTP; 2024-11-05 has a transport of its own.
    pub const HTTP: [Revision; 4] =
        [Revision::V2026_07_28, Revision::V2025_11_25, Revision::V2025_06_18, Revision::V2025_03_26];

    pub const fn as_str(self) -> &'static str {
        match self {
            Revision::V2024_11_05 => "2024-11-05",
            Revision::V2025_03_26 => "2025-03-26",
            Revision::V2025_06_18 => "2025-06-18",
            Revision::V2025_11_25 => "2025-11-25",
            Revision::V2026_07_28 => "2026-07-28",
        }
    }

    pub fn parse(text: &str) -> Option<Revision> {
        Revision::ALL.into_iter().find(|revision| revision.as_str() == text)
    }

    /// Served without handshake and session: each request says who asks and in which revision.
    pub fn stateless(self) -> bool {
        self >= Revision::V2026_07_28
    }

    /// JSON-RPC batches came with 2025-03-26 and went with 2025-06-18.
    pub fn has_batches(self) -> bool {
        self == Revision::V2025_03_26
    }

    /// The answer to `initialize`: what was asked for if it is served with a handshake in `supported`, else the newest
    /// that is (2025-11-25, basic/lifecycle, "Version Negotiation").
    pub fn negotiate(requested: &str, supported: &[Revision]) -> Revision {
        let legacy = || supported.iter().copied().filter(|revision| !revision.stateless());
        legacy()
            .find(|revision| revision.as_str() == requested)
            .or_else(|| legacy().max())
            .unwrap_or(Revision::V2025_11_25)
    }
}
