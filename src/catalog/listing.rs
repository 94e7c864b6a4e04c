use serde_json::value::RawValue;

use super::ResourceRef;
use crate::x402::Offer;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Active,
    Stale,
    Unknown,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Active => "active",
            Status::Stale => "stale",
            Status::Unknown => "unknown",
        }
    }
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

/// Why an item is left out of a page. The word is stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("skipped: {0}")]
pub struct Skip(pub &'static str);

impl Listing {
    /// Parses one item of a catalog, whatever it is.
    pub fn parse(_item: &RawValue) -> Result<Listing, Skip> {
        Err(Skip("not_built"))
    }
}
