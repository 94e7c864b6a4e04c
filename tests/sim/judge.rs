//! Judged from outside, on the chain, the ledger's file, the signer's book and what the agents were told.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tollway::ledger::{Audit, Payment, State};
use tollway::money::PaymentId;

use super::agent::{Attempt, Plan, reference};
use super::buyer::Told;
use super::chain::{ASSET, PAY_TO, Transfer};
use super::seller;
use super::signer::Signature;

/// What an agent may spend, atomic units.
#[derive(Debug, Clone, Copy)]
pub struct Caps {
    pub agent_day: u64,
    pub session: u64,
    pub total_day: u64,
}

/// Everything there is to see when the world has come to rest.
pub struct Evidence {
    pub rows: Vec<Payment>,
    /// Unix milliseconds by payment identifier: after it the owner signs nothing.
    pub sign_before: BTreeMap<String, u64>,
    /// When its row was taken from an owner whose lease had expired, unix milliseconds by payment identifier.
    pub lease_lost: BTreeMap<String, u64>,
    /// Recoveries that began: the payment, and when.
    pub recoveries: Vec<(PaymentId, u64)>,
    pub audit: Audit,
    pub transfers: Vec<Transfer>,
    /// The newest ledger.
    pub newest: u32,
    pub signatures: Vec<Signature>,
    /// Nonces whose signed entry left the buyer.
    pub shown: BTreeSet<i64>,
    /// Payments of which the seller said something untrue.
    pub lied: BTreeSet<String>,
    pub other_bytes: Vec<String>,
    pub attempts: Vec<Attempt>,
    /// From the end of a `suspend` to the beginning of the `resume`, unix milliseconds, by agent.
    pub suspensions: Vec<(&'static str, u64, u64)>,
    pub caps: Caps,
    pub price: u64,
    /// A node told ledger numbers that had not come: a row may then wait for one.
    pub ran_ahead: bool,
}

/// The logical call as the ledger knows it.
pub fn call_hash(n: u64) -> [u8; 32] {
    Sha256::digest(format!(r#"{{"arguments":{{"n":{n}}},"ref":"{}"}}"#, reference())).into()
}

fn nonce(row: &Payment) -> i64 {
    row.authorization.nonce.parse().unwrap_or(-1)
}

impl Evidence {
    /// The first promise that does not hold.
    pub fn judge(&self) -> Result<(), String> {
        self.rows_and_transfers()?;
        self.calls()?;
        self.caps()?;
        self.signatures()?;
        for attempt in &self.attempts {
            self.told(attempt)?;
        }
        for row in &self.rows {
            let stopped = self.suspensions.iter().any(|(agent, from, until)| {
                *agent == row.agent.as_str() && row.created_ms > *from && row.created_ms < *until
            });
            if stopped {
                return Err(format!("{} was reserved while its agent was suspended", row.payment_id.short()));
            }
        }
        for (id, at) in &self.recoveries {
            let agent = self.rows.iter().find(|row| row.payment_id == *id).map(|row| row.agent.as_str());
            if self.suspensions.iter().any(|(stopped, from, until)| agent == Some(stopped) && at > from && at < until) {
                return Err(format!("{} was sent again while its agent was suspended", id.short()));
            }
        }
        for difference in &self.audit.differences {
            let about_a_liar = self.lied.iter().any(|id| difference.detail.contains(&id[..8]));
            if difference.what != "late_success" || !about_a_liar {
                return Err(format!("the audit finds {}: {}", difference.what, difference.detail));
            }
        }
        match self.other_bytes.first() {
            Some(id) => Err(format!("other bytes were sent for {id}")),
            None => Ok(()),
        }
    }

    fn transfer(&self, row: &Payment) -> Option<&Transfer> {
        self.transfers.iter().find(|transfer| transfer.nonce == nonce(row))
    }

    fn lied_about(&self, row: &Payment) -> bool {
        self.lied.contains(&row.payment_id.to_hex())
    }

    fn rows_and_transfers(&self) -> Result<(), String> {
        for transfer in &self.transfers {
            let rows: Vec<_> = self.rows.iter().filter(|row| nonce(row) == transfer.nonce).collect();
            let [row] = rows.as_slice() else {
                return Err(format!("the transfer {} belongs to {} rows", transfer.hash, rows.len()));
            };
            let amount = row.reserved.to_i128();
            if transfer.pay_to != PAY_TO || transfer.asset != ASSET || Some(transfer.amount) != amount {
                return Err(format!("the transfer {} is not what was reserved", transfer.hash));
            }
            if row.state != State::Settled {
                return Err(format!("{} moved money and is {}", row.payment_id.short(), row.state.as_str()));
            }
        }
        for row in &self.rows {
            let id = row.payment_id.short();
            let waits = self.ran_ahead && row.authorization.dead_after > u64::from(self.newest);
            if row.state.is_open() && !waits {
                return Err(format!("{id} is still {} ({:?})", row.state.as_str(), row.reason));
            }
            if row.state != State::Settled {
                continue;
            }
            match self.transfer(row) {
                None if !self.lied_about(row) => return Err(format!("{id} is settled and moved nothing")),
                Some(transfer)
                    if !self.lied_about(row) && row.transaction.as_ref().is_some_and(|t| *t != transfer.hash) =>
                {
                    return Err(format!("{id} is booked under another transaction"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// At most one transfer for each logical call. Without a key a call that was answered is over and the next is
    /// another, so one that was asked at the same time as the answered one, and had no answer, may have paid too.
    fn calls(&self) -> Result<(), String> {
        let plans: BTreeMap<u64, &Plan> = self.attempts.iter().map(|a| (a.plan.n, &a.plan)).collect();
        for (n, plan) in plans {
            let hash = call_hash(n);
            let paid = self.rows.iter().filter(|r| r.call_hash == hash && self.transfer(r).is_some()).count();
            let answered: BTreeSet<_> = self
                .attempts
                .iter()
                .filter(|a| a.plan.n == n)
                .filter_map(|a| a.told.receipt()?["paymentIdentifier"].as_str())
                .collect();
            let of_this: Vec<_> = self.attempts.iter().filter(|a| a.plan.n == n).collect();
            let overlaps = |a: &Attempt| {
                let beside = |b: &&&Attempt| b.from_ms <= a.until_ms && a.from_ms <= b.until_ms;
                of_this.iter().filter(beside).count() > 1
            };
            let raced = of_this.iter().filter(|a| a.told.receipt().is_none() && overlaps(a)).count();
            let most = match (&plan.key, answered.len()) {
                (Some(_), _) | (None, 0) => 1,
                (None, answered) => answered + raced,
            };
            if paid > most {
                return Err(format!("the call {n} moved money {paid} times"));
            }
        }
        Ok(())
    }

    fn caps(&self) -> Result<(), String> {
        let mut out: BTreeMap<(String, u64), u64> = BTreeMap::new();
        for row in self.rows.iter().filter(|row| self.transfer(row).is_some()) {
            let day = row.created_ms / 86_400_000;
            *out.entry((row.agent.to_string(), day)).or_default() += self.price;
            *out.entry(("total".into(), day)).or_default() += self.price;
        }
        for ((subject, _), moved) in out {
            let most = if subject == "total" { self.caps.total_day } else { self.caps.agent_day };
            if moved > most {
                return Err(format!("{subject} spent {moved} of {most} in a day"));
            }
        }
        Ok(())
    }

    fn signatures(&self) -> Result<(), String> {
        let rows: BTreeMap<i64, &Payment> = self.rows.iter().map(|row| (nonce(row), row)).collect();
        if let Some(nonce) = self.shown.iter().find(|nonce| !rows.contains_key(nonce)) {
            return Err(format!("the nonce {nonce} was signed without a row"));
        }
        let mut by_payment: BTreeMap<&str, i64> = BTreeMap::new();
        for signature in &self.signatures {
            let Some(row) = rows.get(&signature.nonce) else {
                return Err(format!("the nonce {} was signed without a row", signature.nonce));
            };
            if *by_payment.entry(&signature.payment).or_insert(signature.nonce) != signature.nonce {
                return Err(format!("{} was signed twice", signature.payment));
            }
            let until = self.sign_before.get(&row.payment_id.to_hex()).copied().unwrap_or(0);
            // Whoever finds a lease expired takes the row out of its owner's hands: nothing is signed for it from then on.
            let lost = self.lease_lost.get(&row.payment_id.to_hex()).copied().unwrap_or(u64::MAX);
            if signature.unix_ms > lost {
                return Err(format!("{} was signed after its lease was lost", row.payment_id.short()));
            }
            if signature.unix_ms > until {
                let late = signature.unix_ms - until;
                return Err(format!("{} was signed {late} ms after its time", row.payment_id.short()));
            }
        }
        Ok(())
    }

    fn told(&self, attempt: &Attempt) -> Result<(), String> {
        let n = attempt.plan.n;
        let row = |id: &Value| {
            let id = id.as_str()?;
            self.rows.iter().find(|row| row.payment_id.to_hex() == id)
        };
        if let Some(receipt) = attempt.told.receipt() {
            let row = row(&receipt["paymentIdentifier"]).ok_or(format!("the receipt of {n} names no payment"))?;
            if row.call_hash != call_hash(n) {
                return Err(format!("the receipt of {n} is another call's"));
            }
            if row.state != State::Settled && !self.lied_about(row) {
                return Err(format!("{n} was told that it is paid, and its row is {}", row.state.as_str()));
            }
            if !self.lied_about(row) {
                let transfer = self.transfer(row).ok_or(format!("{n} was told that it is paid, and nothing moved"))?;
                let told = receipt["transaction"].as_str();
                if told.is_some_and(|told| told != transfer.hash) || receipt["payTo"] != PAY_TO {
                    return Err(format!("the receipt of {n} is not the chain's"));
                }
            }
            let expected = seller::output(&serde_json::json!({"n": n}), &row.payment_id.to_hex());
            if attempt.told.text().is_some_and(|text| text != expected) {
                return Err(format!("{n} got the output {:?}", attempt.told.text()));
            }
        }
        let Told::Problem(problem) = &attempt.told else { return Ok(()) };
        if problem["details"]["moneyMayHaveMoved"] != "no" {
            return Ok(());
        }
        if let Some(row) = row(&problem["details"]["paymentIdentifier"]) {
            return match self.transfer(row) {
                Some(_) => Err(format!("{n} was told that nothing moved ({}), and it did", attempt.told.reason())),
                None => Ok(()),
            };
        }
        // No payment is named: what this attempt alone reserved must not have moved.
        let alone = self.attempts.iter().filter(|a| a.plan.n == n).all(|other| {
            other.until_ms < attempt.from_ms
                || other.from_ms > attempt.until_ms
                || (other.from_ms, other.until_ms) == (attempt.from_ms, attempt.until_ms)
        });
        let during = attempt.from_ms..=attempt.until_ms;
        let moved = self
            .rows
            .iter()
            .find(|r| r.call_hash == call_hash(n) && during.contains(&r.created_ms) && self.transfer(r).is_some());
        match moved {
            Some(row) if alone => Err(format!(
                "{n} was told that nothing moved ({}), and {} did",
                attempt.told.reason(),
                row.payment_id.short()
            )),
            _ => Ok(()),
        }
    }
}
