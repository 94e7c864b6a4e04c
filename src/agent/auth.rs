//! The authenticator of the agents' server, from its configuration.

mod key_file;
mod token_review;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::config::Auth;
use crate::http::Client;
use crate::mcp::Authenticator;
use crate::mcp::auth::{Jwt, Keys, Method};
use crate::ports::World;
pub use token_review::TokenReviews;

/// Keys first, which cost nothing to look at; then tokens of the configured issuer; then those that only the API server
/// can tell. `client` is for destinations that the operator wrote.
pub fn authenticator(
    auth: &Auth,
    reviews: Option<Arc<TokenReviews>>,
    client: &Client,
    world: &World,
    shutdown: &CancellationToken,
) -> Authenticator {
    let mut methods: Vec<Arc<dyn Method>> = Vec::new();
    if let Some(keys) = &auth.keys {
        let keys = Arc::new(Keys::new(keys.clone()));
        if let Some(file) = &auth.keys_file {
            let watching = key_file::watch(file.clone(), keys.clone(), shutdown.clone());
            world.spawn.spawn(Box::pin(watching));
        }
        methods.push(keys);
    }
    if let Some(jwt) = &auth.jwt {
        let jwt = Jwt::new(jwt.clone(), client.clone(), world.clone());
        jwt.prepare();
        methods.push(Arc::new(jwt));
    }
    if let Some(reviews) = reviews {
        methods.push(reviews);
    }
    if methods.is_empty() { Authenticator::Public } else { Authenticator::Methods(methods) }
}
