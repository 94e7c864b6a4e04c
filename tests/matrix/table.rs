//! The printed table: a line per step, a column per kind and mode, the ledgers one below the other.

use std::collections::BTreeMap;

use super::case::Tally;
use super::plan::{Case, Kind, Mode, STEPS};
use super::store::Store;

/// By ledger, step's row, kind, mode.
pub type Results = BTreeMap<(Store, usize, Kind, Mode), Result<Tally, String>>;

pub fn row_of(case: &Case) -> usize {
    STEPS.iter().position(|step| step.name == case.step.name).unwrap_or(0)
}

/// Each cell: payments/transfers, or FAIL; `.` was not run.
pub fn print(results: &Results) {
    let stores: std::collections::BTreeSet<_> = results.keys().map(|key| key.0).collect();
    let width = STEPS.iter().map(|step| step.name.len()).max().unwrap_or(0);
    for store in stores {
        println!("\n{} (payments/transfers of each case; . was not run)", store.as_str());
        let mut head = format!("{:width$}", "step");
        for kind in Kind::ALL {
            for mode in Mode::ALL {
                head.push_str(&format!("  {:>11}", format!("{} {}", kind.as_str(), mode.as_str())));
            }
        }
        println!("{head}");
        for (row, step) in STEPS.iter().enumerate() {
            let mut line = format!("{:width$}", step.name);
            let mut any = false;
            for kind in Kind::ALL {
                for mode in Mode::ALL {
                    let cell = match results.get(&(store, row, kind, mode)) {
                        None => ".".into(),
                        Some(Ok(tally)) => format!("{}/{}", tally.rows, tally.transfers),
                        Some(Err(_)) => "FAIL".into(),
                    };
                    any |= cell != ".";
                    line.push_str(&format!("  {cell:>11}"));
                }
            }
            if any {
                println!("{line}");
            }
        }
    }
    let good = results.values().filter_map(|result| result.as_ref().ok());
    let (cases, rows, transfers) =
        good.fold((0, 0, 0), |sum, tally| (sum.0 + 1, sum.1 + tally.rows, sum.2 + tally.transfers));
    println!(
        "\n{} cases, {cases} clean: {rows} payments, {transfers} transfers, each matched; caps, counters, reasons and \
         final states audited",
        results.len()
    );
}
