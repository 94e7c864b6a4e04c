//! What the gate costs: of a free call beside a bare hyper reverse proxy, and of a paid one beside the three exchanges that
//! a sale consists of (`free`, `paid`). Gate, upstream, proxy and facilitator are processes of their own.

mod free;
mod paid;

use std::path::Path;
use std::process::Stdio;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::parts::binary;
use crate::report::{Doing as _, Report, Result, Stopped};

#[derive(clap::Args)]
pub struct Args {
    /// One of the two parts alone
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Free calls: alternating rounds; the median of their ratios counts
    #[arg(long, default_value_t = 5)]
    rounds: u64,
    /// Free calls: how long each part of a round takes
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Free calls: callers at once, each with a call after the other
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// Free calls: the gate takes at most this many times the CPU of the bare proxy
    #[arg(long, default_value_t = 2.0)]
    bar: f64,
    /// Paid calls: how many, one after the other
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(20..=5_000))]
    paid_calls: u32,
    /// Paid calls: milliseconds that the gate may take for its own part, in the median
    #[arg(long, default_value_t = 1.5)]
    paid_bar: f64,
    /// Of a process that another one started: be the bare proxy in front of this URL
    #[arg(long, hide = true)]
    bare: Option<String>,
    /// Of a process that another one started: be the upstream
    #[arg(long, hide = true)]
    upstream: bool,
    /// Of a process that another one started: be a facilitator that says yes at once
    #[arg(long, hide = true)]
    facilitator: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Free,
    Paid,
}

pub async fn run(args: Args) -> Result<Report> {
    if let Some(url) = &args.bare {
        return free::bare(url).await;
    }
    if args.upstream {
        return upstream().await;
    }
    if args.facilitator {
        return paid::facilitator().await;
    }
    let free = match args.only {
        Some(Part::Paid) => None,
        _ => Some(free::run(&args).await?),
    };
    let paid = match args.only {
        Some(Part::Free) => None,
        _ => Some(paid::run(&args).await?),
    };
    let parts = || [&free, &paid].into_iter().flatten();
    let of = |figures: fn(&Figures) -> &Value| json!({"free": free.as_ref().map(figures), "paid": paid.as_ref().map(figures)});
    Ok(Report {
        scenario: "gate",
        pass: parts().all(|part| part.holds),
        figures: of(|part| &part.measured),
        baseline: of(|part| &part.baseline),
        ratio: free.as_ref().and_then(|free| free.ratio),
    })
}

/// What one part found.
struct Figures {
    holds: bool,
    measured: Value,
    baseline: Value,
    ratio: Option<f64>,
}

/// This program again, in one of its hidden roles.
async fn started(role: &[&str]) -> Result<(Child, String)> {
    let ours = std::env::current_exe().doing("this program's path")?;
    let mut command = Command::new(ours);
    let mut child =
        command.arg("gate").args(role).stdout(Stdio::piped()).kill_on_drop(true).spawn().doing("a process")?;
    let out = child.stdout.take().ok_or(Stopped("no standard output".into()))?;
    let line = BufReader::new(out).lines().next_line().await.doing("its URL")?;
    Ok((child, line.ok_or(Stopped("a process ended at its start".into()))?))
}

/// `tollway gate` with this file. `database`: what `DATABASE_URL` says.
async fn gate(directory: &Path, config: &Value, database: Option<&str>) -> Result<(Child, String)> {
    let file = directory.join("gate.yaml");
    std::fs::write(&file, config.to_string()).doing("the gate's file")?;
    let mut command = Command::new(binary::tollway().await?);
    command.args(["gate", "--config"]).arg(&file).env("TOLLWAY_KEY_RING", "00".repeat(32));
    command.env_remove("DATABASE_URL").env_remove("PORT").envs(database.map(|url| ("DATABASE_URL", url)));
    command.env("TOLLWAY_LOG", "tollway=info").env("TOLLWAY_LOG_FORMAT", "json").stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().doing("the gate")?;
    let err = child.stderr.take().ok_or(Stopped("no standard error".into()))?;
    let mut lines = BufReader::new(err).lines();
    while let Some(line) = lines.next_line().await.doing("the gate's log")? {
        let line: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        if line["fields"]["message"] == "a gate is open at /mcp"
            && let Some(address) = line["fields"]["address"].as_str()
        {
            let url = format!("http://{address}/mcp");
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok((child, url));
        }
    }
    Err(Stopped("the gate did not start".into()))
}

/// A tool `echo`, whose answer is always the same 4 KB.
async fn upstream() -> Result<Report> {
    let result = json!({"content": [{"type": "text", "text": "x".repeat(4096)}]});
    let answer = move |id: &Value, result: &Value| json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string();
    let first = Bytes::from(answer(&json!(1), &result));
    serve(move |request: http::Request<Incoming>| {
        let (result, first) = (result.clone(), first.clone());
        async move {
            let body = request.into_body().collect().await?.to_bytes();
            let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
            let body = match (asked["method"].as_str(), &asked["id"]) {
                (Some("tools/list"), id) => {
                    let tools = json!({"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]});
                    Bytes::from(answer(id, &tools))
                }
                (_, id) if *id == 1 => first,
                (_, id) => Bytes::from(answer(id, &result)),
            };
            let response = http::Response::builder().header("content-type", "application/json");
            Ok::<_, hyper::Error>(response.body(Full::new(body)).expect("a response"))
        }
    })
    .await
}

async fn serve<B, F, E>(answer: impl Fn(http::Request<Incoming>) -> F + Clone + Send + 'static) -> Result<Report>
where
    F: Future<Output = Result<http::Response<B>, E>> + Send + 'static,
    B: hyper::body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
{
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.doing("a free port")?;
    println!("http://{}/mcp", listener.local_addr().doing("an address")?);
    loop {
        let (stream, _) = listener.accept().await.doing("accept")?;
        let _ = stream.set_nodelay(true);
        let answer = answer.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(answer);
            let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}
