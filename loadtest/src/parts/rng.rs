//! A seeded generator (SplitMix64), so that a run can be played again: the same choices, if not the same moments.

use std::sync::Mutex;

pub struct Rng(Mutex<u64>);

impl Rng {
    /// Another stream of the same seed for each `name`.
    pub fn new(seed: u64, name: &str) -> Rng {
        let mixed = name
            .bytes()
            .fold(seed ^ 0x9e37_79b9_7f4a_7c15, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Rng(Mutex::new(mixed))
    }

    pub fn next(&self) -> u64 {
        let mut state = self.0.lock().expect("nobody panics with it");
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// From `low` up to and with `high`.
    pub fn between(&self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
}
