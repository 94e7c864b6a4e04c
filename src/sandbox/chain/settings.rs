//! The network's settings as ledger entries, which `getLedgerEntries` shows and from which the host takes its own
//! configuration. Fees and limits are public network values as remembered, not read from a network: the formulas are
//! the real ones, the prices are not checked.

use stellar_xdr::{
    ConfigSettingContractBandwidthV0, ConfigSettingContractComputeV0, ConfigSettingContractEventsV0,
    ConfigSettingContractHistoricalDataV0, ConfigSettingContractLedgerCostExtV0, ConfigSettingContractLedgerCostV0,
    ConfigSettingEntry, StateArchivalSettings,
};

use super::costs::cost_params;

/// Ledgers, as on the public network: about a day.
pub const MIN_TEMPORARY_TTL: u32 = 17_280;
/// Ledgers: about half a year. No authorization may expire later than this from now.
pub const MAX_ENTRY_TTL: u32 = 3_110_400;

/// `min_temporary_ttl` in ledgers: how long a used nonce is kept at least.
pub fn settings(min_temporary_ttl: u32) -> Result<Vec<ConfigSettingEntry>, stellar_xdr::Error> {
    let (cpu, memory) = cost_params()?;
    Ok(vec![
        ConfigSettingEntry::ContractMaxSizeBytes(131_072),
        ConfigSettingEntry::ContractComputeV0(ConfigSettingContractComputeV0 {
            ledger_max_instructions: 500_000_000,
            tx_max_instructions: 100_000_000,
            fee_rate_per_instructions_increment: 7,
            tx_memory_limit: 41_943_040,
        }),
        ConfigSettingEntry::ContractLedgerCostV0(ConfigSettingContractLedgerCostV0 {
            ledger_max_disk_read_entries: 1_000,
            ledger_max_disk_read_bytes: 7_000_000,
            ledger_max_write_ledger_entries: 500,
            ledger_max_write_bytes: 286_720,
            tx_max_disk_read_entries: 100,
            tx_max_disk_read_bytes: 200_000,
            tx_max_write_ledger_entries: 50,
            tx_max_write_bytes: 132_096,
            fee_disk_read_ledger_entry: 1_563,
            fee_write_ledger_entry: 2_500,
            fee_disk_read1_kb: 447,
            soroban_state_target_size_bytes: 3_000_000_000,
            rent_fee1_kb_soroban_state_size_low: 1_000,
            rent_fee1_kb_soroban_state_size_high: 1_000,
            soroban_state_rent_fee_growth_factor: 0,
        }),
        ConfigSettingEntry::ContractLedgerCostExtV0(ConfigSettingContractLedgerCostExtV0 {
            tx_max_footprint_entries: 100,
            fee_write1_kb: 875,
        }),
        ConfigSettingEntry::ContractHistoricalDataV0(ConfigSettingContractHistoricalDataV0 {
            fee_historical1_kb: 4_059,
        }),
        ConfigSettingEntry::ContractEventsV0(ConfigSettingContractEventsV0 {
            tx_max_contract_events_size_bytes: 16_384,
            fee_contract_events1_kb: 2_500,
        }),
        ConfigSettingEntry::ContractBandwidthV0(ConfigSettingContractBandwidthV0 {
            ledger_max_txs_size_bytes: 266_240,
            tx_max_size_bytes: 132_096,
            fee_tx_size1_kb: 406,
        }),
        ConfigSettingEntry::ContractCostParamsCpuInstructions(cpu),
        ConfigSettingEntry::ContractCostParamsMemoryBytes(memory),
        ConfigSettingEntry::StateArchival(StateArchivalSettings {
            max_entry_ttl: MAX_ENTRY_TTL,
            min_temporary_ttl,
            min_persistent_ttl: 2_073_600,
            persistent_rent_rate_denominator: 1_215,
            temp_rent_rate_denominator: 2_430,
            max_entries_to_archive: 1_000,
            live_soroban_state_size_window_sample_size: 30,
            live_soroban_state_size_window_sample_period: 64,
            eviction_scan_size: 1_000_000,
            starting_eviction_scan_level: 7,
        }),
        ConfigSettingEntry::LiveSorobanStateSizeWindow(vec![0; 30].try_into()?),
    ])
}
