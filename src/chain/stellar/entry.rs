//! The transfer that we build, its one authorization entry, and the proof that a signature belongs to it.
//!
//! Source: SEP-41 `transfer(from, to, amount)`; CAP-46-11 (authorization), CAP-71 (credential arms).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signature, VerifyingKey};
use sha2::{Digest, Sha256};
use stellar_strkey::Strkey;
use stellar_xdr::{
    AccountId, ContractDataDurability, ContractId, Hash, HashIdPreimage, HashIdPreimageSorobanAuthorization,
    HashIdPreimageSorobanAuthorizationWithAddress, Int128Parts, InvokeContractArgs, LedgerKey, LedgerKeyContractData,
    Limits, PublicKey, ReadXdr, ScAddress, ScBytes, ScMap, ScMapEntry, ScNonceKey, ScSymbol, ScVal, ScVec,
    SorobanAddressCredentials, SorobanAuthorizationEntry, SorobanAuthorizedFunction, SorobanAuthorizedInvocation,
    SorobanCredentials, Uint256, VecM, WriteXdr,
};

use super::super::ChainError;
use super::Credentials;
use crate::money::Amount;

/// For reading what came from outside: an entry or answer of ours is far below both.
pub(crate) const XDR: Limits = Limits { depth: 200, len: 512 * 1024 };

/// Who pays whom how much of what. Addresses are strkeys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    pub payer: String,
    pub pay_to: String,
    pub asset: String,
    pub amount: Amount,
}

/// A transfer and its authorization entry, unsigned: nonce, expiration and credential arm are fixed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Draft {
    pub(super) transfer: Transfer,
    pub(super) network_id: [u8; 32],
    pub(super) credentials: Credentials,
    pub(super) payer: ScAddress,
    pub(super) nonce: i64,
    pub(super) expiration: u32,
    /// Unix seconds: the upper time bound of the transaction.
    pub(super) max_time: u64,
    pub(super) call: InvokeContractArgs,
}

impl Draft {
    pub(super) fn new(
        transfer: Transfer,
        network_id: [u8; 32],
        credentials: Credentials,
        nonce: i64,
        expiration: u32,
        max_time: u64,
    ) -> Result<Draft, ChainError> {
        let payer = address(&transfer.payer, "payer")?;
        let to = address(&transfer.pay_to, "payTo")?;
        let ScAddress::Contract(asset) = address(&transfer.asset, "asset")? else {
            return Err(ChainError::Unsupported("the asset is not a token contract (C…)".into()));
        };
        let amount = transfer
            .amount
            .to_i128()
            .filter(|amount| *amount > 0)
            .ok_or_else(|| ChainError::Unsupported("the amount is zero or beyond 127 bits".into()))?;
        let args = vec![ScVal::Address(payer.clone()), ScVal::Address(to), ScVal::I128(parts(amount))];
        let call = InvokeContractArgs {
            contract_address: ScAddress::Contract(asset),
            function_name: symbol("transfer"),
            args: args.try_into().unwrap_or_default(),
        };
        Ok(Draft { transfer, network_id, credentials, payer, nonce, expiration, max_time, call })
    }

    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }
    /// Whether a signature over this draft is good on the network of this passphrase, and on no other.
    pub fn is_for(&self, passphrase: &str) -> bool {
        self.network_id[..] == Sha256::digest(passphrase)[..]
    }
    pub fn nonce(&self) -> i64 {
        self.nonce
    }
    /// The last ledger in which the authorization can be used.
    pub fn expiration(&self) -> u32 {
        self.expiration
    }

    fn invocation(&self) -> SorobanAuthorizedInvocation {
        SorobanAuthorizedInvocation {
            function: SorobanAuthorizedFunction::ContractFn(self.call.clone()),
            sub_invocations: VecM::default(),
        }
    }

    /// What the payer signs, before hashing. The credential arm decides its form (CAP-71).
    pub(super) fn preimage(&self) -> HashIdPreimage {
        let network_id = Hash(self.network_id);
        match self.credentials {
            Credentials::Address => HashIdPreimage::SorobanAuthorization(HashIdPreimageSorobanAuthorization {
                network_id,
                nonce: self.nonce,
                signature_expiration_ledger: self.expiration,
                invocation: self.invocation(),
            }),
            Credentials::AddressV2 => {
                HashIdPreimage::SorobanAuthorizationWithAddress(HashIdPreimageSorobanAuthorizationWithAddress {
                    network_id,
                    nonce: self.nonce,
                    signature_expiration_ledger: self.expiration,
                    address: self.payer.clone(),
                    invocation: self.invocation(),
                })
            }
        }
    }

    /// Base64 XDR of the `HashIdPreimage`, as SEP-43 wallets take it.
    pub fn preimage_base64(&self) -> String {
        BASE64.encode(encode(&self.preimage()))
    }

    /// The 32 bytes that are signed: SHA-256 of the preimage's XDR.
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(encode(&self.preimage())).into()
    }

    pub(super) fn entry(&self, signature: ScVal) -> SorobanAuthorizationEntry {
        let credentials = SorobanAddressCredentials {
            address: self.payer.clone(),
            nonce: self.nonce,
            signature_expiration_ledger: self.expiration,
            signature,
        };
        SorobanAuthorizationEntry {
            credentials: match self.credentials {
                Credentials::Address => SorobanCredentials::Address(credentials),
                Credentials::AddressV2 => SorobanCredentials::AddressV2(credentials),
            },
            root_invocation: self.invocation(),
        }
    }

    /// The entry with this signature, if it is the payer's over exactly this draft. A smart account has no key that
    /// could verify it here.
    pub fn attach(self, signature: &[u8; 64]) -> Result<SignedEntry, ChainError> {
        let key = account_key(&self.payer)?;
        let verifying = VerifyingKey::from_bytes(&key)
            .map_err(|_| ChainError::Unsupported("the payer's address is no Ed25519 key".into()))?;
        verifying
            .verify_strict(&self.digest(), &Signature::from_bytes(signature))
            .map_err(|_| ChainError::Refused("the signature is not the payer's over this payment".into()))?;
        // Host type AccountEd25519Signature: a vector of one map, symbol keys in order.
        let field = |name: &str, bytes: &[u8]| ScMapEntry {
            key: ScVal::Symbol(symbol(name)),
            val: ScVal::Bytes(ScBytes(bytes.to_vec().try_into().unwrap_or_default())),
        };
        let map = vec![field("public_key", &key), field("signature", signature)];
        let map = ScVal::Map(Some(ScMap(map.try_into().unwrap_or_default())));
        let value = ScVal::Vec(Some(ScVec(vec![map].try_into().unwrap_or_default())));
        Ok(SignedEntry { entry: self.entry(value), draft: self })
    }

    /// A signer's answer: a 64-byte signature or a whole signed entry, base64. A whole entry must be ours, byte for byte,
    /// but for its signature. A G-account's signature is verified here; a smart account's is what its contract takes, and
    /// only the enforcing simulation proves it.
    pub fn attach_base64(self, answer: &str) -> Result<SignedEntry, ChainError> {
        let refused = |why: &str| ChainError::Refused(why.into());
        let bytes = BASE64.decode(answer).map_err(|_| refused("the signature is not base64"))?;
        if let Ok(signature) = <[u8; 64]>::try_from(bytes.as_slice()) {
            return self.attach(&signature);
        }
        let entry = SorobanAuthorizationEntry::from_xdr(&bytes, XDR)
            .map_err(|_| refused("neither a 64-byte signature nor a signed entry"))?;
        let (SorobanCredentials::Address(credentials) | SorobanCredentials::AddressV2(credentials)) =
            &entry.credentials
        else {
            return Err(refused("the signed entry has another kind of credentials"));
        };
        let signature = credentials.signature.clone();
        if encode(&self.entry(signature.clone())) != bytes {
            return Err(refused("the signed entry is not the one that was asked for"));
        }
        if matches!(self.payer, ScAddress::Contract(_)) {
            return match signature {
                ScVal::Void => Err(refused("the signed entry has no signature")),
                _ => Ok(SignedEntry { draft: self, entry }),
            };
        }
        let signature =
            raw_signature(&signature).ok_or_else(|| refused("the signed entry has no Ed25519 signature of one key"))?;
        let signed = self.attach(&signature)?;
        if signed.entry != entry {
            return Err(refused("the signed entry names another key"));
        }
        Ok(signed)
    }
}

/// The entry with its signature: a G-account's is verified, a smart account's is not proven yet. No Debug: it can be
/// spent by anyone who sees it.
pub struct SignedEntry {
    pub(super) draft: Draft,
    pub(super) entry: SorobanAuthorizationEntry,
}

impl SignedEntry {
    pub fn draft(&self) -> &Draft {
        &self.draft
    }
}

fn raw_signature(value: &ScVal) -> Option<[u8; 64]> {
    let ScVal::Vec(Some(signatures)) = value else { return None };
    let [ScVal::Map(Some(map))] = signatures.as_slice() else { return None };
    map.iter().find_map(|entry| match (&entry.key, &entry.val) {
        (ScVal::Symbol(name), ScVal::Bytes(bytes)) if name.0.as_slice() == b"signature" => {
            bytes.as_slice().try_into().ok()
        }
        _ => None,
    })
}

/// G (account) and C (contract) addresses. M (muxed) is refused: the transfer's event would name another recipient
/// than the seller asked for, and facilitators compare them.
pub(super) fn address(text: &str, what: &str) -> Result<ScAddress, ChainError> {
    match Strkey::from_string(text) {
        Ok(Strkey::PublicKeyEd25519(key)) => {
            Ok(ScAddress::Account(AccountId(PublicKey::PublicKeyTypeEd25519(Uint256(key.0)))))
        }
        Ok(Strkey::Contract(contract)) => Ok(ScAddress::Contract(ContractId(Hash(contract.0)))),
        Ok(_) => Err(ChainError::Unsupported(format!("{what} is neither a G nor a C address"))),
        Err(_) => Err(ChainError::Unsupported(format!("{what} is not a Stellar address"))),
    }
}

/// A G-account's own key.
pub(super) fn account_key(address: &ScAddress) -> Result<[u8; 32], ChainError> {
    match address {
        ScAddress::Account(AccountId(PublicKey::PublicKeyTypeEd25519(Uint256(key)))) => Ok(*key),
        _ => Err(ChainError::Refused(
            "the payer is a smart account (C…), whose signature is what its contract takes: the signer must answer with \
             the whole signed entry, not with 64 bytes"
                .into(),
        )),
    }
}

/// The ledger entry that exists once this nonce was used (`consume_nonce` of the host).
pub(super) fn nonce_key(payer: &ScAddress, nonce: i64) -> LedgerKey {
    LedgerKey::ContractData(LedgerKeyContractData {
        contract: payer.clone(),
        key: ScVal::LedgerKeyNonce(ScNonceKey { nonce }),
        durability: ContractDataDurability::Temporary,
    })
}

pub(super) fn parts(amount: i128) -> Int128Parts {
    // The two halves of the number's bits.
    Int128Parts { hi: (amount >> 64) as i64, lo: amount as u64 }
}

pub(super) fn symbol(name: &str) -> ScSymbol {
    ScSymbol(name.try_into().unwrap_or_default())
}

/// XDR of what we built ourselves; encoding it cannot fail within these limits.
pub(super) fn encode(value: &impl WriteXdr) -> Vec<u8> {
    value.to_xdr(XDR).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::{Signer as _, SigningKey};
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct File {
        vectors: Vec<Vector>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Vector {
        passphrase: String,
        secret_seed_strkey: String,
        payer: String,
        pay_to: String,
        asset: String,
        amount: String,
        nonce: String,
        signature_expiration_ledger: u32,
        unsigned_entry_xdr: String,
        preimage_xdr: String,
        preimage_sha256_hex: String,
        signed_entry_xdr: String,
    }

    fn vectors() -> Vec<(Vector, Draft)> {
        let file: File = serde_json::from_str(include_str!("../../../tests/vectors/stellar-auth.json")).unwrap();
        let draft = |v: &Vector| {
            let transfer = Transfer {
                payer: v.payer.clone(),
                pay_to: v.pay_to.clone(),
                asset: v.asset.clone(),
                amount: v.amount.parse().unwrap(),
            };
            let id = Sha256::digest(&v.passphrase).into();
            let nonce = v.nonce.parse().unwrap();
            Draft::new(transfer, id, Credentials::Address, nonce, v.signature_expiration_ledger, 0).unwrap()
        };
        file.vectors
            .into_iter()
            .map(|v| {
                let d = draft(&v);
                (v, d)
            })
            .collect()
    }

    fn key(seed: &str) -> SigningKey {
        SigningKey::from_bytes(&stellar_strkey::ed25519::PrivateKey::from_string(seed).unwrap().0)
    }

    #[test]
    fn preimage_digest_and_signed_entry_are_those_of_the_official_sdk() {
        assert!(vectors().len() >= 2);
        for (v, draft) in vectors() {
            assert_eq!(draft.preimage_base64(), v.preimage_xdr);
            assert_eq!(hex::encode(draft.digest()), v.preimage_sha256_hex);
            let unsigned = SorobanAuthorizationEntry::from_xdr_base64(&v.unsigned_entry_xdr, XDR).unwrap();
            assert_eq!(unsigned.root_invocation, draft.invocation());
            let signature = key(&v.secret_seed_strkey).sign(&draft.digest()).to_bytes();
            let signed = draft.clone().attach(&signature).unwrap();
            assert_eq!(BASE64.encode(encode(&signed.entry)), v.signed_entry_xdr);
            let whole = draft.attach_base64(&v.signed_entry_xdr).unwrap();
            assert_eq!(whole.entry, signed.entry);
        }
    }

    #[test]
    fn a_signature_over_anything_else_is_refused() {
        for (v, draft) in vectors() {
            let key = key(&v.secret_seed_strkey);
            let mut flipped = key.sign(&draft.digest()).to_bytes();
            flipped[0] ^= 1;
            assert!(draft.clone().attach(&flipped).is_err());
            let other = Draft { nonce: draft.nonce ^ 1, ..draft.clone() };
            assert!(draft.clone().attach(&key.sign(&other.digest()).to_bytes()).is_err(), "another nonce");
            let thief = SigningKey::from_bytes(&[9; 32]);
            assert!(draft.clone().attach(&thief.sign(&draft.digest()).to_bytes()).is_err(), "another key");
            let theirs = other.clone().attach(&key.sign(&other.digest()).to_bytes()).unwrap();
            let whole = BASE64.encode(encode(&theirs.entry));
            assert!(draft.clone().attach_base64(&whole).is_err(), "a whole entry of another payment");
            assert!(draft.clone().attach_base64("AAAA").is_err());
            assert!(draft.attach_base64("not base64").is_err());
        }
    }

    #[test]
    fn the_second_credential_arm_signs_the_address_too() {
        for (v, draft) in vectors() {
            let second = Draft { credentials: Credentials::AddressV2, ..draft.clone() };
            assert_ne!(second.digest(), draft.digest());
            let key = key(&v.secret_seed_strkey);
            let signed = second.clone().attach(&key.sign(&second.digest()).to_bytes()).unwrap();
            assert!(matches!(signed.entry.credentials, SorobanCredentials::AddressV2(_)));
            assert!(second.attach(&key.sign(&draft.digest()).to_bytes()).is_err(), "the first arm's signature");
        }
    }

    #[test]
    fn a_smart_account_pays_by_a_whole_entry_whose_signature_alone_is_its_own() {
        let (v, draft) = vectors().remove(0);
        let key = key(&v.secret_seed_strkey);
        for credentials in [Credentials::Address, Credentials::AddressV2] {
            let transfer = Transfer { payer: draft.transfer.asset.clone(), ..draft.transfer.clone() };
            let smart = Draft::new(transfer, draft.network_id, credentials, 5, 100, 0).unwrap();
            assert!(matches!(smart.call.args[0], ScVal::Address(ScAddress::Contract(_))));
            let bare = key.sign(&smart.digest()).to_bytes();
            for answer in [smart.clone().attach(&bare), smart.clone().attach_base64(&BASE64.encode(bare))] {
                assert!(answer.err().unwrap().to_string().contains("smart account (C…)"));
            }
            // Whatever its contract takes: a map, bytes, a number.
            for value in [ScVal::Bytes(ScBytes(bare.to_vec().try_into().unwrap())), ScVal::U32(1), ScVal::Map(None)] {
                let entry = smart.entry(value);
                let signed = smart.clone().attach_base64(&BASE64.encode(encode(&entry))).unwrap();
                assert_eq!(signed.entry, entry);
            }
            let other = Draft { nonce: smart.nonce ^ 1, ..smart.clone() };
            for entry in [smart.entry(ScVal::Void), other.entry(ScVal::U32(1)), draft.entry(ScVal::U32(1))] {
                assert!(smart.clone().attach_base64(&BASE64.encode(encode(&entry))).is_err());
            }
            let mut longer = encode(&smart.entry(ScVal::U32(1)));
            longer.extend([0; 4]);
            assert!(smart.clone().attach_base64(&BASE64.encode(longer)).is_err(), "bytes behind the entry");
        }
    }

    #[test]
    fn addresses_and_amounts_that_cannot_be_paid_are_refused_by_name() {
        let (_, draft) = vectors().remove(0);
        let good = draft.transfer.clone();
        let new = |transfer| Draft::new(transfer, [0; 32], Credentials::Address, 1, 1, 0).map_err(|e| e.to_string());
        for (transfer, word) in [
            (Transfer { payer: "GABC".into(), ..good.clone() }, "payer"),
            (Transfer { pay_to: "GABC".into(), ..good.clone() }, "payTo"),
            (Transfer { pay_to: good.pay_to.to_lowercase(), ..good.clone() }, "payTo"),
            (Transfer { asset: good.payer.clone(), ..good.clone() }, "token contract"),
            (Transfer { amount: Amount::ZERO, ..good.clone() }, "zero"),
            (Transfer { amount: Amount::MAX, ..good.clone() }, "127 bits"),
        ] {
            assert!(new(transfer.clone()).is_err_and(|e| e.contains(word)), "{transfer:?}");
        }
        assert!(new(good).is_ok());
    }
}
