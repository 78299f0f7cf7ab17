#!/usr/bin/env bash
# Build here, run there, for Python: puts the package with its native module, the tests, the benchmark's peers and every
# Python package that the other machine may lack into one folder, to be copied there by whatever means there is. That machine
# needs a driver, Python and PyTorch (and pytest, hypothesis, transformers for all of the tests).
#
#   tools/remote_python.sh [FOLDER]      builds, and fills FOLDER (build/remote_python) with package.tar.xz and run.sh
#
# and there, in that folder (logs and results go to out/):
#
#   ./run.sh test         tests/python on the GPU
#   ./run.sh check        python -m flash_qla check: all sets but profile
#   ./run.sh suite        all tests, soaks and sizes that take minutes among them, and a short training run: at most
#                         SUITE_SECONDS (300)
#   ./run.sh sanitize     the four compute-sanitizer tools on every kernel (tools/sanitize.sh): two minutes
#   ./run.sh bench        the four result files, h200_forward.json and so on, the most telling rows first: six minutes, or
#                         at most BENCH_SECONDS (340) after decode's 60; a file that lacks rows names them
#   ./run.sh tables       h100_layer.json, h100_portable_forward.json and _backward.json, h100_serving.json, beside fla and,
#                         where they are (FLASH_QLA_ENGINES below), vLLM's and SGLang's operations: ten minutes
#   ./run.sh cards        tests, table and example of several GPUs (tools/several_cards.sh)
#   ./run.sh wheel        the wheel in wheels/, in an environment of its own, with the oldest tvm-ffi (FLASH_QLA_WHEEL below)
#   ./run.sh all          suite, sanitize, check, bench, tables, and wheel where there is one
#
# FLASH_QLA_WHEEL: a wheel (tools/wheel.sh cuda) that goes along, with the oldest tvm-ffi that it takes.
# FLASH_QLA_ENGINES: a folder that `tools/engine_contracts.py fetch` has filled; its engines' operations go along.
# FLASH_QLA_FLA_TILELANG: a folder that benchmarks/peers/fla/build_tilelang.py has filled: fla's backward, too, is timed on
# Hopper with Triton 3.4 to 3.7.0, which it refuses to use there.
# FLASH_QLA_REMOTE_PYTHON (3.12) is the other machine's Python, FLASH_QLA_CMAKE_FLAGS is passed on to CMake, and
# FLASH_QLA_REMOTE_BUILD names another build folder to use than build/remote.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/remote_python} version=${FLASH_QLA_REMOTE_PYTHON:-3.12} build=${FLASH_QLA_REMOTE_BUILD:-build/remote}

# shellcheck disable=SC2086  # several flags in one variable
cmake -S . -B "$build" -DFLASH_QLA_CUDA=ON -DFLASH_QLA_TESTS=ON -DFLASH_QLA_PYTHON=ON -DBUILD_SHARED_LIBS=OFF ${FLASH_QLA_CMAKE_FLAGS:-}
cmake --build "$build" --parallel "$(nproc)" --target flash_qla_ffi cuda_generic_test

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$folder" "$stage"/{repository/benchmarks,site,peers/fla,bin} build/remote_wheels

# download FOLDER PACKAGE: the path of its wheel for the other machine's Python, which is not fetched again where it is there.
download() {
  local name=${2%%==*}
  mkdir -p "$1"
  compgen -G "$1/${name//-/_}-*.whl" >/dev/null || python3 -m pip download --quiet --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
    --dest "$1" "$2" >&2
  compgen -G "$1/${name//-/_}-*.whl" | head -n 1
}
# fetch FOLDER PACKAGE...: unpacks them there.
fetch() {
  local package
  for package in "${@:2}"; do
    python3 -m zipfile -e "$(download "build/remote_wheels/$version" "$package")" "$1"
  done
}
# typer 0.20 is the last that does without a compiled package.
fetch "$stage/site" apache-tvm-ffi pytest-timeout pytest-xdist execnet typer==0.20.0 click==8.3.0 shellingham rich markdown-it-py mdurl pygments
fetch "$stage/peers/fla" fla-core==0.6.0 flash-linear-attention==0.6.0 einops
rm -rf "$stage"/site/tvm_ffi/{include,3rdparty}
# fla imports all its layers and models otherwise, half a minute on a machine that has not read them yet.
sed -i '/^__version__/!d' "$stage/peers/fla/fla/__init__.py"
: >"$stage/peers/fla/fla/ops/__init__.py"
echo "two of its files, which only import the others, are emptied" >"$stage/peers/fla/bench_note.txt"  # for the results' protocol

if [[ -n ${FLASH_QLA_FLA_TILELANG:-} ]]; then
  cp -r "$FLASH_QLA_FLA_TILELANG" "$stage/peers/fla_tilelang"
fi
if [[ -n ${FLASH_QLA_WHEEL:-} ]]; then
  mkdir -p "$stage/wheels"
  floor=$(sed -n 's/^dependencies.*apache-tvm-ffi>=\([0-9.]*\).*/\1/p' pyproject.toml)
  cp "$FLASH_QLA_WHEEL" "$(download "build/remote_wheels/$version/floor" "apache-tvm-ffi==$floor")" "$stage/wheels"
fi
if [[ -n ${FLASH_QLA_ENGINES:-} ]]; then
  for part in vllm/vllm/third_party/flash_linear_attention sglang/sglang/kernels/ops/attention; do
    engine=${part%%/*}
    mkdir -p "$stage/peers/${part%/*}"
    cp -r "$FLASH_QLA_ENGINES/$part" "$stage/peers/$part"
    cp -r "$FLASH_QLA_ENGINES/$engine/$engine"-*.dist-info "$stage/peers/$engine"
  done
fi
cp -r python tests tools docs examples README.md CHANGELOG.md pyproject.toml "$stage/repository"
cp -r benchmarks/recorded "$stage/repository/benchmarks"
strip "$stage/repository/python/flash_qla/_lib/flash_qla_ffi.so"
strip -o "$stage/bin/cuda_generic_test" "$build/tests/cpp/cuda/cuda_generic_test"
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$stage" -cf - . | xz -T0 -6 >"$folder/package.tar.xz"
cp tools/remote_python_run.sh "$folder/run.sh"
du -sh "$folder"
