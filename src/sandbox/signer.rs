//! The sandbox's signer: a process boundary's worth of distance between the payer's key and the agent server. It
//! decodes what it is asked to sign and signs one thing only: a SEP-41 transfer of its own account's money on the local
//! network. What the caller says about the payment decides nothing, but for the moment after which it is too late.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::extract::{DefaultBodyLimit, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use ed25519_dalek::{Signer as _, SigningKey};
use sha2::{Digest, Sha256};
use url::form_urlencoded;
use zeroize::Zeroizing;

use crate::ports::World;
use crate::sandbox::facilitator::account_strkey;
use crate::signer::role::transfer::{self, Asked};
use crate::signer::{role, wire};

pub struct Options {
    /// CAIP-2.
    pub network: String,
    pub passphrase: String,
    /// Contracts (`C…`) whose tokens it may move.
    pub assets: Vec<String>,
    pub key: SigningKey,
    /// What a caller must show as `Authorization: Bearer …`.
    pub token: Zeroizing<String>,
}

pub struct Signer {
    world: World,
    options: Options,
    address: String,
    signatures: AtomicU64,
}

/// Why nothing was signed: the HTTP status and a stable word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct No(u16, &'static str);

impl IntoResponse for No {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0).unwrap_or(StatusCode::FORBIDDEN);
        let said = wire::Refusal { error: Some(self.1.into()), ..wire::Refusal::default() };
        (status, axum::Json(said)).into_response()
    }
}

impl Signer {
    pub fn new(world: World, options: Options) -> Arc<Signer> {
        let address = account_strkey(&options.key);
        Arc::new(Signer { world, options, address, signatures: AtomicU64::new(0) })
    }

    /// `G…`
    pub fn address(&self) -> &str {
        &self.address
    }

    /// How many signatures have left since the start.
    pub fn signatures(&self) -> u64 {
        self.signatures.load(Ordering::SeqCst)
    }

    pub fn router(self: &Arc<Signer>) -> Router {
        Router::new()
            .route(wire::ADDRESS_PATH, get(address))
            .route(wire::SIGN_PATH, post(sign))
            .layer(DefaultBodyLimit::max(wire::BODY.bytes))
            .with_state(self.clone())
    }

    fn authorized(&self, headers: &HeaderMap) -> Result<(), No> {
        let shown = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let shown = shown.strip_prefix("Bearer ").unwrap_or_default();
        aws_lc_rs::constant_time::verify_slices_are_equal(shown.as_bytes(), self.options.token.as_bytes())
            .map_err(|_| No(401, "unauthorized"))
    }

    /// The base64 of the 64-byte signature.
    fn sign(&self, body: &[u8]) -> Result<String, No> {
        let malformed = No(400, "malformed_request");
        let asked: wire::SignRequest<'_> = wire::read(body).map_err(|_| malformed)?;
        if asked.network != self.options.network || asked.network_passphrase != self.options.passphrase {
            return Err(No(403, "network_not_allowed"));
        }
        if asked.address != self.address {
            return Err(No(403, "not_my_account"));
        }
        if asked.payment.sign_before.is_some_and(|limit| self.world.unix_ms() > limit) {
            return Err(No(403, "too_late"));
        }
        let read = transfer::read(&asked.auth_entry_xdr).map_err(|no| match no {
            role::policy::No::Unreadable => malformed,
            no => No(403, no.word()),
        });
        let transfer = self.policy(read?)?;
        let signature = self.options.key.sign(&transfer.digest).to_bytes();
        self.signatures.fetch_add(1, Ordering::SeqCst);
        Ok(STANDARD.encode(signature))
    }

    fn policy(&self, transfer: Asked) -> Result<Asked, No> {
        if transfer.network_id[..] != Sha256::digest(&self.options.passphrase)[..] {
            return Err(No(403, "network_not_allowed"));
        }
        if transfer.payer != self.address {
            return Err(No(403, "not_my_account"));
        }
        if !self.options.assets.contains(&transfer.asset) {
            return Err(No(403, "asset_not_allowed"));
        }
        Ok(transfer)
    }
}

async fn address(State(signer): State<Arc<Signer>>, RawQuery(query): RawQuery, headers: HeaderMap) -> Response {
    if let Err(no) = signer.authorized(&headers) {
        return no.into_response();
    }
    let query = query.unwrap_or_default();
    let network = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "network");
    if network.is_none_or(|(_, network)| network != signer.options.network.as_str()) {
        return No(404, "network_not_allowed").into_response();
    }
    axum::Json(wire::Address { address: signer.address.as_str().into() }).into_response()
}

async fn sign(State(signer): State<Arc<Signer>>, headers: HeaderMap, body: Bytes) -> Response {
    match signer.authorized(&headers).and_then(|()| signer.sign(&body)) {
        Ok(signature) => axum::Json(wire::SignAnswer { signed_auth_entry_xdr: signature.into() }).into_response(),
        Err(no) => no.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::{Signature, Verifier};
    use serde_json::json;
    use stellar_xdr::{
        ContractId, Hash, HashIdPreimage, HashIdPreimageSorobanAuthorization,
        HashIdPreimageSorobanAuthorizationWithAddress, Int128Parts, InvokeContractArgs, ScAddress, ScSymbol, ScVal,
        SorobanAuthorizedFunction, SorobanAuthorizedInvocation, WriteXdr,
    };

    use super::*;
    use crate::ports::machine;
    use crate::sandbox::facilitator::account_id;
    use crate::sandbox::soroban::XDR;

    const PASSPHRASE: &str = "Test SDF Network ; September 2015";
    const TOKEN: &str = "a-token-of-at-least-thirty-two-bytes";

    fn key(n: u8) -> SigningKey {
        SigningKey::from_bytes(&[n; 32])
    }

    fn contract(n: u8) -> ScAddress {
        ScAddress::Contract(ContractId(Hash([n; 32])))
    }

    fn signer() -> Arc<Signer> {
        let (world, _) = machine::world();
        Signer::new(
            world,
            Options {
                network: "stellar:testnet".into(),
                passphrase: PASSPHRASE.into(),
                assets: vec![contract(7).to_string()],
                key: key(1),
                token: Zeroizing::new(TOKEN.into()),
            },
        )
    }

    fn account(n: u8) -> ScAddress {
        ScAddress::Account(account_id(&key(n)))
    }

    /// A transfer that the policy allows.
    fn transfer() -> InvokeContractArgs {
        InvokeContractArgs {
            contract_address: contract(7),
            function_name: ScSymbol("transfer".try_into().unwrap()),
            args: vec![
                ScVal::Address(account(1)),
                ScVal::Address(account(2)),
                ScVal::I128(Int128Parts { hi: 0, lo: 10_000 }),
            ]
            .try_into()
            .unwrap(),
        }
    }

    fn invocation(call: InvokeContractArgs, sub: Vec<SorobanAuthorizedInvocation>) -> SorobanAuthorizedInvocation {
        SorobanAuthorizedInvocation {
            function: SorobanAuthorizedFunction::ContractFn(call),
            sub_invocations: sub.try_into().unwrap(),
        }
    }

    fn preimage(invocation: SorobanAuthorizedInvocation, passphrase: &str) -> HashIdPreimage {
        HashIdPreimage::SorobanAuthorization(HashIdPreimageSorobanAuthorization {
            network_id: Hash(Sha256::digest(passphrase).into()),
            nonce: 5,
            signature_expiration_ledger: 100,
            invocation,
        })
    }

    fn body(preimage: &HashIdPreimage) -> serde_json::Value {
        json!({
            "network": "stellar:testnet",
            "networkPassphrase": PASSPHRASE,
            "authEntryXdr": preimage.to_xdr_base64(XDR).unwrap(),
            "address": account(1).to_string(),
            "payment": {},
        })
    }

    fn answer(signer: &Signer, body: &serde_json::Value) -> Result<String, No> {
        signer.sign(body.to_string().as_bytes())
    }

    #[test]
    fn its_own_transfer_is_signed_in_both_credential_arms() {
        let signer = signer();
        let with_address =
            HashIdPreimage::SorobanAuthorizationWithAddress(HashIdPreimageSorobanAuthorizationWithAddress {
                network_id: Hash(Sha256::digest(PASSPHRASE).into()),
                nonce: 5,
                signature_expiration_ledger: 100,
                address: account(1),
                invocation: invocation(transfer(), vec![]),
            });
        for preimage in [preimage(invocation(transfer(), vec![]), PASSPHRASE), with_address] {
            let signature = STANDARD.decode(answer(&signer, &body(&preimage)).unwrap()).unwrap();
            let signed = Sha256::digest(preimage.to_xdr(XDR).unwrap());
            key(1).verifying_key().verify(&signed, &Signature::from_slice(&signature).unwrap()).unwrap();
        }
        assert_eq!(signer.signatures(), 2);
    }

    #[test]
    fn everything_else_is_refused_whatever_the_caller_says_about_it() {
        let signer = signer();
        let call = |change: &dyn Fn(&mut InvokeContractArgs)| {
            let mut call = transfer();
            change(&mut call);
            preimage(invocation(call, vec![]), PASSPHRASE)
        };
        let amount = |hi, lo| {
            move |call: &mut InvokeContractArgs| {
                let mut args = call.args.to_vec();
                args[2] = ScVal::I128(Int128Parts { hi, lo });
                call.args = args.try_into().unwrap();
            }
        };
        let named = |name: &str| {
            let name = ScSymbol(name.try_into().unwrap());
            call(&move |call| call.function_name = name.clone())
        };
        for (what, preimage, reason) in [
            ("another function", named("approve"), "not_a_transfer"),
            ("another asset", call(&|call| call.contract_address = contract(8)), "asset_not_allowed"),
            ("nothing", call(&amount(0, 0)), "not_a_transfer"),
            ("a negative amount", call(&amount(-1, 0)), "not_a_transfer"),
            (
                "a fourth argument",
                call(&|call| {
                    let mut args = call.args.to_vec();
                    args.push(ScVal::Void);
                    call.args = args.try_into().unwrap();
                }),
                "not_a_transfer",
            ),
            (
                "another's money",
                call(&|call| {
                    let mut args = call.args.to_vec();
                    args[0] = ScVal::Address(account(2));
                    call.args = args.try_into().unwrap();
                }),
                "not_my_account",
            ),
            (
                "something underneath",
                preimage(invocation(transfer(), vec![invocation(transfer(), vec![])]), PASSPHRASE),
                "sub_invocations",
            ),
            ("another network", preimage(invocation(transfer(), vec![]), "Public"), "network_not_allowed"),
        ] {
            assert_eq!(answer(&signer, &body(&preimage)), Err(No(403, reason)), "{what}");
        }
        assert_eq!(signer.signatures(), 0);
    }

    #[test]
    fn the_request_itself_must_be_in_order() {
        let signer = signer();
        let good = body(&preimage(invocation(transfer(), vec![]), PASSPHRASE));
        let with = |name: &str, value: serde_json::Value| {
            let mut body = good.clone();
            body[name] = value;
            body
        };
        assert!(answer(&signer, &good).is_ok());
        for (what, body, no) in [
            ("unknown member", with("more", json!(1)), No(400, "malformed_request")),
            ("a time that is none", with("payment", json!({"signBefore": "soon"})), No(400, "malformed_request")),
            ("no XDR", with("authEntryXdr", json!("AAAA")), No(400, "malformed_request")),
            ("network", with("network", json!("stellar:pubnet")), No(403, "network_not_allowed")),
            ("passphrase", with("networkPassphrase", json!("x")), No(403, "network_not_allowed")),
            ("address", with("address", json!(account(2).to_string())), No(403, "not_my_account")),
            ("too late", with("payment", json!({"signBefore": 1})), No(403, "too_late")),
        ] {
            assert_eq!(answer(&signer, &body), Err(no), "{what}");
        }
    }

    #[tokio::test]
    async fn without_its_token_it_tells_and_signs_nothing() {
        let signer = signer();
        for shown in [None, Some("Bearer "), Some("Bearer wrong"), Some(TOKEN), Some("Basic abc")] {
            let mut headers = HeaderMap::new();
            if let Some(shown) = shown {
                headers.insert(header::AUTHORIZATION, shown.parse().unwrap());
            }
            let query = RawQuery(Some("network=stellar:testnet".into()));
            assert_eq!(address(State(signer.clone()), query, headers.clone()).await.status(), 401, "{shown:?}");
            assert_eq!(sign(State(signer.clone()), headers, Bytes::new()).await.status(), 401, "{shown:?}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, format!("Bearer {TOKEN}").parse().unwrap());
        for (query, status) in [("network=stellar:testnet", 200), ("network=stellar:pubnet", 404), ("", 404)] {
            let answer = address(State(signer.clone()), RawQuery(Some(query.into())), headers.clone()).await;
            assert_eq!(answer.status(), status, "{query}");
        }
    }
}
