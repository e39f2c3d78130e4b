//! Any bytes as a payload.
#![no_main]

libfuzzer_sys::fuzz_target!(|payload: &[u8]| {
    kvsync_fuzz::decode(payload);
});
