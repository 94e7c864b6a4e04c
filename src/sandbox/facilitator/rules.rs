//! What the official facilitator checks before it settles `exact` on Stellar, in its order and with its codes
//! (`@x402/stellar` 2.9.0, `exact/facilitator`). First what the payload says, then what the simulation shows, then the
//! authorization entries.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use stellar_xdr::{
    ContractEventBody, ContractEventType, DiagnosticEvent, HostFunction, InvokeHostFunctionOp, MuxedAccount,
    OperationBody, Preconditions, ReadXdr, ScAddress, ScVal, SorobanAddressCredentials, SorobanCredentials,
    SorobanTransactionData, Transaction, TransactionEnvelope, TransactionExt,
};

use crate::money::Amount;
use crate::sandbox::soroban::{Simulation, XDR};

/// A stable code of the official facilitator, and the payer as soon as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub payer: Option<String>,
}

/// `paymentRequirements`, as far as it decides something here.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Requirements {
    pub scheme: String,
    pub network: String,
    pub asset: String,
    pub amount: String,
    pub pay_to: String,
    pub max_timeout_seconds: u64,
}

/// `paymentPayload`, as far as it decides something here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Payload {
    pub x402_version: serde_json::Value,
    pub accepted: Accepted,
    pub payload: serde_json::Value,
}

#[derive(Debug, Deserialize)]
pub struct Accepted {
    pub scheme: String,
    pub network: String,
}

/// A transfer that says what the requirements ask for. Nothing is known yet about its signature.
#[derive(Debug)]
pub struct Transfer {
    pub transaction: Transaction,
    pub operation: InvokeHostFunctionOp,
    pub data: SorobanTransactionData,
    pub from: ScAddress,
    pub amount: i128,
    pub requirements: Requirements,
}

impl Transfer {
    pub fn payer(&self) -> String {
        self.from.to_string()
    }

    fn refuse(&self, reason: &'static str) -> Refusal {
        Refusal { reason, payer: Some(self.payer()) }
    }
}

/// The terms of this facilitator.
#[derive(Debug, Clone)]
pub struct Terms {
    pub network: String,
    /// Its own accounts (`G…`): they pay the fees and must never be the ones that pay for the resource.
    pub accounts: Vec<String>,
    /// Stroops.
    pub max_fee: u32,
    /// What a ledger is taken to last, to turn `maxTimeoutSeconds` into ledgers.
    pub ledger_seconds: u64,
}

/// The official tolerance between the payer's idea of the newest ledger and ours.
const LEDGER_TOLERANCE: u64 = 2;

/// Checks 1 to 11: what the payload itself says.
pub fn structure(payload: &Payload, requirements: &Requirements, terms: &Terms) -> Result<Transfer, Refusal> {
    let refuse = |reason| Refusal { reason, payer: None };
    if payload.x402_version.as_u64() != Some(2) {
        return Err(refuse("invalid_x402_version"));
    }
    if payload.accepted.scheme != "exact" || requirements.scheme != "exact" {
        return Err(refuse("unsupported_scheme"));
    }
    if payload.accepted.network != requirements.network {
        return Err(refuse("network_mismatch"));
    }
    if requirements.network != terms.network {
        return Err(refuse("invalid_network"));
    }
    let malformed = || refuse("invalid_exact_stellar_payload_malformed");
    let transaction = payload.payload.get("transaction").and_then(|t| t.as_str()).ok_or_else(malformed)?;
    let envelope = STANDARD.decode(transaction).map_err(|_| malformed())?;
    // A fee bump is none of the official facilitator's transactions either; the old envelope (V0) has no Soroban data.
    let Ok(TransactionEnvelope::Tx(envelope)) = TransactionEnvelope::from_xdr(envelope, XDR) else {
        return Err(malformed());
    };
    let transaction = envelope.tx;
    let wrong_operation = || refuse("invalid_exact_stellar_payload_wrong_operation");
    let [operation] = transaction.operations.as_slice() else { return Err(wrong_operation()) };
    let OperationBody::InvokeHostFunction(invoke) = &operation.body else { return Err(wrong_operation()) };
    let HostFunction::InvokeContract(call) = &invoke.host_function else { return Err(wrong_operation()) };
    let ours = |account: &MuxedAccount| terms.accounts.contains(&plain_account(account));
    if ours(&transaction.source_account) || operation.source_account.as_ref().is_some_and(ours) {
        return Err(refuse("invalid_exact_stellar_payload_unsafe_tx_or_op_source"));
    }
    if call.contract_address.to_string() != requirements.asset {
        return Err(refuse("invalid_exact_stellar_payload_wrong_asset"));
    }
    let wrong_function = || refuse("invalid_exact_stellar_payload_wrong_function_name");
    if call.function_name.0.as_slice() != b"transfer" {
        return Err(wrong_function());
    }
    let [ScVal::Address(from), ScVal::Address(to), ScVal::I128(amount)] = call.args.as_slice() else {
        return Err(wrong_function());
    };
    let refuse = |reason| Refusal { reason, payer: Some(from.to_string()) };
    if terms.accounts.contains(&from.to_string()) {
        return Err(refuse("invalid_exact_stellar_payload_facilitator_is_payer"));
    }
    if to.to_string() != requirements.pay_to {
        return Err(refuse("invalid_exact_stellar_payload_wrong_recipient"));
    }
    let amount = i128::from(amount);
    let asked = requirements.amount.parse::<Amount>().ok().and_then(Amount::to_i128);
    if asked != Some(amount) {
        return Err(refuse("invalid_exact_stellar_payload_wrong_amount"));
    }
    // The official one keeps the client's Soroban data when it settles, and its SDK refuses to build a transaction
    // without time bounds.
    let TransactionExt::V1(data) = &transaction.ext else {
        return Err(refuse("invalid_exact_stellar_payload_malformed"));
    };
    let bounded = match &transaction.cond {
        Preconditions::None => false,
        Preconditions::Time(_) => true,
        Preconditions::V2(conditions) => conditions.time_bounds.is_some(),
    };
    if !bounded {
        return Err(refuse("unexpected_verify_error"));
    }
    Ok(Transfer {
        operation: invoke.clone(),
        data: data.clone(),
        from: from.clone(),
        amount,
        requirements: requirements.clone(),
        transaction: transaction.clone(),
    })
}

/// Checks 12 to 15: what the simulation shows, and who has signed what until when.
pub fn simulated(transfer: &Transfer, simulation: &Simulation, latest: u32, terms: &Terms) -> Result<(), Refusal> {
    if simulation.error.is_some() || simulation.transaction_data.is_none() {
        return Err(transfer.refuse("invalid_exact_stellar_payload_simulation_failed"));
    }
    let least = simulation.min_resource_fee.as_deref().and_then(|fee| fee.parse::<u64>().ok());
    let least = least.ok_or_else(|| transfer.refuse("unexpected_verify_error"))?;
    if u64::from(transfer.transaction.fee) < least {
        return Err(transfer.refuse("invalid_exact_stellar_payload_fee_below_minimum"));
    }
    if transfer.transaction.fee > terms.max_fee {
        return Err(transfer.refuse("invalid_exact_stellar_payload_fee_exceeds_maximum"));
    }
    events(transfer, &simulation.events)?;
    authorizations(transfer, latest, terms)
}

fn events(transfer: &Transfer, events: &[String]) -> Result<(), Refusal> {
    let mut transfers = 0;
    let mut found = None;
    for event in events {
        let event =
            DiagnosticEvent::from_xdr_base64(event, XDR).map_err(|_| transfer.refuse("unexpected_verify_error"))?.event;
        if event.type_ != ContractEventType::Contract {
            continue;
        }
        let ContractEventBody::V0(body) = &event.body;
        let [ScVal::Symbol(name), from, to, ..] = body.topics.as_slice() else {
            return Err(transfer.refuse("invalid_exact_stellar_payload_event_not_transfer"));
        };
        if name.0.as_slice() != b"transfer" {
            return Err(transfer.refuse("invalid_exact_stellar_payload_event_not_transfer"));
        }
        let Some(contract) = &event.contract_id else {
            return Err(transfer.refuse("invalid_exact_stellar_payload_event_missing_contract_id"));
        };
        if contract.to_string() != transfer.requirements.asset {
            return Err(transfer.refuse("invalid_exact_stellar_payload_event_wrong_asset"));
        }
        transfers += 1;
        found = Some((address(from), address(to), moved(&body.data)));
    }
    let Some((from, to, amount)) = found else {
        return Err(transfer.refuse("invalid_exact_stellar_payload_no_transfer_events"));
    };
    if transfers > 1 {
        return Err(transfer.refuse("invalid_exact_stellar_payload_multiple_transfers"));
    }
    if from.as_deref() != Some(transfer.payer().as_str()) {
        return Err(transfer.refuse("invalid_exact_stellar_payload_event_wrong_from"));
    }
    if to.as_deref() != Some(transfer.requirements.pay_to.as_str()) {
        return Err(transfer.refuse("invalid_exact_stellar_payload_event_wrong_to"));
    }
    if amount != Some(transfer.amount) {
        return Err(transfer.refuse("invalid_exact_stellar_payload_event_wrong_amount"));
    }
    Ok(())
}

fn authorizations(transfer: &Transfer, latest: u32, terms: &Terms) -> Result<(), Refusal> {
    let entries = transfer.operation.auth.as_slice();
    if entries.is_empty() {
        return Err(transfer.refuse("invalid_exact_stellar_payload_no_auth_entries"));
    }
    let life = transfer.requirements.max_timeout_seconds.div_ceil(terms.ledger_seconds.max(1));
    let last = u64::from(latest).saturating_add(life).saturating_add(LEDGER_TOLERANCE);
    let mut payer_signed = false;
    let mut pending = false;
    for entry in entries {
        let Some(credentials) = credentials(&entry.credentials) else {
            return Err(transfer.refuse("invalid_exact_stellar_payload_unsupported_credential_type"));
        };
        if terms.accounts.contains(&credentials.address.to_string()) {
            return Err(transfer.refuse("invalid_exact_stellar_payload_facilitator_in_auth"));
        }
        if u64::from(credentials.signature_expiration_ledger) > last {
            return Err(transfer.refuse("invalid_exact_stellar_signature_expiration_too_far"));
        }
        if !entry.root_invocation.sub_invocations.is_empty() {
            return Err(transfer.refuse("invalid_exact_stellar_payload_has_subinvocations"));
        }
        let signed = credentials.signature != ScVal::Void;
        payer_signed |= signed && credentials.address == transfer.from;
        pending |= !signed && credentials.address != transfer.from;
    }
    if !payer_signed {
        return Err(transfer.refuse("invalid_exact_stellar_payload_missing_payer_signature"));
    }
    if pending {
        return Err(transfer.refuse("invalid_exact_stellar_payload_unexpected_pending_signatures"));
    }
    Ok(())
}

/// Both arms that a payer signs alone; delegates stay refused, as the official one refuses them.
fn credentials(credentials: &SorobanCredentials) -> Option<&SorobanAddressCredentials> {
    match credentials {
        SorobanCredentials::Address(c) | SorobanCredentials::AddressV2(c) => Some(c),
        _ => None,
    }
}

fn address(value: &ScVal) -> Option<String> {
    match value {
        ScVal::Address(address) => Some(address.to_string()),
        _ => None,
    }
}

/// The amount of a transfer event: an i128, or a map with `amount` where the recipient is muxed.
fn moved(data: &ScVal) -> Option<i128> {
    match data {
        ScVal::I128(amount) => Some(i128::from(amount)),
        ScVal::Map(Some(map)) => map.iter().find_map(|entry| match (&entry.key, &entry.val) {
            (ScVal::Symbol(name), ScVal::I128(amount)) if name.0.as_slice() == b"amount" => Some(i128::from(amount)),
            _ => None,
        }),
        _ => None,
    }
}

/// The `G…` account behind a source, muxed or not.
fn plain_account(account: &MuxedAccount) -> String {
    let key = match account {
        MuxedAccount::Ed25519(key) => &key.0,
        MuxedAccount::MuxedEd25519(muxed) => &muxed.ed25519.0,
    };
    stellar_strkey::ed25519::PublicKey(*key).to_string().as_str().to_owned()
}
