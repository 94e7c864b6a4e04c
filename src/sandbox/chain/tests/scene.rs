//! A payer, a shop and a fee account on a network whose ledgers close by hand; payments built step by step, so that
//! each step can be done wrongly.

use ed25519_dalek::Signer as _;
use stellar_xdr::{
    DecoratedSignature, FeeBumpTransaction, FeeBumpTransactionEnvelope, FeeBumpTransactionExt,
    FeeBumpTransactionInnerTx, Hash, HashIdPreimage, HashIdPreimageSorobanAuthorization,
    HashIdPreimageSorobanAuthorizationWithAddress, HostFunction, Int128Parts, InvokeContractArgs, InvokeHostFunctionOp,
    Memo, MuxedAccount, Operation, OperationBody, Preconditions, ScAddress, ScBytes, ScMap, ScMapEntry, ScSymbol,
    ScVal, ScVec, SequenceNumber, Signature, SignatureHint, SorobanAddressCredentials, SorobanAuthorizationEntry,
    SorobanAuthorizedFunction, SorobanAuthorizedInvocation, SorobanCredentials, SorobanTransactionData, TimeBounds,
    TimePoint, Transaction, TransactionEnvelope, TransactionExt, TransactionV1Envelope, Uint256,
};

use crate::sandbox::chain::host::{Auth, simulate};
use crate::sandbox::chain::ledger::{Admission, Shared, lock};
use crate::sandbox::chain::xdr::{encode, sha256};
use crate::sandbox::chain::{Account, LocalNetwork, Options, PASSPHRASE, admission};

pub const START: i64 = 50_000_000;
pub const AMOUNT: i64 = 100_000;

pub struct Scene {
    pub network: LocalNetwork,
    pub payer: Account,
    pub shop: Account,
    pub fees: Account,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    Address,
    AddressV2,
}

/// How a sent transaction ended in the next ledger.
#[derive(Debug)]
pub struct End {
    pub hash: [u8; 32],
    pub success: bool,
    pub error: String,
}

pub fn options() -> Options {
    Options { ledger_interval: None, seed: Some([7; 32]), ..Options::default() }
}

pub fn scene(options: Options) -> Scene {
    let network = LocalNetwork::start(options, crate::ports::machine::world().0).unwrap();
    let [payer, shop, fees] = ["payer", "shop", "fees"].map(|name| network.account(name));
    for account in [&payer, &shop, &fees] {
        network.fund(&account.id(), 100_000_000);
    }
    network.trust(&payer.id(), START);
    network.trust(&shop.id(), 0);
    Scene { network, payer, shop, fees }
}

pub fn address(account: &Account) -> ScAddress {
    ScAddress::Account(account.id())
}

impl Scene {
    pub fn chain(&self) -> &Shared {
        &self.network.inner.chain
    }

    pub fn balances(&self) -> (i64, i64) {
        let of = |account: &Account| self.network.balance(&account.id()).unwrap_or(-1);
        (of(&self.payer), of(&self.shop))
    }

    pub fn close(&self, ledgers: u32) {
        for _ in 0..ledgers {
            self.network.close_now();
        }
    }

    pub fn transfer(&self, amount: i64) -> InvokeContractArgs {
        let amount = Int128Parts { hi: amount >> 63, lo: amount as u64 };
        InvokeContractArgs {
            contract_address: ScAddress::Contract(lock(self.chain()).contract.clone()),
            function_name: ScSymbol("transfer".try_into().unwrap()),
            args: vec![ScVal::Address(address(&self.payer)), ScVal::Address(address(&self.shop)), ScVal::I128(amount)]
                .try_into()
                .unwrap(),
        }
    }

    /// The payer's authorization of a transfer, not signed yet.
    pub fn entry(&self, amount: i64, nonce: i64, expiration: u32, arm: Arm) -> SorobanAuthorizationEntry {
        let credentials = SorobanAddressCredentials {
            address: address(&self.payer),
            nonce,
            signature_expiration_ledger: expiration,
            signature: ScVal::Void,
        };
        SorobanAuthorizationEntry {
            credentials: match arm {
                Arm::Address => SorobanCredentials::Address(credentials),
                Arm::AddressV2 => SorobanCredentials::AddressV2(credentials),
            },
            root_invocation: SorobanAuthorizedInvocation {
                function: SorobanAuthorizedFunction::ContractFn(self.transfer(amount)),
                sub_invocations: Default::default(),
            },
        }
    }

    /// An honest entry, good for `ledgers` from now.
    pub fn signed(&self, amount: i64, nonce: i64, ledgers: u32) -> SorobanAuthorizationEntry {
        let expiration = self.network.latest().sequence + ledgers;
        sign(self.entry(amount, nonce, expiration, Arm::Address), &self.payer, PASSPHRASE)
    }

    /// What an enforcing simulation gives for the entry.
    pub fn data(&self, entry: &SorobanAuthorizationEntry) -> Result<SorobanTransactionData, String> {
        let auth = Auth::Enforce(vec![entry.clone()]);
        let at = self.network.latest().sequence;
        let function = HostFunction::InvokeContract(call(entry));
        let done = simulate(self.chain(), at, function, auth, &self.fees.id(), [0; 32]).map_err(|e| e.to_string())?;
        done.invoke_result.map_err(|error| format!("{error:?}"))?;
        done.transaction_data.ok_or_else(|| "no data".into())
    }

    pub fn transaction(&self, entry: &SorobanAuthorizationEntry, data: &SorobanTransactionData) -> Transaction {
        self.transaction_from(&self.fees, entry, data)
    }

    pub fn transaction_from(
        &self,
        source: &Account,
        entry: &SorobanAuthorizationEntry,
        data: &SorobanTransactionData,
    ) -> Transaction {
        let sequence = lock(self.chain()).account(&source.id()).map_or(0, |account| account.seq_num.0);
        Transaction {
            source_account: muxed(source),
            fee: 100 + u32::try_from(data.resource_fee).unwrap(),
            seq_num: SequenceNumber(sequence + 1),
            cond: Preconditions::Time(TimeBounds { min_time: TimePoint(0), max_time: TimePoint(0) }),
            memo: Memo::None,
            operations: vec![Operation {
                source_account: None,
                body: OperationBody::InvokeHostFunction(InvokeHostFunctionOp {
                    host_function: HostFunction::InvokeContract(call(entry)),
                    auth: vec![entry.clone()].try_into().unwrap(),
                }),
            }]
            .try_into()
            .unwrap(),
            ext: TransactionExt::V1(data.clone()),
        }
    }

    pub fn hash(&self, envelope: &TransactionEnvelope) -> [u8; 32] {
        admission::hash(sha256(PASSPHRASE), envelope).unwrap()
    }

    pub fn send(&self, envelope: TransactionEnvelope) -> Admission {
        let hash = self.hash(&envelope);
        let now = self.network.inner.world.unix_ms() / 1_000;
        lock(self.chain()).send(envelope, hash, now)
    }

    /// Sends, closes a ledger, and looks.
    pub fn settle(&self, envelope: TransactionEnvelope) -> End {
        let hash = self.hash(&envelope);
        assert_eq!(self.send(envelope), Admission::Pending);
        self.close(1);
        self.end(hash).expect("the ledger has the transaction")
    }

    pub fn end(&self, hash: [u8; 32]) -> Option<End> {
        let chain = lock(self.chain());
        let (_, _, found) = chain.transaction(&hash, chain.seq)?;
        Some(End { hash, success: found.success, error: found.error.clone().unwrap_or_default() })
    }

    /// The whole payment, honestly.
    pub fn pay(&self, amount: i64, nonce: i64) -> End {
        let entry = self.signed(amount, nonce, 100);
        let data = self.data(&entry).unwrap();
        self.settle(envelope(self.transaction(&entry, &data), &self.fees))
    }
}

fn call(entry: &SorobanAuthorizationEntry) -> InvokeContractArgs {
    match &entry.root_invocation.function {
        SorobanAuthorizedFunction::ContractFn(call) => call.clone(),
        other => panic!("{other:?}"),
    }
}

pub fn muxed(account: &Account) -> MuxedAccount {
    MuxedAccount::Ed25519(Uint256(account.key.verifying_key().to_bytes()))
}

/// Signs what the entry's arm demands (CAP-71).
pub fn sign(mut entry: SorobanAuthorizationEntry, by: &Account, passphrase: &str) -> SorobanAuthorizationEntry {
    let network_id = Hash(sha256(passphrase));
    let invocation = entry.root_invocation.clone();
    let (preimage, credentials) = match &mut entry.credentials {
        SorobanCredentials::Address(credentials) => {
            let preimage = HashIdPreimage::SorobanAuthorization(HashIdPreimageSorobanAuthorization {
                network_id,
                nonce: credentials.nonce,
                signature_expiration_ledger: credentials.signature_expiration_ledger,
                invocation,
            });
            (preimage, credentials)
        }
        SorobanCredentials::AddressV2(credentials) => {
            let preimage =
                HashIdPreimage::SorobanAuthorizationWithAddress(HashIdPreimageSorobanAuthorizationWithAddress {
                    network_id,
                    nonce: credentials.nonce,
                    signature_expiration_ledger: credentials.signature_expiration_ledger,
                    address: credentials.address.clone(),
                    invocation,
                });
            (preimage, credentials)
        }
        other => panic!("{other:?}"),
    };
    let signature = by.key.sign(&sha256(encode(&preimage).unwrap()));
    let member = |key: &str, value: &[u8]| ScMapEntry {
        key: ScVal::Symbol(ScSymbol(key.try_into().unwrap())),
        val: ScVal::Bytes(ScBytes(value.to_vec().try_into().unwrap())),
    };
    let map = vec![member("public_key", by.key.verifying_key().as_bytes()), member("signature", &signature.to_bytes())];
    let map = ScVal::Map(Some(ScMap(map.try_into().unwrap())));
    credentials.signature = ScVal::Vec(Some(ScVec(vec![map].try_into().unwrap())));
    entry
}

fn decorated(hash: &[u8; 32], by: &Account) -> DecoratedSignature {
    let public = by.key.verifying_key().to_bytes();
    DecoratedSignature {
        hint: SignatureHint(public[28..].try_into().unwrap()),
        signature: Signature(by.key.sign(hash).to_bytes().to_vec().try_into().unwrap()),
    }
}

pub fn envelope(tx: Transaction, by: &Account) -> TransactionEnvelope {
    let unsigned = TransactionEnvelope::Tx(TransactionV1Envelope { tx: tx.clone(), signatures: Default::default() });
    let hash = admission::hash(sha256(PASSPHRASE), &unsigned).unwrap();
    let signatures = vec![decorated(&hash, by)].try_into().unwrap();
    TransactionEnvelope::Tx(TransactionV1Envelope { tx, signatures })
}

pub fn fee_bump(inner: TransactionEnvelope, by: &Account, fee: i64) -> TransactionEnvelope {
    let TransactionEnvelope::Tx(inner) = inner else { panic!("not a plain transaction") };
    let tx = FeeBumpTransaction {
        fee_source: muxed(by),
        fee,
        inner_tx: FeeBumpTransactionInnerTx::Tx(inner),
        ext: FeeBumpTransactionExt::V0,
    };
    let unsigned =
        TransactionEnvelope::TxFeeBump(FeeBumpTransactionEnvelope { tx: tx.clone(), signatures: Default::default() });
    let hash = admission::hash(sha256(PASSPHRASE), &unsigned).unwrap();
    let signatures = vec![decorated(&hash, by)].try_into().unwrap();
    TransactionEnvelope::TxFeeBump(FeeBumpTransactionEnvelope { tx, signatures })
}
