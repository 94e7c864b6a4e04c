//! The transport of 2024-11-05: a stream on one replica, every message posted to another one, and what is left when a
//! replica is killed: its own streams are lost, and nobody else's.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::caller::{BUDGET, Caller, SEARCH, check_list, lock};
use crate::parts::wire::{PATIENCE, Seen, Wire, once};
use crate::report::{Doing as _, Result};

pub const REVISION: &str = "2024-11-05";

/// A stream, and where its messages go.
pub struct Legacy {
    wire: Wire,
    /// What has come of an event that is not whole yet.
    rest: String,
    /// `/messages?sessionId=…`
    endpoint: String,
}

impl Legacy {
    pub async fn open(caller: &Caller, at: u16) -> Seen<Legacy> {
        let mut wire = Wire::to(at).await?;
        let headers = [("Authorization", caller.bearer.as_str()), ("Accept", "text/event-stream")];
        caller.count(REVISION);
        let head = wire.ask("GET", "/sse", &headers, "").await?;
        if head.status != 200 || !head.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
        {
            return Err(format!("GET /sse: {}", wire.rest(head).await?.shown()));
        }
        let mut legacy = Legacy { wire, rest: String::new(), endpoint: String::new() };
        let (kind, data) = legacy.event().await?;
        if kind != "endpoint" || !data.starts_with("/messages?sessionId=") {
            return Err(format!("GET /sse: the first event is {kind:?} with {data:?}"));
        }
        legacy.endpoint = data;
        lock(&caller.tally).streams += 1;
        Ok(legacy)
    }

    /// Kind and data of the next event; signs of life are none.
    async fn event(&mut self) -> Seen<(String, String)> {
        loop {
            while let Some((event, rest)) = self.rest.split_once("\n\n") {
                let event = event.to_owned();
                self.rest = rest.to_owned();
                let line = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
                if let Some(data) = line("data: ") {
                    return Ok((line("event: ").unwrap_or_default(), data));
                }
            }
            match self.wire.chunk(PATIENCE).await.map_err(|why| format!("the stream: {why}"))? {
                Some(chunk) => self.rest.push_str(&chunk),
                None => return Err("the stream was ended".into()),
            }
        }
    }

    async fn post(&self, caller: &Caller, at: u16, bearer: &str, body: &Value) -> Seen<u16> {
        let headers = [("Authorization", bearer), ("Content-Type", "application/json")];
        caller.count(REVISION);
        let reply = once(at, "POST", &self.endpoint, &headers, &body.to_string()).await;
        reply.map(|reply| reply.head.status).map_err(|why| format!("POST: {why}"))
    }

    /// Posted to `at`; the answer comes on the stream.
    async fn ask(&mut self, caller: &mut Caller, at: u16, method: &str, params: Value) -> Seen<Value> {
        let id = caller.id();
        let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let bearer = caller.bearer.clone();
        let status = self.post(caller, at, &bearer, &body).await?;
        if status != 202 {
            return Err(format!("{method}: the message was answered with {status}"));
        }
        let (kind, data) = self.event().await.map_err(|why| format!("{method}: {why}"))?;
        let message: Value = serde_json::from_str(&data).map_err(|_| format!("{method}: {data:?}"))?;
        if kind != "message" || message["id"] != id || message["jsonrpc"] != "2.0" {
            return Err(format!("{method}: not the answer to {id}: {}", data.chars().take(300).collect::<String>()));
        }
        Ok(message["result"].clone())
    }

    pub async fn begin(&mut self, caller: &mut Caller, at: u16) -> Seen<()> {
        let client = json!({"name": "loadtest", "version": "1"});
        let params = json!({"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client});
        let result = self.ask(caller, at, "initialize", params).await?;
        if result["protocolVersion"] != REVISION {
            return Err(format!("initialize: {result}"));
        }
        lock(&caller.tally).sessions += 1;
        let told = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        let bearer = caller.bearer.clone();
        match self.post(caller, at, &bearer, &told).await? {
            202 => Ok(()),
            status => Err(format!("notifications/initialized: {status}")),
        }
    }

    /// Every message to the next of `others`; one of somebody else is not taken.
    pub async fn round(&mut self, caller: &mut Caller, others: &[u16]) -> Seen<()> {
        let mut turn = others.iter().copied().cycle();
        let mut at = || turn.next().unwrap_or_default();
        check_list(&self.ask(caller, at(), "tools/list", json!({})).await?, false)?;
        for tool in [SEARCH, BUDGET] {
            let result = self.ask(caller, at(), "tools/call", caller.call(tool)).await?;
            caller.check_call(tool, &result).map_err(|why| format!("{tool}: {why}"))?;
        }
        if self.ask(caller, at(), "ping", json!({})).await? != json!({}) {
            return Err("ping: it is not empty".into());
        }
        let stranger = caller.stranger.clone();
        let theirs = json!({"jsonrpc": "2.0", "id": "stranger", "method": "ping"});
        match self.post(caller, at(), &stranger, &theirs).await? {
            404 => lock(&caller.tally).refusals += 1,
            status => return Err(format!("another agent's message was answered with {status}")),
        }
        Ok(())
    }
}

/// Each client has its stream on one replica, and posts to the others.
pub async fn straight(callers: Vec<Caller>, ports: &[u16], rounds: usize) -> Result<()> {
    let playing = callers.into_iter().enumerate().map(|(n, mut caller)| {
        let (at, others) = place(ports, n);
        tokio::spawn(async move {
            for _ in 0..rounds {
                let played = async {
                    let mut legacy = Legacy::open(&caller, at).await?;
                    legacy.begin(&mut caller, others[0]).await?;
                    legacy.round(&mut caller, &others).await
                };
                if let Err(why) = played.await {
                    caller.note(REVISION, &why);
                }
            }
        })
    });
    for played in join_all(playing).await {
        played.doing("a client")?;
    }
    Ok(())
}

/// The port of the stream, and the others.
fn place(ports: &[u16], n: usize) -> (u16, Vec<u16>) {
    let at = ports[n % ports.len()];
    (at, ports.iter().copied().filter(|port| *port != at).collect())
}

/// Who is killed, and when.
#[derive(Clone)]
pub struct Kill {
    /// The port of the replica.
    pub victim: u16,
    /// From here on its streams may break.
    pub done: CancellationToken,
    /// Clients end their round and stop.
    pub over: CancellationToken,
}

/// Clients that go on until it is over, while a replica is killed: they post to the others, and one whose
/// stream was there opens another. How many lost their stream.
pub fn through_a_kill(callers: Vec<Caller>, ports: &[u16], kill: &Kill) -> Vec<JoinHandle<u64>> {
    let victim = kill.victim;
    let living: Vec<u16> = ports.iter().copied().filter(|port| *port != victim).collect();
    let clients = callers.into_iter().enumerate().map(|(n, mut caller)| {
        let (mut at, _) = place(ports, n);
        let (living, kill) = (living.clone(), kill.clone());
        tokio::spawn(async move {
            let mut lost = 0;
            while !kill.over.is_cancelled() {
                let others: Vec<u16> = living.iter().copied().filter(|port| *port != at).collect();
                let played = async {
                    let mut legacy = Legacy::open(&caller, at).await?;
                    legacy.begin(&mut caller, others[0]).await?;
                    while !kill.over.is_cancelled() {
                        legacy.round(&mut caller, &others).await?;
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Ok::<_, String>(())
                };
                match played.await {
                    Ok(()) => {}
                    Err(_) if at == victim && kill.done.is_cancelled() => {
                        lost += 1;
                        at = living[n % living.len()];
                    }
                    Err(why) => caller.note(REVISION, &why),
                }
            }
            lost
        })
    });
    clients.collect()
}
