//! The Soroban host: simulation against what a node has seen, and execution with exactly the declared footprint. The
//! host itself checks signatures, nonces, expirations and balances; nothing here decides any of it.
//!
//! Not like the real network: nothing is archived or restored, and the limit on bytes read is not enforced.

use std::rc::Rc;

use soroban_env_host::budget::Budget;
use soroban_env_host::e2e_invoke::{
    LedgerEntryChange as HostChange, RecordingInvocationAuthMode, TtlLedgerEntryMeta, entry_size_for_rent,
    extract_rent_changes, invoke_host_function,
};
use soroban_env_host::fees::compute_rent_fee;
use soroban_env_host::storage::{EntryWithLiveUntil, SnapshotSource, Storage};
use soroban_env_host::{Host, HostError, LedgerInfo, ModuleCache};
use soroban_simulation::simulation::{
    InvokeHostFunctionSimulationResult, SimulationAdjustmentConfig, simulate_invoke_host_function_op,
};
use stellar_xdr::{
    AccountId, ContractEvent, DiagnosticEvent, HostFunction, LedgerEntry, LedgerEntryChange, LedgerEntryChanges,
    LedgerEntryData, LedgerKey, ReadXdr, ScVal, SorobanAuthorizationEntry, SorobanResources,
};

use super::ledger::{Chain, PROTOCOL, Shared, lock};
use super::xdr::{LIMITS, encode};

/// Which authorization a simulation takes or makes.
pub enum Auth {
    /// Records what the root invocation needs, in the plain or in the newer (CAP-71) credential arm.
    Record { address_v2: bool, root_only: bool },
    /// Checks what is given, signatures included.
    Enforce(Vec<SorobanAuthorizationEntry>),
}

#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    #[error("ledger {0} is not kept")]
    Ledger(u32),
    #[error("{0}")]
    Host(String),
}

/// Runs outside the lock: entries are read one by one, as they were in ledger `at`.
pub fn simulate(
    chain: &Shared,
    at: u32,
    function: HostFunction,
    auth: Auth,
    source: &AccountId,
    seed: [u8; 32],
) -> Result<InvokeHostFunctionSimulationResult, SimulationError> {
    let (config, info) = {
        let chain = lock(chain);
        (chain.config.clone(), chain.info(at).ok_or(SimulationError::Ledger(at))?)
    };
    let mode = match auth {
        Auth::Record { address_v2, root_only } => RecordingInvocationAuthMode::recording(root_only, address_v2),
        Auth::Enforce(entries) => RecordingInvocationAuthMode::Enforcing(entries),
    };
    simulate_invoke_host_function_op(
        Rc::new(Snapshot::new(chain.clone(), at)),
        &config,
        &SimulationAdjustmentConfig::default_adjustment(),
        &info,
        function,
        mode,
        source,
        seed,
        true,
    )
    .map_err(|error| SimulationError::Host(format!("{error:#}")))
}

/// The entries as they were when ledger `at` was closed.
pub struct Snapshot {
    chain: Shared,
    at: u32,
}

impl Snapshot {
    pub fn new(chain: Shared, at: u32) -> Snapshot {
        Snapshot { chain, at }
    }
}

impl SnapshotSource for Snapshot {
    fn get(&self, key: &Rc<LedgerKey>) -> Result<Option<EntryWithLiveUntil>, HostError> {
        let chain = lock(&self.chain);
        Ok(chain.stored(key, self.at).map(|stored| (Rc::new(stored.entry.clone()), stored.live_until)))
    }
}

/// What a successful invocation did, not yet written anywhere.
pub struct Executed {
    pub value: ScVal,
    pub events: Vec<ContractEvent>,
    pub changes: LedgerEntryChanges,
    pub writes: Vec<Write>,
    /// Stroops.
    pub rent_fee: i64,
    /// Bytes of events and return value, which the refundable fee pays.
    pub event_bytes: u32,
}

pub struct Write {
    pub key: LedgerKey,
    /// `None` removes.
    pub entry: Option<LedgerEntry>,
    pub live_until: Option<u32>,
    /// Only its life changed; the entry does not count as written.
    pub only_life: bool,
}

/// One invocation, as its transaction declares it.
pub struct Invocation<'a> {
    pub function: &'a HostFunction,
    pub auth: &'a [SorobanAuthorizationEntry],
    pub resources: &'a SorobanResources,
    pub source: &'a AccountId,
    /// What contracts draw their randomness from.
    pub seed: [u8; 32],
}

/// Runs it in the ledger that is being closed.
pub fn execute(
    chain: &Chain,
    info: LedgerInfo,
    invocation: &Invocation<'_>,
    diagnostics: &mut Vec<DiagnosticEvent>,
) -> Result<Executed, String> {
    let Invocation { function, auth, resources, source, seed } = *invocation;
    let seq = info.sequence_number;
    let budget = Budget::try_from_configs(
        u64::from(resources.instructions),
        u64::from(chain.config.tx_memory_limit),
        chain.config.cpu_cost_params.clone(),
        chain.config.memory_cost_params.clone(),
    )
    .map_err(host)?;
    let mut entries: Vec<(Option<Vec<u8>>, Option<TtlLedgerEntryMeta>)> = Vec::new();
    for key in resources.footprint.read_only.iter().chain(resources.footprint.read_write.iter()) {
        entries.push(match chain.store.get(key) {
            None => (None, None),
            Some(stored) => {
                let bytes = encode(&stored.entry).map_err(xdr)?;
                let size = u32::try_from(bytes.len()).map_err(|_| "an entry is too large".to_owned())?;
                let life = match stored.live_until {
                    None => None,
                    Some(live_until_ledger) => Some(TtlLedgerEntryMeta {
                        live_until_ledger,
                        entry_size_for_rent: entry_size_for_rent(&Budget::default(), &stored.entry, size)
                            .map_err(host)?,
                    }),
                };
                (Some(bytes), life)
            }
        });
    }
    let auth = auth.iter().map(encode).collect::<Result<Vec<_>, _>>().map_err(xdr)?;
    let ran = invoke_host_function::<Vec<u8>, _, _>(
        &budget,
        true,
        encode(function).map_err(xdr)?,
        encode(resources).map_err(xdr)?,
        &[],
        encode(source).map_err(xdr)?,
        auth.into_iter(),
        info,
        entries.into_iter(),
        seed.to_vec(),
        diagnostics,
        None,
        modules(chain, resources).map_err(host)?,
    )
    .map_err(host)?;
    let value = ran.encoded_invoke_result.map_err(host)?;
    let event_bytes = value.len() + ran.encoded_contract_events.iter().map(Vec::len).sum::<usize>();
    let rent_fee =
        compute_rent_fee(&extract_rent_changes(&ran.ledger_changes), &chain.config.rent_fee_configuration, seq);
    let (writes, changes) = differences(chain, seq, ran.ledger_changes).map_err(xdr)?;
    let events = ran.encoded_contract_events.iter().map(|event| ContractEvent::from_xdr(event, LIMITS));
    Ok(Executed {
        value: ScVal::from_xdr(value, LIMITS).map_err(xdr)?,
        events: events.collect::<Result<_, _>>().map_err(xdr)?,
        changes,
        writes,
        rent_fee,
        event_bytes: u32::try_from(event_bytes).map_err(|_| "too many events".to_owned())?,
    })
}

/// The footprint's contracts, parsed: validators keep them so, and a simulation charges no more than that.
fn modules(chain: &Chain, resources: &SorobanResources) -> Result<Option<ModuleCache>, HostError> {
    let footprint = &resources.footprint;
    let stored = footprint.read_only.iter().chain(footprint.read_write.iter()).filter_map(|key| chain.store.get(key));
    let codes: Vec<_> = stored
        .filter_map(|stored| match &stored.entry.data {
            LedgerEntryData::ContractCode(code) => Some(code.code.as_slice()),
            _ => None,
        })
        .collect();
    if codes.is_empty() {
        return Ok(None);
    }
    // Outside of every transaction's budget.
    let context = Host::with_storage_and_budget(Storage::default(), Budget::default());
    let cache = ModuleCache::new(&context)?;
    for code in codes {
        cache.parse_and_cache_module_simple(&context, PROTOCOL, code)?;
    }
    Ok(Some(cache))
}

fn differences(
    chain: &Chain,
    seq: u32,
    changes: Vec<HostChange>,
) -> Result<(Vec<Write>, LedgerEntryChanges), stellar_xdr::Error> {
    let (mut writes, mut shown) = (Vec::new(), Vec::new());
    for change in changes {
        let key = LedgerKey::from_xdr(&change.encoded_key, LIMITS)?;
        let old = chain.store.get(&key);
        let live_until = change.ttl_change.as_ref().map(|life| life.new_live_until_ledger);
        if change.read_only {
            if let Some(old) = old
                && live_until > old.live_until
            {
                writes.push(Write { key, entry: Some(old.entry.clone()), live_until, only_life: true });
            }
            continue;
        }
        let new = match change.encoded_new_value {
            Some(bytes) => {
                let mut entry = LedgerEntry::from_xdr(bytes, LIMITS)?;
                entry.last_modified_ledger_seq = seq;
                Some(entry)
            }
            None => None,
        };
        if let Some(old) = old {
            shown.push(LedgerEntryChange::State(old.entry.clone()));
        }
        match (old, &new) {
            (Some(_), Some(new)) => shown.push(LedgerEntryChange::Updated(new.clone())),
            (None, Some(new)) => shown.push(LedgerEntryChange::Created(new.clone())),
            (Some(_), None) => shown.push(LedgerEntryChange::Removed(key.clone())),
            (None, None) => continue,
        }
        writes.push(Write { key, entry: new, live_until, only_life: false });
    }
    Ok((writes, LedgerEntryChanges(shown.try_into()?)))
}

/// The first lines of the host's report, which name the error and its events.
fn host(error: HostError) -> String {
    let text = format!("{error:?}");
    text.lines().take(12).collect::<Vec<_>>().join("\n").chars().take(2_000).collect()
}

fn xdr(error: stellar_xdr::Error) -> String {
    format!("XDR: {error}")
}
