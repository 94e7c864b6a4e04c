//! What the tokens of both transports have in common: a head of fixed length, then the agent's name, then the ring's tag
//! over both for one purpose, as visible ASCII that needs no escape in a header or a query.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::money::AgentId;
use crate::seal::KeyRing;

const TAG_BYTES: usize = 32;
/// An agent's name is no longer.
const MAX_AGENT_BYTES: usize = 128;

/// `head`: of the length that [`open`] is told.
pub(super) fn seal(ring: &KeyRing, purpose: &str, head: &[u8], agent: Option<&AgentId>) -> String {
    let mut token = Vec::with_capacity(head.len() + 1 + MAX_AGENT_BYTES + TAG_BYTES);
    token.extend_from_slice(head);
    token.push(u8::from(agent.is_some()));
    token.extend_from_slice(agent.map_or("", AgentId::as_str).as_bytes());
    let tag = ring.sign(purpose, &token);
    token.extend_from_slice(&tag);
    URL_SAFE_NO_PAD.encode(token)
}

/// The head. `None` for every token that is not this agent's, or not signed by the ring for this purpose.
pub(super) fn open<const HEAD: usize>(
    ring: &KeyRing,
    purpose: &str,
    token: &str,
    agent: Option<&AgentId>,
) -> Option<[u8; HEAD]> {
    if token.len() > 4 * (HEAD + 1 + MAX_AGENT_BYTES + TAG_BYTES).div_ceil(3) {
        return None;
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
    let (signed, tag) = bytes.split_at_checked(bytes.len().checked_sub(TAG_BYTES)?)?;
    let (head, owner) = signed.split_first_chunk::<HEAD>()?;
    let (&owned, owner) = owner.split_first()?;
    if !ring.verify(purpose, signed, tag) {
        return None;
    }
    let ours = match agent {
        None => owned == 0 && owner.is_empty(),
        Some(agent) => owned == 1 && owner == agent.as_str().as_bytes(),
    };
    ours.then_some(*head)
}
