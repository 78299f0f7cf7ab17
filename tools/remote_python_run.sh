#!/usr/bin/env bash
# Runs on the machine with the GPU, in the folder that tools/remote_python.sh has filled. Logs and results go to out/; the
# last line says how many steps failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p out package
out=$PWD/out
rm -f "$out/failed"
[[ -d package/repository ]] || tar -xJf package.tar.xz -C package
package=$PWD/package
cd package/repository
export PYTHONPATH=$package/site:$package/repository/python
cores=$(nproc)  # before the limits below, which nproc obeys
# Workers share the cores; the tests' numpy oracle would start a thread for each core in every one of them.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# What ran is recorded with the commit that each log names (tools/record_reliability.py).
commit=$(python3 -c 'import flash_qla; print(flash_qla.build_info()["commit"])')

# step SECONDS LOG COMMAND...: ends a command that hangs (with an interrupt first, so that it can still report).
step() {
  local begin=$SECONDS code=0
  printf '== %s\ncommit: %s\n' "${*:3}" "$commit" >"$out/$2"
  timeout --signal INT --kill-after 5 "$1" "${@:3}" >>"$out/$2" 2>&1 || code=$?
  echo "-- $((SECONDS - begin)) s" >>"$out/$2"
  if ((code != 0)); then
    echo "${*:3}" >>"$out/failed"
    echo "FAILED (exit code $code): ${*:3}"
  fi
  echo "$2: $(tail -n 2 "$out/$2" | tr '\n' ' ')"
}

# run_tests SECONDS WORKERS OPTIONS...
run_tests() {
  # One test at a time to each worker, the long ones first (tests/python/conftest.py).
  step "$1" pytest.txt python3 -m pytest tests/python --device cuda --verbose -n "$2" --dist load --maxschedchunk 1 --maxfail 60 --timeout 100 --tb short \
    -p no:cacheprovider -p no:benchmark --junitxml "$out/pytest.xml" "${@:3}"
  grep -E '^(FAILED|ERROR|E   )|passed|failed' "$out/pytest.txt" | cut -c 1-250
}
run_check() {
  local set
  for set in develop varlen product; do step 120 "check_$set.txt" python3 -m flash_qla check --device cuda --set "$set"; done
}
run_sanitizers() {
  step 110 sanitizers.txt bash tools/sanitize.sh "$package/bin/cuda_generic_test" "$out" 100
  cat "$out/sanitizers.txt"
}
run_suite() {
  step "${SUITE_SECONDS:-112}" train_tiny.txt python3 examples/python/train_tiny.py --device cuda --steps 120 --plot "$out/train_tiny.png" &
  run_tests "${SUITE_SECONDS:-112}" "$((cores > 5 ? cores - 2 : 1))" --runslow -k 'not compute_sanitizer'
  wait
}
run_bench() {
  # fla's decode compiles in seconds (18 were too few with the first import of PyTorch). Its other kernels, and those of the
  # other packages, take from half a minute to minutes for each head count: their times are set beside ours as recorded.
  step 70 bench_decode.txt python3 -m flash_qla bench --mode decode --peers "fla=$package/peers/fla" --peer-seconds 28 --seconds 60 --out "$out/{machine}_{mode}.json"
  local seconds=${BENCH_SECONDS:-340} recorded=()
  [[ $(nvidia-smi --query-gpu=name --format=csv,noheader) == *H200* ]] && recorded=(--recorded benchmarks/recorded/h200_peers.csv)
  step "$((seconds + 20))" bench.txt python3 -m flash_qla bench --mode fwd,bwd,train "${recorded[@]}" --seconds "$seconds" --out "$out/{machine}_{mode}.json"
  grep -hE '^(FAIL|decode:|fwd:|bwd:|train:)' "$out"/bench*.txt | cut -c 1-250
}

case "${1:-all}" in
  test) run_tests 300 "$cores" ;;
  check) run_check ;;
  suite) run_suite ;;
  sanitize) run_sanitizers ;;
  bench) run_bench ;;
  all) run_suite; run_sanitizers; run_check; run_bench ;;
  *) echo "usage: run.sh [test|check|suite|sanitize|bench|all]" >&2; exit 2 ;;
esac
if [[ -e $out/failed ]]; then
  echo "$(wc -l <"$out/failed") steps failed"
  exit 1
fi
echo "0 steps failed"
