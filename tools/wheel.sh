#!/usr/bin/env bash
# Makes a wheel for every Linux with glibc 2.28 or newer (py3-none-manylinux_2_28_x86_64) and checks it with
# tools/wheel_check.py. docs/wheels.md says how it is linked.
#
#   tools/wheel.sh cpu|cuda [OUT]       into the folder OUT (build/wheels-manylinux/cpu or /cuda), which is emptied of wheels
#
# FLASH_QLA_WHEEL_BUILD names the build tree (build/wheel-cpu or build/wheel-cuda). In the one that tools/setup.sh leaves,
# build/native, only the module is linked anew, if that build was for the same kind.
# PYTHON names the interpreter that .venv is made with, where there is none yet (python3, 3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-}
case $kind in
  cpu) export FLASH_QLA_CUDA=OFF && options=() ;;
  cuda) export FLASH_QLA_CUDA=ON && options=(--cuda) ;;
  *)
    echo "usage: tools/wheel.sh cpu|cuda [OUT]" >&2
    exit 2
    ;;
esac
machine=$(uname -m)
if [[ $(uname -s) != Linux || $machine != x86_64 ]]; then
  echo "tools/wheel.sh: makes x86_64 wheels on Linux, and this is $(uname -s) on $machine" >&2
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

# glibc 2.28 to link with: ziglang writes libraries that hold nothing but the names and versions of its symbols, and
# libc_nonshared.a, when it first links for that target. Here they get the names by which a linker looks for them.
zig=$(python -c 'import importlib.metadata; print(importlib.metadata.version("ziglang"))')
stubs=$PWD/build/glibc-2.28-$machine-zig-$zig
if [[ ! -e $stubs/libc.so ]]; then
  say "libraries of glibc 2.28 from ziglang $zig"
  rm -rf "$stubs" && mkdir -p "$stubs"
  cache=$(mktemp -d "$PWD/build/zig.XXXXXX")
  trap 'rm -rf "$cache"' EXIT
  echo 'int nothing(void) { return 0; }' >"$cache/nothing.c"
  ZIG_GLOBAL_CACHE_DIR=$cache ZIG_LOCAL_CACHE_DIR=$cache \
    python -m ziglang cc -target "$machine-linux-gnu.2.28" -O2 -shared -o "$cache/nothing.so" "$cache/nothing.c"
  copy() { # copy NAME [AS]
    local found
    found=$(find "$cache/o" -name "$1" | head -n 1)
    if [[ -z $found ]]; then
      echo "tools/wheel.sh: ziglang $zig has not written $1" >&2
      return 1
    fi
    cp "$found" "$stubs/${2:-$1}"
  }
  copy libc.so.6
  copy libc_nonshared.a
  copy libld.so.2 ld-linux-x86-64.so.2
  for library in libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1; do
    copy "$library"
    ln -s "$library" "$stubs/${library%.so.*}.so"
  done
  # Last, as the sign that the folder is whole. What newer versions of glibc have in libc itself is looked for beside it.
  echo 'GROUP(libc.so.6 libc_nonshared.a AS_NEEDED(libpthread.so.0 libdl.so.2 librt.so.1 ld-linux-x86-64.so.2))' >"$stubs/libc.so"
fi

say "flash_qla, CUDA kernels $FLASH_QLA_CUDA, for glibc 2.28"
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
mkdir -p "$tree"
linked=$(mktemp -d "$PWD/$tree/linked.XXXXXX")
pip wheel -q --no-build-isolation --no-deps . -w "$linked" \
  --config-settings=build-dir="$tree" \
  --config-settings=cmake.define.FLASH_QLA_GLIBC_STUBS="$stubs"

say "$platform"
mkdir -p "$out" && rm -f "$out"/flash_qla_native-*.whl
# libtvm_ffi comes with another package, and is in the process when the module is loaded.
auditwheel repair --plat "$platform" --only-plat --exclude libtvm_ffi.so -w "$out" "$linked"/*.whl
rm -rf "$linked"
python tools/wheel_check.py "$out"/*.whl "${options[@]}"
