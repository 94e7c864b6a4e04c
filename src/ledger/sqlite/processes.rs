//! Several real processes on one file, one of them killed again and again: this test binary runs itself.
#![allow(clippy::disallowed_methods, reason = "the test starts and kills processes, and waits for what they write")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use super::*;
use crate::ledger::table::{CALL, Call, NOON, amount, limit};
use crate::ports::Clock;

const PLACE: &str = "TOLLWAY_TEST_LEDGER_PLACE";
const NUMBER: &str = "TOLLWAY_TEST_LEDGER_NUMBER";
const STEPS: &str = "TOLLWAY_TEST_LEDGER_STEPS";
const BEGAN: &str = "TOLLWAY_TEST_LEDGER_BEGAN";

const WORKERS: u8 = 3;
const KILLS: u8 = 4;
const LEASE_MS: u64 = 300;
const CAP: u64 = 1_500;
const ENOUGH_LEASES: usize = 50;
/// The file whose presence lets the workers end.
const STOP: &str = "stop";

/// Noon when the test began, in every process: the run never meets a midnight.
struct SharedClock {
    began: u64,
    ahead: u64,
}
impl Clock for SharedClock {
    fn unix_ms(&self) -> u64 {
        NOON + self.ahead + crate::ports::machine::world().0.clock.unix_ms().saturating_sub(self.began)
    }
}

async fn open(place: &Path, began: u64, ahead: u64) -> SqliteLedger {
    let mut world = crate::ports::machine::world().0;
    world.clock = Arc::new(SharedClock { began, ahead });
    let ring = KeyRing::new(vec![vec![7; 32]]).unwrap();
    let options = Options { busy_timeout: Duration::from_secs(30), ..Options::default() };
    SqliteLedger::open_with(&place.join("ledger.sqlite"), world, Some(ring), options).await.unwrap()
}

/// A process that does not outlive the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(place: &Path, began: u64, number: u8, steps: u32) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ledger::sqlite::processes::one_of_several", "--nocapture"])
        .env(PLACE, place)
        .env(NUMBER, number.to_string())
        .env(STEPS, steps.to_string())
        .env(BEGAN, began.to_string())
        .stdout(Stdio::null())
        .spawn();
    Process(child.unwrap())
}

/// What a process wrote of itself; the last line of a killed one may be cut.
fn log(place: &Path, number: u8) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(place.join(format!("{number}.log"))).unwrap_or_default();
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    whole.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_on_one_file_cross_no_cap_and_lease_nothing_twice_though_one_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let began = crate::ports::machine::world().0.clock.unix_ms();
    let ledger = open(place, began, 0).await;
    ledger.replace_limits("file", &[Limit { per_day: Some(Amount::from_u64(CAP)), ..limit() }]).await.unwrap();

    let mut workers: Vec<Process> = (0..WORKERS).map(|number| start(place, began, number, 120)).collect();
    for victim in WORKERS..WORKERS + KILLS {
        let mut child = start(place, began, victim, u32::MAX);
        while log(place, victim).len() < 15 {
            assert!(child.0.try_wait().unwrap().is_none(), "it ended by itself");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        child.0.kill().unwrap();
        drop(child);
    }
    // How many leases a step makes depends on how fast the machine is: the workers go on until there are enough.
    let read = |numbers| -> Vec<_> { Iterator::map(numbers, |number| log(place, number)).collect() };
    let began_to_wait = tokio::time::Instant::now();
    while leases(&read(0..WORKERS)) <= ENOUGH_LEASES {
        assert!(began_to_wait.elapsed() < Duration::from_secs(120), "the run leased too little to prove anything");
        for worker in &mut workers {
            assert!(worker.0.try_wait().unwrap().is_none(), "a worker ended by itself");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    std::fs::write(place.join(STOP), "").unwrap();
    for worker in &mut workers {
        assert!(worker.0.wait().unwrap().success());
    }

    let logs = read(0..WORKERS + KILLS);
    leases(&logs);
    same_keys_same_payments(&logs);
    assert!(most_used(place).await > CAP / 2, "the run came nowhere near the cap");

    // Nothing is stuck: a day later a sweep has them all, and every one ends.
    let later = open(place, began, 12 * 3_600_000).await;
    loop {
        let due = later.take_due(1_000, LEASE_MS).await.unwrap();
        if due.is_empty() {
            break;
        }
        for (payment, lease) in due {
            assert!(later.expire(payment.payment_id, &lease, Reason::ExpiredUnspent).await.unwrap());
        }
    }
    assert_eq!(later.open_rows().await.unwrap(), OpenRows::default());
    let differences = later.audit().await.unwrap().differences;
    assert_eq!(differences.iter().find(|found| found.what != "late_success"), None);
}

/// Two holders of one payment never overlap: each has it from when it was told so until it began to give it back, or
/// until the lease's end. Returns how many leases there were.
fn leases(logs: &[Vec<Vec<String>>]) -> usize {
    let mut held: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    let mut count = 0;
    for log in logs {
        let back: BTreeMap<&str, u64> =
            log.iter().filter(|line| line[0] == "back").map(|line| (&*line[1], line[2].parse().unwrap())).collect();
        for line in log.iter().filter(|line| line[0] == "lease") {
            let [_, payment, token, from, until] = &line[..] else { panic!("{line:?}") };
            let (from, until): (u64, u64) = (from.parse().unwrap(), until.parse().unwrap());
            let until = back.get(&**token).map_or(until, |back| until.min(*back));
            held.entry(payment).or_default().push((from, until));
            count += 1;
        }
    }
    for (payment, mut times) in held {
        times.sort_unstable();
        for pair in times.windows(2) {
            assert!(pair[0].1 <= pair[1].0, "{payment} was leased twice at once: {pair:?}");
        }
    }
    count
}

fn same_keys_same_payments(logs: &[Vec<Vec<String>>]) {
    let mut payments: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in logs.iter().flatten().filter(|line| line[0] == "key") {
        payments.entry(&line[1]).or_default().insert(&line[2]);
    }
    assert!(payments.len() > 5, "the run used too few keys");
    assert!(payments.values().all(|ids| ids.len() == 1), "{payments:?}");
}

/// The highest use of the day, from the events in the order in which they were committed.
async fn most_used(place: &Path) -> u64 {
    let mut db = SqliteConnectOptions::new().filename(place.join("ledger.sqlite")).connect().await.unwrap();
    let events: Vec<(String, String, Option<String>)> = sqlx::query_as(
        "SELECT e.event, p.reserved, e.amount FROM payment_events e JOIN payments p USING (payment_identifier) \
         WHERE e.event IN ('reserved', 'settled', 'released') ORDER BY e.id",
    )
    .fetch_all(&mut db)
    .await
    .unwrap();
    let (mut used, mut most) = (0, 0);
    for (event, reserved, amount) in events {
        let reserved: u64 = reserved.parse().unwrap();
        used = match &*event {
            "reserved" => used + reserved,
            "released" => used - reserved,
            _ => used - reserved + amount.unwrap().parse::<u64>().unwrap(),
        };
        assert!(used <= CAP, "{used} of {CAP} were used");
        most = most.max(used);
    }
    most
}

/// Does nothing but in a process that the test above started.
#[tokio::test]
async fn one_of_several() {
    let Ok(place) = std::env::var(PLACE).map(PathBuf::from) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (me, steps, began) = (number(NUMBER) as u8, number(STEPS), number(BEGAN));
    let ledger = open(&place, began, 0).await;
    let mut worker = Worker {
        me,
        seed: u64::from(me),
        log: std::fs::File::create(place.join(format!("{me}.log"))).unwrap(),
        ledger,
    };
    let mut step = 0;
    while step < steps || !place.join(STOP).exists() {
        worker.step(step).await;
        step += 1;
    }
}

struct Worker {
    me: u8,
    seed: u64,
    log: std::fs::File,
    ledger: SqliteLedger,
}

impl Worker {
    fn random(&mut self) -> u64 {
        // SplitMix64.
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn write(&mut self, line: &str) {
        self.log.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn used(&mut self, key: Option<u8>, id: PaymentId) {
        if let Some(key) = key {
            self.write(&format!("key {key} {}", id.to_hex()));
        }
    }

    fn leased(&mut self, id: PaymentId, lease: &Lease) {
        let (id, token, now) = (id.to_hex(), hex(&lease.token), self.ledger.world.unix_ms());
        self.write(&format!("lease {id} {token} {now} {}", lease.expires_ms));
    }

    /// Written before the lease is given back: whoever has it next has it after this moment.
    fn back(&mut self, lease: &Lease) {
        let now = self.ledger.world.unix_ms();
        self.write(&format!("back {} {now}", hex(&lease.token)));
    }

    async fn step(&mut self, step: u64) {
        match self.random() % 5 {
            0..=2 => self.pay(step).await,
            3 => self.sweep().await,
            _ => self.recover().await,
        }
    }

    async fn pay(&mut self, step: u64) {
        let mut name = [self.me; 32];
        name[..8].copy_from_slice(&step.to_be_bytes());
        // Every other call has a key that all processes use, or is like nothing else.
        let key = Some((self.random() % 40) as u8).filter(|key| key % 2 == 0);
        let mut intent = Call { key, call: key.unwrap_or(0), amount: "100", max: "100", ..CALL }.intent();
        if key.is_none() {
            intent.quote.call_hash = name;
        }
        intent.payment_id = PaymentId::from_bytes(name);
        intent.authorization.nonce = format!("{}{step:06}", u32::from(self.me) + 1);
        intent.lease_ms = LEASE_MS;
        let id = intent.payment_id;
        let lease = match self.ledger.decide(&intent).await.unwrap() {
            Decision::Fresh(lease) => lease,
            Decision::Existing(payment) => return self.used(key, payment.payment_id),
            Decision::Exceeded { .. } => return,
            other => panic!("{other:?}"),
        };
        self.used(key, id);
        self.leased(id, &lease);
        self.ledger.store_payload(id, &lease, b"signed").await.unwrap();
        let end = self.random() % 4;
        if end < 3 {
            self.back(&lease);
        }
        match end {
            0 => drop(self.ledger.settle(self.receipt(id, "1")).await.unwrap()),
            1 => drop(self.ledger.release(id, &lease, Reason::Cancelled).await.unwrap()),
            2 => drop(self.ledger.in_doubt(id, &lease, Reason::NoAnswer).await.unwrap()),
            // Its owner forgets it.
            _ => (),
        }
    }

    async fn sweep(&mut self) {
        for (payment, lease) in self.ledger.take_due(3, LEASE_MS).await.unwrap() {
            let id = payment.payment_id;
            self.leased(id, &lease);
            let (end, later) = (self.random() % 4, self.random() % 200);
            if end < 3 {
                self.back(&lease);
            }
            match end {
                0 => drop(self.ledger.look_again(id, &lease, lease.expires_ms - LEASE_MS + later).await.unwrap()),
                1 => drop(self.ledger.expire(id, &lease, Reason::ExpiredUnspent).await.unwrap()),
                2 => {
                    let request = SettleRequest { evidence: Evidence::Chain, outcome: None, ..self.receipt(id, "1") };
                    self.ledger.settle(request).await.unwrap();
                }
                _ => (),
            }
        }
    }

    async fn recover(&mut self) {
        let filter = Filter { state: Some(State::InDoubt), agent: None, limit: 20 };
        let doubts = self.ledger.list(&filter).await.unwrap();
        let pick = usize::try_from(self.random()).unwrap_or(0).checked_rem(doubts.len());
        let Some(payment) = pick.map(|pick| &doubts[pick]) else { return };
        let Recovery::Taken(taken) = self.ledger.take_recovery(payment.payment_id, LEASE_MS).await.unwrap() else {
            return;
        };
        self.leased(payment.payment_id, &taken.lease);
        let end = self.random() % 3;
        if end < 2 {
            self.back(&taken.lease);
        }
        match end {
            0 => drop(self.ledger.end_recovery(payment.payment_id, &taken.lease, None).await.unwrap()),
            1 => drop(self.ledger.settle(self.receipt(payment.payment_id, "1")).await.unwrap()),
            _ => (),
        }
    }

    fn receipt(&self, payment_id: PaymentId, settled: &str) -> SettleRequest<'static> {
        SettleRequest {
            payment_id,
            amount: amount(settled),
            transaction: None,
            evidence: Evidence::Receipt,
            outcome: Some(b"{}"),
            unfinished: false,
        }
    }
}

fn hex(token: &[u8; 16]) -> String {
    token.iter().map(|b| format!("{b:02x}")).collect()
}
