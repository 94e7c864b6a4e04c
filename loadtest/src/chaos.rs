//! Chaos: three replicas behind a load balancer, a PostgreSQL primary with a synchronous standby, a chain on fast
//! ledgers, a hostile seller and facilitator, and agents that pay thousands of times with keys and retries. Every two
//! seconds a replica is killed or frozen; once the database fails over, once a replica is cut off from everything. At
//! the end, and at every moment on the way, the money is right.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::parts::audit::{Broken, audit};
use crate::parts::buyer::{End, Purchase, Story};
use crate::parts::cluster::{Cluster, Plan, clear_of_midnight};
use crate::parts::line::Cable;
use crate::parts::market::Terms;
use crate::parts::postgres::Postgres;
use crate::parts::replica::Replica;
use crate::parts::rng::Rng;
use crate::parts::watch::Watch;
use crate::report::{Report, Result, Stopped};

const PRICE: u64 = 10_000;
const AGENTS: usize = 20;
/// Agents whose cap is below what they want to buy.
const SHORT: usize = 4;
const STRIKE: Duration = Duration::from_secs(2);
const PARTITION: Duration = Duration::from_secs(10);
/// Longer than the owner's lease (15 s): a process that wakes up after it has lost everything that it held.
const LONG_SLEEP: Duration = Duration::from_secs(18);
/// A purchase that takes longer makes room for another, and goes on beside it.
const USUAL: Duration = Duration::from_secs(12);
/// Leases (an owner's 15 s, a sweep's 12 s), one after another, the promise after them, and room for a slow machine.
const CALM: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub struct Args {
    /// A minute of it, for continuous integration: fewer calls, everything else alike
    #[arg(long)]
    small: bool,
    /// Paid calls
    #[arg(long, value_name = "N", default_value_t = 10_000, default_value_if("small", "true", "400"))]
    calls: usize,
    /// Purchases at once
    #[arg(long, value_name = "N", default_value_t = 160, default_value_if("small", "true", "32"))]
    clients: usize,
    /// Each kind of fault of seller and facilitator, percent of requests
    #[arg(long, value_name = "PERCENT", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=20))]
    hostile: u64,
    /// The longest that replicas are struck, seconds; what is not bought then is bought in a calm world
    #[arg(long, value_name = "SECONDS", default_value_t = 600, default_value_if("small", "true", "30"))]
    seconds: u64,
    /// Of every choice that is made here
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What the purchases and the one who watches over them share.
struct Crowd {
    rng: Rng,
    room: Arc<Semaphore>,
    /// Purchases that wait for room in their budget.
    refused: AtomicUsize,
    ended: AtomicUsize,
    /// Nothing is open any more: who has no room now has none.
    over: AtomicBool,
    requests: AtomicU64,
    deadline: Instant,
}

pub async fn run(args: Args) -> Result<Report> {
    clear_of_midnight(Duration::from_secs(900)).await;
    let each = args.calls.div_ceil(AGENTS - SHORT / 2).max(2);
    let short = each / 2;
    let cap = |n: usize| PRICE * if n < SHORT { short as u64 } else { each as u64 };
    let agents: Vec<_> = (0..AGENTS).map(|n| (format!("agent-{n:02}"), cap(n))).collect();
    let caps: BTreeMap<_, _> = agents.iter().cloned().collect();
    let paid = SHORT * short + (AGENTS - SHORT) * each;
    let mut cluster = Cluster::start(Plan {
        terms: Terms {
            ledger: Duration::from_millis(200),
            life: 100,
            price: PRICE,
            hostile: args.hostile,
            seed: args.seed,
        },
        replicas: 3,
        standby: true,
        agents,
        patience: Duration::from_secs(15),
    })
    .await?;
    let watch = Watch::start(cluster.database.clone(), cluster.market.network.clone(), caps.clone());
    let started = Instant::now();
    let crowd = Arc::new(Crowd {
        rng: Rng::new(args.seed, "clients"),
        room: Arc::new(Semaphore::new(args.clients)),
        refused: AtomicUsize::new(0),
        ended: AtomicUsize::new(0),
        over: AtomicBool::new(false),
        requests: AtomicU64::new(0),
        deadline: started + Duration::from_secs(args.seconds) + CALM,
    });
    let stories = Arc::new(Mutex::new(Vec::new()));
    let all = AGENTS * each;
    let buying = tokio::spawn(buy_all(purchases(&cluster, each), crowd.clone(), stories.clone()));

    let end = started + Duration::from_secs(args.seconds);
    let mut chaos = Chaos::new(args.seed, started, args.seconds);
    let mut told = Instant::now();
    while Instant::now() < end && undecided(&crowd, all) > 0 {
        chaos
            .step(&mut cluster.replicas, &mut cluster.primary, cluster.standby.as_mut(), progress(&crowd, all))
            .await?;
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            tell(started, &crowd, all, &watch);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    eprintln!("calm: {} of {all} purchases are undecided", undecided(&crowd, all));
    let struck_for = started.elapsed();
    cluster.market.hostile.calm_down();
    chaos.end(&mut cluster.replicas).await?;
    while Instant::now() < crowd.deadline && (undecided(&crowd, all) > 0 || watch.seen().open > 0) {
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            tell(started, &crowd, all, &watch);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // Who found no room asks once more; now it is final.
    tokio::time::sleep(Duration::from_secs(6)).await;
    crowd.over.store(true, Ordering::SeqCst);
    buying.await.map_err(|error| Stopped(format!("the purchases: {error}")))?;
    let calm_for = started.elapsed() - struck_for;
    let stories = std::mem::take(&mut *stories.lock().expect("nobody panics with it"));

    let mut broken = Broken::default();
    let found = audit(&cluster, &stories, &caps, &mut broken).await?;
    let seen = watch.seen();
    for how in seen.broken.values() {
        broken.note("caps hold at every moment, and rows end within 30 s", how.clone());
    }
    if found.settled != paid {
        broken.note("every call is paid for that its budget has room for", format!("{} of {paid}", found.settled));
    }
    if !chaos.whole() {
        broken.note("everything that should happen happened", format!("{:?}", chaos.done));
    }
    let count = |which: fn(&Story) -> bool| stories.iter().filter(|story| which(story)).count();
    let alerts: usize = cluster.replicas.iter().map(|replica| replica.said("ALERT").len()).sum();
    let figures = json!({
        "purchases": stories.len(), "clients": args.clients, "seed": args.seed, "balancer": cluster.balancer.kind,
        "struckSeconds": struck_for.as_secs(), "calmSeconds": calm_for.as_secs(),
        "callsPerSecond": (stories.len() as f64 / struck_for.as_secs_f64() * 10.0).round() / 10.0,
        "requests": crowd.requests.load(Ordering::SeqCst),
        "events": chaos.done, "faults": cluster.market.hostile.struck(),
        "transfers": found.transfers, "settled": found.settled, "released": found.released,
        "signatures": found.signatures, "alerts": alerts,
        "outputs": count(|story| story.end == End::Output),
        "undelivered": count(|story| story.end == End::Undelivered),
        "refused": count(|story| story.end == End::Refused),
        "unknownAtFirst": count(|story| story.unknown),
        "newKeys": stories.iter().map(|story| u64::from(story.keys_released)).sum::<u64>(),
        "looks": seen.looks, "missedLooks": seen.missed, "mostOpen": seen.most_open,
        "mostHeldAndSpentPermilleOfACap": seen.fullest_permille, "latestEndMs": seen.latest_ms,
    });
    let broken = broken.list();
    if !broken.is_empty() {
        eprintln!("the replicas' logs are in {}", cluster.keep().display());
    }
    Ok(Report::of_promises("chaos", figures, &broken))
}

/// The agents take turns.
fn purchases(cluster: &Cluster, each: usize) -> Vec<Purchase> {
    let of = |n: usize| {
        let (agent, call) = (&cluster.agents[n % AGENTS], n / AGENTS);
        let (agent, key) = (agent.clone(), format!("chaos-{}-{call:05}", agent.name));
        Purchase { agent, call: cluster.call(&format!("City {n}")), key }
    };
    (0..AGENTS * each).map(of).collect()
}

async fn buy_all(purchases: Vec<Purchase>, crowd: Arc<Crowd>, stories: Arc<Mutex<Vec<Story>>>) {
    let mut tasks = Vec::new();
    for purchase in purchases {
        let Ok(permit) = crowd.room.clone().acquire_owned().await else { return };
        let (crowd, stories) = (crowd.clone(), stories.clone());
        tasks.push(tokio::spawn(async move {
            let (mut permit, mut waits) = (Some(permit), false);
            let story = purchase
                .make(&crowd.rng, |story, taken| {
                    crowd.requests.fetch_add(1, Ordering::Relaxed);
                    let refused = story.end == End::Refused;
                    if refused != waits {
                        waits = refused;
                        let by = if refused { 1 } else { usize::MAX };
                        crowd.refused.fetch_add(by, Ordering::SeqCst);
                    }
                    if refused || taken > USUAL {
                        permit = None;
                    }
                    Instant::now() > crowd.deadline || refused && crowd.over.load(Ordering::SeqCst)
                })
                .await;
            if waits && story.end != End::Refused {
                crowd.refused.fetch_sub(1, Ordering::SeqCst);
            }
            if story.end != End::Refused {
                crowd.ended.fetch_add(1, Ordering::SeqCst);
            }
            stories.lock().expect("nobody panics with it").push(story);
        }));
    }
    for task in tasks {
        let _ = task.await;
    }
}

/// Purchases that have neither ended nor found their budget used up.
fn undecided(crowd: &Crowd, all: usize) -> usize {
    all.saturating_sub(crowd.ended.load(Ordering::SeqCst) + crowd.refused.load(Ordering::SeqCst))
}

/// In hundredths.
fn progress(crowd: &Crowd, all: usize) -> usize {
    (all - undecided(crowd, all)) * 100 / all.max(1)
}

fn tell(started: Instant, crowd: &Crowd, all: usize, watch: &Watch) {
    let seen = watch.seen();
    eprintln!(
        "{:>4} s: {} of {all} purchases ended, {} without room, {} rows settled, {} released, {} open",
        started.elapsed().as_secs(),
        crowd.ended.load(Ordering::SeqCst),
        crowd.refused.load(Ordering::SeqCst),
        seen.settled,
        seen.released,
        seen.open
    );
}

/// Who strikes: by a seeded generator, one blow every two seconds.
struct Chaos {
    rng: Rng,
    started: Instant,
    seconds: u64,
    next: Instant,
    /// Frozen replicas, and when they wake up.
    sleeping: BTreeMap<usize, Instant>,
    /// The one that is cut off, and until when.
    alone: Option<(usize, Instant)>,
    done: BTreeMap<&'static str, u64>,
}

const KILL: &str = "kill -9";
const FREEZE: &str = "SIGSTOP";
const LONG: &str = "SIGSTOP past the lease";
const FAIL_OVER: &str = "database fail-over";
const CUT_OFF: &str = "partition";

impl Chaos {
    fn new(seed: u64, started: Instant, seconds: u64) -> Chaos {
        Chaos {
            rng: Rng::new(seed, "chaos"),
            started,
            seconds,
            next: started + STRIKE,
            sleeping: BTreeMap::new(),
            alone: None,
            done: BTreeMap::new(),
        }
    }

    fn note(&mut self, event: &'static str) {
        *self.done.entry(event).or_default() += 1;
    }

    fn has(&self, event: &'static str) -> bool {
        self.done.contains_key(event)
    }

    fn whole(&self) -> bool {
        [KILL, FREEZE, FAIL_OVER, CUT_OFF].into_iter().all(|event| self.has(event))
    }

    /// `progress`: how much is bought, in hundredths.
    async fn step(
        &mut self,
        replicas: &mut [Replica],
        primary: &mut Postgres,
        standby: Option<&mut Postgres>,
        progress: usize,
    ) -> Result<()> {
        let now = Instant::now();
        let awake: Vec<usize> = self.sleeping.iter().filter(|(_, until)| **until <= now).map(|(n, _)| *n).collect();
        for n in awake {
            self.sleeping.remove(&n);
            replicas[n].thaw()?;
        }
        if let Some((n, until)) = self.alone
            && until <= now
        {
            self.alone = None;
            replicas[n].lines.set(Cable::Whole);
            eprintln!("      {} is connected again", replicas[n].name);
        }
        // What ended by itself (a database that could not be reached at its start) is started again, as Kubernetes does.
        for (n, replica) in replicas.iter_mut().enumerate() {
            if !self.sleeping.contains_key(&n) && !replica.runs() {
                self.note("restart");
                replica.launch()?;
            }
        }
        // Early enough, however fast it goes.
        let passed = usize::try_from((now - self.started).as_secs() * 100 / self.seconds.max(1)).unwrap_or(100);
        let passed = passed.max(progress);
        if passed >= 20 && !self.has(CUT_OFF) {
            self.note(CUT_OFF);
            let n = usize::try_from(self.rng.below(replicas.len() as u64)).unwrap_or(0);
            replicas[n].lines.set(Cable::Silent);
            self.alone = Some((n, now + PARTITION));
            eprintln!("      {} is cut off from database, chain, facilitator and signer", replicas[n].name);
        }
        if let Some(standby) = standby.filter(|_| passed >= 50 && !self.has(FAIL_OVER) && self.alone.is_none()) {
            self.note(FAIL_OVER);
            let begun = Instant::now();
            primary.kill().await?;
            standby.promote().await?;
            eprintln!("      the primary died; the standby took over after {} ms", begun.elapsed().as_millis());
        }
        if now < self.next {
            return Ok(());
        }
        self.next = now + STRIKE;
        let up: Vec<usize> = (0..replicas.len()).filter(|n| !self.sleeping.contains_key(n)).collect();
        let Some(n) = up.get(usize::try_from(self.rng.below(up.len() as u64)).unwrap_or(0)) else { return Ok(()) };
        let replica = &mut replicas[*n];
        let long = self.sleeping.values().all(|until| *until < now + STRIKE * 3);
        match self.rng.below(8) {
            0..4 => {
                self.note(KILL);
                replica.kill().await?;
                replica.launch()?;
            }
            4 if long => {
                self.note(LONG);
                replica.freeze()?;
                self.sleeping.insert(*n, now + LONG_SLEEP);
            }
            _ => {
                self.note(FREEZE);
                replica.freeze()?;
                let nap = Duration::from_millis(self.rng.between(300, 4_000));
                self.sleeping.insert(*n, now + nap);
            }
        }
        Ok(())
    }

    /// Everybody is up and connected.
    async fn end(&mut self, replicas: &mut [Replica]) -> Result<()> {
        for (n, replica) in replicas.iter_mut().enumerate() {
            replica.lines.set(Cable::Whole);
            if self.sleeping.remove(&n).is_some() {
                replica.thaw()?;
            }
            if !replica.runs() {
                replica.launch()?;
            }
            replica.serves().await?;
        }
        Ok(())
    }
}
