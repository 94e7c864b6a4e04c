//! `tollway signer`: the external signer as a process of its own. It holds the key, decodes what it is asked to sign,
//! and signs what its own policy allows: a second ceiling, which nobody who has the MCP process can raise.
//!
//! A request is decided in this order, and the first no ends it: form, decoded transfer, policy, `signBefore`, life on
//! the chain, and last its own book (nonce and day), which counts it before anything is signed and never gives it back.
//! Every decision about a request of a known caller is a row of the book and a line of the log.

pub mod callers;
pub mod policy;
pub mod probe;
pub mod server;
pub mod store;
pub mod tls;
pub mod transfer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use tokio::time::Instant;

use self::callers::Callers;
use self::policy::{NetworkPolicy, No, Policy};
use self::store::{Line, Store, Verdict, Want};
use self::transfer::Asked;
use super::keystore::Seed;
use super::wire;
use crate::chain::stellar::Stellar;
use crate::money::{Amount, Network};
use crate::ports::World;
use crate::telemetry;

/// A chain RPC that takes longer is not waited for: the caller has seconds.
const LEDGER_WITHIN: Duration = Duration::from_secs(5);
/// As much of a caller's words as is repeated.
const PAYMENT: usize = 16;

/// What a signer is made of.
pub struct Parts {
    pub world: World,
    pub seed: Seed,
    pub policy: Policy,
    /// Of every network whose policy takes its ledger from an RPC.
    pub chains: BTreeMap<Network, Arc<Stellar>>,
    pub store: Store,
    pub callers: Callers,
}

pub struct Role {
    world: World,
    key: SigningKey,
    address: String,
    policy: Policy,
    chains: BTreeMap<Network, Arc<Stellar>>,
    pub store: Store,
    pub callers: Callers,
}

/// What was decided of one request, as `--dry-run` shows it.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Of the decoded authorization, where it is one of ours.
    pub network: Option<Network>,
    /// `None`: it could not be read.
    pub asked: Option<Asked>,
    pub payment: Option<String>,
    pub outcome: Result<Verdict, No>,
}

impl Role {
    pub fn new(parts: Parts) -> Role {
        let Parts { world, seed, policy, chains, store, callers } = parts;
        for (network, of) in &policy.networks {
            for (asset, of) in &of.assets {
                if let Some(cap) = of.per_day {
                    telemetry::SIGNER_DAY_CAP.set([network.as_str(), asset], number(cap));
                }
            }
        }
        Role { world, key: seed.key(), address: seed.address(), policy, chains, store, callers }
    }

    /// `G…`
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Decides, counts, and signs: the base64 of the 64-byte signature.
    pub async fn sign(&self, caller: &str, body: &[u8]) -> Result<String, No> {
        let began = Instant::now();
        let decided = self.decide(caller, body, false).await;
        let mut outcome = decided.outcome.clone();
        let line = Line {
            caller,
            payment: decided.payment.as_deref(),
            network: decided.network.as_ref(),
            asked: decided.asked.as_ref(),
        };
        match &decided.outcome {
            Ok(_) => {
                // The database may have taken long: the caller may be sure that nothing is signed any more.
                if sign_before(body).is_some_and(|limit| self.world.unix_ms() >= limit) {
                    self.written(self.store.withheld(&line, No::TooLate).await, "withheld");
                    outcome = Err(No::TooLate);
                    self.tell(&line, "withheld", Some(No::TooLate));
                }
            }
            // The book wrote these where it decided them, and cannot write when it is gone.
            Err(No::DayCap | No::NonceReused | No::StoreUnavailable) if decided.asked.is_some() => {}
            Err(no) => self.written(self.store.refused(&line, *no).await, "refused"),
        }
        let word = if outcome.is_ok() { "signed" } else { "refused" };
        telemetry::SIGNER_SECONDS.observe([word], began.elapsed().as_secs_f64());
        let asked = decided.asked.as_ref();
        match (&outcome, asked) {
            (Ok(verdict), Some(asked)) => {
                let word = match verdict {
                    Verdict::Again => "repeated",
                    _ => "signed",
                };
                if let (Verdict::Fresh { signed, .. }, Some(network)) = (verdict, &decided.network) {
                    telemetry::SIGNER_DAY.set([network.as_str(), &asked.asset], number(*signed));
                }
                self.tell(&line, word, None);
                Ok(STANDARD.encode(self.key.sign(&asked.digest).to_bytes()))
            }
            (Err(no), _) => {
                if decided.outcome.is_err() {
                    self.tell(&line, "refused", Some(*no));
                }
                Err(*no)
            }
            (Ok(_), None) => Err(No::Unreadable),
        }
    }

    /// What a request would be decided as now; nothing is counted, written or signed.
    pub async fn would(&self, caller: &str, body: &[u8]) -> Decision {
        self.decide(caller, body, true).await
    }

    async fn decide(&self, caller: &str, body: &[u8], trial: bool) -> Decision {
        let mut decision = Decision { network: None, asked: None, payment: None, outcome: Err(No::Malformed) };
        let Ok(said) = wire::read::<wire::SignRequest<'_>>(body) else { return decision };
        decision.payment = claimed(&said.payment.payment_identifier);
        let asked = match transfer::read(&said.auth_entry_xdr) {
            Ok(asked) => asked,
            Err(no) => {
                decision.outcome = Err(no);
                return decision;
            }
        };
        let ours = self.policy.networks.iter().find(|(_, network)| network.id() == asked.network_id);
        decision.network = ours.map(|(name, _)| name.clone());
        decision.outcome = self.judge(caller, &said, &asked, decision.payment.as_deref(), trial).await;
        decision.asked = Some(asked);
        decision
    }

    async fn judge(
        &self,
        caller: &str,
        said: &wire::SignRequest<'_>,
        asked: &Asked,
        payment: Option<&str>,
        trial: bool,
    ) -> Result<Verdict, No> {
        let (name, network, asset) = self.policy.judge(asked, said, &self.address)?;
        if said.payment.sign_before.is_some_and(|limit| self.world.unix_ms() >= limit) {
            return Err(No::TooLate);
        }
        network.life(self.newest(name, network).await?, asked.expiration)?;
        let want = Want { caller, payment, network: name, asked, per_day: asset.per_day };
        let verdict = if trial { self.store.look(&want).await } else { self.store.reserve(&want).await };
        let verdict = verdict.map_err(|error| {
            tracing::error!(%error, "the signer's database failed: nothing is signed");
            telemetry::SIGNER_STORE_ERRORS.one(["reserve"]);
            No::StoreUnavailable
        })?;
        verdict.refusal().map_or(Ok(verdict.clone()), Err)
    }

    /// The newest ledger of a network.
    pub async fn newest(&self, name: &Network, network: &NetworkPolicy) -> Result<u64, No> {
        if let Some(sequence) = network.ledger.anchored(self.world.unix_ms()) {
            return Ok(sequence);
        }
        let chain = self.chains.get(name).ok_or(No::LedgerUnknown)?;
        match tokio::time::timeout(LEDGER_WITHIN, chain.ledger()).await {
            Ok(Ok(point)) => Ok(u64::from(point.sequence)),
            Ok(Err(error)) => {
                tracing::warn!(network = %name, %error, "the newest ledger is not known: nothing is signed");
                Err(No::LedgerUnknown)
            }
            Err(_) => Err(No::LedgerUnknown),
        }
    }

    fn written(&self, result: Result<(), crate::ledger::LedgerError>, what: &str) {
        if let Err(error) = result {
            tracing::error!(%error, what, "a decision could not be written to the signer's database");
            telemetry::SIGNER_STORE_ERRORS.one([what]);
        }
    }

    /// The line of the log, beside the row of the book.
    fn tell(&self, line: &Line<'_>, decision: &str, why: Option<No>) {
        let reason = why.map_or("", No::word);
        telemetry::SIGNER_DECISIONS.one([decision, reason]);
        let asked = line.asked;
        tracing::info!(
            decision,
            reason,
            caller = line.caller,
            payment = line.payment.unwrap_or_default(),
            network = line.network.map_or("", Network::as_str),
            asset = asked.map_or("", |a| &a.asset),
            pay_to = asked.map_or("", |a| &a.pay_to),
            amount = asked.map(|a| a.amount.to_string()).unwrap_or_default(),
            nonce = asked.map(|a| a.nonce.to_string()).unwrap_or_default(),
            expiration = asked.map(|a| a.expiration).unwrap_or_default(),
            "decided"
        );
    }
}

/// As a gauge takes it.
fn number(amount: Amount) -> f64 {
    amount.to_string().parse().unwrap_or(f64::MAX)
}

fn sign_before(body: &[u8]) -> Option<u64> {
    wire::read::<wire::SignRequest<'_>>(body).ok()?.payment.sign_before
}

/// The short form of a payment's identifier, if it is one: what a caller says goes into the log.
fn claimed(identifier: &str) -> Option<String> {
    let short: String = identifier.chars().take(PAYMENT).collect();
    let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    (short.len() == PAYMENT && short.chars().all(hex)).then_some(short)
}
