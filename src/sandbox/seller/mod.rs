//! A seller that charges by itself, in the memory of one process: by the x402 MCP transport in both bindings (tool
//! result, and the extension `org.x402/payment` of MCP 2026-07-28), in the order verify, run, settle. The failure matrix
//! and the load tests, which are about the buyer, buy from it; the demo's seller stands behind the gate (`shop`). It
//! sells what the demo's server has.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::json;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use super::server::{self, Input, Server, TOOLS, Tool};
use crate::facilitator::{Facilitator, Verdict};
use crate::json::{self as strict, Numbers, member, members, string};
use crate::mcp::{Handler, RequestContext, Revision, RpcError};
use crate::ports::World;
use crate::x402::{MCP_EXTENSION, META_PAYMENT, META_PAYMENT_RESPONSE, PAYMENT_IDENTIFIER, VERSION};

pub struct Options {
    /// The MCP endpoint as buyers reach it; the same in catalog and challenge.
    pub endpoint: String,
    /// CAIP-2.
    pub network: String,
    pub asset: String,
    /// `G…`
    pub pay_to: String,
    /// A 60 s offer suits ledgers of a second; on faster ledgers its signatures would be dead too soon, since a payer
    /// counts 6 s for each.
    pub max_timeout_seconds: u64,
}

/// How many `tools/call` came in, by whether they carried a payment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Calls {
    pub unpaid: u64,
    pub paid: u64,
}

pub struct Seller {
    options: Options,
    facilitator: Mutex<Facilitator>,
    server: Arc<Server>,
    prices: Mutex<BTreeMap<&'static str, u64>>,
    payments: Mutex<Payments>,
    unpaid: AtomicU64,
    paid: AtomicU64,
}

/// Payments that are kept; the oldest goes first.
const KEPT_PAYMENTS: usize = 20_000;
const MAX_IDENTIFIER: usize = 128;

#[derive(Default)]
struct Payments {
    known: BTreeMap<String, Arc<tokio::sync::Mutex<Payment>>>,
    order: VecDeque<String>,
}

/// One payment; its lock is held from verify to settle, so that a twin waits for the first one's outcome.
#[derive(Default)]
struct Payment {
    /// SHA-256 of payload and call, once the facilitator found the payment valid.
    bound: Option<([u8; 32], [u8; 32])>,
    output: Option<Output>,
}

struct Output {
    /// Without `_meta`.
    result: serde_json::Value,
    /// The offer for which the tool ran.
    offer: Box<RawValue>,
    receipt: Option<Box<RawValue>>,
}

/// One `tools/call`, parsed; the hash of the server's call is what the payment is for.
struct Call<'a> {
    of: server::Call<'a>,
    payment: Option<&'a RawValue>,
    /// The request takes challenges as `resultType: "payment_required"`.
    extension: bool,
}

impl Seller {
    pub fn new(world: &World, facilitator: Facilitator, options: Options) -> Arc<Seller> {
        Arc::new(Seller {
            options,
            facilitator: Mutex::new(facilitator),
            server: Server::new(world),
            prices: Mutex::new(TOOLS.iter().filter_map(|tool| Some((tool.name, tool.price?))).collect()),
            payments: Mutex::default(),
            unpaid: AtomicU64::new(0),
            paid: AtomicU64::new(0),
        })
    }

    /// From now on it verifies and settles with this facilitator.
    pub fn settle_with(&self, facilitator: Facilitator) {
        *self.facilitator.lock().unwrap_or_else(PoisonError::into_inner) = facilitator;
    }

    pub fn calls(&self) -> Calls {
        Calls { unpaid: self.unpaid.load(Ordering::SeqCst), paid: self.paid.load(Ordering::SeqCst) }
    }

    /// From now on the tool costs this much; a free tool stays free. The catalog is not told.
    pub fn set_price(&self, tool: &str, price: u64) {
        if let Some(old) = self.prices.lock().unwrap_or_else(PoisonError::into_inner).get_mut(tool) {
            *old = price;
        }
    }

    /// Atomic units; `None` for a free or unknown tool.
    pub fn price(&self, tool: &str) -> Option<u64> {
        self.prices.lock().unwrap_or_else(PoisonError::into_inner).get(tool).copied()
    }

    /// What a catalog lists of this seller, one item per tool that costs something.
    pub fn catalog_items(&self, updated: &str) -> Vec<String> {
        TOOLS.iter().filter_map(|tool| self.catalog_item(tool.name, updated)).collect()
    }

    pub fn catalog_item(&self, tool: &str, updated: &str) -> Option<String> {
        let tool = Tool::named(tool)?;
        Some(
            json!({
                "resource": self.options.endpoint,
                "type": "mcp",
                "x402Version": VERSION,
                "accepts": self.offers(tool)?,
                "lastUpdated": updated,
                "description": tool.description,
                "mimeType": "application/json",
                "serviceName": "Tollway demo seller",
                "tags": tool.tags,
                "extensions": {"bazaar": tool.bazaar()},
            })
            .to_string(),
        )
    }

    fn offers(&self, tool: &Tool) -> Option<serde_json::Value> {
        Some(json!([{
            "scheme": "exact",
            "network": self.options.network,
            "amount": self.price(tool.name)?.to_string(),
            "asset": self.options.asset,
            "payTo": self.options.pay_to,
            "maxTimeoutSeconds": self.options.max_timeout_seconds,
            "extra": {"areFeesSponsored": true},
        }]))
    }

    /// A challenge in the binding that the request takes, with the receipt of an earlier settlement where there is one.
    fn challenge(&self, call: &Call<'_>, error: &str, receipt: Option<&RawValue>) -> Box<RawValue> {
        let required = json!({
            "x402Version": VERSION,
            "error": error,
            "resource": {
                "url": self.options.endpoint,
                "description": call.of.tool.description,
                "mimeType": "application/json",
            },
            "accepts": self.offers(call.of.tool),
            "extensions": {
                "bazaar": call.of.tool.bazaar(),
                PAYMENT_IDENTIFIER: {
                    "info": {"required": false},
                    "schema": {
                        "$schema": "https://json-schema.org/draft/2020-12/schema",
                        "type": "object",
                        "properties": {
                            "required": {"type": "boolean"},
                            "id": {
                                "type": "string", "minLength": 16, "maxLength": 128, "pattern": "^[a-zA-Z0-9_-]+$",
                            },
                        },
                        "required": ["required"],
                    },
                },
            },
        });
        let result = if call.extension {
            json!({"resultType": "payment_required", "paymentRequired": required})
        } else {
            let text = required.to_string();
            json!({"isError": true, "structuredContent": required, "content": [{"type": "text", "text": text}]})
        };
        with_receipt(&result, receipt)
    }

    async fn tools_call(&self, context: &RequestContext, params: &RawValue) -> Result<Box<RawValue>, RpcError> {
        let payment = context.meta.as_deref().and_then(|meta| member(meta, META_PAYMENT));
        match payment {
            Some(_) => self.paid.fetch_add(1, Ordering::SeqCst),
            None => self.unpaid.fetch_add(1, Ordering::SeqCst),
        };
        // A tool error and not a challenge: nobody is asked to pay for a call that cannot succeed.
        let of = match server::Call::read(params) {
            Ok(of) => of,
            Err(refused) => return refused,
        };
        if self.price(of.tool.name).is_none() {
            return Ok(strict::raw(&self.server.run(&of, None)));
        }
        let call = Call { of, payment, extension: takes_extension(context) };
        match call.payment {
            Some(payment) => self.paid_call(context, &call, payment).await,
            None => match self.server.input(context, &call.of)? {
                Input::Ask(result) => Ok(result),
                Input::Answered(_) => Ok(self.challenge(&call, "Payment required to access this tool", None)),
            },
        }
    }

    async fn paid_call(
        &self,
        context: &RequestContext,
        call: &Call<'_>,
        payload: &RawValue,
    ) -> Result<Box<RawValue>, RpcError> {
        let no = |error: &str| Ok(self.challenge(call, error, None));
        if member(payload, "x402Version").map(RawValue::get) != Some("2") {
            return no("invalid_x402_version");
        }
        let (Some(accepted), Some(_)) = (member(payload, "accepted"), member(payload, "payload")) else {
            return no("invalid_payload");
        };
        let Ok(canonical) = strict::canonical(payload, Numbers::AsWritten) else { return no("invalid_payload") };
        let fingerprint: [u8; 32] = Sha256::digest(canonical).into();
        let identity = match identifier(payload) {
            Ok(Some(id)) => format!("id:{id}"),
            Ok(None) => format!("payload:{}", hex::encode(fingerprint)),
            Err(()) => return no("invalid_payload"),
        };
        // A payment that is known is decided by what is known of it, whatever the offers are by now.
        let known = self.payments.lock().unwrap_or_else(PoisonError::into_inner).known.get(&identity).cloned();
        let offer = match &known {
            Some(payment) => payment.lock().await.output.as_ref().map(|output| output.offer.clone()),
            None => None,
        };
        let Some(offer) = offer.or_else(|| self.matching(call.of.tool, accepted)) else {
            return no("No matching payment requirements found");
        };
        let payment = self.remember(identity);
        let mut payment = payment.lock().await;
        self.decide(context, call, payload, fingerprint, offer, &mut payment).await
    }

    /// Verify, run, settle; each step once, as far as the payment has come.
    async fn decide(
        &self,
        context: &RequestContext,
        call: &Call<'_>,
        payload: &RawValue,
        fingerprint: [u8; 32],
        offer: Box<RawValue>,
        payment: &mut Payment,
    ) -> Result<Box<RawValue>, RpcError> {
        let no = |error: &str, receipt: Option<&RawValue>| Ok(self.challenge(call, error, receipt));
        if let Some((bytes, what)) = payment.bound {
            if bytes != fingerprint {
                return no("payment_identifier_conflict", None);
            }
            if what != call.of.hash {
                return no("payment_already_used", None);
            }
        }
        if let Some(Output { result, receipt: Some(receipt), .. }) = &payment.output {
            return Ok(with_receipt(result, Some(receipt)));
        }
        let facilitator = self.facilitator.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let timeout = self.facilitator_timeout();
        if payment.output.is_none() {
            let party = match self.server.input(context, &call.of)? {
                Input::Ask(result) => return Ok(result),
                Input::Answered(party) => party,
            };
            match facilitator.verify(payload, &offer, timeout).await {
                Ok(Verdict::Valid) => {}
                Ok(Verdict::Invalid(reason)) => return no(&reason, None),
                Err(error) => return Err(unavailable(&error)),
            }
            payment.bound = Some((fingerprint, call.of.hash));
            payment.output =
                Some(Output { result: self.server.run(&call.of, party), offer: offer.clone(), receipt: None });
        }
        let (receipt, settlement) = facilitator.settle(payload, &offer, timeout).await.map_err(|e| unavailable(&e))?;
        if !settlement.success || settlement.network != self.options.network {
            let reason = settlement.error_reason.unwrap_or_else(|| "unexpected_settle_error".into());
            return no(&format!("Payment settlement failed: {reason}"), Some(&receipt));
        }
        let Some(output) = &mut payment.output else { return Err(RpcError::internal("no output")) };
        output.receipt = Some(receipt.clone());
        Ok(with_receipt(&output.result, Some(&receipt)))
    }

    /// The offer of ours that equals what the payer accepted, as JSON values.
    fn matching(&self, tool: &Tool, accepted: &RawValue) -> Option<Box<RawValue>> {
        let offers = strict::raw(&self.offers(tool)?);
        strict::elements(&offers)?.into_iter().find(|offer| strict::equal(offer, accepted)).map(ToOwned::to_owned)
    }

    fn remember(&self, identity: String) -> Arc<tokio::sync::Mutex<Payment>> {
        let mut payments = self.payments.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = payments.known.get(&identity) {
            return known.clone();
        }
        if payments.order.len() >= KEPT_PAYMENTS
            && let Some(oldest) = payments.order.pop_front()
        {
            payments.known.remove(&oldest);
        }
        payments.order.push_back(identity.clone());
        payments.known.entry(identity).or_default().clone()
    }

    fn facilitator_timeout(&self) -> Duration {
        Duration::from_secs(self.options.max_timeout_seconds.min(120) + 10)
    }
}

impl Handler for Seller {
    fn server_info(&self) -> (&str, &str, Option<&str>) {
        ("tollway-seller", env!("CARGO_PKG_VERSION"), Some("One free tool and some that cost test money."))
    }

    fn capabilities(&self, revision: Revision) -> Box<RawValue> {
        if revision.stateless() {
            strict::raw(&json!({"tools": {}, "extensions": {MCP_EXTENSION: {}}}))
        } else {
            strict::raw(&json!({"tools": {}}))
        }
    }

    fn call<'a>(
        &'a self,
        context: &'a RequestContext,
        method: &'a str,
        params: Option<&'a RawValue>,
    ) -> BoxFuture<'a, Result<Box<RawValue>, RpcError>> {
        Box::pin(async move {
            match (method, params) {
                ("tools/list", _) => Ok(Server::tools()),
                ("tools/call", Some(params)) => self.tools_call(context, params).await,
                ("tools/call", None) => Err(RpcError::invalid_params("params is missing")),
                _ => Err(RpcError::method_not_found(method)),
            }
        })
    }
}

fn takes_extension(context: &RequestContext) -> bool {
    context.revision.stateless()
        && context
            .client_capabilities()
            .and_then(|capabilities| member(capabilities, "extensions"))
            .is_some_and(|extensions| member(extensions, MCP_EXTENSION).is_some())
}

/// The identifier that the payer chose (`extensions["payment-identifier"].info.id`); `Err` where it is malformed.
fn identifier(payload: &RawValue) -> Result<Option<String>, ()> {
    let id = member(payload, "extensions")
        .and_then(|extensions| member(extensions, PAYMENT_IDENTIFIER))
        .and_then(|extension| member(extension, "info"))
        .and_then(|info| member(info, "id"));
    let Some(id) = id else { return Ok(None) };
    let id = string(id).ok_or(())?;
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if (16..=MAX_IDENTIFIER).contains(&id.len()) && id.bytes().all(good) { Ok(Some(id.into_owned())) } else { Err(()) }
}

/// The result with `_meta["x402/payment-response"]`, the receipt's bytes unchanged.
fn with_receipt(result: &serde_json::Value, receipt: Option<&RawValue>) -> Box<RawValue> {
    let result = strict::raw(result);
    let Some(receipt) = receipt else { return result };
    let Ok(mut all) = members(&result) else { return result.clone() };
    let meta = strict::raw(&BTreeMap::from([(META_PAYMENT_RESPONSE, receipt)]));
    all.push(("_meta".into(), &meta));
    strict::raw(&all.into_iter().collect::<BTreeMap<_, _>>())
}

/// Ours to mend, and no challenge: a buyer must not take it for a demand to pay again.
fn unavailable(error: &crate::facilitator::FacilitatorError) -> RpcError {
    tracing::warn!(%error, "the facilitator could not be used");
    RpcError::internal("the payment could not be checked")
}

#[cfg(test)]
mod tests;
