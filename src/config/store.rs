//! Where the ledger is.

use std::path::{Path, PathBuf};

use super::value::secret_env;
use super::{ConfigError, Source, file, refuse};
use crate::ledger::Database;
use crate::ledger::postgres::Pooler;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    Sqlite(PathBuf),
    Postgres(Box<Database>),
    /// Discovery with `store: postgres` and no database named: nothing is opened.
    None,
}

/// `needed`: some command or a signer uses the ledger. A `DATABASE_URL` that is there for another program does not keep
/// a server from searching a catalog.
pub(super) fn store(file: &file::Budget, needed: bool, source: &dyn Source) -> Result<Store, ConfigError> {
    let variable = file.database_url_env.as_deref();
    let name = variable.unwrap_or("DATABASE_URL");
    let url = secret_env(name, source).filter(|_| needed);
    // Set and empty is what a template leaves behind.
    let missing = if source.env(name).is_some() { "is set, but empty" } else { "is not set" };
    if url.is_none() && variable.is_some() && needed {
        return refuse("budget.database_url_env", format!("the environment variable {name} {missing}"));
    }
    let only = |member: &str, set: bool, of: &str| match set {
        true => {
            refuse(format!("budget.{member}"), format!("belongs to budget.store {of}: remove it or change the store"))
        }
        false => Ok(()),
    };
    match file.store.as_deref() {
        None | Some("sqlite") => {
            only("ca_file", file.ca_file.is_some(), "postgres")?;
            only("pooler", file.pooler.is_some(), "postgres")?;
            only("schema", file.schema.is_some(), "postgres")?;
            let path = match (url, &file.path) {
                (Some(url), _) => database_path(name, url.expose())?,
                (None, Some(path)) if Path::new(path).is_absolute() => PathBuf::from(path),
                (None, Some(path)) => {
                    return refuse("budget.path", format!("{path:?} is relative: write an absolute path"));
                }
                (None, None) => state_dir(source)?.join("ledger.sqlite"),
            };
            Ok(Store::Sqlite(path))
        }
        Some("postgres") => {
            only("path", file.path.is_some(), "sqlite")?;
            let url = match (url, needed) {
                (Some(url), _) => url,
                (None, true) => {
                    return refuse(
                        "budget.database_url_env",
                        format!(
                            "the environment variable {name} {missing}: budget.store postgres needs the database's \
                             URL there (postgresql://user:password@host/database)"
                        ),
                    );
                }
                (None, false) => return Ok(Store::None),
            };
            let ca = file.ca_file.as_deref().map(|path| ca_file("budget.ca_file", path, source)).transpose()?;
            let database = Database::parse(url.expose(), ca).or_else(|problem| refuse(name, problem))?;
            let database = database
                .named(name)
                .behind(pooler("budget.pooler", file.pooler.as_deref())?)
                .or_else(|problem| refuse(name, problem))?;
            let database = match &file.schema {
                Some(schema) => database
                    .in_schema(schema)
                    .or_else(|problem| refuse("budget.schema", format!("{schema:?} {problem}")))?,
                None => database,
            };
            Ok(Store::Postgres(Box::new(database)))
        }
        Some("memory") => refuse(
            "budget.store",
            "memory does not exist here (a restart would forget what was spent): write sqlite or postgres",
        ),
        Some(other) => refuse("budget.store", format!("{other:?} is unknown: write sqlite or postgres")),
    }
}

pub(super) fn pooler(field: &str, written: Option<&str>) -> Result<Pooler, ConfigError> {
    match written {
        None | Some("none") => Ok(Pooler::None),
        Some("transaction") => Ok(Pooler::Transaction),
        Some(other) => refuse(
            field,
            format!(
                "{other:?} is unknown: write transaction where a pooler such as pgbouncer stands in between, none for a \
                 direct connection"
            ),
        ),
    }
}

pub(super) fn ca_file(field: &str, path: &str, source: &dyn Source) -> Result<Vec<u8>, ConfigError> {
    let read = source.read(Path::new(path));
    Ok(read.or_else(|e| refuse(field, format!(
        "{path:?} cannot be read ({e}): write the path of a PEM file of CA certificates, or remove the field to trust the \
         system's roots alone"
    )))?.to_vec())
}

/// `sqlite:///absolute/path`. What is refused is not quoted: the URL of a database server holds a password.
pub(super) fn database_path(name: &str, url: &str) -> Result<PathBuf, ConfigError> {
    let path = url.strip_prefix("sqlite:").map(|rest| rest.strip_prefix("//").unwrap_or(rest));
    match path {
        Some(path) if path.starts_with('/') && !path.contains(['?', '#', '%']) => Ok(PathBuf::from(path)),
        Some(_) => refuse(name, "is no sqlite URL of a file: write sqlite:///absolute/path"),
        None => refuse(
            name,
            "names another database than SQLite, but budget.store is sqlite: write budget.store: postgres, or unset the \
             variable (the ledger is then at budget.path), or write sqlite:///absolute/path",
        ),
    }
}

/// `$XDG_STATE_HOME/tollway`, else `$HOME/.local/state/tollway`; never the working directory.
pub(super) fn state_dir(source: &dyn Source) -> Result<PathBuf, ConfigError> {
    let absolute = |name: &str| source.env(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match (absolute("XDG_STATE_HOME"), absolute("HOME")) {
        (Some(state), _) => Ok(state.join("tollway")),
        (None, Some(home)) => Ok(home.join(".local/state/tollway")),
        (None, None) => refuse("budget.path", "is missing, and neither XDG_STATE_HOME nor HOME is set: write a path"),
    }
}
