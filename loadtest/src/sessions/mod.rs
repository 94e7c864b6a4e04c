//! Any replica serves any request of any session: many clients, each request on a TCP connection of its own to the next
//! of three replicas, in every revision that Streamable HTTP serves; the same through a balancer while every replica is
//! restarted; sessions that were ended are unknown to all, and clients that never say goodbye cost no memory.

mod caller;
mod memory;
mod sse;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::parts::audit::Broken;
use crate::parts::cluster::{Cluster, Plan};
use crate::parts::market::Terms;
use crate::report::{Doing as _, Report, Result};
use caller::{Caller, HANDSHAKE, Known, Route, Shared, lock};

/// Each agent has another one, which its budget must say.
const CAP: u64 = 1_000_000_000_000;
/// A replica that knew a session before it was ended elsewhere may not have heard of its end for 10 s.
const HEARD: Duration = Duration::from_secs(12);
/// `http.drain_ms`, the time in which it is unready, and a margin.
const ENDS_WITHIN: Duration = Duration::from_secs(40);
/// Between two restarts, so that every replica serves for a while.
const BETWEEN: Duration = Duration::from_secs(1);
/// Of the sessions that ended and of those that live, so many are asked for at every replica at the end.
const ASKED_FOR: usize = 300;
/// A phase whose failures go on says no more of them.
const FAILURES_SHOWN: usize = 10;

#[derive(clap::Args)]
pub struct Args {
    #[arg(long, default_value_t = 100)]
    clients: usize,
    /// Times that every client plays every revision without a restart
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Times that every replica is restarted
    #[arg(long, default_value_t = 2)]
    restarts: u64,
    /// `initialize` without DELETE against one replica
    #[arg(long, default_value_t = 100_000)]
    initializes: u64,
    /// The first figure of the memory is taken after so many
    #[arg(long, default_value_t = 20_000)]
    warm: u64,
    /// 20 clients, one round, one restart of each replica, 30,000 initialize
    #[arg(long)]
    small: bool,
}

pub async fn run(mut args: Args) -> Result<Report> {
    if args.small {
        (args.clients, args.rounds, args.restarts) = (20, 1, 1);
        (args.initializes, args.warm) = (30_000, 15_000);
    }
    let agents = (0..args.clients.max(2)).map(|n| (format!("client-{n:03}"), CAP + n as u64)).collect();
    let mut cluster = Cluster::start(Plan {
        terms: Terms { ledger: Duration::from_millis(500), life: 100, price: 10_000, hostile: 0, seed: 1 },
        replicas: 3,
        standby: false,
        agents,
        patience: Duration::from_secs(15),
    })
    .await?;
    let mut broken = Broken::default();

    let ports: Vec<u16> = cluster.replicas.iter().map(|replica| replica.ports.agents).collect();
    let straight = Shared::default();
    let begun = Instant::now();
    let callers = callers(&cluster, &Route::Turns(ports.clone()), &straight);
    let playing = callers.into_iter().map(|mut caller| {
        tokio::spawn(async move {
            for round in 0..args.rounds {
                caller.round(round).await;
            }
        })
    });
    for played in join_all(playing).await {
        played.doing("a client")?;
    }
    let straight_figures = figures("straight to the replicas", &straight, begun, &mut broken);

    let restarted = Shared::default();
    let begun = Instant::now();
    let (restarts, streams) = rolling(&mut cluster, &args, &restarted, &mut broken).await?;
    let mut restart_figures = figures("while replicas restart", &restarted, begun, &mut broken);
    restart_figures["restarts"] = json!(restarts);
    restart_figures["streamsEndedByAStop"] = json!(streams);

    let legacy = legacy(&mut cluster, &ports, &args, &mut broken).await?;

    eprintln!("waiting until every replica has heard of the ended sessions");
    tokio::time::sleep(HEARD).await;
    let mut asked = json!({});
    for (what, status, of) in [("ended", 404, true), ("living", 200, false)] {
        let known: Vec<Known> = [&straight, &restarted].iter().flat_map(|tally| sample(tally, of)).collect();
        for (port, known) in ports.iter().flat_map(|port| known.iter().map(move |known| (port, known))) {
            match caller::ping(*port, known).await {
                Ok(reply) if reply.head.status == status => {}
                Ok(reply) => {
                    broken.note("a session is over or lives on every replica", format!("{what}: {}", reply.shown()))
                }
                Err(why) => broken.note("a session is over or lives on every replica", format!("{what}: {why}")),
            }
        }
        asked[what] = json!(known.len());
        if known.is_empty() {
            broken.note("sessions end and live", format!("none is {what}"));
        }
    }
    eprintln!("asked every replica for {} ended and {} living sessions", asked["ended"], asked["living"]);

    let pid = cluster.replicas[0].pid().unwrap_or_default();
    let bearers = cluster.agents.iter().map(|agent| bearer(&agent.key)).collect();
    let plan = memory::Plan { port: ports[0], pid, bearers, initializes: args.initializes, warm: args.warm };
    let memory = memory::run(plan).await?;
    for why in memory.failures.iter().take(FAILURES_SHOWN) {
        broken.note("every initialize is answered", why.clone());
    }
    if !memory.flat() {
        broken.note("memory is flat", format!("{memory:?}"));
    }
    // A replica after all this is as good as new.
    let last = Shared::default();
    if let Some(mut caller) = callers_of(&cluster, &Route::Turns(ports), &last).next() {
        caller.round(0).await;
    }
    let _ = figures("at the end", &last, Instant::now(), &mut broken);

    let broken = broken.list();
    if !broken.is_empty() {
        eprintln!("the replicas' logs are in {}", cluster.keep().display());
    }
    Ok(Report::of_promises(
        "sessions",
        json!({
            "clients": args.clients, "replicas": cluster.replicas.len(), "balancer": cluster.balancer.kind,
            "straight": straight_figures, "restarts": restart_figures, "askedForOnEveryReplica": asked,
            "memory": {
                "initializes": args.initializes, "connections": memory.connections, "afterWarmUp": args.warm,
                "warmKiB": memory.warm, "mostKiB": memory.most, "endKiB": memory.end, "boundKiB": memory.bound(),
                "failures": memory.failures.len(),
            },
            "legacySse": legacy,
        }),
        &broken,
    ))
}

fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

fn callers_of<'a>(cluster: &'a Cluster, route: &'a Route, tally: &'a Shared) -> impl Iterator<Item = Caller> + 'a {
    let agents = &cluster.agents;
    agents.iter().enumerate().map(move |(n, agent)| Caller {
        name: agent.name.clone(),
        bearer: bearer(&agent.key),
        stranger: bearer(&agents[(n + 1) % agents.len()].key),
        cap: CAP + n as u64,
        reference: cluster.market.reference.clone(),
        route: route.clone(),
        turn: n,
        sent: 0,
        tally: tally.clone(),
    })
}

fn callers(cluster: &Cluster, route: &Route, tally: &Shared) -> Vec<Caller> {
    callers_of(cluster, route, tally).collect()
}

/// The transport of 2024-11-05, without a kill and through one.
async fn legacy(cluster: &mut Cluster, ports: &[u16], args: &Args, broken: &mut Broken) -> Result<Value> {
    let route = Route::Turns(ports.to_vec());
    let straight = Shared::default();
    let begun = Instant::now();
    sse::straight(callers(cluster, &route, &straight), ports, args.rounds).await?;
    let straight = figures("2024-11-05", &straight, begun, broken);

    let killed = Shared::default();
    let begun = Instant::now();
    let last = cluster.replicas.len() - 1;
    let kill = sse::Kill { victim: ports[last], done: CancellationToken::new(), over: CancellationToken::new() };
    let playing = sse::through_a_kill(callers(cluster, &route, &killed), ports, &kill);
    tokio::time::sleep(BETWEEN * 3).await;
    kill.done.cancel();
    cluster.replicas[last].kill().await?;
    tokio::time::sleep(BETWEEN * 3).await;
    kill.over.cancel();
    let (mut lost, mut there) = (0, 0);
    for (n, played) in join_all(playing).await.into_iter().enumerate() {
        lost += played.doing("a client")?;
        there += u64::from(n % ports.len() == last);
    }
    cluster.replicas[last].start().await?;
    if lost != there {
        broken.note("a killed replica's streams are lost once, and no others", format!("{lost} of {there}"));
    }
    let mut through = figures("2024-11-05, while a replica is killed", &killed, begun, broken);
    through["streamsOfTheKilledReplica"] = json!(lost);
    Ok(json!({"straight": straight, "kill": through}))
}

/// Every replica is told to end and started again, one after the other, while all clients go on; the number of restarts,
/// and of the streams that one of them ended.
async fn rolling(cluster: &mut Cluster, args: &Args, tally: &Shared, broken: &mut Broken) -> Result<(u64, u64)> {
    let route = Route::Balancer(cluster.balancer.port);
    let stop = Arc::new(AtomicBool::new(false));
    let gone = CancellationToken::new();
    let mut playing = Vec::new();
    let mut listening = Vec::new();
    for (n, caller) in callers(cluster, &route, tally).into_iter().enumerate() {
        if n % 10 == 0 {
            listening.push(tokio::spawn(listen(caller.clone(), n / 10, gone.clone())));
        }
        let (mut caller, stop) = (caller, stop.clone());
        playing.push(tokio::spawn(async move {
            let mut round = 0;
            while !stop.load(Ordering::SeqCst) {
                caller.round(round).await;
                round += 1;
            }
        }));
    }
    let mut restarts = 0;
    for round in 1..=args.restarts {
        for replica in &mut cluster.replicas {
            tokio::time::sleep(BETWEEN).await;
            let code = replica.terminate(ENDS_WITHIN).await?;
            if code != Some(0) {
                broken.note("a replica that is told to end ends with 0", format!("{code:?}: {}", replica.tail()));
            }
            replica.start().await?;
            restarts += 1;
        }
        let seen = lock(tally);
        eprintln!("restarts, round {round}: {} sessions, {} failures", seen.sessions, seen.failures.len());
    }
    tokio::time::sleep(BETWEEN).await;
    stop.store(true, Ordering::SeqCst);
    for played in join_all(playing).await {
        played.doing("a client")?;
    }
    gone.cancel();
    let mut ended = 0;
    for listened in join_all(listening).await {
        ended += listened.doing("a listener")?;
    }
    if ended == 0 {
        broken.note("streams meet restarts", "no stream was ended by one".into());
    }
    Ok((restarts, ended))
}

/// Keeps a stream open, and opens it again, on whatever replica, when its server ends it in order. How often that was.
async fn listen(mut caller: Caller, n: usize, gone: CancellationToken) -> u64 {
    let mut ended = 0;
    if let Err(why) = keep_listening(&mut caller, n, &gone, &mut ended).await {
        caller.note("a stream that is kept", &why);
    }
    ended
}

async fn keep_listening(
    caller: &mut Caller,
    n: usize,
    gone: &CancellationToken,
    ended: &mut u64,
) -> std::result::Result<(), String> {
    let Route::Balancer(balancer) = caller.route else { return Ok(()) };
    let session = match n % 2 {
        0 => Some(caller.begin(HANDSHAKE[n / 2 % HANDSHAKE.len()]).await?),
        _ => None,
    };
    loop {
        let (mut stream, id) = match &session {
            Some(known) => (caller::open(balancer, &known.bearer, known.revision, &known.token).await?, Value::Null),
            None => caller.listen().await?,
        };
        lock(&caller.tally).streams += 1;
        let said = tokio::select! {
            () = gone.cancelled() => return Ok(()),
            said = caller::to_its_end(&mut stream) => said?,
        };
        // A session's stream ends with a hint when to come back, a subscription with its answer.
        let answer = format!(r#""id":{id},"result""#);
        let in_order = if session.is_some() { said.contains("retry:") } else { said.contains(&answer) };
        if !in_order {
            return Err(format!("it ended with {said:?}"));
        }
        *ended += 1;
    }
}

/// What a phase counted; what failed in it is said.
fn figures(what: &'static str, tally: &Shared, begun: Instant, broken: &mut Broken) -> Value {
    let tally = lock(tally);
    let requests: u64 = tally.requests.values().sum();
    let seconds = begun.elapsed().as_secs_f64();
    eprintln!(
        "{what}: {requests} requests in {seconds:.0} s, {} sessions, {} failures",
        tally.sessions,
        tally.failures.len()
    );
    for failure in tally.failures.iter().take(FAILURES_SHOWN) {
        broken.note("no request fails", format!("{what}: {failure}"));
    }
    if requests == 0 || tally.sessions == 0 {
        broken.note("clients ask", format!("{what}: nothing was asked"));
    }
    json!({
        "requests": tally.requests, "sessions": tally.sessions, "streams": tally.streams, "refusals": tally.refusals,
        "ended": tally.ended.len(), "failures": tally.failures.len(), "seconds": seconds.round(),
    })
}

/// The last ones, which lived or ended a moment ago.
fn sample(tally: &Shared, ended: bool) -> Vec<Known> {
    let tally = lock(tally);
    let all = if ended { &tally.ended } else { &tally.living };
    all.iter().rev().take(ASKED_FOR / 2).cloned().collect()
}
