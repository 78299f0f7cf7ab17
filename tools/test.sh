#!/usr/bin/env bash
# Sets up, builds, and runs every test: C++ (ctest), Python (pytest), and the installed package as its users meet it.
# The last line counts all of them. Exit code 1: something failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh --tests || exit 1
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
results=$PWD/build/results
rm -rf "$results" && mkdir -p "$results"

# run NAME COMMAND...: the exit code counts beside the results, for a runner that died early has counted nothing.
broken=0
run() {
  "${@:2}" || { broken=1; echo "FAILED: $1"; }
}
run ctest ctest --test-dir build/native --output-on-failure --no-tests=error --output-junit "$results/ctest.xml" -j "$(nproc)"
run install pytest -q tests/tools tests/install --junitxml "$results/install.xml"
run engines pytest -q tests/engines --junitxml "$results/engines.xml"
run python pytest -q tests/python --junitxml "$results/python.xml"
if python -c '
import flash_qla, sys, torch
sys.exit(not (torch.cuda.is_available() and "cuda" in flash_qla.build_info()["chunk_forward"]))'; then
  run cuda pytest -q tests/python --device cuda --junitxml "$results/cuda.xml"
fi
python tools/sum_tests.py "$results"/*.xml || broken=1
exit $broken
