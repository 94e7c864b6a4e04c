//! `tollway keystore`: the file of `signer.mode: encrypted-key`. A seed comes from a prompt or from standard input, never
//! from an argument, which every process of the machine could read.

use std::io::{self, IsTerminal as _, Read as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;
use zeroize::Zeroizing;

use super::Failure;
use crate::config::KEYSTORE_KEY_ENV;
use crate::ports::World;
use crate::signer::keystore::{Keystore, KeystoreError, KeystoreKey, Seed};

/// A seed has 56 characters.
const MAX_INPUT: u64 = 1024;

#[derive(Debug, Subcommand)]
pub enum KeystoreCommand {
    /// Encrypt a Stellar secret seed into a new file
    Create(CreateArgs),
    /// Show whose key a file holds; the key that opens it is not needed
    Show(ShowArgs),
}

const CREATE_HELP: &str = "The seed (S…) is asked for on the terminal, or read from standard input where that is no \
terminal. It is no argument: every process of the machine can read arguments.

  export TOLLWAY_KEYSTORE_KEY=$(openssl rand -hex 32)     keep it apart from the file: a secret manager
  tollway keystore create --out keystore.json             asks for the seed
  vault read -field=seed … | tollway keystore create --out keystore.json
  tollway keystore create --out keystore.json --generate  a new seed; fund its address before it can pay

Then, in the configuration:

  signer:
    mode: encrypted-key
    keystore_path: /etc/tollway/keystore.json
    encryption_key_env: TOLLWAY_KEYSTORE_KEY

A generated seed exists in this file alone: without file and key the money of its address is lost.";

#[derive(Debug, Args)]
#[command(after_help = CREATE_HELP)]
pub struct CreateArgs {
    /// The file to make, with mode 0600; one that exists is never overwritten
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
    /// The environment variable with the 32-byte key (64 hex digits, or base64)
    #[arg(long, value_name = "NAME", default_value = KEYSTORE_KEY_ENV)]
    key_env: String,
    /// A seed that somebody typed here is refused in our words: the parser's would repeat it.
    #[arg(hide = true)]
    typed: Vec<std::ffi::OsString>,
    /// Make a new seed instead of asking for one; only its address is shown
    #[arg(long)]
    generate: bool,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(command: &KeystoreCommand, world: &World) -> Result<ExitCode, Failure> {
    match command {
        KeystoreCommand::Create(args) => create(args, world),
        KeystoreCommand::Show(args) => show(args),
    }
}

fn create(args: &CreateArgs, world: &World) -> Result<ExitCode, Failure> {
    if !args.typed.is_empty() {
        let sentence = "a seed is no argument, because every process of the machine and the shell's history see \
                        arguments: give it on standard input or when asked, and do not pay with one that was typed here";
        return Err(Failure::Usage(sentence.into()));
    }
    let shown = args.out.display();
    let exists = || Failure::Usage(format!("{shown} exists, and a keystore is never overwritten: choose another name"));
    // Before anybody types a seed; whether it was made meanwhile is decided when it is written.
    if args.out.symlink_metadata().is_ok() {
        return Err(exists());
    }
    // A directory that nobody made is a slip of the pen, and a key in it would be looked for elsewhere.
    let parent = args.out.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        let parent = parent.display();
        return Err(Failure::Usage(format!("there is no directory {parent}: make it first (mkdir -m 700 {parent})")));
    }
    let name = &args.key_env;
    let key = std::env::var(name).ok().filter(|key| !key.trim().is_empty()).map(Zeroizing::new);
    let key = key.ok_or_else(|| {
        Failure::Usage(format!(
            "the environment variable {name} is not set: make a key with `openssl rand -hex 32`, keep it apart from the \
             file, and export it as {name}"
        ))
    })?;
    let key = KeystoreKey::parse(&key).map_err(|e| Failure::Usage(format!("the environment variable {name} {e}")))?;
    if key.is_one_byte() {
        return Err(Failure::Usage(format!(
            "the environment variable {name} holds one byte 32 times, which anybody guesses: openssl rand -hex 32"
        )));
    }
    let seed = if args.generate {
        Seed::generate(world)
    } else {
        let given = ask()?;
        if given.trim().is_empty() {
            let ways = "give the seed (S…) on standard input or when asked, or make a new one with --generate";
            return Err(Failure::Usage(format!("no seed was given: {ways}")));
        }
        Seed::parse(&given).map_err(|e| Failure::Usage(format!("what was given {e}")))?
    };
    Keystore::seal(world, &seed, &key).write(world, &args.out).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => exists(),
        _ => Failure::Failed(format!("{shown} cannot be written: {error}")),
    })?;
    // What cannot be opened again must not be relied on.
    let address = Keystore::read(&args.out)
        .and_then(|keystore| keystore.open(&key))
        .map_err(|e| Failure::Failed(format!("{shown} was written and cannot be opened again: {e}")))?
        .address();
    if args.json {
        say!("{}", json!({"address": address, "keystore": args.out.display().to_string()}));
    } else {
        say!("{address}");
        eprintln!("wrote {shown}; next: signer: {{mode: encrypted-key, keystore_path: …, encryption_key_env: {name}}}");
    }
    Ok(ExitCode::SUCCESS)
}

fn show(args: &ShowArgs) -> Result<ExitCode, Failure> {
    let keystore = Keystore::read(&args.file).map_err(|error| match error {
        KeystoreError::File(error) => Failure::Failed(error.to_string()),
        error => Failure::Failed(format!("{}: {error}", args.file.display())),
    })?;
    if args.json {
        say!("{}", json!({"address": keystore.address(), "keystore": args.file.display().to_string()}));
    } else {
        say!("{}", keystore.address());
    }
    Ok(ExitCode::SUCCESS)
}

/// The seed, from whoever is there.
fn ask() -> Result<Zeroizing<String>, Failure> {
    let mut stdin = io::stdin();
    let read = if stdin.is_terminal() {
        rpassword::prompt_password("Stellar secret seed (S…, not shown): ").map(Zeroizing::new)
    } else {
        let mut text = Zeroizing::new(String::with_capacity(MAX_INPUT as usize + 1));
        io::Read::by_ref(&mut stdin).take(MAX_INPUT).read_to_string(&mut text).map(|_| text)
    };
    read.map_err(|error| Failure::Failed(format!("the seed cannot be read: {error}")))
}
