//! What the upstream says of an item before anybody is asked to pay for it: whether it is there, and whether the
//! arguments fit, by its own lists as this session sees them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::events::Events;
use super::headers;
use super::paid::{Sale, rpc_error};
use super::rewrite::MAX_DEPTH;
use super::upstream::Reply;
use crate::gate::Kind;
use crate::gate::desk::Described;
use crate::json::{self, Limits};
use crate::mcp::envelope::{Envelope, Outcome};
use crate::mcp::{RpcError, bounded, headers as mcp_headers, revision};

/// A list is asked for again after this long.
const FRESH: Duration = Duration::from_secs(30);
/// Lists that are kept, of sessions and methods.
const MAX_LISTS: usize = 1_000;
/// All of them together, bytes. One that has more than a quarter of it is asked for each time.
const MAX_LISTS_BYTES: usize = 64 << 20;
const MAX_PAGES: usize = 64;
/// Longer lists are read to here.
const MAX_ENTRIES: usize = 10_000;

type Entries = Arc<BTreeMap<String, Box<RawValue>>>;
/// Whom a list was made for, and the method.
type Key = (String, &'static str);

/// The upstream's own lists, each with the moment at which it was read.
#[derive(Default)]
pub(super) struct Lists(Mutex<BTreeMap<Key, (Instant, Entries, usize)>>);

impl Lists {
    /// What is kept; whoever finds it old asks again, while the others go on with it.
    fn kept(&self, key: &Key) -> Option<Entries> {
        let mut lists = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, entries, _) = lists.get_mut(key)?;
        if since.elapsed() >= FRESH {
            *since = Instant::now();
            return None;
        }
        Some(entries.clone())
    }

    fn keep(&self, key: Key, entries: Entries) {
        /// What an entry takes besides its texts, about.
        const EACH: usize = 100;
        let bytes = entries.iter().map(|(name, entry)| name.len() + entry.get().len() + EACH).sum::<usize>() + EACH;
        let mut lists = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lists.remove(&key);
        if bytes > MAX_LISTS_BYTES / 4 {
            return;
        }
        let is_full = |lists: &BTreeMap<Key, (Instant, Entries, usize)>| {
            lists.len() >= MAX_LISTS || lists.values().map(|(_, _, of)| of).sum::<usize>() + bytes > MAX_LISTS_BYTES
        };
        if is_full(&lists) {
            lists.retain(|_, (since, _, _)| since.elapsed() < FRESH);
        }
        while is_full(&lists) && lists.pop_first().is_some() {}
        lists.insert(key, (Instant::now(), entries, bytes));
    }
}

impl Sale {
    pub(super) async fn described(&self) -> Described {
        if json::member(&self.params, "task").is_some() {
            // Its output is fetched by another request, which nobody would pay for.
            return refuse("Invalid params: what has a price cannot be run as a task");
        }
        let (method, member) = match self.kind {
            Kind::Resource => return Described::Fits { tool: None },
            Kind::Tool => ("tools/list", "tools"),
            Kind::Prompt => ("prompts/list", "prompts"),
        };
        let entries = match self.entries(method, member).await {
            Ok(Some(entries)) => entries,
            // An upstream that does not list says what it has by answering.
            Ok(None) => return Described::Fits { tool: None },
            Err(error) => return Described::Refused(Err(error)),
        };
        let Some(entry) = entries.get(&self.name) else {
            return refuse(&format!("Unknown {}: {}", self.kind.word(), bounded(&self.name)));
        };
        let none = json::raw(&serde_json::Map::new());
        let arguments = json::member(&self.params, "arguments").unwrap_or(&none);
        if self.kind == Kind::Prompt {
            let missing = json::member(entry, "arguments").and_then(json::elements).unwrap_or_default();
            let missing = missing.into_iter().find_map(|argument| {
                let name = json::member(argument, "name").and_then(json::string)?;
                let required = json::member(argument, "required").is_some_and(|required| required.get() == "true");
                (required && json::member(arguments, &name).is_none()).then(|| name.into_owned())
            });
            return match missing {
                Some(name) => refuse(&format!("Invalid params: the argument {} is missing", bounded(&name))),
                None => Described::Fits { tool: None },
            };
        }
        Described::by(entry, arguments, self.place.revision)
    }

    /// `None`: the upstream has no such list.
    async fn entries(&self, method: &'static str, member: &str) -> Result<Option<Entries>, RpcError> {
        let key = (self.viewer(), method);
        if let Some(kept) = self.proxy.lists.kept(&key) {
            return Ok(Some(kept));
        }
        let mut entries = BTreeMap::new();
        let mut cursor: Option<Box<RawValue>> = None;
        for _ in 0..MAX_PAGES {
            let page = match self.page(method, cursor.as_deref()).await? {
                Ok(page) => page,
                Err(error) => {
                    tracing::debug!(method, code = error.code, "the upstream does not list");
                    return Ok(None);
                }
            };
            for entry in json::member(&page, member).and_then(json::elements).unwrap_or_default() {
                if let Some(name) = json::member(entry, "name").and_then(json::string) {
                    entries.entry(name.into_owned()).or_insert_with(|| entry.to_owned());
                }
            }
            cursor =
                json::member(&page, "nextCursor").filter(|next| next.get().starts_with('"')).map(ToOwned::to_owned);
            if cursor.is_none() || entries.len() >= MAX_ENTRIES {
                break;
            }
        }
        // A list that was not read to its end does not say what is missing.
        if cursor.is_some() && !entries.contains_key(&self.name) {
            return Ok(None);
        }
        let entries = Arc::new(entries);
        self.proxy.lists.keep(key, entries.clone());
        Ok(Some(entries))
    }

    /// Whose list it is: a session's; else that of whatever the upstream is told of the caller.
    fn viewer(&self) -> String {
        if let Some(session) = &self.place.session {
            return session.name.clone();
        }
        let told = self.proxy.settings.forward.iter().flat_map(|name| self.head.headers.get_all(name));
        let told: Vec<&[u8]> = told.map(HeaderValue::as_bytes).collect();
        use sha2::Digest as _;
        format!("{}-{}", self.place.revision.as_str(), hex::encode(sha2::Sha256::digest(told.join(&0))))
    }

    async fn page(&self, method: &str, cursor: Option<&RawValue>) -> Result<Result<Box<RawValue>, RpcError>, RpcError> {
        let id = json::raw(&format!("tollway-{}", hex::encode(self.proxy.settings.front.world.random::<8>())));
        let mut params = Vec::new();
        if let Some(cursor) = cursor {
            params.push(format!(r#""cursor":{cursor}"#));
        }
        if self.place.revision.stateless() {
            let meta = json::member(&self.params, "_meta");
            let known =
                [revision::META_PROTOCOL_VERSION, revision::META_CLIENT_INFO, revision::META_CLIENT_CAPABILITIES];
            let kept: Vec<String> = known
                .into_iter()
                .filter_map(|name| Some(format!(r#""{name}":{}"#, json::member(meta?, name)?)))
                .collect();
            params.push(format!(r#""_meta":{{{}}}"#, kept.join(",")));
        }
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{{}}}}}"#, params.join(","));
        let head = self.list_head(method);
        let reply = self.proxy.ask(Method::POST, &head, self.place.session.as_ref(), Bytes::from(body)).await;
        let outcome = match reply {
            Ok(reply) => self.outcome(reply, &id).await,
            Err(error) => Err(error.to_string()),
        };
        match outcome {
            Ok(Outcome::Result(result)) => Ok(Ok(result)),
            Ok(Outcome::Error(error)) => Ok(Err(rpc_error(&error))),
            Err(problem) => {
                tracing::warn!(method, problem, "the upstream's list could not be read");
                Err(RpcError::internal("The MCP server behind this gate did not answer"))
            }
        }
    }

    fn list_head(&self, method: &str) -> HeaderMap {
        let mut head = self.head.headers.clone();
        let arguments: Vec<_> =
            head.keys().filter(|name| name.as_str().starts_with(mcp_headers::PARAM_PREFIX)).cloned().collect();
        for name in arguments {
            head.remove(name);
        }
        head.remove(mcp_headers::NAME);
        if head.remove(mcp_headers::METHOD).is_some()
            && let Ok(method) = HeaderValue::from_str(method)
        {
            head.insert(mcp_headers::METHOD, method);
        }
        head.insert(http::header::ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        head
    }

    async fn outcome(&self, mut reply: Reply, id: &RawValue) -> Result<Outcome, String> {
        let (limit, idle) = (self.proxy.settings.max_answer_bytes, self.proxy.settings.idle);
        let limits = Limits { bytes: limit, depth: MAX_DEPTH };
        let answer = |text: &[u8]| match Envelope::parse_one(text, limits) {
            Ok(Envelope::Response { id: Some(own), outcome }) if json::equal(&own, id) => Some(outcome),
            _ => None,
        };
        if !headers::is_stream(&reply.headers) {
            let whole = reply.body.whole(limit, idle).await.map_err(|error| error.to_string())?;
            return answer(&whole).ok_or_else(|| format!("HTTP {} without an answer", reply.status.as_u16()));
        }
        let (mut events, mut found) = (Events::new(limit), Vec::new());
        while let Some(piece) = reply.body.chunk(idle).await.map_err(|error| error.to_string())? {
            let fits = events.push(&piece, &mut found);
            if let Some(outcome) = found.drain(..).filter_map(|event| event.data).find_map(|data| answer(&data)) {
                return Ok(outcome);
            }
            fits.map_err(|_| "an answer that is too large".to_owned())?;
        }
        Err("a stream without an answer".into())
    }
}

fn refuse(text: &str) -> Described {
    Described::Refused(Err(RpcError::invalid_params(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_bounded_in_number_and_in_bytes() {
        let lists = Lists::default();
        let of = |bytes: usize| Arc::new(BTreeMap::from([("a".to_owned(), json::raw(&"x".repeat(bytes)))]));
        let kept = |lists: &Lists| {
            let lists = lists.0.lock().unwrap();
            (lists.len(), lists.values().map(|(_, _, bytes)| bytes).sum::<usize>())
        };
        for n in 0..20 {
            lists.keep((format!("large {n}"), "tools/list"), of(MAX_LISTS_BYTES / 5));
        }
        let (count, bytes) = kept(&lists);
        assert!((1..5).contains(&count) && bytes <= MAX_LISTS_BYTES, "{count} {bytes}");
        lists.keep(("huge".into(), "tools/list"), of(MAX_LISTS_BYTES / 2));
        assert!(lists.kept(&("huge".into(), "tools/list")).is_none());
        for n in 0..MAX_LISTS + 10 {
            lists.keep((format!("small {n}"), "tools/list"), of(1));
        }
        assert_eq!(kept(&lists).0, MAX_LISTS);
        assert!(lists.kept(&(format!("small {}", MAX_LISTS + 9), "tools/list")).is_some());
    }
}
