//! Claims in a schema of the run's own on a PostgreSQL server, whose clock is the world's.

use std::sync::Arc;

use tokio_postgres::{Client, NoTls};
use tollway::gate::claims::{Claims, Store};
use tollway::ledger::{Database, PostgresLedger};

pub struct Server {
    name: String,
    store: Arc<dyn Store>,
    /// Its search path is the schema.
    pub client: Arc<Client>,
}

impl Server {
    /// `number`: of the run, should several run at once.
    pub async fn start(url: &str, number: u64) -> Server {
        let name = format!("t_sim_{number}_{}", std::process::id());
        let database = Database::parse(url, None).expect("a URL").in_schema(&name).expect("a schema");
        PostgresLedger::migrate(&database).await.expect("the schema is made");
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server answers");
        tokio::spawn(connection);
        let clock = format!(
            "SET search_path = {name}; CREATE TABLE sim_clock (now BIGINT NOT NULL); \
             INSERT INTO sim_clock VALUES (0); \
             CREATE OR REPLACE FUNCTION tollway_now() RETURNS BIGINT LANGUAGE sql VOLATILE AS \
             'SELECT now FROM {name}.sim_clock'"
        );
        client.batch_execute(&clock).await.expect("the clock is the world's");
        let store = Claims::database(&database).await.expect("the claims open");
        Server { name, store, client: Arc::new(client) }
    }

    pub async fn emptied(&self) -> Arc<dyn Store> {
        self.client.batch_execute("TRUNCATE claims, paid_answers").await.expect("it is emptied");
        self.store.clone()
    }

    pub async fn gone(&self) {
        let gone = format!("SET lock_timeout = '5s'; DROP SCHEMA {} CASCADE", self.name);
        let _ = self.client.batch_execute(&gone).await;
    }
}
