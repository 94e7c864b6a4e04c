//! The world of one seed: one thread, one runtime whose clock is paused, one random number generator. A host is a set
//! of tasks that the world owns; a kill drops all of their futures at once, between two polls.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep};
use tollway::ports;

use super::net::{Listener, Stream};
use super::rng::{Faults, GateFaults, Rng};
use super::stats::{GateStats, Stats};

/// More polls than this in one seed are a livelock.
const MAX_POLLS: u64 = 2_000_000;
/// Lines of the trace that a failure prints.
const TAIL: usize = 120;

pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct World {
    rng: Mutex<Rng>,
    pub faults: Mutex<Faults>,
    hosts: Mutex<BTreeMap<String, Arc<Host>>>,
    start: Instant,
    /// While a ledger works: inside another runtime tokio's clock is another one.
    still_at_ms: Mutex<Option<u64>>,
    helper: Handle,
    /// Unix milliseconds of the first moment.
    start_unix_ms: u64,
    trace: Mutex<Trace>,
    polls: Mutex<u64>,
    /// The first panic, livelock or broken promise.
    failure: Mutex<Option<String>>,
    pub stats: Mutex<Stats>,
    pub gate_stats: Mutex<GateStats>,
}

#[derive(Default)]
struct Trace {
    hash: u64,
    lines: VecDeque<String>,
    whole: bool,
}

impl World {
    /// Inside a runtime whose clock is paused; `helper` is another one, which runs.
    pub fn new(seed: u64, helper: Handle, whole_trace: bool) -> Arc<World> {
        let mut rng = Rng::new(seed);
        let faults = Faults::draw(&mut rng);
        // 2027-01-15; one seed in six begins shortly before midnight.
        let into_the_day = if rng.permille(170) { 86_400_000 - rng.range(20_000, 150_000) } else { 36_000_000 };
        let trace = Trace { hash: 0xcbf2_9ce4_8422_2325, lines: VecDeque::new(), whole: whole_trace };
        let world = Arc::new(World {
            rng: Mutex::new(rng),
            faults: Mutex::new(faults.clone()),
            hosts: Mutex::default(),
            start: Instant::now(),
            still_at_ms: Mutex::default(),
            helper,
            start_unix_ms: 1_799_971_200_000 + into_the_day,
            trace: Mutex::new(trace),
            polls: Mutex::default(),
            failure: Mutex::default(),
            stats: Mutex::default(),
            gate_stats: Mutex::default(),
        });
        world.trace(&format!("{faults:?}"));
        world
    }

    pub fn now_ms(&self) -> u64 {
        let still = *lock(&self.still_at_ms);
        still.unwrap_or_else(|| (Instant::now() - self.start).as_millis() as u64)
    }

    /// Runs a call of the ledger to its end while the world stands still: sqlx works on threads of its own, which a
    /// paused clock does not see.
    pub fn still<T>(&self, call: impl Future<Output = T>) -> T {
        let now = self.now_ms();
        *lock(&self.still_at_ms) = Some(now);
        let result = {
            let _runtime = self.helper.enter();
            // tokio's own block_on refuses to run inside a runtime.
            pollster::block_on(call)
        };
        *lock(&self.still_at_ms) = None;
        result
    }

    pub fn unix_ms(&self) -> u64 {
        self.start_unix_ms + self.now_ms()
    }

    pub fn trace(&self, event: &str) {
        let line = format!("{:>8} {event}", self.now_ms());
        let mut trace = lock(&self.trace);
        trace.hash = line.bytes().fold(trace.hash, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        trace.lines.push_back(line);
        if !trace.whole && trace.lines.len() > TAIL {
            trace.lines.pop_front();
        }
    }

    pub fn hash(&self) -> u64 {
        lock(&self.trace).hash
    }

    pub fn take_lines(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.trace).lines).into()
    }

    /// The first reason is kept.
    pub fn fail(&self, why: String) {
        self.trace(&format!("FAILED {why}"));
        lock(&self.failure).get_or_insert(why);
    }

    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    pub fn chance(&self, of: impl Fn(&Faults) -> u64) -> bool {
        let chance = of(&lock(&self.faults));
        lock(&self.rng).permille(chance)
    }

    /// The world is one in which a gate sells.
    pub fn with_gates(&self) {
        let drawn = GateFaults::draw(&mut lock(&self.rng));
        self.trace(&format!("{drawn:?}"));
        lock(&self.faults).gate = drawn;
    }

    pub fn permille(&self, chance: u64) -> bool {
        lock(&self.rng).permille(chance)
    }

    pub fn range(&self, lo: u64, hi: u64) -> u64 {
        lock(&self.rng).range(lo, hi)
    }

    pub fn fill(&self, buf: &mut [u8]) {
        let mut rng = lock(&self.rng);
        for chunk in buf.chunks_mut(8) {
            chunk.copy_from_slice(&rng.next().to_le_bytes()[..chunk.len()]);
        }
    }

    pub fn count(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut lock(&self.stats));
    }

    pub fn gate(&self, change: impl FnOnce(&mut GateStats)) {
        change(&mut lock(&self.gate_stats));
    }

    /// Milliseconds that a packet, a look-up or a ledger call takes.
    pub fn latency(&self) -> u64 {
        if self.chance(|f| f.slow) { self.range(500, 12_000) } else { self.range(1, 40) }
    }

    pub async fn pause(&self) {
        sleep(Duration::from_millis(self.latency())).await;
    }

    /// No faults from now on: what is left must heal.
    pub fn calm(&self) {
        *lock(&self.faults) = Faults::default();
        for host in lock(&self.hosts).values() {
            let parked = {
                let mut state = lock(&host.state);
                (state.kill_in, state.freeze_in, state.frozen_until) = (None, None, None);
                std::mem::take(&mut state.parked)
            };
            parked.into_iter().for_each(Waker::wake);
        }
        self.trace("calm");
    }

    /// Ends every host without a word, so that nothing of this seed stays in memory.
    pub fn shutdown(&self) {
        for host in std::mem::take(&mut *lock(&self.hosts)).into_values() {
            for slot in host.end_life() {
                let future = lock(&slot).future.take();
                drop(future);
            }
        }
    }

    pub fn host(&self, find: impl Fn(&Host) -> bool) -> Option<Arc<Host>> {
        lock(&self.hosts).values().find(|host| find(host)).cloned()
    }

    /// A machine that runs `main`, is killed and runs it again, for ever.
    pub fn start<F>(self: &Arc<Self>, name: &str, mortal: bool, main: impl Fn(Ctx) -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let host = {
            let mut hosts = lock(&self.hosts);
            let ip = IpAddr::V4(Ipv4Addr::new(45, 0, 0, hosts.len() as u8 + 1));
            let host = Host { name: name.into(), ip, state: Mutex::default(), down: Notify::new() };
            let host = Arc::new(host);
            hosts.insert(name.into(), host.clone());
            host
        };
        let world = self.clone();
        tokio::spawn(async move {
            loop {
                // The polls that this life has: any await of any of its tasks can be the last.
                let polls =
                    |world: &World| if world.permille(500) { world.range(1, 150) } else { world.range(100, 900) };
                let kill_in = (mortal && world.chance(|f| f.kill)).then(|| polls(&world));
                let freeze_in = (mortal && world.chance(|f| f.freeze)).then(|| polls(&world));
                let epoch = {
                    let mut state = lock(&host.state);
                    (state.kill_in, state.freeze_in, state.frozen_until) = (kill_in, freeze_in, None);
                    state.epoch
                };
                world.trace(&format!("boot {} kill in {kill_in:?} freeze in {freeze_in:?}", host.name));
                let ctx = Ctx { world: world.clone(), host: host.clone(), epoch };
                ctx.spawn(main(ctx.clone()));
                host.down.notified().await;
                sleep(Duration::from_millis(world.range(10, 20_000))).await;
            }
        });
    }

    /// A task that belongs to no host: an agent, an operator, the network. It is never killed, and its panic fails the
    /// seed.
    pub fn outside(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) -> tokio::task::JoinHandle<()> {
        let world = self.clone();
        tokio::spawn(async move {
            if let Err(panic) = futures_util::FutureExt::catch_unwind(AssertUnwindSafe(task)).await {
                world.fail(format!("panic outside of the hosts: {}", message(&*panic)));
            }
        })
    }
}

/// How far the payments of one life have come: by the token of the reservation's lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Reserved,
    /// The signed payload is on its way to the ledger and the seller.
    Sent,
}

pub struct Host {
    pub name: String,
    pub ip: IpAddr,
    state: Mutex<HostState>,
    down: Notify,
}

#[derive(Default)]
struct HostState {
    epoch: u64,
    kill_in: Option<u64>,
    freeze_in: Option<u64>,
    frozen_until: Option<Instant>,
    parked: Vec<Waker>,
    tasks: Vec<Slot>,
    listener: Option<mpsc::UnboundedSender<Stream>>,
    stages: BTreeMap<[u8; 16], (Stage, Option<String>)>,
}

type Slot = Arc<Mutex<Held>>;
struct Held {
    future: Option<BoxFuture<'static, ()>>,
    waker: Option<Waker>,
}

impl Host {
    pub fn listener(&self) -> Option<mpsc::UnboundedSender<Stream>> {
        lock(&self.state).listener.clone()
    }

    pub fn epoch(&self) -> u64 {
        lock(&self.state).epoch
    }

    fn end_life(&self) -> Vec<Slot> {
        let mut state = lock(&self.state);
        state.epoch += 1;
        (state.kill_in, state.freeze_in, state.frozen_until, state.listener) = (None, None, None, None);
        state.parked.clear();
        std::mem::take(&mut state.tasks)
    }

    fn kill(&self, world: &World) {
        let stages = std::mem::take(&mut lock(&self.state).stages);
        world.count(|stats| {
            stats.kills += 1;
            stats.kills_after_reserve += u64::from(stages.values().any(|(stage, _)| *stage == Stage::Reserved));
            stats.kills_after_sign += u64::from(stages.values().any(|(stage, _)| *stage == Stage::Sent));
        });
        world.trace(&format!("KILL {}", self.name));
        for slot in self.end_life() {
            // Taken out first: what a future drops must not run under our lock.
            let (future, waker) = {
                let mut held = lock(&slot);
                (held.future.take(), held.waker.take())
            };
            drop(future);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        self.down.notify_one();
    }

    /// A machine that sleeps, a process that is stopped: time passes, nothing runs.
    fn freeze(self: &Arc<Self>, world: &Arc<World>) {
        let length = Duration::from_millis(if world.permille(500) {
            world.range(1_000, 20_000)
        } else {
            world.range(20_000, 300_000)
        });
        lock(&self.state).frozen_until = Some(Instant::now() + length);
        world.count(|stats| stats.freezes += 1);
        world.trace(&format!("FREEZE {} {} ms", self.name, length.as_millis()));
        let (host, epoch) = (self.clone(), self.epoch());
        tokio::spawn(async move {
            sleep(length).await;
            let parked = {
                let mut state = lock(&host.state);
                if state.epoch != epoch {
                    return;
                }
                state.frozen_until = None;
                std::mem::take(&mut state.parked)
            };
            parked.into_iter().for_each(Waker::wake);
        });
    }
}

struct HostTask {
    slot: Slot,
    ctx: Ctx,
}

impl Future for HostTask {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let (world, host) = (&self.ctx.world, &self.ctx.host);
        if lock(&self.slot).future.is_none() {
            return Poll::Ready(());
        }
        {
            let mut state = lock(&host.state);
            if state.frozen_until.is_some() {
                state.parked.push(cx.waker().clone());
                drop(state);
                lock(&self.slot).waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        let taken = {
            let mut held = lock(&self.slot);
            held.waker = Some(cx.waker().clone());
            held.future.take()
        };
        let Some(mut future) = taken else { return Poll::Ready(()) };
        let polled = match std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(polled) => polled,
            Err(panic) => {
                world.fail(format!("panic on {}: {}", host.name, message(&*panic)));
                return Poll::Ready(());
            }
        };
        let polls = {
            let mut polls = lock(&world.polls);
            *polls += 1;
            *polls
        };
        if polls > MAX_POLLS {
            world.fail(format!("livelock on {}", host.name));
            return Poll::Ready(());
        }
        let (killed, frozen) = {
            let mut state = lock(&host.state);
            if polled.is_ready() {
                state.tasks.retain(|slot| !Arc::ptr_eq(slot, &self.slot));
            }
            let burns = |fuse: &mut Option<u64>| match fuse {
                Some(left) => {
                    *left = left.saturating_sub(1);
                    *left == 0 && fuse.take().is_some()
                }
                None => false,
            };
            (burns(&mut state.kill_in), burns(&mut state.freeze_in))
        };
        if killed {
            host.kill(world);
            return Poll::Ready(());
        }
        if polled.is_pending() {
            lock(&self.slot).future = Some(future);
        }
        if frozen {
            host.freeze(world);
        }
        polled
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("?")
}

/// One life of one host: all that a process holds of the world.
#[derive(Clone)]
pub struct Ctx {
    pub world: Arc<World>,
    pub host: Arc<Host>,
    pub epoch: u64,
}

impl Ctx {
    pub fn name(&self) -> &str {
        &self.host.name
    }

    pub fn alive(&self) -> bool {
        lock(&self.host.state).epoch == self.epoch
    }

    pub fn trace(&self, event: &str) {
        self.world.trace(&format!("{} {event}", self.host.name));
    }

    pub fn listen(&self) -> Listener {
        let (sender, receiver) = mpsc::unbounded_channel();
        lock(&self.host.state).listener = Some(sender);
        Listener(receiver)
    }

    /// Nothing of a dead life can start anything: its drop code included.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let slot = Arc::new(Mutex::new(Held { future: Some(Box::pin(task)), waker: None }));
        {
            let mut state = lock(&self.host.state);
            if state.epoch != self.epoch {
                return;
            }
            state.tasks.push(slot.clone());
        }
        tokio::spawn(HostTask { slot, ctx: self.clone() });
    }

    /// What a payment does from here on is what a kill tries most.
    pub fn reserved(&self, token: [u8; 16]) {
        self.tempt();
        lock(&self.host.state).stages.insert(token, (Stage::Reserved, None));
    }

    /// Here a kill or a freeze would hurt most.
    pub fn tempt(&self) {
        let soon = |likely: bool| (likely && self.world.permille(250)).then(|| self.world.range(1, 60));
        let (kill, freeze) = (self.world.chance(|f| f.kill), self.world.chance(|f| f.freeze));
        let (kill, freeze) = (soon(kill), soon(freeze));
        let mut state = lock(&self.host.state);
        state.kill_in = kill.or(state.kill_in);
        state.freeze_in = freeze.or(state.freeze_in);
    }

    pub fn sent(&self, token: [u8; 16], payment: String) {
        lock(&self.host.state).stages.insert(token, (Stage::Sent, Some(payment)));
    }

    pub fn closed(&self, token: Option<[u8; 16]>, payment: &str) {
        let gone = |t: &[u8; 16], p: &Option<String>| Some(*t) == token || p.as_deref() == Some(payment);
        lock(&self.host.state).stages.retain(|t, (_, p)| !gone(t, p));
    }

    /// The ports of the business code.
    pub fn ports(&self) -> ports::World {
        let ctx = Arc::new(self.clone());
        ports::World { clock: ctx.clone(), entropy: ctx.clone(), net: ctx.clone(), spawn: ctx }
    }
}

impl ports::Clock for Ctx {
    fn unix_ms(&self) -> u64 {
        self.world.unix_ms()
    }
}

impl ports::Entropy for Ctx {
    fn fill(&self, buf: &mut [u8]) {
        self.world.fill(buf);
    }
}

impl ports::Spawn for Ctx {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        Ctx::spawn(self, task);
    }
}
