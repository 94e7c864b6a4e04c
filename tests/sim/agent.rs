//! The agents of the world: each has some calls to make, with a key or without, and repeats what it got no answer to.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use super::buyer::{Running, Told};
use super::chain::{ASSET, NETWORK};
use super::seller::{TOOL, URL};
use super::world::{World, lock};

/// One logical call.
#[derive(Debug, Clone)]
pub struct Plan {
    pub agent: &'static str,
    pub session: Option<&'static str>,
    pub key: Option<String>,
    /// The call's only argument; no other call has it.
    pub n: u64,
}

/// One attempt at it, and what came of it.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub plan: Plan,
    pub from_ms: u64,
    pub until_ms: u64,
    pub told: Told,
}

pub type Diary = Arc<Mutex<Vec<Attempt>>>;

pub fn reference() -> String {
    use tollway::catalog::{Kind, ResourceRef};
    ResourceRef::new(Kind::Mcp, URL, Some(TOOL)).expect("a reference").to_string()
}

impl Told {
    /// The receipt of a payment, with or without output.
    pub fn receipt(&self) -> Option<&Value> {
        match self {
            Told::Output(output) => output.get("receipt").filter(|receipt| !receipt.is_null()),
            _ => None,
        }
    }

    /// The output is here; without a key a receipt alone is the answer too.
    fn is_answer(&self, plan: &Plan) -> bool {
        self.receipt().is_some() && (self.text().is_some() || plan.key.is_none())
    }

    /// No repetition would bring more: the output is here; or what a keyless call was answered with, its key's payment
    /// was released, or its budget is used up.
    pub fn is_final(&self, plan: &Plan) -> bool {
        let answered = self.is_answer(plan);
        let budget = matches!(self, Told::Problem(problem) if problem["code"] == "BUDGET_EXCEEDED");
        let key_spent = plan.key.is_some()
            && matches!(self, Told::Problem(p) if p["details"]["phase"] == "lookup"
            && p["details"]["moneyMayHaveMoved"] == "no" && !p["details"]["paymentIdentifier"].is_null());
        answered || budget || key_spent
    }

    /// The first text of the output.
    pub fn text(&self) -> Option<&str> {
        match self {
            Told::Output(output) => output["content"][0]["text"].as_str(),
            _ => None,
        }
    }

    /// For the trace: nothing in it counts over the seeds of a process, as the number of a fault does.
    fn brief(&self) -> String {
        match self {
            Told::Nothing => "nothing".into(),
            Told::Output(output) => {
                let receipt = &output["receipt"];
                let (text, transaction) = (self.text(), receipt["transaction"].as_str());
                format!("output {text:?} of {} in {transaction:?}, {}", output["paymentIdentifier"], output["outcome"])
            }
            Told::Problem(problem) => {
                let details = &problem["details"];
                let (code, moved, id) =
                    (&problem["code"], &details["moneyMayHaveMoved"], &details["paymentIdentifier"]);
                format!("{code} {} moved {moved} {id}", self.reason())
            }
        }
    }

    pub fn reason(&self) -> &str {
        match self {
            Told::Problem(problem) => problem["details"]["reason"].as_str().unwrap_or_default(),
            _ => "",
        }
    }
}

/// One attempt on one host.
pub async fn attempt(world: &Arc<World>, running: &Running, diary: &Diary, plan: &Plan, host: &str) -> Told {
    let process = lock(running).get(host).cloned();
    let leaves = world.chance(|f| f.agent_leaves);
    let patience = Duration::from_millis(if leaves { world.range(0, 20_000) } else { 240_000 });
    let drops = world.permille(500);
    let mut arguments = json!({"ref": reference(), "network": NETWORK, "scheme": "exact", "asset": ASSET,
        "maxAtomicAmount": "20000", "arguments": {"n": plan.n}});
    if let Some(key) = &plan.key {
        arguments["idempotencyKey"] = json!(key);
    }
    let from_ms = world.unix_ms();
    world.trace(&format!("{} asks {host} for {} ({:?})", plan.agent, plan.n, plan.key));
    let told = match process {
        Some(process) => {
            let agent = plan.agent.parse().expect("an agent");
            process.call(agent, plan.session.map(str::to_owned), arguments, patience, drops).await
        }
        None => Told::Nothing,
    };
    let until_ms = world.unix_ms();
    world.trace(&format!("{} is told of {}: {}", plan.agent, plan.n, told.brief()));
    world.count(|s| {
        s.attempts += 1;
        s.agent_left += u64::from(leaves && matches!(told, Told::Nothing));
        s.lost += u64::from(!leaves && matches!(told, Told::Nothing));
        s.successes += u64::from(told.receipt().is_some() && told.text().is_some());
        s.empty += u64::from(told.receipt().is_some() && told.text().is_none());
        if let Told::Problem(problem) = &told {
            let unknown = problem["details"]["moneyMayHaveMoved"] == "unknown";
            s.unknown += u64::from(unknown);
            s.nothing_moved += u64::from(!unknown);
        }
    });
    lock(diary).push(Attempt { plan: plan.clone(), from_ms, until_ms, told: told.clone() });
    told
}

/// All calls of one agent, one after the other, as long as the world is rough.
pub async fn live(world: Arc<World>, running: Running, diary: Diary, plans: Vec<Plan>, hosts: Vec<String>) {
    let any = |world: &World| hosts[world.range(0, hosts.len() as u64) as usize].clone();
    for plan in &plans {
        sleep(Duration::from_millis(world.range(0, 15_000))).await;
        for _ in 0..3 {
            let told = if world.chance(|f| f.agent_races) {
                world.count(|s| s.agent_raced += 1);
                let (first, second) = (any(&world), any(&world));
                let first = attempt(&world, &running, &diary, plan, &first);
                let second = attempt(&world, &running, &diary, plan, &second);
                let (first, second) = futures_util::future::join(first, second).await;
                if first.receipt().is_some() { first } else { second }
            } else {
                let host = any(&world);
                attempt(&world, &running, &diary, plan, &host).await
            };
            if told.is_final(plan) {
                break;
            }
            let wait = if world.permille(300) { 60_000 } else { 12_000 };
            sleep(Duration::from_millis(world.range(100, wait))).await;
        }
    }
}
