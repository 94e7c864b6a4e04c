//! Messages that reach another replica than the stream, and what pretends to be one.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tollway::seal::KeyRing;

use super::{ALICE, BOB, PATIENCE, Plan, Replica, call, request, ring};

#[tokio::test]
async fn any_replica_takes_the_messages_of_every_stream() {
    let ring = ring();
    let replicas = [Replica::of(&ring).await, Replica::of(&ring).await, Replica::of(&ring).await];
    let mut sse = replicas[0].stream(ALICE).await;
    let endpoint = sse.endpoint.clone();
    let initialize = request("0", "initialize", r#"{"protocolVersion":"2024-11-05"}"#);
    assert_eq!(replicas[1].post(ALICE, &endpoint, &initialize).await.status, 202);
    sse.until(r#""protocolVersion":"2024-11-05""#).await;
    for (n, id) in (1..=9).enumerate() {
        let answer = replicas[n % 3].post(ALICE, &endpoint, &call(id, "who")).await;
        assert_eq!((answer.status, answer.body.as_str()), (StatusCode::ACCEPTED, ""));
        let who = sse.until("}]}}").await;
        assert!(who.contains(&format!(r#""id":{id},"#)) && who.contains("alice"), "{who}");
    }
    assert_eq!(replicas[0].fixture.log().iter().filter(|line| *line == "called who").count(), 9);
    assert!(replicas[1].fixture.log().is_empty(), "the stream's own replica does the calls");
    // A cancellation by way of another replica.
    assert_eq!(replicas[1].post(ALICE, &endpoint, &call(20, "stubborn")).await.status, 202);
    replicas[0].fixture.until("called stubborn").await;
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":20}}"#;
    assert_eq!(replicas[2].post(ALICE, &endpoint, cancel).await.status, 202);
    replicas[0].fixture.until("cancelled stubborn").await;
    replicas[0].fixture.release.notify_one();
    // What is wrong is refused where it arrives; whose stream it is, is known everywhere.
    assert_eq!(replicas[1].post(ALICE, &endpoint, "{").await.status, 400);
    assert_eq!(replicas[1].post(BOB, &endpoint, &call(21, "who")).await.status, 404);
    drop(sse);
    replicas[0].fixture.until("ended stubborn").await;
    super::soon(|| async { replicas[1].post(ALICE, &endpoint, &call(22, "who")).await.status == 404 }).await;
}

#[tokio::test]
async fn a_replica_that_is_gone_is_said_to_be_gone_whoever_has_its_address_now() {
    let ring = ring();
    let other = Replica::of(&ring).await;
    // The stream stays open, but nobody listens where it says.
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = nobody.local_addr().unwrap();
    let mut plan = Plan::new(&ring);
    plan.advertise = Some(at);
    let lost = Replica::start(plan).await;
    let sse = lost.stream(ALICE).await;
    // Connections are taken, and nothing is answered.
    let silent = other.post(ALICE, &sse.endpoint, &request("7", "ping", "{}")).await;
    assert_eq!(silent.status, 504, "{silent:?}");
    assert!(silent.body.contains(r#""id":7"#) && silent.body.contains("may have been taken"), "{silent:?}");
    drop(nobody);
    let gone = other.post(ALICE, &sse.endpoint, &request("7", "ping", "{}")).await;
    assert!(gone.status == 504 && gone.body.contains("was not taken"), "{gone:?}");
    // Another program is there, and says yes to everything.
    let impostor = TcpListener::bind(at).await.unwrap();
    let serving = tokio::spawn(async move {
        let (mut connection, _) = impostor.accept().await.unwrap();
        let mut request = vec![0; 64 << 10];
        let mut read = 0;
        while !String::from_utf8_lossy(&request[..read]).contains("\r\n\r\n") {
            read += connection.read(&mut request[read..]).await.unwrap();
        }
        connection.write_all(b"HTTP/1.1 202 Accepted\r\nContent-Length: 5\r\n\r\ntaken").await.unwrap();
        String::from_utf8_lossy(&request[..read]).into_owned()
    });
    let taken_over = other.post(ALICE, &sse.endpoint, &call(8, "who")).await;
    assert_eq!(taken_over.status, 504, "{taken_over:?}");
    let seen = serving.await.unwrap();
    assert!(!seen.contains("alice") && !seen.contains("tools/call"), "nothing of it can be read: {seen}");
    // Its own replica has it still.
    assert_eq!(lost.post(ALICE, &sse.endpoint, &request("9", "ping", "{}")).await.status, 202);
}

#[tokio::test]
async fn what_was_handed_over_goes_no_further() {
    let ring = ring();
    let (first, second) = (Replica::of(&ring).await, Replica::of(&ring).await);
    let mut plan = Plan::new(&ring);
    plan.advertise = Some(second.relay);
    let misled = Replica::start(plan).await;
    let sse = misled.stream(ALICE).await;
    let answer = first.post(ALICE, &sse.endpoint, &call(1, "who")).await;
    assert!(answer.status == 404 && answer.body.contains("Session not found"), "{answer:?}");
    assert!(misled.fixture.log().is_empty() && second.fixture.log().is_empty());
}

/// The bytes of one request, which is not answered.
async fn caught(listener: &TcpListener) -> Vec<u8> {
    let (mut connection, _) = listener.accept().await.unwrap();
    let mut got = Vec::new();
    loop {
        let mut piece = [0; 4096];
        let n = connection.read(&mut piece).await.unwrap();
        got.extend_from_slice(&piece[..n]);
        let text = String::from_utf8_lossy(&got).to_ascii_lowercase();
        let Some(head) = text.find("\r\n\r\n") else { continue };
        let length = text[..head].split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap();
        let body = got.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        if got.len() - body >= length.parse::<usize>().unwrap() {
            return got;
        }
    }
}

/// The whole answer to these bytes.
async fn played(to: SocketAddr, bytes: &[u8]) -> String {
    let mut connection = TcpStream::connect(to).await.unwrap();
    connection.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&answer).contains("\r\n\r\n") {
            let mut piece = [0; 4096];
            let n = connection.read(&mut piece).await.unwrap();
            assert!(n > 0, "closed without an answer");
            answer.extend_from_slice(&piece[..n]);
        }
    };
    timeout(PATIENCE, read).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn the_relay_listener_takes_signed_requests_once_and_answers_everything_else_alike() {
    let ring = ring();
    let sender = Replica::of(&ring).await;
    // In front of the holder's relay listener stands somebody who keeps what comes by.
    let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut plan = Plan::new(&ring);
    plan.advertise = Some(between.local_addr().unwrap());
    let holder = Replica::start(plan).await;
    let mut sse = holder.stream(ALICE).await;
    let body = call(1, "who");
    // It gets no answer, and asks nobody else.
    let endpoint = sse.endpoint.clone();
    let asked = std::pin::pin!(sender.post(ALICE, &endpoint, &body));
    let catching = std::pin::pin!(caught(&between));
    let request = match futures_util::future::select(asked, catching).await {
        futures_util::future::Either::Left((answer, _)) => panic!("nothing was handed over: {answer:?}"),
        futures_util::future::Either::Right((request, _)) => request,
    };
    let at = request.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8(request[..at].to_vec()).unwrap();
    assert!(head.contains("tollway-relay-mac") && !head.contains("alice") && !head.contains(&sse.endpoint), "{head}");
    let refused = played(holder.relay, b"POST /relay HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").await;
    assert!(refused.starts_with("HTTP/1.1 404") && !refused.contains("tollway-relay"), "{refused}");
    let with = |from: &str, to: &str| {
        assert!(head.contains(from), "{from} in {head}");
        [head.replacen(from, to, 1).as_bytes(), &request[at..]].concat()
    };
    let value = |name: &str| head.split(&format!("{name}: ")).nth(1).unwrap().split("\r\n").next().unwrap().to_owned();
    let mut tampered = request.clone();
    *tampered.last_mut().unwrap() ^= 1;
    for (what, bytes) in [
        ("the body", tampered),
        ("the mac", with(&value("tollway-relay-mac"), &"0".repeat(64))),
        ("no mac", with("tollway-relay-mac", "tollway-relay-mad")),
        ("the time", with(&value("tollway-relay-time"), "1764000000000")),
        ("the nonce", with(&value("tollway-relay-nonce"), &"0".repeat(32))),
        ("the stream", with(&value("tollway-relay-stream"), "sse-000000000000000000000000")),
        ("the digest", with(&value("tollway-relay-digest"), &"0".repeat(64))),
        ("the method", with("POST ", "PUT ")),
        ("the path", with("/relay", "/relay/")),
    ] {
        let answer = played(holder.relay, &bytes).await;
        assert_eq!(answer, refused, "{what}");
    }
    assert_eq!(played(sender.relay, &request).await, refused, "for another replica");
    assert_eq!(played(holder.addr, &request).await.split("\r\n").next(), Some("HTTP/1.1 404 Not Found"));
    assert!(holder.fixture.log().is_empty() && sender.fixture.log().is_empty());
    // As it was it is taken, once.
    let taken = played(holder.relay, &request).await;
    assert!(taken.starts_with("HTTP/1.1 202"), "{taken}");
    assert!(sse.until("}]}}").await.contains("alice"));
    assert_eq!(played(holder.relay, &request).await, refused, "again");
    assert_eq!(holder.fixture.log().iter().filter(|line| *line == "called who").count(), 1);
}

#[tokio::test]
async fn the_keys_may_be_exchanged_while_streams_are_open() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring");
    let write = |keys: &[u8]| {
        let text: Vec<String> = keys.iter().map(|b| format!("{b:02x}").repeat(32)).collect();
        fs::write(&path, text.join("\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
    };
    write(&[1]);
    let sign_after = Duration::from_millis(200);
    let load = || KeyRing::load(&path).unwrap().with_sign_after(sign_after);
    let rings = [load(), load()];
    let replicas = [Replica::of(&rings[0]).await, Replica::of(&rings[1]).await];
    let mut sse = replicas[0].stream(ALICE).await;
    let endpoint = sse.endpoint.clone();
    let mut id = 0;
    let mut works = async |sse: &mut super::Sse, endpoint: &str| {
        for replica in &replicas {
            id += 1;
            let answer = replica.post(ALICE, endpoint, &call(id, "who")).await;
            assert_eq!(answer.status, 202, "{answer:?}");
            sse.until("}]}}").await;
        }
    };
    works(&mut sse, &endpoint).await;
    write(&[2, 1]);
    // One has read it, the other not yet.
    assert!(rings[1].reload().unwrap());
    works(&mut sse, &endpoint).await;
    assert!(rings[0].reload().unwrap());
    works(&mut sse, &endpoint).await;
    // Until the new key signs, in both.
    super::soon(|| async {
        let new = KeyRing::new(vec![vec![2; 32]]).unwrap();
        rings.iter().all(|ring| new.verify("p", b"m", &ring.sign("p", b"m")))
    })
    .await;
    works(&mut sse, &endpoint).await;
    let mut young = replicas[1].stream(ALICE).await;
    let newer = young.endpoint.clone();
    works(&mut young, &newer).await;
    works(&mut sse, &endpoint).await;
    // The old key goes, and with it what it signed.
    write(&[2]);
    assert!(rings[0].reload().unwrap() && rings[1].reload().unwrap());
    works(&mut young, &newer).await;
    assert_eq!(replicas[0].post(ALICE, &endpoint, &call(99, "who")).await.status, 404);
}

#[tokio::test]
async fn a_call_that_was_handed_over_is_answered_though_its_first_replica_dies() {
    let ring = ring();
    let (holder, other) = (Replica::of(&ring).await, Replica::of(&ring).await);
    let mut sse = holder.stream(ALICE).await;
    assert_eq!(other.post(ALICE, &sse.endpoint, &call(1, "wait")).await.status, 202);
    holder.fixture.until("called wait").await;
    drop(other);
    holder.fixture.release.notify_one();
    assert!(sse.until("waited").await.contains(r#""id":1"#));
    holder.fixture.until("delivered tools/call").await;
}
