//! Parses the command line, sets up tracing, runs one role.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    tollway::cli::main()
}
