//! PostgreSQL of one's own: a directory, a port on loopback, an unprivileged user when root starts it; durable (`fsync`
//! is on, unlike in the tests). A standby follows its primary synchronously: what was acknowledged survives a fail-over.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;
use tokio_postgres::NoTls;

use super::process::{Process, Signal, free_port};
use crate::report::{Doing as _, Result, Stopped};

/// How long a server may take to start, stop or be promoted.
const PATIENCE: Duration = Duration::from_secs(60);
const USER: &str = "tollway";

pub struct Postgres {
    pub port: u16,
    bin: PathBuf,
    owner: Option<Owner>,
    process: Option<Process>,
    /// `-c name=value` of every start.
    settings: Vec<String>,
    dir: tempfile::TempDir,
}

/// Whom the server runs as; `None` where we are nobody special ourselves.
#[derive(Debug, Clone, Copy)]
struct Owner {
    uid: u32,
    gid: u32,
}

impl Postgres {
    /// A new, empty server that listens. `settings` are added to ours: `shared_buffers=256MB`.
    pub async fn start(settings: &[&str]) -> Result<Postgres> {
        let bin = bin()?;
        let owner = owner()?;
        let dir = directory(owner)?;
        let settings = settings.iter().map(|s| (*s).to_owned()).collect();
        let mut server = Postgres { port: free_port()?, bin, owner, process: None, settings, dir };
        let data = server.data();
        server.run("initdb", &["-D", &data, "-U", USER, "-A", "trust", "--no-instructions", "-E", "UTF8"]).await?;
        server.launch().await?;
        Ok(server)
    }

    /// So many WAL files (16 MB each) are there to be written again, as on a server that has run for hours; `min_wal_size`
    /// has to allow them. A new server makes one whenever the last is full, and every commit waits for its 16 MB of zeros.
    pub async fn used_wal(&self, files: u32) -> Result<()> {
        let client = self.client().await?;
        for _ in 0..files {
            client.batch_execute("SELECT pg_current_xact_id(); SELECT pg_switch_wal()").await.doing("pg_switch_wal")?;
        }
        client.batch_execute("CHECKPOINT").await.doing("CHECKPOINT")
    }

    /// A standby of this server, in step with it. From the moment this returns, a commit waits for both.
    pub async fn standby(&self) -> Result<Postgres> {
        let dir = directory(self.owner)?;
        let mut standby = Postgres {
            port: free_port()?,
            bin: self.bin.clone(),
            owner: self.owner,
            process: None,
            settings: self.settings.clone(),
            dir,
        };
        let from = format!("host=127.0.0.1 port={} user={USER} application_name=standby", self.port);
        standby.run("pg_basebackup", &["-D", &standby.data(), "-R", "-X", "stream", "-c", "fast", "-d", &from]).await?;
        standby.launch().await?;
        self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'").await?;
        self.execute("SELECT pg_reload_conf()").await?;
        let in_step = "SELECT count(*)::int FROM pg_stat_replication WHERE sync_state = 'sync'";
        for _ in 0..600 {
            if self.number(in_step).await? == 1 {
                return Ok(standby);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(Stopped("PostgreSQL: the standby does not get in step".into()))
    }

    /// Makes a standby the primary. It waits for no other standby.
    pub async fn promote(&mut self) -> Result<()> {
        self.run("pg_ctl", &["-D", &self.data(), "promote", "-w", "-t", "60"]).await
    }

    /// Ends at once, as a machine does whose power is cut.
    pub async fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.signal(Signal::Kill)?;
            process.gone(PATIENCE).await?;
        }
        Ok(())
    }

    /// SIGSTOP and SIGCONT reach the first process only: what is connected goes on, what connects waits.
    pub fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    /// For `DATABASE_URL`.
    pub fn url(&self) -> String {
        format!("postgresql://{USER}@127.0.0.1:{}/postgres", self.port)
    }

    /// The directory of its socket and its log, removed with the server.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A connection of one's own; its task ends with the client.
    pub async fn client(&self) -> Result<tokio_postgres::Client> {
        connect(&self.url()).await
    }

    pub async fn execute(&self, sql: &str) -> Result<()> {
        self.client().await?.batch_execute(sql).await.doing(sql)
    }

    async fn number(&self, sql: &str) -> Result<i32> {
        Ok(self.client().await?.query_one(sql, &[]).await.doing(sql)?.get(0))
    }

    fn data(&self) -> String {
        self.dir.path().join("data").display().to_string()
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command.current_dir(self.dir.path()).env("HOME", self.dir.path());
        if let Some(owner) = self.owner {
            command.uid(owner.uid).gid(owner.gid);
        }
        command
    }

    async fn run(&self, program: &str, arguments: &[&str]) -> Result<()> {
        let done = self.command(program).args(arguments).output().await.doing(program)?;
        if done.status.success() {
            return Ok(());
        }
        Err(Stopped(format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim())))
    }

    async fn launch(&mut self) -> Result<()> {
        let log = std::fs::File::create(self.dir.path().join("log")).doing("PostgreSQL's log")?;
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).arg("-p").arg(self.port.to_string());
        let sockets = format!("unix_socket_directories={}", self.dir.path().display());
        let ours = ["listen_addresses=127.0.0.1", &sockets, "max_connections=300", "fsync=on", "max_wal_senders=5"];
        for setting in ours.into_iter().chain(self.settings.iter().map(String::as_str)) {
            command.arg("-c").arg(setting);
        }
        command.stdout(log.try_clone().doing("PostgreSQL's log")?).stderr(log);
        self.process = Some(Process::start("postgres", &mut command, Signal::Quit)?);
        let started = tokio::time::Instant::now();
        loop {
            if self.client().await.is_ok() {
                return Ok(());
            }
            if !self.process.as_mut().is_some_and(Process::runs) || started.elapsed() > PATIENCE {
                let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                return Err(Stopped(format!("PostgreSQL does not start: {log}")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// To any server, by its URL.
pub async fn connect(url: &str) -> Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.doing("PostgreSQL")?;
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(client)
}

fn bin() -> Result<PathBuf> {
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&on_path).collect();
    for (base, rest) in [("/usr/lib/postgresql", "bin"), ("/usr", "bin")] {
        let found = std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut found: Vec<_> = found.filter(|path| base != "/usr" || named(path, "pgsql-")).collect();
        found.sort();
        places.extend(found.into_iter().rev().map(|path| path.join(rest)));
    }
    // Not a link: the server looks for its files beside its program.
    let real = places.iter().filter_map(|place| place.join("initdb").canonicalize().ok());
    let beside = real.filter_map(|program| program.parent().map(Path::to_owned));
    let mut whole = beside.filter(|bin| bin.join("postgres").exists());
    whole.next().ok_or_else(|| Stopped("PostgreSQL is missing: install the package postgresql".into()))
}

fn named(path: &Path, start: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
}

/// PostgreSQL refuses to run as root.
fn owner() -> Result<Option<Owner>> {
    if id(&["-u"])? != 0 {
        return Ok(None);
    }
    let user = if id(&["-u", "postgres"]).is_ok() { "postgres" } else { "nobody" };
    Ok(Some(Owner { uid: id(&["-u", user])?, gid: id(&["-g", user])? }))
}

fn id(arguments: &[&str]) -> Result<u32> {
    let told = std::process::Command::new("id").args(arguments).output().doing("id")?;
    String::from_utf8_lossy(&told.stdout).trim().parse().doing("id")
}

fn directory(owner: Option<Owner>) -> Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("tollway-pg-").tempdir().doing("a directory")?;
    if let Some(owner) = owner {
        std::os::unix::fs::chown(dir.path(), Some(owner.uid), Some(owner.gid)).doing("a directory")?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What everything above rests on: the standby has what was committed a moment before the primary died.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_promoted_standby_has_every_commit() {
        let mut primary = Postgres::start(&[]).await.unwrap();
        primary.execute("CREATE TABLE t (n int)").await.unwrap();
        let mut standby = primary.standby().await.unwrap();
        primary.execute("INSERT INTO t VALUES (7)").await.unwrap();
        primary.kill().await.unwrap();
        standby.promote().await.unwrap();
        assert_eq!(standby.number("SELECT n FROM t").await.unwrap(), 7);
        standby.execute("INSERT INTO t VALUES (8)").await.unwrap();
    }
}
