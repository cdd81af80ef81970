#!/usr/bin/env bash
# What a GPU settles, in three calls of at most five minutes; `benchmarks/first_hour.py` says what each of them does.
#
#   benchmarks/on_gpu.sh 1        facts, smoke, tests/gpu
#   benchmarks/on_gpu.sh 2        bench, profile
#   benchmarks/on_gpu.sh 3        low precision, tune, tests/kernels, compute-sanitizer
#
# Runs from a plain copy of the tree: needs torch and Triton; pytest, pytest-xdist, pytest-timeout and hypothesis for the
# tests; liger-kernel and quack-kernels as peers, if they are there. What `make warm-cache` packed is unpacked first.
#
# LIMIT: seconds for a call. OUT: where results go, benchmarks/results/first_hour by default. PYTHON: python3 by default.
# BENCH_COMMIT: the commit, where there is no git.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for call in "${@:-1 2 3}"; do
  # shellcheck disable=SC2086
  "$PYTHON" benchmarks/first_hour.py $call ${LIMIT:+--limit "$LIMIT"}
done
