//! The stop: three replicas under paid load, one of them frozen, another cut off from catalog, chain and signer, so that
//! little but the database is left to it. When
//! `tollway limits suspend` has returned, nothing is reserved, recovered or signed any more, also not when the frozen one
//! thaws and the other one's line is mended; `resume` lets payments go on.
//!
//! The signer is asked over HTTPS and told until when it may sign, so the exception of a process that was stopped between
//! its last look at the clock and its own key does not arise here: the bar is no signature at all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::parts::audit::{Broken, audit};
use crate::parts::client::Agent;
use crate::parts::cluster::{Cluster, Plan, clear_of_midnight};
use crate::parts::line::Cable;
use crate::parts::market::Terms;
use crate::parts::postgres;
use crate::parts::replica::Replica;
use crate::parts::rng::Rng;
use crate::report::{Doing as _, Report, Result};

const PRICE: u64 = 10_000;
const CAP: u64 = 1_000_000_000;
const AGENT: &str = "stopped";
const REPLICAS: u64 = 3;
/// More than the cluster's `signer.sign_within_ms`, and than any answer that was on its way.
const LONG_AFTER: Duration = Duration::from_secs(6);
const RETURNS_WITHIN: Duration = Duration::from_secs(30);
const GOES_ON_WITHIN: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub struct Args {
    /// Stops, one after the other
    #[arg(long, default_value_t = 6)]
    rounds: u64,
    /// Calls that are made at once, all the time
    #[arg(long, default_value_t = 24)]
    callers: u64,
    /// Of the choices who is frozen and who is cut off, and when
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub async fn run(args: Args) -> Result<Report> {
    let needed = Duration::from_secs(60 + args.rounds * 45);
    clear_of_midnight(needed).await;
    let mut cluster = Cluster::start(Plan {
        terms: Terms { ledger: Duration::from_millis(200), life: 60, price: PRICE, hostile: 0, seed: args.seed },
        replicas: usize::try_from(REPLICAS).unwrap_or(3),
        standby: false,
        agents: vec![(AGENT.into(), CAP)],
        patience: Duration::from_secs(10),
    })
    .await?;
    let load = Arc::new(Load::default());
    let callers: Vec<_> = (0..args.callers)
        .map(|n| tokio::spawn(load.clone().call(cluster.agents[0].clone(), cluster.call(""), n)))
        .collect();

    let mut broken = Broken::default();
    let mut rounds = Vec::new();
    let rng = Rng::new(args.seed, "stop");
    for n in 1..=args.rounds {
        let round = round(n, &mut cluster, &load, &rng, &mut broken).await?;
        eprintln!("round {n}: {round}");
        rounds.push(round);
    }
    load.over.store(true, Ordering::SeqCst);
    for caller in callers {
        let _ = caller.await;
    }
    let sum = |name: &str| rounds.iter().filter_map(|round| round[name].as_u64()).sum::<u64>();
    let most = |name: &str| rounds.iter().filter_map(|round| round[name].as_u64()).max().unwrap_or(0);
    if sum("signableWhenStopped") == 0 {
        broken.note("payments are under way when they are stopped", "none was reserved and unsigned".into());
    }
    if load.suspended.load(Ordering::SeqCst) == 0 {
        broken.note("callers hear that they are suspended", "nobody did".into());
    }

    // What was signed before a stop ends by its authorization.
    let database = postgres::connect(&cluster.database).await?;
    let until = Instant::now() + Duration::from_secs(90);
    while count(&database, "SELECT count(*) FROM payments WHERE state IN ('reserved', 'in_doubt')", &[]).await? > 0 {
        if Instant::now() > until {
            break;
        }
        sleep(Duration::from_millis(500)).await;
    }
    let caps = BTreeMap::from([(AGENT.to_owned(), CAP)]);
    let found = audit(&cluster, &[], &caps, &mut broken).await?;
    let broken = broken.list();
    if !broken.is_empty() {
        eprintln!("the replicas' logs are in {}", cluster.keep().display());
    }
    Ok(Report::of_promises(
        "stop",
        json!({
            "rounds": args.rounds, "callers": args.callers, "balancer": cluster.balancer.kind,
            "settled": found.settled, "transfers": found.transfers, "released": found.released,
            "signatures": found.signatures, "paid": load.paid.load(Ordering::SeqCst),
            "suspendedHeard": load.suspended.load(Ordering::SeqCst),
            "signableWhenStopped": sum("signableWhenStopped"), "transactionsFrozen": sum("transactionsFrozen"),
            "reservedAfter": sum("reservedAfter"), "recoveredAfter": sum("recoveredAfter"),
            "signedAfter": sum("signedAfter"), "longestStopMs": most("stopMs"), "longestWaitMs": most("waitedMs"),
        }),
        &broken,
    ))
}

async fn round(n: u64, cluster: &mut Cluster, load: &Load, rng: &Rng, broken: &mut Broken) -> Result<Value> {
    let database = postgres::connect(&cluster.database).await?;
    let market = cluster.market.signer.clone();
    let index = |n: u64| usize::try_from(n % REPLICAS).unwrap_or(0);
    let first = rng.below(REPLICAS);
    let (frozen, cut, operator) = (index(first), index(first + 1), index(first + 2));

    // Paid load on all three.
    let before = load.paid.load(Ordering::SeqCst);
    goes_on(load, before + 20, broken, n).await;
    sleep(Duration::from_millis(rng.between(200, 1_500))).await;

    cluster.replicas[frozen].freeze()?;
    isolate(&cluster.replicas[cut], Cable::Silent);
    let signable = "SELECT count(*) FROM payments WHERE state = 'reserved' AND sign_before >= tollway_now()";
    let signable = count(&database, signable, &[]).await?;
    let open = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";
    let transactions = count(&database, open, &[]).await?;

    let whom: &[&str] = if n.is_multiple_of(2) { &["--all"] } else { &["--agent", AGENT] };
    let began = Instant::now();
    let said = cluster.replicas[operator].operate(&[&["limits", "suspend", "--json"], whom].concat()).await;
    let took = began.elapsed();
    let signed = market.signatures();
    let said: Value = serde_json::from_str(&said?).doing("the stop's answer")?;
    let since = said["sinceMs"].as_i64().unwrap_or(0);
    if took > RETURNS_WITHIN || since == 0 || said["signable"] != 0 {
        broken.note("a stop returns, and says since when", format!("after {took:?}: {said}"));
    }

    // The load goes on, and so do those that were away.
    sleep(Duration::from_millis(rng.between(500, 2_000))).await;
    cluster.replicas[frozen].thaw()?;
    isolate(&cluster.replicas[cut], Cable::Whole);
    sleep(LONG_AFTER).await;
    let reserved = count(&database, "SELECT count(*) FROM payments WHERE created > $1", &[&since]).await?;
    let recovered = "SELECT count(*) FROM payment_events WHERE event = 'recovery' AND at > $1";
    let recovered = count(&database, recovered, &[&since]).await?;
    let signed = market.signatures() - signed;
    for (promise, found) in [
        ("no reservation after the stop", reserved),
        ("no recovery after the stop", recovered),
        ("no signature after the stop returned", signed),
    ] {
        if found > 0 {
            broken.note(promise, format!("{found} in round {n}"));
        }
    }

    let paid = load.paid.load(Ordering::SeqCst);
    cluster.replicas[operator].operate(&[&["limits", "resume"], whom].concat()).await?;
    goes_on(load, paid + 10, broken, n).await;
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    Ok(json!({
        "frozen": cluster.replicas[frozen].name, "cut": cluster.replicas[cut].name, "signableWhenStopped": signable,
        "transactionsFrozen": transactions, "stopMs": ms(took), "waitedMs": said["waitedMs"],
        "reservedAfter": reserved, "recoveredAfter": recovered, "signedAfter": signed,
    }))
}

/// From catalog, chain and signer: the database and the callers are reached.
fn isolate(replica: &Replica, cable: Cable) {
    [&replica.lines.rpc, &replica.lines.facilitator, &replica.lines.signer]
        .into_iter()
        .for_each(|line| line.set(cable));
}

/// Waits until so many calls were paid.
async fn goes_on(load: &Load, paid: u64, broken: &mut Broken, round: u64) {
    let until = Instant::now() + GOES_ON_WITHIN;
    while load.paid.load(Ordering::SeqCst) < paid {
        if Instant::now() > until {
            let heard = load.last.lock().map(|last| last.clone()).unwrap_or_default();
            broken.note("payments are made while nobody stops them", format!("round {round}, last heard: {heard}"));
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn count(
    database: &tokio_postgres::Client,
    sql: &str,
    params: &[&(dyn tokio_postgres::types::ToSql + Sync)],
) -> Result<u64> {
    let row = database.query_one(sql, params).await.doing(sql)?;
    Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or(0))
}

/// Calls without end, each another one with a key of its own.
#[derive(Default)]
struct Load {
    over: AtomicBool,
    paid: AtomicU64,
    suspended: AtomicU64,
    last: std::sync::Mutex<String>,
}

impl Load {
    async fn call(self: Arc<Load>, agent: Agent, call: Value, caller: u64) {
        for n in 0_u64.. {
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            let mut call = call.clone();
            call["arguments"]["city"] = json!(format!("City {caller} {n}"));
            call["idempotencyKey"] = json!(format!("stop-{caller:04}-{n:08}-key"));
            let answer = agent.tool("x402_call_resource", &call).await;
            let label = answer.label();
            if answer.is_paid() {
                self.paid.fetch_add(1, Ordering::SeqCst);
            } else {
                if label == "PAYMENT_REJECTED/suspended" {
                    self.suspended.fetch_add(1, Ordering::SeqCst);
                }
                sleep(Duration::from_millis(50)).await;
            }
            if let Ok(mut last) = self.last.lock() {
                *last = label;
            }
        }
    }
}
