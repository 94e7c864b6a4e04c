//! Looks into the database and at the chain all the time: no cap is crossed at any moment, and no payment stays open
//! for long after nothing could happen to it any more.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollway::ports::machine;
use tollway::sandbox::chain::LocalNetwork;

use super::postgres;
use crate::report::{Doing as _, Result};

const EVERY: Duration = Duration::from_millis(400);
/// After the later of the authorization's end and its lease's.
pub const CLOSED_WITHIN_MS: u64 = 30_000;

#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub looks: u64,
    /// Looks that the database did not answer.
    pub missed: u64,
    pub open: u64,
    pub most_open: u64,
    pub settled: u64,
    pub released: u64,
    /// The most that one agent had held and spent in one day, of its cap in thousandths.
    pub fullest_permille: u64,
    /// The longest that a payment was open after the later of its expiry and its lease's end, milliseconds.
    pub latest_ms: u64,
    pub broken: BTreeMap<String, String>,
}

pub struct Watch {
    seen: Arc<Mutex<Seen>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    pub fn start(database: String, network: LocalNetwork, caps: BTreeMap<String, u64>) -> Watch {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let task = tokio::spawn(look_on(database, network, caps, seen.clone()));
        Watch { seen, task }
    }

    pub fn seen(&self) -> Seen {
        self.seen.lock().expect("nobody panics with it").clone()
    }
}

async fn look_on(database: String, network: LocalNetwork, caps: BTreeMap<String, u64>, seen: Arc<Mutex<Seen>>) {
    let mut client = None;
    let mut ends = Ends::default();
    let mut leases = BTreeMap::new();
    loop {
        ends.note(&network);
        let looked = async {
            if client.is_none() {
                client = Some(postgres::connect(&database).await?);
            }
            match &client {
                Some(client) => look(client, &ends, &mut leases, &caps, &seen).await,
                None => Ok(()),
            }
        };
        match tokio::time::timeout(Duration::from_secs(5), looked).await {
            Ok(Ok(())) => {}
            _ => {
                client = None;
                seen.lock().expect("nobody panics with it").missed += 1;
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// When each ledger had closed, unix milliseconds.
#[derive(Default)]
struct Ends {
    newest: u32,
    closed: BTreeMap<u32, u64>,
}

impl Ends {
    fn note(&mut self, network: &LocalNetwork) {
        let latest = network.latest().sequence;
        if latest > self.newest {
            self.newest = latest;
            self.closed.insert(latest, machine::world().0.unix_ms());
        }
    }

    /// `None` while it has not closed.
    fn of(&self, ledger: i64) -> Option<u64> {
        let ledger = u32::try_from(ledger).unwrap_or(u32::MAX);
        self.closed.range(ledger..).next().map(|(_, at)| *at)
    }
}

async fn look(
    client: &tokio_postgres::Client,
    ends: &Ends,
    leases: &mut BTreeMap<String, u64>,
    caps: &BTreeMap<String, u64>,
    seen: &Mutex<Seen>,
) -> Result<()> {
    let used = "SELECT agent, day, sum(CASE state WHEN 'settled' THEN settled WHEN 'released' THEN 0 ELSE reserved \
        END)::bigint, count(*) FILTER (WHERE state = 'settled'), count(*) FILTER (WHERE state = 'released') \
        FROM payments GROUP BY agent, day";
    let used = client.query(used, &[]).await.doing("a look")?;
    let counted = "SELECT agent, (held + spent)::bigint FROM budget_windows WHERE kind = 'day' AND agent <> 'total'";
    let counted = client.query(counted, &[]).await.doing("a look")?;
    let open = "SELECT payment_identifier, state, dead_after, coalesce(lease_expires, 0), tollway_now() \
        FROM payments WHERE state IN ('reserved', 'in_doubt')";
    let open = client.query(open, &[]).await.doing("a look")?;
    let mut seen = seen.lock().expect("nobody panics with it");
    seen.looks += 1;
    (seen.settled, seen.released) = (0, 0);
    for row in &used {
        let (agent, sum): (String, i64) = (row.get(0), row.get(2));
        seen.settled += u64::try_from(row.get::<_, i64>(3)).unwrap_or(0);
        seen.released += u64::try_from(row.get::<_, i64>(4)).unwrap_or(0);
        seen.within(&agent, sum, caps, "rows");
    }
    for row in &counted {
        seen.within(row.get(0), row.get(1), caps, "counters");
    }
    seen.open = open.len() as u64;
    seen.most_open = seen.most_open.max(seen.open);
    for row in &open {
        let (id, state, dead_after, lease, now): (String, String, i64, i64, i64) =
            (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4));
        let (lease, now) = (u64::try_from(lease).unwrap_or(0), u64::try_from(now).unwrap_or(0));
        // A lease that was given back is no longer in the row: it ended now, or when it would have anyway.
        let ended = leases.entry(id.clone()).or_default();
        *ended = if lease > 0 { lease } else { now.min(*ended) };
        let Some(expired) = ends.of(dead_after) else { continue };
        let late = now.saturating_sub(expired.max(*ended));
        seen.latest_ms = seen.latest_ms.max(late);
        if late > CLOSED_WITHIN_MS {
            let said = format!("{id} is {state} {late} ms after the later of its expiry and its lease's end");
            seen.broken.insert(id, said);
        }
    }
    Ok(())
}

impl Seen {
    fn within(&mut self, agent: &str, sum: i64, caps: &BTreeMap<String, u64>, what: &str) {
        let Some(cap) = caps.get(agent) else { return };
        let sum = u64::try_from(sum).unwrap_or(0);
        self.fullest_permille = self.fullest_permille.max(sum * 1_000 / (*cap).max(1));
        if sum > *cap {
            self.broken.insert(format!("{agent} {what}"), format!("{agent}: {sum} of {cap} by its {what}"));
        }
    }
}
