//! What the ledger is measured against: one row at a time in prepared statements, which write the same rows, and the bare
//! INSERT of a payment, committed alone. Both as one would write them without a queue in between.

use tokio_postgres::{Client, Error, Statement};

use super::work::{AMOUNT, ASSET, Draw, NETWORK, PAYER};

pub struct Rows {
    client: Client,
    begin: Statement,
    commit: Statement,
    window: Statement,
    lock: Statement,
    limits: Statement,
    duplicate: Statement,
    insert: Statement,
    event: Statement,
    hold: Statement,
    settle: Statement,
    spend: Statement,
    day: String,
}

const INSERT: &str = "INSERT INTO payments (payment_identifier, id_nonce, agent, session, day, idempotency_key, call_hash, \
    ref, version_hash, network, scheme, asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, state, lease_token, \
    lease_expires, sign_before, due, created, updated) \
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 'exact', $11, $12, $12, $13::bigint, $14, 60000000, 59999000, 'reserved', \
    $15, n.now + 120000, n.now + 10000, n.now + 120000, n.now, n.now FROM (SELECT tollway_now() AS now OFFSET 0) n \
    ON CONFLICT DO NOTHING";
const WINDOWS: &str =
    "agent = $1 AND network = $2 AND asset = $3 AND (kind = 'day' AND key = $4 OR kind = 'session' AND key = $5)";

impl Rows {
    pub async fn open(client: Client) -> Result<Rows, Error> {
        // The same plans as the ledger's.
        client
            .batch_execute(
                "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; \
                 SET enable_mergejoin = off; SET jit = off",
            )
            .await?;
        let prepare = async |sql: &str| client.prepare(sql).await;
        let (begin, commit) = (prepare("BEGIN").await?, prepare("COMMIT").await?);
        let window = prepare(
            "INSERT INTO budget_windows (agent, network, asset, kind, key, held, spent) VALUES \
             ($1, $2, $3, 'day', $4, 0, 0), ($1, $2, $3, 'session', $5, 0, 0) ON CONFLICT DO NOTHING",
        )
        .await?;
        let lock = prepare(&format!(
            "SELECT kind, (held + spent)::text FROM budget_windows WHERE {WINDOWS} ORDER BY kind FOR NO KEY UPDATE"
        ))
        .await?;
        let limits = prepare(
            "SELECT min(per_call)::text, min(per_session)::text, min(per_day)::text, bool_or(suspended) \
             FROM spend_limits WHERE subject IN ($1, '*', 'total') AND network IN ($2, '*') AND asset IN ($3, '*')",
        )
        .await?;
        let duplicate = prepare(
            "SELECT payment_identifier, call_hash, state FROM payments WHERE idempotency_key = $2 AND agent = $1",
        )
        .await?;
        let insert = prepare(INSERT).await?;
        let event = prepare(
            "INSERT INTO payment_events (payment_identifier, at, event, amount, evidence) \
             VALUES ($1, tollway_now(), $2, $3::bigint, $4)",
        )
        .await?;
        let hold = prepare(&format!("UPDATE budget_windows SET held = held + $6::bigint WHERE {WINDOWS}")).await?;
        let settle = prepare(
            "UPDATE payments SET state = 'settled', reason = NULL, settled = $2::bigint, transaction_id = $3, \
             lease_expires = NULL, due = NULL, payload_expires = tollway_now() + 86400000, updated = tollway_now() \
             WHERE payment_identifier = $1 AND state IN ('reserved', 'in_doubt')",
        )
        .await?;
        let spend = prepare(&format!(
            "UPDATE budget_windows SET held = held - $6::bigint, spent = spent + $6::bigint WHERE {WINDOWS}"
        ))
        .await?;
        let today = "SELECT to_char(to_timestamp(tollway_now() / 1000) AT TIME ZONE 'UTC', 'YYYY-MM-DD')";
        let day = client.query_one(today, &[]).await?.get(0);
        Ok(Rows { begin, commit, window, lock, limits, duplicate, insert, event, hold, settle, spend, day, client })
    }

    /// The windows of an agent, once.
    pub async fn windows(&self, draw: &Draw) -> Result<(), Error> {
        let c = &self.client;
        c.execute(&self.window, &[&draw.agent, &NETWORK, &ASSET, &self.day, &draw.session]).await?;
        Ok(())
    }

    pub async fn reserve(&self, draw: &Draw) -> Result<(), Error> {
        let c = &self.client;
        let amount = i64::try_from(AMOUNT).expect("a small amount");
        let id = hex(&draw.id);
        c.execute(&self.begin, &[]).await?;
        let mut held = c.query(&self.lock, &[&draw.agent, &NETWORK, &ASSET, &self.day, &draw.session]).await?;
        if held.len() < 2 {
            c.execute(&self.commit, &[]).await?;
            self.windows(draw).await?;
            c.execute(&self.begin, &[]).await?;
            held = c.query(&self.lock, &[&draw.agent, &NETWORK, &ASSET, &self.day, &draw.session]).await?;
        }
        let limits = c.query_one(&self.limits, &[&draw.agent, &NETWORK, &ASSET]).await?;
        let duplicate = c.query_opt(&self.duplicate, &[&draw.agent, &draw.key]).await?;
        let figure = |text: Option<String>| text.and_then(|text| text.parse::<u128>().ok());
        let used = held.iter().filter_map(|row| figure(row.get(1))).max().unwrap_or(0);
        let most = figure(limits.get(2)).unwrap_or(0);
        assert!(duplicate.is_none() && limits.get::<_, Option<bool>>(3) == Some(false));
        assert!(used + u128::from(AMOUNT) <= most, "a limit that is wide enough");
        self.insert(draw).await?;
        c.execute(&self.event, &[&id, &"reserved", &amount, &None::<&str>]).await?;
        c.execute(&self.hold, &[&draw.agent, &NETWORK, &ASSET, &self.day, &draw.session, &amount]).await?;
        c.execute(&self.commit, &[]).await?;
        Ok(())
    }

    pub async fn settle(&self, draw: &Draw) -> Result<(), Error> {
        let c = &self.client;
        let amount = i64::try_from(AMOUNT).expect("a small amount");
        let id = hex(&draw.id);
        c.execute(&self.begin, &[]).await?;
        c.query(&self.lock, &[&draw.agent, &NETWORK, &ASSET, &self.day, &draw.session]).await?;
        let done = c.execute(&self.settle, &[&id, &amount, &hex(&draw.call_hash)]).await?;
        assert_eq!(done, 1);
        c.execute(&self.event, &[&id, &"settled", &amount, &Some("receipt")]).await?;
        c.execute(&self.spend, &[&draw.agent, &NETWORK, &ASSET, &self.day, &draw.session, &amount]).await?;
        c.execute(&self.commit, &[]).await?;
        Ok(())
    }

    /// One INSERT, committed alone.
    pub async fn insert(&self, draw: &Draw) -> Result<(), Error> {
        let amount = i64::try_from(AMOUNT).expect("a small amount");
        let (id, version) = (hex(&draw.id), "ab".repeat(32));
        let written = self
            .client
            .execute(
                &self.insert,
                &[
                    &id,
                    &&draw.id_nonce[..],
                    &draw.agent,
                    &draw.session,
                    &self.day,
                    &draw.key,
                    &&draw.call_hash[..],
                    &"v1.ref",
                    &version,
                    &NETWORK,
                    &ASSET,
                    &PAYER,
                    &amount,
                    &draw.nonce,
                    &&draw.token[..],
                ],
            )
            .await?;
        assert_eq!(written, 1);
        Ok(())
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
