//! One request, from envelope to answer, whatever carries it: the methods that are the front's own, the handler's call
//! in a task of its own, cancellation, and the word back that the answer was delivered.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{Either, select};
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    Claims, Handler, Progress, RequestContext, Revision, RpcError, Settings, bounded, code, envelope, revision,
};
use crate::json::{self, Numbers};
use crate::money::AgentId;
use crate::telemetry;

/// What the transport has to write.
pub(super) enum Event {
    Notification(String),
    Answer(Answer),
}

pub(super) struct Answer {
    /// The whole JSON-RPC response.
    pub text: String,
    /// The error's code, which decides over the HTTP status.
    #[cfg_attr(not(feature = "roles"), expect(dead_code, reason = "only HTTP has a status"))]
    pub error: Option<i64>,
    pub deliveries: Vec<Delivery>,
}

impl Answer {
    pub fn error(id: Option<&RawValue>, error: &RpcError) -> Answer {
        Answer { text: envelope::error_response(id, error), error: Some(error.code), deliveries: Vec::new() }
    }
}

/// What the handler is told once its answer was written.
pub(super) struct Delivery {
    handler: Arc<dyn Handler>,
    context: Arc<RequestContext>,
    withdrawn: CancellationToken,
    method: String,
    result: Box<RawValue>,
}

impl Delivery {
    /// A client that has cancelled ignores the answer: to it, nothing was delivered.
    pub async fn confirm(self) {
        if !self.withdrawn.is_cancelled() {
            self.handler.delivered(&self.context, &self.method, &self.result).await;
        }
    }
}

pub(super) struct Call {
    pub revision: Revision,
    pub agent: Option<AgentId>,
    pub session: Option<String>,
    pub claims: Claims,
    pub id: Box<RawValue>,
    pub method: String,
    pub params: Option<Box<RawValue>>,
}

pub(super) struct Front {
    pub handler: Arc<dyn Handler>,
    pub settings: Settings,
    /// What this transport speaks.
    pub supported: &'static [Revision],
    /// A cancelled call is not answered. Over HTTP the open request has to be.
    pub silent_when_cancelled: bool,
    /// Ends subscriptions: the shutdown, or the end of the input.
    pub streams_end: CancellationToken,
    server_info: Box<RawValue>,
    running: Arc<Running>,
}

/// The calls that `notifications/cancelled` can name.
#[derive(Default)]
struct Running(Mutex<Table>);

#[derive(Default)]
struct Table {
    started: u64,
    calls: BTreeMap<CallKey, CancellationToken>,
}

/// Session, id, and a number of ours: a client may use an id twice.
type CallKey = (String, String, u64);

impl Running {
    fn add(self: &Arc<Self>, session: &str, id: &RawValue, token: &CancellationToken) -> Listed {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.started += 1;
        let key = (session.to_owned(), id_key(id), running.started);
        running.calls.insert(key.clone(), token.clone());
        Listed { running: self.clone(), key }
    }

    fn cancel(&self, session: &str, id: &RawValue) {
        let (session, id) = (session.to_owned(), id_key(id));
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let range = (session.clone(), id.clone(), 0)..=(session, id, u64::MAX);
        running.calls.range(range).for_each(|(_, token)| token.cancel());
    }

    fn cancel_all(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).calls.values().for_each(CancellationToken::cancel);
    }
}

/// Takes the call from the list when it ends.
struct Listed {
    running: Arc<Running>,
    key: CallKey,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.running.0.lock().unwrap_or_else(PoisonError::into_inner).calls.remove(&self.key);
    }
}

/// The same id in another spelling (`"a"`, `"\u0061"`) is the same id.
fn id_key(id: &RawValue) -> String {
    json::canonical(id, Numbers::AsWritten).unwrap_or_default()
}

impl Front {
    pub fn new(settings: Settings, handler: Arc<dyn Handler>, supported: &'static [Revision]) -> Front {
        #[derive(serde::Serialize)]
        struct Info<'a> {
            name: &'a str,
            version: &'a str,
        }
        let (name, version, _) = handler.server_info();
        let server_info = json::raw(&Info { name, version });
        let streams_end = settings.shutdown.child_token();
        Front {
            handler,
            settings,
            supported,
            silent_when_cancelled: false,
            streams_end,
            server_info,
            running: Arc::default(),
        }
    }

    /// Runs the call in a task of the Spawn port and sends what comes of it to `out`: notifications, then one answer
    /// (none for a withdrawn call where that is the rule). The token withdraws the call; the task ends when the
    /// handler is done, not before. `held` is dropped then.
    pub fn start(
        self: &Arc<Self>,
        call: Call,
        out: mpsc::Sender<Event>,
        held: impl Send + 'static,
    ) -> CancellationToken {
        let withdrawn = CancellationToken::new();
        let front = self.clone();
        let token = withdrawn.clone();
        let listed = call.session.as_deref().map(|session| self.running.add(session, &call.id, &withdrawn));
        self.settings.world.spawn.spawn(Box::pin(async move {
            let running = (call.method != "subscriptions/listen").then(|| telemetry::CALLS.hold());
            let answer = front.answer(call, &out, &token).await;
            drop((listed, running));
            if let Some(answer) = answer {
                let _ = out.send(Event::Answer(answer)).await;
            }
            drop(held);
        }));
        withdrawn
    }

    /// `notifications/cancelled`; anything else that a client tells us is taken note of and nothing more.
    pub fn notified(&self, session: Option<&str>, method: &str, params: Option<&RawValue>) {
        if method == "notifications/cancelled"
            && let Some(id) = params.and_then(|params| json::member(params, "requestId"))
            && envelope::legal_id(id)
            && let Some(session) = session
        {
            self.running.cancel(session, id);
        }
    }

    pub fn withdraw_all(&self) {
        self.running.cancel_all();
    }

    /// The end of the drain.
    pub async fn deadline(&self) {
        self.settings.shutdown.cancelled().await;
        tokio::time::sleep(self.settings.drain).await;
    }

    /// The `initialize` of the revisions that have it.
    pub fn initialize(&self, params: Option<&RawValue>) -> Result<(Revision, Box<RawValue>), RpcError> {
        #[derive(serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Initialized<'a> {
            protocol_version: &'static str,
            capabilities: &'a RawValue,
            server_info: &'a RawValue,
            #[serde(skip_serializing_if = "Option::is_none")]
            instructions: Option<&'a str>,
        }
        let requested = params.and_then(|params| json::member(params, "protocolVersion")).and_then(json::string);
        let requested =
            requested.ok_or_else(|| RpcError::invalid_params("Invalid params: protocolVersion must be a string"))?;
        let revision = Revision::negotiate(&requested, self.supported);
        let result = json::raw(&Initialized {
            protocol_version: revision.as_str(),
            capabilities: &self.handler.capabilities(revision),
            server_info: &self.server_info,
            instructions: self.handler.server_info().2,
        });
        Ok((revision, result))
    }

    fn discover(&self, revision: Revision) -> Box<RawValue> {
        #[derive(serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Discovered<'a> {
            supported_versions: Vec<&'static str>,
            capabilities: &'a RawValue,
            #[serde(skip_serializing_if = "Option::is_none")]
            instructions: Option<&'a str>,
            ttl_ms: u64,
            cache_scope: &'static str,
        }
        json::raw(&Discovered {
            supported_versions: self.supported.iter().map(|revision| revision.as_str()).collect(),
            capabilities: &self.handler.capabilities(revision),
            instructions: self.handler.server_info().2,
            ttl_ms: 0,
            cache_scope: "private",
        })
    }

    async fn answer(&self, call: Call, out: &mpsc::Sender<Event>, withdrawn: &CancellationToken) -> Option<Answer> {
        let Call { revision, agent, session, claims, id, method, params } = call;
        if revision.stateless() && method == "subscriptions/listen" {
            return self.listen(&id, out, withdrawn).await;
        }
        let meta = params.as_deref().and_then(|params| json::member(params, "_meta"));
        let context = Arc::new(RequestContext {
            revision,
            agent,
            session,
            claims,
            cancelled: withdrawn.child_token(),
            meta: meta.map(ToOwned::to_owned),
            progress: Progress::new(revision, meta, out),
        });
        let outcome = match method.as_str() {
            "ping" if !revision.stateless() => Ok((json::raw(&BTreeMap::<&str, ()>::new()), false)),
            "server/discover" if revision.stateless() => Ok((self.discover(revision), false)),
            "initialize" | "server/discover" | "subscriptions/listen" => Err(RpcError::method_not_found(&method)),
            "ping" | "logging/setLevel" | "resources/subscribe" | "resources/unsubscribe" if revision.stateless() => {
                Err(RpcError::method_not_found(&method))
            }
            _ => self.handle(&context, &method, params.as_deref()).await.map(|result| (result, true)),
        };
        context.progress.close();
        if self.silent_when_cancelled && withdrawn.is_cancelled() {
            return None;
        }
        let outcome = outcome.and_then(|(result, handlers)| {
            let shaped = revision::shape(revision, &method, &result, &self.server_info)
                .ok_or_else(|| self.fault(&method, "the handler's result is no object"))?;
            Ok((result, shaped, handlers))
        });
        Some(match outcome {
            Ok((result, shaped, handlers)) => {
                let withdrawn = withdrawn.clone();
                let delivery = Delivery { handler: self.handler.clone(), context, withdrawn, method, result };
                Answer {
                    text: envelope::result_response(&id, &shaped),
                    error: None,
                    deliveries: if handlers { vec![delivery] } else { Vec::new() },
                }
            }
            Err(mut error) => {
                if revision.stateless() && error.code == code::RESOURCE_NOT_FOUND {
                    error.code = code::INVALID_PARAMS;
                }
                Answer::error(Some(&id), &error)
            }
        })
    }

    /// The handler's call to its end, whatever happens around it; a panic is an internal error to the client.
    async fn handle(
        &self,
        context: &RequestContext,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<Box<RawValue>, RpcError> {
        let call = AssertUnwindSafe(self.handler.call(context, method, params)).catch_unwind();
        let ended = match select(call, pin!(self.deadline())).await {
            Either::Left((ended, _)) => ended,
            Either::Right(((), call)) => {
                context.cancelled.cancel();
                call.await
            }
        };
        ended.unwrap_or_else(|_| Err(self.fault(method, "a request handler panicked")))
    }

    /// A fault of ours: the client gets what it takes to find it in the log, and nothing else.
    fn fault(&self, method: &str, what: &str) -> RpcError {
        let fault = hex::encode(self.settings.world.random::<4>());
        tracing::error!(fault, method = bounded(method), "{what}");
        RpcError::internal(format!("Internal error (fault {fault})"))
    }

    /// Acknowledges with the subset that is served: nothing changes behind this front while it runs, so none. The
    /// answer comes when the server ends the subscription; a client that ends it gets none.
    async fn listen(&self, id: &RawValue, out: &mpsc::Sender<Event>, withdrawn: &CancellationToken) -> Option<Answer> {
        let subscription = format!(r#""{}":{id}"#, revision::META_SUBSCRIPTION_ID);
        let params = RawValue::from_string(format!(r#"{{"_meta":{{{subscription}}},"notifications":{{}}}}"#)).ok()?;
        let acknowledged = envelope::notification("notifications/subscriptions/acknowledged", Some(&params));
        out.send(Event::Notification(acknowledged)).await.ok()?;
        let (ended, gone) = (pin!(self.streams_end.cancelled()), pin!(withdrawn.cancelled()));
        match select(ended, gone).await {
            Either::Left(_) => {
                let meta = format!(r#"{{{subscription},"{}":{}}}"#, revision::META_SERVER_INFO, self.server_info);
                let text =
                    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"resultType":"complete","_meta":{meta}}}}}"#);
                Some(Answer { text, error: None, deliveries: Vec::new() })
            }
            Either::Right(_) => None,
        }
    }
}
