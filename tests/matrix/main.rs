//! Failure at every step: the whole paid call against real processes, with each step failing, hanging or ending the
//! agent server's process; done once, repeated, or raced with its twin; on each ledger; then audited.
//!
//! `cargo test --test matrix` runs a part that has every step in every kind; `-- --all` runs the whole; `-- --case NAME`
//! runs one case; `-- --steps WORD` the steps whose name has the word.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_macros,
    reason = "real processes and real sockets, outside the simulation"
)]

mod agent;
mod answer;
mod audit;
mod case;
mod faults;
mod plan;
mod proxy;
mod stage;
mod store;
mod table;

use std::process::ExitCode;
use std::time::Instant;

use futures_util::stream::{self, StreamExt as _};

use plan::Case;

/// They wait more than they work.
const AT_ONCE: usize = 20;

fn main() -> ExitCode {
    if let Ok(config) = std::env::var(agent::VARIABLE) {
        agent::run(&config);
        return ExitCode::SUCCESS;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| arguments.iter().position(|a| a == name).and_then(|at| arguments.get(at + 1)).cloned();
    if arguments.iter().any(|argument| argument == "--list") {
        println!("the_matrix: test");
        return ExitCode::SUCCESS;
    }
    let flags = ["--all", "--case", "--steps", "--quiet", "-q", "--nocapture", "--show-output", "--exact"];
    let named = [value("--case"), value("--steps"), value("--test-threads"), value("--color"), value("--format")];
    let stray = |argument: &&String| !argument.starts_with('-') && !named.contains(&Some((*argument).clone()));
    // `cargo test WORD` gives the word to every test binary.
    if arguments.iter().find(stray).is_some_and(|word| !"the_matrix".contains(word.as_str())) {
        println!("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out");
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = arguments.iter().find(|a| {
        a.starts_with("--")
            && !flags.contains(&a.as_str())
            && !["--test-threads", "--color", "--format"].contains(&a.as_str())
    }) {
        eprintln!("unknown option {unknown}");
        return ExitCode::from(2);
    }
    let all = arguments.iter().any(|argument| argument == "--all");
    let stores = store::available();
    let cases = plan::shown(&stores).into_iter().chain(plan::all(&stores));
    let by_default = |case: &Case| case.shows.is_some() || plan::covering(case, table::row_of(case));
    let cases: Vec<Case> = match (value("--case"), value("--steps")) {
        (Some(name), _) => cases.filter(|case| case.name() == name).collect(),
        (None, Some(word)) => cases.filter(|case| case.name().contains(&word)).collect(),
        (None, None) => cases.filter(|case| all || by_default(case)).collect(),
    };
    if cases.is_empty() {
        eprintln!("there is no such case");
        return ExitCode::from(2);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(run(cases))
}

async fn run(cases: Vec<Case>) -> ExitCode {
    let started = Instant::now();
    let mut results = table::Results::new();
    let mut running = stream::iter(cases.into_iter().map(|case| async move {
        // In a task of its own, so that a panic is the end of one case only.
        let ended = tokio::spawn(case::run(case)).await;
        (case, ended.unwrap_or_else(|panic| Err(format!("panicked: {panic}"))))
    }))
    .buffer_unordered(AT_ONCE);
    let (mut failed, mut shown, mut ended) = (Vec::new(), Vec::new(), 0);
    while let Some((case, result)) = running.next().await {
        if let Err(problem) = &result {
            println!("FAIL {}\n  {problem}", case.name());
            failed.push(case.name());
        }
        ended += 1;
        if let Some(promise) = case.shows {
            let key = if case.keyed { "with a key" } else { "without a key" };
            let word = if result.is_ok() { "ok" } else { "FAILED" };
            shown.push(format!("test {} ({key}, {}) ... {word}", promise.name, case.store.as_str()));
            continue;
        }
        results.insert((case.store, table::row_of(&case), case.kind, case.mode), result);
    }
    table::print(&results);
    shown.sort();
    println!("\n{}", shown.join("\n"));
    let word = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "test result: {word}. {} passed; {} failed; 0 ignored; finished in {:.1}s",
        ended - failed.len(),
        failed.len(),
        started.elapsed().as_secs_f64()
    );
    failed.sort();
    for name in &failed {
        println!("run it alone: cargo test --test matrix -- --case {name}");
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
