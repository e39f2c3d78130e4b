//! Any bytes as what another index told of a worker.
#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    kvsync_fuzz::image(body);
});
