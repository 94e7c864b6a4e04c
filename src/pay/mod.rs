//! The story of one paid call, and later the sweep.
