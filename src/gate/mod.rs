//! The seller's side: prices, what a request is aimed at, the challenge, the local checks of a payment, and the claims
//! that make each payment buy one thing once, over all replicas. `docs/outcomes.md`, table "Gate", is the measure.
//!
//! Nothing here knows of axum or of configuration files: the proxy and the library stand on the same parts.

mod ask;
mod breaker;
pub mod challenge;
pub mod claims;
mod chores;
mod described;
pub mod desk;
pub mod extensions;
mod hooked;
pub mod hooks;
pub mod junk;
pub mod known;
pub mod library;
pub mod listing;
pub mod payment;
pub mod prices;
#[cfg(feature = "roles")]
pub mod proxy;
pub mod schema;
pub mod sell;
pub mod settle;
mod shelf;
pub mod sweep;
mod splice;
pub mod target;
mod template;
mod told;
mod wait;
pub mod webhooks;
#[cfg(all(test, feature = "sqlite", feature = "postgres"))]
mod tests;

/// What can be priced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Tool,
    Resource,
    Prompt,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Tool, Kind::Resource, Kind::Prompt];

    /// The request that a price is for.
    pub fn method(self) -> &'static str {
        match self {
            Kind::Tool => "tools/call",
            Kind::Resource => "resources/read",
            Kind::Prompt => "prompts/get",
        }
    }

    pub fn of_method(method: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.method() == method)
    }

    /// The member of the request's `params` that names the target.
    pub fn member(self) -> &'static str {
        match self {
            Kind::Tool | Kind::Prompt => "name",
            Kind::Resource => "uri",
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Kind::Tool => "tool",
            Kind::Resource => "resource",
            Kind::Prompt => "prompt",
        }
    }
}
