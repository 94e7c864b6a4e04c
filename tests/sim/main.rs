//! Deterministic simulation on a seeded world that loses, cuts, repeats and delays messages, lies, freezes, and kills at
//! any await. The business code is the real one. Two stories: `call`, the paid call (three buyers on one ledger, a
//! seller, chain, signer and catalog), and `gate`, the sale (two or three gates on one store of claims, a facilitator,
//! the chain, payers and a thief). At each step and after each seed the promises are judged from outside.
//!
//! `cargo test --test sim -- [--story call|gate] [--seeds N] [--from N] [--seed N [--trace]] [--bug NAME] [--threads N]`
#![allow(clippy::disallowed_methods, reason = "the world is the adapter that owns threads, tasks and time")]

mod agent;
mod buyer;
mod chain;
mod gate;
mod http;
mod judge;
mod ledger;
mod net;
mod node;
mod owners;
mod rng;
mod seed;
mod seller;
mod signer;
mod stats;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use seed::{Options, Outcome, Workshop};
use stats::{GateStats, Stats};

const NAME: &str = "simulation";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Story {
    Call,
    Gate,
}

impl Story {
    const ALL: [Story; 2] = [Story::Call, Story::Gate];

    fn name(self) -> &'static str {
        match self {
            Story::Call => "call",
            Story::Gate => "gate",
        }
    }

    /// With every run of the tests.
    fn seeds(self) -> u64 {
        match self {
            Story::Call => 2_000,
            Story::Gate => 150,
        }
    }

    /// So many seeds are run twice, and their traces must be equal.
    fn twice(self) -> u64 {
        self.seeds() / 20
    }

    fn bugs(self) -> Vec<(&'static str, Planted)> {
        match self {
            Story::Call => ledger::BUGS.iter().map(|(name, bug)| (*name, Planted::Call(*bug))).collect(),
            Story::Gate => gate::BUGS.iter().map(|(name, bug)| (*name, Planted::Gate(*bug))).collect(),
        }
    }
}

/// A mistake that the simulation has to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    Call(ledger::Bug),
    Gate(gate::Bug),
}

impl Planted {
    fn story(self) -> Story {
        match self {
            Planted::Call(_) => Story::Call,
            Planted::Gate(_) => Story::Gate,
        }
    }
}

/// Stories of the gate on PostgreSQL, where `TOLLWAY_TEST_POSTGRES` names a server.
const ON_POSTGRES: u64 = 8;
/// A planted bug has to be found among so many.
const FIND_WITHIN: u64 = 400;

struct Arguments {
    /// `None`: both.
    story: Option<Story>,
    /// `None`: as many as with every run of the tests.
    seeds: Option<u64>,
    from: u64,
    seed: Option<u64>,
    trace: bool,
    bug: Option<Planted>,
    threads: u64,
}

/// `None`: what was asked for is not this test.
fn arguments() -> Result<Option<Arguments>, String> {
    let mut out = Arguments { story: None, seeds: None, from: 0, seed: None, trace: false, bug: None, threads: 2 };
    let mut given = std::env::args().skip(1);
    let mut ours = true;
    while let Some(name) = given.next() {
        let mut number = || {
            let value = given.next().and_then(|text| text.parse::<u64>().ok());
            value.ok_or_else(|| format!("{name} needs a number"))
        };
        match name.as_str() {
            "--story" => {
                let name = given.next().unwrap_or_default();
                let known = Story::ALL.into_iter().find(|story| story.name() == name);
                out.story = Some(known.ok_or_else(|| format!("no story is called {name:?}: call or gate"))?);
            }
            "--seeds" => out.seeds = Some(number()?),
            "--from" => out.from = number()?,
            "--seed" => out.seed = Some(number()?),
            "--threads" => out.threads = number()?.max(1),
            "--trace" => out.trace = true,
            "--bug" => {
                let bug = given.next().unwrap_or_default();
                let known = Story::ALL.into_iter().flat_map(Story::bugs).find(|(name, _)| *name == bug);
                let known = known.ok_or_else(|| format!("no bug is called {bug:?}"))?.1;
                (out.bug, out.story) = (Some(known), Some(known.story()));
            }
            // What the standard harness takes, and cargo hands to every test of a run.
            "--quiet" | "-q" | "--nocapture" | "--no-capture" | "--exact" | "--include-ignored" => {}
            "--test-threads" | "--skip" | "--format" | "--color" => drop(given.next()),
            "--ignored" => ours = false,
            "--list" => {
                println!("{NAME}: test");
                ours = false;
            }
            other if other.starts_with('-') => return Err(format!("unknown argument {other}")),
            filter => ours &= NAME.contains(filter),
        }
    }
    Ok(ours.then_some(out))
}

/// Memory where there is some: the ledger's file is written through to it thousands of times.
fn directory() -> tempfile::TempDir {
    let memory = PathBuf::from("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.or_else(|_| tempfile::tempdir()).expect("a directory")
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            return ExitCode::from(2);
        }
    };
    let dir = directory();
    let template = dir.path().join("template.sqlite");
    let helper = helper();
    let make = async {
        let (world, _) = tollway::ports::machine::world();
        drop(tollway::ledger::SqliteLedger::open(&template, world, None).await.expect("a ledger"));
        // What the write-ahead log holds goes into the file, and the log goes.
        use sqlx::{ConnectOptions, Connection};
        let settings = sqlx::sqlite::SqliteConnectOptions::new().filename(&template);
        let mut file = settings.connect().await.expect("the template opens");
        sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(&mut file).await.expect("a checkpoint");
        file.close().await.expect("the template closes");
    };
    helper.block_on(make);
    let workshop = || Workshop {
        helper: helper.handle().clone(),
        dir: dir.path().to_owned(),
        template: template.clone(),
        postgres: None,
    };

    let stories: Vec<Story> = arguments.story.map_or(Story::ALL.to_vec(), |story| vec![story]);
    if let Some(seed) = arguments.seed {
        let story = stories[0];
        let options = Options { bug: arguments.bug, trace: arguments.trace };
        let outcome = seed::run(story, seed, options, &workshop());
        return match report(story, &outcome, arguments.bug, arguments.trace) {
            true => ExitCode::FAILURE,
            false => ExitCode::SUCCESS,
        };
    }
    let mut good = true;
    for story in &stories {
        good &= tell(*story, &arguments, &workshop);
    }
    if stories.contains(&Story::Gate) && arguments.bug.is_none() {
        good &= on_postgres(&arguments, &helper, &workshop);
    }
    if arguments.bug.is_some() {
        return if good { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    // As the standard harness says it, so that whoever adds tests up counts this one.
    let (word, passed) = if good { ("ok", 1) } else { ("FAILED", 0) };
    println!("test result: {word}. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out", 1 - passed);
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All seeds of one story, and its planted bugs. Whether all is well.
fn tell(story: Story, arguments: &Arguments, workshop: &(impl Fn() -> Workshop + Sync)) -> bool {
    let started = Instant::now();
    let seeds = arguments.seeds.unwrap_or(story.seeds());
    let run = all(story, arguments, arguments.bug, arguments.from..arguments.from + seeds, story.twice(), workshop);
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "simulation, {}: {} seeds in {seconds:.1} s ({:.0} seeds/s), {} failed, hash of all traces {:016x}",
        story.name(),
        run.seeds,
        run.seeds as f64 / seconds,
        run.failed,
        run.hash
    );
    let mut good = run.failed == 0;
    if arguments.bug.is_some() {
        return good;
    }
    let lines = match story {
        Story::Call => run.stats.lines(),
        Story::Gate => run.stats.gate_lines(&run.gate),
    };
    for (line, count) in lines {
        println!("  {count:>9}  {line}");
        if count == 0 && seeds >= story.seeds() {
            println!("             never happened: the simulation does not show what it is for");
            good = false;
        }
    }
    for (name, bug) in story.bugs() {
        let found = all(story, arguments, Some(bug), 0..FIND_WITHIN, 0, workshop);
        match found.first {
            Some((seed, why)) => println!("  planted bug {name}: found at seed {seed}: {why}"),
            None => {
                println!("  planted bug {name}: not found in {FIND_WITHIN} seeds");
                good = false;
            }
        }
    }
    good
}

/// The first stories of the gate once more, with their claims in PostgreSQL. Its server's own threads are no part of the
/// world, so what a seed means there is the same, and its trace need not be.
fn on_postgres(arguments: &Arguments, helper: &tokio::runtime::Runtime, workshop: &impl Fn() -> Workshop) -> bool {
    let Ok(url) = std::env::var("TOLLWAY_TEST_POSTGRES") else {
        println!("simulation, gate on PostgreSQL: TOLLWAY_TEST_POSTGRES names no server: left out");
        return true;
    };
    let started = Instant::now();
    let server = std::sync::Arc::new(helper.block_on(gate::Server::start(&url, arguments.from)));
    let seeds = arguments.seeds.map_or(ON_POSTGRES, |seeds| seeds / 50 + 1);
    let workshop = Workshop { postgres: Some(server.clone()), ..workshop() };
    let options = Options { bug: None, trace: false };
    let failed = (arguments.from..arguments.from + seeds)
        .filter(|seed| report(Story::Gate, &seed::run(Story::Gate, *seed, options, &workshop), None, false))
        .count();
    helper.block_on(server.gone());
    println!(
        "simulation, gate on PostgreSQL: {seeds} seeds in {:.1} s, {failed} failed",
        started.elapsed().as_secs_f64()
    );
    failed == 0
}

fn helper() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

#[derive(Default)]
struct Run {
    seeds: u64,
    failed: u64,
    hash: u64,
    stats: Stats,
    gate: GateStats,
    /// The smallest seed that failed, and why.
    first: Option<(u64, String)>,
}

/// Runs the seeds on all threads. With a planted bug the first failure ends the run.
fn all(
    story: Story,
    arguments: &Arguments,
    bug: Option<Planted>,
    seeds: std::ops::Range<u64>,
    twice: u64,
    workshop: &(impl Fn() -> Workshop + Sync),
) -> Run {
    let (next, found) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let work = || {
        let workshop = workshop();
        let mut outcomes = Vec::new();
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= seeds.end || found.load(Relaxed) {
                return outcomes;
            }
            let options = Options { bug, trace: false };
            let mut outcome = seed::run(story, seed, options, &workshop);
            if seed < twice && outcome.failure.is_none() {
                let again = seed::run(story, seed, options, &workshop);
                if again.hash != outcome.hash {
                    outcome.failure = Some("two runs of this seed differ".into());
                }
            }
            if outcome.failure.is_some() && bug.is_some() {
                found.store(true, Relaxed);
            }
            if bug.is_none() {
                report(story, &outcome, None, false);
            }
            outcome.lines.clear();
            outcomes.push(outcome);
        }
    };
    let mut outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a thread of the run")).collect()
    });
    outcomes.sort_by_key(|outcome| outcome.seed);
    let mut run = Run::default();
    for outcome in outcomes {
        run.seeds += 1;
        run.hash = run.hash.rotate_left(1) ^ outcome.hash;
        run.stats.add(&outcome.stats);
        run.gate.add(&outcome.gate);
        if let Some(why) = outcome.failure {
            run.failed += 1;
            run.first.get_or_insert((outcome.seed, why));
        }
    }
    run
}

/// Prints a failure, and the whole trace where it was asked for. Whether the seed failed.
fn report(story: Story, outcome: &Outcome, bug: Option<Planted>, whole: bool) -> bool {
    if whole || outcome.failure.is_some() {
        outcome.lines.iter().for_each(|line| println!("{line}"));
    }
    let Some(why) = &outcome.failure else {
        if whole {
            println!("seed {} is clean, trace {:016x}", outcome.seed, outcome.hash);
        }
        return false;
    };
    let bugs = story.bugs();
    let bug = bugs.iter().find(|(_, b)| Some(*b) == bug).map(|(name, _)| format!(" --bug {name}")).unwrap_or_default();
    println!("seed {} FAILED: {why}", outcome.seed);
    println!("replay: cargo test --test sim -- --story {} --seed {}{bug} --trace", story.name(), outcome.seed);
    true
}
