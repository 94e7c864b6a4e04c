//! The client against real sockets: where it goes, what it takes, and what it says of a request that got no answer.
#![allow(clippy::disallowed_methods, reason = "tests run on the machine")]

mod attack;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;

use super::testing::{TestNet, answer, serve, write};
use super::{Client, Destination, HttpError, Limits, Tls};

const LIMITS: Limits = Limits { timeout: Duration::from_secs(5), max_response_bytes: 10_000 };

fn client(destination: Destination) -> Client {
    Client::new(crate::ports::machine::world().0, Tls::Plain, destination, LIMITS)
}
fn get(url: impl AsRef<str>) -> http::Request<Bytes> {
    http::Request::get(url.as_ref()).body(Bytes::new()).unwrap()
}
fn post(url: impl AsRef<str>) -> http::Request<Bytes> {
    http::Request::post(url.as_ref()).body(Bytes::from_static(b"pay")).unwrap()
}

#[tokio::test]
async fn a_connection_is_kept_for_its_origin_and_given_up_when_the_server_closes_it() {
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    let at = super::testing::serve_over(
        move |io| {
            count.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move { Some(Box::new(io) as crate::ports::BoxIo) })
        },
        |request, io| async move {
            assert_eq!(request.header("accept-encoding").as_deref(), Some("identity"));
            let open = !request.line().contains("/close");
            write(&io, answer(200, &[], "ok")).await && open
        },
    )
    .await;
    let client = client(Destination::AgentLocal);
    for path in ["a", "b", "c", "close"] {
        let got = client.send(get(format!("http://{at}/{path}"))).await.unwrap();
        assert_eq!(got.body(), "ok");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
    // The server has closed after its last answer. Seen or not, the next request is sent once or fails as unknown.
    tokio::time::sleep(Duration::from_millis(50)).await;
    client.send(get(format!("http://{at}/d"))).await.unwrap();
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_refused_connection_is_certainly_not_sent() {
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = client(Destination::Operator).send(post(format!("http://{free}/"))).await.unwrap_err();
    assert!(matches!(error, HttpError::NotSent(_)) && !error.may_have_been_seen(), "{error:?}");
    let error = client(Destination::Operator).send(post("http://no-such-host.invalid/")).await.unwrap_err();
    assert!(matches!(error, HttpError::NotSent(_)), "{error:?}");
}

#[tokio::test]
async fn a_connection_cut_behind_the_request_is_unknown_and_the_request_is_not_sent_again() {
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    let at = serve(move |request, io| {
        let count = count.clone();
        async move {
            match request.line() {
                line if line.starts_with("GET /warm") => write(&io, answer(200, &[], "ok")).await,
                line => {
                    count.fetch_add(1, Ordering::SeqCst);
                    if line.contains("/half") {
                        write(&io, "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf").await;
                    } else if line.contains("/noise") {
                        write(&io, "SSH-2.0-noise\r\n\r\n").await;
                    }
                    false
                }
            }
        }
    })
    .await;
    for (n, path) in ["cut", "half", "noise"].into_iter().enumerate() {
        let client = client(Destination::AgentLocal);
        // On a kept connection too, where other clients repeat.
        client.send(get(format!("http://{at}/warm"))).await.unwrap();
        let error = client.send(post(format!("http://{at}/{path}"))).await.unwrap_err();
        assert!(matches!(error, HttpError::Unknown(_)) && error.may_have_been_seen(), "{path}: {error:?}");
        assert_eq!(seen.load(Ordering::SeqCst), n + 1, "{path}");
    }
}

#[tokio::test]
async fn slow_endless_oversized_and_encoded_answers_end() {
    let at = serve(|request, io| async move {
        match request.line().split(' ').nth(1).unwrap_or_default() {
            "/silent" => std::future::pending::<()>().await,
            "/slow" => {
                write(&io, "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n").await;
                while write(&io, "x").await {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
            "/slow-head" => {
                while write(&io, "H").await {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
            "/endless" => {
                write(&io, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
                while write(&io, format!("400\r\n{}\r\n", "y".repeat(1024))).await {}
            }
            "/declared" => drop(write(&io, "HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n").await),
            "/heads" => {
                write(&io, "HTTP/1.1 200 OK\r\n").await;
                while write(&io, format!("x-filler: {}\r\n", "z".repeat(512))).await {}
            }
            "/many" => drop(write(&io, format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(500))).await),
            "/gzip" => drop(write(&io, answer(200, &[("content-encoding", "gzip")], "bomb")).await),
            other => panic!("{other}"),
        }
        false
    })
    .await;
    let client = client(Destination::AgentLocal);
    let limits = Limits { timeout: Duration::from_millis(700), ..LIMITS };
    for (path, kind) in [
        ("silent", "timeout"),
        ("slow", "timeout"),
        ("slow-head", "no answer"),
        ("endless", "too large"),
        ("declared", "too large"),
        ("heads", "unknown"),
        ("many", "unknown"),
        ("gzip", "unknown"),
    ] {
        let error = client.send_within(post(format!("http://{at}/{path}")), limits).await.unwrap_err();
        assert!(error.may_have_been_seen(), "{path}");
        let right = match kind {
            "timeout" => matches!(error, HttpError::Timeout),
            "too large" => matches!(error, HttpError::TooLarge(10_000)),
            "unknown" => matches!(error, HttpError::Unknown(_)),
            _ => true,
        };
        assert!(right, "{path}: {error:?}");
    }
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    let hits = Arc::new(AtomicUsize::new(0));
    let count = hits.clone();
    let target = serve(move |_, io| {
        count.fetch_add(1, Ordering::SeqCst);
        async move { write(&io, answer(200, &[], "secret")).await }
    })
    .await;
    let location = format!("http://{target}/");
    let at = serve(move |_, io| {
        let location = location.clone();
        async move { write(&io, answer(302, &[("location", &location)], "")).await }
    })
    .await;
    let got = client(Destination::AgentLocal).send(get(format!("http://{at}/"))).await.unwrap();
    assert_eq!(got.status(), 302);
    assert_eq!(hits.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_name_that_rebinds_to_loopback_is_refused_at_the_dial() {
    let hits = Arc::new(AtomicUsize::new(0));
    let count = hits.clone();
    let at = serve(move |request, io| {
        count.fetch_add(1, Ordering::SeqCst);
        async move {
            assert_eq!(request.header("host").as_deref(), Some(&*format!("rebind.example:{}", io_port(&request))));
            write(&io, answer(200, &[("connection", "close")], "ok")).await;
            false
        }
    })
    .await;
    let names: &[(&str, &[&[&str]])] = &[
        ("rebind.example", &[&["93.184.216.34"], &["127.0.0.1"]]),
        ("mixed.example", &[&["93.184.216.34", "::1"]]),
        ("mapped.example", &[&["::ffff:169.254.169.254"]]),
        ("empty.example", &[&[]]),
    ];
    let (world, net) = TestNet::world(names, Some(at));
    let client = Client::new(world, Tls::Plain, Destination::Agent, LIMITS);
    let url = format!("https://rebind.example:{}/", at.port());
    assert_eq!(client.send(get(&url)).await.unwrap().body(), "ok");
    tokio::time::sleep(Duration::from_millis(50)).await;
    let error = client.send(get(&url)).await.unwrap_err();
    assert!(matches!(error, HttpError::Refused("address_loopback")), "{error:?}");
    for (name, word) in [("mixed", "address_loopback"), ("mapped", "address_link_local")] {
        let error = client.send(get(format!("https://{name}.example:{}/", at.port()))).await.unwrap_err();
        assert!(matches!(error, HttpError::Refused(found) if found == word), "{name}: {error:?}");
    }
    let error = client.send(get("https://empty.example/")).await.unwrap_err();
    assert!(matches!(error, HttpError::NotSent(_)), "{error:?}");
    assert_eq!(hits.load(Ordering::SeqCst), 1);
    assert_eq!(*net.dialled.lock().unwrap(), [format!("93.184.216.34:{}", at.port()).parse().unwrap()]);
    assert_eq!(net.lookups.lock().unwrap().len(), 5, "one lookup for each connection");
}

fn io_port(request: &super::testing::Request) -> String {
    request.header("host").and_then(|host| Some(host.rsplit_once(':')?.1.to_owned())).unwrap_or_default()
}

#[tokio::test]
async fn rules_that_need_no_address_hold_before_anything_is_looked_up() {
    let (world, net) = TestNet::world(&[], None);
    let client = Client::new(world, Tls::Plain, Destination::Agent, LIMITS);
    for (url, word) in [
        ("http://seller.example/", "not_https"),
        ("ftp://seller.example/", "scheme"),
        ("https://user:secret@seller.example/", "url_credentials"),
        ("https://127.1/", "address_loopback"),
        ("https://[::ffff:a9fe:a9fe]/", "address_link_local"),
        ("https://seller.example:0/", "url"),
    ] {
        let error = client.send(get(url)).await.unwrap_err();
        assert!(matches!(error, HttpError::Refused(found) if found == word), "{url}: {error:?}");
        assert!(!error.may_have_been_seen());
    }
    assert!(net.lookups.lock().unwrap().is_empty() && net.dialled.lock().unwrap().is_empty());
}

#[tokio::test]
async fn more_requests_than_the_bound_wait_and_are_not_sent_when_their_time_is_over() {
    let at = serve(|_, _| std::future::pending()).await;
    let (world, _) = crate::ports::machine::world();
    let client = Client::with_concurrency(world, Tls::Plain, Destination::AgentLocal, LIMITS, 1);
    let brief = Limits { timeout: Duration::from_millis(200), ..LIMITS };
    let first = client.send_within(post(format!("http://{at}/")), LIMITS);
    let second = client.send_within(post(format!("http://{at}/")), brief);
    let (mut first, second) = (Box::pin(first), Box::pin(second));
    match futures_util::future::select(&mut first, second).await {
        futures_util::future::Either::Right((result, _)) => {
            assert!(matches!(result, Err(HttpError::NotSentTimeout)), "{result:?}");
        }
        futures_util::future::Either::Left((result, _)) => panic!("the silent server answered {result:?}"),
    }
    drop(first);
    let error = client.send_within(post(format!("http://{at}/")), brief).await.unwrap_err();
    assert!(matches!(error, HttpError::Timeout), "the place was given back: {error:?}");
}

/// The variables are set for a child: this very test, run again in a process of its own.
#[tokio::test]
async fn proxy_variables_are_ignored() {
    const TARGET: &str = "TOLLWAY_TEST_PROXY_TARGET";
    if let Ok(target) = std::env::var(TARGET) {
        let got = client(Destination::Operator).send(get(target)).await.unwrap();
        assert_eq!(got.body(), "direct");
        return;
    }
    let at = serve(|_, io| async move { write(&io, answer(200, &[], "direct")).await }).await;
    let proxied = Arc::new(AtomicUsize::new(0));
    let count = proxied.clone();
    let proxy = serve(move |_, io| {
        count.fetch_add(1, Ordering::SeqCst);
        async move { write(&io, answer(200, &[], "proxied")).await }
    })
    .await;
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "http::tests::proxy_variables_are_ignored"]).env(TARGET, format!("http://{at}/"));
    for name in ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
        child.env(name, format!("http://{proxy}"));
    }
    let output = child.output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    assert_eq!(proxied.load(Ordering::SeqCst), 0);
}

#[cfg(feature = "sandbox")]
mod tls {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use tokio_rustls::TlsAcceptor;

    use super::super::testing::serve_over;
    use super::*;

    struct Ca {
        pem: String,
        issuer: Issuer<'static, KeyPair>,
    }
    fn ca() -> Ca {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Ca { pem, issuer: Issuer::new(params, key) }
    }

    /// Serves `ok` with a certificate for `name`, signed by `ca` or by itself.
    async fn server(name: &str, ca: Option<&Ca>, expired: bool) -> std::net::SocketAddr {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        if expired {
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = match ca {
            Some(ca) => params.signed_by(&key, &ca.issuer).unwrap(),
            None => params.self_signed(&key).unwrap(),
        };
        let key = rustls_pki_types::PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        serve_over(
            move |io| {
                let acceptor = acceptor.clone();
                Box::pin(async move {
                    let stream = acceptor.accept(io).await.ok()?;
                    let name = stream.get_ref().1.server_name().map(str::to_owned);
                    assert_eq!(name.as_deref(), Some("seller.example"), "SNI stays the name");
                    Some(Box::new(stream) as crate::ports::BoxIo)
                })
            },
            |request, io| async move {
                assert!(request.header("host").is_some_and(|host| host.starts_with("seller.example:")));
                write(&io, answer(200, &[], "ok")).await
            },
        )
        .await
    }

    async fn ask(at: std::net::SocketAddr, ca: Option<&Ca>) -> Result<http::Response<Bytes>, HttpError> {
        let (world, _) = TestNet::world(&[("seller.example", &[&["127.0.0.1"]])], None);
        let tls = super::super::tls(ca.map(|ca| ca.pem.as_bytes())).unwrap();
        let client = Client::new(world, tls, Destination::AgentLocal, LIMITS);
        client.send(post(format!("https://seller.example:{}/", at.port()))).await
    }

    #[tokio::test]
    async fn a_certificate_counts_only_from_a_trusted_root_for_the_right_name_and_in_its_time() {
        let ours = ca();
        let good = server("seller.example", Some(&ours), false).await;
        assert_eq!(ask(good, Some(&ours)).await.unwrap().body(), "ok");
        for (what, at, trusted) in [
            ("unknown root", good, None),
            ("another root", good, Some(ca())),
            ("self-signed", server("seller.example", None, false).await, Some(ca())),
        ] {
            let error = ask(at, trusted.as_ref()).await.unwrap_err();
            assert!(matches!(&error, HttpError::NotSent(text) if text.contains("TLS")), "{what}: {error:?}");
        }
        for (what, at) in [
            ("wrong host", server("other.example", Some(&ours), false).await),
            ("expired", server("seller.example", Some(&ours), true).await),
        ] {
            let error = ask(at, Some(&ours)).await.unwrap_err();
            assert!(matches!(&error, HttpError::NotSent(text) if text.contains("TLS")), "{what}: {error:?}");
        }
    }

    #[test]
    fn a_ca_file_that_holds_no_certificate_is_refused() {
        assert!(super::super::tls(Some(b"")).is_err());
        assert!(super::super::tls(Some(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")).is_err());
        assert!(super::super::tls(None).is_ok());
    }
}
