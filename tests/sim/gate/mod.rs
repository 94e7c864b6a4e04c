//! Gates that sell on one store of claims: two or three replicas, a facilitator that lies, chain RPCs of which one does,
//! payers that repeat, race, leave, and try what they should not. One seed from its first moment to the verdict.

mod book;
mod facilitator;
mod judge;
mod payer;
mod postgres;
mod shop;
mod store;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;
use tollway::gate::claims::{Claims, State, Store};
use tollway::x402::Flow;

pub use postgres::Server;
pub use store::{BUGS, Bug};

use crate::Planted;
use crate::chain::Chain;
use crate::http;
use crate::node;
use crate::seed::{Options, Outcome, Workshop};
use crate::world::{Ctx, World, lock};
use book::Book;
use facilitator::{Disk, Facilitator};
use judge::Evidence;
use payer::{How, Market, Own};
use shop::{Open, Shape, Told};
use store::SimStore;

const PRICE: u64 = 10_000;
/// What each costs the same, before or after its handler ran.
const TOOLS: [(&str, Flow); 2] = [("quick", Flow::Authorization), ("deep", Flow::Upfront)];
/// Milliseconds in which things go wrong.
const ROUGH_MS: u64 = 150_000;
/// Milliseconds in which a calm world has to come to rest.
const REST_WITHIN_MS: u64 = 2_400_000;

/// One logical call: the argument names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub tool: &'static str,
    pub n: u64,
}

impl Call {
    pub fn flow(self) -> Flow {
        TOOLS.iter().find(|(tool, _)| *tool == self.tool).expect("it has a price").1
    }
}

/// Where the claims of one story are.
#[derive(Clone, Copy)]
pub enum On<'a> {
    /// Of a migrated, empty file.
    File(&'a Path),
    Postgres(&'a Server),
}

pub async fn story(seed: u64, options: Options, workshop: &Workshop, on: On<'_>) -> Outcome {
    let world = World::new(seed, workshop.helper.clone(), options.trace);
    world.with_gates();
    let shape = Shape {
        nodes: world.range(1, 3) as usize,
        life: [30, 60, 120][world.range(0, 3) as usize],
        sweep_every_s: world.range(10, 40),
    };
    let balance: i128 = if world.permille(150) { 3 * i128::from(PRICE) } else { 100 * i128::from(PRICE) };
    let min_ttl = if world.permille(350) { 30 } else { 17_280 };
    let chain = Arc::new(Chain::new(balance, min_ttl));

    // Clock and randomness of the store do not die with a process.
    world.start("store", false, |_| std::future::pending());
    let store = world.host(|host| host.name == "store").expect("just started");
    let ports = Ctx { world: world.clone(), epoch: store.epoch(), host: store }.ports();
    // One for all of them: whatever a store does is over before anything else happens.
    let (judges, clock): (Arc<dyn Store>, Option<_>) = match on {
        On::File(path) => (world.still(Claims::file(path, ports)).expect("the claims' file opens"), None),
        On::Postgres(server) => (world.still(server.emptied()), Some(server.client.clone())),
    };
    let book = Arc::new(Book::new(world.clone(), chain.clone(), judges.clone(), clock));

    let disk: Arc<Mutex<Disk>> = Arc::default();
    let remembers = world.permille(600);
    {
        let (chain, book) = (chain.clone(), book.clone());
        world.start("facilitator", true, move |ctx| {
            let (chain, disk, book) = (chain.clone(), disk.clone(), book.clone());
            let one = Arc::new(Facilitator { ctx: ctx.clone(), chain, disk, book, remembers });
            http::serve(ctx, move |request| one.clone().answer(request))
        });
    }
    node::start(&world, &chain, shape.nodes);
    let shops = Open::default();
    let mut hosts = Vec::new();
    let bug = match options.bug {
        Some(Planted::Gate(bug)) => Some(bug),
        _ => None,
    };
    for n in 0..world.range(2, 4) {
        let name = format!("gate{n}");
        let (inner, book, shops) = (judges.clone(), book.clone(), shops.clone());
        world.start(&name, true, move |ctx| {
            let store = SimStore { inner: inner.clone(), ctx: ctx.clone(), bug, book: book.clone() };
            shop::run(ctx, Arc::new(store), shape, book.clone(), shops.clone())
        });
        hosts.push(name);
    }

    let market = Arc::new(Market {
        world: world.clone(),
        book: book.clone(),
        open: shops.clone(),
        hosts,
        shape,
        payments: Mutex::default(),
    });
    let mut tasks = Vec::new();
    for n in 0..world.range(2, 6) {
        let call = Call { tool: TOOLS[world.range(0, 2) as usize].0, n };
        tasks.push(world.outside(market.clone().live(call)));
    }
    tasks.push(world.outside(market.clone().steal()));

    sleep(Duration::from_millis(ROUGH_MS)).await;
    world.calm();
    for task in tasks {
        let _ = task.await;
    }
    // Whatever was killed is back, and whoever held a claim then holds it no more.
    sleep(Duration::from_secs(60)).await;
    for round in [Round::Soon, Round::Late] {
        let own: Vec<_> = lock(&market.payments).clone();
        for own in own.into_iter().filter(|own| !own.gone) {
            collect(&market, &own, round).await;
        }
        rest(&book).await;
    }
    let claims = book.claims(&STATES);
    let evidence = Evidence {
        transfers: chain.transfers(),
        payments: lock(&market.payments).clone(),
        runs: book.runs(),
        balances: (balance, chain.balance()),
        min_ttl,
        claims,
    };
    if let Err(why) = evidence.judge() {
        world.fail(why);
    }
    for own in market.shown() {
        if world.permille(500) {
            market.steal_one(&own, true).await;
        }
    }
    for claim in &evidence.claims {
        let (id, state) = (claim.identity.short(), claim.state.as_str());
        world.trace(&format!("claim {id} of {} {state} {:?}", claim.nonce, claim.reason));
    }
    world.gate(|s| {
        let in_state = |state| evidence.claims.iter().filter(|claim| claim.state == state).count() as u64;
        s.claims_settled = in_state(State::Settled);
        s.claims_failed = in_state(State::Failed);
        s.claims_released = in_state(State::Released);
    });
    let outcome = Outcome {
        seed,
        hash: world.hash(),
        failure: world.failure(),
        lines: world.take_lines(),
        stats: lock(&world.stats).clone(),
        gate: lock(&world.gate_stats).clone(),
    };
    world.shutdown();
    lock(&shops).clear();
    outcome
}

const STATES: [&str; 6] = ["claimed", "settling", "unknown", "settled", "released", "failed"];

/// Until no claim is open, or no more time is given.
async fn rest(book: &Book) {
    let world = &book.world;
    let until = world.now_ms() + REST_WITHIN_MS / 2;
    while world.now_ms() < until && world.failure().is_none() {
        let open = book.claims(&STATES[..3]);
        if open.is_empty() {
            return;
        }
        let stuck = |claim: &tollway::gate::claims::Claim| {
            claim.reason.as_deref().is_some_and(|reason| reason.contains("no RPC shows that this paid"))
        };
        if open.iter().all(stuck) && world.now_ms() + REST_WITHIN_MS / 4 > until {
            return;
        }
        sleep(Duration::from_secs(10)).await;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// While authorizations may be alive, and settlements unknown.
    Soon,
    /// When all are dead and swept.
    Late,
}

/// Everybody who paid and has proof asks once more, with the payment that paid: the output, or why there is none.
async fn collect(market: &Arc<Market>, own: &Own, round: Round) {
    let Some(_) = market.book.paid(own.paid.nonce) else { return };
    let Some(claim) = market.book.claim(&own.paid.identity) else { return };
    let told = market.ask(own.call, Some(own), How { calm: true, without_proof: !own.has_proof(), ..How::default() });
    let told = told.await;
    let good = match &told {
        Told::Output { .. } => true,
        Told::Withheld { reason, receipt } => match reason.as_str() {
            "answer_too_large" => receipt.is_some(),
            "settlement_unknown" | "in_progress" => round == Round::Soon,
            _ => false,
        },
        // What its last run said, whose runs are used up.
        Told::Failed { receipt } => receipt.is_some() && claim.runs >= 3,
        // It gave its proof away, or has none; or what it bought is another call.
        Told::Challenge { reason, .. } if reason == "already_settled" => {
            !own.has_proof() || own.bent || raced(market, own)
        }
        Told::Challenge { reason, .. } => reason == "payment_already_used" && own.bent,
        Told::Error(_) | Told::Nothing => false,
    };
    market.world.gate(|s| s.owed += u64::from(own.has_proof()));
    if !good {
        let n = own.call.n;
        market.world.fail(format!("{round:?}: {n} paid with {}, and is told {told:?}", own.paid.nonce));
    }
}

/// A twin of it that brought no proof made the claim.
fn raced(market: &Market, own: &Own) -> bool {
    market.book.claimed_without_proof(&own.paid.identity)
}
