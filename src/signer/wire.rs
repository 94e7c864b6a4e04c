//! The external signer's contract (HTTPS, JSON), for who asks and for who answers:
//!
//! - `GET /address?network=<caip2>` gives [`Address`].
//! - `POST /sign-auth-entry` takes [`SignRequest`] and gives [`SignAnswer`].
//!
//! 401, 403 and 422 are refusals ([`Refusal`]): they say that the request was not acted on (RFC 9110, sections 15.5.2,
//! 15.5.4 and 15.5.21), so a signer must never answer so after it has signed. Every other ending after the request left,
//! a 400, 409, 429 or 5xx included, is a lost answer: somebody may hold a signature.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::json;

pub const ADDRESS_PATH: &str = "/address";
pub const SIGN_PATH: &str = "/sign-auth-entry";
pub const REFUSALS: [u16; 3] = [401, 403, 422];
/// Of a request and of an answer. A whole entry of a smart account with its signature is a few kilobytes.
pub const BODY: json::Limits = json::Limits { bytes: 64 * 1024, depth: 8 };

#[derive(Serialize, Deserialize)]
pub struct Address<'a> {
    /// `G…`, or `C…` for a smart account.
    #[serde(borrow)]
    pub address: Cow<'a, str>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SignRequest<'a> {
    /// CAIP-2.
    #[serde(borrow)]
    pub network: Cow<'a, str>,
    #[serde(borrow)]
    pub network_passphrase: Cow<'a, str>,
    /// Base64 XDR of the `HashIdPreimage`, as SEP-43 wallets take it.
    #[serde(borrow)]
    pub auth_entry_xdr: Cow<'a, str>,
    /// Whose signature is asked for.
    #[serde(borrow)]
    pub address: Cow<'a, str>,
    #[serde(borrow, default)]
    pub payment: Payment<'a>,
}

/// Information for the signer's log, but for `sign_before`; a signer decides on what it decodes.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Payment<'a> {
    /// The first characters of the identifier.
    #[serde(borrow)]
    pub payment_identifier: Cow<'a, str>,
    #[serde(borrow)]
    pub asset: Cow<'a, str>,
    #[serde(borrow)]
    pub pay_to: Cow<'a, str>,
    /// Atomic units.
    #[serde(borrow)]
    pub amount: Cow<'a, str>,
    /// Unix milliseconds; nothing should be signed later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sign_before: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SignAnswer<'a> {
    /// Base64: a 64-byte Ed25519 signature, or the XDR of the whole signed `SorobanAuthorizationEntry`. A smart account's
    /// must be the whole entry.
    #[serde(borrow)]
    pub signed_auth_entry_xdr: Cow<'a, str>,
}

/// Why nothing was signed, in whichever member the signer writes it.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Refusal<'a> {
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub error: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub message: Option<Cow<'a, str>>,
}

/// One body in one of these forms; no member twice. The words are for an operator and quote nothing.
pub fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, String> {
    let raw = json::check(body, BODY).map_err(|e| e.to_string())?;
    serde_json::from_str(raw.get()).map_err(|_| "has another form".to_owned())
}
