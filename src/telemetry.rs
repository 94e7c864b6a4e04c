//! Tracing: every field and metric name stands here.
