#!/usr/bin/env bash
# Tests, shows and measures one stream of tokens over several GPUs of this machine, by NCCL.
#
#   tools/several_cards.sh [STEP...]        STEP: suite, example, table; without one: all three
#
# The package must be importable (PYTHONPATH=python, or installed). Each command has a time limit; a step that fails does not stop
# the others, and the exit code is 1. Settings, by environment variables:
#
#   CARDS="2 4"      how many GPUs the example and the table take, each in turn; as many of them as there are
#   OUT=FOLDER       where the table (MACHINE_several_cards.json, .csv, .png) and the suite's record go: build/several_cards
#   TABLE_SECONDS    no row of the table begins later than this, for each number of cards: 280
#   HEADS, SEQS      rows of the table, as `bench` takes them: all
#   PEERS            "fla=FOLDER flashqla=FOLDER": packages measured beside, from folders that hold them; those that compile their
#                    kernels take minutes at first
#   PYTHON, GPUS     the interpreter: python3; how many GPUs there are: as many as it finds
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-build/several_cards}
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0  # no multicast: some virtual machines refuse it when a group is made
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
gpus=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')} || exit 1
if [ "$gpus" -lt 2 ]; then
  echo "several_cards.sh: needs 2 GPUs (found $gpus)"
  exit 2
fi
cards=""
for n in ${CARDS:-2 4 8}; do
  [ "$n" -le "$gpus" ] && cards="$cards $n"
done
failed=0

# step SECONDS COMMAND...: a command with a time limit; what it took stands below it.
step() {
  local begin=$SECONDS code=0
  echo "--- ${*:2}"
  timeout --kill-after=10 "$1" "${@:2}" || code=$?
  echo "--- exit code $code after $((SECONDS - begin)) s"
  [ "$code" -eq 0 ] || failed=1
}

ranks() {  # COUNT SECONDS ARGUMENTS...: torchrun on the first GPUs
  step "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" "${@:3}"
}

suite() {
  step 420 "$python" -m pytest -q tests/python/test_cards_gpus.py tests/python/test_cards_processes.py tests/python/test_11_devices.py \
    --device cuda --junitxml "$out/suite.xml"
}

example() {
  for n in $cards; do
    for layout in contiguous zigzag; do
      for mode in prefill train; do
        ranks "$n" 120 examples/python/long_context.py --tokens 65536 --mode "$mode" --layout "$layout" --head-dim 128 \
          --dtype bfloat16 --compare
      done
    done
  done
}

table() {
  local results="" modes=cp_fwd,cp_train
  for peer in ${PEERS:-}; do
    for n in $cards; do
      PYTHONPATH=${peer#*=} ranks "$n" 420 python/flash_qla/cli/bench_cards_peers.py "${peer%%=*}" "$modes" "${HEADS:-}" "${SEQS:-}" "" 15 \
        "$out/peers"
    done
    results=$out/peers
  done
  for n in 1 $cards; do
    ranks "$n" $((${TABLE_SECONDS:-280} + 120)) -m flash_qla bench --mode "$modes" --heads "${HEADS:-}" --seqs "${SEQS:-}" \
      --seconds "${TABLE_SECONDS:-280}" --peer-results "$results" --merge --out "$out/{machine}_several_cards.json"
  done
}

for name in "${@:-suite}"; do
  case $name in
    suite | example | table) ;;
    *) echo "several_cards.sh: STEP ($name) must be suite, example or table"; exit 2 ;;
  esac
done
[ $# -gt 0 ] || set -- suite example table
for name in "$@"; do
  "$name"
done
exit $failed
