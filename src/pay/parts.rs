//! Stand-ins until the parts land.
use crate::catalog::SellerTransport;
use crate::chain::ChainError;
pub use crate::chain::stellar::Balance;
use crate::chain::stellar::{Draft, LedgerPoint, PrepareError};
use crate::ledger::{Authorization, Reserved};
use crate::money::{Asset, Network};
use crate::signer::{NotSigned, Signed};
use crate::upstream::{Endpoint, ToolAnswer, ToolCall, UpstreamError};
use crate::x402::Offer;
use serde_json::value::RawValue;

pub struct Upstream;
impl Upstream {
    pub fn endpoint(&self, _url: &str, _transport: SellerTransport) -> Result<Endpoint, UpstreamError> {
        Err(UpstreamError::Refused("not_built"))
    }
    pub async fn call_tool(&self, _endpoint: &Endpoint, _call: ToolCall<'_>) -> Result<ToolAnswer, UpstreamError> {
        Err(UpstreamError::Refused("not_built"))
    }
    /// The tool's input schema from `tools/list`, cached per endpoint.
    pub async fn input_schema(
        &self,
        _endpoint: &Endpoint,
        _tool: &str,
    ) -> Result<Option<Box<RawValue>>, UpstreamError> {
        Err(UpstreamError::Refused("not_built"))
    }
}
pub struct Stellar;
impl Stellar {
    pub async fn ledger(&self) -> Result<LedgerPoint, ChainError> {
        Err(ChainError::Unsupported("not built".into()))
    }
    pub fn draft(&self, _offer: &Offer, _payer: &str, _at: LedgerPoint) -> Result<Draft, ChainError> {
        Err(ChainError::Unsupported("not built".into()))
    }
    pub fn authorization(&self, _draft: &Draft, _payer: &str, _at: LedgerPoint) -> Authorization {
        Authorization { payer: String::new(), nonce: String::new(), dead_after: 0, at: 0 }
    }
    pub async fn prepare(&self, _signed: &Signed) -> Result<String, PrepareError> {
        Err(PrepareError::Failed("not built".into()))
    }
    pub async fn balance(&self, _payer: &str, _asset: &Asset) -> Result<Balance, ChainError> {
        Err(ChainError::Unsupported("not built".into()))
    }
    pub async fn balance_fresh(&self, _payer: &str, _asset: &Asset) -> Result<Balance, ChainError> {
        Err(ChainError::Unsupported("not built".into()))
    }
}
pub struct Signer;
impl Signer {
    pub async fn address(&self, _network: &Network) -> Result<String, String> {
        Err("not built".into())
    }
    pub async fn sign(&self, reserved: Reserved, _draft: Draft) -> Result<Signed, NotSigned> {
        Err(NotSigned::Refused(reserved, "not built".into()))
    }
}
