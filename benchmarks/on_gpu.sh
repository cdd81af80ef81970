#!/usr/bin/env bash
# Tests, benchmarks and tuning on a GPU, in this order, within limits. Runs from a plain copy of the tree: needs torch and
# Triton; pytest and hypothesis for the tests; liger-kernel and quack-kernels as peers, if they are there.
#
#   benchmarks/on_gpu.sh [test] [bench] [tune]     (all three without arguments)
#
# LIMIT: seconds for each stage, 560 by default. OUT: where results go, benchmarks/results by default. PYTHON: python3 by
# default. BENCH_COMMIT: the commit, where there is no git. BENCH: further arguments of bench_gpu.py, such as --resume.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-560}
OUT=${OUT:-benchmarks/results}
mkdir -p "$OUT"
export OUT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

about() {
  "$PYTHON" - <<'PY'
import sys, torch
from importlib.metadata import version, PackageNotFoundError
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
print("python", sys.version.split()[0], *(f"{n} {of(n)}" for n in (
    "torch", "triton", "numpy", "pytest", "hypothesis", "pytest-xdist", "platformdirs", "liger-kernel", "quack-kernels")))
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
import seqfuse
print(seqfuse.__file__)
PY
}

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

tests() {
  if ! has pytest || ! has hypothesis; then
    echo "pytest or hypothesis is not here: every row of the benchmark is checked instead"
    timeout "$LIMIT" "$PYTHON" benchmarks/bench_gpu.py --check --budget $((LIMIT - 20)) 2>&1 | tee "$OUT/tests.log"
    return
  fi
  # What other packages deprecate on other versions of Python is not what is tested here.
  local common=(-q --tb=short -rfE -p no:cacheprovider -W default::DeprecationWarning -W default::PendingDeprecationWarning
    -W default::FutureWarning -W default::SyntaxWarning -W default::ResourceWarning)
  has pytest_timeout && common+=(--timeout 240)
  local several=()
  has xdist && several=(-n 6 --dist worksteal)
  local began=$SECONDS status=0
  # Real sizes first, and few at a time: float64 beside them takes memory.
  timeout -s INT -k 20 $((LIMIT * 6 / 10)) "$PYTHON" -m pytest "${common[@]}" "${several[@]:+-n4}" --junitxml "$OUT/tests_gpu.xml" \
    tests/gpu 2>&1 | tee "$OUT/tests_gpu.log" || status=1
  # What is compiled for machines that are not here is checked where there is no GPU.
  timeout -s INT -k 20 $((LIMIT - SECONDS + began)) "$PYTHON" -m pytest "${common[@]}" "${several[@]}" --junitxml "$OUT/tests_kernels.xml" \
    -k 'not compiles and not without_spills' --ignore tests/kernels/test_compiled.py tests/kernels tests/fusions/triton \
    2>&1 | tee "$OUT/tests_kernels.log" || status=1
  return $status
}

bench() {
  # shellcheck disable=SC2086
  timeout $((LIMIT + 10)) "$PYTHON" benchmarks/bench_gpu.py --budget $((LIMIT - 40)) ${BENCH:-} 2>&1 | tee "$OUT/bench.log"
}

tune() {
  timeout "$LIMIT" "$PYTHON" benchmarks/tune_gpu.py --budget $((LIMIT < 180 ? LIMIT - 30 : 150)) 2>&1 | tee "$OUT/tune.log"
}

about
for stage in "${@:-test bench tune}"; do
  for one in $stage; do
    case $one in
      test) tests || failed=1 ;;
      bench) bench || failed=1 ;;
      tune) tune || failed=1 ;;
      *) echo "no stage $one: test, bench, tune" >&2; exit 2 ;;
    esac
  done
done
exit $failed
