#!/usr/bin/env bash
# Runs the test files of FlashQLA or of FLA on this library, for who has their sources.
#
#   tools/peer_tests.sh flashqla|fla FOLDER [options] [pytest options]
#
#   --package FOLDER   where fla is imported from (an unpacked release); without, from the checkout
#   --binding NAME     of the four runs of fla, functions, backend, layers and cards, this one alone
#   --device cpu       on CPU tensors, where the files let that be chosen: for a look without a GPU
#   --slow             FlashQLA's repetitions of 1000 as well
#
# FOLDER is a checkout of QwenLM/FlashQLA or fla-org/flash-linear-attention. What is replaced in which run, and how it is counted
# that nothing else computes, stands in tools/peer_tests/peer_plugin.py. Needs flash_qla, torch, pytest; for fla also triton, einops
# and transformers. No network. The record goes to out/peer_tests_<suite>.json; the runs of another --binding stay in it.
# Exit code 1: a test failed, or this library was not called.
set -uo pipefail
suite=${1:-} folder=${2:-}
if [[ $suite != flashqla && $suite != fla ]] || [[ ! -d $folder/tests ]]; then
  echo "usage: tools/peer_tests.sh flashqla|fla FOLDER [--package FOLDER] [--binding NAME] [--device cpu] [--slow] [pytest options]" >&2
  exit 2
fi
shift 2
folder=$(cd "$folder" && pwd)
package=$folder device=cuda only= slow=(-m "not slow")
while (($#)); do
  case $1 in
    --package) package=$(cd "$2" && pwd) && shift 2 ;;
    --binding) only=$2 && shift 2 ;;
    --device) device=$2 && shift 2 ;;
    --slow) slow=() && shift ;;
    *) break ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commit=$(git -C "$folder" rev-parse HEAD 2>/dev/null || cat "$folder/PEER_COMMIT" 2>/dev/null || echo unknown)
if [[ $(git -C "$folder" rev-parse --show-toplevel 2>/dev/null) != "$folder" ]]; then # a folder inside another checkout
  commit=$(cat "$folder/PEER_COMMIT" 2>/dev/null || echo unknown)
fi
out=$PWD/out/peer_tests_$suite.json
[[ -n $only ]] || rm -f "$out"
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD/tools/peer_tests:${PYTHONPATH:-}"
code=0

# run BINDING TESTS.. [pytest options]: the peers' own settings for pytest would put their packages first.
run() {
  local binding=$1
  shift
  [[ -z $only || $only == "$binding" ]] || return 0
  echo "== $suite, bound as $binding"
  python -m pytest -p peer_plugin -p no:cacheprovider -o pythonpath= -o log_cli=false -o addopts= -o filterwarnings= -q --tb=short -rfE \
    --rootdir "$folder" --peer-binding "$binding" --peer-commit "$commit" --peer-out "$out" --peer-device "$device" "$@" || code=1
}

if [[ $suite == flashqla ]]; then
  run low_level "$folder/tests/test_gdr_unit.py" "$folder/tests/test_sm120_backward_disabled.py" ${slow[@]+"${slow[@]}"} "$@"
else
  export PYTHONPATH="$PYTHONPATH:$package"
  FLA_DISABLE_BACKEND_DISPATCH=1 run functions "$folder/tests/ops/test_gdn.py" \
    -k "not flash_qla and not prepare_wy and not blackwell and not test_gate" "$@"
  run backend "$folder/tests/ops/test_gdn.py" -k flash_qla "$@"
  run layers "$folder/tests/layers/test_gated_deltanet.py" "$folder/tests/models/test_modeling_gated_deltanet.py" "$@"
  run cards "$folder/tests/context_parallel/test_cp_gdn.py" "$@"
fi
echo "the record: $out"
exit $code
