//! One binary, a module per promise.

mod architecture;
