#!/usr/bin/env bash
# Runs a fuzz target without cargo-fuzz and without a nightly compiler: coverage counters by LLVM's own pass.
# usage: fuzz/run.sh gguf|safetensors SECONDS
set -euo pipefail
cd "$(dirname "$0")"
target=$1 seconds=$2
export RUSTFLAGS="--cfg fuzzing -Cdebug-assertions -Coverflow-checks -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --release --target "$host" --bin "$target"
mkdir -p "corpus/$target" "artifacts/$target"
"target/$host/release/$target" "corpus/$target" "seeds/$target" -artifact_prefix="artifacts/$target/" \
    -max_total_time="$seconds" -max_len=8192 -rss_limit_mb=2048 -timeout=10 -print_final_stats=1
