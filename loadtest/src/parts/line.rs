//! A cable that can be pulled: a TCP relay in front of one part, for one replica. As long as it is silent nothing moves
//! on it and nothing is told to either side, as in a network that is partitioned; what was under way goes on when it is
//! whole again. A cut one resets what is connected.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::report::{Doing as _, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cable {
    Whole,
    Silent,
    Cut,
}

pub struct Line {
    pub port: u16,
    cable: watch::Sender<Cable>,
    task: tokio::task::JoinHandle<()>,
}

impl Line {
    pub async fn to(target: u16) -> Result<Line> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.doing("a line")?;
        let port = listener.local_addr().doing("a line")?.port();
        let (cable, seen) = watch::channel(Cable::Whole);
        let task = tokio::spawn(async move {
            loop {
                let Ok((near, _)) = listener.accept().await else { continue };
                tokio::spawn(relay(near, target, seen.clone()));
            }
        });
        Ok(Line { port, cable, task })
    }

    pub fn set(&self, cable: Cable) {
        self.cable.send_replace(cable);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.task.abort();
        // Ends what is relayed.
        self.cable.send_replace(Cable::Cut);
    }
}

async fn relay(near: TcpStream, target: u16, mut cable: watch::Receiver<Cable>) {
    if !passable(&mut cable).await {
        return;
    }
    let Ok(far) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let (mut near_in, mut near_out) = near.into_split();
    let (mut far_in, mut far_out) = far.into_split();
    let mut end = cable.clone();
    let (mut up, mut down) = (cable.clone(), cable);
    tokio::select! {
        _ = end.wait_for(|cable| *cable == Cable::Cut) => {}
        ((), ()) = async { tokio::join!(
            copy(&mut near_in, &mut far_out, &mut up),
            copy(&mut far_in, &mut near_out, &mut down),
        ) } => {}
    }
}

async fn copy(
    from: &mut tokio::net::tcp::OwnedReadHalf,
    to: &mut tokio::net::tcp::OwnedWriteHalf,
    cable: &mut watch::Receiver<Cable>,
) {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        if !passable(cable).await {
            return;
        }
        if read == 0 || to.write_all(&buffer[..read]).await.is_err() {
            let _ = to.shutdown().await;
            return;
        }
    }
}

/// Waits while the line is silent. `false`: it is cut.
async fn passable(cable: &mut watch::Receiver<Cable>) -> bool {
    let now = cable.wait_for(|cable| *cable != Cable::Silent).await;
    now.is_ok_and(|now| *now == Cable::Whole)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_silent_line_holds_what_is_sent_and_a_cut_one_ends_it() {
        let echo = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let line = Line::to(echo.local_addr().unwrap().port()).await.unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = echo.accept().await.unwrap();
            let mut byte = [0];
            while stream.read_exact(&mut byte).await.is_ok() {
                stream.write_all(&byte).await.unwrap();
            }
        });
        let mut near = TcpStream::connect(("127.0.0.1", line.port)).await.unwrap();
        let mut byte = [0];
        near.write_all(b"a").await.unwrap();
        near.read_exact(&mut byte).await.unwrap();
        line.set(Cable::Silent);
        near.write_all(b"b").await.unwrap();
        let silence = tokio::time::timeout(Duration::from_millis(100), near.read_exact(&mut byte)).await;
        assert!(silence.is_err());
        line.set(Cable::Whole);
        near.read_exact(&mut byte).await.unwrap();
        assert_eq!(&byte, b"b");
        line.set(Cable::Cut);
        assert_eq!(near.read(&mut byte).await.unwrap_or(0), 0);
    }
}
