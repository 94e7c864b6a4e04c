//! What an operator sees of the claims, and nothing that changes one: an end is given through the arrows as by a sweep.

use super::{Claim, ClaimError, Claims, Identity, State};
use crate::ledger::LedgerError;

/// One change of state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimEvent {
    /// Unix milliseconds of the store.
    pub at_ms: u64,
    /// `None`: it was claimed.
    pub from: Option<State>,
    pub to: State,
    pub reason: Option<String>,
}

/// Fewer digits of an identity name nobody.
pub const SHORTEST: usize = 8;

impl Claims {
    /// Claims in one of these states, newest first.
    pub async fn list(&self, states: &[State], most: u32) -> Result<Vec<Claim>, ClaimError> {
        let words: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
        self.store.list(&words, i64::from(most)).await
    }

    /// The claim whose identity begins with these lower-case hex digits; `None` where none does, or several do.
    pub async fn find(&self, digits: &str) -> Result<Option<Claim>, ClaimError> {
        let bound = |fill: char| -> Option<[u8; 32]> {
            let text: String = digits.chars().chain(std::iter::repeat(fill)).take(64).collect();
            hex::decode(text).ok()?.try_into().ok()
        };
        let (Some(low), Some(high)) = (bound('0'), bound('f')) else { return Ok(None) };
        if !(SHORTEST..=64).contains(&digits.len()) {
            return Ok(None);
        }
        let mut found = self.store.between(&low, &high).await?;
        Ok(if found.len() == 1 { found.pop() } else { None })
    }

    /// At most the first 1,000.
    pub async fn events(&self, identity: &Identity) -> Result<Vec<ClaimEvent>, ClaimError> {
        let rows = self.store.events(identity).await?;
        Ok(rows.into_iter().map(read).collect::<Result<_, LedgerError>>()?)
    }

    /// By the store's clock, unix milliseconds.
    pub async fn now_ms(&self) -> Result<u64, ClaimError> {
        let now = self.store.now_ms().await?;
        Ok(u64::try_from(now).unwrap_or(0))
    }
}

/// Moment, states before and after, reason.
pub type EventRow = (i64, Option<String>, String, Option<String>);

fn read((at, from, to, reason): EventRow) -> Result<ClaimEvent, LedgerError> {
    let state = |word: &str| {
        State::parse(word).ok_or_else(|| LedgerError::Inconsistent("an event's state cannot be read".into()))
    };
    let from = from.as_deref().map(state).transpose()?;
    Ok(ClaimEvent { at_ms: u64::try_from(at).unwrap_or(0), from, to: state(&to)?, reason })
}
