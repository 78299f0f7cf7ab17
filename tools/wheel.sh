#!/usr/bin/env bash
# Makes a wheel for every Linux with glibc 2.28 or newer (py3-none-manylinux_2_28_x86_64) and checks it with
# tools/wheel_check.py. docs/wheels.md says how it is linked.
#
#   tools/wheel.sh cpu|cuda|cpu-aarch64 [OUT]
#
# The wheel goes into the folder OUT (build/wheels-manylinux/KIND), which is emptied of wheels. cpu-aarch64 is compiled by the
# Clang of ziglang on an x86_64 machine, and cannot be run there.
#
# FLASH_QLA_WHEEL_BUILD names the build tree (build/wheel-KIND). In the one that tools/setup.sh leaves,
# build/native, only the module is linked anew, if that build was for the same kind.
# PYTHON names the interpreter that .venv is made with, where there is none yet (python3, 3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-}
FLASH_QLA_CUDA=OFF machine=x86_64 options=()
case $kind in
  cpu) ;;
  cuda) FLASH_QLA_CUDA=ON options=(--cuda) ;;
  cpu-aarch64) machine=aarch64 ;;
  *)
    echo "usage: tools/wheel.sh cpu|cuda|cpu-aarch64 [OUT]" >&2
    exit 2
    ;;
esac
export FLASH_QLA_CUDA
if [[ $(uname -sm) != "Linux x86_64" ]]; then
  echo "tools/wheel.sh: runs on Linux on x86_64, and this is $(uname -sm)" >&2
  exit 1
fi
out=${2:-build/wheels-manylinux/$kind}
tree=${FLASH_QLA_WHEEL_BUILD:-build/wheel-$kind}
platform=manylinux_2_28_$machine
say() { printf '\033[1m== %s\033[0m\n' "$*"; }

say "packages for building"
[[ -x .venv/bin/pip ]] || "${PYTHON:-python3}" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" PIP_DISABLE_PIP_VERSION_CHECK=1
pip install -q -r tools/wheel_requirements.txt -r <(sed -n '/^# build$/,/^$/p' tools/requirements.txt)
mapfile -t build_packages < <(python tools/build_backend.py)
if ((${#build_packages[@]})); then
  pip install -q "${build_packages[@]}"
fi

zig=$(python -c 'import importlib.metadata; print(importlib.metadata.version("ziglang"))')

# glibc 2.28 to link with: ziglang writes libraries that hold nothing but the names and versions of its symbols, and
# libc_nonshared.a, when it first links for that target. Here they get the names by which a linker looks for them.
make_stubs() { # make_stubs FOLDER
  local cache=$PWD/build/zig-stubs name found
  rm -rf "$1" "$cache" && mkdir -p "$1" "$cache"
  echo 'int nothing(void) { return 0; }' >"$cache/nothing.c"
  ZIG_GLOBAL_CACHE_DIR=$cache ZIG_LOCAL_CACHE_DIR=$cache \
    python -m ziglang cc -target x86_64-linux-gnu.2.28 -O2 -shared -o "$cache/nothing.so" "$cache/nothing.c"
  for name in libc.so.6 libc_nonshared.a libld.so.2 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1; do
    found=$(find "$cache/o" -name "$name" | head -n 1)
    if [[ -z $found ]]; then
      echo "tools/wheel.sh: ziglang $zig has not written $name" >&2
      return 1
    fi
    cp "$found" "$1"
  done
  mv "$1/libld.so.2" "$1/ld-linux-x86-64.so.2"
  for name in libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1; do
    ln -s "$name" "$1/${name%.so.*}.so"
  done
  # Last, as the sign that the folder is whole. What newer versions of glibc have in libc itself is looked for beside it.
  echo 'GROUP(libc.so.6 libc_nonshared.a AS_NEEDED(libpthread.so.0 libdl.so.2 librt.so.1 ld-linux-x86-64.so.2))' >"$1/libc.so"
}

if [[ $machine == x86_64 ]]; then
  stubs=$PWD/build/glibc-2.28-zig-$zig
  if [[ ! -e $stubs/libc.so ]]; then
    say "libraries of glibc 2.28 from ziglang $zig"
    make_stubs "$stubs"
  fi
  settings=(--config-settings=cmake.define.FLASH_QLA_GLIBC_STUBS="$stubs")
else
  say "a compiler for $machine from ziglang $zig, and its libtvm_ffi"
  export ZIG_GLOBAL_CACHE_DIR=$PWD/build/zig-cache ZIG_LOCAL_CACHE_DIR=$PWD/build/zig-cache
  export ZIG_COMMANDS=$PWD/build/zig-commands CMAKE_TOOLCHAIN_FILE=$PWD/cmake/zig_aarch64.cmake
  mkdir -p "$ZIG_COMMANDS"
  for command in 'c++ -target aarch64-linux-gnu.2.28' ar ranlib; do
    printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$(command -v python)" "$command" >"$ZIG_COMMANDS/zig-${command%% *}"
    chmod +x "$ZIG_COMMANDS/zig-${command%% *}"
  done
  tvm_ffi=$PWD/build/tvm-ffi-$machine
  rm -rf "$tvm_ffi"
  pip install -q --no-deps --only-binary :all: --platform "manylinux_2_28_$machine" --target "$tvm_ffi" \
    "$(grep '^apache-tvm-ffi==' tools/requirements.txt)"
  settings=(--config-settings=cmake.define.FLASH_QLA_TVM_FFI_LIBRARY="$tvm_ffi/tvm_ffi/lib/libtvm_ffi.so")
  export _PYTHON_HOST_PLATFORM=$platform # auditwheel knows this machine's tags alone, so the build backend gives this one
fi

say "flash_qla, CUDA kernels $FLASH_QLA_CUDA, for glibc 2.28"
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
mkdir -p "$tree"
linked=$(mktemp -d "$PWD/$tree/linked.XXXXXX")
pip wheel -q --no-build-isolation --no-deps . -w "$linked" \
  --config-settings=build-dir="$tree" "${settings[@]}"

say "$platform"
mkdir -p "$out" && rm -f "$out"/flash_qla_native-*.whl
if [[ $machine == x86_64 ]]; then
  # libtvm_ffi comes with another package, and is in the process when the module is loaded.
  auditwheel repair --plat "$platform" --only-plat --exclude libtvm_ffi.so -w "$out" "$linked"/*.whl
else
  mv "$linked"/*.whl "$out"
fi
rm -rf "$linked"
python tools/wheel_check.py "$out"/*.whl "${options[@]}"
