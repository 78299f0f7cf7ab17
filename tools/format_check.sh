#!/usr/bin/env bash
# Fails on every C, C++ and CUDA file that clang-format would write differently. With --fix it writes them instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=(--dry-run -Werror)
if [[ "${1:-}" == --fix ]]; then
  mode=(-i)
fi
git ls-files -z '*.h' '*.hpp' '*.c' '*.cpp' '*.inc' '*.cu' '*.cuh' | xargs -0 clang-format "${mode[@]}"
