//! `tollway init`: write one of the commented examples.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use super::Failure;
use crate::config::profiles;

#[derive(Debug, clap::Args)]
pub struct InitArgs {
    /// local-discovery, hosted-discovery, paying-local, paying-cluster, gate (for tollway gate), or signer (for tollway signer)
    #[arg(default_value = "local-discovery", value_parser = profile)]
    profile: &'static (&'static str, &'static str),
    /// Where to write; `-` is standard output
    #[arg(long, short, default_value = "tollway.yaml", value_name = "FILE")]
    output: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

fn profile(name: &str) -> Result<&'static (&'static str, &'static str), String> {
    let all = || profiles::ALL.iter().chain([&profiles::GATE, &profiles::SIGNER]);
    all().find(|(known, _)| *known == name).ok_or_else(|| {
        let known: Vec<&str> = all().map(|(name, _)| *name).collect();
        format!("no such profile: write one of {}", known.join(", "))
    })
}

pub fn run(args: &InitArgs) -> Result<ExitCode, Failure> {
    let (name, text) = args.profile;
    let shown = args.output.display();
    let check = match *name {
        "signer" => format!("tollway signer --config {shown} --check"),
        _ => format!("tollway check --config {shown}"),
    };
    if args.output.as_os_str() == "-" {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    let mut options = std::fs::OpenOptions::new();
    options.write(true);
    if args.force {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    let written = options.open(&args.output).and_then(|mut file| file.write_all(text.as_bytes()));
    match written {
        Ok(()) => {
            eprintln!("wrote {shown} ({name}); next: {check}");
            Ok(ExitCode::SUCCESS)
        }
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Err(Failure::Usage(format!(
            "{shown} exists: choose another name with --output, or replace it with --force"
        ))),
        Err(e) => Err(Failure::Failed(format!("{shown} cannot be written: {e}"))),
    }
}
