//! Any bytes as the life of an index.
#![no_main]

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    kvsync_fuzz::life(script);
});
