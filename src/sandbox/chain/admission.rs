//! What a validator checks before a transaction may enter a ledger: sequence, bounds, fees, balances, signatures.
//!
//! Not like the real network: only transactions with one InvokeHostFunction operation; extra signers and the minimum
//! sequence preconditions are ignored, and the medium threshold is asked for everything.

use ed25519_dalek::{Signature, VerifyingKey};
use soroban_env_host::fees::{TransactionResources, compute_transaction_resource_fee};
use stellar_xdr::{
    AccountEntry, AccountId, DecoratedSignature, FeeBumpTransactionEnvelope, FeeBumpTransactionInnerTx, Hash,
    InvokeHostFunctionOp, LedgerKey, OperationBody, Preconditions, PublicKey, SignerKey, SorobanTransactionData,
    Transaction, TransactionEnvelope, TransactionExt, TransactionResultResult, TransactionSignaturePayload,
    TransactionSignaturePayloadTaggedTransaction, TransactionV1Envelope, Uint256,
};

use super::ledger::Chain;
use super::xdr::{account_of, encode, sha256};

/// Stroops for each operation; a fee bump counts as one more.
pub const BASE_FEE: i64 = 100;

/// An envelope taken apart: what it runs, who pays.
pub struct Parts<'a> {
    pub inner: &'a TransactionV1Envelope,
    pub bump: Option<&'a FeeBumpTransactionEnvelope>,
    pub invoke: &'a InvokeHostFunctionOp,
    pub data: &'a SorobanTransactionData,
}

impl<'a> Parts<'a> {
    pub fn of(envelope: &'a TransactionEnvelope) -> Result<Parts<'a>, TransactionResultResult> {
        use TransactionResultResult as R;
        let (inner, bump) = unwrap_bump(envelope).ok_or(R::TxNotSupported)?;
        let [operation] = inner.tx.operations.as_slice() else { return Err(R::TxMissingOperation) };
        let OperationBody::InvokeHostFunction(invoke) = &operation.body else { return Err(R::TxNotSupported) };
        let TransactionExt::V1(data) = &inner.tx.ext else { return Err(R::TxMalformed) };
        Ok(Parts { inner, bump, invoke, data })
    }

    pub fn transaction(&self) -> &'a Transaction {
        &self.inner.tx
    }

    pub fn source(&self) -> AccountId {
        account_of(&self.inner.tx.source_account)
    }

    pub fn operation_source(&self) -> AccountId {
        let own = self.inner.tx.operations.first().and_then(|operation| operation.source_account.as_ref());
        account_of(own.unwrap_or(&self.inner.tx.source_account))
    }

    pub fn fee_source(&self) -> AccountId {
        self.bump.map_or_else(|| self.source(), |bump| account_of(&bump.tx.fee_source))
    }

    /// Stroops; what is taken for inclusion beside the resource fee.
    pub fn inclusion_fee(&self) -> i64 {
        if self.bump.is_some() { 2 * BASE_FEE } else { BASE_FEE }
    }
}

/// The transaction inside, and the fee bump around it; `None` for the oldest envelope form.
pub fn unwrap_bump(
    envelope: &TransactionEnvelope,
) -> Option<(&TransactionV1Envelope, Option<&FeeBumpTransactionEnvelope>)> {
    match envelope {
        TransactionEnvelope::Tx(inner) => Some((inner, None)),
        TransactionEnvelope::TxFeeBump(bump) => {
            let FeeBumpTransactionInnerTx::Tx(inner) = &bump.tx.inner_tx;
            Some((inner, Some(bump)))
        }
        TransactionEnvelope::TxV0(_) => None,
    }
}

/// The hash that is signed and by which the network knows the transaction.
pub fn hash(network_id: [u8; 32], envelope: &TransactionEnvelope) -> Option<[u8; 32]> {
    let tagged_transaction = match envelope {
        TransactionEnvelope::Tx(inner) => TransactionSignaturePayloadTaggedTransaction::Tx(inner.tx.clone()),
        TransactionEnvelope::TxFeeBump(bump) => {
            TransactionSignaturePayloadTaggedTransaction::TxFeeBump(bump.tx.clone())
        }
        TransactionEnvelope::TxV0(_) => return None,
    };
    let payload = TransactionSignaturePayload { network_id: Hash(network_id), tagged_transaction };
    encode(&payload).ok().map(sha256)
}

/// Stroops: the part that is spent whatever happens, and what the events cost of the refundable part.
pub fn resource_fees(
    chain: &Chain,
    envelope: &TransactionEnvelope,
    data: &SorobanTransactionData,
    event_bytes: u32,
) -> Result<(i64, i64), TransactionResultResult> {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let footprint = &data.resources.footprint;
    let classic = |key: &&LedgerKey| !matches!(key, LedgerKey::ContractData(_) | LedgerKey::ContractCode(_));
    let size = encode(envelope).map_err(|_| TransactionResultResult::TxMalformed)?.len();
    let resources = TransactionResources {
        instructions: data.resources.instructions,
        disk_read_entries: count(footprint.read_only.iter().chain(footprint.read_write.iter()).filter(classic).count()),
        write_entries: count(footprint.read_write.len()),
        disk_read_bytes: data.resources.disk_read_bytes,
        write_bytes: data.resources.write_bytes,
        contract_events_size_bytes: event_bytes,
        transaction_size_bytes: count(size),
    };
    Ok(compute_transaction_resource_fee(&resources, &chain.config.fee_configuration))
}

/// Whether the transaction may enter a ledger that closes at `close_time` (unix seconds) as things are.
pub fn check(chain: &Chain, envelope: &TransactionEnvelope, close_time: u64) -> Result<(), TransactionResultResult> {
    use TransactionResultResult as R;
    let parts = Parts::of(envelope)?;
    let tx = parts.transaction();
    let resource_fee = parts.data.resource_fee;
    if resource_fee < 0 {
        return Err(R::TxSorobanInvalid);
    }
    bounds(tx, chain.seq.saturating_add(1), close_time)?;
    if i64::from(tx.fee) < resource_fee.saturating_add(BASE_FEE) {
        return Err(R::TxInsufficientFee);
    }
    let (spent, _) = resource_fees(chain, envelope, parts.data, 0)?;
    if resource_fee < spent || i64::from(parts.data.resources.instructions) > chain.config.tx_max_instructions {
        return Err(R::TxSorobanInvalid);
    }
    if let Some(bump) = parts.bump {
        // The fee source pays: its own signature over the outer hash, its own balance.
        let payer = chain.account(&parts.fee_source()).ok_or(R::TxNoAccount)?;
        let fee = bump.tx.fee;
        if fee < resource_fee.saturating_add(2 * BASE_FEE) || fee < i64::from(tx.fee) {
            return Err(R::TxInsufficientFee);
        }
        if payer.balance < fee {
            return Err(R::TxInsufficientBalance);
        }
        let mut signatures = Signatures::of(&bump.signatures);
        let hash = hash(chain.network_id, envelope).ok_or(R::TxMalformed)?;
        if !signatures.satisfy(payer, &hash) {
            return Err(R::TxBadAuth);
        }
        signatures.all_used()?;
    }
    let source = chain.account(&parts.source()).ok_or(R::TxNoAccount)?;
    if source.seq_num.0.checked_add(1) != Some(tx.seq_num.0) {
        return Err(R::TxBadSeq);
    }
    if parts.bump.is_none() && source.balance < i64::from(tx.fee) {
        return Err(R::TxInsufficientBalance);
    }
    let hash = hash(chain.network_id, &TransactionEnvelope::Tx(parts.inner.clone())).ok_or(R::TxMalformed)?;
    let mut signatures = Signatures::of(&parts.inner.signatures);
    if !signatures.satisfy(source, &hash) {
        return Err(R::TxBadAuth);
    }
    let operation_source = chain.account(&parts.operation_source()).ok_or(R::TxNoAccount)?;
    if !signatures.satisfy(operation_source, &hash) {
        return Err(R::TxBadAuth);
    }
    signatures.all_used()
}

fn bounds(tx: &Transaction, seq: u32, close_time: u64) -> Result<(), TransactionResultResult> {
    use TransactionResultResult as R;
    let (time, ledgers) = match &tx.cond {
        Preconditions::None => (None, None),
        Preconditions::Time(time) => (Some(time), None),
        Preconditions::V2(all) => (all.time_bounds.as_ref(), all.ledger_bounds.as_ref()),
    };
    if let Some(time) = time {
        if time.min_time.0 > close_time {
            return Err(R::TxTooEarly);
        }
        if time.max_time.0 != 0 && time.max_time.0 < close_time {
            return Err(R::TxTooLate);
        }
    }
    if let Some(ledgers) = ledgers {
        if ledgers.min_ledger > seq {
            return Err(R::TxTooEarly);
        }
        // Exclusive, unlike the time bound.
        if ledgers.max_ledger != 0 && ledgers.max_ledger <= seq {
            return Err(R::TxTooLate);
        }
    }
    Ok(())
}

/// The signatures of one envelope, each of which must be good for something.
struct Signatures<'a>(Vec<(&'a DecoratedSignature, bool)>);

impl<'a> Signatures<'a> {
    fn of(signatures: &'a [DecoratedSignature]) -> Signatures<'a> {
        Signatures(signatures.iter().map(|signature| (signature, false)).collect())
    }

    /// Whether they reach the account's medium threshold over `hash`; an account without any weight signs nothing.
    fn satisfy(&mut self, account: &AccountEntry, hash: &[u8; 32]) -> bool {
        let PublicKey::PublicKeyTypeEd25519(Uint256(master)) = &account.account_id.0;
        let [master_weight, _, medium, _] = account.thresholds.0;
        let mut keys = vec![(*master, u32::from(master_weight))];
        for signer in account.signers.iter() {
            if let SignerKey::Ed25519(Uint256(key)) = &signer.key {
                keys.push((*key, signer.weight));
            }
        }
        let mut weight = 0u32;
        for (key, worth) in keys {
            if let Some((_, used)) = self.0.iter_mut().find(|(signature, _)| signed(&key, signature, hash)) {
                *used = true;
                weight = weight.saturating_add(worth);
            }
        }
        weight > 0 && weight >= u32::from(medium)
    }

    fn all_used(&self) -> Result<(), TransactionResultResult> {
        if self.0.iter().all(|(_, used)| *used) { Ok(()) } else { Err(TransactionResultResult::TxBadAuthExtra) }
    }
}

fn signed(key: &[u8; 32], signature: &DecoratedSignature, hash: &[u8; 32]) -> bool {
    let [.., a, b, c, d] = *key;
    signature.hint.0 == [a, b, c, d]
        && VerifyingKey::from_bytes(key)
            .ok()
            .zip(Signature::from_slice(signature.signature.0.as_slice()).ok())
            .is_some_and(|(key, signature)| key.verify_strict(hash, &signature).is_ok())
}
