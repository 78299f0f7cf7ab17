"""The layer check finds a broken arrow, and only that."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import layer_check  # noqa: E402


def test_this_repository_is_clean():
    assert layer_check.broken(ROOT) == []


@pytest.mark.parametrize(
    "file, header",
    [
        ("include/flash_qla/extra.h", "torch/extension.h"),
        ("include/flash_qla/extra.h", "cuda_runtime.h"),
        ("include/flash_qla/extra.h", "tvm/ffi/tvm_ffi.h"),
        ("include/flash_qla/extra.h", "core/problem.h"),
        ("src/core/plan.cpp", "cpu/paths.h"),
        ("src/core/plan.cpp", "cuda/paths.h"),
        ("src/core/plan.cpp", "cuda/ptx"),
        ("src/core/registry.cpp", "cuda_runtime.h"),
        ("src/reference/forward.cpp", "cpu/paths.h"),
        ("src/cpu/forward.cpp", "cuda/paths.h"),
        ("src/cuda/sm90/kernel.cuh", "cpu/paths.h"),
        ("src/cuda/launch.cu", "ATen/ATen.h"),
        ("src/cuda/common/launch.h", "cuda/sm90/common/tile.cuh"),
        ("src/cuda/sm90/common/tile.cuh", "cuda/sm90/chunk_fwd/traits.h"),
        ("src/cuda/sm90/chunk_bwd/path.cu", "cuda/sm90/chunk_fwd/args.h"),
        ("src/cuda/sm90/chunk_fwd/kernel.cuh", "cuda/generic/launch.h"),
        ("src/cuda/generic/decode.cu", "cuda/sm90/common/tile.cuh"),
        ("src/cuda/sm90/launch.cu", "../../cpu/paths.h"),
        ("bindings/ffi/module.cpp", "core/problem.h"),
        ("bindings/ffi/module.cpp", "torch/library.h"),
    ],
)
def test_a_broken_arrow_is_reported(tmp_path, file, header):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"#include <vector>\n#include <{header}>\n")
    (problem,) = layer_check.broken(tmp_path)
    assert problem.startswith(f"{file}:2: ")
    assert header in problem


@pytest.mark.parametrize(
    "file, header",
    [
        ("include/flash_qla/extra.h", "flash_qla/flash_qla.h"),
        ("src/core/registry.cpp", "cuda/paths.h"),
        ("src/core/registry.cpp", "reference/paths.h"),
        ("src/cpu/forward.cpp", "Eigen/Core"),
        ("src/cuda/sm90/kernel.cuh", "cuda/ptx"),
        ("src/cuda/sm90/kernel.cuh", "core/problem.h"),
        ("src/cuda/sm90/chunk_fwd_2cta/kernel.cuh", "cuda/sm90/chunk_fwd/args.h"),
        ("src/cuda/sm90/chunk_bwd/passes/kernel.cuh", "cuda/sm90/common/tile.cuh"),
        ("src/cuda/new/kernel.cuh", "cuda/generic/launch.h"),
        ("src/cuda/sm90/fwd/kernel.cuh", "../../common/tma.cuh"),
        ("bindings/ffi/module.cpp", "tvm/ffi/function.h"),
    ],
)
def test_a_legal_include_passes(tmp_path, file, header):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"#include <{header}>\n")
    assert layer_check.broken(tmp_path) == []
