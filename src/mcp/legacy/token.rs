//! The `sessionId` of a stream of 2024-11-05, as a signed token: which stream, whose, until when, and at which address
//! the other replicas hand over what belongs to it. Signed for a purpose of its own, so that no `Mcp-Session-Id` is one
//! and none is an `Mcp-Session-Id`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use sha2::{Digest, Sha256};

use crate::mcp::{Settings, signed};
use crate::money::AgentId;

const PURPOSE: &str = "mcp-sse-session";
const VERSION: u8 = 1;
/// version, expires, random id, kind of address, address, port
const HEAD_BYTES: usize = 1 + 8 + 16 + 1 + 16 + 2;

/// What a good token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Stands for the stream in tables, in the ledger and in logs; the token cannot be made from it.
    pub name: String,
    pub expires_ms: u64,
    /// The relay listener of the replica that holds the stream; `None` where there is one replica.
    pub at: Option<SocketAddr>,
}

/// A new token, as visible ASCII that needs no escape in a query.
pub fn issue(settings: &Settings, at: Option<SocketAddr>, agent: Option<&AgentId>) -> (String, Ticket) {
    let lifetime = u64::try_from(settings.session_lifetime.as_millis()).unwrap_or(u64::MAX);
    let expires_ms = settings.world.unix_ms().saturating_add(lifetime);
    let id = settings.world.random::<16>();
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.push(VERSION);
    head.extend_from_slice(&expires_ms.to_be_bytes());
    head.extend_from_slice(&id);
    let (kind, ip) = match at.map(|at| at.ip()) {
        None => (0, [0; 16]),
        Some(IpAddr::V4(ip)) => (4, ip.to_ipv6_mapped().octets()),
        Some(IpAddr::V6(ip)) => (6, ip.octets()),
    };
    head.push(kind);
    head.extend_from_slice(&ip);
    head.extend_from_slice(&at.map_or(0, |at| at.port()).to_be_bytes());
    (signed::seal(&settings.ring, PURPOSE, &head, agent), Ticket { name: name(&id), expires_ms, at })
}

/// `None` for every token that is not this agent's, not signed by the ring, or over: the caller learns no more.
pub fn verify(settings: &Settings, token: &str, agent: Option<&AgentId>) -> Option<Ticket> {
    let head = signed::open::<HEAD_BYTES>(&settings.ring, PURPOSE, token, agent)?;
    let (&version, rest) = head.split_first()?;
    let (expires, rest) = rest.split_first_chunk::<8>()?;
    let (id, rest) = rest.split_first_chunk::<16>()?;
    let (&kind, rest) = rest.split_first()?;
    let (ip, rest) = rest.split_first_chunk::<16>()?;
    let port = rest.first_chunk::<2>()?;
    let expires_ms = u64::from_be_bytes(*expires);
    if version != VERSION || settings.world.unix_ms() >= expires_ms {
        return None;
    }
    let ip = Ipv6Addr::from(*ip);
    let ip: Option<IpAddr> = match kind {
        4 => Some(ip.to_ipv4_mapped().map(Ipv4Addr::into)?),
        6 => Some(ip.into()),
        _ => None,
    };
    let at = ip.map(|ip| SocketAddr::new(ip, u16::from_be_bytes(*port)));
    Some(Ticket { name: name(id), expires_ms, at })
}

fn name(id: &[u8; 16]) -> String {
    let name = Sha256::digest([b"mcp-sse-session-name:", &id[..]].concat());
    format!("sse-{}", hex::encode(&name[..12]))
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::mcp::{Revision, session};
    use crate::ports::machine;
    use crate::seal::KeyRing;

    fn settings() -> Settings {
        let (world, _) = machine::world();
        let ring = KeyRing::ephemeral(&world);
        Settings::new(world, ring, CancellationToken::new())
    }

    #[test]
    fn a_token_says_where_its_stream_is_and_is_its_agents_alone() {
        let (here, mut replica) = (settings(), settings());
        replica.ring = here.ring.clone();
        let (alice, bob): (AgentId, AgentId) = ("alice".parse().unwrap(), "bob".parse().unwrap());
        for at in [None, Some("10.0.0.7:4523"), Some("[fd00::7]:1"), Some("[::ffff:10.0.0.7]:4523")] {
            let at = at.map(|at| at.parse().unwrap());
            let (token, ticket) = issue(&here, at, Some(&alice));
            assert_eq!(verify(&replica, &token, Some(&alice)), Some(ticket.clone()));
            assert_eq!(ticket.at, at);
            assert!(verify(&replica, &token, Some(&bob)).is_none() && verify(&replica, &token, None).is_none());
            assert!(verify(&settings(), &token, Some(&alice)).is_none(), "another ring");
            let bytes = URL_SAFE_NO_PAD.decode(&token).unwrap();
            for i in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[i] ^= 1;
                assert!(verify(&here, &URL_SAFE_NO_PAD.encode(changed), Some(&alice)).is_none(), "byte {i}");
                assert!(verify(&here, &URL_SAFE_NO_PAD.encode(&bytes[..i]), Some(&alice)).is_none(), "cut at {i}");
            }
        }
        for text in ["", "x", "a b", "é", &"A".repeat(10_000)] {
            assert!(verify(&here, text, None).is_none());
        }
    }

    #[test]
    fn no_session_of_another_transport_is_one() {
        let here = settings();
        let streamable = session::issue(&here, Revision::V2025_06_18, None);
        assert!(session::verify(&here, &streamable, None).is_some() && verify(&here, &streamable, None).is_none());
        let (sse, _) = issue(&here, None, None);
        assert!(verify(&here, &sse, None).is_some() && session::verify(&here, &sse, None).is_none());
        let brief = Settings { session_lifetime: std::time::Duration::ZERO, ..here };
        assert!(verify(&brief, &issue(&brief, None, None).0, None).is_none(), "expired");
    }
}
