//! What a running process takes over without a restart: limits and policy from its configuration file, the rules for
//! origins from the ledger. The rest of the file counts at the next start.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::server::Paying;
use crate::config::{Config, Look, Source, Transport, Watched};
use crate::ledger::{Applied, Ledger, LedgerError, Limit, LimitList, same_limits};
use crate::policy::LivePolicy;

/// The file's rows, as [`Ledger::apply_limits`] names their source.
const FILE: &str = "file";

/// The file's limits into the ledger, the ledger's rules into the policy.
pub(super) async fn at_start(config: &Config, paying: &Paying, policy: &LivePolicy) -> Result<(), LedgerError> {
    let list = Limits::of(config);
    let applied = paying.ledger.apply_limits(list.list()).await?;
    list.tell(applied, "start");
    policy.replace_rules(paying.ledger.origin_rules().await?);
    Ok(())
}

/// The file's list.
struct Limits {
    version: u64,
    limits: Vec<Limit>,
}

impl Limits {
    fn of(config: &Config) -> Limits {
        Limits { version: config.limits_version, limits: config.limits.clone() }
    }

    fn list(&self) -> LimitList<'_> {
        LimitList { source: FILE, version: self.version, limits: &self.limits }
    }

    fn tell(&self, applied: Applied, when: &'static str) {
        let version = self.version;
        match applied {
            Applied::Same => {}
            Applied::Written { replaced: false } => {
                tracing::info!(
                    when,
                    version,
                    limits = self.limits.len(),
                    "the file's spending limits are in the ledger"
                );
            }
            Applied::Written { replaced: true } => tracing::warn!(
                when,
                version,
                limits = self.limits.len(),
                "the file's spending limits replace others in the ledger; from now on every process on it is bound by \
                 these, also one that was started with another file"
            ),
            Applied::Newer { version: newer } => tracing::warn!(
                when,
                version,
                newer,
                "the file's spending limits are not used: the ledger has a list with a higher budget.limits_version; \
                 raise the file's to replace it"
            ),
            Applied::Contradicts => tracing::error!(
                when,
                version,
                "the file's spending limits are not used: the ledger has another list with the same \
                 budget.limits_version; raise the file's to replace it"
            ),
        }
    }
}

pub struct Reload {
    ledger: Arc<dyn Ledger>,
    policy: LivePolicy,
    interval: Duration,
    source: Arc<dyn Source + Send + Sync>,
    file: Option<Watched>,
    limits: Limits,
    /// Not in the ledger yet: it could not be reached.
    owed: bool,
    /// The ledger's rows were others than the file's at the last look.
    drifted: bool,
    /// The ledger could not be read at the last look.
    blind: bool,
}

impl Reload {
    /// `path`: the file that `config` was read from.
    pub(super) fn new(
        config: &Config,
        path: Option<PathBuf>,
        source: Arc<dyn Source + Send + Sync>,
        ledger: Arc<dyn Ledger>,
        policy: LivePolicy,
    ) -> Reload {
        let transport: Transport = config.transport;
        Reload {
            ledger,
            policy,
            interval: config.reload_interval,
            source,
            file: path.map(|path| Watched::new(path, transport)),
            limits: Limits::of(config),
            owed: false,
            drifted: false,
            blind: false,
        }
    }

    pub async fn run(mut self, shutdown: CancellationToken) {
        loop {
            if let Either::Right(_) = select(pin!(sleep(self.interval)), pin!(shutdown.cancelled())).await {
                return;
            }
            self.look().await;
        }
    }

    /// One look. Without the ledger what is there stays: old limits bind, old rules hold.
    pub async fn look(&mut self) {
        match self.file.as_mut().map_or(Look::Same, |file| file.look(&*self.source)) {
            Look::Same => {}
            Look::Refused(error) => {
                tracing::error!(%error, "the configuration file has changed and cannot be used: limits and policy stay as they are");
            }
            Look::Changed(config) => {
                let limits = Limits::of(&config);
                let changed =
                    self.limits.version != limits.version || !same_limits(&self.limits.limits, &limits.limits);
                self.owed |= changed;
                self.limits = limits;
                if self.policy.replace_file(config.policy) {
                    tracing::info!("the policy of the changed configuration file holds now");
                }
                if changed {
                    tracing::info!(
                        "the limits of the changed configuration file go into the ledger; the rest of it counts at the next start"
                    );
                }
            }
        }
        let looked = self.ask_the_ledger().await;
        if let (Err(error), false) = (&looked, self.blind) {
            tracing::warn!(%error, "limits and rules for origins cannot be read: those that were read last hold");
        }
        self.blind = looked.is_err();
    }

    async fn ask_the_ledger(&mut self) -> Result<(), LedgerError> {
        if self.owed {
            let applied = self.ledger.apply_limits(self.limits.list()).await?;
            self.owed = false;
            self.limits.tell(applied, "change");
        }
        if self.policy.replace_rules(self.ledger.origin_rules().await?) {
            tracing::info!("the ledger's rules for origins have changed");
        }
        let mut rows = self.ledger.limits().await?;
        rows.retain(|limit| limit.source == FILE);
        let drifted = !same_limits(&rows, &self.limits.limits);
        if drifted && !self.drifted {
            tracing::warn!(
                version = self.limits.version,
                "the ledger's spending limits are no longer those of this process's file: another process wrote others, \
                 which bind this one too; give all of them the same file"
            );
        }
        self.drifted = drifted;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;

    use url::Url;
    use zeroize::Zeroizing;

    use super::*;
    use crate::config;
    use crate::ledger::SqliteLedger;
    use crate::ports::machine;

    /// One file; `None`: it cannot be read.
    #[derive(Default)]
    struct File(Mutex<Option<String>>);
    impl Source for File {
        fn env(&self, name: &str) -> Option<String> {
            (name == "HOME").then(|| "/home/x".to_owned())
        }
        fn read(&self, _path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
            let text = self.0.lock().unwrap().clone();
            text.map(|text| Zeroizing::new(text.into_bytes())).ok_or_else(|| std::io::ErrorKind::NotFound.into())
        }
    }

    fn text(version: u64, day: &str, denied: &str) -> String {
        format!(
            "facilitator: {{base_url: 'https://c.example'}}\npolicy: {{deny_origins: [{denied}]}}\nbudget:\n  \
             limits_version: {version}\n  limits:\n  - {{network: 'stellar:testnet', asset: CUSDC, day_max_atomic: '{day}'}}\n"
        )
    }

    /// A replica with a file of its own.
    struct Replica {
        file: Arc<File>,
        policy: LivePolicy,
        reload: Reload,
    }

    impl Replica {
        fn new(text: &str, ledger: &Arc<dyn Ledger>) -> Replica {
            let file = Arc::new(File(Mutex::new(Some(text.to_owned()))));
            let config = config::parse(text, Some(Transport::Remote), &*file).unwrap();
            let policy = LivePolicy::new(config.policy.clone());
            let path = Some("/etc/tollway.yaml".into());
            let reload = Reload::new(&config, path, file.clone(), ledger.clone(), policy.clone());
            Replica { file, policy, reload }
        }

        /// Two looks: a file that is being written is not read half.
        async fn says(&mut self, text: &str) {
            *self.file.0.lock().unwrap() = Some(text.to_owned());
            self.reload.look().await;
            self.reload.look().await;
        }

        fn lets(&self, url: &str) -> bool {
            self.policy.now().origin(&Url::parse(url).unwrap()).is_ok()
        }
    }

    async fn day(ledger: &Arc<dyn Ledger>) -> String {
        let limits = ledger.limits().await.unwrap();
        limits.iter().map(|limit| limit.per_day.unwrap().to_string()).collect::<Vec<_>>().join(" ")
    }

    #[tokio::test]
    async fn a_changed_file_counts_without_a_restart_and_an_older_or_broken_one_takes_nothing_back() {
        let directory = tempfile::tempdir().unwrap();
        let world = machine::world().0;
        let ledger: Arc<dyn Ledger> =
            Arc::new(SqliteLedger::open(&directory.path().join("ledger.sqlite"), world, None).await.unwrap());
        let first = text(1, "100", "'https://bad.example'");
        let mut one = Replica::new(&first, &ledger);
        let mut other = Replica::new(&first, &ledger);
        ledger.apply_limits(one.reload.limits.list()).await.unwrap();
        one.says(&first).await;
        assert_eq!(day(&ledger).await, "100");
        assert!(!one.lets("https://bad.example/mcp") && one.lets("https://worse.example/mcp"));

        one.says(&text(2, "50", "'https://worse.example'")).await;
        assert_eq!(day(&ledger).await, "50");
        assert!(one.lets("https://bad.example/mcp") && !one.lets("https://worse.example/mcp"));

        // Broken: what was read last holds.
        one.says(&text(3, "fifty", "")).await;
        one.says("budget: {").await;
        assert_eq!(day(&ledger).await, "50");
        assert!(!one.lets("https://worse.example/mcp"));

        // The other replica still has the first file: it is bound by the newer list, and does not take it back, nor
        // after its own change to a list that is as old or contradicts.
        assert!(!other.reload.drifted);
        other.reload.look().await;
        assert!(other.reload.drifted);
        other.says(&text(1, "999", "")).await;
        other.says(&text(2, "999", "")).await;
        assert_eq!(day(&ledger).await, "50");
        other.says(&text(3, "60", "")).await;
        assert_eq!((day(&ledger).await.as_str(), other.reload.drifted), ("60", false));

        // A rule of the ledger reaches every replica.
        let rule = "https://*.evil.example".parse().unwrap();
        ledger.set_origin_rule(&rule, Some(false)).await.unwrap();
        for replica in [&mut one, &mut other] {
            replica.reload.look().await;
            assert!(!replica.lets("https://a.evil.example/mcp") && replica.lets("https://seller.example/mcp"));
        }
    }
}
