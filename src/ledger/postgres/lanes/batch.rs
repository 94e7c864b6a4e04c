//! One batch: two round trips, and what is done when one of them fails.
//!
//! ```text
//! BEGIN, the gate, lock the windows, read            decide            write all, read the repeated ones, COMMIT
//! ```

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::{join, join_all};
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::ToSql;

use super::decide::{self, HoldVerdict, Known, Limits, Plan, Read};
use super::entry::{Answer, End, Entry, Hold, Turns};
use super::statements::{Ask, Statements};
use super::{Lane, add};
use crate::ledger::limits::WindowKey;
use crate::ledger::postgres::connect::no_connection;
use crate::ledger::postgres::numeric::Numeric;
use crate::ledger::postgres::rows::{self, get, parsed, signed, unsigned};
use crate::ledger::postgres::tx::{Attempts, Fault, fault};
use crate::ledger::postgres::windows;
use crate::ledger::postgres::wire::{COMMIT, Guarded, Session};
use crate::ledger::{
    Decision, Evidence, Lease, LedgerError, PAYLOAD_AFTER_SETTLEMENT_MS, Payment, SettleOutcome, State, clock,
};
use crate::money::{IdempotencyKey, PaymentId, Unit};

/// Runs of a batch that only make windows, or find another day.
const LOOKS: usize = 4;

/// A lane's connection, between two transactions.
pub(super) struct Connection {
    guarded: Guarded,
    statements: Statements,
    /// The ledger's time, and when it was read: by it the day of the next batch is guessed.
    time: Option<(u64, Instant)>,
}

impl Connection {
    async fn open(lane: &Lane) -> Result<Connection, Fault> {
        let guarded = Guarded::new(lane.wire.session(lane.pool.get().await.map_err(no_connection)?));
        match tokio::time::timeout(lane.wire.patience(), Statements::ready(guarded.session()?)).await {
            Ok(statements) => Ok(Connection { guarded, statements: statements.map_err(fault)?, time: None }),
            Err(_) => Err(Fault::NoConnection(silent())),
        }
    }

    fn line(&self) -> Result<Line<'_>, LedgerError> {
        Ok(Line { session: self.guarded.session()?, statements: &self.statements })
    }

    fn is_closed(&self) -> bool {
        !self.guarded.session().is_ok_and(|session| !session.is_closed())
    }

    /// A guess, which the database's word under the locks confirms or not.
    fn today(&self, lane: &Lane) -> String {
        let elapsed = |since: Instant| u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        clock::day(match self.time {
            Some((time, since)) => time.saturating_add(elapsed(since)),
            None => lane.world.unix_ms(),
        })
    }
}

#[derive(Clone, Copy)]
struct Line<'c> {
    session: &'c Session,
    statements: &'c Statements,
}

impl Line<'_> {
    async fn ask(&self, ask: Ask, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, tokio_postgres::Error> {
        self.statements.rows(self.session, ask, values).await
    }
}

fn silent() -> LedgerError {
    LedgerError::Unavailable("the database does not answer".to_owned())
}

/// How a run of a batch failed.
enum Failed {
    Fault(Fault),
    /// A unique index refused a row: somebody was faster.
    Unique,
    /// The database refuses the values of some entry. Whose, a transaction for each of them finds out.
    Refused,
}

impl From<LedgerError> for Failed {
    fn from(error: LedgerError) -> Failed {
        Failed::Fault(Fault::Final(error))
    }
}

/// Of what failed before COMMIT was executed.
fn failed(error: tokio_postgres::Error) -> Failed {
    match error.code() {
        Some(code) if *code == SqlState::UNIQUE_VIOLATION => Failed::Unique,
        Some(code) if code.code().starts_with("22") || code.code().starts_with("23") => Failed::Refused,
        _ => Failed::Fault(fault(error)),
    }
}

enum Ended {
    Decided(Written),
    /// They do not exist yet.
    Missing(BTreeSet<WindowKey>),
    /// It is another day than the one whose windows are locked.
    Midnight,
}

/// What a batch did, as committed.
struct Written {
    plan: Plan,
    /// What RETURNING gave.
    done: BTreeSet<PaymentId>,
    rows: BTreeMap<PaymentId, Payment>,
}

/// From one run of a batch to the next.
#[derive(Clone, Copy, Default)]
struct Care {
    /// A unique index refused the last run: conflicts are skipped, and settlements run alone.
    careful: bool,
    /// An earlier run may have taken effect.
    may_be_done: bool,
}

/// Answers every entry.
pub(super) async fn run(lane: &Lane, connection: &mut Option<Connection>, batch: Vec<Entry>) {
    let mut attempts = Attempts::repeatable();
    let mut care = Care::default();
    let mut looks = 0;
    let ended = loop {
        let run = attempt(lane, connection, &batch, care).await;
        let fault = match run {
            Ok(Ended::Decided(written)) => break Ok(written),
            Ok(Ended::Midnight) if looks < LOOKS => {
                looks += 1;
                continue;
            }
            Ok(Ended::Missing(keys)) if looks < LOOKS => {
                looks += 1;
                match make(lane, connection, &keys).await {
                    Ok(()) => continue,
                    Err(fault) => fault,
                }
            }
            Ok(Ended::Midnight | Ended::Missing(_)) => break Err(None),
            Err(Failed::Unique) if !care.careful => {
                add(&lane.figures.again, 1);
                care.careful = true;
                continue;
            }
            Err(Failed::Unique | Failed::Refused) => break Err(None),
            Err(Failed::Fault(fault)) => fault,
        };
        match attempts.judge(fault).await {
            Ok(()) => {
                add(&lane.figures.again, 1);
                care.may_be_done = attempts.may_be_done();
            }
            Err(error) => break Err(Some(error)),
        }
    };
    match ended {
        Ok(written) => answer(lane, batch, written),
        Err(Some(error)) => batch.into_iter().for_each(|entry| entry.fail(&error)),
        Err(None) => {
            add(&lane.figures.alone, batch.len());
            let mut turns = Turns::default();
            batch.into_iter().for_each(|entry| entry.alone(&mut turns));
        }
    }
}

/// One run, with the connection left as the next one may find it.
async fn attempt(
    lane: &Lane,
    connection: &mut Option<Connection>,
    batch: &[Entry],
    care: Care,
) -> Result<Ended, Failed> {
    // A connection that is not put back ends here.
    let mut used = match connection.take() {
        Some(open) if !open.is_closed() => open,
        _ => Connection::open(lane).await.map_err(Failed::Fault)?,
    };
    let ended = once(lane, &mut used, batch, care).await;
    let usable = match &ended {
        Ok(Ended::Decided(_)) => true,
        Err(Failed::Fault(Fault::Unknown(_) | Fault::NoWrites(_) | Fault::Final(LedgerError::Unavailable(_)))) => false,
        // Its transaction is open, or failed: it is ended before anything else is sent.
        Ok(Ended::Missing(_) | Ended::Midnight) | Err(_) => {
            let rollback = used.line()?.session.batch("ROLLBACK");
            matches!(tokio::time::timeout(lane.wire.patience(), rollback).await, Ok(Ok(())))
        }
    };
    if usable {
        *connection = Some(used);
    }
    ended
}

fn split(batch: &[Entry]) -> (Vec<&Hold>, Vec<&End>) {
    let (mut holds, mut ends) = (Vec::new(), Vec::new());
    for entry in batch {
        match entry {
            Entry::Hold(hold, ..) => holds.push(&**hold),
            Entry::End(end, ..) => ends.push(&**end),
        }
    }
    (holds, ends)
}

async fn once(lane: &Lane, connection: &mut Connection, batch: &[Entry], care: Care) -> Result<Ended, Failed> {
    let (holds, ends) = split(batch);
    let today = connection.today(lane);
    let mut read = within(lane, read(lane, connection.line()?, &holds, &ends, &today, care)).await??;
    connection.time = Some((read.now, Instant::now()));
    if !holds.is_empty() && clock::day(read.now) != today {
        return Ok(Ended::Midnight);
    }
    let plan = decide::plan(&mut read, &holds, &ends, care.careful);
    if !plan.missing.is_empty() {
        return Ok(Ended::Missing(plan.missing));
    }
    let write = write(lane, connection.line()?, &holds, &ends, &plan, read.now, care);
    // From here on a silence says nothing about the commit.
    match tokio::time::timeout(lane.wire.patience(), write).await {
        Ok(written) => written.map(|(done, rows)| Ended::Decided(Written { plan, done, rows })),
        Err(_) => Err(Failed::Fault(Fault::Unknown(unknown()))),
    }
}

fn unknown() -> LedgerError {
    LedgerError::Unavailable("the connection was lost while a transaction was committed".to_owned())
}

async fn within<T>(lane: &Lane, doing: impl Future<Output = T>) -> Result<T, Failed> {
    tokio::time::timeout(lane.wire.patience(), doing).await.map_err(|_| Failed::from(silent()))
}

/// Round trip 1. Futures go on the wire in the order of their first polls: `join` and `join_all` keep it.
async fn read<'a>(
    lane: &Lane,
    line: Line<'_>,
    holds: &[&'a Hold],
    ends: &[&'a End],
    today: &str,
    care: Care,
) -> Result<Read<'a>, Failed> {
    let mut keys = BTreeSet::new();
    for hold in holds {
        keys.extend(WindowKey::of(&hold.agent, &hold.unit, today, hold.session.as_deref()));
    }
    let [mut agents, mut networks, mut assets, mut kinds, mut names] = [const { Vec::<&str>::new() }; 5];
    for WindowKey { agent, unit, kind, key } in &keys {
        agents.push(agent);
        networks.push(unit.network.as_str());
        assets.push(unit.asset.as_str());
        kinds.push(kind);
        names.push(key);
    }
    let ids: Vec<&str> = ends.iter().map(|end| end.id.as_str()).collect();
    let transactions: Vec<Option<&str>> = ends.iter().map(|end| end.transaction.as_deref()).collect();
    let windows: [&(dyn ToSql + Sync); 6] = [&agents, &networks, &assets, &kinds, &names, &ids];
    let (windows_ask, windows_values) = match (holds.is_empty(), ends.is_empty()) {
        (false, true) => (Ask::HoldWindows, &windows[..5]),
        (true, _) => (Ask::EndWindows, &windows[5..]),
        (false, false) => (Ask::BothWindows, &windows[..]),
    };

    let mut subjects: BTreeSet<&str> = holds.iter().map(|hold| hold.agent.as_str()).collect();
    let units: BTreeSet<&Unit> = holds.iter().map(|hold| &hold.unit).collect();
    subjects.extend(["*", "total"]);
    let subjects: Vec<&str> = subjects.into_iter().collect();
    let of_networks: Vec<&str> = units.iter().map(|unit| unit.network.as_str()).chain(["*"]).collect();
    let of_assets: Vec<&str> = units.iter().map(|unit| unit.asset.as_str()).chain(["*"]).collect();
    let limits: [&(dyn ToSql + Sync); 3] = [&subjects, &of_networks, &of_assets];
    let (time_ask, time_values) = match holds.is_empty() {
        true => (Ask::Now, &limits[..0]),
        false => (Ask::Limits, &limits[..]),
    };

    let keyed: Vec<(&'a str, &'a str)> = holds
        .iter()
        .filter_map(|hold| Some((hold.agent.as_str(), hold.key.as_ref().map(IdempotencyKey::as_str)?)))
        .collect();
    let keyless: Vec<&'a Hold> = holds.iter().copied().filter(|hold| hold.key.is_none()).collect();
    let (keyed_agents, keyed_keys): (Vec<&str>, Vec<&str>) = keyed.iter().copied().unzip();
    let keyless_agents: Vec<&str> = keyless.iter().map(|hold| hold.agent.as_str()).collect();
    let keyless_hashes: Vec<&[u8]> = keyless.iter().map(|hold| &hold.call_hash[..]).collect();
    let keyed_values: [&(dyn ToSql + Sync); 2] = [&keyed_agents, &keyed_keys];
    let keyless_values: [&(dyn ToSql + Sync); 2] = [&keyless_agents, &keyless_hashes];
    let ends_values: [&(dyn ToSql + Sync); 2] = [&ids, &transactions];
    let hold_ids: Vec<&str> = holds.iter().map(|hold| hold.id.as_str()).collect();
    let tokens: Vec<&[u8]> = holds.iter().map(|hold| &hold.token[..]).collect();
    let mine_values: [&(dyn ToSql + Sync); 2] = [&hold_ids, &tokens];

    let ask = async |wanted: bool, ask: Ask, values: &[&(dyn ToSql + Sync)]| match wanted {
        true => line.ask(ask, values).await,
        false => Ok(Vec::new()),
    };
    let asked = join_all([
        ask(true, Ask::Gate, &[]),
        ask(true, windows_ask, windows_values),
        ask(true, time_ask, time_values),
        ask(!keyed.is_empty(), Ask::Keyed, &keyed_values),
        ask(!keyless.is_empty(), Ask::Keyless, &keyless_values),
        ask(!ends.is_empty() && !care.careful, Ask::Ends, &ends_values),
        ask(!holds.is_empty() && care.may_be_done, Ask::Mine, &mine_values),
    ]);
    let begin = lane.wire.begin();
    let begin = line.session.batch(&begin);
    let (begun, asked) = join(begin, asked).await;
    begun.map_err(failed)?;
    let asked: Vec<Vec<Row>> = asked.into_iter().collect::<Result<_, _>>().map_err(failed)?;
    let [_, windows, time, keyed_rows, keyless_rows, ends_rows, mine] = &asked[..] else {
        return Err(LedgerError::Inconsistent("a batch was not read".to_owned()).into());
    };

    let now = time.first().map(|row| get::<i64>(row, "now")).transpose()?;
    let now = unsigned(now.ok_or_else(|| LedgerError::Inconsistent("the database's time cannot be read".to_owned()))?)?;
    let mut read = Read { now, ..Read::default() };
    for row in windows {
        let (key, window) = rows::numeric_window(row)?;
        read.windows.insert(key, window);
    }
    if !holds.is_empty() {
        read.limits = limit_rows(time)?;
    }
    let expired = |row: &Row| -> Result<bool, LedgerError> {
        let lease = get::<Option<i64>>(row, "lease_expires")?.map(unsigned).transpose()?;
        let reserved = get::<Option<&str>>(row, "state")? == Some(State::Reserved.as_str());
        Ok(reserved && lease.is_none_or(|end| end <= now))
    };
    for row in keyed_rows {
        let Some(call) = nth(&keyed, row)? else { continue };
        if let Some(hash) = get::<Option<&[u8]>>(row, "call_hash")? {
            let call_hash = hash.try_into().map_err(|_| LedgerError::Inconsistent("a call hash".to_owned()))?;
            let known = Known { id: parsed(row, "payment_identifier")?, call_hash, expired: expired(row)? };
            read.keyed.insert(*call, known);
        }
        if get::<Option<&str>>(row, "spent_by")?.is_some() {
            read.spent.insert(*call, parsed(row, "spent_by")?);
        }
    }
    for row in keyless_rows {
        let Some(hold) = nth(&keyless, row)? else { continue };
        let call = (hold.agent.as_str(), hold.call_hash);
        let id = parsed(row, "payment_identifier")?;
        let known = Known { id, call_hash: hold.call_hash, expired: expired(row)? };
        let list = if get::<bool>(row, "twin")? { &mut read.twins } else { &mut read.open };
        list.insert(call, known);
    }
    for row in mine {
        let id: PaymentId = parsed(row, "payment_identifier")?;
        let Some(hold) = holds.iter().find(|hold| hold.payment_id == id) else { continue };
        let (expires_ms, sign_before_ms) = (unsigned(get(row, "lease_expires")?)?, unsigned(get(row, "sign_before")?)?);
        read.mine.insert(id, Lease { token: hold.token, expires_ms, sign_before_ms });
    }
    for row in ends_rows {
        let id: PaymentId = parsed(row, "payment_identifier")?;
        let taken_by: Option<PaymentId> = match get::<Option<&str>>(row, "taken_by")? {
            Some(_) => Some(parsed(row, "taken_by")?),
            None => None,
        };
        let found = decide::Row {
            agent: parsed(row, "agent")?,
            session: get(row, "session")?,
            day: get(row, "day")?,
            unit: Unit { network: parsed(row, "network")?, asset: parsed(row, "asset")? },
            reserved: get::<Numeric>(row, "reserved")?.0,
            state: State::from_word(get(row, "state")?)
                .ok_or_else(|| LedgerError::Inconsistent("a payment without a state".to_owned()))?,
            taken: taken_by.is_some_and(|by| by != id),
        };
        read.rows.insert(id, found);
    }
    Ok(read)
}

/// Of a row's column `i`, which counts from one.
fn nth<'v, T>(asked: &'v [T], row: &Row) -> Result<Option<&'v T>, LedgerError> {
    let at = usize::try_from(get::<i64>(row, "i")?).ok().and_then(|i| i.checked_sub(1));
    Ok(at.and_then(|at| asked.get(at)))
}

fn limit_rows(found: &[Row]) -> Result<Limits, LedgerError> {
    let mut limits = Limits::default();
    for row in found {
        if get::<Option<&str>>(row, "subject")?.is_none() {
            continue;
        }
        match rows::limit(row)? {
            (subject, Some(limit)) => limits.rows.entry(subject.as_str().to_owned()).or_default().push(limit),
            (subject, None) => {
                limits.stopped.insert(subject.as_str().to_owned());
            }
        }
    }
    Ok(limits)
}

type Done = (BTreeSet<PaymentId>, BTreeMap<PaymentId, Payment>);

/// Round trip 2. What a COMMIT behind a failed statement says is nothing: so both are looked at.
async fn write(
    lane: &Lane,
    line: Line<'_>,
    holds: &[&Hold],
    ends: &[&End],
    plan: &Plan,
    now: u64,
    care: Care,
) -> Result<Done, Failed> {
    let at = signed(now);
    let fresh: Vec<(&Hold, &Lease)> = holds
        .iter()
        .zip(&plan.holds)
        .filter_map(|(hold, verdict)| match verdict {
            HoldVerdict::Fresh(lease) => Some((*hold, lease)),
            _ => None,
        })
        .collect();
    let settled: Vec<&End> =
        ends.iter().zip(&plan.ends).filter(|(_, settled)| **settled).map(|(end, _)| *end).collect();
    let repeated: BTreeSet<PaymentId> = plan
        .holds
        .iter()
        .filter_map(|verdict| match verdict {
            HoldVerdict::Existing(id) | HoldVerdict::Conflict(id) => Some(*id),
            _ => None,
        })
        .collect();
    let repeated: Vec<String> = repeated.into_iter().map(PaymentId::to_hex).collect();
    let gone: Vec<String> = plan.expired.iter().map(|id| id.to_hex()).collect();

    macro_rules! column {
        ($list:ident, $item:pat => $value:expr) => {
            $list.iter().map(|$item| $value).collect::<Vec<_>>()
        };
    }
    let day = clock::day(now);
    let c_id = column!(fresh, (hold, _) => hold.id.as_str());
    let c_nonce = column!(fresh, (hold, _) => &hold.id_nonce[..]);
    let c_agent = column!(fresh, (hold, _) => hold.agent.as_str());
    let c_session = column!(fresh, (hold, _) => hold.session.as_deref());
    let c_key = column!(fresh, (hold, _) => hold.key.as_ref().map(IdempotencyKey::as_str));
    let c_hash = column!(fresh, (hold, _) => &hold.call_hash[..]);
    let c_ref = column!(fresh, (hold, _) => hold.resource_ref.as_str());
    let c_version = column!(fresh, (hold, _) => hold.version_hash.as_str());
    let c_network = column!(fresh, (hold, _) => hold.unit.network.as_str());
    let c_scheme = column!(fresh, (hold, _) => hold.scheme.as_str());
    let c_asset = column!(fresh, (hold, _) => hold.unit.asset.as_str());
    let c_payer = column!(fresh, (hold, _) => hold.payer.as_str());
    let c_pay_to = column!(fresh, (hold, _) => hold.pay_to.as_str());
    let c_amount = column!(fresh, (hold, _) => Numeric(hold.ask.amount));
    let c_nonces = column!(fresh, (hold, _) => hold.nonce.as_str());
    let c_dead = column!(fresh, (hold, _) => signed(hold.dead_after));
    let c_at = column!(fresh, (hold, _) => signed(hold.at));
    let c_token = column!(fresh, (_, lease) => &lease.token[..]);
    let c_lease = column!(fresh, (_, lease) => signed(lease.expires_ms));
    let c_sign = column!(fresh, (_, lease) => signed(lease.sign_before_ms));
    let e_id = column!(settled, end => end.id.as_str());
    let e_amount = column!(settled, end => Numeric(end.amount));
    let e_transaction = column!(settled, end => end.transaction.as_deref());
    let e_evidence = column!(settled, end => Evidence::as_str(end.evidence));
    let e_body = column!(settled, end => end.body.as_deref());
    let e_unfinished = column!(settled, end => end.unfinished);
    let e_payload = signed(now.saturating_add(PAYLOAD_AFTER_SETTLEMENT_MS));
    let e_outcome = signed(now.saturating_add(lane.outcome_ttl_ms));
    let values: [&(dyn ToSql + Sync); 30] = [
        &at,
        &c_id,
        &c_nonce,
        &c_agent,
        &c_session,
        &c_key,
        &c_hash,
        &c_ref,
        &c_version,
        &c_network,
        &c_scheme,
        &c_asset,
        &c_payer,
        &c_pay_to,
        &c_amount,
        &c_nonces,
        &c_dead,
        &c_at,
        &c_token,
        &c_lease,
        &c_sign,
        &day,
        &e_id,
        &e_amount,
        &e_transaction,
        &e_evidence,
        &e_body,
        &e_unfinished,
        &e_payload,
        &e_outcome,
    ];
    let ends_values: Vec<&(dyn ToSql + Sync)> = values.iter().take(1).chain(values.iter().skip(22)).copied().collect();
    let (apply, apply_values) = match (fresh.is_empty(), settled.is_empty()) {
        (false, true) if care.careful => (Some(Ask::HoldCareful), &values[..22]),
        (false, true) => (Some(Ask::Hold), &values[..22]),
        (true, false) => (Some(Ask::End), &ends_values[..]),
        (false, false) => (Some(Ask::Both), &values[..]),
        (true, true) => (None, &values[..0]),
    };

    let expire = async {
        match gone.is_empty() {
            true => Ok(Vec::new()),
            false => line.ask(Ask::Expire, &[&at, &gone]).await,
        }
    };
    let apply = async {
        match apply {
            Some(ask) => line.ask(ask, apply_values).await,
            None => Ok(Vec::new()),
        }
    };
    let look = async {
        match repeated.is_empty() {
            true => Ok(Vec::new()),
            false => line.ask(Ask::Payments, &[&at, &repeated]).await,
        }
    };
    let commit = line.session.batch(COMMIT);
    let (expired, (applied, (looked, committed))) = join(expire, join(apply, join(look, commit))).await;
    expired.map_err(sent)?;
    let (applied, looked) = (applied.map_err(sent)?, looked.map_err(sent)?);
    committed.map_err(|error| match severity(&error) {
        Some(Severity::Error) => failed(error),
        _ => Failed::Fault(Fault::Unknown(unknown())),
    })?;

    let mut done = BTreeSet::new();
    for row in &applied {
        done.insert(parsed(row, "payment_identifier")?);
    }
    let mut rows = BTreeMap::new();
    for row in &looked {
        let payment = rows::payment(row)?;
        rows.insert(payment.payment_id, payment);
    }
    Ok((done, rows))
}

fn severity(error: &tokio_postgres::Error) -> Option<Severity> {
    error.as_db_error().and_then(|db| db.parsed_severity())
}

/// Of a statement behind which COMMIT was sent: a server that says it failed did not commit; silence says nothing.
fn sent(error: tokio_postgres::Error) -> Failed {
    match severity(&error) {
        Some(_) => failed(error),
        None => Failed::Fault(Fault::Unknown(unknown())),
    }
}

fn answer(lane: &Lane, batch: Vec<Entry>, written: Written) {
    let Written { plan, done, mut rows } = written;
    let fresh = |verdict: &HoldVerdict| matches!(verdict, HoldVerdict::Fresh(_));
    let skipped = plan.holds.iter().filter(|verdict| fresh(verdict)).count()
        > batch
            .iter()
            .filter(|entry| matches!(entry, Entry::Hold(hold, ..) if done.contains(&hold.payment_id)))
            .count();
    let (mut holds, mut ends) = (plan.holds.into_iter(), plan.ends.into_iter());
    let (mut alone, mut turns) = (0, Turns::default());
    for entry in batch {
        match entry {
            Entry::Hold(hold, reply, since) => {
                let decided = match holds.next() {
                    Some(HoldVerdict::Fresh(lease)) if done.contains(&hold.payment_id) => Some(Decision::Fresh(lease)),
                    Some(HoldVerdict::Mine(lease)) => Some(Decision::Fresh(lease)),
                    Some(HoldVerdict::Existing(id)) => {
                        rows.get(&id).map(|row| Decision::Existing(Box::new(row.clone())))
                    }
                    Some(HoldVerdict::Conflict(id)) => rows.remove(&id).map(|row| {
                        let said = Decision::Conflict(Box::new(row.clone()));
                        rows.insert(id, row);
                        said
                    }),
                    // What was skipped took no budget, and is no payment: decide again what was refused for it.
                    Some(HoldVerdict::Said(Decision::Exceeded { .. } | Decision::DuplicateInDoubt(_))) if skipped => {
                        None
                    }
                    Some(HoldVerdict::Said(decision)) => Some(decision),
                    Some(HoldVerdict::Fresh(_) | HoldVerdict::Alone) | None => None,
                };
                match decided {
                    Some(decision) => drop(reply.send(Answer::Said(Ok(decision)))),
                    None => {
                        alone += 1;
                        Entry::Hold(hold, reply, since).alone(&mut turns);
                    }
                }
            }
            Entry::End(end, reply, since) => {
                if ends.next() == Some(true) && done.contains(&end.payment_id) {
                    let _ = reply.send(Answer::Said(Ok(SettleOutcome::Settled)));
                } else {
                    alone += 1;
                    Entry::End(end, reply, since).alone(&mut turns);
                }
            }
        }
    }
    add(&lane.figures.alone, alone);
}

/// In transactions of their own: a row that others wait for is not made while other rows are locked.
async fn make(lane: &Lane, connection: &mut Option<Connection>, keys: &BTreeSet<WindowKey>) -> Result<(), Fault> {
    let Some(used) = connection.take() else {
        return Err(Fault::NoConnection(LedgerError::Unavailable("the lane's connection was lost".to_owned())));
    };
    let keys: Vec<WindowKey> = keys.iter().cloned().collect();
    let made = windows::make(used.line()?.session, &lane.wire, &keys);
    tokio::time::timeout(lane.wire.alone() * 2, made).await.map_err(|_| Fault::Final(silent()))??;
    *connection = Some(used);
    Ok(())
}
