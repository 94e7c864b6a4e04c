//! A rolling restart under load: each of three replicas is told to end (SIGTERM), finishes what it is in, and is started
//! again, one after the other, round after round. Meanwhile agents pay and search. No payment is made twice, no receipt
//! is lost, and no search fails.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::time::Instant;

use crate::parts::audit::{Broken, audit};
use crate::parts::buyer::{End, Purchase, Story};
use crate::parts::client::{Agent, Answer};
use crate::parts::cluster::{Cluster, Plan, clear_of_midnight};
use crate::parts::market::Terms;
use crate::parts::rng::Rng;
use crate::parts::watch::Watch;
use crate::report::{Report, Result, Stopped};

const PRICE: u64 = 10_000;
const CAP: u64 = 1_000_000_000_000;
/// `http.drain_ms`, the time in which it is unready, and a margin.
const ENDS_WITHIN: Duration = Duration::from_secs(40);
/// Between two restarts, so that every replica serves for a while.
const BETWEEN: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub struct Args {
    /// Agents that pay, each one purchase after the other
    #[arg(long, default_value_t = 16)]
    buyers: usize,
    /// Agents that search the catalog, each one request after the other
    #[arg(long, default_value_t = 4)]
    searchers: usize,
    /// Times that every replica is restarted
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub async fn run(args: Args) -> Result<Report> {
    clear_of_midnight(Duration::from_secs(600)).await;
    let agents: Vec<_> = (0..args.buyers.max(1)).map(|n| (format!("agent-{n:02}"), CAP)).collect();
    let caps: BTreeMap<_, _> = agents.iter().cloned().collect();
    let mut cluster = Cluster::start(Plan {
        terms: Terms { ledger: Duration::from_millis(200), life: 100, price: PRICE, hostile: 0, seed: args.seed },
        replicas: 3,
        standby: false,
        agents,
        patience: Duration::from_secs(15),
    })
    .await?;
    let watch = Watch::start(cluster.database.clone(), cluster.market.network.clone(), caps.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let rng = Arc::new(Rng::new(args.seed, "rolling"));
    let call = cluster.call("Bern");
    let buyers = cluster.agents.iter().cloned().map(|agent| buy(agent, call.clone(), rng.clone(), stop.clone()));
    let buyers: Vec<_> = buyers.map(tokio::spawn).collect();
    let searches = Arc::new(AtomicU64::new(0));
    let searchers = (0..args.searchers).map(|n| {
        let agent = cluster.agents[n % cluster.agents.len()].clone();
        tokio::spawn(search(agent, searches.clone(), stop.clone()))
    });
    let searchers: Vec<_> = searchers.collect();

    let mut broken = Broken::default();
    let (mut restarts, mut slowest) = (0_u64, Duration::ZERO);
    for round in 1..=args.rounds {
        for replica in &mut cluster.replicas {
            tokio::time::sleep(BETWEEN).await;
            let begun = Instant::now();
            let code = replica.terminate(ENDS_WITHIN).await?;
            slowest = slowest.max(begun.elapsed());
            if code != Some(0) {
                broken.note("a replica that is told to end ends with 0", format!("{code:?}: {}", replica.tail()));
            }
            replica.start().await?;
            restarts += 1;
        }
        let seen = watch.seen();
        eprintln!(
            "round {round}: {} payments settled, {} open, {} searches",
            seen.settled,
            seen.open,
            searches.load(Ordering::SeqCst)
        );
    }
    tokio::time::sleep(BETWEEN).await;
    stop.store(true, Ordering::SeqCst);
    let mut stories: Vec<Story> = Vec::new();
    for bought in join_all(buyers).await {
        stories.extend(bought.map_err(|error| Stopped(format!("a buyer: {error}")))?);
    }
    let mut failed = Vec::new();
    for searched in join_all(searchers).await {
        failed.extend(searched.map_err(|error| Stopped(format!("a searcher: {error}")))?);
    }
    // What a call left open, a repeated one has closed; the sweep has the rest.
    let until = Instant::now() + Duration::from_secs(60);
    while watch.seen().open > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let found = audit(&cluster, &stories, &caps, &mut broken).await?;
    let seen = watch.seen();
    seen.broken.values().for_each(|how| broken.note("rows end in time", how.clone()));
    for story in stories.iter().filter(|story| story.end != End::Output) {
        broken.note("no receipt is lost", format!("{} {}: {:?}", story.agent, story.key, story.end));
    }
    if found.settled != stories.len() {
        broken.note("every payment is one that a client asked for", format!("{} for {}", found.settled, stories.len()));
    }
    for answer in &failed {
        broken.note("no search fails", answer.clone());
    }
    let repeated = stories.iter().filter(|story| story.requests > 1).count();
    let broken = broken.list();
    if !broken.is_empty() {
        eprintln!("the replicas' logs are in {}", cluster.keep().display());
    }
    Ok(Report::of_promises(
        "rolling",
        json!({
            "restarts": restarts, "slowestEndMs": u64::try_from(slowest.as_millis()).unwrap_or(u64::MAX),
            "balancer": cluster.balancer.kind, "buyers": args.buyers, "searchers": args.searchers,
            "purchases": stories.len(), "settled": found.settled, "transfers": found.transfers,
            "purchasesThatNeededTheirKey": repeated,
            "unknownAtFirst": stories.iter().filter(|story| story.unknown).count(),
            "searches": searches.load(Ordering::SeqCst), "failedSearches": failed.len(),
        }),
        &broken,
    ))
}

async fn buy(agent: Agent, call: serde_json::Value, rng: Arc<Rng>, stop: Arc<AtomicBool>) -> Vec<Story> {
    let mut stories = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let key = format!("rolling-{}-{:05}", agent.name, stories.len());
        let purchase = Purchase { agent: agent.clone(), call: call.clone(), key };
        stories.push(purchase.make(&rng, |_, taken| taken > Duration::from_secs(90)).await);
    }
    stories
}

/// What failed: one request, never made again.
async fn search(agent: Agent, searches: Arc<AtomicU64>, stop: Arc<AtomicBool>) -> Vec<String> {
    let mut failed = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let answer = agent.tool("x402_search_resources", &json!({"query": "weather city"})).await;
        searches.fetch_add(1, Ordering::SeqCst);
        match &answer {
            Answer::Said(value) if value["resources"].as_array().is_some_and(|found| !found.is_empty()) => {}
            Answer::Said(value) => failed.push(value.to_string().chars().take(300).collect()),
            Answer::Gone(problem) => failed.push(problem.clone()),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    failed
}
