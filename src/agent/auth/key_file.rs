//! A file of bearer keys that is written anew while the server runs: by hand, by an atomic rename, or by Kubernetes,
//! which swaps the symbolic link that a mounted secret is read through. So the content is compared, not a time.

use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use crate::config::{KeysFile, Machine, Source, parse_keys};
use crate::mcp::auth::Keys;

/// Looks at the file every so often until `shutdown`. A file that is gone, unreadable or wrong changes nothing but the
/// log, once for each kind of wrong; the keys that were good stay so.
pub async fn watch(file: KeysFile, keys: Arc<Keys>, shutdown: CancellationToken) {
    let mut seen = None;
    loop {
        let text = Machine.keys_file(&file.path).map_err(|error| error.to_string());
        let content = text.as_ref().map(|text| Sha256::digest(text.as_bytes())).map_err(Clone::clone);
        if seen.as_ref() != Some(&content) {
            seen = Some(content);
            match text.and_then(|text| parse_keys(&text)) {
                Ok(read) if read == *keys.current() => {}
                Ok(read) => {
                    tracing::info!(path = %file.path.display(), keys = read.len(), "the bearer keys were read again");
                    keys.replace(read);
                }
                Err(problem) => {
                    let (path, kept) = (file.path.display(), keys.current().len());
                    tracing::error!(%path, problem, kept, "the bearer keys could not be read again: the old ones stay");
                }
            }
        }
        let (stop, tick) = (pin!(shutdown.cancelled()), pin!(tokio::time::sleep(file.every)));
        if let Either::Left(_) = select(stop, tick).await {
            return;
        }
    }
}
