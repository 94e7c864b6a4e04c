//! Which revision a Streamable HTTP seller speaks, and the session with an older one.

use http::StatusCode;
use serde_json::value::RawValue;
use tokio::time::Instant;
use url::Url;

use super::client::{Headers, Reply, Upstream};
use super::wire::{self, Outgoing};
use super::{Endpoint, ToolAnswer, UpstreamError};
use crate::json;
use crate::mcp::{Revision, envelope, headers};

const MAX_SESSION_ID_BYTES: usize = 1024;

/// What was agreed with an endpoint.
#[derive(Debug)]
pub(super) struct Session {
    /// The endpoint, or where its own origin redirected to.
    pub url: Url,
    pub revision: Revision,
    /// The seller's `Mcp-Session-Id`; 2026-07-28 has none.
    pub id: Option<String>,
}

impl Upstream {
    /// `server/discover` first, as a 2026-07-28 seller need not know `initialize`; an older one answers it with an
    /// error, whichever (2026-07-28, basic/versioning, "Backward Compatibility").
    pub(super) async fn negotiate(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Session, UpstreamError> {
        let mut url = endpoint.url.clone();
        let newest = Revision::V2026_07_28;
        let discover = Outgoing::new("server/discover");
        let id = self.next_id();
        let headers = Headers { revision: Some(newest), session: None, params: Vec::new() };
        match self.exchange(&mut url, &headers, &discover, discover.body(id, newest), id, deadline, &mut None).await {
            Ok(Reply::Answer { answer: ToolAnswer::Result(result), .. }) if names(&result, newest) => {
                return Ok(Session { url, revision: newest, id: None });
            }
            Ok(_) | Err(UpstreamError::Protocol { .. }) => {}
            Err(error) => return Err(error),
        }
        self.initialize(url, deadline).await
    }

    async fn initialize(&self, mut url: Url, deadline: Instant) -> Result<Session, UpstreamError> {
        let params = Handshake::new(Revision::V2025_11_25);
        let (outgoing, id) = (params.outgoing(), self.next_id());
        let body = outgoing.body(id, Revision::V2025_11_25);
        let headers = Headers { revision: None, session: None, params: Vec::new() };
        let (answer, session) =
            match self.exchange(&mut url, &headers, &outgoing, body, id, deadline, &mut None).await? {
                Reply::Answer { answer, session } => (answer, session),
                Reply::SessionLost => return Err(UpstreamError::protocol(false, "initialize: HTTP 404")),
            };
        let revision = agreed(answer)?;
        if session.as_ref().is_some_and(|id| id.len() > MAX_SESSION_ID_BYTES) {
            return Err(UpstreamError::protocol(false, "the session id is too long"));
        }
        let session = Session { url, revision, id: session };
        let note = envelope::notification("notifications/initialized", None);
        let status = self.notify(&session, note.into(), deadline).await?;
        // Some older sellers answer 200 or 204 in place of 202.
        if !status.is_success() {
            return Err(UpstreamError::protocol(false, format!("notifications/initialized: HTTP {}", status.as_u16())));
        }
        Ok(session)
    }

    async fn notify(
        &self,
        session: &Session,
        body: bytes::Bytes,
        deadline: Instant,
    ) -> Result<StatusCode, UpstreamError> {
        let headers = Headers { revision: Some(session.revision), session: session.id.as_deref(), params: Vec::new() };
        let request = self.request(&session.url, &headers, None, body)?;
        let sent = self.http().send_within(request, self.limits(deadline)).await;
        Ok(sent.map_err(|e| UpstreamError::of_setup(e, false))?.status())
    }
}

/// The members of `initialize`.
pub(super) struct Handshake {
    version: Box<RawValue>,
    capabilities: Box<RawValue>,
    client: Box<RawValue>,
}
impl Handshake {
    pub fn new(revision: Revision) -> Handshake {
        let fixed = |text: &str| RawValue::from_string(text.to_owned()).unwrap_or_else(|_| RawValue::NULL.to_owned());
        Handshake { version: json::raw(revision.as_str()), capabilities: fixed("{}"), client: fixed(wire::CLIENT_INFO) }
    }
    pub fn outgoing(&self) -> Outgoing<'_> {
        let members = vec![
            ("protocolVersion", &*self.version),
            ("capabilities", &*self.capabilities),
            ("clientInfo", &*self.client),
        ];
        Outgoing { members, ..Outgoing::new("initialize") }
    }
}

/// The revision that the answer to `initialize` names.
pub(super) fn agreed(answer: ToolAnswer) -> Result<Revision, UpstreamError> {
    let result = match answer {
        ToolAnswer::Result(result) => result,
        ToolAnswer::Error { code, .. } => {
            return Err(UpstreamError::protocol(false, format!("initialize was answered with error {code}")));
        }
    };
    let named = json::member(&result, "protocolVersion").and_then(json::string);
    named
        .and_then(|name| Revision::parse(&name))
        .filter(|revision| !revision.stateless())
        .ok_or_else(|| UpstreamError::protocol(false, "the seller names no protocol version that is known"))
}

fn names(result: &RawValue, revision: Revision) -> bool {
    let versions = json::member(result, "supportedVersions").and_then(json::elements).unwrap_or_default();
    versions.into_iter().any(|v| json::string(v).as_deref() == Some(revision.as_str()))
}

/// The seller's session id, where it is one (visible ASCII: 2025-11-25, basic/transports, "Session Management").
pub(super) fn session_id(head: &http::response::Parts) -> Option<String> {
    let value = head.headers.get(headers::SESSION_ID)?.to_str().ok()?;
    (!value.is_empty() && value.bytes().all(|b| b.is_ascii_graphic())).then(|| value.to_owned())
}
