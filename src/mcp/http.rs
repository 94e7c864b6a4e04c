//! Streamable HTTP: `POST GET DELETE /mcp`.

use std::sync::Arc;

use super::{Authenticator, Handler, Settings};

/// The front of `handler` over HTTP, at `/mcp`.
pub fn router(settings: Settings, handler: Arc<dyn Handler>, authenticator: Authenticator) -> axum::Router {
    let _ = (settings, handler, authenticator);
    axum::Router::new()
}
