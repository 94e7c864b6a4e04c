//! MCP over pipes, as a client process sees it.

use std::sync::Arc;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::time::timeout;
use tollway::mcp::{Settings, stdio};

use super::{Fixture, PATIENCE, fixture, request, settings, stateless};

struct Client {
    input: WriteHalf<DuplexStream>,
    output: Lines<BufReader<ReadHalf<DuplexStream>>>,
    fixture: Arc<Fixture>,
    ended: tokio::sync::oneshot::Receiver<bool>,
}

fn start(settings: Settings) -> Client {
    let fixture = fixture();
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let (read, write) = tokio::io::split(theirs);
    let (tell, ended) = tokio::sync::oneshot::channel();
    let handler = fixture.clone();
    settings.world.spawn.clone().spawn(Box::pin(async move {
        let result = stdio(settings, handler, "local".parse().unwrap(), read, write).await;
        let _ = tell.send(result.is_ok());
    }));
    let (output, input) = tokio::io::split(ours);
    Client { input, output: BufReader::new(output).lines(), fixture, ended }
}

impl Client {
    async fn send(&mut self, line: &str) {
        self.input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// The next line, which must be one JSON-RPC message whatever was asked.
    async fn next(&mut self) -> String {
        let line = timeout(PATIENCE, self.output.next_line()).await.unwrap().unwrap().expect("a line");
        let value: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
        let messages = value.as_array().cloned().unwrap_or_else(|| vec![value]);
        assert!(messages.iter().all(|message| message["jsonrpc"] == "2.0"), "{line}");
        line
    }

    async fn ask(&mut self, line: &str) -> String {
        self.send(line).await;
        self.next().await
    }

    async fn initialize(&mut self, revision: &str) {
        let params = format!(
            r#"{{"protocolVersion":"{revision}","capabilities":{{}},"clientInfo":{{"name":"t","version":"1"}}}}"#
        );
        let answer = self.ask(&request("0", "initialize", &params)).await;
        assert!(answer.contains(&format!(r#""protocolVersion":"{revision}""#)), "{answer}");
        self.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).await;
    }

    /// Closes the input; what was still written, once the server has ended.
    async fn end(mut self) -> Vec<String> {
        self.input.shutdown().await.unwrap();
        let mut rest = Vec::new();
        while let Ok(Some(line)) = timeout(PATIENCE, self.output.next_line()).await.unwrap() {
            rest.push(line);
        }
        assert!(timeout(PATIENCE, self.ended).await.unwrap().unwrap());
        rest
    }
}

#[tokio::test]
async fn every_revision_works_over_pipes() {
    for revision in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let mut client = start(settings());
        let early = client.ask(&request("9", "tools/list", "{}")).await;
        assert!(early.contains("-32600") && early.contains(r#""id":9"#), "{early}");
        client.initialize(revision).await;
        assert!(client.ask(&request("1", "tools/list", "{}")).await.contains(r#""name":"echo""#));
        assert_eq!(client.ask(&request("2", "ping", "{}")).await, r#"{"jsonrpc":"2.0","id":2,"result":{}}"#);
        let who = client.ask(&request("3", "tools/call", r#"{"name":"who"}"#)).await;
        assert!(who.contains(&format!("local\\\") {revision} stdio-")), "{who}");
        client.fixture.until("delivered tools/call").await;
        let params = r#"{"name":"progress","_meta":{"progressToken":7}}"#;
        let progress = client.ask(&request("4", "tools/call", params)).await;
        assert!(progress.contains(r#""progressToken":7"#), "{progress}");
        assert_eq!(progress.contains("half"), revision > "2024-11-05", "{progress}");
        client.next().await;
        assert!(client.next().await.contains("progressed"));
        // A stateless request beside the session.
        let mixed = client.ask(&request("5", "server/discover", &stateless(""))).await;
        assert!(mixed.contains("2024-11-05") && mixed.contains("2026-07-28"), "{mixed}");
        assert_eq!(client.end().await, Vec::<String>::new());
    }
}

#[tokio::test]
async fn stateless_requests_need_no_handshake() {
    let mut client = start(settings());
    let list = client.ask(&request("1", "tools/list", &stateless(""))).await;
    assert!(list.contains(r#""resultType":"complete""#) && list.contains(r#""ttlMs":0"#), "{list}");
    let old = client.ask(&request("2", "tools/list", &stateless("").replace("2026-07-28", "1900-01-01"))).await;
    assert!(old.contains("-32022"), "{old}");
    let listen = request("\"s\"", "subscriptions/listen", &stateless(r#""notifications":{},"#));
    assert!(client.ask(&listen).await.contains("acknowledged"));
    let rest = client.end().await;
    assert!(rest.len() == 1 && rest[0].contains(r#""id":"s","result":{"resultType":"complete""#), "{rest:?}");
}

#[tokio::test]
async fn nothing_but_messages_comes_out_whatever_goes_in() {
    let mut client = start(Settings { max_body_bytes: 4096, ..settings() });
    client.initialize("2025-11-25").await;
    for (line, code) in [
        ("{", "-32700"),
        ("\u{feff}{}", "-32700"),
        ("GET / HTTP/1.1", "-32700"),
        (r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, "-32600"),
        (r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#, "-32600"),
        (
            &format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"x":"{}"}}}}"#, "x".repeat(200_000)),
            "-32600",
        ),
        (&request("1", "tools/call", r#"{"name":"panic"}"#), "-32603"),
        (&request("1", "tools/call", r#"{"name":"list"}"#), "-32603"),
    ] {
        let answer = client.ask(line).await;
        assert!(answer.contains(code), "{line:.60}: {answer}");
    }
    client.input.write_all(b"\xff\xfe\n\r\n  \n").await.unwrap();
    assert!(client.next().await.contains("-32700"));
    let multiline = client.ask(&request("3", "tools/call", r#"{"name":"multiline"}"#)).await;
    assert!(multiline.contains(r#""content": ["#), "{multiline}");
    client.send(r#"{"jsonrpc":"2.0","id":8,"result":{}}"#).await;
    // The last line of a client that forgets its line break.
    client.input.write_all(request("4", "ping", "{}").as_bytes()).await.unwrap();
    assert_eq!(client.end().await, [r#"{"jsonrpc":"2.0","id":4,"result":{}}"#]);
}

#[tokio::test]
async fn calls_run_side_by_side_and_a_cancelled_one_is_not_answered() {
    let mut client = start(settings());
    client.initialize("2025-11-25").await;
    client.send(&request("1", "tools/call", r#"{"name":"stubborn"}"#)).await;
    client.fixture.until("called stubborn").await;
    assert!(client.ask(&request("2", "tools/call", r#"{"name":"echo"}"#)).await.contains(r#""id":2"#));
    client.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#).await;
    client.fixture.until("cancelled stubborn").await;
    client.fixture.release.notify_one();
    client.fixture.until("ended stubborn").await;
    assert!(client.ask(&request("3", "ping", "{}")).await.contains(r#""id":3"#));
    assert_eq!(client.end().await, Vec::<String>::new());
}

#[tokio::test]
async fn the_end_of_the_input_waits_for_calls_in_flight() {
    let mut client = start(settings());
    client.initialize("2025-11-25").await;
    client.send(&request("1", "tools/call", r#"{"name":"wait"}"#)).await;
    client.fixture.until("called wait").await;
    client.fixture.release.notify_one();
    let fixture = client.fixture.clone();
    let rest = client.end().await;
    assert!(rest.len() == 1 && rest[0].contains("waited"), "{rest:?}");
    assert!(fixture.log().contains(&"delivered tools/call".to_owned()), "{:?}", fixture.log());
}

#[tokio::test]
async fn a_reader_that_goes_is_told_nothing_was_delivered() {
    let mut client = start(settings());
    client.initialize("2025-11-25").await;
    client.send(&request("1", "tools/call", r#"{"name":"wait"}"#)).await;
    client.fixture.until("called wait").await;
    let Client { input, output, fixture, ended } = client;
    drop((input, output));
    fixture.release.notify_one();
    assert!(!timeout(PATIENCE, ended).await.unwrap().unwrap(), "writing failed");
    assert!(!fixture.log().contains(&"delivered tools/call".to_owned()), "{:?}", fixture.log());
}

#[tokio::test]
async fn batches_are_answered_in_one_line() {
    let mut client = start(settings());
    client.initialize("2025-03-26").await;
    let batch = format!("[{},{}]", request("1", "ping", "{}"), request("2", "tools/call", r#"{"name":"echo"}"#));
    let answer = client.ask(&batch).await;
    assert!(answer.starts_with('[') && answer.contains(r#""id":1"#) && answer.contains(r#""id":2"#), "{answer}");
    client.fixture.until("delivered tools/call").await;
    assert_eq!(client.end().await, Vec::<String>::new());
}
