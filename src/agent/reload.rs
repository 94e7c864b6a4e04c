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
        paying: &Paying,
        policy: LivePolicy,
    ) -> Reload {
        let transport: Transport = config.transport;
        Reload {
            ledger: paying.ledger.clone(),
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
