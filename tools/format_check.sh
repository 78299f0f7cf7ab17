#!/usr/bin/env bash
# Fails on every C, C++ and CUDA file that clang-format would write differently.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git ls-files -z '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs -0 clang-format --dry-run -Werror
