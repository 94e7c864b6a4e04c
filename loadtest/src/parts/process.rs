//! A process of ours: ended by its id, never by its name, and never left behind.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};

use crate::report::{Doing as _, Result, Stopped};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Asks for an orderly end.
    Term,
    /// PostgreSQL's immediate shutdown.
    Quit,
    Kill,
    Stop,
    Continue,
}

pub struct Process {
    pub name: String,
    child: Child,
    /// Sent when this is dropped.
    last: Signal,
}

impl Process {
    /// `last` is how it is ended when nobody ends it before.
    pub fn start(name: &str, command: &mut Command, last: Signal) -> Result<Process> {
        let child = command.stdin(Stdio::null()).spawn().doing(name)?;
        Ok(Process { name: name.to_owned(), child, last })
    }

    /// `None` when it is gone.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.pid().ok_or_else(|| Stopped(format!("{}: it is gone", self.name)))?;
        send(pid, signal).doing(&self.name)
    }

    /// Waits until it is gone; its exit code, if it had one.
    pub async fn gone(&mut self, within: Duration) -> Result<Option<i32>> {
        let ended = tokio::time::timeout(within, self.child.wait()).await;
        let ended = ended.map_err(|_| Stopped(format!("{}: it does not end within {within:?}", self.name)))?;
        Ok(ended.doing(&self.name)?.code())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.runs() {
            return;
        }
        if let Some(pid) = self.pid() {
            // A stopped process would never see the other.
            let _ = send(pid, Signal::Continue);
            let _ = send(pid, self.last);
            for _ in 0..200 {
                if !self.runs() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(25));
            }
            let _ = self.child.start_kill();
        }
    }
}

/// By the shell's own `kill`, which every machine has.
fn send(pid: u32, signal: Signal) -> std::io::Result<()> {
    let name = match signal {
        Signal::Term => "TERM",
        Signal::Quit => "QUIT",
        Signal::Kill => "KILL",
        Signal::Stop => "STOP",
        Signal::Continue => "CONT",
    };
    let status = std::process::Command::new("/bin/sh")
        .args(["-c", &format!("kill -{name} {pid}")])
        .stderr(Stdio::null())
        .status()?;
    if status.success() { Ok(()) } else { Err(std::io::Error::other(format!("SIG{name} did not arrive"))) }
}

/// A port that was free a moment ago.
pub fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).doing("a free port")?;
    Ok(listener.local_addr().doing("a free port")?.port())
}
