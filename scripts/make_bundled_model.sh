#!/usr/bin/env bash
# Makes tests/golden/tiny.gguf and tiny-mmproj.gguf (the bundled model and its encoder) from tests/golden/tiny-hf with `strata convert`.
# The types are mixed so that every kernel is used. Afterwards make the goldens again: scripts/make_greedy_goldens.py.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo run --release -- convert tests/golden/tiny-hf -o tests/golden/tiny.gguf --name "Strata Tiny" --force \
  --mmproj tests/golden/tiny-mmproj.gguf --mmproj-type F16 --type Q8_0 \
  --tensor-type '^output.weight=Q6_K' \
  --tensor-type 'blk.0.ffn_gate_exps=Q4_K' --tensor-type 'blk.0.ffn_up_exps=Q4_K' --tensor-type 'blk.0.ffn_down_exps=Q5_K' \
  --tensor-type 'blk.1.ffn_gate_exps=Q4_K' --tensor-type 'blk.1.ffn_up_exps=Q4_K' --tensor-type 'blk.1.ffn_down_exps=Q5_K' \
  --tensor-type 'blk.2.ffn_gate_exps=Q4_K' --tensor-type 'blk.2.ffn_up_exps=Q4_K' --tensor-type 'blk.2.ffn_down_exps=Q6_K' \
  --tensor-type 'blk.3.ffn_gate_exps=Q4_K' --tensor-type 'blk.3.ffn_up_exps=Q4_K' --tensor-type 'blk.3.ffn_down_exps=Q6_K' \
  --tensor-type 'attn_output=F16' --tensor-type 'ssm_out=BF16' --tensor-type 'ssm_alpha=F32' --tensor-type 'ssm_beta=F32' "$@"
