//! From the signed entry to the transaction that a seller gets: one enforcing simulation, which gives fee and
//! footprint, and whose answer must be about our payment.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use stellar_xdr::{
    ContractEventBody, ContractEventType, ContractId, DiagnosticEvent, Hash, HostFunction, InvokeContractArgs,
    InvokeHostFunctionOp, LedgerKey, Memo, MuxedAccount, Operation, OperationBody, Preconditions, ReadXdr, ScAddress,
    ScVal, SequenceNumber, SorobanTransactionData, TimeBounds, TimePoint, Transaction, TransactionEnvelope,
    TransactionExt, TransactionV1Envelope, Uint256, VecM,
};

use super::entry::{self, SignedEntry};
use super::rpc::{Simulation, words};
use super::{ChainError, PrepareError, Stellar};

/// The inclusion fee beside the resource fee, stroops.
const INCLUSION_FEE: u32 = 100;
/// The official facilitator's default cap, stroops: more would be refused after it was signed.
const FEE_CAP: u32 = 50_000;

/// A transaction without source of its own: the facilitator replaces source, sequence and fee.
pub(super) fn envelope(
    operation: OperationBody,
    fee: u32,
    max_time: u64,
    data: Option<SorobanTransactionData>,
) -> TransactionEnvelope {
    let tx = Transaction {
        source_account: MuxedAccount::Ed25519(Uint256([0; 32])),
        fee,
        seq_num: SequenceNumber(1),
        // Facilitators refuse a transaction without time bounds.
        cond: Preconditions::Time(TimeBounds { min_time: TimePoint(0), max_time: TimePoint(max_time) }),
        memo: Memo::None,
        operations: vec![Operation { source_account: None, body: operation }].try_into().unwrap_or_default(),
        ext: data.map_or(TransactionExt::V0, TransactionExt::V1),
    };
    TransactionEnvelope::Tx(TransactionV1Envelope { tx, signatures: VecM::default() })
}

pub(super) fn base64(envelope: &TransactionEnvelope) -> String {
    BASE64.encode(entry::encode(envelope))
}

impl Stellar {
    /// The base64 XDR of the transaction envelope for `payload.transaction`. From here on the RPC holds a live
    /// signature, whatever it answers.
    pub async fn prepare(&self, signed: &SignedEntry) -> Result<String, PrepareError> {
        let params = serde_json::json!({"transaction": base64(&to_simulate(signed))});
        let simulation: Simulation = match self.ask_one("simulateTransaction", &params).await {
            Ok(simulation) => simulation,
            Err(ChainError::Lying(_)) => return Err(PrepareError::Lying("network")),
            Err(error) => return Err(PrepareError::Lost(error)),
        };
        assemble(simulation, signed)
    }
}

fn operation(signed: &SignedEntry) -> OperationBody {
    OperationBody::InvokeHostFunction(InvokeHostFunctionOp {
        host_function: HostFunction::InvokeContract(signed.draft.call.clone()),
        auth: vec![signed.entry.clone()].try_into().unwrap_or_default(),
    })
}

/// What is simulated: the transaction without its footprint.
fn to_simulate(signed: &SignedEntry) -> TransactionEnvelope {
    envelope(operation(signed), INCLUSION_FEE, signed.draft.max_time, None)
}

/// The transaction with what the simulation says of fee and footprint, and with nothing else of it.
pub(super) fn assemble(simulation: Simulation, signed: &SignedEntry) -> Result<String, PrepareError> {
    about_our_payment(&simulation, signed)?;
    if let Some(error) = simulation.error {
        return Err(PrepareError::Failed(words(&error)));
    }
    if simulation.restore_preamble.is_some() {
        return Err(PrepareError::Failed("archived entries would have to be restored first".into()));
    }
    let unusable = |what: &str| PrepareError::Lost(ChainError::Unreachable(format!("the simulation's {what}")));
    let data = simulation.transaction_data.ok_or_else(|| unusable("transactionData is missing"))?;
    let mut data = SorobanTransactionData::from_xdr_base64(&data, entry::XDR)
        .map_err(|_| unusable("transactionData cannot be read"))?;
    let resource_fee: u64 = simulation
        .min_resource_fee
        .and_then(|fee| fee.parse().ok())
        .ok_or_else(|| unusable("minResourceFee is no number"))?;
    footprint_is_ours(&data, signed)?;
    let fee = resource_fee.saturating_add(INCLUSION_FEE.into());
    let (Ok(resource_fee), Ok(fee), true) = (u32::try_from(resource_fee), u32::try_from(fee), fee <= FEE_CAP.into())
    else {
        return Err(PrepareError::Failed(format!("fee_cap_exceeded: {fee} stroops, at most {FEE_CAP} are accepted")));
    };
    data.resource_fee = i64::from(resource_fee);
    Ok(base64(&envelope(operation(signed), fee, signed.draft.max_time, Some(data))))
}

/// Whatever the answer says of authorizations and transfers must be ours; what it leaves out is no lie.
fn about_our_payment(simulation: &Simulation, signed: &SignedEntry) -> Result<(), PrepareError> {
    let ours = BASE64.encode(entry::encode(&signed.entry));
    for result in &simulation.results {
        for auth in result.auth.iter().flatten() {
            if *auth != ours {
                return Err(PrepareError::Lying("auth"));
            }
        }
    }
    for event in &simulation.events {
        let Ok(event) = DiagnosticEvent::from_xdr_base64(event, entry::XDR) else { continue };
        if outermost_call(&event).is_some_and(|call| call != signed.draft.call) {
            return Err(PrepareError::Lying("invocation"));
        }
        if event.event.type_ != ContractEventType::Contract {
            continue;
        }
        let ContractEventBody::V0(body) = &event.event.body;
        let [ScVal::Symbol(name), from, to, ..] = body.topics.as_slice() else { continue };
        if name.0.as_slice() != b"transfer" {
            continue;
        }
        let [_, expected_to, ScVal::I128(amount)] = signed.draft.call.args.as_slice() else { continue };
        let moved = match &body.data {
            ScVal::I128(moved) => moved == amount,
            // A muxed recipient comes with a map; ours is never muxed.
            _ => false,
        };
        let ours = event.event.contract_id.clone().map(ScAddress::Contract)
            == Some(signed.draft.call.contract_address.clone())
            && *from == ScVal::Address(signed.draft.payer.clone())
            && to == expected_to
            && moved;
        if !ours {
            return Err(PrepareError::Lying("transfer"));
        }
    }
    Ok(())
}

/// What the host records of the call that no contract made: topics `fn_call`, the callee's id, the function; the
/// arguments as data, a single one bare. `None` for every other event.
fn outermost_call(event: &DiagnosticEvent) -> Option<InvokeContractArgs> {
    let event = &event.event;
    if event.type_ != ContractEventType::Diagnostic || event.contract_id.is_some() {
        return None;
    }
    let ContractEventBody::V0(body) = &event.body;
    let [ScVal::Symbol(kind), ScVal::Bytes(callee), ScVal::Symbol(function)] = body.topics.as_slice() else {
        return None;
    };
    if kind.0.as_slice() != b"fn_call" {
        return None;
    }
    let args = match &body.data {
        ScVal::Vec(Some(args)) => args.0.clone(),
        one => vec![one.clone()].try_into().unwrap_or_default(),
    };
    Some(InvokeContractArgs {
        contract_address: ScAddress::Contract(ContractId(Hash(callee.as_slice().try_into().ok()?))),
        function_name: function.clone(),
        args,
    })
}

/// The footprint names our nonce and nobody else's.
fn footprint_is_ours(data: &SorobanTransactionData, signed: &SignedEntry) -> Result<(), PrepareError> {
    let ours = entry::nonce_key(&signed.draft.payer, signed.draft.nonce);
    let is_nonce =
        |key: &&LedgerKey| matches!(key, LedgerKey::ContractData(d) if matches!(d.key, ScVal::LedgerKeyNonce(_)));
    let written = &data.resources.footprint.read_write;
    if !written.contains(&ours) {
        return Err(PrepareError::Lying("footprint"));
    }
    let read = data.resources.footprint.read_only.iter();
    if written.iter().chain(read).filter(is_nonce).any(|key| *key != ours) {
        return Err(PrepareError::Lying("footprint"));
    }
    Ok(())
}
