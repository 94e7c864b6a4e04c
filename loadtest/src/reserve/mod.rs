//! The buyer's ledger under many callers: what the lanes of `PostgresLedger` reach through the ledger's own trait, beside
//! one row at a time and beside bare INSERTs, on the same durable PostgreSQL in the same run.
//!
//! Rounds alternate, and the median of their ratios counts: each of the three slows down with the machine. Each has a
//! schema of its own, so that at the end the ledger's is audited.

mod fill;
mod measure;
mod rows;
mod work;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::process::Command;
use tollway::ledger::postgres::{Options, PostgresLedger};
use tollway::ledger::{Database, Ledger};
use tollway::ports::{World, machine};

use crate::parts::postgres::{Postgres, connect};
use crate::report::{Doing as _, Report, Result, Stopped, median};
use measure::{Measured, lanes, plain};
use rows::Rows;
use work::Work;

#[derive(clap::Args, Clone)]
pub struct Args {
    /// Budgets that the reservations are spread over; 1 is the hot agent
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    agents: u64,
    /// Callers at once, each with a call after the other
    #[arg(long, default_value_t = 256)]
    callers: usize,
    /// Processes at once, with as many callers each as `--callers` says halved
    #[arg(long, default_value_t = 1)]
    processes: usize,
    /// Each reservation is settled too
    #[arg(long)]
    pairs: bool,
    /// Old payments that are there already; compared with a table that has none
    #[arg(long, default_value_t = 0)]
    rows: u64,
    /// Alternating rounds; the median of their ratios counts [default: 5, with --rows 11]
    #[arg(long)]
    rounds: Option<usize>,
    /// How long each part of a round takes
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Lanes of the ledger
    #[arg(long, default_value_t = 2)]
    lanes: usize,
    /// Of a process that another one started: the database that is measured
    #[arg(long, hide = true)]
    url: Option<String>,
}

/// More than a run writes.
const WAL_FILES: u32 = 150;
/// Times 20 s, in which new payments reach the pages of ten million old ones.
const SETTLING: u32 = 6;

pub async fn run(args: Args) -> Result<Report> {
    let (world, _tasks) = machine::world();
    if let Some(url) = &args.url {
        return child(&args, &world, url).await;
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // A quarter of the machine's memory is usual where millions of rows are.
    let buffers = if args.rows == 0 { "shared_buffers=1GB" } else { "shared_buffers=5GB" };
    let settings = [buffers, "min_wal_size=3GB", "checkpoint_timeout=1h", "wal_buffers=16MB"];
    let server = Postgres::start(&settings).await?;
    // Old payments fill the disk themselves, while they are loaded.
    most_wal(&server, if args.rows == 0 { 16 } else { 6 }).await?;
    server.used_wal(WAL_FILES).await?;
    let bench = Bench { args, world, server };
    let mut report = match (bench.args.rows, bench.args.processes) {
        (0, 0 | 1) => bench.against_rows().await?,
        (0, _) => bench.processes().await?,
        _ => bench.old_rows().await?,
    };
    report.figures["loadAverageBefore"] = json!(load.split(' ').next());
    Ok(report)
}

struct Bench {
    args: Args,
    world: World,
    server: Postgres,
}

/// A schema of one's own on the server.
fn at(server: &Postgres, schema: &str) -> String {
    format!("{}?options=-csearch_path%3D{schema}", server.url())
}

async fn open(url: &str, world: &World, args: &Args) -> Result<Arc<PostgresLedger>> {
    let database = Database::parse(url, None).map_err(Stopped)?;
    let options = Options { lanes: args.lanes, ..Options::default() };
    Ok(Arc::new(PostgresLedger::connect(&database, world.clone(), None, options).await.doing("the ledger")?))
}

impl Bench {
    /// Tables as `tollway migrate` makes them, and limits.
    async fn schema(&self, name: &str) -> Result<String> {
        self.server.execute(&format!("CREATE SCHEMA {name}")).await?;
        let url = at(&self.server, name);
        PostgresLedger::migrate(&Database::parse(&url, None).map_err(Stopped)?).await.doing("migrate")?;
        let limits = Work::new(&self.world, self.args.agents).limits();
        open(&url, &self.world, &self.args).await?.replace_limits("file", &limits).await.doing("limits")?;
        connect(&url).await?.batch_execute("ANALYZE spend_limits").await.doing("ANALYZE")?;
        Ok(url)
    }

    /// Of a table that fills the memory each round says less.
    fn rounds(&self) -> usize {
        self.args.rounds.unwrap_or(if self.args.rows == 0 { 5 } else { 11 })
    }

    fn seconds(&self) -> Duration {
        Duration::from_secs(self.args.seconds)
    }

    async fn connections(&self, url: &str, n: usize) -> Result<Vec<Rows>> {
        let opened = (0..n).map(|_| async { Rows::open(connect(url).await?).await.doing("a connection") });
        join_all(opened).await.into_iter().collect()
    }

    /// The number of connections that suits it best, by short runs.
    async fn best(
        &self,
        url: &str,
        work: &Work,
        kind: plain::Kind,
        candidates: &[usize],
    ) -> Result<(usize, Vec<Rows>)> {
        let mut best = (0, 0.0);
        for n in candidates {
            let rows = self.connections(url, *n).await?;
            let run = plain::run(&rows, work, kind, Duration::from_millis(1_500)).await?;
            eprintln!("{kind:?} with {n} connections: {:.0}/s", run.rate);
            if run.rate > best.1 {
                best = (*n, run.rate);
            }
        }
        Ok((best.0, self.connections(url, best.0).await?))
    }

    async fn against_rows(&self) -> Result<Report> {
        let args = &self.args;
        let work = Work::new(&self.world, args.agents);
        let (ours, theirs, bare) =
            (self.schema("ours").await?, self.schema("row_at_a_time").await?, self.schema("bare").await?);
        let ledger = open(&ours, &self.world, args).await?;
        let kind = if args.pairs { plain::Kind::Pairs } else { plain::Kind::Reserve };
        let row_candidates: &[usize] = if args.agents == 1 { &[1, 2, 4] } else { &[2, 8, 16, 32] };
        let (row_connections, row) = self.best(&theirs, &work, kind, row_candidates).await?;
        let (insert_connections, insert) = match args.pairs {
            true => (0, Vec::new()),
            false => self.best(&bare, &work, plain::Kind::Insert, &[16, 32, 64]).await?,
        };
        let one = self.connections(&theirs, 1).await?;
        self.server.execute("CHECKPOINT").await?;

        let mut all = Rounds::default();
        for round in 1..=self.rounds() {
            let a = lanes::run(&ledger, &work, args.callers, args.pairs, self.seconds()).await?;
            let b = plain::run(&row, &work, kind, self.seconds()).await?;
            eprintln!("round {round}: lanes {a}, row at a time {b}, {:.1} times", a.rate / b.rate);
            all.of_rows.push(a.rate / b.rate);
            if !args.pairs {
                let c = plain::run(&insert, &work, plain::Kind::Insert, self.seconds()).await?;
                eprintln!("round {round}: INSERT {c}, {:.2} times", a.rate / c.rate);
                all.of_inserts.push(a.rate / c.rate);
                all.inserts.push(c.rate);
            }
            if args.agents == 1 {
                let alone = lanes::run(&ledger, &work, 1, args.pairs, Duration::from_secs(2)).await?;
                let theirs = plain::run(&one, &work, kind, Duration::from_secs(2)).await?;
                eprintln!("round {round}: alone {:.2} ms, row at a time {:.2} ms", alone.p50, theirs.p50);
                all.alone.push(alone.p50 / theirs.p50);
                all.alone_ms.push(alone.p50);
            }
            all.ours.push(a.rate);
            all.p99.push(a.p99);
            all.rows.push(b.rate);
        }
        let audit = ledger.audit().await.doing("the audit")?;
        let figures = ledger.lanes();
        let ratio = median(all.of_rows);
        let (inserts, p99, alone) = (median(all.of_inserts), median(all.p99), median(all.alone));
        let mut broken: Vec<String> = Vec::new();
        let mut bar = |holds: bool, what: String| {
            if !holds {
                broken.push(what);
            }
        };
        if args.pairs {
            bar(ratio >= 10.0, format!("pairs: {ratio:.1} times row at a time, not 10"));
        } else {
            if args.agents == 1 {
                bar(ratio >= 12.0, format!("{ratio:.1} times row at a time, not 12"));
            }
            bar(inserts >= 1.3, format!("{inserts:.2} times INSERT, not 1.3"));
        }
        // Of a pair it is the time of two calls, one after the other: said, and no bar.
        if args.callers <= 256 && !args.pairs {
            bar(p99 < 50.0, format!("p99 {p99:.1} ms, not below 50"));
        }
        if args.agents == 1 {
            bar(alone <= 1.2, format!("alone {alone:.2} times as long, more than 1.2"));
        }
        bar(audit.differences.is_empty(), format!("{} differences in the audit", audit.differences.len()));
        Ok(Report {
            scenario: "reserve",
            pass: broken.is_empty(),
            figures: json!({
                "agents": args.agents, "callers": args.callers, "pairs": args.pairs, "lanes": args.lanes,
                "perSecond": median(all.ours).round(), "p99Ms": tenth(p99),
                "timesInserts": (!args.pairs).then(|| hundredth(inserts)),
                "aloneMs": (args.agents == 1).then(|| hundredth(median(all.alone_ms))),
                "aloneRatio": (args.agents == 1).then(|| hundredth(alone)),
                "meanBatch": tenth(figures.entries as f64 / figures.batches.max(1) as f64), "busy": figures.busy,
                "payments": audit.payments, "differences": audit.differences.len(), "broken": broken,
            }),
            baseline: json!({
                "rowAtATimePerSecond": median(all.rows).round(), "rowAtATimeConnections": row_connections,
                "insertsPerSecond": (!args.pairs).then(|| median(all.inserts).round()),
                "insertConnections": (!args.pairs).then_some(insert_connections),
            }),
            ratio: Some(hundredth(ratio)),
        })
    }

    /// Several processes over one set of budgets.
    async fn processes(&self) -> Result<Report> {
        let args = &self.args;
        let work = Work::new(&self.world, args.agents);
        let (ours, theirs) = (self.schema("ours").await?, self.schema("row_at_a_time").await?);
        let row_candidates: &[usize] = if args.agents == 1 { &[1, 2, 4] } else { &[2, 8, 16, 32] };
        let kind = if args.pairs { plain::Kind::Pairs } else { plain::Kind::Reserve };
        let (row_connections, row) = self.best(&theirs, &work, kind, row_candidates).await?;
        self.server.execute("CHECKPOINT").await?;
        let (mut sums, mut worst, mut ratios, mut rows) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 1..=self.rounds() {
            let measured = self.children(&ours).await?;
            let sum: f64 = measured.iter().map(|m| m.rate).sum();
            let p99 = measured.iter().map(|m| m.p99).fold(0.0, f64::max);
            let b = plain::run(&row, &work, kind, self.seconds()).await?;
            eprintln!("round {round}: {sum:.0}/s together, the worst p99 {p99:.1} ms; row at a time {b}");
            ratios.push(sum / b.rate);
            sums.push(sum);
            worst.push(p99);
            rows.push(b.rate);
        }
        let audit = open(&ours, &self.world, args).await?.audit().await.doing("the audit")?;
        let p99 = median(worst);
        let mut broken = Vec::new();
        if p99 >= 100.0 {
            broken.push(format!("p99 {p99:.1} ms, not below 100"));
        }
        if !audit.differences.is_empty() {
            broken.push(format!("{} differences in the audit", audit.differences.len()));
        }
        Ok(Report {
            scenario: "reserve",
            pass: broken.is_empty(),
            figures: json!({
                "agents": args.agents, "processes": args.processes, "callersEach": args.callers / 2, "pairs": args.pairs,
                "lanes": args.lanes, "perSecond": median(sums).round(), "worstP99Ms": tenth(p99),
                "payments": audit.payments, "differences": audit.differences.len(), "broken": broken,
            }),
            baseline: json!({
                "rowAtATimePerSecond": median(rows).round(), "rowAtATimeConnections": row_connections,
            }),
            ratio: Some(hundredth(median(ratios))),
        })
    }

    async fn children(&self, url: &str) -> Result<Vec<Measured>> {
        let args = &self.args;
        let program = std::env::current_exe().doing("this program")?;
        let each = |_| {
            let mut command = Command::new(&program);
            command.arg("reserve").arg("--url").arg(url).arg("--agents").arg(args.agents.to_string());
            command.arg("--callers").arg((args.callers / 2).max(1).to_string());
            command.arg("--seconds").arg(args.seconds.to_string()).arg("--lanes").arg(args.lanes.to_string());
            if args.pairs {
                command.arg("--pairs");
            }
            command.kill_on_drop(true).stderr(std::process::Stdio::inherit());
            async move {
                let output = command.output().await.doing("a process")?;
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let line: serde_json::Value = serde_json::from_str(text.trim()).doing("a process's figures")?;
                let figure = |name: &str| {
                    line["figures"][name].as_f64().ok_or_else(|| Stopped(format!("a process said no {name}: {line}")))
                };
                Ok(Measured { rate: figure("perSecond")?, p50: figure("p50Ms")?, p99: figure("p99Ms")? })
            }
        };
        join_all((0..args.processes).map(each)).await.into_iter().collect()
    }

    /// The same table with and without old payments.
    async fn old_rows(&self) -> Result<Report> {
        let args = &self.args;
        let work = Work::new(&self.world, args.agents);
        let (fresh, full) = (self.schema("fresh").await?, self.schema("grown").await?);
        fill::fill(&full, args.rows, args.agents).await?;
        let (fresh, full) = (open(&fresh, &self.world, args).await?, open(&full, &self.world, args).await?);
        // As much as the pages of all indexes, written whole once, and what is measured: the next checkpoint comes later.
        most_wal(&self.server, 40).await?;
        self.server.execute("CHECKPOINT").await?;
        // After a checkpoint each page is written whole once: that is the checkpoint's price, and is not measured.
        lanes::run(&fresh, &work, args.callers, args.pairs, Duration::from_secs(20)).await?;
        let mut after_checkpoint = Vec::new();
        for _ in 0..SETTLING {
            let measured = lanes::run(&full, &work, args.callers, args.pairs, Duration::from_secs(20)).await?;
            eprintln!("since the checkpoint: {measured}");
            after_checkpoint.push(measured.rate.round());
        }
        let (mut ratios, mut fresh_rates, mut full_rates, mut p99) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 1..=self.rounds() {
            let a = lanes::run(&fresh, &work, args.callers, args.pairs, self.seconds()).await?;
            let b = lanes::run(&full, &work, args.callers, args.pairs, self.seconds()).await?;
            eprintln!("round {round}: without old rows {a}, with {} of them {b}", args.rows);
            ratios.push(a.rate / b.rate);
            fresh_rates.push(a.rate);
            full_rates.push(b.rate);
            p99.push(b.p99);
        }
        let ratio = median(ratios);
        Ok(Report {
            scenario: "reserve",
            pass: ratio <= 1.2,
            figures: json!({
                "rows": args.rows, "agents": args.agents, "callers": args.callers, "lanes": args.lanes,
                "perSecond": median(full_rates).round(), "p99Ms": tenth(median(p99)), "timesAsDear": hundredth(ratio),
                "perSecondSinceTheCheckpoint": after_checkpoint,
            }),
            baseline: json!({"perSecondWithoutThem": median(fresh_rates).round()}),
            ratio: Some(hundredth(ratio)),
        })
    }
}

/// Until a checkpoint begins by itself, in gigabytes.
async fn most_wal(server: &Postgres, gigabytes: u32) -> Result<()> {
    server.execute(&format!("ALTER SYSTEM SET max_wal_size = '{gigabytes}GB'")).await?;
    server.execute("SELECT pg_reload_conf()").await
}

/// One of several processes: what it measured is the whole of its report.
async fn child(args: &Args, world: &World, url: &str) -> Result<Report> {
    let ledger = open(url, world, args).await?;
    let work = Work::new(world, args.agents);
    let measured = lanes::run(&ledger, &work, args.callers, args.pairs, Duration::from_secs(args.seconds)).await?;
    Ok(Report {
        scenario: "reserve",
        pass: true,
        figures: json!({"perSecond": measured.rate, "p50Ms": measured.p50, "p99Ms": measured.p99}),
        baseline: serde_json::Value::Null,
        ratio: None,
    })
}

#[derive(Default)]
struct Rounds {
    ours: Vec<f64>,
    p99: Vec<f64>,
    rows: Vec<f64>,
    inserts: Vec<f64>,
    of_rows: Vec<f64>,
    of_inserts: Vec<f64>,
    alone: Vec<f64>,
    alone_ms: Vec<f64>,
}

fn hundredth(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
