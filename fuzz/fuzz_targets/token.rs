#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tollway::fuzzing::token::run(data));
