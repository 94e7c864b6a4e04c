//! A small Stellar: ledgers that close every five seconds, one account, one token, the nonces of authorizations. A
//! transfer runs only with a right signature over the official preimage, an unused nonce and a live expiration.

use std::collections::BTreeMap;
use std::sync::Mutex;

use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use sha2::{Digest, Sha256};
use stellar_strkey::ed25519::{PrivateKey, PublicKey};
use stellar_xdr::{
    AccountId, ContractDataDurability, ContractDataEntry, ContractExecutable, ExtensionPoint, Hash, HashIdPreimage,
    HashIdPreimageSorobanAuthorization, HostFunction, Int128Parts, InvokeContractArgs, InvokeHostFunctionOp,
    LedgerEntryData, LedgerKey, LedgerKeyContractData, Limits, Memo, MuxedAccount, Operation, OperationBody,
    Preconditions, PublicKey as XdrKey, ReadXdr, ScAddress, ScContractInstance, ScMap, ScMapEntry, ScNonceKey, ScVal,
    ScVec, SequenceNumber, SorobanAddressCredentials, SorobanAuthorizationEntry, SorobanAuthorizedFunction,
    SorobanAuthorizedInvocation, SorobanCredentials, TimeBounds, TimePoint, Transaction, TransactionEnvelope,
    TransactionExt, TransactionV1Envelope, Uint256, WriteXdr,
};

use super::world::{World, lock};

pub const NETWORK: &str = "stellar:testnet";
pub const PASSPHRASE: &str = "Test SDF Network ; September 2015";
pub const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
pub const PAY_TO: &str = "GBRPYHIL2CI3FNQ4BXLFMNDLFJUNPU2HY3ZMFSHONUCEOASW7QC7OX2H";
/// Milliseconds from one ledger to the next.
pub const CLOSE_MS: u64 = 5_000;
/// The newest ledger at the world's first moment.
pub const FIRST: u32 = 1_000;
const LIMITS: Limits = Limits { depth: 200, len: 1 << 20 };

/// The payer's key, the same in every seed.
pub fn key() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

pub fn payer() -> String {
    PublicKey(key().verifying_key().to_bytes()).to_string().as_str().to_owned()
}

pub fn secret() -> String {
    format!("{}", PrivateKey(key().to_bytes()).as_unredacted())
}

pub fn to_base64(value: &impl WriteXdr) -> String {
    value.to_xdr_base64(LIMITS).expect("XDR of ours")
}

/// The ledger entry of a used nonce.
pub fn nonce_key(address: &ScAddress, nonce: i64) -> LedgerKey {
    LedgerKey::ContractData(LedgerKeyContractData {
        contract: address.clone(),
        key: ScVal::LedgerKeyNonce(ScNonceKey { nonce }),
        durability: ContractDataDurability::Temporary,
    })
}

/// The signature of a signer over a preimage as it is sent to one.
pub fn sign(preimage: &HashIdPreimage) -> [u8; 64] {
    let bytes = preimage.to_xdr(LIMITS).expect("XDR that was read");
    key().sign(&Sha256::digest(bytes)).to_bytes()
}

#[derive(Clone, Debug)]
pub struct Transfer {
    pub nonce: i64,
    pub pay_to: String,
    pub asset: String,
    pub amount: i128,
    /// 64 hex digits.
    pub hash: String,
    pub ledger: u32,
    pub expiration: u32,
    pub envelope: String,
}

/// One signed transfer as it was read from a transaction.
pub struct Signed {
    pub entry: SorobanAuthorizationEntry,
    pub call: InvokeContractArgs,
    pub credentials: SorobanAddressCredentials,
    max_time: u64,
    envelope: TransactionV1Envelope,
}

pub struct Chain {
    state: Mutex<State>,
    /// The network's minimum temporary TTL, ledgers.
    pub min_ttl: u32,
}

struct State {
    balance: i128,
    transfers: Vec<Transfer>,
    by_nonce: BTreeMap<i64, usize>,
    /// Every nonce over which a right signature was shown to anybody.
    shown: BTreeMap<i64, u64>,
}

impl Chain {
    pub fn new(balance: i128, min_ttl: u32) -> Chain {
        let state = State { balance, transfers: Vec::new(), by_nonce: BTreeMap::new(), shown: BTreeMap::new() };
        Chain { state: Mutex::new(state), min_ttl }
    }

    /// The newest closed ledger.
    pub fn newest(&self, world: &World) -> u32 {
        FIRST + (world.now_ms() / CLOSE_MS) as u32
    }

    pub fn transfers(&self) -> Vec<Transfer> {
        lock(&self.state).transfers.clone()
    }

    /// The transfer that used this nonce.
    pub fn of_nonce(&self, nonce: i64) -> Option<Transfer> {
        let state = lock(&self.state);
        state.by_nonce.get(&nonce).map(|at| state.transfers[*at].clone())
    }

    pub fn balance(&self) -> i128 {
        lock(&self.state).balance
    }

    /// Nonces whose signed entry somebody outside of the buyer has seen, with the first moment.
    pub fn shown(&self) -> BTreeMap<i64, u64> {
        lock(&self.state).shown.clone()
    }

    pub fn show(&self, world: &World, nonce: i64) {
        lock(&self.state).shown.entry(nonce).or_insert(world.unix_ms());
    }

    /// In which ledger the nonce was used, as a node sees it that stands at `view`.
    pub fn used(&self, nonce: i64, view: u32) -> Option<u32> {
        let state = lock(&self.state);
        let transfer = state.by_nonce.get(&nonce).map(|at| &state.transfers[*at])?;
        let live_until = transfer.expiration.max(transfer.ledger + self.min_ttl - 1);
        (transfer.ledger <= view && view <= live_until).then_some(transfer.ledger)
    }

    pub fn find(&self, hash: &str, view: u32) -> Option<Transfer> {
        lock(&self.state).transfers.iter().find(|t| t.hash == hash && t.ledger <= view).cloned()
    }

    /// Includes the transaction in the next ledger, or says why not. The same transaction again is the same.
    pub fn submit(&self, world: &World, envelope: &str) -> Result<Transfer, &'static str> {
        let signed = read(envelope)?;
        let credentials = &signed.credentials;
        let (nonce, expiration) = (credentials.nonce, credentials.signature_expiration_ledger);
        let ledger = self.newest(world) + 1;
        let (pay_to, asset, amount) = terms(&signed.call).ok_or("no transfer")?;
        let mut state = lock(&self.state);
        if let Some(at) = state.by_nonce.get(&nonce) {
            let used = &state.transfers[*at];
            let same = (&used.pay_to, &used.asset, used.amount) == (&pay_to, &asset, amount);
            return if same { Ok(used.clone()) } else { Err("nonce already exists for address") };
        }
        if ledger > expiration {
            return Err("signature has expired");
        }
        if world.unix_ms() / 1000 > signed.max_time {
            return Err("tx_too_late");
        }
        if state.balance < amount {
            return Err("balance is not sufficient");
        }
        state.balance -= amount;
        // The facilitator puts its own account and sequence into it, so the buyer cannot know the hash before.
        let mut envelope = signed.envelope;
        envelope.tx.source_account = MuxedAccount::Ed25519(Uint256([9; 32]));
        envelope.tx.seq_num = SequenceNumber(2 + state.transfers.len() as i64);
        let hash = envelope.tx.hash(Sha256::digest(PASSPHRASE).into()).map_err(|_| "no hash")?;
        let (hash, envelope) = (hex::encode(hash), to_base64(&TransactionEnvelope::Tx(envelope)));
        let transfer = Transfer { nonce, pay_to, asset, amount, hash, ledger, expiration, envelope };
        let at = state.transfers.len();
        state.by_nonce.insert(nonce, at);
        state.transfers.push(transfer.clone());
        drop(state);
        world.trace(&format!("chain: {} moves in {ledger}", nonce));
        Ok(transfer)
    }
}

/// What a payer sends: a transfer of the account's money, signed with this nonce until this ledger, base64 XDR.
pub fn payment(nonce: i64, pay_to: &str, amount: i128, expiration: u32, max_time: u64) -> String {
    let to: ScAddress = pay_to.parse().expect("an address");
    let contract: ScAddress = ASSET.parse().expect("a contract");
    let call = InvokeContractArgs {
        contract_address: contract,
        function_name: "transfer".try_into().expect("a name"),
        args: vec![
            ScVal::Address(account()),
            ScVal::Address(to),
            ScVal::I128(Int128Parts { hi: (amount >> 64) as i64, lo: amount as u64 }),
        ]
        .try_into()
        .expect("arguments"),
    };
    let invocation = SorobanAuthorizedInvocation {
        function: SorobanAuthorizedFunction::ContractFn(call.clone()),
        sub_invocations: Default::default(),
    };
    let signature = sign(&HashIdPreimage::SorobanAuthorization(HashIdPreimageSorobanAuthorization {
        network_id: Hash(Sha256::digest(PASSPHRASE).into()),
        nonce,
        signature_expiration_ledger: expiration,
        invocation: invocation.clone(),
    }));
    let part = |name: &str, bytes: &[u8]| ScMapEntry {
        key: ScVal::Symbol(name.try_into().expect("a symbol")),
        val: ScVal::Bytes(bytes.to_vec().try_into().expect("bytes")),
    };
    let parts = vec![part("public_key", &key().verifying_key().to_bytes()), part("signature", &signature)];
    let map = ScVal::Map(Some(ScMap(parts.try_into().expect("a map"))));
    let credentials = SorobanAddressCredentials {
        address: account(),
        nonce,
        signature_expiration_ledger: expiration,
        signature: ScVal::Vec(Some(ScVec(vec![map].try_into().expect("a list")))),
    };
    let entry = SorobanAuthorizationEntry {
        credentials: SorobanCredentials::Address(credentials),
        root_invocation: invocation,
    };
    let operation = Operation {
        source_account: None,
        body: OperationBody::InvokeHostFunction(InvokeHostFunctionOp {
            host_function: HostFunction::InvokeContract(call),
            auth: vec![entry].try_into().expect("one entry"),
        }),
    };
    let tx = Transaction {
        source_account: MuxedAccount::Ed25519(Uint256([0; 32])),
        fee: 100,
        seq_num: SequenceNumber(0),
        cond: Preconditions::Time(TimeBounds { min_time: TimePoint(0), max_time: TimePoint(max_time) }),
        memo: Memo::None,
        operations: vec![operation].try_into().expect("one operation"),
        ext: TransactionExt::V0,
    };
    to_base64(&TransactionEnvelope::Tx(TransactionV1Envelope { tx, signatures: Default::default() }))
}

/// The one transfer of a transaction, its signature verified.
pub fn read(envelope: &str) -> Result<Signed, &'static str> {
    let TransactionEnvelope::Tx(envelope) =
        TransactionEnvelope::from_xdr_base64(envelope, LIMITS).map_err(|_| "no transaction")?
    else {
        return Err("another kind of transaction");
    };
    let [operation] = envelope.tx.operations.as_slice() else { return Err("not one operation") };
    let OperationBody::InvokeHostFunction(invoke) = &operation.body else { return Err("no invocation") };
    let HostFunction::InvokeContract(call) = &invoke.host_function else { return Err("no contract call") };
    let [entry] = invoke.auth.as_slice() else { return Err("not one authorization") };
    let SorobanCredentials::Address(credentials) = &entry.credentials else { return Err("other credentials") };
    let SorobanAuthorizedFunction::ContractFn(authorized) = &entry.root_invocation.function else {
        return Err("another function is authorized");
    };
    if authorized != call || !entry.root_invocation.sub_invocations.is_empty() {
        return Err("another call is authorized");
    }
    let preimage = HashIdPreimage::SorobanAuthorization(HashIdPreimageSorobanAuthorization {
        network_id: Hash(Sha256::digest(PASSPHRASE).into()),
        nonce: credentials.nonce,
        signature_expiration_ledger: credentials.signature_expiration_ledger,
        invocation: entry.root_invocation.clone(),
    });
    let digest = Sha256::digest(preimage.to_xdr(LIMITS).map_err(|_| "preimage")?);
    let signature = signature(&credentials.signature).ok_or("no signature")?;
    let key = VerifyingKey::from_bytes(&key().verifying_key().to_bytes()).map_err(|_| "key")?;
    key.verify_strict(&digest, &Signature::from_bytes(&signature)).map_err(|_| "the signature is wrong")?;
    if credentials.address != account() {
        return Err("another payer");
    }
    let max_time = match &envelope.tx.cond {
        Preconditions::Time(bounds) => bounds.max_time.0,
        _ => return Err("no time bounds"),
    };
    let (entry, call, credentials) = (entry.clone(), call.clone(), credentials.clone());
    Ok(Signed { entry, call, credentials, max_time, envelope })
}

/// (recipient, asset, amount) of a `transfer`.
fn terms(call: &InvokeContractArgs) -> Option<(String, String, i128)> {
    let [_, ScVal::Address(to), ScVal::I128(parts)] = call.args.as_slice() else { return None };
    let amount = (i128::from(parts.hi) << 64) | i128::from(parts.lo);
    (call.function_name.0.as_slice() == b"transfer" && amount > 0)
        .then(|| (to.to_string(), call.contract_address.to_string(), amount))
}

fn signature(value: &ScVal) -> Option<[u8; 64]> {
    let ScVal::Vec(Some(list)) = value else { return None };
    let [ScVal::Map(Some(map))] = list.as_slice() else { return None };
    map.iter().find_map(|entry| match (&entry.key, &entry.val) {
        (ScVal::Symbol(name), ScVal::Bytes(bytes)) if name.0.as_slice() == b"signature" => {
            bytes.as_slice().try_into().ok()
        }
        _ => None,
    })
}

pub fn account() -> ScAddress {
    let key = Uint256(key().verifying_key().to_bytes());
    ScAddress::Account(AccountId(XdrKey::PublicKeyTypeEd25519(key)))
}

/// The one asset of this chain is the host's own asset contract.
pub fn asset_instance(key: LedgerKeyContractData) -> LedgerEntryData {
    LedgerEntryData::ContractData(ContractDataEntry {
        ext: ExtensionPoint::V0,
        contract: key.contract,
        key: key.key,
        durability: key.durability,
        val: ScVal::ContractInstance(ScContractInstance {
            executable: ContractExecutable::StellarAsset,
            storage: None,
        }),
    })
}

/// What a node stores for a used nonce.
pub fn nonce_data(nonce: i64) -> LedgerEntryData {
    LedgerEntryData::ContractData(ContractDataEntry {
        ext: ExtensionPoint::V0,
        contract: account(),
        key: ScVal::LedgerKeyNonce(ScNonceKey { nonce }),
        durability: ContractDataDurability::Temporary,
        val: ScVal::Void,
    })
}
