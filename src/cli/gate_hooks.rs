//! What `gate.hooks` asks for, as the gate takes it.

use std::sync::Arc;
use std::time::Duration;

use super::Failure;
use crate::config::GateConfig;
use crate::gate::hooks::Hooking;
use crate::gate::webhooks::Webhooks;
use crate::http::Client;

/// A webhook says itself that it is late.
const MORE: Duration = Duration::from_millis(500);

pub(super) fn hooking(config: &GateConfig, client: &Client) -> Result<Option<Hooking>, Failure> {
    let Some(written) = &config.hooks else { return Ok(None) };
    let mut hooks = Webhooks::new(client.clone(), &written.url, written.timeout).only(&written.events);
    if let Some(secret) = &written.auth_header {
        let with = hooks.with_authorization(secret.expose());
        hooks = with.ok_or_else(|| {
            Failure::Usage("gate.hooks.auth_header_env: its value cannot stand in an HTTP header".to_owned())
        })?;
    }
    Ok(Some(Hooking {
        hooks: Arc::new(hooks),
        timeout: written.timeout + MORE,
        on_failure: written.on_failure,
        ceilings: written.ceilings.clone(),
    }))
}
