#!/usr/bin/env bash
# Runs on the machine with the GPU, in the folder that tools/remote_python.sh has filled. Logs and results go to out/; the
# last line says how many steps failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p out package
out=$PWD/out failed=0
[[ -d package/repository ]] || tar -xJf package.tar.xz -C package
package=$PWD/package
cd package/repository
export PYTHONPATH=$package/site:$package/repository/python
# Workers share the cores; the tests' numpy oracle would start a thread for each core in every one of them.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# step SECONDS LOG COMMAND...: ends a command that hangs (with an interrupt first, so that it can still report).
step() {
  local begin=$SECONDS
  echo "== ${*:3}"
  timeout --signal INT --kill-after 10 "$1" "${@:3}" >"$out/$2" 2>&1 || { failed=$((failed + 1)); echo "FAILED (exit code $?): ${*:3}"; }
  tail -n "${tail_lines:-3}" "$out/$2"
  echo "-- $((SECONDS - begin)) s"
}

run_tests() {
  tail_lines=40 step "${seconds:-300}" "pytest$1.txt" python3 -m pytest tests/python --device cuda --verbose -n "${workers:-$(($(nproc) - 1))}" \
    --dist worksteal --maxfail 60 --timeout 120 --tb short -p no:cacheprovider -p no:benchmark --junitxml "$out/pytest$1.xml" "${@:2}"
}
run_check() {
  local set
  for set in develop varlen product; do step 120 "check_$set.txt" python3 -m flash_qla check --device cuda --set "$set"; done
}
# Without --short all rows are measured, ours alone: other packages' times are then those recorded earlier.
run_bench() {
  local recorded=benchmarks/recorded/h200_peers.csv peers=fla=$package/peers/fla
  # Decode: FLA compiles for seconds only. The others autotune for a minute at every head count: ours comes first, theirs as
  # far as the time goes.
  step 60 bench_decode.txt python3 -m flash_qla bench --mode decode --peers "$peers" --peer-seconds 40 --runs 15 --out "$out/h200_decode.json"
  step 150 bench_forward.txt python3 -m flash_qla bench --mode fwd "$@" --recorded "$recorded" --runs 9 --out "$out/h200_forward.json"
  step 150 bench_backward.txt python3 -m flash_qla bench --mode bwd "$@" --recorded "$recorded" --runs 9 --out "$out/h200_backward.json"
  step 90 bench_train.txt python3 -m flash_qla bench --mode train "$@" --runs 9 --out "$out/h200_train.json"
}

case "${1:-all}" in
  test) run_tests "" ;;
  slow) run_tests _slow --runslow -k 'not compute_sanitizer' ;;
  check) run_check ;;
  bench) run_bench --short ;;
  bench-full) run_bench ;;
  all) run_tests ""; run_check; run_bench --short ;;
  *) echo "usage: run.sh [test|slow|check|bench|bench-full|all]" >&2; exit 2 ;;
esac
echo "$failed failed"
((failed == 0))
