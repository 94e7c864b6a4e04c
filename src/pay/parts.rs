//! The way to a seller until `upstream` has it.

use serde_json::value::RawValue;

use crate::catalog::SellerTransport;
use crate::upstream::{Endpoint, ToolAnswer, ToolCall, UpstreamError};

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
