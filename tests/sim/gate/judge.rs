//! Judged from outside when the world has come to rest: the chain and the claims, one against the other.

use std::collections::BTreeMap;

use tollway::gate::claims::{Claim, State};

use super::PRICE;
use super::book::{End, Run};
use super::payer::Own;
use crate::chain::{ASSET, PAY_TO, Transfer};

pub struct Evidence {
    pub claims: Vec<Claim>,
    pub transfers: Vec<Transfer>,
    pub payments: Vec<Own>,
    pub runs: Vec<Run>,
    /// What the payers had, and what they have.
    pub balances: (i128, i128),
    /// Ledgers that the entry of a used nonce lives at least.
    pub min_ttl: u32,
}

fn nonce(claim: &Claim) -> i64 {
    claim.nonce.parse().unwrap_or(-1)
}

impl Evidence {
    /// The first promise that does not hold.
    pub fn judge(&self) -> Result<(), String> {
        self.claims_and_transfers()?;
        self.calls()?;
        self.money()?;
        self.runs()
    }

    fn claims_and_transfers(&self) -> Result<(), String> {
        let transfers: BTreeMap<i64, &Transfer> = self.transfers.iter().map(|t| (t.nonce, t)).collect();
        for claim in &self.claims {
            let (id, state, reason) = (claim.identity.short(), claim.state.as_str(), &claim.reason);
            let transfer = transfers.get(&nonce(claim));
            let paid = transfer.is_some_and(|t| t.pay_to == PAY_TO && t.asset == ASSET);
            match claim.state {
                // The entry of a nonce that was spent on another call hides the absence of this one while it lives.
                State::Unknown if transfer.is_some() && !paid && self.min_ttl > 1_000 => {}
                State::Claimed | State::Settling | State::Unknown => {
                    return Err(format!("{id} is still {state} ({reason:?})"));
                }
                State::Failed | State::Released if paid => {
                    return Err(format!("{id} is {state} ({reason:?}), and its money moved"));
                }
                State::Settled if transfer.is_none_or(|t| !paid || t.amount != i128::from(PRICE)) => {
                    return Err(format!("{id} is settled, and was not paid"));
                }
                State::Failed | State::Released | State::Settled => {}
            }
            if claim.leased {
                return Err(format!("{id} is {state}, and somebody still works on it"));
            }
            let receipt = claim.receipt.as_ref().and_then(|raw| serde_json::from_str(raw.get()).ok());
            let receipt: serde_json::Value = receipt.unwrap_or_default();
            if claim.state == State::Settled && receipt["transaction"].as_str() != transfer.map(|t| t.hash.as_str()) {
                return Err(format!("{id} has the receipt {receipt}, which is not the chain's"));
            }
        }
        for transfer in self.transfers.iter().filter(|transfer| transfer.pay_to == PAY_TO) {
            let settled =
                self.claims.iter().filter(|c| nonce(c) == transfer.nonce && c.state == State::Settled).count();
            if settled != 1 {
                return Err(format!("the transfer {} belongs to {settled} settled claims", transfer.nonce));
            }
        }
        Ok(())
    }

    /// A payer that pays again only where it is asked to pays once for each call.
    fn calls(&self) -> Result<(), String> {
        let mut paid: BTreeMap<u64, u64> = BTreeMap::new();
        for transfer in self.transfers.iter().filter(|transfer| transfer.pay_to == PAY_TO) {
            let own = self.payments.iter().find(|own| own.paid.nonce == transfer.nonce);
            let own = own.ok_or_else(|| format!("nobody signed {}", transfer.nonce))?;
            // One that it tried for another call may have bought that.
            if !own.bent {
                *paid.entry(own.call.n).or_default() += 1;
            }
        }
        match paid.iter().find(|(_, times)| **times > 1) {
            Some((n, times)) => Err(format!("the call {n} was paid {times} times")),
            None => Ok(()),
        }
    }

    fn money(&self) -> Result<(), String> {
        let settled = self.claims.iter().filter(|claim| claim.state == State::Settled).count() as i128;
        let elsewhere: i128 = self.transfers.iter().filter(|t| t.pay_to != PAY_TO).map(|t| t.amount).sum();
        let gone = self.balances.0 - self.balances.1;
        match gone == settled * i128::from(PRICE) + elsewhere {
            true => Ok(()),
            false => Err(format!("{gone} left the payers, {settled} claims are settled, {elsewhere} went elsewhere")),
        }
    }

    /// What is sold after it ran had an output; and nothing ran more often than the table lets it.
    fn runs(&self) -> Result<(), String> {
        for claim in self.claims.iter().filter(|claim| claim.state == State::Settled) {
            let id = claim.identity.short();
            let own: Vec<_> = self.runs.iter().filter(|run| run.identity == claim.identity).collect();
            let upfront = claim.offer.get().contains("upfront");
            if !upfront && !own.iter().any(|run| run.end == Some(End::Output)) {
                return Err(format!("{id} was charged, and nothing gave an output"));
            }
            if claim.runs > 3 || upfront && own.len() > 4 {
                return Err(format!("{id} ran {} times, {} of them free", own.len(), claim.runs));
            }
        }
        Ok(())
    }
}
