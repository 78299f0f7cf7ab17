#!/usr/bin/env bash
# Runs on the machine with the GPU, beside the programs that tools/remote_gpu.sh has put into this folder.
# Prints what each program prints; the last line says how many of them failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
chmod +x cuda_* sm90_* *_harness
failed=0

# step SECONDS COMMAND...: a program that hangs is ended and counts as failed.
step() {
  echo "== ${*:2}"
  local begin=$SECONDS
  timeout "$1" "${@:2}" || { failed=$((failed + 1)); echo "FAILED (exit code $?): ${*:2}"; }
  echo "-- $((SECONDS - begin)) s"
}

run_tests() {
  step 420 ./cuda_generic_test
  step 60 ./cuda_training_test
  step 60 ./backward_harness check
  step 60 ./forward_harness check
}
run_benchmarks() {
  step 120 ./cuda_generic_bench
  step 60 ./backward_harness time
  step 60 ./forward_harness time
  step 60 ./sm90_forward_bench cold
  step 60 ./sm90_forward_bench modes
}
run_sanitizer() {
  mkdir -p out
  step 250 bash sanitize.sh ./cuda_generic_test out 240
}

case "${1:-all}" in
  test) run_tests ;;
  bench) run_benchmarks ;;
  sanitize) run_sanitizer ;;
  all) run_tests; run_benchmarks; run_sanitizer ;;
  *) echo "usage: run.sh [test|bench|sanitize|all]" >&2; exit 2 ;;
esac
echo "$failed failed"
((failed == 0))
