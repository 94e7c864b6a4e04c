//! The pool, and how a connection comes into it. Of several hosts the one that may be written is used: after a fail-over
//! the next connection finds the new primary by itself.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{
    ConfigConnectImpl, Connect, Hook, HookError, Manager, ManagerConfig, Pool, PoolError, RecyclingMethod, Runtime,
    TimeoutType,
};
use tokio::task::JoinHandle;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, Error};

use super::database::{Connector, Database};
use super::tx::{Fault, unavailable};
use super::wire::Wire;
use crate::ledger::LedgerError;

/// How long a caller waits for a connection of the pool.
pub(super) const WAIT: Duration = Duration::from_secs(10);
/// How long one host may take from the first packet to a session, unless the URL's `connect_timeout` says less.
const CONNECT: Duration = Duration::from_secs(5);
/// Sent and not acknowledged for so long, a connection is dead: its host has vanished.
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);

/// Fast recycling asks the server nothing: no session state is left behind, and a connection that died is found by the
/// next transaction, which is then run again.
pub(super) fn pool(database: &Database, wire: &Wire, size: usize) -> Result<Pool, LedgerError> {
    let patience = database.config().get_connect_timeout().map_or(CONNECT, |given| CONNECT.min(*given));
    let hosts = hosts(database.config(), patience, wire.startup(database.config().get_options()));
    let (first, rounds) = (hosts.first().cloned().unwrap_or_default(), hosts.len().max(2));
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = match database.connector().map_err(LedgerError::Unavailable)? {
        Connector::Plain(tls) => Manager::from_connect(first, reach(tls, hosts, patience), recycling),
        Connector::Tls(tls) => Manager::from_connect(first, reach(*tls, hosts, patience), recycling),
    };
    let rounds = u32::try_from(rounds).unwrap_or(2);
    let mut pool = Pool::builder(manager)
        .max_size(size.max(1))
        .wait_timeout(Some(WAIT))
        .create_timeout(Some(patience.saturating_mul(rounds)))
        .runtime(Runtime::Tokio1);
    if let Some((setting, value)) = wire.proof() {
        // A pooler that swallows what a session is started with would leave every transaction without its timeouts.
        pool = pool.post_create(Hook::async_fn(move |client, _| {
            let value = value.clone();
            Box::pin(async move {
                let row = client.query_typed_one(&format!("SELECT current_setting('{setting}')"), &[]).await;
                let found: Result<String, Error> = row.and_then(|row| row.try_get(0));
                match found.map_err(HookError::Backend)? == value {
                    true => Ok(()),
                    false => Err(HookError::message(SWALLOWED)),
                }
            })
        }));
    }
    pool.build().map_err(|_| LedgerError::Unavailable("the pool of connections cannot be made".to_owned()))
}

const SWALLOWED: &str = "its sessions have not the settings that they were started with, as behind a pooler: write \
    budget.pooler: transaction";

/// One configuration a host: a host that is there and says nothing (frozen, or behind a firewall) may not use up the
/// time of the others.
fn hosts(config: &Config, patience: Duration, options: Option<String>) -> Vec<Config> {
    let (names, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let count = names.len().max(addresses.len());
    let one = |i: usize| {
        let mut one = Config::new();
        match names.get(i) {
            Some(tokio_postgres::config::Host::Tcp(name)) => drop(one.host(name)),
            Some(tokio_postgres::config::Host::Unix(path)) => drop(one.host_path(path)),
            None => {}
        }
        addresses.get(i).map(|address| one.hostaddr(*address));
        ports.get(i).or(ports.first()).map(|port| one.port(*port));
        config.get_user().map(|user| one.user(user));
        config.get_password().map(|password| one.password(password));
        config.get_dbname().map(|name| one.dbname(name));
        options.as_ref().map(|options| one.options(options.as_str()));
        one.application_name(config.get_application_name().unwrap_or("tollway"));
        one.ssl_mode(config.get_ssl_mode()).ssl_negotiation(config.get_ssl_negotiation());
        one.channel_binding(config.get_channel_binding());
        one.target_session_attrs(match count {
            0 | 1 => config.get_target_session_attrs(),
            _ => TargetSessionAttrs::ReadWrite,
        });
        one.connect_timeout(patience).tcp_user_timeout(UNACKNOWLEDGED);
        one.keepalives_idle(Duration::from_secs(15)).keepalives_interval(Duration::from_secs(5)).keepalives_retries(3);
        one
    };
    (0..count).map(one).collect()
}

struct Reach {
    hosts: Vec<(Config, Arc<dyn Connect>)>,
    patience: Duration,
    /// Where the last connection was had: the next one begins there.
    last: Arc<AtomicUsize>,
}

fn reach<T>(tls: T, hosts: Vec<Config>, patience: Duration) -> Reach
where
    T: tokio_postgres::tls::MakeTlsConnect<tokio_postgres::Socket> + Clone + Sync + Send + 'static,
    T::Stream: Sync + Send,
    T::TlsConnect: Sync + Send,
    <T::TlsConnect as tokio_postgres::tls::TlsConnect<tokio_postgres::Socket>>::Future: Send,
{
    let connect: Arc<dyn Connect> = Arc::new(ConfigConnectImpl { tls });
    let hosts = hosts.into_iter().map(|host| (host, connect.clone())).collect();
    Reach { hosts, patience, last: Arc::new(AtomicUsize::new(0)) }
}

type Connected<'a> = Pin<Box<dyn Future<Output = Result<(Client, JoinHandle<()>), Error>> + Send + 'a>>;

impl Connect for Reach {
    fn connect(&self, _: &Config) -> Connected<'_> {
        Box::pin(async move {
            loop {
                let mut failed = None;
                let count = self.hosts.len();
                let first = self.last.load(Ordering::Relaxed);
                for i in (0..count).map(|i| (first + i) % count) {
                    let Some((host, connect)) = self.hosts.get(i) else { continue };
                    match tokio::time::timeout(self.patience, connect.connect(host)).await {
                        Ok(Ok(connected)) => {
                            self.last.store(i, Ordering::Relaxed);
                            return Ok(connected);
                        }
                        // What a server said tells more than that another one was not there.
                        Ok(Err(error)) if failed.as_ref().is_none_or(|f: &Error| tells(f) < tells(&error)) => {
                            failed = Some(error);
                        }
                        Ok(Err(_)) | Err(_) => {}
                    }
                }
                if let Some(error) = failed {
                    return Err(error);
                }
                // No host said a word: once more, until the pool's time for a connection is over.
            }
        })
    }
}

/// How much a failed connection tells.
fn tells(error: &Error) -> u8 {
    match error.as_db_error() {
        Some(_) => 2,
        None => u8::from(takes_no_writes(error)),
    }
}

/// As the driver says it of a server that is not the one that was asked for.
fn takes_no_writes(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.to_string().contains(NO_WRITES))
}

const NO_WRITES: &str = "does not allow writes";

/// Why no connection was had.
pub(super) fn no_connection(error: PoolError) -> Fault {
    match error {
        PoolError::Timeout(TimeoutType::Wait) => Fault::Final(LedgerError::Busy),
        PoolError::Timeout(_) => {
            Fault::NoConnection(LedgerError::Unavailable("the database does not answer".to_owned()))
        }
        PoolError::Backend(error) => match error.as_db_error() {
            Some(db) => {
                let said = LedgerError::Unavailable(refused(db.code().code(), db.message()));
                match *db.code() == SqlState::CANNOT_CONNECT_NOW {
                    true => Fault::NoWrites(said),
                    false => Fault::NoConnection(said),
                }
            }
            None if takes_no_writes(&error) => Fault::NoWrites(unreached(&error)),
            None => Fault::NoConnection(unreached(&error)),
        },
        PoolError::PostCreateHook(HookError::Message(words)) => {
            Fault::NoConnection(LedgerError::Unavailable(words.into_owned()))
        }
        PoolError::PostCreateHook(HookError::Backend(error)) => Fault::NoConnection(unavailable(&error)),
        _ => Fault::NoConnection(LedgerError::Unavailable("no connection to the database".to_owned())),
    }
}

fn unreached(error: &Error) -> LedgerError {
    let LedgerError::Unavailable(said) = unavailable(error) else { return unavailable(error) };
    let fix = if said.contains("server does not support TLS") {
        ": turn TLS on there (ssl = on); sslmode=disable in the URL is for a network in which nobody can listen"
    } else if said.contains("certificate") {
        ": name the server's CA in budget.ca_file, and in the URL the host that its certificate is for"
    } else if said.contains(NO_WRITES) {
        ": it is a standby, or read-only; name the primary, or all hosts of the cluster"
    } else if said.contains("error connecting to server") {
        ": is it running, and are host and port right?"
    } else {
        ""
    };
    LedgerError::Unavailable(format!("{said}{fix}"))
}

/// Whoever was just shown a password is not quoted.
fn refused(code: &str, message: &str) -> String {
    let why = match code {
        "28P01" | "28000" => "it does not take this user and password",
        "3D000" => "it has no database of this name",
        "53300" => "it has no connection left",
        "57P03" => "it is starting up or shutting down",
        _ if message.contains("unsupported startup parameter") => {
            "it is a pooler, which keeps no settings of a session: write budget.pooler: transaction"
        }
        _ => "see its own log",
    };
    let code: String = code.chars().filter(char::is_ascii_alphanumeric).take(5).collect();
    format!("the database refused the connection ({code}): {why}")
}
