//! Where the database is and how it is reached: the URL parsed once, and judged before anything is dialled.

use std::fmt;

use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::{Config, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::http::database_tls;

/// A PostgreSQL database. Its URL holds a password, so no error, log or Debug shows more than host, port and name.
///
/// TLS with the server's certificate verified (its name too) is spoken to every host that is not on this machine, and
/// wherever `sslmode` is `require`, `verify-ca` or `verify-full`. `sslmode=disable` is believed; what may fall back to
/// plain (`prefer`, `allow`) is refused.
#[derive(Clone, PartialEq, Eq)]
pub struct Database {
    config: Config,
    tls: bool,
    local: bool,
    ca_pem: Option<Vec<u8>>,
    pooler: Pooler,
    schema: Option<String>,
    /// The environment variable that holds the URL.
    variable: String,
}

/// What stands between this process and the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pooler {
    /// Nothing: each connection is a session of its own.
    #[default]
    None,
    /// A pooler such as pgbouncer that gives a server connection to another client after each transaction.
    Transaction,
}

impl Database {
    /// `postgresql://user:password@host:port/name?option=value`. The sentence of a refusal quotes nothing of the URL but
    /// the name of an option.
    pub fn parse(url: &str, ca_pem: Option<Vec<u8>>) -> Result<Database, String> {
        let url = url.trim();
        if !url.starts_with("postgresql://") && !url.starts_with("postgres://") {
            return Err("is no PostgreSQL URL: write postgresql://user:password@host/database".to_owned());
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut mode = None;
        let mut kept = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("sslmode", word) => mode = Some(word),
                ("sslrootcert" | "sslcert" | "sslkey", _) => {
                    return Err("names a certificate file: write it to budget.ca_file".to_owned());
                }
                // The ledger writes; of several hosts the one that takes writes is used whatever is written here.
                ("target_session_attrs", "read-write" | "primary") => kept.push("target_session_attrs=read-write"),
                ("target_session_attrs", "any") => {}
                ("target_session_attrs", _) => {
                    return Err(
                        "asks for a server that takes no writes: write target_session_attrs=read-write".to_owned()
                    );
                }
                (name, _) => {
                    option(name, pair)?;
                    kept.push(pair);
                }
            }
        }
        let url = if kept.is_empty() { base.to_owned() } else { format!("{base}?{}", kept.join("&")) };
        let mut config: Config = url.parse().map_err(|_| {
            "cannot be read as a PostgreSQL URL: write postgresql://user:password@host/database, with a password of \
             other than letters and digits percent-encoded"
        })?;
        if config.get_hosts().is_empty() {
            return Err("names no host: write postgresql://user:password@host/database".to_owned());
        }
        let local = is_local(&config);
        let tls = match mode {
            None => !local,
            Some("require" | "verify-ca" | "verify-full") => true,
            Some("disable") => false,
            Some("prefer" | "allow") => {
                return Err(
                    "has an sslmode that falls back to a plain connection: write sslmode=verify-full".to_owned()
                );
            }
            Some(_) => return Err("has an unknown sslmode: write sslmode=verify-full, or disable".to_owned()),
        };
        if ca_pem.is_some() {
            database_tls(ca_pem.as_deref())?;
        }
        config.ssl_mode(if tls { SslMode::Require } else { SslMode::Disable });
        Ok(Database {
            config,
            tls,
            local,
            ca_pem,
            pooler: Pooler::None,
            schema: None,
            variable: "DATABASE_URL".to_owned(),
        })
    }

    /// Says where the URL was found, for the errors of a start.
    pub fn named(mut self, variable: &str) -> Database {
        self.variable = variable.to_owned();
        self
    }

    pub(super) fn variable(&self) -> &str {
        &self.variable
    }

    /// Behind a pooler in transaction mode nothing can be given to a session, so a URL with `options` is refused.
    pub fn behind(mut self, pooler: Pooler) -> Result<Database, String> {
        if pooler == Pooler::Transaction && self.config.get_options().is_some() {
            return Err(
                "has options, which no session behind a pooler keeps: name the schema in budget.schema, and write \
                        other settings to the role (ALTER ROLE … SET)"
                    .to_owned(),
            );
        }
        self.pooler = pooler;
        Ok(self)
    }

    /// The tables are in this schema, and no other is looked at. Lower-case letters, digits and `_`, at most 63.
    pub fn in_schema(mut self, schema: &str) -> Result<Database, String> {
        let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let begins = schema.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
        if !begins || !schema.chars().all(word) || schema.len() > 63 || schema.starts_with("pg_") {
            return Err(
                "is no name of a schema here: write lower-case letters, digits and _, at most 63, the first no \
                        digit, and not pg_…"
                    .to_owned(),
            );
        }
        self.schema = Some(schema.to_owned());
        Ok(self)
    }

    pub fn pooler(&self) -> Pooler {
        self.pooler
    }

    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Amounts and limits cross a network in the clear, and anybody in between can change them.
    pub fn is_plain_remote(&self) -> bool {
        !self.tls && !self.local
    }

    /// Host, port and database, for logs and errors.
    pub fn shown(&self) -> String {
        let ports = self.config.get_ports();
        let host = |(i, host): (usize, &Host)| {
            let port = ports.get(i).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(name) => format!("{}:{port}", name.chars().take(100).collect::<String>()),
                Host::Unix(path) => format!("{}:{port}", path.display()),
            }
        };
        let hosts: Vec<String> = self.config.get_hosts().iter().enumerate().map(host).take(5).collect();
        let name = self.config.get_dbname().or(self.config.get_user()).unwrap_or_default();
        format!("{}/{}", hosts.join(","), name.chars().take(64).collect::<String>())
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn connector(&self) -> Result<Connector, String> {
        match self.tls {
            true => Ok(Connector::Tls(Box::new(MakeRustlsConnect::new(database_tls(self.ca_pem.as_deref())?)))),
            false => Ok(Connector::Plain(NoTls)),
        }
    }
}

pub(super) enum Connector {
    Plain(NoTls),
    Tls(Box<MakeRustlsConnect>),
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Database({}, {})", self.shown(), if self.tls { "TLS" } else { "plain" })
    }
}

/// One `name=value` of a URL, judged alone, so that what is wrong can be named; its value is never quoted.
fn option(name: &str, pair: &str) -> Result<(), String> {
    const KNOWN: [&str; 11] = [
        "user",
        "password",
        "dbname",
        "options",
        "application_name",
        "sslnegotiation",
        "host",
        "hostaddr",
        "port",
        "connect_timeout",
        "channel_binding",
    ];
    const OURS: [&str; 6] = [
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_retries",
        "tcp_user_timeout",
        "load_balance_hosts",
    ];
    if OURS.contains(&name) {
        return Err(format!("has the option {name}, which Tollway decides itself: remove it"));
    }
    if !KNOWN.contains(&name) {
        let plain = name.len() <= 40 && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        let name = if plain { name } else { "(no name)" };
        return Err(format!(
            "has the unknown option {name}: remove it; known are sslmode, target_session_attrs, {}",
            KNOWN.join(", ")
        ));
    }
    match format!("postgresql://host/?{pair}").parse::<Config>() {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("has the option {name} with a value that it does not take: correct or remove it")),
    }
}

/// Whether no byte leaves this machine. `hostaddr` is what is dialled where both are given.
fn is_local(config: &Config) -> bool {
    let by_name = config.get_hosts().iter().all(|host| match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => {
            name == "localhost"
                || name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        }
    });
    by_name && config.get_hostaddrs().iter().all(std::net::IpAddr::is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Database, String> {
        Database::parse(url, None)
    }

    #[test]
    fn a_remote_host_is_reached_over_verified_tls_unless_plain_is_written() {
        for (url, tls, plain_remote) in [
            ("postgres://u:p@127.0.0.1/t", false, false),
            ("postgresql://u@localhost:5433/t", false, false),
            ("postgresql://u@%2Frun%2Fpostgresql/t", false, false),
            ("postgresql:///t?host=/run/postgresql&user=u", false, false),
            ("postgresql://u@[::1]/t", false, false),
            ("postgres://u:p@db.example/t", true, false),
            ("postgres://u:p@10.0.0.1/t", true, false),
            ("postgres://u:p@localhost/t?hostaddr=10.0.0.1", true, false),
            ("postgres://u:p@localhost,db.example/t", true, false),
            ("postgres://u:p@localhost/t?sslmode=verify-full", true, false),
            ("postgres://u:p@db.example/t?connect_timeout=3&sslmode=require", true, false),
            ("postgres://u:p@db.example/t?sslmode=disable", false, true),
        ] {
            let database = parse(url).unwrap_or_else(|e| panic!("{url}: {e}"));
            assert_eq!((database.tls, database.is_plain_remote()), (tls, plain_remote), "{url}");
            let mode = if tls { SslMode::Require } else { SslMode::Disable };
            assert_eq!(database.config.get_ssl_mode(), mode, "{url}");
        }
    }

    #[test]
    fn a_refused_url_is_never_quoted_and_debug_shows_no_password() {
        for (url, word) in [
            ("mysql://u:hunter2@db/x", "postgresql://"),
            ("hunter2", "postgresql://"),
            ("postgres://u:hunter2@db:port/x", "percent-encoded"),
            ("postgres://u:hunter2@db/x?unknown=hunter2", "unknown option unknown: remove it"),
            ("postgres://u:hunter2@db/x?HUNTER2", "unknown option (no name)"),
            ("postgres://u:hunter2@db/x?connect_timeout=hunter2", "connect_timeout with a value"),
            ("postgres://u:hunter2@db/x?keepalives=0", "decides itself"),
            ("postgres://u:hunter2@db/x?target_session_attrs=read-only", "read-write"),
            ("postgres:///x?user=u&password=hunter2", "no host"),
            ("postgres://u:hunter2@db/x?sslmode=prefer", "falls back"),
            ("postgres://u:hunter2@db/x?sslmode=hunter2", "unknown sslmode"),
            ("postgres://u:hunter2@db/x?sslrootcert=/hunter2", "budget.ca_file"),
        ] {
            let error = parse(url).expect_err(url);
            assert!(error.contains(word) && !error.contains("hunter2"), "{url}: {error}");
        }
        let database = parse("postgres://u:hunter2@db.example:5433/x").unwrap();
        assert_eq!(format!("{database:?}"), "Database(db.example:5433/x, TLS)");
        let several = parse("postgres://u:hunter2@a:5433,b:5434/x?target_session_attrs=primary").unwrap();
        assert_eq!(several.shown(), "a:5433,b:5434/x");
        assert!(Database::parse("postgres://u@db/x", Some(b"no pem".to_vec())).is_err());
    }

    #[test]
    fn a_schema_is_a_plain_name_and_a_pooler_takes_no_options() {
        let database = || parse("postgres://u@db/x").unwrap();
        for good in ["budget", "_b2", &"a".repeat(63)] {
            assert_eq!(database().in_schema(good).unwrap().schema(), Some(good));
        }
        for bad in ["", "Budget", "a-b", "a b", "2a", "pg_x", "a\"b", "a,public", "ä", &"a".repeat(64)] {
            assert!(database().in_schema(bad).is_err(), "{bad}");
        }
        let options = parse("postgres://u@db/x?options=-csearch_path%3Dhunter2").unwrap();
        assert!(options.clone().behind(Pooler::None).is_ok());
        let error = options.behind(Pooler::Transaction).unwrap_err();
        assert!(error.contains("budget.schema") && !error.contains("hunter2"), "{error}");
    }
}
