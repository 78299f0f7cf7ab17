#!/usr/bin/env bash
# Build here, run there: puts everything that the GPU tests need into one folder, to be copied to a machine with an NVIDIA
# GPU by whatever means there is. That machine needs a driver and nothing else (compute-sanitizer for `sanitize`).
#
#   tools/remote_gpu.sh [FOLDER]       builds, and fills FOLDER (build/remote_gpu) with the programs and run.sh
#
# and there, in that folder:
#
#   ./run.sh test         correctness, against the fp64 oracles on the device and on the host
#   ./run.sh bench        times beside their bounds
#   ./run.sh sanitize     the four compute-sanitizer tools on small shapes that reach every kernel (logs in out/)
#   ./run.sh all          the three of them
#
# FLASH_QLA_CMAKE_FLAGS is passed on to CMake (for example -DFLASH_QLA_GENERIC_ARCHITECTURES=90a-real). For racecheck on the
# Hopper kernels build a second folder with -DCMAKE_CUDA_FLAGS=-DFLASH_QLA_RACECHECK, whose program sanitize.sh takes beside the
# plain one: without it the tool reports hand-overs that it cannot see (src/cuda/common/mbarrier.cuh). -DCMAKE_CUDA_FLAGS=-DFLASH_QLA_JITTER makes a build whose Hopper kernels sleep at random where
# warps meet: run.sh test must pass with it as well (hand-overs alone; times mean nothing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/remote_gpu}

# shellcheck disable=SC2086  # several flags in one variable
cmake -S . -B build/remote -DFLASH_QLA_CUDA=ON -DFLASH_QLA_TESTS=ON -DBUILD_SHARED_LIBS=OFF ${FLASH_QLA_CMAKE_FLAGS:-}
programs=(cuda_generic_test cuda_training_test cuda_generic_bench backward_harness forward_harness sm90_forward_bench)
cmake --build build/remote --parallel --target "${programs[@]}"
mkdir -p "$folder"
for program in "${programs[@]}"; do
  strip -o "$folder/$program" "build/remote/tests/cpp/cuda/$program"
done
cp tools/remote_gpu_run.sh "$folder"/run.sh
cp tools/sanitize.sh "$folder"
du -sh "$folder"
