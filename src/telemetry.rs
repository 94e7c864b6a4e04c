//! Tracing. Logs go to standard error, never to standard output (on stdio that is the protocol), without colours.
//! Field names that carry an identity stand here, so that one place says what may be logged: payment identifiers in
//! their short form, stable reason words, origins; never secrets, signatures, payloads or arguments.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

/// `TOLLWAY_LOG` is a filter (`info`, `tollway=debug`), `TOLLWAY_LOG_FORMAT=json` gives one JSON object a line.
/// Libraries that print what passes through them (HTTP bodies, SQL values) are never let below `info`.
pub fn init() {
    let wanted = std::env::var("TOLLWAY_LOG").unwrap_or_else(|_| "warn,tollway=info".into());
    let mut filter = EnvFilter::try_new(&wanted).unwrap_or_else(|error| {
        eprintln!("tollway: TOLLWAY_LOG={wanted:?} is not a filter ({error}); using warn,tollway=info");
        EnvFilter::new("warn,tollway=info")
    });
    for quiet in ["hyper=info", "hyper_util=info", "h2=info", "sqlx=warn", "rustls=info"] {
        if let Ok(directive) = quiet.parse() {
            filter = filter.add_directive(directive);
        }
    }
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    let installed = match std::env::var("TOLLWAY_LOG_FORMAT").as_deref() {
        Ok("json") => builder.json().finish().try_init(),
        _ => builder.finish().try_init(),
    };
    // A second call (tests in one process) keeps the first subscriber.
    let _ = installed;
}
