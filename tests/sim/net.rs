//! The network: every write arrives after a delay; connections are refused, lost, cut, made mute; what was sent on one
//! may arrive once more later.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tollway::ports::{BoxIo, Net};

use super::world::{Ctx, Host, lock};

impl Net for Ctx {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            self.world.pause().await;
            let name = host.trim_end_matches(".test");
            let found = self.world.host(|host| host.name == name);
            found.map(|host| vec![host.ip]).ok_or_else(|| io::Error::other("no such host"))
        })
    }

    fn connect(&self, addr: SocketAddr) -> BoxFuture<'_, io::Result<BoxIo>> {
        Box::pin(async move {
            self.world.pause().await;
            let world = &self.world;
            let peer = world.host(|host| host.ip == addr.ip()).ok_or(io::ErrorKind::HostUnreachable)?;
            if world.chance(|f| f.syn_lost) {
                self.trace("net: connection lost");
                world.count(|s| s.connections_lost += 1);
                std::future::pending::<()>().await;
            }
            let accept = peer.listener().filter(|_| !world.chance(|f| f.refuse));
            let Some(accept) = accept else {
                self.trace(&format!("net: {} refuses", peer.name));
                world.count(|s| s.refused += 1);
                return Err(io::ErrorKind::ConnectionRefused.into());
            };
            let somewhere =
                |short: u64| if world.permille(500) { world.range(0, short) } else { world.range(0, 9_000) };
            let (mut there, mut back) = (Pipe::default(), Pipe::default());
            there.cut_after = world.chance(|f| f.cut_request).then(|| somewhere(400) as usize);
            back.cut_after = world.chance(|f| f.cut_answer).then(|| somewhere(200) as usize);
            back.mute_after = world.chance(|f| f.mute_answer).then(|| somewhere(100) as usize);
            let twice = world.chance(|f| f.twice);
            there.record = twice.then(Vec::new);
            self.trace(&format!(
                "net: to {} cut {:?} {:?} mute {:?} twice {twice}",
                peer.name, there.cut_after, back.cut_after, back.mute_after
            ));
            let (there, back) = (Arc::new(Mutex::new(there)), Arc::new(Mutex::new(back)));
            let mine = Stream { rx: back.clone(), tx: there.clone(), sleep: None, ctx: self.clone() };
            let ctx = Ctx { world: world.clone(), epoch: peer.epoch(), host: peer.clone() };
            let theirs = Stream { rx: there.clone(), tx: back, sleep: None, ctx };
            accept.send(theirs).map_err(|_| io::ErrorKind::ConnectionRefused)?;
            if twice {
                // It belongs to the network and outlives the sender.
                world.outside(deliver_again(self.clone(), peer, there));
            }
            Ok(Box::new(mine) as BoxIo)
        })
    }
}

async fn deliver_again(ctx: Ctx, peer: Arc<Host>, sent: Arc<Mutex<Pipe>>) {
    sleep(Duration::from_millis(ctx.world.range(1, 45_000))).await;
    let Some(bytes) = lock(&sent).record.take().filter(|bytes| !bytes.is_empty()) else { return };
    let Some(accept) = peer.listener() else { return };
    ctx.world.trace(&format!("net: {} bytes to {} again", bytes.len(), peer.name));
    ctx.world.count(|s| s.delivered_twice += 1);
    let (there, back) = (Arc::<Mutex<Pipe>>::default(), Arc::<Mutex<Pipe>>::default());
    let peer_ctx = Ctx { world: ctx.world.clone(), epoch: peer.epoch(), host: peer };
    let _ = accept.send(Stream { rx: there.clone(), tx: back.clone(), sleep: None, ctx: peer_ctx });
    let mut stream = Stream { rx: back, tx: there, sleep: None, ctx };
    let _ = stream.write_all(&bytes).await;
    let _ = timeout(Duration::from_secs(60), stream.read_to_end(&mut Vec::new())).await;
}

pub struct Listener(pub mpsc::UnboundedReceiver<Stream>);

#[derive(Default)]
struct Pipe {
    arriving: VecDeque<(Instant, Vec<u8>)>,
    last: Option<Instant>,
    end: Option<Instant>,
    reset: bool,
    mute: bool,
    cut_after: Option<usize>,
    mute_after: Option<usize>,
    record: Option<Vec<u8>>,
    reader: Option<Waker>,
}

impl Pipe {
    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// `left -= len`, and how much of `len` still goes through when it runs out.
fn runs_out(left: &mut Option<usize>, len: usize) -> Option<usize> {
    match left {
        Some(n) if *n < len => Some(*n),
        Some(n) => {
            *n -= len;
            None
        }
        None => None,
    }
}

pub struct Stream {
    rx: Arc<Mutex<Pipe>>,
    tx: Arc<Mutex<Pipe>>,
    sleep: Option<Pin<Box<Sleep>>>,
    ctx: Ctx,
}

impl Stream {
    fn arrival(&self, pipe: &mut Pipe) -> Instant {
        let at = Instant::now() + Duration::from_millis(self.ctx.world.latency());
        // TCP keeps the order.
        let at = pipe.last.map_or(at, |last| last.max(at));
        pipe.last = Some(at);
        at
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let wait = {
                let mut pipe = lock(&self.rx);
                pipe.reader = Some(cx.waker().clone());
                if pipe.reset {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
                }
                let now = Instant::now();
                match pipe.arriving.front_mut() {
                    Some((at, data)) if *at <= now => {
                        let n = data.len().min(buf.remaining());
                        buf.put_slice(&data[..n]);
                        data.drain(..n);
                        if data.is_empty() {
                            pipe.arriving.pop_front();
                        }
                        return Poll::Ready(Ok(()));
                    }
                    Some((at, _)) => *at,
                    None => match pipe.end {
                        Some(at) if at <= now => return Poll::Ready(Ok(())),
                        Some(at) => at,
                        None => return Poll::Pending,
                    },
                }
            };
            let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(wait)));
            if sleep.deadline() != wait {
                sleep.as_mut().reset(wait);
            }
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let mut pipe = lock(&self.tx);
        if pipe.reset {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if let Some(record) = &mut pipe.record {
            record.extend_from_slice(data);
        }
        if pipe.mute {
            return Poll::Ready(Ok(data.len()));
        }
        let at = self.arrival(&mut pipe);
        let muted = runs_out(&mut pipe.mute_after, data.len());
        let cut = runs_out(&mut pipe.cut_after, data.len());
        let through = muted.or(cut).unwrap_or(data.len());
        pipe.arriving.push_back((at, data[..through].to_vec()));
        self.ctx.trace(&format!("net: writes {} of {}", through, data.len()));
        if muted.is_some() {
            pipe.mute = true;
            self.ctx.world.count(|s| s.muted += 1);
        } else if cut.is_some() {
            (pipe.end, pipe.mute) = (Some(at), true);
            self.ctx.world.count(|s| s.cut += 1);
        }
        pipe.wake();
        drop(pipe);
        if cut.is_some() && muted.is_none() {
            let mut other = lock(&self.rx);
            other.reset = true;
            other.wake();
        }
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut pipe = lock(&self.tx);
        if pipe.end.is_none() && !pipe.mute {
            pipe.end = Some(self.arrival(&mut pipe));
            pipe.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The kernel of a killed process sends FIN; a machine without power says nothing at all.
        if !self.ctx.alive() && self.ctx.world.permille(250) {
            lock(&self.tx).mute = true;
            return;
        }
        let mut pipe = lock(&self.tx);
        if pipe.end.is_none() && !pipe.mute {
            pipe.end = Some(self.arrival(&mut pipe));
        }
        pipe.wake();
        drop(pipe);
        lock(&self.rx).reset = true;
    }
}
