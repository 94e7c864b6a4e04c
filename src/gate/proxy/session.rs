//! `Mcp-Session-Id` towards the client: a sealed token of ours that holds the upstream's own id, so that every replica
//! with the same key ring serves the session and none keeps state. It is ours because it is proof: an output that was
//! paid for in a session goes to whoever brings that session's id again (`docs/outcomes.md`, table "Gate"), and an
//! upstream's id may be a number that anybody can guess, or not exist at all.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use crate::ports::World;
use crate::seal::KeyRing;

const CONTEXT: &str = "gate-session";
const EVENT_PURPOSE: &str = "gate-event-id";
const VERSION: u8 = 1;
/// version, issued, expires, random id
const HEAD_BYTES: usize = 1 + 8 + 8 + 16;
/// An upstream's id that is longer is refused, bytes.
pub const MAX_UPSTREAM_ID: usize = 1_024;
/// Version, key id, nonce and tag of what is sealed, with room to spare.
const MAX_TOKEN: usize = (HEAD_BYTES + MAX_UPSTREAM_ID + 64) * 4 / 3 + 4;
/// A token from farther ahead was not issued by a replica whose clock is a little off, milliseconds.
const SKEW_MS: u64 = 600_000;
const EVENT_TAG_BYTES: usize = 12;

/// What a good token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Stands for the session in claims and logs; the token cannot be made from it.
    pub name: String,
    /// `None`: the upstream has no sessions.
    pub upstream: Option<String>,
}

#[derive(Clone)]
pub struct Sessions {
    pub world: World,
    pub ring: KeyRing,
    /// See [`context`].
    pub context: String,
    pub lifetime_ms: u64,
}

/// A session is one before this upstream: another that is served with the same keys must not be asked with an id that it
/// did not issue, which may be another client's there.
pub fn context(upstream: &str) -> String {
    format!("{CONTEXT}:{}", hex::encode(Sha256::digest(upstream)))
}

impl Sessions {
    /// A new session before the upstream's `id`, as visible ASCII. `None` for an id that no header carries.
    pub fn issue(&self, id: Option<&str>) -> Option<String> {
        let id = id.unwrap_or_default();
        if id.len() > MAX_UPSTREAM_ID || !id.bytes().all(|b| b.is_ascii_graphic()) {
            return None;
        }
        let now = self.world.unix_ms();
        let mut plain = Vec::with_capacity(HEAD_BYTES + id.len());
        plain.push(VERSION);
        plain.extend_from_slice(&now.to_be_bytes());
        plain.extend_from_slice(&now.saturating_add(self.lifetime_ms).to_be_bytes());
        plain.extend_from_slice(&self.world.random::<16>());
        plain.extend_from_slice(id.as_bytes());
        Some(URL_SAFE_NO_PAD.encode(self.ring.seal(&self.world, &self.context, &plain)))
    }

    /// `None` for every token that is not sealed by the ring, or over: the caller learns no more.
    pub fn open(&self, token: &str) -> Option<Session> {
        if token.len() > MAX_TOKEN {
            return None;
        }
        let plain = self.ring.open(&self.context, &URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
        let (&version, rest) = plain.split_first()?;
        let (issued, rest) = rest.split_first_chunk::<8>()?;
        let (expires, rest) = rest.split_first_chunk::<8>()?;
        let (id, upstream) = rest.split_first_chunk::<16>()?;
        let (issued_ms, expires_ms) = (u64::from_be_bytes(*issued), u64::from_be_bytes(*expires));
        let now = self.world.unix_ms();
        if version != VERSION || now >= expires_ms || issued_ms > now.saturating_add(SKEW_MS) {
            return None;
        }
        let name = Sha256::digest([b"gate-session-name:", &id[..]].concat());
        let upstream = std::str::from_utf8(upstream).ok()?;
        Some(Session {
            name: format!("session-{}", hex::encode(name.get(..12)?)),
            upstream: (!upstream.is_empty()).then(|| upstream.to_owned()),
        })
    }

    /// An event's id as the client gets it. What is resumed later is a stream that this client was shown: an id that
    /// was only guessed could be that of a stream with an output that is not paid for.
    pub fn tag_event(&self, session: &str, id: &str) -> String {
        format!("{id}.{}", self.event_tag(session, id))
    }

    /// The upstream's own id again; `None` for one that this session was never given.
    pub fn event<'a>(&self, session: &str, tagged: &'a str) -> Option<&'a str> {
        let (id, tag) = tagged.rsplit_once('.')?;
        let expected = self.event_tag(session, id);
        aws_lc_rs::constant_time::verify_slices_are_equal(tag.as_bytes(), expected.as_bytes()).ok().map(|()| id)
    }

    fn event_tag(&self, session: &str, id: &str) -> String {
        let tag = self.ring.sign(EVENT_PURPOSE, format!("{session}\0{id}").as_bytes());
        URL_SAFE_NO_PAD.encode(&tag[..EVENT_TAG_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::machine;

    fn sessions() -> Sessions {
        let (world, _) = machine::world();
        let ring = KeyRing::ephemeral(&world);
        Sessions { world, ring, context: context("http://a/mcp"), lifetime_ms: 60_000 }
    }

    #[test]
    fn a_token_brings_the_upstreams_id_to_every_replica_and_shows_it_to_nobody() {
        let here = sessions();
        let there = here.clone();
        for id in [None, Some("1"), Some("a-b_c.d~"), Some(&*"x".repeat(MAX_UPSTREAM_ID))] {
            let token = here.issue(id).unwrap();
            assert!(token.bytes().all(|b| b.is_ascii_graphic()) && token.len() <= MAX_TOKEN);
            let session = there.open(&token).unwrap();
            assert_eq!(session.upstream.as_deref(), id);
            assert_ne!(session.name, here.open(&here.issue(id).unwrap()).unwrap().name, "each one is its own");
        }
        for id in ["é", "a b", "a\r\nb", &"x".repeat(MAX_UPSTREAM_ID + 1)] {
            assert!(here.issue(Some(id)).is_none(), "{id:?}");
        }
    }

    #[test]
    fn refuses_what_is_altered_foreign_or_over() {
        let here = sessions();
        let token = here.issue(Some("upstream-1")).unwrap();
        assert!(sessions().open(&token).is_none(), "another ring");
        let before_another = Sessions { context: context("http://b/mcp"), ..here.clone() };
        assert!(before_another.open(&token).is_none(), "another upstream");
        let bytes = URL_SAFE_NO_PAD.decode(&token).unwrap();
        for i in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[i] ^= 1;
            assert!(here.open(&URL_SAFE_NO_PAD.encode(changed)).is_none(), "byte {i}");
        }
        for text in ["", "x", "upstream-1", "é", &"A".repeat(10_000)] {
            assert!(here.open(text).is_none());
        }
        let brief = Sessions { lifetime_ms: 0, ..here };
        assert!(brief.open(&brief.issue(None).unwrap()).is_none(), "expired");
    }

    #[test]
    fn an_event_is_resumed_by_the_session_that_was_shown_it() {
        let here = sessions();
        for id in ["7", "a.b", "", "stream_1"] {
            let tagged = here.tag_event("alice", id);
            assert_eq!(here.event("alice", &tagged), Some(id));
            assert_eq!(here.event("bob", &tagged), None);
        }
        let tag = here.tag_event("alice", "7");
        let (_, tag) = tag.rsplit_once('.').unwrap();
        for guess in ["8", "7", "7.", &format!("8.{tag}"), &format!(".{tag}")] {
            assert_eq!(here.event("alice", guess), None, "{guess}");
        }
    }
}
