//! The signer of the world: it signs what it is asked until `signBefore`, refuses, falls silent, or signs wrongly.

use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use stellar_xdr::{HashIdPreimage, Limits, ReadXdr};

use super::chain;
use super::http::{Reply, Request};
use super::world::{Ctx, lock};

/// One signature that was made.
#[derive(Debug, Clone)]
pub struct Signature {
    pub nonce: i64,
    /// The beginning of the payment's identifier, as the signer is told it.
    pub payment: String,
    pub unix_ms: u64,
}

pub type Book = Arc<Mutex<Vec<Signature>>>;

pub async fn answer(ctx: Ctx, book: Book, request: Request) -> Reply {
    if request.target.starts_with("/address") {
        return Reply::Json(json!({"address": chain::payer()}).to_string());
    }
    let Ok(body) = serde_json::from_slice::<Value>(&request.body) else { return Reply::Status(400, "{}".into()) };
    let text = body["authEntryXdr"].as_str().unwrap_or_default();
    let limits = Limits { depth: 200, len: 1 << 16 };
    let Ok(preimage) = HashIdPreimage::from_xdr_base64(text, limits) else { return Reply::Status(400, "{}".into()) };
    let HashIdPreimage::SorobanAuthorization(authorization) = &preimage else {
        return Reply::Status(400, "{}".into());
    };
    let fails = ctx.world.chance(|f| f.signer_fails);
    let how = ctx.world.range(0, 4);
    if fails && how == 0 {
        ctx.world.count(|s| s.signer_refused += 1);
        return Reply::Status(422, json!({"reason": "not today"}).to_string());
    }
    ctx.world.pause().await;
    if ctx.world.unix_ms() >= body["payment"]["signBefore"].as_u64().unwrap_or(0) {
        ctx.world.count(|s| s.signer_too_late += 1);
        return Reply::Status(422, json!({"reason": "too late"}).to_string());
    }
    let payment = body["payment"]["paymentIdentifier"].as_str().unwrap_or_default().to_owned();
    ctx.trace(&format!("signs {} for {payment}", authorization.nonce));
    lock(&book).push(Signature { nonce: authorization.nonce, payment, unix_ms: ctx.world.unix_ms() });
    let mut signature = chain::sign(&preimage);
    if fails {
        ctx.world.count(|s| s.signer_failed += 1);
        match how {
            1 => return Reply::Silence,
            2 => return Reply::Close,
            _ => signature[0] ^= 1,
        }
    }
    Reply::Json(json!({"signedAuthEntryXdr": BASE64.encode(signature)}).to_string())
}
