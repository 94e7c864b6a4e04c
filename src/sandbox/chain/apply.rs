//! One transaction in the ledger that is being closed: fee and sequence number are taken whatever happens next, then
//! the host runs, then what was paid too much goes back.

use stellar_xdr::{
    AccountEntry, AccountId, ContractEvent, ContractEventBody, ContractId, ExtensionPoint, Hash,
    InnerTransactionResult, InnerTransactionResultExt, InnerTransactionResultPair, InnerTransactionResultResult,
    InvokeHostFunctionResult, InvokeHostFunctionSuccessPreImage, LedgerEntryChange, LedgerEntryChanges,
    LedgerEntryData, OperationMetaV2, OperationResult, OperationResultTr, ScAddress, ScVal, SorobanCredentials,
    SorobanTransactionMetaExt, SorobanTransactionMetaExtV1, SorobanTransactionMetaV2, TransactionEnvelope,
    TransactionMeta, TransactionMetaV4, TransactionResult, TransactionResultExt, TransactionResultResult, VecM,
};

use super::admission::{self, Parts};
use super::host::{self, Executed, Invocation, Write};
use super::ledger::{Chain, Included, Sent};
use super::store::Stored;
use super::xdr::{account_key, encode, sha256};

/// How the host's run ended.
struct Ran {
    code: InvokeHostFunctionResult,
    done: Option<Executed>,
    /// Stroops.
    refund: i64,
    non_refundable: i64,
    refundable: i64,
    rent: i64,
    error: Option<String>,
}

impl Ran {
    fn failed(code: InvokeHostFunctionResult, error: String) -> Ran {
        Ran { code, done: None, refund: 0, non_refundable: 0, refundable: 0, rent: 0, error: Some(error) }
    }
}

/// `sent` must have passed [`admission::check`] for this ledger. An error includes it nowhere.
pub fn apply(
    chain: &mut Chain,
    seq: u32,
    time: u64,
    place: usize,
    sent: Sent,
) -> Result<Included, TransactionResultResult> {
    let Sent { hash, envelope } = sent;
    let parts = Parts::of(&envelope)?;
    let (source, fee_source) = (parts.source(), parts.fee_source());
    let malformed = |_| TransactionResultResult::TxMalformed;

    let before = chain.store.get(&account_key(&source)).ok_or(TransactionResultResult::TxNoAccount)?.entry.clone();
    let taken = parts.inclusion_fee() + parts.data.resource_fee;
    change_account(chain, seq, &fee_source, |account| account.balance -= taken);
    change_account(chain, seq, &source, |account| account.seq_num.0 += 1);

    let mut diagnostics = Vec::new();
    // A contract's randomness follows from the transaction and its place, so a run can be repeated.
    let seed = sha256([&hash[..], &seq.to_be_bytes(), &place.to_be_bytes()].concat());
    let invocation = Invocation {
        function: &parts.invoke.host_function,
        auth: &parts.invoke.auth,
        resources: &parts.data.resources,
        source: &parts.operation_source(),
        seed,
    };
    let run = host::execute(chain, chain.info_of(seq, time), &invocation, &mut diagnostics);
    let mut ran = match run {
        Ok(done) => account_for(chain, &envelope, &parts, done)?,
        Err(error) => Ran::failed(InvokeHostFunctionResult::Trapped, error),
    };
    let (mut events, mut changes, mut value) = (Vec::new(), LedgerEntryChanges::default(), None);
    if let Some(done) = ran.done.take() {
        (events, changes, value) = (done.events, done.changes, Some(done.value));
        commit(chain, done.writes);
    }
    change_account(chain, seq, &fee_source, |account| account.balance += ran.refund);

    let success = matches!(ran.code, InvokeHostFunctionResult::Success(_));
    let result = result(chain, &parts, ran.code, success, taken - ran.refund)?;
    let after = chain.store.get(&account_key(&source)).map_or(before.clone(), |stored| stored.entry.clone());
    let meta = TransactionMeta::V4(TransactionMetaV4 {
        ext: ExtensionPoint::V0,
        tx_changes_before: LedgerEntryChanges(
            vec![LedgerEntryChange::State(before), LedgerEntryChange::Updated(after)].try_into().map_err(malformed)?,
        ),
        operations: vec![OperationMetaV2 {
            ext: ExtensionPoint::V0,
            changes,
            events: events.clone().try_into().map_err(malformed)?,
        }]
        .try_into()
        .map_err(malformed)?,
        tx_changes_after: LedgerEntryChanges::default(),
        soroban_meta: Some(SorobanTransactionMetaV2 {
            ext: SorobanTransactionMetaExt::V1(SorobanTransactionMetaExtV1 {
                ext: ExtensionPoint::V0,
                total_non_refundable_resource_fee_charged: ran.non_refundable,
                total_refundable_resource_fee_charged: ran.refundable,
                rent_fee_charged: ran.rent,
            }),
            return_value: value,
        }),
        events: VecM::default(),
        diagnostic_events: diagnostics.clone().try_into().map_err(malformed)?,
    });
    Ok(Included { hash, envelope, success, result, meta, events, diagnostics, error: ran.error })
}

/// Whether what was done fits what was declared and paid.
fn account_for(
    chain: &Chain,
    envelope: &TransactionEnvelope,
    parts: &Parts<'_>,
    done: Executed,
) -> Result<Ran, TransactionResultResult> {
    let malformed = |_| TransactionResultResult::TxMalformed;
    let data = parts.data;
    let (non_refundable, events) = admission::resource_fees(chain, envelope, data, done.event_bytes)?;
    let refundable = events.saturating_add(done.rent_fee);
    let mut written = 0usize;
    for entry in done.writes.iter().filter(|write| !write.only_life).filter_map(|write| write.entry.as_ref()) {
        written += encode(entry).map_err(malformed)?.len();
    }
    if written > data.resources.write_bytes as usize {
        let error = format!("wrote {written} bytes of {}", data.resources.write_bytes);
        return Ok(Ran::failed(InvokeHostFunctionResult::ResourceLimitExceeded, error));
    }
    let left = data.resource_fee - non_refundable - refundable;
    if left < 0 {
        let error = format!("the resource fee lacks {} stroops", -left);
        return Ok(Ran::failed(InvokeHostFunctionResult::InsufficientRefundableFee, error));
    }
    let success = InvokeHostFunctionSuccessPreImage {
        return_value: done.value.clone(),
        events: done.events.clone().try_into().map_err(malformed)?,
    };
    Ok(Ran {
        code: InvokeHostFunctionResult::Success(Hash(sha256(encode(&success).map_err(malformed)?))),
        rent: done.rent_fee,
        done: Some(done),
        refund: left,
        non_refundable,
        refundable,
        error: None,
    })
}

fn result(
    chain: &Chain,
    parts: &Parts<'_>,
    code: InvokeHostFunctionResult,
    success: bool,
    fee_charged: i64,
) -> Result<TransactionResult, TransactionResultResult> {
    use InnerTransactionResultResult as Inner;
    use TransactionResultResult as Outer;
    let operations = vec![OperationResult::OpInner(OperationResultTr::InvokeHostFunction(code))]
        .try_into()
        .map_err(|_| Outer::TxMalformed)?;
    let result = if parts.bump.is_some() {
        let inner = TransactionEnvelope::Tx(parts.inner.clone());
        let pair = InnerTransactionResultPair {
            transaction_hash: Hash(admission::hash(chain.network_id, &inner).ok_or(Outer::TxMalformed)?),
            result: InnerTransactionResult {
                fee_charged: 0,
                result: if success { Inner::TxSuccess(operations) } else { Inner::TxFailed(operations) },
                ext: InnerTransactionResultExt::V0,
            },
        };
        if success { Outer::TxFeeBumpInnerSuccess(pair) } else { Outer::TxFeeBumpInnerFailed(pair) }
    } else if success {
        Outer::TxSuccess(operations)
    } else {
        Outer::TxFailed(operations)
    };
    Ok(TransactionResult { fee_charged, result, ext: TransactionResultExt::V0 })
}

pub fn commit(chain: &mut Chain, writes: Vec<Write>) {
    for Write { key, entry, live_until, .. } in writes {
        match entry {
            Some(entry) => {
                // The host names a life only where it changed.
                let live_until = live_until.or_else(|| chain.store.get(&key).and_then(|old| old.live_until));
                chain.store.put(key, Stored { entry, live_until });
            }
            None => chain.store.remove(&key),
        }
    }
}

fn change_account(chain: &mut Chain, seq: u32, id: &AccountId, change: impl FnOnce(&mut AccountEntry)) {
    let key = account_key(id);
    let Some(mut stored) = chain.store.get(&key).cloned() else { return };
    if let LedgerEntryData::Account(account) = &mut stored.entry.data {
        change(account);
        stored.entry.last_modified_ledger_seq = seq;
        chain.store.put(key, stored);
    }
}

/// Payer, recipient and amount of the asset's own transfer event.
pub fn transfer(event: &ContractEvent, contract: &ContractId) -> Option<(ScAddress, ScAddress, i128)> {
    let ContractEventBody::V0(body) = &event.body;
    let [ScVal::Symbol(name), ScVal::Address(from), ScVal::Address(to), ..] = body.topics.as_slice() else {
        return None;
    };
    if event.contract_id.as_ref() != Some(contract) || name.0.as_slice() != b"transfer" {
        return None;
    }
    // To a multiplexed address the amount is one member of a map.
    let amount = match &body.data {
        ScVal::Map(Some(map)) => {
            &map.iter().find(|member| matches!(&member.key, ScVal::Symbol(s) if s.0.as_slice() == b"amount"))?.val
        }
        plain => plain,
    };
    let ScVal::I128(amount) = amount else { return None };
    Some((from.clone(), to.clone(), i128::from(amount.hi) << 64 | i128::from(amount.lo)))
}

/// The nonce of the first authorization that `payer` gave in the transaction.
pub fn nonce(envelope: &TransactionEnvelope, payer: &ScAddress) -> Option<i64> {
    let parts = Parts::of(envelope).ok()?;
    parts.invoke.auth.iter().find_map(|entry| {
        let credentials = match &entry.credentials {
            SorobanCredentials::SourceAccount => return None,
            SorobanCredentials::Address(plain) | SorobanCredentials::AddressV2(plain) => plain,
            SorobanCredentials::AddressWithDelegates(delegated) => &delegated.address_credentials,
        };
        (credentials.address == *payer).then_some(credentials.nonce)
    })
}
