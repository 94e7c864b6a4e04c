//! The log. Lines go to standard error, never to standard output (on stdio that is the protocol), without colours.
//! What may be logged: payment identifiers in their short form, stable reason words, origins; never secrets, signatures,
//! payloads or arguments.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{EnvFilter, FilterExt as _, ParseError, Targets};
use tracing_subscriber::layer::{Filter, Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// Without `TOLLWAY_LOG`.
const DEFAULT: &str = "warn,tollway=info";

/// `TOLLWAY_LOG` is a filter (`info`, `tollway=debug`), `TOLLWAY_LOG_FORMAT=json` gives one JSON object a line.
pub fn init() {
    let wanted = std::env::var("TOLLWAY_LOG").unwrap_or_else(|_| DEFAULT.into());
    let (filter, refused) = match filter(&wanted) {
        Ok(filter) => (Ok(filter), None),
        Err(error) => (filter(DEFAULT), Some(error)),
    };
    if let Some(error) = refused {
        eprintln!("tollway: TOLLWAY_LOG={wanted:?} is not a filter ({error}); using {DEFAULT}");
    }
    let Ok(filter) = filter else { return };
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let layer = match std::env::var("TOLLWAY_LOG_FORMAT").as_deref() {
        Ok("json") => layer.json().with_filter(filter).boxed(),
        _ => layer.with_filter(filter).boxed(),
    };
    // A second call (tests in one process) keeps the first subscriber.
    let _ = tracing_subscriber::registry().with(layer).try_init();
}

/// What passes of `directives`. Libraries see headers, bodies and SQL values go by, so none of them is ever let below
/// `info`, however precisely its target is named: only Tollway's own events are known not to show a secret.
pub fn filter<S: tracing::Subscriber>(directives: &str) -> Result<impl Filter<S> + Send + Sync + use<S>, ParseError> {
    let wanted = EnvFilter::try_new(directives)?;
    let libraries = Targets::new().with_default(LevelFilter::INFO).with_target("tollway", LevelFilter::TRACE);
    Ok(wanted.and(libraries))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::Context;

    use super::*;

    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<String>>>);
    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Seen {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            self.0.lock().unwrap().push(format!("{} {}", event.metadata().target(), event.metadata().level()));
        }
    }

    #[test]
    fn no_directive_lets_a_library_below_info() {
        for directives in ["trace", "hyper=trace,hyper::proto=trace", "sqlx::query=debug,trace", "[request]=trace"] {
            let seen = Seen::default();
            let layer = seen.clone().with_filter(filter(directives).unwrap());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
                tracing::trace!(target: "hyper::proto", "a header");
                tracing::debug!(target: "sqlx::query", "a value");
                tracing::debug!(target: "not_ours", "anything");
                let _span = tracing::trace_span!(target: "hyper", "request").entered();
            });
            assert_eq!(*seen.0.lock().unwrap(), [""; 0], "{directives}");
        }
    }

    #[test]
    fn own_events_and_a_librarys_warnings_pass_as_asked() {
        let seen = Seen::default();
        let layer = seen.clone().with_filter(filter("trace").unwrap());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::trace!(target: "tollway::pay", "a step");
            tracing::warn!(target: "sqlx", "slow");
        });
        assert_eq!(*seen.0.lock().unwrap(), ["tollway::pay TRACE", "sqlx WARN"]);
        assert!(filter::<tracing_subscriber::Registry>("tollway=loud").is_err());
    }
}
