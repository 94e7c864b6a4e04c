//! A PostgreSQL server of a test's own, which it may restart, and one that speaks TLS.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use super::told::what_was_told_holds;
use super::*;
use crate::ledger::table::{amount, limit};

pub(super) struct Server {
    pub(super) directory: tempfile::TempDir,
    pub(super) port: u16,
    /// Who runs it where a test runs as root: PostgreSQL refuses to.
    user: Option<(u32, u32)>,
}

impl Server {
    pub(super) fn start(settings: &str) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let user = unprivileged();
        if let Some((uid, gid)) = user {
            std::os::unix::fs::chown(directory.path(), Some(uid), Some(gid)).unwrap();
        }
        let server = Server { directory, port, user };
        let data = server.data();
        let init = [data.to_str().unwrap(), "-U", "tollway", "-A", "trust", "--no-instructions", "-N"];
        server.run("initdb", &[&["-D"][..], &init].concat());
        let mut file = std::fs::read_to_string(data.join("postgresql.conf")).unwrap();
        let sockets = server.directory.path().display();
        file.push_str(&format!(
            "\nport = {port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{sockets}'\n{settings}\n"
        ));
        std::fs::write(data.join("postgresql.conf"), file).unwrap();
        server
    }

    pub(super) fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// A copy of a running one, which follows it: what the first one answers, this one has.
    pub(super) fn standby(of: &Server) -> Server {
        let directory = tempfile::tempdir().unwrap();
        if let Some((uid, gid)) = of.user {
            std::os::unix::fs::chown(directory.path(), Some(uid), Some(gid)).unwrap();
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let standby = Server { directory, port, user: of.user };
        let (data, from) = (standby.data(), of.url());
        let copy = ["-D", data.to_str().unwrap(), "-d", &from, "-R", "-c", "fast", "--no-sync"];
        standby.run("pg_basebackup", &copy);
        let path = data.join("postgresql.conf");
        let mut file = std::fs::read_to_string(&path).unwrap();
        let sockets = standby.directory.path().display();
        file.push_str(&format!(
            "\nport = {port}\nunix_socket_directories = '{sockets}'\nsynchronous_standby_names = ''\n"
        ));
        std::fs::write(path, file).unwrap();
        standby.up()
    }

    pub(super) fn control(&self, arguments: &[&str]) {
        let data = self.data();
        self.run("pg_ctl", &[&["-D", data.to_str().unwrap(), "-w", "-t", "30"], arguments].concat());
    }

    pub(super) fn up(self) -> Server {
        let (data, log) = (self.data(), self.directory.path().join("log"));
        self.run("pg_ctl", &["-D", data.to_str().unwrap(), "-w", "-t", "30", "-l", log.to_str().unwrap(), "start"]);
        self
    }

    fn restart(&self) {
        let (data, log) = (self.data(), self.directory.path().join("log"));
        let (data, log) = (data.to_str().unwrap(), log.to_str().unwrap());
        self.run("pg_ctl", &["-D", data, "-w", "-t", "30", "-m", "immediate", "-l", log, "restart"]);
    }

    pub(super) fn run(&self, program: &str, arguments: &[&str]) {
        let mut command = Command::new(bin().join(program));
        command.args(arguments).current_dir(self.directory.path()).stdout(std::process::Stdio::null());
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        assert!(command.status().unwrap().success(), "{program} {arguments:?}");
    }

    pub(super) fn url(&self) -> String {
        format!("postgresql://tollway@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let data = self.data();
        let mut command = Command::new(bin().join("pg_ctl"));
        command.args(["-D", data.to_str().unwrap(), "-w", "-m", "immediate", "stop"]).current_dir("/");
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        let _ = command.status();
    }
}

/// Where initdb and pg_ctl are: as `scripts/lib/postgres.sh` finds them.
fn bin() -> PathBuf {
    let script = "cd \"$1\" && . scripts/lib/postgres.sh && postgres_bin";
    let found = Command::new("bash").args(["-c", script, "-", env!("CARGO_MANIFEST_DIR")]).output().unwrap();
    assert!(found.status.success(), "PostgreSQL is missing: install the package postgresql");
    PathBuf::from(String::from_utf8(found.stdout).unwrap().trim())
}

/// `None` unless a test runs as root; then the user postgres, or nobody.
fn unprivileged() -> Option<(u32, u32)> {
    let id = |arguments: &[&str]| -> Option<u32> {
        let said = Command::new("id").args(arguments).output().unwrap();
        String::from_utf8(said.stdout).unwrap().trim().parse().ok()
    };
    if id(&["-u"]) != Some(0) {
        return None;
    }
    let user = if id(&["-u", "postgres"]).is_some() { "postgres" } else { "nobody" };
    Some((id(&["-u", user]).unwrap(), id(&["-g", user]).unwrap()))
}

/// The server dies without a word and comes back, three times, while reservations and settlements run. Whatever a call
/// was told holds: what was said to be reserved is, once, and the counters equal the rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_was_answered_before_a_restart_holds_after_it() {
    let server = Arc::new(Server::start("").up());
    let database = Database::parse(&server.url(), None).unwrap();
    PostgresLedger::migrate(&database).await.unwrap();
    let ledger = PostgresLedger::connect(&database, world(), Some(ring(1)), options()).await.unwrap();
    ledger.replace_limits("file", &[Limit { per_day: Some(amount("1000000000")), ..limit() }]).await.unwrap();
    let killer = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(400)).await;
            let server = server.clone();
            tokio::task::spawn_blocking(move || server.restart()).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(400)).await;
    };
    what_was_told_holds(&ledger, killer).await;
}

#[cfg(feature = "sandbox")]
mod tls {
    use std::os::unix::fs::PermissionsExt;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

    use super::*;

    fn ca() -> (String, Issuer<'static, KeyPair>) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        (pem, Issuer::new(params, key))
    }

    fn server_with_certificate(issuer: &Issuer<'static, KeyPair>) -> Server {
        let server = Server::start("ssl = on\nssl_cert_file = 'server.crt'\nssl_key_file = 'server.key'");
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, issuer).unwrap();
        for (name, text) in [("server.crt", certificate.pem()), ("server.key", key.serialize_pem())] {
            let path = server.data().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            if let Some((uid, gid)) = server.user {
                std::os::unix::fs::chown(&path, Some(uid), Some(gid)).unwrap();
            }
        }
        server.up()
    }

    #[tokio::test]
    async fn a_server_is_believed_by_its_ca_and_its_name_alone() {
        let (pem, issuer) = ca();
        let server = server_with_certificate(&issuer);
        let at = |mode: &str| format!("{}?sslmode={mode}", server.url());
        let migrate = async |url: &str, ca: Option<&str>| {
            let database = Database::parse(url, ca.map(|pem| pem.as_bytes().to_vec())).unwrap();
            PostgresLedger::migrate(&database).await.map_err(|e| e.to_string())
        };
        let database = Database::parse(&at("verify-full"), Some(pem.clone().into_bytes())).unwrap();
        PostgresLedger::migrate(&database).await.unwrap();
        let ledger = PostgresLedger::connect(&database, world(), None, options()).await.unwrap();
        ledger.ping().await.unwrap();
        let tls = "SELECT ssl FROM pg_stat_ssl WHERE pid <> pg_backend_pid() AND ssl";
        assert_eq!(sql_at(&server.url(), tls).await.unwrap(), ["t"], "the ledger's connection is the one with TLS");

        for (mode, ca) in [("verify-full", Some(super::tls::ca().0)), ("require", None)] {
            let error = migrate(&at(mode), ca.as_deref()).await.unwrap_err();
            assert!(error.contains("TLS") || error.contains("certificate"), "{error}");
        }
        // The certificate is for 127.0.0.1.
        let other = format!("postgresql://tollway@localhost:{}/postgres?sslmode=require", server.port);
        assert!(migrate(&other, Some(&pem)).await.is_err());
    }

    #[tokio::test]
    async fn a_server_without_tls_is_not_spoken_to_where_tls_is_asked() {
        let url = format!("{}?sslmode=require", server_url());
        let error = PostgresLedger::migrate(&Database::parse(&url, None).unwrap()).await.unwrap_err().to_string();
        assert!(error.contains("TLS"), "{error}");
    }
}
