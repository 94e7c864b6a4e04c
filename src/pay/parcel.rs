//! Signed bytes and where they go. Two things make a [`Parcel`]: a signature, and a ledger that stored one. So whatever
//! is sent a second time is what was sent first, and nothing that was not stored can be sent again.

use serde_json::value::RawValue;

use super::object::Object;
use super::terms::{Held, Holder, Terms};
use crate::catalog::SellerTransport;
use crate::guard::Call;
use crate::json;
use crate::ledger::{Ledger, LedgerError, Recoverable};
use crate::policy::Origin;
use crate::signer::Signed;
use crate::upstream::{Endpoint, ToolCall, Upstream, UpstreamError};
use crate::x402::{self, PayloadError};

/// What was stored is ours, and has passed these bounds in its parts: an agent's arguments, a seller's challenge.
const STORED_LIMITS: json::Limits = json::Limits { bytes: 64 << 20, depth: 256 };

/// What an agent answers to a seller's `input_required`. No part of the call's identity.
#[derive(Clone, Default)]
pub(super) struct Rounds {
    input_responses: Option<Box<RawValue>>,
    request_state: Option<Box<RawValue>>,
}

impl Rounds {
    pub fn of(call: &Call) -> Rounds {
        Rounds { input_responses: call.input_responses.clone(), request_state: call.request_state.clone() }
    }

    pub fn is_empty(&self) -> bool {
        self.input_responses.is_none() && self.request_state.is_none()
    }

    fn is(&self, other: &Rounds) -> bool {
        let same = |a: &Option<Box<RawValue>>, b: &Option<Box<RawValue>>| {
            a.as_deref().map(RawValue::get) == b.as_deref().map(RawValue::get)
        };
        same(&self.input_responses, &other.input_responses) && same(&self.request_state, &other.request_state)
    }
}

/// Sent once: sending takes it. No Clone for that, and no Debug, because the payload is spendable.
pub(super) struct Parcel {
    endpoint: Endpoint,
    tool: String,
    arguments: Box<RawValue>,
    rounds: Rounds,
    payload: Box<RawValue>,
}

impl Parcel {
    /// `transaction`: the envelope that the chain's preparation made of the signed entry.
    pub fn signed(signed: &Signed, transaction: &str, call: &Call) -> Result<Parcel, PayloadError> {
        let quote = &signed.reserved.quote;
        let scheme = Object::new().with("transaction", transaction).build();
        let (resource, extensions) = (Some(&*quote.resource), quote.extensions.as_deref());
        let payload = x402::payment_payload(&quote.offer, &scheme, resource, extensions, signed.reserved.payment_id)?;
        Ok(Parcel {
            endpoint: quote.endpoint.clone(),
            tool: quote.tool.clone(),
            arguments: call.arguments.clone(),
            rounds: Rounds::of(call),
            payload,
        })
    }

    /// Private: only [`Resend::open`] reads what was stored.
    fn read(stored: &[u8], upstream: &Upstream) -> Result<Parcel, NotResent> {
        let stored = json::check(stored, STORED_LIMITS).map_err(|_| NotResent::Unreadable("json"))?;
        let raw = |name: &'static str| json::member(stored, name).map(ToOwned::to_owned);
        let text =
            |name: &'static str| json::member(stored, name).and_then(json::string).ok_or(NotResent::Unreadable(name));
        let transport = transport(&text("transport")?).ok_or(NotResent::Unreadable("transport"))?;
        Ok(Parcel {
            endpoint: upstream.endpoint(&text("endpoint")?, transport).map_err(NotResent::Refused)?,
            tool: text("tool")?.into_owned(),
            arguments: raw("arguments").ok_or(NotResent::Unreadable("arguments"))?,
            rounds: Rounds { input_responses: raw("inputResponses"), request_state: raw("requestState") },
            payload: raw("payload").ok_or(NotResent::Unreadable("payload"))?,
        })
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub fn tool_call(&self, timeout: std::time::Duration) -> ToolCall<'_> {
        ToolCall {
            tool: &self.tool,
            arguments: &self.arguments,
            input_responses: self.rounds.input_responses.as_deref(),
            request_state: self.rounds.request_state.as_deref(),
            payment: Some(&self.payload),
            timeout,
        }
    }

    /// `{endpoint, transport, tool, arguments, inputResponses?, requestState?, payload}`, as the ledger keeps it sealed.
    pub fn stored(&self) -> Box<RawValue> {
        Object::new()
            .with("endpoint", self.endpoint.url.as_str())
            .with("transport", transport_word(self.endpoint.transport))
            .with("tool", &self.tool)
            .raw("arguments", &self.arguments)
            .maybe_raw("inputResponses", self.rounds.input_responses.as_deref())
            .maybe_raw("requestState", self.rounds.request_state.as_deref())
            .raw("payload", &self.payload)
            .build()
    }
}

/// A parcel that the ledger has stored, under the lease of the recovery that took it. There is no other way to one.
pub(super) struct Resend {
    held: Held,
    parcel: Parcel,
}

/// Why a stored parcel is not sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotResent {
    #[error("the stored payload cannot be read: {0}")]
    Unreadable(&'static str),
    /// The rules for endpoints are others today.
    #[error("{0}")]
    Refused(UpstreamError),
    /// The lease is no longer ours, the row is closed, or nothing can be stored.
    #[error("the answers for the seller could not be stored first")]
    NotStored,
    #[error("{0}")]
    Ledger(LedgerError),
}

impl Resend {
    /// The stored endpoint passes today's rules, or nothing is sent. With the rounds last sent, unless the call brings
    /// its own: those are in the ledger before anybody sees them.
    pub async fn open(
        found: &Recoverable,
        rounds: &Rounds,
        upstream: &Upstream,
        ledger: &dyn Ledger,
    ) -> Result<Resend, NotResent> {
        let Recoverable { payment, lease, payload } = found;
        let mut parcel = Parcel::read(payload, upstream)?;
        if !rounds.is_empty() && !rounds.is(&parcel.rounds) {
            parcel.rounds = rounds.clone();
            match ledger.store_payload(payment.payment_id, lease, parcel.stored().get().as_bytes()).await {
                Ok(true) => {}
                Ok(false) => return Err(NotResent::NotStored),
                Err(error) => return Err(NotResent::Ledger(error)),
            }
        }
        let holder = Holder::Recovery { continues: !rounds.is_empty() };
        let terms = Terms { origin: Origin::of(&parcel.endpoint.url), ..Terms::of_row(payment) };
        Ok(Resend { held: Held { terms, lease: lease.clone(), holder }, parcel })
    }

    /// What is sent, once, and whose answer it is.
    pub fn into_parts(self) -> (Held, Parcel) {
        (self.held, self.parcel)
    }
}

fn transport_word(transport: SellerTransport) -> &'static str {
    match transport {
        SellerTransport::StreamableHttp => "streamable-http",
        SellerTransport::Sse => "sse",
    }
}

fn transport(word: &str) -> Option<SellerTransport> {
    [SellerTransport::StreamableHttp, SellerTransport::Sse].into_iter().find(|t| transport_word(*t) == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Tls;
    use crate::ports::machine;
    use crate::upstream::Settings;

    const MEMBERS: [(&str, &str); 7] = [
        ("endpoint", r#""http://127.0.0.1:9/mcp?a=1""#),
        ("transport", r#""sse""#),
        ("tool", r#""t\"x""#),
        ("arguments", r#"{ "n" : 1.0, "big":10000000000000000000000001 }"#),
        ("inputResponses", r#"{"q":{ "v":1e3}}"#),
        ("requestState", r#""s\u00e9 \/""#),
        ("payload", r#"{ "x402Version":2,"payload":{"transaction":"AAAA"} , "n":[1.50, 2]}"#),
    ];

    fn upstream(allow_insecure_local: bool) -> Upstream {
        let (world, _) = machine::world();
        let settings = Settings { allow_insecure_local, ..Settings::default() };
        let http = settings.client(world.clone(), Tls::Plain);
        Upstream::new(settings, world, http)
    }

    fn stored(members: &[(&str, &str)]) -> String {
        let members: Vec<String> = members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", members.join(","))
    }

    #[test]
    fn what_was_stored_is_read_back_to_the_byte() {
        let without_rounds: Vec<_> =
            MEMBERS.into_iter().filter(|(name, _)| !name.contains("equest") && !name.contains("input")).collect();
        for members in [&MEMBERS[..], &without_rounds] {
            let text = stored(members);
            let parcel = Parcel::read(text.as_bytes(), &upstream(true)).ok().unwrap();
            assert_eq!(parcel.stored().get(), text);
            let call = parcel.tool_call(std::time::Duration::ZERO);
            assert_eq!((call.tool, call.arguments.get()), ("t\"x", MEMBERS[3].1));
            assert_eq!(call.payment.map(RawValue::get), Some(MEMBERS[6].1));
        }
    }

    #[test]
    fn a_parcel_that_lacks_something_or_goes_where_todays_rules_do_not_let_it_is_not_read() {
        for lacking in ["endpoint", "transport", "tool", "arguments", "payload"] {
            let members: Vec<_> = MEMBERS.into_iter().filter(|(name, _)| *name != lacking).collect();
            let read = Parcel::read(stored(&members).as_bytes(), &upstream(true));
            assert!(matches!(read, Err(NotResent::Unreadable(name)) if name == lacking), "{lacking}");
        }
        for broken in ["", "{", "[]", r#"{"tool":1,"tool":2}"#] {
            assert!(matches!(Parcel::read(broken.as_bytes(), &upstream(true)), Err(NotResent::Unreadable(_))));
        }
        let read = Parcel::read(stored(&MEMBERS).as_bytes(), &upstream(false));
        assert!(matches!(read, Err(NotResent::Refused(UpstreamError::Refused("not_https")))));
    }
}
