#!/usr/bin/env python3
"""Checks that includes go one way: python -> bindings -> include <- src/core -> {cpu, cuda, reference}.

    layer_check.py [ROOT]     prints "file:line: why" for every include that breaks a layer; exit code 1 if there is one

The public headers stand alone; the core knows no device. src/core/registry.cpp alone may name the paths of the backends:
it is the table that joins them. Within src/cuda, kernels include what is common to all, or to their GPU, and each other
only where FOLDERS says so.
"""

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
SUFFIXES = {".h", ".hpp", ".cuh", ".c", ".cpp", ".cu"}

# Headers by whom they belong to; the first pattern that matches names the layer.
LAYERS = [
    ("the public interface", re.compile(r"^flash_qla/")),
    ("the core", re.compile(r"^core/")),
    ("the reference", re.compile(r"^reference/")),
    ("the CPU backend", re.compile(r"^cpu/")),
    ("the CUDA backends", re.compile(r"^cuda/(?!(std|ptx|barrier|pipeline|atomic)\b)")),
    ("torch", re.compile(r"^(torch|ATen|c10)/")),
    ("tvm-ffi", re.compile(r"^(tvm|dlpack)/")),
    ("CUDA", re.compile(r"^(cuda|cub|thrust|cooperative_groups|nv/|mma\.h|cutlass|cute)")),
    ("Python", re.compile(r"^(Python\.h|pybind11/)")),
    ("Eigen", re.compile(r"^(Eigen|unsupported/Eigen)")),
]

# What each folder may include beside the standard library. A header that no pattern above knows is standard or local.
ALLOWED = [
    ("include", {"the public interface"}),
    ("src/core", {"the public interface", "the core"}),
    ("src/reference", {"the public interface", "the core", "the reference"}),
    ("src/cpu", {"the public interface", "the core", "the CPU backend", "Eigen"}),
    ("src/cuda", {"the public interface", "the core", "the CUDA backends", "CUDA"}),
    ("bindings", {"the public interface", "tvm-ffi"}),
]
# Of folders of src/cuda: which of each other they may include.
COMMON, SM90 = "cuda/common", "cuda/sm90/common"
FORWARD, CONTEXT_PARALLEL = "cuda/sm90/chunk_fwd", "cuda/sm90/context_parallel"
BACKWARD, GENERIC = "cuda/sm90/chunk_bwd", "cuda/generic"
FOLDERS = {
    COMMON: set(),
    SM90: {COMMON},
    FORWARD: {COMMON, SM90, CONTEXT_PARALLEL},
    "cuda/sm90/chunk_fwd_2cta": {COMMON, SM90, FORWARD, CONTEXT_PARALLEL},
    CONTEXT_PARALLEL: {COMMON, SM90, FORWARD},
    BACKWARD: {COMMON, SM90, CONTEXT_PARALLEL},
    "cuda/sm90/links": {COMMON, SM90, FORWARD, BACKWARD, CONTEXT_PARALLEL, GENERIC, "cuda/oracle"},
    GENERIC: {COMMON, "cuda/oracle"},
    "cuda/oracle": {COMMON, "cuda/generic"},
}
TABLE_OF_PATHS = "src/core/registry.cpp"
MAY_JOIN = {"the reference", "the CPU backend", "the CUDA backends"}


def layer_of(header: str):
    return next((name for name, pattern in LAYERS if pattern.search(header)), None)


def from_source_root(path: Path, header: str, root: Path) -> str:
    """"../common/tma.cuh" as it reads from src: "cuda/common/tma.cuh". Other spellings stay as they are."""
    if not header.startswith("."):
        return header
    target = (path.parent / header).resolve()
    base = (root / "src").resolve()
    return target.relative_to(base).as_posix() if target.is_relative_to(base) else header


def folder_of(name: str):
    """Which of FOLDERS a file or header of src is in, the innermost one; None: none of them."""
    return max((folder for folder in FOLDERS if name.startswith(f"{folder}/")), key=len, default=None)


def broken(root: Path) -> list:
    """One "file:line: why" for every include that goes the wrong way."""
    found = []
    for folder, allowed in ALLOWED:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            name = path.relative_to(root).as_posix()
            legal = allowed | MAY_JOIN if name == TABLE_OF_PATHS else allowed
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                header = from_source_root(path, match[1], root)
                layer = layer_of(header)
                if layer is not None and layer not in legal:
                    found.append(f"{name}:{number}: {folder} may not include {layer} ({match[1]})")
                own, other = folder_of(name.removeprefix("src/")), folder_of(header)
                if own is not None and other not in {None, own} | FOLDERS[own]:
                    found.append(f"{name}:{number}: {own} may not include {other} ({match[1]})")
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    problems = broken(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
