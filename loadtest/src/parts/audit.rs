//! What must be true at the end, read from the chain and the database and held against what every client was told.

use std::collections::BTreeMap;

use serde_json::Value;
use tollway::sandbox::chain::Transfer;

use super::buyer::{End, Story};
use super::cluster::Cluster;
use super::postgres;
use crate::report::{Doing as _, Result};

/// A payment, as it stands in the database.
#[derive(Debug)]
pub struct Row {
    pub id: String,
    pub agent: String,
    pub key: Option<String>,
    pub state: String,
    pub reason: Option<String>,
    pub settled: Option<i64>,
    pub nonce: String,
    pub payer: String,
    pub pay_to: String,
    pub transaction: Option<String>,
}

pub async fn rows(database: &str) -> Result<Vec<Row>> {
    let client = postgres::connect(database).await?;
    let query = "SELECT payment_identifier, agent, idempotency_key, state, reason, settled::bigint, nonce, payer, pay_to, \
        transaction_id FROM payments";
    let rows = client.query(query, &[]).await.doing("the payments")?;
    let row = |row: tokio_postgres::Row| Row {
        id: row.get(0),
        agent: row.get(1),
        key: row.get(2),
        state: row.get(3),
        reason: row.get(4),
        settled: row.get(5),
        nonce: row.get(6),
        payer: row.get(7),
        pay_to: row.get(8),
        transaction: row.get(9),
    };
    Ok(rows.into_iter().map(row).collect())
}

pub async fn open_payments(database: &str) -> Result<i64> {
    let client = postgres::connect(database).await?;
    let query = "SELECT count(*) FROM payments WHERE state IN ('reserved', 'in_doubt')";
    Ok(client.query_one(query, &[]).await.doing("the open payments")?.get(0))
}

/// Promises that did not hold. Of many broken alike a few are shown.
#[derive(Default)]
pub struct Broken(BTreeMap<&'static str, Vec<String>>);

impl Broken {
    pub fn note(&mut self, promise: &'static str, how: String) {
        self.0.entry(promise).or_default().push(how);
    }

    pub fn list(&self) -> Vec<String> {
        let shown = |(promise, hows): (&&'static str, &Vec<String>)| {
            let some: Vec<_> = hows.iter().take(3).map(String::as_str).collect();
            format!("{promise}: {} times, such as {}", hows.len(), some.join("; "))
        };
        self.0.iter().map(shown).collect()
    }
}

pub struct Found {
    pub transfers: usize,
    pub settled: usize,
    pub released: BTreeMap<String, u64>,
    pub signatures: u64,
}

/// Chain, rows, counters, caps and stories against each other.
pub async fn audit(
    cluster: &Cluster,
    stories: &[Story],
    caps: &BTreeMap<String, u64>,
    broken: &mut Broken,
) -> Result<Found> {
    let rows = rows(&cluster.database).await?;
    let transfers = cluster.market.network.transfers();
    let moved = money(&rows, &transfers, caps, broken);
    let told: BTreeMap<&str, &Row> = rows.iter().map(|row| (row.id.as_str(), row)).collect();
    for story in stories {
        truthful(story, &told, &moved, broken);
    }
    match cluster.replicas[0].operate(&["reservations", "audit", "--json"]).await {
        Ok(said) => {
            let said: Value = serde_json::from_str(&said).doing("the audit's answer")?;
            if said["payments"].as_u64() != Some(rows.len() as u64) {
                broken.note("the audit counts every payment", said.to_string());
            }
        }
        Err(said) => broken.note("counters equal rows", said.to_string()),
    }
    let signatures = cluster.market.signer.signatures();
    if signatures > rows.len() as u64 {
        broken.note("one signature for a payment", format!("{signatures} for {} rows", rows.len()));
    }
    let mut released = BTreeMap::new();
    for row in rows.iter().filter(|row| row.state == "released") {
        *released.entry(row.reason.clone().unwrap_or_default()).or_default() += 1;
    }
    let settled = rows.iter().filter(|row| row.state == "settled").count();
    Ok(Found { transfers: transfers.len(), settled, released, signatures })
}

/// The transaction of each payment that moved money.
fn money<'a>(
    rows: &'a [Row],
    transfers: &'a [Transfer],
    caps: &BTreeMap<String, u64>,
    broken: &mut Broken,
) -> BTreeMap<&'a str, &'a str> {
    let mut left: BTreeMap<String, &Transfer> = BTreeMap::new();
    for transfer in transfers {
        let nonce = transfer.nonce.map_or_else(|| "none".to_owned(), |nonce| nonce.to_string());
        if left.insert(nonce.clone(), transfer).is_some() {
            broken.note("one authorization moves money once", nonce);
        }
    }
    let mut moved = BTreeMap::new();
    let mut keys: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    let mut spent: BTreeMap<&str, i128> = BTreeMap::new();
    for row in rows {
        let transfer = left.remove(&row.nonce);
        match (row.state.as_str(), transfer) {
            ("settled", Some(transfer)) => {
                let right = transfer.payer == row.payer
                    && transfer.pay_to == row.pay_to
                    && row.settled.map(i128::from) == Some(transfer.amount)
                    && row.transaction.as_ref().is_none_or(|hash| hash.eq_ignore_ascii_case(&transfer.transaction));
                if !right {
                    broken.note("a settled row is its transfer", format!("{row:?} {transfer:?}"));
                }
            }
            ("released", None) => {}
            ("settled", None) => broken.note("transfers on the chain = settled rows", format!("no transfer: {row:?}")),
            ("released", Some(_)) => broken.note("transfers on the chain = settled rows", format!("moved: {row:?}")),
            (_, _) => broken.note("every row is final", format!("{row:?}")),
        }
        if let Some(transfer) = transfer {
            moved.insert(row.id.as_str(), transfer.transaction.as_str());
            *spent.entry(&row.agent).or_default() += transfer.amount;
            let key = row.key.as_deref().unwrap_or_default();
            let times = keys.entry((&row.agent, key)).or_default();
            *times += 1;
            if *times > 1 {
                broken.note("no key is paid twice", format!("{} {key}", row.agent));
            }
        }
    }
    for (nonce, transfer) in left {
        broken.note("transfers on the chain = settled rows", format!("no row for {nonce}: {transfer:?}"));
    }
    for (agent, sum) in spent {
        if caps.get(agent).is_some_and(|cap| sum > i128::from(*cap)) {
            broken.note("no cap is crossed on the chain", format!("{agent}: {sum}"));
        }
    }
    moved
}

/// What the client heard is what the chain shows in the end.
fn truthful(story: &Story, rows: &BTreeMap<&str, &Row>, moved: &BTreeMap<&str, &str>, broken: &mut Broken) {
    let who = format!("{} {}", story.agent, story.key);
    for wrong in &story.wrong {
        broken.note("no client hears what it should not", format!("{who}: {wrong}"));
    }
    for (id, transaction) in &story.receipts {
        match moved.get(id.as_str()) {
            Some(hash) if hash.eq_ignore_ascii_case(transaction) => {}
            other => broken.note("a receipt is a transfer", format!("{who}: {transaction}, on the chain {other:?}")),
        }
    }
    for id in &story.unmoved {
        if moved.contains_key(id.as_str()) {
            broken.note("no money moves that was said not to", format!("{who}: {id}"));
        }
    }
    // Whoever has no output knows that nothing was paid for the key in the end, or has the receipt.
    let last = rows.values().find(|row| row.agent == story.agent && row.key.as_deref() == Some(&story.key));
    let paid = last.is_some_and(|row| row.state == "settled");
    match &story.end {
        End::Output | End::Undelivered if !paid => {
            broken.note("an output is of a settled payment", format!("{who}: {last:?}"));
        }
        End::Refused if paid => broken.note("a refused call is not paid", format!("{who}: {last:?}")),
        End::Open(heard) => broken.note("every client learns what became of its call", format!("{who}: {heard}")),
        _ => {}
    }
}
