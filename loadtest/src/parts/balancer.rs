//! The load balancer in front: haproxy where it is installed, else a round robin of our own. Both ask each replica for
//! its health and send nobody to one that does not answer.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use super::process::{Process, Signal, free_port};
use super::replica::Ports;
use crate::report::{Doing as _, Result, Stopped};

const EVERY: Duration = Duration::from_millis(200);
const CHECK: Duration = Duration::from_millis(400);

pub struct Balancer {
    pub port: u16,
    /// `haproxy` or `round robin`.
    pub kind: &'static str,
    _haproxy: Option<Process>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl Balancer {
    pub async fn start(replicas: &[Ports], dir: &Path) -> Result<Balancer> {
        let haproxy = ["/usr/sbin/haproxy", "/usr/local/sbin/haproxy", "/usr/bin/haproxy"];
        match haproxy.into_iter().find(|path| Path::new(path).exists()) {
            Some(program) => Balancer::haproxy(program, replicas, dir).await,
            None => Balancer::ours(replicas).await,
        }
    }

    async fn haproxy(program: &str, replicas: &[Ports], dir: &Path) -> Result<Balancer> {
        let port = free_port()?;
        let mut file = format!(
            "global\n    maxconn 4000\ndefaults\n    mode http\n    timeout connect 1s\n    timeout client 60s\n    \
             timeout server 60s\n    timeout check {check}\n    retries 2\n    option redispatch 1\n    \
             retry-on conn-failure\nfrontend agents\n    bind 127.0.0.1:{port}\n    default_backend replicas\n\
             backend replicas\n    balance roundrobin\n    option httpchk GET /readyz\n    \
             http-check send hdr Host localhost\n    default-server inter {every} fall 2 rise 1\n",
            check = CHECK.as_millis(),
            every = EVERY.as_millis(),
        );
        for (n, replica) in replicas.iter().enumerate() {
            file.push_str(&format!(
                "    server replica-{n} 127.0.0.1:{} check port {}\n",
                replica.agents, replica.probe
            ));
        }
        let path = dir.join("haproxy.cfg");
        std::fs::write(&path, file).doing("haproxy's configuration")?;
        let log = std::fs::File::create(dir.join("haproxy.log")).doing("haproxy's log")?;
        let mut command = Command::new(program);
        command.arg("-db").arg("-f").arg(&path).stdout(log.try_clone().doing("haproxy's log")?).stderr(log);
        let mut process = Process::start("haproxy", &mut command, Signal::Kill)?;
        for _ in 0..200 {
            if !process.runs() {
                let log = std::fs::read_to_string(dir.join("haproxy.log")).unwrap_or_default();
                return Err(Stopped(format!("haproxy does not start: {log}")));
            }
            if TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
                return Ok(Balancer { port, kind: "haproxy", _haproxy: Some(process), tasks: Vec::new() });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(Stopped("haproxy does not listen".into()))
    }

    async fn ours(replicas: &[Ports]) -> Result<Balancer> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.doing("the balancer")?;
        let port = listener.local_addr().doing("the balancer")?.port();
        let up: Arc<Vec<(Ports, AtomicBool)>> =
            Arc::new(replicas.iter().map(|ports| (*ports, AtomicBool::new(true))).collect());
        let mut tasks = Vec::new();
        for n in 0..replicas.len() {
            let up = up.clone();
            tasks.push(tokio::spawn(async move {
                let mut misses = 0;
                loop {
                    let (ports, state) = &up[n];
                    misses = if healthy(ports.probe, CHECK).await { 0 } else { misses + 1 };
                    state.store(misses < 2, Ordering::SeqCst);
                    tokio::time::sleep(EVERY).await;
                }
            }));
        }
        tasks.push(tokio::spawn(async move {
            let turn = Arc::new(AtomicUsize::new(0));
            loop {
                let Ok((near, _)) = listener.accept().await else { continue };
                tokio::spawn(forward(near, up.clone(), turn.clone()));
            }
        }));
        Ok(Balancer { port, kind: "round robin", _haproxy: None, tasks })
    }

    /// Where agents go.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mcp", self.port)
    }
}

/// The connection goes to the next replica that is up; one that refuses it was never asked anything.
async fn forward(mut near: TcpStream, up: Arc<Vec<(Ports, AtomicBool)>>, turn: Arc<AtomicUsize>) {
    let first = turn.fetch_add(1, Ordering::Relaxed);
    for n in 0..up.len() {
        let (ports, state) = &up[(first + n) % up.len()];
        if !state.load(Ordering::SeqCst) {
            continue;
        }
        if let Ok(Ok(mut far)) = tokio::time::timeout(CHECK, TcpStream::connect(("127.0.0.1", ports.agents))).await {
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let _ = copy_bidirectional(&mut near, &mut far).await;
            return;
        }
    }
}

/// Whether `GET /readyz` is 200: of a replica, at its probe port.
pub async fn healthy(port: u16, within: Duration) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.ok()?;
        let mut start = [0; 12];
        stream.read_exact(&mut start).await.ok()?;
        Some(&start == b"HTTP/1.1 200")
    };
    matches!(tokio::time::timeout(within, asked).await, Ok(Some(true)))
}
