//! The signer's own book, in a database of its own: nonces that were signed, what each day has cost, every decision.
//! SQLite for one replica, PostgreSQL for several; both are held to one table of promises (`tests`).
//!
//! A reservation is one transaction and is never given back: what was counted stays counted, whether the signature was
//! made, reached its caller, or was ever used.

mod postgres;
mod sqlite;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use postgres::Postgres;
pub use sqlite::Sqlite;

use super::policy::No;
use super::transfer::Asked;
use crate::ledger::postgres::SIGNER;
use crate::ledger::{Database, LedgerError};
use crate::money::{Amount, Network};
use crate::ports::World;

/// What is written of one request. No member is a secret; `payment` is what the caller says.
#[derive(Debug, Clone, Copy)]
pub struct Line<'a> {
    pub caller: &'a str,
    /// The first characters of the payment's identifier.
    pub payment: Option<&'a str>,
    /// The network of the decoded authorization, where it is one of ours.
    pub network: Option<&'a Network>,
    /// `None`: it could not be read.
    pub asked: Option<&'a Asked>,
}

/// A transfer for which everything else says yes.
#[derive(Debug, Clone, Copy)]
pub struct Want<'a> {
    pub caller: &'a str,
    pub payment: Option<&'a str>,
    pub network: &'a Network,
    pub asked: &'a Asked,
    /// `None`: unlimited.
    pub per_day: Option<Amount>,
}

/// What the book says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Counted now; `signed` is the day's sum with it.
    Fresh { day: String, signed: Amount },
    /// The same preimage was counted before: the same answer again, not counted again.
    Again,
    /// Another preimage with this nonce was counted before.
    NonceReused,
    /// `signed` is the day's sum without it.
    DayCap { day: String, signed: Amount },
}

impl Verdict {
    pub fn refusal(&self) -> Option<No> {
        match self {
            Verdict::Fresh { .. } | Verdict::Again => None,
            Verdict::NonceReused => Some(No::NonceReused),
            Verdict::DayCap { .. } => Some(No::DayCap),
        }
    }
}

/// What one day's signatures of one asset may move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Day {
    pub network: String,
    pub asset: String,
    /// UTC.
    pub day: String,
    pub signed: Amount,
    /// The same by the decisions.
    pub by_decisions: Amount,
}

pub enum Store {
    Sqlite(Sqlite),
    Postgres(Postgres),
}

impl Store {
    /// Made with mode 0600 where there is none, and brought up to this program's schema.
    pub async fn open_sqlite(path: &Path, world: World) -> Result<Store, LedgerError> {
        Ok(Store::Sqlite(Sqlite::open(path, world).await?))
    }

    /// A schema that is not this program's is refused, never changed ([`Store::migrate`]).
    pub async fn connect(database: &Database) -> Result<Store, LedgerError> {
        Ok(Store::Postgres(Postgres::connect(database).await?))
    }

    /// Brings a PostgreSQL schema up to this program's; a second run does nothing.
    pub async fn migrate(database: &Database) -> Result<(), LedgerError> {
        Postgres::migrate(database).await
    }

    /// Gives a role what a replica needs, and takes what it does not.
    pub async fn grant(database: &Database, role: &str) -> Result<(), LedgerError> {
        SIGNER.grant(database, role).await
    }

    /// Counts it, or says why not, and writes the decision, in one transaction. An error means that nothing may be
    /// signed; it may have been counted.
    pub async fn reserve(&self, want: &Want<'_>) -> Result<Verdict, LedgerError> {
        match self {
            Store::Sqlite(store) => store.reserve(want, false).await,
            Store::Postgres(store) => store.reserve(want, false).await,
        }
    }

    /// What [`Store::reserve`] would say; nothing is written.
    pub async fn look(&self, want: &Want<'_>) -> Result<Verdict, LedgerError> {
        match self {
            Store::Sqlite(store) => store.reserve(want, true).await,
            Store::Postgres(store) => store.reserve(want, true).await,
        }
    }

    /// Refused without being counted.
    pub async fn refused(&self, line: &Line<'_>, why: No) -> Result<(), LedgerError> {
        self.record(line, "refused", why).await
    }

    /// Counted, and then not signed.
    pub async fn withheld(&self, line: &Line<'_>, why: No) -> Result<(), LedgerError> {
        self.record(line, "withheld", why).await
    }

    async fn record(&self, line: &Line<'_>, decision: &'static str, why: No) -> Result<(), LedgerError> {
        match self {
            Store::Sqlite(store) => store.record(line, decision, why.word()).await,
            Store::Postgres(store) => store.record(line, decision, why.word()).await,
        }
    }

    /// Of every day that ends after the last `days` began.
    pub async fn days(&self, days: u32) -> Result<Vec<Day>, LedgerError> {
        match self {
            Store::Sqlite(store) => store.days(days).await,
            Store::Postgres(store) => store.days(days).await,
        }
    }

    pub fn word(&self) -> &'static str {
        match self {
            Store::Sqlite(_) => "sqlite",
            Store::Postgres(_) => "postgres",
        }
    }

    /// Whether it answers.
    pub async fn ping(&self) -> Result<(), LedgerError> {
        match self {
            Store::Sqlite(store) => store.ping().await,
            Store::Postgres(store) => store.ping().await,
        }
    }
}
