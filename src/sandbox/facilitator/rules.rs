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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stellar_xdr::{
        AccountId, ContractEvent, ContractEventV0, ContractId, ExtensionPoint, Hash, Int128Parts, InvokeContractArgs,
        Memo, Operation, PublicKey, ScMap, ScMapEntry, ScSymbol, SequenceNumber,
        SorobanAddressCredentialsWithDelegates, SorobanAuthorizationEntry, SorobanAuthorizedFunction,
        SorobanAuthorizedInvocation, TimeBounds, TimePoint, TransactionV1Envelope, Uint256, VecM, WriteXdr,
    };

    use super::*;

    const LATEST: u32 = 1_000;

    fn account(n: u8) -> ScAddress {
        ScAddress::Account(AccountId(PublicKey::PublicKeyTypeEd25519(Uint256([n; 32]))))
    }

    fn contract(n: u8) -> ContractId {
        ContractId(Hash([n; 32]))
    }

    fn symbol(name: &str) -> ScVal {
        ScVal::Symbol(ScSymbol(name.try_into().unwrap()))
    }

    fn number(n: u64) -> ScVal {
        ScVal::I128(Int128Parts { hi: 0, lo: n })
    }

    fn terms() -> Terms {
        Terms {
            network: "stellar:testnet".into(),
            accounts: vec![account(9).to_string()],
            max_fee: 50_000,
            ledger_seconds: 5,
        }
    }

    fn requirements() -> Requirements {
        Requirements {
            scheme: "exact".into(),
            network: "stellar:testnet".into(),
            asset: contract(7).to_string(),
            amount: "10000".into(),
            pay_to: account(2).to_string(),
            max_timeout_seconds: 60,
        }
    }

    fn call() -> InvokeContractArgs {
        InvokeContractArgs {
            contract_address: ScAddress::Contract(contract(7)),
            function_name: ScSymbol("transfer".try_into().unwrap()),
            args: vec![ScVal::Address(account(1)), ScVal::Address(account(2)), number(10_000)].try_into().unwrap(),
        }
    }

    fn signed(address: ScAddress, expiration: u32) -> SorobanAddressCredentials {
        SorobanAddressCredentials {
            address,
            nonce: 1,
            signature_expiration_ledger: expiration,
            signature: ScVal::Vec(Some(Default::default())),
        }
    }

    fn entry(credentials: SorobanCredentials) -> SorobanAuthorizationEntry {
        SorobanAuthorizationEntry {
            credentials,
            root_invocation: SorobanAuthorizedInvocation {
                function: SorobanAuthorizedFunction::ContractFn(call()),
                sub_invocations: VecM::default(),
            },
        }
    }

    /// What a test may change of a payment that is right in every respect.
    struct Case {
        version: serde_json::Value,
        accepted: Accepted,
        requirements: Requirements,
        call: InvokeContractArgs,
        auth: Vec<SorobanAuthorizationEntry>,
        transaction: Transaction,
        operations: usize,
        /// Instead of the transaction's own base64.
        text: Option<serde_json::Value>,
        simulation: Simulation,
    }

    fn transfer_event() -> ContractEvent {
        ContractEvent {
            ext: ExtensionPoint::V0,
            contract_id: Some(contract(7)),
            type_: ContractEventType::Contract,
            body: ContractEventBody::V0(ContractEventV0 {
                topics: vec![symbol("transfer"), ScVal::Address(account(1)), ScVal::Address(account(2))]
                    .try_into()
                    .unwrap(),
                data: number(10_000),
            }),
        }
    }

    fn encoded(event: ContractEvent) -> String {
        DiagnosticEvent { in_successful_contract_call: true, event }.to_xdr_base64(XDR).unwrap()
    }

    fn good() -> Case {
        Case {
            version: json!(2),
            accepted: Accepted { scheme: "exact".into(), network: "stellar:testnet".into() },
            requirements: requirements(),
            call: call(),
            auth: vec![entry(SorobanCredentials::Address(signed(account(1), LATEST + 14)))],
            transaction: Transaction {
                source_account: MuxedAccount::Ed25519(Uint256([0; 32])),
                fee: 40_000,
                seq_num: SequenceNumber(0),
                cond: Preconditions::Time(TimeBounds { min_time: TimePoint(0), max_time: TimePoint(1) }),
                memo: Memo::None,
                operations: VecM::default(),
                ext: TransactionExt::V1(SorobanTransactionData::default()),
            },
            operations: 1,
            text: None,
            simulation: Simulation {
                error: None,
                transaction_data: Some("AAAA".into()),
                min_resource_fee: Some("40000".into()),
                events: vec![encoded(transfer_event())],
            },
        }
    }

    fn judge(case: Case) -> Result<(), &'static str> {
        let operation = Operation {
            source_account: None,
            body: OperationBody::InvokeHostFunction(InvokeHostFunctionOp {
                host_function: HostFunction::InvokeContract(case.call),
                auth: case.auth.try_into().unwrap(),
            }),
        };
        let mut tx = case.transaction;
        if tx.operations.is_empty() {
            tx.operations = vec![operation; case.operations].try_into().unwrap();
        }
        let envelope = TransactionEnvelope::Tx(TransactionV1Envelope { tx, signatures: VecM::default() });
        let text = case.text.unwrap_or_else(|| json!(envelope.to_xdr_base64(XDR).unwrap()));
        let payload =
            Payload { x402_version: case.version, accepted: case.accepted, payload: json!({"transaction": text}) };
        let transfer = structure(&payload, &case.requirements, &terms()).map_err(|refusal| refusal.reason)?;
        simulated(&transfer, &case.simulation, LATEST, &terms()).map_err(|refusal| refusal.reason)
    }

    #[test]
    fn a_payment_that_is_right_in_every_respect_passes_in_both_credential_arms() {
        assert_eq!(judge(good()), Ok(()));
        let mut second = good();
        second.auth = vec![entry(SorobanCredentials::AddressV2(signed(account(1), LATEST + 14)))];
        assert_eq!(judge(second), Ok(()));
    }

    #[test]
    fn every_rule_has_its_code() {
        type Change = Box<dyn Fn(&mut Case)>;
        let args = |args: Vec<ScVal>| -> Change { Box::new(move |c| c.call.args = args.clone().try_into().unwrap()) };
        let parties = |from: u8, to: u8, amount: u64| {
            vec![ScVal::Address(account(from)), ScVal::Address(account(to)), number(amount)]
        };
        let event = |change: fn(&mut ContractEvent)| -> Change {
            Box::new(move |c| {
                let mut event = transfer_event();
                change(&mut event);
                c.simulation.events = vec![encoded(event)];
            })
        };
        fn topics(event: &mut ContractEvent, topics: Vec<ScVal>) {
            let ContractEventBody::V0(body) = &mut event.body;
            body.topics = topics.try_into().unwrap();
        }
        let table: Vec<(&str, Change)> = vec![
            ("invalid_x402_version", Box::new(|c| c.version = json!(1))),
            ("invalid_x402_version", Box::new(|c| c.version = json!("2"))),
            ("unsupported_scheme", Box::new(|c| c.accepted.scheme = "upto".into())),
            ("unsupported_scheme", Box::new(|c| c.requirements.scheme = "upto".into())),
            ("network_mismatch", Box::new(|c| c.accepted.network = "stellar:pubnet".into())),
            (
                "invalid_network",
                Box::new(|c| {
                    c.accepted.network = "stellar:pubnet".into();
                    c.requirements.network = "stellar:pubnet".into();
                }),
            ),
            ("invalid_exact_stellar_payload_malformed", Box::new(|c| c.text = Some(json!("AAAA")))),
            ("invalid_exact_stellar_payload_malformed", Box::new(|c| c.text = Some(json!(5)))),
            ("invalid_exact_stellar_payload_malformed", Box::new(|c| c.transaction.ext = TransactionExt::V0)),
            ("invalid_exact_stellar_payload_wrong_operation", Box::new(|c| c.operations = 2)),
            (
                "invalid_exact_stellar_payload_wrong_operation",
                Box::new(|c| {
                    let inflation = Operation { source_account: None, body: OperationBody::Inflation };
                    c.transaction.operations = vec![inflation].try_into().unwrap();
                }),
            ),
            (
                "invalid_exact_stellar_payload_unsafe_tx_or_op_source",
                Box::new(|c| {
                    c.transaction.source_account = MuxedAccount::Ed25519(Uint256([9; 32]));
                }),
            ),
            (
                "invalid_exact_stellar_payload_unsafe_tx_or_op_source",
                Box::new(|c| {
                    c.transaction.source_account = MuxedAccount::MuxedEd25519(stellar_xdr::MuxedAccountMed25519 {
                        id: 4,
                        ed25519: Uint256([9; 32]),
                    });
                }),
            ),
            (
                "invalid_exact_stellar_payload_wrong_asset",
                Box::new(|c| {
                    c.call.contract_address = ScAddress::Contract(contract(8));
                }),
            ),
            (
                "invalid_exact_stellar_payload_wrong_function_name",
                Box::new(|c| {
                    c.call.function_name = ScSymbol("approve".try_into().unwrap());
                }),
            ),
            ("invalid_exact_stellar_payload_wrong_function_name", args(parties(1, 2, 10_000)[..2].to_vec())),
            ("invalid_exact_stellar_payload_facilitator_is_payer", args(parties(9, 2, 10_000))),
            ("invalid_exact_stellar_payload_wrong_recipient", args(parties(1, 3, 10_000))),
            ("invalid_exact_stellar_payload_wrong_amount", args(parties(1, 2, 9_999))),
            ("invalid_exact_stellar_payload_wrong_amount", Box::new(|c| c.requirements.amount = "1e4".into())),
            ("unexpected_verify_error", Box::new(|c| c.transaction.cond = Preconditions::None)),
            ("invalid_exact_stellar_payload_simulation_failed", Box::new(|c| c.simulation.error = Some("no".into()))),
            ("invalid_exact_stellar_payload_simulation_failed", Box::new(|c| c.simulation.transaction_data = None)),
            ("invalid_exact_stellar_payload_fee_below_minimum", Box::new(|c| c.transaction.fee = 39_999)),
            ("invalid_exact_stellar_payload_fee_exceeds_maximum", Box::new(|c| c.transaction.fee = 50_001)),
            ("invalid_exact_stellar_payload_no_transfer_events", Box::new(|c| c.simulation.events.clear())),
            (
                "invalid_exact_stellar_payload_multiple_transfers",
                Box::new(|c| {
                    c.simulation.events.push(encoded(transfer_event()));
                }),
            ),
            ("invalid_exact_stellar_payload_event_not_transfer", event(|e| topics(e, vec![symbol("mint")]))),
            (
                "invalid_exact_stellar_payload_event_not_transfer",
                event(|e| {
                    topics(e, vec![symbol("burn"), ScVal::Address(account(1)), ScVal::Address(account(2))]);
                }),
            ),
            ("invalid_exact_stellar_payload_event_missing_contract_id", event(|e| e.contract_id = None)),
            ("invalid_exact_stellar_payload_event_wrong_asset", event(|e| e.contract_id = Some(contract(8)))),
            (
                "invalid_exact_stellar_payload_event_wrong_from",
                event(|e| {
                    topics(e, vec![symbol("transfer"), ScVal::Address(account(3)), ScVal::Address(account(2))]);
                }),
            ),
            (
                "invalid_exact_stellar_payload_event_wrong_to",
                event(|e| {
                    topics(e, vec![symbol("transfer"), ScVal::Address(account(1)), ScVal::Address(account(3))]);
                }),
            ),
            (
                "invalid_exact_stellar_payload_event_wrong_amount",
                event(|e| {
                    let ContractEventBody::V0(body) = &mut e.body;
                    body.data = number(1);
                }),
            ),
            ("invalid_exact_stellar_payload_no_auth_entries", Box::new(|c| c.auth.clear())),
            (
                "invalid_exact_stellar_payload_unsupported_credential_type",
                Box::new(|c| {
                    c.auth = vec![entry(SorobanCredentials::SourceAccount)];
                }),
            ),
            (
                "invalid_exact_stellar_payload_unsupported_credential_type",
                Box::new(|c| {
                    let delegated = SorobanAddressCredentialsWithDelegates {
                        address_credentials: signed(account(1), LATEST),
                        delegates: Default::default(),
                    };
                    c.auth = vec![entry(SorobanCredentials::AddressWithDelegates(delegated))];
                }),
            ),
            (
                "invalid_exact_stellar_payload_facilitator_in_auth",
                Box::new(|c| {
                    c.auth.push(entry(SorobanCredentials::Address(signed(account(9), LATEST))));
                }),
            ),
            (
                "invalid_exact_stellar_signature_expiration_too_far",
                Box::new(|c| {
                    c.auth = vec![entry(SorobanCredentials::Address(signed(account(1), LATEST + 15)))];
                }),
            ),
            (
                "invalid_exact_stellar_payload_has_subinvocations",
                Box::new(|c| {
                    let under = c.auth[0].root_invocation.clone();
                    c.auth[0].root_invocation.sub_invocations = vec![under].try_into().unwrap();
                }),
            ),
            (
                "invalid_exact_stellar_payload_missing_payer_signature",
                Box::new(|c| {
                    let unsigned = SorobanAddressCredentials { signature: ScVal::Void, ..signed(account(1), LATEST) };
                    c.auth = vec![entry(SorobanCredentials::Address(unsigned))];
                }),
            ),
            (
                "invalid_exact_stellar_payload_missing_payer_signature",
                Box::new(|c| {
                    c.auth = vec![entry(SorobanCredentials::Address(signed(account(4), LATEST)))];
                }),
            ),
            (
                "invalid_exact_stellar_payload_unexpected_pending_signatures",
                Box::new(|c| {
                    let unsigned = SorobanAddressCredentials { signature: ScVal::Void, ..signed(account(4), LATEST) };
                    c.auth.push(entry(SorobanCredentials::Address(unsigned)));
                }),
            ),
        ];
        for (code, change) in table {
            let mut case = good();
            change(&mut case);
            assert_eq!(judge(case), Err(code));
        }
    }

    #[test]
    fn the_amount_is_read_from_a_muxed_transfer_too() {
        let mut case = good();
        let mut event = transfer_event();
        let ContractEventBody::V0(body) = &mut event.body;
        let fields = vec![ScMapEntry { key: symbol("amount"), val: number(10_000) }];
        body.data = ScVal::Map(Some(ScMap(fields.try_into().unwrap())));
        case.simulation.events = vec![encoded(event)];
        assert_eq!(judge(case), Ok(()));
    }

    #[test]
    fn an_event_that_is_only_diagnostic_does_not_count() {
        let mut case = good();
        let event = ContractEvent { type_: ContractEventType::Diagnostic, ..transfer_event() };
        case.simulation.events.push(encoded(event));
        assert_eq!(judge(case), Ok(()));
    }
}
