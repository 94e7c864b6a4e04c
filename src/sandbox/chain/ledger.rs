//! The chain as plain data: entries, the queue of sent transactions, and the closed ledgers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use soroban_env_host::LedgerInfo;
use soroban_simulation::NetworkConfig;
use stellar_xdr::{
    AccountEntry, AccountEntryExt, AccountId, Asset, ContractEvent, ContractId, DiagnosticEvent, LedgerEntryData,
    LedgerKey, SequenceNumber, Thresholds, TransactionEnvelope, TransactionMeta, TransactionResult,
    TransactionResultResult, TrustLineEntry, TrustLineEntryExt, TrustLineFlags,
};

use super::admission::{self, Parts};
use super::apply;
use super::store::{Store, Stored, Undo};
use super::xdr::{account_key, entry, sha256, trustline_asset, trustline_key};

pub const PROTOCOL: u32 = 30;
pub const BASE_RESERVE: u32 = 5_000_000;
/// The number of the first ledger.
pub const FIRST: u32 = 1_000;
/// Ledgers that are kept whatever the retention is, so that nodes may lag and simulations under way can finish.
pub const KEPT: u32 = 1_024;

pub type Shared = Arc<Mutex<Chain>>;

/// A panic under the lock ends one request, not the network.
pub fn lock(chain: &Shared) -> MutexGuard<'_, Chain> {
    chain.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct Chain {
    pub config: Arc<NetworkConfig>,
    pub passphrase: String,
    pub network_id: [u8; 32],
    pub asset: Asset,
    /// The Stellar Asset Contract of `asset`.
    pub contract: ContractId,
    pub limits: Limits,
    /// The newest closed ledger.
    pub seq: u32,
    pub store: Store,
    pub transfers: Vec<Transfer>,
    /// Oldest first; the last one is `seq`.
    closed: VecDeque<Closed>,
    /// Ledger and place in it.
    index: BTreeMap<[u8; 32], (u32, usize)>,
    queue: VecDeque<Sent>,
}

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How many ledgers a node answers for.
    pub retention: u32,
    /// How many transactions wait for a ledger at most.
    pub queue: usize,
    pub transactions_per_ledger: usize,
}

pub struct Closed {
    pub seq: u32,
    /// Unix seconds.
    pub time: u64,
    pub transactions: Vec<Included>,
    undo: Undo,
}

/// A transaction in a closed ledger.
pub struct Included {
    pub hash: [u8; 32],
    pub envelope: TransactionEnvelope,
    pub success: bool,
    pub result: TransactionResult,
    pub meta: TransactionMeta,
    pub events: Vec<ContractEvent>,
    pub diagnostics: Vec<DiagnosticEvent>,
    /// The host's own words where it failed.
    pub error: Option<String>,
}

/// Money that moved, for audits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    pub payer: String,
    pub pay_to: String,
    pub amount: i128,
    /// Hex.
    pub transaction: String,
    pub ledger: u32,
    /// The nonce of the payer's authorization, where one stood behind it.
    pub nonce: Option<i64>,
}

pub struct Sent {
    pub hash: [u8; 32],
    pub envelope: TransactionEnvelope,
}

/// What a node answers to a sent transaction.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission {
    Pending,
    Duplicate,
    /// The queue is full, or has a transaction of the same source already.
    TryAgainLater,
    Refused(TransactionResultResult),
}

impl Chain {
    pub fn new(
        config: NetworkConfig,
        passphrase: &str,
        asset: Asset,
        contract: ContractId,
        limits: Limits,
        time: u64,
    ) -> Chain {
        let first = Closed { seq: FIRST, time, transactions: Vec::new(), undo: Undo::new() };
        Chain {
            config: Arc::new(config),
            passphrase: passphrase.to_owned(),
            network_id: sha256(passphrase),
            asset,
            contract,
            limits,
            seq: FIRST,
            store: Store::default(),
            transfers: Vec::new(),
            closed: VecDeque::from([first]),
            index: BTreeMap::new(),
            queue: VecDeque::new(),
        }
    }

    /// Takes a transaction for the next ledger; `now` in unix seconds.
    pub fn send(&mut self, envelope: TransactionEnvelope, hash: [u8; 32], now: u64) -> Admission {
        if self.index.contains_key(&hash) || self.queue.iter().any(|sent| sent.hash == hash) {
            return Admission::Duplicate;
        }
        let source = match Parts::of(&envelope) {
            Ok(parts) => parts.source(),
            Err(refusal) => return Admission::Refused(refusal),
        };
        let waits = |sent: &Sent| Parts::of(&sent.envelope).is_ok_and(|parts| parts.source() == source);
        if self.queue.len() >= self.limits.queue || self.queue.iter().any(waits) {
            return Admission::TryAgainLater;
        }
        if let Err(refusal) = admission::check(self, &envelope, self.next_time(now)) {
            return Admission::Refused(refusal);
        }
        self.queue.push_back(Sent { hash, envelope });
        Admission::Pending
    }

    /// Closes one ledger with what waits for it; `now` in unix seconds. What has become impossible meanwhile is
    /// dropped, as validators do: it is in no ledger ever.
    pub fn close(&mut self, now: u64) {
        let time = self.next_time(now);
        let seq = self.seq.saturating_add(1);
        self.store.evict(seq);
        let mut transactions: Vec<Included> = Vec::new();
        while transactions.len() < self.limits.transactions_per_ledger
            && let Some(sent) = self.queue.pop_front()
        {
            let applied = admission::check(self, &sent.envelope, time).and_then(|()| {
                let place = transactions.len();
                apply::apply(self, seq, time, place, sent)
            });
            match applied {
                Ok(included) => {
                    self.index.insert(included.hash, (seq, transactions.len()));
                    self.note_transfers(seq, &included);
                    if let Some(error) = &included.error {
                        tracing::debug!(transaction = hex::encode(included.hash), error, "a transaction failed");
                    }
                    transactions.push(included);
                }
                Err(refusal) => tracing::debug!(?refusal, "a transaction was dropped from the queue"),
            }
        }
        let undo = self.store.take_undo();
        self.closed.push_back(Closed { seq, time, transactions, undo });
        self.seq = seq;
        while self.closed.len() > self.limits.retention.max(KEPT) as usize {
            for old in self.closed.pop_front().into_iter().flat_map(|ledger| ledger.transactions) {
                self.index.remove(&old.hash);
            }
        }
    }

    fn note_transfers(&mut self, ledger: u32, included: &Included) {
        let moved = included.events.iter().filter_map(|event| apply::transfer(event, &self.contract));
        self.transfers.extend(moved.map(|(payer, pay_to, amount)| Transfer {
            nonce: apply::nonce(&included.envelope, &payer),
            payer: payer.to_string(),
            pay_to: pay_to.to_string(),
            amount,
            transaction: hex::encode(included.hash),
            ledger,
        }));
    }

    /// Close times are the wall clock's, may repeat, and never go back.
    fn next_time(&self, now: u64) -> u64 {
        self.closed.back().map_or(now, |last| last.time.max(now))
    }

    /// A closed ledger, if it is kept.
    pub fn ledger(&self, seq: u32) -> Option<&Closed> {
        let first = self.closed.front()?.seq;
        self.closed.get(seq.checked_sub(first)? as usize)
    }

    /// The oldest ledger that a node answers for whose newest one is `at`.
    pub fn oldest(&self, at: u32) -> u32 {
        at.saturating_sub(self.limits.retention.saturating_sub(1)).max(FIRST)
    }

    /// A transaction that a node has seen whose newest ledger is `at`.
    pub fn transaction(&self, hash: &[u8; 32], at: u32) -> Option<(&Closed, usize, &Included)> {
        let &(seq, place) = self.index.get(hash)?;
        if seq > at || seq < self.oldest(at) {
            return None;
        }
        let ledger = self.ledger(seq)?;
        Some((ledger, place, ledger.transactions.get(place)?))
    }

    /// An entry as it was when ledger `at` was closed.
    pub fn stored(&self, key: &LedgerKey, at: u32) -> Option<&Stored> {
        for seq in at.saturating_add(1)..=self.seq {
            if let Some(old) = self.ledger(seq).and_then(|ledger| ledger.undo.get(key)) {
                return old.as_ref();
            }
        }
        self.store.get(key)
    }

    /// What the host is told about ledger `at`.
    pub fn info(&self, at: u32) -> Option<LedgerInfo> {
        Some(self.info_of(at, self.ledger(at)?.time))
    }

    pub fn info_of(&self, seq: u32, time: u64) -> LedgerInfo {
        LedgerInfo {
            protocol_version: PROTOCOL,
            sequence_number: seq,
            timestamp: time,
            network_id: self.network_id,
            base_reserve: BASE_RESERVE,
            min_temp_entry_ttl: self.config.min_temp_entry_ttl,
            min_persistent_entry_ttl: self.config.min_persistent_entry_ttl,
            max_entry_ttl: self.config.max_entry_ttl,
        }
    }

    pub fn account(&self, id: &AccountId) -> Option<&AccountEntry> {
        match &self.store.get(&account_key(id))?.entry.data {
            LedgerEntryData::Account(account) => Some(account),
            _ => None,
        }
    }

    /// Atomic units; `None` without a trustline.
    pub fn balance(&self, id: &AccountId) -> Option<i64> {
        match &self.store.get(&trustline_key(id, &self.asset))?.entry.data {
            LedgerEntryData::Trustline(line) => Some(line.balance),
            _ => None,
        }
    }

    /// Creates the account, or sets its balance. Every node sees it at once, also one that lags.
    pub fn fund(&mut self, id: &AccountId, stroops: i64) {
        let seq_num = self.account(id).map_or(i64::from(self.seq) << 32, |account| account.seq_num.0);
        let account = AccountEntry {
            account_id: id.clone(),
            balance: stroops,
            seq_num: SequenceNumber(seq_num),
            num_sub_entries: 0,
            inflation_dest: None,
            flags: 0,
            home_domain: Default::default(),
            thresholds: Thresholds([1, 0, 0, 0]),
            signers: Default::default(),
            ext: AccountEntryExt::V0,
        };
        let stored = Stored { entry: entry(self.seq, LedgerEntryData::Account(account)), live_until: None };
        self.store.put_ever(account_key(id), stored);
    }

    /// Creates the trustline, or sets its balance in atomic units. Every node sees it at once.
    pub fn trust(&mut self, id: &AccountId, balance: i64) {
        let line = TrustLineEntry {
            account_id: id.clone(),
            asset: trustline_asset(&self.asset),
            balance,
            limit: i64::MAX,
            flags: TrustLineFlags::AuthorizedFlag as u32,
            ext: TrustLineEntryExt::V0,
        };
        let stored = Stored { entry: entry(self.seq, LedgerEntryData::Trustline(line)), live_until: None };
        self.store.put_ever(trustline_key(id, &self.asset), stored);
    }
}
