//! A line that cuts, between the agent server and the real seller: the chain is the witness that the same call again
//! moves nothing twice.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tollway::ledger::{Filter, State};
use tollway::pay::{Sweep, SweepParts, SweepSettings};
use tollway::ports::machine::world;
use tollway::ports::{BoxIo, Net, World};
use tollway::sandbox::chain::{NETWORK, USDC};
use tollway::sandbox::start::start;

use super::counts::{Agent, counted};
use super::{every_transfer_has_its_row, fast};

/// What happens to the next paid request, once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    Nothing,
    /// Before a byte of it has left.
    Request,
    /// When its answer comes.
    Answer,
}

struct Lossy(Arc<dyn Net>, Arc<Mutex<Cut>>);

impl Net for Lossy {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.0.resolve(host)
    }
    fn connect(&self, addr: SocketAddr) -> BoxFuture<'_, io::Result<BoxIo>> {
        Box::pin(async move {
            let line = self.0.connect(addr).await?;
            Ok(Box::new(Line { line, cut: self.1.clone(), last: Vec::new(), deaf: false }) as BoxIo)
        })
    }
}

struct Line {
    line: BoxIo,
    cut: Arc<Mutex<Cut>>,
    /// The end of what was written.
    last: Vec<u8>,
    /// The next bytes that come are the end of the connection.
    deaf: bool,
}

impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        const MARK: &[u8] = b"\"x402/payment\"";
        let seen = [&self.last[..], bytes].concat();
        if seen.windows(MARK.len()).any(|window| window == MARK) {
            let cut = std::mem::replace(&mut *self.cut.lock().unwrap(), Cut::Nothing);
            match cut {
                Cut::Nothing => {}
                Cut::Request => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                Cut::Answer => self.deaf = true,
            }
        }
        let written = ready!(Pin::new(&mut self.line).poll_write(cx, bytes))?;
        let end = self.last.len() + written;
        self.last = seen[end.saturating_sub(MARK.len() - 1)..end].to_vec();
        Poll::Ready(Ok(written))
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_shutdown(cx)
    }
}

impl AsyncRead for Line {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        let read = ready!(Pin::new(&mut self.line).poll_read(cx, out));
        if self.deaf {
            out.set_filled(before);
        }
        Poll::Ready(read)
    }
}

/// Closes what is open, as the running server's sweep does.
async fn sweep(agent: &Agent, world: &World) {
    let chains = BTreeMap::from([(NETWORK.parse().unwrap(), agent.chain.clone())]);
    let (ledger, settings) = (agent.ledger.clone(), SweepSettings::default());
    let report = Sweep::new(SweepParts { world: world.clone(), ledger, chains, settings }).pass().await;
    assert_eq!((report.taken, report.settled), (1, 1), "{report:?}");
}

async fn only_state(agent: &Agent) -> State {
    let rows = agent.ledger.real.list(&Filter { limit: 10, ..Filter::default() }).await.unwrap();
    rows.iter().map(|row| row.state).next().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_again_after_a_lost_answer_or_request_is_one_transfer_and_the_output() {
    let (world, _) = world();
    let sandbox = start(fast(), &world).await.unwrap();
    let cut = Arc::new(Mutex::new(Cut::Nothing));
    let dialing = World { net: Arc::new(Lossy(world.net.clone(), cut.clone())), ..world.clone() };
    let mut transfers = 0;
    for (name, what, keyed, swept) in [
        ("keyed", Cut::Answer, true, false),
        ("keyless", Cut::Answer, false, false),
        ("swept", Cut::Answer, true, true),
        ("unsent-keyed", Cut::Request, true, false),
        ("unsent", Cut::Request, false, false),
    ] {
        let agent = Agent::start(&sandbox, &world, &dialing, name).await;
        let found = agent.ask("x402_search_resources", json!({"query": "weather city"})).await;
        let mut call = json!({"ref": found["resources"][0]["wrapper"]["ref"], "network": NETWORK, "scheme": "exact",
            "asset": USDC, "maxAtomicAmount": "10000", "arguments": {"city": "Bern"}});
        if keyed {
            call["idempotencyKey"] = json!("recovered-on-the-chain");
        }
        let before = counted(&sandbox);
        *cut.lock().unwrap() = what;
        let lost = agent.ask("x402_call_resource", call.clone()).await;
        assert_eq!(lost["details"]["reason"], "no_answer", "{name}: {lost}");
        let settled_already = what == Cut::Answer;
        assert_eq!(counted(&sandbox).3, before.3 + usize::from(settled_already), "{name}");
        assert_eq!(only_state(&agent).await, State::InDoubt, "{name}");
        if swept {
            sweep(&agent, &world).await;
            assert_eq!(only_state(&agent).await, State::Settled, "{name}");
        }

        let answer = agent.ask("x402_call_resource", call.clone()).await;
        assert!(answer["content"][0]["text"].as_str().is_some_and(|text| text.contains("Bern")), "{name}: {answer}");
        let moved = sandbox.backends.network.transfers().pop().unwrap();
        assert_eq!(answer["receipt"]["transaction"], Value::String(moved.transaction), "{name}");
        assert_eq!(agent.ask("x402_call_resource", call).await, answer, "{name}");
        let (after, paid) = (counted(&sandbox), 1 + u64::from(settled_already));
        assert_eq!((after.1 - before.1, after.2 - before.2, after.3 - before.3), (paid, 1, 1), "{name}");
        transfers += 1;
    }
    let ledgers = ["keyed", "keyless", "swept", "unsent-keyed", "unsent"].map(|name| format!("{name}/ledger.sqlite"));
    let ledgers: Vec<&str> = ledgers.iter().map(String::as_str).collect();
    assert_eq!(every_transfer_has_its_row(&sandbox, &world, &ledgers).await, transfers);
}
