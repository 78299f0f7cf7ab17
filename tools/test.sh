#!/usr/bin/env bash
# Sets up, builds, and runs every test: C++ (ctest), Python (pytest), and the installed package as its users meet it.
# The last line counts all of them. Exit code 1: something failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh --tests || exit 1
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
results=$PWD/build/results
rm -rf "$results" && mkdir -p "$results"

ctest --test-dir build/native --output-on-failure --no-tests=error --output-junit "$results/ctest.xml" -j "$(nproc)"
ran_ctest=$?
pytest -q tests/tools tests/install --junitxml "$results/install.xml"
ran_install=$?
pytest -q tests/python --junitxml "$results/python.xml"
ran_python=$?
python tools/sum_tests.py "$results"/*.xml
ran_sum=$?
# The codes too, not the counts alone: a runner that died early has counted nothing.
((ran_ctest == 0 && ran_install == 0 && ran_python == 0 && ran_sum == 0))
