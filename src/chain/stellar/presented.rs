//! A payment that somebody else made, as a seller may judge it alone: the transfer, its one authorization, and the
//! signature of an account. What it cannot judge (balances, a smart account's signature, a used nonce) the facilitator's
//! simulation does.
//!
//! Source: `exact` on Stellar (`x402.md` 4.2 and 4.5); CAP-46-11 and CAP-71 for what is signed.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signature, VerifyingKey};
use sha2::{Digest, Sha256};
use stellar_xdr::{
    HostFunction, OperationBody, ReadXdr, ScAddress, ScVal, SorobanAuthorizedFunction, SorobanCredentials, Transaction,
    TransactionEnvelope,
};

use super::Credentials;
use super::entry::{Draft, Transfer, XDR};
use crate::money::Amount;

/// A longer text is no payment of ours, base64 characters.
const MAX_TEXT: usize = 64 * 1024;
/// A Stellar account has at most 20 signers beside its own key.
const MAX_SIGNATURES: usize = 21;

/// What is wrong, in words without a value from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PresentedError(pub &'static str);

/// A transfer with its authorization, read and well formed. No Debug: the signature in it can be spent.
#[derive(Clone)]
pub struct PresentedTransfer {
    transfer: Transfer,
    credentials: Credentials,
    nonce: i64,
    expiration: u32,
    signature: ScVal,
}

/// What can be said of the signature without the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signed {
    /// By keys of an account over exactly this transfer.
    ByAccount,
    /// A smart account's: only its contract knows.
    ByContract,
}

impl PresentedTransfer {
    /// `transaction`: base64 XDR of the `TransactionEnvelope`, the scheme's payload.
    pub fn read(transaction: &str) -> Result<PresentedTransfer, PresentedError> {
        let refused = |what| Err(PresentedError(what));
        if transaction.len() > MAX_TEXT {
            return refused("the transaction is too long");
        }
        let bytes = BASE64.decode(transaction).map_err(|_| PresentedError("the transaction is not base64"))?;
        let envelope = TransactionEnvelope::from_xdr(&bytes, XDR)
            .map_err(|_| PresentedError("the transaction is not the XDR of an envelope"))?;
        match envelope {
            TransactionEnvelope::Tx(envelope) => PresentedTransfer::of(&envelope.tx),
            _ => refused("the transaction is a fee bump or of an old form"),
        }
    }

    /// A transaction that is this one transfer by this one authorization and nothing else: where it succeeded, the
    /// authorization was used for it.
    pub(super) fn of(tx: &Transaction) -> Result<PresentedTransfer, PresentedError> {
        let refused = |what| Err(PresentedError(what));
        let [operation] = tx.operations.as_slice() else {
            return refused("the transaction has not exactly one operation");
        };
        let OperationBody::InvokeHostFunction(invoke) = &operation.body else {
            return refused("the operation invokes no contract");
        };
        let HostFunction::InvokeContract(call) = &invoke.host_function else {
            return refused("the operation invokes no contract");
        };
        let [entry] = invoke.auth.as_slice() else {
            return refused("the operation has not exactly one authorization");
        };
        let (arm, credentials) = match &entry.credentials {
            SorobanCredentials::Address(credentials) => (Credentials::Address, credentials),
            SorobanCredentials::AddressV2(credentials) => (Credentials::AddressV2, credentials),
            _ => return refused("the authorization has another kind of credentials"),
        };
        let root = &entry.root_invocation;
        if !root.sub_invocations.is_empty() {
            return refused("the authorization has invocations underneath");
        }
        if !matches!(&root.function, SorobanAuthorizedFunction::ContractFn(authorized) if authorized == call) {
            return refused("the authorization is for another call than the operation's");
        }
        let ScAddress::Contract(_) = &call.contract_address else {
            return refused("the call is to no contract");
        };
        let [ScVal::Address(from), ScVal::Address(to), ScVal::I128(amount)] = call.args.as_slice() else {
            return refused("the call is no transfer(from, to, amount)");
        };
        if call.function_name.0.as_slice() != b"transfer" {
            return refused("the call is no transfer(from, to, amount)");
        }
        if *from != credentials.address {
            return refused("the authorization is of another account than the payer");
        }
        if !matches!(from, ScAddress::Account(_) | ScAddress::Contract(_)) {
            return refused("the payer is neither an account nor a contract");
        }
        let amount = Amount::from_i128(i128::from(amount)).filter(|amount| !amount.is_zero());
        let Some(amount) = amount else { return refused("the amount is not above zero") };
        let transfer = Transfer {
            payer: from.to_string(),
            pay_to: to.to_string(),
            asset: call.contract_address.to_string(),
            amount,
        };
        Ok(PresentedTransfer {
            transfer,
            credentials: arm,
            nonce: credentials.nonce,
            expiration: credentials.signature_expiration_ledger,
            signature: credentials.signature.clone(),
        })
    }

    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }
    pub fn nonce(&self) -> i64 {
        self.nonce
    }
    /// The last ledger in which the authorization can be used.
    pub fn expiration(&self) -> u32 {
        self.expiration
    }

    /// Whether every signature is one over this transfer on the network of this passphrase. That a key may sign for an
    /// account whose own key it is not, only the network knows; that somebody signed, with a key that he holds, is
    /// known here.
    pub fn verify(&self, passphrase: &str) -> Result<Signed, PresentedError> {
        let refused = |what| Err(PresentedError(what));
        if self.transfer.payer.starts_with('C') {
            return match self.signature {
                ScVal::Void => refused("the authorization is not signed"),
                _ => Ok(Signed::ByContract),
            };
        }
        let id = Sha256::digest(passphrase).into();
        let draft = Draft::new(self.transfer.clone(), id, self.credentials, self.nonce, self.expiration, 0)
            .map_err(|_| PresentedError("the transfer cannot be signed for"))?;
        let digest = draft.digest();
        let ScVal::Vec(Some(signatures)) = &self.signature else {
            return refused("the authorization is not signed");
        };
        if signatures.is_empty() || signatures.len() > MAX_SIGNATURES {
            return refused("the authorization has no signature, or too many");
        }
        for signature in signatures.iter() {
            let (key, signature) = pair(signature).ok_or(PresentedError("a signature is malformed"))?;
            let key = VerifyingKey::from_bytes(&key).map_err(|_| PresentedError("a signature's key is none"))?;
            key.verify_strict(&digest, &Signature::from_bytes(&signature))
                .map_err(|_| PresentedError("a signature is not over this payment on this network"))?;
        }
        Ok(Signed::ByAccount)
    }
}

/// Host type `AccountEd25519Signature`: a map of two symbols.
fn pair(value: &ScVal) -> Option<([u8; 32], [u8; 64])> {
    let ScVal::Map(Some(map)) = value else { return None };
    let [first, second] = map.as_slice() else { return None };
    let bytes = |entry: &stellar_xdr::ScMapEntry, name: &[u8]| match (&entry.key, &entry.val) {
        (ScVal::Symbol(key), ScVal::Bytes(bytes)) if key.0.as_slice() == name => Some(bytes.to_vec()),
        _ => None,
    };
    let key = bytes(first, b"public_key")?.try_into().ok()?;
    let signature = bytes(second, b"signature")?.try_into().ok()?;
    Some((key, signature))
}

#[cfg(test)]
pub(crate) mod tests {
    use ed25519_dalek::{Signer as _, SigningKey};
    use stellar_xdr::{
        InvokeHostFunctionOp, Memo, MuxedAccount, Operation, Preconditions, SequenceNumber, TransactionExt,
        TransactionV1Envelope, Uint256,
    };

    use super::super::entry::encode;
    use super::*;

    pub const PASSPHRASE: &str = "Test SDF Network ; September 2015";

    /// A signed payment as a payer sends it, with a change made to its envelope.
    pub fn payment(
        seed: u8,
        pay_to: &str,
        asset: &str,
        amount: u64,
        nonce: i64,
        expiration: u32,
        change: impl FnOnce(&mut TransactionV1Envelope),
    ) -> String {
        let key = SigningKey::from_bytes(&[seed; 32]);
        let payer = stellar_strkey::ed25519::PublicKey(key.verifying_key().to_bytes()).to_string().to_string();
        let transfer = Transfer { payer, pay_to: pay_to.into(), asset: asset.into(), amount: Amount::from_u64(amount) };
        let id = Sha256::digest(PASSPHRASE).into();
        let draft = Draft::new(transfer, id, Credentials::Address, nonce, expiration, 0).unwrap();
        let signature = key.sign(&draft.digest()).to_bytes();
        let call = draft.call.clone();
        let signed = draft.attach(&signature).unwrap();
        let operation = Operation {
            source_account: None,
            body: OperationBody::InvokeHostFunction(InvokeHostFunctionOp {
                host_function: HostFunction::InvokeContract(call),
                auth: vec![signed.entry].try_into().unwrap(),
            }),
        };
        let tx = Transaction {
            source_account: MuxedAccount::Ed25519(Uint256([0; 32])),
            fee: 100,
            seq_num: SequenceNumber(0),
            cond: Preconditions::None,
            memo: Memo::None,
            operations: vec![operation].try_into().unwrap(),
            ext: TransactionExt::V0,
        };
        let mut envelope = TransactionV1Envelope { tx, signatures: Default::default() };
        change(&mut envelope);
        BASE64.encode(encode(&TransactionEnvelope::Tx(envelope)))
    }

    const TO: &str = "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4";
    const USDC: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";

    fn invoke(envelope: &mut TransactionV1Envelope, change: impl FnOnce(&mut InvokeHostFunctionOp)) {
        let mut operations = envelope.tx.operations.to_vec();
        let OperationBody::InvokeHostFunction(op) = &mut operations[0].body else { panic!() };
        change(op);
        envelope.tx.operations = operations.try_into().unwrap();
    }

    #[test]
    fn a_payment_is_read_and_its_signature_verified() {
        let text = payment(1, TO, USDC, 10_000, -7, 1_234, |_| {});
        let read = PresentedTransfer::read(&text).unwrap();
        assert_eq!((read.nonce(), read.expiration()), (-7, 1_234));
        assert_eq!((read.transfer().pay_to.as_str(), read.transfer().asset.as_str()), (TO, USDC));
        assert_eq!(read.transfer().amount, Amount::from_u64(10_000));
        assert_eq!(read.verify(PASSPHRASE), Ok(Signed::ByAccount));
        assert!(read.verify("Public Global Stellar Network ; September 2015").is_err(), "another network's");
    }

    #[test]
    fn what_was_altered_after_signing_does_not_verify() {
        type Change = fn(&mut InvokeHostFunctionOp);
        let nonce: Change = |op| {
            let mut auth = op.auth.to_vec();
            let SorobanCredentials::Address(credentials) = &mut auth[0].credentials else { panic!() };
            credentials.nonce += 1;
            op.auth = auth.try_into().unwrap();
        };
        let expiration: Change = |op| {
            let mut auth = op.auth.to_vec();
            let SorobanCredentials::Address(credentials) = &mut auth[0].credentials else { panic!() };
            credentials.signature_expiration_ledger += 1;
            op.auth = auth.try_into().unwrap();
        };
        let unsigned: Change = |op| {
            let mut auth = op.auth.to_vec();
            let SorobanCredentials::Address(credentials) = &mut auth[0].credentials else { panic!() };
            credentials.signature = ScVal::Void;
            op.auth = auth.try_into().unwrap();
        };
        for change in [nonce, expiration, unsigned] {
            let text = payment(1, TO, USDC, 1, 5, 9, |envelope| invoke(envelope, change));
            assert!(PresentedTransfer::read(&text).unwrap().verify(PASSPHRASE).is_err());
        }
    }

    #[test]
    fn what_is_no_single_authorized_transfer_is_refused() {
        type Change = fn(&mut TransactionV1Envelope);
        let changes: [(&str, Change); 5] = [
            ("one operation", |e| {
                let twice = vec![e.tx.operations[0].clone(), e.tx.operations[0].clone()];
                e.tx.operations = twice.try_into().unwrap();
            }),
            ("one authorization", |e| invoke(e, |op| op.auth = Default::default())),
            ("another call", |e| {
                invoke(e, |op| {
                    let HostFunction::InvokeContract(call) = &mut op.host_function else { panic!() };
                    let mut args = call.args.to_vec();
                    args[2] = ScVal::I128(super::super::entry::parts(2));
                    call.args = args.try_into().unwrap();
                });
            }),
            ("underneath", |e| {
                invoke(e, |op| {
                    let mut auth = op.auth.to_vec();
                    let below = auth[0].root_invocation.clone();
                    auth[0].root_invocation.sub_invocations = vec![below].try_into().unwrap();
                    op.auth = auth.try_into().unwrap();
                });
            }),
            ("another kind", |e| {
                invoke(e, |op| {
                    let mut auth = op.auth.to_vec();
                    auth[0].credentials = SorobanCredentials::SourceAccount;
                    op.auth = auth.try_into().unwrap();
                });
            }),
        ];
        for (word, change) in changes {
            let error = PresentedTransfer::read(&payment(1, TO, USDC, 1, 5, 9, change)).err().unwrap();
            assert!(error.0.contains(word), "{word}: {error}");
        }
        for text in ["", "AAAA", "not base64!", &"A".repeat(MAX_TEXT + 4)] {
            assert!(PresentedTransfer::read(text).is_err());
        }
    }
}
