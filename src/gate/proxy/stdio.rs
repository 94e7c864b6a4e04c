//! An upstream that is a child process: MCP on its standard input and output, one message a line. Towards the proxy it
//! looks like a server that speaks Streamable HTTP.
//!
//! Each session has a process of its own, which begins with its `initialize` and ends with it; where the operator says
//! that the server keeps nothing between requests, and for requests of 2026-07-28, all share one. A process that dies
//! takes its sessions along (404: the client initializes again); the shared one is started again, later each time it
//! lives only briefly. What it writes to its standard error becomes lines of the log.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncWriteExt as _, BufReader};
use tokio::process::{Child as ChildProcess, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::frames::event;
use super::rewrite::{MAX_DEPTH, replacing};
use super::upstream::{Ask, Reply, ReplyBody, UpstreamError};
use crate::json::{self, Limits, Numbers};
use crate::mcp::envelope::{self, Envelope, Incoming, Outcome};
use crate::mcp::stdio::{Line, Lines};
use crate::mcp::{Revision, RpcError, access, bounded, headers as mcp_headers};
use crate::ports::World;

/// A process that lived this long is not one that fails at its start.
const LIVED: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// After the end of its input a process may take this long to go by itself.
const GRACE: Duration = Duration::from_secs(2);
/// A call that takes longer is answered as a stream, where the client takes one.
const STREAM_AFTER: Duration = Duration::from_millis(250);
/// Messages that wait for a client to take them.
const WAITING: usize = 64;
const MAX_LOG_LINE: usize = 8 * 1_024;
/// Calls without an answer and without anybody who waits for it.
const MAX_FORGOTTEN: usize = 1_024;

#[derive(Clone)]
pub struct ChildSettings {
    pub world: World,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Beside the environment of the gate, of which only what a program needs is passed on.
    pub env: Vec<(String, String)>,
    /// All sessions share one process.
    pub shared: bool,
    /// Processes at once.
    pub max_processes: usize,
    /// A session without a request for this long is over.
    pub idle: Duration,
    /// Of one request.
    pub timeout: Duration,
    /// A longer line is not read, bytes.
    pub max_line: usize,
    pub shutdown: CancellationToken,
}

/// The environment that a child gets of the gate's own: no secret of ours is in it.
const PASSED_ENV: [&str; 8] = ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL"];

pub struct Child {
    settings: ChildSettings,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    sessions: BTreeMap<String, Arc<Process>>,
    shared: Option<Arc<Process>>,
    /// How the sharers greeted the first shared process: its successors are greeted so too.
    greeting: Option<Bytes>,
    /// By source, `None` for the shared one: a client that kills its own process keeps nobody else waiting.
    failing: BTreeMap<Option<String>, Failing>,
}

/// Whose processes died soon after their start.
struct Failing {
    in_a_row: u32,
    /// Before it nothing is started for it.
    not_before: Instant,
}

impl Child {
    pub fn new(settings: ChildSettings) -> Arc<Child> {
        let child = Arc::new(Child { settings, table: Mutex::default() });
        let (idle, world, weak) = (child.settings.idle, child.settings.world.clone(), Arc::downgrade(&child));
        let shutdown = child.settings.shutdown.clone();
        world.spawn.spawn(Box::pin(async move {
            let every = (idle / 4).max(Duration::from_secs(1));
            while let Either::Right(_) = select(Box::pin(shutdown.cancelled()), Box::pin(sleep(every))).await {
                let Some(child) = weak.upgrade() else { return };
                child.table().sessions.retain(|_, process| {
                    let keep = !process.gone.is_cancelled() && !process.unused_for(idle);
                    if !keep {
                        process.end.cancel();
                    }
                    keep
                });
            }
        }));
        child
    }

    pub(super) fn name(&self) -> String {
        self.settings.command.join("\0")
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn ask(self: &Arc<Self>, ask: Ask) -> Result<Reply, UpstreamError> {
        match ask.method {
            Method::DELETE => Ok(self.delete(ask.session.as_deref())),
            Method::GET => self.listen(ask.session.as_deref()),
            _ => self.post(ask).await,
        }
    }

    fn delete(&self, session: Option<&str>) -> Reply {
        match session.and_then(|session| self.table().sessions.remove(session)) {
            Some(process) => {
                process.end.cancel();
                empty(StatusCode::NO_CONTENT)
            }
            None => empty(StatusCode::METHOD_NOT_ALLOWED),
        }
    }

    fn listen(&self, session: Option<&str>) -> Result<Reply, UpstreamError> {
        let Some(session) = session else { return Ok(empty(StatusCode::METHOD_NOT_ALLOWED)) };
        let process = self.of_session(session)?;
        let (out, frames) = mpsc::channel(WAITING);
        let mut calls = process.calls();
        for text in std::mem::take(&mut calls.unheard) {
            let _ = out.try_send(event(text));
        }
        calls.listener = Some(out);
        drop(calls);
        Ok(stream(frames))
    }

    fn of_session(&self, session: &str) -> Result<Arc<Process>, UpstreamError> {
        let process = self.table().sessions.get(session).cloned().ok_or(UpstreamError::NoSession)?;
        if process.gone.is_cancelled() { Err(UpstreamError::NoSession) } else { Ok(process) }
    }

    async fn post(self: &Arc<Self>, ask: Ask) -> Result<Reply, UpstreamError> {
        let limits = Limits { bytes: ask.body.len(), depth: MAX_DEPTH };
        let (id, method, params) = match Envelope::parse(&ask.body, limits) {
            Ok(Incoming::One(Envelope::Request { id, method, params })) => (id, method, params),
            Ok(Incoming::One(envelope)) => {
                let process = self.process(&ask, "").await?.0;
                process.tell(&ask.body, &envelope, ask.client.as_deref()).await?;
                return Ok(empty(StatusCode::ACCEPTED));
            }
            Ok(Incoming::Batch(_)) => {
                let error = RpcError::invalid_request("Invalid request: a server on standard input takes no batches");
                return Ok(json_reply(StatusCode::BAD_REQUEST, envelope::error_response(None, &error)));
            }
            Err(fault) => return Ok(json_reply(StatusCode::BAD_REQUEST, fault.response())),
        };
        let (process, session) = self.process(&ask, &method).await?;
        if method == "initialize" && process.shared {
            self.table().greeting.get_or_insert_with(|| ask.body.clone());
        }
        let takes = access::accept(&ask.headers);
        let asked = Asked { streams: takes.stream, sold: ask.sold, client: ask.client.clone() };
        let mut call = process.call(&ask.body, &id, params.as_deref(), asked).await?;
        let patience = if takes.stream { STREAM_AFTER } else { self.settings.timeout };
        let first = match timeout(patience, call.recv()).await {
            Ok(Some(first)) => Some(first),
            Ok(None) => return Err(UpstreamError::Gone),
            Err(_) if takes.stream => None,
            Err(_) => return Err(crate::http::HttpError::Timeout.into()),
        };
        let mut reply = match first {
            Some(Said::Answer(text)) if takes.json => json_reply(StatusCode::OK, text),
            first => {
                let (out, frames) = mpsc::channel(WAITING);
                let limit = self.settings.timeout;
                self.settings.world.spawn.spawn(Box::pin(async move {
                    let mut next = first;
                    loop {
                        let said = match next.take() {
                            Some(said) => said,
                            None => match timeout(limit, call.recv()).await {
                                Ok(Some(said)) => said,
                                _ => return,
                            },
                        };
                        let (text, last) = match said {
                            Said::Answer(text) => (text, true),
                            Said::Beside(text) => (text, false),
                        };
                        if out.send(event(text)).await.is_err() || last {
                            return;
                        }
                    }
                }));
                stream(frames)
            }
        };
        if let Some(session) = session.and_then(|session| HeaderValue::from_str(&session).ok()) {
            reply.headers.insert(mcp_headers::SESSION_ID, session);
        }
        Ok(reply)
    }

    /// The process that a message belongs to, and the id of the session that begins with it.
    async fn process(
        self: &Arc<Self>,
        ask: &Ask,
        method: &str,
    ) -> Result<(Arc<Process>, Option<String>), UpstreamError> {
        let revision = mcp_headers::single(&ask.headers, mcp_headers::PROTOCOL_VERSION).unwrap_or_default();
        let stateless = revision.and_then(Revision::parse).is_some_and(Revision::stateless);
        if self.settings.shared || stateless {
            return Ok((self.shared().await?, None));
        }
        if method != "initialize" {
            return Ok((self.of_session(ask.session.as_deref().ok_or(UpstreamError::NoSession)?)?, None));
        }
        let id = hex::encode(self.settings.world.random::<16>());
        let process = self.start(false, ask.source.as_deref())?;
        self.table().sessions.insert(id.clone(), process.clone());
        Ok((process, Some(id)))
    }

    /// The one that all share. Whoever finds it dead starts it again, when that may be.
    async fn shared(self: &Arc<Self>) -> Result<Arc<Process>, UpstreamError> {
        let (process, greeting) = {
            let table = self.table();
            if let Some(process) = table.shared.as_ref().filter(|process| !process.gone.is_cancelled()) {
                return Ok(process.clone());
            }
            let greeting = table.greeting.clone();
            drop(table);
            let process = self.start(true, None)?;
            let mut table = self.table();
            // Another request found it dead, too.
            if let Some(first) = table.shared.as_ref().filter(|first| !first.gone.is_cancelled()) {
                process.end.cancel();
                return Ok(first.clone());
            }
            table.shared = Some(process.clone());
            (process, greeting)
        };
        if let Some(greeting) = greeting {
            process.greet(&greeting).await;
        }
        Ok(process)
    }

    fn start(self: &Arc<Self>, shared: bool, source: Option<&str>) -> Result<Arc<Process>, UpstreamError> {
        let mut table = self.table();
        let whom = source.filter(|_| !shared).map(ToOwned::to_owned);
        if table.waits(&whom) {
            return Err(UpstreamError::Busy);
        }
        let running = table.sessions.values().filter(|process| !process.gone.is_cancelled()).count();
        if running >= self.settings.max_processes && (shared || !table.make_room(source)) {
            return Err(UpstreamError::Busy);
        }
        let (program, arguments) = self.settings.command.split_first().ok_or(UpstreamError::Gone)?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        for name in PASSED_ENV {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.envs(self.settings.env.iter().map(|(name, value)| (name, value)));
        let started = Instant::now();
        let spawned = command.spawn();
        let mut running = match spawned {
            Ok(running) => running,
            Err(error) => {
                table.died(whom, Duration::ZERO);
                tracing::error!(%error, program = bounded(program), "the upstream's process could not be started");
                return Err(UpstreamError::Gone);
            }
        };
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (running.stdin.take(), running.stdout.take(), running.stderr.take())
        else {
            return Err(UpstreamError::Gone);
        };
        drop(table);
        let (lines, to_write) = mpsc::channel(WAITING);
        let end = self.settings.shutdown.child_token();
        let process = Arc::new(Process {
            shared,
            source: source.map(ToOwned::to_owned),
            lines,
            calls: Mutex::default(),
            gone: CancellationToken::new(),
            over: end.child_token(),
            end,
            max_line: self.settings.max_line,
        });
        let pid = running.id();
        tracing::info!(pid, shared, "the upstream's process was started");
        let spawn = &self.settings.world.spawn;
        spawn.spawn(Box::pin(log(stderr)));
        spawn.spawn(Box::pin(write(stdin, to_write, process.over.clone())));
        spawn.spawn(Box::pin(process.clone().read(stdout)));
        let (owner, watched) = (Arc::downgrade(self), process.clone());
        spawn.spawn(Box::pin(async move {
            let status = wait(running, &watched).await;
            watched.gone.cancel();
            watched.calls().end();
            let wanted = watched.end.is_cancelled();
            tracing::info!(pid, status, "the upstream's process ended");
            if let Some(owner) = owner.upgrade().filter(|_| !wanted) {
                owner.table().died(whom, started.elapsed());
            }
        }));
        Ok(process)
    }
}

impl Table {
    /// Where one source has more sessions than the newcomer's would have, its longest unused one ends: nobody keeps the
    /// others out by beginning sessions.
    fn make_room(&mut self, newcomer: Option<&str>) -> bool {
        let mut of_source: BTreeMap<Option<&str>, usize> = BTreeMap::new();
        for process in self.sessions.values() {
            *of_source.entry(process.source.as_deref()).or_default() += 1;
        }
        let own = of_source.get(&newcomer).copied().unwrap_or_default();
        let Some((greedy, most)) = of_source.into_iter().max_by_key(|(_, count)| *count) else { return false };
        if most <= own + 1 {
            return false;
        }
        let of_greedy = self.sessions.iter().filter(|(_, process)| process.source.as_deref() == greedy);
        let unused = of_greedy.min_by_key(|(_, process)| process.calls().used).map(|(id, _)| id.clone());
        let Some(ended) = unused.and_then(|id| self.sessions.remove(&id)) else { return false };
        ended.end.cancel();
        true
    }

    fn waits(&self, whom: &Option<String>) -> bool {
        self.failing.get(whom).is_some_and(|failing| Instant::now() < failing.not_before)
    }

    fn died(&mut self, whom: Option<String>, lived: Duration) {
        let now = Instant::now();
        // Whoever failed and did not come again is forgotten.
        self.failing.retain(|_, failing| now < failing.not_before + LIVED);
        if lived >= LIVED {
            self.failing.remove(&whom);
            return;
        }
        let failing = self.failing.entry(whom).or_insert(Failing { in_a_row: 0, not_before: now });
        failing.in_a_row = failing.in_a_row.saturating_add(1);
        // One death is an accident.
        failing.not_before = match failing.in_a_row {
            1 => now,
            n => now + FIRST_PAUSE.saturating_mul(1 << (n - 2).min(10)).min(LONGEST_PAUSE),
        };
    }
}

/// Until the process ends, by itself or because it is told to: by the end of its input first.
async fn wait(mut running: ChildProcess, process: &Process) -> String {
    let by_itself = {
        let (ended, told) = (Box::pin(running.wait()), Box::pin(process.over.cancelled()));
        match select(ended, told).await {
            Either::Left((status, _)) => Some(status),
            Either::Right(_) => None,
        }
    };
    let status = match by_itself {
        Some(status) => status,
        None => match timeout(GRACE, running.wait()).await {
            Ok(status) => status,
            Err(_) => {
                let _ = running.start_kill();
                running.wait().await
            }
        },
    };
    status.map_or_else(|error| error.to_string(), |status| status.to_string())
}

async fn write(mut stdin: ChildStdin, mut lines: mpsc::Receiver<Bytes>, over: CancellationToken) {
    loop {
        let line = match select(Box::pin(over.cancelled()), Box::pin(lines.recv())).await {
            Either::Right((Some(line), _)) => line,
            _ => return,
        };
        let written = async {
            stdin.write_all(&line).await?;
            stdin.flush().await
        };
        if written.await.is_err() {
            return;
        }
    }
}

/// Each line of its standard error is a line of the log.
async fn log(stderr: impl AsyncRead + Unpin) {
    let mut lines = Lines { input: BufReader::new(stderr), limit: MAX_LOG_LINE };
    loop {
        match lines.next().await {
            Ok(Line::Text(line)) => {
                let text: String = String::from_utf8_lossy(&line).chars().filter(|c| !c.is_control()).collect();
                tracing::info!(target: "tollway::upstream", line = text);
            }
            Ok(Line::TooLong) => tracing::info!(target: "tollway::upstream", "a line was too long to be logged"),
            Ok(Line::End) | Err(_) => return,
        }
    }
}

struct Process {
    shared: bool,
    /// Where the client is that began it.
    source: Option<String>,
    lines: mpsc::Sender<Bytes>,
    calls: Mutex<Calls>,
    /// It runs no more.
    gone: CancellationToken,
    /// It is to run no more.
    end: CancellationToken,
    /// That, or it says no more.
    over: CancellationToken,
    max_line: usize,
}

/// What it is asked for.
#[derive(Default)]
struct Calls {
    ended: bool,
    asked: u64,
    /// By the id that the process was given, canonical.
    open: BTreeMap<String, Open>,
    /// By the progress token that it was given: the key in `open`.
    tokens: BTreeMap<String, String>,
    /// The client's stream for what belongs to no call.
    listener: Option<mpsc::Sender<Bytes>>,
    /// What came while nobody listened.
    unheard: Vec<String>,
    used: Option<Instant>,
}

struct Open {
    said: mpsc::Sender<Said>,
    /// The client's own id and progress token, where the process was given others.
    own: Option<(Box<RawValue>, Option<Box<RawValue>>)>,
    /// The client's own id, canonical.
    id: String,
    token: Option<String>,
    asked: Asked,
}

/// For whom, and how.
struct Asked {
    /// Its answer may come as a stream.
    streams: bool,
    /// See [`Ask::sold`].
    sold: bool,
    /// See [`Ask::client`].
    client: Option<String>,
}

enum Said {
    Beside(String),
    Answer(String),
}

impl Calls {
    /// All that wait learn that there is no answer.
    fn end(&mut self) {
        self.ended = true;
        self.open.clear();
        self.tokens.clear();
        self.listener = None;
    }

    /// Calls that nobody waits for any more, when there are many: the process may never answer them.
    fn forget(&mut self) {
        if self.open.len() < MAX_FORGOTTEN {
            return;
        }
        let gone: Vec<String> =
            self.open.iter().filter(|(_, open)| open.said.is_closed()).map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.close(&key);
        }
    }

    fn close(&mut self, key: &str) -> Option<Open> {
        let open = self.open.remove(key)?;
        if let Some(token) = &open.token {
            self.tokens.remove(token);
        }
        Some(open)
    }
}

fn key(raw: &RawValue) -> String {
    json::canonical(raw, Numbers::AsWritten).unwrap_or_default()
}

impl Process {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unused_for(&self, idle: Duration) -> bool {
        let calls = self.calls();
        // Nobody waits any more for a call that took too long.
        let waited_for = calls.open.values().any(|open| !open.said.is_closed());
        !waited_for && calls.listener.is_none() && calls.used.is_some_and(|used| used.elapsed() >= idle)
    }

    /// Writes a request, whose answer comes out of the channel. Where several clients share the process, it gets an id
    /// and a progress token that are no other's.
    async fn call(
        self: &Arc<Self>,
        body: &Bytes,
        id: &RawValue,
        params: Option<&RawValue>,
        asked: Asked,
    ) -> Result<mpsc::Receiver<Said>, UpstreamError> {
        let (said, answers) = mpsc::channel(WAITING);
        let token = params.and_then(|p| json::member(p, "_meta")).and_then(|m| json::member(m, "progressToken"));
        let line = {
            let mut calls = self.calls();
            if calls.ended {
                return Err(UpstreamError::Gone);
            }
            calls.used = Some(Instant::now());
            calls.asked += 1;
            calls.forget();
            let id_key = key(id);
            let (at, token_key, line, own) = match self.shared {
                false => (id_key.clone(), token.map(key), None, None),
                true => {
                    let ours = calls.asked.to_string();
                    let id_and_token: [(&[&str], &str); 2] =
                        [(&["id"], &ours), (&["params", "_meta", "progressToken"], &ours)];
                    let there = if token.is_some() { &id_and_token[..] } else { &id_and_token[..1] };
                    let line = replacing(body, there).ok_or(UpstreamError::Gone)?;
                    let own = Some((id.to_owned(), token.map(ToOwned::to_owned)));
                    (ours.clone(), token.map(|_| ours), Some(line), own)
                }
            };
            if calls.open.contains_key(&at) {
                return Err(UpstreamError::Busy);
            }
            if let Some(token) = &token_key {
                calls.tokens.insert(token.clone(), at.clone());
            }
            calls.open.insert(at, Open { said, own, id: id_key, token: token_key, asked });
            line
        };
        let line = line.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
        self.write(line).await?;
        Ok(answers)
    }

    /// Writes a notification or a response.
    async fn tell(&self, body: &Bytes, envelope: &Envelope, client: Option<&str>) -> Result<(), UpstreamError> {
        let mut line = String::from_utf8_lossy(body).into_owned();
        if self.shared
            && let Envelope::Notification { method, params: Some(params) } = envelope
            && method == "notifications/cancelled"
        {
            // Several clients may use an id at once, and each withdraws its own alone.
            let (Some(id), Some(client)) = (json::member(params, "requestId"), client) else { return Ok(()) };
            let calls = self.calls();
            let is_own = |open: &Open| open.asked.client.as_deref() == Some(client) && open.id == key(id);
            let mut fitting = calls.open.iter().filter(|(_, open)| is_own(open));
            let (Some((ours, _)), None) = (fitting.next(), fitting.next()) else { return Ok(()) };
            line = replacing(body, &[(&["params", "requestId"], ours)]).ok_or(UpstreamError::Gone)?;
        }
        self.write(line).await
    }

    async fn write(&self, line: String) -> Result<(), UpstreamError> {
        let mut line = envelope::one_line(line);
        line.push('\n');
        self.lines.send(Bytes::from(line)).await.map_err(|_| UpstreamError::Gone)
    }

    /// A new shared process is begun as its predecessor was; nobody waits for the answer.
    async fn greet(self: &Arc<Self>, greeting: &Bytes) {
        let Ok(Incoming::One(Envelope::Request { id, params, .. })) =
            Envelope::parse(greeting, Limits { bytes: greeting.len(), depth: MAX_DEPTH })
        else {
            return;
        };
        let asked = Asked { streams: false, sold: false, client: None };
        let answers = self.call(greeting, &id, params.as_deref(), asked).await;
        if let Ok(mut answers) = answers
            && let Ok(Some(_)) = timeout(GRACE, answers.recv()).await
        {
            let _ = self.write(envelope::notification("notifications/initialized", None)).await;
        }
    }

    async fn read(self: Arc<Self>, stdout: impl AsyncRead + Unpin) {
        let mut lines = Lines { input: BufReader::new(stdout), limit: self.max_line };
        loop {
            match lines.next().await {
                Ok(Line::Text(line)) if line.trim_ascii().is_empty() => {}
                Ok(Line::Text(line)) => self.heard(line).await,
                Ok(Line::TooLong) => tracing::warn!("the upstream wrote a line that is too long; it was let go"),
                Ok(Line::End) | Err(_) => return self.over.cancel(),
            }
        }
    }

    async fn heard(&self, line: Vec<u8>) {
        let limits = Limits { bytes: self.max_line, depth: MAX_DEPTH };
        let Ok(envelope) = Envelope::parse_one(&line, limits) else {
            tracing::warn!("the upstream wrote a line that is no message; it was let go");
            return;
        };
        let text = String::from_utf8_lossy(line.trim_ascii()).into_owned();
        match envelope {
            Envelope::Response { id: Some(id), outcome } => {
                let Some(open) = self.calls().close(&key(&id)) else { return };
                let text = match &open.own {
                    Some((own, _)) => answer(own, &outcome, &text),
                    None => text,
                };
                let _ = open.said.send(Said::Answer(text)).await;
            }
            Envelope::Response { id: None, .. } => {}
            Envelope::Notification { method, params } if method == "notifications/progress" => {
                let token = params.as_deref().and_then(|params| json::member(params, "progressToken")).map(key);
                let to = token.and_then(|token| {
                    let calls = self.calls();
                    let open = calls.open.get(calls.tokens.get(&token)?)?;
                    let own = open.own.as_ref().and_then(|(_, token)| token.clone());
                    open.asked.streams.then(|| (open.said.clone(), own))
                });
                let Some((said, own)) = to else { return };
                let text = match own {
                    Some(own) => replacing(text.as_bytes(), &[(&["params", "progressToken"], own.get())]),
                    None => Some(text),
                };
                if let Some(text) = text {
                    let _ = said.send(Said::Beside(text)).await;
                }
            }
            Envelope::Request { id, .. } if self.shared => {
                // Whom it is meant for cannot be told.
                let error = RpcError::method_not_found("no client can be asked: the process is shared");
                let _ = self.write(envelope::error_response(Some(&id), &error)).await;
            }
            Envelope::Notification { .. } if self.shared => {}
            Envelope::Notification { .. } if self.sells() => self.beside_sold(text).await,
            Envelope::Request { .. } | Envelope::Notification { .. } => self.beside(text).await,
        }
    }

    fn sells(&self) -> bool {
        self.calls().open.values().any(|open| open.asked.sold)
    }

    /// What it writes while it works on something that is not paid yet may be of the output: it waits there for the
    /// settlement, or is let go where the answer is no stream.
    async fn beside_sold(&self, text: String) {
        let sold = {
            let calls = self.calls();
            let mut sold = calls.open.values().filter(|open| open.asked.sold && open.asked.streams);
            sold.next_back().map(|open| open.said.clone())
        };
        if let Some(sold) = sold {
            let _ = sold.send(Said::Beside(text)).await;
        }
    }

    /// To the client's own stream; else beside a call; else it waits for a stream.
    async fn beside(&self, text: String) {
        let listener = self.calls().listener.clone();
        if let Some(listener) = listener {
            if listener.send(event(text.clone())).await.is_ok() {
                return;
            }
            self.calls().listener = None;
        }
        let call = self.calls().open.values().rev().find(|open| open.asked.streams).map(|open| open.said.clone());
        if let Some(call) = call
            && call.send(Said::Beside(text.clone())).await.is_ok()
        {
            return;
        }
        let mut calls = self.calls();
        if calls.unheard.len() == WAITING {
            calls.unheard.remove(0);
        }
        calls.unheard.push(text);
    }
}

/// The answer with the client's own id.
fn answer(own: &RawValue, outcome: &Outcome, text: &str) -> String {
    replacing(text.as_bytes(), &[(&["id"], own.get())]).unwrap_or_else(|| match outcome {
        Outcome::Result(result) => envelope::result_response(own, result),
        Outcome::Error(error) => envelope::raw_error_response(own, error),
    })
}

fn empty(status: StatusCode) -> Reply {
    let (_, queue) = mpsc::channel(1);
    Reply { status, headers: HeaderMap::new(), body: ReplyBody::Queue(queue) }
}

fn json_reply(status: StatusCode, text: String) -> Reply {
    let (out, queue) = mpsc::channel(1);
    let _ = out.try_send(Bytes::from(text));
    Reply { status, headers: typed("application/json"), body: ReplyBody::Queue(queue) }
}

fn stream(frames: mpsc::Receiver<Bytes>) -> Reply {
    Reply { status: StatusCode::OK, headers: typed("text/event-stream"), body: ReplyBody::Queue(frames) }
}

fn typed(kind: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_kills_its_own_processes_waits_alone() {
        let mut table = Table::default();
        let [own, other] = ["a", "b"].map(|source| Some(source.to_owned()));
        table.died(own.clone(), Duration::ZERO);
        assert!(!table.waits(&own), "one death is an accident");
        table.died(own.clone(), LIVED / 2);
        assert!(table.waits(&own) && !table.waits(&other) && !table.waits(&None));
        table.died(own.clone(), LIVED);
        assert!(!table.waits(&own));
    }

    fn process(source: &str, used: Instant) -> Arc<Process> {
        let (lines, _) = mpsc::channel(1);
        let calls = Mutex::new(Calls { used: Some(used), ..Calls::default() });
        let (gone, end) = (CancellationToken::new(), CancellationToken::new());
        Arc::new(Process {
            shared: false,
            source: Some(source.to_owned()),
            lines,
            calls,
            gone,
            over: end.child_token(),
            end,
            max_line: 1,
        })
    }

    #[tokio::test]
    async fn nobody_keeps_the_others_out_by_beginning_sessions() {
        let mut table = Table::default();
        let start = Instant::now();
        for n in 0..4u64 {
            table.sessions.insert(format!("greedy-{n}"), process("greedy", start + Duration::from_secs(n ^ 1)));
        }
        assert!(!table.make_room(Some("greedy")), "it has as many as it gets");
        assert!(table.make_room(Some("modest")));
        assert!(!table.sessions.contains_key("greedy-1"), "its longest unused one ends");
        table.sessions.insert("modest-0".to_owned(), process("modest", start));
        assert!(table.make_room(Some("modest")));
        assert!(table.sessions.contains_key("modest-0") && !table.sessions.contains_key("greedy-0"));
        table.sessions.insert("modest-1".to_owned(), process("modest", start));
        assert!(!table.make_room(Some("modest")), "both have the same");
        assert!(!table.make_room(Some("greedy")));
    }

    #[tokio::test]
    async fn a_call_that_nobody_waits_for_keeps_no_process_alive() {
        let process = process("a", Instant::now());
        let (said, waiting) = mpsc::channel(1);
        let asked = Asked { streams: false, sold: false, client: None };
        process.calls().open.insert("1".to_owned(), Open { said, own: None, id: "1".to_owned(), token: None, asked });
        assert!(!process.unused_for(Duration::ZERO));
        drop(waiting);
        assert!(process.unused_for(Duration::ZERO));
    }
}
