//! One client: each request on a TCP connection of its own, and nothing asked twice. Whatever an answer says is held
//! against what was asked: the request's id, the session's revision, the agent's own budget.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

#[cfg(test)]
use crate::parts::wire::Head;
use crate::parts::wire::{PATIENCE, Reply, Seen, Wire, once};

pub const STATELESS: &str = "2026-07-28";
/// The revisions with a handshake that Streamable HTTP serves.
pub const HANDSHAKE: [&str; 3] = ["2025-11-25", "2025-06-18", "2025-03-26"];
const PATH: &str = "/mcp";
const BOTH: &str = "application/json, text/event-stream";
pub const SEARCH: &str = "x402_search_resources";
pub const BUDGET: &str = "x402_get_budget";

/// Whom a request goes to.
#[derive(Clone)]
pub enum Route {
    /// The replicas themselves, one after the other.
    Turns(Vec<u16>),
    Balancer(u16),
}

/// A session that is over, or that lives on.
#[derive(Clone)]
pub struct Known {
    pub revision: &'static str,
    pub token: String,
    pub bearer: String,
}

/// What all clients of a phase did and saw.
#[derive(Default)]
pub struct Tally {
    /// Requests by revision.
    pub requests: BTreeMap<&'static str, u64>,
    pub sessions: u64,
    pub streams: u64,
    /// Requests that had to be refused, and were.
    pub refusals: u64,
    pub ended: Vec<Known>,
    pub living: Vec<Known>,
    pub failures: Vec<String>,
}

pub type Shared = Arc<Mutex<Tally>>;

pub fn lock(tally: &Shared) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone)]
pub struct Caller {
    pub name: String,
    /// `Authorization`
    pub bearer: String,
    /// Of another agent.
    pub stranger: String,
    /// Atomic units a day, which no other agent has.
    pub cap: u64,
    /// Of the resource that a search finds.
    pub reference: String,
    pub route: Route,
    pub turn: usize,
    pub sent: u64,
    pub tally: Shared,
}

/// What a session's requests carry.
struct Session {
    revision: &'static str,
    token: String,
}

impl Caller {
    fn port(&mut self) -> u16 {
        self.turn += 1;
        match &self.route {
            Route::Turns(ports) => ports[self.turn % ports.len()],
            Route::Balancer(port) => *port,
        }
    }

    /// An id that no other request of any client has: a string, or an integer.
    pub fn id(&mut self) -> Value {
        self.sent += 1;
        match self.sent % 2 {
            0 => json!(format!("{}/{}", self.name, self.sent)),
            _ => json!(self.cap % 1_000_000 * 1_000_000 + self.sent),
        }
    }

    pub fn count(&self, revision: &'static str) {
        *lock(&self.tally).requests.entry(revision).or_default() += 1;
    }

    async fn send(
        &mut self,
        revision: &'static str,
        method: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Seen<Reply> {
        self.count(revision);
        once(self.port(), method, PATH, headers, body).await
    }

    /// Notes a failure with what was done.
    pub fn note(&self, what: &str, failed: &str) {
        lock(&self.tally).failures.push(format!("{}: {what}: {failed}", self.name));
    }

    /// Every revision once.
    pub async fn round(&mut self, round: usize) {
        for (n, revision) in HANDSHAKE.into_iter().enumerate() {
            let played = self.session(revision, (round + n + self.turn).is_multiple_of(2)).await;
            if let Err(failed) = played {
                self.note(revision, &failed);
            }
        }
        if let Err(failed) = self.stateless().await {
            self.note(STATELESS, &failed);
        }
    }

    /// A session from `initialize` to its end, if it is ended.
    async fn session(&mut self, revision: &'static str, end: bool) -> Seen<()> {
        let session = self.initialize(revision).await?;
        let told = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
        let told = self.post(&session, BOTH, told).await?;
        expect(told.head.status == 202 && told.body.is_empty(), "notifications/initialized", &told)?;

        let (id, list) = self.request(&session, BOTH, "tools/list", json!({})).await?;
        check_list(&message(&list, &id)?["result"], false).map_err(|why| format!("tools/list: {why}"))?;
        let (mut stream, at) = self.stream(&session).await?;
        for (accept, tool) in [("application/json", SEARCH), (BOTH, BUDGET), ("text/event-stream", SEARCH)] {
            let (id, reply) = self.request(&session, accept, "tools/call", self.call(tool)).await?;
            let framed = reply.head.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
            // Who takes both gets a stream once the call takes long.
            expect(accept == BOTH || framed == (accept == "text/event-stream"), accept, &reply)?;
            self.check_call(tool, &message(&reply, &id)?["result"]).map_err(|why| format!("{tool}: {why}"))?;
        }
        let (id, pong) = self.request(&session, BOTH, "ping", json!({})).await?;
        expect(message(&pong, &id)?["result"] == json!({}), "ping", &pong)?;
        if revision == "2025-03-26" {
            self.batch(&session).await?;
        }
        self.refusals(&session).await?;
        still_there(&mut stream).await?;
        let known = Known { revision, token: session.token.clone(), bearer: self.bearer.clone() };
        if end {
            self.delete(&session, stream, at).await?;
            lock(&self.tally).ended.push(known);
        } else {
            lock(&self.tally).living.push(known);
        }
        Ok(())
    }

    async fn initialize(&mut self, revision: &'static str) -> Seen<Session> {
        let id = self.id();
        let params = json!({"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "loadtest", "version": "1"}});
        let body = json!({"jsonrpc": "2.0", "id": id, "method": "initialize", "params": params}).to_string();
        let bearer = self.bearer.clone();
        let headers = [("Authorization", bearer.as_str()), ("Content-Type", "application/json"), ("Accept", BOTH)];
        let reply = self.send(revision, "POST", &headers, &body).await?;
        let token = initialized(&reply, &id, revision)?;
        lock(&self.tally).sessions += 1;
        Ok(Session { revision, token })
    }

    async fn post(&mut self, session: &Session, accept: &str, body: &str) -> Seen<Reply> {
        let bearer = self.bearer.clone();
        let mut headers = of(&bearer, session);
        headers.extend([("Content-Type", "application/json"), ("Accept", accept)]);
        self.send(session.revision, "POST", &headers, body).await
    }

    async fn request(&mut self, session: &Session, accept: &str, method: &str, params: Value) -> Seen<(Value, Reply)> {
        let id = self.id();
        let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string();
        let reply = self.post(session, accept, &body).await.map_err(|failed| format!("{method}: {failed}"))?;
        Ok((id, reply))
    }

    pub fn call(&self, tool: &str) -> Value {
        let arguments = if tool == SEARCH { json!({"query": "weather city"}) } else { json!({}) };
        json!({"name": tool, "arguments": arguments})
    }

    /// That the answer is to this call, and to this agent.
    pub fn check_call(&self, tool: &str, result: &Value) -> Seen<()> {
        let output = &result["structuredContent"];
        let text = result.pointer("/content/0/text").and_then(Value::as_str).unwrap_or_default();
        let right = match tool {
            SEARCH => output.pointer("/resources/0/wrapper/ref").is_some_and(|found| *found == json!(self.reference)),
            _ => output["budgets"]
                .as_array()
                .is_some_and(|lines| lines.len() == 1 && lines[0].to_string().contains(&format!("\"{}\"", self.cap))),
        };
        if right && serde_json::from_str::<Value>(text).is_ok_and(|text| text == *output) {
            return Ok(());
        }
        Err(shown(result))
    }

    /// Two requests and a notification, answered together.
    async fn batch(&mut self, session: &Session) -> Seen<()> {
        let (list, call) = (self.id(), self.id());
        let batch = json!([
            {"jsonrpc": "2.0", "id": list, "method": "tools/list"},
            {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "none"}},
            {"jsonrpc": "2.0", "id": call, "method": "tools/call", "params": self.call(BUDGET)},
        ]);
        let reply = self.post(session, "application/json", &batch.to_string()).await?;
        let answers: Vec<Value> = serde_json::from_str(&reply.body).map_err(|_| reply.shown())?;
        let of = |id: &Value| answers.iter().find(|answer| answer["id"] == *id).map(|answer| &answer["result"]);
        let (Some(list), Some(call), 2) = (of(&list), of(&call), answers.len()) else {
            return Err(format!("a batch: {}", reply.shown()));
        };
        check_list(list, false)?;
        self.check_call(BUDGET, call).map_err(|why| format!("a batch: {why}"))
    }

    /// The stream of what a server says by itself, once it has said that it lives; and the port where it is.
    async fn stream(&mut self, session: &Session) -> Seen<(Wire, u16)> {
        let at = self.port();
        self.count(session.revision);
        lock(&self.tally).streams += 1;
        Ok((open(at, &self.bearer, session.revision, &session.token).await?, at))
    }

    /// What must not be answered: another agent's session, a token that nobody signed, another revision.
    async fn refusals(&mut self, session: &Session) -> Seen<()> {
        let id = self.id();
        let body = json!({"jsonrpc": "2.0", "id": id, "method": "tools/list"}).to_string();
        let mut forged = session.token.clone().into_bytes();
        let middle = forged.len() / 2;
        forged[middle] = if forged[middle] == b'A' { b'B' } else { b'A' };
        let forged = String::from_utf8_lossy(&forged).into_owned();
        let another = if session.revision == "2025-11-25" { "2025-06-18" } else { "2025-11-25" };
        let (bearer, stranger) = (self.bearer.clone(), self.stranger.clone());
        let cases = [
            ("another agent's session", &stranger, session.token.as_str(), session.revision, 404),
            ("a forged session", &bearer, forged.as_str(), session.revision, 404),
            ("another revision", &bearer, session.token.as_str(), another, 400),
        ];
        for (what, bearer, token, revision, status) in cases {
            let headers = [
                ("Authorization", bearer.as_str()),
                ("Mcp-Session-Id", token),
                ("MCP-Protocol-Version", revision),
                ("Content-Type", "application/json"),
                ("Accept", BOTH),
            ];
            let reply = self.send(session.revision, "POST", &headers, &body).await?;
            expect(reply.head.status == status, what, &reply)?;
            lock(&self.tally).refusals += 1;
        }
        Ok(())
    }

    /// On the replica of the stream where that can be chosen: the stream closes, and the session is over there at once.
    async fn delete(&mut self, session: &Session, mut stream: Wire, at: u16) -> Seen<()> {
        let bearer = self.bearer.clone();
        let headers = of(&bearer, session);
        self.count(session.revision);
        let reply = once(at, "DELETE", PATH, &headers, "").await?;
        expect(reply.head.status == 204, "DELETE", &reply)?;
        if let Route::Turns(_) = self.route {
            // Signs of life would make the wait endless.
            let said = tokio::time::timeout(PATIENCE, to_its_end(&mut stream)).await;
            let said = said.map_err(|_| "a stream outlives its session")??;
            if !said.contains("retry:") {
                return Err(format!("a stream that ended with its session said {said:?}"));
            }
            let mut headers = headers;
            headers.extend([("Content-Type", "application/json"), ("Accept", BOTH)]);
            let body = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
            self.count(session.revision);
            let reply = once(at, "POST", PATH, &headers, body).await?;
            expect(reply.head.status == 404, "a session that was ended here", &reply)?;
        }
        Ok(())
    }

    /// What a client of the revision without sessions asks.
    async fn stateless(&mut self) -> Seen<()> {
        let requests = [
            ("server/discover", json!({})),
            ("tools/list", json!({})),
            ("tools/call", self.call(SEARCH)),
            ("tools/call", self.call(BUDGET)),
        ];
        for (method, mut params) in requests {
            let id = self.id();
            params["_meta"] = meta();
            let tool = params["name"].as_str().map(str::to_owned);
            let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string();
            let reply =
                self.bare(method, tool.as_deref(), &body).await.map_err(|failed| format!("{method}: {failed}"))?;
            let result = message(&reply, &id)?["result"].take();
            let signed = &result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"];
            let whole = result["resultType"] == "complete" && signed.is_string();
            expect(whole && reply.head.header("mcp-session-id").is_none(), method, &reply)?;
            match (method, &tool) {
                ("server/discover", _) => expect(result["supportedVersions"][0] == STATELESS, method, &reply)?,
                ("tools/list", _) => check_list(&result, true)?,
                (_, Some(tool)) => self.check_call(tool, &result).map_err(|why| format!("{tool}: {why}"))?,
                _ => {}
            }
        }
        // A header that says something else than the body.
        let id = self.id();
        let params = json!({"name": BUDGET, "arguments": {}, "_meta": meta()});
        let body = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).to_string();
        let reply = self.bare("tools/call", Some(SEARCH), &body).await?;
        expect(reply.head.status == 400 && reply.body.contains("-32020"), "a header that differs", &reply)?;
        lock(&self.tally).refusals += 1;
        Ok(())
    }

    async fn bare(&mut self, method: &str, tool: Option<&str>, body: &str) -> Seen<Reply> {
        let bearer = self.bearer.clone();
        let mut headers = stateless_headers(&bearer, method);
        headers.extend(tool.map(|tool| ("Mcp-Name", tool)));
        self.send(STATELESS, "POST", &headers, body).await
    }

    /// A session, for one who only wants its token.
    pub async fn begin(&mut self, revision: &'static str) -> Seen<Known> {
        let Session { revision, token } = self.initialize(revision).await?;
        Ok(Known { revision, token, bearer: self.bearer.clone() })
    }

    /// `subscriptions/listen`, acknowledged; with the id that its answer must have.
    pub async fn listen(&mut self) -> Seen<(Wire, Value)> {
        let id = self.id();
        let params = json!({"_meta": meta(), "notifications": {}});
        let body = json!({"jsonrpc": "2.0", "id": id, "method": "subscriptions/listen", "params": params}).to_string();
        self.count(STATELESS);
        let mut wire = Wire::to(self.port()).await?;
        let head = wire.ask("POST", PATH, &stateless_headers(&self.bearer, "subscriptions/listen"), &body).await?;
        if head.status != 200 {
            return Err(format!("subscriptions/listen: {}", wire.rest(head).await?.shown()));
        }
        match wire.first().await? {
            Some(first) if first.contains("notifications/subscriptions/acknowledged") => Ok((wire, id)),
            first => Err(format!("subscriptions/listen: {first:?}")),
        }
    }
}

fn meta() -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": STATELESS,
        "io.modelcontextprotocol/clientInfo": {"name": "loadtest", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    })
}

fn stateless_headers<'a>(bearer: &'a str, method: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("Authorization", bearer),
        ("MCP-Protocol-Version", STATELESS),
        ("Mcp-Method", method),
        ("Content-Type", "application/json"),
        ("Accept", BOTH),
    ]
}

/// 2025-03-26 has no header for its revision.
fn of<'a>(bearer: &'a str, session: &'a Session) -> Vec<(&'a str, &'a str)> {
    headers_of(bearer, session.revision, &session.token)
}

fn headers_of<'a>(bearer: &'a str, revision: &'a str, token: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut headers = vec![("Authorization", bearer), ("Mcp-Session-Id", token)];
    if revision != "2025-03-26" {
        headers.push(("MCP-Protocol-Version", revision));
    }
    headers
}

/// The session's token.
pub fn initialized(reply: &Reply, id: &Value, revision: &str) -> Seen<String> {
    let result = message(reply, id).map_err(|why| format!("initialize: {why}"))?["result"].take();
    expect(result["protocolVersion"] == revision && result["serverInfo"]["name"].is_string(), "initialize", reply)?;
    let token = reply.head.header("mcp-session-id").filter(|token| !token.is_empty());
    token.map(str::to_owned).ok_or_else(|| format!("initialize: no session in {}", reply.shown()))
}

/// A `GET` stream that has said that it lives.
pub async fn open(at: u16, bearer: &str, revision: &str, token: &str) -> Seen<Wire> {
    let mut headers = headers_of(bearer, revision, token);
    headers.push(("Accept", "text/event-stream"));
    let opened = async {
        let mut wire = Wire::to(at).await?;
        let head = wire.ask("GET", PATH, &headers, "").await?;
        if head.status != 200 || head.header("content-type") != Some("text/event-stream") {
            return Err(wire.rest(head).await?.shown());
        }
        match wire.first().await? {
            Some(first) if first.starts_with(':') => Ok(wire),
            first => Err(format!("it begins with {first:?}")),
        }
    };
    opened.await.map_err(|why: String| format!("GET: {why}"))
}

/// `ping` on a session: the status of the answer, and the answer.
pub async fn ping(at: u16, known: &Known) -> Seen<Reply> {
    let mut headers = headers_of(&known.bearer, known.revision, &known.token);
    headers.extend([("Content-Type", "application/json"), ("Accept", BOTH)]);
    once(at, "POST", PATH, &headers, r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).await
}

/// All that a stream still says, to its proper end.
pub async fn to_its_end(stream: &mut Wire) -> Seen<String> {
    let mut said = String::new();
    loop {
        match stream.chunk(PATIENCE).await.map_err(|why| format!("a stream: {why}, after {said:?}"))? {
            Some(chunk) => said.push_str(&chunk),
            None => return Ok(said),
        }
    }
}

/// Open, or ended as a server that stops ends it.
async fn still_there(stream: &mut Wire) -> Seen<()> {
    match tokio::time::timeout(Duration::from_millis(1), to_its_end(stream)).await {
        Err(_) => Ok(()),
        Ok(Ok(said)) if said.contains("retry:") => Ok(()),
        Ok(Ok(said)) => Err(format!("a stream ended with {said:?}")),
        Ok(Err(why)) => Err(why),
    }
}

/// The only message of an answer, which is to this request.
pub fn message(reply: &Reply, id: &Value) -> Seen<Value> {
    let stream = reply.head.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    let texts: Vec<&str> = match stream {
        true => reply.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect(),
        false => vec![&reply.body],
    };
    let message: Option<Value> = match texts[..] {
        [text] => serde_json::from_str(text).ok(),
        _ => None,
    };
    match message {
        Some(message) if reply.head.status == 200 && message["jsonrpc"] == "2.0" && message["id"] == *id => Ok(message),
        _ => Err(format!("to {id}: {}", reply.shown())),
    }
}

pub fn check_list(result: &Value, stateless: bool) -> Seen<()> {
    let names: Vec<&str> =
        result["tools"].as_array().into_iter().flatten().filter_map(|tool| tool["name"].as_str()).collect();
    let said = ["resultType", "ttlMs", "cacheScope"].into_iter().filter(|name| !result[*name].is_null()).count();
    if [SEARCH, BUDGET].iter().all(|name| names.contains(name)) && said == if stateless { 3 } else { 0 } {
        return Ok(());
    }
    Err(shown(result))
}

fn expect(holds: bool, what: &str, reply: &Reply) -> Seen<()> {
    if holds { Ok(()) } else { Err(format!("{what}: {}", reply.shown())) }
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(kind: &str, body: &str) -> Reply {
        Reply { head: Head::new(200, &[("content-type", kind), ("mcp-session-id", "t")]), body: body.to_owned() }
    }

    #[test]
    fn an_answer_to_something_else_is_no_answer() {
        let of = |kind: &str, body: &str| message(&reply(kind, body), &json!("a/1")).is_ok();
        let right = r#"{"jsonrpc":"2.0","id":"a/1","result":{}}"#;
        assert!(of("application/json", right));
        assert!(of("text/event-stream", &format!("event: message\ndata: {right}\n\n")));
        assert!(!of("application/json", &right.replace("a/1", "b/1")));
        assert!(!of("text/event-stream", &format!("data: {right}\n\ndata: {right}\n\n")), "two");
        assert!(!of("text/event-stream", ""));
        let body = r#"{"jsonrpc":"2.0","id":7,"result":{"protocolVersion":"2025-06-18","serverInfo":{"name":"x"}}}"#;
        let begun =
            |revision: &str, id: u64| initialized(&reply("application/json", body), &json!(id), revision).is_ok();
        assert!(begun("2025-06-18", 7));
        assert!(!begun("2025-11-25", 7) && !begun("2025-06-18", 8));
    }
}
