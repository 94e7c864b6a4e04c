//! What a caller wants signed, as the chain would read it: the `HashIdPreimage` of a Soroban authorization, which must
//! be exactly one SEP-41 `transfer(from, to, amount)` and nothing underneath.
//!
//! Source: SEP-41; CAP-46-11 (authorization), CAP-71 (the credential arm that signs the address too).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use stellar_xdr::{
    HashIdPreimage, Limits, ReadXdr as _, ScAddress, ScVal, SorobanAuthorizedFunction, SorobanAuthorizedInvocation,
    WriteXdr as _,
};

use super::policy::No;
use crate::money::Amount;

/// A transfer's preimage is some 300 bytes; its longest argument is an address.
const XDR: Limits = Limits { depth: 50, len: 16 * 1024 };

/// A transfer that somebody wants authorized. Addresses are strkeys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// SHA-256 of the passphrase of the network on which a signature is good.
    pub network_id: [u8; 32],
    pub payer: String,
    pub pay_to: String,
    /// The token contract (`C…`).
    pub asset: String,
    /// Atomic units, above zero.
    pub amount: Amount,
    pub nonce: i64,
    /// The last ledger in which the authorization can be used.
    pub expiration: u32,
    /// What is signed: SHA-256 of the preimage's XDR.
    pub digest: [u8; 32],
}

/// `preimage`: base64 XDR.
pub fn read(preimage: &str) -> Result<Asked, No> {
    let bytes = STANDARD.decode(preimage).map_err(|_| No::Unreadable)?;
    let preimage = HashIdPreimage::from_xdr(&bytes, XDR).map_err(|_| No::Unreadable)?;
    // One transfer has one encoding: what is hashed is what was read.
    if preimage.to_xdr(XDR).ok().as_deref() != Some(&bytes[..]) {
        return Err(No::Unreadable);
    }
    let (network_id, nonce, expiration, signer, invocation) = match &preimage {
        HashIdPreimage::SorobanAuthorization(p) => {
            (&p.network_id, p.nonce, p.signature_expiration_ledger, None, &p.invocation)
        }
        HashIdPreimage::SorobanAuthorizationWithAddress(p) => {
            (&p.network_id, p.nonce, p.signature_expiration_ledger, Some(&p.address), &p.invocation)
        }
        _ => return Err(No::NotAnAuthorization),
    };
    let SorobanAuthorizedInvocation { function, sub_invocations } = invocation;
    let SorobanAuthorizedFunction::ContractFn(call) = function else { return Err(No::NotATransfer) };
    let ScAddress::Contract(_) = &call.contract_address else { return Err(No::NotATransfer) };
    if call.function_name.0.as_slice() != b"transfer" {
        return Err(No::NotATransfer);
    }
    let [ScVal::Address(from), ScVal::Address(to), ScVal::I128(amount)] = call.args.as_slice() else {
        return Err(No::NotATransfer);
    };
    if !sub_invocations.is_empty() {
        return Err(No::SubInvocations);
    }
    if signer.is_some_and(|signer| signer != from) {
        return Err(No::NotMyAccount);
    }
    // A muxed recipient is another name for an account, and would have to be listed under both; balances of claims and
    // pools are nobody's.
    if !matches!(to, ScAddress::Account(_) | ScAddress::Contract(_)) {
        return Err(No::RecipientNotAllowed);
    }
    let amount = Amount::from_i128(i128::from(amount)).filter(|amount| !amount.is_zero()).ok_or(No::NotATransfer)?;
    Ok(Asked {
        network_id: network_id.0,
        payer: from.to_string(),
        pay_to: to.to_string(),
        asset: call.contract_address.to_string(),
        amount,
        nonce,
        expiration,
        digest: Sha256::digest(&bytes).into(),
    })
}
