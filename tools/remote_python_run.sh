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

# What ran is recorded with the commit and the GPU that each log names (tools/record_reliability.py).
commit=$(python3 -c 'import flash_qla; print(flash_qla.build_info()["commit"])')
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)

# step SECONDS LOG COMMAND...: ends a command that hangs (with an interrupt first, so that it can still report).
step() {
  local begin=$SECONDS code=0
  printf '== %s\ncommit: %s\ngpu_0: %s\n' "${*:3}" "$commit" "$gpu" >"$out/$2"
  # A session of its own: what a command that is killed leaves behind, workers of pytest for one, would disturb the steps after it.
  setsid timeout --signal INT --kill-after 5 "$1" "${@:3}" >>"$out/$2" 2>&1 &
  local session=$!
  wait "$session" || code=$?
  pkill -KILL -s "$session" || true
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
  step "$1" pytest.txt python3 -m pytest tests/python --device cuda --verbose -n "$2" --dist load --maxschedchunk 1 --maxfail 60 --timeout 240 --tb short \
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
  step "${SUITE_SECONDS:-300}" train_tiny.txt python3 examples/python/train_tiny.py --device cuda --steps 120 --plot "$out/train_tiny.png" &
  run_tests "${SUITE_SECONDS:-300}" "$((cores > 5 ? cores - 2 : 1))" --runslow -k 'not compute_sanitizer' --table "$out/gradients.json"
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
# Tables of the other modes. What other packages compile, seconds for each shape, is in their time.
run_tables() {
  local engines=() name
  for name in vllm sglang; do [[ -d $package/peers/$name ]] && engines+=("$name=$package/peers/$name"); done
  # The rows of a model take up to a minute, and one that has begun is not cut.
  PYTHONPATH=$PYTHONPATH:$package/peers/fla step 230 bench_layer.txt python3 -m flash_qla bench --mode layer --peers fla --seconds 150 \
    --out "$out/{machine}_layer.json"
  step 240 bench_portable.txt python3 -m flash_qla bench --mode portable_forward,portable_backward --peers "fla=$package/peers/fla:$package/peers/fla_tilelang" \
    --peer-seconds 110 --seconds 200 --out "$out/{machine}_{mode}.json"
  step 200 bench_serving.txt python3 -m flash_qla bench --mode serving --peers "$(IFS=,; echo "${engines[*]}")" --peer-seconds 90 --seconds 170 \
    --out "$out/{machine}_serving.json"
  grep -hE '^FAIL' "$out"/bench_{layer,portable,serving}.txt | cut -c 1-250
}
run_cards() {
  step 420 cards_suite.txt env OUT="$out/cards" tools/several_cards.sh suite
  step 420 cards_table.txt env OUT="$out/cards" tools/several_cards.sh table
  step 420 cards_example.txt env OUT="$out/cards" tools/several_cards.sh example
}
# An environment of its own has the wheel and the oldest tvm-ffi, and of this machine's packages what these do not bring.
run_wheel() {
  local environment=$package/environment site
  python3 -m venv --without-pip "$environment" || return
  site=$(echo "$environment"/lib/python*/site-packages)
  for wheel in "$package"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
  python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' >"$site/machine.pth"
  step 100 wheel.txt env PYTHONPATH= "$environment/bin/python" tools/wheel_program.py --torch --device cuda
}

case "${1:-all}" in
  test) run_tests 300 "$cores" ;;
  check) run_check ;;
  suite) run_suite ;;
  sanitize) run_sanitizers ;;
  bench) run_bench ;;
  tables) run_tables ;;
  cards) run_cards ;;
  wheel) run_wheel ;;
  all)
    run_suite; run_sanitizers; run_check; run_bench; run_tables
    if [[ -d $package/wheels ]]; then run_wheel; fi
    ;;
  *) echo "usage: run.sh [test|check|suite|sanitize|bench|tables|cards|wheel|all]" >&2; exit 2 ;;
esac
if [[ -e $out/failed ]]; then
  echo "$(wc -l <"$out/failed") steps failed"
  exit 1
fi
echo "0 steps failed"
