//! A request as the gate reads it: what it is aimed at, what it asks for, and the payment that it brings.

use super::challenge::{Binding, Misplaced, Presented};
use super::desk::Request;
use super::payment::CallKey;
use super::target;
use crate::json;
use crate::mcp::RpcError;

/// A request that could be read.
pub(super) struct Ask<'a> {
    pub request: Request<'a>,
    /// The name or URI, decoded.
    pub key: String,
    pub binding: Binding,
    pub call: CallKey,
    pub presented: Presented<'a>,
}

impl<'a> Ask<'a> {
    pub fn read(request: Request<'a>) -> Result<Ask<'a>, RpcError> {
        let invalid = |what: String| RpcError::invalid_params(what);
        let params = request.params;
        let members = json::members(params).map_err(|_| invalid("params is no object".into()))?;
        // A server may read a name whatever its case, and would then see another request than the one that is priced.
        const KNOWN: [&str; 6] = ["name", "uri", "arguments", "_meta", "inputresponses", "requeststate"];
        const EXACT: [&str; 6] = ["name", "uri", "arguments", "_meta", "inputResponses", "requestState"];
        for (member, _) in &members {
            if KNOWN.contains(&target::fold(member).as_str()) && !EXACT.contains(&member.as_ref()) {
                return Err(invalid("a member of params is a known one but for its spelling".into()));
            }
        }
        let member = request.kind.member();
        let key = members.iter().find(|(name, _)| name == member).and_then(|(_, value)| json::string(value));
        let key = key.ok_or_else(|| invalid(format!("params.{member} is missing or no text")))?.into_owned();
        Ok(Ask {
            key,
            binding: Binding::of(request.kind, request.revision, request.client_capabilities),
            call: CallKey::of(request.kind, params).map_err(|_| invalid("params cannot be read".into()))?,
            presented: Presented::read(params, request.payment_header),
            request,
        })
    }

    pub fn misplaced(&self) -> Option<Misplaced> {
        match self.presented {
            Presented::Elsewhere(place) => Some(place),
            Presented::Payment(_) | Presented::Nothing => None,
        }
    }
}
