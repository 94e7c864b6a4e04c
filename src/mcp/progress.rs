//! Progress of a call, as the handler reports it.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::value::RawValue;
use tokio::sync::mpsc;

use super::dispatch::Event;
use super::{Revision, bounded, envelope};
use crate::json;

/// Sends `notifications/progress`; does nothing where the client asked for none, or once the call is answered.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<Mutex<Open>>>);

struct Open {
    token: Box<RawValue>,
    with_message: bool,
    last: f64,
    /// `None` once the call is answered: nothing may follow an answer.
    out: Option<mpsc::Sender<Event>>,
}

impl Progress {
    /// For a request whose `_meta` carries a progress token (a string or an integer).
    pub(super) fn new(revision: Revision, meta: Option<&RawValue>, out: &mpsc::Sender<Event>) -> Progress {
        let token = meta.and_then(|meta| json::member(meta, "progressToken"));
        Progress(token.filter(|token| envelope::legal_id(token)).map(|token| {
            Arc::new(Mutex::new(Open {
                token: token.to_owned(),
                // 2024-11-05 has no message.
                with_message: revision > Revision::V2024_11_05,
                last: f64::NEG_INFINITY,
                out: Some(out.clone()),
            }))
        }))
    }

    /// `progress` must grow from call to call (the specification's demand): a report that does not is left out, and so
    /// is one that the client is too slow to take.
    pub fn report(&self, progress: f64, total: Option<f64>, message: &str) {
        #[derive(serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Params<'a> {
            progress_token: &'a RawValue,
            progress: f64,
            #[serde(skip_serializing_if = "Option::is_none")]
            total: Option<f64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            message: Option<String>,
        }
        let Some(open) = &self.0 else { return };
        let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.out.is_none() || !progress.is_finite() || progress <= open.last {
            return;
        }
        open.last = progress;
        let params = json::raw(&Params {
            progress_token: &open.token,
            progress,
            total: total.filter(|total| total.is_finite()),
            message: (open.with_message && !message.is_empty()).then(|| bounded(message)),
        });
        if let Some(out) = &open.out {
            let _ = out.try_send(Event::Notification(envelope::notification("notifications/progress", Some(&params))));
        }
    }

    pub(super) fn close(&self) {
        if let Some(open) = &self.0 {
            open.lock().unwrap_or_else(PoisonError::into_inner).out = None;
        }
    }
}
