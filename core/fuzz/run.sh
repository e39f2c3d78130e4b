#!/bin/sh
# Fuzz each target for so many seconds: core/fuzz/run.sh [seconds] [target ...]
#
# What `cargo fuzz` would do, with the stable compiler alone: coverage is asked of LLVM, libFuzzer is built by libfuzzer-sys
# (it needs a C++ compiler). The index has no unsafe code of its own but in page.rs, so that overflows and broken assertions
# are what is looked for, and no sanitizer. What is found stands in artifacts/, what was learned in corpus/.
set -eu
cd "$(dirname "$0")"
seconds=${1:-60}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- decode image life
host=$(rustc -vV | sed -n 's/^host: //p')
for coverage in level=4 inline-8bit-counters pc-table trace-compares; do
    flags="${flags:--Cpasses=sancov-module --cfg fuzzing} -Cllvm-args=-sanitizer-coverage-$coverage"
done
export RUSTFLAGS="$flags"
for target in "$@"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    # naming the host keeps the flags from the build scripts
    cargo run --quiet --release --locked --target "$host" --bin "$target" -- -max_total_time="$seconds" -max_len=16384 \
        -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 "-artifact_prefix=artifacts/$target/" \
        "corpus/$target" "seeds/$target"
done
