//! Clients that begin sessions and never say goodbye: what one replica keeps of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::caller::{HANDSHAKE, initialized};
use crate::parts::wire::{Seen, Wire, once};
use crate::report::{Doing as _, Result, Stopped};

const TASKS: u64 = 32;
const PATH: &str = "/mcp";

pub struct Plan {
    pub port: u16,
    pub pid: u32,
    /// `Authorization` of every agent that there is.
    pub bearers: Vec<String>,
    pub initializes: u64,
    /// After so many the first figure is taken.
    pub warm: u64,
}

#[derive(Debug)]
pub struct Found {
    /// KiB after the warm-up.
    pub warm: u64,
    /// KiB at the end.
    pub end: u64,
    /// KiB, the most that was seen from the warm-up on.
    pub most: u64,
    pub connections: u64,
    pub failures: Vec<String>,
}

impl Found {
    /// A tenth, or 8 MiB, whichever is more: an allocator's own noise.
    pub fn bound(&self) -> u64 {
        (self.warm / 10).max(8 * 1024)
    }

    pub fn flat(&self) -> bool {
        self.end.max(self.most) <= self.warm + self.bound()
    }
}

pub async fn run(plan: Plan) -> Result<Found> {
    let plan = Arc::new(plan);
    let failures = Arc::new(Mutex::new(Vec::new()));
    let connections = Arc::new(AtomicU64::new(0));
    let (mut begun, mut warm, mut most) = (0, 0, 0);
    let step = (plan.warm / 2).max(1);
    while begun < plan.initializes {
        let until = (begun + step).min(plan.initializes);
        let next = Arc::new(AtomicU64::new(begun));
        let tasks = (0..TASKS).map(|_| {
            let (plan, next, failures, connections) =
                (plan.clone(), next.clone(), failures.clone(), connections.clone());
            tokio::spawn(async move {
                let mut kept = None;
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= until {
                        return;
                    }
                    if let Err(why) = initialize(&plan, n, &mut kept, &connections).await {
                        failures.lock().unwrap_or_else(PoisonError::into_inner).push(why);
                    }
                }
            })
        });
        for done in join_all(tasks).await {
            done.doing("a client")?;
        }
        begun = until;
        let now = resident(plan.pid)?;
        if begun >= plan.warm {
            warm = if warm == 0 { now } else { warm };
            most = most.max(now);
        }
        eprintln!("{begun} initialize without DELETE: {now} KiB resident");
    }
    let failures = std::mem::take(&mut *failures.lock().unwrap_or_else(PoisonError::into_inner));
    let connections = connections.load(Ordering::Relaxed);
    Ok(Found { warm, end: resident(plan.pid)?, most, connections, failures })
}

/// A third of them on a connection that is kept, a third on one that is closed in order, a third on one that the client
/// drops.
async fn initialize(plan: &Plan, n: u64, kept: &mut Option<Wire>, connections: &AtomicU64) -> Seen<()> {
    let place = |count: usize| usize::try_from(n).unwrap_or(0) % count;
    let revision = HANDSHAKE[place(HANDSHAKE.len())];
    let bearer = plan.bearers[place(plan.bearers.len())].as_str();
    let id: Value = json!(n);
    let params =
        json!({"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "loadtest", "version": "1"}});
    let body = json!({"jsonrpc": "2.0", "id": id, "method": "initialize", "params": params}).to_string();
    let headers = [("Authorization", bearer), ("Content-Type", "application/json"), ("Accept", "application/json")];
    let reply = match n / 3 % 3 {
        0 => {
            let mut wire = match kept.take() {
                Some(wire) => wire,
                None => {
                    connections.fetch_add(1, Ordering::Relaxed);
                    Wire::to(plan.port).await?
                }
            };
            let head = wire.ask("POST", PATH, &headers, &body).await?;
            let reply = wire.rest(head).await?;
            *kept = Some(wire);
            reply
        }
        1 => {
            connections.fetch_add(1, Ordering::Relaxed);
            once(plan.port, "POST", PATH, &headers, &body).await?
        }
        _ => {
            connections.fetch_add(1, Ordering::Relaxed);
            let mut wire = Wire::to(plan.port).await?;
            let head = wire.ask("POST", PATH, &headers, &body).await?;
            wire.rest(head).await?
        }
    };
    initialized(&reply, &id, revision).map(|_| ())
}

/// KiB (proc(5), `VmRSS`).
fn resident(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).doing("/proc")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse().ok());
    number.ok_or_else(|| Stopped("/proc says nothing of VmRSS".into()))
}
