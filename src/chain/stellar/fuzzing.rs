//! XDR from outside: a signer's answer, an RPC's simulation, a transaction in which a nonce is looked for.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signature, Signer as _, SigningKey, Verifier as _};
use sha2::{Digest, Sha256};
use stellar_xdr::{
    DiagnosticEvent, HostFunction, LedgerEntryData, MuxedAccount, OperationBody, Preconditions, ReadXdr, ScVal,
    SorobanAuthorizedFunction, SorobanCredentials, TransactionEnvelope, TransactionExt, Uint256,
};

use super::entry::{self, Draft, SignedEntry, Transfer, XDR};
use super::{Credentials, history, prepare, rpc::Simulation};
use crate::json;
use crate::money::Amount;

/// A payer for this file alone.
const KEY: [u8; 32] = [7; 32];
const ASSET: &str = "CBIELTK6YBZJU5UP2WWQEUCYKLPU6AUNZ2BQ4WWFEIE3USCIHMXQDAMA";
const PAY_TO: &str = "GAOH2NR3A3R2VS6TUE6L75A3OMJ4UKJWEHHNL5GIIEQTS5RVZEK5LAP4";
/// A contract that pays.
const SMART: &str = "CCW67TSZV3SSS2HXMBQ5JFGCKJNXKZM7UQUWUZPUTHXSTZLEO7SJMI75";
const NONCE: i64 = 0x0123_4567_89ab_cdef;
const MAX_TIME: u64 = 1_800_000_060;

/// The first byte says what the rest is: a signer's answer (`a` as text, `b` as bytes, `c` for a smart account), a
/// simulation (`s`), an envelope (`t`), anything else every kind of value.
pub fn run(data: &[u8]) {
    let Some((&kind, rest)) = data.split_first() else { return };
    match kind {
        b'a' => attach(&String::from_utf8_lossy(rest)),
        b'b' => attach(&BASE64.encode(rest)),
        b'c' => attach_smart(&BASE64.encode(rest)),
        b's' => simulation(rest),
        b't' => nonce(rest),
        _ => {
            let _ = ScVal::from_xdr(rest, XDR);
            let _ = LedgerEntryData::from_xdr(rest, XDR);
            let _ = DiagnosticEvent::from_xdr(rest, XDR);
        }
    }
}

fn draft(credentials: Credentials) -> Draft {
    let key = SigningKey::from_bytes(&KEY).verifying_key().to_bytes();
    paid_by(&stellar_strkey::ed25519::PublicKey(key).to_string(), credentials)
}

fn paid_by(payer: &str, credentials: Credentials) -> Draft {
    let transfer =
        Transfer { payer: payer.into(), pay_to: PAY_TO.into(), asset: ASSET.into(), amount: Amount::from_u64(10_000) };
    let network = Sha256::digest("Test SDF Network ; September 2015").into();
    Draft::new(transfer, network, credentials, NONCE, 1_000_010, MAX_TIME).unwrap()
}

fn signed(credentials: Credentials) -> SignedEntry {
    let draft = draft(credentials);
    let signature = SigningKey::from_bytes(&KEY).sign(&draft.digest()).to_bytes();
    draft.attach(&signature).unwrap_or_else(|e| panic!("{e}"))
}

/// A smart account's entry is ours byte for byte but for its signature, which is there.
fn attach_smart(answer: &str) {
    for credentials in [Credentials::Address, Credentials::AddressV2] {
        let ours = paid_by(SMART, credentials);
        let Ok(accepted) = ours.clone().attach_base64(answer) else { continue };
        assert_eq!(accepted.draft, ours, "the draft was changed");
        let (SorobanCredentials::Address(found) | SorobanCredentials::AddressV2(found)) = &accepted.entry.credentials
        else {
            panic!("another credential arm")
        };
        assert_ne!(found.signature, ScVal::Void, "no signature");
        let mut bare = accepted.entry.clone();
        let mut expected = signed(credentials).entry;
        for entry in [&mut bare, &mut expected] {
            let (SorobanCredentials::Address(c) | SorobanCredentials::AddressV2(c)) = &mut entry.credentials else {
                panic!("another credential arm")
            };
            c.signature = ScVal::Void;
            c.address = ours.payer.clone();
        }
        expected.root_invocation = bare.root_invocation.clone();
        assert_eq!(bare, expected, "more than the signature differs");
        let SorobanAuthorizedFunction::ContractFn(call) = &accepted.entry.root_invocation.function else {
            panic!("another function")
        };
        assert_eq!(*call, ours.call, "another invocation");
        assert!(accepted.entry.root_invocation.sub_invocations.is_empty());
        assert_eq!(BASE64.decode(answer).unwrap(), entry::encode(&accepted.entry), "bytes behind the entry");
    }
}

/// What is accepted is our own entry but for the signature, which is the payer's over our own draft.
fn attach(answer: &str) {
    for credentials in [Credentials::Address, Credentials::AddressV2] {
        let ours = draft(credentials);
        let Ok(accepted) = ours.clone().attach_base64(answer) else { continue };
        assert_eq!(accepted.draft, ours, "the draft was changed");
        let arm = accepted.entry.credentials.clone();
        let found = match (credentials, arm) {
            (Credentials::Address, SorobanCredentials::Address(found))
            | (Credentials::AddressV2, SorobanCredentials::AddressV2(found)) => found,
            _ => panic!("another credential arm"),
        };
        assert_eq!((found.nonce, found.signature_expiration_ledger), (ours.nonce(), ours.expiration()));
        let key = entry::account_key(&found.address).unwrap();
        assert_eq!(key, SigningKey::from_bytes(&KEY).verifying_key().to_bytes(), "another payer");
        let bytes = entry::encode(&found.signature);
        let digest = ours.digest();
        let good = bytes.windows(64).any(|window| {
            let signature = Signature::from_bytes(window.try_into().unwrap());
            SigningKey::from_bytes(&KEY).verifying_key().verify(&digest, &signature).is_ok()
        });
        assert!(good, "a signature over something else was taken");
        assert_eq!(signed(credentials).entry.root_invocation, accepted.entry.root_invocation, "another invocation");
    }
}

/// Whatever a simulation says, the transaction is ours with one operation, our entry, our bounds and a bounded fee.
fn simulation(text: &[u8]) {
    let Ok(raw) = json::check(text, json::Limits { bytes: 1 << 18, depth: 64 }) else { return };
    for credentials in [Credentials::Address, Credentials::AddressV2] {
        let Ok(simulation) = serde_json::from_str::<Simulation>(raw.get()) else { return };
        let signed = signed(credentials);
        let transaction = match prepare::assemble(simulation, &signed) {
            Ok(transaction) => transaction,
            Err(error) => {
                assert!(error.to_string().chars().count() <= 1000);
                continue;
            }
        };
        let TransactionEnvelope::Tx(envelope) = TransactionEnvelope::from_xdr_base64(&transaction, XDR).unwrap() else {
            panic!("another kind of envelope")
        };
        let tx = envelope.tx;
        assert!(envelope.signatures.is_empty());
        assert_eq!(tx.source_account, MuxedAccount::Ed25519(Uint256([0; 32])));
        assert!(tx.fee <= 50_000);
        let Preconditions::Time(bounds) = tx.cond else { panic!("no time bounds") };
        assert_eq!(bounds.max_time.0, MAX_TIME);
        let [operation] = tx.operations.as_slice() else { panic!("{} operations", tx.operations.len()) };
        assert!(operation.source_account.is_none());
        let OperationBody::InvokeHostFunction(invoke) = &operation.body else { panic!("another operation") };
        assert_eq!(invoke.auth.as_slice(), std::slice::from_ref(&signed.entry));
        let HostFunction::InvokeContract(call) = &invoke.host_function else { panic!("another function") };
        assert_eq!(*call, signed.draft.call);
        let TransactionExt::V1(data) = tx.ext else { panic!("no footprint") };
        assert!((0..=50_000).contains(&data.resource_fee));
        let ours = entry::nonce_key(&signed.draft.payer, NONCE);
        assert!(data.resources.footprint.read_write.contains(&ours));
    }
}

/// A transaction that is said to use the nonce has it in its bytes, with the payer's key.
fn nonce(bytes: &[u8]) {
    let Ok(envelope) = TransactionEnvelope::from_xdr(bytes, XDR) else { return };
    let ours = draft(Credentials::Address);
    if history::uses_nonce(&envelope, &ours.payer, NONCE) {
        let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert!(has(&NONCE.to_be_bytes()) && has(&entry::account_key(&ours.payer).unwrap()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A corpus that is refused at the first byte would prove nothing.
    #[test]
    fn the_corpus_has_inputs_that_are_accepted() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/xdr");
        let read = |name: &str| std::fs::read(format!("{dir}/{name}")).unwrap();
        let entry = draft(Credentials::Address).attach_base64(&String::from_utf8_lossy(&read("signed-entry")[1..]));
        assert!(entry.is_ok(), "{:?}", entry.err());
        let smart = BASE64.encode(&read("smart-entry")[1..]);
        assert!(paid_by(SMART, Credentials::Address).attach_base64(&smart).is_ok());
        let simulation = serde_json::from_slice(&read("simulation")[1..]).unwrap();
        assert!(prepare::assemble(simulation, &signed(Credentials::Address)).is_ok());
        let envelope = TransactionEnvelope::from_xdr(&read("transaction")[1..], XDR).unwrap();
        assert!(history::uses_nonce(&envelope, &draft(Credentials::Address).payer, NONCE));
    }
}
