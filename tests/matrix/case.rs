//! One case: the story up to the step, the fault, what the agent does then, the end of every authorization, the sweep
//! and the audit.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join, select};
use serde_json::json;
use tollway::ledger::{Filter, Payment, State};

use super::answer::Answer;
use super::audit;
use super::faults::{Effect, Fault};
use super::plan::{Case, Kind, Mode, Moment, Setup, Target};
use super::proxy::{At, How, Rule};
use super::stage::{LEASES_OVER, Stage};

pub const CITY: &str = "Bern";
const KEY: &str = "a-key-of-the-matrix-1";
/// An agent waits this long for the answer of a server whose ledger hangs.
const GIVE_UP: Duration = Duration::from_millis(1_500);
/// And this long for one of a server that works, on however slow a machine.
const PATIENT: Duration = Duration::from_secs(25);
/// Passes of the sweep until every row is final, at most.
const PASSES: usize = 12;

/// What one case came to.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    pub rows: usize,
    pub transfers: usize,
}

/// What the agent did and heard, in its order.
#[derive(Default)]
pub struct Story {
    pub heard: Vec<(String, Answer)>,
    /// Calls that began after an earlier one had its answer: without a key each of them may be a new purchase.
    pub after_success: usize,
}

impl Story {
    fn hear(&mut self, what: &str, answer: Answer) {
        self.heard.push((what.to_owned(), answer));
    }

    fn has_success(&self) -> bool {
        self.heard.iter().any(|(_, answer)| answer.is_paid())
    }

    fn has_success_before_last(&self) -> bool {
        self.heard.iter().rev().skip(1).any(|(_, answer)| answer.is_paid())
    }

    pub fn text(&self) -> String {
        let lines = self.heard.iter().map(|(what, answer)| {
            let more = match answer {
                Answer::Gone(why) => format!(" ({why})"),
                Answer::Said(_) => String::new(),
            };
            format!("  {what}: {}{more}", answer.label())
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// `Err`: what is wrong, with the story and the end of the process's log.
pub async fn run(case: Case) -> Result<Tally, String> {
    let stage = Stage::new(case.store).await;
    if case.step.undeclared {
        stage.board.undeclare();
    }
    let mut story = Story::default();
    let result = play(&case, &stage, &mut story).await;
    stage.remove().await;
    result.map_err(|problem| format!("{problem}\n{}\n  log:\n{}", story.text(), stage.tail()))
}

async fn play(case: &Case, stage: &Arc<Stage>, story: &mut Story) -> Result<Tally, String> {
    stage.start().await?;
    set_up(case, stage, story).await?;
    match case.step.moment {
        Moment::Call => strike_call(case, stage, story).await?,
        Moment::Poll => strike_poll(case, stage, story).await?,
        Moment::Sweep | Moment::EarlySweep => strike_sweep(case, stage, story).await?,
    }
    finish(case, stage, story).await?;
    let tally = audit::audit(case, stage, story).await?;
    if let Some(shown) = case.shows {
        let [least, most] = shown.transfers;
        if !(least..=most).contains(&tally.transfers) {
            return Err(format!("{} transfers instead of {least} to {most}", tally.transfers));
        }
        if shown.output && !story.heard.iter().any(|(_, answer)| answer.is_paid() && answer.has_output()) {
            return Err("the agent never had the output".into());
        }
    }
    Ok(tally)
}

impl Case {
    fn key(&self) -> Option<&'static str> {
        self.keyed.then_some(KEY)
    }
}

async fn buy(case: &Case, stage: &Stage, story: &mut Story, what: &str) -> Answer {
    story.after_success += usize::from(story.has_success());
    let answer = stage.buy(CITY, case.key()).await;
    story.hear(what, answer.clone());
    answer
}

fn among(answer: &Answer, allowed: &[&str]) -> bool {
    allowed.contains(&answer.label().as_str())
}

/// Whether the struck call may say this. What kills the process after the answer was handed out kills nothing of it.
fn fits(case: &Case, answer: &Answer) -> bool {
    // A keyless call about to be refused has the payment of its twin, which was faster.
    let twins = case.mode == Mode::Raced && !case.keyed && case.step.is_early();
    // Both faults may strike the lists that nothing depends on, one of each call.
    let spared = case.mode == Mode::Raced && case.step.undeclared && case.kind == Kind::Error;
    among(answer, case.step.allowed(case.kind))
        || spared && among(answer, &["paid"])
        || case.kind == Kind::Kill && among(answer, case.step.error)
        || twins && among(answer, &["paid", "SETTLEMENT_UNKNOWN/in_flight", "SETTLEMENT_UNKNOWN/in_doubt"])
}

async fn set_up(case: &Case, stage: &Stage, story: &mut Story) -> Result<(), String> {
    let (at, expected) = match case.step.setup {
        Setup::Fresh => return Ok(()),
        Setup::Paid => (None, "paid"),
        Setup::Doubt => (Some(At::Before), "SETTLEMENT_UNKNOWN/no_answer"),
        Setup::Spent => (Some(At::After), "SETTLEMENT_UNKNOWN/no_answer"),
    };
    if let Some(at) = at {
        stage.board.arm(Rule { step: "pay", at, how: How::Error, once_stored: false });
    }
    let answer = buy(case, stage, story, "before").await;
    stage.board.clear();
    if answer.label() != expected { Err(format!("the setup ended with {}", answer.label())) } else { Ok(()) }
}

/// Arms the fault of this case.
async fn arm(case: &Case, stage: &Stage) -> Result<usize, String> {
    let before = stage.board.fired();
    if let Some((step, at, how)) = case.step.also {
        stage.board.arm(Rule { step, at, how, once_stored: false });
    }
    let (http, ledger) = match case.kind {
        Kind::Error => (How::Error, Effect::Error),
        Kind::Hang => (How::Hang, Effect::Hang),
        Kind::Kill => (How::Kill, Effect::Kill),
    };
    match case.step.target {
        Target::Http(step, at) => {
            stage.arm(&[]).await?;
            // Killed with its payload in the ledger: what must be recovered. Without it: `store-payload.before`.
            let once_stored = step == "pay" || step == "verify" || step == "settle";
            stage.board.arm(Rule { step, at, how: http, once_stored });
        }
        Target::Ledger(method, when) => {
            stage.arm(&[Fault { method: method.into(), when, effect: ledger }]).await?;
        }
    }
    Ok(before + usize::from(case.step.also.is_some()))
}

/// Whether the fault has struck: a case that never came to its step proves nothing.
async fn struck(case: &Case, stage: &Stage, before: usize) -> Result<(), String> {
    let mut seen = String::new();
    for _ in 0..300 {
        let fired = match (case.step.target, case.kind) {
            (Target::Http(..), Kind::Kill) => stage.board.fired() > before && !stage.runs(),
            (Target::Http(..), _) => stage.board.fired() > before,
            (Target::Ledger(..), Kind::Kill) => !stage.runs(),
            (Target::Ledger(..), _) => match stage.observed().await {
                Ok(observed) => {
                    seen = format!("{:?}", observed.calls);
                    observed.fired > 0
                }
                Err(_) => false,
            },
        };
        if fired {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(format!("the step was never reached {seen}"))
}

/// Takes the fault away, and starts the process again where it died.
async fn mend(case: &Case, stage: &Stage) -> Result<(), String> {
    stage.board.clear();
    if case.kind == Kind::Kill {
        if !stage.died().await {
            return Err("the process did not die".into());
        }
        stage.start().await?;
    }
    stage.arm(&[]).await
}

/// A call's answer; of a hanging ledger none, once nothing more is to be expected.
async fn patiently<T>(case: &Case, stage: &Stage, before: usize, call: impl Future<Output = T>, gone: T) -> T {
    let hangs = case.kind == Kind::Hang && matches!(case.step.target, Target::Ledger(..));
    if !hangs {
        return call.await;
    }
    // What hangs beside the story does not end it.
    let patience = if case.step.hang == ["paid"] { PATIENT } else { GIVE_UP };
    tokio::select! {
        biased;
        answer = call => answer,
        () = async {
            let _ = struck(case, stage, before).await;
            tokio::time::sleep(patience).await;
        } => gone,
    }
}

/// Two calls at once. Once one has its answer, the other's is not waited for longer than [`patiently`] does.
async fn both<F: Future<Output = Answer>>(
    case: &Case,
    stage: &Stage,
    before: usize,
    [first, second]: [F; 2],
) -> [Answer; 2] {
    let (mut first, mut second) = (pin!(first), pin!(second));
    let gone = || Answer::Gone("gave up".into());
    let one = select(first.as_mut(), second.as_mut());
    match tokio::time::timeout(PATIENT, one).await {
        Err(_) => [gone(), gone()],
        Ok(Either::Left((answer, _))) => [answer, patiently(case, stage, before, second, gone()).await],
        Ok(Either::Right((answer, _))) => [patiently(case, stage, before, first, gone()).await, answer],
    }
}

async fn strike_call(case: &Case, stage: &Stage, story: &mut Story) -> Result<(), String> {
    let before = arm(case, stage).await?;
    story.after_success += usize::from(story.has_success());
    let gone = Answer::Gone("gave up".into());
    let allowed = case.step.allowed(case.kind);
    if case.mode == Mode::Raced {
        let answers = both(case, stage, before, [0, 1].map(|_| stage.buy(CITY, case.key()))).await;
        for (n, answer) in answers.iter().enumerate() {
            story.hear(["struck", "its twin"][n], answer.clone());
        }
        if !answers.iter().any(|answer| fits(case, answer)) {
            return Err(format!("neither answer is one of {allowed:?}"));
        }
    } else {
        let answer = patiently(case, stage, before, stage.buy(CITY, case.key()), gone).await;
        story.hear("struck", answer.clone());
        if !fits(case, &answer) {
            return Err(format!("the answer is none of {allowed:?}"));
        }
    }
    struck(case, stage, before).await?;
    mend(case, stage).await?;
    match case.mode {
        Mode::Once => poll(case, stage, story, "poll").await?,
        Mode::Twice => {
            let answer = buy(case, stage, story, "again").await;
            if answer.is_gone() {
                return Err("the repeated call is lost".into());
            }
        }
        Mode::Raced => {}
    }
    stage.pass(LEASES_OVER).await?;
    match case.mode {
        Mode::Once => poll(case, stage, story, "poll after the leases").await,
        Mode::Twice | Mode::Raced => {
            let answer = buy(case, stage, story, "again after the leases").await;
            let allowed = case.step.then(case.kind, case.mode);
            // The fault may have struck the twin of the call that paid.
            let twin_paid = case.mode == Mode::Raced && story.has_success_before_last();
            if !(among(&answer, allowed) || twin_paid && answer.is_paid()) {
                return Err(format!("the repeated call's answer is none of {allowed:?}"));
            }
            if answer.is_paid() && !answer.has_output() {
                return Err("the repeated call has no output".into());
            }
            Ok(())
        }
    }
}

async fn strike_poll(case: &Case, stage: &Stage, story: &mut Story) -> Result<(), String> {
    let before = arm(case, stage).await?;
    let question = json!({"idempotencyKey": KEY});
    let ask = || stage.tool("x402_get_payment", &question);
    let answers = match case.mode {
        Mode::Raced => both(case, stage, before, [ask(), ask()]).await.to_vec(),
        _ => vec![patiently(case, stage, before, ask(), Answer::Gone("gave up".into())).await],
    };
    for answer in &answers {
        story.hear("struck", answer.clone());
    }
    let allowed = case.step.allowed(case.kind);
    if !answers.iter().any(|answer| among(answer, allowed)) {
        return Err(format!("the answer is none of {allowed:?}"));
    }
    struck(case, stage, before).await?;
    mend(case, stage).await?;
    poll(case, stage, story, "poll").await?;
    if case.mode == Mode::Twice {
        poll(case, stage, story, "poll").await?;
    }
    Ok(())
}

async fn strike_sweep(case: &Case, stage: &Stage, story: &mut Story) -> Result<(), String> {
    if case.step.moment == Moment::Sweep {
        stage.let_die().await;
    }
    stage.pass(LEASES_OVER).await?;
    let before = arm(case, stage).await?;
    let pass = || patiently(case, stage, before, stage.sweep(), Err("gave up".into()));
    match case.mode {
        Mode::Once => drop(pass().await),
        Mode::Twice => {
            drop(pass().await);
            drop(stage.sweep().await);
        }
        // Two passes at once, while the agent repeats its call.
        Mode::Raced => {
            let call = async {
                until_taken(stage).await;
                patiently(case, stage, before, stage.buy(CITY, case.key()), Answer::Gone("gave up".into())).await
            };
            let (_, answer) = join(join(pass(), pass()), call).await;
            story.hear("beside the sweep", answer);
        }
    }
    struck(case, stage, before).await?;
    mend(case, stage).await
}

/// Until a pass has what is due, or died of it: a call that recovers the payment first would leave the sweep nothing.
async fn until_taken(stage: &Stage) {
    for _ in 0..100 {
        match stage.observed().await {
            Ok(observed) if !observed.calls.contains_key("take_due") => {}
            _ => return,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The agent asks for its payment: by its key, or by an identifier that it was given.
async fn poll(case: &Case, stage: &Stage, story: &mut Story, what: &str) -> Result<(), String> {
    let known = story.heard.iter().rev().find_map(|(_, answer)| answer.payment().map(str::to_owned));
    let question = match (case.key(), known) {
        (Some(key), _) => json!({"idempotencyKey": key}),
        (None, Some(id)) => json!({"paymentIdentifier": id}),
        (None, None) => return Ok(()),
    };
    let answer = stage.tool("x402_get_payment", &question).await;
    story.hear(what, answer.clone());
    let label = answer.label();
    if label.starts_with("state:") || label == "NO_RESULTS/payment_not_found" {
        return Ok(());
    }
    Err(format!("the payment's state is {label}"))
}

pub async fn rows(stage: &Stage) -> Result<Vec<Payment>, String> {
    stage.ledger.list(&Filter { limit: 100, ..Filter::default() }).await.map_err(|e| e.to_string())
}

/// Every authorization dies, and the sweep closes what is open.
async fn finish(case: &Case, stage: &Stage, story: &mut Story) -> Result<(), String> {
    stage.let_die().await;
    let mut said = BTreeSet::new();
    for _ in 0..PASSES {
        let rows = rows(stage).await?;
        if rows.iter().all(|row| !row.state.is_open()) {
            poll(case, stage, story, "at the end").await?;
            return hand_over(case, stage, story).await;
        }
        stage.pass(LEASES_OVER).await?;
        match stage.sweep().await {
            Ok(word) | Err(word) => said.insert(word),
        };
    }
    let open = rows(stage).await?.into_iter().filter(|row| row.state.is_open());
    let open: Vec<_> = open.map(|row| format!("{} {:?}", row.state.as_str(), row.reason)).collect();
    Err(format!("after {PASSES} sweeps still open: {open:?} ({said:?})"))
}

/// What was paid for and never received: the same call has it, or at least the receipt.
async fn hand_over(case: &Case, stage: &Stage, story: &mut Story) -> Result<(), String> {
    stage.pass(LEASES_OVER).await?;
    let mut owed = None;
    // Without a key the answered mark, which nobody waits for, decides whether the same call is a new purchase.
    for _ in 0..if case.keyed || !story.has_success() { 1 } else { 50 } {
        let settled = rows(stage).await?.into_iter().filter(|row| row.state == State::Settled);
        owed = settled.into_iter().find(|row| case.keyed || !row.answered);
        if owed.is_none() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let Some(row) = owed else { return Ok(()) };
    let answer = buy(case, stage, story, "again at the end").await;
    let label = answer.label();
    // A seller that never learnt of the settlement has nothing to give for a dead authorization.
    let seller_knows = !case.step.name.starts_with("settlement.") && !case.step.name.starts_with("verify.");
    let right = match (row.has_outcome || row.has_payload, seller_knows) {
        (true, true) => label == "paid" && answer.has_output(),
        (true, false) => label == "paid" || label == "paid:undelivered",
        (false, _) => label == "paid:evicted",
    };
    if right { Ok(()) } else { Err(format!("what was paid for is not handed over: {label} for {row:?}")) }
}
