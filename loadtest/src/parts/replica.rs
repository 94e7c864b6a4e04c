//! One replica: a `tollway serve` process with its own configuration file, on its own lines to database, chain,
//! facilitator and signer. Killed, frozen and started again as often as a scenario wants.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::line::{Cable, Line};
use super::process::{Process, Signal};
use crate::report::{Doing as _, Result, Stopped};

const STARTS_WITHIN: Duration = Duration::from_secs(60);

pub struct Replica {
    pub name: String,
    pub ports: Ports,
    pub lines: Lines,
    program: PathBuf,
    dir: PathBuf,
    environment: Vec<(String, String)>,
    process: Option<Process>,
    frozen: bool,
}

#[derive(Debug, Clone, Copy)]
pub struct Ports {
    /// Of agents.
    pub agents: u16,
    /// Of whoever asks whether it is ready.
    pub probe: u16,
    /// Of the other replicas: messages of streams that are here (`http.legacy_sse`).
    pub relay: u16,
}

/// By what a replica reaches the others.
pub struct Lines {
    /// In the order of the hosts in its database URL.
    pub databases: Vec<Line>,
    pub rpc: Line,
    pub facilitator: Line,
    pub signer: Line,
}

impl Lines {
    /// All of them: the process is alone.
    pub fn set(&self, cable: Cable) {
        let others = [&self.rpc, &self.facilitator, &self.signer];
        self.databases.iter().chain(others).for_each(|line| line.set(cable));
    }
}

impl Replica {
    /// It does not run yet. `configuration` is its file's text.
    pub fn new(
        name: &str,
        ports: Ports,
        program: &Path,
        dir: &Path,
        configuration: &str,
        environment: Vec<(String, String)>,
        lines: Lines,
    ) -> Result<Replica> {
        let replica = Replica {
            name: name.to_owned(),
            ports,
            lines,
            program: program.to_owned(),
            dir: dir.to_owned(),
            environment,
            process: None,
            frozen: false,
        };
        std::fs::write(replica.file(), configuration).doing("a configuration file")?;
        Ok(replica)
    }

    fn file(&self) -> PathBuf {
        self.dir.join(format!("{}.yaml", self.name))
    }

    fn log(&self) -> PathBuf {
        self.dir.join(format!("{}.log", self.name))
    }

    /// `tollway` with this replica's file and environment.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", &self.dir).envs(self.environment.iter().cloned());
        command.arg("--config").arg(self.file()).args(arguments);
        command
    }

    /// An operator's command; its standard output, if it ends with 0.
    pub async fn operate(&self, arguments: &[&str]) -> Result<String> {
        let done = self.command(arguments).stdin(Stdio::null()).output().await.doing("tollway")?;
        let (said, problem) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        if done.status.success() {
            return Ok(said.into_owned());
        }
        Err(Stopped(format!("tollway {}: {} {}", arguments.join(" "), problem.trim(), said.trim())))
    }

    /// The process, without waiting until it serves.
    pub fn launch(&mut self) -> Result<()> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log()).doing("a log")?;
        let mut command = self.command(&["serve"]);
        command.stdout(log.try_clone().doing("a log")?).stderr(log);
        self.process = Some(Process::start(&self.name, &mut command, Signal::Kill)?);
        self.frozen = false;
        Ok(())
    }

    pub async fn start(&mut self) -> Result<()> {
        self.launch()?;
        self.serves().await
    }

    /// Waits until it answers.
    pub async fn serves(&mut self) -> Result<()> {
        let started = tokio::time::Instant::now();
        while !super::balancer::healthy(self.ports.probe, Duration::from_millis(500)).await {
            if !self.runs() || started.elapsed() > STARTS_WITHIN {
                return Err(Stopped(format!("{} does not start: {}", self.name, self.tail())));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    pub fn runs(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::runs)
    }

    /// `None` when it does not run.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().and_then(Process::pid)
    }

    pub fn frozen(&self) -> bool {
        self.frozen
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.process.as_ref().ok_or_else(|| Stopped(format!("{} does not run", self.name)))?.signal(signal)
    }

    /// SIGKILL: nothing of it runs any more when this returns.
    pub async fn kill(&mut self) -> Result<()> {
        self.frozen = false;
        let Some(mut process) = self.process.take() else { return Ok(()) };
        if process.runs() {
            process.signal(Signal::Kill)?;
        }
        process.gone(Duration::from_secs(10)).await.map(|_| ())
    }

    pub fn freeze(&mut self) -> Result<()> {
        self.frozen = true;
        self.signal(Signal::Stop)
    }

    pub fn thaw(&mut self) -> Result<()> {
        self.frozen = false;
        self.signal(Signal::Continue)
    }

    /// SIGTERM, until it is gone; its exit code.
    pub async fn terminate(&mut self, within: Duration) -> Result<Option<i32>> {
        self.signal(Signal::Term)?;
        let Some(mut process) = self.process.take() else { return Ok(None) };
        process.gone(within).await
    }

    /// The last lines of what it said.
    pub fn tail(&self) -> String {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// What it said with these words in it.
    pub fn said(&self, words: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        text.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
    }
}
