//! The `tollway` program: what `TOLLWAY_BIN` names, else built by cargo, in the profile and the directory of this one.

use std::path::PathBuf;

use tokio::process::Command;

use crate::report::{Doing as _, Result, Stopped};

pub async fn tollway() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("TOLLWAY_BIN") {
        return Ok(named.into());
    }
    let ours = std::env::current_exe().doing("this program's path")?;
    let mut beside = ours.parent().map(PathBuf::from).unwrap_or_default();
    if beside.ends_with("deps") {
        beside.pop();
    }
    let target = beside.parent().map(PathBuf::from).unwrap_or_default();
    let built = beside.join("tollway");
    eprintln!("building tollway");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    cargo.args(["build", "--quiet", "--locked", "--package", "tollway", "--bin", "tollway"]);
    cargo.arg("--target-dir").arg(&target);
    if beside.ends_with("release") {
        cargo.arg("--release");
    }
    match cargo.status().await {
        Ok(done) if done.success() => Ok(built),
        // An installed pair needs no toolchain.
        Err(_) if built.exists() => Ok(built),
        Ok(done) => Err(Stopped(format!("building tollway: {done}"))),
        Err(error) => Err(Stopped(format!("tollway is not beside this program, and cargo cannot be run: {error}"))),
    }
}
