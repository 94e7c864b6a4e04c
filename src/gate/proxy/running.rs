//! The priced requests that run now, by what their clients call them. Upstreams know them by ids that nobody can guess: an
//! id of the client's own would let a free request with the same id take the answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::rewrite::replacing;
use super::session::Session;
use crate::json::{self, Numbers};

/// (session, the client's id, canonical)
type Key = (String, String);

/// Of this process: a cancellation that arrives at another gate finds nothing to stop, as the protocol allows.
#[derive(Clone, Default)]
pub(super) struct Running(Arc<Mutex<BTreeMap<Key, Vec<One>>>>);

struct One {
    /// The id that the upstream was given.
    ours: Box<RawValue>,
    cancel: CancellationToken,
}

/// Takes the request off the list.
pub(super) struct Entry {
    running: Running,
    key: Key,
    ours: Box<RawValue>,
}

impl Running {
    /// Without a session nobody can show that a cancellation is his.
    pub fn begin(
        &self,
        session: Option<&Session>,
        id: &RawValue,
        ours: &RawValue,
        cancel: &CancellationToken,
    ) -> Option<Entry> {
        let key = (session?.name.clone(), canonical(id)?);
        let one = One { ours: ours.to_owned(), cancel: cancel.clone() };
        self.list().entry(key.clone()).or_default().push(one);
        Some(Entry { running: self.clone(), key, ours: ours.to_owned() })
    }

    /// Where the notification withdraws requests that run here: ends them, and gives what the upstream is to be told.
    pub fn end(
        &self,
        session: Option<&Session>,
        method: &str,
        params: Option<&RawValue>,
        body: &Bytes,
    ) -> Option<Vec<Bytes>> {
        if method != "notifications/cancelled" {
            return None;
        }
        let key = (session?.name.clone(), canonical(json::member(params?, "requestId")?)?);
        let list = self.list();
        let running = list.get(&key)?;
        let told = running.iter().filter_map(|one| {
            one.cancel.cancel();
            replacing(body, &[(&["params", "requestId"], one.ours.get())]).map(Bytes::from)
        });
        Some(told.collect())
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<Key, Vec<One>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut list = self.running.list();
        if let Some(running) = list.get_mut(&self.key) {
            running.retain(|one| one.ours.get() != self.ours.get());
            if running.is_empty() {
                list.remove(&self.key);
            }
        }
    }
}

fn canonical(id: &RawValue) -> Option<String> {
    json::canonical(id, Numbers::AsWritten).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn a_client_withdraws_its_own_request_by_its_own_id() {
        let running = Running::default();
        let alice = Session { name: "alice".into(), upstream: None };
        let bob = Session { name: "bob".into(), upstream: None };
        let cancel = CancellationToken::new();
        assert!(running.begin(None, &raw("7"), &raw(r#""x""#), &cancel).is_none());
        let entry = running.begin(Some(&alice), &raw("7"), &raw(r#""x""#), &cancel).unwrap();
        let body =
            Bytes::from(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"z":1.0,"requestId":7}}"#);
        let params = raw(r#"{"z":1.0,"requestId":7}"#);
        let end = |session, method, params: &RawValue| running.end(session, method, Some(params), &body);
        assert!(end(Some(&bob), "notifications/cancelled", &params).is_none());
        assert!(end(None, "notifications/cancelled", &params).is_none());
        assert!(end(Some(&alice), "notifications/cancelled", &raw(r#"{"requestId":"7"}"#)).is_none());
        assert!(end(Some(&alice), "notifications/progress", &params).is_none());
        assert!(!cancel.is_cancelled());
        let told = end(Some(&alice), "notifications/cancelled", &params).unwrap();
        assert_eq!(
            told,
            [&br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"z":1.0,"requestId":"x"}}"#[..]]
        );
        assert!(cancel.is_cancelled());
        drop(entry);
        assert!(end(Some(&alice), "notifications/cancelled", &params).is_none());
    }
}
