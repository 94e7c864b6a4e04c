//! What a scenario says at its end: one JSON object, for a machine to read, and an exit code.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::Value;

/// The last line of standard output.
#[derive(Debug, Serialize)]
pub struct Report {
    pub scenario: &'static str,
    /// The scenario's bar holds.
    pub pass: bool,
    /// What was counted or measured; the promises that did not hold stand under `broken`.
    pub figures: Value,
    /// What the figures are held against, from the same run; `null` where nothing is compared.
    pub baseline: Value,
    /// The one number that the bar is about; `null` where the bar is a list of promises.
    pub ratio: Option<f64>,
}

impl Report {
    /// Of a scenario that keeps promises: it passes if none is broken.
    pub fn of_promises(scenario: &'static str, mut figures: Value, broken: &[String]) -> Report {
        figures["broken"] = serde_json::json!(broken);
        Report { scenario, pass: broken.is_empty(), figures, baseline: Value::Null, ratio: None }
    }

    pub fn print(&self) -> ExitCode {
        println!("{}", serde_json::to_string(self).expect("a report is JSON"));
        if self.pass { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// A scenario that could not be played to its end: one sentence. It passes nothing.
#[derive(Debug)]
pub struct Stopped(pub String);

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

pub type Result<T, E = Stopped> = std::result::Result<T, E>;

/// Says what could not be done.
pub trait Doing<T> {
    fn doing(self, what: &str) -> Result<T>;
}

impl<T, E: Into<Box<dyn std::error::Error>>> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|error| {
            let error = error.into();
            // A database's own words stand in the source.
            let sources = std::iter::successors(error.source(), |error| error.source());
            Stopped(sources.fold(format!("{what}: {error}"), |said, source| format!("{said}: {source}")))
        })
    }
}

/// The middle of what was measured.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
