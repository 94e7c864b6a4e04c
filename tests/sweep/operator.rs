//! `tollway reservations`, as an operator types it.
