#!/usr/bin/env bash
# What only a GPU can tell, in one run of a few minutes: the kernel tests on the compiled kernels, graph replays
# included, blocks that move in a stream of their own and, with the package's other dependencies, the sizing of pools.
#
#   bench/on_gpu.sh [folder for the results]          needs python3 with torch, triton, numpy, pytest; pytest-xdist helps
#
# COUNT is the number of random feature combinations; each compiles kernels of its own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${1:-${OUT:-bench/results}}
mkdir -p "$results"

# the repository is the package: make it importable under its name without installing anything
importable=$(mktemp -d)
trap 'rm -rf "$importable"' EXIT
ln -s "$PWD" "$importable/octavo"
export PYTHONPATH="$importable${PYTHONPATH:+:$PYTHONPATH}"

python3 - <<'PY' | tee "$results/machine.txt"
import torch, triton
assert torch.cuda.is_available(), "no GPU is visible to torch"
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
PY
[ "${PIPESTATUS[0]}" -eq 0 ] || exit 1

workers=$(python3 -c 'import os, xdist; print("-n", min(12, os.cpu_count()))' 2>/dev/null || true)
pools=$(python3 -c 'import msgspec, rich, transformers, typer; print("tests/runtime tests/models/test_pools.py")' \
    2>/dev/null || echo tests/runtime/test_block_mover.py)
# shellcheck disable=SC2086  # several words
timeout 420 python3 -m pytest -c pyproject.toml --rootdir . -q -m gpu $workers --count "${COUNT:-60}" \
    --junitxml "$results/gpu_tests.xml" tests/kernels $pools 2>&1 | tail -n 60 | tee "$results/gpu_tests.txt"
exit "${PIPESTATUS[0]}"
