//! The Bazaar catalog: resource references, version hashes, search and resolve. What a seller declares is data: it is
//! handed on byte for byte, never followed as an instruction, and never dialled from here.

use serde_json::value::RawValue;

use crate::x402::Offer;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Http,
    Mcp,
}

/// `v1.` + base64url of the canonical JSON of `{"n","t","u"}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceRef {
    pub kind: Kind,
    pub url: String,
    /// Required for `mcp`, absent for `http`.
    pub tool_name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Active,
    Stale,
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SellerTransport {
    StreamableHttp,
    Sse,
}

/// One catalog item, understood. `raw` is the catalog's object byte for byte.
#[derive(Debug, Clone)]
pub struct Listing {
    pub raw: Box<RawValue>,
    pub reference: ResourceRef,
    /// 64 hex digits, see `catalog::version`.
    pub version_hash: String,
    pub transport: SellerTransport,
    /// The declared input schema of an MCP tool (`extensions.bazaar.info.input.inputSchema`).
    pub input_schema: Option<Box<RawValue>>,
    pub offers: Vec<Offer>,
    pub status: Status,
    /// Stable words, see `catalog::warnings`.
    pub warnings: Vec<&'static str>,
}

#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    #[error("the catalog lists no such resource")]
    NotListed,
    #[error("the catalog did not answer in time")]
    Timeout,
    #[error("the catalog's answer could not be used: {0}")]
    Protocol(String),
}
