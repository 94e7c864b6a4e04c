//! `Mcp-Session-Id` as a signed token that holds all there is to know of a session, so that any replica with the same
//! key ring serves it and none keeps state: revision, issue time, expiry, a random id, and the agent it belongs to.

use sha2::{Digest, Sha256};

use super::{Revision, Settings, signed};
use crate::money::AgentId;

const PURPOSE: &str = "mcp-session";
const VERSION: u8 = 1;
/// version, revision, issued, expires, random id
const HEAD_BYTES: usize = 1 + 1 + 8 + 8 + 16;

/// What a good token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub revision: Revision,
    /// Stands for the session in the ledger and in logs; the token cannot be made from it.
    pub name: String,
    pub expires_ms: u64,
}

/// A new session for `agent`, as visible ASCII.
pub fn issue(settings: &Settings, revision: Revision, agent: Option<&AgentId>) -> String {
    let now = settings.world.unix_ms();
    let lifetime = u64::try_from(settings.session_lifetime.as_millis()).unwrap_or(u64::MAX);
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.push(VERSION);
    head.push(number(revision));
    head.extend_from_slice(&now.to_be_bytes());
    head.extend_from_slice(&now.saturating_add(lifetime).to_be_bytes());
    head.extend_from_slice(&settings.world.random::<16>());
    signed::seal(&settings.ring, PURPOSE, &head, agent)
}

/// `None` for every token that is not this agent's, not signed by the ring, or over: the caller learns no more.
pub fn verify(settings: &Settings, token: &str, agent: Option<&AgentId>) -> Option<Session> {
    let head = signed::open::<HEAD_BYTES>(&settings.ring, PURPOSE, token, agent)?;
    let (&version, rest) = head.split_first()?;
    let (&revision, rest) = rest.split_first()?;
    let (issued, rest) = rest.split_first_chunk::<8>()?;
    let (expires, rest) = rest.split_first_chunk::<8>()?;
    let id = rest.first_chunk::<16>()?;
    let (issued_ms, expires_ms) = (u64::from_be_bytes(*issued), u64::from_be_bytes(*expires));
    let now = settings.world.unix_ms();
    // A token of a replica whose clock is ahead is good; one from far in the future was not issued by one of ours.
    if version != VERSION || now >= expires_ms || issued_ms > now.saturating_add(600_000) {
        return None;
    }
    let name = Sha256::digest([b"mcp-session-name:", &id[..]].concat());
    Some(Session { revision: by_number(revision)?, name: format!("session-{}", hex::encode(&name[..12])), expires_ms })
}

fn number(revision: Revision) -> u8 {
    match revision {
        Revision::V2024_11_05 => 1,
        Revision::V2025_03_26 => 2,
        Revision::V2025_06_18 => 3,
        Revision::V2025_11_25 => 4,
        Revision::V2026_07_28 => 5,
    }
}

fn by_number(n: u8) -> Option<Revision> {
    Revision::ALL.into_iter().find(|revision| number(*revision) == n)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::ports::machine;
    use crate::seal::KeyRing;

    fn settings() -> Settings {
        let (world, _) = machine::world();
        let ring = KeyRing::ephemeral(&world);
        Settings::new(world, ring, CancellationToken::new())
    }

    #[test]
    fn a_token_is_good_for_its_agent_and_revision_on_every_replica() {
        let here = settings();
        let mut replica = settings();
        replica.ring = here.ring.clone();
        let alice: AgentId = "alice".parse().unwrap();
        let token = issue(&here, Revision::V2025_06_18, Some(&alice));
        assert!(token.bytes().all(|b| b.is_ascii_graphic()), "{token}");
        let session = verify(&replica, &token, Some(&alice)).unwrap();
        assert_eq!(session.revision, Revision::V2025_06_18);
        assert_eq!(verify(&here, &token, Some(&alice)), Some(session.clone()));
        assert!(!session.name.contains(&token) && session.name.starts_with("session-"));
        let other = issue(&here, Revision::V2025_06_18, Some(&alice));
        assert_ne!(verify(&here, &other, Some(&alice)).unwrap().name, session.name);
        let public = issue(&here, Revision::V2025_03_26, None);
        assert!(verify(&here, &public, None).is_some() && verify(&here, &public, Some(&alice)).is_none());
    }

    #[test]
    fn refuses_tampered_foreign_and_expired_tokens() {
        let here = settings();
        let (alice, bob): (AgentId, AgentId) = ("alice".parse().unwrap(), "bob".parse().unwrap());
        let token = issue(&here, Revision::V2025_06_18, Some(&alice));
        assert!(verify(&here, &token, Some(&bob)).is_none() && verify(&here, &token, None).is_none());
        assert!(verify(&settings(), &token, Some(&alice)).is_none(), "another ring");
        let bytes = URL_SAFE_NO_PAD.decode(&token).unwrap();
        for i in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[i] ^= 1;
            assert!(verify(&here, &URL_SAFE_NO_PAD.encode(changed), Some(&alice)).is_none(), "byte {i}");
        }
        for end in 0..bytes.len() {
            assert!(verify(&here, &URL_SAFE_NO_PAD.encode(&bytes[..end]), Some(&alice)).is_none(), "cut at {end}");
        }
        for text in ["", "x", "a b", "é", &"A".repeat(10_000)] {
            assert!(verify(&here, text, Some(&alice)).is_none());
        }
        let brief = Settings { session_lifetime: Duration::ZERO, ..here };
        assert!(verify(&brief, &issue(&brief, Revision::V2025_06_18, Some(&alice)), Some(&alice)).is_none(), "expired");
    }
}
