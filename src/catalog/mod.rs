//! The Bazaar catalog: resource references, version hashes, search and resolve. What a seller declares is data: it is
//! handed on byte for byte, never followed as an instruction, and never dialled from here.

mod answer;
mod client;
#[cfg(all(feature = "roles", any(test, feature = "fuzzing")))]
pub(crate) mod fuzzing;
mod listing;
mod query;
mod reference;
#[cfg(test)]
mod tests;
mod text;
pub mod version;
pub mod warnings;

pub use client::{Catalog, Page};
pub(crate) use listing::is_template;
pub use listing::{Listing, SellerTransport, Skip, Status};
pub use query::SearchQuery;
pub use reference::{Kind, RefError, ResourceRef};

#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The catalog says that it has no active entry of that reference.
    #[error("the catalog lists no such resource")]
    NotListed,
    #[error("the catalog did not answer in time")]
    Timeout,
    #[error("the catalog's answer could not be used: {0}")]
    Protocol(String),
    /// What the agent asked is wrong: the name of the argument, and why.
    #[error("{field}: {detail}")]
    Invalid { field: &'static str, detail: String },
}
