//! One buyer: a process with the real agent tools, payer, sweep and clients, on the ports of its host.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tollway::agent::AgentTools;
use tollway::catalog::Catalog;
use tollway::guard::Rules;
use tollway::http::{Client, Destination, Limits, Tls};
use tollway::ledger::Ledger;
use tollway::mcp::{Handler, Progress, RequestContext, Revision};
use tollway::money::AgentId;
use tollway::pay::{Parts, Payer, Settings, Sweep, SweepParts, SweepSettings};
use tollway::signer::Signer;
use tollway::upstream::{Settings as UpstreamSettings, Upstream};

use super::chain;
use super::node;
use super::world::{Ctx, lock};

/// What differs between seeds.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Chain RPCs.
    pub nodes: usize,
    pub external_signer: bool,
    pub sweep_every_s: u64,
}

/// The process that runs on each host now.
pub type Running = Arc<Mutex<BTreeMap<String, Process>>>;

#[derive(Clone)]
pub struct Process {
    ctx: Ctx,
    tools: Arc<AgentTools>,
}

/// What an agent was told.
#[derive(Debug, Clone)]
pub enum Told {
    /// The output of `x402_call_resource`.
    Output(Value),
    /// A tool error, or the data of a JSON-RPC error: `{code, details}`.
    Problem(Value),
    /// Connection refused, or lost before an answer.
    Nothing,
}

pub async fn run(ctx: Ctx, ledger: Arc<dyn Ledger>, shape: Shape, running: Running) {
    let world = ctx.ports();
    let limits = Limits { timeout: Duration::from_secs(15), ..Limits::default() };
    let operator = Client::new(world.clone(), Tls::Plain, Destination::Operator, limits);
    let (network, chain) = node::stellar(shape.nodes, operator.clone(), world.clone());
    let chains = BTreeMap::from([(network.clone(), Arc::new(chain))]);
    let signer = if shape.external_signer {
        Signer::external("https://signer.test".parse().expect("a URL"), None, operator.clone())
    } else {
        Signer::env_secret(chain::secret().into())
    };
    let catalog = Catalog::new(operator, "https://catalog.test").expect("a URL");
    let upstream = UpstreamSettings::default();
    let sellers = upstream.client(world.clone(), Tls::Plain);
    let payer = Payer::new(Parts {
        world: world.clone(),
        catalog: catalog.clone(),
        upstream: Upstream::new(upstream, world.clone(), sellers),
        ledger: ledger.clone(),
        chains: chains.clone(),
        signer: Arc::new(signer.expect("a signer")),
        settings: Settings::new(Rules { payable: [network].into() }),
    });
    let tools = Arc::new(AgentTools::new(catalog, Some(payer), None));
    lock(&running).insert(ctx.name().to_owned(), Process { ctx: ctx.clone(), tools });
    let interval = Duration::from_secs(shape.sweep_every_s);
    let settings = SweepSettings { interval, ..SweepSettings::default() };
    let sweep = Sweep::new(SweepParts { world, ledger, chains, settings });
    loop {
        sleep(Duration::from_millis(ctx.world.range(shape.sweep_every_s * 700, shape.sweep_every_s * 1300))).await;
        let report = sweep.pass().await;
        ctx.trace(&format!("{report:?}"));
    }
}

impl Process {
    /// One call as the front hands it to the tools. What the agent does not wait for any more is cancelled, and where
    /// the front drops the request, dropped.
    pub async fn call(
        &self,
        agent: AgentId,
        session: Option<String>,
        arguments: Value,
        patience: Duration,
        drops: bool,
    ) -> Told {
        if !self.ctx.alive() {
            return Told::Nothing;
        }
        let (send, mut answer) = oneshot::channel();
        let cancelled = CancellationToken::new();
        let (tools, world, token) = (self.tools.clone(), self.ctx.world.clone(), cancelled.clone());
        self.ctx.spawn(async move {
            world.pause().await;
            let context = RequestContext {
                claims: tollway::mcp::Claims::default(),
                revision: Revision::V2025_11_25,
                agent: Some(agent),
                session,
                cancelled: token.child_token(),
                meta: None,
                progress: Progress::default(),
            };
            let params = json!({"name": "x402_call_resource", "arguments": arguments}).to_string();
            let Ok(params) = RawValue::from_string(params) else { return };
            let call = tools.call(&context, "tools/call", Some(&params));
            let called = if drops {
                match futures_util::future::select(std::pin::pin!(token.cancelled()), call).await {
                    futures_util::future::Either::Left(_) => return,
                    futures_util::future::Either::Right((called, _)) => called,
                }
            } else {
                call.await
            };
            let told = match &called {
                Ok(result) => told(result),
                Err(error) => {
                    let data = error.data.as_ref().and_then(|data| serde_json::from_str(data.get()).ok());
                    Told::Problem(data.unwrap_or_else(|| json!({"code": error.code, "message": error.message})))
                }
            };
            if send.send(told).is_ok()
                && let Ok(result) = &called
            {
                tools.delivered(&context, "tools/call", result).await;
            }
        });
        match tokio::time::timeout(patience, &mut answer).await {
            Ok(told) => told.unwrap_or(Told::Nothing),
            Err(_) => {
                cancelled.cancel();
                Told::Nothing
            }
        }
    }
}

fn told(result: &RawValue) -> Told {
    let result: Value = serde_json::from_str(result.get()).unwrap_or_default();
    let content = result["structuredContent"].clone();
    if content.get("code").is_some() { Told::Problem(content) } else { Told::Output(content) }
}
