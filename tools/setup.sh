#!/usr/bin/env bash
# Makes .venv in the repository, installs what is missing, and builds and installs flash_qla into it. Run again, it does
# only what has changed.
#
#   tools/setup.sh [--tests]      --tests also builds the C++ tests (in build/native)
#
# FLASH_QLA_CUDA=ON|OFF decides whether the CUDA kernels are compiled; unset: ON where this machine has an NVIDIA GPU.
# PYTHON names the interpreter that .venv is made with (python3, 3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=OFF
[[ "${1:-}" == --tests ]] && tests=ON
python=${PYTHON:-python3}
say() { printf '\033[1m== %s\033[0m\n' "$*"; }

# Debian packages: installed where missing, as root or through a sudo that asks nothing.
apt_get() {
  local as_root=()
  if [[ $(id -u) != 0 ]]; then
    if ! sudo -n true 2>/dev/null; then
      return 1
    fi
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v "$python" >/dev/null || missing+=(python3)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [[ $tests == ON ]]; then
  [[ -e /usr/include/gtest/gtest.h || -e .venv/debian/usr/include/gtest/gtest.h ]] || missing+=(libgtest-dev)
  command -v pkg-config >/dev/null || missing+=(pkg-config)
fi
if ((${#missing[@]})); then
  say "installing Debian packages: ${missing[*]}"
  if ! apt_get "${missing[@]}"; then
    # GoogleTest is headers and two archives, so without root its package can be unpacked instead.
    if [[ " ${missing[*]} " == *" libgtest-dev "* ]] && mkdir -p build/debian && (cd build/debian && apt-get download -qq libgtest-dev); then
      mkdir -p .venv/debian && dpkg -x build/debian/libgtest-dev_*.deb .venv/debian
    fi
    for package in "${missing[@]}"; do
      case $package in
        libgtest-dev) [[ -e .venv/debian/usr/include/gtest/gtest.h ]] && continue ;;
        pkg-config) continue ;; # its test is skipped
      esac
      echo "tools/setup.sh: needs the Debian package $package: run 'apt-get install ${missing[*]}' as root" >&2
      exit 1
    done
  fi
fi

say "Python packages into .venv"
[[ -x .venv/bin/pip ]] || "$python" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" PIP_DISABLE_PIP_VERSION_CHECK=1
pip install -q -r tools/requirements.txt
if [[ -z "${FLASH_QLA_CUDA:-}" ]]; then
  FLASH_QLA_CUDA=OFF
  if nvidia-smi -L 2>/dev/null | grep -q GPU; then
    FLASH_QLA_CUDA=ON
  fi
fi
export FLASH_QLA_CUDA
mapfile -t build_packages < <(python tools/build_backend.py)
if ((${#build_packages[@]})); then
  pip install -q "${build_packages[@]}"
fi

say "flash_qla, CUDA kernels $FLASH_QLA_CUDA"
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export CMAKE_BUILD_PARALLEL_LEVEL
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
rm -rf build/wheels
pip wheel -q --no-build-isolation --no-deps . -w build/wheels \
  --config-settings=build-dir=build/native \
  --config-settings=cmake.define.FLASH_QLA_TESTS=$tests \
  --config-settings=cmake.define.FLASH_QLA_PTXAS_REPORT="${FLASH_QLA_PTXAS_REPORT:-OFF}" \
  --config-settings=cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS=ON \
  --config-settings=cmake.define.FLASH_QLA_GLIBC_STUBS= \
  --config-settings=cmake.define.GTest_ROOT="$PWD/.venv/debian/usr"
pip install -q --no-deps --force-reinstall build/wheels/*.whl
