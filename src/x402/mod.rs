//! x402 version 2 on the wire: the objects of the core specification and of its MCP transport. No I/O.
//! Whatever arrived stays raw, so that it is echoed byte for byte; what decides something is parsed once beside it.

use serde_json::value::RawValue;

use crate::money::{Amount, Asset, Network};

/// One entry of `accepts` (core spec 5.1.2), parsed strictly, with the bytes as they arrived.
#[derive(Debug, Clone)]
pub struct Offer {
    pub raw: Box<RawValue>,
    pub scheme: String,
    pub network: Network,
    pub amount: Amount,
    pub asset: Asset,
    pub pay_to: String,
    pub max_timeout_seconds: u64,
    pub extra: Option<Box<RawValue>>,
}

/// `PaymentRequired` (core spec 5.1), bounded and checked.
#[derive(Debug, Clone)]
pub struct Challenge {
    pub raw: Box<RawValue>,
    /// The seller's free text.
    pub error: Option<String>,
    pub resource_url: String,
    pub resource: Box<RawValue>,
    pub offers: Vec<Offer>,
    pub extensions: Option<Box<RawValue>>,
}

/// `SettlementResponse` (core spec 5.3) as the seller claims it: unauthenticated.
#[derive(Debug, Clone)]
pub struct Settlement {
    pub success: bool,
    pub error_reason: Option<String>,
    pub payer: Option<String>,
    pub transaction: String,
    pub network: String,
    pub amount: Option<String>,
}
