//! Servers that answer to do harm. Every request ends within its limits, nothing of one answer is taken for another,
//! and no connection serves what it was not opened for.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::super::testing::serve_over;
use super::*;
use crate::ports::BoxIo;

const BRIEF: Limits = Limits { timeout: Duration::from_millis(600), ..LIMITS };

/// What the client makes of an answer.
#[derive(Debug, PartialEq, Eq)]
enum Made {
    Ok(u16, String),
    Timeout,
    TooLarge,
    Unknown,
}

async fn made(client: &Client, url: String) -> Made {
    match client.send_within(post(url), BRIEF).await {
        Ok(response) => Made::Ok(response.status().as_u16(), String::from_utf8_lossy(response.body()).into_owned()),
        Err(error) => {
            assert!(error.may_have_been_seen(), "{error:?}");
            assert!(error.to_string().chars().count() <= 300 && !error.to_string().contains(char::is_control));
            match error {
                HttpError::Timeout => Made::Timeout,
                HttpError::TooLarge(_) => Made::TooLarge,
                HttpError::Unknown(_) => Made::Unknown,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Answers each path with its bytes and holds the connection open.
async fn scripted(answers: BTreeMap<String, String>) -> std::net::SocketAddr {
    serve(move |request, io| {
        let path = request.line().split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
        let text = answers.get(&path).cloned().unwrap_or_else(|| answer(200, &[], "fine"));
        async move { write(&io, text).await }
    })
    .await
}

#[tokio::test]
async fn an_answer_that_is_no_plain_http_is_unusable_and_costs_no_more_than_its_limit() {
    let ok = |headers: &str, body: &str| format!("HTTP/1.1 200 OK\r\n{headers}\r\n{body}");
    let big = "a".repeat(200_000);
    let table: Vec<(&str, String, Made)> = vec![
        ("junk-0.9", "<html>hello</html>\r\n\r\n".into(), Made::Unknown),
        ("icy", "ICY 200 OK\r\ncontent-length: 2\r\n\r\nhi".into(), Made::Unknown),
        ("http-2", "HTTP/2 200\r\ncontent-length: 2\r\n\r\nhi".into(), Made::Unknown),
        ("http-9", "HTTP/9.9 200 OK\r\ncontent-length: 2\r\n\r\nhi".into(), Made::Unknown),
        ("status-20", "HTTP/1.1 20 OK\r\ncontent-length: 2\r\n\r\nhi".into(), Made::Unknown),
        ("status-max", "HTTP/1.1 99999 OK\r\ncontent-length: 2\r\n\r\nhi".into(), Made::Unknown),
        ("chunk-overflow", ok("transfer-encoding: chunked\r\n", "fffffffffffffffff\r\nx"), Made::Unknown),
        ("chunk-largest", ok("transfer-encoding: chunked\r\n", "7fffffffffffffff\r\nabc"), Made::Timeout),
        ("chunk-negative", ok("transfer-encoding: chunked\r\n", "-5\r\nhello\r\n0\r\n\r\n"), Made::Unknown),
        ("chunk-without-end", ok("transfer-encoding: chunked\r\n", "5\r\nhelloXX0\r\n\r\n"), Made::Unknown),
        ("chunk-extension", ok("transfer-encoding: chunked\r\n", &format!("5;{big}\r\nhello\r\n")), Made::Unknown),
        ("trailers", ok("transfer-encoding: chunked\r\n", &format!("0\r\nx: {big}\r\n\r\n")), Made::Unknown),
        ("two-lengths", ok("content-length: 2\r\ncontent-length: 3\r\n", "hi!"), Made::Unknown),
        ("length-negative", ok("content-length: -2\r\n", "hi"), Made::Unknown),
        ("length-plus", ok("content-length: +2\r\n", "hi"), Made::Unknown),
        ("length-hex", ok("content-length: 0x2\r\n", "hi"), Made::Unknown),
        ("length-beyond", ok("content-length: 99999999999999999999999\r\n", "hi"), Made::Unknown),
        ("length-larger", ok("content-length: 9000\r\n", "hi"), Made::Timeout),
        ("length-too-large", ok("content-length: 10001\r\n", "hi"), Made::TooLarge),
        ("gzip", ok("content-encoding: gzip\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("deflate", ok("content-encoding: Deflate\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("br", ok("content-encoding: br\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("zstd", ok("content-encoding: zstd\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        (
            "hidden-gzip",
            ok("content-encoding: identity\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n", "hi"),
            Made::Unknown,
        ),
        ("listed-gzip", ok("content-encoding: identity, gzip\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("identity", ok("content-encoding: identity\r\ncontent-length: 2\r\n", "hi"), Made::Ok(200, "hi".into())),
        ("transfer-gzip", ok("transfer-encoding: gzip, chunked\r\n", "2\r\nhi\r\n0\r\n\r\n"), Made::Unknown),
        ("transfer-unknown", ok("transfer-encoding: chunked, x\r\n", "2\r\nhi\r\n0\r\n\r\n"), Made::Unknown),
        (
            "transfer-and-length",
            ok("transfer-encoding: chunked\r\ncontent-length: 2\r\n", "2\r\nhi\r\n0\r\n\r\n"),
            Made::Unknown,
        ),
        ("split-cr", ok("x: a\rset-cookie: b\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("nul", ok("x: a\0b\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("folded", ok("x: a\r\n b\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        ("space-before-colon", ok("content-length : 2\r\n", "hi"), Made::Unknown),
        ("no-name", ok(": 2\r\ncontent-length: 2\r\n", "hi"), Made::Unknown),
        (
            "upgrade",
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhi".into(),
            Made::Unknown,
        ),
        (
            "continue",
            format!("{}{}", "HTTP/1.1 100 Continue\r\n\r\n".repeat(3), answer(200, &[], "hi")),
            Made::Ok(200, "hi".into()),
        ),
        (
            "hints",
            format!("HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n{}", answer(200, &[], "hi")),
            Made::Ok(200, "hi".into()),
        ),
        ("only-continue", "HTTP/1.1 100 Continue\r\n\r\n".into(), Made::Timeout),
    ];
    let at = scripted(table.iter().map(|(name, text, _)| ((*name).to_owned(), text.clone())).collect()).await;
    let client = client(Destination::AgentLocal);
    let asked = table.iter().map(|(name, ..)| made(&client, format!("http://{at}/{name}")));
    let mut wrong = Vec::new();
    for (found, (name, _, expected)) in futures_util::future::join_all(asked).await.into_iter().zip(&table) {
        if found != *expected {
            wrong.push(format!("{name}: {found:?}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // None of it spoils the client for the next request.
    assert_eq!(made(&client, format!("http://{at}/other")).await, Made::Ok(200, "fine".into()));
}

#[tokio::test]
async fn an_answer_that_never_ends_ends_with_the_time_or_the_size() {
    let at = serve(|request, io| async move {
        let pause = || tokio::time::sleep(Duration::from_millis(5));
        match request.line().split(' ').nth(1).unwrap_or_default() {
            "/head-by-byte" => {
                write(&io, "HTTP/1.1 200 OK\r\nx: ").await;
                while write(&io, "a").await {
                    pause().await;
                }
            }
            "/continue" => {
                while write(&io, "HTTP/1.1 100 Continue\r\n\r\n").await {
                    pause().await;
                }
            }
            "/body-by-byte" => {
                write(&io, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
                while write(&io, "1\r\n \r\n").await {
                    pause().await;
                }
            }
            "/comments" => {
                write(&io, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n").await;
                while write(&io, ": still here\n\n".repeat(64)).await {}
            }
            "/one-line" => {
                write(&io, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ").await;
                while write(&io, "x".repeat(1024)).await {}
            }
            "/trailers" => {
                write(&io, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n").await;
                while write(&io, format!("x: {}\r\n", "y".repeat(512))).await {}
            }
            other => panic!("{other}"),
        }
        false
    })
    .await;
    let client = client(Destination::AgentLocal);
    for (path, expected) in [
        ("head-by-byte", Made::Timeout),
        ("continue", Made::Timeout),
        ("body-by-byte", Made::Timeout),
        ("comments", Made::TooLarge),
        ("one-line", Made::TooLarge),
        ("trailers", Made::Unknown),
    ] {
        assert_eq!(made(&client, format!("http://{at}/{path}")).await, expected, "{path}");
    }
}

#[tokio::test]
async fn nothing_that_comes_behind_or_before_an_answer_is_taken_for_the_next_one() {
    let answers = Arc::new(AtomicUsize::new(0));
    let count = answers.clone();
    let at = serve(move |request, io| {
        let nth = count.fetch_add(1, Ordering::SeqCst);
        async move {
            let smuggled = answer(200, &[], "smuggled");
            let text = match request.line().split(' ').nth(1).unwrap_or_default() {
                "/two" => format!("{}{smuggled}", answer(200, &[], "first")),
                "/no-content" => format!("HTTP/1.1 204 No Content\r\n\r\n{smuggled}"),
                "/not-modified" => format!("HTTP/1.1 304 Not Modified\r\ncontent-length: 90\r\n\r\n{smuggled}"),
                "/longer" => format!("{} and more", answer(200, &[], "first")),
                "/chunked" => {
                    format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n{smuggled}")
                }
                "/later" => {
                    write(&io, answer(200, &[], "first")).await;
                    // On an idle connection.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    smuggled
                }
                _ => answer(200, &[], &format!("own {nth}")),
            };
            write(&io, text).await
        }
    })
    .await;
    for path in ["two", "no-content", "not-modified", "longer", "chunked", "later"] {
        let client = client(Destination::AgentLocal);
        let first = client.send(post(format!("http://{at}/{path}"))).await.unwrap();
        assert_ne!(first.body(), "smuggled", "{path}");
        tokio::time::sleep(Duration::from_millis(60)).await;
        let asked = answers.load(Ordering::SeqCst);
        match client.send(post(format!("http://{at}/own"))).await {
            Ok(second) => assert_eq!(second.body(), &format!("own {asked}"), "{path}"),
            // Allowed as well: written into a connection that was about to be given up.
            Err(error) => assert!(matches!(error, HttpError::Unknown(_)), "{path}: {error:?}"),
        }
    }
}

#[tokio::test]
async fn an_answer_before_the_request_was_read_is_an_answer_and_the_connection_is_not_used_again() {
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    // Writes as soon as there is a connection, and reads nothing.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        use tokio::io::AsyncWriteExt as _;
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.write_all(answer(200, &[], "early").as_bytes()).await;
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(5)).await;
                drop(stream);
            });
        }
    });
    let client = client(Destination::AgentLocal);
    for _ in 0..2 {
        let body = Bytes::from(vec![b'x'; 4 << 20]);
        let request = http::Request::post(format!("http://{at}/")).body(body).unwrap();
        match client.send_within(request, BRIEF).await {
            Ok(response) => assert_eq!(response.body(), "early"),
            Err(error) => assert!(matches!(error, HttpError::Unknown(_) | HttpError::NotSent(_)), "{error:?}"),
        }
    }
    assert_eq!(connections.load(Ordering::SeqCst), 2, "the request of the first connection was never read");
}

#[tokio::test]
async fn a_kept_connection_serves_its_own_name_and_port_alone() {
    let hosts: Arc<Mutex<BTreeMap<usize, Vec<String>>>> = Arc::default();
    let number = Arc::new(AtomicUsize::new(0));
    let accepted = number.clone();
    let seen = hosts.clone();
    let at = serve_over(
        move |io| {
            accepted.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move { Some(Box::new(io) as BoxIo) })
        },
        move |request, io| {
            let key = Arc::as_ptr(&io).addr();
            seen.lock().unwrap().entry(key).or_default().push(request.header("host").unwrap_or_default());
            async move { write(&io, answer(200, &[], "ok")).await }
        },
    )
    .await;
    // Three names at one address, one of which moves to a private one: only a new connection would find out.
    let names: &[(&str, &[&[&str]])] = &[
        ("a.example", &[&["93.184.216.34"]]),
        ("b.example", &[&["93.184.216.34"]]),
        ("moves.example", &[&["93.184.216.34"], &["10.0.0.1"]]),
    ];
    let (world, net) = TestNet::world(names, Some(at));
    let client = Client::new(world, Tls::Plain, Destination::Agent, LIMITS);
    for _ in 0..2 {
        for name in ["a.example", "b.example", "moves.example", "A.EXAMPLE"] {
            client.send(get(format!("https://{name}:{}/", at.port()))).await.unwrap();
        }
    }
    assert_eq!(number.load(Ordering::SeqCst), 3, "one connection for each name");
    assert_eq!(net.lookups.lock().unwrap().len(), 3);
    for on_one in hosts.lock().unwrap().values() {
        assert!(on_one.iter().all(|host| host == &on_one[0]), "{on_one:?}");
    }
    // Another port is another origin, and another look at the name.
    let error = client.send(get("https://moves.example:1/")).await.unwrap_err();
    assert!(matches!(error, HttpError::Refused("address_private")), "{error:?}");
}

#[tokio::test]
async fn one_private_address_among_any_number_refuses_the_name_before_a_dial() {
    let public = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "1.1.1.1", "8.8.8.8", "9.9.9.9", "8.8.4.4"];
    for private in ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "fd00::1", "fe80::1", "0.0.0.0"] {
        for at in 0..=public.len() {
            let mut list = public.to_vec();
            list.insert(at, private);
            let (world, net) = TestNet::world(&[("mixed.example", &[&list[..]])], None);
            let client = Client::new(world, Tls::Plain, Destination::Agent, LIMITS);
            let error = client.send(get("https://mixed.example/")).await.unwrap_err();
            assert!(matches!(error, HttpError::Refused(_)), "{private} at {at}: {error:?}");
            assert!(net.dialled.lock().unwrap().is_empty(), "{private} at {at} was dialled");
        }
    }
}
