//! One seed from its first moment to the verdict.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde_json::json;
use sqlx::{ConnectOptions, Row};
use tokio::runtime::Handle;
use tokio::time::sleep;
use tollway::ledger::{Filter, Ledger, Limit, Payment, SqliteLedger, State, Subject};
use tollway::money::{Amount, Unit};
use tollway::seal::KeyRing;

use super::agent::{self, Diary, Plan};
use super::buyer::{self, Running, Shape};
use super::chain::{self, Chain};
use super::http::{self, Reply};
use super::judge::{Caps, Evidence};
use super::ledger::SimLedger;
use super::node;
use super::owners::Owners;
use super::seller::{self, Disk, Seller, Terms};
use super::signer::{self, Book};
use super::stats::{GateStats, Stats};
use super::world::{Ctx, World, lock};
use super::{Planted, Story, gate};

const AGENTS: [&str; 2] = ["alice", "bob"];
const PRICE: u64 = 10_000;
const REPLICAS: u64 = 3;
/// Milliseconds in which a calm world has to come to rest.
const REST_WITHIN_MS: u64 = 3_600_000;

#[derive(Clone, Copy, Default)]
pub struct Options {
    pub bug: Option<Planted>,
    /// Keep every line of the trace.
    pub trace: bool,
}

pub struct Outcome {
    pub seed: u64,
    pub hash: u64,
    pub failure: Option<String>,
    pub lines: Vec<String>,
    pub stats: Stats,
    pub gate: GateStats,
}

/// What all seeds of one thread use.
pub struct Workshop {
    pub helper: Handle,
    pub dir: PathBuf,
    /// A migrated, empty ledger.
    pub template: PathBuf,
    /// Gates keep their claims there instead.
    pub postgres: Option<Arc<gate::Server>>,
}

/// The ledger's file as the judge sees it.
struct File {
    world: Arc<World>,
    connection: Mutex<sqlx::SqliteConnection>,
}

impl File {
    fn open(world: &Arc<World>, path: &Path) -> File {
        let settings = sqlx::sqlite::SqliteConnectOptions::new().filename(path).disable_statement_logging();
        let connection = world.still(settings.connect()).expect("the ledger's file opens");
        File { world: world.clone(), connection: Mutex::new(connection) }
    }

    fn read<T>(&self, sql: &'static str, row: impl Fn(&sqlx::sqlite::SqliteRow) -> T) -> Vec<T> {
        let mut connection = lock(&self.connection);
        let rows = self.world.still(sqlx::query(sql).fetch_all(&mut *connection)).expect("the ledger can be read");
        rows.iter().map(row).collect()
    }
}

fn unit() -> Unit {
    Unit { network: chain::NETWORK.parse().expect("a network"), asset: chain::ASSET.parse().expect("an asset") }
}

fn limits(caps: Caps) -> [Limit; 2] {
    let limit = |subject, per_session: Option<u64>, per_day| Limit {
        subject,
        unit: unit(),
        per_call: None,
        per_session: per_session.map(Amount::from_u64),
        per_day: Some(Amount::from_u64(per_day)),
        unlimited: false,
        suspended: false,
        source: "file".into(),
    };
    [limit(Subject::EachAgent, Some(caps.session), caps.agent_day), limit(Subject::Total, None, caps.total_day)]
}

pub fn run(which: Story, seed: u64, options: Options, workshop: &Workshop) -> Outcome {
    let path = workshop.dir.join(format!("{seed}-{:?}.sqlite", std::thread::current().id()));
    std::fs::copy(&workshop.template, &path).expect("the template can be copied");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let outcome = runtime.expect("a runtime").block_on(async {
        match which {
            Story::Call => story(seed, options, workshop, &path).await,
            Story::Gate => {
                let on = workshop.postgres.as_deref().map_or(gate::On::File(&path), gate::On::Postgres);
                gate::story(seed, options, workshop, on).await
            }
        }
    });
    for end in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{end}", path.display()));
    }
    outcome
}

async fn story(seed: u64, options: Options, workshop: &Workshop, path: &Path) -> Outcome {
    let world = World::new(seed, workshop.helper.clone(), options.trace);
    let shape = Shape {
        nodes: world.range(1, 3) as usize,
        external_signer: world.permille(750),
        sweep_every_s: world.range(15, 60),
    };
    let terms =
        Terms { price: PRICE, life_seconds: [30, 60, 120][world.range(0, 3) as usize], stateless: world.permille(500) };
    let caps = Caps {
        agent_day: PRICE * world.range(3, 7),
        session: PRICE * world.range(2, 5),
        total_day: PRICE * world.range(5, 12),
    };
    let balance = if world.permille(150) { 4 * PRICE } else { 100 * PRICE };
    let min_ttl = if world.permille(350) { 30 } else { 17_280 };
    let chain = Arc::new(Chain::new(balance.into(), min_ttl));
    let disk: Arc<Mutex<Disk>> = Arc::default();
    let book = Book::default();

    let file = Arc::new(File::open(&world, path));
    let watch = {
        let (file, world) = (file.clone(), world.clone());
        move || {
            let windows = file.read("SELECT agent, kind, held, spent FROM budget_windows", |row| {
                let number = |name: &str| row.get::<String, _>(name).parse::<u64>().unwrap_or(u64::MAX / 2);
                let used = number("held") + number("spent");
                (row.get::<String, _>("agent"), row.get::<String, _>("kind"), used)
            });
            for (agent, kind, used) in windows {
                let most = match (agent.as_str(), kind.as_str()) {
                    ("total", _) => caps.total_day,
                    (_, "session") => caps.session,
                    _ => caps.agent_day,
                };
                if used > most {
                    world.fail(format!("{agent} holds and spent {used} of {most} ({kind})"));
                }
            }
        }
    };
    let watch: Arc<dyn Fn() + Send + Sync> = Arc::new(watch);
    // Clock and randomness of the ledgers do not die with a process.
    world.start("store", false, |_| std::future::pending());
    let store = world.host(|host| host.name == "store").expect("just started");
    let ports = Ctx { world: world.clone(), epoch: store.epoch(), host: store }.ports();
    let open = {
        let (world, path) = (world.clone(), path.to_owned());
        move |rotated: bool| -> Arc<dyn Ledger> {
            // Every process knows both keys; after the rotation new ones seal with the newer.
            let keys = if rotated { vec![vec![4; 32], vec![3; 32]] } else { vec![vec![3; 32], vec![4; 32]] };
            let ring = KeyRing::new(keys).expect("a ring");
            Arc::new(world.still(SqliteLedger::open(&path, ports.clone(), Some(ring))).expect("a ledger"))
        }
    };
    let judges = open(false);
    world.still(judges.replace_limits("file", &limits(caps))).expect("limits");

    let mut hosts = Vec::new();
    {
        let (chain, disk) = (chain.clone(), disk.clone());
        world.start("seller", true, move |ctx| {
            let seller = Arc::new(Seller::new(ctx.clone(), chain.clone(), disk.clone(), terms));
            http::serve(ctx, move |request| seller.clone().answer(request))
        });
    }
    world.start("catalog", true, move |ctx| {
        let this = ctx.clone();
        http::serve(ctx, move |_| {
            let ctx = this.clone();
            async move {
                ctx.world.pause().await;
                if ctx.world.chance(|f| f.catalog_fails) {
                    ctx.world.count(|s| s.catalog_failed += 1);
                    return Reply::Status(503, "{}".into());
                }
                Reply::Json(json!({"x402Version": 2, "resource": seller::item(terms)}).to_string())
            }
        })
    });
    {
        let book = book.clone();
        world.start("signer", true, move |ctx| {
            let (this, book) = (ctx.clone(), book.clone());
            http::serve(ctx, move |request| signer::answer(this.clone(), book.clone(), request))
        });
    }
    node::start(&world, &chain, shape.nodes);
    let running = Running::default();
    let owners = Arc::new(Owners::default());
    let rotated_at = world.permille(250).then(|| world.now_ms() + world.range(10_000, 90_000));
    world.count(|s| s.rotations += u64::from(rotated_at.is_some()));
    for n in 0..REPLICAS {
        let name = format!("buyer{n}");
        let bug = match options.bug {
            Some(Planted::Call(bug)) => Some(bug),
            _ => None,
        };
        let (before, after, open) = (open(false), OnceLock::new(), open.clone());
        let (watch, running, owners) = (watch.clone(), running.clone(), owners.clone());
        world.start(&name, true, move |ctx| {
            let inner = match rotated_at {
                Some(at) if ctx.world.now_ms() >= at => {
                    ctx.world.count(|s| s.opened_rotated += 1);
                    after.get_or_init(|| open(true)).clone()
                }
                _ => before.clone(),
            };
            let (watch, owners, recovering) = (watch.clone(), owners.clone(), Mutex::default());
            let ledger = Arc::new(SimLedger { inner, ctx: ctx.clone(), bug, owners, recovering, watch });
            buyer::run(ctx, ledger, shape, running.clone())
        });
        hosts.push(name);
    }

    let diary = Diary::default();
    let mut tasks = Vec::new();
    let mut plans = Vec::new();
    for (a, agent) in AGENTS.into_iter().enumerate() {
        let session = world.permille(700).then_some(["morning", "evening"][a]);
        let own: Vec<Plan> = (0..world.range(2, 4))
            .map(|i| {
                let n = a as u64 * 100 + i;
                let key = world.permille(500).then(|| format!("{agent}-key-number-{n:04}"));
                Plan { agent, session, key, n }
            })
            .collect();
        plans.extend(own.clone());
        tasks.push(world.outside(agent::live(world.clone(), running.clone(), diary.clone(), own, hosts.clone())));
    }
    let suspensions = Arc::new(Mutex::new(Vec::new()));
    if world.permille(350) {
        let (world_, judges, suspensions) = (world.clone(), judges.clone(), suspensions.clone());
        tasks.push(world.outside(async move {
            sleep(Duration::from_millis(world_.range(5_000, 60_000))).await;
            let agent = AGENTS[world_.range(0, 2) as usize];
            let subject = Subject::Agent(agent.parse().expect("an agent"));
            world_.trace(&format!("the operator suspends {agent}"));
            let _since = world_.still(judges.suspend(&subject, None)).expect("suspends");
            let from = world_.unix_ms();
            sleep(Duration::from_millis(world_.range(5_000, 60_000))).await;
            world_.trace(&format!("the operator resumes {agent}"));
            lock(&suspensions).push((agent, from, world_.unix_ms()));
            world_.still(judges.resume(&subject, None)).expect("resumes");
        }));
    }

    sleep(Duration::from_millis(world.range(60_000, 200_000))).await;
    world.calm();
    for task in tasks {
        let _ = task.await;
    }
    // Whatever was killed is back.
    sleep(Duration::from_secs(25)).await;
    let rows = || {
        let filter = Filter { limit: 1_000, ..Filter::default() };
        world.still(judges.list(&filter)).expect("the ledger can be read")
    };
    let rest = async || {
        let until = world.now_ms() + REST_WITHIN_MS;
        while world.now_ms() < until && world.failure().is_none() {
            let newest = u64::from(chain.newest(&world));
            let waits = |row: &Payment| {
                row.state.is_open() && (row.authorization.dead_after <= newest + 1_000 || world.now_ms() < until / 2)
            };
            if !rows().iter().any(waits) {
                break;
            }
            sleep(Duration::from_secs(10)).await;
        }
    };
    // Each call that still lacks its output, once more: while its authorization may be alive, and when all are dead.
    for round in ["soon", "late"] {
        for plan in &plans {
            let over = |a: &agent::Attempt| a.plan.n == plan.n && a.told.is_final(plan);
            if lock(&diary).iter().any(over) {
                continue;
            }
            let hash = super::judge::call_hash(plan.n);
            let row = rows().into_iter().find(|row| {
                let of_this_call =
                    plan.key.is_some() || row.state.is_open() || row.state == State::Settled && !row.answered;
                row.call_hash == hash && of_this_call
            });
            let owed = row.is_some_and(|row| is_owed(&row, &chain, &world));
            let host = &hosts[world.range(0, hosts.len() as u64) as usize];
            let told = agent::attempt(&world, &running, &diary, plan, host).await;
            world.count(|s| s.owed += u64::from(owed));
            if owed && told.text().is_none() && told.reason() != "in_flight" {
                world.fail(format!("{round}: the output of {} is owed, and the agent got {told:?}", plan.n));
            }
        }
        rest().await;
    }

    let sign_before: BTreeMap<String, u64> = file
        .read("SELECT payment_identifier, sign_before FROM payments", |row| {
            (row.get::<String, _>("payment_identifier"), row.get::<i64, _>("sign_before") as u64)
        })
        .into_iter()
        .collect();
    let lost = "SELECT payment_identifier, min(at) AS at FROM payment_events \
        WHERE event = 'in_doubt' AND reason = 'lease_expired' GROUP BY payment_identifier";
    let lease_lost: BTreeMap<String, u64> = file
        .read(lost, |row| (row.get::<String, _>("payment_identifier"), row.get::<i64, _>("at") as u64))
        .into_iter()
        .collect();
    let audit = world.still(judges.audit()).expect("the audit runs");
    let evidence = {
        let disk = lock(&disk);
        Evidence {
            rows: rows(),
            sign_before,
            lease_lost,
            recoveries: owners.recoveries(),
            audit,
            transfers: chain.transfers(),
            newest: chain.newest(&world),
            signatures: lock(&book).clone(),
            shown: chain.shown().into_keys().collect(),
            lied: disk.lied.clone(),
            other_bytes: disk.other_bytes.clone(),
            attempts: lock(&diary).clone(),
            suspensions: lock(&suspensions).clone(),
            caps,
            price: PRICE,
            ran_ahead: lock(&world.stats).node_ahead > 0,
        }
    };
    if let Err(why) = evidence.judge() {
        world.fail(why);
    }
    for row in &evidence.rows {
        world.trace(&format!("row {} {} {:?}", row.payment_id.short(), row.state.as_str(), row.reason));
    }
    world.count(|s| {
        s.transfers = evidence.transfers.len() as u64;
        s.rows_settled = evidence.rows.iter().filter(|row| row.state == State::Settled).count() as u64;
        s.rows_released = evidence.rows.iter().filter(|row| row.state == State::Released).count() as u64;
        let days: std::collections::BTreeSet<_> = evidence.rows.iter().map(|r| r.created_ms / 86_400_000).collect();
        s.two_days = u64::from(days.len() > 1);
    });
    let outcome = Outcome {
        seed,
        hash: world.hash(),
        failure: world.failure(),
        lines: world.take_lines(),
        stats: lock(&world.stats).clone(),
        gate: GateStats::default(),
    };
    world.shutdown();
    lock(&running).clear();
    outcome
}

/// The output can be had: it is stored, or the signed bytes are and still buy it. The seller tells the truth by now.
fn is_owed(row: &Payment, chain: &Chain, world: &World) -> bool {
    // An end far away comes from a node that ran ahead; the transaction itself has a time of its own, which is over.
    let newest = u64::from(chain.newest(world));
    let alive = (newest + 7..newest + 60).contains(&row.authorization.dead_after);
    match row.state {
        State::Settled => row.has_outcome || row.has_payload,
        State::InDoubt => row.has_payload && !row.leased && alive && chain.balance() >= i128::from(PRICE),
        State::Reserved | State::Released => false,
    }
}
